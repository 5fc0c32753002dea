"""Scores of rows by the engine's forward alone: for evaluation, and for DPO's reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.engine.weights import REFERENCE
from roundpipe_cli.model.head import HeadScores
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.planning.forward_stages import forward_stages
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import SCORED_PER_WORKER, build_forward, every_stage
from roundpipe_cli.schedule.program import lower
from roundpipe_cli.schedule.simulate import simulated_ends
from roundpipe_cli.train.lost_devices import LostDevices
from roundpipe_cli.units import counted


class InterruptedScoring(Exception):
    """A pass ended early because the user wants the run to stop."""


class Scorer:
    """Runs the engine's forward over rows, a bounded number of microbatches at a time."""

    def __init__(
        self,
        engine: Engine,
        planner: AdaptivePlanner,
        step_microbatches: int,
        stopping: Callable[[], bool],
        *,
        lost: LostDevices | None = None,
    ) -> None:
        """
        Args:
            planner: whose stages of a training step are taken.
            step_microbatches: of a training step.
            stopping: whether the run is asked to stop.
            lost: computes a pass again where a device was lost; None: that is an error.
        """
        self._engine, self._planner, self._stopping = engine, planner, stopping
        self._step_microbatches, self._lost = step_microbatches, lost
        self._schedules: dict[tuple[tuple[StageRange, ...], int, int], Schedule] = {}

    @property
    def lanes(self) -> tuple[int, ...]:
        """Indices of the run's devices that are not lost."""
        return self._engine.lanes

    def scores(
        self, microbatches: Iterable[Microbatch], *, step: int, reference: bool = False, top_k: int = 0
    ) -> Iterator[HeadScores]:
        """Scores of each microbatch, in order; see `Engine.score`.

        Args:
            reference: by the reference model: the weights that the store has put aside, or the base model.

        Raises:
            InterruptedScoring: between two passes, because the run is asked to stop.
        """
        size = SCORED_PER_WORKER * self._engine.num_workers
        kept = reference and self._engine.store.has_reference

        def score(part: Sequence[Microbatch]) -> list[HeadScores]:
            return self._engine.score(
                part,
                self._schedule(len(part)),
                step=step,
                adapters=kept or not reference,
                version=REFERENCE if kept else None,
                top_k=top_k,
            )

        waiting = iter(microbatches)
        while part := list(islice(waiting, size)):
            self.heed_stop()
            run = partial(score, part)
            at = f"a pass without training, after {counted(step, 'step')}"
            yield from run() if self._lost is None else self._lost.again(run, at)

    def heed_stop(self, *_: object, **__: object) -> bool:
        """Raise InterruptedScoring where the run is asked to stop; a stopping criterion of transformers' `generate`."""
        if self._stopping():
            raise InterruptedScoring
        return False

    def planned_s(self, num_microbatches: int) -> float:
        """Seconds that so many microbatches take, by what is known of the layers' times."""
        count = min(num_microbatches, SCORED_PER_WORKER * self._engine.num_workers)
        layers = (replace(one, forward_s=one.forward_s or one.backward_s / 2) for one in self._planner.costs.layers)
        costs = replace(self._planner.costs, layers=tuple(layers))  # a head may be timed backward alone
        return simulated_ends(lower(self._schedule(count), costs), costs).makespan_s * num_microbatches / count

    def _schedule(self, num_microbatches: int) -> Schedule:
        step = self._planner.schedule(self._step_microbatches)
        own, workers = every_stage(step), self._engine.num_workers
        key = own, workers, num_microbatches
        if key not in self._schedules:
            stages = forward_stages(
                self._planner.costs, own, step.backward_stages, num_workers=workers, num_microbatches=num_microbatches
            )
            self._schedules[key] = build_forward(stages, num_workers=workers, num_microbatches=num_microbatches)
        return self._schedules[key]
