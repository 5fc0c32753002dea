"""Identity of a base model by content: a run must not continue with another base model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import sha256_of
from roundpipe_cli.model.adapter_files import ADAPTER_WEIGHTS, check_adapter_folder
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import find_shards, refusing

NUM_THREADS = 8


class Fingerprint:
    """The hub's commit, or a SHA-256 over the SHA-256 of each file of the weights, made beside the loading.

    Hashing leaves Python's lock (1-2 GB/s a core), and the pages are read for loading anyway. The threads are daemons:
    a run that is stopped does not wait for them.
    """

    def __init__(self, source: ModelSource) -> None:
        self._commit = source.commit
        self._files: list[Path] = []
        if self._commit is None:
            self._files = [source.folder / source.gguf_file] if source.gguf_file else find_shards(source.folder)
        self._digests: dict[Path, str | OSError] = {}
        shares = [self._files[first::NUM_THREADS] for first in range(min(NUM_THREADS, len(self._files)))]
        self._threads = [
            threading.Thread(target=self._work, args=(share,), name="fingerprint", daemon=True) for share in shares
        ]
        for thread in self._threads:
            thread.start()

    def result(self) -> str:
        """Waits for the end of it; raises a RefusedError for a file that cannot be read."""
        if self._commit is not None:
            return self._commit
        for thread in self._threads:
            thread.join()
        lines = []
        for path in self._files:
            digest = self._digests[path]
            if isinstance(digest, OSError):
                raise RefusedError("a file of the weights cannot be read", where=str(path), found=digest.strerror)
            lines.append(f"{digest}  {path.name}\n")
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _work(self, files: list[Path]) -> None:
        for path in files:
            try:
                self._digests[path] = sha256_of(path)
            except OSError as error:
                self._digests[path] = error


@dataclass(frozen=True)
class TrainedOn:
    """The base model that an adapter was trained on."""

    weights: str
    """The result of its `Fingerprint`."""
    config: str
    """Its `config_fingerprint`."""

    def metadata(self) -> dict[str, str]:
        """Entries for the header of the adapter's file, which goes wherever the adapter goes."""
        return {BASE_WEIGHTS_KEY: self.weights, BASE_CONFIG_KEY: self.config}


BASE_WEIGHTS_KEY, BASE_CONFIG_KEY = "base_model_hash", "base_config_hash"
COMMIT = re.compile(r"[0-9a-f]{40}")


def trained_on(folder: Path) -> TrainedOn | None:
    """The base model of the adapter in `folder`: as its file says, else the commit in its configuration.

    Raises:
        RefusedError: the file cannot be read.
    """
    from safetensors import safe_open

    path = str(folder / ADAPTER_WEIGHTS)
    config = check_adapter_folder(folder)
    with refusing("the adapter cannot be read", path), safe_open(path, framework="numpy") as file:
        found = file.metadata() or {}
    if found.get(BASE_WEIGHTS_KEY):
        return TrainedOn(found[BASE_WEIGHTS_KEY], found.get(BASE_CONFIG_KEY, ""))
    revision = config.get("revision")
    return TrainedOn(revision, "") if isinstance(revision, str) and COMMIT.fullmatch(revision) else None


def check_trained_on(
    folder: Path, source: ModelSource, *, allowed: bool, weights: Callable[[], str], where: str
) -> str | None:
    """A notice where an adapter was trained on another base model than `source`, or they could not be compared.

    Args:
        allowed: the user says that another one is meant (`--allow-other-base`).
        weights: gives the result of the `Fingerprint` of `source`; asked only where there is one to compare with.
        where: what named the base model.

    Raises:
        RefusedError: they differ and may not.
    """
    trained = trained_on(folder)
    if trained is None:
        return f"{folder} has no fingerprint of the base model that it was trained on: {source.name} was not compared"
    if bool(COMMIT.fullmatch(trained.weights)) != (source.commit is not None):
        kinds = ("local files", "a commit of the hub")
        then, today = kinds if source.commit is not None else kinds[::-1]
        return f"{folder} was trained on {then}, and {source.name} is {today}: they were not compared"
    now = TrainedOn(weights(), config_fingerprint(source))
    if now.weights == trained.weights and now.config in (trained.config, ""):
        return None
    parts = [("weights", trained.weights, now.weights), ("config.json", trained.config, now.config)]
    name, old, new = next(part for part in parts if part[1] != part[2])
    if allowed:
        return f"{folder} was trained on a base model of other {name} than {source.name}"
    raise RefusedError(
        "the adapter was trained on another base model",
        where=where,
        found=f"{source.name}, {name} {new[:12]}",
        expected=f"{name} {old[:12]}, with which {folder} was trained",
        hint="name the base model that it was trained on, or add --allow-other-base",
    )


def config_fingerprint(source: ModelSource) -> str:
    """SHA-256 over config.json, which says what the weights compute; empty where `Fingerprint` covers it.

    Raises:
        RefusedError: it cannot be read.
    """
    if source.commit is not None or source.gguf_file is not None:
        return ""
    values = {key: value for key, value in source.config.items() if key != "transformers_version"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
