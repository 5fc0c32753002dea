"""Scores of rows by the engine's forward alone: for evaluation, and for DPO's reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.engine.weights import REFERENCE
from roundpipe_cli.model.head import HeadScores
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.planning.cuts import forward_stages
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import SCORED_PER_WORKER, build_forward, every_stage


class InterruptedScoring(Exception):
    """A pass ended early because the user wants the run to stop."""


class Scorer:
    """Runs the engine's forward over rows, a bounded number of microbatches at a time."""

    def __init__(
        self, engine: Engine, planner: AdaptivePlanner, step_microbatches: int, stopping: Callable[[], bool]
    ) -> None:
        """
        Args:
            planner: whose stages of a training step are taken.
            step_microbatches: of a training step.
            stopping: whether the run is asked to stop.
        """
        self._engine, self._planner, self._stopping = engine, planner, stopping
        self._step_microbatches = step_microbatches
        self._schedules: dict[tuple[tuple[StageRange, ...], int], Schedule] = {}

    def scores(
        self, microbatches: Sequence[Microbatch], *, step: int, reference: bool = False, greedy: bool = False
    ) -> Iterator[HeadScores]:
        """Scores of each microbatch, in order; see `Engine.score`.

        Args:
            reference: by DPO's reference model: the weights that the store has put aside, or the base model.

        Raises:
            InterruptedScoring: between two passes, because the run is asked to stop.
        """
        size = SCORED_PER_WORKER * self._engine.num_workers
        for start in range(0, len(microbatches), size):
            if self._stopping():
                raise InterruptedScoring
            part = microbatches[start : start + size]
            kept = reference and self._engine.store.has_reference
            yield from self._engine.score(
                part,
                self._schedule(len(part)),
                step=step,
                adapters=kept or not reference,
                version=REFERENCE if kept else None,
                greedy=greedy,
            )

    def _schedule(self, num_microbatches: int) -> Schedule:
        step = self._planner.schedule(self._step_microbatches)
        own, workers = every_stage(step), self._engine.num_workers
        key = own, num_microbatches
        if key not in self._schedules:
            stages = forward_stages(
                self._planner.costs, own, step.backward_stages, num_workers=workers, num_microbatches=num_microbatches
            )
            self._schedules[key] = build_forward(stages, num_workers=workers, num_microbatches=num_microbatches)
        return self._schedules[key]
