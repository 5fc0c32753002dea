"""A run's own plan: refused where it cannot fit, beside other schedules in `bench`, and beside what was measured."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from roundpipe_cli.choices import SCHEDULE_KINDS, ScheduleName
from roundpipe_cli.costs.analytic import Case
from roundpipe_cli.costs.cost import without_unpacked
from roundpipe_cli.costs.machine import host_memory, is_large_for_cpu, process_bytes
from roundpipe_cli.costs.memory import with_cached_weights
from roundpipe_cli.errors import Problem, RefusedError, ResourceError
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.compare import SimulationCase, StageCut
from roundpipe_cli.planning.predict import cards_worth_using, decide, holding_all_weights, stage_case, with_auto_cache
from roundpipe_cli.planning.question import (
    PlanRequest,
    ask_again,
    choose_tier,
    describe_idle_gpus,
    names_of_cards,
    on_devices,
    with_cards_of,
    without_small_cards,
)
from roundpipe_cli.planning.solve import best_remedies, longest_sequences
from roundpipe_cli.planning.verdict import judge, judge_coarsest
from roundpipe_cli.recipe.schema import LENGTH_KEY, Recipe
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.torchrun import this_process
from roundpipe_cli.units import format_bytes


def leave_small_cards(question: PlanRequest) -> tuple[PlanRequest, str | None]:
    """The question for the GPUs that `plan` uses, where some have too little memory to help, and a notice of that.

    Only where the recipe leaves the devices open; several machines use all of theirs.

    Args:
        question: of `ask` for this machine.

    Raises:
        RefusedError: the recipe, with these devices.
    """
    loaded, machine = question.given, question.machine
    is_open = loaded.recipe.pipeline.devices == "auto" and this_process().count == 1
    if not is_open or question.architecture.is_guess or not machine.is_here:
        return question, None
    used = cards_worth_using(replace(question, answers=Answers()))
    if used.num_workers == question.num_workers:
        return question, None
    names = names_of_cards(question, used)
    every = ",".join(f"cuda:{index}" for index in range(question.num_workers))
    text = f"devices: {', '.join(names)}: faster, or only so within memory, than with GPUs of less memory"
    pipeline = replace(loaded.recipe.pipeline, devices=names)
    text += f"; pipeline.devices=[{every}] takes all"
    loaded = replace(loaded, recipe=replace(loaded.recipe, pipeline=pipeline))
    return ask_again(replace(question, machine=replace(machine, devices=used.hardware.devices)), loaded), text


def maps_weights(question: PlanRequest) -> bool:
    """Whether a run maps its frozen weights from disk: they fit the memory that is free now, with what this process has
    of it, only so. `plan` says it for all of the machine's memory."""
    return _with_free_memory(question, host_memory().available_bytes + process_bytes()).settings.weights_on_disk


def _with_free_memory(question: PlanRequest, free_bytes: int) -> Case:
    """The least that the run needs, on so much host memory; weights mapped from disk if only that fits."""
    machine = replace(question.hardware, host_memory_bytes=min(question.hardware.host_memory_bytes, free_bytes))
    if not this_process().is_first:  # the first of several machines alone writes checkpoints and the result
        machine = replace(machine, disk_free_bytes=None)
    settings = replace(question.settings, unpacks_once=False)
    if settings.method == "full" and question.loaded.recipe.nodes.shard_optimizer is not False:
        settings = replace(settings, num_shards=this_process().count)
    case = Case(question.architecture, settings, machine, without_unpacked(question.costs))
    return choose_tier(case) if question.loaded.recipe.weights == "auto" else case


