"""Tiny models, and a working directory with a recipe of one, for the files that need no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.e2e import STAGES, make_workspace, untied_and_tied


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return untied_and_tied(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return make_workspace(tmp_path / "work", model, **STAGES)
