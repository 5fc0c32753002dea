"""The part of a checkpoint beside tensors, and whether a run may continue from it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from roundpipe_cli import __version__
from roundpipe_cli.errors import NoCheckpointError, Problem, RecipeError, RefusedError
from roundpipe_cli.model.fused import fused_counts
from roundpipe_cli.model.head import TokenLoss, loss_name
from roundpipe_cli.recipe.aliases import REMOVED, was_off
from roundpipe_cli.recipe.check import Findings, check, hints_of
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import DEFAULT_LEARNING_RATES, DatasetConfig, Range, Recipe, plain_data, with_lists
from roundpipe_cli.recipe.strict_yaml import MAX_BYTES, Place, parse_bytes
from roundpipe_cli.regular_files import read_regular
from roundpipe_cli.train.checkpoint.manifest import STATE_NAME, peek
from roundpipe_cli.train.checkpoint.output_dir import list_checkpoints, named_checkpoint
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.prepare.devices import threads_per_worker
from roundpipe_cli.train.prepare.ready import Setup

FREE_KEYS = (
    *("output_dir", "pipeline", "nodes", "hardware", "weights", "load_in_16bit", "report_to", "hub_model_id"),
    *("resume_from_checkpoint", "distill.teacher"),
    *("logging_steps", "save_steps", "save_total_limit", "load_best_model_at_end", "early_stopping_patience"),
    *("eval_steps", "eval_datasets", "eval_samples", "eval_max_new_tokens"),
    *("on_oom", "on_device_loss", "on_nonfinite", "check_longest_rows", "watchdog_s"),
)
"""Keys that may change at a resume: they do not change what is computed, or what they name is compared by content."""
GROWING_KEYS = ("max_steps", "num_train_epochs")
"""Keys whose values may become larger at a resume."""
MICROBATCH_KEYS = ("micro_batch_size", "gradient_accumulation_steps", "micro_batch_tokens")
"""Keys that decide how a step's rows are grouped."""
DECIDED_ONCE = ("packing", "micro_batch_tokens")
"""Keys whose `auto` is decided at the start of a run, by its rows, model or machine; a resumed run keeps to that."""
USED_KEYS = (*MICROBATCH_KEYS, *GROWING_KEYS, "packing", "learning_rate", "max_seq_length")
"""Keys of a checkpoint's recipe that a run computes with; all others are only compared."""
MOST = 2**62
Whole = Annotated[int, Range(0, MOST)]
"""A number of steps or rows. None is below 0, where the sampler of rows would look for rows for ever."""
SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class SavedPosition:
    """Where in the data the next step begins."""

    epoch: Whole
    window: Whole
    offset: Whole


@dataclass(frozen=True)
class SavedFit:
    """How a run computed that had adapted itself to its memory."""

    micro_batch_size: Annotated[int, Range(1, MOST)]
    first_step: Whole
    sequence_chunks: Annotated[int, Range(1, MOST)] = 1


@dataclass
class SavedEvaluation:
    """The evaluations until now."""

    best_step: Whole | None = None
    """Step of the run's best evaluation."""
    best_loss: float | None = None
    kept_step: Whole | None = None
    """Step of the best evaluation whose weights are kept: `best_step`, unless those were lost or never kept."""
    kept_loss: float | None = None
    last_step: Whole | None = None
    """Step of the last evaluation."""
    last_loss: float | None = None
    num_worse: Whole = 0
    """Evaluations since the best one."""


@dataclass(frozen=True)
class SavedState:
    """A run's state beside tensors and its recipe."""

    num_updates: Whole
    loss_scale: Annotated[float, Range(0, MOST)]
    steps_since_overflow: Whole
    training_s: Annotated[float, Range(0, MOST)]
    data_position: SavedPosition
    num_steps: Whole
    skipped_steps: Whole
    fit: SavedFit | None
    evaluation: SavedEvaluation
    kept: Mapping[str, float] = field(default_factory=dict)
    """See `Setup.kept`."""


def run_state(setup: Setup) -> dict[str, Any]:
    """The JSON values of a checkpoint that say what is trained, and how."""
    return {
        "tool_version": __version__,
        "recipe": plain_data(setup.recipe),
        "data_hash": setup.dataset.content_hash,
        "eval_hash": setup.eval_hash,
        "tokenizer_hash": tokenizer_hash(setup.tokenizer),
        "model_commit": setup.source.commit,
        "model_hash": setup.model_hash,
        "config_hash": setup.config_hash,
        "start_hash": setup.start_hash,
        "teacher_hash": setup.teacher and setup.teacher.content_hash,
        "fused": fused_counts(setup.fused),
        "loss": loss_name(setup.loss),
        "computed_by": _computed_by(setup),
    }


