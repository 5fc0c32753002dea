"""Finds a model's figures: in a local folder, a GGUF file, the shipped figures, or config.json of the hub.

Weights are never read or downloaded, and neither torch nor transformers is imported.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundpipe_cli.choices import CARRIERS, missing_package
from roundpipe_cli.costs.gguf_header import read_gguf_config
from roundpipe_cli.costs.models import Architecture, parse_config
from roundpipe_cli.costs.shipped_models import figures_of, shipped_figures
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.files import read_regular
from roundpipe_cli.hub.ask import (
    TIMEOUT,
    Repository,
    UnreachableError,
    ask_hub,
    is_offline,
    library_messages,
    notice,
)
from roundpipe_cli.watchdog import at_work

_MAX_CONFIG_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A model's configuration as plain data."""

    config: dict[str, Any]
    name: str
    """The model's name, as the recipe has it."""
    source: str
    """Source of the figures, as a text for the user."""
    folder: Path | None = None
    """With config.json; None for a GGUF file and for figures that ship with the tool."""
    is_local: bool = False
    """Whether the user named the folder; otherwise it is one of the hub's cache."""
    is_config: bool = True
    """A config.json's content, or what of it ships with the tool; not made of a GGUF file's header."""

    def architecture(self) -> Architecture:
        """The architecture that it describes.

        Raises:
            RefusedError: a needed figure is missing or impossible.
        """
        with at_work("reading the model's figures"):
            return parse_config(self.config, name=self.name, source=self.source)


def find_architecture(model: str, local: Path | None = None, revision: str | None = None) -> Architecture:
    """The architecture of a recipe's `model`; arguments and errors as of `find_config`."""
    return find_config(model, local, revision).architecture()


def find_config(model: str, local: Path | None = None, revision: str | None = None) -> FoundConfig:
    """The configuration of a recipe's `model`; `local` is the existing file or folder that it names, if it does.

    Raises:
        RefusedError: no such model, its figures cannot be read, or the hub cannot be reached.
    """
    if model.startswith("package:"):
        return _packaged(model)
    if local is not None:
        return _local(model, local)
    if model.endswith(".gguf") or model.startswith(("/", "./", "../", "~")):
        raise RefusedError("there is no such model file or folder", where="model", found=model)
    shipped = _shipped(model) if revision is None else None
    return shipped or _from_hub(model, revision)


def _shipped(hub_id: str) -> FoundConfig | None:
    found = figures_of(hub_id)
    return None if found is None else FoundConfig(found[0], hub_id, found[1])


def _packaged(model: str) -> FoundConfig:
    name = model.removeprefix("package:")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise RefusedError("not the name of a Python package", where="model", found=model, expected="package:NAME")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        shipped = _shipped(CARRIERS[name]) if name in CARRIERS else None
        if shipped is not None:
            return shipped
        raise missing_package(name)
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
    if len(found) != 1:
        raise RefusedError(
            f"the package {name} should carry one .gguf file",
            where="model",
            found=", ".join(file.name for file in found) or "none",
        )
    return _local(model, found[0])


def _local(model: str, path: Path) -> FoundConfig:
    with at_work("reading the model's configuration"):
        return _read_local(model, path)


def _read_local(model: str, path: Path) -> FoundConfig:
    if path.is_file():
        if path.suffix != ".gguf":
            raise RefusedError(
                "a model file is a .gguf file", where="model", found=str(path), hint="name the model's folder instead"
            )
        return FoundConfig(read_gguf_config(path), model, f"the header of {path.name}", is_config=False)
    config = path / "config.json"
    if not config.is_file():
        files = sorted(entry.name for entry in path.glob("*"))[:5]
        raise RefusedError(
            "the model folder has no config.json",
            where="model",
            found=f"{path}: {', '.join(files) or 'an empty folder'}",
            expected="a Hugging Face model folder",
        )
    return FoundConfig(_read_config(config), model, str(config), path, is_local=True)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_regular(path, _MAX_CONFIG_BYTES))
    except OSError as error:
        raise RefusedError(f"config.json cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise RefusedError("config.json is not a JSON object", where=str(path), expected="a model's configuration")
    return config


def _from_hub(model: str, revision: str | None) -> FoundConfig:
    """config.json of a hub model, from the local cache or the hub; nothing else is downloaded."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        raise RefusedError("neither a file, a folder nor a hub id", where="model", found=model)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError as error:
        raise RefusedError("not a hub id", where="model", found=model, expected=str(error)) from None
    if isinstance(cached, str):
        where = "config.json in the hub's local cache"
        return FoundConfig(_read_config(Path(cached)), model, where, Path(cached).parent)
    if is_offline():
        raise _unreachable(model, "HF_HUB_OFFLINE is set")
    timeout: Any = TIMEOUT

    def question() -> str:
        return hf_hub_download(model, "config.json", revision=revision, etag_timeout=timeout)

    try:
        with library_messages(notice):
            path = ask_hub(Repository(model), question, notice)
    except UnreachableError as error:
        raise _unreachable(model, f"the hub cannot be reached ({error})") from None
    except RefusedError as error:
        near = closest(model, list(shipped_figures()))
        if near is None:
            raise
        (problem,) = error.problems
        raise RefusedError(
            problem.what,
            where=problem.where,
            found=problem.found,
            expected=problem.expected,
            hint=f"did you mean {near}? {problem.hint or ''}".strip(),
        ) from None
    return FoundConfig(_read_config(Path(path)), model, "config.json of the hub", Path(path).parent)


def _unreachable(model: str, why: str) -> RefusedError:
    near = closest(model, list(shipped_figures()))
    return RefusedError(
        f"the figures of {model} cannot be fetched: {why}",
        where="model",
        found=model,
        expected="a local folder with config.json, or one of " + ", ".join(list(shipped_figures())[:6]) + ", ...",
        hint=(f"did you mean {near}? " if near else "")
        + "the models named here need no network: their figures come with roundpipe",
    )
