"""Messages of a conversation, read from the lists, texts and tools in a row's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roundpipe_cli.data.rows import BadRowError, checked_text, describe_value, printable, shown
from roundpipe_cli.data.settings import AlpacaJoin
from roundpipe_cli.data.tools import read_called, read_calls

Message = dict[str, Any]
"""`{"role": ..., "content": ...}`, both text. With tools also `tool_calls`, `name` and `tool_call_id`; with thoughts
`reasoning_content`. Nothing else reaches a chat template."""

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"function": "tool", "observation": "tool", "function_call": "assistant"},
}
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
CALL_ROLE = "function_call"
"""A turn whose text is the JSON of one call or of several, as LLaMA-Factory writes them."""
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
PART_KEYS = ("text", "value", "content")
"""Keys of a part of a message, one of which has its text."""
WEIGHT_KEYS = ("weight", "loss_weight", "loss_scale")
"""Keys of a message with its weight, of which 0 and 1 are supported."""
TRAIN_KEYS = ("train", "training", "trainable", "loss")
"""Keys of a message that decide whether it is trained."""
MESSAGE_KEYS = frozenset(
    {
        *("role", "content", "from", "value", "tool_calls", "function_call", "name", "tool_call_id"),
        *(*THOUGHT_KEYS, *WEIGHT_KEYS, *TRAIN_KEYS),
    }
)
"""Keys of a message that are read."""

# The prompt that the alpaca type is defined with (Stanford Alpaca, 2023), used only where no chat template exists.
ALPACA_HEAD = "Below is an instruction that describes a task"
ALPACA_WITH_INPUT = (
    ALPACA_HEAD + ", paired with an input that provides further context. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    ALPACA_HEAD + ". Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that only a chat template turns into text; the assistant's are trained."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of the tools that the assistant may call."""
    untrained: frozenset[int] = frozenset()
    """Turns that are not trained whatever their role: the row says so (`train: false`, or `weight: 0`), or they belong
    to the prompt."""
    trained: frozenset[int] = frozenset()
    """Turns that are trained whatever their role: the row says so (`train: true`)."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its completion: a conversation of two turns where there is a chat template, else plain text."""

    user: str
    """The user's turn."""
    plain_prompt: str
    """The text before the completion where there is no template."""
    completion: str
    tools: ClassVar[tuple[dict[str, Any], ...]] = ()
    untrained: ClassVar[frozenset[int]] = frozenset()
    trained: ClassVar[frozenset[int]] = frozenset()

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": self.user}, {"role": "assistant", "content": self.completion})


def alpaca_exchange(instruction: str, context: str, output: str, join: AlpacaJoin = "blank_line") -> Exchange:
    """The input (`context`, may be blank) behind the instruction, `join` between them in the user's turn."""
    if not context.strip():
        return Exchange(instruction, ALPACA_WITHOUT_INPUT.format(instruction=instruction), output)
    plain_prompt = ALPACA_WITH_INPUT.format(instruction=instruction, input=context)
    line_break = "\n" if join == "newline" else "\n\n"
    return Exchange(f"{instruction}{line_break}{context}", plain_prompt, output)


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text of which every token is trained."""

    text: str


Content = Conversation | Exchange | PlainText


@dataclass(frozen=True, slots=True)
class MessageColumn:
    """Messages as one column holds them."""

    messages: tuple[Message, ...]
    untrained: frozenset[int] = frozenset()
    """Turns that the row excludes from training."""
    trained: frozenset[int] = frozenset()
    """Turns that the row includes in training."""

    def behind(self, before: MessageColumn) -> MessageColumn:
        """A copy with the turns of `before` in front."""
        start = len(before.messages)
        untrained, trained = (frozenset(index + start for index in turns) for turns in (self.untrained, self.trained))
        return MessageColumn(before.messages + self.messages, before.untrained | untrained, before.trained | trained)

    def as_prompt(self) -> MessageColumn:
        """A copy in which no turn is trained."""
        return MessageColumn(self.messages, frozenset(range(len(self.messages))))


def read_turns(value: object, column: str, role_key: str = "role") -> MessageColumn:
    """The messages of a list, each with `role` and `content` (OpenAI's) or `from` and `value` (ShareGPT's).

    Args:
        role_key: `role` or `from`, whichever a message without both should have.

    Raises:
        BadRowError: no list of messages, or one that cannot be used.
    """
    messages: list[Message] = []
    untrained: set[int] = set()
    trained: set[int] = set()
    for index, item in enumerate(_list_of_objects(value, column)):
        field = f"`{column}[{index}]"
        message = _message(item, field, role_key)
        said = _is_trained(item, field)
        if said is not None:
            (trained if said else untrained).add(index)
        messages.append(message)
    return MessageColumn(tuple(messages), frozenset(untrained), frozenset(trained))


def _message(item: Mapping[str, object], field: str, role_key: str) -> Message:
    key = next((name for name in ("role", "from") if item.get(name) is not None), role_key)
    spoken, text_key = item.get(key), "content" if key == "role" else "value"
    roles: Mapping[str, str] = ROLES if key == "role" else SHAREGPT_ROLES
    role = roles.get(spoken) if isinstance(spoken, str) else None
    if role is None:
        known = "one of " + ", ".join(roles)
        raise BadRowError(f"{field}.{key}` is unknown", found=shown(spoken), expected=known)
    calls, text = _calls_of(item, field), item.get(text_key)
    if spoken == CALL_ROLE and not calls:
        text, calls = read_called(text, f"{field}.{text_key}`")
    content = "" if calls and text is None else _content(text, f"{field}.{text_key}`")
    message: Message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if item.get(name) is not None:
            message[name] = checked_text(item[name], f"{field}.{name}`", filled=False)
    thought = next((item[name] for name in THOUGHT_KEYS if item.get(name) is not None), None)
    if thought is not None:
        message["reasoning_content"] = checked_text(thought, f"{field}.reasoning_content`", filled=False)
    return message


def _is_trained(item: Mapping[str, object], field: str) -> bool | None:
    """Whether a message says that it is trained (`train: true`), or that it is not; None: neither."""
    said: bool | None = None
    for key in (*WEIGHT_KEYS, *TRAIN_KEYS):
        value = item.get(key)
        if value is None:
            continue
        if value not in (0, 1):  # true and false too
            raise BadRowError(
                f"{field}.{key}` says how much this turn counts, which is not offered",
                found=f"{key}: {value}" if isinstance(value, (int, float)) else describe_value(value),
                expected="0 (not trained) or 1 (trained)",
            )
        if value == 0:
            said = False
        elif key in TRAIN_KEYS and said is None:  # a weight of 1 is every turn's
            said = True
    return said


def _list_of_objects(value: object, column: str) -> Sequence[Mapping[str, object]]:
    if not isinstance(value, (list, tuple)):
        raise BadRowError(f"`{column}` is not a list", found=describe_value(value), expected="a list of messages")
    if not value:
        raise BadRowError(f"`{column}` is empty", found="a list of 0", expected="at least one message")
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise BadRowError(f"`{column}[{index}]` is not a message", found=describe_value(item), expected="an object")
    return value


def _content(value: object, field: str) -> str:
    """Text, or the texts of a list of parts put end to end."""
    if not isinstance(value, (list, tuple)):
        return checked_text(value, field, filled=False)
    texts = []
    for part in value:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            found = f"a part of type {shown(part.get('type'))}" if isinstance(part, Mapping) else describe_value(part)
            raise BadRowError(f"{field} has a part that is not text", found=found, expected="text parts")
        for key in (*WEIGHT_KEYS, *TRAIN_KEYS):
            if part.get(key) not in (None, 1):
                what = f"{field} has a part whose `{key}` marks it for special treatment, which is not offered"
                raise BadRowError(what, expected=f"`{key}` of whole messages")
        given = next((part[name] for name in PART_KEYS if part.get(name) is not None), None)
        texts.append(checked_text(given, field, filled=False))
    return "".join(texts)


def _calls_of(item: Mapping[str, object], field: str) -> list[dict[str, Any]]:
    """Calls of a message, in the present or in OpenAI's older form."""
    older = item.get("function_call")
    if older is not None and not item.get("tool_calls"):
        return read_calls([older], f"{field}.function_call`")
    return read_calls(item.get("tool_calls"), f"{field}.tool_calls`")


