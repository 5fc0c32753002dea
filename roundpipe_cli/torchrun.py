"""The place of this process in a run, by torchrun's environment variables.

    RANK, WORLD_SIZE              this process, and how many there are; both or none
    MASTER_ADDR, MASTER_PORT      where the first one listens
    LOCAL_RANK, LOCAL_WORLD_SIZE  this process, and how many there are, on this machine, where there is to be one

An empty variable counts as one that is not set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from roundpipe_cli.errors import RefusedError

EXAMPLE = "torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr HOST --master-port 29500 --no-python ..."
MAX_PORT = 65535
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Number of tasks, of srun and the two kinds of mpirun; none of them sets RANK."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run; alone, it is the first of one."""

    rank: int = 0
    count: int = 1
    """Processes of the run, one on each machine."""
    num_local: int = 1
    """Processes of the run on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0


def this_process() -> Process:
    """The place of this process in the run.

    Raises:
        RefusedError: variables that are no numbers, contradict each other, or are incomplete.
    """
    rank, count = _number("RANK"), _number("WORLD_SIZE")
    local_rank, num_local = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    if rank is None and (count or 1) > 1:
        raise _half("WORLD_SIZE", "RANK")
    if count is None and rank is not None:
        raise _half("RANK", "WORLD_SIZE")
    was_restarted()
    _refuse_outside("RANK", rank, "WORLD_SIZE", count)
    _refuse_outside("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", num_local)
    return Process(rank or 0, 1 if count is None else count, max(1, num_local or 1, (local_rank or 0) + 1))


def require_address() -> None:
    """Refuse an environment that does not say where the first of several processes listens.

    Raises:
        RefusedError: MASTER_ADDR or MASTER_PORT is missing, or is no port.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not _text(name)]
    if missing:
        raise _half("WORLD_SIZE", " and ".join(missing))
    port = _text("MASTER_PORT")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= MAX_PORT):
        raise _wrong("MASTER_PORT", f"a port from 1 to {MAX_PORT}")


def launched_without_ranks() -> str | None:
    """A warning where a launcher started several tasks but none of them knows of the others; else None."""
    for name in LAUNCHERS:
        text = _text(name)
        if text.isdecimal() and int(text) > 1 and not _text("WORLD_SIZE"):
            alone = "RANK and WORLD_SIZE are not set, so each of them trains alone, on all rows"
            return f"{name}={text} tasks were started, but {alone}; torchrun makes them one run"
    return None


def was_restarted() -> bool:
    """Whether torchrun has started this run again after one of its processes ended.

    Raises:
        RefusedError: the variable is no number.
    """
    return (_number("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def _text(name: str) -> str:
    return os.environ.get(name, "").strip()


def _number(name: str) -> int | None:
    """The variable's value; None where it is not set."""
    text = _text(name)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(2**31)):
        raise _wrong(name, "a whole number of at least 0")
    return int(text)


def _refuse_outside(rank_name: str, rank: int | None, count_name: str, count: int | None) -> None:
    if count is not None and count < 1:
        raise _wrong(count_name, "a whole number of at least 1")
    if rank is not None and count is not None and rank >= count:
        raise _wrong(rank_name, f"less than {count_name}={count}")


def _wrong(name: str, expected: str) -> RefusedError:
    return RefusedError(
        "an environment variable of torchrun makes no sense",
        where=name,
        found=repr(os.environ.get(name, "")),
        expected=expected,
        hint=f"unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE for a run on one machine; for several: {EXAMPLE}",
    )


def _half(there: str, missing: str) -> RefusedError:
    return RefusedError(
        "the environment says only in part which process of a run this is",
        where=f"{missing} not set",
        found=f"{there}={_text(there)}",
        expected="all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them",
        hint=f"unset {there} for a run on one machine; for several: {EXAMPLE}",
    )
