"""Answers with a label (KTO): the divergence and a step by plain PyTorch, runs, and rows as other tools write them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.settings import DatasetSpec, DataSettings, spec_of
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.build import make_engine, make_planner
from roundpipe_cli.train.preference import scored_before
from roundpipe_cli.train.prepare.rows import describe_labels
from roundpipe_cli.train.scoring import Scorer
from tests.data.test_data_columns import HI, NO, SHAREGPT, USER, YO
from tests.data.test_data_dataset import byte_tokenizer, trained_text, write_rows
from tests.support.adapters import random_adapter
from tests.support.e2e import STAGES, finetune, make_workspace, metrics, numbers
from tests.train.test_preference import setup_of

ROWS = [
    {"prompt": f"Count to {n}: ", "completion": ("yes " if n % 3 else "never ") + "ab" * (n % 4), "label": n % 3 > 0}
    for n in range(10)
]
WORDS = ("objective=kto", "kto.undesirable_weight=1.7")


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    work = make_workspace(tmp_path / "work", model, objective="kto", learning_rate=2.0e-2, **STAGES)
    write_rows(work / "rows.jsonl", ROWS)
    return work


def by_hand(model: Any, base: Any, rows: list[tuple[list[int], list[int], bool]], weights: tuple[float, float]) -> Any:
    """The step's loss by equations 7 and 8 of the paper, and the divergence, each row computed alone."""

    def score(one: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + answer])
        picked = torch.log_softmax(one(input_ids=ids, use_cache=False).logits[0, :-1].double(), -1)
        return picked.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()

    with torch.no_grad():
        mixed = [(prompt, rows[index - 1][1]) for index, (prompt, _, _) in enumerate(rows)]
        kl = torch.stack([score(model, *one) - score(base, *one) for one in mixed]).mean().clamp(min=0)
        references = [score(base, prompt, answer) for prompt, answer, _ in rows]
    losses = []
    for (prompt, answer, wanted), reference in zip(rows, references, strict=True):
        gained = score(model, prompt, answer) - reference
        z = gained - kl if wanted else kl - gained
        losses.append(weights[not wanted] * (1 - torch.sigmoid(0.1 * z)))
    return torch.stack(losses).mean(), kl


@pytest.mark.parametrize(("first", "last"), [(0, 10), (1, 3), (0, 4), (3, 4)])
def test_a_step_is_that_of_the_papers_equations(folder: Path, first: int, last: int) -> None:
    """Batches of two microbatches, mostly wanted or all; one row has no divergence."""
    write_rows(folder / "rows.jsonl", ROWS)
    random_adapter(folder / "model", folder / "first", target_modules="all-linear", init_lora_weights=False)
    words = (*WORDS, "lora.start_from=first", "lora.dropout=0")
    setup = setup_of(folder, *words)
    setup.store._reference.clear()  # the base model is compared with, not the adapter that is trained further
    indices = list(range(first, last))
    batches = [[(index,) for index in part] for part in (indices[::2], indices[1::2]) if part]
    planner = make_planner(setup)
    with make_engine(setup) as engine:
        scorer = Scorer(engine, planner, 2, lambda: False)
        microbatches, _ = scored_before(setup, scorer, batches, 0)
        result = engine.run_step(microbatches, planner.schedule(len(microbatches)), step=0)
    rows = []
    for index in indices:
        row = setup.dataset.rows[index]
        start = int((row.labels != -100).argmax())
        rows.append((row.input_ids[:start].tolist(), row.input_ids[start:].tolist(), bool(ROWS[index]["label"])))
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(other, str(folder / "first"), is_trainable=True)
    loss, kl = by_hand(model, base, rows, (1.0, 1.7))
    loss.backward()
    assert microbatches[0].preference is not None and microbatches[0].preference.kl is not None
    alone = last - first == 1  # its own answer would be the mismatched one
    expected = 0.0 if alone else float(kl)
    assert float(microbatches[0].preference.kl) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if alone:
        return
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-6)

    def plain(name: str) -> str:
        return name.removeprefix("base_model.model.").replace(".default", "")

    gradients = {plain(name): parameter.grad for name, parameter in model.named_parameters()}
    found = {plain(name): name for name in setup.store.trainable_names}
    assert found
    apart = [(setup.store.gradient(name) - gradients[key]).norm() for key, name in found.items()]
    norms = [gradients[key].norm() for key in found]
    assert math.hypot(*map(float, apart)) <= 1e-5 * math.hypot(*map(float, norms))


