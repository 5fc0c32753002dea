"""Versions of weights: step k computes with the weights after k updates, wherever it reads them, updates beside it.

The training loop itself is compared with a loop that sets every version by hand and updates masters with torch's
AdamW: in float32 by plain PyTorch alone, in 16 bit with gradients from one worker.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from roundpipe_cli.engine.options import GradientOptions
from roundpipe_cli.engine.program import stage_layers
from roundpipe_cli.errors import InternalError
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.train.batches import make_microbatches, make_sampler
from roundpipe_cli.train.build import make_engine
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.optim.optimizer import HostOptimizer, undecayed_names
from roundpipe_cli.train.optim.updater import Updater
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.signals import Reporting, StopSignals
from tests.support.e2e import make_workspace, metrics, untied_and_tied
from tests.support.schedules import dealt
from tests.support.simulated_cases import write_layers
from tests.support.tiny import Rig, make_rig, plain_copy, plain_step, random_microbatches, schedule_for

NUM_STEPS = 3
COMMON = [f"max_steps={NUM_STEPS}", "num_train_epochs=4", "save_steps=100", "warmup_steps=0"]
COMMON += ["lr_scheduler_type=linear", "weight_decay=0.1"]
FLOAT32 = ["dtype=float32", "learning_rate=1e-3", "max_grad_norm=0.5"]
MODEL_OF = {"lora": "untied", "full": "tied"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return untied_and_tied(tmp_path_factory.mktemp("tiny"))


def workspace(tmp_path: Path, model: Path) -> Path:
    return make_workspace(tmp_path / "work", model, lora={"r": 4, "alpha": 8, "dropout": 0.0})


def setup_of(folder: Path, *overrides: str) -> Setup:
    loaded = load_recipe(str(folder / "recipe.yaml"), [f"output_dir={folder / 'out'}", *COMMON, *overrides])
    return prepare(loaded, offline=True, tell=lambda event: None)


def train(setup: Setup, folder: Path) -> Trainer:
    (folder / "out").mkdir(exist_ok=True)
    trainer = Trainer(setup, folder / "out", StopSignals(), Reporting(lambda event: None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, when it saves
        trainer.run()
    return trainer


@dataclass
class Reference:
    """The loop by hand: the newest version of every trained weight."""

    setup: Setup
    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    scale: float = 1.0

    def __post_init__(self) -> None:
        store = self.setup.store
        self.names = sorted(store.trainable_names)
        self.parameters = [torch.nn.Parameter(store.master(name).clone()) for name in self.names]
        weight_decay = self.setup.recipe.weight_decay
        spared = undecayed_names(self.setup.model)
        named = list(zip(self.names, self.parameters, strict=True))
        groups = [
            {"params": [one for name, one in named if name not in spared], "weight_decay": weight_decay},
            {"params": [one for name, one in named if name in spared], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW([group for group in groups if group["params"]], fused=True)
        self.weights = [store.views[name].clone() for name in self.names]
        self.scale = 2.0**16 if self.setup.recipe.dtype == "float16" else 1.0

    def update(self, step: int, gradients: list[torch.Tensor], norm: float | None = None) -> None:
        """The next version from the gradients, times the loss scale, of `step`."""
        recipe = self.setup.recipe
        if norm is None:
            norm = float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())
        factor = 1.0 / self.scale
        if recipe.max_grad_norm > 0:
            factor *= min(1.0, recipe.max_grad_norm / (norm + 1e-6))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient * factor
        for group in self.adamw.param_groups:
            group["lr"] = self.trainer._learning_rate(step)
        self.adamw.step()
        self.weights = [p.detach().to(w.dtype, copy=True) for p, w in zip(self.parameters, self.weights, strict=True)]


def by_one_worker(setup: Setup, trainer: Trainer, overflow_step: int | None = None) -> Reference:
    """Gradients from one worker that holds one stage each way; the versions are set by hand."""
    reference = Reference(setup, trainer)
    sampler, store, last = make_sampler(setup), setup.store, len(setup.store.layouts) - 1
    with make_engine(setup) as engine:
        for step in range(NUM_STEPS):
            for name, weights in zip(reference.names, reference.weights, strict=True):
                store.views[name].copy_(weights)
            microbatches, _ = make_microbatches(setup, sampler.next_step())
            schedule = dealt([(0, -1)], [(0, last)], 1, len(microbatches))
            gradients = GradientOptions(reference.scale)
            result = engine.run_step(microbatches, schedule, step=step, gradients=gradients)
            reference.losses.append(result.loss)
            if step == overflow_step or not math.isfinite(result.gradient_norm):
                reference.scale /= 2
            else:
                gradients = [store.gradient(name).clone() for name in reference.names]
                reference.update(step, gradients, result.gradient_norm)
    return reference


CASES = {
    "full-bfloat16-no-clip": ("tied", ["dtype=bfloat16", "method=full", "max_grad_norm=0"]),
    "full-float16-scaled-overflow": ("untied", ["dtype=float16", "method=full", "max_grad_norm=0.3"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_of_the_loop(name: str, tmp_path: Path, models: dict[str, Path], ask: Callable[[str], None]) -> None:
    model, overrides = CASES[name]
    overflow_step = 1 if name.endswith("overflow") else None
    if overflow_step is not None:
        ask(f"optimizer:inf:step={overflow_step}")
    folder = workspace(tmp_path, models[model])
    ours = setup_of(folder, *overrides, "pipeline.devices=[cpu, cpu, cpu]")
    trainer = train(ours, folder)
    reference = by_one_worker(setup_of(folder, *overrides, "pipeline.devices=[cpu]"), trainer, overflow_step)
    assert [row["loss_hex"] for row in metrics(folder / "out")] == [loss.hex() for loss in reference.losses]
    assert ours.store.newest == NUM_STEPS and trainer.steps.updates_early is name.endswith("no-clip")
    for parameter, weights, key in zip(reference.parameters, reference.weights, reference.names, strict=True):
        assert torch.equal(ours.store.master(key), parameter.detach()), key
        assert torch.equal(ours.store.views[key], weights), key


@pytest.mark.parametrize("method", ["lora", "full"])
def test_plain_pytorch_loop(method: str, tmp_path: Path, models: dict[str, Path]) -> None:
    folder, words = workspace(tmp_path, models[MODEL_OF[method]]), [*FLOAT32, f"method={method}"]
    trainer = train(setup_of(folder, *words), folder)
    ours = [row["loss"] for row in metrics(folder / "out")]
    setup = setup_of(folder, *words)
    reference = Reference(setup, trainer)
    rig = Rig(setup.model, setup.split, setup.store, plain_copy(setup.model, setup.store))
    live = dict(rig.plain.named_parameters())
    sampler = make_sampler(setup)
    for step in range(NUM_STEPS):
        with torch.no_grad():
            for name, weights in zip(reference.names, reference.weights, strict=True):
                live[name].copy_(weights)
        reference.losses.append(plain_step(rig, make_microbatches(setup, sampler.next_step())[0]))
        gradients = [live[name].grad for name in reference.names]
        reference.update(step, [torch.zeros(()) if g is None else g.clone() for g in gradients])
    assert ours == pytest.approx(reference.losses, rel=1e-6)
    assert abs(ours[-1] - ours[0]) > 0.01, "nothing was learnt, so nothing was compared"


# --- early updates --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model_type", "late", "copy"),
    [("llama", [0], False), ("gemma3_text", [4], True), ("gpt2", [0, 4], False), ("camembert", [0, 4], False)],
)
def test_each_layer_updates_once_and_the_embedding_last(model_type: str, late: list[int], copy: bool) -> None:
    """The tied table last, also where its first name is the head's (camembert), all else during the backward."""
    rig = make_rig(model_type)
    optimizer = HostOptimizer(rig.store)
    given: list[int] = []
    updated: list[int] = []
    with Updater(rig.store, optimizer, num_threads=1) as updater, rig.engine(2, copy=copy) as engine:
        updater.before_layer = lambda layer, version: updated.append(layer)
        updater.begin_early(0, 1e-3)

        def give(layer: int, squares: Callable[[], float]) -> None:
            given.append(layer)
            updater.gradient_complete(layer, squares)

        microbatches = random_microbatches([(1, 6), (2, 5), (1, 4)])
        engine.run_step(microbatches, schedule_for(rig, 2, 3), step=0, gradients=GradientOptions(on_complete=give))
        updater.wait()
    assert sorted(updated) == sorted({1, 2, 3, 4, *late})
    assert sorted(given) == sorted(updated) and sorted(given[-len(late) :]) == late
    assert rig.store.newest == 1


