"""Modules and tables that stand whole beside an adapter or an embedding: trained, merged, continued, exported."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoTokenizer

from tests.support.adapters import by_peft, load_whole, random_adapter
from tests.support.e2e import STAGES, STAGES_OF_TWO, finetune, make_model, make_tokenizer, make_workspace, metrics, run
from tests.support.tiny import logits_of

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "inside a saved one": ("llama", {"modules_to_save": ["self_attn"], "target_modules": "all-linear"}),
    "a pattern": ("llama", {"modules_to_save": ["self_attn", "norm"], "target_modules": ".*(q_proj|gate_proj)"}),
    "both": ("llama", {"modules_to_save": ["q_proj"], "target_modules": ["q_proj", "v_proj"]}),
    "a whole block": ("llama", {"modules_to_save": ["layers.1"], "target_modules": ["q_proj"]}),
    "experts with a buffer": ("glm4_moe", {"modules_to_save": ["mlp"], "target_modules": ["q_proj"]}),
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each type, two blocks; the router's buffer has values."""
    root = tmp_path_factory.mktemp("bases")
    made = {name: make_model(root / name, name, num_hidden_layers=2) for name in ("llama", "glm4_moe")}
    weights = load_file(made["glm4_moe"] / "model.safetensors")
    weights[BIAS] = torch.tensor([0.9, -0.4, 0.2, 0.5])
    save_file(weights, made["glm4_moe"] / "model.safetensors", {"format": "pt"})
    return made


