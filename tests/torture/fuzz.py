"""Each reader of files given thousands of damaged ones: success or a documented exit code with a message, soon.

Every try is a child forked from this process, which has loaded torch. It damages a copy of good files, reads them as a
command would, and leaves with the exit code that a command would have.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roundpipe_cli.cli.output import run_command
from tests.torture.arena import Arena, Seen
from tests.torture.mutations import odd_kind

ALLOWED = (0, 2, 3, 4, 5, 6)
ENDS_WITHIN_S = 10.0  # processor time of a try
GIVEN_UP_S = 60.0  # time in which it must have ended on a busy machine
MEMORY_BYTES = 4 * 1024**3  # address space of a try beside what the process began with; threads of pyarrow reserve much
ODD_KINDS = 0.06  # share of tries in which a file is not damaged but a pipe, a link, a device, 1 TiB of nothing


@dataclass(frozen=True)
class Reader:
    """One kind of files and what reads them."""

    make: Callable[[Path], object]  # writes good files into a folder, and loads what reading needs
    damage: Callable[[Path, random.Random], None]  # damages the files of a folder
    read: Callable[[Path], None]  # reads them as a command does; raises as a command does
    warm: Callable[[Path], None] | None = None  # loads what reading imports, where reading would leave threads behind


def fuzz(name: str, reader: Reader, arena: Arena, count: int) -> Seen:
    """The reader given `count` damaged copies."""
    good = arena.folder / f"fuzz-{name}"
    if not good.exists():
        reader.make(good)
    warm = shutil.copytree(good, arena.folder / f"fuzz-{name}-good")
    here, surroundings = Path.cwd(), dict(os.environ)
    reader.warm(warm) if reader.warm else reader.read(warm)  # good files are read without an error
    os.chdir(here)
    os.environ.clear()
    os.environ.update(surroundings)
    shutil.rmtree(warm)
    failures, codes, slowest_s = [], dict.fromkeys(ALLOWED, 0), 0.0
    waiting = list(range(count))
    running: dict[int, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < arena.jobs:
            index = waiting.pop(0)
            running[_fork(reader, good, arena, name, index)] = (index, time.monotonic())
        pid, status, usage = _ended(running, arena.patience)
        index, _ = running.pop(pid)
        code, processor_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        slowest_s = max(slowest_s, processor_s)
        work = arena.folder / f"fuzz-{name}-{index}"
        problem = _problem(code, processor_s, (work / "stderr").read_text(errors="replace"))
        if problem is None:
            codes[code] += 1
            shutil.rmtree(work)
        else:
            failures.append(f"try {index} in {work}: {problem}")
    shares = ", ".join(f"{number} with exit code {code}" for code, number in codes.items() if number)
    return Seen(count, tuple(failures), f"{shares}, slowest {slowest_s:.1f} s")


def _fork(reader: Reader, good: Path, arena: Arena, name: str, index: int) -> int:
    work = arena.folder / f"fuzz-{name}-{index}"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        shutil.copytree(good, work)
        stderr = os.open(work / "stderr", os.O_WRONLY | os.O_CREAT)
        os.dup2(stderr, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115, PTH123
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.environ["ROUNDPIPE_DEBUG"] = "1"
        warnings.simplefilter("ignore")  # under pytest they are errors, to a user words
        draw = random.Random(f"{arena.seed}-{name}-{index}")
        if draw.random() < ODD_KINDS:
            odd_kind(
                draw.choice(sorted(path for path in work.rglob("*") if path.is_file() and path.name != "stderr")), draw
            )
        else:
            reader.damage(work, draw)
        resource.setrlimit(resource.RLIMIT_AS, (_size_bytes() + MEMORY_BYTES, resource.RLIM_INFINITY))
        code = run_command(lambda: reader.read(work))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _size_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _ended(running: dict[int, tuple[int, float]], patience: float) -> tuple[int, int, os.struct_rusage]:  # type: ignore[name-defined]
    """The next child to end; those that take too long are killed."""
    while True:
        for pid, (_, started_s) in running.items():
            done = os.wait4(pid, os.WNOHANG)
            if done[0]:
                return done
            if time.monotonic() - started_s > GIVEN_UP_S * patience:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _problem(code: int, processor_s: float, said: str) -> str | None:
    tail = said[-1500:]
    if code not in ALLOWED:
        return f"exit code {code}: {tail}"
    if code and not re.search(r"error: \S", said):
        return f"exit code {code} without a message: {tail}"
    if processor_s > ENDS_WITHIN_S:
        return f"{processor_s:.1f} s of processor time: {tail}"
    return None
