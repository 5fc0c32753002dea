"""A GGUF file's configuration and tokenizer in Hugging Face's form, kept in the cache: converting takes seconds each.

    <cache>/converted/<key>/   config.json, or tokenizer.json, tokenizer_config.json, chat_template.jinja
      digests.json             written last: SHA-256 of each of them

Files that are read back are checked like any model's. They are kept only if they read back unchanged; files that cannot
be used are made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from roundpipe_cli import __version__
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import cache_folder, new_folder, prune_cache, sync
from roundpipe_cli.model.source import ModelSource
from roundpipe_cli.model.untrusted import MAX_TOKENIZER_BYTES, check_file, check_small_files

FOLDER = "converted"
DIGESTS_NAME = "digests.json"
HEAD_BYTES = 64 * 1024**2
"""So much of the file is hashed for its key: the metadata, which come first, of any model known."""
LIBRARIES = ("transformers", "tokenizers", "gguf")

Load = Callable[[ModelSource], Any]
Describe = Callable[[Any], Any]


def convert_once(source: ModelSource, kind: str, load: Load, describe: Describe) -> Any:
    """The result of `load` for a GGUF file, taken from the cache where an earlier run has left it.

    Args:
        kind: name of this kind of result.
        load: takes the GGUF file, and the folder that `save_pretrained` wrote.
        describe: all that matters of a loaded one, to be compared.

    Raises:
        RefusedError: the GGUF file cannot be loaded.
    """
    try:
        folder = cache_folder(FOLDER) / _key(source, kind)
    except OSError:  # unreadable: `load` reports it
        return load(source)
    found = _load_kept(folder, source.name, load)
    if found is None:
        found = load(source)
        _keep(folder, found, source.name, load, describe)
    return found


def _key(source: ModelSource, kind: str) -> str:
    assert source.gguf_file is not None
    path = source.folder / source.gguf_file
    status = path.stat()
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
    parts = [kind, head, status.st_size, status.st_mtime_ns, __version__, *map(_version, LIBRARIES)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"


def _load_kept(folder: Path, name: str, load: Load) -> Any | None:
    if not folder.exists():
        return None
    try:
        for path in folder.iterdir():
            check_file(path, MAX_TOKENIZER_BYTES)
        check_small_files(folder)
        if json.loads((folder / DIGESTS_NAME).read_bytes()) != _digests(folder):
            raise ValueError(f"{folder} is not as it was written")
        found = load(ModelSource(name, folder))
    except (OSError, ValueError, RecursionError, RefusedError):
        shutil.rmtree(folder, ignore_errors=True)  # it would block its successor
        return None
    with suppress(OSError):
        os.utime(folder)  # mark it as used
    return found


def _keep(folder: Path, loaded: Any, name: str, load: Load, describe: Describe) -> None:
    """Save the result in the cache, if it can be written and reads back unchanged."""
    temporary = new_folder(FOLDER)
    if temporary is None:
        return
    try:
        loaded.save_pretrained(str(temporary))
        check_small_files(temporary)
        if describe(load(ModelSource(name, temporary))) != describe(loaded):
            return
        (temporary / DIGESTS_NAME).write_text(json.dumps(_digests(temporary)), encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        temporary.rename(folder)  # fails if another run was faster
        sync(folder.parent)
        prune_cache(folder.parent, DIGESTS_NAME)
    except (OSError, ValueError, NotImplementedError, RefusedError):  # a full disk; a kind that is not saved
        pass
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that matters, by name."""
    names = sorted(path.name for path in folder.iterdir() if path.name != DIGESTS_NAME)
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
