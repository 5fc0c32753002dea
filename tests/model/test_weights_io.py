"""Weights from transformers' own files into the store, to the bit; files that are refused; memory while loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event
from roundpipe_cli.heap import UnusedHeap
from roundpipe_cli.model.files.source import ModelSource, resolve_model
from roundpipe_cli.model.files.untrusted import check_model_folder
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.stored import tensors
from roundpipe_cli.model.stored.tensors import base_name
from roundpipe_cli.model.weights_io import load_weights
from tests.model.test_multimodal import multimodal
from tests.support.os_calls import status_bytes
from tests.support.tiny import make_store, tiny_config

INDEX = "model.safetensors.index.json"


def save_tiny(folder: Path, config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A tiny model of a type, or of a configuration, as transformers builds and saves it, with random weights."""
    config = tiny_config(config) if isinstance(config, str) else config
    kind = AutoModelForImageTextToText if config.model_type == "mistral3" else AutoModelForCausalLM
    model: nn.Module = kind.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder), **options)  # type: ignore[operator]
    return model


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edit the tensors of a saved model, by name."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def say(folder: Path, **values: Any) -> None:
    """Change a saved model's configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def load(
    folder: Path, dtype: torch.dtype = torch.float32, method: str = "full"
) -> tuple[WeightStore, list[str], nn.Module]:
    """The store that `load_weights` fills from `folder`, its notices, and the skeleton."""
    source = ModelSource("tiny", folder)
    skeleton = build_skeleton(load_config(source), dtype)
    split = split_model(skeleton)
    if method == "lora":
        add_lora(skeleton, LoraSettings(r=2, alpha=4), dtype=dtype, base_name="tiny")
    store = make_store(skeleton, split, dtype)
    return store, load_weights(source, skeleton, store.set_parameter), skeleton


def check_equal(store: WeightStore, model: nn.Module) -> None:
    expected = dict(model.named_parameters())
    got = {base_name(name): view for name, view in store.views.items() if ".lora_" not in name}
    assert got.keys() == expected.keys()
    for name, parameter in expected.items():
        assert got[name].dtype == parameter.dtype and torch.equal(got[name], parameter), name


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "opt", "qwen3_moe", "mixtral", "phi"])
def test_loaded_weights_equal_the_saved_bits(tmp_path: Path, model_type: str, shard_size: str, method: str) -> None:
    model = save_tiny(tmp_path, model_type, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "60KB")
    store, notices, _ = load(tmp_path, method=method)
    check_equal(store, model)
    assert notices == []


def test_bfloat16_file_and_float32_training(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama", torch.bfloat16)
    check_equal(load(tmp_path, torch.bfloat16)[0], model)
    check_equal(load(tmp_path, torch.float32)[0], model.float())


def test_persistent_buffers_are_loaded(tmp_path: Path) -> None:
    """glm4_moe's routers correct their scores by a buffer of the checkpoint."""
    model = save_tiny(tmp_path, "glm4_moe")
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    assert buffers
    for buffer in buffers.values():
        buffer.uniform_()
    model.save_pretrained(str(tmp_path))  # type: ignore[operator]
    loaded = dict(load(tmp_path)[2].named_buffers())
    for name, buffer in buffers.items():
        assert torch.equal(loaded[name], buffer), name


def test_weights_without_the_backbone_s_prefix(tmp_path: Path) -> None:
    """gpt2 on the hub is saved without `transformer.`."""
    model = save_tiny(tmp_path, "gpt2")
    names = list(load_file(tmp_path / "model.safetensors"))
    change(tmp_path, lambda tensors: [tensors.update({n.removeprefix("transformer."): tensors.pop(n)}) for n in names])
    store, notices, _ = load(tmp_path)
    check_equal(store, model)
    assert notices == []


# -- refused -------------------------------------------------------------------------------------------------------

NAME = "model.layers.1.mlp.up_proj.weight"
EXPERT, NORM = "model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.1.self_attn.q_norm.weight"
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "damage", "said", "words"),
    [
        ({}, lambda files: files.pop(NAME), {}, ("missing", NAME)),
        ({}, lambda files: files.update({NAME: files[NAME][:-1].clone()}), {}, ("another shape", NAME)),
        ({}, lambda files: files[NAME][3].fill_(float("nan")), {}, ("not finite", NAME)),
        ({}, lambda files: files[NAME][3].fill_(float("-inf")), {}, ("not finite", NAME)),
        ({}, lambda files: files.update({NORM: torch.ones(16)}), {}, ("leaves out", NORM)),
        ({}, len, {"vocab_size": 120}, ("another shape", "[128, 64]", "[120, 64]")),
        (TIED, len, {"tie_word_embeddings": False}, ("missing", "correct config.json")),
        # most real checkpoints have each expert by itself
        (None, lambda files: files.pop(EXPERT), {}, ("another shape than the architecture", "experts.down_proj")),
    ],
)
def test_files_of_another_configuration_are_refused(
    tmp_path: Path, config: Any, damage: Any, said: Any, words: Any
) -> None:
    save_tiny(tmp_path, "qwen3_moe" if config is None else tiny_config("llama", **config))
    change(tmp_path, damage)
    say(tmp_path, **said)
    with pytest.raises(RefusedError) as caught:
        load(tmp_path)
    assert caught.value.exit_code == 2 and all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_weight_that_overflows_in_float16_is_named(tmp_path: Path, model_type: str) -> None:
    """Infinities were trained. Whether a tensor is finite is asked of its sum, which must not overflow by itself."""
    save_tiny(tmp_path, model_type)
    name = NAME if model_type == "llama" else "model.layers.1.mlp.experts.1.up_proj.weight"
    change(tmp_path, lambda tensors: tensors[name].fill_(6e4))
    load(tmp_path, torch.float16)
    change(tmp_path, lambda tensors: tensors[name][-1].fill_(-7e4))
    with pytest.raises(RefusedError, match="overflows in float16") as caught:
        load(tmp_path, torch.float16)
    assert caught.value.exit_code == 2 and name in str(caught.value) and "7e+04" in str(caught.value)
    load(tmp_path, torch.bfloat16)
    change(tmp_path, lambda tensors: tensors[name][-1].fill_(float("inf")))
    with pytest.raises(RefusedError, match="not finite"):
        load(tmp_path, torch.float16)


