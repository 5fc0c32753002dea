"""Keys and values of other trainers without a counterpart here, each with its answer: for recipes and for `convert`.

The trainers: axolotl, LLaMA-Factory, TRL, Unsloth, torchtune, transformers' and PEFT's arguments, DeepSpeed, FSDP and
accelerate. Spellings that a recipe takes are in `aliases.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Literal, NamedTuple

from roundpipe_cli.choices import OBJECTIVES, OPTIMIZERS, PAIR_OBJECTIVES
from roundpipe_cli.units import either

AnswerKind = Literal["write", "advice", "other", "job", "media", "idle", "row", "changed row", "topic"]
"""`idle`: decided by the program itself, so a file loses nothing; `other`: training is another without it, and the text
says what is done instead; `advice`: what to know where nothing else is trained; `write`: what to write, where the value
decides what `convert` makes of it; `job` and `media`: it asks for a job that no recipe does, `media` whatever its
value. `row` and `changed row` are settings of data sets: advice, and what is done instead."""
_BEFORE = {"idle": "not needed here: ", **dict.fromkeys(("other", "job", "changed row"), "not offered: ")}


class Answer(NamedTuple):
    """The answer to a key of another trainer."""

    kind: AnswerKind
    text: str

    @property
    def hint(self) -> str:
        """The sentence for a recipe that has the key."""
        return _BEFORE.get(self.kind, "") + self.text


# Names are words of a text; `name_*` stands for every name that begins so, where none is listed whole, and `~word`, for
# recipes alone, for every name with a word of that pattern that no key of ours is near to: `convert` names such keys as
# unknown.

_IDLE: Mapping[str, str] = {
    "layers are streamed through all devices anyway; name them with pipeline.devices": r"""
        deepspeed fsdp fsdp_config device_map max_memory gpu_memory_limit dp_shard_size dp_replicate_size local_rank
        context_parallel_size sequence_parallel_degree tensor_parallel_size heads_k_stride ring_attn_func use_ray use_kt
        tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel expert_model_parallel_size use_cpu
        overlap_param_gather overlap_grad_reduce use_distributed_optimizer use_hyper_parallel hyper_parallel_args
        world_size accelerator_config parallelism_config ddp master_addr master_port device resources_per_worker use_mca
        capabilities env_capabilities deepcompile moe_token_dispatcher_type ray_* fsdp_* ddp_* expert_parallel_*
        zero_optimization zero_* stage3_* num_machines compute_environment num_gpus strategy ~fsdp\d? ~deepspeed
        ~zero\d? ~ddp ~nccl ~megatron ~mesh ~shards? ~sharded ~parallel ~parallelism ~tpu ~cuda ~gpus? ~machines?
        ~processes ~nodes? ~rank ~rdzv ~nproc ~tp ~pp ~dp ~bucket ~buckets ~buffers? ~gathers? ~scatter ~allgather
        ~comm ~overlap ~affinity ~stage3 ~contiguous ~gradients ~sharding ~wrap ~accelerator ~distributed ~broadcast
        ~persistence ~state_dict ~sync ~reshard ~ds""",
    "the attention kernel is chosen automatically": """
        flash_attention sdp_attention xformers_attention attn_implementation flash_attn flex_attention
        flex_attn_compile_kwargs eager_attention sage_attention gemma4_hybrid_attn_impl large_head_attention sdpa_varlen
        flash_* scaling_softmax_* ~attn ~attention ~sdpa ~xformers ~flash""",
    "fused operators are chosen by `kernels: auto`": """
        fused_attn_kernel scattermoe use_v1_kernels use_kernels bias_activation_fusion apply_rope_fusion
        moe_grouped_gemm enable_liger_kernel use_liger_kernel cut_cross_entropy chunked_cross_entropy
        chunked_cross_entropy_num_chunks use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels
        dsv4_fp4_grouped_mode experts_implementation use_unsloth lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        lora_embedding_kernel liger_* torch_compile* kt_* liger_kernel_config ~compile ~inductor ~dynamo ~liger ~fused
        ~kernels? ~triton ~unsloth ~fullgraph""",
    "memory is planned; pipeline.recompute says which activations are kept, load_in_4bit packs frozen weights": """
        layer_offloading offload_folder ple_cpu_offload experimental_skip_move_to_device lora_on_cpu use_unsloth_gc
        gradient_checkpointing_kwargs selective_checkpointing disable_gradient_checkpointing use_reentrant_gc
        low_cpu_mem_usage recompute_granularity upcast_layernorm upcast_lmhead_output gc_steps torch_empty_cache_steps
        gradient_checkpointing use_bnb_nested_quant double_quantization nvfp4_merge_aware quantize_moe_experts
        quantization_device_map bnb_config_kwargs quantization qlora_sharded_model_loading embeddings_skip_upcast
        gc_collect_steps tiled_mlp* bnb_4bit_* fp8_* activation_checkpointing* activation_offloading*
        training.gradient_checkpointing training.load_in_4bit cpu_offload_* ~checkpointing ~offload ~offloading ~nvme
        ~recomputation ~recompute ~hooks ~ac ~activations ~pin""",
    "rows are read, tokenised and cached beside training, and padded to their microbatch's length": """
        dataset_prepared_path dataset_processes dataset_num_proc preprocessing_num_workers overwrite_cache
        dataset_keep_in_memory preprocessing_batch_size data_shared_file_system streaming dataset_streaming
        buffer_size tokenized_path streaming_multipack_buffer_size preprocess_shards remove_unused_columns
        pad_to_sequence_len pad_to_multiple_of padding_free eval_sample_packing eval_packing batch_flattening
        multipack_real_batches shuffle_merged_datasets shuffle_before_merging_datasets shuffle_dataset is_preprocess
        preprocess_iterable pretrain_multipack_buffer_size num_dataset_shards_to_save push_dataset_to_hub
        total_supervised_tokens total_num_tokens label_names length_column_name pad_token data.format_type
        dataloader_* sample_packing_* ~dataloader ~loader ~prefetch ~workers? ~tokenization ~preprocessing ~collator
        ~collate ~sampler ~padding ~pad""",
    "the model's own files say what it is and how it is loaded": """
        model_type tokenizer_type is_llama_derived_model is_mistral_derived_model is_qwen_derived_model strict
        is_falcon_derived_model use_fast_tokenizer tokenizer_use_fast llama4_linearized_experts use_adapter
        lora_task_type type_of_model cls_model_config infer_dtype use_cache use_kv_cache init_special_tokens
        mean_resizing_embeddings fp32_norm_classes ignore_bias_buffers torchdistx_path tokenizer_save_jinja_files
        axolotl_config_path tokenizer task_type peft_type peft_version inference_mode auto_mapping
        base_model_name_or_path cache_dir ~config ~configuration ~architectures? ~arch ~hidden ~heads? ~layers? ~embed
        ~embedding ~num_heads ~intermediate""",
    "the dashboard, metrics.jsonl and the report have every step; report_to names trackers": """
        disable_tqdm plot_loss include_tokens_per_second include_num_input_tokens_seen include_tkps print_param_status
        include_effective_tokens_per_second skip_memory_metrics enable_torch_profiler debug run_name project trl_version
        profiler_* profile_* log_* logging_* ~log ~logs ~logger ~logging ~profile ~profiler ~profiling ~trace ~tracing
        ~metrics? ~verbose ~debug ~breakdown ~print""",
    "report_to names trackers (tensorboard, wandb, mlflow, trackio), which read the rest from their variables": """
        wandb_* swanlab_* mlflow_* comet_* otel_* trackio_* hf_mlflow_* use_wandb* use_swanlab* use_mlflow* use_comet*
        use_otel* use_trackio* gradio_* logging.wandb_project logging.wandb_token logging.tensorboard_dir ~wandb
        ~swanlab ~mlflow ~comet ~neptune ~clearml ~trackio ~tensorboard ~aim ~dvclive ~codecarbon""",
    "the hub's settings are hub_model_id and revision; secrets belong into `hf auth login` or HF_TOKEN": """
        hf_use_auth_token hf_hub_token ms_hub_token om_hub_token hub_* logging.hf_token token""",
    "`roundpipe generate` writes answers, and has such settings; while training, eval_samples writes some": """
        temperature top_p top_k num_beams max_new_tokens repetition_penalty length_penalty skip_special_tokens
        infer_backend generation_* generate_samples* lm_eval_* vllm_* sglang_* export_* ~generate ~generation ~sampling
        ~beams? ~temperature ~vllm ~sglang ~inference""",
    "an evaluation is the loss of all its rows, at eval_steps and at the end": """
        eval_batch_size per_device_eval_batch_size eval_on_start do_causal_lm_eval eval_causal_lm_metrics
        eval_table_size bf16_full_eval fp16_full_eval include_for_metrics batch_eval_metrics prediction_loss_only
        eval_do_concat_batches eval_use_gather_object eval_accumulation_steps eval_on_each_dataset eval_num_beams
        do_eval do_bench_eval bench_dataset bench_split compute_accuracy greater_is_better num_generation_samples""",
    "checkpoints are whole and resume exactly: save_steps, save_total_limit": """
        overwrite_output_dir ignore_data_skip enable_jit_checkpoint dynamic_checkpoint create_new_adapter merge_method
        restore_callback_states_from_checkpoint peft_autocast_adapter_dtype save_*""",
    "it belongs to a method that is not offered": """
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

