"""From a recipe and a machine to a plan: figures of the model, costs, stages, simulated step, verdict. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from roundpipe_cli.choices import SCHEDULE_KINDS
from roundpipe_cli.costs.analytic import ORDERED_BACKWARD, fused_share
from roundpipe_cli.costs.block_work import block_work
from roundpipe_cli.costs.cost import ADDING_BYTES, CostModel, LayerCost, without_bytes
from roundpipe_cli.costs.hardware import Hardware, rates_of
from roundpipe_cli.costs.memory import DEVICE_SHARE, spare_for_cache, with_cached_weights
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.errors import ResourceError
from roundpipe_cli.planning.admission import unproven
from roundpipe_cli.planning.answers import Answers, answered
from roundpipe_cli.planning.choose import case_for, choose, dealing_options, given_cut
from roundpipe_cli.planning.compare import SimulationCase, StageCut, costs_per_microbatch, make_schedule
from roundpipe_cli.planning.cuts import enough_per_round
from roundpipe_cli.planning.dealing import MIN_GAIN, deal_out
from roundpipe_cli.planning.exchange import Exchange, exchange_of
from roundpipe_cli.planning.forward_stages import forward_stages
from roundpipe_cli.planning.question import (
    Build,
    PlanRequest,
    ask,
    describe_idle_gpus,
    rows_that_keep_busy,
    without_small_cards,
)
from roundpipe_cli.planning.resident import resident_cut, with_all_weights
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.planning.unpacking import assumed_rate
from roundpipe_cli.planning.verdict import Verdict, coarsest_cut, has_room, judge, judge_coarsest, stage_limits
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.schedule.builders import SCORED_PER_WORKER, build_forward
from roundpipe_cli.schedule.program import WEIGHT_GRADIENT, WEIGHTS, Program, lower
from roundpipe_cli.schedule.simulate import simulate_program, simulated_ends
from roundpipe_cli.schedule.timeline import DOWN, UP, Timeline
from roundpipe_cli.units import counted, format_bytes, format_seconds

LAUNCHES_BIND = 0.15
"""Launches bind where devices wait for them for more than this share of their arithmetic's time (rule of thumb)."""

# One optimizer step of a recipe on a machine, simulated: its time, its bubble, and what moves over the links.

MAX_SIMULATED_MICROBATCHES = 64
"""Steps with more microbatches are extrapolated."""
EXTRAPOLATED_PER_WORKER = 4
"""Microbatches per worker from which a longer step is extrapolated, at least `MAX_SIMULATED_MICROBATCHES / 2` and at
most `MAX_SIMULATED_MICROBATCHES` together. As many are simulated, and two rounds fewer."""


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


def per_round_of(question: PlanRequest, cut: StageCut) -> int:
    """Microbatches of a round; all of the step for schedules without rounds."""
    usual = 0 if question.loaded.recipe.pipeline.binds_stages else question.num_workers
    return cut.microbatches_per_round or usual or question.settings.num_microbatches


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The figures of one optimizer step."""

    step_s: float
    bubble_ratio: float
    links: LinkBytes
    host_memory_s: float
    """Seconds in which the host's memory serves all links, gradients and updates."""
    exchange: Exchange = Exchange()
    """With other machines."""


def simulate_step(question: PlanRequest, cut: StageCut) -> SimulatedStep:
    """One optimizer step as it follows another one. Beyond `MAX_SIMULATED_MICROBATCHES` the time grows by what two more
    rounds cost. With other machines it has the sums of gradients in it."""
    wanted, costs = question.settings.num_microbatches, step_costs(question, cut)
    rounds, full = _rounds(question, cut), _num_simulated(question, cut)
    program = _program(question, cut, full)
    one = simulated_ends(program, costs)
    busy, step_s, num_bytes, host_s = sum(one.busy_s), one.makespan_s, _link_bytes(program), one.host_memory_s
    if full < wanted:
        shorter, growth = _program(question, cut, full - 2 * rounds), (wanted - full) / (2 * rounds)
        fewer = simulated_ends(shorter, costs)
        step_s, busy = step_s + growth * (one.makespan_s - fewer.makespan_s), busy * wanted / full
        host_s += growth * (host_s - fewer.host_memory_s)
        num_bytes = [
            int(most + growth * (most - less)) for most, less in zip(num_bytes, _link_bytes(shorter), strict=True)
        ]
    exchange = Exchange()
    if question.hardware.machines > 1:
        exchange = exchange_of(question, cut, simulate_program(program, costs))
        step_s += exchange.waiting_s + exchange.update_s
    bubble = 1 - busy / (question.num_workers * step_s) if step_s else 0.0
    return SimulatedStep(step_s, max(0.0, bubble), LinkBytes(*num_bytes), host_s, exchange)


