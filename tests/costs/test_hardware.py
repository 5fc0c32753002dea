"""The catalogue of GPUs, the text that names a machine, rates by data sheet, and the time of work by them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.costs import machine
from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.block_work import PassWork
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import (
    Device,
    catalogue,
    find_gpu,
    gpu_device,
    parse_hardware,
    pcie_bytes_per_s,
    rates_of,
)
from roundpipe_cli.costs.machine import HostMemory, cpu_devices, free_disk_bytes, host_memory
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import GIB

FACTS = Path(__file__).resolve().parents[1] / "facts" / "hardware.json"


def test_catalogue_holds_the_published_figures() -> None:
    published = json.loads(FACTS.read_text())["gpus"]
    assert published
    for name, figures in published.items():
        ours = catalogue()[name]
        assert {key: getattr(ours, key) for key in figures} == figures, name


def test_catalogue_is_plausible() -> None:
    assert len(catalogue()) >= 60
    for name, gpu in catalogue().items():
        assert gpu.acc32_tflops <= gpu.fp16_acc16_tflops <= 2.01 * gpu.acc32_tflops, name
        assert gpu.fp32_tflops < gpu.acc32_tflops, name
        assert find_gpu(name) == name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("4090x2", ["rtx-4090"] * 2),
        ("2 x RTX 4090", ["rtx-4090"] * 2),
        ("4x3090+2x4060ti", ["rtx-3090"] * 4 + ["rtx-4060-ti-16gb"] * 2),
        ("NVIDIA GeForce RTX 5090", ["rtx-5090"]),
        ("NVIDIA A100-SXM4-80GB", ["a100-80gb"]),
        ("Tesla T4", ["t4"]),
    ],
)
def test_machines_in_words(text: str, names: list[str]) -> None:
    assert [device.name for device in parse_hardware(text).devices] == names


@pytest.mark.parametrize(
    ("text", "host_gib", "count"),
    [
        *(("2x3090 64GB", 64, 2), ("rtx 4060 ti 16GB 64gib", 64, 1), ("4x3090+2x4060ti 128 GB of memory", 128, 6)),
        *(("2x 4060ti 16gb", None, 2), ("1x3090 24GB", None, 1), ("1x3090 24GB RAM", 24, 1)),
    ],
)
def test_host_memory_as_people_write_it(text: str, host_gib: int | None, count: int) -> None:
    """Story: `2x3090 64GB` was an unknown GPU. A card's own memory behind its name is no host memory."""
    machine = parse_hardware(text)
    assert len(machine.devices) == count and machine.host_memory_is_assumed is (host_gib is None)
    assert host_gib is None or machine.host_memory_bytes == host_gib * 2**30


def test_given_figures_replace_the_catalogues() -> None:
    machine = parse_hardware("2x4090:pcie_lanes=4:memory_gib=48,host_memory_gib=192,disk_free_gib=0,accumulate=fp16")
    device = machine.devices[0]
    assert device.memory_bytes == 48 * GIB
    assert device.link_bytes_per_s == pytest.approx(25e9 / 4)
    assert (machine.host_memory_bytes, machine.disk_free_bytes, machine.accumulate) == (192 * GIB, 0, "fp16")
    assert any("given: 192 GiB" in note for note in machine.notes)
    for given in (",host_memory_gib", ",host_memory_gb_per_s", ",disk_gb_per_s", ":pcie_gb_per_s"):
        left = parse_hardware(f"4090{given}=9").assumed
        assert parse_hardware("4090").assumed.keys() - left == {given[1:]}, "no other figure is taken for given"
    custom = parse_hardware("2xcustom:memory_gib=20:acc32_tflops=80:pcie_gb_per_s=11").devices[1]
    assert (custom.memory_bytes, custom.fp32_accumulate_flops_per_s) == (20 * GIB, 80e12)
    assert custom.link_bytes_per_s == 11e9
    rates = [pcie_bytes_per_s(*link) for link in ((4, 16), (4, 8), (2, 16), (6, 16))]
    assert rates == pytest.approx([25e9, 12.5e9, 6.25e9, 50e9]), "by lanes and generation"


