"""Where a model does not fit a machine or is slow on it, `init`, `plan`, `plan --solve` and `finetune` say the same.

Forty pairs of a model and a machine that people have. Each remedy is planned again, as a user would type it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from roundpipe_cli.cli.init_choice import Choice, choose_settings
from roundpipe_cli.cli.output import wrapped
from roundpipe_cli.cli.plan import plan_document, plan_text
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.planning import choose, run_plan
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.fitting_recipe import fitting_recipe
from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.planning.run_plan import check_fits
from roundpipe_cli.planning.solve import Change, changed, remedies, solve, speedups
from roundpipe_cli.planning.what_if import summary_of
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe, load_text

F, S, N = "FITS", "SLOW", "DOES NOT FIT"
MACHINES = (
    *("1x3060,host_memory_gib=16", "1x4060ti-16gb,host_memory_gib=32"),
    *("2x3090,host_memory_gib=64", "4x4090,host_memory_gib=128"),
)
NONE, EIGHT, FOUR = "", "load_in_8bit=true", "load_in_4bit=true"
FITS = (F, NONE)
PAIRS = {  # model -> for each machine `plan`'s verdict on LoRA in 16 bit, and its first remedy
    "HuggingFaceTB/SmolLM2-1.7B": (FITS, FITS, FITS, FITS),
    "Qwen/Qwen3-4B": (FITS, FITS, FITS, FITS),
    "mistralai/Mistral-7B-v0.3": ((S, FOUR), FITS, FITS, FITS),
    "Qwen/Qwen3-8B": ((S, FOUR), FITS, FITS, FITS),
    "google/gemma-3-12b-pt": ((S, EIGHT), FITS, FITS, FITS),
    "openai/gpt-oss-20b": (FITS, FITS, FITS, FITS),
    "Qwen/Qwen3-30B-A3B": ((S, FOUR), (S, FOUR), FITS, FITS),
    "Qwen/Qwen3-32B": ((S, f"model=Qwen/Qwen3-14B {FOUR}"), (S, FOUR), (S, EIGHT), FITS),
    # 70B on the second machine: from the disk, and still SLOW
    "meta-llama/Llama-3.3-70B-Instruct": ((S, FOUR), (S, EIGHT), (S, FOUR), (S, EIGHT)),
    "Qwen/Qwen3-235B-A22B": ((S, FOUR), (S, FOUR), (S, FOUR), (S, FOUR)),
}
ASKED = {
    "HuggingFaceTB/SmolLM2-1.7B": (0,),
    "mistralai/Mistral-7B-v0.3": (0,),
    "openai/gpt-oss-20b": (2,),
    "Qwen/Qwen3-30B-A3B": (3,),
    "meta-llama/Llama-3.3-70B-Instruct": (1,),
}
"""Machines to ask about a model: each fits one, and packed weights are first remedies. Planning all remedies
again takes minutes."""
ALL = [(model, place, said) for model, row in PAIRS.items() for place, said in zip(range(4), row, strict=True)]
SWEPT = [[pytest.mark.sweep] * (place not in ASKED.get(model, ())) for model, place, _ in ALL]
EVERY = [
    pytest.param(model, MACHINES[place], *said, marks=marks, id=f"{model}-{MACHINES[place][:9]}")
    for (model, place, said), marks in zip(ALL, SWEPT, strict=True)
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even cuts in place of searched ones: verdicts are the same, and speeds those of the same cuts everywhere."""
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)


def recipe_of(model: str, machine: str, *lines: str) -> LoadedRecipe:
    rows = 32 if machine.startswith("4x") else 16
    keys = ["datasets: [{path: rows.jsonl}]", "max_seq_length: 2048", "micro_batch_tokens: auto"]
    keys += [f"gradient_accumulation_steps: {rows}", "packing: auto", "lora: {r: 16, alpha: 32}", *lines]
    return load_text("\n".join([f"model: {model}", *keys, ""]), "recipe.yaml")


def initial(model: str, machine: str) -> Choice | str:
    try:
        return choose_settings(model, machine, Path("recipe.yaml"))
    except RefusedError as error:
        return str(error)


def refused_run(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The refusal of a run on such a machine, None where it would begin."""
    question = plan.question
    here = replace(question.machine or question.hardware, is_here=True)
    memory = SimpleNamespace(available_bytes=1 << 50, total_bytes=1 << 50, limited_by="the machine")
    monkeypatch.setattr(run_plan, "host_memory", lambda: memory)
    try:
        check_fits(replace(question, hardware=here, machine=here))
    except ResourceError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("model", "machine", "word", "first"), EVERY)
def test_every_command_says_the_same(
    model: str, machine: str, word: str, first: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init` refused what `plan` called SLOW, and named a model of a quarter of the size."""
    loaded, answers = recipe_of(model, machine), Answers()
    plan = make_plan(loaded, machine, None, answers)
    found = remedies(plan)
    assert summary_of(plan).word == word and [" ".join(one.overrides) for one in found[:1]] == [first][: bool(first)]
    check_advice(loaded, machine, plan, found)
    started, refusal = initial(model, machine), refused_run(plan, monkeypatch)
    own = [change for change in found if not change.overrides[0].startswith("model=")]
    if isinstance(started, str):
        assert word == N and not own, started
        assert not found or found[0].what in " ".join(started.split())
    else:
        assert word == F or started.overrides == (own[0].overrides if own else ())  # what fits may be faster in 4 bit
        assert changed(loaded, started.overrides).recipe == replace(started.recipe, hardware=None)
    assert (refusal is not None) == (word == N)
    assert refusal is None or not found or found[0].what in " ".join(refusal.split())


def check_advice(loaded: LoadedRecipe, machine: str, plan: Plan, found: tuple[Change, ...]) -> None:
    """Each remedy does what it says; `plan` fits a screen and names them, `--solve` begins with the same."""
    word, answers = summary_of(plan).word, Answers()
    solved = solve(plan).changes
    screen = list(wrapped(plan_text(plan, None, details=False, found=found), 80))
    assert len(screen) <= 23 and max(map(len, screen)) <= 80, "\n".join(screen)  # the prompt comes behind it
    if word == F:
        assert found == () and solved == speedups(plan)
        return
    text = "\n".join(plan_text(plan, None, found=found))
    assert all(change.what in text for change in found) and (found or "remedy          none" in text)
    document = plan_document(plan, None, found)
    assert [one["what"] for one in document["remedies"]] == [change.what for change in found]
    of_recipe = [change for change in solved if change.machine is None]
    assert not found or not of_recipe or found[0] == of_recipe[0]
    for change in {*found, *of_recipe}:
        again = make_plan(changed(loaded, change.overrides), machine, None, answers)
        assert again.verdict.fits and summary_of(again).word == change.word, change
        assert again.tokens_per_s == change.tokens_per_s and f"{again.tokens_per_s:,.0f} tokens/s" in change.what
        assert word == N or again.tokens_per_s >= plan.tokens_per_s
    shipped = fitting_recipe(plan.question, found[-1] if found else None)
    if shipped is not None:
        verdict = make_plan(load_recipe(shipped[0], shipped[1:]), machine, None, answers).verdict
        assert verdict.fits, shipped
