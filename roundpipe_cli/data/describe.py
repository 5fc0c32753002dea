"""A tokenised dataset described in plain values: lengths, fill, and samples with what is trained in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.tokenized import Packer, PackingChoice, Row, RowMix, TokenizedDataset, count_sequences
from roundpipe_cli.units import round_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_BINS = 12


@dataclass(frozen=True)
class TextPiece:
    """A run of tokens of a row with the same weight."""

    text: str
    trained: bool
    num_tokens: int
    weight: float
    """Factor in the loss; below 0 in an answer that is not wanted."""


@dataclass(frozen=True)
class RowSample:
    """A row that is shown."""

    kind: str
    """`first`, `longest` or `random`."""
    where: str
    row_id: int
    answer: str | None
    """Name of its side, where a row has several, or `unwanted` by its label."""
    input_ids: list[int]
    labels: list[int]
    pieces: tuple[TextPiece, ...]


@dataclass(frozen=True)
class Fill:
    """The rows of one epoch after packing."""

    num_sequences: int
    ratio: float
    """Tokens / (sequences x max_seq_length)."""
    choice: PackingChoice | None = None
    """The choice of `packing: auto`; None where the recipe says yes or no."""


def histogram(lengths: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(from, to, rows) of bins of equal round width, `to` excluded, the last with the longest row."""
    width = max(1, round(round_step(int(lengths.max()) + 1, NUM_BINS)))
    counts = np.bincount(lengths // width)
    return [(index * width, (index + 1) * width, int(count)) for index, count in enumerate(counts)]


def fill_with_packing(
    mix: RowMix, lengths: npt.NDArray[np.int64], max_tokens: int, seed: int, *, shuffle: bool
) -> Fill:
    """Fill of the first epoch."""
    num_sequences = count_sequences(mix, Packer(lengths, max_tokens, seed, shuffle))
    return Fill(num_sequences, float(lengths[mix.order(0)].sum()) / (num_sequences * max_tokens))


def samples(
    dataset: TokenizedDataset, tokenizer: PreTrainedTokenizerBase, seed: int, names: Sequence[str | None]
) -> list[RowSample]:
    """The first row, the longest and a random one, all sides of each; `names`: of the sides."""
    lengths = np.sum([side.lengths for side in dataset.sides], axis=0)
    picked = {"first": 0, "longest": int(lengths.argmax()), "random": random.Random(seed).randrange(len(lengths))}
    made = []
    for kind, index in picked.items():
        where = dataset.where(dataset.rows[index].row_id)
        sides = zip(names, dataset.sides, strict=True)
        made += [_sample(rows[index], tokenizer, kind, where, answer=answer) for answer, rows in sides]
    return made


def _sample(row: Row, tokenizer: PreTrainedTokenizerBase, kind: str, where: str, *, answer: str | None) -> RowSample:
    trained = row.labels != IGNORED_LABEL
    weights = trained.astype(np.float32) if row.weights is None else row.weights
    borders = [0, *(np.flatnonzero(weights[1:] != weights[:-1]) + 1).tolist(), len(weights)]
    answer = answer or ("unwanted" if row.is_rejected else None)
    pieces = []
    for start, stop in zip(borders, borders[1:], strict=False):
        ids = row.input_ids[start:stop].tolist()
        text: Any = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        pieces.append(TextPiece(str(text), bool(trained[start]), stop - start, float(weights[start])))
    return RowSample(kind, where, row.row_id, answer, row.input_ids.tolist(), row.labels.tolist(), tuple(pieces))


def sequence_lengths(dataset: TokenizedDataset) -> npt.NDArray[np.int64]:
    """Tokens of every sequence that is trained: of preference pairs, of both answers."""
    return np.concatenate([side.lengths for side in dataset.sides])


def data_document(
    dataset: TokenizedDataset, fill: Fill | None, shown: list[RowSample], max_seq_length: int
) -> dict[str, Any]:
    """The report in the types of JSON.

    Args:
        fill: None for rows that are not packed.
    """
    report, lengths = dataset.report, sequence_lengths(dataset)
    packing: dict[str, Any] | None = None
    if fill is not None:
        packing = {"sequences": fill.num_sequences, "fill": fill.ratio}
        if fill.choice is not None:
            packing["auto"] = {"packs": fill.choice.packs, "why": fill.choice.why}
    return {
        "rows": {
            "read": report.rows_read,
            "kept": report.rows_kept,
            "bad": report.rows_bad,
            "too_long": len(report.too_long_rows),
            "truncated": report.rows_truncated,
            "untrained": len(report.untrained_rows),
        },
        "tokens": {
            "total": report.total_tokens,
            "trained": report.trained_tokens,
            "lost": report.lost_tokens,
            "trained_share": report.trained_tokens / report.total_tokens,
        },
        "lengths": {
            "shortest": int(lengths.min()),
            "median": float(np.median(lengths)),
            "mean": float(lengths.mean()),
            "longest": int(lengths.max()),
            "longest_before_cut": report.longest_row_tokens,
            "histogram": [{"from": low, "to": high, "rows": rows} for low, high, rows in histogram(lengths)],
        },
        "pairs": None if len(dataset.sides) == 1 else len(dataset.rows),
        "packing": packing and {"max_seq_length": max_seq_length, **packing},
        "sources": [
            {**asdict(source), "bad_rows": [{"row": number, **asdict(fault)} for number, fault in source.bad_rows]}
            for source in report.sources
        ],
        "content_hash": dataset.content_hash,
        "sources_from_cache": dataset.num_cached,
        "notices": list(dataset.notices),
        "samples": [
            {
                **asdict(sample),
                "pieces": [{"text": one.text, "trained": one.trained, "weight": one.weight} for one in sample.pieces],
            }
            for sample in shown
        ],
    }
