"""Costs of each layer on a machine that nobody has measured: from the model's figures and the GPUs' data sheets.

FLOPs of a layer      2 per weight and token for a matrix product; attention 4 x query width x context (scores and
                      values), where the context of a causal token is half of the sequence on average
backward              2x the forward's products when the weights are trained, 1x when they are frozen (only the
                      input's gradient); attention 2.5x (flash attention computes the scores again:
                      arXiv 2205.14135, section 3.1). Full recompute adds one forward: in sum 4x linear + 4.5x
                      attention + 3x head for full training, 3x, 4.5x and 2x for LoRA
rate                  on an RTX 4090 with float16 accumulation 1 / (1/220 + 0.0034 (2048/hidden)^2) TFLOPS, fitted
                      to published training runs; other devices by the ratios of their data sheets
floor                 reading the weights once from device memory
unpacking             of 4-bit, 8-bit and FP8 weights: at the rate of device memory, in each forward, recompute and
                      backward, or once per visit of a stage
host                  the interpreter launches operators one after the other for all workers together: about 5 us
                      each (20 ms for 4,100 operators of one published expert layer), added to the step
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from roundpipe_cli.costs.activations import activation_bytes, head_chunk_bytes
from roundpipe_cli.costs.block_work import block_work
from roundpipe_cli.costs.cost import CostModel, LayerCost, keep_activations, skip_projections
from roundpipe_cli.costs.hardware import Accumulate, Device, Hardware
from roundpipe_cli.costs.matrices import lora_params
from roundpipe_cli.costs.models import Architecture, Block
from roundpipe_cli.costs.tally import PassWork
from roundpipe_cli.costs.training import DType, TrainingSettings

REFERENCE_PEAK_FLOPS_PER_S = 330.4e12
REFERENCE_MEMORY_BYTES_PER_S = 1008e9
REFERENCE_ASYMPTOTE_FLOPS_PER_S = 220e12
REFERENCE_OVERHEAD_S_PER_FLOP = 0.0034e-12
"""Time of everything that is not a matrix product, per FLOP, at hidden size 2048."""
FP32_ACCUMULATE_EFFICIENCY = 0.94
"""Share of the data-sheet rate. GeForce cards run it at half rate, which is easy to keep fed, so it is not the
220/330.4 of float16 accumulation (assumed)."""
FLOAT32_EFFICIENCY = 0.85
HOST_S_PER_OPERATOR = 20e-3 / 4100
HOP_S = 100e-6
"""Latency of a boundary between two workers beside its transfer: events and queues (assumed)."""
EXPERT_TILE_TOKENS = 64
"""Half of a matrix-product tile: what an expert's last tile wastes on average."""
OPTIMIZER_BYTES_PER_PARAM = 30
"""AdamW reads gradient 4, master 4 and moments 8, and writes master 4, moments 8 and the 16-bit weight 2."""


@dataclass(frozen=True, slots=True)
class AnalyticCosts:
    """The cost model and what beside it a step costs."""

    costs: CostModel
    host_s_per_microbatch: float
    """Time of the Python interpreter for one microbatch; it serves one worker at a time."""
    trainable_params: int


