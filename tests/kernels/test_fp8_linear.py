"""Products in FP8: against float64, torch's scaled product and plain PyTorch with rounded inputs; who may have them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event
from roundpipe_cli.kernels.fp8_linear import Fp8Weight, fits_fp8, fp8_linear, scaled_product, takes_fp8
from roundpipe_cli.model.fused import FusedLora
from roundpipe_cli.model.packed_weights import PackedParameter, packed_bytes, quantize
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.finetune import run_finetune
from roundpipe_cli.train.reporting import Reporting, Start
from roundpipe_cli.train.signals import StopSignals
from tests.engine.test_parity import check_gradients
from tests.support.e2e import make_model, make_workspace, metrics, numbers
from tests.support.simulated_cases import Case, is_equal, page_locked, simulated
from tests.support.simulated_cuda import Card
from tests.support.tiny import Rig, make_rig, plain_step, random_microbatches, schedule_for
from tests.train.test_simulated_finetune import ON_CARDS, notices
from tests.train.test_simulated_finetune import finetune as finetune_here

BF16 = torch.bfloat16
SIZES = [(2, 12), (2, 12), (1, 7)]
NEW_CARD = Card("Simulated 89", capability=(8, 9))
SCALES_ROWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_torchs = pytest.mark.skipif(not SCALES_ROWS, reason="torch scales rows on the processor from 2.13 on")


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x [..., in] as FP8 has it, each token by itself; in float32."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp_(min=torch.finfo(torch.float32).tiny)
    return (x.float() / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).float() * scale


def weight_of(shape: tuple[int, int], dtype: torch.dtype = BF16) -> PackedParameter:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul_(shape[1] ** -0.5).to(dtype)
    packed = torch.zeros(packed_bytes(values.shape, "fp8"), dtype=torch.uint8)
    quantize(values, packed, "fp8")
    return PackedParameter.of(packed, values.shape, dtype, "fp8")


def inputs(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("shape", [(1, 64, 128), (7, 16, 16), (40, 64, 176), (33, 256, 48)])
def test_products_are_those_of_the_rounded_numbers(shape: tuple[int, int, int]) -> None:
    rows, width, columns = shape
    weight, x = weight_of((columns, width), torch.float32), inputs(rows, width)
    codes, scales = weight.fp8_parts()
    found = scaled_product(x, codes, scales)
    exact = rounded(x).double() @ weight.dequantized().double().t()
    assert found.dtype == BF16 and float((found.double() - exact).norm()) < 3e-3 * float(exact.norm())
    in_float32 = scaled_product(x.float(), codes, scales).double()
    assert float((in_float32 - exact).norm()) < 1e-6 * float(exact.norm())
    whole = x.double() @ weight.dequantized().double().t()
    assert 0.015 < float((exact - whole).norm() / whole.norm()) < 0.035, "what rounding the inputs costs"


@needs_torchs
@pytest.mark.parametrize("shape", [(1, 64, 128), (40, 64, 176), (33, 256, 48)])
def test_torchs_scaled_product_takes_what_we_give_it(shape: tuple[int, int, int]) -> None:
    """As on a card: codes as they lie, scales of rows, the type of the inputs."""
    rows, width, columns = shape
    x = inputs(rows, width)
    codes, scales = weight_of((columns, width)).fp8_parts()
    own_scales = (x.abs().amax(1).float() / 448)[:, None]
    own_codes = (x / own_scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    by_row = functional.ScalingType.RowWise
    theirs = functional.scaled_mm(own_codes, codes.t(), own_scales, by_row, scales[None], by_row, output_dtype=BF16)
    found = scaled_product(x, codes, scales)
    assert float((found.double() - theirs.double()).norm()) < 1e-3 * float(theirs.double().norm())


@pytest.mark.parametrize("biased", [False, True])
def test_gradients_go_through_the_whole_weight(biased: bool) -> None:
    """They sum over the outputs, along which the scales vary."""
    weight, x = weight_of((48, 64)), inputs(2, 9, 64).requires_grad_()
    bias = inputs(48) if biased else None
    y = fp8_linear(x, Fp8Weight(*weight.fp8_parts(), weight.dequantized), bias)
    expected = scaled_product(x.detach().view(-1, 64), *weight.fp8_parts()).view(2, 9, 48)
    assert torch.equal(y, expected + bias if biased else expected)
    above = inputs(2, 9, 48)
    (found,) = torch.autograd.grad(y, x, above)
    exact = above.double() @ weight.dequantized().double()
    eager = above @ weight.dequantized()
    assert float((found.double() - exact).norm()) <= 2 * float((eager.double() - exact).norm())


def test_nothing_is_computed_where_nobody_reads() -> None:
    weight, x = weight_of((48, 64)), inputs(2, 9, 64).requires_grad_()
    y = fp8_linear(x, Fp8Weight(*weight.fp8_parts(), weight.dequantized), None, fill=0.5)
    assert bool((y == 0.5).all()) and y.shape == (2, 9, 48)
    assert torch.autograd.grad(y.sum(), x)[0].abs().sum() > 0


def test_tokens_of_zeros_and_of_no_numbers() -> None:
    weight, x = weight_of((48, 64)), inputs(4, 64)
    x[0], x[1, 3], x[2, 3] = 0, float("nan"), float("inf")
    y = scaled_product(x, *weight.fp8_parts())
    assert not y[0].any() and not bool(y[1].isfinite().any() | y[2].isfinite().any()) and bool(y[3].isfinite().all())


def test_who_multiplies_in_fp8() -> None:
    assert [takes_fp8(card) for card in ((8, 6), (8, 9), (9, 0), (12, 0), (0, 0))] == [False, True, True, True, False]
    assert takes_fp8(None), "a processor computes the same"
    assert fits_fp8((64, 48)) and not fits_fp8((64, 40)) and not fits_fp8((4, 64, 64))


def rig_of(**options: Any) -> Rig:
    return make_rig("llama", "lora", packed_as="fp8", kernels="auto", fp8_products=True, **options)


def test_adapters_that_are_off_or_of_another_type() -> None:
    """The reference of preference training has products in FP8 too; adapters of another type are left to PEFT."""
    wrapper: Any = rig_of().plain.get_submodule("model.layers.0.mlp.up_proj")
    weight, x = weight_of((128, 64), torch.float32), inputs(2, 9, 64, dtype=torch.float32)
    wrapper.base_layer._parameters["weight"] = weight
    layer = FusedLora(wrapper, in_fp8=True)
    base = scaled_product(x.view(-1, 64), *weight.fp8_parts()).view(2, 9, 128)
    a, b = (part["default"].weight for part in (wrapper.lora_A, wrapper.lora_B))
    assert torch.allclose(wrapper(x), base + 2 * (x @ a.t()) @ b.t(), rtol=1e-5, atol=1e-5)
    wrapper._disable_adapters = True
    assert torch.equal(layer(x), base)
    wrapper._disable_adapters = False
    wrapper.double()
    wrapper.base_layer._parameters["weight"] = weight  # which `double` has made another parameter
    expected = x @ weight.dequantized().t() + 2 * (x @ a.t().float()) @ b.t().float()
    assert torch.allclose(wrapper(x).float(), expected, rtol=1e-4, atol=1e-5)
    assert wrapper.base_layer.weight is weight, "packed again"


class RoundedLinear(nn.Module):
    """A linear layer of which autograd does not see that its inputs are rounded."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight = plain.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x + (rounded(x) - x).detach(), self.weight)


