"""Device, host and disk bytes of the memory model, and what fits."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from roundpipe_cli.choices import OptimizerName
from roundpipe_cli.costs import memory
from roundpipe_cli.costs.analytic import Case, activation_bytes, case_of
from roundpipe_cli.costs.block_work import block_work, is_masked
from roundpipe_cli.costs.cost import CostModel, LayerCost
from roundpipe_cli.costs.find_model import find_architecture
from roundpipe_cli.costs.hardware import Hardware, parse_hardware
from roundpipe_cli.costs.machine import cpu_devices
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule
from roundpipe_cli.planning.partition import QUICK, plan_partition
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.planning.solve import largest_micro_batch
from roundpipe_cli.planning.verdict import coarsest_cut, judge, judge_coarsest, stage_limits
from roundpipe_cli.schedule.actions import Kind, Schedule
from roundpipe_cli.schedule.builders import Options
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import COMPUTE, Timeline
from roundpipe_cli.units import GIB

FACTS = Path(__file__).resolve().parents[1] / "facts"
LLAMA, QWEN, LARGE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-235B-A22B"


def ask(model: str, hardware: str | Hardware, **changes: Any) -> Case:
    settings = TrainingSettings(**{"max_seq_length": 2048, **changes})
    machine = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    return case_of(find_architecture(model), settings, machine)


def changed(case: Case, **changes: Any) -> Case:
    return case_of(case.architecture, replace(case.settings, **changes), case.hardware)


def part(need: memory.Need, name: str) -> int:
    return sum(num_bytes for part, num_bytes in need.parts.items() if name in part)


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_temporaries_of_the_optimizer_are_counted(optimizer: OptimizerName) -> None:
    """Adafactor alone takes a parameter as a whole: here the embedding, of 128,256 x 4,096 elements."""
    need = memory.host_need(ask(LLAMA, "8x4090", method="full", optimizer=optimizer), (33, 33), 8)
    assert part(need, "temporaries") == (8 * 128_256 * 4096 if optimizer == "adafactor" else 0)


def test_a_block_of_packed_weights_lies_whole_on_the_device_for_its_call() -> None:
    """They were not counted: 1 GB of a card's memory for Qwen3-32B."""
    whole = ask(QWEN, "1x4090")
    in_4bit = changed(whole, packed_as="4bit")
    unpacked = part(memory.fixed_device_need(in_4bit), "unpacked")
    assert unpacked == 2 * max(block.params for block in whole.architecture.blocks) > 9.7e8
    for other in (whole, changed(in_4bit, method="full")):  # trained weights are never packed
        assert part(memory.fixed_device_need(other), "unpacked") == 0


@pytest.mark.parametrize("earliest_free", [False, True])
def test_no_plan_keeps_more_boundaries_than_are_counted(earliest_free: bool) -> None:
    """Over two steps in the simulator's time; with enough stages what is counted is at most a half above that."""
    draw = random.Random(5)
    for _ in range(3):
        workers, num_blocks = draw.randint(1, 6), draw.randint(6, 14)
        layers = [LayerCost(f"block.{index}", draw.uniform(0.8, 1.2), 2, True) for index in range(num_blocks)]
        speeds = tuple(draw.choice([1.0, 0.5]) for _ in range(workers)) if earliest_free else None
        head = LayerCost("head", 1, 2, False)
        costs = CostModel("random", (*layers, head), hop_s=0.01, worker_speed=speeds)
        num_microbatches = workers * draw.randint(2, 4)
        options = Options(earliest_free=earliest_free)
        case = SimulationCase(costs, workers, num_microbatches, staleness=1, num_steps=2, options=options)
        plan = plan_partition(case, QUICK)
        cut = StageCut(plan.forward_stages, plan.backward_stages, plan.microbatches_per_round)
        schedule = make_schedule("roundpipe", cut, case, num_steps=2)
        stages = len(plan.forward_stages), len(plan.backward_stages)
        counted = memory.rounds_kept(workers, *stages) * plan.microbatches_per_round
        found = most_kept(schedule, simulate(schedule, costs, staleness=1))
        shape = workers, num_blocks, *stages, plan.microbatches_per_round
        assert found <= counted * 1.05, shape
        if workers <= min(stages):
            assert counted <= 1.5 * found, shape


