"""Downloads from a small hub on this machine: the order of what is asked for, and every way in which it can fail.

Each ends in one error or one whole set of files, and no finished file comes twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event, Notice
from roundpipe_cli.hub import ask
from roundpipe_cli.hub import download as fetching
from roundpipe_cli.hub.download import Listing, RemoteFile, fetch_files
from tests.support.covering import swept
from tests.support.e2e import STAGES_OF_TWO, Outcome, Running, launch, make_model, write_recipe, write_rows
from tests.support.model_hub import COMMIT, OTHER_COMMIT, ModelHub, folder_files, model_hub, read_hub_settings_again
from tests.support.os_calls import mounted
from tests.support.tiny import tiny_config

NAME = "me/tiny"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SMALL = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
INDEX = "model.safetensors.index.json"
WANTED = sorted([*SMALL, INDEX, *SHARDS])
UNWANTED = {
    "README.md": b"# tiny",
    **{"consolidated.safetensors": b"in its maker's layout", "model.fp16.safetensors": b"a variant"},
    **{"onnx/model.onnx": b"another format", "original/consolidated.00.pth": b"its maker's"},
    **{"original/tokenizer.model": b"its maker's", "params.json": b"{}", "pytorch_model.bin": b"a pickle"},
    **{"pytorch_model.bin.index.json": b"{}", "training_args.json": b"{}"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny model in two files of weights, beside what a repository also holds."""
    folder = make_model(tmp_path_factory.mktemp("hub") / "model", num_hidden_layers=2)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    weight_map = {name: SHARDS[number > len(names) // 2] for number, name in enumerate(names)}
    for shard in SHARDS:
        tensors = {name: state[name] for name in names if weight_map[name] == shard}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert sorted(folder_files(folder)) == WANTED
    return {**folder_files(folder), **UNWANTED}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[ModelHub]:
    with model_hub(NAME, dict(files)) as hub:
        yield hub


def settings(hub: ModelHub, cache: Path, **others: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.address, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "", "HF_TOKEN": "", **others}


def start(folder: Path, *words: str, environment: dict[str, str]) -> Running:
    return launch(folder, *words, environment=environment, before=read_hub_settings_again)


def download(hub: ModelHub, folder: Path, *words: str, **others: str) -> Outcome:
    words = words if words and not words[0].startswith("-") else (NAME, *words)
    return start(folder, "download", *words, environment=settings(hub, folder / "cache", **others)).finish()


def workspace(folder: Path, **changes: Any) -> Path:
    """A recipe of the hub's model, and rows."""
    folder.mkdir()
    write_rows(folder / "rows.jsonl")
    write_recipe(folder / "recipe.yaml", model=NAME, **changes)
    return folder


def snapshot(folder: Path) -> Path:
    return folder / "cache" / "hub" / "models--me--tiny" / "snapshots" / COMMIT


def is_whole(folder: Path, hub: ModelHub) -> None:
    """All wanted files with their content, nothing else, and nothing half in the cache."""
    found = folder_files(snapshot(folder))
    assert sorted(found) == WANTED
    assert all(found[name] == hub.models[NAME][name] for name in WANTED)
    blobs = list((snapshot(folder).parents[1] / "blobs").iterdir())
    assert len(blobs) == len(WANTED) and not [path for path in blobs if path.name.endswith(".incomplete")]


# --- what is fetched ------------------------------------------------------------------------------------------------


def test_configuration_first_then_exactly_the_indexed_files(hub: ModelHub, tmp_path: Path) -> None:
    done = download(hub, tmp_path, "--json", "--revision", "main").expect(0)
    document = json.loads(done.out)
    assert sorted(document["fetched_files"]) == WANTED and document["fetched_bytes"] == document["total_bytes"]
    assert document["revision"] == "main"
    is_whole(tmp_path, hub)
    gets = hub.gets()
    assert sorted(gets) == WANTED, "each once"
    assert gets[0] == "config.json" and sorted(gets[:5]) == SMALL and gets[5] == INDEX
    assert sum(path.startswith("/api/models/") for _, path in hub.asked) == 1, "asked once which commit it is"
    total = sum(len(hub.models[NAME][name]) for name in WANTED)
    assert f"{NAME} at commit {COMMIT}: 8 files, " in done.err and "to fetch: 2 files of weights" in done.err
    assert "downloading: 2 of 2 files, " in done.err and "iB/s" in done.err
    again = download(hub, tmp_path, "--json").expect(0)
    assert sorted(hub.gets()) == WANTED, "nothing comes again"
    document = json.loads(again.out)
    assert document["folder"] == str(snapshot(tmp_path)) and document["commit"] == COMMIT
    assert document["total_bytes"] == total and sorted(document["files"]) == WANTED
    assert document["fetched_bytes"] == 0 and document["fetched_files"] == [] and "here already: 8 files" in again.err


@pytest.mark.parametrize("has_index", [True, False])
def test_one_file_of_weights_is_fetched_with_and_without_an_index(
    hub: ModelHub, tmp_path: Path, has_index: bool
) -> None:
    """As transformers does; shards beside it would be fetched for nothing."""
    files = hub.models[NAME]
    files["model.safetensors"] = files[SHARDS[0]]
    for name in () if has_index else (INDEX, *SHARDS):
        del files[name]
    done = download(hub, tmp_path).expect(0)
    assert sorted(hub.gets()) == sorted([*SMALL, *([INDEX] if has_index else []), "model.safetensors"])
    assert done.err.count("model.safetensors is read, as transformers does") == has_index


@pytest.mark.parametrize(
    ("changes", "removed", "said"),
    [
        ({"config.json": b'{"model_type": "llama", "auto_map": {"a": "b"}}'}, [], "code from its repository"),
        ({"adapter_config.json": b"{}"}, [], "the folder holds an adapter, not a model"),
        ({}, ["config.json"], "the model folder has no config.json"),
        ({}, [SHARDS[1]], f"a file of the weights is missing\n  found: no {SHARDS[1]}"),
        ({}, [INDEX, *SHARDS, "model.fp16.safetensors"], "no safetensors weights\n  found: pytorch_model.bin (pickle"),
        ({INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'}, [], "names a file outside the model folder"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:30],
)
def test_what_cannot_be_trained_is_refused_before_its_weights_come(
    hub: ModelHub, tmp_path: Path, changes: dict[str, bytes], removed: list[str], said: str
) -> None:
    hub.models[NAME].update(changes)
    for name in removed:
        del hub.models[NAME][name]
    done = download(hub, tmp_path).expect(2)
    assert said in done.err and not [name for name in hub.gets() if name.endswith(".safetensors")]


@pytest.mark.parametrize("method", ["gptq", *swept(["awq"])])
def test_gptq_and_awq_are_refused_by_name_with_the_size_of_the_unquantised_model(
    hub: ModelHub, tmp_path: Path, method: str
) -> None:
    work = workspace(tmp_path / "work")
    quantized = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}
    figures = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    config = {**json.loads(hub.models[NAME]["config.json"]), **figures, **heads, **quantized}
    hub.models[NAME]["config.json"] = json.dumps(config).encode()
    for words in (["plan", "--hardware", "1x4090"], ["download"], ["finetune", "--no-dashboard"]):
        named = NAME if words[0] == "download" else "recipe.yaml"
        environment = settings(hub, tmp_path / f"cache-{words[0]}")
        refused = start(work, words[0], named, *words[1:], environment=environment).finish().expect(2)
        assert f"found: {method.upper()}, 4 bits" in refused.err
        assert "load_in_4bit: true: 8.03B parameters, 15 GiB in 16 bit; in 4 bit it takes about " in refused.err
    assert not set(SHARDS) & set(hub.gets())


@pytest.mark.parametrize(
    ("model_type", "override", "said"),
    [
        ("qwen3_moe", "lora.dropout=0.1", "adapters on fused experts have no dropout"),
        pytest.param("minimax", "packing=true", "cannot train on packed rows", marks=pytest.mark.sweep),
        ("bloom", "packing=true", "takes no position ids"),
    ],
)
def test_what_the_proof_refuses_is_refused_before_the_weights_come(
    hub: ModelHub, tmp_path: Path, model_type: str, override: str, said: str
) -> None:
    """The proof needs the configuration alone; it ran once all weights had come."""
    work = workspace(tmp_path / "work")
    hub.models[NAME]["config.json"] = tiny_config(model_type).to_json_string().encode()
    words = ["finetune", "recipe.yaml", override, "--no-dashboard"]
    refused = start(work, *words, environment=settings(hub, tmp_path / "cache")).finish().expect(2)
    assert said in refused.err and not set(SHARDS) & set(hub.gets())


def test_a_recipe_is_planned_before_the_weights_come(hub: ModelHub, tmp_path: Path) -> None:
    """The verdict is `finetune`'s; the figures are those of the configuration that came."""
    workspace(tmp_path / "work")
    large = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 40, "vocab_size": 300}
    config = {**json.loads(hub.models[NAME]["config.json"]), **large, "num_attention_heads": 128, "head_dim": 128}
    whole = dict(hub.models[NAME])
    hub.models[NAME]["config.json"] = json.dumps(config).encode()
    done = download(hub, tmp_path, "work/recipe.yaml", HF_HOME=str(tmp_path / "large")).expect(5)
    assert "memory" in done.err and not set(SHARDS) & set(hub.gets())
    hub.models[NAME] = whole
    assert Path(download(hub, tmp_path, "work/recipe.yaml").expect(0).out.strip()) == snapshot(tmp_path)
    refused = download(hub, tmp_path, "work/recipe.yaml", "--revision", "main").expect(2)
    assert "set `revision:` in it" in refused.err


# --- kills, disks and damage ----------------------------------------------------------------------------------------


def big_shards(hub: ModelHub, num_bytes: int = 4 << 20, first_bytes: int | None = None) -> None:
    """Shards that take a while, in the index's names; the first one may be smaller."""
    weight_map = {f"big.{number}": shard for number, shard in enumerate(SHARDS)}
    hub.models[NAME][INDEX] = json.dumps({"weight_map": weight_map}).encode()
    for number, (shard, size) in enumerate(zip(SHARDS, (first_bytes or num_bytes, num_bytes), strict=True)):
        values = torch.arange(size // 4, dtype=torch.float32) + number
        header = {f"big.{number}": {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        hub.models[NAME][shard] = len(text).to_bytes(8, "little") + text + values.numpy().tobytes()


def unfinished(folder: Path) -> list[Path]:
    return list((snapshot(folder).parents[1] / "blobs").glob("*.incomplete"))


@contextlib.contextmanager
def downloading(hub: ModelHub, folder: Path, **others: str) -> Iterator[Running]:
    """A slow download, from the moment when both shards have been asked for."""
    hub.byte_s = hub.byte_s or 0.1
    running = start(folder, "download", NAME, environment=settings(hub, folder / "cache", **others))
    try:
        running.wait_until(lambda: set(SHARDS) <= set(hub.gets()))
        yield running
    finally:
        running.kill()


def test_a_killed_download_keeps_its_finished_files(hub: ModelHub, tmp_path: Path) -> None:
    """What was cut off starts again, and nothing of it stays on the disk."""
    big_shards(hub, first_bytes=1 << 20)
    hub.byte_s = 0.05
    with downloading(hub, tmp_path) as running:
        running.wait_until(lambda: (snapshot(tmp_path) / SHARDS[0]).exists() and bool(unfinished(tmp_path)))
        running.kill()
        assert running.finish().code == -signal.SIGKILL
    assert len(unfinished(tmp_path)) == 1 and not (snapshot(tmp_path) / SHARDS[1]).exists()
    hub.byte_s = 0.0
    before = hub.gets()
    done = download(hub, tmp_path).expect(0)
    is_whole(tmp_path, hub)
    assert hub.gets()[len(before) :] == [SHARDS[1]], "what was whole is not asked for again"
    assert "to fetch: 1 file of weights" in done.err


def test_two_downloads_at_a_time(hub: ModelHub, tmp_path: Path) -> None:
    """The second one leaves alone what the first one is writing, and waits for it."""
    big_shards(hub)
    hub.byte_s = 5.0  # until both have come so far
    with downloading(hub, tmp_path) as first, downloading(hub, tmp_path) as second:
        second.wait_until(lambda: sum(way == "HEAD" and path.endswith(SHARDS[1]) for way, path in hub.asked) >= 4)
        assert len(unfinished(tmp_path)) == 2
        hub.byte_s = 0.0
        first.finish().expect(0), second.finish().expect(0)
    is_whole(tmp_path, hub)
    assert sorted(hub.gets()) == WANTED, "each once"


@pytest.mark.parametrize("has_ranges", [True, *swept([False])])
def test_a_connection_that_breaks_is_taken_up_again(hub: ModelHub, tmp_path: Path, has_ranges: bool) -> None:
    big_shards(hub)
    hub.cut_after, hub.has_ranges = 1 << 20, has_ranges
    hub.is_cut = {*SMALL, INDEX}
    done = download(hub, tmp_path).expect(0)
    is_whole(tmp_path, hub)
    starts = [0, 1 << 20 if has_ranges else 0]
    assert all([start for start, _ in hub.sent[shard]] == starts for shard in SHARDS), "no byte twice, where possible"
    assert "note: the hub's client: Error while downloading" in done.err and "Trying to resume" in done.err
    assert "downloading: 2 of 2 files, 8 MiB of 8 MiB" in done.err


@pytest.mark.parametrize("is_xet", [False, True])
def test_the_token_stays_with_the_hub(hub: ModelHub, tmp_path: Path, is_xet: bool) -> None:
    """A hub keeps weights on other hosts, and sends there with an address that is a key by itself."""
    with model_hub(NAME, hub.models[NAME]) as storage:
        hub.elsewhere, hub.is_xet = storage.address.replace("127.0.0.1", "localhost"), is_xet
        download(hub, tmp_path, HF_TOKEN="hf_secret").expect(0)
        is_whole(tmp_path, hub)
        assert hub.tokens == {"Bearer hf_secret"} and storage.tokens == set()
        assert sorted(storage.gets()) == SHARDS and storage.questions() == 0


def test_a_file_beyond_the_limit_of_plain_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    file = RemoteFile("model.safetensors", 60 * 10**9, None, None)
    with pytest.raises(RefusedError, match="model.safetensors is too large for a plain download") as refused:
        fetch_files(Listing(ask.Repository(NAME), None, COMMIT, {file.name: file}), [file.name], lambda _: None)
    assert f"`hf download {NAME} --revision {COMMIT}` fetches it" in str(refused.value)


def test_a_comparison_is_no_silence_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: bytes of another file began a wait, which was told of a hub that had nothing left to send."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(fetching, "STALL_S", 0.05)
    file = RemoteFile("a", 1, None, hashlib.sha256(b"a").hexdigest())
    told: list[Event] = []
    fetch = fetching._Fetch(Listing(ask.Repository(NAME), None, COMMIT, {"a": file}), ["a"], told.append)

    def slow(number: int) -> None:
        fetching._Bar(fetch, "b").update(1)
        time.sleep(0.1)
        fetch._report(1.0)

    monkeypatch.setattr(os, "fsync", slow)
    (tmp_path / "a").write_bytes(b"a")
    fetch._compare(file, "etag", tmp_path / "a")
    assert [event for event in told if isinstance(event, Notice)] == [] and len(told) == 1
    time.sleep(0.1)
    fetch._report(1.0)
    assert isinstance(told[1], Notice), "and then the hub is silent"


@pytest.mark.parametrize("spoilt", [SHARDS[1], "tokenizer.json"])
def test_another_content_than_the_hash_says(hub: ModelHub, tmp_path: Path, spoilt: str) -> None:
    hub.spoilt = {spoilt}
    done = download(hub, tmp_path).expect(2)
    assert done.err.count("error: ") == 1 and "not the one the hub lists" in done.err and spoilt in done.err
    assert "found: hash " in done.err and "expected: hash " in done.err and "hint: " in done.err
    assert not (snapshot(tmp_path) / spoilt).exists() and not unfinished(tmp_path)
    assert hub.gets().count(spoilt) == 1
    hub.spoilt = set()
    download(hub, tmp_path).expect(0)
    is_whole(tmp_path, hub)
    assert all(hub.gets().count(name) == 1 for name in WANTED if name not in (spoilt, *SHARDS))


@pytest.mark.parametrize("number", [signal.SIGINT, *swept([signal.SIGTERM, signal.SIGHUP])])
def test_a_stopped_download_says_what_is_left(hub: ModelHub, tmp_path: Path, number: signal.Signals) -> None:
    """Story: it said that no checkpoint was written."""
    big_shards(hub)
    with downloading(hub, tmp_path) as running:
        running.kill(number)
        done = running.finish().expect(128 + number)
    left = "finished files are kept, and the same command fetches the rest"
    assert done.err.splitlines()[-1] == f"stopped by {number.name}; {left}"
    assert not unfinished(tmp_path), "what was cut off is removed"
    hub.byte_s = 0.0
    download(hub, tmp_path).expect(0)
    is_whole(tmp_path, hub)


@pytest.mark.parametrize("kind", ["link", "left by a kill", "link in the file's place", *swept(["pipe"])])
def test_a_part_that_is_no_file_of_the_cache_is_not_written_to(hub: ModelHub, tmp_path: Path, kind: str) -> None:
    """Story: a link in a cache that several users share led what was downloaded over a file elsewhere."""
    blobs = snapshot(tmp_path).parents[1] / "blobs"
    blobs.mkdir(parents=True)
    blob = blobs / hashlib.sha256(hub.models[NAME][SHARDS[0]]).hexdigest()
    partial = blob.with_suffix(".incomplete")
    (tmp_path / "mine").write_bytes(b"precious")
    if kind == "link":
        partial.symlink_to(tmp_path / "mine")
    elif kind == "pipe":
        os.mkfifo(partial)
    elif kind == "left by a kill":
        blob.with_suffix(".0123abcd.incomplete").write_bytes(bytes(1000))
    else:
        blob.symlink_to(tmp_path / "new")
    download(hub, tmp_path).expect(0)
    assert (tmp_path / "mine").read_bytes() == b"precious" and not (tmp_path / "new").exists()
    is_whole(tmp_path, hub)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "size=3m"):
        yield disk


def test_no_room_is_said_before_the_weights_come(hub: ModelHub, tmp_path: Path, small_disk: Path) -> None:
    big_shards(hub)
    done = download(hub, tmp_path, HF_HOME=str(small_disk)).expect(5)
    assert f"not enough disk space to download {NAME}" in done.err and "HF_HUB_CACHE=" in done.err
    assert "MiB free (" in done.err and f"({sum(len(hub.models[NAME][shard]) for shard in SHARDS)} bytes)" in done.err
    assert not set(SHARDS) & set(hub.gets())


def test_a_disk_that_fills_on_the_way(hub: ModelHub, tmp_path: Path, small_disk: Path) -> None:
    """Another program takes the room; finished files are kept, and the rest comes when there is room again."""
    big_shards(hub, 1 << 20)
    cache = str(small_disk / "cache")
    with downloading(hub, tmp_path, HF_HOME=cache) as running:
        (small_disk / "other").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - (600 << 10)))
        said = running.finish().expect(5).err
    assert said.count("error: ") == 1 and "No space left on device" in said and "HF_HUB_CACHE=" in said
    assert "finished files are kept" in said and not unfinished(small_disk) and "Warning" not in said
    (small_disk / "other").unlink()
    hub.byte_s = 0.0
    download(hub, tmp_path, HF_HOME=cache).expect(0)
    is_whole(small_disk, hub)
    assert all(hub.gets().count(name) == 1 for name in (*SMALL, INDEX))


def limit_files_to_1_mib() -> None:
    read_hub_settings_again()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_a_limit_on_the_size_of_files_is_said(hub: ModelHub, tmp_path: Path) -> None:
    """Story: `ulimit -f` was answered with advice on the disk."""
    big_shards(hub)
    environment = settings(hub, tmp_path / "cache")
    done = launch(tmp_path, "download", NAME, environment=environment, before=limit_files_to_1_mib).finish().expect(5)
    assert "a limit on the size of files is set" in done.err and "ulimit -f unlimited" in done.err


# --- hubs that refuse, wait or are gone -----------------------------------------------------------------------------


def test_slow_gated_missing_and_limited(hub: ModelHub, tmp_path: Path) -> None:
    slow = "note: the hub is slow: waiting for its answers about me/none, at most 60 s each"
    for words, slow_s, said in (
        # one that took 5 s to answer was called unreachable, after 4 s
        (("me/none",), 4.5, ("the hub has no model of this name", "found: me/none (401)", "hf auth login", slow)),
        (("--revision", "v9"), 0.0, ("the model has no such revision", "leave the revision out")),
    ):
        hub.slow_s = slow_s
        done = download(hub, tmp_path, *words).expect(2)
        assert done.err.count("error: ") == 1 and all(text in done.err for text in said), done.err
    hub.gated = True
    done = download(hub, tmp_path).expect(2)
    assert "the model is gated" in done.err and "found: me/tiny (403)" in done.err and "accept its terms" in done.err
    hub.gated = False
    hub.status, hub.retry_after = {"/api/models": [429]}, "0"
    done = download(hub, tmp_path).expect(2)
    assert "the hub limits how often it is asked" in done.err and "(429) after 5 tries" in done.err
    hub.retry_after = "3600"
    done = download(hub, tmp_path).expect(2)
    assert "asked to wait 3600 s" in done.err and done.seconds < 20
    assert hub.gets() == []


def test_a_near_name_is_said_before_the_hub_is_asked(hub: ModelHub, tmp_path: Path) -> None:
    """Story: of a mistyped model one heard after all retries of an unreachable hub, 24 s later."""
    words = ("plan", "Qwen/Qwen3-8C", "--hardware", "1x4090")
    done = start(tmp_path, *words, environment=settings(hub, tmp_path / "cache")).finish().expect(2)
    near, missing = (done.err.index(text) for text in ("; did you mean Qwen/Qwen3-8B?", "error: "))
    assert near < missing and hub.asked, done.err


def test_plan_asks_for_the_revision_that_is_named(hub: ModelHub, tmp_path: Path) -> None:
    work, hub.commit = workspace(tmp_path / "work", revision=COMMIT), OTHER_COMMIT
    words = ("plan", "recipe.yaml", "--hardware", "1x4090")
    start(work, *words, environment=settings(hub, tmp_path / "cache")).finish().expect(0)
    assert {path for _, path in hub.asked if "config.json" in path} == {f"/{NAME}/resolve/{COMMIT}/config.json"}


def test_a_busy_hub_is_asked_again(hub: ModelHub, tmp_path: Path) -> None:
    hub.status = {"/api/models": [503, 429, 200], f"/{SHARDS[0]}": [429, 200]}
    done = download(hub, tmp_path).expect(0)
    assert "note: the hub is busy (it answers 503): asking again in 1 s" in done.err
    assert "it answers 429): asking again in 2 s" in done.err, "twice as long each time, where the hub names no time"
    is_whole(tmp_path, hub)


def test_a_hub_that_is_gone(hub: ModelHub, tmp_path: Path) -> None:
    """Said within seconds; a whole model in the cache stands in for it, with a notice, a partial one does not."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = download(hub, tmp_path, **nowhere).expect(2)
    assert "(ConnectError: " in done.err and done.seconds < 15
    download(hub, tmp_path).expect(0)
    num_asked = len(hub.asked)
    done = download(hub, tmp_path, **nowhere).expect(0)
    assert Path(done.out.strip()) == snapshot(tmp_path) and done.seconds < 15
    assert f"note: the hub cannot be reached (ConnectError: [Errno 111] Connection refused): {NAME}" in done.err
    assert f"commit {COMMIT[:12]}" in done.err
    for offline in (download(hub, tmp_path, "--offline"), download(hub, tmp_path, HF_HUB_OFFLINE="1")):
        assert Path(offline.expect(0).out.strip()) == snapshot(tmp_path) and "note: " not in offline.err
    assert len(hub.asked) == num_asked, "offline opens no connection"
    (snapshot(tmp_path) / SHARDS[0]).unlink()
    done = download(hub, tmp_path, **nowhere).expect(2)
    assert f"a file of the weights is missing\n  found: no {SHARDS[0]}" in done.err
    work = workspace(tmp_path / "work")  # `plan` refused a model of which one shard of two was in the cache
    done = start(work, "plan", "recipe.yaml", environment=settings(hub, tmp_path / "cache")).finish().expect(0)
    assert NAME in done.out


@pytest.mark.parametrize(
    "listing",
    [
        *(b"<html>sign in</html>", b'{"id": "me/tiny", "sha": "../../../x", "siblings": []}', None),
        *swept([b"[1, 2]", b'{"id": "me/tiny", "sha": "aaaa", "siblings": [{"rfilename": 7}]}']),
        *swept([b'{"id": "me/tiny", "sha": "aaaa", "siblings": [{"rfilename": "config.json", "size": "many"}]}']),
    ],
)
def test_what_is_no_hub_is_refused(hub: ModelHub, tmp_path: Path, listing: bytes | None) -> None:
    """Story: a proxy's page was "a bug of roundpipe", and bytes came to lie where a file's ETag led (None)."""
    hub.listing, hub.etag = listing, None if listing else f"../../../../..{tmp_path}/outside"
    done = download(hub, tmp_path).expect(2)
    assert done.err.count("error: ") == 1 and "what answers in the hub's place is no hub" in done.err
    assert ("check HF_ENDPOINT" in done.err and hub.gets() == []) if listing else "found: ETag" in done.err
    assert not list(tmp_path.glob("outside*"))


def test_an_older_whole_commit_stands_in_for_a_newer_part(hub: ModelHub, tmp_path: Path) -> None:
    """`plan` fetches the newest config.json only, and then the network goes."""
    download(hub, tmp_path).expect(0)
    hub.commit = OTHER_COMMIT
    newer = snapshot(tmp_path).with_name(OTHER_COMMIT)
    newer.mkdir()
    shutil.copy(snapshot(tmp_path) / "config.json", newer)
    (newer.parents[1] / "refs" / "main").write_text(OTHER_COMMIT)
    done = download(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9").expect(0)
    assert Path(done.out.strip()) == snapshot(tmp_path) and f"commit {COMMIT[:12]}" in done.err


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_records_its_commit_and_keeps_to_it(hub: ModelHub, tmp_path: Path) -> None:
    """Story: where the hub had a newer commit, a resume was refused: "model (files) changed"."""
    work = workspace(tmp_path / "work", num_train_epochs=1, **STAGES_OF_TWO)
    environment = settings(hub, tmp_path / "cache")

    def run(*words: str) -> Outcome:
        return start(work, "finetune", "recipe.yaml", "--no-dashboard", *words, environment=environment).finish()

    run("max_steps=1").expect(0)
    assert sorted(hub.gets()) == WANTED
    adapter = json.loads((work / "out" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == NAME and adapter["revision"] == COMMIT
    state: dict[str, Any] = json.loads((work / "out" / "step-00000001" / "state.json").read_text())
    assert state["meta"]["model_commit"] == COMMIT and state["meta"]["recipe"]["revision"] is None
    assert (snapshot(tmp_path).parents[1] / "refs" / "main").read_text() == COMMIT
    hub.commit = OTHER_COMMIT
    done = run("--resume", "max_steps=2").expect(0)
    assert f"note: base model: commit {COMMIT[:12]}, with which the run began" in done.err
    assert sorted(hub.gets()) == WANTED and not snapshot(tmp_path).with_name(OTHER_COMMIT).exists()
    exported = start(work, "export", "out", "--merge", environment=environment).finish().expect(0)
    assert sorted(hub.gets()) == WANTED and "merged" in exported.err


def tell_early_of_a_slow_hub() -> None:
    read_hub_settings_again()
    ask.SLOW_S = 0.2


def test_a_slow_or_missing_hub_of_a_dataset(hub: ModelHub, tmp_path: Path) -> None:
    for name in (*SMALL, INDEX, *SHARDS):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(hub.models[NAME][name])
    write_recipe(tmp_path / "recipe.yaml", datasets=[{"path": "me/rows", "split": "train"}])

    def said(**others: str) -> str:
        environment = settings(hub, tmp_path / "cache", **others)
        running = launch(tmp_path, "data", "recipe.yaml", environment=environment, before=tell_early_of_a_slow_hub)
        return running.finish().expect(2).err

    hub.slow_s = 0.5
    slow = said()
    assert "the hub is slow: waiting" in slow and "the hub has no dataset of this name" in slow
    gone = said(HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub cannot be reached (ConnectError" in gone and "the hub dataset is not in the local cache" in gone
