"""What the split finds out about a model, and what it refuses: models whose gradients would be wrong in silence;
and a model is built without memory for its weights, whatever its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.model.block_calls import SplitRefusedError
from roundpipe_cli.model.load import MANY, build_skeleton, build_without_weights
from roundpipe_cli.model.split import split_model
from roundpipe_cli.sizes import check_sizes
from tests.support.every_type import tiny_config_of
from tests.support.tiny import tiny_config

Walk = Callable[["Backbone", torch.Tensor], torch.Tensor]
"""How a backbone takes its embedded tokens through its blocks and its norm."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        result: torch.Tensor = hidden_states + self.linear(hidden_states)
        return result


class Backbone(nn.Module):
    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.walk = walk

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.walk(self, self.embed(input_ids)))


class Causal(nn.Module):
    """The shape of a Hugging Face causal language model, whose walk through the blocks a test chooses."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.model = Backbone(walk)
        self.lm_head = nn.Linear(8, 16)
        self.config = SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(hidden_size=8, vocab_size=16), use_cache=False
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids).last_hidden_state))


def through(*places: int, doubled: int | None = None) -> Walk:
    """Through the blocks of these numbers, one of them given twice its input, then the norm."""

    def walk(model: Backbone, hidden: torch.Tensor) -> torch.Tensor:
        for place in places:
            hidden = model.layers[place](hidden * 2 if place == doubled else hidden)
        result: torch.Tensor = model.norm(hidden)
        return result

    return walk


plain = through(0, 1, 2)


def with_argument(make: Callable[[torch.Tensor], Any]) -> Walk:
    """Every block but the first is given an `extra` made from the embedded tokens."""

    def walk(model: Backbone, hidden: torch.Tensor) -> torch.Tensor:
        extra = make(hidden)
        for index, block in enumerate(model.layers):
            hidden = block(hidden, extra=extra) if index else block(hidden)
        result: torch.Tensor = model.norm(hidden)
        return result

    return walk


def test_an_ordinary_model_comes_apart() -> None:
    split = split_model(Causal(plain))
    assert (split.blocks_path, split.num_blocks, split.backbone_path) == ("model.layers", 3, "model")
    assert (split.tail_paths, split.embedding_path, split.result_length) == (("model.norm",), "model.embed", 0)
    assert split.layer_names() == ("embed", "block.0", "block.1", "block.2", "head")


@pytest.mark.parametrize(
    ("walk", "what", "where"),
    [
        (through(0, 1, 1, 2), "once and in order", "block.1"),
        (lambda model, hidden: plain(model, model.norm(plain(model, hidden))), "once and in order", "block.0"),
        (through(0, 2, 1), "once and in order", "block.2"),
        (through(0, 1), "each of its blocks once", "model.layers"),
        (through(0, 1, 2, doubled=1), "changes the hidden states between two blocks", "block.0 to block.1"),
        (lambda model, hidden: plain(model, hidden) * 2, "more than its modules", "model.norm"),
        (lambda model, hidden: plain(model, model.norm(hidden)), "before its first block and after", "model.norm"),
        (with_argument(lambda hidden: (1, {2})), "could change", "block.1, extra"),
        (with_argument(lambda hidden: hidden.sum()), "gradient", "block.1"),
        (with_argument(lambda hidden: hidden.double()), "gradient", "block.1"),
    ],
)
def test_what_the_split_cannot_carry_is_refused(walk: Walk, what: str, where: str) -> None:
    with pytest.raises(SplitRefusedError) as caught:
        split_model(Causal(walk))
    assert caught.value.exit_code == 2
    assert what in caught.value.problems[0].what
    assert caught.value.problems[0].where == where


@pytest.mark.parametrize(
    "make",
    [
        *(torch.Tensor.detach, lambda hidden: ("eager", None, 2), lambda hidden: torch.arange(5), lambda hidden: {}),
        *(lambda hidden: [hidden], lambda hidden: hidden * 0.5, lambda hidden: {"a": (None, hidden)}),
    ],
)
def test_arguments_that_it_can_carry(make: Callable[[torch.Tensor], Any]) -> None:
    assert split_model(Causal(with_argument(make))).num_blocks == 3


@pytest.mark.parametrize("whole_block", [True, False])
def test_parameters_shared_between_blocks_are_refused(whole_block: bool) -> None:
    model = Causal(plain)
    if whole_block:
        model.model.layers[2] = model.model.layers[0]
    else:
        first, last = model.model.layers[0], model.model.layers[2]
        assert isinstance(first, Block) and isinstance(last, Block)
        last.linear.bias = first.linear.bias
    with pytest.raises(SplitRefusedError, match=r"block\.0 and block\.2: two blocks share a parameter") as caught:
        split_model(model)
    assert caught.value.problems[0].found in ("linear.weight", "linear.bias")


def test_models_without_blocks_or_of_several_widths_are_refused() -> None:
    """blt's blocks are one of its four models; the next one's width made the check itself fail."""
    model = Causal(plain)
    model.model.layers = nn.ModuleList()
    with pytest.raises(SplitRefusedError, match="no list of blocks"):
        split_model(model)
    with pytest.raises(SplitRefusedError, match="more than its modules"):
        split_model(build_skeleton(tiny_config_of("blt"), torch.float32))


# -- models without weights -----------------------------------------------------------------------------------------


def _default(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]()


def _built(config: Any) -> tuple[int, bool]:
    model = build_skeleton(config, torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters()), all(p.is_meta for p in model.parameters())


def test_fused_experts_larger_than_memory_are_built() -> None:
    """Story: a tensor of 38 GB was allocated before it became a parameter; llama4 makes its own by `torch.zeros`."""
    limits = Limits("building the model", "longcat_flash", 60.0, 16 * 1024**3)
    assert run_limited(partial(_built, _default("longcat_flash")), limits) == (741_053_585_408, True)
    llama4 = _default("llama4_text")
    llama4.num_local_experts = 128
    assert run_limited(partial(_built, llama4), replace(limits, processor_s=10.0)) == (784_254_735_360, True)


def test_buffers_keep_their_values() -> None:
    """gpt2 makes its mask by `torch.ones`; a buffer by `torch.empty`, filled later, gets memory all the same."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, MANY))
            self.register_buffer("filled", torch.empty(MANY).fill_(3.0))
            self.ones = torch.ones(MANY)  # neither parameter nor buffer

    model: Any = build_without_weights(Filled)
    assert model.weight.is_meta and not model.filled.is_meta
    assert torch.equal(model.filled, torch.full((MANY,), 3.0)) and torch.equal(model.ones, torch.ones(MANY))
    config = tiny_config("gpt2", n_positions=2048)
    assert not any(buffer.is_meta for buffer in build_skeleton(config, torch.float32).buffers())


def test_a_configuration_without_sizes_is_refused_with_their_names() -> None:
    """Story: dots1's own default has no number of experts, and all that was said was "empty() takes 1 argument"."""
    with pytest.raises(RefusedError, match="cannot build this model") as refused:
        build_skeleton(_default("dots1"), torch.float32)
    (problem,) = refused.value.problems
    assert problem.hint is not None
    assert all(name in problem.hint for name in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"))


def test_experts_that_are_no_modules_are_not_counted_as_such() -> None:
    """Story: doge's own default, 16,384 rows for experts in each of 32 layers, was "a size that no model has"."""
    config = {"model_type": "doge", "num_hidden_layers": 32, "num_experts": 16384}
    check_sizes(config, "config.json")
    with pytest.raises(RefusedError, match="a size that no model has"):
        check_sizes({**config, "model_type": "mixtral"}, "config.json")
