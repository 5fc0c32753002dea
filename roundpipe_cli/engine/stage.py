"""What one worker does in an action: forward, recompute and backward of one stage for one microbatch.

Each layer is a graph of its own (its input is detached), so where stages are cut does not change a bit:

    forward    hidden --layer--> hidden --layer--> hidden          no graph; saves what backward stages start from
    recompute  leaf --layer--> y | leaf --layer--> y               one graph a layer, kept until the backward
    backward   gradient <--layer-- gradient <--layer-- gradient    freed layer by layer, gradients folded at once
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.cost import StageRange
from roundpipe_cli.engine.activations import BoundaryKey, BoundaryKind, BoundaryStore, MicrobatchState
from roundpipe_cli.engine.backends.base import Backend, DeviceEvent
from roundpipe_cli.engine.carrier import Carrier
from roundpipe_cli.engine.dispatch.progress import Progress
from roundpipe_cli.engine.gradients import GradientFold, GradientParts, Leaving, square_sum
from roundpipe_cli.engine.kept import KeptActivations, weights_found_again
from roundpipe_cli.engine.program import layer_range, stage_layers
from roundpipe_cli.engine.sequences import KINDS, BlockSequence, Sequences
from roundpipe_cli.faults import fault
from roundpipe_cli.model.chunks import ChunkCache, KeyValues
from roundpipe_cli.model.dropout import layer_seed
from roundpipe_cli.model.gradient_taps import GradientTaps, Take
from roundpipe_cli.model.head import run_head, score_head
from roundpipe_cli.model.split import BlockCall
from roundpipe_cli.model.worker_model import EmbedGradient, Prologue, WorkerModel
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.lower import Op, Program

OnGradient = Callable[[int, Callable[[], float]], None]


@dataclass(frozen=True)
class Scoring:
    """A pass without backward, dropout or gradients."""

    adapters: bool = True
    """False: the base model, adapters left out."""
    greedy: bool = False
    """Also tell the most probable token at each target's place."""


@dataclass
class StepContext:
    """Everything that the threads of one step share."""

    step: int
    version: int
    """Of the weights that the whole step reads, the embedding's rows included."""
    program: Program
    microbatches: list[MicrobatchState]
    num_units: int
    """What the step's loss is a mean over: its target tokens, or pairs."""
    gradient_scale: float
    """What each token's loss gradient is multiplied by: loss scale / units of the step."""
    dropout_seed: int
    """The run's seed."""
    seeds_blocks: bool
    """Blocks are watched for random functions; False: they are known to call none."""
    head_chunk_tokens: int
    label_smoothing: float
    """Of the training loss."""
    recompute_each_layer: bool
    kept: KeptActivations
    """Activations that stay on their worker from the forward to the backward."""
    layer_bytes: Sequence[int]
    """Of each layer's weights."""
    attended_layers: frozenset[int]
    """Blocks whose keys and values later chunks of a sequence ask for in the backward; none without chunks."""
    read_layers: frozenset[int]
    """Layers within a backward stage whose input is read again instead of recomputed: all with `recompute: layer`."""
    first_trainable_layer: int
    readers: Counter[int]
    progress: Progress
    boundaries: BoundaryStore
    folds: list[GradientFold | None]
    """Per layer; None where nothing is trained."""
    device_folds: frozenset[int]
    """Layers whose gradient sums travel with the stage instead of being folded on the host."""
    gradients: Sequence[torch.Tensor]
    """Per layer, the host's gradient sum of this step."""
    on_gradient: OnGradient | None = None
    """Told of each layer whose gradient is complete, on the host, and whose weights the step reads no more, with a
    function that returns the gradient's sum of squares."""
    late_layers: frozenset[int] = frozenset()
    """Whose gradient is complete at the end of the step only: the embed layer's, and the table tied to it."""
    square_sums: dict[int, torch.Tensor] = field(default_factory=dict)
    embed_gradients: dict[int, list[EmbedGradient]] = field(default_factory=dict)
    scoring: Scoring | None = None
    """None in a training step."""

    def fold_place(self, layer: int, microbatch: int) -> int:
        """Place of a microbatch in the order in which a layer's gradients are added up."""
        schedule = self.program.schedule
        is_head = layer == len(self.folds) - 1
        return schedule.backward_place(0 if is_head else 1, microbatch)

    def gradient_complete(self, layer: int, squares: torch.Tensor) -> None:
        """Note the sum of squares of a complete gradient, which is on the host."""
        self.square_sums[layer] = squares
        if self.on_gradient is not None and layer not in self.late_layers:
            self.on_gradient(layer, partial(float, squares))


