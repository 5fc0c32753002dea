"""Whether a model answers prompts of unequal lengths side by side as each alone: tried on a narrow copy of it.

Positions that do not begin behind the padding, and groups of tokens that do, give a prompt another answer beside a
longer one. No configuration says so, so a copy with one block of each kind and random weights is asked.
"""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.reduced import random_weights, reduce_model, shrunk_configs
from roundpipe_cli.model.split import split_model

LENGTHS = (5, 411, 600)
"""Tokens of prompts: few, which show most of a single token too many, and more than blocks compress or compute by."""
NEW_TOKENS = 3
TOLERANCE = 1e-4
"""Share of the largest logit by which logits may differ: ten times what rounding in float32 made of any type."""
MAX_PARAMETERS = 12_000_000
"""Copies with more are not tried."""


def each_as_alone(
    model: Any, prompts: Sequence[list[int]], answer: Callable[[Sequence[list[int]]], Sequence[Any]]
) -> list[Any]:
    """An answer for each of the prompts [tokens], by `answer`: of all side by side, or, where padding would change
    them, of those of one length."""
    lengths, found = {*map(len, prompts)}, dict[int, Any]()
    if len(lengths) == 1 or _ignores_padding(json.dumps(model.config.to_dict(), default=str)):
        return list(answer(prompts))
    for length in lengths:
        some = [index for index, one in enumerate(prompts) if len(one) == length]
        found |= zip(some, answer([prompts[index] for index in some]), strict=True)
    return [found[index] for index in range(len(prompts))]


def padded(prompts: Sequence[list[int]], pad: int | None) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [prompts, longest], padded on the left: an answer follows its prompt at once."""
    longest = max(map(len, prompts))
    # padding adds no token that a repetition penalty would not count anyway
    ids = [(one[:1] or [pad or 0]) * (longest - len(one)) + one for one in prompts]
    masks = [[0] * (longest - len(one)) + [1] * len(one) for one in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)}


@functools.cache
def _ignores_padding(config: str) -> bool:
    """Whether shorter prompts beside a longer one get the logits that they get alone; False where no copy can be
    tried."""
    for smaller in _configs(json.loads(config)):
        with suppress(Exception), torch.random.fork_rng([]):  # an odd configuration may fail in any way
            skeleton = build_skeleton(smaller, torch.float32).requires_grad_(False)
            cut = reduce_model(skeleton, split_model(skeleton))
            if cut.num_parameters <= MAX_PARAMETERS:
                return _agrees(cut.model, cut.vocab_size)
    return False


def _configs(values: dict[str, Any]) -> Iterator[Any]:
    with suppress(Exception):
        yield (config := CONFIG_MAPPING[values["model_type"]].from_dict(values))
        yield from shrunk_configs(config)


def _agrees(cut: nn.Module, vocab_size: int) -> bool:
    weights = random_weights(cut)
    memo: dict[int, Any] = {id(one): nn.Parameter(weights[name], False) for name, one in cut.named_parameters()}
    model: Any = copy.deepcopy(cut, memo).eval()
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max(LENGTHS) + NEW_TOKENS
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, most - NEW_TOKENS - place) for place, length in enumerate(reversed(LENGTHS))]
    prompts = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in reversed(lengths)]
    how: dict[str, Any] = {"do_sample": False, "num_beams": 1, "use_cache": True, "eos_token_id": None}
    how |= {"max_new_tokens": NEW_TOKENS, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together, *each = (
            torch.stack(model.generate(**padded(some, 0), **how).logits, 1)
            for some in (prompts, *([one] for one in prompts))
        )
    alone = torch.cat(each)
    return bool((alone - together).abs().max() <= TOLERANCE * alone.abs().max())
