"""The engine: runs one step of a schedule on a pool of stateless workers.

    with Engine(model, split, store, backends, ...) as engine:
        result = engine.run_step(microbatches, schedule, step=0)     # gradients are in store.gradients_of(0)

All that lasts is in host stores. A step's loss and gradients do not depend on the number of workers, the partition,
the schedule or the timing. The threads live as long as the `with` block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch
from torch import nn

from roundpipe_cli.engine.activations import BoundaryKey, BoundaryStore, MicrobatchState
from roundpipe_cli.engine.backends.base import Backend, is_out_of_memory
from roundpipe_cli.engine.carrier import Carrier, downloads_of
from roundpipe_cli.engine.dispatch.dispatch import MEMORY_HINT, StepRun
from roundpipe_cli.engine.dispatch.ledger import Dependencies, links_of
from roundpipe_cli.engine.dispatch.pool import Pool
from roundpipe_cli.engine.dispatch.progress import Progress
from roundpipe_cli.engine.dispatch.transfer import TransferOptions, statistics_of
from roundpipe_cli.engine.gradients import GradientFold, square_sum
from roundpipe_cli.engine.intra_op import set_own_threads
from roundpipe_cli.engine.kept import KeptActivations, kept_activations
from roundpipe_cli.engine.live import ActionTime, StepInWork
from roundpipe_cli.engine.program import device_folds, hidden_readers, layer_range, lower_for_engine
from roundpipe_cli.engine.sequences import chunk_states
from roundpipe_cli.engine.stage import OnGradient, Scoring, StageRunner, StepContext
from roundpipe_cli.engine.step import Microbatch, Part, StepResult
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.engine.worker import Worker, WorkerPart, WorkerStep
from roundpipe_cli.errors import OutOfDeviceMemoryError
from roundpipe_cli.model.head import HeadScores, target_rows
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.worker_model import WorkerModel
from roundpipe_cli.schedule.actions import Action, Schedule
from roundpipe_cli.schedule.lower import Program


@dataclass(frozen=True)
class StepUnderWay:
    """A step that the workers have been given."""

    context: StepContext
    run: StepRun
    steps: Sequence[WorkerStep]
    started_s: float
    """Of `time.perf_counter`."""
    loss_scale: float


@dataclass(frozen=True)
class Lowered:
    """A schedule's program with what is made from it once."""

    program: Program
    links: Dependencies
    downloads: dict[BoundaryKey, int]


def _states_of(microbatch: Microbatch, first: int, num_chunks: int) -> list[MicrobatchState]:
    """What a step knows of a microbatch, the first of whose chunks has the index `first`."""
    indices, targets = target_rows(microbatch.labels)
    if num_chunks == 1:
        state = MicrobatchState(first, microbatch.input_ids, indices, targets, microbatch.position_ids, place=first)
        state.preference = microbatch.preference
        return [state]
    assert microbatch.position_ids is None and microbatch.preference is None, "packed rows and pairs are not cut"
    return chunk_states(microbatch.input_ids, indices, targets, first, num_chunks)


