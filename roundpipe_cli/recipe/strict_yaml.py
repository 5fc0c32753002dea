"""Strict YAML without surprises: plain data, each value with its place in the file.

PyYAML's C parser only delivers the events; the values are made here, so nothing can be constructed but null, booleans,
integers, floats, text, lists and mappings with text keys. Scalars follow the core schema of YAML 1.2: `1e-5` is a
float, `no` is text, `010` is ten and `12:30` is text. Duplicate keys, anchors, aliases, tags, a second
document and anything over the limits below are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from roundpipe_cli.errors import Problem, RecipeError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Mark with which some editors for Windows begin a file; it means nothing."""
MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_NODES = 10_000
MAX_NUMBER_CHARACTERS = 100
"""Longer digit strings stay text: Python converts decimal digits in quadratic time."""

MAX_DUPLICATES = 20
"""Most duplicate keys listed in one report."""

KeyPath = tuple[str | int, ...]

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+\Z")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)\Z")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Place:
    """Where a value was written."""

    origin: str
    """`recipes/a.yaml:12` or `override lora.r=32`."""
    line: int
    """For sorting problems; overrides come after the file."""
    written: str | None = None
    """The key as the user spelled it, where that was an alias."""


@dataclass
class Document:
    """A parsed file: the data, the place of every key path, and the mistakes that did not stop the parsing."""

    data: Any
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[tuple[int, Problem]] = field(default_factory=list)
    """With the line of each."""


def parse_scalar(text: str) -> None | bool | int | float | str:
    """The value of an unquoted scalar by the YAML 1.2 core schema."""
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) > MAX_NUMBER_CHARACTERS:
        return text
    if _INTEGER.match(text):
        return int(text)
    if _OCTAL_OR_HEX.match(text):
        return int(text[2:], 8 if text[1] == "o" else 16)
    if _FLOAT.match(text):
        return float(text)
    if _INFINITY.match(text):
        return float("-inf" if text.startswith("-") else "inf")
    return float("nan") if text in _NAN else text


