"""Unused columns and keys of messages: reported, or refused where they change the meaning of a row.

`column_rules.py` has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from roundpipe_cli.data.column_rules import (
    CHOSEN,
    IN_MESSAGES,
    LAYOUTS,
    MEDIA,
    MESSAGE_RULES,
    PROMPT_PART,
    REJECTED,
    RULES,
    SAME_PROMPT,
    ColumnRule,
    find_column,
    is_decoded_media,
    says_something,
)
from roundpipe_cli.data.messages import MESSAGE_KEYS, holds_messages
from roundpipe_cli.data.rows import BadRowError, column_names, describe_value, printable
from roundpipe_cli.errors import RefusedError

PROMPT_WORDS = frozenset({"prompt", "question", "instruction", "query", "problem", "input"})
ANSWER_WORDS = frozenset({"completion", "answer", "response", "output", "solution"})
PLACEHOLDER = re.compile(r"<(\|?)(image|video|audio)(_pad)?\1>")
MEDIA_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff"),
    *(".mp4", ".mov", ".avi", ".mkv", ".webm", ".wav", ".mp3", ".flac", ".ogg", ".m4a"),
)
MEDIA_WORD = re.compile(r"image|img|video|audio|picture|photo|pixel|frame|media|speech|sound|figure", re.IGNORECASE)


def refuse_layout(layouts: Sequence[Sequence[str]], where: str) -> None:
    """
    Raises:
        RefusedError: the columns, which fit no type, are those of a known kind of rows.
    """
    for columns in layouts:
        found = (layout for layout in LAYOUTS if all(find_column(name, columns) for name in layout.columns))
        layout = next(found, None)
        if layout is not None:
            shown = column_names(dict.fromkeys(columns))
            raise RefusedError(layout.what, where=where, found=shown, hint=layout.hint)


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
        text, around = row[name], name.strip().lower() in SAME_PROMPT
        read = [other.strip() for other in map(row.get, used) if isinstance(other, str) and other.strip()]
        return isinstance(text, str) and any(text.strip() in other or (around and other in text) for other in read)
    read_names = (column.strip().lower() for column in used)
    return REJECTED.fullmatch(name.strip().lower()) is not None and any(map(CHOSEN.fullmatch, read_names))


def _find_rule(name: str, value: object, row_type: str) -> ColumnRule | None:
    named = next((rule for rule in _rules_named(name, row_type) if rule.matters(value)), None)
    return named or (MEDIA if is_decoded_media(value) else None)


@lru_cache(maxsize=4096)
def _rules_named(name: str, row_type: str) -> tuple[ColumnRule, ...]:
    """Rules for a column of this name; for most names there are none."""
    lower, rules = name.strip().lower(), MESSAGE_RULES if row_type == IN_MESSAGES else RULES
    return tuple(
        rule for rule in rules if (rule.types is None or row_type in rule.types) and rule.names.fullmatch(lower)
    )


def likely_columns(layout: Sequence[str]) -> tuple[str, str]:
    """A prompt and its answer among columns of no known type, by the words in their names, else by their order."""
    rest = [name for name in layout if _may_hold_text(name)]
    answer = next((name for name in rest if ANSWER_WORDS & _words(name)), None)
    prompt = next((name for name in rest if name != answer and PROMPT_WORDS & _words(name)), None)
    others = iter([*(name for name in rest if name not in (answer, prompt)), "COLUMN", "COLUMN"])
    return prompt or next(others), answer or next(others)


def _may_hold_text(name: str) -> bool:
    """Whether a column of this name may be a prompt or an answer: none that means something else."""
    lower = name.strip().lower()
    others = (rule for rule in RULES if rule is not PROMPT_PART)
    return not any(rule.names.fullmatch(lower) for rule in others) and lower not in ("id", "uuid", "index")


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", name.lower()))


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
            continue  # the error of the reader names it
        other_form = ("from", "value") if item.get("role") is not None else ("role", "content")
        for key, part in item.items():
            if part is None or (key in MESSAGE_KEYS and key not in other_form):
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
