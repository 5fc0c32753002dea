"""Facts that the engine reads out of a lowered schedule and a model: stages, kept activations, trained layers.

The same program drives the simulator. The engine takes from it each worker's compute operations in order, and its
visits: which layers a worker holds in which slot, from which operation to which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.program import Op, Program, lower
from roundpipe_cli.units import shown_step

if TYPE_CHECKING:
    from roundpipe_cli.model.layout import LayerLayout


def lower_for_engine(
    schedule: Schedule, layouts: Sequence[LayerLayout], num_slots: int, *, copies: bool = True
) -> Program:
    """Lower `schedule` for a model of these layers. Times do not matter here: the engine measures them.

    Args:
        copies: whether tensors have to be moved to the devices; without, the program has compute operations only.
    """
    last = len(layouts) - 1
    layers = tuple(
        LayerCost(
            layout.name,
            forward_s=0.0,
            backward_s=0.0,
            recompute=index < last,
            param_bytes=layout.num_bytes if copies and index else 0,  # the embedding stays on the host
            boundary_bytes=1 if copies and index < last else 0,  # their number depends on the microbatch
            grad_bytes=4 * layout.num_trainable_elements if copies and index else 0,
        )
        for index, layout in enumerate(layouts)
    )
    return lower(schedule, CostModel("engine", layers, slots=num_slots))


def stage_layers(schedule: Schedule, op: Op) -> StageRange:
    """The layers of a compute operation."""
    stages = schedule.forward_stages if op.kind is Kind.FORWARD else schedule.backward_stages
    return stages[op.stage]


def layer_range(layers: StageRange) -> range:
    """The layers of a stage as a range."""
    return range(layers[0], layers[1] + 1)


def hidden_readers(schedule: Schedule, read_layers: Collection[int], lowest: int = 0) -> Counter[int]:
    """How many stages read the hidden states at the input of each layer, for one microbatch.

    Backward stages read their first layer's, and those of `read_layers`, but for the stage with the head: it goes
    through its layers in one go. Backward stages below layer `lowest` read nothing.
    """
    readers: Counter[int] = Counter()
    for first, last in schedule.forward_stages:
        if first <= last:
            readers[first] += 1
    for index, (first, last) in enumerate(schedule.backward_stages):
        if first > last or last < lowest:
            continue
        readers[first] += 1
        if index > 0:
            readers.update(layer for layer in range(first + 1, last + 1) if layer in read_layers)
    return readers


def backward_ops(program: Program, visit: int) -> list[Op]:
    """The backward operations of a visit, in order."""
    return [program.ops[op] for op in program.visits[visit].ops if program.ops[op].kind is Kind.BACKWARD]


def weight_readers(
    program: Program, trained: Collection[int], embedding: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """Trained layer -> operations before which the host must have its weights: the upload of each visit, or where
    nothing is uploaded its first computation. The embedding is read from host memory in any case.

    Args:
        embedding: layers in which its parameters lie; not only its own where the table is tied to the head.
    """
    found: dict[int, list[int]] = {layer: [] for layer in trained}
    for visit in program.visits:
        own = set(layer_range(visit.layers))
        uploaded = own - {0} if visit.upload >= 0 else set()
        on_host = own - uploaded | (set(embedding) if 0 in own else set())
        for op_id, layers in ((visit.upload, uploaded), (visit.ops[0], on_host)):
            for layer in layers.intersection(trained):
                found[layer].append(op_id)
    return {layer: tuple(op_ids) for layer, op_ids in found.items()}


def device_folds(program: Program) -> frozenset[int]:
    """Layers whose gradient sum travels with their stage; the others are added up on the host."""
    schedule = program.schedule
    on_host = {layer for stage in program.host_folded for layer in layer_range(stage)}
    return frozenset(layer for stage in schedule.backward_stages for layer in layer_range(stage)) - on_host


def describe_op(op: Op, schedule: Schedule, step: int) -> str:
    """Name of an operation, for error messages.

    Args:
        step: its index, from 0.
    """
    first, last = stage_layers(schedule, op)
    kind = op.kind.name.lower()
    return f"{kind} of stage {op.stage} (layers {first}-{last}), microbatch {op.microbatch}, step {shown_step(step)}"
