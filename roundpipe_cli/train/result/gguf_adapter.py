"""A GGUF file of an adapter, which llama.cpp and Ollama add to a base model's file as they run it.

NAME.lora_a [r, in], NAME.lora_b [out, r]     NAME: of the base's weight, whose order of rows they have
adapter.lora.alpha                            each product is multiplied by alpha / its own r
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.adapter_files import (
    ADAPTER_CONFIG,
    StartedBase,
    expert_factors,
    put_adapter,
    read_adapter_config,
    read_adapter_tensors,
)
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.stored.tensors import base_name, is_adapter, tied_names
from roundpipe_cli.model.stored.untied import untie_stored
from roundpipe_cli.model.weights_io import BaseWeights
from roundpipe_cli.train.result.gguf_file import FAMILIES, Family, in_rows_of, write_out

ADAPTED: Mapping[str, Family] = {
    **FAMILIES,
    "gemma3": FAMILIES["gemma3_text"],
    "glm4_moe": Family("glm4moe"),
    "gpt_oss": Family("gpt-oss"),
    "mixtral": FAMILIES["llama"],
    "qwen2_moe": Family("qwen2moe"),
}
"""transformers' type of a base model -> the family by which its adapters are written."""


def write_adapter_gguf(result: Path, base: ModelSource, target: Path) -> None:
    """Write the adapter in `result`, of the model `base`, as the file `target`, in float32.

    Raises:
        RefusedError: llama.cpp has no place for a part of the adapter, or it does not fit the base.
        OSError: disk full or failing.
    """
    from gguf import MODEL_ARCH_NAMES, GGUFType, GGUFWriter, get_tensor_name_map

    config, settings = load_config(base), read_adapter_config(result)
    if config.model_type not in ADAPTED:
        raise _no_place(result, f"an adapter of a model of the type {config.model_type}")
    family, text = ADAPTED[config.model_type], config.get_text_config()
    model = build_skeleton(config, torch.float32)
    if base.gguf_file is None:
        untie_stored(model, base.folder)
    tied = tied_names(model)
    put_adapter(model, settings, result)
    tensors = read_adapter_tensors(model, result)
    layers = [(path, layer) for path, layer in model.named_modules() if hasattr(layer, "lora_A")]
    factors = [(*part, layer.scaling["default"]) for path, layer in layers for part in _factors(path, layer, tensors)]
    has_whole = not all(map(is_adapter, tensors))  # PEFT saves adapted tables
    whole: Mapping[str, torch.Tensor] = BaseWeights(base, model, torch.float32) if has_whole else {}
    same = [
        name for name, one in tensors.items() if torch.equal(whole.get(base_name(name), one[:0]).to(one.dtype), one)
    ]
    lost = [name for name in tensors if name not in same]
    lost += [f"{name}, which embedding and LM head share" for name, *_ in factors if name in tied]
    lost += ["init_lora_weights: the base weights that its start changed"] if StartedBase(model, result).names else []
    lost += ["use_bdlora: block-diagonal factors"] if settings.use_bdlora else []
    (kind,) = (kind for kind, name in MODEL_ARCH_NAMES.items() if name == family.architecture)
    table = get_tensor_name_map(kind, text.num_hidden_layers)
    names = {name: table.get_name(name.replace(".language_model.", "."), (".weight",)) for name, *_ in factors}
    lost += [own for own, name in names.items() if name is None]
    if lost:
        raise _no_place(result, lost[0])
    alphas = Counter(scaling * b.shape[-1] for _, _, b, scaling in factors)
    alpha = alphas.most_common(1)[0][0] or 1.0  # 0 means 1 for every product
    writer = GGUFWriter(target, family.architecture)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_name(result.absolute().name)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for own, a, b, scaling in factors:
        b = in_rows_of(family, names[own], b.float() * (scaling * b.shape[-1] / alpha), text)
        writer.add_tensor(f"{names[own]}.lora_a", a.float().contiguous().numpy())
        writer.add_tensor(f"{names[own]}.lora_b", b.contiguous().numpy())
    write_out(writer)


def _factors(path: str, layer: Any, tensors: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Names of the base weights that an adapter's layer changes, with their factors, taken out of `tensors`."""
    holder, own = base_name(path), getattr(layer, "parameter_name", "weight")
    if layer.lora_embedding_A:
        a, b = (tensors.pop(f"{path}.lora_embedding_{matrix}.default") for matrix in "AB")
        yield f"{holder}.weight", a.T, b  # a row for each token
    elif own == "gate_up_proj":
        a, b = expert_factors(path, layer, tensors)
        gate, up = b.chunk(2, 1) if layer.get_base_layer().is_concatenated else (b[:, ::2], b[:, 1::2])
        yield f"{holder}.gate_proj.weight", a, gate
        yield f"{holder}.up_proj.weight", a, up
    elif own == "down_proj":
        yield f"{holder}.down_proj.weight", *expert_factors(path, layer, tensors)
    else:
        a, b = (tensors.pop(f"{path}.lora_{matrix}.default.weight") for matrix in "AB")
        yield f"{holder}.{own}", a, b


def _no_place(result: Path, found: str) -> RefusedError:
    return RefusedError(
        "llama.cpp's adapters have no place for a part of this one",
        where=str(result / ADAPTER_CONFIG),
        found=found,
        expected=f"low-rank factors of a language model's matrices, of the types {', '.join(sorted(ADAPTED))}",
        hint="--merge --gguf makes one file of base and adapter",
    )
