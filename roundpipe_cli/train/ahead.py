"""Steps without a barrier: workers get the next step while they compute this one.

main thread    begin k | begin k + 1 | wait for k: row, update | begin k + 2 | wait for k + 1 ...
workers        k ............ k + 1 ...............                             each goes on when its own part is done
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from roundpipe_cli.data.batching import BatchSampler, Position, RowBatch
from roundpipe_cli.engine.engine import Engine, StepUnderWay
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.schedule.timeline import busy_s
from roundpipe_cli.train.batches import log_rows
from roundpipe_cli.train.setup import Setup
from roundpipe_cli.units import shown_step


@dataclass(frozen=True)
class Begun:
    """A step that the workers have."""

    batches: list[RowBatch]
    position: Position
    """Position of the data behind the step's rows."""
    microbatches: list[Microbatch]
    num_tokens: int
    under_way: StepUnderWay


class StepsAhead:
    """Begins steps, where the planner has a chain of them."""

    def __init__(
        self,
        setup: Setup,
        planner: AdaptivePlanner,
        sampler: BatchSampler,
        make_microbatches: Callable[[int, list[RowBatch]], tuple[list[Microbatch], int]],
    ) -> None:
        """
        Args:
            planner: says whether steps overlap, and of each how its stages are dealt out.
            sampler: whose position is that of the newest step begun.
            make_microbatches: of a step (from 0), with the number of tokens.
        """
        self._setup, self._planner, self._sampler, self._make = setup, planner, sampler, make_microbatches
        self.next: Begun | None = None
        """A step that began while the step before was under way."""
        self._ended_s = 0.0
        """End of the step before, by `time.perf_counter`."""
        self._recent: deque[tuple[list[float], float]] = deque(maxlen=len(setup.devices))
        """The last overlapping steps: seconds that each worker computed, and seconds that the step took."""

    def begin(self, engine: Engine, step: int) -> Begun | None:
        """The next step, begun now if it was not yet; None where it has to be computed alone."""
        begun, self.next = self.next, None
        return begun or self._begin(engine, step)

    def begin_next(self, engine: Engine, step: int) -> None:
        """Begin another step behind the current one, unless it has to be computed alone."""
        self.next = self._begin(engine, step)

    def _begin(self, engine: Engine, step: int) -> Begun | None:
        num_microbatches = self._setup.recipe.microbatches_per_step
        chain = self._planner.chain(num_microbatches)
        if chain is None:
            return None
        position = self._sampler.position
        batches = self._sampler.next_step()
        if len(batches) != num_microbatches:  # an epoch may end with fewer microbatches
            self._sampler.seek(position)
            return None
        log_rows(self._setup.dataset.rows, shown_step(step), batches)
        microbatches, num_tokens = self._make(step, batches)
        version = self._setup.store.step_version(step)
        under_way = engine.start_step(microbatches, chain.next(), step=step, version=version)
        return Begun(batches, self._sampler.position, microbatches, num_tokens, under_way)

    def span(self, result: StepResult, *, overlaps: bool) -> tuple[float, tuple[float, ...]]:
        """Seconds that a finished step took by itself, and the share of them for which each worker computed.

        Of steps that overlap the time from end to end counts; and since a worker may do more of one step and less of
        the next, the shares are those of the last few.
        """
        before_s, self._ended_s = self._ended_s, result.started_s + result.step_s
        if not overlaps:
            self._recent.clear()
            return result.step_s, result.utilization
        span_s = self._ended_s - max(before_s, result.started_s)
        self._recent.append((busy_s(result.timeline), span_s))
        whole_s = sum(seconds for _, seconds in self._recent)
        busy = [sum(shares) / whole_s for shares in zip(*(each for each, _ in self._recent), strict=True)]
        return span_s, tuple(min(1.0, share) for share in busy)
