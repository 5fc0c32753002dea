"""The reference of a proof: a model's own forward and backward, without anything of the engine's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.model.attention import SINKS_NAME
from roundpipe_cli.model.dropout import SeededDropout, layer_seed
from roundpipe_cli.model.split import ModelSplit


@dataclass(frozen=True)
class Piece:
    """One microbatch to try a model on; as the engine's."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    row_starts: tuple[int, ...] = ()
    """Where the rows of a packed sequence begin: the model itself gets them one by one; empty: it is not packed."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step."""

    loss: float
    """Mean of the target tokens' losses in nats."""
    gradients: Mapping[str, torch.Tensor]
    """Float32 or float64, of every trained parameter that has one."""


class PlainModel:
    """The model's own forward and backward, in train mode, without anything of the engine's."""

    def __init__(
        self, model: nn.Module, split: ModelSplit, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        """`model` (on the meta device) with float32 `weights`, computing in `dtype`: its own or a wider one."""
        self._split = split
        self._parameters: dict[str, nn.Parameter] = {}
        by_id: dict[int, Any] = {}
        for name, parameter in model.named_parameters():
            values = weights[name].to(dtype if parameter.is_floating_point() else parameter.dtype, copy=True)
            by_id[id(parameter)] = self._parameters[name] = nn.Parameter(values, parameter.requires_grad)
        plain = copy.deepcopy(model, by_id)
        plain._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        config: Any = plain.config
        if config._attn_implementation == SINKS_NAME:
            config._attn_implementation = "eager"  # transformers' own
        if dtype == torch.float64:  # fused products have no kernel for it
            for module in plain.modules():
                if hasattr(getattr(module, "config", None), "_experts_implementation"):
                    module.config._experts_implementation = "eager"  # type: ignore[union-attr]
        self._plain = plain.train()
        self.has_drawn = False
        """Whether a forward drew random numbers."""

    def run(self, pieces: Sequence[Piece], seed: int, step: int) -> Outcome:
        """One step, each microbatch by a model that has met no other one; random draws are the engine's."""
        targets = sum(int((piece.labels[:, 1:] != IGNORED_LABEL).sum()) for piece in pieces)
        total = 0.0
        sums: dict[str, torch.Tensor] = {}
        for index, piece in enumerate(pieces):
            total += self._one(piece, targets, functools.partial(layer_seed, seed, step, index))
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    gradient = parameter.grad if parameter.dtype == torch.float64 else parameter.grad.float()
                    sums[name] = sums[name].add_(gradient) if name in sums else gradient
                    parameter.grad = None
        return Outcome(total / targets, sums)

    def _one(self, piece: Piece, targets: int, seed_of: Callable[[int], int]) -> float:
        shared = {id(parameter): parameter for parameter in self._parameters.values()}
        fresh = copy.deepcopy(self._plain, dict(shared))
        more: dict[str, Any] = {"use_cache": False}
        balance: torch.Tensor | float = 0.0
        if piece.position_ids is not None:
            more["position_ids"] = piece.position_ids
        if piece.row_starts:
            ends = [*piece.row_starts[1:], piece.input_ids.shape[1]]
            rows = [piece.input_ids[:, start:end] for start, end in zip(piece.row_starts, ends, strict=True)]
            logits = torch.cat(
                [copy.deepcopy(fresh, dict(shared))(input_ids=row, use_cache=False).logits for row in rows], 1
            )
            logits = logits[:, :-1].flatten(0, 1)
        else:
            routers = self._split.routers
            if routers is not None:
                more["output_router_logits"] = True
            with seeded_layers(fresh.get_submodule(self._split.blocks_path), seed_of) as modes:
                output = fresh(input_ids=piece.input_ids, **more)
            logits = output.logits[:, :-1].flatten(0, 1)
            if routers is not None:
                balance = routers.coefficient * output.aux_loss * int((piece.labels[:, 1:] != IGNORED_LABEL).sum())
            self.has_drawn |= any(mode.num_draws for mode in modes)
        if logits.dtype != torch.float64:
            logits = logits.float()
        labels = piece.labels[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        loss = loss + balance
        (loss / targets).backward()
        return float(loss.detach().double())


@contextmanager
def seeded_layers(blocks: nn.Module, seed_of: Callable[[int], int]) -> Iterator[list[SeededDropout]]:
    """Seeds what is drawn by layer, as the engine does: a mode around each block's forward, and one before the first.
    Yields those that were entered."""
    modes: list[SeededDropout] = []
    with ExitStack() as hooks, ExitStack() as entered:

        def enter(layer: int) -> None:
            entered.close()
            modes.append(entered.enter_context(SeededDropout(seed_of(layer))))

        enter(0)
        for number, block in enumerate(blocks.children(), 1):
            hooks.callback(block.register_forward_pre_hook(lambda *_, layer=number: enter(layer)).remove)
            hooks.callback(block.register_forward_hook(lambda *_: entered.close()).remove)
        yield modes
