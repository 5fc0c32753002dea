"""What of a conversation is trained: roles, turns, ends of turns, thoughts; how plain prompts and texts are read.

Expected texts are written by hand, trained parts between [[ and ]].
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pytest
from datasets import Dataset

from roundpipe_cli.data import files
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.files import read_file
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.sources import Source
from roundpipe_cli.data.tokenized import TokenizedDataset
from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.recipe.load import load_text
from tests.data.test_data_dataset import CHATML, byte_tokenizer, write_rows

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
    tokenizer = byte_tokenizer(template=template)
    settings = DataSettings((DatasetSpec(str(path), **spec),), 1000)
    dataset = build_dataset(settings, tokenizer)
    return dataset, marked(tokenizer, dataset.rows[0])


def marked(tokenizer: Any, row: Any) -> str:
    pieces: list[tuple[bool, list[int]]] = []
    for token, label in zip(row.input_ids, row.labels, strict=True):
        if not pieces or pieces[-1][0] != (label >= 0):
            pieces.append((label >= 0, []))
        pieces[-1][1].append(int(token))
    return "".join(f"[[{tokenizer.decode(ids)}]]" if trained else tokenizer.decode(ids) for trained, ids in pieces)


CALLS = (
    "{%- for t in tools or [] %}{{- t.type + ':' + t.function.name + '\\n' }}{%- endfor %}"
    "{%- for m in messages %}{{- '<s>' + m.role + '\\n' + m.content }}{%- for c in m.tool_calls or [] %}"
    "{{- c.function.name + c.function.arguments | tojson }}{%- endfor %}{{- '</s>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}"
)


TEMPLATES = {"chatml": CHATML, "marked": MARKED, "thoughts": THOUGHTS_BESIDE, "calls": CALLS}
CASES = json.loads((Path(__file__).parents[1] / "golden_data" / "rules.json").read_text(encoding="utf-8"))
"""Rows, how they are read (`spec`: rules, `as_chat`, `alpaca_join`), and the text of the first one with what is trained
of it, or why it is refused."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["story"][:60])
def test_what_is_trained_of_a_row(tmp_path: Path, case: dict[str, Any]) -> None:
    spec = {key: tuple(value) if isinstance(value, list) else value for key, value in case.get("spec", {}).items()}
    with pytest.raises(RefusedError, match=case["refused"]) if "refused" in case else nullcontext():
        shown = read(tmp_path / "x.jsonl", case["rows"], template=TEMPLATES[case["template"]], **spec)[1]
        assert "refused" in case or shown == case["shown"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_arguments_and_tools_with_a_number_that_json_lacks_are_bad_rows(tmp_path: Path, number: str) -> None:
    """Story: Python reads and writes `NaN`, so the model learnt a call that no other program can read."""
    rows, user = list[str](), '{"role": "user", "content": "x"}'
    for arguments in (f'{{"a": [{number}]}}', json.dumps(f'{{"a": {number}}}')):
        call = f'{{"role": "assistant", "content": "", "tool_calls": [{{"name": "add", "arguments": {arguments}}}]}}'
        rows.append(f'{{"messages": [{user}, {call}]}}')
    tools = f'[{{"name": "add", "parameters": {{"minimum": {number}}}}}]'
    rows.append(f'{{"messages": [{user}, {{"role": "assistant", "content": "y"}}], "tools": {tools}}}')
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    with pytest.raises(RefusedError) as caught:
        build_dataset(DataSettings((DatasetSpec(str(tmp_path / "x.jsonl")),), 1000), byte_tokenizer(template=CALLS))
    assert len(caught.value.problems) == 4 and str(caught.value).count("JSON has no such number") == 3


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
    dataset = build_dataset(DataSettings((DatasetSpec(str(write_rows(path, [row]))),), 1000), tokenizer)
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
    assert [row.columns for row in read_file(write_rows(tmp_path / "x.parquet", rows))] == expected
    table = Dataset.from_list(rows)
    assert [row.columns for row in Source("hub", None, DatasetSpec("me/rows"), True, _table=table).rows()] == expected
    image = {"image": {"bytes": None, "path": "a.png"}}
    assert next(read_file(write_rows(tmp_path / "image.parquet", [image]))).columns == image


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="this `datasets` stores no objects as JSON")
def test_nulls_of_objects_that_datasets_stores_as_json_are_kept() -> None:
    features = datasets.Features({"call": datasets.Json(), "calls": datasets.List(datasets.Json())})
    row = {"call": NULLS, "calls": [NULLS, {"b": 1}]}
    table = Dataset.from_list([row], features=features)
    assert next(Source("hub", None, DatasetSpec("me/rows"), True, _table=table).rows()).columns == row


