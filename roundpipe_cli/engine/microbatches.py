"""The states of a step's microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.engine.activations import MicrobatchState
from roundpipe_cli.engine.sequences import chunk_states
from roundpipe_cli.engine.step import Microbatch, Part
from roundpipe_cli.model.head import target_rows


def microbatch_states(
    microbatches: Sequence[Microbatch], num_chunks: int, part: Part | None = None
) -> list[MicrobatchState]:
    """A step's microbatches, each sequence cut into `num_chunks`; `part`: see `Engine.start_step`."""
    states: list[MicrobatchState] = []
    for microbatch in microbatches:
        states += _states_of(microbatch, len(states), num_chunks)
    if part is not None:
        for state in states:
            state.place += part.first * num_chunks
    return states


def _states_of(microbatch: Microbatch, first: int, num_chunks: int) -> list[MicrobatchState]:
    """The states of one microbatch, the first of whose chunks has the index `first`."""
    indices, targets = target_rows(microbatch.labels)
    if num_chunks == 1:
        state = MicrobatchState(first, microbatch.input_ids, indices, targets, microbatch.position_ids, place=first)
        state.preference, state.lengths = microbatch.preference, microbatch.lengths
        return [state]
    assert microbatch.position_ids is None and microbatch.preference is None, "packed rows and pairs are not cut"
    return chunk_states(microbatch.input_ids, indices, targets, first, num_chunks)
