"""The planner's step time for this card against a run's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.planning.compare import SimulationCase, run_step_s
from scripts.gpu_checks.models import SPEED_MODEL
from scripts.gpu_checks.place import Check, CheckPlace, Figures, check
from scripts.gpu_checks.ways import cut_of, engine_steps, make_trial


def checks(place: CheckPlace) -> Iterator[Check]:
    for method in ("lora", "full"):
        yield check(method, step_time, place, method, limit_s=240.0)


def step_time(place: CheckPlace, method: str) -> Figures:
    """Predicted and measured seconds of a streamed step, by part of the prediction."""
    trial = make_trial(place, method)
    case = SimulationCase(trial.costs, 1, len(trial.microbatches))
    predicted_s = run_step_s("roundpipe", cut_of(trial, 0), case)
    with place.devices():
        results = engine_steps(place, trial, "streamed")
    measured_s = statistics.median(result.step_s for result in results)
    architecture = parse_config(trial.model.figures, name=SPEED_MODEL, source="gpu_check")
    return {
        "model": SPEED_MODEL if place.scale == "full" else "tiny",
        "planned_for": trial.hardware.description,
        "parameters": architecture.parameters,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "measured_to_predicted": measured_s / predicted_s,
        "measured_idle": statistics.median(result.bubble_ratio for result in results),
    }
