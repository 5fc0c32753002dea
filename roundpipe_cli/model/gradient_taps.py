"""Takes each parameter's gradient as soon as backward has it, so that a layer's gradients never all exist at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

Take = Callable[[int, torch.Tensor], None]
"""Called with the index of a parameter and its gradient; not called for parameters without one."""


class GradientTaps:
    """While entered, backward passes on the gradients of `parameters` instead of storing them in `.grad`.

    May be entered again after it was left.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], take: Take) -> None:
        self._parameters = parameters
        self._take = take
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hand_over(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            self._take(index, gradient)

        return hand_over

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
