"""The rules of the house (roundpipe_cli/README.md, "Imports"): imports point one way, torch stays where it is needed,
importing does nothing, and nothing in our source can run code that it was given."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.code_map import tree_of
from tests.support.e2e import child_environment, forked

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "roundpipe_cli"
DOOR = PACKAGE / "__init__.py"  # names the functions for programs, imports their file when asked; no room uses it

TRAIN = {"hub", "recipe", "costs", "schedule", "planning", "kernels", "model", "data", "engine"}
LEAVES = {
    *("cache", "choices", "library_settings", "errors", "events", "faults", "files", "library_names", "limited"),
    *("heap", "packages", "regular_files", "sizes", "torchrun", "units", "watchdog"),
}
# What a room may import beside itself and the leaves. Read from left to right:
#   leaves <- recipe | costs <- schedule <- planning;   costs, kernels <- model;
#   engine: costs, schedule, kernels, model;   train: all of these
MAY_IMPORT: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "hub": set(),
    "recipe": set(),
    "costs": {"hub"},
    "schedule": {"costs"},
    "planning": {"recipe", "costs", "schedule", "model.files"},
    "kernels": set(),
    "model": {"kernels", "hub", "costs"},
    "data": {"hub", "recipe"},
    "engine": {"costs", "schedule", "kernels", "model"},
    "dashboard": {"costs", "schedule"},
    "train": TRAIN,
    "cli": {*TRAIN, "train", "dashboard"},
    "__main__": {"cli"},
}
WITHOUT_TORCH = ("hub", "recipe", "costs", "schedule", "planning", "dashboard")
HEAVY = ("torch", "transformers", "peft", "datasets", "accelerate", "numpy")


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, as `ast.walk` finds them: walking takes longer than parsing, and most rules look at all."""
    return tuple(ast.walk(tree_of(path)))


@functools.cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def module_of(path: Path) -> str:
    """Dotted name of a module or package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


@functools.cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, dotted module) of every import, late ones and those for type checking included."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from roundpipe_cli import plan` imports a room, `from roundpipe_cli import __version__` does not
            whole_package = base == "roundpipe_cli"
            for alias in node.names:
                is_room = whole_package and alias.name in MAY_IMPORT
                yield node.lineno, f"{base}.{alias.name}" if is_room else base


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


OLD_TYPER = "ignore:'click.utils.:DeprecationWarning"  # typer 0.22 imports names that the newest click warns of


def test_every_room_is_known() -> None:
    rooms = {room_of(path) for path in sources()} - {"__init__"}
    assert rooms == set(MAY_IMPORT), "a new room needs a line in MAY_IMPORT and in roundpipe_cli/README.md"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sources():
        room = room_of(path)
        if room == "__init__":
            continue
        allowed = MAY_IMPORT[room] | LEAVES | {room}
        for line, module in imports_of(path):
            package, _, inside = module.partition(".")
            if package != "roundpipe_cli" or not inside:
                continue  # the bare package holds __version__ only
            if not any(inside == name or inside.startswith(f"{name}.") for name in allowed):
                wrong.append(f"{place(path, line)}: {room} may not import {module}")
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles_late_imports_included() -> None:
    names = {module_of(path): path for path in sources() if path != DOOR}
    needs = {name: {module for _, module in imports_of(path)} & names.keys() - {name} for name, path in names.items()}
    while free := {name for name, wanted in needs.items() if not wanted & needs.keys()}:
        needs = {name: wanted for name, wanted in needs.items() if name not in free}
    assert not needs, f"these import each other, or something that does: {sorted(needs)}"


def test_folders_do_not_import_in_circles() -> None:
    folders = {path.parent for path in sources()}
    needs: dict[Path, set[Path]] = {folder: set() for folder in folders}
    upwards = []
    for path in sources():
        for line, module in imports_of(path) if path != DOOR else ():
            place_of = ROOT.joinpath(*module.split("."))
            other = place_of if place_of in folders else place_of.parent
            if other in folders and other not in (path.parent, PACKAGE):
                needs[path.parent].add(other)
                if other in path.parents:
                    upwards.append(f"{place(path, line)}: imports {module} of its own room")
    assert not upwards, "\n".join(upwards)
    while free := {folder for folder, wanted in needs.items() if not wanted & needs.keys()}:
        needs = {folder: wanted for folder, wanted in needs.items() if folder not in free}
    assert not needs, f"these folders import each other, or one that does: {sorted(map(str, needs))}"


def test_package_itself_imports_nothing_until_it_is_asked() -> None:
    at_once = [ast.unparse(node) for node in tree_of(DOOR).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert at_once == ["from typing import TYPE_CHECKING"]
    assert {module for _, module in imports_of(DOOR) if "roundpipe" in module} == {"roundpipe_cli.cli.from_python"}
    taken = {
        alias.name
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and node.module == "roundpipe_cli"
        for alias in node.names
    }
    assert taken and taken <= {"__version__", *LEAVES}, "a room imports the rooms above it"


def test_imported_names_exist() -> None:
    """Late imports and those of the scripts too: a function that moved once broke the end of the quickstart."""
    own = [path for path in sorted((ROOT / "scripts").rglob("*")) if path.is_file() and path.suffix in ("", ".py")]
    scripts = [path for path in own if path.suffix or b"python" in path.read_bytes().partition(b"\n")[0]]
    assert {"ledger", "experts.py"} <= {path.name for path in scripts}
    for path in [*sources(), *scripts]:
        for node in nodes_of(path):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("roundpipe_cli") and not module.endswith(("_triton", "lm_eval_model")):
                for alias in node.names:
                    found = pkgutil.resolve_name(f"{module}.{alias.name}")
                    if isinstance(found, ModuleType):
                        assert {*attributes(path, alias.asname or alias.name)} <= {*dir(found)}, f"{path}: {alias.name}"


def attributes(path: Path, name: str) -> Iterator[str]:
    """What a file takes of the module that it imports under a name; nothing where the name is a value's, too."""
    if not any(getattr(node, "arg", None) == name for node in nodes_of(path)):
        taken = [node for node in nodes_of(path) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
        yield from (node.attr for node in taken if isinstance(node.value, ast.Name) and node.value.id == name)


def test_rooms_without_torch_never_name_it() -> None:
    wrong = [
        f"{place(path, line)}: {module}"
        for path in sources()
        if room_of(path) in WITHOUT_TORCH
        for line, module in imports_of(path)
        if module.split(".")[0] in ("torch", "transformers", "peft", "accelerate")
    ]
    assert not wrong, "\n".join(wrong)


def import_effects() -> Any:
    """What importing everything does, in a process forked from a server that has done it."""
    return importlib.import_module("tests.support.preload").EFFECTS


def test_importing_loads_no_torch_starts_no_thread_and_prints_nothing() -> None:
    """First the rooms without torch, then all, after the libraries, whose own threads are counted before ours."""
    light = sorted(module_of(path) for room in (*WITHOUT_TORCH, "cli") for path in (PACKAGE / room).rglob("*.py"))
    code = (
        "import importlib, sys, threading\n"
        f"for name in {light!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert 'multiprocessing' not in sys.modules\n"
    )
    words = [sys.executable, "-W", "error", "-W", OLD_TYPER, "-c", code]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, env=child_environment())
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    before, after, printed, left_compiler = forked(import_effects)
    assert (before, printed, left_compiler) == (after, "", True)


