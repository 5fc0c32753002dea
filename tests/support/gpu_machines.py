"""Machines with GPUs as two programs show them: a stand-in for nvidia-smi, and the cards that CUDA would give torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.simulated_cuda import Card

MIB = 1024**2


@dataclass(frozen=True)
class Slot:
    """A card in a slot of the PCI bus."""

    name: str
    memory_mib: int
    uuid: str
    speed: int  # by which CUDA orders cards, if nobody says otherwise
    tells_memory: bool = True
    mig: bool | None = None  # whether it is cut into instances; None: it cannot be
    instances: tuple[tuple[str, str, int], ...] = ()  # profile, UUID and MiB of each


_PROGRAM = """#!{python}
import json, os, sys
with open({log!r}, "a") as log: log.write(os.environ.get("CUDA_DEVICE_ORDER", "") + "\\n")
slots, word = json.loads({slots!r}), sys.argv[1]
if word == "-L":
    for index, slot in enumerate(slots):
        print(f"GPU {{index}}: {{slot['name']}} (UUID: {{slot['uuid']}})")
        for number, (profile, uuid, _) in enumerate(slot["instances"]):
            print(f"  MIG {{profile}}     Device  {{number}}: (UUID: {{uuid}})")
else:
    for slot in slots:
        figures = {{
            "name": slot["name"], "uuid": slot["uuid"], "driver_version": "570.86", "memory.used": "1",
            "memory.total": slot["memory_mib"] if slot["tells_memory"] else "[N/A]",
            "mig.mode.current": {{None: "[N/A]", True: "Enabled", False: "Disabled"}}[slot["mig"]],
        }}
        names = word.partition("=")[2].split(",")
        print(", ".join(str(figures.get(name, "16" if "width" in name else "4")) for name in names))
"""


def put_nvidia_smi(slots: Sequence[Slot], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that lists these slots, first on PATH; returns the file in which it notes the order of each call."""
    (tools := folder / "bin").mkdir(exist_ok=True)
    log = folder / "calls"
    fields = json.dumps([vars(slot) for slot in slots])
    program = tools / "nvidia-smi"
    program.write_text(_PROGRAM.format(python=sys.executable, log=str(log), slots=fields))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return log


def cards_of_cuda(slots: Sequence[Slot]) -> list[Card]:
    """What CUDA shows of these slots under this process' variables, which torch's own functions read."""
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    ordered = list(slots) if by_bus else sorted(slots, key=lambda slot: -slot.speed)
    chosen = torch.cuda._parse_visible_devices()
    parts = [
        Card(f"{slot.name} MIG {profile}", mib * MIB, uuid=uuid.partition("-")[2])
        for slot in ordered
        for profile, uuid, mib in slot.instances
    ]
    if chosen and isinstance(chosen[0], str):
        if chosen[0].startswith("MIG-"):
            places = torch.cuda._transform_uuid_to_ordinals(chosen, [f"MIG-{part.uuid}" for part in parts])
            return [parts[place] for place in places[:1]]
        chosen = torch.cuda._transform_uuid_to_ordinals(chosen, [slot.uuid for slot in ordered])
    kept: list[Slot] = []
    for place in chosen:
        if place >= len(ordered):
            break
        kept.append(ordered[place])
    cut = [part for part in parts if any(part.name.startswith(slot.name) for slot in kept if slot.mig)]
    whole = [Card(slot.name, slot.memory_mib * MIB, uuid=slot.uuid.partition("-")[2]) for slot in kept if not slot.mig]
    return cut[:1] or whole
