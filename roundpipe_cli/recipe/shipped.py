"""The recipes that come with the tool: their places, names, and the verdicts in their headers.

They lie in `recipes/` of the repository, which the wheel carries as `roundpipe_cli/shipped_recipes`. The whole name of
a recipe is its path without `.yaml`: `qwen3/8b_lora_2x24gb`; a link beside the folders gives its short name `qwen3-8b`.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import roundpipe_cli
from roundpipe_cli.choices import SCORING_OBJECTIVES
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.units import GIB

VERDICT = re.compile(
    r"^# roundpipe plan (?P<recipe>\S+) --hardware (?P<hardware>\S+)\n"
    r"#   (?P<verdict>fits|does not fit): (?P<step_s>[\d.]+) s \((?P<least_s>[\d.]+) to "
    r"(?P<most_s>[\d.]+)\) a step of (?P<tokens>[\d,]+) tokens, "
    r"(?P<tokens_per_s>[\d,]+) tokens/s, GPU (?P<device>[\d.]+) GiB, host (?P<host>[\d.]+) GiB, "
    r"disk (?P<disk>[\d.]+) GiB$",
    re.MULTILINE,
)
"""Lines in which a recipe's header says what `plan` gave."""


@dataclass(frozen=True, slots=True)
class HeaderVerdict:
    """Figures that `roundpipe plan` gave when the recipe's header was written."""

    hardware: str
    """Value of `--hardware`, host memory included."""
    fits: bool
    step_s: float
    step_range_s: tuple[float, float]
    """Range in which it is to be expected."""
    tokens_per_step: int
    tokens_per_s: float
    device_bytes: float
    """Bytes of one worker's GPU memory."""
    host_bytes: float
    disk_bytes: float

    def text(self, recipe: str) -> str:
        """The two lines of the header; `recipe` as the command names it."""
        step_s, least_s, most_s = (f"{float(f'{seconds:.3g}'):g}" for seconds in (self.step_s, *self.step_range_s))
        return (
            f"# roundpipe plan {recipe} --hardware {self.hardware}\n"
            f"#   {'fits' if self.fits else 'does not fit'}: {step_s} s ({least_s} to {most_s}) "
            f"a step of {self.tokens_per_step:,} "
            f"tokens, {float(f'{self.tokens_per_s:.3g}'):,.0f} tokens/s, GPU {self.device_bytes / GIB:.1f} GiB, "
            f"host {self.host_bytes / GIB:.1f} GiB, disk {self.disk_bytes / GIB:.1f} GiB"
        )


@dataclass(frozen=True, slots=True)
class ShippedRecipe:
    """One recipe of the tool."""

    name: str
    """`qwen3/8b_lora_2x24gb`."""
    short_name: str | None
    """`qwen3-8b`, where it is the one that the short name means."""
    path: Path
    purpose: str
    """First sentence of the header."""
    method: str
    """As a table shows it: `lora`, `full`, `qlora` (4 bit), with the objective where it is not sft: `lora, dpo`."""
    verdict: HeaderVerdict | None

    @property
    def command_name(self) -> str:
        """The path that a user types: `recipes/qwen3/8b_lora_2x24gb.yaml`."""
        return f"recipes/{self.name}.yaml"


def shipped_folder() -> Path:
    """The folder of the recipes that come with the tool: in the wheel, or the repository's `recipes/`."""
    package = Path(roundpipe_cli.__file__).resolve().parent
    folder = package / "shipped_recipes"
    return folder if folder.is_dir() else package.parent / "recipes"


def shipped_recipes() -> list[ShippedRecipe]:
    """The recipes that come with the tool, by name; a short name is no recipe of its own."""
    folder = shipped_folder()
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.yaml"))}
    # a wheel holds copies where the repository has links: equal text tells
    shorts = {text: file.stem for file, text in texts.items() if file.parent == folder}
    found = []
    nested = {text for file, text in texts.items() if file.parent != folder}
    for file, text in texts.items():
        if file.parent == folder and text in nested:
            continue
        name = file.relative_to(folder).with_suffix("").as_posix()
        short = shorts.get(text) if file.parent != folder else None
        found.append(ShippedRecipe(name, short, file, purpose_of(text), _method_of(text), verdict_of(text)))
    return found


def _method_of(text: str) -> str:
    """The method by the recipe's own lines, without loading it: shipped recipes write these keys at the left."""
    written = dict(re.findall(r"^(method|objective|load_in_4bit): *(\w+)", text, re.MULTILINE))
    method = "qlora" if written.get("load_in_4bit") == "true" else written.get("method", "lora")
    return f"{method}, {written['objective']}" if written.get("objective") in SCORING_OBJECTIVES else method


