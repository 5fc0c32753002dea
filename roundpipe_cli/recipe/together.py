"""Checks for keys that make no sense together; one problem names both."""

from __future__ import annotations

from dataclasses import fields

from roundpipe_cli.choices import OPTIMIZER_KEYS, OPTIMIZERS, PACKED_FORMATS, SCHEDULE_KINDS
from roundpipe_cli.recipe.check import Findings
from roundpipe_cli.recipe.schedules import find_schedule_problems
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.sections import DatasetConfig, PipelineConfig

NEEDS_EVALUATION = (
    ("eval_steps", None),
    ("eval_samples", 0),
    ("load_best_model_at_end", False),
    ("early_stopping_patience", None),
)
"""(key, off value) of keys without effect where there are no rows to evaluate on."""


PAIRS = "preference"
PAIRS_HINT = "add the line `objective: dpo` (or orpo, simpo)"
SPLIT_HINT = "`long_rows: truncate` or drop, or a larger max_seq_length"
IN_TURN = {"head_workers": ("auto", 1), "dispatch": ("auto", "round_robin")}
"""Values with which stages are dealt out in turn, as schedules need that bind their stages to workers."""

MIN_CHUNK_TOKENS = 8
"""Tokens of a chunk at least, where a row is as long as it may be. A chunk's way through the stages costs some tens of
milliseconds of Python, whatever it holds."""


def find_contradictions(recipe: Recipe, findings: Findings) -> None:
    """Add a problem for each key that another one makes meaningless."""
    _find_preference_problems(recipe, findings)
    find_schedule_problems(recipe, findings)
    _find_chunk_problems(recipe, findings)
    _find_optimizer_problems(recipe, findings)
    _find_frozen_full(recipe, findings)
    _find_stage_problems(recipe.pipeline, findings)
    packed = [kind for kind in PACKED_FORMATS.values() if getattr(recipe, kind.key)]
    for other in packed[1:]:
        what = f"the base weights cannot be in {packed[0].label} and in {other.label}"
        findings.add((other.key,), what, hint=f"delete {packed[0].key} or {other.key}")
    if recipe.float16_accumulation and recipe.dtype != "float16":
        what, found = "only products of float16 can add up in float16", f"dtype: {recipe.dtype}"
        findings.add(("float16_accumulation",), what, found=found, hint="`dtype: float16`, or delete the line")
    _find_split_problems(recipe, findings)
    _find_budget_problems(recipe, findings)
    _find_rule_problems(recipe, findings)
    if recipe.nodes.shard_optimizer is True and recipe.method == "lora":
        hint = "the state of adapters is small: delete the line"
        findings.add(("nodes", "shard_optimizer"), "only full fine-tuning shares its state out", hint=hint)
    if not recipe.val_set_size and not recipe.eval_datasets:
        for key, off in NEEDS_EVALUATION:
            if getattr(recipe, key) != off:
                findings.add(
                    (key,),
                    f"{key} needs rows to evaluate on",
                    found="neither val_set_size nor eval_datasets",
                    hint="add a line such as `val_set_size: 0.05`",
                )


def _find_budget_problems(recipe: Recipe, findings: Findings) -> None:
    """Check for a token budget that is too small for a row, or that nothing reads."""
    path, row = ("micro_batch_tokens",), recipe.tokens_of_full_row
    if recipe.micro_batch_tokens is not None and recipe.pipeline.num_chunks > 1:
        what = "microbatches of chunked sequences are not filled by tokens"
        hint = "delete the line micro_batch_tokens, or pipeline.sequence_chunks=1"
        findings.add(path, what, found=f"pipeline.sequence_chunks: {recipe.pipeline.num_chunks}", hint=hint)
    if recipe.token_budget is not None and recipe.token_budget < row:
        what = "a row of max_seq_length tokens does not fit into a microbatch"
        each = f"{recipe.max_seq_length} tokens" + (" for each answer of a pair" if recipe.trains_pairs else "")
        hint = f"micro_batch_tokens={row}, or a smaller max_seq_length"
        findings.add(path, what, found=str(recipe.token_budget), expected=f"at least {row}: {each}", hint=hint)


