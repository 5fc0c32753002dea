"""The time of a step whose rows are shorter than `max_seq_length`, by the costs of its own microbatches. No torch."""

from __future__ import annotations

from dataclasses import replace

from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.planning.predict import Plan, reference_s, simulate_step


def step_of_rows(answer: Plan, *, num_microbatches: int, rows: float, length: int) -> tuple[float, float]:
    """Seconds of a step with the plan's stages, and the share in which workers wait.

    Args:
        rows: of a microbatch.
        length: tokens to which each is padded.
    """
    question, chunks = answer.question, answer.question.settings.sequence_chunks
    count = num_microbatches * chunks
    settings = replace(question.settings, max_seq_length=length, micro_batch_size=rows, num_microbatches=count)
    analytic = analytic_costs(question.architecture, settings, question.hardware)
    link = question.costs.link_bytes_per_s  # of the disk, where weights are read from there
    analytic = replace(analytic, costs=replace(analytic.costs, link_bytes_per_s=link))
    asked = replace(question, settings=settings, analytic=analytic)
    per_round = min(answer.microbatches_per_round, count)
    cut = replace(answer.cut, microbatches_per_round=answer.cut.microbatches_per_round and per_round)
    step = simulate_step(asked, cut)
    return step.step_s + reference_s(asked, cut), step.bubble_ratio
