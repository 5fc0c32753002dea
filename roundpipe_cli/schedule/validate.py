"""Checks of a schedule's stages: they cover the layers and suit its kind and the chunks of sequences."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.choices import CHUNK_SCHEDULES, SCHEDULE_KINDS
from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.errors import RefusedError


def check_stages(
    name: str,
    forward_stages: Sequence[StageRange],
    backward_stages: Sequence[StageRange],
    *,
    num_layers: int,
    num_workers: int,
) -> None:
    """Refuse stages that overlap, leave a gap, run out of the model or do not suit the schedule.

    Raises:
        RefusedError: names the direction, the stage and what was expected there.
    """
    if not backward_stages:
        raise RefusedError("no backward stages", expected="at least the stage that holds the head")
    for direction, stages in (("forward", forward_stages), ("backward", backward_stages)):
        _check_ranges(direction, stages, num_layers)
    if not SCHEDULE_KINDS[name].binds_stages:
        _check_count("backward", len(backward_stages), num_layers, 1)
        _check_count("forward", len(forward_stages), num_layers, 1)
        head_first, head_last = backward_stages[0]
        if head_last != num_layers - 1 or head_first > head_last:
            raise RefusedError(
                "the first backward stage must hold the head",
                where="backward stage 0",
                found=str([head_first, head_last]),
                expected=f"a range that ends with layer {num_layers - 1}",
            )
        _check_cover("forward", forward_stages, head_first)
    else:
        _check_count("forward", len(forward_stages), num_layers, num_workers)
        _check_bound_count(name, len(forward_stages), num_workers)
        _check_cover("forward", forward_stages, num_layers)
        if tuple(backward_stages) != tuple(reversed(forward_stages)):
            raise RefusedError(
                f"the backward stages of {name} are the mirror of its forward stages",
                where="backward stages",
                found=str([list(stage) for stage in backward_stages]),
                hint="leave them out",
            )
    _check_cover("backward", tuple(reversed(backward_stages)), num_layers)


def check_chunks(
    name: str, head_stage: StageRange, num_layers: int, num_microbatches: int, *, per_round: int, sequence_chunks: int
) -> None:
    """Refuse chunks of sequences that do not suit the schedule.

    Raises:
        RefusedError: names what does not fit.
    """
    if sequence_chunks == 1:
        return
    if name not in CHUNK_SCHEDULES:
        raise RefusedError(
            "this schedule cannot take a sequence in chunks: it goes backward before all chunks have gone forward",
            where="sequence_chunks",
            found=f"{name}, {sequence_chunks} chunks",
            expected=", ".join(CHUNK_SCHEDULES),
        )
    is_dealt = not SCHEDULE_KINDS[name].binds_stages
    for what, count in (("a step", num_microbatches), ("a round", per_round)):
        if (what == "a step" or is_dealt) and count % sequence_chunks:
            raise RefusedError(
                f"{what} holds whole sequences",
                where="microbatches",
                found=f"{count} microbatches, {sequence_chunks} chunks a sequence",
                expected=f"a multiple of {sequence_chunks}",
            )
    if is_dealt and head_stage != (num_layers - 1, num_layers - 1):
        raise RefusedError(
            "the stage with the head goes forward and backward at once, so it holds no blocks where sequences are cut",
            where="backward stage 0",
            found=str(list(head_stage)),
            expected=str([num_layers - 1, num_layers - 1]),
        )


def _check_ranges(direction: str, stages: Sequence[StageRange], num_layers: int) -> None:
    for index, (first, last) in enumerate(stages):
        if first < 0 or last < first - 1 or last >= num_layers:
            raise RefusedError(
                "not a range of layers",
                where=f"{direction} stage {index}",
                found=str([first, last]),
                expected=f"[a, b] with 0 <= a <= b <= {num_layers - 1}, or [a, a - 1] for an empty stage",
            )


def _check_count(direction: str, num_stages: int, num_layers: int, multiple: int) -> None:
    limit = -(-num_layers // multiple) * multiple
    if num_stages > limit:
        raise RefusedError(
            "more stages than layers",
            where=f"{direction} stages",
            found=f"{num_stages} stages",
            expected=f"at most {limit} for {num_layers} layers",
        )


def _check_bound_count(name: str, num_stages: int, num_workers: int) -> None:
    if SCHEDULE_KINDS[name].one_stage_each and num_stages != num_workers:
        raise RefusedError(
            f"{name} has one stage per worker",
            where="forward stages",
            found=f"{num_stages} stages, {num_workers} workers",
            expected=f"{num_workers} stages",
        )
    if num_stages == 0 or num_stages % num_workers:
        raise RefusedError(
            f"{name} needs a multiple of the workers as stages",
            where="forward stages",
            found=f"{num_stages} stages, {num_workers} workers",
            expected=f"{num_workers}, {2 * num_workers}, ... stages; an empty stage is [a, a - 1]",
        )


def _check_cover(direction: str, ascending: Sequence[StageRange], end: int) -> None:
    """Layers 0 .. end - 1 exactly once; `ascending` in layer order, empty stages anywhere."""
    next_layer = 0
    for first, last in ascending:
        if last < first:
            continue
        if first != next_layer:
            problem = "overlap" if first < next_layer else "leave a gap"
            raise RefusedError(
                f"{direction} stages {problem}",
                where=f"{direction} stage [{first}, {last}]",
                found=f"it starts with layer {first}",
                expected=f"layer {next_layer}",
            )
        next_layer = last + 1
    if next_layer != end:
        raise RefusedError(
            f"{direction} stages {'overlap' if next_layer > end else 'leave a gap'}",
            where=f"{direction} stages",
            found=f"they end with layer {next_layer - 1}",
            expected=f"layer {end - 1}"
            + (", the rest belongs to the first backward stage" if direction == "forward" else ""),
        )
