"""The output directory: one run at a time, left-overs removed, an earlier run never overwritten."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli import faults
from roundpipe_cli.errors import NoCheckpointError, OutputInUseError, RefusedError, ResourceError
from roundpipe_cli.files import disk_error
from roundpipe_cli.train.checkpoint.output_dir import (
    OutputDir,
    RunState,
    check_start,
    list_checkpoints,
    read_state,
    refuse_if_held,
)
from roundpipe_cli.train.checkpoint.reading import load_newest
from roundpipe_cli.train.checkpoint.rewind import truncate_metrics
from roundpipe_cli.train.monitor.metrics_file import MetricsFile
from roundpipe_cli.train.result.finish import write_best
from tests.support.checkpoints import save_groups
from tests.support.os_calls import mounted

_NUM_ELEMENTS = 20_000


def _save(folder: Path, step: int, keep: int = 2) -> None:
    """All values of a checkpoint are its step, so a mixture of two would show."""
    tensors = {f"block.{layer}": torch.full((_NUM_ELEMENTS,), float(step)) for layer in range(3)}
    save_groups(folder, step, {"masters": tensors, "moments": tensors}, {"step": step}, keep=keep)


def test_states_with_and_without_resume(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(NoCheckpointError) as nothing, OutputDir(folder, resume=True):
        pass
    assert nothing.value.exit_code == 6 and not folder.exists()
    with pytest.raises(RefusedError), OutputDir(tmp_path / "outputs" / "x"):
        raise RefusedError("a model that is not there")
    assert not list(tmp_path.iterdir()), "nor what it was made in"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(NoCheckpointError), OutputDir(folder, resume=True):
        pass
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]

    with OutputDir(folder):
        _save(folder, 3)
    assert read_state(folder) is RunState.HAS_CHECKPOINT
    with pytest.raises(RefusedError, match=r"(?s)step-00000003.*--resume.*output_dir=") as refused, OutputDir(folder):
        pass
    assert refused.value.exit_code == 2
    with OutputDir(folder, resume=True) as output:
        assert output.state is RunState.HAS_CHECKPOINT

    (folder / "report.json").write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert check_start(folder, resume=True) is RunState.FINISHED
    with pytest.raises(RefusedError, match=r"(?s)report.json.*--resume.*output_dir="):
        check_start(folder, resume=False)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_leftovers_are_removed_only_where_they_are_ours(tmp_path: Path) -> None:
    (tmp_path / ".tmp-of-another-tool").mkdir()
    with OutputDir(tmp_path):
        pass
    for name in (".tmp-step-00000004", ".del-step-00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "masters.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-recipe.yaml-0123").write_bytes(b"half")
    (tmp_path / ".del-link").symlink_to(tmp_path.parent)
    with OutputDir(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".roundpipe", ".roundpipe.lock", ".tmp-of-another-tool"]
    assert tmp_path.parent.is_dir()
    for damage in (b"", b"[" * 10_000, b'{"not_ours": 3}', b"[]"):  # Story: then everything was ours
        (tmp_path / ".roundpipe").write_bytes(damage)
        with OutputDir(tmp_path):
            assert (tmp_path / ".tmp-of-another-tool").is_dir(), damage


def test_a_lock_that_names_no_process_is_not_a_bug(tmp_path: Path) -> None:
    """Story: a process id beyond the system's numbers was an OverflowError."""
    with OutputDir(tmp_path):
        (tmp_path / ".roundpipe.lock").write_text(json.dumps({"pid": 2**70, "host": os.uname().nodename}))
        with pytest.raises(OutputInUseError, match=f"process unknown|process {2**70}"), OutputDir(tmp_path):
            pass


