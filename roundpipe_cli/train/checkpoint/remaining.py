"""Place in the data and steps to the end of a run that continues, whose steps may have other rows than before.

Steps count rows, and how many rows a step has may change where the user allows it. So the steps done stay as many as
they are, and the steps to come are counted from the place in the data to the end of the last epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from roundpipe_cli.data.batching import BatchSampler, Position
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.checkpoint.resume import SavedPosition, check_state
from roundpipe_cli.train.prepare.learning_rate import num_steps_of
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.steps import rows_of_steps
from roundpipe_cli.units import counted


@dataclass(frozen=True)
class Remaining:
    """Where a run begins or continues, and where it ends."""

    step: int
    """Steps done."""
    position: Position
    """Where the next step's rows begin."""
    num_steps: int
    """Steps of the whole run; fewer than `step` where the position is past the end."""
    other_rows: str | None = None
    """A notice where steps have other rows than those that are done; None: they have not."""


def remaining(checkpoint: Checkpoint | None, setup: Setup, sampler: BatchSampler) -> Remaining:
    """Place and steps to the end after a checkpoint, or, with None, of a run that begins."""
    recipe = setup.recipe
    if checkpoint is None:
        return Remaining(0, Position(), num_steps_of(recipe, sampler))
    step, old = checkpoint.step, checkpoint.meta["recipe"]
    position, is_moved = _place(check_state(checkpoint).data_position, old, setup, sampler)
    num_steps = recipe.max_steps or step + sampler.num_steps(recipe.num_train_epochs, position)
    changes = _changes(checkpoint.meta, setup)
    if not changes:
        return Remaining(step, position, num_steps)
    done = counted(step, "step")
    if recipe.max_steps:
        end = f"the {done} done count as they are, and the run ends after step {num_steps}, as max_steps says"
    else:
        end = f"with the {done} done, {counted(num_steps - step, 'more step')} to the end of epoch "
        end += f"{recipe.num_train_epochs} make {num_steps}"
    text = f"{'; '.join(changes)}: {end}"
    if is_moved or "data_hash" in _differing(checkpoint.meta, setup):
        text += "; the epoch that is under way continues in another order: some of its rows come twice or not at all"
    return Remaining(step, position, num_steps, text)


def _differing(meta: Mapping[str, Any], setup: Setup) -> list[str]:
    return ["data_hash"] if meta.get("data_hash", setup.dataset.content_hash) != setup.dataset.content_hash else []


def _changes(meta: Mapping[str, Any], setup: Setup) -> list[str]:
    """Words about each change of the rows of a step."""
    recipe, old, words = setup.recipe, meta["recipe"], list[str]()
    kept = {key: old.get(key, getattr(recipe, key)) for key in ("micro_batch_size", "gradient_accumulation_steps")}
    if (before := kept["micro_batch_size"] * kept["gradient_accumulation_steps"]) != recipe.rows_per_step:
        unit = "packed sequence" if recipe.packs else "row"
        words.append(f"a step has {counted(recipe.rows_per_step, unit)} instead of {before}")
    if _packs(old, setup) != recipe.packs:
        words.append("rows are packed now" if recipe.packs else "rows are no longer packed")
    elif recipe.packs and old.get("max_seq_length", recipe.row_tokens) != recipe.row_tokens:
        words.append(f"rows are packed into {recipe.row_tokens} tokens instead of {old['max_seq_length']}")
    if _differing(meta, setup):
        words.append("the rows are others")
    return words


def _packs(old: Mapping[str, Any], setup: Setup) -> bool:
    return old.get("packing", setup.recipe.packing) is True


def _place(saved: SavedPosition, old: Mapping[str, Any], setup: Setup, sampler: BatchSampler) -> tuple[Position, bool]:
    """Where the rows continue, and whether that is another place than the saved one: sequences that are packed in
    another way are not counted as before, so as much of the epoch is taken as done as was."""
    recipe, position = setup.recipe, Position(**asdict(saved))
    was_packed, length = _packs(old, setup), old.get("max_seq_length", recipe.row_tokens)
    is_other = was_packed != recipe.packs or (recipe.packs and length != recipe.row_tokens)
    if not is_other or position.starts_epoch:
        return position, False
    longest = int(setup.dataset.rows.lengths.max())
    before = replace(recipe, packing=was_packed, max_seq_length=max(length, longest))
    before = replace(before, micro_batch_size=1, gradient_accumulation_steps=1)
    old_sampler = rows_of_steps(before, setup.dataset)
    old_sampler.seek(position)
    return sampler.position_after(old_sampler.epochs_done), True
