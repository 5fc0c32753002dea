"""Private names of other libraries, which any release may move; one error then says so."""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from typing import Any

from roundpipe_cli.errors import RefusedError


@dataclass(frozen=True)
class LibraryName:
    """One such name."""

    library: str
    """Name of the library for pip."""
    module: str
    name: str
    """With dots, inside the module."""
    used_for: str
    """The feature that does not work without it, for the user."""
    parameters: tuple[str, ...] = ()
    """The first ones, in order, where this program calls or replaces it; empty for a class or table."""


version = functools.cache(metadata.version)
"""The version of an installed package, by its name for pip; each one's metadata are read once."""

NEWEST_TRIED = {"torch": "2.13", "transformers": "5.23", "peft": "0.21"}
"""Releases with all of the names, for the advice which one to install."""

_PEFT, _GGUF = "peft.tuners.lora.layer", "transformers.modeling_gguf_pytorch_utils"
_OLD_GGUF = "GGUF files of older architectures"
LIBRARY_NAMES = (
    LibraryName("peft", _PEFT, "ParamWrapper._activate_lora", "adapters on fused experts", ("self", "active_adapters")),
    LibraryName("peft", _PEFT, "ParamWrapper.get_delta_factors", "adapters on fused experts", ("self", "adapter_name")),
    LibraryName("peft", _PEFT, "ParamWrapper.get_delta_weight", "adapters on fused experts", ("self", "adapter_name")),
    LibraryName("peft", _PEFT, "_LoraFactorsProxy", "adapters on fused experts", ("lhs", "rhs", "scaling")),
    LibraryName("peft", _PEFT, "_LoraParameterProxy", "adapters on fused experts", ("delta_weight",)),
    LibraryName(
        "transformers",
        "transformers.utils.chat_template_utils",
        "_compile_jinja_template",
        "chat templates that write today's date",
        ("chat_template",),
    ),
    LibraryName(
        "transformers",
        "transformers.integrations.sdpa_attention",
        "use_gqa_in_sdpa",
        "attention with shared keys on a GPU",
        ("attention_mask", "key"),
    ),
    LibraryName("transformers", _GGUF, "TENSOR_PROCESSORS", _OLD_GGUF),
    LibraryName("transformers", _GGUF, "TensorProcessor", _OLD_GGUF, ("config",)),
    LibraryName("transformers", _GGUF, "get_gguf_hf_weights_map", _OLD_GGUF, ("hf_model", "processor")),
    LibraryName("torch", "torch._C", "_accelerator_setAllocatorSettings", "GPU memory in segments that grow"),
)
_BY_PLACE = {(entry.module, entry.name): entry for entry in LIBRARY_NAMES}


def library_name(module: str, name: str) -> Any:
    """The object that an entry of `LIBRARY_NAMES` names in the installed release.

    Raises:
        RefusedError: that release has no such name, or calls it by other parameters.
    """
    entry = _BY_PLACE[module, name]
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise _moved(entry, "no such name") from None
    if entry.parameters:
        _check_parameters(entry, found)
    return found


@functools.cache
def _check_parameters(entry: LibraryName, function: Any) -> None:
    parameters = tuple(inspect.signature(function).parameters)
    if parameters[: len(entry.parameters)] != entry.parameters:
        raise _moved(entry, f"parameters {', '.join(parameters)}")


def _moved(entry: LibraryName, found: str) -> RefusedError:
    try:
        installed = version(entry.library)
    except PackageNotFoundError:
        installed = "not installed"
    newest = NEWEST_TRIED[entry.library]
    return RefusedError(
        f"{entry.used_for}: not with this release of {entry.library} ({installed})",
        where=f"{entry.module}.{entry.name}, which is not public",
        found=found,
        expected=f"as in {entry.library} {newest}",
        hint=f"pip install '{entry.library}=={newest}.*', or a newer roundpipe-cli",
    )
