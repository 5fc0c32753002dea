"""One worker's work on a single layer: forward, recompute and backward for one microbatch.

Each layer is a graph of its own (its input is detached), so where stages are cut does not change a bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.engine.activations import MicrobatchState, SequenceChunk
from roundpipe_cli.engine.backends.base import Backend, DeviceEvent
from roundpipe_cli.engine.collect import GradientCollector
from roundpipe_cli.engine.context import Scoring, StepContext
from roundpipe_cli.engine.kept import weights_found_again
from roundpipe_cli.engine.program import layer_range
from roundpipe_cli.engine.sequences import BlockSequence, Sequences
from roundpipe_cli.engine.trained import TrainedLayers
from roundpipe_cli.model.block_calls import BlockCall, Prologue
from roundpipe_cli.model.chunks import ChunkCache, KeyValues
from roundpipe_cli.model.dropout import layer_seed
from roundpipe_cli.model.head import GradientTaps, HeadTargets, run_head, score_head
from roundpipe_cli.model.worker_model import WorkerModel


@dataclass
class LayerGraph:
    """One layer's recomputed forward, waiting for its backward."""

    layer: int
    leaf: torch.Tensor
    output: torch.Tensor | None
    """None for a layer below the first trained one."""
    parameters: list[nn.Parameter]
    """Trained parameters, as bound at the time of the forward."""
    earlier: KeyValues | None = None
    """For a chunk: leaves with the keys and values of earlier chunks."""
    own: KeyValues | None = None
    """For a chunk: its own keys and values, with their graph."""


@dataclass(frozen=True)
class _Sent:
    """A gradient of the first block's input on its way to the host."""

    microbatch: int
    prologue: Prologue
    gradient: torch.Tensor
    event: DeviceEvent


