"""Rows of a plain text file: its paragraphs, its lines, the whole file, or what stands between separators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roundpipe_cli.data.rows import RawRow, RowFault


def text_rows(
    lines: Iterator[bytes], kind: str, max_bytes: int, too_long: Callable[[int, str], Exception]
) -> Iterator[RawRow]:
    """Rows with the column `text`, numbered by the first of their lines that is not blank; blank rows are left out.

    Args:
        lines: with their line ends.
        kind: `paragraph` (lines up to a blank one), `line`, `file`, or else the text that parts rows, wherever it
            stands.
        max_bytes: of one row.
        too_long: makes the error of a longer one, from the number of its first line and what it is.
    """
    if kind == "paragraph":
        parts = _paragraphs(lines, max_bytes, too_long)
    elif kind == "line":
        parts = enumerate(lines, start=1)
    else:
        parts = _separated(lines, b"" if kind == "file" else kind.encode(), max_bytes, too_long)
    name = kind if kind in ("paragraph", "line", "file") else "text between separators"
    for number, data in parts:
        if data.strip():
            yield _row(number, data, name)


def _paragraphs(
    lines: Iterator[bytes], max_bytes: int, too_long: Callable[[int, str], Exception]
) -> Iterator[tuple[int, bytes]]:
    paragraph: list[bytes] = []
    number, length = 1, 0
    for line_number, line in enumerate(lines, start=1):
        if line.strip():
            number, length = (number, length) if paragraph else (line_number, 0)
            length += len(line)
            if length > max_bytes:
                raise too_long(number, "paragraph")
            paragraph.append(line)
        else:
            yield number, b"".join(paragraph)
            paragraph = []
    yield number, b"".join(paragraph)


def _separated(
    lines: Iterator[bytes], separator: bytes, max_bytes: int, too_long: Callable[[int, str], Exception]
) -> Iterator[tuple[int, bytes]]:
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
        if len(kept) > max_bytes:
            raise too_long(begin, "file" if not separator else "text between separators")
    yield _first_line(begin, bytes(kept)), bytes(kept)


def _first_line(begin: int, part: bytes) -> int:
    """The number of the first line that is not blank, where the part begins on line `begin`."""
    return begin + part[: len(part) - len(part.lstrip())].count(b"\n")


def _row(number: int, data: bytes, kind: str) -> RawRow:
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return RawRow(number, {}, RowFault(f"the {kind} is not valid UTF-8"))
    return RawRow(number, {"text": text.strip("\n") if kind == "text between separators" else text.rstrip("\n")})
