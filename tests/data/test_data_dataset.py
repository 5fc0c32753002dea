"""From files to labels: types, layouts without a template, long rows, bad rows, empty datasets, templates missing."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from roundpipe_cli.cli.init_rows import look_at_rows
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.sources import count_dataset
from roundpipe_cli.data.tokenized import TokenizedDataset, hold_out, same_rows
from roundpipe_cli.errors import RefusedError

CHATML = (
    "{%- for m in messages %}{{- '<s>' + m.role + '\n' + m.content + '</s>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<s>assistant\n' }}{%- endif %}"
)


def byte_tokenizer(*, template: str | None = CHATML, eos: bool = True, bos: bool = False, trim: bool = False) -> Any:
    """One token a byte; `<s>` and `</s>` are special. `trim` trims offsets as GPT-2's tokenizer does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | {"ĠĠ": 256}, merges=[("Ġ", "Ġ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "</s>")])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    elif trim:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>" if eos else None)
    made.chat_template = template
    return made


class WithoutOffsets:
    """A tokenizer that cannot tell offsets, with the tokens of another one."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._tokenizer(text, **options)


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """The rows in a file of the kind that its name says."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows))
    return path


def build(path: Path, tokenizer: Any | None = None, **options: Any) -> TokenizedDataset:
    spec_names = ("type", "split", "columns")
    spec = DatasetSpec(str(path), **{name: options.pop(name) for name in spec_names if name in options})
    options = {"max_seq_length": 1000, **options}
    return build_dataset(DataSettings((spec,), **options), tokenizer or byte_tokenizer())


def trained_text(tokenizer: Any, dataset: TokenizedDataset, index: int = 0) -> tuple[str, str]:
    """(whole text, trained text) of a row."""
    row = dataset.rows[index]
    return tokenizer.decode(row.input_ids), tokenizer.decode(row.labels[row.labels != -100])


CHAT_TEXT = "<s>user\nHi</s>\n<s>assistant\nYo</s>\n"
GOOD_CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
DECIDED: list[tuple[dict[str, object], str, dict[str, str]]] = [
    (GOOD_CHAT, "chat", {}),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}, "sharegpt", {}),
    ({"instruction": "Hi", "input": "", "output": "Yo"}, "alpaca", {}),
    ({"instruction": "Hi", "output": "Yo"}, "alpaca", {}),
    ({"instruction": "Hi", "input": None, "output": "Yo"}, "alpaca", {}),
    ({"prompt": "Hi", "completion": "Yo"}, "prompt_completion", {}),
    ({"question": "Hi", "answer": "Yo", "text": "no"}, "prompt_completion", {}),
    ({"prompt": "Hi", "response": "Yo"}, "prompt_completion", {}),
    ({"q": "Hi", "a": "Yo"}, "prompt_completion", {"prompt": "q", "completion": "a"}),
    ({"talk": GOOD_CHAT["messages"]}, "chat", {"messages": "talk"}),
]
"""A row, the type of its file, and the recipe's columns."""


def test_auto_decides_by_columns_and_says_so(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    paths = [write_rows(tmp_path / f"{number}.jsonl", [row]) for number, (row, _, _) in enumerate(DECIDED)]
    specs = [DatasetSpec(str(path), columns=one[2]) for path, one in zip(paths, DECIDED, strict=True)]
    dataset = build_dataset(DataSettings(tuple(specs), 1000), tokenizer)  # a process for each would take longer
    for number, (path, (row, decided, _)) in enumerate(zip(paths, DECIDED, strict=True)):
        assert trained_text(tokenizer, dataset, number) == (CHAT_TEXT, "Yo</s>")
        assert dataset.report.sources[number].type == decided
        said = [text.split(": ", 1)[1] for text in dataset.notices if text.startswith(f"{path}: ")]
        assert f"read as type {decided}" in said[0]
        assert said[1:] == (["columns that are not used: text"] if "text" in row else [])
    assert dataset.chat_template == CHATML


def test_a_named_type_needs_no_notice_and_is_believed(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "Hi", "completion": "Yo", "text": "A b"}])
    dataset = build(path, tokenizer, type="text")
    assert trained_text(tokenizer, dataset) == ("A b</s>", "A b</s>")
    assert dataset.notices == (f"{path}: columns that are not used: prompt, completion",)
    assert dataset.report.trained_tokens == 3  # the first token has nothing before it


