"""Child process of `scripts/gpu_check`: the checks of one part, a line of JSON before and after each.

    python scripts/gpu_check --child correctness --results FILE

Stacks go to stderr: after `WATCHDOG_S` without a result, and on SIGUSR1. On a real card the process ends after a check
that failed, because CUDA errors stay; the parent starts another for the rest.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from roundpipe_cli.limited import PR_SET_PDEATHSIG
from scripts.gpu_checks.place import OPTIONAL, WATCHDOG_S, Check, CheckPlace, SkippedCheckError, block_imports

PARTS = (
    *("environment", "correctness", "links", "memory", "kernels", "experts", "fp8"),
    *("prediction", "throughput", "sanitizer", "rates", "fits", "endtoend"),
)
"""Cheap and decisive ones first; a module of this package each."""
UNFINISHED = 3
"""Exit code: checks are left, and this process is not fit for them."""


def run_part(
    name: str,
    place: CheckPlace,
    results: Path,
    done: Collection[str],
    *,
    chosen: Collection[str] = (),
    snapshot: str = "",
) -> int:
    """Make all checks of a part that are not `done`; returns an exit code.

    Args:
        chosen: only these; none: all.
        snapshot: file for what the GPUs' memory holds when a check runs out of it; empty: none.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module = importlib.import_module(f"scripts.gpu_checks.{name}")
    for one in module.checks(place):
        if one.name in done or (chosen and not {one.name, one.name.partition(" on [")[0]} & set(chosen)):
            continue
        record(results, {"part": name, "check": one.name, "status": "running", "limit_s": one.limit_s})
        faulthandler.dump_traceback_later(WATCHDOG_S, repeat=False)
        outcome = outcome_of(one, snapshot)
        faulthandler.cancel_dump_traceback_later()
        record(results, {"part": name, "check": one.name, **outcome})
        if outcome["status"] == "failed" and not place.is_simulated:
            return UNFINISHED
    return 0


def outcome_of(one: Check, snapshot: str = "") -> dict[str, Any]:
    """Status, seconds and figures of a check; `snapshot` as of `run_part`."""
    start_s = time.perf_counter()
    try:
        found: dict[str, Any] = {"status": "ok", "figures": dict(one.run())}
    except SkippedCheckError as error:
        found = {"status": "skipped", "reason": str(error)}
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OPTIONAL:
            found = failure(error)
        else:
            found = {"status": "skipped", "reason": f"{package} is not installed"}
    except Exception as error:
        found = failure(error)
        if snapshot and "OutOf" in type(error).__name__:
            import torch

            torch.cuda.memory._dump_snapshot(snapshot)
            found["memory_snapshot"] = snapshot
    return {**found, "seconds": round(time.perf_counter() - start_s, 3)}


def failure(error: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:2000], "traceback": text[-6000:]}


def record(results: Path, line: Mapping[str, Any]) -> None:
    """Append a line and see it on disk: a machine may be taken away at any moment."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def main(args: argparse.Namespace) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a parent that was killed cannot end this process
    block_imports(tuple(args.without))
    from roundpipe_cli.cli.output import quiet_libraries

    quiet_libraries()
    indices = tuple(args.indices) or visible_gpus(64 if args.quick else 2)
    place = CheckPlace(args.device == "simulated", indices, args.scale, args.quick, args.trace or "")
    if args.memory_snapshot and not place.is_simulated:
        import torch

        torch.cuda.memory._record_memory_history(max_entries=100_000)
    if not place.is_simulated:
        set_up(indices)
    snapshot = "" if place.is_simulated else args.memory_snapshot or ""
    return run_part(args.child, place, Path(args.results), set(args.done), chosen=set(args.choose), snapshot=snapshot)


def set_up(indices: Sequence[int]) -> None:
    """Attention, memory and threads as a run has them; nothing without a GPU."""
    from roundpipe_cli.engine.backends import cuda, cuda_process

    if cuda.num_devices():
        cuda_process.set_up_process(indices)


def visible_gpus(most: int) -> tuple[int, ...]:
    """At most so many of them; (0,) without any, for the part that says so."""
    from roundpipe_cli.engine.backends import cuda

    return tuple(range(min(most, cuda.num_devices()))) or (0,)
