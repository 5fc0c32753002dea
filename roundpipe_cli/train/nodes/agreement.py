"""Facts that must be the same on all machines of a run, and the refusal where one is not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from roundpipe_cli import __version__
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import Problem, RecipeError
from roundpipe_cli.recipe.schema import Recipe, plain_data
from roundpipe_cli.train.checkpoint.resume import run_state, short_json
from roundpipe_cli.train.prepare.ready import Setup

OWN_KEYS = frozenset(
    {
        *("output_dir", "logging_steps", "save_total_limit", "report_to", "hub_model_id", "resume_from_checkpoint"),
        *("eval_samples", "eval_max_new_tokens", "check_longest_rows", "watchdog_s", "weights", "hardware"),
    }
)
"""Keys that each machine may set for itself: they change neither numbers nor what is sent."""
PIPELINE_KEYS = ("pipeline.threads_per_worker", "pipeline.sequence_chunks")
"""Keys of `pipeline` that change numbers, if only their last bits; machines may have other devices and stages."""


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """Keys of the recipe that must be the same, dotted, with their values: compared before anything else is sent."""
    flat = dict(_flat(plain_data(recipe), ""))
    return {"roundpipe --version": __version__} | {
        key: value
        for key, value in flat.items()
        if key not in OWN_KEYS and (key in PIPELINE_KEYS or not key.startswith("pipeline."))
    }


def setup_facts(setup: Setup) -> dict[str, Any]:
    """Facts of a run that is ready to train: `auto` is decided, and files are hashed."""
    state = run_state(setup)
    return recipe_facts(setup.recipe) | {key: state[key] for key in state if key not in ("recipe", "computed_by")}


def weight_facts(store: WeightStore, *, masters: bool) -> dict[str, str]:
    """A hash of each layer's trained weights, and of its masters where every machine has all of them (`masters`)."""

    def digest(layer: int) -> str:
        hashed = hashlib.sha256(store.trained_bytes(layer, store.newest).numpy().data)
        for place in store.layouts[layer].trainable if masters else ():
            hashed.update(store.master(place.name).contiguous().numpy().data)
        return hashed.hexdigest()

    trained = [layer for layer, layout in enumerate(store.layouts) if layout.trainable]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(digest, trained))
    return {
        f"trained weights of {store.layouts[layer].name}": value for layer, value in zip(trained, digests, strict=True)
    }


def require_same(facts: Mapping[int, Mapping[str, Any]], count: int) -> None:
    """Refuse to train together on different things.

    Args:
        facts: of the machines that are here, by rank.
        count: of all machines.

    Raises:
        RecipeError: every key with the machine that differs from the first of these, and both values.
    """
    first, *others = sorted(facts)
    keys = {key: None for rank in facts for key in facts[rank]}
    problems = [
        Problem(
            "the machines of this run do not train the same",
            where=key,
            found=f"{short_json(facts[rank].get(key))} on machine {rank + 1} of {count}",
            expected=f"{short_json(facts[first].get(key))}, as on machine {first + 1}",
            hint="use the same recipe, data, model and version on every machine",
        )
        for key in keys
        for rank in others
        if facts[rank].get(key) != facts[first].get(key)
    ]
    if problems:
        raise RecipeError(problems)


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value), with entries of lists as `datasets.0.path`."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not entries:
        yield path, value
    for key, item in entries:
        yield from _flat(item, f"{path}.{key}" if path else str(key))
