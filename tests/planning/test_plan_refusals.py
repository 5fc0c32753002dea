"""`plan` refuses what `finetune` refuses, with its words, and says where a parameter count is a guess. No torch."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from roundpipe_cli.cli.parameter_counts import build_counts
from roundpipe_cli.cli.plan import plan_document, plan_text
from roundpipe_cli.cli.training import refuse_too_large
from roundpipe_cli.costs.exact_counts import is_counted_exactly
from roundpipe_cli.costs.models import COUNTED_TYPES, MAX_COUNT_ERROR, parse_config
from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.model.files.source import ModelSource, resolve_model
from roundpipe_cli.model.load import load_config
from roundpipe_cli.planning.admission import check_rows
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.question import ask
from roundpipe_cli.recipe.load import load_recipe
from tests.support.tiny import EXTRA

STAGES = ("pipeline.forward_stages=[[0,2]]", "pipeline.backward_stages=[[3,4],[0,2]]")
"""Of three blocks: the planner's search takes a second."""
FIGURES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128},
}
UNTAUGHT = "ernie4_5_moe"  # a type that trains, and whose parameters `plan` does not count right
MIDDLE = {  # no model's own shape, so that no count agrees by luck
    **{"vocab_size": 5000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 5},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
OF_EXPERTS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "n_routed_experts", "n_shared_experts"),
    *("n_group", "topk_group", "first_k_dense_replace"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 10)
    (tmp_path / "recipe.yaml").write_text(
        f"model: {tmp_path}/model\ndatasets: [{{path: {tmp_path}/rows.jsonl}}]\n"
        f"output_dir: {tmp_path}/out\nmax_seq_length: 64\n"
    )
    return tmp_path


def put_config(folder: Path, model_type: str, **values: Any) -> None:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps({**FIGURES, "model_type": model_type, **values}))


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_a_quantised_base_that_finetune_reads_is_planned(folder: Path, method: str) -> None:
    put_config(folder, "llama", quantization_config={"quant_method": method})
    assert make_plan(load_recipe(folder / "recipe.yaml", STAGES), "1x4090").verdict.fits
    assert not hasattr(load_config(ModelSource("model", folder / "model")), "quantization_config")


def put_weights(folder: Path, *shapes: tuple[int, ...], name: str = "model.safetensors") -> None:
    tensors = {f"w{index}": torch.zeros(shape, dtype=torch.bfloat16) for index, shape in enumerate(shapes)}
    save_file(tensors, folder / "model" / name)


def refused_by_plan(folder: Path, *overrides: str) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        make_plan(load_recipe(folder / "recipe.yaml", overrides), "1x4090", build_counts)
    return caught.value


def refused_by_loading(folder: Path) -> RefusedError:
    """What `finetune` says of the model while it loads it, before any weights."""
    with pytest.raises(RefusedError) as caught:
        load_config(resolve_model(str(folder / "model"), revision=None, recipe_folder=folder, offline=True))
    return caught.value


