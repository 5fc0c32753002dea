"""`scripts/gpu_check`: what a check that fails, hangs or dies costs, what a bare machine skips, tables of results."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from scripts.gpu_checks import correctness, environment, figures, links, procedure, throughput
from scripts.gpu_checks.part import PARTS, run_part
from scripts.gpu_checks.place import OPTIONAL, CheckPlace
from scripts.gpu_checks.procedure import ROOT, CheckDocument, run_one, summary

CHILD = """
import faulthandler, json, os, signal, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
results, done = sys.argv[1], sys.argv[2:]
def write(**line):
    with open(results, "a") as file: file.write(json.dumps({"part": "links", **line}) + "\\n")
def hangs_here(): time.sleep(60)
for name in ("good", "hangs", "dies", "last"):
    if name in done: continue
    write(check=name, status="running", limit_s=0.3)
    if name == "hangs": hangs_here()
    if name == "dies": os.kill(os.getpid(), signal.SIGSEGV)
    write(check=name, status="ok", seconds=0.0, figures={"answer": 7})
"""
"""In place of a part's process: the second check hangs, the third dies."""


def test_a_check_that_hangs_or_dies_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One script ran everything in a row: a kernel that hung took all later answers with it."""

    def words(part: str, args: argparse.Namespace, results: Path, done: Sequence[str]) -> list[str]:
        return [sys.executable, "-S", "-c", CHILD, str(results), *done]

    monkeypatch.setattr(procedure, "child_words", words)
    monkeypatch.setattr(procedure, "STACKS_S", 0.2)
    document = CheckDocument(tmp_path / "all.json", "GPU")
    run_one("links", argparse.Namespace(), tmp_path, document, end_s=1e18)
    written = json.loads(document.path.read_text())["parts"]["links"]
    assert [(one["check"], one["status"]) for one in written] == [
        ("good", "ok"), ("hangs", "stopped"), ("dies", "stopped"), ("last", "ok"),
    ]  # fmt: skip
    assert "hangs_here" in written[1]["stacks"] and "no result after 0 s" in written[1]["reason"]
    assert "-11" in written[2]["reason"] and written[3]["figures"] == {"answer": 7}
    assert summary(document) == 1


def test_a_second_call_makes_again_what_did_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a second call with the same file began anew, and lost the results of the first."""
    asked: list[Sequence[str]] = []

    def words(part: str, args: argparse.Namespace, results: Path, done: Sequence[str]) -> list[str]:
        asked.append([*done])
        return [sys.executable, "-S", "-c", CHILD, str(results), *done, "hangs"]

    monkeypatch.setattr(procedure, "child_words", words)
    counts = []
    for code in ("one", "one", "other"):
        document = CheckDocument(tmp_path / "all.json", "GPU", code=code)
        document.take_up()
        first = len(asked)
        folder = tmp_path / f"{first}"
        folder.mkdir()
        run_one("links", argparse.Namespace(), folder, document, end_s=1e18)
        counts.append((asked[first], len(json.loads(document.path.read_text())["parts"]["links"])))
    assert counts == [([], 3), (["good", "last"], 4), ([], 7)], "another code makes all again"
    with pytest.raises(ValueError, match="no results of simulated devices"):
        CheckDocument(tmp_path / "all.json", "simulated").take_up()


SLOW_CHILD = """
import json, sys, time
results, part, *done = sys.argv[1:]
for name in [one for one in {"environment": ["devices"]}.get(part, ["first", "second"]) if one not in done]:
    for status in ("running", "ok"):
        found = {"part": part, "check": name, "status": status, "limit_s": 99.0, "seconds": 0.0, "figures": {"n": 1}}
        with open(results, "a") as file: file.write(json.dumps(found) + "\\n")
        if name == "second" and not done: time.sleep(99)
"""
"""Stands for a part's process: its first one stays in the second check."""
PARENT = """
import os, runpy, sys
from scripts.gpu_checks import procedure
stand_in = [sys.executable, "-S", "-c", os.environ["SLOW_CHILD"]]
procedure.child_words = lambda part, args, results, done: [*stand_in, str(results), part, *done]
runpy.run_path("scripts/gpu_check", run_name="__main__")
"""


