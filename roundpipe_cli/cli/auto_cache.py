"""The weight cache that `weight_cache: auto` will take of a GPU's spare memory, as `plan` foresees it. No torch."""

from __future__ import annotations

from dataclasses import replace

from roundpipe_cli.cli.question import Question
from roundpipe_cli.plan.memory import CACHE_SHARE, spare_for_cache
from roundpipe_cli.plan.verdict import Verdict
from roundpipe_cli.units import format_bytes


def with_auto_cache(question: Question, verdict: Verdict) -> tuple[Question, str | None]:
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
    spare = spare_for_cache(smallest.memory_bytes, verdict.device.total_bytes, layers, share=CACHE_SHARE)
    if not spare:
        return question, None
    whole = sum(layer.param_bytes for layer in layers)
    kept = "all" if spare >= whole else format_bytes(spare)
    text = f"weight cache (auto): {kept} of {format_bytes(whole)} of weights stay on each GPU, uploaded once in a run"
    return replace(question, settings=replace(question.settings, weight_cache_bytes=spare)), text
