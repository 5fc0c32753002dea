"""Base weights in 4 bit, 8 bit and FP8: the numbers of bitsandbytes, or the nearest codes, the same on every device, at
the size that was promised; and training with them."""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.choices import LOADED_FORMATS, PACKED_FORMATS
from roundpipe_cli.cli.plan import verdict_lines
from roundpipe_cli.costs import analytic
from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.memory import frozen_bytes
from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.kernels import unpack_codes
from roundpipe_cli.model.stored import packed_weights
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.train.prepare.setup import prepare
from tests.engine.test_parity import check_parity
from tests.support.e2e import REPOSITORY, STAGES_OF_TWO, fresh, make_workspace, write_recipe
from tests.support.tiny import make_rig, random_microbatches, schedule_for, tiny_config

functional = pytest.importorskip("bitsandbytes.functional", reason="needs the extra 4bit")
SIZES = [(2, 12), (2, 12), (1, 7)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FINITE = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)


def packed_of(values: torch.Tensor, kind: Any) -> torch.Tensor:
    packed = torch.zeros(packed_weights.packed_bytes(values.shape, kind), dtype=torch.uint8)
    packed_weights.quantize(values, packed, kind)
    return packed


def random_weights(*shape: int) -> torch.Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    rows = 10 ** (6 * torch.rand((*shape[:-1], 1), generator=generator) - 5)
    return torch.randn(shape, generator=generator) * rows


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (48, 40), (3, 5), (4, 32, 24), (7,)])
def test_packing_is_that_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype, kind: Any) -> None:
    """`load_in_4bit` and `load_in_8bit`."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = packed_of(values, kind)
    with torch.compiler.set_stance("force_eager"):
        if kind == "4bit":
            expected = functional.dequantize_4bit(*functional.quantize_4bit(values, blocksize=64, quant_type="nf4"))
        else:
            expected = functional.dequantize_blockwise(*functional.quantize_blockwise(values, blocksize=64))
    unpacked = packed_weights.dequantize(packed, values.shape, dtype, kind)
    assert unpacked.dtype == dtype and torch.equal(unpacked, expected.view(shape))
    if kind == "8bit":
        assert (unpacked - values).abs().max() < 0.02 * values.abs().max()
    if values.numel() % 128 == 0:
        assert 8 * packed.numel() == (PACKED_FORMATS[kind].bits + 0.5) * values.numel()


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_nothing_is_compiled_for_a_weight_of_odd_width(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes took up to ten seconds for each such shape, at the start of a run on the processor."""
    for name in ("_dequantize_4bit_compute", "_dequantize_blockwise_compute"):
        monkeypatch.setattr(f"bitsandbytes.backends.default.ops.{name}", lambda *args: pytest.fail("compiles"))
    values = torch.randn(6, 7)
    assert packed_weights.dequantize(packed_of(values, kind), values.shape, torch.float32, kind).shape == (6, 7)


@pytest.mark.parametrize("shape", [(256,), (257,), (511,), (9, 70), (3, 5, 33)])
@pytest.mark.parametrize("kind", [form.name for form in LOADED_FORMATS])
def test_packing_and_unpacking_in_parts_change_nothing(kind: Any, shape: tuple[int, ...], monkeypatch: Any) -> None:
    """bitsandbytes counts weights in 32 bits, and takes several times the memory of what it packs at once."""
    values = random_weights(*shape)
    whole, largest = packed_of(values, kind), [0]
    expected, at_once = packed_weights.dequantize(whole, values.shape, torch.bfloat16, kind), packed_weights._dequantize

    def counted(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, *args: Any, **more: Any) -> torch.Tensor:
        largest.append(shape.numel())
        return at_once(codes, scales, shape, *args, **more)

    monkeypatch.setattr(packed_weights, "_dequantize", counted)
    monkeypatch.setattr(unpack_codes, "AT_ONCE", 128)
    for name in ("PACKED_AT_ONCE", "UNPACKED_AT_ONCE"):
        monkeypatch.setattr(packed_weights, name, 128)
    assert torch.equal(packed_of(values, kind), whole)
    assert torch.equal(packed_weights.dequantize(whole, values.shape, torch.bfloat16, kind), expected)
    assert max(largest) == (0 if kind == "fp8" else 128) and sum(largest) in (0, values.numel())


