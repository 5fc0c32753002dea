"""Scripts that measure what only a larger machine can show, on tiny shapes; `bench_emulated`: JSON and options."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from roundpipe_cli.choices import SCHEDULES
from roundpipe_cli.costs.cost import load_costs
from roundpipe_cli.engine.backends.turns import IssueTurns
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, run, schedule_figures
from roundpipe_cli.planning.dealing import dealt_cut
from roundpipe_cli.schedule.builders import Options
from scripts import auto_microbatches, bench_emulated, bench_packing, bench_published, issue_rate
from tests.cli.test_bench_cli import costs_of, results_of, write
from tests.support.e2e import make_model, write_rows


def test_the_published_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 steps with updates of which 10 count, on weights that no file has; here of 4 steps 2."""
    assert (bench_published.WARM_UP, bench_published.COUNTED) == (5, 10)
    monkeypatch.setattr(bench_published, "WARM_UP", 2)
    monkeypatch.setattr(bench_published, "COUNTED", 2)
    monkeypatch.setenv("ROUNDPIPE_CACHE", str(tmp_path))
    words = ["--tiny", "qwen3_moe", "--method", "lora", "--tokens", "32", "--sequences", "4", "--micro-batch-size", "2"]
    name, steps = bench_published.run(bench_published.parse(words))
    assert name == "tiny qwen3_moe"
    assert [step.step for step in steps] == [3, 4]
    assert all(step.tokens == 4 * 32 and math.isclose(step.loss, math.log(300), rel_tol=0.2) for step in steps)


def test_launches_are_counted_by_threads_in_turns() -> None:
    made = [issue_rate.on_processor("qwen3", "lora") for _ in range(2)]
    assert min(issue_rate.by_threads(made, 0.05, IssueTurns())) > 0


