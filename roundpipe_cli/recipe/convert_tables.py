"""What the keys of axolotl, LLaMA-Factory and TRL mean here: the tables of `convert.py`.

The spellings that a recipe accepts itself (`aliases.py`) are not repeated. A key that is in no table and is no recipe
key either has no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Tool = Literal["axolotl", "llama-factory", "trl"]

TOOLS: tuple[Tool, ...] = ("axolotl", "llama-factory", "trl")

SIGNS: Mapping[Tool, tuple[str, ...]] = {
    "axolotl": (
        *("base_model", "sequence_len", "adapter", "sample_packing", "micro_batch_size", "num_epochs", "optimizer"),
        *("lr_scheduler", "lora_target_linear", "flash_attention", "val_set_size", "special_tokens", "model_type"),
    ),
    "llama-factory": (
        *("finetuning_type", "template", "cutoff_len", "stage", "do_train", "dataset", "dataset_dir", "lora_target"),
        *("lora_rank", "plot_loss", "overwrite_cache", "quantization_bit", "val_size"),
    ),
    "trl": (
        *("dataset_name", "dataset_mixture", "use_peft", "lora_r", "lora_target_modules", "max_length", "torch_dtype"),
        *("dtype", "dataset_train_split", "dataset_num_proc", "assistant_only_loss", "eos_token", "model_revision"),
    ),
}
"""Keys by which a tool's file is known; the tool with most of them it is."""

DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "axolotl": {"num_epochs": 1, "gradient_accumulation_steps": 1, "micro_batch_size": 1, "lr_scheduler": "cosine"},
    "llama-factory": {
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
        "learning_rate": 5.0e-5,
        "lr_scheduler_type": "linear",
        "cutoff_len": 2048,
        "finetuning_type": "lora",
    },
    "trl": {
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
        "learning_rate": 2.0e-5,
        "lr_scheduler_type": "linear",
        "max_length": 1024,
        "use_peft": False,
    },
}
"""What a tool does where its file says nothing and this one would do something else."""