def test_a_signal_ends_the_child_too_and_the_next_call_continues(tmp_path: Path) -> None:
    """Story: a parent that was stopped left its child behind, which held the card."""
    path = tmp_path / "all.json"
    command = [sys.executable, "-c", PARENT, "--device", "simulated", "--json", str(path), "--only", "correctness"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLOW_CHILD": SLOW_CHILD}

    def passed() -> list[str]:
        outcomes = json.loads(path.read_text())["parts"].get("correctness", []) if path.exists() else []
        return [one["check"] for one in outcomes if one["status"] == "ok"]

    parent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    end_s = time.monotonic() + 240
    while not passed():
        assert parent.poll() is None and time.monotonic() < end_s, "no check passed"
        time.sleep(0.05)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.terminate()
    assert parent.wait(timeout=30) == 128 + signal.SIGTERM
    assert children and not any(Path(f"/proc/{child}").exists() for child in children), "a process is left"
    assert passed() == ["first"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "not again, passed before: first" in done.stdout and passed() == ["first", "second"]


def test_plans_of_minutes_end_in_their_time() -> None:
    total_s = procedure.END_S
    for minutes, stages in procedure.PLANS.items():
        total_s += sum(stage.limit_s for stage in stages)
        assert total_s <= 60 * minutes, minutes
    place = CheckPlace(True, (0, 1), "tiny")
    chosen = [(stage.part, name) for stages in procedure.PLANS.values() for stage in stages for name in stage.chosen]
    parts = {stage.part for stages in procedure.PLANS.values() for stage in stages}
    assert chosen and parts <= set(PARTS)
    names = {part: [one.name for one in import_module(f"scripts.gpu_checks.{part}").checks(place)] for part in parts}
    assert [(part, name) for part, name in chosen
            if not any(one.partition(" on [")[0] == name for one in names[part])] == []  # fmt: skip


def test_quick_is_few_checks_on_all_cards_within_ten_minutes() -> None:
    place = CheckPlace(True, (0, 1), "tiny", is_quick=True)
    modules = (environment, correctness, links, throughput)
    names = {module.__name__.rpartition(".")[2]: [one.name for one in module.checks(place)] for module in modules}
    assert {*names} == {*procedure.QUICK_LIMITS_S} and sum(procedure.QUICK_LIMITS_S.values()) == 600.0
    assert len(names["correctness"]) == 9 and len(names["links"]) == 2
    assert names["throughput"] == ["lora, streamed, on 2"]
    assert {"topology", "messages of the driver", "under load"} <= set(names["environment"])
    parser = argparse.ArgumentParser()
    procedure.add_arguments(parser)
    given = ["--quick", "--trace", "t.json", "--memory-snapshot", "m.pickle", "--choose", "a b"]
    assert {*given} <= {*procedure.child_words("links", parser.parse_args(given), Path("r"), ["x"])}


@pytest.mark.parametrize(
    ("part", "chosen", "status"),
    [
        ("environment", ("packages", "host"), "ok"),
        ("links", ("page-locked memory until it is refused",), "ok"),
        ("correctness", ("deterministic, packed",), "ok"),
        pytest.param("throughput", ("lora, streamed",), "ok", marks=pytest.mark.sweep),
        ("experts", (), "skipped"),
        ("fp8", (), "skipped"),
    ],
)
def test_a_part_runs_on_simulated_cards(part: str, chosen: tuple[str, ...], status: str, tmp_path: Path) -> None:
    """Every answer is on disk before the next question. There the processor computes: no kernel of a card is tried."""
    assert run_part(part, CheckPlace(True, (0, 1), "tiny"), tmp_path / "lines", (), chosen=chosen) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert lines and [line["status"] for line in lines] == ["running", status] * (len(lines) // 2), lines


@pytest.mark.slow
def test_a_bare_machine_runs_most_of_it_and_says_what_it_skipped(tmp_path: Path) -> None:
    path = tmp_path / "bare.jsonl"
    chosen = ("lora on [0, 1]", "4-bit on [0, 1]", "finetune")
    names = [one.name for one in correctness.checks(CheckPlace(True, (0, 1), "tiny"))]
    done = [name for name in names if name not in chosen]
    parser = argparse.ArgumentParser()
    procedure.add_arguments(parser)
    given = parser.parse_args(["--device", "simulated", "--scale", "tiny", "--without", *OPTIONAL])
    words = procedure.child_words("correctness", given, path, done)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["check"]: (line["status"], line.get("reason")) for line in lines if line["status"] != "running"}
    assert found == {
        "lora on [0, 1]": ("ok", None),
        "4-bit on [0, 1]": ("skipped", "bitsandbytes is not installed"),
        "finetune": ("skipped", "omegaconf is not installed"),
    }


def test_tables_bear_the_hardwares_name(tmp_path: Path) -> None:
    parts = {
        "throughput": [
            {"check": "lora, streamed", "status": "ok",
             "figures": {"tokens_per_s": 1234.5, "step_s": 2.0, "idle": 0.03, "peak_bytes": 5e9}},
            {"check": "lora, cached", "status": "failed", "reason": "no"},
        ],
        "links": [{"check": "one link", "status": "ok", "figures": {"up_gb_per_s": [25.0], "down_gb_per_s": [26.0]}}],
        "rates": [
            {"check": "products", "status": "ok",
             "figures": {"workers": [{"products": {"bfloat16": [[1e9, 5e13], [1e12, 1e14]]}}]}},
            {"check": "unpacking", "status": "ok", "figures": {"workers": [{"unpacking": {"fp8": [[1e6, 2e11]]}}]}},
        ],
        "kernels": [
            {"check": "qwen3, lora, auto", "status": "ok", "figures": {
                "microseconds": {"product": 750.0, "attention": 250.0}, "launches": {"product": 22, "attention": 1}}},
        ],
    }  # fmt: skip
    document = {"device": "GPU", "hardware": "1 x NVIDIA H200, torch 2.11.0", "seconds": {}, "parts": parts}
    page = figures.updated(figures.PAGE.read_text(encoding="utf-8"), document, "2026-12-01")
    assert "1 x NVIDIA H200, torch 2.11.0, 2026-12-01: 5 ok, 1 failed, 0 stopped, 0 skipped." in page
    assert "| lora, streamed | 1,234 | 2.000 s | 3.0 % | 5.00 GB |" in page and "| one link | 25.0 | 26.0 |" in page
    assert "| qwen3, lora, auto | 23 | 1.00 ms | 75 % | 25 % |" in page
    assert "| products bfloat16 | 100.0 |" in page and "| unpacking fp8 | 200.0 |" in page
    assert figures.updated(page, document, "2026-12-01") == page
    path = tmp_path / "simulated.json"
    path.write_text(json.dumps({**document, "device": "simulated"}))
    before = figures.PAGE.read_bytes()
    assert figures.main(path) == 2 and figures.PAGE.read_bytes() == before
