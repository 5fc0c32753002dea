"""From a recipe and a machine to a plan: figures of the model, costs, stages, simulated step, verdict. No torch.

`check_fits` serves `finetune`, `make_plan` is all of `roundpipe plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roundpipe_cli.choices import SCHEDULE_KINDS
from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.costs.hardware import Hardware
from roundpipe_cli.costs.machine import host_memory, num_machines
from roundpipe_cli.costs.memory import with_cached_weights
from roundpipe_cli.errors import Problem, ResourceError
from roundpipe_cli.planning.admission import unproven
from roundpipe_cli.planning.cache_size import has_room, with_all_weights, with_auto_cache
from roundpipe_cli.planning.choose import MIN_GAIN, case_for, choose, given_cut
from roundpipe_cli.planning.compare import SimulationCase, StageCut
from roundpipe_cli.planning.forward import forward_stages
from roundpipe_cli.planning.question import PlanRequest, ask, choose_tier
from roundpipe_cli.planning.quick_cut import enough_per_round
from roundpipe_cli.planning.resident import resident_cut
from roundpipe_cli.planning.solve import Solution, solve
from roundpipe_cli.planning.unequal import describe_left_out, without_small_cards
from roundpipe_cli.planning.verdict import (
    Verdict,
    coarsest_cut,
    judge,
    judge_coarsest,
    stage_limits,
    stages_of_blocks,
)
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.schedule.builders import SCORED_PER_WORKER, build_forward, build_schedule
from roundpipe_cli.schedule.dealing import Rounds, options_of
from roundpipe_cli.schedule.lower import lower
from roundpipe_cli.schedule.operations import WEIGHT_GRADIENT, WEIGHTS
from roundpipe_cli.schedule.simulate import simulate_program
from roundpipe_cli.schedule.timeline import DOWN, UP, Timeline, busy_s, makespan_s
from roundpipe_cli.units import format_bytes, format_seconds

RESIDENT_CUT = "each microbatch stays on one worker, and as much of it as fits needs no recompute"
MAX_SIMULATED_MICROBATCHES = 64


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes over all workers' links in one step."""

    weights_up: int
    boundaries_up: int
    gradients_down: int
    boundaries_down: int

    @property
    def up(self) -> int:
        return self.weights_up + self.boundaries_up


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer."""

    question: PlanRequest
    forward_stages: tuple[StageRange, ...]
    backward_stages: tuple[StageRange, ...]
    microbatches_per_round: int
    verdict: Verdict
    step_s: float
    host_s: float
    """Part of `step_s`: interpreter time, one after the other for all workers."""
    bubble_ratio: float
    links: LinkBytes
    timeline: Timeline
    """Of one simulated step, of at most `MAX_SIMULATED_MICROBATCHES` microbatches."""
    explanation: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        settings = self.question.settings
        return settings.num_microbatches * settings.tokens_per_microbatch / self.step_s


def check_fits(loaded: LoadedRecipe) -> None:
    """Refuse a run that cannot fit on this machine, before anything is loaded.

    Counts host memory that is available now, under a container's limit. A model whose parameters are a guess passes.

    Raises:
        ResourceError: device memory, host memory or disk is too small; every number that breaks is named.
    """
    question = ask(loaded, here=True)
    if question.architecture.is_guess:
        return  # a guess is no reason to refuse a run
    if not question.hardware.is_here:
        return  # the recipe's GPUs are not here, which is another error than memory
    memory = host_memory()
    available = min(question.hardware.host_memory_bytes, memory.available_bytes)
    machine = replace(question.hardware, host_memory_bytes=available)
    settings = question.settings
    if loaded.recipe.weights == "auto":
        settings = choose_tier(question.architecture, settings, machine)
    if settings.method == "full" and loaded.recipe.nodes.shard_optimizer is not False:
        settings = replace(settings, num_shards=num_machines())
    verdict = judge_coarsest(question.architecture, settings, machine)
    if verdict.fits:
        return
    error = ResourceError(verdict.reasons[0])
    found = f"{format_bytes(available)} available now of {format_bytes(memory.total_bytes)} ({memory.limited_by})"
    hint = f"`roundpipe plan {loaded.path} --solve` names the cheapest changes that make it fit"
    for fewer in without_small_cards(replace(question, settings=settings, hardware=machine)):
        if judge_coarsest(fewer.architecture, settings, fewer.hardware).fits:
            hint = f"{describe_left_out(question, fewer, fits=False)}; {hint}"
            break
    error.problems = tuple(
        Problem(
            reason,
            where=str(loaded.path),
            found=found if reason.startswith("host memory") else None,
            hint=hint if reason is verdict.reasons[-1] else None,
        )
        for reason in verdict.reasons
    )
    raise error


def make_plan(loaded: LoadedRecipe, hardware: str | Hardware | None = None) -> Plan:
    """Cut the layers, simulate a step, and judge whether it fits; without the GPUs of less memory than others where
    only that fits, or is faster.

    Raises:
        RefusedError: no such model or hardware, or stages of the recipe that do not cover the layers.
    """
    question = ask(loaded, hardware)
    best = _plan(question)
    for fewer in without_small_cards(question):
        if best.verdict.fits and _least_s(fewer) >= best.step_s:
            continue
        other = _plan(fewer)
        if other.verdict.fits and (not best.verdict.fits or other.step_s < best.step_s):
            why = describe_left_out(question, fewer, fits=best.verdict.fits)
            best = replace(other, explanation=(why, *other.explanation))
    return best


def _least_s(question: PlanRequest) -> float:
    """No step is faster: workers that never wait, and nothing is computed twice."""
    costs, settings = question.analytic.costs, question.settings
    once_s = sum(layer.forward_s + layer.backward_s for layer in costs.layers) * settings.num_microbatches
    host_s = settings.num_microbatches * question.analytic.host_s_per_microbatch
    return once_s / sum(costs.worker_speed or (1.0,) * question.num_workers) + host_s


def _plan(question: PlanRequest) -> Plan:
    """The plan for all devices of the question's machine."""
    whole = with_all_weights(question)
    cut = _cut(question)
    verdict = _judged(question, cut)
    question, kept = with_auto_cache(question, verdict)
    if kept is not None:
        verdict = _judged(question, cut)
    step = _simulate_step(question, cut)
    resident = _resident(whole, step.step_s if verdict.fits else math.inf)
    if resident is not None:
        question, cut, verdict, step = resident
        held = question.settings.weight_cache_bytes
        if held:
            kept = f"weight cache (auto): all {format_bytes(held)} of weights stay on each GPU, uploaded once in a run"
    host_s = question.settings.num_microbatches * question.analytic.host_s_per_microbatch
    reference_s = _reference_s(question, cut)
    reference = f"the base model's forward, which pairs are compared with: {format_seconds(reference_s)} of a step"
    return Plan(
        question=question,
        forward_stages=cut.forward_stages,
        backward_stages=cut.backward_stages,
        microbatches_per_round=_per_round(question, cut),
        verdict=verdict,
        step_s=step.step_s + host_s + reference_s,
        host_s=host_s,
        bubble_ratio=step.bubble_ratio,
        links=step.links,
        timeline=step.timeline,
        explanation=(
            *cut.explanation,
            *filter(None, [kept]),
            _what_binds(question, step, host_s),
            *([reference] if reference_s else []),
        ),
        assumptions=_assumptions(question, cut),
    )


