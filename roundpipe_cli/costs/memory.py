"""Needs of a run in each memory: device, host, disk. Every figure is split into parts that add up to it.

device   slots x (weights and gradient accumulators of the largest stage), activations of one microbatch of one
         stage, the head's chunk, two boundary tensors per direction, the workspace of a backward, the gradient of
         the largest weight, the context; with packed weights those of one block, unpacked for its call, or those of a
         stage for its visit
host     per trainable parameter 18 bytes in 16 bit (weight 2, master 4, moments 8, gradient 4), 16 in
         float32; frozen weights; boundary activations; page-locked rings
disk     (save_total_limit + 1) checkpoints, since the new one is complete before the oldest goes, and the result
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from roundpipe_cli.choices import OPTIMIZERS, PACKED_FORMATS
from roundpipe_cli.costs.analytic import Case, activation_bytes, key_value_bytes, teacher_bytes, trainable_params
from roundpipe_cli.costs.cost import CostModel, LayerCost, StageRange
from roundpipe_cli.costs.hardware import Device, Hardware
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.units import GIB, MIB, format_bytes

# The largest single weights of a block, which exist twice for a moment: while they are filled, and as gradients.


def block_gradient_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """Gradient of a block's largest trained weight, which exists whole before it is added to its sum: of the
    feed-forward part, where all experts' gates and what they multiply may be one."""
    if settings.method == "lora":
        return 0  # of a rank
    matrix = architecture.hidden_size * architecture.intermediate_size * settings.dtype_bytes
    return max(matrix, converted_bytes(architecture, settings))


def converted_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """Size of the largest weight that is made of several tensors of the files: the experts' gates and what they
    multiply, fused."""
    experts = max((block.mlp_params for block in architecture.blocks if block.num_experts), default=0)
    share = 2 / 3 if architecture.gated_mlp else 1 / 2
    return int(experts * share) * settings.dtype_bytes


CONTEXT = "CUDA context"
CONTEXT_BYTES = 860 * MIB
"""CUDA context, kernels and library workspaces of one process on one device: 0.90 to 0.91 GB measured on one H100."""
GAPS = 0.38
"""Memory that full fine-tuning leaves in gaps between blocks where torch's segments do not grow, as a share of what it
needs: an H100 reserved 10.53 GB where 7.64 were planned. LoRA reserved 7.78 GB, and 9.57 were planned."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with which users configure torch's allocator."""
DEVICE_SHARE = 0.85
"""Share of a device's nominal memory that stages and caches fill; the rest is a margin (assumed)."""
FITTING_SHARE = 0.95
"""A run that needs more than this share of the nominal memory is refused: fragmentation, a display (assumed)."""
INPUTS_SHARE = 0.05
"""Share of the free host memory for inputs of layers that are kept only so that a recompute can leave more out."""
PINNED_RING_BYTES = 16 * MIB
"""Page-locked pieces per device and direction, for what is not page-locked itself."""
INTERPRETER_BYTES = 418 * MIB
"""Python, torch, PEFT, a tokenizer and the libraries' pages of one process: measured with a tiny model."""
LIBRARY_FILES_BYTES = 170 * MIB
"""Pages of the libraries' files among these, which the system counts as free: measured."""
TOKEN_BYTES = 700
"""A token of a tokenizer takes so many: 35 MB measured with 49,152 of them."""
TRITON_BYTES = 72 * MIB
"""More where triton is installed, which torch's compiler imports: measured. Beside GPUs part of their contexts."""
CUDA_LIBRARIES_BYTES = 440 * MIB
"""More where torch is built for CUDA, on a machine without GPUs: 350 to 470 MiB measured with torch 2.11 and 2.15."""
CONTEXT_HOST_BYTES = 512 * MIB
"""Host side of one CUDA context and its libraries (assumed)."""
DEVICE_ALIGNMENT_BYTES = 256
"""Layers in slots and in the weight cache begin at multiples of this many bytes."""
MAX_MEMORY_SHARE = 0.8
"""Share of the free host memory for weights; `weights: auto` maps more of them from a file."""
HOST_MARGIN_BYTES = 2 * GIB
HOST_MARGIN = 0.05
"""Share of host memory that is left to the operating system, at most `HOST_MARGIN_BYTES`."""

