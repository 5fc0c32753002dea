"""Rules for the keys of other tools, and the lists into which they bring a file's lines."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any, Literal, get_args

from roundpipe_cli.choices import OBJECTIVES, SCORING_OBJECTIVES, Objective, objectives_of
from roundpipe_cli.errors import RecipeError
from roundpipe_cli.recipe.aliases import ALIASES, ANY, SPECIAL_TOKENS, LeaveOutError, Rule, Writes, applied, value_alias
from roundpipe_cli.recipe.check import known_keys
from roundpipe_cli.recipe.foreign import CROSS_ENTROPY, answer_of, is_off
from roundpipe_cli.recipe.keys import recipe_keys
from roundpipe_cli.recipe.load import values_as_yaml
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.strict_yaml import shown_value

Tool = Literal["axolotl", "llama-factory", "trl"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
TABLES: Mapping[str, Any] = json.loads(files("roundpipe_cli.recipe").joinpath("convert.json").read_text("utf-8"))
"""Names that the other tools have for things, and their defaults: axolotl 0.19's schema and trainer builder,
LLaMA-Factory 0.9.5's and TRL 1.16's arguments above transformers' TrainingArguments."""

UNKNOWN = "no key that is known here: what it does to training is not done"
"""Reason to leave out a key of no table, of another release or a plugin: any of them may change what is trained."""

# Rules: from a line of a file to values of a recipe.


class Partly(dict[str, Any]):
    """Writes that do nearly what the line says; `change` names the difference."""

    def __init__(self, writes: Writes, change: str) -> None:
        super().__init__(writes)
        self.change = change


Data = Mapping[str, Any]


def _only(usual: tuple[Any, ...], reason: str, change: str) -> Rule:
    """Values that ask for what is always done here; of others the line is left out."""
    return {**dict.fromkeys(usual, {}), ANY: LeaveOutError(reason, change)}


def _unless_false(change: str) -> Rule:
    """A switch that does what is done here; `change` says what becomes of a file that turns it off."""
    return {False: LeaveOutError("cannot be turned off here", change), ANY: {}}


def _if_true(writes: Writes) -> Rule:
    """A switch that changes nothing where it is off."""
    return {True: writes, ANY: {}}


# The objective of another tool's file, and its keys for losses that compare answers.
#
# A tool reads such a key in one kind of job. Elsewhere it changes nothing, and neither does it here.

Job = Objective | Literal["pretraining"]
PAIRED, LABELLED = objectives_of("pair"), objectives_of("labelled")
"""Jobs whose rows are a chosen and a rejected answer, or an answer with a label."""
WITH_REFERENCE = tuple(name for name, kind in OBJECTIVES.items() if kind.needs_reference)
"""Jobs that compare with a reference model."""
PAIR_STAGE = "dpo"
"""LLaMA-Factory's `stage` and axolotl's `rl` beside which another key may name the loss."""
_STAGES: Mapping[str, Job] = {"sft": "sft", "pt": "pretraining", **{name: name for name in LABELLED}}
_LOSSES: Mapping[str, Job] = {kind.loss_type: name for name, kind in OBJECTIVES.items() if kind.loss_type}
"""LLaMA-Factory's `pref_loss`, axolotl's `dpo_loss_type` and TRL's `loss_type`, of which ORPO's is another trainer."""


def job_of(data: Mapping[str, Any], tool: Tool) -> Job | None:
    """The job of a file, as far as its objective goes; None: one that is not offered."""
    if tool == "llama-factory":
        stage = "sft" if data.get("stage") is None else str(data["stage"])
        return _LOSSES.get(str(data.get("pref_loss") or "sigmoid")) if stage == PAIR_STAGE else _STAGES.get(stage)
    if tool == "axolotl":
        if is_off(data.get("rl")):
            return "sft" if is_off(data.get("pretraining_dataset")) else "pretraining"
        kind = next((name for name in SCORING_OBJECTIVES if name == str(data["rl"]).lower()), None)
        losses = data.get("dpo_loss_type")
        if losses is None or kind != PAIR_STAGE:
            return kind
        return _LOSSES.get(str(losses[0])) if isinstance(losses, list) and len(losses) == 1 else None
    loss = data.get("loss_type")
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    sft = (None, "nll", "chunked_nll", "dft")
    return "sft" if loss in sft else _LOSSES.get(str(loss))


