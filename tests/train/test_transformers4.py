"""Results of a base in transformers 4's form stay in that form: only what training changed differs.

transformers 4.57 reads the form of transformers 5 without a warning and computes something else, and does not load its
tokenizers at all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.adapters import load_whole
from tests.support.e2e import CHAT_TEMPLATE, finetune, make_workspace, run
from tests.support.tiny import BASE

RELEASE = "4.57.6"
TEXTS = ("Say x1: two  words\n", "</s><new> in the middle, <old>.")
IDS = list(range(3, 99, 2))

# Run by transformers 4: makes bases, or says what it computes and reads.
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
transformers.utils.logging.set_verbosity_error()
task = json.loads(sys.stdin.read())
for folder, values in task.get("make", {}).items():
    torch.manual_seed(0)
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)
    fast.add_special_tokens({"additional_special_tokens": ["<old>"]})
    fast.chat_template = task["template"]
    fast.save_pretrained(folder, save_jinja_files=task["jinja"])
said = {"version": transformers.__version__}
for folder in task.get("read", ()):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Say 1"}]
    found = {"tokens": tokenizer(task["texts"])["input_ids"], "chat": tokenizer.apply_chat_template(messages)}
    if not folder.endswith("out"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            found["logits"] = model(torch.tensor([task["ids"]])).logits[0].tolist()
    said[folder] = found
print(json.dumps(said))
"""


@pytest.fixture(scope="session")
def transformers4() -> Path:
    """A folder of packages with transformers 4, kept for the next time; torch is that of the tests."""
    folder = Path(tempfile.gettempdir()) / f"transformers-{RELEASE}-of-tests"
    if not (folder / "complete").exists():
        words = ["pip", "install", "-q", "--upgrade", "--target", str(folder), f"transformers=={RELEASE}"]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=280)
        if done.returncode:
            pytest.skip(f"transformers {RELEASE} cannot be installed here: {done.stderr.strip()[-200:]}")
        (folder / "complete").touch()
    return folder


def by_transformers4(packages: Path, **task: Any) -> dict[str, Any]:
    """What `PROGRAM` says of a task."""
    environment = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, input=json.dumps(task), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["version"] == RELEASE
    return said


_LONG = {"type": "longrope", "short_factor": [1.5] * 6, "long_factor": [3.0] * 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_theta": 500.0,
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3": {"rope_theta": 777.0, "head_dim": 16, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "gemma3_text": {
        **{"rope_theta": 3000.0, "rope_local_base_freq": 50.0, "head_dim": 16, "sliding_window": 8},
        **{"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    },
    "mistral": {"rope_theta": 123.0, "sliding_window": 8},
    "phi3": {
        **{"rope_theta": 50.0, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64},
        "rope_scaling": _LONG,
    },
    "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 300, "use_parallel_residual": False},
}


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", FAMILIES)
def test_transformers_4_computes_and_reads_the_same(model_type: str, transformers4: Path, tmp_path: Path) -> None:
    """Story: logits of a merged llama differed by 0.73 of 2.5 there, and no result's tokenizer loaded."""
    values = {**BASE, "vocab_size": 260, "model_type": model_type, **FAMILIES[model_type]}
    jinja = model_type in ("qwen3", "phi3")
    by_transformers4(transformers4, make={str(tmp_path / "base"): values}, template=CHAT_TEMPLATE, jinja=jinja)
    form = json.loads((tmp_path / "base" / "config.json").read_text())
    assert "rope_parameters" not in form and (tmp_path / "base" / "special_tokens_map.json").exists()
    found = []
    for method in ("lora", "full"):
        template = "{{ 'Q' }}" + CHAT_TEMPLATE
        changes = {"add_tokens": ["<new>", "<two>"], "chat_template": template} if model_type != "llama" else {}
        work = make_workspace(tmp_path / method, tmp_path / "base", method=method, max_steps=2, **changes)
        finetune(work).expect(0)
        if method == "lora":
            run(work, "export", "out", "--merge", "--to", "merged").expect(0)
            found += [work / "out", work / "merged"]
        else:
            run(work, "export", "out", "--to", "whole").expect(0)
            found += [work / "whole"]
    said = by_transformers4(transformers4, read=[str(folder) for folder in found], texts=TEXTS, ids=IDS)
    for folder in found:
        tokenizer, theirs = AutoTokenizer.from_pretrained(folder), said[str(folder)]
        assert theirs["tokens"] == tokenizer(list(TEXTS))["input_ids"]
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "Say 1"}])["input_ids"]
        assert theirs["chat"] == chat
        if folder.name != "out":
            with torch.no_grad():
                ours = load_whole(folder)(torch.tensor([IDS])).logits[0]
            difference = float((ours - torch.tensor(theirs["logits"])).abs().max())
            print(f"{model_type} {folder.name}: {difference:.1e} of {float(ours.abs().max()):.2f}")
            assert difference < 1e-5 * max(1.0, float(ours.abs().max()))
