"""`finetune` and `bench --run` on two simulated cards: the numbers of two workers on the processor in all they do."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

from roundpipe_cli.choices import SCHEDULES
from roundpipe_cli.costs import machine
from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.dashboard.html import report_page
from roundpipe_cli.dashboard.state import fold_all
from roundpipe_cli.dashboard.waiting import longest_waiting
from roundpipe_cli.engine.link_speed import LinkSpeed
from roundpipe_cli.engine.step import StepResult
from roundpipe_cli.errors import StoppedError
from roundpipe_cli.events import EvaluationFinished, Event, RunStarted, StepFinished, StepTimeline
from roundpipe_cli.model.stored import packed_weights
from roundpipe_cli.planning import adaptive
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe
from roundpipe_cli.train import bench_run, build
from roundpipe_cli.train.bench_run import Measured, check_losses, compare_for_real
from roundpipe_cli.train.monitor.telemetry import Arithmetic, step_figures
from roundpipe_cli.train.prepare import devices
from roundpipe_cli.train.prepare.setup import prepare
from tests.support.e2e import make_workspace, metrics, run, tree
from tests.support.simulated_cases import kernels_as_on, simulated
from tests.support.simulated_cuda import SMALL_CARD, Card, memory
from tests.train.test_lost_devices import notices, train

RESULT = ("loss", "bubble_ratio", "launch_bound_ratio", "upload_bytes", "gradient_norm")
ON_CPU, ON_CARDS = "pipeline.devices=[cpu,cpu]", "pipeline.devices=[cuda:0,cuda:1]"


@pytest.fixture
def folder(two_blocks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = make_workspace(tmp_path / "work", two_blocks, num_train_epochs=1, check_longest_rows=False)
    monkeypatch.chdir(work)
    return work


def finetune(*words: str, resume: bool = False, watch: Callable[[Event], None] = lambda event: None) -> list[Event]:
    """A run in this process; its events."""
    told: list[Event] = []

    def tell(event: Event) -> None:
        told.append(event)
        watch(event)

    with simulated() if any("cuda:0" in word for word in words) else kernels_as_on():
        train(*words, tell=tell, resume=resume)
    return told


def losses(events: list[Event]) -> list[float]:
    """Of all steps and evaluations, in order."""
    return [event.loss for event in events if isinstance(event, (StepFinished, EvaluationFinished))]


def test_stopped_resumed_and_evaluated_in_float16(folder: Path) -> None:
    """One card has no bfloat16: float16's numbers. Page-locking, profile steps, planner, weight cache, the result."""
    words = ("val_set_size=2", "eval_steps=2", "max_steps=4", "check_longest_rows=true")
    expected = finetune(*words, ON_CPU, "dtype=float16", "output_dir=cpu")

    def stop(event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == 3:
            signal.raise_signal(signal.SIGTERM)

    cards = (*words, ON_CARDS, "dtype=bfloat16", "output_dir=cards")
    with pytest.raises(StoppedError):
        finetune(*cards, watch=stop)
    events = finetune(*cards, resume=True)
    assert "no bfloat16 on cuda:1" in notices(events) and "dtype: float16" in Path("cards/recipe.yaml").read_text()
    assert [row["loss"] for row in metrics(Path("cards"))] == [row["loss"] for row in metrics(Path("cpu"))]
    assert losses(events) == losses(expected)[-len(losses(events)) :] and len(losses(events)) == 2
    assert Path("cards/adapter_model.safetensors").read_bytes() == Path("cpu/adapter_model.safetensors").read_bytes()


def test_waits_of_cards_have_their_causes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured step had no transfers: waits were for `input`. And stages were cut for links of 25 GB/s."""
    asked: list[tuple[float, bool]] = []
    monkeypatch.setattr(
        devices, "measure_links", lambda backends, _: [LinkSpeed(3.14e9, 1e9, 1e9), LinkSpeed(6e9, 1e9, 1e9)]
    )
    rough = build.rough_costs

    def note(sizes: Any, device: Any, **words: Any) -> Any:
        asked.append((device.link_bytes_per_s, device.memory_bytes <= SMALL_CARD.total_bytes))
        return rough(sizes, device, **words)

    monkeypatch.setattr(build, "rough_costs", note)
    events = finetune("max_steps=4", "pipeline.weight_cache=0", ON_CARDS, "output_dir=cards")
    assert asked == [(3.1e9, True)], "those of the slower link and of the smaller card"
    lanes = {span.lane for event in events if isinstance(event, StepTimeline) for span in event.spans}
    assert lanes - {"host"} == {"compute", "up", "down"}, "on a busy machine a step waits for updates"
    state = fold_all((0.0, event) for event in events)
    found = longest_waiting(state)
    assert (
        found is not None
        and found.by_cause_s
        and set(found.by_cause_s) <= {"upload", "boundary", "launch", "tail", "update"}
    )
    assert state.timeline is not None
    computing = [span for span in state.timeline.spans if span.lane == "compute"]
    assert found.step_s == max(span.end_s for span in computing)
    shown = report_page(Path("cards"))
    assert f"worker {found.worker} waited " in shown and 'class="up"' in shown and 'class="down"' in shown


TIMED = (
    *("pipeline.recompute=layer", "pipeline.skip_last_projection=false", "pipeline.keep_activations=1"),
    *("dtype=float16", "dtype=float16 float16_accumulation=true", "deterministic=true", "mlp_chunk_tokens=8"),
    *("kernels=reference", "load_in_4bit=true", "lora.r=3", "micro_batch_size=1", "pipeline.sequence_chunks=2"),
)
"""Settings with each of which layers take another time."""


def test_what_a_planner_knows_of_recipe_and_card(folder: Path) -> None:
    """Stages by times of another setting; by memory without the one whole block, or without a virtual GPU's gaps."""

    def loaded(words: str) -> LoadedRecipe:
        return load_recipe("recipe.yaml", ["pipeline.devices=[cuda:0]", *words.split()])

    def planner(words: str, card: str = "") -> Any:
        with simulated(cards=[Card(card)]):
            return build.make_planner(replace(setup, recipe=loaded(words).recipe))

    with simulated():
        setup = prepare(loaded(""), offline=True, tell=lambda event: None)
        usual = build.make_planner(setup)
        recipes = [loaded(words).recipe for words in ("", *TIMED)]
        caches = [build._profile_cache(replace(setup, recipe=recipe), usual.costs) for recipe in recipes]
    assert len({cache.path for cache in caches}) == 1 + len(TIMED)
    by_layer, card, virtual = planner(TIMED[0]), planner("method=full", "A40"), planner("method=full", "A40-48Q")
    assert card.costs.device_memory_bytes > virtual.costs.device_memory_bytes
    whole, kept = (one.costs.layers[1].activation_bytes for one in (usual, by_layer))
    freed = usual.costs.slots * (by_layer._limits.forward_bytes - usual._limits.forward_bytes)
    assert freed == pytest.approx(whole - 2 * kept, abs=4), "of two blocks one is whole, and there are both inputs"


def test_busy_cards_that_wait_for_launches_are_seen_for_what_they_are(folder: Path) -> None:
    """A starving stream counts as busy. Launches bind on these cards; what a card promises is known by its name."""
    seen: dict[str, StepFinished] = {}
    for name, workers in (("NVIDIA H100 80GB HBM3", ON_CARDS), ("Simulated 90", ON_CARDS), ("", ON_CPU)):
        words, told = ("max_steps=1", workers, f"output_dir=run{len(seen)}"), list[Event]()
        with simulated(cards=[Card(name), Card(name)]) if name else kernels_as_on():
            train(*words, tell=told.append)
        seen[name] = next(event for event in told if isinstance(event, StepFinished))
    h100, unknown, processor = seen.values()
    assert h100.launch_bound_ratio > 0.5 and unknown.launch_bound_ratio > 0.5 and processor.launch_bound_ratio == 0
    assert h100.mfu is not None and unknown.mfu is processor.mfu is None
    row = json.loads(Path("run0/metrics.jsonl").read_text().splitlines()[0])
    assert (row["mfu"], row["launch_bound_ratio"]) == (h100.mfu, h100.launch_bound_ratio)
    assert json.loads(Path("run0/report.json").read_text())["measured"]["mfu"] == h100.mfu
    page = report_page(Path("run0"))
    assert f"<span>launches bind</span><b>{100 * h100.launch_bound_ratio:.1f} %</b>" in page
    assert f"<span>arithmetic, MFU</span><b>{100 * h100.mfu:.1f} %</b>" in page
    assert "<span>arithmetic, MFU</span><b>not known</b>" in report_page(Path("run1"))
    shared = Arithmetic(6e9, (("cuda:0", 1e15), ("cuda:0", 1e15), ("cuda:1", 2e15), ("cuda:2", None)))
    result = cast(StepResult, SimpleNamespace(**dict.fromkeys(RESULT), device_peak_bytes=(1, 3, 2), lanes=(0, 1)))
    assert step_figures(result, 9, 1.0, shared)["device_peak_bytes"] == 3, "the fullest card's"
    assert [shared.share(1e5, lanes) for lanes in ((0, 1), (0, 1, 2), (2, 3))] == [0.6, pytest.approx(0.2), None]
    assert '"mfu": null' in Path("run2/metrics.jsonl").read_text()
    peak_kib = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    measured = json.loads(Path("run2/report.json").read_text())["measured"]
    assert measured["host_peak_bytes"] == pytest.approx(1024 * peak_kib, rel=0.01)


def test_a_run_that_adapts_to_a_card_out_of_memory(folder: Path, shared_caches: Path, monkeypatch: Any) -> None:
    """`on_oom: adapt`: the allocator refuses a block in the middle of a step; then layers are recomputed one by one."""
    monkeypatch.setattr(memory, "SEGMENT_BYTES", memory.BLOCK_BYTES)
    monkeypatch.setattr(memory, "LARGE_SEGMENT_BYTES", memory.BLOCK_BYTES)
    words = ("method=full", "max_steps=2")
    left: list[int] = []

    def cold(name: str) -> str:
        """Without what an earlier run measured, by which a run would choose other stages, of other sizes."""
        (folder / "cache" / name).mkdir(parents=True)
        (folder / "cache" / name / "proofs").symlink_to(shared_caches / "proofs")
        monkeypatch.setenv("ROUNDPIPE_CACHE", str(folder / "cache" / name))
        return f"output_dir={name}"

    def note_what_is_left(event: Event) -> None:
        if isinstance(event, StepFinished) or "out of memory" in getattr(event, "text", ""):
            left.append(max(torch.cuda.memory_allocated(index) for index in range(2)))

    usual = finetune(*words, ON_CARDS, cold("usual"), watch=note_what_is_left)
    slots = max(left)
    left.clear()
    peak = max(event.device_peak_bytes for event in usual if isinstance(event, StepFinished))

    def limit(event: Event) -> None:
        note_what_is_left(event)
        if isinstance(event, RunStarted):
            for index in range(2):
                torch.cuda.set_per_process_memory_fraction(0.9 * peak / torch.cuda.mem_get_info(index)[1], index)

    adapted = finetune(*words, ON_CARDS, cold("adapted"), "on_oom=adapt", watch=limit)
    assert "pipeline.recompute: layer" in notices(adapted)
    labels = 2 * 4096  # of each worker's microbatch that was copied ahead, or was not yet
    assert len(left) > 2 and max(left) <= slots + labels, "a step that failed leaves nothing on a device but the slots"
    assert losses(adapted) == pytest.approx(losses(usual), rel=1e-6)  # microbatches may have been divided too


def test_weights_unpacked_once_in_a_visit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plan says, with the processor's numbers; and not any more once a card runs out of memory."""
    monkeypatch.setattr(memory, "SEGMENT_BYTES", memory.BLOCK_BYTES)
    monkeypatch.setattr(memory, "LARGE_SEGMENT_BYTES", memory.BLOCK_BYTES)
    stages = ("pipeline.forward_stages=[[0,2]]", "pipeline.backward_stages=[[3,3],[0,2]]", "pipeline.weight_cache=0")
    words = ("load_in_4bit=true", "dtype=float32", "max_steps=2", "lora.dropout=0", *stages)
    dequantize, done = packed_weights.dequantize, list[int]()

    def counted(packed: torch.Tensor, *args: Any) -> torch.Tensor:
        whole = dequantize(packed, *args)
        done.append(whole.nbytes)
        return whole

    def limit(event: Event) -> None:
        """Too little room until the remedy is told; how little is left after it depends on the threads' timing."""
        is_told = "stay unpacked" in getattr(event, "text", "") and "without" in event.text
        if isinstance(event, RunStarted) or is_told:
            for index in range(2):
                total = torch.cuda.mem_get_info(index)[1]
                most = total if is_told else peak - block_bytes // 2
                torch.cuda.set_per_process_memory_fraction(most / total, index)

    on_cpu = finetune(*words, ON_CPU, "output_dir=cpu")
    monkeypatch.setattr(packed_weights, "dequantize", counted)
    once = finetune(*words, ON_CARDS, "output_dir=once")
    said = "4-bit weights are unpacked once per visit of a stage"
    assert said in notices(on_cpu) and said in notices(once)
    num_once, peak = len(done), max(event.device_peak_bytes for event in once if isinstance(event, StepFinished))
    block_bytes = sum(done[-7:])  # of seven projections
    done.clear()
    short = finetune(*words, ON_CARDS, "output_dir=short", watch=limit)
    assert "without packed weights that stay unpacked for a visit" in notices(short)
    assert len(done) > num_once
    assert losses(short) == losses(once) == losses(on_cpu) and len(losses(short)) == 2


def test_bench_compares_schedules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weights that a run would keep there, which follow from times: a busy machine measured others."""

    speeds, told = list[object](), list[Event]()

    def in_even_times(rough: CostModel, steps: Sequence[StepTimeline]) -> CostModel:
        speeds.append(rough.worker_speed)
        found = adaptive.measured_costs(rough, steps)
        layers = tuple(replace(layer, forward_s=1e-3, backward_s=2e-3) for layer in found.layers)
        return replace(found, layers=layers, worker_speed=None)

    monkeypatch.setattr(bench_run, "measured_costs", in_even_times)
    monkeypatch.setattr(bench_run, "measured_speeds", lambda *_: (1.0, 0.5))
    said: list[str] = []
    loaded = load_recipe("recipe.yaml", (ON_CARDS,))
    with simulated():
        found = compare_for_real(loaded, ("roundpipe", "1f1b"), repetitions=1, tell=told.append, say=said.append)
    assert speeds == [(1.0, 0.5)], "two cards may be unlike"
    assert [event for event in told if isinstance(event, StepFinished)][-1].eta_s == 0
    assert found.devices == ("cuda:0", "cuda:1") and [len(one.steps) for one in found.schedules] == [1, 1]
    assert all(one.device_peak_bytes > 0 for one in found.schedules)
    assert not any("counting memory" in text for text in said), "cards count it themselves"
    stays = [text for text in said if "weight cache" in text]
    whole = sum(layer.param_bytes for layer in found.costs.layers)
    for one in found.schedules:
        assert one.cache_bytes > 0
        assert all(step.upload_bytes < whole / 2 for step in one.steps), "frozen weights are on the cards"
    assert stays[0].startswith("roundpipe: ") and "each microbatch on one" in stays[0]
    assert stays[1].startswith("1f1b: weight cache (auto): all of ")
    stages = [(one.holds_all, one.predicted.schedule.backward_stages) for one in found.schedules]
    assert stages == [(True, ((0, 3),)), (False, ((2, 3), (0, 1)))]
    said.clear()
    loaded = load_recipe("recipe.yaml", (ON_CARDS, "pipeline.weight_cache=4096"))
    with simulated():
        (given,) = compare_for_real(loaded, ("1f1b",), repetitions=1, tell=told.append, say=said.append).schedules
    assert given.cache_bytes == 4096 and not any("weight cache" in text for text in said), "nothing was chosen"


def test_links_that_cannot_be_measured_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated():
        assert devices.slowest_link_bytes_per_s(["cuda:0", "cuda:0"]) > 1e7

        def refuse(*_: Any) -> None:
            raise RuntimeError("the links cannot be measured: no memory")

        monkeypatch.setattr(devices, "measure_links", refuse)
        assert devices.slowest_link_bytes_per_s(["cuda:0"]) == devices.ASSUMED_LINK_BYTES_PER_S


NARROW = ("dtype=float16", "float16_accumulation=true")


def test_cards_are_asked_for_both_and_processors_say_that_they_have_none(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(machine, "_cpuinfo", lambda: "flags: avx2")
    words = (*NARROW, "deterministic=true", "max_steps=1")
    try:
        on_cards = finetune(*words, ON_CARDS, "output_dir=cards")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert "float16_accumulation" not in notices(on_cards) and "deterministic" not in notices(on_cards)
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is True
    on_processor = finetune(*words, ON_CPU, "output_dir=cpu")
    assert "float16_accumulation has no effect here" in notices(on_processor)
    assert "deterministic has no effect here" in notices(on_processor)
    assert "set dtype=float32" in notices(on_processor) and "dtype=float32" not in notices(on_cards)
    assert losses(on_processor) == losses(on_cards)
    assert "float16_accumulation: true" in Path("cards/recipe.yaml").read_text()


# --- `bench RECIPE --run` on the processor ----------------------------------------------------------------------------


def test_every_schedule_is_carried_out_and_gives_the_same_loss(two_blocks: Path, tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "w", two_blocks, gradient_accumulation_steps=4)
    before = tree(folder)
    outcome = run(folder, "bench", "recipe.yaml", "--run", "--repetitions", "1", "--json").expect(0)
    assert tree(folder) == before, "bench writes nothing"
    document = json.loads(outcome.out)
    assert [row["schedule"] for row in document["results"]] == list(SCHEDULES)
    assert (document["workers"], document["microbatches"]) == (2, 4)
    assert len({row["loss"] for row in document["results"]}) == 1
    for row in document["results"]:
        assert row["measured_makespan_s"] > 0 and row["makespan_s"] > 0 and row["tokens_per_s"] > 0
        assert 0 <= row["measured_bubble_ratio"] < 1 and row["device_peak_bytes"] > 10_000
    keep = document["keep"]["pipeline"]
    fastest = max(document["results"], key=lambda row: row["tokens_per_s"])
    assert keep["schedule"] == fastest["schedule"] and keep.get("forward_stages", []) == fastest["forward_stages"]


def test_the_lines_to_keep_are_a_recipe_s(two_blocks: Path, tmp_path: Path) -> None:
    folder = make_workspace(tmp_path / "w", two_blocks)
    outcome = run(folder, "bench", "recipe.yaml", "--run", "--repetitions", "1", "--schedule", "roundpipe").expect(0)
    table, _, lines = outcome.out.partition("To keep it:")
    assert "roundpipe" in table and "tokens/s" in table
    overrides = [f"pipeline.{key}={json.dumps(value)}" for key, value in yaml.safe_load(lines)["pipeline"].items()]
    assert load_recipe(folder / "recipe.yaml", overrides).recipe.pipeline.schedule == "roundpipe"


def test_different_losses_are_an_error() -> None:
    first, near, far = (cast(Measured, SimpleNamespace(name="schedule", loss=loss)) for loss in (1, 1 + 1e-6, 1 + 1e-5))
    check_losses([first, near], 1.1e-6)
    with pytest.raises(Exception, match="different losses"):
        check_losses([first, near, far], 1.1e-6)