def link_outside(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.symlink_to(shard.rename(folder.parent / "elsewhere.safetensors"))


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{
        f"index names {shard}": (lambda folder, shard=shard: map_to(folder, shard), f"outside the model .*{shard}")
        for shard in ("../outside.safetensors", "/etc/passwd", "model.bin")
    },
    **{
        f"index {text}": (lambda folder, text=text: (folder / INDEX).write_text(text), INDEX)
        for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}')
    },
    "link": (link_outside, "outside the model folder"),
    "missing": (lambda folder: (folder / "model-00002-of-00011.safetensors").unlink(), "no model-00002"),
}


def map_to(folder: Path, shard: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], NAME: shard}}))


@pytest.mark.parametrize("name", DAMAGED)
def test_files_that_are_not_there_or_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, "llama", max_shard_size="60KB")
    damage, said = DAMAGED[name]
    damage(folder)
    with pytest.raises(RefusedError, match=rf"(?s){said}"):
        load(folder)


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    """Both in one folder: the shards were read here, the single file there."""
    save_tiny(tmp_path, "llama", max_shard_size="60KB")
    other = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32)
    save_file({name: value.contiguous() for name, value in other.state_dict().items()}, tmp_path / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    store, _, _ = load(tmp_path)
    assert torch.equal(store.views[NAME], expected[NAME]) and torch.equal(expected[NAME], other.state_dict()[NAME])
    told: list[Event] = []
    for _ in range(2):
        resolve_model(str(tmp_path), revision=None, recipe_folder=tmp_path, offline=True, tell=told.append)
    assert len(told) == 1 and "model.safetensors is read, as transformers does" in str(told[0]), told
    sorted(tmp_path.glob("model-0*.safetensors"))[0].unlink()  # nobody reads it
    assert torch.equal(load(tmp_path)[0].views[NAME], expected[NAME])
    say(tmp_path, transformers_weights="other.safetensors")  # which transformers reads in place of the usual one
    with pytest.raises(RefusedError, match=r"other\.safetensors"):
        resolve_model(str(tmp_path), revision=None, recipe_folder=tmp_path, offline=True)


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, 5000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    save_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(RefusedError, match="cannot be read") as caught:
        check_model_folder(tmp_path)
    assert str(path) in str(caught.value)


# -- tensors without a place, and places without a tensor ------------------------------------------------------------
#
# Story: biases, norms and whole blocks that a configuration leaves out were dropped with a note, those of a GGUF file
# without one, and the model that was trained was another.


def notices(folder: Path) -> list[str]:
    source = ModelSource("tiny", folder)
    model = build_skeleton(load_config(source), torch.float32)
    return load_weights(source, model, lambda name, values: None)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_the_configuration_leaves_out_are_refused(tmp_path: Path, key: str) -> None:
    save_tiny(tmp_path, tiny_config("llama", **{key: True}))
    say(tmp_path, **{key: False})
    with pytest.raises(RefusedError, match="leaves out") as caught:
        notices(tmp_path)
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 2 and ".bias" in str(problem.found) and "correct config.json" in str(problem.hint)
    change(tmp_path, lambda tensors: [tensors[name].zero_() for name in tensors if name.endswith(".bias")])
    assert any("left out" in text and ".bias" in text for text in notices(tmp_path)), "zeros change nothing"
    say(tmp_path, **{key: True})
    change(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(".bias")])
    with pytest.raises(RefusedError, match="missing"):
        notices(tmp_path)


def test_the_language_model_of_a_wrapper_is_looked_at_and_its_tower_is_not(tmp_path: Path) -> None:
    save_tiny(tmp_path, multimodal("mistral3"))
    names = list(load_file(tmp_path / "model.safetensors"))
    tower = next(name for name in names if ".layers.0." in name and "vision" in name)
    extra = f"{tower.rpartition('.')[0]}.bias"
    change(tmp_path, lambda tensors: tensors.update({extra: torch.ones(4)}))
    assert any(extra in text for text in notices(tmp_path))
    name = next(name for name in names if "language" in name and "q_proj" in name)
    change(tmp_path, lambda tensors: tensors.update({name.replace("weight", "bias"): torch.ones(64)}))
    with pytest.raises(RefusedError, match=r"1 tensors, .*language_model.*q_proj\.bias"):
        notices(tmp_path)


