"""The picture to share, of a run or of a simulated one, which says so inside the image; `watch --demo`; and pages as a
browser draws them: nothing clipped, enough contrast, narrow and wide, light and dark."""

from __future__ import annotations

import time
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from roundpipe_cli.cli import follow
from roundpipe_cli.cli.follow import DEMO_RECIPE, recipe_and_overrides
from roundpipe_cli.cli.watch import watch
from roundpipe_cli.dashboard.demo import demo_events, shared_picture
from roundpipe_cli.dashboard.html import STEPS, Series, curves, page
from roundpipe_cli.dashboard.live import LiveDashboard
from roundpipe_cli.dashboard.state import DashboardState, fold_all
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event, Span, StepFinished
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.timeline import COMPUTE, Interval, Timeline, bubble_ratio
from scripts import page_check
from tests.support.recorded import START_S, recorded_run, recorded_step, simulated_run

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(picture: str) -> list[str]:
    root = xml.etree.ElementTree.fromstring(picture)
    return [str(element.text) for element in root.iter(f"{SVG}text")]


def test_a_picture_of_a_run_says_what_it_is_without_its_page() -> None:
    state = fold_all(recorded_run(4))
    shown = texts_of(shared_picture(state, where="outputs/a"))
    assert shown[0] == "Qwen3-8B lora bfloat16 on 4xcuda, 2,158 tokens/s"
    assert shown[1] == "measured by roundpipe on 2027-01-15, step 40 of 100"
    assert f"GPUs {100 * (1 - bubble_ratio(recorded_step(4))):.0f} % busy" in shown
    assert "one step: 7.59 s, loss 1.1304, bubble 5.7 %" in shown
    assert "workers" in " ".join(texts_of(shared_picture(fold_all(recorded_run(2, gpu=False)), where="a")))
    assert state.timeline is not None and "host" not in shown
    spans = (*state.timeline.spans, Span(-1, "host", "O", 0, -1, 1.0, 2.0))
    assert "host" in texts_of(shared_picture(replace(state, timeline=replace(state.timeline, spans=spans)), where="a"))


def test_a_simulated_picture_says_so_inside_the_image() -> None:
    state = fold_all(demo_events(simulated_run(8), 1, START_S))
    shown = texts_of(shared_picture(state, where="qwen3-8b"))
    assert shown[0].startswith("Qwen3-8B full on 8x4090, ") and shown[0].endswith(" tokens/s")
    assert shown[1] == "simulated by roundpipe, not measured"
    assert not any("loss" in text for text in shown)


def test_without_a_step_there_is_no_picture() -> None:
    for state in (DashboardState(), fold_all(recorded_run(2, num_done=0))):
        with pytest.raises(RefusedError, match="no step to draw yet") as caught:
            shared_picture(state, where="outputs/a")
        assert "watch --demo" in str(caught.value.problems[0].hint)


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize("values", [(0.0, 0.0), (2.0, 2.0), (-1.0, 3.0), (1e-9, 1e9), (0.0,)])
def test_a_curve_of_any_values_lies_in_its_picture(values: tuple[float, ...], from_zero: bool) -> None:
    series = Series("rate", [(float(n), abs(y) if from_zero else y) for n, y in enumerate(values)], "c")
    root = xml.etree.ElementTree.fromstring(curves([series], STEPS, title="Rate", height=200, from_zero=from_zero))
    drawn = [each for each in root.iter() if each.tag in (f"{SVG}polyline", f"{SVG}circle")]
    pairs = [pair.split(",") for each in drawn for pair in each.get("points", "").split()]
    places = [float(y) for _, y in pairs] or [float(each.attrib["cy"]) for each in drawn]
    assert len(places) == len(values) and all(0 <= y <= 200 for y in places)


def test_events_of_a_simulated_run_are_in_order_and_end_with_its_last_step() -> None:
    run = simulated_run(2)
    times = [time_s for time_s, _ in demo_events(run, 3, START_S)]
    assert times == sorted(times)
    state = fold_all(demo_events(run, 3, START_S))
    assert state.step is not None and (state.step.step, state.step.eta_s) == (3, 0)
    assert state.median_bubble.value == pytest.approx(bubble_ratio(run.timeline), abs=1e-3)


def test_after_demo_comes_a_recipe_or_nothing() -> None:
    assert recipe_and_overrides([]) == (DEMO_RECIPE, [])
    assert recipe_and_overrides(["method=full"]) == (DEMO_RECIPE, ["method=full"])
    assert recipe_and_overrides(["mine.yaml", "lora.r=4"]) == ("mine.yaml", ["lora.r=4"])


def test_demo_plans_a_recipe_and_writes_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["quickstart", "gradient_accumulation_steps=2"]
    watch(small, demo="1x4090", svg=tmp_path / "run.svg")
    shown = texts_of((tmp_path / "run.svg").read_text(encoding="utf-8"))
    assert "on 1x4090, " in shown[0] and shown[1].startswith("simulated by roundpipe, not measured")
    watch(small, demo="1x4090")  # no terminal: one line
    out = capsys.readouterr().out
    assert "on 1x4090: " in out and "% busy\n  simulated by roundpipe, not measured" in out


@pytest.mark.parametrize("step_s", [0.02, 70.0])
def test_a_demo_shows_long_and_short_steps_at_a_pace_to_be_seen(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Timeline(1, (Interval(0, COMPUTE, Kind.FORWARD, 0, 0, 0.0, step_s),))
    run, shown_s, early = replace(simulated_run(1), timeline=step), 0.1, list[tuple[int, bool]]()

    class Watched(LiveDashboard):
        def tell(self, event: Event) -> None:
            if isinstance(event, StepFinished):  # the first one is over when the demo begins
                shown_steps = 1 + (time.monotonic() - began_s) / shown_s, (self._clock() - START_S) / step_s
                early.append((event.step, min(shown_steps) < event.step - 1e-3))

    for name in ("LEAST_SHOWN_S", "MOST_SHOWN_S"):
        monkeypatch.setattr(follow, name, shown_s)
    monkeypatch.setattr(follow, "DEMO_S", 2 * shown_s)
    monkeypatch.setattr(follow, "LiveDashboard", Watched)
    began_s = time.monotonic()
    follow._play(run, START_S)
    assert early == [(2, False), (3, False)]


# --- as a browser draws them, and as readers see them ---------------------------------------------------------------
needs_chromium = pytest.mark.skipif(page_check.chromium() is None, reason="needs chromium")
REPORT = {
    "predicted": {"step_s": 7.2, "tokens_per_s": 2300.0, "bubble_ratio": 0.05},
    "measured": {"step_s": 7.6, "tokens_per_s": 2158.0, "bubble_ratio": 0.057},
}


@needs_chromium
def test_pages_and_pictures_are_read_at_every_size_and_in_both_colours(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page(recorded_run(8), REPORT, "model: m\n"), encoding="utf-8")
    simulated = fold_all(demo_events(simulated_run(8), 1, START_S))
    (tmp_path / "run.svg").write_text(shared_picture(simulated, where="a"), encoding="utf-8")
    assert [fault for name in ("report.html", "run.svg") for fault in page_check.faults_of(tmp_path / name)] == []