def holds_messages(value: object) -> bool:
    """Whether it is a message, or a list that begins with one."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, Mapping)


def read_speech(value: object, column: str, role: str) -> MessageColumn:
    """One side of a conversation: a text (a message of `role`), a message, or a list of messages.

    Raises:
        BadRowError: none of them, or one that cannot be used.
    """
    if isinstance(value, Mapping):
        value = [value]
    if holds_messages(value):
        return read_turns(value, column)
    return MessageColumn(({"role": role, "content": checked_text(value, f"`{column}`", filled=role == "assistant")},))


def read_history(value: object, column: str) -> MessageColumn:
    """Earlier exchanges: a list of [question, answer], as LLaMA-Factory has them, or of messages.

    Raises:
        BadRowError: something else.
    """
    if holds_messages(value):
        return read_turns(value, column)
    if value is None or value == "":
        return MessageColumn(())
    if not isinstance(value, (list, tuple)):
        raise BadRowError(
            f"`{column}` is not a list", found=describe_value(value), expected="a list of [question, answer]"
        )
    messages: list[Message] = []
    for index, pair in enumerate(value):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadRowError(
                f"`{column}[{index}]` is no exchange", found=describe_value(pair), expected="[question, answer]"
            )
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": checked_text(text, f"`{column}[{index}]`", filled=False)})
    return MessageColumn(tuple(messages))


def with_system(turns: MessageColumn, system: object, column: str) -> MessageColumn:
    """The turns behind the system prompt of a column of its own; null and blank text are none.

    Raises:
        BadRowError: no text, or the turns begin with another system prompt.
    """
    if system is None or (isinstance(system, str) and not system.strip()):
        return turns
    text = checked_text(system, f"`{column}`", filled=False)
    first = turns.messages[0] if turns.messages else {}
    if first.get("role") not in ("system", "developer"):
        return turns.behind(MessageColumn(({"role": "system", "content": text},)))
    if first["content"].strip() != text.strip():
        raise BadRowError(
            f"`{column}` and the first message are two system prompts", expected="one of them, or both the same"
        )
    return turns


def check_says_something(turns: MessageColumn, column: str) -> None:
    """
    Raises:
        BadRowError: no message of the assistant has content.
    """
    if not any(message["role"] == "assistant" and _says_something(message) for message in turns.messages):
        roles = ", ".join(message["role"] for message in turns.messages)
        raise BadRowError(
            f"`{column}` has nothing to train on",
            found=printable(f"roles {roles}"),
            expected="at least one message of the assistant that is not empty",
        )


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))
