"""What one block launches for one microbatch, counted from the model's figures: no torch, no device.

The counterpart of `model/block_launches.py`, which counts the same on meta tensors as it is dispatched and is the
truth: `scripts/plan_ledger.py` prints both side by side, and a test holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe_cli.costs.models import Architecture, Block
from roundpipe_cli.costs.training import TrainingSettings


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of one pass over a block."""

    operators: float = 0.0
    """Dispatched, those that write memory; each is one kernel."""
    products: float = 0.0
    """Matrix products and attention among them."""
    traffic_bytes: float = 0.0
    """Read and written by all that are no products; 0: not counted."""
    product_flops: float = 0.0
    """Of matrix products and attention."""
    expert_flops: float = 0.0
    """Of routed experts' matrices, among them."""


@dataclass(frozen=True, slots=True)
class BlockWork:
    """Passes over one block for one microbatch; a recompute is a forward once more."""

    forward: Work
    backward: Work


def attended_tokens(max_seq_length: int, window: int | None) -> float:
    """Average context of a token of a full causal sequence, cut to the last `window` tokens."""
    if window is None or window >= max_seq_length:
        return max_seq_length / 2
    return window - window * window / (2 * max_seq_length)


def lora_params(architecture: Architecture, block: Block, settings: TrainingSettings) -> int:
    """Weights of a block's adapters: r x (inputs + outputs) for each adapted matrix, each expert's included.

    Fused experts hold gate and up in one matrix of twice the width, which gets one adapter.
    """
    hidden, width = architecture.hidden_size, architecture.intermediate_size
    query = architecture.num_attention_heads * architecture.head_dim
    key_value = architecture.num_key_value_heads * architecture.head_dim
    sums = {
        "q_proj": hidden + query,
        "k_proj": hidden + key_value,
        "v_proj": hidden + key_value,
        "o_proj": query + hidden,
    }
    if block.num_experts:
        sums["gate_up_proj"] = block.num_experts * (hidden + 2 * width)
        sums["down_proj"] = block.num_experts * (width + hidden)
    else:
        names = ("gate_proj", "up_proj", "down_proj") if architecture.gated_mlp else ("up_proj", "down_proj")
        sums |= dict.fromkeys(names, hidden + width)
    targets = settings.lora_targets
    return settings.lora_r * sum(size for name, size in sums.items() if targets is None or name in targets)


def block_work(architecture: Architecture, block: Block, settings: TrainingSettings) -> BlockWork:
    """Counts of a block for one microbatch of `settings`.

    An eager block of transformers launches about 45 operators forward; norms of q and k add 12, grouped experts 30, an
    adapter 4. Backward launches twice as many.
    """
    tokens = settings.tokens_per_microbatch
    query = architecture.num_attention_heads * architecture.head_dim
    attention = 4 * query * attended_tokens(settings.max_seq_length, block.window) * tokens
    linear = 2 * tokens * block.active_linear_params
    experts = 2 * tokens * block.active_mlp_params if block.num_experts else 0.0
    is_lora = settings.method == "lora"
    active = architecture.num_experts_per_tok / block.num_experts if block.num_experts else 1.0
    adapters = 2 * tokens * active * lora_params(architecture, block, settings) if is_lora else 0.0
    operators = 45 + (12 if architecture.qk_norm else 0) + (30 if block.num_experts else 0)
    if is_lora:
        operators += 4 * (7 if architecture.gated_mlp and not block.num_experts else 6)
    twice = 1 if is_lora else 2
    return BlockWork(
        Work(operators, product_flops=linear + attention + adapters, expert_flops=experts),
        Work(
            2 * operators,
            product_flops=twice * linear + 2.5 * attention + 2 * adapters,
            expert_flops=twice * experts,
        ),
    )
