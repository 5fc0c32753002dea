"""This machine's part in a run: all of it where it is the only one, so that the training loop need not ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import OnGradient
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.train.checkpoint.writing import Snapshot, State
from roundpipe_cli.train.nodes.group import Nodes, Sharing
from roundpipe_cli.train.optim.shard import Shards


class WholeSteps:
    """Steps of which one machine computes everything: the `Sharing` of a machine that shares nothing."""

    given: frozenset[int] = frozenset()
    """Layers of the step whose gradients others may have."""

    def share_of(self, microbatches: Sequence[Microbatch]) -> tuple[list[Microbatch], None]:
        """This machine's microbatches of a step: all."""
        return list(microbatches), None

    def begin(self, step: int, on_gradient: OnGradient | None) -> OnGradient | None:
        """Begin a step; returns the function that is called with complete gradients."""
        return on_gradient

    def finish(self, result: StepResult, loss_scale: float) -> StepResult:
        """The step's result over all machines."""
        return result


class Machines:
    """The machines of a run as the training loop sees them."""

    def __init__(self, nodes: Nodes, shards: Shards | None = None) -> None:
        """
        Args:
            nodes: the processes of the run.
            shards: who keeps which layers' masters; None: all keep all.
        """
        self._nodes, self.shards = nodes, shards

    @property
    def is_first(self) -> bool:
        """Whether this machine writes the run's files."""
        return self._nodes.is_first

    @property
    def is_only(self) -> bool:
        """Whether it is the only machine."""
        return self._nodes.count == 1

    @property
    def elsewhere(self) -> frozenset[int]:
        """Layers that another machine keeps."""
        return self.shards.elsewhere if self.shards else frozenset()

    def from_first(self, document: Any) -> Any:
        """The first machine's JSON document, on all."""
        return self._nodes.from_first(document)

    def most(self, values: Sequence[int]) -> list[int]:
        """The maximum of each value over all machines."""
        return self._nodes.most(values)

    def sharing(self, engine: Engine) -> AbstractContextManager[Sharing | WholeSteps]:
        """How steps are shared, inside `with`."""
        if self.is_only:
            return nullcontext(WholeSteps())
        late, table = sorted(engine.late_layers), f"{engine.split.embedding_path}.weight"
        return Sharing(self._nodes, engine.store, late, table, owner=self.shards.owner if self.shards else None)

    @property
    def saves(self) -> bool:
        """Whether this machine has a part in checkpoints."""
        return self.is_first or self.shards is not None

    def own_part(self, snapshot: Snapshot) -> Snapshot:
        """This machine's part of a checkpoint."""
        if self.shards is None:
            return snapshot
        own = [layer for layer in snapshot.layers if self.is_first or self.shards.is_own(layer)]
        collect = partial(_collected, self.shards, snapshot)
        return replace(snapshot, layers=own, contents_of=collect, is_written=self.is_first)


def _collected(shards: Shards, snapshot: Snapshot, layer: int) -> Iterator[tuple[str, str, torch.Tensor]]:
    state: State = snapshot.state_of(layer)
    return shards.collect(layer, state)
