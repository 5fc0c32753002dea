"""Models that were saved in bitsandbytes' 4 bit: read as they are; other quantised files: refused with advice."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundpipe_cli.costs.models import MODELOPT_NAME
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.stored.nf4 import STATE
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes
from roundpipe_cli.model.stored.tensors import base_name
from roundpipe_cli.model.weights_io import BaseWeights
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare
from tests.model.test_weights_io import load
from tests.support.e2e import STAGES, edit_json, finetune, make_model, make_workspace, run

pytest.importorskip("bitsandbytes", reason="needs the extra 4bit")
import_bitsandbytes()


def save_in_4bit(model: Path, folder: Path, *, double: bool) -> Any:
    """What transformers makes of `model`, saved into `folder` with the tokenizer."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kind: Any = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=double, **kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(str(model), quantization_config=settings, device_map="cpu")
        theirs.save_pretrained(str(folder))
    for path in [*model.glob("tokenizer*"), *model.glob("*.jinja")]:
        shutil.copy(path, folder)
    return theirs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bool, Any]]:
    """A folder with `whole`, `single` and `double`, and transformers' models of the last two."""
    folder = tmp_path_factory.mktemp("quantized")
    whole = make_model(folder / "whole")
    names = {False: "single", True: "double"}
    return folder, {double: save_in_4bit(whole, folder / name, double=double) for double, name in names.items()}


def workspace(folder: Path, model: Path) -> Path:
    return make_workspace(folder, model, lora__dropout=0.0, max_steps=1, **STAGES)


def prepared(work: Path, *overrides: str) -> Setup:
    loaded = load_recipe(work / "recipe.yaml", [f"model={work}/model", *overrides])
    return prepare(loaded, offline=True, tell=lambda event: None)


@pytest.mark.parametrize("double", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_the_store_holds_what_transformers_holds(saved: tuple[Path, Any], tmp_path: Path, double: bool) -> None:
    """Also where the scales are quantised once more; and the weights that an export merges into."""
    from bitsandbytes.functional import dequantize_4bit

    folder, theirs = saved
    work = workspace(tmp_path / "w", folder / ("double" if double else "single"))
    setup = prepared(work)
    config = load_config(setup.source)
    assert not hasattr(config, "quantization_config")
    base = BaseWeights(setup.source, build_skeleton(config, torch.float32), torch.float32)
    places = {place.name: place for layout in setup.store.layouts for place in layout.places if not place.trainable}
    num_packed = 0
    for name, parameter in theirs[double].named_parameters():
        packed = parameter.dtype == torch.uint8
        whole = dequantize_4bit(parameter.data, parameter.quant_state) if packed else parameter.data
        own = next(own for own in places if base_name(own) == name)
        assert bool(places[own].packed_as) == packed
        assert torch.equal(setup.store.base_weight(own), whole), name
        assert torch.equal(base[name], whole), name
        num_packed += packed
    assert num_packed == 7 * 3


def test_what_is_trained_is_a_model_packed_while_loading(saved: tuple[Path, Any], tmp_path: Path) -> None:
    """The same bits in the store, which are near those of an unpacked one; 8 bit is nearer."""
    whole, single = (workspace(tmp_path / name, saved[0] / name) for name in ("whole", "single"))
    of_words: Any = ((whole, ()), (whole, ("load_in_4bit=true",)), (single, ()), (whole, ("load_in_8bit=true",)))
    unpacked, packed, stored, in_8bit = (prepared(work, *words).store for work, words in of_words)
    frozen = [place.name for layout in packed.layouts for place in layout.places if not place.trainable]
    assert all(torch.equal(stored.views[name], packed.views[name]) for name in frozen)
    matrices = [name for name in frozen if name.endswith("base_layer.weight")]
    assert len(matrices) == 7 * 3
    for name in matrices:
        exact = unpacked.base_weight(name)
        apart = [float((store.base_weight(name) - exact).norm() / exact.norm()) for store in (packed, in_8bit)]
        assert 0 < apart[1] < 0.02 < apart[0] < 0.12, apart
    finetune(single).expect(0)
    with pytest.raises(RefusedError, match="in which they stay[^!]*unquantised model") as refused:
        prepared(single, "method=full")
    assert refused.value.exit_code == 2


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """What llm-compressor writes of a form."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    more = {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ, 4 bits"),
        ({"quant_method": "awq", "w_bit": 4, "version": "gemm"}, "AWQ, 4 bits"),
        (compressed("pack-quantized", num_bits=4, type="int", group_size=128), "compressed-tensors, pack-quantized"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), "tensors, nvfp4-pack-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}, "modelopt, NVFP4"),
        ({MODELOPT_NAME: {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, f"{MODELOPT_NAME}, NVFP4"),
        ({"quant_method": "hqq", "bits": 4}, "hqq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "fp4 in 4 bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8"),
        ({"bits": 3}, "of an unknown kind"),
    ],
)
def test_other_forms_are_refused_with_advice(saved: Any, tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    work = workspace(tmp_path / "w", saved[0] / "whole")
    if MODELOPT_NAME in settings:
        edit_json(work / "model" / MODELOPT_NAME, producer={"name": "modelopt"}, quantization=settings[MODELOPT_NAME])
        edit_json(work / "model" / "config.json", quantization_config=None)
        assert run(work, "plan", "recipe.yaml").expect(2).err.count(named) == 1, "16 bit were counted"
    else:
        edit_json(work / "model" / "config.json", quantization_config=settings)
    with pytest.raises(RefusedError, match="quantised in a form that cannot be read") as error:
        prepared(work)
    problem = error.value.problems[0]
    assert named in str(problem.found) and "load_in_4bit" in str(problem.expected)
    assert re.search(r"unquantised model, with load_in_4bit: true: .* in 16 bit; .* of host memory", problem.hint or "")


Change = Callable[[dict[str, torch.Tensor], str], Any]


def as_fp8_of_an_unquantised_model(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def changed_state(**changes: Any) -> Change:
    def change(tensors: dict[str, torch.Tensor], name: str) -> None:
        state = {**json.loads(bytes(tensors[f"{name}.{STATE}"].numpy())), **changes}
        tensors[f"{name}.{STATE}"] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, name: tensors.pop(f"{name}.absmax"), "not as bitsandbytes writes it"),
        (lambda tensors, name: tensors[f"{name}.quant_map"].add_(0.01), "another code"),
        (lambda tensors, name: tensors[f"{name}.absmax"][0].fill_(float("inf")), "not finite"),
        (changed_state(blocksize=128), "another code"),
        (changed_state(shape=[64, 64]), "not whole"),
        (changed_state(shape=[128, 64]), "another shape"),
        (changed_state(dtype="int8"), "not as bitsandbytes writes it"),
        (as_fp8_of_an_unquantised_model, "quantised in a form that cannot be read"),
    ],
)
def test_damaged_files_are_refused(saved: tuple[Path, Any], tmp_path: Path, change: Change, said: str) -> None:
    """And files that hold 8-bit floats without a word about it."""
    work = workspace(tmp_path / "w", saved[0] / ("whole" if change is as_fp8_of_an_unquantised_model else "single"))
    path = work / "model" / "model.safetensors"
    tensors = load_file(path)
    change(tensors, "model.layers.1.mlp.down_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RefusedError, match=said):
        load(work / "model")
