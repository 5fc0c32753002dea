"""Lowering: from a schedule to a program that simulator and engine interpret. Plain data, no clock, no device.

A program is a list of operations: the schedule's F, R and B; uploads (U) of weights and of boundary tensors; downloads
(D) of boundary tensors and of weight gradients; and the host's updates (O). Each names the operations it waits for.

    host          U weights(visit)            D boundary 1        U boundary 1           D gradients(visit) -> O
                     |                           ^    |               |                     ^
    worker 0         +--> 0F0 0F1 0F2 -----------+    |               |                     |
    worker 1                                          +--------> 1F0 ... 0B0 -> D gradient -> U gradient -> 1R0 1B0

A visit is a worker's stay on one range of layers: from the upload of its weights into a slot until another visit takes
the slot. A bound stage that goes back and forth between forward and backward is one visit per step.

Interpretation, the same for both:
- Compute operations of a worker run in the order of `compute[worker]`. A transfer waits in the queue of its worker's
  link (`lane` up or down) and goes by `priority`, smallest first. Up: boundaries that unblock compute, weights of the
  next visit, deeper prefetch. Down: boundaries, saved activations, weight gradients. Host updates go one by one.
- An operation starts when its `deps` have ended. A dependency between operations of two different workers arrives a hop
  later. `late_deps` are needed only after the first part of a backward (its recompute or the head's forward, which runs
  ahead and ends when they arrive); an interpreter without such parts treats them as `deps`.
- Where a tensor has no bytes no transfer is made and the consumer depends on the producer itself. One with bytes passes
  by stages without layers.

Rules of the contract that the dependencies spell out: two boundary tensors at most wait per worker and direction; a
step's updates start when all its gradients have landed (the gate), in the order in which the next step needs them; at
staleness 0 each of its uploads waits for the updates of its own layers alone; at staleness 1 step k uses the weights
after update k - 2.

Gradients that are added up on the host (`host_folded`) leave one microbatch at a time, in the type of the weights, and
wait on the host's lane to be added. The gate takes the time of the norm that is left at the step's end.

A run's step lasts from the gate of the step before to its own. Such a step alone (`after_update`) begins with the
updates of the step before and ends with its own gate:

    host        |O0 O1 O2 O3 ...|                       gate
    worker 0       |U|0F0 0F1 ...                 0B1 D|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from roundpipe_cli.costs.cost import ADDING_BYTES, SQUARING_BYTES, CostModel, LayerCost, StageRange
from roundpipe_cli.schedule.actions import BACKWARD, FORWARD, RECOMPUTE, Kind, Schedule
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP

# A lowered program as plain data: operations, visits of stages, and the program of both.

WEIGHTS, ACTIVATION, GRADIENT, WEIGHT_GRADIENT = "weights", "activation", "gradient", "weight gradient"
"""Loads of a transfer. `GRADIENT` is the gradient of a boundary tensor."""

URGENT, NEXT, SAVED, LAST = 0, 1, 2, 3
"""First part of a priority: what unblocks compute; weights, by visit; what a recompute reads; weight gradients."""


class Op(NamedTuple):
    """One operation of a program. Bytes; indices as in `Action`; -1 where something does not apply."""

    id: int
    kind: Kind
    lane: str
    worker: int
    """-1 for updates, which run on the host."""
    stage: int
    """Forward stage for F, backward stage for R and B; a transfer has that of the compute operation it belongs to; an
    update has its layer; -1 for the gate that waits for the step's gradients, and for additions of gradients."""
    microbatch: int
    step: int
    payload: str
    num_bytes: int
    """Bytes of a transfer; on the host's lane the traffic of its memory, beside what an update moves."""
    visit: int
    """Index into `Program.visits`."""
    priority: tuple[int, int]
    deps: list[int]
    late_deps: list[int]
    boundary: int = -1
    """A transfer carries the hidden states at the input of this layer, or their gradient."""


