"""Attention with sinks by fused kernels: transformers' own numbers, without its scores."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.engine.probe import find_saved_bytes
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.sink_attention import MODEL_TYPES, NAME, sink_attention
from tests.support.e2e import finetune, make_model, make_workspace, metrics
from tests.support.tiny import EXTRA, make_rig, tiny_config

LENGTH = 21
POSITIONS = [*range(9), *range(7), *range(5)]


def both(**changes: Any) -> tuple[Any, Any]:
    """transformers' model and the same with our attention; sinks that matter."""
    config = tiny_config("gpt_oss", **changes)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=2.0)
    skeleton = build_skeleton(config, torch.float32)
    assert skeleton.config._attn_implementation == NAME and theirs.config._attn_implementation == "eager"  # type: ignore[union-attr]
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=NAME)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["one row", "packed rows"])
@pytest.mark.parametrize("window", [4, 128])
@pytest.mark.parametrize("head_dim", [16, 12])
def test_losses_and_gradients_are_those_of_transformers(
    head_dim: int, window: int, positions: list[int] | None
) -> None:
    more = {} if positions is None else {"position_ids": torch.tensor([positions] * 2)}
    ids = torch.randint(1, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits, gradients = [], []
    for model in both(head_dim=head_dim, sliding_window=window):
        made = model(input_ids=ids, use_cache=False, **more).logits
        torch.nn.functional.cross_entropy(made[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        logits.append(made.detach())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-6)
    for name, expected in gradients[0].items():
        if expected is not None:
            error = float((gradients[1][name] - expected).norm())
            assert error <= 1e-5 * float(expected.norm()) + 1e-9, name
    assert float(gradients[1]["model.layers.0.self_attn.sinks"].norm()) > 1e-5, "sinks learn"


def test_generated_tokens_are_those_of_transformers() -> None:
    theirs, ours = (
        model.eval().generate(torch.arange(1, 9)[None], max_new_tokens=12, do_sample=False) for model in both()
    )
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("length", [8, 15, 16])
def test_sixteen_bits_are_nearer_to_the_truth_than_transformers(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    query, sinks = torch.randn(2, 4, length, 16, generator=generator), torch.randn(4, generator=generator)
    key, value = (torch.randn(2, 2, length, 16, generator=generator) for _ in range(2))
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]

    class Module:
        num_key_value_groups, training = 2, False

    def eager(dtype: torch.dtype) -> torch.Tensor:
        module: Any = Module()
        module.sinks = sinks.to(dtype)
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        parts = [part.to(dtype) for part in (query, key, value)]
        return eager_attention_forward(module, *parts, added, 0.25)[0]

    parts = [part.bfloat16() for part in (query, key, value)]
    ours, _ = sink_attention(torch.nn.Module(), *parts, mask, 0.0, 0.25, s_aux=sinks.bfloat16())
    truth = eager(torch.float64)
    assert float((ours - truth).norm()) <= float((eager(torch.bfloat16) - truth).norm())
    assert float((ours - truth).norm()) <= 0.01 * float(truth.norm())


def test_plan_knows_the_same_models() -> None:
    for model_type in EXTRA:
        architecture = parse_config(tiny_config(model_type).to_dict(), name="tiny", source="tests")
        assert architecture.has_sinks == (model_type in MODEL_TYPES), model_type


def test_no_scores_are_kept() -> None:
    """A mask of one or four bytes a pair of tokens, whatever the number of heads; transformers keeps four a head."""
    for heads in (4, 16):
        rig = make_rig("gpt_oss", "lora", num_attention_heads=heads, max_position_embeddings=1024)
        found = find_saved_bytes(rig.skeleton, rig.split, rig.store)
        assert found is not None and 0 < found[0].per_pair <= 5


def test_a_run_and_its_result(tmp_path: Path) -> None:
    """The result names no attention of ours, so that anything can load it."""
    model = make_model(tmp_path / "model", "gpt_oss")
    work = make_workspace(tmp_path / "w", model, max_steps=2, method="full")
    finetune(work)
    rows = metrics(work / "out")
    assert len(rows) == 2 and all(row["loss"] > 0 for row in rows)
    written = list((work / "out").rglob("config.json"))
    assert written and all(NAME not in path.read_text() for path in written)
