"""Unused columns and keys of messages: reported, or refused where they change the meaning of a row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal

from roundpipe_cli.choices import ANSWER_TYPES, ROW_KINDS, SINGLE_TYPES, FigureName, objectives_of
from roundpipe_cli.data.messages import MESSAGE_KEYS, holds_messages, messages_in_text
from roundpipe_cli.data.rows import BadRowError, column_names, describe_value, is_null_word, printable, read_weight
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import either

# Rules for columns and keys of messages that have a meaning but are not read: the table is `columns.json`.
#
# An empty value (null, an empty text or list) has no meaning in any column.

PROMPT_TYPES = tuple(name for name, kind in ROW_KINDS.items() if kind.num_answers)
"""Types of rows with a prompt."""
PLAIN_TYPES = tuple(name for name in PROMPT_TYPES if not ROW_KINDS[name].needs_template)
"""Types of rows whose prompt may be plain text."""
IN_MESSAGES = "messages"
"""Stands in place of a type of rows, for rules of keys of messages."""
VERDICTS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "1", "desirable", "chosen", "good", "accepted", "wanted", "preferred"), True),
    **dict.fromkeys(("false", "no", "0", "undesirable", "rejected", "bad", "unwanted", "dispreferred"), False),
}
"""Texts that mean that an answer is wanted or not, in lower case."""
FIGURE_COLUMNS: Mapping[FigureName, str] = {
    "weight": r"(loss|sample|example|row)?_?weight|loss_scale",
    "label": r"label|kto_tag|kto_label|(is_)?desirable|thumbs?_up",
}
"""Patterns for the names of columns that hold a figure of the whole row, in lower case."""


def find_column(name: str, layout: Sequence[str]) -> str | None:
    """The column with this name in lower case; in capitals or between blanks if it is the only one of that name."""
    if name in layout:
        return name
    spelled = [column for column in layout if column.strip().lower() == name]
    return spelled[0] if len(spelled) == 1 else None


def says_something(value: object) -> bool:
    """Whether a value holds anything: not null, nor empty, nor a list of such values, nor a text or word for one."""
    if isinstance(value, str):
        return value.strip() not in ("", "[]", "{}") and not is_null_word(value)
    if isinstance(value, Mapping):
        return any(says_something(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(map(says_something, value))
    if isinstance(value, bytes):
        return bool(value)
    return value is not None and value is not False and not (isinstance(value, float) and math.isnan(value))


def verdict(value: object) -> bool | None:
    """Yes or no, in any of the forms that files have for it; None: neither."""
    if isinstance(value, str):
        return VERDICTS.get(value.strip().lower().removesuffix(".0"))
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def read_factor(figure: FigureName, value: object, column: str) -> float:
    """The factor of a row's loss that its `weight` or its `label` says: below 0 where the answer is not wanted.

    Raises:
        BadRowError: no weight or no label, such as a negative one, or one of three.
    """
    if figure == "label":
        wanted = verdict(value)
        if wanted is None:
            found = str(value) if isinstance(value, (int, float)) else describe_value(value)
            what = f"`{printable(column, 60)}` does not say whether the answer is wanted"
            raise BadRowError(what, found=found, expected="true or false")
        return 1.0 if wanted else -1.0
    return 1.0 if value is None or value == "" else read_weight(value, f"`{printable(column, 60)}`")


def is_weight(value: object) -> bool:
    """A number other than 1, also as text."""
    try:
        return says_something(value) and float(value) != 1  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True


def _is_given(value: object) -> bool:
    """Whether a setting is given; `false` counts as given."""
    return (
        isinstance(value, (bool, int, float)) or says_something(value) or (isinstance(value, Mapping) and bool(value))
    )


def is_decoded_media(value: object) -> bool:
    """An image or a sound as the `datasets` library stores it, or a list of them."""
    if isinstance(value, (list, tuple)):
        return any(map(is_decoded_media, value))
    return (
        isinstance(value, Mapping)
        and ({"bytes", "path"} == set(value) or {"array", "sampling_rate"} <= set(value))
        and says_something(value)
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value)


@dataclass(frozen=True)
class ColumnRule:
    """A rule for columns that have a meaning but are not read."""

    names: str
    """Pattern for the whole name of the column, in lower case."""
    what: str
    """Description of the column, behind its name."""
    hint: str
    types: tuple[str, ...] | None = None
    """Types of rows to which the rule applies; None: all."""
    matters: Callable[[object], bool] = says_something


ANSWER_FORMS = ("messages", "response", "conversations", "answer", "output", "completion", "text")
"""Endings of the columns that hold an answer of a pair: `chosen_messages`, `rejected-response`."""
REJECTED = re.compile(rf"rejected([_-]({'|'.join(ANSWER_FORMS)}))?")
CHOSEN = re.compile(rf"chosen([_-]({'|'.join(ANSWER_FORMS)}))?")
_TYPES: Mapping[str | None, tuple[str, ...] | None] = {
    **{"answers": ANSWER_TYPES, "single": SINGLE_TYPES, "prompts": PROMPT_TYPES, "plain": PLAIN_TYPES},
    **{"alpaca": ("alpaca",), None: None},
}
_MATTERS: Mapping[str | None, Callable[[Any], bool]] = {
    **{"weight": is_weight, "messages": holds_messages, "given": _is_given, None: says_something},
    "verdict": lambda value: verdict(value) is not None,
    "no": lambda value: value is False or (isinstance(value, str) and value.strip().lower() == "false"),
    "content": lambda value: not isinstance(value, (bool, int, float)) and says_something(value),
    "list": lambda value: _is_list(value) and says_something(value),
    "numbers": lambda value: _is_list(value) and all(isinstance(item, int) for item in value),
}
"""Meanings of the words of `columns.json`."""
SAME_PROMPT = ("prompt", "question", "query", "problem")
"""Columns that often repeat the prompt with text around it."""


@cache
def _tables() -> dict[str, Any]:
    text = files("roundpipe_cli.data").joinpath("columns.json").read_text(encoding="utf-8")
    named = {"pairs": either(objectives_of("pair")), "wanted": either(objectives_of("labelled"))}
    named |= {"label": FIGURE_COLUMNS["label"], "chosen": CHOSEN.pattern, "rejected": REJECTED.pattern}
    for name, meant in named.items():
        text = text.replace(f"@{name}", meant)
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@cache
def _rules(table: Literal["columns", "messages"]) -> dict[str, ColumnRule]:
    """The rules for columns or for keys of messages, by their names."""
    found = {
        name: ColumnRule(one["names"], one["what"], one["hint"], _TYPES[one.get("types")], _MATTERS[one.get("matters")])
        for name, one in _tables()[table].items()
    }
    return found if table == "columns" else {"media": _rules("columns")["media"], **found}


ANSWER_COLUMNS = (
    ("chosen", "rejected"),
    *((f"chosen{joint}{form}", f"rejected{joint}{form}") for form in ANSWER_FORMS for joint in ("_", "-")),
)
"""Names under which both answers of a pair are found."""


@cache
def _words(of: Literal["prompts", "answers"]) -> frozenset[str]:
    """Words in the names of a prompt or of its answer, in lower case; those of four letters also within a longer
    word."""
    return frozenset(_tables()[f"words of {of}"].split())


_NO_TEXT = re.compile(r"(https?://\S+|\S+@\S+|[0-9a-f-]{8,}|[\d\W_]*)", re.IGNORECASE)
"""An address, an identifier, a number or a date."""
PLACEHOLDER = re.compile(r"<(\|?)(image|video|audio)(_pad)?\1>")
MEDIA_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff"),
    *(".mp4", ".mov", ".avi", ".mkv", ".webm", ".wav", ".mp3", ".flac", ".ogg", ".m4a"),
)
MEDIA_WORD = re.compile(r"image|img|video|audio|picture|photo|pixel|frame|media|speech|sound|figure", re.IGNORECASE)
_media_word = lru_cache(maxsize=4096)(MEDIA_WORD.search)  # asked for each unused column of each row


def refuse_layout(layouts: Sequence[Sequence[str]], where: str, *, has_answer: bool) -> None:
    """
    Raises:
        RefusedError: the columns, which fit no type, are those of a known kind of rows.
    """
    alone = [] if has_answer else [_tables()["prompts alone"]]
    for columns in layouts:
        for names, what, hint in (*_tables()["layouts"], *alone):
            ways = ANSWER_COLUMNS if names == "both answers" else [way.split("+") for way in names.split()]
            if any(all(find_column(name, columns) for name in way) for way in ways):
                raise RefusedError(what, where=where, found=column_names(dict.fromkeys(columns)), hint=hint)


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
    if rule is _rules("columns")["prompt part"]:
        text, around = row[name], name.strip().lower() in SAME_PROMPT
        read = [other.strip() for other in map(row.get, used) if isinstance(other, str) and other.strip()]
        return isinstance(text, str) and any(text.strip() in other or (around and other in text) for other in read)
    read_names = (column.strip().lower() for column in used)
    return REJECTED.fullmatch(name.strip().lower()) is not None and any(map(CHOSEN.fullmatch, read_names))


def _find_rule(name: str, value: object, row_type: str) -> ColumnRule | None:
    named = next((rule for rule in _rules_named(name, row_type) if rule.matters(value)), None)
    return named or (_rules("columns")["media"] if is_decoded_media(value) else None)


@lru_cache(maxsize=4096)
def _rules_named(name: str, row_type: str) -> tuple[ColumnRule, ...]:
    lower, rules = name.strip().lower(), _rules("messages" if row_type == IN_MESSAGES else "columns")
    fitting = (rule for rule in rules.values() if rule.types is None or row_type in rule.types)
    return tuple(rule for rule in fitting if re.fullmatch(rule.names, lower))


def is_known_column(name: str) -> bool:
    """Whether it is, in any capitals, a name that this program knows or a word for a prompt or an answer."""
    return name.strip().lower() in _known_names()


@cache
def _known_names() -> frozenset[str]:
    words = (word for word in _words("prompts") | _words("answers") if len(word) > 1)
    fields = (field for kind in ROW_KINDS.values() for field in (*kind.fields, *kind.optional))
    return frozenset((*fields, *words, "id", "index", "system_prompt", "system_message"))


def flattened(row: Mapping[str, object]) -> Mapping[str, object]:
    """The row with the values inside its objects as columns of their own: `data.question`."""
    if not any(isinstance(value, Mapping) for value in row.values()):
        return row
    made: dict[str, object] = {}
    for name, value in row.items():
        is_object = isinstance(value, Mapping) and not is_decoded_media(value) and not {"role", "from"} & set(value)
        inner = flattened(value).items() if is_object and isinstance(value, Mapping) else ()
        made |= {f"{name}.{key}": item for key, item in inner} or {name: value}
    return made


def likely_columns(rows: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Fields to the columns of rows of no known type that are likely to hold them: messages, or a prompt and its
    completion by the words in their names, else by their order, or the only text; empty: no column holds text."""
    rows = [flattened(row) for row in rows]
    for row in rows:
        for name, value in row.items():
            items = messages_in_text(value) or value
            first = items[0] if isinstance(items, (list, tuple)) and items else None
            if isinstance(first, Mapping) and ("role" in first or "from" in first):
                return {"messages": name}
    layout = [name for name in dict.fromkeys(name for row in rows for name in row) if _may_hold_text(name)]
    texts = {name: [value for row in rows if isinstance(value := row.get(name), str)] for name in layout}
    filled = [name for name in layout if any(map(str.strip, texts[name]))]
    natural = [name for name in filled if not all(map(_NO_TEXT.fullmatch, texts[name]))]
    searched = [*natural, *filled]
    answer = next((name for name in searched if _has_word(name, _words("answers"))), None)
    parts = [name for name in searched if re.fullmatch(_rules("columns")["prompt part"].names, name.strip().lower())]
    asked = (name for name in searched if _has_word(name, _words("prompts")))
    prompt = next((name for name in [*asked, *parts] if name != answer), None)
    others = [name for name in (natural if len(natural) > 1 else filled) if name not in (prompt, answer, *parts)]
    lacking = (prompt is None) + (answer is None)
    if lacking and not natural:  # a table of numbers
        return {}
    longest = sorted(others, key=lambda name: -sum(map(len, texts[name])))[:lacking]
    rest = iter([name for name in others if name in longest])
    prompt, answer = prompt or next(rest, None), answer or next(rest, None)
    if prompt is not None and answer is not None:
        return {"prompt": prompt, "completion": answer}
    named = [name for name in layout if _has_word(name, _words("prompts") | _words("answers"))]
    is_only = (
        len(natural) == 1
        and len(named) < 2
        and not any(_find_rule(name, value, "text") for row in rows for name, value in row.items())
    )
    return {"text": natural[0]} if is_only else {}