def _settings_named(key: str) -> Mapping[str, str]:
    """Objective -> its dotted recipe key of this name, where it has one."""
    dotted = {name: f"{kind.section}.{key}" for name, kind in OBJECTIVES.items() if kind.section}
    return {name: path for name, path in dotted.items() if path in known_keys(Recipe)}


_REFERENCE = "the reference is the base model, or the adapter of lora.start_from as it is"
_BETAS: Mapping[str, str] = _settings_named("beta")
_OWN_NAMES = ("simpo_gamma", "cpo_alpha", "label_smoothing", "desirable_weight", "undesirable_weight")
LOSS_KEYS: Mapping[str, Mapping[str, str] | str] = {
    **dict.fromkeys(("rl", "stage", "pref_loss", "dpo_loss_type", "loss_type"), "objective"),
    **dict.fromkeys(("pref_beta", "rl_beta", "dpo_beta", "beta", "trl", "orpo_alpha"), _BETAS),
    **{key: _settings_named(key) for key in _OWN_NAMES},
    "dpo_label_smoothing": {"dpo": "dpo.label_smoothing"},
    **dict.fromkeys(("kto_desirable_weight", "kto_chosen_weight"), _settings_named("desirable_weight")),
    **dict.fromkeys(("kto_undesirable_weight", "kto_rejected_weight"), _settings_named("undesirable_weight")),
    **dict.fromkeys(TABLES["losses"]["reference"].split(), _REFERENCE),
    **dict.fromkeys(
        TABLES["losses"]["other terms"].split(),
        "the loss is that of its paper, without other terms, weights or divergences",
    ),
    **dict.fromkeys(TABLES["losses"]["silent"].split(), {}),
}
"""Keys about losses that compare answers: the recipe's key by objective, none where other jobs read it or the same is
computed in another way; the sentence of what is trained in place of one without a counterpart; or `objective`."""
_OF_SFT = ("train_on_prompt", "train_on_inputs", "mask_history", "loss_type")


def reads_loss_key(key: str, job: Job, tool: Tool) -> bool:
    """Whether such a key in a file of this job is known to change it, or nothing.

    The files of TRL do not say for which of its programs they are: there, such a key is a sign of another job.
    """
    if job in SCORING_OBJECTIVES or key not in LOSS_KEYS:
        return key in LOSS_KEYS
    return key not in _OF_SFT and tool != "trl" and not (tool == "axolotl" and key in ("trl", "reward_model"))


def _loss_writes(key: str, value: Any, data: Data, job: Job) -> Writes:
    """The keys that a key of such losses becomes; nothing where the job does not read it."""
    meant = LOSS_KEYS[key]
    if job not in SCORING_OBJECTIVES or (key == "dpo_loss_type" and job not in WITH_REFERENCE):
        return {}
    if meant == "objective":
        return {"objective": job}
    given = data.get("trl")
    section = given if isinstance(given, dict) else {}
    if key == "trl":  # axolotl's, of whose keys jobs with pairs read `beta`
        value = section.get("beta")
        others = [name for name, setting in section.items() if name != "beta" and not is_off(setting)]
        if others and value is None:
            raise LeaveOutError(f"{shown_value(', '.join(others))}: read in reinforcement learning only")
    is_second = section.get("beta") is not None or (key != "rl_beta" and data.get("rl_beta") is not None)
    if is_second and key in ("rl_beta", "orpo_alpha", "dpo_beta"):
        raise LeaveOutError("another key decides: trl.beta, then rl_beta, then orpo_alpha")
    if not isinstance(meant, str):
        return {meant[job]: value} if job in meant and value is not None else {}
    is_usual = is_off(value) or value in (0, 0.0, data.get("model_name_or_path"), "reverse_kl")
    if is_usual or (meant == _REFERENCE and job not in WITH_REFERENCE):
        return {}
    raise LeaveOutError("no counterpart here", meant)