CROSS_ENTROPY = "the ordinary cross-entropy is trained"
_OTHER: Mapping[str, str] = {
    "every step trains all weights by the recipe's optim; its learning rate was chosen for another": """
        use_galore use_apollo use_badam use_adam_mini use_muon""",
    CROSS_ENTROPY: "use_dft_loss use_asft_loss use_eaft_loss use_eaft liger_use_token_scaling",
    "the adapters start by lora.init": "pissa_init",
    "adapters go into every layer, all with lora.r and lora.alpha, and into no parameters or rows of the embedding": """
        lora_rank_pattern rank_pattern lora_alpha_pattern alpha_pattern lora_target_parameters target_parameters
        peft_layers_to_transform lora_layers_to_transform layers_to_transform peft_trainable_token_indices
        trainable_token_indices""",
    "adapters are read from the paths of adapter_name_or_path alone": "adapter_folder",
    "products are computed in the recipe's dtype, and so are norms": "fp8 fp32_norms",
    "attention is the model's own, over whole rows": "shift_attn s2_attention block_diag_attn scaling_softmax",
    "system messages, tools, thoughts and the end of a turn are as the chat template writes them": """
        tool_format preserve_thinking eot_tokens default_system default_system_message""",
    "the tokenizer and its tokens are the model's own; add_tokens adds words": """
        tokenizer_config tokenizer_use_mistral_common added_tokens_overrides eos_token tokenizer_legacy
        split_special_tokens new_special_tokens_config""",
    "no rows of the embedding are taken away or set anew": "shrink_embeddings fix_untrained_tokens",
    "experts get a loss for their balance where the model's config.json says output_router_logits: true": """
        moe_aux_loss_coef router_aux_loss_coef""",
    "the model's own positions, configuration and files are used": """
        rope_scaling model_config overrides_of_model_config base_model_config overrides_of_model_kwargs
        model_init_kwargs model_quantization_config""",
    "checkpoints in GPTQ are not read: name the unquantised model, with load_in_4bit: true": "gptq",
    "learning_rate is that of embeddings and of every group of weights": """
        lr_groups embedding_lr embedding_lr_scale loraplus_lr_embedding""",
    "the schedule is lr_scheduler_type's own, after a warmup in a line from zero": """
        lr_quadratic_warmup lr_div_factor cosine_constant_lr_ratio jagged_restart_steps""",
    "rows of like length meet in a microbatch; which rows a step has is not by length": "group_by_length",
    "rows are read as texts or chats, not as tokens; the recipe says how they are cut and packed": """
        skip_prepare_dataset dataset_kwargs pretraining_sample_concatenation max_packed_sequence_len""",
    "all rows are trained, not a shard: short and equal ones, and the last rows of an epoch": """
        min_sample_len dataset_exact_deduplication dataset_shard_num dataset_shard_idx dataloader_drop_last""",
    "rows come in the order of the recipe's seed": "data_seed",
    "evaluations begin with the first steps, on rows as long as those that are trained": "eval_delay eval_sequence_len",
    "optimizer and trainer are the recipe's, with their usual settings": """
        optim_args adam_epsilon2 adam_beta3 trainer_cls""",
    "the batch is the one written": "auto_find_batch_size",
}
"""Training in its place -> keys whose work is not done here: said in the first line of a converted recipe."""

