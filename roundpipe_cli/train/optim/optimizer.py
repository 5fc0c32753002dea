"""The optimizer on the host: float32 masters, each layer in one sweep, by one of the rules in `update_rules.py`.

Equal to the library's own optimizer on float32 masters. Padding between parameters stays zero.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from roundpipe_cli.engine.weights import LayerUpdate, WeightStore, page_aligned
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.optim.update_rules import AdamW, RuleSettings, UpdateRule, make_rule

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_")
"""transformers 5.23, `Trainer.get_decay_parameter_names`, which knows `ln_1` and `ln_f` by their modules."""
BLOCK_ELEMENTS = 2**20
"""Elements of a sweep: a block's gradient, masters and moments (16 MiB) pass through the cache once for all work."""


@dataclass(frozen=True)
class _Piece:
    """Consecutive elements of a layer that are updated together, or block by block if the rule is flat."""

    start: int
    stop: int
    shape: torch.Size
    rate: float
    """Factor of the learning rate."""
    rule: UpdateRule
    state: Mapping[str, torch.Tensor]

    def blocks(self, size: int) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        """(elements of the layer, their state) from end to end."""
        for start in range(self.start, self.stop, size):
            block = slice(start, min(start + size, self.stop))
            inner = slice(block.start - self.start, block.stop - self.start)
            yield block, {name: tensor[inner] for name, tensor in self.state.items()}


