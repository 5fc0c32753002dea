"""What of a conversation is trained: roles, turns, ends of turns, thoughts; how plain prompts and texts are read.

Expected texts are written by hand, trained parts between [[ and ]].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
from datasets import Dataset

from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.files import read_file
from roundpipe_cli.data.settings import DatasetSpec, DataSettings, TrainRules
from roundpipe_cli.data.sources import Source
from roundpipe_cli.data.tokenized import TokenizedDataset
from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.recipe.load import load_text
from tests.data.test_data_dataset import CHATML, byte_tokenizer, write_rows

TURNS = [
    ("system", "Be brief."),
    ("user", "A?"),
    ("assistant", "<think>\nhm\n</think>\n\na"),
    ("user", "B?"),
    ("assistant", "b"),
]
CHAT = {"messages": [{"role": role, "content": text} for role, text in TURNS]}
MARKED = (
    "{%- for m in messages %}{{- '<s>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}{% generation %}"
    "{{- m.content + '</s>' }}{% endgeneration %}{%- else %}{{- m.content + '</s>' }}{%- endif %}{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}"
)
THOUGHTS_BESIDE = (
    "{%- for m in messages %}{{- '<s>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
    "{{- m.content + '</s>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}"
)


def read(path: Path, rows: list[Any], *, template: str | None = CHATML, **spec: Any) -> tuple[TokenizedDataset, str]:
    """The dataset of these rows, and the text of its first row with marks around what is trained."""
    write_rows(path, rows)
    names = ("roles_to_train", "turns_to_train", "train_on_eos", "thoughts")
    rules = TrainRules(**{name: spec.pop(name) for name in names if name in spec})
    tokenizer = byte_tokenizer(template=template)
    settings = DataSettings((DatasetSpec(str(path), rules=rules, **spec),), 1000)
    dataset = build_dataset(settings, tokenizer)
    return dataset, marked(tokenizer, dataset.rows[0])


def marked(tokenizer: Any, row: Any) -> str:
    pieces: list[tuple[bool, list[int]]] = []
    for token, label in zip(row.input_ids, row.labels, strict=True):
        if not pieces or pieces[-1][0] != (label >= 0):
            pieces.append((label >= 0, []))
        pieces[-1][1].append(int(token))
    return "".join(f"[[{tokenizer.decode(ids)}]]" if trained else tokenizer.decode(ids) for trained, ids in pieces)


def text_of(turns: list[str]) -> str:
    roles = [role for role, _ in TURNS]
    return "".join(f"<s>{role}\n{turn}\n" for role, turn in zip(roles, turns, strict=True))


SYSTEM, A, B = "Be brief.</s>", "A?</s>", "B?</s>"
THOUGHT = "<think>\nhm\n</think>\n\n"
ANSWER = THOUGHT + "a</s>"


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize(
    ("rules", "turns"),
    [
        ({}, [SYSTEM, A, f"[[{ANSWER}]]", B, "[[b</s>]]"]),
        ({"roles_to_train": ("user",)}, [SYSTEM, f"[[{A}]]", ANSWER, f"[[{B}]]", "b</s>"]),
        (
            {"roles_to_train": ("system", "assistant"), "train_on_eos": "none"},
            ["[[Be brief.]]</s>", A, f"[[{THOUGHT}a]]</s>", B, "[[b]]</s>"],
        ),
        ({"turns_to_train": "last"}, [SYSTEM, A, ANSWER, B, "[[b</s>]]"]),
        ({"train_on_eos": "last"}, [SYSTEM, A, f"[[{THOUGHT}a]]</s>", B, "[[b</s>]]"]),
        ({"train_on_eos": "all"}, ["Be brief.[[</s>]]", "A?[[</s>]]", f"[[{ANSWER}]]", "B?[[</s>]]", "[[b</s>]]"]),
        ({"thoughts": "mask"}, [SYSTEM, A, THOUGHT + "[[a</s>]]", B, "[[b</s>]]"]),
        ({"thoughts": "drop"}, [SYSTEM, A, "[[a</s>]]", B, "[[b</s>]]"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_rules_of_a_chat(tmp_path: Path, rules: dict[str, Any], turns: list[str], template: str) -> None:
    assert read(tmp_path / "x.jsonl", [CHAT], template=template, **rules)[1] == text_of(turns)


@pytest.mark.parametrize(
    ("thoughts", "expected"),
    [("train", "[[<think>hm</think>a</s>]]"), ("mask", "<think>hm</think>[[a</s>]]"), ("drop", "[[a</s>]]")],
)
def test_thoughts_beside_the_answer(tmp_path: Path, thoughts: str, expected: str) -> None:
    turns = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    shown = read(tmp_path / "x.jsonl", [{"messages": turns}], template=THOUGHTS_BESIDE, thoughts=thoughts)[1]
    assert shown == f"<s>user\nA?</s>\n<s>assistant\n{expected}\n"


def test_a_row_of_thoughts_alone_is_bad_where_they_are_dropped(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "<think>hm</think>\n"}]
    with pytest.raises(RefusedError, match="thoughts and no answer"):
        read(tmp_path / "x.jsonl", [{"messages": turns}], thoughts="drop")


def test_turns_that_a_row_leaves_out_are_not_trained_in_any_role(tmp_path: Path) -> None:
    turns = [{**turn, "weight": weight} for turn, weight in zip(CHAT["messages"][1:], (0, 1, 1, 0), strict=True)]
    shown = read(tmp_path / "x.jsonl", [{"messages": turns}], roles_to_train=("user", "assistant"), thoughts="drop")[1]
    assert shown == "<s>user\nA?</s>\n<s>assistant\n[[a</s>]]\n<s>user\n[[B?</s>]]\n<s>assistant\nb</s>\n"


def test_a_turn_of_the_user_that_says_so_is_trained(tmp_path: Path) -> None:
    """As axolotl's `train` of a message does; a weight of 1 asks for nothing."""
    says: list[dict[str, Any]] = [{"weight": 1}, {"train": True}, {"train": False}, {"weight": 1}, {"train": True}]
    turns = [{**turn, **more} for turn, more in zip(CHAT["messages"], says, strict=True)]
    for template in (CHATML, MARKED):
        shown = read(tmp_path / "x.jsonl", [{"messages": turns}], template=template, thoughts="drop")[1]
        assert shown == text_of([SYSTEM, f"[[{A}]]", "a</s>", B, "[[b</s>]]"])
    shown = read(tmp_path / "x.jsonl", [{"messages": turns}], thoughts="drop", roles_to_train=("tool",))[1]
    assert shown == text_of([SYSTEM, f"[[{A}]]", "a</s>", B, "[[b</s>]]"])