REINFORCEMENT, PREFERENCES, REWARD = "reinforcement learning", "training on preferences", "training of a reward model"
CLASSIFIER, DISTILLATION = "training of a classifier", "distillation from a teacher"
PART, MULTIMODAL = "training of a part of the weights", "training on images, video or sound"
EVALUATION = "evaluation or prediction"
_NO_IMAGES = "images are not trained here, nor is sound; the text part of such models is, on rows of text"
_NO_TRACKER = "not here: report_to takes tensorboard, wandb, mlflow and trackio; metrics.jsonl has every step"
_REWARDED = "not here: it trains on rewards of answers that the model writes meanwhile, which TRL does"
_UNPAIRED = "not here, but in TRL: of such rows the wanted answers train with objective: sft, or pairs with dpo"
_STARTS = "lora.init takes default and gaussian; starts that change the base weights are not offered"

_ADVICE: Mapping[str, str] = {
    "not needed for the models that load here": "lora_fan_in_fan_out fan_in_fan_out",
    "code from a model's repository is never run": "trust_remote_code",
    "nothing is generated while training": "do_sample",
    "the embedding keeps its size": "resize_token_embeddings_to_32x",
    "see report_to; wandb reads the variables WANDB_PROJECT, WANDB_ENTITY and WANDB_NAME": """
        wandb_project wandb_entity wandb_name""",
    "gradients and adapters are not sent to trackers": "wandb_watch wandb_log_model",
    "the finished result is uploaded, and no checkpoint": "hub_strategy",
    "on_nonfinite says what a loss that is no number does": "loss_watchdog_threshold loss_watchdog_patience",
    "the weights are loaded as the model's own files say": "model_quantization_config_kwargs",
    "checkpoints in GPTQ are not read": "gptq_disable_exllama",
    "not a device of this program": "xpu_backend",
}

