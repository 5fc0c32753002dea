"""Weights from the model's files into the store, with progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import nn

from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Phase, Tell, tell_notices
from roundpipe_cli.model.adapter_files import StartedBase, merge_first, read_adapter_tensors
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.lora import initial_values
from roundpipe_cli.model.new_tokens import NewTokens
from roundpipe_cli.model.stored.packed_weights import PackedWeight
from roundpipe_cli.model.stored.tensors import is_adapter
from roundpipe_cli.model.weights_io import load_weights
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.units import format_bytes, format_seconds

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
    packed: Collection[str] = (),
    new: NewTokens | None = None,
    start: Path | None,
    trains: bool = True,
    tell: Tell,
) -> None:
    """Load the base weights, then the adapter's: first values, or those of the folder `start`, which is trained
    further, and which DPO's reference keeps. `model`: the skeleton, adapters included; `packed`: names of weights that
    stay as the files have them packed; `trains`: otherwise `start` is used as it is, with tables beside it."""
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

    tell_notices(tell, *load_weights(source, model, set_parameter, set_packed, packed=packed, new=new))
    if recipe.method == "full" or not (trains or start):
        return
    first = initial_values(model, recipe.seed, store.base_weight, recipe.lora.init)
    for name, values in first if start is None else _started_from(start, model, store, trains=trains).items():
        store.set_parameter(name, values)
    if trains and start is not None and recipe.objective_kind.needs_reference:
        store.keep_reference()


def _started_from(start: Path, model: nn.Module, store: WeightStore, *, trains: bool) -> dict[str, torch.Tensor]:
    """The tensors of an adapter by names of the store.

    Raises:
        RefusedError: they do not fit the model, or it is trained further and weights beside them are others than the
            base's: the result, which is an adapter, would not hold them.
    """
    found = read_adapter_tensors(model, start)
    places = {place.name for layout in store.layouts for place in layout.places}
    twins = dict(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in twins.items() if name in places}
    buffers = dict(model.named_buffers())
    for name in found.keys() & buffers.keys():
        buffers[name].copy_(found.pop(name))
    for name in [name for name in found if not is_adapter(name)]:
        own, values = names[id(twins[name])], found.pop(name)
        base = store.base_weight(own)
        if not trains:
            found[own] = values
        elif not torch.equal(values.to(base.dtype), base):
            raise RefusedError(
                "a table beside the adapter is another than the base model's, and would not be in the result",
                where="lora.start_from",
                found=f"{name} in {start}",
                hint=merge_first(start),
            )
    return found