TOOL = {"name": "add", "parameters": {"type": "object"}}
CALLS = (
    "{%- for t in tools or [] %}{{- t.type + ':' + t.function.name + '\\n' }}{%- endfor %}"
    "{%- for m in messages %}{{- '<s>' + m.role + '\\n' + m.content }}{%- for c in m.tool_calls or [] %}"
    "{{- c.function.name + c.function.arguments | tojson }}{%- endfor %}{{- '</s>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}"
)


ADD: dict[str, Any] = {"name": "add", "arguments": {"a": 1}}
SUM = {"role": "user", "content": "1+1?"}
TWO, RESULT = {"role": "assistant", "content": "Two."}, {"role": "tool", "content": "2"}
SHAREGPT = (("human", "1+1?"), ("function_call", json.dumps(ADD)), ("observation", "2"), ("gpt", "Two."))
CALLERS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "llama-factory": ([{"from": role, "value": text} for role, text in SHAREGPT], json.dumps([TOOL])),
    "openai": (
        [
            {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "value": "1?"}]},
            {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            *({"role": "function", "name": "add", "content": "2"}, TWO),
        ],
        [{"type": "function", "function": TOOL}],
    ),
    "trl": ([SUM, {"role": "assistant", "tool_calls": [{"function": ADD}]}, RESULT, TWO], [TOOL]),
    "calls as text": (
        [
            *(
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "tool_calls": json.dumps([{"function": ADD}])},
            ),
            *({**RESULT, "tool_calls": ""}, {**TWO, "tool_calls": "[]"}),
        ],
        ["\n" + json.dumps(TOOL)],
    ),
}
"""Messages and tools."""


