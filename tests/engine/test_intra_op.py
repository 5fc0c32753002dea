"""Each thread of the engine computes with its own number of threads, whatever others set meanwhile."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from roundpipe_cli.engine.backends.cpu import CpuBackend


@pytest.mark.parametrize("own", [1, 3])
def test_another_thread_does_not_change_a_worker(own: int) -> None:
    """The optimizer's thread begins after the workers' and takes all cores: they used to take its number over."""
    others, found = queue.Queue[int](), queue.Queue[int]()
    before = torch.get_num_threads()

    def work() -> None:
        with CpuBackend(own).worker_thread():
            for _ in range(2):
                found.put(others.get())
                torch.ones(100_000).sum()
                found.put(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for other in (2, 4):
            torch.set_num_threads(other)
            others.put(other)
            assert [found.get(timeout=30), found.get(timeout=30)] == [other, own]
    finally:
        thread.join(30)
        torch.set_num_threads(before)
