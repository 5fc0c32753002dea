"""Attention of rows without a mask for all pairs of tokens, and which kernel a card takes for it.

transformers keeps rows apart by a mask [B, 1, T, T]: a byte a pair on the host, made for every microbatch and uploaded
to every worker, and no fused kernel skips what it leaves out. Where rows lie is all that it says, so within `in_rows`
the mask that "sdpa" is given is a `PackedRows` instead, and attention of "sdpa" reads it:

    [1 . . . .]      rows end at 2, 5         tokens 0-1: causal attention
    [1 1 . . .]  ->  window: none         ->  tokens 2-4: causal attention
    [. . 1 . .]
    [. . 1 1 .]      one call for all rows on GPUs with variable-length flash attention, else a call a row; a row
    [. . 1 1 1]      longer than its window in blocks of queries, each with the keys that it can see

Rows that are not packed need no more than the causal mask, unless they are longer than a sliding window or there are
sinks. Then the same holds for them, as one row a sequence (`in_whole_rows`). A chunk of a sequence has the last T of
its S + T tokens as queries, and all of them as keys: the causal mask is aligned to the lower right.

    [1 1 1 .]    S = 2 earlier tokens, T = 2 of the chunk; a row that ends before the chunk has keys and no queries
    [1 1 1 1]
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from roundpipe_cli.costs.block_work import BLOCK_TOKENS, MAX_FLASH_WIDTH, PACKED_FLASH_WIDTHS
from roundpipe_cli.library_names import library_name
from roundpipe_cli.packages import FAST_KERNELS

# Attention on cards whose kernels take no keys that several query heads share: each head gets its own copy.

FLASH_CAPABILITY = (8, 0)
"""Compute capability from which cards have flash attention."""
_least_capability: tuple[int, int] | None = None
"""Compute capability of the cards of this process's run; None: it runs on none."""


def set_up_attention(least_capability: tuple[int, int]) -> None:
    """Give each query head its own copy of keys and values where no fused kernel takes shared ones.

    transformers shares them wherever there is no mask. Flash attention takes that, the efficient kernel does not, and
    the math kernel, which is left, keeps scores of all pairs of tokens: in float32, and before sm80. One choice for all
    cards of a run, or workers would round gradients of keys differently; what runs on the processor stays as it was.
    `least_capability`: the smallest of the cards that the run uses, e.g. (8, 6); (0, 0) for another maker's.
    """
    from transformers.integrations import sdpa_attention  # late: it imports torch's compiler

    global _least_capability
    _least_capability = least_capability
    if not hasattr(getattr(sdpa_attention, "use_gqa_in_sdpa", None), "__wrapped__"):
        shares_keys = library_name("transformers.integrations.sdpa_attention", "use_gqa_in_sdpa")

        @functools.wraps(shares_keys)
        def decide(attention_mask: torch.Tensor | None, key: torch.Tensor, *rest: Any) -> bool:
            return shares_keys(attention_mask, key, *rest) and takes_shared_keys(key)

        sdpa_attention.use_gqa_in_sdpa = decide


def takes_shared_keys(key: torch.Tensor) -> bool:
    """Whether a fused kernel takes keys [batch, heads, tokens, width] that several query heads share."""
    return key.device.type == "cpu" or _least_capability is None or has_flash(key.dtype)


def has_flash(dtype: torch.dtype) -> bool:
    """Whether all cards of this process's run have flash attention in `dtype`."""
    has_kernel = _least_capability is not None and _least_capability >= FLASH_CAPABILITY
    return has_kernel and dtype in (torch.float16, torch.bfloat16)


NAME, EAGER = "sdpa", "eager"
"""Implementations in transformers' registries: the one that reads `PackedRows`, and the one that keeps all scores."""
_now = threading.local()


