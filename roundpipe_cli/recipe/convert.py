"""From a training file of axolotl, LLaMA-Factory, TRL or Unsloth to a recipe, and a list of what has no counterpart.

Every key ends in exactly one of three lists: it is in the recipe, it changes nothing here, or it is left out with a
reason. Where training itself becomes another, the recipe's first line says so; where the file is for another job, it
is refused. The recipe always passes every check: values that would not are left out. Missing keys get the
other tool's default. A peer's step has micro batch x accumulation x GPUs rows; a step here does not depend on the
number of GPUs, so the accumulation is multiplied by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.recipe.aliases import ALIASES, Writes, is_off
from roundpipe_cli.recipe.check import known_keys
from roundpipe_cli.recipe.convert_data import (
    Entry,
    axolotl_datasets,
    axolotl_texts,
    factory_datasets,
    trl_datasets,
    trl_eval_datasets,
)
from roundpipe_cli.recipe.convert_rules import (
    JOB_DEFAULTS,
    OBJECTIVE_KEY,
    RULES,
    Job,
    RecipeWrites,
    is_pairs,
    job_of,
    loss_writes,
    reads_loss_key,
    with_objective,
)
from roundpipe_cli.recipe.convert_tables import (
    ADAPTER_DEFAULTS,
    CHANGES,
    DEFAULTS,
    NO_COUNTERPART,
    PEFT_TARGETS,
    REQUIRED,
    SHARING_KEYS,
    SIGNS,
    TOOLS,
    UNKNOWN,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_PREFIXES,
    Conversion,
    LeaveOutError,
    Partly,
    Tool,
    from_unsloth,
    is_unsloth,
    short,
)
from roundpipe_cli.recipe.load import load_text, values_as_yaml
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.strict_yaml import MAX_BYTES, parse_bytes, shown_value

# Refuses files of other tools for a job that no recipe does: a recipe of such a file would train another model.
# Settings that only change the way there are converted, and named in the first line (`convert_tables.CHANGES`).

_MULTIMODAL = "training on images, video or sound"
_PREFERENCES = "training on preferences"
_REINFORCEMENT = "reinforcement learning"
_REWARD = "training of a reward model"
_CLASSIFIER = "training of a classifier"
_DISTILLATION = "distillation from a teacher"
_PART = "training of a part of the weights"
_EVALUATION = "evaluation or prediction"

_KEYS_OF_JOBS = {
    _PREFERENCES: "pref_loss pref_beta pref_ftx beta orpo_alpha cpo_alpha simpo_gamma rl_beta ref_model rpo_alpha "
    "desirable_weight undesirable_weight precompute_ref_log_probs f_divergence_type",
    _REINFORCEMENT: "reward_funcs num_generations trl ebft use_vllm max_completion_length scale_rewards "
    "reward_weights vllm generation_batch_size",
    _REWARD: "reward_model process_reward_model center_rewards_coefficient",
    _DISTILLATION: "teacher_model_name_or_path teacher_model kd_trainer",
    _PART: "lisa_n_layers lisa_step_interval use_llama_pro",
    "ReLoRA: adapters that are merged and begun again": "relora relora_steps",
    "turning a model into a mixture of depths": "mixture_of_depths",
    "training of a model with repeated layers": "peft_layer_replication",
    "training from random weights": "train_from_scratch reinit_weights",
    "training of a diffusion model": "diffusion",
    "training for a quantised model": "qat",
    "training of a model in 1 bit": "use_onebitllms",
    "training of a sparse model": "llmcompressor",
    "training on positions that are skipped (PoSE)": "use_pose",
    _CLASSIFIER: "num_labels",
    "merging or exporting a model": "export_dir export_quantization_bit export_hub_model_id merge_lora",
    _EVALUATION: "task_dir n_shot",
}
"""Jobs that no recipe does -> keys: the file is refused where one is set, unless its own job does not read it."""

_HINT = "DPO (loss sigmoid), ORPO and SimPO are converted; a file of TRL that does not say so: --objective dpo"
_BY_PREFIX = {"kd_": _DISTILLATION, "ppo_": _REINFORCEMENT, "kto_": _PREFERENCES, "dpo_": _PREFERENCES}

_MULTIMODAL_KEYS = (
    *("processor_type", "processor_kwargs", "is_multimodal", "image_size", "image_resize_algorithm"),
    *("image_max_pixels", "image_min_pixels", "image_resolution", "image_do_pan_and_scan", "crop_to_patches"),
    *("video_max_pixels", "video_min_pixels", "video_resolution", "video_fps", "video_maxlen"),
    *("audio_sampling_rate", "use_audio_in_video", "freeze_vision_tower", "freeze_multi_modal_projector"),
    *("freeze_language_model", "freeze_mm_modules", "train_mm_proj_only"),
)
"""Keys that only a model of images, video or sound has: refused whatever their value."""

_STAGES = {"rm": _REWARD, "ppo": _REINFORCEMENT, "dpo": _PREFERENCES, "kto": _PREFERENCES}
_PREFERENCE_KINDS = ("dpo", "ipo", "orpo", "simpo", "kto", "cpo")
_METHODS = {"freeze": _PART, "oft": "orthogonal fine-tuning (OFT)"}
_PLUGINS = {
    **{"spectrum": _PART, "kd": _DISTILLATION, "diffusion": "training of a diffusion model"},
    **{"llm_compressor": "training of a sparse model", "mora": "MoRA adapters", "nemo_gym": _REINFORCEMENT},
}
"""Folders of axolotl's integrations."""

