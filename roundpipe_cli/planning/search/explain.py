"""Sentences that explain a plan: its lower bound, what limits it, and what a change would gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe_cli.planning.search.batch import Batch, BatchScorer
from roundpipe_cli.planning.search.chain import RoundChain
from roundpipe_cli.planning.search.run import Candidate
from roundpipe_cli.planning.stages import StageSums
from roundpipe_cli.units import format_seconds


@dataclass(frozen=True, slots=True)
class Scorers:
    """The scorer of a search, and scorers for machines on which one thing costs nothing."""

    as_it_is: BatchScorer
    without_hops: BatchScorer
    without_links: BatchScorer


@dataclass(frozen=True, slots=True)
class HostUpdates:
    """The host's updates of one step."""

    seconds: float
    staleness: int


def explain(
    found: Sequence[Candidate],
    *,
    sums: StageSums,
    chain: RoundChain,
    scorers: Scorers,
    updates: HostUpdates,
) -> tuple[str, ...]:
    """One fact a line, for the fastest of `found`."""
    best, scorer = found[0], scorers.as_it_is
    lines = [_shape(best), _binds(best, sums, chain, scorer)]
    for other, change in (
        (scorers.without_hops, "hops took no time"),
        (scorers.without_links, "transfers took no time"),
    ):
        if other.hop_s != scorer.hop_s or other.links != scorer.links:
            lines.append(_gain(best, _score(other, best, chain), f"If {change}, this plan"))
    if updates.seconds:
        where = "after every step" if updates.staleness == 0 else "beside the next step"
        lines.append(f"The host's updates take {format_seconds(updates.seconds)} {where}.")
    others = [candidate for candidate in found if candidate.shape != best.shape]
    if others:
        second = others[0]
        slower = 100 * (second.value_s / best.value_s - 1)
        lines.append(
            f"Next best: {second.num_forward} forward and {_later(second)} backward stages, {slower:.2f} % slower."
        )
    return tuple(lines)


def _score(scorer: BatchScorer, candidate: Candidate, chain: RoundChain) -> float:
    numpy = scorer.numpy
    batch = Batch(
        numpy.array([candidate.sizes]), numpy.array([candidate.num_forward]), numpy.array([candidate.num_stages])
    )
    works, _ = scorer.works(batch)
    return float(scorer.step_s(works, chain)[0])


def _later(candidate: Candidate) -> int:
    return candidate.num_stages - candidate.num_forward


def _shape(best: Candidate) -> str:
    sizes = best.sizes
    forward, later = sizes[: best.num_forward], sizes[best.num_forward + 1 :]
    fused = sizes[best.num_forward] - 1
    head = "the head alone" if not fused else f"the head and the last {fused} layers, which are not recomputed"
    parts = [f"{len(forward)} forward stages of {_span(forward)} layers"] if forward else []
    parts.append(f"{_later(best)} backward stages, the first with {head}")
    if later:
        parts.append(f"the others of {_span(later)} layers")
    return ", ".join(parts) + "."


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return str(low) if low == high else f"{low} to {high}"


def _binds(best: Candidate, sums: StageSums, chain: RoundChain, scorer: BatchScorer) -> str:
    body = sums.num_layers - best.sizes[best.num_forward]
    count = sum(chain.round_sizes[: chain.rounds_per_step])
    whole = sums.forward_s[0][sums.num_layers] + sums.backward_s[0][sums.num_layers]
    busy = count * (whole + sums.recompute_s[0][body]) / float(scorer.speeds.sum())
    share = 100 * busy / best.value_s if best.value_s else 100.0
    text = f"{format_seconds(best.value_s)} per step, of which the workers compute {share:.1f} %"
    recompute = 100 * count * sums.recompute_s[0][body] / float(scorer.speeds.sum()) / best.value_s if busy else 0.0
    text += f" ({recompute:.1f} % recompute)"
    idle = "waiting for uploads, " if scorer.links else ""
    return f"{text}; the rest is {idle}fill, drain and hops." if share < 99.95 else f"{text}: compute binds."


def _gain(best: Candidate, value_s: float, what: str) -> str:
    gain = 100 * (1 - value_s / best.value_s) if best.value_s else 0.0
    return f"{what} would be {max(gain, 0.0):.2f} % faster."
