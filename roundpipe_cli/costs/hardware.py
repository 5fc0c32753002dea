"""Machines in numbers: a catalogue of GPUs, the text that names a machine, and the rates that work reaches.

A machine in words is groups joined by `+`, each a count and a name, then figures of the whole machine after commas:

    8x4090                                       eight of the catalogue's rtx-4090
    4x3090+2x4060ti                              unequal workers
    8x4090:pcie_lanes=8                          a figure of one group in place of the catalogue's
    2xcustom:memory_gib=24:acc32_tflops=70       a GPU that the catalogue lacks
    8x4090,host_memory_gib=512,accumulate=fp16   figures of the machine
    2x3090 64GB                                  host memory as people write it: `64 GB RAM`, `, 64GB` alike
    their.json                                   a machine that `roundpipe doctor --measure` measured, figures as above
    8x4090,machines=2,network_gb_per_s=1.25      two such, and the rate each way between them; the rest is of each

All rates are per second, in plain bytes and floating-point operations.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from roundpipe_cli.costs.block_work import PassWork, Product
from roundpipe_cli.costs.measurement import (
    MEASURED_ON,
    MeasuredRates,
    Measurement,
    RateCurve,
    at,
    read_measurement,
    sent_measurements,
)
from roundpipe_cli.costs.settings import DType
from roundpipe_cli.errors import RefusedError, closest, num_edits
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.units import GIB

MAX_WORKERS = 64
MAX_CHARACTERS = 4000
"""The longest description of GPUs; a kind of them with all its figures takes about a hundred."""
ASSUMED_HOST_MEMORY_PER_GPU_BYTES = 128 * GIB
ASSUMED_HOST_MEMORY_BYTES_PER_S = 100e9
ASSUMED_DISK_BYTES_PER_S = 1e9

Accumulate = Literal["fp32", "fp16"]


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """A GPU's data sheet, in the units that data sheets use. Dense rates, no sparsity."""

    memory_gib: float
    memory_gb_per_s: float
    fp16_acc16_tflops: float
    """16-bit matrix products that accumulate in 16 bits."""
    acc32_tflops: float
    """16-bit matrix products (float16 or bfloat16) that accumulate in 32 bits: what training uses."""
    bfloat16: bool
    pcie_generation: int
    pcie_lanes: int
    fp32_tflops: float
    """Plain float32, without TF32."""
    pcie_gb_per_s: float | None = None
    """Real rate of large page-locked copies per direction; None: by generation and lanes."""


@dataclass(frozen=True, slots=True)
class Device:
    """One worker's device."""

    name: str
    is_cpu: bool
    memory_bytes: int
    memory_bytes_per_s: float
    fp16_accumulate_flops_per_s: float
    fp32_accumulate_flops_per_s: float
    float32_flops_per_s: float
    has_bfloat16: bool
    link_bytes_per_s: float
    """Rate of the host link in each direction."""
    leaves_gaps: bool = False
    """Whether torch's segments of its memory do not grow, see `costs/memory.py`."""
    link_is_given: bool = False
    """Whether somebody gave the rate of the link; otherwise it is that of its generation and lanes."""
    measured: MeasuredRates | None = field(default=None, hash=False)
    """Rates of this device, or of one like it, in place of its data sheet's; None: nobody measured it."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine: one device per worker, and the host."""

    description: str
    devices: tuple[Device, ...]
    host_memory_bytes: int
    """Bytes that a run may use; a container's limit counts."""
    host_memory_bytes_per_s: float = ASSUMED_HOST_MEMORY_BYTES_PER_S
    disk_free_bytes: int | None = None
    """Free bytes of the disk; None: unknown, so the disk is not part of the verdict."""
    disk_bytes_per_s: float | None = None
    """Rate at which mapped weights are read; None: unknown, `ASSUMED_DISK_BYTES_PER_S` counts."""
    accumulate: Accumulate = "fp32"
    """How float16 matrix products are asked to accumulate, whatever the recipe's `float16_accumulation` says: for
    comparisons with published figures. bfloat16 always accumulates in 32 bits."""
    notes: tuple[str, ...] = ()
    """Lines for the user: which figures were measured and which assumed."""
    is_here: bool = False
    """Whether the figures were read from this machine, not given or assumed."""
    host_memory_is_assumed: bool = False
    host_rate_is_given: bool = False
    price: float | None = None
    """Dollars per hour of each machine; None: nobody gave it."""
    machines: int = 1
    """Machines like this one, which train together."""
    network_bytes_per_s: float | None = None
    """Rate between them, for each in each direction; None: there is one machine."""

    @property
    def assumed(self) -> dict[str, str]:
        """Figures that nobody gave or measured, which may decide a verdict: the option that sets one -> the figure."""
        figures = {}
        if self.host_memory_is_assumed:
            figures["host_memory_gib"] = f"host memory ASSUMED {self.host_memory_bytes / GIB:g} GiB"
        if not self.host_rate_is_given:
            figures["host_memory_gb_per_s"] = f"its memory ASSUMED {self.host_memory_bytes_per_s / 1e9:g} GB/s"
        if self.disk_bytes_per_s is None:
            figures["disk_gb_per_s"] = f"disk ASSUMED {ASSUMED_DISK_BYTES_PER_S / 1e9:g} GB/s"
        if links := [one.link_bytes_per_s for one in self.devices if not one.is_cpu and not one.link_is_given]:
            figures["pcie_gb_per_s"] = f"a link ASSUMED {min(links) / 1e9:.3g} GB/s"
        return figures


