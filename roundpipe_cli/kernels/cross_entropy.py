"""Cross entropy and its gradient in one kernel, which writes the gradient over the logits; the head's product sums.

    p = softmax(x)        parts = -log p of the target, and the mean of -log p over the vocabulary
    x becomes  f (p - (1 - s) [target] - s / V)        s: label smoothing, f: factor of the row times a scale

x [N, V], of any floating type; what is computed is float32, rounded once. Where Triton compiles for no card, torch's
operators compute the same in pieces.
"""

from __future__ import annotations

import torch

from roundpipe_cli.kernels.random_masks import has_kernel


def adds_products(like: torch.Tensor) -> bool:
    """Whether torch adds products of `like`'s type to a sum in float32, unrounded: NVIDIA's cards in 16 bit, but for
    float16 while its products add up in float16. Torch refuses those, and the switch is the whole process's: off for
    one product it would be off for what other threads issue meanwhile."""
    if like.device.type != "cuda" or torch.version.cuda is None or "dtype_out" not in torch.ops.aten.addmm.overloads():
        return False
    is_narrow = like.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
    return like.dtype in (torch.float16, torch.bfloat16) and not is_narrow


def product_sum(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`total` in float32 with the product of two matrices added to it; the product alone where there is none."""
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    found: torch.Tensor = torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    return found


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of logits [N, V], float32, whose exponentials sum to 1 however large the vocabulary.

    On the processor torch's own adds up one value after the other: of 152,000 words all probabilities were 5e-6 too
    large, and SmolLM2's gradients 4e-5 off, for its words' embeddings have much in common. Sums in a tree are not.
    """
    values = logits.float()
    largest = values.amax(dim=-1, keepdim=True)  # from which large logits lose nothing
    below = values - largest if values is logits else values.sub_(largest)
    for rows in below.split(4 if below.device.type == "cpu" else 128):  # small temporaries, in a processor's cache
        rows.sub_(rows.exp().sum(dim=-1, keepdim=True).log_())
    return below


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`parts` of `cross_entropy_`, and the gradients with factors of 1, float32 [N, V], by torch's operators."""
    log_probabilities = log_softmax(logits)
    picked = log_probabilities.gather(1, targets[:, None])
    parts = logits.new_zeros((2, logits.shape[0]), dtype=torch.float64)
    parts[0] = -picked[:, 0].double()
    if smoothing:
        parts[1] = -log_probabilities.double().mean(dim=-1)
    gradient = log_probabilities.exp_()  # softmax, in place
    gradient.scatter_add_(1, targets[:, None], torch.full_like(picked, smoothing - 1.0))
    return parts, gradient.sub_(smoothing / gradient.shape[1]) if smoothing else gradient


@torch.library.custom_op("roundpipe::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(
    logits: torch.Tensor, targets: torch.Tensor, factors: torch.Tensor | None, smoothing: float, scale: float
) -> torch.Tensor:
    """Write the gradients over `logits` [N, V], contiguous; targets int64 [N], factors float32 [N] or None.

    Returns `parts`, float64 [2, N]; the second row is zero without smoothing.
    """
    assert logits.is_contiguous()
    if has_kernel(logits):
        from roundpipe_cli.kernels.pointwise_triton import launch_cross_entropy

        return launch_cross_entropy(logits, targets, factors, smoothing=smoothing, scale=scale)
    parts, gradient = cross_entropy(logits, targets, smoothing)
    if factors is not None:
        gradient.mul_(factors[:, None])
    logits.copy_(gradient.mul_(scale))
    return parts


cross_entropy_.register_fake(lambda logits, *_: logits.new_empty((2, len(logits)), dtype=torch.float64))
