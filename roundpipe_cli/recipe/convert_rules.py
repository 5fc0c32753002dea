"""Keys of other tools whose meaning depends on their value or on other keys: one small function each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roundpipe_cli.recipe.aliases import Writes
from roundpipe_cli.recipe.convert_intervals import INTERVAL_RULES
from roundpipe_cli.recipe.convert_objectives import job_of
from roundpipe_cli.recipe.convert_outcomes import ConversionRule, Data, LeaveOutError, Partly
from roundpipe_cli.recipe.convert_tables import NEAR_OPTIMIZERS, OTHER_TEMPLATES
from roundpipe_cli.recipe.convert_templates import is_own_template
from roundpipe_cli.recipe.strict_yaml import shown_value


def _long_rows(value: Any, data: Data) -> Writes:
    return {"long_rows": {"raise": "error"}.get(str(value), value)}


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


def _warmup(value: Any, data: Data) -> Writes:
    return {} if not value and data.get("warmup_ratio") else {"warmup_steps": value}


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
    raise LeaveOutError(
        "starts that change the base weights are not offered", "the adapters start by lora.init in place of that"
    )


def _loftq(value: Any, data: Data) -> Writes:
    raise LeaveOutError("see lora.init", "the adapters start by lora.init in place of LoftQ")


def _adapters(value: Any, data: Data) -> Writes:
    """LLaMA-Factory merges all adapters but the last into the base weights, and every one before a new adapter."""
    if data.get("create_new_adapter") or not isinstance(value, str) or "," in value:
        raise LeaveOutError("merge them into the model first", "the base weights are without those adapters")
    if job_of(data, "llama-factory") == "dpo":
        return Partly(
            {"lora.start_from": value}, "this adapter is the reference; LLaMA-Factory's is the base model below it"
        )
    return {"lora.start_from": value}


def _neat_packing(value: Any, data: Data) -> Writes:
    return {"packing": True} if value is True else {}


def _packing(value: Any, data: Data) -> Writes:
    if value is True and "cutoff_len" in data and not data.get("neat_packing"):
        return Partly({"packing": True}, "packed rows do not see each other; LLaMA-Factory's do without neat_packing")
    return {"packing": value}


def _packing_strategy(value: Any, data: Data) -> Writes:
    if value == "bfd" or data.get("packing") is not True:
        return {}
    raise LeaveOutError("long rows are cut, never continued in the next sequence", "rows are packed whole")


def _truncation(value: Any, data: Data) -> Writes:
    if value == "keep_start":
        return {}
    raise LeaveOutError("the start of a long row is kept", "long rows lose their end")


def _in_order(value: Any, data: Data) -> Writes:
    return {"shuffle": False} if value is True else {}


def _sampling(value: Any, data: Data) -> Writes:
    if value in ("sequential", "random"):
        return {"shuffle": value == "random"}
    raise LeaveOutError("rows come in random order or in theirs", f"rows come in random order, not {value}")


def _on_by_default(change: str) -> ConversionRule:
    """A switch that does what is done here; `change` says what becomes of a file that turns it off."""

    def writes_of(value: Any, data: Data) -> Writes:
        if value is False:
            raise LeaveOutError("cannot be turned off here", change)
        return {}

    return writes_of


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


def _nothing(value: Any, data: Data) -> Writes:
    return {}


def _best_metric(value: Any, data: Data) -> Writes:
    if value in ("loss", "eval_loss"):
        return {}
    raise LeaveOutError("the loss decides which weights are best", "the best weights are those of the lowest loss")


def _resume(value: Any, data: Data) -> Writes:
    if value is False:
        return {}
    if value is True or value == "auto":
        raise LeaveOutError("`roundpipe finetune RECIPE --resume` continues a run that was stopped")
    raise LeaveOutError(
        "checkpoints of other programs are not read; lora.start_from continues an adapter", "training starts afresh"
    )


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


def _jinja(value: Any, data: Data) -> Writes:
    return {"chat_template": value}


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


def _tokens(value: Any, data: Data) -> Writes:
    names = [key for key in value if key not in ("pad_token", "unk_token")] if isinstance(value, dict) else ["?"]
    if not names:
        return {}  # padding is never trained and never seen
    raise LeaveOutError("the tokenizer's own tokens are used", f"the tokenizer's own {', '.join(names)}")


def _dtype(value: Any, data: Data) -> Writes:
    return {} if value == "auto" else {"dtype": value}


def _bf16(value: Any, data: Data) -> Writes:
    """Off, and nothing in its place, is float32 in axolotl and TRL."""
    if value is False:
        others = ("fp16", "bfloat16", "float16", "dtype", "torch_dtype", "pure_bf16", "cutoff_len")
        return {} if any(data.get(key) for key in others) else {"dtype": "float32"}
    return {} if value == "auto" and data.get("fp16") is True else {"dtype": "bfloat16"}


def _whole_dtype(name: str) -> ConversionRule:
    return lambda value, data: {"dtype": name} if value is True else {}


def _completion_only(value: Any, data: Data) -> Writes:
    return {"train_on_inputs": not value}


def _assistant_only(value: Any, data: Data) -> Writes:
    return {"train_on_inputs": False} if value is True else {}


def _loss_type(value: Any, data: Data) -> Writes:
    if value == "dft":
        raise LeaveOutError("only cross-entropy is offered", "the ordinary cross-entropy is trained in place of DFT's")
    return {}


def _four_bit_type(value: Any, data: Data) -> Writes:
    if value in ("nf4", "bnb"):
        return {}
    raise LeaveOutError("4 bit is bitsandbytes' NF4", f"the base weights are packed as NF4, not {value}")


def _lora_bias(value: Any, data: Data) -> Writes:
    if value in ("none", False):
        return {}
    raise LeaveOutError("biases stay frozen", "no biases are trained")


def _plugins(value: Any, data: Data) -> Writes:
    harmless = {"liger", "cut_cross_entropy", "kernels", "expert_parallel", "swanlab", "hatchery", "lm_eval"}
    plugins = value if isinstance(value, list) else [value]
    others = [str(plugin) for plugin in plugins if not harmless & set(str(plugin).split("."))]
    if others:
        raise LeaveOutError("plugins are not run", f"{', '.join(others)} is not run")
    return {}


def _prediction(value: Any, data: Data) -> Writes:
    raise LeaveOutError("predictions are no part of training")


def _tensorboard(value: Any, data: Data) -> Writes:
    return {"report_to": ["tensorboard"]} if value is True else {}


def _report(value: Any, data: Data) -> Writes:
    return {"report_to": []} if value == ["none"] else {"report_to": value}


def _shares(value: Any, data: Data) -> Writes:
    return Partly({}, "shares of the draws become datasets[].weight, shares of an epoch's rows")


def _mix(value: Any, data: Data) -> Writes:
    if value == "concat":
        return {}
    raise LeaveOutError("rows are mixed by datasets[].weight", f"rows are not mixed by {shown_value(value)}")


RULES: Mapping[str, ConversionRule] = {
    "hub_model_id": _hub_name,
    "push_to_hub": _hub_push,
    "excess_length_strategy": _long_rows,
    "cosine_min_lr_ratio": _min_lr_ratio,
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), _schedule),
    "warmup_steps": _warmup,
    "batch_size": _accumulation_of_batch,
    **dict.fromkeys(("optimizer", "optim"), _optimizer),
    "lora_target_modules": _lora_targets,
    "peft_init_lora_weights": _start_of_adapters,
    "peft": _loftq,
    "adapter_name_or_path": _adapters,
    "neat_packing": _neat_packing,
    "packing": _packing,
    "packing_strategy": _packing_strategy,
    "truncation_mode": _truncation,
    **dict.fromkeys(("disable_shuffling", "curriculum_sampling"), _in_order),
    "train_sampling_strategy": _sampling,
    "ignore_pad_token_for_loss": _on_by_default("padding is never trained"),
    "average_tokens_across_devices": _on_by_default("the loss is a mean over all tokens of a step"),
    "pretrain_multipack_attn": _on_by_default("packed texts do not see each other"),
    "enable_thinking": _thinking,
    "max_length": _generated,
    "shuffle_dataset": _nothing,
    **INTERVAL_RULES,
    "metric_for_best_model": _best_metric,
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints"), _resume),
    "early_stopping_steps": lambda value, data: {"early_stopping_patience": value},
    "unfrozen_parameters": _unfrozen,
    "chat_template": _chat_template,
    "chat_template_jinja": _jinja,
    "chat_template_path": _template_path,
    "template": _factory_template,
    "special_tokens": _tokens,
    **dict.fromkeys(("dtype", "torch_dtype"), _dtype),
    "bf16": _bf16,
    **dict.fromkeys(("bfloat16", "pure_bf16"), _whole_dtype("bfloat16")),
    "float16": _whole_dtype("float16"),
    "float32": _whole_dtype("float32"),
    "completion_only_loss": _completion_only,
    "assistant_only_loss": _assistant_only,
    "loss_type": _loss_type,
    **dict.fromkeys(("bnb_4bit_quant_type", "quantization_type", "quantization_method"), _four_bit_type),
    **dict.fromkeys(("lora_bias", "bias"), _lora_bias),
    "plugins": _plugins,
    **dict.fromkeys(("do_predict", "predict_with_generate"), _prediction),
    "report_to": _report,
    "use_tensorboard": _tensorboard,
    "mix_strategy": _mix,
    "interleave_probs": _shares,
    "adam_eps": lambda value, data: {"adam_epsilon": value},
}
"""Key of another tool -> its rule; they go before every table."""
