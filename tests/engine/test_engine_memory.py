"""Live bytes of a worker against their bound.

Copying CPU workers count every storage that their computations make until it is freed. The bound, per worker:

    slots x (weights + float32 gradient sums of the largest stage)
  + activations of one microbatch of one stage (recompute "stage") or of one layer (recompute "layer")
  + head chunk: chunk_tokens x vocabulary x 4 bytes x 3 (logits, probabilities, their gradient)
  + two boundary tensors per direction
  + what the blocks are called with (position embeddings, masks), of one round: made once per microbatch and device,
    and dropped after the worker's last use
  + workspace of one layer's backward, as in costs/memory.py: tokens x 4 bytes x (3 x intermediate + 2 x hidden),
    and the gradient of one parameter of a block, which is added to the sums before the next one is made

Activations are counted independently: what autograd saves in the plain module, block by block.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch

from roundpipe_cli.engine.dispatch.dispatch import StepRun
from roundpipe_cli.engine.prepared import StepContext
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.timeline import COMPUTE, UP
from tests.support.schedules import dealt
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for

HIDDEN, INTERMEDIATE, NUM_BLOCKS, VOCABULARY = 128, 512, 24, 1024
ROWS, TOKENS = 2, 8
CHUNK_TOKENS = 4
NUM_SLOTS, NUM_WORKERS = 2, 2


def rig_of(method: str, num_blocks: int) -> Rig:
    """The weights of a block take about a megabyte, the activations a few hundred kilobytes."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY}
    return make_rig("llama", method, num_hidden_layers=num_blocks, **sizes)


@pytest.fixture(scope="module", params=["lora", "full"])
def deep(request: pytest.FixtureRequest) -> Rig:
    """24 blocks: several times what a worker may hold."""
    return rig_of(request.param, NUM_BLOCKS)