def _find_split_problems(recipe: Recipe, findings: Findings) -> None:
    """Long texts in pieces."""
    splits, overlap = recipe.long_rows == "split", recipe.long_rows_overlap
    if overlap and not splits:
        findings.add(("long_rows_overlap",), "only sequences of a split row can overlap", hint="`long_rows: split`")
    elif overlap >= recipe.max_seq_length:
        findings.add(
            ("long_rows_overlap",),
            "sequences that overlap in all their tokens have none to train",
            found=str(overlap),
            expected=f"less than max_seq_length, {recipe.max_seq_length}",
        )
    named = (("datasets", recipe.datasets), ("eval_datasets", recipe.eval_datasets))
    for key, index, kind in ((key, at, one.type) for key, given in named for at, one in enumerate(given)):
        if splits and kind not in ("auto", "text"):
            findings.add((key, index, "type"), "only rows of type text can be split", found=kind, hint=SPLIT_HINT)


def _find_rule_problems(recipe: Recipe, findings: Findings) -> None:
    """Rules for what is trained of a conversation, where all of it is, or where an answer is compared."""
    plain = {field.name: field.default for field in fields(DatasetConfig)}
    every = recipe.train_on_inputs
    why = "train_on_inputs trains every token" if every else f"objective {recipe.objective} compares whole answers"
    keys = ["roles_to_train", "turns_to_train"] if every or recipe.trains_pairs else []
    named = (("datasets", recipe.datasets), ("eval_datasets", recipe.eval_datasets))
    for name, index, dataset in ((name, at, one) for name, given in named for at, one in enumerate(given)):
        for key in [*keys, *(["train_on_eos"] if every else [])]:
            if getattr(dataset, key) != plain[key]:
                findings.add((name, index, key), f"{why}: {key} changes nothing", hint=f"delete {key}")
        if every and dataset.thoughts == "mask":
            findings.add((name, index, "thoughts"), f"{why}, thoughts too", found="mask", expected="train or drop")


def _find_preference_problems(recipe: Recipe, findings: Findings) -> None:
    if not recipe.trains_pairs:
        sources = (("datasets", recipe.datasets), ("eval_datasets", recipe.eval_datasets))
        for name, at in ((name, at) for name, given in sources for at, one in enumerate(given) if one.type == PAIRS):
            findings.add((name, at, "type"), "preference pairs need another objective", hint=PAIRS_HINT)
        return
    objective = recipe.objective
    off: list[tuple[str, object]] = [("label_smoothing_factor", 0.0)]
    if recipe.long_rows == "split":
        findings.add(("long_rows",), "pairs cannot be split", hint=SPLIT_HINT)
    if objective == "dpo" and recipe.method != "lora":
        why = "the reference leaves the trained adapter out, or has its start; objective orpo and simpo need none"
        findings.add(("method",), "objective dpo needs method lora", found=recipe.method, hint=why)
    if objective != "dpo":  # a prompt's log-probability would be part of the means that are compared
        off.append(("train_on_inputs", False))
    if recipe.packs:  # `auto` is off with pairs
        off.append(("packing", "auto"))
    for key, without in off:
        if getattr(recipe, key) != without:
            findings.add((key,), f"{key} is not offered with objective {objective}", hint=f"delete the line {key}")
    named = (("datasets", recipe.datasets), ("eval_datasets", recipe.eval_datasets))
    for name, index, dataset in ((name, at, one) for name, given in named for at, one in enumerate(given)):
        if dataset.type not in ("auto", "preference"):
            what, path = f"objective {objective} needs preference pairs", (name, index, "type")
            findings.add(path, what, found=dataset.type, expected="preference")


