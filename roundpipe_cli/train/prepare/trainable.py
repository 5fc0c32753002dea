"""The trained part of a model: adapters or its own parameters, their weights loaded, the split proven."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli import __version__
from roundpipe_cli.cache import cache_folder
from roundpipe_cli.engine.parity import MAX_PARAMETERS, ParityRefusedError, Proof, prove
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.events import Notice, Phase, Tell, tell_notices
from roundpipe_cli.files import sha256_of, write_atomically
from roundpipe_cli.library_names import version
from roundpipe_cli.model.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    StartedBase,
    read_adapter_tensors,
    trained_tokens,
)
from roundpipe_cli.model.dropout import NOISE_ATTRIBUTE
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.lora import (
    ADAPTER,
    LoraSettings,
    add_lora,
    continue_lora,
    initial_values,
    refuse_adapters_outside_blocks,
)
from roundpipe_cli.model.new_tokens import NewTokens, table_names
from roundpipe_cli.model.reduced import reduce_model, shrunk_configs
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.stored.nf4 import PackedWeight
from roundpipe_cli.model.stored.tensors import is_adapter
from roundpipe_cli.model.weights_io import load_weights
from roundpipe_cli.recipe.load import LoadedRecipe, resolve_path
from roundpipe_cli.recipe.schema import LoraConfig, Recipe
from roundpipe_cli.regular_files import read_json_of_ours, tried_paths
from roundpipe_cli.units import format_bytes, format_count, format_seconds
from roundpipe_cli.watchdog import at_work

# Loading weights from the model's files into the store, with progress.

TELL_EVERY_S = 5.0


def _counting(store: WeightStore, tell: Tell) -> Callable[[str], None]:
    """A function that is told of each weight that is filled, and reports from time to time how many bytes are."""
    places = [place for layout in store.layouts for place in layout.places if not is_adapter(place.name)]
    sizes = {place.name: place.num_bytes for place in places}
    total, done = sum(sizes.values()), 0
    began_s = told_s = time.monotonic()
    tell(Phase(f"loading {format_bytes(total)} of weights"))

    def count(name: str) -> None:
        nonlocal done, told_s
        done += sizes[name]
        now_s = time.monotonic()
        if now_s - told_s < TELL_EVERY_S or done >= total:
            return
        told_s = now_s
        bytes_per_s = max(1.0, done / (now_s - began_s))
        left = format_seconds(max(1, round((total - done) / bytes_per_s)))
        of = f"{format_bytes(done)} of {format_bytes(total)}, {format_bytes(bytes_per_s)}/s"
        tell(Phase(f"loading weights: {of}, {left} left"))

    return count


def fill_store(
    store: WeightStore,
    source: ModelSource,
    model: nn.Module,
    recipe: Recipe,
    *,
    new: NewTokens | None = None,
    start: Path | None,
    tell: Tell,
) -> None:
    """Load the base weights, then the adapter's: first values, or those of the folder `start`, which is trained
    further, and which DPO's reference keeps. `model`: the skeleton, adapters included."""
    started = None if start is None else StartedBase(model, start)
    count = _counting(store, tell)

    def set_parameter(name: str, values: torch.Tensor) -> None:
        store.set_parameter(name, values if started is None else started.weight(name, values))
        count(name)

    def set_packed(name: str, weight: PackedWeight) -> None:
        if started is not None:
            started.refuse_packed(name)
        store.set_packed(name, weight)
        count(name)

    tell_notices(tell, *load_weights(source, model, set_parameter, set_packed, new=new))
    if recipe.method == "full":
        return
    first = initial_values(model, recipe.seed, store.base_weight, recipe.lora.init)
    for name, values in first if start is None else _started_from(start, model, store).items():
        store.set_parameter(name, values)
    if start is not None and recipe.objective == "dpo":
        store.keep_reference()


