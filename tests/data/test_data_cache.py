"""Tokens of a source are made once and kept under a key of all that they depend on (RELIABILITY 43)."""

from __future__ import annotations

import json
import os
import pwd
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roundpipe_cli import faults
from roundpipe_cli.cache import CACHE_VARIABLE, cache_folder
from roundpipe_cli.cli import checks
from roundpipe_cli.data import dataset as dataset_module
from roundpipe_cli.data import dataset as keys
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.row_chunks import ChunkResult, SourceReport
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.shards import ShardWriter, _content_sum, file_sums
from roundpipe_cli.data.tokenized import TokenizedDataset
from roundpipe_cli.errors import RefusedError
from tests.data.test_data_dataset import CHATML, build, byte_tokenizer, write_rows
from tests.support.covering import swept
from tests.support.e2e import STAGES_OF_TWO, launch, make_model, make_workspace

ROWS = [{"prompt": f"Q{n}", "completion": f"A{n}"} for n in range(20)]

OLD_DIGESTS = (
    "2d0616df40902f5d1241fb0cdebc5dbe36e52815294f99b8072b05529b405e1c",
    "a439f90445bed91056489b1b1049cc074187a57f6c749462d0d17b0375442b28",
)


def shards() -> list[Path]:
    return sorted(cache_folder("tokens").iterdir())


def tokens(dataset: TokenizedDataset) -> list[tuple[int, list[int], list[int]]]:
    return [(row.row_id, row.input_ids.tolist(), row.labels.tolist()) for row in dataset.rows]


def test_the_second_time_is_taken_from_the_cache(tmp_path: Path) -> None:
    rows: list[Any] = [*ROWS, {"prompt": "x" * 200, "completion": "y"}, {"prompt": 3}]
    rows.append({"prompt": "</s>", "completion": "z"})
    path = write_rows(tmp_path / "rows.jsonl", rows)
    first = build(path, on_bad_row="skip", max_seq_length=100)
    second = build(path, on_bad_row="skip", max_seq_length=100)
    assert (first.num_cached, second.num_cached) == (0, 1)
    assert tokens(first) == tokens(second)
    assert first.report == second.report and first.notices == second.notices and len(first.notices) == 5
    assert first.content_hash == second.content_hash
    assert [first.where(row_id) for row_id in (0, 22)] == [second.where(row_id) for row_id in (0, 22)]
    assert len(shards()) == 1 and shards()[0].parent.stat().st_mode & 0o077 == 0


def test_another_value_of_anything_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    build(path)
    stamp = path.stat()
    changes: list[dict[str, Any]] = [
        *({"max_seq_length": 999}, {"long_rows": "drop"}, {"train_on_inputs": True}, {"on_bad_row": "skip"}),
        *({"chat_template": CHATML + " "}, {"type": "prompt_completion"}, {"split": "train[:19]"}),
        *({"tokenizer": byte_tokenizer(bos=True)}, {"tokenizer": byte_tokenizer(trim=True)}),
        {"columns": {"prompt": "completion", "completion": "prompt"}},
    ]
    patches = {"__version__": "9.9", "version": lambda name: "9.9", "reader_digest": lambda: "other"}
    for number, change in enumerate([*changes, *patches, "content"], 1):
        if change == "content":  # same size, same time
            path.write_bytes(path.read_bytes().replace(b"A7", b"B7"))
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        with monkeypatch.context() as patch:
            if isinstance(change, str) and change in patches:
                patch.setattr(keys, change, patches[change])
            assert build(path, **(change if isinstance(change, dict) else {})).num_cached == 0, change
            assert len(shards()) == number + 1


def test_a_file_that_is_whole_in_another_slice_keeps_its_tokens(tmp_path: Path) -> None:
    """Story: the slice of all files was part of each file's key."""
    write_rows(tmp_path / "a.jsonl", ROWS)
    write_rows(tmp_path / "b.jsonl", ROWS)
    cached = [build(tmp_path / "*.jsonl", split=split).num_cached for split in ("train[:25]", "train[:30]", "all[:30]")]
    assert cached == [0, 1, 2]


@pytest.mark.parametrize("name", ["input_ids.bin", "rows.bin", "shard.json", *swept(["weights.bin", "lengths.bin"])])
def test_a_cached_file_that_is_not_as_it_was_is_told_and_made_again(tmp_path: Path, name: str) -> None:
    """Story: sizes were compared, not contents, so a flipped bit of an id was another token to train on."""
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    expected, draw = tokens(build(path)), random.Random(name)
    for damage in ("flipped", "flipped", "gone", "short", "long", "empty", "device", "pipe"):
        file = shards()[0] / name
        data = bytearray(file.read_bytes())
        if damage == "flipped":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes({"flipped": data, "short": data[:-1], "long": data + b"}"}.get(damage, b""))
        if damage in ("gone", "device", "pipe"):
            file.unlink()
        if damage == "device":  # which is read without an end
            file.symlink_to("/dev/zero")
        if damage == "pipe":
            os.mkfifo(file)
        again = build(path)
        assert again.num_cached == 0 and tokens(again) == expected, damage
        if damage == "flipped":
            assert "the cached tokens of" in again.notices[0] and "made again" in again.notices[0]
            assert name in again.notices[0] or name == "shard.json"
        whole = build(path)
        assert whole.num_cached == 1 and not [text for text in whole.notices if "damaged" in text]