@dataclass(frozen=True)
class PackedRows:
    """Stands for a mask [B, 1, T, S + T] that shows a token its own row's tokens up to itself, at most `window` of
    them."""

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of the rows of each sequence, up to the chunk's last; each sums to S + T."""
    window: int | None
    ends: torch.Tensor
    """Ends of all rows of all sequences laid end to end, with a 0 before them, of queries and of keys: int32
    [2, rows + 1]."""
    start: int = 0
    """S: tokens of each sequence before the queries, where they are a chunk."""

    @staticmethod
    def of(lengths: tuple[tuple[int, ...], ...], window: int | None = None, start: int = 0) -> PackedRows:
        """Rows of these lengths."""
        rows = PackedRows(lengths, window, torch.empty(0), start)
        ends = [[0, *itertools.accumulate(itertools.chain(*each))] for each in (rows.queries, lengths)]
        return replace(rows, ends=torch.tensor(ends, dtype=torch.int32))

    @property
    def queries(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of the rows of each sequence from `start` on; each sums to T."""
        ends = [itertools.accumulate(lengths) for lengths in self.lengths]
        pairs = [zip(lengths, each, strict=True) for lengths, each in zip(self.lengths, ends, strict=True)]
        return tuple(tuple(min(length, max(0, end - self.start)) for length, end in each) for each in pairs)

    def __repr__(self) -> str:
        return f"PackedRows(window={self.window})"  # equal for all blocks that compute the same

    def __getitem__(self, places: Any) -> PackedRows:
        """The rows, for slices of everything: gemma4 with shared keys cuts masks to the tokens that have logits."""
        if all(one in (slice(None), slice(0, None)) for one in places):
            return self
        raise TypeError(f"a part of a mask of packed rows: {places}")

    def map_tensors(self, function: Callable[[Any], Any]) -> PackedRows:
        """A copy with `function` applied to `ends`, for instance to move it to a device."""
        return replace(self, ends=function(self.ends))

    @property
    def are_whole(self) -> bool:
        """Whether each sequence is one row."""
        return all(len(lengths) == 1 for lengths in self.lengths)

    @property
    def numbers(self) -> torch.Tensor:
        """The number of each token's row within its sequence, [B, S + T]."""
        return torch.stack([torch.repeat_interleave(torch.tensor(lengths)) for lengths in self.lengths])

    def mask(self) -> torch.Tensor:
        """The mask itself, bool [B, 1, T, S + T]."""
        rows = self.numbers.to(self.ends.device)
        places = torch.arange(rows.shape[1], device=rows.device)
        behind = places[self.start :, None] - places
        near: torch.Tensor = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
        visible: torch.Tensor = ((rows[:, self.start :, None] == rows[:, None]) & near)[:, None]
        return visible


RECURRENT = re.compile(r"(Qwen3Next|Qwen3_5(Moe)?|OlmoHybrid)GatedDeltaNet")
"""Classes of modules that carry state from token to token and may compute a row of a packed sequence alone: a gated
delta rule and its short convolution, without positions."""


def recurrent_modules(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of those in a block."""
    return ((path, module) for path, module in block.named_modules() if RECURRENT.fullmatch(type(module).__name__))


def recurrent_blocks(blocks: Iterable[nn.Module], first: int = 0) -> frozenset[int]:
    """Numbers, counted from `first`, of the blocks that have such a module."""
    return frozenset(index for index, block in enumerate(blocks, first) if any(recurrent_modules(block)))


def describe_slow_kernels(blocks: Iterable[nn.Module], devices: Iterable[str]) -> str | None:
    """A notice on packages without which GPUs compute recurrent modules slowly; None: no such module, GPU or lack."""
    missing = [name for module, name in FAST_KERNELS.items() if importlib.util.find_spec(module) is None]
    if not missing or set(devices) <= {"cpu"} or not recurrent_blocks(blocks):
        return None
    return (
        f"recurrent blocks run by plain PyTorch, the same but much slower: {' and '.join(missing)} not installed "
        f"(pip install {' '.join(missing)})"
    )


def restart_at_rows(blocks: Iterable[nn.Module]) -> None:
    """Have recurrent modules in `blocks` (one worker's own) begin anew at each row where `PackedRows` is their mask."""
    for block in blocks:
        for _, module in recurrent_modules(block):
            module.__dict__["forward"] = types.MethodType(_forward_by_row, module)


def _forward_by_row(
    module: nn.Module, hidden_states: torch.Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any
) -> torch.Tensor:
    """[B, T, H] -> [B, T, H]; no state goes from a row to the next. A chunk's first row goes on where the chunk before
    ended, if it began there."""
    forward = functools.partial(type(module).forward, module)
    if not isinstance(attention_mask, PackedRows):
        result: torch.Tensor = forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)
        return result
    found, cache, last = [], kwargs.pop("cache_params", None), []
    sequences = zip(hidden_states.split(1), attention_mask.queries, attention_mask.lengths, strict=True)
    for index, (sequence, queries, lengths) in enumerate(sequences):
        here = [(tokens, tokens < length) for tokens, length in zip(queries, lengths, strict=True) if tokens]
        caches = [None if cache is None else cache.of_row(index, goes_on=goes_on) for _, goes_on in here]
        rows = zip(sequence.split([tokens for tokens, _ in here], dim=1), caches, strict=True)
        each = [forward(row, *args, cache_params=one, **kwargs) for row, one in rows]
        found.append(torch.cat(each, dim=1))
        last.append(caches[-1])
    if cache is not None:
        cache.end_with(last)
    return torch.cat(found)


def in_rows(
    position_ids: torch.Tensor, *, as_masks: bool = False, start: int | None = None
) -> AbstractContextManager[None]:
    """Within, in this thread, masks of "sdpa" for `position_ids` [B, T], which restart with each row, are `PackedRows`.

    A mask that shows anything else (chunks of a local attention, tokens on both sides) stays what it was. With
    `as_masks` all stay tensors, as the model's own code makes them; of a chunk with the rows told apart, of which that
    code does not know.

    Args:
        start: where a chunk begins, whose sequence's `position_ids` [B, S + T] are up to its end; None: it is none.
    """
    found = []
    for sequence in position_ids.cpu():
        starts = [0, *(torch.nonzero(sequence.diff() != 1).flatten() + 1).tolist(), len(sequence)]
        found.append(tuple(end - start for start, end in itertools.pairwise(starts)))
    return _within(PackedRows.of(tuple(found), None, start or 0), as_masks, is_packed_chunk=start is not None)


def in_whole_rows(num_rows: int, tokens: int, *, start: int = 0) -> AbstractContextManager[None]:
    """`in_rows` for sequences of one row each, [num_rows, start + tokens]; the causal mask of whole sequences is
    kept."""
    rows = PackedRows.of(((start + tokens,),) * num_rows, None, start)
    return _within(rows, as_masks=False, are_packed=False)


@contextmanager
def _within(
    rows: PackedRows, as_masks: bool, *, are_packed: bool = True, is_packed_chunk: bool = False
) -> Iterator[None]:
    _register()
    _now.rows, _now.as_masks, _now.are_packed, _now.is_packed_chunk = rows, as_masks, are_packed, is_packed_chunk
    try:
        yield
    finally:
        _now.rows = None


def packed_rows() -> PackedRows | None:
    """Where this thread's rows lie, without a window; None: it is not within `in_rows`."""
    rows: PackedRows | None = getattr(_now, "rows", None)
    return rows if rows is not None and _now.are_packed else None


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    AttentionMaskInterface.register(NAME, functools.wraps(sdpa_mask)(functools.partial(rows_or_mask, sdpa_mask)))
    AttentionMaskInterface.register(EAGER, functools.wraps(eager_mask)(functools.partial(mask_of_rows, eager_mask)))
    AttentionInterface.register(NAME, _reading_rows(sdpa_attention_forward))


def _reading_rows(attend: Callable[..., Any]) -> Callable[..., Any]:
    """The attention as transformers calls it, which also takes `PackedRows` for a mask."""

    @functools.wraps(attend)
    def attend_or_read(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> Any:
        if not isinstance(attention_mask, PackedRows):
            return attend(module, query, key, value, attention_mask, **more)
        return attend_rows(functools.partial(attend, module), query, key, value, rows=attention_mask, more=more)

    return attend_or_read


def rows_or_mask(make_mask: Callable[..., torch.Tensor | None], *args: Any, **kwargs: Any) -> Any:
    """`PackedRows` where this thread is within `in_rows` and they say the same as the mask; else `make_mask`'s."""
    rows = _rows_here(kwargs)
    if rows is None or args or _now.as_masks:
        return mask_of_rows(make_mask, *args, **kwargs)
    kwargs = _told_apart(kwargs)
    is_causal_alone = rows.are_whole and not rows.start and (rows.window is None or rows.window >= rows.lengths[0][0])
    return make_mask(**kwargs) if is_causal_alone or not _is_same(rows, kwargs) else rows


def mask_of_rows(make_mask: Callable[..., torch.Tensor | None], *args: Any, **kwargs: Any) -> Any:
    """The model's own mask, for a chunk of packed rows with these told apart."""
    return make_mask(*args, **_told_apart(kwargs))


def _told_apart(asked: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a mask is asked for with; within a chunk of packed rows, of which a model with a cache does
    not know, a token sees its own row alone."""
    rows: PackedRows | None = getattr(_now, "rows", None)
    if rows is None or not _now.is_packed_chunk or rows.are_whole:
        return asked
    numbers, shows = rows.numbers, asked["mask_function"]

    def shows_own(sequence: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        seen: torch.Tensor = shows(sequence, head, query, key) & (numbers[sequence, query] == numbers[sequence, key])
        return seen

    return {**asked, "mask_function": shows_own, "allow_is_causal_skip": False}


def rows_or_causal_mask(make_mask: Callable[..., torch.Tensor | None], **kwargs: Any) -> Any:
    """The mask of a model that asks for a causal one and says nothing of rows: they are kept apart all the same."""
    rows = _rows_here(kwargs)
    if rows is None:
        return make_mask(**kwargs)
    whole = replace(rows, lengths=tuple((sum(lengths),) for lengths in rows.lengths))
    if not _is_same(whole, kwargs) and not _is_same(rows, kwargs):
        return mask_of_rows(make_mask, **kwargs)
    return rows.mask() if _now.as_masks else rows


def _rows_here(asked: dict[str, Any]) -> PackedRows | None:
    """Where this thread's rows lie, with the window of the mask that is asked for; None: it is not within `in_rows`."""
    rows: PackedRows | None = getattr(_now, "rows", None)
    return None if rows is None else replace(rows, window=asked.get("local_size"))


def _is_same(rows: PackedRows, asked: dict[str, Any]) -> bool:
    """Whether the mask that is asked for shows each token its first key and its own, and none before or after those.

    Asked of transformers' own function of (sequence, head, query, key), at 7 keys of each query.
    """
    count, total = len(rows.lengths), sum(rows.lengths[0])
    sizes = asked["batch_size"], asked["q_length"], asked["kv_length"], asked.get("q_offset", 0)
    if sizes != (count, total - rows.start, total, rows.start) or asked.get("kv_offset", 0):
        return False
    if asked.get("attention_mask") is not None or asked.get("use_vmap"):
        return False
    query = torch.arange(rows.start, total)[None].expand(count, -1)
    sequence, shape = torch.arange(count)[:, None], query.shape
    starts = [torch.tensor([0, *itertools.accumulate(lengths[:-1])]) for lengths in rows.lengths]
    pairs = zip(starts, rows.lengths, strict=True)
    first = torch.stack([start.repeat_interleave(torch.tensor(lengths)) for start, lengths in pairs])[:, rows.start :]
    if rows.window is not None:
        first = torch.maximum(first, query - rows.window + 1)

    def shows(key: torch.Tensor) -> torch.Tensor:
        inside = (key >= 0) & (key < total)
        found = asked["mask_function"](sequence, torch.zeros_like(sequence), query, key.clamp(0, total - 1))
        visible: torch.Tensor = found.expand(shape) & inside
        return visible

    start, end = torch.zeros_like(query), torch.full_like(query, total - 1)
    visible = shows(first) & shows((first + query) // 2) & shows(query)
    hidden = ~shows(first - 1) & ~shows(query + 1) & (shows(start) == (first == 0)) & (shows(end) == (query == end))
    return bool((visible & hidden).all())


def attend_rows(
    attend: Callable[..., tuple[torch.Tensor, None]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rows: PackedRows,
    more: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: [B, T, heads, D], and no scores.

    Args:
        attend: attention of (query, key, value, mask or None for a causal one), as transformers calls it, for a row.
        query: [B, heads, T, D]; key and value have key-value heads and S + T tokens; value may have another width.
        more: the caller's other arguments.
    """
    if more.get("position_bias") is not None or more.get("is_causal") is False:
        return attend(query, key, value, rows.mask(), **more)
    if _has_own_kernel(query, key, value, more) and (not rows.start or chunks_need_no_mask(key, value)):
        return _attend_at_once(query, key, value, rows, more=more), None
    if rows.are_whole:
        return _attend_row(attend, query, key, value, rows.window, more), None
    found = []
    for index, (queries, lengths) in enumerate(zip(rows.queries, rows.lengths, strict=True)):
        tensors = (query, queries), (key, lengths), (value, lengths)
        parts = [tensor[index : index + 1].split(sizes, dim=2) for tensor, sizes in tensors]
        each = [_attend_row(attend, q, k, v, rows.window, more) for q, k, v in zip(*parts, strict=True) if q.shape[2]]
        found.append(torch.cat(each, dim=1))
    return torch.cat(found), None


def _attend_row(
    attend: Callable[..., tuple[torch.Tensor, None]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    more: dict[str, Any],
) -> torch.Tensor:
    """One row of each sequence, [B, T, heads, D]; in blocks of queries where it is longer than its window. The queries
    are its last tokens."""
    length = key.shape[2]
    before = length - query.shape[2]
    if not before and (window is None or length <= window):
        return attend(query, key, value, None, **{**more, "is_causal": True})[0]
    window = min(window or length, length)
    block = max(window, BLOCK_TOKENS)
    found = []
    for start in range(before, length, block):
        end, first = min(start + block, length), max(0, start - window + 1)
        places = torch.arange(first, end, device=query.device)
        own = places[start - first :, None]
        mask = ((places <= own) & (places > own - window))[None, None]
        seen = (query[:, :, start - before : end - before], key[:, :, first:end], value[:, :, first:end])
        found.append(attend(*seen, mask, **{**more, "is_causal": False})[0])
    return torch.cat(found, dim=1)


def _has_own_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, more: dict[str, Any]) -> bool:
    """Whether variable-length flash attention applies: no dropout, heads of one width, a GPU that has it."""
    if query.device.type != "cuda" or more.get("dropout") or more.get("s_aux") is not None:
        return False
    return _has_widths(query, value) and has_flash(query.dtype)


def _has_widths(key: torch.Tensor, value: torch.Tensor) -> bool:
    width = key.shape[-1]
    return width == value.shape[-1] and width <= MAX_FLASH_WIDTH and width % PACKED_FLASH_WIDTHS == 0


@functools.cache
def _is_told_of_shared_keys(kernel: Callable[..., Any]) -> bool:
    """Whether torch's variable-length attention wants to know; that of 2.11 does not."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _attend_at_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PackedRows, *, more: dict[str, Any]
) -> torch.Tensor:
    from torch.nn.attention import varlen

    batch, heads, length, width = query.shape

    def flat(part: torch.Tensor) -> torch.Tensor:
        return part.transpose(1, 2).reshape(-1, part.shape[1], width)

    longest = [max(map(max, lengths)) for lengths in (rows.queries, rows.lengths)]
    window = -1 if rows.window is None else rows.window - 1
    is_told = _is_told_of_shared_keys(varlen.varlen_attn)
    shared: dict[str, Any] = {"enable_gqa": heads != key.shape[1]} if is_told else {}
    result = varlen.varlen_attn(
        flat(query),
        flat(key),
        flat(value),
        *rows.ends,
        *longest,
        scale=more.get("scaling"),
        window_size=(window, 0),
        **shared,
    )
    assert isinstance(result, torch.Tensor), "no log-sums were asked for"
    return result.view(batch, length, heads, width)


_takes_other_ends = False
"""Whether the GPUs of this process's run take other ends of queries than of keys."""


def chunks_need_no_mask(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether chunks of plain attention to such keys and values need no mask on the GPUs of this process's run."""
    return _takes_other_ends and has_flash(key.dtype) and _has_widths(key, value)


MAX_TRIED_ERROR = 3e-2
"""Allowed relative error in 16 bit; a mask aligned to the upper left is off by the size of the numbers."""


def try_other_ends(devices: Iterable[str]) -> str | None:
    """Try on each of the GPUs ("cuda:0"), by a few tokens, whether variable-length attention is that of a chunk behind
    others: other ends of queries than of keys, the causal mask aligned to the lower right, forward and backward. A
    notice where it is not, so that chunks get a mask."""
    global _takes_other_ends
    _takes_other_ends = False
    generator = torch.Generator().manual_seed(0)
    tried = [PackedRows.of(((3, 9, 4),), window, 5) for window in (None, 2)]
    given = [torch.randn(1, heads, tokens, 64, generator=generator) for heads, tokens in ((4, 11), (2, 16), (2, 16))]

    def numbers(attend: Callable[..., torch.Tensor], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        tensors = [tensor.to(device, dtype).requires_grad_() for tensor in given]
        result = attend(*tensors)
        found = [result, *torch.autograd.grad(result.square().sum(), tensors)]
        return [tensor.detach().cpu().float() for tensor in found]

    def by_mask(rows: PackedRows, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attend = functional.scaled_dot_product_attention
        return attend(query, key, value, rows.mask(), enable_gqa=True).transpose(1, 2)

    for device, rows in itertools.product(dict.fromkeys(devices), tried):
        expected = numbers(functools.partial(by_mask, rows), "cpu", torch.float32)
        there = rows.map_tensors(lambda ends, device=device: ends.to(device))
        try:
            found = numbers(functools.partial(_attend_at_once, rows=there, more={}), device, torch.bfloat16)
        except (AttributeError, ImportError, RuntimeError, TypeError) as error:
            return f"chunks attend with masks of all pairs of tokens: {device} has no kernel that needs none: {error}"
        if not all((a - b).norm() <= MAX_TRIED_ERROR * b.norm() for a, b in zip(found, expected, strict=True)):
            return f"chunks attend with masks of all pairs of tokens: {device} aligns them another way without"
    _takes_other_ends = True
    return None


# Attention with sinks (gpt-oss) by torch's fused kernels, which keep no scores.
#
# A sink is one number a head that takes part in the softmax and contributes no value. transformers computes that with
# scores of every pair of tokens: 2 bytes x heads x T^2 a layer in 16 bit, half a gigabyte at 2048 tokens of
# gpt-oss-20b, kept for backward. But a sink s is also a key that every query has the product s with, of value 0:
#
#     query  (q, 1)      keys  (k_1, 0) ... (k_T, 0), (0, s / scale)      values  v_1 ... v_T, 0
#
# so that `scaled_dot_product_attention` gives the same numbers, and gradients of the sinks too. Keys and widths are
# filled up to multiples of 8, which fused kernels want, with keys that are masked out.

SINKS_NAME = "roundpipe_sinks"
"""Name of the implementation in transformers' registry."""
SINK_MODEL_TYPES = frozenset({"gpt_oss"})
"""Types whose attention has sinks, passes them as `s_aux`, and computes all scores in transformers."""
SINK_STEP = 8


def register_sinks() -> None:
    """Make the implementation known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SINKS_NAME, _reading_rows(sink_attention))
    AttentionMaskInterface.register(SINKS_NAME, _sink_mask)


def _sink_mask(**kwargs: Any) -> Any:
    """Always a mask, [B, 1, T, S], true where a query sees a key: that of the sink comes beside it; `PackedRows` within
    `in_rows`. The models of transformers 5.23 make theirs without the position ids, which tell rows apart."""
    from transformers.masking_utils import sdpa_mask

    return rows_or_causal_mask(sdpa_mask, **{**kwargs, "allow_is_causal_skip": False})


def sink_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as transformers calls it: [B, T, heads, D], and no scores.

    Args:
        query: [B, heads, T, D]; key and value are [B, key-value heads, S, D].
        attention_mask: [B or 1, 1, T, S], true where a query sees a key; None: a causal one, T = S.
        scaling: of the products; None: 1 / sqrt(D).
        s_aux: the sinks, [heads].
    """
    assert s_aux is not None, "this attention is for models with sinks"
    batch, heads, length, width = query.shape
    scale = width**-0.5 if scaling is None else scaling
    seen = key.shape[2]
    more_width, more_keys = SINK_STEP - width % SINK_STEP, SINK_STEP - seen % SINK_STEP
    one = functional.pad(query.new_ones(1), (0, more_width - 1))  # `x[0] = 1` would upload the number and wait for it
    query = torch.cat((query, one.expand(batch, heads, length, more_width)), dim=-1)
    groups = heads // key.shape[1]
    key, value = (
        functional.pad(part.repeat_interleave(groups, dim=1), (0, more_width, 0, more_keys)) for part in (key, value)
    )
    sink = functional.pad((s_aux / scale).to(key.dtype)[:, None], (width, more_width - 1))
    key = torch.cat((key[:, :, :seen], sink[:, None].expand(batch, -1, -1, -1), key[:, :, seen + 1 :]), dim=2)
    if attention_mask is None:
        attention_mask = query.new_ones((1, 1, length, length), dtype=torch.bool).tril()
    mask = functional.pad(functional.pad(attention_mask, (0, 1), value=True), (0, more_keys - 1), value=False)
    result = functional.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scale)
    return result[..., :width].transpose(1, 2).contiguous(), None
