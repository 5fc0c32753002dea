"""Model types that the split, packed rows or sequences in chunks are known to refuse, for `plan`. No torch.

`finetune` proves each model when it loads (`split.py`, `packing.py`, `chunks.py`), which needs the modules. What that
proof says of a type, whatever its sizes, is listed here in the same words; a test compares the two. A type that
is not here may still be refused: `plan` says so where nothing is proven.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.architectures import MASK_OF_ONE, NO_MASK, chunk_refusal, packing_refusal, scaled_by_length

_UNSUPPORTED = "this architecture is not supported; choose another model"
_SHAPE = "a block is not given hidden states of the usual shape"
_TAIL = "what the model does between its last block and its head is more than its modules"
SPLIT: dict[str, tuple[str, str, str]] = {
    "cpmant": (_SHAPE, "block.0, argument 0", "a prompt before the tokens"),
    "gemma3n_text": (_SHAPE, "block.0, argument 0", "more than one stream of hidden states"),
    "hrm_text": ("the model does not call its blocks once and in order", "block.0", "a block called again"),
    "mllama": ("the model does not call its blocks once and in order", "block.4", "blocks that only images call"),
    "inkling2_text": (_TAIL, "model.output_attention_residual", "a module of two arguments"),
    "xlnet": (
        "a block is not given hidden states of the usual shape",
        "block.0, argument 0",
        "tokens before sequences",
    ),
}
"""The fault, its place, and what was found."""
STATEFUL: dict[str, tuple[str, str]] = {
    "bailing_hybrid": ("self_attn.conv1d", "Conv1d"),
    "bamba": ("mamba.conv1d", "Conv1d"),
    "deepseek_v4": ("self_attn.compressor", "DeepseekV4CSACompressor"),
    "falcon_h1": ("mamba.conv1d", "Conv1d"),
    "falcon_mamba": ("", "FalconMambaBlock"),
    "granitemoehybrid": ("mamba", "GraniteMoeHybridMambaLayer"),
    "inkling_text": ("self_attn.k_sconv", "InklingShortConvolution"),
    "jamba": ("", "JambaMambaDecoderLayer"),
    "kimi_linear": ("self_attn.conv1d", "Conv1d"),
    "lfm3": ("conv", "Lfm3ShortConv"),
    "mamba": ("", "MambaBlock"),
    "mamba2": ("", "Mamba2Block"),
    "lfm2_moe": ("conv", "Lfm2MoeShortConv"),
    "minimax": ("self_attn", "MiniMaxLightningAttention"),
    "nemotron_h": ("mixer", "NemotronHMamba2Mixer"),
    "olmo_hybrid": ("", "OlmoHybridLinearAttentionDecoderLayer"),
    "qwen3_5": ("linear_attn", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe": ("linear_attn", "Qwen3_5MoeGatedDeltaNet"),
    "qwen3_5_moe_text": ("linear_attn", "Qwen3_5MoeGatedDeltaNet"),
    "qwen3_5_text": ("linear_attn", "Qwen3_5GatedDeltaNet"),
    "qwen3_next": ("linear_attn", "Qwen3NextGatedDeltaNet"),
    "qwen4_exp": ("linear_attn", "Qwen4ExpTextGatedDeltaNet"),
    "qwen4_exp_text": ("linear_attn", "Qwen4ExpTextGatedDeltaNet"),
    "recurrent_gemma": ("", "RecurrentGemmaDecoderLayer"),
    "rwkv": ("", "RwkvBlock"),
    "xlstm": ("", "xLSTMBlock"),
    "zaya": ("self_attn.qkv_proj.conv_qk_depthwise", "Conv1d"),
}
"""Module of a block, and its class, that carries state from token to token."""
NO_POSITION_IDS = {
    "bart": ("model.decoder", "BartDecoder"),
    "bigbird_pegasus": ("model.decoder", "BigBirdPegasusDecoder"),
    "blenderbot": ("model.decoder", "BlenderbotDecoder"),
    "blenderbot-small": ("model.decoder", "BlenderbotSmallDecoder"),
    "bloom": ("transformer", "BloomModel"),
    "marian": ("model.decoder", "MarianDecoder"),
    "mbart": ("model.decoder", "MBartDecoder"),
    "moss_transcribe_diarize": ("model", "MossTranscribeDiarizeModel"),
    "mpt": ("transformer", "MptModel"),
    "mvp": ("model.decoder", "MvpDecoder"),
    "pegasus": ("model.decoder", "PegasusDecoder"),
    "plbart": ("model.decoder", "PLBartDecoder"),
    "roformer": ("roformer", "RoFormerModel"),
    "trocr": ("model.decoder", "TrOCRDecoder"),
}
UNMASKED = frozenset(
    {
        *("bert", "bert-generation", "biogpt", "camembert", "data2vec-text", "electra", "ernie", "openai-gpt", "opt"),
        *("roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl"),
    }
)
"""Types that make no mask from position ids, so that packed rows would see each other."""
MASKED_AS_ONE = frozenset({"afmoe", "falcon", "megatron-bert", "rembert", "xglm"})
"""Types whose mask takes packed rows for one."""
FUSED_EXPERTS = frozenset(
    {
        *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe"),
        *("flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum"),
        *("minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "solar_open"),
    }
)
"""Types whose fused experts get adapters from `all-linear`."""
PROVEN = frozenset(
    {
        *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen2_moe", "mistral", "mixtral", "gemma", "gemma2"),
        *("gemma3_text", "phi", "phi3", "gpt_oss", "olmo2", "olmo3", "granite", "starcoder2", "stablelm", "gpt_neox"),
        *("gpt2", "glm4", "glm4_moe", "cohere2", "opt", "smollm3", "exaone4", "ernie4_5", "minimax", "nemotron"),
        *("seed_oss", "gptj", "bloom", "mpt", "hunyuan_v1_dense"),
    }
)
"""Types whose loss and gradients are compared with plain PyTorch's by the project's own tests."""
_STATEFUL_KIND = re.compile(r"mamba|compress|conv|linear|recurrent|ssm|rwkv|lightning|delta|retention|lstm|hybrid")
"""Names of such blocks in a configuration's list of kinds."""


