"""Taps that take gradients out of a backward pass, each as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Take = Callable[[int, torch.Tensor], None]
"""Called with the index of a parameter and its gradient; not called for parameters without one."""
AddProduct = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called with the index of a parameter and two matrices whose product is its gradient."""


class GradientTaps:
    """While entered, backward passes on the gradients of `parameters` instead of storing them in `.grad`: each as soon
    as it is there, so that a layer's gradients never all exist at once.

    May be entered again after it was left.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], take: Take, add_product: AddProduct | None = None) -> None:
        """`add_product` takes the gradient of the matrix that logits are a product of; None: `take` does."""
        self._parameters = parameters
        self._take = take
        self._add_product = add_product

    def __enter__(self) -> None:
        for index, parameter in enumerate(self._parameters):
            known = vars(parameter)
            if _TAP not in known:  # once: to register and to remove a hook takes longer than all that it does
                parameter.register_post_accumulate_grad_hook(_hand_over)
            known[_TAP] = self._take, index

    def __exit__(self, *_: object) -> None:
        for parameter in self._parameters:
            vars(parameter)[_TAP] = None

    def differentiate(self, logits: torch.Tensor, gradient: torch.Tensor) -> None:
        """Backward of the head. Where the logits are a product of a trained matrix, its gradient goes to `add_product`
        as two factors: autograd would round their product to 16 bit."""
        step = before_views(logits)
        weight = None if self._add_product is None or step is None else _weight_of(step)
        index = next((i for i, one in enumerate(self._parameters) if one is weight), None)
        if self._add_product is None or index is None or step._saved_self.shape[0] != len(logits):
            torch.autograd.backward(logits, gradient)
            return
        rows: torch.Tensor = step._saved_self
        self._add_product(index, gradient.t(), rows.detach())
        if rows.requires_grad:
            torch.autograd.backward(rows, gradient @ self._parameters[index].detach())


_TAP = "_roundpipe_tap"
"""Attribute of a parameter that was tapped: who takes its gradient, and its index; None: nobody."""


def _hand_over(parameter: torch.Tensor) -> None:
    tap: tuple[Take, int] | None = vars(parameter)[_TAP]
    if tap is not None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        take, index = tap
        take(index, gradient)


def before_views(tensor: torch.Tensor) -> Any:
    """The operator that computed a tensor, which later ones only looked at in other shapes."""
    step = tensor.grad_fn
    while step is not None and step.name() in _VIEWS:
        step = step.next_functions[0][0]
    return step


def _weight_of(step: Any) -> torch.Tensor | None:
    """The parameter W of a product x W^T; None: it is another operator, or of no parameter."""
    if step.name() != "MmBackward0" or step.next_functions[1][0] is None:
        return None
    turned = step.next_functions[1][0]
    leaf = turned.next_functions[0][0] if turned.name() == "TBackward0" else None
    weight: torch.Tensor | None = getattr(leaf, "variable", None)
    return weight


_VIEWS = frozenset({"SelectBackward0", "SliceBackward0", "ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward0"})
