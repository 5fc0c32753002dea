"""Finding and reading datasets: every bad row is named by file and line, and nothing is dropped in silence."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from roundpipe_cli.data import files
from roundpipe_cli.data.encodings import guess_encoding
from roundpipe_cli.data.files import OTHER_KINDS, head_of, refuse_useless
from roundpipe_cli.data.rows import BadRowError, RawRow, check_text
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.sources import check_files, count_dataset, find_sources, fingerprint, no_rows, parse_split
from roundpipe_cli.data.tokenized import same_rows
from roundpipe_cli.errors import RefusedError
from tests.data.test_data_dataset import build
from tests.support.covering import swept
from tests.support.versions import at_least


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, split: str = "train", encoding: str = "utf-8") -> list[RawRow]:
    (source,) = find_sources(DatasetSpec(str(path), split=split, encoding=encoding), None, offline=True)
    return list(source.rows())


def summary(rows: list[RawRow]) -> list[tuple[int, object]]:
    """(number, the value of column `a`, or what is wrong with the row)."""
    return [(row.number, row.fault.what if row.fault else row.columns["a"]) for row in rows]


def test_jsonl_numbers_are_line_numbers(tmp_path: Path) -> None:
    lines = b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": "\xe2\x80\xa8"}\n[3]\n{"a": "\xff"}\n{"a": 4'
    rows = read(write(tmp_path / "x.jsonl", lines))
    assert summary(rows) == [
        (1, 1), (4, "\u2028"), (5, "the row is not an object"), (6, "the line is not valid UTF-8"),
        (7, "the line is not valid JSON"),
    ]  # fmt: skip
    assert rows[3].fault is not None and rows[3].fault.found == "byte 0xff at column 8"


def test_jsonl_lines_that_are_none_are_rows_with_a_fault(tmp_path: Path) -> None:
    deep = ("[" * 100_000, '{"a": ' + "9" * 10_000 + "}", '{"a": "x\0"}', '{"a" 1}', "nonsense")
    told = {'{"a": 1': "Expecting ',' delimiter at column 8", '{"a": "1': "Unterminated string starting at column 7"}
    for line, found in {**dict.fromkeys(deep), **told}.items():
        first, second = read(write(tmp_path / "x.jsonl", line + '\n{"a": 2}\n'))
        assert first.fault is not None and first.fault.what.startswith("the line") and second.columns == {"a": 2}
        assert found in (None, first.fault.found)


def test_json_list_numbers_are_the_lines_where_rows_begin(tmp_path: Path) -> None:
    """Broken bytes spoil one row; rows may stand a line each under this name."""
    text = json.dumps([{"a": 1, "b": "x\ny"}, {"a": 2}, 3], indent=2)
    assert summary(read(write(tmp_path / "x.json", text))) == [(2, 1), (6, 2), (9, "the row is not an object")]
    rows = read(write(tmp_path / "y.json", b'[{"a": "\xc3\xa9"},\n{"a": "\xff"},\n{"a": 3}]'))
    assert summary(rows) == [(1, "é"), (2, "the row is not valid UTF-8"), (3, 3)]
    assert summary(read(write(tmp_path / "z.json", '{"a": 1}\n{"a": 2}\n'))) == [(1, 1), (2, 2)]


def test_broken_json_file_is_refused_with_line_and_column(tmp_path: Path) -> None:
    places = {'[{"a": 1},\n {"a" 2}]': "2:7", '[{"a": 1}\n {"a": 2}]': "2:2", '[{"a": 1}] x': "1:11"}
    for text, place in {**places, '{\n "data": []\n}': "1:1"}.items():
        with pytest.raises(RefusedError) as caught:
            read(write(tmp_path / "x.json", text))
        assert (caught.value.problems[0].where or "").endswith(f"x.json:{place}")


def test_csv_rows_with_line_breaks_quotes_and_faults(tmp_path: Path) -> None:
    text = 'a,b\n"one\ntwo",x\n\n3,y,z\n"4""",w\n'
    assert summary(read(write(tmp_path / "x.csv", text))) == [
        (2, "one\ntwo"), (5, "the row does not fit the header"), (6, '4"'),
    ]  # fmt: skip
    assert summary(read(write(tmp_path / "x.tsv", "a\tb\n1\t2\n"))) == [(2, "1")]
    assert summary(read(write(tmp_path / "y.csv", b"a;b\n1;2\n\xff;3\n"))) == [(2, "1"), (3, "\udcff")]
    long_field = "word " * 100_000
    assert read(write(tmp_path / "long.csv", f"a,b\n{long_field},1\n"))[0].columns["a"] == long_field


