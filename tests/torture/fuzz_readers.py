"""The readers of files from elsewhere, or of files that a crash may have damaged, for `fuzz.py`."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import os
import random
import shutil
from pathlib import Path
from typing import Any

from roundpipe_cli.cache import CACHE_VARIABLE
from roundpipe_cli.train.result.gguf_file import write_gguf
from roundpipe_cli.train.result.gguf_types import GGUF_NAME
from tests.support.e2e import make_model, make_tokenizer
from tests.support.tiny import tiny_config
from tests.torture.fuzz import Reader, fuzz
from tests.torture.fuzz_commands import make_trained
from tests.torture.mutations import damage_bytes, damages


def _make_gguf(folder: Path) -> None:
    write_gguf(make_model(folder, num_hidden_layers=1), "f32")
    for path in folder.iterdir():
        if path.name != GGUF_NAME:
            path.unlink()


def _damage_gguf(folder: Path, draw: random.Random) -> None:
    """Its header mostly: the tensors behind it may have any value."""
    path = folder / GGUF_NAME
    if draw.random() < 0.2:
        damage_bytes(path, draw)
        return
    data = path.read_bytes()
    head, rest = data[:9000], data[9000:]
    path.write_bytes(head)
    damage_bytes(path, draw)
    path.write_bytes(path.read_bytes() + (rest if draw.random() < 0.8 else b""))


def _read_gguf(folder: Path) -> None:
    import torch

    from roundpipe_cli.costs.find_model import find_architecture
    from roundpipe_cli.model.files.source import ModelSource
    from roundpipe_cli.model.load import build_skeleton, load_config, load_tokenizer

    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    find_architecture(GGUF_NAME, folder / GGUF_NAME)
    source = ModelSource(GGUF_NAME, folder, GGUF_NAME)
    build_skeleton(load_config(source), torch.float32)
    load_tokenizer(source)


def _read_configs(folder: Path) -> None:
    import torch

    from roundpipe_cli.costs.find_model import find_architecture
    from roundpipe_cli.model.files.source import resolve_model
    from roundpipe_cli.model.load import build_skeleton, load_config, load_tokenizer
    from roundpipe_cli.train.prepare.base_files import read_base_files

    source = resolve_model(str(folder), revision=None, recipe_folder=folder, offline=True)
    find_architecture(str(folder), folder)
    config = load_config(source)
    files = read_base_files(source, config)
    build_skeleton(config, torch.float32)
    tokenizer = load_tokenizer(source)
    files.ending_as_trained(tokenizer)


def _make_adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    get_peft_model(_skeleton(), config).save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)


@functools.lru_cache(maxsize=1)
def _skeleton() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("llama"))


def _read_adapter(folder: Path) -> None:
    import copy

    from roundpipe_cli.cli.export import find_result
    from roundpipe_cli.model.adapter_files import put_adapter, read_adapter_config, read_adapter_tensors

    find_result(folder)
    config = read_adapter_config(folder)
    model = copy.deepcopy(_skeleton())
    put_adapter(model, config, folder)
    read_adapter_tensors(model, folder)


_RUN_FILES = ("events.jsonl", "metrics.jsonl", "report.json", "recipe.yaml")


def _make_run(folder: Path) -> None:
    make_trained(folder / "work")
    for name in _RUN_FILES:
        (folder / "work" / "out" / name).rename(folder / name)
    shutil.rmtree(folder / "work")


def _read_run(folder: Path) -> None:
    from rich.console import Console

    from roundpipe_cli.cli.watch import watch
    from roundpipe_cli.dashboard.replay import RunFiles
    from roundpipe_cli.dashboard.state import fold_all
    from roundpipe_cli.dashboard.theme import Theme
    from roundpipe_cli.dashboard.views import screen
    from roundpipe_cli.train.result.model_card import model_card

    watch([str(folder)], html=str(folder / "page.html"))
    watch([str(folder)], json_output=True, follow=False)
    watch([str(folder)], no_dashboard=True, follow=False)
    state = fold_all(RunFiles(folder).poll()[1])
    console = Console(width=100, file=io.StringIO())
    console.print(screen(state, 100.0, 100, 30, Theme()))
    model_card(folder, base=None, merged=False)


def _make_cache(folder: Path) -> None:
    from roundpipe_cli.planning.adaptive import ProfileCache

    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    folder.mkdir()
    ProfileCache({"a": 1}).save(_costs())
    (folder / "rows.jsonl").write_text('{"text": "hello"}\n{"text": "there"}\n')
    _build_dataset(folder)


@functools.lru_cache(maxsize=1)
def _costs() -> Any:
    from roundpipe_cli.costs.cost import CostModel, LayerCost

    layer = LayerCost("block.0", 0.1, 0.2, True)
    return CostModel("tiny", tuple(dataclasses.replace(layer, name=f"block.{n}") for n in range(4)))


def _build_dataset(folder: Path) -> None:
    from roundpipe_cli.data.dataset import build_dataset
    from roundpipe_cli.data.settings import DatasetSpec, DataSettings

    build_dataset(DataSettings((DatasetSpec(str(folder / "rows.jsonl")),), 64), make_tokenizer(), num_workers=1)


def _read_cache(folder: Path) -> None:
    from roundpipe_cli.planning.adaptive import ProfileCache

    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    ProfileCache({"a": 1}).load(_costs())
    _build_dataset(folder)


_ROWS = {
    "a.jsonl.gz": b'{"text": "hello"}\n' * 50,
    "a.json.gz": b"[" + b",".join([b'{"text": "hello"}'] * 50) + b"]",
    "a.csv.gz": b"text,other\n" + b'hello,"a ""quoted"" one"\n' * 50,
    "a.txt.gz": b"a paragraph\nof two lines\n\n" * 50,
}


def _make_gz(folder: Path) -> None:
    folder.mkdir()
    for name, content in _ROWS.items():
        (folder / name).write_bytes(gzip.compress(content))


def _one_of(folder: Path, draw: random.Random, pattern: str) -> Path:
    """One file of rows; the others go."""
    paths = sorted(folder.glob(pattern))
    chosen = draw.choice(paths)
    for path in paths:
        if path != chosen:
            path.unlink()
    return chosen


def _damage_gz(folder: Path, draw: random.Random) -> None:
    """The compressed bytes, or the rows in them."""
    path = _one_of(folder, draw, "*.gz")
    if draw.random() < 0.4:
        path.write_bytes(_ROWS[path.name])
        damage_bytes(path, draw)
        path.write_bytes(gzip.compress(path.read_bytes()))
    else:
        damage_bytes(path, draw)


def _read_rows(folder: Path) -> None:
    from roundpipe_cli.data.settings import DatasetSpec
    from roundpipe_cli.data.sources import find_sources

    for path in sorted((*folder.glob("*.gz"), *folder.glob("*.parquet"))):
        for source in find_sources(DatasetSpec(str(path)), None, offline=True):
            for row in source.rows():
                assert row.number > 0


def _make_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet  # type: ignore[import-untyped]

    folder.mkdir()
    texts = [f"hello {n % 7}" for n in range(200)]
    messages = [[{"role": "user", "content": text}] for text in texts]
    table = pyarrow.table({"text": texts, "messages": messages, "n": list(range(200))})
    for compression in ("none", "snappy", "gzip", "zstd"):
        pyarrow.parquet.write_table(table, folder / f"{compression}.parquet", compression=compression)


def _damage_parquet(folder: Path, draw: random.Random) -> None:
    damage_bytes(_one_of(folder, draw, "*.parquet"), draw)


_CONFIGS = damages(*["config.json"] * 6, "tokenizer.json", "tokenizer_config.json", "generation_config.json")
READERS = {
    "gguf": Reader(_make_gguf, _damage_gguf, _read_gguf),
    "config": Reader(make_model, _CONFIGS, _read_configs),
    "adapter": Reader(_make_adapter, damages("adapter_model.safetensors", *["adapter_config.json"] * 4), _read_adapter),
    "events": Reader(_make_run, damages(*_RUN_FILES[:1], *_RUN_FILES[:3], *_RUN_FILES), _read_run),
    "cache": Reader(_make_cache, damages("cache/**/*"), _read_cache),
    "gz": Reader(_make_gz, _damage_gz, _read_rows),
    "parquet": Reader(_make_parquet, _damage_parquet, _read_rows),
}
TRIALS = {name: functools.partial(fuzz, name, reader) for name, reader in READERS.items()}
