"""Paths that somebody wrote and no file can have: refused wherever a path is read, by one error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from roundpipe_cli.cli.export import find_adapter_base
from roundpipe_cli.costs.find_model import find_config
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.sources import find_sources
from roundpipe_cli.data.template import find_template
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.source import check_model_name, resolve_model
from roundpipe_cli.recipe.load import load_recipe, resolve_path
from tests.data.test_data_dataset import byte_tokenizer

HERE = Path(__file__).parent


def _find_base(name: str, folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    find_adapter_base(folder, None, offline=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda name, folder: resolve_model(name, revision=None, recipe_folder=folder, offline=True),
        lambda name, folder: check_model_name(name, revision=None, recipe_folder=folder, offline=True),
        lambda name, folder: find_config(name, resolve_path(name, folder)),
        lambda name, folder: find_sources(DatasetSpec(name), folder, offline=True),
        lambda name, folder: find_template(byte_tokenizer(), name, folder),
        lambda name, _: load_recipe(name, []),
        _find_base,
    ],
    ids=["model", "model name", "plan", "dataset", "template", "recipe", "adapter"],
)
@pytest.mark.parametrize(
    "name", ["x" * 300, "a/" + "x" * 300, "~nobody-has-this-name/x", "/".join(["y" * 200] * 30), "a\0b"], ids=repr
)
def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path, read: Callable[..., object], name: str) -> None:
    """Story: each was "a bug of roundpipe": `File name too long`, `Could not determine home directory`."""
    with pytest.raises(RefusedError) as caught:
        read(name, tmp_path)
    assert len(str(caught.value)) < 9000