def _find_chunk_problems(recipe: Recipe, findings: Findings) -> None:
    """Check for keys that do not go with sequences in chunks."""
    pipeline = recipe.pipeline
    if pipeline.num_chunks == 1:
        return
    kept = "activations of chunks are always recomputed"
    bound = "all chunks go forward before one goes backward"
    clashes = (
        (recipe.packs, "packing", "chunks of packed rows are not offered yet"),
        (recipe.trains_pairs, "objective", "pairs are compared as a whole"),
        (recipe.neftune_noise_alpha > 0, "neftune_noise_alpha", "its noise is scaled by the length of the sequence"),
        (not SCHEDULE_KINDS[pipeline.schedule].takes_chunks, "pipeline.schedule", bound),
        (pipeline.recompute == "none", "pipeline.recompute", kept),
        (pipeline.keep_activations not in ("auto", 0), "pipeline.keep_activations", kept),
    )
    for clash, key, why in clashes:
        if clash:
            what = f"pipeline.sequence_chunks: {pipeline.sequence_chunks} does not go with {key}: {why}"
            findings.add(tuple(key.split(".")), what, hint=f"change {key}, or pipeline.sequence_chunks=1")
    most = max(1, recipe.max_seq_length // MIN_CHUNK_TOKENS)
    if pipeline.num_chunks > most:
        findings.add(
            ("pipeline", "sequence_chunks"),
            f"chunks of fewer than {MIN_CHUNK_TOKENS} tokens: passing all stages takes longer than computing them",
            found=f"{pipeline.num_chunks} chunks of max_seq_length {recipe.max_seq_length}",
            expected=f"at most {most}",
            hint=f"pipeline.sequence_chunks={most}, or a larger max_seq_length",
        )


def _find_frozen_full(recipe: Recipe, findings: Findings) -> None:
    """Packed weights, or such on a mapped file, cannot be trained."""
    kinds = (
        *((kind.key, getattr(recipe, kind.key)) for kind in PACKED_FORMATS.values()),
        ("weights", recipe.weights == "mmap"),
    )
    for key, asked in kinds:
        if asked and recipe.method == "full":
            what = "such weights are frozen, and full fine-tuning trains them"
            findings.add((key,), what, found="method: full", expected="method: lora")


def _find_stage_problems(pipeline: PipelineConfig, findings: Findings) -> None:
    """Check for stages and devices that no schedule takes."""
    forward_auto, backward_auto = pipeline.forward_stages == "auto", pipeline.backward_stages == "auto"
    is_bound = pipeline.binds_stages
    if not is_bound and forward_auto != backward_auto:
        what, expected = "forward_stages and backward_stages go together", "both given or both auto"
        findings.add(("pipeline",), what, found="one of them is auto", expected=expected)
    if is_bound and not backward_auto:
        what = f"{pipeline.schedule} takes no backward_stages: they mirror forward_stages"
        findings.add(("pipeline", "backward_stages"), what, expected="auto")
    for key, plain in IN_TURN.items():
        if is_bound and getattr(pipeline, key) not in plain:
            what = f"{pipeline.schedule} binds its stages to workers"
            expected = "schedule: roundpipe, or neither head_workers nor dispatch"
            findings.add(("pipeline", key), what, found=f"schedule: {pipeline.schedule}", expected=expected)
    devices = pipeline.devices
    if not isinstance(devices, str) and len({device == "cpu" for device in devices}) > 1:
        what, found = "processors and GPUs cannot work in one pool", ", ".join(devices)
        findings.add(("pipeline", "devices"), what, found=found, expected="either cpu or cuda devices")


def _find_optimizer_problems(recipe: Recipe, findings: Findings) -> None:
    """Check for keys that nothing reads."""
    defaults = {field.name: field.default for field in fields(Recipe)}
    used = OPTIMIZERS[recipe.optim].keys
    for key in OPTIMIZER_KEYS:
        if key not in used and getattr(recipe, key) != defaults[key]:
            findings.add((key,), f"{key} is not used by optim {recipe.optim}", hint=f"delete the line {key}")
    if recipe.frozen_parameters and recipe.method == "lora":
        hint = "choose what is adapted with lora.target_modules"
        findings.add(("frozen_parameters",), "with method lora the base weights are frozen anyway", hint=hint)
