"""Seeded dropout: what it covers. Its numbers are tested in test_counter_random.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.kernels.random_masks import keep_mask
from roundpipe_cli.model.block_calls import SplitRefusedError
from roundpipe_cli.model.dropout import _ANSWERS, SeededDropout, draw_key, embedding_noise, layer_seed
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.split import split_model
from tests.support.tiny import make_rig, plain_step, random_microbatches, schedule_for, tiny_config

CPU = torch.device("cpu")
ONES = torch.ones(200, 50)
LSTM = nn.LSTM(50, 2, num_layers=2, dropout=0.2)
ATTENTION = nn.MultiheadAttention(50, 2, dropout=0.2)


def test_seeds_differ_in_every_coordinate() -> None:
    places = [(seed, step, m, layer) for seed in (0, 1) for step in (0, 1) for m in (0, 12) for layer in (0, 1, 12)]
    seeds = [layer_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert layer_seed(1, 21, 3, 4) != layer_seed(12, 1, 3, 4)
    assert layer_seed(7, 3, 2, 1) == layer_seed(7, 3, 2, 1)


def test_every_spelling_of_dropout_is_seeded() -> None:
    spellings: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        *(nn.Dropout(0.4), lambda x: nn.Dropout(0.4, inplace=True)(x.clone()), lambda x: torch.dropout(x, 0.4, True)),
        *(lambda x: torch.dropout_(x.clone(), 0.4, True), lambda x: functional.dropout(x, p=0.4, training=True)),
        *(functional.dropout, lambda x: functional.dropout(x, 1.0)),
    )
    for drop, p in zip(spellings, (0.4, 0.4, 0.4, 0.4, 0.4, 0.5, 1.0), strict=True):
        with SeededDropout(8):
            dropped = drop(ONES)
        kept = keep_mask(ONES.shape, 1 - p, draw_key(8, 1), CPU)
        assert torch.equal(dropped, kept / (1 - p) if p < 1 else torch.zeros_like(ONES))


VISIBLE = torch.ones(6, 6, dtype=torch.bool).tril()
FLOATS = torch.zeros(6, 6).masked_fill(~VISIBLE, float("-inf"))


@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"attn_mask": VISIBLE}, {"attn_mask": FLOATS}])
def test_attention_without_drops_is_torch_s_own(mask: dict[str, Any]) -> None:
    """The seeded attention spells out what torch's documentation defines; a tiny p shows it next to the kernel."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 6, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, 6, 8, generator=generator)
    options: dict[str, Any] = {"enable_gqa": True, "scale": 0.4, **mask}
    expected = functional.scaled_dot_product_attention(query, key, value, **options)
    with SeededDropout(1):
        got = functional.scaled_dot_product_attention(query, key, value, dropout_p=1e-7, **options)
        dropped = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5, **options)
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(dropped, expected)