def _computed_by(setup: Setup) -> dict[str, Any]:
    """Settings that may change at a resume and that change the last bits of what is computed."""
    pipeline, kinds = setup.recipe.pipeline, sorted({device.partition(":")[0] for device in setup.devices})
    threads = threads_per_worker(pipeline.threads_per_worker, len(setup.devices)) if "cpu" in kinds else None
    masks = "without masks" if pipeline.num_chunks > 1 and setup.attends_in_rows else "with masks"
    return {
        "pipeline.devices": " and ".join(kinds),
        "pipeline.threads_per_worker": threads,
        "pipeline.sequence_chunks": pipeline.num_chunks,
        "attention of chunks": None if pipeline.num_chunks == 1 else masks,
    }


def describe_other_bits(saved: Mapping[str, Any], setup: Setup) -> str | None:
    """A notice about what changed since the checkpoint, `saved`, and changes the last bits; None: nothing did."""
    was = saved.get("computed_by")
    changes = [
        f"{key} is {now}, was {was.get(key, 'not noted')}"
        for key, now in _computed_by(setup).items()
        if isinstance(was, dict) and was.get(key) != now
    ]
    return f"{'; '.join(changes)}: numbers differ in their last bits from here on" if changes else None


def as_decided(loaded: LoadedRecipe, saved: Mapping[str, Any]) -> LoadedRecipe:
    """The recipe with the value of a checkpoint's recipe, `saved`, for each key that is `auto` and decided once, and of
    the learning rate where none is given."""
    open_keys = [key for key in DECIDED_ONCE if getattr(loaded.recipe, key) == "auto"]
    open_keys += [] if loaded.has_own_rate else ["learning_rate"]
    open_keys += [] if loaded.length_note is None else ["max_seq_length"]
    found: dict[str, Any] = {key: saved[key] for key in open_keys if key in saved}
    before = saved.get("pipeline")
    chunks = before.get("sequence_chunks") if isinstance(before, dict) else None
    if loaded.recipe.pipeline.sequence_chunks == "auto" and isinstance(chunks, int) and chunks > 0:
        found["pipeline"] = replace(loaded.recipe.pipeline, sequence_chunks=chunks)
    is_same = found.get("max_seq_length") == loaded.recipe.max_seq_length  # else longer rows are treated as then
    note = loaded.length_note if is_same else None
    return replace(loaded, recipe=replace(loaded.recipe, **found), length_note=note)


def may_ask_for_more(output_dir: Path, loaded: LoadedRecipe, loss: TokenLoss | None = None) -> bool:
    """Whether there may be something to do for the finished run in `output_dir`: the recipe has more steps, names the
    checkpoint to go back to, or is another one or has another loss, which is refused. A look at small files only."""
    if named_checkpoint(loaded.recipe) is not None:
        return True
    metas = [peek(folder) for _, folder in list_checkpoints(output_dir)]
    if any(meta.get("loss") != loss_name(loss) for meta in metas if meta):
        return True
    old: Any = next((meta["recipe"] for meta in metas if meta and isinstance(meta.get("recipe"), dict)), None)
    if old is None:
        try:
            path = output_dir / "recipe.yaml"
            old = parse_bytes(read_regular(path, MAX_BYTES), str(path)).data
        except (OSError, RefusedError):
            return False
    if not isinstance(old, dict):
        return False
    new = plain_data(as_decided(loaded, old).recipe)
    pairs = [(old[key], new[key]) for key in GROWING_KEYS if key in old]
    longer = any(before != now and (before is None or _grew(before, now)) for before, now in pairs)
    if longer or any(not was_off(key, value) for key, value, _ in _recipe_changes(old, new)):
        return True
    before, now = old.get("early_stopping_patience"), new["early_stopping_patience"]
    return type(before) is int and now is not None and now > before  # null: the command has no such key


