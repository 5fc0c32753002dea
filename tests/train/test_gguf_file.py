"""GGUF files of models and adapters without llama.cpp: other readers compute with them what the folder computes."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from roundpipe_cli.cli.app import with_gguf_type
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import build_skeleton, load_config, load_tokenizer
from roundpipe_cli.model.weights_io import load_weights
from roundpipe_cli.train.result.gguf_adapter import write_adapter_gguf
from roundpipe_cli.train.result.gguf_file import FAMILIES, why_not_written, write_gguf
from roundpipe_cli.train.result.gguf_types import ADAPTER_GGUF, GGUF_NAME
from tests.support.adapters import ADAPTER, load_whole, random_adapter
from tests.support.e2e import launch, make_model, make_tokenizer, run
from tests.support.tiny import logits_of
from tests.support.wrappers import save_wrapper, tiny_wrapper

SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None, "head_dim": 32},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768, "norm_topk_prob": True},
    "gemma3_text": {"head_dim": 256, "num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 256},
    "phi3": {"hidden_size": 96, "num_attention_heads": 6},
}
"""Sizes that transformers' reader takes: it knows no head of another size for qwen 3, and no width of experts."""
TEXT = "What is a lock file, 2024? {x} été  two"


def byte_pairs() -> Any:
    """A byte-level tokenizer with merges, a special token and one that is not."""
    from tokenizers import Tokenizer
    from transformers import AddedToken

    fast = make_tokenizer()
    state = json.loads(fast.backend_tokenizer.to_str())
    merges = [("l", "o"), ("c", "k"), ("lo", "ck"), ("Ġ", "lock"), ("i", "s")]
    for pair in merges:
        state["model"]["vocab"]["".join(pair)] = len(state["model"]["vocab"])
    state["model"]["merges"] = merges
    fast._tokenizer = Tokenizer.from_str(json.dumps(state))
    fast.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    fast.add_tokens([AddedToken("<think>", normalized=False)])
    return fast


def sentencepieces() -> Any:
    """A tokenizer as sentencepiece's BPE becomes one: blanks as marks, bytes for what it does not know."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("l", "o"), ("c", "k"), ("lo", "ck"), ("▁", "lock"), ("i", "s"), ("▁", "is")]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {piece: n for n, piece in enumerate([*pieces, *("".join(pair) for pair in merges), *letters])}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def read_by_transformers(folder: Path) -> Any:
    return load_whole(folder, "AutoModelForCausalLM", gguf_file=GGUF_NAME)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_computes_the_same_from_its_file(tmp_path: Path, model_type: str) -> None:
    """A bfloat16 model, bit for bit but for gemma's norms, to which the format adds 1. Our own reader trains on it."""
    folder = make_model(tmp_path / "model", model_type, dtype="bfloat16", **SIZES[model_type])
    byte_pairs().save_pretrained(str(folder))
    path, notes = write_gguf(folder, "bf16")
    assert path.name == GGUF_NAME and not notes
    planned, of_file = find_architecture("model", folder), find_architecture("model", path)
    assert replace(of_file, source=planned.source, model_type=planned.model_type) == planned
    whole = load_whole(folder)
    expected, found = logits_of(whole), logits_of(read_by_transformers(folder))
    if model_type == "gemma3_text":
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found, expected)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ours = ModelSource("file", folder, GGUF_NAME)
    read = load_tokenizer(ours)
    assert read(TEXT + "<|end|><think>")["input_ids"] == tokenizer(TEXT + "<|end|><think>")["input_ids"]
    assert read.chat_template == tokenizer.chat_template and read.eos_token == tokenizer.eos_token
    skeleton = build_skeleton(load_config(ours), torch.float32)
    weights: dict[str, torch.Tensor] = {}
    assert load_weights(ours, skeleton, lambda name, values: weights.__setitem__(name, values.clone())) == []
    stored = dict(whole.named_parameters())
    assert weights.keys() == stored.keys()
    assert all(torch.allclose(weights[name].float(), stored[name], atol=1e-6) for name in stored)


