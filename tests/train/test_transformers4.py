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

from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.new_tokens import grow_tables, load_with_tokens
from roundpipe_cli.train.prepare.base_files import read_base_files
from tests.model.test_multimodal import multimodal
from tests.support.adapters import load_whole, random_adapter
from tests.support.e2e import CHAT_TEMPLATE, STAGES_OF_TWO, finetune, make_model, make_workspace, run
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


# The same without transformers 4: a folder with the files that it writes.

CONFIG: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "_name_or_path": "somebody/base"},
    **{"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float32"},
    **{"hidden_act": "silu", "pretraining_tp": 1, "transformers_version": "4.44.0", "use_cache": False},
    **{"tie_word_embeddings": False, "own_key": {"of": "somebody"}, "eos_token_id": [2, 5], "bos_token_id": 1},
}
SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False, "normalized": False}}


def as_transformers_4_writes(folder: Path, **config: Any) -> Path:
    """A model of two blocks as `CONFIG` says."""
    sizes = {key: BASE[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128}
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    make_model(folder, num_hidden_layers=2, rope_parameters=rope)
    (folder / "config.json").write_text(json.dumps({**sizes, "rms_norm_eps": 1e-6, **CONFIG, **config}))
    (folder / "chat_template.jinja").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps(SPECIAL))
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    tokens = {str(n): {"content": text, **token} for n, text in enumerate(("<pad>", "<s>", "</s>"))}
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["added_tokens"] = [{"id": int(n), **one} for n, one in tokens.items()]
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    values = {"added_tokens_decoder": tokens, "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    values |= {"clean_up_tokenization_spaces": False, "model_max_length": 128, "extra_special_tokens": {}}
    values |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, "use_default": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def tokenizer_of(folder: Path) -> dict[str, bytes]:
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def results(work: Path, *words: str) -> dict[str, Path]:
    """Folders with an adapter, a merged model and whole ones, from the end of a run and from a checkpoint."""
    finetune(work, "max_steps=1", *words).expect(0)
    run(work, "export", "out", "--to", "adapter").expect(0)
    run(work, "export", "out", "--merge", "--to", "merged").expect(0)
    finetune(work, "max_steps=1", "method=full", "output_dir=full", *words).expect(0)
    run(work, "export", "full", "--to", "whole").expect(0)
    run(work, "export", "full/step-1", "--to", "of_checkpoint").expect(0)
    return {name: work / name for name in ("out", "adapter", "merged", "full", "whole", "of_checkpoint")}


def test_a_result_has_its_base_s_form(tmp_path: Path) -> None:
    """Story: rope_theta moved where transformers 4 does not look, and tokenizers became of a class it has not."""
    base = as_transformers_4_writes(tmp_path / "base")
    for name, folder in results(make_workspace(tmp_path / "work", base, **STAGES_OF_TWO)).items():
        assert tokenizer_of(folder) == tokenizer_of(base), name
        if name not in ("out", "adapter"):
            assert read(folder / "config.json") == {**read(base / "config.json"), "use_cache": True}, name


def test_what_training_changed_is_written_in_that_form(tmp_path: Path) -> None:
    """New tokens, a template, a data type; the rest as it was."""
    base = as_transformers_4_writes(tmp_path / "base", quantization_config={})
    template = "{{ 'T' }}" + CHAT_TEMPLATE
    names = [f"<new{n}>" for n in range(50)]
    changes = {"add_tokens": names, "chat_template": template, "dtype": "bfloat16"}
    work = make_workspace(tmp_path / "work", base, **STAGES_OF_TWO, **changes)
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    new = {259 + n: {"content": name, **entry} for n, name in enumerate(names)}
    for name, folder in results(work).items():
        before, after = (read(one / "tokenizer_config.json") for one in (base, folder))
        tokens = {**before["added_tokens_decoder"], **{str(number): one for number, one in new.items()}}
        assert after == {**before, "chat_template": template, "added_tokens_decoder": tokens}, name
        before, after = (read(one / "tokenizer.json") for one in (base, folder))
        added = before["added_tokens"] + [{"id": number, **one} for number, one in new.items()]
        assert after == {**before, "added_tokens": added}, name
        assert (folder / "special_tokens_map.json").read_bytes() == (base / "special_tokens_map.json").read_bytes()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("a<new3>b")["input_ids"][1:-1] == [262] and tokenizer.chat_template == template
        if name not in ("out", "adapter"):
            expected = {**read(base / "config.json"), "use_cache": True, "vocab_size": 309}
            del expected["quantization_config"]
            assert read(folder / "config.json") == {**expected, "torch_dtype": DTYPE_OF[name]}, name
            assert load_whole(folder).get_input_embeddings().num_embeddings == 309


DTYPE_OF = {"merged": "float32", "full": "bfloat16", "whole": "bfloat16", "of_checkpoint": "bfloat16"}


def test_an_untied_head_and_a_nested_configuration(tmp_path: Path) -> None:
    """Flags change where they stand, in the part of the language model too; so does the data type of every part."""
    config = multimodal("mistral3", vocab_size=300)
    values = json.loads(config.to_json_string())
    text = values["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "torch_dtype": "float16", "own": 1, "tie_word_embeddings": True}
    del text["vocab_size"]
    values["text_config"] = {**text, "vocab_size": 300, "quantization_config": None}
    values |= {"torch_dtype": "float16", "tie_word_embeddings": True, "transformers_version": "4.52.1"}
    values |= {"vocab_size": 300}  # said once more
    values.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    source = ModelSource("base", tmp_path)
    loaded = load_config(source)
    files = read_base_files(source, loaded)
    model: Any = build_skeleton(loaded, torch.bfloat16)
    grow_tables(model, range(300, 303))
    for part in (model.config, model.config.get_text_config()):
        part.tie_word_embeddings = False
    made = json.loads(files.contents(model, torch.bfloat16)["config.json"])
    part = made.pop("text_config")
    kept = {key: value for key, value in values["text_config"].items() if key not in ("quantization_config", "dtype")}
    changed = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "vocab_size": 303, "use_cache": True}
    part.pop("dtype", None)
    assert part == {**kept, **changed}
    assert made["torch_dtype"] == "bfloat16" and made["tie_word_embeddings"] is False and "dtype" not in made
    assert made["transformers_version"] == "4.52.1" and made["vocab_size"] == 303


def test_an_adapter_of_another_program_takes_the_base_s_form(tmp_path: Path) -> None:
    """Its tokenizer, saved in transformers 5's form, means the base's: the merged model has the base's files."""
    base = as_transformers_4_writes(tmp_path / "base")
    random_adapter(base, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(tmp_path / "adapter")
    run(tmp_path, "export", "adapter", "--merge", "--base", "base", "--to", "merged").expect(0)
    assert tokenizer_of(tmp_path / "merged") == tokenizer_of(base)
    tokenizer.add_special_tokens({"pad_token": "</s>"})  # another one: as it is
    tokenizer.save_pretrained(tmp_path / "adapter")
    run(tmp_path, "export", "adapter", "--merge", "--base", "base", "--to", "again").expect(0)
    assert tokenizer_of(tmp_path / "again") == tokenizer_of(tmp_path / "adapter")


def test_tokens_that_only_transformers_5_adds_keep_their_numbers(tmp_path: Path) -> None:
    """Story: its class for Qwen 2 adds <|endoftext|>; with new tokens behind it the form was transformers 5's."""
    base = as_transformers_4_writes(tmp_path / "base", model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    source = ModelSource("base", base)
    tokenizer, new = load_with_tokens(source, ["<new>"])
    assert new.ids == [260] and tokenizer.convert_ids_to_tokens(259) == "<|endoftext|>"
    made = read_base_files(source, load_config(source)).with_tokenizer(source, tokenizer).tokenizer
    before, after = read(base / "tokenizer_config.json"), json.loads(made["tokenizer_config.json"])
    added = after.pop("added_tokens_decoder")
    assert after == {key: value for key, value in before.items() if key != "added_tokens_decoder"}
    assert [added[number]["content"] for number in ("259", "260")] == ["<|endoftext|>", "<new>"]
