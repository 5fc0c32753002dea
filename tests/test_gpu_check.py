"""`scripts/gpu_check`: what a check that fails, hangs or dies costs, what a bare machine skips, tables of results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.gpu_checks import correctness, environment, experts, figures, fp8, links, procedure, throughput
from scripts.gpu_checks.kernels import kind_of
from scripts.gpu_checks.part import PARTS, outcome_of, run_part
from scripts.gpu_checks.place import OPTIONAL, Check, CheckPlace, SkippedCheckError
from scripts.gpu_checks.procedure import ROOT, Attempt, CheckDocument, run_one, summary

CHILD = """
import faulthandler, json, os, signal, sys, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
results, done = sys.argv[1], sys.argv[2:]
def write(**line):
    with open(results, "a") as file: file.write(json.dumps({"part": "links", **line}) + "\\n")
def hangs_here(): time.sleep(60)
for name in ("good", "hangs", "dies", "last"):
    if name in done: continue
    write(check=name, status="running", limit_s=0.3)
    if name == "hangs": hangs_here()
    if name == "dies" and "CUDA_LAUNCH_BLOCKING" not in os.environ: os.kill(os.getpid(), signal.SIGSEGV)
    write(check=name, status="ok", seconds=0.0, figures={"answer": 7})
"""
"""In place of a part's process: the second check hangs, the third dies."""


QUICK = {"environment": environment, "correctness": correctness, "links": links, "throughput": throughput}


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    def words(part: str, args: argparse.Namespace, results: Path, done: Sequence[str]) -> list[str]:
        others = {"good", "hangs", "dies", "last"} - set(args.choose) if getattr(args, "choose", None) else ()
        return [sys.executable, "-S", str(script), str(results), *done, *others]

    monkeypatch.setattr(procedure, "child_words", words)
    monkeypatch.setattr(procedure, "STACKS_S", 0.2)


@pytest.mark.usefixtures("child")
def test_a_check_that_hangs_or_dies_costs_only_itself(tmp_path: Path) -> None:
    """One script ran everything in a row: a kernel that hung took all later answers with it."""
    document = CheckDocument(tmp_path / "all.json", "GPU")
    run_one("links", argparse.Namespace(), tmp_path, document, end_s=1e18)
    written = json.loads(document.path.read_text())["parts"]["links"]
    assert [(one["check"], one["status"]) for one in written] == [
        ("good", "ok"), ("hangs", "stopped"), ("dies", "stopped"), ("last", "ok"),
    ]  # fmt: skip
    assert "hangs_here" in written[1]["stacks"] and "no result after 0 s" in written[1]["reason"]
    assert "-11" in written[2]["reason"] and written[3]["figures"] == {"answer": 7}
    assert summary(document) == 1


