"""The picture to share, of a run or of a simulated one, which says so inside the image; `watch --demo`; the colours of
work; and pages as a browser draws them: nothing clipped, enough contrast, narrow and wide, light and dark."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree
from pathlib import Path

import pytest

from roundpipe_cli.cli.watch import DEMO_RECIPE, recipe_and_overrides, watch
from roundpipe_cli.dashboard.demo import demo_events, shared_picture
from roundpipe_cli.dashboard.html import STEPS, TIME, page
from roundpipe_cli.dashboard.state import DashboardState, fold_all
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.schedule.pictures import WORK_COLOURS
from roundpipe_cli.schedule.timeline import bubble_ratio
from scripts import page_check
from tests.support.recorded import START_S, recorded_run, recorded_step, simulated_run

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(picture: str) -> list[str]:
    root = xml.etree.ElementTree.fromstring(picture)
    return [str(element.text) for element in root.iter(f"{SVG}text")]


def test_a_picture_of_a_run_says_what_it_is_without_its_page() -> None:
    shown = texts_of(shared_picture(fold_all(recorded_run(4)), where="outputs/a"))
    assert shown[0] == "Qwen3-8B lora bfloat16 on 4xcuda, 2,158 tokens/s"
    assert shown[1] == "measured by roundpipe on 2027-01-15, step 40 of 100"
    assert f"GPUs {100 * (1 - bubble_ratio(recorded_step(4))):.0f} % busy" in shown
    assert "one step: 7.59 s, loss 1.1304, bubble 5.7 %" in shown
    assert "workers" in " ".join(texts_of(shared_picture(fold_all(recorded_run(2, gpu=False)), where="a")))


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


def test_values_of_axes_are_round() -> None:
    """Curves had the first and the last step below them, timelines the length of the longest step."""
    assert STEPS.ticks(1, 40) == [10, 20, 30, 40] and STEPS.ticks(1, 3) == [1, 2, 3] and STEPS.ticks(7, 7) == [7]
    assert [TIME.show(value) for value in TIME.ticks(0, 437)] == ["0 s", "2m00s", "4m00s", "6m00s"]
    assert [TIME.show(value) for value in TIME.ticks(0, 3.97)] == ["0 s", "1 s", "2 s", "3 s"]


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


@needs_chromium
def test_a_faulty_page_is_found(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><meta charset=utf-8><style>@media (prefers-color-scheme: dark) { i { color: #eee } }</style>"
        "<body style='background:#fff'><p style='color:#bbb'>pale</p><i>gone in the dark</i>"
        "<div style='width:60px;overflow:hidden;white-space:nowrap'>cut off at its right</div>"
    )
    faults = page_check.faults_of(bad)
    text = " ".join(faults)
    assert all("dark:" in fault for fault in faults if "gone" in fault) and "gone in the dark" in text
    assert "contrast" in text and "pale" in text and "clipped: cut off" in text


SEEN_BY = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopes": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "protanopes": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
}
"""Linear red, green and blue as readers see them (Machado, Oliveira and Fernandes 2009, severity 1)."""


def linear(colour: str, reader: str = "all") -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    plain = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return [min(1.0, max(0.0, sum(a * b for a, b in zip(row, plain, strict=True)))) for row in SEEN_BY[reader]]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, reader: str) -> tuple[float, float, float]:
    red, green, blue = linear(colour, reader)
    x, y, z = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_kinds_of_work_are_told_apart_by_every_reader() -> None:
    """On white and on dark pages (3:1), in grey (1.3:1 to each other), and by who sees red and green alike."""
    for colour in WORK_COLOURS.values():
        assert contrast(colour, "#ffffff") >= 3 and contrast(colour, "#14171a") >= 3
    for one, other in itertools.combinations(WORK_COLOURS.values(), 2):
        assert contrast(one, other) >= 1.3
        for reader in SEEN_BY:
            assert math.dist(lab(one, reader), lab(other, reader)) >= 40, (one, other, reader)