def _has_word(name: str, words: Collection[str]) -> bool:
    lower = name.lower()
    return any(word in words for word in re.split(r"[\W_]+", lower)) or any(
        word in lower for word in words if len(word) > 3
    )


def columns_text(columns: Mapping[str, str]) -> str:
    """`columns: {prompt: Frage, completion: Antwort}`, as a line of a recipe."""
    plain = re.compile(r"(?!(y|n|yes|no|on|off|true|false|null)$)[^\W\d][\w.-]*", re.IGNORECASE)
    texts = {
        field: name if plain.fullmatch(name) else json.dumps(name, ensure_ascii=False)
        for field, name in columns.items()
    }
    return f"columns: {{{', '.join(f'{field}: {text}' for field, text in texts.items())}}}"


def is_columnar(row: Mapping[str, object]) -> bool:
    """Whether an object is a whole table: an equally long list for each column, or pandas' object of rows by number."""
    lists = [
        list(value.values()) if isinstance(value, Mapping) and all(map(str.isdigit, map(str, value))) else value
        for value in row.values()
    ]
    sizes = {len(value) if isinstance(value, list) else 0 for value in lists}
    cells = [cell for value in lists if isinstance(value, list) for cell in value[:1]]
    is_turns = any(isinstance(cell, (Mapping, list)) for cell in cells) or any(map(messages_in_text, row.values()))
    is_table = len(sizes) == 1 and (len(row) > 1 or "text" in row) and not is_turns
    return is_table and any(isinstance(cell, str) for cell in cells)