@lru_cache(maxsize=1)
def catalogue() -> dict[str, GpuFigures]:
    """All GPUs of the shipped catalogue, by name."""
    return {name: GpuFigures(**figures) for name, figures in _raw_catalogue()["gpus"].items()}


@lru_cache(maxsize=1)
def _raw_catalogue() -> dict[str, Any]:
    text = files("roundpipe_cli.costs").joinpath("catalogue.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def pcie_bytes_per_s(generation: int, lanes: int) -> float:
    """Bytes per second of large page-locked copies in practice, per direction (catalogue's figures for x16, by lanes).

    A generation beyond the table counts as the newest in it.
    """
    table = {int(key): value for key, value in _raw_catalogue()["pcie_gb_per_s_real"].items() if key.isdigit()}
    nearest = min(table, key=lambda known: (abs(known - generation), known))
    doublings = generation - nearest if generation < nearest else 0
    return float(table[nearest]) * 1e9 * 2.0**doublings * lanes / 16


def find_gpu(name: str) -> str | None:
    """The catalogue's name of a GPU written in any usual way (`4090`, `RTX 4090`, `NVIDIA GeForce RTX 4090`).

    A bare name with several memory sizes (`4060ti`, `a100`) is looked up in the catalogue's aliases.
    """
    by_plain: dict[str, str] = {**_spellings(), **_raw_catalogue()["aliases"]}
    plain = _squeeze(name)
    bare = re.sub(r"^(rtx|gtx|radeonrx|radeonpro|radeon|rx|tesla|quadrortx|quadro)", "", plain)
    for spelling in (plain, bare, plain.replace("pcie", ""), bare.replace("gpu", "")):
        if spelling in by_plain and _maker(name) in (None, _maker(by_plain[spelling])):
            return by_plain[spelling]
    return None


@lru_cache(maxsize=1)
def _spellings() -> dict[str, str]:
    """Plain spelling, with and without its family -> name in the catalogue."""
    whole = {_squeeze(known): known for known in catalogue()}
    return {re.sub(r"^(rtx|radeon|titan)", "", plain): known for plain, known in reversed(whole.items())} | whole


def _squeeze(name: str) -> str:
    """Letters and digits only, without the words that say nothing about speed."""
    lowered = re.sub(r"nvidia|geforce|amd|instinct|sxm\d?|hbm\d?e?|tesla|generation", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", lowered)


def gpu_device(name: str, figures: GpuFigures) -> Device:
    """A worker on this GPU."""
    given = figures.pcie_gb_per_s
    return Device(
        name=name,
        is_cpu=False,
        memory_bytes=int(figures.memory_gib * GIB),
        memory_bytes_per_s=figures.memory_gb_per_s * 1e9,
        fp16_accumulate_flops_per_s=figures.fp16_acc16_tflops * 1e12,
        fp32_accumulate_flops_per_s=figures.acc32_tflops * 1e12,
        float32_flops_per_s=figures.fp32_tflops * 1e12,
        has_bfloat16=figures.bfloat16,
        link_bytes_per_s=given * 1e9 if given else pcie_bytes_per_s(figures.pcie_generation, figures.pcie_lanes),
        link_is_given=given is not None,
    )


def part_of(device: Device, part: float) -> Device:
    """A part of a device, as a worker that shares it has: of its memory, its rates and its link."""
    rates: dict[str, Any] = {
        one.name: getattr(device, one.name) * part for one in fields(Device) if "_per_s" in one.name
    }
    memory_bytes, measured = int(device.memory_bytes * part), device.measured and device.measured.part(part)
    return replace(device, memory_bytes=memory_bytes, measured=measured, **rates)


def with_measured(device: Device, measurement: Measurement, *, cpu_parts: float = 1.0) -> Device | None:
    """The device with rates of such a one that was measured, or its part of them, in place of its data sheet's; None
    where none was.

    Args:
        cpu_parts: workers on the processor, which share its cores, for each that was measured.
    """
    rates = measurement.rates_for(lambda name: device.name in (name, find_gpu(name)))
    if rates is None:
        return None
    rates = rates.part(1 / (cpu_parts if device.is_cpu else max(1, round(rates.memory_bytes / device.memory_bytes))))
    return replace(device, measured=rates, link_bytes_per_s=rates.link_bytes_per_s, link_is_given=True)


def measured_devices(measurement: Measurement) -> tuple[Device, ...]:
    """The devices of the workers that were measured."""
    devices = []
    for one in measurement.workers:
        known = find_gpu(one.device)
        sheet = gpu_device(known or one.device, catalogue()[known or "rtx-3090"])
        is_cpu, has_bfloat16 = one.device == "cpu", "bfloat16" in one.products
        device = replace(sheet, memory_bytes=one.memory_bytes, is_cpu=is_cpu, has_bfloat16=has_bfloat16)
        devices.append(with_measured(device, measurement) or device)
    return tuple(devices)


def parse_hardware(text: str, where: str | None = None) -> Hardware:
    """The machine that `text` names; see the head of this file for the grammar.

    Args:
        where: what errors name as their place; None: the option `--hardware`.

    Raises:
        RefusedError: `text` names no known GPU or figure, or a count or figure is out of range.
    """
    if len(text) > MAX_CHARACTERS:  # to look for a name like it would take seconds
        shown = f"{text[:20]}..."
        raise RefusedError(
            "this describes no machine's GPUs",
            where=(where or "--hardware").replace(text, shown),
            found=f"{shown}, {len(text):,} characters",
            expected=f"at most {MAX_CHARACTERS:,}, such as 8x4090",
        )
    where = where or f"--hardware {text}"
    file = re.match(r"(.*\.json)\s*(?:,|$)", text, re.DOTALL)  # a file's name may have commas
    machine_text, *option_texts = [part.strip() for part in text[file.end(1) if file else 0 :].split(",")]
    machine_text, loose = _without_host_memory(machine_text)
    option_texts = [*loose, *(HOST_MEMORY.sub(r"host_memory_gib=\1", option) for option in option_texts)]
    notes: list[str] = []
    if file is not None:
        measurement = read_measurement(named_path(file[1].strip()))
        machine_text = f"{Path(file[1].strip()).name}, {MEASURED_ON}{measurement.label}"
        devices = list(measured_devices(measurement))
        option_texts = [f"host_memory_gib={measurement.host_memory_bytes / GIB}", *filter(None, option_texts)]
        option_texts.insert(0, f"host_memory_gb_per_s={measurement.update_bytes_per_s / 1e9}")
        notes.append(measurement.note)
    else:
        devices = [device for group in machine_text.split("+") for device in _parse_group(group.strip(), where, notes)]
    if len(devices) > MAX_WORKERS:
        raise RefusedError("too many GPUs", where=where, found=str(len(devices)), expected=f"1 to {MAX_WORKERS}")
    options = _parse_figures(option_texts, _OPTIONS, where)
    machines, network_gb_per_s = _parse_machines(options, where)
    if machines > 1:
        machine_text += f", {machines} such machines with {network_gb_per_s:g} GB/s between them"
    host_memory_gib = options.get("host_memory_gib")
    if host_memory_gib is None:
        host_memory_bytes = ASSUMED_HOST_MEMORY_PER_GPU_BYTES * len(devices)
        gib = host_memory_bytes // GIB
        notes.append(f"assumed: {gib} GiB of host memory, 128 a GPU (`,host_memory_gib=` corrects it)")
    else:
        host_memory_bytes = int(host_memory_gib * GIB)
        notes.append(f"given: {host_memory_gib:g} GiB of host memory")
    if any(device.measured is None for device in devices):
        notes.append("assumed: GPU rates scaled by data sheet from an RTX 4090, not measured on this machine")
    if any(is_amd(device.name) for device in devices):
        notes.append("note: AMD's GPUs were never tried; torch for ROCm shows them as `cuda:N`")
    disk_free_gib = options.get("disk_free_gib")
    return Hardware(
        description=machine_text,
        devices=tuple(devices),
        host_memory_bytes=host_memory_bytes,
        host_memory_bytes_per_s=options.get("host_memory_gb_per_s", 0.0) * 1e9 or ASSUMED_HOST_MEMORY_BYTES_PER_S,
        disk_free_bytes=None if disk_free_gib is None else int(disk_free_gib * GIB),
        disk_bytes_per_s=options.get("disk_gb_per_s", 0.0) * 1e9 or None,
        accumulate=options.get("accumulate", "fp32"),
        notes=tuple(notes),
        host_memory_is_assumed=host_memory_gib is None,
        host_rate_is_given="host_memory_gb_per_s" in options,
        price=options.get("price"),
        machines=machines,
        network_bytes_per_s=None if network_gb_per_s is None else network_gb_per_s * 1e9,
    )


def _parse_machines(options: dict[str, Any], where: str) -> tuple[int, float | None]:
    """The number of machines, and GB/s between them; None for one."""
    machines, network_gb_per_s = options.get("machines", 1), options.get("network_gb_per_s")
    if machines > MAX_WORKERS:
        raise RefusedError("too many machines", where=where, found=str(machines), expected=f"1 to {MAX_WORKERS}")
    if (machines > 1) != (network_gb_per_s is not None):
        what = "the network between the machines is not given" if machines > 1 else "a network, but only one machine"
        expected = "machines= and network_gb_per_s=, gigabytes a second that each machine sends and receives"
        hint = f"machines={max(2, machines)},network_gb_per_s=1.25 for 10 Gbit/s"
        raise RefusedError(what, where=where, expected=expected, hint=hint)
    return machines, network_gb_per_s


HOST_MEMORY = re.compile(
    r"^(\d+(?:\.\d+)?)\s*g(?:i?b)?(?:\s*(?:of\s+)?(?:host |system )?(?:ram|memory))?$", re.IGNORECASE
)


def _without_host_memory(text: str) -> tuple[str, list[str]]:
    """`2x3090 64GB` as GPUs and host memory; `4060ti 16gb` is a GPU, and so is one with its own memory behind it."""
    match = re.match(r"^(.*\S)\s+(\d+(?:\.\d+)?\s*g(?:i?b)?\b.*)$", text, re.IGNORECASE)
    if match is None or HOST_MEMORY.match(match[2]) is None:
        return text, []
    last = re.sub(r"^\d+\s*[xX*×]\s*", "", text.rpartition("+")[2].strip())
    head = find_gpu(re.sub(r"^\d+\s*[xX*×]\s*", "", match[1].rpartition("+")[2].strip()))
    if find_gpu(last) is not None or head is None:
        return text, []
    amount = HOST_MEMORY.sub(r"\1", match[2])
    is_own = catalogue()[head].memory_gib == float(amount) and match[2][-1].lower() in "gb"
    return match[1], [] if is_own else [f"host_memory_gib={amount}"]


def _parse_group(group: str, where: str, notes: list[str]) -> list[Device]:
    """`4x3090:pcie_lanes=8` as four devices."""
    spelling, *figure_texts = group.split(":")
    name, count = spelling.strip(), 1
    match = re.match(r"^(-?\d+)\s*[xX*×]\s*(.*)$", name)
    after = re.match(r"^(.*\S)\s*[xX*×]\s*(\d+)$", name)
    if find_gpu(name) is None:  # `7900xtx` is one GPU, not 7900 of `tx`
        if after is not None and find_gpu(after.group(1)) is not None:
            name, count = after.group(1), int(after.group(2))
        elif match is not None:
            name, count = match.group(2).strip(), int(match.group(1))
    if not name:
        raise RefusedError("a GPU's name is missing", where=where, found=repr(group), expected="for instance 8x4090")
    if not 1 <= count <= MAX_WORKERS:
        raise RefusedError(
            "impossible number of GPUs",
            where=where,
            found=str(count),
            expected=f"1 to {MAX_WORKERS}",
            hint=f"--hardware 8x{name}",
        )
    given = _parse_figures(figure_texts, [one.name for one in fields(GpuFigures)], where)
    if name.lower() == "custom":
        return [gpu_device("custom", _custom_figures(given, where))] * count
    known = find_gpu(name)
    if known is None:
        raise _unknown_gpu(name, where)
    if _squeeze(name) in _raw_catalogue()["aliases"]:
        notes.append(f"assumed: {name} means {known}")
    figures = replace(catalogue()[known], **given)
    if given:
        notes.append(f"given: {', '.join(f'{key}={value}' for key, value in given.items())} of {known}")
    device = gpu_device(known, figures)
    for measurement in sent_measurements() if not given else ():
        if (measured := with_measured(device, measurement)) is not None:
            notes.append(measurement.note)
            return [measured] * count
    return [device] * count


def _unknown_gpu(name: str, where: str) -> RefusedError:
    if _squeeze(name) == "cpu":
        return RefusedError(
            "a processor is no GPU", where=where, found=name, hint="without --hardware, plan is for this machine"
        )
    near = _same_model(name)
    custom = "a GPU that is not in the catalogue: --hardware 2xcustom:memory_gib=24:acc32_tflops=70"
    return RefusedError(
        f"unknown GPU {name!r}",
        where=where,
        found=name,
        expected=f"one of {'; '.join(', '.join(sorted(names)) for names in _by_family().values())}",
        hint=custom if near is None else f"did you mean {near}? Otherwise, {custom}",
    )


def _by_family() -> dict[str, list[str]]:
    """The catalogue's names by the letters before their number, GeForce first."""
    families: dict[str, list[str]] = {"rtx": []}
    for known in catalogue():
        families.setdefault(re.split(r"-?\d", known)[0], []).append(known)
    return families


_FAMILY_WORDS = re.compile(r"^(?:[rg]tx|rxt|rt|titan|radeon|rx|quadro|tesla|arc|gpu)+")


def _same_model(name: str) -> str | None:
    """The catalogue's GPU that a misspelt name means; None where its number is another one's.

    The number says generation and class, so a card is never taken for one of another number: a 1080 Ti is no 3080 Ti,
    an Arc B580 no 5080. Two swapped digits, and one too few or too many of a GeForce, are slips of the finger. Other
    words say maker, class and generation: a laptop's card, a Quadro, an RTX PRO, one with Ada or Blackwell in its name.
    """
    wanted = _model_words(name)
    if wanted is None:
        return None
    series, number, rest = wanted
    is_other_line = re.search(r"\bgtx?\b", name.lower()) or (len(number) == 3 and number[-1] in "05")
    may_lack = not is_other_line or "rtx" in name.lower()  # a GTX 580 or RX 580 is no 5080
    near: dict[str, str] = {}
    for known in catalogue():
        words = _model_words(known)
        if words is None or words[0] != series or not _kinds(name) <= _kinds(known):
            continue
        if _maker(name) not in (None, _maker(known)):
            continue
        lacks_or_repeats = not series and _maker(known) == "nvidia" and len(words[1]) == 4 != len(number) and may_lack
        is_slip = sorted(words[1]) == sorted(number) or lacks_or_repeats
        is_near = len(number) > 2 and words[1][0] == number[0] and is_slip and num_edits(number, words[1]) <= 1
        if words[1] == number or is_near:
            near[words[2]] = known
    begins = max((known for known in near if rest.startswith(known)), key=len, default="")
    return near[begins or closest(rest, list(near)) or min(near, key=len)] if near else None


def _model_words(name: str) -> tuple[str, str, str] | None:
    """`RTX A6000 Ada` as series `a`, number `6000` and rest `ada`; None where there is no number."""
    plain = re.sub(r"nvidia|geforce|amd|instinct|[^a-z0-9]+", " ", name.lower())
    parts = re.match(r"([a-z ]*)(\d+)(.*)", plain)
    if parts is None:
        return None
    series, rest = (parts[at].replace(" ", "") for at in (1, 3))
    return _FAMILY_WORDS.sub("", series), parts[2], rest


def is_amd(known: str) -> bool:
    """Whether a name of the catalogue is of an AMD card."""
    return _maker(known) == "amd"


_MAKERS = {
    "other": r"intel|\barc|apple|gaudi|ascend|\bmtt",
    "nvidia": r"nvidia|geforce|quadro|tesla|titan",
    "amd": r"amd|radeon|instinct|\bmi\d",
}
_BY_LETTERS = {"amd": r"\brx[ -]?\d", "nvidia": r"\b[rg]tx"}
"""Families that are a letter apart: only looked for where no maker is named."""
_KINDS = {
    "laptop": r"laptop|mobile|max-?q|\d ?m\b",
    "pro": r"(?<!radeon )\bpro\b",
    **{word: word for word in ("quadro", "ada", "blackwel")},
}
"""Words of a card's class and generation, as patterns: a card has all of those in the name that means it."""


def _maker(name: str) -> str | None:
    """The maker of the card that a name means; None where the name does not say."""
    lowered = name.lower()
    found = (maker for table in (_MAKERS, _BY_LETTERS) for maker, words in table.items() if re.search(words, lowered))
    named = next(found, None)
    return "nvidia" if named is None and name in catalogue() else named


def _kinds(name: str) -> set[str]:
    """The keys of `_KINDS` that a name says."""
    return {kind for kind, words in _KINDS.items() if re.search(words, name.lower())}


_OPTIONS = ["host_memory_gib", "host_memory_gb_per_s", "disk_free_gib", "disk_gb_per_s", "accumulate", "price"]
_OPTIONS += ["machines", "network_gb_per_s"]
_WHOLE = ("pcie_generation", "pcie_lanes", "machines")


def _parse_figures(texts: list[str], names: list[str], where: str) -> dict[str, Any]:
    """Figures of one group in the types of `GpuFigures`, or of the machine, checked."""
    figures: dict[str, Any] = {}
    for text in texts:
        key, separator, value = (part.strip() for part in text.partition("="))
        if not separator or key not in names:
            near = closest(key, names)
            raise RefusedError(
                f"unknown figure {key!r}",
                where=where,
                found=text,
                expected="one of " + ", ".join(f"{name}=" for name in names),
                hint=f"did you mean {near}=...?" if near else None,
            )
        if key in _WORDS:
            what, words = _WORDS[key]
            if value.lower() not in words:
                raise RefusedError(what, where=where, found=value, expected=" or ".join(words))
            figures[key] = words[value.lower()]
            continue
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        is_whole = key in _WHOLE
        if not (0 < number < 1e9 or (number == 0 and key == "disk_free_gib")) or (is_whole and number % 1):
            what = f"{key} is not a {'whole ' * is_whole}number above 0 and below 1e9"
            raise RefusedError(what, where=where, found=value, expected=f"such as {2 if is_whole else 24}")
        figures[key] = int(number) if is_whole else number
    return figures


_WORDS: dict[str, tuple[str, dict[str, object]]] = {
    "accumulate": ("unknown accumulation", {"fp16": "fp16", "fp32": "fp32"}),
    "bfloat16": ("bfloat16 is true or false", {"true": True, "false": False}),
}
"""Figures that are words: the error's text, and what each word means."""


def _custom_figures(given: dict[str, Any], where: str) -> GpuFigures:
    """Figures for a GPU that the catalogue lacks; the rates not given follow from the GeForce pattern."""
    missing = [name for name in ("memory_gib", "acc32_tflops") if name not in given]
    if missing:
        raise RefusedError(
            f"a custom GPU needs {' and '.join(missing)}",
            where=where,
            expected="--hardware 2xcustom:memory_gib=24:acc32_tflops=70",
        )
    acc32 = given["acc32_tflops"]
    defaults: dict[str, Any] = {"memory_gb_per_s": 700.0, "fp16_acc16_tflops": acc32, "fp32_tflops": acc32 / 4}
    return GpuFigures(**{**defaults, "bfloat16": True, "pcie_generation": 4, "pcie_lanes": 16, **given})


# Rates that work reaches on a GPU nobody has measured: shares of its data sheet, one for each kind of work.
#
# The shares are those of an RTX 4090 in published full fine-tuning (arXiv 2604.27085, float16 products that add up in
# float16): with matrix products at 0.84 of the data sheet's rate, attention at 0.8 of what it reaches with sums in
# float32, and everything else's traffic at the data sheet's bandwidth, layer times of Llama-3.1-8B and Qwen3-32B come
# out within 3 %. Only `PRODUCTS_SHARE` is fitted, and each of the two models gives it within 3 %
# (`tests/costs/test_cost_model.py`). Those runs launched transformers' own operators. That their bytes count, and
# attention's share, was chosen with both models in view, so leaving one out tests the one number.

PRODUCTS_SHARE = 0.84
"""Share of the data sheet's rate of products that add up in float16 (fitted)."""
EXACT_PRODUCTS_SHARE = 0.94
"""Share of the rate of products that add up in float32, on cards that do so at half their rate (assumed)."""
FULL_RATE_SHARE = 0.70
"""Share on cards that add up in float32 at their full rate: their power limit binds first (assumed)."""
FLOAT32_SHARE = 0.85
"""Share of the data sheet's rate of float32 (assumed)."""
ATTENTION_SHARE, FULL_RATE_ATTENTION_SHARE = 0.8, 0.5
"""Fused attention adds up in float32 always (assumed, from arXiv 2307.08691 for cards with the full rate)."""


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOPs and bytes per second, by the size of a product, an attention or an operator."""

    products: RateCurve
    grouped: RateCurve
    """Products with a matrix for each expert."""
    attention: RateCurve
    memory: RateCurve
    has_tiles: bool = True
    """Whether parts of tiles that are empty take time, as on GPUs."""
    slowdown: float = 1.0

    def flops_s(self, flops: float, kind: Literal["products", "grouped", "attention"] = "products") -> float:
        """Time of a product of so many operations, or of attention."""
        curve: RateCurve = getattr(self, kind)
        return self.slowdown * flops / at(curve, flops)

    def traffic_s(self, num_bytes: float, operators: int = 1) -> float:
        """Time of operators that read and write so many bytes together."""
        return self.slowdown * num_bytes / at(self.memory, num_bytes / max(1, operators))

    def pass_s(self, work: PassWork, *, fused: bool = False) -> float:
        """Time of a pass over a block, without the unpacking of weights.

        A product takes the time of its arithmetic or of its memory, whichever is longer.

        Args:
            fused: believe what the fused operators of `kernels: auto` save, which no GPU has confirmed yet; the
                published runs had the libraries' own.
        """
        rest = work.traffic_bytes - work.unpacked_bytes + (0 if fused else work.library_bytes)
        products_s = sum(map(self.product_s, work.shapes))
        attention_s = self.flops_s(work.attention_flops, "attention")
        return products_s + attention_s + self.traffic_s(rest, work.issued(fused=fused) - work.products)

    def product_s(self, product: Product) -> float:
        """Time of a matrix product."""
        flops = product.flops if self.has_tiles else product.useful_flops
        kind: Literal["products", "grouped"] = "grouped" if product.is_grouped else "products"
        return max(self.flops_s(flops, kind), self.traffic_s(product.traffic_bytes))


def rates_of(device: Device, dtype: DType, accumulate: Accumulate) -> Rates:
    """Rates of a device in this precision; a processor's are measured ones."""
    if (found := device.measured) is not None:
        narrow = found.narrow_products.get(dtype) if accumulate == "fp16" else None
        wide = found.products[dtype]
        curves = narrow or wide, wide, found.attention[dtype], found.memory["float32"]
        return Rates(*curves, has_tiles=not device.is_cpu, slowdown=found.slowdown)
    memory, exact = device.memory_bytes_per_s, device.fp32_accumulate_flops_per_s
    half = device.fp16_accumulate_flops_per_s
    if dtype == "float32" or device.is_cpu:
        rate = device.float32_flops_per_s if dtype == "float32" else exact
        products = grouped = attention = rate if device.is_cpu else FLOAT32_SHARE * rate
    else:
        products = grouped = min(EXACT_PRODUCTS_SHARE * exact, FULL_RATE_SHARE * half)
        if dtype == "float16" and accumulate == "fp16" and exact < half:
            products = PRODUCTS_SHARE * half
        attention = min(ATTENTION_SHARE * exact, FULL_RATE_ATTENTION_SHARE * half)
    return Rates(((1.0, products),), ((1.0, grouped),), ((1.0, attention),), ((1.0, memory),))
