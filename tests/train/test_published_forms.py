"""Models published in MXFP4 or FP8: trained packed as unpacked ones are, to the bit, and merged into their own form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.costs.find_model import find_config
from roundpipe_cli.costs.memory import frozen_bytes, loading_need
from roundpipe_cli.costs.models import stored_as
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event, Notice
from roundpipe_cli.files import write_new_file
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.stored import packed_weights
from roundpipe_cli.model.stored.formats import find_stored
from roundpipe_cli.model.stored.tensors import OpenFiles
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.question import settings_of
from roundpipe_cli.recipe.load import load_recipe, load_text
from roundpipe_cli.train.checkpoint.writing import TensorSpec, stream_file
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.result import packed_again
from roundpipe_cli.train.result.export import merge_result
from roundpipe_cli.train.result.packed_again import CODES, Rounding, can_pack, pack_again
from tests.model.test_stored_formats import FORMATS, save_mxfp4, save_quantized
from tests.support.adapters import ADAPTER, layout, load_whole, random_adapter
from tests.support.e2e import (
    STAGES_OF_TWO,
    edit_json,
    finetune,
    make_model,
    make_tokenizer,
    make_workspace,
    metrics,
    run,
)
from tests.support.published import publish
from tests.support.tiny import logits_of

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


def test_keys_that_contradict() -> None:
    with pytest.raises(RefusedError, match="cannot be in 16 bit and in 4 bit"):
        load_text("model: m\ndatasets: [{path: r.jsonl}]\nload_in_16bit: true\nload_in_4bit: true\n", "r.yaml")


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
    """gpt-oss-120b: 430 tokens/s unpacked. A visit reads 4.25 bits and writes 16 of each weight of an expert."""
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


# --- a merge into a packed base: what no adapter touches to the byte, the rest within a step --------------------------

FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(autouse=True)
def few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny matrices are packed in several parts, as large ones are."""
    monkeypatch.setattr(packed_again, "WEIGHTS_AT_ONCE", 1 << 11)


@pytest.mark.parametrize(
    ("rows", "scales", "block", "expected"),
    [(300, 3, 128, [128, 128, 44]), (60, 60, 128, [8] * 7 + [4]), (96, 2, 128, [48, 48]), (300, 1, 128, [300])],
    ids=["blocks", "rows", "even parts", "one for all"],
)
def test_rows_of_a_scale_stay_together(rows: int, scales: int, block: int, expected: list[int]) -> None:
    whole = torch.arange(rows), torch.arange(scales)
    parts = list(packed_again._in_rows((*whole, *whole), 256, block))
    assert [len(part[0]) for part in parts] == expected
    assert all(torch.equal(torch.cat(list(part)), whole[n % 2]) for n, part in enumerate(zip(*parts, strict=True)))


def test_a_tensor_is_free_before_the_next_is_made(tmp_path: Path) -> None:
    """What was written stayed in memory beside what came next: a third of a merge's peak."""
    specs, made = [TensorSpec(name, torch.float32, (5, 7)) for name in "abc"], list[StorageWeakRef]()

    def tensors() -> Any:
        for spec in specs:
            assert all(one.expired() for one in made)
            tensor = torch.ones(spec.shape)
            made.append(StorageWeakRef(tensor.untyped_storage()))
            yield spec.name, tensor
            del tensor

    write_new_file(tmp_path / "file", stream_file(specs, tensors()))
    assert len(made) == 3 and load_file(tmp_path / "file").keys() == set("abc")


def merged(work: Path, dtype: str | None) -> tuple[dict[str, torch.Tensor], str]:
    """The weights of a merge by name, unpacked to float32, and what was told."""
    told, folder = list[str](), work / f"merged-{dtype}"
    merge_result(work / "adapter", ModelSource("base", work / "base"), folder, dtype, tell=told.append)
    with OpenFiles() as files:
        found = {name: one.read(files).float() for name, one in find_stored(folder, torch.float32).items()}
        return {name: one.clone() for name, one in found.items()}, "\n".join(told)


def bytes_of(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "model.safetensors")
    return {name: one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, one in tensors.items()}


