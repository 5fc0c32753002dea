"""The lowering, and what simulators make of it, on cases small enough to do by hand; published figures; pictures."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roundpipe_cli.costs.cost import CHUNK_BYTES, CostModel, LayerCost, StageRange, keep_activations, skip_projections
from roundpipe_cli.planning.search.ranges import backward_ranges, forward_ranges
from roundpipe_cli.schedule.actions import Kind, Schedule, equal_costs
from roundpipe_cli.schedule.builders import Dealer, Options, Rounds, build_schedule
from roundpipe_cli.schedule.pictures import chrome_trace, svg_picture
from roundpipe_cli.schedule.program import (
    ACTIVATION,
    GRADIENT,
    LAST,
    NEXT,
    SAVED,
    URGENT,
    WEIGHT_GRADIENT,
    WEIGHTS,
    lower,
)
from roundpipe_cli.schedule.simulate import simulate, simulated_step_s
from roundpipe_cli.schedule.timeline import DOWN, HOST, UP, Timeline, bubble, compute_rows, makespan_s, utilization
from tests.support.schedules import dealt


def model(num_blocks: int, **block: float) -> CostModel:
    """Blocks of 1 s forward and 2 s backward, a head of 1 and 1; links of 1 byte/s."""
    one = LayerCost("block", 1.0, 2.0, recompute=True)
    layers = (*[replace(one, **block)] * num_blocks, LayerCost("head", 1.0, 1.0, recompute=False))  # type: ignore[arg-type]
    return CostModel("by hand", layers, link_bytes_per_s=1.0)


def roundpipe(num_workers: int = 1, num_microbatches: int = 1, num_steps: int = 1) -> Schedule:
    """Four blocks; forward stages of one and three, backward stages of two."""
    return dealt([(0, 0), (1, 3)], [(4, 4), (2, 3), (0, 1)], num_workers, num_microbatches, num_steps=num_steps)


def spans(timeline: Timeline, lane: str, worker: int = 0) -> list[tuple[str, float, float]]:
    found = [i for i in timeline.intervals if i.lane == lane and i.worker == worker]
    found.sort(key=lambda interval: interval.start_s)
    return [(f"{i.stage}{i.kind.value}{i.microbatch}", i.start_s, i.end_s) for i in found]


def test_every_visit_uploads_its_weights_once_into_the_slots_in_turn() -> None:
    program = lower(roundpipe(num_microbatches=2), replace(model(4, param_bytes=3, grad_bytes=1), slots=2))
    # one microbatch per round on one worker: five visits a round, of which the head's has no bytes
    assert [visit.layers for visit in program.visits[:5]] == [(0, 0), (1, 3), (4, 4), (2, 3), (0, 1)]
    assert [visit.slot for visit in program.visits[:5]] == [0, 1, 0, 1, 0]
    uploads = [op for op in program.ops if op.payload == WEIGHTS]
    assert [op.num_bytes for op in uploads] == [3, 9, 6, 6] * 2
    assert [op.priority[0] for op in uploads] == [NEXT] * 8
    # in the second round gradients go on from where the first left them
    sums = [op for op in program.ops if op.payload == WEIGHT_GRADIENT]
    assert sorted((op.lane, op.num_bytes, op.priority[0]) for op in sums) == [
        *[(DOWN, 2, LAST)] * 4,
        *[(UP, 2, NEXT)] * 2,
    ]


def test_a_bound_stage_stays_in_its_slot_for_the_whole_step() -> None:
    schedule = build_schedule("1f1b", forward_stages=[(0, 1), (2, 4)], num_workers=2, rounds=Rounds(4, num_steps=2))
    program = lower(schedule, model(4, param_bytes=3))
    assert [(visit.worker, visit.step, len(visit.ops)) for visit in program.visits] == [
        *[(0, 0, 12), (0, 1, 12), (1, 0, 12), (1, 1, 12)]
    ]


def test_boundaries_go_down_and_up_and_inner_ones_are_saved() -> None:
    schedule = dealt([(0, 3)], [(4, 4), (2, 3), (0, 1)], 2, 1)
    program = lower(schedule, model(4, boundary_bytes=5))
    moved = [(op.lane, op.payload, op.worker, op.priority[0]) for op in program.ops if op.num_bytes]
    assert sorted(moved) == sorted(
        [
            (DOWN, ACTIVATION, 0, URGENT),  # into the head's stage on worker 1
            (UP, ACTIVATION, 1, URGENT),
            (DOWN, ACTIVATION, 0, SAVED),  # where blocks 2 and 3 are recomputed from
            (UP, ACTIVATION, 0, URGENT),
            (DOWN, GRADIENT, 1, URGENT),
            (UP, GRADIENT, 0, URGENT),
            (DOWN, GRADIENT, 0, URGENT),
            (UP, GRADIENT, 1, URGENT),
        ]
    )


def test_the_embeddings_rows_come_from_the_host() -> None:
    costs = model(4)
    embed = LayerCost("embed", 0.0, 0.0, recompute=False, boundary_bytes=5)
    costs = replace(costs, layers=(embed, *costs.layers))
    schedule = build_schedule("gpipe", forward_stages=[(0, 5)], num_workers=1, rounds=Rounds(1))
    uploads = [op for op in lower(schedule, costs).ops if op.lane == UP]
    assert [(op.stage, op.num_bytes, op.deps) for op in uploads] == [(0, 5, []), (0, 5, [])]


def test_prefetch_hides_uploads_where_there_are_two_slots() -> None:
    """Uploads of 1, 3, 2 and 2 s: with one slot each waits for the stage before, with two the backward's are hidden."""
    schedule = roundpipe()
    costs = model(4, param_bytes=1)
    one, two = (simulate(schedule, replace(costs, slots=slots)) for slots in (1, 2))
    assert [(start, end) for _, start, end in spans(two, UP)] == [(0, 1), (1, 4), (7, 9), (9, 11)]
    assert [(start, end) for _, start, end in spans(one, UP)] == [(0, 1), (2, 5), (10, 12), (18, 20)]
    assert makespan_s(simulate(schedule, costs, accounting="published")) == 18
    assert (makespan_s(two), makespan_s(one)) == (21, 26)


