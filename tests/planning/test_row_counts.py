"""Rows of files as `plan` counts them, against those that a run reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from roundpipe_cli.data import files
from roundpipe_cli.data.files import count_rows, read_file
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.sources import count_dataset, find_sources

ROWS = [{"text": f'row {number}\nof two lines, "quoted"', "more": number} for number in range(23)]


def write(path: Path) -> Path:
    name = path.name.removesuffix(".gz")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    quoted = [f'"{row["text"]}"'.replace('\\"', "").replace('"quoted"', "quoted") for row in ROWS]  # type: ignore[str-bytes-safe]
    separator = "\t" if name.endswith(".tsv") else ","
    table = f"text{separator}more\n" + "".join(f"{text}{separator}{n}\n" for n, text in enumerate(quoted))
    content = {
        ".jsonl": lines + "\n",
        ".json": json.dumps(ROWS),
        ".csv": table,
        ".tsv": table,
        ".txt": "one\nparagraph\n\n\n  \nanother\n\n",
    }[Path(name).suffix].encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.jsonl.gz", "a.csv.gz", "A.JSONL"])
def test_as_many_rows_as_a_run_reads(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name.lower()).rename(tmp_path / name)
    counted = count_rows(path)
    assert counted is not None and counted.is_exact
    assert counted.num_rows == len(list(read_file(path))) > 1


def test_parquet_says_it_in_its_footer(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {f"column {number}": [number] * 1234 for number in range(30)}
    columns["nested"] = [{"a": [1, 2], "b": {"c": True}}] * 1234
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=100)
    counted = count_rows(path)
    assert counted is not None and (counted.num_rows, counted.is_exact) == (1234, True)
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[:-8] + b"\xff\xff\xff\x7fPAR1", b"\x1c" * 5000 + b"\x88\x13\0\0PAR1"):
        path.write_bytes(broken)
        assert count_rows(path) is None


def test_a_large_file_is_counted_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_COUNTED_BYTES", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "all rows are alike"}\n' * 5000)
    counted = count_rows(path)
    assert counted is not None and not counted.is_exact and counted.num_rows == pytest.approx(5000, rel=0.05)


def test_what_cannot_be_counted(tmp_path: Path) -> None:
    for name, content in (("a.json", b"[{"), ("a.csv.gz", b"\x1f\x8bno gzip"), ("a.bin", b"x"), ("a.arrow", b"ARROW1")):
        (tmp_path / name).write_bytes(content)
        assert count_rows(tmp_path / name) is None
    assert count_rows(tmp_path / "absent.jsonl") is None


def test_a_downloaded_dataset_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.load_dataset("json", data_files=str(rows), cache_dir=str(tmp_path / "cache"))
    found = count_dataset(DatasetSpec("json"), tmp_path)
    assert found is not None and found.num_rows == len(ROWS) and found.num_bytes > 0
    assert count_dataset(DatasetSpec("json", split="test"), tmp_path) is None
    assert count_dataset(DatasetSpec("org/other"), tmp_path) is None


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("*.csv", "train"),
        ("*.csv", "train[10%:-2]"),
        ("folder", "train"),
        ("bars.csv", "train[3:]"),
        ("no.csv", "train"),
    ],
)
def test_patterns_folders_and_delimiters_are_counted_as_they_are_read(tmp_path: Path, path: str, split: str) -> None:
    """`plan` took the pattern for a missing file, and a header with bars for one column of broken rows."""
    for name in ("bars.csv", "more.csv", "folder/train.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a|b\n" + '"one\n, two"|2\n' * 20)
    counted = count_dataset(DatasetSpec(str(tmp_path / path), split=split), None)
    if path == "no.csv":
        assert counted is None
        return
    sources = find_sources(DatasetSpec(str(tmp_path / path), split=split), None, offline=True)
    assert counted is not None and counted.num_rows == sum(len(list(source.rows())) for source in sources) > 0
