"""Devices that fail or hang in the middle of a run: the others compute the step again, and every bit is as without."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli import faults
from roundpipe_cli.cache import cache_folder
from roundpipe_cli.cli.checks import _lost
from roundpipe_cli.cli.finetune import restarting
from roundpipe_cli.costs.lost_devices import note_lost_device
from roundpipe_cli.dashboard.html import comparison, timelines
from roundpipe_cli.dashboard.state import fold, fold_all
from roundpipe_cli.dashboard.theme import Theme
from roundpipe_cli.dashboard.views import Scene, details, workers_block
from roundpipe_cli.dashboard.waiting import longest_waiting
from roundpipe_cli.engine.backends.cuda import xid_in
from roundpipe_cli.errors import DeviceLostError, InternalError
from roundpipe_cli.events import (
    DeviceLost,
    EvaluationFinished,
    Event,
    Notice,
    RunStarted,
    Span,
    StepFinished,
    StepTimeline,
    decode,
    encode,
)
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.actions import equal_costs
from roundpipe_cli.train.checkpoint.reading import load_newest
from roundpipe_cli.train.finetune import run_finetune
from roundpipe_cli.train.prepare import devices
from roundpipe_cli.train.signals import Reporting, Start, StopSignals
from roundpipe_cli.units import counted
from tests.support.e2e import launch, make_workspace, metrics, run
from tests.support.simulated_cases import simulated
from tests.support.simulated_cuda import SMALL_CARD, Card, Simulation
from tests.torture.workers import copy_weights, lose_after_gradients, see_hangs_soon

THREE = "pipeline.devices=[cpu,cpu,cpu]"
CUT = ("pipeline.forward_stages=[[0,1],[2,2]]", "pipeline.backward_stages=[[3,3],[2,2],[0,1]]", "max_steps=4")
"""Stages of which every worker gets some, so that every fault is met."""
Finetune = Callable[..., list[Event]]
LOSS, HANG = "compute:raise=DeviceFault:step=3:worker=1:nth=1", "compute:hang:step=3:worker=1:nth=1"


def train(*words: str, tell: Callable[[Event], None], resume: bool = False) -> None:
    """`finetune` in this process and directory."""
    with warnings.catch_warnings(), StopSignals() as signals:
        warnings.simplefilter("ignore")  # PEFT's, when it saves
        run_finetune(load_recipe("recipe.yaml", words), Start(resume=resume, offline=True), Reporting(tell), signals)


@pytest.fixture
def finetune(two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], None]) -> Finetune:
    """A run in this process with a fault, on three workers that copy as GPUs do; its events."""
    monkeypatch.chdir(make_workspace(tmp_path / "work", two_blocks))
    monkeypatch.setattr(devices, "CpuBackend", devices.CpuBackend)  # put back at the end
    copy_weights()

    def run(output: str, *words: str, fault: str = "") -> list[Event]:
        told: list[Event] = []
        ask(fault)
        train(f"output_dir={output}", THREE, *CUT, *words, tell=told.append)
        return told

    return run


def bits(output: str) -> list[object]:
    """Losses of all steps, the adapter, and the newest checkpoint's tensors."""
    folder = Path(output)
    newest = max(folder.glob("step-*"))
    tensors = [path.read_bytes() for path in sorted(newest.rglob("*.safetensors"))]
    return [[row["loss_hex"] for row in metrics(folder)], (folder / "adapter_model.safetensors").read_bytes(), *tensors]


WHOLE: dict[tuple[str, ...], list[object]] = {}


def bits_of_whole(run: Callable[..., object], *words: str) -> list[object]:
    """`bits` of a run that loses nothing, made once by `run`."""
    if words not in WHOLE:
        run("whole", *words)
        WHOLE[words] = bits("whole")
    return WHOLE[words]


def notices(events: list[Event]) -> str:
    return "\n".join(event.text for event in events if isinstance(event, Notice))


def losses_of(events: list[Event]) -> list[DeviceLost]:
    return [event for event in events if isinstance(event, DeviceLost)]


