"""Before a run continues from a checkpoint: later ones are set aside, then rows are cut, and no kill leaves a gap."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.files import append_line, sync
from roundpipe_cli.recipe.schema import LoraConfig, Recipe, plain_data
from roundpipe_cli.train.checkpoint import rewind as rewinding
from roundpipe_cli.train.checkpoint import writing as store
from roundpipe_cli.train.checkpoint.output_dir import RunState, list_best, list_checkpoints, read_state
from roundpipe_cli.train.checkpoint.reading import Checkpoint, load_newest
from roundpipe_cli.train.checkpoint.resume import check_not_past_end, check_unchanged, is_complete, may_ask_for_more
from roundpipe_cli.train.checkpoint.rewind import RowDigest, copy_records, keep_edited_rows, rewind
from tests.support.checkpoints import save_groups
from tests.support.os_calls import replace_os_call

CALLS = ("rename", "replace", "fsync", "mkdir", "write", "open", "unlink")


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def save(folder: Path, step: int, keep: int = 5) -> None:
    save_groups(folder, step, {"masters": {"w": torch.tensor(float(step))}}, {"recipe": {}}, keep=keep)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run to copy."""
    return make_run(tmp_path_factory.mktemp("runs") / "out", finished=True)


def make_run(folder: Path, *, finished: bool = False) -> Path:
    """Twelve steps, a checkpoint and an evaluation every fourth, each the best so far."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(rows(*range(1, 13)))
    (folder / "eval.jsonl").write_text(rows(4, 8, 12))
    for step in (4, 8, 12):
        save(folder, step)
        best = folder / f"best-{step:08d}"
        best.mkdir()
        (best / "best.json").write_text("{}")
    if finished:
        for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
            (folder / name).write_text("old")
        (folder / "report.json").write_text(json.dumps({"files": ["adapter_model.safetensors", "tokenizer.json"]}))
    return folder


def die_at(nth: int, folder: Path, step: int, num_steps: int) -> None:
    """Rewind, and exit with 9 instead of the `nth` call that changes the disk."""
    count = itertools.count(1)

    def dying(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return os._exit(9) if next(count) == nth else real(*args, **kwargs)

    for call in CALLS:
        replace_os_call(call, partial(dying, getattr(os, call)))
    rewind(folder, step, num_steps=num_steps, say=lambda text: None)


def killed_at(nth: int, folder: Path, step: int, num_steps: int) -> bool:
    """Rewind in a child that dies there; whether it got that far."""
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(nth, folder, step, num_steps))
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 9


@pytest.mark.parametrize("case", ["named", "continued"])
def test_a_kill_at_every_call_leaves_no_gap(tmp_path: Path, template: Path, case: str) -> None:
    """Story: metrics were cut first; killed before the next save, `--resume` took step 12: rows 1, 2, 3, 4, 13 ..."""
    nth, got_there = 0, True
    while got_there:
        nth += 1
        folder = Path(shutil.copytree(template, tmp_path / str(nth)))
        if case == "named":
            (folder / "report.json").unlink()
        step, num_steps = {"named": (4, 12), "continued": (12, 20)}[case]
        got_there = killed_at(nth, folder, step, num_steps)
        left = steps_in(folder / "metrics.jsonl")
        assert all(set(range(1, other + 1)) <= set(left) for other, _ in list_checkpoints(folder)), nth
        assert read_state(folder) is RunState.HAS_CHECKPOINT or left == list(range(1, 13))
        step = load_newest(folder).step
        rewind(folder, step, num_steps=num_steps, say=lambda text: None)
        assert steps_in(folder / "metrics.jsonl") == list(range(1, step + 1))
        assert steps_in(folder / "eval.jsonl") == list(range(4, step + 1, 4))
        assert [other for other, _ in list_checkpoints(folder)][0] == step == list_best(folder)[0][0]
        if case == "continued":
            kept = {path.name for result in folder.glob("result-*") for path in result.iterdir()}
            assert kept == {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "report.json"}
            assert not {path.name for path in folder.iterdir()} & kept
    assert nth > {"named": 12, "continued": 6}[case]


def test_a_result_is_moved_only_where_steps_are_left_and_is_on_the_disk_then(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced = Path(shutil.copytree(template, tmp_path / "out")), list[str]()
    monkeypatch.setattr(rewinding, "sync", lambda path: synced.append(path.name) or sync(path))
    rewind(folder, 12, num_steps=12, say=lambda text: None)
    assert (folder / "report.json").is_file() and not list(folder.glob("result-*")) and not synced
    rewind(folder, 12, num_steps=20, say=lambda text: None)
    assert (folder / "result-00000012" / "report.json").is_file()
    assert synced == ["result-00000012", "out"], "the files in their folder before their names in the other are gone"


def test_what_is_set_aside_is_said_and_goes_when_it_is_caught_up_with(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "out")
    said: list[str] = []
    rewind(folder, 4, num_steps=12, say=said.append)
    aside = ["best-00000008", "best-00000012", "step-00000008", "step-00000012"]
    assert sorted(path.name for path in folder.glob("set-aside-*")) == [f"set-aside-{name}" for name in aside]
    assert (
        all(name in said[0] and f"set-aside-{name}" in said[1] for name in aside)
        and "move any that you need" in said[1]
    )
    for step, left in ((6, 4), (8, 2), (10, 2), (12, 0)):
        save(folder, step)
        assert len(list(folder.glob("set-aside-*"))) == left, step
    assert (folder / "best-00000004").is_dir()


def test_going_back_twice_overwrites_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "out")
    rewind(folder, 8, num_steps=12, say=lambda text: None)
    save(folder, 12)  # removes what it has caught up with
    rewind(folder, 8, num_steps=12, say=lambda text: None)
    save(folder, 11)
    save(folder, 13)
    (folder / "set-aside-step-00000013").mkdir()
    rewind(folder, 11, num_steps=20, say=lambda text: None)
    assert {path.name for path in folder.glob("set-aside-*")} == {
        "set-aside-step-00000013",
        "set-aside-step-00000013-2",
    }


def test_a_full_disk_takes_what_is_set_aside_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "out")
    rewind(folder, 4, num_steps=12, say=lambda text: None)
    monkeypatch.setattr(store, "free_bytes", lambda path: 10**12 if not list(folder.glob("*-step-*12")) else 0)
    told: list[str] = []
    save_groups(folder, 5, {"masters": {"w": torch.ones(1)}}, {}, keep=5, warn=told.append)
    removed = {"step-00000012", "best-00000012"} - {path.name[len("set-aside-") :] for path in folder.glob("set-*")}
    assert "step-00000012" in removed and (folder / "set-aside-step-00000008").is_dir()
    assert len(told) == len(removed) and "no room" in told[0]


def test_a_failing_disk_cuts_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "out")

    def failing(*args: object) -> None:
        raise OSError(5, "Input/output error")

    replace_os_call("rename", failing, monkeypatch.setattr)
    with pytest.raises(ResourceError, match="came after the checkpoint"):
        rewind(folder, 4, num_steps=12, say=lambda text: None)
    assert steps_in(folder / "metrics.jsonl") == list(range(1, 13))


# --- whether there is something to continue --------------------------------------------------------------------------


def recipe_of(**values: Any) -> Any:
    return Recipe(**{"model": "", "datasets": (), "output_dir": "", "learning_rate": 1e-4, **values})


@pytest.mark.parametrize(
    ("old", "new", "more"),
    [
        ({}, {}, False),
        ({"num_train_epochs": 3}, {"num_train_epochs": 6}, True),
        ({"max_steps": 9}, {"max_steps": 18}, True),
        ({"max_steps": 9}, {"max_steps": 5}, True),
        ({"max_steps": 9}, {"max_steps": None}, True),
        ({"early_stopping_patience": 2}, {"early_stopping_patience": 4}, True),
        ({"max_steps": None}, {"max_steps": 5}, True),
        ({"learning_rate": 1e-4}, {"learning_rate": 2e-4}, True),  # which is refused, as for a run that was stopped
        ({"packing": True}, {"packing": "auto"}, False),  # decided once
        ({"save_steps": 5}, {"save_steps": 7}, False),  # free to change
        ({}, {"resume_from_checkpoint": "auto"}, False),
        ({}, {"resume_from_checkpoint": "out/step-00000004"}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["checkpoint", "recipe.yaml"])
def test_a_finished_run_is_continued_where_the_recipe_grew(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], more: bool, where: str
) -> None:
    from roundpipe_cli.recipe.load import LoadedRecipe, resolved_yaml

    if where == "checkpoint":
        save_groups(tmp_path, 9, {"masters": {"w": torch.ones(1)}}, {"recipe": plain_data(recipe_of(**old))}, keep=2)
    else:  # its checkpoints were deleted
        (tmp_path / "recipe.yaml").write_text(resolved_yaml(recipe_of(**old)))
    loaded = LoadedRecipe(recipe_of(**new), tmp_path / "recipe.yaml", tmp_path, ())
    assert may_ask_for_more(tmp_path, loaded) is more


def test_what_is_left_after_a_checkpoint() -> None:
    def checkpoint(step: int, num_worse: int, **recipe: int) -> Checkpoint:
        meta = {"evaluation": {"num_worse": num_worse}, "recipe": recipe}
        return Checkpoint(Path(f"step-{step}"), step, meta, {})

    assert is_complete(checkpoint(9, 0), recipe_of(), 18) is None
    assert is_complete(checkpoint(9, 0), recipe_of(), 9) == "all 9 steps are done"
    assert "early_stopping_patience" in str(is_complete(checkpoint(9, 2), recipe_of(early_stopping_patience=2), 18))
    assert is_complete(checkpoint(9, 2), recipe_of(early_stopping_patience=3), 18) is None
    stopped_early = checkpoint(9, 2, early_stopping_patience=2)
    assert is_complete(stopped_early, recipe_of(), 18), "a command without the key asks for nothing"
    check_not_past_end(checkpoint(9, 0), 9)
    with pytest.raises(RefusedError, match="past the end"):
        check_not_past_end(checkpoint(9, 0), 8)


# --- rows that somebody edited ---------------------------------------------------------------------------------------


def make_recorded_run(folder: Path) -> Path:
    """Twelve steps with a checkpoint every fourth; each holds the digest of its rows."""
    folder.mkdir()
    digests = {"metrics.jsonl": RowDigest(folder / "metrics.jsonl"), "eval.jsonl": RowDigest(folder / "eval.jsonl")}
    for step in range(1, 13):
        for name in digests if step % 4 == 0 else ("metrics.jsonl",):
            digests[name].add(append_line(folder / name, json.dumps({"step": step, "loss": 1 / step})))
        if step % 4 == 0:
            records = {name: digest.state() for name, digest in digests.items()}
            save_groups(folder, step, {"masters": {"w": torch.ones(1)}}, {"recipe": {}, "records": records}, keep=5)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recorded_run(tmp_path_factory.mktemp("recorded") / "out")


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "another loss": lambda data: data.replace(b"0.5", b"0.4"),
    "a row less": lambda data: data[data.index(b"\n") + 1 :],
    "a note between the rows": lambda data: data.replace(b"\n", b"\n# my note\n", 1),
    "a note at the end": lambda data: data + b"# my note\n",
    "other line breaks": lambda data: data.replace(b"\n", b"\r\n"),
    "a row of its own": lambda data: data + b'{"step": 2, "loss": 9}\n',
}


@pytest.mark.parametrize("step", [4, 12])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_rows_are_reported_and_nothing_is_lost(tmp_path: Path, recorded: Path, edit: str, step: int) -> None:
    """Story: a row changed by hand was continued from in silence, and notes were cut out of the file."""
    folder = Path(shutil.copytree(recorded, tmp_path / "out"))
    edited = EDITS[edit]((folder / "metrics.jsonl").read_bytes())
    (folder / "metrics.jsonl").write_bytes(edited)
    said: list[str] = []
    rewind(folder, step, num_steps=20, say=said.append)
    (copy,) = folder.glob("*-edited-*")
    assert copy.read_bytes() == edited
    assert "metrics.jsonl was changed" in said[0] and copy.name in said[0] and "step 12 was saved" in said[0]
    assert steps_in(folder / "metrics.jsonl") == list(range(2 if edit == "a row less" else 1, step + 1))


def test_rows_as_the_run_wrote_them_are_not_reported(tmp_path: Path, recorded: Path) -> None:
    """Neither rows behind the newest checkpoint nor a line that a kill has torn are anybody's edit."""
    folder = Path(shutil.copytree(recorded, tmp_path / "out"))
    for tail in (b"", b'{"step": 13, "loss": 1}\n{"step": 14', b""):
        for name in ("metrics.jsonl", "eval.jsonl"):
            (folder / name).write_bytes((folder / name).read_bytes() + tail)
        said: list[str] = []
        rewind(folder, 12, num_steps=20, say=said.append)
        assert said == []
    rewind(folder, 4, num_steps=20, say=said.append)
    rewind(folder, 4, num_steps=20, say=said.append)
    assert not list(folder.glob("*-edited-*")) and not any("changed" in text for text in said)