_WRITE: Mapping[str, str] = {
    "name the file or hub id: datasets: [{path: data/train.jsonl}]": """
        dataset data train_dataset train_file data_path dataset_dir data_files""",
    "name the file or hub id: eval_datasets: [{path: data/eval.jsonl}], or a share of the rows: val_set_size": """
        eval_dataset test_datasets validation_file dataset_test_split test_file""",
    "write it beside its data set: datasets: [{path: ..., split: train, name: SUBSET, columns: {text: NAME}}]": """
        dataset_train_split dataset_split train_split dataset_config dataset_subset dataset_text_field text_field
        text_column""",
    "name the column beside its data set: datasets: [{path: ..., columns: {prompt: NAME, completion: NAME}}]": """
        prompt_column query_column response_column prompt_field completion_column""",
    "list them: datasets: [{path: ..., weight: 1}, ...]": "dataset_mixture interleave_probs mix_strategy",
    "write datasets: [{path: ..., type: text}]": "pretraining_dataset",
    "write datasets: [{path: ..., type: chat}]": """
        _component_ source subset text system user column data_types role_boundaries""",
    "take a part of the split: datasets: [{path: data/train.jsonl, split: 'train[:1000]'}]": """
        max_samples max_train_samples""",
    "the tokenizer's own chat template is used; another one goes into chat_template": """
        template chat_template_path chat_template_jinja prompt_template prompt_format""",
    "secrets do not belong into a recipe: use `hf auth login` or the HF_TOKEN variable": """
        hub_token use_auth_token token hf_token hf_hub_token""",
    "name the repository: hub_model_id: me/my-model": "push_to_hub hub_repo_id hub_name",
    "the tokenizer's own special tokens are used": "special_tokens pad_token bos_token unk_token",
    "write eval_steps or save_steps: a number of steps, a fraction of all, or epoch": """
        evals_per_epoch saves_per_epoch save_strategy eval_strategy evaluation_strategy""",
    _NO_TRACKER: "use_swanlab swanlab_project use_comet comet_project_name",
    "write report_to: [tensorboard] or [wandb]": "use_tensorboard use_wandb logger",
    "write early_stopping_patience: evaluations without a lower loss": "early_stopping early_stopping_steps",
    "a step has micro_batch_size x gradient_accumulation_steps rows: write those": """
        batch_size train_batch_size global_batch_size effective_batch_size total_batch_size num_micro_batches""",
    "write num_train_epochs, or max_steps": "max_steps_per_epoch steps train_iters num_steps max_epochs",
    "write dtype: bfloat16, float16 or float32": """
        mixed_precision precision bfloat16 float16 float32 pure_bf16 half_precision fp32 fp16_opt_level amp""",
    "write optim: adamw, with learning_rate, weight_decay, adam_beta1 and adam_beta2 beside it": """
        optim_target_modules adamw_betas adam_betas betas fused""",
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
    "write it in the section of its objective: dpo: {beta: 0.1, label_smoothing: 0.1}, simpo: {simpo_gamma: 0.5}": """
        pref_beta rl_beta dpo_beta orpo_alpha beta trl simpo_gamma gamma gamma_beta_ratio cpo_alpha simpo_alpha
        dpo_label_smoothing""",
    f"not offered: the losses of pairs are those of {either(PAIR_OBJECTIVES)}, as their papers have them": """
        pref_ftx rpo_alpha f_divergence_type f_alpha_divergence_coef ld_alpha loss_weights use_weighting
        dpo_use_weighting dpo_loss_weights dpo_norm_loss pref_bco_weight discopop_tau""",
    _UNPAIRED: """
        desirable_weight undesirable_weight kto_desirable_weight kto_undesirable_weight kto_chosen_weight
        kto_rejected_weight ~kto ~bco ~undesirable""",
    "the reference of objective dpo is the base model, or the adapter of lora.start_from as it is": """
        precompute_ref_log_probs precompute_ref_batch_size ref_model_mixup_alpha ref_model_sync_steps ref_model
        ref_model_adapters ref_model_name_or_path reference_free sync_ref_model ref_checkpointer""",
    "long pairs are cut by max_seq_length": """
        max_prompt_length max_target_length max_source_length max_completion_length""",
    "biases stay frozen beside adapters; lora.modules_to_save trains whole modules": "lora_bias bias",
    _STARTS: "init_lora_weights pissa_init loftq_config",
    "name the modules that are adapted: lora.target_modules, a regular expression or all-linear too": """
        exclude_modules lora_attn_modules apply_lora_to_mlp apply_lora_to_output lora_mlp lora_attn lora_on_all_layers
        lora_all_layers""",
    "with `method: full`, name what stays as it is: frozen_parameters": """
        unfrozen_parameters freeze_trainable_layers freeze_trainable_modules freeze_layers unfreeze_layers
        trainable_layers decoder_trainable fusion_trainable encoder_trainable spectrum_top_fraction
        spectrum_model_name""",
    "write load_in_4bit, load_in_8bit or load_in_fp8: true": """
        quantization quantization_type quantization_method quantizer quantize_base bnb_config quantization_config
        load_in_16bit""",
    "write seed: 42": "random_state random_seed",
    "write shuffle: false for the rows' own order": "disable_shuffling curriculum_sampling train_sampling_strategy",
    "write add_tokens: [...]; the embedding grows with them": "resize_vocab resize_model_vocab",
    "write eval_samples: 4, and eval_max_new_tokens": "do_predict predict_with_generate generate_during_eval",
    "a result with the lowest loss: load_best_model_at_end; loss is what decides": "metric_for_best_model monitor",
    "`roundpipe export` merges and writes GGUF files of a finished run": """
        export_dir merge_lora export_quantization_bit""",
    "the run's name is that of output_dir; a hub data set's configuration goes into datasets[].name": "name run_name",
    "the loss is a mean over all tokens of a step; padding is never trained": """
        average_tokens_across_devices ignore_pad_token_for_loss""",
    "write chat_template_kwargs: {enable_thinking: false}": "enable_thinking",
    "write gradient_accumulation_steps": "update_freq accumulation_steps num_microbatches",
    "write max_grad_norm": "clip_grad_norm grad_clip gradient_clip clip_norm",
    "write adam_epsilon": "epsilon adam_eps eps norm_eps",
    "write lora: {dropout: 0}, which is its default": "disable_dropout",
    "write save_total_limit": "total_limit num_checkpoints keep_last_n_checkpoints",
    "write hardware: 8x4090 for `plan`; a run takes what is there": "gpu gpu_type gpus num_gpus",
    "not offered: other programs judge a result by tasks": "tasks task lang limit",
    f"not offered: {REINFORCEMENT}": "num_iterations delta",
    "not offered: other adapters than LoRA, such as prompt tuning": """
        use_qalora use_bdlora mora oft lokr loha vera adalora use_oft prompt_tuning_num_tokens num_virtual_tokens
        peft_type""",
    "not offered: training of an encoder with a decoder": "is_encoder_decoder",
    "write method: lora or full": "mode training_type tuner_type train_type finetune_type peft_method full_finetuning",
    "write max_seq_length": "max_position_embeddings context_length",
    "write pipeline: {recompute: stage} or layer; activations are kept where that is faster": """
        recompute activation_recomputation use_gradient_checkpointing checkpoint_activations
        activations_checkpoint_method activations_checkpoint_granularity activations_checkpoint_num_layers""",
    "plugins of other programs are not run": "plugins",
    "kernels: auto has the loss in one kernel": "unsloth_cross_entropy_loss cut_cross_entropy fused_cross_entropy",
    "not offered: an average of weights over steps": "ema_decay ema use_ema",
    "not offered: one weight_decay for all steps": "weight_decay_incr_style start_weight_decay end_weight_decay",
    "not offered: one learning_rate for all parameters, but lora: {loraplus_lr_ratio: 16}": """
        layerwise_lr_decay layer_wise_lr_decay embedding_learning_rate embedding_lr""",
    "not offered: dropout in the base model; lora: {dropout: 0.05} is that of adapters": """
        attention_dropout hidden_dropout resid_dropout attn_pdrop""",
    "answers alone are trained: train_on_inputs: false is the default": """
        mask_prompt response_template instruction_template train_on_responses_only completion_only""",
    "write micro_batch_size; one number for all GPUs": """
        micro_batch_size_per_gpu per_gpu_train_batch_size train_micro_batch_size_per_gpu""",
    _NO_IMAGES: """
        image_column images image_dir audio_column audio_dir ~images? ~videos? ~vision ~visual ~audio ~speech ~pixels?
        ~multimodal ~mm ~mmproj""",
    "layers are streamed through the GPUs: nothing is sharded or wrapped": "auto_wrap_policy mixed_precision_policy",
    "the head's sums are in float32 already": "cast_lm_head_to_fp32",
    "batches are not split: micro_batch_size is that of a worker's work": "split_batches dispatch_batches",
    "the section is not one of recipes: write its keys at the top": "training train trainer training_args",
}

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

