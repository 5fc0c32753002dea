"""Values of other trainers for a recipe's keys: spellings that are read, and answers to those without a counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundpipe_cli.choices import OBJECTIVES, OPTIMIZERS, PAIR_OBJECTIVES
from roundpipe_cli.recipe.foreign import DISTILLATION, NO_TRACKER, REWARD, REWARDED, STARTS, UNPAIRED
from roundpipe_cli.units import either

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


_NO_4BIT_STATE = "not here; the nearest is adamw_8bit, whose state takes 2 bytes for each trained parameter"
_FEWER_TRAINED = "write `method: full` and name what stays as it is: frozen_parameters"
_NO_SUCH_ADAPTER = "not offered: adapters are LoRA's, with lora.use_dora, lora.use_rslora or lora.loraplus_lr_ratio"
_NO_SUCH_LOSS = f"not offered: objective is {either(OBJECTIVES)}"
_OTHER_TRACKERS = ("swanlab", "comet_ml", "comet", "clearml", "neptune", "dvclive", "all", "codecarbon", "flyte", "aim")
OTHER_JOBS = {
    **dict.fromkeys(("grpo", "gspo", "dapo", "ppo", "rloo", "online_dpo", "reinforce", "gdpo"), REWARDED),
    **dict.fromkeys(("kto", "bco"), UNPAIRED),
    **dict.fromkeys(("rm", "reward", "prm"), f"not offered: {REWARD}"),
    **dict.fromkeys(("gkd", "kd", "distillation"), f"not offered: {DISTILLATION}"),
    **dict.fromkeys(("hinge", "robust", "cpo", "nca", "sppo", "exo", "apo", "tdpo", "xpo"), _NO_SUCH_LOSS),
}
"""Objectives of other trainers -> the answer."""

VALUE_ANSWERS: Mapping[str, Mapping[str, str]] = {
    "method": {
        "dora": "write `method: lora` and `lora: {use_dora: true}`",
        "rslora": "write `method: lora` and `lora: {use_rslora: true}`",
        "lora_plus": "write `method: lora` and `lora: {loraplus_lr_ratio: 16}`",
        **dict.fromkeys(("freeze", "partial", "spectrum", "bitfit"), _FEWER_TRAINED),
        **{name: f"write `objective: {name}`" for name in PAIR_OBJECTIVES},
        **dict.fromkeys(("oft", "boft", "loha", "lokr", "ia3", "vera", "adalora", "prefix_tuning"), _NO_SUCH_ADAPTER),
        **dict.fromkeys(("prompt_tuning", "p_tuning", "llama_adapter", "mora", "relora", "galore"), _NO_SUCH_ADAPTER),
        **OTHER_JOBS,
    },
    "objective": {"pt": "write `objective: sft` and datasets of type text", **OTHER_JOBS},
    "optim": {
        "muon": "not here; the nearest is adamw_bf16, whose state takes 4 bytes for each trained parameter, as Muon's",
        **dict.fromkeys(("adamw_torch_4bit", "adamw_4bit", "ao_adamw_4bit"), _NO_4BIT_STATE),
    },
    "dtype": {
        "auto": "write dtype: bfloat16, which `dtype: auto` is of most models",
        **dict.fromkeys(("int8", "8bit"), "write load_in_8bit: true for frozen weights in 8 bit"),
        **dict.fromkeys(("int4", "4bit", "nf4"), "write load_in_4bit: true for frozen weights in 4 bit"),
        **dict.fromkeys(("fp8", "float8", "float8_e4m3fn"), "write load_in_fp8: true for frozen weights in FP8"),
    },
    "lora.init": {
        **dict.fromkeys(("pissa", "olora", "loftq", "eva", "corda", "orthogonal", "lora_ga", "mica"), STARTS),
    },
    "report_to": dict.fromkeys(_OTHER_TRACKERS, NO_TRACKER),
}
"""Recipe key -> values of other trainers that have no counterpart, with the advice for each."""


def answer_to(key: str, value: object) -> str | None:
    """The advice for a value of another trainer that a recipe key does not take."""
    return VALUE_ANSWERS.get(key, {}).get(value.lower()) if isinstance(value, str) else None