def test_cached_ids_outside_the_vocabulary_are_made_again(tmp_path: Path) -> None:
    """Also where the checksums vouch for them: a faulty writer, not a faulty disk."""
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    expected = tokens(build(path))
    for wrong in (259, -1):
        folder = shards()[0]
        ids = np.fromfile(folder / "input_ids.bin", dtype=np.int32)
        ids[3] = wrong
        ids.tofile(folder / "input_ids.bin")
        content = json.loads((folder / "shard.json").read_text())["content"]
        content["sums"] = file_sums(folder)
        document = {"content": content, "checksum": _content_sum(content)}
        (folder / "shard.json").write_text(json.dumps(document))
        again = build(path)
        assert tokens(again) == expected and "a vocabulary of 259" in again.notices[0]


def test_a_large_cache_is_checked_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "TELL_EVERY_S", 0.0)
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    build(path)
    told: list[str] = []
    build_dataset(DataSettings((DatasetSpec(str(path)),), 1000), byte_tokenizer(), told.append)
    assert told[-1] == "checking the cached tokens: 100 %"


def test_a_killed_run_leaves_no_half_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_rows(tmp_path / "rows.jsonl", ROWS), cache_folder("tokens")
    with monkeypatch.context() as slow:
        slow.setenv(faults.ENVIRONMENT_VARIABLE, "tokenize:slow=60")
        slow.setattr(faults, "_rules_of", None)
        pid = os.fork()
        if not pid:
            try:
                build(path)
            finally:
                os._exit(1)
    deadline_s = time.monotonic() + 60
    while not list(cache.glob("*/input_ids.bin")) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert [entry.name[:5] for entry in cache.iterdir()] == [".tmp-"]
    assert build(path).num_cached == 0 and len([entry for entry in shards() if entry.name[0] != "."]) == 1


def test_two_programs_at_once_fill_one_cache(tmp_path: Path) -> None:
    """Each may find the other's shard half made, or made meanwhile."""
    path, pids = write_rows(tmp_path / "rows.jsonl", ROWS * 30), []
    for _ in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            code = 1
            try:
                code = 0 if len(build(path).rows) == 600 else 2
            finally:
                os._exit(code)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    assert len(shards()) == 1 and build(path).num_cached == 1


def test_without_a_cache_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    expected = tokens(build(path))
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    before = set(Path("/tmp").glob("roundpipe-tokens-*"))
    dataset = build(path)
    assert tokens(dataset) == expected and dataset.num_cached == 0
    assert set(Path("/tmp").glob("roundpipe-tokens-*")) <= before, "mapped, and gone"


def test_rows_that_are_refused_are_not_kept(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [*ROWS, {"prompt": 3}])
    for _ in range(2):
        with pytest.raises(RefusedError, match="1 of 21 rows cannot be used"):
            build(path)
        assert not shards()


def test_old_shards_and_what_killed_runs_left_are_removed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    build(path)
    (old,) = shards()
    left, foreign = old.parent / ".tmp-left", old.parent / "mine"
    left.mkdir()
    foreign.mkdir()
    for folder in (old, left, foreign):
        long_ago_s = time.time() - 40 * 24 * 3600
        os.utime(folder, (long_ago_s, long_ago_s))
    build(path, max_seq_length=500)
    assert not old.exists() and not left.exists() and foreign.exists()


def without_a_home() -> None:
    """What a process sees that runs under a number which /etc/passwd does not know, as in many containers."""

    def unknown(number: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    os.environ.pop("HOME", None)
    pwd.getpwuid = unknown


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model", num_hidden_layers=2)
    work = make_workspace(tmp_path / "work", model, max_steps=1, **STAGES_OF_TWO)
    nowhere = {CACHE_VARIABLE: "", "XDG_CACHE_HOME": ""}
    launch(work, "finetune", "recipe.yaml", environment=nowhere, before=without_a_home).finish().expect(0)
    monkeypatch.setenv("HOME", "to be restored")
    monkeypatch.setattr(pwd, "getpwuid", pwd.getpwuid)
    without_a_home()
    assert [check.name for check in checks._disk()] == ["disk, outputs", "disk, models"], "of `doctor`"
    assert (work / "out" / "adapter_model.safetensors").exists()
    assert not (work / "~").exists()


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_rows_without_weights_have_the_digests_that_earlier_checkpoints_hold(factor: float) -> None:
    """Of pairs; seen with the version that kept a byte a token."""
    trained = np.array([0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=np.float32) * np.float32(factor)
    places, lengths = np.array([[0, 0], [0, 0], [1, 1], [1, 1]]), np.array([2, 3, 3, 1])
    report = SourceReport(rows_read=2)
    with ShardWriter("key", 2) as writer:
        writer.add(ChunkResult(places, lengths, np.arange(9, dtype=np.int32), trained, report), 0)
        digests = writer.finish(report, to_cache=False).digests
    assert (digests == OLD_DIGESTS) == (factor == 1)