_MEDIA: Mapping[str, str] = {
    _NO_IMAGES: """
        processor_type processor_kwargs is_multimodal image_size image_resize_algorithm image_max_pixels
        image_min_pixels image_resolution image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels
        video_resolution video_fps video_maxlen audio_sampling_rate use_audio_in_video freeze_vision_tower
        freeze_multi_modal_projector freeze_language_model freeze_mm_modules train_mm_proj_only""",
}
"""Keys that only a model of images, video or sound has."""

_MULTIMODAL_NAME = (
    r"(?is)(^|[-_./\d])(vl|vlm|vla|vision|llava|bakllava|pixtral|intern_?vl|smol_?vlm|paligemma\d?|omni|audio|voxtral"
    r"|whisper|tts|ocr|idefics|blip|florence|mllama|minicpm[-_]?[vo]|stable-diffusion|sdxl|flux|\dv)([-_.\d]|/*$)"
    r"(?!.*/[^/])"
)
"""Names of models, by their last parts, and of LLaMA-Factory's templates that see or hear."""

_JOBS_OF_VALUES: Mapping[str, Mapping[str, str]] = {
    "finetuning_type": {
        **{"^freeze$": PART, "^oft$": "orthogonal fine-tuning (OFT)"},
        "^(?!(lora|full)$)": "an unknown method",
    },
    "adapter": {"^(?!(lora|qlora|none|False|)$)": "another kind of adapter than LoRA"},
    "lora_task_type": {"^(?!CAUSAL_LM$)": CLASSIFIER},
    "plugins": {  # folders of axolotl's integrations
        **{r"\bspectrum\b": PART, r"\bkd\b": DISTILLATION, r"\bnemo_gym\b": REINFORCEMENT},
        **{r"\bmora\b": "MoRA adapters", r"\bdiffusion\b": "training of a diffusion model"},
        r"\bllm_compressor\b": "training of a sparse model",
    },
    "model_type": {  # axolotl's name of the model's class
        "Classification|QuestionAnswering|MultipleChoice": CLASSIFIER,
        "ConditionalGeneration|ImageTextToText|Vision2Seq|Speech|Waveform|Llava|Mllama|Multimodal": MULTIMODAL,
        "Seq2Seq|MaskedLM": "training of a model that is no decoder",
    },
    **dict.fromkeys(("base_model", "model_name_or_path", "template", "chat_template"), {_MULTIMODAL_NAME: MULTIMODAL}),
}
"""Key -> pattern in the text of its value -> the job that it asks for."""

