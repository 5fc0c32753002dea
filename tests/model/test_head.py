"""The head's loss by our kernel's operator, with the bits of torch's, and the routers' balancing loss
(`output_router_logits: true`) against transformers' own with labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.kernels.cross_entropy import cross_entropy, product_sum
from roundpipe_cli.model.distillation import TeacherScores, distilled_loss
from roundpipe_cli.model.head import HeadLoss, HeadTargets, run_head, score_head
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.router_loss import describe_router_loss, leave_out_router_loss
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.taps import GradientTaps
from roundpipe_cli.model.worker_model import WorkerModel
from tests.engine.test_parity import check_gradients
from tests.support.every_type import tiny_config_of
from tests.support.tiny import Rig, make_rig, plain_step, random_microbatches, step_of_any_workers, tiny_config


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_head_has_the_same_bits_either_way_on_the_processor(cap: float | None, smoothing: float) -> None:
    """Also with logits that are capped, and with logits that a backward reads, which are not written over."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 9, 16, generator=generator), torch.randn(50, 16, generator=generator)
    ids, indices = torch.randint(50, (11,), generator=generator), torch.randperm(18, generator=generator)[:11]

    def logits(rows: torch.Tensor, first: int) -> torch.Tensor:
        made = (rows @ weight.t())[None][0]
        if cap is None:
            return made
        return torch.tanh(made / cap) * cap if first else torch.tanh(made)

    found = []
    for in_place in (False, True):
        loss = HeadLoss(0.5, 4, smoothing, in_place)
        taps = GradientTaps([], lambda index, gradient: None)
        found.append(run_head(logits, hidden, HeadTargets(indices, ids), loss, taps=taps, needs_hidden_grad=True))
    one, other = found
    assert torch.equal(torch.as_tensor(one.loss_sum), torch.as_tensor(other.loss_sum))
    assert one.grad_hidden is not None and other.grad_hidden is not None
    assert torch.equal(one.grad_hidden, other.grad_hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_16_bit_logits_are_not_rounded(dtype: torch.dtype) -> None:
    """In training, an evaluation and a reference model: float32's precision beside float64 from the same logits."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(1, 9, 16, generator=generator), torch.randn(50, 16, generator=generator)
    targets = HeadTargets(torch.arange(9), torch.randint(50, (9,), generator=generator))

    def logits(rows: torch.Tensor, first: int) -> torch.Tensor:
        return (rows @ weight.t()).to(dtype)

    exact = logits(hidden[0], 0).double().log_softmax(-1).gather(1, targets.ids[:, None])[:, 0]
    found = score_head(logits, hidden, targets, chunk_tokens=4)
    torch.testing.assert_close(found.log_probabilities.double(), exact, rtol=1e-6, atol=1e-6)
    assert float(found.loss_sum) == pytest.approx(-float(exact.sum()), rel=1e-6)
    for in_place in (False, True):
        taps = GradientTaps([], lambda index, gradient: None)
        trained = run_head(
            logits, hidden, targets, HeadLoss(1.0, 4, in_place=in_place), taps=taps, needs_hidden_grad=True
        )
        assert float(trained.loss_sum) == pytest.approx(-float(exact.sum()), rel=1e-6)


@pytest.mark.parametrize("offset", [0.0, 200.0])
def test_probabilities_of_a_large_vocabulary_sum_to_1(offset: float) -> None:
    """Story: with SmolLM2-135M gradients were 3.7e-5 off and TRL's 5e-6, which takes its logits' logsumexp: torch's log
    softmax on the processor adds up the vocabulary one by one, so all probabilities were too large. Logits less their
    logsumexp are as far off where both are large: either is rounded."""
    logits = 3 * torch.randn(1, 32, 151_936, generator=torch.Generator().manual_seed(0)) + offset
    ids = torch.arange(32)
    exact = logits[0].double().log_softmax(-1)[ids, ids]
    teacher = TeacherScores(ids[:, None].int(), torch.full((32, 1), -3.0), torch.full((32,), 0.9), 0.5, 1.0)
    gradients = [cross_entropy(logits[0], ids, 0.0)[1]]
    gradients.append(distilled_loss(logits[0], ids, teacher, None, scale=1.0)[1])
    for gradient in gradients:
        assert float(gradient.sum(dim=-1, dtype=torch.float64).abs().max()) <= 1e-6
    found = score_head(lambda rows, _: rows, logits, HeadTargets(ids, ids), chunk_tokens=32).log_probabilities
    assert abs(float((found.double() - exact).mean())) <= 5e-7


@pytest.fixture
def products_in_float32() -> Iterator[None]:
    """torch's products of 16 bit with a result in float32, which it has for CUDA alone."""
    library = torch.library.Library("aten", "IMPL")

    def add(
        total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, _: torch.dtype, *, out: torch.Tensor
    ) -> torch.Tensor:
        return out.copy_(total + a.float() @ b.float())

    library.impl("mm.dtype", lambda a, b, _: a.float() @ b.float(), "CPU")
    library.impl("addmm.dtype_out", add, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("products_in_float32")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("is_capped", [False, True])
def test_gradients_of_the_heads_matrix_are_added_up_unrounded(is_capped: bool, in_place: bool) -> None:
    """Each chunk's was written in 16 bit, then added; capped logits keep that way. No gradient is copied."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 40, 16, generator=generator).bfloat16()
    weight = torch.nn.Parameter(torch.randn(50, 16, generator=generator).bfloat16())
    ids, indices = torch.randint(50, (64,), generator=generator), torch.randperm(80, generator=generator)[:64]

    def logits(rows: torch.Tensor, first: int) -> torch.Tensor:
        made = torch.nn.functional.linear((rows * 2)[None], weight)[0]
        return torch.tanh(made / 30) * 30 if is_capped else made

    def run(within: bool) -> tuple[torch.Tensor, torch.Tensor | None, list[str]]:
        sums: dict[str, torch.Tensor] = {}
        ways = []

        def take(_: int, gradient: torch.Tensor) -> None:
            ways.append("taken")
            sums["all"] = gradient.float() + sums.get("all", 0)

        def add_product(index: int, left: torch.Tensor, right: torch.Tensor) -> None:
            ways.append(f"added {index}")
            sums["all"] = product_sum(sums.get("all"), left, right)

        taps = GradientTaps([torch.nn.Parameter(torch.ones(1)), weight], take, add_product if within else None)
        loss = HeadLoss(0.5, 16, in_place=in_place)
        found = run_head(logits, hidden, HeadTargets(indices, ids), loss, taps=taps, needs_hidden_grad=True)
        return sums["all"], found.grad_hidden, ways

    (one, one_hidden, ways), (other, other_hidden, _) = run(True), run(False)
    assert one_hidden is not None and other_hidden is not None and torch.equal(one_hidden, other_hidden)
    assert ways == (["taken"] if is_capped else ["added 1"]) * 4
    if is_capped:
        assert torch.equal(one, other)
        return
    rows = (hidden.flatten(0, 1)[indices] * 2).double()
    products = (rows.bfloat16() @ weight.detach().t()).float().softmax(-1)
    products[torch.arange(64), ids] -= 1
    exact = (products * 0.5).bfloat16().double().t() @ rows
    errors = [float((found.double() - exact).norm() / exact.norm()) for found in (one, other)]
    assert errors[0] <= 1e-6 < 1e-4 < errors[1], errors


# -- the routers' balancing loss ------------------------------------------------------------------------------------

LOSS: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def plain_loss(rig: Rig, microbatches: list[Microbatch]) -> float:
    """Transformers' own loss of each forward, weighted by its target tokens; leaves gradients in the plain model."""
    targets = [int((one.labels[:, 1:] != -100).sum()) for one in microbatches]
    total = 0.0
    rig.plain.zero_grad()
    for one, count in zip(microbatches, targets, strict=True):
        mask = None
        if one.lengths is not None:
            mask = (torch.arange(one.input_ids.shape[1])[None] < one.lengths[:, None]).long()
        output = rig.plain(
            input_ids=one.input_ids, attention_mask=mask, labels=one.labels, use_cache=False, output_router_logits=True
        )
        assert float(output.aux_loss.detach()) > 0
        loss = output.loss * (count / sum(targets))
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        *(("mixtral", "full"), ("gpt_oss", "full"), ("qwen3_next", "lora")),
        *(pytest.param(name, "full", marks=pytest.mark.sweep) for name in ("qwen3_next", "qwen2_moe", "minimax")),
        *(pytest.param(name, "lora", marks=pytest.mark.sweep) for name in ("mixtral", "gpt_oss", "qwen3_moe")),
    ],
)
def test_loss_and_gradients_are_transformers_own(model_type: str, method: str) -> None:
    rig = make_rig(model_type, method, **LOSS)
    assert rig.split.routers is not None
    sizes = [(2, 12), (2, 9), (1, 7)]  # the second row of each is three tokens shorter than the first
    lengths = [torch.tensor([tokens, tokens - 3]) if rows > 1 else None for rows, tokens in sizes]
    made = zip(random_microbatches(sizes), lengths, strict=True)
    microbatches = [replace(one, lengths=length) for one, length in made]
    expected = plain_loss(rig, microbatches)
    result = step_of_any_workers(rig, microbatches, head_chunk_tokens=8)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    check_gradients(rig.plain, rig.store, 1.5e-4 if model_type == "qwen3_next" else 1e-5)
    assert abs(plain_step(rig, microbatches) - expected) > 0.1, "the loss should show"


