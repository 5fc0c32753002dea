"""A block's feed-forward part in chunks of tokens, so that its activations are those of one chunk, not of the sequence.

    forward    each chunk goes through the module, and only the result is kept
    backward   each chunk goes through it again, with a graph, and then back; gradients of weights are summed in float32

It is the same arithmetic on fewer rows at a time (compare `chunk_size_feed_forward` of transformers), so equal to a
whole call but for the rounding of matrix products of another shape. Where nobody reads the block's output, the forward
of a recompute is left out altogether, and the chunks cost nothing that a recompute would not.

Shapes: B sequences of T tokens, N = B x T rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.dropout import SeededDropout, layer_seed

NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
"""Names that models give to the feed-forward part of a block."""
ATTRIBUTE = "mlp_chunks"
"""Attribute with the `MlpChunks` of a module that computes in chunks."""
MAX_ERROR = 0.02
"""Tolerance of a call in chunks against a whole one, both in 16 bit, relative to the norm of the result."""


class MlpChunks:
    """Replaces the forward of one block's feed-forward module, one worker's own copy. Belongs to one thread."""

    def __init__(
        self,
        module: nn.Module,
        chunk_tokens: int,
        whole_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            module: takes hidden states [B, T, H], returns such or a tuple that begins with such.
            chunk_tokens: rows of a chunk; a call of no more rows is an ordinary one.
            whole_weights: makes the module's weights readable while a backward computes it again.
        """
        self.chunk_tokens = chunk_tokens
        self.whole_weights = whole_weights
        self.dropout_seed: int | None = None
        """Dropout seed of the next call; None: nothing is dropped."""
        self.fill: float | None = None
        """If set, nobody reads the result: it is filled with this value, and only the graph is made."""
        self.forward: Callable[..., Any] = module.forward
        self.has_drawn = False
        """Whether a call with a seed drew random numbers."""
        self._module = module
        self._num_others: int | None = None
        """Length of the rest of the module's result; -1: it is no tuple; None: not known yet."""
        module.__dict__["forward"] = self
        module.__dict__[ATTRIBUTE] = self

    def __call__(self, hidden: torch.Tensor) -> Any:
        """The module's result for `hidden` [B, T, H]; what follows the first part of a tuple is None."""
        if hidden.shape[:-1].numel() <= self.chunk_tokens and self.fill is None:
            return self.forward(hidden)
        if self._num_others is None:
            with torch.no_grad():
                result = self.forward(hidden.reshape(1, -1, hidden.shape[-1])[:, :1])
            self._num_others = len(result) - 1 if isinstance(result, tuple) else -1
        output = _Chunked.apply(self, self.dropout_seed, self.fill, hidden, *self.trained())  # type: ignore[no-untyped-call]
        return output if self._num_others < 0 else (output, *[None] * self._num_others)

    def trained(self) -> list[nn.Parameter]:
        """The module's parameters that want a gradient, as bound now."""
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def call(self, rows: torch.Tensor, seed: int | None, first: int) -> torch.Tensor:
        """An ordinary call for the chunk `rows` [1, n, H] that begins at row `first`."""
        mode = nullcontext() if seed is None else SeededDropout(layer_seed(seed, first, -2, -2))
        with mode as draws:
            result = self.forward(rows)
        self.has_drawn |= draws is not None and draws.num_draws > 0
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output.reshape(*rows.shape[:2], -1)  # llama4's experts drop the first dimension


class _Chunked(torch.autograd.Function):
    """`MlpChunks` for autograd. Parameters are inputs so that gradients reach them; their values are read as bound."""

    @staticmethod
    def forward(
        ctx: Any, chunks: MlpChunks, seed: int | None, fill: float | None, hidden: torch.Tensor, *_: nn.Parameter
    ) -> torch.Tensor:
        ctx.chunks, ctx.seed = chunks, seed
        ctx.save_for_backward(hidden)
        if fill is not None:
            return hidden.new_full(hidden.shape, fill)
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        output = hidden.new_empty(hidden.shape)  # no view of another tensor: falcon adds to it in place
        out_rows = output.view(rows.shape)
        for first in range(0, rows.shape[1], chunks.chunk_tokens):
            part = slice(first, first + chunks.chunk_tokens)
            out_rows[:, part] = chunks.call(rows[:, part], seed, first)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        chunks: MlpChunks = ctx.chunks
        (hidden,) = ctx.saved_tensors
        rows, above = (tensor.reshape(1, -1, hidden.shape[-1]) for tensor in (hidden, gradient))
        wants_hidden = ctx.needs_input_grad[3]
        below = torch.empty_like(rows) if wants_hidden else None
        trained = chunks.trained()
        sums: list[torch.Tensor | None] = [None] * len(trained)
        with chunks.whole_weights():
            for first in range(0, rows.shape[1], chunks.chunk_tokens):
                part = slice(first, first + chunks.chunk_tokens)
                leaf = rows[:, part].detach().requires_grad_(wants_hidden)
                with torch.enable_grad():
                    output = chunks.call(leaf, ctx.seed, first)
                wanted = [*trained, leaf] if wants_hidden else trained
                found = list(torch.autograd.grad(output, wanted, above[:, part], allow_unused=True))
                if below is not None:
                    below[:, part] = found.pop()
                for index, one in enumerate(found):
                    total = sums[index]
                    if one is not None:
                        sums[index] = one.float() if total is None else total.add_(one)
        ended = [None if total is None else total.to(p.dtype) for total, p in zip(sums, trained, strict=True)]
        return None, None, None, None if below is None else below.view(hidden.shape), *ended


def find_mlp(block: nn.Module) -> str | None:
    """Name of the feed-forward part among a block's children."""
    names = {name for name, _ in block.named_children()}
    return next((name for name in NAMES if name in names), None)


def check_feed_forward_chunks(
    block: nn.Module, hidden: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Try a block whose feed-forward part goes in chunks against the same without.

    Its weights can be read, `run` calls it without dropout, and its input `hidden` [B, T, H] makes several chunks.

    Raises:
        RefusedError: it has none that can be cut, or tokens are not independent in it.
    """
    name = find_mlp(block)
    chunks: MlpChunks | None = None if name is None else block.get_submodule(name).__dict__[ATTRIBUTE]
    why = "no feed-forward module among its children"
    if chunks is not None:
        length, chunks.chunk_tokens = chunks.chunk_tokens, hidden.shape[:-1].numel()
        with torch.no_grad():
            try:
                whole = run(hidden).float()
                chunks.chunk_tokens = length
                difference = run(hidden).float() - whole
            except TypeError:
                why = f"{name} is called with more than hidden states"
            else:
                if float(difference.norm()) <= MAX_ERROR * float(whole.norm()):
                    return
                why = f"{name} gives another result for a part of the tokens"
    raise RefusedError(
        "the feed-forward part of this model cannot be computed in chunks of tokens",
        where="mlp_chunk_tokens",
        found=f"{type(block).__name__}: {why}",
        hint="remove mlp_chunk_tokens",
    )
