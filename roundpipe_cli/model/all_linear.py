"""Linear layers that `all-linear` leaves out: PEFT forbids them, they return no tensor, or are outside the blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from roundpipe_cli.model.linear_modules import is_linear
from roundpipe_cli.model.packed_weights import import_bitsandbytes


def left_out_pattern(model: nn.Module, blocks_path: str | None) -> str | None:
    """A regular expression for whole names of what `all-linear` leaves out beside the LM head; None: nothing."""
    parts = [re.escape(path) for path, _ in _left_out_of_blocks(model, blocks_path)]
    if blocks_path and _has_others(model, blocks_path):
        parts.append(rf"(?!{re.escape(blocks_path)}\.).*")
    return "|".join(parts) or None


def describe_left_out(model: nn.Module, blocks_path: str) -> list[str]:
    """Notes on linear layers within the blocks that get no adapter: one text for each reason."""
    reasons: dict[str, set[str]] = {}
    for path, reason in _left_out_of_blocks(model, blocks_path):
        reasons.setdefault(reason, set()).add(re.sub(r"^\d+\.", "", path[len(blocks_path) + 1 :]))
    return [
        f"lora.target_modules: all-linear leaves out {', '.join(sorted(names))} of the blocks: {reason}"
        for reason, names in reasons.items()
    ]


def _left_out_of_blocks(model: nn.Module, blocks_path: str | None) -> Iterator[tuple[str, str]]:
    """(path, reason) of linear layers that an adapter would break."""
    forbidden = _peft_forbids(model)
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or (blocks_path and not path.startswith(f"{blocks_path}.")):
            continue
        if not is_linear(module):
            yield path, f"{type(module).__name__} returns more than one tensor"
        elif path.rpartition(".")[2] in forbidden:
            yield path, f"PEFT forbids it in models of the type {_model_type(model)}"


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def _peft_forbids(model: nn.Module) -> set[str]:
    """Names of linear layers that PEFT itself refuses to adapt in this model."""
    import_bitsandbytes()
    from peft import LoraConfig, LoraModel

    check = getattr(LoraModel, "_check_target_module_compatiblity", None)  # not public, and spelled so
    if check is None:
        return set()
    names = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    forbidden = set()
    for name in names:
        try:
            check(LoraModel, LoraConfig(), model, name)
        except ValueError:
            forbidden.add(name)
    return forbidden


def _has_others(model: nn.Module, blocks_path: str) -> bool:
    """Whether linear layers beside the LM head stand outside the blocks."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return any(
        isinstance(module, nn.Linear) and module is not head and not name.startswith(f"{blocks_path}.")
        for name, module in model.named_modules()
    )
