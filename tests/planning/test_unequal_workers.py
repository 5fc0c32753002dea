"""Workers of different speed: found by the first steps, dealt their share, left out where they would hold others up."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.planning.adaptive import CONFIRM_STEPS, PROFILE_STEPS, AdaptivePlanner
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, StageCut, run
from roundpipe_cli.planning.dealing import deal_out
from roundpipe_cli.recipe.schema import PipelineConfig
from roundpipe_cli.schedule.builders import Options
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import busy_s, makespan_s
from tests.support.covering import swept

BLOCKS, MICROBATCHES = 6, 12
searched = functools.partial(choose, "roundpipe", effort="quick")  # as `plan` and a run search


def costs(blocks: int = BLOCKS, speeds: tuple[float, ...] | None = None, *, link: float = 1e15) -> CostModel:
    """Blocks of 10 ms with the weights of a small one, a frozen head."""
    block = LayerCost("b", 0.01, 0.02, True, param_bytes=10**7, boundary_bytes=10**6, recompute_s=0.01)
    names = [replace(block, name=f"block.{index}") for index in range(blocks)]
    embed, head = LayerCost("embed", 0, 0, False, boundary_bytes=10**6), LayerCost("head", 0, 0.03, False)
    return CostModel("layers", (embed, *names, head), link_bytes_per_s=link, worker_speed=speeds)


class Machine:
    """Times of steps as workers of these speeds would take them, with some noise."""

    def __init__(self, speeds: tuple[float, ...], noise: float = 0.0, seed: int = 0) -> None:
        self.costs = costs(speeds=speeds)
        self.noise, self.rng = noise, random.Random(seed)
        self.slow_steps: dict[int, float] = {}  # step -> by what its worker 1 is slowed down
        self.steps = 0

    def step(self, planner: AdaptivePlanner) -> StepResult:
        timeline = simulate(planner.schedule(MICROBATCHES), self.costs)
        slow = self.slow_steps.get(self.steps, 1.0)
        self.steps += 1
        actions = []
        for item in timeline.intervals:
            if item.lane == "compute":
                taken = (item.end_s - item.start_s) * self.rng.lognormvariate(0, self.noise)
                taken *= slow if item.worker == 1 else 1.0
                actions.append(item._replace(end_s=item.start_s + taken))
        workers = timeline.num_workers
        return StepResult(0.0, 1, 0.0, makespan_s(timeline), tuple(actions), workers, 0, (0,) * workers)


def trained(machine: Machine, pipeline: PipelineConfig | None = None) -> AdaptivePlanner:
    """What a run has learnt of a machine in its first steps."""
    rough = replace(costs(), layers=tuple(replace(layer, recompute_s=None) for layer in costs().layers))
    speeds = machine.costs.worker_speed
    assert speeds is not None
    planner = AdaptivePlanner(rough, len(speeds), pipeline or PipelineConfig())
    while not planner.measured:
        planner.observe(machine.step(planner).timeline)
    assert machine.steps <= PROFILE_STEPS + CONFIRM_STEPS
    return planner


def shares(planner: AdaptivePlanner) -> list[float]:
    """Each worker's part of the computing, in seconds of the fastest."""
    speeds = planner.costs.worker_speed
    assert speeds is not None
    busy = busy_s(simulate(planner.schedule(MICROBATCHES), planner.costs))
    work = [seconds * speed for seconds, speed in zip(busy, speeds, strict=True)]
    return [part / sum(work) for part in work]


@pytest.mark.parametrize("speeds", [(0.5, 1.0, 1.0), *swept([(1.0, 0.5), (1.0, 0.8, 0.4, 1.0)])])
def test_the_first_steps_show_who_is_slower_and_stages_are_dealt_accordingly(speeds: tuple[float, ...]) -> None:
    planner = trained(Machine(speeds, noise=0.03, seed=len(speeds)))
    found = planner.costs.worker_speed
    assert found == pytest.approx(speeds, rel=0.05)
    assert [layer.backward_s for layer in planner.costs.layers[1:-1]] == pytest.approx([0.02] * BLOCKS, rel=0.05)
    assert shares(planner) == pytest.approx([speed / sum(speeds) for speed in speeds], abs=0.05)


