"""Rates that work reaches on a GPU nobody has measured: shares of its data sheet, one for each kind of work.

The shares are those of an RTX 4090 in published full fine-tuning (arXiv 2604.27085, float16 products that add up in
float16): with matrix products at 0.84 of the data sheet's rate, attention at 0.8 of what it reaches with sums in
float32, and everything else's traffic at the data sheet's bandwidth, layer times of Llama-3.1-8B and Qwen3-32B come
out within 3 %. Only `PRODUCTS_SHARE` is fitted, and each of the two models gives it within 3 %
(`tests/costs/test_cost_model.py`). Those runs launched transformers' own operators. That their bytes count, and
attention's share, was chosen with both models in view, so leaving one out tests the one number.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.costs.hardware import Accumulate, Device
from roundpipe_cli.costs.tally import PassWork, Product
from roundpipe_cli.costs.training import DType

PRODUCTS_SHARE = 0.84
"""Share of the data sheet's rate of products that add up in float16 (fitted)."""
EXACT_PRODUCTS_SHARE = 0.94
"""The same in float32, on cards that do this at half their rate, which is easy to keep fed (assumed)."""
FULL_RATE_SHARE = 0.70
"""The same on cards that do it at their full rate: their power limit binds first (assumed)."""
FLOAT32_SHARE = 0.85
"""Share of the data sheet's rate of float32 (assumed)."""
ATTENTION_SHARE, FULL_RATE_ATTENTION_SHARE = 0.8, 0.5
"""Fused attention adds up in float32 always (assumed, from arXiv 2307.08691 for cards with the full rate)."""


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOPs and bytes per second."""

    products: float
    attention: float
    memory: float

    def pass_s(self, work: PassWork, *, fused: bool = False) -> float:
        """Time of a pass over a block, without the unpacking of weights.

        A product takes the time of its arithmetic or of its memory, whichever is longer.

        Args:
            fused: believe what the fused operators of `kernels: auto` save, which no GPU has confirmed yet; the
                published runs had the libraries' own.
        """
        rest = work.traffic_bytes - work.unpacked_bytes + (0 if fused else work.library_bytes)
        products_s = sum(map(self.product_s, work.shapes))
        return products_s + work.attention_flops / self.attention + rest / self.memory

    def product_s(self, product: Product) -> float:
        """Time of a matrix product."""
        return max(product.flops / self.products, product.traffic_bytes / self.memory)


def rates_of(device: Device, dtype: DType, accumulate: Accumulate) -> Rates:
    """Rates of a device in this precision; a processor's are measured ones."""
    memory, exact = device.memory_bytes_per_s, device.fp32_accumulate_flops_per_s
    half = device.fp16_accumulate_flops_per_s
    if dtype == "float32" or device.is_cpu:
        rate = device.float32_flops_per_s if dtype == "float32" else exact
        reached = rate if device.is_cpu else FLOAT32_SHARE * rate
        return Rates(reached, reached, memory)
    products = min(EXACT_PRODUCTS_SHARE * exact, FULL_RATE_SHARE * half)
    if dtype == "float16" and accumulate == "fp16" and exact < half:
        products = PRODUCTS_SHARE * half
    return Rates(products, min(ATTENTION_SHARE * exact, FULL_RATE_ATTENTION_SHARE * half), memory)