HEAD_CHUNK, LARGEST_GRADIENT = "head chunk beyond the workspace", "gradient of the largest weight"
"""Parts that stages without the head do not need, or need less of."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes needed of one memory, by part."""

    parts: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def largest_first(self) -> list[tuple[str, int]]:
        """The parts without the empty ones."""
        return sorted(filter(lambda part: part[1], self.parts.items()), key=lambda part: -part[1])

    def describe(self) -> str:
        """`weights 3.1 GiB + activations 4 GiB`, largest first."""
        return " + ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in self.largest_first)


def device_need(
    case: Case,
    forward_stages: Sequence[StageRange],
    backward_stages: Sequence[StageRange],
    microbatches_per_round: int | None = None,
) -> Need:
    """Bytes that one worker needs at its peak. On the CPU weights and gradient sums are the host's own: no slots.

    Args:
        microbatches_per_round: whose activations are kept together; None: a round is the whole step.
    """
    costs, settings = case.costs, case.settings
    layers = costs.layers
    slot_bytes = largest_stage_bytes(layers, forward_stages, backward_stages) if case.gpus else 0
    whole_bytes = 0
    if settings.unpacks_once:
        without = largest_visit_bytes([replace(layer, whole_bytes=0) for layer in layers], (), backward_stages)
        whole_bytes = largest_visit_bytes(layers, forward_stages, backward_stages) - without
    stages = len(forward_stages), len(backward_stages)
    in_flight = _in_flight(case, stages, microbatches_per_round or settings.num_microbatches)
    # as if one worker had them all
    kept = case.architecture.blocks[first_kept_block(case) - 1 :]
    kept_bytes = sum(activation_bytes(case.architecture, block, settings) for block in kept)
    return Need(
        {
            f"{costs.slots} slots for the weights and gradients of a stage": costs.slots * slot_bytes,
            "activations": _activations(case, backward_stages),
            "weights of a stage, unpacked": whole_bytes,
            "kept activations": in_flight * kept_bytes,
            LARGEST_GRADIENT: _gradient_bytes(case, backward_stages),
            **fixed_device_need(case).parts,
        }
    )


def largest_stage_bytes(
    layers: Sequence[LayerCost], forward_stages: Sequence[StageRange], backward_stages: Sequence[StageRange]
) -> int:
    """Bytes that a slot holds: weights, and of a backward stage its gradients too."""
    forward = [sum(layer.param_bytes for layer in layers[first : last + 1]) for first, last in forward_stages]
    backward = [layers[first : last + 1] for first, last in backward_stages]
    held = [sum(layer.param_bytes + layer.grad_bytes for layer in stage) for stage in backward]
    return max(forward + held, default=0)


def largest_visit_bytes(
    layers: Sequence[LayerCost], forward_stages: Sequence[StageRange], backward_stages: Sequence[StageRange]
) -> int:
    """Bytes that a stage at work takes beside its slot: unpacked weights, and of a backward stage activations too, but
    for the head's, which are counted apart."""
    blocks = layers[:-1]
    forward = [sum(layer.whole_bytes for layer in blocks[first : last + 1]) for first, last in forward_stages]
    backward = [sum(layer.visit_bytes for layer in blocks[first : last + 1]) for first, last in backward_stages]
    return max(forward + backward, default=0)


def spare_for_cache(memory_bytes: int, needed_bytes: int, layers: Sequence[LayerCost], *, share: float) -> int:
    """Bytes for `weight_cache: auto`: what `share` of a device's memory leaves beside all that is needed, at most as
    much as all layers take; 0 where not even the smallest of them fits.

    Args:
        needed_bytes: the device's peak without a cache.
        layers: the rest of `memory_bytes` stays free, for what no model counts.
    """
    sizes = [layer.param_bytes for layer in layers if layer.param_bytes]
    spare = min(int(share * memory_bytes) - needed_bytes, whole_cache_bytes(layers))
    return spare if sizes and spare >= min(sizes) + DEVICE_ALIGNMENT_BYTES else 0