def test_a_file_in_the_way_and_a_name_that_is_too_long(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("")
    names = {out: out, out / "deeper": out}
    names |= dict.fromkeys((tmp_path / ("x" * 300), tmp_path / ("y/" * 3000)), "File name too long")
    for path, said in names.items():
        with pytest.raises(RefusedError, match="output_dir=") as caught, OutputDir(path):
            pass
        assert str(said) in str(caught.value)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=64k"):
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        for path in (tmp_path, tmp_path / "new"):
            with pytest.raises(RefusedError, match=r"(?s)Read-only.*output_dir=") as caught, OutputDir(path):
                pass
            assert caught.value.exit_code == 2 and str(path) in str(caught.value)


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    """The real thing: another interpreter, killed; afterwards the lock is gone, though a child of it lives on."""
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from roundpipe_cli.train.checkpoint.output_dir import OutputDir\n"
        "with OutputDir(Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    os.write(1, b'%d\\n' % child)\n"  # the child too, with 0: once it runs it has let go of the lock
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = max(int(holder.stdout.readline()) for _ in range(2))
        try:
            for take in (OutputDir(tmp_path).__enter__, partial(refuse_if_held, tmp_path)):  # the second loads no torch
                with pytest.raises(OutputInUseError, match=f"process {holder.pid} on host ") as caught:
                    take()
                assert caught.value.exit_code == 3 and os.uname().nodename in str(caught.value)
            holder.kill()
            holder.wait()
            refuse_if_held(tmp_path)
            with OutputDir(tmp_path):
                os.kill(child, 0)  # still there
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)
    (tmp_path / ".roundpipe.lock").unlink()
    refuse_if_held(tmp_path)
    os.mkfifo(tmp_path / ".roundpipe.lock")
    refuse_if_held(tmp_path)


@pytest.mark.parametrize("by_killed", [False, True])
def test_a_holder_that_has_just_begun_is_named(tmp_path: Path, by_killed: bool) -> None:
    """Of two runs that start at once, one looks before the other has put its name into the lock's file."""
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with OutputDir(tmp_path):
        lock = tmp_path / ".roundpipe.lock"
        name = json.loads(lock.read_text())
        lock.write_text(json.dumps({**name, "pid": gone.pid}) if by_killed else "")
        threading.Timer(0.1, lock.write_text, [json.dumps(name)]).start()
        with pytest.raises(OutputInUseError, match=f"process {os.getpid()} on host "):
            OutputDir(tmp_path).__enter__()


@pytest.mark.parametrize("nth", range(1, 7))
def test_sigkill_at_each_fault_point_of_a_save(tmp_path: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points 1-3 lie before a file each, 4 before the rename, 5 before the removal of the oldest; there is no 6th."""
    for step in (1, 2):
        _save(tmp_path, step)

    def save() -> None:
        monkeypatch.setenv(faults.ENVIRONMENT_VARIABLE, f"ckpt_writer:kill:step=3:nth={nth}")
        faults.load_faults()
        _save(tmp_path, 3)

    process = multiprocessing.get_context("fork").Process(target=save)
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if nth <= 5 else 0)
    assert load_newest(tmp_path, warn=pytest.fail).step == (2 if nth <= 4 else 3)
    assert len(list_checkpoints(tmp_path)) == (3 if nth == 5 else 2)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems of 2 to 4 checkpoints: whichever save fails, the ones before stay good; with space it goes on."""
    from roundpipe_cli.train.checkpoint import writing as store

    for look_before in (True, False):
        if not look_before:  # another program fills the disk after we looked
            monkeypatch.setattr(store, "require_free_bytes", lambda *args, **how: None)
        for size_kib in range(1000, 2000, 100):  # a checkpoint has 470 KiB
            with mounted(tmp_path, f"size={size_kib}k"):
                saved = 0
                with pytest.raises(ResourceError) as caught, OutputDir(tmp_path):
                    for step in range(1, 10):
                        _save(tmp_path, step, keep=5)
                        saved = step
                assert caught.value.exit_code == 5 and f"step-{saved + 1:08d}" in str(caught.value) or look_before
                assert str(tmp_path) in str(caught.value) and str(caught.value).count(" bytes)") == 2
                assert load_newest(tmp_path, warn=pytest.fail).step == saved >= 1
                assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")]
                subprocess.run(["mount", "-o", "remount,size=8m", tmp_path], check=True)
                with OutputDir(tmp_path, resume=True):
                    _save(tmp_path, saved + 1, keep=5)
                assert load_newest(tmp_path).step == saved + 1


def test_a_disk_that_fails_under_the_best_weights_names_them(tmp_path: Path) -> None:
    setup: Any = None  # it does not come to the weights
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="could not write the best weights"):
        write_best(setup, tmp_path / "file" / "best", {})


HUGE = f'{{"step": 0, "loss": {10**400}}}\n'  # no float holds it


