"""Checks of the files in an adapter's folder before PEFT opens it. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.model.untrusted import MAX_CONFIG_BYTES, check_file, check_header, check_small_files, read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 1 << 20
MAX_NUMBER = 1e9
"""Largest accepted number, such as alpha; excludes NaN and infinity too."""
PATTERN_S = 2.0
"""Seconds of processor time to match an adapter's patterns with all names of modules."""
REFUSED_KEYS = ("megatron_config", "layer_replication")
"""The first imports a module that the file names; the second changes the base model, by any number of layers."""
APPLIED_KEYS = (
    *("peft_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "lora_dropout", "init_lora_weights"),
    *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "use_bdlora", "fan_in_fan_out", "bias", "lora_bias"),
    *("modules_to_save", "ensure_weight_tying"),
)
"""Keys of PEFT's LoraConfig that `export --merge` applies."""
KEYS_WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config", "megatron_core"),
    *("qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
"""Keys of PEFT's LoraConfig that change nothing by themselves: notes for programs, and settings of `use_qalora` or of
the start that `init_lora_weights` names."""
NOT_MERGED: Mapping[str, str] = {
    "trainable_token_indices": "it trains single rows of the embedding beside the adapter",
    "alora_invocation_tokens": "an activated LoRA works only behind its invocation tokens",
    "use_qalora": "QALoRA pools the inputs of GPTQ's layers",
    "velora_config": "VeLoRA keeps compressed activations",
    "monteclora_config": "MonteCLoRA draws samples around the adapter",
    "arrow_config": "Arrow routes between several adapters",
    "kasa_config": "KaSA cuts singular values off the base's weights",
}
"""Keys with which only PEFT itself computes -> why."""
NOT_TRAINED: Mapping[str, str] = {
    "bias": "biases of the base model were trained beside the adapter",
    "lora_bias": "the adapter has biases",
    "use_bdlora": "its matrices are block-diagonal",
    "ensure_weight_tying": "the adapter changes the table that embedding and LM head share",
}
"""Keys of adapters that can be merged but not trained further -> why."""
OTHER_PROGRAMS_KEYS = ("merge_weights", "enable_lora", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr")
"""Keys that PEFT 0.2 and ms-swift write. They say nothing about what a finished adapter computes."""

PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` beside true and false that leave the base weights as they are."""
BASE_STARTS = ("pissa", "olora")
"""Those that take the adapter's first product out of the base weights; PEFT makes the same ones again when it loads."""
CONVERT_HINT = "where it was trained, convert it: save_pretrained(..., path_initial_model_for_weight_conversion=)"
MERGE_HINT = "where it was trained, merge it with merge_and_unload() and take the result for a base"
LOST_STARTS = (
    ("pissa_niter_", "random numbers decide its base weights, and no adapter holds them", CONVERT_HINT),
    ("corda", "its base weights were made from activations of its training data", CONVERT_HINT),
    ("lora_ga", "its base weights were made from gradients of its training data", CONVERT_HINT),
    ("loftq", "its base weights are the quantised ones that PEFT made on its GPU", MERGE_HINT),
)
"""(beginning of the value, why its base weights cannot be made again, hint)."""


def check_adapter_folder(folder: Path) -> dict[str, Any]:
    """The adapter's configuration as plain data, of a folder that is safe to open.

    Raises:
        RefusedError: a file that leads out of the folder, is too large, damaged or no regular file; a configuration
            that asks for code or has values of other types.
    """
    path = folder / ADAPTER_CONFIG
    check_small_files(folder)
    check_file(path, MAX_CONFIG_BYTES)
    if (folder / ADAPTER_WEIGHTS).exists():
        check_file(folder / ADAPTER_WEIGHTS, None)
        check_header(folder / ADAPTER_WEIGHTS)
    config = read_json(path)
    for key in REFUSED_KEYS:
        if config.get(key):
            raise _odd(path, key, config[key], f"no {key}")
    for key, (fits, expected) in _KEYS.items():
        if config.get(key) is not None and not fits(config[key]):
            raise _odd(path, key, config[key], expected)
    return config


def base_start(config: Mapping[str, Any], folder: Path) -> str | None:
    """The start by which the adapter changed the weights of its base, `pissa` or `olora`; None: it left them alone.

    Args:
        config: the adapter's configuration as plain data.

    Raises:
        RefusedError: those weights cannot be made again, or PEFT knows no such start.
    """
    value = config.get("init_lora_weights", True)
    name = value if isinstance(value, str) else ""
    name = name.lower() if name.lower() in ("gaussian", "mica", "olora") else name  # as PEFT reads them
    if name in BASE_STARTS:
        return name
    where, what = str(folder / ADAPTER_CONFIG), "the base weights that this adapter was trained on cannot be made again"
    for beginning, reason, hint in LOST_STARTS:
        if name.startswith(beginning):
            raise RefusedError(what, where=where, found=f"init_lora_weights: {name}: {reason}", hint=hint)
    if name not in PLAIN_STARTS and not (value is None or isinstance(value, bool)):
        known = ", ".join(("true", "false", *PLAIN_STARTS, *BASE_STARTS))
        what = "this start of an adapter is not known"
        raise RefusedError(what, where=where, found=f"init_lora_weights: {value!r}"[:200], expected=f"one of {known}")
    return None


def refuse_not_merged(config: Mapping[str, Any], folder: Path) -> None:
    """
    Raises:
        RefusedError: a key with which only PEFT itself, or only another version of it, computes.
    """
    refuse_unknown_keys(config, folder)
    for key, why in NOT_MERGED.items():
        if config.get(key):
            hint = "`roundpipe generate` and PEFT use the adapter as it is"
            raise _not_for(folder, "only PEFT itself can compute with this adapter", key, config[key], why, hint)


def refuse_not_trained(config: Mapping[str, Any], folder: Path) -> None:
    """
    Raises:
        RefusedError: a key of an adapter that cannot be trained further.
    """
    refuse_not_merged(config, folder)
    for key, why in NOT_TRAINED.items():
        if config.get(key) not in (None, False, "none"):
            hint = f"merge it first (`roundpipe export {folder} --merge`), then train a new adapter on the result"
            raise _not_for(folder, "this adapter cannot be trained further", key, config[key], why, hint)


def refuse_unknown_keys(config: Mapping[str, Any], folder: Path) -> None:
    """PEFT leaves out keys that it does not know, such as those of its own later releases.

    Raises:
        RefusedError: one is set.
    """
    known = {*APPLIED_KEYS, *KEYS_WITHOUT_EFFECT, *REFUSED_KEYS, *NOT_MERGED, *OTHER_PROGRAMS_KEYS}
    for key in sorted(config.keys() - known):
        if config[key]:
            raise RefusedError(
                "the adapter's configuration has a key that the installed PEFT does not know",
                where=str(folder / ADAPTER_CONFIG),
                found=f"{key}: {config[key]!r}"[:200],
                hint="install the PEFT that wrote it, or delete the key if it changes no result",
            )


def _not_for(folder: Path, what: str, key: str, value: object, why: str, hint: str) -> RefusedError:
    found = f"{key}: {value!r}"[:200]
    return RefusedError(what, where=str(folder / ADAPTER_CONFIG), found=f"{found} ({why})", hint=hint)


def _odd(path: Path, key: str, value: object, expected: str) -> RefusedError:
    what = "the adapter's configuration has a value that cannot be used"
    return RefusedError(what, where=str(path), found=f"{key}: {value!r}"[:200], expected=expected)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) or _is_texts(value)


def _each(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(fits(item) for item in value.values())


def _is_layers(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


_KEYS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "r": (_is_rank, f"a rank from 1 to {MAX_RANK}"),
    "lora_alpha": (_is_number, "a number"),
    "lora_dropout": (lambda value: _is_number(value) and 0 <= float(str(value)) < 1, "a number from 0 and below 1"),
    "rank_pattern": (_each(_is_rank), "a rank for each pattern"),
    "alpha_pattern": (_each(_is_number), "a number for each pattern"),
    "target_modules": (_is_pattern, "a pattern, or a list of names"),
    "exclude_modules": (_is_pattern, "a pattern, or a list of names"),
    "modules_to_save": (_is_texts, "a list of names"),
    "target_parameters": (_is_texts, "a list of names"),
    "layers_to_transform": (_is_layers, "whole numbers"),
    "layers_pattern": (_is_pattern, "a pattern, or a list of patterns"),
    "base_model_name_or_path": (lambda value: isinstance(value, str), "a name"),
    "bias": (lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only"),
    **{
        key: (lambda value: isinstance(value, bool), "true or false")
        for key in ("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "ensure_weight_tying")
    },
}


def check_patterns(config: Any, names: Iterable[str], folder: Path) -> None:
    """Match the adapter's regular expressions with the modules' names in a child with limits: a pattern can be made so
    that it takes years.

    Args:
        config: PEFT's LoraConfig.

    Raises:
        RefusedError: a pattern is none, or takes too long.
    """
    patterns = _patterns(config)
    if not patterns:
        return
    where = str(folder / ADAPTER_CONFIG)
    keys = list(names)

    def match_all() -> None:
        for key, pattern in patterns:
            try:
                compiled = re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise RefusedError(
                    f"{key} of the adapter is no regular expression",
                    where=where,
                    found=f"{pattern!r}: {error}"[:200],
                ) from None
            for name in keys:
                compiled.fullmatch(name)
                compiled.match(name)

    run_limited(match_all, Limits("matching the adapter's patterns", where, PATTERN_S))


def _patterns(config: Any) -> list[tuple[str, str]]:
    """(key, regular expression), as PEFT makes them of the configuration's values."""
    found = [(key, getattr(config, key, None)) for key in ("target_modules", "exclude_modules")]
    patterns = [(key, value) for key, value in found if isinstance(value, str)]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns += [(key, rf"(.*\.)?({pattern})$") for pattern in (getattr(config, key, None) or {})]
    patterns += [("modules_to_save", rf"(^|.*\.){name}($|\..*)") for name in (config.modules_to_save or ())]
    layers = getattr(config, "layers_pattern", None) or ()
    layers = [layers] if isinstance(layers, str) else layers
    return patterns + [("layers_pattern", rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.") for pattern in layers]
