"""The tables of what a recipe chooses by name: each entry has its code, and no code lacks an entry."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import roundpipe_cli
from roundpipe_cli import choices
from roundpipe_cli.cli.init_choice import choose_objective
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.data.columns import unused_columns
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.model.sequence_loss import SEQUENCE_LOSSES, Preference, reward_metrics, sequence_loss
from roundpipe_cli.model.stored.packed_weights import packed_bytes
from roundpipe_cli.planning.question import settings_of
from roundpipe_cli.recipe.load import load_text
from roundpipe_cli.recipe.schema import Recipe, trained_kind
from roundpipe_cli.train.optim.optimizer import RULES, make_rule

REQUIRED: dict[str, Any] = {"model": "m", "datasets": (), "learning_rate": 1.0, "output_dir": "out"}
PACKAGE = Path(roundpipe_cli.__file__).parent
KEYS = {field.name for field in fields(Recipe)}


@pytest.mark.parametrize("has_momentum", [False, True])
@pytest.mark.parametrize("name", get_args(choices.OptimizerName))
def test_every_optimizer_has_its_rule_and_keeps_what_the_table_says(name: Any, has_momentum: bool) -> None:
    """Earlier an optimizer that was forgotten in the table of memory was a KeyError in `plan`."""
    shape = torch.Size((256, 512))
    kind = choices.OPTIMIZERS[name]
    rule = make_rule(name, momentum=0.9 if has_momentum else 0.0)
    kept = sum(tensor.nbytes for tensor in rule.make_state(shape).values())
    assert kept == shape.numel() * kind.state_bytes(*shape, has_momentum=has_momentum)
    assert set(kind.keys) <= set(choices.OPTIMIZER_KEYS) <= KEYS


def test_every_type_of_rows_has_its_columns_and_its_rules() -> None:
    assert set(get_args(choices.RowType)) == set(choices.ROW_KINDS)
    row = {"question": "Q", "rejected": "no"}
    for name, kind in choices.ROW_KINDS.items():
        if kind.num_answers < 2:
            with pytest.raises(BadRowError, match="preference pair"):
                unused_columns(row, {"question"}, name)


def test_every_objective_has_its_loss_and_its_settings() -> None:
    """Story: a name of the list alone was accepted, and a sigmoid without a reference was trained."""
    assert (
        set(get_args(choices.Objective)) == set(choices.OBJECTIVES)
        and next(iter(choices.OBJECTIVES)) == Recipe.objective
    )
    assert (
        {choices.OBJECTIVES[name].loss for name in choices.SCORING_OBJECTIVES}
        == set(get_args(choices.LossName))
        == set(SEQUENCE_LOSSES)
    )
    assert len({choices.OBJECTIVES[name].loss_type for name in choices.SCORING_OBJECTIVES} - {None}) == len(
        choices.SCORING_OBJECTIVES
    )
    of_papers = {"dpo": (True, False), "orpo": (False, True), "simpo": (False, True), "ipo": (True, True)}
    in_table = {
        name: (kind.needs_reference, kind.averages) for name, kind in choices.OBJECTIVES.items() if name in of_papers
    }
    assert in_table == of_papers  # tests of the losses ask the table
    for name in choices.SCORING_OBJECTIVES:
        recipe, kind = Recipe(**REQUIRED, objective=name), choices.OBJECTIVES[name]
        assert kind.section in KEYS and recipe.scores_answers and hasattr(recipe.loss_settings, "beta")
        assert isinstance(kind.nll_factor, float) or hasattr(recipe.loss_settings, kind.nll_factor)
    with pytest.raises(AssertionError, match="compares no answers"):
        sequence_loss(torch.zeros(2), torch.tensor([0, 2]), (2, 2), Preference(Recipe.objective, 0.1))


def _compared(tree: ast.AST) -> set[str]:
    """Text that a file compares something with, also as the default of what it compares."""
    compared = [node for node in ast.walk(tree) if isinstance(node, (ast.Compare, ast.match_case))]
    inner = [one for node in compared for part in ([node.pattern] if isinstance(node, ast.match_case) else [node])
             for one in ast.walk(part)]  # fmt: skip
    return {node.value for node in inner if isinstance(node, ast.Constant) and isinstance(node.value, str)}


ASKING: dict[str, Callable[[], object]] = {
    "checks": lambda: load_text("model: m\ndatasets: [{path: x}]\nobjective: dpo\n", "a.yaml"),
    "rows": lambda: DatasetSpec("x", example="pair").rows,
    "init": lambda: choose_objective("dpo", None, "pair"),
    "learning rate": lambda: trained_kind("lora", "dpo"),
    "plan": lambda: settings_of(Recipe(**REQUIRED, objective="dpo"), find_architecture("Qwen/Qwen3-4B")),
    "budget": lambda: Recipe(**REQUIRED, objective="dpo").tokens_of_full_row,
    "units": lambda: Preference("dpo", 0.1).num_rows(4),
    "metrics": lambda: reward_metrics([[0.0] * 4], [(Preference("dpo", 0.1), 4)]),
}


@pytest.mark.parametrize("name", ASKING)
def test_every_room_asks_what_a_row_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a kind of rows without its entry. Whoever treats it as any other one would not fail."""
    ASKING[name]()
    monkeypatch.delitem(choices.EXAMPLES, "pair")  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="pair"):
        ASKING[name]()


def test_no_file_but_the_table_compares_an_objectives_name() -> None:
    assert _compared(ast.parse("x.get('y', 'sft') != z or x in ('dpo',)")) == {"y", "sft", "dpo"}
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    wrong = {
        file.name: names
        for file in files
        if (names := _compared(ast.parse(file.read_text())) & {*choices.OBJECTIVES, *choices.EXAMPLES})
    }
    assert wrong == {}


def test_no_rule_and_no_name_is_without_entry() -> None:
    assert set(get_args(choices.OptimizerName)) == set(choices.OPTIMIZERS) == set(RULES)
    assert list(choices.SCHEDULE_KINDS) == list(choices.SCHEDULES)
    assert get_type_hints(Recipe)["optim"] == choices.OptimizerName


@pytest.mark.parametrize("kind", choices.PACKED_FORMATS.values(), ids=lambda kind: kind.name)
def test_packed_weights_take_what_the_table_says(kind: choices.PackedFormat) -> None:
    assert (kind.key in KEYS) is not kind.is_published and torch.finfo(torch.float32).bits // 8 == choices.SCALE_BYTES
    assert packed_bytes(torch.Size([1024, 1024]), kind.name) == 2**20 * kind.bytes_per_param
    assert set(get_args(choices.PackedName)) == set(choices.PACKED_FORMATS)
