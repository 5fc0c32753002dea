"""Saving and loading, beside the training too: what comes back is what went in, and what is damaged is never used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from roundpipe_cli import files as durable
from roundpipe_cli.errors import InternalError, NoCheckpointError, ResourceError, RoundpipeError
from roundpipe_cli.events import CheckpointSaved, Event
from roundpipe_cli.train.checkpoint import reading
from roundpipe_cli.train.checkpoint import writing as store
from roundpipe_cli.train.checkpoint.manifest import DamagedError, read_own_json
from roundpipe_cli.train.checkpoint.output_dir import list_checkpoints
from roundpipe_cli.train.checkpoint.reading import Checkpoint, kept_step_of, load_newest
from roundpipe_cli.train.checkpoint.writing import DTYPE_NAMES, Saver, Snapshot, State, _Ring
from tests.support.checkpoints import save_groups
from tests.support.os_calls import replace_os_call


def _group(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "flag": torch.tensor([True, False, True]),
        "block.0.weight": torch.randn(7, 5, generator=generator),
        "block.0.half": torch.randn(3, 3, generator=generator).bfloat16(),
        "step": torch.tensor(step),
    }


def _save(folder: Path, step: int, keep: int = 2) -> Path:
    meta = {"cursor": step * 8, "loss_hex": (1 / (step + 1)).hex()}
    return save_groups(folder, step, {"masters": _group(step), "moments": _group(step + 1000)}, meta, keep=keep)


def _assert_is(loaded: Checkpoint, step: int) -> None:
    assert loaded.step == step
    assert loaded.meta == {"cursor": step * 8, "loss_hex": (1 / (step + 1)).hex()}
    assert set(loaded.tensors) == {"masters", "moments"}
    for group, expected in (("masters", _group(step)), ("moments", _group(step + 1000))):
        tensors = loaded.tensors[group]
        assert set(tensors) == set(expected)
        for name, tensor in expected.items():
            assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), (group, name)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_of_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for dtype in DTYPE_NAMES.keys() - {torch.float8_e8m0fnu}:  # which has no zero
        for shape in ((), (0, 4), (3,), (2, 3, 5)):
            values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            tensors[f"{dtype}{shape}"] = values.to(dtype)
    tensors["transposed"] = torch.randn(4, 6).t()
    tensors["nan"] = torch.tensor([float("nan"), float("inf"), -0.0])
    path = save_groups(tmp_path, 1, {"all": tensors}, {}, keep=2)

    with safe_open(str(path / "all.safetensors"), framework="pt") as file:  # the library itself reads it
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert read.dtype == tensor.dtype and read.shape == tensor.shape
            as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (read, tensor)]
            assert torch.equal(*as_bytes), name
    assert set(load_newest(tmp_path).tensors["all"]) == set(tensors)


def test_retention_is_by_step_whatever_the_clock_says(tmp_path: Path) -> None:
    """`save_total_limit` of them."""
    for keep in (2, 3, 5):
        folder = tmp_path / str(keep)
        folder.mkdir()
        for step in range(10, 90, 10):
            path = _save(folder, step, keep)
            os.utime(path, (1e9 - step, 1e9 - step))  # newer checkpoints look older
            expected = list(range(step, 0, -10))[:keep]
            assert [other for other, _ in list_checkpoints(folder)] == expected
            _assert_is(load_newest(folder), step)


def _failing(*args: object) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_old_checkpoints_that_cannot_be_removed_or_listed_are_only_reported(tmp_path: Path, monkeypatch: Any) -> None:
    told: list[str] = []
    for step in (1, 2):
        _save(tmp_path, step)
    lists = iter((store.list_checkpoints, _failing))  # the first is the commit's
    for step, name, failing, said in (
        (3, "remove_tree", _failing, ".del-step-00000001"),
        (4, "list_checkpoints", lambda folder: next(lists)(folder), "could not look for old checkpoints"),
    ):
        monkeypatch.setattr(store, name, failing)
        save_groups(tmp_path, step, {"masters": _group(step)}, {}, keep=2, warn=told.append)
        monkeypatch.undo()
        assert len(told) == step - 2 and said in told[-1] and load_newest(tmp_path).step == step
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4, 3, 2]
    _save(tmp_path, 5)
    assert _names(tmp_path) == ["step-00000004", "step-00000005"]


def test_resuming_from_an_earlier_one_leaves_the_abandoned_future(tmp_path: Path) -> None:
    """Story: resumed from 20 by name while 30 and 40 existed, saved 25, killed; `--resume` then took 40."""
    for step in (20, 30, 40):
        _save(tmp_path, step, keep=5)
    assert load_newest(tmp_path, path=tmp_path / "step-00000020").step == 20
    _save(tmp_path, 25, keep=5)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [25, 20]
    _assert_is(load_newest(tmp_path), 25)


def test_one_that_a_run_removes_while_it_is_read_is_not_called_damaged(tmp_path: Path, monkeypatch: Any) -> None:
    """Story: `export` of a checkpoint that was rotated said that nothing was deleted."""

    def load(folder: Path, step: int) -> Checkpoint:
        shutil.rmtree(folder)
        raise DamagedError(folder / "moments.safetensors", "no such file", "a file")

    path, said = _save(tmp_path, 5), list[str]()
    monkeypatch.setattr(reading, "_load", load)
    with pytest.raises(NoCheckpointError, match="take a newer one"):
        load_newest(tmp_path, path, said.append)
    assert "was removed meanwhile" in said[0]


def test_saving_a_step_again(tmp_path: Path) -> None:
    first = _save(tmp_path, 5)
    inode = first.stat().st_ino
    assert _save(tmp_path, 5).stat().st_ino == inode  # the same state: kept
    save_groups(tmp_path, 5, {"masters": _group(9)}, {"changed": True}, keep=2)
    assert load_newest(tmp_path).meta == {"changed": True}
    assert _names(tmp_path) == ["step-00000005"]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    _save(folder, 10)
    _save(folder, 20)
    return folder


def _falls_back(folder: Path, *needles: str) -> None:
    warnings: list[str] = []
    before = sorted(folder.rglob("*"))
    _assert_is(load_newest(folder, warn=warnings.append), 10)
    assert len(warnings) == 1, warnings
    assert all(needle in warnings[0] for needle in needles), (needles, warnings[0])
    assert sorted(folder.rglob("*")) == before  # nothing deleted


def test_truncations(two: Path) -> None:
    draw = random.Random(0)
    pristine = two / "step-00000020"
    files = sorted(pristine.iterdir())
    for _ in range(150):
        path = draw.choice(files)
        data = path.read_bytes()
        size = draw.randrange(len(data))
        path.write_bytes(data[:size])
        needles = (path.name,) if path.name == "manifest.json" else (path.name, f"{size} bytes", f"{len(data)} bytes")
        if path.name == "manifest.json" and size == len(data) - 1:
            _assert_is(load_newest(two), 20)  # only the final line break is gone: harmless
        else:
            _falls_back(two, *needles)
        path.write_bytes(data)
    _assert_is(load_newest(two), 20)


def test_bit_flips(two: Path) -> None:
    """Detected or harmless. A flip of the manifest's version is taken for a newer release (exit 6): detection too."""
    draw = random.Random(1)
    files = sorted((two / "step-00000020").iterdir())
    num_detected = 0
    for _ in range(400):
        path = draw.choice(files)
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        warnings: list[str] = []
        try:
            loaded = load_newest(two, warn=warnings.append)
            _assert_is(loaded, 10 if warnings else 20)
            num_detected += bool(warnings)
            assert warnings or path.name == "manifest.json", "a flipped bit outside the manifest went unseen"
        except NoCheckpointError as error:
            assert path.name == "manifest.json" and "format version" in str(error)
            num_detected += 1
        path.write_bytes(data)
    assert num_detected > 300


