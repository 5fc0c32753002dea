"""Kernels that read each element once, compiled for cards that are not here: nothing is spilled."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

CARDS = [86, *(pytest.param(one, marks=pytest.mark.sweep) for one in (80, 89, 90, 120))]


def compiled(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: set[str],
    *,
    num_warps: int = 4,
) -> Any:
    """For a card that need not be here; what is not named in `types` is an int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**types, **dict.fromkeys(constants, "constexpr")}
    names = list(enumerate(kernel.arg_names))
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for _, name in names},
        {(place,): constants[name] for place, name in names if name in constants},
        {(place,): [["tt.divisibility", 16]] for place, name in names if name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})


def spilled_bytes(found: Any, capability: int, folder: Path) -> int:
    """What the assembler stores of registers in local memory."""
    from triton.backends.nvidia.compiler import get_ptxas

    (folder / "kernel.ptx").write_text(found.asm["ptx"])
    arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
    command = [get_ptxas(capability).path, "-v", f"-arch={arch}", str(folder / "kernel.ptx")]
    said = subprocess.run([*command, "-o", str(folder / "kernel.cubin")], capture_output=True, text=True, check=True)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said.stderr)
    assert spills, said.stderr
    return sum(map(int, spills))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # what triton 3.10 will do
@pytest.mark.parametrize("capability", CARDS)
def test_dropout_compiles_for_each_card(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spilled, and each thread reads and writes many bytes at a time."""
    from roundpipe_cli.kernels import pointwise_triton as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"BLOCK": kernels.BLOCK, "ROWS": kernels.ROWS}
    tensors = ("x", "out", "total", "product")
    for kind, writes_mask, adds in (
        ("*i8", True, False),
        ("*bf16", False, False),
        ("*bf16", False, True),
        ("*fp32", False, True),
    ):
        constants = {**sizes, "WRITES_MASK": writes_mask, "ADDS": adds}
        types = {"scale": "fp32", **dict.fromkeys(tensors, kind)}
        found = compiled(kernels._dropout_kernel, capability, types, constants, {*tensors, "count"})
        assert ".local" not in found.asm["ptx"] and spilled_bytes(found, capability, tmp_path) == 0
        assert writes_mask or not re.search(r"(ld|st)\.global\.b16", found.asm["ptx"]), "one number at a time"


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # what triton 3.10 will do
@pytest.mark.parametrize("capability", CARDS)
def test_cross_entropy_compiles_for_each_card(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe_cli.kernels import pointwise_triton as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kind in ("*bf16", "*fp32"):
        types = {"logits": kind, "out": kind, "targets": "*i64", "factors": "*fp32", "parts": "*fp64"}
        numbers = {"smoothing": "fp32", "scale": "fp32"}
        constants = {"HAS_FACTORS": True, "SMOOTHS": True, "BLOCK": kernels.VOCABULARY_BLOCK}
        aligned = {*types, "vocabulary", "row_stride"}
        found = compiled(
            kernels._cross_entropy_kernel, capability, {**types, **numbers}, constants, aligned, num_warps=8
        )
        assert ".local" not in found.asm["ptx"] and spilled_bytes(found, capability, tmp_path) == 0
