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
    ("trl", "lora"): {
        **{"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": list(PEFT_TARGETS)},
    },
}
"""Defaults of a tool where this one would do something else, in all jobs, in one of them, with LoRA: axolotl 0.19's
schema and trainer builder, LLaMA-Factory 0.9.5's and TRL 1.16's arguments above transformers' TrainingArguments."""

REQUIRED = ("learning_rate", "lora.r", "lora.alpha")
"""Recipe keys for which axolotl has no default: a file without them takes ours, and the first line says so."""

_DECIDED_HERE = """
    model_type tokenizer_type is_llama_derived_model is_mistral_derived_model is_qwen_derived_model strict
    is_falcon_derived_model flash_attention sdp_attention xformers_attention attn_implementation flash_attn
    use_fast_tokenizer flex_attention flex_attn_compile_kwargs eager_attention sage_attention fused_attn_kernel
    scattermoe gemma4_hybrid_attn_impl large_head_attention sdpa_varlen tokenizer_use_fast dataset_prepared_path
    dataset_processes dataset_num_proc preprocessing_num_workers overwrite_cache overwrite_output_dir plot_loss
    do_train do_eval dataset_keep_in_memory preprocessing_batch_size data_shared_file_system streaming
    dataset_streaming buffer_size tokenized_path streaming_multipack_buffer_size preprocess_shards use_v1_kernels
    use_kernels layer_offloading offload_folder ple_cpu_offload experimental_skip_move_to_device lora_on_cpu
    gradient_checkpointing_kwargs selective_checkpointing disable_gradient_checkpointing use_reentrant_gc
    remove_unused_columns low_cpu_mem_usage include_tokens_per_second include_num_input_tokens_seen include_tkps
    include_effective_tokens_per_second print_param_status eval_batch_size per_device_eval_batch_size stage
    pad_to_sequence_len pad_to_multiple_of padding_free eval_sample_packing eval_packing disable_tqdm
    total_num_tokens batch_flattening multipack_real_batches tf32 local_rank debug use_cache use_kv_cache device_map
    max_memory gpu_memory_limit deepspeed deepcompile fsdp fsdp_config dp_shard_size dp_replicate_size
    context_parallel_size sequence_parallel_degree tensor_parallel_size heads_k_stride ring_attn_func
    tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel expert_model_parallel_size
    overlap_param_gather overlap_grad_reduce bias_activation_fusion apply_rope_fusion use_distributed_optimizer
    moe_grouped_gemm moe_token_dispatcher_type recompute_granularity use_mca use_hyper_parallel hyper_parallel_args
    use_ray use_kt world_size accelerator_config enable_liger_kernel use_liger_kernel cut_cross_entropy
    chunked_cross_entropy chunked_cross_entropy_num_chunks use_scattermoe use_sonicmoe use_dsv4_kernels
    use_glm_dsa_kernels dsv4_fp4_grouped_mode nvfp4_merge_aware experts_implementation quantize_moe_experts
    llama4_linearized_experts use_unsloth use_unsloth_gc upcast_layernorm upcast_lmhead_output
    shuffle_merged_datasets shuffle_before_merging_datasets lora_task_type use_adapter trl_version
    use_bnb_nested_quant double_quantization run_name gc_steps torch_empty_cache_steps lora_mlp_kernel
    lora_qkv_kernel lora_o_kernel lora_embedding_kernel optim_target_modules eval_on_start pissa_iter pissa_convert
    asft_alpha eaft_alpha eaft_k gradient_checkpointing infer_dtype do_causal_lm_eval eval_causal_lm_metrics
    eval_table_size media_dir greater_is_better ignore_data_skip create_new_adapter bf16_full_eval fp16_full_eval
    project include_for_metrics batch_eval_metrics prediction_loss_only eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps eval_on_each_dataset eval_num_beams enable_jit_checkpoint
    dynamic_checkpoint use_cpu restore_callback_states_from_checkpoint parallelism_config ddp skip_memory_metrics
    label_names length_column_name ignore_bias_buffers compute_accuracy cache_dir temperature top_p top_k num_beams
    max_new_tokens repetition_penalty length_penalty skip_special_tokens quantization_device_map bnb_config_kwargs
    master_addr master_port enable_torch_profiler capabilities env_capabilities device do_bench_eval bench_dataset
    bench_split gc_collect_steps is_preprocess preprocess_iterable pretrain_multipack_buffer_size
    axolotl_config_path total_supervised_tokens push_dataset_to_hub num_generation_samples type_of_model
    cls_model_config tokenizer_save_jinja_files qlora_sharded_model_loading peft_autocast_adapter_dtype
    peft_ensure_weight_tying peft_layers_pattern freeze_trainable_layers freeze_trainable_modules
    freeze_extra_modules module_dropout init_special_tokens embeddings_skip_upcast mean_resizing_embeddings
    quantization merge_method torchdistx_path resources_per_worker infer_backend fp32_norm_classes
    num_dataset_shards_to_save pad_token shuffle_dataset training.gradient_checkpointing data.format_type
    logging.wandb_project logging.wandb_token logging.tensorboard_dir logging.hf_token training.load_in_4bit
"""
WITHOUT_EFFECT = frozenset(_DECIDED_HERE.split())
"""How another tool gets onto its devices, what its kernels and loaders are: decided by the program itself here. And
settings of what `CHANGES` has left out already."""

