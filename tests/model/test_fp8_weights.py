"""Base weights in FP8: the nearest codes, the same numbers on every device, half the bytes, and training with them."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.cli.plan import verdict_lines
from roundpipe_cli.costs import analytic
from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.models import TrainingSettings
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.stored import packed_weights
from roundpipe_cli.model.stored.packed_weights import dequantize, packed_bytes, quantize
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.solve import solve
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.prepare.setup import prepare
from tests.engine.test_parity import check_parity
from tests.support.e2e import finetune, make_model, make_workspace, metrics, numbers, run, write_recipe
from tests.support.tiny import Rig, make_rig, plain_step, random_microbatches, schedule_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(2, 12), (2, 12), (1, 7)]
FINITE = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)


def packed_of(values: torch.Tensor) -> torch.Tensor:
    packed = torch.zeros(packed_bytes(values.shape, "fp8"), dtype=torch.uint8)
    quantize(values, packed, "fp8")
    return packed


def parts_of(packed: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales)"""
    rows = shape[:-1].numel()
    return packed[: shape.numel()], packed[packed.numel() - 4 * rows :].view(torch.float32)


def random_weights(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    rows = 10 ** (6 * torch.rand((*shape[:-1], 1), generator=generator) - 5)
    return torch.randn(shape, generator=generator) * rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (48, 40), (3, 5), (4, 32, 24), (7,), (1, 1)])
