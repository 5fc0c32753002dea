"""Columns: layouts that other loaders accept, each used or refused by name, and what is not used is listed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.data.columns import read_factor
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.formats import decide_format
from roundpipe_cli.data.row_chunks import RowEncoder
from roundpipe_cli.data.rows import BadRowError, RawRow, delimiter_hint
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.tokenized import TokenizedDataset, TokenizedRows
from roundpipe_cli.errors import RefusedError
from tests.data.test_data_dataset import CHATML, build, byte_tokenizer, trained_text, write_rows

USER = {"role": "user", "content": "Hi"}
YO, NO = {"role": "assistant", "content": "Yo"}, {"role": "assistant", "content": "No"}
CHAT = [USER, YO]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
TOOLS_TEMPLATE = "{%- if tools %}{{- tools | tojson }}{%- endif %}" + CHATML
MEDIA = "images, video or sound"
HI, SYSTEM = "<s>user\nHi</s>\n<s>assistant\n", "<s>system\nBe brief.</s>\n"
TABLES = json.loads((Path(__file__).parents[1] / "golden_data" / "columns.json").read_text(encoding="utf-8"))
SINGLE, PAIRS, OPENED = (TABLES[name] for name in ("used", "pairs", "opened"))
"""A row, and the text before its answers, `Yo` and `No`, which alone are trained."""
REFUSED = TABLES["refused"]
"""The row, the column that is named, and what is said of it."""


def files_of(folder: Path, rows: Iterable[dict[str, Any]]) -> DataSettings:
    """A file for each row, all read at once: a process for each takes longer than the rest."""
    paths = [write_rows(folder / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    return DataSettings(tuple(DatasetSpec(str(path)) for path in paths), 1000)


def test_layouts_that_are_used(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template=TOOLS_TEMPLATE)
    dataset = build_dataset(files_of(tmp_path, (row for row, _ in SINGLE.values())), tokenizer)
    assert len(dataset.rows) == len(SINGLE)
    for index, (name, (_, prompt)) in enumerate(SINGLE.items()):
        assert trained_text(tokenizer, dataset, index) == (prompt + "Yo</s>\n", "Yo</s>"), name


CAPITALS: list[tuple[dict[str, Any], str]] = [
    *(({"Question": "Hi", "Answer": "Yo"}, HI), ({"PROMPT": "Hi", "Completion": "Yo"}, HI)),
    ({" question": "Hi", "answer ": "Yo"}, HI),
    ({"": "0", "Question": "Hi", "Answer": "Yo"}, HI),  # a column without a name is none of ours
    ({"Instruction": "Hi", "Input": "you", "Output": "Yo"}, "<s>user\nHi\n\nyou</s>\n<s>assistant\n"),
    *(({"Messages": CHAT, "System": "Be brief."}, SYSTEM + HI), ({"Conversations": SHAREGPT}, HI)),
    ({"prompt": "Hi", "completion": "Yo", "System_Prompt": "Be brief."}, SYSTEM + HI),
]
AMBIGUOUS: list[dict[str, Any]] = [
    {"Question": "no", "question": "Hi", "answer": "Yo", "QUESTION": "Hi"},
    *({"Question": "no", "QUESTION": "Hi", "answer": "Yo"}, {"Chosen": "Hi", "Rejected": "Yo", "Prompt": "Hi"}),
]


def test_columns_in_other_capitals(tmp_path: Path) -> None:
    """Story: `Question,Answer` was not known, and the hint offered the answer as the prompt."""
    tokenizer = byte_tokenizer()
    dataset = build_dataset(files_of(tmp_path, (row for row, _ in CAPITALS)), tokenizer)
    for index, (_, prompt) in enumerate(CAPITALS):
        assert trained_text(tokenizer, dataset, index) == (prompt + "Yo</s>\n", "Yo</s>")
    for row in AMBIGUOUS:
        with pytest.raises(RefusedError, match=r"part of the prompt|cannot tell the type|preference pairs"):
            build(write_rows(tmp_path / "x.jsonl", [row]), tokenizer)


TURNS = [["Before?", "So."]]
TOOL = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
BESIDE: list[dict[str, Any]] = [
    *({}, {"system": "Be brief."}, {"system_prompt": "Be kind."}, {"System": "Be quick."}, {"tools": TOOL}),
    {"Tools": TOOL, "system": "Be brief."},
]
"""Columns that every type of conversation may have beside its own."""
BARE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    **{"chat": ({"messages": CHAT}, BESIDE), "sharegpt": ({"conversations": SHAREGPT}, BESIDE)},
    "alpaca": (
        {"instruction": "Hi", "output": "Yo"},
        [*BESIDE, {"input": "you"}, {"Input": "all"}, {"history": TURNS}],
    ),
    "prompt_completion": ({"prompt": "Hi", "completion": "Yo"}, [*BESIDE, {"history": TURNS}]),
    "question and answer": ({"question": "Hi", "answer": "Yo"}, [*BESIDE, {"history": TURNS}]),
    "preference": (
        {"prompt": "Hi", "chosen": "Yo", "rejected": "No"},
        [*BESIDE, {"history": TURNS}, {"prompt": None, "messages": [USER]}, {"prompt": None, "question": "Hi"}],
    ),
}


@pytest.mark.parametrize("name", BARE)
def test_optional_columns_are_found_in_every_row(tmp_path: Path, name: str) -> None:
    """Story: they were looked for in the first row alone. A row is read as it is alone, in any order and chunk."""
    bare, beside = BARE[name]
    rows = [{key: value for key, value in {**bare, **more}.items() if value is not None} for more in beside]
    tokenizer, example = byte_tokenizer(template=TOOLS_TEMPLATE), "pair" if name == "preference" else "answer"

    def texts(settings: DataSettings) -> list[str]:
        dataset = build_dataset(holding(settings, example), tokenizer)
        return [trained_text(tokenizer, dataset, index)[0] for index in range(len(dataset.rows))]

    alone = texts(files_of(tmp_path, rows))
    assert len(set(alone)) >= len(rows) - 2, "each of the columns is read"
    for order in (1, -1):
        path = write_rows(tmp_path / "x.jsonl", rows[::order])
        assert texts(DataSettings((DatasetSpec(str(path)),), 1000)) == alone[::order]
    path = write_rows(tmp_path / "x.jsonl", [*rows[:1] * 501, *rows])
    assert texts(DataSettings((DatasetSpec(str(path)),), 1000)) == [*alone[:1] * 501, *alone]


@pytest.mark.parametrize("written", [CHAT, SHAREGPT, json.dumps(CHAT)])
def test_the_hint_for_messages_under_an_unknown_name(tmp_path: Path, written: object) -> None:
    """Story: it was `columns: {prompt: dialog, completion: COLUMN}`."""
    tokenizer, path = byte_tokenizer(), write_rows(tmp_path / "x.jsonl", [{"id": 3, "dialog": written}])
    for options in ({}, {"type": "chat"}, {"type": "sharegpt"}):
        with pytest.raises(RefusedError) as caught:
            build(path, **options)
        field = "conversations" if options.get("type") == "sharegpt" else "messages"
        assert f"`columns: {{{field}: dialog}}`" in str(caught.value)
        assert trained_text(tokenizer, build(path, tokenizer, columns={field: "dialog"}, **options))[1] == "Yo</s>"


def test_a_column_as_it_is_written_comes_before_other_capitals(tmp_path: Path) -> None:
    """A file that was read before is read in the same way: `Messages` beside `text` stays an unused column."""
    dataset = build(write_rows(tmp_path / "x.jsonl", [{"Messages": CHAT, "text": "Hi"}]))
    assert dataset.report.sources[0].type == "text" and "Messages" in dataset.notices[1]
    pairs = write_rows(tmp_path / "y.jsonl", [{"Prompt": "Hi", "Chosen": "Yo", "REJECTED": "No"}])
    assert trained_text(byte_tokenizer(), pairs_of(pairs, byte_tokenizer())[0]) == (HI + "Yo</s>\n", "Yo</s>")


def as_texts(row: dict[str, Any]) -> dict[str, str]:
    """The row with the JSON text of what is no text."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}