def test_a_run_moves_both_kinds_apart_and_evaluates_as_the_next_step(folder: Path) -> None:
    """Where a step and the evaluation have all rows, the loss after a step is that with which the next one begins."""
    every = ("gradient_accumulation_steps=5", "micro_batch_size=2", "lora.dropout=0", "num_train_epochs=4")
    evaluation = ("eval_datasets=[{path: rows.jsonl}]", "eval_steps=1", "eval_samples=1", "eval_max_new_tokens=2")
    done = finetune(folder, *every, *evaluation).expect(0)
    told = " ".join(done.err.split())
    assert "kto: 6 wanted and 4 unwanted answers; kto.undesirable_weight=1.5 balances them" in told
    assert "evaluation: 10 labelled answers, 10 to train on" in told
    rows = metrics(folder / "out")
    assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-4) and rows[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert f"margin {rows[-1]['reward_margin']:.3f}" in done.out and "perplexity" not in done.out
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["reward_margin"] > 0.01
    evaluated = [json.loads(line) for line in (folder / "out" / "eval.jsonl").read_text().splitlines()]
    for row, found in zip(rows[1:], evaluated, strict=False):
        for name in ("loss", "rewards_chosen", "rewards_rejected", "reward_margin", "kl"):
            assert found[name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), name


def test_the_same_bits_on_any_workers_and_after_a_kill(folder: Path) -> None:
    words = (
        "load_in_4bit=true",
        "max_steps=5",
        "save_steps=1",
        "micro_batch_tokens=128",
        "gradient_accumulation_steps=3",
    )
    write_rows(folder / "rows.jsonl", ROWS[:7])  # of which every second step has one
    assert "step 2 has one row, whose divergence" in finetune(folder, *words).expect(0).err
    three = "pipeline.devices=[cpu, cpu, cpu]"
    assert finetune(folder, *words, three, "output_dir=killed", fault="optimizer:kill:step=2").code == -9
    finetune(folder, *words, "pipeline.devices=[cpu]", "output_dir=killed", "--resume").expect(0)
    assert numbers(folder / "killed") == numbers(folder / "out")
    losses = [row["loss"] for row in metrics(folder / "out")]
    assert losses[-1] < losses[0] == pytest.approx(0.5, abs=1e-4), losses


def test_labels_of_one_kind_and_rare_ones_are_named(folder: Path) -> None:
    recipe = load_recipe(str(folder / "recipe.yaml"), ()).recipe
    dataset = build_dataset(
        DataSettings((spec_of(recipe.datasets[0], "labelled"),), 64, folder=folder), byte_tokenizer()
    )
    report = dataset.report
    assert (report.rows_kept, report.unwanted_rows) == (10, 4)
    all_said = {10: "away from them", 0: "warning", 9: "kto.desirable_weight=9", 5: "5 unwanted answers"}
    for unwanted, said in all_said.items():
        report.unwanted_rows = unwanted
        assert said in describe_labels(recipe, report)


UNKNOWN = "whether the answer is wanted"
FORMS: dict[str, tuple[list[dict[str, Any]], str | None]] = {
    "TRL": ([{"prompt": "Hi", "completion": "Yo", "label": True}], None),
    "TRL, messages": ([{"prompt": [USER], "completion": [YO], "label": False}], None),
    "LLaMA-Factory, sharegpt": ([{"messages": [USER, YO], "label": True}], None),
    "LLaMA-Factory, alpaca": ([{"instruction": "Hi", "input": "", "output": "Yo", "kto_tag": False}], None),
    "ShareGPT": ([{"conversations": SHAREGPT, "label": 1}], None),
    "axolotl, intel": ([{"question": "Hi", "answer": "Yo", "label": "true"}], None),
    "words": ([{"prompt": "Hi", "completion": "Yo", "label": "undesirable"}], None),
    "thumbs": ([{"prompt": "Hi", "response": "Yo", "thumbs_up": True}], None),
    "only the last answer": ([{"messages": [USER, NO, USER, YO], "label": True}], None),
    "three labels": ([{"prompt": "Hi", "completion": "Yo", "label": 2}], UNKNOWN),
    "missing": ([{"prompt": "Hi", "completion": "Yo", "label": True}, {"prompt": "Hi", "completion": "Yo"}], UNKNOWN),
    "null": ([{"prompt": "Hi", "completion": "Yo", "label": None}], UNKNOWN),
    "no label": ([{"prompt": "Hi", "completion": "Yo"}], "cannot find the labels"),
    "pairs": ([{"prompt": "Hi", "chosen": "Yo", "rejected": "No"}], "for pairs of answers, `objective: dpo`"),
    "texts": ([{"text": "Hi", "label": True}], "`columns: {prompt: COLUMN, completion: COLUMN}`"),
    "trl, implicit prompt": (
        [{"completion": "Hi. Yo", "label": True}],
        "prompt_completion: prompt, completion\n  hint: name the columns: `columns: {prompt: COLUMN,",
    ),
    "a weight": ([{"prompt": "Hi", "completion": "Yo", "label": True, "weight": 0.5}], "how much the row counts"),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_as_other_tools_write_them(tmp_path: Path, name: str) -> None:
    rows, refusal = FORMS[name]
    spec = DatasetSpec(str(write_rows(tmp_path / "x.jsonl", rows)))
    spec = replace(spec_of(spec, "labelled"), path=spec.path)
    tokenizer = byte_tokenizer()
    if refusal is not None:
        with pytest.raises(RefusedError) as caught:
            build_dataset(DataSettings((spec,), 1000), tokenizer)
        assert refusal in str(caught.value)
        return
    dataset = build_dataset(DataSettings((spec,), 1000), tokenizer)
    assert trained_text(tokenizer, dataset, 0)[1] == "Yo</s>" and trained_text(tokenizer, dataset, 0)[0].endswith(
        HI + "Yo</s>\n"
    )
    label = next(rows[0][key] for key in ("label", "kto_tag", "thumbs_up") if key in rows[0])
    assert dataset.rows[0].is_rejected is (label in (False, "undesirable"))
