"""Events as lines of a file, what a run records, and what a watcher sees of the workers while they work."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli import events
from roundpipe_cli.costs.hardware import catalogue
from roundpipe_cli.dashboard.html import comparison, page
from roundpipe_cli.dashboard.replay import RunFiles
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.errors import RefusedError, StoppedError
from roundpipe_cli.events import (
    EVENTS_NAME,
    METRICS_NAME,
    DeviceLost,
    DeviceSample,
    EvaluationFinished,
    Event,
    Notice,
    Phase,
    RunStarted,
    RunStopped,
    Sample,
    Span,
    StepFinished,
    StepTimeline,
    WorkSeen,
    decode,
    encode,
)
from roundpipe_cli.train.monitor import telemetry
from roundpipe_cli.train.monitor.metrics_file import metrics_row
from roundpipe_cli.train.monitor.telemetry import EventRecorder, read_lines
from roundpipe_cli.train.signals import EXIT_CODES, StopSignals

SPAN = Span(1, "compute", "F", 2, 3, 0.125, 0.25)
EVENTS: tuple[Event, ...] = (
    Notice("a \x1b[2J \u00e4"),
    RunStarted(1.5, "SmolLM2", "lora bfloat16", ("cpu", "cpu"), 10, 0),
    WorkSeen(2.5, 3, (SPAN,), ()),
    StepTimeline(3, 2.0, (SPAN, replace(SPAN, worker=-1, lane="host", kind="O", microbatch=-1))),
    EvaluationFinished(3, 10, 1.25, 3.5, 100, 0.5, True, (("p", "a"),)),
    Sample(3.0, 1, 2, 3, (DeviceSample(), DeviceSample(1, 2, 60.0, 250.0))),
    RunStopped("why"),
    EvaluationFinished(3, 10, 0.5, 1.6, 100, 0.5, False, (), {"reward_margin": 0.5, "reward_accuracy": 1.0}),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_its_line(event: Event) -> None:
    """Also where another program wrote 2.0 as 2: `watch --json` died of it."""
    assert decode(json.loads(json.dumps(encode(event)))) == event
    found = decode(json.loads(re.sub(r"(\d)\.0\b", r"\1", json.dumps(encode(event)))))
    assert repr(found) == repr(event)


def test_the_runs_clock_does_not_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = events.run_clock()
    before = clock()
    monkeypatch.setattr(events.time, "time", lambda: 0.0)
    assert 0 <= clock() - before < 60


# --- the recorder -----------------------------------------------------------------------------------------------------
class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def record(folder: Path, events: list[Event], *, first_step: int = 0, step_s: float = 5.0) -> list[dict[str, Any]]:
    clock = Clock()
    with EventRecorder(folder, clock, lambda event: None).opened(first_step) as recorder:
        for event in events:
            recorder(event)
            clock.now_s += step_s
    return read_lines(folder / EVENTS_NAME)


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    evaluations: list[Event] = [EvaluationFinished(step, 9, 1.0, 2.7, 5, 0.1, False) for step in (2, 4, 6)]
    record(tmp_path, [*evaluations, Notice("kept")])
    path = tmp_path / EVENTS_NAME
    path.write_bytes(path.read_bytes() + b'{"event": "Notice", "te')  # torn by a kill
    lines = record(tmp_path, [Notice("new")], first_step=4)
    assert [line.get("text", line.get("step")) for line in lines] == [2, 4, "kept", "new"]
    assert [line.get("text") for line in record(tmp_path, [Notice("afresh")])] == ["afresh"]


def test_what_was_said_before_the_file_is_open_is_in_it(tmp_path: Path) -> None:
    """With its own time; what the kernels are, how much memory is kept and what a resume begins with came too early."""
    clock, told = Clock(), list[Event]()
    recorder = EventRecorder(tmp_path, clock, told.append)
    clock.now_s = 5.0
    recorder(Notice("early"))
    assert told == [Notice("early")] and not (tmp_path / EVENTS_NAME).exists()
    clock.now_s = 9.0
    with recorder.opened(0):
        recorder(Notice("late"))
    assert [(line["t"], line["text"]) for line in read_lines(tmp_path / EVENTS_NAME)] == [(5.0, "early"), (9.0, "late")]


def test_words_are_shown_behind_the_step_that_they_followed(tmp_path: Path) -> None:
    """Story: `watch` and the page said that a device was lost at step 4, and then showed step 3; and that a step
    was over while a run evaluated."""
    lost = DeviceLost(0.0, 1, "cuda:1", "step 4", "CUDA error", ("cuda:0",))
    first = StepFinished(1, 9, 1.0, 1e-3, 1.0, 8, 8.0, 1.0, 0.1, (0.9, 0.0), 0, 0, 4.0)
    steps = [replace(first, step=step) for step in (1, 2, 3, 4)]
    record(tmp_path, [*steps[:3], lost, steps[3], Phase("evaluating"), RunStopped("why")])

    def told() -> list[Event]:
        rows = [json.dumps(metrics_row(step)) + "\n" for step in steps]
        (tmp_path / METRICS_NAME).write_text("".join(rows))
        return [event for _, event in RunFiles(tmp_path).poll()[1]]

    assert [getattr(event, "step", type(event)) for event in told()] == [1, 2, 3, DeviceLost, 4, Phase, RunStopped]
    record(tmp_path, [EVENTS[1], steps[2], steps[3]], first_step=2)
    order = [1, 2, DeviceLost, Phase, RunStopped, RunStarted, 3, 4]
    assert [getattr(event, "step", type(event)) for event in told()] == order


def test_timelines_are_rare_but_the_last_three_are_there(tmp_path: Path) -> None:
    lines = record(tmp_path, [StepTimeline(step, 0.0, (SPAN,)) for step in range(1, 50)], step_s=0.1)
    steps = [line["step"] for line in lines]
    assert steps[-3:] == [47, 48, 49] and len(steps) < 15


def test_the_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_FILE_BYTES", 30_000)
    samples: list[Event] = [Sample(float(n), n, n, n, ()) for n in range(3000)]
    said: list[Event] = [one for n in range(250) for one in (Notice(str(n)), StepTimeline(n, 0.0, (SPAN,)))]
    lines = record(tmp_path, [EVENTS[1], *said, *samples, RunStopped("end")], step_s=1.0)
    assert (tmp_path / EVENTS_NAME).stat().st_size < 31_000
    assert lines[0]["event"] == "RunStarted" and lines[-1]["event"] == "RunStopped"
    assert [line["text"] for line in lines if line["event"] == "Notice"] == [str(n) for n in range(50, 250)]
    assert [line["step"] for line in lines if line["event"] == "StepTimeline"] == [247, 248, 249]
    times = [line["time_s"] for line in lines if line["event"] == "Sample"]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and times[-1] > 2900 and max(gaps) <= 4 * min(gaps) and len(times) > 50


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Event] = []
    with EventRecorder(tmp_path, Clock(), told.append).opened(0) as recorder:
        recorder(Notice("before"))
        monkeypatch.setattr(telemetry.os, "write", lambda *arguments: 3)
        recorder(Notice("lost"))
        monkeypatch.undo()
        recorder(Notice("after"))
    texts = [event.text for event in told if isinstance(event, Notice)]
    assert texts[:2] == ["before", "lost"] and "no longer written" in texts[2] and texts[3] == "after"


# --- signals ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*EXIT_CODES, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_after_a_stop_signals_wait_until_it_was_said() -> None:
    with pytest.raises(StoppedError, match="stopped by SIGTERM before the first finished step"), StopSignals():
        signal.raise_signal(signal.SIGTERM)
    for number in EXIT_CODES:
        signal.raise_signal(number)
    with pytest.raises(StoppedError, match="stopped by SIGINT") as stopped, StopSignals():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:  # as torch's conversion of a storage does
            raise ValueError("could not determine the shape of object type") from None
    assert isinstance(stopped.value.__cause__, ValueError)
    with pytest.raises(StoppedError, match="at once by a second SIGINT") as stopped, StopSignals() as signals:
        signals.guard()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.raise_signal(number)
    assert stopped.value.exit_code == 130, "of SIGINT: no other signal stops at once"


@pytest.mark.usefixtures("handlers")
@pytest.mark.timeout(60, method="thread")  # the other method takes the timer that is used here
def test_a_stop_that_python_ignores_comes_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Story: a Ctrl-C in a weak reference's callback printed a traceback, and the run went on to its first step."""
    hook = sys.unraisablehook
    with pytest.raises(StoppedError, match="stopped by SIGINT before the first finished step"), StopSignals():
        held = type("Held", (), {})()
        kept = weakref.ref(held, lambda _: signal.raise_signal(signal.SIGINT))
        del held
        assert kept() is None
        time.sleep(30)
    assert capfd.readouterr() == ("", "") and sys.unraisablehook is hook


