"""What a GGUF file is converted to is kept: the same ids, and nothing half-written, damaged or foreign is ever used."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import pytest

from roundpipe_cli.cache import CACHE_VARIABLE, cache_folder, sealed, unsealed
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model import load
from roundpipe_cli.model.files.source import ModelSource
from tests.support.e2e import REPOSITORY, make_tokenizer, smollm2_source

TEXTS = ["", " a  b\n\n c", "Grüße, 世界 🚀", "<|im_start|>user\nx<|im_end|>\n", "1234567890 " * 50, "\x00\x07 \u200b"]


class Converter:
    """Loads a tokenizer that a pretended GGUF file stands for, and counts how often it had to convert."""

    def __init__(self) -> None:
        self.num_converted = 0

    def load(self, source: ModelSource) -> Any:
        if source.gguf_file is None:
            return load.load_tokenizer(source)
        self.num_converted += 1
        return make_tokenizer()

    def once(self, source: ModelSource, kind: str = "tokenizer") -> Any:
        return load.convert_once(source, kind, self.load, load.tokenizer_values)


@pytest.fixture(autouse=True)
def nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is converted is not what the tests of a session share."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own-cache"))


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    return ModelSource("a.gguf", tmp_path, "a.gguf")


def kept() -> list[Path]:
    folder = cache_folder(load.FOLDER)
    return sorted(folder.iterdir()) if folder.exists() else []


def test_it_is_converted_once_and_gives_the_same(source: ModelSource) -> None:
    converter = Converter()
    first, second = converter.once(source), converter.once(source)
    assert converter.num_converted == 1
    assert load.tokenizer_values(first) == load.tokenizer_values(second)
    assert first(TEXTS)["input_ids"] == second(TEXTS)["input_ids"]
    assert len(kept()) == 1 and kept()[0].stat().st_mode & 0o077 == 0


def test_another_file_is_another_key(source: ModelSource) -> None:
    converter = Converter()
    path = source.folder / "a.gguf"
    converter.once(source)
    path.write_bytes(b"GGUF" + bytes(99) + b"x")
    os.utime(path, ns=(0, 10**18))
    converter.once(source)
    os.utime(path, ns=(0, 10**18 + 1))  # a change behind what is hashed
    converter.once(source)
    converter.once(source, "config")
    assert converter.num_converted == len(kept()) == 4


def seal(path: Path, name: str, text: str) -> None:
    path.write_bytes(sealed({**unsealed(path, 10**9), name: text}))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": lambda path: path.write_bytes((data := path.read_bytes())[:99] + bytes([data[99] ^ 1]) + data[100:]),
    "cut": lambda path: os.truncate(path, 1000),
    "more": lambda path: path.write_bytes(path.read_bytes() + b"{}"),
    "code": lambda path: seal(path, "tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.Evil", null]}}'),
    "a way out": lambda path: seal(path, "../outside.json", "{}"),
    "no texts": lambda path: path.write_bytes(sealed({"tokenizer.json": {}})),
    "no files": lambda path: path.write_bytes(sealed([])),
    "rubbish": lambda path: path.write_text("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_or_foreign_is_converted_anew(source: ModelSource, damage: str) -> None:
    converter = Converter()
    first = converter.once(source)
    DAMAGES[damage](kept()[0])
    assert load.tokenizer_values(converter.once(source)) == load.tokenizer_values(first)
    assert converter.num_converted == 2
    converter.once(source)
    assert converter.num_converted == 2, "the successor was not kept"


def test_a_failure_while_writing_keeps_nothing(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    converter = Converter()
    with monkeypatch.context() as patch:
        full = Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr("roundpipe_cli.cache.write_atomically", full)
        converter.once(source)
    assert kept() == []
    converter.once(source)
    assert converter.num_converted == 2


def test_no_room_for_the_files_between(source: ModelSource) -> None:
    """tokenizers raises a plain Exception then, which ended the command as a bug of ours."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # the tokenizer has 5 KB
    try:
        assert Converter().once(source)("a")["input_ids"] and kept() == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_old_files_go_unfinished_ones_too(source: ModelSource) -> None:
    cache_folder(load.FOLDER).mkdir(parents=True)
    for name in ("a.json", ".tmp-a.json-00"):
        (cache_folder(load.FOLDER) / name).write_text("{}")
        os.utime(cache_folder(load.FOLDER) / name, (0, 0))
    Converter().once(source)
    assert len(kept()) == 1 and kept()[0].stat().st_mtime > 0


def test_what_reads_back_otherwise_is_not_kept(source: ModelSource) -> None:
    converter = Converter()
    for _ in range(2):
        load.convert_once(source, "tokenizer", converter.load, lambda tokenizer: id(tokenizer))
    assert converter.num_converted == 2 and kept() == []


def test_without_a_cache_that_can_be_written(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.folder / "a.gguf"))
    converter = Converter()
    for _ in range(2):
        assert converter.once(source)("a")["input_ids"]
    assert converter.num_converted == 2


def test_several_at_once(source: ModelSource) -> None:
    converter = Converter()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: converter.once(source), range(8)))
    assert len({json.dumps(tokenizer(TEXTS)["input_ids"]) for tokenizer in found}) == 1
    assert [path.name.startswith(".tmp") for path in kept()] == [False]


def test_a_file_that_is_no_gguf_is_refused_each_time(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"nothing of the kind")
    for read in (load.load_config, load.load_tokenizer):
        with pytest.raises(RefusedError, match=r"cannot be (read|loaded)"):
            read(ModelSource("a.gguf", tmp_path, "a.gguf"))
    assert kept() == []


def test_a_real_file(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted here or, as it takes seconds, by another test of this session; then its GGUF file is not opened."""
    monkeypatch.setenv(CACHE_VARIABLE, str(own_cache))
    source = smollm2_source()  # skips where it is not installed
    config, tokenizer = load.load_config(source), load.load_tokenizer(source)
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda *_: pytest.fail("the GGUF file was opened again"))
    again, kept_tokenizer = load.load_config(source), load.load_tokenizer(source)
    assert again.to_dict() == config.to_dict()
    assert load.tokenizer_values(kept_tokenizer) == load.tokenizer_values(tokenizer)
    texts = TEXTS + (REPOSITORY / "recipes" / "quickstart.jsonl").read_text(encoding="utf-8").splitlines()
    assert tokenizer(texts)["input_ids"] == kept_tokenizer(texts)["input_ids"]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages) == kept_tokenizer.apply_chat_template(messages)
    # transformers 5.17 takes the first special token of a GGUF for both ends: rows of text ended with a beginning
    assert config.eos_token_id == tokenizer.eos_token_id == 2
    tokenizer.eos_token = "<|im_start|>"
    load.end_as_the_model_does(tokenizer, config)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
