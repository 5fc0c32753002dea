"""Keys of other tools whose meaning depends on their value or on other keys: one small function each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal

from roundpipe_cli.choices import PAIR_OBJECTIVES, PairObjective
from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.recipe.aliases import ALIASES, SPECIAL_TOKENS, Writes, is_off, value_alias
from roundpipe_cli.recipe.convert_tables import (
    INTERVAL_RULES,
    NEAR_OPTIMIZERS,
    OTHER_TEMPLATES,
    Conversion,
    ConversionRule,
    Data,
    LeaveOutError,
    Partly,
    Tool,
    is_own_template,
    short,
)
from roundpipe_cli.recipe.schema import LoraConfig, Recipe
from roundpipe_cli.recipe.strict_yaml import shown_value

# The objective of another tool's file, and its keys for losses that compare answers.
#
# A tool reads such a key in one kind of job. Elsewhere it changes nothing, and neither does it here.

Job = Literal["sft", "pretraining"] | PairObjective
_LOSSES: Mapping[str, Job] = {"sigmoid": "dpo", "orpo": "orpo", "simpo": "simpo"}
"""LLaMA-Factory's `pref_loss`."""

OBJECTIVE_KEY = "(objective)"
"""Key under which a file's data hold an objective that the user named."""


def with_objective(data: Mapping[str, Any], tool: Tool, objective: Job, name: str) -> dict[str, Any]:
    """The data of a file whose objective the user names.

    Raises:
        RefusedError: the file says for itself what it trains.
    """
    found = job_of(data, tool)
    if tool != "trl" and found != objective:
        raise RefusedError(
            "a file of this tool says for itself what it trains",
            where=name,
            found=f"{tool}, {found or 'another job'}",
            expected="--objective for a file of TRL's trainers",
        )
    return {**data, OBJECTIVE_KEY: objective} if tool == "trl" else dict(data)


def job_of(data: Mapping[str, Any], tool: Tool) -> Job | None:
    """The job of a file, as far as its objective goes; None: one that is not offered."""
    named: Job | None = data.get(OBJECTIVE_KEY)
    if named is not None:
        return named
    if tool == "llama-factory":
        stage = "sft" if data.get("stage") is None else str(data["stage"])
        stages: Mapping[str, Job] = {"sft": "sft", "pt": "pretraining"}
        return _LOSSES.get(str(data.get("pref_loss") or "sigmoid")) if stage == "dpo" else stages.get(stage)
    if tool == "axolotl":
        if is_off(data.get("rl")):
            return "sft" if is_off(data.get("pretraining_dataset")) else "pretraining"
        is_usual = data.get("dpo_loss_type") in (None, ["sigmoid"])
        kind = next((name for name in PAIR_OBJECTIVES if name == str(data["rl"]).lower()), None)
        return kind if kind != "dpo" or is_usual else None
    loss = data.get("loss_type")
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    sft = (None, "nll", "chunked_nll", "dft")
    return "sft" if loss in sft else {"sigmoid": "dpo", "simpo": "simpo"}.get(str(loss))  # type: ignore[return-value]


def is_pairs(job: Job | None) -> bool:
    """Whether a row of this job is a chosen and a rejected answer."""
    return job in PAIR_OBJECTIVES


_BETAS = {"dpo": "dpo.beta", "orpo": "orpo.beta", "simpo": "simpo.beta"}
_TARGETS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("pref_beta", "rl_beta", "dpo_beta", "beta", "trl"), _BETAS),
    "orpo_alpha": _BETAS,
    "simpo_gamma": {"simpo": "simpo.simpo_gamma"},
    "cpo_alpha": {"simpo": "simpo.cpo_alpha"},
    "dpo_label_smoothing": {"dpo": "dpo.label_smoothing"},
    "label_smoothing": {"dpo": "dpo.label_smoothing", "simpo": "simpo.label_smoothing"},
}
"""Key of another tool -> objective -> recipe key."""

