"""Seeded dropout: what it draws from, what it covers, and that threads do not matter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from roundpipe_cli.model.dropout import SeededDropout, has_dropout, layer_seed
from tests.tiny import make_rig, random_microbatches, schedule_for

CPU = torch.device("cpu")
ONES = torch.ones(200, 50)


def draw(seed: int, p: float = 0.3) -> torch.Tensor:
    with SeededDropout(seed, CPU):
        return functional.dropout(ONES, p)


def test_seeds_differ_in_every_coordinate() -> None:
    places = [(seed, step, m, layer) for seed in (0, 1) for step in (0, 1) for m in (0, 12) for layer in (0, 1, 12)]
    seeds = [layer_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert layer_seed(1, 21, 3, 4) != layer_seed(12, 1, 3, 4)
    assert layer_seed(7, 3, 2, 1) == layer_seed(7, 3, 2, 1)


def test_masks_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first = draw(5)
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator is neither read nor advanced"
    torch.manual_seed(99)
    assert torch.equal(first, draw(5))
    assert not torch.equal(first, draw(6))


def test_share_and_scale() -> None:
    dropped = draw(3, p=0.3)
    assert set(dropped.unique().tolist()) == {0.0, ONES.div(0.7)[0, 0].item()}
    assert abs(float((dropped == 0).float().mean()) - 0.3) < 0.02
    assert not draw(3, p=1.0).any()


def test_one_layer_call_draws_different_masks_in_turn() -> None:
    with SeededDropout(1, CPU):
        first, second = functional.dropout(ONES, 0.5), functional.dropout(ONES, 0.5)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: nn.Dropout(0.4)(x),
        lambda x: nn.Dropout(0.4, inplace=True)(x.clone()),
        lambda x: torch.dropout(x, 0.4, True),
        lambda x: torch.dropout_(x.clone(), 0.4, True),
        lambda x: functional.dropout(x, p=0.4, training=True),
    ],
)
def test_every_spelling_of_dropout_is_seeded(drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with SeededDropout(8, CPU):
        dropped = drop(ONES)
    assert torch.equal(dropped, draw(8, p=0.4))


def test_no_dropout_in_evaluation() -> None:
    with SeededDropout(1, CPU):
        assert torch.equal(nn.Dropout(0.5).eval()(ONES), ONES)
        assert torch.equal(functional.dropout(ONES, 0.5, training=False), ONES)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_attention_without_drops_is_torch_s_own(mask: str) -> None:
    """The seeded attention spells out what torch's documentation defines; a tiny p shows it next to the kernel."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 6, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, 6, 8, generator=generator)
    visible = torch.ones(6, 6, dtype=torch.bool).tril()
    options: dict[str, Any] = {"enable_gqa": True, "scale": 0.4}
    if mask == "causal":
        options["is_causal"] = True
    elif mask == "bool":
        options["attn_mask"] = visible
    elif mask == "float":
        options["attn_mask"] = torch.zeros(6, 6).masked_fill(~visible, float("-inf"))
    expected = functional.scaled_dot_product_attention(query, key, value, **options)
    with SeededDropout(1, CPU):
        got = functional.scaled_dot_product_attention(query, key, value, dropout_p=1e-7, **options)
        dropped = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5, **options)
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(dropped, expected)


def test_two_threads_draw_as_one() -> None:
    """On torch's global generator two threads never agreed with one; here they must."""
    expected = [draw(seed) for seed in range(20)]
    got: list[torch.Tensor] = [torch.empty(0)] * 20

    def work(seeds: range) -> None:
        for seed in seeds:
            got[seed] = draw(seed)

    threads = [threading.Thread(target=work, args=(range(start, 20, 2),)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize(
    ("model_type", "method", "lora_dropout", "changes", "expected"),
    [
        ("llama", "full", 0.0, {}, False),
        ("llama", "lora", 0.0, {}, False),
        ("llama", "lora", 0.1, {}, True),
        ("llama", "full", 0.0, {"attention_dropout": 0.1}, True),
        ("gpt2", "full", 0.0, {"embd_pdrop": 0.1}, True),
        ("opt", "full", 0.0, {"dropout": 0.1}, True),
    ],
)
def test_has_dropout(
    model_type: str, method: str, lora_dropout: float, changes: dict[str, float], expected: bool
) -> None:
    rig = make_rig(model_type, method, lora_dropout=lora_dropout, **changes)
    assert has_dropout(rig.skeleton) is expected


def test_a_step_neither_reads_nor_writes_global_random_state() -> None:
    rig = make_rig("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    microbatches, schedule = random_microbatches([(2, 8), (1, 5)]), schedule_for(rig, 2, 2)
    before = torch.random.get_rng_state()
    with rig.engine(2, seed=4) as engine:
        first = engine.run_step(microbatches, schedule, step=0).loss
        assert torch.equal(before, torch.random.get_rng_state())
        torch.manual_seed(1234)
        assert engine.run_step(microbatches, schedule, step=0).loss == first
        assert engine.run_step(microbatches, schedule, step=1).loss != first
    with rig.engine(2, seed=5) as engine:
        assert engine.run_step(microbatches, schedule, step=0).loss != first