@pytest.mark.usefixtures("child")
def test_a_case_that_failed_is_tried_again_one_launch_at_a_time(tmp_path: Path) -> None:
    """What then passes is a matter of order, what fails again one of arithmetic."""
    document = CheckDocument(tmp_path / "all.json", "GPU")
    run_one("correctness", argparse.Namespace(choose=[]), tmp_path, document, end_s=1e18)
    written = json.loads(document.path.read_text())["parts"]["correctness"][4:]
    assert [(one["check"], one["status"]) for one in written] == [("hangs, again", "stopped"), ("dies, again", "ok")]
    assert written[0]["environment"] == {"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_quick_is_few_checks_on_all_cards_within_ten_minutes() -> None:
    assert sum(procedure.QUICK_LIMITS_S.values()) == 600.0
    place = CheckPlace(True, (0, 1), "tiny", is_quick=True)
    names = {part: [one.name for one in module.checks(place)] for part, module in QUICK.items()}
    assert len(names["correctness"]) == 8 and len(names["links"]) == 2
    assert names["throughput"] == ["lora, streamed, on 2"]
    assert {"topology", "messages of the driver", "under load"} <= set(names["environment"])
    parser = argparse.ArgumentParser()
    procedure.add_arguments(parser)
    args = parser.parse_args(
        ["--quick", "--scale", "tiny", "--trace", "t.json", "--memory-snapshot", "m.pickle", "--choose", "a b"]
    )
    words = procedure.child_words("links", args, Path("r"), ["x"])
    assert parser.parse_args(words[2:]).quick and words[words.index("--trace") + 1] == "t.json"
    assert words[words.index("--memory-snapshot") + 1] == "m.pickle" and words[words.index("--choose") + 1] == "a b"


def test_memory_is_locked_until_the_system_refuses() -> None:
    found = outcome_of(next(links.checks(CheckPlace(True, (0, 1), "tiny", is_quick=True))))
    assert found["figures"] == {"locked_bytes": 4 * 2**18, "was_refused": False}, found


def test_what_memory_held_is_kept_when_it_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    dumped: list[str] = []
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", dumped.append)
    found = outcome_of(raised(torch.OutOfMemoryError("CUDA out of memory")), "held.pickle")
    assert (found["status"], found["memory_snapshot"], dumped) == ("failed", "held.pickle", ["held.pickle"])
    assert "memory_snapshot" not in outcome_of(raised(AssertionError("3 off")), "held.pickle")


@pytest.mark.sweep
def test_one_throughput_on_all_cards_and_a_trace_of_a_step(tmp_path: Path) -> None:
    place = CheckPlace(True, (0, 1), "tiny", is_quick=True, trace=str(tmp_path / "trace.json"))
    found = [outcome_of(one) for one in throughput.checks(place)]
    assert [one["status"] for one in found] == ["ok", "ok"], found
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.usefixtures("child")
def test_a_part_that_is_out_of_time_keeps_its_answers(tmp_path: Path) -> None:
    """The document is whole after every check; the part's limit counts before a check's."""
    attempt = Attempt("links", argparse.Namespace(), tmp_path / "0", [])
    assert [one["check"] for one in attempt.outcomes(end_s=0.0)][-1] in ("start", "good", "hangs")
    assert not attempt.is_complete


def raised(error: BaseException) -> Check:
    def run() -> dict[str, Any]:
        raise error

    return Check("one", run)


def test_what_a_missing_package_costs() -> None:
    """Optional packages skip a check with the reason; any other import that fails is a fault."""
    for name in OPTIONAL:
        found = outcome_of(raised(ModuleNotFoundError(f"No module named '{name}.x'", name=f"{name}.x")))
        assert (found["status"], found["reason"]) == ("skipped", f"{name} is not installed")
    assert outcome_of(raised(ModuleNotFoundError("no torch", name="torch")))["status"] == "failed"
    assert outcome_of(raised(SkippedCheckError("no card")))["reason"] == "no card"
    failed = outcome_of(raised(AssertionError("3 off")))
    assert failed["status"] == "failed" and "3 off" in failed["traceback"]


def test_every_answer_is_on_disk_before_the_next_question(tmp_path: Path) -> None:
    results = tmp_path / "lines"
    done = {"torch", "devices", "driver", "topology", "messages of the driver", "under load"}
    assert run_part("environment", CheckPlace(True, (0, 1), "tiny"), results, done) == 0
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(line["check"], line["status"]) for line in lines] == [
        (name, status) for name in ("packages", "host") for status in ("running", "ok")
    ]
    assert lines[1]["figures"]["missing"] == [name for name in lines[1]["figures"]["missing"] if name != "torch"]


@pytest.mark.slow
def test_a_bare_machine_runs_most_of_it_and_says_what_it_skipped(tmp_path: Path) -> None:
    """Without bitsandbytes, datasets, gguf and omegaconf, in real processes, on simulated cards."""
    path = tmp_path / "bare.jsonl"
    from scripts.gpu_checks.correctness import checks

    chosen = ("lora on [0, 1]", "4-bit on [0, 1]", "finetune")
    names = [one.name for one in checks(CheckPlace(True, (0, 1), "tiny"))]
    done = [name for name in names if name not in chosen]
    words = [sys.executable, "scripts/gpu_check", "--child", "correctness", "--device", "simulated"]
    words += ["--results", str(path), "--without", *OPTIONAL, "--done", *done]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["check"]: (line["status"], line.get("reason")) for line in lines if line["status"] != "running"}
    assert found == {
        "lora on [0, 1]": ("ok", None),
        "4-bit on [0, 1]": ("skipped", "bitsandbytes is not installed"),
        "finetune": ("skipped", "omegaconf is not installed"),
    }


