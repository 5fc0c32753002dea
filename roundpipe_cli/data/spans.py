"""Chooses the trained turns of a conversation, and the trained parts of their text: thoughts, ends of turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from roundpipe_cli.data.messages import END_OF_THOUGHT, Content, Conversation
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import TrainRules

BEGIN_OF_THOUGHT = "<think>"
THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
OPEN_THOUGHT = re.compile(r"^.*?</think>\s*", re.DOTALL)
"""Thoughts whose begin stands in the generation prompt."""

TokenSpan = tuple[int, int]
"""Half-open range of characters."""


def turns_to_train(conversation: Conversation, rules: TrainRules) -> list[int]:
    """Indices of the trained turns."""
    roles = {*rules.roles_to_train, *(("developer",) if "system" in rules.roles_to_train else ())}
    turns = [
        index
        for index, message in enumerate(conversation.messages)
        if (message["role"] in roles or index in conversation.trained) and index not in conversation.untrained
    ]
    return turns[-1:] if rules.turns_to_train == "last" else turns


@dataclass(frozen=True, slots=True)
class TurnSpans:
    """The trained characters of a turn."""

    spans: tuple[TokenSpan, ...]
    """In order; several where other turns' text lies between."""
    end: TokenSpan | None = None
    """The end of the turn, at the end of the last span; None where none is written."""


def behind_thoughts(text: str, turn: TurnSpans, message: Mapping[str, Any]) -> TurnSpans:
    """The rest of an answer behind its thoughts, which must have an end, and the blanks that follow them."""
    refuse_open_thought(str(message.get("content", "")))
    if not turn.spans:
        return turn
    start, end = turn.spans[0][0], turn.spans[-1][1]
    said = text[start:end]
    thought = str(message.get("reasoning_content", "")).strip()
    close = said.rfind(END_OF_THOUGHT)
    if close >= 0:
        start += close + len(END_OF_THOUGHT)
    elif thought and thought in said:
        start += said.index(thought) + len(thought)
    else:
        return turn
    start += len(text[start:end]) - len(text[start:end].lstrip())
    return replace(turn, spans=tuple((max(start, first), last) for first, last in turn.spans if last > start))


def refuse_open_thought(content: str) -> None:
    """Raise a BadRowError for an answer that is a thought up to its end: <think> without </think> behind it."""
    if content.rfind(BEGIN_OF_THOUGHT) > content.rfind(END_OF_THOUGHT):
        raise BadRowError(
            "an answer begins a thought that never ends",
            found=f"{BEGIN_OF_THOUGHT} without {END_OF_THOUGHT} behind it",
            expected="an answer behind every thought, where `thoughts` says to mask or to drop them",
        )


def without_thoughts(content: Content) -> Content:
    """The row without the assistant's thoughts: those beside the answers, and those in <think> marks within them. A row
    without an answer is a BadRowError."""
    if isinstance(content, str):
        return content
    messages = tuple(
        {key: _without_thought(value) if key == "content" else value for key, value in message.items()
         if key != "reasoning_content"}
        if message["role"] == "assistant"
        else message
        for message in content.messages
    )  # fmt: skip
    spoken = [message for message in messages if message["role"] == "assistant"]
    if not any(message["content"].strip() or message.get("tool_calls") for message in spoken):
        raise BadRowError(
            "the row has thoughts and no answer",
            found="nothing behind the thoughts, which `thoughts: drop` leaves out",
            expected="an answer behind them",
        )
    return replace(content, messages=messages)


def _without_thought(text: str) -> str:
    refuse_open_thought(text)
    kept = THOUGHT.sub("", text)
    return OPEN_THOUGHT.sub("", kept) if END_OF_THOUGHT in kept else kept


def with_ends(
    text: str, turns: Sequence[TurnSpans], end_of_turn: str | None, which: Literal["turn", "last", "all", "none"]
) -> list[TokenSpan]:
    """The spans of turns with the ends that are trained, and without the others, in the text's order.

    Args:
        end_of_turn: the token that the template writes behind every turn; None: none.
    """
    made: list[TokenSpan] = []
    for turn in turns:
        made += turn.spans
        is_whole = which in ("turn", "all") or (which == "last" and turn is turns[-1])
        if turn.end is not None and not is_whole:
            first, _ = made[-1]
            made[-1] = first, max(first, turn.end[0])
    if which == "all" and end_of_turn is not None:
        ends = [found.span() for found in re.finditer(re.escape(end_of_turn), text)]
        made += [end for end in ends if not any(start <= end[0] and end[1] <= stop for start, stop in made)]
    return sorted(made)
