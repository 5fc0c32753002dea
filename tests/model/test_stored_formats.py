"""Bases as they are published, quantised: every weight as a float64 reference makes it of the layout that its format
publishes, rounded once; the same loss as the model with those weights; refused by name where it cannot be read."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import file_tensors
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.stored.conversions import find_conversions
from roundpipe_cli.model.stored.formats import find_stored
from roundpipe_cli.model.stored.gguf import gguf_weights
from roundpipe_cli.model.stored.scaled_floats import in_8bit
from roundpipe_cli.model.stored.tensors import OpenFiles, own_shapes
from roundpipe_cli.model.weights_io import BaseWeights
from tests.model.test_weights_io import change, gguf_tensors, load, say, write_gguf
from tests.support.every_type import tiny_config_of
from tests.support.tiny import tiny_config

Tensors = dict[str, torch.Tensor]
Made = tuple[Tensors, torch.Tensor]
"""What lies in the files for a weight, by the end of its name, and the weight, float64."""
Make = Callable[[torch.Size, torch.Generator], Made]
DTYPE = torch.bfloat16


def scales_of(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(dtype)


def per_block(scales: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """One scale for each weight, from a grid, by plain indices."""
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return scales.double()[rows][:, columns]


def fp8(block: tuple[int, int] | None, scale_name: str, kind: torch.dtype = torch.float8_e4m3fn) -> Make:
    def make(shape: torch.Size, generator: torch.Generator) -> Made:
        codes = torch.randn(shape, generator=generator).clamp(-4, 4).to(kind)
        if block is None:
            scale = scales_of((), generator)
            return {"weight": codes, scale_name: scale}, codes.double() * scale.double()
        scale = scales_of((-(-shape[0] // block[0]), -(-shape[1] // block[1])), generator)
        return {"weight": codes, scale_name: scale}, codes.double() * per_block(scale, shape, block)

    return make


def fp8_rows(shape: torch.Size, generator: torch.Generator) -> Made:
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = scales_of((shape[0], 1), generator, torch.bfloat16)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}, codes.double() * scale.double()


FORMATS: dict[str, tuple[dict[str, Any], Make]] = {
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, fp8((48, 40), "weight_scale_inv")),
    "fp8-small-blocks": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, fp8((16, 16), "weight_scale_inv")),
    "fp8-one-scale": ({"quant_method": "fp8"}, fp8(None, "weight_scale_inv")),
    "fp8-qscale": ({"quant_method": "fp8"}, fp8(None, "qscale_weight")),
    "fp8-e5m2": ({"quant_method": "fp8"}, fp8(None, "weight_scale_inv", torch.float8_e5m2)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8_rows),
}


def save_quantized(folder: Path, model_type: str, name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A tiny checkpoint in a format; the model with the reference's weights, and those by name in the files."""
    (settings, make), matrices = FORMATS[name], "c_" if model_type == "gpt2" else "_proj."
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
    say(folder, quantization_config=settings)
    return model, references


def check_one_rounding(found: torch.Tensor, reference: torch.Tensor) -> None:
    """Half a unit in the last place of the target's type, and what float32 may add to it."""
    step = torch.finfo(found.dtype).eps * 2.0 ** torch.floor(torch.log2(reference.abs().clamp(min=1e-30)))
    assert bool(((found.double() - reference).abs() <= step * (0.5 + 1e-4)).all())


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *(*(("llama", name) for name in FORMATS), ("gpt2", "fp8-one-scale")),
        ("qwen3_moe", "fp8-blocks"),  # as DeepSeek is published: a tensor per expert, fused in the model
    ],
)
def test_dequantised_weights_are_those_of_the_published_layout(tmp_path: Path, model_type: str, name: str) -> None:
    """And all others are as they were. Story: files hold gpt2's matrices with outputs first; they were taken so."""
    model, references = save_quantized(tmp_path, model_type, name)
    store, notices, _ = load(tmp_path, DTYPE)
    assert references and f"{len(references)} weights are quantised in the files" in notices[-1]
    assert len(notices) == 1
    for key, parameter in model.named_parameters():
        assert store.views[key].shape == parameter.shape
        if key in references:
            check_one_rounding(store.views[key], references[key])
        else:
            assert torch.equal(store.views[key], parameter), key


