"""Which type a dataset has, and what one of its rows says: a conversation, a prompt with its completion, or a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

from roundpipe_cli.choices import ROW_KINDS, RowType
from roundpipe_cli.data.columns import (
    ANSWER_COLUMNS,
    FIGURE_COLUMNS,
    columns_text,
    find_column,
    is_columnar,
    likely_columns,
    read_factor,
    refuse_layout,
    rows_inside,
    unused_columns,
)
from roundpipe_cli.data.messages import (
    LIST_TEXT,
    Content,
    Conversation,
    alpaca_prompt,
    check_says_something,
    exchange,
    from_json_text,
    holds_messages,
    messages_in_text,
    read_history,
    read_speech,
    read_tools,
    read_turns,
    with_system,
)
from roundpipe_cli.data.rows import BadRowError, checked_text, column_names, delimiter_hint, printable
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.errors import RefusedError, closest

# Rows of preference pairs: finds their prompt and answers, and puts an answer behind its prompt.
#
#     prompt              + chosen + rejected     texts, messages or lists of messages (TRL, axolotl)
#     instruction, input  + chosen + rejected     texts (LLaMA-Factory's alpaca), with `system` and `history`
#     conversations       + chosen + rejected     the prompt as a list, an answer as a message (sharegpt)
#                           chosen + rejected     whole conversations: what both begin with is the prompt

ANSWERS = ("chosen", "rejected")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
BESIDE_ANSWERS = {
    "prompt": ("prompt", "instruction", "question", "query", "input"),
    "messages": ("messages", "conversations", "conversation"),
    **{"system": SYSTEM_COLUMNS, "tools": ("tools",), "history": ("history",)},
}
"""Fields of pairs beside their answers -> the names under which they are found where nobody maps them."""


def find_answers(spec: DatasetSpec, layouts: Sequence[Sequence[str]], where: str) -> dict[str, str]:
    """The columns of both answers in the first layout that has them.

    Raises:
        RefusedError: no layout has them.
    """
    for layout in layouts:
        names = [tuple(spec.columns.get(side, side) for side in ANSWERS), *ANSWER_COLUMNS]
        found = ([find_column(name, layout) for name in pair] for pair in names)
        answers = next((pair for pair in found if None not in pair), None)
        if answers is not None:
            return dict(zip(ANSWERS, map(str, answers), strict=True))
    raise RefusedError(
        "cannot find preference pairs in the columns of this dataset",
        where=where,
        found=column_names(dict.fromkeys(layouts[0])),
        expected="two answers, chosen and rejected, with a prompt, or both as whole conversations (`objective: dpo`)",
        hint="`columns: {prompt: COLUMN, chosen: COLUMN, rejected: COLUMN}`; for labelled answers, `objective: kto`",
    )


def find_figure(spec: DatasetSpec, layouts: Sequence[Sequence[str]]) -> dict[str, str]:
    """The column with the figure of a whole row, if one of the layouts has it."""
    figure = spec.rows.figure
    if figure is None:
        return {}
    pattern = re.compile(FIGURE_COLUMNS[figure])
    names = [name for layout in layouts for name in layout if pattern.fullmatch(name.strip().lower())]
    found = spec.columns.get(figure) or next((name for name in names if name == figure), next(iter(names), None))
    return {} if found is None else {figure: found}


def _prompt_columns(spec: DatasetSpec, layout: Sequence[str]) -> dict[str, str]:
    """Fields beside both answers to their columns, as far as there are any."""
    found = {field: column for field, column in spec.columns.items() if field not in (*ANSWERS, "conversations")}
    if "conversations" in spec.columns:
        found.setdefault("messages", spec.columns["conversations"])
    for field, names in BESIDE_ANSWERS.items():
        name = next(filter(None, (find_column(name, layout) for name in names)), None)
        if field not in found and name is not None and not (field == "prompt" and "instruction" in found):
            found[field] = name
    if found.get("prompt", "").strip().lower() == "instruction":
        found["instruction"] = found.pop("prompt")
    if "instruction" in found and "input" not in found and (column := find_column("input", layout)) is not None:
        found["input"] = column
    return found


def _repeats(prompt: Conversation, turns: Conversation) -> bool:
    """Whether `turns` already hold the prompt: they begin with it, or its only message is one of theirs."""
    wanted, had = prompt.messages, turns.messages
    if had[0]["role"] == "assistant":  # an answer alone
        return False
    if len(wanted) == 1:
        return any(_same(wanted[0], message) for message in had)
    return len(wanted) <= len(had) and all(_same(*pair) for pair in zip(wanted, had, strict=False))


def _same(message: Mapping[str, object], other: Mapping[str, object]) -> bool:
    if message["role"] != other["role"] or message.get("tool_calls") != other.get("tool_calls"):
        return False
    return str(message["content"]).strip() == str(other["content"]).strip()


def _num_shared(chosen: Conversation, rejected: Conversation) -> int:
    """Messages with which both begin; the last one of each is never among them."""
    most = min(len(chosen.messages), len(rejected.messages)) - 1
    pairs = zip(chosen.messages[:most], rejected.messages[:most], strict=True)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), most)


LIST_FIELDS = ("messages", "conversations", "history")
"""Fields that hold lists, or JSON text of them."""
PAIR_COLUMNS = (
    *(("question", "answer"), ("prompt", "response"), ("instruction", "response"), ("query", "response")),
    *(("question", "response"), ("query", "answer"), ("problem", "solution"), ("input", "output")),
    *(("instruction", "completion"), ("question", "completion")),
)
"""Other names under which `auto` finds a prompt and its completion."""


@dataclass(frozen=True)
class RowFormat:
    """The way in which the rows of one dataset are read. The first rows decide the type and the columns that every row
    has; the others are found in each row, so that the order of rows does not matter.

    The methods raise `BadRowError` for a field that is missing, of the wrong type, empty or no text, for answers to
    different prompts, and for columns that change what the row means and are not read.
    """

    spec: DatasetSpec
    type: RowType
    columns: Mapping[str, str]
    """Our field name to the file's column."""
    notice: str | None = None
    """A line on the decision of `auto`."""

    def fitted(self, row: Iterable[str]) -> RowFormat:
        """The format with the optional columns of this row: those that the recipe names, or else by their own names."""
        layout, kind = tuple(row), ROW_KINDS[self.type]
        fixed = {field: self.columns[field] for field in kind.fields}
        if self.type == "preference":
            return replace(self, columns=fixed | _prompt_columns(self.spec, layout))
        figure = find_figure(self.spec, [layout])
        return replace(self, columns=_mapped(self.type, {**self.spec.columns, **fixed}, layout) | figure)

    def opened(self, row: Mapping[str, object]) -> Mapping[str, object]:
        """The row with its lists of messages in place of their JSON text, which is how CSV files have them.

        A prompt and its answers may be any text: they are opened where both answers of a pair, or a prompt and its
        completion, are the text of messages.
        """
        found: dict[str, object] = {}
        for field in LIST_FIELDS:
            column = self.columns.get(field, "")
            value = row.get(column)
            if isinstance(value, (list, tuple)) or (isinstance(value, str) and LIST_TEXT.match(value)):
                found[column] = from_json_text(value, f"`{column}`")
        fields = {"prompt_completion": ("prompt", "completion"), "preference": ANSWERS}.get(self.type, ())
        spoken = {self.columns[field]: messages_in_text(row.get(self.columns[field])) for field in fields}
        if spoken and all(spoken.values()):
            found |= spoken
            prompt = self.columns.get("prompt", "")
            found |= {prompt: messages} if (messages := messages_in_text(row.get(prompt))) else {}
        return {**row, **found} if found else row

    def parse(self, row: Mapping[str, object]) -> tuple[Content, ...]:
        """The words of an opened row: of a pair, its prompt with the chosen answer, and with the rejected one."""
        if self.type == "preference":
            return self._pair(row)
        if ROW_KINDS[self.type].needs_template:
            return (self._conversation(row),)
        if self.type == "alpaca":
            prompt = self._alpaca_prompt(row)
            return (self._in_context(row, exchange(*prompt, self._text(row, "output", filled=True))),)
        if self.type == "prompt_completion":
            return (self._prompt_completion(row),)
        return (self._text(row, "text", filled=True),)

    def factor(self, row: Mapping[str, object]) -> float:
        """The factor that an opened row says its loss has: below 0 where its answer is not wanted."""
        figure = self.spec.rows.figure
        if figure is None:
            return 1.0
        value, column = self._optional(row, figure)
        return read_factor(figure, value, column or figure)

    def unused(self, row: Mapping[str, object]) -> list[str]:
        """Names of the columns of an opened row, and of the keys in messages, that `parse` does not read."""
        return unused_columns(row, self.columns.values(), self.type)

    def _conversation(self, row: Mapping[str, object]) -> Conversation:
        field, role_key = ("messages", "role") if self.type == "chat" else ("conversations", "from")
        column = self.columns[field]
        turns = read_turns(self._field(row, field), column, role_key)
        check_says_something(turns, column)
        return self._with_columns(row, turns)

    def _alpaca_prompt(self, row: Mapping[str, object]) -> tuple[str, str]:
        instruction = self._text(row, "instruction", filled=True)
        context = "" if self._optional(row, "input")[0] is None else self._text(row, "input")
        return alpaca_prompt(instruction, context, self.spec.alpaca_join)

    def _prompt_completion(self, row: Mapping[str, object]) -> Conversation:
        prompt, completion = self._field(row, "prompt"), self._field(row, "completion")
        if not holds_messages(prompt) and not holds_messages(completion):
            prompt, completion = self._text(row, "prompt"), self._text(row, "completion", filled=True)
            return self._in_context(row, exchange(prompt, prompt, completion))
        before = read_speech(prompt, self.columns["prompt"], "user")
        answer = read_speech(completion, self.columns["completion"], "assistant")
        check_says_something(answer, self.columns["completion"])
        return self._with_columns(row, answer.behind(before.as_prompt()))

    def _in_context(self, row: Mapping[str, object], turns: Conversation) -> Conversation:
        """A prompt and its completion behind the row's system prompt, tools and earlier exchanges, where it has any."""
        conversation = self._with_columns(row, turns)
        if len(conversation.messages) == 2 and not conversation.tools:
            return conversation
        if not self.spec.as_chat:
            raise BadRowError(
                "the row has more than a prompt and an answer, and is not to become a chat",
                found="a system prompt, tools or earlier turns, and `as_chat: false`",
                expected="a prompt and an answer, or `as_chat: true`",
            )
        return replace(conversation, plain_prompt=None)

    def _with_columns(self, row: Mapping[str, object], turns: Conversation) -> Conversation:
        history = read_history(*self._optional(row, "history"))
        turns = turns.behind(history.as_prompt() if self.type == "preference" else history)
        turns = with_system(turns, *self._optional(row, "system"))
        return replace(turns, tools=read_tools(*self._optional(row, "tools")))

    def _pair(self, row: Mapping[str, object]) -> tuple[Content, ...]:
        """The prompt of a row with each of its answers, which alone are trained."""
        values = {side: self._field(row, side) for side in ANSWERS}
        prompt = self._pair_prompt(row)
        beside = (self._optional(row, field)[0] for field in ("messages", "system", "tools", "history"))
        if prompt is not None and not any(beside) and all(isinstance(value, str) for value in values.values()):
            return tuple(exchange(*prompt, self._text(row, side, filled=True)) for side in ANSWERS)
        sides = {side: read_speech(values[side], self.columns[side], "assistant") for side in ANSWERS}
        for side in ANSWERS:
            check_says_something(sides[side], self.columns[side])
        context = self._context(row, sides["chosen"], prompt)
        whole = {side: turns.behind(context) for side, turns in sides.items()}
        num_shared = _num_shared(whole["chosen"], whole["rejected"])
        made = []
        for side, turns in whole.items():
            answer = turns.messages[num_shared:]
            if num_shared == 0 or answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
                raise BadRowError(
                    f"`{self.columns[side]}` is no answer to the prompt that both answers share",
                    found=printable("roles " + ", ".join(message["role"] for message in answer)),
                    expected="the same prompt for both, and the assistant's turn behind it",
                )
            # The prompt is not trained, nor are turns that say so.
            untrained = {*range(num_shared), *(index for index, is_trained in turns.said.items() if not is_trained)}
            spoken = Conversation(turns.messages, said=dict.fromkeys(untrained, False), weights=turns.weights)
            made.append(self._with_columns(row, spoken))
        return tuple(made)

    def _pair_prompt(self, row: Mapping[str, object]) -> tuple[str, str] | None:
        """A pair's prompt that is text: the user's turn, and as plain text."""
        if "instruction" in self.columns:
            return self._alpaca_prompt(row)
        prompt, _ = self._optional(row, "prompt")
        if prompt is None or holds_messages(prompt):
            return None
        text = self._text(row, "prompt")
        return text, text

    def _context(self, row: Mapping[str, object], chosen: Conversation, prompt: tuple[str, str] | None) -> Conversation:
        """The messages before both answers as they are; empty where they are whole conversations that repeat it."""
        parts = []
        if prompt is not None and prompt[0].strip():
            field = "instruction" if "instruction" in self.columns else "prompt"
            parts.append((self.columns[field], Conversation(({"role": "user", "content": prompt[0]},))))
        for field in ("prompt", "messages"):
            value, column = self._optional(row, field)
            if holds_messages(value) and value:
                parts.append((column, read_turns(value if isinstance(value, (list, tuple)) else [value], column)))
        parts = [(column, turns) for column, turns in parts if not _repeats(turns, chosen)]
        if not parts and any(message["role"] == "user" for message in chosen.messages):
            return Conversation(())
        if not parts:
            raise BadRowError(
                "the pair has no prompt",
                found=column_names(row),
                expected="a prompt, or answers as whole conversations",
            )
        (column, context), *more = parts
        if more and not _repeats(context, more[0][1]):
            names = " and ".join(f"`{column}`" for column, _ in parts)
            raise BadRowError(f"{names} are two prompts", expected="one prompt for each pair")
        context = more[0][1] if more else context
        follows = {"user": ("assistant",), "tool": ("assistant",)}.get(context.messages[-1]["role"], ("user",))
        if chosen.messages[0]["role"] not in follows:
            roles = f"{context.messages[-1]['role']}, then {chosen.messages[0]['role']}"
            raise BadRowError(
                f"`{self.columns['chosen']}` does not follow on the prompt in `{column}`",
                found=f"roles {roles}",
                expected="a prompt that ends with the user's turn and an answer of the assistant",
            )
        return context

    def _optional(self, row: Mapping[str, object], field: str) -> tuple[object, str]:
        """A field's value, None where the row or the dataset has none, and its column."""
        column = self.columns.get(field, "")
        return row.get(column) if field in self.columns else None, column

    def _field(self, row: Mapping[str, object], field: str) -> object:
        column = self.columns[field]
        if column not in row:
            kind = "preference pairs" if self.type == "preference" else f"type {self.type}"
            likely = likely_columns([row]).get("messages") if field in LIST_FIELDS else None
            hint = None if likely is None else f"name the column: `{columns_text({field: likely})}`"
            expected = f"`{column}` ({kind})"
            raise BadRowError(f"`{column}` is missing", found=column_names(row), expected=expected, hint=hint)
        return row[column]

    def _text(self, row: Mapping[str, object], field: str, *, filled: bool = False) -> str:
        return checked_text(self._field(row, field), f"`{self.columns[field]}`", filled=filled)


