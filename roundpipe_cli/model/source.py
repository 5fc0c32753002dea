"""The place of a model's files. Nothing here needs torch, so a wrong name is told at once.

A model is a hub id, a local folder of safetensors, a `.gguf` file, or `package:NAME` (the one `.gguf` file in that
installed Python package). Nothing of the model is executed: no remote code, no pickle.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.model.untrusted import check_model_folder
from roundpipe_cli.model_packages import missing_package
from roundpipe_cli.plain_files import named_path

HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")
HUB_TIMEOUT_S = 4.0


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

    @property
    def load_arguments(self) -> dict[str, Any]:
        """Arguments for transformers' `from_pretrained`."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def resolve_model(
    name: str, *, revision: str | None, recipe_folder: Path, offline: bool, weights: bool = True
) -> ModelSource:
    """Find the model's files; a hub model is downloaded if need be.

    Args:
        weights: False: configuration and tokenizer are enough.

    Raises:
        RefusedError: nothing of that name, or nothing that can be loaded safely.
    """
    if name.startswith("package:"):
        return _package_model(name)
    local = _local_path(name, recipe_folder)
    if local is not None and local.is_file():
        if local.suffix != ".gguf":
            raise RefusedError(
                "this file is no model", where="model", found=str(local), expected="a .gguf file or a folder"
            )
        return ModelSource(name, local.parent, local.name)
    if local is not None:
        check_model_folder(local, weights=weights)
        return ModelSource(name, local)
    looks_like_path = name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1
    if looks_like_path or not HUB_ID.match(name):
        raise RefusedError(
            "no such model folder or file",
            where="model",
            found=name,
            expected=f"it in {' or in '.join(dict.fromkeys((str(Path.cwd()), str(recipe_folder.absolute()))))}",
            hint=_near_folder(name, recipe_folder) or "a hub id looks like Qwen/Qwen3-8B",
        )
    source = _hub_model(name, revision, recipe_folder, offline, weights=weights)
    assert source is not None
    return source


def check_model_name(name: str, *, revision: str | None, recipe_folder: Path, offline: bool) -> ModelSource | None:
    """Like `resolve_model`, but downloads nothing: is there a model of that name? None: on the hub.

    Raises:
        RefusedError: as there.
    """
    is_hub_id = not name.startswith("package:") and not name.endswith(".gguf") and HUB_ID.match(name)
    if is_hub_id and _local_path(name, recipe_folder) is None:
        return _hub_model(name, revision, recipe_folder, offline, download=False)
    return resolve_model(name, revision=revision, recipe_folder=recipe_folder, offline=offline)


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


def _hub_commit(name: str, revision: str | None, offline: bool) -> tuple[str | None, str]:
    """The hub's commit for this name, or None and why there is none."""
    from huggingface_hub import HfApi, constants

    if offline or constants.HF_HUB_OFFLINE:
        return None, "offline"
    try:
        return HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S).sha, ""
    except Exception as error:  # the hub's client raises many kinds; each means: not from the hub, now
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _hub_model(
    name: str, revision: str | None, recipe_folder: Path, offline: bool, *, download: bool = True, weights: bool = True
) -> ModelSource | None:
    """The model in the hub's cache, brought there if need be; None where it would have to be and `download` is off."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "tokenizer.model", "*.txt", *(["*.safetensors"] if weights else [])]
    commit, problem = _hub_commit(name, revision, offline)
    if commit is not None and not download:
        return None
    try:
        folder = snapshot_download(
            name, revision=commit or revision, allow_patterns=patterns, local_files_only=commit is None
        )
    except Exception as error:
        raise RefusedError(
            "the model is neither a local folder nor to be had from the hub",
            where="model",
            found=f"{name} ({problem})",
            expected="a local folder, a .gguf file, package:NAME, or a hub id that can be reached or is in the cache",
            hint=_near_folder(name, recipe_folder)
            or "check the name and the network; a gated model needs `hf auth login`",
        ) from error
    path = Path(folder)
    check_model_folder(path, weights=weights)
    return ModelSource(name, path, None, commit or path.name)