def test_fused_experts_in_fp8(tmp_path: Path) -> None:
    """Some checkpoints hold all experts of a layer in one tensor, with a scale grid for each."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(3, 40, 24, generator=generator).to(torch.float8_e4m3fn)
    scale = scales_of((3, 5, 3), generator)
    save_file({"w": codes, "s": scale}, tmp_path / "model.safetensors")
    pieces = file_tensors([tmp_path / "model.safetensors"])
    with OpenFiles() as files:
        whole = in_8bit(pieces["w"], pieces["s"], torch.float32, (8, 8)).read(files)
    for expert in range(3):
        check_one_rounding(whole[expert], codes[expert].double() * per_block(scale[expert], codes.shape[1:], (8, 8)))


def test_fp8_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", "fp8-small-blocks")
    config = FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=DTYPE, quantization_config=config)
    store, *_ = load(tmp_path, DTYPE)
    ours = AutoModelForCausalLM.from_config(theirs.config, dtype=DTYPE)
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.copy_(store.views[key])
    ids = torch.arange(24).reshape(2, 12)
    losses = [float(model(input_ids=ids, labels=ids).loss.detach()) for model in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_a_quantised_weight_without_its_scales_is_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "llama", "fp8-blocks")
    change(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight_scale_inv"))
    with pytest.raises(RefusedError, match="cannot be read") as caught:
        load(tmp_path, DTYPE)
    assert "model.layers.1.mlp.up_proj" in str(caught.value)


def test_blocks_end_where_the_settings_or_the_usual_block_say(tmp_path: Path) -> None:
    """Story: 160 rows in two blocks were taken for two of 80 where the block was 128 and the configuration silent."""
    files, reference = fp8((128, 128), "weight_scale_inv")(torch.Size((160, 320)), torch.Generator().manual_seed(0))
    save_file({f"up_proj.{end}": part for end, part in files.items()}, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with OpenFiles() as opened:
        check_one_rounding(find_stored(tmp_path, DTYPE)["up_proj.weight"].read(opened), reference)
    say(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})
    with OpenFiles() as opened, pytest.raises(RefusedError, match="not as its format has it"):
        find_stored(tmp_path, DTYPE)["up_proj.weight"].read(opened)


def save_mxfp4(folder: Path) -> None:
    """A tiny checkpoint as GPT-OSS is published, with scales that differ."""
    AutoModelForCausalLM.from_config(tiny_config("gpt_oss"), dtype=DTYPE).save_pretrained(folder)
    path, generator, tensors = folder / "model.safetensors", torch.Generator().manual_seed(0), {}
    for key, tensor in load_file(path).items():
        if tensor.ndim < 3:
            tensors[key] = tensor
            continue
        experts, rows, columns = tensor.shape  # the files have them the other way round
        shape = (experts, columns, rows // 32)
        tensors[f"{key}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(115, 122, shape, generator=generator).to(torch.uint8)
    assert sum(key.endswith("_blocks") for key in tensors) == 6
    save_file(tensors, path, {"format": "pt"})
    say(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def test_mxfp4_loads_as_in_transformers(tmp_path: Path) -> None:
    """transformers dequantises it without another library."""
    save_mxfp4(tmp_path)
    dequantizing = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPE, quantization_config=dequantizing)
    store, *_ = load(tmp_path, DTYPE)
    assert all(torch.equal(store.views[key], parameter) for key, parameter in theirs.named_parameters())


# -- weights that are made of several tensors of the files, one expert at a time -------------------------------------


def test_memory_holds_the_fused_weight_and_one_expert() -> None:
    """All experts of a layer, stacked and joined as transformers does, would be held three times."""
    model = build_skeleton(tiny_config("qwen3_moe"), torch.float32)
    own = own_shapes(model)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    num_experts, rows, columns = own[name]
    shapes = {
        f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight": torch.Size((rows // 2, columns))
        for expert in range(num_experts)
        for kind in ("gate", "up")
    }
    found = find_conversions(model, shapes, own).found
    assert [list(conversion.targets) for conversion in found] == [[name]]
    alive: list[weakref.ref[torch.Tensor]] = []
    held, given = [], {}

    def read(key: str) -> torch.Tensor:
        tensor = torch.randn(shapes[key])
        given[key] = tensor.clone()
        held.append(sum(one() is not None for one in alive))
        alive.append(weakref.ref(tensor))
        return tensor

    whole = found[0].apply(read, model)[name]
    path = name.rpartition(".")[0]
    for expert in range(num_experts):
        parts = [given[f"{path}.{expert}.{kind}_proj.weight"] for kind in ("gate", "up")]
        assert torch.equal(whole[expert], torch.cat(parts))
    assert max(held) <= 3, held


def test_fused_experts_of_a_gguf_file_are_dequantised_one_at_a_time(tmp_path: Path) -> None:
    """llama.cpp keeps gates and what they multiply apart; both are quantised here."""
    config = tiny_config("qwen3_moe", num_hidden_layers=1)
    model = build_skeleton(config, torch.float32)
    own = own_shapes(model)
    num_experts, rows, columns = own["model.layers.0.mlp.experts.gate_up_proj"]
    generator = numpy.random.default_rng(0)
    expected, tensors = {}, {}
    for kind in ("gate", "up"):
        values = generator.standard_normal((num_experts, rows // 2, columns), dtype=numpy.float32)
        codes = quantize(values, GGMLQuantizationType.Q8_0)
        expected[kind] = torch.from_numpy(dequantize(codes, GGMLQuantizationType.Q8_0))
        tensors[f"blk.0.ffn_{kind}_exps.weight"] = codes
    embedding = generator.standard_normal(tuple(own["model.embed_tokens.weight"]), dtype=numpy.float32)
    write_gguf(tmp_path / "m.gguf", "qwen3moe", 1, {**tensors, "token_embd.weight": embedding})
    groups, unread = gguf_weights(ModelSource("m", tmp_path, "m.gguf"), model)
    assert not unread
    found = {next(iter(group.targets)): group.read(OpenFiles(), None) for group in groups}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(found[name][name], torch.cat([expected["gate"], expected["up"]], dim=1))
    name = "model.embed_tokens.weight"
    assert torch.equal(found[name][name], torch.from_numpy(embedding))


def test_a_gguf_file_is_read_into_a_model_with_adapters(tmp_path: Path) -> None:
    """Adapters put other names around the weights; transformers' table of names then knew none of them."""
    plain, adapted = (build_skeleton(tiny_config("llama"), torch.float32) for _ in range(2))
    write_gguf(tmp_path / "m.gguf", "llama", 3, gguf_tensors(plain))
    add_lora(adapted, LoraSettings(r=2, alpha=2), dtype=torch.float32, base_name="t", blocks_path="model.layers")
    source = ModelSource("m", tmp_path, "m.gguf")
    expected, found = (BaseWeights(source, model, torch.float32) for model in (plain, adapted))
    assert sorted(found) == sorted(expected) == sorted(name for name, _ in plain.named_parameters())
    assert all(torch.equal(found[name], expected[name]) and found[name].any() for name in found)


