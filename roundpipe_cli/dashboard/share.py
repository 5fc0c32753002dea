"""One picture of a run to share: model, machine, busy share, and the work of each worker in one step."""

from __future__ import annotations

import time

from roundpipe_cli.dashboard.state import DashboardState
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import StepTimeline
from roundpipe_cli.schedule.pictures import BOTH, interval_of, svg_picture
from roundpipe_cli.schedule.timeline import Timeline
from roundpipe_cli.units import format_loss, format_seconds


def shared_picture(state: DashboardState, *, where: str) -> str:
    """An SVG document of the newest step of which it is known what the workers did.

    Args:
        where: what is shown, for an error.

    Raises:
        RefusedError: there is no such step yet.
    """
    run, step, timeline = state.run, state.step, state.timeline
    if run is None or step is None or timeline is None:
        raise RefusedError(
            "there is no step to draw yet",
            where=where,
            found="a run whose workers have not finished a step",
            expected="a run with at least one finished step in events.jsonl",
            hint="wait for the first step, or draw a simulated one: roundpipe watch --demo 8x4090 --svg run.svg",
        )
    source = "; ".join(message.text for message in state.messages)
    if not state.is_simulated:
        day = time.strftime("%Y-%m-%d", time.gmtime(run.time_s))
        source = f"measured by roundpipe on {day}, step {timeline.step} of {step.num_steps}"
    heading = f"{run.title} {run.settings} on {state.pool.replace(' ', '')}, {step.tokens_per_s:,.0f} tokens/s"
    facts = [f"one step: {format_seconds(step.step_s)}"]
    if run.goal == "loss":
        facts.append(f"loss {format_loss(step.loss)}")
    facts.append(f"bubble {100 * step.bubble_ratio:.1f} %")
    return svg_picture(
        [(", ".join(facts), timeline_of(timeline, len(run.devices)))],
        heading=heading,
        note=source,
        pool=state.worker_word,
    )


def timeline_of(step: StepTimeline, num_workers: int) -> Timeline:
    """The events of a step as a timeline, from which every figure has its one definition."""
    found = (interval_of(span) for span in step.spans if -1 <= span.worker < num_workers)
    return Timeline(
        num_workers,
        tuple(item for item in found if item is not None),
        fused_head=any(span.kind == BOTH for span in step.spans),
    )
