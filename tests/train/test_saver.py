"""Checkpoints written beside the training: every tensor of one step, a bounded ring, errors that surface once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli import files as durable
from roundpipe_cli.errors import InternalError, ResourceError
from roundpipe_cli.events import CheckpointSaved, Event
from roundpipe_cli.train.checkpoint.reading import load_newest
from roundpipe_cli.train.checkpoint.writing import Saver, Snapshot, State, _Ring

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
        self.saver = Saver(output_dir, 2, self.events.append, self.saved.append)

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

    def save(self, step: int, layers: list[int] | None = None, ready: Callable[[int], object] | None = None) -> None:
        order, ready = layers or list(self.values), ready or self.wait_ready(step)
        self.saver.begin(Snapshot(step, order, self.state_of, ready, {"step": step}), time.monotonic())


def steps_in(output_dir: Path, step: int) -> set[float]:
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
                assert steps_in(tmp_path, step) == {float(step)}
        run.saver.wait()
    assert [event.step for event in run.events if isinstance(event, CheckpointSaved)] == list(range(1, num_saves + 1))
    assert [meta["step"] for meta in run.saved] == list(range(1, num_saves + 1))


def test_an_update_waits_for_the_copy_of_its_layer_and_for_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path)
    go = threading.Event()

    def hold_the_last(layer: int) -> None:
        if layer == NUM_LAYERS - 1:
            go.wait(30)

    with run.saver:
        run.save(1, ready=hold_the_last)
        for layer in range(NUM_LAYERS - 1):
            run.saver.before_layer(layer, 2)  # comes back although the save is far from its end
        waiting = threading.Thread(target=run.saver.before_layer, args=(NUM_LAYERS - 1, 2))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        go.set()
        waiting.join(30)
        assert not waiting.is_alive()
    saved = next(event for event in run.events if isinstance(event, CheckpointSaved))
    assert saved.seconds >= saved.pause_s >= 0.1, "what training waited is reported"


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
        assert steps_in(tmp_path, 1) == {1.0}
        run.save(3)
        run.saver.wait()
    assert steps_in(tmp_path, 3) == {3.0}


@pytest.mark.parametrize("fault", ["ckpt_writer:raise:nth=2", "ckpt_writer:raise=FaultExit:nth=3"])
def test_a_writer_that_fails_is_one_error(tmp_path: Path, ask: Callable[[str], None], fault: str) -> None:
    ask(fault)
    run = Run(tmp_path)
    with run.saver:
        run.save(0)
        with pytest.raises(InternalError, match="saving failed: Fault"):
            run.saver.wait()
        run.saver.wait()
    assert not list(tmp_path.iterdir()) and not run.saved


def test_an_interrupted_run_gives_a_save_up_and_a_failed_one_lets_it_finish(tmp_path: Path) -> None:
    for error, is_saved in ((KeyboardInterrupt, False), (RuntimeError, True)):
        run = Run(tmp_path / error.__name__)
        (tmp_path / error.__name__).mkdir()
        with pytest.raises(error), run.saver:
            run.save(1, ready=lambda layer: time.sleep(0.05))
            raise error
        assert bool(list((tmp_path / error.__name__).glob("step-*"))) == is_saved
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-")]
