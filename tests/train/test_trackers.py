"""report_to: TensorBoard's files hold what metrics.jsonl holds, and a tracker that fails or hangs costs one line."""

from __future__ import annotations

import importlib.util
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.events import Event, Notice
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.monitor import trackers
from roundpipe_cli.train.monitor.trackers import TRACKERS, RunInfo, Trackers
from tests.support.e2e import STAGES_OF_TWO, finetune, make_model, make_workspace, metrics, numbers
from tests.train.test_finetune_output import STEP

SECRET = "canary-4711-secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {item.step: item.value for item in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_metrics_of_every_step(tmp_path: Path, model: Path) -> None:
    """Also of a run that was killed and resumed; and no secret is in its files."""
    changes = {"report_to": ["tensorboard"], "val_set_size": 2, "num_train_epochs": 3, **STAGES_OF_TWO}
    folder = make_workspace(tmp_path / "work", model, **changes)
    environment = {"HF_TOKEN": SECRET}
    keys = f"lora.target_modules=.*(q_proj|{SECRET})"
    fault = "optimizer:slow=2:step=4,optimizer:kill:step=5"  # a busy machine has imported the tracker by then
    died = finetune(folder, keys, environment={**environment, "ROUNDPIPE_FAULT": fault})
    assert died.code == -9
    finetune(folder, keys, "--resume", environment=environment).expect(0)
    files = [path.read_bytes() for path in (folder / "out" / "tensorboard").iterdir()]
    assert all(SECRET.encode() not in content for content in files) and any(b"q_proj" in content for content in files)
    seen = scalars(folder / "out" / "tensorboard")
    rows = metrics(folder / "out")
    for name in ("loss", "learning_rate", "grad_norm", "tokens"):
        assert seen[f"train/{name}"] == pytest.approx({row["step"]: row[name] for row in rows}, rel=1e-6)
    evaluation = json.loads((folder / "out" / "eval.jsonl").read_text().splitlines()[-1])
    assert seen["eval/loss"] == pytest.approx({evaluation["step"]: evaluation["loss"]}, rel=1e-6)
    finetune(folder, keys, "report_to=[]", "output_dir=without").expect(0)
    assert numbers(folder / "without") == numbers(folder / "out")


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_missing_package_is_told_before_anything_loads(name: str, tmp_path: Path, model: Path) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    folder = make_workspace(tmp_path / "work", model)
    done = finetune(folder, f"report_to=[{name}]").expect(2)
    assert f"pip install {name}" in done.err and "loading torch" not in done.err
    assert not (folder / "out").exists()


# --- trackers that do not behave ------------------------------------------------------------------------------------


class Stub:
    """A tracker of the test's making: there is no way to make a real one fail on demand."""

    def __init__(self, run: RunInfo) -> None:
        self.run_id = "stub-1"
        self.config = dict(run.config)
        self.rows: list[tuple[int, Any]] = []

    def log(self, step: int, values: Any) -> None:
        self.rows.append((step, values))

    def close(self) -> None:
        pass


def recipe_of(tmp_path: Path, text: str = "") -> Recipe:
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: some/model\ndatasets: [{{path: rows.jsonl}}]\nreport_to: [wandb]\n{text}")
    return load_recipe(file).recipe


def run(tmp_path: Path, recipe: Recipe, flush_s: float = 10.0, num_steps: int = 3) -> list[Event]:
    told: list[Event] = []
    with Trackers(recipe, tmp_path, 0, told.append, flush_s=flush_s) as tell:
        for step in range(1, num_steps + 1):
            tell(replace(STEP, step=step))
    return told


def notices(told: list[Event]) -> list[str]:
    return [event.text for event in told if isinstance(event, Notice)]


def test_numbers_and_recipe_arrive_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    made: list[Stub] = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda info: made.append(Stub(info)) or made[0])
    told = run(tmp_path, recipe_of(tmp_path, f"revision: branch-{SECRET}\n"))
    assert len(told) == 3 and [step for step, _ in made[0].rows] == [1, 2, 3]
    assert made[0].rows[0][1]["train/loss"] == STEP.loss
    assert made[0].config["lora.r"] == 16 and SECRET not in json.dumps(made[0].config)
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "stub-1"}


@pytest.mark.parametrize("where", ["init", "log", "close"])
def test_a_tracker_that_fails_costs_one_line(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)

    class Failing(Stub):
        def __init__(self, info: RunInfo) -> None:
            super().__init__(info)
            self._fail("init")

        def _fail(self, place: str) -> None:
            if place == where:
                raise SystemExit(f"no network for {SECRET}")

        def log(self, step: int, values: Any) -> None:
            self._fail("log")

        def close(self) -> None:
            self._fail("close")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Failing)
    told = run(tmp_path, recipe_of(tmp_path))
    assert len(notices(told)) == 1 and "the run continues: SystemExit: no network for ***" in notices(told)[0]


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Hanging(Stub):
        def log(self, step: int, values: Any) -> None:
            release.wait(60)

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Hanging)
    monkeypatch.setattr(trackers, "MAX_WAITING", 5)
    told = run(tmp_path, recipe_of(tmp_path), flush_s=0.1, num_steps=50)
    release.set()
    assert len(told) - len(notices(told)) == 50
    slow, left = notices(told)
    assert "too slow" in slow and ("left behind" in left)
