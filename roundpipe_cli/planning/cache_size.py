"""The size of the weight cache that `weight_cache: auto` will choose, as `plan` predicts it. No torch."""

from __future__ import annotations

from dataclasses import replace

from roundpipe_cli.costs.analytic import analytic_costs
from roundpipe_cli.costs.memory import DEVICE_SHARE, spare_for_cache, whole_cache_bytes, with_cached_weights
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.planning.verdict import Verdict
from roundpipe_cli.units import format_bytes


def with_all_weights(question: PlanRequest) -> PlanRequest | None:
    """The question for GPUs that hold all weights from the start, so that stages need no room for them; None where the
    recipe does not leave it open. CPU workers read the host's weights, so for them it is the question itself."""
    gpus = [device for device in question.hardware.devices if not device.is_cpu]
    recipe, costs = question.loaded.recipe, question.analytic.costs
    if not recipe.may_hold_all_weights or costs.layers[0].name != "embed":
        return None
    if len(gpus) < question.num_workers:
        chained = recipe.overlaps_steps(on_cpu=True)
        return None if gpus or chained or question.num_workers == 1 else question
    cache_bytes = whole_cache_bytes(costs.layers)
    settings, unpacking = replace(question.settings, weight_cache_bytes=cache_bytes), question.unpacking
    if settings.unpacks_once and unpacking is not None:  # a stage is most of the model then
        settings, unpacking = replace(settings, unpacks_once=False), replace(unpacking, once=False)
        link_bytes_per_s = costs.link_bytes_per_s
        costs = analytic_costs(question.architecture, settings, question.hardware).costs
        costs = replace(costs, link_bytes_per_s=link_bytes_per_s)
    analytic = replace(question.analytic, costs=with_cached_weights(costs, cache_bytes, settings.dtype_bytes))
    return replace(question, settings=settings, analytic=analytic, unpacking=unpacking)


def has_room(question: PlanRequest, verdict: Verdict) -> bool:
    """Whether the needs in `verdict` leave free on each GPU the margin for what no memory model knows."""
    sizes = [device.memory_bytes for device in question.hardware.devices if not device.is_cpu]
    return verdict.fits and (not sizes or verdict.device.total_bytes <= DEVICE_SHARE * min(sizes))


def with_auto_cache(question: PlanRequest, verdict: Verdict) -> tuple[PlanRequest, str | None]:
    """The question with the cache in its settings, and what is kept, in words; as it is where there is none.

    Args:
        verdict: on the stages that the run will have, without a cache. `train/auto_cache.py` decides in the same way.
    """
    gpus = [device for device in question.hardware.devices if not device.is_cpu]
    pipeline = question.loaded.recipe.pipeline
    is_auto = pipeline.weight_cache == "auto" and pipeline.num_chunks == 1
    if not (is_auto and question.settings.method == "lora" and verdict.fits) or len(gpus) < question.num_workers:
        return question, None
    smallest = min(gpus, key=lambda device: device.memory_bytes)
    layers = question.analytic.costs.layers
    spare = spare_for_cache(smallest.memory_bytes, verdict.device.total_bytes, layers, share=DEVICE_SHARE)
    if not spare:
        return question, None
    whole = sum(layer.param_bytes for layer in layers)
    kept = "all" if spare >= whole else format_bytes(spare)
    text = f"weight cache (auto): {kept} of {format_bytes(whole)} of weights stay on each GPU, uploaded once in a run"
    return replace(question, settings=replace(question.settings, weight_cache_bytes=spare)), text
