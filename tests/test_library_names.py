"""Private names of other libraries: each is in one table and in the installed release. One that a newer release has
moved is refused with the release to install; of torch's (`TORCH_NAMES`) this test fails first."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Iterator

import pytest
import torch

from roundpipe_cli import library_names
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.library_names import LIBRARY_NAMES, LibraryName, library_name
from tests.test_architecture import dotted, nodes_of, sources

LIBRARIES = ("torch", "transformers", "peft", "datasets", "huggingface_hub", "gguf", "safetensors", "tokenizers")

TORCH_NAMES = {
    "torch._fused_adamw_": "train/optim/optimizer.py",
    "torch._fused_sgd_": "train/optim/optimizer.py",
    "torch.nn.modules.dropout._DropoutNd": "model/dropout.py",
    "torch.overrides._get_current_function_mode_stack": "model/dropout.py",
    "torch.utils._python_dispatch.TorchDispatchMode": "backends/cpu.py, launches.py, last_projection.py",
    "torch.utils._pytree.tree_flatten": "backends/cpu.py, launches.py, worker_model.py",
    "torch._C._cuda_clearCublasWorkspaces": "engine/backends/cuda.py; builds for GPUs only",
}


@pytest.mark.parametrize("entry", LIBRARY_NAMES, ids=lambda entry: f"{entry.library}:{entry.name}")
def test_the_installed_release_has_the_name(entry: LibraryName) -> None:
    library_name(entry.module, entry.name)


@pytest.mark.parametrize("change", [{"name": "_moved_elsewhere"}, {"parameters": ("other",)}, {"module": "peft.gone"}])
def test_a_name_that_has_moved_is_refused(monkeypatch: pytest.MonkeyPatch, change: dict[str, object]) -> None:
    """Story: where PEFT calls another method, the one put in its place was never called: a slow run, in silence."""
    values = {"library": "peft", "module": "peft.tuners.lora.layer", "name": "_LoraParameterProxy", "used_for": "that"}
    entry = LibraryName(**(values | {"parameters": ("delta_weight",)} | change))  # type: ignore[arg-type]
    monkeypatch.setattr(library_names, "_BY_PLACE", {(entry.module, entry.name): entry})
    with pytest.raises(RefusedError, match=r"(?s)that: not with this release of peft.*pip install 'peft==") as caught:
        library_name(entry.module, entry.name)
    assert caught.value.exit_code == 2


def test_torch_has_its_names() -> None:
    for path in TORCH_NAMES:
        module, _, name = path.rpartition(".")
        if "cuda" not in name or torch.version.cuda is not None:
            assert hasattr(importlib.import_module(module), name), f"{path}: {TORCH_NAMES[path]}"


def test_no_private_name_is_used_outside_of_the_tables() -> None:
    tables = {f"{entry.module}.{entry.name}" for entry in LIBRARY_NAMES} | set(TORCH_NAMES)
    private_modules = {path.rpartition(".")[0] for path in tables if "._" in path.rpartition(".")[0]} - {"torch._C"}
    used = {found for path in sources() for found in private_names(nodes_of(path))}
    assert "torch.utils._python_dispatch.TorchDispatchMode" in used
    allowed = tables | private_modules | {"torch._C"}
    assert not {found for found in used - allowed if found.rpartition(".")[0] not in private_modules}


def private_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    bound: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in LIBRARIES and not alias.asname]
            bound |= {name.split(".")[0]: name.split(".")[0] for name in names}
    texts = [*bound.values(), *(dotted(node) for node in nodes if isinstance(node, ast.Attribute))]
    for text in texts:
        first, _, rest = text.partition(".")
        path = f"{bound.get(first, first)}.{rest}"
        if path.split(".")[0] in LIBRARIES and re.fullmatch(r"[\w.]+", path) and re.search(r"\._(?!_)", path):
            yield path