def _started_from(start: Path, model: nn.Module, store: WeightStore) -> dict[str, torch.Tensor]:
    """The tensors of an adapter that is trained further.

    Raises:
        RefusedError: they do not fit the model, or weights beside them are others than the base's: the result, which is
            an adapter, would not hold them.
    """
    found = read_adapter_tensors(model, start)
    places = {place.name for layout in store.layouts for place in layout.places}
    twins = dict(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in twins.items() if name in places}
    buffers = dict(model.named_buffers())
    for name in found.keys() & buffers.keys():
        buffers[name].copy_(found.pop(name))
    for name in [name for name in found if not is_adapter(name)]:
        base = store.base_weight(names[id(twins[name])])
        if not torch.equal(found.pop(name).to(base.dtype), base):
            raise RefusedError(
                "a table beside the adapter is another than the base model's, and would not be in the result",
                where="lora.start_from",
                found=f"{name} in {start}",
                hint=f"merge it first (`roundpipe export {start} --merge`), then train a new adapter on the result",
            )
    return found


# The proof of a model before its run, kept in the cache; see `engine/parity.py`.
#
# A file per key, JSON. What cannot be read or written is proven again.

FORMAT = 6
"""Version of the files; raised when a proof gets another meaning."""
LIBRARIES = ("torch", "transformers", "peft")

BuildModel = Callable[[Any], tuple[nn.Module, ModelSplit]]
"""Makes a trainable skeleton from a configuration, as the recipe says."""


def prove_once(model: nn.Module, split: ModelSplit, recipe: Recipe, build: BuildModel, tell: Tell) -> Proof:
    """Prove that the engine trains `model` as its own code does, unless that is known.

    Args:
        model: parameters on the meta device, made trainable; left as it is.
        build: makes a smaller one, of a model whose blocks are too large to try.

    Raises:
        ParityRefusedError: it does not.
    """
    path = cache_folder("proofs") / f"{_key(model, recipe)}.json"
    proof = _load(path)
    if proof is None:
        tell(Phase("comparing the engine with the model's own forward and backward"))
        with at_work("comparing the engine with the model's own forward and backward"):
            proof = _prove_by_kernels(model, split, recipe, build)
        with suppress(OSError, ResourceError):  # a cache that cannot be written is no error
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(asdict(proof)).encode())
    if proof.unproven:
        tell(Notice(f"not proven that this model trains as its own code does: {proof.unproven}"))
    if proof.not_fused:
        tell(Notice(f"kernels: none of this model is fused, for it would be trained wrong: {proof.not_fused}"))
    return proof


def refuse_long_rows(longest: int, proof: Proof) -> None:
    """Raise a RefusedError for rows of more tokens than the model has positions."""
    if proof.last_position is not None and longest > proof.last_position:
        raise RefusedError(
            "rows are longer than this model has positions",
            where="max_seq_length",
            found=f"a row of {longest} tokens",
            expected=f"at most {proof.last_position} (max_position_embeddings of the model's configuration)",
            hint=f"max_seq_length={proof.last_position}",
        )


def _prove_by_kernels(model: nn.Module, split: ModelSplit, recipe: Recipe, build: BuildModel) -> Proof:
    """The proof by the kernels that the recipe asks for, or by the model's own where fused ones compute otherwise."""
    ways = {"packing": recipe.packs, "chunks": recipe.pipeline.num_chunks > 1}
    not_fused = ""
    if recipe.kernels == "auto":
        try:
            return _prove(model, split, build, **ways, fused=True)
        except ParityRefusedError as error:
            not_fused = f"{error.problems[0].where}: {error.problems[0].found}"
    return replace(_prove(model, split, build, **ways, fused=False), not_fused=not_fused)


def _prove(model: nn.Module, split: ModelSplit, build: BuildModel, **how: bool) -> Proof:
    """The proof of the model itself, or of the first narrower one that works."""
    if reduce_model(model, split).num_parameters > MAX_PARAMETERS:
        for smaller, its_split in _narrower(model.config, build):
            proof = prove(smaller, its_split, **how)
            if not proof.unproven:
                return proof
    return prove(model, split, **how)


def _narrower(config: Any, build: BuildModel) -> Iterator[tuple[nn.Module, ModelSplit]]:
    with suppress(Exception):  # an odd configuration may fail in any way
        for smaller in shrunk_configs(config):
            try:
                built = build(smaller)
            except Exception:
                continue
            yield built