def test_missing_extra_empty_zeroed_files(two: Path) -> None:
    newest = two / "step-00000020"
    for path in sorted(newest.iterdir()):
        data = path.read_bytes()
        path.unlink()
        _falls_back(two, path.name)
        path.write_bytes(b"")
        _falls_back(two, path.name)
        path.write_bytes(b"\0" * len(data))
        _falls_back(two, path.name)
        path.unlink()
        path.mkdir()
        _falls_back(two, path.name)
        path.rmdir()
        path.write_bytes(data)
    extra = newest / "note.txt"
    extra.write_text("hello")
    _falls_back(two, "note.txt", "not in the manifest")
    extra.unlink()
    _assert_is(load_newest(two), 20)
    shutil.rmtree(newest)
    newest.mkdir()
    _falls_back(two, "manifest.json")


def test_none_valid_is_exit_6_and_says_what_was_tried(two: Path, tmp_path: Path) -> None:
    for name in ("step-00000010", "step-00000020"):
        (two / name / "masters.safetensors").unlink()
    before = sorted(two.rglob("*"))
    warnings: list[str] = []
    with pytest.raises(NoCheckpointError) as caught:
        load_newest(two, warn=warnings.append)
    assert caught.value.exit_code == 6 and len(warnings) == 2
    assert all(name in str(caught.value) for name in ("step-00000010", "step-00000020", "masters.safetensors"))
    assert sorted(two.rglob("*")) == before
    for nothing in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NoCheckpointError, match="no checkpoint to resume from"):
            load_newest(nothing)
    assert not (tmp_path / "absent").exists()


