"""The loss scale of float16, whose gradients would vanish without one."""

from __future__ import annotations

from dataclasses import dataclass

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""As in torch.amp.GradScaler."""


@dataclass
class LossScale:
    """Doubled after many updates without an overflow, halved at each. 1 and constant for types of float32's range."""

    value: float
    grows: bool
    num_updates: int = 0
    """Since the last overflow."""

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """At the start of a run in this type."""
        return cls(INITIAL_SCALE, True) if dtype == "float16" else cls(1.0, False)

    @property
    def may_be_too_large(self) -> bool:
        """Whether an overflow may be the scale's fault."""
        return self.grows and self.value > 1

    def updated(self) -> None:
        """After an update."""
        self.num_updates += 1
        if self.grows and self.num_updates % GROWTH_STEPS == 0:
            self.value *= 2

    def overflowed(self) -> None:
        """After a gradient that overflowed."""
        self.value /= 2
        self.num_updates = 0
