"""A multimodal checkpoint trained on text by the real command: the whole result, through its own class, is what the
trainer had."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from torch.nn import functional
from transformers import AutoTokenizer

from tests.model.test_multimodal import BROKEN, FAMILIES, multimodal
from tests.support.adapters import layout, load_whole
from tests.support.e2e import finetune, make_tokenizer, make_workspace, run

TEXTS = ("The cat sat on the mat.", "It rained all day, and nobody came.", "One.")
VOCABULARY = {"gemma4": {"vocab_size": 300, "vocab_size_per_layer_input": 300}}


def make_base(model_type: str, folder: Path) -> str:
    """A random model by its own class, whose name is returned, and a tokenizer."""
    config = multimodal(model_type, **VOCABULARY.get(model_type, {"vocab_size": 300}))
    if "num_hidden_layers" in config.vision_config.to_dict():
        config.vision_config.num_hidden_layers = 2  # FAMILIES has up to 40, and training passes them by
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(config.architectures[0])


def text_loss(model: Any, folder: Path, texts: Sequence[str] = TEXTS) -> float:
    """Mean loss of texts by the model alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


CASES = [
    pytest.param(name, method, marks=[] if (name, method) == ("gemma4", "lora") else [pytest.mark.sweep])
    for name in sorted(FAMILIES)
    if name not in BROKEN
    for method in ("lora", "full")
]
"""In the suite tests/model/test_multimodal.py and test_stored_heads.py train whole models, and test_adapter_starts.py
merges other adapters."""


# PEFT looks for ranks among modules alone, and these are of parameters
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
@pytest.mark.parametrize(("model_type", "method"), CASES)
def test_the_whole_result_is_what_the_trainer_had(model_type: str, method: str, tmp_path: Path) -> None:
    name = make_base(model_type, tmp_path / "made")
    work = make_workspace(tmp_path / "work", tmp_path / "made", method=method, eval_datasets=[{"path": "eval.jsonl"}])
    (work / "eval.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    done = finetune(work, "max_steps=3", "eval_steps=3", "lora.dropout=0").expect(0)
    assert "text only: " in done.out + done.err
    trained = json.loads((work / "out" / "eval.jsonl").read_text().splitlines()[-1])["loss"]
    result = work / "out"
    if method == "lora":
        run(work, "export", "out", "--merge", "--to", "whole").expect(0)
        adapted = PeftModel.from_pretrained(load_whole(work / "model", name), str(result)).eval()
        assert text_loss(adapted, work / "model") == pytest.approx(trained, rel=1e-5)
        result = work / "whole"
    whole, base = load_whole(result, name), load_whole(work / "model", name)
    assert text_loss(whole, result) == pytest.approx(trained, rel=1e-5)
    assert abs(text_loss(base, work / "model") - trained) > 1e-3 * trained, "training should show"
    assert layout(result) == layout(work / "model")
    towers = {key: one for key, one in base.named_parameters() if "vision" in key or "visual" in key}
    assert towers and all(torch.equal(whole.get_parameter(key), one) for key, one in towers.items())
