"""A step of a tiny model of any type on simulated GPUs, compared with the processor's, in words."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.errors import RoundpipeError
from tests.support.simulated_cases import Bits, Case, is_equal, kernels_as_on
from tests.support.simulated_cuda import Simulation
from tests.support.tiny import random_microbatches
from tests.support.try_type import reason

BOUND = 1e-4  # of the relative error; grouped products of experts round otherwise than a loop over them


def step_of(config: Any, method: str) -> str:
    """One step on both cards, in words."""
    vocab = config.get_text_config().vocab_size
    microbatches = [
        replace(one, input_ids=one.input_ids % vocab, labels=torch.where(one.labels < 0, -100, one.labels % vocab))
        for one in random_microbatches([(1, 9), (2, 7)])
    ]
    case = Case(config.model_type, method, {"config": config}, microbatches=microbatches)
    try:
        with kernels_as_on():
            expected = case.on(case.rig(), [CpuBackend(1, copy=True) for _ in range(2)])
        found, simulation = case.simulated(0)
    except RoundpipeError as error:
        return f"refused: {reason(error)}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"CRASH {type(error).__name__}: {str(error)[:300]} at {Path(last.filename).name}:{last.lineno}"
    waits = waits_of(simulation)
    if is_equal(found, expected):
        return f"equal, {waits}"
    error = largest_error(found, expected)
    return f"{'error' if error <= BOUND else 'DIFFERS'} {error:.1e}, {waits}"


def waits_of(simulation: Simulation) -> str:
    found = Counter(
        {
            (what, where): n
            for (thread, what, where), n in simulation.machine.host_waits.items()
            if thread != "MainThread"
        }
    )
    return f"waits {found.total()}" + "".join(f" ({what} at {where})" for (what, where), _ in found.most_common(1))


def largest_error(found: Bits, expected: Bits) -> float:
    pairs = [pair for pair in zip(found, expected, strict=True) if not isinstance(pair[1], str)]
    tensors = [(torch.as_tensor(one), torch.as_tensor(other)) for one, other in pairs]
    return max(float((one - other).norm() / other.norm().clamp(min=1e-12)) for one, other in tensors if one.numel())
