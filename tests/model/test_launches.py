"""Launches of a block: what counts, and the counts of three families at their real width, on meta tensors."""

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
from tests.support.launches import LaunchCounter, block_launches
from tests.support.versions import at_least

TOKENS = 512
EXPECTED = {
    ("qwen3", "lora", "auto"): (37, 68),
    ("qwen3", "full", "auto"): (23, 48),
    ("gpt_oss", "lora", "auto"): (71, 99),
    ("gpt_oss", "full", "reference"): (81, 141),
    ("gemma3_text", "lora", "auto"): (45, 76),
    ("gemma3_text", "full", "auto"): (31, 66),
}
"""Operators of the first block at few tokens, where no window needs a mask: forward, and backward with one add for each
trained parameter. What transformers launches is counted once."""


def counted(run: Any) -> tuple[int, int, int]:
    with LaunchCounter() as counter:
        run()
    found = counter.launches
    return found.num_launches, found.traffic_bytes, found.num_host_waits


def test_what_counts_as_a_launch() -> None:
    """Views and allocations are none; casts, copies and adds in place are; a product has no traffic."""
    one = torch.empty(4, 8, device="meta")
    assert counted(lambda: one.t().reshape(4, 8)[1:].expand(3, 8)) == (1, 2 * 4 * 32, 0)  # the reshape copies
    assert counted(lambda: torch.empty_like(one)) == (0, 0, 0)
    assert counted(lambda: one.to(torch.bfloat16)) == (1, 4 * 32 + 2 * 32, 0)
    assert counted(lambda: one.add_(1)) == (1, 2 * 4 * 32, 0)
    assert counted(lambda: one @ one.t()) == (1, 0, 0)
    assert counted(lambda: one + one[:1].expand(4, 8)) == (1, 4 * (32 + 8 + 32), 0)
    known = torch.ones(4)
    assert counted(lambda: known.sum().item())[2] == counted(lambda: known.nonzero())[2] == 1, "the host waits"


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
    """Of the first block; `more`: `rank`, `dtype`, `dropout`, or changes of the configuration."""
    rank, dtype = more.pop("rank", 16), more.pop("dtype", torch.bfloat16)
    settings = LoraSettings(r=rank, alpha=16, dropout=more.pop("dropout", 0.0))
    figures = shipped(FAMILIES[model_type], num_hidden_layers=2, vocab_size=64, **more)
    model = build_skeleton(configuration(figures), dtype)
    split = split_model(model)
    if method == "lora":
        add_lora(model, settings, dtype=dtype, base_name="counted")
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


def test_dropout_is_one_launch_more_for_each_adapted_layer_and_pass() -> None:
    """Qwen3-8B, 7 adapted layers. At 8,192 tokens it was 400, 400 and 82 launches."""
    found = launches("qwen3", "lora", 8192, kernels="auto", dropout=0.05)
    assert passes(found) == [(37 + 7, 0), (37 + 7, 0), (68 + 7, 0)]
    width = 8192 * (5 * 4096 + 4096 + 12288) * 2
    plain = launches("qwen3", "lora", 8192, kernels="auto")
    assert found.forward.traffic_bytes == plain.forward.traffic_bytes + 2 * width
    assert found.backward.traffic_bytes == plain.backward.traffic_bytes + 5 * width


def test_experts_are_a_loop_on_cards_without_a_grouped_kernel() -> None:
    """sm90: one launch for all experts. Elsewhere torch makes one product per expert, and the host waits for their
    sizes."""
    one_kernel = launches("qwen3_moe", "full", 64)
    loop = launches("qwen3_moe", "full", 64, (8, 9))
    assert one_kernel.forward.num_host_waits == 0 < loop.forward.num_host_waits
    assert loop.forward.num_launches >= one_kernel.forward.num_launches + 2 * 127


def passes(found: Any) -> list[tuple[int, int]]:
    return [(one.num_launches, one.num_host_waits) for one in (found.forward, found.recompute, found.backward)]


@pytest.mark.parametrize(
    ("method", "capability", "more", "ours"),
    [
        ("lora", (8, 6), {}, 4),
        ("full", (12, 0), {}, 2),
        pytest.param("lora", (9, 0), {"dtype": torch.float16}, 4, marks=pytest.mark.sweep),
        ("lora", (9, 0), {"rank": 4}, 4),  # the experts have rank 1, which torch's own kernel does not take
    ],
)
def test_our_kernels_take_all_experts_at_once(method: str, capability: tuple[int, int], more: Any, ours: int) -> None:
    """128 experts launch what 8 do, the host never waits, and it is no more than on sm90. It was 860 launches and 6
    waits forward for adapters on sm86, and adapted weights made whole at every call where r was no multiple of 8."""
    found = launches("qwen3_moe", method, 64, capability, kernels="auto", **more)
    few = launches("qwen3_moe", method, 64, capability, kernels="auto", num_experts=8, **more)
    assert passes(found) == passes(few)
    assert all(waits == 0 for _, waits in passes(found)), found
    theirs = passes(launches("qwen3_moe", method, 64))
    assert all(one[0] <= other[0] for one, other in zip(passes(found), theirs, strict=True)), (found, theirs)
    products = found.forward.operators
    assert products["grouped_mm"] + products["grouped_mm_lora"] == ours and "baddbmm" not in products


def test_the_script_prints_a_row_for_each_kind_of_block(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "scripts" / "ledger"
    spec = importlib.util.spec_from_loader("ledger", importlib.machinery.SourceFileLoader("ledger", str(path)))
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kinds = script.counted("gemma3_text", "lora", 64, (9, 0), kernels="auto")
    rows = [script.row("gemma3_text", "lora", "auto", one) for one in kinds]
    assert len(rows) == 1 and rows[0].startswith("| google/gemma-3-12b-pt | lora | auto | 0, 1, 2 | 45 | ")
