"""Which cards run our kernels: the choice between torch's grouped product and Triton's, by capability and type."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

Capability = tuple[int, int]
"""Compute capability of an NVIDIA GPU, e.g. (8, 6)."""
OWN_KERNEL_MAJORS = (9, 10)
"""Major capabilities on which torch's grouped product is one kernel, for bfloat16
(aten/src/ATen/native/cuda/GroupedBlas.cpp). Elsewhere it reads the offsets on the host and loops over groups."""
MIN_CAPABILITY = (8, 0)
"""Least capability for our kernels: tensor cores for bfloat16."""
DTYPES = (torch.bfloat16, torch.float16)


def loops_over_groups(capability: Capability, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product is a loop with a host synchronisation on such a card."""
    return capability[0] not in OWN_KERNEL_MAJORS or dtype != torch.bfloat16


def forgets_empty_groups(capability: Capability) -> bool:
    """Whether torch's grouped product may write no gradient for a weight whose group has no rows on such a card.

    Others have reported it for sm100; it was not tried here.
    """
    return capability[0] == 10


def takes_triton(
    capabilities: Sequence[Capability | None], dtype: torch.dtype, rank: int = 0, *, allowed: bool = True
) -> bool:
    """Whether experts are multiplied by our kernels: where torch's own would loop on one of the cards.

    Args:
        capabilities: of every worker of a run, which all compute the same way; None: no NVIDIA GPU.
        dtype: of the experts' weights.
        rank: of their adapters, 0 without; torch's own takes rows of 16 bytes only.
        allowed: whether kernels of ours may be used, and can be (`why_no_triton`).
    """
    if not allowed or dtype not in DTYPES or not all_run_ours(capabilities):
        return False
    return rank % 8 != 0 or any(loops_over_groups(one, dtype) for one in capabilities if one is not None)


def why_no_triton() -> str | None:
    """The reason why Triton's kernels cannot run on this machine, or None. Triton compiles a launcher in C for each."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if not any(map(shutil.which, [os.environ.get("CC") or "gcc", "clang"])):
        return "triton finds no C compiler (install gcc)"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)  # as triton has it
    if not Path(headers, "Python.h").exists():
        return "triton finds no Python.h (install python3-dev)"
    return None


def all_run_ours(capabilities: Iterable[Capability | None]) -> bool:
    """Whether each of these cards runs our kernels, where the machine can (`why_no_triton`); None: no NVIDIA GPU."""
    return all((one or (0, 0)) >= MIN_CAPABILITY for one in capabilities)


def describe_experts(
    capabilities: Sequence[Capability | None], dtypes: Collection[torch.dtype], missing: str | None
) -> str | None:
    """A sentence about how experts are multiplied, where it is not by torch's own kernel; None: nothing to say.

    Args:
        dtypes: of the experts' weights; empty: the model has none that are multiplied by grouped products.
        missing: why our kernels cannot or may not be used, from `why_no_triton`; None: they can.
    """
    known = [capability for capability in capabilities if capability is not None]
    if not known or not any(loops_over_groups(card, dtype) for card in known for dtype in dtypes):
        return None
    cards = ", ".join(f"sm{major}{minor}" for major, minor in sorted(set(known)))
    if all(takes_triton(capabilities, dtype, allowed=missing is None) for dtype in dtypes):
        return f"the experts of a layer are multiplied by one Triton kernel ({cards})"
    if missing is None and not all_run_ours(capabilities):
        missing = "our kernels need sm80 or newer on every GPU of a run"
    elif missing is None:
        others = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        missing = f"our kernels take bfloat16 and float16, not {', '.join(others)}"
    return f"experts are multiplied one after the other, and the host waits for each layer ({cards}): {missing}"
