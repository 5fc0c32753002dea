"""The base model that an adapter was trained on: noted in the adapter's file, compared before it is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.adapter_files import ADAPTER_WEIGHTS, check_adapter_folder
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import refusing
from roundpipe_cli.model.fingerprint import config_fingerprint


@dataclass(frozen=True)
class TrainedOn:
    """The base model that an adapter was trained on."""

    weights: str
    """Result of the base model's `Fingerprint`."""
    config: str
    """The base model's `config_fingerprint`."""

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
        header = file.metadata() or {}
    if header.get(BASE_WEIGHTS_KEY):
        return TrainedOn(header[BASE_WEIGHTS_KEY], header.get(BASE_CONFIG_KEY, ""))
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
    compared = [("weights", trained.weights, now.weights), ("config.json", trained.config, now.config)]
    name, old, new = next(one for one in compared if one[1] != one[2])
    if allowed:
        return f"{folder} was trained on a base model of other {name} than {source.name}"
    raise RefusedError(
        "the adapter was trained on another base model",
        where=where,
        found=f"{source.name}, {name} {new[:12]}",
        expected=f"{name} {old[:12]}, with which {folder} was trained",
        hint="name the base model that it was trained on, or add --allow-other-base",
    )
