"""Weights and optimizer in a checkpoint, layer by layer, and how they come back."""

from __future__ import annotations

from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.checkpoint.resume import check_tensors
from roundpipe_cli.train.checkpoint.saver import State
from roundpipe_cli.train.optim.optimizer import HostOptimizer


def layer_state(store: WeightStore, optimizer: HostOptimizer, step: int, layer: int) -> State:
    """One layer's part of the checkpoint after `step` updates."""
    names = [place.name for place in store.layouts[layer].trainable]
    state = [("masters", name, store.master(name)) for name in names]
    state += [("moments", name, tensor) for name, tensor in optimizer.moments_of(layer)]
    if store.staleness:
        stale = store.views_at(store.step_version(step))
        state += [("weights", name, stale[name]) for name in names]
    return state


def restore_state(store: WeightStore, optimizer: HostOptimizer, checkpoint: Checkpoint) -> bool:
    """Weights and moments as they were when the checkpoint was made; false where it has no older weights, which
    staleness 1 would compute the next step with.

    Raises:
        NoCheckpointError: its tensors are others than this run's.
    """
    own = {name: store.master(name) for name in sorted(store.trainable_names)}
    check_tensors(checkpoint, {"masters": own, "moments": dict(optimizer.moments())})
    masters = checkpoint.tensors("masters")
    for name in own:
        store.set_parameter(name, masters[name])
    store.set_version(checkpoint.step)
    has_older = "weights" in checkpoint.groups
    if store.staleness and has_older:
        weights, stale = checkpoint.tensors("weights"), store.views_at(store.step_version(checkpoint.step))
        for name in own:
            stale[name].copy_(weights[name])
    moments = checkpoint.tensors("moments") if "moments" in checkpoint.groups else {}  # sgd keeps none
    optimizer.load(moments, int(checkpoint.meta["num_updates"]))
    return has_older or not store.staleness
