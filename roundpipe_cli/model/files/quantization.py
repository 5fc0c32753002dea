"""Forms in which a checkpoint's weights may be quantised, by its config.json, for `plan`, `download` and `finetune`.
No torch.

MXFP4, FP8 in blocks of 128 x 128 and bitsandbytes' NF4 stay as they are (`stored_as` in `costs/models.py`). Other FP8
is dequantised while it is read, one weight at a time, and so are the first two where a run asks for it. Other forms
(GPTQ, AWQ, NVFP4, compressed-tensors ...) are refused before a weight is downloaded or read, with the size of the
unquantised model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundpipe_cli.choices import PACKED_FORMATS, PackedName
from roundpipe_cli.costs.memory import loading_need
from roundpipe_cli.costs.models import SETTINGS, parse_config, quantization_settings
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import format_bytes, format_count

WHAT_WORKS = (
    "FP8, MXFP4, bitsandbytes' NF4, a .gguf file, or the unquantised model "
    "(load_in_4bit, load_in_8bit or load_in_fp8: true packs it while loading)"
)
_READ = ("fp8", "fbgemm_fp8", "mxfp4")
"""Methods of which every setting can be read."""


def stored_form(config: Mapping[str, Any], where: str) -> str | None:
    """`quant_method` of the model's files, such as `bitsandbytes`; None: not quantised.

    Raises:
        RefusedError: they are quantised in a form that cannot be read here.
    """
    settings = quantization_settings(config)
    if not settings:
        return None
    packed = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    method = str(settings.get("quant_method") or ("bitsandbytes" if packed else "of an unknown kind"))
    if (unread := _unread(method, settings)) is not None:
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
    plain = {key: value for key, value in config.items() if key not in SETTINGS}
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


def _unread(method: str, settings: Mapping[str, Any]) -> str | None:
    """The form's name, with what it says of its bits or kind, or the size of its blocks; None: it can be read."""
    if method in _READ:
        block = settings.get("weight_block_size")
        is_size = isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)
        return None if block is None or is_size else f"{method}, weight_block_size {block}"
    if method == "bitsandbytes":
        kind = settings.get("bnb_4bit_quant_type", "fp4")
        if not settings.get("load_in_4bit"):
            return "bitsandbytes, LLM.int8"
        return None if kind == "nf4" else f"bitsandbytes, {kind} in 4 bit"
    bits, kind = settings.get("bits", settings.get("w_bit")), settings.get("format", settings.get("quant_algo"))
    name = method.upper() if method in ("gptq", "awq") else method
    return f"{name}, {bits} bits" if bits else f"{name}, {kind}" if kind else name


def describe_repacking(stored: PackedName, packed_as: PackedName | None) -> str:
    """A notice that weights are packed in another form than the files have, and what that changes."""
    before, now = PACKED_FORMATS[stored], PACKED_FORMATS[packed_as or stored]
    change = f"{100 * now.weight_change:.2g} %"
    without = f"without {now.key} they stay as published"
    return f"the files hold weights in {before.label}, which {now.label} packs anew and changes by {change}; {without}"


def check_stored_in_4bit(name: str, *, method: str, packed_as: PackedName | None, unpacks: bool) -> None:
    """Refuse to train a model whose files are in bitsandbytes' 4 bit, and which stays so, in another way; `unpacks`:
    the recipe's `load_in_16bit`."""
    wrong = ["method: full"] if method == "full" else []
    wrong += ["load_in_16bit: true"] if unpacks else []
    wrong += [f"{PACKED_FORMATS[packed_as].key}: true"] if packed_as not in (None, "4bit") else []
    for found in wrong:
        raise RefusedError(
            "the model's files hold its weights in 4 bit, in which they stay",
            where=name,
            found=found,
            expected="method: lora, with or without load_in_4bit: true",
            hint="for anything else name the unquantised model",
        )
