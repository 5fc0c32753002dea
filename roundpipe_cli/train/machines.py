"""Part of a machine in a run: all of it where it is the only one, so that the training loop need not ask.

Each of several machines runs an engine of its own over its own devices and holds all weights. Gradients land in host
memory anyway; a thread sums a layer's over all machines as soon as the layer is complete, beside the backward of the
others. All machines then make the same update. The first one writes metrics, checkpoints and the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

import torch

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.engine.backends.base import set_own_threads
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.gradients import square_sum
from roundpipe_cli.engine.options import OnGradient
from roundpipe_cli.engine.step import Microbatch, Part, StepResult
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RoundpipeError
from roundpipe_cli.events import Tell
from roundpipe_cli.model.layout import LayerLayout
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.checkpoint.writing import Snapshot
from roundpipe_cli.train.nodes.agreement import weight_facts
from roundpipe_cli.train.nodes.group import Nodes, in_thread
from roundpipe_cli.train.optim.shard import Shards, make_shards


class Sharing:
    """One process' part in the steps of a run, inside `with`; a thread sums the gradients of each."""

    def __init__(
        self,
        nodes: Nodes,
        store: WeightStore,
        late_layers: Sequence[int],
        table: str = "",
        *,
        owner: Mapping[int, int] | None = None,
    ) -> None:
        """
        Args:
            late_layers: trained layers whose gradients are complete at the end of a step only.
            table: name of the embedding table.
            owner: rank by layer, where one process alone wants the sum of each; None: all want all.
        """
        self._owner = owner
        self._nodes, self._store = nodes, store
        self._table = table if table in store.trainable_names and store.layer_of(table) == 0 else None
        """The table, if it is trained and not tied to the head: its gradient is zero but for the rows of tokens."""
        self._rows: torch.Tensor | None = None
        """Token ids of the step, of all processes."""
        trained = [layer for layer, layout in enumerate(store.layouts) if layout.num_trainable_elements]
        late = sorted(set(late_layers) & set(trained))
        self._layers = [layer for layer in reversed(trained) if layer not in late] + late
        """Layers in the order of their sums, which must be equal on all processes; about that of backward."""
        self._complete: dict[int, Callable[[], float]] = {}
        self._changed = threading.Condition()
        self._squares: Future[dict[int, float]] | None = None
        """The sum of squares of each layer's gradient, when all are summed."""
        self._given_up = False
        self.given: set[int] = set()
        """Layers of the step whose gradients the others may have: where the step is computed again, those stay."""

    def __enter__(self) -> Sharing:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify()
        if error is not None:
            self._nodes.leave(error)
            wait([self._squares] if self._squares else [], 1.0)

    def share_of(self, microbatches: Sequence[Microbatch]) -> tuple[list[Microbatch], Part]:
        """Microbatches of a step for this process: every process has about as many, in order."""
        rank, count = self._nodes.rank, self._nodes.count
        first, last = (len(microbatches) * index // count for index in (rank, rank + 1))
        num_units = sum(microbatch.num_units for microbatch in microbatches)
        mine = list(microbatches[first:last])
        if self._table is not None:
            self._rows = torch.cat([microbatch.input_ids.flatten() for microbatch in microbatches]).unique()
        if not mine:  # in a short last step: a microbatch without a target adds nothing
            nothing = microbatches[0]
            mine = [replace(nothing, labels=torch.full_like(nothing.labels, IGNORED_LABEL))]
        return mine, Part(first, num_units)

    def begin(self, on_gradient: OnGradient | None = None) -> OnGradient:
        """The gradients of a step will be summed as `complete` names their layers; returns that. There is no
        `on_gradient`: nobody may use a gradient before it is summed."""
        assert on_gradient is None
        self._complete, self.given = {}, set()
        self._squares = in_thread(self._sum, "gradient-sums")
        return self.complete

    def complete(self, layer: int, square_sum: Callable[[], float]) -> None:
        """Note that the gradient of `layer` is complete here. Called by any thread; arguments as of `OnGradient`."""
        with self._changed:
            if layer not in self.given:
                self.given.add(layer)
                self._complete[layer] = square_sum
                self._changed.notify()

    def finish(self, result: StepResult, loss_scale: float) -> StepResult:
        """The step's result over all processes, when all gradients are summed.

        Raises:
            NodeLostError: another process ended.
        """
        assert self._squares is not None
        squares = [square for _, square in sorted(self._squares.result().items())]
        shared = squares if self._owner is not None else []
        loss, tokens, *whole = self._nodes.sums([result.loss, result.num_target_tokens, *shared])
        squares = whole or squares
        norm = math.sqrt(sum(squares)) / loss_scale
        return replace(result, loss=loss, num_target_tokens=int(tokens), gradient_norm=norm)

    def _sum(self) -> dict[int, float]:
        set_own_threads(1)  # a sum over several threads would depend on their number
        squares = {}
        for layer in self._layers:
            with self._changed:
                while layer not in self._complete and not self._given_up:
                    self._changed.wait()
                if self._given_up:
                    raise RoundpipeError("the run is over")
                on_host = self._complete.pop(layer)
            with suppress(torch.AcceleratorError):  # its device was lost since, which had sent it
                on_host()
            gradient = self._store.gradients[layer]
            if self._table is not None and layer == 0:
                self._sum_embed(gradient, self._table)
            else:
                self._add_up(layer, gradient)
            wanted = self._owner is None or self._owner[layer] == self._nodes.rank
            squares[layer] = float(square_sum(gradient)) if wanted else 0.0
        return squares

    def _add_up(self, layer: int, tensor: torch.Tensor) -> None:
        self._nodes.add_up(tensor, None if self._owner is None else self._owner[layer])

    def _sum_embed(self, gradient: torch.Tensor, table: str) -> None:
        """Sum the embed layer's gradient, of the table only the rows that the step has tokens for: it is complete last,
        with nothing left to compute beside its sum, and the table may be a good part of a model."""
        rows, view = self._rows, self._store.gradient(table)
        if rows is None or 2 * len(rows) > len(view):
            self._add_up(0, gradient)
            return
        compact = view[rows]
        self._add_up(0, compact)
        view[rows] = compact
        start = view.storage_offset() - gradient.storage_offset()
        for rest in (gradient[:start], gradient[start + view.numel() :]):
            if rest.numel():
                self._add_up(0, rest)


class WholeSteps:
    """Steps of which one machine computes everything: the `Sharing` of a machine that shares nothing."""

    given: frozenset[int] = frozenset()
    """Layers of the step whose gradients others may have."""

    def share_of(self, microbatches: Sequence[Microbatch]) -> tuple[list[Microbatch], None]:
        """All microbatches of a step."""
        return list(microbatches), None

    def begin(self, on_gradient: OnGradient | None) -> OnGradient | None:
        """Begin a step; returns the function that is called with complete gradients."""
        return on_gradient

    def finish(self, result: StepResult, loss_scale: float) -> StepResult:
        """The step's result over all machines."""
        return result


class Machines:
    """The machines of a run as the training loop sees them."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.shards: Shards | None = None
        """Who keeps which layers' masters; None: all keep all."""

    def share_out(self, recipe: Recipe, tell: Tell, layouts: Sequence[LayerLayout]) -> frozenset[int]:
        """Share masters and optimizer state out, where the recipe says so; returns what `elsewhere` is from then on."""
        self.shards = make_shards(self.nodes, recipe, layouts, tell)
        return self.elsewhere

    @property
    def is_only(self) -> bool:
        """Whether it is the only machine."""
        return self.nodes.count == 1

    @property
    def elsewhere(self) -> frozenset[int]:
        """Layers that another machine keeps."""
        return self.shards.elsewhere if self.shards else frozenset()

    def check_weights(self, store: WeightStore) -> None:
        """Raise a RecipeError with each layer whose trained weights are not the same on all machines."""
        self.nodes.check_same(lambda: weight_facts(store, masters=self.shards is None))

    def sharing(self, engine: Engine) -> AbstractContextManager[Sharing | WholeSteps]:
        """How steps are shared, inside `with`."""
        if self.is_only:
            return nullcontext(WholeSteps())
        late, table = sorted(engine.late_layers), f"{engine.split.embedding_path}.weight"
        return Sharing(self.nodes, engine.store, late, table, owner=self.shards.owner if self.shards else None)

    @property
    def saves(self) -> bool:
        """Whether this machine has a part in checkpoints."""
        return self.nodes.is_first or self.shards is not None

    def own_part(self, snapshot: Snapshot) -> Snapshot:
        """Part of a checkpoint that this machine writes."""
        shards, is_first = self.shards, self.nodes.is_first
        if shards is None:
            return snapshot

        def collect(layer: int) -> Iterator[tuple[str, str, torch.Tensor]]:
            return shards.collect(layer, snapshot.state_of(layer))

        own = [layer for layer in snapshot.layers if is_first or shards.is_own(layer)]
        return replace(snapshot, layers=own, contents_of=collect, is_written=is_first)
