"""Our Triton kernels: grouped products of experts against float64 and beside torch's own; dropout's bits and rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from roundpipe_cli.kernels.capability import MIN_CAPABILITY, loops_over_groups, why_no_triton
from roundpipe_cli.kernels.cross_entropy import adds_products, cross_entropy, cross_entropy_, product_sum
from roundpipe_cli.kernels.grouped_mm import AdaptedProduct
from roundpipe_cli.kernels.random_masks import Draw, drop, keep_mask
from scripts.gpu_checks.place import Check, CheckPlace, Figures, SkippedCheckError, check, skip_unless_real

COUNTS = (300, 0, 1, 129, 0, 64, 18)
"""Tokens of each expert: uneven, and none for some."""
SIZES = {"tiny": (512, 8, 256, 192), "full": (65536, 128, 2048, 1536)}
"""(pairs, experts, in, out); full: Qwen3-30B-A3B, gate and up, 8,192 tokens."""
REPEATS = 10
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""x [S, in], W [E, in, out], A [E, r, in], B [E, out, r]"""


def checks(place: CheckPlace) -> Iterator[Check]:
    for dtype in (torch.bfloat16, torch.float16):
        for rank in (4, 16):
            yield check(f"parity, {_short(dtype)}, rank {rank}", parity, place, dtype, rank)
    for dtype in (torch.bfloat16, torch.float16):
        yield check(f"time, {_short(dtype)}", compared, place, dtype, limit_s=180.0)
    yield check("dropout's bits, and its rate", dropout, place)
    for dtype in (torch.float32, torch.bfloat16):
        yield check(f"loss, {_short(dtype)}", loss, place, dtype)
    yield check("sums of the head's gradients", sums, place)


def require_kernels(place: CheckPlace) -> torch.device:
    """The first GPU.

    Raises:
        SkippedCheckError: there is none that runs the kernels.
    """
    skip_unless_real(place, "a Triton kernel")
    missing = why_no_triton()
    if missing is not None:
        raise SkippedCheckError(missing)
    if torch.cuda.get_device_capability(place.first) < MIN_CAPABILITY:
        raise SkippedCheckError("the kernels need compute capability 8.0 or newer")
    torch.cuda.set_device(place.first)
    return torch.device("cuda", place.first)


def made(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int], rank: int) -> Inputs:
    """Random tensors; the weights lie as experts hold them, [E, out, in]."""
    pairs, experts, width, columns = sizes
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)

    x, w = draw(pairs, width), draw(experts, columns, width).transpose(1, 2)
    return (
        x.requires_grad_(),
        w,
        draw(experts, rank, width).requires_grad_(),
        draw(experts, columns, rank).requires_grad_(),
    )


