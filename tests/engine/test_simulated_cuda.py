"""The real CUDA backend on simulated GPUs: every feature gives the processor's bits, and all accesses are ordered; and
planted faults, which the simulation finds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from roundpipe_cli.engine.backends.cuda import CudaBackend
from roundpipe_cli.errors import RoundpipeError
from tests.support.every_type import tiny_config_of
from tests.support.simulated_cases import CASES, Bits, is_equal, page_locked, simulated
from tests.support.simulated_cuda import Card
from tests.support.simulated_types import step_of

HELD_BY_OTHERS = {
    *("after-failures-lora", "cache-whole", "spread-head"),
    *("4-bit-once", "8-bit", "fp8-once"),  # each form is tried once, in one of its two ways
    *("lora", "dropout-full", "sliding-window"),  # alike, dropout, packing by rows
    *("full", "tied"),  # early updates; a tied table whose updates run beside the step, in test_versions.py
    *("bfloat16", "mixture-of-experts"),  # adapters of experts are both, gpt-oss has trained ones
}
RUNS = [
    pytest.param(name, seeds, marks=[pytest.mark.sweep] * (len(seeds) > 1 or name in HELD_BY_OTHERS))
    for number, name in enumerate(sorted(CASES))
    for seeds in ((number % 2,), (1 - number % 2, 2, 3))
]
"""Cases and seeds: copies are put off with the odd ones. That accesses are ordered shows with any."""
MAY_WAIT = ("MainThread", "optimizer")
"""Threads that issue no work of a step."""


@functools.cache
def expected_bits(name: str) -> Bits:
    return CASES[name].on_processor()


@pytest.mark.parametrize(("name", "seeds"), RUNS)
def test_the_bits_are_those_of_the_processor(name: str, seeds: tuple[int, ...]) -> None:
    """Two unlike cards, whatever the host learns late of events; every other run with copies put off.

    Threads that issue never wait for a device, beyond a constant table uploaded once: copies from ordinary memory,
    `.cpu()`, `tensor[0] = 1` and numbers asked for would each hold up all that a thread issues. The end of a step waits
    for its losses, in the caller's thread; an early update for its sum of squares.
    """
    case = CASES[name]
    for seed in seeds:
        found, simulation = case.simulated(seed, lazy=seed % 2 == 1)
        assert is_equal(found, expected_bits(name), case.bound), f"seed {seed}"
        assert sum(simulation.machine.launches.values()) > 100, "nothing ran on the simulated cards"
        waits = {key: count for key, count in simulation.machine.host_waits.items() if key[0] not in MAY_WAIT}
        assert case.waits or max(waits.values(), default=0) <= name.startswith("8-bit"), f"seed {seed}: {waits}"


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model_type", ["axk1", "dbrx"])
def test_attention_and_experts_of_other_kinds(model_type: str, method: str) -> None:
    """Heads whose keys and values differ in width, and experts chosen by `one_hot`; all types by a script. Adapted
    experts of axk1 are multiplied by torch's grouped product, which a card rounds in its own way."""
    found = step_of(tiny_config_of(model_type), method)
    assert found.startswith("equal") or ((model_type, method) == ("axk1", "lora") and float(found[6:13]) < 1e-5), found


@pytest.mark.parametrize("method", ["lora", "full"])
def test_experts_without_a_token_have_gradients_of_zero(method: str) -> None:
    """torch's grouped product leaves what was there for them on sm100, here NaN."""
    model = {"num_experts": 32, "num_experts_per_tok": 1, "dtype": torch.bfloat16, "lora_rank": 8}
    case = replace(CASES["expert-adapters"], method=method, model=model)
    rig, newest = case.rig(), Card("Simulated 100", capability=(10, 0))
    with simulated(cards=[newest, newest]), page_locked(rig):
        found = case.on(rig, [CudaBackend(index) for index in (0, 1)])
    assert is_equal(found, case.on_processor(), 0.05)


def test_one_card_listed_twice() -> None:
    found, _ = CASES["cache-whole"].simulated(1, devices=(0, 0), lazy=True)
    assert is_equal(found, expected_bits("cache-whole"))


# -- faults planted in the engine or its backend: the clocks find each, and lazy copies show most -------------------

SEEDS = range(40)
"""Tried until one shows the fault. What threads do when is not drawn from them: of runs whose compute waits for no
upload, about half come to another result (23 of 48)."""
Plant = Callable[[pytest.MonkeyPatch], None]


def no_wait(patch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for what is uploaded."""
    patch.setattr(CudaBackend, "wait", lambda backend, event: None)


def no_record_stream(patch: pytest.MonkeyPatch) -> None:
    """What was uploaded is free before compute has read it: its memory is that of the upload stream."""

    def device_like(backend: CudaBackend, host: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(backend._up):
            return torch.empty_like(host, device=backend.device, pin_memory=False)

    patch.setattr(CudaBackend, "device_like", device_like)


def one_host_buffer(patch: pytest.MonkeyPatch) -> None:
    """All downloads of one size and type go to the same host memory."""
    kept: dict[Any, torch.Tensor] = {}
    host_like = CudaBackend.host_like

    def shared(backend: CudaBackend, tensor: torch.Tensor) -> torch.Tensor:
        return kept.setdefault((tensor.shape, tensor.dtype), host_like(backend, tensor))

    patch.setattr(CudaBackend, "host_like", shared)


def copies_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A step's end waits for compute alone, which a failed step's copies outlast."""
    patch.setattr(CudaBackend, "synchronize", lambda backend: backend._compute.synchronize())


FAULTS: dict[str, tuple[str, Plant, bool]] = {
    "a wait left out": ("lora", no_wait, True),
    "a record_stream left out": ("alike", no_record_stream, False),
    "a host buffer used again early": ("full", one_host_buffer, True),
    "copies of a failed step": ("after-failures", copies_not_waited_for, False),
}
"""Name -> (case, what plants it, whether copies put off change the result: compute is never put off). One each of the
host's memory, of the device's, of events and of a step's end."""


def outcome(case: str, seed: int, *, lazy: bool) -> tuple[Bits, int]:
    """What a run with the fault came to (nothing if it failed), and how many pairs of accesses had no order."""
    try:
        bits, simulation = CASES[case].simulated(seed, lazy=lazy, tolerant=True)
    except (RoundpipeError, AssertionError):
        return [], 0
    return bits, len(simulation.unordered)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, plant, shows = FAULTS[name]
    expected = expected_bits(case)
    plant(monkeypatch)
    assert any(outcome(case, seed, lazy=False)[1] for seed in SEEDS), "the clocks saw nothing"
    if shows:
        assert any(not is_equal(outcome(case, seed, lazy=True)[0], expected) for seed in SEEDS), (
            "the result is the same"
        )
