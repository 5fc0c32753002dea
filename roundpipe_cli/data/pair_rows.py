"""Rows of preference pairs: finds their prompt and answers, and puts an answer behind its prompt.

    prompt              + chosen + rejected     texts, messages or lists of messages (TRL, axolotl)
    instruction, input  + chosen + rejected     texts (LLaMA-Factory's alpaca), with `system` and `history`
    conversations       + chosen + rejected     the prompt as a list, an answer as a message (LLaMA-Factory's sharegpt)
                          chosen + rejected     whole conversations: what both begin with is the prompt

The rejected answer is read with the chosen one, so that a row is bad for both or for neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roundpipe_cli.data.column_rules import ANSWER_COLUMNS, find_column
from roundpipe_cli.data.messages import (
    Conversation,
    Exchange,
    MessageColumn,
    alpaca_exchange,
    check_says_something,
    holds_messages,
    read_history,
    read_speech,
    read_turns,
    with_system,
)
from roundpipe_cli.data.rows import BadRowError, checked_text, column_names, printable
from roundpipe_cli.data.settings import AlpacaJoin, DatasetSpec, PairAnswer
from roundpipe_cli.data.tools import read_tools
from roundpipe_cli.errors import RefusedError

ANSWERS: tuple[PairAnswer, PairAnswer] = ("chosen", "rejected")
PROMPT_COLUMNS = ("prompt", "instruction", "question", "query", "input")
HISTORY_COLUMNS = ("messages", "conversations", "conversation")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
PAIR_FIELDS = (*ANSWERS, "prompt", "instruction", "input", "messages", "conversations", "system", "tools", "history")


def find_pair_columns(spec: DatasetSpec, layouts: Sequence[Sequence[str]], where: str) -> tuple[dict[str, str], str]:
    """Our fields to the columns of the first layout with both answers, and these columns in words.

    Raises:
        RefusedError: no layout has them.
    """
    for layout in layouts:
        names = [tuple(spec.columns.get(side, side) for side in ANSWERS), *ANSWER_COLUMNS]
        found = ([find_column(name, layout) for name in pair] for pair in names)
        answers = next((pair for pair in found if None not in pair), None)
        if answers is not None:
            columns = dict(zip(ANSWERS, map(str, answers), strict=True)) | _prompt_columns(spec, layout)
            return columns, printable("columns " + ", ".join(dict.fromkeys(columns.values())))
    raise RefusedError(
        "cannot find preference pairs in the columns of this dataset",
        where=where,
        found=column_names(dict.fromkeys(layouts[0])),
        expected="two answers, chosen and rejected, with a prompt, or both as whole conversations (`objective: dpo`)",
        hint="name the columns: `columns: {prompt: COLUMN, chosen: COLUMN, rejected: COLUMN}`",
    )


def _prompt_columns(spec: DatasetSpec, layout: Sequence[str]) -> dict[str, str]:
    """Fields beside both answers to their columns, as far as there are any."""
    given = {field: column for field, column in spec.columns.items() if field not in ANSWERS}
    found = {"messages": given.pop("conversations")} if "conversations" in given else {}
    found |= given
    others = (("prompt", PROMPT_COLUMNS), ("messages", HISTORY_COLUMNS), ("system", SYSTEM_COLUMNS))
    for field, names in (*others, ("tools", ("tools",)), ("history", ("history",))):
        name = next(filter(None, (find_column(name, layout) for name in names)), None)
        if field not in found and name is not None and not (field == "prompt" and "instruction" in found):
            found[field] = name
    if found.get("prompt", "").strip().lower() == "instruction":
        found["instruction"] = found.pop("prompt")
    if "instruction" in found and "input" not in found and (column := find_column("input", layout)) is not None:
        found["input"] = column
    return found


def parse_pair(
    columns: Mapping[str, str], row: Mapping[str, object], answer: PairAnswer, join: AlpacaJoin = "blank_line"
) -> Exchange | Conversation:
    """The prompt of a row with one of its answers, which alone is trained.

    Raises:
        BadRowError: an answer or the prompt is missing or cannot be used, or the answers are to different prompts.
    """
    values = {side: _value(columns, row, side) for side in ANSWERS}
    texts = [value for value in values.values() if isinstance(value, str)]
    prompt = _single_prompt(columns, row, join)
    if isinstance(prompt, Exchange) and len(texts) == len(values):
        for side in ANSWERS:
            checked_text(values[side], f"`{columns[side]}`", filled=True)
        return Exchange(prompt.user, prompt.plain_prompt, str(values[answer]))
    sides = {side: read_speech(values[side], columns[side], "assistant") for side in ANSWERS}
    for side in ANSWERS:
        check_says_something(sides[side], columns[side])
    context = _context(columns, row, sides["chosen"], prompt or _prompt_text(columns, row, join))
    whole = {side: turns.behind(context) for side, turns in sides.items()}
    num_shared = _num_shared(whole["chosen"], whole["rejected"])
    _check_answers(whole, num_shared, columns)
    turns = whole[answer]
    before = MessageColumn(turns.messages[:num_shared]).as_prompt()
    untrained = frozenset(index for index in turns.untrained if index >= num_shared)
    turns = MessageColumn(turns.messages, before.untrained | untrained)  # whole answers are compared
    turns = turns.behind(read_history(_optional(columns, row, "history"), columns.get("history", "")).as_prompt())
    turns = with_system(turns, _optional(columns, row, "system"), columns.get("system", ""))
    tools = read_tools(_optional(columns, row, "tools"), columns.get("tools", ""))
    return Conversation(turns.messages, tools, turns.untrained)


def _value(columns: Mapping[str, str], row: Mapping[str, object], field: str) -> object:
    column = columns[field]
    if column not in row:
        raise BadRowError(f"`{column}` is missing", found=column_names(row), expected=f"`{column}` (preference pairs)")
    return row[column]


def _optional(columns: Mapping[str, str], row: Mapping[str, object], field: str) -> object:
    return row.get(columns[field]) if field in columns else None


def _single_prompt(columns: Mapping[str, str], row: Mapping[str, object], join: AlpacaJoin) -> Exchange | None:
    """The prompt with an empty answer, where it is one text and nothing stands before it."""
    if any(_optional(columns, row, field) for field in ("messages", "system", "tools", "history")):
        return None
    return _prompt_text(columns, row, join)


def _prompt_text(columns: Mapping[str, str], row: Mapping[str, object], join: AlpacaJoin) -> Exchange | None:
    """A prompt that is text, with an empty answer."""
    if "instruction" in columns:
        instruction = checked_text(_value(columns, row, "instruction"), f"`{columns['instruction']}`", filled=True)
        context = _optional(columns, row, "input")
        if context is not None:
            context = checked_text(context, f"`{columns['input']}`", filled=False)
        return alpaca_exchange(instruction, context or "", "", join)
    prompt = _optional(columns, row, "prompt")
    if prompt is None or holds_messages(prompt):
        return None
    text = checked_text(prompt, f"`{columns['prompt']}`", filled=False)
    return Exchange(text, text, "")


def _context(
    columns: Mapping[str, str], row: Mapping[str, object], chosen: MessageColumn, text: Exchange | None
) -> MessageColumn:
    """The messages before both answers as they are; empty where they are whole conversations that repeat it.

    Raises:
        BadRowError: there is no prompt, or there are two that differ.
    """
    parts = []
    if text is not None and text.user.strip():
        parts.append(("instruction" if "instruction" in columns else "prompt", MessageColumn(text.messages[:1])))
    for field in ("prompt", "messages"):
        value = _optional(columns, row, field)
        if holds_messages(value) and value:
            column = columns[field]
            parts.append((field, read_turns(value if isinstance(value, (list, tuple)) else [value], column)))
    parts = [(field, turns) for field, turns in parts if not _repeats(turns, chosen)]
    if not parts and any(message["role"] == "user" for message in chosen.messages):
        return MessageColumn(())
    if not parts:
        raise BadRowError(
            "the pair has no prompt", found=column_names(row), expected="a prompt, or answers as whole conversations"
        )
    (field, context), *more = parts
    if more and not _repeats(context, more[0][1]):
        names = " and ".join(f"`{columns[field]}`" for field, _ in parts)
        raise BadRowError(f"{names} are two prompts", expected="one prompt for each pair")
    context = more[0][1] if more else context
    follows = {"user": ("assistant",), "tool": ("assistant",)}.get(context.messages[-1]["role"], ("user",))
    if chosen.messages[0]["role"] not in follows:
        roles = f"{context.messages[-1]['role']}, then {chosen.messages[0]['role']}"
        raise BadRowError(
            f"`{columns['chosen']}` does not follow on the prompt in `{columns[field]}`",
            found=f"roles {roles}",
            expected="a prompt that ends with the user's turn and an answer of the assistant",
        )
    return context


def _repeats(prompt: MessageColumn, turns: MessageColumn) -> bool:
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


def _num_shared(chosen: MessageColumn, rejected: MessageColumn) -> int:
    """Messages with which both begin; the last one of each is never among them."""
    most = min(len(chosen.messages), len(rejected.messages)) - 1
    pairs = zip(chosen.messages[:most], rejected.messages[:most], strict=True)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), most)


def _check_answers(whole: Mapping[PairAnswer, MessageColumn], num_shared: int, columns: Mapping[str, str]) -> None:
    for side, turns in whole.items():
        answer = turns.messages[num_shared:]
        if num_shared == 0 or answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
            raise BadRowError(
                f"`{columns[side]}` is no answer to the prompt that both answers share",
                found=printable("roles " + ", ".join(message["role"] for message in answer)),
                expected="the same prompt for both, and the assistant's turn behind it",
            )
