"""How fast `generate` answers with a model on a machine, whole or streamed, before anything is loaded. No torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from roundpipe_cli.costs.analytic import ISSUED_PER_S, analytic_costs, head_work
from roundpipe_cli.costs.answering import ROOM_BYTES, ROOM_SHARE, pass_s, plan_devices, weight_budget
from roundpipe_cli.costs.block_work import block_work, lora_params
from roundpipe_cli.costs.hardware import ASSUMED_DISK_BYTES_PER_S, Device, Hardware, part_of
from roundpipe_cli.costs.machine import host_memory, slow_in_16_bit
from roundpipe_cli.costs.memory import (
    CONTEXT,
    CONTEXT_BYTES,
    CONTEXT_HOST_BYTES,
    LIBRARY_FILES_BYTES,
    MAX_MEMORY_SHARE,
    TOKEN_BYTES,
    Need,
    interpreter_bytes,
    usable_device_bytes,
    usable_host_bytes,
)
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.units import counted, format_bytes

MAX_POWER = 8
"""Power of two that is the largest batch which is offered."""
CACHE_PASSES = 3
"""Times that keys and values are read or written for a token: transformers' cache copies them to add one."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One way to answer a batch of prompts."""

    prompts: int
    fits: bool
    pass_s: float
    """Seconds for a token of each prompt."""
    device: Need
    """Need of the GPU with the largest; empty on processors."""
    host: Need
    passing_bytes: int
    """Bytes of weights that come past for each token."""
    from_disk: bool

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all prompts together, behind their first ones."""
        return self.prompts / self.pass_s


def generation(question: PlanRequest, prompts: int, *, streams: bool) -> Generation:
    """How `generate` would answer so many prompts at once, streamed or with the whole model on the roomiest device.
    Prompt and answer together are as long as the recipe's longest rows."""
    hardware, architecture, loaded = question.hardware, question.architecture, question.loaded
    form: dict[str, Any] = {"method": "lora"} if streams else {"method": "lora", "packed_as": None}
    if loaded.recipe.method == "full" or not loaded.path.is_file():  # a model that nobody trains answers alone
        form["lora_r"] = 0
    if hardware.is_here and not question.gpus and slow_in_16_bit(question.settings.dtype) is not None:
        form["dtype"] = "float32"
    settings = replace(question.settings, **form)
    case, devices = replace(question, settings=settings), _devices(hardware)
    smallest, largest = (pick(devices, key=lambda one: one.memory_bytes) for pick in (min, max))
    devices, device = (devices, smallest) if streams else ([largest], largest)
    on_host, blocks = smallest.is_cpu, len(architecture.blocks)
    sizes, process, free = [0, *_layer_bytes(case)], _process_parts(question), _free_host_bytes(question)
    room = free if on_host else usable_device_bytes(device) - CONTEXT_BYTES
    embedding = 0 if architecture.tied else architecture.embed_params * settings.dtype_bytes
    from_disk = streams and sum(sizes) + embedding > MAX_MEMORY_SHARE * free
    answers = _answer_bytes(case, prompts) * -(-blocks // len(devices))
    unpacked = max(map(settings.packed_params, architecture.blocks), default=0) * settings.dtype_bytes
    budget = weight_budget(room, answers_bytes=answers, unpacked_bytes=unpacked)
    stays = not streams or (on_host and not from_disk)
    plans = plan_devices(sizes, len(devices), sys.maxsize if stays else budget)
    needed = {
        "weights that stay": max(plan.kept_bytes for plan in plans) + (embedding if stays else 0),
        "weights that come past": 0 if on_host else max(plan.slots_bytes for plan in plans),
        "keys and values": answers,
        "weights of a layer, unpacked": unpacked,
    }
    host = process | (needed if on_host else {"weights": sum(sizes) + embedding} if streams and not from_disk else {})
    link, disk = min(one.link_bytes_per_s for one in devices), hardware.disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S
    compute_s = _compute_s(case, device, prompts)
    return Generation(
        prompts=prompts,
        fits=sum(needed.values()) <= room if streams else ROOM_SHARE * needed["weights that stay"] + ROOM_BYTES <= room,
        pass_s=pass_s(plans, compute_s, link_bytes_per_s=link, disk_bytes_per_s=disk if from_disk else None),
        device=Need({} if on_host else {**needed, CONTEXT: CONTEXT_BYTES}),
        host=Need(host),
        passing_bytes=sum(plan.passing_bytes for plan in plans),
        from_disk=from_disk,
    )


def generation_document(question: PlanRequest, prompts: int) -> dict[str, Any]:
    """Figures of both ways for `--json`, in bytes and seconds, and the batch that helps."""
    document: dict[str, Any] = {"prompts": prompts, "tokens_of_each": question.settings.max_seq_length}
    for name, way in _ways(question, prompts).items():
        document[name] = {"fits": way.fits, "pass_s": way.pass_s, "tokens_per_s": way.tokens_per_s}
        document[name] |= {"device_bytes": way.device.total_bytes, "host_bytes": way.host.total_bytes}
        document[name] |= {"passing_bytes": way.passing_bytes, "from_disk": way.from_disk}
    better = helpful_batch(question, way)
    offered = None if better is None else {"prompts": better.prompts, "tokens_per_s": better.tokens_per_s}
    return {**document, "better_batch": offered}


def generation_lines(question: PlanRequest, prompts: int) -> list[str]:
    """Lines on both ways, and on the batch that helps."""
    each = f"{question.settings.max_seq_length:,} tokens with its prompt, in {question.settings.dtype}"
    lines = [f"answers to {counted(prompts, 'prompt')} at once, each of {each} (predicted, behind the first token)"]
    for name, way in _ways(question, prompts).items():
        needs = ("GPU", way.device), ("host", way.host)
        parts = [f"{what} {format_bytes(need.total_bytes)}" for what, need in needs if need.parts]
        if way.passing_bytes:
            where = "disk" if way.from_disk else "host memory"
            parts.append(f"{format_bytes(way.passing_bytes)} past for each token from {where}")
        speed = f"{way.tokens_per_s:.3g} tokens/s" if way.fits else "does not fit"
        lines.append(f"  {name:<16}{speed}: {', '.join(parts)}")
    if way.tokens_per_s < 1 and (better := helpful_batch(question, way)) is not None:
        offered = f"--batch-size {better.prompts} (with --prompts FILE): {better.tokens_per_s:.3g} tokens/s"
        lines.append(f"  below 1 token/s, and a pass of the weights costs many prompts what it costs one: {offered}")
    return ["", *lines]


def _ways(question: PlanRequest, prompts: int) -> dict[str, Generation]:
    """The last of them needs least memory."""
    return {name: generation(question, prompts, streams=name == "streamed") for name in ("plain", "streamed")}


def helpful_batch(question: PlanRequest, now: Generation) -> Generation | None:
    """The smallest larger batch, a power of two, that is streamed at a token a second, else the fastest; None where no
    larger one is faster."""
    best = now
    for batch in (2**power for power in range(1, MAX_POWER + 1)):
        if best.tokens_per_s < 1 and batch > now.prompts:
            found = generation(question, batch, streams=True)
            best = found if found.fits and found.tokens_per_s > best.tokens_per_s else best
    return None if best is now else best


def _devices(hardware: Hardware) -> list[Device]:
    """The GPUs; of a machine without them its processor, all of it."""
    gpus = [device for device in hardware.devices if not device.is_cpu]
    return gpus or [part_of(hardware.devices[0], len(hardware.devices))]


def _process_parts(question: PlanRequest) -> dict[str, int]:
    """Host memory of a process that answers, without weights, keys and values."""
    count = len(question.gpus)
    libraries = interpreter_bytes(count) + CONTEXT_HOST_BYTES * count
    return {"interpreter and contexts": libraries, "tokenizer": TOKEN_BYTES * question.architecture.vocab_size}


def _free_host_bytes(question: PlanRequest) -> int:
    """Host memory for weights, keys and values: of this machine, what is free now."""
    hardware = question.hardware
    free = host_memory().available_bytes + LIBRARY_FILES_BYTES if hardware.is_here else usable_host_bytes(hardware)
    return max(0, free - sum(_process_parts(question).values()))


def _layer_bytes(case: PlanRequest) -> list[int]:
    """Bytes of each block, with its adapters, and of the head."""
    architecture, settings = case.architecture, case.settings
    each = {
        block: int(settings.frozen_bytes(block) + lora_params(architecture, block, settings) * settings.dtype_bytes)
        for block in set(architecture.blocks)
    }
    return [*(each[block] for block in architecture.blocks), architecture.head_params * settings.dtype_bytes]


def _answer_bytes(case: PlanRequest, prompts: int) -> int:
    """Bytes of a block's keys and values for all prompts and answers."""
    architecture, settings = case.architecture, case.settings
    width = 2 * architecture.num_key_value_heads * architecture.head_dim
    return prompts * settings.max_seq_length * width * settings.dtype_bytes


def _compute_s(case: PlanRequest, device: Device, prompts: int) -> float:
    """Seconds in which one device computes a token of each prompt, with all weights there; keys and values half as long
    as at the end."""
    architecture = case.architecture
    settings = replace(
        case.settings,
        max_seq_length=1,
        micro_batch_size=prompts,
        sequences_per_row=1,
        num_microbatches=1,
        sequence_chunks=1,
        mlp_chunk_tokens=None,
        unpacks_once=False,
        fused=False,
    )
    hardware = replace(case.hardware, devices=(device,))
    layers = analytic_costs(architecture, settings, hardware).layers
    seconds = sum(layer.forward_s for layer in layers)
    if device.is_cpu and device.measured is None:  # whose assumed rate is that of long rows
        works = [block_work(architecture, block, settings).forward for block in architecture.blocks]
        works.append(head_work(architecture, settings)[0])
        issued = sum(work.issued(fused=False) for work in works)
        read_s = sum(_layer_bytes(replace(case, settings=settings))) / device.memory_bytes_per_s
        seconds = max(seconds, read_s) + issued / ISSUED_PER_S[0][1]
    kept = _answer_bytes(case, prompts) * len(architecture.blocks) / 2
    return seconds + CACHE_PASSES * kept / device.memory_bytes_per_s
