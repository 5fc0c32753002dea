"""Settings that libraries read from the environment once, as they are loaded: GPUs' order, waiting threads, bars.

CUDA's own order is the fastest GPU first, by a measure that no other program knows; nvidia-smi goes by PCI bus.
OpenMP's threads spin for some milliseconds when they wait for work, on processors that others need: beside two busy
programs an AdamW update takes ten times as long by it. A library reads its variable when it starts, and others may have
it start as they are imported.
"""

from __future__ import annotations

import os

ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
SPINS, FEW_SPINS, POLICY = "GOMP_SPINCOUNT", "1000", "OMP_WAIT_POLICY"
"""For some microseconds: longer than two parallel regions of one update are apart. See `scripts/host_waits.py`."""


def count_by_bus() -> None:
    """Choose the order for this process and all that it starts."""
    _choose(ORDER, BY_BUS)


def is_by_bus() -> bool:
    """Whether CUDA numbers as nvidia-smi, now or once `count_by_bus` was called."""
    return os.environ.get(ORDER, "").strip() in ("", BY_BUS)


def spin_briefly() -> None:
    """Choose how long OpenMP's threads spin, where the user has said nothing; of no effect once torch is loaded."""
    if not os.environ.get(POLICY, "").strip():
        _choose(SPINS, FEW_SPINS)


def hide_bars() -> None:
    """Choose no progress bars: hundreds of lines where stderr is a file; of no effect once tqdm is loaded."""
    _choose("TQDM_DISABLE", "1")


def _choose(name: str, value: str) -> None:
    if not os.environ.get(name, "").strip():
        os.environ[name] = value
