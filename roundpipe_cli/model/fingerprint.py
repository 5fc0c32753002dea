"""Identity of a base model by content: a run must not continue with another base model."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import sha256_of
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import find_shards

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


def config_fingerprint(source: ModelSource) -> str:
    """SHA-256 over config.json, which says what the weights compute; empty where `Fingerprint` covers it.

    Raises:
        RefusedError: it cannot be read.
    """
    if source.commit is not None or source.gguf_file is not None:
        return ""
    values = {key: value for key, value in source.config.items() if key != "transformers_version"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
