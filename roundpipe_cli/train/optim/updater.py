"""The thread that updates the weights, so that the next step can compute meanwhile.

staleness 1    step k        | forward, backward: version k-1 |                    | step k+1: version k | ...
               this thread   | update k-1 -> version k  |                          | update k -> version k+1 |

staleness 0    step k        | forward, backward: version k                   |  wait  | step k+1: version k+1
               this thread                       | layer N | ... | layer 0     |     early: gradients land, N first
               this thread                                                     | all |     otherwise
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType

from roundpipe_cli.engine.backends.base import set_own_threads
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import InternalError, ResourceError, RoundpipeError
from roundpipe_cli.faults import fault
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.optim.shard import Shards
from roundpipe_cli.units import shown_step
from roundpipe_cli.watchdog import at_work

UpdateQueue = queue.Queue[Callable[[], None] | None]

JOIN_TIMEOUT_S = 5.0
JOIN_AFTER_ERROR_S = 2.0
"""Seconds to wait for the thread at the end; one that hangs is left behind (it is a daemon)."""


class Updater:
    """Carries out updates in the order of the calls; owns its thread inside `with`."""

    def __init__(
        self, store: WeightStore, optimizer: HostOptimizer, *, num_threads: int, shards: Shards | None = None
    ) -> None:
        """
        Args:
            store: weights and gradients.
            optimizer: what an update is.
            num_threads: intra-op threads of the update.
            shards: layers that other processes update; a thread of its own sends new weights round.
        """
        self._shards = shards
        self._own = [layer for layer in optimizer.layers if shards is None or shards.is_own(layer)]
        self._rounds: UpdateQueue = queue.Queue()
        self._sender = threading.Thread(target=self._run, args=(self._rounds, 1), name="weights-round", daemon=True)
        self.before_layer: Callable[[int, int], None] | None = None
        """Called in the thread with a layer and the version that it is about to get, before it changes: a checkpoint
        may still have to copy what is there."""
        self._store = store
        self._optimizer = optimizer
        self._work: UpdateQueue = queue.Queue()
        self._changed = threading.Condition()
        self._num_pending = 0
        self._error: BaseException | None = None
        self._where = ""
        self._poison: float | None = None
        self._early: tuple[int, int, float] | None = None
        self._thread = threading.Thread(target=self._run, args=(self._work, num_threads), name="optimizer", daemon=True)

    def __enter__(self) -> Updater:
        self._thread.start()
        if self._shards is not None:
            self._sender.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._work.put(None)
        self._rounds.put(None)
        self._thread.join(JOIN_TIMEOUT_S if error is None else JOIN_AFTER_ERROR_S)
        if self._shards is not None:
            self._sender.join(JOIN_TIMEOUT_S if error is None else JOIN_AFTER_ERROR_S)

    # -- orders --------------------------------------------------------------------------------------------------

    def begin(self, step: int, learning_rate: float, gradient_factor: float) -> None:
        """Update every layer with the gradients of `step`; returns at once."""
        self._optimizer.num_updates += 1
        number, version = self._optimizer.num_updates, self._store.newest + 1
        for layer in self._own:
            self._give(partial(self._update, step, layer, number, learning_rate, gradient_factor=gradient_factor))
        self._send_round(step, version)

    def skip(self, step: int) -> None:
        """Give every layer its next version without an update; returns at once."""
        version = self._store.newest + 1
        for layer in self._own:
            self._give(partial(self._skip, step, layer))
        self._send_round(step, version)

    def begin_early(self, step: int, learning_rate: float) -> None:
        """Begin `step`: update each layer with its gradients when `gradient_complete` names the layer."""
        self._optimizer.num_updates += 1
        self._early = (step, self._optimizer.num_updates, learning_rate)
        self._give(lambda: self._pass_fault(step))

    def gradient_complete(self, layer: int, square_sum: Callable[[], float]) -> None:
        """Note that the gradient of `layer` is complete and its weights are no longer read. Called by any thread.

        Args:
            square_sum: waits until the gradient is on the host and gives its sum of squares.
        """
        self._give(lambda: self._update_early(layer, square_sum))

    def poison(self, step: int) -> float | None:
        """The value that a fault point of the optimizer puts in place of the gradient norm of `step`, usually None.

        Raises:
            as `wait`.
        """
        if self._early is None:
            self._give(lambda: self._pass_fault(step))
            self.wait()
        return self._poison

    def wait(self) -> None:
        """Block until all updates are done.

        Raises:
            InternalError: an update failed.
            ResourceError: out of host memory.
        """
        with self._changed:
            while self._num_pending and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._described(self._error)

    def wait_for(self, layer: int, version: int) -> None:
        """Block until `layer` has `version`, whose update was ordered before. For threads other than the owner's.

        Raises:
            InternalError: it will never have it.
        """
        with self._changed:
            while self._store.version_of(layer) < version and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise InternalError("the weights to be saved were never updated", where=self._where)

    def _described(self, error: BaseException) -> RoundpipeError:
        if isinstance(error, RoundpipeError):
            return error
        text = f"{type(error).__name__}: {error}".strip()
        described: RoundpipeError
        if isinstance(error, MemoryError):
            described = ResourceError("out of host memory in the optimizer", where=self._where, found=text)
        else:
            described = InternalError(f"the optimizer failed: {text}", where=self._where)
        described.__cause__ = error
        return described

    # -- the thread ----------------------------------------------------------------------------------------------

    def _give(self, work: Callable[[], None], to: UpdateQueue | None = None) -> None:
        with self._changed:
            self._num_pending += 1
        (to or self._work).put(work)

    def _run(self, orders: UpdateQueue, num_threads: int) -> None:
        set_own_threads(num_threads)
        while (work := orders.get()) is not None:
            error: BaseException | None = None
            try:
                if self._error is None:
                    work()
            except BaseException as raised:  # passed on as a value; `wait` raises it
                error = raised
            with self._changed:
                self._error = self._error or error
                self._num_pending -= 1
                self._changed.notify_all()

    def _pass_fault(self, step: int) -> None:
        self._where = f"the optimizer, step {shown_step(step)}"
        with at_work(self._where):
            self._poison = fault("optimizer", step=step)

    def _enter_layer(self, step: int, layer: int) -> None:
        self._where = f"the optimizer, step {shown_step(step)}, layer {self._store.layouts[layer].name}"
        if self.before_layer is not None:
            self.before_layer(layer, self._store.version_of(layer) + 1)

    def _update(self, step: int, layer: int, number: int, learning_rate: float, *, gradient_factor: float) -> None:
        self._enter_layer(step, layer)
        self._change(step, layer, number, learning_rate, gradient_factor=gradient_factor)

    def _change(self, step: int, layer: int, number: int, learning_rate: float, *, gradient_factor: float) -> None:
        with at_work(self._where):
            gradient = self._store.gradients_of(step)[layer]
            self._optimizer.update_layer(layer, gradient, number, learning_rate, gradient_factor=gradient_factor)

    def _skip(self, step: int, layer: int) -> None:
        self._enter_layer(step, layer)
        with at_work(self._where):
            self._optimizer.skip_layer(layer)

    def _send_round(self, step: int, version: int) -> None:
        """Let the sender's thread pass on `version` of every layer from its owner to the others."""
        for layer in self._shards.order if self._shards is not None else ():
            self._give(partial(self._exchange, step, layer, version), self._rounds)

    def _exchange(self, step: int, layer: int, version: int) -> None:
        assert self._shards is not None
        if self._shards.is_own(layer):
            self.wait_for(layer, version)
            self._shards.share(layer, self._store.trained_bytes(layer, version))
            return
        if self.before_layer is not None:
            self.before_layer(layer, version)
        where = f"new weights of {self._store.layouts[layer].name}, step {shown_step(step)}"
        with at_work(where), self._store.next_version(layer) as target:
            self._shards.share(layer, target.whole)

    def _update_early(self, layer: int, square_sum: Callable[[], float]) -> None:
        assert self._early is not None
        step, number, learning_rate = self._early
        self._enter_layer(step, layer)
        if not math.isfinite(square_sum()):
            self._poison = math.nan  # the run will stop; do not spoil more
        if self._poison is None:
            self._change(step, layer, number, learning_rate, gradient_factor=1.0)