def test_edited_evaluations_are_kept_at_every_kill(tmp_path: Path, recorded: Path) -> None:
    """Killed anywhere on the way, the next resume still has the file as the user left it, once."""
    nth, got_there = 0, True
    while got_there:
        nth += 1
        folder = Path(shutil.copytree(recorded, tmp_path / str(nth)))
        edited = (folder / "eval.jsonl").read_bytes() + b"# the second one counts\n"
        (folder / "eval.jsonl").write_bytes(edited)
        got_there = killed_at(nth, folder, 4, 12)
        rewind(folder, load_newest(folder, folder / "step-00000004").step, num_steps=12, say=lambda text: None)
        copies = [path for path in folder.glob("*-edited-*") if not path.name.startswith(".tmp")]
        assert [path.read_bytes() for path in copies] == [edited], nth
        assert steps_in(folder / "eval.jsonl") == [4]
    assert nth > 10
    folder = Path(shutil.copytree(recorded, tmp_path / "alone"))
    (folder / "metrics.jsonl").unlink()
    (folder / "eval.jsonl").write_bytes(edited)
    keep_edited_rows(folder, folder, lambda text: None)
    assert [path.read_bytes() for path in folder.glob("eval-edited-*")] == [edited], "whatever else is missing"


def test_a_copy_of_another_runs_records(tmp_path: Path, recorded: Path) -> None:
    """Rows and best weights come along, whatever kill came before; the other run's folder is as it was."""
    other = Path(shutil.copytree(recorded, tmp_path / "other"))
    (other / "best-00000004").mkdir()
    (other / "best-00000004" / "best.json").write_text("{}")
    (other / "eval.jsonl").write_bytes(edited := (other / "eval.jsonl").read_bytes() + b"# my note\n")
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    target = tmp_path / "new"
    target.mkdir()
    (target / "metrics.jsonl").write_text(rows(1, 2))  # of a try that was killed
    said: list[str] = []
    for _ in range(2):
        copy_records(other / "step-00000008", {"evaluation": {"kept_step": 4, "kept_loss": 1.0}}, target, said.append)
        rewind(target, 8, num_steps=12, say=said.append)
        assert steps_in(target / "metrics.jsonl") == list(range(1, 9)) and steps_in(target / "eval.jsonl") == [4, 8]
    assert (target / "best-00000004" / "best.json").is_file() and not list(target.glob(".tmp-*"))
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert "eval.jsonl was changed" in said[0] and "stays as it is" in said[1]
    assert edited in [path.read_bytes() for path in target.glob("eval-edited-*.jsonl")]


