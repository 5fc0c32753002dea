"""Packing, mixing and templates through the command line; order of rows over resumes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.e2e import finetune, launch, make_model, make_workspace, numbers, write_rows

NUM_ROWS = 24
SLOW = {"ROUNDPIPE_FAULT": "optimizer:slow=0.05"}


def workspace(folder: Path, model: Path, **changes: Any) -> Path:
    make_workspace(
        folder, model, max_seq_length=128, num_train_epochs=3, save_steps=4, pipeline__devices=["cpu"], **changes
    )
    write_rows(folder / "rows.jsonl", NUM_ROWS)
    return folder


def row_log(folder: Path) -> list[tuple[int, list[int]]]:
    """(step, row ids) as logged; of a step that a resumed run did again, the later."""
    logged: dict[int, list[int]] = {}
    for line in (folder / "rows.log").read_text().splitlines():
        entry = json.loads(line)
        logged[entry["step"]] = entry["rows"]
    return sorted(logged.items())


def run_with_log(folder: Path, *words: str, **environment: str) -> Any:
    return launch(
        folder, "finetune", "recipe.yaml", *words, environment={"ROUNDPIPE_ROW_LOG": "rows.log", **environment}
    )


def test_packed_training_is_told_and_refused_where_rows_would_mix(tmp_path: Path, model: Path) -> None:
    folder = workspace(tmp_path / "work", model, packing=True, max_steps=2)
    done = finetune(folder).expect(0)
    assert f"packing: {NUM_ROWS} rows in" in done.err and "% full" in done.err
    bloom = make_workspace(tmp_path / "bloom", make_model(tmp_path / "b" / "model", "bloom"), packing=True)
    refused = finetune(bloom).expect(2)
    assert "they would see each other" in refused.err and "hint: packing=false" in refused.err
    assert not (bloom / "out" / "metrics.jsonl").exists()


def test_weights_decide_how_often_rows_come(tmp_path: Path, model: Path) -> None:
    datasets = [{"path": "rows.jsonl", "weight": 3}, {"path": "more.jsonl", "weight": 1}]
    folder = workspace(tmp_path / "work", model, datasets=datasets)
    write_rows(folder / "more.jsonl", NUM_ROWS)
    done = run_with_log(folder, "num_train_epochs=1").finish().expect(0)
    assert "mixed by weight: an epoch has 36 rows of rows.jsonl (75 %, each row 1.50 times)" in done.err
    counts = Counter(row < NUM_ROWS for _, rows in row_log(folder) for row in rows)
    assert counts == {True: 36, False: 12}


def test_a_template_of_the_recipe_is_used_and_saved_with_the_result(tmp_path: Path, model: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    folder = workspace(tmp_path / "work", model, chat_template="mine.jinja", max_steps=1)
    (folder / "mine.jinja").write_text(template)
    finetune(folder).expect(0)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(str(folder / "out")).chat_template == template
    finetune(folder, f"chat_template={json.dumps(template)}", "output_dir=text").expect(0)
    assert numbers(folder / "text") == numbers(folder / "out"), "a file or its text"
    for text, words in [("{{ 9 ** (9 ** 9) }}", "takes too long"), ("missing.jinja", "chat template not found")]:
        assert words in finetune(folder, f"chat_template={json.dumps(text)}", "output_dir=refused").expect(2).err
        assert not (folder / "refused" / "metrics.jsonl").exists()
