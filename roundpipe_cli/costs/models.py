"""A model's architecture in numbers: enough to count parameters, bytes and operations.

`parse_config` reads any decoder-only Hugging Face configuration as plain JSON; nothing is imported from transformers.
Types in `COUNTED_TYPES` are counted within 2 %, those of `exact_counts.py` and the shipped models exactly, and a test
holds both; any other type may be counted wrong by a multiple, and is said to be a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roundpipe_cli.choices import BLOCK_SIZE, PackedName
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.sizes import SIZE_NAMES, check_sizes
from roundpipe_cli.units import format_count

# Facts on the structure of model types that decide which operators a block launches; no fitted factors.

OUTPUT_BIAS = frozenset({"gpt2", "gpt_neox", "opt", "bloom", "starcoder2", "phi", "gpt_oss"})
QKV_BIAS = OUTPUT_BIAS | {"qwen2", "qwen2_moe", "seed_oss"}
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


TIED_BY_DEFAULT = frozenset({"gpt2", "gemma", "gemma2", "gemma3_text", "smollm3"})
"""Types whose embedding and LM head share a matrix unless config.json says otherwise."""


_TWO_MATRIX_MLP = frozenset(
    {
        *("gpt2", "gptj", "gpt_neox", "gpt_neo", "opt", "bloom", "mpt", "falcon", "phi", "nemotron", "starcoder2"),
        *("codegen", "arcee", "apertus", "jais2", "nanochat", "persimmon", "biogpt", "bert-generation"),
        *("gpt_bigcode", "gpt_neox_japanese", "openai-gpt", "gpt-sw3"),
    }
)
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2", "olmo3", "glm4_moe", "hunyuan_v1_dense"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
_KEEPS_SCORES = frozenset(
    {
        *("gemma2", "bloom", "gptj", "mpt", "codegen", "flint", "gpt_neox_japanese", "granite_swa", "granitemoe_swa"),
        *("openai-gpt", "vaultgemma"),
    }
)
_SPELLS_GELU = frozenset({"gpt2", "gptj", "gpt_neo", "codegen", "openai-gpt", "phi"})
_READS_SCORES = frozenset({"gemma2", "vaultgemma", "granite_swa", "granitemoe_swa"})
_DROPS_SCORES = frozenset(
    {*("bert-generation", "biogpt", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox_japanese", "openai-gpt", "seed_oss")}
)
"""Types with dropout in attention unless config.json says otherwise."""
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
"""Names that configurations have for the share of attention's weights that training drops."""
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
        """A block with `factor` times the parameters."""
        names = "attention_params", "mlp_params", "active_mlp_params", "other_params"
        parts: dict[str, Any] = {name: round(getattr(self, name) * factor) for name in names}
        return replace(self, **parts)

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
    stored_as: PackedName | None = None
    """Format in which the files hold the blocks' weights, and in which they can stay."""
    is_guess: bool = False
    """The count of parameters is a guess."""
    notes: tuple[str, ...] = ()
    """Notes on the count, for the user."""
    tail_params: int | None = None
    """Parameters of the head layer beside the LM head's matrix; None: a norm of one weight a channel."""
    unreached_params: int = 0
    """Share of `embed_params` in towers for pictures and sound, which stay on the host and are not trained."""
    masks_chunks: bool = False
    """No kernel takes a chunk without a mask: heads too wide or of two widths, dropout, a model's own attention."""
    is_eager: bool = False
    """Attention is the model's own, by its configuration; see `keeps_scores`."""
    boundary_columns: int = 0
    """Values per token between two blocks: hidden states and what travels beside them; 0: hidden states alone."""

    @property
    def four_norms(self) -> bool:
        """Norms after attention and feed-forward part as well as before: they read what a block would only add."""
        return self.model_type in _FOUR_NORMS

    @property
    def keeps_scores(self) -> bool:
        """Attention is transformers' own, with scores of all pairs of tokens: no fused kernel computes it."""
        return self.is_eager or self.model_type in _KEEPS_SCORES

    @property
    def caps_scores(self) -> bool:
        """Scores are kept for backward beside the softmax of them: behind a tanh, or for their log-sum."""
        return self.model_type in _READS_SCORES

    @property
    def has_sinks(self) -> bool:
        """Each head has a sink, a number that takes part in the softmax: `model/attention.py`."""
        return self.model_type == "gpt_oss"

    @property
    def spells_gelu(self) -> bool:
        """The activation is written out (`gelu_new`): each of its steps is kept for backward."""
        return self.model_type in _SPELLS_GELU

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
        """The model with `count` more rows of embedding and LM head: as if no padding row were left for new tokens."""
        rows = self.embed_params + count * self.hidden_size
        return replace(self, vocab_size=self.vocab_size + count, embed_params=rows) if count else self

    @property
    def parameters(self) -> int:
        shared = self.vocab_size * self.hidden_size if self.tied else 0
        return self.embed_params + sum(block.params for block in self.blocks) + self.head_params - shared


