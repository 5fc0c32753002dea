"""Adapters from elsewhere, merged and trained further: the logits are those of PEFT's own model.

Some starts of an adapter change the base weights, and PEFT changes them again when it loads the adapter. Others cannot
be made again: those are refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import KasaConfig
from safetensors.torch import load_file

from roundpipe_cli.engine.parity import Proof
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.prepare import setup as preparing
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.result.export import merge_result
from roundpipe_cli.train.result.generate import load_result
from tests.model.test_multimodal import multimodal
from tests.model.test_quantized_files import save_in_4bit
from tests.support.adapters import by_peft, layout, load_whole
from tests.support.e2e import STAGES_OF_TWO, edit_json, make_model, make_tokenizer, make_workspace
from tests.support.tiny import logits_of, plain_copy
from tests.train.test_training_options import train

WRAPPERS = ("mistral3", "qwen3_vl")
BOTH = ("lm_head", "embed_tokens")
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "plain": ("tied", BOTH[:1], {}),
    "rslora": ("experts", (), {"use_rslora": True}),
    "dora": ("mistral3", (), {"use_dora": True}),
    "random": ("untied", BOTH, {"init_lora_weights": False}),
    "gaussian": ("untied", BOTH[1:], {"init_lora_weights": "gaussian"}),
    "eva": ("tied", (), {"init_lora_weights": "eva", "rank_pattern": {"q_proj": 2}}),
    "orthogonal": ("tied", (), {"init_lora_weights": "orthogonal"}),
    "mica": ("untied", (), {"init_lora_weights": "mica"}),
    "pissa": ("gpt2", (), {"init_lora_weights": "pissa"}),
    "pissa, rslora": ("untied", (), {"init_lora_weights": "pissa", "use_rslora": True}),
    "pissa, dora": ("tied", (), {"init_lora_weights": "pissa", "use_dora": True}),
    "olora": ("qwen3_vl", (), {"init_lora_weights": "OLoRA"}),
    "olora, ranks": (
        *("untied", ()),
        {"init_lora_weights": "olora", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    ),
}
"""Every start of the installed PEFT that can be made again, and the kinds of plain adapters: base, tables that the
adapter saves whole, settings."""
TRAINED = ("mica", "olora, ranks")
"""Starts of which the suite trains an adapter further; MiCA trains A alone."""


@dataclass(frozen=True)
class Base:
    """A base model in a working directory, and the class that loads it."""

    work: Path
    kind: str

    @property
    def folder(self) -> Path:
        return self.work / "model"

    @cached_property
    def logits(self) -> torch.Tensor:
        return logits_of(self.load())

    def load(self, folder: Path | None = None) -> Any:
        """The base, or what became of it in `folder`, by its own class."""
        return load_whole(folder or self.folder, self.kind)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Base]:
    folder = tmp_path_factory.mktemp("bases")
    kinds = dict.fromkeys(("untied", "tied", "gpt2", "experts"), "AutoModelForCausalLM")
    make_model(folder / "untied", num_hidden_layers=2)
    make_model(folder / "tied", num_hidden_layers=2, tie_word_embeddings=True)
    make_model(folder / "gpt2", "gpt2", n_layer=2)
    make_model(folder / "experts", "qwen3_moe", num_hidden_layers=2)
    kinds |= {name: make_wrapper(name, folder / name) for name in WRAPPERS}
    works = {
        name: make_workspace(folder / f"{name}-work", folder / name, **({} if name in WRAPPERS else STAGES_OF_TWO))
        for name in kinds
    }
    return {name: Base(works[name], kind) for name, kind in kinds.items()}


def make_wrapper(model_type: str, folder: Path) -> str:
    """A random multimodal model by its own class, whose name is returned, and a tokenizer."""
    config = multimodal(model_type, vocab_size=300)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(config.architectures[0])


def make_adapter(base: Base, folder: Path, **options: Any) -> torch.Tensor:
    """An adapter by PEFT that has been trained, as far as its weights show; returns the logits of the trained model."""
    torch.manual_seed(5)
    model = base.load()
    blocks = r".*language_model\.(model\.)?layers\.\d+\..*\.(q_proj|v_proj|down_proj)"
    targets = blocks if base.kind != "AutoModelForCausalLM" else "all-linear"
    settings = {"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, LoraConfig(**settings))
        with torch.no_grad():
            for parameter in peft_model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn_like(parameter)
        peft_model.save_pretrained(str(folder), save_embedding_layers=False)
    make_tokenizer().save_pretrained(str(folder))
    return logits_of(peft_model)


def continued(base: Base, adapter: Path, *words: str) -> Setup:
    """A run that trains the adapter further, before its first step."""
    keys = [f"lora.start_from={adapter}", "lora.r=16", "lora.alpha=32", "lora.dropout=0", *words]
    return prepare(load_recipe(str(base.work / "recipe.yaml"), keys), offline=True, tell=lambda event: None)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to float32's rounding of weights that a start takes apart and a merge puts together: 1.4e-5 seen."""
    torch.testing.assert_close(found, expected, rtol=3e-5, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("start", CASES)
def test_merged_and_continued_adapters_compute_what_peft_computes(
    bases: dict[str, Base], tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stories: adapters by PiSSA were merged into the whole base; of MiCA, which trains A alone, B was missing."""
    (name, tables, settings), adapter = CASES[start], tmp_path / "adapter"
    base = bases[name]
    trained = make_adapter(base, adapter, **settings, **({"modules_to_save": list(tables)} if tables else {}))
    expected = by_peft(base.load(), adapter)
    assert_equal(expected, trained)
    source = ModelSource("base", base.folder)
    merge_result(adapter, source, tmp_path / "merged", None, tell=print)
    merged = base.load(tmp_path / "merged")
    assert_equal(logits_of(merged), expected)
    if name in WRAPPERS:
        assert layout(tmp_path / "merged") == layout(base.folder)
        towers = {key: one for key, one in base.load().named_parameters() if "vision" in key or "visual" in key}
        assert towers and all(torch.equal(merged.get_parameter(key), one) for key, one in towers.items())
    elif name == "untied":
        assert_equal(logits_of(load_result(adapter, source, "float32", is_adapter=True)[0]), expected)
    assert float((base.logits - expected).abs().max()) > 0.01
    if tables and name == "tied":
        with pytest.raises(RefusedError, match="are one table") as raised:
            continued(base, adapter)
        assert f"roundpipe export {adapter} --merge" in str(raised.value.problems[0].hint)
        return
    if start not in TRAINED:  # a proof takes a second, and these are not trained
        monkeypatch.setattr(preparing, "prove_once", lambda *_: Proof(0.0, 0.0))
    out = tmp_path / "out"
    setup = continued(base, adapter, "max_steps=2", "learning_rate=0.05", f"output_dir={out}")
    assert_equal(logits_of(plain_copy(setup.model, setup.store)), expected)
    if start not in TRAINED:
        return
    train(setup, out)
    trained = logits_of(plain_copy(setup.model, setup.store))
    assert float((trained - expected).abs().max()) > 0.01
    assert_equal(by_peft(base.load(), out), trained)
    names = [load_file(folder / "adapter_model.safetensors").keys() for folder in (adapter, out)]
    assert names[0] == names[1]
    merge_result(out, source, tmp_path / "again", None, tell=print)
    assert_equal(logits_of(base.load(tmp_path / "again")), trained)


def test_a_start_that_cannot_be_made_again_is_refused_by_name(bases: dict[str, Base], tmp_path: Path) -> None:
    """Where it is merged, trained further or answers: PEFT loads a random start too, with other numbers."""
    base, adapter = bases["untied"], tmp_path / "adapter"
    make_adapter(base, adapter)
    path, source = adapter / "adapter_config.json", ModelSource("base", base.folder)
    uses: list[Callable[[], object]] = [
        lambda: continued(base, adapter),
        lambda: load_result(adapter, source, "float32", is_adapter=True),
        lambda: merge_result(adapter, source, tmp_path / "merged", None, tell=print),
    ]
    for start, reason in (
        ("pissa_niter_4", "random numbers"),
        ("corda", "activations of its training data"),
        ("lora_ga", "gradients of its training data"),
        ("loftq", "quantised"),
        ("PISSA", "expected: one of true, false"),
        (3, "expected: one of true, false"),
    ):
        edit_json(path, init_lora_weights=start)
        for use in uses if start == "corda" else uses[-1:]:  # all ask the same function
            with pytest.raises(RefusedError) as raised:
                use()
            text = str(raised.value)
            assert f"init_lora_weights: {start}" in text.replace("'", "") and reason in text and str(path) in text
    assert not (tmp_path / "merged").exists()


def test_starts_that_are_not_offered_are_refused(bases: dict[str, Base], tmp_path: Path) -> None:
    """KaSA beside the factors, trained further; a start on a table that embedding and LM head share."""
    make_adapter(bases["untied"], tmp_path / "kasa", kasa_config=KasaConfig())
    with pytest.raises(RefusedError, match="KaSA"):
        continued(bases["untied"], tmp_path / "kasa")
    make_adapter(bases["tied"], tmp_path / "table", init_lora_weights="pissa", target_modules=["lm_head", "q_proj"])
    base = ModelSource("base", bases["tied"].folder)
    with pytest.raises(RefusedError, match="embedding and LM head share"):
        merge_result(tmp_path / "table", base, tmp_path / "merged", None, tell=print)


def test_a_start_that_changes_weights_in_4_bit_is_refused(bases: dict[str, Base], tmp_path: Path) -> None:
    """PEFT would pack them once more, after the start."""
    pytest.importorskip("bitsandbytes", reason="needs the extra 4bit")
    save_in_4bit(bases["untied"].folder, tmp_path / "packed", double=False)
    make_adapter(bases["untied"], tmp_path / "adapter", init_lora_weights="olora")
    work = Base(make_workspace(tmp_path / "work", tmp_path / "packed"), "AutoModelForCausalLM")
    with pytest.raises(RefusedError, match="these stay packed as published"):
        continued(work, tmp_path / "adapter")
    with pytest.raises(RefusedError, match="these stay packed as published"):
        merge_result(tmp_path / "adapter", ModelSource("base", work.folder), tmp_path / "merged", None, tell=print)