def write_csv(path: Path, row: dict[str, Any]) -> Path:
    return write_rows(path, [as_texts(row)])


def test_lists_as_json_text_in_csv(tmp_path: Path) -> None:
    """Story: `messages` was refused as text, and a prompt of messages was trained as the letters of its JSON."""
    tokenizer = byte_tokenizer(template=TOOLS_TEMPLATE)
    files = [(f"{n}{end}", row) for n, (row, _) in enumerate(OPENED.values()) for end in (".csv", ".jsonl")]
    specs = [DatasetSpec(str(write_rows(tmp_path / name, [as_texts(row)]))) for name, row in files]
    dataset = build_dataset(DataSettings(tuple(specs), 1000), tokenizer)
    for index, (name, (_, prompt)) in enumerate(one for one in OPENED.items() for _ in range(2)):
        expected = "B</s>Yo</s>" if "\nB" in prompt else "Yo</s>"
        assert trained_text(tokenizer, dataset, index) == (prompt + "Yo</s>\n", expected), name


def test_messages_in_a_list_of_json_texts(tmp_path: Path) -> None:
    """As parquet files have what `datasets` stores as JSON; rules for keys of messages hold in texts too."""
    tokenizer = byte_tokenizer()
    path = write_rows(tmp_path / "x.jsonl", [{"messages": list(map(json.dumps, CHAT))}])
    assert trained_text(tokenizer, build(path, tokenizer)) == (HI + "Yo</s>\n", "Yo</s>")
    for message, what in (({**USER, "images": ["a.jpg"]}, MEDIA), ({**YO, "weight": -1}, "is no weight")):
        with pytest.raises(RefusedError) as caught:
            build(write_csv(tmp_path / "y.csv", {"messages": [message, YO]}), tokenizer)
        assert what in str(caught.value)