def decide_format(spec: DatasetSpec, rows: Sequence[Mapping[str, object]], where: str) -> RowFormat:
    """The type and the columns of a dataset, with what its recipe says of its rows.

    Args:
        rows: its first ones, at least one. `auto` takes the first whose columns fit a type, so that a row without its
            field is named as bad even where it is the first of the file.

    Raises:
        RefusedError: no type fits, or `spec.columns` maps a field that the type does not have.
    """
    inside = rows_inside(rows[0], where) if len(rows) == 1 else None
    if inside is not None and is_columnar(rows[0]):
        raise inside
    layouts = list(dict.fromkeys(map(tuple, rows)))
    every = tuple(dict.fromkeys(chain.from_iterable(layouts)))
    types = spec.rows.row_types if spec.type == "auto" else (spec.type,)
    figures = filter(None, [spec.rows.figure])
    _refuse_unknown_fields(spec, [*(field for row_type in types for field in _all_fields(row_type)), *figures], where)
    if spec.rows.figure == "label" and not find_figure(spec, layouts):
        raise RefusedError(
            f"cannot find the labels of {spec.rows.noun} in the columns of this dataset",
            where=where,
            found=column_names(dict.fromkeys(layouts[0])),
            expected="a column `label`, true where the answer is wanted and false where not (`objective: kto`)",
            hint="name the column: `columns: {label: COLUMN}`; for pairs of answers, `objective: dpo`",
        )
    if "preference" in types:
        made = RowFormat(spec, "preference", find_answers(spec, layouts, where)).fitted(every)
        shown = printable("columns " + ", ".join(dict.fromkeys(made.columns.values())))
        return replace(made, notice=f"{where}: read as preference pairs ({shown})")
    detected = _detect(spec, layouts, types, where)
    if detected is not None:
        return detected
    if spec.type != "auto":
        return RowFormat(spec, spec.type, _mapped(spec.type, spec.columns, every))
    likely = likely_columns(rows) if not spec.columns else {}
    likely = {} if "text" in likely and "text" not in types else likely
    if spec.rows.figure != "label":
        refuse_layout(layouts, where, has_answer="completion" in likely)
    if inside is not None:
        raise inside
    raise UnknownColumnsError(layouts[0], where, types, likely)