def test_two_of_three_are_lost_and_no_bit_changes(finetune: Finetune) -> None:
    fault = "compute:raise=DeviceFault:step=1:worker=2:nth=2,upload:raise=DeviceFault:step=3:worker=0:nth=1"
    events = finetune("lost", fault=fault)
    assert bits("lost") == bits_of_whole(finetune)
    first, second = losses_of(events)
    assert (first.worker, first.at, second.worker, second.at) == (2, "step 2", 0, "step 4")
    report = json.loads(Path("lost/report.json").read_text())
    assert [row["worker"] for row in report["lost_devices"]] == [2, 0]


def test_a_hang_is_left_behind(finetune: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    for point, workers, names in (("compute", [1], "worker-1"), ("upload", [1, 2], "up-1, up-2")):
        see_hangs_soon(partial(monkeypatch.setattr, raising=False))
        fault = ",".join(f"{point}:hang:step=3:worker={worker}:nth=1" for worker in workers)
        events = finetune(point, fault=fault)
        assert bits(point) == bits_of_whole(finetune)
        assert [(lost.worker, lost.at) for lost in losses_of(events)] == [(worker, "step 4") for worker in workers]
        assert all("no progress" in lost.cause for lost in losses_of(events))
        left = f"{counted(len(workers), 'thread')} of a device that hangs left behind: {names}"
        assert left in notices(events)


def test_an_evaluation_goes_on_without_the_lost_device(finetune: Finetune) -> None:
    evaluates = ("val_set_size=2", "eval_steps=2")
    events = finetune("lost", *evaluates, fault="compute:raise=DeviceFault:step=2:nth=1")
    assert bits("lost") == bits_of_whole(finetune, *evaluates)
    assert [one.at for one in losses_of(events)] == ["a pass without training, after 2 steps"]
    found, want = (Path(name, "eval.jsonl").read_text().splitlines() for name in ("lost", "whole"))
    assert [json.loads(line)["loss"] for line in found] == [json.loads(line)["loss"] for line in want]


@pytest.mark.parametrize(
    ("words", "fault", "reason", "rest"),
    [
        (["pipeline.devices=[cpu]"], "compute:raise=DeviceFault:step=3", "no other device is left", ()),
        (["max_grad_norm=0"], HANG, "which the device that hangs may still begin", ("cpu",) * 2),
        ([], f"{LOSS},answer:raise=DeviceFault", "no device of this process answers", ("cpu",) * 2),
    ],
)
def test_what_cannot_go_on_ends_with_exit_code_5(
    finetune: Finetune, monkeypatch: Any, words: list[str], fault: str, reason: str, rest: tuple[str, ...]
) -> None:
    see_hangs_soon(partial(monkeypatch.setattr, raising=False))
    with pytest.raises(DeviceLostError, match=reason) as caught:
        finetune("lost", *words, fault=fault)
    assert caught.value.exit_code == 5 and caught.value.rest == rest
    checkpoint = load_newest(Path("lost"), None, lambda text: pytest.fail(text))
    assert checkpoint.step == 2


def test_a_step_whose_updates_have_begun_is_not_computed_again(finetune: Finetune, monkeypatch: Any) -> None:
    """Before they begin it is."""
    events = finetune("lost", "max_grad_norm=0", fault=LOSS)
    assert bits("lost") == bits_of_whole(finetune, "max_grad_norm=0") and len(losses_of(events)) == 1
    lose_after_gradients(3, monkeypatch.setattr)
    with pytest.raises(DeviceLostError, match="max_grad_norm: 0 updates layers before a step ends, and some") as caught:
        finetune("begun", "max_grad_norm=0")
    assert caught.value.exit_code == 5 and caught.value.rest == ("cpu", "cpu")
    assert load_newest(Path("begun"), None, lambda text: pytest.fail(text)).step == 2


def test_a_restart_goes_on_without_the_lost_device(finetune: Finetune, tmp_path: Path) -> None:
    """A process that loses its device, a hanging one too, becomes another one, as often as it may, and every step has
    one row. What the next device loses where that one did is a bug; what was saved goes on to the same bits."""
    words = ("recipe.yaml", THREE, *CUT, "output_dir=lost", "save_steps=1", "on_device_loss=stop")
    last = "compute:raise=DeviceFault:step=2:nth=5"  # of two forward and three backward operations
    lost = {faults.ENVIRONMENT_VARIABLE: f"compute:hang:step=2:worker=2:nth=1,{last}"}
    command = ("finetune", "--restarts=2", "--", *words)  # behind the dashes no word is an option
    running = launch(tmp_path / "work", *command, environment=lost, before=see_hangs_soon)
    running.wait_until(lambda: b"--restarts=1" in Path(f"/proc/{running.process.pid}/cmdline").read_bytes())
    done = running.finish().expect(1)
    assert "the run cannot go on: on_device_loss: stop" in done.err
    assert done.err.count("starting again on cpu, cpu; 1 more restart") == done.err.count("starting again") == 1
    assert "the same was lost on another device" in done.err
    lost = {faults.ENVIRONMENT_VARIABLE: "compute:raise=DeviceFault:step=3:worker=2:nth=1"}
    back = "--resume", "--restarts=1", "resume_from_checkpoint=lost/step-00000002"
    done = run(tmp_path / "work", "finetune", *words, *back, environment=lost).expect(0)
    assert re.findall(r"resuming after step (\d)", done.err) == ["2", "3"], "from the newest, wherever it began"
    assert bits("lost") == bits_of_whole(finetune)


def test_without_another_device_nothing_starts_again() -> None:
    with pytest.raises(DeviceLostError), restarting("no-recipe.yaml", (), 2):
        raise DeviceLostError("no other device is left")


def test_the_same_on_another_device_is_a_bug(finetune: Finetune) -> None:
    with pytest.raises(InternalError, match="the same was lost on another device"):
        finetune("lost", fault="compute:raise=DeviceFault:step=3")


def test_a_device_that_does_not_answer_is_the_lost_one(finetune: Finetune) -> None:
    """The error of one device comes up on those that wait for it."""
    (lost,) = losses_of(finetune("lost", fault=f"{LOSS},answer:raise=DeviceFault:worker=2"))
    assert lost.worker == 2 and lost.left == ("cpu", "cpu")


# On simulated cards, whose driver raises for every call, or whose streams never end.

ON_CARDS = "pipeline.devices=[cuda:0,cuda:1,cuda:2]"
THREE_CARDS = (Card(), SMALL_CARD, Card())


CARD_STEPS = ("dtype=float32", "max_steps=2", "save_steps=1", "check_longest_rows=false")


def on_cards(
    output: str, *words: str, how: str = "", seed: int = 0, breaks: Callable[[], None] = lambda: None
) -> tuple[list[Event], Simulation]:
    """A run on three simulated cards, one of which breaks in the second step; its events."""
    told: list[Event] = []

    def tell(event: Event) -> None:
        told.append(event)
        streams = simulation.machine.streams
        if isinstance(event, StepFinished) and event.step == 1 and how:

            def break_it(device: int) -> None:
                getattr(streams, how)(device)
                breaks()

            streams.break_after(1, 40 + 29 * seed, break_it)

    with simulated(seed, THREE_CARDS) as simulation:
        train(f"output_dir={output}", ON_CARDS, *CUT, *words, tell=tell)
    return told, simulation


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, 2))])
def test_a_card_whose_driver_fails(finetune: Finetune, seed: int) -> None:
    """Whatever it was at. No access is unordered afterwards, and nothing is freed on it: that would end the process."""
    events, simulation = on_cards("lost", *CARD_STEPS, how="fail", seed=seed)
    assert bits("lost") == bits_of_whole(on_cards, *CARD_STEPS)
    (lost,) = losses_of(events)
    assert (lost.device, lost.at, lost.left) == ("cuda:1", "step 2", ("cuda:0", "cuda:2"))
    assert "CUDA error" in lost.cause and simulation.machine.streams.num_freed_on_failed == 0


