"""`roundpipe score`: what evaluation and plain PyTorch compute, in a folder that a kill between any two lines leaves
good."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.teacher import row_digest
from roundpipe_cli.train import score as scoring
from roundpipe_cli.train.prepare import steps
from tests.support.e2e import (
    STAGES,
    Outcome,
    edit_json,
    finetune,
    launch,
    make_workspace,
    num_lines,
    run,
    tree,
    write_rows,
)

TABLES = ("--per-token", "--top-k", "5")
OWN = ("scores.jsonl", "header.json", "tokens-")
NUM_ROWS = 40


def small_windows() -> None:
    """Several rows a window, in a process that is started."""
    steps.WINDOW_TOKENS = 1
    steps.MIN_MICROBATCHES = 1


def ticking() -> None:
    """Progress with each microbatch, by a clock on which each takes a second."""
    scoring.TELL_EVERY_S, scoring.time = 0.0, SimpleNamespace(monotonic=partial(next, itertools.count()))  # type: ignore[assignment]


def limited(most_bytes: int) -> None:
    """A disk that is full behind so many bytes of a file."""
    small_windows()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def killed_after(num_writes: int) -> None:
    """SIGKILL behind so many writes of a process; its windows are as they are, so that all rows are in one."""
    left = iter(range(num_writes, -1, -1))

    def then_killed(write: Callable[..., Any], *words: Any) -> Any:
        done = write(*words)
        if next(left) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    for name in ("write_atomically", "append_line"):
        setattr(scoring, name, partial(then_killed, getattr(scoring, name)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A workspace with a finished run in `out`, evaluated on `held.jsonl`, and its scores in `scores`."""
    folder = make_workspace(tmp_path_factory.mktemp("scored") / "work", model, **STAGES)
    write_rows(folder / "held.jsonl", NUM_ROWS)
    finetune(folder, "eval_datasets=[{path: held.jsonl}]", "eval_steps=2").expect(0)
    score(folder, "out", *TABLES).expect(0)
    return folder


def score(folder: Path, target: str, *words: str, to: str = "scores", **ways: Any) -> Outcome:
    before = ways.pop("before", small_windows)
    return launch(folder, "score", target, "held.jsonl", "--to", to, *words, before=before, **ways).finish()


def own_files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(folder).items() if name.startswith(OWN)}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]


def loss_of(folder: Path) -> float:
    found = lines(folder)
    return sum(line["loss"] * line["tokens"] for line in found) / sum(line["tokens"] for line in found)


def evaluations(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "out" / "eval.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}


def test_losses_and_tables_are_those_of_the_evaluation_and_of_the_full_logits(trained: Path) -> None:
    losses, header = evaluations(trained), json.loads((trained / "scores" / "header.json").read_text())
    assert loss_of(trained / "scores") == pytest.approx(losses[max(losses)], rel=1e-6)
    named = {"format": "roundpipe scores 1", "rows": NUM_ROWS, "top_k": 5, "vocabulary_size": 300, "dtype": "float32"}
    assert header.items() >= named.items()
    assert [len(value) for name, value in header.items() if name.endswith("_hash")] == [64] * 7
    settings = DataSettings((DatasetSpec(str(trained / "held.jsonl")),), max_seq_length=64)
    rows = build_dataset(settings, AutoTokenizer.from_pretrained(trained / "model")).rows
    base = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, trained / "out").double().eval()
    tables = sorted((trained / "scores").glob("tokens-*"))
    found = [row for table in tables for row in parquet.read_table(table).to_pylist()]
    assert len(found) == len(rows) == NUM_ROWS and len(tables) >= 4
    for index, (row, line, entry) in enumerate(zip(rows, lines(trained / "scores"), found, strict=True)):
        assert line["row"] == entry["row"] == index and line["where"] == f"held.jsonl:{index + 1}"
        assert line["digest"] == entry["digest"] == row_digest(row)
        places = np.flatnonzero(row.labels != -100)
        assert entry["positions"] == places.tolist() and entry["tokens"] == row.input_ids[places].tolist()
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor(row.input_ids)[None].long(), use_cache=False).logits[0, places - 1]
        want = torch.log_softmax(logits, -1)
        values, ids = want.topk(5)
        own = want[torch.arange(len(places)), torch.tensor(entry["tokens"])]
        assert line["tokens"] == len(places) and line["loss"] == pytest.approx(-float(own.mean()), rel=1e-5)
        np.testing.assert_allclose(entry["log_probabilities"], own, rtol=1e-5)
        assert np.reshape(entry["top_ids"], (-1, 5)).tolist() == ids.tolist()
        np.testing.assert_allclose(np.reshape(entry["top_log_probabilities"], (-1, 5)), values, rtol=1e-3)
        np.testing.assert_allclose(entry["mass_left"], 1 - values.exp().sum(-1), rtol=1e-5)


