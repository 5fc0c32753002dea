"""The card of a result quotes what others wrote: it stays one page of text, and names no place of this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundpipe_cli.cli.export import find_adapter_base
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.load import load_text
from roundpipe_cli.train.checkpoint.resume import may_ask_for_more
from roundpipe_cli.train.result.model_card import model_card


def card(folder: Path, base: str | None, report: dict[str, Any], recipe: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return model_card(folder, base=base, merged=False)


def front(text: str) -> Any:
    return yaml.safe_load(text.split("---")[1])


def test_the_card_escapes_what_it_quotes(tmp_path: Path) -> None:
    """A data set's name with a line break and HTML became a section of the page."""
    recipe = {"datasets": [{"path": "a\n# Owned <script>|x|.jsonl", "type": "text", "split": "[a](http://b)"}]}
    recipe |= {"note": "```\n# Owned\n```", "lora": {"target_modules": "q\n---\nlicense: x"}}
    report = {"model": "x/y", "evaluation": {"<b>|loss": 1}, "num_steps": "<img src=x>", "model_commit": "<b>"}
    text = card(tmp_path / "a<b>", "x/y\n# Owned", report, recipe)
    outside, fence = text.split("## Recipe")
    assert "\n# Owned" not in outside and "<script>" not in outside.replace("\\<script\\>", "")
    assert "\\<img" in outside and "[a]" not in outside.replace("\\[a\\]", "") and "commit" not in outside
    assert fence.strip().startswith("````yaml") and fence.strip().endswith("````")
    assert "base_model" not in front(text)


def test_the_card_leaks_no_absolute_path(tmp_path: Path) -> None:
    recipe = {
        "model": "/home/anna/secret-project/base",
        "adapter": "~/secret-project/one",
        "datasets": [{"path": "/mnt/secret-project/rows.jsonl"}, {"path": "C:\\\\secret-project\\\\rows.csv"}],
        "chat_template": "file:///srv/secret-project/t.jinja",
        "eval_datasets": [str(Path("~/secret-project/x.jsonl").expanduser())],
    }
    text = card(tmp_path / "out", "/home/anna/secret-project/base", {"model": recipe["model"]}, recipe)
    assert "secret-project" not in text and "Fine-tuned from base" in text and "rows.jsonl" in text


def test_base_model_is_a_hub_id_or_nothing(tmp_path: Path) -> None:
    """`models/tiny`, a folder, looks like a hub id; so did `package:NAME` and a Windows path."""
    commit = {"model": "org/name", "model_commit": "0123abc"}
    assert front(card(tmp_path / "o", "org/name", commit, {}))["base_model"] == "org/name"
    for base in ("models/tiny", "package:x", "./a/b", "a/b/c", "C:\\\\a", "a b/c", "org/name\n"):
        assert "base_model" not in front(card(tmp_path / "o", base, {"model": base}, {})), base


def test_odd_values_in_a_result_are_no_bug(tmp_path: Path) -> None:
    for odd in (None, 3, "x", [], [[1]], {"a": {"b": []}}):
        keys = ("loss", "evaluation", "data", "num_steps", "model_commit")
        assert card(tmp_path / "o", None, dict.fromkeys(keys, odd), {"datasets": odd, "model": odd})


def test_the_card_says_whether_the_weights_are_the_best(tmp_path: Path) -> None:
    """`evaluation: result_is_best | False` stood beside the last step's own best loss, since no copy of it was kept."""
    figures = {"best_loss": 1.5, "best_step": 8, "result_is_best": False, "stopped_early": False}
    text = card(tmp_path / "o", None, {"num_steps": 8, "evaluation": figures}, {})
    assert "weights are those of the best evaluation, after step 8." in text
    assert "False" not in text and "training loss" not in text, "a figure that is not known has no row"
    text = card(tmp_path / "o", None, {"num_steps": 9, "evaluation": figures}, {})
    assert "weights are not those of the best evaluation, which was after step 8." in text
    assert "| evaluation: best loss | 1.5000 |" in text


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
        "model: 1" + ":0" * 400_000,
        "model: m\nx:\n" + "- 1\n" * 200_000,
        "model: " + "[" * 5000,
    ],
    ids=["merged keys", "a number to the base of 60", "many values", "deep"],
)
def test_a_recipe_beside_a_result_takes_no_time(tmp_path: Path, text: str) -> None:
    """Story: the recipe of a stranger's result was read by a YAML reader without limits: 40 lines took for ever."""
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "adapter_config.json").write_text("{}")
    before_s = time.process_time()
    assert "## Recipe" not in model_card(tmp_path, base=None, merged=False) or "1:0:0" in text
    with pytest.raises(RefusedError, match="the base model"):
        find_adapter_base(tmp_path, None, offline=True)
    may_ask_for_more(tmp_path, load_text("model: m\ndatasets: [{path: rows.jsonl}]\n", "r.yaml"))
    assert time.process_time() - before_s < 5
