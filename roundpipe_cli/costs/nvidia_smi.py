"""GPUs of this machine, asked of nvidia-smi, as CUDA will number them: takes no GPU memory and loads no torch.

CUDA is asked to count by PCI bus, as nvidia-smi does; where the user chose another order, the fastest come first by
their data sheets. CUDA shows one instance of cards that are cut into several (MIG), and no whole card beside it.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any

from roundpipe_cli.costs.hardware import Device, catalogue, find_gpu, gpu_device, part_of
from roundpipe_cli.costs.memory import grows_segments
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.library_settings import BY_BUS, ORDER, is_by_bus
from roundpipe_cli.units import MIB

VISIBLE = "CUDA_VISIBLE_DEVICES"
BY_BUS_NOTE = "note: GPUs are numbered by PCI bus"
UNKNOWN_RATES_OF = "rtx-3090"


@dataclass(frozen=True, slots=True)
class Listed:
    """A card, or an instance of one that is cut into several."""

    name: str
    uuid: str
    memory_bytes: int | None
    """None: nvidia-smi does not say."""
    generation: str
    lanes: str
    profile: str = ""
    """An instance's, such as `3g.20gb`; empty: a whole card."""
    whole_bytes: int = 0
    """Memory of the card that it is a part of; 0: not known."""


def visible_gpus() -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """The GPUs that CUDA will show (those, in the order, that CUDA_VISIBLE_DEVICES says), and notes on them.

    Empty where there is no driver; memory of 0 bytes where nobody says how much there is. Takes no GPU memory.
    """
    cards, instances = _listed_cards(), _listed_instances()
    ordered = cards if is_by_bus() else sorted(cards, key=lambda card: -speed_of(card.name))
    notes = []
    chosen = os.environ.get(VISIBLE)
    if not is_by_bus() and len({card.name for card in cards}) > 1 and not (chosen or "").startswith(("GPU-", "MIG-")):
        notes.append(
            f"assumed: cuda:N is the fastest first by data sheets: {ORDER} is {os.environ[ORDER]}, an order that "
            f"nvidia-smi does not tell; {ORDER}={BY_BUS} makes it certain"
        )
    found = _seen(ordered, instances) if chosen is None else _chosen(ordered, instances, chosen.split(","))
    parts = [one for card in cards for one in instances.get(card.uuid, ())]
    if len(parts) > 1 and any(one.profile for one in found):
        notes.append(f"note: CUDA shows one of {len(parts)} MIG instances; {VISIBLE}=MIG-... chooses another")
    if is_by_bus() and (note := _by_bus_note(cards, found)):
        notes.append(note)
    found = _with_memory(found)
    pairs = [_gpu_of(one) for one in found]
    lines = dict.fromkeys([*(line for _, own in pairs for line in own), *notes])
    return tuple(device for device, _ in pairs), tuple(lines)


def order_notice() -> str | None:
    """Which card each `cuda:N` is, where CUDA's own order would be another one; None where it is the same."""
    notes = (note for note in visible_gpus()[1] if note.startswith(BY_BUS_NOTE))
    return next((note.removeprefix("note: ") for note in notes), None)


def _by_bus_note(cards: Sequence[Listed], found: Sequence[Listed]) -> str | None:
    speeds = [speed_of(card.name) for card in cards]
    if speeds == sorted(speeds, reverse=True) or not found or os.environ.get(VISIBLE, "").startswith(("GPU-", "MIG-")):
        return None
    listed = ", ".join(f"cuda:{index} is the {card.name}" for index, card in enumerate(found))
    own = f"CUDA's own order is the fastest first ({ORDER}=FASTEST_FIRST keeps it)"
    return f"{BY_BUS_NOTE}, as nvidia-smi has them: {listed}; {own}"


def speed_of(name: str) -> float:
    """By which CUDA's own order is guessed: the data sheet's TFLOPS in float32."""
    return catalogue()[find_gpu(name) or UNKNOWN_RATES_OF].fp32_tflops


