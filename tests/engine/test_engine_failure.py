"""What happens when a worker fails or gets stuck: one error in the caller that names the place, and no thread left."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.engine.backends.base import Pair
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.dispatch import dispatch
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.prepared import StepContext
from roundpipe_cli.engine.stage import StageRunner
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.errors import DeviceLostError, InternalError, ResourceError
from roundpipe_cli.faults import FaultError, FaultExit
from roundpipe_cli.planning.adaptive import profile_schedule
from roundpipe_cli.schedule.program import Op
from tests.support.emulated import run_emulated
from tests.support.schedules import dealt
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for

NUM_STEPS = 3
MICROBATCHES = random_microbatches([(2, 8), (1, 6), (2, 5)])
PLACE = re.compile(
    r"^worker (?P<worker>\d) \(cpu\), (weights for )?(forward|recompute|backward) of stage (?P<stage>\d+) "
    r"\(layers (?P<first>\d+)-(?P<last>\d+)\), microbatch (?P<microbatch>\d+), step (?P<step>\d+), "
    r"layer (?P<layer>embed|block\.\d+|head)$"
)
Ask = Callable[[str], None]
Threads = Callable[[], list[str]]
Patch, Screen = pytest.MonkeyPatch, pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def rig() -> Rig:
    return make_rig("llama", "lora")


def run_steps(rig: Rig, engine: Engine, num_steps: int = NUM_STEPS) -> list[StepResult]:
    schedule = schedule_for(rig, engine.num_workers, len(MICROBATCHES))
    return [engine.run_step(MICROBATCHES, schedule, step=step) for step in range(num_steps)]


def bits(rig: Rig, engine: Engine) -> list[object]:
    (result,) = run_steps(rig, engine, 1)
    return [result.loss.hex(), *(gradient.numpy().tobytes() for gradient in rig.store.gradients)]


def threads_left(new_threads: Threads, most: int) -> list[str]:
    """Threads of the test, at most `most` unless 20 s pass: those that wait beside a hung one leave a little later."""
    deadline_s = time.monotonic() + 20.0
    while len(left := new_threads()) > most and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left


def place_of(error: InternalError | ResourceError) -> re.Match[str]:
    """The place that an error names, checked against itself."""
    where = error.problems[0].where
    assert where is not None
    match = PLACE.match(where)
    assert match is not None, where
    layers = ("embed", "block.0", "block.1", "block.2", "head")
    assert int(match["first"]) <= layers.index(match["layer"]) <= int(match["last"]), where
    assert 0 <= int(match["microbatch"]) < 2 * len(MICROBATCHES)
    return match


@pytest.mark.covering(2)
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("step", range(NUM_STEPS))
@pytest.mark.parametrize("point", ["compute", "upload", "prefetch", "download"])
def test_a_fault_is_raised_once_with_its_place(
    rig: Rig, ask: Ask, new_threads: Threads, point: str, step: int, num_workers: int
) -> None:
    worker = num_workers - 1
    ask(f"{point}:raise:step={step}:worker={worker}:nth=2")
    with pytest.raises(InternalError) as caught, rig.engine(num_workers, copy=True) as engine:
        run_steps(rig, engine)
    place = place_of(caught.value)
    assert (int(place["worker"]), int(place["step"])) == (worker, step + 1), "users count from 1"
    assert isinstance(caught.value.__cause__, FaultError) and caught.value.__cause__.__traceback__ is not None
    assert f"FaultError: fault asked for by '{point}:raise" in str(caught.value)
    assert caught.value.exit_code == 1 and len(caught.value.problems) == 1
    assert new_threads() == []


@pytest.mark.parametrize(("num_microbatches", "num_chunks"), [(2, 1), (1, 2)])
def test_every_download_that_fails_names_its_place(rig: Rig, ask: Ask, num_microbatches: int, num_chunks: int) -> None:
    """Story: that of a boundary in no program was a `KeyError`, and a device lost in it ended the run."""
    schedule = profile_schedule(rig.num_layers, 2, num_microbatches * num_chunks, num_chunks)
    with rig.engine(2, copy=True) as engine:
        for nth in itertools.count(1):
            ask(f"download:raise:nth={nth}")
            try:
                engine.run_step(MICROBATCHES[:num_microbatches], schedule, step=0)
                break
            except InternalError as error:
                place_of(error)
    assert nth > 10


def test_the_named_visit_is_the_one_whose_weights_failed(rig: Rig, ask: Ask) -> None:
    schedule = schedule_for(rig, 1, 1)
    order = list(dict.fromkeys((action.kind.value in "RB", action.stage) for action in schedule.actions[0]))
    assert schedule.backward_stages[order.pop()[1]] == (0, 0), "the embedding is never uploaded"
    for nth in (4, len(order)):
        ask(f"prefetch:raise:nth={nth}")
        with pytest.raises(InternalError) as caught, rig.engine(1, copy=True) as engine:
            engine.run_step(MICROBATCHES[:1], schedule, step=0)
        place = place_of(caught.value)
        assert ("forward" not in place[0], int(place["stage"])) == order[nth - 1]


@pytest.mark.parametrize(
    ("fault", "num_workers", "copy", "cause"),
    [
        ("compute:raise:step=1:worker=1:nth=3", 2, False, FaultError),
        ("compute:raise:step=1", 3, True, FaultError),
        ("compute:raise=FaultExit:step=1:nth=3", 2, True, FaultExit),
        ("upload:raise=MemoryError:step=1:nth=2", 2, True, MemoryError),
    ],
    ids=["workers that copy nothing", "all workers at once", "an exit", "out of memory"],
)
def test_one_error_comes(
    rig: Rig, ask: Ask, new_threads: Threads, fault: str, num_workers: int, copy: bool, cause: type[BaseException]
) -> None:
    ask(fault)
    kind, code = (ResourceError, 5) if cause is MemoryError else (InternalError, 1)
    with pytest.raises(kind) as caught, rig.engine(num_workers, copy=copy) as engine:
        run_steps(rig, engine)
    assert isinstance(caught.value.__cause__, cause) and caught.value.exit_code == code
    assert place_of(caught.value)["step"] == "2"
    assert ("micro_batch_size" in str(caught.value)) == (code == 5)
    assert new_threads() == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("point", ["compute", "upload"])
def test_a_stuck_worker_ends_the_step(
    rig: Rig, ask: Ask, new_threads: Threads, point: str, num_workers: int, monkeypatch: Patch, capfd: Screen
) -> None:
    """Story: an only worker ended a run with exit code 1, as a bug of the program, and no device was named."""
    monkeypatch.setattr(dispatch, "JOIN_TIMEOUT_S", 0.2)  # the hung thread never ends: it is a daemon
    monkeypatch.setattr(dispatch, "LEAVE_S", 0.5)
    ask(f"{point}:hang:step=1:worker=0:nth=2")
    with pytest.raises(DeviceLostError) as caught, rig.engine(num_workers, copy=True, watchdog_s=0.8) as engine:
        run_steps(rig, engine)
    assert "no progress" in str(caught.value) and "step 2" in str(caught.value)
    assert caught.value.workers == (0,) and caught.value.is_hang and caught.value.exit_code == 5
    assert "faults.py" in capfd.readouterr().err, "the stacks of all threads are shown"
    assert threads_left(new_threads, 1) == [f"{'worker' if point == 'compute' else 'up'}-0"]


@pytest.mark.parametrize("hang", [False, True])
def test_fewer_workers_compute_the_step_again(
    rig: Rig, ask: Ask, new_threads: Threads, hang: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "LEAVE_S", 0.5)
    with rig.engine(1, copy=True) as engine:
        expected = bits(rig, engine)
    with rig.engine(3, copy=True, watchdog_s=0.8) as engine:
        for lost in (1, 0):
            ask(f"compute:{'hang' if hang else 'raise=DeviceFault'}:worker={lost}:nth=2")
            with pytest.raises(DeviceLostError) as caught:
                run_steps(rig, engine, 1)
            assert caught.value.workers == (lost,) and caught.value.is_hang == hang
            assert engine.silent(but={lost} if hang else ()) == []
            assert engine.leave_out({lost}, hang=hang) == ((f"worker-{lost}",) if hang else ())
            ask("")
            assert bits(rig, engine) == expected
        assert engine.lanes == (2,)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < dispatch.JOIN_TIMEOUT_S
    assert len(threads_left(new_threads, 2 if hang else 0)) == (2 if hang else 0)


def test_a_failure_beside_a_stuck_worker_is_told(rig: Rig, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the stuck one would never end, and the failure says more than the watchdog."""
    for name in ("JOIN_TIMEOUT_S", "LEAVE_S"):
        monkeypatch.setattr(dispatch, name, 0.5)
    ask("compute:hang:worker=1:nth=1,compute:raise:worker=0:nth=2")
    with pytest.raises(InternalError) as caught, rig.engine(2, copy=True, watchdog_s=0.8) as engine:
        run_steps(rig, engine)
    assert isinstance(caught.value.__cause__, FaultError)
    assert place_of(caught.value)["worker"] == "0"