def test_arithmetic_is_compared_with_the_data_sheet_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products of float16 add up in float16 a card promises more."""
    card = catalogue()["rtx-4090"]
    monkeypatch.setattr(cuda, "device_name", lambda index: "NVIDIA GeForce RTX 4090")
    cases = {("bfloat16", False): card.acc32_tflops, ("float16", True): card.fp16_acc16_tflops}
    for (dtype, narrow), tflops in {**cases, ("float32", False): card.fp32_tflops}.items():
        assert telemetry._promised("cuda:0", dtype, narrow=narrow) == tflops * 1e12
    assert card.fp16_acc16_tflops > card.acc32_tflops and telemetry._promised("cpu", "float32", narrow=False) is None


def test_pause_and_save_between_steps() -> None:
    with StopSignals() as signals:
        signals.guard()
        assert not signals.take_save() and not signals.paused
        signals.ask_to_save()
        assert signals.take_save() and not signals.take_save()
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested is signal.SIGINT


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        (EVENTS[0], {"event": "Nothing"}),
        (EVENTS[3], {"spans": [[1]]}),
        (EVENTS[1], {"num_steps": "10"}),
        (EVENTS[1], {"time_s": float("nan")}),
        (EVENTS[3], {"start_s": 10**400}),
        (EVENTS[3], {"spans": [[2**62, "compute", "F", 0, 0, 0, 1]]}),
        (EVENTS[3], {"spans": [[0, "compute", "FB", 0, 0, 0, 1]]}),
        (EVENTS[4], {"loss": None}),
        (EVENTS[4], {"samples": [["p"]]}),
        (EVENTS[5], {"devices": [{"used_bytes": "1"}]}),
        (EVENTS[5], {"host_used_bytes": 2**62}),
        (EVENTS[7], {"preference": {"reward_margin": float("nan")}}),
    ],
    ids=str,
)
def test_an_event_with_values_of_other_types_is_none(event: Event, changes: dict[str, Any]) -> None:
    """`watch` and its page showed them, and a tenth of such files was a bug of theirs."""
    assert decode(json.loads(json.dumps({**encode(event), **changes}))) is None
    assert decode({}) is None and decode({"event": "Notice"}) is None


@pytest.mark.parametrize(
    "changes", [{"step_s": 0}, {"loss": 10**400}, {"utilization": ["x"]}, {"tokens": 2**70}, {"step": "one"}], ids=str
)
def test_a_step_with_odd_values_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    row = {"step": 1, "loss": 2.5, "learning_rate": 1e-4, "grad_norm": None, "tokens": 100, "tokens_per_s": 10.0}
    row |= {"step_s": 0.4, "bubble_ratio": 0.1, "utilization": [0.5], "upload_bytes": 1, "device_peak_bytes": 2}
    rows = row, {**row, "step": 2, **changes}, {**row, "step": 3}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert [event.step for _, event in RunFiles(tmp_path).poll()[1] if isinstance(event, StepFinished)] == [1, 3]


def test_a_run_file_that_is_a_pipe_does_not_hold_the_watcher(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(RefusedError, match="no regular file"):
        RunFiles(tmp_path).poll()


def test_odd_figures_in_a_report_are_left_out() -> None:
    measured = {"step_s": "1", "tokens_per_s": float("nan"), "bubble_ratio": 0.1, "host_peak_bytes": -1}
    assert [row[0] for row in comparison({"predicted": [], "measured": measured})] == ["bubble"]
    assert "roundpipe 1</p>" in page([], {"machine": 0.3, "tool_version": "1"}, "")
