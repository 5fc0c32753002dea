"""`roundpipe plan`: the JSON document, the words, refusals, and that it needs neither torch nor a network."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.cli.output import wrapped
from roundpipe_cli.cli.plan import plan, plan_document, plan_text, verdict_lines
from roundpipe_cli.costs import analytic, find_model, machine
from roundpipe_cli.costs.cost import NUM_SLOTS
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.errors import NoProgressError, RefusedError, ResourceError
from roundpipe_cli.planning import choose
from roundpipe_cli.planning.predict import make_plan, priced
from roundpipe_cli.planning.question import ask
from roundpipe_cli.planning.run_plan import check_fits
from roundpipe_cli.planning.solve import solve
from roundpipe_cli.recipe.load import LoadedRecipe, load_recipe
from roundpipe_cli.train.run_length import RunLength, length_of
from tests.cli.test_terminal_text import said
from tests.support.e2e import python

RECIPE = """
model: HuggingFaceTB/SmolLM2-135M-Instruct
datasets: [{path: rows.jsonl}]
max_seq_length: 512
packing: false
micro_batch_size: 1
gradient_accumulation_steps: 4
pipeline: {forward_stages: [[0, 10], [11, 20], [21, 30]], backward_stages: [[31, 31], [16, 30], [0, 15]]}
"""
"""With stages of its own: the planner's search has tests of its own, and takes a second."""
AUTO = ("pipeline.forward_stages=auto", "pipeline.backward_stages=auto")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 10)
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def load(recipe: Path, *overrides: str) -> LoadedRecipe:
    return load_recipe(recipe, [*overrides, f"output_dir={recipe.parent / 'out'}"])


def covers(stages: list[list[int]], layers: range) -> bool:
    return sorted(layer for first, last in stages for layer in range(first, last + 1)) == list(layers)


def test_parts_of_a_plan_add_up(recipe: Path) -> None:
    document = plan_document(priced(make_plan(load(recipe, *AUTO), "2x4090"), 3600.0), None)
    assert covers(document["backward_stages"], range(32))
    assert covers(document["forward_stages"], range(document["backward_stages"][0][0]))
    predicted = document["predicted"]
    assert predicted["tokens_per_s"] == pytest.approx(4 * 512 / predicted["step_s"])
    assert 0 <= predicted["bubble_ratio"] < 1
    parts = [predicted[f"{part}_s"] for part in ("arithmetic", "launches", "waiting")]
    assert predicted["step_s"] == pytest.approx(sum(parts)) and min(parts) >= 0
    assert predicted["run_s"] == pytest.approx(predicted["dollars_of_run"]), "by a usual step, of short rows"


def test_many_layers_are_cut_quickly_and_within_the_limits(recipe: Path) -> None:
    big = ("max_seq_length=2048", "gradient_accumulation_steps=16", "pipeline.head_workers=1")
    answer = make_plan(load(recipe, *AUTO, *big, "model=meta-llama/Llama-3.3-70B-Instruct"), "2x3090")
    assert answer.verdict.fits and answer.bubble_ratio < 0.4 and answer.microbatches_per_round >= 2
    assert "few even cuts" in answer.explanation[0]


def test_the_longest_rows_are_no_shorter_than_those_that_fit() -> None:
    """`--solve` said `longest max_seq_length: none` of a plan whose weights come from the disk."""
    answer = make_plan(load_recipe("qwen3-8b", ["max_seq_length=2048"]), "1x3060,host_memory_gib=12")
    longest = solve(answer).max_seq_length
    assert answer.verdict.fits and answer.question.reads_disk and longest is not None and longest >= 2048
    words = ["max_seq_length=2048", "micro_batch_tokens=2048"]  # which longer rows do not fit into
    assert solve(make_plan(load_recipe("qwen3-8b", words), "8x4090")).max_seq_length == 2048