def rows_inside(row: Mapping[str, object], where: str) -> RefusedError | None:
    """The error for a file whose only object has the rows inside it; None: it has none."""
    lists = ((name, value[0]) for name, value in flattened(row).items() if isinstance(value, (list, tuple)) and value)
    objects = [name for name, first in lists if isinstance(first, Mapping) and not {"role", "from"} & set(first)]
    keys = {frozenset(value) if isinstance(value, Mapping) else frozenset() for value in row.values()}
    if is_columnar(row):
        found = f"a list for each column: {column_names(row)}"
        rows = "(dict(zip(d, r)) for r in zip(*(v.values() if isinstance(v, dict) else v for v in d.values())))"
    elif len(row) > 1 and len(keys) == 1 and not keys & {frozenset()} and not {"role", "from"} & set(*keys):
        found, rows = f"an object under each name: {column_names(row)}", "d.values()"
    elif objects:
        found = f"a list of objects in `{printable(objects[0], 60)}`"
        rows = "".join(["d", *(f"[{key!r}]" for key in objects[0].split("."))])
    else:
        return None
    return RefusedError(
        "the file is one object with the rows inside it, and not one object a row",
        where=where,
        found=found,
        expected="a list of rows, or one JSON object a line",
        hint=f'take them out: python3 -c "import json; d = json.load(open({where!r})); '
        f'[print(json.dumps(row)) for row in {rows}]" > rows.jsonl',
    )


def _may_hold_text(name: str) -> bool:
    """Whether a column of this name may be a prompt or an answer: none that means something else."""
    lower = name.strip().lower()
    others = (rule for name, rule in _rules("columns").items() if name != "prompt part")
    return not any(re.fullmatch(rule.names, lower) for rule in others) and lower not in ("id", "uuid", "index")


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
    def may_be_media(name: str) -> bool:
        items = value if isinstance(value := row[name], (list, tuple)) else (value,)
        if any(isinstance(item, str) and item[-5:].lower().endswith(MEDIA_ENDINGS) for item in items):
            return True
        return _media_word(name) is not None and says_something(value)

    media = next(filter(may_be_media, unused), None)
    placeholder = None if media is None else _placeholder(row)
    if media is not None and placeholder is not None:
        raise BadRowError(
            f"the text has a place for what `{printable(media, 60)}` holds, and only text is trained",
            found=placeholder,
            hint=_rules("columns")["media"].hint,
        )


def _placeholder(value: object) -> str | None:
    if isinstance(value, str):
        found = PLACEHOLDER.search(value)
        return found.group() if found else None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return next((mark for mark in map(_placeholder, items) if mark is not None), None)
