"""The optimizer on the host: float32 masters, each layer in one sweep, by one of the rules of change.

Equal to the library's own optimizer on float32 masters. Padding between parameters stays zero.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from roundpipe_cli.choices import OptimizerName
from roundpipe_cli.engine.backends.base import set_own_threads
from roundpipe_cli.engine.host_memory import own_scratch, page_aligned
from roundpipe_cli.engine.weights import LayerUpdate, WeightStore
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes
from roundpipe_cli.recipe.schema import Recipe

# How parameters change in an update: AdamW with moments of 32, 16 or 8 bit, SGD and Adafactor, all by libraries.
#
# A flat rule goes element by element, so a whole layer is one tensor to it, updated block by block. The other rules
# need to know where each parameter begins and what shape it has. Values and gradients are float32 always.

Moments = Mapping[str, Tensor]

SCALE_ELEMENTS = 256
"""Elements that share a scale in 8 bit; bitsandbytes' own."""
MIN_8BIT_ELEMENTS = 4096
"""Smaller parameters keep float32 moments, as in bitsandbytes."""
NOISE_ELEMENTS = 2**20
SALT_ELEMENTS = 32
"""The salt of a block of a flat layer grows by one for so many elements."""
PART_ELEMENTS = 2**18
"""Elements that an update with temporaries takes at a time: these stay in the caches, and in the heap."""


def _parts(num_elements: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, num_elements)) for start in range(0, num_elements, step))


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """A rule of updates, with the figures of a recipe that one of them reads."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    rate: float = 1.0
    """Factor of the learning rate."""
    is_flat: ClassVar[bool] = True
    """The rule updates each element by itself."""

    def make_state(self, shape: torch.Size) -> dict[str, Tensor]:
        """The state before the first update for values of this shape."""
        raise NotImplementedError

    def update(
        self, values: Tensor, gradient: Tensor, state: Moments, learning_rate: float, *, number: int, salt: int
    ) -> None:
        """One update in place, number `number` (from 1); `salt` differs from block to block."""
        raise NotImplementedError


class AdamW(UpdateRule):
    """torch.optim.AdamW, its fused kernel."""

    def make_state(self, shape: torch.Size) -> dict[str, Tensor]:
        return {"exp_avg": torch.empty(shape), "exp_avg_sq": torch.empty(shape)}

    def update(
        self, values: Tensor, gradient: Tensor, state: Moments, learning_rate: float, *, number: int, salt: int
    ) -> None:
        torch._fused_adamw_(  # without `torch.optim`, which takes ten times as long to call it
            [values],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [_scalar(number)],
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )


@functools.lru_cache(maxsize=2)
def _scalar(value: float) -> Tensor:
    """float32 []; only read."""
    return torch.tensor(float(value), dtype=torch.float32)


class AdamW16(AdamW):
    """AdamW with moments kept in bfloat16.

    The square's average moves by a thousandth a step, less than bfloat16 can show, so it is rounded up or down at
    random with the probabilities that make the mean right (arXiv 2010.06192). The noise is a table, read from a place
    that depends on update and block, so a run that is resumed rounds as one that never stopped.
    """

    def make_state(self, shape: torch.Size) -> dict[str, Tensor]:
        return {name: torch.empty(shape, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}

    def update(
        self, values: Tensor, gradient: Tensor, state: Moments, learning_rate: float, *, number: int, salt: int
    ) -> None:
        for part in _parts(values.numel(), PART_ELEMENTS * torch.get_num_threads()):
            kept = state["exp_avg"][part], state["exp_avg_sq"][part]
            moment, square_moment = own_scratch(2 * len(kept[0]), torch.float32).view(2, -1)
            moment.copy_(kept[0])
            square_moment.copy_(kept[1])
            moments = {"exp_avg": moment, "exp_avg_sq": square_moment}
            super().update(values[part], gradient[part], moments, learning_rate, number=number, salt=salt)
            kept[0].copy_(moment)
            bits = square_moment.view(torch.int32)
            borders = range((part.start // NOISE_ELEMENTS + 1) * NOISE_ELEMENTS, part.stop, NOISE_ELEMENTS)
            for start, stop in pairwise((part.start, *borders, part.stop)):  # of cells, wherever a part begins
                cell, inner = divmod(start, NOISE_ELEMENTS)
                cell_salt = salt + cell * NOISE_ELEMENTS // SALT_ELEMENTS
                place = (number * 1_000_003 + cell_salt * 7_919) % NOISE_ELEMENTS + inner
                bits[start - part.start : stop - part.start].add_(_noise()[place : place + stop - start])
            bits.bitwise_and_(-65536)
            kept[1].copy_(square_moment)


@functools.cache
def _noise() -> Tensor:
    """int32 [2 * NOISE_ELEMENTS] of 16 random bits, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2**16, (NOISE_ELEMENTS,), generator=generator, dtype=torch.int32).repeat(2)


