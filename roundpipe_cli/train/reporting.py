"""Settings of a run beside its recipe: how it starts, and where it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roundpipe_cli.events import Tell
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.schedule.actions import Schedule

Planned = Callable[[Recipe, Sequence[Schedule], bool, int], Sequence[Mapping[str, float]]]


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    resume: bool = False
    """Continue from the newest valid checkpoint."""
    offline: bool = False
    """Use local files only."""
    allow_changed: Sequence[str] = ()
    """Recipe keys that may differ from the checkpoint's."""
    allow_other_base: bool = False
    """The adapter of `lora.start_from` may have been trained on another base model."""


@dataclass(frozen=True)
class Reporting:
    """Reports of a run while it lasts, and files beside its result."""

    tell: Tell
    """Called with each event."""
    live: bool = False
    """Report several times a second what the workers do."""
    trace: bool = False
    """Write what the workers did in the last steps to trace.json."""
    planned: Planned | None = None
    """Says for the report what was predicted of each schedule, besides its times: of the recipe as the
    run resolved it, the schedules, whether all weights stay on the devices, and the tokens of the longest row."""
