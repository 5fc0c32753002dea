"""Several processes on one run, as torchrun starts them on several machines: the numbers of one, and a clear end."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.train.nodes.group import Nodes
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.optim.shard import Shards, owners
from tests.support.e2e import (
    Outcome,
    Running,
    finetune,
    launch,
    make_model,
    make_workspace,
    metrics,
    numbers,
)
from tests.support.tiny import make_rig

CHANGES = {"micro_batch_size": 1, "gradient_accumulation_steps": 4, "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recipe with dropout whose last step of an epoch has two microbatches, trained alone into `out`."""
    folder = tmp_path_factory.mktemp("nodes")
    work = make_workspace(folder / "work", make_model(folder / "made"), **CHANGES)
    finetune(work, environment={"ROUNDPIPE_ROW_LOG": str(work / "rows-alone")}).expect(0)
    yield work


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(
    folder: Path, count: int, *words: str, recipes: tuple[str, ...] = (), **environments: dict[str, str]
) -> list[Running]:
    """`count` processes of one run; `environments` names more variables by process: p0, p1."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        launch(
            folder,
            *("finetune", recipes[rank] if recipes else "recipe.yaml", *words),
            environment={**shared, "RANK": str(rank), **environments.get(f"p{rank}", {})},
        )
        for rank in range(count)
    ]


def train(folder: Path, count: int, *words: str, **environments: dict[str, str]) -> list[Outcome]:
    return [process.finish() for process in start(folder, count, *words, **environments)]


def rows_of(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def shared_by(workspace: Path, count: int) -> list[Outcome]:
    """The workspace's run by `count` processes, which log their rows, into `shared{count}`."""
    logs = {f"p{rank}": {"ROUNDPIPE_ROW_LOG": str(workspace / f"rows-{count}-{rank}")} for rank in range(count)}
    outcomes = train(workspace, count, f"output_dir=shared{count}", **logs)
    assert [outcome.code for outcome in outcomes] == [0] * count, outcomes
    return outcomes


@pytest.fixture(scope="module")
def by_two(workspace: Path) -> list[Outcome]:
    return shared_by(workspace, 2)


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_give_the_numbers_of_one(workspace: Path, by_two: list[Outcome], count: int) -> None:
    outcomes = by_two if count == 2 else shared_by(workspace, count)
    alone, shared = metrics(workspace / "out"), metrics(workspace / f"shared{count}")
    assert [row["loss"] for row in shared] == pytest.approx([row["loss"] for row in alone], rel=1e-6)
    assert [row["grad_norm"] for row in shared] == pytest.approx([row["grad_norm"] for row in alone], rel=1e-5)
    assert [row["tokens"] for row in shared] == [row["tokens"] for row in alone]
    for rank in range(count):
        assert rows_of(workspace / f"rows-{count}-{rank}") == rows_of(workspace / "rows-alone")
    assert all(outcome.out == "" and outcome.err == "" for outcome in outcomes[1:]), "only the first speaks"
    names = {path.name for path in (workspace / "out").iterdir()}
    assert {path.name for path in (workspace / f"shared{count}").iterdir()} == names, "and only it writes"


@pytest.mark.parametrize("tokens", [pytest.param(128, marks=pytest.mark.sweep), "auto"])
def test_microbatches_filled_by_tokens_are_shared(workspace: Path, tokens: int | str) -> None:
    """Rows are short, so that a step has fewer microbatches than full rows would make."""
    words = (f"micro_batch_tokens={tokens}", "lora.dropout=0", "max_steps=4")
    finetune(workspace, *words, f"output_dir=one-{tokens}").expect(0)
    outcomes = train(workspace, 2, *words, f"output_dir=two-{tokens}")
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    alone, shared = (metrics(workspace / f"{name}-{tokens}") for name in ("one", "two"))
    assert [row["loss"] for row in shared] == pytest.approx([row["loss"] for row in alone], rel=1e-6)
    assert [row["tokens"] for row in shared] == [row["tokens"] for row in alone]


