"""A LoRA adapter in PEFT's format, read: its configuration, and its tensors by the names of a model's parameters."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.adapter_checks import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MERGE_HINT,
    base_start,
    check_adapter_folder,
    check_patterns,
    refuse_not_merged,
)
from roundpipe_cli.model.library_calls import refusing
from roundpipe_cli.model.packed_weights import import_bitsandbytes
from roundpipe_cli.model.stored.conversions import current_names, fused_names
from roundpipe_cli.model.stored.names import base_name, is_adapter, tied_names
from roundpipe_cli.model.stored.tensors import open_shard

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
    base_start(values, folder)  # PEFT's own errors do not say what to do
    import_bitsandbytes()
    from peft import PeftConfig, PeftType

    with (
        refusing("the adapter's configuration cannot be read", str(folder / ADAPTER_CONFIG)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        config = PeftConfig.from_pretrained(str(folder))
    if config.peft_type != PeftType.LORA:
        raise RefusedError(
            "only LoRA adapters can be read", where=str(folder / ADAPTER_CONFIG), found=str(config.peft_type)
        )
    check(values, folder)
    return config


def put_adapter(model: nn.Module, config: Any, folder: Path) -> Any:
    """Put the adapter's modules into the skeleton `model`; returns PEFT's model around it.

    Raises:
        RefusedError: it does not fit the model.
    """
    from peft import get_peft_model

    check_patterns(config, (name for name, _ in model.named_modules()), folder)
    _name_as_today(config, model, folder)
    with refusing("the adapter does not fit the base model", str(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)  # type: ignore[arg-type]


def load_adapter(model: nn.Module, config: Any, folder: Path) -> Any:
    """Put the adapter and its tensors into `model`, which has real weights; returns PEFT's model around it.

    Raises:
        RefusedError: it does not fit the model.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    config.inference_mode, config.lora_dropout = True, 0.0
    check_patterns(config, (name for name, _ in model.named_modules()), folder)
    _name_as_today(config, model, folder)
    with refusing("the adapter does not fit the base model", str(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, config)  # type: ignore[arg-type]
        found = set_peft_model_state_dict(peft_model, _read_as_named_today(model, folder))
    missing = [name for name in found.missing_keys if is_adapter(name)]
    unexpected = [name for name in found.unexpected_keys if not name.endswith(".modules_to_save.weight")]
    if missing or unexpected:
        raise _misfit(folder, [*missing, *unexpected])
    return peft_model


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
    own = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
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


class StartedBase:
    """The base weights of adapted modules as PEFT's own start of an adapter leaves them."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        """
        Args:
            model: with the adapter's modules.
            folder: of the adapter.
        """
        self._start = base_start(check_adapter_folder(folder), folder)
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
        """
        Raises:
            RefusedError: the start changes this parameter, which lies in the base's files in 4 bit.
        """
        if name in self._wrappers:
            raise RefusedError(
                f"this adapter began by {self._start}, which changes base weights, and these are in 4 bit",
                where=str(self._folder),
                found=name,
                expected="a base whose files hold it in 16 or 32 bit",
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
    """Have a configuration name the modules as the installed transformers does. An older release had other names around
    a wrapped language model, and a module for each expert where there is one parameter of all experts today.

    PEFT converts experts too, but loses the layers beside them that have the same names (those of shared experts), and
    does not know all types.

    Raises:
        RefusedError: parts of the experts' layers have an adapter that fused ones cannot have.
    """
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
        _fuse_experts(config, model, paths - experts, experts, folder)


_EXPERT = re.compile(r"\.experts\.\d+\.")
_ROUTED = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that PEFT takes out of `target_modules` for types with experts, also where other layers have them."""


def _fuse_experts(config: Any, model: nn.Module, others: set[str], experts: set[str], folder: Path) -> None:
    """Have a configuration name the parameters of fused experts, and each other adapted layer.

    Args:
        others: adapted modules of the file that are no experts.
        experts: those that are, one for each expert.
    """
    fused = fused_names((f"{path}.weight" for path in experts), model)
    wanted = dict(fused.values())
    leaves = {(target, name.split(".")[-2]) for name, (target, _) in fused.items()}
    counts = Counter(target for target, _ in leaves)
    if len(fused) < len(experts) or counts != wanted or config.rank_pattern or config.alpha_pattern:
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
    for name, count in wanted.items():  # one behind the other: PEFT makes B block-diagonal
        config.rank_pattern[re.escape(name)] = config.r * count
        config.alpha_pattern[re.escape(name)] = config.lora_alpha * (count**0.5 if config.use_rslora else count)


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
    """The tensors of an adapter's file by the keys that PEFT would save them with today.

    Args:
        model: has the adapter's modules.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    with open_shard(folder / ADAPTER_WEIGHTS) as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the handle is no mapping
    names = _current_keys(stored, model)
    config: Any = model.peft_config
    with torch.no_grad():
        converted = convert_peft_adapter_state_dict_for_transformers(
            model, config["default"], {names[key]: tensor for key, tensor in stored.items()}
        )
    modules = {f"{PEFT_PREFIX}{path}" for path, _ in model.named_modules()}
    found = {}
    for key, tensor in converted.items():
        inner, part, _ = key.partition(".base_layer.lora_")  # of two nested adapters of experts; there may be one only
        is_alone = part and not {f"{inner}.base_layer.lora_A", f"{inner}.base_layer.lora_B"} & modules
        found[key.replace(".base_layer.lora_", ".lora_") if is_alone else key] = tensor
    return found


_WEIGHT = re.compile(r"(.*?)(\.(?:lora_|base_layer\.|original_module\.|modules_to_save\.).*)")


def _parameter_name(key: str, modules: dict[str, nn.Module]) -> str:
    """PEFT's files leave the adapter's name out of the names of parameters."""
    name = key.removeprefix(PEFT_PREFIX)
    path, _, attribute = name.rpartition(".")
    if hasattr(modules.get(path), "modules_to_save"):
        return f"{path}.modules_to_save.default.{attribute}"
    if attribute == "lora_magnitude_vector":  # of PEFT before 0.12
        return f"{name}.default.weight"
    if attribute in ("lora_embedding_A", "lora_embedding_B"):
        return f"{name}.default"
    if path.endswith((".lora_A", ".lora_B", ".lora_magnitude_vector", ".modules_to_save")):
        return f"{path}.default.{attribute}"
    return name
