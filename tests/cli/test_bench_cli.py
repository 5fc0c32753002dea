"""`roundpipe bench` on costs files: its JSON, its picture, its table, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from roundpipe_cli.choices import SCHEDULE_KINDS, SCHEDULES
from roundpipe_cli.cli.bench import bench
from roundpipe_cli.cli.bench_schedules import request_of
from roundpipe_cli.costs.cost import load_costs
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning import choose
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.solve import remedies
from roundpipe_cli.recipe.load import load_recipe
from tests.cli.test_terminal_text import call

APP = typer.Typer()
APP.command()(bench)


def costs_of(num_blocks: int = 6, **more: Any) -> dict[str, Any]:
    block = {"forward_s": 0.02, "backward_s": 0.04, "recompute": True, "param_bytes": 0, "boundary_bytes": 0}
    layers = [{"name": f"block.{index}", **block} for index in range(num_blocks)]
    layers.append({"name": "head", "forward_s": 0.03, "backward_s": 0.06, "recompute": False})
    return {"name": "small", "hop_s": 0.003, "layers": layers, **more}


def write(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def invoke(path: Path, *arguments: str, workers: int = 2, microbatches: int = 4) -> Result:
    counts = ["--workers", str(workers), "--microbatches", str(microbatches)]
    return CliRunner().invoke(APP, ["--costs", str(path), *counts, *arguments])


def results_of(path: Path, *arguments: str, **counts: int) -> list[dict[str, Any]]:
    done = invoke(path, *arguments, "--json", **counts)
    assert done.exit_code == 0, done.exception
    return json.loads(done.stdout)["results"]  # type: ignore[no-any-return]


def refusal(done: Result) -> str:
    assert isinstance(done.exception, RefusedError), done.exception
    assert done.exception.exit_code == 2
    return str(done.exception)


def test_json_has_the_documented_keys_and_parts_that_sum_to_the_bubble(tmp_path: Path) -> None:
    path = write(tmp_path, costs_of())
    done = invoke(path, "--json")
    document = json.loads(done.stdout)
    assert list(document) == ["workers", "microbatches", "results", "summary", "remedy"]
    assert (document["workers"], document["microbatches"]) == (2, 4)
    names = [result["schedule"] for result in document["results"]]
    assert names == list(SCHEDULES)
    for result in document["results"]:
        assert list(result) == [
            *("schedule", "round", "makespan_s", "bubble_ratio", "fill", "switch", "drain", "steady", "step_s"),
            *("forward_stages", "backward_stages"),
        ]
        parts = [result[part] for part in ("fill", "switch", "drain", "steady")]
        assert sum(parts) == pytest.approx(result["bubble_ratio"])
        assert min(parts) >= 0
        assert result["step_s"] >= result["makespan_s"]


def test_time_per_step_over_chained_steps(tmp_path: Path) -> None:
    words = write(tmp_path, costs_of()), "--schedule", "roundpipe"
    (one,), (barrier,), (chained,) = (
        results_of(*words, *more) for more in ([], ["--steps", "4"], ["--steps", "4", "--staleness", "1"])
    )
    assert barrier["makespan_s"] == one["makespan_s"]
    assert barrier["step_s"] == pytest.approx(one["makespan_s"])
    assert chained["step_s"] < one["makespan_s"]


def test_table_and_picture(tmp_path: Path) -> None:
    path = write(tmp_path, costs_of())
    done = invoke(path, "--svg", str(tmp_path / "picture.svg"))
    assert done.exit_code == 0, done.exception
    for name in SCHEDULES:
        assert name in done.stdout
    assert "full search" in " ".join(done.stdout.split())
    root = xml.etree.ElementTree.parse(tmp_path / "picture.svg").getroot()
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum("bubble" in text for text in texts) == len(SCHEDULES)
    assert "cannot write picture.svg" in refusal(invoke(path, "--svg", str(tmp_path / "no" / "picture.svg")))


def test_switches_of_the_planner_are_recipe_keys() -> None:
    """Of any section: an option that only looks like a key of recipes is answered by the key's whole name."""
    for option, key in (("--head-workers=4", "pipeline.head_workers=4"), ("--dispatch", "pipeline.dispatch=VALUE")):
        code, _, text = call("bench", "qwen3-8b", option)
        assert code == 2 and f"roundpipe bench has no option {option.partition('=')[0]}" in text
        assert text.endswith(f"keys of the recipe are written without dashes: {key}\n")


def test_workers_without_work_are_told(tmp_path: Path) -> None:
    done = invoke(write(tmp_path, costs_of(2)), "--schedule", "gpipe", "--schedule", "roundpipe", workers=12)
    assert done.exit_code == 0, "a machine may have more workers than a model has layers"
    assert "9 of 12 workers have nothing to do, with 3 layers and 4 microbatches: gpipe" in done.stderr
    assert "microbatches: roundpipe" in " ".join(done.stderr.split()), "each is named once"
    assert "note" not in invoke(write(tmp_path, costs_of())).stderr


