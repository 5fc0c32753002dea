"""Bases as they are published, quantised: every weight as a float64 reference makes it of the layout that its format
publishes, rounded once; the same loss as the model with those weights; refused by name where it cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.layout import layer_parameters, make_layout
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.weights_io import BaseWeights, load_weights
from tests.support.tiny import tiny_config

Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]
"""What lies in the files for a weight, by the end of its name, and the weight, float64."""
Make = Callable[[torch.Size, torch.Generator], Made]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]).double()
DTYPE = torch.bfloat16


def codes_of(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=generator)


def scales_of(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(dtype)


def per_group(scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """One scale for each weight, from a grid, by plain indices."""
    rows = torch.arange(shape[0]) // -(-shape[0] // scales.shape[0])
    columns = torch.arange(shape[1]) // -(-shape[1] // scales.shape[1])
    return scales.double()[rows][:, columns]


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Int32 words along the last dimension, bit by bit."""
    lists = codes.reshape(-1, codes.shape[-1]).tolist()
    rows = []
    for row in lists:
        stream = sum(code << (bits * place) for place, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        words = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(count)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32).reshape(*codes.shape[:-1], -1)


def fp8(block: tuple[int, int] | None, scale_name: str, kind: torch.dtype = torch.float8_e4m3fn) -> Make:
    def make(shape: torch.Size, generator: torch.Generator) -> Made:
        codes = torch.randn(shape, generator=generator).clamp(-4, 4).to(kind)
        if block is None:
            scale = scales_of((), generator)
            return {"weight": codes, scale_name: scale}, codes.double() * scale.double()
        scale = scales_of((-(-shape[0] // block[0]), -(-shape[1] // block[1])), generator)
        rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
        return {"weight": codes, scale_name: scale}, codes.double() * scale.double()[rows][:, columns]

    return make


def fp8_rows(shape: torch.Size, generator: torch.Generator) -> Made:
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = scales_of((shape[0], 1), generator, torch.bfloat16)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}, codes.double() * scale.double()


def mxfp8(shape: torch.Size, generator: torch.Generator) -> Made:
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.randint(118, 124, (shape[0], shape[1] // 32), generator=generator, dtype=torch.uint8)
    scale = 2.0 ** (exponents.double() - 127)
    return {"weight": codes, "weight_scale": exponents}, codes.double() * per_group(scale, shape)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def mxfp4(shape: torch.Size, generator: torch.Generator) -> Made:
    codes = codes_of(shape, 4, generator)
    exponents = torch.randint(118, 124, (shape[0], shape[1] // 32), generator=generator, dtype=torch.uint8)
    weight = E2M1[codes] * per_group(2.0 ** (exponents.double() - 127), shape)
    return {"weight_packed": nibbles(codes), "weight_scale": exponents}, weight


def nvfp4(packed: str, second: str, divides: bool) -> Make:
    def make(shape: torch.Size, generator: torch.Generator) -> Made:
        codes = codes_of(shape, 4, generator)
        scale = (torch.rand(shape[0], shape[1] // 16, generator=generator) * 8 + 0.5).to(torch.float8_e4m3fn)
        factor = torch.tensor([311.7 if divides else 0.003217])
        weight = E2M1[codes] * per_group(scale, shape)
        weight = weight / factor.double() if divides else weight * factor.double()
        return {packed: nibbles(codes), "weight_scale": scale, second: factor}, weight

    return make


def packed_int(bits: int, zero_points: bool, shuffled: bool = False) -> Make:
    def make(shape: torch.Size, generator: torch.Generator) -> Made:
        codes, offset = codes_of(tuple(shape), bits, generator), 1 << (bits - 1)
        scale = scales_of((shape[0], shape[1] // 32), generator, torch.bfloat16)
        zeros = codes_of(tuple(scale.shape), bits, generator) if zero_points else torch.full(scale.shape, offset)
        groups = torch.arange(shape[1]) // 32
        groups = groups[torch.randperm(shape[1], generator=generator)] if shuffled else groups
        weight = (codes - zeros[:, groups]).double() * scale.double()[:, groups]
        files = {"weight_packed": words_of(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor(shape)}
        files |= {"weight_zero_point": words_of(zeros.T, bits).T.contiguous()} if zero_points else {}
        unset = torch.full((shape[1],), -1, dtype=torch.int32)
        files |= {"weight_g_idx": groups.int() if shuffled else unset} if shuffled or not zero_points else {}
        return files, weight

    return make


def int8(shape: torch.Size, generator: torch.Generator) -> Made:
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    scale = scales_of((shape[0], 1), generator)
    return {"weight": codes, "weight_scale": scale}, codes.double() * scale.double()


def group(bits: int, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **more}}


COMPRESSED = {"quant_method": "compressed-tensors"}
FORMATS: dict[str, tuple[dict[str, Any], Make]] = {
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, fp8((48, 40), "weight_scale_inv")),
    "fp8-one-scale": ({"quant_method": "fp8"}, fp8(None, "weight_scale_inv")),
    "fp8-qscale": ({"quant_method": "fp8"}, fp8(None, "qscale_weight")),
    "fp8-e5m2": ({"quant_method": "fp8"}, fp8(None, "weight_scale_inv", torch.float8_e5m2)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8_rows),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8(None, "weight_scale")),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        nvfp4("weight", "weight_scale_2", divides=False),
    ),
    "float-quantized": ({**COMPRESSED, "format": "float-quantized"}, fp8_rows),
    "int-quantized": ({**COMPRESSED, "format": "int-quantized"}, int8),
    "mxfp8": ({**COMPRESSED, "format": "mxfp8-quantized"}, mxfp8),
    "pack-4": (
        {**COMPRESSED, "format": "pack-quantized", "config_groups": {"a": group(4)}},
        packed_int(4, zero_points=False),
    ),
    "pack-4-zeros": (
        {**COMPRESSED, "format": "pack-quantized", "config_groups": {"a": group(4)}},
        packed_int(4, zero_points=True, shuffled=True),
    ),
    "pack-3": (
        {**COMPRESSED, "format": "pack-quantized", "config_groups": {"a": group(3)}},
        packed_int(3, zero_points=True),
    ),
    "nvfp4": (
        {**COMPRESSED, "format": "nvfp4-pack-quantized"},
        nvfp4("weight_packed", "weight_global_scale", divides=True),
    ),
    "mxfp4": ({**COMPRESSED, "format": "mxfp4-pack-quantized"}, mxfp4),
}


def save_quantized(
    folder: Path, model_type: str, name: str, matrices: str = "_proj."
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A tiny checkpoint in a format; the model with the reference's weights, and those by name in the files.

    Args:
        matrices: part of the names of what is quantised.
    """
    from transformers import AutoModelForCausalLM

    settings, make = FORMATS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=DTYPE)
    model.save_pretrained(str(folder))
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    plain, files, references = load_file(path), {}, {}
    for key, tensor in plain.items():
        if tensor.ndim == 2 and matrices in key:
            is_turned = model_type == "gpt2"  # Conv1D has its inputs first, files have outputs first
            made, weight = make(torch.Size(reversed(tensor.shape)) if is_turned else tensor.shape, generator)
            weight = weight.T if is_turned else weight
            files |= {f"{key.removesuffix('weight')}{end}": part.contiguous() for end, part in made.items()}
            references[key] = weight
        else:
            files[key] = tensor
    save_file(
        {**plain, **{key: weight.to(DTYPE).contiguous() for key, weight in references.items()}}, path, {"format": "pt"}
    )
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=DTYPE)
    save_file(files, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return model, references


def load(folder: Path) -> tuple[WeightStore, list[str]]:
    source = ModelSource("tiny", folder)
    skeleton = build_skeleton(load_config(source), DTYPE)
    split = split_model(skeleton)
    for parameter in skeleton.parameters():
        parameter.requires_grad_(False)
    layouts = [
        make_layout(name, parameters, DTYPE)
        for name, parameters in zip(split.layer_names(), layer_parameters(skeleton, split), strict=True)
    ]
    store = WeightStore(layouts)
    return store, load_weights(source, skeleton, store.set_parameter)


def check_one_rounding(found: torch.Tensor, reference: torch.Tensor) -> None:
    """Half a unit in the last place of the target's type, and what float32 may add to it."""
    step = torch.finfo(found.dtype).eps * 2.0 ** torch.floor(torch.log2(reference.abs().clamp(min=1e-30)))
    assert bool(((found.double() - reference).abs() <= step * (0.5 + 1e-4)).all())


@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_weights_are_those_of_the_published_layout(tmp_path: Path, name: str) -> None:
    """And all others are as they were: the store has what the model with the reference's weights has."""
    model, references = save_quantized(tmp_path, "llama", name)
    store, notices = load(tmp_path)
    assert references and f"{len(references)} weights are quantised in the files" in notices[-1]
    assert len(notices) == 1
    for key, parameter in model.named_parameters():
        if key in references:
            check_one_rounding(store.views[key], references[key])
        else:
            assert torch.equal(store.views[key], parameter), key


@pytest.mark.parametrize("name", ["fp8-one-scale", "pack-4"])
def test_quantised_conv1d_is_turned(tmp_path: Path, name: str) -> None:
    """Story: files hold gpt2's matrices with outputs first; square ones were taken as they are, others refused."""
    model, references = save_quantized(tmp_path, "gpt2", name, matrices="c_")
    store, _ = load(tmp_path)
    kinds = {key.rsplit(".", 2)[1]: tuple(weight.shape) for key, weight in references.items()}
    assert kinds["c_proj"] != kinds["c_attn"]
    for key, weight in references.items():
        assert tuple(store.views[key].shape) == tuple(model.get_parameter(key).shape)
        check_one_rounding(store.views[key], weight)


@pytest.mark.parametrize("name", FORMATS)
def test_the_first_loss_is_that_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    model, _ = save_quantized(tmp_path, "llama", name)
    store, _ = load(tmp_path)
    ids = torch.arange(24).reshape(2, 12) % 128
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=ids).loss)
        for key, parameter in model.named_parameters():
            parameter.copy_(store.views[key])
        assert float(model(input_ids=ids, labels=ids).loss) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["fp8-blocks", "pack-4", "modelopt-nvfp4"])
def test_quantised_experts_are_fused(tmp_path: Path, name: str) -> None:
    """DeepSeek and Kimi are published so: one quantised tensor per expert, fused in the model."""
    model, references = save_quantized(tmp_path, "qwen3_moe", name)
    store, _ = load(tmp_path)
    assert any(".experts.3." in key for key in references)
    for key, parameter in model.named_parameters():
        assert torch.equal(store.views[key], parameter), key


def test_fused_experts_in_fp8(tmp_path: Path) -> None:
    """Some checkpoints hold all experts of a layer in one tensor, with a scale grid for each."""
    from roundpipe_cli.model.stored.formats import in_8bit
    from roundpipe_cli.model.stored.tensors import OpenFiles, find_file_tensors

    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(3, 40, 24, generator=generator).to(torch.float8_e4m3fn)
    scale = scales_of((3, 5, 3), generator)
    save_file({"w": codes, "s": scale}, tmp_path / "model.safetensors")
    pieces = find_file_tensors(tmp_path)
    with OpenFiles() as files:
        whole = in_8bit(pieces["w"], pieces["s"], torch.float32, (8, 8)).read(files)
    for expert in range(3):
        check_one_rounding(whole[expert], codes[expert].double() * per_group(scale[expert], (40, 24)))


def test_fp8_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """And the first loss is that of transformers' own load."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    FORMATS["fp8-16"] = (settings, fp8((16, 16), "weight_scale_inv"))
    try:
        save_quantized(tmp_path, "llama", "fp8-16")
    finally:
        del FORMATS["fp8-16"]
    config = FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=DTYPE, quantization_config=config)
    store, _ = load(tmp_path)
    ours = AutoModelForCausalLM.from_config(theirs.config, dtype=DTYPE)
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.copy_(store.views[key])
    ids = torch.arange(24).reshape(2, 12)
    losses = [float(model(input_ids=ids, labels=ids).loss.detach()) for model in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "end", "said"),
    [
        ("fp8-blocks", "weight_scale_inv", "cannot be read"),
        ("pack-4", "weight_scale", "not as its format has it"),
    ],
)
def test_a_quantised_weight_without_its_scales_is_refused(tmp_path: Path, name: str, end: str, said: str) -> None:
    save_quantized(tmp_path, "llama", name)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.1.mlp.up_proj.{end}"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(RefusedError, match=said) as caught:
        load(tmp_path)
    assert "model.layers.1.mlp.up_proj" in str(caught.value)


def test_an_export_has_dequantised_weights_in_the_configuration_s_type(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", "pack-4")
    source = ModelSource("tiny", tmp_path)
    base = BaseWeights(source, build_skeleton(load_config(source), torch.float32), DTYPE)
    assert base.dtype("model.layers.0.mlp.up_proj.weight") == DTYPE
    assert "model.layers.0.mlp.up_proj.weight_packed" not in base.stored
