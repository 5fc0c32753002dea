"""Tables of the keys of axolotl, LLaMA-Factory, TRL and Unsloth, of their defaults, and of names that they share.

The spellings that a recipe accepts itself (`aliases.py`) are not repeated; what depends on the value is in
`convert_rules.py`. A key that is in no table and is no recipe key either has no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Tool = Literal["axolotl", "llama-factory", "trl"]
TOOLS: tuple[Tool, ...] = get_args(Tool)

SIGNS: Mapping[Tool, tuple[str, ...]] = {
    "axolotl": (
        *("base_model", "sequence_len", "adapter", "sample_packing", "micro_batch_size", "num_epochs", "optimizer"),
        *("lr_scheduler", "lora_target_linear", "flash_attention", "val_set_size", "special_tokens", "model_type"),
    ),
    "llama-factory": (
        *("finetuning_type", "template", "cutoff_len", "stage", "do_train", "dataset", "dataset_dir", "lora_target"),
        *("lora_rank", "plot_loss", "overwrite_cache", "quantization_bit", "val_size", "infer_backend", "export_dir"),
    ),
    "trl": (
        *("dataset_name", "dataset_mixture", "use_peft", "lora_r", "lora_target_modules", "max_length", "torch_dtype"),
        *("dtype", "dataset_train_split", "dataset_num_proc", "assistant_only_loss", "eos_token", "model_revision"),
    ),
}
"""Keys that identify a tool's file: it belongs to the tool with most of its keys."""