LFM2_NAMES = {
    **{"operator_norm": "attn_norm", "self_attn.out_proj": "attn_output", "self_attn": "attn", "_layernorm": "_norm"},
    **{"feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down", "_proj": ""},
    **{"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm", "model.layers": "blk"},
    **{".conv.conv": ".shortconv.conv", ".conv.in": ".shortconv.in_proj", ".conv.out": ".shortconv.out_proj"},
    "attn.": "attn_",
}


def test_a_gguf_file_is_read_by_transformers_rules(tmp_path: Path) -> None:
    """Newer types have no table of names: rules rename, and change the shapes of short convolutions."""
    pytest.importorskip("transformers.integrations.gguf.gguf_conversion_mapping")
    config = tiny_config_of("lfm2", layer_types=["conv", "full_attention", "conv"])
    model = build_skeleton(config, torch.float32)
    add_lora(model, LoraSettings(r=2, alpha=2), dtype=torch.float32, base_name="t", blocks_path="model.layers")
    expected, tensors = {}, {}
    for name, shape in own_shapes(build_skeleton(config, torch.float32)).items():
        short = functools.reduce(lambda text, item: text.replace(*item), LFM2_NAMES.items(), name)
        expected[name] = torch.randn(shape)
        tensors[short] = expected[name].squeeze().numpy()
    write_gguf(tmp_path / "m.gguf", "lfm2", 3, tensors)
    found = BaseWeights(ModelSource("m", tmp_path, "m.gguf"), model, torch.float32)
    assert sorted(found) == sorted(expected) and all(torch.equal(found[name], expected[name]) for name in found)
