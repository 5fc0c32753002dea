"""One step of a run: its microbatches and what a reference says of them, forward and backward, and the update.

A step is computed again without what a full device may do without, with less, or without a device that was lost.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from roundpipe_cli.data.batching import Grouping, RowBatch
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import GradientOptions
from roundpipe_cli.engine.prepared import in_order_of_need
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.errors import OutOfDeviceMemoryError, RefusedError
from roundpipe_cli.events import Notice, Phase, Tell
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.adapt import Fit, resumed_fit
from roundpipe_cli.train.auto_cache import make_auto_cache
from roundpipe_cli.train.batches import make_microbatches
from roundpipe_cli.train.build import make_planner
from roundpipe_cli.train.checkpoint.resume import SavedState
from roundpipe_cli.train.finite import FiniteGuard
from roundpipe_cli.train.lost_devices import LostDevices
from roundpipe_cli.train.machines import Machines, Sharing, WholeSteps
from roundpipe_cli.train.optim.optimizer import make_optimizer
from roundpipe_cli.train.optim.updater import Updater
from roundpipe_cli.train.preference import scored_before
from roundpipe_cli.train.prepare.devices import updater_threads
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prove_chunks
from roundpipe_cli.train.scoring import Scorer
from roundpipe_cli.units import shown_step

RunStep = Callable[[int, list[Microbatch]], StepResult]
CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


def longest_batches(grouping: Grouping, num_rows: int) -> list[RowBatch]:
    """Microbatches of at most `num_rows` rows (or pairs), the longest of all, grouped as those of a step are."""
    order: list[int] = np.argsort(-grouping.lengths, kind="stable")[:num_rows].tolist()
    return grouping.group([(index,) for index in order])


class StepRunner:
    """Computes the steps of a run and updates the weights; `begin` before the first one."""

    def __init__(self, setup: Setup, grouping: Grouping | None, machines: Machines, tell: Tell) -> None:
        """`grouping`: of a step's rows; see `BatchSampler`."""
        self.setup, self._grouping, self._machines, self._tell = setup, grouping, machines, tell
        self.updater = Updater(
            setup.store,
            make_optimizer(setup.store, setup.recipe, setup.model, machines.elsewhere),
            num_threads=updater_threads(setup.devices),
            shards=machines.shards,
            order=in_order_of_need(setup.store, setup.split),
        )
        self.fit = Fit.of(setup.recipe)
        self.guard = FiniteGuard(setup.recipe, setup.dataset)
        self.planner = make_planner(setup)
        self._say(self.planner.notice)
        self.auto_cache = make_auto_cache(setup, self.planner, tell)
        self.updates_early = machines.is_only and not self._may_compute_again
        """Whether a layer is updated as soon as its gradient is complete."""
        self.planner.schedule(setup.recipe.microbatches_per_step)  # impossible stages are refused now

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    @property
    def _may_compute_again(self) -> bool:
        """Whether a step's update needs its whole gradient, or the step may be computed again."""
        recipe = self.recipe
        needs_norm = recipe.max_grad_norm > 0 or recipe.dtype == "float16"
        return needs_norm or recipe.on_oom == "adapt" or recipe.on_nonfinite == "skip" or self.auto_cache.is_open

    @property
    def recipe_now(self) -> Recipe:
        """The recipe as steps are computed now, where that is in more chunks than it says."""
        is_own = self.fit.sequence_chunks == self.recipe.pipeline.num_chunks
        return self.recipe if is_own else self.fit.recipe(self.recipe)

    def _say(self, *texts: str | None) -> None:
        for text in filter(None, texts):
            self._tell(Notice(text))

    def restore(self, state: SavedState, fit: Mapping[str, Any] | None) -> None:
        """Continue as the run of a checkpoint computed; `fit`: its `Fit.to_json`."""
        guard = self.guard
        guard.loss_scale, guard.num_updates = state.loss_scale, state.steps_since_overflow
        guard.num_skipped = state.skipped_steps
        self.setup.kept.update(state.kept)
        self.fit = resumed_fit(fit, self.recipe)
        if self.fit.recipe_lines(self.recipe):
            self.auto_cache.keep_usual_stages()

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint; see `SavedState`."""
        return {
            "loss_scale": self.guard.loss_scale,
            "num_updates": self.updater.optimizer.num_updates,
            "steps_since_overflow": self.guard.num_updates,
            "fit": self.fit.to_json(self.recipe),
            "kept": dict(self.setup.kept),
            "skipped_steps": self.guard.num_skipped,
        }

    def begin(self, engine: Engine, lost: LostDevices) -> None:
        """Compute by this engine, which is not started yet."""
        self._engine, self._lost = engine, lost
        self._references = self.scorer()
        self.sharing: Sharing | WholeSteps = WholeSteps()
        """How steps are shared with other machines."""
        if self.fit.recompute != self.recipe.pipeline.recompute:
            engine.use_less_memory()
        if self.fit.sequence_chunks > self.recipe.pipeline.num_chunks:
            prove_chunks(self.setup, self.recipe_now, self._tell)
            self._cut_into_chunks()

    def scorer(self, stopping: Callable[[], bool] = lambda: False) -> Scorer:
        """Scores rows by the forward of these steps; `stopping`: whether the run is asked to stop."""
        size = self.recipe.microbatches_per_step
        return Scorer(self._engine, self.planner, size, stopping, lost=self._lost)

    def try_longest(self, done: int) -> None:
        """Compute a step of the longest rows with the stages of later steps, where the recipe says so, and discard it:
        a device that is too small shows at once, not hours later, and every bit of the run is as without it."""
        asked, recipe, grouping = self.recipe.check_longest_rows, self.recipe, self._grouping
        if asked is False or (asked == "auto" and self.setup.devices[0] == "cpu"):
            return
        if recipe.packs or not self._machines.is_only:
            if asked is True:
                why = "packed sequences are about as long" if recipe.packs else "there are several machines"
                self._say(f"check_longest_rows: no step is tried before the first one, since {why}")
            return
        assert grouping is not None
        self._tell(Phase("computing a step of the longest rows"))
        self._adapting(done, longest_batches(grouping, recipe.rows_per_step), self._run_discarded)
        text = f"the longest rows ({grouping.lengths.max()} tokens) fit: a step of them was computed and discarded"
        self._say(f"{text}; check_longest_rows=false begins without it")

    def compute(
        self, step: int, batches: list[RowBatch], learning_rate: float
    ) -> tuple[StepResult, list[Microbatch], int]:
        """A step's forward and backward; its result, its microbatches, and their number of tokens."""
        if self.updates_early:
            self.updater.begin_early(step, learning_rate)
        result, microbatches, num_tokens = self._adapting(step, batches, self._run_step)
        if not self._machines.is_only:
            self.updater.wait()
        self.auto_cache.observe(self._engine, result)
        if not self.planner.is_settled:
            self.planner.observe(result.timeline)
        return result, microbatches, num_tokens

    def update(self, step: int, batches: list[RowBatch], result: StepResult, learning_rate: float) -> StepResult:
        """Begin the step's update, or leave it out where a number is not finite; the result, as it was judged.

        Raises:
            NotFiniteError: see `FiniteGuard.skip`.
        """
        if (poison := self.updater.poison(step)) is not None:  # a fault point's
            result = replace(result, gradient_norm=poison)
        if not self.guard.is_finite(result):
            self.guard.skip(step, batches, result, self._tell)
            self.updater.skip(step)
        elif not self.updates_early:
            factor = 1.0 / self.guard.loss_scale
            if self.recipe.max_grad_norm > 0:
                factor *= min(1.0, self.recipe.max_grad_norm / (result.gradient_norm + CLIP_EPSILON))
            self.updater.begin(step, learning_rate, factor)
            self.guard.updated()
        return result

    @property
    def may_overlap(self) -> bool:
        """Whether the update may run beside the next step: not while layers are timed, it would be in their times."""
        return self._machines.is_only and self.planner.is_settled

    def marks(self, step: int) -> dict[str, Any]:
        """Keys that the row of a step (counted from 1) in metrics.jsonl has beside its figures."""
        marks: dict[str, Any] = {}
        if self.fit.first_step == step and (segment := self.fit.to_json(self.recipe)):
            marks["segment"] = segment  # from here the loss curve has other microbatches
        if self.guard.num_in_a_row:
            marks["skipped"] = True
        return marks

    # -- computed, again where it must be ------------------------------------------------------------------------

    def _adapting(self, step: int, batches: list[RowBatch], run: RunStep) -> tuple[StepResult, list[Microbatch], int]:
        """One step by `run`, with its microbatches and tokens; again with less, where a device is full."""
        while True:
            try:
                microbatches, num_tokens = self._microbatches(step, batches)
                return run(step, microbatches), microbatches, num_tokens
            except OutOfDeviceMemoryError as error:
                spare = self.auto_cache.spare if self._machines.is_only and not self.updates_early else None
                smaller = None
                if self.recipe.on_oom == "adapt":
                    smaller = self.fit.smaller(shown_step(step)) or (None if spare else self._in_chunks(step))
                if spare is None and smaller is None:
                    raise
                problem = error.problems[0]
                cause = f"{problem.what} ({problem.where}: {problem.found})"
                error.__cause__ = None  # its frames hold tensors of the step
            gc.collect()
            self.auto_cache.give_up(self._engine)
            if spare is not None or smaller is None:  # an optional use of memory must not end a run
                self._say(f"step {shown_step(step)}: {cause}; the step is computed again without {spare}")
                continue
            self.fit, before = smaller, self.fit
            self._engine.use_less_memory()
            if is_cut := smaller.sequence_chunks > before.sequence_chunks:
                self._cut_into_chunks()
            lines = ", ".join(f"{key}: {value}" for key, value in smaller.recipe_lines(self.recipe).items())
            text = "this and all later steps use less memory; to begin a run this way, write"
            text = f"in chunks, sums differ in their last bits; {text}" if is_cut else text
            self._say(f"step {shown_step(step)}: {cause}; the step is computed again: {text} {lines}")

    def _in_chunks(self, step: int) -> Fit | None:
        """The fit with more chunks to a sequence, proven for this model; None where it has none, which is said."""
        longest = self.recipe.row_tokens if self.recipe.packs else int(self.setup.dataset.lengths.max())
        fit = self.fit.in_more_chunks(shown_step(step), longest)
        try:
            if fit is not None:
                recipe = fit.recipe(self.recipe)
                prove_chunks(self.setup, recipe, self._tell)
                make_planner(replace(self.setup, recipe=recipe)).schedule(recipe.microbatches_per_step)  # given stages
        except RefusedError as error:
            self._say(f"step {shown_step(step)}: rows cannot go on in chunks: {error.in_short}")
            return None
        return fit

    def _cut_into_chunks(self) -> None:
        """Plan for sequences in chunks from now on, which attend without masks where they can."""
        setup = replace(self.setup, recipe=self.recipe_now)
        if setup.attends_in_rows:
            self._engine.attend_in_rows()
        self.planner.become(make_planner(setup))
        setup.probe.forget()
        self.auto_cache.is_open = False

    def _microbatches(self, step: int, batches: list[RowBatch]) -> tuple[list[Microbatch], int]:
        """A step's microbatches, with what a reference says of them where there is one, and the number of tokens."""
        batches = self.fit.divide(batches, self._grouping)
        if not self.recipe.scores_answers:
            return make_microbatches(self.setup, batches)
        kind = self.recipe.objective_kind
        if kind.num_passes:
            self.updater.wait()
        if kind.estimates_kl and sum(map(len, batches)) == 1:
            self._say(f"step {shown_step(step)} has one row, whose divergence from the reference is taken as 0")
        return scored_before(self.setup, self._references, batches, step)

    def _run_discarded(self, step: int, microbatches: list[Microbatch]) -> StepResult:
        def run() -> StepResult:
            schedule = self.planner.expected(len(microbatches))
            return self._engine.run_step(microbatches, schedule, step=step, version=step)

        return self._lost.again(run, "the step of the longest rows")

    def _run_step(self, step: int, microbatches: list[Microbatch]) -> StepResult:
        scale, sharing = self.guard.loss_scale, self.sharing
        own, part = sharing.share_of(microbatches)
        on_gradient = sharing.begin(self.updater.gradient_complete if self.updates_early else None)

        def run() -> StepResult:
            return self._engine.run_step(
                own,
                self.planner.schedule(len(own)),
                step=step,
                version=step,
                part=part,
                gradients=GradientOptions(scale, on_gradient, frozenset(sharing.given)),
            )

        result = self._lost.again(run, f"step {shown_step(step)}", lasting=self._lasting)
        return sharing.finish(result, scale)

    def _lasting(self, hangs: bool) -> str | None:
        """Why a step that a device was lost in cannot be computed again: what it did to weights or other machines."""
        if self.updates_early and self.updater.has_begun:
            return "max_grad_norm: 0 updates layers before a step ends, and some of this step have been"
        if self.updates_early and hangs:
            return "max_grad_norm: 0 updates layers before a step ends, which the device that hangs may still begin"
        if hangs and self.sharing.given:
            return "other machines have gradients of this step that the device may still write"
        return None
