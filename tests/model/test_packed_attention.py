"""Attention of packed rows without a mask of all pairs: the numbers that the mask gives; and attention with sinks by
fused kernels: transformers' own numbers, without its scores."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import chunked_causal_mask_function, sdpa_mask, sliding_window_causal_mask_function
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.engine.probe import Probe
from roundpipe_cli.model import attention
from roundpipe_cli.model.weights_io import save_model
from roundpipe_cli.model.worker_model import WorkerModel
from tests.support.simulated_cases import CASES, is_equal, simulated
from tests.support.simulated_cuda.operations import SUBSTITUTES, flash_backward, flash_forward
from tests.support.tiny import EXTRA, make_rig, random_microbatches, tiny_config

ROWS = ((9, 1, 14, 8), (20, 12))
WINDOWS = [None, 1, 4, 40]
WINDOW = {"sliding_window": 4}


def positions(lengths: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(row) for row in rows]) for rows in lengths])


packed_rows = functools.partial(attention.PackedRows.of, ROWS)
STARTS = [0, 10, 24]
"""Tokens before a chunk: none, the first of a row and within rows, within the last rows."""


def asked(mask_function: Any, **changes: Any) -> dict[str, Any]:
    """What transformers asks a mask of "sdpa" with."""
    total = sum(ROWS[0])
    sizes = {"batch_size": 2, "q_length": total, "kv_length": total, "q_offset": 0, "kv_offset": 0}
    return {**sizes, "mask_function": mask_function, "attention_mask": None, "use_vmap": False, **changes}


def within_rows(mask_function: Any) -> Any:
    """As transformers has it: rows numbered, places counted from each row's start (5.17: from the microbatch's)."""
    places = positions(ROWS)
    rows = masking_utils.find_packed_sequence_indices(places)
    if not hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.and_masks(masking_utils.packed_sequence_mask_function(rows), mask_function)
    return masking_utils.packed_sequence_compatibility_function(mask_function, places, rows)


@pytest.mark.parametrize("window", WINDOWS)
def test_rows_stand_for_the_mask_of_transformers(window: int | None) -> None:
    function = within_rows(sliding_window_causal_mask_function(window or 1000))
    words = asked(function, local_size=window, allow_is_causal_skip=False)
    with attention.in_rows(positions(ROWS)):
        found = attention.rows_or_mask(sdpa_mask, **words)
    assert isinstance(found, attention.PackedRows) and found.lengths == ROWS
    assert torch.equal(found.mask(), sdpa_mask(**words))
    assert isinstance(attention.rows_or_mask(sdpa_mask, **words), torch.Tensor), "only for packed rows"


@pytest.mark.parametrize(
    "words",
    [
        asked(within_rows(chunked_causal_mask_function(6, torch.zeros(2, dtype=torch.long))), local_size=6),
        asked(within_rows(lambda sequence, head, query, key: key >= 0)),
        asked(within_rows(lambda sequence, head, query, key: (query >= key) & ((query - key) % 2 == 0))),
        asked(lambda sequence, head, query, key: query >= key),
        asked(within_rows(sliding_window_causal_mask_function(4)), local_size=None),
        asked(within_rows(sliding_window_causal_mask_function(1000)), use_vmap=True, allow_is_causal_skip=False),
    ],
    ids=["chunks", "both sides", "every other", "rows that see each other", "a window unsaid", "a form unknown"],
)
def test_what_rows_cannot_say_stays_a_mask(words: dict[str, Any]) -> None:
    with attention.in_rows(positions(ROWS)):
        assert not isinstance(attention.rows_or_mask(sdpa_mask, **words), attention.PackedRows)


def tensors(start: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    pairs = ((4, 32 - start), (2, 32), (2, 32))
    return [torch.randn(2, heads, tokens, 8, requires_grad=True) for heads, tokens in pairs]


def gradients(attend: Callable[..., Any], start: int = 0) -> list[torch.Tensor]:
    given = tensors(start)
    out = attend(*given)[0]
    return [out, *torch.autograd.grad(out.sin().sum(), given)]


def varlen_by_its_documentation(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, scale: Any, window_size: Any
) -> torch.Tensor:
    """What the documentation of torch 2.11 says that `varlen_attn` computes; the kernel itself needs a GPU."""
    ends, longest = rest[:2], rest[2:]
    assert [int(one.diff().max()) for one in ends] == list(longest) and {one.dtype for one in ends} == {torch.int32}
    rows = [torch.bucketize(torch.arange(int(one[-1])), one[1:].long(), right=True) for one in ends]
    places = torch.arange(len(query)) + (ends[1] - ends[0])[1:][rows[0]]  # rows of queries and of keys end together
    behind = places[:, None] - torch.arange(len(key))
    mask = (rows[0][:, None] == rows[1]) & (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
    parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
    out = functional.scaled_dot_product_attention(*parts, mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


class Substitute(torch.autograd.Function):
    """The kernel of simulated cards, which keeps what flash attention keeps."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        ctx.rest = given[3:]
        result, sums, _ = flash_forward(*given)
        ctx.save_for_backward(*given[:3], result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = flash_backward(*gradients, *ctx.saved_tensors, *ctx.rest[:5], None, *ctx.rest[5:])
        return (*found, *(None for _ in ctx.rest))


def substitute(*inputs: Any, scale: Any, window_size: Any, enable_gqa: bool = False) -> torch.Tensor:
    result: torch.Tensor = Substitute.apply(*inputs, True, scale, window_size)  # type: ignore[no-untyped-call]
    return result


def newer(*inputs: Any, enable_gqa: bool = False, **more: Any) -> torch.Tensor:
    """By the documentation of torch 2.13, which wants to be told of heads that share keys."""
    assert enable_gqa
    return varlen_by_its_documentation(*inputs, **more)


@pytest.mark.covering(2)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernel", [None, varlen_by_its_documentation, newer, substitute])
def test_rows_give_the_numbers_of_the_mask(window: int | None, start: int, kernel: Any, monkeypatch: Any) -> None:
    """Each row by itself (None), or all at once by what stands for a GPU's kernel: documented or simulated."""
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 6)  # so that a row is cut into blocks
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    rows, more = packed_rows(window, start), {"scaling": 0.3}
    assert torch.equal(rows.mask(), packed_rows(window).mask()[:, :, start:])
    sdpa = functools.partial(sdpa_attention_forward, SimpleNamespace(num_key_value_groups=2, is_causal=True))

    def attend(*parts: torch.Tensor) -> Any:
        if kernel is None:
            return attention.attend_rows(sdpa, *parts, rows=rows, more=more)
        return [attention._attend_at_once(*parts, rows, more=more)]

    expected = gradients(lambda *parts: sdpa(*parts, rows.mask(), **more), start)
    for one, other in zip(gradients(attend, start), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", ["", "upper left", "not finite", "no kernel"])
def test_chunks_go_without_a_mask_where_a_card_aligns_it_as_they_need(wrong: str, monkeypatch: Any) -> None:
    """A kernel that aligned the causal mask to the upper left would hide a chunk's own keys, silently."""

    def upper_left(query: Any, key: Any, value: Any, ends: Any, _: Any, *rest: Any) -> Any:
        return flash_forward(query, key, value, ends, ends, *rest)

    def not_finite(*given: Any) -> Any:
        queries, keys, values = flash_backward(*given)
        keys[:3] = torch.nan  # of the row that has no queries, as memory that nobody has written may be
        return queries, keys, values

    if wrong == "not finite":
        monkeypatch.setitem(SUBSTITUTES, "torch_attn._varlen_attn_backward.default", not_finite)
    if wrong == "upper left":
        monkeypatch.setitem(SUBSTITUTES, "torch_attn._varlen_attn.default", upper_left)
    if wrong == "no kernel":
        monkeypatch.delitem(SUBSTITUTES, "torch_attn._varlen_attn.default")
    monkeypatch.setattr(attention, "_takes_other_ends", False)
    with simulated():
        notice = attention.try_other_ends(["cuda:0", "cuda:0"])
    assert attention._takes_other_ends is (notice is None) is (not wrong)
    assert wrong == "" or "masks of all pairs" in str(notice)


def test_which_gpus_have_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for card, dtype, width, dropout, has_kernel in (
        *(((8, 6), bf16, 8, 0.0, True), ((8, 6), f32, 8, 0.0, False), ((7, 5), f16, 8, 0.0, False)),
        *(((9, 0), bf16, 512, 0.0, False), ((9, 0), bf16, 8, 0.1, False), ((9, 0), bf16, 80, 0.0, True)),
        *(((9, 0), bf16, 100, 0.0, False), (None, bf16, 8, 0.0, False)),
    ):
        monkeypatch.setattr(attention, "_least_capability", card)
        part: Any = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 2, 3, width))
        assert attention._has_own_kernel(part, part, part, {"dropout": dropout}) is has_kernel, (card, dtype, width)