def test_a_card_that_is_lost_streams_no_samples(finetune: Finetune) -> None:
    evaluates = "val_set_size=2", "eval_steps=2", "eval_samples=1", "eval_max_new_tokens=2"
    events, _ = on_cards("lost", *CARD_STEPS, *evaluates, how="fail")
    assert len(losses_of(events)) == 1 and "not streamed" not in notices(events)
    assert [len(event.samples) for event in events if isinstance(event, EvaluationFinished)] == [1]


def test_a_card_that_hangs(finetune: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is unlocked afterwards, for which the driver would wait for the card."""
    hangs = see_hangs_soon(partial(monkeypatch.setattr, raising=False))
    events, _ = on_cards("lost", *CARD_STEPS, how="hang", breaks=hangs.set)
    assert bits("lost") == bits_of_whole(on_cards, *CARD_STEPS)
    (lost,) = losses_of(events)
    assert lost.device == "cuda:1" and "no progress" in lost.cause
    assert "left behind: worker-1" in notices(events)


def test_an_error_that_takes_all_cards_down(finetune: Finetune) -> None:
    with pytest.raises(DeviceLostError, match="no device of this process answers") as caught:
        on_cards("lost", *CARD_STEPS, how="fail_all")
    assert load_newest(Path("lost"), None, lambda text: pytest.fail(text)).step == 1
    assert len(caught.value.rest) == 2


# What is said of it, and the stages for the rest.


def test_said_where_the_user_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_CACHE", str(tmp_path))
    lost = DeviceLost(1e9, 1, "cuda:1", "step 5", "CUDA error: x (Xid 79: GPU has fallen off the bus)", ("cuda:0",))
    assert decode(json.loads(json.dumps(encode(lost)))) == lost
    started = RunStarted(0.0, "model", "lora", ("cuda:0", "cuda:1"), 9, 0)
    spans = (Span(0, "compute", "F", 0, 0, 0.0, 1.0),)
    state = fold_all([(0.0, started), (1.0, lost), (2.0, StepTimeline(5, 1.0, spans))])
    assert [worker.lost_at for worker in state.workers] == ["", "step 5"]
    for height in (12, 24, 60):
        frame = "\n".join(line.plain for line in workers_block(Scene(state.workers, 2.0, 10.0, Theme()), 100, height))
        assert frame.count("lost at step 5") == 1, frame
    waited = longest_waiting(state)
    assert waited is not None and waited.worker == 0
    assert "lost at step 5" in timelines([StepTimeline(5, 1.0, spans)], ["", "step 5"], title="work")
    row = StepFinished(5, 9, 1.0, 1e-3, 1.0, 8, 8.0, 1.0, 0.1, (0.9, 0.0), 0, 0, 4.0)
    state = fold(state, row, 2.0)
    assert any("cuda:1, lost at step 5" in line for line in details(state))
    assert state.workers[1].utilization is None, "no share of a step is its"
    report = {"lost_devices": [{"worker": 1, "tokens_per_s_before": 20.0, "tokens_per_s_after": 10.0}]}
    assert [row[2] for row in comparison(report)] == ["20", "10"]
    assert list(_lost()) == []
    note_lost_device(lost.text)
    (check,) = _lost()
    assert "cuda:1 (worker 1) was lost at step 5" in check.found and "Xid 79" in check.found and check.state == "note"
    note_lost_device("cpu (worker 0) was lost at step 2: no progress")
    with (cache_folder("lost") / "devices.jsonl").open("a") as file:
        file.write(f'{{"time": {10**400}, "text": "no float holds its time"}}\n')
    assert ["please report it" in (check.fix or "") for check in _lost()] == [False, True]


def test_the_drivers_own_word(tmp_path: Path) -> None:
    lines = [
        "4,1,5000000,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=7, Graphics Exception",
        "4,2,90000000,-;NVRM: Xid (PCI:0000:af:00): 31, pid=9, MMU Fault",
        "4,3,99000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    ]
    assert xid_in(lines, "0000:3b:00", 100.0) == "Xid 79: GPU has fallen off the bus."
    assert xid_in(lines, "0000:af:00", 100.0) == "Xid 31: MMU Fault"
    assert xid_in(lines, "0000:af:00", 5000.0) is None, "of something else"
    assert xid_in(lines, "0000:01:00", 100.0) is None


def test_stages_are_cut_for_the_rest() -> None:
    costs = replace(equal_costs(6), worker_speed=(1.0, 0.5, 1.0))
    planner = AdaptivePlanner(costs, 3, PipelineConfig())
    planner.measured = True
    assert planner.schedule(4).num_workers == 3
    planner.leave_out({1})
    assert planner.schedule(4).num_workers == 2 and planner.costs.worker_speed == (1.0, 1.0)
    stages = ((0, 1), (2, 3), (4, 5))
    bound = AdaptivePlanner(equal_costs(6), 3, PipelineConfig(schedule="1f1b", forward_stages=stages))
    bound.leave_out({0})
    assert bound.schedule(4).num_workers == 2, "a stage for each of three workers does not suit two"
