"""Messages of a conversation, read from the lists, texts and tools in a row's columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roundpipe_cli.data.rows import BadRowError, check_text, describe_value, printable, shown

Message = dict[str, Any]
"""`{"role": ..., "content": ...}`, both text. With tools also `tool_calls`, `name` and `tool_call_id`; with thoughts
`reasoning_content`. Nothing else reaches a chat template."""

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
WEIGHT_KEYS = ("weight", "loss_weight", "loss_scale")
"""Keys of a message that say how much it counts; 0 and 1 are offered."""
TRAIN_KEYS = ("train", "training", "trainable", "loss")
"""Keys of a message that say whether it is trained."""
MESSAGE_KEYS = frozenset(
    {"role", "content", "from", "value", "tool_calls", "name", "tool_call_id", *THOUGHT_KEYS, *WEIGHT_KEYS, *TRAIN_KEYS}
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
    """Turns of the assistant that are not trained: the row says so (`train: false`, or `weight: 0`), or they belong to
    the prompt."""


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

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": self.user}, {"role": "assistant", "content": self.completion})


def alpaca_exchange(instruction: str, context: str, output: str) -> Exchange:
    """The input (`context`, may be blank) behind the instruction."""
    if not context.strip():
        return Exchange(instruction, ALPACA_WITHOUT_INPUT.format(instruction=instruction), output)
    plain_prompt = ALPACA_WITH_INPUT.format(instruction=instruction, input=context)
    return Exchange(f"{instruction}\n\n{context}", plain_prompt, output)


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
    """Turns of the assistant that the row says not to train."""

    def behind(self, before: MessageColumn) -> MessageColumn:
        """The turns of `before`, then these."""
        start = len(before.messages)
        moved = frozenset(index + start for index in self.untrained)
        return MessageColumn(before.messages + self.messages, before.untrained | moved)

    def as_prompt(self) -> MessageColumn:
        """The same turns, none of them trained."""
        return MessageColumn(
            self.messages, frozenset(i for i, item in enumerate(self.messages) if item["role"] == "assistant")
        )


def checked_text(value: object, field: str, *, filled: bool) -> str:
    """
    Raises:
        BadRowError: no text, text that no tokenizer should see, or blank although `filled` is asked for.
    """
    if not isinstance(value, str):
        raise BadRowError(f"{field} is not text", found=describe_value(value), expected="a string")
    if filled and not value.strip():
        raise BadRowError(f"{field} is empty", found=describe_value(value), expected="a string with some text")
    check_text(value, field)
    return value


def read_turns(value: object, column: str, role_key: str = "role") -> MessageColumn:
    """The messages of a list, each with `role` and `content` (OpenAI's) or `from` and `value` (ShareGPT's).

    Args:
        role_key: `role` or `from`, whichever a message without both should have.

    Raises:
        BadRowError: no list of messages, or one that cannot be used.
    """
    messages, untrained = [], set()
    for index, item in enumerate(_list_of_objects(value, column)):
        field = f"`{column}[{index}]"
        message = _message(item, field, role_key)
        if not _is_trained(item, message["role"], field) and message["role"] == "assistant":
            untrained.add(index)
        messages.append(message)
    return MessageColumn(tuple(messages), frozenset(untrained))


def _message(item: Mapping[str, object], field: str, role_key: str) -> Message:
    key = next((name for name in ("role", "from") if item.get(name) is not None), role_key)
    spoken, text_key = item.get(key), "content" if key == "role" else "value"
    roles: Mapping[str, str] = dict(zip(ROLES, ROLES, strict=True)) if key == "role" else SHAREGPT_ROLES
    role = roles.get(spoken) if isinstance(spoken, str) else None
    if role is None:
        known = "one of " + ", ".join(roles)
        raise BadRowError(f"{field}.{key}` is unknown", found=shown(spoken), expected=known)
    calls = _tool_calls(item.get("tool_calls"), field)
    text = item.get(text_key)
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


def _is_trained(item: Mapping[str, object], role: str, field: str) -> bool:
    trained = True
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
        if value == 1 and key in TRAIN_KEYS and role != "assistant":
            raise BadRowError(
                f"{field}.{key}` asks to train a turn that is not the assistant's",
                found=f"a turn of role {role}",
                expected="turns of the assistant to train",
                hint="`train_on_inputs: true` trains all turns",
            )
        trained = trained and value == 1
    return trained


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
                what = f"{field} has a part whose `{key}` sets it apart, which is not offered"
                raise BadRowError(what, expected=f"`{key}` of whole messages")
        texts.append(checked_text(part.get("text"), field, filled=False))
    return "".join(texts)


def _tool_calls(value: object, field: str) -> list[dict[str, Any]]:
    """Tool calls in the form that chat templates read: arguments as an object, not as the text of one."""
    field = f"{field}.tool_calls`"
    if value is None:
        return []
    calls = []
    for call in _checked_list(value, field):
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRowError(
                f"{field} has a call without a name", found=describe_value(call), expected="function.name"
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{field}: the arguments")
        if not isinstance(arguments, Mapping):
            raise BadRowError(
                f"{field}: the arguments are no object", found=describe_value(arguments), expected="an object"
            )
        made = {"type": "function", "function": {"name": function["name"], "arguments": _plain(arguments, field)}}
        if isinstance(call.get("id"), str):
            made["id"] = call["id"]
        calls.append(made)
    return calls


def read_tools(value: object, column: str) -> tuple[dict[str, Any], ...]:
    """The schemas in the column of tools: a list, or the JSON text of one.

    Raises:
        BadRowError: something else.
    """
    if value is None or value == "":
        return ()
    field = f"`{column}`"
    if isinstance(value, str):
        value = _parsed(value, field)
    return tuple(_plain(tool, field) for tool in _checked_list(value or [], field))


def _parsed(text: str, field: str) -> object:
    check_text(text, field)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{field} cannot be read as JSON", found=printable(str(error))) from None


def _checked_list(value: object, field: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        raise BadRowError(
            f"{field} is not a list of objects", found=describe_value(value), expected="a list of objects"
        )
    return value


def _plain(value: object, field: str) -> Any:
    """Objects and lists of JSON, without the keys that a table format filled with null in rows that lack them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, field) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item, field) for item in value]
    if isinstance(value, str):
        check_text(value, field)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise BadRowError(f"{field} holds something that is not JSON", found=describe_value(value))
    return value


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
