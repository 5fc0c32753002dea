"""Refuses files of other tools for a job that no recipe does.

A recipe of such a file would train another model than the file does. Settings that only change the way
there are converted, and named in the recipe's first line (`convert_tables.CHANGES`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.aliases import is_off
from roundpipe_cli.recipe.convert_objectives import Job, job_of, reads_loss_key
from roundpipe_cli.recipe.convert_tables import Tool
from roundpipe_cli.recipe.strict_yaml import shown_value

_MULTIMODAL = "training on images, video or sound"
_PREFERENCES = "training on preferences"
_REINFORCEMENT = "reinforcement learning"
_REWARD = "training of a reward model"
_CLASSIFIER = "training of a classifier"
_DISTILLATION = "distillation from a teacher"
_PART = "training of a part of the weights"
_EXPORT = "merging or exporting a model"
_INFERENCE = "inference, a chat or an API"
_EVALUATION = "evaluation or prediction"

_BY_KEY: Mapping[str, str] = {
    **dict.fromkeys(("pref_loss", "pref_beta", "pref_ftx", "beta", "orpo_alpha", "cpo_alpha"), _PREFERENCES),
    **dict.fromkeys(("simpo_gamma", "rl_beta", "ref_model", "rpo_alpha", "desirable_weight"), _PREFERENCES),
    **dict.fromkeys(("undesirable_weight", "precompute_ref_log_probs", "f_divergence_type"), _PREFERENCES),
    **dict.fromkeys(
        ("reward_funcs", "num_generations", "trl", "ebft", "use_vllm", "max_completion_length"), _REINFORCEMENT
    ),
    **dict.fromkeys(("scale_rewards", "reward_weights", "vllm", "generation_batch_size"), _REINFORCEMENT),
    **dict.fromkeys(("reward_model", "process_reward_model", "center_rewards_coefficient"), _REWARD),
    **dict.fromkeys(("teacher_model_name_or_path", "teacher_model", "kd_trainer"), _DISTILLATION),
    **dict.fromkeys(("lisa_n_layers", "lisa_step_interval", "use_llama_pro"), _PART),
    **dict.fromkeys(("relora", "relora_steps"), "ReLoRA: adapters that are merged and begun again"),
    "mixture_of_depths": "turning a model into a mixture of depths",
    "peft_layer_replication": "training of a model with repeated layers",
    **dict.fromkeys(("train_from_scratch", "reinit_weights"), "training from random weights"),
    "diffusion": "training of a diffusion model",
    "qat": "training for a quantised model",
    "use_onebitllms": "training of a model in 1 bit",
    "llmcompressor": "training of a sparse model",
    "use_pose": "training on positions that are skipped (PoSE)",
    "num_labels": _CLASSIFIER,
    **dict.fromkeys(("export_dir", "export_quantization_bit", "export_hub_model_id", "merge_lora"), _EXPORT),
    **dict.fromkeys(("task_dir", "n_shot"), _EVALUATION),
}
"""Keys of jobs that no recipe does: the file is refused where one is set, unless its own job does not read it."""

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

_STAGES = {
    **{"rm": _REWARD, "ppo": _REINFORCEMENT, "dpo": _PREFERENCES, "kto": _PREFERENCES},
}
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
    for key, job in _BY_KEY.items():
        if not is_off(data.get(key)) and not (known and reads_loss_key(key, known, tool)):
            yield job, _line(key, data[key])
    for start, job in _BY_PREFIX.items():
        keys = [key for key in data if key.startswith(start) and not (known and reads_loss_key(key, known, tool))]
        yield from ((job, _line(key, data[key])) for key in keys if not is_off(data[key]))
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
        parts = str(plugin).split(".")
        for folder in parts:
            if folder in _PLUGINS:
                yield _PLUGINS[folder], _line("plugins", plugin)


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
        yield _INFERENCE, "no dataset, stage and do_train" if does_train is None else "no dataset"


def _line(key: str, value: Any) -> str:
    return f"{key}: {shown_value(value)}"