@pytest.mark.parametrize("name", CALLERS)
def test_calls_of_three_tools_are_one_text(tmp_path: Path, name: str) -> None:
    """LLaMA-Factory's function_call and OpenAI's older form were refused; bare functions reached templates bare."""
    messages, tools = CALLERS[name]
    row = {"conversations" if "from" in messages[0] else "messages": messages, "tools": tools}
    assert read(tmp_path / "x.jsonl", [row], template=CALLS)[1] == (
        'function:add\n<s>user\n1+1?</s>\n<s>assistant\n[[add{"a": 1}</s>]]\n<s>tool\n2</s>\n'
        "<s>assistant\n[[Two.</s>]]\n"
    )


@pytest.mark.parametrize("value", ["add(1)", "[]", "[1]", '{"arguments": {}}'])
def test_a_function_call_that_is_none_is_a_bad_row(tmp_path: Path, value: str) -> None:
    turns = [{"from": "human", "value": "x"}, {"from": "function_call", "value": value}]
    with pytest.raises(RefusedError, match=r"conversations\[1\].value"):
        read(tmp_path / "x.jsonl", [{"conversations": turns}], template=CALLS)


def test_a_thought_before_a_function_call_is_kept(tmp_path: Path) -> None:
    value = '<think>hm</think>{"name": "add", "arguments": {}}'
    turns = [{"from": "human", "value": "x"}, {"from": "function_call", "value": value}]
    shown = read(tmp_path / "x.jsonl", [{"conversations": turns}], template=CALLS)[1]
    assert shown == "<s>user\nx</s>\n<s>assistant\n[[<think>hm</think>add{}</s>]]\n"


@pytest.mark.parametrize("given", [{}, *({"arguments": none} for none in ("", " ", None, "null", [], "{}"))])
def test_calls_without_arguments_have_an_empty_object(tmp_path: Path, given: dict[str, Any]) -> None:
    """Story: OpenAI's clients write an empty text for a tool without parameters, which was refused."""
    forms: list[dict[str, Any]] = [
        {"tool_calls": [{"function": {"name": "add", **given}}]},
        {"tool_calls": [{"name": "add", **given}]},
        {"function_call": {"name": "add", **given}},
    ]
    for form in forms:
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", **form}]
        shown = read(tmp_path / "x.jsonl", [{"messages": turns}], template=CALLS)[1]
        assert shown == "<s>user\nx</s>\n<s>assistant\n[[add{}</s>]]\n"


@pytest.mark.parametrize("key", ["arguments", "parameters", "input"])
def test_arguments_under_other_names_are_not_lost(tmp_path: Path, key: str) -> None:
    """Story: Llama's own form of a call was trained as a call without arguments."""
    turns = [
        {"from": "human", "value": "x"},
        {"from": "function_call", "value": json.dumps({"name": "add", key: {"a": 1}})},
    ]
    shown = read(tmp_path / "x.jsonl", [{"conversations": turns}], template=CALLS)[1]
    assert shown == '<s>user\nx</s>\n<s>assistant\n[[add{"a": 1}</s>]]\n'


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_arguments_and_tools_with_a_number_that_json_lacks_are_bad_rows(tmp_path: Path, number: str) -> None:
    """Story: Python reads and writes `NaN`, so the model learnt a call that no other program can read."""
    user = '{"role": "user", "content": "x"}'
    for arguments in (f'{{"a": [{number}]}}', json.dumps(f'{{"a": {number}}}')):
        call = f'{{"role": "assistant", "content": "", "tool_calls": [{{"name": "add", "arguments": {arguments}}}]}}'
        (tmp_path / "x.jsonl").write_text(f'{{"messages": [{user}, {call}]}}')
        with pytest.raises(RefusedError, match="JSON has no such number"):
            build_dataset(DataSettings((DatasetSpec(str(tmp_path / "x.jsonl")),), 1000), byte_tokenizer(template=CALLS))
    tools = f'[{{"name": "add", "parameters": {{"minimum": {number}}}}}]'
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "x", "completion": "y", "tools": {tools}}}')
    with pytest.raises(RefusedError, match="JSON has no such number"):
        build_dataset(DataSettings((DatasetSpec(str(tmp_path / "x.jsonl")),), 1000), byte_tokenizer(template=CALLS))


