"""What lies on a device: memory that changes hands between steps, activations that stay for the backward, errors."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.prepared import kept_activations, weights_found_again
from roundpipe_cli.engine.program import lower_for_engine
from roundpipe_cli.errors import InternalError, OutOfDeviceMemoryError
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from tests.support.covering import swept
from tests.support.schedules import dealt
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for

SIZES = [(2, 9), (1, 7), (2, 5)]


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Collections look at what the test makes, not at torch's half a million objects, which takes 0.2 s each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Counting(CpuBackend):
    """Knows which of its buffers are alive whenever another one is asked for."""

    def __init__(self, most_bytes: int = 1 << 40) -> None:
        super().__init__(1, copy=True)
        self._most_bytes = most_bytes
        self._refs: list[tuple[weakref.ref[Any], int]] = []
        self.alive_bytes: list[int] = []

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if num_bytes > self._most_bytes:
            raise torch.OutOfMemoryError("no such room here")
        gc.collect()
        self.alive_bytes.append(self.alive())
        buffer = super().allocate(num_bytes)
        self._refs.append((weakref.ref(buffer.untyped_storage()), num_bytes))
        return buffer

    def alive(self) -> int:
        return sum(num_bytes for ref, num_bytes in self._refs if ref() is not None)


def rig_and_stages() -> tuple[Rig, Any, Any]:
    rig = make_rig("llama", "lora")
    last = rig.num_layers - 1
    whole = [(0, last - 1)]
    return rig, schedule_for(rig, 1, len(SIZES)), schedule_for(rig, 1, len(SIZES), whole, [(last, last), *whole])


def engine_on(rig: Rig, backend: Counting, cache_bytes: int = 0) -> Engine:
    return Engine(rig.skeleton, rig.split, rig.store, [backend], options=EngineOptions(weight_cache_bytes=cache_bytes))


@pytest.mark.usefixtures("quick_collections")
def test_larger_slots_take_the_place_of_the_smaller_ones() -> None:
    rig, small, large = rig_and_stages()
    backend = Counting()
    with engine_on(rig, backend) as engine:
        first = engine.run_step(random_microbatches(SIZES), small, step=0)
        buffers = len(backend.alive_bytes)
        second = engine.run_step(random_microbatches(SIZES), large, step=0)
    assert first.loss.hex() == second.loss.hex()
    assert len(backend.alive_bytes) == 2 * buffers and backend.alive_bytes[buffers] == 0


@pytest.mark.usefixtures("quick_collections")
def test_a_cache_that_is_given_up_is_free_at_once() -> None:
    rig, schedule, _ = rig_and_stages()
    backend = Counting()
    with engine_on(rig, backend, 1 << 30) as engine:
        expected = engine.run_step(random_microbatches(SIZES), schedule, step=0).loss
        with_cache = backend.alive()
        engine.grant_weight_cache(0)
        gc.collect()
        whole = sum(layout.num_bytes for layout in rig.store.layouts[1:])
        assert backend.alive() <= with_cache - whole
        assert engine.run_step(random_microbatches(SIZES), schedule, step=0).loss.hex() == expected.hex()


@pytest.mark.usefixtures("quick_collections")
def test_no_room_for_the_weight_cache_is_out_of_device_memory() -> None:
    rig, schedule, _ = rig_and_stages()
    backend = Counting(most_bytes=sum(layout.num_bytes for layout in rig.store.layouts[1:]) - 1)
    with engine_on(rig, backend, 1 << 30) as engine:
        for _ in range(2):
            with pytest.raises(OutOfDeviceMemoryError, match="weight cache"):
                engine.run_step(random_microbatches(SIZES), schedule, step=0)
        engine.grant_weight_cache(0)
        engine.run_step(random_microbatches(SIZES), schedule, step=0)


class Broken(CpuBackend):
    """A device whose every event fails, as a GPU's does once a kernel has gone wrong."""

    def happens_in_s(self, event: Any) -> float:
        raise RuntimeError("an illegal memory access was encountered")


def test_an_error_that_a_lane_meets_ends_the_run_with_its_words() -> None:
    rig = make_rig("llama", "lora")
    started_s = time.monotonic()
    backends = [CpuBackend(1, copy=True), Broken(1, copy=True)]
    with (
        pytest.raises(InternalError) as caught,
        Engine(rig.skeleton, rig.split, rig.store, backends, options=EngineOptions(watchdog_s=60)) as engine,
    ):
        engine.run_step(random_microbatches(SIZES), schedule_for(rig, 2, len(SIZES)), step=4)
    text = str(caught.value)
    assert "illegal memory access" in text and "worker 1" in text and "step" in text
    assert time.monotonic() - started_s < 30


