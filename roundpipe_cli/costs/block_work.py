"""Kernels that one block launches for one microbatch, counted from the model's figures: no torch, no device.

The counterpart of `tests/support/launches.py`, which counts the same on meta tensors as it is dispatched and is the
truth: `scripts/plan_ledger.py` prints both side by side, and a test holds them together. Counted are the fused
operators that `kernels: auto` takes on a GPU, and our Triton kernels for experts and for dropout of adapters' inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from roundpipe_cli.choices import PACKED_FORMATS, UNPACKED_AT_ONCE
from roundpipe_cli.costs.models import (
    CHOSEN_BY_LOGIT,
    CHOSEN_SUM_TO_ONE,
    EXPERT_BIAS,
    HALF_ANGLES,
    MLP_BIAS,
    NORMS_AROUND_ZERO,
    OUTPUT_BIAS,
    QKV_BIAS,
    UNTURNED,
    Architecture,
    Block,
)
from roundpipe_cli.costs.settings import TrainingSettings

# The matrices of a block: their shapes, which of them are adapted or have a bias.

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

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> Matrix:
        rank = _rank(settings, name) if inputs * outputs else 0
        return Matrix(name, inputs, outputs, rank, has_bias=bias)

    routed = _experts(architecture, block, settings)
    router = None
    if block.num_experts:
        router = Matrix("gate", hidden, block.num_experts, has_bias=model_type in EXPERT_BIAS)
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
    """Gate and up of all experts lie in one weight, which has an adapter if the recipe names both."""
    if not block.num_experts:
        return ()
    hidden, width = architecture.hidden_size, architecture.intermediate_size
    bias = architecture.model_type in EXPERT_BIAS
    halves, one = _GATE_AND_UP if architecture.gated_mlp else _GATE_AND_UP[1:], settings.expert_r
    if one is None:
        one = max(1, settings.lora_r // architecture.num_experts_per_tok)
    are_adapted = all(_rank(settings, *names, "gate_up_proj") for names in halves)
    return (
        Matrix("gate_up_proj", hidden, len(halves) * width, one * are_adapted, block.num_experts, bias),
        Matrix("down_proj", width, hidden, one * bool(_rank(settings, *_DOWN)), block.num_experts, bias),
    )


def _rank(settings: TrainingSettings, *names: str) -> int:
    """Rank of the adapter of a matrix with one of `names`; 0 without one."""
    targets = settings.lora_targets
    is_adapted = targets is None or any(name in targets for name in names)
    return settings.lora_r if settings.method == "lora" and is_adapted else 0


def lora_params(architecture: Architecture, block: Block, settings: TrainingSettings) -> int:
    """Weights of a block's adapters: rank x (inputs + outputs) for each adapted matrix, each expert's included."""
    return sum(one.adapter_params for one in block_matrices(architecture, block, settings).every())


# Adds up what the passes over one block launch, by the operators that all blocks have: sums, norms, linear layers.

ACCUMULATED_BYTES = 8
"""Bytes to read and write a float32 sum of gradients."""
EXACT_BYTES, MASK_BYTES = 4, 1
"""Sizes of a float32 and a bool."""
TILE = 64
"""Rows and columns of a product's result that are computed together, at least: of narrow ones a part is wasted."""


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product, as a GPU has to compute it."""

    flops: float
    """With what is wasted in tiles that are partly empty."""
    traffic_bytes: float
    """Bytes of both factors and the result: what a narrow product waits for."""
    useful_flops: float
    """Without what is wasted."""
    is_grouped: bool = False
    """With a matrix for each expert: such kernels add up in float32 always."""


@dataclass(slots=True)
class PassWork:
    """Counts of one pass over a block."""

    operators: int = 0
    """Dispatched, those that write memory; each is one kernel."""
    products: int = 0
    """Matrix products and attention among the launches."""
    traffic_bytes: float = 0.0
    """Bytes that operators other than products read and write, each tensor of an operator once."""
    product_flops: float = 0.0
    """Matrix products and attention."""
    attention_flops: float = 0.0
    """Attention, among them."""
    shapes: list[Product] = field(default_factory=list)
    """Products without attention."""
    unpacked_bytes: float = 0.0
    """Read and written to make packed weights whole; part of `traffic_bytes`."""
    library_bytes: float = 0.0
    """Moved by transformers' and PEFT's own operators beyond `traffic_bytes`, in place of the fused ones."""
    library_operators: int = 0
    """Number of those operators."""

    def issued(self, *, fused: bool) -> int:
        """Operators that Python issues, with ours or with the libraries' own."""
        return self.operators + (0 if fused else self.library_operators)

    def moves(self, *traffic_bytes: float) -> None:
        """Count operators that are no products, by the bytes of each."""
        self.operators += len(traffic_bytes)
        self.traffic_bytes += sum(traffic_bytes)

    def attends(self, flops: float) -> None:
        """Count attention of all heads."""
        self._multiplies(flops)
        self.attention_flops += flops

    def product(self, rows: float, inner: float, columns: float, size: int) -> None:
        """Count a product of [rows, inner] and [inner, columns], of values of `size` bytes."""
        self._multiplies(2 * rows * inner * columns)
        traffic_bytes = size * (rows * inner + inner * columns + rows * columns)
        useful = 2 * rows * inner * columns
        self.shapes.append(Product(2 * _tiled(rows) * inner * _tiled(columns), traffic_bytes, useful))

    def grouped_product(self, flops: float, wasted: float, traffic_bytes: float) -> None:
        """Count a product with a matrix for each expert.

        Args:
            wasted: FLOPs in tiles that are partly empty.
        """
        self._multiplies(flops)
        self.shapes.append(Product(flops + wasted, traffic_bytes, flops, is_grouped=True))

    def _multiplies(self, flops: float) -> None:
        self.operators += 1
        self.products += 1
        self.product_flops += flops


