"""Costs of each layer on a machine that nobody has measured: from the model's figures and the GPUs' data sheets.

FLOPs of a layer      2 per weight and token for a matrix product; attention 4 x query width x context (scores and
                      values), where the context of a causal token is half of the sequence on average
backward              2x the forward's products when the weights are trained, 1x when they are frozen (only the
                      input's gradient); attention 2.5x (flash attention computes the scores again:
                      arXiv 2205.14135, section 3.1). Full recompute adds one forward: in sum 4x linear + 4.5x
                      attention + 3x head for full training, 3x, 4.5x and 2x for LoRA
time                  products by their FLOPs or their traffic, whichever takes longer; attention by its FLOPs; all
                      other operators by their traffic (`block_work.py` counts, `hardware.py` has the rates)
unpacking             of 4-bit and 8-bit weights: at the rate of device memory, of FP8 at a quarter of it; in each
                      forward, recompute and backward, or once per visit of a stage
host                  one interpreter issues the operators of all workers in turns, 45 to 54 us each, while GPUs
                      compute: no pass ends before its own are issued at its worker's share of that rate
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundpipe_cli.choices import OPTIMIZERS
from roundpipe_cli.costs.block_work import (
    ACCUMULATED_BYTES,
    EXACT_BYTES,
    MAX_FLASH_WIDTH,
    PACKED_FLASH_WIDTHS,
    PassWork,
    Tally,
    block_work,
    expert_fill,
    is_masked,
    lora_params,
    masked_keys,
)
from roundpipe_cli.costs.cost import CostModel, LayerCost, keep_activations, skip_projections
from roundpipe_cli.costs.hardware import Accumulate, Device, Hardware, Rates, rates_of
from roundpipe_cli.costs.measurement import at
from roundpipe_cli.costs.models import Architecture, Block
from roundpipe_cli.costs.settings import TrainingSettings

# Bytes that a microbatch's forward keeps on a device for the backward.
#
# They are what torch's autograd keeps for backward of the eager model of transformers, with the attention that
# `finetune` has (compare arXiv 2205.05198, section 4, which counts the layers of another model).


def activation_bytes(architecture: Architecture, block: Block, settings: TrainingSettings) -> int:
    """Bytes that autograd keeps of one block for the backward of one microbatch; see the head of this file.

    A norm keeps its input and its output (the next product's input); transformers' own its input in float32, and with
    trained weights the normalised input too. Attention keeps q, k, v, its output and that output laid out for the next
    product. A gated MLP keeps gate, activation, up and their product.
    """
    size, hidden = settings.dtype_bytes, architecture.hidden_size
    query = architecture.num_attention_heads * architecture.head_dim
    key_value = architecture.num_key_value_heads * architecture.head_dim
    per_norm = 2 * size if settings.fused else 4 + size * (2 if settings.method == "full" else 1)
    num_norms = 4 if architecture.four_norms else 2
    total = float(num_norms * per_norm * hidden)  # per token
    if architecture.qk_norm:
        total += (per_norm - size) * (query + key_value)
    total += size * (3 * query + 2 * key_value)
    width = architecture.intermediate_size
    tensors = 4 if architecture.gated_mlp else 5 if architecture.spells_gelu else 2
    if architecture.clamps_gates:  # gate and up before and after the clamp, sigmoid, gated, product
        tensors = 7
    if block.num_experts:
        mlp = architecture.num_experts_per_tok * size * (tensors * width + 2 * hidden) + 8 * block.num_experts
    else:
        mlp = size * tensors * width
    if settings.method == "lora":
        total += 7 * size * settings.lora_r
    if settings.method == "lora" and settings.lora_dropout > 0 and not settings.fused:  # masks, and what they leave
        total += (1 + size) * (3 * hidden + query)
        mlp += 0 if block.num_experts else (1 + size) * (2 * hidden + width)
    activations = int(settings.tokens_per_microbatch * total + settings.tokens_per_mlp_call * mlp)
    activations += _pair_bytes(architecture, block, settings)
    if settings.deterministic:  # gradients of queries in float32, for each of the blocks that add to them in turn
        copies = math.ceil(MULTIPROCESSORS / (architecture.num_attention_heads * max(1, settings.micro_batch_size)))
        activations += int(4 * copies * settings.tokens_per_microbatch * query)
    return activations + chunk_buffer_bytes(architecture, settings)


MULTIPROCESSORS = 170
"""Multiprocessors of the largest consumer card; others have fewer."""
ORDERED_BACKWARD = 1.61
"""Time of attention's backward that adds up in order, of its time otherwise: 38 % less throughput at worst (arXiv
2601.21824, FlashAttention-3 on H800); not measured here."""


def _pair_bytes(architecture: Architecture, block: Block, settings: TrainingSettings) -> int:
    """Bytes that attention keeps for pairs of tokens: nothing where a fused kernel needs no mask beside the causal one.

    With one (a sliding window that sequences exceed, sinks), it keeps the mask in the dtype, and keys and values
    repeated for each head; with sinks all of them 8 wider. Without such a kernel, probabilities in float32, a copy of
    them in 16 bit for the product, and in some models capped scores. A chunk's keys and values are copied behind those
    of the chunks before it.
    """
    size, heads, shared = settings.dtype_bytes, architecture.num_attention_heads, architecture.num_key_value_heads
    tokens, in_chunks = settings.tokens_per_microbatch, settings.sequence_chunks > 1
    seen, times = masked_keys(block, settings)
    if architecture.keeps_scores:
        each = 4 + (size if size < 4 else 0) + (size if architecture.caps_scores else 0)
        repeated = 2 * heads * architecture.head_dim * size * settings.tokens_of_sequences if in_chunks else 0
        return int(heads * tokens * settings.max_seq_length * each + repeated)
    if not is_masked(architecture, block, settings):
        return key_value_bytes(architecture, settings)  # 0 of whole sequences
    repeated = 2 * (heads if in_chunks else heads - shared) * architecture.head_dim
    wider = 2 * heads * 8 if architecture.has_sinks else 0
    return int(size * tokens * (seen + times * (repeated + wider) + wider))


def key_value_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """One block's keys and values of a whole sequence, which its chunks share; 0 where sequences are not cut. A
    recurrent block counts as one of attention: Qwen3-Next's states are smaller from 1,000 tokens a chunk on."""
    if settings.sequence_chunks == 1:
        return 0
    width = 2 * architecture.num_key_value_heads * architecture.head_dim
    return int(settings.micro_batch_size * settings.max_seq_length) * width * settings.dtype_bytes