@pytest.mark.covering(1)
@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz"])
@pytest.mark.parametrize(("delimiter", "name"), [(",", "commas"), (";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_tables_with_another_delimiter(tmp_path: Path, ending: str, delimiter: str, name: str, quoting: Any) -> None:
    """Story: a CSV with semicolons was refused for its columns, or its rows as unfit, and no delimiter named."""
    text = io.StringIO()
    rows = [["a", "question"], ["1", "one, two; three|four\tfive\nsix"], ["2", ""]]
    csv.writer(text, delimiter=delimiter, quoting=quoting).writerows(rows)
    data = text.getvalue().encode()
    path = write(tmp_path / f"x{ending}", gzip.compress(data) if ending.endswith(".gz") else data)
    (source,) = find_sources(DatasetSpec(str(path)), None, offline=True)
    assert [list(row.columns.values()) for row in source.rows()] == rows[1:]
    own, usual = ("\t", "tabs") if ending == ".tsv" else (",", "commas")
    told = f"{path} has {name} between its columns, not {usual}, and is read so"
    assert source.notices == (() if delimiter == own else (told,))
    (source, *_) = find_sources(DatasetSpec(str(tmp_path)), None, offline=True)
    assert bool(source.notices) == (delimiter != own)


def test_a_comma_file_means_what_it_meant(tmp_path: Path) -> None:
    for text, columns in {
        **{"text\na;b\nc|d\n": {"text": "a;b"}, 'text\n"a;b\tc"\n': {"text": "a;b\tc"}},
        **{"a;b\nno such part\n": {"a;b": "no such part"}, "a;b,c\nd;e,f\n": {"a;b": "d;e", "c": "f"}},
        '"a;b"\n"c;d"\n': {"a;b": "c;d"},
    }.items():
        (source,) = find_sources(DatasetSpec(str(write(tmp_path / "x.csv", text))), None, offline=True)
        assert next(source.rows()).columns == columns and source.notices == ()


def test_empty_cells_below_a_table_are_no_rows(tmp_path: Path) -> None:
    """A spreadsheet saves them where cells once held something; each was a row that cannot be used."""
    path = write(tmp_path / "x.csv", "question;answer\r\nHi;Yo\r\n;\r\n\r\n Hi;\r\n; \r\n;\r\n")
    assert [(row.number, row.columns["question"]) for row in read(path)] == [(2, "Hi"), (5, " Hi")]
    assert (count := count_dataset(DatasetSpec(str(path)), None)) is not None and count.num_rows == 2


def test_headers_of_csv(tmp_path: Path) -> None:
    """A delimiter that cannot be told is named where a row does not fit."""
    row = read(write(tmp_path / "x.csv", "id;question, short;answer\n1;Hi;Yo\n2;Hi\n"))[0]
    assert row.fault is not None and "semicolons" in str(row.fault.hint)
    assert read(write(tmp_path / "x.csv", "a,b\n")) == read(write(tmp_path / "zero.csv", "")) == []
    for text, what in (("a,a\n1,2\n", "two columns have the same name"), ('a,"b"c\n1,2\n', "header is not valid CSV")):
        with pytest.raises(RefusedError, match=what):
            read(write(tmp_path / "y.csv", text))


@pytest.mark.parametrize("inner", ["", "[{", '{"of": {'])
def test_two_values_for_one_key_are_a_fault(tmp_path: Path, inner: str) -> None:
    """Story: Python keeps the last value of a key that an object has twice, so half of a row vanished in silence."""
    close = inner.replace("[{", "}]").replace('{"of": {', "}}") if inner else ""
    twice = f'{{"a": {inner}"b": 1, "c": 2, "b": 1{close}}}' if inner else '{"a": 1, "b": 1, "a": 2}'
    lines = write(tmp_path / "x.jsonl", f'{{"a": 1}}\n{twice}\n{{"a": 3}}\n')
    packed = write(tmp_path / "x.jsonl.gz", gzip.compress(lines.read_bytes()))
    listed = write(tmp_path / "x.json", f'[{{"a": 1}},\n{twice},\n{{"a": 3}}]')
    for path in (lines, packed, listed):
        rows = read(path)
        assert summary(rows) == [(1, 1), (2, "the row has two values for one key"), (3, 3)]
        assert rows[1].fault is not None and rows[1].fault.found == f"the key {'b' if inner else 'a'!r} twice"


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """Story: the last one was trained; so it is for CSV, which refuses."""
    texts = [pyarrow.array(["one"]), pyarrow.array(["two"])]
    inner = pyarrow.StructArray.from_arrays(texts, names=["role", "role"])
    for columns, names in ((texts, ["text", "text"]), ([inner], ["messages"])):
        path = tmp_path / f"{names[0]}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), path)
        with pytest.raises(RefusedError, match=r"two columns have the same name|duplicate field names"):
            read(path)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(3000)), "m": [[{"role": "user"}]] * 3000}), path)
    rows = read(path, "train[1500:]")
    assert (rows[0].number, rows[0].columns) == (1501, {"a": 1500, "m": [{"role": "user"}]})
    assert len(rows) == 1500
    (source,) = find_sources(DatasetSpec(str(path)), None, offline=True)
    assert source.where(7).endswith("x.parquet: row 7")
    with pytest.raises(RefusedError, match="cannot read the parquet file"):
        read(write(tmp_path / "bad.parquet", b"PAR1 but not really"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.txt", "x.ndjson", "x.tsv"])
def test_a_file_is_what_its_bytes_say(tmp_path: Path, name: str) -> None:
    """Story: each line of a file that gzip had compressed under another name was "not valid UTF-8"."""
    text = {".csv": "a\n1\n", ".tsv": "a\tb\n1\t2\n", ".txt": "1\n"}.get(Path(name).suffix, '{"a": "1"}\n').encode()
    (source,) = find_sources(DatasetSpec(str(write(tmp_path / name, gzip.compress(text)))), None, offline=True)
    assert source.notices == (f"{tmp_path / name} is compressed by gzip, and is read so",)
    assert [next(iter(row.columns.values())) for row in source.rows()] == ["1"]
    count = count_dataset(DatasetSpec(str(tmp_path / name)), None)
    assert count is not None and count.num_rows == 1
    plain = find_sources(DatasetSpec(str(write(tmp_path / f"{name}.gz", text))), None, offline=True)
    assert not plain[0].notices and len(list(plain[0].rows())) == 1, "nor need a file of that name be compressed"
    for head, kind in OTHER_KINDS.items():
        with pytest.raises(RefusedError, match="the file holds no rows of text") as caught:
            read(write(tmp_path / name, head + b"\0" * 20))
        assert caught.value.problems[0].found == kind


def test_columns_without_a_name_have_that_of_pandas(tmp_path: Path) -> None:
    """Story: an index that pandas wrote was listed as `columns that are not used: `, and two were refused."""
    for header, names in {
        **{",prompt,b": ("Unnamed: 0", "prompt", "b"), "a,prompt,": ("a", "prompt", "Unnamed: 2")},
        **{",,b": ("Unnamed: 0", "Unnamed: 1", "b"), " ,Unnamed: 0,b": ("Unnamed: 0.1", "Unnamed: 0", "b")},
        ";b;c": ("Unnamed: 0", "b", "c"),
    }.items():
        (row,) = read(write(tmp_path / "x.csv", f"{header}\n{'1;2;3' if ';' in header else '1,2,3'}\n"))
        assert row.columns == dict(zip(names, "123", strict=True))


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no reader for this kind of file"):
        read(write(tmp_path / "x.docx", "PK"))
    with pytest.raises(RefusedError, match="unknown encoding"):
        find_sources(DatasetSpec(str(write(tmp_path / "x.csv", "text\na\n")), encoding="ansi-99"), None, offline=True)


@pytest.mark.parametrize("text", ["£5 or £10", "5 €", "It’s “ok” – and £5…"])
def test_signs_without_letters_are_those_of_windows(text: str) -> None:
    """Story: of English tables `£` was taken for a Polish letter, `€` for one of a Mac."""
    assert guess_encoding(f"a,b\r\n{text},x\r\n".encode("cp1252")) == "cp1252"


TEXTS = {
    "cp1252": "Wie heißt die größte Stadt? L’été à Köln – für Ärzte öfter",
    **{"cp1250": "Zażółć gęślą jaźń. Příliš žluťoučký kůň", "cp1251": "Как дела? Привет, мир! Это ответ."},
    **{"cp1253": "Τι κάνεις; Καλημέρα κόσμε", "cp1254": "İstanbul’da hava nasıl? Çok güzel ağaç şimdi"},
    **{"cp932": "日本の首都はどこですか？東京です。", "gb18030": "中国的首都是哪里？北京是中国的首都。"},
    "mac_roman": "Wie heißt die größte Stadt? Für Ärzte übrigens",
}


@pytest.mark.parametrize("encoding", [*TEXTS, "utf-16", "utf-16-be", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl", "x.json", "x.txt", "x.csv.gz"])
def test_a_text_in_any_encoding_is_read_as_it_was_written(tmp_path: Path, encoding: str, name: str) -> None:
    """Story: what Excel saves was refused row by row, with the hint to skip every row that has an accent."""
    said, ending = TEXTS.get(encoding, TEXTS["cp1252"]), Path(name.removesuffix(".gz")).suffix
    mark = "\t" if ending == ".tsv" else ","
    row = json.dumps({"text": said}, ensure_ascii=False)
    content = {".txt": said, ".jsonl": row, ".json": f"[{row}]"}.get(ending, f'text{mark}n\r\n"{said}"{mark}1\r\n')
    data = content.encode(encoding)
    path = write(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)
    has_mark = encoding in ("utf-16", "utf-32", "utf-8-sig")
    assert guess_encoding(head_of(path)) == (None if has_mark else encoding)
    spec = DatasetSpec(str(path), encoding="utf-8" if has_mark else encoding)
    (source,) = find_sources(spec, None, offline=True)
    (read_row,) = source.rows()
    assert read_row.fault is None and read_row.columns["text"] == said
    assert (count := count_dataset(spec, None)) is not None and count.num_rows == 1
    if encoding in ("utf-16", "utf-32"):
        assert source.notices == (f"{path} is in {encoding.upper()} by its first bytes, and is read so",)
    elif encoding in TEXTS:
        (plain,) = find_sources(replace(spec, encoding="utf-8"), None, offline=True)
        (bad,) = plain.rows()
        with suppress(BadRowError):
            check_text(str(bad.columns.get("text", "")), "`text`")
            assert bad.fault is not None and f"`encoding: {encoding}`" in str(bad.fault.hint)
    with pytest.raises(RefusedError, match="the file is no text in utf-16"):
        read(write(tmp_path / "y.jsonl", b"abc"), encoding="utf-16-le")


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("Was ist ein Lock?,Eine Datei.\nUnd nun?,Ja.\n", ["column 1", "column 2"]),
        ("What is 2+2?,4\nWhat is 3+3?,6\n", ["column 1", "column 2"]),
        ("Was, bitte, ist ein Lock?;Eine Datei, die sperrt.\nUnd nun?;Ja, gut.\n", ["column 1", "column 2"]),
        ("1,Wie geht es dir heute so?,Es geht mir gut.\n", ["column 1", "column 2", "column 3"]),
        ("Which is it?,A\nAnd what is it not?,R\n", ["column 1", "column 2"]),
        *(("Frage,Antwort\nWie?,So.\n", ["Frage", "Antwort"]), ("q,a\nWie?,So.\n", ["q", "a"])),
        ("Frage des Kunden,Unsere Antwort\nWie?,So.\n", ["Frage des Kunden", "Unsere Antwort"]),
        ("Zeitstempel,Was möchtest du von uns wissen?,Antwort\n1.1.,Wie?,So.\n", None),
        *(("0,1\nWie?,So.\n", ["0", "1"]), ("prompt\nWie geht es dir?\n", ["prompt"])),
    ],
)
def test_a_table_without_names_is_recognised(tmp_path: Path, text: str, columns: list[str] | None) -> None:
    """Story: the first row of a file without a header line was lost, and its words were the names of the columns."""
    path = write(tmp_path / "x.csv", text)
    (source,) = find_sources(DatasetSpec(str(path)), None, offline=True)
    rows, lines = list(source.rows()), text.splitlines()
    names = columns or lines[0].split(",")
    assert list(rows[0].columns) == names
    has_names = names[0] != "column 1"
    assert len(rows) == len(lines) - has_names and rows[0].number == 1 + has_names
    assert any("no line with names" in notice for notice in source.notices) is not has_names
    assert (count := count_dataset(DatasetSpec(str(path)), None)) is not None and count.num_rows == len(rows)
    if not has_names:
        mark = ";" if ";" in text else ","
        given = DatasetSpec(str(path), columns={"prompt": lines[0].split(mark)[0]})
        (mapped,) = find_sources(given, None, offline=True)
        assert len(list(mapped.rows())) == len(lines) - 1, "what is mapped is a name"


def test_slices_are_those_of_datasets(tmp_path: Path) -> None:
    from datasets import ReadInstruction

    path = write(tmp_path / "x.jsonl", "".join(f'{{"a": {index}}}\n' for index in range(10)))
    slices = {"": "0123456789", "[:3]": "012", "[7:]": "789", "[-3:]": "789", "[:-8]": "01", "[10%:25%]": "1"}
    slices |= {"[15%:37%]": "23", "[-37%:-12%]": "678", "[:99]": "0123456789", "[5:2]": ""}
    for part, expected in slices.items():
        (theirs,) = ReadInstruction.from_spec(f"train{part}").to_absolute({"train": 10})
        assert "0123456789"[theirs.from_ : theirs.to] == expected, part
        assert "".join(str(row.columns["a"]) for row in read(path, f"train{part}")) == expected, part
    for text in ("train[1]", "train[:3", "train+test", "", "train[a:b]"):
        with pytest.raises(RefusedError, match="this split cannot be read"):
            parse_split(text)
    with pytest.raises(RefusedError) as caught:
        read(path, "test[:5]")
    assert caught.value.problems[0].hint == "split: train[:5]"


def test_relative_paths_from_the_working_directory_then_the_recipe(tmp_path: Path, monkeypatch: Any) -> None:
    here, recipe = tmp_path / "here", tmp_path / "recipes"
    for folder in (recipe, here):
        folder.mkdir()
        monkeypatch.chdir(here if here.exists() else tmp_path)
        write(folder / "x.jsonl", json.dumps({"a": folder.name}))
        (source,) = find_sources(DatasetSpec("x.jsonl"), recipe, offline=True)
        assert summary(list(source.rows())) == [(1, folder.name)]
    assert source.where(3) == "x.jsonl:3"
    with pytest.raises(RefusedError) as caught:
        find_sources(DatasetSpec("data/none.jsonl"), recipe, offline=True)
    message = str(caught.value)
    assert str(here / "data/none.jsonl") in message and str(recipe / "data/none.jsonl") in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        *(("d/**/*.jsonl", "d/a d/e/b d/e/f/c"), ("**/[bc].jsonl", "d/e/b d/e/f/c"), ("d/*/*.jsonl", "d/e/b")),
        *(("d/**.jsonl", "d/a"), ("d/**/.*.jsonl", "d/.h"), ("data[1].jsonl", "data[1]"), ("run[1]", "run[1]/x")),
        *(("data[[]1].jsonl", "data[1]"), ("run[0-9]/**/*.jsonl", "run1/y"), ("what?.jsonl", "what?")),
    ],
)
def test_patterns_and_names_with_their_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, expected: str
) -> None:
    """Story: only the last part of a path could be a pattern, and no file be called `data[1].jsonl`."""
    monkeypatch.chdir(tmp_path)
    names = "d/a d/e/b d/e/f/c d/.h data[1] run[1]/x run1/y what?"
    for name in (f"{name}.jsonl" for name in names.split()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, "{}\n")
    (tmp_path / "d" / "e" / "round").symlink_to(tmp_path / "d")
    for path in (pattern, str(tmp_path / pattern)):
        sources = find_sources(DatasetSpec(path), None, offline=True)
        assert [source.name for source in sources] == [f"{name}.jsonl" for name in expected.split()]


