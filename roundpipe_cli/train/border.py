"""Events between two steps: a checkpoint and what it holds, a pause, a stop."""

from __future__ import annotations

import shlex
import signal as signals
import time
from collections.abc import Callable

from roundpipe_cli.engine.weights import UnusedHeap, WeightStore
from roundpipe_cli.errors import StoppedError
from roundpipe_cli.events import Paused, Tell
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.checkpoint.resume import check_tensors
from roundpipe_cli.train.checkpoint.writing import Saver, State
from roundpipe_cli.train.nodes.group import Nodes
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.signals import EXIT_CODES, StopSignals

PAUSE_LOOK_S = 0.1


class Border:
    """The border between two steps; used after every step."""

    def __init__(
        self, stop: StopSignals, nodes: Nodes, saver: Saver, save: Callable[[int], None], *, tell: Tell
    ) -> None:
        """
        Args:
            stop: the user's requests.
            saver: the saver that `save` uses.
            save: begins a checkpoint after so many steps.
        """
        self._stop, self._nodes, self._saver, self._save, self._tell = stop, nodes, saver, save, tell
        self._saved_step = 0
        self._heap = UnusedHeap()

    def at(self, done: int, num_steps: int, *, due: bool, last: bool) -> None:
        """Give unused memory back, save where it is due or asked for, wait while the run is paused, stop if asked.

        Args:
            done: steps that are done.
            due: a checkpoint is due here.
            last: nothing is left to train.

        Raises:
            StoppedError: a signal asked for it; a checkpoint is written.
        """
        held = False
        self._heap.give_back()
        self._saver.poll()
        while True:
            signal, paused, asked = self._asked()
            if due or asked or signal:
                self._save_once(done)
            if not paused or signal or last or self._stop.requested is not None:
                break
            if not held:
                self._tell(Paused(done, True))
            held = True
            time.sleep(PAUSE_LOOK_S)
        if held:
            self._tell(Paused(done, False))
        signal, _, _ = self._asked()  # read once: later requests count at the next border
        if signal:
            self._save_once(done)
        if last or signal:
            self._saver.wait()
        if signal and not last:
            self._nodes.leave()
            how = "stopped" if self._stop.asked_by_key else f"stopped by {signal.name}"
            raise StoppedError(
                f"{how} after step {done} of {num_steps}, with a checkpoint",
                exit_code=EXIT_CODES[signal],
                hint=f"the same command with --resume continues; "
                f"`roundpipe generate {shlex.quote(str(self._saver.output_dir))}` tries it as it is, `export` takes it",
            )

    def _save_once(self, done: int) -> None:
        if self._saved_step != done:
            self._save(done)
            self._saved_step = done

    def _asked(self) -> tuple[signals.Signals | None, bool, bool]:
        """The signal that asks for a stop, whether the run is held, and whether a checkpoint is asked for.

        What one machine is told holds for all.
        """
        asked = [self._stop.requested or 0, self._stop.paused, self._stop.take_save()]
        number, paused, save = self._nodes.most(asked)
        return signals.Signals(number) if number else None, bool(paused), bool(save)


# Weights and optimizer in a checkpoint, layer by layer, and how they come back.


def layer_state(store: WeightStore, optimizer: HostOptimizer, layer: int) -> State:
    """One layer's part of a checkpoint."""
    state = [("masters", place.name, store.master(place.name)) for place in store.layouts[layer].trainable]
    return state + [("moments", name, tensor) for name, tensor in optimizer.moments_of(layer)]


def restore_state(store: WeightStore, optimizer: HostOptimizer, checkpoint: Checkpoint) -> None:
    """Weights and moments as they were when the checkpoint was made.

    Raises:
        NoCheckpointError: its tensors are others than this run's.
    """
    own = {name: store.master(name) for name in sorted(store.trainable_names)}
    check_tensors(checkpoint, {"masters": own, "moments": dict(optimizer.moments())})
    masters = checkpoint.tensors("masters")
    for name in own:
        store.set_parameter(name, masters[name])
    store.set_version(checkpoint.step)
    moments = checkpoint.tensors("moments") if "moments" in checkpoint.groups else {}  # sgd keeps none
    optimizer.load(moments, int(checkpoint.meta["num_updates"]))
