"""One worker's own module objects: blocks and head whose parameters are rebound to whatever buffer holds them.

Shapes: B sequences in a microbatch, T tokens each, H hidden size, V vocabulary, N target tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_cli.model.attention import in_rows, in_whole_rows, restart_at_rows
from roundpipe_cli.model.block_calls import (
    BackboneStub,
    BeforeBlocks,
    BlockCall,
    EmbedLeaf,
    GatheringEmbedding,
    Prologue,
    install_stubs,
    replace_module,
)
from roundpipe_cli.model.carried import carry_along, weights_dtype
from roundpipe_cli.model.chunks import ChunkCache, cache_argument
from roundpipe_cli.model.dropout import OwnDraws, SeededDropout, layer_seed
from roundpipe_cli.model.expert_lora import isolate_expert_adapters
from roundpipe_cli.model.fused import FusedOps, fuse
from roundpipe_cli.model.last_projection import BlockProbe, UnreadProducts, by_kind
from roundpipe_cli.model.lora import ADAPTER
from roundpipe_cli.model.mlp_chunks import MlpChunks, check_feed_forward_chunks, find_mlp
from roundpipe_cli.model.module_copies import copy_modules
from roundpipe_cli.model.new_tokens import TokenRows, replace_row_owners
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.model.stored.packed_weights import PackedParameter, PackedPlace, whole_weights

# State that modules keep from call to call, and how it is reset.
#
# Dynamic rotary scaling (`rope_type: dynamic`) keeps the frequencies of the longest sequence that it has met. A worker
# meets other microbatches than its neighbour, so each call has to begin from the state that the model was built with.


class ModuleState:
    """A snapshot of plain values and tensors among the attributes, and of the buffers, of the modules below `root`.

    Only values that a module replaces are put back, not tensors that it writes into.
    """

    def __init__(self, root: nn.Module) -> None:
        kept = (bool, int, float, torch.Tensor, type(None))
        self._found = []
        for module in root.modules():
            own = {name: one for name, one in vars(module).items() if name not in _MODES and isinstance(one, kept)}
            self._found.append((module, own, dict(module._buffers)))

    def restore(self) -> None:
        """Restore the state of every module."""
        for module, attributes, buffers in self._found:
            module.__dict__.update(attributes)
            module._buffers.update(buffers)


_MODES = ("training", "_disable_adapters")
"""Attributes that the worker itself switches."""


# Memory that autograd keeps for a block's backward, measured on a few tokens.
#
# Two lengths, T and 2T, tell how each tensor that is kept grows: not at all, with the tokens, or with the pairs of
# tokens of a sequence, as scores of attention and masks do. Where the longer one keeps other tensors, only the sums are
# told apart:
#
#     s(T) = a T + b T^2        b = (s(2T) - 2 s(T)) / 2 T^2        a = s(T) / T - b T

PROBE_TOKENS = 128
"""Largest shorter length: two of the pieces in which linear attention computes."""
GROWS, GROWS_BY_PAIRS = 1.5, 3.0
"""Factors between the two lengths above which a tensor grows with the tokens, or with their pairs."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes saved by one block."""

    fixed: float
    per_token: float
    per_pair: float
    """Bytes per pair of tokens of one sequence."""

    @staticmethod
    def of_lengths(short: Sequence[int], long: Sequence[int], tokens: int) -> SavedBytes:
        """The bytes from the sizes of the tensors that sequences of `tokens` and of twice as many keep."""
        if len(short) != len(long):
            per_pair = max(0.0, (sum(long) - 2 * sum(short)) / (2 * tokens**2))
            return SavedBytes(0.0, max(0.0, sum(short) / tokens - per_pair * tokens), per_pair)
        fixed = per_token = per_pair = 0.0
        for size, larger in zip(short, long, strict=True):
            if larger > GROWS_BY_PAIRS * size:
                per_pair += larger / (2 * tokens) ** 2
            elif larger > GROWS * size:
                per_token += larger / (2 * tokens)
            else:
                fixed += larger
        return SavedBytes(fixed, per_token, per_pair)

    def of(self, rows: int, tokens: int, context: int) -> int:
        """Bytes of a microbatch of `rows` sequences (or chunks of them) of `tokens` each, which attend to `context`."""
        return int(self.fixed + rows * tokens * (self.per_token + self.per_pair * context))