def test_backward_of_the_head_copies_no_logits() -> None:
    """Beside their gradients, which lie over them, lay a copy of both: as much memory again, written twice."""
    rig, made = make_rig("llama", "lora"), list[str]()
    views, trained, head = rig.store.views, rig.store.trainable_names, len(rig.store.layouts) - 1
    model = WorkerModel(rig.skeleton, rig.split, views, trained, device=torch.device("cpu"))
    model.bind(head, {one.name: one.parameter(rig.store.buffers[head]) for one in rig.store.layouts[head].places})

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-2:] == (6, 128) and not func.is_view:
                made.append(str(func))
            return result

    hidden, targets = torch.randn(1, 12, 64), HeadTargets(torch.arange(12), torch.arange(12))
    taps, loss = GradientTaps([], lambda index, gradient: None), HeadLoss(1.0, 6, in_place=True)
    with Made():
        run_head(model.logits, hidden, targets, loss, taps=taps, needs_hidden_grad=True)
    assert made == ["aten.mm.default", "aten._unsafe_view.default"] * 2


def test_whether_the_loss_is_trained_is_told() -> None:
    told = {}
    for model_type in ("mixtral", "doge", "deepseek_v3", "llama"):
        config = tiny_config_of(model_type)
        config.output_router_logits = model_type != "llama"
        split = split_model(build_skeleton(config, torch.float32))
        told[model_type] = describe_router_loss(split.routers, split.no_router_loss)
    asked = "output_router_logits: true in the model's configuration"
    assert told == {
        "mixtral": f"{asked}: the routers' balancing loss is trained with its router_aux_loss_coef 0.001; evaluation "
        "leaves it out",
        "doge": f"{asked} trains no balancing loss: its balancing loss is not the usual one",
        "deepseek_v3": f"{asked} trains no balancing loss: transformers has no such loss for this model type",
        "llama": None,
    }


def test_sequences_in_chunks_leave_it_out_with_a_notice() -> None:
    config = tiny_config("mixtral", **LOSS)
    assert leave_out_router_loss(config) is None, "nothing is asked before a skeleton is built"
    build_skeleton(config, torch.float32)
    assert "sequence_chunks" in str(leave_out_router_loss(config))
    assert split_model(build_skeleton(config, torch.float32)).routers is None
    assert leave_out_router_loss(config) is None


def test_taps_register_one_hook_a_parameter_and_none_takes_gradients_outside() -> None:
    parameter, taken = torch.nn.Parameter(torch.ones(2)), []
    for _ in range(3):
        with GradientTaps([parameter], lambda index, gradient: taken.append((index, gradient.tolist()))):
            (2 * parameter).sum().backward()  # type: ignore[no-untyped-call]
    (parameter * 3).sum().backward()  # type: ignore[no-untyped-call]
    assert taken == [(0, [2.0, 2.0])] * 3 and len(parameter._post_accumulate_grad_hooks) == 1  # type: ignore[attr-defined]
    assert parameter.grad is not None and parameter.grad.tolist() == [3.0, 3.0]