_REFERENCE = "the reference is the base model, or the adapter of lora.start_from as it is"
_PAIR_CHANGES: Mapping[str, str] = {
    **dict.fromkeys(("ref_model", "ref_model_adapters", "ref_model_quantization_bit"), _REFERENCE),
    **dict.fromkeys(("reference_free", "sync_ref_model"), _REFERENCE),
    **dict.fromkeys(("pref_ftx", "rpo_alpha"), "the chosen answers' likelihood has no part in the loss"),
    "pref_bco_weight": "no classifier's loss is added",
    "ld_alpha": "every token of an answer weighs the same",
    **dict.fromkeys(("dpo_use_weighting", "use_weighting"), "every pair weighs the same"),
    **dict.fromkeys(("dpo_loss_weights", "loss_weights"), "the loss has the weight 1"),
    "f_divergence_type": "the reverse KL divergence is used",
    "alpha": "rewards are not transformed (AlphaPO)",
    "dpo_norm_loss": "the loss is not divided by lengths",
}
"""Keys that have no counterpart in a job with pairs, and what is trained instead."""

_DECIDE = ("rl", "stage", "pref_loss", "dpo_loss_type", "loss_type")
"""Keys that name the objective."""
_SILENT = """
    precompute_ref_log_probs dpo_padding_free dpo_use_liger_kernel
    dpo_use_logits_to_keep dpo_generate_during_eval generate_during_eval precompute_ref_batch_size max_prompt_len
    max_prompt_length max_completion_length disable_dropout train_on_prompt train_on_inputs mask_history
    kto_chosen_weight kto_rejected_weight desirable_weight undesirable_weight kto_desirable_weight
    kto_undesirable_weight ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model
    reward_model_adapters reward_model_quantization_bit reward_model_type
"""
_WITHOUT_EFFECT = frozenset(_SILENT.split())
"""Keys that other jobs read, or that only change how the same is computed."""
_OF_SFT = frozenset(("train_on_prompt", "train_on_inputs", "mask_history", "loss_type"))
LOSS_KEYS = frozenset({*_TARGETS, *_PAIR_CHANGES, *_WITHOUT_EFFECT, *_DECIDE} - _OF_SFT)
"""Keys about losses that compare answers."""

JOB_DEFAULTS: Mapping[Tool, Mapping[str, Mapping[str, Any]]] = {
    "axolotl": {"simpo": {"simpo.beta": 0.1, "simpo.cpo_alpha": 1.0}},
    "llama-factory": {
        "pretraining": {"packing": True},
        "orpo": {"orpo.nll_on_prompt": False},
        "simpo": {"simpo.beta": 0.1},
    },
    "trl": {
        "dpo": {"learning_rate": 1.0e-6},
        "orpo": {"learning_rate": 1.0e-6},
        "simpo": {"learning_rate": 1.0e-6, "simpo.beta": 0.1, "simpo.cpo_alpha": 1.0},
    },
}
"""Defaults of a tool in a job where ours are others: as in `convert_tables.DEFAULTS`, which they go before."""


def reads_loss_key(key: str, job: Job, tool: Tool) -> bool:
    """Whether `loss_writes` knows the key in a file of this job.

    The files of TRL do not say for which of its programs they are: there, such a key is a sign of another job.
    """
    if is_pairs(job):
        return key in LOSS_KEYS or key in _OF_SFT
    return key in LOSS_KEYS and tool != "trl" and not (tool == "axolotl" and key in ("trl", "reward_model"))