class UnknownColumnsError(RefusedError):
    """No type fits the columns of the rows. Exit code 2."""

    def __init__(self, layout: Sequence[str], where: str, types: Sequence[RowType], likely: Mapping[str, str]) -> None:
        """
        Args:
            types: of rows that are trained.
            likely: fields to the columns that are likely to hold them; empty: nothing is known of them.
        """
        shown = likely or {"prompt": "COLUMN", "completion": "COLUMN"}
        super().__init__(
            "cannot tell the type of this dataset from its columns",
            where=where,
            found=column_names(dict.fromkeys(layout)),
            expected="; ".join(f"{row_type}: {', '.join(ROW_KINDS[row_type].fields)}" for row_type in types),
            hint=delimiter_hint(layout) or f"name the columns: `{columns_text(shown)}`",
        )
        self.likely = likely


FindColumn = Callable[[str, Sequence[str]], str | None]
"""Finds the column of a name."""


def _detect(
    spec: DatasetSpec, layouts: Sequence[Sequence[str]], types: Sequence[RowType], where: str
) -> RowFormat | None:
    """The format of the first layout whose columns fit a type, exactly as they are written before in other capitals."""
    every = tuple(dict.fromkeys(chain.from_iterable(layouts)))
    ways = [(row_type, names) for row_type in types for names in _names_of_fields(spec, row_type)]
    written: FindColumn = lambda name, layout: name if name in layout else None  # noqa: E731
    for find, layout in product((written, find_column), layouts):
        for row_type, names in ways:
            columns = {field: spec.columns.get(field) or find(name, layout) for field, name in names.items()}
            fixed = {field: column for field, column in columns.items() if column is not None and column in layout}
            is_usual = all(field == name for field, name in names.items())
            if len(fixed) == len(names):
                if is_usual and spec.type != "auto":
                    break  # the type that is given has its own columns
                made = RowFormat(spec, row_type, fixed).fitted(every)
                return replace(made, notice=f"{where}: read as type {_read_as(made, every, is_usual=is_usual)}")
    return None


