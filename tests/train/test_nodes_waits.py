"""Each wait of one machine for another, with a kill of every other machine in it: all end within seconds."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.train.nodes.group import Nodes
from tests.support.e2e import STAGES, Outcome, Running, finetune, launch, make_model, make_workspace
from tests.train.test_nodes import CHANGES, copy_of, free_port, machine, places

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
    run, seen = Nodes._run, list[str]()

    def run_or_stay(self: Nodes, work: Any, its: str, **more: Any) -> Any:
        seen.append(its)
        if its == what and seen.count(what) == nth:
            (folder / f"at-{self.rank}").touch()
            if self.rank == held:
                time.sleep(600)
        return run(self, work, its, **more)

    Nodes._run = run_or_stay  # type: ignore[method-assign]


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
    """A comparison once looked into a store alone, which says nothing of a process that is gone."""
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
