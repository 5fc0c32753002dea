"""Keys of other trainers without a key here, each with its answer: for a recipe that has one, and for `convert`.

The trainers: axolotl, LLaMA-Factory, TRL, Unsloth, torchtune, transformers' and PEFT's arguments, DeepSpeed, FSDP and
accelerate. Spellings that a recipe takes are in `aliases.py`, values in `values.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from roundpipe_cli.choices import OPTIMIZERS, PAIR_OBJECTIVES
from roundpipe_cli.units import either

AnswerKind = Literal["idle", "other", "advice", "job"]


class Answer(NamedTuple):
    """The answer to a key of another trainer."""

    kind: AnswerKind
    """`idle`: decided by the program itself, so a file loses nothing; `other`: training is another without it, and
    `text` says what is done instead; `advice`: what to write or do; `job`: it asks for a job that no recipe does."""
    text: str

    @property
    def hint(self) -> str:
        """The sentence for a recipe that has the key."""
        before = {"idle": "not needed here: ", "other": "not offered: ", "advice": "", "job": "not offered: "}
        return before[self.kind] + self.text


# Names are words of a text; `name_*` stands for every name that begins so, where none is listed whole.

_DEVICES = "layers are streamed through all devices anyway; name them with pipeline.devices"
_ATTENTION = "the attention kernel is chosen automatically"
_KERNELS = "fused operators are chosen by `kernels: auto`"
_MEMORY = "memory is planned; pipeline.recompute says which activations are kept, load_in_4bit packs frozen weights"
_ROWS = "rows are read, tokenised and cached beside training, and padded to their microbatch's length"
_MODEL = "the model's own files say what it is and how it is loaded"
_TOLD = "the dashboard, metrics.jsonl and the report have every step; report_to names trackers"
TRACKERS = "report_to names trackers (tensorboard, wandb, mlflow, trackio), which read the rest from their variables"
_WRITTEN = "`roundpipe generate` writes answers, and has such settings; while training, eval_samples writes some"
_EVALUATED = "an evaluation is the loss of all its rows, at eval_steps and at the end"
_SAVED = "checkpoints are whole and resume exactly: save_steps, save_total_limit"
_FLOAT16 = "dtype: float16 scales the loss by itself; masters and gradients are float32"
_OF_ANOTHER = "it belongs to a method that is not offered"

_IDLE: Mapping[str, str] = {
    _DEVICES: """
        deepspeed fsdp fsdp_config device_map max_memory gpu_memory_limit dp_shard_size dp_replicate_size local_rank
        context_parallel_size sequence_parallel_degree tensor_parallel_size heads_k_stride ring_attn_func use_ray
        use_kt tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel expert_model_parallel_size
        use_cpu overlap_param_gather overlap_grad_reduce use_distributed_optimizer use_hyper_parallel
        hyper_parallel_args world_size accelerator_config parallelism_config ddp master_addr master_port device
        resources_per_worker use_mca capabilities env_capabilities deepcompile moe_token_dispatcher_type ray_* fsdp_*
        ddp_* expert_parallel_* zero_optimization zero_* stage3_* num_machines compute_environment num_gpus strategy""",
    _ATTENTION: """
        flash_attention sdp_attention xformers_attention attn_implementation flash_attn flex_attention
        flex_attn_compile_kwargs eager_attention sage_attention gemma4_hybrid_attn_impl large_head_attention
        sdpa_varlen flash_* scaling_softmax_*""",
    _KERNELS: """
        fused_attn_kernel scattermoe use_v1_kernels use_kernels bias_activation_fusion apply_rope_fusion
        moe_grouped_gemm enable_liger_kernel use_liger_kernel cut_cross_entropy chunked_cross_entropy
        chunked_cross_entropy_num_chunks use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels
        dsv4_fp4_grouped_mode experts_implementation use_unsloth lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        lora_embedding_kernel liger_* torch_compile* kt_* liger_kernel_config""",
    _MEMORY: """
        layer_offloading offload_folder ple_cpu_offload experimental_skip_move_to_device lora_on_cpu use_unsloth_gc
        gradient_checkpointing_kwargs selective_checkpointing disable_gradient_checkpointing use_reentrant_gc
        low_cpu_mem_usage recompute_granularity upcast_layernorm upcast_lmhead_output gc_steps torch_empty_cache_steps
        gradient_checkpointing use_bnb_nested_quant double_quantization nvfp4_merge_aware quantize_moe_experts
        quantization_device_map bnb_config_kwargs quantization qlora_sharded_model_loading embeddings_skip_upcast
        gc_collect_steps tiled_mlp* bnb_4bit_* fp8_* activation_checkpointing* activation_offloading*
        training.gradient_checkpointing training.load_in_4bit cpu_offload_*""",
    _ROWS: """
        dataset_prepared_path dataset_processes dataset_num_proc preprocessing_num_workers overwrite_cache
        dataset_keep_in_memory preprocessing_batch_size data_shared_file_system streaming dataset_streaming
        buffer_size tokenized_path streaming_multipack_buffer_size preprocess_shards remove_unused_columns
        pad_to_sequence_len pad_to_multiple_of padding_free eval_sample_packing eval_packing batch_flattening
        multipack_real_batches shuffle_merged_datasets shuffle_before_merging_datasets shuffle_dataset is_preprocess
        preprocess_iterable pretrain_multipack_buffer_size num_dataset_shards_to_save push_dataset_to_hub
        total_supervised_tokens total_num_tokens label_names length_column_name pad_token data.format_type
        dataloader_* sample_packing_*""",
    _MODEL: """
        model_type tokenizer_type is_llama_derived_model is_mistral_derived_model is_qwen_derived_model strict
        is_falcon_derived_model use_fast_tokenizer tokenizer_use_fast llama4_linearized_experts use_adapter
        lora_task_type type_of_model cls_model_config infer_dtype use_cache use_kv_cache init_special_tokens
        mean_resizing_embeddings fp32_norm_classes ignore_bias_buffers torchdistx_path tokenizer_save_jinja_files
        axolotl_config_path tokenizer task_type peft_type peft_version inference_mode auto_mapping
        base_model_name_or_path cache_dir""",
    _TOLD: """
        disable_tqdm plot_loss include_tokens_per_second include_num_input_tokens_seen include_tkps print_param_status
        include_effective_tokens_per_second skip_memory_metrics enable_torch_profiler debug run_name project
        trl_version profiler_* profile_* log_* logging_*""",
    TRACKERS: """
        wandb_* swanlab_* mlflow_* comet_* otel_* trackio_* hf_mlflow_* use_wandb* use_swanlab* use_mlflow* use_comet*
        use_otel* use_trackio* gradio_* logging.wandb_project logging.wandb_token logging.tensorboard_dir""",
    "the hub's settings are hub_model_id and revision; secrets belong into `hf auth login` or HF_TOKEN": """
        hf_use_auth_token hf_hub_token ms_hub_token om_hub_token hub_* logging.hf_token token""",
    _WRITTEN: """
        temperature top_p top_k num_beams max_new_tokens repetition_penalty length_penalty skip_special_tokens
        infer_backend generation_* generate_samples* lm_eval_* vllm_* sglang_* export_*""",
    _EVALUATED: """
        eval_batch_size per_device_eval_batch_size eval_on_start do_causal_lm_eval eval_causal_lm_metrics
        eval_table_size bf16_full_eval fp16_full_eval include_for_metrics batch_eval_metrics prediction_loss_only
        eval_do_concat_batches eval_use_gather_object eval_accumulation_steps eval_on_each_dataset eval_num_beams
        do_eval do_bench_eval bench_dataset bench_split compute_accuracy greater_is_better num_generation_samples""",
    _SAVED: """
        overwrite_output_dir ignore_data_skip enable_jit_checkpoint dynamic_checkpoint create_new_adapter merge_method
        restore_callback_states_from_checkpoint peft_autocast_adapter_dtype save_*""",
    _OF_ANOTHER: """
        stage do_train optim_target_modules pissa_iter pissa_convert asft_alpha eaft_alpha eaft_k media_dir
        peft_ensure_weight_tying peft_layers_pattern freeze_trainable_layers freeze_trainable_modules module_dropout
        freeze_extra_modules galore_* apollo_* badam_* qgalore_* dion_* oft_* relora_* pose_* jagged_restart_warmup*
        jagged_restart_anneal* layers_pattern megatron_config megatron_core loftq_config eva_config corda_config
        lora_ga_config arrow_config runtime_config ensure_weight_tying qalora_group_size""",
    "float32 products are exact here; for speed use dtype: bfloat16": "tf32",
}
"""How another tool gets onto its devices, what its kernels and loaders are, and settings of what others have left out
already -> keys."""

SHARING_KEYS = (
    *("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pipeline_model_parallel_size",
)
"""Settings for several GPUs that work on the same rows: those GPUs do not multiply the rows of a step."""

_LOSS = "the ordinary cross-entropy is trained in place of"
_RATE = "; its learning rate was chosen for that"

_OTHER: Mapping[str, str] = {
    f"all weights are trained by the recipe's optim in place of GaLore{_RATE}": "use_galore",
    f"all weights are trained by the recipe's optim in place of APOLLO{_RATE}": "use_apollo",
    "every step trains all weights; BAdam trains one block at a time": "use_badam",
    "the recipe's optim is used in place of Adam-mini": "use_adam_mini",
    f"the recipe's optim is used in place of Muon{_RATE}": "use_muon",
    f"{_LOSS} the DFT loss": "use_dft_loss",
    f"{_LOSS} the ASFT loss": "use_asft_loss",
    f"{_LOSS} the EAFT loss": "use_eaft_loss use_eaft",
    f"{_LOSS} one with each token weighted by its probability": "liger_use_token_scaling",
    "the adapters start by lora.init in place of PiSSA": "pissa_init",
    "products are computed in the recipe's dtype, not in fp8": "fp8",
    "attention is whole, not shifted as in LongLoRA": "shift_attn s2_attention",
    "attention is as packing says": "block_diag_attn",
    "norms are computed in the recipe's dtype": "fp32_norms",
    "tools are as the chat template writes them": "tool_format",
    "thoughts are as the chat template writes them": "preserve_thinking",
    "an answer is trained to the end of its turn as the chat template writes it": "eot_tokens",
    "the model's own tokenizer is used": "tokenizer_config tokenizer_use_mistral_common",
    "the chat template's own system message is used": "default_system default_system_message",
    "no tokens are added": "new_special_tokens_config",
    "the embedding keeps its size": "shrink_embeddings",
    "rows of the embedding that were never trained stay as they are": "fix_untrained_tokens",
    "special tokens in texts are single tokens": "split_special_tokens",
    "the tokenizer's own tokens are used": "added_tokens_overrides",
    "the tokenizer's own end token is used": "eos_token",
    "the model's own positions are used": "rope_scaling",
    "experts get a loss for their balance where the model's config.json says output_router_logits: true": """
        moe_aux_loss_coef router_aux_loss_coef""",
    "the model's own configuration is used": "model_config overrides_of_model_config base_model_config",
    "the model is loaded as its own configuration says": "overrides_of_model_kwargs model_init_kwargs",
    "the weights are loaded as the model's own files say": "model_quantization_config",
    "all adapters have the rank lora.r": "lora_rank_pattern rank_pattern",
    "all adapters have the scale lora.alpha": "lora_alpha_pattern alpha_pattern",
    "adapters go into modules only: see lora.target_modules": "lora_target_parameters target_parameters",
    "adapters go into every layer": "peft_layers_to_transform lora_layers_to_transform layers_to_transform",
    "adapters are read from the paths of adapter_name_or_path alone": "adapter_folder",
    "no single rows of the embedding are trained": "peft_trainable_token_indices trainable_token_indices",
    "all weights have one learning rate": "lr_groups embedding_lr embedding_lr_scale",
    "adapters of the embedding learn at learning_rate": "loraplus_lr_embedding",
    "the warmup is a line": "lr_quadratic_warmup",
    "the schedule has no constant part": "cosine_constant_lr_ratio",
    "the learning rate has no restarts": "jagged_restart_steps",
    "rows of like length meet in a microbatch; which rows a step has is not by length": "group_by_length",
    "the tokenizer is as its own configuration says": "tokenizer_legacy",
    "rows are read as texts or chats, not as tokens": "skip_prepare_dataset",
    "texts are not joined into sequences but by packing": "pretraining_sample_concatenation",
    "the warmup starts at zero": "lr_div_factor",
    "short rows are trained too": "min_sample_len",
    "equal rows are all trained": "dataset_exact_deduplication",
    "the optimizer has its usual settings": "optim_args adam_epsilon2 adam_beta3",
    "the trainer is this program": "trainer_cls",
    "rows are read, rendered and cut as the recipe says": "dataset_kwargs",
    "all rows are trained, not a shard": "dataset_shard_num dataset_shard_idx",
    "the last rows of an epoch are trained too": "dataloader_drop_last",
    "rows come in the order of the recipe's seed": "data_seed",
    "evaluations begin with the first steps": "eval_delay",
    "rows of evaluations are as long as those that are trained": "eval_sequence_len",
    "rows are packed where the recipe says packing": "max_packed_sequence_len",
    "checkpoints in GPTQ are not read: name the unquantised model, with load_in_4bit: true": "gptq",
    "attention is not scaled by the length": "scaling_softmax",
    "the batch is the one written": "auto_find_batch_size",
}
"""Training in its place -> keys whose work is not done here: said in the first line of a converted recipe."""

REINFORCEMENT, PREFERENCES, REWARD = "reinforcement learning", "training on preferences", "training of a reward model"
CLASSIFIER, DISTILLATION = "training of a classifier", "distillation from a teacher"
PART, MULTIMODAL = "training of a part of the weights", "training on images, video or sound"
EVALUATION = "evaluation or prediction"
NO_IMAGES = "images are not trained here; the text part of such models is, on rows of text"
_NO_SECRETS = "secrets do not belong into a recipe: use `hf auth login` or the HF_TOKEN variable"
NO_TRACKER = "not here: report_to takes tensorboard, wandb, mlflow and trackio; metrics.jsonl has every step"
_NOT_FINITE = "on_nonfinite says what a loss that is no number does"
_BIASES = "biases stay frozen beside adapters; lora.modules_to_save trains whole modules"
_ROWS_OF_STEP = "a step has micro_batch_size x gradient_accumulation_steps rows: write those"
_OPTIMIZED = "write optim: adamw, with learning_rate, weight_decay, adam_beta1 and adam_beta2 beside it"
_IN_DTYPE = "write dtype: bfloat16, float16 or float32"
REWARDED = "not here: it trains on rewards of answers that the model writes meanwhile, which TRL does"
UNPAIRED = "not here, but in TRL: of such rows the wanted answers train with objective: sft, or pairs with dpo"
_NO_OTHER_TERM = f"not offered: the losses of pairs are those of {either(PAIR_OBJECTIVES)}, as their papers have them"
_REFERENCE = "the reference of objective dpo is the base model, or the adapter of lora.start_from as it is"
STARTS = "lora.init takes default and gaussian; starts that change the base weights are not offered"

_ADVICE: Mapping[str, str] = {
    "not needed for the models that load here": "lora_fan_in_fan_out fan_in_fan_out",
    "code from a model's repository is never run": "trust_remote_code",
    "nothing is generated while training": "do_sample",
    "the embedding keeps its size": "resize_token_embeddings_to_32x",
    "see report_to; the project's name goes into the WANDB_PROJECT variable": "wandb_project",
    "see report_to; the entity goes into the WANDB_ENTITY variable": "wandb_entity",
    "see report_to; the name goes into the WANDB_NAME variable": "wandb_name",
    "gradients are not sent to trackers": "wandb_watch",
    "adapters are not sent to trackers": "wandb_log_model",
    "the finished result is uploaded, and no checkpoint": "hub_strategy",
    _NOT_FINITE: "loss_watchdog_threshold loss_watchdog_patience",
    "the weights are loaded as the model's own files say": "model_quantization_config_kwargs",
    "checkpoints in GPTQ are not read": "gptq_disable_exllama",
    "not a device of this program": "xpu_backend",
}
"""Advice where nothing else is trained -> keys; `convert` lists them."""

_WRITE: Mapping[str, str] = {
    "name the file or hub id: datasets: [{path: data/train.jsonl}]": "dataset data train_dataset train_file data_path",
    "name the file: datasets: [{path: data/train.jsonl}]": "dataset_dir data_files",
    "name the file or hub id: eval_datasets: [{path: data/eval.jsonl}], or a share of the rows: val_set_size": """
        eval_dataset test_datasets validation_file dataset_test_split test_file""",
    "write the split beside its data set: datasets: [{path: ..., split: train}]": """
        dataset_train_split dataset_split train_split""",
    "write the configuration beside its data set: datasets: [{path: ..., name: ...}]": "dataset_config dataset_subset",
    "write the column beside its data set: datasets: [{path: ..., type: text, columns: {text: NAME}}]": """
        dataset_text_field text_field text_column""",
    "list them: datasets: [{path: ..., weight: 1}, ...]": "dataset_mixture interleave_probs mix_strategy",
    "write datasets: [{path: ..., type: text}]": "pretraining_dataset",
    "take a part of the split: datasets: [{path: data/train.jsonl, split: 'train[:1000]'}]": """
        max_samples max_train_samples""",
    "the tokenizer's own chat template is used; another one goes into chat_template": """
        template chat_template_path chat_template_jinja prompt_template prompt_format""",
    _NO_SECRETS: "hub_token use_auth_token token hf_token hf_hub_token",
    "name the repository: hub_model_id: me/my-model": "push_to_hub hub_repo_id hub_name",
    "the tokenizer's own special tokens are used": "special_tokens pad_token bos_token unk_token",
    "write eval_steps: epoch, or a fraction of all steps: eval_steps: 0.1": "evals_per_epoch",
    "write save_steps: epoch, or a fraction of all steps: save_steps: 0.1": "saves_per_epoch",
    "write save_steps: a number of steps, a fraction of all, or epoch": "save_strategy",
    "write eval_steps: a number of steps, a fraction of all, or epoch": "eval_strategy evaluation_strategy",
    NO_TRACKER: "use_swanlab swanlab_project use_comet comet_project_name",
    "write early_stopping_patience: evaluations without a lower loss": "early_stopping early_stopping_steps",
    "write report_to: [tensorboard] or [wandb]": "use_tensorboard use_wandb logger",
    _ROWS_OF_STEP: """
        batch_size train_batch_size global_batch_size effective_batch_size total_batch_size num_micro_batches""",
    "write num_train_epochs, or max_steps": "max_steps_per_epoch steps train_iters num_steps max_epochs",
    _IN_DTYPE: "mixed_precision precision bfloat16 float16 float32 pure_bf16 half_precision fp32 fp16_opt_level amp",
    _OPTIMIZED: "optim_target_modules adamw_betas adam_betas betas fused",
    "write optim: adafactor": "adafactor",
    "write lr_scheduler_type: cosine_with_min_lr, with lr_scheduler_kwargs: {min_lr_rate: 0.1}": """
        cosine_min_lr_ratio min_lr_ratio min_lr min_learning_rate lr_end""",
    "write lr_scheduler_type, with warmup_steps and lr_scheduler_kwargs beside it": "scheduler lr_decay_style",
    "write long_rows: drop, error, truncate or split": """
        excess_length_strategy truncation truncation_mode truncation_side""",
    "packing: true packs rows, which never see each other": "neat_packing packing_strategy packed eval_packed",
    "write datasets: [{..., turns_to_train: last}]": "mask_history",
    "write datasets: [{..., roles_to_train: [assistant], train_on_eos: turn}]": "roles_to_train train_on_eos",
    f"write objective: {either(PAIR_OBJECTIVES)}": "pref_loss loss_type dpo_loss_type loss",
    "write it in the section of its objective: dpo: {beta: 0.1}": "pref_beta rl_beta dpo_beta orpo_alpha beta trl",
    "write it in its section: simpo: {simpo_gamma: 0.5}": "simpo_gamma gamma gamma_beta_ratio cpo_alpha simpo_alpha",
    "write it in its section: dpo: {label_smoothing: 0.1}": "dpo_label_smoothing",
    _NO_OTHER_TERM: """
        pref_ftx rpo_alpha f_divergence_type f_alpha_divergence_coef ld_alpha loss_weights use_weighting
        dpo_use_weighting dpo_loss_weights dpo_norm_loss pref_bco_weight discopop_tau""",
    UNPAIRED: """
        desirable_weight undesirable_weight kto_desirable_weight kto_undesirable_weight kto_chosen_weight
        kto_rejected_weight""",
    _REFERENCE: """
        precompute_ref_log_probs precompute_ref_batch_size ref_model_mixup_alpha ref_model_sync_steps ref_model
        ref_model_adapters ref_model_name_or_path reference_free sync_ref_model ref_checkpointer""",
    "long pairs are cut by max_seq_length": """
        max_prompt_length max_target_length max_source_length max_completion_length""",
    _BIASES: "lora_bias bias",
    STARTS: "init_lora_weights pissa_init loftq_config",
    "name the modules that are adapted: lora.target_modules, a regular expression too": """
        exclude_modules lora_attn_modules apply_lora_to_mlp apply_lora_to_output lora_mlp lora_attn""",
    "with `method: full`, name what stays as it is: frozen_parameters": """
        unfrozen_parameters freeze_trainable_layers freeze_trainable_modules freeze_layers unfreeze_layers
        trainable_layers decoder_trainable fusion_trainable encoder_trainable spectrum_top_fraction
        spectrum_model_name""",
    "write load_in_4bit, load_in_8bit or load_in_fp8: true": """
        quantization quantization_type quantization_method quantizer quantize_base bnb_config quantization_config
        load_in_16bit""",
    "write method: full": "full_finetuning",
    "write seed: 42": "random_state random_seed",
    "write shuffle: false for the rows' own order": "disable_shuffling curriculum_sampling train_sampling_strategy",
    "write add_tokens: [...]; the embedding grows with them": "resize_vocab resize_model_vocab",
    "write eval_samples: 4, and eval_max_new_tokens": "do_predict predict_with_generate generate_during_eval",
    "a result with the lowest loss: load_best_model_at_end; loss is what decides": "metric_for_best_model monitor",
    "`roundpipe export` merges and writes GGUF files of a finished run": """
        export_dir merge_lora export_quantization_bit""",
    "the run's name is that of output_dir; a hub data set's configuration goes into datasets[].name": "name run_name",
    "the loss is a mean over all tokens of a step": "average_tokens_across_devices",
    "padding is never trained": "ignore_pad_token_for_loss",
    "write chat_template_kwargs: {enable_thinking: false}": "enable_thinking",
    "write gradient_accumulation_steps": "update_freq accumulation_steps num_microbatches",
    "write max_grad_norm": "clip_grad_norm grad_clip gradient_clip clip_norm",
    "write adam_epsilon": "epsilon adam_eps eps norm_eps",
    "write lora: {dropout: 0}, which is its default": "disable_dropout",
    "write save_total_limit": "total_limit num_checkpoints keep_last_n_checkpoints",
    "write hardware: 8x4090 for `plan`; a run takes what is there": "gpu gpu_type gpus num_gpus",
    "write datasets: [{path: ..., type: chat}]": """
        _component_ source subset text system user column data_types role_boundaries""",
    "not offered: other programs judge a result by tasks": "tasks task lang limit",
    f"not offered: {REINFORCEMENT}": "num_iterations delta",
    "not offered: other adapters than LoRA": "use_qalora use_bdlora mora oft lokr loha vera adalora use_oft",
    "not offered: training of an encoder with a decoder": "is_encoder_decoder",
    "write method: lora or full": "mode training_type tuner_type train_type finetune_type peft_method",
    "write max_seq_length": "max_position_embeddings context_length",
    "write pipeline: {recompute: stage}": "recompute activation_recomputation use_gradient_checkpointing",
    "plugins of other programs are not run": "plugins",
    "write pipeline: {recompute: stage} or layer; activations are kept where that is faster": """
        checkpoint_activations activations_checkpoint_method activations_checkpoint_granularity
        activations_checkpoint_num_layers""",
    "kernels: auto has the loss in one kernel": "unsloth_cross_entropy_loss cut_cross_entropy fused_cross_entropy",
    "not offered: an average of weights over steps": "ema_decay ema use_ema",
    "not offered: one weight_decay for all steps": "weight_decay_incr_style start_weight_decay end_weight_decay",
    "not offered: one learning_rate for all parameters, but lora: {loraplus_lr_ratio: 16}": """
        layerwise_lr_decay layer_wise_lr_decay embedding_learning_rate embedding_lr""",
    "not offered: dropout in the base model; lora: {dropout: 0.05} is that of adapters": """
        attention_dropout hidden_dropout resid_dropout attn_pdrop""",
    "answers alone are trained: train_on_inputs: false is the default": """
        mask_prompt response_template instruction_template train_on_responses_only completion_only""",
    "name the column beside its data set: datasets: [{path: ..., columns: {prompt: NAME}}]": """
        prompt_column query_column response_column prompt_field completion_column""",
    "not offered: other adapters than LoRA, such as prompt tuning": """
        prompt_tuning_num_tokens num_virtual_tokens peft_type""",
    "write lora: {target_modules: all-linear}": "lora_on_all_layers lora_all_layers",
    "write micro_batch_size; one number for all GPUs": """
        micro_batch_size_per_gpu per_gpu_train_batch_size train_micro_batch_size_per_gpu""",
    "not offered: training on sound": "audio_column audio_dir",
    "layers are streamed through the GPUs: nothing is sharded or wrapped": "auto_wrap_policy mixed_precision_policy",
    "the head's sums are in float32 already": "cast_lm_head_to_fp32",
    "batches are not split: micro_batch_size is that of a worker's work": "split_batches dispatch_batches",
    "the section is not one of recipes: write its keys at the top": "training train trainer training_args",
}
"""Advice to a recipe about keys whose value decides what `convert` makes of them."""

_JOBS: Mapping[str, str] = {
    PREFERENCES: """
        kto_* dpo_* pref_loss pref_beta pref_ftx beta orpo_alpha cpo_alpha simpo_gamma rl_beta ref_model rpo_alpha
        desirable_weight undesirable_weight precompute_ref_log_probs f_divergence_type""",
    REINFORCEMENT: """
        ppo_* reward_funcs num_generations trl ebft use_vllm max_completion_length scale_rewards reward_weights vllm
        generation_batch_size""",
    REWARD: "reward_model process_reward_model center_rewards_coefficient",
    DISTILLATION: "kd_* teacher_model_name_or_path teacher_model kd_trainer",
    PART: "lisa_n_layers lisa_step_interval use_llama_pro",
    "ReLoRA: adapters that are merged and begun again": "relora relora_steps",
    "turning a model into a mixture of depths": "mixture_of_depths",
    "training of a model with repeated layers": "peft_layer_replication",
    "training from random weights": "train_from_scratch reinit_weights",
    "training of a diffusion model": "diffusion",
    "training for a quantised model": "qat",
    "training of a model in 1 bit": "use_onebitllms",
    "training of a sparse model": "llmcompressor",
    "training on positions that are skipped (PoSE)": "use_pose",
    CLASSIFIER: "num_labels",
    "merging or exporting a model": "export_dir export_quantization_bit export_hub_model_id merge_lora",
    EVALUATION: "task_dir n_shot",
}
"""Jobs that no recipe does -> keys: `convert` refuses a file with one, unless its own job does not read it."""

MULTIMODAL_KEYS = (
    *("processor_type", "processor_kwargs", "is_multimodal", "image_size", "image_resize_algorithm"),
    *("image_max_pixels", "image_min_pixels", "image_resolution", "image_do_pan_and_scan", "crop_to_patches"),
    *("video_max_pixels", "video_min_pixels", "video_resolution", "video_fps", "video_maxlen"),
    *("audio_sampling_rate", "use_audio_in_video", "freeze_vision_tower", "freeze_multi_modal_projector"),
    *("freeze_language_model", "freeze_mm_modules", "train_mm_proj_only"),
)
"""Keys that only a model of images, video or sound has: `convert` refuses them whatever their value."""


# Words in the names of keys that no table has, for recipes alone: they say what a key is about; `convert` names such
# keys as unknown.

_TOPICS: Mapping[str, str] = {
    NO_IMAGES: "images? videos? vision visual audio speech pixels? multimodal mm mmproj",
    REWARDED: """
        kl rewards? ppo grpo rloo rollouts? advantages? vespo sapo judge""",
    UNPAIRED: "kto bco undesirable",
    f"not offered: {DISTILLATION}": "teacher distill distillation gkd kd",
    f"not offered: {CLASSIFIER}": "classes classifier classification num_classes problem regression label2id id2label",
    _DEVICES: r"""
        fsdp\d? deepspeed zero\d? ddp nccl megatron mesh shards? sharded parallel parallelism tpu cuda gpus? machines?
        processes nodes? rank rdzv nccl nproc tp pp dp bucket buckets buffers? gathers? scatter allgather comm overlap
        affinity stage3 contiguous gradients sharding wrap accelerator distributed broadcast persistence
        state_dict sync reshard ds""",
    _FLOAT16: "scale hysteresis backoff growth autocast dtype fp16 bf16 fp32 downcast overflow",
    TRACKERS: "wandb swanlab mlflow comet neptune clearml trackio tensorboard aim dvclive codecarbon",
    _ATTENTION: "attn attention sdpa xformers flash",
    _KERNELS: "compile inductor dynamo liger fused kernels? triton unsloth fullgraph",
    "write load_in_4bit, load_in_8bit or load_in_fp8: true; other packed forms are not read or trained": (
        "quant quantization quantize quantized gptq awq bnb hqq eetq aqlm nf4 int8 int4 4bit 8bit fp8 float8"
    ),
    _MEMORY: "checkpointing offload offloading nvme recomputation recompute hooks ac activations pin",
    _ROWS: "dataloader loader prefetch workers? tokenization preprocessing collator collate sampler padding pad",
    "the tokenizer is the model's own; add_tokens adds words to it": "tokenizer tokens? vocab bos eos merges",
    "the chat template is the tokenizer's own; another one goes into chat_template": "template jinja prompts?",
    _WRITTEN: "generate generation sampling beams? temperature vllm sglang inference",
    "the model's own positions are used": "rope yarn longrope positions?",
    f"not offered; optim is {', '.join(OPTIMIZERS)}": """
        galore apollo badam lisa lomo adalomo lion sophia muon dion soap""",
    _MODEL: "config configuration architectures? arch hidden heads? layers? embed embedding num_heads intermediate",
    _TOLD: "log logs logger logging profile profiler profiling trace tracing metrics? verbose debug breakdown print",
    "checkpoints and the result are written to output_dir: save_steps, save_total_limit": (
        "save checkpoints? checkpointer saving resume"
    ),
    "evaluation: val_set_size or eval_datasets, eval_steps, eval_samples": """
        eval evals? evaluation validation val bench""",
    "write a schedule by lr_scheduler_type and lr_scheduler_kwargs, with learning_rate and warmup_steps": (
        "scheduler lr warmup annealing cooldown"
    ),
    "write optim, and what it takes: adam_beta1, adam_beta2, adam_epsilon, sgd_momentum": """
        optimizer optim adam momentum""",
    "adapters are set in the section lora": "peft lora adapters? rank loftq pissa olora",
    "data sets are set in datasets, each with path, type, split and columns": """
        dataset datasets? rows? corpus split columns?""",
    "the result is uploaded to hub_model_id: me/my-model": "hub repo push upload hf",
}
"""Answer -> patterns of words in a key's name."""