# Rules that depend on other keys, or on more than a table of values.


def _min_lr_ratio(value: Any, data: Data) -> Writes:
    if not value:
        return {}
    if data.get("lr_scheduler", "cosine") not in (None, "cosine"):
        raise LeaveOutError("axolotl reads it with lr_scheduler: cosine only")
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": value}}


def _schedule(value: Any, data: Data) -> Writes:
    is_other = value == "cosine" and data.get("cosine_min_lr_ratio")  # `_min_lr_ratio` writes the schedule
    return {} if is_other else {"lr_scheduler_type": value}


def _warmup_ratio(value: Any, data: Data) -> Writes:
    """Steps go before a ratio, as in transformers, whichever the file says first."""
    if value and data.get("warmup_steps"):
        raise LeaveOutError("warmup_steps says otherwise", "warmup_steps decides")
    return {} if data.get("warmup_steps") else {"warmup_steps": value}


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


def _lora_targets(value: Any, data: Data) -> Writes:
    if data.get("lora_target_linear") is True:
        raise LeaveOutError("lora_target_linear adapts every linear layer, these among them")
    return {"lora.target_modules": value}


def _adapters(value: Any, data: Data) -> Writes:
    """LLaMA-Factory merges all adapters but the last into the base weights, and every one before a new adapter."""
    if data.get("create_new_adapter") or not isinstance(value, str) or "," in value:
        raise LeaveOutError("merge them into the model first", "the base weights are without those adapters")
    writes = {"lora.start_from": value}
    what = "this adapter is the reference; LLaMA-Factory's is the base model below it"
    return Partly(writes, what) if job_of(data, "llama-factory") in WITH_REFERENCE else writes


def _packing(value: Any, data: Data) -> Writes:
    if value is True and "cutoff_len" in data and not data.get("neat_packing"):
        return Partly({"packing": True}, "packed rows do not see each other; LLaMA-Factory's do without neat_packing")
    return {"packing": value}


def _packing_strategy(value: Any, data: Data) -> Writes:
    if value == "bfd" or data.get("packing") is not True:
        return {}
    raise LeaveOutError("long rows are cut, never continued in the next sequence", "rows are packed whole")


def _generated(value: Any, data: Data) -> Writes:
    """LLaMA-Factory's `max_length` is of generated answers; its rows have `cutoff_len`."""
    is_of_rows = not {"cutoff_len", "finetuning_type", "template", "stage", "dataset"} & set(data)
    return {"max_seq_length": value} if is_of_rows else {}


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


_OTHER_TEMPLATES = ("alpaca", "chatml", "default", "empty", "fewshot", "inst", "metharme", "vicuna", "ziya")
"""Chat templates that belong to no model: naming one overrides the tokenizer's own."""

_TEMPLATE_FILES = (".jinja", ".jinja2", ".j2")


def _template(value: Any, data: Data) -> Writes:
    """A file or a text, or a name, which may be that of the model's own template: `llama3` of Llama-3.1-8B."""
    name, model = str(value), str(data.get("base_model") or data.get("model_name_or_path"))
    if "{%" in name or "{{" in name or name.endswith(_TEMPLATE_FILES):
        return {"chat_template": value}
    if name.startswith("tokenizer_default") or (value == "jinja" and data.get("chat_template_jinja")):
        return {}
    model = model.rstrip("/").rpartition("/")[2].lower()
    family, plain = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (name, model))
    pattern = TABLES["template families"].get(name)
    if re.search(pattern, model) if pattern else len(family) > 2 and re.search(f"(?:^|meta){family}", plain):
        return {}
    reason = "the tokenizer's own chat template is used; another one is text or a separate file in the recipe"
    change = f"not the template {value}, but the tokenizer's own" if value in _OTHER_TEMPLATES else None
    raise LeaveOutError(reason, change)