def _names_of_fields(spec: DatasetSpec, row_type: RowType) -> Iterator[Mapping[str, str]]:
    """The names under which `auto` looks for the fields that every row has."""
    yield {field: field for field in ROW_KINDS[row_type].fields}
    if row_type == "prompt_completion" and not {*spec.columns} - {spec.rows.figure}:
        yield from ({"prompt": prompt, "completion": completion} for prompt, completion in PAIR_COLUMNS)


def _read_as(made: RowFormat, every: Sequence[str], *, is_usual: bool) -> str:
    """The type in words, with the columns of it that any of the first rows has."""
    if is_usual:
        shown = ", ".join(column for column in made.columns.values() if column in every)
        return f"{made.type} (columns {printable(shown)})"
    prompt, completion = (printable(made.columns[field]) for field in ("prompt", "completion"))
    beside = [made.columns[field] for field in ROW_KINDS[made.type].optional if made.columns[field] in every]
    text = f"{made.type}, {prompt} as the prompt and {completion} as the completion"
    return text + (f", with {', '.join(beside)}" if beside else "")


def _all_fields(row_type: RowType) -> tuple[str, ...]:
    return ROW_KINDS[row_type].fields + ROW_KINDS[row_type].optional


def _mapped(row_type: RowType, columns: Mapping[str, str], layout: Sequence[str]) -> dict[str, str]:
    """Our fields to the columns of a row with these columns."""
    mapped = {}
    for field in _all_fields(row_type):
        found = (find_column(name, layout) for name in (SYSTEM_COLUMNS if field == "system" else (field,)))
        mapped[field] = columns.get(field) or next(filter(None, found), field)
    return mapped


def _refuse_unknown_fields(spec: DatasetSpec, fields: Sequence[str], where: str) -> None:
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