# --- activations that stay ------------------------------------------------------------------------------------------
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-lora-dropout": ("llama", "lora", {"attention_dropout": 0.1, "lora_dropout": 0.1}),
    "gpt2-full-dropout": ("gpt2", "full", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "qwen3_moe-lora": ("qwen3_moe", "lora", {}),
    (BFLOAT16 := "llama-full-bfloat16"): ("llama", "full", {"dtype": torch.bfloat16}),
}
HEAD = 4


def single_blocks(num_workers: int) -> Schedule:
    return dealt([(0, 0), (1, 1), (2, 2), (3, 3)], [(HEAD, HEAD), (3, 3), (1, 2), (0, 0)], num_workers, len(SIZES))


def one_f_one_b() -> Schedule:
    return build_schedule("1f1b", forward_stages=[(0, 1), (2, 3), (4, 4)], num_workers=3, rounds=Rounds(len(SIZES)))


def bits(rig: Rig, schedule: Schedule, **options: Any) -> tuple[object, ...]:
    with rig.engine(schedule.num_workers, seed=3, head_chunk_tokens=8, **options) as engine:
        result = engine.run_step(random_microbatches(SIZES), schedule, step=0)
    gradients = tuple(gradient.numpy().tobytes() for gradient in rig.store.gradients)
    return result.loss.hex(), result.gradient_norm.hex(), gradients


def num_kept(rig: Rig, schedule: Schedule, layers: set[int]) -> int:
    return len(kept_activations(lower_for_engine(schedule, rig.store.layouts, 2), layers))


@pytest.mark.parametrize("name", [*sorted(MODELS.keys() - {BFLOAT16}), *swept([BFLOAT16])])
def test_no_bit_changes(name: str) -> None:
    model_type, method, changes = MODELS[name]
    rig = make_rig(model_type, method, **changes)
    expected = bits(rig, single_blocks(1))
    assert num_kept(rig, single_blocks(1), {1, 2, 3}) == 3 * len(SIZES)
    assert bits(rig, single_blocks(1), copy=True, keep_blocks=1, recompute="layer") == expected
    assert 0 < num_kept(rig, single_blocks(2), {1, 2, 3}) < 3 * len(SIZES)
    assert num_kept(rig, one_f_one_b(), {1, 2, 3}) == 3 * len(SIZES)
    assert bits(rig, one_f_one_b(), copy=True, keep_blocks=3) == expected
    assert bits(rig, single_blocks(2), copy=True, keep_blocks=2) == expected


def test_kept_blocks_are_not_computed_again() -> None:
    rig = make_rig("llama", "lora")
    calls = []
    for keep_blocks in (0, 1, 3):
        with rig.engine(1, keep_blocks=keep_blocks) as engine:
            called: list[int] = []
            for index, block in enumerate(engine._workers[0].runner.layers.model.blocks):
                block.register_forward_hook(lambda *_, index=index, called=called: called.append(index))
            engine.run_step(random_microbatches(SIZES), single_blocks(1), step=0)
        calls.append([called.count(index) for index in range(3)])
    twice, once = 2 * len(SIZES), len(SIZES)
    assert calls == [[twice] * 3, [twice, twice, once], [once] * 3]


def test_memory_of_what_is_kept() -> None:
    rig = make_rig("llama", "full", hidden_size=128, intermediate_size=512)
    microbatches = random_microbatches([(2, 16)] * 3)
    schedule = dealt([(0, 1), (2, 3)], [(HEAD, HEAD), (2, 3), (0, 1)], 1, 3, per_round=3)
    peaks = []
    for keep_blocks in (0, 1, 2):
        with rig.engine(1, copy=True, count_bytes=True, keep_blocks=keep_blocks) as engine:
            peaks.append(engine.run_step(microbatches, schedule, step=0).device_peak_bytes[0])
    weights = rig.store.layouts[2].num_bytes
    second, third = peaks[1] - peaks[0], peaks[2] - peaks[1]
    assert 0 < third < 1.2 * max(second, 1) + weights / 2
    # tokens x 4 bytes x (hidden states, attention, three of the intermediate size and their products), three times
    assert third <= 3 * 2 * 16 * 4 * (14 * 128 + 5 * 512)


def test_a_graph_without_a_backward_is_freed() -> None:
    """What a step that ran out of memory had kept stayed on the GPU."""
    weight = torch.randn(64, 64)
    with weights_found_again(True, lambda: weight, weight.nbytes):
        output = (torch.randn(2, 64, requires_grad=True) @ weight).exp()  # whose backward reads the output itself
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None
