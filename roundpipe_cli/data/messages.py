"""Messages of a conversation and the tools that they call, read from the lists and texts in a row's columns.

Readers raise `BadRowError` for a value that they cannot use.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from roundpipe_cli.choices import CHAT_ROLES, SHAREGPT_ROLES
from roundpipe_cli.data.rows import (
    JSON_DECODER,
    BadRowError,
    check_text,
    checked_text,
    describe_value,
    printable,
    read_weight,
    shown,
    unfit,
)

# Tools that an assistant may call, and its calls, as OpenAI, TRL and LLaMA-Factory write them.

END_OF_THOUGHT = "</think>"
LIST_TEXT = re.compile(r"\s*(array\()?[\[{]")
"""The beginning of the text of a list, or of an object in place of one."""
PYTHON_TEXT = re.compile(r"\s*(array\()?[\[(]*\{'")
"""The beginning of a list of objects as Python prints it, for instance pandas into a CSV file."""
SHORT_ID = re.compile("[A-Za-z0-9]{9}")
ARGUMENT_KEYS = ("arguments", "parameters", "input")
"""Keys of a call with its arguments: OpenAI's, Llama's and Anthropic's."""


def read_calls(value: object, field: str) -> list[dict[str, Any]]:
    """Tool calls in the form that chat templates read: arguments as an object, not as the text of one."""
    calls = []
    value = from_json_text(value, field)
    for call in _checked_list([] if value is None else value, field):
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise unfit(f"{field} has a call without a name", call, "function.name")
        arguments = _arguments(function, f"{field}: the arguments")
        made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(call.get("id"), str):
            made["id"] = call["id"]
        calls.append(made)
    return calls


def _arguments(function: Mapping[str, Any], field: str) -> dict[str, Any]:
    """An object, or the text of one. Clients write none as an empty text, as null or, in PHP, as an empty list."""
    value = from_json_text(next((function[key] for key in ARGUMENT_KEYS if key in function), None), field)
    if value is None or value == []:
        return {}
    if not isinstance(value, Mapping):
        raise unfit(f"{field} are no object", value, "an object")
    made: dict[str, Any] = _plain(value, field)
    return made


