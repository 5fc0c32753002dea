"""The rounds by which partitions are compared, and what links and workers are like. Seconds."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.costs.cost import CostModel


@dataclass(frozen=True, slots=True)
class RoundChain:
    """Rounds that are run: the microbatches of each, and between which rounds the time per step is measured."""

    round_sizes: tuple[int, ...]
    rounds_per_step: int
    from_round: int
    """Rounds before the measured ones; 0 for a single step."""
    measured_steps: int
    waits: bool = False
    """Whether a step begins no sooner than the one two before it has ended, whose update makes the weights it reads."""

    def step_s(self, from_s: float, to_s: float) -> float:
        """Time per step, given the times before and after the measured rounds."""
        return (to_s - from_s) / self.measured_steps

    def since_first_s(self, first_s: float, to_s: float) -> float:
        """Time per step of all steps but the first, given the times after the first and after all."""
        return (to_s - first_s) / (len(self.round_sizes) // self.rounds_per_step - 1)


def chain_of(
    num_microbatches: int, per_round: int, *, staleness: int, num_steps: int, waits: bool = False
) -> RoundChain:
    """The rounds that decide a run's time per step. With staleness 0 a barrier separates steps: one step tells all."""
    step = _round_sizes(num_microbatches, per_round)
    if staleness == 0 or num_steps == 1:
        return RoundChain(step, len(step), 0, 1)
    half = num_steps // 2
    return RoundChain(step * num_steps, len(step), len(step) * half, num_steps - half, waits)


def steady_chain(num_microbatches: int, per_round: int, min_rounds: int, *, waits: bool = False) -> RoundChain:
    """Enough chained steps to see how fast they follow each other."""
    rounds = -(-num_microbatches // per_round)
    num_steps = 2 * -(-min_rounds // (2 * rounds))
    return chain_of(num_microbatches, per_round, staleness=1, num_steps=num_steps, waits=waits)


def _round_sizes(num_microbatches: int, per_round: int) -> tuple[int, ...]:
    return tuple(min(per_round, num_microbatches - first) for first in range(0, num_microbatches, per_round))


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """The links and slots that the default accounting adds to the published one."""

    bytes_per_s: float
    """Rate of each worker's link in each direction."""
    slots: int


def worker_speeds(costs: CostModel, num_workers: int) -> tuple[float, ...]:
    """Relative speed of each worker; those beyond the list run at speed 1."""
    speeds = tuple(costs.worker_speed or ())[:num_workers]
    return speeds + (1.0,) * (num_workers - len(speeds))