def test_a_checkpoint_named_by_hand_is_not_replaced_by_another(two: Path) -> None:
    _assert_is(load_newest(two, path=two / "step-00000010"), 10)
    (two / "step-00000020" / "state.json").write_text("{}")
    with pytest.raises(NoCheckpointError, match="step-00000020"):
        load_newest(two, path=two / "step-00000020")
    with pytest.raises(NoCheckpointError, match="no such checkpoint"):
        load_newest(two, path=two / "step-00000077")


@pytest.mark.parametrize("evaluation", [3.0, [], "x", None, {"kept_step": [1]}, {"kept_step": True}], ids=str)
def test_an_evaluation_that_is_none_has_no_best_step(tmp_path: Path, evaluation: Any) -> None:
    """Story: with a manifest made to fit it, the run called it a bug of ours."""
    for step, meta in ((1, {"evaluation": {"kept_step": 1, "kept_loss": 0.5}}), (2, {"evaluation": evaluation})):
        save_groups(tmp_path, step, {"masters": _group(step)}, meta, keep=3)
    assert [kept_step_of(tmp_path / f"step-{step:08}") for step in (1, 2, 3)] == [1, None, None]


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks_are_damage(tmp_path: Path, number: str) -> None:
    (tmp_path / "state.json").write_text(f'{{"a": {number}}}')
    with pytest.raises(DamagedError, match="not JSON"):
        read_own_json(tmp_path / "state.json")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "..", ".", "", "manifest.json", "-x", "a\nb"])
def test_hostile_names_in_the_manifest(two: Path, name: str) -> None:
    (two / "secret").write_text("x")
    path = two / "step-00000020" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"].append({"name": name, "size": 1, "sha256": "0" * 64})
    path.write_text(json.dumps(manifest))
    _falls_back(two, "manifest.json")


def test_links_are_refused(two: Path) -> None:
    newest, copy = two / "step-00000020", two.parent / "elsewhere"
    shutil.copytree(newest, copy)
    for name in ("masters.safetensors", "state.json", "manifest.json"):
        (newest / name).unlink()
        (newest / name).symlink_to(copy / name)
        _falls_back(two, name)
        (newest / name).unlink()
        shutil.copy(copy / name, newest / name)
    shutil.rmtree(newest)
    newest.symlink_to(copy)
    _falls_back(two, "step-00000020")


def test_a_pickle_under_our_names_is_never_opened(two: Path) -> None:
    """The manifest vouches for it, so only the format check stands between it and us."""
    newest = two / "step-00000020"
    evil = b"cos\nsystem\n(S'touch /tmp/roundpipe-canary'\ntR."
    (newest / "masters.safetensors").write_bytes(evil)
    manifest = json.loads((newest / "manifest.json").read_text())
    record = next(line for line in manifest["files"] if line["name"] == "masters.safetensors")
    record.update(size=len(evil), sha256=hashlib.sha256(evil).hexdigest())
    (newest / "manifest.json").write_text(json.dumps(manifest))
    _falls_back(two, "masters.safetensors", "safetensors")
    assert not Path("/tmp/roundpipe-canary").exists()


