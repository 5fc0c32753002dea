"""Which files of a hub model are fetched, and in which order: what is small and decides whether the model can be
trained comes first, then its index, then exactly the files of weights that the index names. No torch.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Tell
from roundpipe_cli.hub.download import Listing, cached_snapshots, fetch_files, remember_revision
from roundpipe_cli.model.untrusted import (
    INDEX_NAME,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    MAX_TOKENIZER_BYTES,
    SINGLE_NAME,
    adapter_refusal,
    check_model_folder,
    indexed_shards,
    missing_shard,
    no_weights_refusal,
)
from roundpipe_cli.units import format_bytes

CONFIG = "config.json"
BESIDE_WEIGHTS = (
    *("generation_config.json", "processor_config.json", "*preprocessor_config.json", "*quant*config.json"),
    *("*token*.json", "*token*.model", "vocab*.json", "vocab*.txt", "merges.txt", "*.model", "*.tiktoken", "*.spm"),
    *("*chat_template*.json", "*chat_template*.jinja", "additional_chat_templates/*.jinja", "tekken.json"),
    *("bpe.codes", "emoji.json", "*_vocab.json", "normalizer.json", "dict.txt"),
)
"""Configurations, tokenizers and chat templates, as transformers names them; at the top of a repository."""
NOT_TRANSFORMERS = ("consolidated*", "adapter_*", "*.index.json")
"""Weights in the layout of a model's maker, and adapters, beside those that transformers loads."""


def small_files(listing: Listing) -> list[str]:
    """Files fetched before the weights, config.json first and the index of the weights last.

    Raises:
        RefusedError: the repository holds no model, or one of them is too large.
    """
    where = _place(listing)
    if "adapter_config.json" in listing.files:
        raise adapter_refusal(where)
    if CONFIG not in listing.files:
        raise RefusedError(f"the model folder has no {CONFIG}", where=where)
    names = sorted(name for name in listing.files if _is_beside_weights(name))
    names = [CONFIG, *names, *([INDEX_NAME] if INDEX_NAME in listing.files else [])]
    for name in names:
        limit = {CONFIG: MAX_CONFIG_BYTES, INDEX_NAME: MAX_INDEX_BYTES}.get(name, MAX_TOKENIZER_BYTES)
        size = listing.files[name].num_bytes
        if size is not None and size > limit:
            expected = f"at most {format_bytes(limit)}"
            raise RefusedError(f"{name} is too large", where=where, found=format_bytes(size), expected=expected)
    return names


def _is_beside_weights(name: str) -> bool:
    if "/" in name and not name.startswith("additional_chat_templates/"):
        return False
    unwanted = name == CONFIG or any(fnmatch(name, pattern) for pattern in NOT_TRANSFORMERS)
    return not unwanted and any(fnmatch(name, pattern) for pattern in BESIDE_WEIGHTS)


def weight_files(listing: Listing, folder: Path) -> list[str]:
    """The files of weights, as a local folder would be read.

    Args:
        folder: with the index, if the repository has one.

    Raises:
        RefusedError: no weights in safetensors, or not all that the index names.
    """
    if SINGLE_NAME in listing.files:
        return [SINGLE_NAME]
    if INDEX_NAME in listing.files:
        shards = indexed_shards(folder)
        for shard in shards:
            if shard not in listing.files:
                raise missing_shard(shard, _place(listing))
        return shards
    found = sorted(name for name in listing.files if "/" not in name and name.endswith(".safetensors"))
    found = [name for name in found if not any(fnmatch(name, pattern) for pattern in NOT_TRANSFORMERS)]
    if not found:
        raise no_weights_refusal([name for name in listing.files if "/" not in name], _place(listing))
    return found


def fetch_configuration(listing: Listing, tell: Tell) -> Path:
    """Fetch and check everything but the weights; returns the folder.

    Raises:
        RefusedError, ResourceError: see `fetch_files` and `check_model_folder`.
    """
    names = small_files(listing)
    folder = fetch_files(listing, names[:1], tell)
    check_model_folder(folder, weights=False)  # a model that asks for code is refused before anything else is fetched
    fetch_files(listing, [name for name in names if name != INDEX_NAME], tell)
    if INDEX_NAME in names:
        fetch_files(listing, [INDEX_NAME], tell)
    check_model_folder(folder, weights=False)
    remember_revision(listing, CONFIG, tell)
    return folder


def fetch_weights(listing: Listing, folder: Path, tell: Tell) -> None:
    """Fetch and check the weights, if the disk has room for them.

    Raises:
        RefusedError, ResourceError: see `fetch_files` and `check_model_folder`.
    """
    fetch_files(listing, weight_files(listing, folder), tell)
    check_model_folder(folder)


def complete_snapshot(name: str, revision: str | None, *, weights: bool) -> Path | None:
    """The best folder of the hub's cache that has all of a model's files; None where none has.

    Raises:
        RefusedError: there is only one of them, and why it cannot be loaded.
    """
    error = None
    for folder in cached_snapshots(name, revision):
        try:
            check_model_folder(folder, weights=weights)
        except RefusedError as refused:
            error = error or refused
            continue
        return folder
    if error is not None:
        raise error
    return None


def _place(listing: Listing) -> str:
    return f"{listing.repository.name} at {listing.commit[:12]}"
