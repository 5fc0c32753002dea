"""A model that computes with its weights on the host: each layer has them on its device while it is called.

    compute   embed, on the host | block 0: kept | block 1 | block 2 | block 3: kept | ... | head: kept | embed ...
    copies     1 -> slot A, 2 -> slot B          | 4 -> slot A       | 5 -> slot B   | ...

Blocks lie on the devices in equal runs, the head with the last. What transformers keeps for the next token (keys and
values, states) it makes where a block computes, so that it stays there. A device keeps the weights that its memory has
room for; the others come past in turn, through two slots, while the layers before them compute.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.memory import DEVICE_ALIGNMENT_BYTES
from roundpipe_cli.engine.backends.base import Backend, DeviceEvent
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.block_calls import BlockCall, GatheringEmbedding, replace_module
from roundpipe_cli.model.expert_lora import isolate_expert_adapters
from roundpipe_cli.model.layout import LayerLayout, round_up
from roundpipe_cli.model.lora import ADAPTER
from roundpipe_cli.model.new_tokens import TokenRows, replace_row_owners
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.stored.packed_weights import PackedParameter, PackedPlace, whole_weights

NUM_SLOTS = 2
SPREAD = 0.618034
"""Multiples of the golden ratio, without their whole part, in order: any number of the first are spread evenly."""

Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class DevicePlan:
    """The layers of one device."""

    sizes: Mapping[int, int]
    """Device bytes of each, in the order in which they compute."""
    kept: frozenset[int]
    """Layers whose weights stay."""


def plan_devices(layouts: Sequence[LayerLayout], num_devices: int, budget_bytes: int) -> list[DevicePlan]:
    """The layers of each device, and what stays there in `budget_bytes` each: large layers first, others spread evenly.

    Args:
        layouts: one per layer, the embed layer's included, which stays on the host.
    """
    plans, blocks = [], len(layouts) - 2
    for at in range(num_devices):
        layers = [layer for layer in range(1, blocks + 1) if (layer - 1) * num_devices // blocks == at]
        layers += [blocks + 1] if at == num_devices - 1 else []
        sizes = {layer: round_up(layouts[layer].num_bytes, DEVICE_ALIGNMENT_BYTES) for layer in layers}
        left, kept = sorted(sizes, key=lambda layer: (-sizes[layer], layer * SPREAD % 1)), list[int]()
        slots_bytes = [sum([sizes[one] for one in left[at + 1 : at + 2]] * NUM_SLOTS) for at in range(len(left))]
        for layer, slots in zip(left, slots_bytes, strict=True):
            if sum(sizes[one] for one in (*kept, layer)) + slots > budget_bytes:
                break
            kept.append(layer)
        plans.append(DevicePlan(sizes, frozenset(kept)))
    return plans


class DeviceLayers:
    """Weights of one device's layers, of which one after the other begins."""

    def __init__(self, backend: Backend, store: WeightStore, plan: DevicePlan, pool: ThreadPoolExecutor) -> None:
        self.backend, self._store, self._pool, sizes = backend, store, pool, plan.sizes
        self._passing = [layer for layer in sizes if layer not in plan.kept]
        self._coming: deque[tuple[int, torch.Tensor, Future[tuple[Parameters, DeviceEvent]]]] = deque()
        self._held: tuple[int, torch.Tensor, Parameters] | None = None
        """The layer in a slot that has begun, its slot, and its weights."""
        self._turn, self._kept = 0, dict[int, Parameters]()
        for layer in plan.kept:
            if backend.aliases_host and not store.is_mapped:
                self._kept[layer] = store.parameters(layer, 0)
            else:
                self._kept[layer], event = self._fill(layer, backend.allocate(sizes[layer]))
                backend.wait(event)
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
            layout = self._store.layouts[layer]
            event = self.backend.copy_up([(target[: layout.num_bytes], self._store.buffers[layer])], after)
        return {place.name: place.parameter(target) for place in layout.places}, event


