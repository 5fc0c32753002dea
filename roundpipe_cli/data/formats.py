"""Which type a dataset has, and what one of its rows says: a conversation, a prompt with its completion, or a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from roundpipe_cli.data.rows import BadRowError, check_text, column_names, describe, printable
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.errors import RefusedError, closest

RowType = Literal["chat", "sharegpt", "alpaca", "prompt_completion", "text"]
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

FIELDS: dict[RowType, tuple[str, ...]] = {
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""What a row of each type must have; `auto` takes the first type, in this order, whose fields are all there."""
OPTIONAL_FIELDS: dict[RowType, tuple[str, ...]] = {"alpaca": ("input",)}
PAIR_COLUMNS = (("question", "answer"), ("prompt", "response"), ("instruction", "response"), ("query", "response"))
"""Other names under which `auto` finds a prompt and its completion."""

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
    """Turns of the assistant that the row says not to train (`train: false`, or `weight: 0`)."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and its completion: a conversation of two turns where there is a chat template, else plain text."""

    user: str
    """The user's turn."""
    plain_prompt: str
    """What stands before the completion without a template."""
    completion: str
    tools: ClassVar[tuple[dict[str, Any], ...]] = ()
    untrained: ClassVar[frozenset[int]] = frozenset()

    @property
    def messages(self) -> tuple[Message, ...]:
        return ({"role": "user", "content": self.user}, {"role": "assistant", "content": self.completion})


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text of which every token is trained."""

    text: str


Content = Conversation | Exchange | PlainText


@dataclass(frozen=True)
class RowFormat:
    """How the rows of one dataset are read."""

    type: RowType
    columns: Mapping[str, str]
    """Our field name to the file's column, for every field of the type."""
    notice: str | None = None
    """What `auto` decided."""

    def parse(self, row: Mapping[str, object]) -> Content:
        """
        Raises:
            BadRowError: a field is missing, of the wrong type, empty or no text.
        """
        if self.type == "chat":
            return _chat_conversation(self._field(row, "messages"), self.columns["messages"], row.get("tools"))
        if self.type == "sharegpt":
            column = self.columns["conversations"]
            messages = _sharegpt_messages(self._field(row, "conversations"), column)
            system = row.get("system")
            if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": _checked_text(system, "`system`", filled=False)})
            return Conversation(_with_assistant(messages, column), _tools(row.get("tools")))
        if self.type == "alpaca":
            return self._alpaca(row)
        if self.type == "prompt_completion":
            prompt, completion = self._text(row, "prompt"), self._text(row, "completion", filled=True)
            return Exchange(prompt, prompt, completion)
        return PlainText(self._text(row, "text", filled=True))

    def _alpaca(self, row: Mapping[str, object]) -> Exchange:
        instruction = self._text(row, "instruction", filled=True)
        has_input = row.get(self.columns["input"]) is not None
        context = self._text(row, "input") if has_input else ""
        output = self._text(row, "output", filled=True)
        if not context.strip():
            return Exchange(instruction, ALPACA_WITHOUT_INPUT.format(instruction=instruction), output)
        plain_prompt = ALPACA_WITH_INPUT.format(instruction=instruction, input=context)
        return Exchange(f"{instruction}\n\n{context}", plain_prompt, output)

    def _field(self, row: Mapping[str, object], field: str) -> object:
        column = self.columns[field]
        if column not in row:
            raise BadRowError(
                f"`{column}` is missing", found=column_names(row), expected=f"`{column}` (type {self.type})"
            )
        return row[column]

    def _text(self, row: Mapping[str, object], field: str, *, filled: bool = False) -> str:
        column = self.columns[field]
        return _checked_text(self._field(row, field), f"`{column}`", filled=filled)


def _checked_text(value: object, field: str, *, filled: bool) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{field} is not text", found=describe(value), expected="a string")
    if filled and not value.strip():
        raise BadRowError(f"{field} is empty", found=describe(value), expected="a string with some text")
    check_text(value, field)
    return value