def loss_writes(key: str, value: Any, data: Mapping[str, Any], job: Job) -> Writes:
    """The keys that a key of such losses becomes; nothing where the job does not read it.

    Raises:
        LeaveOutError: it has no counterpart.
    """
    if value is None or not is_pairs(job) or key in _WITHOUT_EFFECT:
        return {}
    if key in _DECIDE:
        return {"objective": job}
    if key == "trl":
        return _trl_section(value, job)
    if key in ("rl_beta", "orpo_alpha", "dpo_beta") and _precedes(key, data):
        raise LeaveOutError("another key decides: trl.beta, then rl_beta, then orpo_alpha")
    target = _TARGETS.get(key, {}).get(job)
    if target is not None:
        return {target: value}
    is_usual = is_off(value) or value in (0, 0.0, data.get("model_name_or_path"), "reverse_kl")
    if key in _PAIR_CHANGES and not is_usual and not (job != "dpo" and _PAIR_CHANGES[key] == _REFERENCE):
        raise LeaveOutError("no counterpart here", _PAIR_CHANGES[key])
    return {}


def _precedes(key: str, data: Mapping[str, Any]) -> bool:
    """Whether axolotl reads another key in place of this one."""
    section = data.get("trl")
    first = section.get("beta") if isinstance(section, dict) else None
    return first is not None or (key != "rl_beta" and data.get("rl_beta") is not None)


def _trl_section(value: Any, job: Job) -> Writes:
    """axolotl's `trl`, of whose keys jobs with pairs read `beta`."""
    section = value if isinstance(value, dict) else {}
    others = [name for name, setting in section.items() if name != "beta" and not is_off(setting)]
    if others:
        raise LeaveOutError(f"{shown_value(', '.join(others))}: read in reinforcement learning only")
    return {} if section.get("beta") is None else {_BETAS[job]: section["beta"]}


def _only(usual: tuple[Any, ...], reason: str, change: str | None) -> ConversionRule:
    """Values that ask for what is always done here; of others the line is left out, and `change` says what is done."""

    def writes_of(value: Any, data: Data) -> Writes:
        if value in usual:
            return {}
        raise LeaveOutError(reason, change and change.format(value))

    return writes_of


def _on_by_default(change: str) -> ConversionRule:
    """A switch that does what is done here; `change` says what becomes of a file that turns it off."""
    return lambda value, data: {} if value is not False else _only((), "cannot be turned off here", change)(value, data)


def _if_true(writes: Writes) -> ConversionRule:
    """A switch that changes nothing where it is off."""
    return lambda value, data: writes if value is True else {}


def _as(target: str) -> ConversionRule:
    """The value as it is, under the recipe's name."""
    return lambda value, data: {target: value}


def _min_lr_ratio(value: Any, data: Data) -> Writes:
    if not value:
        return {}
    if data.get("lr_scheduler", "cosine") not in (None, "cosine"):
        raise LeaveOutError("axolotl reads it with lr_scheduler: cosine only")
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": value}}


def _schedule(value: Any, data: Data) -> Writes:
    if value == "cosine" and data.get("cosine_min_lr_ratio"):
        return {}  # `_min_lr_ratio` writes the schedule
    return {"lr_scheduler_type": value}


def _warmup_ratio(value: Any, data: Data) -> Writes:
    """Steps go before a ratio, as in transformers, whichever the file says first."""
    if not data.get("warmup_steps"):
        return {"warmup_steps": value}
    if not value:
        return {}
    raise LeaveOutError("warmup_steps says otherwise", "warmup_steps decides")


