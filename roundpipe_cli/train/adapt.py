"""Answers to numbers that are not finite (a smaller loss scale, a step left out, the end), to a full device, and to one
that is lost: the others go on.

First one layer is recomputed at a time, which changes no bit; then microbatches are divided, again and again: more of
them in a step, of fewer rows, the same rows and the same loss (dropout masks differ: each microbatch has its own).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from roundpipe_cli.costs.lost_devices import note_lost_device
from roundpipe_cli.costs.machine import host_memory
from roundpipe_cli.data.batching import Grouping, RowBatch
from roundpipe_cli.data.tokenized import TokenizedDataset
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.errors import DeviceLostError, InternalError, NotFiniteError
from roundpipe_cli.events import DeviceLost, Notice, Tell
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.auto_cache import AutoCache
from roundpipe_cli.train.build import PageLocks
from roundpipe_cli.units import counted, shown_step

T = TypeVar("T")

# Responses to a loss or a gradient that is not finite: a smaller loss scale, a step left out, or the end.

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""As in torch.amp.GradScaler."""
MAX_SKIPPED_IN_A_ROW = 10
"""With more steps left out in a row than these, the weights are the cause, not the rows."""

IN_FLOAT16 = "values above 65,504 overflow in float16: dtype=bfloat16 or dtype=float32 has room; if that is not all, "


class FiniteGuard:
    """Counts steps that are left out, and holds float16's loss scale."""

    def __init__(self, recipe: Recipe, dataset: TokenizedDataset) -> None:
        self._is_float16 = recipe.dtype == "float16"
        self.loss_scale = INITIAL_SCALE if self._is_float16 else 1.0
        """For float16, whose gradients would vanish without one: doubled after many updates, halved at an overflow."""
        self.num_updates = 0
        """Updates since the last overflow."""
        self.num_skipped = 0
        """Steps left out since the start of the run."""
        self.num_in_a_row = 0
        """Steps left out since the last update."""
        self._may_skip = recipe.on_nonfinite == "skip"
        self._dataset = dataset

    def is_finite(self, result: StepResult) -> bool:
        """Whether the step's update may be made."""
        is_finite = math.isfinite(result.loss) and math.isfinite(result.gradient_norm)
        if is_finite:
            self.num_in_a_row = 0
        return is_finite

    def updated(self) -> None:
        """Note an update."""
        self.num_updates += 1
        if self._is_float16 and self.num_updates % GROWTH_STEPS == 0:
            self.loss_scale *= 2

    def skip(self, step: int, batches: list[RowBatch], result: StepResult, tell: Tell) -> None:
        """Leave the update out, where float16's loss scale was too large or the recipe says so.

        Raises:
            NotFiniteError: neither, or too often.
        """
        if math.isfinite(result.loss) and self._is_float16 and self.loss_scale > 1:  # from 1 on it is not the cause
            self.loss_scale, self.num_updates = self.loss_scale / 2, 0
            text = f"gradient overflow, update skipped, loss scale {self.loss_scale:g}"
            tell(Notice(f"step {shown_step(step)}: {text}"))
            return
        dataset = self._dataset
        self.num_skipped += 1
        self.num_in_a_row += 1
        indices = sorted(index for batch in batches for sequence in batch for index in sequence)
        rows = [dataset.where(dataset.rows[index].row_id) for index in indices]
        what = "loss" if not math.isfinite(result.loss) else "gradient"
        found = f"loss {result.loss}, gradient norm {result.gradient_norm}, rows {', '.join(rows[:16])}"
        if self._may_skip and self.num_in_a_row < MAX_SKIPPED_IN_A_ROW:
            text = f"the {what} is not finite ({found}): no update; {self.num_skipped} skipped so far"
            tell(Notice(f"step {shown_step(step)}: {text}"))
            return
        raise NotFiniteError(
            f"the {what} is not finite: stopped before the update",
            where=f"step {shown_step(step)}",
            found=found,
            hint=(IN_FLOAT16 if self._is_float16 else "")
            + "the last checkpoint is good; look at these rows, or lower learning_rate, then --resume; or leave "
            "such steps out with on_nonfinite=skip",
        )