def unchanged_setup(recipe: Recipe) -> Any:
    hashes = dict.fromkeys(("model_hash", "config_hash", "start_hash"), "")
    dataset, tokenizer = SimpleNamespace(content_hash="d"), SimpleNamespace(get_vocab=dict, special_tokens_map={})
    nothing = dict.fromkeys(("fused", "loss", "teacher"))
    return SimpleNamespace(recipe=recipe, dataset=dataset, tokenizer=tokenizer, **hashes, **nothing)


@pytest.mark.parametrize(
    ("saved", "now", "word"),
    [
        ({"num_steps": 9}, {"max_steps": 18}, None),  # in place of epochs: longer is free, shorter is refused
        ({"num_steps": 9}, {"max_steps": 8}, "max_steps"),
        ({"recipe": {"fp8_products": False}}, {}, None),  # a key that recipes once had
        ({"recipe": {"fp8_products": True}}, {}, "fp8_products"),
        ({"recipe": {"weight_decay": ..., "lora": {}}}, {"lora": LoraConfig()}, None),  # keys that came later
        ({"recipe": {"lora": {}}}, {"lora": LoraConfig(dropout=0.1)}, "lora.dropout"),
        ({"recipe": {"load_in_16bit": ...}}, {"load_in_16bit": True}, None),  # the same bits
    ],
)
def test_what_counts_as_a_change(saved: dict[str, Any], now: dict[str, Any], word: str | None) -> None:
    setup = unchanged_setup(recipe_of(**now))
    recipe = {**plain_data(recipe_of()), **saved.get("recipe", {})}
    meta = {**saved, "recipe": {key: value for key, value in recipe.items() if value is not ...}}
    check_unchanged(meta, setup, [word or ""])
    if word is not None:
        with pytest.raises(RefusedError) as refused:
            check_unchanged(meta, setup, [])
        (problem,) = refused.value.problems
        assert str(problem.where).partition(" ")[0] == word and f"add --allow-changed {word}" in str(problem.hint)