def _template_path(value: Any, data: Data) -> Writes:
    """A template's file, or a model whose template it is."""
    if str(value).endswith(_TEMPLATE_FILES):
        return {"chat_template": value}
    reason = "the tokenizer's own chat template is used: give a template's own file"
    raise LeaveOutError(reason, f"not the chat template of {value}")


_MORE = "additional_special_tokens"


def _new_tokens(value: Any, data: Data) -> Writes:
    """All words that a file adds: LLaMA-Factory and axolotl have two lists of them."""
    section = data.get("special_tokens")
    more = section.get(_MORE) if isinstance(section, dict) else None
    given = [data.get(key) for key in ("add_tokens", "tokens", *SPECIAL_TOKENS)] + [more]
    lists = [applied(ALIASES["tokens"], one)["add_tokens"] for one in given if one]
    if not all(isinstance(one, list) for one in lists):
        raise LeaveOutError("no list of words", "no tokens are added")
    return {"add_tokens": list(dict.fromkeys(word for one in lists for word in one))} if value else {}


def _special(value: Any, data: Data) -> Writes:
    return Partly(_new_tokens(value, data), "the new tokens are ordinary ones, so answers show them")


def _resized(value: Any, data: Data) -> Writes:
    if value and not _new_tokens(True, data)["add_tokens"]:
        raise LeaveOutError("the embedding grows with add_tokens only", "the embedding keeps its size")
    return {}


def _tokens(value: Any, data: Data) -> Writes:
    """Padding is never trained and never seen."""
    names = [key for key in value if key not in ("pad_token", "unk_token", _MORE)] if isinstance(value, dict) else ["?"]
    if names:
        raise LeaveOutError("the tokenizer's own tokens are used", f"the tokenizer's own {', '.join(names)}")
    return _special(True, data) if value.get(_MORE) else {}


def _bf16(value: Any, data: Data) -> Writes:
    """Off, and nothing in its place, is float32 in axolotl and TRL."""
    if value is False:
        others = ("fp16", "bfloat16", "float16", "dtype", "torch_dtype", "pure_bf16", "cutoff_len")
        return {} if any(data.get(key) for key in others) else {"dtype": "float32"}
    return {} if value == "auto" and data.get("fp16") is True else {"dtype": "bfloat16"}


def _plugins(value: Any, data: Data) -> Writes:
    harmless = {"liger", "cut_cross_entropy", "kernels", "expert_parallel", "swanlab", "hatchery", "lm_eval"}
    plugins = value if isinstance(value, list) else [value]
    others = [str(plugin) for plugin in plugins if not harmless & set(str(plugin).split("."))]
    if others:
        raise LeaveOutError("plugins are not run", f"{', '.join(others)} is not run")
    return {}


BY_STEPS = {"save_steps": ("save_strategy",), "eval_steps": ("eval_strategy", "evaluation_strategy")}
"""Number of steps -> the keys that say whether steps count."""


def _steps(key: str) -> Rule:
    """A number of steps, which transformers does not read with another strategy."""
    strategies = ("epoch", "no", False, "best")
    return lambda value, data: {} if any(data.get(name) in strategies for name in BY_STEPS[key]) else {key: value}


def _eval_strategy(value: Any, data: Data) -> Writes:
    """With `steps`, transformers evaluates every `eval_steps`, or every `logging_steps` where that is not given."""
    if value == "no" or value is False:
        return {}
    if value not in ("steps", "epoch"):
        raise LeaveOutError("evaluations come every eval_steps steps, and at the end")
    steps = "epoch" if value == "epoch" else data.get("eval_steps") or data.get("logging_steps")
    return {"eval_steps": steps} if steps else {}


