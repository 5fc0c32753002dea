"""Modules that an adapter has whole (`modules_to_save`), those with modules and buffers inside among them: trained,
merged, continued, exported from a checkpoint, all as PEFT computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.adapters import by_peft, load_whole, random_adapter
from tests.support.e2e import STAGES, STAGES_OF_TWO, finetune, make_model, make_workspace, run
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
def test_a_module_that_is_trained_whole_is_merged_and_continued(
    case: str, bases: dict[str, Path], tmp_path: Path
) -> None:
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