def test_more_blocks_than_the_configuration_has_are_refused(tmp_path: Path) -> None:
    """But not what a checkpoint has beside its blocks, to predict further tokens."""
    save_tiny(tmp_path, tiny_config("llama", num_hidden_layers=4))
    say(tmp_path, num_hidden_layers=3)
    with pytest.raises(RefusedError, match="more blocks") as caught:
        notices(tmp_path)
    assert "4 blocks" in str(caught.value) and "num_hidden_layers" in str(caught.value)
    change(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(2, 2)}))
    (told,) = notices(tmp_path)
    assert told.startswith(
        "left out, for they have no place in this architecture: 10 of the files' tensors, model.layers.3."
    )


def write_gguf(path: Path, architecture: str, num_blocks: int, tensors: dict[str, Any]) -> None:
    """A GGUF file of tensors in float32, or in 8 bit (Q8_0) where the values are codes."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(num_blocks)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if values.dtype == numpy.uint8 else None
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_NAMES = {
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
    **{"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk"},
}


def gguf_tensors(model: nn.Module) -> dict[str, Any]:
    """What a GGUF file has for a Llama model: each row has a number of its own."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for theirs, short in GGUF_NAMES.items():
            name = name.replace(theirs, short)
        tensors[name] = numpy.arange(1, parameter.numel() + 1, dtype=numpy.float32).reshape(parameter.shape)
    return tensors


@pytest.mark.parametrize(
    ("name", "values", "answer"),
    [
        ("blk.0.attn_q.bias", numpy.ones(64, numpy.float32), "leaves out"),
        ("blk.0.attn_q.bias", numpy.zeros(64, numpy.float32), None),
        ("blk.1.attn_q_norm.weight", numpy.ones(16, numpy.float32), "leaves out"),
        ("rope_freqs.weight", numpy.full(8, 8, numpy.float32), "rotary frequencies"),
        ("rope_freqs.weight", numpy.ones(8, numpy.float32), None),
        ("token_types.weight", numpy.ones((2, 64), numpy.float32), None),
    ],
)
def test_what_of_a_gguf_file_is_not_read_is_said(tmp_path: Path, name: str, values: Any, answer: str | None) -> None:
    model = build_skeleton(tiny_config("llama"), torch.float32)
    write_gguf(tmp_path / "m.gguf", "llama", 3, {name: values, **gguf_tensors(model)})
    source = ModelSource("tiny", tmp_path, "m.gguf")
    if answer is None:
        assert any("left out" in text and name in text for text in load_weights(source, model, lambda *_: None))
        return
    with pytest.raises(RefusedError, match=answer) as caught:
        load_weights(source, model, lambda *_: None)
    assert name in str(caught.value) and "safetensors" in str(caught.value)


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_bytes", "most"), [(tensors.MAX_MAPPED_BYTES, 1), (50_000, 9)])
def test_a_file_is_not_opened_for_every_weight(tmp_path: Path, monkeypatch: Any, max_bytes: int, most: int) -> None:
    """Opening reads the whole header: 49 s of processor time for a model of 500 layers of width 8, now 1.4 s."""
    model, opened = save_tiny(tmp_path, "llama"), []
    opening = tensors.open_shard
    monkeypatch.setattr(tensors, "open_shard", lambda path: opened.append(path) or opening(path))
    monkeypatch.setattr(tensors.OpenFiles.close_if_read, "__defaults__", (max_bytes,))
    store, _, _ = load(tmp_path)
    check_equal(store, model)
    assert 1 <= len(opened) <= most < len(list(model.parameters()))
    assert (len(opened) > 1) == (max_bytes == 50_000)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("shard_size", ["1GB", "25MB"])
def test_host_memory_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: str) -> None:
    """Peak above what the process has before: at most 1.1x the weights plus twice the largest layer."""
    monkeypatch.undo()  # parts as large as usual
    changes = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 1024}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", **changes), dtype=torch.bfloat16)
    model.to_empty(device="cpu")  # drawing 40 million numbers takes longer than all the rest
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(str(tmp_path), max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "25MB")
    del model, parameter
    source = ModelSource("tiny", tmp_path)
    skeleton = build_skeleton(load_config(source), torch.bfloat16).requires_grad_(False)
    split = split_model(skeleton)
    UnusedHeap().give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base = status_bytes("VmRSS")
    store = make_store(skeleton, split, torch.bfloat16)
    load_weights(source, skeleton, store.set_parameter)
    peak, sizes = status_bytes("VmHWM") - base, [layout.num_bytes for layout in store.layouts]
    assert sum(sizes) > 70e6
    assert sum(sizes) < peak <= 1.1 * sum(sizes) + 2 * max(sizes)
