"""Other tools' settings for saving and evaluating, as `save_steps` and `eval_steps`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundpipe_cli.recipe.aliases import Writes
from roundpipe_cli.recipe.convert_outcomes import ConversionRule, Data, LeaveOutError

_BY_STRATEGY = ("epoch", "no", False, "best")
"""Strategies with which transformers does not read the number of steps."""


def _save_strategy(value: Any, data: Data) -> Writes:
    if value == "steps":
        return {}
    if value == "epoch":
        return {"save_steps": "epoch"}
    if value == "no" or value is False:
        return {"save_steps": None}
    raise LeaveOutError("checkpoints come every save_steps steps; load_best_model_at_end keeps the best weights")


def _save_steps(value: Any, data: Data) -> Writes:
    return {} if data.get("save_strategy") in _BY_STRATEGY else {"save_steps": value}


def _eval_steps(value: Any, data: Data) -> Writes:
    strategies = [data.get(key) for key in ("eval_strategy", "evaluation_strategy")]
    return {} if any(strategy in _BY_STRATEGY for strategy in strategies) else {"eval_steps": value}


def _per_epoch(target: str) -> ConversionRule:
    """axolotl's number of saves or evaluations in an epoch: it makes a share of all steps of it."""

    def writes_of(value: Any, data: Data) -> Writes:
        if target == "eval_steps" and not (data.get("val_set_size") or data.get("test_datasets")):
            return {}
        if value == 1 and not data.get("max_steps"):
            return {target: "epoch"}
        epochs = data.get("num_epochs") or 1
        if not isinstance(value, (int, float)) or not isinstance(epochs, (int, float)) or value <= 0 or epochs <= 0:
            raise LeaveOutError("no number above 0")
        if value * epochs > 1:
            return {target: 1 / (value * epochs)}
        return {target: "epoch" if target == "save_steps" else None}

    return writes_of


def _eval_strategy(value: Any, data: Data) -> Writes:
    """With `steps`, transformers evaluates every `eval_steps`, or every `logging_steps` where that is not given."""
    if value == "no" or value is False:
        return {}
    if value == "epoch":
        return {"eval_steps": "epoch"}
    if value != "steps":
        raise LeaveOutError("evaluations come every eval_steps steps, and at the end")
    steps = data.get("eval_steps") or data.get("logging_steps")
    return {"eval_steps": steps} if steps else {}


INTERVAL_RULES: Mapping[str, ConversionRule] = {
    "save_strategy": _save_strategy,
    "save_steps": _save_steps,
    "eval_steps": _eval_steps,
    "saves_per_epoch": _per_epoch("save_steps"),
    "evals_per_epoch": _per_epoch("eval_steps"),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), _eval_strategy),
}
"""Key of another tool -> its rule."""