@pytest.mark.parametrize(("trim", "bos"), [(False, True), (True, False)])
def test_plain_layout_without_a_template(tmp_path: Path, trim: bool, bos: bool) -> None:
    tokenizer = byte_tokenizer(template=None, bos=bos, trim=trim)
    head = "<s>" if bos else ""
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "Q:  ", "completion": "  é  b\n"}])
    dataset = build(path, tokenizer)
    assert trained_text(tokenizer, dataset) == (head + "Q:    é  b\n</s>", "  é  b\n</s>")
    assert any("no chat template" in notice for notice in dataset.notices)
    everything = build(path, tokenizer, train_on_inputs=True)
    assert trained_text(tokenizer, everything)[1] == "Q:    é  b\n</s>"


def test_sentencepiece_style_tokens_with_bytes_for_the_unknown(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abQ:é.", "▁a"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    rows = [("Q: ", "🤖 a"), ("Q: b", " a🤖."), ("Q:🤖", "é日"), ("Q:", " a")]
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": prompt, "completion": answer} for prompt, answer in rows])
    dataset = build(path, tokenizer)
    for index, (prompt, answer) in enumerate(rows):
        assert trained_text(tokenizer, dataset, index) == (f"<s> {prompt}{answer}</s>", f"{answer}</s>")


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_a_text_with_bos_and_eos_of_its_own_has_no_second_ones(tmp_path: Path, bos: bool, is_fast: bool) -> None:
    """Story: a text that began with BOS got another, and one that ended in EOS and a line break got a second EOS."""
    tokenizer = byte_tokenizer(bos=bos)
    if not is_fast:
        tokenizer = WithoutOffsets(tokenizer)
    texts = {
        **{"Hi": "Hi</s>", "<s>Hi": "<s>Hi</s>", "Hi</s>": "Hi</s>", "Hi</s>\n": "Hi</s>"},
        **{"<s>Hi</s> \n\n": "<s>Hi</s>", "<s>Hi </s>\n<s>Yo": "<s>Hi </s>\n<s>Yo</s>"},
        **{"<s><s>Hi</s></s>": "<s><s>Hi</s></s>", "Hi </s> Yo\n": "Hi </s> Yo\n</s>"},
    }
    if bos:
        texts |= {"\n " + text: expected for text, expected in texts.items() if text.startswith("<s>")}
    dataset = build(write_rows(tmp_path / "x.jsonl", [{"text": text} for text in texts]), tokenizer)
    assert len(dataset.rows) == len(texts)
    for row, expected in zip(dataset.rows, texts.values(), strict=True):
        head = "<s>" if bos and not expected.startswith("<s>") else ""
        assert tokenizer.decode(row.input_ids) == head + expected
        assert row.labels[1:].tolist() == row.input_ids[1:].tolist()


def test_slow_and_fast_tokenizers_agree(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    rows = [{"prompt": f"Hi {index}", "completion": f"Yo é {index}"} for index in range(5)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    assert build(path, WithoutOffsets(tokenizer)).content_hash == build(path, tokenizer).content_hash


@pytest.mark.parametrize(
    ("num_tokens", "policy", "kept"),
    [(10, "error", 10), (11, "error", None), (10, "drop", 10), (11, "drop", 0), (11, "truncate", 10)],
)
def test_long_rows(tmp_path: Path, num_tokens: int, policy: str, kept: int | None) -> None:
    rows = [{"text": "short"}, {"text": "x" * (num_tokens - 1)}]  # and EOS
    path = write_rows(tmp_path / "x.jsonl", rows)
    options: dict[str, Any] = {"type": "text", "max_seq_length": 10, "long_rows": policy}
    if kept is None:
        with pytest.raises(RefusedError) as caught:
            build(path, **options)
        problem = caught.value.problems[0]
        assert "1 of 2 rows are longer than 10 tokens" in problem.what and (problem.where or "").endswith("x.jsonl:2")
        assert "max_seq_length=11" in (problem.hint or "")
        return
    dataset = build(path, **options)
    assert dataset.rows.lengths.tolist() == [6, kept][: 2 if kept else 1]
    is_long = num_tokens > 10
    assert dataset.report.sources[0].too_long_rows == ([2] if is_long else [])
    assert dataset.report.rows_truncated == int(is_long and policy == "truncate")
    assert dataset.report.sources[0].longest_row_tokens == num_tokens
    assert [notice for notice in dataset.notices if "x.jsonl:2" in notice] == list(dataset.notices)
    assert len(dataset.notices) == int(is_long)
    lost = {"drop": num_tokens, "truncate": num_tokens - 10}.get(policy, 0) if is_long else 0
    assert dataset.report.lost_tokens == lost


@pytest.mark.parametrize("num_tokens", [10, 11, 57])
def test_split_texts_lose_nothing(tmp_path: Path, num_tokens: int) -> None:
    """Sequences without what they repeat are the text again; every token is trained once, but a sequence's first."""
    text = "".join(chr(ord("a") + index % 26) for index in range(num_tokens - 1))  # and EOS
    path = write_rows(tmp_path / "x.jsonl", [{"text": "short"}, {"text": text}, {"text": "also"}])
    options: dict[str, Any] = {"type": "text", "max_seq_length": 10}
    whole = build(path, **{**options, "max_seq_length": 1000})
    for overlap in (0, 4):
        dataset = build(path, **options, long_rows="split", long_rows_overlap=overlap)
        assert dataset.rows.lengths.max() <= 10 and dataset.report.lost_tokens == 0
        pieces = [row for row in dataset.rows if row.row_id == 1]
        new = [row.input_ids[row.labels != -100] for row in pieces]
        assert np.concatenate(new).tolist() == whole.rows[1].input_ids.tolist()
        assert all((row.labels[:overlap] == -100).all() for row in pieces[1:])
        trained = sum(int((row.labels[1:] != -100).sum()) for row in pieces)
        firsts = len(pieces) - (num_tokens % 10 == 1)  # a last token alone has one before it
        assert trained == num_tokens - (firsts if overlap == 0 else 1)
        assert [row.row_id for row in dataset.rows] == [0, *[1] * len(pieces), 2]
        assert dataset.report.rows_kept == 2 + len(pieces) and dataset.report.rows_read == 3
        assert dataset.where(1).endswith("x.jsonl:2") and dataset.where(2).endswith("x.jsonl:3")
        assert any("1 of 3 rows split into sequences" in notice for notice in dataset.notices) == (num_tokens > 10)


def test_sequences_of_one_text_are_held_out_together(tmp_path: Path) -> None:
    rows = [{"text": "x" * (5 + 7 * number)} for number in range(8)]
    dataset = build(write_rows(tmp_path / "x.jsonl", rows), type="text", max_seq_length=10, long_rows="split")
    kept, held = hold_out(dataset, 0.5, seed=3)
    assert len(set(held.rows.row_ids.tolist())) == 4 and len(kept.rows) + len(held.rows) == len(dataset.rows)
    assert not set(kept.rows.row_ids.tolist()) & set(held.rows.row_ids.tolist())


THINKING = (
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '(brief)' }}{% endif %}"
    "{% for m in messages %}{{ '<s>' + m.role + '\\n' + m.content + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)


def test_variables_of_the_template(tmp_path: Path) -> None:
    """They hold for the rows and for the template that is saved; whoever renders that may give others."""
    path, tokenizer = write_rows(tmp_path / "x.jsonl", [GOOD_CHAT]), byte_tokenizer(template=THINKING)
    plain = build(path, tokenizer)
    brief = build(path, tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert trained_text(tokenizer, plain) == (CHAT_TEXT, "Yo</s>")
    assert trained_text(tokenizer, brief) == ("(brief)" + CHAT_TEXT, "Yo</s>")
    assert plain.chat_template == THINKING and brief.chat_template is not None

    for variables, expected in (({}, "(brief)" + CHAT_TEXT), ({"enable_thinking": True}, CHAT_TEXT)):
        more: Any = {"chat_template": brief.chat_template, "tokenize": False, **variables}
        assert tokenizer.apply_chat_template(GOOD_CHAT["messages"], **more) == expected


def test_variables_arrive_as_they_were_written(tmp_path: Path) -> None:
    values: dict[str, Any] = dict(zip("abcde", (True, False, 3, -2.5, 'a "quoted" \\ {{ word }} é\n'), strict=True))
    shown = "".join(f"|{{{{ {name} }}}}|{{{{ {name} is string }}}}" for name in values)
    tokenizer = byte_tokenizer(template="{{ messages[0].content }}" + shown + "{{ messages[1].content }}")
    path = write_rows(tmp_path / "x.jsonl", [GOOD_CHAT])
    text, _ = trained_text(tokenizer, build(path, tokenizer, chat_template_kwargs=values))
    assert text == "Hi" + "".join(f"|{value}|{isinstance(value, str)}" for value in values.values()) + "Yo"


@pytest.mark.parametrize(
    ("template", "options", "what"),
    [
        (THINKING, {"chat_template_kwargs": {"enable_thoughts": 1}}, "does not read enable_thoughts"),
        ({"default": THINKING, "tool_use": CHATML}, {"chat_template_kwargs": {"think": 1}}, "does not read think"),
        (THINKING, {"chat_template_kwargs": {"messages": 1}}, "is always given messages"),
        (None, {"chat_template_kwargs": {"enable_thinking": 1}}, "no chat template to give variables to"),
        (CHATML, {"long_rows": "split"}, "only rows of type text can be split"),
    ],
)
def test_rules_that_a_conversation_cannot_have(tmp_path: Path, template: Any, options: Any, what: str) -> None:
    path = write_rows(tmp_path / "x.jsonl", [GOOD_CHAT])
    with pytest.raises(RefusedError, match=what):
        build(path, byte_tokenizer(template=template), **options)


def test_answer_beyond_the_cut_is_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "Hi", "completion": "Yo"}] * 3 + [{"prompt": "x" * 500, "completion": "Yo"}]
    dataset = build(write_rows(tmp_path / "x.jsonl", rows), max_seq_length=100)
    assert [row.row_id for row in dataset.rows] == [0, 1, 2]
    assert dataset.report.sources[0].untrained_rows == [4]
    assert dataset.report.filter_counts() == "4 rows read, 0 bad, 1 cut, 1 without a trained token, 3 kept"
    assert any(notice.startswith("warning: 1 of 4 rows dropped") for notice in dataset.notices)


MESSAGES_BAD: list[tuple[object, str]] = [
    ({}, "`messages` is missing"),
    ({"messages": None}, "`messages` is not a list"),
    ({"messages": "hi"}, "`messages` is not a list"),
    ({"messages": []}, "`messages` is empty"),
    ({"messages": ["hi"]}, "`messages[0]` is not a message"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "`messages[0].role` is unknown"),
    ({"messages": [{"content": "x"}]}, "`messages[0].role` is unknown"),
    ({"messages": [{"role": "user", "content": None}]}, "`messages[0].content` is not text"),
    ({"messages": [{"role": "user", "content": 3}]}, "`messages[0].content` is not text"),
    ({"messages": [{"role": "user", "content": "a\0b"}]}, "`messages[0].content` holds a NUL character"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "`messages[0].content` is not valid Unicode text"),
    ({"messages": [{"role": "user", "content": "only me"}]}, "`messages` has nothing to train on"),
    ({"messages": [{"role": "assistant", "content": ""}]}, "`messages` has nothing to train on"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
     "`messages[0].tool_calls` is not a list of objects"),
    ([1], "the row is not an object"),
]  # fmt: skip


@pytest.mark.parametrize("first", [0, len(MESSAGES_BAD) - 1])
def test_bad_rows_are_named_by_line_field_and_expectation(tmp_path: Path, first: int) -> None:
    """Those that tell no type also in front of the row that tells it."""
    bad = [MESSAGES_BAD[first], *MESSAGES_BAD[:first], *MESSAGES_BAD[first + 1 :]]
    rows = [bad[0][0], GOOD_CHAT, *(row for row, _ in bad[1:]), GOOD_CHAT]
    lines = [1, *range(3, len(rows))]
    path = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(RefusedError) as caught:
        build(path)
    head, *problems = caught.value.problems
    assert caught.value.exit_code == 2 and head.what == f"{len(bad)} of {len(rows)} rows cannot be used; the first 10:"
    assert [(problem.where, problem.what) for problem in problems] == [
        (f"{path}:{line}", what) for line, (_, what) in zip(lines[:10], bad[:10], strict=True)
    ]
    assert "on_bad_row=skip" in (problems[-1].hint or "")
    dataset = build(path, on_bad_row="skip")
    assert [row.row_id for row in dataset.rows] == [1, len(rows) - 1]
    assert any(f"x.jsonl:1 ({bad[0][1]})" in notice for notice in dataset.notices)
    found = [(number, fault.what) for number, fault in dataset.report.sources[0].bad_rows]
    assert found == [(line, what) for line, (_, what) in zip(lines, bad, strict=True)]


def refused_rows(path: Path, rows: Sequence[object], **options: Any) -> list[str]:
    """What is said of each of some bad rows, of which one file is made."""
    with pytest.raises(RefusedError) as caught:
        build(write_rows(path, rows), **options)
    return [problem.what for problem in caught.value.problems[1:]]


def test_row_text_never_reaches_the_message(tmp_path: Path) -> None:
    secret = "SECRET" * 1000
    rows = [{"messages": [{"role": "\x1b]0;evil\x07" + secret, "content": secret}]}, {"messages": secret}]
    rows += [{"messages": [{"role": "user", "content": secret + "\0"}]}]
    with pytest.raises(RefusedError) as caught:
        build(write_rows(tmp_path / "x.jsonl", rows), type="chat")
    message = str(caught.value)
    assert "\x1b" not in message and "\x07" not in message
    assert message.count("SECRET") < 40 and max(map(len, message.splitlines())) < 400


def test_a_field_that_no_type_has_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"foo": "a", "bar": "b"}])
    with pytest.raises(RefusedError) as caught:
        build(path, columns={"promt": "foo"})
    assert caught.value.problems[0].hint == "did you mean `prompt`?"


