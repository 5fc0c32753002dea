"""AdamW on the host: float32 masters, torch's fused kernel, each layer in one sweep.

Equal to `torch.optim.AdamW(parameters, lr, betas, eps, weight_decay)` on float32 masters: the update goes element by
element, so a layer's flat tensor is updated as one parameter, block by block. Padding between parameters stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.optim.adamw import adamw

from roundpipe_cli.engine.weights import WeightStore, page_aligned

BLOCK_ELEMENTS = 2**20
"""Of a sweep: a block's gradient, masters and moments (16 MiB) pass through the cache once for all that is done."""


class HostAdamW:
    """Updates the masters of a weight store from its gradients and rounds them to the weights of the next version."""

    def __init__(
        self,
        store: WeightStore,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._store = store
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self.num_updates = 0
        """Updates done or begun so far (Adam's step count)."""
        self.layers = [layer for layer, layout in enumerate(store.layouts) if layout.num_trainable_elements]
        """Those that have something to update, in order."""
        self._moments = {
            layer: tuple(page_aligned(store.masters[layer].nbytes).view(torch.float32) for _ in range(2))
            for layer in self.layers
        }
        """Per layer, float32: exponential averages of the gradient and of its square."""

    def step(self, learning_rate: float, gradient_factor: float = 1.0, step: int = 0) -> None:
        """One update of every layer, at once.

        Args:
            learning_rate: of this update.
            gradient_factor: gradients are multiplied by this first: clipping and loss scale.
            step: whose gradients are meant.
        """
        self.num_updates += 1
        gradients = self._store.gradients_of(step)
        for layer in self.layers:
            self.update_layer(layer, gradients[layer], self.num_updates, learning_rate, gradient_factor)

    @torch.no_grad()
    def update_layer(
        self, layer: int, gradient: torch.Tensor, num_updates: int, learning_rate: float, gradient_factor: float
    ) -> None:
        """Clip factor, AdamW and rounding of one layer, as its update number `num_updates` (from 1).

        Args:
            gradient: float32 [num_trainable_elements]; multiplied by `gradient_factor` in place.
        """
        moment, square_moment = self._moments[layer]
        with self._store.next_version(layer) as target:
            for start in range(0, gradient.numel(), BLOCK_ELEMENTS):
                block = slice(start, start + BLOCK_ELEMENTS)
                grad, new = gradient[block], target.new_masters[block]
                if gradient_factor != 1.0:
                    grad.mul_(gradient_factor)
                if target.new_masters is not target.masters:
                    new.copy_(target.masters[block])
                adamw(
                    [new],
                    [grad],
                    [moment[block]],
                    [square_moment[block]],
                    [],
                    [torch.tensor(float(num_updates - 1))],  # adds one itself
                    fused=True,
                    amsgrad=False,
                    beta1=self._betas[0],
                    beta2=self._betas[1],
                    lr=learning_rate,
                    weight_decay=self._weight_decay,
                    eps=self._eps,
                    maximize=False,
                )
                if target.weights is not None:
                    target.weights[block].copy_(new)

    @torch.no_grad()
    def skip_layer(self, layer: int) -> None:
        """The next version of one layer without an update: the values of the one before."""
        with self._store.next_version(layer) as target:
            if target.new_masters is not target.masters:
                target.new_masters.copy_(target.masters)
            if target.weights is not None:
                target.weights.copy_(target.masters)

    def moments_of(self, layer: int) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor) of one layer's state to save: flat float32 moments."""
        name = self._store.layouts[layer].name
        moment, square_moment = self._moments[layer]
        return [(f"{name}.exp_avg", moment), (f"{name}.exp_avg_sq", square_moment)]

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`moments_of` all layers."""
        for layer in self.layers:
            yield from self.moments_of(layer)

    def load(self, moments: Mapping[str, torch.Tensor], num_updates: int) -> None:
        """Take up saved moments."""
        self.num_updates = num_updates
        for name, tensor in self.moments():
            tensor.copy_(moments[name])

    @property
    def num_bytes(self) -> int:
        """Host bytes of the moments."""
        return sum(tensor.nbytes for _, tensor in self.moments())