def whole_cache_bytes(layers: Sequence[LayerCost]) -> int:
    """Bytes of a weight cache that holds all layers."""
    return sum(layer.param_bytes + DEVICE_ALIGNMENT_BYTES for layer in layers if layer.param_bytes)


def with_cached_weights(costs: CostModel, cache_bytes: int, trained_bytes: int) -> CostModel:
    """The costs as the links see them after the first step: of layers in the weight cache, only what is trained is
    uploaded (once a step in truth, here once a visit). The first layers that fit; all blocks are worth about the same.

    Args:
        cache_bytes: of a device; `whole_cache_bytes` holds all layers, and then slots see the model so too.
        trained_bytes: of a trained weight.
    """
    left, layers = cache_bytes, []
    for layer in costs.layers:
        trained = layer.grad_bytes // 4 * trained_bytes
        size = layer.param_bytes + DEVICE_ALIGNMENT_BYTES
        if layer.param_bytes > trained and size <= left:
            left -= size
            layer = replace(layer, param_bytes=trained)
        layers.append(layer)
    return replace(costs, layers=tuple(layers))


def _activations(case: Case, backward_stages: Sequence[StageRange]) -> int:
    """Activations of one microbatch and stage; without recompute a worker's share of all microbatches and layers."""
    blocks = case.costs.layers[:-1]  # the head's chunk is a part of its own
    if case.settings.recompute == "none":
        whole = sum(layer.activation_bytes for layer in blocks)
        return whole * case.settings.num_microbatches // len(case.hardware.devices)
    blocks = blocks[: first_kept_block(case)]  # kept ones are counted as such, that of the microbatch at work too
    sums = (sum(layer.activation_bytes for layer in blocks[first : last + 1]) for first, last in backward_stages)
    return max(sums, default=0)


def first_kept_block(case: Case) -> int:
    """The first layer of those whose activations are kept for all microbatches, up to the head; the head where there
    are none, and where nothing is recomputed, so that all are counted anyway."""
    head = len(case.costs.layers) - 1
    return head if case.settings.recompute == "none" else max(1, head - case.settings.keep_blocks)


def _gradient_bytes(case: Case, backward_stages: Sequence[StageRange]) -> int:
    """Gradient of the largest weight, which exists whole before it is added to its sum, as far as it needs more than
    the largest activations and the head's chunk or the workspace, which are counted together: of the head's matrix
    beside its chunk, the sum over its microbatch's chunks and the activations of the head's stage, of a block's beside
    those of another and the workspace."""
    head, chunk = len(case.costs.layers) - 1, case.costs.layers[-1].activation_bytes
    workspace, needed = _workspace_bytes(case), 0
    for stage in backward_stages:
        activations = _activations(case, [stage])
        of_block = activations + workspace + block_gradient_bytes(case.architecture, case.settings)
        of_head = activations + chunk + head_gradient_bytes(case.costs, case.settings)
        needed = max(needed, of_block, of_head if stage[1] == head else 0)
    return max(0, needed - _activations(case, backward_stages) - max(chunk, workspace))


def beyond_margin(num_bytes: int, memory_bytes: int) -> int:
    """The part of a head's gradients that is more than the margin which limits of stages leave below a verdict's."""
    return max(0, num_bytes - int((FITTING_SHARE - DEVICE_SHARE) * memory_bytes))


