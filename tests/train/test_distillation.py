"""Figures beside the tokens, a teacher's scores and weights of rows: the step by plain PyTorch, any workers, runs."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch import nn
from transformers import AutoTokenizer

from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.engine.step import Microbatch, Part
from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.model.distillation import TeacherScores
from roundpipe_cli.model.head import HeadLoss, _scaled_loss, target_rows
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.train.prepare.rows import read_rows, read_teacher
from tests.data.test_data_columns import CHAT, SHAREGPT, USER, YO
from tests.data.test_data_dataset import byte_tokenizer
from tests.data.test_data_dataset import write_rows as write_these
from tests.support.e2e import (
    STAGES,
    edit_json,
    finetune,
    launch,
    make_model,
    make_workspace,
    metrics,
    numbers,
    run,
    write_rows,
)
from tests.support.tiny import Rig, check_step, make_rig, random_microbatches, schedule_for
from tests.train.test_score import small_windows

VOCABULARY = 128
SIZES = [(4, 11), (1, 9), (2, 8)]


def step(rig: Rig, batches: list[Microbatch], num_workers: int = 2, **options: Any) -> tuple[str, list[torch.Tensor]]:
    with rig.engine(num_workers, head_chunk_tokens=5, **options) as engine:
        result = engine.run_step(batches, schedule_for(rig, num_workers, len(batches)), step=0)
    return result.loss.hex(), [gradient.clone() for gradient in rig.store.gradients]


def taught(microbatches: list[Microbatch], kept: int, weight: float, temperature: float) -> list[Microbatch]:
    """Microbatches with the figures of a random teacher; the whole distributions are its logits' [N, V]."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for one in microbatches:
        indices, _ = target_rows(one.labels)
        whole = (3 * torch.randn(len(indices), VOCABULARY, generator=generator)).log_softmax(-1)
        values, ids = whole.topk(kept)
        left = whole.scatter(1, ids, -torch.inf).exp().sum(-1)
        found.append(replace(one, teacher=TeacherScores(ids.int(), values, left, weight, temperature)))
    return found


def plain_loss(rig: Rig, microbatches: list[Microbatch]) -> float:
    """By autograd in float64: K + 1 outcomes, or where the teacher kept the whole vocabulary the plain divergence."""
    rig.plain.zero_grad(set_to_none=True)
    total, units = torch.zeros((), dtype=torch.float64), 0.0
    for one in microbatches:
        indices, targets = target_rows(one.labels)
        logits = rig.plain(input_ids=one.input_ids, use_cache=False).logits.flatten(0, 1)[indices].double()
        teacher, student = one.teacher, logits.log_softmax(-1)
        assert teacher is not None
        values, ids, t = teacher.top_log_probabilities.double(), teacher.top_ids.long(), teacher.temperature
        if ids.shape[1] == VOCABULARY:
            p = torch.empty_like(values).scatter_(1, ids, values / t).softmax(-1)
            log_q = (logits / t).log_softmax(-1)
        else:
            kept = student.gather(1, ids)
            p = torch.cat([values, teacher.mass_left.double().log()[:, None]], 1).div(t).softmax(-1)
            rest = student.scatter(1, ids, -torch.inf).exp().sum(-1, keepdim=True).log()
            log_q = torch.cat([kept, rest], 1).div(t).log_softmax(-1)
        kl = (p * (p.log() - log_q)).sum(-1)
        entropy = nn.functional.cross_entropy(logits, targets, reduction="none")
        weights = torch.ones(len(indices)) if one.weights is None else one.weights.flatten()[indices + 1]
        total = total + (weights * ((1 - teacher.weight) * entropy + teacher.weight * t**2 * kl)).sum()
        units += float(weights.sum())
    loss = total / units
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(
    ("kept", "weight", "temperature"), [(VOCABULARY, 1.0, 2.0), (VOCABULARY, 0.5, 1.0), (8, 0.7, 1.5)]
)
def test_loss_and_gradients_are_those_of_full_logits(method: str, kept: int, weight: float, temperature: float) -> None:
    """The chunks of the head have 5 targets; the second microbatch has weights."""
    rig = make_rig("llama", method)
    made = random_microbatches(SIZES)
    made[1] = replace(made[1], weights=torch.tensor([0.5, 1.0, 3.0]).repeat(3)[None])
    microbatches = taught(made, kept, weight, temperature)
    check_step(rig, plain_loss(rig, microbatches), partial(step, rig, microbatches))


