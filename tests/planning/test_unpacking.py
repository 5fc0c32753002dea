"""How often packed weights are unpacked: the decision, its time, its memory, and that a run does what `plan` says."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.costs import analytic
from roundpipe_cli.costs.analytic import analytic_costs, case_of
from roundpipe_cli.costs.cost import CostModel, LayerCost, share_out_visits
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import Hardware, parse_hardware
from roundpipe_cli.costs.memory import DEVICE_SHARE, device_need
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.model.stored import packed_weights
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule, run
from roundpipe_cli.planning.question import ask
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.planning.unpacking import choose_unpacking
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.actions import equal_costs
from roundpipe_cli.schedule.timeline import busy_s
from roundpipe_cli.train.prepare.setup import decide_unpacking
from tests.support.covering import swept
from tests.support.tiny import make_rig, random_microbatches

TWO_CARDS = parse_hardware("2x4090")
LARGE = TrainingSettings(max_seq_length=2048, packed_as="4bit")


def recipe(tmp_path: Path, *words: str, model: str = "Qwen/Qwen3-8B") -> LoadedRecipe:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    text = f"model: {model}\nload_in_4bit: true\noutput_dir: {tmp_path}\ndatasets: [{{path: rows.jsonl}}]\n"
    (tmp_path / "recipe.yaml").write_text(text + "gradient_accumulation_steps: 16\nmax_seq_length: 2048\n")
    return load_recipe(tmp_path / "recipe.yaml", list(words))


def chosen(architecture: Architecture, settings: TrainingSettings, hardware: Hardware, pipeline: Any) -> Any:
    """The decision; the costs beside it are those of the settings with it."""
    found, case = choose_unpacking(case_of(architecture, settings, hardware), pipeline)
    once = found is not None and found.once
    assert case == case_of(architecture, replace(settings, unpacks_once=once), hardware)
    return found


@pytest.mark.parametrize(("packed_as", "label"), [("4bit", "4-bit"), ("8bit", "8-bit"), ("fp8", "FP8")])
def test_once_per_visit_where_memory_allows(packed_as: Any, label: str) -> None:
    architecture, hardware = find_architecture("Qwen/Qwen3-32B"), parse_hardware("1x4090")
    settings = replace(LARGE, packed_as=packed_as)
    found = chosen(architecture, settings, hardware, PipelineConfig())
    assert found is not None and found.once
    assert found.describe() == f"{label} weights are unpacked once per visit of a stage"
    assert chosen(architecture, replace(settings, packed_as=None), hardware, PipelineConfig()) is None


def test_a_card_with_too_little_memory_falls_back() -> None:
    architecture, pipeline = find_architecture("Qwen/Qwen3-32B"), PipelineConfig()
    hardware = parse_hardware("1x4090")
    tried = replace(LARGE, unpacks_once=True)
    case = case_of(architecture, tried, hardware)
    need = device_need(case, *even_cut(len(case.costs.layers), 1, 1)).total_bytes

    def on(memory_bytes: int) -> Any:
        (card,) = hardware.devices
        small = replace(hardware, devices=(replace(card, memory_bytes=memory_bytes),))
        return chosen(architecture, LARGE, small, pipeline)

    assert on(int(need / DEVICE_SHARE) + 2).once
    short = on(int((need - 3 * 2**29) / DEVICE_SHARE) + 2)
    assert not short.once
    line = "4-bit weights are unpacked for each microbatch and pass, for lack of 1.5 GiB of GPU memory"
    assert short.describe() == line


def test_stages_that_the_recipe_gives_decide(tmp_path: Path) -> None:
    stages = "[[0, 32], [33, 36]]", "[[37, 37], [0, 36]]"
    given = [f"pipeline.{name}_stages={text}" for name, text in zip(("forward", "backward"), stages, strict=True)]
    question = ask(recipe(tmp_path, *given), "1x4090")
    assert question.unpacking is not None and not question.unpacking.once and question.unpacking.lacking
    assert not question.settings.unpacks_once


def test_a_visit_is_shared_out_over_its_microbatches() -> None:
    block, head = LayerCost("block.0", 1.0, 2.0, True, visit_s=0.5), LayerCost("head", 1.0, 2.0, False)
    shared = share_out_visits(CostModel("one", (block, head)), 5).layers[0]
    assert (shared.forward_s, shared.recomputed_s, shared.backward_s, shared.visit_s) == (1.1, 1.0, 2.1, 0.0)


def test_the_plan_counts_time_and_memory_of_either_way() -> None:
    model, hardware = find_architecture("Qwen/Qwen3-32B"), parse_hardware("1x4090")
    each, once = (analytic_costs(model, replace(LARGE, unpacks_once=on), hardware).layers[1] for on in (False, True))
    block = model.blocks[0]
    unpack_s = block.params * (LARGE.packed_bytes_per_param + 2) / hardware.devices[0].memory_bytes_per_s
    assert each.forward_s - once.forward_s == pytest.approx(unpack_s)
    assert each.backward_s - once.backward_s == pytest.approx(unpack_s)
    assert (each.visit_s, each.whole_bytes) == (0, 0)
    assert once.visit_s == pytest.approx(unpack_s) and once.whole_bytes == 2 * block.params
    case = case_of(model, replace(LARGE, unpacks_once=True), hardware)
    sizes = [device_need(case, *even_cut(len(case.costs.layers), blocks, blocks)) for blocks in (1, 3)]
    counted = [sum(size for name, size in need.parts.items() if "unpacked" in name) for need in sizes]
    assert counted == [2 * block.params, 6 * block.params]


def test_a_run_does_what_the_plan_says(tmp_path: Path) -> None:
    config = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "num_hidden_layers": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = recipe(tmp_path, "pipeline.devices=[cpu, cpu]", model=str(tmp_path))
    planned = ask(loaded).unpacking
    told: list[Any] = []
    assert planned is not None and decide_unpacking(loaded, "4bit", told.append) == planned.once
    assert [notice.text for notice in told] == [planned.describe()]
    assert not decide_unpacking(loaded, None, told.append) and len(told) == 1


def planned(architecture: Architecture, settings: TrainingSettings, cut: StageCut) -> tuple[float, int]:
    """Seconds that all workers of a step compute, and bytes that each needs."""
    case = case_of(architecture, settings, TWO_CARDS)
    timeline = run("roundpipe", cut, SimulationCase(case.costs, 2, settings.num_microbatches)).timeline
    need = device_need(case, cut.forward_stages, cut.backward_stages)
    return sum(busy_s(timeline)), need.total_bytes


@pytest.mark.parametrize("recompute", ["stage", *swept(["layer"])])
def test_an_engine_unpacks_as_often_and_holds_as_much_as_is_counted(
    recompute: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analytic, "ISSUED_PER_S", ((1.0, math.inf),))  # else Python binds such small blocks
    cut = StageCut(((0, 1), (2, 3), (4, 6)), ((7, 7), (5, 6), (3, 4), (0, 2)), 2)
    schedule = make_schedule("roundpipe", cut, SimulationCase(equal_costs(8), 2, 4))
    changes: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 512}
    make_rig("llama", "lora", **changes).skeleton.config.save_pretrained(tmp_path)
    architecture = find_architecture(str(tmp_path), tmp_path)
    settings = TrainingSettings(
        max_seq_length=8, num_microbatches=4, dtype="float32", packed_as="4bit", lora_r=4, recompute=recompute
    )
    unpack_s = architecture.blocks[0].params * settings.unpacking_bytes_per_param
    unpack_s /= TWO_CARDS.devices[0].memory_bytes_per_s
    without_s, _ = planned(architecture, replace(settings, packed_as=None), cut)
    dequantize, done, lock = packed_weights.dequantize, list[int](), threading.Lock()

    def counted(packed: torch.Tensor, shape: torch.Size, *args: Any) -> torch.Tensor:
        with lock:
            done.append(shape.numel())
        return dequantize(packed, shape, *args)

    counts, needs, peaks = {}, {}, {}
    for once in (False, True):
        rig = make_rig("llama", "lora", packed_as="4bit", **changes)
        busy, needs[once] = planned(architecture, replace(settings, unpacks_once=once), cut)
        done.clear()
        with rig.engine(2, copy=True, count_bytes=True, recompute=recompute, whole_per_visit=once) as engine:
            monkeypatch.setattr(packed_weights, "dequantize", counted)
            result = engine.run_step(random_microbatches([(1, 8)] * 4), schedule, step=0)
            monkeypatch.setattr(packed_weights, "dequantize", dequantize)
        peaks[once] = max(result.device_peak_bytes)
        block = sum(place.num_elements for place in rig.store.layouts[1].places if place.packed_as)
        counts[once] = sum(done) / block, (busy - without_s) / unpack_s
    assert counts[True] == (2 * 2 * 6, pytest.approx(2 * 2 * 6)), "rounds, forward and backward, blocks"
    assert counts[False][1] == pytest.approx(3 * 4 * 6), "forward, recompute and backward, microbatches, blocks"
    # The first block's input has no gradient, for which three of its weights are not needed.
    assert counts[False][0] == pytest.approx(counts[False][1], rel=0.01)
    assert needs[True] - needs[False] == pytest.approx(peaks[True] - peaks[False], rel=0.15)