def chunk_buffer_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """One block's keys and values, and their gradients in float32, from the first to the last backward of a sequence's
    chunks; 0 where sequences are not cut."""
    return key_value_bytes(architecture, settings) * (settings.dtype_bytes + 4) // settings.dtype_bytes


def head_chunk_bytes(architecture: Architecture, settings: TrainingSettings, devices: Sequence[Device] = ()) -> int:
    """The head's working memory, see `head_bytes`. A run uses our kernel where all `devices` have it."""
    has_kernel = settings.fused and bool(devices) and all(one.has_bfloat16 and not one.is_cpu for one in devices)
    has_kernel = has_kernel and not (settings.scores_answers or settings.teacher_tokens)
    return teacher_bytes(settings.tokens_per_microbatch, settings.teacher_tokens) + head_bytes(
        settings.tokens_per_microbatch,
        settings.head_chunk_tokens,
        architecture.vocab_size,
        architecture.hidden_size,
        size=settings.dtype_bytes,
        at_once=logits_at_once(architecture.model_type) if has_kernel else None,
    )


def teacher_bytes(tokens: float, kept: int) -> int:
    """Bytes of a teacher's figures for so many targets: ids, log-probabilities in 16 bit, the mass left."""
    return int(tokens * (kept * 6 + 4)) if kept else 0


def logits_at_once(model_type: str) -> int:
    """Tensors of logits that exist at once where a kernel writes gradients over them: beside them those that the model
    scales, casts or caps, and their gradients."""
    return 4 if model_type in _COPIES_LOGITS else 2 if model_type in _SCALES_LOGITS else 1