def _key(model: nn.Module, recipe: Recipe) -> str:
    """Hash of all that a proof depends on: code, configuration, what is trained and how."""
    config: Any = model.config
    parts = {
        "format": FORMAT,
        "versions": [__version__, *(version(name) for name in LIBRARIES)],
        "config": {key: value for key, value in config.to_dict().items() if key != "_name_or_path"},
        "parameters": [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()],
        "packing": recipe.packs,
        "chunks": recipe.pipeline.num_chunks > 1,
        "kernels": recipe.kernels,
        "lora": asdict(recipe.lora) if recipe.method == "lora" else None,
        "scaling": [found for module in model.modules() if isinstance(found := getattr(module, "scaling", None), dict)],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _load(path: Path) -> Proof | None:
    try:
        found = read_json_of_ours(path)
        return Proof(
            float(found["loss_error"]),
            float(found["gradient_error"]),
            str(found["unproven"]),
            found["last_position"],
            str(found["not_fused"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_trainable(
    model: nn.Module,
    split: ModelSplit,
    recipe: Recipe,
    source: ModelSource,
    *,
    new: NewTokens,
    dtype: torch.dtype,
    start: Path | None,
) -> Any:
    """Put adapters into a model, or mark which of its parameters are trained.

    Args:
        dtype: of adapters' weights while training.
        start: folder of an adapter to train further.

    Returns:
        PEFT's model around it; None for full fine-tuning.
    """
    noisy: Any = model.get_input_embeddings()  # type: ignore[operator]
    setattr(noisy, NOISE_ATTRIBUTE, recipe.neftune_noise_alpha)
    if recipe.method == "full":
        _train_all_but(model, recipe.frozen_parameters, split.unreached)
        _refuse_frozen_rows(model, recipe, new)
        return None
    name = source.name if source.commit is not None else str(source.folder)  # PEFT finds it from any folder
    if start is not None:
        peft_model = continue_lora(model, start, dropout=recipe.lora.dropout, dtype=dtype, base_name=name)
        refuse_other_shape(recipe.lora, peft_model.peft_config[ADAPTER], start)
        _refuse_other_tokens(peft_model.peft_config[ADAPTER], recipe, new, start)
    else:
        expert_r = None if recipe.lora.expert_r == "auto" else recipe.lora.expert_r
        settings = LoraSettings(**same_named(LoraSettings, recipe.lora) | {"expert_r": expert_r, "new_ids": new.ids})
        peft_model = add_lora(model, settings, dtype=dtype, base_name=name, blocks_path=split.blocks_path)
    peft_model.peft_config[ADAPTER].revision = source.commit
    refuse_adapters_outside_blocks(model, split.blocks_path)
    return peft_model


def same_named(kind: type[Any], source: object) -> dict[str, Any]:
    """Values for those fields of a dataclass that `source` has attributes of the same names for."""
    return {one.name: getattr(source, one.name) for one in fields(kind) if hasattr(source, one.name)}


def describe_unreached(model: nn.Module, split: ModelSplit) -> str | None:
    """A notice about weights that text never uses; None: there are none."""
    parts = {name: parameter.numel() for name, parameter in model.named_parameters() if name in split.unreached}
    if not parts:
        return None
    modules = sorted({".".join(name.split(".")[:2]) for name in parts})
    return (
        f"text only: {format_count(sum(parts.values()))} parameters that text does not reach stay as they are "
        f"({', '.join(modules[:4])})"
    )


def _train_all_but(model: nn.Module, patterns: Sequence[str], unreached: Collection[str]) -> None:
    """Train every parameter that text uses and whose name matches none of the patterns, each of which has a match."""
    frozen = set(unreached)
    for pattern in patterns:
        try:
            found = {name for name, _ in model.named_parameters() if re.search(pattern, name)}
        except re.error as error:
            raise RefusedError(
                "not a regular expression", where="frozen_parameters", found=f"{pattern}: {error}"
            ) from error
        if not found:
            example = next(name for name, _ in model.named_parameters())
            raise RefusedError(
                "no parameter has such a name",
                where="frozen_parameters",
                found=pattern,
                expected=f"names like {example}",
            )
        frozen |= found
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if all(not parameter.requires_grad for parameter in model.parameters()):
        raise RefusedError("nothing is left to train", where="frozen_parameters", found=", ".join(patterns))


def _refuse_frozen_rows(model: nn.Module, recipe: Recipe, new: NewTokens) -> None:
    frozen = sorted(name for name in table_names(model) if not model.get_parameter(name).requires_grad)
    if new.ids and frozen:
        raise RefusedError(
            "the rows of new tokens would never be trained",
            where="add_tokens",
            found=f"frozen_parameters: {', '.join(recipe.frozen_parameters)}, which leaves out {', '.join(frozen)}",
            hint="train these tables too, or delete add_tokens",
        )


def _refuse_other_tokens(adapter: Any, recipe: Recipe, new: NewTokens, folder: Path) -> None:
    """Raise a RefusedError where an adapter to train further has rows of other new tokens than the recipe adds."""
    whole = bool(adapter.modules_to_save) and not adapter.trainable_token_indices
    theirs = [number for number in trained_tokens(adapter.trainable_token_indices) if number >= new.first]
    if theirs != sorted(new.ids) and not whole:
        raise RefusedError(
            "the adapter to start from was trained with other new tokens",
            where="add_tokens",
            found=f"{len(new.ids)} tokens: {', '.join(recipe.add_tokens) or 'none'}",
            expected=f"{len(theirs)} tokens, as in {folder}",
            hint="write the add_tokens of the recipe that the adapter was trained by",
        )


def start_folder(loaded: LoadedRecipe) -> Path | None:
    """Folder of the adapter to train further.

    Raises:
        RefusedError: it is named and not there.
    """
    named = loaded.recipe.lora.start_from
    if named is None or loaded.recipe.method == "full":
        return None
    folder = resolve_path(named, loaded.folder)
    if folder is None or not (folder / ADAPTER_WEIGHTS).is_file():
        tried = ", ".join(str(path / ADAPTER_WEIGHTS) for path in tried_paths(named, loaded.folder))
        raise RefusedError("no adapter there", where="lora.start_from", found=named, expected=f"one of {tried}")
    return folder


def start_hash(start: Path | None, recipe: Recipe) -> str:
    """SHA-256 over the files of an adapter that is trained further and that a resumed run reads again: its
    configuration, and the weights where they are DPO's reference. Empty without one.

    Raises:
        RefusedError: one cannot be read.
    """
    if start is None:
        return ""
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if recipe.objective == "dpo" else (ADAPTER_CONFIG,)
    try:
        return hashlib.sha256("".join(sha256_of(start / name) for name in names).encode()).hexdigest()
    except OSError as error:
        raise RefusedError("the adapter cannot be read", where=str(start), found=error.strerror) from error


def describe_reference(recipe: Recipe, source: ModelSource, start: Path | None) -> str | None:
    """A notice about DPO's reference model; None: the objective has none."""
    if recipe.objective != "dpo":
        return None
    if start is None:
        return f"reference model of dpo: {source.name}, without the adapter that is trained"
    return f"reference model of dpo: {source.name} with the adapter {start} as it is, which is trained further"


def refuse_other_shape(lora: LoraConfig, adapter: Any, folder: Path) -> None:
    """Raise a RefusedError where a key of the recipe says something else than the adapter that is trained further; a
    key that stands at its default says nothing."""
    targets = adapter.target_modules
    theirs = {
        "r": adapter.r,
        "alpha": float(adapter.lora_alpha),
        "target_modules": targets if isinstance(targets, str) else tuple(sorted(targets)),
        "modules_to_save": tuple(sorted(adapter.modules_to_save or ())),
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
    }
    for key, value in theirs.items():
        asked = getattr(lora, key)
        asked = tuple(sorted(asked)) if isinstance(asked, tuple) else asked
        if asked not in (value, getattr(LoraConfig(), key)):
            raise RefusedError(
                "the adapter to start from has another shape",
                where=f"lora.{key}",
                found=str(asked),
                expected=f"{value}, as in {folder}",
                hint="delete the line",
            )