class Engine:
    """A pool of workers over one weight store."""

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        store: WeightStore,
        backends: Sequence[Backend],
        *,
        seed: int = 0,
        head_chunk_tokens: int = 1024,
        mlp_chunk_tokens: int | None = None,
        label_smoothing: float = 0.0,
        recompute: str = "stage",
        unread: Mapping[int, Sequence[str]] | None = None,
        keep_inputs: bool = False,
        keep_blocks: int = 0,
        num_slots: int = 2,
        weight_cache_bytes: int = 0,
        watchdog_s: float | None = 600.0,
        transfers: TransferOptions | None = None,
    ) -> None:
        """
        Args:
            model: skeleton of the causal language model (parameters on the meta device), adapters included.
            split: how it comes apart.
            store: the weights.
            backends: one per worker.
            seed: of dropout masks and whatever else a model draws in training.
            head_chunk_tokens: target tokens per chunk of the LM head; part of what fixes a run's bits.
            mlp_chunk_tokens: the same of the blocks' feed-forward part, which is computed again in backward; None:
                whole.
            label_smoothing: of the training loss; scores are without it.
            recompute: `stage` (activations of one stage and microbatch at a time) or `layer` (of one layer).
            unread: per block, modules whose products a recompute leaves out, from `find_unread`.
            keep_inputs: keep the input of every layer after such a block on the host, so that its product can be left
                out within a stage too, not only at its end.
            keep_blocks: blocks, counted from the last, whose activations stay on the device from forward to backward
                where both run on the same worker. Blocks in 4 or 8 bit are recomputed all the same.
            num_slots: stages whose weights are on a device at once.
            weight_cache_bytes: of each device, for weights that stay there; see `weight_cache.py`.
            watchdog_s: fail after this long without progress, with all stacks on stderr; None: wait forever.
            transfers: how they share a link.
        """
        self.store = store
        self.split = split
        self.num_layers = len(store.layouts)
        self._seed = seed
        self._seeds_blocks = True
        self._head_chunk_tokens = head_chunk_tokens
        self._label_smoothing = label_smoothing
        self._recompute_each_layer = recompute == "layer"
        self._read_layers = frozenset(range(1, self.num_layers)) if recompute == "layer" else frozenset()
        if keep_inputs and unread:
            self._read_layers |= {index + 2 for index, names in unread.items() if names}
        self._keep_layers = frozenset(
            layer
            for layer in range(max(1, self.num_layers - 1 - keep_blocks), self.num_layers - 1)
            if not any(place.packed_bits for place in store.layouts[layer].places)
        )
        self._num_slots = num_slots
        options = transfers or TransferOptions()
        self._workers = []
        for index, backend in enumerate(backends):
            worker_model = WorkerModel(
                model, split, store.views, store.trainable_names, backend.device, mlp_chunk_tokens
            )
            worker_model.leave_out(unread or {})
            runner = StageRunner(index, worker_model, backend)
            names = split.layer_names()
            self._workers.append(Worker(index, runner, backend, store, names, options.chunk_bytes, weight_cache_bytes))
        self._pool = Pool(
            self._workers,
            options=options,
            watchdog_s=watchdog_s,
            is_out_of_memory=is_out_of_memory,
        )
        trained = [i for i, layout in enumerate(store.layouts) if layout.num_trainable_elements]
        self._first_trainable_layer = self._lowest_trained(trained)
        self._late_layers = self._ending_last()
        self._open = False
        self._programs: dict[int, Lowered] = {}
        self._under_way: list[StepUnderWay] = []
        """Oldest first, at most two."""
        self.step_in_work: StepInWork | None = None
        """For whoever watches, from any thread."""

    def _lowest_trained(self, trained: list[int]) -> int:
        return 0 if self._trains_tied_table() else min(trained, default=self.num_layers)

    def _trains_tied_table(self) -> bool:
        """Whether the table is kept with the head but trained through the embed layer too."""
        embedding = f"{self.split.embedding_path}.weight"
        tied = embedding in self.store.views and self.store.layer_of(embedding) > 0
        return tied and embedding in self.store.trainable_names

    def _ending_last(self) -> frozenset[int]:
        """Trained layers that get gradients from the embed layer, which are added when all workers are done."""
        head = {self.num_layers - 1} if self._trains_tied_table() else set()
        return frozenset(head | {0} if self.store.layouts[0].num_trainable_elements else head)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def grant_weight_cache(self, num_bytes: int) -> None:
        """Let each device keep weights in so much of its memory from the next step on; see `weight_cache.py`."""
        for worker in self._workers:
            worker.grant_cache(num_bytes)

    @property
    def late_layers(self) -> frozenset[int]:
        """Trained layers whose gradient is complete at the end of a step only."""
        return self._late_layers

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
        loss_scale: float = 1.0,
        version: int | None = None,
        on_gradient: OnGradient | None = None,
        part: Part | None = None,
    ) -> StepResult:
        """Forward and backward of one step; leaves the sum of gradients, times `loss_scale`, in the store.

        `start_step` and `finish_step`, whose arguments and errors these are.
        """
        return self.finish_step(
            self.start_step(
                microbatches,
                schedule,
                step=step,
                loss_scale=loss_scale,
                version=version,
                on_gradient=on_gradient,
                part=part,
            )
        )

    def may_follow(self, schedule: Schedule) -> bool:
        """Whether a step of `schedule` may start now: none is under way, or one with the same stages, and no weights
        stay on a device (for a worker gets other stages in every step)."""
        if not self._under_way:
            return True
        before = self._under_way[-1].context.program.schedule
        same = (before.forward_stages, before.backward_stages) == (schedule.forward_stages, schedule.backward_stages)
        return same and len(self._under_way) < 2 and not any(worker.cache.is_on for worker in self._workers)

    def start_step(
        self,
        microbatches: Sequence[Microbatch],
        schedule: Schedule,
        *,
        step: int,
        loss_scale: float = 1.0,
        version: int | None = None,
        on_gradient: OnGradient | None = None,
        part: Part | None = None,
    ) -> StepUnderWay:
        """Give a step to the workers, who take it up as soon as they are done with the one before; returns at once.

        Args:
            microbatches: as many as the schedule has, or as it has sequences: each is cut into the schedule's chunks.
            schedule: for as many workers as the engine has.
            step: index of the step, from 0; seeds dropout and chooses the store's gradient sum.
            loss_scale: the loss is multiplied by this before differentiation (float16).
            version: of the weights that every part of the step reads; None: the newest.
            on_gradient: see `StepContext`; called by the workers' threads.
            part: of a larger step; loss and gradients are then this part's share of the step's.

        Raises:
            OutOfDeviceMemoryError: exit code 5; the step can be run again after `use_less_memory`.
            InternalError: a worker failed or got stuck (exit code 1); names worker, stage, layers, microbatch, step.
        """
        assert self._open, "use the engine inside its `with` block"
        assert schedule.num_workers == self.num_workers
        assert schedule.num_microbatches == len(microbatches) * schedule.sequence_chunks
        assert self.may_follow(schedule)
        program = self._lowered(schedule).program
        context = self._context(microbatches, program, step, loss_scale, version=version, part=part)
        context.on_gradient = on_gradient
        return self._start(context, loss_scale)

    def finish_step(self, step: StepUnderWay) -> StepResult:
        """Block until the oldest step under way is done.

        Raises:
            OutOfDeviceMemoryError: exit code 5; the step can be run again after `use_less_memory`, if no other was
                under way.
            InternalError: a worker failed or got stuck (exit code 1); names worker, stage, layers, microbatch, step.
        """
        self._wait(step)
        return self._finish(step)

    def score(
        self,
        microbatches: Sequence[Microbatch],
        schedule: Schedule,
        *,
        step: int,
        adapters: bool = True,
        greedy: bool = False,
    ) -> list[HeadScores]:
        """Losses and log-probabilities of the target tokens of each microbatch, without dropout, gradients or backward.

        Args:
            microbatches: as many as the schedule has.
            schedule: forwards alone, from `build_forward`.
            step: for error messages.
            adapters: False leaves the adapters out: the base model's.
            greedy: also tell the most probable token at each target's place.

        Raises:
            as `run_step`.
        """
        assert self._open, "use the engine inside its `with` block"
        assert schedule.num_workers == self.num_workers and schedule.num_microbatches == len(microbatches)
        assert not self._under_way
        context = self._context(microbatches, self._lowered(schedule).program, step, 1.0, Scoring(adapters, greedy))
        self._wait(self._start(context, 1.0))
        scores = [state.scores for state in context.microbatches]
        return [item for item in scores if item is not None]

    def _start(self, context: StepContext, loss_scale: float) -> StepUnderWay:
        """Have the workers run the context's program."""
        lowered = self._lowered(context.program.schedule)
        self._reserve(context.program, keeps_weights=context.scoring is None)
        run = StepRun(context.program, lowered.links, context.step, context.progress, self._pool.works)
        steps = [WorkerStep(worker.index) for worker in self._workers]
        for worker, step in zip(self._workers, steps, strict=True):
            run.parts[worker.index] = WorkerPart(context, self._carrier(worker, context, run, lowered), step)
        under_way = StepUnderWay(context, run, steps, time.perf_counter(), loss_scale)
        self._under_way.append(under_way)
        self._show()
        self._pool.start(run)
        return under_way

    def _wait(self, step: StepUnderWay) -> None:
        assert self._under_way and step is self._under_way[0], "steps end in the order in which they began"
        try:
            self._pool.wait(step.run)
        except BaseException:
            self._under_way.clear()
            raise
        finally:
            self._under_way = self._under_way[1:]
            self._show()
        for worker in self._workers:
            worker.cache.step_done()

    def _show(self) -> None:
        """Let those who watch see the oldest step under way."""
        oldest = self._under_way[0] if self._under_way else None
        self.step_in_work = None
        if oldest is not None and oldest.context.scoring is None:
            self.step_in_work = StepInWork(oldest.context.step, oldest.started_s, self._workers, oldest.steps)

    def _carrier(self, worker: Worker, context: StepContext, run: StepRun, lowered: Lowered) -> Carrier:
        return Carrier(
            worker.backend, context.boundaries, run, lowered.downloads, recompute_each_layer=self._recompute_each_layer
        )

    def _context(
        self,
        microbatches: Sequence[Microbatch],
        program: Program,
        step: int,
        loss_scale: float,
        scoring: Scoring | None = None,
        version: int | None = None,
        part: Part | None = None,
    ) -> StepContext:
        progress = Progress()
        gradients = self.store.gradients_of(step)
        states: list[MicrobatchState] = []
        for microbatch in microbatches:
            states += _states_of(microbatch, len(states), program.schedule.sequence_chunks)
        for state in states if part is not None else ():
            assert part is not None
            state.place += part.first * program.schedule.sequence_chunks
        num_units = sum(state.num_units for state in states) if part is None else part.num_units
        folds = [
            GradientFold(layer, layout, gradients[layer], len(states), progress)
            if layout.num_trainable_elements and scoring is None
            else None
            for layer, layout in enumerate(self.store.layouts)
        ]
        copies = not self._workers[0].backend.aliases_host
        return StepContext(
            step=step,
            version=self.store.newest if version is None else version,
            gradients=gradients,
            program=program,
            microbatches=states,
            num_units=num_units,
            gradient_scale=loss_scale / max(num_units, 1),
            dropout_seed=self._seed,
            seeds_blocks=self._seeds_blocks,
            head_chunk_tokens=self._head_chunk_tokens,
            label_smoothing=self._label_smoothing,
            recompute_each_layer=self._recompute_each_layer,
            first_trainable_layer=self._first_trainable_layer,
            kept=self._kept(program) if scoring is None else frozenset(),
            layer_bytes=[layout.num_bytes for layout in self.store.layouts],
            attended_layers=self._attended(program),
            read_layers=self._read_layers,
            readers=hidden_readers(program.schedule, self._read_layers, self._lowest_read),
            progress=progress,
            boundaries=BoundaryStore(progress),
            folds=folds,
            device_folds=device_folds(program) if copies and scoring is None else frozenset(),
            scoring=scoring,
            late_layers=self._late_layers,
        )

    def use_less_memory(self) -> None:
        """After a step that ran out of it: from now on recompute one layer at a time, which changes no bit."""
        self._recompute_each_layer = True
        self._read_layers = frozenset(range(1, self.num_layers))
        self._keep_layers = frozenset()
        for worker in self._workers:
            worker.backend.release_unused()

    def _lowered(self, schedule: Schedule) -> Lowered:
        """The program of `schedule`; a run has few schedules and uses each for many steps."""
        known = self._programs.get(id(schedule))
        if known is None or known.program.schedule is not schedule:
            copies = not self._workers[0].backend.aliases_host
            program = lower_for_engine(schedule, self.store.layouts, self._num_slots, copies=copies)
            known = self._programs[id(schedule)] = Lowered(program, links_of(program), downloads_of(program))
        return known

    @property
    def _lowest_read(self) -> int:
        """Backward stages below this layer compute nothing, not even a recompute."""
        return self._first_trainable_layer if self._recompute_each_layer else 0

    def _attended(self, program: Program) -> frozenset[int]:
        """Blocks whose keys and values go from the forward to the backward."""
        if program.schedule.sequence_chunks == 1:
            return frozenset()
        stages = [stage for stage in program.schedule.backward_stages if stage[1] >= self._lowest_read]
        layers = {layer for stage in stages for layer in layer_range(stage)}
        return frozenset(layers - {0, self.num_layers - 1})

    def _kept(self, program: Program) -> KeptActivations:
        if program.schedule.sequence_chunks > 1:  # a graph would hold earlier chunks' keys and values too
            return frozenset()
        return kept_activations(program, {x for x in self._keep_layers if x >= self._first_trainable_layer})

    def _reserve(self, program: Program, *, keeps_weights: bool) -> None:
        """Take the devices' memory for a program: the weight cache, unless its choice hangs on a training program, then
        slots for what it leaves out."""
        for worker in self._workers:
            try:
                if keeps_weights or worker.cache.holds_all:
                    worker.keep_weights(program)
                worker.reserve_slots(self._num_slots, program)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                where = f"worker {worker.index} ({worker.backend.device}), slots for stages or weight cache"
                text = f"{type(error).__name__}: {error}".strip()
                raise OutOfDeviceMemoryError("out of memory", where=where, found=text, hint=MEMORY_HINT) from error

    def _finish(self, done: StepUnderWay) -> StepResult:
        context, started_s = done.context, done.started_s
        if context.microbatches:  # what no block did in the first step, none does: later steps need not watch for it
            self._seeds_blocks &= any(worker.runner.model.blocks_draw for worker in self._workers)
        seconds = time.perf_counter() - started_s
        self._fold_embed_gradients(context)
        squares = [float(context.square_sums[layer]) for layer, fold in enumerate(context.folds) if fold is not None]
        loss_sum = 0.0
        for state in context.microbatches:
            assert state.loss_sum is not None
            loss_sum += float(state.loss_sum)
        num_units = context.num_units
        assert len(context.boundaries) == 0, "a boundary tensor was never read"
        actions = []
        compute_s = {}
        for step in done.steps:
            backend, offset_s = self._workers[step.worker].backend, step.started_s - started_s
            for interval in step.intervals:
                begin_s = offset_s + backend.seconds_between(step.start, interval.start)
                end_s = offset_s + backend.seconds_between(step.start, interval.end)
                op = interval.op
                compute_s[op.id] = (started_s + begin_s, started_s + end_s)
                actions.append(ActionTime(Action(op.kind, op.stage, op.microbatch, op.worker), begin_s, end_s))
        return StepResult(
            loss=loss_sum / num_units if num_units else 0.0,
            num_target_tokens=sum(len(state.target_ids) for state in context.microbatches),
            rewards=tuple(state.rewards for state in context.microbatches if state.rewards is not None),
            gradient_norm=math.sqrt(sum(squares)) / done.loss_scale,
            step_s=seconds,
            actions=tuple(actions),
            num_workers=self.num_workers,
            started_s=started_s,
            transfers=statistics_of(context.program, compute_s, done.run.records, started_s),
            device_peak_bytes=tuple(step.peak_bytes for step in done.steps),
        )

    def _fold_embed_gradients(self, context: StepContext) -> None:
        """Add the embed layer's gradients in microbatch order: after the head's, where the table is tied to it."""
        touched: set[int] = {0} if context.folds[0] is not None else set()
        for index in sorted(context.embed_gradients):
            for item in context.embed_gradients[index]:
                layer = self.store.layer_of(item.name)
                fold = context.folds[layer]
                assert fold is not None
                touched.add(layer)
                target = self.store.gradient(item.name, context.step)
                if item.token_ids is None:
                    target.add_(item.gradient)
                else:  # ids are distinct, so the order of additions is fixed
                    target.index_add_(0, item.token_ids, item.gradient.float())
        threads = torch.get_num_threads()
        set_own_threads(1)  # a sum over several threads would depend on their number
        for layer in touched:
            context.square_sums[layer] = square_sum(context.gradients[layer])
        set_own_threads(threads)
        if context.on_gradient is not None:
            for layer in sorted(self._late_layers):
                context.on_gradient(layer, partial(float, context.square_sums[layer]))
