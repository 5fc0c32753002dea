"""Parent process of `scripts/gpu_check`: parts in child processes, time limits, one JSON document."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
AGAIN = {"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""A check that failed is made once more so: launches that wait for their end, every tensor in memory of its own."""
START_LIMIT_S = 90.0
"""For a child to import torch and begin its first check."""
POLL_S = 0.1
STACKS_S = 1.0
"""For a child to write its stacks before it is killed."""


@dataclass
class CheckDocument:
    """All that is known so far, rewritten whole after every check."""

    path: Path
    label: str
    """`GPU` or `simulated`."""
    parts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, outcome: Mapping[str, Any]) -> None:
        self.parts.setdefault(part, []).append({key: value for key, value in outcome.items() if key != "part"})
        self.write()

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
        return next((one.get("figures", {}) for one in self.parts.get(part, ()) if one["check"] == name), {})

    def with_status(self, *statuses: str) -> list[tuple[str, dict[str, Any]]]:
        return [(part, one) for part, own in self.parts.items() for one in own if one["status"] in statuses]


def run_all(args: argparse.Namespace, document: CheckDocument) -> None:
    """All parts in order, as far as time allows."""
    end_s = time.monotonic() + args.limit_s
    for part in [name for name in PARTS if name in args.only or name == "environment"]:
        start_s = time.monotonic()
        limit_s = min(QUICK_LIMITS_S[part] if args.quick else args.part_limit_s, end_s - start_s)
        print(f"\n== {part} (at most {max(0, limit_s):.0f} s)", flush=True)
        if limit_s <= 0:
            document.add(part, {"check": "all", "status": "skipped", "reason": "no time is left"})
            continue
        with tempfile.TemporaryDirectory() as folder:
            run_one(part, args, Path(folder), document, start_s + limit_s)
        document.seconds[part] = round(time.monotonic() - start_s, 1)
        document.write()
        if part == "environment" and not document.figures("environment", "devices"):
            return


def run_one(part: str, args: argparse.Namespace, folder: Path, document: CheckDocument, end_s: float) -> None:
    """One part, in as many child processes as it takes: another one after each that failed or was stopped."""
    done: list[str] = []
    while time.monotonic() < end_s:
        attempt = Attempt(part, args, folder / f"{len(done)}", done)
        for outcome in attempt.outcomes(end_s):
            done.append(outcome["check"])
            document.add(part, outcome)
            show(outcome)
        if attempt.is_complete or not attempt.has_advanced:
            break
    bad = [one["check"] for one in document.parts.get(part, ()) if one["status"] in ("failed", "stopped")]
    for name in bad if part == "correctness" else ():
        if time.monotonic() < end_s:
            again = argparse.Namespace(**{**vars(args), "choose": [name]})
            attempt = Attempt(part, again, folder / f"again {len(done)}", (), environment=AGAIN)
            done.append(name)
            for outcome in attempt.outcomes(end_s):
                outcome = {**outcome, "check": f"{name}, again", "environment": AGAIN}
                document.add(part, outcome)
                show(outcome)


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
        self.is_complete = self.has_advanced = False

    def outcomes(self, end_s: float) -> Iterator[dict[str, Any]]:
        """Results as they come; the last is of a check that the child died of, or was stopped in."""
        read, why = 0, ""
        while not why:
            ended = self._child.poll() is not None
            lines = self._results.read_text(encoding="utf-8").splitlines()
            for line in lines[read:]:
                read, self._since_s = read + 1, time.monotonic()
                found = json.loads(line)
                self._running = found if found["status"] == "running" else None
                if self._running is None:
                    self.has_advanced = True
                    yield found
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
        os.killpg(self._child.pid, signal.SIGKILL)

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
    run_all(args, document)
    if not document.figures("environment", "devices"):
        if document.with_status("failed", "stopped"):
            return summary(document)
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return 2
    return summary(document)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, one = parser.add_argument, argparse.SUPPRESS
    add("--device", choices=["cuda", "simulated"], default="cuda", help="simulated: a try of the procedure on the CPU")
    add("--quick", action="store_true", help="environment, 8 cases, links, one throughput; within 10 minutes")
    add("--only", action="append", choices=PARTS, help="may be given several times; default: all")
    add("--json", default="gpu_check.json", help="where the results go, rewritten after every check")
    add("--scale", choices=["tiny", "full"], help="sizes of what is measured; default: tiny if simulated, else full")
    add("--indices", type=int, nargs="+", default=[], help="GPUs; default: all, at most two")
    add("--without", nargs="+", default=[], metavar="PACKAGE", help="as if these packages were not installed")
    add("--part-limit-s", type=float, default=PART_LIMIT_S)
    add("--limit-s", type=float, default=ALL_LIMIT_S, help=f"of all parts; a check has {CHECK_LIMIT_S:.0f} s or more")
    add("--choose", nargs="+", default=[], metavar="CHECK", help="only these checks")
    add("--trace", metavar="FILE", help="write a trace of a whole step, for ui.perfetto.dev (part throughput)")
    add("--sanitizer", action="store_true", help="under torch's stream sanitizer (TORCH_CUDA_SANITIZER); slow")
    add(
        "--memory-snapshot", metavar="FILE", help="what memory held when a check ran out of it (pytorch.org/memory_viz)"
    )
    add("--child", choices=PARTS, help=one)
    add("--results", help=one)
    add("--done", nargs="+", default=[], help=one)