def _rounds(question: PlanRequest, cut: StageCut) -> int:
    """Microbatches after which a step repeats itself, whole sequences: a round's, or with bound stages one for each
    worker."""
    binds, chunks = question.loaded.recipe.pipeline.binds_stages, question.settings.sequence_chunks
    return math.ceil((question.num_workers if binds else per_round_of(question, cut)) / chunks) * chunks


def _num_simulated(question: PlanRequest, cut: StageCut) -> int:
    """Microbatches that are simulated: those of the whole step, or fewer by whole rounds."""
    wanted, rounds = question.settings.num_microbatches, _rounds(question, cut)
    if wanted <= MAX_SIMULATED_MICROBATCHES:
        return wanted
    enough = EXTRAPOLATED_PER_WORKER * question.num_workers
    surplus = wanted - min(max(enough, MAX_SIMULATED_MICROBATCHES // 2), MAX_SIMULATED_MICROBATCHES)
    least = 2 * rounds + question.settings.sequence_chunks
    return min(wanted, max(least, wanted - math.ceil(surplus / rounds) * rounds))


def reference_s(question: PlanRequest, cut: StageCut) -> float:
    """Seconds of the forward passes before a step, which its answers are compared with (`train/preference.py`)."""
    passes = question.loaded.recipe.objective_kind.num_passes
    if not passes:
        return 0.0
    costs, workers, wanted = step_costs(question, cut), question.num_workers, question.settings.num_microbatches
    own = cut.forward_stages + (cut.backward_stages[:1] if cut.last_forward < len(costs.layers) - 1 else ())
    once = min(wanted, SCORED_PER_WORKER * workers)
    stages = forward_stages(costs, own, cut.backward_stages, num_workers=workers, num_microbatches=once)
    schedule = build_forward(stages, num_workers=workers, num_microbatches=once)
    return passes * simulated_ends(lower(schedule, costs), costs).makespan_s * wanted / once


def launches_of(question: PlanRequest, cut: StageCut) -> tuple[float, float]:
    """Seconds in which Python issues a step's operators, and in which a worker waits for its own, on average.

    Layers that no forward stage has are computed once, within the first backward stage.
    """
    issued_s = starved_s = 0.0
    for index, layer in enumerate(question.costs.layers):
        forwards = 2 if layer.recompute and index <= cut.last_forward else 1
        issued_s += forwards * layer.launches_s[0] + layer.launches_s[1]
        starved_s += forwards * layer.starved_s[0] + layer.starved_s[1]
    count, speeds = question.settings.num_microbatches, question.costs.worker_speed or (1.0,) * question.num_workers
    return count * issued_s + question.host_s_per_update, count * starved_s / sum(speeds)


def shared_costs(question: PlanRequest, cut: StageCut) -> CostModel:
    """Costs of the layers, with what visits take once in the times of their microbatches."""
    case = SimulationCase(question.costs, question.num_workers, question.settings.num_microbatches)
    return costs_per_microbatch(question.loaded.recipe.pipeline.schedule, case, cut)


def step_costs(question: PlanRequest, cut: StageCut) -> CostModel:
    """Costs of the layers in a step: those in the weight cache upload only what is trained, and what visits take once
    is shared out over their microbatches."""
    settings, costs = question.settings, shared_costs(question, cut)
    if question.hardware.machines > 1:  # where no update runs beside the next step
        costs = replace(costs, layers=tuple(replace(layer, optimizer_s=0.0) for layer in costs.layers))
    if not settings.weight_cache_bytes:
        return costs
    return with_cached_weights(costs, settings.weight_cache_bytes, settings.dtype_bytes)


def _program(question: PlanRequest, cut: StageCut, num_microbatches: int) -> Program:
    """The lowered step on all workers, also those that the cut leaves idle; to be simulated with `step_costs`."""
    costs, pipeline = step_costs(question, cut), question.loaded.recipe.pipeline
    case = SimulationCase(
        costs,
        question.num_workers,
        num_microbatches,
        options=dealing_options(pipeline),
        sequence_chunks=question.settings.sequence_chunks,
    )
    return lower(make_schedule(pipeline.schedule, cut, case), costs, after_update=True)


def _link_bytes(program: Program) -> list[int]:
    """Bytes on the links, in the order of `LinkBytes`."""
    sums = {(lane, weights): 0 for lane in (UP, DOWN) for weights in (True, False)}
    for op in program.ops:
        if op.lane in (UP, DOWN):
            sums[op.lane, op.payload in (WEIGHTS, WEIGHT_GRADIENT)] += op.num_bytes
    return list(sums.values())


# Uncertainty of a predicted step time, by what the prediction is based on.

GROUPED_PRODUCTS = ("h100", "h800", "h200", "h20", "b200")
"""Starts of the names of GPUs for which torch has grouped products of its own (sm90, sm100)."""


@dataclass(frozen=True, slots=True)
class Band:
    """A range around a prediction."""

    factor: float
    """Above 1: a step may be so many times as fast, and as slow unless `slower` is given."""
    why: str
    slower: float | None = None

    def around(self, step_s: float) -> tuple[float, float]:
        """(least, most) seconds."""
        return step_s / self.factor, step_s * (self.slower or self.factor)


MEASURED = Band(1.15, "from layer times that this run measured")
BY_RATES = Band(1.3, "from measured rates of these devices")
ON_CPU = Band(3.0, "rates of a processor are assumed")
# No GPU was measured by us yet. Published full fine-tuning of two models on 1 to 8 RTX 4090s lies within 4 % of the
# cost model (tests/costs); everything else is scaled from there by data sheets.
PUBLISHED_GPU = "rtx-4090"
FULL = Band(1.2, "full fine-tuning from data sheets")
FULL_ELSEWHERE = Band(1.3, "full fine-tuning from data sheets")
LORA = Band(1.3, "LoRA from data sheets")
EXPERTS = Band(1.3, "experts from data sheets; their kernels have run on no GPU here", slower=2.0)
# If our grouped products reach a quarter of the rate of others, a step of the shipped models takes up to 2.3 times as
# long. A product for each expert, as published runs and `kernels: reference` have it, takes 1 to 4.5 times our step to
# issue for 8 RTX 4090s at 8,192 tokens a microbatch.
EXPERTS_BY_OWN_KERNELS = Band(1.5, "experts: our kernels for them have run on no GPU", slower=4.0)


def band_of(architecture: Architecture, settings: TrainingSettings, hardware: Hardware) -> Band:
    """The band of a prediction before a run has measured its layers."""
    if all(device.measured is not None for device in hardware.devices):
        return BY_RATES
    if any(device.is_cpu for device in hardware.devices):
        return ON_CPU
    if architecture.num_experts_per_tok:
        has_own = all(device.name.startswith(GROUPED_PRODUCTS) for device in hardware.devices)
        return EXPERTS if has_own else EXPERTS_BY_OWN_KERNELS
    if settings.method == "lora":
        return LORA
    return FULL if all(device.name == PUBLISHED_GPU for device in hardware.devices) else FULL_ELSEWHERE


# The size of the weight cache that `weight_cache: auto` will choose, as `plan` predicts it. No torch.


def holding_all_weights(question: PlanRequest) -> PlanRequest | None:
    """The question for workers that hold all weights; None where the recipe does not leave it open, or they cannot."""
    whole = with_all_weights(question) if question.loaded.recipe.may_hold_all_weights else None
    if whole is None or whole.unpacking is None:
        return whole
    return replace(whole, unpacking=replace(whole.unpacking, once=whole.settings.unpacks_once))


def with_auto_cache(question: PlanRequest, verdict: Verdict) -> tuple[PlanRequest, str | None]:
    """The question with the cache in its settings, and what is kept, in words; as it is where there is none.

    Args:
        verdict: on the stages that the run will have, without a cache. `train/auto_cache.py` decides in the same way.
    """
    gpus, pipeline = question.gpus, question.loaded.recipe.pipeline
    is_auto = pipeline.weight_cache == "auto" and pipeline.num_chunks == 1
    if not (is_auto and question.settings.method == "lora" and verdict.fits) or len(gpus) < question.num_workers:
        return question, None
    smallest = min(gpus, key=lambda device: device.memory_bytes)
    layers = question.costs.layers
    spare = spare_for_cache(smallest.memory_bytes, verdict.device.total_bytes, layers, share=DEVICE_SHARE)
    if not spare:
        return question, None
    whole = sum(layer.param_bytes for layer in layers)
    kept = "all" if spare >= whole else format_bytes(spare)
    text = f"weight cache (auto): {kept} of {format_bytes(whole)} of weights stay on each GPU, uploaded once in a run"
    return replace(question, settings=replace(question.settings, weight_cache_bytes=spare)), text


RESIDENT_CUT = "each microbatch stays on one worker, and as much of it as fits needs no recompute"


@dataclass(frozen=True)
class Plan:
    """The answer of `roundpipe plan`."""

    question: PlanRequest
    cut: StageCut
    microbatches_per_round: int
    verdict: Verdict
    step_s: float
    """From the end of the step before to its own, as a run measures it: updates overlap the next step's forward."""
    launches_s: float
    """Part of `step_s` in which a worker waits for the launches of what it computes, on average."""
    bubble_ratio: float
    links: LinkBytes
    exchange: Exchange
    """With other machines."""
    explanation: tuple[str, ...]
    assumptions: tuple[str, ...]
    needs_s: Mapping[str, float]
    """Seconds of a step that workers, launches by the interpreter, links and optimizer each need if nothing waits."""

    @property
    def waiting_s(self) -> float:
        """Part of `step_s` in which a worker has nothing to compute, on average: the bubble but for the exchange."""
        return self.bubble_ratio * self.step_s - self.exchange.waiting_s

    @property
    def arithmetic_s(self) -> float:
        """The rest of `step_s`: a worker computes."""
        return (1 - self.bubble_ratio) * self.step_s - self.launches_s

    @property
    def parts(self) -> str:
        """The parts of `step_s` for a worker on average, in words that reports use as well."""
        found = {"arithmetic": self.arithmetic_s, "launches": self.launches_s, "waiting": self.waiting_s}
        if self.question.hardware.machines > 1:
            found["exchange between machines"] = self.exchange.waiting_s
        return ", ".join(f"{name} {format_seconds(max(0.0, seconds))}" for name, seconds in found.items())

    @cached_property
    def waiting_for_rows_s(self) -> float:
        """Part of `waiting_s` that is left where nothing is moved or updated: rows that do not fill all workers."""
        question = self.question
        step = simulate_step(replace(question, costs=without_bytes(question.costs)), self.cut)
        return min(self.waiting_s, step.bubble_ratio * step.step_s - step.exchange.waiting_s)

    @property
    def attention_s(self) -> float:
        """Part of `arithmetic_s` in which a GPU multiplies for attention itself, by formula."""
        question, settings = self.question, self.question.settings
        if len(question.gpus) < question.num_workers:
            return 0.0
        architecture, hardware, flops = question.architecture, question.hardware, 0.0
        rates = rates_of(hardware.devices[0], settings.dtype, "fp16" if settings.float16_accumulation else "fp32")
        works = {block: block_work(architecture, block, settings) for block in set(architecture.blocks)}
        for index, block in enumerate(architecture.blocks, 1):
            again = question.costs.layers[index].recompute and index <= self.cut.last_forward
            flops += (2 if again else 1) * works[block].forward.attention_flops + works[block].backward.attention_flops
        speeds = question.costs.worker_speed or (1.0,) * question.num_workers
        return settings.num_microbatches * rates.flops_s(flops, "attention") / sum(speeds)

    @property
    def binds(self) -> str:
        """Name in `needs_s` of what binds a step."""
        return what_binds(self.needs_s, self.launches_s)

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of one simulated step of at most `MAX_SIMULATED_MICROBATCHES` microbatches."""
        program = _program(self.question, self.cut, _num_simulated(self.question, self.cut))
        return simulate_program(program, step_costs(self.question, self.cut))

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """Costs of each layer for one microbatch."""
        return shared_costs(self.question, self.cut).layers

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all machines train in a second."""
        return self.question.tokens_per_step / self.step_s

    @property
    def tokens_per_s_range(self) -> tuple[float, float]:
        """(least, most), as `band` has it."""
        least_s, most_s = self.band.around(self.step_s)
        tokens = self.tokens_per_s * self.step_s
        return tokens / most_s, tokens / least_s

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        """None where the machine's price is not known."""
        price, machines = self.question.hardware.price, self.question.hardware.machines
        return None if price is None else machines * price / 3600 * 1e9 / self.tokens_per_s

    @property
    def warning(self) -> str | None:
        """Sentence for the user where the recipe's dealing costs the host much; None: it does not."""
        pipeline, costs = self.question.loaded.recipe.pipeline, self.question.costs
        if pipeline.dispatch != "earliest_free" or costs.has_frozen_blocks or not costs.host_bytes_per_s:
            return None
        down_bytes = self.links.gradients_down
        added_s = down_bytes / costs.leaving_bytes * ADDING_BYTES / costs.host_bytes_per_s
        return (
            f"dispatch: earliest_free sends the gradients of all trained weights to the host for every microbatch, "
            f"{format_bytes(down_bytes)} a step, which takes {format_seconds(added_s)} to add them; "
            "dispatch: auto sends sums"
        )

    @property
    def band(self) -> Band:
        """How far `step_s` and `tokens_per_s` may be off."""
        return band_of(self.question.architecture, self.question.settings, self.question.hardware)


def priced(plan: Plan, price: float | None) -> Plan:
    """The plan on machines of so many dollars per hour each; None: as its description says."""
    question = plan.question
    hardware = replace(question.hardware, price=question.hardware.price if price is None else price)
    return replace(plan, question=replace(question, hardware=hardware))


def make_plan(
    loaded: LoadedRecipe,
    hardware: str | Hardware | None = None,
    build: Build | None = None,
    answers: Answers | None = None,
) -> Plan:
    """Cut the layers, simulate a step, and judge whether it fits; without the GPUs of less memory than others where
    only that fits, or is faster.

    Args:
        hardware, build, answers: as of `ask`.

    Raises:
        RefusedError: no such model or hardware, or stages of the recipe that do not cover the layers.
    """
    return best_plan(ask(loaded, hardware, build=build, answers=answers))[1]


def cards_worth_using(question: PlanRequest) -> PlanRequest:
    """The question for the devices that its plan uses: all, or the GPUs of more memory."""
    return best_plan(question)[0] if any(without_small_cards(question)) else question


def best_plan(question: PlanRequest) -> tuple[PlanRequest, Plan]:
    """The plan, and the question for the devices that it uses. Those that the recipe lists are all used."""
    best = _plan(question)
    asked, advice = question, []
    for fewer in without_small_cards(question):
        if best.verdict.fits and fewer.least_step_s >= best.step_s:
            continue
        other = _plan(fewer)
        if other.verdict.fits and (not best.verdict.fits or other.step_s < best.step_s):
            why = describe_idle_gpus(question, fewer, fits=best.verdict.fits)
            if question.lists_devices:
                advice = [why]
            else:
                asked, best = fewer, replace(other, explanation=(why, *other.explanation))
    return asked, replace(best, explanation=(*advice, *best.explanation))


def _plan(question: PlanRequest) -> Plan:
    """The plan for all devices of the question's machine."""
    question, cut, verdict, step, kept = decide(question)
    issued_s, launches_s = launches_of(question, cut)
    pairs_s = reference_s(question, cut)
    step_s = step.step_s + pairs_s
    needs_s = _needs_s(question, step, issued_s, launches_s, backward_s=_backward_s(question, cut))
    reference = f"the base model's forward, which answers are compared with: {format_seconds(pairs_s)} of a step"
    return Plan(
        question=question,
        cut=cut,
        microbatches_per_round=per_round_of(question, cut),
        verdict=verdict,
        step_s=step_s,
        launches_s=launches_s,
        bubble_ratio=step.bubble_ratio,
        links=step.links,
        exchange=step.exchange,
        explanation=(
            *cut.explanation,
            *filter(None, [kept]),
            _describe_needs(needs_s, launches_s),
            *([reference] if pairs_s else []),
        ),
        assumptions=_assumptions(question, cut),
        needs_s=needs_s,
    )


def decide(question: PlanRequest) -> tuple[PlanRequest, StageCut, Verdict, SimulatedStep, str | None]:
    """The stages of a step, for `plan` and `bench`; the question then has the weight cache, which the line names."""
    whole = holding_all_weights(question)
    cut = _known_cut(question)
    verdict = _judged(question, cut)
    question, kept = with_auto_cache(question, verdict)
    if kept is not None:
        verdict = _judged(question, cut)
    step = known_step(question, cut)
    # Of two ways that send every stage to several workers, the one that does so once.
    gain = 0.0 if cut.dealing is not None and cut.dealing.splits_stages else MIN_GAIN
    resident = _resident(whole, step.step_s * (1 - gain) if verdict.fits else math.inf)
    if resident is not None:
        question, cut, verdict, step = resident
        held = question.settings.weight_cache_bytes
        if held:
            kept = f"weight cache (auto): all {format_bytes(held)} of weights stay on each GPU, uploaded once in a run"
    return question, cut, verdict, step, kept


def _resident(
    question: PlanRequest | None, streamed_s: float
) -> tuple[PlanRequest, StageCut, Verdict, SimulatedStep] | None:
    """Stages for GPUs that hold all weights, if those fit and a step is faster so than `streamed_s`."""
    if question is None:
        return None

    def keeps(cut: StageCut) -> bool:
        return has_room(question, _judged(question, cut))

    found = resident_cut(question.costs, question.num_workers, keeps)
    if found is None:
        return None
    cut = replace(found, explanation=(RESIDENT_CUT,))
    step = known_step(question, cut)
    return (question, cut, _judged(question, cut), step) if step.step_s < streamed_s else None


def stage_case(question: PlanRequest) -> SimulationCase:
    """The question to `choose` for this recipe and machine, as `plan` and `bench` ask it."""
    recipe, counts = question.loaded.recipe, (question.num_workers, question.settings.num_microbatches)
    stay = not question.gpus and recipe.may_hold_all_weights and question.num_workers > 1
    return case_for(recipe.pipeline, question.costs, counts, stage_limits(question), weights_stay=stay)


def _figures(question: PlanRequest) -> tuple[object, ...]:
    """Everything that the stages and the time of a step depend on."""
    return question.loaded.recipe, question.architecture, question.settings, question.hardware, question.costs


def _known_cut(question: PlanRequest) -> StageCut:
    if given_cut(question.loaded.recipe.pipeline, question.num_workers) is not None:
        return _cut(question)
    return answered(question.answers, ("stages", _figures(question)), lambda: _cut(question), StageCut)


def known_step(question: PlanRequest, cut: StageCut) -> SimulatedStep:
    """One step as `simulate_step` has it, remembered."""
    asked = "step", _figures(question), cut
    return answered(question.answers, asked, lambda: simulate_step(question, cut), SimulatedStep)


def _cut(question: PlanRequest) -> StageCut:
    """The recipe's own stages where it has them, the planner's otherwise."""
    pipeline, settings = question.loaded.recipe.pipeline, question.settings
    given, case = given_cut(pipeline, question.num_workers), stage_case(question)
    if given is not None and pipeline.binds_stages:
        return given
    if given is not None:
        return replace(given, microbatches_per_round=_longest_round(question, given))
    if pipeline.binds_stages:
        return choose(pipeline.schedule, case, effort="quick")
    if settings.sequence_chunks > 1:
        why = f"{settings.sequence_chunks} chunks a sequence: stages of about equal time, the head alone in its stage"
        found = choose("roundpipe", case, effort="quick")
        return replace(found, explanation=(why, found.dealing.why) if found.dealing else (why,))
    if not judge_coarsest(question).fits:
        why = "it does not fit, so this is the cut that needs least host memory of those that need least of the devices"
        return replace(coarsest_cut(question), explanation=(why,))

    def keeps(cut: StageCut) -> bool:
        return _judged(question, cut).fits

    finest = StageCut(*even_cut(len(question.costs.layers), 1, 1), question.num_workers)
    try:  # a search whose stages the host has no room for in any round would be in vain
        cut = choose("roundpipe", case, keeps, effort="quick") if keeps(finest) else finest
    except ResourceError:
        return replace(coarsest_cut(question), explanation=("no cut keeps the devices' limits",))
    if settings.weights_on_disk:  # the search sees little of uploads, which bind there
        return _coarser(question, cut)
    fits, whole = keeps(cut), replace(cut, microbatches_per_round=settings.num_microbatches)
    if fits and (keeps(whole) or known_step(question, cut).bubble_ratio < 2 * MIN_GAIN):
        return cut
    least = (cut.microbatches_per_round or 0) + 1 if fits else 0
    return deal_out(_coarser(question, cut, least_round=least), case, keeps)


def _judged(question: PlanRequest, cut: StageCut) -> Verdict:
    keeps_few = SCHEDULE_KINDS[question.loaded.recipe.pipeline.schedule].keeps_few
    per_round = question.num_workers if keeps_few else per_round_of(question, cut)
    return judge(question, replace(cut, microbatches_per_round=per_round))


def _coarser(question: PlanRequest, cut: StageCut, *, least_round: int = 0) -> StageCut:
    """The fastest of `cut` and coarser even ones that fit: every backward stage keeps a boundary of each microbatch.

    Args:
        least_round: what shorter rounds would do is known; 0: it is not.
    """
    count = len(question.costs.layers)
    widest = math.ceil((count - 2) / (len(coarsest_cut(question).backward_stages) - 1))
    per_step, limits = question.settings.num_microbatches, stage_limits(question)
    enough = enough_per_round(question.costs, question.num_workers, per_step, limits)
    why = "host memory is short, so this is the fastest even cut with few enough boundaries to keep, and uploads"
    steps: dict[StageCut, float] = {}

    def step_s(one: StageCut) -> float:
        """Seconds of a step, infinite where it does not fit."""
        if one not in steps:
            verdict = _judged(question, one)
            steps[one] = math.inf
            if verdict.fits:
                steps[one] = known_step(with_auto_cache(question, verdict)[0], one).step_s
        return steps[one]

    def even(shape: tuple[int, ...]) -> StageCut:
        """The cut by (blocks of a forward stage, of a backward stage, beside the head, microbatches per round)."""
        return StageCut(*even_cut(count, *shape[:2], beside_head=shape[2]), shape[3], explanation=(why,))

    def longest(blocks: int) -> int:
        return _longest_round(question, even((blocks, blocks, 0, 1)))

    sizes = sorted({max(1, widest * part // 4) for part in range(1, 5)})
    rounds, shapes = sorted({question.num_workers, enough}), list[tuple[int, ...]]()
    shapes += [(blocks, blocks, 0, size) for blocks in sizes for size in rounds]
    if least_round:  # each takes as long as the whole search; the finest of them have won
        shapes = [(blocks, blocks, 0, longest(blocks)) for blocks in sizes]
        shapes = [shape for shape in shapes if shape[3] >= least_round][:2]
    if not shapes:
        return cut
    best = min(shapes, key=lambda shape: step_s(even(shape)))
    changes = (2, 1), (3, longest(best[1])), (0, best[0] + 1)
    for place, value in changes:  # what may gain, one after the other
        best = min(best, (*best[:place], value, *best[place + 1 :]), key=lambda shape: step_s(even(shape)))
    return min(cut, even(best), key=step_s)


def _longest_round(question: PlanRequest, cut: StageCut) -> int:
    """Microbatches of each of the fewest equal rounds whose boundaries the host has room for."""
    total, chunks = question.settings.num_microbatches, question.settings.sequence_chunks
    least = -(-question.num_workers // chunks) * chunks
    sizes = [-(-total // (chunks * rounds)) * chunks for rounds in range(1, max(1, total // least) + 1)]
    fits = (size for size in sizes if _judged(question, replace(cut, microbatches_per_round=size)).fits)
    return next(fits, min(least, total))


def _needs_s(
    question: PlanRequest, step: SimulatedStep, issued_s: float, launches_s: float, *, backward_s: float
) -> dict[str, float]:
    workers, costs = question.num_workers, question.costs
    updates_s = sum(layer.optimizer_s for layer in costs.layers)
    return {
        "arithmetic": step.step_s * (1 - step.bubble_ratio) - launches_s,
        "launches": issued_s,
        "links to the workers": step.links.up / workers / costs.link_bytes_per_s,
        "optimizer on the host": updates_s,
        "memory of the host": step.host_memory_s,
        "updates before backward": updates_s + backward_s,
        **({"network": step.exchange.network_s} if question.hardware.machines > 1 else {}),
    }


def _backward_s(question: PlanRequest, cut: StageCut) -> float:
    """Seconds of all backward stages for a worker on average. None begins before the last blocks are updated, which are
    so after all others, the host updating layers one at a time."""
    costs, each_s = step_costs(question, cut), 0.0
    for index, layer in enumerate(costs.layers):
        each_s += layer.backward_s + (layer.forward_s if layer.recompute or index > cut.last_forward else 0.0)
    return question.settings.num_microbatches * each_s / sum(costs.worker_speed or (1.0,) * question.num_workers)


def what_binds(needs_s: Mapping[str, float], launches_s: float) -> str:
    """The name with most seconds, of almost equal ones the first; launches if they lengthen the arithmetic by
    `LAUNCHES_BIND` of it."""
    if launches_s > LAUNCHES_BIND * needs_s["arithmetic"]:
        return "launches"
    return next(name for name, seconds in needs_s.items() if 1.01 * seconds >= max(needs_s.values()))


def _describe_needs(needs_s: Mapping[str, float], launches_s: float) -> str:
    most = what_binds(needs_s, launches_s)
    shown = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in needs_s.items())
    return f"{most} bind{'' if most[-1] == 's' else 's'}; without waiting a step would need: {shown}"


def _assumptions(question: PlanRequest, cut: StageCut) -> tuple[str, ...]:
    architecture, settings, hardware = question.architecture, question.settings, question.hardware
    lines = [
        f"model: {architecture.source}",
        *architecture.notes,
        *question.choices,
        *([question.unpacking.describe()] if question.unpacking is not None else []),
        *unproven(architecture, question.loaded.recipe),
        *hardware.notes,
    ]
    links = sorted({device.link_bytes_per_s / 1e9 for device in hardware.devices})
    speeds = f"{' and '.join(f'{link:.3g}' for link in links)} GB/s per link and direction"
    if question.gpus and all(device.measured for device in hardware.devices):
        lines.append(f"measured: {speeds}")
    elif question.gpus:
        lines.append(
            "assumed: layer times from the cost model; it matches published full fine-tuning on 1 to 8 RTX 4090 "
            "(float16 accumulation) within 5 % on average, all else is scaled from there"
        )
        if question.loaded.recipe.kernels == "auto":
            share = fused_share(architecture, settings, hardware)
            lines.append(
                "assumed: operators move what transformers' and PEFT's own move, as in the published runs; with what "
                f"kernels: auto saves blocks would take {share:.2f}x (Qwen3-8B's on an H100: LoRA 0.66x, full 0.77x)"
            )
        if settings.dtype == "float16" and settings.float16_accumulation:
            lines.append("assumed: float16 products that add up in float16, as float16_accumulation says; not measured")
        elif settings.dtype == "float16" and hardware.accumulate == "fp16":
            lines.append(
                "assumed: float16 products that add up in float16 (accumulate=fp16); a run does so only with "
                "float16_accumulation: true"
            )
        if settings.deterministic:
            lines.append(
                f"assumed: deterministic: attention's backward takes {ORDERED_BACKWARD:g} times as long (arXiv "
                "2601.21824), nothing else longer; not measured"
            )
        lines += assumed_rate(settings.packed_as)
        lines.append(f"assumed: {speeds}")
    lines.append(f"assumed: every row has max_seq_length={settings.max_seq_length} tokens")
    limit = architecture.max_position_embeddings
    if limit is not None and settings.max_seq_length > limit:
        lines.append(
            f"note: the model was made for at most {limit} tokens, max_seq_length is {settings.max_seq_length}"
        )
    if settings.sequence_chunks > 1:
        lines.append("assumed: every chunk of a sequence takes the same time, and keys and values no time on the links")
    elif cut.microbatches_per_round and (rows := rows_that_keep_busy(question)) is not None:
        enough = rows // question.loaded.recipe.micro_batch_size
        lines.append(
            f"note: a step of {counted(settings.num_microbatches, 'microbatch')} is short for "
            f"{counted(question.num_workers, 'worker')}; gradient_accumulation_steps={enough} makes the bubble smaller"
        )
    return tuple(lines)
