"""Facts on the structure of model types that decide which operators a block launches; no fitted factors."""

from __future__ import annotations

QKV_BIAS = frozenset({"qwen2", "qwen2_moe", "gpt2", "gpt_neox", "opt", "bloom", "starcoder2", "phi", "gpt_oss"})
OUTPUT_BIAS = QKV_BIAS - {"qwen2", "qwen2_moe"}
MLP_BIAS = OUTPUT_BIAS - {"gpt_oss"}
EXPERT_BIAS = frozenset({"gpt_oss"})
"""Types whose experts and router have a bias."""
UNTURNED = frozenset({"gpt2", "opt", "bloom", "mpt", "gpt_bigcode", "openai-gpt", "gpt_neo", "biogpt"})
"""Queries and keys get no rotary embedding."""
HALF_ANGLES = frozenset({"gpt_oss"})
"""Cosines and sines of rotary embeddings come for half of a head's width."""
NORMS_AROUND_ZERO = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma", "qwen3_next"})
"""Norms multiply by 1 + weight."""
CHOSEN_BY_LOGIT = frozenset({"gpt_oss"})
"""Routers choose experts first, and the softmax is over the chosen; elsewhere it is over all, in float32."""
CHOSEN_SUM_TO_ONE = frozenset({"qwen3_moe", "mixtral", "glm4_moe", "qwen3_next"})
"""Weights of the chosen experts are divided by their sum (`norm_topk_prob`, as the published models have it)."""
ADAPTED_EXPERTS = frozenset(
    {
        *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe"),
        *("flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash"),
        *("mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "solar_open"),
        *("qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker"),
    }
)
"""Model types whose fused experts and router PEFT adapts; in all others `all-linear` finds no linear layer there."""