def _per_epoch(target: str) -> Rule:
    """axolotl's number of saves or evaluations in an epoch: it makes a share of all steps of it."""

    def writes_of(value: Any, data: Data) -> Writes:
        epochs = data.get("num_epochs") or 1
        if target == "eval_steps" and not (data.get("val_set_size") or data.get("test_datasets")):
            return {}
        if value == 1 and not data.get("max_steps"):
            return {target: "epoch"}
        if not isinstance(value, (int, float)) or not isinstance(epochs, (int, float)) or value <= 0 or epochs <= 0:
            raise LeaveOutError("no number above 0")
        once = "epoch" if target == "save_steps" else None
        return {target: 1 / (value * epochs) if value * epochs > 1 else once}

    return writes_of


_NEAR_OPTIMIZERS: Mapping[str, Writes] = {
    **dict.fromkeys(
        ("adamw_torch_8bit", "ao_adamw_8bit"),
        Partly({"optim": "adamw_8bit"}, "torchao's 8-bit AdamW becomes bitsandbytes'"),
    ),
    "adamw_apex_fused": Partly({"optim": "adamw"}, "apex's AdamW becomes torch's"),
    "adamw_torch_npu_fused": Partly({"optim": "adamw"}, "AdamW of another device becomes torch's"),
}
"""Other tools' optimizers that do the same with other code."""
_NO_NAME = LeaveOutError("name the repository: hub_model_id", "nothing is uploaded")
_RESUMES = "`roundpipe finetune RECIPE --resume` continues a run that was stopped"
_STARTS_AFRESH = LeaveOutError(
    "checkpoints of other programs are not read; lora.start_from continues an adapter", "training starts afresh"
)
_NO_INIT = "starts that change the base weights are not offered", "the adapters start by lora.init in place of that"
_THOUGHTS = "thoughts are as the chat template writes them"
_SHARES = "shares of the draws become datasets[].weight, shares of an epoch's rows"
_NF4 = "4 bit is bitsandbytes' NF4", "the base weights are packed as NF4, not {}"

_UNSLOTH_USUAL: Mapping[str, bool] = {
    **dict.fromkeys(("lora.vision_all_linear", "lora.use_loftq"), False),
    **dict.fromkeys((f"lora.finetune_{part}" for part in ("vision_layers", "language_layers")), True),
    **dict.fromkeys((f"lora.finetune_{part}_modules" for part in ("attention", "mlp")), True),
}
"""Keys with the one value that a recipe has a meaning for."""

_OWN = frozenset(key for key in known_keys(Recipe) if "." not in key and key != "datasets")

