"""The tables of what a recipe chooses by name: each entry has its code, and no code lacks an entry."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest
import torch

from roundpipe_cli.choices import (
    OPTIMIZER_KEYS,
    OPTIMIZERS,
    PACKED_FORMATS,
    ROW_KINDS,
    SCALE_BYTES,
    SCHEDULE_KINDS,
    SCHEDULES,
    OptimizerName,
    PackedFormat,
    PackedName,
    RowType,
)
from roundpipe_cli.data.columns import unused_columns
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.model.stored.packed_weights import packed_bytes
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.optim.optimizer import RULES, make_rule

KEYS = {field.name for field in fields(Recipe)}


@pytest.mark.parametrize("has_momentum", [False, True])
@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_has_its_rule_and_keeps_what_the_table_says(name: Any, has_momentum: bool) -> None:
    """Earlier an optimizer that was forgotten in the table of memory was a KeyError in `plan`."""
    shape = torch.Size((256, 512))
    kind = OPTIMIZERS[name]
    rule = make_rule(name, momentum=0.9 if has_momentum else 0.0)
    kept = sum(tensor.nbytes for tensor in rule.make_state(shape).values())
    assert kept == shape.numel() * kind.state_bytes(*shape, has_momentum=has_momentum)
    assert set(kind.keys) <= set(OPTIMIZER_KEYS) <= KEYS


def test_every_type_of_rows_has_its_columns_and_its_rules() -> None:
    """Three lists have to agree; a type that one of them lacked trained answers that its rows reject."""
    assert set(get_args(RowType)) == set(ROW_KINDS)
    row = {"question": "Q", "rejected": "no"}
    for name, kind in ROW_KINDS.items():
        if kind.num_answers < 2:
            with pytest.raises(BadRowError, match="preference pair"):
                unused_columns(row, {"question"}, name)


def test_no_rule_and_no_name_is_without_entry() -> None:
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS) == set(RULES)
    assert list(SCHEDULE_KINDS) == list(SCHEDULES)
    assert get_type_hints(Recipe)["optim"] == OptimizerName


@pytest.mark.parametrize("kind", PACKED_FORMATS.values(), ids=lambda kind: kind.name)
def test_packed_weights_take_what_the_table_says(kind: PackedFormat) -> None:
    assert kind.key in KEYS and torch.finfo(torch.float32).bits // 8 == SCALE_BYTES
    assert packed_bytes(torch.Size([1024, 1024]), kind.name) == 2**20 * kind.bytes_per_param
    assert set(get_args(PackedName)) == set(PACKED_FORMATS)
