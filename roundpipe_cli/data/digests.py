"""SHA-256 of files of rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

from roundpipe_cli.data.files import check_list_size, known_suffix, read_file

BLOCK_BYTES = 1024**2
LARGE_BYTES = 1 << 30
"""The first row of larger files is looked at before all of them is."""


def digest_file(path: Path, txt_rows: str = "paragraph") -> str:
    """SHA-256 of a file's bytes. A large file that its size or its first row makes useless is refused at once.

    Args:
        txt_rows: as of `read_file`.

    Raises:
        OSError: it cannot be read.
        RefusedError: as of `read_file`.
    """
    if path.stat().st_size > LARGE_BYTES:
        if known_suffix(path) == ".json":
            check_list_size(path)
        else:
            next(read_file(path, txt_rows=txt_rows), None)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
