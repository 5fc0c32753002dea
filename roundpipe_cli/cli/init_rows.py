"""A first look at a file of rows for `init`: its encoding, its columns, what its rows hold, and how it is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe_cli.choices import EXAMPLES, FIGURES, ROW_KINDS, ExampleName
from roundpipe_cli.data.columns import columns_text
from roundpipe_cli.data.encodings import guess_encoding, is_utf8, marked_encoding
from roundpipe_cli.data.formats import UnknownColumnsError, decide_format
from roundpipe_cli.data.rows import BadRowError, RawRow, in_chunks, printable
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.regular_files import named_path

if TYPE_CHECKING:
    from roundpipe_cli.data.sources import Source

LOOKED_AT = 20
"""Rows of a file that `init` looks at, and files; it refuses rows where each is bad."""
FIELDS = (*dict.fromkeys(field for kind in ROW_KINDS.values() for field in (*kind.fields, *kind.optional)), *FIGURES)


@dataclass(frozen=True)
class Looked:
    """Findings about the rows."""

    spec: DatasetSpec
    """The file, with the encoding and the columns that the recipe will have."""
    example: ExampleName | None = None
    """Content of a row; None: not known."""
    unknown: str = ""
    """A reason for the recipe's header that says of which files nothing is known; empty: none."""
    is_guess: bool = False
    """The columns were not named by anybody."""
    row: Mapping[str, object] | None = None
    """The first row."""

    @property
    def use(self) -> str:
        """`use Frage as the prompt and Antwort as the completion`."""
        named = (f"{printable(name, 60)} as the {field}" for field, name in self.spec.columns.items())
        return f"use {' and '.join(named)}"

    @property
    def sample(self) -> list[str]:
        """Lines: the first row as it is, and as it would be read."""
        rows = [(name, value) for name, value in (self.row or {}).items() if not name.startswith("Unnamed: ")]
        fields = [(field, (self.row or {}).get(name)) for field, name in self.spec.columns.items()]
        width = max(len(printable(name, 30)) for name, _ in (*rows, *fields))
        lines = [f"  {printable(name, 30):{width}}  {printable(str(value), 60)}" for name, value in (*rows, *fields)]
        return ["its first row:", *lines[: len(rows)], "as training would see it:", *lines[len(rows) :]]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for the recipe's header."""
        said = []
        if not is_utf8(self.spec.encoding):
            said.append(
                f"encoding {self.spec.encoding}: {self.spec.path} is not UTF-8, and looks like this; `roundpipe data` "
                "shows its words as they are read. Others: cp1252 and cp1251 (Excel on Windows), mac_roman, gb18030."
            )
        if self.is_guess:
            said.append(
                f"{columns_text(self.spec.columns)}: no column has a name that is known, so that this is a guess; look "
                "at it with `roundpipe data`, and change the line, or say `init --columns prompt=...,completion=...`."
            )
        return (*said, *filter(None, [self.unknown]))


def parse_columns(text: str) -> dict[str, str]:
    """`prompt=Frage,completion=Antwort` as our fields to columns; names may hold commas.

    Raises:
        RefusedError: it is none.
    """
    columns = {}
    for part in re.split(r",(?=\s*\w+=)", text) if text.strip() else ():
        field, _, name = (word.strip() for word in part.partition("="))
        if field not in FIELDS or not name:
            near = closest(field, list(FIELDS))
            raise RefusedError(
                "a column cannot be named so",
                where="--columns",
                found=printable(part.strip()),
                expected="prompt=COLUMN,completion=COLUMN, or messages=COLUMN, text=COLUMN ...",
                hint=f"did you mean `{near}`?" if near and near != field else None,
            )
        columns[field] = name
    return columns


