"""What autograd keeps of a block: measured on a few tokens, true for longer microbatches, and what a run's stages are
cut by."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from roundpipe_cli.costs.analytic import activation_bytes
from roundpipe_cli.costs.memory import DEVICE_SHARE
from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.engine.probe import Probe
from roundpipe_cli.engine.rough_costs import ASSUMED_FLOPS, AssumedDevice, LayerSizes, rough_costs
from roundpipe_cli.model.fused import FusedOps, find_fused_ops
from roundpipe_cli.model.worker_model import SavedBytes, saved_sizes
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.train.auto_cache import modelled_bytes
from tests.engine.test_engine_memory import saved_bytes_per_block
from tests.support.covering import swept
from tests.support.tiny import EXTRA, Rig, gpu_costs, make_rig, random_microbatches

LONG = {"max_position_embeddings": 1024}
"""Tokens a sequence, of models whose window or scores count."""
ROWS, TOKENS = 3, 320
SHARED_TOKENS = 0.04
"""Position embeddings and masks, which all blocks are called with: the plain count has them in each block."""


def window(model_type: str, tokens: int) -> dict[str, int]:
    return {"sliding_window": tokens} if "sliding_window" in EXTRA.get(model_type, {}) else {}


def saved_bytes(rig: Rig, fused: FusedOps | None = None, **how: Any) -> list[SavedBytes]:
    """What the probe of a run finds."""
    found = Probe(rig.skeleton, rig.split, rig.store, fused).find_saved_bytes(**how)
    assert found is not None
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", "gpt2", "bloom", "gemma2"])
def test_longer_microbatches_keep_what_short_ones_foretell(model_type: str, method: str) -> None:
    changes = {} if model_type == "bloom" else {**LONG, **window(model_type, 4096)}
    rig = make_rig(model_type, method, **changes)
    rig.plain.get_input_embeddings().requires_grad_(True)  # type: ignore[operator]  # the first block's input too
    expected = saved_bytes_per_block(rig, random_microbatches([(ROWS, TOKENS)], vocab=128)[0])
    for one, true_bytes in zip(saved_bytes(rig), expected, strict=True):
        assert true_bytes * (1 - SHARED_TOKENS) <= one.of(ROWS, TOKENS, TOKENS) <= true_bytes * 1.02
        assert (one.per_pair > 0) == (model_type in ("bloom", "gemma2")), "scores are kept"


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", *swept(["llama", "qwen3_moe"])])
def test_a_few_tokens_are_enough(model_type: str) -> None:
    rig = make_rig(model_type, "lora", **LONG, **window(model_type, 4096))
    few, many = saved_bytes(rig, longest=33), saved_bytes(rig, longest=512)
    assert len(few) == rig.num_layers - 2
    for one, other in zip(few, many, strict=True):
        assert 0.95 <= one.of(1, 1000, 1000) / other.of(1, 1000, 1000) <= 1.1  # eight keys for a sink, beside 16


def test_scores_are_told_from_the_rest() -> None:
    def keeps(tokens: int) -> list[int]:
        return [700 * tokens, 5 * tokens**2, 12345]

    found = SavedBytes.of_lengths(keeps(128), keeps(256), 128)
    assert (found.fixed, found.per_token, found.per_pair) == (12345, 700, 5)
    assert found.of(1, 1000, 1000) == sum(keeps(1000))
    assert found.of(1, 250, 1000) == 12345 + 250 * 700 + 5 * 250 * 1000, "a chunk attends to the whole sequence"


def test_other_tensors_at_another_length() -> None:
    """A loop over pieces of a sequence: only the sums are known, and what does not grow counts as if it did."""
    found = SavedBytes.of_lengths([100 * 64], [100 * 64, 100 * 64], 64)
    assert (found.fixed, found.per_token, found.per_pair) == (0, 100, 0)
    found = SavedBytes.of_lengths([128 * 700 + 5 * 128**2], [256 * 700, 5 * 256**2], 128)
    assert (found.per_token, found.per_pair) == (700, 5)
    found = SavedBytes.of_lengths([128 * 700 + 12800], [256 * 700, 12800], 128)
    assert (found.per_token, found.per_pair) == (800, 0)


def test_weights_and_arguments_are_not_counted_and_views_once() -> None:
    weight, mask = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    leaf = torch.randn(4, 8, requires_grad=True)

    def run() -> torch.Tensor:
        made = leaf @ weight  # keeps its input and the weight
        return (made[:2] * made[2:]).sum() + (made * mask).sum()  # keeps two views of one result, and the mask

    assert sum(saved_sizes(run, [weight, mask])) == 2 * 4 * 8 * 4
    assert sum(saved_sizes(run, [])) == 2 * 4 * 8 * 4 + 8 * 8 * 4 + 4 * 8 * 4


def test_packed_rows_have_masks_and_chunks_of_feed_forward_parts_keep_their_inputs_only() -> None:
    rig = make_rig("llama", "lora", **LONG)
    whole, packed, chunked = (
        saved_bytes(rig)[0],
        saved_bytes(rig, packed=True)[0],
        saved_bytes(rig, mlp_chunk_tokens=16)[0],
    )
    assert whole.per_pair == 0 < packed.per_pair
    products = 4 * 128 * 4  # gate, its activation, up and their product, in float32
    assert 0 < whole.per_token - chunked.per_token - products < 0.1 * products


def test_short_sequences_are_all_that_some_models_take() -> None:
    rig = make_rig("gpt2", "lora", max_position_embeddings=32)
    with pytest.raises(IndexError):
        saved_bytes(rig)
    found = saved_bytes(rig, longest=32)
    true_bytes = saved_bytes_per_block(rig, random_microbatches([(2, 32)], vocab=128)[0])[1]
    assert found[1].of(2, 32, 32) == pytest.approx(true_bytes, rel=0.02)


def test_a_processor_that_cannot_run_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, fails = make_rig("llama", "lora"), Mock(side_effect=RuntimeError('"addmm_impl_cpu_" not implemented'))
    monkeypatch.setattr(torch.nn.functional, "linear", fails)
    assert Probe(rig.skeleton, rig.split, rig.store).find_saved_bytes() is None


# --- stages ----------------------------------------------------------------------------------------------------------


def test_a_run_s_stages_fill_the_device_but_for_the_share_that_nobody_knows() -> None:
    """One worker, which recomputes the less the more blocks are in the head's stage."""
    rig, shared = make_rig("llama", "lora", num_hidden_layers=12), 50_000
    sizes = []
    for memory in (800_000, 1_600_000, 3_200_000, 10_000_000):
        planner = AdaptivePlanner(gpu_costs(rig, memory), 1, PipelineConfig(), shared_bytes=shared)
        planner.measured = True
        schedule = planner.schedule(4)
        needed = modelled_bytes(planner.costs, schedule.forward_stages, schedule.backward_stages)
        needed -= 4 * planner.costs.layers[1].boundary_bytes  # which are among the shared ones
        assert needed + shared <= DEVICE_SHARE * memory
        sizes.append(schedule.backward_stages[0][1] - schedule.backward_stages[0][0])
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] < sizes[-1], sizes