def dotted(node: ast.AST) -> str:
    """`torch.cuda.Stream` for the attribute chain of that name, otherwise an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def test_only_one_file_names_torch_cuda() -> None:
    named = set()
    for path in sources():
        attributes = {dotted(node) for node in nodes_of(path) if isinstance(node, ast.Attribute)}
        modules = {module for _, module in imports_of(path)}
        if any(name == "torch.cuda" or name.startswith("torch.cuda.") for name in attributes | modules):
            named.add(path.relative_to(PACKAGE).as_posix())
    assert named == {"engine/backends/cuda.py"}


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.save", "numpy.load", "np.load", "os.system",
    "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "os._exit",
}  # fmt: skip
FORBIDDEN_METHODS = {"extractall", "unpack_archive"}


def dangers(path: Path) -> Iterator[str]:
    """What could run code from a file or an argument (or, `os._exit`, end a run without a word)."""
    for line, module in imports_of(path):
        if module.split(".")[0] in FORBIDDEN_MODULES:
            yield f"{place(path, line)}: import {module}"
    for node in nodes_of(path):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN_METHODS
        if name in FORBIDDEN_CALLS or is_method:
            yield f"{place(path, node.lineno)}: {name or ast.unparse(node.func)}(...)"
        for keyword in node.keywords:
            value = keyword.value
            is_false = isinstance(value, ast.Constant) and value.value is False
            if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and not is_false:
                yield f"{place(path, node.lineno)}: {keyword.arg}={ast.unparse(value)}"


def test_nothing_can_run_code_it_was_given() -> None:
    scripts = sorted((ROOT / "scripts").glob("*.py"))
    found = [danger for path in [*sources(), *scripts] for danger in dangers(path)]
    assert not found, "\n".join(found)
    for name in ("torture/hostile.py", "test_guide.py"):  # these do it
        assert [*dangers(ROOT / "tests" / name)], "the scan finds nothing"


def test_loaders_that_could_run_code_are_told_not_to() -> None:
    wrong = []
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = dotted(node.func.value)
                is_loader = node.func.attr in ("from_pretrained", "from_config") and owner.startswith("Auto")
                if is_loader and "trust_remote_code" not in {keyword.arg for keyword in node.keywords}:
                    wrong.append(place(path, node.lineno))
    assert not wrong, "\n".join(wrong)
