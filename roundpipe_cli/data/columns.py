"""Columns, and keys of messages, that nothing reads: named to the user, or refused where they change what a row means.

A value that says nothing (null, an empty text or list) changes nothing, whatever the column is called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from roundpipe_cli.data.messages import MESSAGE_KEYS, holds_messages
from roundpipe_cli.data.rows import BadRowError, column_names, describe_value, printable
from roundpipe_cli.errors import RefusedError

ANSWER_TYPES = ("chat", "sharegpt", "alpaca", "prompt_completion")
"""Types of rows with an answer to train."""
PROMPT_TYPES = (*ANSWER_TYPES, "preference")
"""Types of rows with a prompt."""
IN_MESSAGES = "messages"
"""In place of a type of rows: the rules for keys of messages."""
PLACEHOLDER = re.compile(r"<(\|?)(image|video|audio)(_pad)?\1>")
MEDIA_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff"),
    *(".mp4", ".mov", ".avi", ".mkv", ".webm", ".wav", ".mp3", ".flac", ".ogg", ".m4a"),
)
MEDIA_WORD = re.compile(r"image|img|video|audio|picture|photo|pixel|frame|media|speech|sound|figure", re.IGNORECASE)


def says_something(value: object) -> bool:
    """Whether a value holds anything: not null, nor empty, nor a list of such values, nor the text of one."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}", "null", "None")
    if isinstance(value, Mapping):
        return any(says_something(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(map(says_something, value))
    if isinstance(value, bytes):
        return bool(value)
    return value is not None and value is not False and not (isinstance(value, float) and math.isnan(value))


def is_verdict(value: object) -> bool:
    """Yes or no, in any of the forms that files have for it."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "false", "0", "1", "desirable", "undesirable")
    return isinstance(value, (bool, int, float)) and value in (0, 1)


def is_weight(value: object) -> bool:
    """A number other than 1, also as text."""
    try:
        return says_something(value) and float(value) != 1  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and says_something(value)


def _is_list_of_numbers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, (bool, int)) for item in value)


@dataclass(frozen=True)
class ColumnRule:
    """Columns that mean something which nothing here reads."""

    names: re.Pattern[str]
    """Pattern for the whole name of the column, in lower case."""
    what: str
    """Description of the column, behind its name."""
    hint: str
    types: tuple[str, ...] | None = None
    """Types of rows in which it does so; None: all."""
    matters: Callable[[object], bool] = says_something


def _rule(names: str, what: str, hint: str, types: tuple[str, ...] | None = None, **options: object) -> ColumnRule:
    return ColumnRule(re.compile(names), what, hint, types, **options)  # type: ignore[arg-type]


REJECTED = re.compile(r"rejected(_messages|_response|_conversations)?")
CHOSEN = re.compile(r"chosen(_messages|_response|_conversations)?")
PAIR_HINT = "write `objective: dpo`"
KTO_HINT = "keep the rows whose answers are wanted and delete the column, or make pairs of them for `objective: dpo`"
TOKENS_HINT = "give the texts or messages that the tokens were made of"
SEGMENTS_HINT = "write them as `prompt` and `completion`, or as `messages` with `train: false`"
STEPS_HINT = "write one answer as `completion`"

MEDIA = _rule(
    r"(image|img|video|audio|picture|photo|pixel)s?"
    r"(_?(path|url|uri|file|byte|value|data|list|name|filename|base64|feature|input|grid_thw)s?)?"
    r"|input_features",
    "holds images, video or sound, and only text is trained",
    "train the rows that are text alone: delete the others, or `on_bad_row=skip`",
)

PROMPT_PART = _rule(
    r"instruction|input|context|passage|article|documents?|choices|options|suffix",
    "holds a part of the prompt that is not read",
    "`type: alpaca`, `columns: {instruction: COLUMN, input: COLUMN, output: COLUMN}`, or write it into the prompt",
    ("prompt_completion", "preference"),
)
"""Harmless where the text is in a column that is read."""

RULES = (
    _rule(
        r"label|kto_tag|kto_label|(is_)?desirable",
        "marks answers as wanted or unwanted (KTO), which is not offered",
        KTO_HINT,
        ANSWER_TYPES,
        matters=is_verdict,
    ),
    _rule(
        f"{CHOSEN.pattern}|{REJECTED.pattern}",
        "belongs to a preference pair, which objective sft does not train",
        PAIR_HINT,
        (*ANSWER_TYPES, "text"),
    ),
    MEDIA,
    _rule(
        r"(loss|sample|example|row|token)?_?weights?|loss_scale",
        "says how much the row counts, which is not offered",
        "weigh whole datasets against each other with `weight` in the recipe, and delete the column",
        matters=is_weight,
    ),
    _rule(
        r"(prompt_|completion_|chosen_|rejected_)?input_ids|(prompt|completion|chosen|rejected|token)_ids|tokens"
        r"|(completion|assistant|loss|label|labels)_masks?|assistant_tokens_mask",
        "holds tokens or masks that are made already, which is not offered",
        TOKENS_HINT,
        matters=_is_list_of_numbers,
    ),
    _rule(
        r"segments",
        "holds pieces of text with a label each (axolotl's input_output), which is not offered",
        SEGMENTS_HINT,
        matters=holds_messages,
    ),
    _rule(
        r"completions",
        "holds steps or several answers to judge (process supervision), which is not offered",
        STEPS_HINT,
        ANSWER_TYPES,
        matters=_is_list,
    ),
    _rule(
        r"tools|functions|tool_definitions",
        "holds tools that this type of rows does not read",
        "use `messages` (type chat) with a column `tools`",
    ),
    _rule(
        r"system(_prompt|_message)?",
        "holds a system prompt that is not read",
        "name the column: `columns: {system: COLUMN}`",
        PROMPT_TYPES,
    ),
    _rule(r"history", "holds earlier turns that are not read", "write all turns as `messages`", PROMPT_TYPES),
    PROMPT_PART,
    _rule(
        r"chat_template_kwargs|documents",
        "holds settings of the chat template, which are not offered in rows",
        "give a template that has them as `chat_template: FILE`",
        PROMPT_TYPES,
    ),
    _rule(
        r"reasoning_content|reasoning|thinking",
        "holds thoughts that are not read",
        "write them into the messages of a chat, as `reasoning_content`",
        ("alpaca", "prompt_completion", "preference"),
    ),
)

MESSAGE_RULES = (
    MEDIA,
    _rule(
        r"function_call",
        "holds a call in a form that is not read",
        "write it as `tool_calls`: [{function: {name, arguments}}]",
    ),
    _rule(r"refusal", "holds words of the assistant that are not read", "write them as the message's `content`"),
    _rule(
        r"(reasoning_)?(training|train)_detail|masks?|loss_mask|weights|train_on_.*",
        "says which part of the turn is trained, which is not offered",
        "split the turn, or give whole messages `train: false`",
    ),
    _rule(r"label", "says which turns are wanted, which is not offered", "write `train: false`", matters=is_verdict),
    _rule(r"chosen|rejected", "belongs to a preference pair", PAIR_HINT),
)


@dataclass(frozen=True)
class Layout:
    """Columns that only a kind of training not offered has; told where the columns fit no type."""

    columns: frozenset[str]
    what: str
    hint: str


LAYOUTS = (
    Layout(frozenset({"input_ids"}), "the rows are tokenised already", TOKENS_HINT),
    Layout(
        frozenset({"segments"}),
        "rows of segments with a label each (axolotl's input_output) are not offered",
        SEGMENTS_HINT,
    ),
    *(
        Layout(frozenset(pair), "the rows are preference pairs, and objective sft trains single answers", PAIR_HINT)
        for pair in (
            ("chosen", "rejected"),
            ("chosen_messages", "rejected_messages"),
            ("chosen_response", "rejected_response"),
            ("chosen_conversations", "rejected_conversations"),
        )
    ),
    Layout(
        frozenset({"completions", "labels"}), "rows of steps to judge (process supervision) are not offered", STEPS_HINT
    ),
    *(
        Layout(
            frozenset({"completion", tag}),
            "rows of answers marked as wanted or unwanted (KTO) are not offered",
            KTO_HINT,
        )
        for tag in ("label", "kto_tag")
    ),
    Layout(
        frozenset({"prompt"}),
        "the rows are prompts without an answer to train on",
        "training on rewards (GRPO, PPO) is not offered",
    ),
)


def refuse_layout(layouts: Sequence[Sequence[str]], where: str) -> None:
    """
    Raises:
        RefusedError: the columns, which fit no type, are those of a known kind of rows.
    """
    for columns in layouts:
        layout = next((layout for layout in LAYOUTS if layout.columns <= set(columns)), None)
        if layout is not None:
            found = column_names(dict.fromkeys(columns))
            raise RefusedError(layout.what, where=where, found=found, hint=layout.hint)


def unused_columns(row: Mapping[str, object], used: Collection[str], row_type: str) -> list[str]:
    """Names of the columns that are not used, and of keys in messages, as `messages[].id`.

    Args:
        used: columns that are read, whether or not the row has them.

    Raises:
        BadRowError: one of them changes what the row means.
    """
    names: list[str] = []
    for name, value in row.items():
        if name in used:
            names += _unused_keys(name, value)
            continue
        rule = _find_rule(str(name), value, row_type)
        if rule is not None and not _is_harmless(rule, str(name), row, used):
            raise _refusal(rule, str(name), value)
        names.append(str(name))
    if names:
        _refuse_placeholders(row, [name for name in names if "[" not in name])
    return list(dict.fromkeys(names))


def _is_harmless(rule: ColumnRule, name: str, row: Mapping[str, object], used: Collection[str]) -> bool:
    """Whether a column that has a rule is left out on purpose, or repeats what is read."""
    if rule is PROMPT_PART:
        text = row[name]
        read = (row.get(column) for column in used)
        return isinstance(text, str) and any(isinstance(other, str) and text.strip() in other for other in read)
    return REJECTED.fullmatch(name.lower()) is not None and any(CHOSEN.fullmatch(column) for column in used)


def _find_rule(name: str, value: object, row_type: str) -> ColumnRule | None:
    return next((rule for rule in _rules_named(name, row_type) if rule.matters(value)), None)


@lru_cache(maxsize=4096)
def _rules_named(name: str, row_type: str) -> tuple[ColumnRule, ...]:
    """Rules for a column of this name; for most names there are none."""
    lower, rules = name.lower(), MESSAGE_RULES if row_type == IN_MESSAGES else RULES
    return tuple(
        rule for rule in rules if (rule.types is None or row_type in rule.types) and rule.names.fullmatch(lower)
    )


def may_hold_text(name: str) -> bool:
    """Whether a column of this name may be a prompt or an answer: none that means something else."""
    return not any(rule.names.fullmatch(name.lower()) for rule in RULES) and name.lower() not in ("id", "uuid", "index")


def _refusal(rule: ColumnRule, name: str, value: object) -> BadRowError:
    found = f"{printable(name, 40)}: {value}" if isinstance(value, (bool, int, float)) else describe_value(value)
    return BadRowError(f"`{printable(name, 60)}` {rule.what}", found=found, hint=rule.hint)


def _unused_keys(column: str, value: object) -> Iterator[str]:
    if not holds_messages(value):
        return
    items: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    if "role" not in items[0] and "from" not in items[0]:  # tools, for instance
        return
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            continue  # the reader names it
        for key, part in item.items():
            if key in MESSAGE_KEYS or part is None:
                continue
            rule = _find_rule(str(key), part, IN_MESSAGES)
            if rule is not None:
                raise _refusal(rule, f"{column}[{index}].{key}", part)
            yield f"{column}[].{key}"


def _refuse_placeholders(row: Mapping[str, object], unused: Sequence[str]) -> None:
    """
    Raises:
        BadRowError: the row's text has a placeholder for what lies in a column that is not used.
    """
    media = next((name for name in unused if _may_be_media(name, row[name])), None)
    placeholder = None if media is None else _placeholder(row)
    if media is not None and placeholder is not None:
        raise BadRowError(
            f"the text has a place for what `{printable(media, 60)}` holds, and only text is trained",
            found=placeholder,
            hint=MEDIA.hint,
        )


def _may_be_media(name: str, value: object) -> bool:
    items = value if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(item, str) and item[-5:].lower().endswith(MEDIA_ENDINGS) for item in items):
        return True
    return _is_media_name(name) and says_something(value)


@lru_cache(maxsize=4096)
def _is_media_name(name: str) -> bool:
    return MEDIA_WORD.search(name) is not None


def _placeholder(value: object) -> str | None:
    """The first one in any text of the value."""
    if isinstance(value, str):
        found = PLACEHOLDER.search(value)
        return found.group() if found else None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((mark for mark in map(_placeholder, items) if mark is not None), None)
