"""What travels beside the hidden states: arguments with a gradient, keys and values of other blocks, more streams; and
Gemma 4's text model in every combination of what it may have; parameters in float32 beside 16 bit."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from roundpipe_cli.costs.find_model import built_architecture
from roundpipe_cli.engine.parity import prove
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.boundary import Carried, Carry
from roundpipe_cli.model.chunks import check_sequence_chunks
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora, describe_left_out
from roundpipe_cli.model.meta_counts import counts_of
from roundpipe_cli.model.reduced import reduce_model
from roundpipe_cli.model.split import split_model
from tests.engine.test_parity import check_gradients
from tests.support.adapters import layout, load_whole
from tests.support.covering import swept
from tests.support.e2e import STAGES, finetune, make_tokenizer, make_workspace, numbers
from tests.support.every_type import tiny_config_of
from tests.support.tiny import (
    logits_of,
    make_rig,
    plain_step,
    random_microbatches,
    step_of_any_workers,
    write_new_weights,
)
from tests.train.test_export_adapters import adapter, merge

BF16, F32 = torch.bfloat16, torch.float32
FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


def errors(config: Any, method: str = "full", dtype: torch.dtype = torch.float32) -> float:
    model = build_skeleton(tiny_config_of(config) if isinstance(config, str) else config, dtype)
    split = split_model(model)
    if method == "lora":
        add_lora(model, LoraSettings(r=4, alpha=8), dtype=torch.float32, base_name="t", blocks_path=split.blocks_path)
    proof = prove(model, split)
    assert proof.unproven == ""
    return max(proof.loss_error, proof.gradient_error)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "qwen4_exp", "gemma4_unified_text"])
def test_other_models_that_were_refused_for_their_arguments(model_type: str) -> None:
    """Four streams of hidden states, dictionaries among the arguments, an empty mapping that nobody uses."""
    assert errors(model_type) < 1e-5


def test_compressed_keys_mix_packed_rows() -> None:
    """The masks are right, and yet a row sees the one before it: only numbers tell, compared without dropout."""
    model = build_skeleton(tiny_config_of("deepseek_v4", attention_dropout=0.1), torch.float32)
    with pytest.raises(RefusedError, match="packed rows"):
        prove(model, split_model(model), packing=True)


@pytest.mark.parametrize("model_type", ["gpt2", *swept(["llama"])])
def test_packed_rows_are_compared_in_models_with_dropout(model_type: str) -> None:
    """gpt2's own configuration drops; here adapters do too."""
    model = build_skeleton(tiny_config_of(model_type), torch.float32)
    split, settings = split_model(model), LoraSettings(r=4, alpha=8, dropout=0.1)
    add_lora(model, settings, dtype=torch.float32, base_name="t", blocks_path=split.blocks_path)
    assert prove(model, split, packing=True).unproven == ""
    assert model.get_submodule(split.blocks_path)[0].training
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert 0.1 in rates, "the model is left as it is"


def test_it_is_told_that_packed_rows_were_not_compared() -> None:
    """Experts' routers of Switch's kind draw noise, of another shape for other rows."""
    model = build_skeleton(tiny_config_of("mixtral", router_jitter_noise=0.1), torch.float32)
    told = prove(model, split_model(model), packing=True).unproven
    assert "packed rows do not see each other was not compared" in told


SHARED_KEYS = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "shared"], "index_topk": 4}


@pytest.mark.parametrize(
    ("model_type", "changes", "dtype"),
    [
        *(("hy_v4", SHARED_KEYS, BF16), ("zaya", {}, BF16), pytest.param("zaya", {}, F32, marks=pytest.mark.sweep)),
        *(pytest.param("hy_v4", {}, dtype, marks=pytest.mark.sweep) for dtype in (F32, BF16)),
    ],
)
def test_results_that_the_next_block_reads_travel_along(model_type: str, changes: Any, dtype: torch.dtype) -> None:
    """Story: zaya's router's states and hy_v4's chosen keys were refused. Its hidden states are float32, cast last."""
    model = build_skeleton(tiny_config_of(model_type, **changes), dtype)
    split = split_model(model)
    assert split.handed and split.casts_tail == (model_type == "zaya" and dtype == BF16)
    proof = prove(model, split)
    assert proof.unproven == "" and max(proof.loss_error, proof.gradient_error) < 1e-5
    with pytest.raises(RefusedError, match="sequences in chunks"):
        check_sequence_chunks(model, split, max_seq_length=64)