def _resident(question: PlanRequest | None, streamed_s: float) -> tuple[PlanRequest, StageCut, Verdict, _Step] | None:
    """Stages for GPUs that hold all weights, if those fit and a step is faster so than the other way, `streamed_s`."""
    if question is None:
        return None

    def keeps(cut: StageCut) -> bool:
        return has_room(question, _judged(question, cut))

    found = resident_cut(question.analytic.costs, question.num_workers, keeps)
    if found is None:
        return None
    cut = replace(found, explanation=(RESIDENT_CUT,))
    step = _simulate_step(question, cut)
    return (question, cut, _judged(question, cut), step) if step.step_s < streamed_s * (1 - MIN_GAIN) else None


def stage_case(question: PlanRequest) -> SimulationCase:
    """What `choose` is asked for this recipe and machine, by `plan` and `bench`."""
    overlaps, recipe = _overlaps_steps(question), question.loaded.recipe
    on_cpu = all(device.is_cpu for device in question.hardware.devices)
    return case_for(
        recipe.pipeline,
        question.analytic.costs,
        (question.num_workers, question.settings.num_microbatches),
        stage_limits(question.architecture, question.settings, question.hardware, question.analytic),
        overlaps=overlaps,
        weights_stay=on_cpu and recipe.may_hold_all_weights and question.num_workers > 1 and not overlaps,
    )