def look_at_rows(data: str, folder: Path, columns: Mapping[str, str] | None = None) -> Looked:
    """Findings in the first rows of each file, in the encoding that they are in; with the columns that are likely to
    be meant where none is known or given.

    Args:
        columns: our fields to columns.

    Raises:
        RefusedError: `data` would refuse the rows of a file, whatever the objective.
    """
    from roundpipe_cli.data.sources import find_sources, no_rows

    spec = DatasetSpec(data, columns=columns or {})
    sources: list[Source] = []
    try:
        sources = find_sources(spec, folder, offline=True)
    except RefusedError:
        if (folder / named_path(data)).exists():  # otherwise the rows may come later
            raise
    if (encoding := _encoding(sources)) is not None:
        spec = replace(spec, encoding=encoding)
        sources = find_sources(spec, folder, offline=True)
    known, first, filled = dict[ExampleName, str](), None, list[bool]()
    unknown = [source.name for source in sources[LOOKED_AT:]]
    for source in sources[:LOOKED_AT]:
        rows: list[RawRow] | None = None
        if source.file is not None:
            with suppress(OSError, ValueError):  # another command says what is wrong
                rows = next(in_chunks(source.rows()), [])
                filled.append(bool(rows))
        try:
            example = _example_of(source, rows or [])
        except UnknownColumnsError as error:
            if not error.likely:
                raise
            return replace(look_at_rows(data, folder, error.likely), is_guess=True)
        first = first or next((row.columns for row in rows or () if row.fault is None), None)
        if example is not None:
            known.setdefault(example, source.name)
        elif rows is None:
            unknown.append(source.name)
    if sources and filled == [False] * len(sources):
        raise no_rows(sources)
    if len(known) > 1:
        what = " and ".join(EXAMPLES[name].noun for name in known)
        found = ", ".join(f"{EXAMPLES[name].noun} in {file}" for name, file in known.items())
        raise RefusedError(f"{what} cannot be trained together", where=data, found=found, hint="a recipe for each kind")
    files = f"{len(unknown)} of {len(sources)} files, such as {unknown[-1]}" if unknown else ""
    if not known:
        files = f"the hub's {data}" if sources and sources[0].file is None else data
    said = f"Nothing is known of the rows of {files}: `roundpipe data` shows what training sees of them"
    said += "." if known else "; preference pairs need `init --objective`."
    return Looked(spec, next(iter(known), None), said if files else "", row=first)


def _encoding(sources: Sequence[Source]) -> str | None:
    """The encoding that the first file looks like which is not UTF-8; None: one is and is not ASCII, or all are."""
    from roundpipe_cli.data.files import head_of, known_suffix

    heads = [head_of(one.file) for one in sources[:LOOKED_AT] if one.file and known_suffix(one.file) != ".parquet"]
    told = [head for head in heads if (b"\0" in head or not head.isascii()) and not marked_encoding(head)]
    return guess_encoding(told[0]) if told and all(map(guess_encoding, told[1:])) else None


def _example_of(source: Source, read: Sequence[RawRow]) -> ExampleName | None:
    """Content of these first rows; None without rows.

    Raises:
        RefusedError: `data` would refuse them all.
    """
    faults = [replace(row.fault, where=source.where(row.number)) for row in read if row.fault is not None]
    rows = [row for row in read if row.fault is None][:LOOKED_AT]
    columns, row_format = [row.columns for row in rows], None
    if rows:
        for example in [*EXAMPLES][1:]:
            with suppress(RefusedError, BadRowError):
                made = decide_format(replace(source.spec, example=example), columns, source.name)
                made.fitted(columns[0]).factor(columns[0])  # a `label` may be a class of texts
                row_format = row_format or made
        row_format = row_format or decide_format(source.spec, columns, source.name)
        for row in rows:
            try:
                own = row_format.fitted(row.columns)
                opened = own.opened(row.columns)
                own.unused(opened)
                own.parse(opened)
                return row_format.spec.example
            except BadRowError as error:
                faults.append(replace(error.fault, where=source.where(row.number)))
    if faults:
        raise RefusedError(**asdict(faults[0]))
    return None
