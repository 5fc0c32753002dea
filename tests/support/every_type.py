"""A tiny configuration of every type in transformers' mapping of causal language models."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from roundpipe_cli.model.load import build_skeleton
from tests.support.tiny import BASE, EXTRA, NO_DROPOUT

MAX_PARAMETERS = 30_000_000
MAX_HIDDEN_SIZE = 600
GENERIC: dict[str, Any] = {  # values for keys that a type's configuration knows
    **BASE,
    **NO_DROPOUT,
    **{"head_dim": 16, "sliding_window": 4, "is_decoder": True},
    # experts
    **{"moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "n_shared_experts": 1, "num_shared_experts": 1},
    # older names of sizes
    **{"n_embd": 64, "n_layer": 3, "n_head": 4, "n_layers": 3, "n_heads": 4, "num_layers": 3, "d_model": 64},
    **{"ffn_dim": 128, "word_embed_proj_dim": 64, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128},
    **{"max_target_positions": 128, "rotary_dim": 8, "decoder_layers": 3, "decoder_attention_heads": 4},
    **{"decoder_ffn_dim": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128},
    # latent attention
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    # linear attention and state spaces
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_num_heads": 4},
    **{"mamba_head_dim": 32, "ssm_state_size": 8, "state_size": 8, "n_groups": 1, "expand": 2},
    # embeddings of each layer
    **{"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8, "laurel_rank": 4},
}
_MAYBE_UNFIT = ("linear_", "mamba", "n_group", "topk", "q_lora", "kv_lora", "qk_", "v_head")
TINY_VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
_GEMMA_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BLT_PART = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 16},
}
_GEMMA4_ASSISTANT = {
    **{"model_type": "gemma4_text", "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0},
    **{"vocab_size_per_layer_input": 0, "num_experts": None},
}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    **{"num_hidden_layers": 4, "num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32},
    "use_mamba_kernels": False,
}
OF_TYPE: dict[str, dict[str, Any]] = {  # what a type needs beside or in place of these; None leaves a key out
    "dots3_note": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "blt": {
        **{"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4], "vocab_size": 260},
        **{"patcher_config": _BLT_PART, "global_config": _BLT_PART},
        **{f"{part}_config": {**_BLT_PART, "hidden_size_global": 64} for part in ("encoder", "decoder")},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _GEMMA_ROPE, "full_attention": _GEMMA_ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 8,
    },
    "emu3": {"text_config": {}, "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {**TINY_VISION, "num_global_layers": 1, "intermediate_layers_indices": [0]},
    },
    "gemma4_assistant": {"text_config": _GEMMA4_ASSISTANT},
    "gemma4_unified_assistant": {"text_config": _GEMMA4_ASSISTANT},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        **{"per_layer_config": {}, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
        **{"num_key_value_heads": 4, "shared_experts_intermediate_size": 32, "head_dim": 32},
    },
    "gemma3": {"vision_config": TINY_VISION, "mm_tokens_per_image": 4},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [128] * 4},
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "git": {"vision_config": {**TINY_VISION, "image_size": 32, "patch_size": 16}},
    "got_ocr2": {"vision_config": {**TINY_VISION, "output_channels": 32, "window_size": 2, "global_attn_indexes": [0]}},
    "gpt_neo": {
        **{"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4, "num_hidden_layers": None}
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 32, "num_heads": 4, "n_groups": 1, "chunk_size": 8},
    "moss_transcribe_diarize": {
        "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    },
    "phi4_multimodal": {
        "vision_config": {**TINY_VISION, "crop_size": 28},
        "audio_config": {
            **{"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
            **{"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8},
        },
    },
    "prophetnet": {
        **{"num_hidden_layers": None, "num_encoder_layers": 1, "num_decoder_layers": 2, "is_encoder_decoder": False},
        **{"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    },
    "reformer": {
        **{"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32], "attention_head_size": 16},
        **{"feed_forward_size": 64, "attn_layers": ["local", "lsh", "local"], "local_attn_chunk_length": 8},
        **{"lsh_attn_chunk_length": 8, "num_buckets": 4},
    },
    "roc_bert": {
        **{"pronunciation_embed_dim": 16, "pronunciation_vocab_size": 128},
        **{"shape_embed_dim": 16, "shape_vocab_size": 128},
    },
    "xlnet": {"max_position_embeddings": None, "d_head": 16, "d_inner": 64},
    "zamba": {**_ZAMBA, "mamba_dt_rank": 4},
    "zamba2": {
        **{**_ZAMBA, "mamba_headdim": 16, "num_query_groups": 4, "kv_channels": 16, "chunk_size": 8},
        **{"hybrid_layer_ids": None, "adapter_rank": 8},
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


class NoTinyConfigError(Exception):
    """The values here do not suit a type."""


def causal_types() -> list[str]:
    """Types that transformers makes causal language models of, in its order."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    return [name for name, kind in CONFIG_MAPPING.items() if kind in MODEL_FOR_CAUSAL_LM_MAPPING]


def tiny_config_of(model_type: str, **changes: Any) -> Any:
    """A tiny configuration of any type, without dropout; `NoTinyConfigError` where none is known."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model_type in EXTRA:
            return kind(**{**BASE, **NO_DROPOUT, **EXTRA[model_type], **changes})
        text = getattr(kind, "sub_configs", {}).get("text_config")
        if text is not None:
            return _composite(kind, text, changes)
        tries = list(_tries(kind, model_type, changes))
        why = ""
        for values in tries:
            try:
                return _built(kind(**values))
            except Exception as error:  # of any kind: a set of values that does not suit the type
                why = why or f"{type(error).__name__}: {str(error)[:200]}"
    raise NoTinyConfigError(f"{model_type}: {why}")


def _composite(kind: Any, text: Any, changes: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    own = dict(OF_TYPE.get(kind.model_type, {}))
    inner = {**GENERIC, **own.pop("text_config", {}), **changes}
    name = getattr(text, "model_type", "")
    if "text_config" not in OF_TYPE.get(kind.model_type, {}):
        inner = tiny_config_of(name if name in CONFIG_MAPPING else "llama", **changes).to_dict()
    return kind(text_config=inner, **own)


def _tries(kind: Any, model_type: str, changes: dict[str, Any]) -> Any:
    base = kind()
    known = base.to_dict()
    own = {**OF_TYPE.get(model_type, {}), **changes}
    if "kv_lora_rank" in known:
        own = {"num_key_value_heads": 4, **own}
    values = {key: one for key, one in GENERIC.items() if key in known or key in kind.attribute_map or _has(base, key)}
    values = {key: value for key, value in {**values, **own}.items() if value is not None}
    yield values
    yield {key: value for key, value in values.items() if key != "head_dim" or key in own}
    yield {key: value for key, value in values.items() if not key.startswith(_MAYBE_UNFIT) or key in own}


def _has(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:
        return True


def _built(config: Any) -> Any:
    if (getattr(config, "hidden_size", 0) or 0) > MAX_HIDDEN_SIZE:
        raise ValueError(f"hidden_size {config.hidden_size}")
    count = sum(parameter.numel() for parameter in build_skeleton(config, torch.float32).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count} parameters")
    return config


GATED_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
"""Types with blocks of a gated delta rule whose rows may be packed, and cut into chunks."""


def hybrid_config(model_type: str) -> Any:
    """One of three blocks: a block of attention between two of a gated delta rule."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return tiny_config_of(model_type, layer_types=kinds, num_hidden_layers=len(kinds), vocab_size=128)
