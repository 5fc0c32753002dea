"""A file of a download: written as it comes, hashed on the way."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from roundpipe_cli.hub.listing import RemoteFile

CHUNK_BYTES = 8 * 1024**2
SHA256, SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


class StoppedFetchError(Exception):
    """Another file failed, so this one is not fetched."""


@dataclass
class Sink:
    """A file that is written as it comes, with its hash; what huggingface_hub's `http_get` needs of a file."""

    file: BinaryIO
    wrote: Callable[[int], None]
    stop: threading.Event
    digest: Any = field(default_factory=hashlib.sha256)

    def take_in(self) -> int:
        """The bytes that are there already into the hash; how many they are."""
        self.file.seek(0)
        while chunk := self.file.read(CHUNK_BYTES):
            self.digest.update(chunk)
        return self.file.tell()

    def write(self, chunk: bytes) -> int:
        if self.stop.is_set():
            raise StoppedFetchError
        self.file.write(chunk)
        self.digest.update(chunk)
        self.wrote(len(chunk))
        return len(chunk)

    def tell(self) -> int:
        return self.file.tell()

    def seek(self, place: int) -> int:
        return self.file.seek(place)

    def truncate(self) -> int:
        """Begin again: a server that cannot continue files sends the whole file."""
        self.wrote(-os.fstat(self.file.fileno()).st_size)
        self.digest = hashlib.sha256()
        return self.file.truncate(0)


def hashes(file: RemoteFile | None, etag: str, sink: Sink) -> tuple[str, list[str]]:
    """The hash that the hub says, and those that would be right for what came.

    Args:
        file: as listed.
        etag: of the file, as the hub answers.
    """
    sha256 = (file.sha256 if file is not None else None) or (etag if SHA256.fullmatch(etag) else None)
    if sha256 is not None:
        return sha256, [sink.digest.hexdigest()]
    if file is None or file.blob_id != etag or not SHA1.fullmatch(etag):
        return etag, [etag]  # not a hash of the content: a mirror's own
    content, num_bytes = hashlib.sha1(), sink.tell()
    git = hashlib.sha1(f"blob {num_bytes}\0".encode())
    sink.file.seek(0)
    while chunk := sink.file.read(CHUNK_BYTES):
        git.update(chunk)
        content.update(chunk)
    return etag, [git.hexdigest(), content.hexdigest()]