_OF_TRANSFORMERS = {
    **{"num_train_epochs": 3, "packing": False, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
    **{"learning_rate": 5.0e-5, "lr_scheduler_type": "linear", "warmup_steps": 0},
}
PEFT_TARGETS = ("q_proj", "v_proj")
"""The modules that PEFT adapts in most architectures where none are named."""

DEFAULTS: Mapping[tuple[Tool, str], Mapping[str, Any]] = {
    ("axolotl", "all"): {
        **{"num_epochs": 1, "packing": False, "gradient_accumulation_steps": 1, "micro_batch_size": 1},
        **{"lr_scheduler": "cosine", "warmup_ratio": 0.03, "sequence_len": 512, "excess_length_strategy": "drop"},
        **{"save_total_limit": 4, "save_strategy": "epoch"},
    },
    ("axolotl", "simpo"): {"simpo.beta": 0.1, "simpo.cpo_alpha": 1.0},
    ("axolotl", "lora"): {"lora_dropout": 0.0, "lora_target_modules": list(PEFT_TARGETS)},
    ("llama-factory", "all"): {**_OF_TRANSFORMERS, "cutoff_len": 2048, "logging_steps": 500, "save_steps": 500},
    ("llama-factory", "pretraining"): {"packing": True},
    ("llama-factory", "orpo"): {"orpo.nll_on_prompt": False},
    ("llama-factory", "simpo"): {"simpo.beta": 0.1},
    ("llama-factory", "lora"): {"lora_rank": 8, "lora_dropout": 0.0, "lora_target": "all"},
    ("trl", "all"): {
        **_OF_TRANSFORMERS,
        **{"learning_rate": 2.0e-5, "max_length": 1024, "logging_steps": 10, "save_steps": 500},
    },
    ("trl", "dpo"): {"learning_rate": 1.0e-6},
    ("trl", "orpo"): {"learning_rate": 1.0e-6},
    ("trl", "simpo"): {"learning_rate": 1.0e-6, "simpo.beta": 0.1, "simpo.cpo_alpha": 1.0},
    ("trl", "ipo"): {"learning_rate": 1.0e-6},
    ("trl", "lora"): {
        **{"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": list(PEFT_TARGETS)},
    },
}
"""Defaults of a tool where this one would do something else, in all jobs, in one of them, with LoRA: axolotl 0.19's
schema and trainer builder, LLaMA-Factory 0.9.5's and TRL 1.16's arguments above transformers' TrainingArguments."""

LOGGING_STEPS: Mapping[Tool, int] = {"axolotl": 10, "llama-factory": 500, "trl": 10}
"""`logging_steps` of a tool's own, which are also its `eval_steps`; axolotl's are 0.5 % of the steps, at most these."""

REQUIRED = ("learning_rate", "lora.r", "lora.alpha")
"""Recipe keys for which axolotl has no default: a file without them takes ours, and the first line says so."""

UNKNOWN = "no key that is known here: what it does to training is not done"
"""Reason to leave out a key of no table, of another release or a plugin: any of them may change what is trained."""

OTHER_TEMPLATES = ("alpaca", "chatml", "default", "empty", "fewshot", "inst", "metharme", "vicuna", "ziya")
"""Chat templates that belong to no model: naming one overrides the tokenizer's own."""

DATASET_TYPES: Mapping[str, str] = {
    **{"alpaca": "alpaca", "completion": "text", "chat_template": "chat", "sharegpt": "sharegpt", "text": "text"},
    **{"chat": "chat", "pretrain": "text", "prompt_completion": "prompt_completion"},
}
"""axolotl's `type` of a dataset (its first word) -> ours."""

FIELD_COLUMNS: Mapping[str, str] = {
    **{"field_instruction": "instruction", "field_input": "input", "field_output": "output", "field": "text"},
    **{"field_messages": "messages", "text_column": "text"},
}
"""Names of columns in axolotl's datasets -> ours."""


# Names of chat templates in axolotl and LLaMA-Factory that are a model's own, so that its tokenizer has them.

TEMPLATE_FAMILIES: Mapping[str, str] = {
    "qwen": r"qwen(1\.5|2)",
    "gemma": r"gemma-?(2b|7b|1\.1)",
    "smollm": r"smollm-",
    "phi": r"phi-?3",
    "phi_small": r"phi-?3-small",
    "cohere": r"command-r|aya",
    "deepseek": r"deepseek-(v2|llm|moe)",
    "deepseek3": r"deepseek-v3",
    "deepseek_v2": r"deepseek-v2",
    "deepseekcoder": r"deepseek-coder",
    "mistral_small": r"mistral-small",
    "mistral_v1": r"mistral.*v0\.1",
    "mistral_v2v3": r"mistral.*v0\.[23]",
    "mistral_v3_tekken": r"mistral-nemo",
    "mistral_v7_tekken": r"mistral-small",
    "command_a": r"command-a",
}
"""Templates whose name is not, or not only, how the names of their models begin."""


# Files of Unsloth's command line: sections whose keys stand for TRL's arguments, with defaults of their own.

UNSLOTH: Mapping[str, tuple[str, Any]] = {
    "model": ("model_name_or_path", None),
    "data.dataset": ("dataset_name", None),
    "training.max_seq_length": ("max_length", 2048),
    "training.load_in_4bit": ("load_in_4bit", True),
    "training.output_dir": ("output_dir", None),
    "training.num_epochs": ("num_train_epochs", 3),
    "training.learning_rate": ("learning_rate", 2.0e-4),
    "training.batch_size": ("per_device_train_batch_size", 2),
    "training.gradient_accumulation_steps": ("gradient_accumulation_steps", 4),
    "training.warmup_steps": ("warmup_steps", None),
    "training.max_steps": ("max_steps", None),
    "training.save_steps": ("save_steps", None),
    "training.weight_decay": ("weight_decay", 0.01),
    "training.random_seed": ("seed", 3407),
    "training.packing": ("packing", False),
    "lora.lora_r": ("lora_r", 64),
    "lora.lora_alpha": ("lora_alpha", 16),
    "lora.lora_dropout": ("lora_dropout", 0.0),
    "lora.use_rslora": ("use_rslora", None),
    "lora.target_modules": ("lora_target_modules", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"),
}
"""Key with its section -> TRL's argument, and Unsloth's default; None: nothing is said."""

UNSLOTH_USUAL: Mapping[str, bool] = {
    **dict.fromkeys(("lora.vision_all_linear", "lora.use_loftq"), False),
    **dict.fromkeys((f"lora.finetune_{part}" for part in ("vision_layers", "language_layers")), True),
    **dict.fromkeys((f"lora.finetune_{part}_modules" for part in ("attention", "mlp")), True),
}
"""Keys with the one value that a recipe has a meaning for."""
