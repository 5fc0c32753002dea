"""Rows as they are read from a file, and what is said of them without their text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from roundpipe_cli.choices import RowType
from roundpipe_cli.data.encodings import encoding_hint
from roundpipe_cli.errors import Problem
from roundpipe_cli.units import escape_controls

NULL_WORDS = frozenset({"nan", "-nan", "null", "none", "na", "n/a", "nil", "<na>", "#n/a", "#na", "\\n"})
"""Cells with which pandas, R, SQL and spreadsheets write that there is nothing, in lower case; JSON has its null."""
MAX_SHOWN_CHARACTERS = 200
"""No message shows more characters of a row's text, which may be private."""
DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
"""Characters between the columns of a table of text, with their names."""
CHUNK_ROWS = 500
"""Most rows of one chunk."""
CHUNK_CHARACTERS = 2_000_000
"""Approximate characters in the rows of one chunk: limits the memory of chunks."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as its source holds it: its columns, or the reason why they could not be read."""

    number: int
    """Counted from 1: the line of a text file at which the row begins, or the row of a table or a hub dataset."""
    columns: Mapping[str, object]
    fault: Problem | None = None


class BadRowError(Exception):
    """A row that does not hold what its type needs. Caught where rows are read; never reaches the user as such."""

    def __init__(
        self, what: str, *, found: str | None = None, expected: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(what)
        self.fault = Problem(what, found=found, expected=expected, hint=hint)


class TwiceError(ValueError):
    """An object of JSON with two values for one key, of which Python would keep the last."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {printable(key, 60)!r} twice")


def _checked_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise TwiceError(next(key for index, key in enumerate(keys) if key in keys[:index]))
    return made


JSON_DECODER = json.JSONDecoder(object_pairs_hook=_checked_object)
"""Reads JSON as Python does, and raises `TwiceError`."""


def printable(text: str, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """`text` with control characters escaped and cut to `limit` characters, safe for a terminal and a log."""
    escaped = escape_controls(text[: limit + 1])
    return escaped if len(escaped) <= limit else escaped[: limit - 3] + "..."


def describe_value(value: object) -> str:
    """The kind of a value in the words of JSON, never its text: `a number`, `a list of 3`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object with {column_names(value)}"
    return f"a value of type {type(value).__name__}"


def is_null_word(value: object) -> bool:
    """Whether it is the text of one of `NULL_WORDS`."""
    return isinstance(value, str) and len(value) < 20 and value.strip().lower() in NULL_WORDS


def unfit(what: str, value: object, expected: str | None = None) -> BadRowError:
    """The error for a value that is not what it has to be."""
    return BadRowError(what, found=describe_value(value), expected=expected)


def shown(value: object) -> str:
    """A short text of a row's structure, such as a role, as it is; anything else by its kind."""
    return f"`{printable(value, 40)}`" if isinstance(value, str) else describe_value(value)


def column_names(columns: Mapping[str, object]) -> str:
    """`columns question, answer`, escaped and bounded."""
    return printable("columns " + ", ".join(map(str, columns))) if columns else "no columns"


def delimiter_hint(columns: Sequence[str]) -> str | None:
    """A hint where the name of a column holds what may part columns; the only column's commas count too."""
    marks = [mark for mark in DELIMITERS if mark != "," or len(columns) == 1]
    names = [DELIMITERS[mark] for mark in marks if any(mark in column for column in columns)]
    return f"are the columns parted by {names[0]}? Write them with commas (.csv) or tabs (.tsv)" if names else None


def check_text(text: str, field: str) -> None:
    """Raise a BadRowError for a NUL character, or half of a surrogate pair (text that was not valid Unicode)."""
    if "\0" in text:
        raise BadRowError(
            f"{field} holds a NUL character",
            found=f"at character {text.index(chr(0)) + 1} of {len(text)}",
            expected="text without NUL characters",
        )
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRowError(
                f"{field} is not valid Unicode text",
                found=f"a broken character at position {error.start + 1} of {len(text)}",
                expected="UTF-8 text",
                hint=encoding_hint(text),
            ) from None


def in_chunks(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    """`rows` in chunks, each for one process."""
    chunk: list[RawRow] = []
    characters = 0
    for row in rows:
        own = _num_characters(row.columns)
        if chunk and (len(chunk) == CHUNK_ROWS or characters + own > CHUNK_CHARACTERS):
            yield chunk
            chunk, characters = [], 0
        chunk.append(row)
        characters += own
    if chunk:
        yield chunk


def _num_characters(value: object) -> int:
    """Approximate characters of text in a row's columns."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, (list, tuple)) else 0


MAX_WEIGHT = 1e4
"""Weights of rows and turns are below it: larger ones are figures of another kind."""


def read_weight(value: object, field: str) -> float:
    """A weight in the loss, as a number or its text.

    Raises:
        BadRowError: no number, not a number, below 0 or too large.
    """
    try:
        weight = math.nan if isinstance(value, (bool, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < MAX_WEIGHT:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        found, expected = f"{value:g}" if is_number else describe_value(value), f"0 (not trained) to {MAX_WEIGHT:g}"
        raise BadRowError(f"{field} is no weight", found=found, expected=expected)
    return weight


def checked_text(value: object, field: str, *, filled: bool) -> str:
    """The value, or a BadRowError where it is no text, as of `check_text`, or blank although `filled` is asked for."""
    if not isinstance(value, str):
        raise unfit(f"{field} is not text", value, "a string")
    if filled and not value.strip():
        raise unfit(f"{field} is empty", value, "a string with some text")
    check_text(value, field)
    return value


# The report on rows: everything that was dropped, cut or skipped is counted.

MAX_LISTED = 10
"""Rows named in one message; the report holds them all."""

MAX_UNUSED_NAMES = 100
"""Unused columns that are counted one by one; rows of JSON can have a name of their own each."""
OTHER_NAMES = "(others)"


@dataclass
class SourceReport:
    """Counts of the rows of a chunk, or of one file or hub dataset. Row numbers count as in `RawRow.number`."""

    name: str = ""
    type: RowType | None = None
    """Type of the rows, from the recipe or the columns; None where no row could be read."""
    notices: list[str] = field(default_factory=list)
    """Decisions about them, for the user."""
    rows_read: int = 0
    rows_kept: int = 0
    """Sequences to train: a row that is split is several, a pair is one."""
    bad_rows: list[tuple[int, Problem]] = field(default_factory=list)
    too_long_rows: list[int] = field(default_factory=list)
    """Rows of more than `max_seq_length` tokens: kept and cut, split, dropped or refused, as `long_rows` says."""
    untrained_rows: list[int] = field(default_factory=list)
    """Rows without one token to train (left), always dropped."""
    control_token_rows: list[int] = field(default_factory=list)
    """Rows of a conversation whose text spells a special token of the tokenizer, such as `<|im_end|>`; kept."""
    placeholder_rows: list[int] = field(default_factory=list)
    """Rows whose text has `<image>`, `<video>` or `<audio>` and that have no column with it: letters to the model."""
    unwanted_rows: int = 0
    """Kept rows whose answers are labelled as unwanted."""
    null_word_rows: list[int] = field(default_factory=list)
    """Rows of which a column that is read is just a word for nothing, such as `nan`: the model learns the word."""
    unused_columns: dict[str, int] = field(default_factory=dict)
    """Rows with a column that is not used, by its name; keys in messages are called `messages[].id`."""
    trained_tokens: int = 0
    """Labels that count in the loss: all but each row's first token, which nothing predicts."""
    total_tokens: int = 0
    lost_tokens: int = 0
    """Tokens of rows that were read and could be used, and that no sequence has: cut off, or dropped with their row."""
    longest_row_tokens: int = 0
    """Before any cut."""

    def add(self, other: SourceReport) -> None:
        """Count the rows of `other` too; behind `MAX_UNUSED_NAMES` names, unused columns are counted together."""
        for name in SUMMED:
            counted = getattr(self, name)
            counted += getattr(other, name)
            setattr(self, name, counted)
        self.longest_row_tokens = max(self.longest_row_tokens, other.longest_row_tokens)
        for name, count in other.unused_columns.items():
            has_room = name in self.unused_columns or len(self.unused_columns) < MAX_UNUSED_NAMES
            key = name if has_room else OTHER_NAMES
            self.unused_columns[key] = self.unused_columns.get(key, 0) + count

    def unused_text(self) -> str:
        """`id, source (3 of 12 rows)`; empty if all columns are used."""
        return ", ".join(
            (printable(name, 80) or '""') + (f" ({count} of {self.rows_read} rows)" if count < self.rows_read else "")
            for name, count in self.unused_columns.items()
        )

    def to_json(self) -> dict[str, Any]:
        """In the types of JSON; `from_json` takes it back."""
        return {**asdict(self), "bad_rows": [[number, *astuple(fault)] for number, fault in self.bad_rows]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourceReport:
        bad_rows = [(int(number), Problem(*texts)) for number, *texts in data["bad_rows"]]
        return cls(**{**data, "bad_rows": bad_rows})


SUMMED = (
    *("rows_read", "rows_kept", "bad_rows", "too_long_rows", "untrained_rows", "control_token_rows"),
    *("placeholder_rows", "null_word_rows", "unwanted_rows", "trained_tokens", "total_tokens", "lost_tokens"),
)


@dataclass
class DataReport(SourceReport):
    """Counts of all sources together."""

    sources: tuple[SourceReport, ...] = ()
    long_rows: str = "truncate"
    """Treatment of `too_long_rows`: error, drop, truncate or split."""

    def __post_init__(self) -> None:
        for source in self.sources:
            self.add(source)

    @property
    def rows_bad(self) -> int:
        return len(self.bad_rows)

    @property
    def rows_truncated(self) -> int:
        return len(self.too_long_rows) if self.long_rows == "truncate" else 0

    def filter_counts(self) -> str:
        """`120 rows read, 3 bad, 2 too long, 0 without a trained token, 115 kept`."""
        long_verb = {"truncate": "cut", "split": "split"}.get(self.long_rows, "too long")
        kept = f"{self.rows_kept} sequences" if self.long_rows == "split" else f"{self.rows_kept} kept"
        return (
            f"{self.rows_read} rows read, {len(self.bad_rows)} bad, {len(self.too_long_rows)} {long_verb}, "
            f"{len(self.untrained_rows)} without a trained token, {kept}"
        )


def listed(places: Sequence[str]) -> str:
    """The first places, and how many more there are."""
    shown = ", ".join(places[:MAX_LISTED])
    rest = len(places) - MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
