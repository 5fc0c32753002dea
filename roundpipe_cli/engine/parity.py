"""The proof, before a run, that the engine trains a model as its own code does; it ends in numbers.

The model is cut to one block of each kind (`model/reduced.py`) and given random weights. One step goes through the
engine, where one worker meets all microbatches, and through the model's own forward and backward in train mode, each
microbatch by a copy of the model that has met no other:

    microbatches    short | long, positions beyond the limit | as long, just beyond it | short again
    compared        the loss, and every parameter's gradient

In float32 they may differ by 1e-5, or by four times what the model's own float32 differs from its float64: from the one
or the other, for both round. In 16 bit by twice what the model's own 16 bit differs from its float32: the loss, and of
the gradients the worst.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import NoProgressError, RefusedError, ResourceError
from roundpipe_cli.model.block_calls import NOT_SUPPORTED
from roundpipe_cli.model.dropout import switch_off_dropout
from roundpipe_cli.model.files.supported import chunk_refusal, packing_refusal
from roundpipe_cli.model.fused import find_fused_ops
from roundpipe_cli.model.layout import layer_parameters, make_layout
from roundpipe_cli.model.reduced import Reduced, random_weights, reduce_model
from roundpipe_cli.model.reference import Outcome, Piece, PlainModel
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.schedule.builders import Rounds, build_schedule

TOLERANCE = 1e-5
"""Allowed relative error of a loss, and of a gradient in the 2-norm."""
MAX_OWN = 1e-3
"""A model whose own float32 is further from its float64 draws random numbers, and allows nothing."""
MAX_OTHER_ERROR = 1e-3
"""Allowed relative error of packed rows and of chunks: leaks between rows are far larger, rounding far smaller."""
FLOOR = 1e-8
"""A gradient smaller than this share of the largest gradient's norm counts as rounding."""
MAX_PARAMETERS = 12_000_000
"""Parameters of the cut model; for a larger one, try a narrower model of its type."""
LIMIT_PARAMETERS = 400_000_000
"""Parameters of the cut model; a larger one is not tried. They are held about four times at once, in float32."""
SEED = 7
STEP = -1
"""Number of the proof's step, which no step of a run has."""
SHORT, LONG = 9, 14
"""Tokens of a microbatch."""
NUM_CHUNKS = 3
"""Tokens of a sequence, where chunks are tried."""
TRIES = 3
"""Number of tries in 16 bit."""
MAX_THREADS = 4
"""Threads of all workers; more are slower with so few tokens."""
MAX_ROW_TOKENS = 2100
"""Tokens of a microbatch that is as long as the model's positions."""


@dataclass(frozen=True)
class Proof:
    """The result for a model that is not refused."""

    loss_error: float
    """Relative error of the loss, in float32."""
    gradient_error: float
    """Largest relative error of a parameter's gradient, in float32."""
    unproven: str = ""
    """The reason why something could not be tried; empty if everything was."""
    last_position: int | None = None
    """The model has no positions from here on; None: its rows may be longer than its configuration says."""
    not_fused: str = ""
    """The reason why no module may use fused operators; empty if they may."""


class ParityRefusedError(RefusedError):
    """The engine would not train the model as its own code does. Exit code 2."""