_MODEL_CLASSES = (
    (r"Classification|QuestionAnswering|MultipleChoice", _CLASSIFIER),
    (r"ConditionalGeneration|ImageTextToText|Vision2Seq|Speech|Waveform|Llava|Mllama|Multimodal", _MULTIMODAL),
    (r"Seq2Seq|MaskedLM", "training of a model that is no decoder"),
)
"""Patterns of `model_type`, axolotl's name of the model's class."""

_MULTIMODAL_NAME = re.compile(
    r"(?:^|[-_./\d])(?:vl|vlm|vla|vision|llava|bakllava|pixtral|intern_?vl|smol_?vlm|paligemma\d?|omni|audio|voxtral"
    r"|whisper|tts|ocr|idefics|blip|florence|mllama|minicpm[-_]?[vo]|stable-diffusion|sdxl|flux|\dv)(?:[-_.\d]|$)",
    re.IGNORECASE,
)
"""Names of models and of LLaMA-Factory's templates that see or hear."""


def refuse_other_jobs(data: Mapping[str, Any], tool: Tool, name: str) -> Job:
    """The job of the file.

    Raises:
        RefusedError: no recipe does it.
    """
    for job, found in _other_jobs(data, tool):
        raise RefusedError(
            f"this file asks for another job than a recipe does: {job}",
            where=name,
            found=found,
            expected="fine-tuning, pretraining, DPO, ORPO or SimPO of a text model, of all its weights or by LoRA",
            hint=_HINT if job == _PREFERENCES else None,
        )
    known = job_of(data, tool)
    assert known is not None, "every other job has been named"
    return known


def _other_jobs(data: Mapping[str, Any], tool: Tool) -> Iterator[tuple[str, str]]:
    """(job, its line) of everything that no recipe does."""
    yield from _by_values(data, tool)
    known = job_of(data, tool)
    for job, keys in _KEYS_OF_JOBS.items():
        for key in keys.split():
            if not is_off(data.get(key)) and not (known and reads_loss_key(key, known, tool)):
                yield job, _line(key, data[key])
    for start, job in _BY_PREFIX.items():
        for key, value in data.items():
            if key.startswith(start) and not is_off(value) and not (known and reads_loss_key(key, known, tool)):
                yield job, _line(key, value)
    yield from _without_training(data, tool)
    for key in _MULTIMODAL_KEYS:
        if data.get(key) is not None:
            yield _MULTIMODAL, _line(key, data[key])
    yield from _by_names(data)


