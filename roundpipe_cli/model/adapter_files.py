"""A LoRA adapter in PEFT's format: its files checked before they are opened, its configuration, its tensors."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.model.files.untrusted import (
    MAX_CONFIG_BYTES,
    check_file,
    check_header,
    check_small_files,
    read_json,
    refusing,
)
from roundpipe_cli.model.new_tokens import grow_tables
from roundpipe_cli.model.stored.conversions import current_names, fused_names
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes
from roundpipe_cli.model.stored.tensors import base_name, is_adapter, open_shard, tied_names

# Checks of the files in an adapter's folder before PEFT opens it. Needs no torch.

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
    *("modules_to_save", "ensure_weight_tying", "trainable_token_indices"),
)
"""Keys of PEFT's LoraConfig that `export --merge` applies."""
KEYS_WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config", "megatron_core"),
    *("qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
"""Keys of PEFT's LoraConfig that change nothing by themselves: notes for programs, and settings of `use_qalora` or of
the start that `init_lora_weights` names."""
NOT_MERGED: Mapping[str, str] = {
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
"""Starts that take the adapter's first product out of the base weights; PEFT makes them again when it loads."""
CONVERT_HINT = "where it was trained, convert it: save_pretrained(..., path_initial_model_for_weight_conversion=)"
MERGE_HINT = "where it was trained, merge it with merge_and_unload() and take the result for a base"
BY_PEFT_HINT = "`roundpipe generate` without --stream and PEFT use the adapter as it is"
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
    check_small_files(folder)
    check_file(folder / ADAPTER_CONFIG, MAX_CONFIG_BYTES)
    if (folder / ADAPTER_WEIGHTS).exists():
        check_file(folder / ADAPTER_WEIGHTS, None)
        check_header(folder / ADAPTER_WEIGHTS)
    config = read_json(folder / ADAPTER_CONFIG)
    what = "the adapter's configuration has a value that cannot be used"
    for key in REFUSED_KEYS:
        if config.get(key):
            raise _refusal(what, folder, config, key, expected=f"no {key}")
    for key, (fits, expected) in _KEYS.items():
        if config.get(key) is not None and not fits(config[key]):
            raise _refusal(what, folder, config, key, expected=expected)
    return config


def _base_start(config: Mapping[str, Any], folder: Path) -> str | None:
    """The start by which the adapter changed the weights of its base, `pissa` or `olora`; None: it left them alone.
    Refuses one after which they cannot be made again."""
    value = config.get("init_lora_weights", True)
    name = value if isinstance(value, str) else ""
    name = name.lower() if name.lower() in ("gaussian", "mica", "olora") else name  # as PEFT reads them
    if name in BASE_STARTS:
        return name
    for beginning, why, hint in LOST_STARTS:
        if name.startswith(beginning):
            what = "the base weights that this adapter was trained on cannot be made again"
            raise _refusal(what, folder, config, "init_lora_weights", why=why, hint=hint)
    if name not in PLAIN_STARTS and not (value is None or isinstance(value, bool)):
        known = f"one of {', '.join(('true', 'false', *PLAIN_STARTS, *BASE_STARTS))}"
        raise _refusal("this start of an adapter is not known", folder, config, "init_lora_weights", expected=known)
    return None


def refuse_not_merged(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a key with which only PEFT itself, or only another version of it, computes."""
    refuse_unknown_keys(config, folder)
    for key, why in NOT_MERGED.items():
        if config.get(key):
            what = "only PEFT itself can compute with this adapter"
            raise _refusal(what, folder, config, key, why=why, hint=BY_PEFT_HINT)


def merge_first(folder: Path) -> str:
    """Hint for the folder of an adapter that cannot be trained further."""
    command = f"roundpipe export {shlex.quote(str(folder))} --merge"
    return f"merge it first (`{command}`), then train a new adapter on the result"


def refuse_not_trained(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a key of an adapter that cannot be trained further."""
    refuse_not_merged(config, folder)
    for key, why in NOT_TRAINED.items():
        if config.get(key) not in (None, False, "none"):
            what, hint = "this adapter cannot be trained further", merge_first(folder)
            raise _refusal(what, folder, config, key, why=why, hint=hint)


def refuse_unknown_keys(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse keys that PEFT does not know, such as those of its own later releases: it leaves them out."""
    known = {*APPLIED_KEYS, *KEYS_WITHOUT_EFFECT, *REFUSED_KEYS, *NOT_MERGED, *OTHER_PROGRAMS_KEYS}
    for key in sorted(config.keys() - known):
        if config[key]:
            what = "the adapter's configuration has a key that the installed PEFT does not know"
            hint = "install the PEFT that wrote it, or delete the key if it changes no result"
            raise _refusal(what, folder, config, key, hint=hint)


def _refusal(
    what: str, folder: Path, config: Mapping[str, Any], key: str, *, why: str = "", **more: str
) -> RefusedError:
    found = f"{key}: {config[key]!r}"[:200] + (f" ({why})" if why else "")
    return RefusedError(what, where=str(folder / ADAPTER_CONFIG), found=found, **more)


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _each(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_is_texts = _list_of(lambda value: isinstance(value, str))
_are_tokens = _list_of(lambda value: type(value) is int and value >= 0)


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) or _is_texts(value)


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
    "trainable_token_indices": (
        lambda value: _are_tokens(value) or _each(_are_tokens)(value),
        "a list of tokens, or one for each table",
    ),
    "layers_to_transform": (
        lambda value: all(type(one) is int for one in (value if isinstance(value, list) else [value])),
        "whole numbers",
    ),
    "layers_pattern": (_is_pattern, "a pattern, or a list of patterns"),
    "base_model_name_or_path": (lambda value: isinstance(value, str), "a name"),
    "bias": (lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only"),
    **{
        key: (lambda value: isinstance(value, bool), "true or false")
        for key in ("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "ensure_weight_tying")
    },
}


def _check_patterns(config: Any, names: Iterable[str], folder: Path) -> None:
    """Match the adapter's regular expressions with the modules' names in a child with limits: a pattern can be made so
    that it takes years."""
    patterns, keys, where = _patterns(config), list(names), str(folder / ADAPTER_CONFIG)
    if not patterns:
        return

    def match_all() -> None:
        for key, pattern in patterns:
            try:
                compiled = re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                found = f"{pattern!r}: {error}"[:200]
                raise RefusedError(f"{key} of the adapter is no regular expression", where=where, found=found) from None
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


PEFT_PREFIX = "base_model.model."


def read_adapter_config(folder: Path, check: Callable[[Mapping[str, Any], Path], None] = refuse_not_merged) -> Any:
    """PEFT's LoraConfig.

    Args:
        check: refuses configurations, as plain data, that the caller cannot use.

    Raises:
        RefusedError: it cannot be read, is not safe to open, is of another kind of adapter, or is refused by `check`;
            or its start changed base weights that cannot be made again.
    """
    values = check_adapter_folder(folder)
    _base_start(values, folder)  # PEFT's own errors do not say what to do
    import_bitsandbytes()
    from peft import PeftConfig, PeftType

    where = str(folder / ADAPTER_CONFIG)
    with refusing("the adapter's configuration cannot be read", where), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = PeftConfig.from_pretrained(str(folder))
    if config.peft_type != PeftType.LORA:
        raise RefusedError("only LoRA adapters can be read", where=where, found=str(config.peft_type))
    check(values, folder)
    return config


def put_adapter(model: nn.Module, config: Any, folder: Path, *, on_meta: bool = True) -> Any:
    """Put the adapter's modules into `model`, and rows for its tokens; returns PEFT's model around it.

    Args:
        on_meta: the model is a skeleton, and so is what is put into it.

    Raises:
        RefusedError: it does not fit the model.
    """
    from peft import get_peft_model

    _check_patterns(config, (name for name, _ in model.named_modules()), folder)
    grow_tables(model, trained_tokens(config.trainable_token_indices), str(folder / ADAPTER_CONFIG))
    _name_as_today(config, model, folder)
    with refusing("the adapter does not fit the base model", str(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: Any = get_peft_model(model, config, autocast_adapter_dtype=not on_meta, low_cpu_mem_usage=on_meta)  # type: ignore[arg-type]
    return made


def load_adapter(model: nn.Module, config: Any, folder: Path) -> Any:
    """Put the adapter and its tensors into `model`, which has real weights; returns PEFT's model around it. PEFT itself
    puts the tensors in place, as it knows kinds of adapters that nothing else here does.

    Raises:
        RefusedError: it does not fit the model.
    """
    from peft import set_peft_model_state_dict

    config.inference_mode, config.lora_dropout = True, 0.0
    made = put_adapter(model, config, folder, on_meta=False)
    with refusing("the adapter does not fit the base model", str(folder)):
        found = set_peft_model_state_dict(made, _read_as_named_today(model, folder))
    own = {name for name, _ in made.named_parameters()}  # each under one name
    missing = [name for name in found.missing_keys if is_adapter(name) and name in own]
    unexpected = [name for name in found.unexpected_keys if not name.endswith(".modules_to_save.weight")]
    if missing or unexpected:
        raise _misfit(folder, [*missing, *unexpected])
    return made


def trained_tokens(indices: dict[str, list[int]] | list[int] | None) -> list[int]:
    """Tokens whose rows of embedding or LM head an adapter has, by its `trainable_token_indices`."""
    return sorted({*chain(*indices.values())} if isinstance(indices, dict) else {*(indices or ())})


def read_adapter_tensors(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's file by parameter name of `model`, which has its modules: those of adapters,
    and weights that take the place of the base's.

    Raises:
        RefusedError: they are not the adapter's of this model.
    """
    where = str(folder / ADAPTER_WEIGHTS)
    with refusing("the adapter does not fit the base model", where):
        stored = _read_as_named_today(model, folder)
    modules = dict(model.named_modules())
    tensors = {_parameter_name(key, modules): tensor for key, tensor in stored.items()}
    every = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    own = {name: tuple(one.shape) for name, one in every}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    needed = {name for name, _ in model.named_parameters() if is_adapter(name)}
    wrong = sorted(name for name in needed | found.keys() if own.get(name) != found.get(name))
    for name in wrong:
        ours, theirs = own.get(name, ()), found.get(name, ())
        if ".lora_" not in name and len(ours) == 2 and ours[1:] == theirs[1:]:
            raise RefusedError(
                "the adapter was trained with another vocabulary than the base model has",
                where=where,
                found=f"{name} of {theirs[0]} rows",
                expected=f"{ours[0]} rows",
                hint="save the base model with as many (`resize_token_embeddings` of transformers) and name that one",
            )
    if wrong:
        raise _misfit(folder, wrong)
    return tensors


_SINGLE = {
    "gate_up_proj": (("mlp", "gate_proj", "up_proj"), ("block_sparse_moe", "w1", "w3"), ("mlp", "w1", "w3")),
    "down_proj": (("mlp", "down_proj"), ("block_sparse_moe", "w2"), ("mlp", "w2")),
}
"""Fused parameter -> what checkpoints may call its module and the layers of a single expert."""
_FUSED_IN_VLLM = ("gpt_oss", "interns1_pro", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl_moe")
"""Types of which vLLM 0.33 reads adapters of fused experts by PEFT's names (its models' `is_3d_moe_weight`)."""


def as_single_experts(model: nn.Module, folder: Path) -> dict[str, bytes]:
    """An adapter of fused experts by the names of single ones, as vLLM's documentation has them (0.33).

        mlp.experts.base_layer.lora_A [E r, in]   ->  mlp.experts.e.gate_proj.lora_A, .up_proj.lora_A: the same [r, in]
        mlp.experts.base_layer.lora_B [2 W, r E]  ->  mlp.experts.e.gate_proj.lora_B, .up_proj.lora_B [W, r]
        mlp.experts.lora_A, .lora_B               ->  mlp.experts.e.down_proj.lora_A, .lora_B

    B is scaled so that all adapters are multiplied by the same alpha / r, which programs that know no patterns of ranks
    take for all.

    Args:
        model: the base's skeleton; gets the adapter's modules.

    Returns:
        contents of the adapter's files by name; none, if no expert has an adapter, or vLLM reads PEFT's names.

    Raises:
        RefusedError: the adapter cannot be read, or does not fit.
    """
    config = read_adapter_config(folder)
    if getattr(model.config, "model_type", None) in _FUSED_IN_VLLM:
        return {}
    put_adapter(model, config, folder)
    whole = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    tensors, made, ranks = read_adapter_tensors(model, folder), dict[str, torch.Tensor](), dict[str, int]()
    products = expert_products(model, tensors)
    for name, (a, b, scale) in ((name, one) for name, one in products.items() if len(one[0]) == 1):
        layer = f"{PEFT_PREFIX}{name.removesuffix('.weight')}"
        made[f"{layer}.lora_A.weight"] = a[0].clone()
        made[f"{layer}.lora_B.weight"] = (b[0] * (scale / whole)).contiguous()
        ranks[rf"experts\.\d+\.{layer.rpartition('.')[2]}"] = b.shape[-1]
    if not made:
        return {}
    made |= {f"{PEFT_PREFIX}{name.replace('.default.', '.')}": tensor for name, tensor in tensors.items()}
    alphas = {pattern: whole * (rank**0.5 if config.use_rslora else rank) for pattern, rank in ranks.items()}
    values = check_adapter_folder(folder) | {
        "target_modules": sorted({key.split(".lora_")[0].rpartition(".")[2] for key in made if ".lora_" in key}),
        "target_parameters": None,
        "rank_pattern": ranks | config.rank_pattern,  # the first that matches counts
        "alpha_pattern": alphas | config.alpha_pattern,
    }
    return {ADAPTER_WEIGHTS: save(made, {"format": "pt"}), ADAPTER_CONFIG: json.dumps(values, indent=2).encode()}


def expert_factors(path: str, layer: Any, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors [E, r, in] and [E, out, r] of the experts' adapter at `path`, taken out of `tensors`."""
    a, b = (tensors.pop(f"{path}.lora_{matrix}.default.weight") for matrix in "AB")
    a = a.reshape(layer.num_experts, -1, a.shape[-1])
    return a, b.reshape(len(b), -1, layer.num_experts).permute(2, 0, 1)


ExpertProduct = tuple[torch.Tensor, torch.Tensor, float]
"""Factors [E, r, in] and [E, out, r] of what an adapter adds to the weights [out, in] of experts, and its scale."""


def expert_products(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, ExpertProduct]:
    """Products that an adapter, whose `tensors` have names of `model`, adds to experts, by names in the base's files:
    of each expert (E is 1; taken out of `tensors`), or of all where they are one tensor."""
    found: dict[str, ExpertProduct] = {}
    for path, layer in model.named_modules():
        own = getattr(layer, "parameter_name", None) if getattr(layer, "num_experts", 1) > 1 else None
        if own not in _SINGLE:
            continue
        scale, names = layer.scaling["default"], _single_names(base_name(path), own, model)
        a, b = expert_factors(path, layer, tensors if names else dict(tensors))
        if names is None:
            found[f"{base_name(path)}.{own}"] = a, b, scale
            continue
        for number in range(len(a)):
            one = slice(number, number + 1)
            parts = zip(names, b[one].chunk(len(names), dim=1), strict=True)
            found |= {f"{name.format(number)}.weight": (a[one], part, scale) for name, part in parts}
    return found


def _single_names(holder: str, parameter: str, model: nn.Module) -> list[str] | None:
    """Names of an expert's layers in the base's files, `{}` for its number; None: they are one tensor there too."""
    for module, *layers in _SINGLE[parameter]:
        start = re.sub(r"\.mlp\.experts$", f".{module}.experts", holder)
        found = fused_names((f"{start}.0.{layer}.weight" for layer in layers), model)
        if set(found.values()) == {(f"{holder}.{parameter}", len(layers))} and len(found) == len(layers):
            return [f"{start}.{{}}.{layer}" for layer in layers]
    return None


class StartedBase:
    """The base weights of adapted modules as PEFT's own start of an adapter leaves them."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """`model` has the modules of the adapter in `folder`."""
        self._start = _base_start(check_adapter_folder(folder), folder)
        self._folder = folder
        self._wrappers: dict[str, Any] = {}
        if self._start is not None:
            wrapped = ((path, module) for path, module in model.named_modules() if hasattr(module, "lora_A"))
            self._wrappers = {f"{path}.base_layer.weight": module for path, module in wrapped}
            own = {base_name(name) for name in self._wrappers}
            shared = [name for name in tied_names(model) if base_name(name) in own]
            if shared:
                raise RefusedError(
                    f"this adapter began by {self._start} on a table that embedding and LM head share",
                    where=str(folder),
                    found=shared[0],
                    hint=MERGE_HINT,
                )

    @property
    def names(self) -> Collection[str]:
        """Parameters of the model that the start changes."""
        return self._wrappers.keys()

    def refuse_packed(self, name: str) -> None:
        """Refuse a parameter that the start changes, and that stays as the base's files have it packed."""
        if name in self._wrappers:
            raise RefusedError(
                f"this adapter began by {self._start}, which changes base weights, and these stay packed as published",
                where=str(self._folder),
                found=name,
                expected="a base whose files hold it in 16 or 32 bit",
                hint="load_in_16bit: true unpacks weights in MXFP4 or FP8 blocks",
            )

    def weight(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """A base weight after the start, in the model's type; the weight itself where it changes nothing.

        Raises:
            RefusedError: PEFT cannot start on it.
        """
        wrapper = self._wrappers.get(name)
        if wrapper is None:
            return values
        layers = (wrapper.get_base_layer(), *(part["default"] for part in (wrapper.lora_A, wrapper.lora_B)))
        held = [layer._parameters["weight"] for layer in layers]
        try:
            own = values.to(held[0].dtype, copy=True)
            for layer, value in zip(layers, (own, torch.empty(0), torch.empty(0)), strict=True):
                layer._parameters["weight"] = nn.Parameter(value, requires_grad=False)
            with refusing(f"PEFT cannot start this adapter by {self._start}", str(self._folder)), torch.no_grad():
                if self._start == "pissa":
                    wrapper.pissa_init("default", "pissa")
                else:
                    wrapper.olora_init("default")
            return torch.as_tensor(layers[0]._parameters["weight"]).detach()
        finally:
            for layer, parameter in zip(layers, held, strict=True):
                layer._parameters["weight"] = parameter


def _misfit(folder: Path, names: Sequence[str]) -> RefusedError:
    return RefusedError(
        "the adapter does not fit the base model",
        where=str(folder / ADAPTER_WEIGHTS),
        found=f"{len(names)} tensors missing, unexpected or of another shape, for instance {names[0]}",
    )


# --- names of older releases ----------------------------------------------------------------------------------------


def _name_as_today(config: Any, model: nn.Module, folder: Path) -> None:
    """Have a configuration name the modules as the installed transformers does: an older release had other names around
    a wrapped language model, and a module for each expert. PEFT converts experts too, but loses the layers beside them
    that have the same names (those of shared experts), and does not know all types."""
    for key in ("target_modules", "modules_to_save"):
        listed = getattr(config, key)
        if listed and not isinstance(listed, str):
            names = current_names((f"{name}.weight" for name in listed if "." in name), model)
            setattr(config, key, type(listed)(names.get(f"{n}.weight", n).removesuffix(".weight") for n in listed))
    with open_shard(folder / ADAPTER_WEIGHTS) as file:
        keys = [key for key in file.keys() if ".lora_A" in key]  # noqa: SIM118 - the handle is no mapping
    paths = {key.removeprefix(PEFT_PREFIX).partition(".lora_A")[0] for key in _current_keys(keys, model).values()}
    experts = {path for path in paths if _EXPERT.search(path)}
    if experts:
        _fuse_experts(config, model, paths - experts, experts, folder=folder)


_EXPERT = re.compile(r"\.experts\.\d+\.")
_ROUTED = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that PEFT takes out of `target_modules` for types with experts, also where other layers have them."""


def _fuse_experts(config: Any, model: nn.Module, others: set[str], experts: set[str], *, folder: Path) -> None:
    """Have a configuration name the parameters of fused experts, and each adapted layer of `others`."""
    from peft.utils.other import get_pattern_key

    fused = fused_names((f"{path}.weight" for path in experts), model)
    wanted = dict(fused.values())
    leaves = {(target, name.split(".")[-2]) for name, (target, _) in fused.items()}
    counts = Counter(target for target, _ in leaves)
    scales: dict[str, set[tuple[int, float]]] = {}
    ranks, alphas = config.rank_pattern, config.alpha_pattern
    for name, (target, _) in fused.items():  # by PEFT's rule: the first pattern that matches counts
        own = [get_pattern_key(patterns, name.removesuffix(".weight")) for patterns in (ranks, alphas)]
        scales.setdefault(target, set()).add((ranks.get(own[0], config.r), alphas.get(own[1], config.lora_alpha)))
    if len(fused) < len(experts) or counts != wanted or any(len(found) > 1 for found in scales.values()):
        raise RefusedError(
            "the installed transformers has one parameter for all experts, which this adapter does not fit",
            where=str(folder / ADAPTER_CONFIG),
            found=f"adapters of {', '.join(sorted({leaf for _, leaf in leaves}))} of each expert, and rank_pattern "
            f"{config.rank_pattern}, alpha_pattern {config.alpha_pattern}",
            expected="adapters of all layers that are one parameter together, of one rank and alpha",
        )
    modules = {path for path, _ in model.named_modules()}
    routed = {path for path in others & modules if path.rpartition(".")[2] in _ROUTED}
    config.target_modules = sorted(others & modules - routed)
    config.target_parameters = [*sorted(wanted), *(f"{path}.weight" for path in sorted(routed))]
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    new_ranks, new_alphas = dict[str, int](), dict[str, float]()
    for name, count in wanted.items():  # one behind the other: PEFT makes B block-diagonal
        ((rank, alpha),) = scales[name]
        new_ranks[re.escape(name)] = rank * count
        new_alphas[re.escape(name)] = alpha * (count**0.5 if config.use_rslora else count)
    config.rank_pattern, config.alpha_pattern = new_ranks | ranks, new_alphas | alphas


def _current_keys(keys: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Keys of an adapter's file -> those with the modules' names of today."""
    parts = {key: _WEIGHT.match(key.removeprefix(PEFT_PREFIX)) for key in keys}
    weights = {key: f"{part[1]}.weight" if part else key.removeprefix(PEFT_PREFIX) for key, part in parts.items()}
    names = current_names(set(weights.values()), model)
    found = {}
    for key, part in parts.items():
        name = names[weights[key]]
        found[key] = PEFT_PREFIX + (f"{name.removesuffix('.weight')}{part[2]}" if part else name)
    return found


def _read_as_named_today(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter's file by the keys that PEFT would save them with today; `model` has its modules."""
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    with open_shard(folder / ADAPTER_WEIGHTS) as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the handle is no mapping
    today = {key: stored[old] for old, key in _current_keys(stored, model).items()}
    config: Any = model.peft_config
    with torch.no_grad():
        converted = convert_peft_adapter_state_dict_for_transformers(model, config["default"], today)
    modules = {f"{PEFT_PREFIX}{path}" for path, _ in model.named_modules()}
    found = {}
    for key, tensor in converted.items():
        inner, part, _ = key.partition(".base_layer.lora_")  # of two nested adapters of experts; there may be one only
        is_alone = part and not {f"{inner}.base_layer.lora_A", f"{inner}.base_layer.lora_B"} & modules
        found[key.replace(".base_layer.lora_", ".lora_") if is_alone else key] = tensor
    return found


_WEIGHT = re.compile(r"(.*?)(\.(?:lora_|base_layer\.|original_module\.|modules_to_save\.|token_adapter\.).*)")


def _parameter_name(key: str, modules: dict[str, nn.Module]) -> str:
    """PEFT's files leave the adapter's name out of the names of parameters."""
    name = key.removeprefix(PEFT_PREFIX)
    path, _, attribute = name.rpartition(".")
    parts = path.split(".")
    for count in range(len(parts), 0, -1):  # the nearest module around it that is saved whole
        if hasattr(modules.get(outer := ".".join(parts[:count])), "modules_to_save"):
            return f"{outer}.modules_to_save.default.{name.removeprefix(f'{outer}.')}"
    if attribute == "lora_magnitude_vector":  # of PEFT before 0.12
        return f"{name}.default.weight"
    if attribute in ("lora_embedding_A", "lora_embedding_B", "trainable_tokens_delta"):
        return f"{name}.default"
    if path.endswith((".lora_A", ".lora_B", ".lora_magnitude_vector", ".modules_to_save")):
        return f"{path}.default.{attribute}"
    return name
