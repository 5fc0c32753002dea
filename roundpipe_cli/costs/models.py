"""A model's architecture and a recipe's settings in numbers: enough to count parameters, bytes and operations.

`parse_config` reads any decoder-only Hugging Face configuration as plain JSON; nothing is imported from transformers.
Types in `COUNTED_TYPES` are counted within 2 %, those listed below and the shipped models exactly, and a test
holds both; any other type may be counted wrong by a multiple, and is said to be a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from roundpipe_cli.choices import PACKED_FORMATS, SIZE_NAMES, OptimizerName, PackedName, check_sizes
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.units import format_count

# Facts on the structure of model types that decide which operators a block launches; no fitted factors.

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


LOGITS_AT_ONCE = 2**27


def head_chunk_tokens(given: int | None, vocab_size: int) -> int:
    """Tokens for which the LM head computes logits at once: as given, or about `LOGITS_AT_ONCE` logits. A rule of the
    vocabulary alone: with one of the card's memory other cards would compute other bits."""
    return given or max(256, min(1024, 2 ** round(math.log2(LOGITS_AT_ONCE / max(1, vocab_size)))))


# The settings of a recipe that decide costs and memory.

DType = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """A recipe's settings for costs and memory. Sequences are counted as full: `max_seq_length` tokens each."""

    max_seq_length: int
    micro_batch_size: float = 1
    sequences_per_row: int = 1
    """Sequences of a row: 2 for pairs of answers."""
    num_microbatches: int = 8
    """Microbatches of a step."""
    counts_tokens: bool = False
    """The recipe fills microbatches by tokens; `micro_batch_size` is their number of full rows."""
    method: Literal["lora", "full"] = "lora"
    lora_r: int = 16
    expert_r: int | None = None
    """Rank of experts' adapters; 0: they have none; None: `lora_r` divided by the experts of a token, at least 1."""
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] | None = None
    """Names of the adapted projections; None: all of them."""
    dtype: DType = "bfloat16"
    float16_accumulation: bool = False
    """Matrix products of float16 add up in float16."""
    deterministic: bool = False
    """GPUs add up in order in attention's backward."""
    packed_as: PackedName | None = None
    """Format of the blocks' frozen weights; None: they lie whole."""
    unpacks_once: bool = False
    """Packed weights are unpacked once per visit of a stage, not for each microbatch and pass."""
    recompute: Literal["stage", "layer", "none"] = "stage"
    fused: bool = True
    """Operators and kernels of ours (`kernels: auto`), not transformers' and PEFT's own."""
    optimizer: OptimizerName = "adamw"
    new_tokens: int = 0
    """Tokens of the recipe's `add_tokens`; LoRA trains their rows of embedding and LM head."""
    has_momentum: bool = False
    """The recipe's `sgd_momentum` is not 0."""
    head_chunk_tokens: int = 1024
    mlp_chunk_tokens: int | None = None
    """Tokens for which a block's feed-forward part is computed at once, again in backward; None: all."""
    save_total_limit: int = 2
    weight_cache_bytes: int = 0
    """Bytes of each GPU's memory for weights that stay there."""
    weights_on_disk: bool = False
    """Frozen weights are mapped from a file and take host memory only as far as there is some to spare."""
    skip_last_projection: bool = False
    """Recompute leaves out what backward never reads, for which the host keeps the input of every layer."""
    keep_blocks: int = 0
    """Blocks, counted from the last, that are not recomputed: their activations stay on the device."""
    num_shards: int = 1
    """Machines over which masters and the optimizer's state are shared out."""

    sequence_chunks: int = 1
    """Chunks into which each sequence is cut; a chunk is a microbatch, so `num_microbatches` counts chunks."""

    @property
    def tokens_per_microbatch(self) -> float:
        return self.micro_batch_size * self.sequences_per_row * self.max_seq_length / self.sequence_chunks

    @property
    def num_sequences(self) -> int:
        """Sequences of a step, divided by `micro_batch_size`."""
        return self.num_microbatches // self.sequence_chunks

    @property
    def tokens_per_mlp_call(self) -> float:
        """Tokens of one call of a block's feed-forward part."""
        return min(self.tokens_per_microbatch, self.mlp_chunk_tokens or self.tokens_per_microbatch)

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def frozen_bytes_per_param(self) -> float:
        """Bytes of each weight of a matrix that is not trained."""
        return self.packed_bytes_per_param or self.dtype_bytes

    @property
    def packed_bytes_per_param(self) -> float:
        """The same where it is packed, else 0."""
        if self.method == "full" or self.packed_as is None:
            return 0.0
        return PACKED_FORMATS[self.packed_as].bytes_per_param

    @property
    def unpacking_bytes_per_param(self) -> float:
        """Bytes of a GPU's memory that unpacking a weight to 16 bit reads and writes; 0 where it is not packed."""
        if not self.packed_bytes_per_param or self.packed_as is None:
            return 0.0
        return self.packed_bytes_per_param + 4 * PACKED_FORMATS[self.packed_as].passes - 2


