"""Parts of a run that fail, run out of memory or hang, at every fault point, and devices that are lost."""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli import faults
from roundpipe_cli.engine.dispatch import dispatch
from roundpipe_cli.engine.gradients import StepGradients
from roundpipe_cli.engine.prepared import StepContext
from roundpipe_cli.engine.stage import StageRunner
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.program import Op
from tests.support.e2e import Outcome, metrics
from tests.torture.arena import Arena, Seen, assert_identical, check_newest, go_on, saved, spread, start

ENDS_WITHIN_S = 10.0
IN_A_STEP = ("prefetch", "upload", "compute", "download", "optimizer")
STEPS = {"first": 0, "middle": 4, "last": 7}
SAVES = {"first": 2, "middle": 4, "last": 8}
PASSAGES = {"tokenize": (1, 1, 1), "load": (1, 9, 18), "export": (1, 3, 5)}
CODES = {"FaultError": 1, "MemoryError": 5, "FaultExit": 1, "OSError": 1}
DEVICES = {1: "[cpu]", 2: "[cpu,cpu]"}


def fault_texts(action: str) -> Iterator[tuple[str, str]]:
    """(fault point, value of ROUNDPIPE_FAULT) for each point at the first, middle and last step or passage."""
    for point in IN_A_STEP:
        for step in STEPS.values():
            yield point, f"{point}:{action}:step={step}:nth=1"
    for step in SAVES.values():
        yield "ckpt_writer", f"ckpt_writer:{action}:step={step}:nth=1"
    for point, passages in PASSAGES.items():
        for nth in dict.fromkeys(passages):
            yield point, f"{point}:{action}:nth={nth}"


def failing_parts(arena: Arena, count: int) -> Seen:
    """Every fault point at its first, middle and last passage, with 1 and 2 workers, four kinds of exception."""
    cases = [
        (point, text, kind, workers)
        for kind in CODES
        for point, text in fault_texts(f"raise={kind}")
        for workers in DEVICES
        if kind in ("FaultError", "MemoryError") or workers == 2
    ]
    cases = spread(cases, count)

    def attempt(index: int, draw: random.Random) -> None:
        point, text, kind, workers = cases[index]
        work, done = _run(arena, text, workers)
        code = 5 if kind == "OSError" and point in ("ckpt_writer", "export") else CODES[kind]
        assert done.code == code, f"{text}: exit code {done.code}, expected {code}\n{done.err}"
        check_block(done, text, ENDS_WITHIN_S * arena.patience)
        if point in IN_A_STEP[:-1]:
            assert "worker " in done.err and "layer " in done.err and "step " in done.err, done.err
        _go_on_from_checkpoint(work, arena)
        shutil.rmtree(work)

    return Seen(len(cases), arena.each(len(cases), attempt), f"{len(IN_A_STEP) + 1 + len(PASSAGES)} fault points")


def hanging_parts(arena: Arena, count: int) -> Seen:
    """A part that never comes back, at every fault point: the watchdog ends the run with all stacks shown. Where it is
    one of two workers, the other one goes on; an only worker is a lost device."""
    cases = spread([(point, text, workers) for point, text in fault_texts("hang") for workers in DEVICES], count)

    def attempt(index: int, draw: random.Random) -> None:
        point, text, workers = cases[index]
        work, done = _run(arena, text, workers, "watchdog_s=1.5")
        assert "no progress" in done.err, done.err
        if workers == 2 and point in IN_A_STEP[:-1]:
            assert_gone_on(done.expect(0), work, arena.reference(), 1)
            return
        assert done.code == (5 if point in IN_A_STEP[:-1] else 1), f"{text}: exit code {done.code}\n{done.err}"
        place = "processes.py" if point == "tokenize" and "processes.py" in done.err else "faults.py"
        assert place in done.err, done.err  # where it hangs, or where the helper process is waited for that hangs
        check_block(done, text, ENDS_WITHIN_S * arena.patience)
        _go_on_from_checkpoint(work, arena)
        shutil.rmtree(work)

    return Seen(len(cases), arena.each(len(cases), attempt), "watchdog at 1.5 s")


LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("lora", {}),
    "full": ("full", {}),
    "packing": ("lora", {"packing": True, "num_train_epochs": 8}),
    "chunks": ("lora", {"pipeline__sequence_chunks": 2}),
    "DPO": ("lora", {"objective": "dpo"}),
    "float16": ("lora", {"dtype": "float16"}),
    "4 bit": ("4bit", {}),
    "weight cache": ("lora", {"pipeline__weight_cache": 10**6}),
    "evaluation": ("lora", {"val_set_size": 2, "eval_steps": 1}),
    "saves": ("lora", {"save_steps": 1}),
}
"""What a run does that loses devices: a variant and changes of its recipe."""


