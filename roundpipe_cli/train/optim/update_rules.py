"""How parameters change in an update: AdamW with moments of 32, 16 or 8 bit, SGD and Adafactor, all by libraries.

A flat rule goes element by element, so a whole layer is one tensor to it, updated block by block. The other rules need
to know where each parameter begins and what shape it has. Values and gradients are float32 always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from roundpipe_cli.choices import OptimizerName
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.stored.packed_weights import import_bitsandbytes

Moments = Mapping[str, torch.Tensor]

SCALE_ELEMENTS = 256
"""Elements that share a scale in 8 bit; bitsandbytes' own."""
MIN_8BIT_ELEMENTS = 4096
"""Smaller parameters keep float32 moments, as in bitsandbytes."""
NOISE_ELEMENTS = 2**20


class UpdateRule(Protocol):
    """A rule of updates."""

    is_flat: bool
    """The rule updates each element by itself."""

    def make_state(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """The state before the first update for values of this shape."""

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Moments, learning_rate: float, number: int, salt: int
    ) -> None:
        """One update in place, number `number` (from 1); `salt` differs from block to block."""


@dataclass(frozen=True, kw_only=True)
class RuleSettings:
    """Figures of a recipe that rules read."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW, its fused kernel."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    is_flat = True

    @classmethod
    def of(cls, settings: RuleSettings) -> AdamW:
        return cls(settings.betas, settings.eps, settings.weight_decay)

    def make_state(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.empty(shape), "exp_avg_sq": torch.empty(shape)}

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Moments, learning_rate: float, number: int, salt: int
    ) -> None:
        self._update(values, gradient, state["exp_avg"], state["exp_avg_sq"], learning_rate, number)

    def _update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        moment: torch.Tensor,
        square_moment: torch.Tensor,
        learning_rate: float,
        number: int,
    ) -> None:
        adamw(
            [values],
            [gradient],
            [moment],
            [square_moment],
            [],
            [torch.tensor(float(number - 1))],  # adds one itself
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class AdamW16(AdamW):
    """The same with moments kept in bfloat16.

    The square's average moves by a thousandth a step, less than bfloat16 can show, so it is rounded up or down at
    random with the probabilities that make the mean right (arXiv 2010.06192). The noise is a table, read from a place
    that depends on update and block, so a run that is resumed rounds as one that never stopped.
    """

    def make_state(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Moments, learning_rate: float, number: int, salt: int
    ) -> None:
        moment, square_moment = state["exp_avg"].float(), state["exp_avg_sq"].float()
        self._update(values, gradient, moment, square_moment, learning_rate, number)
        state["exp_avg"].copy_(moment)
        bits = square_moment.view(torch.int32)
        start = (number * 1_000_003 + salt * 7_919) % NOISE_ELEMENTS
        bits.add_(_noise()[start : start + bits.numel()]).bitwise_and_(-65536)
        state["exp_avg_sq"].copy_(square_moment)


_NOISE: list[torch.Tensor] = []


def _noise() -> torch.Tensor:
    """int32 [2 * NOISE_ELEMENTS] of 16 random bits, the same in every process."""
    if not _NOISE:
        generator = torch.Generator().manual_seed(0)
        _NOISE.append(torch.randint(2**16, (NOISE_ELEMENTS,), generator=generator, dtype=torch.int32).repeat(2))
    return _NOISE[0]


@dataclass(frozen=True)
class AdamW8(AdamW):
    """bitsandbytes' AdamW8bit: moments in 8 bit with a scale for each 256 (arXiv 2110.02861)."""

    is_flat = False

    @classmethod
    def of(cls, settings: RuleSettings) -> AdamW:
        """
        Raises:
            RefusedError: bitsandbytes is not installed.
        """
        if import_bitsandbytes() is None:
            raise RefusedError(
                "moments in 8 bit need the package bitsandbytes",
                where="optim: adamw_8bit",
                found="not installed",
                hint="pip install bitsandbytes",
            )
        return super().of(settings)

    def make_state(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        count = shape.numel()
        if count < MIN_8BIT_ELEMENTS:
            return {"state1": torch.empty(shape), "state2": torch.empty(shape)}
        scales = -(-count // SCALE_ELEMENTS)
        return {
            "state1": torch.empty(shape, dtype=torch.uint8),
            "state2": torch.empty(shape, dtype=torch.uint8),
            "absmax1": torch.empty(scales),
            "absmax2": torch.empty(scales),
        }

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Moments, learning_rate: float, number: int, salt: int
    ) -> None:
        functional: Any = import_bitsandbytes().functional
        moment, square_moment = state["state1"], state["state2"]
        (beta1, beta2), eps, decay = self.betas, self.eps, self.weight_decay
        if "absmax1" not in state:
            first = (moment, beta1, eps, number, learning_rate)
            second = (square_moment, beta2, 0.0, 0.0, decay)
            functional.optimizer_update_32bit("adam", gradient, values, *first, *second, 1.0, None, max_unorm=0.0)
            return
        maps = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]
        scales = state["absmax1"], state["absmax2"]
        numbers = (beta1, beta2, 0.0, 0.0, eps, number, learning_rate)
        functional.optimizer_update_8bit_blockwise(
            "adam", gradient, values, moment, square_moment, *numbers, *maps, *scales, decay, gnorm_scale=1.0
        )