def test_a_step_agrees_with_plain_pytorch_on_rounded_inputs() -> None:
    """Loss and gradients; all seven layers of a block."""
    rig = rig_of()
    assert rig.fused is not None and len(rig.fused.fp8_linears) == 7 * 3 == rig.fused.counts()["fp8_linear"]
    microbatches = random_microbatches(SIZES)
    with rig.engine(2, copy=True) as engine:
        result = engine.run_step(microbatches, schedule_for(rig, 2, len(SIZES)), step=0)
    whole_loss = plain_step(rig, microbatches)
    for path in rig.fused.fp8_linears:
        wrapper: Any = rig.plain.get_submodule(path)
        wrapper.base_layer = RoundedLinear(wrapper.base_layer)
    assert result.loss == pytest.approx(plain_step(rig, microbatches), rel=1e-5)
    check_gradients(rig.plain, rig.store, 1e-3)  # a rounding that falls to the other side is 1/16 of a number
    assert result.loss != pytest.approx(whole_loss, rel=1e-6) and result.loss == pytest.approx(whole_loss, rel=0.02)


def test_the_cut_and_the_workers_change_no_bit() -> None:
    seen = set()
    ways: list[tuple[int, dict[str, Any]]] = [
        (1, {"copy": False}), (2, {"copy": True}), (3, {"copy": True, "recompute": "layer"}),
        (2, {"copy": True, "whole_per_visit": True}),
    ]  # fmt: skip
    for num_workers, options in ways:
        rig = rig_of(dtype=BF16, lora_dropout=0.1)
        with rig.engine(num_workers, seed=3, **options) as engine:
            result = engine.run_step(random_microbatches(SIZES), schedule_for(rig, num_workers, len(SIZES)), step=0)
        seen.add((result.loss.hex(), b"".join(g.numpy().tobytes() for g in rig.store.gradients)))
    assert len(seen) == 1