@dataclass
class _LayerGraph:
    """One layer's recomputed forward, waiting for its backward."""

    layer: int
    leaf: torch.Tensor
    output: torch.Tensor | None
    """None for a layer below everything that is trained."""
    parameters: list[nn.Parameter]
    """What is trained, as bound at the time of the forward."""
    earlier: KeyValues | None = None
    """Of a chunk: leaves, the keys and values of those before."""
    own: KeyValues | None = None
    """Of a chunk: its own keys and values, with their graph."""


@dataclass(frozen=True)
class _Sent:
    """A gradient of the first block's input on its way to the host."""

    microbatch: int
    prologue: Prologue
    gradient: torch.Tensor
    event: DeviceEvent


class StageRunner:
    """Runs actions of one worker on its module objects."""

    def __init__(self, worker: int, model: WorkerModel, backend: Backend) -> None:
        self.worker = worker
        self.model = model
        self.backend = backend
        self.parameters: dict[int, list[nn.Parameter]] = {}
        """Per layer, the trainable parameters as bound now, in layout order."""
        self.accumulators: dict[int, list[torch.Tensor]] = {}
        """Per layer of the current visit, the device's gradient sums (empty if folded on the host)."""
        self.carrier: Carrier | None = None
        """How the step's boundary tensors come and go."""
        self._graphs: dict[int, list[_LayerGraph]] = {}
        self._kept: dict[tuple[int, int], _LayerGraph] = {}
        """By (layer, microbatch), from the forward to the backward."""
        self._head_input: dict[int, torch.Tensor] = {}
        self._forward_sequences, self._backward_sequences = Sequences(), Sequences()
        self._sent: deque[_Sent] = deque()
        self._poison: float | None = None
        self.leaving: list[Leaving] = []
        """Of the operation at work: what its download takes to the host's fold."""
        self.layer = 0
        """The layer in work, for error messages."""
        self.started: Any = None
        """The backend's mark of when the operation had its input: what comes before is waiting, not work."""

    def run(self, context: StepContext, op: Op) -> None:
        """Carry out one compute operation on the layers bound now."""
        self.started = None
        layers = stage_layers(context.program.schedule, op)
        state = context.microbatches[op.microbatch]
        self.model.set_mode(
            training=context.scoring is None, adapters=context.scoring is None or context.scoring.adapters
        )
        poison = fault("compute", step=context.step, worker=self.worker)
        if poison is not None:
            self._poison = poison
        if op.kind is Kind.FORWARD:
            self._forward(context, layers, state)
        elif op.kind is Kind.RECOMPUTE:
            if not context.recompute_each_layer:
                self._recompute(context, layers, state)
        else:
            self._backward(context, layers, state)
        if op.kind is not Kind.RECOMPUTE:  # its result goes into the backward that follows
            self._poison = None

    def _poisoned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or NaN or infinities in its place where a fault point asks for them."""
        return tensor if self._poison is None else tensor * self._poison

    def unbind(self) -> None:
        """Forget parameters and gradient sums, whose memory is to be free; the next visits bind them anew."""
        self.parameters.clear()
        self.accumulators = {}
        self.model.unbind()

    def reset(self) -> None:
        """Drop what a failed step left."""
        self._graphs.clear()
        self._kept.clear()
        self._head_input.clear()
        self._sent.clear()
        self.leaving = []
        self._forward_sequences.clear()
        self._backward_sequences.clear()
        self._poison = None

    # -- forward -------------------------------------------------------------------------------------------------

    def _forward(self, context: StepContext, layers: StageRange, state: MicrobatchState) -> None:
        hidden = self._take_hidden(context, layers[0], state)
        num_layers = len(context.folds)
        for layer in layer_range(layers):
            if layer == num_layers - 1:
                if context.scoring is not None:
                    self._score(context, context.scoring, state, hidden)
                break  # in a training step the head's forward is done with its backward
            if layer > layers[0]:
                self._put_hidden(context, layer, state, hidden)
            if (layer, state.index) in context.kept:
                hidden = self._keep(context, layer, state, hidden)
            elif layer > 0:
                hidden = self._forward_block(context, layer, state, hidden)
        end = min(layers[1] + 1, num_layers - 1)
        if end > layers[0]:
            self._put_hidden(context, end, state, hidden)

    def _forward_block(
        self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Forward of a layer without a graph; a chunk's keys and values are there for the later ones."""
        sequence = self._forward_sequences.of(layer, state)
        cache = self._cache(state, sequence)
        with torch.no_grad(), self.backend.compute():
            output = self._run_block(context, layer, state, hidden, cache=cache)
            if state.chunk is None or cache is None or sequence is None:
                return output
            own = cache.only(f"block.{layer - 1}")
            pieces = [] if state.chunk.is_last else sequence.write(state.chunk, own)
        assert self.carrier is not None
        if layer in context.attended_layers:
            for kind, piece in zip(KINDS, pieces, strict=False):
                self.carrier.put((kind, layer, state.index), piece, 1)
        if state.chunk.is_last:
            self._forward_sequences.end(layer, state)
        return output

    def _cache(self, state: MicrobatchState, sequence: BlockSequence | None) -> ChunkCache | None:
        """What a block is called with for a chunk; None for a whole sequence."""
        if state.chunk is None or sequence is None:
            return None
        return ChunkCache(state.chunk.start, len(self.model.blocks), sequence.before(state.chunk))

    def _keep(self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor) -> torch.Tensor:
        """Forward of a layer whose graph stays until the backward; returns its output."""

        def weights_now() -> torch.Tensor:
            return self.model.first_weight(layer)

        moves = not self.backend.aliases_host
        with weights_found_again(moves, weights_now, context.layer_bytes[layer]):
            graph = self._graph_of(context, layer, state, hidden, output_is_read=True)
        assert graph.output is not None
        self._kept[layer, state.index] = graph
        return graph.output.detach()

    def _score(self, context: StepContext, scoring: Scoring, state: MicrobatchState, hidden: torch.Tensor) -> None:
        self.layer = len(context.folds) - 1
        with self.backend.compute():
            state.scores = score_head(
                self.model.logits,
                hidden,
                self.backend.receive(state.target_indices),
                self.backend.receive(state.target_ids),
                chunk_tokens=context.head_chunk_tokens,
                greedy=scoring.greedy,
            )
        state.prologue = None  # nothing will ask for it again

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
        calls = self._calls(state)
        seed = self._seed(context, layer, state) if context.seeds_blocks else None
        block = self.model.run_block
        return block(layer - 1, calls[layer - 1], hidden, seed, output_is_read=output_is_read, cache=cache)

    def _seed(self, context: StepContext, layer: int, state: MicrobatchState) -> int | None:
        """Of what `layer` draws at random; None in a pass that draws nothing."""
        if context.scoring is not None:
            return None
        return layer_seed(context.dropout_seed, context.step, state.place, layer)

    def _calls(self, state: MicrobatchState) -> tuple[BlockCall, ...]:
        """How blocks are called for this microbatch, with tensors on this worker's device, made once."""
        if self.worker not in state.calls_by_worker:
            assert state.prologue is not None
            moved: dict[int, torch.Tensor] = {}

            def move(tensor: torch.Tensor) -> torch.Tensor:
                if id(tensor) not in moved:
                    moved[id(tensor)] = self.backend.receive(tensor)
                return moved[id(tensor)]

            state.calls_by_worker[self.worker] = tuple(call.map_tensors(move) for call in state.prologue.calls)
        return state.calls_by_worker[self.worker]

    def _take_hidden(self, context: StepContext, layer: int, state: MicrobatchState) -> torch.Tensor:
        self.layer = layer
        if layer == 0:
            return self.backend.receive(self._embed(context, state))
        return self._take(context, (BoundaryKind.HIDDEN, layer, state.index))

    def _take(self, context: StepContext, key: BoundaryKey) -> torch.Tensor:
        """Wait for a boundary tensor; it is on this worker's device when the next computation starts."""
        assert self.carrier is not None
        tensor = self.carrier.take(key)
        if self.started is None:
            self.started = self.backend.mark()
        return tensor

    def _embed(self, context: StepContext, state: MicrobatchState) -> torch.Tensor:
        if state.prologue is None:
            seed = self._seed(context, 0, state)
            start = None if state.chunk is None else state.chunk.start
            state.prologue = self.model.prologue(state.input_ids, seed, state.position_ids, start)
            if context.scoring is not None:  # keep no graph
                state.prologue = Prologue(state.prologue.hidden.detach(), state.prologue.calls)
        return state.prologue.hidden.detach()

    def _put_hidden(self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor) -> None:
        readers = context.readers[layer]
        if readers:
            assert self.carrier is not None
            self.carrier.put((BoundaryKind.HIDDEN, layer, state.index), self._poisoned(hidden.detach()), readers)

    # -- recompute -----------------------------------------------------------------------------------------------

    def _recompute(self, context: StepContext, layers: StageRange, state: MicrobatchState) -> None:
        first, last = layers
        has_head = last == len(context.folds) - 1
        hidden = self._take_hidden(context, first, state)
        self._take_keys_and_values(context, layers, state)
        graphs: list[_LayerGraph] = []
        for layer in layer_range(layers):
            if layer == len(context.folds) - 1:
                self._head_input[state.index] = hidden
            elif layer > 0:
                if layer > first and layer in context.read_layers and not has_head:
                    hidden = self._take_hidden(context, layer, state)
                is_read = has_head or (layer < last and layer + 1 not in context.read_layers)
                graph = self._graph_of(context, layer, state, hidden, is_read)
                graphs.append(graph)
                if graph.output is not None:
                    hidden = graph.output.detach()
                elif is_read:
                    cache = self._cache(state, self._backward_sequences.of(layer, state))
                    with torch.no_grad(), self.backend.compute():
                        hidden = self._run_block(context, layer, state, hidden, cache=cache)
        self._graphs[state.index] = graphs

    def _take_keys_and_values(self, context: StepContext, layers: StageRange, state: MicrobatchState) -> None:
        """Before a sequence's last chunk, the first to go backward: what the forward made of all chunks before it."""
        chunk = state.chunk
        if chunk is None or not chunk.is_last:
            return
        for layer in layer_range(layers):
            sequence = self._backward_sequences.of(layer, state)
            if layer not in context.attended_layers or sequence is None:
                continue
            for earlier in context.microbatches[state.index - chunk.index : state.index]:
                pieces = [self._take(context, (kind, layer, earlier.index)) for kind in KINDS]
                assert earlier.chunk is not None
                with self.backend.compute():
                    sequence.fill(earlier.chunk.start, pieces, chunk.sequence_tokens)

    def _graph_of(
        self, context: StepContext, layer: int, state: MicrobatchState, hidden: torch.Tensor, output_is_read: bool
    ) -> _LayerGraph:
        """The forward of one layer with its graph, or the one that was kept; none below the first trained layer."""
        if (layer, state.index) in self._kept:
            return self._kept.pop((layer, state.index))
        leaf = hidden.detach()
        parameters = self.parameters[layer]
        if layer < context.first_trainable_layer:
            return _LayerGraph(layer, leaf, None, parameters)
        leaf.requires_grad_(layer > context.first_trainable_layer)
        graph = _LayerGraph(layer, leaf, None, parameters)
        cache = self._cache(state, self._backward_sequences.of(layer, state))
        if cache is not None and cache.earlier is not None:
            keys, values = (tensor.detach().requires_grad_() for tensor in cache.earlier)
            graph.earlier = cache.earlier = (keys, values)
        with torch.enable_grad(), self.backend.compute():
            graph.output = self._run_block(context, layer, state, leaf, output_is_read, cache)
        graph.own = None if cache is None else cache.only(f"block.{layer - 1}")
        return graph

    # -- backward ------------------------------------------------------------------------------------------------

    def _backward(self, context: StepContext, layers: StageRange, state: MicrobatchState) -> None:
        first, last = layers
        has_head = last == len(context.folds) - 1
        fused = context.program.schedule.fused_head and has_head
        if fused or (has_head and context.recompute_each_layer):
            self._recompute(context, layers, state)
        gradient: torch.Tensor | None
        if has_head:
            gradient = self._run_head(context, state)
        else:
            if last < context.first_trainable_layer:
                self._backward_sequences.end_all(layer_range(layers), state)
                return
            gradient = self._take(context, (BoundaryKind.GRADIENT, last + 1, state.index))
        if gradient is not None:
            gradient = self._poisoned(gradient)
        if context.recompute_each_layer and not has_head:
            gradient = self._backward_layer_by_layer(context, layers, state, gradient)
        else:
            graphs = self._graphs.pop(state.index)
            while graphs:
                gradient = self._layer_backward(context, graphs.pop(), state, gradient)
        self._backward_sequences.end_all(layer_range(layers), state)
        if first == 0:
            self._embed_backward(context, state, gradient)
        elif first > context.first_trainable_layer:
            assert gradient is not None and self.carrier is not None
            self.carrier.put((BoundaryKind.GRADIENT, first, state.index), gradient, 1)

    def _run_head(self, context: StepContext, state: MicrobatchState) -> torch.Tensor | None:
        layer = self.layer = len(context.folds) - 1
        take, parts = self._taker(context, layer, state)
        with self.backend.compute():
            result = run_head(
                partial(self.model.logits, dropout_seed=self._seed(context, layer, state)),
                self._head_input.pop(state.index),
                self.backend.receive(state.target_indices),
                self.backend.receive(state.target_ids),
                gradient_scale=context.gradient_scale,
                chunk_tokens=context.head_chunk_tokens,
                parameters=self.parameters[layer],
                take=take,
                needs_hidden_grad=context.first_trainable_layer < layer,
                preference=state.preference,
                label_smoothing=context.label_smoothing,
            )
        on_host = self.backend.device.type == "cpu"
        state.loss_sum = float(result.loss_sum) if on_host else result.loss_sum  # no waiting for a GPU here
        state.rewards = result.rewards
        self._fold(context, layer, state, parts)
        return result.grad_hidden

    def _backward_layer_by_layer(
        self, context: StepContext, layers: StageRange, state: MicrobatchState, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Recompute one layer, take its backward, go on to the layer before: one layer's activations at a time."""
        self._take_keys_and_values(context, layers, state)
        for layer in reversed(layer_range(layers)):
            if layer == 0:
                break
            hidden = self._take_hidden(context, layer, state)
            graph = self._graph_of(context, layer, state, hidden, output_is_read=False)
            gradient = self._layer_backward(context, graph, state, gradient)
        return gradient

    def _layer_backward(
        self, context: StepContext, graph: _LayerGraph, state: MicrobatchState, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Backward of one layer: folds its parameters' gradients, returns that of its input."""
        if graph.output is None:
            return None
        self.layer = graph.layer
        take, parts = self._taker(context, graph.layer, state)
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
        self._fold(context, graph.layer, state, parts)
        return graph.leaf.grad

    def _taker(self, context: StepContext, layer: int, state: MicrobatchState) -> tuple[Take, GradientParts]:
        """Adds gradients to the layer's sum as backward makes them; or lists them, if it is not their turn yet."""
        fold = context.folds[layer]
        parts: GradientParts = []
        on_host, leaves = layer not in context.device_folds, self._leaves(context, layer)
        sums = [] if on_host else self.accumulators.get(layer, [])
        if fold is not None and on_host and not leaves and fold.is_turn(context.fold_place(layer, state.index)):
            sums = fold.views

        def take(index: int, gradient: torch.Tensor) -> None:
            if on_host and not leaves and self.backend.device.type != "cpu":
                gradient = gradient.cpu()
            if sums:
                sums[index].add_(gradient)
            else:
                parts.append((index, gradient))

        return take, parts

    def _fold(self, context: StepContext, layer: int, state: MicrobatchState, parts: GradientParts) -> None:
        """After a layer's backward: what was listed is added on the host, or waits for its turn or its download."""
        if context.folds[layer] is None or layer in context.device_folds:
            return
        place = context.fold_place(layer, state.index)
        if parts and self._leaves(context, layer):
            with self.backend.compute():
                self.leaving.append(Leaving.of(layer, place, parts))
        else:
            self.fold(context, layer, place, parts)

    def _leaves(self, context: StepContext, layer: int) -> bool:
        """Whether a lane takes the layer's gradients to the host's fold. Not a trained head's, which are added up
        chunk by chunk of its tokens and as large as its weights."""
        is_head = layer == len(context.folds) - 1
        return not (self.backend.aliases_host or is_head or layer in context.device_folds)

    def fold(self, context: StepContext, layer: int, place: int, parts: GradientParts) -> None:
        """On the host: the microbatch of this place is added to the layer's sum, or waits in line."""
        fold = context.folds[layer]
        assert fold is not None
        if fold.fold(place, parts):
            context.gradient_complete(layer, square_sum(fold.flat))

    def _embed_backward(self, context: StepContext, state: MicrobatchState, gradient: torch.Tensor | None) -> None:
        """The embed layer's, on the host, as soon as the gradient is there: others before it most likely are."""
        self.layer = 0
        if state.prologue is not None and state.prologue.leaves and gradient is not None:
            host, event = self.backend.send(gradient)
            self._sent.append(_Sent(state.index, state.prologue, host, event))
            state.prologue = replace(state.prologue, hidden=state.prologue.hidden.detach())
        while self._sent and self.backend.happens_in_s(self._sent[0].event) <= 0:
            self._finish_embed(context)

    def finish(self, context: StepContext) -> None:
        """At the end of a step, when the device has done all: what its host still has to do."""
        while self._sent:
            self._finish_embed(context)

    def _finish_embed(self, context: StepContext) -> None:
        sent = self._sent.popleft()
        context.embed_gradients[sent.microbatch] = sent.prologue.backward(sent.gradient)
