"""From the name of a recipe to a checked `Recipe`: find the file, read it strictly, apply overrides, check everything.

Loads no torch. Every mistake of the file and of the overrides is reported at once, in one RecipeError (exit code 2).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from roundpipe_cli.errors import ContradictionError, RecipeError, RefusedError
from roundpipe_cli.files import named_path
from roundpipe_cli.recipe.aliases import ALIASES
from roundpipe_cli.recipe.check import Findings, check, hints_of, remove_unknown_keys, section_of
from roundpipe_cli.recipe.references import escape, refuse_bad_references, resolve_references
from roundpipe_cli.recipe.schema import Recipe, plain_data, with_lists
from roundpipe_cli.recipe.sections import LoraConfig
from roundpipe_cli.recipe.shipped import find_recipe
from roundpipe_cli.recipe.strict_yaml import MAX_BYTES, Place, parse_bytes, parse_scalar
from roundpipe_cli.recipe.together import find_contradictions
from roundpipe_cli.recipe.translate import apply_overrides, translate_file


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed every check."""

    recipe: Recipe
    path: Path
    """The file it was read from."""
    folder: Path
    """Its folder: relative paths are tried from the working directory, then from here."""
    notices: tuple[str, ...]
    """One line each, for stderr: aliases, a shipped recipe in place of a missing file."""


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read, translate, override, resolve and check a recipe.

    `overrides` are `key=value` texts.

    Raises:
        RefusedError: there is no such file, or it cannot be read.
        RecipeError: one or more mistakes in the file or the overrides.
    """
    file, notice = find_recipe(path)
    return _load(_read(file), file, [notice] if notice else [], overrides)


def load_text(text: str, name: str) -> LoadedRecipe:
    """The same for a recipe that is not in a file yet; `name` is the file's name to be.

    Raises:
        RecipeError: one or more mistakes.
    """
    return _load(text.encode(), Path(name), [], ())


def _load(raw: bytes, file: Path, notices: list[str], overrides: Sequence[str]) -> LoadedRecipe:
    name = str(file)
    document = parse_bytes(raw, name)
    findings = Findings({**document.places, (): Place(name, 0)})
    for line, problem in document.problems:
        findings.add_problem(problem, line)
    data: dict[str, Any] = document.data
    translate_file(data, findings, notices)
    data = refuse_bad_references(data, (), findings)
    data = apply_overrides(data, overrides, findings, notices)
    remove_unknown_keys(data, Recipe, findings, also_known=list(ALIASES))
    _fill_defaults(data, file.stem)
    data = resolve_references(data, findings)
    recipe = check(data, Recipe, (), findings)
    kind = RecipeError if findings.problems else ContradictionError
    if isinstance(recipe, Recipe):
        find_contradictions(recipe, findings)
    if findings.problems:
        raise kind(findings.problems)
    assert isinstance(recipe, Recipe)
    notices += _unused(recipe)
    return LoadedRecipe(recipe, file, file.parent, tuple(notices))


def tried_paths(text: str, folder: Path) -> tuple[Path, ...]:
    """Where a path of a recipe is looked for: the working directory, then the recipe's `folder`. `~` is expanded."""
    path = named_path(text)
    if path.is_absolute():
        return (path,)
    here, there = Path.cwd() / path, folder.absolute() / path
    return (here,) if here == there else (here, there)


def resolve_path(text: str, folder: Path) -> Path | None:
    """The first of `tried_paths` that exists (file or folder), or None; an error then names all of them."""
    for path in tried_paths(text, folder):
        try:
            if path.exists():
                return path
        except (OSError, ValueError):  # a name that is too long, or holds a NUL
            return None
    return None


def resolved_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out; loading this text gives an equal recipe."""
    return yaml.dump(_escaped(plain_data(recipe)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes what `strict_yaml` reads: no aliases, and quotes wherever a text would read as another value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    stays_text = isinstance(parse_scalar(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if stays_text else "'")


_Dumper.add_representer(str, _represent_text)


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return escape(value) if isinstance(value, str) else value


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise RefusedError(
            f"the recipe cannot be read: {error.strerror}", where=str(file), hint=f"ls -l {shlex.quote(str(file))}"
        ) from None


def _fill_defaults(data: dict[str, Any], stem: str) -> None:
    """Write the defaults into `data`, so that references to keys that are not given work."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-") or "recipe"
    data.setdefault("output_dir", f"outputs/{safe}")
    for field in fields(Recipe):
        section, is_list = section_of(hints_of(Recipe)[field.name])
        if section is not None and not is_list:
            inner = data.setdefault(field.name, {})
            if isinstance(inner, dict):
                for name, default in asdict(section()).items():
                    inner.setdefault(name, with_lists(default))
        elif field.default is not MISSING:
            data.setdefault(field.name, with_lists(field.default))


def _unused(recipe: Recipe) -> list[str]:
    """Notices about keys that this recipe sets without effect."""
    if recipe.method == "full" and recipe.lora != LoraConfig():
        return ["lora: not used, since method is full"]
    return []
