"""The real CUDA backend on simulated GPUs: every feature gives the processor's bits, and all accesses are ordered; and
planted faults, which the simulation finds.

What depends on `torch.version` or on a card's capability, and what runs it each way:

- a head's products added unrounded (`adds_products`): `head-in-chunks-float16`, `-bfloat16` and `-bfloat16-narrow`;
  rounded: `head-in-chunks` (float32) and `head-in-chunks-narrow` (torch's switch)
- capabilities are NVIDIA's alone (`nvidia_capability`): all cases; another maker's: test_simulated_device.py
- cards with flash attention (`has_flash`): tests/model/test_attention_kernels.py; without, as the smaller card is sm75:
  tests/train/test_simulated_finetune.py
- attention of packed rows in one kernel (`_has_own_kernel`): scripts/gpu_check alone; row by row: `packing-by-rows`
- torch's loop over experts (`loops_over_groups`): `expert-adapters` on its sm75, `mixture-of-experts` (float32) on both
- gradients of experts without rows (`forgets_empty_groups`, sm100): the test of that name below; others: the same cases
- Triton's kernels (`takes_triton`, `has_kernel`, `all_run_ours`): tests/kernels, interpreted and compiled, and
  scripts/gpu_check; the cases compute the plain operators in their place
- bfloat16 of the card's own (`has_bfloat16`): test_simulated_device.py, both ways
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from roundpipe_cli.engine.backends.cuda import CudaBackend
from tests.support.every_type import tiny_config_of
from tests.support.planted_faults import FAULTS, signs_of
from tests.support.simulated_cases import CASES, Bits, Case, is_equal, page_locked, simulated
from tests.support.simulated_cuda import Card
from tests.support.simulated_types import step_of
from tests.support.tiny import plain_step

HELD_BY_OTHERS = {
    *("after-failures-lora", "cache-whole", "spread-head"),
    *("4-bit-once", "8-bit", "fp8-once"),  # each form is tried once, in one of its two ways
    *("lora", "dropout-full", "sliding-window"),  # alike, dropout, packing by rows
    *("full", "tied"),  # early updates; a tied table whose updates run beside the step, in test_versions.py
    *("bfloat16", "mixture-of-experts"),  # adapters of experts are both, gpt-oss has trained ones
}
RUNS = [  # cases and seeds: copies are put off with the odd ones. That accesses are ordered shows with any
    pytest.param(name, seeds, marks=[pytest.mark.sweep] * (len(seeds) > 1 or name in HELD_BY_OTHERS))
    for number, name in enumerate(sorted(CASES))
    for seeds in ((number % 2,), (1 - number % 2, 2, 3))
]
MAY_WAIT = ("MainThread", "optimizer")  # threads that issue no work of a step


@functools.cache
def expected_bits(name: str) -> Bits:
    return CASES[name].on_processor()


@pytest.mark.parametrize(("name", "seeds"), RUNS)
def test_the_bits_are_those_of_the_processor(name: str, seeds: tuple[int, ...]) -> None:
    """Two unlike cards, whatever the host learns late of events.
    Threads that issue never wait for a device, beyond a constant table uploaded once; the end of a step waits for its
    losses, in the caller's thread, an early update for its sum of squares."""
    case = CASES[name]
    for seed in seeds:
        found, simulation = case.simulated(seed, lazy=seed % 2 == 1)
        assert is_equal(found, expected_bits(name), case.bound), f"seed {seed}"
        assert sum(simulation.machine.launches.values()) > 100, "nothing ran on the simulated cards"
        waits = {key: count for key, count in simulation.machine.host_waits.items() if key[0] not in MAY_WAIT}
        uploads_a_table = name.startswith(("8-bit", "fp8-blocks"))
        assert case.waits or max(waits.values(), default=0) <= uploads_a_table, f"seed {seed}: {waits}"


