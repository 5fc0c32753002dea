"""One model and machine under several schedules: what `roundpipe bench` prints. Seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from roundpipe_cli.costs.cost import CostModel, StageRange, without_bytes
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.chunk_partition import balanced_sizes, chunk_shapes, fastest
from roundpipe_cli.planning.partition import plan_partition
from roundpipe_cli.planning.stages import balanced_partition, forward_ranges
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import build_schedule, place_on
from roundpipe_cli.schedule.dealing import Options
from roundpipe_cli.schedule.durations import stage_times
from roundpipe_cli.schedule.published import simulate_published
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import Bubble, Timeline, bubble, makespan_s

MAX_JUDGED_ROUNDS = 4
"""Microbatches by which even stages are judged, per worker."""
MAX_JUDGED_STEPS = 4
"""Chained steps by which even stages are judged."""
MAX_JUDGED_LAYERS = 72
"""Of deeper models only one even cut is judged: each takes seconds."""
NUM_FINALISTS = 3
"""Of the partitions judged so, those judged by a whole step."""
MIN_GAIN = 0.01
"""Part of a step that another dealing than the published one has to save to be chosen."""


@dataclass(frozen=True)
class Question:
    """What is asked of every schedule."""

    costs: CostModel
    num_workers: int
    num_microbatches: int
    """Per step."""
    accounting: Literal["default", "published"] = "default"
    staleness: Literal[0, 1] = 0
    num_steps: int = 1
    """1, or an even number: chained steps from which the time per step is taken."""
    options: Options = Options()
    """How roundpipe deals out its stages; the other schedules bind theirs."""
    auto_dealing: bool = True
    """Whether the planner may choose earliest-free dispatch where `options` are the defaults and workers differ."""
    auto_head: bool = False
    """Whether the planner may share out a frozen head's microbatches where `options` are the defaults."""
    sequence_chunks: int = 1
    """Consecutive microbatches that are one sequence; see `Schedule`."""


@dataclass(frozen=True)
class Partition:
    """Stages in execution order, and microbatches per round where there are rounds."""

    forward_stages: tuple[StageRange, ...]
    backward_stages: tuple[StageRange, ...]
    microbatches_per_round: int | None = None
    workers: tuple[int, ...] = ()
    """Those that get stages; empty: all. The planner leaves workers idle where they would not make a step faster."""
    dealing: Options | None = None
    """How roundpipe deals them out; None: as the question says."""


@dataclass(frozen=True)
class Result:
    """One schedule's figures."""

    schedule: Schedule
    """Of the first step alone."""
    timeline: Timeline
    """Of the first step alone."""
    makespan_s: float
    parts: Bubble
    step_s: float
    microbatches_per_round: int
    dealing: Options
    """How roundpipe's stages were dealt out."""


def check_question(question: Question) -> None:
    """Refuse counts that mean nothing.

    Raises:
        RefusedError: which, and what was expected.
    """
    for what, count in (("--workers", question.num_workers), ("--microbatches", question.num_microbatches)):
        if count < 1:
            raise RefusedError(f"{what} must be at least 1", found=str(count), expected="1 or more")
    steps = question.num_steps
    if steps < 1 or (steps > 1 and steps % 2):
        raise RefusedError(
            "--steps must be 1 or even: the time per step is (makespan of K steps - of K/2) / (K/2)",
            found=str(steps),
            expected="1, 2, 4, ...",
        )
    speeds = question.costs.worker_speed
    if speeds is not None and len(speeds) != question.num_workers:
        raise RefusedError(
            "worker_speed does not name every worker",
            where=f"costs {question.costs.name}",
            found=f"{len(speeds)} speeds",
            expected=f"{question.num_workers}",
        )


def run(name: str, partition: Partition, question: Question) -> Result:
    """Simulate one schedule.

    Raises:
        RefusedError: stages that do not suit the schedule.
    """
    first = _timed(name, partition, question, 1)
    makespan = makespan_s(first[1])
    step_s = makespan
    if question.num_steps > 1:
        half = question.num_steps // 2
        span_s = [makespan_s(_timed(name, partition, question, count)[1]) for count in (half, question.num_steps)]
        step_s = (span_s[1] - span_s[0]) / half
    published = question.accounting == "published"
    per_round = question.num_workers if published else first[0].microbatches_per_round
    dealing = partition.dealing or question.options
    return Result(first[0], first[1], makespan, bubble(first[1]), step_s, per_round, dealing)


def make_schedule(name: str, partition: Partition, question: Question, num_steps: int = 1) -> Schedule:
    """The schedule of `num_steps` chained steps.

    Raises:
        RefusedError: stages that do not suit the schedule.
    """
    published = question.accounting == "published"
    workers = partition.workers or tuple(range(question.num_workers))
    speeds = question.costs.worker_speed
    own_speeds = None if speeds is None else tuple(speeds[worker] for worker in workers)
    schedule = build_schedule(
        name,
        forward_stages=partition.forward_stages,
        backward_stages=partition.backward_stages,
        num_workers=len(workers),
        num_microbatches=question.num_microbatches,
        costs=replace(without_bytes(question.costs) if published else question.costs, worker_speed=own_speeds),
        microbatches_per_round=None if published else partition.microbatches_per_round,
        num_steps=num_steps,
        staleness=question.staleness,
        options=partition.dealing or question.options,
        sequence_chunks=question.sequence_chunks,
    )
    return place_on(schedule, workers, question.num_workers)