def _list_of_objects(value: object, column: str) -> Sequence[Mapping[str, object]]:
    if not isinstance(value, (list, tuple)):
        raise BadRowError(f"`{column}` is not a list", found=describe(value), expected="a list of messages")
    if not value:
        raise BadRowError(f"`{column}` is empty", found="a list of 0", expected="at least one message")
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise BadRowError(f"`{column}[{index}]` is not a message", found=describe(item), expected="an object")
    return value


def _chat_conversation(value: object, column: str, tools: object) -> Conversation:
    messages, untrained = [], []
    for index, item in enumerate(_list_of_objects(value, column)):
        role, field = item.get("role"), f"`{column}[{index}]"
        if role not in ROLES:
            known = "one of " + ", ".join(ROLES)
            raise BadRowError(f"{field}.role` is unknown", found=_shown_role(role), expected=known)
        calls = _tool_calls(item.get("tool_calls"), field)
        content = "" if calls and item.get("content") is None else _content(item.get("content"), field)
        message: Message = {"role": str(role), "content": content}
        if calls:
            message["tool_calls"] = calls
        for key in ("name", "tool_call_id"):
            if item.get(key) is not None:
                message[key] = _checked_text(item[key], f"{field}.{key}`", filled=False)
        thought = next((item[key] for key in THOUGHT_KEYS if item.get(key) is not None), None)
        if thought is not None:
            message["reasoning_content"] = _checked_text(thought, f"{field}.reasoning_content`", filled=False)
        if item.get("train") is False or (item.get("weight") == 0 and item.get("weight") is not None):
            untrained.append(index)
        messages.append(message)
    return Conversation(_with_assistant(messages, column), _tools(tools), frozenset(untrained))


