"""Forms in which a checkpoint's weights may be quantised, by its config.json, for `plan`, `download` and `finetune`.
No torch.

All but bitsandbytes' 4 bit are dequantised while they are read, one weight at a time. Other forms, GPTQ and AWQ among
them, are refused before a weight is downloaded or read, with the size of the unquantised model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundpipe_cli.choices import PACKED_FORMATS, PackedName
from roundpipe_cli.costs.memory import loading_need
from roundpipe_cli.costs.models import TrainingSettings, parse_config
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import format_bytes, format_count

COMPRESSED = "compressed-tensors"
_SETTINGS = ("quantization_config", "compression_config")
WHAT_WORKS = (
    "FP8, MXFP4, NVFP4, compressed-tensors, bitsandbytes' NF4, a .gguf file, or the unquantised model "
    "(load_in_4bit, load_in_8bit or load_in_fp8: true packs it while loading)"
)
COMPRESSED_FORMATS = (
    *("dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
MODELOPT_KINDS = ("FP8", "NVFP4", "MIXED_PRECISION", "FP8_PB_WO", "NVFP4_AWQ")


def quantization_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration about how the model's files are quantised; empty where they are not."""
    for part in (config, config.get("text_config")):
        for key in _SETTINGS:
            found = part.get(key) if isinstance(part, dict) else None
            if found:
                return found if isinstance(found, dict) else {"quant_method": str(found)}
    return {}


def _method(settings: Mapping[str, Any]) -> str:
    packed = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    return str(settings.get("quant_method") or ("bitsandbytes" if packed else "of an unknown kind"))


def stored_form(config: Mapping[str, Any], where: str) -> str | None:
    """`quant_method` of the model's files; None where they are not quantised.

    Args:
        where: the file that holds the configuration.

    Raises:
        RefusedError: they are quantised in a form that cannot be read here.
    """
    settings = quantization_settings(config)
    if not settings:
        return None
    method = _method(settings)
    unread = _UNREAD[method](settings) if method in _UNREAD else method
    if unread is not None:
        raise RefusedError(
            "the model's weights are quantised in a form that cannot be read",
            where=f"{where}: quantization_config",
            found=unread[:120],
            expected=WHAT_WORKS,
            hint=_unquantised(config, where),
        )
    return method


def _unquantised(config: Mapping[str, Any], where: str) -> str:
    """Advice to take the unquantised model, with its size and need where the configuration has its figures."""
    advice = "name the unquantised model, with load_in_4bit: true"
    plain = {key: value for key, value in config.items() if key not in _SETTINGS}
    try:
        architecture = parse_config(plain, name="the unquantised model", source=where)
    except RefusedError:
        return advice
    count, about = architecture.parameters, "about " if architecture.is_guess else ""
    need = loading_need(architecture, TrainingSettings(max_seq_length=1, packed_as="4bit"))
    return (
        f"{advice}: {about}{format_count(count)} parameters, {format_bytes(2 * count)} in 16 bit; in 4 bit it takes "
        f"about {format_bytes(need.total_bytes)} of host memory"
    )


def _unread_bitsandbytes(settings: Mapping[str, Any]) -> str | None:
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if not settings.get("load_in_4bit"):
        return "bitsandbytes, LLM.int8"
    return None if kind == "nf4" else f"bitsandbytes, {kind} in 4 bit"


def _unread_groups(settings: Mapping[str, Any]) -> str:
    """GPTQ and AWQ: whole numbers of few bits, with a scale and a zero point for each group of inputs."""
    name, bits = str(settings["quant_method"]).upper(), settings.get("bits", settings.get("w_bit"))
    return f"{name}, {bits} bits" if bits else name


def _unread_compressed(settings: Mapping[str, Any]) -> str | None:
    if settings.get("transform_config"):
        return f"{COMPRESSED}, with rotations (transform_config)"
    sparsity = settings.get("sparsity_config")
    kind = sparsity.get("format", "dense") if isinstance(sparsity, dict) else "dense"
    if kind != "dense":
        return f"{COMPRESSED}, sparsity: {kind}"
    groups = settings.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else []
    forms = [settings.get("format"), *(group.get("format") for group in listed if isinstance(group, dict))]
    unread = next((form for form in forms if form and form not in COMPRESSED_FORMATS), None)
    return None if unread is None else f"{COMPRESSED}, format: {unread}"


def _unread_modelopt(settings: Mapping[str, Any]) -> str | None:
    kind = settings.get("quant_algo")
    return None if kind in MODELOPT_KINDS else f"modelopt, quant_algo: {kind}"


def _read(settings: Mapping[str, Any]) -> None:
    return None


_UNREAD = {
    "bitsandbytes": _unread_bitsandbytes,
    "gptq": _unread_groups,
    "awq": _unread_groups,
    COMPRESSED: _unread_compressed,
    "modelopt": _unread_modelopt,
    "fp8": _read,
    "fbgemm_fp8": _read,
    "mxfp4": _read,
}
"""Method -> a function that names its unreadable settings, or returns None."""


def is_stored_in_4bit(config: Mapping[str, Any], where: str) -> bool:
    """Whether the model's files hold its weights in bitsandbytes' NF4, in which they stay.

    Args:
        where: the file that holds the configuration.

    Raises:
        RefusedError: they are quantised in a form that cannot be read here.
    """
    return stored_form(config, where) == "bitsandbytes"


def check_stored_in_4bit(name: str, *, method: str, packed_as: PackedName | None) -> None:
    """Refuse to train a model whose files are in 4 bit, and which stays so, in another way.

    Raises:
        RefusedError: the recipe wants it otherwise.
    """
    wrong = ["method: full"] if method == "full" else []
    wrong += [f"{PACKED_FORMATS[packed_as].key}: true"] if packed_as not in (None, "4bit") else []
    for found in wrong:
        raise RefusedError(
            "the model's files hold its weights in 4 bit, in which they stay",
            where=name,
            found=found,
            expected="method: lora, with or without load_in_4bit: true",
            hint="for anything else name the unquantised model",
        )
