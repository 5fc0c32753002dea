"""Base weights in 4 and 8 bit: the same numbers as bitsandbytes gives, at the size that was promised."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.memory import frozen_bytes
from roundpipe_cli.costs.models import TrainingSettings, parse_config
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.stored import packed_weights
from roundpipe_cli.model.stored.packed_weights import (
    PackedParameter,
    dequantize,
    packed_bytes,
    quantize,
    require_bitsandbytes,
    whole_weights,
)
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from tests.engine.test_parity import check_parity
from tests.support.e2e import MAX_WAIT_S, REPOSITORY, child_environment, finetune, make_model, make_workspace, metrics
from tests.support.tiny import make_rig, plain_step, random_microbatches, schedule_for

functional = pytest.importorskip("bitsandbytes.functional", reason="needs the extra 4bit")
SIZES = [(2, 12), (2, 12), (1, 7)]


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (48, 40), (3, 5), (4, 32, 24), (7,)])
def test_packing_is_that_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype, kind: Any) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = torch.zeros(packed_bytes(values.shape, kind), dtype=torch.uint8)
    quantize(values, packed, kind)
    with torch.compiler.set_stance("force_eager"):
        if kind == "4bit":
            expected = functional.dequantize_4bit(*functional.quantize_4bit(values, blocksize=64, quant_type="nf4"))
        else:
            expected = functional.dequantize_blockwise(*functional.quantize_blockwise(values, blocksize=64))
    unpacked = dequantize(packed, values.shape, dtype, kind)
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
    values, packed = torch.randn(6, 7), torch.empty(packed_bytes(torch.Size([6, 7]), kind), dtype=torch.uint8)
    quantize(values, packed, kind)
    assert dequantize(packed, values.shape, torch.float32, kind).shape == (6, 7)


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
@pytest.mark.parametrize("count", [256, 257, 300, 511])
def test_a_large_weight_is_unpacked_in_parts(count: int, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes counts weights in 32 bits: 2^31 of them, as fused experts may have, ended a run on CUDA."""
    values, packed = torch.randn(count), torch.empty(packed_bytes(torch.Size([count]), kind), dtype=torch.uint8)
    quantize(values, packed, kind)
    expected = dequantize(packed, values.shape, torch.float32, kind).view(-1)
    largest = []
    at_once = packed_weights._dequantize

    def counted(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, *args: Any, **more: Any) -> torch.Tensor:
        largest.append(shape.numel())
        return at_once(codes, scales, shape, *args, **more)

    monkeypatch.setattr(packed_weights, "_dequantize", counted)
    monkeypatch.setattr(packed_weights, "UNPACKED_AT_ONCE", 128)
    assert torch.equal(dequantize(packed, values.shape, torch.float32, kind), expected)
    assert max(largest) == 128 and sum(largest) == count


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        *(("llama", "4bit"), ("gpt_oss", "4bit"), ("qwen3_moe", "8bit")),
        *(pytest.param(name, "4bit", marks=pytest.mark.sweep) for name in ("qwen3_moe", "gemma2", "phi")),
        pytest.param("llama", "8bit", marks=pytest.mark.sweep),
    ],
)
def test_steps_agree_with_the_unpacked_weights_in_plain_pytorch(model_type: str, kind: Any) -> None:
    """Two of them: packed weights are frozen, and the second has adapters that were trained."""
    rig = make_rig(model_type, "lora", packed_as=kind)
    assert any(place.packed_as == kind for place in rig.store.layouts[1].places)
    check_parity(rig, None, learning_rate=1e-3, copy=True, head_chunk_tokens=8, num_steps=2)


def test_the_cut_and_the_workers_change_no_bit() -> None:
    microbatches, seen = random_microbatches(SIZES), set()
    ways: list[tuple[int, dict[str, Any]]] = [
        *((1, {"copy": False}), (2, {"copy": True}), (3, {"copy": True, "recompute": "layer"})),
        (2, {"copy": True, "whole_per_visit": True}),
    ]
    for num_workers, options in ways:
        rig = make_rig("qwen3_moe", "lora", packed_as="fp8")
        with rig.engine(num_workers, **options) as engine:
            result = engine.run_step(microbatches, schedule_for(rig, num_workers, len(SIZES)), step=0)
        seen.add((result.loss.hex(), b"".join(g.numpy().tobytes() for g in rig.store.gradients)))
    assert len(seen) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize(("model_type", "kind"), [("llama", "8bit"), ("qwen3_moe", "4bit")])
