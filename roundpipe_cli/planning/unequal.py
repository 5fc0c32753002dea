"""Plans for machines whose workers are not all alike, and what `plan` says of them. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.hardware import Device
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.schedule.timeline import Timeline, busy_s
from roundpipe_cli.units import format_bytes


def without_small_cards(question: PlanRequest) -> Iterator[PlanRequest]:
    """The same question for the GPUs of more memory only, once for each memory size that the others fall short of.

    Stages are sized for the smallest device, since every stage may run on every worker; without the small ones they may
    be larger, and so may what fits.
    """
    devices = question.hardware.devices
    sizes = sorted({device.memory_bytes for device in devices if not device.is_cpu})
    for least in sizes[1:]:
        yield with_cards_of(question, least)


def with_cards_of(question: PlanRequest, least_bytes: int) -> PlanRequest:
    """The question for the devices of at least so much memory."""
    kept = tuple(device for device in question.hardware.devices if device.memory_bytes >= least_bytes)
    if len(kept) == question.num_workers:
        return question
    hardware = replace(question.hardware, devices=kept)
    analytic = analytic_costs(question.architecture, question.settings, hardware)
    if question.settings.weights_on_disk:  # the disk is the link, whatever the devices'
        link = question.analytic.costs.link_bytes_per_s
        analytic = replace(analytic, costs=replace(analytic.costs, link_bytes_per_s=link))
    return replace(question, hardware=hardware, analytic=analytic)


def describe_idle_gpus(question: PlanRequest, fewer: PlanRequest, *, fits: bool) -> str:
    """A line that says which devices stay idle, and why; of devices that the recipe lists, that they should.

    Args:
        fits: whether it would fit with them.
    """
    least = min(device.memory_bytes for device in fewer.hardware.devices)
    out = Counter(device.name for device in question.hardware.devices if device.memory_bytes < least)
    names = " and ".join(f"{count} x {name}" for name, count in out.items())
    why = "stages sized for its memory would be slower" if fits else "no stage fits its memory"
    listed = ", ".join(names_of_cards(question, fewer))
    if question.lists_devices:
        why = "stages sized for its memory are slower" if fits else why
        return f"better without {names}: {why}; write pipeline.devices: [{listed}]"
    return f"{names} left out: {why} (pipeline.devices: [{listed}])"


def names_of_cards(question: PlanRequest, fewer: PlanRequest) -> tuple[str, ...]:
    """The devices of `question` that are in `fewer` too, as a recipe names them."""
    least, devices = min(device.memory_bytes for device in fewer.hardware.devices), question.hardware.devices
    names = question.loaded.recipe.pipeline.devices if question.lists_devices else ()
    return tuple(
        names[place] if names else f"cuda:{place}"
        for place, device in enumerate(devices)
        if device.memory_bytes >= least
    )


def who_does_what(question: PlanRequest, make_timeline: Callable[[], Timeline]) -> list[str]:
    """One line for each kind of device: its speed and its part of the work; none where all are alike.

    Args:
        make_timeline: simulates a step; not called where all are alike.
    """
    devices = question.hardware.devices
    speeds = question.analytic.costs.worker_speed or (1.0,) * len(devices)
    if len({(device.name, device.memory_bytes, speed) for device, speed in zip(devices, speeds, strict=True)}) == 1:
        return []
    work = [seconds * speed for seconds, speed in zip(busy_s(make_timeline()), speeds, strict=True)]
    smallest = min(devices, key=lambda device: device.memory_bytes)
    lines = [f"unequal workers; stages are sized for the smallest, {_memory(smallest)}"]
    kinds = sorted(zip(devices, speeds, work, strict=True), key=lambda one: (-one[1], one[0].name))
    for (name, speed), members in groupby(kinds, key=lambda one: (one[0].name, one[1])):
        parts = [part / sum(work) for _, _, part in members]
        each = sum(parts) / len(parts)
        does = f"does {each:.1%} of the work{' each' if len(parts) > 1 else ''}" if each else "stays idle: faster so"
        lines.append(f"  {len(parts)} x {name}: speed {speed:.2f}, {does}")
    return lines


def _memory(device: Device) -> str:
    return f"{device.name}: {format_bytes(device.memory_bytes)}"