def test_pairs_as_json_text_in_csv(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    rows: list[dict[str, Any]] = [
        *({"chosen": CHAT, "rejected": [USER, NO]}, {"prompt": "Hi", "chosen": CHAT, "rejected": [USER, NO]}),
        *({"prompt": [USER], "chosen": [YO], "rejected": [NO]}, {"messages": [USER], "chosen": YO, "rejected": NO}),
    ]
    specs = tuple(DatasetSpec(str(write_csv(tmp_path / f"{index}.csv", row))) for index, row in enumerate(rows))
    chosen, rejected = both(DataSettings(specs, 1000), tokenizer)
    for index in range(len(rows)):
        assert pair_text(tokenizer, chosen, rejected, index) == [
            (f"{HI}{one}</s>\n", f"{one}</s>") for one in ("Yo", "No")
        ]


def test_a_text_of_json_stays_text(tmp_path: Path) -> None:
    """Answers may be JSON, and a chat may be quoted in a question."""
    tokenizer = byte_tokenizer()
    texts = [("Hi", json.dumps([YO])), (json.dumps(CHAT), "greeting"), ('[{"role": 1}]', '{"a": 1}')]
    dataset = build(write_rows(tmp_path / "x.jsonl", [{"prompt": one, "completion": two} for one, two in texts]))
    for index, (prompt, completion) in enumerate(texts):
        text = f"<s>user\n{prompt}</s>\n<s>assistant\n{completion}</s>\n"
        assert trained_text(tokenizer, dataset, index)[0] == text


def test_messages_that_are_no_json_text(tmp_path: Path) -> None:
    for text in (f"array({CHAT})", "[{]"):
        with pytest.raises(RefusedError, match="rows cannot be used") as caught:
            build(write_csv(tmp_path / "x.csv", {"messages": text}))
        problem = caught.value.problems[1]
        assert problem.what == "`messages` cannot be read as JSON"
        assert ("json.dumps" in str(problem.hint)) == ("'role'" in text)


def test_the_hint_does_not_swap_prompt_and_answer(tmp_path: Path) -> None:
    for columns, prompt, completion in (
        (["question", "final_answer"], "question", "final_answer"),
        (["model_output", "user_input", "id"], "user_input", "model_output"),
        *((["Frage", "Antwort"], "Frage", "Antwort"), (["rejected", "better"], "COLUMN", "COLUMN")),
        *((["question", "context"], "COLUMN", "COLUMN"), (["highlights", "article"], "article", "highlights")),
    ):
        with pytest.raises(RefusedError, match="cannot tell the type") as caught:
            build(write_rows(tmp_path / "x.jsonl", [dict.fromkeys(columns, "x")]))
        assert f"{{prompt: {prompt}, completion: {completion}}}" in str(caught.value)


NOTHING = ["nan", "NaN", "NULL", "None", "NA", "N/A", "#N/A", "<NA>", "null", "\\N"]


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_words_for_nothing_are_counted(tmp_path: Path, ending: str) -> None:
    """Story: what pandas or a spreadsheet writes for an empty cell was trained as a word, and nobody knew."""
    rows = [{"instruction": "Hi", "input": word, "output": "Yo"} for word in ["", *NOTHING, "None of it", "nano"]]
    rows += [{"instruction": "Hi", "input": "", "output": "nan"}]
    path = write_rows(tmp_path / f"x{ending}", rows)
    dataset = build(path, tokenizer := byte_tokenizer())
    first = 3 if ending == ".csv" else 2
    assert dataset.report.sources[0].null_word_rows == [*range(first, first + len(NOTHING)), first + len(NOTHING) + 2]
    said = f"{len(NOTHING) + 1} of {len(rows)} rows have only `nan`"
    assert any(text.startswith(said) and f"{path}:{first}, " in text for text in dataset.notices)
    assert trained_text(tokenizer, dataset, 1)[0] == "<s>user\nHi\n\nnan</s>\n<s>assistant\nYo</s>\n", "as it stands"
    others = {"tools": "null", "rejected": "nan", "label": "NA"}  # neither is trained, so nothing is said
    (source,) = build(write_csv(tmp_path / "y.csv", {"prompt": "Hi", "completion": "Yo", **others})).report.sources
    assert source.rows_kept == 1 and source.null_word_rows == []
    path = write_rows(tmp_path / f"y{ending}", [{"q": "Hi", "a": "nan"}])
    mapped = build(path, columns={"prompt": "q", "completion": "a"})
    assert mapped.report.sources[0].null_word_rows == [first - 1]


def test_a_figure_of_a_row_is_its_factor() -> None:
    """An empty cell of a table says no weight, and no label."""
    for value, factor in ((None, 1.0), ("", 1.0), ("0.5", 0.5), (3, 3.0), (0, 0.0)):
        assert read_factor("weight", value, "w") == factor
    assert (read_factor("label", True, "w"), read_factor("label", False, "w")) == (1.0, -1.0)
    for figure, value in (("label", ""), ("weight", "much")):
        with pytest.raises(BadRowError, match="`w`"):
            read_factor(figure, value, "w")  # type: ignore[arg-type]


def test_what_may_part_columns_is_named(tmp_path: Path) -> None:
    """Commas in one of several names part nothing: a name may have them."""
    for columns, word in (
        (["a,b"], "commas"),
        (["a\tb", "c"], "tabs"),
        (["c", "a;b"], "semicolons"),
        (["a|b"], "bars"),
    ):
        assert f"parted by {word}?" in str(delimiter_hint(columns))
    assert delimiter_hint(["a, b", "c"]) is delimiter_hint(["a", "b"]) is None
    with pytest.raises(RefusedError, match="parted by semicolons"):
        build(write_csv(tmp_path / "x.csv", {"Frage;Antwort, kurz": "x", "b;c": "y"}))


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_are_refused_by_name(name: str) -> None:
    """Each of these columns changes what the row means, and was ignored or refused in other words."""
    row, column, what = REFUSED[name]
    spec = DatasetSpec("x.jsonl")
    encoder = RowEncoder(DataSettings((spec,), 1000), byte_tokenizer(), (CHATML, None))
    try:
        ((_, fault),) = encoder.encode(decide_format(spec, [row], "x.jsonl"), [RawRow(1, row)]).report.bad_rows
        message = str(fault)
    except RefusedError as error:
        message = str(error)
    assert column in message and what in message and "completion: rejected" not in message


def test_columns_that_are_not_used_are_listed(tmp_path: Path) -> None:
    """With a count where only some rows have them, from the cache too; nothing is said where all are used."""
    rows: list[Any] = [{"messages": CHAT, "id": n, "source": "x"} for n in range(3)]
    rows[1] = {"messages": [{**USER, "id": 7}, YO], "id": 1, "label": "greeting"}
    path = write_rows(tmp_path / "x.jsonl", rows)
    expected = (
        f"{path}: columns that are not used: id, source (2 of 3 rows), messages[].id (1 of 3 rows), label (1 of 3 rows)"
    )
    for num_cached in (0, 1):
        dataset = build(path)
        assert dataset.num_cached == num_cached and dataset.notices[1:] == (expected,)
        assert dataset.report.sources[0].unused_columns == {"id": 3, "source": 2, "messages[].id": 1, "label": 1}
    assert len(build(write_rows(tmp_path / "y.jsonl", [{"messages": CHAT, "tools": None}])).notices) == 1
    empty = build(write_rows(tmp_path / "x.jsonl", [{"messages": CHAT, "chat_template_kwargs": {}}]))
    assert empty.notices[1].endswith("not used: chat_template_kwargs"), "a setting that sets nothing"
    two_forms = write_rows(tmp_path / "z.jsonl", [{"messages": [{**USER, "value": "Other"}, YO]}])
    assert build(two_forms).notices[1].endswith("not used: messages[].value")


def test_a_late_row_is_looked_at_too(tmp_path: Path) -> None:
    """The first rows tell the type; any row can hold a column that changes its meaning."""
    rows = [{"messages": CHAT}] * 520 + [{"messages": CHAT, "label": False}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(RefusedError) as caught:
        build(path)
    problem = caught.value.problems[1]
    assert problem.where == f"{path}:521" and "`label`" in problem.what and problem.found == "label: False"
    dataset = build(path, on_bad_row="skip")
    assert len(dataset.rows) == 520 and any("KTO" in text for text in dataset.notices)
    with pytest.raises(RefusedError, match="no row is left") as caught:
        build(write_rows(tmp_path / "y.jsonl", rows[520:]), on_bad_row="skip")
    assert "KTO" in str(caught.value)


def test_columns_of_the_recipe_are_used(tmp_path: Path) -> None:
    """The chosen answers alone, or a system prompt under another name, also where only a later row has it."""
    tokenizer, pair = byte_tokenizer(), {"q": "Hi", "chosen": "Yo", "rejected": "No"}
    path = write_rows(tmp_path / "x.jsonl", [pair, {**pair, "role": "Be brief."}])
    dataset = build(path, tokenizer, columns={"prompt": "q", "completion": "chosen", "system": "role"})
    assert trained_text(tokenizer, dataset, 0) == (HI + "Yo</s>\n", "Yo</s>")
    assert trained_text(tokenizer, dataset, 1) == (SYSTEM + HI + "Yo</s>\n", "Yo</s>")
    assert dataset.notices[0].endswith("(columns q, chosen, role)")
    assert dataset.notices[-1].endswith("not used: rejected")
    with pytest.raises(RefusedError) as caught:
        build(path, columns={"prompt": "q", "completion": "rejected"})
    assert "`chosen` belongs to a preference pair" in str(caught.value)
    late = write_rows(tmp_path / "y.jsonl", [{"MESSAGES": 3}, {"messages": CHAT}])
    assert len(build(late, type="chat", on_bad_row="skip").rows) == 1, "a type that is given has its columns in any row"
    path = write_rows(tmp_path / "y.jsonl", [{"dialog": [USER]}])
    with pytest.raises(RefusedError, match="rows cannot be used") as caught:
        build(path, columns={"messages": "dialog"})
    assert caught.value.problems[1].what == "`dialog` has nothing to train on"


THINKING = CHATML.replace(
    "m.content + '</s>",
    "('<think>' + m.reasoning_content + '</think>' if m.reasoning_content and loop.last else '') + m.content + '</s>",
)


def test_thoughts_are_used_or_named(tmp_path: Path) -> None:
    """A template that keeps the last thoughts only is told; one that keeps none is refused."""
    tokenizer = byte_tokenizer(template=THINKING)
    thoughtful = {**YO, "reasoning_content": "Hm."}
    dataset = build(write_rows(tmp_path / "x.jsonl", [{"messages": [USER, thoughtful]}]), tokenizer)
    assert trained_text(tokenizer, dataset)[1] == "<think>Hm.</think>Yo</s>" and len(dataset.notices) == 1
    rows = [{"messages": [USER, thoughtful, USER, YO]}, {"messages": [USER, YO]}]
    notice = build(write_rows(tmp_path / "y.jsonl", rows), tokenizer).notices[1]
    assert "reasoning_content of earlier turns (not kept by the chat template) (1 of 2 rows)" in notice


# --- preference pairs -----------------------------------------------------------------------------------------------

SIDES = ("chosen", "rejected")


def pairs_of(path: Path, tokenizer: Any, **options: Any) -> tuple[TokenizedDataset, TokenizedRows]:
    columns = options.pop("columns", {})
    settings = DataSettings((DatasetSpec(str(path), columns=columns),), 1000, **options)
    return both(settings, tokenizer)


def both(settings: DataSettings, tokenizer: Any) -> tuple[TokenizedDataset, TokenizedRows]:
    dataset = build_dataset(holding(settings, "pair"), tokenizer)
    _, rejected = dataset.sides
    return dataset, rejected


def pair_text(tokenizer: Any, chosen: TokenizedDataset, rejected: TokenizedRows, index: int) -> list[tuple[str, str]]:
    return [trained_text(tokenizer, one, index) for one in (chosen, replace(chosen, sides=(rejected,)))]


def holding(settings: DataSettings, example: Any) -> DataSettings:
    """The settings of rows that hold such an example."""
    return replace(settings, datasets=tuple(replace(spec, example=example) for spec in settings.datasets))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dropped", [None, "x" * 2000])
@pytest.mark.parametrize("side", SIDES)
def test_pairs_behind_a_dropped_one_keep_their_partners(tmp_path: Path, side: str, dropped: str | None) -> None:
    """A pair of which one answer is bad or too long is dropped. A checkpoint's hash is one of both."""
    rows: list[dict[str, Any]] = [{"prompt": "Go ", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(4)]
    rows[0][side] = dropped
    tokenizer, hashes = byte_tokenizer(), set()
    for _ in range(2):
        path = write_rows(tmp_path / "x.jsonl", rows)
        chosen, rejected = pairs_of(path, tokenizer, on_bad_row="skip", long_rows="drop")
        hashes.add(chosen.content_hash)
        both = [[tokenizer.decode(row.input_ids) for row in one] for one in (chosen.rows, rejected)]
        expected = [[f"<s>user\nGo </s>\n<s>assistant\n{row[name]}</s>\n" for row in rows[1:]] for name in SIDES]
        assert both == expected
        rows[2]["rejected"] = "na 2"
    assert len(hashes) == 2


def test_pairs_in_every_common_shape(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template=TOOLS_TEMPLATE)
    chosen, rejected = both(files_of(tmp_path, (row for row, _ in PAIRS.values())), tokenizer)
    assert len(chosen.rows) == len(rejected) == len(PAIRS)
    for index, (name, (_, prompt)) in enumerate(PAIRS.items()):
        expected = [(f"{prompt}{one}</s>\n", f"{one}</s>") for one in ("Yo", "No")]
        assert pair_text(tokenizer, chosen, rejected, index) == expected, name
    assert not any(text.startswith("rejected: ") for text in chosen.notices)
    row = {"prompt": "Hi", "chosen": "A", "rejected": "B", "good": "Yo", "bad": "No"}
    columns = {"chosen": "good", "rejected": "bad"}
    mapped, other = pairs_of(write_rows(tmp_path / "x.jsonl", [row]), tokenizer, columns=columns)
    assert trained_text(tokenizer, mapped)[1] == "Yo</s>"
    assert trained_text(tokenizer, replace(mapped, sides=(other,)))[1] == "No</s>"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"chosen": "Yo", "rejected": "No"}, "the pair has no prompt"),
        ({"prompt": "Hi", "chosen": "Yo", "rejected": " \n"}, "`rejected` is empty"),
        ({"prompt": "Hi", "chosen": "Yo"}, "`rejected` is missing"),
        ({"chosen": CHAT, "rejected": [{**USER, "content": "Other"}, NO]}, "is no answer to the prompt"),
        ({"chosen": CHAT, "rejected": [USER, NO, USER]}, "is no answer to the prompt"),
        ({"prompt": "Other", "chosen": CHAT, "rejected": [USER, NO]}, "does not follow on the prompt"),
        ({"messages": CHAT, "chosen": YO, "rejected": NO}, "does not follow on the prompt"),
        (
            {"prompt": [USER], "messages": [{**USER, "content": "Other"}], "chosen": YO, "rejected": NO},
            "are two prompts",
        ),
        ({"prompt": "Hi", "chosen": "Yo", "rejected": "No", "images": ["a.jpg"]}, MEDIA),
        ({"prompt": "Hi", "chosen": "Yo", "rejected": "No", "context": "There."}, "part of the prompt"),
        ({"prompt": [USER], "chosen": [{**YO, "weight": 0.5}], "rejected": [NO]}, "how much this turn counts"),
    ],
)
def test_pairs_that_are_refused(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    rows = [{"prompt": "Hi", "chosen": "Yo", "rejected": "No"}, row]
    if "messages" in row or len(row) == 2:  # columns are found in whichever row has them
        rows.reverse()
    with pytest.raises(RefusedError) as caught:
        pairs_of(write_rows(tmp_path / "x.jsonl", rows), byte_tokenizer())
    assert caught.value.exit_code == 2 and what in caught.value.problems[1].what


@pytest.mark.parametrize("row", [{"prompt": "Hi", "completion": "No", "label": False}, {"messages": CHAT}])
def test_rows_that_are_no_pairs(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=r"KTO|cannot find preference pairs"):
        pairs_of(write_rows(tmp_path / "x.jsonl", [row]), byte_tokenizer())


def test_pairs_without_a_template_are_prompt_and_answer_as_they_stand(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(template=None)
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "Q: ", "chosen": "Yo", "rejected": "No"}])
    chosen, _ = pairs_of(path, tokenizer)
    assert trained_text(tokenizer, chosen) == ("Q: Yo</s>", "Yo</s>")
    with pytest.raises(RefusedError, match="the tokenizer has no chat template"):
        pairs_of(write_rows(tmp_path / "y.jsonl", [{"chosen": CHAT, "rejected": [USER, NO]}]), tokenizer)


