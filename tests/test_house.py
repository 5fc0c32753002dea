"""Rules of the house that concern names, docstrings and sizes: one name for one idea, files that can be read."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from scripts.code_map import out_of_date, tree_of
from tests.conftest import FORKING, LONGEST, SMOKE
from tests.test_architecture import PACKAGE, ROOT, nodes_of, place, sources

MAX_LINES = 800
MAX_PARAMETERS, MAX_POSITIONAL = 10, 4
UNPACKED = {"within_limits", "prove_once", "screen", "help_screen"}
"""Functions that take a pair by position, unpacked: stages forward and backward, a model and its split, a size."""
MOST_LINES, SLACK = 66_345, 0.02
"""The package without `__init__.py`. Who needs more than the slack moves the number and says in the commit for what."""
MOST_FILES_OF_SEVERAL_STORIES, PART_LINES = 4, 40  # files with parts of so many lines that never refer to each other
SIGNATURES_OF_LIBRARIES = {  # functions whose arguments a library has chosen
    *("forward", "_grouped_mm_kernel", "_grouped_outer_kernel"),  # torch.autograd.Function, Triton
    *("_dropout_kernel", "_cross_entropy_kernel"),
    *("of", "_attention", "sink_attention"),  # torch's scaled_dot_product_attention, transformers' attention
    *("attend_or_read", "_attend_row"),
}
USED_OUTSIDE = {  # names of product code that no product code mentions, each with its reason to stay
    "release_workspaces": "measurements of memory need it, and no other file names torch's private parts of CUDA",
    "load_in_fp8": "read by the key that `PACKED_FORMATS` makes of its name",
    "list_without_a_word": "typer calls it",
    "first_loss": "a program reads it of what `finetune` returns",
    **dict.fromkeys(("loss_error", "gradient_error"), "tests ask how exact a proof is, which is kept as a whole"),
    **dict.fromkeys(
        ("is_compileable", "is_dummy", "get_seq_length", "get_query_offset", "get_mask_sizes"),
        "transformers asks it of what it takes for a cache of keys and values",
    ),
    **dict.fromkeys(
        ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"),
        "transformers calls it of what it takes for a cache of a recurrent block's states",
    ),
}
BACK_REFERENCE = re.compile(r"\s*(Of|What|The same|Those|Such|It|They|That|These|This|Its|Their|Both|One of|As of)\b")
"""Beginnings of a docstring that only its neighbours explain."""
OUTSIDE = re.compile(r"\.\./(\.\./)?shared\b|/ \"shared\"|\b(DESIGN|STYLE|TRAPS|RELIABILITY)\.md|RELIABILITY S\d")


def test_a_public_name_is_defined_in_one_module() -> None:
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


def test_product_code_is_used_by_product_code() -> None:
    """What only scripts or tests use lives there. By name alone: one that has a namesake in use is not found."""
    used = Counter(name for path in sources() for name in _mentioned(nodes_of(path)))
    own = {node.name for path in sources() for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
    unused = {
        name: place(path, node.lineno)
        for path in sources()
        for name, node in _definitions(tree_of(path), own)
        if used[name] <= Counter(_mentioned(ast.walk(node)))[name]
    }
    assert sorted(unused) == sorted(USED_OUTSIDE), unused


def _mentioned(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that are read, imported or written as text, as lazily imported commands are."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _definitions(tree: ast.Module, own: set[str]) -> Iterator[tuple[str, ast.stmt]]:
    """Functions, classes and constants, but for commands; methods and fields of classes whose bases are all `own`."""
    for outer in tree.body:
        inside = outer.body if isinstance(outer, ast.ClassDef) and {*map(ast.unparse, outer.bases)} <= own else []
        for node in (outer, *inside):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                is_command = any(".command(" in ast.unparse(decorator) for decorator in node.decorator_list)
                names = [] if is_command else [node.name]
            else:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from ((name, node) for name in names if not name.startswith("__"))


def test_docstrings_begin_with_what_the_thing_is_or_does() -> None:
    wrong = [
        f"{place(path, line)}: {text.splitlines()[0]}"
        for path in sources()
        for line, text in _docstrings(path)
        if BACK_REFERENCE.match(text)
    ]
    assert not wrong, "\n".join(wrong)


def _docstrings(path: Path) -> list[tuple[int, str]]:
    """(line, text) of every string that stands alone: of modules, classes, functions and variables."""
    return [
        (node.lineno, node.value.value)
        for node in nodes_of(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def test_the_repository_cites_no_file_outside_itself() -> None:
    """A fresh clone has nothing beside it: no test, script or comment may count on a folder next to the clone."""
    texts = [path for folder in ("roundpipe_cli", "tests", "scripts", "recipes") for path in (ROOT / folder).rglob("*")]
    wrong = [
        f"{place(path, number)}: {line.strip()}"
        for path in [*ROOT.glob("*.md"), *texts]
        if path.suffix in (".py", ".md", ".yaml", ".txt", "") and path.is_file() and path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if OUTSIDE.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_signatures_are_short() -> None:
    wrong = []
    for path in sources():
        if (lines := path.read_text(encoding="utf-8").count("\n")) > MAX_LINES:
            wrong.append(f"{place(path, lines)}: more than {MAX_LINES} lines")
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_command(path, node):
                if node.name in SIGNATURES_OF_LIBRARIES:
                    continue
                named = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                count = len([each for each in named if each.arg not in ("self", "cls")])
                if count > MAX_PARAMETERS:
                    wrong.append(f"{place(path, node.lineno)}: {node.name} takes {count} arguments")
                positional = len(named) - len(node.args.kwonlyargs) - (len(named) - count)
                if positional > MAX_POSITIONAL and not _is_operator(node) and node.name not in UNPACKED:
                    wrong.append(f"{place(path, node.lineno)}: {node.name} takes {positional} arguments by position")
    assert not wrong, "\n".join(wrong)


def _is_operator(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether torch or Triton calls a function, by position."""
    return any(key in ast.unparse(each) for each in node.decorator_list for key in ("custom_op", "register", "triton"))