_COPIES_LOGITS = {
    *("gemma2", "gemma3n_text", "gemma4_text", "nanochat", "recurrent_gemma", "vaultgemma"),
    *("falcon_mamba", "mamba", "mamba2", "nemotron_h", "xlstm"),  # which cast to float32
}
_SCALES_LOGITS = {"cohere", "cohere2", "falcon_h1", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared"}


def head_bytes(
    tokens: float, chunk_tokens: int, vocab_size: int, hidden_size: int, *, size: int, at_once: int | None = None
) -> int:
    """Bytes of the head: logits in 16 bit and float32 and the gradient of each, and up to six float32 tensors of the
    norm's, for one chunk of tokens; hidden states and their gradient for all `tokens`.

    Args:
        size: bytes of a value.
        at_once: tensors of logits beside each other where a kernel writes gradients over them (`logits_at_once`);
            None: torch's operators compute the loss.
    """
    chunk = min(chunk_tokens, tokens)
    each = 2 * size + 8 if at_once is None else at_once * size
    return int(chunk * (vocab_size * each + hidden_size * 6 * 4) + tokens * hidden_size * 3 * size)


# Kernels of the LM head and its loss for one microbatch, counted as `model/head.py` launches them.
#
# One kernel writes each logit's gradient over it (`kernels/cross_entropy.py`). Torch's operators move more: cast to
# float32, log-softmax; the exponential, scaled, both in place, and cast back. A trained head adds each chunk's gradient
# to its sum in float32, in 16 bit within the product.


def head_work(architecture: Architecture, settings: TrainingSettings) -> tuple[PassWork, PassWork]:
    """Forward and backward, all tokens being trained."""
    tally = Tally(architecture.hidden_size, settings)
    tokens, hidden, vocabulary, size = tally.tokens, architecture.hidden_size, architecture.vocab_size, tally.size
    chunks = max(1, math.ceil(tokens / settings.head_chunk_tokens))
    cast = 0 if size == EXACT_BYTES else size + EXACT_BYTES
    added = 0
    tally.forward.product(tokens, hidden, vocabulary, size)
    tally.forward.library_bytes += tokens * vocabulary * (cast + 2 * EXACT_BYTES)
    tally.backward.moves(tokens * vocabulary * 2 * size)
    tally.backward.library_bytes += tokens * vocabulary * (cast + 4 * EXACT_BYTES - 2 * size)
    tally.backward.product(tokens, vocabulary, hidden, size)
    if tally.trains:
        tally.backward.product(vocabulary, tokens, hidden, size)
        within = chunks > 1 and size < EXACT_BYTES
        tally.backward.traffic_bytes += chunks * vocabulary * hidden * (ACCUMULATED_BYTES + (0 if within else size))
        added = 1 if within else 2
    tally.forward.operators, tally.backward.operators = 4 + 4 * chunks, (2 + added) * chunks
    tally.forward.library_operators = 9 * chunks
    if settings.teacher_tokens:  # always by torch's operators, and four more over all logits
        for side in (tally.forward, tally.backward):
            side.traffic_bytes += side.library_bytes + tokens * vocabulary * 2 * EXACT_BYTES
            side.operators += side.library_operators + 20 * chunks
            side.library_bytes, side.library_operators = 0.0, 0
    return tally.forward, tally.backward


ISSUED_PER_S = ((1, 22e3), (2, 18.6e3))
"""Operators a second that one interpreter issues for one thread, and for several together: 20,300 to 23,800 and, for
eight, 18,600 in a virtual machine with an H100 (`scripts/gpu_check`), the only one measured; a faster processor issues
more. On a processor two threads together lose as much as eight (`scripts/issue_rate.py`)."""
FP8_UNPACKING = 0.26
"""Share of the memory's rate at which FP8 weights are unpacked (measured on an H100)."""
UPDATE_S_PER_PARAM = 26e-6 / 2**22
"""The interpreter's part of an update on the host: 26 us a block (measured), which sixteen threads share."""
HOP_S = 100e-6
"""Latency of a boundary between two workers beside its transfer: events and queues (assumed)."""


def analytic_costs(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> CostModel:
    """The costs of every layer (`embed`, blocks, `head`) for one microbatch on the fastest of the machine's devices."""
    by_device = {device: _layers(architecture, settings, device, hardware) for device in set(hardware.devices)}
    totals = [sum(2 * layer.forward_s + layer.backward_s for layer in by_device[one]) for one in hardware.devices]
    fastest = totals.index(min(totals))
    speeds = tuple(totals[fastest] / total for total in totals)
    any_cpu = any(device.is_cpu for device in hardware.devices)
    costs = CostModel(
        name=architecture.name,
        layers=by_device[hardware.devices[fastest]],
        hop_s=HOP_S,
        link_bytes_per_s=min(device.link_bytes_per_s for device in hardware.devices),
        worker_speed=None if min(speeds) == 1.0 else speeds,
        host_bytes_per_s=None if any_cpu else hardware.host_memory_bytes_per_s,
        update_bytes=OPTIMIZERS[settings.optimizer].update_bytes,
        leaving_bytes=settings.dtype_bytes,
        tied=architecture.tied,
    )
    return with_gains(costs, settings)


def with_gains(costs: CostModel, settings: TrainingSettings) -> CostModel:
    """The costs with shorter recomputes, and with none of blocks whose activations are kept."""
    if settings.skip_last_projection:
        costs = skip_projections(costs)
    head = len(costs.layers) - 1
    return keep_activations(costs, range(max(1, head - settings.keep_blocks), head))


@dataclass(frozen=True, slots=True)
class Case:
    """A model's training on a machine, and what it costs there."""

    architecture: Architecture
    settings: TrainingSettings
    hardware: Hardware
    costs: CostModel
    """Costs of the layers."""

    @property
    def gpus(self) -> list[Device]:
        """The devices that are no processors."""
        return [device for device in self.hardware.devices if not device.is_cpu]

    @property
    def num_workers(self) -> int:
        return len(self.hardware.devices)

    @property
    def trainable_params(self) -> int:
        return sum(trainable_params(self.architecture, self.settings))

    @property
    def host_s_per_update(self) -> float:
        """Time of the interpreter to issue the operators of one update."""
        return UPDATE_S_PER_PARAM * self.trainable_params if len(self.gpus) == self.num_workers else 0.0

    @property
    def least_step_s(self) -> float:
        """Lower bound on the step time: workers that never wait, and nothing computed twice."""
        costs, num_microbatches = self.costs, self.settings.num_microbatches
        once_s = sum(layer.forward_s + layer.backward_s for layer in costs.layers) * num_microbatches
        return once_s / sum(costs.worker_speed or (1.0,) * self.num_workers)


def case_of(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> Case:
    """The case with its analytic costs."""
    settings = replace(settings, flash_chunks=_has_flash_chunks(architecture, settings, hardware))
    return Case(architecture, settings, hardware, analytic_costs(architecture, settings, hardware))


def _has_flash_chunks(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> bool:
    """Whether chunks attend without a mask, as `model/attention.py` has it where its try at start succeeds."""
    is_asked = settings.sequence_chunks > 1 and settings.fused and settings.dtype != "float32"
    is_plain = not architecture.has_sinks and not architecture.keeps_scores and not architecture.masks_chunks
    fits = architecture.head_dim <= MAX_FLASH_WIDTH and architecture.head_dim % PACKED_FLASH_WIDTHS == 0
    return is_asked and is_plain and fits and all(one.has_bfloat16 and not one.is_cpu for one in hardware.devices)


def _layers(
    architecture: Architecture, settings: TrainingSettings, device: Device, hardware: Hardware
) -> tuple[LayerCost, ...]:
    accumulate: Accumulate = "fp16" if settings.float16_accumulation else hardware.accumulate
    num_threads = min(len(hardware.devices), math.ceil(settings.num_microbatches))
    timer = _Timer(architecture, settings, device, accumulate, num_threads)
    distinct: dict[Block, LayerCost] = {block: timer.block(block) for block in set(architecture.blocks)}
    optimizer_s_per_param = OPTIMIZERS[settings.optimizer].update_bytes / hardware.host_memory_bytes_per_s
    trainable = trainable_params(architecture, settings)
    layers = [timer.embed()]
    layers += [replace(distinct[block], name=f"block.{i}") for i, block in enumerate(architecture.blocks)]
    layers.append(replace(timer.head(), activation_bytes=head_chunk_bytes(architecture, settings, hardware.devices)))
    return tuple(
        replace(layer, grad_bytes=0 if layer.name == "embed" else 4 * count, optimizer_s=optimizer_s_per_param * count)
        for layer, count in zip(layers, trainable, strict=True)
    )


def trainable_params(architecture: Architecture, settings: TrainingSettings) -> list[int]:
    """Per layer (`embed`, blocks, `head`). A tied matrix counts once, with the head."""
    if settings.method == "lora":
        by_block = {block: lora_params(architecture, block, settings) for block in set(architecture.blocks)}
        rows = settings.new_tokens * architecture.hidden_size
        return [0 if architecture.tied else rows, *(by_block[block] for block in architecture.blocks), rows]
    shared = architecture.vocab_size * architecture.hidden_size if architecture.tied else 0
    return [
        architecture.embed_params - shared - architecture.unreached_params,
        *(block.params for block in architecture.blocks),
        architecture.head_params,
    ]


@dataclass(frozen=True, slots=True)
class _Timer:
    architecture: Architecture
    settings: TrainingSettings
    device: Device
    accumulate: Accumulate
    num_threads: int
    """Workers that compute at the same time, for which one interpreter issues."""

    @property
    def _rates(self) -> Rates:
        return rates_of(self.device, self.settings.dtype, self.accumulate)

    def _pass_s(self, work: PassWork, *, ours: bool = True) -> float:
        """Time of a pass over a block, weights being whole. A processor computes operators between issuing them; its
        assumed rate is that of whole training steps.

        Args:
            ours: this device has our kernels for it.
        """
        rates, fused, measured = self._rates, self.settings.fused and ours, self.device.measured
        if self.device.is_cpu and measured is None:
            return rates.flops_s(work.product_flops)
        device_s = rates.pass_s(work, fused=fused and measured is not None)
        if self.device.is_cpu and measured is not None:
            return device_s + work.issued(fused=fused) / at(measured.launches_per_s, 1)
        return device_s

    def _launched(self, layer: LayerCost, forward: PassWork, backward: PassWork) -> LayerCost:
        """The layer, no pass of which ends before its operators are issued, in turn with those of the other threads."""
        if self.device.is_cpu:
            return layer
        measured, fused = self.device.measured, self.settings.fused
        issued_per_s = at(measured.launches_per_s if measured else ISSUED_PER_S, self.num_threads)
        forward_s, backward_s = (one.issued(fused=fused) / issued_per_s for one in (forward, backward))
        starved_s = (
            max(0.0, self.num_threads * forward_s - layer.forward_s),
            max(0.0, self.num_threads * backward_s - layer.backward_s),
        )
        return replace(
            layer,
            forward_s=layer.forward_s + starved_s[0],
            backward_s=layer.backward_s + starved_s[1],
            recompute_skippable_s=max(0.0, layer.recompute_skippable_s - starved_s[0]),
            launches_s=(forward_s, backward_s),
            starved_s=starved_s,
        )

    @property
    def _boundary_bytes(self) -> int:
        tokens = self.settings.tokens_per_microbatch
        columns = self.architecture.boundary_columns or self.architecture.hidden_size
        return int(tokens * columns * self.settings.dtype_bytes)

    def embed(self) -> LayerCost:
        """Rows are gathered on the host and sent as a boundary: no time on a worker, no upload of the table."""
        return LayerCost("embed", 0.0, 0.0, recompute=False, boundary_bytes=self._boundary_bytes)

    def block(self, block: Block) -> LayerCost:
        """Seconds, bytes and boundary of one block for one microbatch, counted from its matrices and its attention."""
        architecture, settings = self.architecture, self.settings
        work = block_work(architecture, block, settings)
        unpack_s = self._unpack_s(block)
        each_s = 0.0 if settings.unpacks_once else unpack_s
        forward_s, backward_s = self._pass_s(work.forward) + each_s, self._pass_s(work.backward) + each_s
        if settings.deterministic and not self.device.is_cpu:
            backward_s += (ORDERED_BACKWARD - 1) * self._rates.flops_s(work.backward.attention_flops, "attention")
        adapters = lora_params(architecture, block, settings) if settings.method == "lora" else 0
        skippable_s = self._skippable_s(block)
        if settings.tokens_per_mlp_call < settings.tokens_per_microbatch:  # backward computes it again
            backward_s += self._mlp_s(block)
        layer = LayerCost(
            name="block",
            forward_s=forward_s,
            backward_s=backward_s,
            recompute=settings.recompute != "none",
            param_bytes=self._upload_bytes(settings.frozen_bytes(block), adapters),
            boundary_bytes=self._boundary_bytes,
            activation_bytes=self._boundary_bytes + chunk_buffer_bytes(architecture, settings)
            if settings.recompute == "layer"
            else activation_bytes(architecture, block, settings),
            recompute_skippable_s=0.0 if settings.recompute == "none" else skippable_s,
            visit_s=unpack_s - each_s,
            whole_bytes=settings.packed_params(block) * settings.dtype_bytes if settings.unpacks_once else 0,
        )
        return self._launched(layer, work.forward, work.backward)

    def _unpack_s(self, block: Block) -> float:
        """Time to make packed weights whole."""
        settings, measured = self.settings, self.device.measured
        curve = measured.unpacking.get(settings.packed_as or "") if measured else None
        packed = settings.packed_params(block)
        if curve and packed:
            return packed / at(curve, packed)
        unpack_s = packed * settings.unpacking_bytes_per_param / self.device.memory_bytes_per_s
        return unpack_s / (FP8_UNPACKING if settings.packed_as == "fp8" else 1.0)

    def _mlp_s(self, block: Block) -> float:
        """Forward of the feed-forward part."""
        flops = 2 * self.settings.tokens_per_microbatch * block.active_mlp_params
        if not block.num_experts:
            return self._rates.flops_s(flops)
        fill = expert_fill(self.settings, block.num_experts, self.architecture.num_experts_per_tok)
        return self._rates.flops_s(flops, "grouped") / fill

    def _skippable_s(self, block: Block) -> float:
        """Seconds of the forward that a recompute leaves out where nobody reads the block's output."""
        architecture, tokens = self.architecture, self.settings.tokens_per_microbatch
        if architecture.four_norms:  # a norm reads it
            return 0.0
        if self.settings.tokens_per_mlp_call < tokens:
            return self._mlp_s(block)
        if block.num_experts:  # routing weights read the last product
            return 0.0
        return self._rates.flops_s(2 * tokens * architecture.hidden_size * architecture.intermediate_size)

    def head(self) -> LayerCost:
        """Final norm, LM head and loss, in chunks of tokens; forward and backward in one go, no recompute."""
        architecture, settings = self.architecture, self.settings
        forward, backward = head_work(architecture, settings)
        layer = LayerCost(
            name="head",
            forward_s=self._pass_s(forward, ours=not self.device.is_cpu),
            backward_s=self._pass_s(backward, ours=not self.device.is_cpu),
            recompute=False,
            param_bytes=self._upload_bytes(architecture.head_params * settings.dtype_bytes),
        )
        return self._launched(layer, forward, backward)

    def _upload_bytes(self, frozen_bytes: float, adapters: int = 0) -> int:
        """Bytes of a visit: CPU workers use the host's weights where they lie."""
        return 0 if self.device.is_cpu else int(frozen_bytes) + adapters * self.settings.dtype_bytes


def fused_share(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> float:
    """Time of the blocks on the first device, if fused operators save what they move less: part of the prediction."""
    rates = rates_of(hardware.devices[0], settings.dtype, "fp16" if settings.float16_accumulation else "fp32")
    works = [(block_work(architecture, one, settings), count) for one, count in Counter(architecture.blocks).items()]

    def total_s(*, fused: bool) -> float:
        return sum(
            count * (2 * rates.pass_s(work.forward, fused=fused) + rates.pass_s(work.backward, fused=fused))
            for work, count in works
        )

    return total_s(fused=True) / total_s(fused=False)