@dataclass(slots=True)
class Visit:
    """A worker's stay on one range of layers."""

    worker: int
    layers: StageRange
    step: int
    slot: int
    num_bytes: int
    """Bytes of weights and gradient accumulators in the slot."""
    ops: list[int] = field(default_factory=list)
    """Compute operations, in order; at least one."""
    upload: int = -1
    downloads: list[int] = field(default_factory=list)
    """Downloads of gradient sums: one, or where they are added up on the host one for each backward."""


@dataclass(frozen=True)
class Program:
    """A lowered schedule."""

    schedule: Schedule
    ops: list[Op]
    compute: list[list[int]]
    """Per worker: ids of F, R and B in order."""
    visits: list[Visit]
    staleness: int
    host_folded: frozenset[StageRange] = frozenset()
    """Backward stages whose visits do not follow each other microbatch by microbatch, because several workers share
    them, or share a round of them: each microbatch's gradients go down by themselves and are added up on the host, in
    order."""


# Stages whose gradient sums are added up on the host, because they cannot travel with the stage.


def host_folded(
    schedule: Schedule, layers: Sequence[LayerCost], visits: Sequence[Visit], ops: Sequence[Op]
) -> frozenset[StageRange]:
    """Backward stages as `Program.host_folded` has them."""
    spans: dict[tuple[StageRange, int], list[list[int]]] = {}
    workers: dict[tuple[StageRange, int, int], set[int]] = {}
    for visit in visits:
        backward_ops = [ops[op_id] for op_id in visit.ops if ops[op_id].kind is BACKWARD]
        trained = any(layer.grad_bytes for layer in layers[visit.layers[0] : visit.layers[1] + 1])
        if not backward_ops or not trained:
            continue
        places = [schedule.backward_place(op.stage, op.microbatch) for op in backward_ops]
        spans.setdefault((visit.layers, visit.step), []).append(places)
        for op in backward_ops:
            turn = op.microbatch % schedule.num_microbatches // schedule.microbatches_per_round
            workers.setdefault((visit.layers, visit.step, turn), set()).add(visit.worker)
    # Workers that share a stage's microbatches of one round would wait for each other's sums.
    folded = {stage for (stage, _, _), sharing in workers.items() if len(sharing) > 1}
    for (stage, step), shares in spans.items():
        first = step * schedule.num_microbatches
        in_turn = [microbatch for share in sorted(shares) for microbatch in share]
        if in_turn != list(range(first, first + len(in_turn))):
            folded.add(stage)
    return frozenset(folded)


NUM_STAGING = 2
"""Boundary tensors that may wait on a worker, per direction, and microbatches whose gradients
may wait for their download."""


def lower(schedule: Schedule, costs: CostModel, *, staleness: int = 0, after_update: bool = False) -> Program:
    """Add transfers, updates and dependencies to a valid schedule.

    Args:
        costs: bytes of layers and boundaries, number of slots, and which layers have updates.
        staleness: 0 or 1, see the module's text.
        after_update: one step at staleness 0 as it follows another one, see the module's text.
    """
    assert not after_update or (staleness == 0 and schedule.num_steps == 1)
    lowering = _Lowering(schedule, costs, staleness, after_update)
    lowering.add_compute()
    for row in lowering.compute:
        lowering.connect_boundaries(row)
    lowering.host_folded = host_folded(schedule, lowering.layers, lowering.visits, lowering.ops)
    if after_update:
        lowering.add_layer_updates(-1, [])
    for step in range(schedule.num_steps):
        lowering.add_updates(step)
    lowering.connect_rows()
    in_slot: dict[tuple[int, int], Visit] = {}
    for visit_id, visit in enumerate(lowering.visits):
        place = visit.worker, visit.slot
        lowering.connect_weights(visit_id, in_slot.get(place))
        in_slot[place] = visit
    return Program(schedule, lowering.ops, lowering.compute, lowering.visits, staleness, lowering.host_folded)