def read_called(value: object, field: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a turn before its calls, and the calls: its text is their JSON, one call or a list of them, which
    thoughts between <think> marks may precede."""
    thought = ""
    if isinstance(value, str):
        before, mark, rest = value.rpartition(END_OF_THOUGHT)
        thought, value = before + mark, _parsed(rest, field)
    calls = read_calls([value] if isinstance(value, Mapping) else value, field)
    if not calls:
        raise unfit(f"{field} has no call", value, "name and arguments as JSON")
    return thought, calls


def read_tools(value: object, column: str) -> tuple[dict[str, Any], ...]:
    """The schemas in the column of tools: a list, or the JSON text of one."""
    field = f"`{column}`"
    tools = _checked_list(from_json_text(value, field) or [], field)
    return tuple(_wrapped(_plain(tool, field), field) for tool in tools)


def _wrapped(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """A tool as OpenAI writes it, where it is a bare function (LLaMA-Factory, OpenAI's older form)."""
    if not isinstance(tool.get("function"), dict | None):
        raise unfit(f"{field} has a tool whose function is no object", tool["function"], "function.name")
    if tool.get("function") is not None:
        return tool
    rest = {key: value for key, value in tool.items() if key != "function"}
    if isinstance(rest.get("name"), str) and rest.get("type") in (None, "function"):
        return {"type": "function", "function": {key: value for key, value in rest.items() if key != "type"}}
    return rest


def from_json_text(value: object, field: str) -> object:
    """A list or an object that may be JSON text, as in a CSV file, as may be a list's objects; None for a blank."""
    if isinstance(value, str):
        value = _parsed(value, field) if value.strip() else None
    if isinstance(value, (list, tuple)) and any(map(_is_object_text, value)):
        return [_parsed(item, field) if _is_object_text(item) else item for item in value]
    return value


def messages_in_text(value: object) -> list[Any] | None:
    """The messages whose JSON text `value` is; None: it is another text, or none."""
    if not isinstance(value, str) or value[:64].lstrip()[:1] not in ("[", "{"):
        return None
    try:
        found = JSON_DECODER.decode(value)
    except (ValueError, RecursionError):
        return None
    items = found if isinstance(found, list) else [found]
    forms = (("role", "content"), ("role", "tool_calls"), ("from", "value"))
    said = [isinstance(item, dict) and any(set(form) <= set(item) for form in forms) for item in items]
    return items if said and all(said) else None


def _is_object_text(value: object) -> bool:
    return isinstance(value, str) and value.lstrip()[:1] == "{"


def _parsed(text: Any, field: str) -> object:
    check_text(text, field)
    try:
        return JSON_DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        hint = "Python wrote this text: write it with json.dumps" if PYTHON_TEXT.match(text) else None
        raise BadRowError(f"{field} cannot be read as JSON", found=printable(str(error)), hint=hint) from None


def _checked_list(value: object, field: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        raise unfit(f"{field} is not a list of objects", value, "a list of objects")
    return value


def texts_in(value: object) -> Iterator[str]:
    """The texts that objects and lists hold, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from texts_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_in(item)


def _plain(value: object, field: str) -> Any:
    """Objects and lists of JSON, as dict and list."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, field) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, field) for item in value]
    if isinstance(value, str):
        check_text(value, field)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadRowError(f"{field}: JSON has no such number", found=str(value), expected="a finite number, or null")
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise unfit(f"{field} holds something that is not JSON", value)
    return value


CALL_FORM_NOTES = {
    "text": "arguments of tool calls as objects (given as JSON text, which the chat template asks for)",
    "silent": "empty content of tool calls (which the chat template does not take)",
    "short ids": "ids of tool calls (written anew, with the nine letters and digits that the chat template asks for)",
    "plan": "content before tool calls (given as `tool_plan`, which the chat template asks for)",
}
"""Changes to calls for templates that do not take them as they are, with what is said of each: arguments as JSON text,
which some templates join to their own; no content where a turn of calls says nothing else; ids of nine letters and
digits, as Mistral's want; what is said or thought before calls as `tool_plan`, where Cohere's look for it."""
CALL_FORMS: tuple[tuple[str, ...], ...] = (
    *((), ("text",), ("silent",), ("short ids",), ("plan",)),
    *(("silent", "short ids"), ("text", "silent", "short ids")),
)
"""Forms of calls, the first of which a template takes is given: changes to them."""


def in_form(messages: Sequence[Message], form: Collection[str]) -> list[Message]:
    """The messages with their calls in one of `CALL_FORMS`."""
    if not form:
        return [*messages]
    made = []
    for message in messages:
        if "tool_calls" in message:
            message, said = {**message}, message["content"].strip()
            if "text" in form:
                message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
            if "plan" in form and (said or "reasoning_content" in message):
                message["tool_plan"] = message["content"] if said else message["reasoning_content"]
            if "silent" in form and not said:
                del message["content"]
        made.append(message)
    return _with_short_ids(made) if "short ids" in form else made


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """The results behind a turn belong to its calls in turn, where they do not name one."""
    made: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        if "tool_calls" in message:
            calls = []
            for place, call in enumerate(message["tool_calls"]):
                name = call.get("id", f"{index}.{place}")
                ids[name] = name if SHORT_ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:9]
                calls.append({**call, "id": ids[name]})
            open_calls = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            known = ids.get(message.get("tool_call_id", ""))
            if known is None and open_calls:
                known = open_calls[0]
            if known is not None:
                open_calls = [name for name in open_calls if name != known]
                message = {**message, "tool_call_id": known}
        made.append(message)
    return made


Message = dict[str, Any]
"""`{"role": ..., "content": ...}`, both text. With tools also `tool_calls`, `name` and `tool_call_id`; with thoughts
`reasoning_content`. Nothing else reaches a chat template."""

CALL_ROLE = "function_call"
"""A turn whose text is the JSON of one call or of several, as LLaMA-Factory writes them."""
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
PART_KEYS = ("text", "value", "content")
"""Keys of a part of a message, one of which has its text."""
WEIGHT_KEYS = ("weight", "loss_weight", "loss_scale")
"""Keys of a message with its weight."""
TRAIN_KEYS = ("train", "training", "trainable", "loss")
"""Keys of a message that decide whether it is trained."""
MESSAGE_KEYS = frozenset(
    ("role", "content", "from", "value", "tool_calls", "function_call", "name", "tool_call_id")
    + THOUGHT_KEYS
    + WEIGHT_KEYS
    + TRAIN_KEYS
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
    """Turns, of which the assistant's are trained."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of the tools that the assistant may call."""
    said: Mapping[int, bool] = field(default_factory=dict)
    """Turns that are trained, or are not, whatever their role: the row says so (`train: true`, `train: false` or
    `weight: 0`), or they belong to the prompt."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """Factors of turns in the loss, where they are not 1."""
    plain_prompt: str | None = None
    """Text before the completion of a prompt and its completion, where there is no chat template; None: only a
    template turns the messages into text."""

    def behind(self, before: Conversation) -> Conversation:
        """A copy with the turns of `before` in front."""
        start = len(before.messages)
        said = {**before.said, **{index + start: is_trained for index, is_trained in self.said.items()}}
        weights = {**before.weights, **{index + start: weight for index, weight in self.weights.items()}}
        return replace(self, messages=before.messages + self.messages, said=said, weights=weights)

    def as_prompt(self) -> Conversation:
        """A copy in which no turn is trained."""
        return replace(self, said=dict.fromkeys(range(len(self.messages)), False), weights={})


Content = Conversation | str
"""A row's words: a text is trained whole."""


def exchange(user: str, plain_prompt: str, completion: str) -> Conversation:
    """A prompt, as the user's turn and as plain text, with its completion."""
    messages = ({"role": "user", "content": user}, {"role": "assistant", "content": completion})
    return Conversation(messages, plain_prompt=plain_prompt)


def alpaca_prompt(instruction: str, context: str, join: Literal["blank_line", "newline"]) -> tuple[str, str]:
    """The user's turn, with the input (`context`, may be blank) behind the instruction and `join` between them, and the
    prompt as plain text."""
    if not context.strip():
        return instruction, ALPACA_WITHOUT_INPUT.format(instruction=instruction)
    line_break = "\n" if join == "newline" else "\n\n"
    plain_prompt = ALPACA_WITH_INPUT.format(instruction=instruction, input=context)
    return f"{instruction}{line_break}{context}", plain_prompt


def read_turns(value: object, column: str, role_key: str = "role") -> Conversation:
    """The messages of a list, each with `role` and `content` (OpenAI's) or `from` and `value` (ShareGPT's).

    Args:
        role_key: `role` or `from`, whichever a message without both should have.
    """
    messages, said, weights = list[Message](), dict[int, bool](), dict[int, float]()
    for index, item in enumerate(_list_of_objects(value, column)):
        field = f"`{column}[{index}]"
        messages.append(_message(item, field, role_key))
        is_trained, weight = _weight_of(item, field)
        said |= {} if is_trained is None else {index: is_trained}
        weights |= {} if weight == 1 else {index: weight}
    return Conversation(tuple(messages), said=said, weights=weights)


def _message(item: Mapping[str, object], field: str, role_key: str) -> Message:
    key = next((name for name in ("role", "from") if item.get(name) is not None), role_key)
    spoken, text_key = item.get(key), "content" if key == "role" else "value"
    roles: Mapping[str, str] = CHAT_ROLES if key == "role" else SHAREGPT_ROLES
    role = roles.get(spoken) if isinstance(spoken, str) else None
    if role is None:
        known = "one of " + ", ".join(roles)
        raise BadRowError(f"{field}.{key}` is unknown", found=shown(spoken), expected=known)
    older, text = item.get("function_call"), item.get(text_key)
    calls = read_calls(item.get("tool_calls"), f"{field}.tool_calls`")
    if older is not None:
        old_calls = read_calls([older], f"{field}.function_call`")
        if calls and [call["function"] for call in calls] != [call["function"] for call in old_calls]:
            raise _two_of_one(field, ["function_call", "tool_calls"])
        calls = calls or old_calls
    if spoken == CALL_ROLE and not calls:
        text, calls = read_called(text, f"{field}.{text_key}`")
    content = "" if calls and text is None else _content(text, f"{field}.{text_key}`")
    message: Message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if item.get(name) is not None:
            message[name] = checked_text(item[name], f"{field}.{name}`", filled=False)
    given = {name: item[name] for name in THOUGHT_KEYS if item.get(name) is not None}
    thoughts = {name: checked_text(value, f"{field}.{name}`", filled=False) for name, value in given.items()}
    told = {text: name for name, text in thoughts.items() if text.strip()}
    if len(told) > 1:
        raise _two_of_one(field, list(told.values()))
    if thoughts:
        message["reasoning_content"] = next(iter([*told, *thoughts.values()]))
    return message


def _two_of_one(field: str, keys: Sequence[str]) -> BadRowError:
    """The error for a message that says one thing twice, in two ways."""
    found, expected = "two different values", "one of them, or both the same"
    return BadRowError(f"{field}` has {' and '.join(f'`{key}`' for key in keys)}", found=found, expected=expected)


def _weight_of(item: Mapping[str, object], field: str) -> tuple[bool | None, float]:
    """Whether a message says that it is trained (`train: true`) or that it is not (None: neither), and its weight."""
    said, weight = None, 1.0
    for key in WEIGHT_KEYS:
        if (value := item.get(key)) is not None:
            weight *= read_weight(int(value) if isinstance(value, bool) else value, f"{field}.{key}`")
    for key in TRAIN_KEYS:
        value = item.get(key)
        if value is None:
            continue
        if value not in (0, 1):  # true and false too
            what, found = f"{field}.{key}` does not say whether this turn is trained", describe_value(value)
            raise BadRowError(what, found=found, expected="true or false")
        said = bool(value) and said is not False
    return (False, 1.0) if weight == 0 else (said, weight)


def _list_of_objects(value: object, column: str) -> Sequence[Mapping[str, object]]:
    if not isinstance(value, (list, tuple)):
        raise unfit(f"`{column}` is not a list", value, "a list of messages")
    if not value:
        raise unfit(f"`{column}` is empty", value, "at least one message")
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise unfit(f"`{column}[{index}]` is not a message", item, "an object")
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


def holds_messages(value: object) -> bool:
    """Whether it is a message, or a list that begins with one."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, Mapping)


def read_speech(value: object, column: str, role: str) -> Conversation:
    """One side of a conversation: a text (a message of `role`), a message, or a list of messages."""
    if isinstance(value, Mapping):
        value = [value]
    if holds_messages(value):
        return read_turns(value, column)
    return Conversation(({"role": role, "content": checked_text(value, f"`{column}`", filled=role == "assistant")},))


def read_history(value: object, column: str) -> Conversation:
    """Earlier exchanges: a list of [question, answer], as LLaMA-Factory has them, or of messages."""
    if holds_messages(value):
        return read_turns(value, column)
    if value is None or value == "":
        return Conversation(())
    if not isinstance(value, (list, tuple)):
        raise unfit(f"`{column}` is not a list", value, "a list of [question, answer]")
    messages: list[Message] = []
    for index, pair in enumerate(value):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise unfit(f"`{column}[{index}]` is no exchange", pair, "[question, answer]")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": checked_text(text, f"`{column}[{index}]`", filled=False)})
    return Conversation(tuple(messages))


def with_system(turns: Conversation, system: object, column: str) -> Conversation:
    """The turns behind the system prompt of a column of its own; null and blank text are none, and another system
    prompt before the turns is refused."""
    if system is None or (isinstance(system, str) and not system.strip()):
        return turns
    text = checked_text(system, f"`{column}`", filled=False)
    first = turns.messages[0] if turns.messages else {}
    if first.get("role") not in ("system", "developer"):
        return turns.behind(Conversation(({"role": "system", "content": text},)))
    if first["content"].strip() != text.strip():
        raise BadRowError(
            f"`{column}` and the first message are two system prompts", expected="one of them, or both the same"
        )
    return turns


def check_says_something(turns: Conversation, column: str) -> None:
    """Refuse turns of which no message of the assistant has content."""
    answers = [message for message in turns.messages if message["role"] == "assistant"]
    if not any(message["content"].strip() or message.get("tool_calls") for message in answers):
        raise BadRowError(
            f"`{column}` has nothing to train on",
            found=printable("roles " + ", ".join(message["role"] for message in turns.messages)),
            expected="at least one message of the assistant that is not empty",
        )
