"""An LM head that the files hold beside an embedding which the configuration calls tied: the files decide, in a run,
its result and a merge.

Story: the head was dropped unread, the first loss was that of the embedding as head (5.6124 in place of 5.8303 for the
tiny Llama here), and no line said so.
"""

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

from tests.support.e2e import STAGES_OF_TWO, finetune, make_model, make_tokenizer, make_workspace, metrics, run

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