# Settings of other trainers' data sets.

TEMPLATED = "rows are put into the chat template where the tokenizer has one"
_CHANGED_ROWS: Mapping[str, str] = {
    "all rows are trained, not a part of them": "shards shards_idx skip fraction",
    "the dataset's own folder and newest revision are read": "revision data_dir",
    "the assistant's turns are trained, whole and with their ends": """
        roles_to_train train_on_eos train_on_eot message_field_training_detail""",
    "system messages and thoughts stay as the rows have them, and none are added": """
        drop_system_message system_prompt split_thinking""",
    TEMPLATED: "format no_input_format prompt_format chosen_format rejected_format",
}
_ROW_ADVICE: Mapping[str, str] = {
    "name the columns: columns: {prompt: question, completion: answer}": """
        field field_* message_field_* message_property_mappings text_column column_map prompt_column response_column
        question answer input_column output_column conversation_column column prompt query response history messages
        chosen rejected tags role_tag content_tag instruction input output text""",
    "name each file: path: data/train.jsonl, or a glob": """
        data_files file_name file files source hf_hub_url url script_url""",
    "a part of the split: split: 'train[:1000]'": """
        num_samples max_samples limit samples take train_on_split subset_size""",
    "the file's name says what it is: .jsonl, .json, .csv, .tsv, .txt or .parquet": """
        ds_type format file_type data_type""",
    "type: chat, sharegpt, alpaca, prompt_completion, text or preference": """
        formatting conversation ranking _component_""",
    "the configuration of a hub data set is name": "subset config config_name data_config",
    "weight: a share of the rows of an epoch, relative to the others' weights": """
        probability ratio proportion mix_weight""",
    "rows are read as they come, whatever their number": "streaming preprocess_shards num_proc",
    "tokens are cached by themselves": "cache_dir keep_in_memory",
    "the chat template is the tokenizer's: chat_template at the top of the recipe": "chat_template template",
    "roles are those of the rows; roles_to_train says which are trained": "roles message_field_training",
}