def purpose_of(text: str) -> str:
    """The first sentence of a recipe's leading comment."""
    lines = [line[2:].strip() for line in takewhile(lambda line: line.startswith("# "), text.splitlines())]
    return re.split(r"(?<=[\w)])\. (?=[A-Z`])", " ".join(lines))[0].rstrip(".")


def verdict_of(text: str) -> HeaderVerdict | None:
    """The verdict in a recipe's header, if it has one."""
    found = VERDICT.search(text)
    if found is None:
        return None
    return HeaderVerdict(
        hardware=found["hardware"],
        fits=found["verdict"] == "fits",
        step_s=float(found["step_s"]),
        step_range_s=(float(found["least_s"]), float(found["most_s"])),
        tokens_per_step=int(found["tokens"].replace(",", "")),
        tokens_per_s=float(found["tokens_per_s"].replace(",", "")),
        device_bytes=float(found["device"]) * GIB,
        host_bytes=float(found["host"]) * GIB,
        disk_bytes=float(found["disk"]) * GIB,
    )


def find_recipe(name: Path | str) -> tuple[Path, str | None]:
    """The recipe file that `name` means, and a notice where a shipped one stands in for it.

    Tried in this order: the path itself; then, with or without `recipes/` in front and `.yaml` behind, the names of
    the shipped recipes.

    Raises:
        RefusedError: no such file, with the places tried and the nearest names.
    """
    path = named_path(name)
    refuse_rows(path, "a recipe")
    if path.is_file():
        return path, None
    own = path / "recipe.yaml"
    if own.is_file() and not (path / "config.json").exists():  # else it is a model
        return own, f"{path} is the folder of a run: {own} is its recipe"
    if path.exists():
        raise RefusedError(f"{path} is not a recipe file", expected="a YAML file", hint=SEE_LIST)
    file = _shipped_file(path)
    if file is not None:
        return file, f"{path} is not in the working directory: using the shipped recipe {file}"
    found = f"no file {Path.cwd() / path}, nor a shipped recipe of that name in {shipped_folder()}"
    raise RefusedError(f"there is no recipe {path}", found=found, hint=_near(path) or SEE_LIST)


ROW_SUFFIXES = frozenset({".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".gz"})
"""Files of rows, by their names."""


def refuse_rows(path: Path, wanted: str, expected: str = "a YAML file") -> None:
    """
    Raises:
        RefusedError: `path` is a file of rows, where one of settings is `wanted`.
    """
    if path.suffix in ROW_SUFFIXES and path.is_file():
        what = f"{path} is a file of rows, not {wanted}"
        hint = f"`roundpipe init --data {shlex.quote(str(path))}` writes a recipe for it"
        raise RefusedError(what, found=f"a {path.suffix} file", expected=expected, hint=hint)


SEE_LIST = "`roundpipe recipes ls` lists the recipes that come with the tool"


def find_shipped(name: str) -> Path:
    """The file of the shipped recipe `name`, whatever the working directory holds.

    Raises:
        RefusedError: no shipped recipe of that name.
    """
    file = _shipped_file(Path(name))
    if file is None:
        near = closest_name(name.removeprefix("recipes/").removesuffix(".yaml"))
        hint = f"did you mean {near}?" if near else SEE_LIST
        raise RefusedError(f"no shipped recipe is called {name}", hint=hint)
    return file


def closest_name(word: str) -> str | None:
    """The name or short name of a shipped recipe that is nearest to a misspelt one."""
    recipes = shipped_recipes()
    names = [recipe.name for recipe in recipes]
    names += [recipe.short_name for recipe in recipes if recipe.short_name]
    names += sorted(name for name in {name.rpartition("/")[2] for name in names} if name.lower() == word.lower())
    return closest(word, names)


def _shipped_file(path: Path) -> Path | None:
    parts = path.parts[1:] if path.parts[:1] == ("recipes",) else path.parts
    if path.is_absolute() or not parts or ".." in parts or len(parts) > 2:
        return None
    named = shipped_folder().joinpath(*parts)
    for file in (named, named.with_name(f"{named.name}.yaml")):
        if file.suffix in (".yaml", ".yml") and file.is_file():
            return file
    return None


def _near(path: Path) -> str | None:
    here = [str(file) for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    ours = [recipe.command_name for recipe in shipped_recipes()]
    ours += [f"recipes/{recipe.short_name}.yaml" for recipe in shipped_recipes() if recipe.short_name]
    for candidates in (here, ours):
        stems = {str(Path(name).with_suffix("")): name for name in candidates}  # a common `.yaml` is no likeness
        near = closest(str(path.with_suffix("")), list(stems))
        if near:
            return f"did you mean {shlex.quote(stems[near])}?"
    near = closest_name(str(path))
    return f"did you mean {near}?" if near else None
