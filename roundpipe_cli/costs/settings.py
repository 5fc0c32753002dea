"""A recipe's settings that decide costs and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from roundpipe_cli.choices import PACKED_FORMATS, OptimizerName, PackedName
from roundpipe_cli.costs.models import Block

LOGITS_AT_ONCE = 2**27


def head_chunk_tokens(given: int | None, vocab_size: int) -> int:
    """Tokens for which the LM head computes logits at once: as given, or about `LOGITS_AT_ONCE` logits. A rule of the
    vocabulary alone: with one of the card's memory other cards would compute other bits."""
    return given or max(256, min(1024, 2 ** round(math.log2(LOGITS_AT_ONCE / max(1, vocab_size)))))


DType = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """A recipe's settings for costs and memory. Sequences are counted as full: `max_seq_length` tokens each."""

    max_seq_length: int
    micro_batch_size: float = 1
    sequences_per_row: int = 1
    """Sequences of a row: 2 for pairs of answers."""
    scores_answers: bool = False
    """The loss is of whole answers: the head looks at a microbatch twice, and never writes over its logits."""
    teacher_tokens: int = 0
    """Tokens of each target of which a teacher's figures are read; the head then never writes over its logits."""
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
    flash_chunks: bool = False
    """Chunks attend without a mask, by variable-length attention; `case_of` knows of model and machine."""

    @property
    def tokens_per_microbatch(self) -> float:
        return self.micro_batch_size * self.sequences_per_row * self.max_seq_length / self.sequence_chunks

    @property
    def num_sequences(self) -> int:
        """Sequences of a step, divided by `micro_batch_size`."""
        return self.num_microbatches // self.sequence_chunks

    @property
    def tokens_of_sequences(self) -> float:
        """Tokens of all sequences of a microbatch, other chunks' included."""
        return self.tokens_per_microbatch * self.sequence_chunks

    @property
    def tokens_per_mlp_call(self) -> float:
        """Tokens of one call of a block's feed-forward part."""
        return min(self.tokens_per_microbatch, self.mlp_chunk_tokens or self.tokens_per_microbatch)

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def packed_params(self, block: Block) -> int:
        """Weights of a block that lie packed; norms, biases and routers, which do not, are counted too."""
        if self.packed_as is None or not self.packed_bytes_per_param or not block.active_linear_params:
            return 0
        if PACKED_FORMATS[self.packed_as].experts_only:
            return block.mlp_params if block.num_experts else 0
        return block.params

    def frozen_bytes(self, block: Block) -> float:
        """Bytes of a block's weights that are not trained."""
        packed = self.packed_params(block)
        return packed * self.packed_bytes_per_param + (block.params - packed) * self.dtype_bytes

    @property
    def packed_bytes_per_param(self) -> float:
        """Bytes of each weight of a packed matrix; 0 where nothing is packed."""
        if self.method == "full" or self.packed_as is None:
            return 0.0
        return PACKED_FORMATS[self.packed_as].bytes_per_param

    @property
    def unpacking_bytes_per_param(self) -> float:
        """Bytes of a GPU's memory that unpacking a weight to 16 bit reads and writes; 0 where it is not packed."""
        if not self.packed_bytes_per_param or self.packed_as is None:
            return 0.0
        return self.packed_bytes_per_param + 4 * PACKED_FORMATS[self.packed_as].passes - 2
