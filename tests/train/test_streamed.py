"""A result that is streamed answers as the one that is loaded whole, whatever its adapter and its base are."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from roundpipe_cli.costs.answering import ROOM_BYTES, ROOM_SHARE, WEIGHTS_SHARE, DevicePlan, plan_devices
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.streaming import StreamedModel
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.events import Event, Notice
from roundpipe_cli.model.files.source import ModelSource, resolve_model
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.stored.packed_weights import dequantize, packed_bytes, quantizable_names, quantize
from roundpipe_cli.train import streamed
from roundpipe_cli.train.prepare import setup
from roundpipe_cli.train.result import generate
from roundpipe_cli.train.result.generate import Prompt, WholeAnswer, answer_prompts, continued, load_result
from roundpipe_cli.train.streamed import opened_model
from tests.support.adapters import random_adapter
from tests.support.e2e import make_model, write_recipe
from tests.support.os_calls import status_bytes
from tests.support.tiny import make_rig, tiny_config

PROMPTS = [Prompt("Say x1: ", max_new_tokens=5), Prompt("Say something else, and longer: ", max_new_tokens=5)]


def source_of(folder: Path) -> ModelSource:
    return resolve_model(str(folder), revision=None, recipe_folder=folder, offline=True)


def streamed_answers(
    result: Path, base: Path, cache_bytes: int | None, *, stream: bool = True, batch_size: int = 2
) -> tuple[list[WholeAnswer], list[str]]:
    """The answers of a result whose layers fetch their weights, and notices."""
    said: list[Event] = []
    how: dict[str, Any] = {"is_adapter": result != base, "stream": stream, "folder": base, "tell": said.append}
    how |= {"longest": PROMPTS[1], "batch_size": batch_size}
    with opened_model(result, source_of(base), "float32", cache_bytes=cache_bytes, **how) as (model, tokenizer, _):
        found = answer_prompts(model, tokenizer, PROMPTS, is_shown=False)
    return found, [event.text for event in said if isinstance(event, Notice)]


def whole_answers(result: Path, base: Path) -> list[WholeAnswer]:
    """The answers of a result that is loaded whole, one after the other."""
    model, tokenizer = load_result(result, source_of(base), "float32", is_adapter=result != base)
    return [answer_prompts(model, tokenizer, [one], is_shown=False)[0] for one in PROMPTS]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("qwen3", {"target_modules": "all-linear", "use_dora": True}),
        ("llama", {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
        ("llama", {"modules_to_save": ["lm_head"], "target_modules": ["v_proj"]}),
        ("gemma3_text", {"trainable_token_indices": [5, 9]}),
        ("qwen3_moe", {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": ["q_proj"]}),
        ("llama", {"init_lora_weights": "pissa"}),
        ("llama", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value or ["merged"])),
)
def test_streamed_results_answer_as_whole_ones(model_type: str, options: dict[str, Any] | None, tmp_path: Path) -> None:
    result = base = make_model(tmp_path / "base", model_type, num_hidden_layers=3)
    (base / "generation_config.json").write_text('{"repetition_penalty": 1.3, "eos_token_id": [2, 3], "top_k": 7}')
    if options is not None:
        result = tmp_path / "adapter"
        random_adapter(base, result, **options)
    expected = whole_answers(result, base)
    assert any(one.num_tokens > 2 for one in expected)
    for cache_bytes in (0, 150_000, 1 << 30):
        found, said = streamed_answers(result, base, cache_bytes)
        assert found == expected
        assert any("come past from disk" in text for text in said) == (cache_bytes < 1 << 30)
    assert not list(base.glob(".tmp*"))


def test_the_base_lies_packed_as_in_the_run(tmp_path: Path) -> None:
    """In 4 bit by the result's recipe; the reference has the unpacked weights."""
    base = make_model(tmp_path / "base", "llama")
    random_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    write_recipe(tmp_path / "adapter" / "recipe.yaml", load_in_4bit=True)
    plain, tokenizer = load_result(base, source_of(base), "float32", is_adapter=False)
    skeleton = build_skeleton(load_config(source_of(base)), torch.float32).requires_grad_(False)
    names = quantizable_names(skeleton, split_model(skeleton).blocks_path)
    assert len(names) > 10
    for name in names:
        weight = plain.get_parameter(name)
        packed = torch.zeros(packed_bytes(weight.shape, "4bit"), dtype=torch.uint8)
        quantize(weight.data, packed, "4bit")
        weight.data = dequantize(packed, weight.shape, torch.float32, "4bit")
    plain.save_pretrained(str(tmp_path / "unpacked"))
    tokenizer.save_pretrained(str(tmp_path / "unpacked"))
    expected = whole_answers(tmp_path / "adapter", tmp_path / "unpacked")
    assert expected != whole_answers(tmp_path / "adapter", base)
    for cache_bytes in (0, 1 << 30):
        assert streamed_answers(tmp_path / "adapter", base, cache_bytes)[0] == expected