@pytest.mark.parametrize("squares", [math.inf, math.nan])
def test_an_early_update_is_left_out_from_a_gradient_that_is_not_finite(squares: float) -> None:
    rig = make_rig("llama", "lora", num_hidden_layers=2)
    for name in rig.store.trainable_names:
        rig.store.gradient(name).fill_(1.0)
    before = {name: rig.store.master(name).clone() for name in rig.store.trainable_names}
    with Updater(rig.store, HostOptimizer(rig.store), num_threads=1) as updater:
        updater.begin_early(0, 1e-3)
        for layer, found in ((2, 1.0), (1, squares)):
            updater.gradient_complete(layer, lambda found=found: found)
            updater.wait()
    changed = {rig.store.layer_of(name) for name, old in before.items() if not torch.equal(rig.store.master(name), old)}
    assert changed == {2}


# --- a step reads each layer as soon as the host has its version: nothing waits behind it, and no read is early ------
SIZES = [(1, 6), (2, 5), (1, 4), (1, 7)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("written", [(), (0, 1)])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_the_error_of_an_update_is_that_of_all_who_wait(
    copy: bool, before: bool, written: Sequence[int], new_threads: Callable[[], list[str]]
) -> None:
    rig = make_rig("llama", num_hidden_layers=4)
    error = InternalError("the optimizer failed")
    with rig.engine(2, copy=copy) as engine, ThreadPoolExecutor(2) as pool:
        schedule = schedule_for(rig, 2, len(SIZES))
        engine.run_step(random_microbatches(SIZES), schedule, step=0)
        write_layers(rig, rig.store.gradients, written)
        if before:
            rig.store.fail(error)
        step = partial(engine.run_step, random_microbatches(SIZES), schedule, step=1, version=1)
        waiting = [pool.submit(step), pool.submit(rig.store.wait_for, 3, 1)]
        if not before:
            rig.store.fail(error)
        assert [one.exception(10) for one in waiting] == [error, error]
    assert not new_threads()
    with pytest.raises(InternalError, match="the optimizer failed"):
        rig.store.check_updates()


@pytest.mark.parametrize("copy", [False, True])
def test_all_before_a_layer_that_is_not_updated_is_computed(copy: bool) -> None:
    rig = make_rig("llama", num_hidden_layers=4)
    last, microbatches = rig.num_layers - 1, random_microbatches(SIZES)
    with rig.engine(2, copy=copy) as engine, ThreadPoolExecutor(1) as pool:
        schedule = schedule_for(rig, 2, len(SIZES))
        engine.run_step(microbatches, schedule, step=0)
        gradients = [gradient.clone() for gradient in rig.store.gradients]
        write_layers(rig, gradients, range(last))
        under_way = pool.submit(engine.run_step, microbatches, schedule, step=1, version=1)

        def done() -> list[tuple[Kind, tuple[int, int]]]:
            step = engine.step_in_work
            ops = [item.op for record in step.records for item in record.intervals] if step is not None else []
            return [(op.kind, stage_layers(schedule, op)) for op in ops if op.visit >= 0]

        before = schedule.microbatches_per_round * sum(first <= end < last for first, end in schedule.forward_stages)
        deadline_s = time.monotonic() + 60
        while len(done()) < before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.2)
        seen = done()
        write_layers(rig, gradients, [last])
        loss, found = under_way.result().loss, [gradient.clone() for gradient in rig.store.gradients]
        again = engine.run_step(microbatches, schedule, step=1, version=1).loss
    assert sum(kind is Kind.FORWARD for kind, _ in seen) == before > 0, "every forward of the first round"
    assert all(layers[1] < last for _, layers in seen), "and nothing that reads the head"
    assert loss == again and all(torch.equal(*pair) for pair in zip(found, rig.store.gradients, strict=True))
