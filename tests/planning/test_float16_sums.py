"""Products that add up in float16: named with their speed and price where cards are faster so, never chosen."""

from __future__ import annotations

import pytest
import torch

from roundpipe_cli.costs.block_work import block_work
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import parse_hardware, rates_of
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.planning.solve import solve, speedups
from roundpipe_cli.recipe.load import load_text
from scripts.float16_sums import Linear, in_float16

KEYS = ("dtype=float16", "float16_accumulation=true")


def planned(model: str, hardware: str, *overrides: str) -> Plan:
    text = f"model: {model}\ndatasets: [{{path: rows.jsonl}}]\nmax_seq_length: 2048\nmicro_batch_tokens: 4096\n"
    lines = "".join(f"{one.replace('=', ': ')}\n" for one in overrides)
    return make_plan(load_text(text + lines, "recipe.yaml"), hardware)


def test_a_geforce_is_offered_them_with_speed_and_price() -> None:
    plan = planned("Qwen/Qwen3-1.7B", "1x3090")
    assert plan.question.settings.dtype == "bfloat16" and not plan.question.settings.float16_accumulation
    (change,) = speedups(plan)
    assert change.overrides == KEYS and "float32" in change.cost and "%" in change.cost
    again = planned("Qwen/Qwen3-1.7B", "1x3090", *KEYS)
    assert again.tokens_per_s == pytest.approx(change.speed, rel=0.02) and change.speed > 1.1 * plan.tokens_per_s
    assert solve(plan).changes == (change,)
    half = planned("Qwen/Qwen3-1.7B", "1x3090", "dtype=float16")
    assert [one.overrides for one in speedups(half)] == [KEYS[1:]]


@pytest.mark.parametrize(
    ("model", "hardware", "overrides"),
    [
        *(("Qwen/Qwen3-1.7B", "1xh100", ()), ("Qwen/Qwen3-1.7B", "1x3090+1xh100", ())),
        *(("Qwen/Qwen3-1.7B", "1x3090", KEYS), ("Qwen/Qwen3-1.7B", "1x3090", ("dtype=float32",))),
        ("google/gemma-3-1b-it", "1x3090", ()),
        ("Qwen/Qwen3-30B-A3B", "1x3090", ("load_in_4bit=true",)),
    ],
)
def test_who_gains_nothing_is_not_offered_them(model: str, hardware: str, overrides: tuple[str, ...]) -> None:
    changes = speedups(planned(model, hardware, *overrides))
    assert all("float16_accumulation=true" not in change.overrides for change in changes)


def test_experts_add_up_in_float32_whatever_the_recipe_says() -> None:
    """They were priced by the rate of sums in float16, which only the products of all tokens have."""
    architecture, device = find_architecture("Qwen/Qwen3-30B-A3B"), parse_hardware("1x3090").devices[0]
    products = block_work(architecture, architecture.blocks[0], TrainingSettings(8192)).forward.shapes
    exact, half = (rates_of(device, "float16", how) for how in ("fp32", "fp16"))
    faster = {one.is_grouped: half.product_s(one) < exact.product_s(one) for one in products if one.useful_flops > 1e11}
    assert faster == {True: False, False: True}


def test_the_substitute_rounds_after_each_block() -> None:
    """2,048 and a half: float16 has no such number, so that a half is lost unless its like are added first."""
    left, right = torch.tensor([[2048.0] + [0.5] * 15]), torch.ones(16, 1)
    assert float(in_float16(16)(left, right)) == 2056.0
    assert float(in_float16(1)(left, right)) == 2048.0
    inputs, weight = torch.randn(5, 24), torch.randn(7, 24)
    inputs.requires_grad_(), weight.requires_grad_()
    out = Linear.apply(inputs, weight, in_float16(8))
    out.square().sum().backward()
    exact = (2 * (inputs @ weight.T) @ weight).detach()
    assert inputs.grad is not None and 0 < float((inputs.grad - exact).norm() / exact.norm()) < 0.01