NULLS = {"a": None, "of": [None, {"b": None}]}
NULL_TOOL = {"name": "add", "parameters": {"type": "object", "default": None}}
ALL_OF_TOOLS = CALLS.replace("t.function.name", "t.function | tojson")


@pytest.mark.parametrize("written", ["objects", "text", "list", "text in a table"])
def test_nulls_of_calls_and_schemas_are_kept(tmp_path: Path, written: str) -> None:
    """Story: a call `{"a": null}` was trained as `{}`, and a schema lost `"default": null`, also in JSON text."""
    is_text = "text" in written
    arguments, tools = (json.dumps(NULLS), json.dumps([NULL_TOOL])) if is_text else (NULLS, [NULL_TOOL])
    call = {"function": {"name": "add", "arguments": arguments}}
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}], "tools": tools}
    tokenizer = byte_tokenizer(template=ALL_OF_TOOLS)
    path = tmp_path / ("x.parquet" if written == "text in a table" else "x.json" if written == "list" else "x.jsonl")
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps([row] if written == "list" else row))
    dataset = build_dataset(DataSettings((DatasetSpec(str(path)),), 1000), tokenizer)
    assert marked(tokenizer, dataset.rows[0]) == (
        'function:{"name": "add", "parameters": {"type": "object", "default": null}}\n<s>user\nHi</s>\n<s>assistant\n'
        '[[add{"a": null, "of": [null, {"b": null}]}</s>]]\n'
    )


def test_nulls_that_a_table_added_are_left_out(tmp_path: Path) -> None:
    """A struct has the keys of all rows in each; lists and JSON text have what was written."""
    rows = [
        {"calls": [{"name": "add", "arguments": {"a": 1}}], "list": [None, 1], "none": None, "text": '{"a": null}'},
        {"calls": [{"name": "tell", "arguments": {"to": {"all": True}}}], "list": [], "none": {"x": 1}, "text": ""},
        {"calls": [{"name": "stop", "arguments": {}}], "list": None, "none": {"x": None}, "text": None},
    ]
    expected = [*rows[:2], {**rows[2], "none": {}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert [row.columns for row in read_file(tmp_path / "x.parquet")] == expected
    table = Dataset.from_list(rows)
    assert [row.columns for row in Source("hub", None, DatasetSpec("me/rows"), True, _table=table).rows()] == expected
    image = {"image": {"bytes": None, "path": "a.png"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([image]), tmp_path / "image.parquet")
    assert next(read_file(tmp_path / "image.parquet")).columns == image


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this `datasets` stores no objects as JSON")
def test_nulls_of_objects_that_datasets_stores_as_json_are_kept() -> None:
    features = datasets.Features({"call": datasets.Json(), "calls": datasets.List(datasets.Json())})
    row = {"call": NULLS, "calls": [NULLS, {"b": 1}]}
    table = Dataset.from_list([row], features=features)
    assert next(Source("hub", None, DatasetSpec("me/rows"), True, _table=table).rows()).columns == row


ALPACA = {"instruction": "Add.", "input": "1 1", "output": "2"}
ALPACA_TEXT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 1\n\n### Response:\n"
)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, "<s>user\nAdd.\n\n1 1</s>\n<s>assistant\n[[2</s>]]\n"),
        ({"alpaca_join": "newline"}, "<s>user\nAdd.\n1 1</s>\n<s>assistant\n[[2</s>]]\n"),
        ({"as_chat": False}, ALPACA_TEXT + "[[2</s>]]"),
        ({"as_chat": False, "train_on_eos": "none"}, ALPACA_TEXT + "[[2]]</s>"),
    ],
)
def test_alpaca_rows_are_joined_as_the_tool_joins_them(tmp_path: Path, spec: dict[str, Any], expected: str) -> None:
    assert read(tmp_path / "x.jsonl", [ALPACA], **spec)[1] == expected