def is_complete(checkpoint: Checkpoint, recipe: Recipe, num_steps: int) -> str | None:
    """Why nothing is left to train after `checkpoint` in a run of `num_steps`; None where something is."""
    if checkpoint.step >= num_steps:
        return f"all {num_steps} steps are done"
    patience = recipe.early_stopping_patience
    if patience is None:  # a command without the key asks for nothing
        patience = checkpoint.meta["recipe"].get("early_stopping_patience")
    num_worse = checkpoint.meta["evaluation"].get("num_worse") or 0
    if patience is not None and num_worse >= patience:
        return "it stopped early; a larger early_stopping_patience continues it"
    return None


def check_more_is_possible(checkpoint: Checkpoint, recipe: Recipe, why: str) -> None:
    """Raise a RefusedError where the recipe asks for more steps of a finished run, and nothing is left: `why`."""
    old: Mapping[str, Any] = checkpoint.meta["recipe"]
    if grown := [key for key in GROWING_KEYS if (getattr(recipe, key) or 0) > (old.get(key) or math.inf)]:
        has_limit = recipe.max_steps is not None and "max_steps" not in grown
        raise RefusedError(
            f"{' and '.join(grown)} ask for more than the finished run has, and nothing is left to train",
            where=" and ".join(grown),
            found=why,
            hint=f"max_steps: {recipe.max_steps} ends the run, whatever num_train_epochs says" if has_limit else None,
        )


def check_not_past_end(checkpoint: Checkpoint, num_steps: int) -> None:
    """Raise a RefusedError for a checkpoint of a step that the run, as the recipe is now, does not have."""
    if checkpoint.step > num_steps:
        raise RefusedError(
            "the checkpoint is past the end of the run",
            where=str(checkpoint.folder),
            found=f"step {checkpoint.step}",
            expected=f"at most {num_steps}, the number of steps of this recipe and its data",
            hint="raise max_steps or num_train_epochs, or name an earlier checkpoint: resume_from_checkpoint=",
        )


def check_state(checkpoint: Checkpoint) -> SavedState:
    """The state in a checkpoint; refuses one whose values a run cannot continue with: another program wrote it.

    Raises:
        NoCheckpointError: every key that is missing, or has a value of another type or out of range.
    """
    findings = Findings({(): Place(STATE_NAME, 0)})
    state: SavedState = check(checkpoint.meta, SavedState, (), findings)
    recipe = checkpoint.meta.get("recipe")
    if not isinstance(recipe, dict):
        findings.add(("recipe",), "recipe is no mapping", found=short_json(recipe))
    for key in USED_KEYS:
        if isinstance(recipe, dict) and key in recipe:
            check(recipe[key], hints_of(Recipe)[key], ("recipe", key), findings)
    wrong = [f"{one.what} ({one.found})" if one.found else one.what for one in findings.problems]
    if wrong:
        raise _not_ours(checkpoint, STATE_NAME, "; ".join(wrong), "the state that this release saves")
    return state


