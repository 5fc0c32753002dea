"""Gemma 4's text model in every combination of what it may have: bits, 4 bit, plan's count, a merged model's names."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from roundpipe_cli.costs.find_model import built_architecture
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.meta_counts import counts_of
from tests.engine.test_parity import check_gradients
from tests.model.test_carried import EXPERTS, FOUR
from tests.support.adapters import layout, load_whole
from tests.support.e2e import make_tokenizer
from tests.support.every_type import tiny_config_of
from tests.support.tiny import logits_of, make_rig, plain_step, random_microbatches, schedule_for
from tests.support.versions import at_least
from tests.train.test_export_adapters import adapter, merge

PARTS: dict[str, dict[str, Any]] = {
    "shared keys": {"num_kv_shared_layers": 2},
    "no inputs of each layer": {"hidden_size_per_layer_input": 0},
    "experts": EXPERTS,
}
VOCABULARY = {"vocab_size": 300, "vocab_size_per_layer_input": 300}
COMBINATIONS = [names for count in range(len(PARTS) + 1) for names in itertools.combinations(PARTS, count)]


def save(folder: Path, names: tuple[str, ...], dtype: torch.dtype = torch.float32) -> Any:
    changes = {key: value for name in names for key, value in PARTS[name].items()}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = tiny_config_of("gemma4_text", **FOUR, **changes, **VOCABULARY)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


BROKEN = {"shared keys", "no inputs of each layer"}
"""transformers 5.23 itself fails with these two together."""


@pytest.mark.skipif(not at_least("transformers", "5.18"), reason="transformers 5.17 computes them")
@pytest.mark.parametrize("names", [names for names in COMBINATIONS if set(names) >= BROKEN], ids=", ".join)
def test_what_transformers_cannot_compute_is_refused_with_its_words(tmp_path: Path, names: tuple[str, ...]) -> None:
    model = save(tmp_path / "base", names)
    with pytest.raises(TypeError, match="not subscriptable"):
        model(input_ids=torch.arange(10)[None], use_cache=False)
    with pytest.raises(RefusedError) as refused:
        counts_of(tmp_path / "base", "here")
    assert "not subscriptable" in str(refused.value.problems[0].found)


WITHIN_OTHERS = [("shared keys",), ("no inputs of each layer",), ("experts",)]
"""Each has a part of others that are tried, and beside it what the model without any part has."""
COMPUTED = [
    pytest.param(names, marks=[pytest.mark.sweep] if names in WITHIN_OTHERS else [], id=", ".join(names))
    for names in COMBINATIONS
    if not set(names) >= BROKEN
]


@pytest.mark.parametrize("names", COMPUTED)
def test_it_is_counted_and_merged(tmp_path: Path, names: tuple[str, ...]) -> None:
    model = save(tmp_path / "base", names)
    counted = built_architecture(counts_of(tmp_path / "base", "here"), name="here", source="a test")
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    adapted = adapter(tmp_path, target_modules=["q_proj", "down_proj"])
    assert merge(tmp_path).has_base_names
    assert layout(tmp_path / "merged") == layout(tmp_path / "base")
    merged = load_whole(tmp_path / "merged")
    expected = logits_of(adapted)
    assert torch.allclose(logits_of(merged), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("names", COMPUTED)
def test_4_bit_gives_plain_pytorch_s_numbers_and_equal_bits(names: tuple[str, ...]) -> None:
    changes = {key: value for name in names for key, value in PARTS[name].items()}
    config = tiny_config_of("gemma4_text", **FOUR, **changes)
    rig = make_rig("gemma4_text", "lora", packed_as="4bit", config=config)
    assert any(place.packed_as for layout in rig.store.layouts for place in layout.places)
    microbatches, found = random_microbatches([(2, 12), (1, 7), (2, 9)]), set()
    expected = plain_step(rig, microbatches)
    for num_workers, copy in ((1, False), (2, True), (3, False)):
        with rig.engine(num_workers, copy=copy) as engine:
            result = engine.run_step(microbatches, schedule_for(rig, num_workers, 3), step=0)
        assert result.loss == pytest.approx(expected, rel=1e-6)
        check_gradients(rig.plain, rig.store, 2e-4)
        found.add((result.loss, result.gradient_norm))
    assert len(found) == 1, "the bits depend on the number of workers"