def test_what_a_step_leaves_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A step of `bench` took three quarters of that of `plan`, and nothing said why."""
    request_of("preferences", [], "1x3090")
    assert "note: without the base model's forward" in capsys.readouterr().err


def test_refused_counts(tmp_path: Path) -> None:
    path = write(tmp_path, costs_of())
    assert "--workers must be at least 1" in refusal(invoke(path, workers=0))
    assert "--microbatches must be at least 1" in refusal(invoke(path, microbatches=-1))
    for flag, count in (
        *(("--workers", 10**6), ("--microbatches", 10**7), ("--steps", 10**9)),
    ):  # were simulated for hours
        assert f"{flag} is too large to simulate" in refusal(invoke(path, flag, str(count)))
    speeds = write(tmp_path, costs_of(worker_speed=[1.0, 0.5, 0.5]))
    assert "worker_speed does not name every worker" in refusal(invoke(speeds))


LAYER = {"name": "block", "forward_s": 1.0, "backward_s": 1.0}


def with_layer(*without: str, **values: Any) -> dict[str, Any]:
    """Costs in whose layer 3 some keys are missing or have these values."""
    data = costs_of()
    layer = {**data["layers"][3], **values}
    data["layers"][3] = {key: value for key, value in layer.items() if key not in without}
    return data


REFUSED: list[tuple[Any, str]] = [
    (with_layer(forward_s=-0.1), "layers[3] (block.3): forward_s: negative"),
    (with_layer(forward_s="0.1"), "layers[3] (block.3): forward_s: not a number"),
    (with_layer(backward_s=10**400), "backward_s: not a number"),
    (with_layer(param_bytes=1.5), "param_bytes: not a whole number"),
    (with_layer(recompute="yes"), "recompute is not true or false"),
    *((with_layer(forward=1), "did you mean forward_s?"), (with_layer(name="embed"), "a layer out of place")),
    (with_layer(recompute_skippable_s=1.0), "more is skipped than recomputed"),
    (with_layer("forward_s"), "layers[3] (block.3): forward_s missing"),
    (costs_of(link_bytes_per_s=0), "link_bytes_per_s: zero"),
    (costs_of(worker_speed=[1.0, -1]), "worker_speed[1]: negative"),
    (costs_of(layers=[]), "no layers"),
    (costs_of(layers=costs_of()["layers"][:2]), "the last layer is not the head"),
    (costs_of(layers=[{"name": "head", "forward_s": 0, "backward_s": 0}]), "no layer takes any time"),
    (costs_of(layers=[{**LAYER, "name": "head"}, LAYER]), "a layer out of place"),
    *((costs_of(layers=[LAYER, 3]), "not a layer"), ({"layer": [LAYER]}, "did you mean layers")),
    (costs_of(name=3), ": not a name"),
    (costs_of(layers=[{**LAYER, "name": 3}]), "layers[0]: not a name"),
    *((costs_of(worker_speed=3), "not a list of speeds"), (costs_of(worker_speed=[]), "a list of speeds")),
    (costs_of(layers=[{"name": "block"}]), "forward_s, backward_s missing"),
    *(([], "not a costs file"), ('{"name": "a", "name": "b"}', "key 'name' is there twice")),
    ('{"hop_s": NaN, "layers": [{"name": "head", "forward_s": 1, "backward_s": 1}]}', "hop_s: not a number"),
]


def test_refused_costs_name_file_and_layer(tmp_path: Path) -> None:
    for data, message in REFUSED:
        path = write(tmp_path, data)
        text = refusal(invoke(path))
        assert message in text and str(path) in text, (message, text)
    mistakes = with_layer(forward_s=-1, backward_s=-1)
    mistakes["slots"] = 0.5
    with pytest.raises(RefusedError) as raised:
        load_costs(write(tmp_path, mistakes))
    assert len(raised.value.problems) == 3, "all at once"


def test_optional_keys_are_read(tmp_path: Path) -> None:
    data = costs_of(link_bytes_per_s=5e9, device_memory_bytes=None, slots=3, worker_speed=[1, 0.5])
    data["layers"].insert(0, {"name": "embed", "forward_s": 0, "backward_s": 0, "boundary_bytes": 64})
    data["layers"][1].update(grad_bytes=7, optimizer_s=0.5, activation_bytes=9, recompute_skippable_s=0.01)
    costs = load_costs(write(tmp_path, data))
    assert (costs.name, costs.hop_s, costs.link_bytes_per_s, costs.slots) == ("small", 0.003, 5e9, 3)
    assert costs.worker_speed == (1.0, 0.5)
    block = costs.layers[1]
    assert (block.grad_bytes, block.optimizer_s, block.activation_bytes) == (7, 0.5, 9)
    assert block.recompute_skippable_s == 0.01
    assert (costs.layers[0].recompute, costs.layers[-1].recompute) == (True, False)


def test_it_ends_with_the_sentence_to_copy_and_the_remedy_of_plan(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # even cuts do
    path = write(tmp_path, costs_of())
    document = json.loads(invoke(path, "--json").stdout)
    seconds = {row["step_s"]: SCHEDULE_KINDS[row["schedule"]].label for row in document["results"]}
    first, second = sorted(row["step_s"] for row in document["results"])[:2]
    assert document["summary"] == f"{seconds[first]} is {second / first:.2f} times as fast as {seconds[second]}"
    assert invoke(path).stdout.splitlines()[-1] == f"{document['summary']} (simulated)."
    assert "times as fast" not in invoke(path, "--schedule", "gpipe").stdout
    large = ["qwen3-8b", "--hardware", "2x3090", "method=full", "pipeline.keep_activations=12", "--json"]
    done = CliRunner().invoke(APP, [*large, "--schedule", "looped_bfs", "--schedule", "roundpipe"])
    document = json.loads(done.stdout)
    assert min(document["results"], key=lambda row: row["step_s"])["schedule"] == "looped_bfs"
    assert "note: looped_bfs does not fit" in done.stderr and not document["summary"]
    words = ["qwen3-8b", "--hardware", "2x4060,host_memory_gib=16", "--schedule", "roundpipe"]
    slow = CliRunner().invoke(APP, [*words, "--json"])
    (remedy, *_) = remedies(make_plan(load_recipe("qwen3-8b"), "2x4060,host_memory_gib=16"))
    assert json.loads(slow.stdout)["remedy"] == remedy.what
