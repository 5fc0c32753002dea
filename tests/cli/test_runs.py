"""`roundpipe runs`: finished, stopped, running, foreign and damaged folders side by side."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from tests.cli.test_terminal_text import said
from tests.support.e2e import finetune, make_model, make_workspace


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs of three steps, and copies of them as a kill, another process and a bad disk leave them."""
    root = tmp_path_factory.mktemp("runs")
    model = make_model(root / "tiny" / "model")
    for name, rate in (("one", 1e-2), ("two", 2e-2)):
        work = make_workspace(root / "work" / name, model, num_train_epochs=1, learning_rate=rate, val_set_size=2)
        finetune(work).expect(0)
        shutil.copytree(work / "out", root / "outputs" / name)
    shutil.rmtree(root / "work")
    for name in ("stopped", "running", "damaged"):
        shutil.copytree(root / "outputs" / "one", root / "outputs" / "more" / name)
        (root / "outputs" / "more" / name / "report.json").unlink()
    lines = (root / "outputs" / "more" / "stopped" / "metrics.jsonl").read_text().splitlines()
    (root / "outputs" / "more" / "stopped" / "metrics.jsonl").write_text(lines[0] + "\n" + lines[1][:30])
    lock = {"host": socket.gethostname(), "pid": os.getpid()}
    (root / "outputs" / "more" / "running" / ".roundpipe.lock").write_text(json.dumps(lock))
    for name in ("metrics.jsonl", "recipe.yaml", "eval.jsonl", "report.json"):
        (root / "outputs" / "more" / "damaged" / name).write_bytes(b"\xff\x00{[\n" * 5)
    (root / "outputs" / "foreign").mkdir()
    (root / "outputs" / "foreign" / "metrics.jsonl").write_text(
        '{"epoch": 1, "accuracy": 0.5}\n[1]\n{"step": 1, "reward": 0.5}\n'
    )
    (root / "outputs" / "empty").mkdir()
    return root


def test_every_run_below_a_folder_is_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    out, err = said("runs", "outputs", "--json")
    rows = {Path(row["folder"]).name: row for row in json.loads(out)["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        **dict.fromkeys(("one", "two", "damaged"), "finished"),
        **{"stopped": "stopped", "running": "running"},
    }
    assert "1 folder left out" in err
    assert {name: row["steps"] for name, row in rows.items()} == {
        **dict.fromkeys(("one", "two", "running"), rows["one"]["num_steps"]),
        **{"stopped": 1, "damaged": 0},
    }
    metrics = [json.loads(line) for line in (folder / "outputs" / "two" / "metrics.jsonl").read_text().splitlines()]
    assert rows["two"]["loss"] == metrics[-1]["loss"] and rows["two"]["rows"] == 10
    assert rows["two"]["best_evaluation"] is not None and rows["damaged"]["loss"] is None
    assert rows["damaged"]["differs"] == {}
    assert [rows[name]["differs"]["learning_rate"] for name in ("one", "two")] == [1e-2, 2e-2]
    assert set(rows["one"]["differs"]) == {"learning_rate"}


def test_the_table_is_cut_to_the_terminal_and_the_page_has_every_curve(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    heading, *lines = said("runs", "outputs")[0].splitlines()
    assert heading.split()[0] == "run" and heading.split()[-1] == "learning_rate" and len(lines) == 5
    monkeypatch.setattr("roundpipe_cli.cli.runs.terminal_width", lambda: 60)
    assert "tokens/s" not in said("runs", "outputs")[0].splitlines()[0], "what is left out first"
    assert said("runs", "outputs", "--html", "runs.html")[0] == ""
    page = (folder / "runs.html").read_text()
    curves, points = page.count("<polyline"), page.count("<circle")
    assert (curves, points) == (3, 1 + 4), "a loss of a single step and each run's one evaluation are points"
    assert "learning_rate" in page and "<script" not in page
    legend, drawn = re.findall(r"background: hsl\((\d+) ", page), re.findall(r"\.r\d \{ stroke: hsl\((\d+) ", page)
    assert len(set(legend)) == 5 and legend == drawn[:5], "a run's name has the colour of its curve"


@pytest.mark.parametrize(("where", "why"), [("nowhere", "no such folder"), ("outputs/empty", "no run here")])
def test_a_folder_without_runs_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, why: str) -> None:
    monkeypatch.chdir(folder)
    assert why in said("runs", where, code=2)[1]


def test_speeds_are_of_the_whole_run_however_often_it_was_resumed(folder: Path, tmp_path: Path) -> None:
    """Story: a report's are of the steps since the last resume, so a resumed run was compared by its last step."""
    shutil.copytree(folder / "outputs" / "one", tmp_path / "one")
    report = json.loads((tmp_path / "one" / "report.json").read_text())
    whole = {key: report["measured"][key] for key in ("tokens_per_s", "bubble_ratio")}
    report["measured"] |= {"steps": 1, "first_step": 3, "tokens_per_s": 1.0, "bubble_ratio": 0.9}
    (tmp_path / "one" / "report.json").write_text(json.dumps(report))
    (row,) = json.loads(said("runs", str(tmp_path), "--json")[0])["runs"]
    assert {key: row[key] for key in whole} == whole


def test_a_folder_that_cannot_be_read_hides_no_other(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "outputs" / "one", tmp_path / "one")
    for name in ("pipe", "huge"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "metrics.jsonl")
    with (tmp_path / "huge" / "report.json").open("wb") as file:
        file.truncate(2**34)
    out, err = said("runs", str(tmp_path), "--json")
    assert [Path(row["folder"]).name for row in json.loads(out)["runs"]] == ["one"]
    assert f"note: {tmp_path}/pipe/metrics.jsonl left out" in err and f"note: {tmp_path}/huge/report.json left" in err


def test_a_loss_that_is_not_finite_is_no_figure_of_an_earlier_step(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "outputs" / "one", tmp_path / "one")
    metrics = tmp_path / "one" / "metrics.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-1])
    with metrics.open("a") as file:
        file.write(json.dumps({**last, "step": last["step"] + 1, "loss": None}) + "\n")
    with (tmp_path / "one" / "eval.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in ((7, 0.25), (8, 9.5)))
    (tmp_path / "one").rename(tmp_path / "r10")
    shutil.copytree(folder / "outputs" / "one", tmp_path / "r9")
    recipe = tmp_path / "r10" / "recipe.yaml"
    recipe.write_text(re.sub(r"(?m)^seed: .*\n", "", recipe.read_text()))
    other, row = json.loads(said("runs", str(tmp_path), "--json")[0])["runs"]
    assert Path(other["folder"]).name == "r9" and Path(row["folder"]).name == "r10", "by number"
    assert (row["steps"], row["loss"], row["best_evaluation"]) == (last["step"] + 1, None, 0.25)
    assert (other["differs"]["seed"], row["differs"]["seed"]) == (42, None), "each has every key"
