"""Adds up what the passes over one block launch, by the operators that all blocks have: sums, norms, linear layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from roundpipe_cli.choices import PACKED_FORMATS, UNPACKED_AT_ONCE
from roundpipe_cli.costs.matrices import Matrix
from roundpipe_cli.costs.training import TrainingSettings

ACCUMULATED_BYTES = 8
"""Bytes to read and write a float32 sum of gradients."""
EXACT_BYTES = 4
"""Size of a float32."""
TILE = 64
"""Rows and columns of a product's result that are computed together, at least: of narrow ones a part is wasted."""


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product, as a GPU has to compute it."""

    flops: float
    """With what is wasted in tiles that are partly empty."""
    traffic_bytes: float
    """Both factors and the result: what a narrow product waits for."""


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
        self.shapes.append(Product(2 * _tiled(rows) * inner * _tiled(columns), traffic_bytes))

    def grouped_product(self, flops: float, wasted: float, traffic_bytes: float) -> None:
        """Count a product with a matrix for each expert.

        Args:
            wasted: FLOPs in tiles that are partly empty.
        """
        self._multiplies(flops)
        self.shapes.append(Product(flops + wasted, traffic_bytes))

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
        self.backward.library_bytes += count * (16 * EXACT_BYTES + casts + self.size)  # nine operators in place of one
        if self.trains:
            self.backward.moves(*((3 * values, values + weight) if adds_one else (2 * values + rows + weight,)))
            self.accumulate(width)

    def linear(self, matrix: Matrix) -> None:
        """A linear layer on all tokens; an adapter's products are launched beside it (`kernels/lora_linear.py`)."""
        tokens, rank = self.tokens, matrix.rank
        inputs, outputs, size = matrix.inputs, matrix.outputs, self.size
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
        for one in (self.forward, self.backward):
            one.moves(*once)
            one.unpacked_bytes += sum(once)
