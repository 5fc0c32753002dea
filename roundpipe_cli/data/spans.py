"""Chooses the trained turns of a conversation, and the trained parts of their text: thoughts, ends of turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from roundpipe_cli.data.messages import END_OF_THOUGHT, Conversation
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import DatasetSpec

BEGIN_OF_THOUGHT = "<think>"
THOUGHT = re.compile(r"\s*(?:<think>.*?</think>\s*)+", re.DOTALL)
OPEN_THOUGHT = re.compile(r".*?</think>\s*", re.DOTALL)
"""Thoughts whose begin stands in the generation prompt."""
MARK_OF_THOUGHT = re.compile("</?think>")

TokenSpan = tuple[int, int]
"""Half-open range of characters."""


def turns_to_train(conversation: Conversation, rules: DatasetSpec) -> list[int]:
    """Indices of the trained turns."""
    roles = {*rules.roles_to_train, *(("developer",) if "system" in rules.roles_to_train else ())}
    turns = [
        index
        for index, message in enumerate(conversation.messages)
        if conversation.said.get(index, message["role"] in roles)
    ]
    return turns[-1:] if rules.turns_to_train == "last" else turns


@dataclass(frozen=True, slots=True)
class TurnSpans:
    """The trained characters of a turn."""

    spans: tuple[TokenSpan, ...]
    """In order; several where other turns' text lies between."""
    end: TokenSpan | None = None
    """The end of the turn, at the end of the last span; None where none is written."""


def thought_end(content: str, *, is_open: bool = False) -> int:
    """The end of a content's own thought, which is the blocks at its start with the blanks behind; 0 without one.

    Args:
        is_open: what stands before the content has begun the block.
    """
    found = THOUGHT.match(content) or (OPEN_THOUGHT.match(content) if is_open else None)
    return found.end() if found else 0


def only_thought_end(content: str, *, is_open: bool = False) -> int:
    """As `thought_end`; a content that has marks of thoughts elsewhere too is a BadRowError: they may be its words."""
    end = thought_end(content, is_open=is_open)
    mark = MARK_OF_THOUGHT.search(content, end)
    if mark is None:
        return end
    if content.rfind(BEGIN_OF_THOUGHT) > content.rfind(END_OF_THOUGHT):
        raise BadRowError(
            "an answer begins a thought that never ends",
            found=f"{BEGIN_OF_THOUGHT} without {END_OF_THOUGHT} behind it",
            expected="an answer behind every thought, where `thoughts` says to mask or to drop them",
        )
    raise BadRowError(
        "cannot tell an answer's thoughts from its words",
        found=f"{mark[0]} at character {mark.start() + 1} of {len(content)}",
        expected=f"a thought at the content's start, from {BEGIN_OF_THOUGHT} to {END_OF_THOUGHT}, and none behind, "
        "where `thoughts` says to mask or to drop them",
        hint="write thoughts as `reasoning_content`, or `thoughts: train`",
    )


def without_thoughts(content: Conversation, *, is_open: bool) -> Conversation:
    """The row without the assistant's thoughts: those beside the answers, and those at their start in <think> marks. A
    row without an answer is a BadRowError.

    Args:
        is_open: what the model is given begins the block.
    """
    messages = tuple(
        {key: value[only_thought_end(value, is_open=is_open) :] if key == "content" else value
         for key, value in message.items() if key != "reasoning_content"}
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


def without(spans: Sequence[TokenSpan], ranges: Sequence[TokenSpan]) -> tuple[TokenSpan, ...]:
    """The spans but for the ranges, both in order."""
    for first, last in ranges:
        pieces = [((start, min(end, first)), (max(start, last), end)) for start, end in spans]
        spans = [span for both in pieces for span in both if span[0] < span[1]]
    return tuple(spans)


def with_ends(
    turns: Sequence[TurnSpans],
    every_end: Callable[[], Sequence[TokenSpan]],
    which: Literal["turn", "last", "all", "none"],
) -> list[TokenSpan]:
    """The spans of turns with the ends that are trained, and without the others, in the text's order.

    Args:
        every_end: the ends of all turns that the template writes.
    """
    made: list[TokenSpan] = []
    for turn in turns:
        is_whole = which in ("turn", "all") or (which == "last" and turn is turns[-1])
        made += turn.spans if turn.end is None or is_whole else without(turn.spans, [turn.end])
    if which == "all":
        made += [one for end in every_end() for one in without([end], made)]
    return sorted(made)