@pytest.fixture(scope="module")
def rig() -> Rig:
    """A third: in stages of two blocks still more stages than a worker has slots."""
    return rig_of("full", NUM_BLOCKS // 3)


def cut(rig: Rig, blocks_per_stage: int, num_microbatches: int) -> Schedule:
    """Stages of equal size forward and backward; the embedding with the first and last, the head alone."""
    head = rig.num_layers - 1
    starts = range(1, head, blocks_per_stage)
    stages = [(start, min(start + blocks_per_stage, head) - 1) for start in starts]
    forward = [(0, stages[0][1]), *stages[1:]]
    return dealt(forward, [(head, head), *reversed(forward)], NUM_WORKERS, num_microbatches)


def run(rig: Rig, schedule: Schedule, recompute: str = "stage", count_bytes: bool = True) -> StepResult:
    microbatches = random_microbatches([(ROWS, TOKENS)] * schedule.num_microbatches, vocab=VOCABULARY)
    options = {"recompute": recompute, "head_chunk_tokens": CHUNK_TOKENS, "num_slots": NUM_SLOTS}
    with rig.engine(schedule.num_workers, copy=True, count_bytes=count_bytes, **options) as engine:
        return engine.run_step(microbatches, schedule, step=0)


def saved_bytes_per_block(rig: Rig, microbatch: Microbatch) -> list[int]:
    """What autograd saves in each block of the plain module for one microbatch, parameters left out."""
    weights = {parameter.untyped_storage()._cdata for parameter in rig.plain.parameters()}
    saved: list[dict[int, torch.UntypedStorage]] = []
    handles = []
    for block in rig.plain.get_submodule(rig.split.blocks_path).children():
        saved.append({})

        def pack(tensor: torch.Tensor, found: dict[int, torch.UntypedStorage] = saved[-1]) -> torch.Tensor:
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        handles.append(block.register_forward_pre_hook(lambda *_, hooks=hooks: hooks.__enter__()))
        handles.append(block.register_forward_hook(lambda *_, hooks=hooks: hooks.__exit__()))
    rig.plain(input_ids=microbatch.input_ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return [sum(storage.nbytes() for key, storage in found.items() if key not in weights) for found in saved]


def argument_bytes(rig: Rig, microbatch: Microbatch) -> int:
    """Bytes of the distinct tensors, hidden states aside, that the plain model calls its blocks with."""
    found: dict[int, int] = {}

    def note(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for value in torch.utils._pytree.tree_leaves([args[1:], kwargs]):
            if isinstance(value, torch.Tensor):
                found[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()

    block = next(rig.plain.get_submodule(rig.split.blocks_path).children())
    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    rig.plain(input_ids=microbatch.input_ids, use_cache=False)
    handle.remove()
    return sum(found.values())


def slot_bytes(rig: Rig, stages: Sequence[tuple[int, int]]) -> int:
    """Weights and gradient sums of the largest stage; the embedding stays on the host."""
    layouts = rig.store.layouts
    weights = max(sum(layouts[i].num_bytes for i in range(max(a, 1), b + 1)) for a, b in stages)
    sums = max(sum(4 * layouts[i].num_trainable_elements for i in range(max(a, 1), b + 1)) for a, b in stages)
    padding = 512 * (max(b - a for a, b in stages) + 1)  # a slot keeps its layers at borders of 256 bytes
    return weights + sums + padding


@pytest.mark.covering(1)
@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("blocks_per_stage", [1, 3])
def test_live_bytes_stay_within_the_bound(deep: Rig, blocks_per_stage: int, recompute: str) -> None:
    schedule = cut(deep, blocks_per_stage, 2)
    microbatch = random_microbatches([(ROWS, TOKENS)], vocab=VOCABULARY)[0]
    block_bytes = max(saved_bytes_per_block(deep, microbatch))
    activations = block_bytes * (blocks_per_stage if recompute == "stage" else 1)
    boundary = ROWS * TOKENS * HIDDEN * 4
    slots = NUM_SLOTS * slot_bytes(deep, [*schedule.forward_stages, *schedule.backward_stages])
    bound = (
        slots
        + activations
        + CHUNK_TOKENS * VOCABULARY * 4 * 3
        + 4 * boundary
        + schedule.microbatches_per_round * argument_bytes(deep, microbatch)
        + ROWS * TOKENS * 4 * (3 * INTERMEDIATE + 2 * HIDDEN)
        + max(4 * place.num_elements for layout in deep.store.layouts[1:-1] for place in layout.trainable)
        + 4 * deep.store.layouts[-1].num_trainable_elements  # the head's sum over the chunks of a microbatch
    )
    model = sum(layout.num_bytes + 4 * layout.num_trainable_elements for layout in deep.store.layouts)
    peaks = run(deep, schedule, recompute).device_peak_bytes
    assert max(peaks) <= bound
    assert min(peaks) >= slots - NUM_SLOTS * 512 * (blocks_per_stage + 1) + activations, "something is not counted"
    if blocks_per_stage == 1:
        assert model >= 6 * bound


def test_peak_does_not_grow_with_rounds(rig: Rig) -> None:
    """Each round more would add two microbatches' tensors; when one is freed depends on the threads' turns."""
    two_rounds, three_rounds = (run(rig, cut(rig, 2, count)).device_peak_bytes for count in (4, 6))
    boundary = ROWS * TOKENS * HIDDEN * 4
    assert max(three_rounds) <= max(two_rounds) + 1.5 * boundary


def test_every_transfer_has_its_time(rig: Rig) -> None:
    """The links of a measured step were not recorded, so nothing could say what a worker had waited for."""
    result = run(rig, cut(rig, 2, 4), count_bytes=False)
    links, actions = result.links, result.actions
    assert all(0 <= link.start_s <= link.end_s <= result.step_s for link in links)
    uploads = [link for link in links if link.lane == UP and link.microbatch < 0]
    assert len(uploads) > NUM_WORKERS
    for link in uploads:  # weights are there before the first action that reads them
        readers = [one for one in actions if (one.worker, one.stage) == (link.worker, link.stage)]
        assert any(one.start_s >= link.end_s - 1e-3 for one in readers)
    assert result.timeline.intervals and all(item.lane == COMPUTE for item in result.timeline.intervals)


def steps_in_memory() -> list[object]:
    return [found for found in gc.get_objects() if isinstance(found, (StepRun, StepContext))]


@pytest.mark.parametrize("copy", [False, True])
def test_a_finished_step_leaves_no_cycle(copy: bool) -> None:
    """Story: a collection of cycles came every hundred steps, and 3.5 MB of a step of SmolLM2 waited for each."""
    rig = make_rig("llama", "lora", hidden_size=32, intermediate_size=32)
    schedule, microbatches = schedule_for(rig, 2, 4), random_microbatches([(2, 8)] * 4)
    with rig.engine(2, copy=copy) as engine:
        before = steps_in_memory()  # other tests' failed steps, which their tracebacks hold
        gc.disable()
        try:
            engine.run_step(microbatches, schedule, step=0)
            assert not [found for found in steps_in_memory() if not any(found is one for one in before)]
        finally:
            gc.enable()
