"""Kernels of grouped products compiled for cards that are not here: tensor cores, shared memory, no spills."""

from __future__ import annotations

import re
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


def compiled(kernel: Any, capability: int, constants: dict[str, Any], tiles: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {**constants, **dict.fromkeys(ONES, 1)}
    types = {
        **dict.fromkeys(POINTERS, "*bf16"),
        "ends": "*i32",
        "scale": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in names},
        {(place,): constants[name] for place, name in enumerate(names) if name in constants},
        {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in ALIGNED},
    )
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [86, *(pytest.param(one, marks=pytest.mark.sweep) for one in (80, 89, 90, 120))])
def test_the_largest_tiles_compile_for_each_card(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that asks for more shared memory than a card has fails when it is first launched there."""
    from roundpipe_cli.kernels import grouped_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tiles = grouped_triton.choose_tiles(512, 1536, torch.bfloat16)
    sizes = {"M": tiles.m, "N": tiles.n, "DEPTH": tiles.depth}
    rows = {**sizes, "RANK": 32, "GROUPS": 128, "HAS_LOW": True}
    for kernel, constants in ((grouped_triton._grouped_mm_kernel, rows), (grouped_triton._grouped_outer_kernel, sizes)):
        found = compiled(kernel, capability, constants, tiles)
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
            assert tiles.shared_bytes * dtype.itemsize // 2 <= min(SHARED_BYTES.values())
            assert {tiles.m, tiles.n} <= {16, 32, 64, 128} and tiles == choose_tiles(rows, columns, dtype)