# -- from scores to a result -----------------------------------------------------------------------------------------


def distill(**changes: Any) -> dict[str, Any]:
    return {"objective": "distill", "distill": {"teacher": "scores", "temperature": 2.0}, **STAGES, **changes}


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A workspace whose recipe distills, with the scores of another model in `scores`."""
    work = make_workspace(tmp_path_factory.mktemp("taught") / "work", model, **distill())
    make_model(work / "teacher", seed=1)
    words = ("score", "recipe.yaml", "rows.jsonl", "model=teacher", "--top-k", "5")
    launch(work, *words, "--to", "scores", before=small_windows).finish().expect(0)
    run(work, *words[:4], "--to", "lines").expect(0)
    return work


@pytest.mark.parametrize(
    "words",
    [("packing=true",), ("pipeline.sequence_chunks=2",), ("method=full",), ("kernels=reference", "load_in_4bit=true")],
    ids=str,
)
def test_any_workers_and_a_kill_train_the_same_bits(scored: Path, words: tuple[str, ...]) -> None:
    """Where figures or weights lie otherwise than usual."""
    words = (*words, "max_steps=3", "save_steps=1", "pipeline.forward_stages=auto", "pipeline.backward_stages=auto")
    whole, killed = (f"{words[0]}-{name}" for name in ("whole", "killed"))
    finetune(scored, *words, "pipeline.devices=[cpu,cpu,cpu]", f"output_dir={whole}").expect(0)
    for row in metrics(scored / whole):
        assert row["loss"] == pytest.approx(0.5 * row["nll_loss"] + 0.5 * 4 * row["kl"], rel=1e-6) and row["kl"] > 0
    assert finetune(scored, *words, f"output_dir={killed}", fault="optimizer:kill:step=2").code == -9
    finetune(scored, *words, f"output_dir={killed}", "pipeline.devices=[cpu]", "--resume").expect(0)
    assert numbers(scored / killed) == numbers(scored / whole)


def test_evaluations_say_cross_entropy_and_divergence(scored: Path) -> None:
    """The first is that of a run on labels alone."""
    words = ("max_steps=2", "learning_rate=1e-30", "eval_datasets=[{path: rows.jsonl}]")
    done = finetune(scored, *words, "output_dir=taught").expect(0)
    labels = finetune(scored, *words, "objective=sft", "output_dir=labels").expect(0)
    (row,), (other,) = (
        [json.loads(line) for line in (scored / name / "eval.jsonl").read_text().splitlines()]
        for name in ("taught", "labels")
    )
    assert row["loss_hex"] == other["loss_hex"] and row["perplexity"] == other["perplexity"] and "kl" not in other
    assert "last kl" in (scored / "taught" / "report.html").read_text()
    assert row["kl"] > 0 and re.search(r"perplexity \S+  kl \d", done.out + done.err)
    assert re.search(r"step 1/2 .* loss \S+  kl \S+  grad", done.out) and "(cross entropy alone)" in done.err
    assert "cross entropy alone" not in labels.err


def test_a_resume_takes_scores_elsewhere_and_refuses_others(scored: Path) -> None:
    words = ("save_steps=1", "output_dir=resumed")
    finetune(scored, *words, "max_steps=1").expect(0)
    (scored / "moved").mkdir()
    for path in (scored / "scores").iterdir():
        (scored / "moved" / path.name).write_bytes(path.read_bytes())
    first = min((scored / "moved").glob("tokens-*"))
    table = parquet.read_table(first)
    assert table.num_rows > 1
    for start, path in enumerate((first, first.with_name("tokens-000000001.parquet"))):  # cut into other windows
        parquet.write_table(table.slice(start, None if start else 1), path)
    finetune(scored, *words, "max_steps=2", "distill.teacher=moved", "--resume").expect(0)
    changed(scored / "moved", lambda rows: [each["top_ids"].reverse() for each in rows])
    done = finetune(scored, *words, "max_steps=3", "distill.teacher=moved", "--resume")
    assert done.code == 2 and "distill.teacher (scores)" in done.err


def test_scores_made_in_other_words_that_have_every_row_are_taken(scored: Path, tmp_path: Path) -> None:
    """Another text of the template, or longer rows, that come to the same tokens."""
    shutil.copytree(scored / "scores", tmp_path / "scores")
    edit_json(tmp_path / "scores" / "header.json", template_hash="0" * 64, max_seq_length=9999)
    words = [f"distill.teacher={tmp_path / 'scores'}", f"datasets=[{{path: {scored / 'rows.jsonl'}}}]"]
    loaded, tokenizer = load_recipe(scored / "recipe.yaml", words), AutoTokenizer.from_pretrained(scored / "model")
    assert read_teacher(loaded, read_rows(loaded, tokenizer, True, str), tokenizer) is not None


def changed(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the rows of the second table in place."""
    path = sorted(folder.glob("tokens-*"))[1]
    table = parquet.read_table(path).select(["digest", "mass_left", "top_ids", "top_log_probabilities"])
    rows = table.to_pylist()
    change(rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), path)


