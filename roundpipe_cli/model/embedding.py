"""Everything before the first block, on the host: rows of the table gathered from host memory, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from roundpipe_cli.model.block_calls import BlockCall
from roundpipe_cli.model.dropout import NOISE_ATTRIBUTE, embedding_noise
from roundpipe_cli.model.stand_in import StandIn

EmbedLeaf = tuple[str, torch.Tensor | None, torch.Tensor]
"""Parameter name, token ids of its rows or None, leaf."""


class GatheringEmbedding(StandIn):
    """The model's input embedding on the host: gathers the rows that a microbatch needs and nothing else.

    The table itself never becomes a leaf of a graph; its gradient comes back as rows.
    """

    def __init__(self, embedding: nn.Module, trainable: bool) -> None:
        super().__init__(embedding)
        self._trainable = trainable
        self.token_ids: torch.Tensor | None = None
        """After a forward: the distinct token ids, [U]."""
        self.rows: torch.Tensor | None = None
        """After a forward: their rows [U, H], the leaf that gets the gradient."""
        self.noise_seed: int | None = None
        """Seed of the noise that is added to the rows; None: no noise."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        result = self._gather(input_ids)
        alpha = getattr(self.original, NOISE_ATTRIBUTE, 0.0)
        if alpha and self.noise_seed is not None:
            result = result + embedding_noise(result, alpha, self.noise_seed)
        return result

    def _gather(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedding = self.original
        if not self._trainable:
            result: torch.Tensor = embedding(input_ids)
            return result
        table = embedding._parameters["weight"]
        padding = embedding.padding_idx
        self.token_ids, positions = torch.unique(input_ids, return_inverse=True)
        self.rows = table.detach()[self.token_ids].requires_grad_()
        # Rows are renumbered, so the padding row (whose gradient is left out) is too.
        matches = [] if padding is None else (self.token_ids == padding).nonzero().flatten().tolist()
        embedding._parameters["weight"], embedding.padding_idx = self.rows, matches[0] if matches else None
        try:
            result = embedding(positions)
        finally:
            embedding._parameters["weight"], embedding.padding_idx = table, padding
        return result


@dataclass
class EmbedGradient:
    """Gradient of one parameter of the embed layer for one microbatch."""

    name: str
    token_ids: torch.Tensor | None
    """Rows of the parameter that `gradient` [U, H] belongs to; None if it is the whole parameter's."""
    gradient: torch.Tensor


@dataclass
class Prologue:
    """Result of everything before the first block, for one microbatch, on the host."""

    hidden: torch.Tensor
    """Input of block 0, [B, T, H], with its graph if the embed layer is trainable."""
    calls: tuple[BlockCall, ...]
    """The call of each block; tensors on the host."""
    leaves: tuple[EmbedLeaf, ...] = ()
    """(parameter name, token ids or None, leaf) of each trainable parameter of the embed layer."""

    def backward(self, grad_hidden: torch.Tensor) -> list[EmbedGradient]:
        """Gradients of the embed layer's parameters from that of `hidden`; frees the graph."""
        leaves = [leaf for _, _, leaf in self.leaves]
        gradients = torch.autograd.grad(self.hidden, leaves, grad_hidden.to(self.hidden.dtype), allow_unused=True)
        return [
            EmbedGradient(name, token_ids, gradient)
            for (name, token_ids, _), gradient in zip(self.leaves, gradients, strict=True)
            if gradient is not None
        ]