@pytest.mark.parametrize(
    ("model_type", "values", "said"),
    [
        ("lama", {}, "unknown architecture"),
        ("", {}, "unknown architecture"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "not a decoder-only language model"),
        ("t5", {}, "not a decoder-only language model"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "needs code from its repository"),
        ("llama", {"_attn_implementation": "someone/kernel"}, "kernel from elsewhere"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "found: GPTQ, 4 bits"),
        ("llama", {"quantization_config": {"quant_method": "aqlm"}}, "quantised in a form"),
        ("llama", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt, NVFP4"),
        ("llama", {"quantization_config": {"load_in_8bit": True, "quant_method": "bitsandbytes"}}, "quantised in a"),
    ],
)
def test_plan_and_finetune_refuse_alike(folder: Path, model_type: str, values: dict[str, Any], said: str) -> None:
    put_config(folder, model_type, **values)
    put_weights(folder, (1,))
    planned, loaded = refused_by_plan(folder), refused_by_loading(folder)
    assert planned.problems == loaded.problems
    assert said in str(planned) and planned.exit_code == 2


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_config.json", "model.safetensors"])
def test_plan_looks_at_the_files_that_are_there(folder: Path, name: str) -> None:
    put_config(folder, "llama")
    (folder / "model" / name).write_bytes(b"garbage" * 9)
    assert refused_by_plan(folder).problems == refused_by_loading(folder).problems


def test_a_folder_with_a_configuration_alone_is_planned(folder: Path) -> None:
    put_config(folder, "llama")
    answer = make_plan(load_recipe(folder / "recipe.yaml", STAGES), "1x4090")
    assert answer.verdict.fits
    assert any("holds no weights" in line for line in answer.assumptions)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method=full", "load_in_4bit=true"], "load_in_4bit: such weights are frozen"),
        (["method=full", "weights=mmap"], "weights=mmap: such weights are frozen"),
        (["pipeline.forward_stages=[[0,2]]"], "forward_stages and backward_stages go together"),
        (["pipeline.schedule=1f1b", "pipeline.dispatch=earliest_free"], "1f1b binds its stages to workers"),
        (["pipeline.devices=[cpu,cuda:0]"], "processors and GPUs cannot work in one pool"),
    ],
)
def test_what_the_recipe_alone_decides_is_refused_at_once(folder: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(folder / "recipe.yaml", overrides)
    assert said in str(caught.value)


def test_files_in_4_bit_stay_so(folder: Path) -> None:
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    put_config(folder, "llama", quantization_config=nf4)
    assert ask(load_recipe(folder / "recipe.yaml"), "1x4090").settings.packed_as == "4bit"
    for change in ("method=full", "load_in_8bit=true", "load_in_16bit=true"):
        assert "in which they stay" in str(refused_by_plan(folder, change))


def test_packed_rows_and_scaled_positions(folder: Path) -> None:
    put_config(folder, "llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "position scaling by length" in str(refused_by_plan(folder, "packing=true", "max_seq_length=256"))
    ask(load_recipe(folder / "recipe.yaml", ["packing=true", "max_seq_length=128"]), "1x4090")


def test_hybrid_models_of_attention_alone_may_be_packed() -> None:
    config = {"model_type": "qwen3_next", "layer_types": ["full_attention"] * 3}
    check_rows(config, packing=True, chunks=True, max_seq_length=64)
    hybrid = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
    check_rows(hybrid, packing=True, chunks=True, max_seq_length=64)
    config = {"model_type": "lfm2", "layer_types": ["full_attention", "conv"]}
    with pytest.raises(RefusedError, match="packed rows"):
        check_rows(config, packing=True, chunks=False, max_seq_length=64)
    check_rows(config, packing=False, chunks=False, max_seq_length=64)
    with pytest.raises(RefusedError, match="in chunks"):
        check_rows(config, packing=False, chunks=True, max_seq_length=64)


# --- parameter counts -----------------------------------------------------------------------------------------------
def test_types_that_plan_was_taught_are_counted_right() -> None:
    from accelerate import init_empty_weights
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    wrong, known = {}, sorted(COUNTED_TYPES.intersection(CONFIG_MAPPING.keys()))  # older releases know fewer
    assert len(known) > 20
    for model_type in known:
        base = CONFIG_MAPPING[model_type]() if model_type != "hunyuan_v1_dense" else None
        experts = {key: value for key, value in EXTRA.get(model_type, {}).items() if key in OF_EXPERTS}
        values = {key: value for key, value in {**MIDDLE, **experts}.items() if base is None or hasattr(base, key)}
        if base is None:
            values["head_dim"] = 64
        config = CONFIG_MAPPING[model_type](**values)
        with warnings.catch_warnings(), init_empty_weights(include_buffers=False):
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        real = sum(parameter.numel() for parameter in model.parameters())
        values = json.loads(config.to_json_string())
        own = parse_config(values, name=model_type, source="tests")
        error = 0 if is_counted_exactly(values) else MAX_COUNT_ERROR
        if own.is_guess or abs(own.parameters / real - 1) > error:
            wrong[model_type] = own.parameters / real
    assert not wrong


def test_a_guessed_count_is_said_in_the_verdict(folder: Path) -> None:
    """Counts of types that `plan` was not taught were wrong by up to 3.3 times, without a word."""
    put_config(folder, UNTAUGHT)
    answer = make_plan(load_recipe(folder / "recipe.yaml", STAGES), "1x4090")
    lines = plan_text(answer, None)
    assert "(a guess: " in lines[0] and "the parameter count is a guess" in lines[2]
    assert any("is a guess" in line for line in plan_document(answer, None)["assumptions"])
    assert any("not known: whether `finetune` takes" in line for line in answer.assumptions)
    put_config(folder, "llama")
    known = make_plan(load_recipe(folder / "recipe.yaml", STAGES), "1x4090")
    said = [*plan_text(known, None)[:3], *known.assumptions]
    assert not any("a guess" in line or "not known: whether" in line for line in said)


@pytest.mark.parametrize(
    "metadata", [None, {"total_size": 1_038_400}, {"total_parameters": 519_200, "total_size": 9}], ids=str
)
def test_weights_that_are_here_or_in_an_index_are_counted(folder: Path, metadata: dict[str, int] | None) -> None:
    put_config(folder, UNTAUGHT, torch_dtype="bfloat16")
    if metadata is None:
        put_weights(folder, (300, 64), (1000, 500))
    else:
        index = {"metadata": metadata, "weight_map": {}}
        (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    architecture = ask(load_recipe(folder / "recipe.yaml"), "1x4090").architecture
    assert architecture.parameters == pytest.approx(519_200, rel=1e-4) and not architecture.is_guess
    source = "the headers of its weights" if metadata is None else "model.safetensors.index.json"
    assert f"by {source}" in architecture.notes[0]


def test_a_known_type_whose_files_hold_something_else_is_noticed(folder: Path) -> None:
    put_config(folder, "llama")
    own = ask(load_recipe(folder / "recipe.yaml"), "1x4090").architecture.parameters
    put_weights(folder, (own,))
    assert ask(load_recipe(folder / "recipe.yaml"), "1x4090").architecture.notes == ()
    put_weights(folder, (own + own // 10,))
    architecture = ask(load_recipe(folder / "recipe.yaml"), "1x4090").architecture
    assert architecture.parameters == pytest.approx(1.1 * own, rel=1e-3) and "-9%" in architecture.notes[0]


def test_a_guess_refuses_no_run(folder: Path) -> None:
    """`finetune` ends with 5 where `plan` knows that memory is short; a guessed count is no such knowledge."""
    put_config(folder, UNTAUGHT, hidden_size=64_000, vocab_size=10_000_000)
    with contextlib.suppress(RefusedError):
        refuse_too_large(ask(load_recipe(folder / "recipe.yaml", ["pipeline.devices=[cpu]"]), here=True))
