"""Frozen weights in FP8: unpacked to the processor's bits, their products, and the time of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from roundpipe_cli.kernels.fp8_linear import MIN_CAPABILITY, Fp8Weight, fp8_linear, scaled_product, takes_fp8
from roundpipe_cli.model.packed_weights import PackedParameter, packed_bytes, quantize
from scripts.gpu_checks.correctness import ROUNDED, same_as_processor
from scripts.gpu_checks.place import Check, CheckPlace, Figures, SkippedCheckError, check, skip_unless_real
from tests.support.simulated_cases import Case

SIZES = {"tiny": ((64, 128, 96),), "full": ((8192, 4096, 14336), (8192, 14336, 4096), (2048, 4096, 4096))}
"""(tokens, in, out); full: layers of Llama-3.1-8B."""
REPEATS = 20
PRODUCTS = Case("llama", "lora", {"packed_as": "fp8", "fp8_products": True, "dtype": torch.bfloat16}, bound=ROUNDED)


def checks(place: CheckPlace) -> Iterator[Check]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield check(f"unpacking, {str(dtype).removeprefix('torch.')}", unpacking, place, dtype)
    yield check("products", products, place)
    yield check("a step with products in FP8", step, place)
    for sizes in SIZES[place.scale]:
        yield check(f"time, {' x '.join(map(str, sizes))}", compared, place, sizes, limit_s=120.0)


def require_products(place: CheckPlace) -> torch.device:
    """The first GPU.

    Raises:
        SkippedCheckError: there is none that multiplies in FP8.
    """
    skip_unless_real(place, "a product in FP8")
    if not takes_fp8(torch.cuda.get_device_capability(place.first)):
        raise SkippedCheckError("products in FP8 need compute capability {}.{} or newer".format(*MIN_CAPABILITY))
    torch.cuda.set_device(place.first)
    return torch.device("cuda", place.first)


def made(shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> PackedParameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(shape[1] ** -0.5).to(dtype)
    packed = torch.zeros(packed_bytes(values.shape, "fp8"), dtype=torch.uint8)
    quantize(values, packed, "fp8")
    return PackedParameter.of(packed.to(device), values.shape, dtype, "fp8")


def unpacking(place: CheckPlace, dtype: torch.dtype) -> Figures:
    """A card gives the processor's bits."""
    skip_unless_real(place, "a conversion by a card")
    found = made((200, 328), dtype, torch.device("cuda", place.first)).dequantized()
    assert torch.equal(found.cpu(), made((200, 328), dtype, "cpu").dequantized())
    return {"same_bits": True}


def products(place: CheckPlace) -> Figures:
    """Against the processor's product of the same rounded numbers in float32, no further off than bfloat16 rounds; the
    gradient of the input."""
    device = require_products(place)
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight, host = made((176, 256), torch.bfloat16, device), made((176, 256), torch.bfloat16, "cpu")
    exact = scaled_product(x.float(), *host.fp8_parts())  # rounds the same inputs the same way
    inputs = x.to(device).requires_grad_()
    y = fp8_linear(inputs, Fp8Weight(*weight.fp8_parts(), weight.dequantized), None)
    (gradient,) = torch.autograd.grad(y, inputs, y.detach())
    eager = y.detach() @ weight.dequantized()
    errors = {
        "result": float((y.detach().cpu().float() - exact).norm() / exact.norm()),
        "gradient": float((gradient - eager).norm() / eager.norm()),
    }
    assert errors["result"] < 4e-3 and errors["gradient"] == 0.0, errors
    return {"errors": errors}


def step(place: CheckPlace) -> Figures:
    """Loss and gradients of a step against the processor's."""
    require_products(place)
    return same_as_processor(place, "fp8 products", PRODUCTS, place.pairs[0])


def compared(place: CheckPlace, sizes: tuple[int, int, int]) -> Figures:
    """Milliseconds of a product in bfloat16, of unpacking alone, of both, and of the product in FP8 with its rounding,
    in turn."""
    device = require_products(place)
    tokens, width, columns = sizes
    weight = made((columns, width), torch.bfloat16, device)
    codes, scales = weight.fp8_parts()
    whole, x = weight.dequantized(), torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    ways: dict[str, Callable[[], object]] = {
        "bfloat16": lambda: torch.mm(x, whole.t()),
        "unpacking": weight.dequantized,
        "unpacking, bfloat16": lambda: torch.mm(x, weight.dequantized().t()),
        "FP8": lambda: scaled_product(x, codes, scales),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, run in ways.items():
            times[name].append(seconds(run))
    return {"milliseconds": {name: 1e3 * sorted(found)[len(found) // 2] for name, found in times.items()}}


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s
