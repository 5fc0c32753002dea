"""Masters and optimizer state shared out over machines (ZeRO stage 1, arXiv 1910.02054), whole layers to each.

    gradients     | layer: summed to its owner, as soon as it is complete      (in place of: to all)
    owner         | updates its layers, one after the other
    all           | each layer's new weights go from its owner to the others, as soon as they are there

The owner's update is the one that all would have made, so the numbers are those of a run that shares nothing out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from roundpipe_cli.choices import OPTIMIZERS
from roundpipe_cli.costs.machine import host_memory
from roundpipe_cli.costs.memory import MAX_MEMORY_SHARE
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.model.layout import LayerLayout
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.checkpoint.writing import State
from roundpipe_cli.train.nodes.group import Nodes
from roundpipe_cli.units import format_bytes


@dataclass(frozen=True)
class Shards:
    """The process that keeps each trained layer's masters and state."""

    nodes: Nodes
    owner: Mapping[int, int]
    """Rank by trained layer."""
    sent_files: frozenset[str]
    """Files of a checkpoint whose tensors only owners have."""

    @property
    def order(self) -> list[int]:
        """Trained layers in the order in which their new weights are sent: every owner's first, every owner's second,
        so that all update at the same time."""
        mine: list[list[int]] = [[] for _ in range(self.nodes.count)]
        for layer in sorted(self.owner):
            mine[self.owner[layer]].append(layer)
        return [layer for row in zip_longest(*mine) for layer in row if layer is not None]

    @property
    def elsewhere(self) -> frozenset[int]:
        """Layers that another process keeps."""
        return frozenset(layer for layer, rank in self.owner.items() if rank != self.nodes.rank)

    def is_own(self, layer: int) -> bool:
        """Whether this process keeps the layer."""
        return self.owner[layer] == self.nodes.rank

    def share(self, layer: int, weights: torch.Tensor) -> None:
        """The new weights of `layer`, as bytes, from its owner to all."""
        self.nodes.share(weights, self.owner[layer])

    def collect(self, layer: int, state: State) -> Iterator[tuple[str, str, torch.Tensor]]:
        """A layer's whole state on the first process, one tensor at a time; called on it and on the layer's owner.

        Args:
            state: of the layer, tensors that are kept elsewhere on the meta device; on the owner all are there.

        Yields:
            the same with contents; on the owner, if it is another, nothing.
        """
        owner = self.owner[layer]
        for file, name, tensor in state:
            if self.nodes.is_first:
                yield file, name, self.nodes.receive_like(tensor, owner) if tensor.is_meta else tensor
            elif file in self.sent_files:
                self.nodes.send_to_first(tensor)


def owners(layouts: Sequence[LayerLayout], count: int) -> dict[int, int]:
    """Rank by trained layer: the largest layers first, each to the one that has least so far."""
    trained = [layer for layer, layout in enumerate(layouts) if layout.num_trainable_elements]
    loads = [0] * count
    owner = {}
    for layer in sorted(trained, key=lambda layer: -layouts[layer].num_trainable_elements):
        rank = loads.index(min(loads))
        owner[layer] = rank
        loads[rank] += layouts[layer].num_trainable_elements
    return owner


def make_shards(nodes: Nodes, recipe: Recipe, layouts: Sequence[LayerLayout], tell: Tell) -> Shards | None:
    """The shares that `nodes.shard_optimizer` asks for; None: every process keeps all. Equal on all processes."""
    wanted = recipe.nodes.shard_optimizer
    if nodes.count == 1 or wanted is False or recipe.method != "full":
        return None
    short = _whole_bytes(recipe, layouts) > MAX_MEMORY_SHARE * host_memory().available_bytes
    if not nodes.most([short])[0] and wanted == "auto":
        return None
    nodes.open_links()
    sent = ("moments",) if recipe.dtype == "float32" else ("masters", "moments")  # float32: all have the weights
    shards = Shards(nodes, owners(layouts, nodes.count), frozenset(sent))
    own = sum(layouts[layer].num_trainable_elements for layer in shards.owner if shards.is_own(layer))
    whole = sum(layouts[layer].num_trainable_elements for layer in shards.owner)
    share = f"{100 * own / whole:.0f} % of {format_bytes(_state_bytes(recipe, whole))}"
    tell(Notice(f"optimizer state and masters are shared out over {nodes.count} machines: here {share}"))
    return shards


def _whole_bytes(recipe: Recipe, layouts: Sequence[LayerLayout]) -> int:
    """Bytes of weights, gradients, masters and moments, all of them."""
    elements = sum(layout.num_trainable_elements for layout in layouts)
    return sum(layout.num_bytes for layout in layouts) + 4 * elements + _state_bytes(recipe, elements)


def _state_bytes(recipe: Recipe, num_elements: int) -> int:
    """Bytes of masters and moments."""
    kind, master_bytes = OPTIMIZERS[recipe.optim], 0 if recipe.dtype == "float32" else 4
    moment_bytes = kind.moment_bytes + (kind.momentum_bytes if recipe.sgd_momentum else 0)
    return int((master_bytes + moment_bytes) * num_elements)
