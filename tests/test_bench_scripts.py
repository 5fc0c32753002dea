"""Scripts that measure what only a larger machine can show, tried on tiny shapes."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from roundpipe_cli.engine.backends.turns import IssueTurns
from scripts import bench_published, issue_rate


@pytest.mark.parametrize(("model_type", "method"), [("llama", "full"), ("qwen3_moe", "lora")])
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
