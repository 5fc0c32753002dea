"""Resume at staleness 1 is exact: masters and moments of the newest version, weights of the one before; host bytes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.e2e import (
    REPOSITORY,
    child_environment,
    finetune,
    launch,
    make_model,
    make_workspace,
    metrics,
    numbers,
)

ADAPTER = "adapter_model.safetensors"
STALE = "pipeline.optimizer_staleness=1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2)


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return make_workspace(tmp_path / "work", model)


@pytest.mark.parametrize("words", [["dtype=bfloat16", "method=full"], ["dtype=float32"]])
def test_stopped_killed_and_resumed_on_other_workers_gives_the_same_bits(folder: Path, words: list[str]) -> None:
    finetune(folder, STALE, *words, "output_dir=whole").expect(0)
    running = launch(
        folder, "finetune", "recipe.yaml", STALE, *words, environment={"ROUNDPIPE_FAULT": "optimizer:slow=0.3"}
    )
    running.wait_for_steps(2)
    running.kill(signal.SIGTERM)
    stopped = running.finish().expect(143)
    assert "with a checkpoint" in stopped.err and "training waited" in stopped.err
    three = "pipeline.devices=[cpu,cpu,cpu]"
    died = finetune(folder, STALE, *words, three, "--resume", environment={"ROUNDPIPE_FAULT": "optimizer:kill:step=4"})
    assert died.code == -signal.SIGKILL
    finetune(folder, STALE, *words, "pipeline.devices=[cpu]", "--resume").expect(0)
    assert numbers(folder / "out") == numbers(folder / "whole")
    name = ADAPTER if "method=full" not in words else "model.safetensors"
    assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    first, second = (folder / place / "step-00000006" for place in ("out", "whole"))
    for file in ("masters", "moments", "weights"):
        mine, theirs = (load_file(path / f"{file}.safetensors") for path in (first, second))
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs) and mine.keys() == theirs.keys()
    weights, masters = load_file(first / "weights.safetensors"), load_file(first / "masters.safetensors")
    assert all(weights[key].dtype == getattr(torch, words[0].removeprefix("dtype=")) for key in weights)
    assert any(not torch.equal(weights[key], masters[key].to(weights[key].dtype)) for key in weights), "one behind"


def test_staleness_may_change_at_a_resume_and_it_says_what_that_means(folder: Path) -> None:
    running = launch(folder, "finetune", "recipe.yaml", environment={"ROUNDPIPE_FAULT": "optimizer:slow=0.1"})
    running.wait_for_steps(2)
    running.kill(signal.SIGINT)
    running.finish().expect(130)
    done = finetune(folder, STALE, "--resume", "num_train_epochs=3").expect(0)
    assert "written without staleness: the next two steps compute with the same weights" in done.err
    assert [row["step"] for row in metrics(folder / "out")] == list(range(1, 10))
    assert json.loads((folder / "out" / "report.json").read_text())["skipped_steps"] == 0


# --- host bytes -------------------------------------------------------------------------------------------------------

MANY, FEWER = 48 * 2**20, 16 * 2**20
"""Parameters: with two bytes each there have to be more, lest what else the process holds shows."""
MEASURE = """
import sys
from pathlib import Path
import torch
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.layout import make_layout
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.optim.updater import Updater

def resident():
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index("RssAnon:") + 1]) + 1024 * int(status[status.index("RssShmem:") + 1])

dtype, staleness, trains, count = getattr(torch, sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "full", int(sys.argv[4])
with torch.device("meta"):
    layers = [torch.nn.Parameter(torch.empty(count // 6, dtype=dtype), requires_grad=trains) for _ in range(6)]
torch.set_num_threads(1)
torch._foreach_mul_([torch.ones(9)], 2.0)
before = resident()
store = WeightStore([make_layout(f"l{i}", [(f"w{i}", p)], dtype) for i, p in enumerate(layers)], staleness)
for buffer in store.transferred:
    buffer.view(torch.uint8).fill_(1) if buffer.dtype == torch.uint8 else buffer.fill_(1e-3)
optimizer = HostOptimizer(store)
with Updater(store, optimizer, num_threads=1) as updater:
    for step in range(2 if trains else 0):
        updater.begin(step, 1e-3, 0.5)
        updater.wait()
    print((resident() - before) / count, sum(store.num_bytes().values()) / count + optimizer.num_bytes / count)
"""


@pytest.mark.parametrize(
    ("dtype", "staleness", "method", "count", "expected"),
    [
        pytest.param("bfloat16", 0, "full", MANY, 18, marks=pytest.mark.sweep),
        ("bfloat16", 1, "full", FEWER, 24),
        pytest.param("float32", 0, "full", MANY, 16, marks=pytest.mark.sweep),
        pytest.param("float32", 1, "full", MANY, 24, marks=pytest.mark.sweep),
        ("bfloat16", 1, "frozen", MANY, 2.0),
    ],
)
def test_host_bytes_per_parameter(dtype: str, staleness: int, method: str, count: int, expected: float) -> None:
    """What the process really holds after two updates, and what the store says of itself."""
    words = [sys.executable, "-c", MEASURE, dtype, str(staleness), method, str(count)]
    done = subprocess.run(
        words, cwd=REPOSITORY, env=child_environment(), capture_output=True, text=True, check=True, timeout=120
    )
    measured, counted = map(float, done.stdout.split())
    assert measured == pytest.approx(expected, rel=0.05)
    assert counted == pytest.approx(expected, rel=0.001)