def test_weights_are_unpacked_once_in_a_visit(
    model_type: str, kind: Any, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits as once for each microbatch and pass, which is the fallback."""
    counts = dict[bool, int]()
    once, seen = packed_weights.dequantize, set()
    lock = threading.Lock()
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
    changes: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 2048}
    peaks = {}
    for held in (False, True):
        rig = make_rig("llama", "lora", packed_as="4bit", **changes)
        schedule = schedule_for(rig, 1, 2, forward=[(0, 1), (2, 3), (4, 6)], backward=[(7, 7), (5, 6), (3, 4), (0, 2)])
        with rig.engine(1, copy=True, count_bytes=True, whole_per_visit=held) as engine:
            microbatches = random_microbatches([(1, 8), (1, 8)])
            peaks[held] = engine.run_step(microbatches, schedule, step=0).device_peak_bytes[0]
            assert not engine._workers[0].runner.layers.model._held
    whole = 4 * sum(place.num_elements for place in rig.store.layouts[1].places if place.packed_as)
    assert whole < peaks[True] - peaks[False] < 3.1 * whole, "the largest stage has three blocks"


def test_a_graph_keeps_no_unpacked_weights() -> None:
    """Of a stage of six blocks one is unpacked at a time."""
    changes: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 2048}
    peaks = {}
    for kind in (None, "4bit"):
        rig = make_rig("llama", "lora", packed_as=kind, **changes)
        schedule = schedule_for(rig, 1, 1, forward=[(0, 6)], backward=[(7, 7), (0, 6)])
        with rig.engine(1, copy=True, count_bytes=True) as engine:
            peaks[kind] = engine.run_step(random_microbatches([(1, 8)]), schedule, step=0).device_peak_bytes[0]
            whole = rig.store.layouts[1].num_parameters * 4
    assert peaks["4bit"] < 0.45 * peaks[None]
    slots = 2 * sum(layout.num_bytes for layout in rig.store.layouts)
    assert peaks["4bit"] < slots + 3 * whole, "one unpacked block, and what is on its way"


def test_a_graph_without_a_backward_is_freed() -> None:
    """What a step that ran out of memory had computed stayed on the GPU, and what its retries computed too."""
    values, packed = torch.randn(64, 64), torch.empty(packed_bytes(torch.Size([64, 64]), "4bit"), dtype=torch.uint8)
    quantize(values, packed, "4bit")
    linear = nn.Linear(64, 64, bias=False)
    place = linear, "weight", PackedParameter.of(packed, values.shape, torch.float32, "4bit")
    with whole_weights([place]):
        output = linear(torch.randn(2, 64, requires_grad=True)).exp()  # whose backward reads the output itself
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None


def test_memory_that_ends_between_two_weights_leaves_none_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = torch.zeros(packed_bytes(torch.Size([64, 64]), "4bit"), dtype=torch.uint8)
    places = [
        (nn.Linear(64, 64), "weight", PackedParameter.of(packed, torch.Size([64, 64]), torch.float32, "4bit"))
        for _ in range(2)
    ]
    monkeypatch.setattr(places[1][2], "dequantized", lambda: torch.empty(2**60))
    with pytest.raises(RuntimeError, match="memory"), whole_weights(places):
        pass
    assert all(module.weight is parameter for module, _, parameter in places)


def test_bytes_uploaded_and_held() -> None:
    """Of frozen block weights: 4.5, 8.5 or 8 bits in place of 16; `plan` counts them within 1 %."""
    values = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 128, "num_hidden_layers": 2}
    kinds: tuple[Any, ...] = (None, "4bit", "8bit", "fp8")
    sent, held = {}, {}
    for kind in kinds:
        rig = make_rig("llama", "lora", packed_as=kind, dtype=torch.bfloat16, lora_rank=4, **values)
        with rig.engine(1, copy=True) as engine:
            result = engine.run_step(random_microbatches([(1, 8)]), schedule_for(rig, 1, 1), step=0)
        sent[kind] = result.upload_bytes
        frozen = [[p for p in layout.places if not p.trainable] for layout in rig.store.layouts]
        held[kind] = sum(p.num_bytes for p in frozen[1]) / sum(p.num_elements for p in frozen[1])
        architecture = parse_config(rig.skeleton.config.to_dict(), name="tiny", source="a test")  # type: ignore[union-attr,operator]
        settings = TrainingSettings(max_seq_length=8, lora_r=4, packed_as=kind)
        num_bytes = sum(p.num_bytes for places in frozen for p in places)
        assert frozen_bytes(architecture, settings) == pytest.approx(num_bytes, rel=0.01)
        costs = analytic_costs(architecture, settings, parse_hardware("1x4090")).costs
        assert costs.layers[1].param_bytes == pytest.approx(rig.store.layouts[1].num_bytes, rel=0.01)
    assert all(sent[kind] <= share * sent[None] for kind, share in (("4bit", 0.30), ("8bit", 0.55), ("fp8", 0.55)))
    assert held[None] == 2 and held["4bit"] <= 0.60 and held["8bit"] <= 1.07 and held["fp8"] <= 1.02


def plain_qlora(rig: Any) -> nn.Module:
    """The rig's plain module with bitsandbytes' own layers, packed afresh from the same unpacked weights."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    nf4: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": False}
    for module in list(rig.plain.modules()):
        for name, child in list(module.named_children()):
            if name == "base_layer" and isinstance(child, nn.Linear):
                own = Linear4bit(child.in_features, child.out_features, False, compute_dtype=torch.float32, **nf4)
                own.weight = Params4bit(child.weight.detach().clone(), requires_grad=False, **nf4)
                setattr(module, name, own.to("cpu"))
    plain: nn.Module = rig.plain
    return plain


