"""The matrices of a block: their shapes, which of them are adapted or have a bias."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roundpipe_cli.costs.models import Architecture, Block
from roundpipe_cli.costs.structure import ADAPTED_EXPERTS, EXPERT_BIAS, MLP_BIAS, OUTPUT_BIAS, QKV_BIAS
from roundpipe_cli.costs.training import TrainingSettings

_GATE_AND_UP = (frozenset({"gate_proj", "w1"}), frozenset({"up_proj", "w3"}))
_DOWN = frozenset({"down_proj", "w2"})
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight of a block, or one of each expert."""

    name: str
    inputs: int
    outputs: int
    rank: int = 0
    """Rank of its adapter; 0: none."""
    num_experts: int = 0
    """Number of experts that have such a matrix; 0: it belongs to no expert."""
    has_bias: bool = False

    @property
    def params(self) -> int:
        return max(1, self.num_experts) * self.inputs * self.outputs

    @property
    def adapter_params(self) -> int:
        return max(1, self.num_experts) * self.rank * (self.inputs + self.outputs)


@dataclass(frozen=True, slots=True)
class BlockMatrices:
    """All matrices of a block, by part."""

    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    dense: tuple[Matrix, ...]
    """The feed-forward part that all tokens pass: gate (where there is one), up, down; shared experts, too."""
    router: Matrix | None
    experts: tuple[Matrix, ...]
    """Matrices of routed experts: gate and up in one, and down."""

    def every(self) -> tuple[Matrix, ...]:
        router = () if self.router is None else (self.router,)
        return (self.query, self.key, self.value, self.output, *self.dense, *router, *self.experts)


def block_matrices(architecture: Architecture, block: Block, settings: TrainingSettings) -> BlockMatrices:
    """The matrices of `block`, with adapters where `settings` asks for them."""
    hidden, model_type = architecture.hidden_size, architecture.model_type
    query, key_value = _attention_widths(architecture, block)
    has_bias = model_type in QKV_BIAS

    # where PEFT adapts fused experts, it takes the names of a feed-forward part for theirs alone
    dense_settings = replace(settings, lora_targets=()) if model_type in ADAPTED_EXPERTS else settings

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> Matrix:
        rank = _rank(dense_settings if name in _FEED_FORWARD else settings, name) if inputs * outputs else 0
        return Matrix(name, inputs, outputs, rank, has_bias=bias)

    routed = _experts(architecture, block, settings)
    router = None
    if block.num_experts:
        rank = _rank(settings, "gate") if model_type in ADAPTED_EXPERTS else 0
        bias = model_type in EXPERT_BIAS
        router = Matrix("gate", hidden, block.num_experts, rank, has_bias=bias)
    beside = block.mlp_params - sum(one.params for one in routed) - (router.params if router else 0)
    names = _FEED_FORWARD if architecture.gated_mlp else _FEED_FORWARD[1:]
    width = beside // (len(names) * hidden)
    dense = tuple(
        linear(name, *((width, hidden) if name == "down_proj" else (hidden, width)), model_type in MLP_BIAS)
        for name in names
    )
    return BlockMatrices(
        query=linear("q_proj", hidden, query, has_bias),
        key=linear("k_proj", hidden, key_value, has_bias),
        value=linear("v_proj", hidden, key_value, has_bias),
        output=linear("o_proj", query, hidden, model_type in OUTPUT_BIAS),
        dense=dense if width > 0 else (),
        router=router,
        experts=routed,
    )


def _attention_widths(architecture: Architecture, block: Block) -> tuple[int, int]:
    """Outputs of the queries' matrix and of each of the keys' and values'; together as many weights as the block has.

    Where heads share keys in other ways than the figures say, or matrices go through a latent space, the difference is
    the keys'.
    """
    query = architecture.num_attention_heads * architecture.head_dim
    key_value = architecture.num_key_value_heads * architecture.head_dim
    both = block.attention_params // (2 * architecture.hidden_size)
    if both in (0, query + key_value):
        return (query, key_value) if both else (0, 0)
    return (query, both - query) if both > query else (both - both // 2, both // 2)


def _experts(architecture: Architecture, block: Block, settings: TrainingSettings) -> tuple[Matrix, ...]:
    """Gate and up of all experts lie in one weight, whose adapter has the ranks of both."""
    if not block.num_experts:
        return ()
    hidden, width = architecture.hidden_size, architecture.intermediate_size
    is_adapted, bias = architecture.model_type in ADAPTED_EXPERTS, architecture.model_type in EXPERT_BIAS
    halves = _GATE_AND_UP if architecture.gated_mlp else _GATE_AND_UP[1:]
    up_rank = sum(_rank(settings, *names) for names in halves) if is_adapted else 0
    down_rank = _rank(settings, *_DOWN) if is_adapted else 0
    return (
        Matrix("gate_up_proj", hidden, len(halves) * width, up_rank, block.num_experts, bias),
        Matrix("down_proj", width, hidden, down_rank, block.num_experts, bias),
    )


def _rank(settings: TrainingSettings, *names: str) -> int:
    """Rank of the adapter of a matrix with one of `names`; 0 without one."""
    targets = settings.lora_targets
    is_adapted = targets is None or any(name in targets for name in names)
    return settings.lora_r if settings.method == "lora" and is_adapted else 0


def lora_params(architecture: Architecture, block: Block, settings: TrainingSettings) -> int:
    """Weights of a block's adapters: rank x (inputs + outputs) for each adapted matrix, each expert's included."""
    return sum(one.adapter_params for one in block_matrices(architecture, block, settings).every())
