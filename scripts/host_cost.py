"""What the engine costs the host per layer call and per layer upload: one table, in microseconds of processor time.

    python scripts/host_cost.py [--steps 32] [--hidden 64]
    PYTHONPATH=../other python scripts/host_cost.py       the same of another checkout's package

Tensors are tiny, so that only Python and dispatch count; a thread's processor time is taken, not the clock's, so that
other programs disturb less. A call is compared with the same block called directly with the same arguments: `adds` is
what the engine's own call of it takes more, `whole` is from the start of an operation in the worker's thread to the
start of the next one, all that the thread does; `operators` are those that a call hands to torch, views among them.
Blocks compute by fused operators, as in a run. An upload is the copying thread's whole time and that of binding the
modules to what it brought, per transfer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind the checkout that is to be measured

from roundpipe_cli.engine.prepared import StepContext
from roundpipe_cli.engine.program import stage_layers
from roundpipe_cli.engine.stage import StageRunner
from roundpipe_cli.model import worker_model
from roundpipe_cli.model.block_calls import BlockCall
from roundpipe_cli.model.worker_model import WorkerModel
from roundpipe_cli.planning.adaptive import profile_schedule
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.builders import build_forward
from roundpipe_cli.schedule.program import Op
from tests.support.tiny import Rig, make_rig, random_microbatches

NUM_MICROBATCHES, TOKENS, WARM_UP = 8, 8, 4
EXPERTS, EXPERT_TOKENS = 128, 128


def microseconds(call: Callable[[], object]) -> float:
    """Processor time of `call` in this thread."""
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e3


def median_microseconds(call: Callable[[], object], times: int) -> float:
    return statistics.median([microseconds(call) for _ in range(times + WARM_UP)][WARM_UP:])


class Direct:
    """A worker's blocks called by themselves, with the arguments that the engine gives them."""

    def __init__(self, model: WorkerModel) -> None:
        self._model = model
        self._sums: dict[int, list[torch.Tensor]] = {}

    def forward(self, layer: int, call: BlockCall, hidden: torch.Tensor) -> None:
        with torch.no_grad():
            call.run(self._model.blocks[layer - 1], hidden)

    def backward(self, layer: int, call: BlockCall, hidden: torch.Tensor, gradient: torch.Tensor) -> None:
        """Forward with graph, backward and the addition to float32 sums."""
        block = self._model.blocks[layer - 1]
        parameters = [p for p in block.parameters() if p.requires_grad]
        sums = self._sums.setdefault(layer, [torch.zeros(p.shape) for p in parameters])
        leaf = hidden.detach().requires_grad_()
        output = call.run(block, leaf)
        gradients = torch.autograd.grad(output, [leaf, *parameters], gradient, allow_unused=True)
        for total, part in zip(sums, gradients[1:], strict=True):
            if part is not None:
                total.add_(part)


def bound_block(rig: Rig, tokens: int) -> tuple[WorkerModel, BlockCall, torch.Tensor]:
    """A worker's model with the weights of the first block, how that is called, and hidden states for it."""
    model = WorkerModel(rig.skeleton, rig.split, rig.store.views, rig.store.trainable_names, device=torch.device("cpu"))
    model.bind(1, {place.name: place.parameter(rig.store.buffers[1]) for place in rig.store.layouts[1].places})
    call = model.prologue(torch.arange(tokens)[None] % 128).calls[0]
    return model, call, torch.randn(1, tokens, rig.skeleton.config.hidden_size)


class Operators(TorchDispatchMode):
    """Counts what is handed to torch in this thread."""

    num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_seen += 1
        return func(*args, **(kwargs or {}))