def test_any_number_of_workers_gives_the_same_files(trained: Path) -> None:
    for count in (1, 3):
        devices = f"pipeline.devices=[{','.join(['cpu'] * count)}]"
        score(trained, "out", devices, *TABLES, to=f"by-{count}").expect(0)
        assert own_files(trained / f"by-{count}") == own_files(trained / "scores")


def test_killed_anywhere_it_continues_to_the_same_files(trained: Path) -> None:
    """Killed while it runs, and left as a kill between any two writes leaves it."""
    want, lines_path = own_files(trained / "scores"), trained / "killed" / "scores.jsonl"
    running = launch(trained, "score", "out", "held.jsonl", "--to", "killed", *TABLES, before=small_windows)
    running.wait_until(lambda: num_lines(lines_path) >= 2)
    running.kill()
    running.finish()
    whole, tables = want["scores.jsonl"], sorted(name for name in want if name.startswith("tokens-"))
    torn = (whole[: len(whole) // 2], tables[-1:]), (whole[:7], []), (whole[:-1], tables[2:3]), (b"x" + whole[1:], [])
    for content, gone in torn:
        done = score(trained, "out", *TABLES, to="killed").expect(0)
        assert own_files(trained / "killed") == want and "rows were scored before" in done.err
        lines_path.write_bytes(content)
        for name in gone:
            (trained / "killed" / name).unlink()
        (trained / "killed" / f".tmp-{tables[0]}-1234").write_text("torn")
    done = score(trained, "out", *TABLES, "--json", to="killed").expect(0)
    assert own_files(trained / "killed") == want and not list((trained / "killed").glob(".tmp-*"))
    assert json.loads(done.out)["loss"] == pytest.approx(loss_of(trained / "scores"), rel=1e-12)


def test_no_computed_row_of_a_window_is_lost_and_the_files_do_not_tell_of_kills(trained: Path) -> None:
    """Story: a kill lost up to a window of rows, 16,384 tokens or more."""
    said = score(trained, "out", *TABLES, to="unkilled", before=ticking).expect(0).err
    told = re.findall(r"scored ([\d,]+) of .* tokens, (\d+) tokens/s", said)
    rates = [int(done.replace(",", "")) / second for second, (done, _) in enumerate(told, start=1)]
    assert len(told) > 2 and [int(rate) for _, rate in told] == pytest.approx(rates, abs=1)
    want, found, seen = own_files(trained / "unkilled"), trained / "often", [0]
    assert [name for name in want if name.startswith("tokens-")] == ["tokens-000000000.parquet"]
    while (done := score(trained, "out", *TABLES, to="often", before=partial(killed_after, 5))).code:
        done.expect(-signal.SIGKILL)
        parts = [parquet.read_table(path)["row"].to_pylist() for path in found.glob("part-*")]
        seen.append(len({row for part in parts for row in part} | set(range(num_lines(found / "scores.jsonl")))))
        assert seen[-1] > seen[-2], "each call adds rows, and none is lost"
        if len(parts) == 2:
            next(found.glob("part-*")).write_bytes(b"torn")
            seen.append(0)
    assert len(seen) >= 3 and own_files(found) == want and not list(found.glob("part-*"))
    assert "rows were scored before" in done.err


def test_a_full_disk_keeps_what_is_finished(trained: Path) -> None:
    score(trained, "out", to="whole").expect(0)  # which fills the cache of tokens
    most = len((trained / "whole" / "scores.jsonl").read_bytes()) // 2
    done = score(trained, "out", to="full", before=partial(limited, most)).expect(5)
    assert "free some space and run the command again" in done.err
    assert "--resume" not in done.err and 0 < num_lines(trained / "full" / "scores.jsonl") < NUM_ROWS
    score(trained, "out", to="full").expect(0)
    done = score(trained, "out/step-4", to="of-step", before=partial(limited, 2000)).expect(5)
    assert "could not write the result of the checkpoint" in done.err
    assert lines(trained / "full") == lines(trained / "scores")


def test_other_rows_weights_or_settings_are_refused_by_name(trained: Path) -> None:
    before = tree(trained / "scores")
    for target, words, names in (
        ("out", ("--top-k", "4"), ["top_k"]),
        ("recipe.yaml", TABLES, ["start_hash"]),
        ("out", (*TABLES, "max_seq_length=48", "kernels=reference"), ["max_seq_length", "kernels"]),
        ("out", (*TABLES, "train_on_inputs=true"), ["data_hash"]),
    ):
        done = score(trained, target, *words).expect(2)
        assert all(name in done.err for name in names), done.err
        assert "scores of something else" in done.err and tree(trained / "scores") == before
    done = score(trained, "out", environment={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}).expect(2)
    assert "scores: not with several machines" in done.err
    refused = score(trained, "out", to="out").expect(2).err
    assert "holds a run" in refused and "another one with --to" in refused and "output_dir" not in refused
    assert "--to is empty" in score(trained, "out", to="").expect(2).err
    words = "finetune", "recipe.yaml", "output_dir=scores"
    done = run(trained, *words).expect(2)
    assert "holds scores of rows" in done.err and "scores.jsonl" in done.err and tree(trained / "scores") == before


def test_checkpoints_recipes_and_whole_models(trained: Path) -> None:
    """A checkpoint scores as the evaluation then, a recipe as its base, a trained model as its own evaluation."""
    losses = evaluations(trained)
    done = run(trained, "score", "out/step-4", "held.jsonl", "--json").expect(0)
    found = json.loads(done.out)
    assert Path(found["folder"]).name == "scores-held-step-00000004"
    assert found["loss"] == pytest.approx(losses[4], rel=1e-6) and found["rows"] == NUM_ROWS
    untrained = json.loads(run(trained, "score", "recipe.yaml", "held.jsonl", "--json").expect(0).out)
    assert Path(untrained["folder"]).name == "scores-held" and untrained["loss"] > found["loss"]
    shutil.rmtree(trained / "full-run", ignore_errors=True)
    words = ("method=full", "~lora", "eval_datasets=[{path: held.jsonl}]", "output_dir=full-run", "max_steps=2")
    finetune(trained, *words).expect(0)
    whole = json.loads(run(trained, "score", "full-run", "held.jsonl", "--json").expect(0).out)
    for words in (["score", "full-run", "held.jsonl"], ["export", "full-run"], ["generate", "full-run", "one"]):
        assert "--base is the base model of an adapter" in run(trained, *words, "--base", "model").expect(2).err
    last = json.loads((trained / "full-run" / "eval.jsonl").read_text().splitlines()[-1])
    assert whole["loss"] == pytest.approx(last["loss"], rel=1e-6) and whole["tokens"] == last["tokens"]


def test_a_result_of_another_program_is_told_the_way(trained: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (trained / "foreign").mkdir(exist_ok=True)
        shutil.copy(trained / "out" / name, trained / "foreign")
    edit_json(trained / "foreign" / "adapter_config.json", base_model_name_or_path=str(trained / "model"))
    done = run(trained, "score", "foreign", "held.jsonl").expect(2)
    assert "lora.start_from=foreign" in done.err
    done = run(trained, "score", "recipe.yaml", "held.jsonl", "lora.start_from=foreign", "--json", "--to", "theirs")
    done.expect(0)
    assert json.loads(done.out)["loss"] == pytest.approx(loss_of(trained / "scores"), rel=1e-6)


def test_a_header_is_asked_wherever_there_are_scores(trained: Path) -> None:
    """Lines that nothing describes could be of other rows or weights."""
    folder = trained / "headless"
    shutil.copytree(trained / "scores", folder)
    for text in ('{"form', "[]", None):
        (folder / "header.json").unlink(missing_ok=True)
        if text is not None:
            (folder / "header.json").write_text(text)
        before = own_files(folder)
        done = score(trained, "out", *TABLES, to="headless").expect(2)
        assert done.err.count("error:") == 1 and "what the scores in this folder are of" in done.err
        assert own_files(folder) == before


def test_rows_are_read_as_the_recipe_says_for_their_place(trained: Path) -> None:
    """However its path is written; a key of `datasets` among the overrides is meant for these rows."""
    for name, answers in (("qa", {"reply_b": "So."}), ("pairs", {"chosen": "Yes", "rejected": "No"})):
        (trained / f"{name}.jsonl").write_text(json.dumps({"part_a": "Why?", **answers}) + "\n")
    entries = "[{path: rows.jsonl}, {path: qa.jsonl, columns: {prompt: part_a, completion: reply_b}}]"
    losses = set()
    for name in ("qa.jsonl", "./qa.jsonl", str(trained / "qa.jsonl")):
        done = run(trained, "score", "recipe.yaml", name, f"datasets={entries}", "--to", "qa", "--json").expect(0)
        losses.add(json.loads(done.out)["loss"])
    assert len(losses) == 1
    words = ("datasets.0.split=train[:3]", "method=full", "--json", "--to", "three")
    done = run(trained, "score", "recipe.yaml", "held.jsonl", *words).expect(0)
    assert json.loads(done.out)["rows"] == 3 and "lora: not used, since method is full" in done.err
    words = ["score", "recipe.yaml", "pairs.jsonl", "objective=dpo"]
    assert "columns: {completion: chosen}" in run(trained, *words).expect(2).err
    columns = "datasets.0.columns={prompt: part_a, completion: chosen}"
    run(trained, *words, columns, "--to", "chosen").expect(0)
    done = run(trained, "score", "recipe.yaml", "qa.jsonl", "--base", "elsewhere").expect(2)
    assert "--base is the base model of a result" in done.err


def test_weights_of_rows_count_as_in_an_evaluation(trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "held.jsonl").read_text().splitlines()[:6]]
    weighted = [{**row, "weight": 0.5 + number} for number, row in enumerate(rows)]
    (trained / "weighted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in weighted))
    finetune(trained, "eval_datasets=[{path: weighted.jsonl}]", "output_dir=weighted", "max_steps=2").expect(0)
    done = run(trained, "score", "weighted", "weighted.jsonl", "--json").expect(0)
    [last] = map(json.loads, (trained / "weighted" / "eval.jsonl").read_text().splitlines())
    assert json.loads(done.out)["loss"] == pytest.approx(last["loss"], rel=1e-6)
    found = lines(trained / "weighted" / "scores-weighted")
    assert [line["weight"] / line["tokens"] for line in found] == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
    mean = sum(line["loss"] * line["tokens"] for line in found) / sum(line["tokens"] for line in found)
    assert mean != pytest.approx(last["loss"], rel=1e-6), "the weights make a difference"
