"""Settings of an engine and of a step, apart from the model and its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roundpipe_cli.costs.cost import NUM_SLOTS
from roundpipe_cli.model.fused import FusedOps
from roundpipe_cli.model.head import TokenLoss

OnGradient = Callable[[int, Callable[[], float]], None]


@dataclass(frozen=True)
class GradientOptions:
    """How a step's gradients are scaled, and who is notified of them."""

    loss_scale: float = 1.0
    """The loss is multiplied by this before differentiation (float16), and so are the gradient sums."""
    on_complete: OnGradient | None = None
    """Called by the workers' threads for each layer whose gradient is complete on the host and whose weights the step
    no longer reads; with a function that returns the gradient's sum of squares."""
    kept: frozenset[int] = frozenset()
    """Layers whose sums in the store stay as they are: an earlier try of the step has made them, and others have them.
    Not the late ones."""


@dataclass(frozen=True)
class EngineOptions:
    """Settings of an engine for its whole life."""

    seed: int = 0
    """Seed of dropout masks and of all else that a model draws at random in training."""
    head_chunk_tokens: int = 1024
    """Target tokens per chunk of the LM head; part of what fixes a run's bits."""
    mlp_chunk_tokens: int | None = None
    """Tokens per chunk of the blocks' feed-forward part, which is computed again in backward; None: all at once."""
    fused: FusedOps | None = None
    """Modules that compute by fused operators, from `find_fused_ops`; None: all use their own code, experts too."""
    label_smoothing: float = 0.0
    """Label smoothing of the training loss; scores are without it."""
    own_loss: TokenLoss | None = None
    """Training loss in place of cross entropy, called by the workers' threads; scores are without it."""
    recompute: str = "stage"
    """`stage` (activations of one stage and microbatch at a time) or `layer` (of one layer)."""
    unread: Mapping[int, Sequence[str]] | None = None
    """Per block, modules whose products a recompute leaves out, from `find_unread`."""
    attends_in_rows: bool = False
    """Packed rows are separated by their positions instead of a mask of all pairs of tokens (`can_attend_in_rows`)."""
    keep_inputs: bool = False
    """Keep the input of every layer after such a block on the host, so that its product can be left out within a stage
    too, not only at its end."""
    keep_blocks: int = 0
    """Blocks, counted from the last, whose activations stay on the device from forward to backward where both run on
    the same worker. Blocks with packed weights are recomputed all the same."""
    whole_per_visit: bool = False
    """Packed weights are dequantised once in a visit and held until its end, 2 bytes (in 16 bit) for each weight of a
    stage, not for each microbatch and pass. The same bits."""
    num_slots: int = NUM_SLOTS
    """Stages whose weights are on a device at once."""
    weight_cache_bytes: int = 0
    """Memory of each device for weights that stay there; see `slots.py`."""
    watchdog_s: float | None = 600.0
    """Fail after this long without progress, with all stacks on stderr; None: wait forever."""