class HostOptimizer:
    """Updates the masters of a weight store from its gradients and rounds them to the weights of the next version."""

    def __init__(
        self,
        store: WeightStore,
        rule: UpdateRule | None = None,
        rates: Mapping[str, float] | None = None,
        elsewhere: Collection[int] = (),
        rules: Mapping[str, UpdateRule] | None = None,
    ) -> None:
        """
        Args:
            rule: what an update is; AdamW with torch's defaults and no weight decay unless given.
            rates: factor of the learning rate by parameter; 1 where nothing is said.
            elsewhere: layers that another process updates: their state here is on the meta device.
            rules: other rules with the same state, by parameter; `rule` where nothing is said.
        """
        self._elsewhere = frozenset(elsewhere)
        self._store = store
        self._rule = rule or AdamW()
        self._rates = rates or {}
        self._rules = rules or {}
        self.num_updates = 0
        """Number of updates done or begun (Adam's step count)."""
        self.layers = [layer for layer, layout in enumerate(store.layouts) if layout.num_trainable_elements]
        """Layers with something to update, in order."""
        self._moments: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        for layer in self.layers:
            make = self._flat_pieces if self._rule.is_flat else self._parameter_pieces
            self._moments[layer] = []
            self._pieces[layer] = make(layer)

    def _flat_pieces(self, layer: int) -> list[_Piece]:
        """Neighbours with the same learning rate and rule are one piece."""
        layout = self._store.layouts[layer]
        state = self._make_state(layer, layout.name, torch.Size([layout.num_trainable_elements]))
        borders: list[int] = []
        ways: list[tuple[float, UpdateRule]] = []
        for place in layout.trainable:
            way = self._way(place.name)
            if not ways or way != ways[-1]:
                borders.append(place.element_offset if ways else 0)
                ways.append(way)
        pieces = []
        ends = [*borders[1:], layout.num_trainable_elements]
        for start, stop, (rate, rule) in zip(borders, ends, ways, strict=True):
            part = {name: tensor[start:stop] for name, tensor in state.items()}
            pieces.append(_Piece(start, stop, torch.Size([stop - start]), rate, rule, part))
        return pieces

    def _way(self, name: str) -> tuple[float, UpdateRule]:
        """Factor of the learning rate and rule of a parameter."""
        return self._rates.get(name, 1.0), self._rules.get(name, self._rule)

    def _parameter_pieces(self, layer: int) -> list[_Piece]:
        pieces = []
        for place in self._store.layouts[layer].trainable:
            state = self._make_state(layer, place.name, place.shape)
            start, (rate, rule) = place.element_offset, self._way(place.name)
            pieces.append(_Piece(start, start + place.num_elements, place.shape, rate, rule, state))
        return pieces

    def _make_state(self, layer: int, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        """Zeroed memory of exact size for the rule's state, with the names under which it is saved."""
        state = {}
        with torch.device("meta"):
            wanted = self._rule.make_state(shape)
        for key, like in wanted.items():
            memory = like
            if layer not in self._elsewhere:
                memory = page_aligned(like.numel() * like.itemsize).view(like.dtype).view(like.shape)
            state[key] = memory
            self._moments[layer].append((f"{name}.{key}", memory))
        return state

    def step(self, learning_rate: float, gradient_factor: float = 1.0, step: int = 0) -> None:
        """One update of every layer, at once.

        Args:
            learning_rate: of this update.
            gradient_factor: gradients are multiplied by this first: clipping and loss scale.
            step: whose gradients are meant.
        """
        self.num_updates += 1
        gradients = self._store.gradients_of(step)
        for layer in self.layers:
            self.update_layer(layer, gradients[layer], self.num_updates, learning_rate, gradient_factor)

    @torch.no_grad()
    def update_layer(
        self, layer: int, gradient: torch.Tensor, num_updates: int, learning_rate: float, gradient_factor: float
    ) -> None:
        """Clip factor, update and rounding of one layer, as its update number `num_updates` (from 1).

        Args:
            gradient: float32 [num_trainable_elements]; multiplied by `gradient_factor` in place.
        """
        with self._store.next_version(layer) as target:
            for piece in self._pieces[layer]:
                rate = learning_rate * piece.rate
                if not self._rule.is_flat:
                    block = slice(piece.start, piece.stop)
                    grad, new = _prepared(gradient[block], target, block, gradient_factor)
                    piece.rule.update(new.view(piece.shape), grad.view(piece.shape), piece.state, rate, num_updates, 0)
                    _round(target, block)
                    continue
                for block, state in piece.blocks(BLOCK_ELEMENTS):
                    grad, new = _prepared(gradient[block], target, block, gradient_factor)
                    salt = layer * 8_191 + block.start // 32
                    piece.rule.update(new, grad, state, rate, num_updates, salt)
                    _round(target, block)

    @torch.no_grad()
    def skip_layer(self, layer: int) -> None:
        """The next version of one layer without an update: the values of the one before."""
        with self._store.next_version(layer) as target:
            if target.new_masters is not target.masters:
                target.new_masters.copy_(target.masters)
            if target.weights is not None:
                target.weights.copy_(target.masters)

    def moments_of(self, layer: int) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of one layer's state to save."""
        return self._moments[layer]

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`moments_of` all layers."""
        for layer in self.layers:
            yield from self.moments_of(layer)

    def load(self, moments: Mapping[str, torch.Tensor], num_updates: int) -> None:
        """Restore saved moments."""
        self.num_updates = num_updates
        for name, tensor in self.moments():
            if not tensor.is_meta:
                tensor.copy_(moments[name])

    @property
    def num_bytes(self) -> int:
        """Host bytes of the moments."""
        return sum(tensor.nbytes for _, tensor in self.moments() if not tensor.is_meta)


def make_optimizer(store: WeightStore, recipe: Recipe, elsewhere: Collection[int] = ()) -> HostOptimizer:
    """The optimizer that a recipe asks for; `elsewhere` as of `HostOptimizer`.

    Raises:
        RefusedError: its library is not installed.
    """
    settings = RuleSettings(
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        momentum=recipe.sgd_momentum,
        weight_decay=recipe.weight_decay,
    )
    rule = make_rule(recipe.optim, settings)
    ratio = recipe.lora.loraplus_lr_ratio if recipe.method == "lora" else 1.0
    rates = dict.fromkeys(lora_plus_names(store), ratio) if ratio != 1.0 else None
    bare = make_rule(recipe.optim, replace(settings, weight_decay=0.0))
    rules = dict.fromkeys(undecayed_names(store), bare) if recipe.weight_decay else None
    return HostOptimizer(store, rule, rates, elsewhere, rules)


def undecayed_names(store: WeightStore) -> list[str]:
    """Parameters without weight decay: biases and the weights of norms, as in transformers' Trainer."""
    names = (place.name for layout in store.layouts for place in layout.trainable)
    return [name for name in names if _UNDECAYED.search(name.lower())]


def lora_plus_names(store: WeightStore) -> list[str]:
    """Parameters that LoRA+ trains faster: the B matrices, and what has one dimension, as in PEFT."""
    places = (place for layout in store.layouts for place in layout.trainable)
    return [place.name for place in places if ".lora_B." in place.name or len(place.shape) == 1]


def _prepared(
    gradient: torch.Tensor, target: LayerUpdate, block: slice, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block's gradient times `factor`, and its masters where they are to be updated."""
    if factor != 1.0:
        gradient.mul_(factor)
    new = target.new_masters[block]
    if target.new_masters is not target.masters:
        new.copy_(target.masters[block])
    return gradient, new


def _round(target: LayerUpdate, block: slice) -> None:
    if target.weights is not None:
        target.weights[block].copy_(target.new_masters[block])