# --- plan ------------------------------------------------------------------------------------------------------------

FORETOLD = [
    *("qwen3", "gemma2", "gpt_oss", "mixtral", "phi3", "olmo2", "gpt_neox", "starcoder2", "qwen2_moe", "codegen"),
    *swept(["llama", "qwen2", "gemma", "gemma3_text", "mistral", "qwen3_moe"]),  # as another one above
    *swept(["smollm3", "granite", "glm4", "hunyuan_v1_dense", "gpt2", "gptj", "phi"]),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model_type", FORETOLD)
def test_plan_foretells_what_is_measured(model_type: str, method: str) -> None:
    """Of widths and lengths where the rest is small beside what the model of memory knows."""
    width = 1024 if model_type in ("codegen", "gpt2", "gptj") else 512  # theirs is four times the hidden one
    wide = {"hidden_size": 256, "intermediate_size": width, "head_dim": 64, **LONG}
    rig = make_rig(model_type, method, **wide, **window(model_type, 64))
    config: Any = rig.plain.config
    architecture = parse_config(config.to_dict(), name="tiny", source="tests")
    settings = TrainingSettings(max_seq_length=512, method=method, dtype="float32", lora_r=4)
    for fused in (None, find_fused_ops(rig.skeleton, rig.split)):
        found = saved_bytes(rig, fused)
        assert len(found) == len(architecture.blocks) > 0
        for index, block in enumerate(architecture.blocks):
            told = activation_bytes(architecture, block, replace(settings, fused=fused is not None))
            measured = found[index].of(1, 512, 512)
            assert 0.85 * measured <= told <= 1.3 * measured, (index, fused is not None, told / measured)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_rough_costs_by_hand(method: str) -> None:
    """Of a block, the embedding and the head, before anything is measured."""
    rig = make_rig("llama", method)
    layouts, tokens = rig.store.layouts, 18
    sizes = LayerSizes(layouts, [1000 * layer for layer in range(rig.num_layers)], boundary_columns=64)
    device = AssumedDevice("cuda", 10**9, link_bytes_per_s=2e9, host_bytes_per_s=5e9, update_bytes=20.0)
    costs = rough_costs(sizes, device, method=method, tokens=tokens)
    assert (costs.device_memory_bytes, costs.link_bytes_per_s, costs.host_bytes_per_s) == (10**9, 2e9, 5e9)
    for index, (layer, layout) in enumerate(zip(costs.layers, layouts, strict=True)):
        trained, is_block = layout.num_trainable_elements, 0 < index < rig.num_layers - 1
        widths = [sum(place.shape) for place in layout.places if len(place.shape) == 2]
        assert layer.forward_s == 2 * 1000 * index * tokens / ASSUMED_FLOPS["cuda"]
        assert layer.backward_s == layer.forward_s * (1 if method == "lora" else 2)
        assert layer.recompute is (index < rig.num_layers - 1)
        assert layer.boundary_bytes == 64 * tokens * 4
        assert layer.activation_bytes == (sum(widths) * tokens * 4 if is_block else 0)
        assert (layer.param_bytes, layer.grad_bytes) == ((layout.num_bytes, 4 * trained) if index else (0, 0))
        assert layer.optimizer_s == pytest.approx(trained * 20 / 5e9)
    on_processor = rough_costs(sizes, AssumedDevice("cpu"), method=method, tokens=tokens).layers
    assert not any(layer.param_bytes or layer.grad_bytes or layer.optimizer_s for layer in on_processor)


def test_a_probe_leaves_no_graph() -> None:
    """Story: the weights of each probed block, unpacked, stayed in memory: 1 GiB of a model of a billion."""
    weight = torch.randn(64, 64, requires_grad=True)
    alive = weakref.ref(weight)
    assert sum(saved_sizes(lambda weight=weight: (torch.randn(2, 64) @ weight).exp(), [])) > 0  # type: ignore[misc]
    del weight
    assert alive() is None