def moved_target(rows: list[dict[str, Any]]) -> None:
    """The second row has the last target of the first."""
    for name, size in (("mass_left", 1), ("top_ids", 5), ("top_log_probabilities", 5)):
        first, second = (each[name] for each in rows[:2])
        first[:], second[:] = first[:-size], first[-size:] + second


def repeated(rows: list[dict[str, Any]]) -> None:
    rows[0]["top_ids"][0] = rows[0]["top_ids"][1]


def one_token_less(rows: list[dict[str, Any]]) -> None:
    for each in rows:
        each["top_ids"].pop()


def first_value(name: str, value: float) -> Callable[[Path], None]:
    """A table whose column's first value is this one."""
    as_stored = np.float16(value) if "log" in name else value

    def put(rows: list[dict[str, Any]]) -> None:
        rows[0][name][0] = as_stored

    return lambda folder: changed(folder, put)


def damaged(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """The second table, as another one."""

    def rewrite(folder: Path) -> None:
        path = sorted(folder.glob("tokens-*"))[1]
        parquet.write_table(change(parquet.read_table(path)), path)

    return rewrite


def cut(folder: Path) -> None:
    path = sorted(folder.glob("tokens-*"))[1]
    path.write_bytes(path.read_bytes()[:-40])


def wide(table: Any) -> Any:
    name = "top_log_probabilities"
    return table.set_column(table.column_names.index(name), name, table["mass_left"])


def header(folder: Path, key: str, value: Any) -> None:
    edit_json(folder / "header.json", **{key: value})


def keep(folder: Path) -> None:
    """The scores are good."""


BAD: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (shutil.rmtree, "", "no scores are there to learn from"),
    "no header": (lambda folder: (folder / "header.json").unlink(), "", "no scores are there"),
    "another file": (lambda folder: (folder / "header.json").write_text("[1]"), "", "no scores are there"),
    "a text": (lambda folder: header(folder, "top_k", "5"), "", "these scores have no tables"),
    "others": (lambda folder: header(folder, "top_k", 6), "", "not 6 tokens"),
    "no rows": (lambda folder: header(folder, "rows", None), "", "no scores are there"),
    "a table is cut": (cut, "", "the teacher's scores are damaged"),
    "a table is gone": (lambda folder: sorted(folder.glob("tokens-*"))[1].unlink(), "", "are not complete"),
    "no ids": (damaged(lambda table: table.drop_columns(["top_ids"])), "", "are damaged"),
    "NaN": (first_value("top_log_probabilities", math.nan), "", "no finite number"),
    "above 1": (first_value("top_log_probabilities", 6e4), "", "do not add up to 1"),
    "more than 1": (first_value("mass_left", 0.99), "", "do not add up to 1"),
    "below 0": (first_value("mass_left", -1e-3), "", "do not add up to 1"),
    "a token twice": (lambda folder: changed(folder, repeated), "", "a token twice at one place"),
    "a row's targets": (lambda folder: changed(folder, moved_target), "", "2 rows without scores"),
    "an id": (first_value("top_ids", 300), "", "not all in the student's vocabulary"),
    "fewer tokens": (lambda folder: changed(folder, one_token_less), "", "not 5 tokens at each place"),
    "float32": (damaged(wide), "", "columns of other types"),
    "other rows": (
        lambda folder: write_rows(folder.parent / "rows.jsonl", 12),
        "",
        "2 rows without scores, such as rows",
    ),
    "shorter rows": (keep, "max_seq_length=40", "what differs: max_seq_length"),
    "trained prompts": (keep, "train_on_inputs=true", "10 rows without scores"),
    "a template": (
        lambda folder: header(folder, "template_hash", "0" * 64),
        *("max_seq_length=40", "what differs: template_hash, max_seq_length"),
    ),
    "a vocabulary": (lambda folder: header(folder, "vocabulary_hash", ""), "", "what differs: vocabulary_hash"),
    "no tables": (keep, "distill.teacher=lines", "these scores have no tables to learn from"),
    "no teacher": (keep, "distill.teacher=null", "objective distill needs a teacher's scores"),
    "smoothing": (keep, "label_smoothing_factor=0.1", "the teacher smooths"),
}


