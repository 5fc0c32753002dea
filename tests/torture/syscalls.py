"""A kill, or an I/O error, at each single system call of a save.

A run stops itself (SIGSTOP) where a save begins, strace is put to it, and it goes on. A first run is only watched: it
gives the list of calls that touch the output directory, up to the next save. Then one run for each of them, with that
call made to fail. strace counts calls per thread, and so does the list.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.e2e import Outcome, Running
from tests.torture.arena import Arena, Seen, assert_identical, check_newest, died, go_on, saved, spread, start

CALLS = (
    *("openat", "mkdir", "write", "pwrite64", "fsync", "fdatasync", "ftruncate", "fchmod"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"),
)
STEP = 6
STOP = {"ROUNDPIPE_FAULT": f"ckpt_writer:stop:step={STEP}:nth=1"}
LINE = re.compile(r"^(?P<thread>\d+) +(?P<call>\w+)\((?P<arguments>.*)$")

UNFINISHED = "<unfinished ...>"
RESUMED = re.compile(r"^(?P<thread>\d+) +<\.\.\. \w+ resumed>(?P<rest>.*)$")
INJECTED = re.compile(LINE.pattern.removesuffix("$") + r"\(INJECTED\)$")


@dataclass(frozen=True)
class Call:
    """One system call of the watched save."""

    name: str
    nth: int  # of this name in its thread, from 1, since strace was put to the run
    arguments: str


def missing() -> str | None:
    """What is missing: strace, or the permission to trace."""
    try:
        done = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "strace is not installed"
    return f"strace may not trace here: {done.stderr.strip()}" if done.returncode else None


def kill_at_each(arena: Arena, count: int) -> Seen:
    """SIGKILL at every system call of a save that touches the output directory; then resume."""
    calls = spread(_watched(arena), count)

    def attempt(index: int, draw: random.Random) -> None:
        call = calls[index]
        work, running = _stopped(arena)
        with _traced(running, f"inject={call.name}:signal=SIGKILL:when={call.nth}"):
            died(running)
        go_on(work)
        assert_identical(work, arena.reference())
        shutil.rmtree(work)

    return Seen(len(calls), arena.each(len(calls), attempt), _counts(calls))


def error_at_each(arena: Arena, count: int) -> Seen:
    """EIO and ENOSPC at every write, fsync, rename and the others; then resume with a disk that works."""
    found = _watched(arena)
    cases = spread([(call, code) for call in found for code in ("EIO", "ENOSPC")], count)
    ended: list[int] = []

    def attempt(index: int, draw: random.Random) -> None:
        call, code = cases[index]
        work, running = _stopped(arena)
        trace = work / "trace"
        with _traced(running, f"inject={call.name}:error={code}:when={call.nth}", trace, f"trace={call.name}"):
            done = running.finish()
        ended.append(done.code)
        lines = _whole_lines(trace.read_text(errors="replace").splitlines())
        hit = [match for line in lines if (match := INJECTED.match(line))]
        mute = any(match.group("arguments").startswith("2<") for match in hit)  # it could not say what was wrong
        for match in hit:  # one in each thread that makes so many calls, and not always the one that was listed
            _check_error(work, done, Call(call.name, call.nth, match.group("arguments")), mute)
        assert hit or done.code == 0, f"exit code {done.code}, and nothing was made to fail\n{done.err}"
        if done.code:
            go_on(work)
        for left in (work / "out").glob(".del-*"):  # each save is another thread, whose call fails again
            assert f"could not remove out/{left.name}" in done.err, left
            shutil.rmtree(left)
        assert_identical(work, arena.reference())
        shutil.rmtree(work)

    failures = arena.each(len(cases), attempt)
    return Seen(len(cases), failures, f"{ended.count(5)} ended with exit 5, {ended.count(0)} went on")


def _whole_lines(lines: list[str]) -> list[str]:
    """Calls that strace has cut in two, because another thread's came between, in one line again."""
    begun: dict[str, str] = {}
    whole = []
    for line in lines:
        resumed = RESUMED.match(line)
        if line.endswith(UNFINISHED):
            begun[line.split()[0]] = line.removesuffix(UNFINISHED)
        elif resumed:
            whole.append(begun.pop(resumed["thread"], "") + resumed["rest"])
        else:
            whole.append(line)
    return whole


def durability_order(arena: Arena, count: int) -> Seen:
    """Each file fsynced before its folder, that before the rename, the parent after it, before anything old goes."""

    def attempt(index: int, draw: random.Random) -> None:
        calls = _calls_of_a_save(arena) if index else _watched(arena)
        check_order([f"{call.name}({call.arguments}" for call in calls])

    return Seen(count, arena.each(count, attempt))


