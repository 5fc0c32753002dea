"""A model that computes with its weights on the host: each layer has them on its device while it is called.

    compute   embed, on the host | block 0: kept | block 1 | block 2 | block 3: kept | ... | head: kept | embed ...
    copies     1 -> slot A, 2 -> slot B          | 4 -> slot A       | 5 -> slot B   | ...

Blocks lie on the devices in equal runs, the head with the last. What transformers keeps for the next token (keys and
values, states) it makes where a block computes, so that it stays there. A device keeps the weights that its memory has
room for; the others come past in turn, through two slots, while the layers before them compute.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.memory import DEVICE_ALIGNMENT_BYTES
from roundpipe_cli.engine.backends.base import Backend, DeviceEvent
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.expert_lora import isolate_expert_adapters
from roundpipe_cli.model.layout import LayerLayout, round_up
from roundpipe_cli.model.lora import ADAPTER
from roundpipe_cli.model.new_tokens import replace_row_owners
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.stored.packed_weights import PackedParameter, PackedPlace, whole_weights

NUM_SLOTS = 2
SPREAD = 0.618034
"""Multiples of the golden ratio, without their whole part, in order: any number of the first are spread evenly."""

Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class DevicePlan:
    """The layers of one device."""

    layers: tuple[int, ...]
    """In the order in which they compute."""
    sizes: Mapping[int, int]
    """Device bytes of each."""
    kept: frozenset[int]
    """Layers whose weights stay."""

    @property
    def kept_bytes(self) -> int:
        return sum(self.sizes[layer] for layer in self.kept)

    @property
    def passing_bytes(self) -> int:
        """Bytes that come past in each pass of the model."""
        return sum(self.sizes.values()) - self.kept_bytes


def plan_devices(layouts: Sequence[LayerLayout], num_devices: int, budget_bytes: int) -> list[DevicePlan]:
    """The layers of each device, and what stays there of them.

    Args:
        layouts: one per layer, the embed layer's included.
        budget_bytes: of each device, for weights.
    """
    head = len(layouts) - 1
    plans = []
    for at in range(num_devices):
        layers = [layer for layer in range(1, head) if (layer - 1) * num_devices // max(1, head - 1) == at]
        layers += [head] if at == num_devices - 1 else []
        sizes = {layer: round_up(layouts[layer].num_bytes, DEVICE_ALIGNMENT_BYTES) for layer in layers}
        plans.append(DevicePlan(tuple(layers), sizes, _that_stay(sizes, budget_bytes)))
    return plans


def _that_stay(sizes: Mapping[int, int], budget_bytes: int) -> frozenset[int]:
    """Layers that a device keeps beside its slots: large ones first, others spread evenly."""
    left, kept = sorted(sizes, key=lambda layer: (-sizes[layer], layer * SPREAD % 1)), set[int]()
    while left:
        others = [sizes[layer] for layer in left[1:][:NUM_SLOTS]]
        budget_bytes -= sizes[left[0]]
        if budget_bytes < len(others) * max(others, default=0):
            break
        kept.add(left.pop(0))
    return frozenset(kept)


class DeviceLayers:
    """Weights of one device's layers, of which one after the other begins."""

    def __init__(self, backend: Backend, store: WeightStore, plan: DevicePlan) -> None:
        self.backend, self._store, sizes = backend, store, plan.sizes
        self._passing = [layer for layer in plan.layers if layer not in plan.kept]
        self._pool = ThreadPoolExecutor(1)
        self._coming: deque[tuple[int, torch.Tensor, Future[tuple[Parameters, DeviceEvent]]]] = deque()
        self._held: tuple[int, torch.Tensor, Parameters] | None = None
        """The layer in a slot that has begun, its slot, and its weights."""
        self._turn = 0
        reads_host = backend.aliases_host and not store.is_mapped  # in place
        self._kept = {layer: store.parameters(layer, 0) for layer in plan.kept if reads_host}
        filled = {layer: self._fill(layer, backend.allocate(sizes[layer])) for layer in plan.kept - self._kept.keys()}
        for layer, (parameters, event) in filled.items():
            backend.wait(event)
            self._kept[layer] = parameters
        slot_bytes = max((sizes[layer] for layer in self._passing), default=0)
        for _ in self._passing[:NUM_SLOTS]:
            self._ask(backend.allocate(slot_bytes))

    def begin(self, layer: int) -> Parameters:
        """The weights of a layer, for computations from here on until it ends, or the next one begins."""
        if (kept := self._kept.get(layer)) is not None:
            return kept
        if self._held is None or self._held[0] != layer:
            self.end()
            coming, slot, filled = self._coming.popleft()
            assert coming == layer, f"layer {layer} began, not {coming}"
            parameters, event = filled.result()
            self.backend.wait(event)
            self._held = layer, slot, parameters
        return self._held[2]

    def end(self) -> None:
        """The layer that has begun is computed: its slot takes the next one that is not there yet."""
        if self._held is not None:
            self._ask(self._held[1])
            self._held = None

    def _ask(self, slot: torch.Tensor) -> None:
        layer = self._passing[self._turn % len(self._passing)]
        self._turn += 1
        self._coming.append((layer, slot, self._pool.submit(self._fill, layer, slot, self.backend.record())))

    def _fill(self, layer: int, target: torch.Tensor, after: DeviceEvent = None) -> tuple[Parameters, DeviceEvent]:
        with self.backend.copy_thread():
            while pause_s := self.backend.happens_in_s(after):
                time.sleep(pause_s)
            layout = self._store.layouts[layer]
            event = self.backend.copy_up([(target[: layout.num_bytes], self._store.buffers[layer])])
        return {place.name: place.parameter(target) for place in layout.places}, event

    def close(self) -> None:
        """Let no copy begin any more."""
        self._pool.shutdown(cancel_futures=True)