def prove(
    model: nn.Module,
    split: ModelSplit,
    *,
    packing: bool = False,
    chunks: bool = False,
    fused: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Compare the engine with the model itself.

    Args:
        model: parameters on the meta device, adapters included; is left as it is.
        packing: several rows to a sequence; they are compared with the model's own results for each row alone.
        chunks: sequences in chunks; they are compared with the model's own results for whole ones.
        fused: the engine computes by fused operators, as far as they are known to suit the model.
        tell: takes the number of each comparison that begins, of how many.

    Raises:
        ParityRefusedError: they differ, or the engine fails where the model does not.
        ResourceError: it ran out of memory.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    count = 1 + (dtype != torch.float32) + packing + chunks
    numbers = iter(range(1, count + 1))

    def begun() -> None:
        tell(f"{next(numbers)} of {count}")

    begun()
    reduced = reduce_model(model, split)
    if reduced.num_parameters > LIMIT_PARAMETERS:
        return Proof(0.0, 0.0, f"one block of each kind has {reduced.num_parameters} parameters, too many to try")
    weights = random_weights(reduced.model)
    if fused:
        reduced = replace(reduced, fused=find_fused_ops(reduced.model, split))
    both = _Both(reduced, split, weights)
    ways = [("packed rows do not see each other", _packed_piece(reduced.vocab_size), 1)] if packing else []
    if chunks:
        piece = _packed_piece(reduced.vocab_size) if packing else _piece(reduced.vocab_size, 2, LONG, 5)
        ways.append(("chunks compute what whole sequences do", piece, NUM_CHUNKS))
    try:
        proof = _prove(both, begun)
        for what, piece, num_chunks in ways:
            begun()
            if not _prove_other_way(both, piece, num_chunks=num_chunks) and not proof.unproven:
                return replace(proof, unproven=f"that {what} was not compared: the model draws random numbers")
        return proof
    except _PlainFailed as error:
        try:
            both.in_float32().by_engine(usual_pieces(reduced.vocab_size))
        except RefusedError as refused:  # a model that wants more than text in training, as Molmo 2 does
            what = "this model cannot be trained on text alone: its own forward and backward fail, and the engine's too"
            raise _refusal("model", str(error), "losses and gradients of made-up tokens", what=what) from refused
        return Proof(0.0, 0.0, f"the model's own forward and backward fail on made-up tokens: {error}")


def _prove(both: _Both, begun: Callable[[], None]) -> Proof:
    exact = both if both.dtype == torch.float32 else both.in_float32()
    limit = position_limit(both.reduced.model)
    pieces = usual_pieces(both.reduced.vocab_size)
    beyond = [] if limit is None else pieces_beyond(both.reduced, both.split, limit)
    try:
        plain = exact.by_itself([*pieces, *beyond])
        pieces, limit = [*pieces, *beyond], None
    except _PlainFailed:
        plain = exact.by_itself(pieces)
    found = exact.by_engine(pieces)
    errors = differences(found, plain)
    if any(not error <= TOLERANCE for error in errors.values()):
        wide = exact.by_itself(pieces, torch.float64)
        allowed = {name: min(max(TOLERANCE, 4 * error), MAX_OWN) for name, error in differences(plain, wide).items()}
        errors = _smaller(errors, differences(found, wide))
        again = exact.by_engine(pieces)
        _check(errors, allowed, "float32", _smaller(differences(again, plain), differences(again, wide)))
    unproven = ""
    if both.dtype != torch.float32:
        begun()
        try:
            _check_16_bit(both, exact)
        except _PlainFailed as error:
            unproven = f"in {both.dtype} on the processor the model's own forward and backward fail: {error}"
    gradients = [error for name, error in errors.items() if name]
    return Proof(errors[""], max(gradients, default=0.0), unproven, last_position=limit)


def _prove_other_way(both: _Both, piece: Piece, *, num_chunks: int) -> bool:
    """Compare a packed sequence with its rows one by one, or one in chunks with the whole, in float32 and without
    dropout.

    Returns:
        Whether they were compared; a model that still draws random numbers is not, for other shapes draw others.

    Raises:
        RefusedError: rows change each other's results, or chunks compute something else.
    """
    exact = both.in_float32()
    exact = replace(exact, split=replace(exact.split, routers=None))  # their loss is one of whole forwards
    switch_off_dropout(exact.reduced.model)
    plain = PlainModel(exact.reduced.model, exact.split, exact.weights, torch.float32)
    plain.run(usual_pieces(exact.reduced.vocab_size)[:1], SEED, STEP)
    if plain.has_drawn:
        return False
    expected = exact.by_itself([piece])
    errors = differences(exact.by_engine([piece], num_chunks=num_chunks), expected)
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= MAX_OTHER_ERROR:
        what = f"the {f'gradient of {worst}' if worst else 'loss'} is {errors[worst]:.1e} off that of the"
        if num_chunks > 1:
            raise chunk_refusal("model", f"{what} whole sequence")
        raise packing_refusal("model", f"{what} rows one by one")
    return True


def _check_16_bit(both: _Both, exact: _Both) -> None:
    """Compare in the model's own dtype; one of several tries must agree.

    Rounding sends a token to another expert now and then, in the engine or in the model itself, which moves gradients
    by their own size. What computes in a wrong way does so with any tokens.
    """
    for attempt in range(TRIES):
        pieces = usual_pieces(both.reduced.vocab_size, attempt)
        plain = exact.by_itself(pieces)
        own = differences(both.by_itself(pieces, both.dtype), plain)
        here = differences(both.by_engine(pieces), plain)
        worst = max((error for name, error in own.items() if name and error == error), default=0.0)
        limits = {name: 2 * (worst if name else own[name]) + torch.finfo(both.dtype).eps for name in here}
        try:
            _check(here, limits, str(both.dtype).removeprefix("torch."), here)
            return
        except ParityRefusedError:
            if attempt + 1 == TRIES:
                raise


# -- what is compared --------------------------------------------------------------------------------------------


def differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Relative errors: of the loss under the name "", and of each parameter's gradient."""
    norms = {name: float(gradient.norm()) for name, gradient in expected.gradients.items()}
    floor = FLOOR * max(norms.values(), default=0.0) / TOLERANCE
    errors = {"": abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-30)}
    unreached = torch.zeros(())  # the gradient of a parameter that no token reached
    for name in {**expected.gradients, **found.gradients}:
        theirs, ours = (one.gradients.get(name, unreached) for one in (expected, found))
        size = float((ours.to(theirs.dtype) - theirs).norm())
        errors[name] = size / max(norms.get(name, 0.0), floor) if size else 0.0
    return errors