def check_tensors(checkpoint: Checkpoint, wanted: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise a NoCheckpointError for the first tensor of the run, by group and name, that the checkpoint lacks in this
    shape."""
    for group, tensors in wanted.items():
        file_name = f"{group}.safetensors"
        found = checkpoint.tensors.get(group, {})
        if tensors and not found:
            raise _not_ours(checkpoint, file_name, "no such file", f"{len(tensors)} tensors")
        for name, tensor in tensors.items():
            shape = tuple(found[name].shape) if name in found else None
            if shape != tuple(tensor.shape):
                text = f"no tensor {name}" if shape is None else f"{name} of shape {list(shape)}"
                raise _not_ours(checkpoint, file_name, text, f"{name} of shape {list(tensor.shape)}")


def _not_ours(checkpoint: Checkpoint, name: str, found: str, expected: str) -> NoCheckpointError:
    return NoCheckpointError(
        "the checkpoint is whole, but not one that this run can continue from",
        where=str(checkpoint.folder / name),
        found=found,
        expected=expected,
        hint="resume with the recipe and the release that wrote it, or start afresh with another output_dir=",
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 over the vocabulary and the special tokens."""
    content = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.special_tokens_map.items(), key=str)]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def check_unchanged(saved: Mapping[str, Any], setup: Setup, allowed: Sequence[str]) -> list[str]:
    """Refuse to continue a run under other conditions; in words, what changed and is allowed to.

    Args:
        saved: meta of the checkpoint.
        allowed: keys that the user allows to differ (`--allow-changed`).

    Raises:
        RecipeError: every other changed key with its old and new value.
    """
    problems, accepted = [], list[str]()
    old_recipe = _with_newer_keys(saved["recipe"])
    changes = _recipe_changes(saved["recipe"], plain_data(setup.recipe))
    for key, name, now in (
        ("datasets (content)", "data_hash", setup.dataset.content_hash),
        ("tokenizer", "tokenizer_hash", tokenizer_hash(setup.tokenizer)),
        ("model (files)", "model_hash", setup.model_hash),
        ("model (config.json)", "config_hash", setup.config_hash),
        ("lora.start_from (files)", "start_hash", setup.start_hash),
        ("distill.teacher (scores)", "teacher_hash", setup.teacher and setup.teacher.content_hash),
        ("loss (function)", "loss", loss_name(setup.loss)),
        ("kernels (fused modules)", "fused", fused_counts(setup.fused)),
    ):
        is_implied = name == "fused" and any(changed == "kernels" for changed, _, _ in changes)
        if name in saved and saved.get(name) != now and not is_implied:
            changes.append((key, saved.get(name), now))
    changes = [
        (key, old, new) for key, old, new in changes if not (_is_longer(saved, key, old, new) or was_off(key, old))
    ]
    if _as_advised(saved.get("fit"), old_recipe, setup.recipe):
        changes = [change for change in changes if change[0] not in MICROBATCH_KEYS]
    for key, old, new in changes:
        word = key.split(" ")[0]
        if word in {name.split(" ")[0] for name in allowed}:
            accepted.append(
                f"{key}: {short_json(new)} from here on, {short_json(old)} until now (--allow-changed {word})"
            )
        else:
            way = f"{REMOVED[key]}: add" if key in REMOVED else "put the old value back, or add"
            problems.append(
                Problem(
                    "changed since the checkpoint was written",
                    where=key,
                    found=short_json(new),
                    expected=short_json(old),
                    hint=f"{way} --allow-changed {word}",
                )
            )
    if problems:
        raise RecipeError(problems)
    return accepted


def _is_longer(saved: Mapping[str, Any], key: str, old: Any, new: Any) -> bool:
    """Whether a number of epochs was replaced by a number of steps that is not smaller."""
    return key == "max_steps" and old is None and new >= (saved.get("num_steps") or math.inf)


def _as_advised(fit: Mapping[str, Any] | None, old: Mapping[str, Any], recipe: Recipe) -> bool:
    """Whether the microbatches are now those to which the run had adapted itself: the same rows in each step."""
    rows = old["micro_batch_size"] * old["gradient_accumulation_steps"]
    by_tokens = recipe.token_budget is not None, old.get("micro_batch_tokens") is not None
    in_chunks = fit is not None and fit.get("sequence_chunks", 1) == recipe.pipeline.num_chunks > 1
    same_rows = recipe.rows_per_step == rows and (in_chunks or by_tokens[0] == by_tokens[1])
    return fit is not None and recipe.rows_per_microbatch == fit["micro_batch_size"] and same_rows


def _with_newer_keys(saved: Mapping[str, Any]) -> Any:
    """A checkpoint's recipe with the defaults of keys, those of its datasets too, that it was written without."""
    defaults = plain_data(Recipe(model="", datasets=(), output_dir="", learning_rate=DEFAULT_LEARNING_RATES["LoRA"]))
    of_rows = with_lists(asdict(DatasetConfig(path="")))
    filled, entries = _filled(saved, defaults), saved.get("datasets")
    if isinstance(entries, list):
        filled["datasets"] = [_filled(entry, of_rows) for entry in entries]
    return filled


def _recipe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, old, new) of what differs between a checkpoint's recipe and the recipe now, and is not free."""
    return [*_changed_keys(_with_newer_keys(old), new)]


def short_json(value: Any) -> str:
    """A value as JSON, short."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _filled(old: Any, defaults: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(defaults, dict)):
        return old
    return {key: _filled(old.get(key, defaults.get(key)), defaults.get(key)) for key in {**defaults, **old}}


def _changed_keys(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of what differs and is not free to change."""
    if path in FREE_KEYS:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _changed_keys(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new and not (path in GROWING_KEYS and _grew(old, new)):
        yield path, old, new


def _grew(old: Any, new: Any) -> bool:
    return new is None or (isinstance(old, (int, float)) and new > old)
