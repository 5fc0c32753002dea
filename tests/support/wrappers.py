"""Tiny random models of every multimodal type that transformers has, and their first losses: by the engine and by
transformers itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.stored.untied import untie_stored
from roundpipe_cli.model.weights_io import load_weights
from tests.support.every_type import GENERIC, MAX_PARAMETERS, OF_TYPE, TINY_VISION, NoTinyConfigError, tiny_config_of
from tests.support.tiny import Rig, make_store, schedule_for

TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "mlp_dim": 32, "num_hidden_layers": 1, "num_layers": 1, "depth": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_heads": 2, "embed_dim": 32, "head_dim": 16},
    **{"image_size": 28, "patch_size": 14, "mlp_ratio": 1.0, "num_position_embeddings": 16, "vocab_size": 64},
    **{"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "out_hidden_size": 64},
    **{"fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "projection_dim": 32, "output_dim": 32},
    **{"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
    **{"num_global_layers": 1, "intermediate_layers_indices": [0]},
}
"""Sizes of towers for pictures and sound, under the names that their configurations have for them."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
_VQ = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "num_embeddings": 16}
OF_WRAPPER: dict[str, dict[str, Any]] = {  # what a type needs beside or in place of these
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl"), {"text_config": _SECTIONS}),
    **dict.fromkeys(("glm4v", "glm46v", "glmga", "glm_ocr", "cosmos3_edge", "hunyuan_vl"), {"text_config": _SECTIONS}),
    "gemma4": {"vision_config": TINY_VISION},
    "chameleon": {"vocabulary_map": {"<image>": 4}, "vq_config": _VQ},
    "mistral4": {
        "num_key_value_heads": 4,
        "rope_parameters": {**_ROPE, "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1},
    },
    "emu3": {"vocabulary_map": {"<image>": 4}, "vq_config": _VQ},
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
    },
    "janus": {"vq_config": {**_VQ, "image_token_embed_dim": 32, "projection_dim": 64}},
    "mistral_large4": {"text_config": {"num_key_value_heads": 4}},
    "molmo2": {
        "vision_config": {"num_hidden_layers": 25, "image_size": [28, 28]},
        "adapter_config": {"text_hidden_size": 64, "hidden_size": 32},
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "ovis2": {"vocab_size": 128, "hidden_size": 64},
}


def wrapper_types() -> list[str]:
    """Types that transformers makes models of that read pictures and write text, in its order. By their names: its
    tables of classes would load each of 500 configurations, in every process that collects tests."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return [name for name in CONFIG_MAPPING_NAMES if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]


def tiny_wrapper(model_type: str, **changes: Any) -> Any:
    """A tiny configuration of a multimodal type; `NoTinyConfigError` where none is known."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = CONFIG_MAPPING[model_type]
    own = {**OF_TYPE.get(model_type, {}), **OF_WRAPPER.get(model_type, {})}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if "text_config" in kind.sub_configs:
                config = kind(**_parts(kind, own), **own, **changes)
            else:
                config = tiny_config_of(model_type, **own, **changes)
            config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind].__name__]
            count = sum(parameter.numel() for parameter in build_skeleton(config, torch.float32).parameters())
    except Exception as error:  # of any kind: values that do not suit the type
        raise NoTinyConfigError(f"{model_type}: {type(error).__name__}: {str(error)[:200]}") from error
    if count > MAX_PARAMETERS:
        raise NoTinyConfigError(f"{model_type}: {count} parameters")
    return config


def _parts(kind: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Tiny configurations of a type's language model and towers; takes what is said of them out of `own`."""
    usual, parts = kind(), {}
    for key in kind.sub_configs:
        part = getattr(usual, key, None)
        if part is not None:
            made = _text(part) if key == "text_config" else _known(part, TOWER)
            parts[key] = {**made, **own.pop(key, {})}
    return parts


def _text(part: Any) -> dict[str, Any]:
    try:
        return dict(tiny_config_of(part.model_type).to_dict())
    except (NoTinyConfigError, KeyError):
        return _known(part, GENERIC)


def _known(part: Any, values: dict[str, Any]) -> dict[str, Any]:
    known = part.to_dict()
    found = {key: _like(known[key], value) for key, value in values.items() if key in known}
    return {**found, "model_type": part.model_type}


def _like(usual: Any, value: Any) -> Any:
    if isinstance(usual, (list, tuple)) and not isinstance(value, list):
        return [value] * len(usual)
    return int(value) if type(usual) is int and isinstance(value, float) else value


def save_wrapper(config: Any, folder: Path) -> bool:
    """A random model by its own class; whether its files hold an LM head that is not the embedding, which they do where
    the configuration ties them."""
    import transformers

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.float32)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None and head.weight is embedding.weight:
            head.weight = nn.Parameter(torch.randn(head.weight.shape) * 0.1)
        folder.mkdir(parents=True)
        model.save_pretrained(folder)
    return head is not None


def first_losses(folder: Path) -> tuple[float, float]:
    """Loss of one text by the engine from a model's files, and by transformers' own class."""
    import transformers

    source = ModelSource("tiny", folder)
    config = load_config(source)
    ids = torch.arange(3, 60).reshape(3, 19)
    model = build_skeleton(config, torch.float32)
    untie_stored(model, folder)
    split = split_model(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in split.unreached)
    store = make_store(model, split, torch.float32)
    load_weights(source, model, store.set_parameter)
    rig = Rig(model, split, store, model)
    with rig.engine(1) as engine:
        ours = engine.run_step([Microbatch(ids, ids)], schedule_for(rig, 1, 1), step=0).loss
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs: Any = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
        with torch.no_grad():
            loss = theirs(input_ids=ids, labels=ids, use_cache=False).loss
    return float(ours), float(loss)
