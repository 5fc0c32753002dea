"""How often packed weights are unpacked: its time and its memory."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.cost import CostModel, LayerCost, share_out_visits
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.memory import device_need
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.training import TrainingSettings
from roundpipe_cli.model import packed_weights
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule, run
from roundpipe_cli.planning.verdict import stages_of_blocks
from roundpipe_cli.schedule.durations import equal_costs
from roundpipe_cli.schedule.timeline import busy_s
from tests.support.tiny import make_rig, random_microbatches

TWO_CARDS = parse_hardware("2x4090")
LARGE = TrainingSettings(max_seq_length=2048, packed_as="4bit")


def test_a_visit_is_shared_out_over_its_microbatches() -> None:
    block = LayerCost("block.0", 1.0, 2.0, recompute=True, visit_s=0.5)
    costs = CostModel("one", (block, LayerCost("head", 1.0, 2.0, recompute=False)))
    shared = share_out_visits(costs, 5).layers[0]
    assert (shared.forward_s, shared.recomputed_s, shared.backward_s, shared.visit_s) == (1.1, 1.0, 2.1, 0.0)


def test_the_plan_counts_time_and_memory_of_either_way() -> None:
    architecture, hardware = find_architecture("Qwen/Qwen3-32B"), parse_hardware("1x4090")
    each, once = (
        analytic_costs(architecture, replace(LARGE, unpacks_once=on), hardware).costs.layers[1] for on in (False, True)
    )
    block = architecture.blocks[0]
    unpack_s = block.params * (LARGE.packed_bytes_per_param + 2) / hardware.devices[0].memory_bytes_per_s
    assert each.forward_s - once.forward_s == pytest.approx(unpack_s)
    assert each.backward_s - once.backward_s == pytest.approx(unpack_s)
    assert (each.visit_s, each.whole_bytes) == (0, 0)
    assert once.visit_s == pytest.approx(unpack_s) and once.whole_bytes == 2 * block.params
    settings = replace(LARGE, unpacks_once=True)
    costs = analytic_costs(architecture, settings, hardware).costs
    sizes = [
        device_need(costs, architecture, settings, hardware, *stages_of_blocks(len(costs.layers), blocks))
        for blocks in (1, 3)
    ]
    counted = [sum(one.num_bytes for one in need.parts if "unpacked" in one.name) for need in sizes]
    assert counted == [2 * block.params, 6 * block.params]


def planned(architecture: Architecture, settings: TrainingSettings, cut: StageCut) -> tuple[float, int]:
    """Seconds that all workers of a step compute, and bytes that each needs."""
    costs = analytic_costs(architecture, settings, TWO_CARDS).costs
    timeline = run("roundpipe", cut, SimulationCase(costs, 2, settings.num_microbatches)).timeline
    need = device_need(costs, architecture, settings, TWO_CARDS, cut.forward_stages, cut.backward_stages)
    return sum(busy_s(timeline)), need.total_bytes


@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_an_engine_unpacks_as_often_and_holds_as_much_as_is_counted(
    recompute: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both ways, on devices that copy weights, in two rounds."""
    cut = StageCut(((0, 1), (2, 3), (4, 6)), ((7, 7), (5, 6), (3, 4), (0, 2)), 4)
    schedule = make_schedule("roundpipe", cut, SimulationCase(equal_costs(8), 2, 8))
    changes: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 512}
    make_rig("llama", "lora", **changes).skeleton.config.save_pretrained(tmp_path)
    architecture = find_architecture(str(tmp_path), tmp_path)
    settings = TrainingSettings(max_seq_length=8, dtype="float32", packed_as="4bit", lora_r=4, recompute=recompute)
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
            result = engine.run_step(random_microbatches([(1, 8)] * 8), schedule, step=0)
            monkeypatch.setattr(packed_weights, "dequantize", dequantize)
        peaks[once] = max(result.device_peak_bytes)
        block = sum(place.num_elements for place in rig.store.layouts[1].places if place.packed_as)
        counts[once] = sum(done) / block, (busy - without_s) / unpack_s
    assert counts[True] == (2 * 2 * 6, pytest.approx(2 * 2 * 6)), "rounds, forward and backward, blocks"
    assert counts[False][1] == pytest.approx(3 * 8 * 6), "forward, recompute and backward, microbatches, blocks"
    # The first block's input has no gradient, for which three of its weights are not needed.
    assert counts[False][0] == pytest.approx(counts[False][1], rel=0.01)
    assert needs[True] - needs[False] == pytest.approx(peaks[True] - peaks[False], rel=0.15)
