"""Stages whose gradient sums are added up on the host, because they cannot travel with the stage."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.costs.cost import LayerCost, StageRange
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.operations import Op, Visit


def host_folded(
    schedule: Schedule, layers: Sequence[LayerCost], visits: Sequence[Visit], ops: Sequence[Op]
) -> frozenset[StageRange]:
    """Backward stages as `Program.host_folded` has them."""
    spans: dict[tuple[StageRange, int], list[list[int]]] = {}
    workers: dict[tuple[StageRange, int, int], set[int]] = {}
    for visit in visits:
        backward_ops = [ops[op_id] for op_id in visit.ops if ops[op_id].kind is Kind.BACKWARD]
        trained = any(layer.grad_bytes for layer in layers[visit.layers[0] : visit.layers[1] + 1])
        if not backward_ops or not trained:
            continue
        places = [schedule.backward_place(op.stage, op.microbatch) for op in backward_ops]
        spans.setdefault((visit.layers, visit.step), []).append(places)
        for op in backward_ops:
            turn = op.microbatch % schedule.num_microbatches // schedule.microbatches_per_round
            workers.setdefault((visit.layers, visit.step, turn), set()).add(visit.worker)
    # Workers that share a stage's microbatches of one round would wait for each other's sums.
    folded = {stage for (stage, _, _), sharing in workers.items() if len(sharing) > 1}
    for (stage, step), shares in spans.items():
        first = step * schedule.num_microbatches
        in_turn = [microbatch for share in sorted(shares) for microbatch in share]
        if in_turn != list(range(first, first + len(in_turn))):
            folded.add(stage)
    return frozenset(folded)
