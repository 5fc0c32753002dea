"""A merged model has the tensors of its base's files: names, shapes and dtypes, per expert where they are so."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.train.result.export import Merged, merge_result
from tests.model.test_stored_formats import save_quantized
from tests.support.e2e import make_model, make_tokenizer
from tests.support.tiny import logits_of

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def layout(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of the tensors of a folder's files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - the handle is no mapping
                view = file.get_slice(key)
                found[key] = (view.get_dtype(), tuple(view.get_shape()))
    return found


def adapter(base: Path, folder: Path, **options: Any) -> Any:
    """A random adapter by PEFT, and its model."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(str(folder))
    make_tokenizer().save_pretrained(str(folder))
    return model


def merge(folder: Path) -> Merged:
    with torch.no_grad():
        return merge_result(folder / "adapter", ModelSource("base", folder / "base"), folder / "merged", None)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]}),
        ("glm4_moe", {"target_modules": ["q_proj"]}),
        ("hrm_text", {"target_modules": ["q_proj", "up_proj"]}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_merged_model_has_the_tensors_of_the_base_s_files(
    tmp_path: Path, model_type: str, options: dict[str, Any]
) -> None:
    """Other programs read the published names, of which the model's own know nothing; it loads without a word."""
    make_model(tmp_path / "base", model_type)
    adapted = adapter(tmp_path / "base", tmp_path / "adapter", **options)
    done = merge(tmp_path)
    assert done.has_base_names and not done.dequantized
    assert layout(tmp_path / "merged") == layout(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    expected = logits_of(adapted)
    assert torch.allclose(logits_of(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_each_tensor_keeps_its_own_dtype_and_its_name_without_a_prefix(tmp_path: Path) -> None:
    """A shared matrix under both names, norms in float32, a layer that the architecture has no place for: all stay."""
    make_model(tmp_path / "base", "llama", dtype="bfloat16", tie_word_embeddings=True)
    path = tmp_path / "base" / "model.safetensors"
    tensors = {key: tensor.float() if "norm" in key else tensor for key, tensor in load_file(path).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.61.extra.weight"] = torch.ones(3)
    save_file({key.removeprefix("model."): tensor for key, tensor in tensors.items()}, path, {"format": "pt"})
    adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["up_proj"])
    merge(tmp_path)
    assert layout(tmp_path / "merged") == layout(tmp_path / "base")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged["lm_head.weight"], merged["embed_tokens.weight"])
    assert not torch.equal(merged["layers.0.mlp.up_proj.weight"], tensors["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(merged["layers.61.extra.weight"], torch.ones(3))


def test_dequantised_weights_are_listed(tmp_path: Path) -> None:
    _, references = save_quantized(tmp_path / "base", "llama", "fp8-blocks")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    unquantised = {key: value for key, value in config.items() if key != "quantization_config"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(unquantised))
    adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["v_proj"])
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    done = merge(tmp_path)
    kinds = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in references}
    assert set(done.dequantized) == kinds
    expected = {key: entry for key, entry in layout(tmp_path / "base").items() if not key.endswith("_scale_inv")}
    expected |= {key: ("BF16", entry[1]) for key, entry in expected.items() if key in references}
    assert layout(tmp_path / "merged") == expected
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