def test_the_package_does_not_grow_by_itself() -> None:
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in sources() if path.name != "__init__.py")
    assert lines <= MOST_LINES * (1 + SLACK), f"{lines} lines: move MOST_LINES and say in the commit for what"


def test_a_file_tells_one_story() -> None:
    """Story: files were merged by who imports them; 27 of them held parts that had nothing to do with each other."""
    several = {
        place(path, 1): ["/".join(names[:3]) for names in parts]
        for path in sources()
        if len(parts := _parts(tree_of(path))) > 1
    }
    told = "\n".join(f"{file}: {parts}" for file, parts in several.items())
    assert len(several) <= MOST_FILES_OF_SEVERAL_STORIES, told


def _parts(tree: ast.Module) -> list[list[str]]:
    """Names of a module's top level, in groups that refer to each other, those of at least PART_LINES lines."""
    definitions: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            definitions[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {each.id: node for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)}
    groups = {name: {name} for name in definitions}
    for name, node in definitions.items():
        if isinstance(node, (ast.Assign, ast.AnnAssign)):  # a table joins nothing by what it holds
            continue
        for used in {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & definitions.keys():
            if groups[used] is not groups[name]:
                groups[name] |= groups[used]
                groups |= dict.fromkeys(groups[used], groups[name])
    distinct = {id(group): group for group in groups.values()}.values()
    ordered = [[name for name in definitions if name in group] for group in distinct]
    size = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in definitions.items()}
    return [names for names in ordered if sum(size[name] for name in names) >= PART_LINES]


def test_only_the_package_has_something_in_its_init_file() -> None:
    assert [place(path, 1) for path in PACKAGE.glob("*/**/__init__.py") if path.read_text(encoding="utf-8")] == []


def test_public_classes_and_functions_have_docstrings() -> None:
    wrong = [
        place(path, node.lineno)
        for path in sources()
        for node in tree_of(path).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_code_map_and_picture_are_made_from_the_code() -> None:
    assert not out_of_date(), "python scripts/code_map.py --write"


def _is_command(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return path.parent == PACKAGE / "cli" and "typer." in ast.unparse(node.args)


def test_files_that_the_suite_names_exist() -> None:
    assert [name for name in (*FORKING, *LONGEST, *SMOKE) if not (ROOT / "tests" / name).is_file()] == []
