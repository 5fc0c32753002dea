"""GGUF files of adapters: added to the base by another reader, they make PEFT's logits; names are llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.train.result.gguf_adapter import write_adapter_gguf
from roundpipe_cli.train.result.gguf_file import FAMILIES, write_gguf
from roundpipe_cli.train.result.gguf_types import ADAPTER_GGUF, GGUF_NAME
from tests.support.adapters import ADAPTER, load_whole, random_adapter
from tests.support.e2e import make_model, run
from tests.support.tiny import logits_of
from tests.support.wrappers import save_wrapper, tiny_wrapper
from tests.train.test_gguf_file import SIZES, read_by_transformers

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


def test_names_and_shapes_are_those_of_the_converter(tmp_path: Path) -> None:
    """As `convert_lora_to_gguf.py` of llama.cpp (in llama-cpp-python 0.3.36) writes them."""
    written(tmp_path, "llama", {"num_hidden_layers": 1}, target_modules="all-linear")
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