ADAPTER_DEFAULTS: Mapping[Tool, Mapping[str, Any]] = {
    "axolotl": {"lora_dropout": 0.0},
    "llama-factory": {"lora_rank": 8, "lora_dropout": 0.0},
    "trl": {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
}
"""The same, for training with LoRA."""

_DECIDED_HERE = """
    model_type tokenizer_type is_llama_derived_model is_mistral_derived_model is_qwen_derived_model strict
    flash_attention sdp_attention xformers_attention attn_implementation flash_attn use_fast_tokenizer
    dataset_prepared_path dataset_processes dataset_num_proc preprocessing_num_workers dataloader_num_workers
    dataloader_pin_memory overwrite_cache overwrite_output_dir plot_loss do_train do_eval ddp_timeout
    ddp_find_unused_parameters ddp_backend gradient_checkpointing_kwargs save_safetensors save_only_model
    logging_first_step logging_strategy save_strategy_steps remove_unused_columns low_cpu_mem_usage
    include_tokens_per_second include_num_input_tokens_seen eval_batch_size per_device_eval_batch_size
    pad_to_sequence_len eval_sample_packing eval_packing group_by_length disable_tqdm tf32 local_rank debug
    use_cache device_map deepspeed fsdp fsdp_config fsdp_version enable_liger_kernel use_liger_kernel plugins
    liger_rope liger_rms_norm liger_glu_activation liger_fused_linear_cross_entropy use_unsloth use_unsloth_gc
    upcast_layernorm torch_compile shuffle_merged_datasets pretrain_multipack_attn lora_task_type lora_bias bias
    gradient_checkpointing use_adapter trl_version bnb_4bit_quant_type use_bnb_nested_quant quantization_method
    double_quantization quantization_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype run_name
    lora_mlp_kernel lora_qkv_kernel lora_o_kernel optim_target_modules eval_on_start average_tokens_across_devices
"""
WITHOUT_EFFECT = frozenset(_DECIDED_HERE.split())
"""How another tool gets onto its devices, what its kernels and loaders are: decided by the program itself here."""

NO_COUNTERPART: Mapping[str, str] = {
    "template": "the tokenizer's own chat template is used; check that it is the one meant",
    "resume_from_checkpoint": "checkpoints of other programs cannot be resumed from",
    "auto_resume_from_checkpoints": "checkpoints of other programs cannot be resumed from",
    "lora_fan_in_fan_out": "not needed for the models that load here",
    "trust_remote_code": "code from a model's repository is never run",
    "save_strategy": "give a number of steps in save_steps",
    "eval_strategy": "give a number of steps in eval_steps",
    "evaluation_strategy": "give a number of steps in eval_steps",
    "saves_per_epoch": "give a number of steps in save_steps",
    "evals_per_epoch": "give a number of steps in eval_steps",
    "do_sample": "nothing is generated while training",
    "special_tokens": "the tokenizer's own special tokens are used",
    "tokens": "the tokenizer's own tokens are used",
    "resize_token_embeddings_to_32x": "the embedding keeps its size",
    "freeze_trainable_layers": "what is to stay frozen goes into frozen_parameters",
    "unfrozen_parameters": "what is to stay frozen goes into frozen_parameters",
    "wandb_project": "the project's name goes into the WANDB_PROJECT variable",
    "wandb_entity": "the entity goes into the WANDB_ENTITY variable",
    "wandb_name": "the name goes into the WANDB_NAME variable",
    "wandb_watch": "gradients are not sent to trackers",
    "wandb_log_model": "adapters are not sent to trackers",
    "hub_model_id": "upload the finished adapter with `hf upload`",
    "hub_strategy": "upload the finished adapter with `hf upload`",
    "push_to_hub": "upload the finished adapter with `hf upload`",
    "early_stopping_patience": "training goes on to the end; eval_steps shows when it stopped helping",
    "load_best_model_at_end": "the last weights are the result; checkpoints are kept by save_total_limit",
    "metric_for_best_model": "the last weights are the result",
    "cosine_min_lr_ratio": "lr_scheduler_type: cosine_with_min_lr with lr_scheduler_kwargs: {min_lr_rate: ...}",
    "chat_template": "the tokenizer's own chat template is used; check that it is the one meant",
    "chat_template_jinja": "the tokenizer's own chat template is used; check that it is the one meant",
    "default_system_message": "put the system message into the rows",
    "neat_packing": "packed rows never see each other here; `packing` alone decides",
    "dataset_test_split": "name it in eval_datasets, or set val_set_size",
    "test_datasets": "name them in eval_datasets",
    "eval_dataset": "name it in eval_datasets, or set val_set_size",
    "streaming": "rows are read once and tokenised before training",
    "interleave_probs": "shares of datasets go into datasets[].weight",
    "mix_strategy": "shares of datasets go into datasets[].weight",
    "rope_scaling": "the model's own positions are used",
    "image_max_pixels": "only text is trained",
    "video_max_pixels": "only text is trained",
    "freeze_vision_tower": "only text is trained, so it stays as it is",
    "xpu_backend": "not a device of this program",
}
"""Keys without a key here, and what to do instead."""

OTHER_JOBS: Mapping[str, str] = {
    "rl": "preference training",
    "reward_model": "training of a reward model",
    "process_reward_model": "training of a reward model",
    "pretraining_dataset": "pretraining from a stream",
    "beta": "preference training",
    "pref_loss": "preference training",
    "pref_beta": "preference training",
    "reward_funcs": "reinforcement learning",
    "num_generations": "reinforcement learning",
}
"""Keys of jobs other than supervised fine-tuning: the file is refused where one is set."""

DATASET_TYPES: Mapping[str, str] = {
    **{"alpaca": "alpaca", "completion": "text", "chat_template": "chat", "sharegpt": "sharegpt", "text": "text"},
    **{"chat": "chat", "pretrain": "text", "prompt_completion": "prompt_completion", "context_qa": "auto"},
}
"""axolotl's `type` of a dataset (its first word) -> ours."""

FIELD_COLUMNS: Mapping[str, str] = {
    **{"field_instruction": "instruction", "field_input": "input", "field_output": "output", "field": "text"},
    **{"field_messages": "messages", "text_column": "text"},
}
"""Names of columns in axolotl's datasets -> ours."""
