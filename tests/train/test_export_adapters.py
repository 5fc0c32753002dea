"""`export --merge` and `generate` take any adapter in PEFT's format: the merged model computes what PEFT does, and has
the tensors of its base's files: names, shapes and dtypes, per expert where they are so."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.lora import LoraSettings, add_lora, save_adapter
from roundpipe_cli.model.split import split_model
from roundpipe_cli.train.result.export import merge_result
from roundpipe_cli.train.result.generate import load_result
from roundpipe_cli.train.result.gguf_file import write_gguf
from tests.model.test_stored_formats import save_quantized
from tests.support.adapters import ADAPTER, CONFIG, by_peft, layout, load_whole, random_adapter
from tests.support.e2e import make_model, make_tokenizer, run
from tests.support.tiny import logits_of
from tests.support.wrappers import save_wrapper, tiny_wrapper

EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"


def adapter(work: Path, **options: Any) -> Any:
    """A random adapter of the model in `base`; returns PEFT's model."""
    return random_adapter(work / "base", work / "adapter", **options)


def merge(work: Path, dtype: str | None = None) -> str:
    """What is told of a merge."""
    told = list[str]()
    merge_result(work / "adapter", ModelSource("base", work / "base"), work / "merged", dtype, tell=told.append)
    return "\n".join(told)


def check(work: Path, expected: torch.Tensor | None = None) -> str:
    """A merge and `generate` have these logits, PEFT's by default, which the adapter changes. Returns what is told."""
    base = load_whole(work / "base")
    without = logits_of(base)
    expected = by_peft(base, work / "adapter") if expected is None else expected
    told = merge(work)
    bound = 1e-5 * max(1.0, float(expected.abs().max()))
    assert torch.allclose(logits_of(load_whole(work / "merged")), expected, rtol=1e-5, atol=bound)
    answering, _ = load_result(work / "adapter", ModelSource("base", work / "base"), "float32", is_adapter=True)
    assert torch.allclose(logits_of(answering), expected, rtol=1e-5, atol=bound)
    assert not torch.allclose(without, expected, atol=1e-2)
    return told


# --- one table, two tables --------------------------------------------------------------------------------------------

HEADS = {"llama": "embed_tokens", "gpt2": "wte"}


@pytest.mark.covering(2)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("touched", ["head", "embedding", "both"])
@pytest.mark.parametrize("how", ["modules_to_save", "target_modules"])
@pytest.mark.parametrize("model_type", HEADS)
def test_a_table_that_the_adapter_changes_is_written_on_its_own(
    tmp_path: Path, model_type: str, how: str, touched: str, is_tied: bool
) -> None:
    """Story: of a tied base one table was written, for embedding and head: logits were off by 6."""
    make_model(tmp_path / "base", model_type, tie_word_embeddings=is_tied)
    names = {"head": ["lm_head"], "embedding": [HEADS[model_type]], "both": ["lm_head", HEADS[model_type]]}[touched]
    inner = "c_attn" if model_type == "gpt2" else "q_proj"
    options = {"modules_to_save": names, "target_modules": [inner]} if how == "modules_to_save" else {}
    adapter(tmp_path, **(options or {"target_modules": [inner, *names]}))
    assert ("no longer tied" in check(tmp_path)) == is_tied
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False


def test_tables_that_peft_keeps_tied_stay_tied(tmp_path: Path) -> None:
    make_model(tmp_path / "base", tie_word_embeddings=True)
    adapter(tmp_path, ensure_weight_tying=True, modules_to_save=["lm_head"])
    assert not check(tmp_path) and "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_tied_base_with_both_tables_in_its_files_is_untied(tmp_path: Path) -> None:
    make_model(tmp_path / "base", tie_word_embeddings=True)
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    adapter(tmp_path, modules_to_save=["lm_head"])
    told = check(tmp_path)
    assert "no longer tied" in told and "as it has them" not in told