@pytest.mark.parametrize(("type_name", "most"), [("f32", 0.0), ("q8_0", 0.03), ("q5_1", 0.2), ("q4_0", 0.4)])
def test_types_are_written_within_their_error(tmp_path: Path, type_name: str, most: float) -> None:
    folder = make_model(tmp_path / "model", "llama", tie_word_embeddings=False)
    path, _ = write_gguf(folder, type_name)
    expected = logits_of(load_whole(folder))
    found = logits_of(read_by_transformers(folder))
    assert float((found - expected).norm() / expected.norm()) <= most
    assert most == 0 or path.stat().st_size < (folder / "model.safetensors").stat().st_size / 2


def test_sentencepiece_tokens_have_scores_and_kinds(tmp_path: Path) -> None:
    """llama.cpp merges by scores, transformers by merges: the file has both."""
    folder = make_model(tmp_path / "model", "llama")
    tokenizer = sentencepieces()
    tokenizer.save_pretrained(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, 70, 80]}))
    write_gguf(folder, "f32")
    read = AutoTokenizer.from_pretrained(str(folder), gguf_file=GGUF_NAME)
    for text in ("lock is", "a lock file", "été is"):
        found = read(text, add_special_tokens=False)["input_ids"]
        assert found == tokenizer(text, add_special_tokens=False)["input_ids"], text
    fields = GGUFReader(str(folder / GGUF_NAME)).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.eot_token_id"].contents() == 70, "the file has room for one more end"
    kinds, scores = fields["tokenizer.ggml.token_type"].contents(), fields["tokenizer.ggml.scores"].contents()
    vocabulary = tokenizer.get_vocab()
    assert [kinds[vocabulary[token]] for token in ("<unk>", "<s>", "<0x00>", "lock", "a")] == [2, 3, 6, 1, 1]
    assert kinds[-1] == 5, "rows of the embedding that no text has"
    assert scores[vocabulary["lo"]] > scores[vocabulary["lock"]] > scores[vocabulary["▁lock"]] > scores[vocabulary["a"]]
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is True