def analytic_costs(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> AnalyticCosts:
    """The costs of every layer (`embed`, blocks, `head`) for one microbatch on the fastest of the machine's devices."""
    by_device = {device: _layers(architecture, settings, device, hardware) for device in set(hardware.devices)}
    totals = [sum(2 * layer.forward_s + layer.backward_s for layer in by_device[one]) for one in hardware.devices]
    fastest = totals.index(min(totals))
    speeds = tuple(totals[fastest] / total for total in totals)
    trainable = trainable_params(architecture, settings)
    any_cpu = any(device.is_cpu for device in hardware.devices)
    return AnalyticCosts(
        costs=CostModel(
            name=architecture.name,
            layers=_with_gains(by_device[hardware.devices[fastest]], settings),
            hop_s=HOP_S,
            link_bytes_per_s=min(device.link_bytes_per_s for device in hardware.devices),
            device_memory_bytes=None,
            worker_speed=None if min(speeds) == 1.0 else speeds,
        ),
        host_s_per_microbatch=0.0 if any_cpu else host_s_per_microbatch(architecture, settings),
        trainable_params=sum(trainable),
    )


def _with_gains(layers: tuple[LayerCost, ...], settings: TrainingSettings) -> tuple[LayerCost, ...]:
    """The costs with shorter recomputes, and with none of blocks whose activations are kept."""
    costs = CostModel("", layers)
    if settings.skip_last_projection:
        costs = skip_projections(costs)
    kept = range(max(1, len(layers) - 1 - settings.keep_blocks), len(layers) - 1)
    return keep_activations(costs, kept).layers


def _layers(
    architecture: Architecture, settings: TrainingSettings, device: Device, hardware: Hardware
) -> tuple[LayerCost, ...]:
    accumulate: Accumulate = "fp16" if settings.float16_accumulation else hardware.accumulate
    timer = _Timer(architecture, settings, device, accumulate)
    distinct: dict[Block, LayerCost] = {block: timer.block(block) for block in set(architecture.blocks)}
    optimizer_s_per_param = OPTIMIZER_BYTES_PER_PARAM / hardware.host_memory_bytes_per_s
    trainable = trainable_params(architecture, settings)
    layers = [timer.embed()]
    layers += [replace(distinct[block], name=f"block.{i}") for i, block in enumerate(architecture.blocks)]
    layers.append(timer.head())
    return tuple(
        replace(
            layer,
            grad_bytes=0 if layer.name == "embed" else 4 * count,
            optimizer_s=optimizer_s_per_param * count,
        )
        for layer, count in zip(layers, trainable, strict=True)
    )


def trainable_params(architecture: Architecture, settings: TrainingSettings) -> list[int]:
    """Per layer (`embed`, blocks, `head`). A tied matrix counts once, with the head."""
    if settings.method == "lora":
        by_block = {block: lora_params(architecture, block, settings) for block in set(architecture.blocks)}
        return [0, *(by_block[block] for block in architecture.blocks), 0]
    shared = architecture.vocab_size * architecture.hidden_size if architecture.tied else 0
    return [
        architecture.embed_params - shared - architecture.unreached_params,
        *(block.params for block in architecture.blocks),
        architecture.head_params,
    ]


def matmul_s_per_flop(device: Device, hidden_size: int, dtype: DType, accumulate: Accumulate) -> float:
    """Seconds per FLOP of a layer of this hidden size: the formula at the head of this file.

    The first term is the matrix products', by the device's rate; the second everything else's, which waits for
    memory: by the device's memory bandwidth.
    """
    products = REFERENCE_ASYMPTOTE_FLOPS_PER_S / REFERENCE_PEAK_FLOPS_PER_S * device.fp16_accumulate_flops_per_s
    if dtype == "float32":
        products = FLOAT32_EFFICIENCY * device.float32_flops_per_s
    elif dtype == "bfloat16" or accumulate == "fp32":
        products = min(products, FP32_ACCUMULATE_EFFICIENCY * device.fp32_accumulate_flops_per_s)
    if device.is_cpu:  # measured on whole training steps: nothing to add
        return 1 / products
    width = 2 if dtype == "float32" else 1
    rest = REFERENCE_OVERHEAD_S_PER_FLOP * width * REFERENCE_MEMORY_BYTES_PER_S / device.memory_bytes_per_s
    return 1 / products + rest * (2048 / hidden_size) ** 2


@dataclass(frozen=True, slots=True)
class _Timer:
    """Layer costs of one model on one device."""

    architecture: Architecture
    settings: TrainingSettings
    device: Device
    accumulate: Accumulate

    @property
    def _s_per_flop(self) -> float:
        return matmul_s_per_flop(self.device, self.architecture.hidden_size, self.settings.dtype, self.accumulate)

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
        read_s = block.params * settings.dtype_bytes / self.device.memory_bytes_per_s
        unpack_s = block.params * settings.unpacking_bytes_per_param / self.device.memory_bytes_per_s
        each_s = 0.0 if settings.unpacks_once else unpack_s
        forward_s = max(self._products_s(work.forward, block), read_s) + each_s
        backward_s = max(self._products_s(work.backward, block), read_s) + each_s
        adapters = lora_params(architecture, block, settings) if settings.method == "lora" else 0
        skippable_s = self._skippable_s(block)
        if settings.tokens_per_mlp_call < settings.tokens_per_microbatch:  # backward computes it again
            backward_s += self._mlp_s(block)
        return LayerCost(
            name="block",
            forward_s=forward_s,
            backward_s=backward_s,
            recompute=settings.recompute != "none",
            param_bytes=self._upload_bytes(block.params, block.active_linear_params > 0, adapters),
            boundary_bytes=self._boundary_bytes,
            activation_bytes=self._boundary_bytes
            if settings.recompute == "layer"
            else activation_bytes(architecture, block, settings),
            recompute_skippable_s=0.0 if settings.recompute == "none" else skippable_s,
            visit_s=unpack_s - each_s,
            whole_bytes=block.params * settings.dtype_bytes if settings.unpacks_once else 0,
        )

    def _products_s(self, work: PassWork, block: Block) -> float:
        """Time of a pass's matrix products and what goes with them; experts' last tiles are partly empty."""
        wasted = work.expert_flops * (1 / self._expert_fill(block) - 1)
        return (work.product_flops + wasted) * self._s_per_flop

    def _mlp_s(self, block: Block) -> float:
        """Forward of the feed-forward part."""
        products = 2 * self.settings.tokens_per_microbatch * block.active_mlp_params
        return products * self._s_per_flop / self._expert_fill(block)

    def _skippable_s(self, block: Block) -> float:
        """Seconds of the forward that a recompute leaves out where nobody reads the block's output."""
        architecture, tokens = self.architecture, self.settings.tokens_per_microbatch
        if architecture.four_norms:  # a norm reads it
            return 0.0
        if self.settings.tokens_per_mlp_call < tokens:
            return self._mlp_s(block)
        if block.num_experts:  # routing weights read the last product
            return 0.0
        return 2 * tokens * self._s_per_flop * architecture.hidden_size * architecture.intermediate_size

    def head(self) -> LayerCost:
        """Final norm, LM head and loss, in chunks of tokens; forward and backward in one go, no recompute."""
        architecture, settings = self.architecture, self.settings
        tokens = settings.tokens_per_microbatch
        products_s = 2 * tokens * architecture.vocab_size * architecture.hidden_size * self._s_per_flop
        read_s = architecture.head_params * settings.dtype_bytes / self.device.memory_bytes_per_s
        return LayerCost(
            name="head",
            forward_s=max(products_s, read_s),
            backward_s=max(products_s * (2 if settings.method == "full" else 1), read_s),
            recompute=False,
            param_bytes=0 if self.device.is_cpu else architecture.head_params * settings.dtype_bytes,
            activation_bytes=head_chunk_bytes(architecture, settings),
        )

    def _expert_fill(self, block: Block) -> float:
        """Share of the experts' tiles that is not padding."""
        if not block.num_experts:
            return 1.0
        per_expert = self.settings.tokens_per_mlp_call * self.architecture.num_experts_per_tok / block.num_experts
        return per_expert / (per_expert + EXPERT_TILE_TOKENS)

    def _upload_bytes(self, params: int, has_matrices: bool, adapters: int) -> int:
        """Bytes of a visit: CPU workers use the host's weights where they lie."""
        if self.device.is_cpu:
            return 0
        per_param = self.settings.frozen_bytes_per_param if has_matrices else self.settings.dtype_bytes
        return int(params * per_param) + adapters * self.settings.dtype_bytes


def host_s_per_microbatch(architecture: Architecture, settings: TrainingSettings) -> float:
    """Interpreter time to launch all operators of one microbatch, forward, recompute and backward."""
    num_forwards = 1 if settings.recompute == "none" else 2
    operators = 0.0
    for block, count in Counter(architecture.blocks).items():
        work = block_work(architecture, block, settings)
        operators += count * (num_forwards * work.forward.operators + work.backward.operators)
    chunks = max(1.0, settings.tokens_per_microbatch / settings.head_chunk_tokens)
    return (operators + 45 * chunks) * HOST_S_PER_OPERATOR