class StreamedModel(contextlib.ExitStack):
    """Makes a model's layers fetch their weights, inside `with`."""

    def __init__(
        self, model: nn.Module, split: ModelSplit, store: WeightStore, devices: Sequence[tuple[Backend, DevicePlan]]
    ) -> None:
        """
        Args:
            model: a skeleton, adapters included, which changes; nothing of it is trained.
            store: has all of its weights.
            devices: each with its plan, of `plan_devices`.
        """
        super().__init__()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        isolate_expert_adapters(model)
        replace_row_owners(model, ADAPTER)
        blocks = list(model.get_submodule(split.blocks_path).children())
        around, parts = [model.get_submodule(path) for path in split.tail_paths], split.backbone_path.split(".")
        for depth, part in enumerate(parts):  # the outermost modules outside the backbone
            children = model.get_submodule(".".join(parts[:depth])).named_children()
            around += [child for name, child in children if name != part]
        self._head = len(blocks) + 1
        roots = {layer: [block] for layer, block in enumerate(blocks, 1)} | {self._head: around}
        owner = {id(one): layer for layer, some in roots.items() for root in some for one in root.modules()}
        self._bindings: list[list[tuple[nn.Module, str, str]]] = [[] for _ in range(self._head + 1)]
        for module in model.modules():
            own = [(module, key, names[id(one)]) for key, one in module._parameters.items() if one is not None]
            self._bindings[owner.get(id(module), 0)] += own
        self._moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors that all blocks are given, such as masks, on the devices: of one pass of the model."""
        self._devices: dict[int, DeviceLayers] = {}
        self._backends = {backend.device: backend for backend, _ in devices}
        with contextlib.ExitStack() as opened:  # and closed where a later device has no room
            for backend, plan in devices:
                opened.enter_context(backend.worker_thread())
                pool = ThreadPoolExecutor(1)
                opened.callback(pool.shutdown, cancel_futures=True)
                self._devices |= dict.fromkeys(plan.sizes, DeviceLayers(backend, store, plan, pool))
            self.enter_context(opened.pop_all())
        self._bind(0, {name: nn.Parameter(store.views[name], requires_grad=False) for _, _, name in self._bindings[0]})
        added = model.get_submodule(split.embedding_path)
        if isinstance(added, TokenRows):  # which computes as a head does
            replace_module(model, split.embedding_path, GatheringEmbedding(added.table, False, added))
        for layer, some in roots.items():
            for module in some:
                module.__dict__["forward"] = partial(self._visit, layer, module.forward)

    def _visit(self, layer: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block, or a module of the head, with its weights in place, on its device."""
        if layer == 1:
            self._moved.clear()
        device = self._devices[layer]
        with device.backend.worker_thread():  # which makes it the current one
            packed = self._bind(layer, device.begin(layer))
            call = BlockCall(args, kwargs).map_tensors(partial(self._on, device.backend))
            with whole_weights(packed) if packed else contextlib.nullcontext():
                result = run(*call.args, **call.kwargs)
        if layer != self._head:  # which is several modules
            device.end()
        return result

    def _bind(self, layer: int, parameters: Parameters) -> list[PackedPlace]:
        """Put a layer's weights in place; those that are packed."""
        packed = []
        for module, key, name in self._bindings[layer]:
            module._parameters[key] = parameter = parameters[name]
            packed += [(module, key, parameter)] if isinstance(parameter, PackedParameter) else []
        return packed

    def _on(self, backend: Backend, tensor: torch.Tensor) -> torch.Tensor:
        device = backend.device
        if tensor.device == device:
            return tensor
        if tensor.device.type != "cpu":
            backend.wait(self._backends[tensor.device].record())
            return tensor.to(device)
        key = id(tensor), device
        if key not in self._moved:
            self._moved[key] = tensor, tensor.to(device)
        return self._moved[key][1]