@pytest.mark.parametrize(
    ("model_type", "packed"),
    [
        *((name, True) for name in ("llama", "gemma3_text", "gemma2", "gpt_oss")),
        *((name, False) for name in ("llama", "gemma3_text", "gpt_oss")),
        *(pytest.param(*case, marks=pytest.mark.sweep) for case in (("qwen3_moe", True), ("mistral", False))),
    ],
)
def test_a_step_gives_the_numbers_of_masks(model_type: str, packed: bool) -> None:
    """gemma2's own attention keeps its mask. Rows longer than a window had one of all pairs for each microbatch."""
    rows = random_microbatches([(1, 16), (1, 16)] if packed else [(2, 9), (1, 14)])
    if packed:
        places = positions(((6, 1, 9),)), positions(((11, 5),))
        rows = [replace(one, position_ids=place) for one, place in zip(rows, places, strict=True)]
    changes = {} if model_type in ("llama", "qwen3_moe") else WINDOW
    base = replace(CASES["packing"], model_type=model_type, model=changes, microbatches=rows)
    found = replace(base, engine={"attends_in_rows": True}).on_processor()
    assert is_equal(found, base.on_processor(), 1e-5 if packed or changes else 0.0)


@pytest.mark.parametrize(("model_type", "at_least"), [("llama", None), ("gemma3_text", 5), ("gpt_oss", 1)])
def test_who_needs_more_than_the_causal_mask(model_type: str, at_least: int | None) -> None:
    rig = make_rig(model_type, "lora", **({} if model_type == "llama" else {"sliding_window": 4}))
    probe = Probe(rig.skeleton, rig.split, rig.store)
    needed = [tokens for tokens in (1, 4, 5, 9) if probe.has_masks(tokens)]
    assert needed == [tokens for tokens in (1, 4, 5, 9) if at_least is not None and tokens >= at_least]