@dataclass(frozen=True)
class Sgd:
    """torch.optim.SGD, its fused kernel; `weight_decay` is added to the gradient."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    is_flat = True

    @classmethod
    def of(cls, settings: RuleSettings) -> Sgd:
        return cls(settings.momentum, settings.weight_decay)

    def make_state(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        return {"momentum": torch.empty(shape)} if self.momentum else {}

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Moments, learning_rate: float, number: int, salt: int
    ) -> None:
        sgd(
            [values],
            [gradient],
            [state.get("momentum")],
            fused=True,
            lr=learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@dataclass(frozen=True)
class Adafactor:
    """transformers' Adafactor at a given learning rate: the squares' averages of rows and columns only (arXiv
    1804.04235)."""

    weight_decay: float = 0.0
    is_flat = False

    @classmethod
    def of(cls, settings: RuleSettings) -> Adafactor:
        return cls(settings.weight_decay)

    def make_state(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        if len(shape) < 2:
            return {"exp_avg_sq": torch.empty(shape)}
        return {
            "exp_avg_sq_row": torch.empty(shape[:-1]),
            "exp_avg_sq_col": torch.empty(shape[:-2] + shape[-1:]),
        }

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Moments, learning_rate: float, number: int, salt: int
    ) -> None:
        from transformers import Adafactor as Theirs

        parameter = torch.nn.Parameter(values)
        parameter.grad = gradient
        settings: dict[str, Any] = {"scale_parameter": False, "relative_step": False}
        optimizer = Theirs([parameter], lr=learning_rate, weight_decay=self.weight_decay, **settings)
        optimizer.state[parameter] = {"step": number - 1, "RMS": 0, **state}
        optimizer.step()


RULES: dict[OptimizerName, Callable[[RuleSettings], UpdateRule]] = {
    "adamw": AdamW.of,
    "adamw_bf16": AdamW16.of,
    "adamw_8bit": AdamW8.of,
    "sgd": Sgd.of,
    "adafactor": Adafactor.of,
}
"""Value of `optim` -> its rule."""


def make_rule(name: OptimizerName, settings: RuleSettings) -> UpdateRule:
    """The rule that a recipe's `optim` names.

    Raises:
        RefusedError: its library is not installed.
    """
    values = (*settings.betas, settings.eps, settings.momentum, settings.weight_decay)
    assert all(map(math.isfinite, values))
    return RULES[name](settings)