def test_experts_in_mxfp4_are_as_unpacked_ones_on_cards() -> None:
    """To the bit. The processor's numbers are 1e-5 off both: in float32 it adds experts' adapters in another order."""
    packed, whole = (Case("gpt_oss", "lora", how, waits=True) for how in ({"packed_as": "mxfp4"}, {}))
    rigs = packed.rig(), whole.rig()
    frozen = [place.name for layout in rigs[1].store.layouts for place in layout.places if not place.trainable]
    for name in frozen:
        rigs[1].store.views[name].copy_(rigs[0].store.base_weight(name))
    found, expected = (case.simulated(0, rig=rig)[0] for case, rig in zip((packed, whole), rigs, strict=True))
    assert frozen and is_equal(found, expected)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_trained_head_in_chunks_has_plain_pytorchs_gradient(dtype: torch.dtype, narrow: bool) -> None:
    """Story: torch refuses unrounded sums of float16 products while those may add up in float16, and a full run ended
    in its first step. In 16 bit the rest of the model rounds too: the head's error is that of all layers."""
    case = replace(CASES["head-in-chunks"], model={"dtype": dtype}, float16_accumulation=narrow)
    rig = case.rig()
    found, simulation = case.simulated(0, rig=rig)
    loss, taken = plain_step(rig, case.microbatches), []
    for name, parameter in rig.plain.named_parameters():
        gradient = rig.store.gradient(name)
        assert parameter.grad is not None
        error = float((gradient - parameter.grad).norm() / parameter.grad.norm())
        assert error < {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype], (name, error)
        taken.append(name)
    assert "lm_head.weight" in taken and found[0] == pytest.approx(loss, rel=1e-2)
    unrounded = "aten.addmm.dtype_out" in simulation.machine.substituted
    assert unrounded == (dtype == torch.bfloat16 or (dtype == torch.float16 and not narrow)), "how chunks are added"


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model_type", ["axk1", "dbrx"])
def test_attention_and_experts_of_other_kinds(model_type: str, method: str) -> None:
    """Heads whose keys and values differ in width, and experts by `one_hot`; a card rounds axk1's in its own way."""
    found = step_of(tiny_config_of(model_type), method)
    assert found.startswith("equal") or ((model_type, method) == ("axk1", "lora") and float(found[6:13]) < 1e-5), found


@pytest.mark.parametrize("method", ["lora", "full"])
def test_experts_without_a_token_have_gradients_of_zero(method: str) -> None:
    model = {"num_experts": 32, "num_experts_per_tok": 1, "dtype": torch.bfloat16, "lora_rank": 8}
    case = replace(CASES["expert-adapters"], method=method, model=model)
    rig, newest = case.rig(), Card("Simulated 100", capability=(10, 0))
    with simulated(cards=[newest, newest]), page_locked(rig):
        found = case.on(rig, [CudaBackend(index) for index in (0, 1)])
    assert is_equal(found, case.on_processor(), 0.05)


def test_one_card_listed_twice() -> None:
    found, _ = CASES["cache-whole"].simulated(1, devices=(0, 0), lazy=True)
    assert is_equal(found, expected_bits("cache-whole"))


# -- faults planted in the engine or its backend -----------------------------------------------------------------------
IN_SUITE = (
    *("weights into a slot in use", "all visits in one slot", "an upload before its update"),
    *("a cache counted as filled too early", "sums up before the last visit's came down", "no record_stream"),
    *("a boundary readable when issued, in the store", "a boundary readable when issued, in the ledger"),
    *("kept activations not looked up again", "chunks let go before they arrived", "a product that torch refuses"),
)
"""Those that runs once did not find, and one each of events, memory and torch; the others are of their kinds."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (name not in IN_SUITE)) for name in FAULTS]
)
def test_a_planted_fault_is_found(name: str) -> None:
    """By any seed: that accesses have no order does not depend on when the host learns of events, or threads run."""
    assert set(IN_SUITE) <= set(FAULTS)
    for seed in range(1 if name in IN_SUITE else 2):
        assert signs_of(name, seed, expected_bits(FAULTS[name][1])), f"seed {seed}"
