"""What roundpipe's options gain, simulated: one Markdown table for the two models with published layer times.

    python scripts/simulated_gains.py tests/facts/published_schedules.json

8 workers, 16 microbatches a step, the default accounting with links of 25 GB/s, one synchronous step without the
optimizer's updates. Layer times and hops are the published ones; bytes are estimated (`LINES`). Each option alone is
compared with the planner's plan without any; stages are the planner's or even ones, whichever are faster.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from roundpipe_cli.costs.analytic import case_of, head_chunk_bytes
from roundpipe_cli.costs.block_work import attended_tokens, lora_params
from roundpipe_cli.costs.cost import CostModel, LayerCost, keep_activations, skip_projections
from roundpipe_cli.costs.find_model import shipped_architecture
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.memory import device_need, one_layer_bytes, usable_device_bytes
from roundpipe_cli.costs.models import Architecture
from roundpipe_cli.costs.settings import TrainingSettings
from roundpipe_cli.planning.choose import choose
from roundpipe_cli.planning.compare import SimulationCase, StageCut, run
from roundpipe_cli.planning.dealing import dealt_cut
from roundpipe_cli.schedule.builders import Options

HUB_IDS = {"Llama3-8B": "meta-llama/Llama-3.1-8B", "Qwen3-32B": "Qwen/Qwen3-32B"}
WORKERS, MICROBATCHES, TOKENS = 8, 16, 8192
WIDTHS = (2, 4, 8)
"""Numbers of workers that share a stage."""
SETTINGS = TrainingSettings(max_seq_length=TOKENS, num_microbatches=MICROBATCHES)
IN_ORDER = (
    "are added up in one lane, so that a visit waits for the sum of the one before (but not with earliest-free "
    "dispatch, whose order the simulator does not hold: lanes there, a worker each)"
)
GRADIENTS = {
    "none": "gradients are adapters', too few to count, and no visit waits for another's sum (as with grad_lanes: 16)",
    "lora": f"gradients of adapters of rank {SETTINGS.lora_r} {IN_ORDER}",
    "full": f"gradients of all weights, 4 bytes each, {IN_ORDER}",
}
LINES = """Estimated: weights of 2 bytes a parameter go up at every visit of a stage.
A boundary has 8192 tokens x hidden size x 2 bytes.
Assumed: {gradients}.
The last projection's share of a block's forward is its share of the FLOPs ({share}).
Activations of the last {kept} block(s) fit beside the plan in 24 GiB by the memory model; that they lie where
backward runs is assumed, so rows with kept activations are upper bounds."""


@dataclass
class Column:
    """One model's rows as they are measured."""

    architecture: Architecture
    model: dict[str, Any]
    gradients: str

    def __post_init__(self) -> None:
        self.costs = self._costs()
        self.plans: dict[CostModel, StageCut] = {}
        self.rows: dict[str, tuple[float, str]] = {}
        """Seconds of a step and which width was best."""
        self.share = (
            0.0
            if not self.costs.layers[0].forward_s
            else (self.costs.layers[0].recompute_skippable_s / self.costs.layers[0].forward_s)
        )
        self.num_kept = self._num_kept()

    def _costs(self) -> CostModel:
        architecture, model = self.architecture, self.model
        block, query = architecture.blocks[0], architecture.num_attention_heads * architecture.head_dim
        last_flops = 2 * architecture.hidden_size * architecture.intermediate_size
        flops = 2 * block.active_linear_params + 4 * query * attended_tokens(TOKENS, None)
        forward_s = model["block_forward_ms"] / 1e3
        block_cost = LayerCost(
            "block",
            forward_s,
            model["block_backward_ms"] / 1e3,
            recompute=True,
            param_bytes=2 * block.params,
            boundary_bytes=2 * TOKENS * architecture.hidden_size,
            grad_bytes=4 * self._trained(block.params, lora_params(architecture, block, SETTINGS)),
            activation_bytes=one_layer_bytes(architecture, SETTINGS),
            recompute_skippable_s=forward_s * last_flops / flops,
        )
        head = LayerCost(
            "head",
            model["head_forward_ms"] / 1e3,
            model["head_backward_ms"] / 1e3,
            recompute=False,
            param_bytes=2 * architecture.head_params,
            grad_bytes=4 * self._trained(architecture.head_params, 0),
            activation_bytes=head_chunk_bytes(architecture, SETTINGS),
        )
        return CostModel(architecture.name, (*[block_cost] * model["blocks"], head), hop_s=model["hop_ms"] / 1e3)

    def _trained(self, all_params: int, adapters: int) -> int:
        return {"none": 0, "lora": adapters, "full": all_params}[self.gradients]

    def plan(self, costs: CostModel) -> StageCut:
        """The planner's stages, planned once."""
        if costs not in self.plans:
            self.plans[costs] = choose("roundpipe", SimulationCase(costs, WORKERS, MICROBATCHES))
        return self.plans[costs]

    def _num_kept(self) -> int:
        """Blocks whose activations of a worker's share of a round fit beside the plan."""
        plan, hardware = self.plan(self.costs), parse_hardware("8x4090")
        case = case_of(self.architecture, SETTINGS, hardware)
        case = replace(case, costs=self.costs)
        need = device_need(case, plan.forward_stages, plan.backward_stages)
        free = usable_device_bytes(hardware.devices[0]) - need.total_bytes
        per_worker = -(-(plan.microbatches_per_round or WORKERS) // WORKERS)
        return max(0, free // (per_worker * self.costs.layers[0].activation_bytes))

    def kept(self, costs: CostModel) -> CostModel:
        """Costs with the last blocks kept, as many as fit."""
        blocks = len(costs.layers) - 1
        return keep_activations(costs, range(max(0, blocks - self.num_kept), blocks))

    def step_s(self, costs: CostModel, options: Options, planned: StageCut | None = None) -> float:
        """One step with the planner's or even stages."""
        question = SimulationCase(costs, WORKERS, MICROBATCHES, options=options)
        partition = planned or self.plan(
            replace(costs, layers=tuple(replace(x, recompute_s=None) for x in costs.layers))
        )
        if planned is None and options != Options():
            partition = dealt_cut(partition, question)
        return run("roundpipe", partition, question).step_s

    def measure(self) -> None:
        """All rows."""
        costs, skipped = self.costs, skip_projections(self.costs)
        self.rows["published plan"] = (self.step_s(costs, Options(), published_plan(self.model)), "")
        self.rows["the planner's plan"] = (self.step_s(costs, Options()), "")
        heads = {f"{width}": Options(head_workers=width) for width in WIDTHS}
        free = {"earliest free": Options(earliest_free=True)}
        self._best("head's microbatches spread over workers", costs, heads)
        self._best("earliest-free dispatch", costs, {"": free["earliest free"]})
        self._best("recompute without the last projection", skipped, {"": Options()})
        self._best("activations that fit kept", self.kept(costs), {f"{self.num_kept} blocks": Options()})
        dispatch = {"planner's": Options(), "head on all": Options(head_workers=WORKERS), **free}
        self._best("together, without kept activations", skipped, dispatch)
        self._best("together", self.kept(skipped), dispatch)

    def _best(self, name: str, costs: CostModel, choices: dict[str, Options]) -> None:
        self.rows[name] = min((self.step_s(costs, options), label) for label, options in choices.items())

    def cell(self, name: str) -> str:
        """Seconds, throughput gained over the planner's plan, and the best width."""
        step_s, label = self.rows[name]
        gain = 100 * (self.rows["the planner's plan"][0] / step_s - 1)
        return f"{step_s:.3f} s | {gain:+.1f} %{f' ({label})' if label else ''}"


def published_plan(model: dict[str, Any]) -> StageCut:
    """The published stages; their figures count blocks, the head joins the first backward stage."""
    figures, blocks = model["schedules"]["roundpipe"], model["blocks"]
    forward = _ranges(figures["blocks_per_forward_stage"])
    backward = _ranges(figures["blocks_per_backward_stage"][::-1])[::-1]
    return StageCut(tuple(forward), ((backward[0][0], blocks), *backward[1:]), WORKERS)


def _ranges(sizes: list[int]) -> list[tuple[int, int]]:
    return [(end - size, end - 1) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="published_schedules.json")
    parser.add_argument("--gradients", choices=list(GRADIENTS), default="none", help="what is downloaded and added up")
    arguments = parser.parse_args()
    models = json.loads(arguments.figures.read_text(encoding="utf-8"))["models"]
    columns = []
    for name, hub_id in HUB_IDS.items():
        architecture = shipped_architecture(hub_id)
        assert architecture is not None
        columns.append(Column(architecture, models[name], arguments.gradients))
    for column in columns:
        column.measure()
    names = [hub_id.split("/")[1] for hub_id in HUB_IDS.values()]
    print("| |" + "|".join(f" {name}: step | throughput " for name in names) + "|")
    print("|---|" + "---:|---:|" * len(names))
    for row in columns[0].rows:
        print(f"| {row} | " + " | ".join(column.cell(row) for column in columns) + " |")
    share = ", ".join(f"{100 * column.share:.0f} %" for column in columns)
    print(
        "\n"
        + LINES.format(
            gradients=GRADIENTS[arguments.gradients], share=share, kept=" and ".join(str(c.num_kept) for c in columns)
        )
    )


if __name__ == "__main__":
    main()