@pytest.mark.parametrize("name", BAD)
def test_scores_that_are_not_the_rows_own_are_one_error(
    name: str, scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (change, word, expected), model = BAD[name], scored / "model"
    for file in ("rows.jsonl", "recipe.yaml"):
        shutil.copy(scored / file, tmp_path / file)
    for folder in ("scores", "lines"):
        shutil.copytree(scored / folder, tmp_path / folder)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    change(tmp_path / "scores")
    with pytest.raises((RefusedError, RecipeError)) as caught:
        loaded, tokenizer = load_recipe("recipe.yaml", [word] if word else []), AutoTokenizer.from_pretrained(model)
        read_teacher(loaded, read_rows(loaded, tokenizer, True, str), tokenizer, 300)
    assert len(caught.value.problems) == 1 and expected in str(caught.value)


# --- rows and turns with weights --------------------------------------------------------------------------------------


def weighed() -> list[Microbatch]:
    """Each token with a weight, 0.5 and 3 among them; the second microbatch has none."""
    generator = torch.Generator().manual_seed(5)
    made = random_microbatches(SIZES)
    draws: list[Any] = [
        torch.tensor([0.5, 1.0, 3.0])[torch.randint(3, one.labels.shape, generator=generator)] for one in made
    ]
    draws[1] = None
    return [replace(one, weights=draw) for one, draw in zip(made, draws, strict=True)]


def weighed_loss(rig: Rig, microbatches: list[Microbatch], smoothing: float) -> float:
    """Sum of weights times cross entropy over all logits, divided by the sum of weights."""
    rig.plain.zero_grad(set_to_none=True)
    total, units = torch.zeros((), dtype=torch.float64), 0.0
    for one in microbatches:
        logits = rig.plain(input_ids=one.input_ids, use_cache=False).logits[:, :-1].double()
        labels = one.labels[:, 1:]
        losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing
        )
        weights = torch.ones(labels.shape) if one.weights is None else one.weights[:, 1:]
        total = total + (losses * weights).sum()
        units += float(weights[labels != -100].sum())
    loss = total / units
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize(("method", "options"), [("lora", {}), ("full", {"label_smoothing": 0.1})])
def test_weighed_loss_and_gradients_are_those_of_full_logits(method: str, options: dict[str, Any]) -> None:
    rig = make_rig("llama", method)
    microbatches = weighed()
    expected = weighed_loss(rig, microbatches, options.get("label_smoothing", 0.0))
    check_step(rig, expected, partial(step, rig, microbatches, **options))


