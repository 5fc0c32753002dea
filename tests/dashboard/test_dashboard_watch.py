"""A run followed from its files: whole or torn, finished, resumed or killed, in plain lines; the page made of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from roundpipe_cli.cli.display import Display
from roundpipe_cli.cli.watch import watch
from roundpipe_cli.costs.machine import host_memory
from roundpipe_cli.dashboard import replay
from roundpipe_cli.dashboard.html import comparison, page, read_report, report_page
from roundpipe_cli.dashboard.live import last_frame
from roundpipe_cli.dashboard.replay import Life, RunFiles, run_hint
from roundpipe_cli.dashboard.state import DashboardState, Median, fold_all
from roundpipe_cli.dashboard.views import MIN_HEIGHT
from roundpipe_cli.events import (
    DeviceSample,
    EvaluationFinished,
    Event,
    Notice,
    RunStarted,
    RunStopped,
    Sample,
    StepFinished,
    StepTimeline,
    WorkSeen,
    decode,
    encode,
)
from roundpipe_cli.train.monitor.metrics_file import metrics_row
from roundpipe_cli.train.monitor.telemetry import read_lines
from tests.cli.test_terminal_text import said
from tests.support.e2e import finetune, make_workspace, metrics
from tests.support.recorded import recorded_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("run") / "w", model, num_train_epochs=1)
    done = finetune(folder, "--trace").expect(0)
    assert "predicted" in done.err and "forward and backward" in done.err
    return folder / "out"


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundpipe_cli.cli.follow.GRACE_S", 0.2)


def steps(state: DashboardState) -> int:
    return state.step.step if state.step else 0


# --- files ------------------------------------------------------------------------------------------------------------
def test_what_a_run_records(finished: Path) -> None:
    lines = read_lines(finished / "events.jsonl")
    told = [event for line in lines if (event := decode(line)) is not None]
    kinds = [type(event).__name__ for event in told]
    assert len(told) == len(lines)
    assert kinds.index("RunStarted") < kinds.index("StepTimeline") < kinds.index("RunFinished")
    said = [event.text for event in told if isinstance(event, Notice)]
    assert any(text.startswith("model: ") for text in said) and any(text.startswith("data: ") for text in said)
    sample = next(event for event in told if isinstance(event, Sample))
    assert 10e6 < sample.process_bytes <= sample.host_total_bytes and sample.devices == (DeviceSample(),) * 2
    memory = host_memory()  # a little later, so about the same
    used_bytes = memory.total_bytes - memory.available_bytes
    assert sample.host_used_bytes == pytest.approx(used_bytes, abs=memory.total_bytes / 4)
    timelines = [event for event in told if isinstance(event, StepTimeline)]
    assert [event.step for event in timelines] == [1, 2, 3]
    for timeline, row in zip(timelines, metrics(finished), strict=True):
        ends = max(span.end_s for span in timeline.spans)
        computed = [span for span in timeline.spans if span.lane == "compute"]
        busy = [sum(span.end_s - span.start_s for span in computed if span.worker == worker) for worker in (0, 1)]
        assert [share / ends for share in busy] == pytest.approx(row["utilization"], abs=1e-3)


def test_every_prefix_of_the_files_can_be_followed(finished: Path, tmp_path: Path) -> None:
    data = {name: (finished / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")}
    whole = [type(event) for _, event in RunFiles(finished).poll()[1]]
    assert whole.count(StepFinished) == 3 and RunStarted in whole
    for share in [n / 31 for n in range(1, 31)]:
        for name, content in data.items():
            (tmp_path / name).write_bytes(content[: int(share * len(content))])
        files = RunFiles(tmp_path)
        before = files.poll()[1]
        for name, content in data.items():
            with (tmp_path / name).open("ab") as stream:
                stream.write(content[int(share * len(content)) :])
        anew, after = files.poll()
        assert not anew
        assert sorted(map(str, map(type, [event for _, event in before + after]))) == sorted(map(str, whole))
        assert files.poll() == (False, [])


def test_a_file_that_was_replaced_begins_anew(finished: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        shutil.copy(finished / name, tmp_path / name)
    files = RunFiles(tmp_path)
    files.poll()
    rows = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "new").write_bytes(rows[0])
    (tmp_path / "new").rename(tmp_path / "metrics.jsonl")
    anew, events = files.poll()
    assert anew and steps(fold_all(events)) == 1


def test_a_resumed_dashboard_begins_with_the_steps_before(finished: Path) -> None:
    """Its curve began at the resumed step, while `watch` showed the whole run."""
    known = RunFiles(finished).before(2)
    assert [step for step, _ in known.losses.all_points] == [1, 2] and known.step is None
    display = Display(lambda event: None, dashboard=False, output_dir=finished)
    display.is_dashboard = True  # pretend that this is a terminal
    display(RunStarted(0.0, "a", "b", ("cpu",), 3, 2))
    live = display._live
    assert live is not None and live.state.losses == known.losses and live.state.speeds == known.speeds
    live.stop()


def test_rubbish_in_the_files_is_passed_over(finished: Path, tmp_path: Path) -> None:
    rubbish = b'\x00\xff\n[1]\n{"step": "x"}\n{"event": "Sample", "devices": 3}\n' + b"[" * 100_000 + b"\n"
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_bytes(rubbish + (finished / name).read_bytes())
    state = fold_all(RunFiles(tmp_path).poll()[1])
    assert steps(state) == 3 and state.finished is not None


def test_files_are_read_in_pieces(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a file of a terabyte of nothing was read at once, and took all memory."""
    whole = list(map(str, RunFiles(finished).poll()[1]))
    lines = [line for name in ("metrics.jsonl", "events.jsonl") for line in (finished / name).read_bytes().split(b"\n")]
    monkeypatch.setattr(replay, "MAX_READ_BYTES", 1 + max(map(len, lines)))
    assert list(map(str, RunFiles(finished).poll()[1])) == whole
    for name in ("metrics.jsonl", "events.jsonl"):
        shutil.copy(finished / name, tmp_path)
        os.truncate(tmp_path / name, 2**40)
    assert list(map(str, RunFiles(tmp_path).poll()[1])) == whole