def _smaller(errors: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """The smaller of two errors of each; one that is no number stays."""
    return {name: others[name] if others[name] < error else error for name, error in errors.items()}


def _check(errors: Mapping[str, float], allowed: Mapping[str, float], dtype: str, again: Mapping[str, float]) -> None:
    """Refuse the largest of the differences that are not allowed; one that is no number never is.

    Args:
        again: the differences of a second try, which tell what is drawn or remembered from what is always wrong.
    """
    wrong = [name for name, error in errors.items() if not error <= allowed.get(name, TOLERANCE)]
    if not wrong:
        return
    name = "" if "" in wrong else max(wrong, key=lambda key: errors[key])
    others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    changes = again[name] != errors[name] and not again[name] <= allowed.get(name, TOLERANCE)
    raise _refusal(
        f"gradient of {name}" if name else "loss",
        f"{errors[name]:.1e} off the model's own in {dtype}{others}"
        + (f", {again[name]:.1e} in a second try: something is drawn at random or remembered" if changes else ""),
        f"at most {allowed.get(name, TOLERANCE):.1e}",
    )


def _refusal(
    where: str, found: str, expected: str, *, what: str = "this model would be trained wrong"
) -> ParityRefusedError:
    return ParityRefusedError(what, where=where, found=found, expected=expected, hint=NOT_SUPPORTED)


# -- microbatches ------------------------------------------------------------------------------------------------


def position_limit(model: nn.Module) -> int | None:
    """Positions that the model was made for; None: it knows no limit."""
    config: Any = model.config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def usual_pieces(vocab_size: int, attempt: int = 0) -> list[Piece]:
    """Two microbatches of different length and number of rows, other ones in each attempt."""
    return [_piece(vocab_size, 2, SHORT, 10 * attempt + 1), _piece(vocab_size, 1, LONG, 10 * attempt + 2)]


def pieces_beyond(reduced: Reduced, split: ModelSplit, limit: int) -> list[Piece]:
    """Microbatches with positions from `limit` on: far beyond it, then just beyond, to find state that was left.

    Where the model counts positions itself they are as long, or left out above `MAX_ROW_TOKENS`.
    """
    backbone = reduced.model.get_submodule(split.backbone_path)
    if "position_ids" in inspect.signature(backbone.forward).parameters:
        return [_piece(reduced.vocab_size, 1, LONG, 3, end=end) for end in (2 * limit, limit + SHORT)]
    tokens = limit + SHORT
    return [_piece(reduced.vocab_size, 1, tokens, 3)] if tokens <= MAX_ROW_TOKENS else []


def _piece(vocab_size: int, rows: int, tokens: int, seed: int, *, end: int | None = None) -> Piece:
    """Random tokens, about a third of them no targets. `end`: the position behind the last token; None: `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(min(3, vocab_size - 1), vocab_size, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.3] = IGNORED_LABEL
    labels[:, 1] = ids[:, 1]
    start = None if end is None else max(0, end - tokens)
    return Piece(ids, labels, None if start is None else torch.arange(start, start + tokens).expand(rows, -1))


def _packed_piece(vocab_size: int) -> Piece:
    """One sequence of two rows; the first token of the second is nobody's target."""
    piece = _piece(vocab_size, 1, SHORT + LONG, 4)
    positions = torch.cat([torch.arange(SHORT), torch.arange(LONG)])[None]
    piece.labels[:, SHORT] = IGNORED_LABEL
    return Piece(piece.input_ids, piece.labels, positions, (0, SHORT))


# -- the two ways ------------------------------------------------------------------------------------------------


class _PlainFailed(Exception):
    """The model itself cannot compute what it was given."""


@dataclass(frozen=True)
class _Both:
    """The cut model with weights, for a step by its own code and by the engine."""

    reduced: Reduced
    split: ModelSplit
    weights: Mapping[str, torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.reduced.model.parameters() if p.is_floating_point())

    def in_float32(self) -> _Both:
        return replace(self, reduced=replace(self.reduced, model=copy.deepcopy(self.reduced.model).float()))

    def by_itself(self, pieces: Sequence[Piece], dtype: torch.dtype = torch.float32) -> Outcome:
        try:
            outcome = PlainModel(self.reduced.model, self.split, self.weights, dtype).run(pieces, SEED, STEP)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, AssertionError) as error:
            raise _PlainFailed(_first_line(error)) from error
        if not (math.isfinite(outcome.loss) and all(one.isfinite().all() for one in outcome.gradients.values())):
            raise _PlainFailed("not finite")
        return outcome

    def by_engine(self, pieces: Sequence[Piece], *, num_chunks: int = 1) -> Outcome:
        """Every kept block is a stage of its own; in 16 bit by two workers."""
        model, num_workers = self.reduced.model, 1 if self.dtype == torch.float32 else 2
        layouts = [
            make_layout(name, parameters, self.dtype)
            for name, parameters in zip(self.split.layer_names(), layer_parameters(model, self.split), strict=True)
        ]
        store = WeightStore(layouts)
        for name, values in self.weights.items():
            store.set_parameter(name, values)
        head = len(layouts) - 1
        starts = sorted({0, *(index + 1 for index in self.reduced.kept)})
        stages = [(start, end - 1) for start, end in zip(starts, [*starts[1:], head], strict=True)]
        schedule = build_schedule(
            "roundpipe",
            forward_stages=stages,
            backward_stages=[(head, head), *reversed(stages)],
            num_workers=num_workers,
            rounds=Rounds(len(pieces) * num_chunks, sequence_chunks=num_chunks),
        )
        num_threads = max(1, min(MAX_THREADS, torch.get_num_threads()) // num_workers)
        backends = [CpuBackend(num_threads) for _ in range(num_workers)]
        options = EngineOptions(seed=SEED, head_chunk_tokens=SHORT, fused=self.reduced.fused)
        microbatches = [Microbatch(piece.input_ids, piece.labels, piece.position_ids) for piece in pieces]
        try:
            with Engine(model, self.split, store, backends, options=options) as engine:
                result = engine.run_step(microbatches, schedule, step=STEP)
        except (NoProgressError, ResourceError):  # a fault of the machine, not of the model
            raise
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, RefusedError):
                raise cause from error
            if num_chunks > 1:
                found = f"a chunk fails where the whole sequence does not: {_first_line(cause)}"
                raise chunk_refusal("model", found) from error
            where = "the engine's forward and backward, which fail where the model's own do not"
            raise _refusal(where, _first_line(cause), "losses and gradients") from error
        return Outcome(result.loss, {name: store.gradient(name) for name in store.trainable_names})


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).split(chr(10))[0][:200]}"
