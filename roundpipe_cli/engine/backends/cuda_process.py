"""Options of torch for a whole process that computes on GPUs: products, memory, attention, one order of additions."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Collection

import torch

from roundpipe_cli.costs.memory import ALLOCATOR_VARIABLES
from roundpipe_cli.engine.backends.cuda import nvidia_capability
from roundpipe_cli.library_names import library_name
from roundpipe_cli.model.attention import set_up_attention

SWITCH_INTERVAL_S = 0.5e-3
"""Seconds after which one of our threads yields the interpreter to another."""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable by which cuBLAS takes memory of a fixed size, so that streams do not choose other products."""
ORDERED_WORKSPACES = (":4096:8", ":16:8")
"""Values of the variable that torch takes for deterministic ones."""


@functools.cache
def _count_in_order() -> torch.library.Library:
    """Have experts' tokens counted without atomics, for which torch refuses `histc`; as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that its own kernel is replaced
        library.impl("histc", counts, "CUDA")
    return library


def counts(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """`torch.histc` of whole numbers with a bin for each from `min` to `max`; others are left out.

    Raises:
        RuntimeError: bins are wider, or values no whole numbers.
    """
    if values.is_floating_point() or bins != max - min + 1:
        raise RuntimeError("torch.histc of numbers that are not whole has no deterministic implementation here")
    each = torch.arange(int(min), int(max) + 1, device=values.device)
    return (values.flatten()[:, None] == each).sum(dim=0).to(values.dtype)


def set_up_process(
    indices: Collection[int], *, float16_accumulation: bool = False, deterministic: bool = False
) -> None:
    """Set torch's options for these GPUs, for the whole process: products, memory and attention.

    With `deterministic` flash attention, also that of packed rows, and the efficient kernel add up in order; torch asks
    its global switch for that. Unwritten memory is not filled: nothing here reads it.

    Memory comes in segments that grow, so that microbatches of other lengths leave no gaps between blocks; not where
    the user has set torch's allocator up, or where a driver cannot (virtual GPUs). Attention never goes through cuDNN,
    which builds a plan of about half a second for every new shape in every thread, and is torch's first choice on sm90
    and sm100; nor by the math kernel where copies of shared keys avoid it. A thread that wants the interpreter gets it
    within half a millisecond: Python's 5 ms are longer than two chunks on a PCIe 5 link.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.backends.cuda.matmul.allow_fp16_accumulation = float16_accumulation
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic and os.environ.get(WORKSPACE) not in ORDERED_WORKSPACES:
        os.environ[WORKSPACE] = ORDERED_WORKSPACES[0]
    if deterministic:
        _count_in_order()
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = not deterministic  # type: ignore[attr-defined]
    set_up_attention(min(nvidia_capability(torch.device("cuda", index)) or (0, 0) for index in indices))
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    set_allocator = library_name("torch._C", "_accelerator_setAllocatorSettings")
    set_allocator("expandable_segments:True")
    try:
        for index in indices:
            torch.empty(1, device=torch.device("cuda", index))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # "operation not supported"
        set_allocator("expandable_segments:False")