def check_fits(question: PlanRequest) -> None:
    """Refuse a run that cannot fit on this machine, before anything is loaded.

    Counts host memory that is available now, under a container's limit. A model whose parameters are a guess passes.

    Args:
        question: of `ask` for this machine.

    Raises:
        ResourceError: device memory, host memory or disk is too small; every number that breaks is named.
    """
    loaded = question.loaded
    if question.architecture.is_guess or not question.hardware.is_here:
        return  # a guessed size is no reason to refuse a run, and that the recipe's GPUs are not here is another error
    if question.is_for_lack_of_gpus and is_large_for_cpu(question.hardware, question.architecture.parameters):
        return  # nor is any other GPU
    memory = host_memory()
    case = _with_free_memory(question, memory.available_bytes)
    machine, available = case.hardware, case.hardware.host_memory_bytes
    verdict = judge_coarsest(case)
    if verdict.fits:
        return
    error = ResourceError(verdict.reasons[0])
    found = f"{format_bytes(available)} available now of {format_bytes(memory.total_bytes)} ({memory.limited_by})"
    as_found = replace(question.machine, host_memory_bytes=available)
    here = replace(question, hardware=machine, machine=as_found, answers=Answers())
    if loaded.length_note is not None and (fitting := longest_sequences(here)):
        found = f"{found}; {loaded.length_note}"
        best = f"{LENGTH_KEY}={fitting[''][0]}, the most that fits: `long_rows` says what happens to longer rows"
    else:
        best = "; ".join(change.what for change in best_remedies(here, None))
    hint = f"`roundpipe plan {shlex.quote(str(loaded.path))} --solve` names more changes that make it fit"
    hint = f"{best}; {hint}" if best else "no change of the recipe and no smaller model that the tool knows fits here"
    for fewer in without_small_cards(here):
        if judge_coarsest(fewer).fits:
            hint = f"{describe_idle_gpus(question, fewer, fits=False)}; {hint}"
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


def reason_against(asked: PlanRequest, left: Sequence[int]) -> str | None:
    """Why a run cannot go on with the devices of these workers alone; None: it can, as far as is known.

    Args:
        asked: when the run began, for all of its workers.
    """
    devices = asked.hardware.devices
    if asked.architecture.is_guess or not asked.hardware.is_here or max(left) >= len(devices):
        return None
    fewer = on_devices(asked, tuple(devices[worker] for worker in left))
    verdict = judge_coarsest(replace(fewer, settings=replace(fewer.settings, unpacks_once=False)))
    return next(iter(verdict.short_reasons), None)


# Predictions for the stages that a run used, for the comparison at its end.


def planned_bytes(
    asked: PlanRequest, recipe: Recipe, schedules: Sequence[Schedule], holds_all: bool
) -> list[dict[str, int]]:
    """Predicted device and host bytes of each schedule; none for devices that `plan` has no figures for.

    Args:
        asked: when the run began.
        recipe: as the run resolved it, without `auto` where that is decided once, and with the longest row that it had.
        holds_all: the schedules are for GPUs that hold all weights.
    """
    try:
        question = ask_again(asked, replace(asked.loaded, recipe=recipe))
    except RefusedError:
        return []
    if not question.hardware.is_here:
        return []
    whole, found = holding_all_weights(question) if holds_all else None, []
    for schedule in schedules:
        cut = StageCut(schedule.forward_stages, schedule.backward_stages, schedule.microbatches_per_round)
        verdict = judge(whole or question, cut)
        if whole is None:  # there may be room for a cache
            cached, kept = with_auto_cache(question, verdict)
            verdict = judge(cached, cut) if kept else verdict
        found.append({"device_peak_bytes": verdict.device.total_bytes, "host_bytes": verdict.host.total_bytes})
    return found


# The schedules that `bench` compares on a recipe, each with the stages and costs that `plan` has for it. No torch.


def contender(own: PlanRequest, name: ScheduleName) -> tuple[StageCut, SimulationCase, tuple[str, ...]]:
    """A schedule as `plan` sees the recipe with it and the same microbatches: its stages, the case to simulate, without
    the GPUs of less memory where `plan` leaves them out, and the reasons why it does not fit.

    Args:
        own: the recipe as it stands, on the devices to use.
    """
    question = own
    if name != own.loaded.recipe.pipeline.schedule:
        loaded = replace(own.loaded, recipe=with_schedule(own.loaded.recipe, name))
        least_bytes = min(device.memory_bytes for device in own.hardware.devices)
        question = with_cards_of(ask_again(own, loaded), least_bytes)
    question, cut, verdict, _, _ = decide(question)
    settings, costs = question.settings, question.costs
    if settings.weight_cache_bytes:
        costs = with_cached_weights(costs, settings.weight_cache_bytes, settings.dtype_bytes)
    return cut, replace(stage_case(question), costs=costs), verdict.short_reasons


def with_schedule(recipe: Recipe, name: ScheduleName) -> Recipe:
    """The recipe with another schedule; stages that it gives, and dealings that the schedule lacks, are left out."""
    pipeline = recipe.pipeline
    if name == pipeline.schedule:
        return recipe
    pipeline = replace(pipeline, schedule=name, forward_stages="auto", backward_stages="auto")
    if SCHEDULE_KINDS[name].binds_stages:
        pipeline = replace(pipeline, head_workers="auto", dispatch="auto")
    return replace(recipe, pipeline=pipeline)