def test_without_a_gpu_nothing_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, as ever, and no other part is begun."""
    line = json.dumps({"part": "environment", "check": "devices", "status": "ok", "seconds": 0.0, "figures": {}})

    def words(part: str, args: argparse.Namespace, results: Path, done: Sequence[str]) -> list[str]:
        assert part == "environment"
        return [sys.executable, "-S", "-c", "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", str(results), line]

    monkeypatch.setattr(procedure, "child_words", words)
    parser = argparse.ArgumentParser()
    procedure.add_arguments(parser)
    args = parser.parse_args(["--json", str(tmp_path / "none.json")])
    args.only = list(PARTS)
    assert procedure.main(args) == 2
    assert "nothing was checked" in capsys.readouterr().err


KERNELS = {
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "product",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT": "product",
    "_grouped_outer_kernel": "product",
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu>": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::MeanOps>": "reduction",
    "Memcpy DtoD (Device -> Device)": "copy",
    "void at::native::CatArrayBatchedCopy": "copy",
}


def test_kinds_of_kernels() -> None:
    assert {name: kind_of(name) for name in KERNELS} == KERNELS


def test_a_deterministic_step_is_compared_with_itself_and_with_one_worker() -> None:
    chosen = [one for one in correctness.checks(CheckPlace(True, (0, 1), "tiny")) if "deterministic" in one.name]
    assert [one.name for one in chosen] == ["deterministic, whole", "deterministic, packed", "deterministic, experts"]
    found = outcome_of(chosen[1])
    assert found.get("figures") == {"errors": [0.0, 0.0]}, found


@pytest.mark.parametrize(
    ("part", "count", "needs"),
    [
        (experts, 10, {"a Triton kernel"}),
        (fp8, 4, {"a conversion by a card", "the time of a conversion"}),
    ],
)
def test_kernels_of_cards_need_a_real_one(part: Any, count: int, needs: set[str]) -> None:
    """On simulated cards the processor computes."""
    found = [outcome_of(one) for one in part.checks(CheckPlace(True, (0, 1), "tiny"))]
    assert len(found) == count and {one["status"] for one in found} == {"skipped"}
    assert {one["reason"] for one in found} == {f"{what} needs a real card" for what in needs}


def test_tables_bear_the_hardwares_name(tmp_path: Path) -> None:
    """From the JSON alone; simulated results never get there."""
    parts = {
        "throughput": [
            {"check": "lora, streamed", "status": "ok",
             "figures": {"tokens_per_s": 1234.5, "step_s": 2.0, "idle": 0.03, "peak_bytes": 5e9}},
            {"check": "lora, cached", "status": "failed", "reason": "no"},
        ],
        "links": [{"check": "one link", "status": "ok", "figures": {"up_gb_per_s": [25.0], "down_gb_per_s": [26.0]}}],
        "kernels": [
            {"check": "launches a second", "status": "ok", "figures": {"1 at will": 1e5}},
            {"check": "qwen3, lora, auto", "status": "ok", "figures": {
                "microseconds": {"product": 750.0, "attention": 250.0}, "launches": {"product": 22, "attention": 1}}},
        ],
        "experts": [
            {"check": "parity", "status": "ok", "figures": {"errors": {}}},
            {"check": "time, bfloat16", "status": "ok", "figures": {
                "milliseconds": {"ours": 4.0, "torch": 9.0, "ours, both": 12.0, "torch, both": 30.0},
                "first_s": 8.0, "torch_loops": True}},
        ],
        "fp8": [
            {"check": "time, 64 x 64 x 64", "status": "ok", "figures": {"milliseconds": {
                "bfloat16": 2.0, "unpacking": 0.5}}},
        ],
    }  # fmt: skip
    document = {"device": "GPU", "hardware": "1 x NVIDIA H200, torch 2.11.0", "seconds": {}, "parts": parts}
    page = figures.updated(figures.PAGE.read_text(encoding="utf-8"), document, "2026-12-01")
    assert "1 x NVIDIA H200, torch 2.11.0, 2026-12-01: 7 ok, 1 failed, 0 stopped, 0 skipped." in page
    assert "| lora, streamed | 1,234 | 2.000 s | 3.0 % | 5.00 GB |" in page and "| one link | 25.0 | 26.0 |" in page
    assert "| time, bfloat16 | 4.00 ms | 9.00 ms | 12.00 ms | 30.00 ms | a loop |" in page
    assert "| qwen3, lora, auto | 23 | 1.00 ms | 75 % | 25 % |" in page
    assert "| time, 64 x 64 x 64 | 2.00 ms | 0.50 ms |" in page
    assert figures.updated(page, document, "2026-12-01") == page
    path = tmp_path / "simulated.json"
    path.write_text(json.dumps({**document, "device": "simulated"}))
    before = figures.PAGE.read_bytes()
    assert figures.main(path) == 2 and figures.PAGE.read_bytes() == before