def table(*rows: str) -> bytes:
    """A parquet file."""
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(rows, pyarrow.string())}), written)
    return written.getvalue()


JSON_ROW, CSV_ROW = b'{"text": "one"}\n', b"text\none\n"
EMPTY = [
    *((".jsonl", JSON_ROW, empty) for empty in (b"", b"\n \n", b"\xef\xbb\xbf")),
    *((".jsonl.gz", gzip.compress(JSON_ROW, mtime=0), empty) for empty in (b"", gzip.compress(b"", mtime=0))),
    *((".json", b'[{"text": "one"}]', empty) for empty in (b"[]", b" [ ] ", b"")),
    *((".csv", CSV_ROW, empty) for empty in (b"text\n", b"text", b"")),
    (".csv.gz", gzip.compress(CSV_ROW, mtime=0), gzip.compress(b"text\n", mtime=0)),
    (".tsv", b"id\ttext\n1\tone\n", b"id\ttext\n"),
    *((".txt", b"one\n", empty) for empty in (b"", b"\n\n")),
    *((".parquet", table("one"), empty) for empty in (table(), b"")),
]
"""Ending of a file, one with a row, and one without."""


@pytest.mark.parametrize(("ending", "row", "empty"), EMPTY)
def test_a_file_without_rows_is_left_out_and_counted(tmp_path: Path, ending: str, row: bytes, empty: bytes) -> None:
    """Story: one empty file among many refused the whole data set. `plan` and `init` agree with `data`."""
    for name, content in (("a", empty), ("b", row), ("c", empty), ("d", row)):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"{name}{ending}").write_bytes(content)
    folder, pattern = tmp_path / "set", tmp_path / "set" / f"*{ending}"
    left_out = f"2 of 4 files have no rows: {folder}/a{ending}, {folder}/c{ending}"
    for path, split, kept in ((folder, "train", 2), (pattern, "train", 2), (pattern, "train[-1:]", 1)):
        dataset = build(path, split=split)
        assert len(dataset.rows) == kept and dataset.rows_by_spec == (kept,)
        assert [source.name for source in dataset.sources] == [f"{folder}/{name}{ending}" for name in "bd"[2 - kept :]]
        assert left_out in dataset.notices or "2 of 3 files have no rows" in str(dataset.notices)
        assert dataset.where(dataset.rows[-1].row_id).startswith(f"{folder}/d{ending}")
        count = count_dataset(DatasetSpec(str(path), split=split), None)
        assert count is not None and (count.num_rows, count.is_exact) == (kept, True)
        assert bool(count.num_bytes) == (ending != ".parquet"), "the tokens of the others can be estimated"
    assert look_at_rows(str(folder), tmp_path).example == "answer"
    for name in "bd":
        (folder / f"{name}{ending}").unlink()
    for path, told in ((folder, "of 2 files"), (folder / f"a{ending}", "")):
        for refuse in (lambda path=path: build(path), lambda path=path: look_at_rows(str(path), tmp_path)):
            with pytest.raises(RefusedError, match="the dataset is empty") as caught:
                refuse()
            assert caught.value.exit_code == 2 and told in str(caught.value)
        count = count_dataset(DatasetSpec(str(path)), None)
        assert count is not None and count.num_rows == 0