def _by_values(data: Mapping[str, Any], tool: Tool) -> Iterator[tuple[str, str]]:
    known = job_of(data, tool)
    if not is_off(data.get("rl")) and known is None:
        is_pairs = str(data["rl"]).lower() in _PREFERENCE_KINDS
        yield _PREFERENCES if is_pairs else _REINFORCEMENT, _line("rl", data["rl"])
    stage, method = data.get("stage"), data.get("finetuning_type")
    if stage is not None and known is None:
        key = "pref_loss" if stage == "dpo" else "stage"
        yield _STAGES.get(str(stage), "an unknown stage"), _line(key, data[key])
    if method not in (None, "lora", "full"):
        yield _METHODS.get(str(method), "an unknown method"), _line("finetuning_type", method)
    if tool == "axolotl" and data.get("adapter") not in (None, "", "none", False, "lora", "qlora"):
        yield "another kind of adapter than LoRA", _line("adapter", data["adapter"])
    if data.get("lora_task_type") not in (None, "CAUSAL_LM"):
        yield _CLASSIFIER, _line("lora_task_type", data["lora_task_type"])
    if tool == "trl" and known == "sft" and not is_off(data.get("label_smoothing")):
        yield _PREFERENCES, _line("label_smoothing", data["label_smoothing"])  # of SFT it is label_smoothing_factor
    if tool == "trl" and known is None:
        yield _PREFERENCES, _line("loss_type", data["loss_type"])
    plugins = data.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else []:
        yield from ((_PLUGINS[part], _line("plugins", plugin)) for part in str(plugin).split(".") if part in _PLUGINS)


