"""`roundpipe bench`: each option of roundpipe's dispatch and recompute switched on, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roundpipe_cli.costs.cost import load_costs
from roundpipe_cli.planning.choose import choose, dealt_cut
from roundpipe_cli.planning.compare import SimulationCase, run
from roundpipe_cli.schedule.dealing import Options
from tests.cli.test_bench_cli import APP, costs_of, invoke, refusal, results_of, write

STAGES = [
    *("--forward-stages", "[[0, 1], [2, 3], [4, 5]]"),
    *("--backward-stages", "[[6, 6], [4, 5], [2, 3], [0, 1]]"),
]


def loaded(**head: Any) -> dict[str, Any]:
    """Six blocks whose recompute may leave out a fifth, and a heavy head."""
    data = costs_of()
    for layer in data["layers"][:-1]:
        layer["recompute_skippable_s"] = 0.004
    data["layers"][-1].update({"forward_s": 0.06, "backward_s": 0.12, **head})
    return data


def makespan_s(path: Path, *flags: str, stages: list[str] | None = None, workers: int = 4) -> float:
    given = STAGES if stages is None else stages
    (result,) = results_of(path, "--schedule", "roundpipe", *given, *flags, workers=workers, microbatches=8)
    return float(result["makespan_s"])


@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        (4, ["--head-workers", "4"]),
        (4, ["--earliest-free"]),
        (2, ["--skip-projection"]),
        (2, ["--keep-activations", "6"]),
        (4, ["--earliest-free", "--skip-projection", "--keep-activations", "1"]),
    ],
)
def test_each_option_makes_a_step_faster(tmp_path: Path, workers: int, flags: list[str]) -> None:
    """The head binds four workers, which is what dispatch helps against; recompute binds two."""
    path = write(tmp_path, loaded())
    for stages in (STAGES, []):  # given and planned
        plain_s = makespan_s(path, stages=stages, workers=workers)
        assert makespan_s(path, *flags, stages=stages, workers=workers) < plain_s


def test_skipping_saves_exactly_the_recompute_that_is_left_out_on_one_worker(tmp_path: Path) -> None:
    path = write(tmp_path, loaded())
    spans = [
        results_of(path, "--schedule", "roundpipe", *STAGES, *flags, workers=1)[0]["makespan_s"]
        for flags in ([], ["--skip-projection"], ["--keep-activations", "2"], ["--keep-activations", "6"])
    ]
    saved = [spans[0] - span for span in spans[1:]]
    assert saved == pytest.approx([4 * 6 * 0.004, 4 * 2 * 0.02, 4 * 6 * 0.02])


def test_all_off_is_as_without_flags(tmp_path: Path) -> None:
    path = write(tmp_path, loaded())
    off = ["--head-workers", "1", "--keep-activations", "0"]
    assert invoke(path, *off, "--json").stdout == invoke(path, "--json").stdout


def test_the_bound_schedules_beside_it_stay_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, loaded())
    plain, changed = results_of(path), results_of(path, "--earliest-free", "--skip-projection")
    assert plain[1:] == changed[1:]
    assert changed[0]["makespan_s"] < plain[0]["makespan_s"]
    assert "roundpipe with --earliest-free" in " ".join(invoke(path, "--earliest-free").stdout.split())


@pytest.mark.parametrize("accounting", ["default", "published"])
@pytest.mark.parametrize("options", [Options(head_workers=2), Options(earliest_free=True)])
def test_stages_are_never_worse_than_the_planners(tmp_path: Path, accounting: Any, options: Options) -> None:
    question = SimulationCase(load_costs(write(tmp_path, loaded())), 3, 6, accounting=accounting)
    planned = choose("roundpipe", question)
    asked = SimulationCase(question.costs, 3, 6, accounting=accounting, options=options)
    chosen = dealt_cut(planned, asked)
    assert run("roundpipe", chosen, asked).makespan_s <= run("roundpipe", planned, asked).makespan_s


def test_even_stages_that_do_not_fit_are_not_taken(tmp_path: Path) -> None:
    data = loaded()
    for layer in data["layers"]:
        layer.update(param_bytes=100, activation_bytes=50)
    peaks = []
    for limit in (None, 500):
        costs = load_costs(write(tmp_path, {**data, "device_memory_bytes": limit}))
        question = SimulationCase(costs, 2, 4, options=Options(earliest_free=True))
        chosen = choose("roundpipe", question)
        peaks.append(max(run("roundpipe", chosen, question).timeline.device_peak_bytes))
    assert peaks[1] <= 500 < peaks[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-workers", "3"], "--head-workers does not suit the workers"),
        (["--head-workers", "9"], "expected: 1 to 2"),
        (["--earliest-free", "--head-workers", "2"], "--earliest-free deals out each microbatch separately"),
        (["--keep-activations", "7"], "expected: 0 to 6"),
        (["--skip-projection"], "nothing in the recompute can be left out"),
        (["--schedule", "gpipe", "--head-workers", "2"], "--head-workers 2: only roundpipe has this"),
        (["--schedule", "gpipe", "--schedule", "roundpipe", "--earliest-free"], "also gpipe"),
        (["--forward-stages", "[[0, 2], [3, 6]]", "--keep-activations", "1"], "only roundpipe has this"),
    ],
)
def test_refused_options(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in refusal(invoke(write(tmp_path, costs_of()), *arguments))


def test_options_are_refused_where_a_recipe_is_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, ["recipe.yaml", "--run", "--earliest-free"])
    assert "not yet supported: --earliest-free with --run" in refusal(done)


@pytest.mark.parametrize("arguments", [["--head-workers", "0"], ["--keep-activations", "-1"]])
def test_counts_below_the_least_are_usage_errors(tmp_path: Path, arguments: list[str]) -> None:
    assert invoke(write(tmp_path, costs_of()), *arguments).exit_code == 2
