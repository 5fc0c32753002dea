"""AdamW on the host: float32 masters, torch's fused kernel, one call per layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from roundpipe_cli.engine.weights import WeightStore, page_aligned


class HostAdamW:
    """Updates the masters of a weight store from its gradients and rounds them to the weights.

    Equal to `torch.optim.AdamW(parameters, lr, betas, eps, weight_decay)` on float32 masters: the update goes element
    by element, so a layer's flat tensor is updated as one parameter. Padding between parameters stays zero.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._store = store
        self.num_updates = 0
        """Updates done so far (Adam's step count)."""
        self._layers = [layer for layer, layout in enumerate(store.layouts) if layout.num_trainable_elements]
        self._optimizers: dict[int, torch.optim.AdamW] = {}
        for layer in self._layers:
            parameter = torch.nn.Parameter(store.masters[layer])
            optimizer = torch.optim.AdamW(
                [parameter], lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
            )
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": page_aligned(store.masters[layer].nbytes).view(torch.float32),
                "exp_avg_sq": page_aligned(store.masters[layer].nbytes).view(torch.float32),
            }
            self._optimizers[layer] = optimizer

    def step(self, learning_rate: float, gradient_factor: float = 1.0) -> None:
        """One update of every layer.

        Args:
            learning_rate: of this update.
            gradient_factor: gradients are multiplied by this first: clipping and loss scale.
        """
        for layer in self._layers:
            optimizer = self._optimizers[layer]
            group = optimizer.param_groups[0]
            group["lr"] = learning_rate
            gradient = self._store.gradients[layer]
            if gradient_factor != 1.0:
                gradient.mul_(gradient_factor)
            group["params"][0].grad = gradient
            optimizer.step()
            self._store.publish(layer)
        self.num_updates += 1

    def moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of the state to save: flat float32 moments of each layer."""
        for layer in self._layers:
            state = self._state(layer)
            name = self._store.layouts[layer].name
            yield f"{name}.exp_avg", state["exp_avg"]
            yield f"{name}.exp_avg_sq", state["exp_avg_sq"]

    def load(self, moments: Mapping[str, torch.Tensor], num_updates: int) -> None:
        """Take up saved moments."""
        self.num_updates = num_updates
        for layer in self._layers:
            state = self._state(layer)
            name = self._store.layouts[layer].name
            state["exp_avg"].copy_(moments[f"{name}.exp_avg"])
            state["exp_avg_sq"].copy_(moments[f"{name}.exp_avg_sq"])
            state["step"].fill_(num_updates)

    def _state(self, layer: int) -> dict[str, torch.Tensor]:
        optimizer = self._optimizers[layer]
        state: dict[str, torch.Tensor] = optimizer.state[optimizer.param_groups[0]["params"][0]]
        return state

    @property
    def num_bytes(self) -> int:
        """Host bytes of the moments."""
        return sum(2 * self._store.masters[layer].nbytes for layer in self._layers)
