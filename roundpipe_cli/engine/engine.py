"""The engine: runs one step of a schedule on a pool of stateless workers.

    with Engine(model, split, store, backends, ...) as engine:
        result = engine.run_step(microbatches, schedule, step=0)     # gradients are in store.gradients

All that lasts is in host stores. A step's loss and gradients do not depend on the number of workers, the partition,
the schedule or the timing. The threads live as long as the `with` block.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from roundpipe_cli.engine.backends.base import Backend, is_device_error, is_out_of_memory
from roundpipe_cli.engine.carrier import BoundaryStore, Carrier
from roundpipe_cli.engine.dispatch.dispatch import MEMORY_HINT, Pool, StepRun, keep_forever
from roundpipe_cli.engine.dispatch.progress import Progress
from roundpipe_cli.engine.gradients import GradientFold, StepGradients
from roundpipe_cli.engine.layer import LayerRunner
from roundpipe_cli.engine.live import StepInWork, WorkerStep, op_interval
from roundpipe_cli.engine.microbatch import MicrobatchState, microbatch_states
from roundpipe_cli.engine.options import EngineOptions, GradientOptions
from roundpipe_cli.engine.prepared import PreparedProgram, StepContext, trained_layers
from roundpipe_cli.engine.step import Microbatch, Part, StepResult
from roundpipe_cli.engine.weights import REFERENCE, WeightStore
from roundpipe_cli.engine.worker import Worker, WorkerPart
from roundpipe_cli.errors import OutOfDeviceMemoryError
from roundpipe_cli.kernels.capability import (
    all_run_ours,
    describe_experts,
    forgets_empty_groups,
    takes_triton,
    why_no_triton,
)
from roundpipe_cli.model.expert_lora import use_grouped_kernel
from roundpipe_cli.model.head import HeadLoss, HeadScores
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.worker_model import WorkerModel
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.program import WEIGHTS, Program
from roundpipe_cli.schedule.timeline import HOST, Interval

# Figures of a finished step, from its workers' marks.

LAUNCH_BOUND_SHARE = 0.1
"""An operation waited for its launches if its device was done within this share of its time after the last of them."""


MIN_WAIT_S = 1e-3
"""Shorter waits for updates are not shown: the host takes as long to hand a step over."""


def measured_waits(run: StepRun, steps: Sequence[WorkerStep], started_s: float) -> tuple[Interval, ...]:
    """Times in which a worker had nothing to compute and the host had not updated the weights that it reads next."""
    found = []
    ends_s = {one.op.id: step.seconds(one.end, started_s) for step in steps for one in step.intervals}
    for row in run.program.compute:
        free_s = 0.0
        for op in (run.program.ops[op_id] for op_id in row):
            held = (op.id, *(dep for dep in op.deps if run.program.ops[dep].payload == WEIGHTS))
            let_go_s = max(run.let_go_s.get(op_id, started_s) for op_id in held) - started_s
            if let_go_s - free_s > MIN_WAIT_S:
                found.append(Interval(op.worker, HOST, Kind.OPTIMIZER, op.stage, -1, free_s, let_go_s))
            free_s = max(free_s, ends_s.get(op.id, free_s))
    return tuple(found)


def launch_bound_s(step: WorkerStep) -> float:
    """Seconds of a GPU's operations in which it kept up with the host, so that it may have waited for launches.

    What of them was arithmetic cannot be told. 0 for processors, which compute where they launch.
    """
    if step.backend.capability is None:
        return 0.0
    total_s = 0.0
    for interval in step.intervals:
        begin_s, end_s = (step.seconds(mark, step.started_s) for mark in (interval.start, interval.end))
        left_s = end_s - (interval.issued_s - step.started_s)
        if left_s <= LAUNCH_BOUND_SHARE * (end_s - begin_s):
            total_s += end_s - begin_s
    return total_s


ANSWER_S = 20.0
"""Seconds within which a device that works answers, whatever was issued to it before."""


class Engine:
    """A pool of workers over one weight store."""

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        store: WeightStore,
        backends: Sequence[Backend],
        *,
        options: EngineOptions | None = None,
    ) -> None:
        """
        Args:
            model: skeleton of the causal language model (parameters on the meta device), adapters included.
            backends: one per worker.
        """
        options = options or EngineOptions()
        self.store = store
        self.split = split
        self.num_layers = len(store.layouts)
        self._options = options
        self._trained = trained_layers(store, split)
        self._seeds_blocks = True
        self._told: set[str] = set()
        """Notices of devices that were already in a result."""
        capabilities = [backend.capability for backend in backends]
        missing = "kernels: reference" if options.fused is None else why_no_triton()
        takes = functools.partial(takes_triton, capabilities, allowed=missing is None)
        self._loss_in_place = missing is None and options.own_loss is None and all_run_ours(capabilities)
        """Whether the loss is our kernel's, on all workers alike."""
        expert_dtypes: frozenset[torch.dtype] = frozenset()
        self._workers = []
        for index, backend in enumerate(backends):
            worker_model = WorkerModel(
                *(model, split, store.views, store.trainable_names),
                device=backend.device,
                fused=options.fused,
                mlp_chunk_tokens=options.mlp_chunk_tokens,
                attends_in_rows=options.attends_in_rows,
            )
            worker_model.leave_out(options.unread or {})
            if backend.capability is not None:
                forgets = forgets_empty_groups(backend.capability)
                expert_dtypes = use_grouped_kernel(worker_model.blocks, takes, forgets=forgets)
            layers = LayerRunner(index, worker_model, backend, self._trained, layouts=store.layouts)
            self._workers.append(Worker(layers, store, options, split.layer_names()))
        self._notice = describe_experts(capabilities, expert_dtypes, missing)
        """Note of the first result on the kernels; None: nothing."""
        self._programs: dict[int, PreparedProgram] = {}
        """Identity of a schedule -> its program: a run has few and uses each for many steps."""
        self.lanes = tuple(range(len(backends)))
        """See `StepResult`."""
        self._pool = self._new_pool()
        self._open = False
        self.step_in_work: StepInWork | None = None
        """The step for displays, which any thread may read."""

    def _new_pool(self) -> Pool:
        return Pool(
            self._workers,
            watchdog_s=self._options.watchdog_s,
            is_out_of_memory=is_out_of_memory,
            is_device_error=is_device_error,
        )

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def silent(self, but: Collection[int] = ()) -> list[int]:
        """Workers whose devices do not compute a small result any more; `but` are not asked."""
        asked = [worker for worker in self._workers if worker.index not in but]
        found: dict[int, bool] = {}

        def ask(worker: Worker) -> None:
            found[worker.index] = worker.backend.answers(worker.index)

        threads = [
            threading.Thread(target=ask, args=(worker,), name=f"answer-{worker.index}", daemon=True) for worker in asked
        ]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + ANSWER_S
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return [worker.index for worker in asked if not found.get(worker.index)]

    def leave_out(self, lost: Collection[int], *, hang: bool) -> tuple[str, ...]:
        """Go on without some workers, after a step that failed: the next schedules are for fewer. The others keep what
        they know and hold; they are numbered anew.

        Args:
            hang: some of them hang, and may still write gradients; the store gets other memory for those.

        Returns:
            the names of threads that are left behind.
        """
        left = self._pool.end()
        if hang:
            self.store.renew_gradients()
        keep_forever(*(worker for worker in self._workers if worker.index in lost))
        self.lanes = tuple(lane for index, lane in enumerate(self.lanes) if index not in lost)
        self._workers = [worker for worker in self._workers if worker.index not in lost]
        for index, worker in enumerate(self._workers):
            worker.become(index)
            if hang:
                worker.backend.give_up()
        self._pool = self._new_pool()
        self._pool.__enter__()
        return left

    def grant_weight_cache(self, num_bytes: int) -> None:
        """Let each device keep weights in so much of its memory from the next step on; see `slots.py`."""
        for worker in self._workers:
            worker.slots.grant_cache(num_bytes)

    def unpack_per_visit(self, once: bool) -> None:
        """Unpack packed weights once per visit from the next step on, or for each microbatch and pass."""
        for worker in self._workers:
            worker.whole_per_visit = once

    @property
    def late_layers(self) -> frozenset[int]:
        """Trained layers whose gradient is complete only at the end of a step."""
        return self._trained.late

    def __enter__(self) -> Engine:
        self._pool.__enter__()
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._pool.__exit__(kind, error, trace)

    def run_step(
        self,
        microbatches: Sequence[Microbatch],
        schedule: Schedule,
        *,
        step: int,
        version: int | None = None,
        part: Part | None = None,
        gradients: GradientOptions | None = None,
    ) -> StepResult:
        """Forward and backward of one step; leaves the sum of gradients, times the loss scale, in the store.

        Args:
            microbatches: as many as the schedule has, or as it has sequences: each is cut into the schedule's chunks.
            schedule: for as many workers as the engine has.
            step: index of the step, from 0; seeds dropout.
            version: of the weights that every part of the step reads; None: the newest.
            part: which microbatches of a step that machines share are computed here: loss and gradients are their
                share of the step's; None: all of them.
            gradients: what is done with them; None: they are left in the store.

        Raises:
            OutOfDeviceMemoryError: exit code 5; the step can be run again after `use_less_memory`.
            DeviceLostError: exit code 5; the step can be run again after `leave_out`.
            InternalError: a worker failed or got stuck (exit code 1); names worker, stage, layers, microbatch, step.
        """
        assert self._open, "use the engine inside its `with` block"
        assert schedule.num_workers == self.num_workers
        assert schedule.num_microbatches == len(microbatches) * schedule.sequence_chunks
        states = microbatch_states(microbatches, schedule.sequence_chunks, part)
        num_units = sum(one.num_units for one in microbatches) if part is None else part.num_units
        context = self._context(
            states, schedule, step, version, num_units=num_units, gradients=gradients or GradientOptions()
        )
        return self._finish(context, *self._compute(context))

    def _context(
        self,
        states: list[MicrobatchState],
        schedule: Schedule,
        step: int,
        version: int | None,
        *,
        num_units: float,
        gradients: GradientOptions,
        **ways: Any,
    ) -> StepContext:
        """The context of a pass over these microbatches; `ways`: its last fields; to score makes no gradients."""
        progress, options, folds = Progress(), self._options, dict[int, GradientFold]()
        for layer in () if ways.get("scoring") else self.store.trained:
            flat = self.store.gradients[layer]
            flat = torch.empty_like(flat) if layer in gradients.kept else flat
            folds[layer] = GradientFold(layer, self.store.layouts[layer], flat, len(states), progress=progress)
        scale = gradients.loss_scale / (num_units or 1)
        if id(schedule) not in self._programs:  # each is kept, so no other one gets its number
            copies = not self._workers[0].backend.aliases_host
            self._programs[id(schedule)] = PreparedProgram(schedule, self.store, self._trained, options, copies=copies)
        return StepContext(
            step=step,
            version=self.store.newest if version is None else version,
            prepared=self._programs[id(schedule)],
            microbatches=states,
            num_units=num_units,
            loss=HeadLoss(
                *(scale, options.head_chunk_tokens, options.label_smoothing, self._loss_in_place, options.own_loss)
            ),
            dropout_seed=options.seed,
            seeds_blocks=self._seeds_blocks,
            progress=progress,
            boundaries=BoundaryStore(progress),
            gradients=StepGradients(folds, self._trained.late, gradients),
            **ways,
        )

    def score(
        self,
        microbatches: Sequence[Microbatch],
        schedule: Schedule,
        *,
        step: int,
        adapters: bool = True,
        version: int | None = None,
        top_k: int = 0,
    ) -> list[HeadScores]:
        """Losses and log-probabilities of the target tokens of each microbatch, without dropout, gradients or backward.

        Args:
            microbatches: as many as the schedule has.
            schedule: forwards alone, from `build_forward`.
            step: for error messages.
            adapters: False leaves the adapters out: the base model's.
            version: of the weights; None: the newest.
            top_k: also tell so many of the most probable tokens at each target's place.

        Raises:
            as `run_step`.
        """
        assert self._open, "use the engine inside its `with` block"
        assert schedule.num_workers == self.num_workers and schedule.num_microbatches == len(microbatches)
        states = microbatch_states(microbatches, schedule.sequence_chunks)
        ways = {"scoring": True, "adapters": adapters, "top_k": top_k}
        context = self._context(states, schedule, step, version, num_units=1, gradients=GradientOptions(), **ways)
        self._compute(context)
        scores = [state.scores for state in context.microbatches]
        return [replace(item, loss_sum=float(item.loss_sum)) for item in scores if item is not None]

    def _compute(self, context: StepContext) -> tuple[StepRun, list[WorkerStep], float]:
        """Let the workers run the context's program, to its end; returns also when they began, by
        `time.perf_counter`."""
        prepared = context.prepared
        self._reserve(prepared.program, trains=not context.scoring)
        run = StepRun(
            prepared.program,
            prepared.links,
            context.step,
            context.progress,
            works=self._pool.works,
            readers=prepared.weight_readers if context.version != REFERENCE else None,
        )
        steps = [WorkerStep(worker.backend) for worker in self._workers]
        for worker, step in zip(self._workers, steps, strict=True):
            carrier = Carrier(
                worker.backend, context.boundaries, run, prepared.downloads, recompute_each_layer=prepared.each_layer
            )
            run.parts[worker.index] = WorkerPart(context, carrier, step)
        started_s = time.perf_counter()
        if not context.scoring:
            fused_head = prepared.schedule.fused_head
            self.step_in_work = StepInWork(context.step, started_s, steps, fused_head, self.lanes)
        self.store.tell(run, context.version)
        self._pool.start(run)
        embed = context.gradients.folds.get(0)
        if embed is not None:  # no worker adds to it, so it is cleared here while they compute
            self.store.wait_for(0, context.version)  # until then an update reads the sum
            embed.begin()
        try:
            self._pool.wait(run)
        finally:
            self.store.forget(run)
            self.step_in_work = None
        for worker in self._workers:
            worker.slots.step_done()
        return run, steps, started_s

    def use_less_memory(self) -> None:
        """After a step ran out of memory: recompute one layer at a time from now on, which changes no bit."""
        self._options = replace(self._options, recompute="layer", keep_blocks=0)
        self._programs.clear()
        for worker in self._workers:
            worker.backend.release_unused()

    def attend_in_rows(self) -> None:
        """Tell blocks where rows lie, in place of masks, from the next step on; see `EngineOptions`."""
        for worker in self._workers:
            worker.runner.layers.model.attends_in_rows = True

    def _reserve(self, program: Program, *, trains: bool) -> None:
        for worker in self._workers:
            try:
                worker.slots.reserve(self._options.num_slots, program, trains=trains)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                where = f"worker {worker.index} ({worker.backend.device}), slots for stages or weight cache"
                text = f"{type(error).__name__}: {error}".strip()
                raise OutOfDeviceMemoryError("out of memory", where=where, found=text, hint=MEMORY_HINT) from error

    def _take_notices(self) -> tuple[str, ...]:
        """Notes on devices and kernels, each text once in a run."""
        found = filter(None, (self._notice, *(worker.backend.take_notice() for worker in self._workers)))
        new = tuple(text for text in dict.fromkeys(found) if text not in self._told)
        self._told.update(new)
        return new

    def _finish(self, context: StepContext, run: StepRun, steps: Sequence[WorkerStep], started_s: float) -> StepResult:
        if context.microbatches:  # blocks that drew nothing in the first step never do: later steps need not watch
            models = [worker.runner.layers.model for worker in self._workers]
            self._seeds_blocks &= any(model.blocks_draw for model in models)
            watches = any(model.draws_by_torch for model in models)
            for model in models:
                model.watches_torch = watches
        squares = context.gradients.finish(self.store)
        seconds = time.perf_counter() - started_s
        loss_sum = 0.0
        for state in context.microbatches:
            assert state.loss_sum is not None
            loss_sum += float(state.loss_sum)
        num_units = context.num_units
        assert len(context.boundaries) == 0, "a boundary tensor was never read"
        moved_bytes: Counter[tuple[str, str]] = Counter()
        for record in run.records:
            moved_bytes[record.op.lane, record.op.payload] += record.num_bytes
        return StepResult(
            loss=loss_sum / num_units if num_units else 0.0,
            num_target_tokens=sum(len(state.target_ids) for state in context.microbatches),
            notices=self._take_notices(),
            part_sums=tuple(
                tuple(state.part_sums.tolist()) for state in context.microbatches if state.part_sums is not None
            ),
            gradient_norm=math.sqrt(sum(squares)) / context.gradients.options.loss_scale,
            step_s=seconds,
            actions=tuple(step.timed(one, started_s) for step in steps for one in step.intervals),
            num_workers=self.num_workers,
            lanes=self.lanes,
            fused_head=context.program.schedule.fused_head,
            started_s=started_s,
            moved_bytes=moved_bytes,
            links=tuple(op_interval(one.op, one.start_s - started_s, one.end_s - started_s) for one in run.records),
            waits=measured_waits(run, steps, started_s),
            device_peak_bytes=tuple(step.peak_bytes for step in steps),
            device_reserved_bytes=tuple(step.reserved_bytes for step in steps),
            launch_bound_s=tuple(map(launch_bound_s, steps)),
        )
