"""The routers' balancing loss: sums of every block, and the loss that the head makes of them.

The loss (`output_router_logits: true`) is one of all blocks; its gradient comes back the way the sums came:

    embed -> [hidden | 0] -> block.0 -> [hidden | sums] -> ... -> block.L-1 -> [hidden | sums] -> head, which adds
                                                                                coefficient x E x sum_e f_e p_e

f_e: share of tokens routed to expert e, p_e: its mean probability, over all layers and all tokens but padding (Switch
Transformer, https://huggingface.co/papers/2101.03961, equations 4 to 6, as transformers computes them for each
forward). A microbatch is a forward, and its loss counts as much as its share of the step's target tokens.

Shapes: B sequences of T tokens, E experts. Sums are float32 [2E]: tokens routed to each expert, then probabilities;
`boundary.py` lays them behind the hidden states.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe_cli.model.boundary import join_gradient
from roundpipe_cli.sizes import SIZE_NAMES, size_of

if TYPE_CHECKING:
    from roundpipe_cli.model.head import HeadResult


WANTED = "trains_router_loss"
"""Attribute of a configuration, set where its file says `output_router_logits: true`."""


@dataclass(frozen=True)
class RouterLoss:
    """The balancing loss of one model."""

    num_experts: int
    top_k: int
    coefficient: float
    routers: tuple[tuple[str, ...], ...]
    """For each block, paths of its modules that return logits."""
    place: int
    """Index of the logits in what they return."""

    def weights_of(self, lengths: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
        """float32 [B x T]: 0 for padding, else 1, from the `lengths` [B] without it; None: nothing is padded."""
        if lengths is None or not bool((lengths < tokens).any()):
            return None
        return (torch.arange(tokens)[None] < lengths[:, None]).float().flatten()

    def sums_of(self, logits: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Sums over the tokens of one router, in the order of transformers' own."""
        probabilities = torch.softmax(logits.flatten(0, -2), dim=-1)
        chosen = torch.topk(probabilities.detach(), self.top_k, dim=-1).indices
        of_tokens = torch.ones_like(probabilities[:, 0]).float() if weights is None else weights
        one_hot = torch.zeros(probabilities.shape, device=logits.device).scatter_(1, chosen, 1.0)
        routed = (one_hot * of_tokens[:, None]).sum(0)
        values = probabilities.float()
        return torch.cat([routed, (values if weights is None else values * weights[:, None]).sum(0)])

    def of_sums(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss, times its coefficient, in float64, and its gradient for the sums, float32 [2E]."""
        routed, probabilities = sums.detach().split(self.num_experts)
        num_rows = (routed.double().sum() / self.top_k).clamp(min=1.0)
        shares = (self.coefficient * self.num_experts / num_rows**2) * routed.double()
        gradient = torch.cat([torch.zeros_like(routed), shares.float()])
        return (shares * probabilities.double()).sum(), gradient

    def add_to(self, head: HeadResult, sums: torch.Tensor, num_units: float, gradient_scale: float) -> None:
        """Add the loss of a microbatch, as one of each of its `num_units` target tokens, to what its head gave."""
        loss, of_sums = self.of_sums(sums)
        head.loss_sum = head.loss_sum + num_units * loss
        if head.grad_hidden is not None:
            head.grad_hidden = join_gradient(head.grad_hidden, of_sums * (num_units * gradient_scale))


@dataclass(frozen=True)
class Routed:
    """How one block adds to the sums."""

    loss: RouterLoss
    paths: tuple[str, ...]
    weights: torch.Tensor | None
    """From `weights_of`."""

    def run(self, block: nn.Module, call: Callable[[], Any], sums: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The result of `call`, in which the block runs, and the sums that it leaves."""
        logits: list[torch.Tensor] = []

        def note(_module: nn.Module, _args: Any, result: Any) -> None:
            logits.append(result[self.loss.place] if isinstance(result, tuple) else result)

        with ExitStack() as hooks:
            for path, module in block.named_modules():
                if path in self.paths:
                    hooks.callback(module.register_forward_hook(note).remove)
            result = call()
        for one in logits:
            sums = sums + self.loss.sums_of(one, self.weights)
        return result, sums


def find_router_loss(model: nn.Module, blocks_path: str) -> RouterLoss | str:
    """The balancing loss of `model`, whose blocks are whole, or why it cannot be trained here."""
    config: Any = model.config
    text = config.get_text_config()
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if function is None:
        return "transformers has no such loss for this model type"
    spec: Any = next(
        (
            recorded["router_logits"]
            for module in model.modules()
            if "router_logits" in (recorded := getattr(module, "_can_record_outputs", None) or {})
        ),
        None,
    )
    target = getattr(spec, "target_class", None)
    if target is None:
        return "transformers does not say which module of a block is its router"
    num_experts, top_k = (size_of((model, text), SIZE_NAMES[key]) for key in ("num_experts", "num_experts_per_tok"))
    weight = getattr(model, "router_aux_loss_coef", getattr(text, "router_aux_loss_coef", None))
    if not num_experts or not top_k or not isinstance(weight, (int, float)):
        return "its configuration does not say how many experts there are, how many a token has, or the loss's weight"
    blocks = model.get_submodule(blocks_path).named_children()
    wanted_path = f".{spec.layer_name.strip('.')}." if spec.layer_name else "."
    routers = tuple(
        tuple(
            path
            for path, module in block.named_modules()
            if isinstance(module, target) and wanted_path in f".{blocks_path}.{name}.{path}."
        )
        for name, block in blocks
    )
    loss = RouterLoss(num_experts, top_k, float(weight), routers, spec.index)
    return loss if any(routers) and _is_usual(function, loss) else "its balancing loss is not the usual one"


def describe_router_loss(routers: RouterLoss | None, why_not: str) -> str | None:
    """A line that says whether a model's balancing loss is trained; None where its configuration asks for none."""
    asked = "output_router_logits: true in the model's configuration"
    if routers is not None:
        weight = f"router_aux_loss_coef {routers.coefficient:g}"
        return f"{asked}: the routers' balancing loss is trained with its {weight}; evaluation leaves it out"
    return f"{asked} trains no balancing loss: {why_not}" if why_not else None


def leave_out_router_loss(config: Any) -> str | None:
    """Do not train the balancing loss, for its sums are over whole sequences; words for the user where it was asked."""
    text = config.get_text_config()
    if not getattr(text, WANTED, False):
        return None
    delattr(text, WANTED)
    return (
        "output_router_logits: true in the model's configuration trains no balancing loss: it is a sum over whole "
        "sequences, which pipeline.sequence_chunks and mlp_chunk_tokens cut"
    )


def _is_usual(function: Callable[..., Any], loss: RouterLoss) -> bool:
    """Whether a model's own function gives the same numbers, with padding and without."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(10, loss.num_experts, generator=generator) for _ in range(2)]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    for given in (None, mask):
        weights = None if given is None else given.flatten().float()
        ours, _ = loss.of_sums(sum((loss.sums_of(one, weights) for one in logits), torch.zeros(2 * loss.num_experts)))
        try:
            theirs = loss.coefficient * float(function(tuple(logits), loss.num_experts, loss.top_k, given))
        except (TypeError, ValueError, RuntimeError):
            return False
        if abs(theirs - float(ours)) > 1e-5 * abs(theirs):
            return False
    return True
