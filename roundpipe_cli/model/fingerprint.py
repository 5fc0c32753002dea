"""Identity of a base model by content: a run must not continue with another base model."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.source import ModelSource
from roundpipe_cli.model.untrusted import find_shards

NUM_THREADS = 8
CHUNK_BYTES = 8 * 1024**2


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
        self._rest = iter(self._files)
        self._lock = threading.Lock()
        count = min(NUM_THREADS, len(self._files))
        self._threads = [threading.Thread(target=self._work, name="fingerprint", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def result(self) -> str:
        """Waits for the end of it.

        Raises:
            RefusedError: a file that cannot be read.
        """
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

    def _work(self) -> None:
        while True:
            with self._lock:
                path = next(self._rest, None)
            if path is None:
                return
            try:
                self._digests[path] = _sha256(path)
            except OSError as error:
                self._digests[path] = error


def config_fingerprint(source: ModelSource) -> str:
    """SHA-256 over config.json, which says what the weights compute; empty where `Fingerprint` covers it.

    Raises:
        RefusedError: it cannot be read.
    """
    if source.commit is not None or source.gguf_file is not None:
        return ""
    values = {key: value for key, value in source.config.items() if key != "transformers_version"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            digest.update(buffer[:num_read])
    return digest.hexdigest()