def check(work: Path, changed: str) -> str:
    """Merge in the base's form and whole: names, shapes and types are the base's, weights of the layers `changed` are
    one of the two codes around the whole ones, all others have their bytes. Returns what was told."""
    found, told = merged(work, None)
    whole, _ = merged(work, "float32")
    assert layout(work / "merged-None") == layout(work / "base")
    before, after = bytes_of(work / "base"), bytes_of(work / "merged-None")
    different = {name for name in before if before[name] != after[name]}
    assert different and all(any(part in name for part in changed.split()) for name in different)
    configs = [json.loads((work / name / "config.json").read_text()) for name in ("base", "merged-None")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert "quantization_config" not in json.loads((work / "merged-float32" / "config.json").read_text())
    assert configs[0]["dtype"] == configs[1]["dtype"] == "bfloat16"
    num_packed = 0
    with OpenFiles() as files:
        for name, stored in find_stored(work / "merged-None", torch.float32).items():
            if not stored.is_quantized or not any(part in name for part in changed.split()):
                assert torch.equal(found[name], whole[name].to(stored.dtype).float()), name
                continue
            num_packed += 1
            parts = {role: files.tensor(one) for role, one in stored.pieces.items()}
            assert bool(((found[name] - whole[name]).abs() <= steps_of(stored, parts, whole[name])).all()), name
    assert num_packed and "packed again as published" in told and "whole here" not in told
    return told


def steps_of(stored: Any, parts: dict[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """The distance between the two codes around each value, by the formats' own definition."""
    codes, scales = parts.values()
    ones = torch.ones(codes.shape).to(codes.dtype) if codes.is_floating_point() else torch.full_like(codes, 0x22)
    scale = stored.unpack(dict(zip(parts, (ones, scales), strict=True)), torch.float32)
    scale = scale.T if stored.is_turned else scale
    mantissa, least = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}.get(codes.dtype, (1, 0))
    exponent = torch.log2((values / scale).abs().clamp(min=2.0**least)).floor()
    return scale * 2 ** (exponent - mantissa) * (1 + 1e-4)


@pytest.mark.parametrize(
    ("model_type", "name", "options"),
    [
        *(("llama", name, {"target_modules": ["v_proj", "down_proj"]}) for name in FORMATS),
        ("llama", "fp8-blocks", {"target_modules": ["v_proj", "down_proj"], "use_dora": True}),
        ("qwen3_moe", "fp8-blocks", {"target_modules": ["v_proj"], "target_parameters": FUSED}),
    ],
)
def test_fp8_stays_fp8(tmp_path: Path, model_type: str, name: str, options: dict[str, Any]) -> None:
    """Scales for all, for rows and for blocks, that end within the matrix; experts that are a tensor each."""
    random_adapter(make_model(tmp_path / "plain", model_type, vocab_size=128), tmp_path / "adapter", **options)
    save_quantized(tmp_path / "base", model_type, name)
    make_tokenizer().save_pretrained(tmp_path / "base")
    check(tmp_path, "v_proj down_proj" if model_type == "llama" else "v_proj experts")


def gpt_oss(work: Path, **options: Any) -> None:
    random_adapter(make_model(work / "plain", "gpt_oss", vocab_size=128), work / "adapter", **options)
    save_mxfp4(work / "base")
    make_tokenizer().save_pretrained(work / "base")


def test_mxfp4_stays_mxfp4_and_loads_in_transformers(tmp_path: Path) -> None:
    """One expert is in memory at a time; logits as of the whole merge, but for the rounding."""
    gpt_oss(tmp_path, target_modules=["q_proj"], target_parameters=FUSED)
    told = check(tmp_path, "q_proj experts.gate_up_proj experts.down_proj")
    assert re.search(r"; (9\d|10\d)% of the change is there", told), told
    unpacking = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    base, packed = (logits_of(load_whole(tmp_path / name, **unpacking)) for name in ("base", "merged-None"))
    whole = logits_of(load_whole(tmp_path / "merged-float32"))
    assert float((packed - whole).norm()) < 0.5 * float((base - whole).norm()), "the adapter is in it"


def test_what_an_adapter_leaves_alone_keeps_its_bits(tmp_path: Path) -> None:
    """Within a matrix too: rows whose change is zero have the codes and scales that were published."""
    gpt_oss(tmp_path, target_modules=[], target_parameters=FUSED[1:])
    path = tmp_path / "adapter" / ADAPTER
    tensors = {
        name: one * (torch.arange(len(one)) == 5)[:, None] if "lora_B" in name else one
        for name, one in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    merged(tmp_path, None)
    base, made = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged-None"))
    for part in ("blocks", "scales"):
        before, after = (one[f"model.layers.0.mlp.experts.down_proj_{part}"] for one in (base, made))
        rows = (before != after).flatten(2).any(2).any(0)
        assert set(rows.nonzero().flatten().tolist()) <= {5} and (part == "scales" or rows[5])


def packed(folder: Path, name: str, change: Any) -> tuple[Any, dict[str, torch.Tensor], Any, Rounding]:
    """A weight with its tensors, as published and packed again after a change."""
    save_quantized(folder, "llama", name)
    weight = find_stored(folder, torch.float32)["model.layers.0.mlp.up_proj.weight"]
    assert can_pack(weight)
    with OpenFiles() as files:
        parts = {role: files.tensor(one).clone() for role, one in weight.pieces.items()}
    rounding = Rounding()
    return weight, parts, pack_again(weight, parts, change, rounding), rounding


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-e5m2"])
def test_a_scale_grows_with_its_block(tmp_path: Path, name: str) -> None:
    """A thousand times the weights: scales are doubled as often as that needs."""
    weight, parts, made, rounding = packed(tmp_path, name, lambda number, rows, base: base * 1000)
    values, expected = (weight.unpack(one, torch.float32) * times for one, times in ((made, 1), (parts, 1000)))
    assert bool(((values - expected).abs() <= steps_of(weight, made, expected)).all())
    grown = torch.log2(made["scale"] / parts["scale"])
    assert torch.equal(grown, grown.round()) and (name == "fp8-e5m2" or bool((grown > 0).all()))
    assert float(made["codes"].float().abs().max()) <= CODES[made["codes"].dtype][0]
    assert rounding.count == expected.numel() and rounding.largest == float((values - expected).abs().max())


def test_the_least_scale_of_a_block_of_zeros_grows_as_far_as_its_new_weights() -> None:
    scales, merged = torch.zeros(1, 1, dtype=torch.uint8), torch.full((1, 32), 0.012)
    grown = packed_again._grown(scales, torch.zeros(1, 32, dtype=torch.int64), merged, 7.0)
    assert 3.5 < 0.012 / float(packed_again._as_floats(grown)) <= 7


def test_a_change_of_less_than_half_a_step_is_not_lost(tmp_path: Path) -> None:
    """Nearest codes would all be those of the base: the merged model would be the base."""
    generator = torch.Generator().manual_seed(7)
    _, parts, made, rounding = packed(
        tmp_path,
        "fp8-blocks",
        lambda number, rows, base: base * (1 + 0.02 * torch.rand(base.shape, generator=generator)),
    )
    same = (made["codes"].float() == parts["codes"].float()).float().mean()
    assert torch.equal(made["scale"], parts["scale"]) and 0.7 < float(same) < 0.95
    assert re.search(r"; (9\d|10\d)% of the change is there", str(rounding)), str(rounding)


def test_export_says_what_it_writes_and_what_packing_changed(tmp_path: Path) -> None:
    gpt_oss(tmp_path, target_modules=["q_proj"], target_parameters=FUSED)
    words = ("export", "adapter", "--base", "base", "--merge", "--to")
    done = run(tmp_path, *words, "same", "--json").expect(0)
    found = json.loads(done.out)["rounding"]
    off = f"a changed weight is off by {found['mean']:.2g} on average, {found['largest']:.2g} at most"
    assert " in 1 file, with about " in done.err and f"packed again as published: {off}; " in done.err
    assert found["weights"] > 1000 and 0 < found["mean"] < found["largest"] and 0.9 < found["change_kept"] < 1.1
    done = run(tmp_path, *words, "whole", "--dtype", "bfloat16", "--json").expect(0)
    assert "whole here" in done.err and "packed again" not in done.err and json.loads(done.out)["rounding"] == {}
