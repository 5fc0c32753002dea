"""Quantised checkpoints against the dequantisation of the library that makes them, where it is installed.

`pip install compressed-tensors` for this file; on 2026-11-23 it passed with 0.20.0.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.test_stored_formats import DTYPE, load, save_quantized
from tests.support.tiny import tiny_config

NVFP4 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
WEIGHTS: dict[str, dict[str, Any]] = {
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "int-quantized": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "pack-4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "nvfp4": {"num_bits": 4, "type": "float", **NVFP4, "zp_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}
"""How the library describes the weights of each format."""


@pytest.mark.parametrize("name", WEIGHTS)
def test_compressed_tensors_load_as_in_transformers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    _, references = save_quantized(tmp_path, "llama", name)
    config = json.loads((tmp_path / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **WEIGHTS[name]}}
    more = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quantization_status": "compressed"}
    config["quantization_config"] |= more
    (tmp_path / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dequantizing = CompressedTensorsConfig(run_compressed=False)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPE, quantization_config=dequantizing)
    store, _ = load(tmp_path)
    parameters = dict(theirs.named_parameters())
    assert references and all(torch.equal(store.views[key], parameters[key]) for key in references)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = float(theirs(input_ids=ids, labels=ids).loss)
        ours = AutoModelForCausalLM.from_config(theirs.config, dtype=DTYPE)
        for key, parameter in ours.named_parameters():
            parameter.copy_(store.views[key])
        assert float(ours(input_ids=ids, labels=ids).loss) == pytest.approx(expected, abs=1e-4)


def test_mxfp4_loads_as_in_transformers(tmp_path: Path) -> None:
    """As GPT-OSS is published, with scales that differ; transformers dequantises it without another library."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = AutoModelForCausalLM.from_config(tiny_config("gpt_oss"), dtype=DTYPE)
    model.save_pretrained(tmp_path)
    path, generator, tensors = tmp_path / "model.safetensors", torch.Generator().manual_seed(0), {}
    for key, tensor in load_file(path).items():
        if tensor.ndim < 3:
            tensors[key] = tensor
            continue
        experts, rows, columns = tensor.shape  # the files have them the other way round
        shape = (experts, columns, rows // 32)
        tensors[f"{key}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(115, 122, shape, generator=generator).to(torch.uint8)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    dequantizing = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPE, quantization_config=dequantizing)
    store, _ = load(tmp_path)
    parameters = dict(theirs.named_parameters())
    assert sum(key.endswith("_blocks") for key in tensors) == 6
    assert all(torch.equal(store.views[key], parameter) for key, parameter in parameters.items())