def test_the_recipe_may_have_it_otherwise() -> None:
    in_turn = trained(Machine((1.0, 0.5)), PipelineConfig(dispatch="round_robin"))
    schedule = in_turn.schedule(MICROBATCHES)
    for row in schedule.actions:  # a stage's microbatches of a round stay together
        visits = {(action.stage, action.microbatch // schedule.microbatches_per_round) for action in row}
        assert len(row) >= len(visits) * min(MICROBATCHES, schedule.microbatches_per_round)
    free = trained(Machine((1.0, 1.0)), PipelineConfig(dispatch="earliest_free"))
    assert free.costs.worker_speed is None
    assert len({action.worker for row in free.schedule(2).actions for action in row if not action.stage}) == 2


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_noise_makes_no_worker_slower(noise: float) -> None:
    for seed in range(3):
        workers = 2 + seed
        machine = Machine((1.0,) * workers, noise, seed)
        machine.slow_steps = {1: 1.5} if seed % 2 else {0: 2.0}  # something else ran in one of the steps
        planner = trained(machine)
        assert planner.costs.worker_speed is None


def test_a_small_difference_is_none_and_alike_workers_are_equal() -> None:
    assert trained(Machine((1.0, 0.93), noise=0.01)).costs.worker_speed is None
    found = trained(Machine((1.0, 0.99, 0.51, 0.5), noise=0.01)).costs.worker_speed
    assert found is not None and found[:2] == (1.0, 1.0) and found[2] == found[3] == pytest.approx(0.505, rel=0.03)


def test_two_workers_one_slowed_twofold_do_the_work_of_one_and_a_half() -> None:
    planner = trained(Machine((1.0, 0.5), noise=0.02))
    both_s = makespan_s(simulate(planner.schedule(MICROBATCHES), planner.costs))
    alone = SimulationCase(replace(planner.costs, worker_speed=None), 1, MICROBATCHES)
    alone_s = run("roundpipe", searched(alone), alone).step_s
    assert alone_s / both_s >= 0.97 * 1.5


def test_no_choice_is_slower_than_without_the_slow_workers() -> None:
    rng = random.Random(7)
    for _ in range(3):
        workers, slow = rng.randint(2, 4), rng.choice((0.05, 0.3, 0.6, 0.9))
        count = rng.randint(1, workers - 1)
        speeds = (1.0,) * (workers - count) + (slow,) * count
        model = costs(rng.randint(2, 6), speeds, link=rng.choice((1e15, 5e9, 5e8)))
        microbatches = rng.randint(1, 10)
        alone = SimulationCase(replace(model, worker_speed=None), workers - count, microbatches)
        together = SimulationCase(model, workers, microbatches)
        fewer_s = run("roundpipe", searched(alone), alone).step_s
        step_s = run("roundpipe", searched(together), together).step_s
        assert step_s <= fewer_s * 1.01, (speeds, microbatches)


def test_equal_workers_and_published_accounting_take_turns() -> None:
    planned = searched(SimulationCase(costs(4), 2, 6))
    for question in (
        SimulationCase(costs(4, (0.5, 0.5)), 2, 6),
        SimulationCase(costs(4), 2, 6),
        SimulationCase(costs(4, (1.0, 0.5)), 2, 6, accounting="published"),
        SimulationCase(costs(4, (1.0, 0.5)), 2, 6, auto_dealing=False),
        SimulationCase(costs(4, (1.0, 0.5)), 2, 6, options=Options(head_workers=2)),
    ):
        assert deal_out(planned, question) is planned


def test_the_last_microbatches_do_not_wait_for_a_slow_worker() -> None:
    """Given to whoever could start it, the only microbatch's last stage went to an idle worker ten times as slow."""
    question = SimulationCase(costs(1, (1.0, 0.1)), 2, 1, options=Options(earliest_free=True))
    stages = StageCut(((0, 0), (1, 1)), ((2, 2), (1, 1), (0, 0)))
    assert busy_s(run("roundpipe", stages, question).timeline)[1] == 0.0
