"""Bytes that a microbatch's forward keeps on a device for the backward.

They are what torch's autograd keeps for backward of the eager model of transformers, with the attention that
`finetune` has (compare arXiv 2205.05198, section 4, which counts the layers of another model).
"""

from __future__ import annotations

from roundpipe_cli.costs.block_work import has_mask
from roundpipe_cli.costs.models import Architecture, Block
from roundpipe_cli.costs.training import TrainingSettings


def activation_bytes(architecture: Architecture, block: Block, settings: TrainingSettings) -> int:
    """Bytes that autograd keeps of one block for the backward of one microbatch; see the head of this file.

    A norm keeps its input in float32 and its output (the next product's input); with trained weights also the
    normalised input. Attention keeps q, k, v, its output and that output laid out for the next product. A gated MLP
    keeps gate, activation, up and their product.
    """
    size, hidden = settings.dtype_bytes, architecture.hidden_size
    query = architecture.num_attention_heads * architecture.head_dim
    key_value = architecture.num_key_value_heads * architecture.head_dim
    per_norm = 4 + size * (2 if settings.method == "full" else 1)
    num_norms = 4 if architecture.four_norms else 2
    total = float(num_norms * per_norm * hidden)  # per token
    if architecture.qk_norm:
        total += (per_norm - size) * (query + key_value)
    total += size * (3 * query + 2 * key_value)
    width = architecture.intermediate_size
    tensors = 4 if architecture.gated_mlp else 2
    if architecture.clamps_gates:  # gate and up before and after the clamp, sigmoid, gated, product
        tensors = 7
    if block.num_experts:
        mlp = architecture.num_experts_per_tok * size * (tensors * width + 2 * hidden) + 8 * block.num_experts
    else:
        mlp = size * tensors * width
    if settings.method == "lora":
        total += 7 * size * settings.lora_r
    if settings.method == "lora" and settings.lora_dropout > 0:  # a bool mask and the masked input, for each product
        total += (1 + size) * (3 * hidden + query)
        mlp += 0 if block.num_experts else (1 + size) * (2 * hidden + width)
    activations = int(settings.tokens_per_microbatch * total + settings.tokens_per_mlp_call * mlp)
    activations += _pair_bytes(architecture, block, settings)
    gradients = 4 / size  # float32, of keys and values
    return activations + int((1 + gradients) * key_value_bytes(architecture, settings))


def _pair_bytes(architecture: Architecture, block: Block, settings: TrainingSettings) -> int:
    """Bytes that attention keeps for pairs of tokens: nothing where a fused kernel needs no mask beside the causal one.

    With one (a sliding window that sequences exceed, sinks), it keeps the mask in the dtype, and keys and values
    repeated for each head; with sinks all of them 8 wider. Without such a kernel, probabilities in float32, a copy of
    them in 16 bit for the product, and in some models capped scores.
    """
    size, heads = settings.dtype_bytes, architecture.num_attention_heads
    tokens = settings.tokens_per_microbatch
    pairs = tokens * settings.max_seq_length
    if architecture.keeps_scores:
        each = 4 + (size if size < 4 else 0) + (size if architecture.caps_scores else 0)
        return int(heads * pairs * each)
    if not has_mask(architecture, block, settings.max_seq_length):
        return 0
    repeated = 2 * (heads - architecture.num_key_value_heads) * architecture.head_dim
    wider = 4 * heads * 8 if architecture.has_sinks else 0
    return int(size * (pairs + tokens * (repeated + wider)))


def key_value_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """One block's keys and values of a whole sequence, which its chunks share; 0 where sequences are not cut."""
    if settings.sequence_chunks == 1:
        return 0
    width = 2 * architecture.num_key_value_heads * architecture.head_dim
    return int(settings.micro_batch_size * settings.max_seq_length) * width * settings.dtype_bytes


def head_chunk_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """The head's working memory, see `head_bytes`."""
    tokens, chunk = settings.tokens_per_microbatch, settings.head_chunk_tokens
    return head_bytes(tokens, chunk, architecture.vocab_size, architecture.hidden_size, settings.dtype_bytes)


def head_bytes(tokens: float, chunk_tokens: int, vocab_size: int, hidden_size: int, size: int) -> int:
    """Bytes of the head: logits in 16 bit and float32 and the gradient of each, for one chunk of tokens; hidden
    states, their float32 copy in the norm and their gradient for all `tokens`.

    Args:
        size: bytes of a value.
    """
    chunk = min(chunk_tokens, tokens)
    return int(chunk * vocab_size * (2 * size + 8) + tokens * hidden_size * (3 * size + 4))
