"""A step reads each layer as soon as the host has its version: nothing waits behind it, and no read is early."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from roundpipe_cli.engine.dispatch.dispatch import StepRun
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.program import stage_layers
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import InternalError
from roundpipe_cli.schedule.actions import Kind
from tests.support.simulated_cases import Bits, Case, gradient_bits, is_equal
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for

SIZES = [(1, 6), (2, 5), (1, 4), (1, 7)]


def write_layers(rig: Rig, gradients: Sequence[torch.Tensor], layers: Sequence[int]) -> None:
    """The next version of these layers, in float32."""
    for layer in layers:
        with rig.store.next_version(layer) as place:
            place.masters.add_(gradients[layer], alpha=-0.01)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("copy", [False, True])
def test_the_error_of_an_update_is_that_of_all_who_wait(copy: bool, before: bool) -> None:
    """Also of a step that begins after it."""
    rig = make_rig("llama", num_hidden_layers=4)
    error = InternalError("the optimizer failed")
    raised: list[BaseException] = []

    def wait(call: Callable[..., object], *given: object) -> None:
        try:
            call(*given)
        except InternalError as caught:
            raised.append(caught)

    with rig.engine(2, copy=copy) as engine:
        schedule = schedule_for(rig, 2, len(SIZES))
        engine.run_step(random_microbatches(SIZES), schedule, step=0)
        write_layers(rig, rig.store.gradients, [0, 1])
        if before:
            rig.store.fail(error)
        under_way = engine.start_step(random_microbatches(SIZES), schedule, step=1, version=1)
        calls = [(engine.finish_step, under_way), (rig.store.wait_for, 3, 1)]
        threads = [threading.Thread(target=wait, args=call, daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        if not before:
            rig.store.fail(error)
        for thread in threads:
            thread.join(10)
    assert raised == [error, error]
    with pytest.raises(InternalError, match="the optimizer failed"):
        rig.store.check_updates()


@pytest.mark.parametrize("copy", [False, True])
def test_all_before_a_layer_that_is_not_updated_is_computed(copy: bool) -> None:
    """And it goes over the same lanes, where weights are uploaded, past those that wait."""
    rig = make_rig("llama", num_hidden_layers=4)
    last, microbatches = rig.num_layers - 1, random_microbatches(SIZES)
    with rig.engine(2, copy=copy) as engine:
        schedule = schedule_for(rig, 2, len(SIZES))
        engine.run_step(microbatches, schedule, step=0)
        gradients = [gradient.clone() for gradient in rig.store.gradients]
        write_layers(rig, gradients, range(last))
        under_way = engine.start_step(microbatches, schedule, step=1, version=1)

        def done() -> list[tuple[Kind, tuple[int, int]]]:
            ops = [item.op for step in under_way.steps for item in step.intervals]
            return [(op.kind, stage_layers(schedule, op)) for op in ops if op.visit >= 0]

        before = schedule.microbatches_per_round * sum(first <= end < last for first, end in schedule.forward_stages)
        deadline_s = time.monotonic() + 60
        while len(done()) < before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.2)
        seen = done()
        write_layers(rig, gradients, [last])
        loss, found = engine.finish_step(under_way).loss, [gradient.clone() for gradient in rig.store.gradients]
        again = engine.run_step(microbatches, schedule, step=1, version=1).loss
    assert sum(kind is Kind.FORWARD for kind, _ in seen) == before > 0, "every forward of the first round"
    assert all(layers[1] < last for _, layers in seen), "and nothing that reads the head"
    assert loss == again and all(torch.equal(*pair) for pair in zip(found, rig.store.gradients, strict=True))


def test_an_engine_left_with_a_step_under_way_ends() -> None:
    rig, before = make_rig("llama", "lora", num_hidden_layers=4), set(threading.enumerate())
    with rig.engine(2) as engine:
        microbatches, schedule = random_microbatches(SIZES), schedule_for(rig, 2, len(SIZES))
        engine.start_step(microbatches, schedule, step=0, version=0)
        with pytest.raises(AssertionError):
            engine.start_step(microbatches, schedule, step=1, version=0)
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]


# --- on simulated cards ---------------------------------------------------------------------------------------------


def beside(engine: Engine, rig: Rig, case: Case) -> Bits:
    """Steps, each given to the workers while another thread writes the weights for it."""
    bits: Bits = []
    schedule, draw = case.schedule(rig, len(case.microbatches)), random.Random(5)
    gradients = [gradient.clone() for gradient in rig.store.gradients]

    def update() -> None:
        for layer in range(rig.num_layers):
            time.sleep(0.02 * draw.random())
            write_layers(rig, gradients, [layer])

    for step in range(case.num_steps):
        under_way = engine.start_step(case.microbatches, schedule, step=step, version=step)
        result = engine.finish_step(under_way)
        bits += [result.loss, result.gradient_norm, *gradient_bits(rig)]
        gradients = [gradient.clone() for gradient in rig.store.gradients]
        if step + 1 < case.num_steps:
            threading.Thread(target=update).start()
    return bits


UPDATED = {
    "full": Case("llama", "full", num_steps=3, steps=beside),
    "tied": Case("gemma3_text", "full", {"tie_word_embeddings": True}, num_steps=2, steps=beside),
    "cached": Case("llama", "lora", engine={"weight_cache_bytes": 10**9}, num_steps=3, steps=beside),
}


@pytest.mark.parametrize("name", sorted(UPDATED))
def test_updates_beside_a_step_are_ordered_on_cards(name: str) -> None:
    case = UPDATED[name]
    expected = case.on_processor()
    for seed in (0, 1):
        found, _ = case.simulated(seed, lazy=seed == 1)
        assert is_equal(found, expected), f"seed {seed}"


def test_a_version_that_nobody_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the store, which asserts the version where it is read; and without that by the clocks."""
    make = StepRun.__init__
    monkeypatch.setattr(StepRun, "__init__", lambda *given, **named: make(*given, **{**named, "readers": None}))
    with pytest.raises(InternalError, match="has weights of version"):
        UPDATED["full"].simulated(0)
    monkeypatch.setattr(WeightStore, "check_version", lambda store, layer, version: None)
    _, simulation = UPDATED["full"].simulated(0, tolerant=True)
    assert simulation.unordered
