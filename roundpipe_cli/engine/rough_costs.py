"""Costs of a run's layers before anything is measured: from the sizes of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe_cli.choices import OPTIMIZERS
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.model.layout import LayerLayout

ASSUMED_FLOPS = {"cpu": 5e10, "cuda": 1e14}
"""Speed of one worker until it is measured."""
SHARED_BYTES_PER_S = 1e15
"""Between workers on the processor nothing is copied: a boundary tensor is there at once."""


@dataclass(frozen=True)
class LayerSizes:
    """The layers of a model, as far as their costs follow from sizes."""

    layouts: Sequence[LayerLayout]
    active_parameters: Sequence[int]
    """Per layer, parameters that take part for one token (a part of the experts)."""
    boundary_columns: int
    """Values per token of a boundary tensor: the width of the hidden states, or more."""
    experts_per_token: int = 1
    """Experts that compute a token, in a layer with experts."""
    activation_bytes: Sequence[int] | None = None
    """Per layer, bytes that a microbatch keeps on the device for its backward; None: estimated."""
    unpacks_once: bool = False
    """Packed weights stay unpacked for a visit."""
    tied: bool = False
    """The embedding's matrix is kept and trained with the head."""


@dataclass(frozen=True)
class AssumedDevice:
    """The device of a worker, before it is measured."""

    kind: str
    """`cpu` or `cuda`; on the processor weights are used where they lie and uploads cost nothing."""
    memory_bytes: int | None = None
    """Memory of the smallest device; on the processor, a worker's share of the host's."""
    link_bytes_per_s: float = SHARED_BYTES_PER_S
    """Speed of each worker's host link; workers on the processor share their memory."""
    host_bytes_per_s: float | None = None
    """Rate of the host's memory; None: updates and additions of gradients on the host are not counted."""
    update_bytes: float = OPTIMIZERS["adamw"].update_bytes
    """Traffic of the host's memory while one value is updated."""


def rough_costs(sizes: LayerSizes, device: AssumedDevice, *, method: str, tokens: int) -> CostModel:
    """Costs of the layers from their parameters alone.

    Args:
        method: `lora` needs no gradient of frozen weights, so its backward costs as much as a forward.
        tokens: of a microbatch.
    """
    backward = 1.0 if method == "lora" else 2.0
    streams = device.kind != "cpu"
    layouts, activation_bytes = sizes.layouts, sizes.activation_bytes
    update_s = device.update_bytes / device.host_bytes_per_s if device.host_bytes_per_s else 0.0
    layers = []
    for index, (layout, active) in enumerate(zip(layouts, sizes.active_parameters, strict=True)):
        seconds = 2.0 * active * tokens / ASSUMED_FLOPS[device.kind] if index else 0.0
        item_bytes = layout.trainable_dtype.itemsize
        matrices = [place.shape for place in layout.places if len(place.shape) > 1]
        width = sum(sum(shape[-2:]) * (sizes.experts_per_token if len(shape) > 2 else 1) for shape in matrices)
        kept = width * tokens * item_bytes if 0 < index < len(layouts) - 1 else 0
        layers.append(
            LayerCost(
                name=layout.name,
                forward_s=seconds,
                backward_s=seconds * backward,
                recompute=index < len(layouts) - 1,
                param_bytes=layout.num_bytes if streams and index else 0,
                boundary_bytes=sizes.boundary_columns * tokens * item_bytes,
                grad_bytes=4 * layout.num_trainable_elements if streams and index else 0,
                optimizer_s=update_s * layout.num_trainable_elements,
                activation_bytes=kept if activation_bytes is None else activation_bytes[index],
                whole_bytes=layout.whole_bytes if sizes.unpacks_once else 0,
            )
        )
    return CostModel(
        "layers",
        tuple(layers),
        device_memory_bytes=device.memory_bytes,
        link_bytes_per_s=device.link_bytes_per_s,
        host_bytes_per_s=device.host_bytes_per_s,
        update_bytes=device.update_bytes,
        leaving_bytes=layouts[0].trainable_dtype.itemsize,
        tied=sizes.tied,
    )
