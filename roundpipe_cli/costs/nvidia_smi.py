"""GPUs of this machine, asked of nvidia-smi: takes no GPU memory and loads no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from roundpipe_cli.costs.hardware import Device, catalogue, find_gpu, gpu_device
from roundpipe_cli.units import MIB


def visible_gpus() -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """The GPUs that nvidia-smi lists (those, in the order, that CUDA_VISIBLE_DEVICES says), and notes on them.

    Empty where there is no driver; takes no GPU memory and loads no torch.
    """
    fields = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max", "uuid")
    try:
        answer = ask_nvidia_smi(fields)
    except (OSError, subprocess.SubprocessError):
        return (), ()
    if answer is None or answer.returncode != 0:
        return (), ()
    rows = smi_rows(answer, fields)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        rows = _chosen(rows, chosen.split(","))
    devices, notes = zip(*(_gpu_of(row) for row in rows), strict=True) if rows else ((), ())
    return tuple(devices), tuple(dict.fromkeys(note for pair in notes for note in pair))


def ask_nvidia_smi(fields: Sequence[str], timeout_s: float = 10.0) -> subprocess.CompletedProcess[str] | None:
    """The answer of nvidia-smi on these fields, a line for each GPU; None where there is no such program.

    Raises:
        OSError, subprocess.SubprocessError: it does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)


def smi_rows(answer: subprocess.CompletedProcess[str], fields: Sequence[str]) -> list[list[str]]:
    """The lines of an answer that have all fields."""
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _chosen(rows: list[list[str]], names: list[str]) -> list[list[str]]:
    """Lines of nvidia-smi by number or by the beginning of a UUID. Like CUDA, ends at the first name of no GPU."""
    listed = []
    for name in map(str.strip, names):
        by_number = rows[int(name) : int(name) + 1] if name.isdigit() else []
        row = by_number or [row for row in rows if name.startswith("GPU-") and row[-1].startswith(name)]
        if len(row) != 1:
            break
        listed.append(row[0])
    return listed


def _gpu_of(row: list[str]) -> tuple[Device, tuple[str, ...]]:
    """A device from one line of nvidia-smi: memory and link as reported, rates from the catalogue."""
    name, memory_mib, generation, lanes, _ = row
    known = find_gpu(name)
    notes = [f"read from nvidia-smi: {name}, {memory_mib} MiB, PCIe {generation} x{lanes}"]
    if known is None:
        notes.append(f"assumed: {name} is not in the catalogue; rates of an rtx-3090")
    else:
        notes.append(f"assumed: rates of {known} by its data sheet, not measured")
    figures = catalogue()[known or "rtx-3090"]
    if generation.isdigit() and lanes.isdigit() and int(lanes):
        figures = replace(figures, pcie_generation=int(generation), pcie_lanes=int(lanes))
    device = gpu_device(known or name, figures)
    if memory_mib.replace(".", "").isdigit():
        device = replace(device, memory_bytes=int(float(memory_mib) * MIB))
    return device, tuple(notes)
