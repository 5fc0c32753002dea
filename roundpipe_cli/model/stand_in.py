"""A module that stands in the place of another one of the model."""

from __future__ import annotations

from typing import Any

from torch import nn


class StandIn(nn.Module):
    """Has the attributes of the original, for code that reads them, but does not hold its weights."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)