class _Lowering:
    def __init__(self, schedule: Schedule, costs: CostModel, staleness: int, after_update: bool) -> None:
        self.schedule, self.layers, self.staleness = schedule, costs.layers, staleness
        self.prices_host, self.leaving_bytes = costs.host_bytes_per_s is not None, costs.leaving_bytes
        self.gate_bytes = costs.embedding_squares_bytes
        self.after_update, self.update_order = after_update, costs.update_order
        self.embed_sources = (0, len(costs.layers) - 1) if costs.tied else (0,)
        """The layers whose updates make the embedding's rows."""
        self.num_slots = costs.slots
        total = schedule.num_microbatches * schedule.num_steps
        self.ops: list[Op] = []
        self.compute: list[list[int]] = [[] for _ in range(schedule.num_workers)]
        self.visits: list[Visit] = []
        self.forward_ops = [[-1] * total for _ in schedule.forward_stages]
        self.backward_ops = [[-1] * total for _ in schedule.backward_stages]
        self.boundary_ops: dict[tuple[int, int], int] = {}
        """(layer, microbatch) -> the download of the hidden states at the input of that layer."""
        self.gradient_ops: dict[tuple[int, int], int] = {}
        """(backward stage, microbatch) -> the download of the gradient that the stage passes on."""
        self.update_ops: dict[int, dict[int, int]] = {}
        """Per step: layer -> update; key -1 is the gate. Empty where updates take no time and nothing waits."""
        self.hidden_bytes = [0] + [layer.boundary_bytes for layer in costs.layers]
        """Bytes of one microbatch's hidden states at the input of each layer."""
        read = {first for first, _ in schedule.backward_stages}
        self.outputs = [
            [at for at in range(first + 1, last + 2) if self._moves(at) and (at in read or at == last + 1)]
            for first, last in schedule.forward_stages
        ]
        """Per forward stage: boundaries that it sends down, to the next stage or to where a recompute will start."""
        self.producer_stage = {
            boundary: index
            for index, (first, last) in enumerate(schedule.forward_stages)
            for boundary in range(first + 1, last + 2)
        }
        """Boundary -> the forward stage that makes it."""
        self.last_visit = [-1] * schedule.num_workers
        self.resident: list[dict[StageRange, int]] = [{} for _ in range(schedule.num_workers)]
        """Per worker: layer range -> visit that holds it, least recently used first."""
        self.host_folded: frozenset[StageRange] = frozenset()
        self.updates_cost = costs.has_updates

    def _transfer(
        self, op: Op, lane: str, payload: str, at: int, *, num_bytes: int, priority: tuple[int, int], deps: list[int]
    ) -> int:
        """Add a transfer for `op`; `at`: the boundary of a boundary tensor, the visit of weights and gradient sums."""
        op_id, kind = len(self.ops), Kind.UPLOAD if lane == UP else Kind.DOWNLOAD
        visit, boundary, microbatch = (-1, at, op.microbatch) if payload in (ACTIVATION, GRADIENT) else (at, -1, -1)
        place = op.worker, op.stage, microbatch, op.step
        self.ops.append(Op(op_id, kind, lane, *place, payload, num_bytes, visit, priority, deps, [], boundary))
        return op_id

    def _on_host(self, step: int, layer: int, deps: list[int], num_bytes: int = 0) -> int:
        """Add work of the host: the update of a layer; layer -1 is the gate, or an addition of gradients."""
        op_id, place = len(self.ops), -1 if layer < 0 else self.update_order.index(layer)
        place_of = -1, layer, -1, step
        self.ops.append(Op(op_id, Kind.OPTIMIZER, HOST, *place_of, "", num_bytes, -1, (step, place), deps, []))
        return op_id

    def _addition(self, download: int, num_bytes: int) -> int:
        """The host adds one microbatch's gradients, and after a step's last one squares the sum."""
        op = self.ops[download]
        backward = self.ops[op.deps[0]]
        place = self.schedule.backward_place(backward.stage, backward.microbatch) % self.schedule.num_microbatches
        each = ADDING_BYTES + (SQUARING_BYTES if place + 1 == self.schedule.num_microbatches else 0)
        return self._on_host(op.step, -1, [download], num_bytes // 4 * each)

    def add_compute(self) -> None:
        """The schedule's own actions, and the visits they form."""
        schedule = self.schedule
        for worker, row in enumerate(schedule.actions):
            for action in row:
                kind, stage, microbatch = action.kind, action.stage, action.microbatch
                forward = kind is FORWARD
                step = microbatch // schedule.num_microbatches
                layers = (schedule.forward_stages if forward else schedule.backward_stages)[stage]
                visit, op_id = self._visit_for(worker, layers, step), len(self.ops)
                self.ops.append(Op(op_id, kind, COMPUTE, worker, stage, microbatch, step, "", 0, visit, (0, 0), [], []))
                self.compute[worker].append(op_id)
                if visit >= 0:
                    self.visits[visit].ops.append(op_id)
                if forward:
                    self.forward_ops[stage][microbatch] = op_id
                elif kind is BACKWARD:
                    self.backward_ops[stage][microbatch] = op_id

    def _visit_for(self, worker: int, layers: StageRange, step: int) -> int:
        """The visit that holds these layers, a new one in the least recently used slot if there is none."""
        if layers[1] < layers[0]:
            return -1
        last = self.last_visit[worker]
        if last >= 0 and self.visits[last].layers == layers and self.visits[last].step == step:
            return last
        resident = self.resident[worker]
        visit = resident.pop(layers, -1)
        if visit < 0 or self.visits[visit].step != step:
            slot = self.visits[visit].slot if visit >= 0 else len(resident)
            if slot >= self.num_slots:
                oldest = next(iter(resident))
                slot = self.visits[resident.pop(oldest)].slot
            visit = len(self.visits)
            self.visits.append(Visit(worker, layers, step, slot, 0))
        resident[layers] = visit
        self.last_visit[worker] = visit
        return visit

    def connect_boundaries(self, row: list[int]) -> None:
        """Inputs and outputs of one worker's compute operations, with two staging buffers per direction."""
        inputs: list[int] = []
        gradients: list[int] = []
        outputs: list[list[int]] = []
        for position, op_id in enumerate(row):
            op = self.ops[op_id]
            if op.kind is FORWARD:
                self._input(op, self.schedule.forward_stages[op.stage][0], inputs)
                downloads = [self._boundary_download(boundary, op.microbatch) for boundary in self.outputs[op.stage]]
                self._stage_output(op, downloads, outputs)
                continue
            fused = self.schedule.fused_head
            if op.kind is RECOMPUTE or (fused and op.stage == 0):
                self._input(op, self.schedule.backward_stages[op.stage][0], inputs)
            if (op.kind is BACKWARD) == fused:
                self._gradient_input(op, gradients)
            if op.kind is BACKWARD:
                if row[position - 1] == op_id - 1 and self.ops[op_id - 1].kind is RECOMPUTE:
                    op.deps.append(op_id - 1)
                if self._gradient_bytes(op.stage) and op.stage + 1 < len(self.schedule.backward_stages):
                    self._stage_output(op, [self._gradient_download(op.stage, op.microbatch)], outputs)

    def _boundary_download(self, boundary: int, microbatch: int) -> int:
        """The download of a boundary tensor by the forward stage that makes it; made when first asked for."""
        key = (boundary, microbatch)
        if key in self.boundary_ops:
            return self.boundary_ops[key]
        producer = self.forward_ops[self.producer_stage[boundary]][microbatch]
        op = self.ops[producer]
        last = self.schedule.forward_stages[op.stage][1]
        priority, num_bytes = (URGENT if boundary == last + 1 else SAVED, producer), self.hidden_bytes[boundary]
        what = op, DOWN, ACTIVATION, boundary
        self.boundary_ops[key] = self._transfer(*what, num_bytes=num_bytes, priority=priority, deps=[producer])
        return self.boundary_ops[key]

    def _input(self, op: Op, boundary: int, staged: list[int]) -> None:
        if self._bytes_at(boundary):
            deps = [] if boundary == 0 else [self._boundary_download(boundary, op.microbatch)]
            op.deps.append(self._upload(op, ACTIVATION, boundary, staged, deps=deps))
        elif op.kind is FORWARD:
            if op.stage:
                op.deps.append(self.forward_ops[op.stage - 1][op.microbatch])
        elif op.kind is BACKWARD and self.forward_ops:
            op.late_deps.append(self.forward_ops[-1][op.microbatch])
        elif not self.schedule.fused_head:
            op.deps.append(self.forward_ops[len(self.forward_ops) - 1 - op.stage][op.microbatch])

    def _gradient_input(self, op: Op, staged: list[int]) -> None:
        if op.stage == 0:
            return
        if self._gradient_bytes(op.stage - 1):
            deps = [self._gradient_download(op.stage - 1, op.microbatch)]
            boundary = self.schedule.backward_stages[op.stage - 1][0]
            needed = self._upload(op, GRADIENT, boundary, staged, deps=deps)
        else:
            needed = self.backward_ops[op.stage - 1][op.microbatch]
        (op.late_deps if self.schedule.fused_head else op.deps).append(needed)

    def _upload(self, op: Op, payload: str, boundary: int, staged: list[int], *, deps: list[int]) -> int:
        """The upload of a boundary tensor that `op` reads, behind the use of the buffer that it takes."""
        if len(staged) >= NUM_STAGING:
            deps.append(staged[-NUM_STAGING])
        staged.append(op.id + (op.kind is RECOMPUTE))  # the backward behind it ends the use
        num_bytes = self._bytes_at(boundary)
        return self._transfer(op, UP, payload, boundary, num_bytes=num_bytes, priority=(URGENT, op.id), deps=deps)

    def _moves(self, boundary: int) -> bool:
        return boundary < len(self.layers) and self.hidden_bytes[boundary] > 0

    def _bytes_at(self, boundary: int) -> int:
        """Bytes of what goes up to a stage that begins there; the embedding's rows come from the host."""
        from_host = boundary == 0 and self.layers[0].name == "embed"
        return self.layers[0].boundary_bytes if from_host else self.hidden_bytes[boundary]

    def _gradient_bytes(self, stage: int) -> int:
        """Bytes of the gradient that a backward stage passes on."""
        return self.hidden_bytes[self.schedule.backward_stages[stage][0]]

    def _gradient_download(self, stage: int, microbatch: int) -> int:
        key = (stage, microbatch)
        if key not in self.gradient_ops:
            op = self.ops[self.backward_ops[stage][microbatch]]
            what, num_bytes = (op, DOWN, GRADIENT, self.schedule.backward_stages[stage][0]), self._gradient_bytes(stage)
            self.gradient_ops[key] = self._transfer(*what, num_bytes=num_bytes, priority=(URGENT, op.id), deps=[op.id])
        return self.gradient_ops[key]

    @staticmethod
    def _stage_output(op: Op, downloads: list[int], outputs: list[list[int]]) -> None:
        """Let an operation wait until the output of the operation before the last has left the worker."""
        if downloads:
            if len(outputs) >= NUM_STAGING:
                op.deps.extend(outputs[-NUM_STAGING])
            outputs.append(downloads)

    def add_updates(self, step: int) -> None:
        """Weight gradients of the step's visits, the gate that waits for all of them, and one update per layer."""
        landed: list[int] = []
        visits = [(index, visit) for index, visit in enumerate(self.visits) if visit.step == step]
        for index, visit in visits:
            backwards = [op_id for op_id in visit.ops if self.ops[op_id].kind is BACKWARD]
            layers = range(visit.layers[0], visit.layers[1] + 1)
            num_bytes = sum(self.layers[layer].grad_bytes for layer in layers)
            if backwards and num_bytes:
                leaves = visit.layers in self.host_folded
                size = sum(map(self._leaving, layers)) if leaves else num_bytes
                for op in map(self.ops.__getitem__, backwards if leaves else backwards[-1:]):
                    what, priority = (op, DOWN, WEIGHT_GRADIENT, index), (LAST, op.id)
                    download = self._transfer(*what, num_bytes=size, priority=priority, deps=[op.id])
                    if len(visit.downloads) >= NUM_STAGING:  # gradients that wait for the lane take device memory
                        self.ops[op.id].deps.append(visit.downloads[-NUM_STAGING])
                    visit.downloads.append(download)
                    landed.append(self._addition(download, num_bytes) if leaves and self.prices_host else download)
                visit.num_bytes += num_bytes
        if self.staleness and not self.updates_cost:
            return
        for row in self.compute:
            last_op = next((op_id for op_id in reversed(row) if self.ops[op_id].step == step), None)
            if last_op is not None:
                landed.append(last_op)
        gate = self._on_host(step, -1, landed, self.gate_bytes)
        self.update_ops[step] = {-1: gate}
        if not self.after_update:
            self.add_layer_updates(step, [gate])
        if not self.staleness:  # the barrier holds for stages without layers too, which have no visit
            for row in self.compute:
                following = next((op_id for op_id in row if self.ops[op_id].step == step + 1), None)
                if following is not None:
                    self.ops[following].deps.append(gate)

    def _leaving(self, layer: int) -> int:
        """Bytes of one microbatch's gradients of a layer on their way to the host's sum; the head's are a float32 sum
        over chunks of its tokens."""
        size = 4 if layer == len(self.layers) - 1 else self.leaving_bytes
        return self.layers[layer].grad_bytes // 4 * size

    def add_layer_updates(self, step: int, deps: list[int]) -> None:
        """One update for each layer that has any."""
        updates = self.update_ops.setdefault(step, {})
        for layer in self.update_order:
            if self.layers[layer].optimizer_s:
                updates[layer] = self._on_host(step, layer, list(deps))

    def connect_rows(self) -> None:
        """Let the embedding's rows, which come from the host, wait for its update."""
        for op in self.ops:
            if op.boundary == 0 and op.lane == UP:
                op.deps.extend(self._version_deps(op.step, self.embed_sources))

    def connect_weights(self, visit_id: int, previous: Visit | None) -> None:
        """The upload of a visit's weights, behind its slot's visit before and the updates that it must see."""
        visit = self.visits[visit_id]
        first, last = visit.layers
        deps = self._version_deps(visit.step, range(first, last + 1))
        num_bytes = sum(layer.param_bytes for layer in self.layers[first : last + 1])
        visit.num_bytes += num_bytes
        first_op = self.ops[visit.ops[0]]
        slot_deps = [] if previous is None else [previous.ops[-1], *previous.downloads]
        if num_bytes:
            what = first_op, UP, WEIGHTS, visit_id
            visit.upload = self._transfer(*what, num_bytes=num_bytes, priority=(NEXT, visit_id), deps=deps + slot_deps)
            first_op.deps.append(visit.upload)
        else:
            first_op.deps.extend(deps)
        before = self._accumulator_before(visit)
        if before is not None:  # separately, because a visit may begin with forwards, which must not wait for this
            backward = next(self.ops[op_id] for op_id in visit.ops if self.ops[op_id].kind is BACKWARD)
            num_bytes = sum(layer.grad_bytes for layer in self.layers[first : last + 1])
            what, priority = (backward, UP, WEIGHT_GRADIENT, visit_id), (NEXT, visit_id)
            deps = [*slot_deps, before]
            backward.deps.append(self._transfer(*what, num_bytes=num_bytes, priority=priority, deps=deps))

    def _version_deps(self, step: int, layers: Iterable[int]) -> list[int]:
        """The updates that a step's reader of these layers must see, or the gate where they have none."""
        updates = self.update_ops.get(step - 1 - self.staleness, {})
        own = [updates[layer] for layer in layers if layer in updates]
        return own or [updates[-1]] if -1 in updates else own

    def _accumulator_before(self, visit: Visit) -> int | None:
        """The download that a backward visit continues, if an earlier visit has folded the microbatches before."""
        backwards = [self.ops[op_id] for op_id in visit.ops if self.ops[op_id].kind is BACKWARD]
        if not backwards:
            return None
        stage, place_of = backwards[0].stage, self.schedule.backward_place
        place = place_of(stage, backwards[0].microbatch)
        if place % self.schedule.num_microbatches == 0:
            return None
        before = self.ops[self.backward_ops[stage][place_of(stage, place - 1)]]
        earlier = self.visits[before.visit]
        return None if visit.layers in self.host_folded or not earlier.downloads else earlier.downloads[-1]