def test_blocks_left_out_of_the_proof_pass_on_what_they_are_given() -> None:
    """Only the first blocks of a large model are tried; a later one reads what came through those left out."""
    kinds: Any = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]}
    model = build_skeleton(tiny_config_of("hy_v4", **kinds, vocab_size=5000), torch.float32)
    split = split_model(model)
    assert len(reduce_model(model, split).kept) < 4
    proof = prove(model, split)
    assert proof.unproven == "" and proof.gradient_error < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_whole_numbers_keep_their_bits_beside_hidden_states(dtype: torch.dtype) -> None:
    """Numbers of tokens beyond 256 are none of bfloat16, and some of their bits are a NaN's."""
    hidden = torch.randn(2, 3, 4).to(dtype)
    numbers = torch.tensor([0, 255, 32_640, 65_535, 2_139_095_041, -1]).repeat(6).reshape(2, 3, 6)
    form = Carried((2, 3, 6), torch.int64)
    carry = Carry((2, 3, 4), dtype, {("result", 1): form}, (("result", 1),))
    boundary = carry.pack(hidden, {("result", 1): numbers})
    assert boundary.shape[-1] == carry.num_columns and boundary.dtype == dtype
    found, parts = carry.unpack(boundary.clone().requires_grad_())
    assert torch.equal(found, hidden) and torch.equal(parts["result", 1], numbers)
    fewer = carry.pack(hidden, {("result", 1): numbers[..., :2]})
    opened = replace(carry, tensors={("result", 1): replace(form, is_open=True)})
    assert torch.equal(opened.unpack(fewer)[1]["result", 1], numbers[..., :2])
    _, sample = carry.unpack(carry.sample(hidden))
    assert not sample["result", 1].any(), "no number that a block could not use as an index"


# -- linear layers that are none -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["nemotron_h", "phimoe", *swept(["mamba2", "llama4_text"])])
def test_all_linear_leaves_out_what_an_adapter_would_break(model_type: str) -> None:
    """PEFT forbids `out_proj` of Mamba types, and routers that return tuples failed inside PEFT's wrapper."""
    assert errors(model_type, "lora") < 1e-4
    model = build_skeleton(tiny_config_of(model_type), torch.float32)
    (text,) = describe_left_out(model, split_model(model).blocks_path)
    assert ("out_proj" in text and "PEFT forbids" in text) or "returns more than one tensor" in text


# -- gemma 4 in every combination of what it may have ---------------------------------------------------------------

PARTS: dict[str, dict[str, Any]] = {
    "shared keys": {"num_kv_shared_layers": 2},
    "no inputs of each layer": {"hidden_size_per_layer_input": 0},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}
VOCABULARY = {"vocab_size": 300, "vocab_size_per_layer_input": 300}
BROKEN = {"shared keys", "no inputs of each layer"}
"""transformers 5.23 itself fails with these two together."""
COMPUTED = [names for n in range(4) for names in itertools.combinations(PARTS, n) if not set(names) >= BROKEN]
MOST = [names for names in COMPUTED if len(names) > 1]
"""Each of the others has a part of these."""


def gemma4(names: tuple[str, ...], **changes: Any) -> Any:
    """Its configuration with such parts."""
    return tiny_config_of("gemma4_text", **FOUR, **{k: v for name in names for k, v in PARTS[name].items()}, **changes)


@pytest.mark.parametrize(
    ("names", "method"),
    [
        *((MOST[0], "full"), ((), "lora")),
        *(pytest.param(names, "full", marks=pytest.mark.sweep) for names in COMPUTED if names != MOST[0]),
        *(pytest.param(names, "lora", marks=pytest.mark.sweep) for names in COMPUTED if names),
    ],
)
def test_it_trains_as_its_own_code_does(names: tuple[str, ...], method: str) -> None:
    assert errors(gemma4(names), method) < 1e-4


