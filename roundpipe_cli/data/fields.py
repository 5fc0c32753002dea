"""The fields of a conversation (contents, thoughts, names and arguments of calls), and their places in its text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from roundpipe_cli.data.messages import Message
from roundpipe_cli.data.spans import TokenSpan
from roundpipe_cli.data.tools import END_OF_THOUGHT
from roundpipe_cli.data.traced import (
    CHANGED,
    CLOSE,
    DUMPED,
    OPEN,
    OWN,
    Traced,
    TracedFloat,
    TracedInt,
    TracedPiece,
    pieces_of,
)

NOT_SAID = re.compile(r"(?:\s|</?think>)*")
"""Characters of a content that a template may leave out, or write itself."""
CONSTANTS = {True: "true", False: "false", None: "null|none"}

FieldPart = Literal["content", "thought", "name", "arguments"]


@dataclass(frozen=True, slots=True)
class Field:
    """A text of a message."""

    message: int
    part: FieldPart
    text: str
    call: int = 0
    """Which of the message's calls it belongs to."""
    constant: str = ""
    """Spelling of the value that a key of arguments has, where that is no text and no number."""


@dataclass(slots=True)
class Fields:
    """The fields of a conversation in order, and its messages with texts that know them."""

    fields: list[Field] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Fields:
        """The same messages have the same fields, whatever follows them."""
        made = cls()
        for message in messages:
            made._add(message)
        return made

    def _add(self, message: Message) -> None:
        index = len(self.messages)
        traced = {**message}
        if "content" in message:
            traced["content"] = self._traced(message["content"], Field(index, "content", message["content"]))
        thought = message.get("reasoning_content")
        if thought is not None:  # under the two names that transformers gives it
            thought = self._traced(thought, Field(index, "thought", thought))
            traced = {"thinking": thought, **traced, "reasoning_content": thought}
        if "tool_plan" in message:  # one of the two
            traced["tool_plan"] = traced["content"] if message["tool_plan"] == message["content"] else thought
        if "tool_calls" in message:
            traced["tool_calls"] = [self._call(call, index, place) for place, call in enumerate(message["tool_calls"])]
        self.messages.append(traced)

    def _call(self, call: dict[str, Any], message: int, place: int) -> dict[str, Any]:
        function = call["function"]
        name = self._traced(function["name"], Field(message, "name", function["name"], place))
        arguments = self._value(function["arguments"], message, place)
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _value(self, value: Any, message: int, place: int) -> Any:
        if isinstance(value, dict):
            return {
                self._traced(key, Field(message, "arguments", key, place, _spelt(item))): self._value(
                    item, message, place
                )
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._value(item, message, place) for item in value]
        if isinstance(value, str):
            return self._traced(value, Field(message, "arguments", value, place))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = TracedInt(value) if isinstance(value, int) else TracedFloat(value)
            number.field = len(self.fields)
            self.fields.append(Field(message, "arguments", repr(value), place))
            return number
        return value

    def _traced(self, text: str, of: Field) -> Traced:
        self.fields.append(of)
        return Traced.of_field(text, len(self.fields) - 1)


def _spelt(value: object) -> str:
    return CONSTANTS[value] if value is None or isinstance(value, bool) else ""


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
        return next((run.end for run in reversed(self.runs) if _same(run.piece, piece)), None)

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
            return [] if NOT_SAID.fullmatch(text) and not constant else [(0, len(text))]
        position, lost = 0, []
        for start, stop in [*sorted(found), (len(text), len(text))]:
            if start > position and NOT_SAID.fullmatch(text, position, start) is None:
                lost.append((position, start))
            position = max(position, stop)
        return lost

    def _has_constant(self, key: Run, constant: str) -> bool:
        if not constant or key.piece.how == DUMPED:
            return True
        stop = next((run.start for run in self.runs if run.start >= key.end), len(self.text))
        return re.search(rf"\b(?:{constant})\b", self.text[key.end : stop], re.IGNORECASE) is not None


def _same(piece: TracedPiece, other: TracedPiece) -> bool:
    return piece.field == other.field and piece.covers[-1:] == other.covers[-1:] and bool(piece.covers)


def lay(parts: Sequence[str], fields: Sequence[Field]) -> Laid:
    """Find the pieces of a rendered text, which is these parts end to end."""
    runs: list[Run] = []
    marks: list[TokenSpan] = []
    opened: list[int] = []
    found: dict[int, list[tuple[int, int, Run]]] = {}
    changed: set[int] = set()
    position = 0
    for part in parts:
        if not isinstance(part, Traced):
            position += len(part)
            continue
        for piece in pieces_of(part):
            length, field, covers, how = piece
            if field == OPEN:
                opened.append(position)
            elif field == CLOSE:
                marks.append((opened.pop(), position))
            elif field != OWN and length:
                run = Run(position, position + length, piece, fields[field].message if field >= 0 else -1)
                runs.append(run)
                if how == CHANGED:
                    changed.add(field)
                else:
                    for of, start, stop in covers:
                        found.setdefault(of, []).append((start, stop, run))
            position += length
    return Laid("".join(parts), tuple(runs), tuple(sorted(marks)), fields, found, changed)


def is_thought(content: str, lost: Sequence[TokenSpan]) -> bool:
    """Whether what a template leaves out of a content lies before the end of its thoughts."""
    answer = content.rfind(END_OF_THOUGHT) + len(END_OF_THOUGHT)
    return END_OF_THOUGHT in content and all(
        NOT_SAID.fullmatch(content, max(answer, a), b) for a, b in lost if b > answer
    )
