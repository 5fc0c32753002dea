"""Tokenized rows shared by all readers: their order, what is packed, and what is held out for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import overload

import numpy as np
import numpy.typing as npt

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.rows import DataReport
from roundpipe_cli.data.shards import Shard
from roundpipe_cli.data.sources import Source
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.units import counted

# The rows of an epoch and their order: a pure function of (sizes, weights, seed, epoch).
#
# Weights all equal: every row once an epoch, whatever the sizes of the sources. Otherwise each source has its share of
# the epoch's rows, weight / sum of weights, and is gone through pass after pass: a row comes again only when all rows
# of its source have come equally often, also across the border of two epochs.
#
#     sources a: 4 rows, weight 3; b: 4 rows, weight 1; an epoch has 8 rows, 6 of a and 2 of b
#     epoch 0: a2 a0 a3 a1 | a1 a3   b3 b0
#     epoch 1: a0 a2 | a3 a1 a0 a2   b1 b2 |      the bars are the borders of passes; then each epoch is shuffled

Rows = npt.NDArray[np.int64]


def permutation(num_rows: int, label: str) -> Rows:
    """A permutation of `range(num_rows)` that `label` decides.

    Sorted by raw Philox output rather than `Generator.permutation`, whose stream numpy may change between versions.
    """
    digest = hashlib.sha256(label.encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    keys = generator.random_raw(num_rows)
    return np.argsort(np.asarray(keys, dtype=np.uint64), kind="stable").astype(np.int64)


def epoch_order(num_rows: int, epoch: int, seed: int, shuffle: bool) -> Rows:
    """The order of rows in an epoch: a permutation of `range(num_rows)`, shape [num_rows]."""
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    return permutation(num_rows, f"roundpipe order 1 {seed} {epoch}")


class RowMix:
    """The rows of each epoch, from sources that stand one behind the other."""

    def __init__(self, source_rows: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        """
        Args:
            source_rows: kept rows of each source; indices of rows count through all of them.
            weights: one for each source, above 0.
        """
        self.source_rows = tuple(source_rows)
        self.num_rows = sum(source_rows)
        self._seed = seed
        self._shuffle = shuffle
        weights = [weight if rows else 0.0 for rows, weight in zip(source_rows, weights, strict=True)]
        self.is_mixed = len(set(weights) - {0.0}) > 1
        """Whether weights decide how often a row comes."""
        self.epoch_rows = _shares(self.num_rows, weights) if self.is_mixed else self.source_rows
        """Rows that each source has in an epoch."""
        self.order = lru_cache(maxsize=1)(self._order)
        """Row indices of an epoch in order, shape [rows_per_epoch]."""

    @property
    def rows_per_epoch(self) -> int:
        return sum(self.epoch_rows)

    def _order(self, epoch: int) -> Rows:
        if not self.is_mixed:
            return epoch_order(self.num_rows, epoch, self._seed, self._shuffle)
        parts, places = [], []
        first_row = 0
        for source, (num_rows, count) in enumerate(zip(self.source_rows, self.epoch_rows, strict=True)):
            parts.append(first_row + self._passes(source, num_rows, epoch * count, count))
            places.append((np.arange(count) + 0.5) / max(count, 1))  # evenly spread through the epoch
            first_row += num_rows
        rows = np.concatenate(parts)
        if self._shuffle:
            return rows[epoch_order(len(rows), epoch, self._seed, True)]
        return rows[np.argsort(np.concatenate(places), kind="stable")]

    def _passes(self, source: int, num_rows: int, start: int, count: int) -> Rows:
        """Rows `start` to `start + count` of a source's passes put end to end."""
        parts = []
        while count > 0:
            number, offset = divmod(start, num_rows)
            label = f"roundpipe pass 1 {self._seed} {source} {number}"
            one_pass = permutation(num_rows, label) if self._shuffle else np.arange(num_rows, dtype=np.int64)
            parts.append(one_pass[offset : offset + count])
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _shares(num_rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`num_rows` dealt by weight, largest remainders first, at least one for each weight above 0."""
    exact = [num_rows * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) if weight else 0 for share, weight in zip(exact, weights, strict=True)]
    filled = [index for index, weight in enumerate(weights) if weight]
    by_remainder = sorted(filled, key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: max(0, num_rows - sum(counts))]:
        counts[index] += 1
    return tuple(counts)


# Several short rows in one sequence, by first-fit decreasing.
#
#     rows of a window, longest first    7 6 5 4 3 3 2        sequences of 10 tokens: [7 3] [6 4] [5 3 2]
#
# Rows of one sequence do not see each other: position ids restart with each row, and from that the model's own code
# makes a block-diagonal mask (see `model/chunks.py`).

WINDOW_ROWS = 4096
"""Rows that are packed together: enough for full sequences, few enough to be packed again at once on resume."""

SequenceRows = tuple[int, ...]
"""Row indices of one sequence, in the order of the epoch."""


class Packer:
    """Packs windows of rows."""

    def __init__(self, lengths: npt.NDArray[np.int64], max_tokens: int, seed: int, shuffle: bool) -> None:
        """
        Args:
            lengths: tokens of each row, at most `max_tokens`.
            max_tokens: tokens of a sequence.
            shuffle: give a window's sequences a random order, since first-fit leaves the fullest in front.
        """
        self._lengths = lengths
        self._max_tokens = max_tokens
        self._label = f"roundpipe window 1 {seed}" if shuffle else ""

    def pack(self, rows: npt.NDArray[np.int64], epoch: int, window: int) -> list[SequenceRows]:
        """The sequences of the `window`-th window of an epoch; each row is in one of them."""
        bins = first_fit_decreasing(self._lengths[rows], self._max_tokens)
        sequences = [tuple(rows[sorted(places)].tolist()) for places in bins]
        if not self._label:
            return sequences
        return [sequences[index] for index in permutation(len(sequences), f"{self._label} {epoch} {window}")]


def first_fit_decreasing(lengths: npt.NDArray[np.int64], max_tokens: int) -> list[list[int]]:
    """Positions into `lengths`, bin by bin; each bin's lengths sum to at most `max_tokens`.

    Longest first (equal ones in order), each into the first bin with room. At most 11/9 of the fewest bins, + 1
    (D. S. Johnson, 1973).
    """
    room = np.full(len(lengths), max_tokens, dtype=np.int64)  # room of every bin that may be needed, open bins first
    bins: list[list[int]] = []
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        index = int(np.argmax(room[: len(bins) + 1] >= length))  # the bin behind the open ones has room for any row
        if index == len(bins):
            bins.append([])
        bins[index].append(place)
        room[index] -= length
    return bins


@dataclass(frozen=True, slots=True)
class Row:
    """One training row. Tokens are read from shared arrays: do not write to them."""

    row_id: int
    """Position among all rows read, from 0, dropped rows counted: the same whatever is dropped before it."""
    input_ids: npt.NDArray[np.int32]
    """Shape [tokens]."""
    labels: npt.NDArray[np.int32]
    """Shape [tokens], not shifted: the token itself where it is trained, -100 elsewhere."""
    weights: npt.NDArray[np.float32] | None = None
    """Shape [tokens]: each token's factor in the loss, 0 where it is not trained; None: 1 where it is."""

    @property
    def is_rejected(self) -> bool:
        """Whether it is labelled as an answer that is not wanted: its weights are below 0."""
        return self.weights is not None and bool(self.weights.min() < 0)


class TokenizedRows(Sequence[Row]):
    """The kept rows of all sources, read from their mapped shards."""

    def __init__(
        self, shards: Sequence[Shard], positions: npt.NDArray[np.int64] | None = None, answer: tuple[int, int] = (0, 1)
    ) -> None:
        """
        Args:
            positions: of the rows that there are, ascending; None: all of the shards.
            answer: index of the answer that it has, and how many a row has.
        """
        self._shards, self._positions, self._answer = tuple(shards), positions, answer
        own = slice(answer[0], None, answer[1])
        self._places = [shard.places[own] for shard in shards]
        self._starts = [(np.cumsum(shard.lengths) - shard.lengths)[own] for shard in shards]
        lengths: npt.NDArray[np.int64] = np.concatenate([shard.lengths[own] for shard in shards])
        self.lengths = lengths if positions is None else lengths[positions]
        """Tokens of each row."""
        self._first_rows = np.cumsum([0, *map(len, self._places)])
        self._first_ids = np.cumsum([0, *(shard.report.rows_read for shard in shards)])

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        source, place = self._find(index)
        shard = self._shards[source]
        start = int(self._starts[source][place])
        stop = start + int(self.lengths[index])
        input_ids = shard.input_ids[start:stop]
        weights = shard.weights[start:stop]
        labels = np.where(weights, input_ids, np.int32(IGNORED_LABEL))
        labels.flags.writeable = False
        row_id = int(self._first_ids[source] + self._places[source][place, 0])
        return Row(row_id, input_ids, labels, None if np.array_equal(weights, weights != 0) else weights)

    @property
    def numbers(self) -> list[Rows]:
        """The numbers that its rows have in each source, those that were not selected among them."""
        return [places[:, 1] for places in self._places]

    @property
    def row_ids(self) -> npt.NDArray[np.int64]:
        """Identifiers of the rows, ascending, shape [rows]."""
        firsts = zip(self._first_ids, self._places, strict=False)
        ids: npt.NDArray[np.int64] = np.concatenate([first + places[:, 0] for first, places in firsts])
        return ids if self._positions is None else ids[self._positions]

    def select(self, positions: npt.NDArray[np.int64]) -> TokenizedRows:
        """The rows at these ascending positions, as rows of their own."""
        kept = positions if self._positions is None else self._positions[positions]
        return TokenizedRows(self._shards, kept, self._answer)

    def answers(self, count: int) -> tuple[TokenizedRows, ...]:
        """The first answers, the second ones and so on, of rows that have `count`; index i of all is one row."""
        if count == 1:
            return (self,)
        every = np.arange(len(self) // count)  # not None: checkpoints hold a hash over these positions too
        return tuple(TokenizedRows(self._shards, every, (index, count)) for index in range(count))

    @property
    def max_id(self) -> int:
        """Largest token id of the sources."""
        return max(int(shard.input_ids.max(initial=-1)) for shard in self._shards)

    def ids_from(self, first: int) -> set[int]:
        """Token ids from `first` on in the sources."""
        return {int(number) for one in self._shards for number in np.unique(one.input_ids[one.input_ids >= first])}

    def content_hash(self) -> str:
        """SHA-256 over the tokens and labels of every row: equal exactly if every batch would be."""
        digest = hashlib.sha256("".join(shard.digests[self._answer[0]] for shard in self._shards).encode())
        if self._positions is not None:
            digest.update(self._positions.astype("<i8").tobytes())
        return digest.hexdigest()

    def origin(self, row_id: int) -> tuple[int, int]:
        """(source, number in there) of a kept row.

        Raises:
            KeyError: no kept row has this id.
        """
        source = int(np.searchsorted(self._first_ids, row_id, side="right")) - 1
        if 0 <= source < len(self._shards):
            places = self._places[source]
            place = int(np.searchsorted(places[:, 0], row_id - self._first_ids[source]))
            if place < len(places) and places[place, 0] == row_id - self._first_ids[source]:
                return source, int(places[place, 1])
        raise KeyError(row_id)

    def _find(self, index: int) -> tuple[int, int]:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self._positions is not None:
            position = int(self._positions[position])
        source = int(np.searchsorted(self._first_rows, position, side="right")) - 1
        return source, position - int(self._first_rows[source])


@dataclass(frozen=True)
class TokenizedDataset:
    """The data as training needs it."""

    sides: tuple[TokenizedRows, ...]
    """The rows; of preference pairs the chosen answers, then the rejected ones, a row for each."""
    report: DataReport
    notices: tuple[str, ...]
    """Decisions and lost rows, a line each for the user."""
    chat_template: str | None
    """The template in force, to be saved beside the adapter."""
    sources: tuple[Source, ...]
    rows_by_spec: tuple[int, ...]
    """Kept rows of each entry of the recipe's `datasets`; a glob is several sources and one entry."""
    num_cached: int
    """Sources whose tokens were taken from the cache."""

    @property
    def rows(self) -> TokenizedRows:
        """The rows; of preference pairs those with the chosen answers."""
        return self.sides[0]

    @cached_property
    def lengths(self) -> Rows:
        """Tokens of each row as a microbatch pads it: of a pair, of its longer answer."""
        longest: Rows = np.max([side.lengths for side in self.sides], axis=0)
        return longest

    @cached_property
    def content_hash(self) -> str:
        """Over the tokens and labels of every row: the same exactly if every batch would be."""
        own = [side.content_hash() for side in self.sides]
        return own[0] if len(own) == 1 else hashlib.sha256(" ".join(own).encode()).hexdigest()

    @property
    def numbered_sources(self) -> list[tuple[Source, Rows]]:
        """The sources with the numbers of their rows, those that are held out among them."""
        return list(zip(self.sources, self.rows.numbers, strict=True))

    def where(self, row_id: int) -> str:
        """`data/train.jsonl:17` of a kept row.

        Raises:
            KeyError: no kept row has this id.
        """
        source, number = self.rows.origin(row_id)
        return self.sources[source].where(number)


def same_rows(
    sources: Iterable[tuple[Source, Rows]], before: Iterable[tuple[Source, Rows]] | None = None
) -> Iterator[str]:
    """Words for each source that has rows of another one: the same rows of a file of the same content.

    Args:
        sources: with the numbers of their rows.
        before: the others; None: those in front of it.
    """
    had: dict[str, list[tuple[Source, Rows]]] = {}
    for one in before or ():
        had.setdefault(one[0].content, []).append(one)
    for source, numbers in sources:
        others = had.setdefault(source.content, [])
        shared = ((other.name, len(np.intersect1d(numbers, rows))) for other, rows in others)
        name, both = next(((name, both) for name, both in shared if both), ("", 0))
        if both:
            yield f"{counted(both, 'row')} of {source.name} {'is' if both == 1 else 'are'} also in {name}"
        if before is None:
            others.append((source, numbers))


# Rows set apart for evaluation: a pure function of the seed, never trained on.


def held_out_positions(num_rows: int, size: float, seed: int) -> npt.NDArray[np.int64]:
    """Indices of the held-out rows among `num_rows`, ascending.

    Args:
        size: a number of rows, or a fraction below 1 of them, rounded up.
    """
    return np.sort(permutation(num_rows, f"roundpipe held out 1 {seed}")[: held_out_count(num_rows, size)])


def held_out_count(num_rows: int, size: float) -> int:
    """Rows that are held out; arguments as `held_out_positions`."""
    return int(size) if size >= 1 else -int(-size * num_rows // 1)


def hold_out(dataset: TokenizedDataset, size: float, seed: int) -> tuple[TokenizedDataset, TokenizedDataset]:
    """Rows to train on and rows to evaluate on, both in the order of the files. Arguments as `held_out_positions`.

    All sequences of a row that was split are on one side.

    Raises:
        RefusedError: nothing is left to train on.
    """
    row_ids, row_of = np.unique(dataset.rows.row_ids, return_inverse=True)
    num_rows = len(row_ids)
    held = held_out_positions(num_rows, size, seed)
    if len(held) >= num_rows:
        raise RefusedError(
            "all rows are held out for evaluation, none is left to train on",
            where="val_set_size",
            found=f"{len(held)} of {num_rows} rows",
            expected=f"less than {num_rows}",
        )
    is_held = np.isin(row_of, held)
    return _part_of(dataset, np.flatnonzero(~is_held)), _part_of(dataset, np.flatnonzero(is_held))


def _part_of(dataset: TokenizedDataset, positions: npt.NDArray[np.int64]) -> TokenizedDataset:
    """The rows of `dataset` at these ascending positions, as a dataset of their own."""
    borders = np.cumsum([0, *dataset.rows_by_spec])
    by_spec = np.diff(np.searchsorted(positions, borders)).tolist()
    return replace(dataset, sides=tuple(one.select(positions) for one in dataset.sides), rows_by_spec=tuple(by_spec))


# `packing: auto`: rows are packed where they are short, where the model allows it, and where enough steps are left.
#
#     max_seq_length 2048, 16 sequences a step        rows of 150 tokens        rows of 1,500 tokens
#     packed                                          14 rows a sequence: on    1 row a sequence: off
#
# What is short depends on the rows alone, so that the answer is the same on every machine.

SHORT_SHARE = 0.5
"""Rows are short if their mean is at most this share of a sequence: two and more of them fit."""
MIN_STEPS = 10
"""Steps that epochs of packed rows make at least, where `auto` may choose: fewer updates learn little."""


@dataclass(frozen=True, slots=True)
class PackingChoice:
    """The answer, and its reason in words."""

    packs: bool
    why: str

    def describe(self) -> str:
        """A line for the user."""
        return f"packing (auto): {'on' if self.packs else 'off'}: {self.why}"


def count_sequences(mix: RowMix, packer: Packer) -> int:
    """Packed sequences of the first epoch."""
    order = mix.order(0)
    windows = [order[start : start + WINDOW_ROWS] for start in range(0, len(order), WINDOW_ROWS)]
    return sum(len(packer.pack(rows, 0, index)) for index, rows in enumerate(windows))


def choose_packing(
    mix: RowMix, lengths: npt.NDArray[np.int64], recipe: Recipe, obstacle: str | None = None
) -> PackingChoice:
    """Whether `packing: auto` packs these rows.

    Args:
        lengths: tokens of each row.
        obstacle: see `decide_packing`.
    """
    packer = Packer(lengths, recipe.row_tokens, recipe.seed, recipe.shuffle)
    mean = float(lengths[mix.order(0)].mean())
    return decide_packing(recipe, mean, mix.rows_per_epoch, lambda: count_sequences(mix, packer), obstacle=obstacle)


def decide_packing(
    recipe: Recipe, mean: float, num_rows: int, count: Callable[[], int], *, obstacle: str | None = None
) -> PackingChoice:
    """The rule of `packing: auto`, for `plan`, which estimates tokens, for `data` and for a run.

    Args:
        mean: tokens of a row.
        num_rows: of an epoch.
        count: counts the sequences that packing makes of these rows.
        obstacle: why this model or recipe cannot train on packed rows; None where it can.
    """
    longest = recipe.row_tokens
    measured = f"rows have {mean:,.0f} tokens on average, max_seq_length is {longest:,}"
    if mean > SHORT_SHARE * longest:
        return PackingChoice(False, measured)
    if obstacle is not None:
        little = f"a step has {mean / longest:.0%} of the tokens that `plan` counts"
        return PackingChoice(False, f"{obstacle}; {measured}: {little}, more with gradient_accumulation_steps")
    num_sequences, per_step = count(), recipe.rows_per_step
    per_epoch = -(-num_sequences // per_step)
    steps = per_epoch * recipe.num_train_epochs if num_sequences >= per_step else 0
    if not steps or (recipe.max_steps is None and steps < MIN_STEPS):
        few = f"{counted(num_sequences, 'sequence')} would make {counted(steps, 'step')} of {per_step}"
        change = "fewer gradient_accumulation_steps" + (", or packing=true" if steps else "")
        return PackingChoice(False, f"{measured}, but {few}; {change}")
    each = round(num_rows * per_step / num_sequences)
    unpacked = -(-num_rows // per_step)
    change = f"a step has about {each} rows in place of {per_step}, an epoch {per_epoch} steps in place of {unpacked}"
    return PackingChoice(True, f"{measured}: {change}; packing=false keeps to {per_step} rows")
