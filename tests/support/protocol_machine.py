"""An abstract machine for the dispatcher's protocol: the real ledger and queues, every thread and stream a free agent.

Nothing runs in parallel here. A state has a list of moves that some thread or device could make next; whoever drives
the machine (a random walk, or a search through all orders) picks one. What the moves read and write (slots, gradient
sums, boundaries, versions of the host's weights) is tracked by name, and each move asserts what PROTOCOL.md claims.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from copy import copy
from typing import Any

from roundpipe_cli.engine.dispatch.decisions import Dependencies, Ledger, TransferQueue, links_of
from roundpipe_cli.engine.program import backward_ops, layer_range, stage_layers
from roundpipe_cli.schedule.actions import Kind
from roundpipe_cli.schedule.program import ACTIVATION, GRADIENT, NUM_STAGING, WEIGHT_GRADIENT, WEIGHTS, Op, Program
from roundpipe_cli.schedule.timeline import COMPUTE, DOWN, HOST, UP

Move = tuple[str, Any]
BOUNDARIES = (ACTIVATION, GRADIENT)


class Facts:
    """What never changes in a program."""

    def __init__(self, program: Program, num_chunks: int = 2, max_in_flight: int = 2) -> None:
        self.program, self.num_chunks, self.max_in_flight = program, num_chunks, max_in_flight
        self.links: Dependencies = links_of(program)
        self.updated = {op.stage for op in program.ops if op.lane == HOST and op.stage >= 0}
        self.buffers = 1 + program.staleness
        self.per_step = program.schedule.num_microbatches
        self.before_in_slot: dict[int, list[int]] = {}  # visit -> earlier visits in its slot
        places = [(visit.worker, visit.slot) for visit in program.visits]
        for index, place in enumerate(places):
            self.before_in_slot[index] = [other for other in range(index) if places[other] == place]


class Machine:
    """One state."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        program = facts.program
        self.ledger = Ledger(program, facts.links)
        self.next_issue = [0] * len(program.compute)
        self.streams: list[deque[int]] = [deque() for _ in program.compute]  # per worker: issued and not ended
        self.running: list[str] = [""] * len(program.compute)
        self.announced: set[int] = set()
        lanes = [(lane, worker) for worker in range(len(program.compute)) for lane in (UP, DOWN)]
        self.queues = {key: TransferQueue(facts.max_in_flight) for key in [*lanes, (HOST, -1)]}
        self.moving: dict[tuple[str, int], deque[tuple[int, bool]]] = {key: deque() for key in self.queues}
        self.begun: set[int] = set()  # operations that have touched memory
        self.passed: set[int] = set()  # compute operations whose outputs have been made
        self.happened: set[int] = set()
        self.slots: dict[tuple[int, int], tuple[int, bool]] = {}  # (worker, slot) -> (visit, whether it is whole)
        self.sums: dict[int, tuple[int, ...]] = {}  # visit -> microbatches in its sum on the device
        self.host_sums: dict[tuple[tuple[int, int], int], tuple[int, ...]] = {}
        self.on_host: set[tuple[str, int, int]] = set()
        self.arrived: set[tuple[int, str, int, int]] = set()
        self.versions = {(layer, slot): 0 if slot == 0 else -1 for layer in facts.updated for slot in (0, 1)}
        self._announce(self.ledger.issuable())

    def clone(self) -> Machine:
        other = copy(self)
        for name, value in vars(self).items():
            if name not in ("facts", "ledger", "queues", "moving", "streams"):
                setattr(other, name, copy(value))
        other.streams = [deque(stream) for stream in self.streams]
        other.moving = {key: deque(row) for key, row in self.moving.items()}
        other.ledger = _copied(self.ledger)
        other.queues = {key: _copied(queue) for key, queue in self.queues.items()}
        return other

    def key(self) -> Hashable:
        """Equal for states with the same future."""
        queues = tuple(
            (tuple(entry[2] for entry in sorted(queue._ready)), tuple(sorted(queue._chunks_left.items())))
            for queue in self.queues.values()
        )
        moving = tuple(tuple(row) for row in self.moving.values())
        return (
            tuple(self.next_issue), tuple(self.running), frozenset(self.announced), queues, moving,
            frozenset(self.passed), frozenset(self.happened),
        )  # fmt: skip

    # -- moves ---------------------------------------------------------------------------------------------------
    def moves(self) -> list[Move]:
        program, found = self.facts.program, []
        for worker, row in enumerate(program.compute):
            position = self.next_issue[worker]
            if position < len(row) and not self.ledger.num_missing[row[position]]:
                found.append(("issue", worker))
            if self.streams[worker]:
                op = program.ops[self.streams[worker][0]]
                if self.running[worker] or all(dep in self.happened for dep in (*op.deps, *op.late_deps)):
                    found.append(("compute", worker))
        found += [("admit", op_id) for op_id in sorted(self.announced) if self._inputs_happened(op_id)]
        for key, queue in self.queues.items():
            if queue._ready and queue.num_in_flight < self.facts.max_in_flight:
                found.append(("send", key))
            if self.moving[key]:
                found.append(("arrive", key))
        return found

    def make(self, move: Move) -> None:
        """Carry out one move, and assert that it harms nobody."""
        what, who = move
        getattr(self, f"_{what}")(who)

    def _inputs_happened(self, op_id: int) -> bool:
        return all(
            event in self.passed if dep < 0 else dep in self.happened for dep, event in self.ledger.inputs(op_id)
        )

    def _announce(self, op_ids: list[int]) -> None:
        self.announced |= {op_id for op_id in op_ids if self.ledger.ops[op_id].lane != COMPUTE}

    def _issue(self, worker: int) -> None:
        """The compute thread: outputs are released to the link before the operation itself is issued."""
        program = self.facts.program
        op_id = program.compute[worker][self.next_issue[worker]]
        self.next_issue[worker] += 1
        for follower in self.ledger.followers(op_id):
            op = program.ops[follower]
            if op.lane == DOWN and op.payload in BOUNDARIES:
                self.ledger.release(follower, op_id)
                self._announce([follower])
        self.streams[worker].append(op_id)
        self._announce(self.ledger.issue(op_id, op_id))

    def _compute(self, worker: int) -> None:
        """The compute stream: the oldest operation begins, makes its outputs, ends."""
        op = self.facts.program.ops[self.streams[worker][0]]
        if not self.running[worker]:
            self.running[worker] = "begun"
            self._begin(op)
        elif self.running[worker] == "begun":
            self.running[worker] = "made"
            self.passed.add(op.id)
        else:
            self.running[worker] = ""
            self.streams[worker].popleft()
            self._end(op)
            self.happened.add(op.id)

    def _admit(self, op_id: int) -> None:
        op = self.ledger.ops[op_id]
        self.announced.discard(op_id)
        if op.lane == HOST and op.stage < 0:
            self.happened.add(op_id)
            self._announce(self.ledger.issue(op_id, op_id))
        else:
            chunks = 1 if op.lane == HOST else self.facts.num_chunks
            self.queues[op.lane, op.worker].enter(op_id, op.priority, chunks)

    def _send(self, key: tuple[str, int]) -> None:
        decision = self.queues[key].next()
        assert decision is not None
        op_id, last = decision
        if op_id not in self.begun:
            self._begin(self.ledger.ops[op_id])
        self.moving[key].append(decision)
        if last:
            self._announce(self.ledger.issue(op_id, op_id))

    def _arrive(self, key: tuple[str, int]) -> None:
        op_id, last = self.moving[key].popleft()
        self.queues[key].ended()
        if last:
            self._end(self.ledger.ops[op_id])
            self.happened.add(op_id)

    # -- what is read and written --------------------------------------------------------------------------------
    def _begin(self, op: Op) -> None:
        self.begun.add(op.id)
        if op.lane == COMPUTE:
            self._compute_begins(op)
        elif op.lane == HOST:
            self._update_begins(op)
        elif op.payload == WEIGHTS:
            self._weights_begin(op)
        elif op.payload == WEIGHT_GRADIENT:
            self._sums_begin(op)
        elif op.lane == UP:
            if op.deps and op.boundary > 0:
                assert (op.payload, op.boundary, op.microbatch) in self.on_host, "a boundary that is not on the host"
            staged = [
                other for other in self.facts.program.ops
                if other.lane == UP and (other.worker, other.payload) == (op.worker, op.payload)
                and other.id in self.begun and not self._consumed(other)
            ]  # fmt: skip
            assert len(staged) <= NUM_STAGING, "too many boundaries on a device"
        else:
            assert op.deps[0] in self.passed, "a boundary that was not made"

    def _consumed(self, upload: Op) -> bool:
        """Whether what a boundary's upload brought has been used, by the backward if a recompute reads it first."""
        program = self.facts.program
        followers = map(program.ops.__getitem__, self.ledger.followers(upload.id))
        reader = next(other for other in followers if other.lane == COMPUTE)
        if reader.kind is Kind.RECOMPUTE:
            row = program.compute[reader.worker]
            reader = program.ops[row[row.index(reader.id) + 1]]
        return reader.id in self.happened

    def _end(self, op: Op) -> None:
        if op.lane == COMPUTE:
            self._compute_ends(op)
        elif op.lane == HOST:
            self.versions[op.stage, (op.step + 1) % self.facts.buffers] = op.step + 1
        elif op.payload == WEIGHTS:
            visit = self.facts.program.visits[op.visit]
            self._check_versions(op)
            self.slots[visit.worker, visit.slot] = (op.visit, True)
        elif op.payload == WEIGHT_GRADIENT:
            self._sums_end(op)
        elif op.lane == UP:
            self.arrived.add((op.worker, op.payload, op.boundary, op.microbatch))
        else:
            self.on_host.add((op.payload, op.boundary, op.microbatch))

    def _compute_begins(self, op: Op) -> None:
        facts = self.facts
        if op.visit < 0:
            return
        visit = facts.program.visits[op.visit]
        assert self.slots[visit.worker, visit.slot] == (op.visit, True), "weights that are not there whole"
        first, last = stage_layers(facts.program.schedule, op)
        fused = facts.program.schedule.fused_head
        starts = op.kind is not Kind.BACKWARD or (fused and op.stage == 0)
        if starts and first > 0:
            assert (op.worker, ACTIVATION, first, op.microbatch) in self.arrived, "hidden states are missing"
        if op.kind is Kind.BACKWARD:
            if op.stage > 0:
                assert (op.worker, GRADIENT, last + 1, op.microbatch) in self.arrived, "a gradient is missing"
            if op.microbatch % facts.per_step == 0 or visit.layers in facts.program.host_folded:
                self.sums[op.visit] = ()

    def _compute_ends(self, op: Op) -> None:
        if op.visit < 0:
            return
        visit = self.facts.program.visits[op.visit]
        assert self.slots[visit.worker, visit.slot] == (op.visit, True), "weights were overwritten while they were read"
        if op.kind is Kind.BACKWARD:
            self.sums[op.visit] = (*self.sums.get(op.visit, ()), op.microbatch)

    def _slot_is_free(self, op: Op) -> None:
        program = self.facts.program
        for other in self.facts.before_in_slot[op.visit]:
            assert all(used in self.happened for used in program.visits[other].ops), "a slot that is still read"
            done = all(download in self.happened for download in program.visits[other].downloads)
            assert done, "gradient sums would be lost"

    def _weights_begin(self, op: Op) -> None:
        visit = self.facts.program.visits[op.visit]
        self._slot_is_free(op)
        self._check_versions(op)
        self.slots[visit.worker, visit.slot] = (op.visit, False)

    def _check_versions(self, op: Op) -> None:
        visit, facts = self.facts.program.visits[op.visit], self.facts
        wanted = max(op.step - facts.program.staleness, 0)
        for layer in layer_range(visit.layers):
            if layer in facts.updated:
                assert self.versions[layer, wanted % facts.buffers] == wanted, "weights of another version"

    def _update_begins(self, op: Op) -> None:
        """It reads the step's gradients and writes the version after the newest."""
        facts = self.facts
        for layers in facts.program.schedule.backward_stages:
            if layers[0] <= op.stage <= layers[1]:
                first = op.step * facts.per_step
                whole = tuple(range(first, first + facts.per_step))
                assert self.host_sums[layers, op.step] == whole, "a gradient is lost, or counted twice"
        target = (op.step + 1) % facts.buffers
        for upload in facts.program.ops:
            if upload.payload == WEIGHTS and upload.step <= op.step:
                reads = max(upload.step - facts.program.staleness, 0) % facts.buffers
                layers = facts.program.visits[upload.visit].layers
                if reads == target and layers[0] <= op.stage <= layers[1]:
                    assert upload.id in self.happened, "a version that is still to be read"
        self.versions[op.stage, target] = -1

    def _sums_begin(self, op: Op) -> None:
        facts, visit = self.facts, self.facts.program.visits[op.visit]
        if op.lane == UP:
            self._slot_is_free(op)
            first = min(other.microbatch for other in backward_ops(facts.program, op.visit))
            start = first - first % facts.per_step
            assert self.host_sums[visit.layers, op.step] == tuple(range(start, first)), "a sum that is not complete"
            return
        backwards = [other.id for other in backward_ops(facts.program, op.visit)]
        if visit.layers in facts.program.host_folded:
            backwards = op.deps[:1]
        assert all(other in self.happened for other in backwards), "a sum that is still added to"
        older = op.step - facts.buffers
        for layer in layer_range(visit.layers):
            updates = [
                other.id
                for other in facts.program.ops
                if other.lane == HOST and (other.stage, other.step) == (layer, older)
            ]
            assert all(update in self.happened for update in updates), "an older step's gradients are still to be read"

    def _sums_end(self, op: Op) -> None:
        facts, visit = self.facts, self.facts.program.visits[op.visit]
        key = visit.layers, op.step
        if op.lane == UP:
            self.sums[op.visit] = self.host_sums[key]
        elif visit.layers in facts.program.host_folded:
            added = facts.program.ops[op.deps[0]].microbatch
            self.host_sums[key] = tuple(sorted((*self.host_sums.get(key, ()), added)))  # waits in line for its turn
        else:
            self.host_sums[key] = self.sums[op.visit]

    def check_end(self) -> None:
        """Nothing can move any more: everything must have been done, once."""
        program = self.facts.program
        assert len(self.happened) == len(program.ops), "the protocol stands still"
        for (_, step), found in self.host_sums.items():
            first = step * self.facts.per_step
            assert found == tuple(range(first, first + self.facts.per_step)), "a gradient is lost, or counted twice"


def _copied(thing: Any) -> Any:
    other = copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, (list, dict, set, bytearray)):
            setattr(other, name, copy(value))
    return other