@dataclass(frozen=True)
class Fit:
    """How steps are computed, from a step of the run on."""

    micro_batch_size: int
    """Sequences of one microbatch; divides the recipe's. With a token budget, those of `max_seq_length` tokens."""
    recompute: str
    first_step: int = 1
    """The first step that is computed so, counted from 1."""

    @staticmethod
    def of(recipe: Recipe) -> Fit:
        """How the recipe says that steps are computed."""
        return Fit(recipe.rows_per_microbatch, recipe.pipeline.recompute)

    def smaller(self, step: int) -> Fit | None:
        """The next change that needs less device memory, from `step` (counted from 1) on; None if there is none."""
        if self.recompute != "layer":
            return Fit(self.micro_batch_size, "layer", step)
        divisors = (size for size in range(self.micro_batch_size // 2, 0, -1) if self.micro_batch_size % size == 0)
        size = next(divisors, None)
        return None if size is None else Fit(size, self.recompute, step)

    def divide(self, batches: Sequence[RowBatch], grouping: Grouping | None = None) -> list[RowBatch]:
        """A step's microbatches, each cut into microbatches of at most `micro_batch_size` sequences, or the tokens of
        so many where `grouping` counts tokens."""
        size = self.micro_batch_size
        if grouping is not None and grouping.max_tokens is not None:
            smaller = grouping.resized(size)
            return [part for batch in batches for part in smaller.group(batch)]
        return [batch[start : start + size] for batch in batches for start in range(0, len(batch), size)]

    def recipe_lines(self, recipe: Recipe) -> dict[str, int | str]:
        """Recipe keys with which a run computes in this way from the start."""
        steps = recipe.gradient_accumulation_steps * recipe.micro_batch_size // self.micro_batch_size
        lines: dict[str, int | str] = {}
        if self.micro_batch_size != recipe.rows_per_microbatch and recipe.token_budget is not None:
            lines = {"micro_batch_tokens": self.micro_batch_size * recipe.tokens_of_full_row}
        elif self.micro_batch_size != recipe.rows_per_microbatch:
            lines = {"micro_batch_size": self.micro_batch_size, "gradient_accumulation_steps": steps}
        if self.recompute != recipe.pipeline.recompute:
            lines["pipeline.recompute"] = self.recompute
        return lines

    def to_json(self, recipe: Recipe) -> dict[str, Any] | None:
        """JSON values for checkpoint, metrics and report; None if steps are computed as the recipe says."""
        return asdict(self) if self.recipe_lines(recipe) else None


def resumed_fit(saved: Mapping[str, Any] | None, recipe: Recipe) -> Fit:
    """How a run that continues computes: as it did in the end, `saved`, as far as the recipe asks for more."""
    own = Fit.of(recipe)
    if saved is None:
        return own
    size, first_step = int(saved["micro_batch_size"]), int(saved["first_step"])
    return Fit(size if own.micro_batch_size % size == 0 else own.micro_batch_size, "layer", first_step)


# Devices that fail or hang: left out, where the others can go on.


Lasting = Callable[[bool], str | None]
"""Why a failed attempt cannot be repeated, in words: something that it did lasts; None: it can be. It is told whether
threads of the attempt may go on."""


class LostDevices:
    """Leaves devices that are lost out of a run, and computes again what they were at."""

    def __init__(
        self,
        engine: Engine,
        planner: AdaptivePlanner,
        cache: AutoCache,
        devices: Sequence[str],
        *,
        locks: PageLocks,
        stops: bool,
        lost_at: str = "",
        refused: Callable[[Sequence[int]], str | None] | None = None,
        tell: Callable[[DeviceLost | Notice], None],
        clock: Callable[[], float],
    ) -> None:
        """`devices`: of each worker; `stops`: a lost device ends the run; `lost_at`: see `Start`; `refused`: see
        `Reporting`."""
        self._engine, self._planner, self._cache = engine, planner, cache
        self._devices, self._stops, self._lost_at = tuple(devices), stops, lost_at
        self._refused, self._tell, self._clock, self._locks = refused, tell, clock, locks

    def again(self, run: Callable[[], T], at: str, *, lasting: Lasting = lambda hangs: None) -> T:
        """The result of `run`, which begins anew where a device is lost meanwhile.

        Args:
            at: `step 5`, for the user.
            lasting: see `Lasting`.

        Raises:
            DeviceLostError: the run cannot go on; says which devices another one should leave out.
            InternalError: the same was lost on another device: it is a bug.
        """
        while True:
            try:
                return run()
            except DeviceLostError as error:
                found = error.problems[0]
                lost, hangs = set(error.workers), error.is_hang
                error.__cause__ = None  # its frames hold tensors of the step
            gc.collect()
            cause = ": ".join(filter(None, [found.what, found.where, found.found]))
            if self._lost_at == at:
                text = "the same was lost on another device, so it is no device's fault"
                raise InternalError(text, where=at, found=cause, hint="please report it: this is a bug")
            self._lost_at = at
            self._leave_out(lost, at, cause, hangs=hangs, lasting=lasting(hangs))

    def _leave_out(self, shown: set[int], at: str, cause: str, *, hangs: bool, lasting: str | None) -> None:
        """Go on without the devices that are lost, or raise a DeviceLostError. An error tells of the workers `shown`:
        that of one device comes up on others too, which wait for it."""
        engine = self._engine
        self._locks.stays |= hangs
        silent = set(engine.silent(but=shown if hangs else ()))
        lost = self._of_one_device(silent | shown if hangs or not silent else silent)
        left = [worker for worker in range(engine.num_workers) if worker not in lost]
        reasons = (
            (self._stops, "on_device_loss: stop"),
            (not left and silent, "no device of this process answers any more"),
            (not left, "no other device is left"),
            (lasting is not None, lasting),
            (hangs and not self._has_room(), "too little host memory for other gradients than those that it may write"),
        )
        reason = next((words for holds, words in reasons if holds), None)
        if reason is None and self._refused is not None:
            reason = self._refused([engine.lanes[worker] for worker in left])
        if reason is not None:
            raise self._end(lost if left else self._of_one_device(shown), reason, at, cause)
        names = [self._name(worker) for worker in left]
        self._say(lost, at, cause, names)
        threads = engine.leave_out(lost, hang=hangs)
        if hangs:
            self._locks.lock(engine.store.gradients, self._name(0))
        self._planner.leave_out(lost)
        self._cache.leave_out(lost)
        if threads:
            text = f"{counted(len(threads), 'thread')} of a device that hangs left behind: {', '.join(threads)}"
            self._tell(Notice(text))

    def _say(self, lost: set[int], at: str, cause: str, left: Sequence[str]) -> None:
        for worker in sorted(lost):
            name = self._name(worker)
            xid = None if name == "cpu" else cuda.last_xid(int(name.removeprefix("cuda:")))
            said = f"{cause} ({xid})" if xid else cause
            event = DeviceLost(self._clock(), self._engine.lanes[worker], name, at, said, tuple(left))
            self._tell(event)
            note_lost_device(event.text)

    def _name(self, worker: int) -> str:
        return self._devices[self._engine.lanes[worker]]

    def _of_one_device(self, lost: set[int]) -> set[int]:
        """These workers, and others of the same GPUs."""
        names = {self._name(worker) for worker in lost} - {"cpu"}
        return lost | {worker for worker in range(self._engine.num_workers) if self._name(worker) in names}

    def _has_room(self) -> bool:
        needed = sum(gradient.nbytes for gradient in self._engine.store.gradients)
        return needed < host_memory().available_bytes

    def _end(self, lost: set[int], reason: str, at: str, cause: str) -> DeviceLostError:
        rest = [self._name(worker) for worker in range(self._engine.num_workers) if worker not in lost]
        names = ", ".join(sorted({self._name(worker) for worker in lost}))
        self._say(lost, at, cause, ())
        hint = "--resume continues from the newest checkpoint, after a restart of the machine perhaps; please report a "
        hint += "loss that comes again at the same step"
        if rest:
            hint = f"pipeline.devices=[{','.join(rest)}] with --resume leaves it out and continues from the newest "
            hint += "checkpoint; --restarts N does so by itself"
        error = DeviceLostError(
            f"a device was lost and the run cannot go on: {reason}", where=f"{names}, {at}", found=cause, hint=hint
        )
        error.rest, error.at = tuple(rest), at
        return error
