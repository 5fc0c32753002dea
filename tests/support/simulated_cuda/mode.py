"""The dispatch mode: every operation of torch is carried out on the processor and noted on its stream or thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_cli.kernels.capability import forgets_empty_groups, loops_over_groups
from tests.support.simulated_cuda.clocks import Access, Actor, History, Unordered, short_stack
from tests.support.simulated_cuda.memory import Block, CachingAllocator
from tests.support.simulated_cuda.operations import (
    SUBSTITUTES,
    WORKSPACES,
    Operation,
    byte_range,
    operation_of,
    tensors_in,
)
from tests.support.simulated_cuda.streams import Line, Streams

MAX_REPORTS = 20


@dataclass(slots=True)
class Memory:
    """What lies under one torch storage."""

    device: int | None  # None: host memory
    history: History
    weak: StorageWeakRef
    offset: int = 0  # of the storage's first byte in the history
    block: Block | None = None  # of an allocator of ours; None: ordinary host memory


Use = tuple[torch.Tensor, Memory, bool]  # (tensor, its memory, whether it is written)


class Machine:
    """Memory of all storages, checks of all accesses, counts of what the host waited for."""

    def __init__(self, streams: Streams, *, lazy: bool) -> None:
        self.streams, self.myself = streams, streams.myself
        self.lazy = lazy
        self.lock = streams.lock
        self.memories: dict[int, Memory] = {}
        self.devices: list[CachingAllocator] = []
        self.capabilities: list[tuple[int, int]] = []  # of the devices
        self.pinned: CachingAllocator | None = None
        self.registered: list[tuple[int, int]] = []  # (first address, address behind the last) of page-locked ranges
        self.unordered: list[Unordered] = []
        self.host_waits: Counter[tuple[str, str, str]] = Counter()  # (thread, what, where) -> times
        self.launches: Counter[str] = Counter()  # operations issued to devices, by host thread
        self.substituted: set[str] = set()  # what was computed that the processor cannot (`SUBSTITUTES`)
        self.grows_segments = False  # whether the allocator was told to ask for segments that can grow
        self.sticky_error: str | None = None  # what the driver raises at the next launch
        self.inside = threading.local()
        """Of each thread: `cpu`, while Python code asks for a copy on the host; `real`, within an operation;
        `composed`, within a function of torch on a device's tensors whose own code makes tensors beside them;
        `backward_of`, the device of the result that is differentiated."""

    # -- memory --------------------------------------------------------------------------------------------------
    def memory_of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        known = self.memories.get(storage._cdata)
        if known is None or known.weak.expired():
            known = Memory(None, History("host memory"), StorageWeakRef(storage))
            self.memories[storage._cdata] = known
            if len(self.memories) % 4096 == 0:
                self.memories = {key: one for key, one in self.memories.items() if not one.weak.expired()}
        return known

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Device that a tensor is on; None: the host."""
        known = self.memories.get(tensor.untyped_storage()._cdata)
        return None if known is None or known.weak.expired() else known.device

    def allocate(self, num_bytes: int, device: int | None) -> torch.Tensor:
        """A uint8 tensor in device memory, or page-locked; the device's is for the thread's current stream."""
        with self.lock:
            pool = None if device is None else self.streams.current(device).line
            allocator = self.pinned if device is None else self.devices[device]
            assert allocator is not None
            made, block = allocator.allocate(num_bytes, pool)
            storage = made.untyped_storage()
            self.memories[storage._cdata] = Memory(
                device, block.segment.history, StorageWeakRef(storage), block.start, block
            )
            return made

    def like(self, tensor: torch.Tensor, device: int | None, *, copies: bool) -> torch.Tensor:
        """A tensor of the same form in our memory; `copies`: and with the same bytes."""
        num_bytes = tensor.untyped_storage().nbytes()
        raw = self.allocate(num_bytes, device)
        if copies and num_bytes:
            raw.copy_(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        memory = self.memory_of(tensor)
        if memory.device is not None:
            return False
        first = tensor.data_ptr()
        end = first + tensor.nbytes
        return memory.block is not None or any(low <= first and end <= high for low, high in self.registered)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        block = self.memory_of(tensor).block
        if block is not None:
            block.recorded.add(self.streams.lines.index(stream.line))

    def on_return(self, block: Block) -> None:
        """A freed block waits for the streams that it was recorded for, from where they are now."""
        self.streams.num_freed_on_failed += any(
            self.streams.lines[index].device in self.streams.failed for index in block.recorded
        )
        for index in block.recorded:
            block.used_by[index] = self.streams.marker(self.streams.lines[index])

    # -- accesses ------------------------------------------------------------------------------------------------
    def begin(self, name: str, line: Line | None) -> Access:
        """The next operation of a stream, or of the calling thread."""
        actor: Actor = self.myself()
        thread = threading.current_thread().name
        if line is None:
            return Access(actor, actor.step(), name, thread, short_stack())
        self.streams.launch(line.device)
        actor = self.streams.issuer(line)
        line.count += 1
        self.launches[thread] += 1
        return Access(actor, actor.step(), name, thread, short_stack(), line, line.count)

    def note(self, access: Access, uses: Sequence[Use]) -> None:
        for tensor, memory, writes in sorted(uses, key=lambda use: use[2]):
            start, end = byte_range(tensor)
            if start < end:
                found = memory.history.add(memory.offset + start, memory.offset + end, access, writes=writes)
                if found and len(self.unordered) < MAX_REPORTS:
                    self.unordered += found

    def wait_for(self, line: Line, what: str) -> None:
        """The host waits until a stream has done all that it was given."""
        thread, frames = threading.current_thread().name, short_stack()
        where = f"{frames[0][0].rsplit('/', 1)[-1]}:{frames[0][1]} {frames[0][2]}" if frames else "?"
        self.host_waits[thread, what, where] += 1
        self.streams.synchronize(line)


class CardMode(TorchDispatchMode):
    """Carries out operations of the thread that it is active in."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        operation = operation_of(func)
        if operation.is_view and kwargs.get("device") is None:
            return func(*args, **kwargs)
        tensors = list(tensors_in(operation, args, kwargs))
        if any(tensor.is_meta or type(tensor).__torch_dispatch__ is not _USUAL for tensor, _ in tensors):
            return func(*args, **kwargs)
        if kwargs.get("device") is not None and kwargs["device"].type == "meta":
            return func(*args, **kwargs)
        machine = self.machine
        with machine.lock:
            uses = [(tensor, machine.memory_of(tensor), writes) for tensor, writes in tensors]
        if operation.name == "aten::index_add_" and args[1] == 0 and uses[0][1].device is None:
            # Of a table on the host the rows that are named alone: two threads may add to others at one time.
            uses = [(args[0][row], uses[0][1], True) for row in args[2].unique().tolist()] + uses[1:]
        if operation.name == "aten::copy_":
            return self._copy(uses, bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False))
        source = uses[0][1].device if uses else None
        target = self._device_asked(operation, kwargs, source)
        kwargs.pop("pin_memory", None) if target is not PINNED else None
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if operation.name == "aten::_to_copy" and target != source:
            return self._move(func, args, kwargs, target)
        return self._run(func, operation, args, kwargs, uses, target)

    def _device_asked(self, operation: Operation, kwargs: dict[str, Any], source: int | None) -> Any:
        """Device of new results: an index, None for the host, or `PINNED`; `UNSAID`: where the arguments are."""
        device = kwargs.get("device")
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
            return PINNED
        if device is None:
            return UNSAID if source is None and operation.name != "aten::_to_copy" else source
        if device.type == "cuda":
            return self.machine.streams.device if device.index is None else device.index
        if getattr(self.machine.inside, "cpu", False):
            return None
        if getattr(self.machine.inside, "composed", False):
            return self.machine.streams.device
        in_backward = torch._C._current_graph_task_id() != -1
        if operation.name == "aten::_to_copy" or (in_backward and source is not None):
            return source  # torch's own formulas name the device that tensors really are on
        if in_backward:
            return getattr(self.machine.inside, "backward_of", None)
        return None

    def _line(self, device: int) -> Line:
        return self.machine.streams.current(device).line

    def _run(
        self, func: Any, operation: Operation, args: Any, kwargs: dict[str, Any], uses: Sequence[Use], target: Any
    ) -> Any:
        """Carry an operation out where its arguments are."""
        machine = self.machine
        device = self._common_device(operation, uses)
        on = device if target is UNSAID else None if target is PINNED else target
        uses = () if operation.reads_form_alone else uses
        with machine.lock:
            if on is not None and machine.sticky_error is not None:
                text, machine.sticky_error = machine.sticky_error, None
                raise RuntimeError(text)
            line = None if on is None else self._line(on)
            if line is not None:
                line.run_until(1 << 62)  # in order, though it reads nothing: what it fills may be poisoned
            for _, memory, _ in uses:
                if memory.device is not None:
                    self._line(memory.device).run_until(1 << 62)
            access = machine.begin(operation.name, line) if operation.fills else None
            if access is not None:
                machine.note(access, uses)
        needed = WORKSPACES.get(str(func)) if on is not None else None
        workspace = None if needed is None else machine.allocate(needed(*args), on)
        machine.inside.real = True  # what the operation itself calls sees devices as they are
        try:
            if str(func) in SUBSTITUTES:
                machine.substituted.add(str(func))
            outputs = SUBSTITUTES.get(str(func), func)(*args, **kwargs)
        finally:
            machine.inside.real = False
        del workspace
        if line is not None and self._forgets_empty_groups(operation, uses):
            (ends, _, _) = uses[2]
            outputs[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
        own = {tensor.untyped_storage()._cdata for tensor, _, _ in uses}
        outputs = self._settle(outputs, own, PINNED if target is PINNED else on, line, access)
        if line is not None and (
            operation.host_waits or self._indexes_by_mask(operation, uses) or self._loops_over_groups(operation, uses)
        ):
            with machine.lock:
                machine.wait_for(line, operation.name)
        return outputs

    @staticmethod
    def _indexes_by_mask(operation: Operation, uses: Sequence[Use]) -> bool:
        if not operation.mixes_devices:
            return False
        indices = uses[1:] if operation.name == "aten::index" else uses[1:-1]
        return any(tensor.dtype == torch.bool or memory.device is None for tensor, memory, _ in indices)

    def _forgets_empty_groups(self, operation: Operation, uses: Sequence[Use]) -> bool:
        """Whether a product of two matrices group by group leaves what was there for a group without rows."""
        if operation.name != "aten::_grouped_mm" or len(uses) < 3:
            return False
        (left, memory, _), (right, _, _), *_ = uses
        assert memory.device is not None
        return left.dim() == right.dim() == 2 and forgets_empty_groups(self.machine.capabilities[memory.device])

    def _loops_over_groups(self, operation: Operation, uses: Sequence[Use]) -> bool:
        """Whether torch reads a grouped product's offsets on the host, to multiply group by group."""
        if operation.name != "aten::_grouped_mm":
            return False
        (tensor, memory, _), *_ = uses
        assert memory.device is not None
        return loops_over_groups(self.machine.capabilities[memory.device], tensor.dtype)

    @staticmethod
    def _common_device(operation: Operation, uses: Sequence[Use]) -> int | None:
        """The one device of an operation's arguments; numbers on the host may go with any."""
        devices = {memory.device for tensor, memory, _ in uses if tensor.dim() or memory.device is not None}
        if len(devices) > 1 and not operation.mixes_devices:
            names = ", ".join(sorted("cpu" if one is None else f"cuda:{one}" for one in devices))
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {names}! "
                f"(when checking arguments of {operation.name})"
            )
        return next((one for one in devices if one is not None), None)

    def _settle(self, outputs: Any, own: set[int], place: Any, line: Line | None, access: Access | None) -> Any:
        """Results of an operation, moved to where they belong if they are new."""
        if isinstance(outputs, torch.Tensor):
            if outputs.untyped_storage()._cdata in own:
                return outputs
            machine = self.machine
            if place is not None:
                outputs = machine.like(outputs, None if place is PINNED else place, copies=access is not None)
            if access is not None:
                with machine.lock:
                    machine.note(access, [(outputs, machine.memory_of(outputs), True)])
            return outputs
        if isinstance(outputs, (list, tuple)):
            settled = [self._settle(one, own, place, line, access) for one in outputs]
            return type(outputs)(settled) if type(outputs) in (list, tuple) else type(outputs)(*settled)
        return outputs

    # -- copies --------------------------------------------------------------------------------------------------
    def _move(self, func: Any, args: Any, kwargs: dict[str, Any], target: int | None) -> torch.Tensor:
        """A copy of a tensor on another device, perhaps in another type."""
        machine, source = self.machine, args[0]
        non_blocking = bool(kwargs.pop("non_blocking", False))
        pinned = bool(kwargs.pop("pin_memory", False))
        converted = func(source, **kwargs)
        made = torch.empty_like(converted) if target is None and not pinned else None
        if made is None:
            made = machine.like(converted, target, copies=False)
        with machine.lock:
            uses = [(made, machine.memory_of(made), True), (source, machine.memory_of(source), False)]
        self._copy(uses, non_blocking)
        return made

    def _copy(self, uses: Sequence[Use], non_blocking: bool) -> torch.Tensor:
        """`copy_`: on a stream where a device takes part; the host waits unless it is told not to and need not."""
        machine = self.machine
        (target, to, _), (source, origin, _) = uses
        device = to.device if to.device is not None else origin.device
        if device is None:
            with machine.lock:
                machine.note(machine.begin("copy", None), uses)
            target.copy_(source)
            return target
        crosses = to.device != origin.device
        hosted = source if origin.device is None else target
        is_async = non_blocking or not crosses
        kind = "copy" if not crosses else "upload" if origin.device is None else "download"
        with machine.lock:
            line = self._line(device)
            free = not crosses or machine.is_page_locked(hosted)
            access = machine.begin(kind if free else f"pageable {kind}", line)
            machine.note(access, uses)
            host_block = None if not crosses else (origin if origin.device is None else to).block
            if host_block is not None:
                host_block.used_by[machine.streams.lines.index(line)] = machine.streams.marker(line)
            put_off = machine.lazy and crosses and is_async and free
            if put_off:
                line.deferred.append((access.place, _later(uses)))
            else:
                line.run_until(1 << 62)
                target.copy_(source)
            if crosses and not (is_async and free):
                machine.wait_for(line, kind if free else f"pageable {kind}")
        return target


PINNED, UNSAID = "pinned", "unsaid"
_USUAL = torch.Tensor.__torch_dispatch__


def _later(uses: Sequence[Use]) -> Any:
    """A copy of the bytes as they will be then, whoever has the memory by then."""
    (target, to, _), (source, origin, _) = uses
    far, near = _standing(target, to), _standing(source, origin)

    def copy() -> None:
        with torch._C._DisableTorchDispatch():  # whoever waits carries it out, for the stream
            far.copy_(near)

    return copy


def _standing(tensor: torch.Tensor, memory: Memory) -> torch.Tensor:
    """A tensor over the same bytes that does not keep them in use, if they are an allocator's."""
    if memory.block is None:
        return tensor
    size = tensor.element_size()
    offset = memory.block.start // size + tensor.storage_offset()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(memory.block.segment.whole.untyped_storage(), offset, tensor.size(), tensor.stride())