def _accumulation_of_batch(value: Any, data: Data) -> Writes:
    """axolotl's `batch_size` is the micro batch times the accumulation."""
    micro = data.get("micro_batch_size") or 1
    if "base_model" not in data:
        raise LeaveOutError("LLaMA-Factory reads it in evaluations only")
    if data.get("gradient_accumulation_steps"):
        return {}
    if not isinstance(value, int) or not isinstance(micro, int) or value % micro:
        raise LeaveOutError("no multiple of micro_batch_size", "the batch is micro_batch_size")
    return {"gradient_accumulation_steps": value // micro}


def _optimizer(value: Any, data: Data) -> Writes:
    if isinstance(value, str) and value in NEAR_OPTIMIZERS:
        ours, change = NEAR_OPTIMIZERS[value]
        return Partly({"optim": ours}, change)
    return {"optim": value}


def _lora_targets(value: Any, data: Data) -> Writes:
    if data.get("lora_target_linear") is True:
        raise LeaveOutError("lora_target_linear adapts every linear layer, these among them")
    return {"lora.target_modules": value}


def _start_of_adapters(value: Any, data: Data) -> Writes:
    if value is True or value in ("default", "gaussian"):
        return {"lora.init": "default" if value is True else value}
    reason = "starts that change the base weights are not offered"
    raise LeaveOutError(reason, "the adapters start by lora.init in place of that")


def _adapters(value: Any, data: Data) -> Writes:
    """LLaMA-Factory merges all adapters but the last into the base weights, and every one before a new adapter."""
    if data.get("create_new_adapter") or not isinstance(value, str) or "," in value:
        raise LeaveOutError("merge them into the model first", "the base weights are without those adapters")
    writes = {"lora.start_from": value}
    what = "this adapter is the reference; LLaMA-Factory's is the base model below it"
    return Partly(writes, what) if job_of(data, "llama-factory") == "dpo" else writes


def _packing(value: Any, data: Data) -> Writes:
    if value is True and "cutoff_len" in data and not data.get("neat_packing"):
        return Partly({"packing": True}, "packed rows do not see each other; LLaMA-Factory's do without neat_packing")
    return {"packing": value}


def _packing_strategy(value: Any, data: Data) -> Writes:
    if value == "bfd" or data.get("packing") is not True:
        return {}
    raise LeaveOutError("long rows are cut, never continued in the next sequence", "rows are packed whole")


def _sampling(value: Any, data: Data) -> Writes:
    if value in ("sequential", "random"):
        return {"shuffle": value == "random"}
    raise LeaveOutError("rows come in random order or in theirs", f"rows come in random order, not {value}")


def _thinking(value: Any, data: Data) -> Writes:
    """LLaMA-Factory cuts thoughts out of answers or adds empty ones; here the tokenizer's template decides."""
    return Partly({"chat_template_kwargs": {"enable_thinking": value}}, "thoughts are as the chat template writes them")


def _generated(value: Any, data: Data) -> Writes:
    """LLaMA-Factory's `max_length` is of generated answers; its rows have `cutoff_len`."""
    is_of_rows = not {"cutoff_len", "finetuning_type", "template", "stage", "dataset"} & set(data)
    return {"max_seq_length": value} if is_of_rows else {}


def _hub_name(value: Any, data: Data) -> Writes:
    """axolotl uploads where there is a name, the others where `push_to_hub` says so."""
    return {"hub_model_id": value} if "base_model" in data or data.get("push_to_hub") is True else {}


def _hub_push(value: Any, data: Data) -> Writes:
    if value is True and not data.get("hub_model_id"):
        raise LeaveOutError("name the repository: hub_model_id", "nothing is uploaded")
    return {}


def _resume(value: Any, data: Data) -> Writes:
    if value is False:
        return {}
    if value is True or value == "auto":
        raise LeaveOutError("`roundpipe finetune RECIPE --resume` continues a run that was stopped")
    reason = "checkpoints of other programs are not read; lora.start_from continues an adapter"
    raise LeaveOutError(reason, "training starts afresh")


def _unfrozen(value: Any, data: Data) -> Writes:
    """axolotl trains what one of its patterns matches from the start of a name; their periods are literal."""
    patterns = [str(pattern) for pattern in (value if isinstance(value, list) else [value])]
    if data.get("adapter"):
        raise LeaveOutError("the base weights stay frozen beside adapters", "adapters are trained, and nothing else")
    if any(re.search(r"\[\d*:?\d*\]$", pattern) for pattern in patterns):
        raise LeaveOutError("whole parameters are frozen, not rows of them", "every weight is trained")
    literal = [re.sub(r"\.(?!\+)", r"\\.", pattern) for pattern in patterns]
    frozen = f"^(?!{'|'.join(f'(?:{pattern})' for pattern in literal)})"
    return Partly({"frozen_parameters": [frozen]}, "frozen_parameters names the opposite; check the names")


_TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")


def _chat_template(value: Any, data: Data) -> Writes:
    if "{%" in str(value) or "{{" in str(value) or str(value).endswith(_TEMPLATE_FILES):
        return {"chat_template": value}
    if str(value).startswith("tokenizer_default") or (value == "jinja" and data.get("chat_template_jinja")):
        return {}
    if is_own_template(str(value), str(data.get("base_model"))):
        return {}
    reason = "the tokenizer's own chat template is used; another one is text or a separate file in the recipe"
    change = f"not the template {value}, but the tokenizer's own" if value in OTHER_TEMPLATES else None
    raise LeaveOutError(reason, change)


def _template_path(value: Any, data: Data) -> Writes:
    if str(value).endswith(_TEMPLATE_FILES):
        return {"chat_template": value}
    reason = "the tokenizer's own chat template is used: give a template's own file"
    raise LeaveOutError(reason, f"not the chat template of {value}")


def _factory_template(value: Any, data: Data) -> Writes:
    if is_own_template(str(value), str(data.get("model_name_or_path"))):
        return {}
    change = f"not the template {value}, but the tokenizer's own" if value in OTHER_TEMPLATES else None
    raise LeaveOutError("the tokenizer's own chat template is used; check that it is the one meant", change)


_MORE = "additional_special_tokens"


def _new_tokens(value: Any, data: Data) -> Writes:
    """All words that a file adds: LLaMA-Factory and axolotl have two lists of them."""
    section = data.get("special_tokens")
    more = section.get(_MORE) if isinstance(section, dict) else None
    lists = [data.get(key) for key in ("add_tokens", "tokens", *SPECIAL_TOKENS)] + [more]
    words = [word for one in lists if one for word in ALIASES["tokens"](one)["add_tokens"]]
    return {"add_tokens": list(dict.fromkeys(words))} if value else {}


def _special(value: Any, data: Data) -> Writes:
    return Partly(_new_tokens(value, data), "the new tokens are ordinary ones, so answers show them")


def _resized(value: Any, data: Data) -> Writes:
    return {} if not value or _new_tokens(True, data)["add_tokens"] else _only((), *_SAME_SIZE)(value, data)


_SAME_SIZE = "the embedding grows with add_tokens only", "the embedding keeps its size"


def _tokens(value: Any, data: Data) -> Writes:
    names = [key for key in value if key not in ("pad_token", "unk_token", _MORE)] if isinstance(value, dict) else ["?"]
    if not names:  # padding is never trained and never seen
        return _special(True, data) if value.get(_MORE) else {}
    raise LeaveOutError("the tokenizer's own tokens are used", f"the tokenizer's own {', '.join(names)}")


def _bf16(value: Any, data: Data) -> Writes:
    """Off, and nothing in its place, is float32 in axolotl and TRL."""
    if value is False:
        others = ("fp16", "bfloat16", "float16", "dtype", "torch_dtype", "pure_bf16", "cutoff_len")
        return {} if any(data.get(key) for key in others) else {"dtype": "float32"}
    return {} if value == "auto" and data.get("fp16") is True else {"dtype": "bfloat16"}


def _loss_type(value: Any, data: Data) -> Writes:
    if value == "dft":
        raise LeaveOutError("only cross-entropy is offered", "the ordinary cross-entropy is trained in place of DFT's")
    return {}


def _plugins(value: Any, data: Data) -> Writes:
    harmless = {"liger", "cut_cross_entropy", "kernels", "expert_parallel", "swanlab", "hatchery", "lm_eval"}
    plugins = value if isinstance(value, list) else [value]
    others = [str(plugin) for plugin in plugins if not harmless & set(str(plugin).split("."))]
    if others:
        raise LeaveOutError("plugins are not run", f"{', '.join(others)} is not run")
    return {}


_SHARES = "shares of the draws become datasets[].weight, shares of an epoch's rows"
_BEST = "the loss decides which weights are best", "the best weights are those of the lowest loss"
_NF4 = "4 bit is bitsandbytes' NF4", "the base weights are packed as NF4, not {}"

RULES: Mapping[str, ConversionRule] = {
    "hub_model_id": _hub_name,
    "push_to_hub": _hub_push,
    "excess_length_strategy": lambda value, data: {"long_rows": "error" if value == "raise" else value},
    "cosine_min_lr_ratio": _min_lr_ratio,
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), _schedule),
    "warmup_steps": lambda value, data: {} if not value and data.get("warmup_ratio") else {"warmup_steps": value},
    "warmup_ratio": _warmup_ratio,
    "batch_size": _accumulation_of_batch,
    **dict.fromkeys(("optimizer", "optim"), _optimizer),
    "lora_target_modules": _lora_targets,
    "peft_init_lora_weights": _start_of_adapters,
    "peft": _only((), "see lora.init", "the adapters start by lora.init in place of LoftQ"),
    "adapter_name_or_path": _adapters,
    "neat_packing": _if_true({"packing": True}),
    "packing": _packing,
    "packing_strategy": _packing_strategy,
    "truncation_mode": _only(("keep_start",), "the start of a long row is kept", "long rows lose their end"),
    **dict.fromkeys(("disable_shuffling", "curriculum_sampling"), _if_true({"shuffle": False})),
    "train_sampling_strategy": _sampling,
    "ignore_pad_token_for_loss": _on_by_default("padding is never trained"),
    "average_tokens_across_devices": _on_by_default("the loss is a mean over all tokens of a step"),
    "pretrain_multipack_attn": _on_by_default("packed texts do not see each other"),
    "enable_thinking": _thinking,
    "max_length": _generated,
    "shuffle_dataset": lambda value, data: {},
    **INTERVAL_RULES,
    "metric_for_best_model": _only(("loss", "eval_loss"), *_BEST),
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints"), _resume),
    "early_stopping_steps": _as("early_stopping_patience"),
    "unfrozen_parameters": _unfrozen,
    "chat_template": _chat_template,
    "chat_template_jinja": _as("chat_template"),
    "chat_template_path": _template_path,
    "template": _factory_template,
    "special_tokens": _tokens,
    **dict.fromkeys(("add_tokens", "tokens"), _new_tokens),
    **dict.fromkeys(SPECIAL_TOKENS, _special),
    "resize_vocab": _resized,
    **dict.fromkeys(("dtype", "torch_dtype"), lambda value, data: {} if value == "auto" else {"dtype": value}),
    "bf16": _bf16,
    **dict.fromkeys(("bfloat16", "pure_bf16"), _if_true({"dtype": "bfloat16"})),
    **{name: _if_true({"dtype": name}) for name in ("float16", "float32")},
    "completion_only_loss": lambda value, data: {"train_on_inputs": not value},
    "assistant_only_loss": _if_true({"train_on_inputs": False}),
    "loss_type": _loss_type,
    **dict.fromkeys(("bnb_4bit_quant_type", "quantization_type", "quantization_method"), _only(("nf4", "bnb"), *_NF4)),
    **dict.fromkeys(("lora_bias", "bias"), _only(("none", False), "biases stay frozen", "no biases are trained")),
    "plugins": _plugins,
    **dict.fromkeys(("do_predict", "predict_with_generate"), _only((), "predictions are no part of training", None)),
    "report_to": lambda value, data: {"report_to": [] if value == ["none"] else value},
    "use_tensorboard": _if_true({"report_to": ["tensorboard"]}),
    "mix_strategy": _only(("concat",), "rows are mixed by datasets[].weight", "rows are not mixed by {!r}"),
    "interleave_probs": lambda value, data: Partly({}, _SHARES),
    "adam_eps": _as("adam_epsilon"),
}
"""Key of another tool -> its rule; they go before every table."""