def test_a_boundary_overtakes_weights_at_the_next_chunk_border() -> None:
    costs = replace(model(4, param_bytes=4 * CHUNK_BYTES), link_bytes_per_s=CHUNK_BYTES / 1.0)
    layers = tuple(replace(layer, boundary_bytes=CHUNK_BYTES // 2) for layer in costs.layers[:-1])
    costs = replace(costs, layers=(*layers, costs.layers[-1]))
    timeline = simulate(roundpipe(num_workers=2), costs)
    # worker 1 loads blocks 1 to 3, 12 chunks of 1 s; block 0's boundary is made at 5 and down at 5.5
    assert spans(timeline, UP, worker=1)[:3] == [("1U-1", 0, 6), ("1U0", 6, 6.5), ("1U-1", 6.5, 12.5)]


def test_updates_wait_for_all_gradients_and_the_next_step_for_the_updates() -> None:
    schedule = roundpipe(num_steps=2)
    costs = model(4, grad_bytes=1, optimizer_s=0.5)
    timeline = simulate(schedule, costs)
    first, second = (row for row in (spans(timeline, HOST, -1)[:5], spans(timeline, HOST, -1)[5:]))
    # F 2+2, head 2, R 2 B 4 twice: 18; the last gradients need 2 s more; four updates of 0.5
    assert first[0] == ("-1O-1", 20.0, 20.0)
    assert [start for _, start, _ in first[1:]] == [20.0, 20.5, 21.0, 21.5]
    # the second step begins with block 0 and goes on when blocks 1 to 3 are updated too
    assert [interval.start_s for interval in compute_rows(timeline)[0][7:9]] == [20.5, 22.0]
    assert second[-1][2] == makespan_s(timeline) == 43.0


def test_a_step_after_another_begins_with_its_updates() -> None:
    """From gate to gate: block 0 computes when it is updated, blocks 1 to 3 wait for theirs."""
    schedule, costs = roundpipe(), model(4, grad_bytes=1, optimizer_s=0.5)
    timeline = simulate(schedule, costs, after_update=True)
    assert [start for _, start, end in spans(timeline, HOST, -1) if end > start] == [0.0, 0.5, 1.0, 1.5]
    assert [interval.start_s for interval in compute_rows(timeline)[0][:2]] == [0.5, 2.0]
    # two steps and all their updates end at 43.0, one at 22.0
    assert makespan_s(timeline) == simulated_step_s(schedule, costs) == 21.0


def test_rows_of_a_tied_embedding_wait_for_the_heads_update() -> None:
    embed = LayerCost("embed", 0.0, 0.0, recompute=False, boundary_bytes=5)
    costs = model(4, optimizer_s=0.5)
    costs = replace(costs, layers=(embed, *costs.layers[:-1], replace(costs.layers[-1], optimizer_s=0.5)))
    schedule = build_schedule("gpipe", forward_stages=[(0, 5)], num_workers=1, rounds=Rounds(1))
    for tied, order in ((False, [1, 2, 3, 4, 5]), (True, [5, 1, 2, 3, 4])):
        program = lower(schedule, replace(costs, tied=tied), after_update=True)
        updates = sorted((op for op in program.ops if op.kind is Kind.OPTIMIZER), key=lambda op: op.priority)
        assert [op.stage for op in updates if op.stage >= 0] == order
        rows = [op for op in program.ops if op.lane == UP and op.boundary == 0]
        assert [[program.ops[dep].stage for dep in op.deps] for op in rows] == ([[5]] * 2 if tied else [[]] * 2)


def free_first(costs: CostModel, forward: list[StageRange], backward: list[StageRange], microbatches: int) -> Schedule:
    """On two workers, each microbatch dealt to whoever ends it first, in rounds of two."""
    return dealt(forward, backward, 2, microbatches, costs, per_round=2, options=Options(earliest_free=True))


def test_gradients_wait_for_their_lane_in_twos() -> None:
    """What waits takes device memory: a slow lane holds its worker up before the third microbatch's."""
    costs = model(2, grad_bytes=8)
    program = lower(free_first(costs, [], [(0, 2)], 8), costs)
    assert program.host_folded == {(0, 2)}
    for visit in program.visits:
        backwards = [op_id for op_id in visit.ops if program.ops[op_id].kind is Kind.BACKWARD]
        assert len(backwards) == len(visit.downloads) == 4
        waits = [set(program.ops[op_id].deps) & set(visit.downloads) for op_id in backwards]
        assert waits == [set(), set(), {visit.downloads[0]}, {visit.downloads[1]}]


def test_interleaved_visits_send_each_microbatchs_gradients() -> None:
    costs = model(2, grad_bytes=8)
    program = lower(free_first(costs, [(0, 1)], [(2, 2), (0, 1)], 4), costs)
    sums = [op for op in program.ops if op.payload == WEIGHT_GRADIENT]
    assert program.host_folded == {(0, 1)}
    assert [op.kind for op in sums] == [Kind.DOWNLOAD] * 4
    gate = next(op for op in program.ops if op.kind is Kind.OPTIMIZER)
    assert {op.id for op in sums} <= set(gate.deps)


def test_the_host_adds_up_what_leaves_one_by_one() -> None:
    """Two workers share a stage, so each microbatch's gradients go down, two bytes a value, and wait for the host."""
    costs = replace(model(2, grad_bytes=4), leaving_bytes=2, host_bytes_per_s=10.0)
    schedule = free_first(costs, [(0, 1)], [(2, 2), (0, 1)], 2)
    timeline = simulate(schedule, costs, after_update=True)
    # per worker F 2, head 2, R 2, B 4; then 2 values of 2 bytes down; 2 values added at 10 bytes each take 2 s, and
    # the last microbatch's are squared for the norm, 5 bytes more each
    assert [(start, end) for _, start, end in spans(timeline, DOWN)] == [(10, 14)]
    added = [(start, end) for _, start, end in spans(timeline, HOST, -1) if end > start]
    assert [start for start, _ in added] == [14, 16] or [start for start, _ in added] == [14, pytest.approx(17)]
    assert makespan_s(timeline) == pytest.approx(14 + 2 + 3)
    free = simulate(schedule, replace(costs, host_bytes_per_s=None), after_update=True)
    assert makespan_s(free) == 14


def test_all_links_share_the_hosts_memory() -> None:
    schedule, costs = roundpipe(num_workers=2, num_microbatches=2), model(4, param_bytes=4)
    moved = sum(op.num_bytes for op in lower(schedule, costs).ops if op.lane in (UP, DOWN))
    usual_s = simulated_step_s(schedule, costs)
    for rate, wanted_s in ((moved / 5.0, usual_s), (moved / 500.0, 500.0)):
        priced = replace(costs, host_bytes_per_s=rate)
        assert simulated_step_s(schedule, priced) == pytest.approx(wanted_s)
        assert makespan_s(simulate(schedule, priced, after_update=True)) == pytest.approx(wanted_s)


def test_staleness_1_runs_updates_beside_the_next_step() -> None:
    schedule = roundpipe(num_steps=4)
    costs = model(4, grad_bytes=1, optimizer_s=0.5)
    timeline = simulate(schedule, costs, staleness=1)
    forwards = [i.start_s for i in compute_rows(timeline)[0] if i.kind is Kind.FORWARD and i.stage == 0]
    assert forwards == [0, 18, 36, 54]
    slow = simulate(schedule, model(4, grad_bytes=1, optimizer_s=10.0), staleness=1)
    forwards = [i.start_s for i in compute_rows(slow)[0] if i.kind is Kind.FORWARD and i.stage == 0]
    # step 2 needs the update of step 0: gradients at 20, block 3 updated at 60, so it runs from 36 to 77
    assert forwards == [0, 18, 36, 77]


def test_recompute_without_the_last_projection_and_kept_activations() -> None:
    schedule = roundpipe()
    costs = model(4, recompute_skippable_s=0.25)
    whole = makespan_s(simulate(schedule, costs))
    assert makespan_s(simulate(schedule, skip_projections(costs))) == whole - 4 * 0.25
    assert makespan_s(simulate(schedule, keep_activations(costs, {0, 3}))) == whole - 2


@pytest.mark.parametrize(("num_workers", "loops", "num_microbatches"), [(2, 2, 4), (4, 3, 8), (3, 2, 3), (4, 2, 10)])
def test_looped_orders_are_those_of_pytorch(num_workers: int, loops: int, num_microbatches: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    num_stages = num_workers * loops
    stages = [(index, index) for index in range(num_stages)]
    groups = max(1, num_microbatches // num_workers)
    theirs = SimpleNamespace(n_local_stages=loops, pp_group_size=num_workers, _n_microbatches=num_microbatches)
    theirs.microbatches_per_round, theirs._stages = num_microbatches // groups, [None] * loops
    for name, torch_name in (("interleaved_1f1b", "ScheduleInterleaved1F1B"), ("looped_bfs", "ScheduleLoopedBFS")):
        ours = build_schedule(name, forward_stages=stages, num_workers=num_workers, rounds=Rounds(num_microbatches))
        assert len(ours.actions) == num_workers
        for rank, row in enumerate(ours.actions):
            order = getattr(schedules, torch_name)._calculate_single_rank_operations(theirs, rank)
            expected = [(op.computation_type.value, op.stage_index, op.microbatch_index) for op in order if op]
            assert expected == [
                (a.kind.value, a.stage if a.kind is Kind.FORWARD else num_stages - 1 - a.stage, a.microbatch)
                for a in row
                if a.kind is not Kind.RECOMPUTE
            ]


# --- the published accounting: against the published figures, and by hand ---------------------------------------------
FIGURES = Path(__file__).resolve().parents[1] / "facts" / "published_schedules.json"
CASES = [
    (model, schedule)
    for model in ("Llama3-8B", "Qwen3-32B")
    for schedule in ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b", "roundpipe")
]


def published_costs(model: dict[str, Any]) -> CostModel:
    block = LayerCost("block", model["block_forward_ms"] / 1e3, model["block_backward_ms"] / 1e3, recompute=True)
    head = LayerCost("head", model["head_forward_ms"] / 1e3, model["head_backward_ms"] / 1e3, recompute=False)
    return CostModel("published", (*[block] * model["blocks"], head), hop_s=model["hop_ms"] / 1e3)


def published_stages(model: dict[str, Any], figures: dict[str, Any]) -> dict[str, list[StageRange]]:
    """The figures count blocks; the head joins the last stage, or the first backward stage of roundpipe."""
    head = model["blocks"]
    if "blocks_per_stage" in figures:
        *before, (first, _) = forward_ranges(figures["blocks_per_stage"])
        return {"forward_stages": [*before, (first, head)]}
    in_head_stage, *others = figures["blocks_per_backward_stage"]
    return {
        "forward_stages": list(forward_ranges(figures["blocks_per_forward_stage"])),
        "backward_stages": list(backward_ranges([in_head_stage + 1, *others], head + 1)),
    }


@pytest.mark.skipif(not FIGURES.exists(), reason="published figures are not at hand")
@pytest.mark.parametrize(("model_name", "name"), CASES)
def test_published_figures(model_name: str, name: str) -> None:
    data = json.loads(FIGURES.read_text())
    model = data["models"][model_name]
    figures = model["schedules"][name]
    costs = published_costs(model)
    stages, rounds = published_stages(model, figures), Rounds(data["microbatches"])
    schedule = build_schedule(name, **stages, num_workers=data["workers"], rounds=rounds, costs=costs)
    timeline = simulate(schedule, costs, accounting="published")
    parts = bubble(timeline)
    assert makespan_s(timeline) * 1e3 == pytest.approx(figures["makespan_ms"], rel=1e-6)
    for part in ("fill", "switch", "drain", "steady"):
        assert 100 * getattr(parts, part) == pytest.approx(figures[f"{part}_pct"], abs=1e-3)
    assert 100 * parts.ratio == pytest.approx(figures["bubble_pct"], abs=1e-3)


def layer(forward_s: float, backward_s: float, recompute: bool = True) -> LayerCost:
    return LayerCost("layer", forward_s, backward_s, recompute)


def test_a_stage_without_layers_takes_no_time_but_its_hops_count() -> None:
    costs = CostModel("one block", (layer(1, 2), layer(1, 1, recompute=False)), hop_s=0.5)
    schedule = build_schedule(
        "gpipe", forward_stages=[(0, 0), (1, 0), (1, 1)], num_workers=3, rounds=Rounds(1), costs=costs
    )
    timeline = simulate(schedule, costs, accounting="published")
    # F0 0-1, hop, nothing, hop, F 2-3, B 3-4, hop, nothing, hop, R 5-6, B 6-8
    assert makespan_s(timeline) == 8
    assert utilization(timeline) == [0.5, 0, 0.25]
    assert bubble(timeline).fill == pytest.approx((0 + 8 + 2) / 24)


@pytest.mark.parametrize(
    "options", [Options(), Options(head_workers=2), Options(earliest_free=True)], ids=["in turn", "head", "free"]
)
def test_the_dealers_clock_is_the_simulators(options: Options) -> None:
    draw = random.Random(6)
    for _ in range(40):
        num_workers, num_microbatches = draw.randint(1, 4), draw.randint(1, 9)
        blocks = [layer(draw.uniform(0.5, 2), draw.uniform(1, 3)) for _ in range(6)]
        costs = CostModel("random", (*blocks, layer(draw.random(), 1, recompute=False)), hop_s=draw.choice((0.0, 0.3)))
        costs = replace(costs, worker_speed=tuple(draw.choice((1.0, 0.6)) for _ in range(num_workers)))
        stages = ((0, 2), (3, 4), (5, 5)), ((6, 6), (4, 5), (2, 3), (0, 1))
        dealer = Dealer(num_workers, costs, stages, options)
        per_round = draw.randint(1, num_microbatches)
        dealer.deal_step(range(num_microbatches), per_round)
        schedule = dealt(*stages, num_workers, num_microbatches, costs, per_round=per_round, options=options)
        rows = compute_rows(simulate(schedule, costs, accounting="published"))
        assert dealer.free_s == pytest.approx([max((one.end_s for one in row), default=0.0) for row in rows])


# --- pictures of one small timeline -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Two blocks and a head: F 1, R 1, B 2, head F 1 B 2; weights take 0.5 per layer to upload."""
    costs = equal_costs(3)
    layers = tuple(replace(layer, param_bytes=1, grad_bytes=1, optimizer_s=0.25) for layer in costs.layers)
    costs = replace(costs, layers=layers, link_bytes_per_s=2.0)
    schedule = build_schedule("gpipe", forward_stages=[(0, 0), (1, 2)], num_workers=2, rounds=Rounds(1))
    return simulate(schedule, costs)


SVG = "{http://www.w3.org/2000/svg}"


def test_svg_has_a_row_per_timeline_and_a_box_per_action(timeline: Timeline) -> None:
    """Marks had white strokes that hid the narrow ones; there was no axis, no unit, no word that it is simulated."""
    text = svg_picture([("one <&>", timeline), ("two", timeline)], heading="a model on <8x4090>", note="simulated")
    root = xml.etree.ElementTree.fromstring(text)
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.attrib.get("class", "").startswith("kind-") and len(bar)]
    assert [bar[0].text for bar in bars] == ["0F0", "1R0", "1B0", "1F0", "0R0", "0B0"] * 2
    assert not any("stroke" in bar.attrib for bar in root.iter(f"{SVG}rect"))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts.count("worker 1") == 2
    assert {"one <&>", "a model on <8x4090>", "simulated", "recompute", "0 s", "10 s"} <= set(texts)
    assert "prefers-color-scheme: dark" in text and not any("busy" in str(shown) for shown in texts)


def test_trace_opens_in_perfetto(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(timeline.intervals)
    first = next(event for event in spans if event["name"] == "0F0")
    assert (first["pid"], first["tid"], first["ts"], first["dur"]) == (1, 0, 0.5e6, 1e6)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"host", "worker 0", "worker 1", "compute", "host to device", "device to host", "optimizer"}
    assert {"weights up", "weight gradients down", "update of layer 2"} <= {event["name"] for event in spans}
