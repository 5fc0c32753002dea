"""The report on rows: everything that was dropped, cut or skipped is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from roundpipe_cli.data.formats import RowType
from roundpipe_cli.data.rows import RowFault, printable

MAX_LISTED = 10
"""Rows named in one message; the report holds them all."""

MAX_UNUSED_NAMES = 100
"""Unused columns that are counted one by one; rows of JSON can have a name of their own each."""
OTHER_NAMES = "(others)"


@dataclass
class SourceReport:
    """Counts of one file or hub dataset, filled while it is read. Row numbers count as in `RawRow.number`."""

    name: str
    type: RowType | None = None
    """Type of the rows, from the recipe or the columns; None where no row could be read."""
    rows_read: int = 0
    rows_kept: int = 0
    """Sequences to train: a row that is split is several."""
    bad_rows: list[tuple[int, RowFault]] = field(default_factory=list)
    too_long_rows: list[int] = field(default_factory=list)
    """Rows of more than `max_seq_length` tokens: kept and cut, split, dropped or refused, as `long_rows` says."""
    untrained_rows: list[int] = field(default_factory=list)
    """Rows without one token to train (left), always dropped."""
    control_token_rows: list[int] = field(default_factory=list)
    """Rows of a conversation whose text spells a special token of the tokenizer, such as `<|im_end|>`; kept."""
    placeholder_rows: list[int] = field(default_factory=list)
    """Rows whose text has `<image>`, `<video>` or `<audio>` and that have no column with it: letters to the model."""
    unused_columns: dict[str, int] = field(default_factory=dict)
    """Rows with a column that is not used, by its name; keys in messages are called `messages[].id`."""
    trained_tokens: int = 0
    """Labels that count in the loss: all but each row's first token, which nothing predicts."""
    total_tokens: int = 0
    lost_tokens: int = 0
    """Tokens of rows that were read and could be used, and that no sequence has: cut off, or dropped with their row."""
    longest_row_tokens: int = 0
    """Before any cut."""

    def count_unused(self, counts: Mapping[str, int]) -> None:
        """Add rows with unused columns, by name; behind `MAX_UNUSED_NAMES` names, others are counted together."""
        for name, count in counts.items():
            has_room = name in self.unused_columns or len(self.unused_columns) < MAX_UNUSED_NAMES
            key = name if has_room else OTHER_NAMES
            self.unused_columns[key] = self.unused_columns.get(key, 0) + count

    def unused_text(self) -> str:
        """`id, source (3 of 12 rows)`; empty if all columns are used."""
        parts = []
        for name, count in self.unused_columns.items():
            share = f" ({count} of {self.rows_read} rows)" if count < self.rows_read else ""
            parts.append(printable(name, 80) + share)
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """In the types of JSON; `from_json` takes it back."""
        return {**asdict(self), "bad_rows": [[number, *astuple(fault)] for number, fault in self.bad_rows]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourceReport:
        """
        Raises:
            TypeError, ValueError: not what `to_json` makes.
        """
        bad_rows = [(int(number), RowFault(*texts)) for number, *texts in data["bad_rows"]]
        return cls(**{**data, "bad_rows": bad_rows})


@dataclass(frozen=True)
class DataReport:
    """Totals of all sources."""

    sources: tuple[SourceReport, ...]
    long_rows: str
    """Treatment of `too_long_rows`: error, drop, truncate or split."""

    @property
    def rows_read(self) -> int:
        return sum(source.rows_read for source in self.sources)

    @property
    def rows_kept(self) -> int:
        return sum(source.rows_kept for source in self.sources)

    @property
    def rows_bad(self) -> int:
        return sum(len(source.bad_rows) for source in self.sources)

    @property
    def rows_too_long(self) -> int:
        return sum(len(source.too_long_rows) for source in self.sources)

    @property
    def rows_truncated(self) -> int:
        return self.rows_too_long if self.long_rows == "truncate" else 0

    @property
    def rows_untrained(self) -> int:
        return sum(len(source.untrained_rows) for source in self.sources)

    @property
    def trained_tokens(self) -> int:
        return sum(source.trained_tokens for source in self.sources)

    @property
    def total_tokens(self) -> int:
        return sum(source.total_tokens for source in self.sources)

    @property
    def lost_tokens(self) -> int:
        return sum(source.lost_tokens for source in self.sources)

    def filter_counts(self) -> str:
        """`120 rows read, 3 bad, 2 too long, 0 without a trained token, 115 kept`."""
        long_verb = {"truncate": "cut", "split": "split"}.get(self.long_rows, "too long")
        kept = f"{self.rows_kept} sequences" if self.long_rows == "split" else f"{self.rows_kept} kept"
        return (
            f"{self.rows_read} rows read, {self.rows_bad} bad, {self.rows_too_long} {long_verb}, "
            f"{self.rows_untrained} without a trained token, {kept}"
        )


def listed(places: Sequence[str]) -> str:
    """The first places, and how many more there are."""
    shown = ", ".join(places[:MAX_LISTED])
    rest = len(places) - MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
