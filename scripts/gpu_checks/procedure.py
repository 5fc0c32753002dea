"""Parent process of `scripts/gpu_check`: parts in child processes, time limits, one JSON document."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.gpu_checks.part import PARTS
from scripts.gpu_checks.place import CHECK_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
PART_LIMIT_S, ALL_LIMIT_S = 480.0, 2400.0
QUICK_LIMITS_S = {"environment": 60.0, "correctness": 270.0, "links": 90.0, "throughput": 180.0}
"""Parts of `--quick`; together 10 minutes."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IN_16_BIT = tuple(f"head-in-chunks-{kind}" for kind in ("float16", "narrow", "bfloat16", "bfloat16-narrow"))


@dataclass(frozen=True)
class Stage:
    """A part, or some checks of it, and its time."""

    part: str
    limit_s: float
    chosen: tuple[str, ...] = ()
    """None: all."""


PLANS = {
    10: (
        Stage("environment", 40),
        Stage("memory", 70, ("context", "step, full")),
        Stage("correctness", 150, ("tests/engine/test_cuda.py",)),
        Stage("correctness", 130, ("head-in-chunks", *IN_16_BIT, "early-updates", "small-chunks")),
        Stage("throughput", 110, ("trace, lora", "trace, full")),
        Stage("throughput", 80, ("lora, resident",)),
    ),
    30: (Stage("fits", 420), Stage("throughput", 560), Stage("rates", 200)),
    45: (Stage("correctness", 480), Stage("sanitizer", 250), Stage("endtoend", 150)),
}
"""`--minutes`: stages that are added to those of fewer minutes. What passed before is not made again."""
AGAIN = {"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""A check that failed is made once more so: launches that wait for their end, every tensor in memory of its own."""
START_LIMIT_S = 90.0
"""For a child to import torch and begin its first check."""
POLL_S = 0.1
END_S = 10.0
"""For the last child to end, of the minutes that were given."""
STACKS_S = 1.0
"""For a child to write its stacks before it is killed."""


@dataclass
class CheckDocument:
    """All that is known so far, of earlier calls too, rewritten whole after every check."""

    path: Path
    label: str
    """`GPU` or `simulated`."""
    parts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    code: str = field(default_factory=lambda: code_digest())

    def take_up(self) -> None:
        """Read what earlier calls found.

        Raises:
            ValueError: the file is of other devices, or no document.
        """
        if not self.path.exists():
            return
        found = json.loads(self.path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("device") != self.label:
            raise ValueError(f"it has no results of {self.label} devices")
        self.parts, self.seconds = found["parts"], found["seconds"]

    def add(self, part: str, outcome: Mapping[str, Any]) -> None:
        stamped = {key: value for key, value in outcome.items() if key != "part"}
        self.parts.setdefault(part, []).append({**stamped, "code": self.code, "on": self.hardware})
        self.write()

    def passed(self, part: str) -> list[str]:
        """Checks that this code passed on these cards, with this torch."""
        now = [one for one in self.newest(part) if (one.get("code"), one.get("on")) == (self.code, self.hardware)]
        return [one["check"] for one in now if one["status"] == "ok"]

    def newest(self, part: str) -> list[dict[str, Any]]:
        """The last outcome of each check."""
        return list({one["check"]: one for one in self.parts.get(part, ())}.values())

    def write(self) -> None:
        content = {"device": self.label, "hardware": self.hardware, "seconds": self.seconds, "parts": self.parts}
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)

    @property
    def hardware(self) -> str:
        """The machine's name, from the first part."""
        found = self.figures("environment", "devices")
        return str(found.get("label", "unknown"))

    def figures(self, part: str, name: str) -> Mapping[str, Any]:
        """Figures of a check; empty if there are none."""
        return next((one.get("figures", {}) for one in self.newest(part) if one["check"] == name), {})

    def with_status(self, *statuses: str) -> list[tuple[str, dict[str, Any]]]:
        return [(part, one) for part in self.parts for one in self.newest(part) if one["status"] in statuses]


def code_digest() -> str:
    """A hash of the code that checks and is checked."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ("roundpipe_cli", "scripts", "tests") for path in (ROOT / room).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def stages_of(args: argparse.Namespace) -> list[Stage]:
    """What to do, in order."""
    if args.minutes:
        return [stage for minutes, stages in PLANS.items() if minutes <= args.minutes for stage in stages]
    limits = QUICK_LIMITS_S if args.quick else dict.fromkeys(PARTS, args.part_limit_s)
    return [
        Stage(part, limits[part], tuple(args.choose)) for part in PARTS if part in args.only or part == "environment"
    ]


def run_all(args: argparse.Namespace, document: CheckDocument) -> None:
    """All parts in order, as far as time allows."""
    end_s = time.monotonic() + (60 * args.minutes - END_S if args.minutes else args.limit_s)
    for stage in stages_of(args):
        part, start_s = stage.part, time.monotonic()
        limit_s = min(stage.limit_s, end_s - start_s)
        print(f"\n== {part} (at most {max(0, limit_s):.0f} s)", flush=True)
        if limit_s <= 0:
            document.add(part, {"check": "all", "status": "skipped", "reason": "no time is left"})
            continue
        own = argparse.Namespace(**{**vars(args), "choose": stage.chosen})
        try:
            with tempfile.TemporaryDirectory() as folder:
                run_one(part, own, Path(folder), document, start_s + limit_s)
        finally:
            document.seconds[part] = round(document.seconds.get(part, 0.0) + time.monotonic() - start_s, 1)
            document.write()
        if part == "environment" and not document.figures("environment", "devices"):
            return


def run_one(part: str, args: argparse.Namespace, folder: Path, document: CheckDocument, end_s: float) -> None:
    """One part, in as many child processes as it takes: another one after each that failed or was stopped."""
    passed = [] if part == "environment" else document.passed(part)
    done = list(passed)
    if passed:
        print(f"not again, passed before: {', '.join(passed)}", flush=True)

    def take(outcome: Mapping[str, Any]) -> None:
        done.append(outcome["check"])
        document.add(part, outcome)
        show(outcome)

    while time.monotonic() < end_s:
        attempt = Attempt(part, args, folder / f"{len(done)}", done)
        attempt.run(end_s, take)
        if attempt.is_complete or not attempt.has_advanced:
            break
    ran = set(done) - set(passed)
    bad = [one["check"] for one in document.newest(part) if one["status"] in ("failed", "stopped")]
    bad = [name for name in bad if name in ran]
    for name in bad if part == "correctness" else ():
        if time.monotonic() < end_s:
            again = argparse.Namespace(**{**vars(args), "choose": [name]})
            attempt = Attempt(part, again, folder / f"again {len(done)}", (), environment=AGAIN)
            done.append(name)
            attempt.run(end_s, lambda one, name=name: take({**one, "check": f"{name}, again", "environment": AGAIN}))


def child_words(part: str, args: argparse.Namespace, results: Path, done: Sequence[str]) -> list[str]:
    """Command line of a child process."""
    words = [sys.executable, str(ROOT / "scripts" / "gpu_check"), "--child", part]
    words += ["--results", str(results), "--device", args.device, "--scale", args.scale]
    for option, value in (("--trace", args.trace), ("--memory-snapshot", args.memory_snapshot)):
        words += [option, value] if value else []
    chosen = () if part == "environment" else args.choose  # what names the machine is always asked
    several = {"done": done, "indices": args.indices, "without": args.without, "choose": chosen}
    for name, values in several.items():
        words += [f"--{name}", *map(str, values)] if values else []
    return words + ["--quick"] * args.quick


class Attempt:
    """One child process, and what it writes."""

    def __init__(
        self,
        part: str,
        args: argparse.Namespace,
        stem: Path,
        done: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._part, self._results, self._errors = part, stem.with_suffix(".jsonl"), stem.with_suffix(".err")
        self._results.touch()
        words = child_words(part, args, self._results, done)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        changed = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        if getattr(args, "sanitizer", False):
            changed["TORCH_CUDA_SANITIZER"] = "1"
        with self._errors.open("wb") as errors:
            self._child = subprocess.Popen(words, env=changed, cwd=ROOT, stderr=errors, start_new_session=True)
        self._running: dict[str, Any] | None = None
        self._since_s = time.monotonic()
        self._num_read = 0
        self.is_complete = self.has_advanced = False

    def run(self, end_s: float, take: Callable[[dict[str, Any]], None]) -> None:
        """Call `take` with results as they come. If this process is told to stop, so is the child, and what it still
        wrote is taken."""
        try:
            for outcome in self._outcomes(end_s):
                take(outcome)
        finally:
            if self._child.poll() is None:
                self._kill()
            for outcome in self._unread():
                take(outcome)

    def _unread(self) -> Iterator[dict[str, Any]]:
        for line in self._results.read_text(encoding="utf-8").splitlines()[self._num_read :]:
            self._num_read, self._since_s = self._num_read + 1, time.monotonic()
            found = json.loads(line)
            self._running = found if found["status"] == "running" else None
            if self._running is None:
                self.has_advanced = True
                yield found

    def _outcomes(self, end_s: float) -> Iterator[dict[str, Any]]:
        """Results as they come; the last is of a check that the child died of, or was stopped in."""
        why = ""
        while not why:
            ended = self._child.poll() is not None
            yield from self._unread()
            if ended:
                break
            why = self._overdue(end_s)
            time.sleep(POLL_S)
        if why:
            self._stop()
        code = self._child.wait()
        self.is_complete = code == 0
        if why or self._running is not None or (code != 0 and not self.has_advanced):
            self.has_advanced = self._running is not None
            yield self._death(why or f"the process ended with exit code {code}")

    def _overdue(self, end_s: float) -> str:
        """Why the child has to be stopped; empty: it has not."""
        now_s = time.monotonic()
        limit_s = START_LIMIT_S if self._running is None else float(self._running["limit_s"])
        if now_s > end_s:
            return "the time of the part was over"
        return f"no result after {limit_s:.0f} s" if now_s - self._since_s > limit_s else ""

    def _stop(self) -> None:
        self._child.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_S)
        self._kill()

    def _kill(self) -> None:
        """End the child and what it started: a process that stays would hold the card."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _death(self, why: str) -> dict[str, Any]:
        name = self._running["check"] if self._running is not None else "start"
        stacks = self._errors.read_text(encoding="utf-8", errors="replace")[-8000:]
        return {"part": self._part, "check": name, "status": "stopped", "reason": why, "stacks": stacks}


def show(outcome: Mapping[str, Any]) -> None:
    """One line a check, and what went wrong."""
    words = [f"{outcome['status']:<8}", outcome["check"]]
    if "seconds" in outcome:
        words.append(f"({outcome['seconds']:.1f} s)")
    if outcome.get("figures"):
        words.append(json.dumps(outcome["figures"])[:400])
    if outcome.get("reason"):
        words.append(str(outcome["reason"]).splitlines()[0][:400])
    print(" ".join(words), flush=True)
    for key in ("traceback", "stacks"):
        if outcome.get(key):
            print(outcome[key], flush=True)


def summary(document: CheckDocument) -> int:
    """Print what was not checked and what failed; returns the exit code."""
    skipped, bad = document.with_status("skipped"), document.with_status("failed", "stopped")
    print(f"\n{document.hardware}: {len(document.with_status('ok'))} checks passed; results in {document.path}")
    if document.label == "simulated":
        print("SIMULATED: the procedure was tried, nothing was measured")
    if skipped:
        print(f"\nSKIPPED, {len(skipped)} checks:")
    reasons: dict[str, list[str]] = {}
    for part, one in skipped:
        reasons.setdefault(str(one["reason"]), []).append(f"{part}/{one['check']}")
    for reason, names in reasons.items():
        print(f"  {reason}: {', '.join(names)}")
    for part, one in bad:
        print(f"FAILED {part}/{one['check']}: {str(one['reason']).splitlines()[0][:300]}")
    return int(bool(bad))


def main(args: argparse.Namespace) -> int:
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        print(f"error: {sys.executable} has no {' and no '.join(missing)}", file=sys.stderr)
        print("  hint: in a clone, scripts/test once and .venv/bin/python scripts/gpu_check", file=sys.stderr)
        return 2
    document = CheckDocument(Path(args.json).absolute(), "simulated" if args.device == "simulated" else "GPU")
    try:
        document.take_up()
    except (OSError, ValueError, KeyError) as error:
        print(f"error: the results in {document.path} cannot be continued: {error}", file=sys.stderr)
        print("  hint: --json names another file; this one is left as it is", file=sys.stderr)
        return 2
    for number in SIGNALS:
        signal.signal(number, stop)
    run_all(args, document)
    if not document.figures("environment", "devices"):
        if document.with_status("failed", "stopped"):
            return summary(document)
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return 2
    return summary(document)


def stop(number: int, frame: object) -> None:
    """End this process, through the blocks that end its child."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    print(f"stopped by {signal.Signals(number).name}; the same call continues", file=sys.stderr)
    raise SystemExit(128 + number)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, one = parser.add_argument, argparse.SUPPRESS
    add("--device", choices=["cuda", "simulated"], default="cuda", help="simulated: a try of the procedure on the CPU")
    add("--quick", action="store_true", help="environment, 8 cases, links, one throughput; within 10 minutes")
    add("--minutes", type=int, choices=PLANS, help="what is most worth knowing, in so much time")
    add("--only", action="append", choices=PARTS, help="may be given several times; default: all")
    add("--json", default="gpu_check.json", help="where the results go; a second call adds to them")
    add("--scale", choices=["tiny", "full"], help="sizes of what is measured; default: tiny if simulated, else full")
    add("--indices", type=int, nargs="+", default=[], help="GPUs; default: all, at most two")
    add("--without", nargs="+", default=[], metavar="PACKAGE", help="as if these packages were not installed")
    add("--part-limit-s", type=float, default=PART_LIMIT_S)
    add("--limit-s", type=float, default=ALL_LIMIT_S, help=f"of all parts; a check has {CHECK_LIMIT_S:.0f} s or more")
    add("--choose", nargs="+", default=[], metavar="CHECK", help="only these checks")
    add("--trace", metavar="FILE", default="gpu_check_trace.json", help="traces of whole steps, for ui.perfetto.dev")
    add("--sanitizer", action="store_true", help="under torch's stream sanitizer (TORCH_CUDA_SANITIZER); slow")
    add(
        "--memory-snapshot", metavar="FILE", help="what memory held when a check ran out of it (pytorch.org/memory_viz)"
    )
    add("--child", choices=PARTS, help=one)
    add("--results", help=one)
    add("--done", nargs="+", default=[], help=one)