def test_blocks_are_tried_before_they_are_told_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig("llama", "lora")
    assert Probe(rig.skeleton, rig.split, rig.store).can_attend_in_rows()
    row = attention._attend_row
    monkeypatch.setattr(attention, "_attend_row", lambda *given: row(*given) * 1.1)
    assert not Probe(rig.skeleton, rig.split, rig.store).can_attend_in_rows(), "other numbers"
    for rig in map(make_rig, ("doge", "codegen")):
        assert not Probe(rig.skeleton, rig.split, rig.store).can_attend_in_rows(), "they read their mask themselves"


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [one.numel() for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.elements = max(self.elements, *made, 0)
        return result


@pytest.mark.parametrize(
    ("model_type", "window", "rows"), [("llama", None, 8), ("gemma3_text", 128, 8), ("mistral", 128, 1)]
)
def test_long_sequences_have_no_tensor_of_all_pairs(model_type: str, window: int | None, rows: int) -> None:
    """4,096 tokens have 16 million: masks were refused beyond 23,170. Also of one row through a window of 128."""
    changes = {} if window is None else {"sliding_window": window}
    rig = make_rig(model_type, "full", num_hidden_layers=2, max_position_embeddings=65536, **changes)
    views, trained = rig.store.views, rig.store.trainable_names
    worker = WorkerModel(rig.skeleton, rig.split, views, trained, device=torch.device("cpu"))
    worker.attends_in_rows = True
    lengths = ((4096 // rows,) * rows,)
    ids = torch.arange(sum(lengths[0]))[None] % 100
    with Largest() as largest:
        prologue = worker.prologue(ids, None, positions(lengths) if rows > 1 else None)
        worker.bind(1, {place.name: place.parameter(rig.store.buffers[1]) for place in rig.store.layouts[1].places})
        hidden = prologue.hidden.detach().requires_grad_()
        worker.run_block(0, prologue.calls[0], hidden).sum().backward()
    assert largest.elements <= 2**20


# -- attention with sinks -------------------------------------------------------------------------------------------

LENGTH = 21
POSITIONS = [*range(9), *range(7), *range(5)]


def both(**changes: Any) -> tuple[Any, Any]:
    """transformers' model and the same with our attention; sinks that matter."""
    rig = make_rig("gpt_oss", **changes)
    theirs: Any = rig.plain
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("sinks"):
                parameter.mul_(20)
    ours = copy.deepcopy(theirs)
    ours.config._attn_implementation = attention.SINKS_NAME
    of_engine: Any = rig.skeleton.config
    assert (of_engine._attn_implementation, theirs.config._attn_implementation) == (attention.SINKS_NAME, "eager")
    return theirs, ours


@pytest.mark.covering(2)
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["one row", "packed rows"])
@pytest.mark.parametrize("window", [4, 128])
@pytest.mark.parametrize("head_dim", [16, 12])
def test_losses_and_gradients_are_those_of_transformers(head_dim: int, window: int, positions: Any) -> None:
    more = {} if positions is None else {"position_ids": torch.tensor([positions] * 2)}
    ids = torch.randint(1, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits, gradients = [], []
    for model in both(head_dim=head_dim, sliding_window=window):
        made = model(input_ids=ids, use_cache=False, **more).logits
        torch.nn.functional.cross_entropy(made[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        logits.append(made.detach())
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-6)
    for name, expected in gradients[0].items():
        if expected is not None:
            error = float((gradients[1][name] - expected).norm())
            assert error <= 1e-5 * float(expected.norm()) + 1e-9, name
    assert float(gradients[1]["model.layers.0.self_attn.sinks"].norm()) > 1e-5, "sinks learn"


def test_generated_tokens_are_those_of_transformers() -> None:
    theirs, ours = (
        model.eval().generate(torch.arange(1, 9)[None], max_new_tokens=12, do_sample=False) for model in both()
    )
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("length", [8, 15, 16])
def test_sixteen_bits_are_nearer_to_the_truth_than_transformers(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    query, sinks = torch.randn(2, 4, length, 16, generator=generator), torch.randn(4, generator=generator)
    key, value = (torch.randn(2, 2, length, 16, generator=generator) for _ in range(2))
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]

    class Module:
        num_key_value_groups, training = 2, False

    def eager(dtype: torch.dtype) -> torch.Tensor:
        module: Any = Module()
        module.sinks = sinks.to(dtype)
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        parts = [part.to(dtype) for part in (query, key, value)]
        return eager_attention_forward(module, *parts, added, 0.25)[0]

    parts = [part.bfloat16() for part in (query, key, value)]
    ours, _ = attention.sink_attention(torch.nn.Module(), *parts, mask, 0.0, 0.25, s_aux=sinks.bfloat16())
    truth = eager(torch.float64)
    assert float((ours - truth).norm()) <= float((eager(torch.bfloat16) - truth).norm())
    assert float((ours - truth).norm()) <= 0.01 * float(truth.norm())


def test_plan_knows_the_same_models() -> None:
    for model_type in EXTRA:
        architecture = parse_config(tiny_config(model_type).to_dict(), name="tiny", source="tests")
        assert architecture.has_sinks == (model_type in attention.SINK_MODEL_TYPES), model_type


def test_no_scores_are_kept() -> None:
    """A mask of one or four bytes a pair of tokens, whatever the number of heads; transformers keeps four a head."""
    for heads in (4, 16):
        rig = make_rig("gpt_oss", "lora", num_attention_heads=heads, max_position_embeddings=1024)
        found = Probe(rig.skeleton, rig.split, rig.store).find_saved_bytes()
        assert found is not None and 0 < found[0].per_pair <= 5


def test_a_saved_model_names_no_attention_of_ours(tmp_path: Path) -> None:
    rig = make_rig("gpt_oss")
    save_model(rig.skeleton, rig.store.views, tmp_path)
    assert attention.SINKS_NAME not in (tmp_path / "config.json").read_text()