def test_chunks_and_parts_of_a_step_add_up_to_it() -> None:
    """Chunks of a sequence, and the shares of two machines, divide by the weights of the whole step."""
    rig = make_rig("llama", "full")
    microbatches = weighed()
    whole, gradients = step(rig, microbatches)
    last = rig.num_layers - 1
    stages = {"forward_stages": [(0, last - 1)], "backward_stages": [(last, last), (0, last - 1)]}
    rounds = Rounds(2 * len(SIZES), sequence_chunks=2)
    chunks = build_schedule("roundpipe", num_workers=1, rounds=rounds, **stages)  # type: ignore[arg-type]
    units = sum(one.num_units for one in microbatches)
    assert units != sum(len((one.labels[:, 1:] != -100).nonzero()) for one in microbatches)
    with rig.engine(1, head_chunk_tokens=5) as engine:
        assert engine.run_step(microbatches, chunks, step=0).loss == pytest.approx(float.fromhex(whole), rel=1e-6)
        for mine, theirs in zip(rig.store.gradients, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        parts = [(microbatches[:1], Part(0, units)), (microbatches[1:], Part(1, units))]
        losses = [engine.run_step(one, schedule_for(rig, 1, len(one)), step=0, part=part).loss for one, part in parts]
    assert sum(losses) == pytest.approx(float.fromhex(whole), rel=1e-6)


def test_losses_that_are_written_over_the_logits_have_the_same_weights() -> None:
    logits, targets = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)), torch.arange(6)
    factors = torch.tensor([[0.5], [1], [3], [0.25], [1], [2]])
    kinds = [HeadLoss(0.3, 8, label_smoothing=0.1, in_place=in_place) for in_place in (False, True)]
    (loss, gradient), (other, written) = (_scaled_loss(logits.clone(), targets, kind, factors) for kind in kinds)
    assert float(loss) == pytest.approx(float(other), rel=1e-6)
    torch.testing.assert_close(gradient, written)
    with pytest.raises(RefusedError, match="takes no weights"):
        _scaled_loss(logits, targets, replace(kinds[0], own=lambda logits, targets: logits.sum()), factors)


