"""Models and types that are refused before a weight is read; `plan` and `finetune` use the same rules. No torch.

Which model types there are is read from the installed transformers, whose tables are parsed, not imported (importing
them loads torch and takes seconds).
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError, closest

_TABLES = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py", "models/auto/modeling_auto.py")
_ASKED = (
    "CONFIG_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)
MAX_MASK_BYTES = 512 * 1024**2
"""Size of one mask of one microbatch, a byte for each pair of tokens: 23,170 tokens in one sequence."""


@dataclass(frozen=True, slots=True)
class ModelTypes:
    """Model types of the installed transformers, each with the name of its class where there is one."""

    known: Mapping[str, str]
    causal: Mapping[str, str]
    masked: Mapping[str, str]
    multimodal: Mapping[str, str]
    """Types that read pictures and write text."""


def check_architecture(config: Mapping[str, Any], *, name: str, where: str) -> None:
    """Refuse a configuration that says itself that it is not a decoder-only language model's.

    An encoder by its class's default is refused by `load_config`, which `plan` asks for types that it must build.

    Args:
        name: of the model, as the recipe has it.
        where: the file that holds the configuration.

    Raises:
        RefusedError: no model type that transformers knows, or no decoder.
    """
    types = model_types()
    if types is None:  # transformers has another layout than is known here: it reports the error itself when it loads
        return
    model_type = str(config.get("model_type", ""))
    if model_type not in types.known:
        raise unknown_architecture(model_type, where, list(types.known))
    both_ways = model_type in types.masked and not config.get("is_decoder")
    if model_type not in {*types.causal, *types.multimodal} or config.get("is_encoder_decoder") or both_ways:
        raise no_decoder(name, model_type, config.get("architectures"))


def unknown_architecture(model_type: str, where: str, known: list[str]) -> RefusedError:
    """The error for a model type that the installed transformers does not have."""
    nearest = closest(model_type, known) if model_type else None
    return RefusedError(
        "unknown architecture",
        where=f"{where}: model_type",
        found=repr(model_type),
        expected="a model type of the installed transformers",
        hint=f"did you mean {nearest}? else: pip install -U transformers" if nearest else "pip install -U transformers",
    )


def no_decoder(name: str, model_type: str, architectures: object) -> RefusedError:
    """The error for a model that does not continue text."""
    classes = [str(one) for one in architectures] if isinstance(architectures, (list, tuple)) else []
    return RefusedError(
        "not a decoder-only language model",
        where="model",
        found=f"{name}: {model_type}, {', '.join(classes or ['no architecture named'])}",
        expected="a causal language model, for instance Qwen3, Llama, Mistral, Gemma, GPT-OSS",
    )


# --- packed rows, and sequences in chunks ---------------------------------------------------------------------------


NO_MASK = "a block that is given no mask for packed rows"
MASK_OF_ONE = "a mask that lets a row see the row before it"


def packing_refusal(where: str, found: str) -> RefusedError:
    """The error for a model whose packed rows would see each other."""
    return RefusedError(
        "this model cannot train on packed rows: they would see each other",
        where=f"packing: {where}",
        found=found,
        expected="blocks whose attention masks separate the rows",
        hint="packing=false",
    )


def chunk_refusal(where: str, found: str, expected: str = "blocks of attention") -> RefusedError:
    """The error for a model that cannot take a sequence in chunks."""
    return RefusedError(
        "this model cannot train on sequences in chunks",
        where=f"pipeline.sequence_chunks: {where}",
        found=found,
        expected=expected,
        hint="pipeline.sequence_chunks=1",
    )


def check_mask_bytes(*, max_seq_length: int, micro_batch_size: int) -> None:
    """Refuse packed sequences whose attention masks, a byte for each pair of tokens, would be too large.

    Raises:
        RefusedError: more than `MAX_MASK_BYTES` for one microbatch.
    """
    mask_bytes = micro_batch_size * max_seq_length**2
    if mask_bytes > MAX_MASK_BYTES:
        raise RefusedError(
            "packed sequences of this length need attention masks that are too large",
            where="packing",
            found=f"max_seq_length {max_seq_length}, micro_batch_size {micro_batch_size}: {mask_bytes} bytes a mask",
            expected=f"at most {MAX_MASK_BYTES} bytes",
            hint=f"max_seq_length={int((MAX_MASK_BYTES / micro_batch_size) ** 0.5)} or packing=false",
        )


def scaled_by_length(kinds: Collection[str], limit: int | None, max_seq_length: int) -> str | None:
    """The error for position scaling that depends on the longest row of a batch, so that rows depend on others.

    Args:
        kinds: transformers' names of the ways in which positions are scaled.
        limit: tokens up to which they are not; None: always.
    """
    above = limit or max_seq_length
    if not set(kinds) & {"dynamic", "longrope"} or max_seq_length <= above:
        return None
    return f"position scaling by length ({', '.join(sorted(kinds))}) above {above} tokens"


# --- the tables of transformers -------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def model_types() -> ModelTypes | None:
    """The installed transformers' types; None where its tables have moved."""
    folder = _transformers_folder()
    if folder is None:
        return None
    found: dict[str, dict[str, str]] = {name: {} for name in _ASKED}
    for path in _TABLES:
        tree = _parsed(folder / path)
        for statement in tree.body if tree is not None else ():
            name = _name_filled(statement.value if isinstance(statement, ast.Expr) else statement)
            if name in found:
                found[name] |= _pairs(statement)
    known, causal, masked, multimodal = (found[name] for name in _ASKED)
    return ModelTypes(known, causal, masked, multimodal) if {"llama", "gpt2"} <= known.keys() & causal.keys() else None


def _transformers_folder() -> Path | None:
    spec = importlib.util.find_spec("transformers")  # a package at the top: nothing is imported
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None


def _name_filled(node: ast.AST) -> str:
    """Name of the table that a statement makes (`NAME = OrderedDict(...)`) or adds to (`NAME.update(...)`)."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
        return node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    return ""


def _pairs(statement: ast.AST) -> dict[str, str]:
    """(text, text or something else) pairs of the tuples and dictionaries in a statement."""
    pairs: dict[str, str] = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            entries = [(node.elts[0], node.elts[1])]
        elif isinstance(node, ast.Dict):
            entries = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        else:
            continue
        for key, value in entries:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
                pairs.setdefault(key.value, text)
    return pairs
