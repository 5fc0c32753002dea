"""A key for the tokens of a source: it changes with every value that the tokens depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe_cli import __version__
from roundpipe_cli.data.settings import DataSettings
from roundpipe_cli.data.sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")


def shard_key(
    source: Source, settings: DataSettings, tokenizer_digest: str, templates: Sequence[str | None]
) -> str | None:
    """Name of the source's shard in the cache; None where its content cannot be told from its name.

    Args:
        templates: for rows without tools, and with them.

    Raises:
        RefusedError: a hub dataset cannot be loaded.
    """
    content = source.fingerprint()
    if content is None:
        return None
    spec = source.spec
    parts: Mapping[str, Any] = {
        "tool": __version__,
        "code": reader_digest(),
        "libraries": {name: version(name) for name in LIBRARIES},
        "content": content,
        "name": source.name,
        "spec": {name: value for name, value in asdict(spec).items() if name != "path"},
        "tokenizer": tokenizer_digest,
        "templates": templates,
        "max_seq_length": settings.max_seq_length,
        "long_rows": [settings.long_rows, settings.long_rows_overlap],
        "train_on_inputs": settings.train_on_inputs,
        "on_bad_row": settings.on_bad_row,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over everything that decides the tokens of a text."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
    if backend is not None:
        content = backend.to_str()
    else:
        names = sorted(tokenizer.get_vocab().items())
        content = json.dumps([type(tokenizer).__name__, names, getattr(tokenizer, "init_kwargs", {})], default=str)
    special = json.dumps(sorted(tokenizer.special_tokens_map.items()), default=str)
    added = json.dumps(sorted(str(item) for item in tokenizer.added_tokens_decoder.items()))
    return hashlib.sha256(f"{type(tokenizer).__name__}\n{content}\n{special}\n{added}".encode()).hexdigest()


def reader_digest() -> str:
    """SHA-256 over this folder's code, so that tokens of an older version are not used."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
