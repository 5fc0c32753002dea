"""Readers of local files. Each yields `RawRow`s in file order and knows where every row came from.

Lines are parsed here rather than by `datasets`, because a bad row must be named by file and line; parquet has no lines
and is read by pyarrow, which `datasets` is built on. A row that cannot be read is yielded with its fault, so that the
numbers of the rows behind it stay true; only a file that cannot be read at all raises.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, AnyStr, NamedTuple, cast

from roundpipe_cli.data.columns import is_known_column, rows_inside
from roundpipe_cli.data.encodings import as_utf8, encoding_hint, marked_encoding
from roundpipe_cli.data.rows import (
    DELIMITERS,
    JSON_DECODER,
    RawRow,
    TwiceError,
    delimiter_hint,
    describe_value,
    printable,
)
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.errors import Problem, RefusedError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.units import format_bytes

# Rows of a plain text file: its paragraphs, its lines, the whole file, or what stands between separators.


def text_rows(lines: Iterable[bytes], kind: str, path: Path) -> Iterator[RawRow]:
    """Rows with the column `text`, numbered by the first of their lines that is not blank; blank rows are left out.

    Args:
        lines: with their line ends.
        kind: `paragraph` (lines up to a blank one), `line`, `file`, or else the text that parts rows, wherever it
            stands.
        path: for errors.

    Raises:
        RefusedError: a row of more than `MAX_LINE_BYTES`.
    """
    if kind == "paragraph":
        parts = _paragraphs(lines, path)
    elif kind == "line":
        parts = enumerate(lines, start=1)
    else:
        parts = _separated(lines, b"" if kind == "file" else kind.encode(), path)
    name = kind if kind in ("paragraph", "line", "file") else "text between separators"
    for number, data in parts:
        if data.strip():
            yield _row(number, data, name)


def _paragraphs(lines: Iterable[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    paragraph: list[bytes] = []
    number, length = 1, 0
    for line_number, line in enumerate(lines, start=1):
        if line.strip():
            number, length = (number, length) if paragraph else (line_number, 0)
            length += len(line)
            if length > MAX_LINE_BYTES:
                raise _too_long(path, number, "paragraph")
            paragraph.append(line)
        else:
            yield number, b"".join(paragraph)
            paragraph = []
    yield number, b"".join(paragraph)


def _separated(lines: Iterable[bytes], separator: bytes, path: Path) -> Iterator[tuple[int, bytes]]:
    """Parts of the whole text; an empty `separator` parts nothing."""
    kept, begin = bytearray(), 1  # of the part: its bytes so far, the line that it begins on
    for line in lines:
        searched = max(0, len(kept) - len(separator) + 1)
        kept += line
        while separator and (found := kept.find(separator, searched)) >= 0:
            part, searched = bytes(kept[:found]), 0
            yield _first_line(begin, part), part
            begin += kept[: found + len(separator)].count(b"\n")
            del kept[: found + len(separator)]
        if len(kept) > MAX_LINE_BYTES:
            raise _too_long(path, begin, "file" if not separator else "text between separators")
    yield _first_line(begin, bytes(kept)), bytes(kept)


def _first_line(begin: int, part: bytes) -> int:
    """The number of the first line that is not blank, where the part begins on line `begin`."""
    return begin + part[: len(part) - len(part.lstrip())].count(b"\n")


def _row(number: int, data: bytes, kind: str) -> RawRow:
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return _bad_row(number, f"the {kind} is not valid UTF-8", hint=encoding_hint(data))
    return RawRow(number, {"text": text.strip("\n") if kind == "text between separators" else text.rstrip("\n")})


ONE_A_LINE = "one JSON object a line"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt")
MAX_LINE_BYTES = 64 * 1024**2
"""Largest line: a row's text may have 16 Mi characters of up to 4 bytes."""
MAX_UNPACKED_BYTES = 1024**3
"""A compressed .json file is read whole: a few megabytes of it can unpack to more than any memory."""

MAX_SNIFFED_BYTES = 1 << 20
"""Header and first row of a table of text are looked for in these."""
PARQUET_HEAD_S = 20.0
"""Processor time; tables of thousands of columns have large heads."""
COUNT_HEAD_S = 5.0
"""Processor time for a head where only rows are counted."""
MAX_COUNTED_BYTES = 256 * 1024**2
MAX_PARSED_BYTES = 32 * 1024**2
"""Largest JSON list or quoted table that is counted: every byte has to be read."""