@pytest.mark.filterwarnings("ignore")
def test_losses_follow_a_loop_over_bitsandbytes_own_layers() -> None:
    rig = make_rig("llama", "lora", packed_as="4bit")
    plain = plain_qlora(rig)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    ours, schedule, microbatches = (
        HostOptimizer(rig.store),
        schedule_for(rig, 2, len(SIZES)),
        random_microbatches(SIZES),
    )
    pairs = []
    with rig.engine(2, copy=True) as engine:
        for step in range(8):
            result = engine.run_step(microbatches, schedule, step=step)
            pairs.append((result.loss, plain_step(rig, microbatches, plain=plain)))
            ours.step(1e-2)
            theirs.step()
    assert pairs[0][0] == pytest.approx(pairs[0][1], rel=1e-4)
    assert pairs[-1][0] == pytest.approx(pairs[-1][1], rel=1e-2) and pairs[-1][0] < 0.9 * pairs[0][0]


def test_a_recipe_in_4_and_in_8_bit(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "w", make_model(tmp_path / "model", num_hidden_layers=2), max_steps=2)
    losses = {}
    for bits, words in ((0, ()), (4, ("load_in_4bit=true",)), (8, ("load_in_8bit=true",))):
        finetune(folder, *words, f"output_dir=out{bits}").expect(0)
        losses[bits] = [row["loss"] for row in metrics(folder / f"out{bits}")]
    assert losses[4] != losses[0] and losses[4] == pytest.approx(losses[0], rel=0.05)
    assert losses[8] != losses[0] and losses[8] == pytest.approx(losses[0], rel=0.005)


def test_a_missing_library_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match="pip install bitsandbytes"):
        require_bitsandbytes()


_TWO_COMMANDS = """
import os, sys
import torch, transformers.models.llama.modeling_llama  # what both commands load, but PEFT and bitsandbytes
assert not {"peft", "bitsandbytes", "roundpipe_cli"} & set(sys.modules)
for words in (["finetune", "recipe.yaml"], ["generate", "out", "Say", "--max-new-tokens", "2"])[: int(sys.argv[1])]:
    child = os.fork()
    if child == 0:
        sys.argv = ["roundpipe", *words]
        from roundpipe_cli.cli.app import main
        main()
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        sys.exit(f"{words}: exit code {code}")
"""


@pytest.mark.parametrize("num_commands", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_no_kernel_is_fetched_from_the_hub(tmp_path: Path, num_commands: int) -> None:
    """bitsandbytes runs one from there as it is imported, PEFT imports it: a package `kernels` tells who asked."""
    (tmp_path / "kernels.py").write_text(
        "import pathlib\n"
        "def get_kernel(*names, **options):\n"
        "    pathlib.Path(__file__).with_name('asked').write_text(str(names))\n"
        "    raise ImportError('no network')\n"
    )
    workspace = make_workspace(tmp_path / "w", make_model(tmp_path / "model", num_hidden_layers=2), max_steps=1)
    done = subprocess.run(
        [sys.executable, "-c", _TWO_COMMANDS, str(num_commands)],
        cwd=workspace,
        env=child_environment({"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}),
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_S,
    )
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "asked").exists(), (tmp_path / "asked").read_text()
    assert "kernels" not in done.stderr.replace("note: kernels: ", "").replace("kernels=reference", "")