def lost_devices(arena: Arena, count: int) -> Seen:
    """Two of three workers fail as devices do, at random places: the run goes on with two and one to the same bits."""
    pairs = [{"prompt": f"Say {n}: ", "chosen": f"{n} " * (1 + n % 3), "rejected": "no"} for n in range(10)]
    rows = arena.folder / "pairs.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    names = list(LOSSES)
    seen: list[int] = []
    usual_s: list[float] = []
    extra_s: list[float] = []

    def attempt(index: int, draw: random.Random) -> None:
        variant, changes = LOSSES[names[index % len(names)]]
        if "objective" in changes:
            changes = {**changes, "datasets": [{"path": str(rows)}]}
        reference = arena.reference(variant, **changes)
        work = arena.workspace(variant, **changes)
        steps = sorted(draw.sample(range(len(metrics(reference))), 2))
        lost = [
            f"{draw.choice(IN_A_STEP[:-1])}:raise=DeviceFault:step={step}:worker={draw.randrange(left)}"
            f":nth={draw.randint(1, 3)}"
            for step, left in zip(steps, (3, 2), strict=True)
        ]
        environment = {"ROUNDPIPE_FAULT": ",".join([*lost, "ckpt_writer:slow=0.05"])}
        done = start(work, "pipeline.devices=[cpu,cpu,cpu]", environment=environment, before=copy_weights).finish()
        text = f"{names[index % len(names)]}, {', '.join(lost)}"
        assert done.code == 0, f"{text}: exit code {done.code}\n{done.err}"
        number = done.err.count("was lost at")
        assert_gone_on(done, work, reference, number)
        times = {row["step"]: row["step_s"] for row in metrics(work / "out")}
        where = re.findall(r"was lost at step (\d+)", done.err)
        usual = statistics.median(times.values())
        seen.append(number)
        usual_s.append(usual)
        extra_s.extend([times[int(step)] - usual for step in where])
        shutil.rmtree(work)

    failures = arena.each(count, attempt)
    note = f"{sum(seen)} devices lost in {sum(map(bool, seen))} of the runs"
    if extra_s:
        note += f"; their steps took {statistics.median(extra_s):.2f} s longer (at most {max(extra_s):.2f} s) than"
        note += f" other steps ({statistics.median(usual_s):.2f} s)"
    return Seen(count, failures, note)


def assert_gone_on(done: Outcome, work: Path, reference: Path, number: int) -> None:
    """A run that lost so many devices has the result of one that lost none, and says so."""
    assert "error: " not in done.err, done.err
    events = [json.loads(line) for line in (work / "out" / "events.jsonl").read_text().splitlines()]
    assert sum(event.get("event") == "DeviceLost" for event in events) == number, done.err
    assert len(json.loads((work / "out" / "report.json").read_text())["lost_devices"]) == number
    assert_identical(work, reference)


def check_block(done: Outcome, text: str, within_s: float) -> None:
    """One error block, no traceback, in time."""
    blocks = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(blocks) == 1, f"{text}: {len(blocks)} error blocks\n{done.err}"
    assert "Traceback" not in done.out + done.err, f"{text}: {done.err}"
    assert done.seconds < within_s, f"{text}: ended after {done.seconds:.1f} s"


def _go_on_from_checkpoint(work: Path, arena: Arena) -> None:
    """To the end of a run that has one, which has to be good; without one it would only be another run."""
    if saved(work):
        check_newest(work)
        go_on(work)
        assert_identical(work, arena.reference())


def _run(arena: Arena, fault: str, workers: int, *words: str) -> tuple[Path, Outcome]:
    work = arena.workspace()
    words = (f"pipeline.devices={DEVICES[workers]}", *words)
    return work, start(work, *words, environment={"ROUNDPIPE_FAULT": fault}, before=copy_weights).finish()


def copy_weights() -> None:
    """CPU workers copy weights and gradients, as GPUs do, so that every fault point is passed."""
    from roundpipe_cli.engine.backends.cpu import CpuBackend
    from roundpipe_cli.train.prepare import devices

    devices.CpuBackend = functools.partial(CpuBackend, copy=True)  # type: ignore[misc,assignment]


def see_hangs_soon(patch: Callable[[object, str, object], None] = setattr) -> threading.Event:
    """Let the watchdog wait for half a second once a fault point hangs, or the event that is returned is set, and for
    ever before: a busy machine does not look like a hang."""
    act, hangs = faults._act, threading.Event()

    def act_and_tell(rule: faults._Rule, point: str, ids: dict[str, int]) -> float | None:
        if rule.action == "hang":
            hangs.set()
        return act(rule, point, ids)

    patch(faults, "_act", act_and_tell)
    watchdog_s = property(lambda pool: 0.5 if hangs.is_set() else None, lambda pool, value: None)
    patch(dispatch.Pool, "_watchdog_s", watchdog_s)
    for name in ("JOIN_TIMEOUT_S", "JOIN_AFTER_ERROR_S", "LEAVE_S"):
        patch(dispatch, name, 1.0)
    return hangs


def lose_after_gradients(step: int, patch: Callable[[object, str, object], None] = setattr) -> None:
    """Lose the device that computes the last operation of `step` (from 0) there, once gradients of other layers, which
    do not need it, are complete and were passed on."""
    run, complete = StageRunner.run, StepGradients.complete
    passed: dict[StepGradients, threading.Event] = defaultdict(threading.Event)
    lost: list[int] = []

    def complete_and_tell(self: StepGradients, layer: int, squares: torch.Tensor) -> None:
        complete(self, layer, squares)
        if layer not in self._late_layers:
            passed[self].set()

    def run_or_fail(self: StageRunner, context: StepContext, op: Op) -> None:
        program = context.program
        last_stage = len(program.schedule.backward_stages) - 1
        if context.step == step and not lost and (op.kind, op.stage) == (Kind.BACKWARD, last_stage):
            later = program.compute[op.worker][program.compute[op.worker].index(op.id) + 1 :]
            if not later and op.microbatch == program.schedule.num_microbatches - 1:
                lost.append(op.worker)
                assert passed[context.gradients].wait(60)
                raise faults.DeviceFault("after gradients were passed on")
        run(self, context, op)

    patch(StageRunner, "run", run_or_fail)
    patch(StepGradients, "complete", complete_and_tell)
