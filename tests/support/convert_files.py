"""Training files in the style of the three tools' users, written for the tests of `roundpipe convert`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One file, and what must become of it."""

    tool: str
    text: str
    expected: dict[str, object]
    """Dotted recipe key -> value."""
    left_out: set[str]
    """Keys that must be listed, exactly these."""
    num_gpus: int = 1


EXAMPLES = {
    "axolotl_qlora": Example(
        "axolotl",
        """
base_model: NousResearch/Meta-Llama-3.1-8B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: false
strict: false
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.0
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_fan_in_fan_out:
wandb_project:
wandb_entity:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|end_of_text|>
""",
        {
            **{"model": "NousResearch/Meta-Llama-3.1-8B", "method": "lora", "lora.r": 32, "lora.alpha": 16},
            **{"lora.dropout": 0.05, "lora.target_modules": "all-linear", "max_seq_length": 4096, "packing": True},
            **{"micro_batch_size": 2, "gradient_accumulation_steps": 16, "num_train_epochs": 4, "warmup_steps": 10},
            **{"learning_rate": 2e-4, "lr_scheduler_type": "cosine", "dtype": "bfloat16", "optim": "adamw"},
            "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca", "as_chat": False}],
            "output_dir": "./outputs/lora-out",
        },
        set(),
        num_gpus=4,
    ),
    "axolotl_full": Example(
        "axolotl",
        """
base_model: Qwen/Qwen3-4B
datasets:
  - path: data/chats.jsonl
    type: chat_template
    field_messages: messages
    roles_to_train: [assistant]
chat_template: qwen3
val_set_size: 0.05
eval_steps: 50
sequence_len: 8192
sample_packing: false
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: linear
learning_rate: 1e-5
bf16: true
deepspeed: deepspeed_configs/zero3_bf16.json
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rms_norm: true
warmup_ratio: 0.1
weight_decay: 0.01
max_grad_norm: 0.5
seed: 7
""",
        {
            **{"method": "full", "max_seq_length": 8192, "gradient_accumulation_steps": 8, "warmup_steps": 0.1},
            **{"lr_scheduler_type": "linear", "weight_decay": 0.01, "max_grad_norm": 0.5, "seed": 7},
            **{"learning_rate": 1e-5, "datasets": [{"path": "data/chats.jsonl", "type": "chat"}]},
        },
        set(),
    ),
    "axolotl_sharegpt": Example(
        "axolotl",
        """
base_model: mistralai/Mistral-7B-v0.3
adapter: qlora
datasets:
  - path: json
    data_files: data/conversations.jsonl
    type: sharegpt
    conversation: chatml
  - path: org/completions
    type: completion
    field: body
sequence_len: 2048
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
lora_modules_to_save: [embed_tokens]
micro_batch_size: 4
optimizer: adamw_bnb_8bit
lr_scheduler: rex
learning_rate: 0.0001
neftune_noise_alpha: 5
trust_remote_code: true
""",
        {
            **{"method": "lora", "lora.target_modules": ["q_proj", "v_proj"], "micro_batch_size": 4},
            **{"lora.modules_to_save": ["embed_tokens"], "neftune_noise_alpha": 5, "optim": "adamw_8bit"},
            **{"load_in_4bit": True, "long_rows": "drop"},
            "datasets": [
                {"path": "data/conversations.jsonl", "type": "sharegpt"},
                {"path": "org/completions", "type": "text", "columns": {"text": "body"}},
            ],
        },
        {"lr_scheduler", "trust_remote_code"},
    ),
    "axolotl_columns": Example(
        "axolotl",
        """
base_model: google/gemma-3-1b-it
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets:
  - path: data/faq.csv
    split: train[:90%]
    type:
      field_instruction: question
      field_output: answer
      format: "Q: {instruction} A: "
max_steps: 500
sequence_len: 1024
micro_batch_size: 8
gradient_accumulation_steps: 1
learning_rate: 3e-4
lr_scheduler: constant_with_warmup
fp16: true
group_by_length: true
wandb_project: faq
early_stopping_patience: 3
""",
        {
            **{"max_steps": 500, "dtype": "float16", "lr_scheduler_type": "constant", "lora.r": 8},
            "datasets": [
                {
                    **{"path": "data/faq.csv", "split": "train[:90%]", "type": "alpaca"},
                    "columns": {"instruction": "question", "output": "answer"},
                }
            ],
        },
        {"datasets[0].format", "wandb_project", "early_stopping_patience", "group_by_length"},
    ),
    "axolotl_short": Example(
        "axolotl",
        """
base_model: HuggingFaceTB/SmolLM2-135M
sequence_len: 512
datasets:
  - {path: org/qa, name: main, type: alpaca_chat.load_qa, shards: 4}
micro_batch_size: 16
num_epochs: 3
lr: 0.0005
fsdp: [full_shard, auto_wrap]
hub_model_id: me/smol
save_steps: 100
save_total_limit: 3
my_own_key: 12
""",
        {
            **{"method": "full", "num_train_epochs": 3, "learning_rate": 5e-4, "save_steps": 100},
            **{"save_total_limit": 3, "gradient_accumulation_steps": 2},
            "datasets": [{"path": "org/qa", "name": "main", "type": "auto"}],
            "hub_model_id": "me/smol",
        },
        {"datasets[0].type", "datasets[0].shards", "my_own_key"},
        num_gpus=2,
    ),
    "factory_lora": Example(
        "llama-factory",
        """
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
""",
        {
            **{"lora.r": 8, "lora.alpha": 16, "lora.target_modules": "all-linear", "max_seq_length": 2048},
            **{"micro_batch_size": 1, "gradient_accumulation_steps": 16, "num_train_epochs": 3, "warmup_steps": 0.1},
            **{"learning_rate": 1e-4, "logging_steps": 10, "save_steps": 500, "dtype": "bfloat16"},
            "datasets": [
                {"path": "data/identity.json", "type": "auto", "alpaca_join": "newline", "split": "train[:1000]"},
                {"path": "data/alpaca_en_demo.json", "type": "auto", "alpaca_join": "newline", "split": "train[:1000]"},
            ],
        },
        {"trust_remote_code"},
        num_gpus=2,
    ),
    "factory_full": Example(
        "llama-factory",
        """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: my_rows
dataset_dir: sets
template: qwen3
cutoff_len: 4096
packing: true
output_dir: saves/qwen3-8b/full
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_steps: 20
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 500
per_device_eval_batch_size: 1
""",
        {
            **{"method": "full", "packing": True, "max_seq_length": 4096, "gradient_accumulation_steps": 16},
            "warmup_steps": 20,
            "datasets": [{"path": "sets/my_rows.json", "type": "auto", "alpaca_join": "newline"}],
        },
        set(),
        num_gpus=8,
    ),
    "factory_qlora": Example(
        "llama-factory",
        """
model_name_or_path: Qwen/Qwen3-14B
quantization_bit: 4
quantization_method: bnb
stage: sft
finetuning_type: lora
lora_target: q_proj,k_proj,v_proj
lora_rank: 64
lora_alpha: 128
lora_dropout: 0.1
use_rslora: true
additional_target: embed_tokens
loraplus_lr_ratio: 16.0
dataset: [notes, mails]
mix_strategy: concat
template: qwen3
cutoff_len: 1024
learning_rate: 5e-5
num_train_epochs: 2
save_strategy: epoch
flash_attn: fa2
neat_packing: true
train_on_prompt: false
""",
        {
            **{"lora.target_modules": ["q_proj", "k_proj", "v_proj"], "lora.r": 64, "lora.alpha": 128},
            **{"lora.dropout": 0.1, "micro_batch_size": 8, "lr_scheduler_type": "linear", "num_train_epochs": 2},
            **{"lora.use_rslora": True, "load_in_4bit": True, "packing": True, "save_steps": "epoch"},
            **{"lora.modules_to_save": ["embed_tokens"], "lora.loraplus_lr_ratio": 16.0},
            "datasets": [
                {"path": "data/notes.json", "type": "auto", "alpaca_join": "newline"},
                {"path": "data/mails.json", "type": "auto", "alpaca_join": "newline"},
            ],
        },
        set(),
    ),
    "trl_lora": Example(
        "trl",
        """
model_name_or_path: Qwen/Qwen3-8B
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
tf32: true
output_dir: data/qwen3-sft
dataset_name: openai/gsm8k
dataset_config: main
dataset_train_split: train[:5000]
dataset_test_split: test
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
dataset_num_proc: 12
max_length: 2048
packing: true
learning_rate: 2.0e-4
gradient_accumulation_steps: 8
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
per_device_train_batch_size: 2
per_device_eval_batch_size: 2
num_train_epochs: 1
logging_steps: 25
eval_strategy: "no"
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: all-linear
push_to_hub: true
""",
        {
            **{"revision": "main", "method": "lora", "lora.r": 32, "lora.alpha": 16, "lora.dropout": 0.05},
            **{"max_seq_length": 2048, "packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 64},
            **{"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            "datasets": [{"path": "openai/gsm8k", "name": "main", "split": "train[:5000]", "as_chat": False}],
            "learning_rate": 2e-4,
        },
        {"push_to_hub"},
        num_gpus=8,
    ),
    "trl_mixture": Example(
        "trl",
        """
model_name_or_path: meta-llama/Llama-3.1-8B
dtype: bfloat16
dataset_mixture:
  datasets:
    - {path: org/chats, name: all, split: train, columns: [messages]}
    - {path: org/code, split: "train[:10%]"}
  test_split_size: 1000
  seed: 0
max_length: 16384
assistant_only_loss: true
use_liger_kernel: true
learning_rate: 4.0e-5
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
max_steps: -1
num_train_epochs: 5
warmup_steps: 100
report_to: [none]
hub_model_id: me/llama
eos_token: <|im_end|>
""",
        {
            **{"max_seq_length": 16384, "train_on_inputs": False, "num_train_epochs": 5, "warmup_steps": 100},
            **{"val_set_size": 1000, "report_to": []},
            "datasets": [
                {"path": "org/chats", "name": "all", "split": "train", "type": "chat"},
                {"path": "org/code", "split": "train[:10%]", "as_chat": False},
            ],
        },
        {"dataset_mixture.seed", "eos_token"},
    ),
    "trl_text": Example(
        "trl",
        """
model_name_or_path: mistralai/Mistral-7B-v0.3
dataset_name: data/articles.parquet
dataset_text_field: body
max_seq_length: 4096
use_peft: true
load_in_4bit: true
use_bnb_nested_quant: true
lora_r: 64
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
lora_modules_to_save: [lm_head]
lora_target_parameters: [7.mlp.experts.gate_up_proj]
lora_task_type: CAUSAL_LM
learning_rate: 1e-4
fp16: true
max_steps: 2000
save_strategy: steps
save_steps: 500
neftune_noise_alpha: 5
""",
        {
            **{"max_seq_length": 4096, "lora.r": 64, "lora.alpha": 32, "dtype": "float16", "max_steps": 2000},
            **{"lora.modules_to_save": ["lm_head"], "neftune_noise_alpha": 5, "load_in_4bit": True},
            "datasets": [{"path": "data/articles.parquet", "type": "text", "columns": {"text": "body"}}],
        },
        {"lora_target_parameters"},
    ),
}
