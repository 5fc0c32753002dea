"""Distillation: the step by plain PyTorch with full logits, any workers, and a run from scores to a student's result."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.model.distillation import TeacherScores
from roundpipe_cli.model.head import target_rows
from tests.support.tiny import Rig, make_rig, random_microbatches
from tests.train.test_row_weights import SIZES, step

VOCABULARY = 128


def taught(microbatches: list[Microbatch], kept: int, weight: float, temperature: float) -> list[Microbatch]:
    """Microbatches with the figures of a random teacher; the whole distributions are its logits' [N, V]."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for one in microbatches:
        indices, _ = target_rows(one.labels)
        whole = (3 * torch.randn(len(indices), VOCABULARY, generator=generator)).log_softmax(-1)
        values, ids = whole.topk(kept)
        left = whole.scatter(1, ids, -torch.inf).exp().sum(-1)
        found.append(replace(one, teacher=TeacherScores(ids.int(), values, left, weight, temperature)))
    return found


def plain_loss(rig: Rig, microbatches: list[Microbatch]) -> float:
    """The definition with full logits in float64, and its gradients by autograd: K + 1 outcomes, or the plain divergence
    at a temperature where the teacher kept the whole vocabulary."""
    rig.plain.zero_grad(set_to_none=True)
    total, units = torch.zeros((), dtype=torch.float64), 0.0
    for one in microbatches:
        indices, targets = target_rows(one.labels)
        logits = rig.plain(input_ids=one.input_ids, use_cache=False).logits.flatten(0, 1)[indices].double()
        teacher, student = one.teacher, logits.log_softmax(-1)
        assert teacher is not None
        values, ids, t = teacher.top_log_probabilities.double(), teacher.top_ids.long(), teacher.temperature
        if ids.shape[1] == VOCABULARY:
            p = torch.empty_like(values).scatter_(1, ids, values / t).softmax(-1)
            log_q = (logits / t).log_softmax(-1)
        else:
            kept = student.gather(1, ids)
            p = torch.cat([values, teacher.mass_left.double().log()[:, None]], 1).div(t).softmax(-1)
            rest = student.scatter(1, ids, -torch.inf).exp().sum(-1, keepdim=True).log()
            log_q = torch.cat([kept, rest], 1).div(t).log_softmax(-1)
        kl = (p * (p.log() - log_q)).sum(-1)
        entropy = nn.functional.cross_entropy(logits, targets, reduction="none")
        weights = torch.ones(len(indices)) if one.weights is None else one.weights.flatten()[indices + 1]
        total = total + (weights * ((1 - teacher.weight) * entropy + teacher.weight * t**2 * kl)).sum()
        units += float(weights.sum())
    loss = total / units
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(("kept", "weight", "temperature"), [(VOCABULARY, 1.0, 2.0), (VOCABULARY, 0.5, 1.0), (8, 0.7, 1.5)])
def test_loss_and_gradients_are_those_of_full_logits(method: str, kept: int, weight: float, temperature: float) -> None:
    """The chunks of the head have 5 targets; the second microbatch has weights."""
    rig = make_rig("llama", method)
    made = random_microbatches(SIZES)
    made[1] = replace(made[1], weights=torch.tensor([0.5, 1.0, 3.0]).repeat(3)[None])
    microbatches = taught(made, kept, weight, temperature)
    expected = plain_loss(rig, microbatches)
    loss, gradients = step(rig, microbatches)
    assert float.fromhex(loss) == pytest.approx(expected, rel=1e-6)
    plain = {name: p.grad for name, p in rig.plain.named_parameters() if p.requires_grad}
    assert plain
    apart = [float((rig.store.gradient(name) - gradient).norm()) for name, gradient in plain.items()]
    assert math.hypot(*apart) <= 1e-5 * math.hypot(*(float(gradient.norm()) for gradient in plain.values()))
    for num_workers, copy in ((1, False), (3, True)):
        again, same = step(rig, microbatches, num_workers, copy=copy)
        assert again == loss and all(torch.equal(*pair) for pair in zip(same, gradients, strict=True))
