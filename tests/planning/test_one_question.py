"""A run reads its model's folder once and asks the planner's question once: calls are counted in a run of two steps."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.model.files.untrusted import check_model_folder, read_config, read_json
from roundpipe_cli.planning.question import ask
from roundpipe_cli.planning.token_budget import for_processors
from roundpipe_cli.planning.unpacking import choose_unpacking
from roundpipe_cli.planning.verdict import judge, judge_coarsest
from tests.support.e2e import launch, make_workspace

COUNTED = (
    *(ask, analytic_costs, for_processors, choose_unpacking, judge, judge_coarsest),
    *(read_config, read_json, check_model_folder),
)
LOG = "calls.log"


def write_down_calls(functions: tuple[Any, ...]) -> None:
    """Append the name of each of these functions to `LOG` whenever the main thread calls it, by whatever name."""
    names = {function.__code__: function.__name__ for function in functions}
    log = Path(LOG).absolute().open("a", buffering=1, encoding="utf-8")

    def see(frame: FrameType, event: str, value: object) -> None:
        if event == "call" and frame.f_code in names:
            log.write(f"{names[frame.f_code]}\n")

    sys.setprofile(see)


def calls(folder: Path, *words: str) -> Counter[str]:
    launch(folder, *words, before=functools.partial(write_down_calls, COUNTED)).finish().expect(0)
    return Counter((folder / LOG).read_text(encoding="utf-8").split())


def test_a_run_tries_each_candidate_once(two_blocks: Path, tmp_path: Path) -> None:
    """It asked three times, made the costs eight times and read config.json ten times."""
    auto = {"micro_batch_size": None, "micro_batch_tokens": "auto", "packing": "auto", "load_in_fp8": True}
    folder = make_workspace(tmp_path / "work", two_blocks, max_steps=2, gradient_accumulation_steps=10, **auto)
    found = calls(folder, "finetune", "recipe.yaml")
    assert found["ask"] == 1 and found["check_model_folder"] == 1 and found["read_config"] == 2
    assert found["for_processors"] == 1 and found["choose_unpacking"] == 3, "for the tokens, the run and the report"
    assert found["analytic_costs"] <= 8, "two each, unpacked once or not, and those of the two steps' own rows"


def test_plan_and_bench_ask_once(two_blocks: Path, tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "work", two_blocks)
    for command in ("plan", "bench"):
        found = calls(folder, command, "recipe.yaml")
        (folder / LOG).unlink()
        assert found["ask"] == 1 and found["check_model_folder"] == 1, command