def test_what_is_being_copied_lives_until_its_device_is_done(rig: Rig, monkeypatch: Patch) -> None:
    """Story: lanes that left a failed step let go of it, and what is freed on a device that failed ends the process."""
    copied: list[StorageWeakRef] = []
    seen: list[bool] = []
    run = StageRunner.run

    class Late(CpuBackend):
        def copy_down(self, pairs: Sequence[Pair]) -> str:
            super().copy_down(pairs)
            copied.extend(StorageWeakRef(source.untyped_storage()) for _, source in pairs)
            return "arrives late"

        def happens_in_s(self, event: object) -> float:
            return 1e-3 * (event is not None)

        def synchronize(self) -> None:
            seen.extend(source.expired() for source in copied)

    def fails(self: StageRunner, context: StepContext, op: Op) -> None:
        run(self, context, op)
        while not copied:
            time.sleep(1e-3)
        raise MemoryError

    monkeypatch.setattr(StageRunner, "run", fails)
    engine = Engine(rig.skeleton, rig.split, rig.store, [Late(1, copy=True)])
    with engine, pytest.raises(ResourceError):
        run_steps(rig, engine, 1)
    assert seen and not any(seen)
    assert all(source.expired() for source in copied), "a step that ran out of memory is to be run again"


def test_slow_is_not_stuck(rig: Rig, ask: Ask) -> None:
    ask("compute:slow=0.08")
    with rig.engine(2, copy=True, watchdog_s=0.8) as engine:
        started_s = time.monotonic()
        run_steps(rig, engine, 1)
        assert time.monotonic() - started_s > 0.8


