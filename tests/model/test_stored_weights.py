"""Weights that are made of several tensors of the files: one expert at a time, from safetensors and from GGUF."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.stored import packed_weights
from roundpipe_cli.model.stored.conversions import find_conversions
from roundpipe_cli.model.stored.gguf import gguf_weights
from roundpipe_cli.model.stored.tensors import own_shapes
from roundpipe_cli.model.weights_io import BaseWeights
from tests.support.e2e import smollm2_source
from tests.support.tiny import tiny_config


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
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "qwen3moe")
    writer.add_name("tiny")
    writer.add_block_count(1)
    generator = numpy.random.default_rng(0)
    expected = {}
    for kind in ("gate", "up"):
        values = generator.standard_normal((num_experts, rows // 2, columns), dtype=numpy.float32)
        codes = quantize(values, GGMLQuantizationType.Q8_0)
        expected[kind] = torch.from_numpy(dequantize(codes, GGMLQuantizationType.Q8_0))
        writer.add_tensor(f"blk.0.ffn_{kind}_exps.weight", codes, raw_dtype=GGMLQuantizationType.Q8_0)
    embedding = generator.standard_normal(tuple(own["model.embed_tokens.weight"]), dtype=numpy.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    groups, unread = gguf_weights(ModelSource("m", tmp_path, "m.gguf"), model)
    assert not unread
    found = {next(iter(targets)): read for targets, read, _ in groups}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(found[name]()[name], torch.cat([expected["gate"], expected["up"]], dim=1))
    name = "model.embed_tokens.weight"
    assert torch.equal(found[name]()[name], torch.from_numpy(embedding))


def test_a_real_gguf_file_is_read_into_a_model_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters put other names around the weights; transformers' table of names then knew none of them."""
    source = smollm2_source()
    config = load_config(source)
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))  # it reads its 49,152 tokens one by one
    plain = build_skeleton(config, torch.float32)
    expected = BaseWeights(source, plain, torch.float32)
    adapted = build_skeleton(config, torch.float32)
    blocks = split_model(adapted).blocks_path
    add_lora(adapted, LoraSettings(r=2, alpha=2), dtype=torch.float32, base_name="t", blocks_path=blocks)
    found = BaseWeights(source, adapted, torch.float32)
    assert sorted(found) == sorted(expected) and len(found) == len(list(plain.named_parameters()))
    name = "model.layers.29.self_attn.k_proj.weight"
    assert torch.equal(found[name], expected[name]) and found[name].std() > 0


def test_packing_some_weights_at_a_time_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes takes several times the memory of what it packs at once."""
    values = torch.randn(64 * 9 + 5).bfloat16()
    for kind in PACKED_FORMATS:
        whole = torch.zeros(packed_weights.packed_bytes(values.shape, kind), dtype=torch.uint8)
        parts = whole.clone()
        packed_weights.quantize(values, whole, kind)
        with monkeypatch.context() as patch:
            patch.setattr(packed_weights, "PACKED_AT_ONCE", 128)
            packed_weights.quantize(values, parts, kind)
        assert torch.equal(whole, parts)