# Values of a recipe's keys.

_JOB_NAMES: Mapping[str, str] = {
    _REWARDED: "grpo gspo dapo ppo rloo online_dpo reinforce gdpo",
    _UNPAIRED: "kto bco",
    f"not offered: {REWARD}": "rm reward prm",
    f"not offered: {DISTILLATION}": "gkd kd distillation",
    f"not offered: objective is {either(OBJECTIVES)}": "hinge robust cpo nca sppo exo apo tdpo xpo",
}
_VALUES: Mapping[str, Mapping[str, str]] = {
    "method": {
        "write `method: lora` and `lora: {use_dora: true}`": "dora",
        "write `method: lora` and `lora: {use_rslora: true}`": "rslora",
        "write `method: lora` and `lora: {loraplus_lr_ratio: 16}`": "lora_plus",
        "write `method: full` and name what stays as it is: frozen_parameters": "freeze partial spectrum bitfit",
        **{f"write `objective: {name}`": name for name in PAIR_OBJECTIVES},
        "not offered: adapters are LoRA's, with lora.use_dora, lora.use_rslora or lora.loraplus_lr_ratio": """
            oft boft loha lokr ia3 vera adalora prefix_tuning prompt_tuning p_tuning llama_adapter mora relora
            galore""",
        **_JOB_NAMES,
    },
    "objective": {"write `objective: sft` and datasets of type text": "pt", **_JOB_NAMES},
    "optim": {
        "not here; the nearest is adamw_bf16, whose state takes 4 bytes for each trained parameter, as Muon's": "muon",
        "not here; the nearest is adamw_8bit, whose state takes 2 bytes for each trained parameter": """
            adamw_torch_4bit adamw_4bit ao_adamw_4bit""",
    },
    "dtype": {
        "write dtype: bfloat16, which `dtype: auto` is of most models": "auto",
        "write load_in_8bit: true for frozen weights in 8 bit": "int8 8bit",
        "write load_in_4bit: true for frozen weights in 4 bit": "int4 4bit nf4",
        "write load_in_fp8: true for frozen weights in FP8": "fp8 float8 float8_e4m3fn",
    },
    "lora.init": {_STARTS: "pissa olora loftq eva corda orthogonal lora_ga mica"},
    "report_to": {_NO_TRACKER: "swanlab comet_ml comet clearml neptune dvclive all codecarbon flyte aim"},
}
"""Recipe key -> advice -> values of other trainers."""

