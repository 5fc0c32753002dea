"""The loss against a teacher of which each target's most probable tokens are known, and the mass of all others.

    p, q         teacher's and student's probabilities of K + 1 outcomes: the K tokens that the teacher kept, and all
                 others together as one, which is left out where the K tokens are the student's whole vocabulary
    p', q'       both at temperature t: p^(1/t) and q^(1/t), each divided by its sum
    kl           sum of p' (log p' - log q')
    loss         (1 - w) * cross entropy of the target + w * t^2 * kl           (w: `distill.weight`, t: `temperature`)

With the whole vocabulary kept, q' is softmax(logits / t) and kl the plain divergence (Hinton et al., arXiv
1503.02531). With fewer tokens kl at temperature 1 is a lower bound of that: how the teacher spreads the rest is not
known, so of the student's rest only the sum is changed. At another temperature the rest is raised to 1 / t as a whole.

Slopes with respect to the logits x, with r(v) = q(v) / q(rest), the student's spread within the rest:

    d kl / d x   (q'(i) - p'(i)) / t of a kept token i, (q'(rest) - p'(rest)) / t * r(v) of another token v

The teacher's log-probabilities are float16 on disk: each is off by at most 2^-11 of itself. From temperature 1 on, p'
is then off by at most 2^-11 times its entropy (total variation), so by 0.2 % with 64 tokens.

N targets, K kept tokens, V tokens in the student's vocabulary. No tensor of V columns is made beside the chunk's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roundpipe_cli.kernels.cross_entropy import log_softmax


@dataclass(frozen=True)
class TeacherScores:
    """A teacher's figures for N targets, and the loss that is made of them."""

    top_ids: torch.Tensor
    """int32 [N, K], different ones at each target's place."""
    top_log_probabilities: torch.Tensor
    """[N, K], of any floating type."""
    mass_left: torch.Tensor
    """float32 [N]: probability of all other tokens."""
    weight: float
    """Share of the divergence in the loss; the rest is cross entropy."""
    temperature: float

    @property
    def kl_factor(self) -> float:
        """Factor of the divergence in the loss: with t^2 its gradient has one size at all temperatures."""
        return self.weight * self.temperature**2


def compare(log_probabilities: torch.Tensor, teacher: TeacherScores) -> tuple[torch.Tensor, ...]:
    """The divergence and what its gradient is made of; `log_probabilities` [N, V], the student's, are written over.

    Returns:
        kl [N]; q' - p' and log q, both [N, K + 1] (or K); sums of what is then in `log_probabilities`, [N, 1] (or 0):
        r times them, 0 at kept tokens. All float64.
    """
    ids, left = teacher.top_ids.long(), teacher.mass_left.double()[:, None]
    kept = log_probabilities.gather(1, ids).double()
    others = log_probabilities.scatter_(1, ids, -torch.inf)
    if ids.shape[1] < others.shape[1]:
        most = others.amax(dim=1, keepdim=True)
        sums = others.sub_(most).exp_().sum(dim=1, keepdim=True, dtype=torch.float64)
        rest = most.double() + sums.log()
    else:  # no token is left
        left, sums, rest = (left[:, :0],) * 3
    log_student = torch.cat([kept, rest], dim=1)
    log_teacher = torch.cat([teacher.top_log_probabilities.double(), left.log()], dim=1)
    cold_student, cold_teacher = ((one / teacher.temperature).log_softmax(dim=1) for one in (log_student, log_teacher))
    share = cold_teacher.exp()
    kl = torch.where(share > 0, share * (cold_teacher - cold_student), 0.0).sum(dim=1)
    return kl, cold_student.exp() - share, log_student, sums


def distilled_loss(
    logits: torch.Tensor, targets: torch.Tensor, teacher: TeacherScores, factors: torch.Tensor | None, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of a chunk's targets with `factors` [N, 1] (None: 1).

    Returns:
        its sum, float64; its gradient times `scale` with respect to the logits, of their type [N, V]; sums of cross
        entropy and of kl, float64 [2].
    """
    gradient = log_softmax(logits.detach())
    picked, ids, hard = gradient.gather(1, targets[:, None]), teacher.top_ids.long(), 1 - teacher.weight
    kl, slopes, log_student, sums = compare(gradient, teacher)
    each = torch.ones_like(picked) if factors is None else factors
    slopes = scale * each * (hard * log_student.exp() + teacher.kl_factor / teacher.temperature * slopes)
    kept, rest = slopes.split([ids.shape[1], sums.shape[1]], dim=1)
    if rest.shape[1]:
        gradient.mul_((rest / sums).float())
    gradient.scatter_(1, ids, kept.float())
    gradient.scatter_add_(1, targets[:, None], -hard * scale * each)
    parts = (each * torch.stack([-picked[:, 0].double(), kl], dim=1)).sum(dim=0)
    return hard * parts[0] + teacher.kl_factor * parts[1], gradient.to(logits.dtype), parts
