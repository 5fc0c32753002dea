"""`pipeline.weight_cache: auto`: weights stay on the GPUs in memory that is spare once a run's stages are settled.

Only frozen weights are worth it, which are uploaded once in a run. The first step with the stages that the run would
keep shows what it takes; what the memory model says of longer microbatches counts where it is more. Up to
`DEVICE_SHARE` of the memory is then filled. Where all weights fit, so that stages need no room for them, and other
stages are then faster (`planning/resident.py`), the run changes to them. If a device still runs out of memory,
the cache is given up first, and such stages with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_cli.costs.cost import CostModel, StageRange, without_unpacked
from roundpipe_cli.costs.machine import num_machines
from roundpipe_cli.costs.memory import (
    DEVICE_SHARE,
    largest_stage_bytes,
    spare_for_cache,
    whole_cache_bytes,
    with_cached_weights,
)
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.events import Notice, Tell
from roundpipe_cli.planning.adaptive import AdaptivePlanner
from roundpipe_cli.planning.choose import MIN_GAIN
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule
from roundpipe_cli.planning.resident import DEALING, resident_cut
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import makespan_s
from roundpipe_cli.train.setup import Setup
from roundpipe_cli.units import format_bytes


class AutoCache:
    """Decides once how large the cache is."""

    def __init__(
        self,
        planner: AdaptivePlanner,
        devices: Sequence[str],
        tell: Tell,
        *,
        is_open: bool,
        trained_bytes: int | None = None,
    ) -> None:
        """
        Args:
            devices: of each worker; one that is listed twice counts the memory of both.
            is_open: whether there is anything to decide.
            trained_bytes: of a trained weight; None: stages stay as they are, even if all weights fit.
        """
        self._planner, self._tell, self._trained_bytes = planner, tell, trained_bytes
        self._shares = [devices.count(name) for name in devices]
        self._is_open = is_open
        self._most = 0
        """Microbatches of the longest step so far."""
        self.num_bytes = 0
        """Bytes of the cache of each worker."""
        self.holds_all = False
        """Whether stages are cut for devices that hold all weights."""
        self._unpacks_once = any(layer.whole_bytes for layer in planner.costs.layers)
        """Whether a stage's packed weights stay unpacked for a visit, with the usual stages."""

    @property
    def spare(self) -> str | None:
        """Name of the optional part of a device's memory that `give_up` drops first; None: there is none."""
        if self.num_bytes:
            return "the weight cache; pipeline.weight_cache=0 never has one"
        return "packed weights that stay unpacked for a visit" if self._unpacks_once else None

    @property
    def is_open(self) -> bool:
        """Whether the size is still undecided."""
        return self._is_open

    def observe(self, engine: Engine, result: StepResult) -> None:
        """Learn from a finished step, before the planner does. A short step at an epoch's end has other stages."""
        memory_bytes = self._planner.costs.device_memory_bytes
        if not self._is_open or memory_bytes is None:
            return
        count = 1 + max(item.action.microbatch for item in result.actions)
        self._most = max(self._most, count)
        if count < self._most or not self._planner.is_settled:
            return
        self._is_open = False
        schedule = self._planner.schedule(count)
        taken = max(peak // share for peak, share in zip(result.device_reserved_bytes, self._shares, strict=True))
        costs = self._planner.costs
        modelled = modelled_bytes(costs, schedule.forward_stages, schedule.backward_stages)
        if self._hold_all(engine, schedule, max(0, taken - modelled)):
            return
        layers, needed = costs.layers, max(taken, modelled)
        self.num_bytes = spare_for_cache(memory_bytes, needed, layers, share=DEVICE_SHARE)
        if self.num_bytes:
            self._planner.keep_stages(schedule)
            engine.grant_weight_cache(self.num_bytes)
            whole = sum(layer.param_bytes for layer in layers)
            kept = "all" if self.num_bytes >= whole else format_bytes(self.num_bytes)
            text = f"weight cache (auto): {kept} of {format_bytes(whole)} of weights stay on each GPU"
            self._tell(Notice(f"{text}; pipeline.weight_cache=0 uploads them every time"))

    def _hold_all(self, engine: Engine, streamed: Schedule, unexplained_bytes: int) -> bool:
        """Change to stages for devices that hold all weights, if they have room for those and a step is faster so.

        Args:
            streamed: with the stages of devices that do not.
            unexplained_bytes: what a step with those took beyond the memory model.
        """
        usual = self._planner.costs
        if self._trained_bytes is None or usual.layers[0].name != "embed":
            return False
        cache_bytes, num_workers = whole_cache_bytes(usual.layers), streamed.num_workers
        costs = with_cached_weights(without_unpacked(usual), cache_bytes, self._trained_bytes)
        room = int(DEVICE_SHARE * (usual.device_memory_bytes or 0)) - cache_bytes - unexplained_bytes

        def keeps(partition: StageCut) -> bool:
            return modelled_bytes(costs, partition.forward_stages, partition.backward_stages) <= room

        partition = resident_cut(costs, num_workers, keeps)
        if partition is None:
            return False
        schedule = make_schedule("roundpipe", partition, SimulationCase(costs, num_workers, streamed.num_microbatches))
        if makespan_s(simulate(schedule, costs)) >= (1 - MIN_GAIN) * makespan_s(simulate(streamed, usual)):
            return False
        self.num_bytes, self.holds_all = cache_bytes, True
        self._planner.keep_stages(schedule, costs, DEALING)
        engine.grant_weight_cache(cache_bytes)
        engine.unpack_per_visit(False)
        text = f"weight cache (auto): all {format_bytes(cache_bytes)} of weights stay on each GPU"
        if self._unpacks_once:
            text += " (unpacked for each microbatch and pass)"
        self._tell(Notice(f"{text}, and each microbatch on one; pipeline.weight_cache=0 uploads them every time"))
        return True

    def give_up(self, engine: Engine) -> None:
        """Drop the cache: a device ran out of memory. If stages relied on it, go back to streamed stages."""
        self._is_open = self.holds_all
        if self.holds_all:
            self.keep_usual_stages()
            self._planner.release_stages()
            engine.unpack_per_visit(self._unpacks_once)
        if self.num_bytes:
            self.num_bytes = 0
            engine.grant_weight_cache(0)
        else:
            self._unpacks_once = False
            engine.unpack_per_visit(False)

    def keep_usual_stages(self) -> None:
        """Never use stages that need all weights: a device has run out of memory, now or in an earlier run."""
        self._trained_bytes, self.holds_all = None, False


def modelled_bytes(
    costs: CostModel, forward_stages: Sequence[StageRange], backward_stages: Sequence[StageRange]
) -> int:
    """Memory that a device needs for these stages by the memory model."""
    slot = largest_stage_bytes(costs.layers, forward_stages, backward_stages)
    visits = [sum(layer.visit_bytes for layer in costs.layers[first : last + 1]) for first, last in backward_stages]
    visits += [sum(layer.whole_bytes for layer in costs.layers[first : last + 1]) for first, last in forward_stages]
    boundary = max(layer.boundary_bytes for layer in costs.layers)
    return costs.slots * slot + max(visits, default=0) + 4 * boundary


def make_auto_cache(setup: Setup, planner: AdaptivePlanner, tell: Tell) -> AutoCache:
    """The cache of a run: open where the recipe leaves it to us, weights are frozen and devices have their own memory;
    not with sequences in chunks, whose keys and values the memory model does not count."""
    pipeline = setup.recipe.pipeline
    is_open = pipeline.weight_cache == "auto" and setup.recipe.method == "lora" and setup.devices[0] != "cpu"
    is_open = is_open and pipeline.num_chunks == 1
    may_hold_all = setup.recipe.may_hold_all_weights and num_machines() == 1  # several cannot repeat a step
    item_bytes = setup.store.layouts[0].trainable_dtype.itemsize if may_hold_all else None
    return AutoCache(planner, setup.devices, tell, is_open=is_open, trained_bytes=item_bytes)
