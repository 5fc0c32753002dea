"""Random numbers of a model's own code that depend only on (seed, step, microbatch, layer), on no thread or device.

A layer's forward and its recompute must draw the same, on any worker and in any order. Each call of a layer runs under
a function mode of its own thread that answers every random function of torch from a counter whose
key is a hash of the layer's place and the number of earlier draws, or refuses it by name.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional, init
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from roundpipe_cli.errors import RefusedError

# Random numbers from a counter: each is a hash of (key, index), the same on every device and number of threads.
#
# A generator of torch's deals its numbers to the threads of a launch, so that they depend on the processor's kind. Here
# element i of a draw, counted row by row through the tensor's shape whatever its strides, depends on the draw's 64-bit
# key and i alone, by whole numbers that wrap around:
#
#     splitmix64(s, j) = mix(s + (j + 1) * 0x9E3779B97F4A7C15)                          all mod 2^64
#     mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  return z ^ (z >> 31)
#
#     row r = i >> 16                a = low, m = high 32 bits of splitmix64(key, r)
#     column c = i & 0xFFFF          b = (splitmix64(0, c) >> 49 << 17) + 2 c + 1       a constant table, always odd
#     word(i) = b * (a + m * b)  mod 2^32
#
#     a mask keeps element i with probability q where word(i), as a signed number, is at most round(q 2^32) - 1 - 2^31
#     a uniform number is ((word(i) as a signed number >> 8) + 2^23) / 2^24, in [0, 1)
#
# Why this is enough: (a, m) of each row are fresh words of SplitMix64 (Steele, Lea and Flood, "Fast splittable
# pseudorandom number generators", 2014). A polynomial without a constant term, with random coefficients, is a pairwise
# independent hash (Carter and Wegman, "Universal classes of hash functions", 1979): as b is odd, every word is uniform,
# and words of two columns are independent but for as many low bits as the two b have in common, at most 16. Words of
# two rows share nothing. Within a row the lowest bits repeat, as those of all products mod 2^32 do: a comparison reads
# the highest first, and a uniform number leaves the 8 lowest out. And it is cheap without a kernel of its own: two
# passes over 32-bit words and a comparison, in blocks, so that no more than a block of words exists.

COLUMNS = 1 << 16
"""Elements that share a row's two words."""
CPU_ROWS = 4
"""Rows in a block of words on a processor: 1 MiB, which stays in its cache."""
DEVICE_ROWS = 64
"""The same elsewhere: 16 MiB, so that launches do not count."""
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and factors of `mix`."""
_WORD = 1 << 32
_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """`value` mod 2^64 as torch's signed 64-bit number."""
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


def _word64(key: int, index: int) -> int:
    """Word `index`, from 0, of SplitMix64 from the state `key`."""
    word = (key + (index + 1) * _GAMMA) & _MASK64
    for shift, factor in _MIX:
        word = ((word ^ (word >> shift)) * factor) & _MASK64
    return word


def _signed32(value: int) -> int:
    """`value` mod 2^32 as a signed number."""
    return ((value + (1 << 31)) & (_WORD - 1)) - (1 << 31)