@dataclass
class ReadProgress:
    """Progress of reading a file."""

    num_bytes: int = 0
    """Size of the file."""
    raw: IO[bytes] | None = None
    """The open file; for .gz the compressed one."""
    known_share: float | None = None

    def share(self) -> float | None:
        """From 0 to 1; None where it cannot be told."""
        if self.known_share is not None or self.raw is None or self.raw.closed or not self.num_bytes:
            return self.known_share
        return min(1.0, self.raw.tell() / self.num_bytes)


def known_suffix(path: Path) -> str | None:
    """The suffix that decides the reader, `.gz` looked through; None for a file we cannot read."""
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


PLAIN = DatasetSpec("")
"""Every setting at its default."""


def read_file(path: Path, spec: DatasetSpec = PLAIN, progress: ReadProgress | None = None) -> Iterator[RawRow]:
    """The rows of one local file, whose suffix is a known one.

    Raises:
        RefusedError: the file cannot be opened or is broken as a whole.
    """
    suffix = known_suffix(path)
    progress = progress or ReadProgress()
    try:
        progress.num_bytes = path.stat().st_size
        if not progress.num_bytes:  # no kind of file needs a byte to say that it has no rows
            progress.known_share = 1.0
        elif suffix in (".jsonl", ".ndjson"):
            yield from _read_jsonl(path, spec, progress)
        elif suffix == ".json":
            yield from _read_json(path, spec, progress)
        elif suffix in TABLES:
            yield from _read_csv(path, spec, progress)
        elif suffix == ".parquet":
            yield from _read_parquet(path, progress)
        else:
            with _open(path, spec, progress) as file:
                yield from text_rows(_without_mark(_lines(file, path)), spec.txt_rows, path)
    except UnicodeError as error:
        raise RefusedError(
            f"the file is no text in {encoding_of(path, spec)}",
            where=str(path),
            found=printable(str(error)),
            hint="`encoding:` in the dataset's entry names the one it was saved in; without it, UTF-8",
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RefusedError(f"cannot read the dataset: {printable(reason)}", where=str(path)) from error


GZIP = b"\x1f\x8b"
OTHER_KINDS = {
    **{b"PAR1": "parquet", b"PK\3\4": "a zip archive or an Excel table"},
    b"\xd0\xcf\x11\xe0": "an old Excel or Word document",
    **{
        b"(\xb5/\xfd": "compressed by zstd",
        b"\xfd7zXZ\0": "compressed by xz",
        b"\x04\x22\x4d\x18": "compressed by lz4",
    },
    **dict.fromkeys((b"ARROW1", b"\xff\xff\xff\xff"), "arrow"),
    **{b"BZh91AY": "compressed by bzip2", b"%PDF": "a PDF document"},
    b"version https://git-lfs": "a pointer of Git LFS",
}
"""First bytes of files that hold no rows, and what they are."""
KIND_HINTS = {"Excel": "save it as CSV (UTF-8)", "LFS": "`git lfs pull` gets the file", "PDF": "save its text as .txt"}


def is_packed(path: Path) -> bool:
    """Whether it is compressed by gzip, whatever its name says."""
    with path.open("rb") as file:
        return file.read(len(GZIP)) == GZIP


def encoding_of(path: Path, spec: DatasetSpec) -> str:
    """The encoding that a byte order mark says, or else the recipe."""
    with _unpacked(path) as file:
        return marked_encoding(file.read(4)) or spec.encoding


def _unpacked(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if is_packed(path) else path.open("rb")


def head_of(path: Path) -> bytes:
    """The first whole lines of a file as they are, unpacked; empty where it cannot be read."""
    with contextlib.suppress(OSError, EOFError, zlib.error), _unpacked(path) as file:
        head = file.read(MAX_SNIFFED_BYTES)
        return head if len(head) < MAX_SNIFFED_BYTES else head[: head.rfind(b"\n") + 1]
    return b""


@contextmanager
def _open(path: Path, spec: DatasetSpec, progress: ReadProgress) -> Iterator[IO[bytes]]:
    """The text of a file, unpacked, as UTF-8.

    Raises:
        RefusedError: it begins as other kinds of files do.
    """
    with path.open("rb") as raw, contextlib.ExitStack() as stack:
        progress.raw = raw
        unpacked = cast("io.BufferedReader", stack.enter_context(gzip.open(raw, "rb")) if is_packed(path) else raw)
        refuse_other_kind(unpacked.peek(32), path)
        yield as_utf8(unpacked, marked_encoding(unpacked.peek(4)) or spec.encoding)
    progress.known_share = 1.0


def _lines(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """The lines of a file, each of limited length in its own units (bytes or characters)."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise _too_long(path, number, "line")
        yield line


def _too_long(path: Path, number: int, what: str) -> RefusedError:
    return RefusedError(
        f"this {what} is too long",
        where=f"{path}:{number}",
        found=f"more than {format_bytes(MAX_LINE_BYTES)}" + (" unpacked" if is_packed(path) else ""),
        expected="rows of a few megabytes at most",
    )


def refuse_other_kind(head: bytes, path: Path) -> None:
    """
    Raises:
        RefusedError: a file that begins so holds no rows.
    """
    found = next((kind for mark, kind in OTHER_KINDS.items() if head.startswith(mark)), None)
    if found is not None:
        raise RefusedError(
            "the file holds no rows of text",
            where=str(path),
            found=found,
            expected="text, plain or compressed by gzip",
            hint=next(
                (hint for part, hint in KIND_HINTS.items() if part in found), "name it by what it is, or unpack it"
            ),
        )


def _without_mark(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The lines without a byte order mark."""
    yield next(lines, b"").removeprefix(b"\xef\xbb\xbf")
    yield from lines


def _read_jsonl(path: Path, spec: DatasetSpec, progress: ReadProgress) -> Iterator[RawRow]:
    with _open(path, spec, progress) as file:
        for number, line in enumerate(_without_mark(_lines(file, path)), start=1):
            if line.strip():
                yield _parse_json_line(line.rstrip(b"\r\n"), number)


def _bad_row(
    number: int, what: str, found: str | None = None, expected: str | None = None, *, hint: str | None = None
) -> RawRow:
    return RawRow(number, {}, Problem(what, None, found, expected, hint))


def _parse_json_line(line: bytes, number: int) -> RawRow:
    try:
        return _as_row(JSON_DECODER.decode(line.decode("utf-8")), number)
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        return _bad_row(number, "the line is not valid UTF-8", found, hint=encoding_hint(line))
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # some messages of json end in this way
        found, hint = f"{what} at column {error.colno}", _json_hint(error.doc, error.pos)
        return _bad_row(number, "the line is not valid JSON", found, ONE_A_LINE, hint=hint)
    except TwiceError as error:
        return _twice(number, error)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of nested lists
        return _bad_row(number, "the line cannot be read as JSON", printable(str(error)), ONE_A_LINE)


def _twice(number: int, error: TwiceError) -> RawRow:
    return _bad_row(number, "the row has two values for one key", str(error), "each key once in an object")


def _as_row(value: object, number: int) -> RawRow:
    if isinstance(value, dict):
        return RawRow(number, value)
    return _bad_row(number, "the row is not an object", describe_value(value), 'an object: {"text": "..."}')


BEGIN = re.compile(r"[ \t\r\n]*(?P<list>\[[ \t\r\n]*(?P<mark>\]?)[ \t\r\n]*)?")
MARK = re.compile(r"[ \t\r\n]*(?P<mark>[,\]]?)[ \t\r\n]*")
"""Blanks of JSON around the bracket that opens a list, and around what stands behind a row."""


def _read_json(path: Path, spec: DatasetSpec, progress: ReadProgress) -> Iterator[RawRow]:
    """A JSON list of rows, or JSON lines under the name `.json`."""
    with _open(path, spec, progress) as file:
        content = _read_whole(file, path)
    # Broken bytes survive as lone surrogates here, so that they spoil one row and not the file.
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="surrogateescape")
    begin = cast("re.Match[str]", BEGIN.match(text))
    if begin["list"]:
        yield from _read_json_list(path, text, begin, progress)
    elif begin.end() < len(text):
        try:
            json.loads(text[begin.end() :].split("\n", 1)[0])
        except ValueError:
            raise _no_rows_in(path, text, begin.end()) from None
        yield from _read_jsonl(path, spec, progress)


def _read_whole(file: IO[bytes], path: Path) -> bytes:
    if not isinstance(file, gzip.GzipFile):
        check_list_size(path)
        return file.read()
    content = file.read(MAX_UNPACKED_BYTES + 1)
    if len(content) > MAX_UNPACKED_BYTES:
        raise RefusedError(
            "the compressed file is too large to be read whole",
            where=str(path),
            found=f"more than {format_bytes(MAX_UNPACKED_BYTES)} unpacked",
            hint="write one object a line (.jsonl.gz), or unpack it if its size is right",
        )
    return content


def check_list_size(path: Path) -> None:
    """Refuse a list of rows that is too large; its bytes and its text are in memory at once, and rows beside them."""
    if is_packed(path):
        return
    limit, size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4, path.stat().st_size
    if size > limit:
        raise RefusedError(
            "the file is too large to be read whole, as a list of rows is",
            where=str(path),
            found=format_bytes(size),
            expected=f"at most {format_bytes(limit)}, a quarter of this machine's memory",
            hint="write one object a line (.jsonl): such files may have any size",
        )


def _read_json_list(path: Path, text: str, mark: re.Match[str], progress: ReadProgress) -> Iterator[RawRow]:
    """The rows behind `mark`, the bracket that opens the list."""
    line, counted = 1, 0  # `line` is the line of character `counted`
    while mark["mark"] != "]":
        line, counted = line + text.count("\n", counted, mark.end()), mark.end()
        try:
            row, end = _next_of_list(text, counted, line)
        except json.JSONDecodeError as error:
            raise _broken_json(path, text, error.pos, error.msg.removesuffix(" at")) from None
        except (ValueError, RecursionError) as error:
            raise _broken_json(path, text, counted, printable(str(error))) from None
        progress.known_share = end / len(text)
        yield _checked_utf8(row, text[counted:end])
        mark = cast("re.Match[str]", MARK.match(text, end))
        if not mark["mark"]:
            raise _broken_json(path, text, mark.end(), "Expecting ',' or ']'")
    if mark.end() != len(text):
        raise _broken_json(path, text, mark.end("mark"), "more text behind the end of the list")


def _next_of_list(text: str, position: int, line: int) -> tuple[RawRow, int]:
    """The row that begins at `position`, and where it ends."""
    try:
        value, end = JSON_DECODER.raw_decode(text, position)
    except TwiceError as error:
        return _twice(line, error), json.JSONDecoder().raw_decode(text, position)[1]
    return _as_row(value, line), end


def _checked_utf8(row: RawRow, source: str) -> RawRow:
    if source.isascii():
        return row
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        broken = f"byte 0x{ord(source[error.start]) - 0xDC00:02x} at character {error.start + 1} of the row"
        return _bad_row(row.number, "the row is not valid UTF-8", broken, hint=encoding_hint(source))
    return row


def _no_rows_in(path: Path, text: str, start: int) -> RefusedError:
    """The error for JSON that is no list; where it is an object with a list of rows, with the way to get at them."""
    position = start
    with contextlib.suppress(RecursionError):
        try:
            whole = json.loads(text[start:])
            if isinstance(whole, dict) and (inside := rows_inside(whole, str(path))):
                return inside
        except ValueError as error:
            position += getattr(error, "pos", 0)
    message, hint = "this is neither a list of rows nor one row a line", _json_hint(text, position)
    return _broken_json(path, text, position if hint else start, message)


def _broken_json(path: Path, text: str, position: int, message: str) -> RefusedError:
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return RefusedError(
        "the file is not valid JSON",
        where=f"{path}:{line}:{column}",
        found=message,
        expected="a JSON list of objects, or one JSON object a line",
        hint=_json_hint(text, position)
        or "`[` before the first object, `]` behind the last and a comma between two make them a list",
    )


def _json_hint(text: str, position: int) -> str | None:
    """A hint on what stands at `position` in place of JSON; None: nothing that is known."""
    before, behind = text[max(0, position - 40) : position].rstrip(), text[position : position + 40]
    if re.match(r"(,\s*)?[}\]]", behind) and "," in (before[-1:], behind[:1]):
        return "take out the comma before the bracket that closes: JSON has none there"
    if re.match(r"'|(None|True|False)\b", behind):
        return "this is Python's text of an object; `json.dumps` writes JSON: double quotes, null, true and false"
    return None


def own_delimiter(path: Path) -> str:
    """The character between columns that the name of a table of text says."""
    return "\t" if known_suffix(path) == ".tsv" else ","


TABLES = (".csv", ".tsv")
MAX_COMPARED = 20
"""Rows that tell the character between the columns."""
NAME_CHARACTERS, NAME_WORDS = 40, 4
"""Most of the name of a column; one that ends as a sentence does has two words at most."""


class TableForm(NamedTuple):
    """How a table of text is written."""

    delimiter: str
    header: list[str] | None
    """Names of its columns where its first line has none: `column 1`, `column 2`; None: the line has them."""


def table_form(path: Path, spec: DatasetSpec = PLAIN) -> TableForm:
    """The form of a table of text, by its first rows.

    The delimiter is another than `own_delimiter` only where that one does not part the first rows into equally many
    fields, and exactly one other does: a file that is what its name says is never read in another way.
    """
    own, head = own_delimiter(path), ""
    with contextlib.suppress(OSError, EOFError, zlib.error, UnicodeError), _open(path, spec, ReadProgress()) as file:
        head = file.read(MAX_SNIFFED_BYTES).decode("utf-8-sig", errors="replace")
    delimiter, first = own, _first_records(head, own)
    if len({len(record) for record in first}) > 1 or max(map(len, first), default=0) < 2:
        fitting = {other: records for other in DELIMITERS if _is_even(records := _first_records(head, other))}
        fitting.pop(own, None)
        if len(fitting) == 1:
            ((delimiter, first),) = fitting.items()
    names = first[0] if first else []
    is_data = bool(names) and not _is_header(names, spec)
    return TableForm(delimiter, [f"column {n}" for n in range(1, len(names) + 1)] if is_data else None)


def _is_even(records: list[list[str]]) -> bool:
    """Whether records have equally many fields, at least two, and the first one a name for all but an index."""
    return len({len(record) for record in records}) == 1 and len(records[0]) > 1 and all(map(str.strip, records[0][1:]))


def _is_header(names: list[str], spec: DatasetSpec) -> bool:
    """Whether the first record has names: one that is known or that the recipe maps, or mostly words like names."""
    filled = [name.strip() for name in names if name.strip()]
    if any(name in spec.columns.values() for name in names) or any(map(is_known_column, filled)):
        return True
    is_counted = filled in ([str(n + first) for n in range(len(filled))] for first in (0, 1))  # as pandas counts
    return is_counted or 2 * sum(map(_is_name, filled)) > len(filled)


def _is_name(text: str) -> bool:
    words = text.split()
    is_sentence = text.endswith((".", "!", "?", "\u3002", "\uff1f")) and len(words) > 2
    short = len(text) <= NAME_CHARACTERS and len(words) <= NAME_WORDS
    return short and not is_sentence and any(map(str.isalpha, text))


def _first_records(head: str, delimiter: str) -> list[list[str]]:
    """The first records, up to one that is not valid, or that the end of `head` may have cut."""
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, strict=True)
    records: list[list[str]] = []
    with contextlib.suppress(csv.Error):
        while len(records) < MAX_COMPARED and (record := next(reader, None)) is not None:
            records += [record] if record else []
    return records[:-1] if len(head) == MAX_SNIFFED_BYTES and 1 < len(records) < MAX_COMPARED else records


def _read_csv(path: Path, spec: DatasetSpec, progress: ReadProgress) -> Iterator[RawRow]:
    csv.field_size_limit(MAX_LINE_BYTES)  # the module's own limit of 131,072 is shorter than real documents
    form = table_form(path, spec)
    with (
        _open(path, spec, progress) as binary,
        io.TextIOWrapper(binary, "utf-8-sig", "surrogateescape", newline="") as file,
    ):
        reader = csv.reader(_lines(file, path), delimiter=form.delimiter, strict=True)
        header, number = form.header, 1
        if header is None:
            try:
                header = next(filter(None, reader), None)  # behind blank lines
            except csv.Error as error:
                found = printable(str(error))
                raise RefusedError("the header is not valid CSV", where=f"{path}:1", found=found) from error
            if header is None:
                return
            number = reader.line_num + 1
        header = _named(header)
        if header[0].startswith("sep="):
            hint = "delete this line: the character between the columns is found without it"
            raise RefusedError("the first line has no names of columns", where=f"{path}:1", found=header[0], hint=hint)
        _refuse_double_columns(header, f"{path}:1")
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                hint = "is a quotation mark never closed? One inside a field in quotes is written twice"
                yield _bad_row(number, "the row is not valid CSV", printable(str(error)), hint=hint)
            else:
                if any(map(str.strip, values)):  # an empty line is no row, nor are the empty cells below a table
                    yield _csv_row(header, values, number)
            number = reader.line_num + 1


def _named(header: list[str]) -> list[str]:
    """The header with the names that pandas gives to columns without one, such as its own index."""
    made = list(header)
    for index, name in enumerate(header):
        if not name.strip():
            made[index] = f"Unnamed: {index}"
            while made[index] in header:
                made[index] += ".1"
    return made


def _refuse_double_columns(names: list[str], where: str) -> None:
    if len(set(names)) != len(names):
        found, hint = printable(", ".join(names)), "give each a name of its own"
        raise RefusedError("two columns have the same name", where=where, found=found, hint=hint)


TITLE_HINT = "is the first line a title? Delete what stands before the names of the columns"


def _csv_row(header: list[str], values: list[str], number: int) -> RawRow:
    if len(values) == len(header):
        return RawRow(number, dict(zip(header, values, strict=True)))
    found, expected = f"{len(values)} fields", f"{len(header)} fields"
    hint = delimiter_hint(header) or (TITLE_HINT if len(header) == 1 else None)
    return _bad_row(number, "the row does not fit the header", found, expected, hint=hint)


@dataclass(frozen=True, slots=True)
class RowCount:
    """Rows of a file, or of all files of a dataset."""

    num_rows: int
    num_bytes: int
    """Approximate bytes of text; 0: unknown."""
    is_exact: bool = True


def count_rows(path: Path, spec: DatasetSpec = PLAIN) -> RowCount | None:
    """As many rows as `read_file` gives, mostly without reading them; None where that takes long, or cannot be.

    Of large files that have a row a line, and of .txt files, the first `MAX_COUNTED_BYTES` are counted and scaled.
    """
    suffix, progress = known_suffix(path), ReadProgress()
    try:
        if not path.stat().st_size or suffix is None:
            return RowCount(0, 0) if suffix else None
        if suffix == ".parquet":
            return RowCount(_parquet_head(path, COUNT_HEAD_S).num_rows, 0)
        most = MAX_PARSED_BYTES if suffix in (".json", *TABLES) else MAX_COUNTED_BYTES
        with _open(path, spec, progress) as file:
            head, size = file.read(most + 1).removeprefix(b"\xef\xbb\xbf"), path.stat().st_size
            read = cast("IO[bytes]", progress.raw).tell()
        is_whole = len(head) <= most
        if suffix == ".json" and head.lstrip(b" \t\r\n").startswith(b"["):
            return RowCount(len(json.loads(head)), len(head)) if is_whole else None
        if suffix == ".txt":
            rows = sum(1 for _ in text_rows(io.BytesIO(head), spec.txt_rows, path))
        elif suffix in TABLES:
            text, form = io.StringIO(head.decode("utf-8-sig", errors="replace"), newline=""), table_form(path, spec)
            filled = sum(any(map(str.strip, row)) for row in csv.reader(text, delimiter=form.delimiter))
            rows = max(0, filled - (form.header is None))
        else:
            rows = sum(1 for line in head.split(b"\n") if line.strip())
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error, RefusedError):
        return None
    if is_whole or not read:
        return RowCount(rows, len(head))
    return RowCount(round(rows * size / read), round(len(head) * size / read), is_exact=False)


