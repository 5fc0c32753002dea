"""Rules of the house that concern names, docstrings and sizes: one name for one idea, files that can be read."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.conftest import FORKING, LONGEST, SMOKE
from tests.test_architecture import PACKAGE, ROOT, place, sources, tree_of

MAX_LINES = 800
MAX_PARAMETERS = 10
SIGNATURES_OF_LIBRARIES = {
    *("forward", "_grouped_mm_kernel", "_grouped_outer_kernel"),  # torch.autograd.Function, Triton
    *("of", "_attention", "sink_attention"),  # torch's scaled_dot_product_attention, transformers' attention
}
"""Functions whose arguments a library has chosen."""
EXEMPT = (Path(__file__), ROOT / "tests" / "data" / "test_data_masks.py")
"""The second also reads rows that we may not ship, where somebody has put them beside the clone."""
OUTSIDE = re.compile(r"\.\./(\.\./)?shared\b|/ \"shared\"|\b(DESIGN|STYLE|TRAPS|RELIABILITY)\.md|RELIABILITY S\d")


def test_a_public_name_is_defined_in_one_module() -> None:
    """Functions, classes and types; constants belong to their modules, commands are named by the user's words."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in tree_of(path).body:
            name = _defined(node)
            if name and not name.startswith("_") and path.parent != PACKAGE / "cli":
                found[name].append(place(path, node.lineno))
    twice = [f"{name}: {', '.join(places)}" for name, places in sorted(found.items()) if len(places) > 1]
    assert not twice, "\n".join(twice)


def _defined(node: ast.stmt) -> str | None:
    """The name of a function, class or alias of a type that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        is_variable = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "TypeVar"
        return name if not name.isupper() and name[0].isupper() and not is_variable else None
    return None


def test_docstrings_begin_with_what_the_thing_is_or_does() -> None:
    wrong = [
        f"{place(path, line)}: {text.splitlines()[0]}"
        for path in sources()
        for line, text in _docstrings(tree_of(path))
        if text.split()[:1] in (["Of"], ["What"])
    ]
    assert not wrong, "\n".join(wrong)


def _docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, text) of every string that stands alone: of modules, classes, functions and variables."""
    return [
        (node.lineno, node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def test_the_repository_cites_no_file_outside_itself() -> None:
    """A fresh clone has nothing beside it: no test, script or comment may count on a folder next to the clone."""
    texts = [path for folder in ("roundpipe_cli", "tests", "scripts", "recipes") for path in (ROOT / folder).rglob("*")]
    wrong = [
        f"{place(path, number)}: {line.strip()}"
        for path in [*ROOT.glob("*.md"), *texts]
        if path.suffix in (".py", ".md", ".yaml", ".txt", "") and path.is_file() and path not in EXEMPT
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if OUTSIDE.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_signatures_are_short() -> None:
    wrong = []
    for path in sources():
        if (lines := path.read_text(encoding="utf-8").count("\n")) > MAX_LINES:
            wrong.append(f"{place(path, lines)}: more than {MAX_LINES} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_command(path, node):
                if node.name in SIGNATURES_OF_LIBRARIES:
                    continue
                named = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                count = len([each for each in named if each.arg not in ("self", "cls")])
                if count > MAX_PARAMETERS:
                    wrong.append(f"{place(path, node.lineno)}: {node.name} takes {count} arguments")
    assert not wrong, "\n".join(wrong)


def _is_command(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function declares a command's flags."""
    return path.parent == PACKAGE / "cli" and "typer." in ast.unparse(node.args)


def test_files_that_the_suite_names_exist() -> None:
    assert [name for name in (*FORKING, *LONGEST, *SMOKE) if not (ROOT / "tests" / name).is_file()] == []
