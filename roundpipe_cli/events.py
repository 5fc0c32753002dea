"""What happens during a run, as frozen values. Whoever shows or stores them never touches the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """Something that the user should read: a decision made for them, a loss, a limit."""

    text: str


@dataclass(frozen=True)
class Phase:
    """The run has begun to do something that can take a while."""

    text: str


@dataclass(frozen=True)
class StepFinished:
    """One optimizer update; the row of metrics.jsonl."""

    step: int
    """Number of the update, from 1."""
    num_steps: int
    """Updates of the whole run."""
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    """Tokens of the step's rows, padding left out."""
    tokens_per_s: float
    step_s: float
    bubble_ratio: float
    utilization: tuple[float, ...]
    upload_bytes: int
    device_peak_bytes: int
    """Of the fullest device; 0 where bytes are not counted."""
    eta_s: float


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is durable."""

    step: int
    folder: str
    seconds: float


@dataclass(frozen=True)
class RunFinished:
    """The result is written."""

    output_dir: str
    num_steps: int
    seconds: float


Event = Notice | Phase | StepFinished | CheckpointSaved | RunFinished