def _cut(question: PlanRequest) -> StageCut:
    """The recipe's own stages where it has them, the planner's otherwise."""
    pipeline, settings = question.loaded.recipe.pipeline, question.settings
    given = given_cut(pipeline, question.num_workers)
    if given is not None:
        return given
    case = stage_case(question)
    if pipeline.binds_stages:
        return choose(pipeline.schedule, case, effort="quick")
    if settings.sequence_chunks > 1:
        why = f"{settings.sequence_chunks} chunks a sequence: stages of about equal time, the head alone in its stage"
        found = choose("roundpipe", case, effort="quick")
        return replace(found, explanation=(why, found.dealing.why) if found.dealing else (why,))
    stages = question.architecture, settings, question.hardware
    if not judge_coarsest(*stages).fits:
        why = "it does not fit, so this is the cut that needs least host memory of those that need least of the devices"
        return _coarsest(question, why)
    try:
        cut = choose("roundpipe", case, lambda cut: _judged(question, cut).fits, effort="quick")
    except ResourceError:
        return _coarsest(question, "no cut keeps the devices' limits")
    return cut if _judged(question, cut).fits else _coarser(question, cut)


def _coarsest(question: PlanRequest, why: str) -> StageCut:
    cut = coarsest_cut(question.architecture, question.settings, question.hardware, question.analytic)
    return replace(cut, explanation=(why,))


def _judged(question: PlanRequest, cut: StageCut) -> Verdict:
    keeps_few = SCHEDULE_KINDS[question.loaded.recipe.pipeline.schedule].keeps_few
    per_round = question.num_workers if keeps_few else _per_round(question, cut)
    judged = replace(cut, microbatches_per_round=per_round)
    return judge(question.architecture, question.settings, question.hardware, question.analytic, judged)