RANDOM: dict[str, Callable[[], torch.Tensor]] = {
    **{"dropout": lambda: functional.dropout(ONES, 0.3), "randn": lambda: torch.randn(3, 50)},
    "rand": lambda: torch.rand(3, 50, generator=torch.Generator()),
    "rand of a shape": lambda: torch.rand((3, 50), dtype=torch.float64),
    **{"rand_like": lambda: torch.rand_like(ONES), "randn_like": lambda: torch.randn_like(ONES)},
    "uniform_": lambda: torch.empty_like(ONES).uniform_(0.9, 1.1),
    "uniform_ in 16 bit": lambda: torch.empty_like(ONES, dtype=torch.bfloat16).uniform_(to=2.0),
    "normal_": lambda: torch.empty_like(ONES).normal_(std=2.0),
    "exponential_": lambda: torch.empty_like(ONES).exponential_(),
    "bernoulli_": lambda: torch.empty_like(ONES).bernoulli_(0.3),
    "bernoulli_ of shares": lambda: torch.empty_like(ONES).bernoulli_(ONES * 0.3),
    **{"bernoulli": lambda: torch.bernoulli(ONES * 0.3), "Tensor.bernoulli": lambda: ONES.bernoulli(0.3)},
    "distribution": lambda: torch.distributions.Uniform(0.0, ONES).sample(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_functions_follow_the_seed_alone(name: str) -> None:
    """A router's jitter or a sampled expert drew from the global generator: other numbers in the recompute."""
    before = torch.random.get_rng_state()
    results = []
    for seed in (1, 1, 2):
        with SeededDropout(seed):
            results.append([RANDOM[name](), RANDOM[name]()])
    assert torch.equal(before, torch.random.get_rng_state())
    (first, second), again, other = results
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    assert not torch.equal(first, second) and not torch.equal(first, other[0])
    torch.manual_seed(3)
    plain = RANDOM[name]()
    assert (first.shape, first.dtype) == (plain.shape, plain.dtype)


def test_distributions() -> None:
    """Mean and deviation as torch documents them, within five standard errors; `neftune_noise_alpha` as its paper."""
    draws: tuple[tuple[Callable[[torch.Tensor], torch.Tensor], float, float], ...] = (
        *((lambda x: x.uniform_(-1, 3), 1.0, 4 / math.sqrt(12)), (lambda x: x.normal_(0.5, 2), 0.5, 2.0)),
        *((lambda x: x.exponential_(0.5), 2.0, 2.0), (lambda x: x.bernoulli_(0.2), 0.2, 0.4)),
        (lambda x: embedding_noise(x.view(2, 500, 100), 5.0, 1), 0.0, 5 / math.sqrt(500 * 100) / math.sqrt(3)),
    )
    for draw_values, mean, deviation in draws:
        with SeededDropout(4):
            values = draw_values(torch.empty(100_000))
        assert float(values.mean()) == pytest.approx(mean, abs=5 * deviation / math.sqrt(values.numel()))
        assert float(values.std()) == pytest.approx(deviation, rel=0.03) and bool(values.isfinite().all())


def test_a_random_function_without_an_answer_is_refused_by_name() -> None:
    calls: dict[str, Callable[[], Any]] = {
        **{"alpha_dropout": lambda: nn.AlphaDropout(0.2)(ONES), "dropout1d": lambda: nn.Dropout1d(0.2)(ONES)},
        **{"gumbel_softmax": lambda: functional.gumbel_softmax(ONES), "randint": lambda: torch.randint(3, (4,))},
        **{"randperm": lambda: torch.randperm(4), "multinomial": lambda: ONES.multinomial(2)},
        **{"geometric_": lambda: ONES.clone().geometric_(0.2), "lstm": lambda: LSTM(ONES)},
        "multi_head_attention_forward": lambda: ATTENTION(ONES, ONES, ONES),
    }
    for name, call in calls.items():
        with pytest.raises(RefusedError, match="could not be repeated") as caught, SeededDropout(1):
            call()
        assert str(caught.value.problems[0].where).endswith(name)


def test_functions_that_do_not_draw_pass() -> None:
    lstm, attention = nn.LSTM(50, 2, num_layers=2), nn.MultiheadAttention(50, 2)
    with SeededDropout(1) as mode:
        assert torch.equal(nn.Dropout(0.5).eval()(ONES), ONES)
        assert torch.equal(functional.dropout(ONES, 0.5, training=False), ONES)
        assert torch.equal(nn.AlphaDropout(0.2).eval()(ONES), ONES)
        assert torch.equal(nn.Dropout1d(0.0)(ONES), ONES)
        assert lstm(ONES)[0].shape == (200, 2)
        assert attention(ONES, ONES, ONES)[0].shape == (200, 50)
    assert mode.num_draws == 0


def test_every_random_function_of_torch_is_known() -> None:
    """torch marks the operations that draw; none that a model can call may reach a generator in silence."""
    kernels = {"_cudnn_rnn", "miopen_rnn"}  # reached through torch.lstm and the like, which are known
    unknown, num_drawing = set(), 0
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        operation = getattr(getattr(torch.ops.aten, name, None), schema.overload_name or "default", None)
        if space != "aten" or operation is None or torch.Tag.nondeterministic_seeded not in operation.tags:
            continue
        num_drawing += 1
        public = [getattr(owner, name) for owner in (torch, torch.Tensor, functional) if hasattr(owner, name)]
        unknown |= {name for function in public if function not in _ANSWERS and not name.startswith("_")}
    unknown.discard("random")  # the module torch.random
    assert unknown <= kernels and num_drawing > 50


def test_the_layout_of_a_tensor_does_not_matter() -> None:
    values = torch.arange(1.0, 10_001).view(100, 100)
    with SeededDropout(1):
        expected = functional.dropout(values, 0.5)
    with SeededDropout(1):
        assert torch.equal(functional.dropout(values.T.contiguous().T, 0.5), expected)


def test_backward_keeps_one_byte_a_place() -> None:
    """A mask in the tensor's own dtype took as much again as the tensor."""
    kept: list[torch.Tensor] = []
    leaf = ONES.clone().requires_grad_()
    note = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
    with SeededDropout(1), note:
        dropped = functional.dropout(leaf, 0.25)
    assert [tensor.dtype for tensor in kept] == [torch.bool]
    dropped.sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, dropped.detach())


DRAWING: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "dropout": ("gpt2", "full", {"resid_pdrop": 0.1, "attn_pdrop": 0.1}, True),
    "adapters": ("llama", "lora", {"lora_dropout": 0.1}, True),
    "input jitter": ("mixtral", "full", {"router_jitter_noise": 0.3}, True),
    "sampled experts": ("phimoe", "full", {"num_local_experts": 4, "input_jitter_noise": 0.1}, True),
    "embedding alone": ("gpt2", "full", {"embd_pdrop": 0.1}, False),
    "our own dropout": ("llama", "lora", {"lora_dropout": 0.1, "kernels": "auto"}, True),
}