class _ParquetHead(NamedTuple):
    num_rows: int
    dictionary_columns: list[str]
    """Columns of texts that are stored once and named by rows. They stay so in memory: a file of 500 bytes can hold a
    text of 1 MiB that 100,000 rows name."""
    batch_rows: int
    """Rows to unpack at a time: about MAX_LINE_BYTES of them, by what the file says of its groups of rows."""


def _read_parquet(path: Path, progress: ReadProgress) -> Iterator[RawRow]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    head, number = _parquet_head(path), 0
    with (
        _refusing_parquet(path, lambda: number),
        pyarrow.parquet.ParquetFile(path, read_dictionary=head.dictionary_columns) as table,
    ):
        _refuse_double_columns(table.schema_arrow.names, str(path))
        structs = structs_of(table.schema_arrow)
        for batch in table.iter_batches(batch_size=head.batch_rows):
            for index in range(batch.num_rows):  # one by one: texts of a dictionary are copied for each row
                (columns,) = batch.slice(index, 1).to_pylist()
                number += 1
                progress.known_share = number / table.metadata.num_rows
                yield table_row(number, columns, structs)


def structs_of(kind: Any) -> Any:
    """Where a type or schema of pyarrow has structs: a dict for each, a list around those of its items, else None."""
    import pyarrow
    from pyarrow.types import is_struct  # type: ignore[import-untyped]

    if hasattr(kind, "value_type"):
        inner = structs_of(kind.value_type)
        return None if inner is None else [inner]
    has_fields = not isinstance(kind, pyarrow.DataType) or is_struct(kind)
    return {field.name: structs_of(field.type) for field in kind} if has_fields else None


