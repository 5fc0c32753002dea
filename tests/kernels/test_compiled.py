"""Kernels compiled for cards that are not here: tensor cores, shared memory, nothing spilled."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # what triton 3.10 will do

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
"""Of a block, by capability (CUDA C++ programming guide, technical specifications)."""
POINTERS = {"x", "w", "low", "b", "out", "left", "right"}
ONES = {"x_column", "w_row", "low_column", "b_column", "left_column", "right_column"}
"""Strides of tensors as experts have them."""
ALIGNED = POINTERS | {"width", "columns", "height", "x_row", "w_group", "w_column", "left_row", "right_row"}


@pytest.fixture(params=[86, *(pytest.param(one, marks=pytest.mark.sweep) for one in SHARED_BYTES if one != 86)])
def capability(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return int(request.param)


def compiled(
    kernel: Any, capability: int, types: Mapping[str, str], constants: Mapping[str, Any], aligned: Any, **options: int
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
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def test_the_largest_tiles_of_grouped_products_compile(capability: int) -> None:
    """A kernel that asks for more shared memory than a card has fails when it is first launched there."""
    from roundpipe_cli.kernels import grouped_triton

    tiles = grouped_triton.choose_tiles(512, 1536, torch.bfloat16)
    sizes = {"M": tiles.m, "N": tiles.n, "DEPTH": tiles.depth, **dict.fromkeys(ONES, 1)}
    rows = {**sizes, "RANK": 32, "GROUPS": 128, "HAS_LOW": True}
    types = {**dict.fromkeys(POINTERS, "*bf16"), "ends": "*i32", "scale": "fp32"}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    for kernel, constants in ((grouped_triton._grouped_mm_kernel, rows), (grouped_triton._grouped_outer_kernel, sizes)):
        found = compiled(kernel, capability, types, constants, ALIGNED, **options)
        assert re.search(r"\b(mma\.sync|wgmma)", found.asm["ptx"]) and ".local" not in found.asm["ptx"]
        assert "cp.async" in found.asm["ptx"], "operands are not loaded ahead"
        assert found.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiles_of_all_sizes_fit(dtype: torch.dtype) -> None:
    """Both operands' tiles, in as many copies as are loaded ahead; powers of two of 16 and more."""
    from roundpipe_cli.kernels.grouped_triton import choose_tiles

    for rows in (1, 16, 17, 100, 10_000):
        for columns in (1, 12, 64, 200, 100_000):
            tiles = choose_tiles(rows, columns, dtype)
            num_bytes = (tiles.m + tiles.n) * tiles.depth * tiles.num_stages * dtype.itemsize
            assert num_bytes <= min(SHARED_BYTES.values())
            assert {tiles.m, tiles.n} <= {16, 32, 64, 128} and tiles == choose_tiles(rows, columns, dtype)


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


def test_dropout_compiles(capability: int, tmp_path: Path) -> None:
    from roundpipe_cli.kernels import pointwise_triton as kernels

    tensors = ("x", "out", "total", "product")
    for kind, writes_mask, adds in (("*i8", True, False), *((one, False, True) for one in ("*bf16", "*fp32"))):
        constants = {"BLOCK": kernels.BLOCK, "ROWS": kernels.ROWS, "WRITES_MASK": writes_mask, "ADDS": adds}
        types = {"scale": "fp32", **dict.fromkeys(tensors, kind)}
        found = compiled(kernels._dropout_kernel, capability, types, constants, {*tensors, "count"}, num_warps=4)
        assert ".local" not in found.asm["ptx"] and spilled_bytes(found, capability, tmp_path) == 0
        assert writes_mask or not re.search(r"(ld|st)\.global\.b16", found.asm["ptx"]), "one number at a time"


def test_cross_entropy_compiles(capability: int, tmp_path: Path) -> None:
    from roundpipe_cli.kernels import pointwise_triton as kernels

    for kind in ("*bf16", "*fp32"):
        types = {"logits": kind, "out": kind, "targets": "*i64", "factors": "*fp32", "parts": "*fp64"}
        aligned, numbers = {*types, "vocabulary", "row_stride"}, {"smoothing": "fp32", "scale": "fp32"}
        constants = {"HAS_FACTORS": True, "SMOOTHS": True, "BLOCK": kernels.VOCABULARY_BLOCK}
        kernel = kernels._cross_entropy_kernel
        found = compiled(kernel, capability, types | numbers, constants, aligned, num_warps=8)
        assert ".local" not in found.asm["ptx"] and spilled_bytes(found, capability, tmp_path) == 0


def test_unpacking_compiles(capability: int, tmp_path: Path) -> None:
    """MXFP4 and FP8 blocks: many weights of a thread are written at once, on cards without 8-bit floats too."""
    from roundpipe_cli.kernels import pointwise_triton as kernels

    tensors = {"codes": "*u8", "values": "*fp32", "out": "*bf16", "count": "i64"}
    for scales, per_byte, group in (("*u8", 2, 32), ("*fp32", 1, 128)):
        constants = {"PER_BYTE": per_byte, "GROUP": group, "HAS_EXPONENTS": per_byte == 2, "BLOCK": kernels.BLOCK}
        types = {**tensors, "scales": scales}
        found = compiled(kernels._unpack_kernel, capability, types, constants, types.keys(), num_warps=4)
        assert ".local" not in found.asm["ptx"] and spilled_bytes(found, capability, tmp_path) == 0
        assert not re.search(r"st\.global\.b16", found.asm["ptx"]), "one weight at a time"
