"""The trained layers of a model, and the facts that follow for every step."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.split import ModelSplit


@dataclass(frozen=True)
class TrainedLayers:
    """Facts about the trained layers that the engine needs."""

    num_layers: int
    first: int
    """The lowest layer with a gradient; `num_layers` where nothing is trained."""
    late: frozenset[int]
    """Trained layers that get gradients from the embed layer, which are added when all workers are done: complete at
    the end of a step only."""


def trained_layers(store: WeightStore, split: ModelSplit) -> TrainedLayers:
    """The layers of a store that are trained."""
    num_layers = len(store.layouts)
    trained = [layer for layer, layout in enumerate(store.layouts) if layout.num_trainable_elements]
    if _trains_tied_table(store, split):
        head = num_layers - 1
        return TrainedLayers(num_layers, 0, frozenset({0, head} if 0 in trained else {head}))
    return TrainedLayers(num_layers, min(trained, default=num_layers), frozenset({0} & set(trained)))


def _trains_tied_table(store: WeightStore, split: ModelSplit) -> bool:
    """Whether the table is kept with the head but trained through the embed layer too."""
    embedding = f"{split.embedding_path}.weight"
    tied = embedding in store.views and store.layer_of(embedding) > 0
    return tied and embedding in store.trainable_names