def weights_of(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> list[list[float]]:
    """The weights of each row's trained tokens, each once."""
    spec = DatasetSpec(str(write_these(tmp_path / "x.jsonl", rows)), **options)
    dataset = build_dataset(DataSettings((spec,), 1000), byte_tokenizer())
    return [sorted({1.0} if row.weights is None else set(row.weights.tolist()) - {0.0}) for row in dataset.rows]


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


FORMS: dict[str, tuple[dict[str, Any], list[float] | str]] = {
    "a row": ({"prompt": "Hi", "completion": "Yo", "weight": 0.5}, [0.5]),
    "its text": ({"prompt": "Hi", "completion": "Yo", "weight": "2.5"}, [2.5]),
    "a sample": ({"text": "Hi", "sample_weight": 3}, [3.0]),
    "null": ({"prompt": "Hi", "completion": "Yo", "weight": None}, [1.0]),
    "a chat": ({"messages": CHAT, "weight": 0.25}, [0.25]),
    "turns": ({"messages": [USER, said("a", weight=0.5), USER, said("b")]}, [0.5, 1.0]),
    "OpenAI": ({"messages": [USER, said("a", weight=0), USER, said("b", weight=1)]}, [1.0]),
    "axolotl, train": ({"messages": [USER, said("a", train=False), USER, said("b", train=True)]}, [1.0]),
    "axolotl, ShareGPT": ({"conversations": [SHAREGPT[0], {**SHAREGPT[1], "weight": 0.5}]}, [0.5]),
    "LLaMA-Factory, alpaca": ({"instruction": "Hi", "output": "Yo", "weight": 2}, [2.0]),
    "both": ({"messages": [USER, said("a", weight=0.5)], "weight": 3}, [1.5]),
    "a loss": ({"messages": [USER, said("a", loss=False), USER, {**YO, "loss_weight": 0.5}]}, [0.5]),
    "negative": ({"prompt": "Hi", "completion": "Yo", "weight": -1}, "no weight\n  found: -1"),
    "NaN": ({"prompt": "Hi", "completion": "Yo", "weight": math.nan}, "no weight\n  found: nan"),
    "a word": ({"prompt": "Hi", "completion": "Yo", "weight": "high"}, "`weight` is no weight"),
    "a list": ({"prompt": "Hi", "completion": "Yo", "weights": [1, 0.5]}, "how much the row counts"),
    "two columns": ({"prompt": "Hi", "completion": "Yo", "weight": 1, "loss_weight": 2}, "how much the row counts"),
    "a turn's": ({"messages": [USER, said("a", weight=-0.5)]}, "messages[1].weight` is no weight"),
    "all 0": ({"prompt": "Hi", "completion": "Yo", "weight": 0}, "no row is left"),
    "a turn's word": ({"messages": [USER, said("a", train="later")]}, "whether this turn is trained"),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_as_other_tools_write_them(tmp_path: Path, name: str) -> None:
    row, expected = FORMS[name]
    if isinstance(expected, list):
        assert weights_of(tmp_path, [row]) == [pytest.approx(expected)]
        return
    with pytest.raises(RefusedError) as caught:
        weights_of(tmp_path, [row])
    assert expected in str(caught.value) and (name == "all 0" or "x.jsonl:1" in str(caught.value))


def test_a_row_of_weight_0_is_left_out_and_a_column_can_be_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "Hi", "completion": "Yo", "w": weight} for weight in (1, 0, 2)]
    assert weights_of(tmp_path, rows, columns={"weight": "w"}) == [[1.0], [2.0]]


@pytest.mark.parametrize("words", [(), ("packing=true",), ("pipeline.sequence_chunks=2",), ("method=full",)], ids=str)
def test_equal_weights_train_as_none_and_resume_to_the_bit(tmp_path: Path, model: Path, words: tuple[str, ...]) -> None:
    """The loss is a weighted mean: 2 for all rows is as 1; other weights are another run, killed and resumed or not."""
    work = make_workspace(tmp_path / "work", model, **STAGES)
    rows = [{"prompt": f"Say {n}: ", "completion": f"{n} is said {'so ' * (n % 3)}"} for n in range(10)]
    found = {}
    for name, weights in {"none": (1, 1), "equal": (2, 2), "mixed": (0.5, 1.5)}.items():
        if words and name != "mixed":
            continue  # their means are those of microbatches as they are
        write_these(work / "rows.jsonl", [{**row, "weight": weights[n % 2]} for n, row in enumerate(rows)])
        finetune(work, *words, "max_steps=3", f"output_dir={name}").expect(0)
        found[name] = numbers(work / name)
    if not words:
        assert found["none"] == found["equal"] != found["mixed"]
        return  # a resume reads rows as the others do
    killed = (*words, "max_steps=3", "save_steps=1", "output_dir=killed")
    assert finetune(work, *killed, "pipeline.devices=[cpu]", fault="optimizer:kill:step=2").code == -9
    finetune(work, *killed, "--resume").expect(0)
    assert numbers(work / "killed") == found["mixed"]