def most_kept(schedule: Schedule, timeline: Timeline) -> float:
    """Microbatches of which all backward stages' inputs together take as much as is kept at once."""
    span = {(one.kind, one.stage, one.microbatch): one for one in timeline.intervals if one.lane == COMPUTE}
    inputs = [first for first, _ in schedule.backward_stages if first]
    maker = {
        layer + 1: index
        for index, (first, last) in enumerate(schedule.forward_stages)
        for layer in range(first, last + 1)
    }
    changes = []
    for (kind, stage, microbatch), used in span.items():
        first = schedule.backward_stages[stage][0] if kind == Kind.BACKWARD else 0
        if first:
            changes.append((span[Kind.FORWARD, maker[first], microbatch].end_s, 1))
            changes.append((used.end_s, -1))
    kept = itertools.accumulate(change for _, change in sorted(changes))
    return max(kept) / len(inputs)


def test_recompute_by_layer_keeps_one_layer_and_the_inputs_of_the_rest() -> None:
    case, stages = ask(QWEN, "8x4090", micro_batch_size=4), even_cut(66, 4, 4)
    whole, layered, nothing = (
        memory.device_need(changed(case, recompute=how), *stages).total_bytes for how in ("stage", "layer", "none")
    )
    assert layered < whole < nothing


@pytest.mark.parametrize(
    ("model", "hardware", "changes", "has_mask"),
    [
        (LLAMA, "1x4090", {}, False),
        (LLAMA, "8xh100", {"method": "full"}, False),
        (LLAMA, "1xt4", {"dtype": "float16"}, True),
        (LLAMA, "1x4090", {"dtype": "float32"}, True),
        (LLAMA, "1x4090", {"fused": False}, True),
        ("openai/gpt-oss-20b", "1x4090", {}, True),
        ("google/gemma-3-12b-pt", "1x4090", {}, False),
    ],
)
def test_which_chunks_attend_with_a_mask(model: str, hardware: str, changes: dict[str, Any], has_mask: bool) -> None:
    case = ask(model, hardware, max_seq_length=32768, sequence_chunks=8, num_microbatches=8, **changes)
    assert {is_masked(case.architecture, block, case.settings) for block in case.architecture.blocks} == {has_mask}
    assert not changed(case, sequence_chunks=1).settings.flash_chunks


def test_a_chunks_attention_by_hand() -> None:
    """Story: a block of Llama 3.1 8B took 0.75 GiB for a mask and repeated keys, which nobody counted."""
    tokens, length, of_heads, of_keys = 4096, 32768, 32 * 128, 8 * 128
    cases = [ask(LLAMA, name, max_seq_length=length, sequence_chunks=8) for name in ("1x4090", "1xt4")]
    without, masked = (activation_bytes(one.architecture, one.architecture.blocks[0], one.settings) for one in cases)
    assert masked - without == 2 * (tokens * length + 2 * length * of_heads) - 2 * 2 * length * of_keys
    assert 2 * (tokens * length + 2 * length * of_heads) == 0.75 * GIB
    flops = [block_work(one.architecture, one.architecture.blocks[0], one.settings).forward for one in cases]
    average = length / 2
    assert flops[0].attention_flops == 4 * tokens * of_heads * average
    assert flops[1].attention_flops == pytest.approx(flops[0].attention_flops * 9 / 8)
    # keys, values and their gradients stay for all blocks of a stage
    layered = changed(cases[0], recompute="layer").costs.layers[1]
    assert layered.activation_bytes == layered.boundary_bytes + 2 * length * of_keys * (2 + 4)