SHARING_KEYS = (
    *("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pipeline_model_parallel_size",
)
"""Settings for several GPUs that work on the same rows: those GPUs do not multiply the rows of a step."""

WITHOUT_EFFECT_PREFIXES = (
    *("galore_", "apollo_", "badam_", "qgalore_", "dion_", "profiler_", "oft_", "relora_", "pose_"),
    *("jagged_restart_warmup", "jagged_restart_anneal", "scaling_softmax_"),
    *("wandb_", "swanlab_", "mlflow_", "comet_", "gradio_", "ray_", "otel_", "trackio_", "hub_", "hf_mlflow_"),
    *("use_wandb", "use_swanlab", "use_mlflow", "use_comet", "use_otel", "use_trackio", "hf_use_auth_token"),
    *("vllm_", "sglang_", "kt_", "export_", "generation_", "generate_samples", "lm_eval_", "profile_"),
    *("hf_hub_token", "ms_hub_token", "om_hub_token", "hatchery_", "liger_", "flash_", "torch_compile", "tiled_mlp"),
    *("dataloader_", "ddp_", "fsdp_", "expert_parallel_", "sample_packing_", "fp8_", "bnb_4bit_", "save_"),
    *("activation_checkpointing", "activation_offloading", "log_", "logging_"),
)
"""Beginnings of the names of such settings."""

_LOSS = "the ordinary cross-entropy is trained in place of"
_BALANCE = "experts get a loss for their balance where the model's config.json says output_router_logits: true"
_RATE = "; its learning rate was chosen for that"
_CONFIGURATION, _LOADED = "the model's own configuration is used", "the model is loaded as its own configuration says"
_EVERY_LAYER = "adapters go into every layer"

CHANGES: Mapping[str, str] = {
    "use_galore": f"all weights are trained by the recipe's optim in place of GaLore{_RATE}",
    "use_apollo": f"all weights are trained by the recipe's optim in place of APOLLO{_RATE}",
    "use_badam": "every step trains all weights; BAdam trains one block at a time",
    "use_adam_mini": "the recipe's optim is used in place of Adam-mini",
    "use_muon": f"the recipe's optim is used in place of Muon{_RATE}",
    "use_dft_loss": f"{_LOSS} the DFT loss",
    "use_asft_loss": f"{_LOSS} the ASFT loss",
    **dict.fromkeys(("use_eaft_loss", "use_eaft"), f"{_LOSS} the EAFT loss"),
    "liger_use_token_scaling": f"{_LOSS} one with each token weighted by its probability",
    "pissa_init": "the adapters start by lora.init in place of PiSSA",
    "fp8": "products are computed in the recipe's dtype, not in fp8",
    **dict.fromkeys(("shift_attn", "s2_attention"), "attention is whole, not shifted as in LongLoRA"),
    "block_diag_attn": "attention is as packing says",
    "fp32_norms": "norms are computed in the recipe's dtype",
    "tool_format": "tools are as the chat template writes them",
    "preserve_thinking": "thoughts are as the chat template writes them",
    "eot_tokens": "an answer is trained to the end of its turn as the chat template writes it",
    **dict.fromkeys(("tokenizer_config", "tokenizer_use_mistral_common"), "the model's own tokenizer is used"),
    **dict.fromkeys(("default_system", "default_system_message"), "the chat template's own system message is used"),
    "new_special_tokens_config": "no tokens are added",
    "shrink_embeddings": "the embedding keeps its size",
    "fix_untrained_tokens": "rows of the embedding that were never trained stay as they are",
    "split_special_tokens": "special tokens in texts are single tokens",
    "added_tokens_overrides": "the tokenizer's own tokens are used",
    "eos_token": "the tokenizer's own end token is used",
    "rope_scaling": "the model's own positions are used",
    **dict.fromkeys(("moe_aux_loss_coef", "router_aux_loss_coef"), _BALANCE),
    **dict.fromkeys(("model_config", "overrides_of_model_config", "base_model_config"), _CONFIGURATION),
    **dict.fromkeys(("overrides_of_model_kwargs", "model_init_kwargs"), _LOADED),
    "model_quantization_config": "the weights are loaded as the model's own files say",
    "lora_rank_pattern": "all adapters have the rank lora.r",
    "lora_alpha_pattern": "all adapters have the scale lora.alpha",
    "lora_target_parameters": "adapters go into modules only: see lora.target_modules",
    **dict.fromkeys(("peft_layers_to_transform", "lora_layers_to_transform", "layers_to_transform"), _EVERY_LAYER),
    "adapter_folder": "adapters are read from the paths of adapter_name_or_path alone",
    "peft_trainable_token_indices": "no single rows of the embedding are trained",
    **dict.fromkeys(("lr_groups", "embedding_lr", "embedding_lr_scale"), "all weights have one learning rate"),
    "loraplus_lr_embedding": "adapters of the embedding learn at learning_rate",
    "lr_quadratic_warmup": "the warmup is a line",
    "cosine_constant_lr_ratio": "the schedule has no constant part",
    "jagged_restart_steps": "the learning rate has no restarts",
    "group_by_length": "rows of like length meet in a microbatch; which rows a step has is not by length",
    "tokenizer_legacy": "the tokenizer is as its own configuration says",
    "skip_prepare_dataset": "rows are read as texts or chats, not as tokens",
    "pretraining_sample_concatenation": "texts are not joined into sequences but by packing",
    "lr_div_factor": "the warmup starts at zero",
    "min_sample_len": "short rows are trained too",
    "dataset_exact_deduplication": "equal rows are all trained",
    **dict.fromkeys(("optim_args", "adam_epsilon2", "adam_beta3"), "the optimizer has its usual settings"),
    "trainer_cls": "the trainer is this program",
    "dataset_kwargs": "rows are read, rendered and cut as the recipe says",
    **dict.fromkeys(("dataset_shard_num", "dataset_shard_idx"), "all rows are trained, not a shard"),
    "dataloader_drop_last": "the last rows of an epoch are trained too",
    "data_seed": "rows come in the order of the recipe's seed",
    "eval_delay": "evaluations begin with the first steps",
    "eval_sequence_len": "rows of evaluations are as long as those that are trained",
    "max_packed_sequence_len": "rows are packed where the recipe says packing",
    "gptq": "checkpoints in GPTQ are not read: name the unquantised model, with load_in_4bit: true",
    "scaling_softmax": "attention is not scaled by the length",
    "auto_find_batch_size": "the batch is the one written",
}
"""Keys whose work is not done here, and what training does instead: said in the recipe's first line."""

UNKNOWN = "no key that is known here: what it does to training is not done"
"""The same for keys in no table, of another release or a plugin: any of them may change what is trained."""

NO_COUNTERPART: Mapping[str, str] = {
    "lora_fan_in_fan_out": "not needed for the models that load here",
    "trust_remote_code": "code from a model's repository is never run",
    "do_sample": "nothing is generated while training",
    "resize_token_embeddings_to_32x": "the embedding keeps its size",
    "wandb_project": "the project's name goes into the WANDB_PROJECT variable",
    "wandb_entity": "the entity goes into the WANDB_ENTITY variable",
    "wandb_name": "the name goes into the WANDB_NAME variable",
    "wandb_watch": "gradients are not sent to trackers",
    "wandb_log_model": "adapters are not sent to trackers",
    "hub_strategy": "the finished result is uploaded, and no checkpoint",
    "loss_watchdog_threshold": "on_nonfinite says what a loss that is no number does",
    "loss_watchdog_patience": "on_nonfinite says what a loss that is no number does",
    "model_quantization_config_kwargs": "the weights are loaded as the model's own files say",
    "gptq_disable_exllama": "checkpoints in GPTQ are not read",
    "xpu_backend": "not a device of this program",
}
"""Keys without a key here, and what to do instead. Never one that a recipe has: a test holds that."""

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
