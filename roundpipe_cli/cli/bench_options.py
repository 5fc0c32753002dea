"""The flags of `roundpipe bench` that say what is simulated: their checks and effect on the case; results as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roundpipe_cli.choices import BOUND_SCHEDULES, CHUNK_SCHEDULES, SCHEDULE_KINDS, SCHEDULES, ScheduleName
from roundpipe_cli.costs.cost import load_costs
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.planning.choose import in_long_rounds
from roundpipe_cli.planning.compare import Result, SimulationCase, StageCut
from roundpipe_cli.schedule.builders import schedule_name

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
        if self.accounting not in ("default", "published"):
            nearest = closest(self.accounting, ["default", "published"])
            hint = f"did you mean {nearest}?" if nearest else None
            found, expected = repr(self.accounting), "default or published"
            raise RefusedError("unknown accounting", found=found, expected=expected, hint=hint)

    def counts(self) -> tuple[int, int]:
        """Workers and microbatches, which a costs file does not contain.

        Raises:
            RefusedError: one of them is not given.
        """
        if self.workers is not None and self.microbatches is not None:
            return self.workers, self.microbatches
        given = (("--workers", self.workers), ("--microbatches", self.microbatches))
        missing = " and ".join(flag for flag, value in given if value is None)
        hint = "--workers 8 --microbatches 16"
        raise RefusedError(f"{missing} missing", expected="both, beside --costs", hint=hint)

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


def case_of_costs(path: Path, flags: CaseFlags) -> SimulationCase:
    """The case of a costs file.

    Raises:
        RefusedError: the file, or counts that are missing.
    """
    num_workers, num_microbatches = flags.counts()
    return flags.applied_to(SimulationCase(load_costs(path), num_workers, num_microbatches))


def named_schedules(given: Sequence[str] | None, sequence_chunks: int) -> list[ScheduleName]:
    """The schedules that are named, else all that suit so many chunks."""
    known = SCHEDULES if sequence_chunks == 1 else CHUNK_SCHEDULES
    return list(dict.fromkeys(schedule_name(name) for name in given or known))


def asked_cuts(
    schedules: Sequence[str] | None, forward: str | None, backward: str | None, case: SimulationCase
) -> list[tuple[ScheduleName, StageCut | None]]:
    """The schedules to simulate with the stages that were given; None: they are to be planned.

    Given without backward stages, forward stages are those of bound schedules; with them, those of roundpipe. Without
    `--schedule` the schedules that they suit are simulated. Rounds are as long as a run's with such stages.

    Args:
        schedules: the values of `--schedule`.
        forward: `--forward-stages`, JSON.
        backward: `--backward-stages`, JSON.
    """
    names = named_schedules(schedules, case.sequence_chunks)
    if forward is None:
        if backward is not None:
            hint = "give both, or none to have them planned"
            raise RefusedError("--backward-stages without --forward-stages", hint=hint)
        return [(name, None) for name in names]
    forward_ranges = _stages("--forward-stages", forward)
    backward_ranges = _stages("--backward-stages", backward) if backward is not None else ()
    if not schedules and backward is not None:
        names = [name for name in SCHEDULES if name not in BOUND_SCHEDULES]
    elif not schedules:
        one_each = len(forward_ranges) == case.num_workers
        names = [name for name in BOUND_SCHEDULES if one_each or not SCHEDULE_KINDS[name].one_stage_each]
    dealt = [name for name in names if name not in BOUND_SCHEDULES]
    if backward is None and dealt:
        what, hint = f"{dealt[0]} needs --backward-stages beside --forward-stages", "or neither: planned then"
        raise RefusedError(what, hint=hint)
    cut, chunks = StageCut(forward_ranges, backward_ranges), case.sequence_chunks
    in_rounds = replace(cut, microbatches_per_round=-(-case.num_workers // chunks) * chunks)
    long = in_long_rounds(in_rounds, case) if case.accounting == "default" else cut
    return [(name, long if name in dealt else cut) for name in names]


_RANGES = "like '[[0, 3], [4, 7]]'"
_RANGES_HINT = "one [first, last] per stage, layers counted from 0, all in single quotes for the shell"


def _stages(flag: str, text: str) -> tuple[tuple[int, int], ...]:
    """Layer ranges from JSON such as `[[0, 3], [4, 7]]`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{flag} is not JSON", found=str(error), expected=_RANGES, hint=_RANGES_HINT) from error
    good = isinstance(data, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair) for pair in data
    )
    if not good:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise RefusedError(f"{flag} is not a list of ranges", found=shown, expected=_RANGES, hint=_RANGES_HINT)
    return tuple((first, last) for first, last in data)


def bench_document(question: SimulationCase, results: list[Result]) -> dict[str, Any]:
    """The document that `--json` prints. Seconds; the four parts sum to the bubble ratio."""
    counts = {"workers": question.num_workers, "microbatches": question.num_microbatches}
    return {**counts, "results": [entry(result) for result in results]}


def entry(result: Result) -> dict[str, Any]:
    """One schedule's simulated figures as `--json` prints them."""
    return {
        "schedule": result.schedule.name,
        "round": result.microbatches_per_round,
        "makespan_s": result.makespan_s,
        "bubble_ratio": result.parts.ratio,
        **{part: getattr(result.parts, part) for part in ("fill", "switch", "drain", "steady")},
        "step_s": result.step_s,
        "forward_stages": [list(stage) for stage in result.schedule.forward_stages],
        "backward_stages": [list(stage) for stage in result.schedule.backward_stages],
    }