def test_rows_that_are_named_twice_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: a file listed twice, or in a pattern and beside it, weighed twice as much, and nobody knew."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", [{"text": str(number)} for number in range(10)])
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    write_rows(tmp_path / "b.jsonl", [{"text": "other"}] * 10)

    def twice(*entries: tuple[str, str]) -> list[str]:
        specs = tuple(DatasetSpec(path, split=split) for path, split in entries)
        notices = build_dataset(DataSettings(specs, 1000), byte_tokenizer()).notices
        return [text for text in notices if text.endswith("trained twice")]

    said = "10 rows of {} are also in {}: trained twice"
    for other in ("a.jsonl", str(tmp_path / "a.jsonl")):
        assert twice(("a.jsonl", "train"), (other, "train")) == [said.format("a.jsonl", "a.jsonl")]
    for other in ("copy.jsonl", "link.jsonl"):
        assert twice(("a.jsonl", "train"), (other, "train")) == [said.format(other, "a.jsonl")]
    assert twice(("*.jsonl", "train")) == [said.format(name, "a.jsonl") for name in ("copy.jsonl", "link.jsonl")]
    assert twice(("a.jsonl", "train[:60%]"), ("a.jsonl", "train[50%:]")) == [
        "1 row of a.jsonl is also in a.jsonl: trained twice"
    ]
    assert twice(("a.jsonl", "train[:50%]"), ("a.jsonl", "train[50%:]"), ("b.jsonl", "train")) == []
    trained, held = build(tmp_path / "a.jsonl"), build(tmp_path / "copy.jsonl", split="train[8:]")
    assert list(same_rows(held.numbered_sources, trained.numbered_sources)) == [
        "2 rows of copy.jsonl are also in a.jsonl"
    ]
    assert list(same_rows(build(tmp_path / "b.jsonl").numbered_sources, trained.numbered_sources)) == []


