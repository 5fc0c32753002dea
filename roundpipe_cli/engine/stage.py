"""One worker's actions: forward, recompute and backward of one stage for one microbatch.

    forward    hidden --layer--> hidden --layer--> hidden          no graph; saves what backward stages start from
    recompute  leaf --layer--> y | leaf --layer--> y               one graph a layer, kept until the backward
    backward   gradient <--layer-- gradient <--layer-- gradient    freed layer by layer, gradients folded at once

`layer.py` computes the layers; here is which of them, and which boundary tensors come and go.
"""

from __future__ import annotations

import torch

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.engine.carrier import KEYS_VALUES, BoundaryKey, Carrier
from roundpipe_cli.engine.layer import LayerGraph, LayerRunner
from roundpipe_cli.engine.live import ComputeInterval
from roundpipe_cli.engine.microbatch import MicrobatchState
from roundpipe_cli.engine.prepared import StepContext
from roundpipe_cli.engine.program import layer_range, stage_layers
from roundpipe_cli.faults import fault
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.program import ACTIVATION, GRADIENT, Op


class StageRunner:
    """Runs the actions of one worker."""

    def __init__(self, layers: LayerRunner) -> None:
        self.layers = layers
        self.carrier: Carrier | None = None
        """The boundary tensors of the step."""
        self._graphs: dict[int, list[LayerGraph]] = {}
        """Microbatch -> graphs of a recompute that wait for their backward."""
        self._head_input: dict[int, torch.Tensor] = {}
        self._poison: float | None = None
        self.interval: ComputeInterval
        """Record of the operation at work."""

    def run(self, context: StepContext, op: Op) -> None:
        """Carry out one compute operation on the layers bound now."""
        layers = stage_layers(context.prepared.schedule, op)
        state = context.microbatches[op.microbatch]
        self.layers.model.set_mode(training=not context.scoring, adapters=context.adapters)
        poison = fault("compute", step=context.step, worker=self.layers.worker)
        if poison is not None:
            self._poison = poison
        if op.kind is Kind.FORWARD:
            self._forward(context, layers, state)
        elif op.kind is Kind.RECOMPUTE:
            if not context.prepared.each_layer:
                self._recompute(context, layers, state)
        else:
            self._backward(context, layers, state)
        if op.kind is not Kind.RECOMPUTE:  # the backward that follows uses its result
            self._poison = None

    def _poisoned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or NaN or infinities in its place where a fault point asks for them."""
        return tensor if self._poison is None else tensor * self._poison

    def reset(self) -> None:
        """Drop what a failed step left."""
        self._graphs.clear()
        self._head_input.clear()
        self.layers.reset()
        self._poison = None

    # -- forward -------------------------------------------------------------------------------------------------

    def _forward(self, context: StepContext, layers: StageRange, state: MicrobatchState) -> None:
        hidden = self._take_hidden(context, layers[0], state)
        head = context.prepared.head
        for layer in layer_range(layers):
            if layer == head:
                if context.scoring:
                    self.layers.score(context, state, self._poisoned(hidden))
                break  # in a training step the head's forward is done with its backward
            if layer > layers[0]:
                self._put_hidden(context, layer, state, hidden)
            if (layer, state.index) in context.prepared.kept:
                hidden = self.layers.keep(context, layer, state, hidden)
            elif layer > 0:
                hidden, keys_and_values = self.layers.forward(context, layer, state, hidden)
                if layer in context.prepared.attended_layers:
                    for kind, tensor in zip(KEYS_VALUES, keys_and_values, strict=False):
                        self._put((kind, layer, state.index), tensor, 1)
        end = min(layers[1] + 1, head)
        if end > layers[0]:
            self._put_hidden(context, end, state, hidden)

    # -- boundary tensors ----------------------------------------------------------------------------------------

    def _take_hidden(self, context: StepContext, layer: int, state: MicrobatchState) -> torch.Tensor:
        self.layers.layer = layer
        if layer == 0:
            self._start()
            return self.layers.embed(context, state)
        return self._take((ACTIVATION, layer, state.index))

    def _take(self, key: BoundaryKey) -> torch.Tensor:
        """Wait for a boundary tensor; it is on this worker's device when the next computation starts."""
        assert self.carrier is not None
        tensor = self.carrier.take(key)
        self._start()
        return tensor

    def _start(self) -> None:
        if self.interval.start is None:
            self.interval.start = self.layers.backend.mark()

    def _put_hidden(self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor) -> None:
        readers = context.prepared.readers[layer]
        if readers:
            self._put((ACTIVATION, layer, state.index), self._poisoned(hidden.detach()), readers)

    def _put(self, key: BoundaryKey, tensor: torch.Tensor, num_readers: int) -> None:
        assert self.carrier is not None
        self.carrier.put(key, tensor, num_readers)

    # -- recompute -----------------------------------------------------------------------------------------------

    def _recompute(self, context: StepContext, layers: StageRange, state: MicrobatchState) -> None:
        first, last = layers
        prepared, has_head = context.prepared, context.prepared.has_head(layers)
        hidden = self._take_hidden(context, first, state)
        self._take_keys_and_values(context, layers, state)
        graphs: list[LayerGraph] = []
        for layer in layer_range(layers):
            if layer == prepared.head:
                self._head_input[state.index] = hidden
            elif layer > 0:
                if layer > first and layer in prepared.read_layers and not has_head:
                    hidden = self._take_hidden(context, layer, state)
                is_read = has_head or (layer < last and layer + 1 not in prepared.read_layers)
                graph = self.layers.graph_of(context, layer, state, hidden, output_is_read=is_read)
                graphs.append(graph)
                if graph.output is not None:
                    hidden = graph.output.detach()
        self._graphs[state.index] = graphs

    def _take_keys_and_values(self, context: StepContext, layers: StageRange, state: MicrobatchState) -> None:
        """Before a sequence's last chunk, the first to go backward: take back keys and values of all earlier chunks."""
        chunk = state.chunk
        if chunk is None or not chunk.is_last:
            return
        for layer in layer_range(layers):
            if layer not in context.prepared.attended_layers:
                continue
            for earlier in context.microbatches[state.index - chunk.index : state.index]:
                pieces = [self._take((kind, layer, earlier.index)) for kind in KEYS_VALUES]
                assert earlier.chunk is not None
                self.layers.attend_to(layer, state, earlier.chunk, pieces)

    # -- backward ------------------------------------------------------------------------------------------------

    def _backward(self, context: StepContext, layers: StageRange, state: MicrobatchState) -> None:
        prepared, has_head = context.prepared, context.prepared.has_head(layers)
        fused = prepared.schedule.fused_head and has_head
        if fused or (has_head and prepared.each_layer):
            self._recompute(context, layers, state)
        gradient: torch.Tensor | None
        if has_head:
            self._start()
            gradient = self.layers.head(context, state, self._head_input.pop(state.index))
        else:
            if layers[1] < self.layers.trained.first:
                self.layers.end_backward(layers, state)
                return
            gradient = self._take((GRADIENT, layers[1] + 1, state.index))
        if gradient is not None:
            gradient = self._poisoned(gradient)
        if prepared.each_layer and not has_head:
            gradient = self._backward_layer_by_layer(context, layers, state, gradient)
        else:
            graphs = self._graphs.pop(state.index)
            while graphs:
                gradient = self.layers.backward(context, graphs.pop(), state, gradient)
        self.layers.end_backward(layers, state)
        if layers[0] == 0:
            self.layers.embed_backward(context, state, gradient)
        elif layers[0] > self.layers.trained.first:
            assert gradient is not None
            self._put((GRADIENT, layers[0], state.index), gradient, 1)

    def _backward_layer_by_layer(
        self, context: StepContext, layers: StageRange, state: MicrobatchState, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Recompute and take the backward of layer after layer: one layer's activations at a time."""
        self._take_keys_and_values(context, layers, state)
        for layer in reversed(layer_range(layers)):
            if layer == 0:
                break
            hidden = self._take_hidden(context, layer, state)
            graph = self.layers.graph_of(context, layer, state, hidden, output_is_read=False)
            gradient = self.layers.backward(context, graph, state, gradient)
        return gradient
