"""Whatever a person gets wrong: one clear message, the documented exit code, no traceback, nothing left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.e2e import Outcome, finetune, launch, run, tree
from tests.support.os_calls import mounted

TORCH = "loading torch"
"""A wrong name is told before the seconds that it takes."""


def refused(folder: Path, *words: str, code: int = 2) -> Outcome:
    """Run, expect a refusal, and see that the working directory is as it was."""
    before = tree(folder)
    done = finetune(folder, *words).expect(code)
    assert done.out == "" and "error: " in done.err
    assert tree(folder) == before, "something was left behind"
    return done


def says(done: Outcome, *texts: str) -> None:
    for text in texts:
        assert text in done.err, done.err


def test_what_is_no_model(folder: Path) -> None:
    """Others: tests/golden/mistakes.txt."""
    says(refused(folder, "model=rows.jsonl"), "this file is no model", "rows.jsonl", ".gguf")
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text("{")
    says(refused(folder, "model=empty"), "config.json cannot be read")
    shutil.copytree(folder / "model", folder / "cut")
    whole = (folder / "model" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    says(refused(folder, "model=cut"), "a file of the weights cannot be read", "cut/model.safetensors")


def test_fewer_rows_than_a_step_takes(folder: Path) -> None:
    done = refused(folder, "gradient_accumulation_steps=100")
    says(done, "fewer rows than one step takes", "found: 10 rows", "hint: gradient_accumulation_steps=5\n")
    assert "of weights" not in done.err, "said before anything large is loaded"
    done = refused(folder, "micro_batch_size=16")
    says(done, "hint: gradient_accumulation_steps=1 micro_batch_size=10\n")


def test_tokens_that_the_model_has_no_embedding_for(folder: Path) -> None:
    """Story: words added to the tokenizer only; the run failed in the middle of a step, inside torch."""
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    words = [{"id": 259 + n, "content": f"<w{n}>", **dict.fromkeys(flags, False)} for n in range(60)]
    path.write_text(json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], *words]}))
    rows = [{"prompt": "Say: ", "completion": f"<w{n}>"} for n in range(0, 60, 6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "out").mkdir()  # it was there, and stays
    done = finetune(folder).expect(2)
    says(done, "tokens that the model has no embedding for", "found: token 313, '<w54>'", "expected: ids below 300")
    assert (folder / "out").is_dir()


def test_output_directories_that_cannot_be(folder: Path) -> None:
    """Others: tests/golden/mistakes.txt, tests/train/test_checkpoint_output_dir.py."""
    foreign = refused(folder, "output_dir=model")
    says(foreign, "the folder holds a model", "model.safetensors", "output_dir=")
    assert "--resume" not in foreign.err and TORCH not in foreign.err, "there is nothing to resume"


def test_folders_that_were_made_go_again_and_others_stay(folder: Path) -> None:
    (folder / "here").mkdir()
    done = refused(folder, "output_dir=here/a/b", "model=model", "lora.target_modules=[nope]")
    says(done, "LoRA finds nothing to adapt", "nope", "all-linear")


def test_a_disk_that_is_too_small(folder: Path) -> None:
    """Told at once, before anything is loaded."""
    (folder / "disk").mkdir()
    with mounted(folder / "disk", "size=64k"):
        done = finetune(folder, "output_dir=disk/out").expect(5)
        says(done, "disk: needs", "has 64 KiB")
        assert not (folder / "disk" / "out").exists()


def test_without_a_command_there_is_help(folder: Path) -> None:
    """Typing errors: tests/golden/mistakes.txt."""
    says(run(folder).expect(2), "Usage: roundpipe", "finetune")


def test_an_output_directory_that_is_moved_during_a_run_ends_it_with_one_error(folder: Path) -> None:
    """Nothing of the run is made anew under the old name."""
    slow = {"ROUNDPIPE_FAULT": "optimizer:slow=2:step=1"}  # so that there is time to move it
    running = launch(folder, "finetune", "recipe.yaml", environment=slow)
    running.wait_for_steps(1)
    (folder / "out").rename(folder / "elsewhere")
    done = running.finish().expect(5)
    assert done.err.count("error: ") == 1 and "removed or moved" in done.err
    assert not (folder / "out").exists()