@needs_torchs
def test_simulated_cards_give_the_processors_numbers() -> None:
    """By torch's own scaled product, which adds up in another order."""
    model = {"packed_as": "fp8", "fp8_products": True, "dtype": BF16}
    case = Case("llama", "lora", model, bound=0.02)
    rig = case.rig()
    with simulated(cards=(NEW_CARD, NEW_CARD)) as simulation, page_locked(rig):
        found = case.on(rig, [cuda.CudaBackend(index) for index in (0, 1)])
    assert is_equal(found, case.on_processor(), case.bound)
    assert simulation.machine.launches, "nothing ran on the simulated cards"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "model", num_hidden_layers=2)


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROUNDPIPE_CACHE", str(tmp_path / "cache"))
    work = make_workspace(tmp_path / "w", model, load_in_fp8=True, dtype="bfloat16")
    monkeypatch.chdir(work)
    return work


def on_processor(*words: str, resume: bool = False) -> str:
    """A run in this process; its notices."""
    told: list[Event] = []
    with warnings.catch_warnings(), StopSignals() as signals:
        warnings.simplefilter("ignore")  # PEFT's, when it saves
        start = Start(resume=resume, offline=True)
        run_finetune(load_recipe("recipe.yaml", words), start, Reporting(told.append), signals)
    return notices(told)


def test_a_recipe_with_products_in_fp8(folder: Path) -> None:
    """Losses near those without, evaluation included; a resumed run keeps to them."""
    words = ("val_set_size=2", "eval_steps=2", "max_steps=3")
    on_processor(*words, "output_dir=whole")
    assert "14 fp8_linear" in on_processor(*words, "fp8_products=true")
    losses, whole = ([row["loss"] for row in metrics(folder / name)] for name in ("out", "whole"))
    assert losses != whole and losses == pytest.approx(whole, rel=0.02)
    on_processor(*words, "fp8_products=true", "max_steps=2", "output_dir=half")
    with pytest.raises(RefusedError, match="fp8_products") as refused:
        on_processor(*words, "output_dir=half", resume=True)
    assert refused.value.exit_code == 2
    three = "pipeline.devices=[cpu, cpu, cpu]"
    on_processor(*words, "fp8_products=true", "output_dir=half", three, resume=True)
    hexes = [[row["loss_hex"] for row in numbers(folder / name)] for name in ("half", "out")]
    assert hexes[0] == hexes[1]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("load_in_fp8=false", "products in FP8 need load_in_fp8: true"),
        ("dtype=float16", "products in FP8 need dtype: bfloat16"),
        ("kernels=reference", "products in FP8 need kernels: auto"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(folder: Path, word: str, said: str) -> None:
    with pytest.raises(RefusedError, match=said) as caught:
        load_recipe(folder / "recipe.yaml", ["fp8_products=true", word])
    assert caught.value.exit_code == 2


def test_older_cards_are_refused_and_unpack(folder: Path) -> None:
    with pytest.raises(RefusedError, match="products in FP8 need newer GPUs") as caught:
        finetune_here(ON_CARDS, "fp8_products=true")
    assert "Simulated 75" in str(caught.value.problems[0].found), "the other one is an sm90"
    assert finetune_here("dtype=float32", ON_CARDS, "max_steps=1"), "unpacked on any card"


def test_a_model_without_a_layer_that_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 40, "num_attention_heads": 3, "head_dim": 24}
    model = make_model(tmp_path / "model", num_hidden_layers=1, **sizes)
    monkeypatch.chdir(make_workspace(tmp_path / "w", model, load_in_fp8=True, dtype="bfloat16", fp8_products=True))
    with pytest.raises(RefusedError, match="no layer of this model can be multiplied in FP8") as refused:
        on_processor()
    assert refused.value.exit_code == 2 and "multiples of 16" in str(refused.value)
