"""From a schedule to what each worker's threads do: visits.

A visit is a run of consecutive actions of one worker on one stage: its weights are uploaded once, its microbatches
follow, its gradients leave at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe_cli.schedule.actions import Action, Kind, Schedule, StageRange


@dataclass(frozen=True)
class Visit:
    """One worker's stay on one stage."""

    backward: bool
    stage: int
    layers: StageRange
    actions: tuple[Action, ...]

    @property
    def layer_range(self) -> range:
        return range(self.layers[0], self.layers[1] + 1)

    @property
    def first_microbatch(self) -> int:
        return self.actions[0].microbatch

    @property
    def num_microbatches(self) -> int:
        return len({action.microbatch for action in self.actions})


def visits_of(schedule: Schedule) -> list[list[Visit]]:
    """Each worker's visits, in order. Actions on stages without layers are left out."""
    return [_visits(row, schedule) for row in schedule.actions]


def _visits(row: Sequence[Action], schedule: Schedule) -> list[Visit]:
    groups: list[list[Action]] = []
    for action in row:
        backward = action.kind != Kind.FORWARD
        stages = schedule.backward_stages if backward else schedule.forward_stages
        if stages[action.stage][1] < stages[action.stage][0]:
            continue
        previous = groups[-1][-1] if groups else None
        if previous and previous.stage == action.stage and (previous.kind != Kind.FORWARD) == backward:
            groups[-1].append(action)
        else:
            groups.append([action])
    result = []
    for actions in groups:
        backward = actions[0].kind != Kind.FORWARD
        stages = schedule.backward_stages if backward else schedule.forward_stages
        stage = actions[0].stage
        result.append(Visit(backward, stage, stages[stage], tuple(actions)))
    return result


def hidden_readers(schedule: Schedule, recompute_each_layer: bool) -> Counter[int]:
    """How many stages read the hidden states at the input of each layer, for one microbatch."""
    readers: Counter[int] = Counter()
    for first, last in schedule.forward_stages:
        if first <= last:
            readers[first] += 1
    for index, (first, last) in enumerate(schedule.backward_stages):
        if first > last:
            continue
        readers[first] += 1
        if recompute_each_layer and index > 0:  # the stage with the head keeps its graphs in any mode
            for layer in range(first + 1, last + 1):
                readers[layer] += 1
    return readers


def folds_on_device(visits: Sequence[Sequence[Visit]]) -> bool:
    """Whether every backward visit takes up its stage's gradient sum where the visit before left it."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for row in visits:
        for visit in row:
            if not visit.backward:
                continue
            microbatches = [a.microbatch for a in visit.actions if a.kind == Kind.BACKWARD]
            if microbatches != list(range(microbatches[0], microbatches[0] + len(microbatches))):
                return False
            spans.setdefault(visit.stage, []).append((microbatches[0], microbatches[-1]))
    return all(
        later[0] == earlier[1] + 1
        for stage_spans in spans.values()
        for earlier, later in zip(sorted(stage_spans), sorted(stage_spans)[1:], strict=False)
    )