# The configurations that are counted exactly, so that the model need not be built for a count.

TIED_BY_DEFAULT = frozenset({"gpt2", "gemma", "gemma2", "gemma3_text", "smollm3"})
"""Types whose embedding and LM head share a matrix unless config.json says otherwise."""
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


_TWO_MATRIX_MLP = frozenset(
    {
        *("gpt2", "gptj", "gpt_neox", "gpt_neo", "opt", "bloom", "mpt", "falcon", "phi", "nemotron", "starcoder2"),
        *("codegen", "arcee", "apertus", "jais2", "nanochat", "persimmon", "biogpt", "bert-generation"),
        *("gpt_bigcode", "gpt_neox_japanese", "openai-gpt", "gpt-sw3"),
    }
)
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2", "olmo3", "glm4_moe", "hunyuan_v1_dense"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
_KEEPS_SCORES = frozenset({"gemma2", "bloom", "gptj", "mpt"})
_LEARNED_POSITIONS = frozenset({"gpt2", "opt"})
COUNTED_TYPES = frozenset(
    {
        *("apertus", "arcee", "bert-generation", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2"),
        *("cohere2_moe", "cwm", "diffllama", "ernie4_5", "exaone4", "falcon", "flex_olmo", "flint", "gemma"),
        *("gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox"),
        *("gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa"),
        *("granitemoeshared", "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2"),
        *("kolibri1", "llama", "mellum", "minimax_m2", "ministral3", "mistral", "mixtral", "mpt", "nanochat"),
        *("nemotron", "olmo", "olmo2", "olmo3", "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phi3"),
        *("phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open"),
        *("stablelm", "starcoder2", "vaultgemma"),
    }
)
"""Types whose parameters are counted within `MAX_COUNT_ERROR`; a test compares with transformers' modules."""
MAX_COUNT_ERROR = 0.02
MIN_SCALE = 0.02
"""Least ratio of files' weights to counted ones, and of its inverse: beyond it the files are of something else."""


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder block."""

    attention_params: int
    """Matrices of q, k, v and o."""
    mlp_params: int
    """All matrices, every expert and the router."""
    active_mlp_params: int
    """Matrices that one token passes through."""
    other_params: int
    """Norms, biases, sinks."""
    num_experts: int
    """Routed experts; 0 is a dense block."""
    window: int | None
    """Tokens of the sliding window; None: full attention."""

    @property
    def params(self) -> int:
        return self.attention_params + self.mlp_params + self.other_params

    def scaled(self, factor: float) -> Block:
        """The same with `factor` times the parameters."""
        return replace(
            self,
            attention_params=round(self.attention_params * factor),
            mlp_params=round(self.mlp_params * factor),
            active_mlp_params=round(self.active_mlp_params * factor),
            other_params=round(self.other_params * factor),
        )

    @property
    def active_linear_params(self) -> int:
        """Weights of the matrix products that one token takes part in."""
        return self.attention_params + self.active_mlp_params


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything that cost and memory model need to know about a model."""

    name: str
    model_type: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Width of a dense block; of one expert where all blocks have experts."""
    num_experts_per_tok: int
    gated_mlp: bool
    """Three matrices (gate, up, down) rather than two."""
    qk_norm: bool
    vocab_size: int
    tied: bool
    """Embedding and LM head share one matrix."""
    max_position_embeddings: int | None
    embed_params: int
    blocks: tuple[Block, ...]
    source: str
    """Source of the figures, as a text for the user."""
    stored_in_4bit: bool = False
    """The files hold the blocks' weights in bitsandbytes' 4 bit, in which they stay."""
    is_guess: bool = False
    """The count of parameters is a guess."""
    notes: tuple[str, ...] = ()
    """Notes on the count, for the user."""
    tail_params: int | None = None
    """Parameters of the head layer beside the LM head's matrix; None: a norm of one weight a channel."""
    unreached_params: int = 0
    """Share of `embed_params` in towers for pictures and sound, which stay on the host and are not trained."""
    boundary_columns: int = 0
    """Values per token between two blocks: hidden states and what travels beside them; 0: hidden states alone."""

    @property
    def four_norms(self) -> bool:
        """Norms after attention and feed-forward part as well as before: they read what a block would only add."""
        return self.model_type in _FOUR_NORMS

    @property
    def keeps_scores(self) -> bool:
        """Attention is transformers' own, with scores of all pairs of tokens: no fused kernel computes it."""
        return self.model_type in _KEEPS_SCORES

    @property
    def caps_scores(self) -> bool:
        """Scores pass through a tanh, whose result is kept for backward."""
        return self.model_type == "gemma2"

    @property
    def has_sinks(self) -> bool:
        """Each head has a sink, a number that takes part in the softmax: `model/attention.py`."""
        return self.model_type == "gpt_oss"

    @property
    def clamps_gates(self) -> bool:
        """Experts limit gate and up before they are multiplied."""
        return self.model_type == "gpt_oss"

    @property
    def head_params(self) -> int:
        """The LM head's matrix and the final norm, shared matrix included."""
        tail = self.hidden_size if self.tail_params is None else self.tail_params
        return self.vocab_size * self.hidden_size + tail

    def with_tokens(self, count: int) -> Architecture:
        """The same with `count` more rows of embedding and LM head: as if no padding row were left for new tokens."""
        rows = self.embed_params + count * self.hidden_size
        return replace(self, vocab_size=self.vocab_size + count, embed_params=rows) if count else self

    @property
    def parameters(self) -> int:
        shared = self.vocab_size * self.hidden_size if self.tied else 0
        return self.embed_params + sum(block.params for block in self.blocks) + self.head_params - shared


def with_stored_count(architecture: Architecture, count: int | None = None, source: str = "") -> Architecture:
    """The same with as many parameters as the model's files hold, and what to tell of the count.

    Args:
        count: of the files; None: they are not here.
        source: what says so.
    """
    own = architecture.parameters
    if count is None and not architecture.is_guess:
        return architecture
    if count is None:
        note = (
            f"the parameter count is a guess, and so are memory and times: `plan` was not taught the model type "
            f"{architecture.model_type}, and no weights are here to count"
        )
        return replace(architecture, notes=(note,))
    blocks = sum(block.params for block in architecture.blocks)
    factor = (count - own + blocks) / blocks
    off = own / count - 1
    if abs(off) <= MAX_COUNT_ERROR:
        return replace(architecture, is_guess=False)
    shown = f"{format_count(count)} parameters by {source}, {format_count(own)} by the configuration ({off:+.0%})"
    if not MIN_SCALE <= factor <= 1 / MIN_SCALE:
        note = f"note: {shown}: the files do not look like this model's, so the parameter count is a guess"
        return replace(architecture, is_guess=True, notes=(note,))
    note = f"note: {shown}: blocks are scaled to the former; times and activations of such blocks are a guess"
    scaled = tuple(block.scaled(factor) for block in architecture.blocks)
    return replace(architecture, blocks=scaled, is_guess=False, notes=(note,))


def parse_config(config: dict[str, Any], *, name: str, source: str) -> Architecture:
    """The architecture that a config.json describes.

    Raises:
        RefusedError: a needed figure is missing or impossible.
    """
    check_sizes(config, f"{name} ({source})")
    quantized, is_known = config.get("quantization_config"), str(config.get("model_type")) in COUNTED_TYPES
    if isinstance(config.get("text_config"), dict):
        config = {"model_type": config.get("model_type", "unknown"), **config["text_config"]}
    reader = _Reader(config, name, source)
    model_type = str(config.get("model_type", "unknown"))
    hidden = reader.positive("hidden_size")
    heads = reader.positive("num_attention_heads")
    vocab = reader.positive("vocab_size")
    learned = reader.number("max_position_embeddings") if model_type in _LEARNED_POSITIONS else 0
    experts = reader.number("num_experts")
    shape = Architecture(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=reader.number("num_key_value_heads") or (1 if config.get("multi_query") else heads),
        head_dim=reader.number("head_dim") or hidden // heads,
        intermediate_size=(experts and reader.number("moe_intermediate_size")) or _dense_width(reader),
        num_experts_per_tok=max(1, reader.number("num_experts_per_tok")) if experts else 0,
        gated_mlp=model_type not in _TWO_MATRIX_MLP,
        qk_norm=model_type in _QK_NORM,
        vocab_size=vocab,
        tied=bool(config.get("tie_word_embeddings", model_type in TIED_BY_DEFAULT)),
        max_position_embeddings=reader.number("max_position_embeddings") or None,
        embed_params=vocab * hidden + learned * hidden,
        blocks=(),
        source=source,
        stored_in_4bit=isinstance(quantized, dict) and bool(quantized.get("load_in_4bit")),
        is_guess=not is_known,
    )
    num_layers = reader.positive("num_hidden_layers")
    return replace(shape, blocks=tuple(_block(reader, shape, index) for index in range(num_layers)))


class _Reader:
    def __init__(self, config: dict[str, Any], name: str, source: str) -> None:
        self.config = config
        self._name = name
        self._source = source

    def number(self, key: str) -> int:
        """The figure; 0 if the configuration has none."""
        for synonym in SIZE_NAMES.get(key, (key,)):
            value = self.config.get(synonym)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
                raise self._refuse(f"{synonym} is not a whole number of at least 0", found=repr(value))
            return value
        return 0

    def positive(self, key: str) -> int:
        value = self.number(key)
        if value < 1:
            raise self._refuse(f"the model's configuration has no {key}", found=", ".join(sorted(self.config)[:12]))
        return value

    def _refuse(self, what: str, *, found: str) -> RefusedError:
        return RefusedError(
            what,
            where=f"{self._name} ({self._source})",
            found=found or "nothing",
            expected="the config.json of a decoder-only Hugging Face model",
        )


def _dense_width(reader: _Reader) -> int:
    return reader.number("intermediate_size") or 4 * reader.number("hidden_size")


def _block(reader: _Reader, shape: Architecture, index: int) -> Block:
    """Parameter counts of a block of an architecture that has none yet."""
    hidden, experts = shape.hidden_size, reader.number("num_experts") if _has_experts(reader, index) else 0
    query, key_value = (shape.head_dim * heads for heads in (shape.num_attention_heads, shape.num_key_value_heads))
    column = (3 if shape.gated_mlp else 2) * hidden  # weights of the matrices for each of their inner values
    mlp = active = column * _dense_width(reader)
    if experts:
        shared = reader.number("shared_expert_intermediate_size")
        shared = shared or reader.number("n_shared_experts") * reader.number("moe_intermediate_size")
        expert, rest = column * shape.intermediate_size, hidden * experts + column * shared
        mlp, active = experts * expert + rest, reader.number("num_experts_per_tok") * expert + rest
    return Block(
        attention_params=2 * hidden * (query + key_value),
        mlp_params=mlp,
        active_mlp_params=active,
        other_params=_norms_and_biases(shape, query, key_value, experts),
        num_experts=experts,
        window=_window(reader, index),
    )


def _norms_and_biases(shape: Architecture, query: int, key_value: int, experts: int) -> int:
    hidden, model_type = shape.hidden_size, shape.model_type
    count = (4 if shape.four_norms else 2) * hidden
    if shape.qk_norm:
        count += query + key_value if model_type.startswith("olmo") else 2 * shape.head_dim
    if model_type in QKV_BIAS:
        count += query + 2 * key_value
    if model_type in MLP_BIAS:  # also of the output, and of both norms
        count += 4 * hidden + shape.intermediate_size
    if model_type == "gpt_oss":
        count += hidden + shape.num_attention_heads + experts * (2 * shape.intermediate_size + hidden + 1)
    return count


def _has_experts(reader: _Reader, index: int) -> bool:
    if not reader.number("num_experts"):
        return False
    dense = reader.config.get("mlp_only_layers")
    if isinstance(dense, list) and index in dense:
        return False
    every = reader.number("decoder_sparse_step") or 1
    return index >= reader.number("first_k_dense_replace") and (index + 1) % every == 0


def _window(reader: _Reader, index: int) -> int | None:
    """Tokens of block `index`'s sliding window, or None for full attention."""
    window = reader.number("sliding_window")
    if not window or reader.config.get("use_sliding_window") is False:
        return None
    kinds = reader.config.get("layer_types")
    if isinstance(kinds, list) and index < len(kinds):
        return window if kinds[index] == "sliding_attention" else None
    model_type = reader.config.get("model_type")
    if model_type in ("gemma3", "gemma3_text"):
        return None if (index + 1) % (reader.number("sliding_window_pattern") or 6) == 0 else window
    if model_type in ("gemma2", "gpt_oss"):
        return window if index % 2 == 0 else None
    if model_type in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe") and not reader.config.get("use_sliding_window"):
        return None
    return window