RULES: Mapping[str, Rule] = {
    **{key: _only((usual,), "no counterpart here", "{} is not done") for key, usual in _UNSLOTH_USUAL.items()},
    "use_peft": ALIASES["use_peft"],
    # axolotl uploads where there is a name, the others where `push_to_hub` says so
    "hub_model_id": lambda value, data: (
        {"hub_model_id": value} if "base_model" in data or data.get("push_to_hub") is True else {}
    ),
    "push_to_hub": lambda value, data: applied({True: {} if data.get("hub_model_id") else _NO_NAME, ANY: {}}, value),
    "excess_length_strategy": {"raise": {"long_rows": "error"}, ANY: "long_rows"},
    "cosine_min_lr_ratio": _min_lr_ratio,
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), _schedule),
    "warmup_steps": lambda value, data: {} if not value and data.get("warmup_ratio") else {"warmup_steps": value},
    "warmup_ratio": _warmup_ratio,
    "batch_size": _accumulation_of_batch,
    **dict.fromkeys(("optimizer", "optim"), {**_NEAR_OPTIMIZERS, ANY: "optim"}),
    "lora_target_modules": _lora_targets,
    "peft_init_lora_weights": {
        **dict.fromkeys((True, "default"), {"lora.init": "default"}),
        "gaussian": {"lora.init": "gaussian"},
        ANY: LeaveOutError(*_NO_INIT),
    },
    "peft": {ANY: LeaveOutError("see lora.init", "the adapters start by lora.init in place of LoftQ")},
    "adapter_name_or_path": _adapters,
    "neat_packing": _if_true({"packing": True}),
    "packing": _packing,
    "packing_strategy": _packing_strategy,
    "truncation_mode": _only(("keep_start",), "the start of a long row is kept", "long rows lose their end"),
    **dict.fromkeys(("disable_shuffling", "curriculum_sampling"), _if_true({"shuffle": False})),
    "train_sampling_strategy": {
        **{"sequential": {"shuffle": False}, "random": {"shuffle": True}},
        ANY: LeaveOutError("rows come in random order or in theirs", "rows come in random order, not {}"),
    },
    "ignore_pad_token_for_loss": _unless_false("padding is never trained"),
    "average_tokens_across_devices": _unless_false("the loss is a mean over all tokens of a step"),
    "pretrain_multipack_attn": _unless_false("packed texts do not see each other"),
    "enable_thinking": lambda value, data: Partly({"chat_template_kwargs": {"enable_thinking": value}}, _THOUGHTS),
    "max_length": _generated,
    "save_strategy": {
        **{"steps": {}, "epoch": {"save_steps": "epoch"}, **dict.fromkeys(("no", False), {"save_steps": None})},
        ANY: LeaveOutError("checkpoints come every save_steps steps; load_best_model_at_end keeps the best weights"),
    },
    **{key: _steps(key) for key in BY_STEPS},
    **dict.fromkeys(BY_STEPS["eval_steps"], _eval_strategy),
    "saves_per_epoch": _per_epoch("save_steps"),
    "evals_per_epoch": _per_epoch("eval_steps"),
    "metric_for_best_model": _only(
        ("loss", "eval_loss"),
        "the loss decides which weights are best",
        "the best weights are those of the lowest loss",
    ),
    **dict.fromkeys(
        ("resume_from_checkpoint", "auto_resume_from_checkpoints"),
        {False: {}, **dict.fromkeys((True, "auto"), LeaveOutError(_RESUMES)), ANY: _STARTS_AFRESH},
    ),
    "early_stopping_steps": {ANY: "early_stopping_patience"},
    "unfrozen_parameters": _unfrozen,
    **dict.fromkeys(("chat_template", "template"), _template),
    "chat_template_path": _template_path,
    "chat_template_jinja": {ANY: "chat_template"},
    "special_tokens": _tokens,
    **dict.fromkeys(("add_tokens", "tokens"), _new_tokens),
    **dict.fromkeys(SPECIAL_TOKENS, _special),
    "resize_vocab": _resized,
    **dict.fromkeys(("dtype", "torch_dtype"), {"auto": {}, ANY: "dtype"}),
    "bf16": _bf16,
    **dict.fromkeys(("bfloat16", "pure_bf16"), _if_true({"dtype": "bfloat16"})),
    **{name: _if_true({"dtype": name}) for name in ("float16", "float32")},
    "completion_only_loss": lambda value, data: {"train_on_inputs": not value},
    "assistant_only_loss": _if_true({"train_on_inputs": False}),
    "loss_type": {"dft": LeaveOutError("only cross-entropy is offered", CROSS_ENTROPY), ANY: {}},
    **dict.fromkeys(("bnb_4bit_quant_type", "quantization_type", "quantization_method"), _only(("nf4", "bnb"), *_NF4)),
    **dict.fromkeys(("lora_bias", "bias"), _only(("none", False), "biases stay frozen", "no biases are trained")),
    "plugins": _plugins,
    **dict.fromkeys(
        ("do_predict", "predict_with_generate"), {ANY: LeaveOutError("predictions are no part of training")}
    ),
    "report_to": lambda value, data: {"report_to": [] if value == ["none"] else value},
    "use_tensorboard": _if_true({"report_to": ["tensorboard"]}),
    "mix_strategy": _only(("concat",), "rows are mixed by datasets[].weight", "rows are not mixed by {}"),
    "interleave_probs": {ANY: Partly({}, _SHARES)},
    "adam_eps": {ANY: "adam_epsilon"},
}
"""Key of another tool -> its rule. A later line goes before an earlier one: rules for single keys before tables."""


