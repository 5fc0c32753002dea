"""Random numbers of a model's own code that depend only on (seed, step, microbatch, layer), on no thread or device.

A layer's forward and its recompute must draw the same, on any worker and in any order. Each call of a layer runs under
a function mode of its own thread that answers every random function of torch from a counter
(`kernels/random_masks.py`) whose key is a hash of the layer's place and the number of earlier draws, or refuses it by
name.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional, init
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.kernels.random_masks import Draw, keep_mask, uniform

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


_thread = threading.local()
"""`draws`: of the call that a thread is in, the innermost."""


def next_draw(p: float) -> Draw:
    """The mask of what `functional.dropout` would keep here if it drops with probability `p`; counts as that draw."""
    draws: OwnDraws | None = getattr(_thread, "draws", None)
    # outside a layer's call: torch's own random numbers
    key = int(torch.randint(1 << 62, (), device="cpu")) if draws is None else draws.next_key()
    return Draw(key, 1.0 - p)


class OwnDraws:
    """While active in a thread, the masks that operators of ours ask for by `next_draw` follow from `seed`."""

    draws_by_torch = False
    """Whether a function of torch has drawn."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._outer: OwnDraws | None = None
        self.num_draws = 0
        """Number of draws so far."""

    def __enter__(self) -> OwnDraws:
        self._outer, _thread.draws = getattr(_thread, "draws", None), self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.draws = self._outer

    def next_key(self) -> int:
        """The key of the next draw."""
        self.num_draws += 1
        return draw_key(self._seed, self.num_draws)


class SeededDropout(OwnDraws, TorchFunctionMode):
    """While active in a thread, all random numbers of torch follow from `seed`, even with a given generator.

    Every call of torch passes by here, which takes the issuing thread longer than many calls themselves.

    Raises:
        RefusedError: in the call of a random function that has no answer here; it names the function.
    """

    def __init__(self, seed: int) -> None:
        OwnDraws.__init__(self, seed)
        TorchFunctionMode.__init__(self)

    def __enter__(self) -> SeededDropout:
        OwnDraws.__enter__(self)
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)
        OwnDraws.__exit__(self, *error)

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is None:
            return func(*args, **kwargs)
        before = self.num_draws
        try:
            return answer(self, func, args, kwargs)
        finally:
            self.draws_by_torch |= self.num_draws > before

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers in [0, 1) of the shape of `like`, float32."""
        return uniform(like.shape, self.next_key(), like.device)

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers of mean 0 and variance 1 of the shape of `like`, float32, by the transform of Box and Muller.

        Logarithm and cosine are taken in float64, so that what processors make of their last bit is rounded away.
        """
        radius = self.uniform(like).double().neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
        return radius.mul_(self.uniform(like).double().mul_(2 * math.pi).cos_()).float()

    def drop(self, tensor: torch.Tensor, p: float, inplace: bool = False) -> torch.Tensor:
        """`tensor` with elements set to 0 with probability `p` and the rest scaled; backward keeps the mask as bool."""
        mask = keep_mask(tensor.shape, 1.0 - p, self.next_key(), tensor.device)
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
    if is_causal:  # torch takes no mask beside it
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
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
    numbers = mode.uniform(tensor).double().add_(2.0**-25).log_().neg_().float()  # of rate 1, never 0
    return tensor.copy_(numbers.div_(float(_argument(args, kwargs, 1, "lambd", default=1.0))))


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