def test_many_chunks_of_a_long_row_need_room_for_gradients_of_all_its_keys() -> None:
    few, many = (
        part(memory.fixed_device_need(ask(LLAMA, "1x4090", max_seq_length=65536, sequence_chunks=count)), "workspace")
        for count in (2, 64)
    )
    assert few == 2 * 32768 * (3 * 14336 + 2 * 4096)
    each, freed = 128 * (2 * 65536 * (32 + 2 * 8) * 2 + 1024 * 32 * 8), 2 * 1024 * 14336 * 4
    assert many == each - freed > 10 * 2 * 1024 * (3 * 14336 + 2 * 4096)


def test_dropout_before_adapters_keeps_masks_and_what_they_leave() -> None:
    case = ask(QWEN, "8x4090", fused=False)
    without, with_it = (
        activation_bytes(case.architecture, case.architecture.blocks[0], replace(case.settings, lora_dropout=p))
        for p in (0, 0.1)
    )
    q_k_v_o_gate_up_down = 3 * 5120 + 8192 + 2 * 5120 + 25600
    assert with_it - without == 2048 * (1 + 2) * q_k_v_o_gate_up_down  # a mask of one byte, values of two


def on_processor(gib: int = 16, workers: int = 2, **changes: Any) -> Case:
    machine = Hardware("CPU workers", cpu_devices(workers), gib * GIB)
    return ask("HuggingFaceTB/SmolLM2-135M-Instruct", machine, **{"max_seq_length": 512, **changes})


def test_cpu_workers_need_host_memory_and_no_slots() -> None:
    verdict = judge(on_processor(), StageCut(*even_cut(32, 5, 5), 2))
    assert part(verdict.device, "slots") == 0
    both = part(verdict.host, "2 CPU workers")
    assert verdict.device.total_bytes < both < 2 * verdict.device.total_bytes, "one of them has the head's logits"
    assert verdict.fits
    assert not judge_coarsest(on_processor(gib=1)).fits


def test_the_gradient_of_the_heads_matrix_counts_where_activations_leave_no_room() -> None:
    """It exists whole beside its sum while the head computes: 1 GB of an 8B model."""
    for tokens, expected in ((512, True), (32768, False)):
        case = ask(LLAMA, "2x4090", method="full", max_seq_length=tokens, num_microbatches=4)
        stages = even_cut(len(case.costs.layers), 1, 1)
        matrix = case.architecture.vocab_size * case.architecture.hidden_size * case.settings.dtype_bytes
        largest = part(memory.device_need(case, *stages), "largest weight")
        assert 0.5 * matrix < largest <= 1.01 * matrix if expected else largest == 2 * 4096 * 14336
        assert part(memory.device_need(changed(case, method="lora"), *stages), "largest weight") == 0


def test_workers_beyond_the_stages_each_hold_the_heads_logits() -> None:
    case, cuts = on_processor(), (((), ((0, 31),)), ((), ((16, 31), (0, 15))))
    one, two = (memory.Need(memory.cpu_workers_need(case, cut, microbatches_per_round=2)) for cut in cuts)
    gradients = sum(layer.grad_bytes for layer in case.costs.layers)
    assert part(one, "wait for their turn") == 2 * gradients and part(two, "wait for their turn") == 0
    assert part(one, "CPU workers") - part(two, "CPU workers") > case.costs.layers[-1].activation_bytes
    three = memory.Need(memory.cpu_workers_need(on_processor(workers=3), cuts[1], microbatches_per_round=2))
    assert part(three, "wait for their turn") == 2 * gradients, "two of the three may be at one stage"


def test_cpu_workers_cut_finer_where_host_memory_is_scarce() -> None:
    """Found with full training of SmolLM2 at 2048 x 8 tokens: the whole model as one stage was counted, and refused."""
    scarce, ample = (
        judge_coarsest(on_processor(gib, max_seq_length=2048, micro_batch_size=8, method="full")) for gib in (16, 256)
    )
    assert scarce.fits and ample.fits
    assert scarce.device.total_bytes < 0.4 * ample.device.total_bytes


