"""Chains of resumes across epochs: which rows were trained, as the run itself logs them."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from roundpipe_cli.train.batches import ROW_LOG_VARIABLE
from tests.support.e2e import numbers, write_rows
from tests.torture.arena import Arena, Seen, resume_words, saved, start

NUM_ROWS, FEW_ROWS = 60, 16
NUM_EPOCHS = 3
NUM_STOPS = 10
FEW_STOPS = 2  # in the test suite, which tries one chain, of fewer rows
LOG_NAME = "rows.log"
SLOW = {"ROUNDPIPE_FAULT": "optimizer:slow=0.03"}  # so that a stop is not far from where it was meant to be


def resume_chains(arena: Arena, count: int) -> Seen:
    """Stop a run after a random number of steps, half of the times by SIGKILL, and let it go on: ten times, twice where
    one chain is tried."""
    stops, num_rows = (NUM_STOPS, NUM_ROWS) if count > 1 else (FEW_STOPS, FEW_ROWS)
    with arena.lock:
        write_rows(arena.folder / "many.jsonl", num_rows)
    whole = {packing: _uninterrupted(arena, packing) for packing in (True, False)[:count]}
    for expected, _ in whole.values():
        seen = Counter(row for rows in expected.values() for row in rows)
        assert seen == dict.fromkeys(range(num_rows), NUM_EPOCHS), "an epoch does not have every row once"

    def attempt(index: int, draw: random.Random) -> None:
        packing = index % 2 == 0
        expected, metrics = whole[packing]
        work = _workspace(arena, packing)
        for place in range(stops):
            number = draw.choice((signal.SIGTERM, signal.SIGKILL))
            # Evenly over all the steps that there are, so that the last stop is near the end.
            _stop_after(work, min(len(expected) * (place + 1) // (stops + 1), len(expected) - 2), number, draw)
        start(work, *resume_words(work), environment={ROW_LOG_VARIABLE: LOG_NAME}).finish().expect(0)
        assert _row_log(work) == expected, "other rows than those of an uninterrupted run"
        assert numbers(work / "out") == metrics, "metrics.jsonl differs"
        shutil.rmtree(work)

    return Seen(count, arena.each(count, attempt), f"{stops} stops each, {NUM_EPOCHS} epochs of {num_rows} rows")


def _workspace(arena: Arena, packing: bool) -> Path:
    epochs = {"num_train_epochs": NUM_EPOCHS, "max_steps": None, "max_seq_length": 128, "save_steps": 4}
    return arena.workspace(datasets=[{"path": str(arena.folder / "many.jsonl")}], packing=packing, **epochs)


def _uninterrupted(arena: Arena, packing: bool) -> tuple[dict[int, list[int]], list[dict[str, Any]]]:
    work = _workspace(arena, packing)
    start(work, environment={ROW_LOG_VARIABLE: LOG_NAME}).finish().expect(0)
    return _row_log(work), numbers(work / "out")


def _stop_after(work: Path, num_steps: int, number: signal.Signals, draw: random.Random) -> None:
    """Go on until about so many steps are done, then end the run by this signal."""
    running = start(work, *resume_words(work), environment={ROW_LOG_VARIABLE: LOG_NAME, **SLOW})
    running.wait_for_steps(num_steps)
    running.process.join(draw.uniform(0.0, 0.1))
    running.kill(number)
    done = running.finish()
    ended_first = done.code == 0 and (work / "out" / "report.json").exists()
    if not ended_first and done.code != (143 if number == signal.SIGTERM else -number):
        # the steps may have been there from the start, and the signal before the program had a handler
        assert done.code == -number and "step " not in done.out + done.err, f"{done.code}\n{done.out}{done.err}"
    assert saved(work) or number == signal.SIGKILL


def _row_log(work: Path) -> dict[int, list[int]]:
    """Step -> ids of its rows; a step that was done again had the same ones."""
    logged: dict[int, list[int]] = {}
    for line in (work / LOG_NAME).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        step, rows = entry["step"], entry["rows"]
        assert logged.setdefault(step, rows) == rows, f"step {step} was done again with other rows"
    return dict(sorted(logged.items()))