def _splitmix64(key: int, count: int) -> torch.Tensor:
    """The first `count` words of SplitMix64 from the state `key`, int64 on the host."""
    words = torch.arange(1, count + 1, dtype=torch.int64, device="cpu")
    words.mul_(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in _MIX:
        # torch's shift to the right repeats the sign
        words ^= (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        words *= _signed(factor)
    return words


@functools.cache
def _columns(device: torch.device) -> torch.Tensor:
    """The constant table b, int32 [COLUMNS] on `device`."""
    high = _splitmix64(0, COLUMNS).bitwise_right_shift_(49).bitwise_left_shift_(17)
    columns = high + torch.arange(1, 2 * COLUMNS, 2, dtype=torch.int64, device="cpu")
    return columns.to(torch.int32).to(device)


def _draw(result: torch.Tensor, key: int, write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """Give `write` each block of the contiguous `result` [N] and its words, int32, both [rows, columns]."""
    device, count = result.device, result.numel()
    whole, rest = divmod(count, COLUMNS)
    block = CPU_ROWS if device.type == "cpu" else DEVICE_ROWS
    if whole:
        words = _splitmix64(key, whole)
        low, high = (part.to(torch.int32)[:, None].to(device, non_blocking=True) for part in (words, words >> 32))
    spans = [(first, min(block, whole - first), COLUMNS) for first in range(0, whole, block)]
    spans += [(whole, 1, rest)] if rest else []
    buffer = torch.empty(min(count, block * COLUMNS), dtype=torch.int32, device=device)
    for first, rows, columns in spans:
        table, own = _columns(device)[:columns], slice(first, first + rows)
        part = buffer[: rows * columns].view(rows, columns)
        if first < whole:
            torch.addcmul(low[own], high[own], table, out=part).mul_(table)
        else:  # a row alone, the only one of a small tensor: two numbers of the host's are no copies to a device
            word = _word64(key, whole)
            torch.mul(table, _signed32(word >> 32), out=part[0]).add_(_signed32(word)).mul_(table)
        begin = first * COLUMNS
        write(result[begin : begin + rows * columns].view(rows, columns), part)


@torch.no_grad()
def keep_mask(shape: Sequence[int], keep: float, key: int, device: torch.device) -> torch.Tensor:
    """A mask, bool of `shape`, of which each element is true with probability `keep`, to 32 bits."""
    limit = round(keep * _WORD)
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    if limit <= 0:
        return mask.zero_()
    threshold = min(limit, _WORD) - 1 - _WORD // 2
    _draw(mask.view(-1), key, lambda part, words: torch.le(words, threshold, out=part))
    return mask


@torch.no_grad()
def uniform(shape: Sequence[int], key: int, device: torch.device) -> torch.Tensor:
    """Uniform numbers in [0, 1), float32 of `shape`, multiples of 2^-24."""
    numbers = torch.empty(shape, dtype=torch.float32, device=device)

    def write(part: torch.Tensor, words: torch.Tensor) -> None:
        part.copy_(words.bitwise_right_shift_(8)).add_(1 << 23).mul_(2.0**-24)

    _draw(numbers.view(-1), key, write)
    return numbers


NOISE_ATTRIBUTE = "neftune_noise_alpha"
"""Attribute of the input embedding; the name is transformers' own."""

Function = Callable[..., Any]


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """A 63-bit seed, a hash of its arguments."""
    digest = hashlib.sha256(f"{seed}/{step}/{microbatch}/{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def draw_key(seed: int, number: int) -> int:
    """The 64-bit key of draw `number`, from 1, of a layer's call: a hash of both."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:8], "little")


def embedding_noise(embedded: torch.Tensor, alpha: float, seed: int) -> torch.Tensor:
    """Uniform noise for `embedded` [B, T, H], at most alpha / sqrt(T * H) (NEFTune, arXiv 2310.05914)."""
    limit = alpha / math.sqrt(embedded.shape[1] * embedded.shape[2])
    numbers = uniform(embedded.shape, draw_key(layer_seed(seed, -1, -1, -1), 1), embedded.device)
    return numbers.mul_(2 * limit).sub_(limit).to(embedded.dtype)


def switch_off_dropout(model: nn.Module) -> None:
    """Have `model` drop nothing in train mode: neither its dropout modules, adapters' too, nor its modules by name."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_probability = name == "p" if isinstance(module, _DropoutNd) else "drop" in name
            if is_probability and isinstance(value, float):
                setattr(module, name, 0.0)


def drawn_mask(tensor: torch.Tensor, p: float) -> torch.Tensor:
    """The mask of what `functional.dropout(tensor, p)` would keep here, bool of its shape; counts as that draw."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    mode = next((one for one in reversed(modes) if isinstance(one, SeededDropout)), None)
    if mode is None:  # outside a layer's call: torch's own random numbers
        return functional.dropout(torch.ones_like(tensor), p) != 0
    return mode.mask(tensor, p)


class SeededDropout(TorchFunctionMode):
    """While active in a thread, all random numbers of torch follow from `seed`, even with a given generator.

    Raises:
        RefusedError: in the call of a random function that has no answer here; it names the function.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self.num_draws = 0
        """Number of draws so far."""

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        return func(*args, **kwargs) if answer is None else answer(self, func, args, kwargs)

    def next_key(self) -> int:
        """The key of the next draw."""
        self.num_draws += 1
        return draw_key(self._seed, self.num_draws)

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers in [0, 1) of the shape of `like`, float32."""
        return uniform(like.shape, self.next_key(), like.device)

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers of mean 0 and variance 1 of the shape of `like`, float32, by the transform of Box and Muller.

        Logarithm and cosine are taken in float64, so that what processors make of their last bit is rounded away.
        """
        radius = self.uniform(like).double().neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
        return radius.mul_(self.uniform(like).double().mul_(2 * math.pi).cos_()).float()

    def exponential(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers of the exponential distribution of rate 1, of the shape of `like`, float32, never 0."""
        return self.uniform(like).double().add_(2.0**-25).log_().neg_().float()

    def mask(self, like: torch.Tensor, p: float) -> torch.Tensor:
        """A mask, bool of the shape of `like`, of which elements are false with probability `p`."""
        return keep_mask(like.shape, 1.0 - p, self.next_key(), like.device)

    def drop(self, tensor: torch.Tensor, p: float, inplace: bool = False) -> torch.Tensor:
        """`tensor` with elements set to 0 with probability `p` and the rest scaled; backward keeps the mask as bool."""
        mask = self.mask(tensor, p)
        scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        return (tensor.mul_(mask) if inplace else tensor * mask).mul_(scale)


def _attention(
    mode: SeededDropout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    # The definition of scaled_dot_product_attention in torch's documentation, with our mask.
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(visible.logical_not(), float("-inf"))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            scores = scores + attn_mask
    return mode.drop(torch.softmax(scores, dim=-1), dropout_p) @ value


# What answers a random function: (mode, function, its arguments) -> its result.


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, *, default: Any) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else default)


def _sdpa(mode: SeededDropout, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _argument(args, kwargs, 4, "dropout_p", default=0.0) > 0.0:
        return _attention(mode, *args, **kwargs)
    return func(*args, **kwargs)


def _dropout(mode: SeededDropout, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    training = values.get("training", values.get("train", True))
    p = float(values.get("p", 0.5))
    if not training or p == 0.0:
        return values["input"]
    return mode.drop(values["input"], p, bool(values.get("inplace", False)) or func is torch.dropout_)


def _made_by(make: Function, numbers: Callable[[SeededDropout, torch.Tensor], torch.Tensor]) -> Function:
    """Answers a function that makes a new tensor, as `make` makes an empty one."""

    def answer(mode: SeededDropout, _: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = make(*args, **{key: value for key, value in kwargs.items() if key != "generator"})
        with torch.no_grad():
            return result.copy_(numbers(mode, result))

    return answer


def _uniform_(mode: SeededDropout, _: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    low = float(_argument(args, kwargs, 1, "from", default=0.0))
    high = float(_argument(args, kwargs, 2, "to", default=1.0))
    tensor: torch.Tensor = args[0]
    return tensor.copy_(mode.uniform(tensor).mul_(high - low).add_(low))


def _normal_(mode: SeededDropout, _: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    mean = float(_argument(args, kwargs, 1, "mean", default=0.0))
    std = float(_argument(args, kwargs, 2, "std", default=1.0))
    tensor: torch.Tensor = args[0]
    return tensor.copy_(mode.normal(tensor).mul_(std).add_(mean))


def _exponential_(mode: SeededDropout, _: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor: torch.Tensor = args[0]
    return tensor.copy_(mode.exponential(tensor).div_(float(_argument(args, kwargs, 1, "lambd", default=1.0))))


def _bernoulli_(mode: SeededDropout, _: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor: torch.Tensor = args[0]
    return tensor.copy_(_ones_and_zeros(mode, tensor, _argument(args, kwargs, 1, "p", default=0.5)))


def _bernoulli(mode: SeededDropout, _: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor = _argument(args, kwargs, 0, "input", default=None)
    return _ones_and_zeros(mode, tensor, _argument(args, kwargs, 1, "p", default=tensor)).to(tensor.dtype)


def _ones_and_zeros(mode: SeededDropout, like: torch.Tensor, p: float | torch.Tensor) -> torch.Tensor:
    if isinstance(p, torch.Tensor):
        return mode.uniform(like) < p.detach().float()
    return keep_mask(like.shape, float(p), mode.next_key(), like.device)


def _refuse(mode: SeededDropout, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls of functions that are random in training alone, or with a probability above 0, pass if they are not."""
    share = kwargs.get("dropout_p", kwargs.get("p", kwargs.get("dropout", 1.0)))
    floats = [value for value in args if isinstance(value, float)]  # recurrent layers and attention: their dropout
    if kwargs.get("training", True) is False or share == 0.0 or (func in _BY_SHARE and not any(floats)):
        return func(*args, **kwargs)
    raise RefusedError(
        "the model draws random numbers by a function whose draws could not be repeated when a layer is computed again",
        where=f"torch function {getattr(func, '__qualname__', func)}",
        expected=f"one of {', '.join(sorted({f.__name__ for f, a in _ANSWERS.items() if a is not _refuse}))}",
        hint="switch off what draws them in the model's config.json, or choose another model",
    )


_BY_SHARE: frozenset[Function] = frozenset(
    {functional.multi_head_attention_forward, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}  # type: ignore[attr-defined]
)
_REFUSED = """
    alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_
    dropout1d dropout2d dropout3d native_dropout _fused_dropout rrelu rrelu_ gumbel_softmax
    fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices
    randint randint_like randperm random_ normal multinomial poisson binomial cauchy_ log_normal_ geometric_
    _standard_gamma _sample_dirichlet pca_lowrank svd_lowrank
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
    uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_
"""
"""Names in torch, its tensors, its functional module and its module of initial values."""


def _answers() -> Iterator[tuple[Function, Function]]:
    for name in _REFUSED.split():
        for owner in (torch, torch.Tensor, functional, init):
            if hasattr(owner, name):
                yield getattr(owner, name), _refuse
    yield from ((func, _refuse) for func in _BY_SHARE)
    yield from ((func, _dropout) for func in (functional.dropout, torch.dropout, torch.dropout_))
    yield functional.scaled_dot_product_attention, _sdpa
    yield torch.rand, _made_by(torch.empty, SeededDropout.uniform)
    yield torch.rand_like, _made_by(torch.empty_like, SeededDropout.uniform)
    yield torch.randn, _made_by(torch.empty, SeededDropout.normal)
    yield torch.randn_like, _made_by(torch.empty_like, SeededDropout.normal)
    yield torch.Tensor.uniform_, _uniform_
    yield torch.Tensor.normal_, _normal_
    yield torch.Tensor.exponential_, _exponential_
    yield torch.Tensor.bernoulli_, _bernoulli_
    yield from ((func, _bernoulli) for func in (torch.bernoulli, torch.Tensor.bernoulli))


_ANSWERS: dict[Function, Function] = dict(_answers())
"""The answer to each random function that a mode sees; the last one for a function counts."""
