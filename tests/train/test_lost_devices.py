"""Devices that fail or hang in the middle of a run: the others compute the step again, and every bit is as without."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roundpipe_cli import faults
from roundpipe_cli.engine.dispatch import dispatch
from roundpipe_cli.errors import DeviceLostError, InternalError
from roundpipe_cli.events import DeviceLost, Event, Notice
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.checkpoint.reading import load_newest
from roundpipe_cli.train.finetune import run_finetune
from roundpipe_cli.train.signals import Reporting, Start, StopSignals
from tests.support.e2e import make_model, make_workspace, metrics, run
from tests.torture.workers import copy_weights

THREE = "pipeline.devices=[cpu,cpu,cpu]"
CUT = ("pipeline.forward_stages=[[0,1],[2,2]]", "pipeline.backward_stages=[[3,3],[2,2],[0,1]]")
"""Stages of which every worker gets some, so that every fault is met."""
Finetune = Callable[..., list[Event]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model", num_hidden_layers=2)


@pytest.fixture
def finetune(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Finetune]:
    """A run in this process with a fault, on three workers that copy as GPUs do; its events."""
    monkeypatch.setenv("ROUNDPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(make_workspace(tmp_path / "work", model))
    from roundpipe_cli.train.prepare import devices

    monkeypatch.setattr(devices, "CpuBackend", devices.CpuBackend)  # put back at the end
    copy_weights()

    def run(
        output: str, *words: str, fault: str = "", tell: Callable[[Event], None] = lambda event: None
    ) -> list[Event]:
        told: list[Event] = []

        def note(event: Event) -> None:
            told.append(event)
            tell(event)

        monkeypatch.setenv(faults.ENVIRONMENT_VARIABLE, fault)
        faults.load_faults()
        loaded = load_recipe("recipe.yaml", (f"output_dir={output}", THREE, *CUT, *words))
        with warnings.catch_warnings(), StopSignals() as signals:
            warnings.simplefilter("ignore")  # PEFT's, when it saves
            run_finetune(loaded, Start(offline=True), Reporting(note), signals)
        return told

    yield run
    monkeypatch.undo()
    faults.load_faults()


def bits(output: str) -> list[object]:
    """Losses of all steps, the adapter, and the newest checkpoint's tensors."""
    folder = Path(output)
    newest = max(folder.glob("step-*"))
    tensors = [path.read_bytes() for path in sorted(newest.rglob("*.safetensors"))]
    return [[row["loss_hex"] for row in metrics(folder)], (folder / "adapter_model.safetensors").read_bytes(), *tensors]


def notices(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Notice))


def losses_of(events: list[Event]) -> list[DeviceLost]:
    return [event for event in events if isinstance(event, DeviceLost)]


def test_two_of_three_are_lost_and_no_bit_changes(finetune: Finetune) -> None:
    finetune("whole")
    fault = "compute:raise=DeviceFault:step=1:worker=2:nth=2,upload:raise=DeviceFault:step=4:worker=0:nth=1"
    events = finetune("lost", fault=fault)
    assert bits("lost") == bits("whole")
    first, second = losses_of(events)
    assert (first.worker, first.at, second.worker, second.at) == (2, "step 2", 0, "step 5")
    report = json.loads(Path("lost/report.json").read_text())
    assert [row["worker"] for row in report["lost_devices"]] == [2, 0]


def test_a_hang_is_left_behind(finetune: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LEAVE_S", 0.5)
    finetune("whole")
    for point in ("compute", "upload"):
        events = finetune(point, "watchdog_s=1", fault=f"{point}:hang:step=3:worker=1:nth=1")
        assert bits(point) == bits("whole")
        (lost,) = losses_of(events)
        assert (lost.worker, lost.at) == (1, "step 4") and "no progress" in lost.cause
        name = "worker-1" if point == "compute" else "up-1"
        assert f"1 thread of a device that hangs left behind: {name}" in notices(events)


@pytest.mark.parametrize(
    ("words", "fault", "reason", "rest"),
    [
        (["pipeline.devices=[cpu]"], "compute:raise=DeviceFault:step=3", "no other device is there", ()),
        (
            ["on_device_loss=stop"],
            "compute:raise=DeviceFault:step=3:worker=1:nth=1",
            "on_device_loss: stop",
            ("cpu",) * 2,
        ),
        (
            [],
            "compute:raise=DeviceFault:step=3:worker=1:nth=1,answer:raise=DeviceFault",
            "no device of this process answers",
            ("cpu",) * 2,
        ),
    ],
)
def test_what_cannot_go_on_ends_with_exit_code_5(
    finetune: Finetune, words: list[str], fault: str, reason: str, rest: tuple[str, ...]
) -> None:
    with pytest.raises(DeviceLostError, match=reason) as caught:
        finetune("lost", *words, fault=fault)
    assert caught.value.exit_code == 5 and caught.value.rest == rest
    checkpoint = load_newest(Path("lost"), None, lambda text: pytest.fail(text))
    assert checkpoint.step == 2


def test_restarts_finish_the_run_without_the_lost_devices(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that loses its devices becomes another one, twice; every step has one row."""
    work = make_workspace(tmp_path / "work", model)
    words = ("finetune", "recipe.yaml", THREE, *CUT)
    run(work, *words, "output_dir=whole").expect(0)
    faults_at = "compute:raise=DeviceFault:step=3:worker=2,compute:raise=DeviceFault:step=5:worker=1"
    environment = {faults.ENVIRONMENT_VARIABLE: faults_at}
    lost = (*words, "output_dir=lost", "on_device_loss=stop")
    done = run(work, *lost, "--restarts", "2", environment=environment).expect(0)
    assert done.err.count("starting again on cpu") == 2 and "starting again on cpu, cpu; 1 more restart" in done.err
    monkeypatch.chdir(work)
    assert bits("lost") == bits("whole")
    once = {**environment, faults.ENVIRONMENT_VARIABLE: "compute:raise=DeviceFault:step=3"}
    ended = run(work, *words, "output_dir=bug", "on_device_loss=stop", "--restarts", "2", environment=once).expect(1)
    assert "the same was lost on another device" in ended.err and ended.err.count("starting again") == 1


def test_the_same_on_another_device_is_a_bug(finetune: Finetune) -> None:
    with pytest.raises(InternalError, match="the same was lost on another device"):
        finetune("lost", fault="compute:raise=DeviceFault:step=3")


def test_a_device_that_does_not_answer_is_the_lost_one(finetune: Finetune) -> None:
    """The error of one device comes up on those that wait for it."""
    fault = "compute:raise=DeviceFault:step=3:worker=1:nth=1,answer:raise=DeviceFault:worker=2"
    (lost,) = losses_of(finetune("lost", fault=fault))
    assert lost.worker == 2 and lost.left == ("cpu", "cpu")