@pytest.mark.parametrize(
    ("model_type", "kind", "kernels"),
    [
        *(("llama", "4bit", "reference"), ("gpt_oss", "4bit", "reference"), ("qwen3_moe", "8bit", "reference")),
        *(("llama", "fp8", "auto"), ("gpt2", "fp8", "auto"), ("gpt_oss", "fp8", "reference")),
        *(("gpt_oss", "mxfp4", "auto"), ("qwen3_moe", "fp8_blocks", "auto")),
        *(pytest.param(name, "4bit", "reference", marks=pytest.mark.sweep) for name in ("qwen3_moe", "gemma2", "phi")),
        *(pytest.param("llama", kind, "reference", marks=pytest.mark.sweep) for kind in ("8bit", "fp8")),
        *(pytest.param(name, "fp8", "auto", marks=pytest.mark.sweep) for name in ("qwen3_moe", "gpt_oss", "gemma2")),
    ],
)
def test_steps_agree_with_the_unpacked_weights_in_plain_pytorch(model_type: str, kind: Any, kernels: str) -> None:
    """Conv1D and fused experts too. Packed weights are frozen, and a second step has adapters that were trained."""
    rig = make_rig(model_type, "lora", packed_as=kind, kernels=kernels)
    shapes = {len(place.shape) for place in rig.store.layouts[1].places if place.packed_as == kind}
    assert shapes == ({2, 3} if model_type in ("qwen3_moe", "gpt_oss") else {2})
    check_parity(rig, copy=True, head_chunk_tokens=8, num_steps=2)


