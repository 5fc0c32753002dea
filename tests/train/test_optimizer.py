"""The host's updates against torch's own, to the bit, beside the next step too, and moments through save and load."""

from __future__ import annotations

import contextlib
import json
import operator
import random
import re
import resource
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from roundpipe_cli.choices import OPTIMIZERS, OptimizerName
from roundpipe_cli.dashboard.waiting import waiting
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event, StepFinished, StepTimeline, Tell
from roundpipe_cli.heap import settle_heap
from roundpipe_cli.model.layout import make_layout
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train import build
from roundpipe_cli.train.checkpoint import writing
from roundpipe_cli.train.checkpoint.reading import Checkpoint, load_newest
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.optim import updater
from roundpipe_cli.train.optim.optimizer import AdamW, HostOptimizer, make_rule, undecayed_names
from roundpipe_cli.train.optim.updater import Updater
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.signals import Reporting, StopSignals
from tests.support.e2e import STAGES_OF_TWO, forked, make_workspace, metrics, num_lines
from tests.support.every_type import NoTinyConfigError, causal_types, tiny_config_of
from tests.support.os_calls import status_bytes
from tests.support.tiny import Rig, make_rig

NUM_STEPS = 6


def fill_gradients(rig: Rig, step: int) -> None:
    """Made-up gradients of very different sizes; padding stays zero as the engine leaves it."""
    generator = torch.Generator().manual_seed(step)
    for name in sorted(rig.store.trainable_names):
        gradient = rig.store.gradient(name)
        scale = 10.0 ** float(torch.randint(-9, 3, (), generator=generator))
        gradient.copy_(torch.randn(gradient.shape, generator=generator) * scale)


def masters(rig: Rig) -> list[bytes]:
    return [master.numpy().tobytes() for master in rig.store.masters]