def _rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 1.5}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("text", "step", "expected"),
    [
        (_rows(0, 1, 2, 3), 2, _rows(0, 1)),
        (_rows(0, 1, 2, 3), 0, ""),
        (_rows(0, 1) + '{"step": 2, "lo', 9, _rows(0, 1)),
        (_rows(0, 1) + '{"step": 2, "loss": 1.5}', 9, _rows(0, 1)),
        (_rows(0, 1, 2, 1, 2, 3), 3, _rows(0, 1, 2)),
        (_rows(0) + "\0\0\0\n[1]\n" + _rows(1), 3, _rows(0, 1)),
        ("", 3, ""),
        (HUGE, 1, HUGE),
    ],
)
def test_metrics_are_cut_to_the_resumed_step(tmp_path: Path, text: str, step: int, expected: str) -> None:
    path = tmp_path / "metrics.jsonl"
    assert truncate_metrics(path, step) == {} and not path.exists()  # no metrics yet
    path.write_text(text)
    assert len(truncate_metrics(path, step)) == expected.count("\n")
    assert path.read_text() == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "report.json", "recipe.yaml", ".roundpipe"])
@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
def test_a_pipe_or_device_under_a_run_files_name_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    """Opening a pipe waited for ever, rows went to whatever device a link led to, a link to itself was our bug."""
    folder = tmp_path / "out"
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/null" if kind == "device" else name)
    for number in range(4):  # links to nothing, before and behind it
        (folder / f"{number}.jsonl").symlink_to("nowhere")
    with pytest.raises(RefusedError, match="no regular file") as caught, OutputDir(folder):
        pass
    assert name in str(caught.value) and os.path.lexists(folder / name)


@pytest.mark.parametrize("what", ["folder moved", "folder removed", "file removed", "file replaced"])
def test_rows_are_not_written_to_a_file_that_is_gone(tmp_path: Path, what: str) -> None:
    """A run went on, and its metrics were lost with the folder that was removed or moved."""
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.add({"step": 1})
        if what == "folder moved":
            folder.rename(tmp_path / "elsewhere")
        elif what == "folder removed":
            shutil.rmtree(folder)
        else:
            path.unlink()
        if what == "file replaced":
            path.write_text("")
        with pytest.raises(ResourceError, match="output directory was" if "folder" in what else "metrics.jsonl was"):
            file.add({"step": 2})
    assert folder.exists() == ("file" in what)


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    """That a line which was cut is no row: `truncate_metrics`."""
    with mounted(tmp_path, "size=4k"), MetricsFile(tmp_path / "metrics.jsonl") as file:
        with pytest.raises(ResourceError, match="could not write the metrics of step") as caught:
            for step in range(1000):
                file.add({"step": step, "loss": 1.5})
        assert caught.value.exit_code == 5 and "metrics.jsonl" in str(caught.value) and "--resume" in str(caught.value)
    with MetricsFile(Path("/dev/null")) as file, pytest.raises(ResourceError, match=r"could not write(.|\n)*--resume"):
        file.sync()  # which this device cannot


@pytest.mark.parametrize(
    ("number", "inodes", "words"),
    [
        (errno.EFBIG, (100, 50), "ulimit -f"),
        (errno.ENOSPC, (100, 0), "100 inodes are taken"),
        (errno.ENOSPC, (0, 0), "free some space"),  # a file system without inodes
        (errno.EROFS, (100, 50), "make the folder writable"),
        (errno.EIO, (100, 50), "dmesg"),
    ],
)
def test_a_failed_write_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, inodes: tuple[int, int], words: str
) -> None:
    """A limit on files and a disk without inodes were called full, with gigabytes free."""
    real = os.statvfs(tmp_path)
    values = [*real[:5], *inodes, inodes[1], *real[8:]]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    assert words in str(disk_error(OSError(number, os.strerror(number)), tmp_path, "a file"))


def test_unset_they_do_nothing(ask: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError(f"an inert fault point acted: {args}")

    monkeypatch.delenv(faults.ENVIRONMENT_VARIABLE, raising=False)
    faults._rules_of = None
    for holder, name in ((faults, "_act"), (faults, "_parse"), (faults.time, "sleep"), (faults.os, "kill")):
        monkeypatch.setattr(holder, name, forbidden)
    assert {faults.fault(point, step=step, microbatch=0) for point in faults.POINTS for step in range(3)} == {None}
    assert faults._rules_of == {}


@pytest.mark.parametrize("text", ["comptue:raise", "compute:explode", "compute:slow=x", "compute:nan:step=a"])
def test_nonsense_is_refused(ask: Callable[[str], None], text: str) -> None:
    with pytest.raises(RefusedError, match="ROUNDPIPE_FAULT"):
        ask(text)