def table_row(number: int, columns: Mapping[str, object], structs: Any) -> RawRow:
    """A row of a table without the nulls that its structs have for every key of other rows.

    A null of the row's own cannot be told from these. Columns, the items of lists and whatever is stored as JSON text
    keep theirs, and so do pairs of bytes and path, the form of a stored image.

    Args:
        structs: of the table's schema, as of `structs_of`.
    """
    return RawRow(number, {name: _unfilled(value, structs[name]) for name, value in columns.items()})


def _unfilled(value: Any, structs: Any) -> Any:
    if isinstance(structs, dict) and isinstance(value, dict) and value.keys() != {"bytes", "path"}:
        filled = ((name, item) for name, item in value.items() if item is not None)
        return {name: _unfilled(item, inner) if (inner := structs[name]) else item for name, item in filled}
    if isinstance(structs, list) and isinstance(value, list):
        return [_unfilled(item, structs[0]) for item in value]
    return value


def _parquet_head(path: Path, processor_s: float = PARQUET_HEAD_S) -> _ParquetHead:
    """Facts of the file's footer, read in a child: pyarrow ends its process over some damaged ones, by a C++ exception
    that nobody catches, and some ask for more memory than there is.

    Raises:
        RefusedError: it is damaged, or beyond the limits.
    """

    def read() -> _ParquetHead:
        import pyarrow.parquet

        with _refusing_parquet(path, lambda: 0):
            metadata = pyarrow.parquet.read_metadata(path)
            groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
            row_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
            kinds = [metadata.schema.column(index).logical_type.type for index in range(metadata.num_columns)]
            # Every column is looked at: it is damaged ones that end this process.
            columns = [(group.column(index), kind) for group in groups for index, kind in enumerate(kinds)]
            shared = [
                column.path_in_schema
                for column, kind in columns
                if column.has_dictionary_page and column.physical_type == "BYTE_ARRAY"
                if kind in ("STRING", "JSON", "NONE")
            ]
            names = list(dict.fromkeys(shared))
            return _ParquetHead(metadata.num_rows, names, max(1, min(1024, MAX_LINE_BYTES // max(1, row_bytes))))

    what = "reading the head of the parquet file"
    return run_limited(read, Limits(what, str(path), processor_s, hint="is the file whole?"))


@contextmanager
def _refusing_parquet(path: Path, last_row: Callable[[], int]) -> Iterator[None]:
    import pyarrow  # type: ignore[import-untyped]

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError) as error:
        raise RefusedError(
            "cannot read the parquet file", where=f"{path}: behind row {last_row()}", found=printable(str(error))
        ) from error


LARGE_BYTES = 1 << 30
"""The first row of larger files is looked at before all of them is."""


def refuse_useless(path: Path, spec: DatasetSpec = PLAIN) -> None:
    """Refuse a large file that its size or its first row makes useless, before all of it is read for its digest.

    Raises:
        OSError: it cannot be read.
        RefusedError: as of `read_file`.
    """
    if path.stat().st_size > LARGE_BYTES:
        if known_suffix(path) == ".json":
            check_list_size(path)
        else:
            next(read_file(path, spec), None)