_TOPICS: Mapping[str, str] = {
    _REWARDED: "~kl ~rewards? ~ppo ~grpo ~rloo ~rollouts? ~advantages? ~vespo ~sapo ~judge",
    f"not offered: {DISTILLATION}": "~teacher ~distill ~distillation ~gkd ~kd",
    f"not offered: {CLASSIFIER}": """
        ~classes ~classifier ~classification ~num_classes ~problem ~regression ~label2id ~id2label""",
    "dtype: float16 scales the loss by itself; masters and gradients are float32": """
        ~scale ~hysteresis ~backoff ~growth ~autocast ~dtype ~fp16 ~bf16 ~fp32 ~downcast ~overflow""",
    "write load_in_4bit, load_in_8bit or load_in_fp8: true; other packed forms are not read or trained": """
        ~quant ~quantization ~quantize ~quantized ~gptq ~awq ~bnb ~hqq ~eetq ~aqlm ~nf4 ~int8 ~int4 ~4bit ~8bit ~fp8
        ~float8""",
    "the tokenizer is the model's own; add_tokens adds words to it": "~tokenizer ~tokens? ~vocab ~bos ~eos ~merges",
    "the chat template is the tokenizer's own; another one goes into chat_template": "~template ~jinja ~prompts?",
    "the model's own positions are used": "~rope ~yarn ~longrope ~positions?",
    f"not offered; optim is {', '.join(OPTIMIZERS)}": """
        ~galore ~apollo ~badam ~lisa ~lomo ~adalomo ~lion ~sophia ~muon ~dion ~soap""",
    "checkpoints and the result are written to output_dir: save_steps, save_total_limit": """
        ~save ~checkpoints? ~checkpointer ~saving ~resume""",
    "evaluation: val_set_size or eval_datasets, eval_steps, eval_samples": """
        ~eval ~evals? ~evaluation ~validation ~val ~bench""",
    "write a schedule by lr_scheduler_type and lr_scheduler_kwargs, with learning_rate and warmup_steps": """
        ~scheduler ~lr ~warmup ~annealing ~cooldown""",
    "write optim, and what it takes: adam_beta1, adam_beta2, adam_epsilon, sgd_momentum": """
        ~optimizer ~optim ~adam ~momentum""",
    "adapters are set in the section lora": "~peft ~lora ~adapters? ~rank ~loftq ~pissa ~olora",
    "data sets are set in datasets, each with path, type, split and columns": """
        ~dataset ~datasets? ~rows? ~corpus ~split ~columns?""",
    "the result is uploaded to hub_model_id: me/my-model": "~hub ~repo ~push ~upload ~hf",
}
"""What a key is about by its words alone."""

_TABLES: Mapping[AnswerKind, Mapping[str, str]] = {
    **{"write": _WRITE, "advice": _ADVICE, "other": _OTHER, "job": _JOBS, "media": _MEDIA, "idle": _IDLE},
    **{"row": _ROW_ADVICE, "changed row": _CHANGED_ROWS, "topic": _TOPICS},
}
_OF_KEYS: tuple[AnswerKind, ...] = ("write", "media", "advice", "other", "job", "idle")
OF_ROWS: tuple[AnswerKind, ...] = ("row", "changed row")


@cache
def _named(kind: AnswerKind) -> dict[str, Answer]:
    return {name: Answer(kind, text) for text, names in _TABLES[kind].items() for name in names.split()}


def answer_of(key: str, kinds: tuple[AnswerKind, ...] = _OF_KEYS, *, begins: bool = False) -> Answer | None:
    """The answer to a key of another trainer in the first of these tables that has it by its whole name, or where
    `begins` says so, by its beginning."""
    names = [name for kind in kinds for name in _named(kind).items()]
    whole = (found for name, found in names if name == key and key.strip("~*") == key)
    longer = (found for name, found in names if begins and name[-1] == "*" and key.startswith(name[:-1]))
    return next(chain(whole, longer), None)


def is_off(value: object) -> bool:
    """Whether a line asks for nothing."""
    return value is None or value is False or value in ("", [], {}) or value == "none"


def other_job(key: str, value: object) -> str | None:
    """The job that no recipe does for which a line of another trainer's file asks."""
    if value is None:
        return None
    if asked := [job for pattern, job in _JOBS_OF_VALUES.get(key, {}).items() if re.search(pattern, str(value))]:
        return asked[0]
    if answer_of(key, ("media",)):
        return MULTIMODAL
    found = None if is_off(value) else answer_of(key, ("job",), begins=True)
    return found and found.text


def hint_for(key: str) -> str | None:
    """The answer to a key that is near no key of ours: by its name, its beginning, or the words in it."""
    if found := answer_of(key) or answer_of(key, ("job", "idle"), begins=True):
        return found.hint
    words = re.split(r"[^a-z0-9]+", key.lower())
    names = ((name, found.text) for kind in _TABLES for name, found in _named(kind).items() if name[0] == "~")
    texts = {text for name, text in names if any(re.fullmatch(name[1:], word) for word in words)}
    if _NO_IMAGES in texts:
        return _NO_IMAGES
    return texts.pop() if len(texts) == 1 else None  # of two it may mean either, or neither


def answer_to(key: str, value: object) -> str | None:
    """The advice for a value of another trainer that a recipe key does not take."""
    lowered = value.lower() if isinstance(value, str) else ""
    return next((text for text, values in _VALUES.get(key, {}).items() if lowered in values.split()), None)
