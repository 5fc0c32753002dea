"""`pipeline.weight_cache: auto`: weights stay on the GPUs in memory that is spare once a run's stages are settled.

Only frozen weights are worth it, which are uploaded once in a run. The first step with the stages that the run will
keep shows what it takes; what the memory model says of longer microbatches counts where it is more. Up to
`CACHE_SHARE` of the memory is then filled. If a device runs out of memory all the same, the cache is given up first.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.events import Notice
from roundpipe_cli.plan.memory import CACHE_SHARE, largest_stage_bytes, spare_for_cache
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.train.cut import Cutter
from roundpipe_cli.train.setup import Setup, Tell
from roundpipe_cli.units import format_bytes


class AutoCache:
    """Grants the cache once."""

    def __init__(self, cutter: Cutter, devices: Sequence[str], tell: Tell, *, is_open: bool) -> None:
        """
        Args:
            devices: of each worker; one that is listed twice counts the memory of both.
            is_open: whether there is anything to decide.
        """
        self._cutter, self._tell = cutter, tell
        self._shares = [devices.count(name) for name in devices]
        self._is_open = is_open
        self._most = 0
        """Microbatches of the longest step so far."""
        self.num_bytes = 0
        """Granted to each worker."""

    def observe(self, engine: Engine, result: StepResult) -> None:
        """Learn from a finished step, before the cutter does. A short one at an epoch's end has stages of its own."""
        memory_bytes = self._cutter.costs.device_memory_bytes
        if not self._is_open or memory_bytes is None:
            return
        count = 1 + max(item.action.microbatch for item in result.actions)
        self._most = max(self._most, count)
        if count < self._most or not self._cutter.is_settled:
            return
        self._is_open = False
        schedule = self._cutter.schedule(count)
        taken = max(peak // share for peak, share in zip(result.device_peak_bytes, self._shares, strict=True))
        layers = self._cutter.costs.layers
        needed = max(taken, self.modelled_bytes(schedule))
        self.num_bytes = spare_for_cache(memory_bytes, needed, layers, share=CACHE_SHARE)
        if self.num_bytes:
            self._cutter.keep_stages(schedule)
            engine.grant_weight_cache(self.num_bytes)
            whole = sum(layer.param_bytes for layer in layers)
            kept = "all" if self.num_bytes >= whole else format_bytes(self.num_bytes)
            text = f"weight cache (auto): {kept} of {format_bytes(whole)} of weights stay on each GPU"
            self._tell(Notice(f"{text}; pipeline.weight_cache=0 uploads them every time"))

    def modelled_bytes(self, schedule: Schedule) -> int:
        """What a device needs for the schedule by the memory model."""
        costs = self._cutter.costs
        slot = largest_stage_bytes(costs.layers, schedule.forward_stages, schedule.backward_stages)
        activations = (
            sum(layer.activation_bytes for layer in costs.layers[first : last + 1])
            for first, last in schedule.backward_stages
        )
        boundary = max(layer.boundary_bytes for layer in costs.layers)
        return costs.slots * slot + max(activations, default=0) + 4 * boundary

    def give_up(self, engine: Engine) -> None:
        """A device ran out of memory."""
        self._is_open = False
        if self.num_bytes:
            self.num_bytes = 0
            engine.grant_weight_cache(0)


def make_auto_cache(setup: Setup, cutter: Cutter, tell: Tell) -> AutoCache:
    """Of a run: open where the recipe leaves it to us, weights are frozen and devices have memory of their own; not
    with sequences in chunks, whose keys and values the memory model does not count."""
    pipeline = setup.recipe.pipeline
    is_open = pipeline.weight_cache == "auto" and setup.recipe.method == "lora" and setup.devices[0] != "cpu"
    is_open = is_open and pipeline.num_chunks == 1
    return AutoCache(cutter, setup.devices, tell, is_open=is_open)
