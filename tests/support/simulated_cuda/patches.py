"""What stands in for `torch.cuda` and for methods of tensors while a simulation is on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.support.simulated_cuda.mode import Machine
from tests.support.simulated_cuda.streams import SimulatedEvent, SimulatedStream, chosen_device, chosen_stream, index_of
from tests.support.simulated_cuda.threads import BackwardThreads

Patch = tuple[Any, str, Any]  # (owner, name, value)
COMPOSED = ("scaled_dot_product_attention", "one_hot")
"""Functions whose own code makes tensors where it sees the first argument: a mask where heads of keys and values
differ in width, zeros to scatter to."""
REFUSED = 2  # cudaErrorMemoryAllocation


class Runtime:
    """In place of `torch.cuda.cudart()`."""

    def __init__(self, machine: Machine, max_locked_bytes: int | None) -> None:
        self._machine, self._max_bytes = machine, max_locked_bytes

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - the driver's name
        assert flags == 1, "portable: for all devices"
        ranges = self._machine.registered
        taken = sum(end - start for start, end in ranges)
        if self._max_bytes is not None and taken + num_bytes > self._max_bytes:
            self._machine.sticky_error = "CUDA error: out of memory"
            return REFUSED
        assert all(address >= end or address + num_bytes <= start for start, end in ranges), "registered twice"
        ranges.append((address, address + num_bytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        ranges = self._machine.registered
        assert any(start == address for start, _ in ranges), "never registered"
        assert all(line.ends_at == math.inf for line in self._machine.streams.lines), "waits for a device that hangs"
        ranges[:] = [one for one in ranges if one[0] != address]
        return 0


def tensor_patches(machine: Machine, backward_threads: BackwardThreads) -> list[Patch]:
    """Methods and functions of tensors that would show that all tensors lie on the processor."""
    base: Any = torch._C.TensorBase
    real_to, real_numpy, real_tolist = torch.Tensor.to, torch.Tensor.numpy, torch.Tensor.tolist

    def is_real() -> bool:
        return getattr(machine.inside, "real", False)

    def device(tensor: torch.Tensor) -> torch.device:
        found: torch.device = base.device.__get__(tensor)
        if found.type == "cpu" and not is_real():
            index = machine.device_of(tensor)
            return found if index is None else torch.device("cuda", index)
        return found

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("other")
        if is_real() or tensor.is_meta:
            return real_to(tensor, *args, **kwargs)
        copy = bool(kwargs.pop("copy", False))
        if other is None:
            wanted, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        else:
            wanted, dtype, non_blocking = other.device, other.dtype, bool(kwargs.get("non_blocking", False))
        dtype = tensor.dtype if dtype is None else dtype
        here = machine.device_of(tensor)
        there = here if wanted is None else None
        if wanted is not None and wanted.type == "cuda":
            there = index_of(wanted, machine.streams)
        if wanted is not None and wanted.type == "meta":
            return real_to(tensor, wanted, dtype)
        if here == there:
            return tensor if dtype == tensor.dtype and not copy else real_to(tensor, dtype, copy=True)
        machine.inside.cpu = there is None
        try:
            moved: torch.Tensor = torch.ops.aten._to_copy.default(
                tensor, dtype=dtype, device=wanted, non_blocking=non_blocking
            )
        finally:
            machine.inside.cpu = False
        return moved

    def composed(name: str) -> Callable[..., Any]:
        real = getattr(torch.nn.functional, name)

        def function(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            machine.inside.composed = machine.device_of(tensor) is not None
            try:
                return real(tensor, *args, **kwargs)
            finally:
                machine.inside.composed = False

        return function

    def differentiated(name: str) -> Callable[..., Any]:
        real = getattr(torch.autograd, name)

        def function(results: Any, *args: Any, **kwargs: Any) -> Any:
            device = machine.device_of(results if isinstance(results, torch.Tensor) else results[0])
            if device is None:
                return real(results, *args, **kwargs)
            stream = machine.streams.current(device)

            def work() -> Any:
                before = getattr(machine.inside, "backward_of", None)
                machine.inside.backward_of = device
                try:
                    with chosen_stream(stream):
                        return real(results, *args, **kwargs)
                finally:
                    machine.inside.backward_of = before

            return backward_threads.run(device, work)

        return function

    def host_only(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_real() or tensor.is_meta:
                return real(tensor, *args, **kwargs)
            with machine.lock:
                memory = machine.memory_of(tensor)
                if memory.device is None:
                    machine.note(machine.begin(name, None), [(tensor, memory, False)])
                    return real(tensor, *args, **kwargs)
            if name == "numpy":
                raise TypeError("can't convert cuda device type tensor to numpy")
            return real(to(tensor, "cpu"), *args, **kwargs)

        return method

    return [
        *((torch.nn.functional, name, composed(name)) for name in COMPOSED),
        *((torch.autograd, name, differentiated(name)) for name in ("backward", "grad")),
        (torch.Tensor, "device", property(device)),
        (torch.Tensor, "is_cuda", property(lambda tensor: device(tensor).type == "cuda")),
        (torch.Tensor, "is_cpu", property(lambda tensor: device(tensor).type == "cpu")),
        (torch.Tensor, "get_device", lambda tensor: -1 if device(tensor).index is None else device(tensor).index),
        (torch.Tensor, "to", to),
        (torch.Tensor, "cpu", lambda tensor, **kwargs: to(tensor, "cpu")),
        (torch.Tensor, "cuda", lambda tensor, index=None, **kwargs: to(tensor, torch.device("cuda", index or 0))),
        (torch.Tensor, "is_pinned", lambda tensor, device=None: machine.is_page_locked(tensor)),
        (torch.Tensor, "record_stream", lambda tensor, stream: machine.record_stream(tensor, stream)),
        (torch.Tensor, "numpy", host_only(real_numpy, "numpy")),
        (torch.Tensor, "tolist", host_only(real_tolist, "tolist")),
        *((torch, name, _made_on_host(getattr(torch, name), to)) for name in ("tensor", "as_tensor")),
    ]


def _made_on_host(make: Callable[..., Any], to: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor` and `torch.as_tensor`, which torch without CUDA refuses to carry out for its devices."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(data, *args, **kwargs) if device is None else make(data, *args, device=device, **kwargs)
        return to(make(data, *args, **kwargs), device)

    return made


def cuda_patches(machine: Machine, cards: Any, runtime: Runtime) -> list[Patch]:
    """Names of `torch.cuda`, and the version of CUDA that torch is built for."""
    streams, lock, devices = machine.streams, machine.lock, machine.devices
    fractions = [1.0] * len(cards)

    def of(device: Any = None) -> Any:
        return devices[index_of(device, streams)]

    def card(device: Any = None) -> Any:
        return cards[index_of(device, streams)]

    def synchronize(device: Any = None) -> None:
        index = index_of(device, streams)
        with lock:
            for line in [line for line in streams.lines if line.device == index]:
                machine.wait_for(line, "synchronize")

    def empty_cache() -> None:
        synchronize()
        with lock:
            for allocator in devices:
                allocator.release_unused()

    def free(device: Any = None) -> tuple[int, int]:
        streams.check(index_of(device, streams))
        total = card(device).total_bytes
        return total - of(device).reserved_bytes, total

    def reset_peak(device: Any = None) -> None:
        one = of(device)
        one.peak_bytes, one.peak_reserved_bytes = one.allocated_bytes, one.reserved_bytes

    def set_fraction(fraction: float, device: Any = None) -> None:
        fractions[index_of(device, streams)] = fraction

    for index, allocator in enumerate(devices):
        one = cards[index]
        allocator.limit_bytes = lambda index=index, one=one: int(fractions[index] * one.total_bytes)

    def tidied(read: Callable[[Any], int]) -> Callable[..., int]:
        def figure(device: Any = None) -> int:
            with lock:
                of(device).tidy()
                return read(of(device))

        return figure

    values: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: False,
        "is_available": lambda: True,
        "device_count": lambda: len(cards),
        "current_device": lambda: streams.device,
        "set_device": lambda device: setattr(streams, "device", index_of(device, streams)),
        "device": chosen_device,
        "stream": chosen_stream,
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        "current_stream": lambda device=None: streams.current(index_of(device, streams)),
        "default_stream": lambda device=None: streams.default(index_of(device, streams)),
        "synchronize": synchronize,
        "empty_cache": empty_cache,
        "mem_get_info": free,
        "memory_allocated": tidied(lambda one: int(one.allocated_bytes)),
        "memory_reserved": tidied(lambda one: int(one.reserved_bytes)),
        "max_memory_allocated": tidied(lambda one: int(one.peak_bytes)),
        "max_memory_reserved": tidied(lambda one: int(one.peak_reserved_bytes)),
        "reset_peak_memory_stats": reset_peak,
        "set_per_process_memory_fraction": set_fraction,
        "get_device_properties": lambda device=None: card(device).properties(),
        "get_device_capability": lambda device=None: card(device).capability,
        "get_device_name": lambda device=None: card(device).name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card().capability >= (8, 0),
        "cudart": lambda: runtime,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "_sleep": lambda cycles: None,
    }
    settings = lambda text: setattr(machine, "grows_segments", "expandable_segments:True" in text)  # noqa: E731
    version = [(torch.version, "cuda", "13.0"), (torch.version, "hip", None)]
    below = [("_cuda_clearCublasWorkspaces", lambda: None), ("_accelerator_setAllocatorSettings", settings)]
    above = [(torch.cuda, name, value) for name, value in values.items()]
    return version + above + [(torch._C, name, value) for name, value in below]
