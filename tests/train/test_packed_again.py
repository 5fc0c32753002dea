"""A merge into a packed base keeps its form: what no adapter touches to the byte, the rest within a step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

from roundpipe_cli.files import write_new_file
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.stored.formats import find_stored
from roundpipe_cli.model.stored.tensors import OpenFiles
from roundpipe_cli.train.checkpoint.writing import TensorSpec, stream_file
from roundpipe_cli.train.result import packed_again
from roundpipe_cli.train.result.export import merge_result
from roundpipe_cli.train.result.packed_again import CODES, Rounding, can_pack, pack_again
from tests.model.test_stored_formats import FORMATS, save_mxfp4, save_quantized
from tests.support.adapters import ADAPTER, layout, load_whole, random_adapter
from tests.support.e2e import make_model, make_tokenizer, run
from tests.support.tiny import logits_of

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


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
        ("qwen3_moe", "fp8-blocks", {"target_modules": ["v_proj"], "target_parameters": EXPERTS}),
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
    gpt_oss(tmp_path, target_modules=["q_proj"], target_parameters=EXPERTS)
    told = check(tmp_path, "q_proj experts.gate_up_proj experts.down_proj")
    assert re.search(r"; (9\d|10\d)% of the change is there", told), told
    unpacking = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    base, packed = (logits_of(load_whole(tmp_path / name, **unpacking)) for name in ("base", "merged-None"))
    whole = logits_of(load_whole(tmp_path / "merged-float32"))
    assert float((packed - whole).norm()) < 0.5 * float((base - whole).norm()), "the adapter is in it"


def test_what_an_adapter_leaves_alone_keeps_its_bits(tmp_path: Path) -> None:
    """Within a matrix too: rows whose change is zero have the codes and scales that were published."""
    gpt_oss(tmp_path, target_modules=[], target_parameters=EXPERTS[1:])
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


def packed(
    folder: Path, name: str, change: Any
) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor], Rounding]:
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
    gpt_oss(tmp_path, target_modules=["q_proj"], target_parameters=EXPERTS)
    words = ("export", "adapter", "--base", "base", "--merge", "--to")
    done = run(tmp_path, *words, "same", "--json").expect(0)
    found = json.loads(done.out)["rounding"]
    off = f"a changed weight is off by {found['mean']:.2g} on average, {found['largest']:.2g} at most"
    assert " in 1 file, with about " in done.err and f"packed again as published: {off}; " in done.err
    assert found["weights"] > 1000 and 0 < found["mean"] < found["largest"] and 0.9 < found["change_kept"] < 1.1
    done = run(tmp_path, *words, "whole", "--dtype", "bfloat16", "--json").expect(0)
    assert "whole here" in done.err and "packed again" not in done.err and json.loads(done.out)["rounding"] == {}