# Collects the values of a converted recipe, each checked alone, and the defaults of the other tool.

_NOT_TRAINING = frozenset(
    ("output_dir", "logging_steps", "save_steps", "save_total_limit", "report_to", "eval_steps", "eval_samples")
    + ("eval_max_new_tokens", "resume_from_checkpoint", "watchdog_s", "hardware", "pipeline")
)
"""Recipe keys that do not change what is trained: without them, the recipe's first line says nothing."""


class RecipeWrites:
    """Values for dotted recipe keys, each with the key of the file that it comes from."""

    def __init__(self, result: Conversion) -> None:
        self.values: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        """Keys that come from the other tool's defaults."""
        self._sources: dict[str, tuple[str, Any]] = {}
        self.result = result
        self.refused: set[str] = set()
        """Recipe keys that the file speaks of with a value that is not accepted: no default comes in its place."""

    def put(self, target: str, value: Any, key: str, written: Any) -> None:
        """Write `value`, or list the file's line as left out: it contradicts another, or a recipe refuses it."""
        known, meant = value_alias(target, value)
        value = meant if known else value
        if target in self.values and self.values[target] != value:
            other = self._sources[target][0]
            self.result.leave_out(key, written, f"{other} says otherwise", change=f"{other} decides")
            return
        self.values[target] = value
        self._sources.setdefault(target, (key, written))

    def leave_out(self, error: RecipeError) -> None:
        """Take the value of the first problem out of the recipe; its line is listed as left out.

        Raises:
            RecipeError: it is one that a recipe cannot do without.
        """
        problem = error.problems[0]
        place = (problem.where or "").rpartition(": ")[2].partition(" (")[0]
        target = max(
            (known for known in self._sources if re.match(rf"{re.escape(known)}\b", place)), key=len, default="model"
        )
        if target == "model":
            raise error
        key, written = self._sources.pop(target)
        del self.values[target]
        self.defaults.pop(target, None)
        expected = f" (expected: {problem.expected})" if problem.expected else ""
        self.refuse(target, key, written, problem.what + expected)

    def refuse(self, target: str, key: str, written: Any, reason: str) -> None:
        """List a line whose value no recipe can have, with what the recipe does instead."""
        self.refused.add(target)
        change = None
        if target.partition(".")[0] not in _NOT_TRAINING:
            change = f"not {short(written)}, but {target}: {_ours(target)}"
        self.result.leave_out(key, written, reason, change=change)

    def default(self, key: str, value: Any) -> None:
        """A default of the other tool, where its file says nothing about the same thing."""
        alias = ALIASES.get(key, lambda value: {key: value})
        for target, meant in (RULES[key](value, {}) if key in RULES else alias(value)).items():
            if target not in self.values and target not in self.refused:
                self.values[target] = meant
                self._sources[target] = (f"{key} (default of {self.result.tool})", value)
                self.defaults[target] = meant

    def drop(self, section: str, why: str) -> None:
        """Take a section out of the recipe again; its lines are listed as left out."""
        for target in [key for key in self.values if key.startswith(f"{section}.")]:
            key, written = self._sources.pop(target)
            del self.values[target]
            if self.defaults.pop(target, None) is None:
                self.result.leave_out(key, written, why)


def _ours(target: str) -> Any:
    """A recipe key's own default, as a note shows it."""
    schema = LoraConfig if target.startswith("lora.") else Recipe
    default = {entry.name: entry.default for entry in fields(schema)}.get(target.rpartition(".")[2], MISSING)
    return "what it is without that line" if default is MISSING else short(default)
