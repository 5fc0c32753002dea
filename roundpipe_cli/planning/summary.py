"""The verdict on a plan in one word, and its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roundpipe_cli.costs.machine import MAX_PARAMETERS_ON_CPU
from roundpipe_cli.planning.predict import Plan

WAITING_SHARE = 0.5
"""A plan is SLOW if workers wait for more than this share of the time."""
Word = Literal["FITS", "SLOW", "DOES NOT FIT"]


@dataclass(frozen=True, slots=True)
class Summary:
    """The verdict on a plan."""

    word: Word
    reasons: tuple[str, ...] = ()
    """Why the plan is slow, or which memory is short by how much."""


def summary_of(plan: Plan) -> Summary:
    """FITS, DOES NOT FIT, or SLOW if the machine mostly waits."""
    if not plan.verdict.fits:
        return Summary("DOES NOT FIT", plan.verdict.short_reasons)
    rate = f"{plan.tokens_per_s:,.0f} tokens/s"
    question = plan.question
    on_cpu = all(device.is_cpu for device in question.hardware.devices)
    if on_cpu and question.architecture.parameters > MAX_PARAMETERS_ON_CPU:
        return Summary("SLOW", (f"a model of this size on the CPU: {rate}",))
    if question.reads_disk:
        return Summary("SLOW", (f"weights come from disk in every round: {rate}",))
    if plan.bubble_ratio > WAITING_SHARE:
        what = max(plan.needs_s, key=lambda name: plan.needs_s[name])
        waits = f"workers wait {100 * plan.bubble_ratio:.0f} % of the time"
        reason = f"{waits}, most for the {what}: {rate}" if what != "arithmetic" else f"{waits}: {rate}"
        return Summary("SLOW", (reason,))
    return Summary("FITS")
