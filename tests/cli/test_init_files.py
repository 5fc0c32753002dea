"""A newcomer's first file of each kind: by flags and on a terminal `init` writes a recipe that trains, or says why not.

Files are as spreadsheets and editors save them, of German words, so that a wrong encoding shows.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from roundpipe_cli.cli.init_rows import look_at_rows, parse_columns
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.load import load_recipe
from tests.cli.test_terminal_text import on_a_terminal, said
from tests.support.covering import swept
from tests.support.e2e import STAGES_OF_TWO, metrics, run

NO_GPU = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
PAIRS = [(f"Wie heißt Frage {n}?", f"Für Frage {n} gilt, dass größere Zahlen öfter kommen.") for n in range(12)]
STAGES = [f"{key.replace('__', '.')}={value}" for key, value in STAGES_OF_TWO.items()]


def table(*header: str, mark: str = ",") -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=mark)
    rows = [(n, *pair) if len(header) == 3 else pair for n, pair in enumerate(PAIRS)]
    writer.writerows([header, *rows] if header else rows)
    return text.getvalue()


def lines(row: Callable[[str, str], object]) -> str:
    return "".join(json.dumps(row(*pair), ensure_ascii=False) + "\n" for pair in PAIRS)


GERMAN = "Frage|Antwort"
FILES: dict[str, tuple[str, bytes, str, str]] = {
    "foreign": ("x.csv", table("Nr", "Frage", "Antwort").encode(), GERMAN, "utf-8"),
    "one letter": ("x.csv", table("x", "y").encode(), "x|y", "utf-8"),
    "spaced": (
        "x.csv",
        table("Frage des Kunden", "Unsere Antwort").encode(),
        "Frage des Kunden|Unsere Antwort",
        "utf-8",
    ),
    "no header": ("x.csv", table().encode(), "column 1|column 2", "utf-8"),
    "cp1252": ("x.csv", table("Frage", "Antwort", mark=";").encode("cp1252"), GERMAN, "cp1252"),
    "utf-16": ("x.csv", table("Frage", "Antwort", mark="\t").encode("utf-16"), GERMAN, "utf-8"),
    "semicolons": ("x.csv", table("question", "answer", mark=";").encode(), "", "utf-8"),
    "tsv": ("x.tsv", table("Frage", "Antwort", mark="\t").encode(), GERMAN, "utf-8"),
    "mark": ("x.csv", codecs.BOM_UTF8 + table("prompt", "completion", mark=";").encode(), "", "utf-8"),
    "messages": (
        *("x.jsonl", lines(lambda q, a: {"v": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}).encode()),
        *("v", "utf-8"),
    ),
    "nested": ("x.jsonl", lines(lambda q, a: {"id": 1, "of": {"f": q, "a": a}}).encode(), "of.f|of.a", "utf-8"),
    "tabs in quotes": ("x.tsv", b'Frage\tAntwort\n"Was\tist?"\t"Ein ""Wort""."\n', GERMAN, "utf-8"),
    "another script": ("x.csv", "問題,回答\nお元気ですか？,はい、元気です。\n".encode("cp932"), "問題|回答", "cp932"),
    "central europe": (
        *("x.csv", "Otázka;Odpověď\nJak se máš?;Mám se dobře, děkuji.\n".encode("cp1250")),
        *("Otázka|Odpověď", "cp1250"),
    ),
    "hebrew": ("x.csv", "שאלה,תשובה\nמה שלומך?,אני בסדר גמור תודה רבה לך.\n".encode("cp1255"), "שאלה|תשובה", "cp1255"),
    "mark of lines": ("x.jsonl", codecs.BOM_UTF8 + b'{"prompt": "Wie?", "completion": "So."}\n', "", "utf-8"),
    "numbers beside": ("x.csv", b"id,kunde,Frage,Antwort\n17,4711,Wie?,So.\n", GERMAN, "utf-8"),
    "three texts": ("x.csv", b"Titel,Lang,Kurz\nEins,Ein langer Text,Kurz gesagt.\n", "Lang|Kurz", "utf-8"),
    "blank lines": ("x.csv", b"\n\nFrage,Antwort\nWie?,So.\n", GERMAN, "utf-8"),
    "one row": ("x.csv", b"Frage,Antwort\nWie?,So ist das.\n", GERMAN, "utf-8"),
}
"""Name and content of a file, its columns with messages or with prompt and answer where they are a guess, and its
encoding."""
COLUMNAR = {
    "lists": json.dumps({"Frage": [q for q, _ in PAIRS], "Antwort": [a for _, a in PAIRS]}),
    "pandas": json.dumps({name: {str(n): pair[i] for n, pair in enumerate(PAIRS)} for i, name in enumerate("qa")}),
    "an inner list": json.dumps({"data": {"rows": [{"q": q, "a": a} for q, a in PAIRS]}}),
    # Of these one row was trained: the first one, or the words beside the rows.
    "pandas by rows": json.dumps({str(n): {"q": q, "a": a} for n, (q, a) in enumerate(PAIRS)}),
    "a list below a title": json.dumps({"title": "My rows", "by": "Me", "rows": [{"q": q, "a": a} for q, a in PAIRS]}),
}
REFUSED = {
    "empty": ("x.csv", b"", "the dataset is empty"),
    "header alone": ("x.csv", b"Frage,Antwort\n", "the dataset is empty"),
    "list inside": ("x.json", json.dumps({"data": [{"q": 1}]}, indent=1).encode(), r"import json; .*\['data'\]"),
    "numbers": ("x.csv", b"a,b\n1,2\n3,4\n", "columns: {prompt: COLUMN, completion: COLUMN}"),
    "spreadsheet": ("x.csv", b"PK\3\4" + b"\0" * 30, r"save it as CSV \(UTF-8\)"),
    "spreadsheet by name": ("x.xlsx", b"PK\3\4" + b"\0" * 30, r"save it as CSV \(UTF-8\)"),
    "old spreadsheet": ("x.xls", b"\xd0\xcf\x11\xe0" + b"\0" * 30, r"save it as CSV \(UTF-8\)"),
    "pointer": ("x.csv", b"version https://git-lfs.github.com/spec/v1\noid 1\n", "git lfs pull"),
    "answers that are numbers": ("x.jsonl", b'{"Frage": "Wie?", "Antwort": 4}\n', "completion: COLUMN"),
    "answers that are empty": ("x.csv", b"Frage,Antwort\nWie?,\nWas?,\n", "completion: COLUMN"),
    "quotes never closed": ("x.csv", b'Frage,Antwort\n"Wie?,So.\nWas?,Das.\n', "is a quotation mark never closed"),
    "title": ("x.csv", b"Export\n\nFrage,Antwort\nWie?,So.\n", "is the first line a title"),
    "mark of Excel": ("x.csv", b"sep=;\nFrage;Antwort\nWie?;So.\n", "delete this line"),
    "two of a name": ("x.csv", b"Frage,Antwort,Antwort\nWie?,So.,Ja.\n", "a name of its own"),
    "indented object": ("x.json", b'{\n "Frage": "Wie?",\n "Antwort": "So."\n}', "before the first obj"),
    "columns as lists": ("x.json", COLUMNAR["lists"].encode(), r"a list for each column: columns Frage"),
    "comma at the end": ("x.jsonl", b'{"Frage": "Wie?", "Antwort": "So.",}\n', "take out the comma"),
    "comma behind the last row": ("x.json", b'[{"Frage": "Wie?", "Antwort": "So."},\n]', "take out the comma"),
    "text of Python": ("x.jsonl", b"{'Frage': 'Wie?', 'Antwort': None}\n", "`json.dumps` writes JSON"),
    "lists": ("x.jsonl", lines(lambda q, a: {"Frage": [q], "Antwort": [a]}).encode(), "completion: COLUMN"),
    "long line": ("x.jsonl", b'{"prompt": "' + b"x" * (65 << 20) + b'"}\n', "this line is too long"),
}


def columns_of(names: str) -> dict[str, str]:
    keys = ("prompt", "completion") if "|" in names else ("messages",)
    return dict(zip(keys, names.split("|"), strict=True)) if names else {}


@pytest.mark.parametrize("kind", ["cp1252", *swept(sorted(FILES.keys() - {"cp1252"}))])
def test_a_first_file_trains(kind: str, two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: nine of twelve first files were refused, one with the hint to skip every row that has an accent."""
    name, content, names, encoding = FILES[kind]
    columns = columns_of(names)
    shutil.copytree(two_blocks, tmp_path / "model")
    (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    words = ("--model", "model", "--data", name, "--hardware", "here", "--method", "lora")
    _, told = said("init", *words, "-o", "mine.yaml")
    recipe = load_recipe(tmp_path / "mine.yaml").recipe
    (entry,) = recipe.datasets
    assert (dict(entry.columns), entry.encoding) == (columns, encoding)
    assert ("this is a guess" in told) == bool(columns)
    short = ("max_steps=2", "output_dir=out", "--no-dashboard", *STAGES)
    run(tmp_path, "finetune", "mine.yaml", *short, environment=NO_GPU).expect(0)
    assert len(metrics(tmp_path / "out")) == 2
    assert b"Zahlen" not in content.replace(b"\0", b"") or "größere Zahlen" in said("data", "mine.yaml")[0]


@pytest.mark.parametrize("kind", FILES)
def test_what_is_likely_in_a_first_file(kind: str, tmp_path: Path) -> None:
    name, content, names, encoding = FILES[kind]
    columns = columns_of(names)
    (tmp_path / name).write_bytes(content)
    looked = look_at_rows(name, tmp_path)
    assert (dict(looked.spec.columns), looked.spec.encoding, looked.is_guess) == (columns, encoding, bool(columns))
    assert looked.example == "answer"
    if columns:
        assert all(f"{column} as the {field}" in looked.use for field, column in columns.items())
        assert len(looked.sample) > 3


@pytest.mark.parametrize("kind", REFUSED)
def test_a_first_file_that_cannot_train_says_the_way_out(kind: str, tmp_path: Path) -> None:
    name, content, match = REFUSED[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RefusedError) as refused:
        look_at_rows(name, tmp_path)
    assert len(refused.value.problems) == 1
    assert re.search(match, str(refused.value)), str(refused.value)


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
@pytest.mark.parametrize("kind", COLUMNAR)
def test_the_way_out_of_one_object_gives_its_rows(kind: str, name: str, tmp_path: Path) -> None:
    indent = 1 if name == "x.json" else None
    (tmp_path / name).write_text(json.dumps(json.loads(COLUMNAR[kind]), indent=indent))
    with pytest.raises(RefusedError) as refused:
        look_at_rows(name, tmp_path)
    command = str(refused.value.problems[0].hint).removeprefix("take them out: ")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    rows = [tuple(json.loads(line).values()) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == PAIRS


def test_columns_are_agreed_on_at_a_terminal(two_blocks: Path, tmp_path: Path) -> None:
    shutil.copytree(two_blocks, tmp_path / "model")
    (tmp_path / "x.csv").write_text(table("Nr", "Frage", "Antwort"))
    turns = [("Model", "model\n"), ("Your rows", "x.csv\n"), ("Hardware", "\n")]
    asked = "use Frage as the prompt and Antwort as the completion?"
    yes = [*turns, (asked, "\n"), ("wrote model.yaml", "")]
    shown = on_a_terminal(tmp_path, 200, "init", turns=yes, code=0, **NO_GPU)
    assert "its first row:" in shown and "as training would see it:" in shown
    assert load_recipe(tmp_path / "model.yaml").recipe.datasets[0].columns == columns_of(GERMAN)
    assert "this is a guess" not in (tmp_path / "model.yaml").read_text()
    no = [*turns, ("Recipe to write", "other.yaml\n"), (asked, "n\n"), ("Columns", "text=Antwort\n"), ("wrote", "")]
    on_a_terminal(tmp_path, 200, "init", turns=no, code=0, **NO_GPU)
    assert load_recipe(tmp_path / "other.yaml").recipe.datasets[0].columns == {"text": "Antwort"}


def test_columns_by_a_flag() -> None:
    assert parse_columns("prompt=Frage, die,completion=Antwort") == {"prompt": "Frage, die", "completion": "Antwort"}
    assert parse_columns("") == {}
    for wrong in ("prompt", "promt=Frage", "prompt="):
        with pytest.raises(RefusedError, match="a column cannot be named so"):
            parse_columns(wrong)