def test_all_rows_filtered_is_refused_with_counts(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"text": "x" * 50}, {"text": 3}, {"text": "x" * 60}])
    with pytest.raises(RefusedError) as caught:
        build(path, max_seq_length=10, long_rows="drop", on_bad_row="skip")
    problem = caught.value.problems[0]
    assert problem.found == "3 rows read, 1 bad, 2 too long, 0 without a trained token, 0 kept"
    assert problem.hint == "the longest row has 61 tokens: max_seq_length=61"
    with pytest.raises(RefusedError, match="no row is left"):
        build(write_rows(tmp_path / "y.jsonl", [3, 4]), on_bad_row="skip")
    empty = write_rows(tmp_path / "empty.jsonl", [])
    with pytest.raises(RefusedError, match=r"empty.jsonl: the dataset is empty"):  # each entry has a weight
        build_dataset(DataSettings((DatasetSpec(str(path)), DatasetSpec(str(empty))), 1000), byte_tokenizer())


def test_chat_without_a_template_names_the_line_to_add(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [GOOD_CHAT])
    with pytest.raises(RefusedError, match="needs a chat template") as caught:
        build(path, byte_tokenizer(template=None, eos=False))
    assert "`chat_template: path/to/template.jinja`" in (caught.value.problems[0].hint or "")
    (tmp_path / "t.jinja").write_text(CHATML)
    tokenizer = byte_tokenizer(template=None)
    dataset = build(path, tokenizer, chat_template="t.jinja", folder=tmp_path)
    assert trained_text(tokenizer, dataset) == (CHAT_TEXT, "Yo</s>")
    assert dataset.chat_template == CHATML and tokenizer.chat_template is None
    assert build(path, tokenizer, chat_template=CHATML).content_hash == dataset.content_hash
    with pytest.raises(RefusedError, match="chat template not found"):
        build(path, chat_template="missing.jinja", folder=tmp_path)


