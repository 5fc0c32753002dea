"""The routers' balancing loss, `output_router_logits: true`, against transformers' own with labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.router_loss import describe_router_loss, leave_out_router_loss
from roundpipe_cli.model.split import split_model
from tests.engine.test_parity import check_gradients
from tests.support.every_type import tiny_config_of
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for, tiny_config
from tests.support.versions import at_least

JETMOE = (
    "its configuration does not say how many experts there are, how many a token has, or the loss's weight"
    if at_least("transformers", "5.24")
    else "transformers does not say which module of a block is its router"
)
SIZES = [(2, 12), (2, 9), (1, 7)]
LOSS: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def padded_microbatches() -> list[Microbatch]:
    """The second row of each is three tokens shorter than the first."""
    return [
        Microbatch(
            one.input_ids,
            one.labels,
            lengths=torch.tensor([one.input_ids.shape[1]] + [one.input_ids.shape[1] - 3])
            if len(one.input_ids) > 1
            else None,
        )
        for one in random_microbatches(SIZES)
    ]


def plain_loss(rig: Rig, microbatches: list[Microbatch]) -> float:
    """Transformers' own loss of each forward, weighted by its target tokens; leaves gradients in the plain model."""
    targets = [int((one.labels[:, 1:] != -100).sum()) for one in microbatches]
    total = 0.0
    rig.plain.zero_grad()
    for one, count in zip(microbatches, targets, strict=True):
        mask = None
        if one.lengths is not None:
            mask = (torch.arange(one.input_ids.shape[1])[None] < one.lengths[:, None]).long()
        output = rig.plain(
            input_ids=one.input_ids, attention_mask=mask, labels=one.labels, use_cache=False, output_router_logits=True
        )
        assert float(output.aux_loss.detach()) > 0
        loss = output.loss * (count / sum(targets))
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "qwen3_next", "minimax"])
def test_loss_and_gradients_are_transformers_own(model_type: str, method: str) -> None:
    rig, without = make_rig(model_type, method, **LOSS), make_rig(model_type, method)
    assert rig.split.routers is not None and without.split.routers is None
    microbatches = padded_microbatches()
    expected = plain_loss(rig, microbatches)
    results = set()
    for num_workers, copy in ((1, False), (2, True)):
        with rig.engine(num_workers, copy=copy, head_chunk_tokens=8) as engine:
            result = engine.run_step(microbatches, schedule_for(rig, num_workers, len(SIZES)), step=0)
        results.add((result.loss, result.gradient_norm))
        assert result.loss == pytest.approx(expected, rel=1e-6)
        check_gradients(rig.plain, rig.store, 1.5e-4 if model_type == "qwen3_next" else 1e-5)
    assert len(results) == 1, "the bits depend on the number of workers"
    with without.engine(1) as engine:
        other = engine.run_step(microbatches, schedule_for(without, 1, len(SIZES)), step=0)
    assert abs(other.loss - expected) > 0.1, "the loss should show"


def test_whether_the_loss_is_trained_is_told() -> None:
    """`output_router_logits` was set to false, and the loss not trained."""
    told = {}
    for model_type in ("mixtral", "doge", "deepseek_v3", "jetmoe", "llama"):
        config = tiny_config_of(model_type)
        config.output_router_logits = model_type != "llama"
        split = split_model(build_skeleton(config, torch.float32))
        told[model_type] = describe_router_loss(split.routers, split.no_router_loss)
    asked = "output_router_logits: true in the model's configuration"
    assert told == {
        "mixtral": f"{asked}: the routers' balancing loss is trained with its router_aux_loss_coef 0.001; evaluation "
        "leaves it out",
        "doge": f"{asked} trains no balancing loss: its balancing loss is not the usual one",
        "deepseek_v3": f"{asked} trains no balancing loss: transformers has no such loss for this model type",
        "jetmoe": f"{asked} trains no balancing loss: {JETMOE}",
        "llama": None,
    }


def test_sequences_in_chunks_leave_it_out_with_a_notice() -> None:
    config = tiny_config("mixtral", **LOSS)
    assert leave_out_router_loss(config) is None, "nothing is asked before a skeleton is built"
    build_skeleton(config, torch.float32)
    assert "sequence_chunks" in str(leave_out_router_loss(config))
    assert split_model(build_skeleton(config, torch.float32)).routers is None
    assert leave_out_router_loss(config) is None
