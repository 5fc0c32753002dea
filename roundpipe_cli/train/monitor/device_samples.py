"""Memory, temperature and power of the workers' devices, as far as torch and the driver tell.

Temperature and power need the package nvidia-ml-py (`pip install roundpipe-cli[monitor]`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.events import DeviceSample


class DeviceSampler:
    """Samples the devices of all workers; close it in the thread that used it."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._indices = [int(name.removeprefix("cuda:")) if name.startswith("cuda:") else None for name in devices]
        self._driver: Any = None
        self._handles: dict[int, Any] = {}
        self._opened = False

    def sample(self) -> tuple[DeviceSample, ...]:
        """One sample per worker."""
        if not self._opened:
            self._opened = True
            self._open()
        return tuple(DeviceSample() if index is None else self._one(index) for index in self._indices)

    def close(self) -> None:
        """Release the driver."""
        if self._driver is not None:
            with contextlib.suppress(self._driver.NVMLError):
                self._driver.nvmlShutdown()
            self._driver = None

    def _open(self) -> None:
        found = sorted({index for index in self._indices if index is not None})
        if not found:
            return
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._driver = pynvml
            for index in found:
                self._handles[index] = pynvml.nvmlDeviceGetHandleByUUID(cuda.uuid(index))
        except pynvml.NVMLError:
            return

    def _one(self, index: int) -> DeviceSample:
        used_bytes, total_bytes = cuda.memory_use(index)
        driver, handle = self._driver, self._handles.get(index)
        if driver is None or handle is None:
            return DeviceSample(used_bytes, total_bytes)
        return DeviceSample(
            used_bytes,
            total_bytes,
            temperature_c=self._ask(lambda: driver.nvmlDeviceGetTemperature(handle, driver.NVML_TEMPERATURE_GPU)),
            power_w=self._ask(lambda: driver.nvmlDeviceGetPowerUsage(handle) / 1e3),  # milliwatts
        )

    def _ask(self, question: Callable[[], float]) -> float | None:
        try:
            return float(question())
        except self._driver.NVMLError:  # not every card has this figure
            return None