def _content(value: object, field: str) -> str:
    """Text, or the texts of a list of parts put end to end."""
    if not isinstance(value, (list, tuple)):
        return _checked_text(value, f"{field}.content`", filled=False)
    texts = []
    for part in value:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            found = f"a part of type {_shown_role(part.get('type'))}" if isinstance(part, Mapping) else describe(part)
            raise BadRowError(f"{field}.content` has a part that is not text", found=found, expected="text parts")
        texts.append(_checked_text(part.get("text"), f"{field}.content`", filled=False))
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
            raise BadRowError(f"{field} has a call without a name", found=describe(call), expected="function.name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"{field}: the arguments")
        if not isinstance(arguments, Mapping):
            raise BadRowError(f"{field}: the arguments are no object", found=describe(arguments), expected="an object")
        made = {"type": "function", "function": {"name": function["name"], "arguments": _plain(arguments, field)}}
        if isinstance(call.get("id"), str):
            made["id"] = call["id"]
        calls.append(made)
    return calls


def _tools(value: object) -> tuple[dict[str, Any], ...]:
    """The column `tools`: a list of schemas, or the JSON text of one."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = _parsed(value, "`tools`")
    return tuple(_plain(tool, "`tools`") for tool in _checked_list(value, "`tools`"))


def _parsed(text: str, field: str) -> object:
    check_text(text, field)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{field} cannot be read as JSON", found=printable(str(error))) from None


def _checked_list(value: object, field: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        raise BadRowError(f"{field} is not a list of objects", found=describe(value), expected="a list of objects")
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
        raise BadRowError(f"{field} holds something that is not JSON", found=describe(value))
    return value


def _sharegpt_messages(value: object, column: str) -> list[Message]:
    messages: list[Message] = []
    for index, item in enumerate(_list_of_objects(value, column)):
        speaker, field = item.get("from"), f"`{column}[{index}]"
        role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            known = "one of " + ", ".join(SHAREGPT_ROLES)
            raise BadRowError(f"{field}.from` is unknown", found=_shown_role(speaker), expected=known)
        content = _checked_text(item.get("value"), f"{field}.value`", filled=False)
        messages.append({"role": role, "content": content})
    return messages


def _with_assistant(messages: list[Message], column: str) -> tuple[Message, ...]:
    if not any(message["role"] == "assistant" and _says_something(message) for message in messages):
        roles = ", ".join(message["role"] for message in messages)
        raise BadRowError(
            f"`{column}` has nothing to train on",
            found=printable(f"roles {roles}"),
            expected="at least one message of the assistant that is not empty",
        )
    return tuple(messages)


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _shown_role(role: object) -> str:
    return f"`{printable(role, 40)}`" if isinstance(role, str) else describe(role)


def decide_format(spec: DatasetSpec, layouts: Sequence[Sequence[str]], where: str) -> RowFormat:
    """The type and the columns of a dataset.

    Args:
        layouts: the different sets of columns of its first rows, in order; at least one. `auto` takes the first that
            fits a type, so that a row without its field is named as bad even where it is the first of the file.

    Raises:
        RefusedError: no type fits, the type is unknown, or `spec.columns` maps a field that the type does not have.
    """
    known: list[str] = [*FIELDS, "auto"]
    if spec.type not in known:
        near = closest(str(spec.type), known)
        raise RefusedError(
            "unknown dataset type",
            where=where,
            found=f"type: {printable(str(spec.type))}",
            expected="one of " + ", ".join(known),
            hint=f"did you mean `{near}`?" if near else None,
        )
    if spec.type != "auto":
        _check_mapping(spec, _all_fields(spec.type), where)
        pair = _pair_format(spec, layouts[0], where) if spec.type == "prompt_completion" else None
        return pair or RowFormat(spec.type, _mapped(spec.type, spec.columns))
    _check_mapping(spec, [field for row_type in FIELDS for field in _all_fields(row_type)], where)
    for columns in layouts:
        row_format = _detect(spec, columns, where)
        if row_format is not None:
            return row_format
    expected = "; ".join(f"{row_type}: {', '.join(fields)}" for row_type, fields in FIELDS.items())
    first, second = [*layouts[0], "COLUMN", "COLUMN"][:2]
    raise RefusedError(
        "cannot tell the type of this dataset from its columns",
        where=where,
        found=column_names(dict.fromkeys(layouts[0])),
        expected=expected,
        hint=f"name the columns: `columns: {{prompt: {printable(first, 40)}, completion: {printable(second, 40)}}}`",
    )


def _detect(spec: DatasetSpec, columns: Sequence[str], where: str) -> RowFormat | None:
    for row_type, fields in FIELDS.items():
        mapped = _mapped(row_type, spec.columns)
        if all(mapped[field] in columns for field in fields):
            shown = ", ".join(mapped[field] for field in _all_fields(row_type) if mapped[field] in columns)
            return RowFormat(row_type, mapped, f"{where}: read as type {row_type} (columns {printable(shown)})")
        pair = _pair_format(spec, columns, where) if row_type == "prompt_completion" else None
        if pair is not None:
            return pair
    return None


def _pair_format(spec: DatasetSpec, columns: Sequence[str], where: str) -> RowFormat | None:
    """A prompt and its completion under other names, unless the recipe maps columns or the usual names are there."""
    if spec.columns or "prompt" in columns and "completion" in columns:
        return None
    for prompt, completion in PAIR_COLUMNS:
        if prompt in columns and completion in columns:
            decided = f"read as type prompt_completion, {prompt} as the prompt and {completion} as the completion"
            return RowFormat("prompt_completion", {"prompt": prompt, "completion": completion}, f"{where}: {decided}")
    return None


def _all_fields(row_type: RowType) -> tuple[str, ...]:
    return FIELDS[row_type] + OPTIONAL_FIELDS.get(row_type, ())


def _mapped(row_type: RowType, columns: Mapping[str, str]) -> dict[str, str]:
    return {field: columns.get(field, field) for field in _all_fields(row_type)}


def _check_mapping(spec: DatasetSpec, fields: Sequence[str], where: str) -> None:
    for field in spec.columns:
        if field not in fields:
            near = closest(field, list(fields))
            raise RefusedError(
                "`columns` maps a field that this type does not have",
                where=where,
                found=printable(field),
                expected="one of " + ", ".join(dict.fromkeys(fields)),
                hint=f"did you mean `{near}`?" if near else None,
            )