def _by_names(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for pattern, job in _MODEL_CLASSES:
        if re.search(pattern, str(data.get("model_type") or "")):
            yield job, _line("model_type", data["model_type"])
    for key in ("base_model", "model_name_or_path", "template", "chat_template"):
        value = data.get(key)
        if isinstance(value, str) and _MULTIMODAL_NAME.search(value.rstrip("/").rpartition("/")[2]):
            yield _MULTIMODAL, _line(key, value)


def _without_training(data: Mapping[str, Any], tool: Tool) -> Iterator[tuple[str, str]]:
    """Files that train nothing: LLaMA-Factory's for inference, evaluation and prediction."""
    does_train = data.get("do_train")
    other = next((key for key in ("do_predict", "do_eval", "predict_with_generate") if data.get(key) is True), None)
    if does_train is False:
        yield _EVALUATION if other else "no training", _line("do_train", False)
    if does_train is None and other is not None and tool == "llama-factory":
        yield _EVALUATION, f"{_line(other, True)}, and no do_train: true"
    if tool == "llama-factory" and is_off(data.get("dataset")):
        found = "no dataset, stage and do_train" if does_train is None else "no dataset"
        yield "inference, a chat or an API", found


def _line(key: str, value: Any) -> str:
    return f"{key}: {shown_value(value)}"


def convert_file(
    raw: bytes, name: str, *, tool: Tool | None = None, num_gpus: int = 1, objective: Job | None = None
) -> Conversion:
    """The recipe that does what the file `name` asks of another tool.

    Args:
        tool: whose file it is; None finds out by its keys.
        objective: of a TRL file, which need not say for which of TRL's trainers it is; None finds out by its keys.
        num_gpus: on how many GPUs the file was run: the rows of a step there are multiplied by it.

    Raises:
        RefusedError: not YAML, not a file of a known tool, for a job that no recipe does, or without rows.
    """
    data = _as_yaml_1_1(cast("dict[str, Any]", parse_bytes(raw[: MAX_BYTES + 1], name).data))
    from_sections: Conversion | None = None
    if tool is None and is_unsloth(data):
        tool, from_sections = "trl", Conversion("trl")
        data = from_unsloth(data, from_sections)
    tool = tool or _tool_of(data, name)
    if objective is not None:
        data = with_objective(data, tool, objective, name)
    job = refuse_other_jobs(data, tool, name)
    result = from_sections or Conversion(tool)
    is_lora: bool = {
        "axolotl": data.get("adapter") in ("lora", "qlora"),
        "llama-factory": data.get("finetuning_type") in (None, "lora"),
        "trl": data.get("use_peft") is True,
    }[tool]
    defaults = {**DEFAULTS[tool], **JOB_DEFAULTS[tool].get(job, {}), **(ADAPTER_DEFAULTS[tool] if is_lora else {})}
    if is_lora and tool == "llama-factory":
        rank = data.get("lora_rank") or defaults["lora_rank"]
        defaults["lora_alpha"] = 2 * rank if isinstance(rank, int) else 2 * defaults["lora_rank"]
    writes = RecipeWrites(result)
    if tool == "trl" and "dataset_test_split" in data and not trl_eval_datasets(data):
        result.without_effect.append("dataset_test_split")
    _refuse_second_model(job, is_lora, name)
    datasets, eval_datasets = _datasets(data, tool, name, result)
    if from_sections is not None:  # Unsloth puts rows of every form into the chat template
        for entry in datasets:
            entry.pop("as_chat", None)
    if tool == "llama-factory" and job == "sft" and data.get("mask_history") is True:
        for entry in (*datasets, *eval_datasets):
            entry["turns_to_train"] = "last"
    for key, value in data.items():
        if key not in _DATASET_KEYS[tool] and key != OBJECTIVE_KEY:
            _convert_key(key, value, data, writes)
    _convert_mixture(data, writes)
    if is_pairs(job):
        writes.values.setdefault("objective", job)
    if eval_datasets:
        writes.put("eval_datasets", eval_datasets, "eval_datasets", eval_datasets)
    if tool == "trl" and data.get("max_length", 0) is None:
        writes.refuse("max_seq_length", "max_length", None, "rows have a largest length here")
    method = "lora" if is_lora else "full"
    writes.values.setdefault("method", method)
    _accepted(writes, datasets)  # before anything counts with the values
    writes.values["method"] = method
    if not is_lora:
        writes.drop("lora", "every weight is trained")
    _keep_long_texts(data, job, datasets, writes)
    for key, value in defaults.items():
        writes.default(key, value)
    _multiply(data, writes, num_gpus)
    _say_defaults(data, writes)
    _say_prompts(writes, datasets)
    result.recipe = _accepted(writes, datasets)
    return result


def _refuse_second_model(job: Job, is_lora: bool, name: str) -> None:
    if job == "dpo" and not is_lora:
        raise RefusedError(
            "DPO of all weights needs a second model as the reference, which is not offered",
            where=name,
            found="no adapter",
            expected="DPO by LoRA, whose reference is the base model; or ORPO or SimPO, which need no reference",
            hint="train an adapter (LoRA), or choose ORPO or SimPO in the file",
        )


def _keep_long_texts(data: dict[str, Any], job: Job, datasets: list[Entry], writes: RecipeWrites) -> None:
    """Tools that cut long texts into sequences lose nothing of them: axolotl, and LLaMA-Factory where it packs."""
    cuts = writes.result.tool == "axolotl" or (job == "pretraining" and data.get("packing") in (None, True))
    if cuts and all(entry.get("type") == "text" for entry in datasets):
        writes.values["long_rows"] = "split"
        if not is_off(data.get("excess_length_strategy")):
            writes.result.notes.append("axolotl cuts texts into sequences, whatever excess_length_strategy says.")
    if job == "pretraining" and writes.result.tool == "llama-factory" and data.get("packing") is None and cuts:
        writes.result.change("packing", "documents do not see each other; LLaMA-Factory's do")


def _as_yaml_1_1(data: dict[str, Any]) -> dict[str, Any]:
    """The values as PyYAML gives them to the other tools: `yes` and `off` are booleans there, `4_096` a number."""
    words = {"yes": True, "on": True, "no": False, "off": False}

    def read(value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(r"\d[\d_]{,99}", value):
            return int(value.replace("_", ""))
        return words.get(value.lower(), value) if isinstance(value, str) else value

    return {key: read(value) for key, value in data.items()}


def _tool_of(data: dict[str, Any], name: str) -> Tool:
    counts = {tool: sum(key in data for key in SIGNS[tool]) for tool in TOOLS}
    best = max(counts, key=lambda tool: counts[tool])
    needed = "base_model" if best == "axolotl" else "model_name_or_path"
    if not counts[best] or needed not in data:
        hint = "a recipe needs no conversion: roundpipe recipes validate FILE" if "model" in data else None
        if "train_dataset" in data or "model_class" in data:
            hint = "LLaMA-Factory's newer form (v1: model, train_dataset) is not read"
        raise RefusedError(
            "this is no training file of axolotl, LLaMA-Factory, TRL or Unsloth",
            where=name,
            found=", ".join(list(data)[:8]),
            expected="base_model, or model_name_or_path with dataset, dataset_name or template",
            hint=hint,
        )
    return best


_DATASET_KEYS: dict[str, frozenset[str]] = {
    "axolotl": frozenset({"datasets", "test_datasets", "pretraining_dataset"}),
    "llama-factory": frozenset({"dataset", "dataset_dir", "max_samples", "eval_dataset", "mask_history"}),
    "trl": frozenset(
        {"dataset_name", "dataset_config", "dataset_train_split", "dataset_mixture", "dataset_text_field"}
        | {"dataset_test_split"}
    ),
}
_TOP_KEYS = frozenset(key for key in known_keys(Recipe) if "." not in key and key != "datasets")


def _datasets(data: dict[str, Any], tool: Tool, name: str, result: Conversion) -> tuple[list[Entry], list[Entry]]:
    """The recipe's `datasets` and `eval_datasets`."""
    job = job_of(data, tool)
    if tool == "axolotl":
        datasets, eval_datasets = (
            axolotl_datasets(data.get(key) or [], key, name, result, pairs=is_pairs(job))
            for key in ("datasets", "test_datasets")
        )
        if job == "pretraining":
            datasets = axolotl_texts(data["pretraining_dataset"], name, result)
    elif tool == "llama-factory":
        datasets = factory_datasets(data, "dataset", name, result)
        eval_datasets = factory_datasets(data, "eval_dataset", name, result)
    else:
        datasets, eval_datasets = trl_datasets(data, name, result), trl_eval_datasets(data)
        if is_pairs(job):
            for entry in (*datasets, *eval_datasets):
                entry["type"] = "preference"
    if not datasets:
        wanted = {"axolotl": "datasets", "llama-factory": "dataset", "trl": "dataset_name or dataset_mixture"}[tool]
        raise RefusedError(
            "this file names no rows to train on",
            where=name,
            found=f"no {wanted}",
            expected=wanted,
            hint=f"add {wanted.split()[0]} to the file",
        )
    return datasets, eval_datasets


def _convert_key(key: str, value: Any, data: dict[str, Any], writes: RecipeWrites) -> None:
    """One line of the file into one of the three lists."""
    result = writes.result
    off, job = is_off(value), job_of(data, result.tool)
    assert job is not None, "refuse_other_jobs comes first"
    if key == "stage" and job == "pretraining":
        result.notes.append("stage: pt: rows are texts, trained whole.")
    elif reads_loss_key(key, job, result.tool):
        _write(lambda: loss_writes(key, value, data, job), key, value, writes)
    elif key in RULES and value is not None:
        _write(lambda: RULES[key](value, data), key, value, writes)
    elif key in ("micro_batch_size", "gradient_accumulation_steps"):
        writes.put(key, value, key, value)
    elif key in WITHOUT_EFFECT:
        result.without_effect.append(key)
    elif key in CHANGES or key in NO_COUNTERPART:
        if off:
            result.without_effect.append(key)
        else:
            result.leave_out(key, value, NO_COUNTERPART.get(key, "no counterpart here"), change=CHANGES.get(key))
    elif key in ALIASES and not (off and key not in ("adapter", "use_peft")):
        _write(lambda: ALIASES[key](value), key, value, writes)
    elif key in _TOP_KEYS and not (off and value is not False):
        writes.put(key, value, key, value)
    elif off or key.startswith(WITHOUT_EFFECT_PREFIXES):
        result.without_effect.append(key)
    else:
        result.leave_out(key, value, "no counterpart here", change=UNKNOWN)


def _write(meaning: Callable[[], Writes], key: str, value: Any, writes: RecipeWrites) -> None:
    """Keys and values that a rule or an alias makes of a line."""
    result = writes.result
    try:
        targets = meaning()
    except ValueError as error:
        change = error.change if isinstance(error, LeaveOutError) else f"not {short(value)}"
        result.leave_out(key, value, str(error), change=change)
        return
    if isinstance(targets, Partly):
        result.change(key, targets.change)
    if not targets:
        result.without_effect.append(key)
    for target, meant in targets.items():
        if target == "datasets":  # its tool reads others
            result.leave_out(key, value, "no counterpart here", change=UNKNOWN)
        else:
            writes.put(target, meant, key, value)


def _convert_mixture(data: dict[str, Any], writes: RecipeWrites) -> None:
    """The settings beside the datasets of TRL's `dataset_mixture`."""
    mixture = data.get("dataset_mixture")
    if not isinstance(mixture, dict):
        return
    for key, value in mixture.items():
        name = f"dataset_mixture.{key}"
        if key == "test_split_size" and not is_off(value):
            writes.put("val_set_size", value, name, value)
        elif key == "streaming":
            writes.result.without_effect.append(name)
        elif key != "datasets" and not is_off(value):
            writes.result.leave_out(name, value, "one seed, the recipe's, is for everything")


def _multiply(data: dict[str, Any], writes: RecipeWrites, num_gpus: int) -> None:
    micro = int(writes.values.get("micro_batch_size", 1))
    steps = int(writes.values.get("gradient_accumulation_steps", 1))
    gpus = f"{num_gpus} GPUs" if num_gpus > 1 else "one GPU"
    sharing = math.prod(data[key] for key in SHARING_KEYS if type(data.get(key)) is int and data[key] > 0)
    if num_gpus > 1 and sharing > 1:
        gpus += f" / {sharing} that share their rows"
        num_gpus = max(1, num_gpus // sharing)
    writes.values["gradient_accumulation_steps"] = steps * num_gpus
    made = f"micro batch {micro} x accumulation {steps} x {gpus}; here the number of GPUs does not multiply it."
    writes.result.notes.append(f"A step has {micro * steps * num_gpus} rows: {made}")
    if steps * num_gpus < 4:
        note = "Several GPUs need more microbatches a step to be busy: gradient_accumulation_steps."
        writes.result.notes.append(note)


def _say_defaults(data: dict[str, Any], writes: RecipeWrites) -> None:
    """Notes about keys that the file does not have."""
    result, tool = writes.result, writes.result.tool
    if writes.defaults:
        shown = ", ".join(f"{target} {short(value)}" for target, value in writes.defaults.items())
        result.notes.append(f"The file does not say, and {tool}'s default is: {shown}.")
    if writes.defaults.get("lora.target_modules") == list(PEFT_TARGETS):
        result.notes.append("PEFT adapts q_proj and v_proj in most models, other modules in some: check the model's.")
    for target in REQUIRED[tool]:
        is_used = writes.values["method"] == "lora" or not target.startswith("lora.")
        if is_used and target not in writes.values and target not in writes.refused:
            result.change(target, f"the file has none, and {tool} has no default: this program's own is used")
    for key in ("template", "chat_template"):
        template = data.get(key)
        if key in result.without_effect and isinstance(template, str) and not template.startswith("tokenizer_default"):
            note = "is the model's own, which its tokenizer has; system texts may differ: `roundpipe data` shows rows."
            result.notes.append(f"The template {template} {note}")
    if tool == "llama-factory" and "do_train" not in data:
        result.notes.append("The file has no do_train: true, without which LLaMA-Factory trains nothing.")


def _say_prompts(writes: RecipeWrites, datasets: list[Entry]) -> None:
    """TRL trains the whole of a chat unless it is told otherwise, but only the completion of a prompt, or of a pair."""
    is_said = writes.values.get("objective") is not None or "train_on_inputs" in writes.values
    is_chat = any(entry.get("type") not in ("text", "prompt_completion") for entry in datasets)
    if writes.result.tool == "trl" and is_chat and not is_said:
        what = "only answers are trained; TRL trains the prompts of chats too (here: train_on_inputs: true)"
        writes.result.change("assistant_only_loss", what)


def _accepted(writes: RecipeWrites, datasets: list[Entry]) -> dict[str, Any]:
    """The recipe in the schema's order. Values that its checks refuse are left out, one by one.

    Raises:
        RecipeError: a recipe cannot do without one of them.
    """
    while True:
        recipe: dict[str, Any] = {}
        for target in known_keys(Recipe):
            value = datasets if target == "datasets" else writes.values.get(target)
            is_choice = target == "save_steps" and target in writes.values  # elsewhere null is nothing to write
            if (value is not None or is_choice) and "[]" not in target:
                section = recipe
                *outer, last = target.split(".")
                for part in outer:
                    section = section.setdefault(part, {})
                if isinstance(section, dict):  # else what should be a section is refused first
                    section[last] = value
        try:
            load_text(values_as_yaml(recipe), "recipe.yaml")
            return recipe
        except RecipeError as error:
            writes.leave_out(error)
