"""Chooses the trained turns of a conversation, and the trained parts of their text: thoughts, ends of turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from roundpipe_cli.data.messages import Content, Conversation, Exchange
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import TrainRules
from roundpipe_cli.data.tools import END_OF_THOUGHT

THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
OPEN_THOUGHT = re.compile(r"^.*?</think>\s*", re.DOTALL)
"""Thoughts whose begin stands in the generation prompt."""

TokenSpan = tuple[int, int]
"""Half-open range of characters."""


def turns_to_train(conversation: Conversation | Exchange, rules: TrainRules) -> list[int]:
    """Indices of the trained turns."""
    roles = {*rules.roles_to_train, *(("developer",) if "system" in rules.roles_to_train else ())}
    turns = [
        index
        for index, message in enumerate(conversation.messages)
        if (message["role"] in roles or index in conversation.trained) and index not in conversation.untrained
    ]
    return turns[-1:] if rules.turns_to_train == "last" else turns


def behind_thoughts(text: str, span: TokenSpan, message: Mapping[str, Any]) -> TokenSpan:
    """The rest of an answer's span behind its thoughts and the blanks that follow them."""
    start, end = span
    said = text[start:end]
    thought = str(message.get("reasoning_content", "")).strip()
    close = said.rfind(END_OF_THOUGHT)
    if close >= 0:
        start += close + len(END_OF_THOUGHT)
    elif thought and thought in said:
        start += said.index(thought) + len(thought)
    else:
        return span
    return start + len(text[start:end]) - len(text[start:end].lstrip()), end


def without_thoughts(content: Content) -> Content:
    """The row without the assistant's thoughts: those beside the answers, and those in <think> marks within them.

    Raises:
        BadRowError: no answer is left.
    """
    if isinstance(content, Exchange):
        content = replace(content, completion=_without_thought(content.completion))
        answers: list[Any] = [content.completion.strip()]
    elif isinstance(content, Conversation):
        messages = tuple(
            {key: _without_thought(value) if key == "content" else value for key, value in message.items()
             if key != "reasoning_content"}
            if message["role"] == "assistant"
            else message
            for message in content.messages
        )  # fmt: skip
        content = replace(content, messages=messages)
        spoken = [message for message in messages if message["role"] == "assistant"]
        answers = [message["content"].strip() or message.get("tool_calls") for message in spoken]
    else:
        return content
    if not any(answers):
        raise BadRowError(
            "the row has thoughts and no answer",
            found="nothing behind the thoughts, which `thoughts: drop` leaves out",
            expected="an answer behind them",
        )
    return content


def _without_thought(text: str) -> str:
    kept = THOUGHT.sub("", text)
    return OPEN_THOUGHT.sub("", kept) if END_OF_THOUGHT in kept else kept


def with_ends(
    text: str, spans: Sequence[TokenSpan], end_of_turn: str | None, which: Literal["turn", "last", "all", "none"]
) -> list[TokenSpan]:
    """The spans with the ends of turns that are trained, and without the others.

    Args:
        spans: of turns, in order, each with its end of turn where the template writes one.
    """
    if which == "turn" or end_of_turn is None:
        return list(spans)
    if which == "all":
        ends = [found.span() for found in re.finditer(re.escape(end_of_turn), text)]
        others = [end for end in ends if not any(start <= end[0] and end[1] <= stop for start, stop in spans)]
        return sorted([*spans, *others])
    last = len(spans) - 1
    return [
        span if which == "last" and index == last else _without_end(text, span, end_of_turn)
        for index, span in enumerate(spans)
    ]


def _without_end(text: str, span: TokenSpan, end_of_turn: str) -> TokenSpan:
    start, end = span
    said = text[start:end].rstrip()
    return (start, start + len(said) - len(end_of_turn)) if said.endswith(end_of_turn) else span
