"""The order in which CUDA numbers GPUs: by PCI bus, as nvidia-smi does, unless the user chose another one.

CUDA's own is the fastest first, by a measure that no other program knows. It reads the variable once, when it starts,
which libraries may have it do as they are imported.
"""

from __future__ import annotations

import os

ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"


def count_by_bus() -> None:
    """Choose the order for this process and all that it starts."""
    if not os.environ.get(ORDER, "").strip():
        os.environ[ORDER] = BY_BUS


def is_by_bus() -> bool:
    """Whether CUDA numbers as nvidia-smi, now or once `count_by_bus` was called."""
    return os.environ.get(ORDER, "").strip() in ("", BY_BUS)
