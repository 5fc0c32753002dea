"""The wheel carries the recipes and the quickstart's data, and finds them from an empty folder; the scripts' pins."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from roundpipe_cli.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = "roundpipe_cli/shipped_recipes"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    built = subprocess.run(
        [*command, "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def unpacked(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    for name in wheel.namelist():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(wheel.read(name))
    return folder


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_carries_the_package_and_the_recipes_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    recipes = {path.relative_to(ROOT / "recipes").as_posix(): path for path in (ROOT / "recipes").rglob("*")}
    recipes = {f"{SHIPPED}/{name}": path for name, path in recipes.items() if path.is_file()}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "roundpipe_cli").rglob("*")
        if path.is_file() and path.suffix in (".py", ".json", ".css", ".typed", ".md")
    }
    assert "roundpipe_cli/py.typed" in package
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == package | recipes.keys()
    assert all(wheel.read(name) == path.read_bytes() for name, path in recipes.items())


def test_metadata(wheel: zipfile.ZipFile) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "roundpipe-cli"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    (scripts,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "roundpipe = roundpipe_cli.cli.app:main" in wheel.read(scripts).decode()
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements_of(wheel: zipfile.ZipFile) -> list[Requirement]:
    return [Requirement(line) for line in metadata_of(wheel).get_all("Requires-Dist") or []]


def test_floors_against_known_holes(wheel: zipfile.ZipFile) -> None:
    floors = {"torch": "2.11", "transformers": "5.17", "safetensors": "0.8", "pyyaml": "6", "jinja2": "3.1.6"}
    found = {canonical(one.name): str(one.specifier) for one in requirements_of(wheel)}
    assert {name: found.get(name) for name in floors} == {name: f">={floor}" for name, floor in floors.items()}


def test_the_table_of_supported_versions_begins_at_the_floors(wheel: zipfile.ZipFile) -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and line.count("|") == 4]
    oldest = {cells[0]: cells[1] for cells in rows}
    floors = {canonical(one.name): str(one.specifier) for one in requirements_of(wheel) if one.marker is None}
    assert metadata_of(wheel)["Requires-Python"] == f">={oldest['Python']}"
    assert {name: f">={oldest[name]}" for name in ("torch", "transformers", "peft")}.items() <= floors.items()


def test_the_version_is_written_once() -> None:
    pages = [ROOT / "CITATION.cff", ROOT / "pyproject.toml", *ROOT.glob("*.md")]
    version = importlib.metadata.version("roundpipe-cli")
    assert [path.name for path in pages if re.search(rf"\bversion\W+{re.escape(version)}", path.read_text())] == []
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["authors"] == [{"name": "The RoundPipe CLI developers"}] and citation["cff-version"] == "1.2.0"


def test_missing_recipe_resolves_to_the_shipped_one_with_a_notice(unpacked: Path, tmp_path: Path) -> None:
    """From an empty folder: the recipe is found; refused here for a model that does not exist."""
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", "recipes/quickstart.yaml", "model=./nowhere"]
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}  # which goes before an editable install
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert result.returncode == 2, result.stderr
    shipped = unpacked / SHIPPED / "quickstart.yaml"
    notice = f"recipes/quickstart.yaml is not in the working directory: using the shipped recipe {shipped}"
    assert notice in result.stderr
    assert "./nowhere" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_recipe_of_the_working_directory_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text("model: ./mine\ndatasets: [{path: rows.jsonl}]\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe("recipes/quickstart.yaml")
    assert loaded.recipe.model == "./mine" and not any("shipped" in notice for notice in loaded.notices)


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert len(requirements) > 50
    return {canonical(one.name): one for one in requirements}


def test_constraints_are_exact_versions() -> None:
    for name, one in pins().items():
        assert one.url is None and re.fullmatch(r"==[0-9][0-9a-z.]*", str(one.specifier)), name


def test_constraints_pin_every_dependency(wheel: zipfile.ZipFile) -> None:
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("older or newer packages have other dependencies")
    pinned = pins()
    waiting = [(one, "dev") for one in requirements_of(wheel)]
    seen = set()
    while waiting:
        one, extra = waiting.pop()
        name = canonical(one.name)
        if name in seen or not (one.marker is None or one.marker.evaluate({"extra": extra})):
            continue
        try:
            indirect = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        seen.add(name)
        waiting += [(Requirement(text), "") for text in indirect]
    cuda = {name for name in seen if name.startswith(("nvidia-", "cuda-")) or name == "triton"}  # torch pins its own
    assert {"torch", "transformers", "pytest", "hatchling"} <= seen
    assert seen - cuda <= pinned.keys()


def test_versions_in_force_are_the_pinned_ones() -> None:
    """The suite speaks for the versions that the scripts install."""
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("not in the .venv that scripts/test makes")
    wrong = {}
    for name, one in pins().items():
        if one.marker is None or one.marker.evaluate():
            version = importlib.metadata.version(name)
            if not one.specifier.contains(version):
                wrong[name] = version
    assert not wrong


STUB = """#!/bin/sh
case "$*" in
*"config list"*) echo "$CONFIGURED" ;;
*find_spec*) exit "${HAS_TORCH:-0}" ;;
*) echo "$*" >> "$CALLS"; exit "${FAILS:-0}" ;;
esac
"""


@pytest.mark.parametrize(
    ("variables", "installs", "said"),
    [
        ({}, True, "for the processor alone"),
        ({"FAILS": "1"}, True, "cannot be reached: installing the usual build"),
        ({"CONFIGURED": "global.index-url='https://mirror/simple'"}, False, ""),
        ({"CONFIGURED": ":env:.find-links='/wheels'"}, False, ""),
        ({"HAS_TORCH": "1"}, False, ""),
        ({"GPU": "1"}, False, ""),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_without_a_gpu_torch_has_no_cuda(tmp_path: Path, variables: dict[str, str], installs: bool, said: str) -> None:
    """The quickstart downloaded gigabytes of CUDA's libraries for a machine that has no GPU."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python", *(["nvidia-smi"] if "GPU" in variables else [])):
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    (programs / "uname").write_text("#!/bin/sh\necho Linux x86_64\n")
    (programs / "uname").chmod(0o755)
    script = f"set -eu; . {ROOT}/scripts/environment.sh; python={programs}/python; install_torch_for_processor; echo on"
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls"), "CONFIGURED": "", **variables}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "on\n" and said in done.stderr and bool(done.stderr) == bool(said), done.stderr
    calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    assert calls.count("--no-deps") == installs and ("--index-url https://" in calls) == installs, calls
