"""Forms in which a checkpoint's weights may be quantised, by its config.json, for `plan` and `finetune`. No torch.

All but bitsandbytes' 4 bit are dequantised while they are read, one weight at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundpipe_cli.choices import PACKED_FORMATS, PackedName
from roundpipe_cli.errors import RefusedError

COMPRESSED = "compressed-tensors"
WHAT_WORKS = (
    "FP8, MXFP4, NVFP4, GPTQ, AWQ, compressed-tensors, bitsandbytes' NF4, a .gguf file, or the unquantised model "
    "(load_in_4bit, load_in_8bit or load_in_fp8: true packs it while loading)"
)
COMPRESSED_FORMATS = (
    *("dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
GPTQ_BITS = (2, 3, 4, 8)
GPTQ_FORMATS = (None, "", "gptq", "gptq_v2")
MODELOPT_KINDS = ("FP8", "NVFP4", "MIXED_PRECISION", "FP8_PB_WO", "NVFP4_AWQ")


def quantization_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration about how the model's files are quantised; empty where they are not."""
    for part in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
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
        )
    return method


def _unread_bitsandbytes(settings: Mapping[str, Any]) -> str | None:
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if not settings.get("load_in_4bit"):
        return "bitsandbytes, LLM.int8"
    return None if kind == "nf4" else f"bitsandbytes, {kind} in 4 bit"


def _unread_gptq(settings: Mapping[str, Any]) -> str | None:
    bits, form = settings.get("bits"), gptq_format(settings)
    if bits not in GPTQ_BITS:
        return f"gptq, bits: {bits}"
    return _unread_words("gptq", settings) if form in GPTQ_FORMATS else f"gptq, checkpoint_format: {form}"


def gptq_format(settings: Mapping[str, Any]) -> str | None:
    """Arrangement of GPTQ's words, under any of its names; None: the first."""
    if settings.get("is_marlin_format"):
        return "marlin"
    found: str | None = settings.get("checkpoint_format") or settings.get("format")
    return found


def _unread_words(method: str, settings: Mapping[str, Any]) -> str | None:
    words = settings.get("pack_dtype") or "int32"
    if words != "int32":
        return f"{method}, pack_dtype: {words}"
    return f"{method}, rotation: {settings['rotation']}" if settings.get("rotation") else None


def _unread_awq(settings: Mapping[str, Any]) -> str | None:
    bits = settings.get("bits", settings.get("w_bit", 4))
    named = settings.get("version") or settings.get("checkpoint_format") or settings.get("format") or "gemm"
    if bits != 4:
        return f"awq, bits: {bits}"
    return _unread_words("awq", settings) if str(named).lower() == "gemm" else f"awq, version: {str(named).lower()}"


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
    "gptq": _unread_gptq,
    "awq": _unread_awq,
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