def _tiled(length: float) -> float:
    return TILE * math.ceil(length / TILE)


@dataclass(slots=True)
class Tally:
    """The passes over one block for one microbatch."""

    hidden_size: int
    settings: TrainingSettings
    forward: PassWork = field(default_factory=PassWork)
    """A recompute is a forward once more."""
    backward: PassWork = field(default_factory=PassWork)

    @property
    def tokens(self) -> float:
        return self.settings.tokens_per_microbatch

    @property
    def size(self) -> int:
        """Bytes of a value."""
        return self.settings.dtype_bytes

    @property
    def trains(self) -> bool:
        """Whether the block's own weights are trained."""
        return self.settings.method == "full"

    @property
    def hidden_bytes(self) -> float:
        """Bytes of hidden states."""
        return self.tokens * self.hidden_size * self.size

    def residual(self) -> None:
        """Count an addition to the hidden states; backward adds both gradients."""
        self.forward.moves(3 * self.hidden_bytes)
        self.sum_gradients(2)

    def sum_gradients(self, num_uses: int) -> None:
        """Add the gradients of hidden states that are used so often."""
        self.backward.moves(*[3 * self.hidden_bytes] * (num_uses - 1))

    def accumulate(self, *params: float) -> None:
        """Add gradients of weights to their sums over microbatches."""
        self.backward.moves(*(count * (self.size + ACCUMULATED_BYTES) for count in params))

    def norm(self, columns: int, width: int | None = None, *, adds_one: bool) -> None:
        """RMS norm of [T, columns], in rows of `width`: one kernel each way, another for the weight's gradient. Where
        the factor is 1 + weight (`adds_one`), it is an operator of its own."""
        width = width or columns
        values, rows = self.tokens * columns * self.size, 4 * self.tokens * columns / width
        weight = width * self.size
        if adds_one:
            self.forward.moves(2 * values + rows, 2 * values + weight)
            self.backward.moves(2 * values + weight, 3 * values + rows)
        else:
            self.forward.moves(2 * values + rows + weight)
            self.backward.moves(3 * values + rows + weight)
        count, casts = self.tokens * columns, 0 if self.size == EXACT_BYTES else 2 * (self.size + EXACT_BYTES)
        self.forward.library_bytes += count * (5 * EXACT_BYTES + casts)  # power, mean, product, and casts around them
        self.backward.library_bytes += count * (16 * EXACT_BYTES + casts + self.size)
        self.forward.library_operators += 7 + adds_one
        self.backward.library_operators += 13 + self.trains - adds_one
        if self.trains:
            self.backward.moves(*((3 * values, values + weight) if adds_one else (2 * values + rows + weight,)))
            self.accumulate(width)

    def linear(self, matrix: Matrix, *, is_packed: bool = True) -> None:
        """A linear layer on all tokens; an adapter's products are launched beside it (`kernels/lora_linear.py`)."""
        tokens, rank = self.tokens, matrix.rank
        inputs, outputs, size = matrix.inputs, matrix.outputs, self.size
        if is_packed:
            self.unpack(matrix)
        self.forward.product(tokens, inputs, outputs, size)
        self.backward.product(tokens, outputs, inputs, size)
        if self.trains:
            self.backward.product(outputs, tokens, inputs, size)
            self.accumulate(matrix.params)
            if matrix.has_bias:
                self.backward.moves((tokens + 1) * matrix.outputs * self.size)
                self.accumulate(matrix.outputs)
        if rank:
            self.forward.product(tokens, inputs, rank, size)
            self.forward.product(tokens, rank, outputs, size)
            self.backward.product(tokens, outputs, rank, size)
            self.backward.product(tokens, rank, inputs, size)
            self.backward.product(rank, tokens, inputs, size)
            self.backward.product(outputs, tokens, rank, size)
            self.accumulate(rank * inputs, rank * outputs)
            self.forward.library_bytes += 5 * tokens * outputs * size  # scale, and add to the product
            self.backward.library_bytes += tokens * (2 * outputs + 3 * inputs) * size
            self.forward.library_operators += 2
            self.backward.library_operators += 2
        if rank and self.settings.lora_dropout:  # no mask is written; its backward drops the inputs again
            self.forward.moves(2 * tokens * inputs * size)
            self.backward.moves(5 * tokens * inputs * size)
            self.forward.library_bytes += tokens * inputs * (2 * size + 2 * MASK_BYTES)
            self.backward.library_bytes += tokens * inputs * (MASK_BYTES - size)
            self.forward.library_operators += 2
            self.backward.library_operators += 1

    def unpack(self, matrix: Matrix) -> None:
        """Make a packed weight whole, forward and once more in backward."""
        packed, kind = self.settings.packed_bytes_per_param, self.settings.packed_as
        if not packed or kind is None:
            return
        if PACKED_FORMATS[kind].experts_only and not matrix.num_experts:
            return
        is_cut = PACKED_FORMATS[kind].needs_bitsandbytes
        pieces = -(-matrix.params // UNPACKED_AT_ONCE) if is_cut else 1
        whole = matrix.params * self.size
        once = [(matrix.params * packed + whole) / pieces] * pieces
        once += [2 * whole] * (PACKED_FORMATS[kind].passes - 1)
        once += [2 * whole / pieces] * (pieces if pieces > 1 else 0)
        for one in (self.forward, self.backward):
            one.moves(*once)
            one.unpacked_bytes += sum(once)


# Kernels that routed experts launch: router, tokens sorted by expert, grouped products, weighted sum.
#
# transformers' `grouped_mm` implementation with the products of `kernels/grouped_mm.py`, as on cards where torch has no
# kernel of its own for them. Adapters of experts: `model/expert_lora.py`.
#
#     T: tokens, E: experts, P: (token, expert) pairs, H: hidden size, W: an expert's width, s: bytes of a value

INDEX_BYTES, OFFSET_BYTES = 8, 4
"""Sizes of an int64 and an int32."""
EXPERT_TILE_TOKENS = 64
"""Half of a tile of a grouped product: what an expert's last tile wastes on average."""


def expert_fill(settings: TrainingSettings, num_experts: int, per_token: int) -> float:
    """Useful share of the experts' tiles."""
    per_expert = settings.tokens_per_mlp_call * per_token / num_experts
    return per_expert / (per_expert + EXPERT_TILE_TOKENS)


def route(tally: Tally, router: Matrix, per_token: int, model_type: str) -> None:
    """Scores of all experts, the chosen ones of each token and their weights."""
    tally.linear(router, is_packed=False)
    tally.sum_gradients(2)
    tokens, size = tally.tokens, tally.size
    scores, chosen = tokens * router.outputs, tokens * per_token
    forward, backward = tally.forward, tally.backward
    if model_type in CHOSEN_BY_LOGIT:
        forward.moves(scores * size + chosen * (size + INDEX_BYTES), 2 * chosen * size)
        backward.moves(3 * chosen * size, scores * size, 2 * scores * size + chosen * (size + INDEX_BYTES))
        return
    exact = scores * EXACT_BYTES
    cast = scores * (size + EXACT_BYTES), chosen * (size + EXACT_BYTES)
    forward.moves(cast[0], 2 * exact, exact + chosen * (EXACT_BYTES + INDEX_BYTES), cast[1])
    if model_type in CHOSEN_SUM_TO_ONE:  # a division, whose gradient takes seven operators
        weights, sums = chosen * EXACT_BYTES, tokens * EXACT_BYTES
        each = 2 * weights + sums
        forward.moves(weights + sums, each)
        backward.moves(each, each, 2 * weights, 3 * weights, each, weights + sums, each)
    backward.moves(cast[1], exact, 2 * exact + chosen * (EXACT_BYTES + INDEX_BYTES), 3 * exact, cast[0])


def compute_experts(tally: Tally, matrices: tuple[Matrix, ...], per_token: int, *, clamps_gates: bool) -> None:
    """Sort pairs by expert, multiply, and add up each token's results."""
    up, down = matrices
    pairs, size = tally.tokens * per_token, tally.size
    of_pairs = pairs * tally.hidden_size * size
    _gather(tally, up.num_experts, pairs, of_pairs)
    _grouped(tally, up, pairs)
    _gate(tally, up, pairs * down.inputs * size, clamps_gates=clamps_gates)
    _grouped(tally, down, pairs)
    _combine(tally, pairs, of_pairs)


def _gather(tally: Tally, num_experts: int, pairs: float, of_pairs: float) -> None:
    """Sort pairs by expert, copy each one's hidden states, count those of each expert; sum the gradients of a token."""
    size, index, offset = tally.size, pairs * INDEX_BYTES, pairs * OFFSET_BYTES
    tally.forward.moves(
        3 * index,
        2 * index,
        tally.hidden_bytes + index + of_pairs,
        2 * pairs * size + index,
        index + offset,
        offset + num_experts * OFFSET_BYTES,
        2 * num_experts * OFFSET_BYTES,
    )
    tally.backward.moves(
        pairs * size, index + 3 * pairs * size, tally.hidden_bytes, 2 * tally.hidden_bytes + index + of_pairs
    )


def _grouped(tally: Tally, matrix: Matrix, pairs: float) -> None:
    """A grouped product, its adapter's share in the same kernel, and its bias, a row for each pair."""
    product, rank, size = 2 * pairs * matrix.inputs * matrix.outputs, matrix.rank, tally.size
    low, back = 2 * pairs * rank * matrix.inputs, 2 * pairs * rank * matrix.outputs
    read, made, weights = pairs * matrix.inputs * size, pairs * matrix.outputs * size, matrix.params * size
    wasted = product * (1 / expert_fill(tally.settings, matrix.num_experts, round(pairs / tally.tokens)) - 1)
    tally.unpack(matrix)
    if rank:
        copied = 2 * matrix.num_experts * rank * matrix.outputs * size  # B, which PEFT keeps in another order
        tally.forward.grouped_product(low, 0, read)
        tally.forward.grouped_product(product + back, wasted, read + weights + made)
        tally.forward.moves(copied)
        tally.backward.grouped_product(back, 0, made)
        tally.backward.grouped_product(product + low, wasted, read + weights + made)
        tally.backward.grouped_product(low, 0, read)
        tally.backward.grouped_product(back, 0, made)
        tally.backward.moves(copied)
        tally.accumulate(matrix.num_experts * rank * matrix.inputs, matrix.num_experts * rank * matrix.outputs)
    else:
        tally.forward.grouped_product(product, wasted, read + weights + made)
        tally.backward.grouped_product(product, wasted, read + weights + made)
    if tally.trains:
        tally.backward.grouped_product(product, wasted, read + weights + made)
        tally.accumulate(matrix.params)
    others = matrix.num_experts - 1  # without our kernels, a product for each expert
    tally.forward.library_operators += 3 * others + 4 if rank else others
    tally.backward.library_operators += 5 * others + 5 if rank else (1 + tally.trains) * others
    if matrix.has_bias:
        _add_bias(tally, matrix, pairs)


def _add_bias(tally: Tally, matrix: Matrix, pairs: float) -> None:
    biases, values = (count * matrix.outputs * tally.size for count in (matrix.num_experts, pairs))
    index = pairs * INDEX_BYTES
    tally.forward.moves(biases + index + values, 3 * values)
    if tally.trains:
        tally.backward.moves(biases, 2 * biases + index + values)
        tally.accumulate(matrix.num_experts * matrix.outputs)


def _gate(tally: Tally, up: Matrix, inner: float, *, clamps_gates: bool) -> None:
    """The activation of one half times the other, `inner` bytes each; clamped ones are `(up + 1) gate sigmoid(...)`."""
    if not clamps_gates:
        tally.forward.moves(2 * inner, 3 * inner)
        tally.backward.moves(3 * inner, 3 * inner, 3 * inner, 4 * inner)  # both products, activation, halves joined
        return
    bools = inner / tally.size
    tally.forward.moves(*[2 * inner] * 4, 3 * inner, 2 * inner, 3 * inner)
    tally.backward.moves(*[3 * inner] * 5, 2 * inner, 3 * inner)
    tally.backward.moves(tally.size, inner + bools, inner + bools, 3 * bools, 2 * inner + bools)  # of both limits
    tally.backward.moves(tally.size, inner + bools, 2 * inner + bools)  # of one
    tally.backward.moves(3 * inner, 3 * inner, 6 * inner)  # halves joined


def _combine(tally: Tally, pairs: float, of_pairs: float) -> None:
    """Weigh each pair's result, undo the order, add up those of a token."""
    index, weights = pairs * INDEX_BYTES, pairs * tally.size
    tally.forward.moves(2 * of_pairs + weights, index, 4 * index, 2 * of_pairs + index, of_pairs + tally.hidden_bytes)
    tally.backward.moves(
        tally.hidden_bytes + of_pairs,
        of_pairs,
        3 * of_pairs + index,
        3 * of_pairs,
        2 * of_pairs + weights,
        of_pairs + weights,
    )


ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward, of its forward's: the scores again, and four products (arXiv 2205.14135)."""
STEP = 8
"""Attention with sinks fills widths and keys up to multiples of it, by at least one: `model/attention.py`."""


def attended_tokens(max_seq_length: int, window: int | None) -> float:
    """Average context of a token of a full causal sequence, cut to the last `window` tokens."""
    if window is None or window >= max_seq_length:
        return max_seq_length / 2
    return window - window * window / (2 * max_seq_length)


def has_mask(architecture: Architecture, block: Block, max_seq_length: int) -> bool:
    """Whether attention gets a mask of all pairs of tokens, so that no kernel skips hidden pairs."""
    return architecture.has_sinks or (block.window is not None and block.window <= max_seq_length)


MAX_FLASH_WIDTH = 256
"""The widest heads that flash attention takes."""
PACKED_FLASH_WIDTHS = 8
"""Widths of heads are multiples of this for rows of other lengths; torch pads heads for the usual kernel only."""
BLOCK_TOKENS = 256
"""Least queries of a block in a row that is longer than its window."""


def is_masked(architecture: Architecture, block: Block, settings: TrainingSettings) -> bool:
    """Whether attention gets a mask beside the causal one: of chunks unless a kernel takes other ends of queries."""
    if settings.sequence_chunks > 1:
        return not settings.flash_chunks
    return has_mask(architecture, block, settings.max_seq_length)


def masked_keys(block: Block, settings: TrainingSettings) -> tuple[float, float]:
    """(keys of each query's mask, their copies for each token of a microbatch), for the last chunk. Chunks go through a
    window in blocks of queries."""
    length, times = settings.max_seq_length, settings.sequence_chunks
    if times == 1 or block.window is None or not settings.fused:
        return length, times
    queries = min(max(block.window, BLOCK_TOKENS), length / times)
    seen = min(queries + block.window, length)
    return seen, seen / queries


def block_work(architecture: Architecture, block: Block, settings: TrainingSettings) -> Tally:
    """Counts of a block for one microbatch of `settings`."""
    tally = Tally(architecture.hidden_size, settings)
    matrices = block_matrices(architecture, block, settings)

    def norm() -> None:
        tally.norm(architecture.hidden_size, adds_one=architecture.model_type in NORMS_AROUND_ZERO)

    def add() -> None:
        """Add a half's result to the hidden states, in some models behind a norm of its own."""
        if architecture.four_norms:
            norm()
        tally.residual()

    norm()
    if matrices.query.params:
        _attention(tally, architecture, block, matrices)
    add()
    norm()
    if matrices.dense:
        _dense(tally, matrices.dense)
    if matrices.router is not None:
        per_token = architecture.num_experts_per_tok
        route(tally, matrices.router, per_token, architecture.model_type)
        compute_experts(tally, matrices.experts, per_token, clamps_gates=architecture.clamps_gates)
        if matrices.dense:  # shared experts
            tally.residual()
    add()
    return tally


def _attention(tally: Tally, architecture: Architecture, block: Block, matrices: BlockMatrices) -> None:
    """Projections, norms of heads, rotary embedding, attention, projection."""
    model_type, width = architecture.model_type, architecture.head_dim
    for matrix in (matrices.query, matrices.key, matrices.value):
        tally.linear(matrix)
    tally.sum_gradients(3)
    for matrix in (matrices.query, matrices.key):
        columns = matrix.outputs
        if architecture.qk_norm:
            rows = columns if model_type.startswith("olmo") else width
            tally.norm(columns, rows, adds_one=model_type in NORMS_AROUND_ZERO)
        if model_type not in UNTURNED:
            _rotate(tally, columns, width, has_half=model_type in HALF_ANGLES)
    _attend(tally, architecture, block)
    tally.linear(matrices.output)


def _rotate(tally: Tally, columns: int, width: int, *, has_half: bool) -> None:
    """Turn queries or keys: one product and, for each half of a head, one sum of products (`kernels/rotary.py`)."""
    values, angles = tally.tokens * columns * tally.size, tally.tokens * width * tally.size
    for one in (tally.forward, tally.backward):
        one.moves(2 * values + (angles / 2 if has_half else angles), *[1.5 * values + angles / 2] * 2)
    tally.forward.library_bytes += 5 * values  # halves are turned by operators of their own
    tally.backward.library_bytes += 9 * values
    tally.forward.library_operators += 2 + 2 * has_half
    tally.backward.library_operators += 5 + has_half


def _attend(tally: Tally, architecture: Architecture, block: Block) -> None:
    """Attention itself. Without a mask a kernel skips half of the pairs, and takes keys that heads share."""
    query = architecture.num_attention_heads * architecture.head_dim
    shared = architecture.num_key_value_heads * architecture.head_dim
    length, chunks, size = tally.settings.max_seq_length, tally.settings.sequence_chunks, tally.size
    keys = min(length * (chunks + 1) / (2 * chunks), masked_keys(block, tally.settings)[0])
    times = tally.settings.tokens_of_sequences * keys / (length * tally.tokens)
    of_query, of_shared = tally.tokens * query * size, tally.tokens * shared * size
    if chunks > 1:  # keys and values behind the earlier ones; gradients of those are added up
        tally.forward.moves(*[2 * times * of_shared] * 2)
        tally.backward.moves(*[times * (of_shared + of_shared / size * ACCUMULATED_BYTES)] * 2)
    if not is_masked(architecture, block, tally.settings):
        _products(tally, 4 * query * attended_tokens(length, None if chunks == 1 else block.window))
    else:
        repeat = [times * (of_query + of_shared)] * (2 if shared < query else 0)
        is_copied = architecture.has_sinks or 1 < architecture.num_key_value_heads < architecture.num_attention_heads
        if is_copied:  # for each head that shares them; a single one is seen by all without a copy
            tally.forward.moves(*repeat)
        if architecture.has_sinks:
            _attend_with_sinks(tally, architecture, keys, times * tally.tokens / keys)
        else:
            tally.forward.moves(size, size, tally.tokens * keys * (1 + size))  # the mask is made additive
            _products(tally, 4 * query * keys)
        tally.backward.moves(*repeat)
        if is_copied:  # gradients come head by head, and are laid out for the products
            tally.backward.moves(*[2 * times * of_shared] * (1 if architecture.qk_norm else 2))
    tally.forward.moves(2 * of_query)  # heads side by side, for the next product


def _products(tally: Tally, flops_per_token: float) -> None:
    tally.forward.attends(tally.tokens * flops_per_token)
    tally.backward.attends(ATTENTION_BACKWARD * tally.tokens * flops_per_token)


def _attend_with_sinks(tally: Tally, architecture: Architecture, keys: float, times: float) -> None:
    """Attention whose heads have a number that takes part in the softmax: it is one more key, so queries, keys and
    values get wider and longer (`model/attention.py`), of so many sequences. The mask has a byte for each pair."""
    heads, width, size, tokens = architecture.num_attention_heads, architecture.head_dim, tally.size, tally.tokens
    wide, more = width + STEP - width % STEP, STEP - keys % STEP
    narrow, wider = tokens * heads * width * size, tokens * heads * wide * size
    filled = times * (keys + more) * heads * wide * size
    sink, others = heads * wide * size, times * heads * (more - 1) * wide * size
    pairs = [tokens * (keys + extra) for extra in (0, 1, more)]
    tally.forward.moves(size, (1 + STEP) * size, narrow + wider + STEP * size)
    tally.forward.moves(narrow + filled, narrow + filled, 2 * heads * size, sink + heads * size)
    tally.forward.moves(wider + sink + others + filled)
    tally.forward.moves(pairs[0] + pairs[1], pairs[1] + pairs[2], size, size, pairs[2] * (1 + size))
    _products(tally, 4 * heads * wide * (keys + more))
    tally.backward.moves(narrow + wider, others + filled, wider + filled, 3 * filled)
    tally.backward.moves(narrow + filled, narrow + filled, 2 * narrow)
    if tally.trains:
        tally.backward.moves(2 * sink, sink + heads * size, 2 * heads * size)
        tally.accumulate(heads)


def _dense(tally: Tally, matrices: tuple[Matrix, ...]) -> None:
    """Activation between two linear layers, times the gate where there is one."""
    for matrix in matrices:
        tally.linear(matrix)
    inner = tally.tokens * matrices[0].outputs * tally.size
    tally.forward.moves(2 * inner)
    tally.backward.moves(3 * inner)
    if len(matrices) == 3:
        tally.forward.moves(3 * inner)
        tally.backward.moves(3 * inner, 3 * inner)
        tally.sum_gradients(2)