def test_a_pattern_reads_regular_files_inside_its_folder(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.jsonl", '{"a": "secret"}\n')
    folder = tmp_path / "mine" / "more"
    folder.mkdir(parents=True)
    (folder / "link.jsonl").symlink_to(secret)
    (folder / "gone.jsonl").symlink_to(folder / "nothing")
    os.mkfifo(folder / "pipe.jsonl")
    write(folder / ".hidden.jsonl", "{}\n")
    left_out = ["1 (hidden)", "1 (links that lead out of the folder)", "2 (no regular files)"]
    with pytest.raises(RefusedError, match="dataset not found") as caught:
        find_sources(DatasetSpec(str(tmp_path / "mine/**/*.jsonl")), None, offline=True)
    assert sorted(str(caught.value.problems[0].found).split("left out: ")[1].split(", ")) == left_out
    (named,) = find_sources(DatasetSpec(str(tmp_path / "mine/more/l*.jsonl")), None, offline=True)
    assert named.file == folder / "link.jsonl", "a link that a pattern names is read as one that a path names"
    inside = write(folder / "inside.jsonl", '{"a": 1}\n')
    (folder / "other.jsonl").symlink_to(inside)
    first, second = find_sources(DatasetSpec(str(tmp_path / "mine/**/*.jsonl")), None, offline=True)
    assert (first.file, second.file) == (inside, folder / "other.jsonl")
    assert "2 (no regular files)" in first.notices[0] and not second.notices
    (rest,) = find_sources(DatasetSpec(str(tmp_path / "mine/**/*.jsonl"), split="train[1:]"), None, offline=True)
    assert rest.file == second.file and "2 (no regular files)" in rest.notices[0], "the first file is not read"


def read_all(path: Path, split: str = "train", name: str | None = None) -> list[object]:
    """The column `a` of all rows of all sources."""
    sources = find_sources(DatasetSpec(str(path), split=split, name=name), None, offline=True)
    return [row.columns.get("a") for source in sources for row in source.rows()]


def test_a_slice_counts_the_rows_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n')
    write(tmp_path / "b.jsonl", '{"a": 3}\n{"a": 4}\n')
    for place in (tmp_path, tmp_path / "*.jsonl"):
        assert read_all(place, "train[1:3]") == [2, 3]
        assert read_all(place, "train[-1:]") == [4] and read_all(place, "train[:50%]") == [1, 2]
        with pytest.raises(RefusedError, match="slice holds no rows"):
            read_all(place, "train[4:]")
    assert read_all(tmp_path / "a.jsonl", "train[50%:]") == read_all(tmp_path / "a.jsonl", "train[-1:]") == [2]
    monkeypatch.setattr("roundpipe_cli.data.sources.read_file", lambda *_, **__: pytest.fail("a whole pass"))
    find_sources(DatasetSpec(str(tmp_path / "a.jsonl"), split="train[:50%]"), None, offline=True)


def test_a_folder_has_the_splits_that_its_names_say(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", '{"a": 1}\n{"a": 2}\n')
    write(tmp_path / "my-dev.jsonl", '{"a": 3}\n')
    write(tmp_path / "extra-00000-of-00001.jsonl", '{"a": 4}\n')
    (tmp_path / "test").mkdir()
    write(tmp_path / "test" / "x.jsonl", '{"a": 5}\n')
    write(tmp_path / "dataset_infos.json", "{}")
    assert read_all(tmp_path) == [1, 2]
    assert [read_all(tmp_path, name) for name in ("validation", "extra", "test")] == [[3], [4], [5]]
    assert sorted(read_all(tmp_path, "all"), key=str) == [1, 2, 3, 4, 5]
    assert read_all(tmp_path, name="test") == [5]
    with pytest.raises(RefusedError, match="cannot load split `nope`"):
        read_all(tmp_path, "nope")
    with pytest.raises(RefusedError, match="no such configuration"):
        read_all(tmp_path, name="..")
    write(tmp_path / "test" / "y.csv", "a\n6\n")
    with pytest.raises(RefusedError, match="files of several kinds") as caught:
        read_all(tmp_path, "all", name="test")
    assert caught.value.problems[0].hint == f"path: {tmp_path}/test/*.csv"


def test_a_data_folder_reads_nothing_outside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its README named an absolute path or a URL, which was read; a link and an archive led further."""
    secret = write(tmp_path / "secret.jsonl", '{"a": "secret"}\n')
    folder = tmp_path / "mine"
    folder.mkdir()
    write(folder / "train.jsonl", '{"a": 1}\n')
    (folder / "link.jsonl").symlink_to(secret)
    (folder / "up").symlink_to(tmp_path)
    write(folder / "data.tar", b"anything")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
    for target in (str(secret), "../secret.jsonl", "https://127.0.0.1:9/x.jsonl", "zip://x.jsonl::data.zip"):
        card = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": target}]}]}
        write(folder / "README.md", f"---\n{json.dumps(card)[1:-1]}\n---\n".replace('"configs"', "configs"))
        (source,) = find_sources(DatasetSpec(str(folder)), None, offline=True)
        assert summary(list(source.rows())) == [(1, 1)]
        assert any("README.md" in text for text in source.notices)
        assert any("2 (links" in text for text in source.notices), "to a folder, too"
    (folder / "train.jsonl").unlink()
    with pytest.raises(RefusedError, match=r"(?s)no file that can be read.*2 \(links that lead out"):
        read_all(folder)


def test_a_hub_dataset_reads_only_tables_of_its_own(tmp_path: Path) -> None:
    import datasets

    local = write(tmp_path / "x.json", '{"a": 1}\n')
    builder = datasets.load_dataset_builder("json", data_files={"train": str(local)}, cache_dir=str(tmp_path / "c"))
    with pytest.raises(RefusedError, match="not its own tables") as caught:
        check_files(DatasetSpec("org/set"), builder)
    assert str(local) in str(caught.value)
    for file in ("hf://datasets/org/set@abc/data.tar", "hf://datasets/org/other@abc/x.json"):
        builder.config.data_files = {"train": [file]}
        with pytest.raises(RefusedError, match="not its own tables"):
            check_files(DatasetSpec("org/set"), builder)
    builder.config.data_files = {"train": ["hf://datasets/org/set@abc/data/train.jsonl.gz"]}
    check_files(DatasetSpec("org/set"), builder)


@pytest.mark.parametrize(("kind", "content"), [("csv", "a\n"), ("json", "[]"), ("json", '{"text": "a"}\n' * 2)])
def test_a_hub_split_is_read_be_it_empty(tmp_path: Path, monkeypatch: Any, kind: str, content: str) -> None:
    """Story: an empty one was `ValueError: Instruction "train" corresponds to no data!`."""
    import datasets

    files = {"train": str(write(tmp_path / f"x.{kind}", content))}
    builder = datasets.load_dataset_builder(kind, data_files=files, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: builder)
    monkeypatch.setattr("roundpipe_cli.data.sources.check_files", lambda *_: None)  # it wants files of the hub
    monkeypatch.chdir(tmp_path)
    if "text" in content:
        whole, last = (build(Path("some-org/some-set"), split=split) for split in ("train", "train[-1:]"))
        said = "{} of some-org/some-set[train] {} also in some-org/some-set[train]"
        for one, words in ((whole, ("2 rows", "are")), (last, ("1 row", "is"))):
            assert [*same_rows(one.numbered_sources, whole.numbered_sources)] == [said.format(*words)]
        assert last.where(last.rows[0].row_id) == "some-org/some-set[train]: row 2"
        return
    (source,) = find_sources(DatasetSpec("some-org/some-set"), None, offline=True)
    fingerprint([source])
    assert list(source.rows()) == [] and source.content
    assert str(no_rows([source])).startswith("some-org/some-set[train]: the dataset is empty")


def test_hub_dataset_offline_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    before = huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    (source,) = find_sources(DatasetSpec("some-org/some-set", split="train[:5]"), None, offline=True)
    with pytest.raises(RefusedError) as caught:
        list(source.rows())
    assert caught.value.problems[0].found == "offline mode"
    assert before == (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.csv.gz", "x.txt.gz", "x.json.gz"])
def test_a_compressed_bomb_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A few kilobytes unpacked to one line of any length, and took the machine's memory with them."""
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 16)
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 1 << 16)
    path = write(tmp_path / name, gzip.compress(b"text\nfirst\n\n" + b"x" * (1 << 20)))
    with pytest.raises(RefusedError, match=r"too long|too large") as caught:
        read(path)
    assert str(path) in str(caught.value) and "64 KiB" in str(caught.value)


