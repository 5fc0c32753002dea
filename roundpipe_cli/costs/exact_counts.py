"""Configurations whose parameters are counted exactly, so that the model need not be built for a count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OWN_HEAD_DIM = frozenset({"gemma", "gemma2", "gemma3_text", "gpt_oss", "qwen3"})
"""Types whose heads have a width of their own where config.json gives none."""
EXACT_TYPES = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "gpt_oss"),
        *("granite", "smollm3", "olmo2", "olmo3", "phi3"),
    }
)
_NEEDED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
    "vocab_size",
)
_COUNTED = frozenset(
    {
        *(*_NEEDED, "head_dim", "tie_word_embeddings"),
        *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("decoder_sparse_step", "mlp_only_layers"),
    }
)
_NEUTRAL = re.compile(
    r"_.*|.*dropout|.*_pdrop|.*_token_id|.*_eps|.*_multiplier|.*softcapping|rope_.*|partial_rotary_factor|no_rope_.*"
    r"|(sliding|max)_window.*|sliding_window|layer_types|use_sliding_window|original_max_position_embeddings"
    r"|architectures|chunk_size_feed_forward|dtype|torch_dtype|hidden_act|hidden_activation|id2label|label2id"
    r"|initializer_(range|factor)|logits_scaling|max_position_embeddings|model_type|output_.*|parameters"
    r"|pretraining_tp|problem_type|query_pre_attn_scalar|quantization_config|return_dict|router_aux_loss_coef"
    r"|norm_topk_prob|router_jitter_noise|swiglu_(alpha|limit)|transformers_version|use_bidirectional_attention|use_cache"
    r"|initial_context_length|experts_per_token|auto_map|name_or_path"
)
"""Keys that do not change any parameter."""


def is_counted_exactly(config: Mapping[str, Any]) -> bool:
    """Whether `parse_config` counts the parameters of this configuration to the last one.

    It does for a few types, where all sizes are given and no key is there that the tables do not know.
    """
    model_type = config.get("model_type")
    if model_type not in EXACT_TYPES or any(config.get(key) is None for key in _NEEDED):
        return False
    if model_type in _OWN_HEAD_DIM and config.get("head_dim") is None:
        return False
    if model_type == "gpt_oss":
        config = {**config, "attention_bias": config.get("attention_bias") is False}
    unknown = (key for key in config if key not in _COUNTED and not _NEUTRAL.fullmatch(key))
    return not any(config[key] for key in unknown)
