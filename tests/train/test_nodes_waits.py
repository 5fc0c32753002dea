"""Each wait of one machine for another, with a kill of every other machine in it: all end within seconds."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.files import NewFile
from roundpipe_cli.train.checkpoint import writing
from roundpipe_cli.train.nodes.group import Nodes
from roundpipe_cli.train.optim.updater import Updater
from tests.support.e2e import STAGES, Outcome, Running, finetune, launch, make_model, make_workspace, numbers
from tests.train.test_nodes import CHANGES, copy_of, free_port, machine, places, start, succeed, tensors_of

LORA: tuple[str, ...] = ()
FULL = ("method=full", "learning_rate=1e-3")
SHARDED = (*FULL, "nodes.shard_optimizer=true")
WAITS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "recipes": ("to compare what is trained", 1, LORA),
    "connecting": ("to connect", 1, LORA),
    "state": ("the first process' word", 1, LORA),
    "resumed": ("the checkpoint", 2, (*LORA, "--resume")),
    "setups": ("to compare what is trained", 2, SHARDED),
    "weights": ("to compare what is trained", 3, FULL),
    "saved weights": ("to compare what is trained", 4, SHARDED),
    "gradients": ("summing gradients", 3, LORA),
    "shared gradients": ("summing gradients", 3, SHARDED),
    "border": ("a step's border", 2, FULL),
    "new weights": ("sending new weights round", 2, SHARDED),
    "checkpoint": ("collecting a checkpoint", 1, SHARDED),
}
"""What is waited for, in the program's words, which time, and the words of the run."""
ENDS_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As `test_nodes` has it, without dropout, trained alone into `out` and left before the result."""
    folder = tmp_path_factory.mktemp("waits")
    work = make_workspace(folder / "work", make_model(folder / "made"), **CHANGES, **STAGES)
    finetune(work, "max_steps=4").expect(0)
    (work / "out" / "report.json").unlink()
    yield work


def hold(folder: Path, what: str, nth: int, held: int) -> None:
    """Note in `folder` which process comes to a wait; `held` never begins it."""
    run, seen, leave_updater = Nodes._run, list[str](), Updater.__exit__

    def run_or_stay(self: Nodes, work: Any, its: str, **more: Any) -> Any:
        seen.append(its)
        if its == what and seen.count(what) == nth:
            (folder / f"at-{self.rank}").touch()
            if self.rank == held:
                self._left.wait()
        return run(self, work, its, **more)

    def leave_and_look(self: Updater, *error: Any) -> None:
        leave_updater(self, *error)
        if self._round is not None:
            (folder / f"threads-{os.getpid()}").write_text(" ".join(one.name for one in threading.enumerate()))

    Nodes._run = run_or_stay  # type: ignore[method-assign]
    Updater.__exit__ = leave_and_look  # type: ignore[method-assign]


def kill_in(workspace: Path, folder: Path, wait: str, who: tuple[int, int, int]) -> list[Outcome]:
    """Outcomes of (count, held, killed) processes, the held one killed while the others wait, or another one."""
    (what, nth, words), (count, held, killed) = WAITS[wait], who
    if "--resume" in words:
        shutil.copytree(workspace / "out", folder / "out")
    port, started, before = free_port(), list[Running](), partial(hold, folder, what, nth, held)
    for rank in range(count):
        command, told = ("finetune", "recipe.yaml", "max_steps=8", *words), places(rank, count, port)
        started.append(launch(machine(folder, rank), *command, environment=told, before=before))
    for rank in range(count):
        started[rank].wait_until((folder / f"at-{rank}").exists)
    time.sleep(0.5)
    started[killed].kill()
    began_s, outcomes = time.monotonic(), [process.finish() for process in started]
    assert time.monotonic() - began_s < ENDS_WITHIN_S, outcomes
    return outcomes


@pytest.mark.covering(1)
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    "who",
    [(2, 0, 0), (2, 1, 1), *((3, held, killed) for held in range(3) for killed in range(3))],
    ids=lambda who: "of {}, {} held, {} killed".format(*who),
)
def test_a_death_ends_every_wait(workspace: Path, tmp_path: Path, wait: str, who: tuple[int, int, int]) -> None:
    """A comparison looked into a store, which says nothing of a dead process; an exchange left its thread behind."""
    count, held, killed = who
    folder = copy_of(workspace, f"{tmp_path.name}-{wait.replace(' ', '-')}")
    outcomes = kill_in(workspace, folder, wait, who)
    assert outcomes.pop(killed).code == -signal.SIGKILL
    for rank, outcome in zip([rank for rank in range(count) if rank != killed], outcomes, strict=True):
        why = re.search(r"ended or cannot be reached: machine (.*) of (\d)[^(]*\((.*)\)", outcome.expect(1).err)
        assert why is not None and outcome.err.count("error: ") == 1, outcome.err
        assert why.groups()[:2] == (str(killed + 1), str(count)), outcome.err
        beside = "sending new weights round" if wait == "checkpoint" else ""  # by another thread of an owner
        assert rank == held or why.group(3) in (WAITS[wait][0], beside), outcome.err
    left = [path.read_text().split() for path in folder.glob("threads-*")]
    assert not any("weights-round" in names for names in left), "an exchange ends before its run leaves"
    assert wait != "new weights" or left


# --- a failed checkpoint --------------------------------------------------------------------------------------------

SAVED = (*SHARDED, "save_steps=2", "max_steps=6")
FAILURES = {
    "first write": "ckpt_writer:raise=OSError:step=4:nth=1",
    "later write": "ckpt_writer:raise=OSError:step=4:nth=3",
    "writer's memory": "ckpt_writer:raise=MemoryError:step=4:nth=2",
    "full disk": "write",
    "receiver's memory": "receive_like",
    "sender's memory": "send_to_first",
}
"""What fails in the second checkpoint: a fault, or the function in which it is planted."""
TRIED = [("full disk", 2), ("sender's memory", 2), ("later write", 3)]
OTHERS = [(name, count) for name in FAILURES for count in (2, 3) if (name, count) not in TRIED]


def plant(name: str) -> None:
    """Let a function fail from the second checkpoint on, for lack of disk or memory."""
    begin, is_second = writing.Saver.begin, threading.Event()

    def begin_and_note(self: writing.Saver, snapshot: writing.Snapshot, started_s: float) -> None:
        if snapshot.step == 4:
            self.wait()  # the first one is whole, however slow the machine
            is_second.set()
        begin(self, snapshot, started_s)

    owner: Any = NewFile if name == "write" else Nodes
    function = getattr(owner, name)

    def fail(*given: Any) -> Any:
        if is_second.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if name == "write" else MemoryError("planted")
        return function(*given)

    writing.Saver.begin = begin_and_note  # type: ignore[method-assign]
    setattr(owner, name, fail)


@pytest.fixture(scope="module")
def saved(workspace: Path) -> Path:
    """The run without a failure."""
    folder = copy_of(workspace, "saved")
    succeed(folder, 2, *SAVED)
    return folder / "out"


@pytest.mark.parametrize(
    ("failure", "count"), [*TRIED, *(pytest.param(*case, marks=pytest.mark.sweep) for case in OTHERS)]
)
def test_a_failed_checkpoint_ends_all_by_its_own_name(workspace: Path, saved: Path, failure: str, count: int) -> None:
    """The others once waited to send to a saver that had given up, until the watchdog blamed the weights."""
    folder = copy_of(workspace, f"failed-{failure.replace(' ', '-')}-{count}")
    port, text, started = free_port(), FAILURES[failure], list[Running]()
    for rank in range(count):
        is_it = rank == (1 if text == "send_to_first" else 0)
        told = {**places(rank, count, port), "ROUNDPIPE_FAULT": text if is_it and ":" in text else ""}
        before = partial(plant, text) if is_it and ":" not in text else None
        command = ("finetune", "recipe.yaml", *SAVED)
        started.append(launch(machine(folder, rank), *command, environment=told, before=before))
    started[0].wait_for_steps(4)
    began_s = time.monotonic()
    for outcome in [process.finish() for process in started]:
        named = "memory" if "memory" in failure else "disk"
        assert named in outcome.expect(5).err and outcome.err.count("error: ") == 1, outcome.err
    assert time.monotonic() - began_s < 15
    if count == 2:
        succeed(folder, 2, *SAVED, "--resume")
        assert numbers(folder / "out") == numbers(saved)
        assert tensors_of(folder / "out") == tensors_of(saved) != {}


def test_all_begin_again_where_the_first_dies_while_it_writes_the_result(workspace: Path) -> None:
    """The others once had ended with 0, and its restart waited for them in vain."""
    folder = copy_of(workspace, "ends")
    first, *others = [process.finish() for process in start(folder, 3, p0={"ROUNDPIPE_FAULT": "export:kill:nth=2"})]
    assert first.code == -signal.SIGKILL
    for other in others:
        assert "machine 1 of 3 (the result)" in other.expect(1).err
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    first, *others = succeed(folder, 3, p0=again, p1=again, p2=again)
    assert "resuming after step" in first.err and (folder / "out" / "adapter_model.safetensors").exists()


def test_a_failure_to_write_the_result_ends_all(workspace: Path) -> None:
    folder = copy_of(workspace, "unwritten")
    for process in start(folder, 2, p0={"ROUNDPIPE_FAULT": "export:raise=OSError:nth=2"}):
        assert "the result" in process.finish().expect(5).err


def test_the_first_needs_nobody_while_it_writes_the_result(workspace: Path) -> None:
    folder = copy_of(workspace, "alone-at-the-end")
    first, second = start(folder, 2, p0={"ROUNDPIPE_FAULT": "export:slow=0.3"})
    first.wait_until((folder / "out" / ".tmp-result").exists)
    second.kill()
    first.finish().expect(0)