def dotted(path: KeyPath) -> str:
    """The key of a path in the tables: `("datasets", 0, "type") -> "datasets[].type"`."""
    return "".join("[]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def format_key(path: KeyPath) -> str:
    """`("datasets", 0, "path") -> "datasets[0].path"`; control characters are escaped and long keys cut."""
    parts: list[str] = []
    for part in path:
        if isinstance(part, int):
            parts.append(f"[{part}]")
            continue
        shown = part if part.isprintable() and part else ascii(part)
        parts.append(("." if parts else "") + (shown if len(shown) <= 60 else shown[:57] + "..."))
    return "".join(parts)


def shown_value(value: Any) -> str:
    """A value as the user might have written it, cut to 100 characters, control characters escaped."""
    if value is None or isinstance(value, bool):
        text = "null" if value is None else str(value).lower()
    elif isinstance(value, int) and abs(value) >= 10**MAX_NUMBER_CHARACTERS:
        text = "a very large number"
    else:
        text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def parse_bytes(raw: bytes, name: str) -> Document:
    """Parse the bytes of a recipe file called `name`.

    Raises:
        RecipeError: too large, not UTF-8 text, not YAML, not a mapping, or YAML that is refused (see the module).
    """
    document = parse_text(_decode(raw, name), name)
    if document.data is None:
        expected = "keys such as `model:` and `datasets:`"
        raise _refusal(f"{name}:1:1", "the recipe is empty", expected=expected, hint=_TO_START)
    if not isinstance(document.data, dict):
        what = f"the recipe is {'a list' if isinstance(document.data, list) else 'a single value'}"
        found = shown_value(document.data) if isinstance(document.data, str) else None
        expected = "a mapping: lines such as `model: Qwen/Qwen3-32B`"
        raise _refusal(f"{document.places[()].origin}:1", what, found, expected, hint=_TO_START)
    return document


def parse_text(text: str, name: str, *, fixed_origin: bool = False) -> Document:
    """Parse one YAML document; with `fixed_origin` every place is `name` itself (an override has no lines).

    Raises:
        RecipeError: the text is not YAML, or is refused.
    """
    refuse_characters(text, name, fixed_origin=fixed_origin)
    builder = _Builder(name, fixed_origin)
    loader = _Loader(text)
    try:
        data = builder.build(_events(loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what, found, hint = _explain(error, text, line, column)
        raise _refusal(_at(name, line, column, fixed_origin), what, found, hint=hint) from None
    finally:
        loader.dispose()
    return Document(data, builder.places, builder.problems)


def refuse_characters(text: str, name: str, *, fixed_origin: bool = False) -> None:
    """
    Raises:
        RecipeError: `text` has a character that no YAML file may have.
    """
    bad = _NOT_TEXT.search(text)
    if bad:
        place = _at(name, *_line_and_column(text, bad.start()), fixed_origin)
        raise _refusal(place, f"the character {ascii(bad.group())} may not stand in a YAML file", hint="delete it")


class _Builder:
    """Makes plain data from parser events; recursion is bounded by MAX_DEPTH."""

    def __init__(self, name: str, fixed_origin: bool) -> None:
        self.name = name
        self.fixed_origin = fixed_origin
        self.places: dict[KeyPath, Place] = {}
        self.problems: list[tuple[int, Problem]] = []
        self.num_nodes = 0
        self.num_duplicates = 0

    def build(self, events: Iterator[Any]) -> Any:
        """The data of the only document, or None of an empty stream."""
        data: Any = None
        num_documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    what, hint = "a second document starts here", "delete the line `---`, or what follows it"
                    raise self._refuse(event, what, "one document in a file", hint)
                first = next(events)
                self._note((), first)
                data = self._value(first, events, ())
        return data

    def _value(self, event: Any, events: Iterator[Any], path: KeyPath) -> Any:
        self._check_event(event, path)
        if isinstance(event, yaml.ScalarEvent):
            return parse_scalar(event.value) if event.implicit[0] else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            for item in events:
                if isinstance(item, yaml.SequenceEndEvent):
                    break
                here = (*path, len(items))
                self._note(here, item)
                items.append(self._value(item, events, here))
            return items
        return self._mapping(events, path)

    def _mapping(self, events: Iterator[Any], path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event, path)
            here = (*path, key)
            if key in mapping:
                self._duplicate(event, here)
                kept = dict(self.places)
                self._value(next(events), events, here)
                self.places = kept
                continue
            self._note(here, event)
            mapping[key] = self._value(next(events), events, here)
        return mapping

    def _key(self, event: Any, path: KeyPath) -> str:
        self._check_event(event, path)
        if not isinstance(event, yaml.ScalarEvent):
            raise self._refuse(event, "a list or mapping is used as a key", "plain text, such as learning_rate", _KEYS)
        key = parse_scalar(event.value) if event.implicit[0] else event.value
        if not isinstance(key, str):
            what = f"the key {shown_value(event.value)} is not text"
            raise self._refuse(event, what, "plain text, such as learning_rate", _KEYS)
        return key

    def _check_event(self, event: Any, path: KeyPath) -> None:
        self.num_nodes += 1
        if isinstance(event, yaml.AliasEvent):
            raise self._refuse(event, f"the alias {shown_value(event.anchor)} is refused", "values written out", _ALIAS)
        if event.anchor is not None:
            what = f"the anchor {shown_value(event.anchor)} is refused"
            raise self._refuse(event, what, "values written out", _ANCHOR)
        if event.tag is not None:
            written = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self._refuse(event, f"the tag {shown_value(written)} is refused", "plain values without `!`", _TAG)
        if len(path) > MAX_DEPTH:
            what = f"the nesting is deeper than {MAX_DEPTH} levels"
            raise self._refuse(event, what, f"at most {MAX_DEPTH} levels", _KEYS)
        if self.num_nodes > MAX_NODES:
            what = f"the recipe has more than {MAX_NODES} values"
            raise self._refuse(event, what, f"at most {MAX_NODES} values", _DATA)

    def _duplicate(self, event: Any, path: KeyPath) -> None:
        self.num_duplicates += 1
        if self.num_duplicates > MAX_DUPLICATES:
            return
        problem = Problem(
            f"the key {format_key(path)} is given twice",
            where=f"{self._where(event)}: {format_key(path)}",
            found=None if self.fixed_origin else f"first given at {self.places[path].origin}",
            expected="each key once",
            hint="delete one of the two",
        )
        self.problems.append((event.start_mark.line + 1, problem))

    def _note(self, path: KeyPath, event: Any) -> None:
        line = event.start_mark.line + 1
        self.places[path] = Place(self.name if self.fixed_origin else f"{self.name}:{line}", line)

    def _where(self, event: Any) -> str:
        return _at(self.name, event.start_mark.line + 1, event.start_mark.column + 1, self.fixed_origin)

    def _refuse(self, event: Any, what: str, expected: str, hint: str) -> RecipeError:
        return _refusal(self._where(event), what, expected=expected, hint=hint)


def _events(loader: Any) -> Iterator[Any]:
    while loader.check_event():
        yield loader.get_event()


def _decode(raw: bytes, name: str) -> str:
    if len(raw) > MAX_BYTES:
        found, expected = f"more than {MAX_BYTES} bytes", f"at most {MAX_BYTES} bytes"
        raise _refusal(f"{name}:1:1", "the recipe is too large", found, expected, hint=_DATA)
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _refusal(f"{name}:1:1", "the file is UTF-16 text", hint="save it as UTF-8")
    zero = raw.find(b"\0")
    if zero >= 0:
        where = _at(name, raw.count(b"\n", 0, zero) + 1, zero - raw.rfind(b"\n", 0, zero), False)
        raise _refusal(where, "the file is binary, not text", expected="YAML in UTF-8", hint=_TO_START)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = _at(name, *_line_and_column(raw[: error.start].decode("utf-8"), error.start), False)
        found = f"byte 0x{raw[error.start]:02x}"
        raise _refusal(where, "the file is not UTF-8 text", found, hint="save it as UTF-8") from None


def _line_and_column(text: str, index: int) -> tuple[int, int]:
    before = text[:index]
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _at(name: str, line: int, column: int, fixed_origin: bool) -> str:
    return name if fixed_origin else f"{name}:{line}:{column}"


_TO_START = "`roundpipe init` writes a recipe, `roundpipe recipes ls` lists those that come with the tool"
_KEYS = "`roundpipe recipes keys` lists all keys"
_DATA = "data belongs into files that the recipe names"
_ALIAS = "write the value here; `${key}` repeats the value of another key"
_ANCHOR = "delete the word that begins with `&`; `${key}` repeats the value of another key"
_TAG = "delete the word that begins with `!`, or put the value in quotes"

_SYNTAX_HINTS = {
    "mapping values": 'put a value that holds `: ` in quotes: key: "a: b"; nested keys begin on a line below',
    "quoted scalar": "close the quotation mark",
    "flow sequence": "close the list with `]`; put commas between its items",
    "flow mapping": "close the mapping with `}`; put commas between its items",
    "": "keys of one section begin in the same column; put a value with special characters in quotes",
}
"""Words of the parser -> what to do; the last one fits all."""


def _explain(error: yaml.MarkedYAMLError, text: str, line: int, column: int) -> tuple[str, str | None, str]:
    """(what, found, hint) of a syntax error, in one sentence each."""
    lines = text.splitlines()
    content = lines[line - 1] if line <= len(lines) else ""
    found = shown_value(content.strip()) if content.strip() else None
    if "\t" in content[:column] and not content[: column - 1].strip():
        return "a tab is used for indentation where YAML wants spaces", found, "put two spaces in place of each tab"
    key, colon, _ = content[:column].partition(":")
    if "mapping values" in (error.problem or "") and colon and not key.startswith(key.strip() or key):
        what = "this is not valid YAML: the line is indented further than the key above it, which has a value"
        return what, found, "begin keys of one section in the same column"
    what = f"this is not valid YAML: {error.problem or 'the text cannot be parsed'}"
    if error.context and error.context_mark and error.context_mark.line + 1 != line:
        what += f" ({error.context} that starts in line {error.context_mark.line + 1})"
    return what, found, next(hint for words, hint in _SYNTAX_HINTS.items() if words in what)


def _refusal(
    where: str, what: str, found: str | None = None, expected: str | None = None, *, hint: str | None = None
) -> RecipeError:
    return RecipeError([Problem(what, where, found, expected, hint)])