@pytest.mark.parametrize("names", [*MOST, *swept(sorted(set(COMPUTED) - set(MOST)))], ids=", ".join)
def test_it_is_counted_and_merged(tmp_path: Path, names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_config(gemma4(names, **VOCABULARY), dtype=torch.float32)
        model.save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    counted = built_architecture(counts_of(tmp_path / "base", "here"), name="here", source="a test")
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    adapted = adapter(tmp_path, target_modules=["q_proj", "down_proj"])
    assert "as it has them" not in merge(tmp_path)
    assert layout(tmp_path / "merged") == layout(tmp_path / "base")
    merged = load_whole(tmp_path / "merged")
    expected = logits_of(adapted)
    assert torch.allclose(logits_of(merged), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("names", [MOST[0], *swept(sorted(set(COMPUTED) - {MOST[0]}))], ids=", ".join)
def test_4_bit_gives_plain_pytorch_s_numbers_and_equal_bits(names: tuple[str, ...]) -> None:
    rig = make_rig("gemma4_text", "lora", packed_as="4bit", config=gemma4(names))
    assert any(place.packed_as for layout in rig.store.layouts for place in layout.places)
    microbatches = random_microbatches([(2, 9), (1, 7)])
    result = step_of_any_workers(rig, microbatches)
    assert result.loss == pytest.approx(plain_step(rig, microbatches), rel=1e-6)
    check_gradients(rig.plain, rig.store, 2e-4)


# -- parameters that stay in float32 in a model of 16 bit, as routers do ---------------------------------------------

ROUTER = "model.layers.1.mlp.gate.weight"


def test_the_engine_trains_them_as_the_model_s_own_code_does() -> None:
    """Story: full fine-tuning of Ernie 4.5 in bfloat16 ended in an internal error: a layer had one dtype."""
    assert errors("ernie4_5_moe", dtype=BF16) < 1e-5


def test_an_update_keeps_all_their_digits() -> None:
    rig = make_rig("ernie4_5_moe", dtype=BF16, config=tiny_config_of("ernie4_5_moe"))
    wide = {place.name for layout in rig.store.layouts for place in layout.wide}
    assert ROUTER in wide and all(rig.store.views[name].dtype == torch.float32 for name in wide)
    before = rig.store.views[ROUTER].clone()
    step_of_any_workers(rig, random_microbatches([(2, 12), (1, 7), (2, 9)]))
    write_new_weights(rig)
    for name in rig.store.trainable_names:
        master, weights = rig.store.master(name), rig.store.views[name]
        assert torch.equal(weights, master if name in wide else master.to(BF16)), name
    assert not torch.equal(rig.store.master(ROUTER).to(BF16).float(), rig.store.master(ROUTER))
    assert not torch.equal(rig.store.views[ROUTER], before)


def test_a_run_resumes_with_them_and_saves_them_in_float32(tmp_path: Path) -> None:
    config: Any = tiny_config_of("ernie4_5_moe", vocab_size=VOCABULARY["vocab_size"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=BF16).save_pretrained(tmp_path / "made")
    make_tokenizer().save_pretrained(tmp_path / "made")
    changes = {"method": "full", "dtype": "bfloat16", "learning_rate": 1e-3, **STAGES}
    work = make_workspace(tmp_path / "w", tmp_path / "made", **changes)
    finetune(work, "max_steps=2", "output_dir=whole").expect(0)
    finetune(work, "max_steps=1").expect(0)
    finetune(work, "max_steps=2", "--resume").expect(0)
    rows = numbers(work / "whole")
    assert len(rows) == 2 and rows == numbers(work / "out")
    whole, resumed = (load_file(work / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(one, resumed[name]) for name, one in whole.items())
    base = load_file(work / "model" / "model.safetensors")
    assert whole[ROUTER].dtype == base[ROUTER].dtype == torch.float32
    assert not torch.equal(whole[ROUTER], base[ROUTER])
    assert not torch.equal(whole[ROUTER].to(BF16).float(), whole[ROUTER])