def test_text_needs_an_end_of_sequence_token(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"text": "hello"}])
    for template in (None, CHATML):
        with pytest.raises(RefusedError, match="no end-of-sequence token") as caught:
            build(path, byte_tokenizer(template=template, eos=False))
        assert '"eos_token": "</s>"' in (caught.value.problems[0].hint or "")


def test_text_that_spells_special_tokens_or_placeholders_is_noticed(tmp_path: Path) -> None:
    """Story: without a column of images the model learnt the letters `<image>`, and nobody knew."""
    prompts = ("An <img> tag", "Hi</s>\n<s>assistant\nYes", "<image>What is it?")
    dataset = build(write_rows(tmp_path / "x.jsonl", [{"prompt": prompt, "completion": "Yo"} for prompt in prompts]))
    (source,) = dataset.report.sources
    assert (source.control_token_rows, source.placeholder_rows, source.rows_kept) == ([2], [3], 3)
    for words in ("spell special tokens in their text, which the tokenizer takes for real ones", "have `<image>`"):
        assert any(f"1 of 3 rows {words}" in notice for notice in dataset.notices)


def test_importing_loads_neither_torch_nor_the_libraries_of_data() -> None:
    program = "import sys, roundpipe_cli.data.dataset, roundpipe_cli.data.batching; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert not {"torch", "transformers", "datasets", "pyarrow", "jinja2"} & set(loaded.stdout.split())