class Paired:
    """In place of a runner's `run`: the same block is also called directly, right before or right after.

    In the same thread, so that a machine that is slower for a while is slower for both, and first as often as last:
    whoever comes second finds the layer's objects in the processor's caches.
    """

    def __init__(self, rig: Rig, runner: StageRunner) -> None:
        self._run, self._runner, self._direct = runner.run, runner, Direct(runner.layers.model)
        self._num_layers = rig.num_layers
        self._hidden = torch.randn(1, TOKENS, rig.skeleton.config.hidden_size)
        self._gradient = torch.randn_like(self._hidden)
        self._row = [0.0, 0.0, 0.0]
        self._left_ns = 0
        self.direct_first = self.counts_operators = False
        self.operators: dict[str, list[int]] = defaultdict(list)
        """Of forwards, recomputes and backwards of a block, by the first letter, in steps that count them."""
        self.rows: dict[tuple[str, bool], list[list[float]]] = defaultdict(list)
        """By ("F" or "R+B", `direct_first`): microseconds of the direct call, the engine's own and the whole."""

    def run(self, context: StepContext, op: Op) -> None:
        self._row[2] += (time.thread_time_ns() - self._left_ns) / 1e3
        layer = stage_layers(context.program.schedule, op)[1]
        # Block 0 is left out: the embedding is in its stage. So is the last, which is in the head's.
        counts = 1 < layer < self._num_layers - 2
        if self.counts_operators:
            with Operators() as seen:
                self._run(context, op)
            if counts:
                self.operators[op.kind.name[0]].append(seen.num_seen)
            return
        direct = 0.0
        if counts and op.kind is not Kind.BACKWARD and self.direct_first:
            direct = self._call(context, op, layer)
        taken = microseconds(lambda: self._run(context, op))
        if op.kind is not Kind.BACKWARD:
            self._row = [direct, 0.0, 0.0]
        self._row[1] += taken
        self._row[2] += taken
        if counts and op.kind is not Kind.RECOMPUTE:
            if not self.direct_first:
                self._row[0] = self._call(context, op, layer)
            self.rows["F" if op.kind is Kind.FORWARD else "R+B", self.direct_first].append(self._row)
        self._left_ns = time.thread_time_ns()

    def _call(self, context: StepContext, op: Op, layer: int) -> float:
        call = self._runner.layers.calls(context.microbatches[op.microbatch])[layer - 1]
        if op.kind is Kind.FORWARD:
            return microseconds(lambda: self._direct.forward(layer, call, self._hidden))
        return microseconds(lambda: self._direct.backward(layer, call, self._hidden, self._gradient))


def through_engine(rig: Rig, steps: int) -> dict[str, list[float]]:
    """Per call of a block, for "F" (forward) and "R+B" (recompute and backward) in an engine with one worker.

    The same block, called directly; the engine's operation alone; what it takes more; what all that the worker's
    thread does from its start to the start of the next takes more; operators.
    """
    schedule = profile_schedule(rig.num_layers, 1, NUM_MICROBATCHES)
    microbatches = random_microbatches([(1, TOKENS)] * NUM_MICROBATCHES)
    with rig.engine(1) as engine:
        runner = engine._workers[0].runner
        paired = Paired(rig, runner)
        runner.run = paired.run  # type: ignore[method-assign]
        for step in range(2 * (steps + WARM_UP)):
            if step == 2 * WARM_UP:
                paired.rows.clear()
            paired.direct_first = step % 2 == 1
            engine.run_step(microbatches, schedule, step=step)
        paired.counts_operators = True
        engine.run_step(microbatches, schedule, step=step + 1)
    orders = {name: [medians(paired.rows[name, first]) for first in (False, True)] for name in ("F", "R+B")}
    found = {name: [statistics.mean(pair) for pair in zip(*both, strict=True)] for name, both in orders.items()}
    operators = {kind: statistics.median(one) for kind, one in paired.operators.items()}
    return {name: [*found[name], sum(operators[kind] for kind in name.split("+"))] for name in found}


def medians(rows: list[list[float]]) -> list[float]:
    """Of direct, engine, engine - direct and whole - direct, over [direct, engine, whole] of each call."""
    columns = [(direct, alone, alone - direct, whole - direct) for direct, alone, whole in rows]
    return [statistics.median(column) for column in zip(*columns, strict=True)]


