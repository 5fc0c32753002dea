"""Failures with eight emulated workers: at every fault point and on any step one error, its place named, no hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from roundpipe_cli import faults
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.engine.dispatch import dispatch
from roundpipe_cli.errors import DeviceLostError, InternalError, ResourceError
from roundpipe_cli.faults import ENVIRONMENT_VARIABLE
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from tests.support.emulated import run_emulated

NUM_WORKERS, NUM_MICROBATCHES, NUM_STEPS, NUM_BLOCKS = 8, 8, 3, 16
MIB = 1024**2
BLOCK = LayerCost(
    "block", 1e-4, 2e-4, recompute=True, param_bytes=MIB, boundary_bytes=MIB, grad_bytes=MIB, optimizer_s=1e-4
)
HEAD = LayerCost("head", 1e-4, 2e-4, recompute=False, param_bytes=MIB, grad_bytes=MIB, optimizer_s=1e-4)
COSTS = CostModel("small", (*[BLOCK] * NUM_BLOCKS, HEAD), hop_s=1e-4, link_bytes_per_s=40e9)
POINTS = {
    "compute": ":worker=5",
    "upload": ":worker=6",
    "prefetch": ":worker=3",
    "download": ":worker=7",
    "optimizer": "",
}
Ask = Callable[[str], None]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    def set_fault(text: str) -> None:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, text)
        faults.load_faults()

    yield set_fault
    monkeypatch.undo()
    faults.load_faults()


def run(watchdog_s: float = 60.0) -> None:
    schedule = build_schedule(
        "roundpipe",
        forward_stages=[(start, start + 3) for start in range(0, NUM_BLOCKS, 4)],
        backward_stages=[(NUM_BLOCKS, NUM_BLOCKS), *((start, start + 1) for start in range(NUM_BLOCKS - 2, -1, -2))],
        num_workers=NUM_WORKERS,
        rounds=Rounds(NUM_MICROBATCHES, num_steps=NUM_STEPS),
        costs=COSTS,
    )
    run_emulated(schedule, COSTS, watchdog_s=watchdog_s)


def new_threads(before: set[threading.Thread]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in before]


def check_place(error: InternalError | ResourceError, point: str, step: int) -> None:
    assert len(error.problems) == 1
    where = error.problems[0].where
    assert where is not None and where.endswith(f"step {step + 1}"), where
    who = POINTS[point].removeprefix(":").replace("=", " ")
    assert where.startswith(f"{who} (emulated), " if who else "host (emulated), update of layer "), where


@pytest.mark.parametrize("step", range(NUM_STEPS))
@pytest.mark.parametrize("point", sorted(POINTS))
def test_one_error_with_its_place(ask: Ask, point: str, step: int) -> None:
    for action, kind, code in (("raise", InternalError, 1), ("raise=MemoryError", ResourceError, 5)):
        ask(f"{point}:{action}:step={step}{POINTS[point]}:nth=1")
        before = set(threading.enumerate())
        with pytest.raises(kind) as caught:
            run()
        check_place(caught.value, point, step)
        assert caught.value.exit_code == code
        assert new_threads(before) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", range(NUM_STEPS))
@pytest.mark.parametrize("point", sorted(POINTS))
def test_a_hang_is_ended_by_the_watchdog(
    ask: Ask, point: str, step: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("JOIN_AFTER_ERROR_S", "LEAVE_S"):  # the hung thread never ends: it is a daemon
        monkeypatch.setattr(dispatch, name, 0.5)
    ask(f"{point}:hang:step={step}{POINTS[point]}:nth=1")
    before = set(threading.enumerate())
    with pytest.raises((DeviceLostError, InternalError), match="no progress"):
        run(watchdog_s=0.8)
    assert "faults.py" in capfd.readouterr().err, "the stacks of all threads are shown"
    deadline_s = time.monotonic() + 20.0  # threads that wait beside the hung one leave a little later
    while len(left := new_threads(before)) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert len(left) == 1, left