def test_several_datasets_keep_their_order_and_places(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in ("one", "two", 3, "three")])
    second = tmp_path / "b.csv"
    second.write_text("prompt,completion\nHi,Yo\n")
    specs = (DatasetSpec(str(first), split="train[1:]"), DatasetSpec(str(second)))
    settings = DataSettings(specs, 1000, on_bad_row="skip")
    tokenizer = byte_tokenizer()
    dataset = build_dataset(settings, tokenizer)
    assert [trained_text(tokenizer, dataset, index)[0] for index in range(3)] == ["two</s>", "three</s>", CHAT_TEXT]
    assert [dataset.where(row.row_id) for row in dataset.rows] == [f"{first}:2", f"{first}:4", f"{second}:2"]
    assert [source.type for source in dataset.report.sources] == ["text", "prompt_completion"]
    assert dataset.report.total_tokens == sum(len(row.input_ids) for row in dataset.rows)
    with pytest.raises(KeyError):
        dataset.where(1)
    with pytest.raises(IndexError):
        dataset.rows[3]
    assert len(dataset.rows[-1].input_ids) == len(dataset.rows[2].input_ids)


def test_content_hash_tells_every_change(tmp_path: Path) -> None:
    rows = [{"prompt": "Hi", "completion": "Yo"}, {"prompt": "a", "completion": "b"}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    base = build(path).content_hash
    assert build(path).content_hash == base
    moved = write_rows(tmp_path / "y.jsonl", rows)
    assert build(moved).content_hash == base, "the same rows elsewhere are the same data"
    changed = [
        *(build(path, train_on_inputs=True), build(path, byte_tokenizer(template=CHATML + " "))),
        build(write_rows(tmp_path / "z.jsonl", rows[::-1])),
        build(write_rows(tmp_path / "w.jsonl", [{**rows[0], "completion": "yo"}, rows[1]])),
    ]
    assert len({base, *(dataset.content_hash for dataset in changed)}) == 5


CALL = {"function": {"name": "add", "arguments": '{"a": 1}'}}
ANSWER = {"role": "assistant", "content": "Yo"}
LOST: list[tuple[dict[str, Any], object, str]] = [
    ({"role": "assistant", "tool_calls": [CALL]}, None, "the chat template leaves the tool calls"),
    (ANSWER, [{"name": "add"}], "the chat template leaves the tools"),
    (ANSWER, "{", "`tools` cannot be read as JSON"),
    (ANSWER, [{"function": []}], "has a tool whose function is no object"),
    ({"role": "assistant", "tool_calls": [{"function": {}}]}, None, "has a call without a name"),
    ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "3"}]}, None, "arguments are no object"),
    ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}, None, "as JSON"),
    ({"role": "assistant", "content": [{"type": "image"}]}, None, "has a part that is not text"),
]


