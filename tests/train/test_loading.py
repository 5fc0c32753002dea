"""Progress while weights are loaded."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roundpipe_cli.events import Event, Phase
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.prepare.trainable import fill_store
from tests.support.tiny import make_rig


def test_loading_says_how_much_and_how_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was said between the first weight and the last: minutes of silence for a large model."""
    rig = make_rig("llama")
    plain: Any = rig.plain
    plain.save_pretrained(str(tmp_path))
    seconds = itertools.count(0.0, 2.0)  # each weight takes two
    monkeypatch.setattr("roundpipe_cli.train.prepare.trainable.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    told: list[Event] = []
    recipe = Recipe(model="tiny", method="full", datasets=(), output_dir="out", learning_rate=1e-4)
    fill_store(rig.store, ModelSource("tiny", tmp_path), rig.skeleton, recipe, start=None, tell=told.append)
    texts = [event.text for event in told if isinstance(event, Phase)]
    assert re.fullmatch(r"loading [\d.]+ KiB of weights", texts[0])
    pattern = r"loading weights: ([\d.]+) KiB of ([\d.]+) KiB, ([\d.]+) (K?i?B)/s, (\w+|[\d.]+ s) left"
    found = [re.fullmatch(pattern, text) for text in texts[1:]]
    assert len(found) == (len(rig.store.views) - 1) // 3 and all(found)
    done = [float(match[1]) for match in found if match]
    assert done == sorted(set(done)) and found[0] is not None
    rate = float(found[0][3]) * (1024 if found[0][4] == "KiB" else 1)
    assert rate == pytest.approx(1024 * done[0] / 6.0, rel=0.01)