def test_longest_sequences_are_near_the_published_ones() -> None:
    """Published on 8x RTX 4090: 49k and 28k tokens. Ours keep float32 gradient accumulators, which cost some."""
    published = json.loads((FACTS / "published_throughput.json").read_text())["longest sequence on 8x RTX 4090, tokens"]
    for model, key in ((LLAMA, "Llama-3.1-8B full"), (QWEN, "Qwen3-32B full")):
        case = ask(model, "8x4090,host_memory_gib=2048", method="full", dtype="float16", num_microbatches=1)
        theirs = int(published[key].split("k")[0]) * 1000
        assert judge_coarsest(changed(case, max_seq_length=int(0.6 * theirs))).fits, model
        assert not judge_coarsest(changed(case, max_seq_length=int(1.15 * theirs))).fits, model


@pytest.mark.covering(1)
@pytest.mark.parametrize("hardware", ["8x4090", "2x3090", "1x4060ti", "4x3090+2x4060ti"])
@pytest.mark.parametrize("model", [LLAMA, "openai/gpt-oss-20b", "google/gemma-3-12b-pt"])
def test_what_solve_finds_fits_and_one_more_does_not(model: str, hardware: str) -> None:
    case = ask(model, hardware)
    value = largest_micro_batch(case.architecture, case.settings, case.hardware)
    assert value is not None
    assert judge_coarsest(changed(case, micro_batch_size=value)).fits
    assert not judge_coarsest(changed(case, micro_batch_size=value + 1)).fits


@pytest.mark.parametrize(
    ("model", "hardware", "method"),
    [(LLAMA, "2x3090", "full"), (LLAMA, "1x4090", "lora"), (QWEN, "2x4090", "lora"), (LARGE, "8x4090", "lora")],
)
def test_limits_for_the_planner_make_every_cut_fit(model: str, hardware: str, method: str) -> None:
    case = ask(model, hardware, method=method, micro_batch_size=2)
    limits = stage_limits(case)
    assert limits.forward_bytes and limits.backward_bytes and limits.head_bytes
    block, head = case.costs.layers[1], case.costs.layers[-1]
    whole = block.param_bytes + block.grad_bytes + block.activation_bytes
    forward, backward = limits.forward_bytes // block.param_bytes, limits.backward_bytes // whole
    beside_head = (limits.head_bytes - head.param_bytes - head.grad_bytes - head.activation_bytes) // whole
    assert forward >= backward >= 1 and beside_head >= 0
    last = len(case.costs.layers) - 1
    stages = [(last - beside_head, last), (2, 1 + min(backward, last - 2))]
    need = memory.device_need(case, [(1, min(forward, last - 1))], stages)
    assert need.total_bytes <= memory.usable_device_bytes(case.hardware.devices[0])


def test_a_verdict_names_the_number_that_breaks_and_by_how_much() -> None:
    verdict = judge_coarsest(ask(LLAMA, "8x4090,host_memory_gib=128", method="full"))
    (reason,) = verdict.reasons
    over = verdict.host.total_bytes - 126 * GIB
    assert reason.startswith("host memory: needs ")
    assert f"{over / GIB:.3g} GiB too little" in reason
    assert "optimizer state 59.8 GiB" in reason
    on_small = judge_coarsest(ask(LARGE, "1x2080ti", method="full", dtype="float16"))
    assert [reason.split(":")[0] for reason in on_small.reasons] == ["memory of rtx-2080-ti", "host memory"]
    no_disk = judge_coarsest(ask(LLAMA, "8x4090,disk_free_gib=1"))
    assert [reason.split(":")[0] for reason in no_disk.reasons] == ["disk"]


