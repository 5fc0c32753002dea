"""Encodings of text files: what their first bytes say, which code page they look like, and their text as UTF-8."""

from __future__ import annotations

import codecs
import io
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
_WESTERN = "äöüßéèêëàâáãçñíóúîïôûåæøœ¿¡’“”„«»–—…€°"
CODE_PAGES: Mapping[str, str] = {
    "cp1252": _WESTERN,
    "cp1250": "ěščřžůýąćęłńóśźżőűđáíéúöü’“”„»«–—…€",
    "cp1254": "ığşçöüâ’“”–…",
    **dict.fromkeys(("mac_roman", "cp850"), _WESTERN),
    **dict.fromkeys(("cp1251", "cp1253", "cp1255", "cp1256"), ""),
    "gb18030": "的一是不了在人有我他这为大来以个中上们到说国和地也子时要于就下得可你年会那后能对什么吗，。？、：",
    "cp932": "のはにをたがでてとしれさいるなかすまもこうっりくあそよ、。？・ー",
    "cp949": "이다는의에가을를은고하지도어기로사한서나요니까습입해그안세무엇",
    "big5": "的一是不了在人有我他這為大來以個中上們到說國和地也子時要於就下得可你年會那後能對什麼嗎，。？、：",
}
"""Encodings that are suggested, the usual one first -> the characters that are common in them beside ASCII; empty: of
scripts whose words have no ASCII letter."""
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
    scores = {}
    for page, common in CODE_PAGES.items():
        with suppress(UnicodeError):
            scores[page] = _plausibility(codecs.getincrementaldecoder(page)().decode(data), common)
    best = max(scores, key=scores.__getitem__, default=None)
    return best if best is not None and scores[best] > 0.5 else None


def encoding_hint(data: bytes | str) -> str | None:
    """A hint for bytes that are no UTF-8, or for text with lone surrogates in their place; None: nothing is known."""
    guess = None
    with suppress(UnicodeEncodeError):  # halves of pairs that a JSON text spells are no bytes
        guess = guess_encoding(data if isinstance(data, bytes) else data.encode("utf-8", "surrogateescape"))
    return f"in the dataset's entry, `encoding: {guess}` (or the one that it was saved in)" if guess else None


def _plausibility(text: str, common: str) -> float:
    """At most 1: how well the characters beside ASCII fit between the letters around them."""
    points = count = 0
    for before, character, after in zip(" " + text, text, text[1:] + " ", strict=False):
        if character.isascii():
            continue
        count += 1
        letters = [other for other in (before, after) if other.isalpha()]
        if not character.isalpha():  # a quotation mark or a dash, but no symbol inside a word
            points += 2 if character in common else -2 if len(letters) == 2 else 0
        elif before.islower() and character.isupper():
            points -= 2
        elif common:
            points += 2 if character.lower() in common else 1
        else:
            points += 2 if not letters else sum(-1 if other.isascii() else 1 for other in letters) * 2 // len(letters)
    return points / 2 / max(1, count)
