"""Keys of other trainers in a recipe: each is read, or answered by what there is or by what is not offered.

Story: of 21 keys and values that people paste, 14 were refused without direction, some towards another meaning:
`num_labels` to num_epochs, `vision` to revision. `scripts/convert_fields.py` sweeps every field of three trainers.
"""

from __future__ import annotations

import dataclasses

import peft
import pytest
from transformers.training_args import TrainingArguments

from roundpipe_cli.errors import RecipeError
from roundpipe_cli.recipe import foreign
from roundpipe_cli.recipe.aliases import ALIASES
from roundpipe_cli.recipe.check import NO_SUCH_KEY, known_keys, near_spelling
from roundpipe_cli.recipe.foreign import answer_of, hint_for
from roundpipe_cli.recipe.load import load_text
from roundpipe_cli.recipe.schema import Recipe

SMALLEST = "model: some/model\ndatasets: [{path: rows.jsonl}]\n"


def answer(line: str) -> str:
    """The hint that a recipe with one more line is refused with; empty where the line is read."""
    try:
        load_text(SMALLEST + line + "\n", "mine.yaml")
    except RecipeError as error:
        (problem,) = error.problems
        assert problem.hint is not None, line
        return problem.hint
    return ""


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("num_labels: 2", "not offered: training of a classifier"),
        ("vision: true", "images are not trained"),
        ("mm_projector_lr: 1e-5", "images are not trained"),
        ("reward_funcs: [a.b]", "reinforcement learning"),
        ("kto_desirable_weight: 1.0", "not here, but in TRL"),
        ("teacher_model_name_or_path: a/b", "distillation"),
        ("attn_implementation: flash_attention_2", "attention kernel is chosen"),
        ("zero_optimization: {stage: 3}", "layers are streamed"),
        ("fsdp_offload_params: true", "layers are streamed"),
        ("reduce_bucket_size: 5e8", "layers are streamed"),
        ("pin_memory: true", "memory is planned"),
        ("nvme: true", "memory is planned"),
        ("initial_scale_power: 16", "dtype: float16 scales the loss"),
        # names whose words are of two topics, or of another one
        ("unsloth_cross_entropy_loss: true", "kernels: auto"),
        ("checkpoint_activations: true", "recompute"),
        ("ema_decay: 0.99", "not offered: an average of weights"),
        ("layerwise_lr_decay: 0.9", "one learning_rate for all parameters"),
        ("attention_dropout: 0.1", "not offered: dropout in the base model"),
        ("mask_prompt: true", "train_on_inputs: false"),
        ("num_virtual_tokens: 20", "not offered: other adapters"),
        ("per_gpu_train_batch_size: 4", "write micro_batch_size"),
        ("auto_wrap_policy: size", "nothing is sharded"),
        ("cast_lm_head_to_fp32: true", "float32 already"),
        ("mixed_precision: bf16", "write dtype"),
        ("train_batch_size: 8", "micro_batch_size x gradient_accumulation_steps"),
        ("clip_grad_norm: 1.0", "write max_grad_norm"),
        ("max_steps_per_epoch: 5", "num_train_epochs, or max_steps"),
        ("random_state: 3407", "write seed"),
        ("use_galore: true", "not offered: every step trains all weights"),
        ("rope_scaling: {type: yarn}", "not offered: the model's own positions"),
        ("group_by_length: true", "rows of like length"),
        ("evaluation_strategy: steps", "write eval_steps"),
        ("gptq: true", "not offered"),
        ("lora: {bias: all}", "biases stay frozen"),
        ("lora: {layers_to_transform: [1]}", "adapters go into every layer"),
        ("lora: {task_type: CAUSAL_LM}", "not needed here"),
        ("lora: {init_lora_weights: pissa}", "lora.init takes default and gaussian"),
        ("mode: train", "write method"),
        ("mora: true", "other adapters"),
        ("optim: lion_8bit", "optim"),
        ("lr_scheduler_type: reduce_lr_on_plateau", "lr_scheduler_type"),
        *((f"{key}: {job}", "which TRL does") for key in ("method", "objective", "stage") for job in ("grpo", "ppo")),
        *((f"{key}: kto", "not here, but in TRL") for key in ("method", "objective", "stage", "rl")),
        ("method: dora", "write `method: lora` and `lora: {use_dora: true}`"),
        ("method: dpo", "write `objective: dpo`"),
        ("method: freeze", "name what stays as it is: frozen_parameters"),
        ("optim: adamw_torch_4bit", "the nearest is adamw_8bit"),
        *((f"report_to: {value}", "every step") for value in ("swanlab", "[tensorboard, swanlab]")),
        *((f"{key}: 1", "images are not trained here") for key in ("image_max_pixels", "processor_type", "images")),
        # what to write is right as it stands: it says no more and nothing else than the key
        ("audio_column: a", "nor is sound"),
        ("gptq_disable_exllama: true", "checkpoints in GPTQ are not read"),
        ("prompt_column: q", "columns: {prompt: NAME"),
        ("pretraining_dataset: x", "type: text}]"),
        ("mask_history: true", "write datasets: [{..., turns_to_train: last}]"),
        ("roles_to_train: [user]", "train_on_eos: turn}]"),
        ("dtype: int8", "load_in_8bit"),
        ("method: oft", "adapters are LoRA's"),
        ("objective: hinge", "not offered"),
    ],
)
def test_a_key_or_value_of_another_trainer_is_answered(line: str, part: str) -> None:
    hint = answer(line)
    assert part in hint and "did you mean" not in hint, hint
    assert hint != NO_SUCH_KEY


