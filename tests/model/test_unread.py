"""Tensors of the files for which the configuration has no place, and places for which the files have no tensor.

Story: biases, norms and whole blocks that a configuration leaves out were dropped with a note, those of a GGUF file
without one, and the model that was trained was another.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.weights_io import load_weights
from tests.model.test_multimodal import multimodal
from tests.support.tiny import tiny_config

Tensors = dict[str, torch.Tensor]


def save(folder: Path, config: Any) -> Path:
    """A random model by transformers' own class."""
    import transformers

    torch.manual_seed(0)
    name = (config.architectures or ["LlamaForCausalLM"])[0]
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, name)._from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder)
    return folder


def notices(folder: Path) -> list[str]:
    source = ModelSource("tiny", folder)
    model = build_skeleton(load_config(source), torch.float32)
    return load_weights(source, model, lambda name, values: None)


def change(folder: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def say(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_the_configuration_leaves_out_are_refused(tmp_path: Path, key: str) -> None:
    folder = save(tmp_path / "m", tiny_config("llama", **{key: True}))
    say(folder, **{key: False})
    with pytest.raises(RefusedError, match="leaves out") as caught:
        notices(folder)
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 2 and ".bias" in str(problem.found) and f'"{key}": true' in str(problem.hint)
    change(folder, lambda tensors: [tensors[name].zero_() for name in tensors if name.endswith(".bias")])
    assert any("left out" in text and ".bias" in text for text in notices(folder)), "zeros change nothing"
    say(folder, **{key: True})
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(".bias")])
    with pytest.raises(RefusedError, match="missing") as caught:
        notices(folder)
    assert f'"{key}": false' in str(caught.value.problems[0].hint)


def test_a_norm_without_a_place_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", tiny_config("llama"))
    change(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(RefusedError, match=r"q_norm\.weight"):
        notices(folder)


def test_the_language_model_of_a_wrapper_is_looked_at_and_its_tower_is_not(tmp_path: Path) -> None:
    config = multimodal("mistral3")
    config.vision_config.num_hidden_layers = 2
    folder = save(tmp_path / "m", config)
    tower = next(name for name in load_file(folder / "model.safetensors") if ".layers.0." in name and "vision" in name)
    extra = f"{tower.rpartition('.')[0]}.bias"
    change(folder, lambda tensors: tensors.update({extra: torch.ones(4)}))
    assert any(extra in text for text in notices(folder))
    name = next(name for name in load_file(folder / "model.safetensors") if "language" in name and "q_proj" in name)
    change(folder, lambda tensors: tensors.update({name.replace("weight", "bias"): torch.ones(64)}))
    with pytest.raises(RefusedError, match=r"1 tensors, .*language_model.*q_proj\.bias"):
        notices(folder)


def test_more_blocks_than_the_configuration_has_are_refused(tmp_path: Path) -> None:
    """But not what a checkpoint has beside its blocks, to predict further tokens."""
    folder = save(tmp_path / "m", tiny_config("llama", num_hidden_layers=4))
    say(folder, num_hidden_layers=3)
    with pytest.raises(RefusedError, match="more blocks") as caught:
        notices(folder)
    assert "4 blocks" in str(caught.value) and "num_hidden_layers" in str(caught.value)
    change(folder, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(2, 2)}))
    assert any("left out" in text and "model.layers.3." in text for text in notices(folder))


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", tiny_config("llama"))
    say(folder, vocab_size=120)
    with pytest.raises(RefusedError, match=r"another shape[\s\S]*\[128, 64\][\s\S]*\[120, 64\]"):
        notices(folder)


def test_a_missing_head_names_the_switch(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", tiny_config("llama", tie_word_embeddings=True))
    say(folder, tie_word_embeddings=False)
    with pytest.raises(RefusedError, match="missing") as caught:
        notices(folder)
    assert '"tie_word_embeddings": true' in str(caught.value.problems[0].hint)


GGUF_NAMES = {
    **{"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"},
    **{"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"},
    **{"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk"},
}


@pytest.mark.parametrize(
    ("name", "values", "answer"),
    [
        ("blk.0.attn_q.bias", numpy.ones(64, numpy.float32), "leaves out"),
        ("blk.0.attn_q.bias", numpy.zeros(64, numpy.float32), None),
        ("blk.1.attn_q_norm.weight", numpy.ones(16, numpy.float32), "leaves out"),
        ("rope_freqs.weight", numpy.full(8, 8, numpy.float32), "rotary frequencies"),
        ("rope_freqs.weight", numpy.ones(8, numpy.float32), None),
        ("token_types.weight", numpy.ones((2, 64), numpy.float32), None),
    ],
)
def test_what_of_a_gguf_file_is_not_read_is_said_or_refused(
    tmp_path: Path, name: str, values: Any, answer: str | None
) -> None:
    config = tiny_config("llama")
    model = build_skeleton(config, torch.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_block_count(config.num_hidden_layers)
    for own, parameter in model.named_parameters():
        for theirs, short in GGUF_NAMES.items():
            own = own.replace(theirs, short)
        writer.add_tensor(own, numpy.ones(tuple(parameter.shape), numpy.float32))
    writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = ModelSource("tiny", tmp_path, "m.gguf")
    if answer is None:
        assert any("left out" in text and name in text for text in load_weights(source, model, lambda *_: None))
        return
    with pytest.raises(RefusedError, match=answer) as caught:
        load_weights(source, model, lambda *_: None)
    assert name in str(caught.value) and "safetensors" in str(caught.value)
