"""Where a recipe's stages are cut: by the recipe, or by the planner from rough costs of the layers at hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.layout import LayerLayout
from roundpipe_cli.plan.cost import CostModel, LayerCost
from roundpipe_cli.plan.partition import plan_partition
from roundpipe_cli.schedule.actions import Schedule, StageRange
from roundpipe_cli.schedule.builders import build_schedule

SECONDS_PER_PARAMETER = 1e-9
"""Any unit will do: only the proportions of layers decide where they are cut."""

_Cut = tuple[tuple[StageRange, ...], "tuple[StageRange, ...] | None", "int | None"]
"""Forward stages, backward stages (None: the mirror), microbatches per round (None: as many as workers)."""

def rough_costs(layouts: Sequence[LayerLayout], active_parameters: Sequence[int], method: str) -> CostModel:
    """Costs of the layers in proportion to the parameters that a token meets.

    Args:
        layouts: one per layer.
        active_parameters: per layer, parameters that take part for one token (a part of the experts).
        method: `lora` needs no gradient of frozen weights, so its backward costs as much as a forward.
    """
    backward = 1.0 if method == "lora" else 2.0
    layers = []
    for index, (layout, active) in enumerate(zip(layouts, active_parameters, strict=True)):
        seconds = active * SECONDS_PER_PARAMETER
        is_embed, is_head = index == 0, index == len(layouts) - 1
        layers.append(
            LayerCost(
                name=layout.name,
                forward_s=0.0 if is_embed else seconds,
                backward_s=0.0 if is_embed else seconds * backward,
                recompute=not is_head,
            )
        )
    return CostModel("rough", tuple(layers))


class Cutter:
    """Builds the schedule of a step for any number of microbatches; the last step of an epoch may have fewer."""

    def __init__(self, costs: CostModel, num_workers: int, pipeline: Any) -> None:
        """
        Args:
            costs: of the layers.
            num_workers: devices.
            pipeline: the recipe's `pipeline` section.
        """
        self._costs = costs
        self._num_workers = num_workers
        self._pipeline = pipeline
        self.schedule = lru_cache(maxsize=64)(self._schedule)

    def _schedule(self, num_microbatches: int) -> Schedule:
        forward, backward, per_round = self._stages(num_microbatches)
        return build_schedule(
            self._pipeline.schedule,
            forward_stages=forward,
            backward_stages=backward,
            num_workers=self._num_workers,
            num_microbatches=num_microbatches,
            costs=self._costs,
            microbatches_per_round=per_round,
        )

    def _stages(self, num_microbatches: int) -> _Cut:
        forward, backward = self._pipeline.forward_stages, self._pipeline.backward_stages
        if self._pipeline.schedule != "roundpipe":
            return (self._even_stages() if forward == "auto" else _ranges(forward)), None, None
        if (forward == "auto") != (backward == "auto"):
            raise RefusedError(
                "forward_stages and backward_stages go together",
                where="pipeline",
                found="one of them is auto",
                expected="both given or both auto",
            )
        if forward != "auto":
            return _ranges(forward), _ranges(backward), None
        plan = plan_partition(self._costs, num_workers=self._num_workers, num_microbatches=num_microbatches)
        return plan.forward_stages, plan.backward_stages, plan.microbatches_per_round

    def _even_stages(self) -> tuple[StageRange, ...]:
        """As many stages as workers (twice as many where each worker has several), of about equal cost."""
        per_worker = 2 if self._pipeline.schedule in ("looped_bfs", "interleaved_1f1b") else 1
        weights = [cost.forward_s + cost.backward_s for cost in self._costs.layers]
        count = min(self._num_workers * per_worker, len(weights))
        target = sum(weights) / count
        stages: list[StageRange] = []
        start, done = 0, 0.0
        for layer, weight in enumerate(weights):
            done += weight
            left = len(weights) - 1 - layer
            full = done >= target * (len(stages) + 1) - weight / 2
            if len(stages) < count - 1 and (full or left == count - 1 - len(stages)):
                stages.append((start, layer))
                start = layer + 1
        stages.append((start, len(weights) - 1))
        return tuple(stages)


def _ranges(stages: Sequence[Sequence[int]]) -> tuple[StageRange, ...]:
    return tuple((int(first), int(last)) for first, last in stages)