class StreamedModel:
    """Makes a model's layers fetch their weights, inside `with`."""

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        store: WeightStore,
        devices: Sequence[tuple[Backend, DevicePlan]],
    ) -> None:
        """
        Args:
            model: a skeleton, adapters included, which changes; nothing of it is trained.
            store: has all of its weights.
            devices: each with its plan, of `plan_devices`.
        """
        self._stack = contextlib.ExitStack()
        for backend, _ in devices:
            self._stack.enter_context(backend.worker_thread())
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        isolate_expert_adapters(model)
        replace_row_owners(model, ADAPTER)
        self._bindings = _bindings(model, split, names)
        self._bound: dict[int, Parameters] = {}
        self._packed: dict[int, list[PackedPlace]] = {}
        self._moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors that all blocks are given, such as masks, on the devices: of one pass of the model."""
        self._device_of: dict[int, DeviceLayers] = {}
        for backend, plan in devices:
            device = DeviceLayers(backend, store, plan)
            self._stack.callback(device.close)
            self._device_of |= dict.fromkeys(plan.layers, device)
        self._head = split.num_blocks + 1
        self._bind(0, {name: nn.Parameter(store.views[name], requires_grad=False) for _, _, name in self._bindings[0]})
        for layer, block in enumerate(model.get_submodule(split.blocks_path).children(), 1):
            block.forward = partial(self._visit, layer, block.forward)
        for module in _around_blocks(model, split):
            module.forward = partial(self._visit, self._head, module.forward)  # type: ignore[method-assign]

    def __enter__(self) -> StreamedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _visit(self, layer: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block, or a module of the head, with its weights in place, on its device."""
        if layer == 1:
            self._moved.clear()
        device = self._device_of[layer]
        self._bind(layer, device.begin(layer))
        args, kwargs = self._on(device.backend.device, args), self._on(device.backend.device, kwargs)
        with whole_weights(packed) if (packed := self._packed[layer]) else contextlib.nullcontext():
            result = run(*args, **kwargs)
        if layer != self._head:  # which is several modules
            device.end()
        return result

    def _bind(self, layer: int, parameters: Parameters) -> None:
        if self._bound.get(layer) is parameters:
            return
        self._bound[layer] = parameters
        for module, attribute, name in self._bindings[layer]:
            module._parameters[attribute] = parameters[name]
        places = [(module, attribute, parameters[name]) for module, attribute, name in self._bindings[layer]]
        self._packed[layer] = [(m, a, one) for m, a, one in places if isinstance(one, PackedParameter)]

    def _on(self, device: torch.device, value: Any) -> Any:
        """`value` with its tensors on the device."""
        if type(value) is dict:
            return {key: self._on(device, one) for key, one in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._on(device, one) for one in value)
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        if value.device.type != "cpu":
            return value.to(device)
        return self._moved.setdefault((id(value), device), (value, value.to(device)))[1]


def _bindings(model: nn.Module, split: ModelSplit, names: dict[int, str]) -> list[list[tuple[nn.Module, str, str]]]:
    """By layer: module, attribute and name of each parameter that it reads."""
    blocks = [f"{split.blocks_path}.{name}." for name, _ in model.get_submodule(split.blocks_path).named_children()]
    found: list[list[tuple[nn.Module, str, str]]] = [[] for _ in range(len(blocks) + 2)]
    owner = {prefix: layer for layer, prefix in enumerate(blocks, 1)}
    depth = split.blocks_path.count(".") + 2
    for path, module in model.named_modules():
        layer = owner.get(".".join(path.split(".")[:depth]) + ".")
        if layer is None:
            is_tail = f"{path}.".startswith(tuple(f"{one}." for one in split.tail_paths))
            layer = 0 if f"{path}.".startswith(f"{split.backbone_path}.") and not is_tail else -1
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found[layer].append((module, attribute, names[id(parameter)]))
    return found


def _around_blocks(model: nn.Module, split: ModelSplit) -> Iterator[nn.Module]:
    """The outermost modules that compute after the last block."""
    yield from (model.get_submodule(path) for path in split.tail_paths)
    parts = split.backbone_path.split(".")
    for depth, part in enumerate(parts):
        around = model.get_submodule(".".join(parts[:depth]))
        yield from (child for name, child in around.named_children() if name != part)
