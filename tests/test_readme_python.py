"""The Python of "From Python" in roundpipe_cli/README.md runs as it stands there."""

from __future__ import annotations

import sys
import textwrap
from functools import partial
from pathlib import Path

from tests.support.e2e import launch, make_model, make_workspace

README = Path(__file__).resolve().parents[1] / "roundpipe_cli" / "README.md"


def run_python(code: str) -> None:
    exec(code, {"__name__": "__main__"})
    sys.exit()


def test_from_python(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8").partition("## From Python")[2].partition("\nA finished run")[0]
    code = textwrap.dedent("\n".join(line for line in text.splitlines() if line.startswith("    ") or not line.strip()))
    folder = make_workspace(tmp_path / "work", make_model(tmp_path / "made"))
    (folder / "recipe.yaml").rename(folder / "first.yaml")
    done = launch(folder, before=partial(run_python, code)).finish().expect(0)
    steps = [line.split() for line in done.out.splitlines() if line[:1].isdigit()]
    losses = [float(loss) for _, loss, _ in steps]
    assert [step for step, _, _ in steps] == ["0", "1", "2"]
    assert len(set(losses)) == 3 and all(0 < loss < 20 for loss in losses), "it trains"
