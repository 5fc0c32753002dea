"""Scripts that measure what only a larger machine can show, tried on tiny shapes."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from roundpipe_cli.engine.backends.cuda import IssueTurns
from scripts import bench_packing, bench_published, issue_rate
from tests.support.e2e import make_model, write_rows


@pytest.mark.parametrize(
    ("model_type", "method"), [pytest.param("llama", "full", marks=pytest.mark.sweep), ("qwen3_moe", "lora")]
)
def test_the_published_measurement(
    model_type: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 steps with updates of which 10 count, on weights that no file has."""
    monkeypatch.setenv("ROUNDPIPE_CACHE", str(tmp_path))
    words = ["--tiny", model_type, "--method", method, "--tokens", "32", "--sequences", "4", "--micro-batch-size", "2"]
    name, steps = bench_published.run(bench_published.parse(words))
    assert name == f"tiny {model_type}"
    assert [step.step for step in steps] == list(range(6, 16))
    assert all(step.tokens == 4 * 32 and math.isclose(step.loss, math.log(300), rel_tol=0.2) for step in steps)


def test_launches_are_counted_by_threads_at_will_and_in_turns() -> None:
    made = [issue_rate.on_processor("qwen3", "lora") for _ in range(2)]
    assert issue_rate.num_launches(made[0]) > 100
    before = threading.active_count()
    for turns in (None, IssueTurns()):
        rate, cores = issue_rate.by_threads(made, 0.05, turns)
        assert rate > 0 and cores > 0
    assert threading.active_count() == before


def test_ways_of_packing_are_run_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Story: its first round took a quarter of an hour, and its second ended in an error of ours."""
    write_rows(tmp_path / "rows.jsonl", 12)
    words = [
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--model",
        str(make_model(tmp_path / "model", num_hidden_layers=2)),
        "--tokens",
        "64",
    ]
    bench_packing.main([*words, "--rows", "12", "--rounds", "2"])
    ways = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(ways) == 6 and [float(way[-1]) for way in ways] == pytest.approx([float(ways[0][-1])] * 6, abs=1e-5)
