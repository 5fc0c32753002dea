"""Texts that know which field of which message each of their characters came from, through a chat template.

    messages[1].content   "<think>so</think>12"            field 7, characters 0 to 19
    content.split("</think>")[-1]      "12"                field 7, characters 17 to 19
    "<|im_start|>assistant\n" + that + "<|im_end|>"        21 of the template, 2 of field 7, 10 of the template

A `Traced` is a `str` in every respect, so the template takes the same way and writes the same text as without it.
What the methods below do not follow (a filter of some template) comes out as the template's own text: it is then
missing from its field, which whoever reads the pieces notices.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsIndex

from roundpipe_cli.data.messages import Message
from roundpipe_cli.data.spans import TokenSpan

OWN = -1
"""The field of the template's own text."""
SEVERAL = -2
"""The field of text that is made of several messages at once."""
OPEN, CLOSE = -3, -4
"""Fields of the empty pieces at both ends of a `{% generation %}` block."""
COPIED, DUMPED, CHANGED = 0, 1, 2
"""How a piece was made of its field: as it stands, as JSON or Python's text of a list, or with other letters."""
DUMP_MARKS = re.compile(r"[\s{}()\[\]\"',:]*")
MARK = re.compile("\x00([0-9]+)\x00")

Cover = tuple[int, int, int]
"""A range of a field: field, first character, the one behind the last."""


class TracedPiece(NamedTuple):
    """Characters of a text that come from one place."""

    length: int
    field: int
    """The field, or one of the names above; of a piece made of several fields of a message, the first."""
    covers: tuple[Cover, ...] = ()
    """The ranges of fields that the piece stands for."""
    how: int = COPIED


