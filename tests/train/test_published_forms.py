"""Models that are published in MXFP4 or FP8 blocks: packed as they came, they train as unpacked ones do, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.costs.find_model import find_config
from roundpipe_cli.costs.memory import frozen_bytes, loading_need
from roundpipe_cli.costs.models import stored_as
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event, Notice
from roundpipe_cli.model.stored import packed_weights
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.question import settings_of
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare
from tests.support.e2e import STAGES_OF_TWO, edit_json, finetune, make_model, make_workspace, metrics
from tests.support.published import publish

MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "experts in MXFP4": ("mxfp4", "gpt_oss", {}),
    "FP8 blocks": ("fp8_blocks", "llama", {"hidden_size": 192, "intermediate_size": 160}),
    "experts in FP8 blocks": ("fp8_blocks", "qwen3_moe", {"moe_intermediate_size": 128, "hidden_size": 128}),
}
"""Form, type and sizes; blocks that the last rows and columns of a matrix cut off, and whole ones where experts' gates
are joined."""
NUM_PACKED = {"experts in MXFP4": 2, "FP8 blocks": 7, "experts in FP8 blocks": 6}
"""Packed weights of a block: fused experts are two."""


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A name of `MODELS`, and a working directory with the model."""
    kind, model_type, sizes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("published")
    model = publish(make_model(folder / "m", model_type, num_hidden_layers=2, **sizes), kind)
    keys = {"max_steps": 4, "lora__dropout": 0.0, "lora__use_dora": model_type == "llama", **STAGES_OF_TWO}
    return request.param, make_workspace(folder / "work", model, **keys)


def prepared(work: Path, *overrides: str) -> tuple[Setup, list[str]]:
    """A run's setup, and its notices."""
    loaded = load_recipe(work / "recipe.yaml", [f"model={work}/model", f"output_dir={work}/never", *overrides])
    events: list[Event] = []
    return prepare(loaded, offline=True, tell=events.append), [one.text for one in events if isinstance(one, Notice)]


def steps(output_dir: Path) -> list[tuple[str, float]]:
    return [(row["loss_hex"], row["grad_norm"]) for row in metrics(output_dir)]


def test_a_run_is_that_of_the_unpacked_weights(case: tuple[str, Path]) -> None:
    """Whatever the number of workers; DoRA too; and a run that began unpacked continues packed."""
    name, work = case
    kind = MODELS[name][0]
    label = PACKED_FORMATS[kind].label
    packed = finetune(work, "output_dir=packed").expect(0)
    assert f"{2 * NUM_PACKED[name]} weights stay in {label}" in packed.err and "dequantised" not in packed.err
    whole = finetune(work, "output_dir=whole", "load_in_16bit=true", "pipeline.devices=[cpu]").expect(0)
    assert "stay in" not in whole.err and "dequantised while loading" in whole.err
    finetune(work, "output_dir=old", "load_in_16bit=true", "max_steps=2").expect(0)
    finetune(work, "output_dir=old", "--resume").expect(0)
    adapters = [(work / folder / "adapter_model.safetensors").read_bytes() for folder in ("packed", "whole", "old")]
    assert len(steps(work / "packed")) == 4 and adapters[0] == adapters[1] == adapters[2]
    assert steps(work / "packed") == steps(work / "whole") == steps(work / "old")


def test_memory_is_what_plan_counts(case: tuple[str, Path]) -> None:
    """All weights, unpacked, are those of a run without packing; `plan` counts a packed run's bytes within 2 %."""
    name, work = case
    setup, _ = prepared(work)
    whole, _ = prepared(work, "load_in_16bit=true")
    places = [place for layout in setup.store.layouts for place in layout.places if not place.trainable]
    assert {place.packed_as for place in places} == {None, MODELS[name][0]}
    for place in places:
        assert torch.equal(setup.store.base_weight(place.name), whole.store.base_weight(place.name)), place.name
    architecture = find_config("model", work / "model").architecture()
    settings = settings_of(setup.recipe, architecture)
    assert frozen_bytes(architecture, settings) == pytest.approx(sum(place.num_bytes for place in places), rel=0.03)
    unpacked = settings_of(whole.recipe, architecture)
    assert frozen_bytes(architecture, settings) < 0.8 * frozen_bytes(architecture, unpacked)
    assert loading_need(architecture, settings).total_bytes < loading_need(architecture, unpacked).total_bytes


def test_what_trains_all_weights_or_packs_them_anew_unpacks_them(case: tuple[str, Path]) -> None:
    name, work = case
    label = PACKED_FORMATS[MODELS[name][0]].label
    setup, _ = prepared(work, "method=full")
    assert not any(place.packed_as for layout in setup.store.layouts for place in layout.places)
    setup, said = prepared(work, "load_in_fp8=true")
    assert {place.packed_as for layout in setup.store.layouts for place in layout.places} == {None, "fp8"}
    assert any(f"hold weights in {label}, which FP8 packs anew and changes by 2.6 %" in text for text in said)


