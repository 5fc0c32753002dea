"""The number of intra-op threads of one thread, independent of other threads' settings."""

from __future__ import annotations

import torch


def set_own_threads(count: int) -> None:
    """Let the calling thread compute with `count` threads from now on.

    The first parallel operation of a thread takes the number that any thread has set last, over its own: asking for the
    number gets that over with (torch 2.13, aten/src/ATen/ParallelOpenMP.cpp, `lazy_init_num_threads`).
    """
    torch.get_num_threads()
    torch.set_num_threads(count)