# --- failing disks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open", "mkdir"])
def test_an_error_at_any_call_of_a_save_commits_nothing(two: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """EIO and ENOSPC at each single system call; the error is raised once, so a retry would show as a commit."""
    real = getattr(os, call)
    for code in (errno.EIO, errno.ENOSPC):
        nth, past_the_last = 0, False
        while not past_the_last:
            shutil.rmtree(two)
            two.mkdir()
            _save(two, 10)
            _save(two, 20)
            num_calls, error = _save_with_failing_call(two, monkeypatch, call, real, nth, code)
            assert load_newest(two).step == (20 if error else 30), (call, nth)
            assert [name for name in _names(two) if name.startswith(".tmp-")] == []
            if error:
                assert error.exit_code == 5 and "step-00000030" in str(error) and "bytes)" in str(error)
            past_the_last = num_calls <= nth
            nth += 1
        assert nth > {"mkdir": 1, "rename": 2, "open": 6, "write": 4, "fsync": 6}[call]


def _save_with_failing_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, real: Any, nth: int, code: int
) -> tuple[int, ResourceError | None]:
    """Save step 30 with the `nth` use of `os.<call>` failing. Returns the number of uses and the error raised."""
    count = 0

    def failing(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        if count == nth + 1:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    replace_os_call(call, failing, monkeypatch.setattr)
    try:
        _save(folder, 30)
        return count, None
    except ResourceError as error:
        return count, error
    finally:
        replace_os_call(call, real, monkeypatch.setattr)


def test_too_little_space_is_seen_before_anything_is_written(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "free_bytes", lambda folder: 1000)
    with pytest.raises(ResourceError, match=r"(?s)1000 bytes.*expected: .*bytes") as caught:
        _save(two, 30)
    assert caught.value.exit_code == 5 and str(two) in str(caught.value)
    assert _names(two) == ["step-00000010", "step-00000020"]


def test_write_atomically_keeps_the_old_file_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    durable.write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", _failing)
    with pytest.raises(ResourceError, match="recipe.yaml"):
        durable.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and _names(tmp_path) == ["recipe.yaml"]


# --- written beside the training: every tensor of one step, a bounded ring, errors that surface once ------------------

NUM_LAYERS, ELEMENTS = 6, 20_000


class Run:
    """A made-up training whose every value is the number of its step, changed by another thread, layer by layer."""

    def __init__(self, output_dir: Path) -> None:
        self.values = {
            layer: [torch.zeros(ELEMENTS), torch.zeros(3, 5), torch.zeros(7, dtype=torch.bfloat16)]
            for layer in range(NUM_LAYERS)
        }
        self.versions = dict.fromkeys(self.values, 0)
        self.changed = threading.Condition()
        self.events: list[Event] = []
        self.saved: list[Mapping[str, Any]] = []
        self.failed: list[RoundpipeError] = []
        self.saver = Saver(output_dir, 2, self.events.append, self.saved.append, failed=self.failed.append)

    def state_of(self, layer: int) -> State:
        files = ("masters", "moments", "weights")
        return [(file, f"layer.{layer}", value) for file, value in zip(files, self.values[layer], strict=True)]

    def wait_ready(self, step: int) -> Callable[[int], None]:
        def wait(layer: int) -> None:
            with self.changed:
                self.changed.wait_for(lambda: self.versions[layer] >= step, timeout=60)

        return wait

    def update(self, step: int) -> None:
        """Slowly, element after element, as torn as an update can be; the saver is asked before each layer."""
        for layer, tensors in self.values.items():
            self.saver.before_layer(layer, step)
            for tensor in tensors:
                half = len(tensor) // 2
                tensor[:half] = step
                tensor[half:] = step
            with self.changed:
                self.versions[layer] = step
                self.changed.notify_all()

    def save(
        self, step: int, layers: list[int] | None = None, ready: Callable[[int], object] | None = None, **part: Any
    ) -> None:
        order, ready = layers or list(self.values), ready or self.wait_ready(step)
        self.saver.begin(Snapshot(step, order, self.state_of, ready, {"step": step}, **part), time.monotonic())


def values_in(output_dir: Path, step: int) -> set[float]:
    """Every distinct value in the newest checkpoint, which is that of `step`."""
    checkpoint = load_newest(output_dir)
    assert checkpoint.step == step and checkpoint.meta == {"step": step}
    found: set[float] = set()
    for group in ("masters", "moments", "weights"):
        tensors = checkpoint.tensors[group]
        assert set(tensors) == {f"layer.{layer}" for layer in range(NUM_LAYERS)}
        for name in tensors:
            found.update(tensors[name].float().unique().tolist())
    return found


@pytest.mark.parametrize("beside", [False, True])
def test_no_tensor_of_another_step(tmp_path: Path, beside: bool, ask: Callable[[str], None]) -> None:
    """The next update runs while the checkpoint is written slowly, or even the update to be saved does."""
    ask("ckpt_writer:slow=0.001")
    run = Run(tmp_path)
    num_saves = 40
    with run.saver:
        for step in range(1, num_saves + 1):
            updating = threading.Thread(target=run.update, args=(step,))
            updating.start()
            if not beside:
                updating.join()
            run.save(step)
            updating.join()
            if step > 1 and step % 4 == 0:
                run.saver.wait()
                assert values_in(tmp_path, step) == {float(step)}
        run.saver.wait()
    assert [event.step for event in run.events if isinstance(event, CheckpointSaved)] == list(range(1, num_saves + 1))
    assert [meta["step"] for meta in run.saved] == list(range(1, num_saves + 1))


@pytest.mark.parametrize("part", [{}, {"contents_of": lambda layer: (), "is_written": False}], ids=["whole", "sent"])
def test_an_update_waits_for_the_copy_of_its_layer_and_for_no_other(tmp_path: Path, part: dict[str, Any]) -> None:
    """Also on a machine that sends its layers to the one that writes."""
    run = Run(tmp_path)
    go = threading.Event()

    def hold_the_last(layer: int) -> None:
        if layer == NUM_LAYERS - 1:
            go.wait(30)

    with run.saver:
        run.save(1, ready=hold_the_last, **part)
        for layer in range(NUM_LAYERS - 1):
            run.saver.before_layer(layer, 2)  # comes back although the save is far from its end
        waiting = threading.Thread(target=run.saver.before_layer, args=(NUM_LAYERS - 1, 2))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        go.set()
        waiting.join(30)
        assert not waiting.is_alive()
    pauses = [one.seconds >= one.pause_s >= 0.1 for one in run.events if isinstance(one, CheckpointSaved)]
    assert pauses == ([] if part else [True]), "what training waited is reported"


def test_a_pause_is_reported_whenever_the_update_wakes_up(tmp_path: Path) -> None:
    """It was added by the update's thread: on a loaded machine the checkpoint was reported first, with no pause."""
    run, go = Run(tmp_path), threading.Event()
    with run.saver:
        run.save(1, [0], lambda layer: go.wait(30))
        save = run.saver._save
        assert save is not None
        wait, ended = save._changed.wait, threading.Event()

        def wakes_up_late() -> None:
            wait()
            save._changed.release()
            ended.wait(30)
            save._changed.acquire()

        save._changed.wait = wakes_up_late  # type: ignore[assignment, method-assign]
        waiting = threading.Thread(target=run.saver.before_layer, args=(0, 2))
        waiting.start()
        waiting.join(0.1)
        go.set()
        run.saver.wait()
        ended.set()
        waiting.join(30)
    (saved,) = (event for event in run.events if isinstance(event, CheckpointSaved))
    assert saved.pause_s >= 0.05


def test_the_ring_is_never_a_second_copy() -> None:
    for total_bytes in (20_000, 10**6, 5 * 10**7):
        assert total_bytes / 10 <= _Ring(total_bytes).num_bytes <= total_bytes / 2
    assert _Ring(10**12).num_bytes <= 256 * 1024**2


@pytest.mark.parametrize("after_bytes", [0, 10_000, 300_000])
def test_a_full_disk_surfaces_once_and_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_bytes: int
) -> None:
    run = Run(tmp_path)
    write, left = durable.os.write, [after_bytes]

    def failing(descriptor: int, data: Any) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    with run.saver:
        run.update(1)
        run.save(1)
        run.saver.wait()
        run.update(2)
        monkeypatch.setattr(durable.os, "write", failing)
        run.save(2)
        run.update(3)  # does not hang although nobody copies any more
        with pytest.raises(ResourceError, match="could not write the checkpoint of step 2"):
            run.saver.wait()
        run.saver.wait()
        run.saver.poll()
        monkeypatch.setattr(durable.os, "write", write)
        assert not list(tmp_path.glob(".tmp-*"))
        assert values_in(tmp_path, 1) == {1.0}
        run.save(3)
        run.saver.wait()
    assert values_in(tmp_path, 3) == {3.0}


@pytest.mark.parametrize("fault", ["ckpt_writer:raise:nth=2", "ckpt_writer:raise=FaultExit:nth=3"])
def test_a_writer_that_fails_is_one_error(tmp_path: Path, ask: Callable[[str], None], fault: str) -> None:
    ask(fault)
    run = Run(tmp_path)
    with run.saver:
        run.save(0)
        with pytest.raises(InternalError, match="saving failed: Fault"):
            run.saver.wait()
        run.saver.wait()
    assert not list(tmp_path.iterdir()) and not run.saved and len(run.failed) == 1


def test_an_interrupted_run_gives_a_save_up_and_a_failed_one_lets_it_finish(tmp_path: Path) -> None:
    for error, is_saved in ((KeyboardInterrupt, False), (RuntimeError, True)):
        run = Run(tmp_path / error.__name__)
        (tmp_path / error.__name__).mkdir()
        with pytest.raises(error), run.saver:
            run.save(1, ready=lambda layer: time.sleep(0.05))
            raise error
        assert bool(list((tmp_path / error.__name__).glob("step-*"))) == is_saved and not run.failed
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-")]