def test_a_tied_gguf_base_is_untied(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base", tie_word_embeddings=True)
    adapter(tmp_path, modules_to_save=["lm_head"])
    expected = by_peft(load_whole(folder), tmp_path / "adapter")
    source = ModelSource("base", folder, write_gguf(folder, "f32")[0].name)
    merge_result(tmp_path / "adapter", source, tmp_path / "merged", "float32", tell=print)
    assert torch.allclose(logits_of(load_whole(tmp_path / "merged")), expected, rtol=1e-4, atol=1e-4)


# --- the tensors of the base's files ----------------------------------------------------------------------------------

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]}),
        ("hrm_text", {"target_modules": ["q_proj", "up_proj"]}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_merged_model_has_its_base_s_tensors(tmp_path: Path, model_type: str, options: dict[str, Any]) -> None:
    """Other programs read the published names, of which the model's own know nothing; it loads without a word."""
    make_model(tmp_path / "base", model_type)
    adapted = adapter(tmp_path, **options)
    assert not merge(tmp_path)
    assert layout(tmp_path / "merged") == layout(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
    expected = logits_of(adapted)
    assert torch.allclose(
        logits_of(load_whole(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
    )


def test_each_tensor_keeps_its_own_dtype_and_its_name_without_a_prefix(tmp_path: Path) -> None:
    """A shared matrix under both names, norms in float32, a layer that the architecture has no place for: all stay."""
    make_model(tmp_path / "base", "llama", dtype="bfloat16", tie_word_embeddings=True)
    adapter(tmp_path, target_modules=["up_proj"])
    path = tmp_path / "base" / "model.safetensors"
    tensors = {key: tensor.float() if "norm" in key else tensor for key, tensor in load_file(path).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.61.extra.weight"] = torch.ones(3)
    save_file({key.removeprefix("model."): tensor for key, tensor in tensors.items()}, path, {"format": "pt"})
    merge(tmp_path)
    assert layout(tmp_path / "merged") == layout(tmp_path / "base")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged["lm_head.weight"], merged["embed_tokens.weight"])
    assert not torch.equal(merged["layers.0.mlp.up_proj.weight"], tensors["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(merged["layers.61.extra.weight"], torch.ones(3))


def test_dequantised_weights_are_listed(tmp_path: Path) -> None:
    adapter_base = make_model(tmp_path / "unquantised")
    random_adapter(adapter_base, tmp_path / "adapter", target_modules=["v_proj"])
    _, references = save_quantized(tmp_path / "base", "llama", "fp8-blocks")
    make_tokenizer().save_pretrained(str(tmp_path / "base"))
    told = merge(tmp_path, "bfloat16")
    kinds = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in references}
    assert set(told.partition("whole here: ")[2].split(", ")) == kinds
    expected = {key: entry for key, entry in layout(tmp_path / "base").items() if not key.endswith("_scale_inv")}
    expected |= {key: ("BF16", entry[1]) for key, entry in expected.items() if key in references}
    assert layout(tmp_path / "merged") == expected
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_a_module_is_merged_whole_where_its_tensors_are_of_two_types(tmp_path: Path) -> None:
    """Story: with biases in float32 modules were merged twice, the second time, for the weight, without the adapter."""
    make_model(tmp_path / "base", "qwen2", dtype="bfloat16")
    path = tmp_path / "base" / "model.safetensors"
    tensors = {name: one.float() if name.endswith(".bias") else one for name, one in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    adapter(tmp_path, target_modules=["q_proj", "v_proj"])
    merge(tmp_path)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name for name, one in merged.items() if one.dtype == torch.float32} == {n for n in tensors if "bias" in n}
    changed = {name.split(".")[-2] for name, one in merged.items() if not torch.equal(one, tensors[name])}
    assert changed == {"q_proj", "v_proj"}


@pytest.mark.parametrize("what", ["kasa", "velora", "monteclora"])
def test_generate_takes_adapters_that_only_peft_can_compute_with(tmp_path: Path, what: str) -> None:
    """As the refusals of `--merge` say."""
    make_model(tmp_path / "base")
    kinds = {"kasa": peft.KasaConfig, "velora": peft.VeloraConfig, "monteclora": peft.MontecloraConfig}
    adapter(tmp_path, **{f"{what}_config": kinds[what]()})
    expected = by_peft(load_whole(tmp_path / "base"), tmp_path / "adapter")
    answering, _ = load_result(tmp_path / "adapter", ModelSource("base", tmp_path / "base"), "float32", is_adapter=True)
    assert torch.equal(logits_of(answering), expected)
    with pytest.raises(RefusedError):
        merge(tmp_path)


# --- what else may be in an adapter's folder --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        (
            "qwen2",
            {
                **{"use_rslora": True, "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2}},
                **{"alpha_pattern": {"q_proj": 3}, "exclude_modules": ["layers.1.self_attn.q_proj"], "bias": "all"},
            },
        ),
        ("llama", {"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}),
        (
            "llama",
            {
                **{"target_modules": [], "target_parameters": ["q_proj.weight"]},
                **{"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]},
            },
        ),
        ("llama", {"use_bdlora": {"target_modules_bd_b": ["q_proj"], "nblocks": 2}}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_peft_computes_is_merged(tmp_path: Path, model_type: str, options: dict[str, Any]) -> None:
    """`lora_bias`, trained biases, adapters on the embedding and tables beside them "did not fit the base model"."""
    make_model(tmp_path / "base", model_type)
    adapter(tmp_path, **options)
    check(tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kept", [(EMBEDDING, HEAD), (EMBEDDING,)], ids=["both", "embedding"])
def test_tables_beside_the_adapter_replace_the_base_s(tmp_path: Path, kept: tuple[str, ...], is_tied: bool) -> None:
    """Programs that add tokens save both tables whole with the adapter (`save_embedding_layers`)."""
    make_model(tmp_path / "base", tie_word_embeddings=is_tied)
    adapter(tmp_path, save_tables=True)
    path = tmp_path / "adapter" / ADAPTER
    tensors = {key: tensor for key, tensor in load_file(path).items() if key in kept or ".lora_" in key}
    change = 0.3 * torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    save_file({key: tensor + change if key in kept else tensor for key, tensor in tensors.items()}, path)
    told = check(tmp_path)
    assert "no longer tied" not in told and "model.embed_tokens.weight" in told.partition("place of the base")[2]


def test_tables_of_another_size_are_refused_with_the_reason(tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    adapter(tmp_path, save_tables=True)
    path = tmp_path / "adapter" / ADAPTER
    tensors = load_file(path)
    save_file({**tensors, HEAD: torch.zeros(304, 64), EMBEDDING: torch.zeros(304, 64)}, path)
    with pytest.raises(RefusedError, match="another vocabulary") as caught:
        merge(tmp_path)
    assert "304 rows" in str(caught.value) and "300 rows" in str(caught.value)


def test_a_bias_that_the_base_has_no_place_for_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "base")
    adapter(tmp_path, lora_bias=True)
    with pytest.raises(RefusedError, match="lora_bias"):
        merge(tmp_path)


def test_an_adapter_without_a_tokenizer_has_its_base_s(tmp_path: Path) -> None:
    """PEFT saves none: `export` and `generate` could not "instantiate the backend tokenizer"."""
    make_model(tmp_path / "base")
    adapter(tmp_path)
    done = run(tmp_path, "export", "adapter", "--merge", "--base", "base", "--to", "merged").expect(0)
    assert "merged 3 modules" in done.err
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")("one two").input_ids
    assert tokens == make_tokenizer()("one two").input_ids
    run(tmp_path, "generate", "adapter", "one", "--base", "base", "--max-new-tokens", "2").expect(0)
    copied = run(tmp_path, "export", "adapter", "--to", "copy").expect(0)
    assert "no tokenizer" in copied.err
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {CONFIG, ADAPTER, "README.md"}


# --- adapters of transformers 4 ---------------------------------------------------------------------------------------

MLP = ("gate_proj", "up_proj", "down_proj")


def adapter_of_experts(base: Path, folder: Path, targets: tuple[str, ...], **values: Any) -> torch.Tensor:
    """An adapter of a Linear for each expert, as transformers 4 had them, and the logits of base and products."""
    stored = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    layers = values.get("layers_to_transform")
    tensors, changed = {}, dict(stored)
    for key, weight in stored.items():
        number = next((int(part) for part in key.split(".") if part.isdigit()), -1)
        if weight.dim() == 2 and key.split(".")[-2] in targets and (layers is None or number in layers):
            a = torch.randn(4, weight.shape[1], generator=generator) * 0.1
            b = torch.randn(weight.shape[0], 4, generator=generator) * 0.1
            path = f"base_model.model.{key.removesuffix('.weight')}"
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
            changed[key] = weight + (4.0 if values.get("use_rslora") else 2.0) * (b @ a)
    folder.mkdir()
    save_file(tensors, folder / ADAPTER)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(targets), "lora_dropout": 0.05}
    (folder / CONFIG).write_text(json.dumps({**config, **values}))
    reference = folder.with_name("reference")
    reference.mkdir()
    (reference / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(changed, reference / "model.safetensors", {"format": "pt"})
    return logits_of(load_whole(reference))


@pytest.mark.parametrize(
    ("model_type", "targets", "values"),
    [
        ("mixtral", ("q_proj", "w1", "w2", "w3", "gate"), {"layers_to_transform": [0, 2]}),
        ("qwen2_moe", ("q_proj", *MLP), {"use_rslora": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_adapters_of_single_experts_are_merged(
    tmp_path: Path, model_type: str, targets: tuple[str, ...], values: dict[str, Any]
) -> None:
    """With shared experts beside them, or rsLoRA, PEFT itself loads them wrong without an error."""
    make_model(tmp_path / "base", model_type)
    expected = adapter_of_experts(tmp_path / "base", tmp_path / "adapter", targets, **values)
    check(tmp_path, expected)


def test_half_of_a_fused_parameter_is_refused_with_the_reason(tmp_path: Path) -> None:
    make_model(tmp_path / "base", "qwen3_moe")
    adapter_of_experts(tmp_path / "base", tmp_path / "adapter", ("gate_proj",))
    with pytest.raises(RefusedError, match="one parameter for all experts") as caught:
        merge(tmp_path)
    assert "gate_proj" in str(caught.value)


def wrapped(model_type: str, folder: Path) -> None:
    """A tiny multimodal model by its own class."""
    save_wrapper(tiny_wrapper(model_type), folder)
    make_tokenizer().save_pretrained(folder)


def _as_llava_was(name: str) -> str:
    name = name.replace("base_model.model.lm_head", "base_model.model.language_model.lm_head")
    return name.replace("model.language_model.layers", "language_model.model.layers")


def _as_qwen_was(name: str) -> str:
    return name.replace("model.language_model.layers", "model.layers")


@pytest.mark.covering(1)
@pytest.mark.parametrize("lists_paths", [False, True], ids=["names", "paths"])
@pytest.mark.parametrize(("model_type", "older"), [("llava", _as_llava_was), ("qwen2_5_vl", _as_qwen_was)])
def test_older_names_around_a_wrapped_language_model(
    tmp_path: Path, model_type: str, older: Callable[[str], str], lists_paths: bool
) -> None:
    """Story: PEFT leaves out adapters with names of transformers 4, or fails: `generate` answered as the base does."""
    wrapped(model_type, tmp_path / "base")
    paths = [f"model.language_model.layers.{n}.mlp.down_proj" for n in range(2)]
    names = paths if lists_paths else ["down_proj"]
    adapter(tmp_path, target_modules=names, modules_to_save=["lm_head"])
    expected = by_peft(load_whole(tmp_path / "base"), tmp_path / "adapter")
    path, config = tmp_path / "adapter" / ADAPTER, tmp_path / "adapter" / CONFIG
    save_file({older(key): tensor for key, tensor in load_file(path).items()}, path)
    config.write_text(older(config.read_text()))
    check(tmp_path, expected)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [("glm4_moe", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")), ("gpt_oss", ())],
)
def test_the_layout_that_vllm_documents(model_type: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """Names of single experts, with PEFT's products; of gpt-oss vLLM reads PEFT's names. It is read here too."""
    make_model(tmp_path / "base", model_type)
    model = build_skeleton(load_config(ModelSource("base", tmp_path / "base")), torch.float32)
    settings = LoraSettings(r=8, alpha=16, expert_r=2)
    blocks = split_model(model).blocks_path
    peft_model = add_lora(model, settings, dtype=torch.float32, base_name="base", blocks_path=blocks)
    torch.manual_seed(0)
    masters = {name: torch.randn(one.shape) * 0.2 for name, one in model.named_parameters() if one.requires_grad}
    save_adapter(peft_model, masters, tmp_path / "adapter")
    for name, values in masters.items():
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module)._parameters[attribute] = torch.nn.Parameter(values)
    done = run(tmp_path, "export", "adapter", "--to", "vllm", "--base", "base", "--adapter-layout", "vllm").expect(0)
    assert ("no names changed" in done.err) == (not names) and "changes fused experts" not in done.err
    found = load_file(tmp_path / "vllm" / ADAPTER)
    if not names:
        assert (tmp_path / "vllm" / ADAPTER).read_bytes() == (tmp_path / "adapter" / ADAPTER).read_bytes()
        return
    config = json.loads((tmp_path / "vllm" / CONFIG).read_text())
    path = f"model.layers.{len(model.model.layers) - 1}"
    down = model.get_submodule(f"{path}.mlp.experts")
    factors = [one.get_delta_factors("default") for one in (down.base_layer, down)]
    expected = dict(zip(("gate_up", "down"), (scale * b @ a for b, a, scale in factors), strict=True))
    for expert in range(4):
        keys = [f"base_model.model.{path}.{name.format(expert)}" for name in names]
        gate, up, out = ((found[f"{key}.lora_B.weight"] @ found[f"{key}.lora_A.weight"]) * 16 / 8 for key in keys)
        assert found[f"{keys[0]}.lora_A.weight"].shape == (2, 64)
        for ours, theirs in ((torch.cat([gate, up]), expected["gate_up"]), (out, expected["down"])):
            assert torch.allclose(ours, theirs[expert], rtol=1e-5, atol=1e-5)
    assert not [key for key in found if ".experts.lora" in key or "base_layer" in key]
    assert {key.split(".lora_")[0].rpartition(".")[2] for key in found} == set(config["target_modules"])
    for key in found:  # vLLM 0.33 and PEFT take the first pattern that matches
        layer = key.removeprefix("base_model.model.").partition(".lora_")[0]
        rank, alpha = (
            next(
                (value for pattern, value in config[word].items() if re.match(rf"(.*\.)?({pattern})$", layer)), default
            )
            for word, default in (("rank_pattern", 8), ("alpha_pattern", 16))
        )
        assert alpha / rank == 2 and rank == found[key].shape[0 if "lora_A" in key else 1]
    expected_logits = by_peft(load_whole(tmp_path / "base"), tmp_path / "adapter")
    (tmp_path / "adapter").rename(tmp_path / "as-peft-has-it")
    (tmp_path / "vllm").rename(tmp_path / "adapter")
    check(tmp_path, expected_logits)


def test_layouts_of_adapters_that_are_refused(tmp_path: Path) -> None:
    """An unknown one; and of what is no adapter, or is merged. Without experts the names stay."""
    make_model(tmp_path / "base")
    adapter(tmp_path)
    layout = ("--to", "copy", "--adapter-layout")
    assert "unknown layout of adapters" in run(tmp_path, "export", "adapter", *layout, "gguf").expect(2).err
    for words in (("base", *layout, "vllm"), ("adapter", "--merge", *layout, "vllm")):
        assert "--adapter-layout is for adapters" in run(tmp_path, "export", *words).expect(2).err
    assert "no names changed" in run(tmp_path, "export", "adapter", *layout, "vllm", "--base", "base").expect(0).err
