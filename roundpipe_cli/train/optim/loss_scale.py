"""The loss scale of float16, whose gradients would vanish without one."""

from __future__ import annotations

from dataclasses import dataclass

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""As in torch.amp.GradScaler."""


@dataclass
class LossScale:
    """Loss scale: doubled after many updates without an overflow, halved at each; constantly 1 but for float16."""

    value: float
    grows: bool
    num_updates: int = 0
    """Updates since the last overflow."""

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """The scale at the start of a run in this type."""
        return cls(INITIAL_SCALE, True) if dtype == "float16" else cls(1.0, False)

    @property
    def may_be_too_large(self) -> bool:
        """Whether the scale may have caused an overflow."""
        return self.grows and self.value > 1

    def updated(self) -> None:
        """Note an update."""
        self.num_updates += 1
        if self.grows and self.num_updates % GROWTH_STEPS == 0:
            self.value *= 2

    def overflowed(self) -> None:
        """Note a gradient that overflowed."""
        self.value /= 2
        self.num_updates = 0
