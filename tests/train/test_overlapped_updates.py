"""A step begins while the host still updates the weights for it: the bits of a loop with a barrier, sooner."""

from __future__ import annotations

import json
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.dashboard.waiting import waiting
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.events import Event, StepFinished, StepTimeline, Tell
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train import build
from roundpipe_cli.train.checkpoint import writing
from roundpipe_cli.train.checkpoint.reading import Checkpoint, load_newest
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.optim import updater
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.optim.updater import Updater
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.signals import Reporting, StopSignals
from tests.support.e2e import STAGES_OF_TWO, make_workspace, metrics, num_lines


def trainer_of(
    folder: Path, model: Path, *words: str, tell: Tell = lambda event: None, checkpoint: Checkpoint | None = None
) -> Trainer:
    """A run in this process, not started; steps of two rows."""
    work = make_workspace(folder, model, lora={"r": 4, "alpha": 8, "dropout": 0.1}, **STAGES_OF_TWO)
    common = ["max_steps=6", "num_train_epochs=9", "save_steps=100", "warmup_steps=0", f"output_dir={work / 'out'}"]
    setup = prepare(load_recipe(str(work / "recipe.yaml"), [*common, *words]), offline=True, tell=lambda event: None)
    (work / "out").mkdir()
    return Trainer(setup, work / "out", StopSignals(), Reporting(tell), checkpoint=checkpoint)


