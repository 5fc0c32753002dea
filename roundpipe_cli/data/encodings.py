"""Encodings of text files: what their first bytes say, which code page they look like, and their text as UTF-8."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

MARKS: Mapping[bytes, str] = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's, with which it begins
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order marks -> the encoding that they say."""
CODE_PAGES = (
    *("cp1252", "cp1250", "cp1254", "mac_roman", "cp1251", "cp1253", "cp1255", "cp1256"),
    *("gb18030", "cp932", "cp949", "big5"),
)
"""Encodings that are suggested; of those that fit equally well, the first."""
CHUNK_CHARACTERS = 1 << 16


class _AsUtf8(io.RawIOBase):
    """The bytes of a text file in another encoding, as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, newline="\n")  # line ends stay as they are
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._rest = self._rest or self._text.read(CHUNK_CHARACTERS).encode("utf-8")
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def is_utf8(encoding: str) -> bool:
    """Whether it is a name of UTF-8."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def is_text_encoding(encoding: str) -> bool:
    """Whether Python can read text in an encoding of this name."""
    try:
        return bool(codecs.lookup(encoding)._is_text_encoding)
    except (LookupError, ValueError):
        return False


def marked_encoding(head: bytes) -> str | None:
    """The encoding, other than UTF-8, of a file whose first bytes are a mark; None: there is none."""
    return next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), None)


def as_utf8(file: IO[bytes], encoding: str) -> IO[bytes]:
    """The bytes of `file` as UTF-8; reading raises UnicodeError where they are none of `encoding`."""
    return file if is_utf8(encoding) else io.BufferedReader(_AsUtf8(file, encoding))


def guess_encoding(data: bytes) -> str | None:
    """The encoding that bytes look like; None: UTF-8, a broken part of it, what a mark says, or no text we know."""
    if marked_encoding(data) is not None:
        return None
    if data.count(b"\0") > len(data) // 5:  # UTF-16 without its mark
        return "utf-16-le" if data[1::2].count(b"\0") > data[::2].count(b"\0") else "utf-16-be"
    text = data.decode("utf-8", "surrogateescape")
    others = [character for character in text if not character.isascii()]
    if 2 * sum("\udc80" <= character <= "\udcff" for character in others) <= len(others):
        return None
    if not re.search(r"[^\W\x00-\x7f]|\ufffd", data.decode("cp1252", "replace")):  # signs alone, as in English: ’ € –
        return "cp1252"
    from charset_normalizer import from_bytes  # 0.1 s

    telling = b"\n".join(line for line in data.splitlines() if not line.isascii())  # it looks at samples
    matches = from_bytes(telling, cp_isolation=list(CODE_PAGES))
    fits = {page: (round(one.chaos, 2), -one.coherence) for one in matches for page in one.could_be_from_charset}
    return min(filter(fits.__contains__, CODE_PAGES), key=fits.__getitem__, default=None)


def encoding_hint(data: bytes | str) -> str | None:
    """A hint for bytes that are no UTF-8, or for text with lone surrogates in their place; None: nothing is known."""
    guess = None
    with suppress(UnicodeEncodeError):  # halves of pairs that a JSON text spells are no bytes
        guess = guess_encoding(data if isinstance(data, bytes) else data.encode("utf-8", "surrogateescape"))
    return f"in the dataset's entry, `encoding: {guess}` (or the one that it was saved in)" if guess else None