def require_memory(devices: Sequence[Device]) -> None:
    """Refuse cards whose memory nobody knows.

    Raises:
        RefusedError: there is one.
    """
    for device in devices:
        if not device.memory_bytes:
            own = [one.name if one.name in catalogue() else "custom:memory_gib=...:acc32_tflops=..." for one in devices]
            raise RefusedError(
                "the memory of a GPU is not known",
                where=device.name,
                found="nvidia-smi does not tell, and torch sees no such GPU",
                expected="a driver or a torch that says how much there is",
                hint=f"name the machine: --hardware {'+'.join(f'{len([*run])}x{name}' for name, run in groupby(own))}",
            )


def ask_nvidia_smi(fields: Sequence[str], timeout_s: float = 10.0) -> subprocess.CompletedProcess[str] | None:
    """The answer of nvidia-smi on these fields, a line for each GPU; None where there is no such program.

    Raises:
        OSError, subprocess.SubprocessError: it does not answer.
    """
    return _run(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", timeout_s=timeout_s)


def _run(*options: str, timeout_s: float = 10.0) -> subprocess.CompletedProcess[str] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    return subprocess.run([program, *options], capture_output=True, text=True, timeout=timeout_s, check=False)


def smi_rows(answer: subprocess.CompletedProcess[str], fields: Sequence[str]) -> list[list[str]]:
    """The lines of an answer that have all fields."""
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _rows(*fields: str) -> list[list[str]]:
    """The lines of an answer; none where there is no answer, as from a driver that does not know a field."""
    try:
        answer = ask_nvidia_smi(fields)
    except (OSError, subprocess.SubprocessError):
        return []
    return [] if answer is None or answer.returncode != 0 else smi_rows(answer, fields)


def driver_version() -> str:
    """The driver's; empty where there is none."""
    return next((version for (version,) in _rows("driver_version")), "")


def _listed_cards() -> list[Listed]:
    rows = _rows("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max", "uuid")
    return [Listed(name, uuid, _mib(memory), generation, lanes) for name, memory, generation, lanes, uuid in rows]


def _mib(text: str) -> int | None:
    return int(float(text) * MIB) if text.replace(".", "", 1).isdigit() and float(text) else None


_CARD_LINE = re.compile(r"GPU +\d+: .*\(UUID: (GPU-[^)]+)\)")
_INSTANCE_LINE = re.compile(r"\s+MIG +(\S+) +Device +\d+: *\(UUID: (MIG-[^)]+)\)")


def _listed_instances() -> dict[str, list[Listed]]:
    """UUID of each card that is cut into instances (MIG) -> those; a card that is, and has none, shows nothing."""
    modes = {uuid: mode for uuid, mode in _rows("uuid", "mig.mode.current") if uuid.startswith("GPU-")}
    found: dict[str, list[Listed]] = {uuid: [] for uuid, mode in modes.items() if mode.lower() == "enabled"}
    if modes and not found:
        return found
    try:
        answer = _run("-L")
    except (OSError, subprocess.SubprocessError):
        return found
    cards, card = {one.uuid: one for one in _listed_cards()}, None
    for line in answer.stdout.splitlines() if answer is not None else ():
        if whole := _CARD_LINE.match(line):
            card = cards.get(whole[1])
        elif card is not None and (part := _INSTANCE_LINE.match(line)):
            one = replace(card, uuid=part[2], profile=part[1], whole_bytes=card.memory_bytes or 0)
            found.setdefault(card.uuid, []).append(replace(one, memory_bytes=_profile_bytes(part[1])))
    return found


def _profile_bytes(profile: str) -> int | None:
    """Memory of an instance by its profile: `3g.20gb` has 19.5 GiB, so its number is of 10^9 bytes."""
    size = re.search(r"(\d+)gb", profile)
    return int(size[1]) * 10**9 if size else None


def _seen(cards: Sequence[Listed], instances: dict[str, list[Listed]]) -> list[Listed]:
    """Cards that CUDA shows: the first instance alone where there is one, else the cards that are not cut."""
    parts = [one for card in cards for one in instances.get(card.uuid, ())]
    return parts[:1] or [card for card in cards if card.profile or card.uuid not in instances]


def _chosen(cards: list[Listed], instances: dict[str, list[Listed]], names: list[str]) -> list[Listed]:
    """Cards by number (what follows its digits is left out), or by the beginning of a UUID, as the first name is. As
    torch, ends at the first name of another kind or of no GPU, and shows none where one is named twice."""
    parts = [one for card in cards for one in instances.get(card.uuid, ())]
    kind, listed = names[0][:4], list[Listed]()
    if kind in ("GPU-", "MIG-"):
        keys: list[Any] = list(takewhile(lambda name: name.startswith(kind), names))
        found = [[one for one in (*cards, *parts) if one.uuid.startswith(key)] for key in keys]
    else:
        numbers = (re.match(r"[+-]?\d+", name.strip()) for name in names)
        keys = list(takewhile(lambda key: key >= 0, (int(number[0]) if number else -1 for number in numbers)))
        found = [cards[key : key + 1] for key in keys]
    for one in takewhile(lambda those: len(those) == 1, found):
        listed += one
    if len(set(keys)) < len(keys) or len(set(listed)) < len(listed):
        return []
    return [one for one in listed if one.profile][:1] or _seen(listed, instances)


def _with_memory(found: list[Listed]) -> list[Listed]:
    """With the memory of cards of which nvidia-smi does not say it, asked of torch in a process of its own."""
    if all(one.memory_bytes for one in found):
        return found
    sizes = _sizes_by_torch(os.environ.get(VISIBLE), os.environ.get(ORDER))
    if len(sizes) != len(found):
        return found
    return [replace(one, memory_bytes=one.memory_bytes or size) for one, size in zip(found, sizes, strict=True)]


@functools.cache
def _sizes_by_torch(*_: str | None) -> tuple[int, ...]:
    """Bytes of each GPU that torch sees; none where it sees none, or does not answer."""
    code = "from roundpipe_cli.engine.backends import cuda; print(*cuda.total_bytes())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else ()


def _gpu_of(card: Listed) -> tuple[Device, tuple[str, ...]]:
    """A device from what is listed: memory and link as reported, rates from the catalogue."""
    known = find_gpu(card.name)
    size = "memory not told" if card.memory_bytes is None else f"{card.memory_bytes // MIB} MiB"
    what = f"{card.name} MIG {card.profile}" if card.profile else card.name
    notes = [f"read from nvidia-smi: {what}, {size}, PCIe {card.generation} x{card.lanes}"]
    if known is None:
        notes.append(f"assumed: {card.name} is not in the catalogue; rates of an {UNKNOWN_RATES_OF}")
    else:
        notes.append(f"assumed: rates of {known} by its data sheet, not measured")
    figures = catalogue()[known or UNKNOWN_RATES_OF]
    if card.generation.isdigit() and card.lanes.isdigit() and int(card.lanes):
        figures = replace(figures, pcie_generation=int(card.generation), pcie_lanes=int(card.lanes))
    device = gpu_device(known or card.name, figures)
    if card.profile:
        part = min(1.0, (card.memory_bytes or 0) / (card.whole_bytes or device.memory_bytes))
        device = replace(part_of(device, part), name=f"{device.name} MIG {card.profile}")
        device = replace(device, link_bytes_per_s=gpu_device(device.name, figures).link_bytes_per_s)
        notes.append(f"assumed: {what} has the same part of the card's rates as of its memory")
    leaves_gaps = not grows_segments(card.name)
    return replace(device, memory_bytes=card.memory_bytes or 0, leaves_gaps=leaves_gaps), tuple(notes)
