"""Kernels that one block launches for one microbatch, counted from the model's figures: no torch, no device.

The counterpart of `tests/support/launches.py`, which counts the same on meta tensors as it is dispatched and is the
truth: `scripts/plan_ledger.py` prints both side by side, and a test holds them together. Counted are the fused
operators that `kernels: auto` takes on a GPU, and our Triton kernels for experts. Dropout is not counted.
"""

from __future__ import annotations

from roundpipe_cli.costs.expert_work import compute_experts, route
from roundpipe_cli.costs.matrices import BlockMatrices, Matrix, block_matrices
from roundpipe_cli.costs.models import Architecture, Block
from roundpipe_cli.costs.structure import HALF_ANGLES, NORMS_AROUND_ZERO, UNTURNED
from roundpipe_cli.costs.tally import Tally
from roundpipe_cli.costs.training import TrainingSettings

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward, of its forward's: the scores again, and four products (arXiv 2205.14135)."""
STEP = 8
"""Attention with sinks fills widths and keys up to multiples of it, by at least one: `model/sink_attention.py`."""


def attended_tokens(max_seq_length: int, window: int | None) -> float:
    """Average context of a token of a full causal sequence, cut to the last `window` tokens."""
    if window is None or window >= max_seq_length:
        return max_seq_length / 2
    return window - window * window / (2 * max_seq_length)


def has_mask(architecture: Architecture, block: Block, max_seq_length: int) -> bool:
    """Whether attention gets a mask of all pairs of tokens, so that no kernel skips hidden pairs."""
    return architecture.has_sinks or (block.window is not None and block.window <= max_seq_length)


def block_work(architecture: Architecture, block: Block, settings: TrainingSettings) -> Tally:
    """Counts of a block for one microbatch of `settings`."""
    tally = Tally(architecture.hidden_size, settings)
    matrices = block_matrices(architecture, block, settings)
    _hidden_norm(tally, architecture)
    if matrices.query.params:
        _attention(tally, architecture, block, matrices)
    _after(tally, architecture)
    _hidden_norm(tally, architecture)
    if matrices.dense:
        _dense(tally, matrices.dense)
    if matrices.router is not None:
        per_token = architecture.num_experts_per_tok
        route(tally, matrices.router, per_token, architecture.model_type)
        compute_experts(tally, matrices.experts, per_token, clamps_gates=architecture.clamps_gates)
        if matrices.dense:  # shared experts
            tally.residual()
    _after(tally, architecture)
    return tally


def _after(tally: Tally, architecture: Architecture) -> None:
    """Add a half's result to the hidden states, in some models behind a norm of its own."""
    if architecture.four_norms:
        _hidden_norm(tally, architecture)
    tally.residual()


def _hidden_norm(tally: Tally, architecture: Architecture) -> None:
    tally.norm(architecture.hidden_size, adds_one=architecture.model_type in NORMS_AROUND_ZERO)


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


def _attend(tally: Tally, architecture: Architecture, block: Block) -> None:
    """Attention itself. Without a mask a kernel skips half of the pairs, and takes keys that heads share."""
    query = architecture.num_attention_heads * architecture.head_dim
    shared = architecture.num_key_value_heads * architecture.head_dim
    length, chunks, size = tally.settings.max_seq_length, tally.settings.sequence_chunks, tally.size
    keys = length * (chunks + 1) / (2 * chunks)
    of_query, of_shared = tally.tokens * query * size, tally.tokens * shared * size
    if not has_mask(architecture, block, length):
        _products(tally, 4 * query * attended_tokens(length, None))
    else:
        repeat = [of_query + of_shared] * (2 if shared < query else 0)
        is_copied = architecture.has_sinks or 1 < architecture.num_key_value_heads < architecture.num_attention_heads
        if is_copied:  # for each head that shares them; a single one is seen by all without a copy
            tally.forward.moves(*repeat)
        if architecture.has_sinks:
            _attend_with_sinks(tally, architecture, keys)
        else:
            tally.forward.moves(size, size, tally.tokens * keys * (1 + size))  # the mask is made additive
            _products(tally, 4 * query * keys)
        tally.backward.moves(*repeat)
        if is_copied:  # gradients come head by head, and are laid out for the products
            tally.backward.moves(*[2 * of_shared] * (1 if architecture.qk_norm else 2))
    tally.forward.moves(2 * of_query)  # heads side by side, for the next product


def _products(tally: Tally, flops_per_token: float) -> None:
    """Scores and values of attention."""
    tally.forward.attends(tally.tokens * flops_per_token)
    tally.backward.attends(ATTENTION_BACKWARD * tally.tokens * flops_per_token)


def _attend_with_sinks(tally: Tally, architecture: Architecture, keys: float) -> None:
    """Attention whose heads have a number that takes part in the softmax: it is one more key, so queries, keys and
    values get wider and longer (`model/sink_attention.py`). The mask has a byte for each pair."""
    heads, width, size, tokens = architecture.num_attention_heads, architecture.head_dim, tally.size, tally.tokens
    wide, more = width + STEP - width % STEP, STEP - keys % STEP
    times = tokens / keys
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