def test_a_235b_mixture_of_experts_in_little_memory() -> None:
    words = ("plan", "qwen3-32b", "model=Qwen/Qwen3-235B-A22B", "--hardware", "8x4090", "--solve", "--json")
    done = python(
        "import os, sys\n"
        "os.environ['HF_HUB_OFFLINE'] = '1'\n"
        "from roundpipe_cli.cli.app import main\n"
        f"sys.argv = ['roundpipe', *{words!r}]\n"
        "try: main()\n"
        "except SystemExit as left: assert not left.code\n"
        # not getrusage: ru_maxrss starts with the peak of the process that started this one
        "peak = int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "print('torch' in sys.modules, peak, file=sys.stderr)\n"
    )
    document = json.loads(done.stdout)
    assert (document["fits"], document["workers"], len(document["layers"])) == (True, 8, 96)
    assert covers(document["backward_stages"], range(96))
    assert document["solve"]["max_seq_length"] > 16000
    has_torch, peak_kib = done.stderr.split()[-2:]
    assert has_torch == "False" and int(peak_kib) < 300 * 1024


def test_long_sequences_of_many_experts_fit_in_chunks(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    words = ("model=Qwen/Qwen3-30B-A3B", *AUTO, "max_seq_length=31744", "gradient_accumulation_steps=8")
    words += ("dtype=bfloat16", "micro_batch_size=1", "pipeline.sequence_chunks=1")
    machine = "2x3080,host_memory_gib=256"
    whole = make_plan(load(recipe, *words), machine)
    chunks = make_plan(load(recipe, *words, "mlp_chunk_tokens=4096"), machine)
    assert (whole.verdict.fits, chunks.verdict.fits) == (False, True)
    solution = solve(whole)
    first, second, *_ = solution.changes
    assert first.overrides[0].startswith("pipeline.sequence_chunks=") and second.overrides == ("mlp_chunk_tokens=4096",)
    assert first.speed > second.speed
    (marked,) = (line for line in plan_text(whole, solution) if line.endswith(" (the fastest)"))
    assert f"{max(one.speed for one in solution.changes):,.0f} tokens/s" in marked
    assert chunks.bubble_ratio < 0.1


def test_check_exits_with_5_where_it_does_not_fit(recipe: Path) -> None:
    """Without the flag `plan` exits with 0: it has answered what it was asked."""
    words = ("--hardware", "1x2080ti:memory_gib=1.2,host_memory_gib=2.5", "--json")
    document = json.loads(said("plan", str(recipe), "method=full", *AUTO, *words, "--solve", "--check", code=5)[0])
    assert document["fits"] is False
    assert all("too little" in reason for reason in document["reasons"])
    assert [reason.split(":")[0] for reason in document["reasons"]] == ["memory of rtx-2080-ti", "host memory"]
    assert document["predicted"]["step_s"] > 0
    assert document["solve"]["max_seq_length"] is None
    assert [change["overrides"] for change in document["solve"]["changes"]] == [["method=lora"], []]


def test_time_to_finish_counts_rows_or_steps(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = length_of(load(recipe, "max_steps=7"))
    assert (most.steps, most.why, most.is_packed, most.num_sequences) == (7, "max_steps", False, 10)
    assert length_of(load(recipe, "num_train_epochs=2", "micro_batch_size=2")).steps == 4
    assert length_of(load(recipe, "num_train_epochs=2", "val_set_size=6")).steps == 2
    with monkeypatch.context() as sampled:
        sampled.setattr("roundpipe_cli.train.run_length.MOST_ROWS", 3)
        assert length_of(load(recipe, "num_train_epochs=2", "micro_batch_size=2")).steps == 4
    few = length_of(load(recipe, "datasets[0].split=train[2:5]"))
    assert few.why == "3 rows of about 2 tokens; fewer rows than the 4 of a step, which `finetune` refuses"
    (recipe.parent / "empty.jsonl").touch()
    empty = length_of(load(recipe, "datasets[0].path=empty.jsonl", "max_steps=7"))
    assert empty == RunLength(None, "empty.jsonl has no rows, which `finetune` refuses")
    hub = length_of(load(recipe, "datasets[0].path=org/rows"))
    assert hub.steps is None and "org/rows" in hub.why


def test_an_interrupted_run_shows_what_is_left(recipe: Path) -> None:
    answer = make_plan(load(recipe, "num_train_epochs=4"), "2x4090")
    (recipe.parent / "out" / "step-00000005").mkdir(parents=True)
    rest = plan_document(answer, None)["resume"]
    assert rest["checkpoint"].endswith("out/step-00000005") and rest["steps"] == 12 - 5 and rest["seconds"] > 0
    (line,) = [line for line in verdict_lines(answer) if line.startswith("  --resume")]
    assert line.endswith(f" for 7 steps from {rest['checkpoint']}")
    (recipe.parent / "out" / "step-00000012").mkdir()
    assert "resume" not in plan_document(answer, None), "at its end"
    (recipe.parent / "out" / "recipe.yaml").write_text(RECIPE)
    assert load_recipe(recipe.parent / "out").recipe.max_seq_length == 512


def test_picture_of_a_step(recipe: Path, tmp_path: Path) -> None:
    words = ("plan", str(recipe), "--hardware", "2x4090", "--check", "--svg")
    out, err = said(*words, str(tmp_path / "step.svg"))
    picture = (tmp_path / "step.svg").read_text()
    assert picture.startswith("<svg") and "worker 1" in picture
    assert "wrote" in err and out.startswith("FITS: ")
    assert "cannot write a.svg" in said(*words, "/no/such/folder/a.svg", code=2)[1]


def test_without_gpus_the_machine_is_said(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is for the two CPU workers that `finetune` would take; large models were planned for eight cards once."""
    monkeypatch.setenv("PATH", "")
    small, large = ask(load(recipe)), ask(load(recipe, "model=Qwen/Qwen3-8B"))
    assert [device.name for device in small.hardware.devices] == ["cpu", "cpu"]
    assert any("no GPU here: two CPU workers" in note for note in small.hardware.notes)
    (told,) = (note for note in small.hardware.notes if " GiB of host memory (" in note)
    assert float(told.split()[1]) == pytest.approx(small.hardware.host_memory_bytes / 2**30, abs=0.06)
    assert [device.name for device in large.hardware.devices] == ["cpu", "cpu"]
    assert any("`finetune` needs pipeline.devices=[cpu,cpu]" in note for note in large.hardware.notes)
    slow = plan_text(make_plan(load(recipe, "model=Qwen/Qwen3-8B", *AUTO)), None, details=False)
    assert slow[0].startswith(("SLOW: ", "DOES NOT FIT: ")) and any("--hardware 1x4090" in line for line in slow)
    assert len(list(wrapped(slow, 80))) < 24
    check_fits(ask(load(recipe, "model=Qwen/Qwen3-235B-A22B"), here=True))  # that there is no GPU is another refusal
    three = ask(load(recipe, "pipeline.devices=[cpu, cpu, cpu]"))
    assert len(three.hardware.devices) == 3
    assert all(layer.param_bytes == 0 for layer in three.costs.layers), "CPU workers alias the weights"
    twice = ask(load(recipe, "pipeline.devices=[cuda:0, cuda:0]"))
    assert any("planned for 2x4090" in note for note in twice.hardware.notes)


def test_gpus_are_read_from_nvidia_smi(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    listing = (
        "NVIDIA GeForce RTX 4090, 24564, 4, 8, GPU-1a2b\\nNVIDIA GeForce RTX 3090, 24576, 4, 16, GPU-1c2d\\n"
        "Novelty 9000, 16000, 5, 16, GPU-3e4f\\n"
    )
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{listing}'\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second, third = ask(load(recipe)).hardware.devices
    assert (first.name, first.memory_bytes, first.link_bytes_per_s) == ("rtx-4090", 24564 * 1024**2, 12.5e9)
    assert (second.name, third.name) == ("rtx-3090", "Novelty 9000")
    shared = ask(load(recipe, "pipeline.devices=[cuda:1, cuda:1]")).hardware.devices
    assert [device.memory_bytes for device in shared] == [12288 * 1024**2] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3e4f, 0")
    assert [device.name for device in ask(load(recipe)).hardware.devices] == ["Novelty 9000"]


def test_a_type_that_the_processor_emulates_is_in_the_verdict(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cpuinfo", lambda: "flags: avx2")
    for dtype, is_slow in (("bfloat16", True), ("float32", False)):
        answer = make_plan(load(recipe, f"dtype={dtype}", "pipeline.devices=[cpu,cpu]"), None)
        assert any("set dtype=float32" in line for line in verdict_lines(answer)) == is_slow


def test_method_and_turing_settings_reach_the_plan(recipe: Path) -> None:
    document: dict[str, Any] = plan_document(make_plan(load(recipe), "2x2080ti"), None)
    assert any("no bfloat16; planned as float16" in line for line in document["assumptions"])
    question = ask(load(recipe, "method=full", "max_seq_length=9000"), "4090")
    assert question.settings.method == "full"
    assert any("made for at most 8192" in line for line in make_plan(question.loaded, "4090").assumptions)


def test_finetune_refuses_what_cannot_fit_before_loading(recipe: Path) -> None:
    check_fits(ask(load(recipe), here=True))
    large = load(recipe, "model=Qwen/Qwen3-235B-A22B", "method=full", "pipeline.devices=[cpu, cpu]")
    with pytest.raises(ResourceError) as caught:
        check_fits(ask(large, here=True))
    assert caught.value.exit_code == 5
    assert "host memory: needs" in str(caught.value)
    assert "--solve" in str(caught.value)


def test_the_recipe_names_the_machine_that_is_planned_for(recipe: Path) -> None:
    """`--hardware` wins over it, and a run looks at what is here whatever it says."""
    words = "hardware='2x3090:pcie_lanes=8,host_memory_gib=64'"
    machine = ask(load(recipe, words)).hardware
    assert [device.name for device in machine.devices] == ["rtx-3090"] * 2
    assert machine.host_memory_bytes == 64 * 1024**3
    assert machine.devices[0].link_bytes_per_s < ask(load(recipe), "3090").hardware.devices[0].link_bytes_per_s
    assert len(ask(load(recipe, words), "4090").hardware.devices) == 1
    named = load(recipe, "model=Qwen/Qwen3-8B", "hardware='8x4090,host_memory_gib=1'", "pipeline.devices=[cpu]")
    check_fits(ask(named, here=True))
    with pytest.raises(RefusedError) as caught:
        ask(load(recipe, "hardware=2x3900"))
    assert "hardware: 2x3900" in str(caught.value) and "did you mean rtx-3090" in str(caught.value)


def test_sequences_in_chunks_are_planned(recipe: Path) -> None:
    words = "8x4090,host_memory_gib=128"
    long = [*AUTO, "model=Qwen/Qwen3-8B", "max_seq_length=131072", "gradient_accumulation_steps=1"]
    whole = make_plan(load(recipe, *long, "pipeline.sequence_chunks=1"), words)
    chunks = make_plan(load(recipe, *long, "pipeline.sequence_chunks=32", "pipeline.head_workers=8"), words)
    assert chunks.step_s < whole.step_s / 3 and chunks.bubble_ratio < 0.3
    assert chunks.cut.backward_stages[0][0] == chunks.cut.backward_stages[0][1], "the head is alone in its stage"
    assert chunks.verdict.fits and not whole.verdict.fits and chunks.tokens_per_s > 3 * whole.tokens_per_s
    assert any("every chunk of a sequence takes the same time" in line for line in chunks.assumptions)
    costs = [plan.question.costs.layers[1] for plan in (whole, chunks)]
    assert 1 <= 32 * costs[1].forward_s / costs[0].forward_s < 1.02, "keys and values are copied behind earlier ones"
    assert costs[1].activation_bytes < costs[0].activation_bytes


def test_gains_of_the_engine_are_in_the_plan(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run leaves out of a recompute or keeps on the device takes no time."""
    launched = ask(load(recipe, "pipeline.skip_last_projection=true"), "2x4090").costs.layers[1]
    assert launched.recomputed_s == launched.forward_s, "a product less is no shorter where launches bind"
    monkeypatch.setattr(analytic, "ISSUED_PER_S", ((1.0, math.inf),))
    skip, words = "pipeline.skip_last_projection", "2x4090,host_memory_gib=64"
    never, auto, always = (ask(load(recipe, f"{skip}={value}"), words) for value in ("false", "auto", "true"))
    block = always.costs.layers[1]
    assert block.recomputed_s == block.forward_s - block.recompute_skippable_s < block.forward_s
    assert never.costs.layers[1].recomputed_s == block.forward_s
    assert auto.costs == always.costs, "the inputs of 32 small layers take little memory"
    large = ask(load(recipe, "gradient_accumulation_steps=4096"), words)
    assert not large.settings.skip_last_projection, "as `train/build.py` decides for so many of them"
    kept = ask(load(recipe, "pipeline.keep_activations=3"), "4090")
    assert [layer.recompute for layer in kept.costs.layers[-5:]] == [True, False, False, False, False]
    several = ask(load(recipe, "pipeline.keep_activations=3"), "2x4090")
    assert all(layer.recompute for layer in several.costs.layers[1:-1]), "blocks seldom stay where they were"


def test_short_host_memory_takes_fewer_boundaries(recipe: Path) -> None:
    """Rounds are shorter where the fastest keep too many, and stages coarser where short ones do."""
    big = ("model=meta-llama/Llama-3.3-70B-Instruct", "load_in_4bit=true", "micro_batch_size=2", "max_seq_length=2048")
    words = (*AUTO, *big, "gradient_accumulation_steps=16", "weights=pinned")
    coarse, ample = (make_plan(load(recipe, *words), f"4x3090,host_memory_gib={gib}") for gib in (54, 126))
    assert coarse.verdict.fits and ample.verdict.fits
    assert coarse.microbatches_per_round < ample.microbatches_per_round
    assert len(coarse.cut.backward_stages) < len(ample.cut.backward_stages)
    assert "host memory is short" in coarse.explanation[0] and ample.step_s < coarse.step_s


def test_a_model_whose_figures_never_come_ends_plan(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: object, **__: object) -> None:
        threading.Event().wait()

    monkeypatch.setattr(find_model, "parse_config", stuck)
    with pytest.raises(NoProgressError, match="no progress for 0.5 s") as caught:
        plan(str(recipe), ["watchdog_s=0.5"])
    assert caught.value.problems[0].where == "reading the model's figures"


READ_BY_PLANNING = {
    "head_chunk_tokens": ("head_chunk_tokens=64", ""),
    "mlp_chunk_tokens": ("mlp_chunk_tokens=64", ""),
    "fused": ("kernels=reference", ""),
    "recompute": ("pipeline.recompute=layer", ""),
    "unread": ("pipeline.skip_last_projection=true", "pipeline.skip_last_projection=false"),
    "keep_inputs": ("pipeline.skip_last_projection=true", "pipeline.skip_last_projection=false"),
    "keep_blocks": ("pipeline.keep_activations=2", ""),
    "weight_cache_bytes": ("pipeline.weight_cache=100000000", ""),
}
"""Option of the engine -> a value of the key that sets it, and a value for which the plan is another one."""
DECIDED_BY_PLANNING = {"whole_per_visit", "num_slots"}  # set by no recipe key: planner and engine read one value
NEUTRAL = {  # options that change neither time nor memory of a plan, each with its reason
    "seed": "changes values only",
    "label_smoothing": "a term of the loss, far below what is counted",
    "own_loss": "a program's function, whose memory nobody knows: the page says to lower head_chunk_tokens",
    "attends_in_rows": "rows are counted as full, and one row fills its sequence either way",
    "watchdog_s": "acts only when nothing moves",
}


def test_every_option_of_the_engine_is_planned_for(recipe: Path) -> None:
    options = {field.name: field.default for field in fields(EngineOptions)}
    assert options.keys() == {*READ_BY_PLANNING, *DECIDED_BY_PLANNING, *NEUTRAL}
    assert len(options) == len(READ_BY_PLANNING) + len(DECIDED_BY_PLANNING) + len(NEUTRAL)

    def planned(*overrides: str) -> dict[str, Any]:
        return plan_document(make_plan(load(recipe, *filter(None, overrides)), "1x4090"), None)

    for option, (value, other) in READ_BY_PLANNING.items():
        assert planned(value) != planned(other), option
    question = ask(load(recipe, "load_in_4bit=true"), "1x4090")
    assert question.unpacking is not None and question.settings.unpacks_once == question.unpacking.once
    assert question.costs.slots == options["num_slots"] == NUM_SLOTS