FULL = ("method=full", "learning_rate=1e-3", "save_steps=4")


@pytest.fixture(scope="module")
def trained(workspace: Path) -> Path:
    """Full fine-tuning by two processes, each with all of the optimizer's state, into `full2`."""
    assert [outcome.code for outcome in train(workspace, 2, *FULL, "output_dir=full2")] == [0, 0]
    return workspace


def test_full_fine_tuning_sums_only_rows_of_the_table_that_have_tokens(trained: Path) -> None:
    finetune(trained, *FULL, "output_dir=full1").expect(0)
    alone, shared = metrics(trained / "full1"), metrics(trained / "full2")
    assert [row["loss"] for row in shared] == pytest.approx([row["loss"] for row in alone], rel=1e-6)
    assert [row["grad_norm"] for row in shared] == pytest.approx([row["grad_norm"] for row in alone], rel=1e-5)


@pytest.mark.parametrize("nth", [2, 5])
def test_a_lost_device_is_its_machines_own_affair(trained: Path, nth: int) -> None:
    """Before any gradient of the step was given to the others, and after."""
    fault = {"ROUNDPIPE_FAULT": f"compute:raise=DeviceFault:step=2:worker=1:nth={nth}"}
    outcomes = train(trained, 2, *FULL, f"output_dir=lost{nth}", p1=fault)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert "was lost at" not in outcomes[0].err and "machine 1: cpu (worker 1) was lost at step 3" in outcomes[1].err
    assert numbers(trained / f"lost{nth}") == numbers(trained / "full2")


def tensors_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


BF16 = "dtype=bfloat16"


@pytest.fixture(scope="module")
def sharded(workspace: Path) -> tuple[Path, list[Outcome]]:
    """Full fine-tuning in bfloat16, by three processes with a shared-out optimizer."""
    outcomes = train(workspace, 3, *FULL, BF16, "nodes.shard_optimizer=true", "output_dir=sharded3")
    return workspace / "sharded3", outcomes


def assert_shared_out(outcomes: list[Outcome], folder: Path, whole: Path) -> None:
    """The same bits as `whole`, with its checkpoints, which the first process writes whole, and the result."""
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes), outcomes
    assert "shared out over" in outcomes[0].err
    assert numbers(folder) == numbers(whole)
    for step in ("step-00000004", "step-00000006", "."):
        files = tensors_of(folder / step)
        assert files and files == tensors_of(whole / step)


def test_a_shared_out_optimizer_gives_the_same_bits(trained: Path) -> None:
    outcomes = train(trained, 2, *FULL, "nodes.shard_optimizer=true", "output_dir=sharded2")
    assert_shared_out(outcomes, trained / "sharded2", trained / "full2")


def test_a_shared_out_optimizer_in_16_bit_gives_the_same_bits(
    workspace: Path, sharded: tuple[Path, list[Outcome]]
) -> None:
    assert [outcome.code for outcome in train(workspace, 3, *FULL, BF16, "output_dir=whole3")] == [0] * 3
    assert_shared_out(sharded[1], sharded[0], workspace / "whole3")


def test_every_machine_keeps_its_share() -> None:
    layouts = make_rig("llama", dtype=torch.bfloat16, num_hidden_layers=12, vocab_size=300).store.layouts
    whole = WeightStore(layouts)
    kept = []
    for rank in range(3):
        elsewhere = Shards(Nodes(rank, 3, 0), owners(layouts, 3), frozenset()).elsewhere
        store = WeightStore(layouts, elsewhere=elsewhere)
        kept.append(store.num_bytes()["masters"] + HostOptimizer(store, elsewhere=elsewhere).num_bytes)
    assert sum(kept) == whole.num_bytes()["masters"] + HostOptimizer(whole).num_bytes
    assert max(kept) < 0.36 * sum(kept)


