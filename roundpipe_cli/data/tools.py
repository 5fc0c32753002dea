"""Tools that an assistant may call, and its calls, as OpenAI, TRL and LLaMA-Factory write them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roundpipe_cli.data.rows import JSON_DECODER, BadRowError, check_text, describe_value, printable

END_OF_THOUGHT = "</think>"
LIST_TEXT = re.compile(r"\s*(array\()?[\[{]")
"""The beginning of the text of a list, or of an object in place of one."""
PYTHON_TEXT = re.compile(r"\s*(array\()?[\[(]*\{'")
"""The beginning of a list of objects as Python prints it, for instance pandas into a CSV file."""
SHORT_ID = re.compile("[A-Za-z0-9]{9}")


def read_calls(value: object, field: str) -> list[dict[str, Any]]:
    """Tool calls in the form that chat templates read: arguments as an object, not as the text of one.

    Raises:
        BadRowError: no list of calls.
    """
    calls = []
    value = from_json_text(value, field)
    for call in _checked_list([] if value is None else value, field):
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


def read_called(value: object, field: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a turn before its calls, and the calls: its text is their JSON, one call or a list of them, which
    thoughts between <think> marks may precede.

    Raises:
        BadRowError: something else.
    """
    thought = ""
    if isinstance(value, str):
        before, mark, rest = value.rpartition(END_OF_THOUGHT)
        thought, value = before + mark, _parsed(rest, field)
    calls = read_calls([value] if isinstance(value, Mapping) else value, field)
    if not calls:
        raise BadRowError(f"{field} has no call", found=describe_value(value), expected="name and arguments as JSON")
    return thought, calls


def read_tools(value: object, column: str) -> tuple[dict[str, Any], ...]:
    """The schemas in the column of tools: a list, or the JSON text of one.

    Raises:
        BadRowError: something else.
    """
    field = f"`{column}`"
    tools = _checked_list(from_json_text(value, field) or [], field)
    return tuple(_wrapped(_plain(tool, field), field) for tool in tools)


def _wrapped(tool: dict[str, Any], field: str) -> dict[str, Any]:
    """A tool as OpenAI writes it, where it is a bare function (LLaMA-Factory, OpenAI's older form)."""
    if not isinstance(tool.get("function"), dict | None):
        found = describe_value(tool["function"])
        raise BadRowError(f"{field} has a tool whose function is no object", found=found, expected="function.name")
    if tool.get("function") is not None:
        return tool
    rest = {key: value for key, value in tool.items() if key != "function"}
    if isinstance(rest.get("name"), str) and rest.get("type") in (None, "function"):
        return {"type": "function", "function": {key: value for key, value in rest.items() if key != "type"}}
    return rest


def from_json_text(value: object, field: str) -> object:
    """A list or an object that may be JSON text, as in a CSV file, as may be the objects of a list; None for a blank.

    Raises:
        BadRowError: a text that is no JSON.
    """
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
        raise BadRowError(
            f"{field} is not a list of objects", found=describe_value(value), expected="a list of objects"
        )
    return value


def _plain(value: object, field: str) -> Any:
    """Objects and lists of JSON, as dict and list."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, field) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, field) for item in value]
    if isinstance(value, str):
        check_text(value, field)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise BadRowError(f"{field} holds something that is not JSON", found=describe_value(value))
    return value


def calls_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as JSON text, which some templates join to their own."""
    return [_with_functions(message, lambda of: {**of, "arguments": _as_text(of["arguments"])}) for message in messages]


def without_empty_content(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without a content where a turn of calls says nothing else."""
    return [
        {key: value for key, value in message.items() if key != "content"}
        if "tool_calls" in message and not message["content"].strip()
        else message
        for message in messages
    ]


def with_plans(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with what is said or thought before calls as `tool_plan`, where Cohere's templates look for it."""
    return [
        {**message, "tool_plan": message["content"] if message["content"].strip() else message["reasoning_content"]}
        if "tool_calls" in message and (message["content"].strip() or "reasoning_content" in message)
        else message
        for message in messages
    ]


def with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of nine letters and digits for calls and their results, which Mistral's templates want.

    The results behind a turn belong to its calls in turn, where they do not name one.
    """
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


def _with_functions(message: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [{**call, "function": change(call["function"])} for call in message["tool_calls"]]}


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
