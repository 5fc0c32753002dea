"""The JSON values that a run continues from, each with its type and range: what a checkpoint has beside tensors.

A checkpoint whose bytes are as its manifest says can still hold anything, where another program or release wrote it.
All values are looked at once, before any is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST = 2**62
"""The largest whole number. None is below 0, where the sampler of rows would look for rows for ever."""
SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class Value:
    """A kind of value."""

    types: tuple[type, ...]
    least: float = 0
    may_lack: bool = False
    """It may be missing or null: of a later release, or of a part that the run does not have."""

    def fits(self, value: Any) -> bool:
        """Whether `value` is of this kind."""
        if value is None:
            return self.may_lack
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return False
        return not isinstance(value, (int, float)) or self.least <= value <= MOST


WHOLE, NUMBER, PART = Value((int,)), Value((int, float)), Value((dict,))
MAYBE_WHOLE, MAYBE_PART = Value((int,), may_lack=True), Value((dict,), may_lack=True)
MAYBE_LOSS = Value((int, float), least=-MOST, may_lack=True)
STATE: Mapping[str, Value] = {
    "recipe": PART,
    "recipe.micro_batch_size": WHOLE,
    "recipe.gradient_accumulation_steps": WHOLE,
    "recipe.micro_batch_tokens": MAYBE_WHOLE,
    "recipe.packing": Value((bool, str), may_lack=True),
    "recipe.max_steps": MAYBE_WHOLE,
    "recipe.num_train_epochs": Value((int, float), may_lack=True),
    "recipe.datasets": Value((list,)),
    "num_steps": MAYBE_WHOLE,
    "num_updates": WHOLE,
    "loss_scale": NUMBER,
    "steps_since_overflow": WHOLE,
    "training_s": NUMBER,
    "skipped_steps": MAYBE_WHOLE,
    "data_position": PART,
    "data_position.epoch": WHOLE,
    "data_position.window": WHOLE,
    "data_position.offset": WHOLE,
    "fit": MAYBE_PART,
    "fit.micro_batch_size": Value((int,), least=1),
    "fit.first_step": WHOLE,
    "evaluation": MAYBE_PART,
    "evaluation.last_step": MAYBE_WHOLE,
    "evaluation.last_loss": MAYBE_LOSS,
    "evaluation.best_step": MAYBE_WHOLE,
    "evaluation.best_loss": MAYBE_LOSS,
    "evaluation.kept_step": MAYBE_WHOLE,
    "evaluation.kept_loss": MAYBE_LOSS,
    "evaluation.num_worse": MAYBE_WHOLE,
}
"""Dotted key -> kind, each part before what is in it; keys of a part count only where there is one."""
TOGETHER = (
    ("evaluation.last_step", "evaluation.last_loss"),
    ("evaluation.best_step", "evaluation.best_loss"),
    ("evaluation.best_step", "evaluation.num_worse"),
    ("evaluation.kept_step", "evaluation.kept_loss"),
)
"""Pairs of which a run needs the second where it has the first."""


def wrong_values(meta: Mapping[str, Any]) -> list[str]:
    """`key: value` or `no key` for all that a run cannot continue with; empty where it can."""
    return [f"{key}: {short_json(value)}" if value is not None else f"no {key}" for key, value in _wrong(meta)]


def is_kind(meta: Mapping[str, Any], part: str) -> bool:
    """Whether `part` of a state, and all that is in it, can be used."""
    return not any(key == part or key.startswith(f"{part}.") for key, _ in _wrong(meta))


def short_json(value: Any) -> str:
    """A value as JSON, short."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _wrong(meta: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, kind in STATE.items():
        part, _, name = key.rpartition(".")
        holder = meta.get(part) if part else meta
        if isinstance(holder, dict) and not kind.fits(holder.get(name)):
            yield key, holder.get(name)
    for first, second in TOGETHER:
        if _at(meta, first) is not None and _at(meta, second) is None:
            yield second, None


def _at(meta: Mapping[str, Any], key: str) -> Any:
    part, _, name = key.rpartition(".")
    holder = meta.get(part)
    return holder.get(name) if isinstance(holder, dict) else None