def test_life(finished: Path, tmp_path: Path) -> None:
    assert RunFiles(finished).life() is Life.FINISHED
    shutil.copy(finished / "metrics.jsonl", tmp_path)
    assert RunFiles(tmp_path).life() is Life.STOPPED
    (tmp_path / ".roundpipe.lock").write_text('{"pid": 1, "host": "elsewhere"}')
    assert RunFiles(tmp_path).life() is Life.RUNNING
    for seconds, place in enumerate(("outputs/b", "outputs/c", "a")):
        shutil.copytree(finished, tmp_path / place)
        os.utime(tmp_path / place / "metrics.jsonl", (seconds % 2, seconds % 2))
    os.utime(tmp_path / "metrics.jsonl", (0, 0))
    assert run_hint(tmp_path) == "the newest run here is outputs/c"


# --- the command ------------------------------------------------------------------------------------------------------
def test_watch_prints_one_line_per_step(finished: Path) -> None:
    rows = [json.loads(line) for line in said("watch", str(finished), "--json")[0].splitlines()]
    assert [(row["step"], row["loss_hex"]) for row in rows] == [(r["step"], r["loss_hex"]) for r in metrics(finished)]
    assert [line.split()[1] for line in said("watch", str(finished))[0].splitlines()] == ["1/3", "2/3", "3/3"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_watch_of_a_run_without_a_step_says_so(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "report.json").write_text("{}")
    out, err = said("watch", str(tmp_path), "--no-follow", *options)
    assert out == "" and "no step of this run is finished" in err


def test_a_page_and_a_picture_in_one_go(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `--html` and `--svg` together only the picture was written, without a word."""
    monkeypatch.chdir(tmp_path)
    _, err = said("watch", str(finished), "--html", "run.html", "--svg", "run.svg")
    assert err.splitlines() == ["wrote run.svg", "wrote run.html"]
    assert {path.name for path in tmp_path.glob("run.*")} == {"run.svg", "run.html"}


# --- figures ----------------------------------------------------------------------------------------------------------
def test_figures_equal_those_of_the_trace(finished: Path) -> None:
    state = fold_all(RunFiles(finished).poll()[1])
    trace = json.loads((finished / "trace.json").read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X" and event["tid"] == 0]
    whole_us = max(event["ts"] + event["dur"] for event in trace if event["ph"] == "X")
    busy = [sum(event["dur"] for event in spans if event["pid"] == worker + 1) / whole_us for worker in (0, 1)]
    means = [worker.mean_utilization.value for worker in state.workers]
    assert means == pytest.approx(busy, abs=0.01)
    ratios = [row["bubble_ratio"] for row in metrics(finished)]
    assert state.median_bubble.value == pytest.approx(statistics.median_low(ratios), abs=1e-3)
    assert read_report(finished)["measured"]["bubble_ratio"] == statistics.median_low(ratios)
    assert Median().with_value(0.294).with_value(0.319).value == 0.294, "of two steps the end said 30.6 %"


def test_comparison_says_how_far_off() -> None:
    measured = {"pipeline_s": 2.2, "step_s": 2.5, "tokens_per_s": 90.0, "bubble_ratio": 0.15, "host_peak_bytes": 2**31}
    predicted = {"step_s": 2.0, "bubble_ratio": 0.1, "tokens_per_s": 100.0, "host_bytes": 2**30}
    assert comparison({"predicted": predicted, "measured": measured}) == [
        ("forward and backward", "2 s", "2.2 s", "+10 %"),
        ("whole step", "-", "2.5 s", "-"),
        ("tokens/s", "100", "90", "-10 %"),
        ("bubble", "10.0 %", "15.0 %", "+5.0 points"),
        ("host memory", "1 GiB", "2 GiB", "+100 %"),
    ]
    assert comparison({}) == []


# --- the page ---------------------------------------------------------------------------------------------------------
class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "action", "data", "srcset")]


def test_the_page_needs_nothing_else(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    parsed = Parsed(text)
    assert parsed.tags.count("svg") == 4 and "script" not in parsed.tags and parsed.addresses == ["data:,"]
    assert set(re.findall(r"url\((.)", text)) == {"#"} and "@import" not in text, "a pattern of its own, nothing else"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "JST-9")
        time.tzset()
        assert text == report_page(finished), "the times are of UTC"
    time.tzset()
    for words in (
        "Predicted and measured",
        "gradient_accumulation_steps: 2",
        "step 3 of 3, finished",
        "recompute, stage",
        "roundpipe finetune recipe.yaml --trace",
        "UTC, roundpipe ",
        "host in all",
    ):
        assert words in text, words
    kinds = re.findall(r'class="kind-([FRBH])"', text)
    recorded = [event for _, event in RunFiles(finished).poll()[1] if isinstance(event, StepTimeline)]
    computed = [span for event in recorded[-3:] for span in event.spans if span.lane == "compute"]
    assert len(kinds) == len(computed) and set(kinds) == {"F", "R", "B", "H"}


def test_what_a_run_says_is_no_markup() -> None:
    events = [*recorded_run(2), (0.0, Notice("</pre><script>"))]
    report = {
        "predicted": {"step_s": 1.0, "tokens_per_s": 100.0},
        "measured": {"pipeline_s": 2.0, "tokens_per_s": 99.0},
    }
    text = page(events, report, "model: <script>alert(1)</script>")
    assert "second, last step<" in page(events, {}, "") and "second<" in text, "of a run that is over, of all its steps"
    assert re.findall(r'class="off">([^<]*)<', text) == ["+100 %"], "what is far off is seen, and nothing else"
    assert re.findall(r"<h2>([^<,]*)", text) == [
        *("Loss", "Evaluations", "Learning rate", "Predicted and measured", "Workers", "Memory in GiB"),
        *("Recipe", "Messages"),
    ]
    assert "<script>" not in text and text.count("&lt;script&gt;") == 2, "of the recipe and of a message"
    assert Parsed(page([], {}, "")).tags.count("svg") == 3, "of nothing too"


# --- plain lines ------------------------------------------------------------------------------------------------------
REWARDS = {"rewards_chosen": 0.8, "rewards_rejected": 0.1, "reward_margin": 0.7, "reward_accuracy": 0.875}


def write_files(folder: Path, events: Sequence[tuple[float, Event]]) -> Path:
    step, rows, lines = 0, [], []
    for time_s, event in events:
        if isinstance(event, StepFinished):
            step = event.step
            rows.append(metrics_row(event))
        elif not isinstance(event, WorkSeen):
            lines.append({"t": time_s, "step": step, **encode(event)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_that_is_over_is_told_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines are read in no time: workers were looked at in the first and the last step only."""
    events = recorded_run(2)
    watch([str(write_files(tmp_path, [*events, (events[-1][0], RunStopped("stopped by SIGINT"))]))], verbose=True)
    said = capsys.readouterr().err
    looks = [line.split()[1].rstrip(":") for line in said.splitlines() if line.startswith("  step ")]
    assert looks[0] == "1" and looks[-1] == "40" and 4 <= len(looks) <= 8, looks
    assert said.count("  worker 0: cuda:0, busy ") == said.count("  worker 1: cuda:1, busy ") == len(looks)
    assert said.count(", device peak ") == len(looks), "beside what the devices tell"
    assert said.rstrip().endswith("stopped by SIGINT")


def test_preference_pairs_are_told_from_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`watch` dropped their evaluations, showed the gradient norm in place of the margin, and `--json` null."""
    events = [
        (time_s, replace(event, preference=REWARDS) if isinstance(event, (StepFinished, EvaluationFinished)) else event)
        for time_s, event in recorded_run(2)
    ]
    write_files(tmp_path, events)
    state = fold_all(RunFiles(tmp_path).poll()[1])
    assert state.step is not None and state.step.preference == REWARDS and len(state.evaluations) == 4
    watch([str(tmp_path)])
    out = capsys.readouterr().out
    assert "margin 0.700" in out and "eval  40/100  loss 1.1531  margin 0.7  accuracy 88%  best" in out
    watch([str(tmp_path)], json_output=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["preference"] == REWARDS


@pytest.mark.parametrize("num_workers", [2, 16])
def test_the_frame_that_stays_has_every_worker(num_workers: int) -> None:
    """`and 12 more workers: a higher terminal shows them`, though what is above a terminal's first line scrolls."""
    frame = last_frame(fold_all(recorded_run(num_workers)), Console(force_terminal=True), (60, 15))
    text = "\n".join(line.plain for line in frame)
    assert all(f"cuda:{worker} " in text for worker in range(num_workers)) and "more workers" not in text
    assert "loss" in text and "wait" in text and len(frame) >= MIN_HEIGHT - 1
