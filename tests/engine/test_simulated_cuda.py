"""The real CUDA backend on simulated GPUs: every feature gives the processor's bits, and all accesses are ordered."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from roundpipe_cli import faults
from roundpipe_cli.errors import InternalError
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.finetune import run_finetune
from roundpipe_cli.train.reporting import Reporting, Start
from roundpipe_cli.train.signals import StopSignals
from tests.support.e2e import make_model, make_workspace, metrics
from tests.support.simulated_cases import CASES, Bits, gradient_bits, is_equal, page_locked, simulated, two_workers

NUM_SEEDS = 4


@functools.cache
def expected(name: str) -> Bits:
    return CASES[name].on_processor()


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_bits_are_those_of_the_processor(name: str) -> None:
    """Two unlike cards, whatever the host learns late of events; every other run with copies put off."""
    for seed, found, simulation in CASES[name].simulated_seeds(range(NUM_SEEDS)):
        assert is_equal(found, expected(name)), f"seed {seed}"
        assert sum(simulation.machine.launches.values()) > 100, "nothing ran on the simulated cards"


@pytest.mark.parametrize("name", ["lora", "full", "staleness-1", "cache-whole"])
def test_one_card_listed_twice(name: str) -> None:
    for seed in range(2):
        found, _ = CASES[name].simulated(seed, devices=(0, 0), lazy=seed == 1)
        assert is_equal(found, expected(name)), f"seed {seed}"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Ask for a fault, as the environment variable has it."""

    def set_fault(text: str) -> None:
        monkeypatch.setenv(faults.ENVIRONMENT_VARIABLE, text)
        faults.load_faults()

    yield set_fault
    monkeypatch.undo()
    faults.load_faults()


@pytest.mark.parametrize("name", ["lora", "full"])
def test_a_failed_step_is_done_before_the_next_uses_its_memory(name: str, ask: Callable[[str], None]) -> None:
    """Slots were freed and gradient sums zeroed while what the failed step had issued still used them."""
    case = CASES[name]
    count = 2 + len(case.rig().store.layouts)  # of one step: the loss, the norm, and a gradient for each layer
    rig = case.rig()
    with simulated() as simulation, page_locked(rig), two_workers(rig) as engine:
        schedule = case.schedule(rig, len(case.microbatches))
        for seed, point in enumerate(["compute", "upload", "download"] * 2):
            simulation.draw_again(seed, lazy=False)
            ask(f"{point}:raise:nth={4 + seed // 3}")
            with pytest.raises(InternalError):
                engine.run_step(case.microbatches, schedule, step=0)
            ask("")
            result = engine.run_step(case.microbatches, schedule, step=0)
            found = [result.loss, result.gradient_norm, *gradient_bits(rig, 0)]
            assert is_equal(found, expected(name)[:count]), f"{point}, seed {seed}"


@pytest.mark.parametrize("failing", [0, 1])
def test_either_of_two_steps_under_way_may_fail(failing: int, ask: Callable[[str], None]) -> None:
    """The other ends, or is given up; nothing is read or written out of order meanwhile."""
    case = CASES["staleness-1"]
    for seed in range(2):
        ask(f"compute:raise:step={failing}:nth=3")
        with pytest.raises(InternalError, match=f"step {failing}"):
            case.simulated(seed, lazy=seed == 1)


@pytest.mark.parametrize("name", ["lora", "full"])
def test_threads_that_issue_never_wait_for_a_device(name: str) -> None:
    """Copies from ordinary memory, `.cpu()` and numbers asked for would each hold up all that a thread issues."""
    _, simulation = CASES[name].simulated(0)
    waits = {key: count for key, count in simulation.machine.host_waits.items() if key[0] != "MainThread"}
    assert not waits, "the end of a step alone waits, for its losses, in the caller's thread"


def test_finetune_on_two_simulated_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run itself, in this process: page-locking, profile steps, planner, weight cache, saving, the result."""
    monkeypatch.setenv("ROUNDPIPE_CACHE", str(tmp_path / "cache"))
    model = make_model(tmp_path / "model", num_hidden_layers=2)
    losses = []
    for devices in (["cpu", "cpu"], ["cuda:0", "cuda:1"]):
        pipeline = {"devices": devices, "threads_per_worker": 1}
        folder = make_workspace(tmp_path / devices[0][:3], model, pipeline=pipeline, num_train_epochs=1)
        out = folder / "out"
        loaded = load_recipe(str(folder / "recipe.yaml"), [f"output_dir={out}"])
        with warnings.catch_warnings(), simulated() if devices[0] != "cpu" else nullcontext():
            warnings.simplefilter("ignore")  # PEFT's, when it saves
            run_finetune(loaded, Start(offline=True), Reporting(lambda event: None), StopSignals())
        assert (out / "adapter_model.safetensors").is_file()
        losses.append([row["loss"] for row in metrics(out)])
    assert losses[1] == losses[0]
