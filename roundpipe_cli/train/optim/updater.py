"""The thread that updates the weights, so that the next step can compute meanwhile.

    step k        | forward, backward: version k | step k + 1: each layer as soon as it has version k + 1
    this thread                                  | embedding | layer 1 | layer 2 | ...
    early, as gradients land          | layer N | ... | layer 2 | embedding | layer 1 |

Of the layers that can be updated the one that the next step needs first goes first. Who reads weights waits for their
version in the store (`WeightStore.tell`); an update that fails ends all these waits with its error.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from roundpipe_cli.engine.backends.base import set_own_threads
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import as_ours
from roundpipe_cli.faults import fault
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.optim.shard import Shards
from roundpipe_cli.units import shown_step
from roundpipe_cli.watchdog import at_work

Order = tuple[float, int, int, Callable[[], None] | None]
"""Step, place of its layer in the order of need, number of the order, and the work; None: the end."""
_END: Order = (math.inf, 0, 0, None)

JOIN_TIMEOUT_S = 5.0
JOIN_AFTER_ERROR_S = 2.0
"""Seconds to wait for a thread at the end; one that hangs is left behind (it is a daemon)."""


class Updater:
    """Carries out updates step by step, in a thread of its own inside `with`."""

    def __init__(
        self,
        store: WeightStore,
        optimizer: HostOptimizer,
        *,
        num_threads: int,
        shards: Shards | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            num_threads: intra-op threads of the update.
            shards: layers that other processes update; their new weights go round after each step.
            order: the trained layers as a step needs them, from `in_order_of_need`; None: as they are numbered.
        """
        self._shards = shards
        self.order = optimizer.layers if order is None else order
        """The trained layers in the order in which they are updated, where all can be."""
        self._place = {layer: place for place, layer in enumerate(self.order)}
        self._own = [layer for layer in self.order if shards is None or shards.is_own(layer)]
        self.before_layer: Callable[[int, int], None] | None = None
        """Called in the thread with a layer and the version that it is about to get, before it changes: a checkpoint
        may still have to copy what is there."""
        self._store = store
        self.optimizer = optimizer
        self._work: queue.PriorityQueue[Order] = queue.PriorityQueue()
        self._changed = threading.Condition()
        self._num_given = 0
        self._num_pending = 0
        self._where = ""
        self._poison: float | None = None
        self._early: tuple[int, int, float] | None = None
        self.has_begun = False
        """Whether an update of the step under way has begun before its end."""
        self._stopped_at = math.inf
        """A step whose gradients are not finite: the run will stop, and nothing more is to be spoilt."""
        self._thread = threading.Thread(target=self._run, args=(num_threads,), name="optimizer", daemon=True)
        self._round: threading.Thread | None = None

    def __enter__(self) -> Updater:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._work.put(_END)
        for thread in filter(None, (self._thread, self._round)):
            thread.join(JOIN_TIMEOUT_S if error is None else JOIN_AFTER_ERROR_S)

    # -- orders --------------------------------------------------------------------------------------------------

    def begin(self, step: int, learning_rate: float, gradient_factor: float) -> None:
        """Update every layer with the gradients of `step`; returns at once."""
        self.optimizer.num_updates += 1
        number = self.optimizer.num_updates
        for layer in self._own:
            update = partial(self._update, step, number, learning_rate, layer, gradient_factor=gradient_factor)
            self._give(update, step, layer)
        self._send_round(step)

    def skip(self, step: int) -> None:
        """Give every layer its next version without an update; returns at once."""
        for layer in self._own:
            self._give(partial(self._skip, step, layer), step, layer)
        self._send_round(step)

    def begin_early(self, step: int, learning_rate: float) -> None:
        """Begin `step`: update each layer with its gradients when `gradient_complete` names the layer."""
        self.optimizer.num_updates += 1
        self._early = (step, self.optimizer.num_updates, learning_rate)
        self.has_begun = False
        self._poison = self._pass_fault(step)
        if self._poison is not None:
            self._stopped_at = step

    def gradient_complete(self, layer: int, square_sum: Callable[[], float]) -> None:
        """Note that the gradient of `layer` is complete and its weights are no longer read. Called by any thread;
        `square_sum` waits until the gradient is on the host."""
        assert self._early is not None
        self.has_begun = True
        self._give(partial(self._update, *self._early, layer, square_sum=square_sum), self._early[0], layer)

    def poison(self, step: int) -> float | None:
        """The value that a fault point of the optimizer puts in place of the gradient norm of `step`, usually None."""
        return self._pass_fault(step) if self._early is None else self._poison

    def wait(self) -> None:
        """Block until all updates are done.

        Raises:
            InternalError: an update failed.
            ResourceError: out of host memory.
        """
        with self._changed:
            while self._num_pending:
                self._store.check_updates()
                self._changed.wait()
        self._store.check_updates()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _give(self, work: Callable[[], None], step: int, layer: int) -> None:
        with self._changed:
            self._num_pending += 1
            self._num_given += 1
            self._work.put((step, self._place[layer], self._num_given, work))

    def _run(self, num_threads: int) -> None:
        set_own_threads(num_threads)
        while (work := self._work.get()[-1]) is not None:
            self._carry_out(work)

    def _carry_out(self, work: Callable[[], None]) -> None:
        try:
            self._store.check_updates()
            work()
        except BaseException as error:  # passed on as a value; all who wait raise it
            self._store.fail(as_ours(error, "the optimizer", self._where))
        with self._changed:
            self._num_pending -= 1
            self._changed.notify_all()

    def _pass_fault(self, step: int) -> float | None:
        where = f"the optimizer, step {shown_step(step)}"
        with at_work(where):
            try:
                return fault("optimizer", step=step)
            except Exception as error:
                raise as_ours(error, "the optimizer", where) from error

    def _enter_layer(self, step: int, layer: int) -> None:
        self._where = f"the optimizer, step {shown_step(step)}, layer {self._store.layouts[layer].name}"
        if self.before_layer is not None:
            self.before_layer(layer, self._store.version_of(layer) + 1)

    def _update(
        self,
        step: int,
        number: int,
        learning_rate: float,
        layer: int,
        *,
        gradient_factor: float = 1.0,
        square_sum: Callable[[], float] | None = None,
    ) -> None:
        """One layer; where its sum of squares is asked for, only if no gradient so far is infinite or NaN."""
        self._enter_layer(step, layer)
        if square_sum is not None and not math.isfinite(square_sum()):
            self._stopped_at = step
        if step >= self._stopped_at:
            return
        with at_work(self._where):
            fault("update", step=step, layer=layer)
            gradient = self._store.gradients[layer]
            self.optimizer.update_layer(layer, gradient, number, learning_rate, gradient_factor=gradient_factor)

    def _skip(self, step: int, layer: int) -> None:
        self._enter_layer(step, layer)
        with at_work(self._where):
            self.optimizer.skip_layer(layer)

    def _send_round(self, step: int) -> None:
        """Pass the new version of every layer from its owner to the others, in a thread beside the updates."""
        if self._shards is not None:
            with self._changed:
                self._num_pending += 1
            exchange = partial(self._carry_out, partial(self._exchange, self._shards, step, step + 1))
            self._round = threading.Thread(target=exchange, name="weights-round", daemon=True)
            self._round.start()

    def _exchange(self, shards: Shards, step: int, version: int) -> None:
        set_own_threads(1)
        for layer in shards.order:
            if shards.is_own(layer):
                self._store.wait_for(layer, version)
                shards.share(layer, self._store.trained_bytes(layer, version))
                continue
            if self.before_layer is not None:
                self.before_layer(layer, version)
            where = f"new weights of {self._store.layouts[layer].name}, step {shown_step(step)}"
            with at_work(where), self._store.next_version(layer) as target:
                shards.share(layer, target.whole)
