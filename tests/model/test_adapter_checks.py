"""An adapter from elsewhere: nothing of it leads out of its folder, takes years, or is a bug of ours."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model import adapter_files
from roundpipe_cli.model.files.untrusted import check_small_files
from roundpipe_cli.train.result.export import copy_result
from tests.support.tiny import tiny_config

GOOD: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**GOOD, **changes}))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        *({"r": value} for value in ("4", 0, -1, 2**62, True, 1.5, float("nan"), [4])),
        *({"lora_alpha": value} for value in ("8", float("inf"), float("nan"), 1e300, 10**400, {})),
        *({"target_modules": value} for value in (3, {"a": 1}, [1], [["q"]])),
        *({"rank_pattern": value} for value in ([], {"q": "4"}, {"q": 0}, {"q": 2**40})),
        *({"trainable_token_indices": value} for value in ("5", [-1], {"lm_head": 5}, ["5"])),
        *({"lora_dropout": value} for value in (1, -0.5, "0", float("nan"))),
        *({"peft_type": value} for value in ("NOPE", 3, [], "IA3")),
        {"layers_to_transform": ["0"]}, {"layers_pattern": 3}, {"use_dora": "yes"}, {"modules_to_save": "lm_head"},
        {"megatron_config": {"a": 1}, "megatron_core": "this"}, {"layer_replication": [[0, 10**9]]},
        {"bias": 7}, {"base_model_name_or_path": 3}, {"lora_bias": "yes"}, {"ensure_weight_tying": 1},
        {"peft_type": "ADALORA"},
    ],
    ids=str,
)  # fmt: skip
def test_an_odd_adapter_configuration_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        adapter_files.read_adapter_config(write(tmp_path / "adapter", **changes))
    assert "adapter_config.json" in str(caught.value)
    assert ("only LoRA adapters" in str(caught.value)) == (changes == {"peft_type": "IA3"})


@pytest.mark.parametrize(
    "changes",
    [
        *({"target_modules": r"(([a-z_]+)+\.?)+!"}, {"exclude_modules": r"(([a-z_.0-9]+)+)+!"}),
        *({"rank_pattern": {r"(([a-z_.0-9]+)+)+!": 2}}, {"alpha_pattern": {"(": 2}}),
        {"target_modules": "a{9999999999999999}"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_patterns_of_an_adapter_have_a_time_limit(tmp_path: Path, monkeypatch: Any, changes: dict[str, Any]) -> None:
    """PEFT matches them with every module's name; some patterns take longer than anybody waits."""
    monkeypatch.setattr(adapter_files, "PATTERN_S", 0.2)
    folder = write(tmp_path / "adapter", **changes)
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(RefusedError, match=r"takes too long|no regular expression"):
        adapter_files.put_adapter(model, adapter_files.read_adapter_config(folder), folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "extra.txt", "additional_chat_templates"])
def test_links_out_of_an_adapter_folder_are_refused(tmp_path: Path, name: str) -> None:
    """What a link leads to was read, copied by `export` and uploaded by `--push`."""
    folder = write(tmp_path / "adapter")
    outside = tmp_path / "private"
    if "." in name:
        outside.write_text("secret")
    else:
        outside.mkdir()
    (folder / name).symlink_to(outside)
    copy = lambda folder: copy_result(folder, tmp_path / "copy", print)  # noqa: E731
    for check in (adapter_files.check_adapter_folder, check_small_files, copy):
        with pytest.raises(RefusedError, match="leads outside"):
            check(folder)
    assert not (tmp_path / "copy").exists()


def test_a_template_among_several_may_not_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").symlink_to("/etc/passwd")
    with pytest.raises(RefusedError, match="leads outside"):
        adapter_files.check_adapter_folder(folder)
    (folder / "additional_chat_templates" / "tools.jinja").unlink()
    os.mkfifo(folder / "chat_template.jinja")
    with pytest.raises(RefusedError, match="no regular file") as caught:
        adapter_files.check_adapter_folder(folder)
    assert "named pipe" in str(caught.value)


# --- what PEFT's own configuration can say ----------------------------------------------------------------------------


def test_every_field_of_peft_s_configuration_is_decided() -> None:
    """A field is applied, changes nothing, or is refused. A release of PEFT with a new one fails here first."""
    decided = [
        *adapter_files.APPLIED_KEYS,
        *adapter_files.KEYS_WITHOUT_EFFECT,
        *adapter_files.REFUSED_KEYS,
        *adapter_files.NOT_MERGED,
    ]
    assert sorted(decided) == sorted({field.name for field in dataclasses.fields(LoraConfig)})
    assert adapter_files.NOT_TRAINED.keys() <= set(adapter_files.APPLIED_KEYS)


VALUES: dict[str, Any] = {
    **{"alora_invocation_tokens": [8, 9], "use_qalora": True, "velora_config": {"num_groups": 8}, "bias": "all"},
    **{"monteclora_config": {"num_samples": 4}, "arrow_config": {"top_k": 2}, "kasa_config": {"beta": 1e-4}},
    **{"use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 2}, "ensure_weight_tying": True, "lora_bias": True},
}


@pytest.mark.parametrize("key", [*adapter_files.NOT_MERGED, *adapter_files.NOT_TRAINED])
def test_what_cannot_be_merged_or_trained_is_refused_by_name(tmp_path: Path, key: str) -> None:
    """aLoRA was "a bug of roundpipe"; `generate` uses such adapters."""
    folder = write(tmp_path / "adapter", **{key: VALUES[key]})
    check, what, hint = adapter_files.refuse_not_merged, "only PEFT itself", "roundpipe generate"
    if key in adapter_files.NOT_TRAINED:
        check, what, hint = (
            *(adapter_files.refuse_not_trained, "cannot be trained further", f"roundpipe export {folder} --merge"),
        )
    with pytest.raises(RefusedError, match=what) as caught:
        adapter_files.read_adapter_config(folder, check)
    assert f"{key}: " in str(caught.value) and hint in str(caught.value)
    adapter_files.refuse_unknown_keys(json.loads((folder / "adapter_config.json").read_text()), folder)


def test_a_key_of_a_newer_peft_is_refused(tmp_path: Path) -> None:
    """PEFT leaves out what it does not know and computes something else; keys that are off, or old, do not matter."""
    adapter_files.read_adapter_config(write(tmp_path / "adapter", use_new=False, new_config=None, merge_weights=True))
    with pytest.raises(RefusedError, match="installed PEFT does not know") as caught:
        adapter_files.read_adapter_config(write(tmp_path / "adapter", use_new={"a": 1}))
    assert "use_new" in str(caught.value)
