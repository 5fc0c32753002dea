"""Rates of GPUs by data sheet, and the time of work by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roundpipe_cli.costs import machine
from roundpipe_cli.costs.analytic import analytic_costs, fused_share
from roundpipe_cli.costs.block_work import PassWork
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import Device, catalogue, gpu_device, parse_hardware, rates_of
from roundpipe_cli.costs.machine import cpu_devices
from roundpipe_cli.costs.models import TrainingSettings

SHORT = TrainingSettings(2048, micro_batch_size=4)


def card(name: str) -> Device:
    return gpu_device(name, catalogue()[name])


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_no_card_is_believed_to_beat_its_data_sheet(name: str) -> None:
    device, figures = card(name), catalogue()[name]
    for dtype in ("bfloat16", "float16"):
        exact, half = rates_of(device, dtype, "fp32"), rates_of(device, dtype, "fp16")
        assert exact.products < 1e12 * figures.acc32_tflops
        assert exact.products <= half.products < 1e12 * max(figures.fp16_acc16_tflops, figures.acc32_tflops)
        assert exact.attention <= 0.81e12 * figures.acc32_tflops
    assert rates_of(device, "bfloat16", "fp16") == rates_of(device, "bfloat16", "fp32")
    assert rates_of(device, "float32", "fp32").products < 1e12 * figures.fp32_tflops


def test_a_processors_rates_are_taken_as_they_are() -> None:
    device = cpu_devices(2)[0]
    assert rates_of(device, "float32", "fp32").products == device.float32_flops_per_s
    assert rates_of(device, "bfloat16", "fp16").products == device.fp32_accumulate_flops_per_s


def test_a_processor_that_has_no_fast_16_bit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the quickstart in bfloat16 took an hour on a processor on which it takes six minutes in float32."""
    shares = {}
    for features in ("sse4_2 avx avx2", "avx2 avx512f avx512_bf16", "avx2 avx512_bf16 amx_bf16", "asimd bf16"):
        monkeypatch.setattr(machine, "_cpuinfo", lambda features=features: f"flags\t\t: {features}\n")
        device = cpu_devices(2)[0]
        shares[features] = device.fp32_accumulate_flops_per_s / device.float32_flops_per_s
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
    assert rates.pass_s(wide) == pytest.approx(2 * 8192 * 4096 * 4096 / rates.products)
    assert rates.pass_s(narrow) == pytest.approx(2 * (8192 * 4096 + 4096 * 16 + 8192 * 16) / rates.memory)
    assert rates.pass_s(narrow) > 5 * narrow.product_flops / rates.products


def test_tiles_that_are_partly_empty_take_their_whole_time() -> None:
    rates, few, many = rates_of(card("rtx-4090"), "bfloat16", "fp32"), PassWork(), PassWork()
    few.product(65, 16384, 16384, 4)
    many.product(128, 16384, 16384, 4)
    assert few.shapes[0].flops == many.shapes[0].flops
    assert few.product_flops < many.product_flops, "but counted are those that are asked for"
    assert rates.pass_s(few) <= rates.pass_s(many)


def blocks_s(name: str, hardware: str, **changes: Any) -> float:
    costs = analytic_costs(find_architecture(name), replace(SHORT, **changes), parse_hardware(hardware)).costs
    return sum(2 * one.forward_s + one.backward_s for one in costs.layers[1:-1])


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B"])
def test_bandwidth_and_products_count_apart(name: str) -> None:
    """Half the bandwidth, or half the rate of products, costs less than twice the time; both cost just that."""
    usual = blocks_s(name, "4090")
    slow_memory = blocks_s(name, "4090:memory_gb_per_s=504")
    slow_products = blocks_s(name, "4090:acc32_tflops=82.6:fp16_acc16_tflops=165.2")
    both = blocks_s(name, "4090:memory_gb_per_s=504:acc32_tflops=82.6:fp16_acc16_tflops=165.2")
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


def test_what_fused_operators_would_save_is_stated() -> None:
    machine = parse_hardware("1x4090")
    shares = {
        name: fused_share(find_architecture(name), SHORT, machine)
        for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-1.7B")
    }
    assert 0.5 < shares["Qwen/Qwen3-1.7B"] < shares["meta-llama/Llama-3.1-8B"] < 0.9
