"""A model's files: where they are, which are fetched and in which order. No torch.

A model is a hub id, a local folder of safetensors, a `.gguf` file, or `package:NAME` (the one `.gguf` file in that
installed Python package). Nothing of the model is executed: no remote code, no pickle.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.events import Event, Notice, Tell
from roundpipe_cli.hub.ask import UnreachableError
from roundpipe_cli.hub.download import Listing, cached_snapshots, fetch_files, find_listing, remember_revision
from roundpipe_cli.model.files.untrusted import (
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
    read_config,
    unread_shards,
)
from roundpipe_cli.packages import missing_package
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.units import counted, format_bytes

# Which files of a hub model are fetched, and in which order: what is small and decides whether the model can be
# trained comes first, then its index, then exactly the files of weights that the index names. No torch.

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
    """The files of weights, as a local `folder` would be read; it has the index, if the repository does.

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
    """Fetch and check everything but the weights; returns the folder."""
    names = small_files(listing)
    folder = fetch_files(listing, names[:1], tell)
    check_model_folder(folder, weights=False)  # a model that asks for code is refused before anything else is fetched
    fetch_files(listing, [name for name in names if name != INDEX_NAME], tell)
    if INDEX_NAME in names:
        fetch_files(listing, [INDEX_NAME], tell)
    check_model_folder(folder, weights=False)
    remember_revision(listing)
    return folder


def _place(listing: Listing) -> str:
    return f"{listing.repository.name} at {listing.commit[:12]}"


HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")


@dataclass(frozen=True)
class ModelSource:
    """The place of a model's files."""

    name: str
    """As the recipe has it."""
    folder: Path
    gguf_file: str | None = None
    """Name of the GGUF file in `folder`, or None for safetensors."""
    commit: str | None = None
    """The hub's commit, for a hub model."""

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """config.json as plain data, read once; nobody changes it."""
        return read_config(self.folder)

    @property
    def load_arguments(self) -> dict[str, Any]:
        """Arguments for transformers' `from_pretrained`."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def _ignore(event: Event) -> None:
    return None


def resolve_model(
    name: str, *, revision: str | None, recipe_folder: Path, offline: bool, weights: bool = True, tell: Tell = _ignore
) -> ModelSource:
    """Find the model's files; a hub model is downloaded if it is not here.

    Args:
        weights: False: configuration and tokenizer are enough.
        tell: is told of downloads, of waiting for the hub, and where the cache stands in for it.

    Raises:
        RefusedError: nothing of that name, or nothing that can be loaded safely.
        ResourceError: no room on the disk.
    """
    if name.startswith("package:"):
        return _package_model(name)
    local = _local_path(name, recipe_folder)
    if local is not None and local.is_file():
        if local.suffix != ".gguf":
            expected = "a .gguf file or a folder"
            raise RefusedError("this file is no model", where="model", found=str(local), expected=expected)
        return ModelSource(name, local.parent, local.name)
    if local is not None:
        check_model_folder(local, weights=weights)
        _say_unread(name, local, tell)
        return ModelSource(name, local)
    if name.endswith(".gguf") or not HUB_ID.match(name):
        folders = dict.fromkeys((str(Path.cwd()), str(recipe_folder.absolute())))
        raise RefusedError(
            "no such model folder or file",
            where="model",
            found=name,
            expected=f"a folder or a .gguf file in {' or in '.join(folders)}",
            hint=_near_folder(name, recipe_folder) or "a hub id looks like Qwen/Qwen3-8B",
        )
    return _hub_model(name, revision, weights, tell, offline=offline, near=_near_folder(name, recipe_folder))


def is_hub_model(name: str, recipe_folder: Path) -> bool:
    """Whether a model's name can only be a hub id: it is no package, no file and no folder."""
    is_hub_id = not name.startswith("package:") and not name.endswith(".gguf") and HUB_ID.match(name)
    return bool(is_hub_id) and _local_path(name, recipe_folder) is None


def _local_path(name: str, recipe_folder: Path) -> Path | None:
    path = named_path(name)
    for candidate in (path, recipe_folder / path):
        if candidate.exists():
            return candidate.resolve()
    return None


def _package_model(name: str) -> ModelSource:
    package = name.removeprefix("package:")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise missing_package(package)
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise RefusedError(
            "the package does not hold exactly one .gguf file",
            where="model",
            found=f"{len(files)} in {folder}",
            expected="1",
        )
    return ModelSource(name, folder, files[0].name)


def _near_folder(name: str, recipe_folder: Path) -> str | None:
    """A hint for a misspelt local folder."""
    parent, word = named_path(name).parent, Path(name).name
    for start in dict.fromkeys((parent, recipe_folder / parent)):
        models = [path.name for path in start.iterdir() if (path / "config.json").exists()] if start.is_dir() else []
        nearest = closest(word, models)
        if nearest:
            return f"did you mean {parent / nearest}?"
    return None


def _hub_model(
    name: str, revision: str | None, weights: bool, tell: Tell, *, offline: bool, near: str | None
) -> ModelSource:
    """The model in the hub's cache, downloaded if it is not there; `near`: a hint for a misspelt local folder."""
    try:
        listing = find_listing(name, revision, offline=offline, tell=lambda text: tell(Notice(text)))
    except UnreachableError as error:
        return _cached_model(name, revision, weights, tell, why=str(error), near=near)
    except RefusedError as error:
        (problem,) = error.problems
        error.problems = (replace(problem, hint=near or problem.hint),)
        raise
    folder = fetch_configuration(listing, tell)
    if weights:
        fetch_files(listing, weight_files(listing, folder), tell)
        check_model_folder(folder)
        _say_unread(name, folder, tell)
    return ModelSource(name, folder, None, listing.commit)


def _cached_model(
    name: str, revision: str | None, weights: bool, tell: Tell, *, why: str, near: str | None
) -> ModelSource:
    """The model in the cache, for when the hub cannot be asked: the best folder with all of its files."""
    wrong = list[RefusedError]()
    for folder in cached_snapshots(name, revision):
        try:
            check_model_folder(folder, weights=weights)
            break
        except RefusedError as refused:
            wrong.append(refused)
    else:
        if wrong:
            raise wrong[0]
        raise RefusedError(
            "the model is neither a local folder nor to be had from the hub",
            where="model",
            found=f"{name} ({why})",
            expected="a local folder, a .gguf file, package:NAME, or a hub id that can be reached or is in the cache",
            hint=near or "check the name and the network; a gated model needs `hf auth login`",
        )
    if why != "offline":
        text = f"the hub cannot be reached ({why}): {name} is taken from the cache, commit {folder.name[:12]}"
        _say_once((name, revision), text, tell)
    if weights:
        _say_unread(name, folder, tell)
    return ModelSource(name, folder, None, folder.name)


def _say_unread(name: str, folder: Path, tell: Tell) -> None:
    """Report files of weights that transformers would not read either."""
    unread = unread_shards(folder)
    if unread:
        text = f"{name} has {SINGLE_NAME} and an index of {counted(len(unread), 'other file')} of weights"
        _say_once((str(folder), None), f"{text}: {SINGLE_NAME} is read, as transformers does", tell)


def _say_once(key: tuple[str, str | None], text: str, tell: Tell) -> None:
    if key not in _told and tell is not _ignore:
        _told.add(key)
        tell(Notice(text))


_told: set[tuple[str, str | None]] = set()
"""Notices about models that were given already: a run looks at its model more than once."""
