"""Every key of a recipe, changed from its default, changes what a run is made of; or a test named here holds it.

What a run is made of: its plan, what the data room is asked for, its learning rates, its trained tensors, what an
update makes of them, and the options of its engine. Nothing is trained. That a key's value is right is the part of
another test, which is named here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
import torch
import yaml

from roundpipe_cli.cli.plan import plan_document
from roundpipe_cli.engine.parity import Proof
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.recipe.keys import recipe_keys
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train import build, preference
from roundpipe_cli.train.optim.optimizer import make_optimizer
from roundpipe_cli.train.prepare import setup as preparing
from roundpipe_cli.train.prepare.learning_rate import rate_schedule_of
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.rows import data_settings
from roundpipe_cli.train.prepare.setup import prepare
from tests.support.e2e import REPOSITORY, make_model, make_workspace
from tests.support.tiny import tiny_config


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A recipe with a model of two blocks that says nothing but what it must, as the working directory."""
    base = tmp_path_factory.mktemp("keys")
    tiny = make_model(base / "tiny", num_hidden_layers=2)
    dropped = ("lora", "packing", "micro_batch_size", "gradient_accumulation_steps", "num_train_epochs", "save_steps")
    work = make_workspace(base / "work", tiny, **dict.fromkeys((*dropped, "learning_rate", "max_seq_length")))
    tiny_config("qwen3_moe").save_pretrained(str(work / "experts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setenv("ROUNDPIPE_CACHE", str(base / "cache"))
        patch.setattr(preparing, "prove_once", lambda *_: Proof(0.0, 0.0))  # which takes a second for each recipe
        yield
    for kept in (prepared, plan_of, tensors_of):
        kept.cache_clear()


@cache
def prepared(*overrides: str) -> Setup:
    return prepare(load_recipe("recipe.yaml", overrides), offline=True, tell=lambda event: None)


@cache
def plan_of(*overrides: str) -> Any:
    document = plan_document(make_plan(load_recipe("recipe.yaml", overrides), "2x3090,host_memory_gib=64"), None)
    return {name: value for name, value in document.items() if name != "recipe"}


def data_of(*overrides: str) -> Any:
    loaded = load_recipe("recipe.yaml", overrides)
    found = asdict(data_settings(loaded, True, "datasets"))
    (dataset,) = found.pop("datasets")
    return found | dataset


def rates_of(*overrides: str) -> Any:
    rate = rate_schedule_of(load_recipe("recipe.yaml", overrides).recipe, 12)
    return [rate(number) for number in range(12)]


@cache
def tensors_of(*overrides: str) -> Any:
    """Names and first values of what is trained, and how each module describes itself."""
    setup = prepared(*overrides)
    names = [place.name for layout in setup.store.layouts for place in layout.trainable]
    modules = [(name, str(module), str(vars(module).get("scaling"))) for name, module in setup.model.named_modules()]
    noise = vars(setup.model.get_input_embeddings())  # type: ignore[operator]
    extra = sorted((name, value) for name, value in noise.items() if isinstance(value, float))
    return names, [master.tolist() for master in setup.store.masters], modules, extra


def updates_of(*overrides: str) -> Any:
    """What two updates make of ones, with gradients that differ."""
    setup = prepared(*(words for words in overrides if not words.startswith(OPTIMIZER_KEYS)))
    store = setup.store
    saved = [(tensor, tensor.clone()) for tensor in (*store.masters, *store.gradients)]
    optimizer = make_optimizer(store, load_recipe("recipe.yaml", overrides).recipe, setup.model)
    for number in range(2):
        for master, gradient in zip(store.masters, store.gradients, strict=True):
            if number == 0:
                master.fill_(1.0)
            gradient.copy_(torch.linspace(-1e-3, 2e-3 + number, len(gradient)))
        optimizer.step(1e-2)
    found = [master.tolist() for master in store.masters]
    for tensor, values in saved:
        tensor.copy_(values)
    return found


OPTIMIZER_KEYS = ("optim", "adam_", "sgd_", "weight_decay", "lora.loraplus")


def engine_of(*overrides: str) -> Any:
    """The options and devices of the engine that a run would build."""
    recipe = load_recipe("recipe.yaml", overrides).recipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Engine", lambda *given, options: (vars(options), [vars(one) for one in given[3]]))
        setup = prepared(*(words for words in overrides if words.startswith("kernels")))
        found: Any = build.make_engine(replace(setup, recipe=recipe))
    options, backends = found
    own = {name: value for name, value in backends[0].items() if isinstance(value, int)}
    return options | own | {"fused": str(options["fused"])}


def loss_of(*overrides: str) -> Any:
    """The loss of preference pairs."""
    loss, factor = preference._loss(load_recipe("recipe.yaml", overrides).recipe)
    return {**asdict(loss), "factor": factor}


FULL, DPO, SIMPO, ORPO = "method=full", "objective=dpo", "objective=simpo", "objective=orpo"
IPO = "objective=ipo"

MIN_RATE = ("lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr_rate: 0.1}")
STAGES = ("pipeline.forward_stages=[[0,1]]", "pipeline.backward_stages=[[2,3],[0,1]]")

CHANGED: dict[Any, list[str | tuple[str, ...]]] = {
    plan_of: [
        *("model=Qwen/Qwen3-4B", FULL, DPO, ("lora.expert_r=3", "model=experts"), "load_in_4bit=true"),
        *("load_in_8bit=true", "load_in_fp8=true", "max_seq_length=512", "gradient_accumulation_steps=2"),
        *(("packing=false", "micro_batch_tokens=null"), ("micro_batch_size=2", "micro_batch_tokens=null")),
        *("micro_batch_tokens=4096", "dtype=bfloat16", "deterministic=true", "save_total_limit=5", "weights=mmap"),
        *(("float16_accumulation=true", "dtype=float16"), "pipeline.schedule=gpipe"),
        ("pipeline.forward_stages=[[0,0],[1,1]]", *STAGES),
        ("pipeline.backward_stages=[[2,3],[1,1],[0,0]]", *STAGES),
        ("pipeline.head_workers=2", "pipeline.weight_cache=0", "micro_batch_tokens=2048"),
        ("pipeline.dispatch=earliest_free", "pipeline.weight_cache=0"),
        ("pipeline.sequence_chunks=4", "packing=true", "micro_batch_tokens=null"),
    ],
    loss_of: [
        *(("dpo.beta=0.2", DPO), ("dpo.label_smoothing=0.1", DPO), ("orpo.beta=0.2", ORPO), ("simpo.beta=3", SIMPO)),
        ("ipo.beta=0.2", IPO),
        *((f"kto.{name}=0.5", "objective=kto") for name in ("beta", "desirable_weight", "undesirable_weight")),
        *(("simpo.simpo_gamma=1", SIMPO), ("simpo.label_smoothing=0.1", SIMPO), ("simpo.cpo_alpha=0.5", SIMPO)),
    ],
    tensors_of: [
        *("lora.r=8", "lora.alpha=5", "lora.dropout=0.3", "lora.target_modules=[q_proj]", "lora.init=gaussian"),
        *("lora.modules_to_save=[lm_head]", "lora.use_rslora=true", "lora.use_dora=true", "add_tokens=[<tool>]"),
        *(("frozen_parameters=[embed_tokens]", FULL), ("neftune_noise_alpha=5", FULL), "seed=7"),
    ],
    data_of: [
        *("datasets[].path=other.jsonl", "datasets[].name=configuration", "datasets[].type=text"),
        *("datasets[].split=test", "datasets[].columns={prompt: question}", "datasets[].roles_to_train=[user]"),
        *("datasets[].turns_to_train=last", "datasets[].train_on_eos=all", "datasets[].thoughts=mask"),
        *("datasets[].as_chat=false", "datasets[].alpaca_join=newline", "datasets[].txt_rows=line"),
        "datasets[].encoding=cp1252",
        *("shuffle=false", "train_on_inputs=true", "long_rows=drop", ("long_rows_overlap=8", "long_rows=split")),
        *("on_bad_row=skip", "chat_template=chatml", "chat_template_kwargs={enable_thinking: false}"),
    ],
    rates_of: [
        *("learning_rate=1e-3", "lr_scheduler_type=linear", "warmup_steps=5"),
        ("lr_scheduler_kwargs={min_lr_rate: 0.2}", *MIN_RATE),
    ],
    updates_of: [
        *("lora.loraplus_lr_ratio=4", "optim=adafactor", "adam_beta1=0.5", "adam_beta2=0.9", "adam_epsilon=1e-3"),
        *(("sgd_momentum=0.9", "optim=sgd"), "weight_decay=0.1"),
    ],
    engine_of: [
        *("label_smoothing_factor=0.1", "head_chunk_tokens=64", "kernels=reference", "mlp_chunk_tokens=64"),
        *("watchdog_s=5", "pipeline.threads_per_worker=3", "pipeline.recompute=layer", "pipeline.keep_activations=1"),
        *("pipeline.weight_cache=1000", "pipeline.skip_last_projection=false"),
    ],
}
"""What is observed -> the changed keys, each with keys that it needs."""

CASES = [
    (observe, *([words] if isinstance(words, str) else words))
    for observe, changed in CHANGED.items()
    for words in changed
]

DISTILLED = "train/test_distillation.py::test_loss_and_gradients_are_those_of_full_logits"
HELD = {
    "load_in_16bit": "train/test_published_forms.py::test_a_run_is_that_of_the_unpacked_weights",
    "revision": "cli/test_download.py::test_a_run_records_its_commit_and_keeps_to_it",
    "orpo.nll_on_prompt": "train/test_preference.py::test_a_run_without_a_reference_model",
    "distill.teacher": "train/test_distillation.py::test_a_resume_takes_scores_elsewhere_and_refuses_others",
    **dict.fromkeys(("distill.weight", "distill.temperature"), DISTILLED),
    "lora.start_from": "train/test_training_options.py::test_an_adapter_is_trained_further",
    "max_steps": "planning/test_plan_cli.py::test_time_to_finish_counts_rows_or_steps",
    "num_train_epochs": "planning/test_plan_cli.py::test_time_to_finish_counts_rows_or_steps",
    "datasets[].weight": "data/test_data_batching.py::test_mixing_by_hand",
    "val_set_size": "train/test_evaluate.py::test_rows_are_held_out_or_trained_never_both",
    "lr_above_peak": "train/test_training_options.py::test_a_rate_above_the_peak_can_be_asked_for",
    "max_grad_norm": "train/test_training_options.py::test_equal_to_the_libraries",
    "output_dir": "train/test_finetune_result.py::test_a_run_leaves_the_documented_files",
    "eval_steps": "train/test_evaluate.py::test_intervals_by_steps_by_shares_and_by_epochs",
    "eval_samples": "train/test_evaluate.py::test_samples_are_the_greedy_answers_of_generate",
    "eval_max_new_tokens": "train/test_evaluate.py::test_samples_are_the_greedy_answers_of_generate",
    "load_best_model_at_end": "train/test_evaluate.py::test_the_best_weights_are_the_result",
    "early_stopping_patience": "train/test_evaluate.py::test_patience_counts_evaluations_since_the_best",
    "save_steps": "train/test_finetune_result.py::test_a_run_leaves_the_documented_files",
    "logging_steps": "train/test_finetune_output.py::test_steps_go_to_stdout_and_words_to_stderr",
    "report_to": "train/test_finetune_output.py::test_tensorboard_has_the_metrics_of_every_step",
    "hub_model_id": "test_release.py::test_a_finished_run_is_uploaded_where_its_recipe_says_so",
    "resume_from_checkpoint": "train/test_finetune_resume.py::test_a_named_checkpoint_of_another_run",
    "on_oom": "train/test_adapt.py::test_by_recomputing_layer_by_layer_then_by_dividing_the_microbatches",
    "on_device_loss": "train/test_lost_devices.py::test_what_cannot_go_on_ends_with_exit_code_5",
    "check_longest_rows": "train/test_adapt.py::test_a_run_is_the_same_to_the_bit",
    "on_nonfinite": "train/test_adapt.py::test_skipped_steps_change_no_weight_and_are_counted",
    "hardware": "planning/test_plan_cli.py::test_the_recipe_names_the_machine_that_is_planned_for",
    "pipeline.devices": "engine/test_simulated_device.py::test_what_is_said_of_a_card",
    "nodes.shard_optimizer": "train/test_nodes.py::test_a_shared_out_optimizer_gives_the_same_bits",
}
"""Key -> the test of what it does in a run."""
RIGHT = {
    "train/test_training_options.py::test_equal_to_the_libraries": "model method label_smoothing_factor "
    "frozen_parameters optim adam_beta1 adam_beta2 adam_epsilon sgd_momentum weight_decay lora.target_modules "
    "lora.modules_to_save lora.use_rslora lora.use_dora lora.loraplus_lr_ratio lora.r lora.alpha",
    "train/test_training_options.py::test_rates_are_those_of_the_formulas": "learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps",
    "train/test_training_options.py::test_how_an_adapter_starts": "lora.init",
    "train/test_preference.py::test_loss_and_gradients_are_those_of_the_papers_equations": "objective dpo.beta "
    "ipo.beta dpo.label_smoothing orpo.beta simpo.beta simpo.simpo_gamma simpo.label_smoothing simpo.cpo_alpha "
    "kto.beta kto.desirable_weight kto.undesirable_weight",
    "train/test_finetune_result.py::test_one_rule_adapts_experts_and_never_a_router": "lora.expert_r",
    "engine/test_parity.py::test_a_step_agrees_with_dropout": "lora.dropout",
    "engine/test_parity.py::test_a_step_agrees_with_plain_pytorch": "kernels",
    "engine/test_parity.py::test_a_step_agrees_with_logits_of_one_token_at_a_time": "head_chunk_tokens",
    "model/test_dropout.py::test_distributions": "neftune_noise_alpha",
    "train/test_new_tokens.py::test_loss_and_gradients_are_those_of_the_libraries": "add_tokens",
    "model/test_packed_weights.py::test_packing_is_that_of_bitsandbytes": "load_in_4bit load_in_8bit",
    "model/test_packed_weights.py::test_codes_are_the_nearest_and_scales_those_of_the_rows": "load_in_fp8",
    "train/test_optimizer.py::test_sixteen_bit_weights_are_the_rounded_masters": "dtype",
    "data/test_data_batching.py::test_order_is_fixed_for_ever": "seed shuffle",
    "data/test_packing.py::test_packed_and_unpacked_steps_are_equal_through_the_engine": "packing",
    "train/test_row_groups.py::test_any_microbatches_keep_rows_and_loss": "micro_batch_size "
    "gradient_accumulation_steps micro_batch_tokens",
    "data/test_data_dataset.py::test_long_rows": "max_seq_length long_rows",
    "data/test_data_dataset.py::test_split_texts_lose_nothing": "long_rows_overlap",
    "data/test_data_dataset.py::test_plain_layout_without_a_template": "train_on_inputs",
    "data/test_data_dataset.py::test_bad_rows_are_named_by_line_field_and_expectation": "on_bad_row",
    "data/test_data_dataset.py::test_variables_of_the_template": "chat_template_kwargs",
    "data/test_data_golden.py::test_tokens_and_labels_are_the_golden_ones": "chat_template datasets[].path",
    "data/test_data_dataset.py::test_a_named_type_needs_no_notice_and_is_believed": "datasets[].type",
    "data/test_data_sources.py::test_a_folder_has_the_splits_that_its_names_say": "datasets[].name datasets[].split",
    "data/test_data_columns.py::test_columns_of_the_recipe_are_used": "datasets[].columns",
    "data/test_data_rules.py::test_what_is_trained_of_a_row": "datasets[].roles_to_train datasets[].turns_to_train "
    "datasets[].train_on_eos datasets[].thoughts datasets[].as_chat datasets[].alpaca_join",
    "data/test_data_rules.py::test_rows_of_a_text_file": "datasets[].txt_rows",
    "data/test_data_sources.py::test_a_text_in_any_encoding_is_read_as_it_was_written": "datasets[].encoding",
    "train/test_checkpoint_store.py::test_retention_is_by_step_whatever_the_clock_says": "save_total_limit",
    "engine/test_host_pages.py::test_a_run_on_mapped_weights_gives_the_same_numbers": "weights",
    "engine/test_simulated_device.py::test_torch_adds_up_in_order_only_where_a_recipe_says_so": "deterministic",
    "engine/test_simulated_device.py::test_changes_of_torch": "float16_accumulation",
    "model/test_unread_products.py::test_chunks_agree_with_plain_pytorch": "mlp_chunk_tokens",
    "model/test_unread_products.py::test_it_is_left_out": "pipeline.skip_last_projection",
    "engine/test_engine_failure.py::test_a_hang_is_ended_by_the_watchdog": "watchdog_s",
    "schedule/test_schedule_builders.py::test_grids": "pipeline.schedule pipeline.forward_stages "
    "pipeline.backward_stages",
    "schedule/test_schedule_builders.py::test_the_heads_microbatches_spread_over_the_workers": "pipeline.head_workers",
    "schedule/test_schedule_builders.py::test_earliest_free_dispatch_takes_microbatches_where_they_can_start_first": ""
    "pipeline.dispatch",
    "engine/test_sequence_chunks.py::test_gradients_are_those_of_the_whole_sequence": "pipeline.sequence_chunks",
    "engine/test_engine_bits.py::test_rounds_and_recompute": "pipeline.recompute",
    "schedule/test_simulate.py::test_recompute_without_the_last_projection_and_kept_activations": ""
    "pipeline.keep_activations",
    "engine/test_weight_cache.py::test_uploads_fall_to_what_does_not_fit": "pipeline.weight_cache",
}
"""The test that compares values with a library, a sum made by hand or a golden file -> their keys."""
UNCOMPARED = {"pipeline.threads_per_worker"}
"""Changed keys without such a test: torch's own threads compute, with other last bits."""
OTHER_NAMES = {
    **{"label_smoothing_factor": "label_smoothing", "simpo.cpo_alpha": "factor"},
    **{"pipeline.threads_per_worker": "_num_threads", "pipeline.keep_activations": "keep_blocks"},
    "pipeline.weight_cache": "weight_cache_bytes",
}
"""Key -> the setting of loss, data or engine that it is given as; the others keep their names."""
CHOOSES_MODULES = {"kernels", "mlp_chunk_tokens", "pipeline.skip_last_projection"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
def test_a_changed_key_changes_what_a_run_is_made_of(case: tuple[Any, ...]) -> None:
    """Of loss, data and engine it changes one setting, to its own value."""
    observe, changed, *base = case
    key, _, value = changed.partition("=")
    name = key.rpartition(".")[2]
    if key.startswith("datasets[]."):
        changed = f"datasets=[{{{'' if name == 'path' else 'path: rows.jsonl, '}{name}: {value}}}]"
    before, after = observe(*base), observe(*base, changed)
    assert before != after
    if observe in (loss_of, data_of, engine_of) and key not in CHOOSES_MODULES:
        (found,) = ((name, after[name]) for name in after if after[name] != before[name])
        wanted = yaml.safe_load(value)
        assert found == (OTHER_NAMES.get(key, name), tuple(wanted) if isinstance(wanted, list) else wanted)


def test_every_key_is_changed_or_held_by_a_named_test() -> None:
    sections = {name.rpartition(".")[0] for name in (key.name for key in recipe_keys())} | {"datasets", "eval_datasets"}
    keys = {key.name for key in recipe_keys()} - sections - {"orpo", "simpo", "ipo", "dpo", "nodes"}
    keys = {key.removeprefix("eval_") if key.startswith("eval_datasets") else key for key in keys}
    changed = {case[1].partition("=")[0] for case in CASES}
    assert not changed & HELD.keys() and {*changed, *HELD} == keys
    right = [(key, place) for place, words in RIGHT.items() for key in words.split()]
    assert sorted([*UNCOMPARED, *(key for key, _ in right)]) == sorted(changed)
    for key, place in (*HELD.items(), *right):
        file, _, name = place.partition("::")
        text = (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text and key.rpartition(".")[2] in text, place


def test_values_that_stand_for_another_setting() -> None:
    assert engine_of("watchdog_s=0")["watchdog_s"] is None
    for word in ("pipeline.recompute=none", "pipeline.keep_activations=9"):
        assert engine_of(word)["keep_blocks"] == 2
