"""Launches of a block: the counts of three families at their real width, on meta tensors."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.model.fused import find_fused_ops
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.split import split_model
from scripts.gpu_checks.models import FAMILIES, configuration, shipped
from tests.support.launches import block_launches
from tests.support.versions import at_least

TOKENS = 512
EXPECTED = {
    **{("qwen3", "lora", "auto"): (37, 68), ("qwen3", "full", "auto"): (23, 48), ("gpt_oss", "lora", "auto"): (71, 99)},
    **{("gpt_oss", "full", "reference"): (81, 141), ("gemma3_text", "lora", "auto"): (45, 76)},
    ("gemma3_text", "full", "auto"): (31, 66),
}
"""Operators of the first block at few tokens, where no window needs a mask: forward, and backward with one add for each
trained parameter. What transformers launches is counted once."""


@functools.cache
def launches(
    model_type: str,
    method: str,
    tokens: int,
    capability: tuple[int, int] = (9, 0),
    *,
    kernels: str = "reference",
    **more: Any,
) -> Any:
    """Of the first block; `more`: `rank`, `dtype`, or changes of the configuration."""
    rank, dtype = more.pop("rank", 16), more.pop("dtype", torch.bfloat16)
    figures = shipped(FAMILIES[model_type], num_hidden_layers=2, vocab_size=64, **more)
    model = build_skeleton(configuration(figures), dtype)
    split = split_model(model)
    if method == "lora":
        add_lora(model, LoraSettings(r=rank, alpha=16), dtype=dtype, base_name="counted")
    fused = find_fused_ops(model, split) if kernels == "auto" else None
    return block_launches(model, split, tokens, capability, fused)[0]


@pytest.mark.parametrize(("model_type", "method", "kernels"), EXPECTED)
def test_a_blocks_launches(model_type: str, method: str, kernels: str) -> None:
    """The number is the same at any length, and recompute is forward once more; no host waits."""
    if model_type == "gpt_oss" and not at_least("transformers", "5.18"):
        pytest.skip("transformers 5.17 masks rows of experts by five operators more")
    found = launches(model_type, method, TOKENS, kernels=kernels)
    counts = found.forward.num_launches, found.backward.num_launches
    assert counts == EXPECTED[model_type, method, kernels], (found.forward.operators, found.backward.operators)
    assert found.recompute.num_launches == counts[0]
    assert found.forward.num_host_waits + found.recompute.num_host_waits + found.backward.num_host_waits == 0
    assert found.host_s > 0


def test_traffic_of_a_block_at_full_length() -> None:
    """Qwen3-8B, LoRA r 16, 8,192 tokens: bytes that are no products, a quarter of 9.51 and 16.44 GB without ours."""
    found = launches("qwen3", "lora", 8192, kernels="auto")
    assert found.forward.traffic_bytes == pytest.approx(2.41e9, rel=0.01)
    assert found.backward.traffic_bytes == pytest.approx(3.94e9, rel=0.01)


def passes(found: Any) -> list[tuple[int, int]]:
    return [(one.num_launches, one.num_host_waits) for one in (found.forward, found.recompute, found.backward)]


@pytest.mark.parametrize(
    ("method", "capability", "more", "ours"),
    [
        *(("lora", (8, 6), {}, 4), ("full", (12, 0), {}, 2)),
        pytest.param("lora", (9, 0), {"dtype": torch.float16}, 4, marks=pytest.mark.sweep),
        ("lora", (9, 0), {"rank": 4}, 4),  # the experts have rank 1, which torch's own kernel does not take
    ],
)
def test_our_kernels_take_all_experts_at_once(method: str, capability: tuple[int, int], more: Any, ours: int) -> None:
    """128 experts launch what 8 do (860 before, and 6 waits), the host never waits, and it is no more than on sm90."""
    found = launches("qwen3_moe", method, 64, capability, kernels="auto", **more)
    few = launches("qwen3_moe", method, 64, capability, kernels="auto", num_experts=8, **more)
    assert passes(found) == passes(few)
    assert all(waits == 0 for _, waits in passes(found)), found
    theirs = passes(launches("qwen3_moe", method, 64))
    assert all(one[0] <= other[0] for one, other in zip(passes(found), theirs, strict=True)), (found, theirs)
    products = found.forward.operators
    assert products["grouped_mm"] == ours and "baddbmm" not in products


def test_the_script_prints_a_row_for_each_kind_of_block(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "scripts" / "ledger"
    spec = importlib.util.spec_from_loader("ledger", importlib.machinery.SourceFileLoader("ledger", str(path)))
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kinds = script.counted("gemma3_text", "lora", 64, (9, 0), kernels="auto")
    rows = [script.row("gemma3_text", "lora", "auto", one) for one in kinds]
    assert len(rows) == 1 and rows[0].startswith("| google/gemma-3-12b-pt | lora | auto | 0, 1, 2 | 45 | ")
