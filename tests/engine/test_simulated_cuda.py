"""The real CUDA backend on simulated GPUs: every feature gives the processor's bits, and all accesses are ordered."""

from __future__ import annotations

import functools

import pytest

from tests.support.simulated_cases import CASES, Bits, is_equal

NUM_SEEDS = 4


@functools.cache
def expected(name: str) -> Bits:
    return CASES[name].on_processor()


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_bits_are_those_of_the_processor(name: str) -> None:
    """Two unlike cards, whatever the host learns late of events; every other run with copies put off."""
    for seed in range(NUM_SEEDS):
        found, simulation = CASES[name].simulated(seed, lazy=seed % 2 == 1)
        assert is_equal(found, expected(name)), f"seed {seed}"
        assert sum(simulation.machine.launches.values()) > 100, "nothing ran on the simulated cards"


@pytest.mark.parametrize("name", ["lora", "full", "staleness-1", "cache-whole"])
def test_one_card_listed_twice(name: str) -> None:
    for seed in range(2):
        found, _ = CASES[name].simulated(seed, devices=(0, 0), lazy=seed == 1)
        assert is_equal(found, expected(name)), f"seed {seed}"