_PLAIN = {"rope_type": "default", "rope_theta": 900.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 800.0, "factor": 3.0}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 700.0, "factor": 8.0, "original_max_position_embeddings": 16},
    **{"attention_factor": 1.5, "beta_fast": 20.0, "beta_slow": 2.0},
}
_LONG = {"rope_type": "longrope", "rope_theta": 600.0, "original_max_position_embeddings": 32}
_SIZES = {
    **{"hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 3},
    **{"max_position_embeddings": 144, "rms_norm_eps": 0.25, "num_hidden_layers": 2},
}
_WRITTEN = {
    **{"embedding_length": 96, "feed_forward_length": 80, "attention.head_count": 6, "attention.head_count_kv": 3},
    **{"context_length": 144, "attention.layer_norm_rms_epsilon": 0.25, "block_count": 2, "vocab_size": 300},
}
_HEADS = {"attention.key_length": 24, "attention.value_length": 24}
_YARN_WRITTEN = {
    **{"rope.freq_base": 700.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0},
    **{"rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 20.0},
    **{"rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 1.5 / (0.1 * math.log(8) + 1)},
}
FIELDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "yarn": (
        "llama",
        {"head_dim": 24, "rope_parameters": _YARN},
        {**_HEADS, **_YARN_WRITTEN, "rope.dimension_count": 24},
    ),
    "mscale": (
        "qwen3",
        {"head_dim": 24, "rope_parameters": {**_YARN, "attention_factor": None, "mscale": 2.0, "mscale_all_dim": 0.5}},
        {
            **{**_HEADS, **_YARN_WRITTEN},
            "rope.scaling.attn_factor": (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1) / (0.1 * math.log(8) + 1),
        },
    ),
    "linear, some layers sliding": (
        "qwen2",
        {
            **{"rope_parameters": _LINEAR, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "layer_types": ["full_attention", "sliding_attention"],
        },
        {
            **{"rope.freq_base": 800.0, "rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
            **{"attention.sliding_window": 8, "attention.sliding_window_pattern": [False, True]},
            **{"attention.key_length": 16, "attention.value_length": 16},
        },
    ),
    "all layers sliding": (
        "mistral",
        {"head_dim": 24, "rope_parameters": _PLAIN, "sliding_window": 9},
        {**_HEADS, "rope.freq_base": 900.0, "rope.dimension_count": 24, "attention.sliding_window": 9},
    ),
    "gemma 3": (
        "gemma3_text",
        {
            **{"head_dim": 24, "query_pre_attn_scalar": 100, "sliding_window": 8, "final_logit_softcapping": 12.0},
            "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _PLAIN},
        },
        {
            **{**_HEADS, "rope.freq_base": 800.0, "rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
            **{"rope.freq_base_swa": 900.0, "attention.sliding_window": 8, "attention.scale": 0.1},
            "final_logit_softcapping": 12.0,
        },
    ),
    "phi 3, part of a head": (
        "phi3",
        {
            **{"sliding_window": 10, "original_max_position_embeddings": 32},
            "rope_parameters": {
                **{**_LONG, "partial_rotary_factor": 0.75, "attention_factor": 1.25},
                **{"long_factor": [4.0, 3.0, 2.0, 1.5, 1.0, 1.0], "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]},
            },
        },
        {
            **{"rope.freq_base": 600.0, "rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.25},
            **{"rope.scaling.original_context_length": 32, "rope.dimension_count": 12, "attention.sliding_window": 10},
            **{"attention.key_length": 16, "attention.value_length": 16},
        },
    ),
    "qwen 3 with experts": (
        "qwen3_moe",
        {
            **{"head_dim": 16, "moe_intermediate_size": 48, "norm_topk_prob": True},
            **{"num_experts": 6, "num_experts_per_tok": 3},
        },
        {
            **{"rope.freq_base": 10000.0, "attention.key_length": 16, "attention.value_length": 16},
            **{"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 48},
        },
    ),
    "phi 3, its own factor": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {**_LONG, "factor": 16.0, "long_factor": [4.0] * 8, "short_factor": [1.5] * 8},
        },
        {
            **{"rope.freq_base": 600.0, "rope.scaling.type": "longrope", "rope.dimension_count": 16},
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(16) / math.log(32)),
            **{"rope.scaling.original_context_length": 32, "attention.key_length": 16, "attention.value_length": 16},
        },
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_every_field_of_the_architecture_is_read_back(tmp_path: Path, case: str) -> None:
    """Story: yarn's attention factor and betas, soft caps, windows were left out in silence."""
    model_type, changes, expected = FIELDS[case]
    folder = make_model(tmp_path / "model", model_type, **{**_SIZES, **changes})
    source = ModelSource("m", folder)
    assert why_not_written(source, load_tokenizer(source)) is None
    reader = GGUFReader(write_gguf(folder, "f32")[0])
    start = f"{FAMILIES[model_type].architecture}."
    found = {name.removeprefix(start): f.contents() for name, f in reader.fields.items() if name.startswith(start)}
    wanted = {**_WRITTEN, **expected}
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value == pytest.approx(wanted[name], rel=1e-6) if isinstance(value, float) else value == wanted[name], (
            name
        )
    factors = {t.name: t.data.tolist() for t in reader.tensors if t.name.startswith("rope_factors")}
    if model_type == "phi3":
        rope = changes["rope_parameters"]
        assert factors == {f"rope_factors_{n}.weight": pytest.approx(rope[f"{n}_factor"]) for n in ("long", "short")}


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        *((name, {}, f"models of the type {name}") for name in ("gpt2", "mixtral", "qwen2_moe", "gpt_oss", "glm4_moe")),
        ("llama", {"hidden_act": "relu"}, "activation relu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "type dynamic"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}, "another pattern"),
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, "soft caps of its attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
        ("gemma3_text", {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _LINEAR}}, "types linear"),
        ("gemma3_text", {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _PLAIN}}, "and yarn"),
        ("qwen3", {"attention_bias": True}, "biases"),
        ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}, "blocks that have no experts"),
        ("qwen3_moe", {"norm_topk_prob": False}, "shares do not make 1"),
        ("llama", {"rope_parameters": {**_YARN, "truncate": False}}, "yarn with truncate: False"),
        ("qwen2", {"rope_parameters": {**_LINEAR, "partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
        ("llama", {"rope_parameters": {**_LONG, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}}, "type longrope"),
    ],
)
def test_other_families_are_left_to_the_converter(
    tmp_path: Path, model_type: str, changes: dict[str, Any], expected: str
) -> None:
    source = ModelSource("m", make_model(tmp_path / "model", model_type, **changes))
    assert expected in str(why_not_written(source, load_tokenizer(source)))


def test_a_converter_writes_the_types_that_it_knows(tmp_path: Path) -> None:
    """What is written neither here nor there is said before anything is written."""
    make_model(tmp_path / "model", "mixtral")
    refused = run(tmp_path, "export", "model", "--to", "copy", "--gguf").expect(2)
    assert "models of the type mixtral" in refused.err and "git clone" in refused.err
    assert "--gguf --converter llama.cpp/convert_hf_to_gguf.py" in refused.err
    assert not (tmp_path / "copy").exists()
    words = ("export", "model", "--gguf", "q8_0", "--converter", "convert.py", "--to")
    missing = run(tmp_path, *words, "by").expect(2).err
    assert "--gguf needs llama.cpp's" in missing and "no file convert.py" in missing
    (tmp_path / "convert.py").write_text("import sys; open(sys.argv[3], 'w').write(sys.argv[5])")
    run(tmp_path, *words, "by").expect(0)
    assert (tmp_path / "by" / GGUF_NAME).read_text() == "q8_0"
    assert (tmp_path / "by" / "Modelfile").read_text().startswith("FROM ./model.gguf\n")
    assert "does not write this type" in run(tmp_path, *words, "x", "--gguf", "q4_0").expect(2).err
    unknown = run(tmp_path, *words, "x", "--gguf", "q4_k_m").expect(2).err
    assert "llama-quantize" in unknown and "q4_k_m" in unknown


def test_what_the_file_cannot_say_is_told(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "mistral", sliding_window=8, attention_bias=False)
    expected = "no sliding window for this family: answers differ beyond 8 tokens"
    assert any(expected in note for note in write_gguf(folder, "bf16")[1])
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    rope |= {"original_max_position_embeddings": 8192}
    slowed = make_model(tmp_path / "slowed", "llama", head_dim=128, num_hidden_layers=1, rope_parameters=rope)
    (factors,) = (t.data for t in GGUFReader(write_gguf(slowed, "bf16")[0]).tensors if t.name == "rope_freqs.weight")
    assert factors[0] == 1.0 and factors[-1] == 8.0 and sorted(factors) == list(factors) and len(factors) == 64
    odd = make_model(tmp_path / "odd", "llama", hidden_size=72, intermediate_size=100, head_dim=16)
    assert write_gguf(odd, "q4_0")[1][0] == "matrices in the GGUF file are bf16 and q4_0"
    (tmp_path / "odd" / GGUF_NAME).unlink()
    short = make_model(tmp_path / "short", "llama")
    tokenizer = byte_pairs()
    tokenizer.add_tokens([f"<{n}>" for n in range(60)])
    tokenizer.save_pretrained(str(short))
    refused = run(tmp_path, "export", "short", "--to", "copy", "--gguf").expect(2)
    assert "has a token for which the model has no embedding" in refused.err


def test_a_type_may_be_left_out() -> None:
    assert with_gguf_type([]) == []
    assert with_gguf_type(["out", "--gguf"]) == ["out", "--gguf", "bf16"]
    assert with_gguf_type(["--gguf", "out", "--merge"]) == ["--gguf", "bf16", "out", "--merge"]
    assert with_gguf_type(["out", "--gguf", "Q8_0"]) == ["out", "--gguf", "Q8_0"]
    assert with_gguf_type(["out", "--gguf=q4_0"]) == ["out", "--gguf=q4_0"]


def test_modes_follow_the_users_umask(tmp_path: Path) -> None:
    """Story: the GGUF file was readable by its owner alone: a server that ran as another user could not open it."""
    make_model(tmp_path / "model", num_hidden_layers=1)
    before = functools.partial(os.umask, 0o002)
    launch(tmp_path, "export", "model", "--to", "copy", "--gguf", "bf16", before=before).finish().expect(0)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "copy").iterdir()} == {0o664}
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o775


# --- adapters: names are llama.cpp's ----------------------------------------------------------------------------------

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATTERNS: dict[str, Any] = {
    "use_rslora": True,
    "rank_pattern": {"q_proj": 2, "down_proj": 7},
    "alpha_pattern": {"v_proj": 3.0},
}


def written(work: Path, model_type: str, sizes: dict[str, Any], **options: Any) -> Any:
    """Write the file of a random adapter of a random base; PEFT's model of both."""
    make_model(work / "base", model_type, **sizes)
    adapted = random_adapter(work / "base", work / "adapter", **options)
    if options.get("save_tables"):  # and trains them
        path = work / "adapter" / ADAPTER
        save_file({name: one if "lora" in name else one + 1 for name, one in load_file(path).items()}, path)
    write_adapter_gguf(work / "adapter", ModelSource("base", work / "base"), work / ADAPTER_GGUF)
    return adapted.eval()


def products_of(path: Path) -> dict[str, torch.Tensor]:
    """What a file adds to each weight, as llama.cpp computes it: alpha / rank B A, of tables A B^T."""
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
    parts = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    names = {name.rpartition(".")[0] for name in parts}
    assert parts.keys() == {f"{name}.lora_{part}" for name in names for part in "ab"}
    found = {}
    for name in names:
        a, b = parts[f"{name}.lora_a"], parts[f"{name}.lora_b"]
        product = a @ b.mT if name == "token_embd.weight" else b @ a
        found[name] = fields["adapter.lora.alpha"] / b.shape[-1] * product
    return found


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *((model_type, {"target_modules": "all-linear"}) for model_type in FAMILIES if model_type != "qwen3_moe"),
        ("llama", {"target_modules": "all-linear", **PATTERNS}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "k_proj"], "lora_alpha": 5}),
        ("qwen3", {"target_modules": [], "target_parameters": ["v_proj.weight"], "lora_alpha": 0}),
    ],
)
def test_added_to_the_base_s_file_it_makes_pefts_logits(tmp_path: Path, model_type: str, options: Any) -> None:
    """The base's own GGUF file, its tensors changed in place and read by transformers."""
    sizes = SIZES[model_type] | ({"tie_word_embeddings": False} if "lm_head" in options["target_modules"] else {})
    adapted = written(tmp_path, model_type, sizes, **options)
    products = products_of(tmp_path / ADAPTER_GGUF)
    reader = GGUFReader(write_gguf(tmp_path / "base", "f32")[0], "r+")
    for tensor in reader.tensors:
        if tensor.name in products:
            tensor.data[:] += products.pop(tensor.name).numpy()
    assert not products, "each has its weight"
    reader.data.flush()
    read = read_by_transformers(tmp_path / "base").double()
    assert difference(logits_of(read), logits_of(adapted.double())) < 1e-6


