"""`plan` for several machines: each one's rows, the exchange of gradients in the step, what it costs, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundpipe_cli.cli.plan import plan_document, verdict_lines
from roundpipe_cli.costs.analytic import trainable_params
from roundpipe_cli.costs.find_model import shipped_figures
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.predict import Plan, make_plan, priced
from roundpipe_cli.planning.solve import remedies
from roundpipe_cli.planning.what_if import compare_plans, summary_of
from roundpipe_cli.recipe.load import load_recipe

FIGURES = {**shipped_figures()["Qwen/Qwen3-8B"], "num_hidden_layers": 4, "architectures": ["Qwen3ForCausalLM"]}
RECIPE = """
model: {}/model
method: full
datasets: [{{path: rows.jsonl}}]
max_seq_length: 2048
packing: false
micro_batch_size: 1
gradient_accumulation_steps: 12
"""
ONE = "2x4090,host_memory_gib=256"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 10)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(FIGURES))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(tmp_path))
    return tmp_path / "recipe.yaml"


def planned(recipe: Path, hardware: str, *overrides: str) -> Plan:
    return make_plan(load_recipe(recipe, list(overrides)), hardware)


def test_a_slow_network_takes_the_step_and_a_fast_one_leaves_each_machines_own_part(recipe: Path) -> None:
    """Each gradient once each way at its rate, but for what is sent while backward computes."""
    half = planned(recipe, ONE, "gradient_accumulation_steps=6")
    fast = planned(recipe, f"{ONE},machines=2,network_gb_per_s=1000000")
    slow = planned(recipe, f"{ONE},machines=2,network_gb_per_s=0.1")
    update_s = sum(layer.optimizer_s for layer in half.question.costs.layers)
    assert half.step_s < fast.step_s < half.step_s + update_s
    assert fast.exchange.waiting_s < 1e-4 and fast.tokens_per_s == pytest.approx(12 * 2048 / fast.step_s)
    params = trainable_params(slow.question.architecture, slow.question.settings)
    rows = 12 * 2048 / slow.question.architecture.vocab_size  # of the embedding those of the step's tokens
    assert slow.exchange.num_bytes == pytest.approx(4 * (sum(params[1:]) + rows * params[0]), rel=1e-6)
    assert slow.exchange.network_s == pytest.approx(slow.exchange.num_bytes / 0.1e9)
    beside_s = slow.exchange.network_s - slow.exchange.waiting_s
    assert 0 < beside_s < half.step_s and slow.step_s == pytest.approx(fast.step_s + slow.exchange.waiting_s, rel=1e-3)
    assert slow.arithmetic_s == pytest.approx(fast.arithmetic_s) and slow.waiting_s == pytest.approx(fast.waiting_s)


def test_more_machines_send_more_and_adapters_little(recipe: Path) -> None:
    words = f"{ONE},machines={{}},network_gb_per_s=0.1"
    two, four = (planned(recipe, words.format(count)) for count in (2, 4))
    assert four.exchange.num_bytes == pytest.approx(1.5 * two.exchange.num_bytes)
    assert four.question.settings.num_microbatches == 3
    adapters = planned(recipe, words.format(2), "method=lora")
    assert adapters.exchange.num_bytes < 0.02 * two.exchange.num_bytes
    assert adapters.exchange.waiting_s < adapters.exchange.network_s


def test_state_that_is_shared_out_saves_memory_and_sends_weights(recipe: Path) -> None:
    words = f"2x4090,host_memory_gib={{}},machines=2,network_gb_per_s=0.1"  # noqa: F541
    whole, asked = (planned(recipe, words.format(256), *key) for key in ((), ("nodes.shard_optimizer=true",)))
    weights = 2 * sum(trainable_params(whole.question.architecture, whole.question.settings))
    assert asked.exchange.num_bytes - whole.exchange.num_bytes == pytest.approx(weights)
    assert asked.verdict.host.total_bytes < whole.verdict.host.total_bytes
    between = (asked.verdict.host.total_bytes + whole.verdict.host.total_bytes) // 2**31
    short = planned(recipe, words.format(between))
    assert short.verdict.fits and short.question.settings.num_shards == 2
    assert not planned(recipe, words.format(between), "nodes.shard_optimizer=false").verdict.fits


def test_what_is_shown_and_paid_is_of_all_machines(recipe: Path) -> None:
    answer = priced(planned(recipe, f"{ONE},machines=2,network_gb_per_s=0.1"), 3.0)
    text = "\n".join(verdict_lines(answer))
    assert "2x4090, 2 such machines with 0.1 GB/s between them" in text
    assert "24,576 tokens" in text and "exchange between machines" in text and "for each machine" in text
    document = plan_document(answer, None)
    predicted = document["predicted"]
    parts = [predicted[key] for key in ("arithmetic_s", "launches_s", "waiting_s", "exchange_s")]
    assert sum(parts) == pytest.approx(predicted["step_s"]) and document["machines"] == 2
    dollars = 2 * 3.0 / 3600 * 1e9 / answer.tokens_per_s
    assert predicted["dollars_per_billion_tokens"] == pytest.approx(dollars)
    summary = summary_of(answer)
    assert summary.word == "SLOW" and "most for the network" in summary.reasons[0]
    assert remedies(answer)[0].overrides[0].startswith("gradient_accumulation_steps=")


def test_one_machine_and_two_are_compared(recipe: Path) -> None:
    values = [f"hardware={ONE},{ONE},machines=2,network_gb_per_s=12.5", "method=lora"]
    rows = compare_plans(str(recipe), values, None, None, tell=lambda *_: None)
    assert [row.plan.question.hardware.machines for row in rows if row.plan] == [2, 1]


REFUSED = {
    "machines=2": "the network between the machines is not given",
    "network_gb_per_s=1.25": "a network, but only one machine",
    "machines=2.5,network_gb_per_s=1": "machines is not a whole number",
    "machines=0,network_gb_per_s=1": "machines is not a whole number",
    "machines=65,network_gb_per_s=1": "too many machines",
    "machines=1000000000,network_gb_per_s=1": "machines is not a whole number above 0 and below 1e9",
    "machines=2,network_gb_per_s=0": "network_gb_per_s is not a number above 0 and below 1e9",
}


@pytest.mark.parametrize("figures", REFUSED)
def test_a_network_and_its_machines_belong_together(figures: str) -> None:
    with pytest.raises(RefusedError, match=REFUSED[figures]):
        parse_hardware(f"8x4090,{figures}")


@pytest.mark.parametrize("override", ["on_oom=adapt", "gradient_accumulation_steps=1"])
def test_what_several_machines_do_not_train_is_not_planned_for_them(recipe: Path, override: str) -> None:
    planned(recipe, ONE, override)
    with pytest.raises(RefusedError, match="machines"):
        planned(recipe, f"{ONE},machines=2,network_gb_per_s=1", override)
