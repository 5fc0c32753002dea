"""From a prepared dataset to the microbatches of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from roundpipe_cli.data.batching import BatchSampler, RowBatch
from roundpipe_cli.data.collate import collate, pad_token_id
from roundpipe_cli.data.tokenized import Row, TokenizedRows
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.model.distillation import TeacherScores
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.steps import rows_of_steps

ROW_LOG_VARIABLE = "ROUNDPIPE_ROW_LOG"


def make_sampler(setup: Setup) -> BatchSampler:
    """Which rows each step has; see `rows_of_steps`."""
    return rows_of_steps(setup.recipe, setup.dataset)


def make_microbatches(setup: Setup, batches: Sequence[RowBatch]) -> tuple[list[Microbatch], int]:
    """Microbatches of the given rows, and the number of their tokens without padding."""
    pad, rows = pad_token_id(setup.tokenizer), setup.dataset.rows
    parts = ([[rows[index] for index in sequence] for sequence in batch] for batch in batches)
    microbatches = [
        taught(setup, _collated(part, pad, packs=setup.recipe.packs), [row for sequence in part for row in sequence])
        for part in parts
    ]
    return microbatches, sum(int(one.lengths.sum()) for one in microbatches if one.lengths is not None)


def taught(setup: Setup, microbatch: Microbatch, rows: Sequence[Row]) -> Microbatch:
    """The microbatch of these rows with the teacher's figures, where the objective has a teacher."""
    if setup.teacher is None:
        return microbatch
    settings, (ids, values, left) = setup.recipe.distill, map(torch.from_numpy, setup.teacher.figures(rows))
    return replace(microbatch, teacher=TeacherScores(ids, values, left, settings.weight, settings.temperature))


def collate_rows(rows: Sequence[Row], pad: int) -> Microbatch:
    """One microbatch of these rows, not packed."""
    return _collated([[row] for row in rows], pad, packs=False)


def _collated(sequences: Sequence[Sequence[Row]], pad: int, *, packs: bool) -> Microbatch:
    made = collate(sequences, pad, packed=packs)
    position_ids = None if made.position_ids is None else torch.from_numpy(made.position_ids)
    lengths = torch.tensor([sum(len(row.input_ids) for row in sequence) for sequence in sequences])
    weights = None if made.weights is None else torch.from_numpy(made.weights)
    ids, labels = torch.from_numpy(made.input_ids), torch.from_numpy(made.labels)
    return Microbatch(ids, labels, position_ids, lengths=lengths, weights=weights)


def describe_order(setup: Setup, sampler: BatchSampler) -> list[str]:
    """The effect of packing and weights on the rows, a line each."""
    mix, lines = sampler.mix, []
    if mix.is_mixed:
        shares = [
            f"{count} rows of {dataset.path} ({100 * count / mix.rows_per_epoch:.0f} %, "
            f"each row {count / max(rows, 1):.2f} times)"
            for dataset, rows, count in zip(setup.recipe.datasets, mix.source_rows, mix.epoch_rows, strict=True)
        ]
        lines.append("mixed by weight: an epoch has " + ", ".join(shares))
    if setup.recipe.packs:
        num_sequences = sampler.num_sequences(0)
        tokens = int(setup.dataset.rows.lengths[mix.order(0)].sum())
        capacity = num_sequences * setup.recipe.row_tokens
        lines.append(
            f"packing: {mix.rows_per_epoch} rows in {num_sequences} sequences of {setup.recipe.row_tokens} "
            f"tokens, {100 * tokens / capacity:.1f} % full"
        )
    return lines


def log_rows(all_rows: TokenizedRows, step: int, batches: Sequence[RowBatch]) -> None:
    """Append the ids of a step's rows to the file that the environment variable names, if it does: for tests."""
    path = os.environ.get(ROW_LOG_VARIABLE)
    if path:
        rows = [all_rows[index].row_id for batch in batches for sequence in batch for index in sequence]
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "rows": rows}) + "\n")