def fused(products: dict[str, torch.Tensor], block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gate, up, down = (products.pop(f"blk.{block}.ffn_{name}_exps.weight") for name in ("gate", "up", "down"))
    return gate, up, down


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "gpt_oss"])
def test_experts_have_stacked_factors(tmp_path: Path, model_type: str) -> None:
    """Gates and ups apart, as llama.cpp has them: GPT-OSS has their rows in turn, and its weights transposed."""
    options = {"target_modules": ["o_proj"], "target_parameters": EXPERTS, "rank_pattern": {"down_proj": 3}}
    adapted = written(tmp_path, model_type, {"num_hidden_layers": 2}, **options)
    products = products_of(tmp_path / ADAPTER_GGUF)
    model = load_whole(tmp_path / "base")
    for block, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.data += products.pop(f"blk.{block}.attn_output.weight")
        if not hasattr(layer.mlp, "experts"):
            continue
        gate, up, down = fused(products, block)
        experts, both = layer.mlp.experts, torch.cat([gate, up], 1)
        if model_type == "gpt_oss":
            both, down = torch.stack([gate, up], 2).flatten(1, 2).mT, down.mT
        experts.gate_up_proj.data += both
        experts.down_proj.data += down
    assert not products and difference(logits_of(model), logits_of(adapted)) < 1e-6


