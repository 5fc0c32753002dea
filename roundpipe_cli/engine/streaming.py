"""A model that computes with its weights on the host: each layer has them on its device while it is called.

    compute   embed, on the host | block 0: kept | block 1 | block 2 | block 3: kept | ... | head: kept | embed ...
    copies     1 -> slot A, 2 -> slot B          | 4 -> slot A       | 5 -> slot B   | ...

What transformers keeps for the next token (keys and values, states) it makes where a block computes, so that it stays
there. A device keeps the weights that its memory has room for; the others come past in turn, through two slots, while
the layers before them compute, on this device or on another.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.answering import DevicePlan
from roundpipe_cli.costs.cost import NUM_SLOTS
from roundpipe_cli.engine.backends.base import Backend, DeviceEvent
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.block_calls import BlockCall, GatheringEmbedding, replace_module
from roundpipe_cli.model.expert_lora import isolate_expert_adapters
from roundpipe_cli.model.lora import ADAPTER
from roundpipe_cli.model.module_copies import copy_modules
from roundpipe_cli.model.new_tokens import TokenRows, replace_row_owners
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.stored.packed_weights import PackedParameter, PackedPlace, whole_weights

Parameters = dict[str, nn.Parameter]


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
        slot_bytes = 0 if backend.aliases_host else max((sizes[layer] for layer in self._passing), default=0)
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
            layout, source, event = self._store.layouts[layer], self._store.buffers[layer], after
            if self.backend.aliases_host and layer in self._passing:  # in place; the system reads the file here, ahead
                target, _ = source, source[:: mmap.PAGESIZE].max()
            else:
                event = self.backend.copy_up([(target[: layout.num_bytes], source)], after)
        return {place.name: place.parameter(target) for place in layout.places}, event


class StreamedModel(contextlib.ExitStack):
    """A copy of a model whose layers fetch their weights, inside `with`."""

    def __init__(
        self, model: nn.Module, split: ModelSplit, store: WeightStore, devices: Sequence[tuple[Backend, DevicePlan]]
    ) -> None:
        """
        Args:
            model: a skeleton, adapters included.
            store: has all of its weights, which no update changes meanwhile.
            devices: each with its plan, of `plan_devices`.
        """
        super().__init__()
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        copied, memo = copy_modules(model)
        names = {id(memo[key]): name for key, name in named.items()}
        model = copied.eval()
        self.model: Any = model
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
        self._bound: dict[int, tuple[Parameters, list[PackedPlace]]] = {}
        self._moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors that all blocks are given, such as masks, on the devices: of one pass of the model."""
        self._devices: dict[int, DeviceLayers] = {}
        self._backends = {backend.device: backend for backend, _ in devices}
        self._is_host = all(device.type == "cpu" for device in self._backends)
        with contextlib.ExitStack() as opened:  # and closed where a later device has no room
            opened.callback(torch.set_num_threads, torch.get_num_threads())
            opened.callback(self._release)
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

    def _release(self) -> None:
        """Let go of the devices' memory: modules that visit their layers refer to this object, which refers to them."""
        for kept in (self._devices, self._bound, self._moved):
            kept.clear()
        for module, key, _ in chain.from_iterable(self._bindings):
            module._parameters[key] = None

    def _visit(self, layer: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block, or a module of the head, with its weights in place, on its device."""
        if layer == 1:
            self._moved.clear()
        device = self._devices[layer]
        with device.backend.worker_thread():  # which makes it the current one
            packed = self._bind(layer, device.begin(layer))
            if not self._is_host:
                call = BlockCall(args, kwargs).map_tensors(partial(self._on, device.backend))
                args, kwargs = call.args, call.kwargs
            with whole_weights(packed) if packed else contextlib.nullcontext():
                result = run(*args, **kwargs)
        if layer != self._head:  # which is several modules
            device.end()
        return result

    def _bind(self, layer: int, parameters: Parameters) -> list[PackedPlace]:
        """Put a layer's weights in place; those that are packed."""
        bound, packed = self._bound.get(layer, (None, list[PackedPlace]()))
        if bound is parameters:  # they stay
            return packed
        packed = []
        for module, key, name in self._bindings[layer]:
            module._parameters[key] = parameter = parameters[name]
            packed += [(module, key, parameter)] if isinstance(parameter, PackedParameter) else []
        self._bound[layer] = parameters, packed
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