def test_plain_prompts_stay_plain_where_asked(tmp_path: Path) -> None:
    """As in TRL. Rows of messages in the same file are chats all the same."""
    chat = {"prompt": CHAT["messages"][1:2], "completion": [{"role": "assistant", "content": "a"}]}
    dataset, shown = read(tmp_path / "x.jsonl", [{"prompt": "A", "completion": "b"}, chat], as_chat=False)
    assert shown == "A[[b</s>]]" and any("as_chat: false" in notice for notice in dataset.notices)
    assert marked(byte_tokenizer(), dataset.rows[1]) == "<s>user\nA?</s>\n<s>assistant\n[[a</s>]]\n"
    with pytest.raises(RefusedError, match="more than a prompt and an answer"):
        read(tmp_path / "y.jsonl", [{"prompt": "A", "completion": "b", "system": "C"}], as_chat=False)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("paragraph", [(1, "a\nb"), (4, "---"), (6, "c --- d"), (8, "e")]),
        ("line", [(1, "a"), (2, "b"), (4, "---"), (6, "c --- d"), (8, "e")]),
        ("file", [(1, "a\nb\n\n---\n\nc --- d\n\ne")]),
        ("---", [(1, "a\nb"), (6, "c "), (6, " d\n\ne")]),
        ("---\n", [(1, "a\nb"), (6, "c --- d\n\ne")]),
        ("\n\n---\n\n", [(1, "a\nb"), (6, "c --- d\n\ne")]),
        ("<|end|>", [(1, "a\nb\n\n---\n\nc --- d\n\ne")]),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_rows_of_a_text_file(tmp_path: Path, kind: str, expected: list[tuple[int, str]], mark: str) -> None:
    path = tmp_path / "x.txt"
    path.write_text(mark + "a\nb\n\n---\n\nc --- d\n\ne\n", encoding="utf-8")
    assert [(row.number, row.columns["text"]) for row in read_file(path, DatasetSpec("", txt_rows=kind))] == expected


def test_rows_of_a_text_file_that_are_broken_or_blank(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"a\xff\n---\n---\nb\r\nc\n")
    first, second = read_file(path, DatasetSpec("", txt_rows="---"))
    assert first.fault is not None and first.fault.what == "the text between separators is not valid UTF-8"
    assert (second.number, second.columns["text"]) == (4, "b\nc")
    path.write_bytes(b"")
    assert list(read_file(path, DatasetSpec("", txt_rows="file"))) == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("train_on_inputs: true\n", ["roles_to_train", "turns_to_train", "train_on_eos", "thoughts"]),
        ("objective: dpo\n", ["roles_to_train", "turns_to_train"]),
    ],
)
def test_rules_that_would_change_nothing_are_refused(lines: str, expected: list[str]) -> None:
    rules = "roles_to_train: [user], turns_to_train: last, train_on_eos: none, thoughts: mask"
    with pytest.raises(RecipeError) as caught:
        load_text(f"model: a/b\ndatasets: [{{path: x.jsonl, {rules}}}]\n{lines}", "mine.yaml")
    where = [str(problem.where).rpartition(" ")[2] for problem in caught.value.problems]
    assert where == [f"datasets[0].{key}" for key in expected]