class LayerRunner:
    """Computes layers on one worker's module objects."""

    def __init__(
        self, worker: int, model: WorkerModel, backend: Backend, trained: TrainedLayers, layer_bytes: Sequence[int]
    ) -> None:
        """
        Args:
            layer_bytes: per layer, bytes of its weights.
        """
        self.worker, self.model, self.backend = worker, model, backend
        self.trained = trained
        self.collector = GradientCollector(backend)
        self._layer_bytes = layer_bytes
        self.parameters: dict[int, list[nn.Parameter]] = {}
        """Per layer, the trainable parameters as bound now, in layout order."""
        self._kept: dict[tuple[int, int], LayerGraph] = {}
        """By (layer, microbatch), from the forward to the backward."""
        self._forward_sequences, self._backward_sequences = Sequences(), Sequences()
        self._sent: deque[_Sent] = deque()
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
        self.collector.leaving = []
        self._forward_sequences.clear()
        self._backward_sequences.clear()

    # -- embedding -----------------------------------------------------------------------------------------------

    def embed(self, context: StepContext, state: MicrobatchState) -> torch.Tensor:
        """Hidden states at the input of the first block, on the device."""
        if state.prologue is None:
            seed = self._seed(context, 0, state)
            start = None if state.chunk is None else state.chunk.start
            state.prologue = self.model.prologue(state.input_ids, seed, state.position_ids, start, state.lengths)
            if context.scoring is not None:  # keep no graph
                state.prologue = Prologue(state.prologue.hidden.detach(), state.prologue.calls)
        return self.backend.receive(state.prologue.hidden.detach())

    def embed_backward(self, context: StepContext, state: MicrobatchState, gradient: torch.Tensor | None) -> None:
        """Backward of the embed layer, on the host, once the gradient has arrived; earlier ones most likely have.

        Its gradients are added at the end of the step.
        """
        self.layer = 0
        if state.prologue is not None and state.prologue.leaves and gradient is not None:
            host, event = self.backend.send(gradient)
            self._sent.append(_Sent(state.index, state.prologue, host, event))
            state.prologue = replace(state.prologue, hidden=state.prologue.hidden.detach())
        while self._sent and self.backend.happens_in_s(self._sent[0].event) <= 0:
            self._finish_embed(context)

    def finish(self, context: StepContext) -> None:
        """At the end of a step, when the device is done: finish the work on the host."""
        while self._sent:
            self._finish_embed(context)

    def _finish_embed(self, context: StepContext) -> None:
        sent = self._sent.popleft()
        context.gradients.of_embed[sent.microbatch] = sent.prologue.backward(sent.gradient)

    # -- blocks --------------------------------------------------------------------------------------------------

    def forward(
        self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Forward of a block without a graph.

        Returns:
            its output, and the keys and values that later chunks of the sequence will ask for in the backward.
        """
        sequence = self._forward_sequences.of(layer, state)
        cache = self._cache(state, sequence)
        with torch.no_grad(), self.backend.compute():
            output = self._run_block(context, layer, state, hidden, cache=cache)
            if state.chunk is None or cache is None or sequence is None:
                return output, []
            own = cache.only(f"block.{layer - 1}")
            pieces = [] if state.chunk.is_last else sequence.write(state.chunk, own)
        if state.chunk.is_last:
            self._forward_sequences.end(layer, state)
        return output, pieces

    def keep(self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor) -> torch.Tensor:
        """Forward of a block whose graph stays until the backward; returns its output."""

        def weights_now() -> torch.Tensor:
            return self.model.first_weight(layer)

        moves = not self.backend.aliases_host
        with weights_found_again(moves, weights_now, self._layer_bytes[layer]):
            graph = self.graph_of(context, layer, state, hidden, output_is_read=True)
        assert graph.output is not None
        self._kept[layer, state.index] = graph
        return graph.output.detach()

    def graph_of(
        self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor, output_is_read: bool
    ) -> LayerGraph:
        """The forward of one block with its graph, computed or kept; no graph below the first trained layer."""
        if (layer, state.index) in self._kept:
            return self._kept.pop((layer, state.index))
        leaf = hidden.detach()
        parameters = self.parameters[layer]
        if layer < self.trained.first:
            return LayerGraph(layer, leaf, None, parameters)
        leaf.requires_grad_(layer > self.trained.first)
        graph = LayerGraph(layer, leaf, None, parameters)
        cache = self._cache(state, self._backward_sequences.of(layer, state))
        if cache is not None and cache.earlier is not None:
            keys, values = (tensor.detach().requires_grad_() for tensor in cache.earlier)
            graph.earlier = cache.earlier = (keys, values)
        with torch.enable_grad(), self.backend.compute():
            graph.output = self._run_block(context, layer, state, leaf, output_is_read, cache)
        graph.own = None if cache is None else cache.only(f"block.{layer - 1}")
        return graph

    def forward_again(
        self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Output of a block below the first trained layer, in a recompute."""
        cache = self._cache(state, self._backward_sequences.of(layer, state))
        with torch.no_grad(), self.backend.compute():
            return self._run_block(context, layer, state, hidden, cache=cache)

    def backward(
        self, context: StepContext, graph: LayerGraph, state: MicrobatchState, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Backward of one block: folds its parameters' gradients, returns that of its input."""
        if graph.output is None:
            return None
        self.layer = graph.layer
        take, parts = self.collector.taker(context, graph.layer, state.index)
        outputs: list[tuple[torch.Tensor, torch.Tensor | None]] = [(graph.output, gradient)]
        sequence = self._backward_sequences.of(graph.layer, state)
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
        take, parts = self.collector.taker(context, layer, state.index)
        routers = self.model.split.routers
        with self.backend.compute():
            if routers is not None:
                hidden, sums = routers.split(hidden, self._last_shape(state))
            result = run_head(
                partial(self.model.logits, dropout_seed=self._seed(context, layer, state)),
                hidden,
                self._targets(state),
                context.loss,
                taps=GradientTaps(self.parameters[layer], take),
                needs_hidden_grad=self.trained.first < layer,
            )
            if routers is not None:
                routers.add_to(result, sums, state.num_units, context.loss.gradient_scale)
        state.loss_sum, state.reward_sums = result.loss_sum, result.reward_sums  # read when the step is done
        self.collector.fold(context, layer, state.index, parts)
        return result.grad_hidden

    def score(self, context: StepContext, scoring: Scoring, state: MicrobatchState, hidden: torch.Tensor) -> None:
        """Forward of the head in a pass without backward."""
        self.layer = context.prepared.head
        routers = self.model.split.routers
        with self.backend.compute():
            if routers is not None:
                hidden, _ = routers.split(hidden, self._last_shape(state))
            scores = score_head(
                self.model.logits,
                hidden,
                self._targets(state),
                chunk_tokens=context.loss.chunk_tokens,
                greedy=scoring.greedy,
            )
        state.scores = scores.map_tensors(lambda tensor: self.backend.send(tensor)[0])  # complete when the pass is done
        state.prologue = None  # nothing reads it again

    def _last_shape(self, state: MicrobatchState) -> tuple[int, ...] | None:
        """Shape of the last block's hidden states behind [B, T]."""
        assert state.prologue is not None
        routed = state.prologue.calls[-1].routed
        return None if routed is None else routed.output_shape

    def _targets(self, state: MicrobatchState) -> HeadTargets:
        """The microbatch's targets on this worker's device."""
        indices, ids = self.backend.receive(state.target_indices), self.backend.receive(state.target_ids)
        preference = state.preference
        if preference is not None:
            preference = preference.map_tensors(self.backend.receive)
        return HeadTargets(indices, ids, preference)

    # -- chunks of a sequence ------------------------------------------------------------------------------------

    def attend_to(
        self, layer: int, state: MicrobatchState, earlier: SequenceChunk, keys_and_values: list[torch.Tensor]
    ) -> None:
        """Before the backward of a sequence's last chunk: take back keys and values of an earlier chunk's forward."""
        sequence, chunk = self._backward_sequences.of(layer, state), state.chunk
        assert sequence is not None and chunk is not None
        with self.backend.compute():
            sequence.fill(earlier.start, keys_and_values, chunk.sequence_tokens)

    def end_backward(self, layers: StageRange, state: MicrobatchState) -> None:
        """Note that a stage's backward of this microbatch is done; drop the sequence if no chunk is left."""
        self._backward_sequences.end_all(layer_range(layers), state)

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
        if context.scoring is not None:
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
