"""LoRA by PEFT: adapters put into the skeleton, their first values, and the adapter as a folder."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.nf4 import import_bitsandbytes

ADAPTER = "default"


def add_lora(
    model: nn.Module,
    *,
    r: int,
    alpha: float,
    dropout: float,
    target_modules: str | tuple[str, ...],
    dtype: torch.dtype,
    base_name: str,
    blocks_path: str | None = None,
) -> Any:
    """Put LoRA modules into `model` (parameters on the meta device) and leave only them trainable.

    Args:
        target_modules: `all-linear`, or names of modules.
        dtype: of the adapter's weights while training; their masters are float32.
        base_name: what the adapter's configuration calls the base model.
        blocks_path: of the language model's blocks; `all-linear` then leaves out linear layers elsewhere (those of a
            model that reads pictures too).

    Returns:
        the PEFT model around `model`.

    Raises:
        RefusedError: no module of that name, or one that the engine cannot adapt.
    """
    import_bitsandbytes()
    from peft import LoraConfig, get_peft_model

    names = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=names,
        exclude_modules=_elsewhere(model, blocks_path) if names == "all-linear" and blocks_path else None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # says that all-linear covers fused experts; the run's notices say it too
            peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    except ValueError as error:
        raise RefusedError(
            "LoRA finds nothing to adapt",
            where="lora.target_modules",
            found=f"{names!r}: {str(error).splitlines()[0][:200]}",
            hint="lora.target_modules=all-linear adapts every linear layer of the blocks",
        ) from error
    peft_model.peft_config[ADAPTER].base_model_name_or_path = base_name
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.requires_grad and parameter.dtype != dtype:
                module._parameters[name] = nn.Parameter(parameter.to(dtype))
    return peft_model


def _elsewhere(model: nn.Module, blocks_path: str) -> str | None:
    """A pattern of everything outside the blocks, where linear layers beside the LM head stand there."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    outside = (
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not name.startswith(blocks_path + ".")
    )
    return rf"(?!{re.escape(blocks_path)}\.).*" if any(True for _ in outside) else None


def refuse_adapters_outside_blocks(model: nn.Module, blocks_path: str) -> None:
    """The head stays frozen and the embedding stays on the host, so adapters belong into blocks.

    Raises:
        RefusedError: an adapted module outside the blocks.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith(blocks_path + "."):
            raise RefusedError(
                "adapters outside the model's blocks are not supported",
                where="lora.target_modules",
                found=name,
                expected=f"modules below {blocks_path}",
                hint="lora.target_modules=all-linear leaves out the LM head and the embedding",
            )


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """PEFT's default start (A: Kaiming uniform with a = sqrt 5, B: zero), each tensor from a seed of its own name."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        values = torch.zeros(parameter.shape, dtype=torch.float32)
        if ".lora_A." in name:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        yield name, values


def save_adapter(peft_model: Any, masters: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapter in PEFT's format, from float32 `masters` by parameter name of the inner model."""
    prefix = "base_model.model."
    state = {prefix + name: tensor.contiguous() for name, tensor in masters.items()}
    peft_model.save_pretrained(str(folder), state_dict=state, safe_serialization=True)
    readme = folder / "README.md"  # PEFT's template of a model card, full of blanks
    if readme.exists():
        readme.unlink()