@pytest.mark.parametrize(("weight_decay", "spares"), [(0.0, False), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_equal_to_torch_adamw_to_the_bit(method: str, weight_decay: float, spares: bool) -> None:
    """A layer's flat tensor is updated as one parameter, or as few where some are spared the decay."""
    rig = make_rig("llama", method)
    kept = sorted(undecayed_names(rig.skeleton) & rig.store.trainable_names) if spares else []
    names = sorted(rig.store.trainable_names)
    parameters = {name: torch.nn.Parameter(rig.store.master(name).clone()) for name in names}
    groups = [
        {"params": [parameters[name] for name in names if name not in kept], "weight_decay": weight_decay},
        {"params": [parameters[name] for name in kept], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW([one for one in groups if one["params"]], betas=(0.9, 0.95), eps=1e-7, fused=True)
    rule, bare = (AdamW(betas=(0.9, 0.95), eps=1e-7, weight_decay=decay) for decay in (weight_decay, 0.0))
    ours = HostOptimizer(rig.store, rule, rules=dict.fromkeys(kept, bare))
    for step in range(NUM_STEPS):
        fill_gradients(rig, step)
        factor, rate = (1.0, 0.3)[step % 2], 1e-3 / (step + 1)
        for name, parameter in parameters.items():
            parameter.grad = rig.store.gradient(name) * factor
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        ours.step(rate, factor)
        for name, parameter in parameters.items():
            assert torch.equal(parameter, rig.store.master(name)), f"{name}, step {step}"
            assert torch.equal(parameter, rig.store.views[name]), "in float32 the weights are the masters"
    assert ours.num_updates == NUM_STEPS


SPARED_BY_CLASS = ("gpt2", "rwkv", "mpt", "dbrx")
"""Types with norms that no name tells: `ln1`, `pre_ln`, `ln_f`, `norm_1`."""


@pytest.mark.parametrize("model_type", ["llama", "qwen3", *SPARED_BY_CLASS])
def test_weight_decay_spares_what_transformers_spares(model_type: str) -> None:
    """Norms and biases shrank, unlike TRL's; then, told by their names, those of RWKV, `ln1` and `pre_ln`, still."""
    ours, theirs = spared(model_type)
    assert ours == theirs != set()
    if model_type in SPARED_BY_CLASS:
        assert any(not re.search("norm$|bias$", name.removesuffix(".weight")) for name in ours)


@pytest.mark.sweep
def test_weight_decay_spares_what_transformers_spares_in_all_types() -> None:
    compared = 0
    for model_type in causal_types():
        with contextlib.suppress(NoTinyConfigError, RefusedError):  # no tiny model can be built here
            ours, theirs = spared(model_type)
            assert ours == theirs, model_type
            compared += 1
    assert compared > 170


def spared(model_type: str) -> tuple[set[str], set[str]]:
    """Parameters of a tiny model that weight decay leaves alone: here, and in transformers' Trainer."""
    from transformers import Trainer  # late: processes that import this module wait for it

    model = build_skeleton(tiny_config_of(model_type), torch.float32)
    names = {name for name, _ in model.named_parameters()}
    return undecayed_names(model), names - set(Trainer.get_decay_parameter_names(None, model))


def test_sixteen_bit_weights_are_the_rounded_masters() -> None:
    rig = make_rig("llama", dtype=torch.bfloat16)
    before = masters(rig)
    optimizer = HostOptimizer(rig.store)
    for step in range(3):
        fill_gradients(rig, step)
        optimizer.step(1e-5)  # less than bfloat16 can show: only masters keep it
    assert masters(rig) != before
    for name in rig.store.trainable_names:
        assert torch.equal(rig.store.views[name], rig.store.master(name).to(torch.bfloat16)), name


def cost_of_an_update(name: OptimizerName, count: int) -> tuple[int, int]:
    """By how many bytes an update raises this process's peak, after one of less, and the fewest pages it faults in."""
    settle_heap()
    torch.set_num_threads(8)

    def faults_so_far() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def update(count: int) -> tuple[int, int]:
        rule = make_rule(name, momentum=0.9)
        shape = torch.Size([count] if rule.is_flat else [count // 1000, 1000])
        state = {key: torch.zeros_like(like) for key, like in rule.make_state(shape).items()}
        values, before, faults = torch.ones(shape), status_bytes("VmHWM"), [faults_so_far()]
        for number in range(1, 5):
            for start in range(0, len(values), 2**20):
                part = slice(start, start + 2**20)
                moments = {key: one[part] for key, one in state.items()} if rule.is_flat else state
                rule.update(values[part], values[part], moments, 1e-3, number=number, salt=0)
            faults.append(faults_so_far())
        return status_bytes("VmHWM") - before, min(map(operator.sub, faults[2:], faults[1:]))

    update(100_000)
    return update(count)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_temporaries_of_an_update_are_what_plan_counts(name: OptimizerName) -> None:
    """Those of `adamw_8bit` took 20 bytes an element, 12 GB for an embedding of 622M; then as many for each thread."""
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    counted_bytes = OPTIMIZERS[name].temporary_bytes * 4_200_000
    peak_bytes, num_faults = forked(cost_of_an_update, name, 4_200_000)
    assert peak_bytes == pytest.approx(counted_bytes, rel=0.1, abs=16_000_000)
    assert num_faults < 500 or counted_bytes  # those of a whole parameter, by a library, have new pages each time


@pytest.mark.parametrize("name", ["adamw", "adamw_bf16", "sgd"])
def test_many_threads_sweep_larger_blocks_with_the_same_bits(name: OptimizerName) -> None:
    """A moment's noise depends on its place alone, wherever a part of an update begins."""
    count, before = 9 * 2**18 + 100, torch.get_num_threads()
    matrix = torch.nn.Parameter(torch.empty(count, dtype=torch.bfloat16, device="meta"))
    layout = make_layout("matrix", [("weight", matrix)], torch.bfloat16)
    values, gradient = torch.randn(2, count, generator=torch.Generator().manual_seed(0))
    bits = {}
    for num_threads in (1, 3, 12):
        torch.set_num_threads(num_threads)
        store = WeightStore([layout])
        store.set_parameter("weight", values)
        host = HostOptimizer(store, make_rule(name, momentum=0.9, weight_decay=0.1))
        store.gradient("weight").copy_(gradient)
        host.update_layer(0, store.gradients[0], 1, 1e-3, gradient_factor=0.7)
        tensors = [store.masters[0], store.buffers[0], *(moment for _, moment in host.moments())]
        bits[num_threads] = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]
    torch.set_num_threads(before)
    assert bits[1] == bits[3] == bits[12]


MANY, FEWER = 48 * 2**20, 16 * 2**20
"""Parameters: with two bytes each there have to be more, lest what else the process holds shows."""


def bytes_per_parameter(dtype: torch.dtype, trains: bool, count: int) -> tuple[float, float]:
    """What this process holds more for so many parameters after two updates, and what the store says of itself."""

    def resident() -> int:
        return status_bytes("RssAnon") + status_bytes("RssShmem")

    with torch.device("meta"):
        layers = [torch.nn.Parameter(torch.empty(count // 6, dtype=dtype), requires_grad=trains) for _ in range(6)]
    torch.set_num_threads(1)
    torch._foreach_mul_([torch.ones(9)], 2.0)
    before = resident()
    store = WeightStore([make_layout(f"l{i}", [(f"w{i}", one)], dtype) for i, one in enumerate(layers)])
    for buffer in store.transferred:
        buffer.fill_(1 if buffer.dtype == torch.uint8 else 1e-3)
    optimizer = HostOptimizer(store)
    with Updater(store, optimizer, num_threads=1) as updater:
        for step in range(2 if trains else 0):
            updater.begin(step, 1e-3, 0.5)
            updater.wait()
        return (resident() - before) / count, (sum(store.num_bytes().values()) + optimizer.num_bytes) / count


@pytest.mark.parametrize(
    ("dtype", "method", "count", "expected"),
    [
        ("bfloat16", "full", FEWER, 18),
        pytest.param("float32", "full", MANY, 16, marks=pytest.mark.sweep),
        ("bfloat16", "frozen", MANY, 2.0),
    ],
)
def test_host_bytes_per_parameter(dtype: str, method: str, count: int, expected: float) -> None:
    measured, counted = forked(bytes_per_parameter, getattr(torch, dtype), method == "full", count)
    assert measured == pytest.approx(expected, rel=0.05)
    assert counted == pytest.approx(expected, rel=0.001)


# --- a step begins while the host still updates the weights for it: the bits of a loop with a barrier -----------------


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