def check_type(config: Mapping[str, Any], *, packing: bool, chunks: bool, max_seq_length: int) -> None:
    """Refuse a model of a type that `finetune` refuses.

    Args:
        packing, chunks: whether the recipe asks for packed rows, and for sequences in chunks.

    Raises:
        RefusedError: as `finetune` says it.
    """
    model_type = str(config.get("model_type", ""))
    if model_type in SPLIT:
        what, where, found = SPLIT[model_type]
        raise RefusedError(what, where=where, found=found, hint=_UNSUPPORTED)
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    stateful, scaled = stateful_block(config, model_type), _scaled_positions(config, max_seq_length)
    if packing and stateful is not None:
        raise packing_refusal(*stateful)
    if packing and scaled is not None:
        raise packing_refusal("model.rotary_emb", scaled)
    if chunks and stateful is not None:
        raise chunk_refusal(*stateful)
    if chunks and scaled is not None:
        raise chunk_refusal("model.rotary_emb", scaled, "positions that do not depend on the length of the sequence")
    if packing and model_type in NO_POSITION_IDS:
        where, kind = NO_POSITION_IDS[model_type]
        raise packing_refusal(where, f"{kind} takes no position ids")
    if packing and model_type in UNMASKED:
        raise packing_refusal("block.0", NO_MASK)
    if packing and model_type in MASKED_AS_ONE:
        raise packing_refusal("block.0", MASK_OF_ONE)


def stateful_block(config: Mapping[str, Any], model_type: str) -> tuple[str, str] | None:
    """(where, what) of the first block that carries more from token to token than attention does, if one is known."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    module, kind = STATEFUL.get(model_type, ("", ""))
    index = 0
    if isinstance(kinds, list):
        first = next((place for place, one in enumerate(kinds) if _STATEFUL_KIND.search(str(one))), None)
        if first is None:
            return None
        index, kind = first, kind or f"a block of the kind {kinds[first]}"
    if not kind:
        return None
    return f"block.{index}.{module}", f"{kind}, which carries state from token to token"


def _scaled_positions(config: Mapping[str, Any], max_seq_length: int) -> str | None:
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return None
    parts = [scaling, *(part for part in scaling.values() if isinstance(part, dict))]
    kinds = {str(part[key]) for part in parts for key in ("rope_type", "type") if part.get(key)}
    limit = config.get("max_position_embeddings")
    return scaled_by_length(kinds, limit if isinstance(limit, int) else None, max_seq_length)