@pytest.mark.parametrize("case", DRAWING)
def test_blocks_that_draw_are_seeded_whatever_draws(case: str) -> None:
    """Story: a router's jitter had other numbers in the recompute. Blocks that draw nothing are watched for a step."""
    model_type, method, changes, blocks_draw = DRAWING[case]
    rig = make_rig(model_type, method, **changes)
    microbatches, schedule = random_microbatches([(2, 8), (1, 5)]), schedule_for(rig, 2, 2)
    before = torch.random.get_rng_state()
    with rig.engine(2, seed=4) as engine:
        first = engine.run_step(microbatches, schedule, step=0)
        assert engine._seeds_blocks is blocks_draw
        watched = blocks_draw and case != "our own dropout"
        assert {worker.runner.layers.model.watches_torch for worker in engine._workers} == {watched}
        again = engine.run_step(microbatches, schedule, step=0)
        other = engine.run_step(microbatches, schedule, step=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert (again.loss, again.gradient_norm) == (first.loss, first.gradient_norm)
    assert other.loss != first.loss
    with rig.engine(1, seed=4) as engine:
        alone = engine.run_step(microbatches, schedule_for(rig, 1, 2), step=0)
    assert (alone.loss, alone.gradient_norm) == (first.loss, first.gradient_norm)
    assert first.loss == pytest.approx(plain_step(rig, microbatches, seed=4), rel=1e-5)
    squares = sum(float(p.grad.double().square().sum()) for p in rig.plain.parameters() if p.grad is not None)
    assert first.gradient_norm == pytest.approx(math.sqrt(squares), rel=1e-4)


def test_an_adapter_of_the_head_drops_by_the_seed() -> None:
    """The head ran under no mode: its adapter's dropout drew from the global generator."""
    rig = make_rig("llama", "full")
    head = rig.skeleton.get_submodule("lm_head")
    head.register_forward_pre_hook(lambda _, args: functional.dropout(args[0], 0.3))
    microbatches, schedule = random_microbatches([(2, 8), (1, 5)]), schedule_for(rig, 2, 2)
    before = torch.random.get_rng_state()
    with rig.engine(2, seed=4, head_chunk_tokens=4) as engine:
        losses = [engine.run_step(microbatches, schedule, step=step).loss for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_model_that_leaves_out_layers_is_refused() -> None:
    """Whose own code asks for it; what a configuration says of it is set to 0 at load."""
    model = build_skeleton(tiny_config("opt"), torch.float32)
    model.get_submodule("model.decoder").layerdrop = 0.1  # type: ignore[assignment]
    with pytest.raises(SplitRefusedError, match="leaves blocks out") as caught:
        split_model(model)
    assert 'set "layerdrop": 0.0' in str(caught.value)
