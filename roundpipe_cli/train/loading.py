"""Loading weights from the model's files into the store, with progress."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Phase, Tell
from roundpipe_cli.model.adapter_files import StartedBase, read_adapter_tensors
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.lora import initial_values
from roundpipe_cli.model.stored.quantized_files import PackedWeight
from roundpipe_cli.model.stored.tensors import is_adapter
from roundpipe_cli.model.weights_io import load_weights
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.units import format_bytes, format_seconds

TELL_EVERY_S = 5.0


class _Progress:
    """Gives weights to the store and reports from time to time how many bytes are filled."""

    def __init__(self, store: WeightStore, started: StartedBase | None, tell: Tell) -> None:
        """
        Args:
            started: base weights as an adapter that is trained further has changed them.
        """
        self._store, self._started, self._tell = store, started, tell
        places = [place for layout in store.layouts for place in layout.places if not is_adapter(place.name)]
        self._sizes = {place.name: place.num_bytes for place in places}
        self._num_bytes = sum(self._sizes.values())
        self._done_bytes = 0
        self._began_s = self._told_s = time.monotonic()
        tell(Phase(f"loading {format_bytes(self._num_bytes)} of weights"))

    def set_parameter(self, name: str, values: torch.Tensor) -> None:
        self._store.set_parameter(name, values if self._started is None else self._started.weight(name, values))
        self._count(name)

    def set_packed(self, name: str, weight: PackedWeight) -> None:
        if self._started is not None:
            self._started.refuse_packed(name)
        self._store.set_packed(name, weight)
        self._count(name)

    def _count(self, name: str) -> None:
        self._done_bytes += self._sizes[name]
        now_s = time.monotonic()
        if now_s - self._told_s < TELL_EVERY_S or self._done_bytes >= self._num_bytes:
            return
        self._told_s = now_s
        done, total = self._done_bytes, self._num_bytes
        bytes_per_s = max(1.0, done / (now_s - self._began_s))
        left_s = max(1, round((total - done) / bytes_per_s))
        self._tell(
            Phase(
                f"loading weights: {format_bytes(done)} of {format_bytes(total)}, {format_bytes(bytes_per_s)}/s, "
                f"{format_seconds(left_s)} left"
            )
        )


def fill_store(
    store: WeightStore, source: ModelSource, model: nn.Module, recipe: Recipe, start: Path | None, tell: Tell
) -> None:
    """Load the base weights, then the adapter's: first values, or those that are trained further, which DPO's reference
    keeps.

    Args:
        model: the skeleton, adapters included.
        start: folder of the adapter to train further.
        tell: is told how much is loaded and how fast, and what the files hold.

    Raises:
        RefusedError: see `load_weights` and `StartedBase`.
    """
    progress = _Progress(store, None if start is None else StartedBase(model, start), tell)
    for text in load_weights(source, model, progress.set_parameter, progress.set_packed):
        tell(Notice(text))
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