def test_answers_prompts_and_tools_are_never_lost_in_silence(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Hi"}, answer], "tools": tools} for answer, tools, _ in LOST]
    for found, (_, _, what) in zip(refused_rows(tmp_path / "x.jsonl", rows), LOST, strict=True):
        assert what in found
    bad = {
        **{"`completion` is missing": {"prompt": "Hi"}, "`prompt` is not text": {"prompt": 3, "completion": "Yo"}},
        "`completion` is empty": {"prompt": "Hi", "completion": ""},
        "`completion` is not text": {"prompt": "Hi", "completion": ["a"]},
    }
    assert refused_rows(tmp_path / "y.jsonl", [*bad.values(), {"prompt": "Hi", "completion": "Yo"}]) == list(bad)


PRINTS_TOOLS = "{{ tools | tojson }}"
KNOWN = "{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}</s>{% endif %}"
SAYS = "{% for m in messages %}" + KNOWN + "{% endfor %}"


def test_turns_that_a_template_does_not_write(tmp_path: Path) -> None:
    """Their words stand in the text all the same: the tool's name among the tools, the result in a question."""
    before: list[list[dict[str, Any]]] = [
        [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}],
        [{"role": "tool", "content": "Hi"}],
        [{"role": "system", "content": "Yo"}],
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [{"messages": [{"role": "user", "content": "Hi"}, *turns, ANSWER], "tools": tools} for turns in before]
    found = refused_rows(tmp_path / "x.jsonl", rows, chat_template=PRINTS_TOOLS + SAYS)
    turns = ("the tool calls", "a turn of the role tool", "a turn of the role system")
    assert all(f"leaves {what} out" in text for text, what in zip(found, turns, strict=True))