def test_ways_of_packing_are_run_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Story: its first round took a quarter of an hour, and its second ended in an error of ours."""
    write_rows(tmp_path / "rows.jsonl", 12)
    model = make_model(tmp_path / "model", num_hidden_layers=2)
    words = ["--data", str(tmp_path / "rows.jsonl"), "--model", str(model), "--tokens", "64"]
    bench_packing.main([*words, "--rows", "12", "--rounds", "2"])
    ways = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(ways) == 6 and [float(way[-1]) for way in ways] == pytest.approx([float(ways[0][-1])] * 6, abs=1e-5)


# --- on emulated devices --------------------------------------------------------------------------------------------
def words(path: Path, *flags: str, workers: int = 2, microbatches: int = 4) -> list[str]:
    return ["--costs", str(path), "--workers", str(workers), "--microbatches", str(microbatches), *flags]


def short(tmp_path: Path) -> Path:
    """Costs of a few hundred microseconds a layer, with bytes."""
    layer = {"forward_s": 4e-4, "backward_s": 9e-4, "param_bytes": 2**20, "boundary_bytes": 2**19}
    layers = [{"name": f"block.{index}", **layer} for index in range(6)]
    layers.append({"name": "head", "forward_s": 3e-4, "backward_s": 5e-4, "recompute": False})
    return write(tmp_path, {"name": "short", "hop_s": 1e-4, "layers": layers})


def test_json_has_what_bench_simulates_and_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = short(tmp_path)
    flags = ["--steps", "2", "--staleness", "1"]
    bench_emulated.main(words(path, *flags, "--json", workers=3))
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["workers", "microbatches", "results"]
    assert (document["workers"], document["microbatches"]) == (3, 4)
    assert [entry["schedule"] for entry in document["results"]] == list(SCHEDULES)
    for entry, bench in zip(document["results"], results_of(path, *flags, workers=3), strict=True):
        assert bench.items() <= entry.items()
        measured = ["measured_makespan_s", "measured_bubble_ratio", "late_s", "exposed_transfer_s", "measured_step_s"]
        assert list(entry) == [*bench, *measured]
        assert entry["late_s"] >= 0
        assert isinstance(entry["measured_step_s"], float)  # a difference of two runs, which a busy machine may bend
        assert 0 <= entry["measured_bubble_ratio"] < 1
        assert entry["measured_makespan_s"] >= entry["makespan_s"] * (1 - 1e-9)


def test_as_a_program(tmp_path: Path) -> None:
    program = [sys.executable, bench_emulated.__file__, *words(short(tmp_path), "--schedule", "1f1b")]
    done = subprocess.run([*program, "--earliest-free"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --earliest-free: only roundpipe has this\n")


def test_skipping_saves_exactly_the_recompute_that_is_left_out_on_one_worker(tmp_path: Path) -> None:
    data = costs_of()
    for layer in data["layers"][:-1]:
        layer["recompute_skippable_s"] = 0.004
    stages = ["--forward-stages", "[[0, 5]]", "--backward-stages", "[[6, 6], [0, 5]]", "--schedule", "roundpipe"]
    spans = []
    for flags in ([], ["--skip-projection"], ["--keep-activations", "2"], ["--keep-activations", "6"]):
        asked = bench_emulated.parse(words(write(tmp_path, data), *stages, *flags, workers=1))
        spans += [run(*one).makespan_s for one in bench_emulated.asked_cases(asked)]
    saved = [spans[0] - span for span in spans[1:]]
    assert saved == pytest.approx([4 * 6 * 0.004, 4 * 2 * 0.02, 4 * 6 * 0.02])


def test_given_stages_are_used_and_rounds_are_a_runs(tmp_path: Path) -> None:
    stages = ["--forward-stages", "[[0, 4]]", "--backward-stages", "[[5, 6], [3, 4], [0, 2]]"]
    rounds = []
    for flags in ([], ["--published"]):
        parsed = bench_emulated.parse(
            words(write(tmp_path, costs_of()), "--schedule", "roundpipe", *stages, *flags, workers=3, microbatches=8)
        )
        ((_, cut, case),) = bench_emulated.asked_cases(parsed)
        assert cut.forward_stages == ((0, 4),) and (case.accounting == "published") == bool(flags)
        rounds.append(schedule_figures(run("roundpipe", cut, case))["round"])
    assert rounds == [8, 3], "one where nothing limits it"


def test_stages_are_never_worse_than_the_planners_and_fit(tmp_path: Path) -> None:
    data = costs_of()
    for layer in data["layers"]:
        layer.update(param_bytes=100, activation_bytes=50)
    data["layers"][-1].update(forward_s=0.06, backward_s=0.12)
    question = SimulationCase(load_costs(write(tmp_path, data)), 3, 4)
    asked, planned = replace(question, options=Options(earliest_free=True)), choose("roundpipe", question)
    spans = [run("roundpipe", stages, asked).makespan_s for stages in (dealt_cut(planned, asked), planned)]
    assert spans[0] <= spans[1]
    peaks = []
    for limit in (None, 500):
        costs = load_costs(write(tmp_path, {**data, "device_memory_bytes": limit}))
        question = SimulationCase(costs, 2, 4, options=Options(earliest_free=True))
        chosen = choose("roundpipe", question)
        largest, kept = (
            max((last - first + 1 for first, last in stages), default=0)
            for stages in (chosen.forward_stages + chosen.backward_stages, chosen.backward_stages)
        )
        peaks.append(2 * 100 * largest + 50 * kept)
    assert peaks[1] <= 500 < peaks[0]


def test_auto_microbatches_knows_what_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    words = ["--models", "1.7B", "--cards", "4090", "--counts", "1", "--rows", "16", "--kept", str(kept)]
    monkeypatch.setattr("sys.argv", ["auto_microbatches.py", *words])
    assert auto_microbatches.main() == 0
    first = capsys.readouterr().out
    assert "| 1.7B | 1x4090 | 16 | " in first and "1 cases, 1 of which fit" in first
    assert len(kept.read_text().splitlines()) == 1
    monkeypatch.setattr(auto_microbatches, "measured", lambda *case: pytest.fail("known"))
    assert auto_microbatches.main() == 0 and capsys.readouterr().out == first
