"""Templates in a child process under limits, several processes, and processes that die (RELIABILITY 26, 27, 49)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli import faults
from roundpipe_cli.data import processes
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.processes import EncoderPool
from roundpipe_cli.data.row_chunks import RowEncoder
from roundpipe_cli.data.rows import RawRow
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.tokenized import TokenizedDataset
from roundpipe_cli.errors import InternalError, NoProgressError, RefusedError, ResourceError, RoundpipeError
from roundpipe_cli.watchdog import watching
from tests.data.test_data_dataset import CHATML, byte_tokenizer, write_rows
from tests.support.covering import swept

ROW = {"prompt": "Hi", "completion": "Yo"}


def build(path: Path, template: str = CHATML, num_workers: int | None = None, **options: object) -> TokenizedDataset:
    settings = DataSettings((DatasetSpec(str(path)),), 1000, **options)  # type: ignore[arg-type]
    return build_dataset(settings, byte_tokenizer(template=template), num_workers=num_workers)


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ ''.__class__.__mro__ }}", "rows cannot be used"),
        ("{{ cycler.__init__.__globals__.os.system('touch x') }}", "rows cannot be used"),
        ("{{ messages.append(1) }}", "rows cannot be used"),
        ("{% include '/etc/passwd' %}", "rows cannot be used"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "rows cannot be used"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "too long"),
        ("{{ 9 ** (9 ** 9) }}", "too long"),  # in C code
        ("{{ 'x' * (10 ** 11) }}", "too much memory"),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
            "too much memory",
        ),
        ("{#" + "x" * (10 * 1024**2) + "#}", "too large"),
        ("{% for m in messages %}", "not valid Jinja"),
    ],
    ids=lambda text: text[:40],
)
def test_hostile_templates_are_refused(tmp_path: Path, monkeypatch: Any, template: str, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert processes.MAX_RENDER_S <= 2 and processes.MAX_MEMORY_BYTES <= 2 * 1024**3, "a run's limits; less is enough"
    # on a busy machine memory takes long to fill: time must not be what ends it
    monkeypatch.setattr(processes, "MAX_RENDER_S", 60.0 if what == "too much memory" else 0.5)
    monkeypatch.setattr(processes, "MAX_MEMORY_BYTES", 256 * 1024**2)
    path = write_rows(tmp_path / "rows.jsonl", [ROW])
    before = children()
    with pytest.raises(RoundpipeError) as caught:
        build(path, template)
    assert caught.value.exit_code == 2 and what in str(caught.value)
    assert "root:" not in str(caught.value) and len(str(caught.value)) < 2000
    assert sorted(item.name for item in tmp_path.iterdir()) == ["rows.jsonl"], "nothing ran"
    assert children() == before


def test_a_slow_template_is_not_a_bad_row_that_may_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_RENDER_S", 0.5)
    template = CHATML + "{% if messages[0].content == 'slow' %}{{ 9 ** (9 ** 9) }}{% endif %}"
    path = write_rows(tmp_path / "rows.jsonl", [ROW, {"prompt": "slow", "completion": "x"}])
    with pytest.raises(RoundpipeError, match="takes too long") as caught:
        build(path, template, on_bad_row="skip")
    assert caught.value.exit_code == 2


def test_a_row_that_takes_too_much_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_MEMORY_BYTES", 256 * 1024**2)
    rows = [ROW, {"prompt": "Hi", "completion": "a b " * 2_500_000}]
    with pytest.raises(ResourceError, match=r"rows.jsonl: row 2: a tokenising process"):
        build(write_rows(tmp_path / "rows.jsonl", rows), num_workers=1)


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    rows = [{"prompt": f"Q{n}", "completion": "a" * (n % 97)} for n in range(1300)]  # every 97th is bad
    path = write_rows(tmp_path / "rows.jsonl", rows)
    one = build(path, num_workers=1, on_bad_row="skip")
    several = build(path, num_workers=3, on_bad_row="skip", long_rows="drop")  # another key: not the cache
    assert several.num_cached == one.num_cached == 0
    assert several.content_hash == one.content_hash
    assert one.rows.row_ids.tolist() == [n for n in range(1300) if n % 97]
    assert several.report.sources[0].bad_rows == one.report.sources[0].bad_rows
    assert [several.where(n) for n in (1, 700, 1299)] == [one.where(n) for n in (1, 700, 1299)]


@pytest.mark.parametrize("number", [signal.SIGKILL, *swept([signal.SIGSEGV])])
def test_a_killed_process_is_one_clear_error(tmp_path: Path, monkeypatch: Any, number: signal.Signals) -> None:
    set_fault(monkeypatch, "tokenize:slow=20")
    path = write_rows(tmp_path / "rows.jsonl", [ROW])
    before = children()

    def kill() -> None:
        deadline_s = time.monotonic() + 30
        while not (started := children() - before) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for pid in started:
            os.kill(pid, number)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(ResourceError, match=f"ended by {number.name}") as caught:
            build(path)
    finally:
        killer.join()
    assert "memory runs out" in (caught.value.problems[0].found or "")
    assert children() == before


@pytest.mark.parametrize("num_bytes", [10, 8 * 1024**2])
def test_a_stopped_process_is_one_error_within_the_watchdog(num_bytes: int) -> None:
    """Story: rows for a process that was stopped filled its pipe, and nobody watched that wait."""
    settings = DataSettings((DatasetSpec("rows.jsonl"),), 1000)
    row, before = RawRow(1, {"prompt": "x" * num_bytes, "completion": "y"}), children()
    with (
        pytest.raises(NoProgressError, match="no progress for 0.5 s"),
        watching(0.5),
        EncoderPool(settings, byte_tokenizer(template=CHATML), 1) as pool,
    ):
        pool.ends()
        (child,) = children() - before
        os.kill(child, signal.SIGSTOP)
        list(pool.encode([(None, [row], False)]))
    assert children() == before


def test_a_process_that_is_killed_while_it_answers_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: half an answer was "a bug of roundpipe": `got end of file during message`."""
    read, before = Connection.recv, children()

    def kill_then_read(connection: Connection) -> object:
        if os.getpid() == ours:
            time.sleep(0.3)  # the pipe is full by then
            for child in children() - before:
                os.kill(child, signal.SIGKILL)
        return read(connection)

    ours = os.getpid()
    monkeypatch.setattr(RowEncoder, "encode", lambda *_, **__: b"x" * 8 * 1024**2)  # the child has it by its fork
    with EncoderPool(DataSettings((DatasetSpec("rows.jsonl"),), 1000), byte_tokenizer(template=CHATML), 1) as pool:
        pool.ends()
        monkeypatch.setattr(Connection, "recv", kill_then_read)
        with pytest.raises(ResourceError, match="ended by SIGKILL"):
            list(pool.encode([(None, [RawRow(1, ROW)], False)]))
    assert children() == before