def test_a_gpu_is_never_taken_for_one_of_another_maker_or_generation() -> None:
    """Story: an RTX PRO 6000 was taken for an A6000, a GTX 1080 Ti for a 3080 Ti, an Arc B580 for a 5080."""
    same = {
        **dict.fromkeys(("4009", "40900", "409", "rxt 4090", "rtx4090ti", "rtx 490"), "rtx-4090"),
        **dict.fromkeys(("rtx-pro-6000", "rtx pro 6000 blackwel"), "rtx-pro-6000-blackwell"),
        **{"rtx4080supr": "rtx-4080-super", "3080ti super": "rtx-3080-ti", "rx 7900": "radeon-7900-xt"},
        **{"v100s": "v100-32gb", "5090 mobile": "rtx-5090-laptop"},
    }
    other = "1080ti, gtx 1080, b580, arc a770, mi250, rtx a1000, rtx a4500, rtx 7900, h101, rx580, w7600, titan v, p100"
    other += ", gtx 580, 580, gt 730, arc 4090, arc a40, intel a770, apple m40, apple a10, radeon 4090, nvidia mi300x"
    other += ", geforce 7900 xtx, radeon 780m, rtx 4070 laptop, rtx 3080 max-q, 3070 ti mobile, rx 7900m, rx 6800m"
    other += ", quadro rtx 6000, quadro 4000, rtx a6000 ada, rtx 6000 pro, rtx 5000 blackwell"
    found = {}
    for name in [*same, *other.split(", ")]:
        with pytest.raises(RefusedError) as caught:
            parse_hardware(f"2x{name}")
        hint = caught.value.problems[0].hint or ""
        found[name] = hint.removeprefix("did you mean ").split("?")[0] if "did you mean" in hint else None
    assert found == {**same, **dict.fromkeys(other.split(", "))}


