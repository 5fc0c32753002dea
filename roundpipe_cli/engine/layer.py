"""One worker's work on a single layer: forward, recompute and backward for one microbatch.

Each layer is a graph of its own (its input is detached), so where stages are cut does not change a bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.engine.backends.base import Backend, DeviceEvent
from roundpipe_cli.engine.gradients import GradientParts, Leaving, add_to, leaving_parts, square_sum
from roundpipe_cli.engine.microbatch import MicrobatchState, SequenceChunk
from roundpipe_cli.engine.prepared import StepContext, TrainedLayers, weights_found_again
from roundpipe_cli.engine.program import layer_range
from roundpipe_cli.kernels.cross_entropy import adds_products, product_sum
from roundpipe_cli.model.attention import recurrent_blocks
from roundpipe_cli.model.block_calls import BlockCall, Prologue
from roundpipe_cli.model.chunks import ChunkCache, KeyValues
from roundpipe_cli.model.dropout import layer_seed
from roundpipe_cli.model.head import HeadTargets, map_tensors, run_head, score_head
from roundpipe_cli.model.layout import LayerLayout
from roundpipe_cli.model.taps import AddProduct, GradientTaps, Take
from roundpipe_cli.model.worker_model import WorkerModel

# Sequences in chunks on one worker: keys and values of the chunks so far, and the gradients that wait for them.
#
#     forward    chunk 0 -> 1 -> 2        each block's keys and values stay on the worker until the sequence is through,
#                   |     |               and go to the host for the backward, like boundary tensors
#                   v     v
#     backward   chunk 2 -> 1 -> 0        chunk 2's backward makes gradients of the keys and values of chunks 1 and 0;
#                                         they are added up (float32) until those chunks' turn comes
#
# A recurrent block has states in their place: what it carries from a chunk to the next. Only the next reads them.
#
# Shapes: S tokens of the sequence, B sequences, K key heads, D width of a head.


@dataclass
class BlockSequence:
    """One block's keys and values of one sequence; while it goes backward, with their gradients."""

    is_recurrent: bool = False
    """The block has states: what is said of keys and values [B, K, tokens, D] holds for a pair of tensors a chunk."""
    buffers: list[torch.Tensor] = field(default_factory=list)
    """Keys and values, [S, B, K, D], or states, [chunks, ...]: what a chunk adds lies in one piece."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Gradients, float32, of the same shapes; empty while the sequence goes forward."""

    def write(self, chunk: SequenceChunk, own: KeyValues) -> list[torch.Tensor]:
        """Add a chunk's keys and values [B, K, T, D]; returns their pieces [T, B, K, D] of the buffers."""
        return self._write(chunk, [self._as_piece(tensor.detach()) for tensor in own])

    def fill(self, chunk: SequenceChunk, pieces: list[torch.Tensor]) -> None:
        """Put a chunk's pieces that came from the host at their place; there are gradients from now on."""
        self._write(chunk, pieces)
        if not self.gradients:
            self.gradients = [torch.zeros_like(buffer, dtype=torch.float32) for buffer in self.buffers]

    def _write(self, chunk: SequenceChunk, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self.buffers:
            length = chunk.count if self.is_recurrent else chunk.sequence_tokens
            self.buffers = [piece.new_empty(length, *piece.shape[1:]) for piece in pieces]
        for buffer, piece in zip(self.buffers, pieces, strict=True):
            buffer[self._place(chunk)] = piece
        return [buffer[self._place(chunk)] for buffer in self.buffers]

    def _place(self, chunk: SequenceChunk) -> slice:
        return slice(chunk.index, chunk.index + 1) if self.is_recurrent else slice(chunk.start, chunk.end)

    def _place_before(self, chunk: SequenceChunk) -> slice:
        return slice(chunk.index - 1, chunk.index) if self.is_recurrent else slice(0, chunk.start)

    def _as_piece(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[None] if self.is_recurrent else tensor.permute(2, 0, 1, 3)

    def _as_block_has_it(self, piece: torch.Tensor) -> torch.Tensor:
        return piece[0] if self.is_recurrent else piece.permute(1, 2, 0, 3)

    def before(self, chunk: SequenceChunk) -> KeyValues | None:
        """Keys and values of the chunks before, [B, K, tokens, D]; None for the first chunk."""
        if chunk.start == 0:
            return None
        keys, values = (self._as_block_has_it(buffer[self._place_before(chunk)]) for buffer in self.buffers)
        return keys, values

    def add_gradients(self, chunk: SequenceChunk, gradients: list[torch.Tensor | None]) -> None:
        """Add the gradients of `before` that a chunk's backward has made."""
        for total, gradient in zip(self.gradients, gradients, strict=True):
            if gradient is not None:
                add_to(total[self._place_before(chunk)], self._as_piece(gradient))

    def waiting(self, chunk: SequenceChunk, own: KeyValues) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A chunk's own keys and values, each with the gradient that later chunks have made for it."""
        if chunk.is_last:
            return []
        return [
            (tensor, self._as_block_has_it(total[self._place(chunk)]).to(tensor.dtype))
            for tensor, total in zip(own, self.gradients, strict=True)
            if tensor.requires_grad
        ]


# Brings the gradients of one worker's backward passes to their sums.
#
# On the processor they are added to the host's sum where it is their turn. From a device they are added to the sum that
# travels with the stage, or leave, one microbatch at a time, for the host's sum.


class GradientCollector:
    """Adds up, lists or sends away the gradients of a worker's backward passes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.accumulators: dict[int, list[torch.Tensor]] = {}
        """Per layer of the current visit, the device's gradient sums (empty if folded on the host)."""
        self.leaving: dict[tuple[int, int], list[Leaving]] = {}
        """(layer, microbatch) -> its gradients, which the operation's download takes to the host's sum."""

    def taker(self, context: StepContext, layer: int, microbatch: int) -> tuple[Take, GradientParts]:
        """Adds gradients to the layer's sum as backward makes them; lists them if an earlier microbatch is missing."""
        fold, prepared = context.gradients.folds.get(layer), context.prepared
        parts: GradientParts = []
        sums = self.accumulators.get(layer, []) if layer in prepared.device_folds else []
        if fold is not None and self._backend.aliases_host and fold.is_turn(prepared.fold_place(layer, microbatch)):
            sums = fold.begin()

        def take(index: int, gradient: torch.Tensor) -> None:
            if sums:
                add_to(sums[index], gradient)
            else:
                parts.append((index, gradient))

        return take, parts

    def chunk_taker(self, *, adds_up: bool) -> tuple[Take, AddProduct, dict[int, torch.Tensor]]:
        """Adds up a trained head's gradients over the chunks of one microbatch, in float32: apart from the other
        microbatches', so that one sum of each worker's is all that has to reach the host.

        Args:
            adds_up: whether there is more than one chunk.
        """
        sums: dict[int, torch.Tensor] = {}

        def take(index: int, gradient: torch.Tensor) -> None:
            if index in sums:
                add_to(sums[index], gradient)
            else:
                sums[index] = gradient.float() if adds_up else gradient

        def add_product(index: int, left: torch.Tensor, right: torch.Tensor) -> None:
            sums[index] = product_sum(sums.get(index), left, right)

        return take, add_product, sums

    def fold(self, context: StepContext, layer: int, microbatch: int, parts: GradientParts) -> None:
        """After a layer's backward: add listed gradients, or let them wait for their turn or download."""
        if layer not in context.gradients.folds:
            return
        if layer in context.prepared.device_folds:
            with self._backend.compute():
                for index, gradient in parts:
                    add_to(self.accumulators[layer][index], gradient)
            return
        if parts and not self._backend.aliases_host:
            with self._backend.compute():
                self.leaving[layer, microbatch] = leaving_parts(parts)
        else:
            self.fold_on_host(context, layer, microbatch, parts)

    def fold_on_host(self, context: StepContext, layer: int, microbatch: int, parts: GradientParts) -> None:
        """Add a microbatch to the layer's sum on the host; it waits until all earlier ones are added."""
        fold = context.gradients.folds[layer]
        if fold.fold(context.prepared.fold_place(layer, microbatch), parts):
            context.gradients.complete(layer, square_sum(fold.flat))


@dataclass
class LayerGraph:
    """One layer's recomputed forward, waiting for its backward."""

    layer: int
    leaf: torch.Tensor
    output: torch.Tensor | None
    """None where nothing reads it."""
    parameters: list[nn.Parameter]
    """Trained parameters, as bound at the time of the forward."""
    earlier: KeyValues | None = None
    """For a chunk: leaves with the keys and values of earlier chunks."""
    own: KeyValues | None = None
    """For a chunk: its own keys and values, with their graph."""


class LayerRunner:
    """Computes layers on one worker's module objects."""

    def __init__(
        self,
        worker: int,
        model: WorkerModel,
        backend: Backend,
        trained: TrainedLayers,
        *,
        layouts: Sequence[LayerLayout],
    ) -> None:
        self.worker, self.model, self.backend = worker, model, backend
        self.trained = trained
        self.collector = GradientCollector(backend)
        self._layouts = layouts
        self.parameters: dict[int, list[nn.Parameter]] = {}
        """Per layer, the trainable parameters as bound now, in layout order."""
        self._kept: dict[tuple[int, int], LayerGraph] = {}
        """By (layer, microbatch), from the forward to the backward."""
        self._recurrent = recurrent_blocks(model.blocks, first=1)
        self._sequences: dict[tuple[bool, int, int], BlockSequence] = {}
        """(whether it goes forward, layer, first microbatch) -> keys and values of an unfinished sequence."""
        self._sent: deque[tuple[DeviceEvent, int, Prologue, torch.Tensor]] = deque()
        """Gradients of the first block's input on their way to the host: (when there, microbatch, prologue, it)."""
        self.layer = 0
        """The current layer, for error messages."""

    def unbind(self) -> None:
        """Drop parameters and gradient sums to free their memory; the next visits bind them again."""
        self.parameters.clear()
        self.collector.accumulators = {}
        self.model.unbind()

    def reset(self) -> None:
        """Drop what a failed step left."""
        self._kept.clear()
        self._sent.clear()
        self.collector.leaving.clear()
        self._sequences.clear()

    # -- embedding -----------------------------------------------------------------------------------------------

    def embed(self, context: StepContext, state: MicrobatchState) -> torch.Tensor:
        """Hidden states at the input of the first block, on the device."""
        if state.prologue is None:
            seed = self._seed(context, 0, state)
            start = None if state.chunk is None else state.chunk.start
            state.prologue = self.model.prologue(
                state.input_ids, seed, state.position_ids, start, lengths=state.lengths
            )
            if context.scoring:  # keep no graph
                state.prologue = Prologue(state.prologue.hidden.detach(), state.prologue.calls)
        return self.backend.receive(state.prologue.hidden.detach())

    def embed_backward(self, context: StepContext, state: MicrobatchState, gradient: torch.Tensor | None) -> None:
        """Backward of the embed layer, on the host, once the gradient has arrived; earlier ones most likely have.

        Its gradients are added at the end of the step.
        """
        self.layer = 0
        if state.prologue is not None and state.prologue.leaves and gradient is not None:
            host, event = self.backend.send(gradient)
            self._sent.append((event, state.index, state.prologue, host))
            state.prologue = replace(state.prologue, hidden=state.prologue.hidden.detach())
        self.finish_arrived(context)

    def finish_arrived(self, context: StepContext, *, all_have: bool = False) -> None:
        """Pass gradients that have arrived on to the embed layer's backward; `all_have`: the device is done."""
        while self._sent and (all_have or self.backend.happens_in_s(self._sent[0][0]) <= 0):
            context.gradients.begin_embed(*self._sent.popleft()[1:])

    # -- blocks --------------------------------------------------------------------------------------------------

    def forward(
        self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Forward of a block without a graph.

        Returns:
            its output, and the keys and values that later chunks of the sequence will ask for in the backward.
        """
        sequence = self._sequence(layer, state, forward=True)
        cache = self._cache(state, sequence)
        with torch.no_grad(), self.backend.compute():
            output = self._run_block(context, layer, state, hidden, cache=cache)
            if state.chunk is None or cache is None or sequence is None:
                return output, []
            own = cache.only(f"block.{layer - 1}")
            pieces = [] if state.chunk.is_last else sequence.write(state.chunk, own)
        if state.chunk.is_last:
            del self._sequences[True, layer, state.index - state.chunk.index]
        return output, pieces

    def keep(self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor) -> torch.Tensor:
        """Forward of a block whose graph stays until the backward; returns its output."""
        moves = not self.backend.aliases_host
        with weights_found_again(moves, partial(self.model.first_weight, layer), self._layouts[layer].num_bytes):
            graph = self.graph_of(context, layer, state, hidden, output_is_read=True)
        assert graph.output is not None
        self._kept[layer, state.index] = graph
        return graph.output.detach()

    def graph_of(
        self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor, *, output_is_read: bool
    ) -> LayerGraph:
        """The forward of one block with its graph, computed or kept; below the first trained layer without one, and
        only if its output is read."""
        if (layer, state.index) in self._kept:
            return self._kept.pop((layer, state.index))
        is_trained = layer >= self.trained.first
        graph = LayerGraph(layer, hidden.detach(), None, self.parameters[layer])
        graph.leaf.requires_grad_(layer > self.trained.first)
        if not (is_trained or output_is_read):
            return graph
        cache = self._cache(state, self._sequence(layer, state))
        if is_trained and cache is not None and cache.earlier is not None:
            keys, values = (tensor.detach().requires_grad_() for tensor in cache.earlier)
            graph.earlier = cache.earlier = (keys, values)
        with torch.set_grad_enabled(is_trained), self.backend.compute():
            leaf = graph.leaf
            graph.output = self._run_block(context, layer, state, leaf, output_is_read=output_is_read, cache=cache)
        if is_trained and cache is not None:
            graph.own = cache.only(f"block.{layer - 1}")
        return graph

    def backward(
        self, context: StepContext, graph: LayerGraph, state: MicrobatchState, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Backward of one block: folds its parameters' gradients, returns that of its input."""
        if graph.layer < self.trained.first or graph.output is None:
            return None
        self.layer = graph.layer
        take, parts = self.collector.taker(context, graph.layer, state.index)
        outputs: list[tuple[torch.Tensor, torch.Tensor | None]] = [(graph.output, gradient)]
        sequence = self._sequence(graph.layer, state)
        with self.backend.compute():
            if state.chunk is not None and sequence is not None and graph.own is not None:
                outputs += sequence.waiting(state.chunk, graph.own)
            with GradientTaps(graph.parameters, take):
                torch.autograd.backward([tensor for tensor, _ in outputs], [given for _, given in outputs])
            if state.chunk is not None and sequence is not None and graph.earlier is not None:
                sequence.add_gradients(state.chunk, [leaf.grad for leaf in graph.earlier])
        graph.output = graph.own = graph.earlier = None
        self.collector.fold(context, graph.layer, state.index, parts)
        return graph.leaf.grad

    # -- head ----------------------------------------------------------------------------------------------------

    def head(self, context: StepContext, state: MicrobatchState, hidden: torch.Tensor) -> torch.Tensor | None:
        """Forward and backward of the head; returns the gradient of its input."""
        layer = self.layer = context.prepared.head
        adds_up = state.target_indices.numel() > context.loss.chunk_tokens
        take, add_product, gradients = self.collector.chunk_taker(adds_up=adds_up)
        taps = GradientTaps(self.parameters[layer], take, add_product if adds_up and adds_products(hidden) else None)
        routers = self.model.split.routers
        with self.backend.compute():
            hidden, sums = self._without_sums(state, hidden)
            result = run_head(
                partial(self.model.logits, dropout_seed=self._seed(context, layer, state)),
                hidden,
                self._targets(state),
                context.loss,
                taps=taps,
                needs_hidden_grad=self.trained.first < layer,
            )
            if routers is not None and sums is not None:
                routers.add_to(result, sums, state.num_units, context.loss.gradient_scale)
        state.loss_sum, state.part_sums = result.loss_sum, result.part_sums  # read when the step is done
        self.collector.fold(context, layer, state.index, list(gradients.items()))
        return result.grad_hidden

    def score(self, context: StepContext, state: MicrobatchState, hidden: torch.Tensor) -> None:
        """Forward of the head in a pass without backward."""
        self.layer = context.prepared.head
        with self.backend.compute():
            hidden, _ = self._without_sums(state, hidden)
            scores = score_head(
                self.model.logits,
                hidden,
                self._targets(state),
                chunk_tokens=context.loss.chunk_tokens,
                top_k=context.top_k,
            )
        state.scores = map_tensors(scores, lambda one: self.backend.send(one)[0])  # complete when the pass is done
        state.prologue = None  # nothing reads it again

    def _without_sums(self, state: MicrobatchState, boundary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last block's hidden states, and what the routers' loss is made of."""
        assert state.prologue is not None
        carry = state.prologue.calls[-1].carry
        return (boundary, None) if carry is None else carry.unpack_last(boundary)

    def _targets(self, state: MicrobatchState) -> HeadTargets:
        receive, preference, weights = self.backend.receive, state.preference, state.target_weights
        indices, ids = receive(state.target_indices), receive(state.target_ids)
        moved = None if preference is None else map_tensors(preference, receive)
        teacher = None if state.teacher is None else map_tensors(state.teacher, receive)
        return HeadTargets(indices, ids, moved, None if weights is None else receive(weights), teacher)

    # -- chunks of a sequence ------------------------------------------------------------------------------------

    def attend_to(
        self, layer: int, state: MicrobatchState, earlier: SequenceChunk, keys_and_values: list[torch.Tensor]
    ) -> None:
        """Before the backward of a sequence's last chunk: take back keys and values of an earlier chunk's forward."""
        sequence = self._sequence(layer, state)
        assert sequence is not None
        with self.backend.compute():
            sequence.fill(earlier, keys_and_values)

    def end_backward(self, layers: StageRange, state: MicrobatchState) -> None:
        """Note that a stage's backward of this microbatch is done; drop a sequence after its first chunk, the last."""
        if state.chunk is not None and state.chunk.index == 0:
            for layer in layer_range(layers):
                self._sequences.pop((False, layer, state.index), None)

    def _sequence(self, layer: int, state: MicrobatchState, *, forward: bool = False) -> BlockSequence | None:
        """Keys and values of a layer in the sequence of a chunk; None for a microbatch that is none."""
        if state.chunk is None:
            return None
        key = forward, layer, state.index - state.chunk.index
        return self._sequences.setdefault(key, BlockSequence(layer in self._recurrent))

    def _cache(self, state: MicrobatchState, sequence: BlockSequence | None) -> ChunkCache | None:
        """The cache that a block is called with for a chunk; None for a whole sequence."""
        if state.chunk is None or sequence is None:
            return None
        return ChunkCache(state.chunk.start, len(self.model.blocks), sequence.before(state.chunk))

    # -- calls ---------------------------------------------------------------------------------------------------

    def _run_block(
        self,
        context: StepContext,
        layer: int,
        state: MicrobatchState,
        hidden: torch.Tensor,
        *,
        output_is_read: bool = True,
        cache: ChunkCache | None = None,
    ) -> torch.Tensor:
        self.layer = layer
        calls = self.calls(state)
        seed = self._seed(context, layer, state) if context.seeds_blocks else None
        block = self.model.run_block
        return block(layer - 1, calls[layer - 1], hidden, seed, output_is_read=output_is_read, cache=cache)

    def _seed(self, context: StepContext, layer: int, state: MicrobatchState) -> int | None:
        """Seed of what `layer` draws at random; None in a pass that draws nothing."""
        if context.scoring:
            return None
        return layer_seed(context.dropout_seed, context.step, state.place, layer)

    def calls(self, state: MicrobatchState) -> tuple[BlockCall, ...]:
        """Arguments of the blocks for this microbatch, on this worker's device; made once."""
        if self.worker not in state.calls_by_worker:
            assert state.prologue is not None
            moved: dict[int, torch.Tensor] = {}

            def move(tensor: torch.Tensor) -> torch.Tensor:
                if id(tensor) not in moved:
                    moved[id(tensor)] = self.backend.receive(tensor)
                return moved[id(tensor)]

            state.calls_by_worker[self.worker] = tuple(call.map_tensors(move) for call in state.prologue.calls)
        return state.calls_by_worker[self.worker]