def edit(work: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = work / "model" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def fp8_workspace(folder: Path, model_type: str = "llama", **sizes: Any) -> Path:
    model = publish(make_model(folder / "m", model_type, num_hidden_layers=2, **sizes), "fp8_blocks")
    return make_workspace(folder / "work", model, lora__dropout=0.0, **STAGES_OF_TWO)


DOWN = "model.layers.1.mlp.down_proj.weight"


def test_other_scales_and_blocks_that_do_not_meet_are_unpacked(tmp_path: Path) -> None:
    """A scale for all weights is that of each block; rows have no blocks, joined gates of 192 rows neither."""
    work = fp8_workspace(tmp_path / "dense")
    edit(work, lambda tensors: tensors.update({f"{DOWN}_scale_inv": torch.tensor(0.01)}))
    row_scales = {f"{DOWN.replace('down', 'up')}_scale_inv": torch.full((128, 1), 0.02)}
    edit(work, lambda tensors: tensors.update(row_scales))
    setup, said = prepared(work)
    whole, _ = prepared(work, "load_in_16bit=true")
    places = {place.name: place for layout in setup.store.layouts for place in layout.places}
    own = {kind: next(name for name in places if f"layers.1.mlp.{kind}_proj.base" in name) for kind in ("down", "up")}
    assert places[own["down"]].packed_as == "fp8_blocks" and places[own["up"]].packed_as is None
    assert all(torch.equal(setup.store.base_weight(name), whole.store.base_weight(name)) for name in own.values())
    assert any("1 weights are quantised in the files and dequantised" in text for text in said)
    work = fp8_workspace(tmp_path / "experts", "qwen3_moe", moe_intermediate_size=192, hidden_size=128)
    setup, _ = prepared(work)
    places = {place.name: place for layout in setup.store.layouts for place in layout.places}
    kinds = {name.rpartition(".")[2]: place.packed_as for name, place in places.items() if name.endswith("_proj")}
    assert kinds == {"gate_up_proj": None, "down_proj": "fp8_blocks"}


@pytest.mark.parametrize("size", [[64], 64, [0, 128], [128, "a"]])
def test_a_size_of_blocks_without_meaning_is_refused(tmp_path: Path, size: Any) -> None:
    work = fp8_workspace(tmp_path)
    settings = {"quant_method": "fp8", "weight_block_size": size}
    edit_json(work / "model" / "config.json", quantization_config=settings)
    with pytest.raises(RefusedError, match="weight_block_size"):
        prepared(work)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors[DOWN].view(torch.uint8)[3, 5].fill_(127), "is not finite"),
        (lambda tensors: tensors[f"{DOWN}_scale_inv"].fill_(float("nan")), "is not finite"),
        (lambda tensors: tensors[f"{DOWN}_scale_inv"].fill_(300.0), "overflows in float16"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    work = fp8_workspace(tmp_path)
    edit(work, change)
    with pytest.raises(RefusedError, match=said):
        prepared(work, "dtype=float16")


def test_large_weights_are_unpacked_only_where_scales_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed_weights.PackedWeight(
        torch.zeros(1, 32, 1, 16, dtype=torch.uint8), torch.full((1, 32, 1), 120, dtype=torch.uint8),
        torch.Size((1, 32, 32)), torch.bfloat16, "mxfp4",
    )  # fmt: skip
    monkeypatch.setattr(packed_weights, "dequantize", lambda *args: pytest.fail("unpacks"))
    weight.check_finite(torch.bfloat16, "a test")


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8_blocks"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8_blocks"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, None),
        ({"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"}, None),
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, None),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "4bit"),
        ({}, None),
    ],
)
def test_the_form_by_the_configuration(config: dict[str, Any], form: str | None) -> None:
    assert stored_as(config) == form


def test_home_machines_hold_what_is_published() -> None:
    """gpt-oss-120b on two cards: 2,331 tokens/s with weights changed by 4 bit, 430 unpacked, from the disk. Unpacking
    takes the time of reading 4.25 bits and writing 16 of each expert's weight, once a visit."""
    plan = make_plan(load_recipe("gpt-oss-120b"), "2x3090,host_memory_gib=96")
    assert plan.verdict.fits and not plan.question.reads_disk and plan.question.settings.packed_as == "mxfp4"
    assert plan.tokens_per_s >= 2200
    experts = 128 * 3 * 2880 * 2880
    visit_s = plan.question.costs.layers[1].visit_s
    assert visit_s == pytest.approx(experts * (4.25 / 8 + 2) / plan.question.gpus[0].memory_bytes_per_s, rel=0.01)
    sizes = {name: find_config(name).architecture().stored_as for name in ("Qwen/Qwen3-30B-A3B", PUBLISHED_IN_FP8)}
    assert sizes == {"Qwen/Qwen3-30B-A3B": None, PUBLISHED_IN_FP8: "fp8_blocks"}


PUBLISHED_IN_FP8 = "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8"
"""Its figures are those of the model without `Instruct-2507`."""
