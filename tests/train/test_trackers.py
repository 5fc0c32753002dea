"""report_to: TensorBoard's files hold what metrics.jsonl holds, and a tracker that fails or hangs costs one line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.events import Event, Notice
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.monitor import trackers
from roundpipe_cli.train.monitor.trackers import TRACKERS, RunInfo, TrackerRun, Trackers
from tests.support.e2e import STAGES_OF_TWO, finetune, launch, make_workspace, metrics, numbers
from tests.train.test_finetune_output import STEP

SECRET = "canary-4711-secret"


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.directory_watcher import DirectoryDeletedError
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    with contextlib.suppress(DirectoryDeletedError):  # it is not there yet
        events.Reload()
    return {tag: {item.step: item.value for item in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_metrics_of_every_step(tmp_path: Path, two_blocks: Path) -> None:
    """Also of a run that was killed and resumed; and no secret is in its files."""
    changes = {"report_to": ["tensorboard"], "val_set_size": 2, "num_train_epochs": 3, **STAGES_OF_TWO}
    folder = make_workspace(tmp_path / "work", two_blocks, **changes)
    environment = {"HF_TOKEN": SECRET}
    keys = f"lora.target_modules=.*(q_proj|{SECRET})"
    hanging = {**environment, "ROUNDPIPE_FAULT": "optimizer:slow=60:step=5"}
    running = launch(folder, "finetune", "recipe.yaml", keys, environment=hanging)
    running.wait_for_steps(5)
    running.wait_until(lambda: 5 in scalars(folder / "out" / "tensorboard").get("train/loss", ()))
    running.kill()
    assert running.finish().code == -9
    finetune(folder, keys, "--resume", environment=environment).expect(0)
    files = [path.read_bytes() for path in (folder / "out" / "tensorboard").iterdir()]
    assert all(SECRET.encode() not in content for content in files) and any(b"q_proj" in content for content in files)
    seen = scalars(folder / "out" / "tensorboard")
    rows = metrics(folder / "out")
    for name in ("loss", "learning_rate", "grad_norm", "tokens", "tokens_per_s", "step_s", "bubble_ratio"):
        assert seen[f"train/{name}"] == pytest.approx({row["step"]: row[name] for row in rows}, rel=1e-6)
    evaluation = json.loads((folder / "out" / "eval.jsonl").read_text().splitlines()[-1])
    for name in ("loss", "tokens", "seconds", "perplexity"):
        assert seen[f"eval/{name}"] == pytest.approx({evaluation["step"]: evaluation[name]}, rel=1e-6)
    finetune(folder, keys, "report_to=[]", "output_dir=without").expect(0)
    assert numbers(folder / "without") == numbers(folder / "out")


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_missing_package_is_told_before_anything_loads(name: str, folder: Path) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    done = finetune(folder, f"report_to=[{name}]").expect(2)
    assert f"pip install {name}" in done.err and "loading torch" not in done.err
    assert not (folder / "out").exists()


# --- trackers that do not behave ------------------------------------------------------------------------------------


def run(tmp_path: Path, patch: pytest.MonkeyPatch, flush_s: float = 10.0, num_steps: int = 3, **parts: Any) -> Any:
    """Events of a run, and the settings that a tracker of the test's making was given: there is no way to make a real
    one fail on demand. `parts`: its `init`, `log` and `close`."""
    patch.setenv("WANDB_API_KEY", SECRET)
    told, given = list[Event](), list[RunInfo]()

    def begin(info: RunInfo) -> TrackerRun:
        given.append(info)
        parts.get("init", print)()
        return TrackerRun("stub-1", parts.get("log", print), parts.get("close", print))

    patch.setitem(trackers.TRACKERS, "wandb", begin)
    file = tmp_path / "mine.yaml"
    keys = f"report_to: [wandb]\nrevision: branch-{SECRET}\n"
    file.write_text(f"model: some/model\ndatasets: [{{path: rows.jsonl}}]\n{keys}")
    with Trackers(load_recipe(file).recipe, tmp_path, 0, told.append, flush_s=flush_s) as tell:
        for step in range(1, num_steps + 1):
            tell(replace(STEP, step=step))
    return told, given


def notices(told: list[Event]) -> list[str]:
    return [event.text for event in told if isinstance(event, Notice)]


def test_numbers_and_recipe_arrive_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []
    told, (info,) = run(tmp_path, monkeypatch, log=lambda *row: rows.append(row))
    assert len(told) == 3 and [step for step, _ in rows] == [1, 2, 3]
    assert rows[0][1]["train/loss"] == STEP.loss
    assert info.config["lora.r"] == 16 and SECRET not in json.dumps(info.config)
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "stub-1"}


@pytest.mark.parametrize("where", ["init", "log", "close"])
def test_a_tracker_that_fails_costs_one_line(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SystemExit(f"no network for {SECRET}")

    (notice,) = notices(run(tmp_path, monkeypatch, **{where: fail})[0])
    assert "the run continues: SystemExit: no network for ***" in notice


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(trackers, "MAX_WAITING", 5)
    told, _ = run(tmp_path, monkeypatch, flush_s=0.1, num_steps=50, log=lambda *_: release.wait(60))
    release.set()
    assert len(told) - len(notices(told)) == 50
    slow, left = notices(told)
    assert "too slow" in slow and ("left behind" in left)