def looped(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x W + (x A^T) B^T, one expert after the other."""
    parts, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        rows = x[start:end]
        parts.append(rows @ w[expert] + (rows @ a[expert].t()) @ b[expert].t())
        start = end
    return torch.cat(parts)


def by_torch(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same by torch's grouped product: one kernel or a loop, by card and type."""
    low = functional.grouped_mm(x, a.transpose(1, 2), offs=ends)
    return functional.grouped_mm(x, w, offs=ends) + functional.grouped_mm(low, b.transpose(1, 2), offs=ends)


def ours(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = AdaptedProduct.apply(x, w, a, b, ends, 1.0)
    return result


def results(product: Callable[..., torch.Tensor], inputs: Inputs, ends: torch.Tensor) -> dict[str, torch.Tensor]:
    x, w, a, b = inputs
    y = product(*inputs, ends)
    gradient = torch.sin(torch.arange(y.numel(), device=y.device)).view(y.shape).bfloat16().to(y.dtype)
    found = torch.autograd.grad(y, [x, a, b], gradient)
    return {"result": y.detach(), "x": found[0], "a": found[1], "b": found[2]}


def parity(place: CheckPlace, dtype: torch.dtype, rank: int) -> Figures:
    """Errors against float64, at most twice those of one product after the other; the same bits twice."""
    device = require_kernels(place)
    inputs = made(device, dtype, (sum(COUNTS), len(COUNTS), 200, 328), rank)
    ends = torch.tensor(COUNTS, device=device).cumsum(0).to(torch.int32)
    x, w, a, b = (one.detach().double() for one in inputs)
    exact = results(looped, (x.requires_grad_(), w, a.requires_grad_(), b.requires_grad_()), ends)
    eager, found, again = (results(product, inputs, ends) for product in (looped, ours, ours))
    errors = {}
    for name, value in exact.items():
        norm = value.norm()
        errors[name] = [float((one[name].double() - value).norm() / norm) for one in (found, eager)]
        assert errors[name][0] <= 2 * errors[name][1], f"{name}: error {errors[name][0]}, eager {errors[name][1]}"
        assert torch.equal(found[name], again[name]), f"{name}: other bits the second time"
    empty = torch.tensor(COUNTS, device=device) == 0
    assert not found["a"][empty].any() and not found["b"][empty].any(), "a gradient for experts without tokens"
    return {"errors": errors}


def compared(place: CheckPlace, dtype: torch.dtype) -> Figures:
    """Milliseconds forward, and of both passes, ours and torch's in turn; seconds of the first call, with compiling."""
    device = require_kernels(place)
    sizes = SIZES[place.scale]
    inputs = made(device, dtype, sizes, 16)
    shares = torch.rand(sizes[1], generator=torch.Generator().manual_seed(1)) + 0.2
    counts = (shares / shares.sum() * sizes[0]).long()
    counts[-1] += sizes[0] - counts.sum()
    ends = counts.cumsum(0).to(device, torch.int32)
    first_s = seconds(lambda: results(ours, inputs, ends))
    times: dict[str, list[float]] = {"ours": [], "torch": [], "ours, both": [], "torch, both": []}
    for _ in range(REPEATS):
        for name, product in (("ours", ours), ("torch", by_torch)):
            with torch.no_grad():
                times[name].append(seconds(lambda product=product: product(*inputs, ends)))
            times[f"{name}, both"].append(seconds(lambda product=product: results(product, inputs, ends)))
    medians = {name: 1e3 * sorted(found)[len(found) // 2] for name, found in times.items()}
    loops = loops_over_groups(torch.cuda.get_device_capability(device), dtype)
    return {"milliseconds": medians, "first_s": first_s, "torch_loops": loops}


DROPPED = {"tiny": (70, 1001), "full": (8192, 4096)}
"""Tokens and features."""


def dropout(place: CheckPlace) -> Figures:
    """The processor's bits, and bytes a second of dropping inputs (2 for each byte of them) and of its backward (5)."""
    device, draw = require_kernels(place), Draw(0xF123456789ABCDEF, 0.95)
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(DROPPED[place.scale], generator=generator).bfloat16() for _ in range(3)]
    x, total, product = (one.to(device) for one in host)
    found = (
        keep_mask(x.shape, draw.keep, draw.key, device),
        drop(x, draw),
        drop(x, draw, total, product, scale=0.5),
    )
    mask = keep_mask(x.shape, draw.keep, draw.key, torch.device("cpu"))
    expected = mask, drop(host[0], draw), drop(host[0], draw, host[1], host[2], scale=0.5)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True)), "other bits"
    error = float((total.cpu().double() - host[1].double()).norm() / host[1].double().norm())
    assert error <= 1e-2, f"the sum beside it is {error:.1e} off"
    forward_s = sorted(seconds(lambda: drop(x, draw)) for _ in range(REPEATS))[REPEATS // 2]
    backward_s = sorted(seconds(lambda: drop(x, draw, total, product, scale=0.5)) for _ in range(REPEATS))
    return {"bytes_per_s": [2 * x.nbytes / forward_s, 5 * x.nbytes / backward_s[REPEATS // 2]]}


def loss(place: CheckPlace, dtype: torch.dtype) -> Figures:
    """Gradients of a chunk of logits against float64, at most twice the error of torch's operators; both rates."""
    device = require_kernels(place)
    rows, vocabulary = (8, 5003) if place.scale == "tiny" else (1024, 151_936)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator, device=device).mul_(4).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator, device=device)

    def by_torch() -> torch.Tensor:
        return cross_entropy(logits, targets, 0.0)[1].mul_(0.5).to(dtype)

    found, again = logits.clone(), logits.clone()
    first, second = (cross_entropy_(one, targets, None, 0.0, 0.5) for one in (found, again))
    assert torch.equal(found, again) and torch.equal(first, second), "other bits the second time"
    some = slice(0, 64)
    exact = torch.softmax(logits[some].double(), dim=-1)
    exact.scatter_add_(1, targets[some, None], exact.new_full((exact.shape[0], 1), -1.0)).mul_(0.5)
    errors = [float((one[some].double() - exact).norm() / exact.norm()) for one in (found, by_torch())]
    assert errors[0] <= 2 * errors[1] + 1e-6, f"error {errors[0]}, torch's {errors[1]}"
    times = [sorted(map(seconds, [run] * REPEATS))[REPEATS // 2]
             for run in (lambda: cross_entropy_(again, targets, None, 0.0, 0.5), by_torch)]  # fmt: skip
    return {"errors": errors, "ours_s": times[0], "torch_s": times[1]}


def sums(place: CheckPlace) -> Figures:
    """The gradient of a head's matrix, added within the product: against float64, beside a product and a sum."""
    device = require_kernels(place)
    rows, vocabulary, hidden = (8, 503, 16) if place.scale == "tiny" else (1024, 49_152, 2048)
    above, x = (torch.randn(rows, n, device=device, dtype=torch.bfloat16) for n in (vocabulary, hidden))
    assert adds_products(x), "torch has no such product here; heads add up rounded gradients"
    total = product_sum(product_sum(None, above.t(), x), above.t(), x)
    exact = 2 * above[:, :64].double().t() @ x.double()
    error = float((total[:64].double() - exact).norm() / exact.norm())
    assert error <= 1e-5, f"error {error}"
    ways = (lambda: product_sum(total, above.t(), x), lambda: total.add_(torch.mm(above.t(), x)))
    times = [sorted(map(seconds, [run] * REPEATS))[REPEATS // 2] for run in ways]
    return {"error": error, "within_s": times[0], "beside_s": times[1]}


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
