"""Spellings of other trainers (Hugging Face Trainer, TRL, axolotl, LLaMA-Factory) for keys and values of a recipe.

Each is accepted with one line of notice. An alias beside the key it stands for is a mistake, never a silent choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roundpipe_cli.choices import OBJECTIVES, OPTIMIZERS, SCORING_OBJECTIVES
from roundpipe_cli.recipe.foreign import answer_of, answer_to, is_off, tables

Writes = Mapping[str, Any]
"""Dotted recipe key -> value. Empty: the line asks for nothing, or for what this tool always does."""


class LeaveOutError(ValueError):
    """A line is left out, for the reason given; `change` says what training does instead, where that differs."""

    def __init__(self, reason: str, change: str | None = None) -> None:
        super().__init__(reason)
        self.change = change


ANY: Any = object()
"""Stands for every value that a table does not name."""
Rule = Callable[..., Writes] | Mapping[Any, Writes | ValueError | str]
"""A key's meaning, by a function or by a table of values. A text is the recipe's key of the same value; in `change` of
LeaveOutError `{}` stands for the value. ValueError, which a function may raise: the value has no counterpart."""


def applied(rule: Rule, value: Any, *data: Mapping[str, Any]) -> Writes:
    """The writes of a key with this value; `data`: the whole file, for functions that want it.

    Raises:
        ValueError: the value has no counterpart here.
    """
    if callable(rule):
        return rule(value, *data)
    named = (one for choice, one in rule.items() if type(choice) is type(value) and choice == value)
    meant = next(named, rule.get(ANY))
    if meant is None:
        raise ValueError("expected one of " + ", ".join(str(choice).lower() for choice in rule))
    if isinstance(meant, LeaveOutError):
        raise LeaveOutError(str(meant), meant.change and meant.change.replace("{}", str(value)))
    if isinstance(meant, ValueError):
        raise ValueError(str(meant))
    return {meant: value} if isinstance(meant, str) else meant


NAMES: Mapping[str, str] = tables()["spellings"]
"""Plain renamings: recipe key -> other spellings."""

SPECIAL_TOKENS = ("new_special_tokens", "add_special_tokens", "additional_special_tokens")
"""Keys of other trainers with new tokens that their answers do not show."""
NOTES = {
    **dict.fromkeys(SPECIAL_TOKENS, "; they are ordinary tokens, so answers show them"),
    "per_device_train_batch_size": "; a step has micro_batch_size x gradient_accumulation_steps rows whatever the "
    "number of GPUs, which does not multiply it",
    "train_micro_batch_size_per_gpu": "; the number of GPUs does not multiply it",
}
"""Key of another trainer -> a note for those who are used to it."""


def _precision(dtype: str) -> Rule:
    otherwise = ValueError(f"write `dtype: {dtype}` or delete the line")
    return {**dict.fromkeys((True, "auto", "full"), {"dtype": dtype}), False: {}, None: {}, ANY: otherwise}


def _words(target: str) -> Rule:
    """LLaMA-Factory: words with commas between them; `all` modules are the linear ones."""

    def writes_of(value: Any) -> Writes:
        if target == "lora.target_modules" and value == "all":
            return {target: "all-linear"}
        return {target: [word.strip() for word in value.split(",")] if isinstance(value, str) else value}

    return writes_of


_SINGLE_STAGES = (None, "sft", "pt")


def _job(value: Any) -> Writes:
    """LLaMA-Factory's `stage` and axolotl's `rl`."""
    if value in _SINGLE_STAGES:
        return {}
    if value in SCORING_OBJECTIVES:
        return {"objective": value}
    raise ValueError(answer_to("objective", str(value)) or f"expected one of sft, pt, {', '.join(SCORING_OBJECTIVES)}")


_QLORA: Writes = {"method": "lora", "load_in_4bit": True}
_FULL_OR_LORA: Mapping[Any, Writes] = {"lora": {"method": "lora"}, "full": {"method": "full"}}
_ON_INPUTS: Rule = {True: {"train_on_inputs": False}, False: {"train_on_inputs": True}}

ALIASES: dict[str, Rule] = {
    **{name: {ANY: target} for target, names in NAMES.items() for name in names.split()},
    "bf16": _precision("bfloat16"),
    "fp16": _precision("float16"),
    "adapter": {**_FULL_OR_LORA, "qlora": _QLORA, None: {"method": "full"}},
    "finetuning_type": _FULL_OR_LORA,
    "use_peft": {True: {"method": "lora"}, False: {"method": "full"}},
    "pipeline.replicas": {1: {}},  # was a key; `dispatch: earliest_free` is never slower
    "quantization_bit": {4: {"load_in_4bit": True}, 8: {"load_in_8bit": True}, None: {}},
    "lora_target": _words("lora.target_modules"),
    "additional_target": _words("lora.modules_to_save"),
    **dict.fromkeys(("tokens", "added_tokens", "new_tokens", "add_new_tokens", *SPECIAL_TOKENS), _words("add_tokens")),
    "lora_target_linear": {True: {"lora.target_modules": "all-linear"}, False: {}, None: {}},
    "dataset_name": lambda value: {"datasets": [{"path": value}]},
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), _ON_INPUTS),
    "gradient_checkpointing": {
        **{True: {"pipeline.recompute": "stage"}, False: {"pipeline.recompute": "none"}},
        ANY: ValueError("write `pipeline: {recompute: stage}` or delete the line"),
    },
    "full_determinism": {True: {"deterministic": True}, False: {}, None: {}},
    **dict.fromkeys(("stage", "rl"), _job),
    **dict.fromkeys(("use_liger_kernel", "enable_liger_kernel"), {True: {"kernels": "auto"}, False: {}}),
    "freeze_vision_tower": {True: {}},
    **dict.fromkeys(("flash_attention", "strict"), {True: {}, False: {}, None: {}}),
    **dict.fromkeys(("dataset_prepared_path", "overwrite_cache", "preprocessing_num_workers"), {ANY: {}}),
    "do_train": {True: {}},
    "auto_resume_from_checkpoints": {True: {"resume_from_checkpoint": "auto"}, False: {}},
}
"""Dotted key of another trainer -> its meaning here."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