def test_codes_are_the_nearest_and_scales_those_of_the_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = random_weights(*shape).to(dtype)
    codes, scales = parts_of(packed_of(values), values.shape)
    rows = values.double().reshape(-1, shape[-1])
    assert torch.allclose(scales.double(), rows.abs().amax(1) / 448, rtol=2e-7)
    levels = FINITE.view(torch.float8_e4m3fn).double()
    nearest = (rows[:, :, None] / scales.double()[:, None, None] - levels).abs().amin(2)
    found = codes.view(torch.float8_e4m3fn).double().view(rows.shape)
    off = (rows / scales.double()[:, None] - found).abs()
    assert bool((off <= nearest + 1e-5 * found.abs()).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_processors_table_gives_what_a_card_computes(dtype: torch.dtype) -> None:
    """A card converts by torch's own kernel and multiplies in place: one rounding as well."""
    codes, scales = FINITE.repeat(9), 10 ** (4 * torch.rand(9) - 4)
    found = packed_weights.dequantize_rows(codes, scales, torch.Size([9, len(FINITE)]), dtype)
    on_card = codes.view(9, -1).view(torch.float8_e4m3fn).to(dtype).mul_(scales[:, None])
    assert torch.equal(found, on_card)


def test_rows_of_zeros_of_the_smallest_and_of_the_largest_numbers() -> None:
    values = torch.zeros(5, 4)
    values[1], values[2], values[3] = 1e-42, 3e38, torch.tensor([1e30, -1e30, 1.0, 0.0])
    found = dequantize(packed_of(values), values.shape, torch.float32, "fp8")
    assert torch.equal(found[0], values[0]) and bool(found.isfinite().all())
    assert float((found[1] - values[1]).abs().max()) < 1e-40
    assert torch.allclose(found[2:4], values[2:4], rtol=1e-6, atol=1e27)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_stays_none(bad: float) -> None:
    values = torch.ones(3, 64)
    values[1, 5] = bad
    for dtype in DTYPES:
        found = dequantize(packed_of(values), values.shape, dtype, "fp8")
        assert bool(found[1].isnan().all()) and bool((found[[0, 2]] == 1).all())


@pytest.mark.parametrize("shape", [(9, 70), (3, 5, 33), (700,)])
def test_packing_and_unpacking_in_parts_change_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    values = random_weights(*shape)
    whole = packed_of(values)
    expected = dequantize(whole, values.shape, torch.bfloat16, "fp8")
    monkeypatch.setattr(packed_weights, "PACKED_AT_ONCE", 128)
    monkeypatch.setattr(packed_weights, "AT_ONCE", 128)
    assert torch.equal(packed_of(values), whole)
    assert torch.equal(dequantize(whole, values.shape, torch.bfloat16, "fp8"), expected)


@pytest.mark.parametrize(
    ("model_type", "kernels"),
    [
        *(("llama", "auto"), ("gpt2", "auto"), ("qwen3_moe", "auto"), ("gpt_oss", "reference")),
        *(pytest.param(name, "auto", marks=pytest.mark.sweep) for name in ("gpt_oss", "gemma2")),
        *(pytest.param(name, "reference", marks=pytest.mark.sweep) for name in ("llama", "qwen3_moe")),
    ],
)
def test_steps_agree_with_the_unpacked_weights_in_plain_pytorch(model_type: str, kernels: str) -> None:
    """Loss, gradients of the adapters and so of all inputs; Conv1D and fused experts too. Two steps: packed weights are
    frozen, and the second has adapters that were trained."""
    rig = make_rig(model_type, "lora", packed_as="fp8", kernels=kernels)
    kept = [place for place in rig.store.layouts[1].places if place.packed_as == "fp8"]
    assert {len(place.shape) for place in kept} == ({2, 3} if model_type in ("qwen3_moe", "gpt_oss") else {2})
    check_parity(rig, None, learning_rate=1e-3, copy=True, head_chunk_tokens=8, num_steps=2)


def gradients_of(rig: Rig) -> dict[str, torch.Tensor]:
    with rig.engine(2, copy=True) as engine:
        engine.run_step(random_microbatches(SIZES), schedule_for(rig, 2, len(SIZES)), step=0)
    return {name: rig.store.gradient(name).double() for name in rig.store.trainable_names}


def test_in_bfloat16_gradients_are_as_close_to_float64_as_plain_pytorchs() -> None:
    rig = make_rig("llama", "lora", packed_as="fp8", dtype=torch.bfloat16, kernels="auto")
    found = gradients_of(rig)
    rig.plain.bfloat16()
    plain_step(rig, random_microbatches(SIZES))
    eager = {name: p.grad.double() for name, p in rig.plain.named_parameters() if p.grad is not None}
    rig.plain.double()
    plain_step(rig, random_microbatches(SIZES))
    exact = {name: p.grad for name, p in rig.plain.named_parameters() if p.grad is not None}
    assert exact.keys() == found.keys()

    def error_of(gradients: dict[str, torch.Tensor]) -> float:
        off = sum(float((gradients[name] - value).norm() ** 2) for name, value in exact.items())
        return (off / sum(float(value.norm() ** 2) for value in exact.values())) ** 0.5

    assert error_of(found) <= 2 * error_of(eager) < 0.1


def test_the_cost_model_counts_both_passes_of_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one token a block's time is that of its weights: codes read, whole weights written and read twice."""
    architecture, hardware = find_architecture("Qwen/Qwen3-8B"), parse_hardware("1x4090")
    monkeypatch.setattr(analytic, "ISSUED_PER_S", math.inf)  # else Python binds one token
    times = {}
    for name in ("4bit", "8bit", "fp8"):
        settings = TrainingSettings(max_seq_length=1, packed_as=name)  # type: ignore[arg-type]
        times[name] = analytic_costs(architecture, settings, hardware).costs.layers[1].forward_s
    unpacking = (1 + 4 / 1024 + 6) / analytic.FP8_UNPACKING
    assert times["fp8"] / times["4bit"] == pytest.approx((unpacking + 2) / (0.5 + 4 / 64 + 4), rel=0.02)
    assert times["8bit"] / times["4bit"] == pytest.approx((1 + 4 / 64 + 4) / (0.5 + 4 / 64 + 4), rel=0.02)


def test_a_recipe_in_fp8_needs_no_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains near the run without it, and has the same bits after a stop and with other workers."""
    folder = make_workspace(tmp_path / "w", make_model(tmp_path / "model", num_hidden_layers=2), num_train_epochs=1)
    found = importlib.util.find_spec
    hides = lambda name, *at: None if name == "bitsandbytes" else found(name, *at)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hides)
    finetune(folder, "output_dir=whole").expect(0)
    finetune(folder, "load_in_fp8=true").expect(0)
    losses = [row["loss"] for row in metrics(folder / "out")]
    whole = [row["loss"] for row in metrics(folder / "whole")]
    assert losses != whole and losses == pytest.approx(whole, rel=0.01)
    words = ("load_in_fp8=true", "output_dir=again")
    finetune(folder, *words, "max_steps=2").expect(0)
    finetune(folder, *words, "pipeline.devices=[cpu, cpu, cpu]", "--resume").expect(0)
    hexes = [[row["loss_hex"] for row in numbers(folder / name)] for name in ("again", "out")]
    assert hexes[0] == hexes[1]
    run(folder, "export", "out", "--merge", "--to", "merged").expect(0)
    adapter, base, merged = (
        load_file(folder / file)
        for file in ("out/adapter_model.safetensors", "model/model.safetensors", "merged/model.safetensors")
    )
    name = "model.layers.1.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{one}.weight"] for one in "AB")
    config = json.loads((folder / "out" / "adapter_config.json").read_text())
    change = (b @ a) * config["lora_alpha"] / config["r"]
    assert torch.allclose(merged[f"{name}.weight"], base[f"{name}.weight"] + change, atol=1e-6), "the base's own files"


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_plan_names_the_format_and_says_what_is_assumed(
    name: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=Qwen/Qwen3-32B", f"{PACKED_FORMATS[name].key}=true", "pipeline.devices=auto", "dtype=bfloat16"]
    loaded = load_recipe(write_recipe(tmp_path / "recipe.yaml", lora__dropout=0.0), words)
    answer = make_plan(loaded, "1x4090")
    assert f"lora in {PACKED_FORMATS[name].label}, bfloat16" in verdict_lines(answer)[0]
    unpacked = [line for line in answer.assumptions if "FP8 weights" in line and "on an H100" in line]
    assert len(unpacked) == (name == "fp8")


def test_what_fits_in_4_bit_in_place_of_fp8_can_be_asked_for(tmp_path: Path) -> None:
    """`load_in_fp8` makes way."""
    changes = {"model": "Qwen/Qwen3-32B", "load_in_fp8": True, "weights": "pinned"}
    recipe = write_recipe(tmp_path / "recipe.yaml", pipeline={}, dtype="bfloat16", **changes)
    found = solve(make_plan(load_recipe(recipe), "1x4090,host_memory_gib=32"))
    to_4bit, *_ = (change for change in found.changes if "load_in_4bit=true" in change.overrides)
    assert load_recipe(recipe, to_4bit.overrides).recipe.packed_as == "4bit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["load_in_fp8=true", "method=full"], "full fine-tuning trains them"),
        (["load_in_8bit=true", "method=full"], "full fine-tuning trains them[^!]*method: lora"),
        (["load_in_fp8=true", "load_in_4bit=true"], "the base weights cannot be in 4 bit and in FP8"),
        (["load_in_fp8=true", "load_in_8bit=true"], "the base weights cannot be in 8 bit and in FP8"),
        (["load_in_8bit=true", "load_in_4bit=true"], "the base weights cannot be in 4 bit and in 8 bit"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(RefusedError, match=said) as caught:
        load_recipe(write_recipe(tmp_path / "recipe.yaml"), words)
    assert words[0].removesuffix("=true") in str(caught.value) and caught.value.exit_code == 2


def test_files_that_are_in_4_bit_are_not_packed_again(tmp_path: Path) -> None:
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    folder = make_workspace(tmp_path / "w", make_model(tmp_path / "model", quantization_config=nf4))
    with pytest.raises(RefusedError, match="in which they stay") as caught:
        prepare(load_recipe(folder / "recipe.yaml", ["load_in_fp8=true"]), offline=True, tell=lambda event: None)
    assert caught.value.problems[0].found == "load_in_fp8: true"
