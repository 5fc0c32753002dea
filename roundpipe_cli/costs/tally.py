"""Adds up what the passes over one block launch, by the operators that all blocks have: sums, norms, linear layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from roundpipe_cli.choices import PACKED_FORMATS, UNPACKED_AT_ONCE
from roundpipe_cli.costs.matrices import Matrix
from roundpipe_cli.costs.training import TrainingSettings

ACCUMULATED_BYTES = 8
"""Bytes to read and write a float32 sum of gradients."""


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
    expert_flops: float = 0.0
    """Routed experts' matrices, among them."""

    def moves(self, *traffic_bytes: float) -> None:
        """Count operators that are no products, by the bytes of each."""
        self.operators += len(traffic_bytes)
        self.traffic_bytes += sum(traffic_bytes)

    def multiplies(self, *flops: float) -> None:
        """Count products."""
        self.operators += len(flops)
        self.products += len(flops)
        self.product_flops += sum(flops)


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
        if self.trains:
            self.backward.moves(*((3 * values, values + weight) if adds_one else (2 * values + rows + weight,)))
            self.accumulate(width)

    def linear(self, matrix: Matrix) -> None:
        """A linear layer on all tokens; an adapter's products are launched beside it (`kernels/lora_linear.py`)."""
        tokens, rank = self.tokens, matrix.rank
        self.unpack(matrix)
        product = 2 * tokens * matrix.params
        self.forward.multiplies(product)
        self.backward.multiplies(product)
        if self.trains:
            self.backward.multiplies(product)
            self.accumulate(matrix.params)
            if matrix.has_bias:
                self.backward.moves((tokens + 1) * matrix.outputs * self.size)
                self.accumulate(matrix.outputs)
        if rank:
            low, back = 2 * tokens * rank * matrix.inputs, 2 * tokens * rank * matrix.outputs
            self.forward.multiplies(low, back)
            self.backward.multiplies(low, low, back, back)
            self.accumulate(rank * matrix.inputs, rank * matrix.outputs)

    def unpack(self, matrix: Matrix) -> None:
        """Make a packed weight whole, forward and once more in backward."""
        packed, kind = self.settings.packed_bytes_per_param, self.settings.packed_as
        if not packed or kind is None:
            return
        is_cut = PACKED_FORMATS[kind].needs_bitsandbytes
        pieces = -(-matrix.params // UNPACKED_AT_ONCE) if is_cut else 1
        whole = matrix.params * self.size
        once = [(matrix.params * packed + whole) / pieces] * pieces
        once += [2 * whole] * (PACKED_FORMATS[kind].passes - 1)
        once += [2 * whole / pieces] * (pieces if pieces > 1 else 0)
        self.forward.moves(*once)
        self.backward.moves(*once)
