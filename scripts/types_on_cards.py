"""Train a step of every causal type of transformers on two simulated GPUs, and compare it with the processor's.

python scripts/types_on_cards.py                      # LoRA and full, a line a type, then what differed
python scripts/types_on_cards.py llama zaya --jobs 1  # these types

The simulation refuses what a GPU refuses: tensors of two devices in one operation. So a line says that nothing of the
type's blocks and head stays on the processor, that no two accesses are without an order, and which error the result
has. `waits` counts how often a thread that issues operations waits for a device in the step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from roundpipe_cli.model.load import is_encoder
from scripts.sweep_models import sweep, warm_up
from tests.support.every_type import NoTinyConfigError, causal_types, tiny_config_of
from tests.support.simulated_types import step_of


def try_one(model_type: str) -> dict[str, str]:
    """How LoRA and full fine-tuning of one type went: error and waits, or why not."""
    try:
        config = tiny_config_of(model_type)
    except NoTinyConfigError as error:
        return {"no config": str(error)}
    if is_encoder(config):
        return {"encoder": "attention looks both ways"}
    return {method: step_of(config, method) for method in ("lora", "full")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=300)
    arguments = parser.parse_args()
    warm_up()
    results = sweep(arguments.types or causal_types(), arguments.jobs, arguments.limit_s, try_one)
    answers = [str(found.get(method, "not tried")) for found in results.values() for method in ("lora", "full")]
    beginnings = ("equal", "error", "refused", "not tried", "DIFFERS", "CRASH")
    print(", ".join(f"{sum(one.startswith(start) for one in answers)} {start}" for start in beginnings))
    return int(
        any(one.startswith(("DIFFERS", "CRASH")) for one in answers) or any("died" in f for f in results.values())
    )


if __name__ == "__main__":
    sys.exit(main())