def rule_of(key: str) -> Rule:
    """The rule of a key outside of losses: its own, the answer that recipes give it too, an alias', a recipe key's."""
    if key in RULES:
        return RULES[key]
    answer = answer_of(key, ("advice", "other", "idle"))
    if answer is None and key in _OWN:
        return lambda value, data: {} if is_off(value) and value is not False else {key: value}
    rule: Rule = {ANY: LeaveOutError("no counterpart here", UNKNOWN)}
    if answer is not None:
        others = {"other": LeaveOutError("no counterpart here", answer.text), "advice": LeaveOutError(answer.text)}
        rule = {ANY: others.get(answer.kind, {})}
    elif key in ALIASES and key != "dataset_name":  # of rows, in a file whose tool reads others
        return lambda value, data: {} if is_off(value) else applied(ALIASES[key], value)
    elif answer_of(key, ("idle",), begins=True):
        rule = {ANY: {}}
    return lambda value, data: {} if is_off(value) else applied(rule, value, data)


# The result of a conversion, and its recipe as text, whose header begins with what trains differently.

_NOT_TRAINING = frozenset(
    ("output_dir", "logging_steps", "save_steps", "save_total_limit", "report_to", "eval_steps", "eval_samples")
    + ("eval_max_new_tokens", "resume_from_checkpoint", "watchdog_s", "hardware", "pipeline")
)
"""Recipe keys that do not change what is trained: without them, the recipe's first line says nothing."""


@dataclass(frozen=True, slots=True)
class UnusedLine:
    """A line of the file that the recipe does not have."""

    key: str
    value: Any
    reason: str
    change: str | None = None
    """Training in its place, where that is not the same."""