def head_gradient_bytes(costs: CostModel, settings: TrainingSettings) -> int:
    """Bytes of the head's gradient for a recipe's microbatches, as `trained_head_bytes` counts them."""
    in_chunks = settings.tokens_per_microbatch > settings.head_chunk_tokens
    return trained_head_bytes(costs.layers[-1].grad_bytes // 4, settings.dtype_bytes, in_chunks=in_chunks)


def trained_head_bytes(num_elements: int, dtype_bytes: int, *, in_chunks: bool) -> int:
    """A trained head's gradient of one chunk, and its float32 sum over the microbatch's chunks where there are more."""
    return num_elements * (dtype_bytes + (4 if in_chunks else 0))


def fixed_device_need(case: Case) -> Need:
    """The part of `device_need` that no cut of the stages changes."""
    architecture, settings, layers = case.architecture, case.settings, case.costs.layers
    workspace = _workspace_bytes(case)
    parts = {
        HEAD_CHUNK: max(0, layers[-1].activation_bytes - workspace),  # which is free before a block's backward begins
        "boundary tensors": 4 * max(layer.boundary_bytes for layer in layers),
        "workspace of backward": workspace,
    }
    if settings.packed_bytes_per_param and not settings.unpacks_once:
        matrices = max(map(settings.packed_params, architecture.blocks), default=0)
        parts["weights of a block, unpacked"] = matrices * settings.dtype_bytes
    if settings.recompute == "layer":
        parts["activations of the layer at work"] = one_layer_bytes(architecture, settings)
    if case.gpus:
        parts |= {CONTEXT: CONTEXT_BYTES, "weight cache": settings.weight_cache_bytes}
    return Need(parts)


def _workspace_bytes(case: Case) -> int:
    """`backward_workspace_bytes` of the case, and sums of its gradients where the feed-forward part is in chunks."""
    architecture, settings = case.architecture, case.settings
    tokens, mlp_tokens = settings.tokens_per_microbatch, settings.tokens_per_mlp_call
    wide = architecture.intermediate_size * max(1, architecture.num_experts_per_tok)
    hidden = architecture.hidden_size
    workspace = backward_workspace_bytes(tokens, mlp_tokens, wide, hidden, size=settings.dtype_bytes)
    if mlp_tokens < tokens:
        workspace += max((layer.grad_bytes for layer in case.costs.layers[1:-1]), default=0)
    if settings.sequence_chunks == 1:
        return workspace
    # a chunk's attention: gradients of all keys and values, for each head, in sum and of earlier chunks, and of queries
    # in float32, too; what its feed-forward part kept is free by then
    heads, shared, size = architecture.num_attention_heads, architecture.num_key_value_heads, settings.dtype_bytes
    keys = 2 * settings.tokens_of_sequences * (heads + 2 * shared) * size + tokens * heads * (2 * size + 4)
    freed = size * mlp_tokens * wide * (4 if architecture.gated_mlp else 2)
    return max(workspace, int(keys * architecture.head_dim - freed))


def backward_workspace_bytes(tokens: float, mlp_tokens: float, width: int, hidden_size: int, *, size: int) -> int:
    """Gradients of what a block's backward is at: of its feed-forward part, and of hidden states.

    Args:
        mlp_tokens: that the feed-forward part takes at once.
        width: of the feed-forward part, of all experts that compute a token.
        size: bytes of a value.
    """
    return int(size * (mlp_tokens * 3 * width + tokens * 2 * hidden_size))


def one_layer_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """Activations of the largest block for one microbatch."""
    return max(activation_bytes(architecture, block, settings) for block in set(architecture.blocks))


def grows_segments(name: str) -> bool:
    """Whether a run on a card of this name has segments of memory that grow, and so no gaps: not on a virtual GPU, nor
    where the user configured torch's allocator otherwise."""
    chosen = [os.environ[variable] for variable in ALLOCATOR_VARIABLES if variable in os.environ]
    if re.search(r"\bGRID\b|-\d+[ABCQ]$", name):
        return False
    return not chosen or any("expandable_segments:true" in text.lower() for text in chosen)


def without_gaps(memory_bytes: int, method: str) -> int:
    """The part of a card's memory that a run can fill where segments do not grow."""
    if method != "full":
        return memory_bytes
    return CONTEXT_BYTES + int(max(0, memory_bytes - CONTEXT_BYTES) / (1 + GAPS))


def usable_device_bytes(device: Device) -> int:
    """Bytes of a device's nominal memory that a run may use."""
    return int(device.memory_bytes * FITTING_SHARE)


def usable_host_bytes(hardware: Hardware) -> int:
    """Bytes of the host's memory that a run may use."""
    total = hardware.host_memory_bytes
    return total - min(HOST_MARGIN_BYTES, int(total * HOST_MARGIN))


def rounds_kept(num_workers: int, num_forward: int, num_backward: int) -> float:
    """Rounds of which the host keeps all stages' inputs at once, at most: 1 to 2.

    Stages are dealt out in turn, so those at work are never more than `num_workers` in a row. Of a row across the
    border of two rounds, j backward stages of the one keep j of its `num_backward` inputs, and the others have made
    as many of the next round's `num_forward`: together more than a round's only where a row holds a whole direction.
    """
    if not num_forward or not num_backward:
        return 1.0
    over = max((num_workers - num_forward) / num_backward, (num_workers - num_backward) / num_forward, 0.0)
    return 1 + min(1.0, over)


def _in_flight(case: Case, stages: tuple[int, int], microbatches_per_round: int) -> int:
    """Microbatches that may be between their forward and their backward at once."""
    settings, rounds = case.settings, rounds_kept(len(case.hardware.devices), *stages)
    return min(settings.num_microbatches, math.ceil(rounds * max(microbatches_per_round, settings.sequence_chunks)))


def host_need(case: Case, stages: tuple[int, int], microbatches_per_round: int, *, waiting_bytes: int = 0) -> Need:
    """Bytes of host memory at the peak of a step. CPU workers' own memory (`device_need`) is not in it.

    Args:
        stages: how many forward and backward.
        microbatches_per_round: whose boundaries are kept together.
        waiting_bytes: gradients of stages that workers share, which wait for their turn to be added.
    """
    architecture, settings, layers = case.architecture, case.settings, case.costs.layers
    trainable = sum(trainable_params(architecture, settings))
    updated = -(-trainable // settings.num_shards)
    size = settings.dtype_bytes
    boundary = max(layer.boundary_bytes for layer in layers)
    num_gpus = len(case.gpus)
    if num_gpus:  # torch gives page-locked memory away in powers of two
        boundary = 1 << (boundary - 1).bit_length()
    chunks = settings.sequence_chunks
    in_flight = _in_flight(case, stages, microbatches_per_round)
    keys_and_values = key_value_bytes(architecture, settings) * len(architecture.blocks) * -(-in_flight // chunks)
    temporaries = update_temporary_bytes(architecture, settings)
    num_inputs = len(layers) if settings.skip_last_projection else stages[1]
    if chunks > 1:  # a run's first steps have one layer a stage, and the fewest sequences in a round
        num_inputs = len(layers)
    of_teacher = settings.tokens_per_microbatch, settings.teacher_tokens
    return Need(
        {
            "frozen weights": 0 if settings.weights_on_disk else frozen_bytes(architecture, settings),
            "trained weights": trainable * size if size == 2 else 0,  # float32: the masters are the weights
            "float32 masters": (updated if size == 2 else trainable) * 4,
            "optimizer state": int(updated * moment_bytes_per_param(settings, architecture.hidden_size)),
            "temporaries of the optimizer": temporaries,
            "gradients": trainable * 4,
            "gradients in line": waiting_bytes,
            "boundary activations": boundary * (num_inputs + 2) * in_flight,
            "keys and values of chunks": keys_and_values,
            "a teacher's figures": settings.num_microbatches * teacher_bytes(*of_teacher),
            "page-locked rings": 2 * PINNED_RING_BYTES * num_gpus,
            "interpreter and contexts": interpreter_bytes(num_gpus) + CONTEXT_HOST_BYTES * num_gpus,
            "tokenizer": TOKEN_BYTES * architecture.vocab_size,
        }
    )


def interpreter_bytes(num_gpus: int) -> int:
    """With the libraries that a torch for GPUs loads where there are none; contexts count theirs."""
    if num_gpus:
        return INTERPRETER_BYTES
    has_triton, torch = importlib.util.find_spec("triton") is not None, importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations or () if torch is not None else ()
    has_cuda = any(Path(folder, "lib", "libtorch_cuda.so").exists() for folder in folders)
    return INTERPRETER_BYTES + (TRITON_BYTES if has_triton else 0) + (CUDA_LIBRARIES_BYTES if has_cuda else 0)


def loading_need(architecture: Architecture, settings: TrainingSettings) -> Need:
    """Bytes of host memory at the peak of loading: what is filled, and the one weight that is converted."""
    trainable = sum(trainable_params(architecture, settings))
    size, kind = settings.dtype_bytes, settings.packed_as
    share = settings.packed_bytes_per_param / size if kind and PACKED_FORMATS[kind].is_published else 1.0
    return Need(
        {
            "frozen weights": 0 if settings.weights_on_disk else frozen_bytes(architecture, settings),
            "trained weights": trainable * size if size == 2 else 0,
            "float32 masters": trainable * 4,
            "a weight while it is converted": int(converted_bytes(architecture, settings) * share),
            "interpreter": INTERPRETER_BYTES,
            "tokenizer": TOKEN_BYTES * architecture.vocab_size,
        }
    )


def moment_bytes_per_param(settings: TrainingSettings, hidden_size: int) -> float:
    """State that the optimizer keeps for each trained parameter. A trained matrix has r or `hidden_size` elements on
    one side and at least `hidden_size` on the other."""
    narrow = settings.lora_r if settings.method == "lora" else hidden_size
    return OPTIMIZERS[settings.optimizer].state_bytes(narrow, hidden_size, has_momentum=settings.has_momentum)


def update_temporary_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """Temporaries of the update of the largest trained weight, of those optimizers that take it as a whole."""
    width = max(architecture.vocab_size, architecture.intermediate_size)
    fused = converted_bytes(architecture, settings) // settings.dtype_bytes
    largest = max(architecture.hidden_size * width, fused)
    if settings.method == "lora":
        largest = settings.lora_r * max(architecture.hidden_size, architecture.intermediate_size)
    return int(OPTIMIZERS[settings.optimizer].temporary_bytes * largest)


def frozen_bytes(architecture: Architecture, settings: TrainingSettings) -> int:
    """Bytes of all weights that are not trained, as they lie on the host."""
    if settings.method == "full":
        return 0
    rest = architecture.parameters - sum(block.params for block in architecture.blocks)
    return int(sum(map(settings.frozen_bytes, architecture.blocks))) + rest * settings.dtype_bytes


def disk_need(architecture: Architecture, settings: TrainingSettings) -> Need:
    """Bytes in `output_dir` at the peak: checkpoints hold masters and moments."""
    trainable = sum(trainable_params(architecture, settings))
    state = moment_bytes_per_param(settings, architecture.hidden_size)
    checkpoint = int(trainable * (4 + state))
    result = trainable * settings.dtype_bytes
    count = settings.save_total_limit + 1
    mapped = frozen_bytes(architecture, settings) if settings.weights_on_disk else 0
    return Need({f"{count} checkpoints": checkpoint * count, "the result": result, "mapped weights": mapped})


# Memory of all workers of a machine without GPUs: part of the host's, with no weights and no gradient sums in it.

KEPT_BYTES = 64 * MIB
"""Memory of the heap that a step freed and that cannot be given back, for something lies on each of its pages: 60 to
100 MB measured beside a model of 135M parameters after each step, and none beside a tiny one: at most what it took."""


def cpu_workers_need(
    case: Case, stages: tuple[Sequence[StageRange], Sequence[StageRange]], microbatches_per_round: int
) -> dict[str, int]:
    """Bytes of all CPU workers together at their peak.

    Stages are dealt out in turn, so no two workers compute the same one unless there are more workers than stages: only
    then does more than one hold the head's logits. A gradient of the later of the two waits for its turn to be added.

    Args:
        stages: forward and backward.
        microbatches_per_round: of a visit of a stage.
    """
    workers, (forward, backward) = sum(device.is_cpu for device in case.hardware.devices), stages
    at_once = math.ceil(workers / len(backward))
    head = len(case.costs.layers) - 1
    visits = []
    for stage in backward:
        need = device_need(case, forward, [stage])
        lacks = () if stage[1] == head else (HEAD_CHUNK, LARGEST_GRADIENT)
        of_weight = block_gradient_bytes(case.architecture, case.settings) if lacks else 0
        visits.append(of_weight + sum(num_bytes for name, num_bytes in need.parts.items() if name not in lacks))
    visits = sorted(visits * at_once, reverse=True)[:workers]
    waiting = (at_once - 1) * microbatches_per_round * sum(layer.grad_bytes for layer in case.costs.layers)
    return {
        f"{workers} CPU workers": sum(visits),
        "heap that the C library keeps": min(KEPT_BYTES, sum(visits)),
        "gradients that wait for their turn": waiting,
    }