def test_an_interrupt_in_the_caller_ends_the_workers(rig: Rig, new_threads: Threads, monkeypatch: Patch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), rig.engine(2, copy=True) as engine:
        monkeypatch.setattr(engine._pool, "_collect", interrupted)
        run_steps(rig, engine)
    assert new_threads() == []
    assert not engine._open and engine._pool.is_stuck


# --- eight emulated workers -----------------------------------------------------------------------------------------
NUM_BLOCKS, MIB = 16, 1024**2
BLOCK = LayerCost(
    "block", 1e-4, 2e-4, recompute=True, param_bytes=MIB, boundary_bytes=MIB, grad_bytes=MIB, optimizer_s=1e-4
)
HEAD = LayerCost("head", 1e-4, 2e-4, recompute=False, param_bytes=MIB, grad_bytes=MIB, optimizer_s=1e-4)
COSTS = CostModel("small", (*[BLOCK] * NUM_BLOCKS, HEAD), hop_s=1e-4, link_bytes_per_s=40e9)
POINTS = {**{"compute": ":worker=5", "upload": ":worker=6", "prefetch": ":worker=3", "download": ":worker=7"},
          "optimizer": ""}  # fmt: skip


def emulate(watchdog_s: float = 60.0) -> None:
    forward = [(start, start + 3) for start in range(0, NUM_BLOCKS, 4)]
    backward = [(NUM_BLOCKS, NUM_BLOCKS), *((start, start + 1) for start in range(NUM_BLOCKS - 2, -1, -2))]
    run_emulated(dealt(forward, backward, 8, 8, COSTS, num_steps=NUM_STEPS), COSTS, watchdog_s=watchdog_s)


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", range(NUM_STEPS))
@pytest.mark.parametrize("point", sorted(POINTS))
def test_one_error_with_its_place(ask: Ask, new_threads: Threads, point: str, step: int) -> None:
    who = POINTS[point].removeprefix(":").replace("=", " ")
    for action, kind, code in (("raise", InternalError, 1), ("raise=MemoryError", ResourceError, 5)):
        ask(f"{point}:{action}:step={step}{POINTS[point]}:nth=1")
        with pytest.raises(kind) as caught:
            emulate()
        assert len(caught.value.problems) == 1 and caught.value.exit_code == code
        where = caught.value.problems[0].where or ""
        assert where.startswith(f"{who} (emulated), " if who else "host (emulated), update of layer "), where
        assert where.endswith(f"step {step + 1}"), where
        assert new_threads() == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("step", range(NUM_STEPS))
@pytest.mark.parametrize("point", sorted(POINTS))
def test_a_hang_is_ended_by_the_watchdog(
    ask: Ask, new_threads: Threads, point: str, step: int, monkeypatch: Patch, capfd: Screen
) -> None:
    for name in ("JOIN_AFTER_ERROR_S", "LEAVE_S"):  # the hung thread never ends: it is a daemon
        monkeypatch.setattr(dispatch, name, 0.5)
    ask(f"{point}:hang:step={step}{POINTS[point]}:nth=1")
    with pytest.raises((DeviceLostError, InternalError), match="no progress"):
        emulate(watchdog_s=0.8)
    assert "faults.py" in capfd.readouterr().err, "the stacks of all threads are shown"
    assert len(left := threads_left(new_threads, 1)) == 1, left
