"""Kernels of the LM head and its loss for one microbatch, counted as `model/head.py` launches them.

Of each logit: cast to float32, log-softmax; its exponential, scaled, both in place, and cast back. A trained head adds
each chunk's gradient to its sum.
"""

from __future__ import annotations

from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.tally import EXACT_BYTES, PassWork, Tally
from roundpipe_cli.costs.training import TrainingSettings


def head_work(architecture: Architecture, settings: TrainingSettings) -> tuple[PassWork, PassWork]:
    """Forward and backward, all tokens being trained."""
    tally = Tally(architecture.hidden_size, settings)
    tokens, hidden, vocabulary, size = tally.tokens, architecture.hidden_size, architecture.vocab_size, tally.size
    chunk = min(tokens, settings.head_chunk_tokens)
    cast = 0 if size == EXACT_BYTES else size + EXACT_BYTES
    tally.forward.product(tokens, hidden, vocabulary, size)
    tally.forward.moves(tokens * vocabulary * cast, tokens * vocabulary * 2 * EXACT_BYTES)
    tally.backward.moves(*[tokens * vocabulary * 2 * EXACT_BYTES] * 2, tokens * vocabulary * cast)
    tally.backward.product(tokens, vocabulary, hidden, size)
    if tally.trains:
        tally.backward.product(vocabulary, tokens, hidden, size)
        for _ in range(max(1, round(tokens / chunk))):
            tally.accumulate(vocabulary * hidden)
    return tally.forward, tally.backward