@pytest.mark.parametrize(
    "key", ["field_instruction", "field_system", "data_files", "num_samples", "formatting", "roles", "shards"]
)
def test_a_key_of_another_trainers_data_set_is_answered(key: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_text(f"model: some/model\ndatasets: [{{path: rows.jsonl, {key}: x}}]\n", "mine.yaml")
    (problem,) = refused.value.problems
    assert problem.hint and problem.hint != NO_SUCH_KEY and "did you mean" not in problem.hint
    assert not key.startswith("field_") or problem.hint.startswith("name the columns")


def test_each_argument_of_transformers_and_peft_has_its_answer() -> None:
    """By name, or by a near spelling of the same word; those of a recipe's own and aliases are read."""
    names = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    names |= {field.name for field in dataclasses.fields(peft.LoraConfig) if field.init}
    keys = known_keys(Recipe)
    asked = sorted(name for name in names if name not in keys and name not in ALIASES)
    assert len(asked) > 90
    for name in asked:
        same = next((f"did you mean {key}?" for key in keys if key.rpartition(".")[2] == name), None)
        hint = answer(f"{name}: other")
        assert hint and hint != NO_SUCH_KEY and (hint == same or "did you mean" not in hint), (name, hint)
        assert load_text(f"{SMALLEST}{name}: null\n", "a.yaml").notices if answer_of(name) else same or hint_for(name)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("learning_rte", "learning_rate"),
        ("steps_eval", "eval_steps"),
        ("maxSeqLength", "max_seq_length"),
        ("gradient_acumulation_step", "gradient_accumulation_steps"),
        ("num_labels", None),
        ("vision", None),
        ("train_epochs", None),
        ("lora_beta", None),
        ("eval_batch", None),
    ],
)
def test_only_another_spelling_of_the_same_words_is_suggested(word: str, near: str | None) -> None:
    """A key that shares its beginning or some of its words is another key."""
    assert near_spelling(word, [*known_keys(Recipe), *ALIASES]) == near


@pytest.mark.parametrize("word", ["rang", "rnak", "ran", "ranks", "r_ank"])
def test_a_slip_in_a_short_word_is_found(word: str) -> None:
    """Story: of `rang`, one letter off, there was no word of `rank`."""
    assert answer(f"lora: {{{word}: 8}}") == "did you mean lora.rank?"
    assert "did you mean" not in answer("mora: true") + answer("lora: {gain: 8}")


def test_a_key_has_one_answer() -> None:
    """No table has a key twice, and none a key that a recipe has or reads; those of rows are a data set's."""
    assert len(foreign._TABLES) == 8
    for kind, table in foreign._TABLES.items():
        words = [word for names in table.values() for word in names.split()]
        assert len(words) == len(set(words)) > 10, kind
        assert kind in foreign.OF_ROWS or not set(words) & set(known_keys(Recipe)), kind