def _timed(name: str, partition: Partition, question: Question, num_steps: int) -> tuple[Schedule, Timeline]:
    schedule = make_schedule(name, partition, question, num_steps)
    timeline = simulate(schedule, question.costs, accounting=question.accounting, staleness=question.staleness)
    return schedule, timeline


def choose_partition(name: str, question: Question) -> Partition:
    """The planner's stages for roundpipe; for a bound schedule the best of even and balanced ones.

    The planner knows the published dispatch only; for another one, which it may choose where workers differ in speed,
    even stages may be better than its own.

    Raises:
        ResourceError: nothing fits into the workers' memory.
    """
    if name == "roundpipe" and question.sequence_chunks > 1:
        return chunk_partition(question)
    if name == "roundpipe":
        plan = plan_partition(
            question.costs,
            num_workers=question.num_workers,
            num_microbatches=question.num_microbatches,
            accounting=question.accounting,
            staleness=question.staleness,
            num_steps=question.num_steps,
        )
        planned = Partition(plan.forward_stages, plan.backward_stages, plan.microbatches_per_round, plan.workers)
        if question.options != Options():
            return dealt_partition(planned, question)
        return choose_dealing(planned, question)
    num_layers, num_workers = len(question.costs.layers), question.num_workers
    max_loops = 1 if name in ("gpipe", "1f1b") else -(-num_layers // num_workers)
    best: tuple[float, int, Partition] | None = None
    for loops in range(1, max_loops + 1):
        num_stages = loops * num_workers
        candidates = {balanced_stages(question.costs, num_stages), even_stages(num_layers, num_stages)}
        partitions = [Partition(stages, tuple(reversed(stages))) for stages in sorted(candidates)]
        fastest = min(partitions, key=lambda partition: _published_s(name, partition, question))
        score = makespan_s(_timed(name, fastest, question, 1)[1])
        if best is None or (score, loops) < best[:2]:
            best = (score, loops, fastest)
    assert best is not None
    return best[2]


Keeps = Callable[[Partition], bool]
"""Whether stages keep limits that the question does not have."""


def chunk_partition(question: Question, keeps: Keeps | None = None) -> Partition:
    """Stages of roundpipe where sequences come in chunks, and the head's workers if the question leaves them open."""
    narrow = _chunk_partition(question, keeps)
    spread = _head_spread(question)
    if spread is None:
        return narrow
    wide = replace(_chunk_partition(replace(question, options=spread), keeps), dealing=spread)
    return faster(narrow, wide, question)


def _head_spread(question: Question) -> Options | None:
    """The head's microbatches on all workers, if that may be chosen: a trained head's gradients are added up in order,
    so its workers would wait for each other."""
    costs, head = question.costs, question.costs.layers[-1]
    is_frozen = costs.has_updates and not (head.grad_bytes or head.optimizer_s)
    is_open = question.auto_head and _leaves_open(question) and question.staleness == 0
    may = is_open and is_frozen and costs.equal_workers and question.num_workers > 1
    return Options(head_workers=question.num_workers) if may else None


def _leaves_open(question: Question) -> bool:
    """Whether the planner may deal in another way than the published one at all."""
    return question.options == Options() and question.accounting == "default"


def _chunk_partition(question: Question, keeps: Keeps | None) -> Partition:
    counts = question.num_workers, question.num_microbatches, question.sequence_chunks
    shapes = chunk_shapes(question.costs, *counts, question.options)
    found = fastest(
        shapes,
        lambda shape: keeps is None or keeps(Partition(*shape)),
        lambda shape: makespan_s(_timed("roundpipe", Partition(*shape), question, 1)[1]),
    )
    return Partition(*found)


def choose_dealing(planned: Partition, question: Question, keeps: Keeps | None = None) -> Partition:
    """The planner's stages in turn, or where a simulated step is faster so: if workers differ in speed, earliest-free
    dispatch with stages that suit it; if they are equal, the head on all of them. Not under published accounting.

    The planner leaves out workers that would only hold the others up, so no choice is slower than without them.
    """
    spread = _head_spread(question)
    if spread is not None:
        each = tuple((index, index) for index in range(len(question.costs.layers)))
        # One layer a stage and long rounds: of all cuts tried, what suits a head that costs each worker little. But no
        # longer than the planner's own or two microbatches a worker: the host keeps the boundaries of a round.
        most = max(2 * question.num_workers, planned.microbatches_per_round or 0)
        wide = Partition(each[:-1], each[::-1], min(question.num_microbatches, most), dealing=spread)
        return faster(planned, wide, question) if keeps is None or keeps(wide) else planned
    if question.costs.equal_workers or not (question.auto_dealing and _leaves_open(question)):
        return planned
    free = Options(earliest_free=True)
    dealt = replace(dealt_partition(planned, replace(question, options=free), keeps), dealing=free)
    return faster(planned, dealt, replace(question, num_steps=min(question.num_steps, MAX_JUDGED_STEPS)))


def faster(planned: Partition, other: Partition, question: Question) -> Partition:
    """The other one if it is faster by more than the simulator can be trusted with."""
    planned_s, other_s = (run("roundpipe", partition, question).step_s for partition in (planned, other))
    return other if other_s < planned_s * (1 - MIN_GAIN) else planned


def dealt_partition(planned: Partition, question: Question, keeps: Keeps | None = None) -> Partition:
    """The fastest of the planner's stages and a few even ones, under the question's `options`.

    Judged by at most four microbatches a worker and four chained steps, so that long steps take no longer to judge, and
    the best of those by all.
    """
    workers, blocks = question.num_workers, len(question.costs.layers) - 1
    num_microbatches = min(question.num_microbatches, MAX_JUDGED_ROUNDS * workers)
    short = replace(question, num_microbatches=num_microbatches, num_steps=min(question.num_steps, MAX_JUDGED_STEPS))
    rounds = sorted({min(size, num_microbatches) for size in (workers, 2 * workers, 4 * workers)})
    whole_step = replace(question, num_steps=short.num_steps)
    counts = sorted({min(count, blocks) for count in (workers, 2 * workers, blocks)})
    if blocks > MAX_JUDGED_LAYERS:
        counts = [min(2 * workers, blocks)]
    candidates = [
        Partition(*balanced_partition(blocks + 1, num_forward, 1 + num_backward), per_round)
        for num_forward in counts
        for num_backward in counts
        for per_round in (rounds[:1] if question.accounting == "published" else rounds)
    ]
    scored = [(run("roundpipe", planned, short).step_s, 0, planned)]
    for candidate in filter(keeps, candidates):
        result = run("roundpipe", candidate, short)
        if result.step_s < scored[0][0] * (1 - 1e-9) and _fits(result, question):
            scored.append((result.step_s, len(scored), candidate))
    finalists = [planned, *(candidate for _, _, candidate in sorted(scored, key=lambda one: one[:2])[:NUM_FINALISTS])]
    if question.options.earliest_free:  # where all layers fit, whole microbatches without any recompute
        whole = _whole_model(question.costs, question.num_microbatches)
        if (keeps is None or keeps(whole)) and _whole_model_fits(question.costs):
            finalists.append(whole)
    return min(finalists, key=lambda partition: run("roundpipe", partition, whole_step).step_s)


def _whole_model(costs: CostModel, num_microbatches: int) -> Partition:
    """All layers in the stage with the head, but for an embedding, whose rows come from the host."""
    last = len(costs.layers) - 1
    if costs.layers[0].name != "embed" or not last:
        return Partition((), ((0, last),), num_microbatches)
    return Partition(((0, 0),), ((1, last), (0, 0)), num_microbatches)


def _whole_model_fits(costs: CostModel) -> bool:
    """Whether every slot of a device could hold it, and its activations."""
    layers, limit = costs.layers, costs.device_memory_bytes
    held = costs.slots * sum(layer.param_bytes + layer.grad_bytes for layer in layers)
    return limit is None or held + sum(layer.activation_bytes for layer in layers) <= limit


def _fits(result: Result, question: Question) -> bool:
    limit = question.costs.device_memory_bytes
    peaks = result.timeline.device_peak_bytes
    return limit is None or question.accounting == "published" or max(peaks or (0,)) <= limit


def _published_s(name: str, partition: Partition, question: Question) -> float:
    schedule = build_schedule(
        name,
        forward_stages=partition.forward_stages,
        num_workers=question.num_workers,
        num_microbatches=question.num_microbatches,
        costs=question.costs,
        sequence_chunks=question.sequence_chunks,
    )
    return makespan_s(simulate_published(schedule, question.costs))


def even_stages(num_layers: int, num_stages: int) -> tuple[StageRange, ...]:
    """Equal numbers of blocks, larger stages last; the head, layer `num_layers - 1`, joins the last stage."""
    size, larger = divmod(num_layers - 1, num_stages)
    sizes = [size + (index >= num_stages - larger) for index in range(num_stages)]
    sizes[-1] += 1
    return forward_ranges(sizes)


def balanced_stages(costs: CostModel, num_stages: int) -> tuple[StageRange, ...]:
    """The cut whose slowest stage (forward, recompute and backward) is fastest; early stages are filled first.

    A bisection over the time of the slowest stage: a greedy fill tells whether so many stages suffice.
    """
    whole = [(index, index) for index in range(len(costs.layers))]
    times = stage_times(costs, whole, whole, fused_head=False)
    layer_s = [sum(parts) for parts in zip(times.forward_s, times.recompute_s, times.backward_s, strict=True)]
    sizes = balanced_sizes(layer_s, num_stages)
    return forward_ranges(sizes + [0] * (num_stages - len(sizes)))