@pytest.mark.parametrize("of", [("llama", "8bit", "stage"), ("qwen3_moe", "4bit", "layer")])
def test_weights_are_unpacked_once_in_a_visit(of: tuple[str, Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits as once for each microbatch and pass, which is the fallback."""
    (model_type, kind, recompute), counts = of, dict[bool, int]()
    once, seen, lock = packed_weights.dequantize, set(), threading.Lock()
    for whole, num_workers, copy in ((False, 1, True), (True, 1, True), (True, 2, True)):
        rig = make_rig(model_type, "lora", packed_as=kind)
        done: list[torch.Size] = []

        def counted(packed: torch.Tensor, shape: torch.Size, *args: Any, done: list[torch.Size] = done) -> torch.Tensor:
            with lock:
                done.append(shape)
            return once(packed, shape, *args)

        rounds, forward, backward = Rounds(len(SIZES), per_round=len(SIZES)), [(0, 1), (2, 2)], [(3, 4), (1, 2), (0, 0)]
        stages: Any = {"forward_stages": forward, "backward_stages": backward}
        schedule = build_schedule("roundpipe", num_workers=num_workers, rounds=rounds, **stages)
        with rig.engine(num_workers, copy=copy, recompute=recompute, whole_per_visit=whole) as engine:
            monkeypatch.setattr(packed_weights, "dequantize", counted)
            result = engine.run_step(random_microbatches(SIZES), schedule, step=0)
            monkeypatch.setattr(packed_weights, "dequantize", once)
        seen.add((result.loss.hex(), b"".join(g.numpy().tobytes() for g in rig.store.gradients)))
        if num_workers == 1:
            counts[whole] = len(done)
            visited = [layer for first, last in forward + backward for layer in range(first, last + 1)]
            packed = sum(bool(p.packed_as) for layer in visited for p in rig.store.layouts[layer].places)
    assert len(seen) == 1
    assert counts[True] == packed
    assert counts[False] >= len(SIZES) * counts[True]


def test_whole_weights_are_held_for_a_visit_and_no_longer() -> None:
    """They cost the device a stage's weights, whatever the number of stages and microbatches."""
    changes: dict[str, Any] = {"num_hidden_layers": 4, "intermediate_size": 1024}
    peaks = {}
    for held in (False, True):
        rig = make_rig("llama", "lora", packed_as="4bit", **changes)
        schedule = schedule_for(rig, 1, 2, forward=[(0, 1), (2, 4)], backward=[(5, 5), (3, 4), (0, 2)])
        with rig.engine(1, copy=True, count_bytes=True, whole_per_visit=held) as engine:
            microbatches = random_microbatches([(1, 3), (1, 3)])
            peaks[held] = engine.run_step(microbatches, schedule, step=0).device_peak_bytes[0]
            assert not engine._workers[0].runner.layers.model._held
    whole = 4 * sum(place.num_elements for place in rig.store.layouts[1].places if place.packed_as)
    assert whole < peaks[True] - peaks[False] < 3.1 * whole, "the largest stage has three blocks"


def test_a_graph_keeps_no_unpacked_weights() -> None:
    """Of a stage of six blocks one is unpacked at a time."""
    changes: dict[str, Any] = {"num_hidden_layers": 6, "intermediate_size": 1024}
    peaks = {}
    for kind in (None, "4bit"):
        rig = make_rig("llama", "lora", packed_as=kind, **changes)
        schedule = schedule_for(rig, 1, 1, forward=[(0, 6)], backward=[(7, 7), (0, 6)])
        with rig.engine(1, copy=True, count_bytes=True) as engine:
            peaks[kind] = engine.run_step(random_microbatches([(1, 3)]), schedule, step=0).device_peak_bytes[0]
            whole = rig.store.layouts[1].num_parameters * 4
    assert peaks["4bit"] < 0.45 * peaks[None]
    slots = 2 * sum(layout.num_bytes for layout in rig.store.layouts)
    assert peaks["4bit"] < slots + 3 * whole, "one unpacked block, and what is on its way"


def test_a_graph_without_a_backward_is_freed() -> None:
    """What a step that ran out of memory had computed stayed on the GPU, and what its retries computed too."""
    values = torch.randn(64, 64)
    linear = nn.Linear(64, 64, bias=False)
    packed = packed_of(values, "4bit"), values.shape, torch.float32, "4bit"
    with packed_weights.whole_weights([(linear, "weight", packed_weights.PackedParameter.of(*packed))]):
        output = linear(torch.randn(2, 64, requires_grad=True)).exp()  # whose backward reads the output itself
    alive = weakref.ref(output)
    del output
    gc.collect(1)
    assert alive() is None


def test_memory_that_ends_between_two_weights_leaves_none_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = torch.zeros(packed_weights.packed_bytes(torch.Size([64, 64]), "4bit"), dtype=torch.uint8)
    made = [packed_weights.PackedParameter.of(packed, torch.Size([64, 64]), torch.float32, "4bit") for _ in range(2)]
    places = [(nn.Linear(64, 64), "weight", parameter) for parameter in made]
    monkeypatch.setattr(places[1][2], "dequantized", lambda: torch.empty(2**60))
    with pytest.raises(RuntimeError, match="memory"), packed_weights.whole_weights(places):
        pass
    assert all(module.weight is parameter for module, _, parameter in places)


def test_bytes_uploaded_and_held() -> None:
    """Of frozen block weights: 4.5, 8.5 or 8 bits in place of 16; `plan` counts them within 1 %."""
    values = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 64, "num_hidden_layers": 1}
    kinds: tuple[Any, ...] = (None, "4bit", "8bit", "fp8")
    sent, held = {}, {}
    for kind in kinds:
        rig = make_rig("llama", "lora", packed_as=kind, dtype=torch.bfloat16, lora_rank=4, **values)
        with rig.engine(1, copy=True) as engine:
            result = engine.run_step(random_microbatches([(1, 2)], vocab=64), schedule_for(rig, 1, 1), step=0)
        sent[kind] = result.upload_bytes
        frozen = [[p for p in layout.places if not p.trainable] for layout in rig.store.layouts]
        held[kind] = sum(p.num_bytes for p in frozen[1]) / sum(p.num_elements for p in frozen[1])
        architecture = parse_config(rig.skeleton.config.to_dict(), name="tiny", source="a test")  # type: ignore[union-attr,operator]
        settings = TrainingSettings(max_seq_length=8, lora_r=4, packed_as=kind)
        num_bytes = sum(p.num_bytes for places in frozen for p in places)
        assert frozen_bytes(architecture, settings) == pytest.approx(num_bytes, rel=0.01)
        costs = analytic_costs(architecture, settings, parse_hardware("1x4090"))
        assert costs.layers[1].param_bytes == pytest.approx(rig.store.layouts[1].num_bytes, rel=0.01)
    assert all(sent[kind] <= share * sent[None] for kind, share in (("4bit", 0.30), ("8bit", 0.55), ("fp8", 0.55)))
    assert held[None] == 2 and held["4bit"] <= 0.60 and held["8bit"] <= 1.07 and held["fp8"] <= 1.02


def test_plan_has_dense_blocks_whole_where_files_pack_experts_only() -> None:
    architecture = parse_config(tiny_config("glm4_moe").to_dict(), name="tiny", source="a test")
    dense, *_, routed = architecture.blocks
    settings = TrainingSettings(max_seq_length=8, packed_as="mxfp4")
    assert settings.frozen_bytes(dense) == 2 * dense.params and settings.frozen_bytes(routed) < 2 * routed.params


def test_a_missing_library_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match="pip install bitsandbytes"):
        packed_weights.require_bitsandbytes()


