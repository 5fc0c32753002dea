"""The flags of `roundpipe bench` that change how roundpipe works: their checks and their effect on the case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundpipe_cli.choices import BOUND_SCHEDULES
from roundpipe_cli.costs.cost import CostModel, keep_activations, skip_projections
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.planning.compare import SimulationCase
from roundpipe_cli.schedule.dealing import Options

MAX_WORKERS, MAX_MICROBATCHES, MAX_STEPS = 256, 20_000, 1000
"""2,000 microbatches of five layers on four workers, with all schedules, take 5 s of processor time."""


@dataclass(frozen=True, slots=True)
class CaseFlags:
    """The flags that apply to every schedule; None leaves the value to the recipe or the default."""

    workers: int | None = None
    microbatches: int | None = None
    accounting: str = "default"
    staleness: int | None = None
    steps: int | None = None

    def check(self) -> None:
        """Refuse an accounting that does not exist, and a case that would be simulated for hours.

        Raises:
            RefusedError: as said.
        """
        for flag, value, most in (
            ("--workers", self.workers, MAX_WORKERS),
            ("--microbatches", self.microbatches, MAX_MICROBATCHES),
            ("--steps", self.steps, MAX_STEPS),
        ):
            if value is not None and value > most:
                raise RefusedError(f"{flag} is too large to simulate", found=str(value), expected=f"at most {most}")
        if self.accounting in ("default", "published"):
            return
        nearest = closest(self.accounting, ["default", "published"])
        hint = f"did you mean {nearest}?" if nearest else None
        raise RefusedError(
            "unknown accounting", found=repr(self.accounting), expected="default or published", hint=hint
        )

    def counts(self) -> tuple[int, int]:
        """Workers and microbatches, which a costs file does not contain.

        Raises:
            RefusedError: one of them is not given.
        """
        given = (("--workers", self.workers), ("--microbatches", self.microbatches))
        missing = [flag for flag, value in given if value is None]
        if missing:
            raise RefusedError(
                f"{' and '.join(missing)} missing",
                expected="both, beside --costs",
                hint="--workers 8 --microbatches 16",
            )
        assert self.workers is not None and self.microbatches is not None
        return self.workers, self.microbatches

    def applied_to(self, case: SimulationCase) -> SimulationCase:
        """The case with the flags' values in place of its own."""
        is_published = self.accounting == "published"
        if self.staleness is not None and self.staleness != case.staleness:
            case = replace(case, staleness=1 if self.staleness else 0, num_steps=1)
        return replace(
            case,
            num_workers=case.num_workers if self.workers is None else self.workers,
            num_microbatches=case.num_microbatches if self.microbatches is None else self.microbatches,
            accounting="published" if is_published else "default",
            limits=None if is_published else case.limits,
            num_steps=case.num_steps if self.steps is None else self.steps,
        )


@dataclass(frozen=True, slots=True)
class RoundpipeFlags:
    """The flags that change how roundpipe works; the defaults change nothing."""

    head_workers: int = 1
    earliest_free: bool = False
    skip_projection: bool = False
    keep_activations: int = 0
    """Layers, counted from the last recomputed one, whose activations are kept: backward needs those soonest."""

    def words(self) -> str:
        """The flags that are on, as they were typed."""
        flags = {
            f"--head-workers {self.head_workers}": self.head_workers != 1,
            "--earliest-free": self.earliest_free,
            "--skip-projection": self.skip_projection,
            f"--keep-activations {self.keep_activations}": self.keep_activations != 0,
        }
        return " ".join(flag for flag, is_on in flags.items() if is_on)


def check_schedules(flags: RoundpipeFlags, names: Sequence[str], are_named: bool) -> None:
    """Refuse flags that would change nothing.

    Args:
        names: the schedules that are simulated.
        are_named: whether `--schedule` named them; otherwise bound ones are there for comparison and stay as they are.

    Raises:
        RefusedError: a bound schedule was asked for, or roundpipe is not simulated at all.
    """
    bound = [name for name in names if name in BOUND_SCHEDULES]
    if flags.words() and bound and (are_named or len(bound) == len(names)):
        raise RefusedError(
            f"{flags.words()}: only roundpipe has this",
            found=f"also {', '.join(bound)}" if len(bound) < len(names) else ", ".join(bound),
            expected="--schedule roundpipe, or no --schedule at all",
            hint=f"leave {flags.words()} out, or add --schedule roundpipe",
        )


def changed_question(question: SimulationCase, flags: RoundpipeFlags) -> SimulationCase:
    """The case for roundpipe; unchanged if all flags are off.

    Raises:
        RefusedError: values that mean nothing for these workers and costs.
    """
    if not 1 <= flags.head_workers <= question.num_workers:
        raise RefusedError(
            "--head-workers does not suit the workers",
            found=str(flags.head_workers),
            expected=f"1 to {question.num_workers}",
            hint="1 is the default: one worker computes the head",
        )
    if flags.earliest_free and flags.head_workers != 1:
        raise RefusedError(
            "--earliest-free deals out each microbatch separately, which leaves no fixed share to a worker",
            found=flags.words(),
            expected="--earliest-free, or --head-workers",
            hint="leave one of the two out",
        )
    costs = _kept(question.costs, flags.keep_activations)
    if flags.skip_projection:
        costs = _skipped(costs)
    options = Options(flags.head_workers, flags.earliest_free)
    if options == Options():
        options = question.options
    return replace(question, costs=costs, options=options)


def _kept(costs: CostModel, count: int) -> CostModel:
    recomputed = [index for index, layer in enumerate(costs.layers) if layer.recompute]
    if not 0 <= count <= len(recomputed):
        raise RefusedError(
            "--keep-activations does not suit the layers",
            where=f"costs {costs.name}",
            found=str(count),
            expected=f"0 to {len(recomputed)}, the layers that are recomputed",
            hint="0 keeps none, which is the default",
        )
    return keep_activations(costs, recomputed[len(recomputed) - count :]) if count else costs


def _skipped(costs: CostModel) -> CostModel:
    if not any(layer.recompute and layer.recompute_skippable_s for layer in costs.layers):
        raise RefusedError(
            "--skip-projection: nothing in the recompute can be left out",
            where=f"costs {costs.name}",
            found="no recomputed layer with recompute_skippable_s",
            expected="recompute_skippable_s, in seconds, in at least one layer",
            hint="leave --skip-projection out, or add the key to the costs file (scripts/README.md describes it)",
        )
    return skip_projections(costs)