@pytest.mark.parametrize("case", CASES)
def test_a_module_trained_whole_is_merged_and_continued(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Story: such a run trained to its end; then "18 tensors missing", or a target "that does not exist"."""
    model_type, names = CASES[case]
    changes = {f"lora__{key}": value for key, value in names.items()}
    work = make_workspace(tmp_path / "work", bases[model_type], max_steps=2, **STAGES_OF_TWO, **changes)
    finetune(work).expect(0)
    expected = by_peft(load_whole(work / "model"), work / "out")
    assert float((expected - logits_of(load_whole(work / "model"))).abs().max()) > 1e-3
    run(work, "export", "out", "--merge", "--to", "merged").expect(0)
    assert torch.allclose(logits_of(load_whole(work / "merged")), expected, atol=1e-5)
    finetune(work, "lora.start_from=out", "output_dir=out2", "max_steps=1", "learning_rate=1e-12").expect(0)
    assert torch.allclose(by_peft(load_whole(work / "model"), work / "out2"), expected, atol=1e-6)
    run(work, "export", "out/step-2", "--to", "exported").expect(0)
    assert torch.equal(by_peft(load_whole(work / "model"), work / "exported"), expected)
    if case in ("inside a saved one", "experts with a buffer"):
        run(work, "generate", "out", "hello", "--max-new-tokens", "2").expect(0)
    if model_type == "glm4_moe":
        assert load_file(work / "out" / "adapter_model.safetensors")[f"base_model.model.{BIAS}"].abs().sum() > 0.1


def test_buffers_of_a_saved_module_are_the_adapter_s(bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT saves them with the module; they may be others than the base's."""
    (tmp_path / "base").symlink_to(bases["glm4_moe"])
    random_adapter(bases["glm4_moe"], tmp_path / "adapter", modules_to_save=["mlp"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(path) | {f"base_model.model.{BIAS}": torch.tensor([-2.0, 1.0, 3.0, 0.1])}, path)
    expected = by_peft(load_whole(bases["glm4_moe"]), tmp_path / "adapter")
    run(tmp_path, "export", "adapter", "--merge", "--base", "base", "--to", "merged").expect(0)
    assert torch.allclose(logits_of(load_whole(tmp_path / "merged")), expected, atol=1e-5)


def test_a_checkpoint_s_whole_result_has_the_base_s_buffers(bases: dict[str, Path], tmp_path: Path) -> None:
    """Story: `method: full` from a checkpoint had the buffers of a new model, zeros, in the place of the base's."""
    work = make_workspace(tmp_path / "work", bases["glm4_moe"], method="full", max_steps=1, **STAGES_OF_TWO)
    finetune(work).expect(0)
    run(work, "export", "out/step-1", "--to", "exported").expect(0)
    found = [load_file(work / name / "model.safetensors")[BIAS] for name in ("model", "out", "exported")]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and bool(found[0].any())


def test_a_module_inside_another_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    """PEFT cannot read what it would write."""
    names = {"lora__modules_to_save": ["self_attn", "q_proj"], "lora__target_modules": ["gate_proj"]}
    refused = finetune(make_workspace(tmp_path / "work", bases["llama"], **names)).expect(2)
    assert "q_proj, inside model.layers." in refused.err and "leave q_proj out" in refused.err


def test_a_module_inside_that_peft_finds_by_the_end_of_its_name_is_refused(tmp_path: Path) -> None:
    """Story: GPT-2's `attn` ended in a KeyError, since PEFT took its `c_attn` too."""
    base = make_model(tmp_path / "base", "gpt2")
    names = {"lora__modules_to_save": ["attn"], "lora__target_modules": ["c_fc"]}
    work = make_workspace(tmp_path / "work", base, max_steps=1, **STAGES, **names)
    refused = finetune(work).expect(2)
    assert "attn: transformer.h.0.attn.c_attn, inside transformer.h.0.attn" in refused.err
    finetune(work, "lora.modules_to_save=[h.0.attn, h.2.attn]").expect(0)
    run(work, "export", "out", "--merge", "--to", "merged").expect(0)
    expected = by_peft(load_whole(base), work / "out")
    assert torch.allclose(logits_of(load_whole(work / "merged")), expected, atol=1e-5)


# --- an LM head in the files beside an embedding that the configuration calls tied: the files decide ------------------

TEXT = "The cat sat on the mat, and it rained all day."
ONE_ROW = ("max_steps=3", "micro_batch_size=1", "gradient_accumulation_steps=1", "lora.dropout=0", "learning_rate=0.01")
SAID = "beside the embedding, with other values: both are used"
HEADS = {"llama": "lm_head.weight", "gemma3": "language_model.lm_head.weight"}
CLASSES = {"llama": "LlamaForCausalLM", "gemma3": "Gemma3ForConditionalGeneration"}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_base(folder: Path, model_type: str, *, equal: bool = False) -> Path:
    """A tied model whose files hold a head too, equal to the embedding or not."""
    if model_type == "llama":
        make_model(folder, num_hidden_layers=2, tie_word_embeddings=True)
    else:
        folder.mkdir()
        text = transformers.CONFIG_MAPPING["gemma3_text"](
            vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, sliding_window=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        vision = {**VISION, "image_size": 28, "patch_size": 14}
        config = transformers.CONFIG_MAPPING["gemma3"](
            text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
        )
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(transformers, CLASSES[model_type])._from_config(config, dtype=torch.float32).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert HEADS[model_type] not in tensors, "the model is tied"
    table = next(value for name, value in tensors.items() if name.endswith("embed_tokens.weight"))
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(3)) * 0.1
    tensors[HEADS[model_type]] = table.clone() if equal else noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def by_library(folder: Path, model_type: str) -> Any:
    """The model as transformers loads it."""
    return getattr(transformers, CLASSES[model_type]).from_pretrained(folder).eval()


def loss_of(model: Any, folder: Path) -> float:
    """Mean loss of the text by the model alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    return float(functional.cross_entropy(logits, ids[0, 1:]))


def work_with(folder: Path, base: Path, **changes: Any) -> Path:
    work = make_workspace(folder, base, **STAGES_OF_TWO, **changes)
    (work / "rows.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    return work


@pytest.mark.parametrize("model_type", [pytest.param("llama", marks=pytest.mark.sweep), "gemma3"])
def test_both_tables_are_trained_and_saved(tmp_path: Path, model_type: str) -> None:
    base = make_base(tmp_path / "base", model_type)
    work = work_with(tmp_path / "work", base, method="full")
    done = finetune(work, *ONE_ROW).expect(0)
    assert SAID in done.out + done.err
    first, *_, last = (row["loss"] for row in metrics(work / "out"))
    assert first == pytest.approx(loss_of(by_library(base, model_type), base), rel=1e-5)
    assert last < first
    config = json.loads((work / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert not config.get("text_config", {}).get("tie_word_embeddings", False)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, work / "out"))
    assert before.keys() == after.keys()
    tables = [name for name in after if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    assert len(tables) == 2 and all(not torch.equal(before[name], after[name]) for name in tables)
    whole = by_library(work / "out", model_type)
    assert torch.equal(whole.lm_head.weight, after[HEADS[model_type]])
    assert loss_of(whole, work / "out") < last
    again = work_with(tmp_path / "again", work / "out", method="full")
    told = finetune(again, *ONE_ROW, "max_steps=1").expect(0)
    assert SAID not in told.out + told.err, "the configuration is right now"
    assert metrics(again / "out")[0]["loss"] == pytest.approx(loss_of(whole, work / "out"), rel=1e-5)


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gemma3", marks=pytest.mark.sweep)])
def test_an_adapter_beside_both_tables_merges(tmp_path: Path, model_type: str) -> None:
    base = make_base(tmp_path / "base", model_type)
    work = work_with(tmp_path / "work", base)
    finetune(work, *ONE_ROW).expect(0)
    assert metrics(work / "out")[0]["loss"] == pytest.approx(loss_of(by_library(base, model_type), base), rel=1e-5)
    run(work, "export", "out", "--merge", "--to", "whole").expect(0)
    adapted = PeftModel.from_pretrained(by_library(base, model_type), str(work / "out")).eval()
    assert loss_of(by_library(work / "whole", model_type), work / "whole") == pytest.approx(
        loss_of(adapted, base), rel=1e-5
    )
    assert json.loads((work / "whole" / "config.json").read_text())["tie_word_embeddings"] is False


def test_equal_tables_are_tied(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", equal=True)
    work = work_with(tmp_path / "work", base, method="full")
    done = finetune(work, *ONE_ROW, "max_steps=1").expect(0)
    assert SAID not in done.out + done.err
    assert metrics(work / "out")[0]["loss"] == pytest.approx(loss_of(by_library(base, "llama"), base), rel=1e-5)
    assert json.loads((work / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(work / "out" / "model.safetensors")
