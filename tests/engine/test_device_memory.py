"""Device memory changes hands between steps: what is let go is free before anything new is taken. Errors of lanes."""

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
from roundpipe_cli.errors import InternalError, OutOfDeviceMemoryError
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
    """Schedules of one layer a stage, and of all blocks in one."""
    rig = make_rig("llama", "lora")
    last = rig.num_layers - 1
    whole = [(0, last - 1)]
    return rig, schedule_for(rig, 1, len(SIZES)), schedule_for(rig, 1, len(SIZES), whole, [(last, last), *whole])


@pytest.mark.usefixtures("quick_collections")
def test_larger_slots_take_the_place_of_the_smaller_ones() -> None:
    rig, small, large = rig_and_stages()
    backend = Counting()
    with Engine(rig.skeleton, rig.split, rig.store, [backend]) as engine:
        first = engine.run_step(random_microbatches(SIZES), small, step=0)
        buffers = len(backend.alive_bytes)
        second = engine.run_step(random_microbatches(SIZES), large, step=0)
    assert first.loss.hex() == second.loss.hex()
    assert len(backend.alive_bytes) == 2 * buffers and backend.alive_bytes[buffers] == 0


@pytest.mark.usefixtures("quick_collections")
def test_a_cache_that_is_given_up_is_free_at_once() -> None:
    rig, schedule, _ = rig_and_stages()
    backend = Counting()
    with Engine(
        rig.skeleton, rig.split, rig.store, [backend], options=EngineOptions(weight_cache_bytes=1 << 30)
    ) as engine:
        expected = engine.run_step(random_microbatches(SIZES), schedule, step=0).loss
        with_cache = backend.alive()
        engine.grant_weight_cache(0)
        gc.collect()
        whole = sum(layout.num_bytes for layout in rig.store.layouts[1:])
        assert backend.alive() <= with_cache - whole
        assert engine.run_step(random_microbatches(SIZES), schedule, step=0).loss.hex() == expected.hex()


@pytest.mark.usefixtures("quick_collections")
def test_no_room_for_the_weight_cache_is_out_of_device_memory() -> None:
    """Which `on_oom: adapt` knows what to do about; and the engine goes on without a cache."""
    rig, schedule, _ = rig_and_stages()
    backend = Counting(most_bytes=sum(layout.num_bytes for layout in rig.store.layouts[1:]) - 1)
    with Engine(
        rig.skeleton, rig.split, rig.store, [backend], options=EngineOptions(weight_cache_bytes=1 << 30)
    ) as engine:
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
    """Not as a step that stands still until the watchdog comes."""
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