VALUE_ALIASES: dict[str, dict[Any, Any]] = {
    "dtype": {**_DTYPES, **{f"torch.{name}": name for name in ("bfloat16", "float16", "float32")}},
    "method": {"full_finetune": "full", "sft": "full"},
    "optim": {other: name for name, kind in OPTIMIZERS.items() for other in kind.other_names},
    "lr_scheduler_type": {"constant_with_warmup": "constant", "cosine_with_warmup": "cosine"},
    "lora.init": {True: "default"},
    "report_to": {"none": [], None: [], **{name: [name] for name in ("tensorboard", "wandb", "mlflow", "trackio")}},
    "max_steps": {-1: None},
    "resume_from_checkpoint": {True: "auto", False: None},
    "datasets[].type": {
        "chat_template": "chat",
        "conversational": "chat",
        "completion": "text",
        "prompt-completion": "prompt_completion",
        "instruction": "alpaca",
    },
    "lora.target_modules": {"all": "all-linear"},
    "max_grad_norm": {None: 0.0},
}
"""Recipe key -> other spellings of its values."""


def value_alias(key: str, value: Any) -> tuple[bool, Any]:
    """(whether `value` is another spelling, the value to use) for a recipe key with dots."""
    for spelling, meant in VALUE_ALIASES.get(key, {}).items():
        if type(spelling) is type(value) and spelling == value:
            return True, meant
    if key == "num_train_epochs" and isinstance(value, float) and value == value // 1 and abs(value) < 2**31:
        return True, int(value)
    return False, value


SECTIONS = ("lora", *(kind.section for kind in OBJECTIVES.values() if kind.section), "pipeline", "nodes")
"""Sections of a recipe, in which keys of other trainers are answered as at its top."""

REMOVED: dict[str, str] = {
    "fp8_products": "it saved no time; `load_in_fp8: true` alone keeps the weights in FP8, on any GPU",
    "pipeline.optimizer_staleness": "each layer of a step now waits for its own update alone, which hides most of an "
    "update beside the next step and keeps steps exact",
}
"""Dotted keys that recipes once had: refused with this advice, dropped with a notice where they are off. A run that
began with one of them off may be resumed."""


def was_off(key: str, value: Any) -> bool:
    """Whether a key that recipes no longer have asked for nothing."""
    return key in REMOVED and (is_off(value) or value == 0)


def conversion_of(key: str, value: Any) -> Rule | None:
    """The meaning of a key of another trainer, or of its value for one of ours; None: it is no such key."""
    if key == "method" and isinstance(value, str) and value.lower() == "qlora":
        return {ANY: _QLORA}
    if key in REMOVED:
        return {ANY: {} if was_off(key, value) else ValueError(REMOVED[key])}
    return ALIASES.get(key)


def refusal_of(key: str, value: Any) -> Rule | None:
    """The answer to a key that only other trainers have, at the top of a recipe or in one of its sections; None: it is
    in no table. Nothing is asked for by one that is off."""
    section, _, name = key.rpartition(".")
    answer = answer_of(name) if section in ("", *SECTIONS) else None
    return answer and {ANY: {} if is_off(value) else ValueError(answer.hint)}
