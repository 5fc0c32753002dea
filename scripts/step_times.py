"""Step times of metrics.jsonl against the loop's wall time: a tiny model, trained in full, with a large tied table.

    python scripts/step_times.py [--vocabulary 150000] [--width 64] [--steps 12]

Prints the sum of the steps' times, the wall time from the start of the first step to the end of the last one, the share
of the time that no step has, and the seconds of forward and backward in the middle step.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli.events import Event, RunStarted, StepFinished
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.finetune import run_finetune
from roundpipe_cli.train.signals import Reporting, Start, StopSignals
from tests.support.e2e import make_model, make_workspace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    at_s: list[float] = []
    steps_s: list[float] = []

    def tell(event: Event) -> None:
        if isinstance(event, (RunStarted, StepFinished)):
            at_s.append(time.monotonic())
        if isinstance(event, StepFinished):
            steps_s.append(event.step_s)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = {"vocab_size": options.vocabulary, "hidden_size": options.width, "tie_word_embeddings": True}
        changes = {"method": "full", "lora": None, "max_steps": options.steps, "num_train_epochs": None}
        changes |= {"output_dir": str(folder / "out"), "save_steps": 10**6}
        make_workspace(folder / "run", make_model(folder / "model", **size), **changes)
        with StopSignals() as signals:
            run_finetune(load_recipe(folder / "run" / "recipe.yaml"), Start(offline=True), Reporting(tell), signals)
    wall_s, sum_s = at_s[-1] - at_s[0], sum(steps_s)
    middle_s = sorted(steps_s)[len(steps_s) // 2]
    share = f"{1 - sum_s / wall_s:.2%} in no step"
    print(f"steps {sum_s:.3f} s, wall {wall_s:.3f} s, {share}, middle step {middle_s:.3f} s")


if __name__ == "__main__":
    main()