def _coarser(question: PlanRequest, cut: StageCut) -> StageCut:
    """The fastest even cut that fits: every backward stage keeps a boundary of each microbatch on the host."""
    costs, settings = question.analytic.costs, question.settings
    count = len(costs.layers)
    most = len(coarsest_cut(question.architecture, settings, question.hardware, question.analytic).backward_stages) - 1
    widest = math.ceil((count - 2) / most)
    limits = stage_limits(question.architecture, settings, question.hardware, question.analytic)
    enough = enough_per_round(costs, question.num_workers, settings.num_microbatches, limits)
    why = "host memory is short, so this is the fastest even cut with few enough boundaries to keep"
    cuts = []
    for blocks in sorted({max(1, widest * part // 4) for part in range(1, 5)}):
        forward, backward = stages_of_blocks(count, blocks)
        for per_round in sorted({question.num_workers, enough}):
            cuts.append(StageCut(tuple(forward), tuple(backward), per_round, explanation=(why,)))
    fitting = [one for one in cuts if _judged(question, one).fits]
    return min(fitting, key=lambda one: _simulate_step(question, one).step_s, default=cut)


def _per_round(question: PlanRequest, cut: StageCut) -> int:
    """Microbatches of a round; of schedules that have no rounds, all of a step's."""
    usual = 0 if question.loaded.recipe.pipeline.binds_stages else question.num_workers
    return cut.microbatches_per_round or usual or question.settings.num_microbatches


@dataclass(frozen=True, slots=True)
class _Step:
    step_s: float
    bubble_ratio: float
    links: LinkBytes
    timeline: Timeline


def _overlaps_steps(question: PlanRequest) -> bool:
    """Whether no step waits for all of the one before."""
    on_cpu = all(device.is_cpu for device in question.hardware.devices)
    may = question.loaded.recipe.overlaps_steps(on_cpu=on_cpu)
    return may and question.num_workers > 1 and question.analytic.costs.equal_workers


def _simulate_step(question: PlanRequest, cut: StageCut) -> _Step:
    """One optimizer step. Beyond `MAX_SIMULATED_MICROBATCHES` the time grows by what two more rounds cost."""
    wanted, is_dealt = question.settings.num_microbatches, not question.loaded.recipe.pipeline.binds_stages
    rounds = max(1, _per_round(question, cut)) if is_dealt else 1
    full = wanted
    if wanted > MAX_SIMULATED_MICROBATCHES:
        surplus = wanted - MAX_SIMULATED_MICROBATCHES
        full = max(2 * rounds + question.settings.sequence_chunks, wanted - math.ceil(surplus / rounds) * rounds)
    one = _simulated(question, cut, full, num_steps=1)
    busy, alone_s = sum(busy_s(one.timeline)), makespan_s(one.timeline)
    step_s = alone_s
    if _overlaps_steps(question):
        ends_s = [makespan_s(_simulated(question, cut, full, num_steps=n).timeline) for n in (2, 4)]
        step_s = (ends_s[1] - ends_s[0]) / 2
    if full < wanted:
        fewer = _simulated(question, cut, full - 2 * rounds, num_steps=1)
        growth_s = (alone_s - makespan_s(fewer.timeline)) * (wanted - full) / (2 * rounds)
        step_s, busy = step_s + growth_s, busy * wanted / full
    bubble = 1 - busy / (question.num_workers * step_s) if step_s else 0.0
    return _Step(step_s, max(0.0, bubble), _scaled(one.links, wanted / full), one.timeline)


def _reference_s(question: PlanRequest, cut: StageCut) -> float:
    """Seconds of a step in which the base model looks at its pairs first (`train/preference.py`)."""
    if question.loaded.recipe.objective != "dpo":
        return 0.0
    costs, workers, wanted = _costs_for_links(question), question.num_workers, question.settings.num_microbatches
    covered = max((last for _, last in cut.forward_stages), default=-1)
    own = cut.forward_stages + (cut.backward_stages[:1] if covered < len(costs.layers) - 1 else ())
    once = min(wanted, SCORED_PER_WORKER * workers)
    stages = forward_stages(costs, own, cut.backward_stages, num_workers=workers, num_microbatches=once)
    schedule = build_forward(stages, num_workers=workers, num_microbatches=once)
    forward_s = makespan_s(simulate_program(lower(schedule, costs), costs))
    passes = 3 if question.settings.recompute == "none" else 4  # of a step, of which this is one more
    host_s = once * question.analytic.host_s_per_microbatch / passes
    return (forward_s + host_s) * wanted / once


def _what_binds(question: PlanRequest, step: _Step, host_s: float) -> str:
    """Where the time of a step goes: workers' arithmetic, links, interpreter."""
    workers, costs = question.num_workers, question.analytic.costs
    compute_s = step.step_s * (1 - step.bubble_ratio)
    up_s = step.links.up / workers / costs.link_bytes_per_s
    update_s = sum(layer.optimizer_s for layer in costs.layers)
    times = {
        "arithmetic": compute_s,
        "links to the workers": up_s,
        "interpreter": host_s,
        "optimizer on the host": update_s,
    }
    most = max(times, key=lambda name: times[name])
    shown = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in times.items())
    return f"{most} binds; without waiting a step would need: {shown}"


@dataclass(frozen=True, slots=True)
class _Simulated:
    timeline: Timeline
    links: LinkBytes


def _costs_for_links(question: PlanRequest) -> CostModel:
    """Of the layers, with only what is trained of those in the weight cache to upload."""
    costs, settings = question.analytic.costs, question.settings
    if not settings.weight_cache_bytes:
        return costs
    return with_cached_weights(costs, settings.weight_cache_bytes, settings.dtype_bytes)


def _simulated(question: PlanRequest, cut: StageCut, num_microbatches: int, *, num_steps: int) -> _Simulated:
    costs, staleness = _costs_for_links(question), question.settings.staleness
    workers = cut.workers or tuple(range(question.num_workers))
    pipeline = question.loaded.recipe.pipeline
    options = cut.dealing or options_of(pipeline.head_workers, pipeline.dispatch)
    if costs.worker_speed is not None:
        costs = replace(costs, worker_speed=tuple(costs.worker_speed[worker] for worker in workers))
    schedule = build_schedule(
        pipeline.schedule,
        forward_stages=cut.forward_stages,
        backward_stages=cut.backward_stages,
        num_workers=len(workers),
        rounds=Rounds(
            num_microbatches,
            per_round=cut.microbatches_per_round,
            num_steps=num_steps,
            staleness=staleness,
            options=options,
            sequence_chunks=question.settings.sequence_chunks,
        ),
        costs=costs,
    )
    program = lower(schedule, costs, staleness=staleness)
    sums = {(lane, weights): 0 for lane in (UP, DOWN) for weights in (True, False)}
    for op in program.ops:
        if op.lane in (UP, DOWN):
            sums[op.lane, op.payload in (WEIGHTS, WEIGHT_GRADIENT)] += op.num_bytes
    links = LinkBytes(sums[UP, True], sums[UP, False], sums[DOWN, True], sums[DOWN, False])
    return _Simulated(simulate_program(program, costs), links)


def _scaled(links: LinkBytes, factor: float) -> LinkBytes:
    """Bytes of a step from those of the simulated part of it: rounds repeat."""
    return LinkBytes(
        int(links.weights_up * factor),
        int(links.boundaries_up * factor),
        int(links.gradients_down * factor),
        int(links.boundaries_down * factor),
    )


def _assumptions(question: PlanRequest, cut: StageCut) -> tuple[str, ...]:
    """What was measured, what given and what assumed, one line each."""
    architecture, settings, hardware = question.architecture, question.settings, question.hardware
    lines = [
        f"model: {architecture.source}",
        *architecture.notes,
        *unproven(architecture, question.loaded.recipe),
        *hardware.notes,
    ]
    if any(not device.is_cpu for device in hardware.devices):
        lines.append(
            "assumed: layer times from the cost model; it matches published full fine-tuning on 1 to 8 RTX 4090 "
            "(float16 accumulation) within 5 % on average, all else is scaled from there"
        )
        links = sorted({device.link_bytes_per_s / 1e9 for device in hardware.devices})
        lines.append(f"assumed: {' and '.join(f'{link:.3g}' for link in links)} GB/s per link and direction")
    lines.append(f"assumed: every row has max_seq_length={settings.max_seq_length} tokens")
    limit = architecture.max_position_embeddings
    if limit is not None and settings.max_seq_length > limit:
        lines.append(
            f"note: the model was made for at most {limit} tokens, max_seq_length is {settings.max_seq_length}"
        )
    workers, per_step = question.num_workers, settings.num_microbatches
    if settings.sequence_chunks > 1:
        lines.append("assumed: every chunk of a sequence takes the same time, and keys and values no time on the links")
    elif workers > 1 and per_step < 4 * workers and cut.microbatches_per_round:
        lines.append(
            f"note: {per_step} microbatches a step are few for {workers} workers; "
            f"gradient_accumulation_steps={4 * workers} makes the bubble smaller"
        )
    return tuple(lines)


def solve_recipe(plan: Plan) -> Solution:
    """Changes that would make it fit."""
    question = plan.question
    asked = question.loaded.recipe.pipeline.weight_cache  # what `auto` takes of what is spare is in nobody's way
    settings = replace(question.settings, weight_cache_bytes=0 if asked == "auto" else asked)
    return solve(question.architecture, settings, question.hardware)
