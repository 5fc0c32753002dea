"""Kernels that read each element once, in Triton's interpreter: dropout has the bits of torch's operators for any key,
share, shape and type, codes with scales those of tables, cross entropy is compared with float64; and what they launch
and move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.kernels import random_masks
from roundpipe_cli.kernels.cross_entropy import cross_entropy, cross_entropy_
from roundpipe_cli.kernels.random_masks import COLUMNS, Draw, drop, keep_mask
from roundpipe_cli.kernels.unpack_codes import code_values, unpack_codes
from tests.kernels.groups import error
from tests.support.launches import LaunchCounter

CPU = torch.device("cpu")
KEYS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
DTYPES = [F32 := torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def wide(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of more columns: the interpreter takes as long for each program, whatever its size."""
    from roundpipe_cli.kernels import pointwise_triton

    monkeypatch.setattr(pointwise_triton, "BLOCK", COLUMNS // 4)


def check(shape: tuple[int, ...], draw: Draw, dtype: torch.dtype) -> None:
    expected = random_masks._mask_of(torch.empty(shape), random_masks._signed(draw.key), draw.threshold)
    assert torch.equal(keep_mask(shape, draw.keep, draw.key, CPU), expected)
    generator = torch.Generator().manual_seed(expected.numel())
    x, total, product = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    sums = total.clone().addcmul_(product, expected, value=0.75)
    assert torch.equal(drop(x, draw), x * expected)
    assert torch.equal(drop(x, draw, total, product, scale=0.75), x * expected)
    assert torch.equal(total, sums)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("shape", "dtype"), [((), F32), ((0, 3), torch.bfloat16), ((7,), torch.float16), ((2, COLUMNS + 5), F32)], ids=str
)
def test_dropout_of_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Nothing, less than a program, and more rows than one has; 65,536 columns' numbers are a function, not a table."""
    check(shape, Draw(0xF123456789ABCDEF, 0.9), dtype)


@pytest.mark.usefixtures("interpreter")
@given(
    key=KEYS,
    keep=st.one_of(st.floats(2.0**-31, 1.0), st.just(1.0)),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=6, deadline=None)
def test_any_draw(key: int, keep: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(shape, Draw(key, keep), dtype)


def test_the_first_launch_of_a_variant_is_alone(interpreter: None) -> None:
    """Eight GPUs' threads compiled the same kernel at the same time, each for itself."""
    from roundpipe_cli.kernels.pointwise_triton import _compiling, _launched, first_alone

    with pytest.raises(ZeroDivisionError), first_alone("a"):
        _ = 1 / 0  # not compiled: the next one is alone again
    for is_alone in (True, False):  # then compiled: nobody waits for anybody
        with first_alone("a"):
            assert _compiling.locked() is is_alone
    drop(torch.ones(32, dtype=torch.bfloat16), Draw(1, 0.5))
    assert {("a",), ("dropout", CPU, torch.bfloat16, False, False, True)} <= _launched


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "vocabulary", "smoothing"),
    [
        *((dtype, 9_001, 0.1) for dtype in DTYPES),
        *((torch.bfloat16, size, 0.0) for size in (2, 4097)),
        *(pytest.param(torch.bfloat16, size, 0.0, marks=pytest.mark.sweep) for size in (50, 4096, 128_256, 262_144)),
        pytest.param(torch.float32, 151_935, 0.2, marks=pytest.mark.sweep),
    ],
)
def test_cross_entropy_and_gradients(dtype: torch.dtype, vocabulary: int, smoothing: float) -> None:
    """float32 within 1e-6 of float64; 16 bit within twice the error of torch's operators."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(3, vocabulary, generator=generator).mul_(4).to(dtype)
    if vocabulary > 50:
        logits[1, 7] = 60.0  # one that outweighs all others
        logits[2, 9] = -float("inf")
    targets, factors = torch.tensor([0, vocabulary - 1, vocabulary // 2]), torch.tensor([0.5, -1.0, 2.0])
    found = logits.clamp(min=-1e4) if smoothing else logits.clone()
    wide = found.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, targets, reduction="none", label_smoothing=smoothing)
    scaled = torch.autograd.grad(losses.sum(), wide)[0] * factors[:, None] * 0.25
    theirs = (cross_entropy(found, targets, smoothing)[1] * factors[:, None] * 0.25).to(dtype)
    parts = cross_entropy_(found, targets, factors, smoothing, 0.25)
    total = (1 - smoothing) * parts[0] + smoothing * parts[1]
    assert float((total - losses.detach()).abs().max()) <= 1e-6 * max(1.0, float(losses.detach().abs().max()))
    allowed = 1e-6 if dtype == torch.float32 else 2 * error(theirs, scaled) + 1e-7
    assert found.dtype == dtype and error(found, scaled) <= allowed


def test_cross_entropy_moves_each_logit_in_and_out_once() -> None:
    """Five operators moved 36 bytes for each logit in 16 bit."""
    logits = torch.empty(64, 50_000, dtype=torch.bfloat16, device="meta")
    targets = torch.empty(64, dtype=torch.long, device="meta")
    with LaunchCounter() as counter:
        cross_entropy_(logits, targets, None, 0.0, 1.0)
    assert counter.launches.num_launches == 1
    assert counter.launches.traffic_bytes == pytest.approx(4 * logits.numel(), rel=0.01)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "group", "per_byte"), [((3, 64), 32, 2), ((9, 192), 64, 1), ((2, 1600), 1600, 1)])
def test_codes_with_scales(shape: tuple[int, int], group: int, per_byte: int, dtype: torch.dtype) -> None:
    """Bits of the processor's tables: MXFP4's exponents, also where products overflow; FP8's blocks and rows."""
    generator, count = torch.Generator().manual_seed(0), shape[0] * shape[1]
    codes = torch.randint(0, 127, (count // per_byte,), generator=generator).to(torch.uint8)
    scales = torch.rand(count // group, generator=generator)
    if per_byte == 2:
        scales = torch.tensor([0, 100, 120, 127, 140, 252], dtype=torch.uint8)
    values = code_values(torch.float8_e4m3fn if per_byte == 1 else torch.float4_e2m1fn_x2, CPU)
    found = unpack_codes(codes, scales, values, torch.Size(shape), dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        expected = unpack_codes(codes, scales, values, torch.Size(shape), dtype=dtype)
    assert found.dtype == dtype and torch.equal(found, expected)


def test_codes_with_scales_are_read_and_written_once() -> None:
    """What `plan` counts for MXFP4: 4.25 bits of a weight in, 16 out."""
    codes, scales = (torch.empty(count, dtype=torch.uint8, device="meta") for count in (2**19, 2**15))
    with LaunchCounter() as counter:
        unpack_codes(codes, scales, torch.empty(16, device="meta"), torch.Size([2**20]), dtype=torch.bfloat16)
    assert counter.launches.num_launches == 1
    each = TrainingSettings(max_seq_length=1, packed_as="mxfp4").unpacking_bytes_per_param
    assert counter.launches.traffic_bytes == pytest.approx(2**20 * each, rel=1e-4)
