"""Kernels that routed experts launch: router, tokens sorted by expert, grouped products, weighted sum.

transformers' `grouped_mm` implementation with the products of `kernels/grouped_mm.py`, as on cards where torch has no
kernel of its own for them. Adapters of experts: `model/grouped_experts.py`.

    T: tokens, E: experts, P: (token, expert) pairs, H: hidden size, W: an expert's width, s: bytes of a value
"""

from __future__ import annotations

from roundpipe_cli.costs.matrices import Matrix
from roundpipe_cli.costs.structure import CHOSEN_BY_LOGIT, CHOSEN_SUM_TO_ONE
from roundpipe_cli.costs.tally import EXACT_BYTES, Tally
from roundpipe_cli.costs.training import TrainingSettings

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
    _score(tally, router)
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
    if model_type in CHOSEN_SUM_TO_ONE:
        _divide_by_sum(tally, chosen * EXACT_BYTES, tokens * EXACT_BYTES)
    backward.moves(cast[1], exact, 2 * exact + chosen * (EXACT_BYTES + INDEX_BYTES), 3 * exact, cast[0])


def _divide_by_sum(tally: Tally, chosen: float, sums: float) -> None:
    """Weights of a token's experts, so that they sum to one; arguments in bytes. The gradient takes seven operators."""
    each = 2 * chosen + sums
    tally.forward.moves(chosen + sums, each)
    tally.backward.moves(each, each, 2 * chosen, 3 * chosen, each, chosen + sums, each)


def _score(tally: Tally, router: Matrix) -> None:
    """The router's product. Its adapter is added to its weight at each call."""
    tokens, inputs, outputs, size = tally.tokens, router.inputs, router.outputs, tally.size
    weight = router.params * size
    tally.forward.product(tokens, inputs, outputs, size)
    tally.backward.product(tokens, outputs, inputs, size)
    tally.sum_gradients(2)
    if tally.trains or router.rank:
        tally.backward.product(outputs, tokens, inputs, size)
    if tally.trains:
        tally.accumulate(router.params)
        if router.has_bias:
            tally.backward.moves((tokens + 1) * outputs * size)
            tally.accumulate(router.outputs)
    if router.rank:
        tally.forward.product(outputs, router.rank, inputs, size)
        tally.forward.moves(2 * weight, 3 * weight)
        tally.backward.moves(2 * weight)
        tally.backward.product(router.rank, outputs, inputs, size)
        tally.backward.product(outputs, inputs, router.rank, size)
        tally.accumulate(router.rank * router.inputs, router.rank * router.outputs)


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
        pairs * size,
        index + 3 * pairs * size,
        tally.hidden_bytes,
        2 * tally.hidden_bytes + index + of_pairs,
    )


def _grouped(tally: Tally, matrix: Matrix, pairs: float) -> None:
    """A grouped product, its adapter's share in the same kernel, and its bias, a row for each pair."""
    product, rank, size = 2 * pairs * matrix.inputs * matrix.outputs, matrix.rank, tally.size
    low, back = 2 * pairs * rank * matrix.inputs, 2 * pairs * rank * matrix.outputs
    read, made, weights = pairs * matrix.inputs * size, pairs * matrix.outputs * size, matrix.params * size
    per_token = round(pairs / tally.tokens)
    wasted = product * (1 / expert_fill(tally.settings, matrix.num_experts, per_token) - 1)
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
