"""Autograd functions of our own without the Python that torch puts around each of their calls."""

from __future__ import annotations

from typing import Any

import torch


class OwnFunction(torch.autograd.Function):
    """An autograd function of tensors, whose backward has no graph: nothing of ours is differentiated twice.

    Where no graph is wanted, `forward` is called as it is, and where one is, torch's own `apply` without what it does
    for functions under `torch.func`.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """The function's result; args as `forward` takes them after its context."""
        if torch.is_grad_enabled():
            return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
        return cls.forward(_NoGraph(), *args)


class _NoGraph:
    """The context of a call that keeps nothing."""

    needs_input_grad = (False,) * 16

    def save_for_backward(self, *_: Any) -> None: ...