FILE_KINDS: tuple[AnswerKind, ...] = ("advice", "other", "idle")


def answer_of(key: str) -> Answer | None:
    """The answer to a key of another trainer that a table has by its whole name."""
    return _listed().get(key)


def file_answer(key: str) -> Answer | None:
    """The answer to a key in a file of another trainer, whose jobs and deciding values `convert` knows."""
    return next((table[key] for kind in FILE_KINDS if key in (table := _named(kind))), None)


def begins_idle(key: str) -> bool:
    """Whether a key that no table has begins like those which the program decides itself."""
    return _by_beginning("idle", key) is not None


def job_of_key(key: str) -> str | None:
    """The job that no recipe does, of which a key is."""
    found = _named("job").get(key) or _by_beginning("job", key)
    return found and found.text


def hint_for(key: str) -> str | None:
    """The answer to a key that is near no key of ours: by its beginning or the words in it, else by its whole name."""
    if found := answer_of(key) or _by_beginning("job", key) or _by_beginning("idle", key):
        return found.hint
    words = set(re.split(r"[^a-z0-9]+", key.lower()))
    found_by_words = [
        text
        for text, patterns in _TOPICS.items()
        if any(re.fullmatch(pattern, word) for pattern in patterns.split() for word in words)
    ]
    is_one = len(found_by_words) == 1 or NO_IMAGES in found_by_words  # of two others it may mean either, or neither
    return found_by_words[0] if is_one else None


@cache
def _named(kind: AnswerKind) -> dict[str, Answer]:
    tables = {"idle": _IDLE, "other": _OTHER, "advice": _ADVICE, "job": _JOBS}
    return {name: Answer(kind, text) for text, names in tables[kind].items() for name in names.split()}


@cache
def _listed() -> dict[str, Answer]:
    written = {name: Answer("advice", text) for text, names in _WRITE.items() for name in names.split()}
    images = dict.fromkeys((*MULTIMODAL_KEYS, "image_column", "images", "image_dir"), Answer("advice", NO_IMAGES))
    tables = (_named("idle"), _named("job"), _named("other"), _named("advice"), images, written)
    return {name: found for table in tables for name, found in table.items() if not name.endswith("*")}


def _by_beginning(kind: AnswerKind, key: str) -> Answer | None:
    table = _named(kind)
    return next((found for name, found in table.items() if name.endswith("*") and key.startswith(name[:-1])), None)