# --- by hand: Qwen3-32B, whose blocks have q, k, v, o, gate, up and down, two norms, and norms of q and k -------------
HIDDEN, HEADS, KEYS, WIDE, VOCABULARY, BLOCKS = 5120, 64 * 128, 8 * 128, 25600, 151936, 64
LINEARS = [(HIDDEN, HEADS), (HIDDEN, KEYS), (HIDDEN, KEYS), (HEADS, HIDDEN), *[(HIDDEN, WIDE)] * 2, (WIDE, HIDDEN)]
BLOCK = sum(rows * columns for rows, columns in LINEARS) + 2 * HIDDEN + 2 * 128
TABLE = VOCABULARY * HIDDEN
WHOLE = BLOCKS * BLOCK + 2 * TABLE + HIDDEN
ADAPTED = BLOCKS * 16 * sum(map(sum, LINEARS))
MIB = 1024**2


def _by_name(need: memory.Need) -> dict[str, int]:
    return dict(need.largest_first)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"num_microbatches": 16},
            # 13 = 11 backward stages' inputs and 2 more; 11 of 16 microbatches: 8 a round, and 3 of 11 workers; 32 MiB
            # for activations of 20 MiB, which torch gives away in powers of two
            {"frozen weights": 2 * WHOLE, "trained weights": 2 * ADAPTED, "float32 masters": 4 * ADAPTED,
             "optimizer state": 8 * ADAPTED, "gradients": 4 * ADAPTED, "boundary activations": 32 * MIB * 13 * 11},
        ),
        (
            {"method": "full", "num_microbatches": 4, "dtype": "float32", "num_shards": 4, "max_seq_length": 512},
            {"float32 masters": 4 * WHOLE, "optimizer state": 8 * -(-WHOLE // 4), "gradients": 4 * WHOLE,
             "boundary activations": 16 * MIB * 13 * 4},
        ),
        (
            {"method": "full", "num_microbatches": 4, "num_shards": 4},
            {"trained weights": 2 * WHOLE, "float32 masters": 4 * -(-WHOLE // 4), "gradients": 4 * WHOLE,
             "optimizer state": 8 * -(-WHOLE // 4), "boundary activations": 32 * MIB * 13 * 4},
        ),
        (
            {"packed_as": "4bit", "optimizer": "adamw_bf16", "weights_on_disk": True, "skip_last_projection": True,
             "num_microbatches": 4},
            {"trained weights": 2 * ADAPTED, "float32 masters": 4 * ADAPTED, "optimizer state": 4 * ADAPTED,
             "gradients": 4 * ADAPTED, "boundary activations": 32 * MIB * (66 + 2) * 4},
        ),
    ],
    ids=["lora", "full-float32-sharded", "full-sharded", "4bit-from-disk"],
)  # fmt: skip
def test_every_part_of_the_hosts_need_by_hand(changes: dict[str, Any], expected: dict[str, int]) -> None:
    found = _by_name(memory.host_need(ask(QWEN, "8x4090", **changes), (5, 11), 8))
    found.pop("temporaries of the optimizer", None)
    assert found == {
        **expected,
        "page-locked rings": 2 * 4 * 4 * MIB * 8,
        "interpreter and contexts": (418 + 8 * 512) * MIB,
        "tokenizer": 700 * VOCABULARY,
    }


def test_every_part_of_a_devices_need_by_hand() -> None:
    settings = {"method": "full", "keep_blocks": 3, "num_microbatches": 4, "weight_cache_bytes": 5 * MIB}
    case = ask(QWEN, "8x4090", **settings)
    activations, tokens = case.costs.layers[5].activation_bytes, 2048
    stages = ((0, 3), (4, 63)), ((64, 65), (60, 63), (0, 59))
    chunk = 1024 * (VOCABULARY * 2 + HIDDEN * 6 * 4) + tokens * HIDDEN * 3 * 2
    workspace = 2 * tokens * (3 * WIDE + 2 * HIDDEN)
    assert _by_name(memory.device_need(case, *stages)) == {
        "2 slots for the weights and gradients of a stage": 2 * (2 + 4) * 59 * BLOCK,  # layer 0, embed, stays outside
        "activations": 59 * activations,
        "kept activations": 3 * 4 * activations,
        "head chunk beyond the workspace": chunk - workspace,
        "gradient of the largest weight": workspace + 2 * HIDDEN * WIDE - chunk,
        "boundary tensors": 4 * 2 * tokens * HIDDEN,
        "workspace of backward": workspace,
        "CUDA context": 860 * MIB,
        "weight cache": 5 * MIB,
    }


def test_kept_activations_are_counted_once() -> None:
    """By `recompute: layer` and for the largest stage they counted twice, and what fits was refused."""
    stages = ((0, 3), (4, 63)), ((64, 65), (60, 63), (0, 59))
    for changes, at_work, count in (
        ({"keep_blocks": 64}, 0, 64),
        ({"keep_blocks": 6}, 58, 6),
        ({"keep_blocks": 6, "recompute": "none"}, 64 * 4, 0),
    ):
        case = ask(QWEN, "1x4090", num_microbatches=4, **changes)
        block = activation_bytes(case.architecture, case.architecture.blocks[0], case.settings)
        need = memory.device_need(case, *stages)
        assert (part(need, "kept"), need.parts["activations"]) == (4 * count * block, at_work * block)
    by_layer = memory.device_need(ask(QWEN, "1x4090", num_microbatches=4, keep_blocks=6, recompute="layer"), *stages)
    assert part(by_layer, "kept") == 4 * 6 * block
    kept = part(memory.device_need(ask(QWEN, "1x4090", num_microbatches=4, keep_blocks=6), *stages, 2), "kept")
    assert kept == 2 * 6 * block, "of a round alone"


def test_memory_in_gaps_is_left_where_segments_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 reserved 10.53 GB for full fine-tuning where 7.64 GB were planned."""
    for name in memory.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    virtual = ("GRID A100-10C", "NVIDIA A40-48Q", "NVIDIA A40-12A", "NVIDIA A40-2B", "NVIDIA A40-4C")
    assert memory.grows_segments("NVIDIA RTX A6000") and not any(map(memory.grows_segments, virtual))
    for settings, grows in (("max_split_size_mb:128", False), ("expandable_segments:True", True), ("", False)):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
        assert memory.grows_segments("NVIDIA RTX A6000") == grows
    needed, context = int(7.64e9), 860 * MIB
    assert memory.without_gaps(int(10.53e9) + context, "full") == pytest.approx(needed + context, rel=0.01)
    assert memory.without_gaps(needed, "lora") == needed


def test_loading_and_the_disk_by_hand() -> None:
    case = ask(QWEN, "8x4090", method="full", save_total_limit=2)
    assert _by_name(memory.loading_need(case.architecture, case.settings)) == {
        "trained weights": 2 * WHOLE,
        "float32 masters": 4 * WHOLE,
        "interpreter": 418 * MIB,
        "tokenizer": 700 * VOCABULARY,
    }
    on_disk = _by_name(memory.disk_need(case.architecture, case.settings))
    assert on_disk == {"3 checkpoints": 3 * 12 * WHOLE, "the result": 2 * WHOLE}


def test_loading_alone_may_be_what_is_short() -> None:
    """A layer of experts is fused while it loads; a frozen model of them needs little more in a step."""
    case = ask("openai/gpt-oss-120b", "1x4090", max_seq_length=64, num_microbatches=1, weights_on_disk=True, lora_r=1)
    cut = coarsest_cut(case)
    verdict = judge(case, cut)
    step, loading = verdict.host.total_bytes, verdict.loading.total_bytes
    assert verdict.fits and step < loading
    between = replace(case.hardware, host_memory_bytes=int((step + loading) / 2 / (1 - memory.HOST_MARGIN)))
    verdict = judge(replace(case, hardware=between), cut)
    assert not verdict.fits and "a weight while it is converted" in verdict.reasons[0]