@pytest.mark.parametrize(("model_type", "groups"), [("llama", 2), ("gpt2", 4), ("deepseek_v3", 4), ("gemma3_text", 1)])
def test_room_is_left_for_what_the_cache_takes(
    model_type: str, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(make_model(tmp_path, model_type, num_hidden_layers=2, num_key_value_heads=groups))
    skeleton, split, _ = streamed._skeleton(source, torch.float32, None)
    store: Any = SimpleNamespace(layouts=[SimpleNamespace(whole_bytes=0, num_bytes=0)] * 2)
    monkeypatch.setattr(streamed, "host_memory", lambda: SimpleNamespace(available_bytes=10**9))
    free, left = (streamed._budget(skeleton, split, store, devices=("cpu",), num_tokens=count) for count in (0, 2 * 6))
    model, _ = load_result(tmp_path, source, "float32", is_adapter=False)
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.arange(12).view(2, 6), past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held and free - left == pytest.approx(WEIGHTS_SHARE * held, abs=1)


def test_a_larger_batch_leaves_less_room_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, said = make_model(tmp_path, "llama", num_hidden_layers=2), []
    monkeypatch.setattr(setup, "host_memory", lambda: SimpleNamespace(available_bytes=0))  # so that they are on disk
    monkeypatch.setattr(streamed, "host_memory", lambda: SimpleNamespace(available_bytes=10**7))
    for batch_size in (2, 335):
        said.append(" ".join(streamed_answers(base, base, None, batch_size=batch_size)[1]))
    assert "0 B come past" in said[0] and "streaming: 0 B of weights stay" in said[1]
    with pytest.raises(ResourceError, match="no room for the keys and values") as refused:
        streamed_answers(base, base, None, batch_size=340)
    assert "--batch-size" in str(refused.value)


def test_only_a_model_that_does_not_fit_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_model(tmp_path, "llama", num_hidden_layers=2)
    num_bytes = sum(one.nbytes for one in build_skeleton(load_config(source_of(base)), torch.float32).parameters())
    needed = int(ROOM_SHARE * num_bytes) + ROOM_BYTES + 1
    found = []
    for free in (needed, needed - 2):
        monkeypatch.setattr(generate, "host_memory", lambda free=free: SimpleNamespace(available_bytes=free))
        found.append(streamed_answers(base, base, None, stream=False))
    (whole, before), (passing, said) = found
    assert len({one.text for one in whole}) == 2 and whole == passing
    assert [any("streaming:" in text for text in some) for some in (before, said)] == [False, True]


def test_a_processor_that_is_slow_in_16_bit_streams_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_model(tmp_path, "llama", num_hidden_layers=2, dtype="bfloat16")
    how: dict[str, Any] = {"is_adapter": False, "stream": True, "folder": base, "longest": PROMPTS[1], "batch_size": 2}
    found, said = [], list[str]()
    for slow in (None, "slow: no AVX-512 here; set dtype=float32"):
        monkeypatch.setattr(streamed, "slow_in_16_bit", lambda dtype, slow=slow: slow)
        tell = lambda event: said.append(getattr(event, "text", ""))  # noqa: E731
        with opened_model(base, source_of(base), "bfloat16", tell=tell, **how) as (model, _, _):
            found.append(model.dtype)
    assert found == [torch.bfloat16, torch.float32]
    assert "slow: no AVX-512 here: streaming in float32" in said


def test_a_batch_is_advised_below_one_token_a_second() -> None:
    for num_bytes, count in ((10**6, 1), (10**13, 2)):
        said = list(streamed._describe([DevicePlan({1: num_bytes}, frozenset())], ("cpu",), is_mapped=True))
        assert len(said) == count and ("--prompts FILE" in said[-1]) == (count == 2)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' /proc")
def test_the_head_is_not_copied_for_each_prompt() -> None:
    """Story: torch copied a bfloat16 table once for each prompt, and a model in a container of its size was killed."""
    config = tiny_config("llama", vocab_size=32_768, hidden_size=256, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False)
    continued(model, [[1, 2]], 0, max_new_tokens=1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    continued(model, [[1, 2]] * 8, 0, max_new_tokens=1)
    assert status_bytes("VmHWM") - before < model.lm_head.weight.nbytes


@pytest.mark.parametrize("at", [1, 4])
def test_an_error_of_the_copying_thread_reaches_the_reader(at: int) -> None:
    rig = make_rig("llama")
    (plan,) = plan_devices([layout.num_bytes for layout in rig.store.layouts], 1, 0)
    before, pairs = threading.active_count(), [(CpuBackend(1, copy=True), plan)]
    model = StreamedModel(rig.skeleton, rig.split, rig.store, pairs)
    with pytest.raises(RuntimeError), model as streamed, torch.no_grad():
        rig.store.buffers[at] = rig.store.buffers[at][1:]
        for _ in range(2):
            streamed.model(torch.tensor([[1, 2]]))
    assert threading.active_count() == before


def test_a_device_without_room_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the thread that copies, nor what was entered on the devices before it."""
    rig, threads = make_rig("llama"), torch.get_num_threads()
    backends = [CpuBackend(1, copy=True), CpuBackend(threads + 1, copy=True)]
    monkeypatch.setattr(backends[1], "allocate", lambda num_bytes: (_ for _ in ()).throw(MemoryError))
    before, plans = threading.active_count(), plan_devices([one.num_bytes for one in rig.store.layouts], 2, 0)
    with pytest.raises(MemoryError):
        StreamedModel(rig.skeleton, rig.split, rig.store, list(zip(backends, plans, strict=True)))
    assert (threading.active_count(), torch.get_num_threads()) == (before, threads)