@pytest.mark.parametrize("nested", [False, True])
def test_a_text_that_many_parquet_rows_name_is_not_copied_for_all(tmp_path: Path, nested: bool) -> None:
    """A small file of a dictionary with one long text took 1,024 times its length at once."""
    length, rows = 1 << 16, 1000
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["x" * length])
    column = pyarrow.ListArray.from_arrays(list(range(rows + 1)), texts.cast(pyarrow.string())) if nested else texts
    path = tmp_path / "bomb.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd", store_schema=False)
    del texts, column
    assert path.stat().st_size < 10_000
    before = pyarrow.total_allocated_bytes()
    (source,) = find_sources(DatasetSpec(str(path)), None, offline=True)
    row = next(iter(source.rows()))
    assert row.columns == {"text": ["x" * length] if nested else "x" * length}
    assert pyarrow.total_allocated_bytes() - before < 20 * length


ENDS = "ended its process" if at_least("pyarrow", "26") else "cannot be applied to primitive type"
"""What is said of texts that a head calls numbers: BYTE_ARRAY and INT64 in thrift."""


@pytest.mark.parametrize(
    ("found", "put", "said"),
    [(b"question", b"quesuion", "cannot read the parquet file"), (b"\x15\x0c", b"\x15\x04", ENDS)],
)
def test_a_damaged_parquet_head_is_one_error(tmp_path: Path, found: bytes, put: bytes, said: str) -> None:
    """Story: it was a KeyError, or ended the whole program by SIGABRT without a word (pyarrow 16 finds that itself)."""
    path, refused = tmp_path / "x.parquet", []
    pyarrow.parquet.write_table(pyarrow.table({"question": ["hello"] * 50}), path)
    whole = path.read_bytes()
    for place in [match.start() for match in re.finditer(re.escape(found), whole)]:
        path.write_bytes(whole[:place] + put + whole[place + len(put) :])
        try:
            read(path)
        except RefusedError as error:
            refused.append(str(error))
    assert any(said in text for text in refused), refused


