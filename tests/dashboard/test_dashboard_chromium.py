"""Pages and pictures as a browser draws them: nothing clipped, enough contrast, narrow and wide, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundpipe_cli.dashboard.demo import demo_events, shared_picture
from roundpipe_cli.dashboard.html import page
from roundpipe_cli.dashboard.state import fold_all
from scripts import page_check
from tests.support.recorded import START_S, recorded_run, simulated_run

pytestmark = pytest.mark.skipif(page_check.chromium() is None, reason="needs chromium")
REPORT = {
    "predicted": {"step_s": 7.2, "tokens_per_s": 2300.0, "bubble_ratio": 0.05},
    "measured": {"step_s": 7.6, "tokens_per_s": 2158.0, "bubble_ratio": 0.057},
}


def test_pages_and_pictures_are_read_at_every_size_and_in_both_colours(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page(recorded_run(8), REPORT, "model: m\n"), encoding="utf-8")
    simulated = fold_all(demo_events(simulated_run(8), 1, START_S))
    (tmp_path / "run.svg").write_text(shared_picture(simulated, where="a"), encoding="utf-8")
    assert [fault for name in ("report.html", "run.svg") for fault in page_check.faults_of(tmp_path / name)] == []


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