def test_plain_prompts_stay_plain_where_asked(tmp_path: Path) -> None:
    """As in TRL. Rows of messages in the same file are chats all the same."""
    chat = {"prompt": [{"role": "user", "content": "A?"}], "completion": [{"role": "assistant", "content": "a"}]}
    dataset, shown = read(tmp_path / "x.jsonl", [{"prompt": "A", "completion": "b"}, chat], as_chat=False)
    assert shown == "A[[b</s>]]" and any("as_chat: false" in notice for notice in dataset.notices)
    assert marked(byte_tokenizer(), dataset.rows[1]) == "<s>user\nA?</s>\n<s>assistant\n[[a</s>]]\n"
    with pytest.raises(RefusedError, match="more than a prompt and an answer"):
        read(tmp_path / "y.jsonl", [{"prompt": "A", "completion": "b", "system": "C"}], as_chat=False)


TEXT = "a\nb\n\n---\n\nc --- d\n\ne\n"


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_rows_of_a_text_file(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, behind = tmp_path / "x.txt", [(4, "---"), (6, "c --- d"), (8, "e")]
    path.write_text(mark + TEXT, encoding="utf-8")
    for kind, expected in {
        **{"paragraph": [(1, "a\nb"), *behind], "line": [(1, "a"), (2, "b"), *behind]},
        **dict.fromkeys(("file", "<|end|>"), [(1, TEXT[:-1])]),
        "---": [(1, "a\nb"), (6, "c "), (6, " d\n\ne")],
        **dict.fromkeys(("---\n", "\n\n---\n\n"), [(1, "a\nb"), (6, "c --- d\n\ne")]),
    }.items():
        longest = max(len(text) for _, text in expected)
        monkeypatch.setattr(files, "MAX_LINE_BYTES", longest + 4)  # of a row, however long the file is
        rows = read_file(path, DatasetSpec("", txt_rows=kind))
        assert [(row.number, row.columns["text"]) for row in rows] == expected, kind


def test_rows_of_a_text_file_that_are_broken_or_blank(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"a\xff\n---\n---\nb\r\nc\n")
    first, second = read_file(path, DatasetSpec("", txt_rows="---"))
    assert first.fault is not None and first.fault.what == "the text between separators is not valid UTF-8"
    assert (second.number, second.columns["text"]) == (4, "b\nc")
    path.write_bytes(b"")
    assert list(read_file(path, DatasetSpec("", txt_rows="file"))) == []


def test_rules_that_would_change_nothing_are_refused() -> None:
    rules = "roles_to_train: [user], turns_to_train: last, train_on_eos: none, thoughts: mask"
    kept = {"train_on_inputs: true": 4, "objective: dpo": 2}
    for line, count in kept.items():
        with pytest.raises(RecipeError) as caught:
            load_text(f"model: a/b\ndatasets: [{{path: x.jsonl, {rules}}}]\n{line}\n", "mine.yaml")
        where = [str(problem.where).rpartition("datasets[0].")[2] for problem in caught.value.problems]
        assert where == ["roles_to_train", "turns_to_train", "train_on_eos", "thoughts"][:count]
