"""What `plan` believes that a block launches, against the ledger: operators, products, traffic and FLOPs.

    python scripts/plan_ledger.py                              a model of each shipped family, 4,096 tokens
    python scripts/plan_ledger.py --all                        every model that a shipped recipe trains
    python scripts/plan_ledger.py --only Qwen/Qwen3-8B --tokens 512

One row for each kind of block, LoRA r 16 and full, weights in bfloat16 and, for LoRA, in 4 bit. The ledger is
`tests/support/launches.py`: a block at its real width on meta tensors, `kernels: auto`, for a card of compute
capability 8.9. `plan`'s counts are those of `costs/block_work.py`. A cell is `plan / ledger`, forward and backward;
what is more than 3 % off is marked with `!`. Launches equal operators where no kernel loops; then a cell has both.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from roundpipe_cli.costs.block_work import PassWork, Tally, block_work
from roundpipe_cli.costs.find_model import figures_of, shipped_architecture
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.model.fused import find_fused_ops
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.split import split_model
from scripts.gpu_checks.models import configuration
from tests.support.launches import BlockLaunches, Launches, block_launches

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
CAPABILITY = (8, 9)
RANK = 16
TOLERANCE = 0.03
CASES = (("lora", False), ("lora", True), ("full", False))
"""(method, in 4 bit); full training refuses packed weights."""
NOT_SHIPPED = {"sliding_window": None, "norm_topk_prob": True}
"""What the models' configurations say, other than transformers' defaults for Mistral and Qwen3 with experts."""
LAYERS = {"gemma3_text": 6, "qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}
"""Blocks after which kinds repeat; 2 in other families."""


@dataclass(frozen=True)
class Compared:
    """One kind of block by both."""

    block: int
    """The first of its kind."""
    plan: Tally
    ledger: BlockLaunches

    def pairs(self) -> Iterator[tuple[str, str, float, float]]:
        """(pass, what, plan's, the ledger's)."""
        passes: tuple[tuple[str, PassWork, Launches], ...] = (
            ("forward", self.plan.forward, self.ledger.forward),
            ("backward", self.plan.backward, self.ledger.backward),
        )
        for name, work, launches in passes:
            yield name, "operators", work.operators, launches.num_operators
            yield name, "launches", work.operators, launches.num_launches
            yield name, "products", work.products, launches.num_products
            yield name, "bytes", work.traffic_bytes, launches.traffic_bytes
            yield name, "FLOPs", work.product_flops, launches.product_flops

    def off(self) -> list[str]:
        """What is more than `TOLERANCE` off."""
        return [
            f"{name} {what}: plan {ours:.4g}, ledger {truth:.4g}"
            for name, what, ours, truth in self.pairs()
            if is_off(ours, truth)
        ]


def is_off(ours: float, truth: float) -> bool:
    return abs(ours - truth) > TOLERANCE * truth


def shipped_models() -> dict[str, str]:
    """Hub id whose figures are shipped -> model type, of all recipes."""
    found = {}
    for path in sorted(RECIPES.rglob("*.yaml")):
        name = re.search(r"^model: (\S+)", path.read_text(), re.MULTILINE)
        known = figures_of(name[1]) if name else None
        if name and known is not None:
            found[name[1]] = str(known[0]["model_type"])
    return found


def compare(
    model: str, method: str, in_4bit: bool, tokens: int, *, by_libraries: bool = False, dropout: float = 0.0
) -> list[Compared]:
    """Each kind of block of a shipped model, by both.

    Args:
        by_libraries: the ledger's with transformers' and PEFT's own operators.
        dropout: of adapters' inputs.
    """
    known = figures_of(model)
    assert known is not None, model
    figures: dict[str, Any] = {**NOT_SHIPPED, **known[0], "vocab_size": 1024}
    figures["num_hidden_layers"] = LAYERS.get(figures["model_type"], 2)
    skeleton = build_skeleton(configuration(figures), torch.bfloat16)
    split = split_model(skeleton)
    if method == "lora":
        add_lora(skeleton, LoraSettings(RANK, alpha=RANK, dropout=dropout), dtype=torch.bfloat16, base_name="ledger")
    fused = None if by_libraries else find_fused_ops(skeleton, split)
    packed = "4bit" if in_4bit else None
    architecture = shipped_architecture(model)
    assert architecture is not None
    how = {"method": method, "lora_r": RANK, "lora_dropout": dropout, "packed_as": packed}
    settings = TrainingSettings(max_seq_length=tokens, **how)  # type: ignore[arg-type]
    return [
        Compared(one.blocks[0], block_work(architecture, architecture.blocks[one.blocks[0]], settings), one)
        for one in block_launches(skeleton, split, tokens, CAPABILITY, fused, packed)  # type: ignore[arg-type]
    ]


def cell(ours: float, truth: float) -> str:
    def short(value: float) -> str:
        return f"{value:,.0f}" if value < 1e6 else f"{value / 1e9:.2f}G" if value < 1e12 else f"{value / 1e12:.3f}T"

    return f"{short(ours)} / {short(truth)}{' !' if is_off(ours, truth) else ''}"


def row(model: str, method: str, in_4bit: bool, one: Compared) -> str:
    cells = [model, method, "4 bit" if in_4bit else "bf16", str(one.block)]
    found = {(name, what): (ours, truth) for name, what, ours, truth in one.pairs()}
    for what in ("operators", "products", "bytes", "FLOPs"):
        cells += [cell(*found[name, what]) for name in ("forward", "backward")]
    if found["forward", "launches"] != found["forward", "operators"]:
        cells[4] += f" ({found['forward', 'launches'][1]:,.0f} launches)"
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every model, not one of each family")
    parser.add_argument("--only", action="append", help="a hub id, whose figures are shipped")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    known = shipped_models()
    one_each = {model_type: model for model, model_type in reversed(known.items())}
    models = args.only or (list(known) if args.all else sorted(one_each.values()))
    passes = "forward | backward"
    print(f"| model | method | weights | block | operators: {passes} | products: {passes} | traffic: {passes} "
          f"| FLOPs: {passes} |\n|---|---|---|---|" + "---:|" * 8)  # fmt: skip
    num_off = num_cells = 0
    for model in models:
        for method, in_4bit in CASES:
            for one in compare(model, method, in_4bit, args.tokens):
                print(row(model, method, in_4bit, one), flush=True)
                num_off, num_cells = num_off + len(one.off()), num_cells + len(list(one.pairs()))
    print(f"\n{num_off} of {num_cells} figures are more than {TOLERANCE:.0%} off")
    return 1 if num_off else 0


if __name__ == "__main__":
    sys.exit(main())