def test_host_memory_obeys_the_containers_limit(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  67108864 kB\nMemAvailable:  60000000 kB\n")
    assert host_memory(proc, tmp_path / "none") == HostMemory(64 * GIB, 60_000_000 << 10, "the machine")
    (proc / "self" / "cgroup").write_text("0::/box/run\n")
    inner = cgroup / "box" / "run"
    inner.mkdir(parents=True)
    (cgroup / "box" / "memory.max").write_text(f"{16 * GIB}\n")
    (cgroup / "box" / "memory.current").write_text(f"{6 * GIB}\n")
    (cgroup / "box" / "memory.stat").write_text(f"anon 1\ninactive_file {1 * GIB}\n")
    (inner / "memory.max").write_text("max\n")
    memory = host_memory(proc, cgroup)
    assert (memory.total_bytes, memory.available_bytes) == (16 * GIB, 11 * GIB)
    assert memory.limited_by == str(cgroup / "box" / "memory.max")


def test_free_disk_is_what_a_user_may_still_write(tmp_path: Path) -> None:
    """Of the file system that a folder would be on; the blocks that are kept for root are not in it."""
    before, there = os.statvfs(tmp_path), free_disk_bytes(tmp_path / "not" / "yet")
    after, tolerance = os.statvfs(tmp_path), 1 << 28  # others write meanwhile
    free = [each.f_bavail * each.f_frsize for each in (before, after)]
    assert there is not None and min(free) - tolerance <= there <= max(free) + tolerance
    assert free_disk_bytes(Path("/proc/self/not/yet")) == 0, "nothing can be written there"


def test_an_endless_name_is_refused_at_once() -> None:
    """Story: damaged at random, a recipe with 300,000 characters here was compared to all names for ten seconds."""
    with pytest.raises(RefusedError, match=r"(?s)describes no machine.*300,000 characters.*at most 4,000") as caught:
        parse_hardware("x" * 300_000, f"recipe.yaml:3: hardware: {'x' * 300_000}")
    assert len(str(caught.value)) < 300


SHORT = TrainingSettings(2048, micro_batch_size=4)


def card(name: str) -> Device:
    return gpu_device(name, catalogue()[name])


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_no_card_is_believed_to_beat_its_data_sheet(name: str) -> None:
    device, figures = card(name), catalogue()[name]
    for dtype in ("bfloat16", "float16"):
        exact, half = rates_of(device, dtype, "fp32"), rates_of(device, dtype, "fp16")
        assert 1 / exact.flops_s(1) < 1e12 * figures.acc32_tflops
        assert 1 / exact.flops_s(1) <= 1 / half.flops_s(1) < 1e12 * max(figures.fp16_acc16_tflops, figures.acc32_tflops)
        assert 1 / exact.flops_s(1, "attention") <= 0.81e12 * figures.acc32_tflops
    assert rates_of(device, "bfloat16", "fp16") == rates_of(device, "bfloat16", "fp32")
    assert 1 / rates_of(device, "float32", "fp32").flops_s(1) < 1e12 * figures.fp32_tflops


def test_a_processor_that_has_no_fast_16_bit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the quickstart in bfloat16 took an hour on a processor on which it takes six minutes in float32."""
    shares = {}
    for features in ("sse4_2 avx avx2", "avx2 avx512f avx512_bf16", "avx2 avx512_bf16 amx_bf16", "asimd bf16"):
        monkeypatch.setattr(machine, "_cpuinfo", lambda features=features: f"flags\t\t: {features}\n")
        device = cpu_devices(2)[0]
        shares[features] = device.fp32_accumulate_flops_per_s / device.float32_flops_per_s
        taken = [rates_of(device, *how).products[0][1] for how in (("float32", "fp32"), ("bfloat16", "fp16"))]
        assert taken == [device.float32_flops_per_s, device.fp32_accumulate_flops_per_s], "as they are"
        notes = [machine.slow_in_16_bit(dtype) for dtype in ("bfloat16", "float16", "float32")]
        is_slow = shares[features] < 0.5
        assert notes[2] is None and [note is not None for note in notes[:2]] == [is_slow, is_slow]
        assert not is_slow or "dtype=float32" in str(notes[0])
    assert list(shares.values()) == pytest.approx([0.1, 0.75, 2.6, 0.75])


def test_a_narrow_product_waits_for_memory() -> None:
    """Products with an adapter's matrices took the time of their few FLOPs: LoRA was a quarter too fast."""
    rates, wide, narrow = rates_of(card("rtx-4090"), "bfloat16", "fp32"), PassWork(), PassWork()
    wide.product(8192, 4096, 4096, 2)
    narrow.product(8192, 4096, 16, 2)
    assert rates.pass_s(wide) == pytest.approx(rates.flops_s(2 * 8192 * 4096 * 4096))
    assert rates.pass_s(narrow) == pytest.approx(rates.traffic_s(2 * (8192 * 4096 + 4096 * 16 + 8192 * 16)))
    assert rates.pass_s(narrow) > 5 * rates.flops_s(narrow.product_flops)


def test_tiles_that_are_partly_empty_take_their_whole_time() -> None:
    rates, few, many = rates_of(card("rtx-4090"), "bfloat16", "fp32"), PassWork(), PassWork()
    few.product(65, 16384, 16384, 4)
    many.product(128, 16384, 16384, 4)
    assert few.shapes[0].flops == many.shapes[0].flops
    assert few.product_flops < many.product_flops, "but counted are those that are asked for"
    assert rates.pass_s(few) <= rates.pass_s(many)


def blocks_s(name: str, hardware: str, **changes: Any) -> float:
    costs = analytic_costs(find_architecture(name), replace(SHORT, **changes), parse_hardware(hardware))
    return sum(2 * one.forward_s + one.backward_s for one in costs.layers[1:-1])


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B"])
def test_bandwidth_and_products_count_apart(name: str) -> None:
    memory, products = ":memory_gb_per_s=504", ":acc32_tflops=82.6:fp16_acc16_tflops=165.2"
    usual, slow_memory, slow_products, both = (
        blocks_s(name, f"4090{figures}") for figures in ("", memory, products, memory + products)
    )
    assert 1.1 * usual < min(slow_memory, slow_products)
    assert max(slow_memory, slow_products) < 1.95 * usual
    assert both == pytest.approx(2 * usual)


def test_unpacking_is_added_once() -> None:
    """It is in the block's traffic, as the ledger has it, and in the time of a visit where that is where it happens."""
    whole, packed = (blocks_s("Qwen/Qwen3-8B", "4090", packed_as=kind) for kind in (None, "4bit"))
    architecture = find_architecture("Qwen/Qwen3-8B")
    weights = sum(block.params for block in architecture.blocks)
    each_s = weights * replace(SHORT, packed_as="4bit").unpacking_bytes_per_param / 1008e9
    assert packed - whole == pytest.approx(3 * each_s, rel=0.01)
    assert blocks_s("Qwen/Qwen3-8B", "4090", packed_as="4bit", unpacks_once=True) == pytest.approx(whole)