def test_a_list_of_rows_larger_than_memory_is_refused_unread(tmp_path: Path) -> None:
    """A list is in memory twice, as bytes and as text; a file of a terabyte was asked for whole."""
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},')
    os.truncate(path, 2**40)
    with pytest.raises(RefusedError, match="too large to be read whole") as caught:
        read(path)
    assert ".jsonl" in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.jsonl.gz"])
def test_a_terabyte_that_its_first_row_makes_useless_is_not_hashed(name: str, tmp_path: Path) -> None:
    """Story: a file of nothing, such as an interrupted download leaves, was read to its end for a key of the cache."""
    path = tmp_path / name
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(RefusedError, match=r"too long|too large|cannot read|not a"):
        refuse_useless(path)


@pytest.mark.parametrize("seed", [*range(4), *swept(range(4, 20))])
def test_damaged_deflate_bytes_are_one_error(tmp_path: Path, seed: int) -> None:
    """`zlib.error` is neither an OSError nor an EOFError."""
    chance = random.Random(seed)
    data = bytearray(gzip.compress(b"".join(b'{"a": %d}\n' % chance.randrange(10**9) for _ in range(200))))
    path = write(tmp_path / "x.jsonl.gz", bytes(data))
    assert [number for number, _ in summary(read(path))] == [*range(1, 201)]
    cut = bytes(data[:-9])
    data[chance.randrange(10, len(data) - 8)] ^= 1 << chance.randrange(8)
    for damaged in (cut, bytes(data)):
        with pytest.raises(RefusedError, match=r"cannot read the dataset"):
            read(write(path, damaged))