def check_order(lines: list[str]) -> None:
    """The order of one save's calls, as strace -y shows them."""
    temporary, target = f".tmp-step-{STEP:08d}", f"step-{STEP:08d}"

    def at(pattern: str) -> list[int]:
        return [index for index, line in enumerate(lines) if re.match(pattern, line)]

    [commit] = at(rf'rename\w*\(.*{temporary}", .*{target}"')
    files = {match.group(1) for line in lines if (match := re.match(rf"write\(\d+<[^>]*{temporary}/([^>]+)>", line))}
    assert "manifest.json" in files and len(files) >= 3, files
    for name in files:
        last_write = at(rf"write\(\d+<[^>]*{temporary}/{re.escape(name)}>")[-1]
        synced = at(rf"f(data)?sync\(\d+<[^>]*{temporary}/{re.escape(name)}>")
        assert synced and last_write < synced[-1] < commit, f"{name} is not durable before the rename"
    folder = at(rf"fsync\(\d+<[^>]*{temporary}>")
    assert folder and folder[-1] < commit, "the folder is not durable before the rename"
    parent = [index for index in at(r"fsync\(\d+<[^>]*/out>") if index > commit]
    removed = at(r"(rename\w*\(.*\.del-step|unlink\w*\(.*step-|rmdir\(.*step-)")
    assert parent and removed and parent[0] < removed[0], "an old checkpoint goes before the new one is durable"


def _check_error(work: Path, done: Outcome, call: Call, mute: bool) -> None:
    """Exit 5 with one error block (unless `mute`), or a run that went on; what was not durable is not committed."""
    text = f"{call.name} {call.nth} ({call.arguments[:80]})"
    assert done.code in (0, 5), f"{text}: exit code {done.code}\n{done.err}"
    assert "Traceback" not in done.err, f"{text}: {done.err}"
    if done.code == 5:
        assert done.err.count("error: ") == 1 or mute, f"{text}: {done.err}"
        check_newest(work)
    if call.name in ("fsync", "write") and (temporary := re.search(r"/\.tmp-(step-\d+)", call.arguments)):
        assert done.code == 5 and saved(work)[-1].name < temporary.group(1), f"{text}: an error was not final"


def _counts(calls: list[Call]) -> str:
    return ", ".join(f"{number} {name}" for name, number in Counter(call.name for call in calls).most_common())


def _watched(arena: Arena) -> list[Call]:
    """Those of the first save that was watched."""
    return arena.once("calls of a save", lambda: _calls_of_a_save(arena))


def _calls_of_a_save(arena: Arena) -> list[Call]:
    arena.reference()
    work, running = _stopped(arena)
    trace = work / "trace"
    with _traced(running, f"trace={','.join(f'?{name}' for name in CALLS)}", trace):
        running.finish().expect(0)
    seen: Counter[tuple[str, str]] = Counter()
    calls = []
    for line in trace.read_text(errors="replace").splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        thread, name, arguments = match.group("thread", "call", "arguments")
        seen[thread, name] += 1
        if f"step-{STEP + 2:08d}" in arguments:
            break
        if "/out/" in arguments or "/out>" in arguments or '"out/' in arguments or '"step-' in arguments:
            calls.append(Call(name, seen[thread, name], arguments))
    assert len(calls) > 20, calls
    shutil.rmtree(work)
    return calls


def _stopped(arena: Arena) -> tuple[Path, Running]:
    """A run that has stopped itself where the save of step 6 begins, which also prunes."""
    work = arena.killed()
    running = start(work, "--resume", environment=STOP)
    running.wait_until(lambda: all(state.startswith("T") for state in _status(running, "State")))
    return work, running


@contextlib.contextmanager
def _traced(running: Running, expression: str, output: Path | None = None, only: str = "") -> Iterator[None]:
    """Put strace to every thread of the stopped run and let it go on; inside, its end must be waited for."""
    words = ["strace", "-f", "-y", "-s", "200", "-o", str(output or "/dev/null"), "-e", expression]
    words += ["-e", only] if only else []
    with subprocess.Popen(
        [*words, "-p", str(running.process.pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as tracer:
        try:
            running.wait_until(lambda: "0" not in _status(running, "TracerPid"))
            running.kill(signal.SIGCONT)
            yield
        finally:
            if running.process.is_alive():
                running.kill(signal.SIGKILL)
            tracer.wait(60)


def _status(running: Running, key: str) -> list[str]:
    """A line of /proc/PID/status of each thread."""
    values = []
    for thread in Path(f"/proc/{running.process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = (thread / "status").read_text().splitlines()
            values += [line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:")]
    return values