def upload(rig: Rig, steps: int) -> float:
    """Of the lane's thread and of the binding in the compute thread, per transfer, in a pass forward of one microbatch.

    Half of its transfers are a layer's weights, half are hidden states.
    """
    stages = [(0, 1), *((layer, layer) for layer in range(2, rig.num_layers - 1))]
    schedule = build_forward([*stages, (rig.num_layers - 1, rig.num_layers - 1)], num_workers=1, num_microbatches=1)
    microbatches = random_microbatches([(1, TOKENS)])
    lanes: dict[str, float] = {}
    binding: list[float] = []
    engine = rig.engine(1, copy=True)
    worker = engine._workers[0]
    lane_thread, bind_slot = worker.lane_thread, worker.slots.bind

    @contextmanager
    def timed_lane() -> Iterator[None]:
        with lane_thread():
            start = time.thread_time_ns()
            yield
            lanes[threading.current_thread().name] = (time.thread_time_ns() - start) / 1e3

    def timed_bind(*arguments: Any) -> None:
        start = time.thread_time_ns()
        bind_slot(*arguments)
        binding.append((time.thread_time_ns() - start) / 1e3)

    worker.lane_thread, worker.slots.bind = timed_lane, timed_bind  # type: ignore[method-assign]
    engine._pool = engine._new_pool()  # whose threads call them
    with engine:
        for step in range(steps + WARM_UP):
            engine.score(microbatches, schedule, step=step)
    num_transfers = (steps + WARM_UP) * (2 * rig.num_layers - 3)
    return lanes["up-0"] / num_transfers + statistics.median(binding)


def experts(hidden: int, times: int) -> tuple[float, float, float]:
    """A layer of 128 experts with adapters at 128 tokens: forward, forward and backward, upload."""
    rig = make_rig(
        "qwen3_moe",
        "lora",
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        hidden_size=hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=2,
    )
    for name, view in rig.store.views.items():
        if view.dim() > 1 and "norm" not in name:
            view.normal_(std=0.02)
    model, call, states = bound_block(rig, EXPERT_TOKENS)

    def forward() -> None:
        with torch.no_grad():
            call.run(model.blocks[0], states)

    def both() -> None:
        leaf = states.detach().requires_grad_()
        call.run(model.blocks[0], leaf).sum().backward()

    return median_microseconds(forward, times), median_microseconds(both, times), upload(rig, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="steps of 32 calls of each kind (32: 1,024 calls)")
    parser.add_argument("--hidden", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| per call, microseconds of processor time | direct | engine | adds | whole: adds | operators |")
    print("|---|---:|---:|---:|---:|---:|")
    for method in ("lora", "full"):
        rig = make_rig("llama", method, kernels="auto", hidden_size=arguments.hidden, num_hidden_layers=6)
        found = through_engine(rig, arguments.steps)
        for name, key in (("forward", "F"), ("recompute and backward", "R+B")):
            print(f"| dense layer, {method}: {name} | " + " | ".join(f"{cell:.0f}" for cell in found[key]) + " |")
        print(f"| dense layer, {method}: upload | | | {upload(rig, 32 * arguments.steps // 4):.0f} | | |")
    forward, both, up = experts(arguments.hidden, 4 * arguments.steps)
    print(f"| {EXPERTS} experts, LoRA, {EXPERT_TOKENS} tokens: forward | {forward:.0f} | | | | |")
    print(f"| {EXPERTS} experts, LoRA, {EXPERT_TOKENS} tokens: forward and backward | {both:.0f} | | | | |")
    print(f"| {EXPERTS} experts, LoRA: upload | | | {up:.0f} | | |")
    with mock.patch.object(worker_model, "isolate_expert_adapters", lambda model: None):
        theirs, theirs_both, _ = experts(arguments.hidden, 4 * arguments.steps)
    print(f"| the same by PEFT as shipped: forward | {theirs:.0f} | | | | |")
    print(f"| the same by PEFT as shipped: forward and backward | {theirs_both:.0f} | | | | |")


if __name__ == "__main__":
    main()