@pytest.mark.parametrize("count", [1, 2])
def test_a_shared_out_run_resumes_on_another_number_of_machines(
    workspace: Path, sharded: tuple[Path, list[Outcome]], count: int
) -> None:
    """From a checkpoint of three in bfloat16: masters and moments."""
    whole, _ = sharded
    folder = workspace / f"resumed{count}"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("report.*", "model*", "step-00000006"))
    words = (*FULL, BF16, "nodes.shard_optimizer=true", f"output_dir={folder}", "--resume")
    assert [outcome.code for outcome in train(workspace, count, *words)] == [0] * count
    before, after = metrics(whole), metrics(folder)
    assert [row["loss_hex"] for row in after[:4]] == [row["loss_hex"] for row in before[:4]]
    assert [row["loss"] for row in after] == pytest.approx([row["loss"] for row in before], rel=1e-4)
    assert tensors_of(folder / "step-00000006").keys() == tensors_of(whole / "step-00000006").keys()


def copy_of(workspace: Path, name: str) -> Path:
    """Recipe, rows and model alone."""
    ignored = shutil.ignore_patterns("out", "shared*", "sharded*", "whole*", "full*", "one-*", "two-*", "resumed*")
    return Path(shutil.copytree(workspace, workspace.parent / name, ignore=ignored))


def test_a_killed_process_ends_the_run_which_resumes(workspace: Path, by_two: list[Outcome]) -> None:
    folder = copy_of(workspace, "killed")
    first, second = train(folder, 2, p1={"ROUNDPIPE_FAULT": "compute:kill:step=3"})
    assert second.code == -signal.SIGKILL
    first.expect(1)
    assert first.err.count("error:") == 1 and "another process of this run ended" in first.err
    assert [outcome.code for outcome in train(folder, 2, "--resume")] == [0, 0]
    assert numbers(folder / "out") == numbers(workspace / "shared2"), "to the bit"


def test_a_signal_to_one_stops_all_with_a_checkpoint(workspace: Path) -> None:
    folder = copy_of(workspace, "stopped")
    first, second = start(folder, 2, "num_train_epochs=40", p0={"ROUNDPIPE_FAULT": "compute:slow=0.01"})
    first.wait_for_steps(3)
    second.kill(signal.SIGTERM)
    outcomes = [first.finish(), second.finish()]
    assert [outcome.code for outcome in outcomes] == [143, 143], outcomes
    step = metrics(folder / "out")[-1]["step"]
    assert (folder / "out" / f"step-{step:08d}").is_dir()


def test_processes_that_do_not_train_the_same_are_refused(workspace: Path) -> None:
    folder = copy_of(workspace, "other")
    (folder / "rows.jsonl").rename(folder / "first.jsonl")
    changed = (folder / "first.jsonl").read_text().replace("is said", "was said", 1)
    (folder / "second.jsonl").write_text(changed)
    for name in ("first", "second"):
        text = (folder / "recipe.yaml").read_text().replace("rows.jsonl", f"{name}.jsonl")
        (folder / f"{name}.yaml").write_text(text)
    recipes = ("first.yaml", "second.yaml")
    outcomes = [process.finish() for process in start(folder, 2, recipes=recipes)]
    for outcome in outcomes:
        assert "do not train the same" in outcome.expect(2).err
    assert "data_hash" in outcomes[1].err
    assert not (folder / "out" / "metrics.jsonl").exists()


def test_what_cannot_be_shared_is_refused(workspace: Path) -> None:
    alone = {"WORLD_SIZE": "8", "RANK": "0"}
    refused = launch(workspace, "finetune", "recipe.yaml", "output_dir=few", environment=alone).finish().expect(2)
    assert "gradient_accumulation_steps" in refused.err and not (workspace / "few").exists()
    adapt = launch(workspace, "finetune", "recipe.yaml", "output_dir=few", "on_oom=adapt", environment=alone)
    assert "on_oom" in adapt.finish().expect(2).err