def run(trainer: Trainer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, when it saves
        trainer.run()


def bits_of(trainer: Trainer) -> list[object]:
    """All that a run came to."""
    rows: list[object] = [(row["loss_hex"], row["grad_norm"]) for row in metrics(trainer.output_dir)]
    if (trainer.output_dir / "eval.jsonl").exists():
        lines = (trainer.output_dir / "eval.jsonl").read_text().splitlines()
        rows += [json.loads(line)["loss"] for line in lines]
    store: Any = trainer.setup.store
    moments = [tensor.numpy().tobytes() for _, tensor in trainer.steps.updater.optimizer.moments()]
    return [rows, [one.numpy().tobytes() for one in (*store.masters, *store.buffers)], moments]


def with_barrier(patch: pytest.MonkeyPatch) -> None:
    """Wait for each update before anything else."""
    for name in ("begin", "skip"):

        def whole(updater: Updater, *args: Any, own: Callable[..., None] = getattr(Updater, name)) -> None:
            own(updater, *args)
            updater.wait()

        patch.setattr(Updater, name, whole)


def with_delays(patch: pytest.MonkeyPatch, longest_s: float) -> None:
    """Each layer's update begins late, by a random time."""
    draw = random.Random(3)
    for name in ("update_layer", "skip_layer"):

        def slow(*args: Any, own: Callable[..., None] = getattr(HostOptimizer, name), **named: Any) -> None:
            time.sleep(longest_s * draw.random())
            own(*args, **named)

        patch.setattr(HostOptimizer, name, slow)


CASES = {
    "full-float16-overflow": ("untied", 3, True, ["dtype=float16", "method=full"]),
    "full-evaluated": ("tied", 2, True, ["dtype=float32", "method=full", "val_set_size=3", "eval_steps=2"]),
    "full-early-tied": ("tied", 1, False, ["dtype=bfloat16", "method=full", "max_grad_norm=0"]),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_slow_updates_beside_the_next_step_change_no_bit(
    name: str, tmp_path: Path, models: dict[str, Path], ask: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, num_workers, copies, words = CASES[name]
    words = [*words, f"pipeline.devices=[{','.join(['cpu'] * num_workers)}]"]
    if name.endswith("overflow"):
        ask("optimizer:inf:step=2,optimizer:inf:step=4")
    if copies:
        monkeypatch.setattr(
            build, "make_backends", lambda devices, threads, **how: [CpuBackend(threads, copy=True) for _ in devices]
        )
    overlapped = trainer_of(tmp_path / "overlapped", models[model], *words)
    with monkeypatch.context() as patch:
        with_delays(patch, 0.05)
        run(overlapped)
    waiting = trainer_of(tmp_path / "waiting", models[model], *words)
    with monkeypatch.context() as patch:
        with_barrier(patch)
        run(waiting)
    assert bits_of(overlapped) == bits_of(waiting)
    assert overlapped.setup.store.newest == 6


def test_steps_that_end_with_their_updates(tmp_path: Path, models: dict[str, Path], ask: Callable[[str], None]) -> None:
    """Those whose layers are timed, those before an evaluation, and the last one."""
    ask("update:slow=0.05")
    versions: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, StepFinished):
            versions.append(trainer.setup.store.newest)

    planned = ("pipeline.forward_stages=auto", "pipeline.backward_stages=auto")  # layers are timed to plan by
    words = ("method=full", *planned, "val_set_size=3", "eval_steps=4")
    trainer = trainer_of(tmp_path / "work", models["untied"], *words, tell=note)
    run(trainer)
    assert [versions[done - 1] for done in (1, 4, 6)] == [1, 4, 6]
    assert versions[4] < 5, "others end before their updates"


def test_a_step_lasts_from_the_end_of_the_step_before(
    tmp_path: Path, models: dict[str, Path], ask: Callable[[str], None]
) -> None:
    """A wait for an update is in the step that waits, in its lanes and among its causes; the last has its own too."""
    ask("update:slow=0.05")
    events: list[Event] = []
    trainer = trainer_of(
        tmp_path / "work", models["untied"], "method=full", "pipeline.devices=[cpu]", tell=events.append
    )
    run(trainer)
    rows = metrics(trainer.output_dir)
    assert all(row["step_s"] > 0.2 for row in rows[3:]) and rows[-1]["step_s"] > 0.32
    step = [event for event in events if isinstance(event, StepTimeline)][-1]
    (wait, *_) = sorted((one for one in step.spans if one.lane == "host"), key=lambda one: one.start_s)
    assert wait.worker == 0 and wait.start_s == 0 and wait.end_s > 0.07, "for the embedding and the first block"
    found = waiting(step, 0)
    assert found is not None and found.by_cause_s["update"] > 0.07


@pytest.mark.parametrize(("words", "step"), [([], 3), (["max_grad_norm=0"], 3), ([], 5)])
def test_a_failing_update_ends_the_step_beside_it(
    words: list[str], step: int, tmp_path: Path, models: dict[str, Path], ask: Callable[[str], None], monkeypatch: Any
) -> None:
    """Within 3 s, however long the step, with the layer and the cause; after the last step, which waits for it, too."""
    trainer = trainer_of(tmp_path / "work", models["untied"], "method=full", "pipeline.devices=[cpu,cpu]", *words)
    ask(f"update:raise=MemoryError:step={step}:layer=2,work:slow=0.5:step={step + 1}")
    rows, deadline_s = trainer.output_dir / "metrics.jsonl", time.monotonic() + 60

    def behind_its_row(point: str, own: Callable[..., Any] = updater.fault, **ids: int) -> Any:
        while ids == {"step": 3, "layer": 2} and num_lines(rows) < 4 and time.monotonic() < deadline_s:
            time.sleep(0.01)  # an early update may fail while its own step computes
        return own(point, **ids)

    monkeypatch.setattr(updater, "fault", behind_its_row)
    failed_s = []
    store = trainer.setup.store
    fail = store.fail
    monkeypatch.setattr(store, "fail", lambda error: (failed_s.append(time.monotonic()), fail(error)))
    with pytest.raises(Exception, match="out of host memory in the optimizer") as caught:
        run(trainer)
    assert time.monotonic() - failed_s[0] < 3.0
    assert f"step {step + 1}, layer block.1" in str(caught.value) and "fault asked for" in str(caught.value)
    assert len(metrics(trainer.output_dir)) == {3: 4, 5: 5}[step], "the step beside it is not finished"
    assert not (trainer.output_dir / "report.json").exists()


def test_an_update_waits_until_a_slow_checkpoint_has_its_layer(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the checkpoint until a slow update has its layer."""
    slow, waiting = (trainer_of(tmp_path / n, models["untied"], "method=full", "save_steps=2") for n in "ab")

    def put(ring: Any, *given: Any, own: Callable[..., None] = writing._Ring.put) -> None:
        time.sleep(0.03)
        own(ring, *given)

    with monkeypatch.context() as patch:
        patch.setattr(writing._Ring, "put", put)
        with_delays(patch, 0.05)
        run(slow)
    with_barrier(monkeypatch)
    run(waiting)
    for name in ("masters", "moments"):
        files = [one.output_dir / "step-00000004" / f"{name}.safetensors" for one in (slow, waiting)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


@pytest.mark.parametrize(("model", "method"), [("untied", "lora"), ("untied", "full"), ("tied", "full")])
def test_a_checkpoint_of_early_updates_continues_to_the_same_bits(
    model: str, method: str, tmp_path: Path, models: dict[str, Path]
) -> None:
    """It takes the layers in the order in which they are updated. One that left out every second was not noticed."""
    words = (f"method={method}", "max_grad_norm=0", "save_steps=2", "save_total_limit=9")
    whole = trainer_of(tmp_path / "whole", models[model], *words)
    assert whole.steps.updates_early
    run(whole)
    for name in ("step-00000004", "step-00000006"):
        shutil.rmtree(whole.output_dir / name)
    checkpoint = load_newest(whole.output_dir)
    resumed = trainer_of(tmp_path / "resumed", models[model], *words, checkpoint=checkpoint)
    run(resumed)
    assert checkpoint.step == 2 and bits_of(resumed) == bits_of(whole)