def with_stored_count(architecture: Architecture, count: int | None = None, source: str = "") -> Architecture:
    """The model with as many parameters as the model's files hold, and what to tell of the count.

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
        return replace(architecture, notes=(*architecture.notes, note))
    blocks = sum(block.params for block in architecture.blocks)
    factor = (count - own + blocks) / blocks
    off = own / count - 1
    if abs(off) <= MAX_COUNT_ERROR:
        return replace(architecture, is_guess=False)
    shown = f"{format_count(count)} parameters by {source}, {format_count(own)} by the configuration ({off:+.0%})"
    if not MIN_SCALE <= factor <= 1 / MIN_SCALE:
        note = f"note: {shown}: the files do not look like this model's, so the parameter count is a guess"
        return replace(architecture, is_guess=True, notes=(*architecture.notes, note))
    note = f"note: {shown}: blocks are scaled to the former; times and activations of such blocks are a guess"
    scaled = tuple(block.scaled(factor) for block in architecture.blocks)
    return replace(architecture, blocks=scaled, is_guess=False, notes=(*architecture.notes, note))


SETTINGS = ("quantization_config", "compression_config")
"""Keys of a configuration about how the model's files are quantised."""
MODELOPT_NAME = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt says how weights are quantised; config.json says nothing in its earlier checkpoints."""


def read_with_modelopt(path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """A config.json by `read`, with what ModelOpt says beside it of how the weights are quantised."""
    config, beside = read(path), path.with_name(MODELOPT_NAME)
    found = read(beside).get("quantization") if beside.exists() and not quantization_settings(config) else None
    if isinstance(found, dict) and found.get("quant_algo"):
        config["quantization_config"] = {**found, "quant_method": f"modelopt, by {MODELOPT_NAME}"}
    return config


def quantization_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration about how the model's files are quantised; empty where they are not."""
    for part in (config, config.get("text_config")):
        for key in SETTINGS:
            found = part.get(key) if isinstance(part, dict) else None
            if found:
                return found if isinstance(found, dict) else {"quant_method": str(found)}
    return {}


def stored_as(config: Mapping[str, Any]) -> PackedName | None:
    """Format in which a model's files hold the weights of its blocks, and in which these can stay; None: whole, or in
    another one."""
    settings = quantization_settings(config)
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if settings.get("load_in_4bit"):
        return "4bit"
    if method == "fp8" and block in (None, [BLOCK_SIZE, BLOCK_SIZE]):
        has_fp4 = "fp4" in (config.get("expert_dtype"), settings.get("expert_dtype"))  # DeepSeek V4
        return None if has_fp4 else "fp8_blocks"
    return "mxfp4" if method == "mxfp4" else None


def parse_config(config: dict[str, Any], *, name: str, source: str) -> Architecture:
    """The architecture that a config.json describes.

    Raises:
        RefusedError: a needed figure is missing or impossible.
    """
    check_sizes(config, f"{name} ({source})")
    packed_as, is_known = stored_as(config), str(config.get("model_type")) in COUNTED_TYPES
    if isinstance(config.get("text_config"), dict):
        config = {"model_type": config.get("model_type", "unknown"), **config["text_config"]}
    reader = _Reader(config, name, source)
    model_type = str(config.get("model_type", "unknown"))
    hidden = reader.positive("hidden_size")
    heads = reader.positive("num_attention_heads")
    vocab = reader.positive("vocab_size")
    learned = reader.number("max_position_embeddings") if model_type in _LEARNED_POSITIONS else 0
    shares = [config[key] for key in ATTENTION_DROPOUT if key in config] or [model_type in _DROPS_SCORES]
    experts = reader.number("num_experts")
    shape = Architecture(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=reader.number("num_key_value_heads") or (1 if config.get("multi_query") else heads),
        head_dim=reader.number("head_dim") or hidden // heads,
        intermediate_size=(experts and reader.number("moe_intermediate_size")) or _dense_width(reader),
        num_experts_per_tok=min(experts, reader.number("num_experts_per_tok")),
        gated_mlp=model_type not in _TWO_MATRIX_MLP,
        qk_norm=model_type in _QK_NORM,
        vocab_size=vocab,
        tied=bool(config.get("tie_word_embeddings", model_type in TIED_BY_DEFAULT)),
        max_position_embeddings=reader.number("max_position_embeddings") or None,
        embed_params=vocab * hidden + learned * hidden,
        blocks=(),
        source=source,
        stored_as=packed_as,
        is_guess=not is_known,
        masks_chunks=bool(config.get("masks_chunks")) or any(shares),
        is_eager=bool(config.get("is_eager")),
    )
    num_layers = reader.positive("num_hidden_layers")
    return noting_all_experts(replace(shape, blocks=tuple(_block(reader, shape, index) for index in range(num_layers))))


def noting_all_experts(architecture: Architecture) -> Architecture:
    """The architecture; with all experts computing every token, and a note, where nothing says how many do."""
    experts = max((block.num_experts for block in architecture.blocks), default=0)
    if not experts or architecture.num_experts_per_tok:
        return architecture
    names = ", ".join(SIZE_NAMES["num_experts_per_tok"][:3])
    note = (
        f"the configuration does not say how many of {experts} experts compute a token ({names}, ...): times and "
        "activations are a guess, for all of them"
    )
    return replace(architecture, num_experts_per_tok=experts, notes=(*architecture.notes, note))


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
        mlp, active = experts * expert + rest, (shape.num_experts_per_tok or experts) * expert + rest
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
