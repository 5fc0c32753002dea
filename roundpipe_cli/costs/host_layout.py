"""Layout of the host's memory: NUMA nodes, and pages of 2 MiB for shared memory.

Weights lie in shared anonymous memory (a fork must not take page-locked pages away), for which the system has a switch
of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
NODES = "devices/system/node"
SWITCH = "kernel/mm/transparent_hugepage/shmem_enabled"


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Memory nodes and pages, as the system reports them."""

    nodes: tuple[int, ...]
    """NUMA nodes that have memory; one or none where the system does not tell."""
    huge_pages: str | None
    """always, within_size, advise, never, deny or force; None: the system has no such switch."""

    @property
    def gives_huge_pages(self) -> bool:
        """Whether memory that asks for pages of 2 MiB gets them."""
        return self.huge_pages in ("always", "within_size", "advise", "force")


def host_layout(system: Path = SYS) -> HostLayout:
    """Read from `/sys`; a system without it has one node and no switch."""
    listed = _read(system / NODES / "has_memory") or _read(system / NODES / "online")
    chosen = re.search(r"\[(\w+)\]", _read(system / SWITCH))
    return HostLayout(_numbers(listed), chosen[1] if chosen else None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    """`0-1,4` as (0, 1, 4)."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return ()
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
