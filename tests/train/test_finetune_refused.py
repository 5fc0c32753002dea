"""Whatever a person gets wrong: one clear message, the documented exit code, no traceback, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
from functools import partial
from pathlib import Path

from huggingface_hub import constants

from tests.support.e2e import Outcome, finetune, launch, numbers, run, tree
from tests.support.os_calls import mounted

NO_NETWORK = dict.fromkeys(("HTTPS_PROXY", "https_proxy"), "http://127.0.0.1:9")
TORCH = "loading torch"
"""A wrong name is told before the seconds that it takes."""


def slow_at(step: int) -> dict[str, str]:
    """Environment in which this step takes two seconds more, so that there is time to spoil something."""
    return {"ROUNDPIPE_FAULT": f"optimizer:slow=2:step={step}"}


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


def _hub_cache_in(folder: str) -> None:
    constants.HF_HUB_CACHE = folder


def test_a_hub_model_without_a_network(folder: Path) -> None:
    """Within seconds, and also where an interrupted download left a part in the cache."""
    cache = folder / "cache"
    snapshot = cache / "models--nobody--nothing" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123abc")
    shutil.copy(folder / "model" / "config.json", snapshot)
    words, before = ("finetune", "recipe.yaml", "model=nobody/nothing"), partial(_hub_cache_in, str(cache))
    partly = launch(folder, *words, environment=NO_NETWORK, before=before).finish().expect(2)
    says(partly, "no safetensors weights", "0123abc")
    shutil.rmtree(cache)
    missing = launch(folder, *words, environment=NO_NETWORK, before=before).finish().expect(2)
    says(missing, "neither a local folder nor to be had from the hub", "nobody/nothing (Connect", "check the name")
    offline = finetune(folder, "model=nobody/nothing", "--offline").expect(2)
    says(offline, "nobody/nothing (offline)")
    assert not (folder / "out").exists()


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


def test_a_disk_that_fills_up_during_a_run(folder: Path) -> None:
    """Exit 5 at the next checkpoint that finds no room; with room again, --resume goes on."""
    (folder / "disk").mkdir()
    with mounted(folder / "disk", "size=2m"):
        words = "finetune", "recipe.yaml", "output_dir=disk/out", "save_steps=1", "max_steps=3"
        out = folder / "disk" / "out"
        running = launch(folder, *words, environment=slow_at(1))
        running.wait_until(lambda: (out / "step-00000001").exists())
        with contextlib.suppress(OSError), (folder / "disk" / "filler").open("wb", buffering=0) as filler:
            while shutil.disk_usage(folder / "disk").free:
                filler.write(bytes(4096))
        done = running.finish().expect(5)
        says(done, "error: ", "disk space for the checkpoint of step", "free", "--resume")
        assert not list(out.glob(".tmp-step-*")) and not (out / "report.json").exists()
        assert list(out.glob("step-*"))
        (folder / "disk" / "filler").unlink()
        run(folder, *words, "--resume").expect(0)
        assert [row["step"] for row in numbers(out)] == [1, 2, 3]


def test_metrics_that_cannot_be_written(folder: Path) -> None:
    """Exit 5 too, and the line that was cut is not read as a step."""
    running = launch(folder, "finetune", "recipe.yaml", "save_steps=100", "max_steps=60", environment=slow_at(9))
    running.wait_for_steps(9)  # the limit holds for stderr too, which is a file here
    assert running.process.pid is not None
    limit_bytes = 100 + (folder / "out" / "metrics.jsonl").stat().st_size
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    says(running.finish().expect(5), "could not write the metrics of step", "metrics.jsonl")
    finetune(folder, "max_steps=1").expect(0)  # no checkpoint yet: the run starts afresh
    assert [row["step"] for row in numbers(folder / "out")] == [1]


def test_without_a_command_there_is_help(folder: Path) -> None:
    """Typing errors: tests/golden/mistakes.txt."""
    says(run(folder).expect(2), "Usage: roundpipe", "finetune")


def test_an_output_directory_that_is_moved_during_a_run_ends_it_with_one_error(folder: Path) -> None:
    """Nothing of the run is made anew under the old name."""
    running = launch(folder, "finetune", "recipe.yaml", environment=slow_at(1))
    running.wait_for_steps(1)
    (folder / "out").rename(folder / "elsewhere")
    done = running.finish().expect(5)
    assert done.err.count("error: ") == 1 and "removed or moved" in done.err
    assert not (folder / "out").exists()