def test_the_report_counts_pairs(tmp_path: Path) -> None:
    """A row is one pair, lost if either answer is; tokens are those of both answers."""
    rows = [
        {"prompt": "Hi", "chosen": "Yo", "rejected": "No", "id": 1},
        *({"prompt": "Hi", "chosen": "", "rejected": "No"}, {"prompt": "Hi", "chosen": "Yo", "rejected": "N" * 90}),
    ]
    settings = {"on_bad_row": "skip", "long_rows": "drop"}
    chosen, rejected = pairs_of(write_rows(tmp_path / "x.jsonl", rows), byte_tokenizer(), **settings)
    assert (len(chosen.rows), len(rejected), chosen.report.rows_kept) == (2, 2, 2)
    assert chosen.report.filter_counts() == "3 rows read, 1 bad, 0 too long, 0 without a trained token, 2 kept"
    assert chosen.report.trained_tokens == 3 + 3 + 3 + 91 and chosen.report.sources[0].unused_columns == {"id": 1}
    assert chosen.report.total_tokens == int(chosen.rows.lengths.sum() + rejected.lengths.sum())


def test_pairs_of_two_equal_answers_are_named(tmp_path: Path) -> None:
    """Story: they teach no preference, and nothing said that they were there; nor that a cut had made them equal."""
    rows: list[Any] = [{"prompt": "Hi", "chosen": "Yo", "rejected": other} for other in ("Yo", "No")]
    whole: list[Any] = [{"chosen": CHAT, "rejected": CHAT}]
    whole += [{side: [USER, {**YO, "content": "Y" * 990 + side}] for side in ("chosen", "rejected")}]
    for name, made, count in (("x", rows, "1 of 2"), ("y", whole, "2 of 2")):
        path = write_rows(tmp_path / f"{name}.jsonl", made)
        chosen, rejected = pairs_of(path, byte_tokenizer())
        assert len(chosen.rows) == len(rejected) == 2
        (said,) = [text for text in chosen.notices if "equal answers" in text]
        assert said.startswith(f"{count} pairs have two equal answers") and f"{path}:1" in said
    only_other = write_rows(tmp_path / "z.jsonl", rows[1:])
    assert not any("equal answers" in text for text in pairs_of(only_other, byte_tokenizer())[0].notices)