def saved_sizes(run: Callable[[], object], known: Iterable[torch.Tensor]) -> list[int]:
    """Bytes of each storage that autograd keeps of what `run` computes and returns, in the order of first use; but for
    the `known`, which are there anyway: weights, and what all blocks are called with.
    """
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output would hold its own graph, which no backward frees

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = run()  # while it lives, no other storage gets its address
    del kept
    return list(found.values())


Binding = tuple[nn.Module, str, str]
"""(module, attribute, parameter name)."""


class WorkerModel:
    """Module objects of one worker. Blocks and head live on `device`, the embed layer on the host."""

    def __init__(
        self,
        model: nn.Module,
        split: ModelSplit,
        host_views: Mapping[str, torch.Tensor],
        trainable: frozenset[str],
        *,
        device: torch.device,
        fused: FusedOps | None = None,
        mlp_chunk_tokens: int | None = None,
        attends_in_rows: bool = False,
    ) -> None:
        """Copy the skeleton `model`, adapters included (parameters on the meta device, buffers real).

        Args:
            host_views: parameter name -> the host's weights, for the embed layer.
            trainable: names of all trainable parameters.
            device: where blocks and head run.
            fused: modules that compute by fused operators; None: all by their own code.
            mlp_chunk_tokens: tokens of a chunk of the blocks' feed-forward part; None: it is computed whole.
            attends_in_rows: blocks get the places of rows instead of a mask of all pairs; `engine/probe.py` proves it.
        """
        self.split, self.device = split, device
        names = {id(p): name for name, p in model.named_parameters()}
        causal, memo = copy_modules(model)
        own_names = {id(memo[key]): name for key, name in names.items() if key in memo}
        causal.train()
        isolate_expert_adapters(causal)
        replace_row_owners(causal, ADAPTER)
        fuse(causal, fused or FusedOps())
        self._recorder = split.recorder()
        self._tail = [causal.get_submodule(path) for path in split.tail_paths]
        for path in split.tail_paths:
            replace_module(causal, path, BeforeBlocks(causal.get_submodule(path), self._recorder))
        self.blocks = install_stubs(causal, split.blocks_path, self._recorder)
        restart_at_rows(self.blocks)
        self._dtype = weights_dtype(self.blocks)
        self._backbone = causal.get_submodule(split.backbone_path)
        self._backbone_stub = BackboneStub(split.output_type, self._backbone)
        replace_module(causal, split.backbone_path, self._backbone_stub)
        self._causal = causal
        self._above_backbone = causal.get_submodule(split.caller_path)
        roots = [[self._backbone], *([block] for block in self.blocks), [*self._tail, causal]]
        self._packed: dict[int, list[PackedPlace]] = {}
        """Per layer, its packed parameters as bound now."""
        self._held: list[PackedParameter] = []
        """Weights that stay dequantised until `drop_whole`."""
        self._bindings = [list(_bindings(modules, own_names)) for modules in roots]
        self._roots = [root for modules in roots for root in modules]
        self._mode = (True, True)
        for module in (module for modules in roots[1:] for root in modules for module in root.modules()):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self._embedding = self._bind_embed(split, host_views, trainable)
        self._state = ModuleState(self._backbone)
        self._left_out, self._blocks_draw = dict[int, UnreadProducts](), False
        self.draws_by_torch = False
        """Whether a block has drawn random numbers by a function of torch in a call with a seed."""
        self.watches_torch = True
        """Whether functions of torch that draw are answered in blocks."""
        self._mlp_chunks = self._cut_mlps(mlp_chunk_tokens) if mlp_chunk_tokens else {}
        self.attends_in_rows = attends_in_rows

    def _cut_mlps(self, chunk_tokens: int) -> dict[int, MlpChunks]:
        found = {}
        for index, block in enumerate(self.blocks):
            name = find_mlp(block)
            if name is not None:
                module = block.get_submodule(name)
                unpacked = functools.partial(self._unpacked, index + 1, frozenset(module.modules()))
                found[index] = MlpChunks(module, chunk_tokens, unpacked)
        return found

    def _unpacked(self, layer: int, modules: frozenset[nn.Module]) -> AbstractContextManager[None]:
        """Makes the weights of `modules`, a part of `layer`, whole where they lie in 4 bit."""
        packed = [place for place in self._packed.get(layer, ()) if place[0] in modules]
        return whole_weights(packed) if packed else nullcontext()

    def _bind_embed(
        self, split: ModelSplit, host_views: Mapping[str, torch.Tensor], trainable: frozenset[str]
    ) -> GatheringEmbedding:
        path = split.embedding_path[len(split.backbone_path) + 1 :]
        embedding = self._backbone.get_submodule(path)
        if hasattr(embedding, "modules_to_save"):  # PEFT's wrapper: the copy beside the base model's own is trained
            path = f"{path}.modules_to_save.{ADAPTER}"
            embedding = self._backbone.get_submodule(path)
        added = embedding if isinstance(embedding, TokenRows) else None
        embedding = embedding.table if isinstance(embedding, TokenRows) else embedding
        tables = [name for module, key, name in self._bindings[0] if module is embedding and key == "weight"]
        self._embedding_name = tables[0] if tables else ""
        leaves = [name for _, _, name in self._bindings[0] if name in trainable and name not in tables]
        self._embed_leaves = [(name, host_views[name]) for name in dict.fromkeys(leaves)]
        self.bind_embed(self.embed_parameters(host_views))
        gathering = GatheringEmbedding(embedding, self._embedding_name in trainable, added)
        replace_module(self._backbone, path, gathering)
        return gathering

    def bind(self, layer: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make the modules of `layer` use `parameters`, by name."""
        packed: list[PackedPlace] = []
        for module, attribute, name in self._bindings[layer]:
            parameter = module._parameters[attribute] = parameters[name]
            if type(parameter) is PackedParameter:  # isinstance would run Python code of torch's for each
                packed.append((module, attribute, parameter))
        self._packed[layer] = packed

    def hold_whole(self, layers: Iterable[int]) -> None:
        """Dequantise the packed weights of `layers`, as bound now, at most once until `drop_whole`; of no others."""
        self.drop_whole()
        self._held = [parameter for layer in layers for _, _, parameter in self._packed.get(layer, ())]
        for parameter in self._held:
            parameter.stays_whole = True

    def drop_whole(self) -> None:
        """Drop all weights that `hold_whole` keeps."""
        for parameter in self._held:
            parameter.let_go()
        self._held = []

    def unbind(self) -> None:
        """Drop the parameters of all layers but the embed layer, to free their memory."""
        self.drop_whole()
        for bindings in self._bindings[1:]:
            for module, attribute, _ in bindings:
                module._parameters[attribute] = None
        self._packed.clear()

    def first_weight(self, layer: int) -> torch.Tensor:
        """The parameter of `layer` that lies first in its buffer, as bound now."""
        bound = (module._parameters[attribute] for module, attribute, _ in self._bindings[layer])
        return min((p for p in bound if p is not None), key=torch.Tensor.data_ptr)

    def names_of(self, layer: int) -> list[str]:
        """Names of the parameters that a layer reads, a shared one included."""
        return [name for _, _, name in self._bindings[layer]]

    def embed_parameters(self, host_views: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
        """The embed layer's parameters on the host's weights `host_views`, for `bind_embed`."""
        leaves = {name for name, _ in self._embed_leaves}
        return {name: nn.Parameter(host_views[name], requires_grad=name in leaves) for _, _, name in self._bindings[0]}

    def bind_embed(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make the embed layer use `parameters`, from `embed_parameters`."""
        self.bind(0, parameters)
        self._embed_leaves = [(name, parameters[name]) for name, _ in self._embed_leaves]

    def set_mode(self, *, training: bool, adapters: bool) -> None:
        """Dropout on or off; adapters applied or left out."""
        if (training, adapters) == self._mode:
            return
        self._mode = (training, adapters)
        for root in self._roots:
            root.train(training)
            for module in root.modules():
                if hasattr(module, "_disable_adapters"):  # PEFT's own method also changes what requires a gradient
                    module.__dict__["_disable_adapters"] = not adapters

    def prologue(
        self,
        input_ids: torch.Tensor,
        dropout_seed: int | None = None,
        position_ids: torch.Tensor | None = None,
        start: int | None = None,
        *,
        lengths: torch.Tensor | None = None,
    ) -> Prologue:
        """Everything before the first block, on the host, for `input_ids` [B, T].

        `position_ids` [B, T] of packed rows restart with each row. With them, no mask and no cache, the model's own
        code makes the masks that keep the rows apart (`model/chunks.py` has checked that it does), or says where they
        lie (`attends_in_rows`). Rows that are not packed are told so too, where the causal mask is not enough.

        `start`: the ids are a chunk of a longer sequence, behind so many tokens; None: a sequence of its own. Then
        `position_ids` [B, start + T] are those of all of them.
        `lengths` [B]: tokens of each sequence without padding, for the routers' loss; None: all.
        """
        more: dict[str, Any] = {"use_cache": False}
        if position_ids is not None:
            more["position_ids"] = position_ids[:, start or 0 :]
        self._state.restore()
        self._recorder.reset()
        self._recorder.cache = None
        if start is not None:
            self._recorder.cache = ChunkCache(start, self.split.num_blocks)
            more |= {str(cache_argument(self._backbone)): self._recorder.cache, "use_cache": True}
        self._embedding.noise_seed = dropout_seed
        trainable = self._embedding._trainable or bool(self._embed_leaves)
        rows: AbstractContextManager[None] = nullcontext()
        if position_ids is not None:
            rows = in_rows(position_ids, as_masks=not self.attends_in_rows, start=start)
        elif self.attends_in_rows:
            rows = in_whole_rows(*input_ids.shape, start=start or 0)
        with torch.set_grad_enabled(trainable), seeded(dropout_seed), rows:
            self._backbone(input_ids=input_ids, **more)
        hidden = self._recorder.first_hidden
        assert hidden is not None
        leaves: list[EmbedLeaf] = [(n, None, leaf) for n, leaf in self._embed_leaves]
        if self._embedding._trainable:
            assert self._embedding.rows is not None
            leaves.insert(0, (self._embedding_name, self._embedding.token_ids, self._embedding.rows))
        split, recorded = self.split, self._recorder.calls
        boundary, calls = carry_along(
            hidden, recorded, split.shared, split.handed, dtype=self._dtype, routers=split.routers, lengths=lengths
        )
        return Prologue(boundary, calls, tuple(leaves))

    def probe_ids(self, rows: int = 2, tokens: int = 8) -> torch.Tensor:
        """A few tokens for trying blocks, [rows, tokens]."""
        config: Any = self._causal.config
        vocab_size: int = config.get_text_config().vocab_size
        return torch.arange(1, 1 + rows * tokens).reshape(rows, tokens) % vocab_size

    def find_unread(self, bind: Callable[[int], None], dropout_seed: int | None) -> dict[int, tuple[str, ...]]:
        """Per block, the modules whose products a recompute may leave out; `bind` gives a block its weights."""
        prologue = self.prologue(self.probe_ids(), dropout_seed)

        def find(index: int) -> tuple[str, ...]:
            bind(index)
            ready = functools.partial(self._ready, index, dropout_seed)
            return BlockProbe(self.blocks[index], prologue.calls[index], prologue.hidden, ready).find()

        return dict(enumerate(by_kind(self.blocks, prologue.calls, find)))

    def saved_bytes(
        self, bind: Callable[[int], None], dropout_seed: int | None, *, tokens: int, packed: bool
    ) -> list[SavedBytes]:
        """Per block, what autograd keeps of it; `bind` gives a block its weights, one block of each kind is tried.

        Two sequences are: of `tokens`, and of twice as many; if `packed`, of several rows each.

        Raises:
            RuntimeError: an operation that this processor does not have in this dtype.
        """
        prologues = []
        for length in (tokens, 2 * tokens):
            positions = (torch.arange(length) % -(-length // 2))[None] if packed else None
            prologues.append(self.prologue(self.probe_ids(1, length), dropout_seed, positions))

        def find(index: int) -> SavedBytes:
            bind(index)
            short, long = (self._saved_sizes(index, prologue, dropout_seed) for prologue in prologues)
            return SavedBytes.of_lengths(short, long, tokens)

        return by_kind(self.blocks, prologues[0].calls, find)

    def _saved_sizes(self, index: int, prologue: Prologue, dropout_seed: int | None) -> list[int]:
        block, call = self.blocks[index], prologue.calls[index]
        leaf = call.input_like(prologue.hidden).detach().clone().requires_grad_()
        with self._ready(index, dropout_seed):
            given = torch.utils._pytree.tree_leaves([call.args, call.kwargs])
            known = [*block.parameters(), *(value for value in given if isinstance(value, torch.Tensor))]
            return saved_sizes(lambda: call.run(block, leaf), known)

    def check_mlp_chunks(self, bind: Callable[[int], None]) -> None:
        """Try the feed-forward part of one block of each kind in chunks; `bind` gives a block its weights."""
        training, adapters = self._mode
        self.set_mode(training=False, adapters=True)
        prologue = self.prologue(self.probe_ids())

        def check(index: int) -> None:
            bind(index)
            run = functools.partial(self.run_block, index, prologue.calls[index])
            check_feed_forward_chunks(self.blocks[index], prologue.calls[index].input_like(prologue.hidden), run)

        by_kind(self.blocks, prologue.calls, check)
        self.set_mode(training=training, adapters=adapters)

    def leave_out(self, unread: Mapping[int, Sequence[str]]) -> None:
        """Let `run_block` leave out these modules' products where nobody reads the block's output."""
        self._left_out = {index: UnreadProducts(self.blocks[index], names) for index, names in unread.items() if names}

    def run_block(
        self,
        index: int,
        call: BlockCall,
        hidden: torch.Tensor,
        dropout_seed: int | None = None,
        *,
        output_is_read: bool = True,
        cache: ChunkCache | None = None,
    ) -> torch.Tensor:
        """Block `index` on `hidden` [B, T, H]; `call` holds tensors on this worker's device.

        `cache` has the keys and values of a chunk's earlier ones and takes its own. Where only the graph is wanted
        (`output_is_read` false), the output's values mean nothing.
        """
        left_out = None if output_is_read else self._left_out.get(index)
        with self._ready(index, dropout_seed), left_out or nullcontext():
            return call.run(self.blocks[index], hidden, cache)

    @contextmanager
    def _ready(self, index: int, dropout_seed: int | None) -> Iterator[None]:
        """Around a call of a block: its dropout, and its packed weights unpacked."""
        packed = self._packed.get(index + 1)
        if index in self._mlp_chunks:
            self._mlp_chunks[index].dropout_seed = dropout_seed
        with (
            seeded(dropout_seed, watch=self.watches_torch) as draws,
            whole_weights(packed) if packed else nullcontext(),
        ):
            yield
        if draws is not None:
            self._blocks_draw |= draws.num_draws > 0
            self.draws_by_torch |= draws.draws_by_torch

    @property
    def blocks_draw(self) -> bool:
        """Whether a block has drawn random numbers in a call with a seed."""
        return self._blocks_draw or any(chunks.has_drawn for chunks in self._mlp_chunks.values())

    def logits(self, hidden: torch.Tensor, first: int = 0, dropout_seed: int | None = None) -> torch.Tensor:
        """Tail and LM head of the model's own forward: a chunk of a microbatch's rows [N, H] -> logits [N, V].

        `first`: how many rows came before; chunks draw their own random numbers.
        """
        rows = hidden[None]
        if self.split.casts_tail:
            rows = rows.to(next(weight.dtype for module in self._tail for weight in module.parameters()))
        with seeded(None if dropout_seed is None else layer_seed(dropout_seed, first, -3, -3)):
            for module in self._tail:
                rows = module(rows)
            self._backbone_stub.hidden = rows
            try:
                ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=rows.device)
                logits: torch.Tensor = self._above_backbone(input_ids=ids, use_cache=False).logits.flatten(0, 1)
            finally:
                self._backbone_stub.hidden = None
        return logits


def seeded(seed: int | None, *, watch: bool = True) -> AbstractContextManager[OwnDraws | None]:
    """The random draws of one layer call, by torch's functions too if they are watched; nothing without a seed."""
    if seed is None:
        return nullcontext()
    return SeededDropout(seed) if watch else OwnDraws(seed)


def _bindings(modules: Sequence[nn.Module], names: Mapping[int, str]) -> Iterator[Binding]:
    for root in modules:
        for module in root.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    yield module, attribute, names[id(parameter)]