def test_no_kernel_is_fetched_from_the_hub(tmp_path: Path, two_blocks: Path) -> None:
    """bitsandbytes runs one from there as it is imported, PEFT imports it: a package `kernels` tells who asked."""
    (tmp_path / "kernels.py").write_text(
        "import pathlib\n"
        "def get_kernel(*names, **options):\n"
        "    pathlib.Path(__file__).with_name('asked').write_text(str(names))\n"
        "    raise ImportError('no network')\n"
    )
    workspace = make_workspace(tmp_path / "w", two_blocks, max_steps=1, **STAGES_OF_TWO)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    done = fresh(workspace, "finetune", "recipe.yaml", environment=environment).expect(0)
    assert not (tmp_path / "asked").exists(), (tmp_path / "asked").read_text()
    assert "kernels" not in done.err.replace("note: kernels: ", "").replace("kernels=reference", "")


# -- FP8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (48, 40), (3, 5), (4, 32, 24), (7,), (1, 1)])
def test_codes_are_the_nearest_and_scales_those_of_the_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = random_weights(*shape).to(dtype)
    packed = packed_of(values, "fp8")
    scales = packed[packed.numel() - 4 * values[..., 0].numel() :].view(torch.float32)
    codes = packed[: values.numel()]
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
    found = packed_weights.dequantize(packed_of(values, "fp8"), values.shape, torch.float32, "fp8")
    assert torch.equal(found[0], values[0]) and bool(found.isfinite().all())
    assert float((found[1] - values[1]).abs().max()) < 1e-40
    assert torch.allclose(found[2:4], values[2:4], rtol=1e-6, atol=1e27)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_stays_none(bad: float) -> None:
    values = torch.ones(3, 64)
    values[1, 5] = bad
    for dtype in DTYPES:
        found = packed_weights.dequantize(packed_of(values, "fp8"), values.shape, dtype, "fp8")
        assert bool(found[1].isnan().all()) and bool((found[[0, 2]] == 1).all())


def test_the_cost_model_counts_both_passes_of_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one token a block's time is that of its weights: codes read, whole weights written and read twice."""
    monkeypatch.setattr(analytic, "ISSUED_PER_S", ((1.0, math.inf),))  # else Python binds one token
    architecture, hardware = find_architecture("Qwen/Qwen3-8B"), parse_hardware("1x4090")
    times = {}
    for name in ("4bit", "8bit", "fp8"):
        settings = TrainingSettings(max_seq_length=1, packed_as=name)  # type: ignore[arg-type]
        times[name] = analytic_costs(architecture, settings, hardware).layers[1].forward_s
    unpacking = (1 + 4 / 1024 + 6) / analytic.FP8_UNPACKING
    assert times["fp8"] / times["4bit"] == pytest.approx((unpacking + 2) / (0.5 + 4 / 64 + 4), rel=0.02)
    assert times["8bit"] / times["4bit"] == pytest.approx((1 + 4 / 64 + 4) / (0.5 + 4 / 64 + 4), rel=0.02)


def test_a_recipe_in_fp8_needs_no_bitsandbytes(tmp_path: Path, two_blocks: Path, monkeypatch: Any) -> None:
    folder = make_workspace(tmp_path / "w", two_blocks, load_in_fp8=True, **STAGES_OF_TWO)
    found = importlib.util.find_spec
    hides = lambda name, *at: None if name == "bitsandbytes" else found(name, *at)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hides)
    loaded = load_recipe(folder / "recipe.yaml", [f"model={folder}/model", f"datasets[0].path={folder}/rows.jsonl"])
    setup = prepare(loaded, offline=True, tell=lambda event: None)
    assert sum(place.packed_as == "fp8" for layout in setup.store.layouts for place in layout.places) == 2 * 7


@pytest.mark.parametrize("name", [form.name for form in LOADED_FORMATS])
def test_plan_names_the_format_and_says_what_is_assumed(name: Any, tmp_path: Path) -> None:
    words = ["model=Qwen/Qwen3-32B", f"{PACKED_FORMATS[name].key}=true", "pipeline.devices=auto", "dtype=bfloat16"]
    loaded = load_recipe(write_recipe(tmp_path / "recipe.yaml", lora__dropout=0.0), words)
    answer = make_plan(loaded, "1x4090")
    assert f"lora in {PACKED_FORMATS[name].label}, bfloat16" in verdict_lines(answer)[0]
    unpacked = [line for line in answer.assumptions if "FP8 weights" in line and "on an H100" in line]
    assert len(unpacked) == (name == "fp8")