class AdamW8(AdamW):
    """bitsandbytes' AdamW8bit: moments in 8 bit with a scale for each 256 (arXiv 2110.02861)."""

    is_flat = False

    def make_state(self, shape: torch.Size) -> dict[str, Tensor]:
        count = shape.numel()
        if count < MIN_8BIT_ELEMENTS:
            return {"state1": torch.empty(shape), "state2": torch.empty(shape)}
        scales = -(-count // SCALE_ELEMENTS)
        return {
            "state1": torch.empty(shape, dtype=torch.uint8),
            "state2": torch.empty(shape, dtype=torch.uint8),
            "absmax1": torch.empty(scales),
            "absmax2": torch.empty(scales),
        }

    def update(
        self, values: Tensor, gradient: Tensor, state: Moments, learning_rate: float, *, number: int, salt: int
    ) -> None:
        functional: Any = import_bitsandbytes().functional
        moment, square_moment = state["state1"].view(-1), state["state2"].view(-1)
        gradient, values = gradient.view(-1), values.view(-1)
        (beta1, beta2), eps, decay = self.betas, self.eps, self.weight_decay
        if "absmax1" not in state:
            first = (moment, beta1, eps, number, learning_rate)
            second = (square_moment, beta2, 0.0, 0.0, decay)
            functional.optimizer_update_32bit("adam", gradient, values, *first, *second, 1.0, None, max_unorm=0.0)
            return
        numbers = (beta1, beta2, 0.0, 0.0, eps, number, learning_rate)
        for part in _parts(values.numel(), PART_ELEMENTS):  # its temporaries take 20 bytes an element
            moments = moment[part], square_moment[part]
            rows = slice(part.start // SCALE_ELEMENTS, -(-part.stop // SCALE_ELEMENTS))
            others = (*numbers, *_maps(), state["absmax1"][rows], state["absmax2"][rows], decay)
            functional.optimizer_update_8bit_blockwise(
                "adam", gradient[part], values[part], *moments, *others, gnorm_scale=1.0
            )


@functools.cache
def _maps() -> tuple[Tensor, Tensor]:
    """bitsandbytes' codes of numbers with and without a sign, float32 [256]."""
    functional: Any = import_bitsandbytes().functional
    return functional.create_dynamic_map(signed=True), functional.create_dynamic_map(signed=False)


class Sgd(UpdateRule):
    """torch.optim.SGD, its fused kernel; `weight_decay` is added to the gradient."""

    def make_state(self, shape: torch.Size) -> dict[str, Tensor]:
        return {"momentum": torch.empty(shape)} if self.momentum else {}

    def update(
        self, values: Tensor, gradient: Tensor, state: Moments, learning_rate: float, *, number: int, salt: int
    ) -> None:
        torch._fused_sgd_(
            [values],
            [gradient],
            list(state.values()),
            lr=learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Adafactor(UpdateRule):
    """transformers' Adafactor at a given learning rate: the squares' averages of rows and columns only (arXiv
    1804.04235)."""

    is_flat = False

    def make_state(self, shape: torch.Size) -> dict[str, Tensor]:
        if len(shape) < 2:
            return {"exp_avg_sq": torch.empty(shape)}
        return {"exp_avg_sq_row": torch.empty(shape[:-1]), "exp_avg_sq_col": torch.empty(shape[:-2] + shape[-1:])}

    def update(
        self, values: Tensor, gradient: Tensor, state: Moments, learning_rate: float, *, number: int, salt: int
    ) -> None:
        from transformers import Adafactor as Theirs

        parameter = torch.nn.Parameter(values)
        parameter.grad = gradient
        settings: dict[str, Any] = {"scale_parameter": False, "relative_step": False}
        optimizer = Theirs([parameter], lr=learning_rate, weight_decay=self.weight_decay, **settings)
        optimizer.state[parameter] = {"step": number - 1, "RMS": 0, **state}
        optimizer.step()


RULES: dict[OptimizerName, type[UpdateRule]] = {
    "adamw": AdamW,
    "adamw_bf16": AdamW16,
    "adamw_8bit": AdamW8,
    "sgd": Sgd,
    "adafactor": Adafactor,
}
"""Value of `optim` -> its rule."""


def make_rule(name: OptimizerName, **settings: Any) -> UpdateRule:
    """The rule that a recipe's `optim` names; `settings` are its figures.

    Raises:
        RefusedError: its library is not installed.
    """
    if name == "adamw_8bit" and import_bitsandbytes() is None:
        raise RefusedError(
            "moments in 8 bit need the package bitsandbytes",
            where="optim: adamw_8bit",
            found="not installed",
            hint="pip install bitsandbytes",
        )
    return RULES[name](**settings)


_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""transformers 5.23, `Trainer.get_decay_parameter_names`, which also spares whatever is in an `nn.LayerNorm`."""
BLOCK_ELEMENTS = 2**20
"""Elements of a sweep: a block's gradient, masters and moments (16 MiB) pass through the cache once for all work."""


def _block_elements() -> int:
    """Elements of a sweep by all threads of an update: four share a block of `BLOCK_ELEMENTS`. Many threads have large
    caches together, and would wait for Python between small blocks, as would the threads that issue to GPUs."""
    return BLOCK_ELEMENTS * max(1, torch.get_num_threads() // 4)


@dataclass(frozen=True)
class _Piece:
    """Consecutive elements of a layer that are updated together, or block by block if the rule is flat."""

    start: int
    stop: int
    shape: torch.Size
    rule: UpdateRule
    state: Mapping[str, Tensor]

    def update(
        self, gradient: Tensor, target: LayerUpdate, learning_rate: float, *, factor: float, number: int, salt: int
    ) -> None:
        """Clip factor, update and rounding, from end to end; `gradient` and `target` are the whole layer's."""
        is_flat, whole = self.rule.is_flat, slice(self.start, self.stop)
        size = _block_elements() if is_flat else self.stop - self.start
        gradients, masters = gradient[whole].split(size), target.masters[whole].split(size)
        weights = () if target.weights is None else target.weights[whole].split(size)
        states = {name: tensor.split(size) for name, tensor in self.state.items()} if is_flat else {}
        for index, (grad, values) in enumerate(zip(gradients, masters, strict=True)):
            if factor != 1.0:
                grad.mul_(_scalar(factor))
            if is_flat:
                state: Moments = {name: parts[index] for name, parts in states.items()}
            else:
                values, grad, state = values.view(self.shape), grad.view(self.shape), self.state
            own_salt = salt + (self.start + index * size) // SALT_ELEMENTS
            self.rule.update(values, grad, state, self.rule.rate * learning_rate, number=number, salt=own_salt)
            if weights:
                weights[index].copy_(masters[index])


class HostOptimizer:
    """Updates the masters of a weight store from its gradients and rounds them to the weights of the next version."""

    def __init__(
        self,
        store: WeightStore,
        rule: UpdateRule | None = None,
        elsewhere: Collection[int] = (),
        *,
        rules: Mapping[str, UpdateRule] | None = None,
    ) -> None:
        """
        Args:
            rule: what an update is; AdamW with torch's defaults and no weight decay unless given.
            elsewhere: layers that another process updates: their state here is on the meta device.
            rules: other rules with the same state, by parameter; `rule` where nothing is said.
        """
        self._elsewhere = frozenset(elsewhere)
        self._store = store
        self._rule = rule or AdamW()
        self._rules = rules or {}
        self.num_updates = 0
        """Number of updates done or begun (Adam's step count)."""
        self.layers = [layer for layer, layout in enumerate(store.layouts) if layout.num_trainable_elements]
        """Layers with something to update, in order."""
        self._moments: dict[int, list[tuple[str, Tensor]]] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        for layer in self.layers:
            make = self._flat_pieces if self._rule.is_flat else self._parameter_pieces
            self._moments[layer] = []
            self._pieces[layer] = make(layer)

    def _flat_pieces(self, layer: int) -> list[_Piece]:
        layout = self._store.layouts[layer]
        state = self._make_state(layer, layout.name, torch.Size([layout.num_trainable_elements]))
        groups = groupby(layout.trainable, key=lambda place: self._rules.get(place.name, self._rule))
        firsts = [(rule, next(places).element_offset) for rule, places in groups]
        borders = [0, *(start for _, start in firsts[1:]), layout.num_trainable_elements]
        pieces = []
        for (rule, _), (start, stop) in zip(firsts, pairwise(borders), strict=True):
            part = {name: tensor[start:stop] for name, tensor in state.items()}
            pieces.append(_Piece(start, stop, torch.Size([stop - start]), rule, part))
        return pieces

    def _parameter_pieces(self, layer: int) -> list[_Piece]:
        pieces = []
        for place in self._store.layouts[layer].trainable:
            state = self._make_state(layer, place.name, place.shape)
            start, rule = place.element_offset, self._rules.get(place.name, self._rule)
            pieces.append(_Piece(start, start + place.num_elements, place.shape, rule, state))
        return pieces

    def _make_state(self, layer: int, name: str, shape: torch.Size) -> dict[str, Tensor]:
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

    def step(self, learning_rate: float, gradient_factor: float = 1.0) -> None:
        """One update of every layer, at once; clipping and loss scale come in by `gradient_factor`."""
        self.num_updates += 1
        number, gradients = self.num_updates, self._store.gradients
        for layer in self.layers:
            self.update_layer(layer, gradients[layer], number, learning_rate, gradient_factor=gradient_factor)

    @torch.no_grad()
    def update_layer(
        self, layer: int, gradient: Tensor, num_updates: int, learning_rate: float, *, gradient_factor: float
    ) -> None:
        """Clip factor, update and rounding of one layer, as its update number `num_updates` (from 1).

        Args:
            gradient: float32 [num_trainable_elements]; multiplied by `gradient_factor` in place.
        """
        with self._store.next_version(layer) as target:
            for piece in self._pieces[layer]:
                salt = layer * 8_191
                piece.update(gradient, target, learning_rate, factor=gradient_factor, number=num_updates, salt=salt)

    @torch.no_grad()
    def skip_layer(self, layer: int) -> None:
        """The next version of one layer without an update: the values of the one before."""
        with self._store.next_version(layer) as target:
            if target.weights is not None:
                target.weights.copy_(target.masters)

    def moments_of(self, layer: int) -> list[tuple[str, Tensor]]:
        """(name, tensor) of one layer's state to save."""
        return self._moments[layer]

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """`moments_of` all layers."""
        for layer in self.layers:
            yield from self.moments_of(layer)

    def load(self, moments: Mapping[str, Tensor], num_updates: int) -> None:
        """Restore saved moments."""
        self.num_updates = num_updates
        for name, tensor in self.moments():
            if not tensor.is_meta:
                tensor.copy_(moments[name])

    @property
    def num_bytes(self) -> int:
        """Host bytes of the moments."""
        return sum(tensor.nbytes for _, tensor in self.moments() if not tensor.is_meta)


def measured_update_s(num_elements: int, num_threads: int) -> float:
    """Seconds that AdamW takes for an element of a made-up layer: the fastest of a few updates, in a run's blocks."""
    values, gradient, *moments = (page_aligned(4 * num_elements).view(torch.float32) for _ in range(4))
    state = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
    piece = _Piece(0, num_elements, values.shape, AdamW(), state)
    taken, threads = [], torch.get_num_threads()
    set_own_threads(num_threads)
    for number in range(1, 5):
        start_s = time.perf_counter()
        piece.update(gradient, LayerUpdate(values, None, values), 1e-3, factor=1.0, number=number, salt=0)
        taken.append(time.perf_counter() - start_s)
    set_own_threads(threads)
    return min(taken) / num_elements


def make_optimizer(
    store: WeightStore, recipe: Recipe, model: nn.Module, elsewhere: Collection[int] = ()
) -> HostOptimizer:
    """The optimizer that a recipe asks for, of a model's weights; `elsewhere` as of `HostOptimizer`."""
    rule = make_rule(
        recipe.optim,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        momentum=recipe.sgd_momentum,
        weight_decay=recipe.weight_decay,
    )
    ratio = recipe.lora.loraplus_lr_ratio if recipe.method == "lora" else 1.0
    spared = undecayed_names(model) & store.trainable_names if recipe.weight_decay else set()
    rules = dict.fromkeys(sorted(spared), replace(rule, weight_decay=0.0))
    for place in (place for layout in store.layouts for place in layout.trainable if ratio != 1.0):
        if ".lora_B." in place.name or len(place.shape) == 1:  # what LoRA+ trains faster, as in PEFT
            rules[place.name] = replace(rules.get(place.name, rule), rate=ratio)
    return HostOptimizer(store, rule, elsewhere, rules=rules)


def undecayed_names(model: nn.Module) -> set[str]:
    """Parameters without weight decay: biases and the weights of norms, as in transformers' Trainer."""
    in_norms = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if path and isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters()
    }
    return in_norms.union(name for name, _ in model.named_parameters() if _UNDECAYED.search(name.lower()))
