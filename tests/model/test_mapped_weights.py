"""Weights mapped from a file: the same bits, nothing left behind, and a plan that counts disk in place of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roundpipe_cli.engine.weights import mapped_buffers
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning import choose
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.question import ask
from roundpipe_cli.planning.run_plan import check_fits
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe
from tests.support.e2e import STAGES, finetune, make_model, make_workspace, numbers


def test_a_run_on_mapped_weights_gives_the_same_numbers(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "w", make_model(tmp_path / "model"), max_steps=2, **STAGES)
    finetune(folder).expect(0)
    mapped = finetune(folder, "weights=mmap", "output_dir=mapped").expect(0)
    assert "are mapped from a file in mapped" in mapped.err + mapped.out
    assert numbers(folder / "out") == numbers(folder / "mapped")
    assert {path.name for path in (folder / "out").iterdir()} == {path.name for path in (folder / "mapped").iterdir()}
    with pytest.raises(RefusedError, match="weights") as refused:
        load_recipe(folder / "recipe.yaml", ["weights=mmap", "method=full"])
    assert "weights=mmap" in str(refused.value) and "method: full" in str(refused.value)


def test_buffers_are_separate_aligned_and_on_no_named_file(tmp_path: Path) -> None:
    buffers = mapped_buffers(tmp_path, [5000, 0, 4096, 1])
    assert [len(buffer) for buffer in buffers] == [5000, 0, 4096, 1]
    for value, buffer in enumerate(buffers):
        buffer.fill_(value + 1)
        assert buffer.numel() == 0 or buffer.data_ptr() % 4096 == 0
    assert all(torch.equal(buffer, torch.full_like(buffer, value + 1)) for value, buffer in enumerate(buffers))
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError):
        mapped_buffers(tmp_path / "missing", [1])


def load(folder: Path, *overrides: str) -> LoadedRecipe:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    recipe = folder / "recipe.yaml"
    recipe.write_text("model: Qwen/Qwen3-32B\ndatasets: [{path: rows.jsonl}]\n")
    return load_recipe(recipe, [f"output_dir={folder / 'out'}", *overrides])


def test_the_plan_maps_weights_where_host_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # even cuts: which are best is not asked here
    machine = "2x4090,host_memory_gib="
    enough, short = make_plan(load(tmp_path), machine + "128"), make_plan(load(tmp_path), machine + "32")
    assert enough.verdict.fits and short.verdict.fits
    assert not enough.question.settings.weights_on_disk and short.question.settings.weights_on_disk
    assert short.verdict.host.total_bytes < 20e9 and short.verdict.disk.total_bytes > 60e9
    assert short.step_s > 3 * enough.step_s, "the disk is the link"
    assert any("mapped from disk and read anew" in line for line in short.assumptions)
    assert any("at 1 GB/s (`--hardware ...,disk_gb_per_s=` corrects it)" in line for line in short.assumptions)
    fast = make_plan(load(tmp_path), machine + "32,disk_gb_per_s=7")
    assert any("at 7 GB/s" in line for line in fast.assumptions)
    assert short.step_s / 8 < fast.step_s < short.step_s / 2, "and the step by about as much shorter"
    pinned = make_plan(load(tmp_path, "weights=pageable"), machine + "32")
    assert not pinned.verdict.fits and "host memory" in pinned.verdict.reasons[0]
    asked = ask(load(tmp_path, "weights=mmap"), machine + "128")
    assert any("stay in memory" in note for note in asked.hardware.notes)
    assert asked.analytic.costs.link_bytes_per_s == ask(load(tmp_path), machine + "128").analytic.costs.link_bytes_per_s


def test_full_fine_tuning_is_never_mapped(tmp_path: Path) -> None:
    answer = make_plan(load(tmp_path, "method=full"), "2x4090,host_memory_gib=64")
    assert not answer.verdict.fits and not answer.question.settings.weights_on_disk
    check_fits(ask(load(tmp_path, "model=HuggingFaceTB/SmolLM2-135M-Instruct", "pipeline.devices=[cpu]"), here=True))