def test_names_and_shapes_are_those_of_the_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `convert_lora_to_gguf.py` of llama.cpp (in llama-cpp-python 0.3.36) writes them."""
    written(tmp_path, "llama", {"num_hidden_layers": 1}, target_modules="all-linear")
    monkeypatch.chdir(tmp_path / "adapter")
    write_adapter_gguf(Path(), ModelSource("base", tmp_path / "base"), tmp_path / ADAPTER_GGUF)
    reader = GGUFReader(tmp_path / ADAPTER_GGUF)
    shapes = {tensor.name: tensor.data.shape for tensor in reader.tensors}
    sizes = {"attn_q": (64, 64), "attn_k": (64, 32), "attn_v": (64, 32), "attn_output": (64, 64)}
    sizes |= {"ffn_gate": (64, 128), "ffn_up": (64, 128), "ffn_down": (128, 64)}
    assert shapes == {
        **{f"blk.0.{name}.weight.lora_a": (4, inputs) for name, (inputs, _) in sizes.items()},
        **{f"blk.0.{name}.weight.lora_b": (outputs, 4) for name, (_, outputs) in sizes.items()},
    }
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32"}
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["general.name"].contents() == "adapter", "the folder's, though it was called `.`"
    assert reader.fields["adapter.lora.alpha"].contents() == 8


def test_the_language_model_inside_a_multimodal_one(tmp_path: Path) -> None:
    save_wrapper(tiny_wrapper("gemma3"), tmp_path / "base")
    random_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=r".*language_model.*q_proj")
    base = ModelSource("base", tmp_path / "base")
    write_adapter_gguf(tmp_path / "adapter", base, tmp_path / ADAPTER_GGUF)
    names = set(products_of(tmp_path / ADAPTER_GGUF))
    assert names and names == {f"blk.{block}.attn_q.weight" for block in range(len(names))}
    random_adapter(tmp_path / "base", tmp_path / "vision", target_modules=r".*vision.*q_proj")
    with pytest.raises(RefusedError, match="no place") as caught:
        write_adapter_gguf(tmp_path / "vision", base, tmp_path / ADAPTER_GGUF)
    assert "vision_tower" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.modules_to_save"),
        ({"trainable_token_indices": [5, 9]}, "trainable_tokens_delta"),
        ({"save_tables": True}, "lm_head.weight"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"use_bdlora": {"target_modules_bd_b": ["q_proj"], "nblocks": 2}}, "use_bdlora"),
        ({"target_modules": ["embed_tokens"]}, "which embedding and LM head share"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_llama_cpp_has_no_place_for_is_refused_by_name(tmp_path: Path, options: Any, expected: str) -> None:
    with pytest.raises(RefusedError, match="no place for a part") as caught:
        written(tmp_path, "qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 1}, **options)
    assert expected in caught.value.problems[0].found and "--merge" in caught.value.problems[0].hint
    assert not (tmp_path / ADAPTER_GGUF).exists()


def test_export_writes_adapter_card_and_modelfile(tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "top_k": 7}))
    random_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    words = ("export", "adapter", "--base", "base", "--to", "out", "--gguf")
    document = json.loads(run(tmp_path, *words, "--json").expect(0).out)
    assert document["files"][ADAPTER_GGUF] == (tmp_path / "out" / ADAPTER_GGUF).stat().st_size > 0
    assert not document["merged"] and GGUF_NAME not in document["files"]
    lines = (tmp_path / "out" / "Modelfile").read_text().splitlines()
    assert lines[:2] == [f"FROM {tmp_path / 'base'}", f"ADAPTER ./{ADAPTER_GGUF}"] and "PARAMETER top_k 7" in lines
    assert ADAPTER_GGUF in (tmp_path / "out" / "README.md").read_text()
    assert len(products_of(tmp_path / "out" / ADAPTER_GGUF)) == 6
    for more, expected in (
        (("q8_0",), "adapters are written in float32"),
        (("f32", "--converter", "convert.py"), "--converter is for whole models"),
    ):
        assert expected in run(tmp_path, *words[:-2], "other", "--gguf", *more).expect(2).err
    make_model(tmp_path / "gpt2", "gpt2")
    random_adapter(tmp_path / "gpt2", tmp_path / "of-gpt2", target_modules=["c_attn"])
    refused = run(tmp_path, "export", "of-gpt2", "--base", "gpt2", "--to", "no", "--gguf").expect(2).err
    assert "the type gpt2" in refused and "--merge" in refused and not (tmp_path / "no").exists()
