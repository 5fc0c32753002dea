"""Refuses a run that cannot fit on this machine, before anything is loaded. No torch."""

from __future__ import annotations

from dataclasses import replace

from roundpipe_cli.costs.cost import without_unpacked
from roundpipe_cli.costs.machine import MAX_PARAMETERS_ON_CPU, host_memory, num_machines
from roundpipe_cli.errors import Problem, ResourceError
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.predict import cards_worth_using
from roundpipe_cli.planning.question import PlanRequest, ask_again, choose_tier
from roundpipe_cli.planning.unequal import describe_idle_gpus, names_of_cards, without_small_cards
from roundpipe_cli.planning.verdict import judge_coarsest
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
    assert loaded is not None and machine is not None
    if loaded.recipe.pipeline.devices != "auto" or num_machines() > 1:
        return question, None
    if question.architecture.is_guess or not machine.is_here:
        return question, None
    used = cards_worth_using(question, Answers())
    if used.num_workers == question.num_workers:
        return question, None
    names = names_of_cards(question, used)
    every = ",".join(f"cuda:{index}" for index in range(question.num_workers))
    text = f"devices: {', '.join(names)}: faster, or only so within memory, than with GPUs of less memory"
    pipeline = replace(loaded.recipe.pipeline, devices=names)
    text += f"; pipeline.devices=[{every}] takes all"
    loaded = replace(loaded, recipe=replace(loaded.recipe, pipeline=pipeline))
    return ask_again(replace(question, machine=replace(machine, devices=used.hardware.devices)), loaded), text


def check_fits(question: PlanRequest) -> None:
    """Refuse a run that cannot fit on this machine, before anything is loaded.

    Counts host memory that is available now, under a container's limit. A model whose parameters are a guess passes.

    Args:
        question: of `ask` for this machine.

    Raises:
        ResourceError: device memory, host memory or disk is too small; every number that breaks is named.
    """
    loaded = question.loaded
    if question.architecture.is_guess:
        return  # a guessed size is no reason to refuse a run
    if not question.hardware.is_here:
        return  # the recipe's GPUs are not here, which is another error than memory
    if question.is_for_lack_of_gpus and question.architecture.parameters > MAX_PARAMETERS_ON_CPU:
        return  # nor is any other GPU
    memory = host_memory()
    available = min(question.hardware.host_memory_bytes, memory.available_bytes)
    machine = replace(question.hardware, host_memory_bytes=available)
    settings = replace(question.settings, unpacks_once=False)  # what needs least
    analytic = replace(question.analytic, costs=without_unpacked(question.analytic.costs))
    if settings.method == "full" and loaded.recipe.nodes.shard_optimizer is not False:
        settings = replace(settings, num_shards=num_machines())
    verdict = judge_coarsest(question.architecture, settings, machine, analytic)
    if verdict.fits:
        return
    if loaded.recipe.weights == "auto":
        settings = choose_tier(question.architecture, settings, machine, analytic)
        verdict = judge_coarsest(question.architecture, settings, machine, analytic)
        if verdict.fits:
            return
    error = ResourceError(verdict.reasons[0])
    found = f"{format_bytes(available)} available now of {format_bytes(memory.total_bytes)} ({memory.limited_by})"
    hint = f"`roundpipe plan {loaded.path} --solve` names the cheapest changes that make it fit"
    for fewer in without_small_cards(replace(question, settings=settings, hardware=machine)):
        if judge_coarsest(fewer.architecture, settings, fewer.hardware, fewer.analytic).fits:
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