@pytest.mark.parametrize("fails", [False, True])
def test_a_free_process_gets_the_next_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Story: it waited for the oldest chunk. Four for each are given out; results and errors come in their order."""
    num_ahead = 2 * processes.CHUNKS_AHEAD
    awaited = tmp_path / str(3 if fails else num_ahead - 1)

    def encode(_: RowEncoder, row_format: object, rows: list[RawRow], *, count_only: bool) -> int:
        number, deadline_s = rows[0].number, time.monotonic() + 20
        while number == 0 and not awaited.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        (tmp_path / str(number)).touch()
        if fails and number == 3:
            raise RefusedError("the third")
        return number

    taken, results = list[int](), list[object]()

    def chunks() -> Iterator[processes.Chunk]:
        for number in range(30):
            assert number < len(results) + num_ahead, "memory is bounded"
            taken.append(number)
            yield None, [RawRow(number, ROW)], False

    monkeypatch.setattr(RowEncoder, "encode", encode)  # children have it by their fork
    before, started_s = children(), time.monotonic()
    with EncoderPool(DataSettings((DatasetSpec("rows.jsonl"),), 1000), byte_tokenizer(), 2) as pool:
        try:
            for result in pool.encode(chunks()):
                results.append(result)
                if len(results) == 1 and not fails:
                    assert taken == list(range(num_ahead))
        except RefusedError as error:
            assert taken == [0, 1, 2, 3] and str(error) == "the third" and results == [0, 1, 2]
        else:
            assert not fails and results == list(range(30))
    assert time.monotonic() - started_s < 15 and children() == before


def set_fault(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The fault points read the environment once; this process may have done so."""
    monkeypatch.setenv(faults.ENVIRONMENT_VARIABLE, text)
    monkeypatch.setattr(faults, "_rules_of", None)


def test_an_error_in_a_process_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_fault(monkeypatch, "tokenize:raise=FaultExit")
    path = write_rows(tmp_path / "rows.jsonl", [ROW])
    with pytest.raises(InternalError, match="tokenising failed: FaultExit") as caught:
        build(path)
    assert "faults.py" in (caught.value.problems[0].found or "")


@pytest.mark.parametrize("row", [ROW, {"text": "Hi"}], ids=str)
def test_a_row_of_many_megabytes_is_a_bad_row(tmp_path: Path, row: dict[str, str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row, row | {next(iter(row)): "x" * (17 * 1024**2)}])
    ((number, fault),) = build(path, on_bad_row="skip").report.sources[0].bad_rows
    assert (number, fault.what, fault.expected) == (2, "the row is too large", "at most 16777216")


def test_the_date_that_templates_write_is_always_the_same(tmp_path: Path) -> None:
    template = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML
    dataset = build(write_rows(tmp_path / "rows.jsonl", [ROW]), template)
    text = byte_tokenizer().decode(dataset.rows[0].input_ids)
    assert text.startswith("Today: 26 Jul 2024\n<s>user")
    assert any("today's date" in notice for notice in dataset.notices)


def test_a_signal_in_a_fork_leaves_no_child_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would wait for it when it leaves, and it waits for work."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    start = BaseProcess.start

    def start_and_stop(process: BaseProcess) -> None:
        start(process)
        signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(BaseProcess, "start", start_and_stop)
    earlier, before = children(), signal.signal(signal.SIGHUP, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            build(write_rows(tmp_path / "rows.jsonl", [ROW]))
        assert children() == earlier
    finally:
        signal.signal(signal.SIGHUP, before)