@dataclass(slots=True)
class Conversion:
    """One file of another tool: the values for a recipe's keys, and what becomes of every other line."""

    tool: Tool
    name: str
    """The file's, for errors."""
    data: Data
    job: Job
    recipe: dict[str, Any] = field(default_factory=dict)
    """Nested, as it is written."""
    changes: list[str] = field(default_factory=list)
    """Differences between what recipe and file train, a clause each; they stand in the recipe's first line."""
    left_out: list[UnusedLine] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    """Keys that change nothing here."""
    notes: list[str] = field(default_factory=list)
    """Notes for users of the other tool."""
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted recipe key -> value."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Keys that come from the other tool's defaults."""
    refused: set[str] = field(default_factory=set)
    """Recipe keys that the file speaks of with a value that is not accepted: no default comes in its place."""
    sources: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Dotted recipe key -> the file's line: its key and value."""

    @property
    def is_lora(self) -> bool:
        """Whether the file trains adapters."""
        return {
            "axolotl": self.data.get("adapter") in ("lora", "qlora"),
            "llama-factory": self.data.get("finetuning_type") in (None, "lora"),
            "trl": self.data.get("use_peft") is True,
        }[self.tool]

    def convert(self, key: str, value: Any) -> None:
        """One line of the file into the recipe's values or one of the lists."""
        writes: Writes = {}
        try:
            if value is not None and reads_loss_key(key, self.job, self.tool):
                writes = _loss_writes(key, value, self.data, self.job)
            elif value is not None:
                writes = applied(rule_of(key), value, self.data)
        except ValueError as error:
            change = error.change if isinstance(error, LeaveOutError) else f"not {short(value)}"
            self.leave_out(key, value, str(error), change=change)
            return
        if isinstance(writes, Partly):
            self.change(key, writes.change)
        if not writes:
            self.drop(key)
        elif key == "trl":  # of which only `beta` is written
            for name in sorted(value.keys() - {"beta"}):
                self.drop(f"{key}.{name}")
        for target, meant in writes.items():
            self.put(target, meant, key, value)

    def put(self, target: str, value: Any, key: str, written: Any) -> None:
        """Write a value, or list the file's line as left out where it contradicts another."""
        known, meant = value_alias(target, value)
        value = meant if known else value
        other, _ = self.sources.setdefault(target, (key, written))
        if self.values.setdefault(target, value) != value:
            self.leave_out(key, written, f"{other} says otherwise", change=f"{other} decides")

    def default(self, key: str, value: Any) -> None:
        """A default of the other tool, where its file says nothing about the same thing."""
        for target, meant in applied({ANY: key} if "." in key else rule_of(key), value, {}).items():
            if target not in self.values and target not in self.refused:
                self.values[target] = self.defaults[target] = meant
                self.sources[target] = (f"{key} (default of {self.tool})", value)

    def drop(self, key: str) -> None:
        """List a key that changes nothing here, once."""
        if key not in self.without_effect:
            self.without_effect.append(key)

    def leave_out(self, key: str, value: Any, reason: str, *, change: str | None = None) -> None:
        """List a line as left out; `change` says what training does instead, where that is not the same."""
        if (line := UnusedLine(key, value, reason, change)) not in self.left_out:
            self.left_out.append(line)
        if change is not None:
            self.change(key, change)

    def change(self, key: str, what: str) -> None:
        """Name in the first line what training does in place of `key`."""
        if (sentence := f"{key}: {what}") not in self.changes:
            self.changes.append(sentence)

    def refuse(self, target: str, key: str, written: Any, reason: str) -> None:
        """List a line whose value no recipe can have, with what the recipe does instead."""
        self.refused.add(target)
        ours = {one.name: one.default for one in recipe_keys()}.get(target) or "what it is without that line"
        changes = target.partition(".")[0] not in _NOT_TRAINING
        self.leave_out(key, written, reason, change=f"not {short(written)}, but {target}: {ours}" if changes else None)

    def take_out(self, error: RecipeError) -> None:
        """Take the value of the first problem out of the recipe; its line is listed as left out.

        Raises:
            RecipeError: it is one that a recipe cannot do without.
        """
        problem = error.problems[0]
        place = (problem.where or "").rpartition(": ")[2].partition(" (")[0]
        named = [target for target in self.sources if re.match(rf"{re.escape(target)}\b", place)]
        target = max(named, key=len, default="model")
        if target == "model":
            raise error
        key, written = self.sources.pop(target)
        del self.values[target]
        self.defaults.pop(target, None)
        expected = f" (expected: {problem.expected})" if problem.expected else ""
        self.refuse(target, key, written, problem.what + expected)

    def document(self) -> dict[str, Any]:
        """The result as JSON."""
        lists = {key: getattr(self, key) for key in ("recipe", "changes", "left_out", "without_effect", "notes")}
        return {"tool": self.tool, **lists, "left_out": [asdict(line) for line in self.left_out]}

    def text(self, source: str) -> str:
        """The recipe's file: a header that says what happened, then the keys."""
        differs = "; ".join(self.changes).replace("\n", " ")  # one line, however long
        lines = [f"# Not the same training as {source}: {differs}."] if differs else []
        notes = " ".join([f"Converted from {source}, a file of {self.tool}.", *self.notes])
        lines += _comment(notes, width=118, indent="# ", later="# ") + (["#", "# Left out:"] if self.left_out else [])
        for entry in self.left_out:
            text = f"{entry.key}: {short(entry.value)} - {entry.reason}"
            lines += _comment(text, width=116, indent="#   ", later="#     ")
        return "\n".join([*lines, "", values_as_yaml(self.recipe, width=110)])


def short(value: Any) -> str:
    """A value as JSON, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _comment(text: str, width: int, indent: str, later: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False)
