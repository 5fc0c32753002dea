"""`float16_accumulation`: what it needs, what it is asked of, and a run whose sums really lose digits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from roundpipe_cli.costs import machine
from roundpipe_cli.errors import RecipeError
from roundpipe_cli.recipe.load import load_recipe
from tests.support.e2e import make_model, make_workspace
from tests.train.test_simulated_finetune import ON_CARDS, ON_CPU, finetune, losses, notices

NARROW = ("dtype=float16", "float16_accumulation=true")
TERMS = 16
"""Products that a tensor core adds up at once; their sum is then added to the narrow one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`narrow`, and `wide`, whose sums are of hundreds of products."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "narrow", num_hidden_layers=2)
    make_model(folder / "wide", num_hidden_layers=1, hidden_size=256, intermediate_size=512)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROUNDPIPE_CACHE", str(tmp_path / "cache"))
    work = make_workspace(tmp_path / "work", models / "narrow", method="full", learning_rate=1e-3)
    monkeypatch.chdir(work)
    return work


def narrow_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`; in float16 the partial sums are rounded to float16 after each TERMS terms."""
    if a.dtype != torch.float16:
        return torch.bmm(a[None], b[None])[0]
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
    for start in range(0, a.shape[1], TERMS):
        terms = slice(start, start + TERMS)
        total = (total.float() + torch.bmm(a[None, :, terms].float(), b[None, terms].float())[0]).half()
    return total


def narrow_addmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return beta * c + alpha * narrow_mm(a, b)


@contextmanager
def narrow_products() -> Iterator[None]:
    """Every product of two matrices on the processor, in all threads, as a card would compute it."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that its own kernels are replaced
        library.impl("mm", narrow_mm, "CPU")
        library.impl("addmm", narrow_addmm, "CPU")
    try:
        yield
    finally:
        library._destroy()


def test_a_run_with_narrow_sums_learns_as_one_with_wide_ones(models: Path) -> None:
    """A few parts in ten thousand apart from float32's."""
    wide_model = f"model={models / 'wide'}"
    torch.manual_seed(0)
    a, b = torch.randn(64, 512).half(), torch.randn(512, 64).half()
    exact = a.double() @ b.double()
    wide_error = float((torch.mm(a, b).double() - exact).abs().max())
    with narrow_products():
        assert float((torch.mm(a, b).double() - exact).abs().max()) > 2 * wide_error, "the sums are not narrow"
        narrow = losses(finetune(*NARROW, wide_model, ON_CPU, "output_dir=narrow"))
    exact_losses = losses(finetune("dtype=float32", wide_model, ON_CPU, "output_dir=float32"))
    assert all(math.isfinite(loss) for loss in narrow)
    assert exact_losses[-1] < 0.9 * exact_losses[0] and narrow[-1] < 0.9 * narrow[0]
    assert max(abs(x - y) for x, y in zip(narrow, exact_losses, strict=True)) < 0.02


def test_cards_are_asked_for_it_and_processors_say_that_they_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpuinfo", lambda: "flags: avx2")
    on_cards = finetune(*NARROW, ON_CARDS, "output_dir=cards", "max_steps=1")
    assert "float16_accumulation" not in notices(on_cards)
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is True
    finetune("dtype=float16", ON_CARDS, "output_dir=plain", "max_steps=1")
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is False
    on_processor = finetune(*NARROW, ON_CPU, "output_dir=cpu", "max_steps=1")
    assert "float16_accumulation has no effect here" in notices(on_processor)
    assert "set dtype=float32" in notices(on_processor) and "dtype=float32" not in notices(on_cards)
    assert losses(on_processor) == losses(on_cards)
    assert "float16_accumulation: true" in Path("cards/recipe.yaml").read_text()


def test_a_deterministic_run_on_cards_has_the_processors_losses() -> None:
    try:
        on_cards = finetune("deterministic=true", ON_CARDS, "output_dir=ordered", "max_steps=1")
        assert torch.are_deterministic_algorithms_enabled() and "deterministic" not in notices(on_cards)
    finally:
        torch.use_deterministic_algorithms(False)
    on_processor = finetune("deterministic=true", ON_CPU, "output_dir=processor", "max_steps=1")
    assert "deterministic has no effect here" in notices(on_processor)
    assert losses(on_processor) == losses(on_cards)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_types_are_refused(dtype: str) -> None:
    with pytest.raises(RecipeError, match="only products of float16 can add up in float16") as caught:
        load_recipe("recipe.yaml", [f"dtype={dtype}", "float16_accumulation=true"])
    assert caught.value.exit_code == 2 and "`dtype: float16`" in str(caught.value)
