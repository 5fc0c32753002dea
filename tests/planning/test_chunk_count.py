"""`pipeline.sequence_chunks: auto`: 1 where whole rows fit, otherwise the fastest number; longest rows with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from roundpipe_cli.cli.plan import plan_document, verdict_lines
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.machine import cpu_devices
from roundpipe_cli.errors import ContradictionError, RecipeError, ResourceError
from roundpipe_cli.planning import choose, chunk_count, run_plan
from roundpipe_cli.planning.chunk_count import CHUNK_COUNTS
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.question import PlanRequest, ask, ask_anew
from roundpipe_cli.planning.run_plan import check_fits
from roundpipe_cli.planning.solve import changed, faster_in_chunks, longest_sequences, solve
from roundpipe_cli.planning.verdict import judge_coarsest
from roundpipe_cli.recipe.check import chunk_clashes
from roundpipe_cli.recipe.load import LoadedRecipe, load_text
from roundpipe_cli.train.checkpoint.resume import as_decided
from roundpipe_cli.train.prepare.setup import _with_microbatches
from scripts.sweep_plans import sweep
from tests.support.covering import swept

SERVER = "host_memory_gib=745"  # 800 GB, as the published measurements had beside 8 RTX 4090
PUBLISHED = {  # method and thousands of tokens of the longest published sequences there
    "Qwen/Qwen3-1.7B": ("full", 73),
    "Qwen/Qwen3-8B": ("full", 49),
    "openai/gpt-oss-20b": ("full", 39),
    "Qwen/Qwen3-32B": ("full", 28),
    "Qwen/Qwen3-235B-A22B": ("lora", 31),
}


def recipe(model: str, *overrides: str) -> LoadedRecipe:
    return load_text(f"model: {model}\ndatasets: [{{path: rows.jsonl}}]\n", "recipe.yaml", overrides)


def chunks(question: PlanRequest) -> int:
    pipeline = question.loaded.recipe.pipeline
    assert pipeline.sequence_chunks == question.settings.sequence_chunks
    return pipeline.num_chunks


def published(model: str, cards: int, *overrides: str) -> PlanRequest:
    method, thousands = PUBLISHED[model]
    words = (f"method={method}", f"max_seq_length={thousands * 1024}", "gradient_accumulation_steps=8", *overrides)
    return ask(recipe(model, *words), f"{cards}x4090,{SERVER}")


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_longest_published_rows_fit_by_default(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_count, "NUM_SIMULATED", 1)
    asked = [published(model, cards) for cards in (1, 2, 4, 8)]
    assert all(judge_coarsest(one).fits for one in asked)
    tokens, count = longest_sequences(asked[-1])[""]
    assert count > 1 and tokens >= PUBLISHED[model][1] * 1024 + 32768
    for length, fits in ((tokens, True), (tokens + 64, False)):
        assert judge_coarsest(published(model, 8, f"max_seq_length={length}", "weights=pinned")).fits == fits


def test_the_headline_fits_and_says_how() -> None:
    words = ("max_seq_length=31744", "gradient_accumulation_steps=4")
    plan = make_plan(recipe("Qwen/Qwen3-235B-A22B", *words), "8x4090,host_memory_gib=1024")
    count = chunks(plan.question)
    assert plan.verdict.fits and count > 1 and plan.bubble_ratio < 0.05
    line = f"pipeline.sequence_chunks={count}: fastest on 8x4090, {31744 // count:,} tokens each"
    assert any(text.strip().startswith(line) for text in verdict_lines(plan))
    assert plan_document(plan, None)["sequence_chunks"] == count


@pytest.mark.parametrize("case", [("openai/gpt-oss-20b", 8), *swept([("Qwen/Qwen3-32B", 2)])], ids=str)
def test_auto_is_within_5_percent_of_the_best_number(case: tuple[str, int]) -> None:
    model, cards = case
    method, thousands = PUBLISHED[model]
    words = (f"method={method}", f"max_seq_length={thousands * 1024}", "gradient_accumulation_steps=8")

    def step_s(count: int | str) -> float:
        asked = recipe(model, *words, f"pipeline.sequence_chunks={count}")
        plan = make_plan(asked, f"{cards}x4090,{SERVER}")
        return plan.step_s if plan.verdict.fits else float("inf")

    assert step_s("auto") <= 1.05 * min(map(step_s, CHUNK_COUNTS))


def test_rows_that_fit_stay_whole() -> None:
    for machine in ("1x4090", "1x4090+1x3060", "1x4090,host_memory_gib=20"):
        asked = ask(recipe("Qwen/Qwen3-8B", "max_seq_length=24576"), machine)
        assert chunks(asked) == 1 and asked.loaded.recipe.token_budget == 24576
        assert not any("sequence_chunks" in line for line in asked.choices)
    assert chunks(ask(recipe("Qwen/Qwen3-8B", "max_seq_length=32768"), "1x3060")) > 1


EXCLUDED = {
    "objective=dpo": "objective: answers are compared as a whole",
    "neftune_noise_alpha=5": "neftune_noise_alpha: its noise",
    "pipeline.keep_activations=2": "pipeline.keep_activations: activations of chunks",
    "pipeline.schedule=1f1b": "pipeline.schedule: all chunks go forward",
    "micro_batch_tokens=131072": "micro_batch_tokens: chunked sequences",
}


@pytest.mark.parametrize("override", EXCLUDED)
def test_where_chunks_are_excluded_the_verdict_says_why(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    method = "lora" if override == "objective=dpo" else "full"
    words = ("max_seq_length=65536", f"method={method}", "gradient_accumulation_steps=2", override)
    asked = recipe("Qwen/Qwen3-8B", *words)
    plan = make_plan(asked, "2x4060ti-16gb,host_memory_gib=256")
    assert not plan.verdict.fits and chunks(plan.question) == 1
    (line,) = (text for text in verdict_lines(plan) if "pipeline.sequence_chunks=1: rows of 65,536" in text)
    assert EXCLUDED[override] in line
    assert len(chunk_clashes(asked.recipe)) == 1
    with pytest.raises(RecipeError, match=f"does not go with {EXCLUDED[override]}"):
        recipe("Qwen/Qwen3-8B", *words, "pipeline.sequence_chunks=8")


def test_processors_get_a_number_that_does_not_depend_on_theirs() -> None:
    """It is 1 where that many have room for whole rows: story: two were refused where one had."""
    asked = recipe("HuggingFaceTB/SmolLM2-135M-Instruct", "max_seq_length=32768", "dtype=float32")
    for host_gib, counts in (("5.5", (32, 32, 32)), ("7", (1, 32, 32))):
        machine = replace(parse_hardware(f"1x4090,host_memory_gib={host_gib}"), disk_free_bytes=None)
        plans = [ask(asked, replace(machine, devices=cpu_devices(workers))) for workers in (1, 2, 3)]
        assert tuple(map(chunks, plans)) == counts
    assert all(judge_coarsest(one).fits for one in plans)


def test_a_run_takes_the_number_and_the_most_of_several_machines() -> None:
    words, told = ("Qwen/Qwen3-8B", "max_seq_length=65536"), list[str]()
    asked = ask(recipe(*words), "1x3060,host_memory_gib=128")

    def tell(event: object) -> None:
        told.append(str(getattr(event, "text", "")))

    cases = ((2, chunks(asked), ()), (64, 64, ()), (64, 64, ["micro_batch_tokens=null"]))
    for others, count, given in (*cases, (64, 8, ["pipeline.sequence_chunks=8"])):
        decided = _with_microbatches(recipe(*words, *given), tell, partial(min, -others), asked).recipe
        assert decided.pipeline.sequence_chunks == count and decided.micro_batch_tokens is None
    assert told[0].startswith(f"pipeline.sequence_chunks={chunks(asked)}: fastest on 1x3060")


def test_too_few_chunks_are_refused_with_the_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe("Qwen/Qwen3-8B", "max_seq_length=65536", "gradient_accumulation_steps=2")
    kept = as_decided(asked, {"pipeline": {"sequence_chunks": 2}})
    assert kept.recipe.pipeline.num_chunks == 2
    smaller = ask(kept, "1x3060,host_memory_gib=512")
    here = replace(smaller.machine, is_here=True)
    memory = SimpleNamespace(available_bytes=1 << 50, total_bytes=1 << 50, limited_by="the machine")
    monkeypatch.setattr(run_plan, "host_memory", lambda: memory)
    needed = chunks(ask(asked, "1x3060,host_memory_gib=512"))
    assert needed > 2
    with pytest.raises(ResourceError) as caught:
        check_fits(replace(smaller, hardware=here, machine=here))
    assert f"pipeline.sequence_chunks={needed}: " in str(caught.value)


def test_chunks_are_named_where_they_make_whole_rows_faster() -> None:
    words = ("method=full", "gradient_accumulation_steps=8", "max_seq_length=65536")
    long = make_plan(recipe("Qwen/Qwen3-1.7B", *words), f"8x4090,{SERVER}")
    (change,) = faster_in_chunks(long)
    again = make_plan(recipe("Qwen/Qwen3-1.7B", *words, *change.overrides), f"8x4090,{SERVER}")
    assert chunks(long.question) == 1 < chunks(again.question)
    assert again.tokens_per_s == pytest.approx(change.speed) and change.speed >= 1.05 * long.tokens_per_s
    assert f"  faster          {change.what}" in verdict_lines(long, [change])
    assert plan_document(long, None, [change])["remedies"][0]["overrides"] == list(change.overrides)
    assert faster_in_chunks(make_plan(recipe("Qwen/Qwen3-1.7B", "max_seq_length=2048"), "1x4090")) == ()


def test_remedies_go_with_the_other_keys_of_the_recipe() -> None:
    """Story: a recipe in 8 chunks was asked about with microbatches filled by tokens, 4 for 8 chunks: a ValueError."""
    words = ("method=full", "max_seq_length=8192", "gradient_accumulation_steps=4", "pipeline.sequence_chunks=8")
    asked = recipe("HuggingFaceTB/SmolLM2-1.7B", *words)
    plan = make_plan(asked, "8x4090,host_memory_gib=256,host_memory_gb_per_s=3")
    assert plan_document(plan, solve(plan))["verdict"] == "SLOW"
    words = ("micro_batch_tokens=8192", "pipeline.sequence_chunks=8")
    with pytest.raises(ContradictionError):
        ask_anew(plan.question, changed(plan.question.given, words))


def test_no_plan_of_the_sweep_ends_in_an_internal_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)
    failed, count = sweep(["HuggingFaceTB/SmolLM2-135M-Instruct"] * 3, [], tmp_path, strength=1)
    assert not failed and count >= 4