class Traced(str):
    """A text with its pieces."""

    __slots__ = ("_pieces",)
    _pieces: tuple[TracedPiece, ...]

    def __new__(cls, text: str, pieces: tuple[TracedPiece, ...] | None = None) -> Traced:
        made = str.__new__(cls, text)
        made._pieces = (TracedPiece(len(text), OWN),) if pieces is None else pieces
        return made

    @classmethod
    def of_field(cls, text: str, field: int) -> Traced:
        """A whole field."""
        return cls(text, (TracedPiece(len(text), field, ((field, 0, len(text)),)),))

    def _cut(self, start: int, stop: int) -> str:
        if start <= 0 and stop >= len(self):
            return self
        text = str.__getitem__(self, slice(start, stop))
        pieces, position = [], 0
        for piece in self._pieces:
            first, last = max(start, position), min(stop, position + piece.length)
            if first < last:
                pieces.append(self._part(piece, position, first, last))
            elif piece.field in (OPEN, CLOSE) or (piece.length == 0 and start <= position <= stop):
                pieces.append(piece)
            position += piece.length
        return type(self)(text, tuple(pieces))

    def _part(self, piece: TracedPiece, position: int, first: int, last: int) -> TracedPiece:
        """The characters from `first` to `last` of a piece that begins at `position`."""
        end = position + piece.length
        if (first == position and last == end) or piece.field < 0:
            return piece._replace(length=last - first)
        if piece.how == COPIED:
            ((field, begin, _),) = piece.covers
            return TracedPiece(last - first, field, ((field, begin + first - position, begin + last - position),))
        lost = str.__getitem__(self, slice(position, first)) + str.__getitem__(self, slice(last, end))
        kept = piece.how == DUMPED and DUMP_MARKS.fullmatch(lost) is not None
        return TracedPiece(last - first, piece.field, piece.covers if kept else (), piece.how)

    def _changed(self, text: str) -> str:
        if str.__eq__(self, text):
            return self
        opened, closed = ([piece for piece in self._pieces if piece.field == mark] for mark in (OPEN, CLOSE))
        said = [
            piece._replace(length=0, how=CHANGED) for piece in self._pieces if piece.field not in (OWN, OPEN, CLOSE)
        ]
        if not said and not opened:
            return text
        first = (said[0] if said else TracedPiece(0, OWN))._replace(length=len(text))
        return Traced(text, (*opened, first, *said[1:], *closed))

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return Traced(str.__add__(self, other), self._pieces + pieces_of(other))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return Traced(str.__add__(other, self), pieces_of(other) + self._pieces)

    def __mul__(self, times: SupportsIndex) -> str:
        return join_traced([self] * times.__index__())

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = str.__getitem__(self, key)
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._cut(start, max(start, stop)) if step == 1 else self._changed(text)
        index = key.__index__() % len(self)
        return self._cut(index, index + 1)

    def __iter__(self) -> Iterator[str]:
        return (self._cut(index, index + 1) for index in range(len(self)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(str.rstrip(self, chars)))

    def strip(self, chars: str | None = None, /) -> str:
        stop = len(str.rstrip(self, chars))
        return self._cut(min(stop, len(self) - len(str.lstrip(self, chars))), stop)

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(self) - len(suffix) if self.endswith(suffix) else len(self))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._at(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._at(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._at(str.splitlines(self, keepends=True), "")
        parts = str.splitlines(self, keepends=keepends)
        return [line[: len(part)] for line, part in zip(whole, parts, strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._at(list(str.partition(self, sep)), "")
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._at(list(str.rpartition(self, sep)), "")
        return first, middle, last

    def _at(self, parts: Sequence[str], sep: str | None) -> list[str]:
        """Parts that stand in this order, `sep` between them (None: blanks)."""
        made, position = [], 0
        for part in parts:
            position = str.index(self, part, position) if sep is None else position
            made.append(self._cut(position, position + len(part)))
            position += len(part) + len(sep or "")
        return made

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return self._changed(str.replace(self, old, new, count))
        return self if old not in self else join_traced(self.split(old, count), new)

    def join(self, parts: Iterable[str], /) -> str:
        return join_traced(list(parts), self)

    def upper(self) -> str:
        return self._changed(str.upper(self))

    def lower(self) -> str:
        return self._changed(str.lower(self))

    def title(self) -> str:
        return self._changed(str.title(self))

    def capitalize(self) -> str:
        return self._changed(str.capitalize(self))


class SafeTraced(Traced):
    """A text behind the filter `safe`, which escapes what is added to it, as markupsafe's does."""

    __slots__ = ()

    def __html__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return self._beside(other, lambda: join_traced((self, other)), lambda own: own + other)

    def __radd__(self, other: str) -> str:
        return self._beside(other, lambda: join_traced((other, self)), lambda own: str.__str__(other) + own)

    def _beside(self, other: str, traced: Callable[[], str], escaped: Callable[[str], str]) -> str:
        from markupsafe import Markup, escape

        if not isinstance(other, str):
            return NotImplemented
        if hasattr(other, "__html__") or str.__eq__(str(escape(str.__str__(other))), other):
            made = traced()
            return SafeTraced(made, pieces_of(made))
        return escaped(Markup(str.__str__(self)))


class TracedNumber:
    """A number of a call's arguments."""

    field = OWN

    def __str__(self) -> str:
        return Traced.of_field(repr(self), self.field)


class TracedInt(TracedNumber, int):
    """A whole number of a call's arguments."""


class TracedFloat(TracedNumber, float):
    """A number of a call's arguments that is not whole."""


class TracedItems:
    """A list or an object of a call's arguments, or a call."""

    def __str__(self) -> str:
        """The text that it is written as, made of all that it holds of one message."""
        text, found = repr(self), list[Cover]()
        found_in(self, found)
        return Traced(text, (TracedPiece(len(text), found[0][0], tuple(found), DUMPED),)) if found else text


class TracedList(TracedItems, list[Any]):
    """A list of a call's arguments."""


class TracedDict(TracedItems, dict[Any, Any]):
    """An object of a call's arguments, or a call."""


def pieces_of(text: str) -> tuple[TracedPiece, ...]:
    """The pieces of any text."""
    if isinstance(text, Traced):
        return text._pieces
    return (TracedPiece(len(text), OWN),) if text else ()


def join_traced(parts: Iterable[str], between: str = "") -> str:
    """The parts end to end, with `between` between them."""
    parts = parts if isinstance(parts, (list, tuple)) else list(parts)
    text = str.join(between, parts)
    if not isinstance(between, Traced) and not any(isinstance(part, Traced) for part in parts):
        return text
    pieces: list[TracedPiece] = []
    for index, part in enumerate(parts):
        if index and between:
            pieces += pieces_of(between)
        pieces += pieces_of(part)
    return Traced(text, tuple(pieces))


def percent(template: str, values: Any) -> str:
    """`template % values`."""
    return _filled(lambda given: str.__mod__(template, given), values)


def _filled(fill: Callable[[Any], str], values: Any) -> str:
    """The text that `fill` makes of `values`, with the pieces of those that it writes as they stand."""
    kept: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, (Traced, TracedNumber, TracedItems)):
            kept.append(str(value))
            name = f"\x00{len(kept) - 1}\x00"
            if isinstance(value, str):
                return name
            base: Any = type(value).__mro__[2]
            spelt = {
                "__str__": lambda _: name,
                "__format__": lambda self, how: base.__format__(self, how) if how else name,
            }
            return type("Spelt", (base,), spelt)(inside(base(value), list))
        return inside(value, tuple)

    def inside(value: Any, sequence: type[list[Any] | tuple[Any, ...]]) -> Any:
        if isinstance(value, sequence):
            return sequence(map(mark, value))
        return {key: mark(item) for key, item in value.items()} if isinstance(value, dict) else value

    text, marked = fill(values), mark(values)
    if not kept or "\x00" in text:
        return text
    parts = MARK.split(fill(marked))
    made = join_traced([kept[int(part)] if index % 2 else part for index, part in enumerate(parts)])
    return made if str.__eq__(made, text) else text


def found_in(value: object, found: list[Cover]) -> None:
    """Add the ranges of fields that objects and lists hold."""
    if isinstance(value, Traced):
        found.extend(cover for piece in value._pieces for cover in piece.covers)
    elif isinstance(value, TracedNumber):
        found.append((value.field, 0, len(str(value))))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found_in(key, found)
            found_in(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            found_in(item, found)


TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
"""The date that templates get, which is the default of Llama 3's."""


def traced_environment(base: Any, owners: list[int], plain: set[int]) -> Any:
    """transformers' environment for chat templates, whose templates keep the pieces of what they are given, and get a
    fixed date.

    Args:
        base: that environment; None: its settings, where transformers is not to be loaded.
        owners: the message of each field; whoever renders fills it.
        plain: `id` of objects that hold no text of a message; whoever renders fills it.
    """
    from jinja2 import nodes
    from jinja2.compiler import CodeGenerator, Frame
    from jinja2.ext import Extension
    from jinja2.filters import make_attrgetter
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from markupsafe import Markup

    class Generator(CodeGenerator):
        def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2 names it
            self.write("environment.concat((")
            for part in node.nodes:
                self.write("str(")
                self.visit(part, frame)
                self.write("), ")
            self.write("))")

    class Environment(ImmutableSandboxedEnvironment):
        concat = staticmethod(join_traced)
        code_generator_class = Generator
        intercepted_binops = frozenset("%")
        has_marks = False
        """Whether a template with `{% generation %}` was compiled here."""

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            return percent(left, right) if isinstance(left, str) else super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            plain = super().wrap_str_format(value)
            if plain is None:
                return None
            return lambda *args, **kwargs: _filled(lambda given: str(plain(*given[0], **given[1])), (args, kwargs))

        def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
            owner = getattr(__obj, "__self__", None)
            if type(owner) is str and __obj.__name__ in ("join", "replace"):  # their results are plain text
                __obj = getattr(Traced(owner), __obj.__name__)
            return super().call(__context, __obj, *args, **kwargs)

    class Marks(Extension):
        """`{% generation %}`: the marks that a template may have around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            environment.has_marks = True
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return join_traced((Traced("", (TracedPiece(0, OPEN),)), caller(), Traced("", (TracedPiece(0, CLOSE),))))

    def to_json(value: Any, *args: Any, **kwargs: Any) -> str:
        text: str = base.filters["tojson"](value, *args, **kwargs)
        found: list[Cover] = []
        if id(value) not in plain:
            found_in(value, found)
        if not found:
            return text
        field = found[0][0] if len({owners[cover[0]] for cover in found}) == 1 else SEVERAL
        return Traced(text, (TracedPiece(len(text), field, tuple(found), DUMPED),))

    def join(value: Iterable[Any], between: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(environment, attribute), value)
        return join_traced([str(part) for part in value], str(between))

    def safe(value: Any) -> str:
        text = str(value)
        return SafeTraced(text, text._pieces) if isinstance(text, Traced) else Markup(text)

    if base is None:
        loops = "jinja2.ext.loopcontrols"
        base = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loops])
        base.filters["tojson"] = json.dumps
    extensions = [type(item) for item in base.extensions.values() if "generation" not in item.tags]
    environment = Environment(
        trim_blocks=base.trim_blocks, lstrip_blocks=base.lstrip_blocks, extensions=[*extensions, Marks]
    )
    environment.globals |= {**base.globals, "strftime_now": TEMPLATE_DATE.strftime}
    environment.filters.update(base.filters)
    environment.filters |= {"tojson": to_json, "join": join, "safe": safe}
    environment.filters["format"] = lambda text, *args, **kwargs: percent(str(text), kwargs or args)
    return environment


# The fields of a conversation (contents, thoughts, names and arguments of calls), and their places in its text.

NOT_SAID = re.compile(r"(?:\s|</?think>)*")
"""Characters of a content that a template may leave out, or write itself."""
CONSTANTS = {True: "true", False: "false", None: "null|none"}


@dataclass(frozen=True, slots=True)
class Field:
    """A text of a message."""

    message: int
    part: Literal["content", "thought", "name", "arguments"]
    text: str
    constant: str = ""
    """Spelling of the value that a key of arguments has, where that is no text and no number."""
    is_key: bool = False
    has_place: bool = False
    """A content of nothing that parts what is before it from what is behind it, as an empty result of a tool does."""


class Fields:
    """The fields of a conversation in order, and its messages with texts that know them.

    The same messages have the same fields, whatever follows them.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.fields: list[Field] = []
        self.messages = [self._message(index, message) for index, message in enumerate(messages)]

    def _message(self, index: int, message: Message) -> Message:
        traced = {**message}
        if "content" in message:
            is_empty = message["role"] != "assistant" and not message["content"]
            traced["content"] = self._traced(
                message["content"], Field(index, "content", message["content"], has_place=is_empty)
            )
        thought = message.get("reasoning_content")
        if thought is not None:  # under the two names that transformers gives it
            thought = self._traced(thought, Field(index, "thought", thought))
            traced = {"thinking": thought, **traced, "reasoning_content": thought}
        if "tool_plan" in message:  # one of the two
            traced["tool_plan"] = traced["content"] if message["tool_plan"] == message["content"] else thought
        if "tool_calls" in message:
            traced["tool_calls"] = TracedList(self._call(call, index) for call in message["tool_calls"])
        return traced

    def _call(self, call: dict[str, Any], message: int) -> dict[str, Any]:
        function = call["function"]
        name = self._traced(function["name"], Field(message, "name", function["name"]))
        arguments = self._value(function["arguments"], message)
        return TracedDict(call, function=TracedDict(function, name=name, arguments=arguments))

    def _value(self, value: Any, message: int) -> Any:
        if isinstance(value, dict):
            made = TracedDict()
            for key, item in value.items():
                spelt = CONSTANTS[item] if item is None or isinstance(item, bool) else ""
                name = self._traced(key, Field(message, "arguments", key, spelt, is_key=True))
                made[name] = self._value(item, message)
            return made
        if isinstance(value, (list, tuple)):
            return TracedList(self._value(item, message) for item in value)
        if isinstance(value, str):
            return self._traced(value, Field(message, "arguments", value))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = TracedInt(value) if isinstance(value, int) else TracedFloat(value)
            number.field = len(self.fields)
            self.fields.append(Field(message, "arguments", repr(value)))
            return number
        return value

    def _traced(self, text: str, of: Field) -> Traced:
        self.fields.append(of)
        return Traced.of_field(text, len(self.fields) - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """A piece at its place."""

    start: int
    end: int
    piece: TracedPiece
    message: int
    """-1: of several messages."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A rendered text with its pieces, in order."""

    text: str
    runs: tuple[Run, ...]
    """Pieces that are not the template's own."""
    marks: tuple[TokenSpan, ...]
    """Ranges between `{% generation %}` marks."""
    fields: Sequence[Field]
    _found: Mapping[int, list[tuple[int, int, Run]]]
    """Ranges of each field that are there as they stand, with their runs."""
    _changed: Collection[int]
    """Fields that are there in other letters."""

    def of_message(self, index: int) -> list[Run]:
        """Runs of a message, in order."""
        return [run for run in self.runs if run.message == index]

    def last_at(self, piece: TracedPiece) -> int | None:
        """The end of the last run of the same field, and the same part of it."""
        for run in reversed(self.runs):
            if run.piece.field == piece.field and run.piece.covers[-1:] == piece.covers[-1:] != ():
                return run.end
        return None

    def next_start(self, position: int) -> int:
        """Where the first run begins that does not begin before this; the end of the text without one."""
        return next((run.start for run in self.runs if run.start >= position), len(self.text))

    def holds(self, wanted: int) -> bool:
        """Whether anything of a field is in the text, in whatever letters."""
        return wanted in self._found or wanted in self._changed

    def missing(self, wanted: int) -> list[TokenSpan]:
        """Parts of a field that are not in the text as they stand, but for blanks and marks of thoughts.

        A key of a call whose value is a constant that is not behind it counts as missing.
        """
        text, constant = self.fields[wanted].text, self.fields[wanted].constant
        found = [(start, stop) for start, stop, key in self._found.get(wanted, ()) if self._has_constant(key, constant)]
        if not found:
            is_blank = NOT_SAID.fullmatch(text) and not constant
            return [] if is_blank or self._spells_key(wanted) else [(0, len(text))]
        position, lost = 0, []
        for start, stop in [*sorted(found), (len(text), len(text))]:
            if start > position and NOT_SAID.fullmatch(text, position, start) is None:
                lost.append((position, start))
            position = max(position, stop)
        return lost

    def _spells_key(self, wanted: int) -> bool:
        """Whether the template itself writes a key of arguments, before its value."""
        values = self._found.get(wanted + 1) if self.fields[wanted].is_key else None
        if not values:
            return False
        start = values[0][2].start
        before = max((run.end for run in self.runs if run.end <= start), default=0)
        return re.search(rf"\b{re.escape(self.fields[wanted].text)}\b", self.text[before:start]) is not None

    def _has_constant(self, key: Run, constant: str) -> bool:
        if not constant or key.piece.how == DUMPED:
            return True
        behind = self.text[key.end : self.next_start(key.end)]
        return re.search(rf"\b(?:{constant})\b", behind, re.IGNORECASE) is not None


def lay(parts: Sequence[str], fields: Sequence[Field]) -> Laid:
    """Find the pieces of a rendered text, which is these parts end to end."""
    runs: list[Run] = []
    marks: list[TokenSpan] = []
    opened: list[int] = []
    found: dict[int, list[tuple[int, int, Run]]] = {}
    changed: set[int] = set()
    position = 0
    for part in parts:
        for piece in pieces_of(part):
            length, field, covers, how = piece
            if field == OPEN:
                opened.append(position)
            elif field == CLOSE:
                marks.append((opened.pop(), position))
            elif field != OWN and (length or fields[field].has_place):
                run = Run(position, position + length, piece, fields[field].message if field >= 0 else -1)
                runs.append(run)
                if how == CHANGED:
                    changed.add(field)
                else:
                    for of, start, stop in covers:
                        found.setdefault(of, []).append((start, stop, run))
            position += length
    return Laid("".join(parts), tuple(runs), tuple(sorted(marks)), fields, found, changed)
