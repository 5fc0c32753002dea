"""`pipeline.weight_cache: auto`: weights stay on the GPUs in memory that is spare once a run's stages are settled.

Only frozen weights are worth it, which are uploaded once in a run. The first step with the stages that the run would
keep shows what it takes; what the memory model says of longer microbatches counts where it is more. Up to
`DEVICE_SHARE` of the memory is then filled. Where all weights fit, so that stages need no room for them, and other
stages are then faster (`planning/resident.py`), the run changes to them. If a device still runs out of memory,
the cache is given up first, and such stages with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from roundpipe_cli.costs.cost import CostModel, StageRange, without_unpacked
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
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule
from roundpipe_cli.planning.dealing import MIN_GAIN
from roundpipe_cli.planning.resident import DEALING, resident_cut
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import makespan_s
from roundpipe_cli.torchrun import this_process
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.units import format_bytes


@dataclass(frozen=True)
class KeptWeights:
    """Weights that devices keep from step to step."""

    num_bytes: int
    """Size of each worker's cache."""
    schedule: Schedule
    """With the stages that the memory was counted for."""
    costs: CostModel
    """Where all weights are kept, those of devices that hold them; otherwise the usual ones."""
    cut: StageCut | None = None
    """Stages for devices that hold all weights; None: the usual ones."""
    was_unpacked: bool = False
    """Whether packed weights would stay unpacked for a visit with the usual stages."""

    @property
    def words(self) -> str:
        """For a notice."""
        if self.cut is not None:
            text = f"weight cache (auto): all {format_bytes(self.num_bytes)} of weights stay on each GPU"
            if self.was_unpacked:
                text += " (unpacked for each microbatch and pass)"
            return f"{text}, and each microbatch on one"
        whole = sum(layer.param_bytes for layer in self.costs.layers)
        kept = "all" if self.num_bytes >= whole else format_bytes(self.num_bytes)
        return f"weight cache (auto): {kept} of {format_bytes(whole)} of weights stay on each GPU"


def weights_to_keep(
    usual: CostModel,
    schedule: Schedule,
    reserved_bytes: Sequence[int],
    devices: Sequence[str],
    *,
    trained_bytes: int | None,
) -> KeptWeights | None:
    """Weights that may stay on the devices beside a step; None where nothing may.

    Args:
        usual: costs of devices that keep nothing.
        schedule: of the step, with the stages of such devices.
        reserved_bytes: memory that the step took on each worker's device.
        devices: of each worker; one that is listed twice counts the memory of both.
        trained_bytes: see `AutoCache`.
    """
    if usual.device_memory_bytes is None:
        return None
    shares = [devices.count(name) for name in devices]
    taken = max(peak // share for peak, share in zip(reserved_bytes, shares, strict=True))
    modelled = modelled_bytes(usual, schedule.forward_stages, schedule.backward_stages)
    if trained_bytes is not None:
        whole = _all_weights(usual, schedule, max(0, taken - modelled), trained_bytes)
        if whole is not None:
            return whole
    spare = spare_for_cache(usual.device_memory_bytes, max(taken, modelled), usual.layers, share=DEVICE_SHARE)
    return KeptWeights(spare, schedule, usual) if spare else None


def _all_weights(
    usual: CostModel, streamed: Schedule, unexplained_bytes: int, trained_bytes: int
) -> KeptWeights | None:
    """Stages for devices that hold all weights, if they have room for those and a step is faster so than `streamed`,
    which took `unexplained_bytes` beyond the memory model."""
    if usual.layers[0].name != "embed":
        return None
    cache_bytes, num_workers = whole_cache_bytes(usual.layers), streamed.num_workers
    costs = with_cached_weights(without_unpacked(usual), cache_bytes, trained_bytes)
    room = int(DEVICE_SHARE * (usual.device_memory_bytes or 0)) - cache_bytes - unexplained_bytes

    def keeps(cut: StageCut) -> bool:
        return modelled_bytes(costs, cut.forward_stages, cut.backward_stages) <= room

    cut = resident_cut(costs, num_workers, keeps)
    if cut is None:
        return None
    schedule = make_schedule("roundpipe", cut, SimulationCase(costs, num_workers, streamed.num_microbatches))
    if makespan_s(simulate(schedule, costs)) >= (1 - MIN_GAIN) * makespan_s(simulate(streamed, usual)):
        return None
    return KeptWeights(cache_bytes, schedule, costs, cut, any(layer.whole_bytes for layer in usual.layers))


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
            trained_bytes: of a trained weight; None: stages stay as they are, even if all weights fit.
        """
        self._planner, self._tell, self._trained_bytes = planner, tell, trained_bytes
        self._devices = tuple(devices)
        self.is_open = is_open
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

    def observe(self, engine: Engine, result: StepResult) -> None:
        """Learn from a finished step, before the planner does. A short step at an epoch's end has other stages."""
        if not self.is_open:
            return
        count = 1 + max(item.microbatch for item in result.actions)
        self._most = max(self._most, count)
        if count < self._most or not self._planner.is_settled:
            return
        self.is_open = False
        schedule, costs = self._planner.schedule(count), self._planner.costs
        kept = weights_to_keep(
            costs, schedule, result.device_reserved_bytes, self._devices, trained_bytes=self._trained_bytes
        )
        if kept is None:
            return
        self.num_bytes, self.holds_all = kept.num_bytes, kept.cut is not None
        if self.holds_all:
            self._planner.keep_stages(kept.schedule, kept.costs, DEALING)
        else:
            self._planner.keep_stages(kept.schedule)
        engine.grant_weight_cache(self.num_bytes)
        if self.holds_all:
            engine.unpack_per_visit(False)
        self._tell(Notice(f"{kept.words}; pipeline.weight_cache=0 uploads them every time"))

    def give_up(self, engine: Engine) -> None:
        """Drop the cache: a device ran out of memory. If stages relied on it, go back to streamed stages."""
        self.is_open = self.holds_all
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

    def leave_out(self, lost: Collection[int]) -> None:
        """Forget workers that are gone."""
        self._devices = tuple(name for worker, name in enumerate(self._devices) if worker not in lost)

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
    """The cache of a run."""
    trained_bytes = trained_weight_bytes(setup) if this_process().count == 1 else None  # several cannot repeat a step
    return AutoCache(planner, setup.devices, tell, is_open=is_cache_open(setup), trained_bytes=trained_bytes)


def is_cache_open(setup: Setup) -> bool:
    """Whether a cache may be taken: the recipe leaves it to us, weights are frozen and devices have their own memory;
    not with sequences in chunks, whose keys and values the memory model does not count."""
    pipeline = setup.recipe.pipeline
    is_auto = pipeline.weight_cache == "auto" and pipeline.num_chunks == 1
    return is_auto and setup.recipe.method == "lora" and setup.devices[0] != "cpu"


def trained_weight_bytes(setup: Setup) -> int | None:
    """Bytes of a trained weight; None where stages may not be cut for devices that hold all weights."""
    return setup.store.layouts[0].trainable_dtype.itemsize if setup.recipe.may_hold_all_weights else None
