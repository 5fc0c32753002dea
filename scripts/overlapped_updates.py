"""Full training on CPU workers with 0.12 s added to every layer's update: what a step takes beside its parts.

    python scripts/overlapped_updates.py                # about five minutes, mostly asleep

A tiny model of 8 blocks, 4 microbatches a step. `layer` is what the `work` fault point adds to each layer's forward,
recompute and backward, so that a busy machine disturbs little. Forward and backward are the parts of a step of the same
stages without slow updates: until the last forward ends, and from there. An update can hide behind the forward alone,
so the bound is max(update, forward) + backward.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli import faults
from roundpipe_cli.cache import CACHE_VARIABLE
from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.engine.rough_costs import rough_costs
from roundpipe_cli.events import Event, StepTimeline
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.timeline import COMPUTE
from roundpipe_cli.train import build
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.optim.updater import Updater
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.signals import Reporting, StopSignals
from tests.support.e2e import make_model, make_workspace, metrics, write_rows

BLOCKS, UPDATE_S = 8, 0.12
SINGLE = [[0, 1], *([block, block] for block in range(2, BLOCKS + 1))]
"""One block a stage, the embedding with the first."""
TOLD = "the planner's, told of the update"
"""A run on CPU workers takes updates for free, so its planner does not know of what the fault point adds."""
CUTS = {
    "the planner's": [],
    TOLD: [],
    "one block a stage": [
        f"pipeline.forward_stages={SINGLE}".replace(" ", ""),
        f"pipeline.backward_stages={[[BLOCKS + 1, BLOCKS + 1], *reversed(SINGLE)]}".replace(" ", ""),
    ],
}
STEPS = slice(3, 7)
"""Steps that are looked at: those before are timed, and the last waits for its own update too."""


taken_s: list[float] = []
"""Seconds of each layer's update."""


def timed(updater: Updater, *given: Any, own: Any = Updater._change, **named: Any) -> None:
    """An update that is timed: on a busy machine a sleep of 0.12 s is longer."""
    started_s = time.monotonic()
    own(updater, *given, **named)
    taken_s.append(time.monotonic() - started_s)


def told(*given: Any, own: Any = rough_costs, **named: Any) -> CostModel:
    """The costs of a run with the time of each layer's slow update."""
    costs: CostModel = own(*given, **named)
    return replace(costs, layers=tuple(replace(layer, optimizer_s=UPDATE_S) for layer in costs.layers))


def run(folder: Path, model: Path, words: list[str], fault_text: str) -> tuple[float, float, float]:
    """Medians of a run's steps: seconds from end to end, and of the forward and the backward."""
    taken_s.clear()
    os.environ[faults.ENVIRONMENT_VARIABLE] = fault_text
    faults.load_faults()
    make_workspace(folder, model, gradient_accumulation_steps=4, num_train_epochs=9, max_steps=8, save_steps=100)
    write_rows(folder / "rows.jsonl", 80)
    recipe = load_recipe(str(folder / "recipe.yaml"), [f"output_dir={folder / 'out'}", "method=full", *words])
    setup = prepare(recipe, offline=True, tell=lambda event: None)
    (folder / "out").mkdir()
    events: list[Event] = []
    Trainer(setup, folder / "out", StopSignals(), Reporting(events.append)).run()
    steps = [event for event in events if isinstance(event, StepTimeline)][STEPS]
    computed = [[span for span in step.spans if span.lane == COMPUTE] for step in steps]
    forward = [max((span.end_s for span in spans if span.kind == "F"), default=0.0) for spans in computed]
    whole = [max(span.end_s for span in spans) for spans in computed]
    forward_s, whole_s = statistics.median(forward), statistics.median(whole)
    return statistics.median(row["step_s"] for row in metrics(folder / "out")[STEPS]), forward_s, whole_s - forward_s


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ[CACHE_VARIABLE] = ""
    Updater._change = timed  # type: ignore[method-assign]
    print("| workers | layer | stages | update | forward | backward | bound | step | off |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as place:
        model = make_model(Path(place) / "model", num_hidden_layers=BLOCKS)
        for workers, layer_s in ((2, 0.0), (3, 0.0), (2, 0.06), (3, 0.06)):
            for cut, words in CUTS.items():
                words = [*words, f"pipeline.devices=[{','.join(['cpu'] * workers)}]"]
                build.rough_costs = told if cut == TOLD else rough_costs
                folder, work = Path(place) / f"{workers} {layer_s} {cut}", f"work:slow={layer_s}"
                _, forward_s, backward_s = run(folder / "without", model, words, work)
                step_s, _, _ = run(folder / "with", model, words, f"{work},update:slow={UPDATE_S}")
                update_s = statistics.median(taken_s) * (BLOCKS + 2)
                bound_s = max(update_s, forward_s) + backward_s
                times = " | ".join(f"{one:.2f}" for one in (update_s, forward_s, backward_s, bound_s, step_s))
                print(f"| {workers} | {layer_s} | {cut} | {times} | {step_s / bound_s - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
