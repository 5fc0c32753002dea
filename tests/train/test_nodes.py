"""Several processes on one run, as torchrun starts them on several machines: the numbers of one, and a clear end."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.costs import machine as machines
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RecipeError, RefusedError, RoundpipeError
from roundpipe_cli.train.monitor import telemetry
from roundpipe_cli.train.nodes import group
from roundpipe_cli.train.nodes.agreement import require_same
from roundpipe_cli.train.nodes.group import Nodes
from roundpipe_cli.train.optim.optimizer import HostOptimizer
from roundpipe_cli.train.optim.shard import Shards, owners
from tests.support.covering import swept
from tests.support.e2e import (
    STAGES,
    Outcome,
    Running,
    finetune,
    launch,
    make_model,
    make_workspace,
    metrics,
    num_lines,
    numbers,
    tree,
)
from tests.support.tiny import make_rig
from tests.torture.workers import lose_after_gradients

CHANGES = {"micro_batch_size": 1, "gradient_accumulation_steps": 4, "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recipe with dropout whose last step of an epoch has two microbatches, trained alone into `out`."""
    folder = tmp_path_factory.mktemp("nodes")
    work = make_workspace(folder / "work", make_model(folder / "made"), **CHANGES, **STAGES)
    log = {"ROUNDPIPE_ROW_LOG": str(work / "rows-alone")}
    launch(work, "finetune", "recipe.yaml", environment=log, before=say_soon).finish().expect(0)
    yield work


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def machine(folder: Path, rank: int) -> Path:
    """The working directory of a machine: `folder` of the first one, for each other one a copy of what is trained."""
    if rank == 0:
        return folder
    name = f"{folder.name}-machine-{rank + 1}"
    return folder.with_name(name) if folder.with_name(name).exists() else copy_of(folder, name)


def copy_of(folder: Path, name: str) -> Path:
    """Recipe, rows and model alone, for a machine or more; beside the working directory `folder`."""
    copy = folder.with_name(name)
    shutil.copytree(folder / "model", copy / "model")
    for file in ("recipe.yaml", "rows.jsonl"):
        shutil.copy(folder / file, copy)
    return copy


def start(folder: Path, count: int, *words: str, **environments: dict[str, str]) -> list[Running]:
    """`count` processes of one run, each in its folder; `environments`: more variables by process, p0, p1."""
    port = free_port()
    return [start_one(folder, rank, count, port, *words, **environments.get(f"p{rank}", {})) for rank in range(count)]


def places(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    return {"WORLD_SIZE": str(count), "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def start_one(
    folder: Path, rank: int, count: int, port: int, *words: str, say_after_s: float = 1.0, **environment: str
) -> Running:
    """One process of a run, which says soon for whom it waits."""
    changes, command = {**places(rank, count, port), **environment}, ("finetune", "recipe.yaml", *words)
    return launch(machine(folder, rank), *command, environment=changes, before=partial(say_soon, say_after_s))


def say_soon(after_s: float = 1.0) -> None:
    """And promise of a processor what a card's data sheet does, so that there is an MFU."""
    group.SAY_AFTER_S = group.STOP_AFTER_S = after_s
    telemetry._promised = lambda device, dtype, *, narrow: 1e12


def train(folder: Path, count: int, *words: str, **environments: dict[str, str]) -> list[Outcome]:
    return [process.finish() for process in start(folder, count, *words, **environments)]


def succeed(folder: Path, count: int, *words: str, **environments: dict[str, str]) -> list[Outcome]:
    return [outcome.expect(0) for outcome in train(folder, count, *words, **environments)]


def rows_of(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_numbers(folder: Path, alone: str, shared: str, *, loss: float = 1e-6, norm: float = 1e-5) -> None:
    """Two runs have the same tokens, and losses and gradient norms within relative tolerances."""
    one, other = metrics(folder / alone), metrics(folder / shared)
    assert [row["tokens"] for row in other] == [row["tokens"] for row in one]
    for key, tolerance in (("loss", loss), ("grad_norm", norm)):
        assert [row[key] for row in other] == pytest.approx([row[key] for row in one], rel=tolerance)


HARMLESS = (
    *("logging_steps=3", "save_total_limit=5", "check_longest_rows=false", "watchdog_s=99", "weights=pageable"),
    *("pipeline.devices=[cpu]", "pipeline.recompute=layer", "pipeline.schedule=gpipe", "pipeline.weight_cache=0"),
    *("pipeline.forward_stages=auto", "pipeline.backward_stages=auto"),
)
"""Keys that may differ between machines."""


@pytest.fixture(scope="module")
def by_two(workspace: Path) -> list[Outcome]:
    """The workspace's run by two processes, which log their rows, the second one with other keys."""
    port, processes = free_port(), []
    for rank, words in enumerate(((), HARMLESS)):
        log = {"ROUNDPIPE_ROW_LOG": str(workspace / f"rows-{rank}")}
        words = ("output_dir=shared2", *words)
        processes.append(start_one(workspace, rank, 2, port, *words, say_after_s=math.inf, **log))
    return [process.finish().expect(0) for process in processes]


def test_several_processes_give_the_numbers_of_one(workspace: Path, by_two: list[Outcome]) -> None:
    assert_numbers(workspace, "out", "shared2")
    alone, *logs = (rows_of(workspace / f"rows-{who}") for who in ("alone", 0, 1))
    assert logs == [alone, alone]
    assert "on 2 machines, without the exchange between them" in by_two[0].err, "the forecast"
    assert by_two[1].out == by_two[1].err == "", "only the first speaks"
    lone, shared = (metrics(workspace / name)[0] for name in ("out", "shared2"))
    assert shared["mfu"] / shared["tokens_per_s"] == pytest.approx(lone["mfu"] / lone["tokens_per_s"] / 2)
    names = [{path.name for path in (workspace / name).iterdir()} for name in ("out", "shared2")]
    assert names[0] == names[1], "and only it writes"


def test_microbatches_filled_by_tokens_are_shared_in_float16_too(workspace: Path) -> None:
    """Rows are short: a step has fewer microbatches than of full rows. The norm is that without the loss scale."""
    words = ("micro_batch_tokens=auto", "lora.dropout=0", "max_steps=3", "dtype=float16")
    finetune(workspace, *words, "output_dir=one").expect(0)
    succeed(workspace, 2, *words, "output_dir=two")
    assert_numbers(workspace, "one", "two", loss=1e-4, norm=1e-3)


FULL = ("method=full", "learning_rate=1e-3", "save_steps=2", "max_steps=5")


@pytest.fixture(scope="module")
def trained(workspace: Path) -> Path:
    """Full fine-tuning alone, into `full1`, and by two processes, each with the whole optimizer, into `full2`."""
    finetune(workspace, *FULL, "output_dir=full1").expect(0)
    succeed(workspace, 2, *FULL, "output_dir=full2")
    assert_numbers(workspace, "full1", "full2")  # though only rows of the table that have tokens are summed
    return workspace


def test_a_lost_device_is_its_machines_own_affair(trained: Path) -> None:
    """Before and after its machine gave gradients to the other: at a worker's first operation, and its last."""
    words, port = (*FULL, "output_dir=lost"), free_port()
    first = start_one(trained, 0, 2, port, *words, ROUNDPIPE_FAULT="compute:raise=DeviceFault:step=2:worker=1:nth=1")
    command, after = ("finetune", "recipe.yaml", *words), partial(lose_after_gradients, 3)
    second = launch(machine(trained, 1), *command, environment=places(1, 2, port), before=after)
    cases = ((first, r"cpu \(worker 1\) was lost at step 3"), (second, r"was lost at step 4"))
    for rank, (process, lost) in enumerate(cases):
        err = process.finish().expect(0).err
        assert re.search(lost, err) and err.count("was lost at") == 1, err
        assert ("after gradients were passed on" in err) == (process is second)
        assert rank == 0 or "machine 2: cpu (worker 0)" in err, err
    assert numbers(trained / "lost") == numbers(trained / "full2")
    report = json.loads((trained / "lost" / "report.json").read_text())
    lost_devices = {(one["device"], one["at"]) for one in report["lost_devices"]}
    assert lost_devices == {("cpu", "step 3"), ("cpu of machine 2", "step 4")}


def tensors_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("count", [2, *swept([3])])
def test_a_shared_out_optimizer_gives_the_same_bits(trained: Path, count: int) -> None:
    """With its checkpoints, which the first process writes whole, and the result."""
    folder, whole, words = trained / f"sharded-{count}", trained / f"whole-{count}", (*FULL, "dtype=bfloat16")
    succeed(trained, count, *words, f"output_dir={whole.name}")
    done = succeed(trained, count, *words, "nodes.shard_optimizer=true", f"output_dir={folder.name}")
    assert "shared out over" in done[0].err and numbers(folder) == numbers(whole)
    for step in ("step-00000004", "step-00000005", "."):
        files = tensors_of(folder / step)
        assert files and files == tensors_of(whole / step)


def test_every_machine_keeps_its_share() -> None:
    layouts = make_rig("llama", dtype=torch.bfloat16, num_hidden_layers=12, vocab_size=2000).store.layouts
    whole = WeightStore(layouts)
    kept = []
    for rank in range(3):
        elsewhere = Shards(Nodes(rank, 3, 0), owners(layouts, 3), frozenset()).elsewhere
        store = WeightStore(layouts, elsewhere=elsewhere)
        kept.append(store.num_bytes()["masters"] + HostOptimizer(store, elsewhere=elsewhere).num_bytes)
    assert sum(kept) == whole.num_bytes()["masters"] + HostOptimizer(whole).num_bytes
    assert max(kept) < 0.36 * sum(kept)


def test_a_signal_to_one_stops_all_with_a_checkpoint(workspace: Path) -> None:
    folder = copy_of(workspace, "stopped")
    first, second = start(folder, 2, "num_train_epochs=40", p0={"ROUNDPIPE_FAULT": "compute:slow=0.01"})
    first.wait_for_steps(3)
    second.kill(signal.SIGTERM)
    outcomes = [first.finish(), second.finish()]
    assert [outcome.code for outcome in outcomes] == [143, 143], outcomes
    assert ["generate" in outcome.err for outcome in outcomes] == [True, False], "nothing is kept elsewhere"
    step = metrics(folder / "out")[-1]["step"]
    assert (folder / "out" / f"step-{step:08d}").is_dir()


@pytest.mark.parametrize(
    ("file", "words", "differs"),
    [
        ("rows.jsonl", (), "data_hash"),
        ("first/adapter_model.safetensors", ("lora.start_from=first", "lora.dropout=0"), "trained weights of block"),
    ],
)
def test_other_bytes_on_a_machine_are_refused(workspace: Path, file: str, words: tuple[str, ...], differs: str) -> None:
    """Story: each machine trained its own adapter further, and no hash of what is trained was compared."""
    folder = copy_of(workspace, f"other-{differs[:4]}")
    for rank in (0, 1):
        shutil.copytree(workspace / "out", machine(folder, rank) / "first")
    path = machine(folder, 1) / file
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    for outcome in train(folder, 2, *words):
        assert "do not train the same" in outcome.expect(2).err
        assert differs in outcome.err and "on machine 2 of 2" in outcome.err
    assert num_lines(folder / "out" / "metrics.jsonl") == 0


def little_disk() -> None:
    say_soon()
    machines.free_disk_bytes = lambda folder: 8192  # type: ignore[assignment]


def test_only_the_machine_that_writes_checkpoints_needs_a_disk_for_them(workspace: Path) -> None:
    folder, port, outcomes = copy_of(workspace, "little-disk"), free_port(), []
    for little in (1, 0):
        started = []
        for rank in (0, 1):
            before, command = little_disk if rank == little else say_soon, ("finetune", "recipe.yaml", "max_steps=1")
            started.append(launch(machine(folder, rank), *command, environment=places(rank, 2, port), before=before))
        outcomes.append([process.finish() for process in started])
        shutil.rmtree(folder / "out", ignore_errors=True)
    assert [[outcome.code for outcome in pair] for pair in outcomes] == [[0, 0], [5, 5]], outcomes
    assert all("disk" in outcome.err and "8 KiB" in outcome.err for outcome in outcomes[1])


def test_what_cannot_be_shared_is_refused(workspace: Path) -> None:
    alone = places(0, 8, 29500)
    refused = finetune(workspace, "output_dir=few", environment=alone).expect(2)
    assert "gradient_accumulation_steps" in refused.err and not (workspace / "few").exists()
    assert "on_oom" in finetune(workspace, "output_dir=few", "on_oom=adapt", environment=alone).expect(2).err


def test_only_the_first_machine_looks_at_the_output_directory(workspace: Path, by_two: list[Outcome]) -> None:
    """The second one once was refused for what lay on its own disk, and the first waited out the watchdog."""
    folder = copy_of(workspace, "one-looks")
    other = machine(folder, 1)
    shutil.copytree(workspace / "out", other / "out")
    before = tree(other / "out")
    succeed(folder, 2, "max_steps=1")
    assert tree(other / "out") == before, "a run on the second machine's disk is none of its business"

    shutil.rmtree(other / "out")
    for outcome in train(folder, 2, "max_steps=1"):
        assert "already holds a run" in outcome.expect(2).err and "--resume" in outcome.err
        assert outcome.seconds < 20
    for outcome in train(folder, 2, "output_dir=none", "--resume"):
        assert "no checkpoint to resume from" in outcome.expect(6).err


@pytest.mark.parametrize("word", ["no_such_key", "rows.jsonl"])
def test_a_refusal_of_one_machine_ends_all_in_its_words(workspace: Path, word: str) -> None:
    """Of its recipe, before they meet, or of its data, long after: the first one is at its own meanwhile."""
    folder = copy_of(workspace, f"refused-{word}")
    if word == "rows.jsonl":
        (machine(folder, 1) / word).unlink()
    else:
        with (machine(folder, 1) / "recipe.yaml").open("a") as recipe:
            recipe.write(f"{word}: 1\n")
    first, second = train(folder, 2)
    assert word in second.expect(2).err
    assert word in first.expect(2).err and "machine 2 of 2" in first.err


STAND_IN = """
ask="$0/$TORCHELASTIC_RESTART_COUNT-$RANK"; env > "$ask.part"; mv "$ask.part" "$ask"
while [ ! -s "$ask.end" ]; do sleep 0.05; done
read code < "$ask.end"; [ "$code" -ge 0 ] || kill "$code" $$; exit "$code"
"""
"""Stands for a process, which would load torch: notes what torchrun tells it, and ends as one did that was told so."""


def run_torchrun(words: list[str]) -> None:
    from torch.distributed.run import main

    main(words)
    sys.exit()


def torchrun(folder: Path, *faults: str) -> list[list[Outcome]]:
    """Two processes that torchrun starts, the second one with a fault, and again after their end, with the next."""
    asks = folder / "asks"
    asks.mkdir()
    words = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    words += ["--max-restarts", str(len(faults) - 1), "--no-python", "sh", "-c", STAND_IN, str(asks)]
    agent = launch(folder, before=partial(run_torchrun, words))
    found = []
    for number, fault in enumerate(faults):
        agent.wait_until(lambda: all((asks / f"{number}-{rank}").exists() for rank in (0, 1)))  # noqa: B023
        started = []
        for rank in (0, 1):
            text = (asks / f"{number}-{rank}").read_text()
            told = dict(re.findall(r"^(MASTER_\w+|RANK|WORLD_SIZE|TORCHELASTIC_\w+)=(.*)$", text, re.M))
            changes = {**told, "ROUNDPIPE_FAULT": fault if rank else ""}
            command = ("finetune", "recipe.yaml")
            started.append(launch(machine(folder, rank), *command, environment=changes, before=say_soon))
        found.append([process.finish() for process in started])
        for rank, outcome in enumerate(found[-1]):
            (asks / f"{number}-{rank}.end").write_text(f"{outcome.code}\n")
    assert agent.finish().code == 1, "torchrun's own, where the last ones fail too"
    return found


def test_torchrun_starts_a_killed_run_again(workspace: Path, by_two: list[Outcome]) -> None:
    """Though nobody says `--resume`: before a checkpoint, and from one. The folder held a run: its own."""
    folder = copy_of(workspace, "restarted")
    for first, second in torchrun(folder, "compute:kill:step=1", "compute:kill:step=4"):
        assert second.code == -signal.SIGKILL
        assert first.expect(1).err.count("error:") == 1 and "another process of this run ended" in first.err
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    first, _ = succeed(folder, 2, p0=again, p1=again)
    assert first.err.count("resuming after step ") == 1
    assert numbers(folder / "out") == numbers(workspace / "shared2"), "to the bit"


@pytest.mark.sweep
def test_torchrun_does_not_continue_a_run_that_was_refused(workspace: Path, by_two: list[Outcome]) -> None:
    folder = copy_of(workspace, "refused-again")
    shutil.copytree(workspace / "shared2", folder / "out")
    before = tree(folder / "out")
    for outcome in sum(torchrun(folder, "", ""), []):
        assert "already holds a run" in outcome.expect(2).err
    assert tree(folder / "out") == before


# --- waiting --------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which somebody listens and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def waiting(folder: Path, place: str, port: int) -> tuple[Running, list[Running]]:
    """A process that waits for another one at the place, and all that were started."""
    if place == "nobody comes":
        one = start_one(folder, 0, 2, free_port())
        return one, [one]
    if place == "no answer":
        one = start_one(folder, 1, 2, port)
        return one, [one]
    frozen = 0 if place == "in a step" else 1
    fault = "compute:stop:step=1" if place == "in a step" else "tokenize:stop"
    own = {"ROUNDPIPE_FAULT": fault, "ROUNDPIPE_CACHE": str(folder / "cache")}  # where the other one has put no tokens
    both = start(folder, 2, **{f"p{frozen}": own})
    return both[1 - frozen], both


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", ["nobody comes", "no answer", "before training", "in a step"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_every_wait(workspace: Path, silent: int, place: str, number: int, code: int) -> None:
    """A process once waited for others in the main thread, deaf to all signals."""
    folder = copy_of(workspace, f"signal-{place.replace(' ', '-')}-{code}")
    one, started = waiting(folder, place, silent)
    try:
        one.wait_until(lambda: "waiting for machine" in one.err)
        at = " of 2 at 127.0.0.1:"
        whom = {"no answer": f"1{at}", "nobody comes": f"2{at}", "in a step": "1 of 2 ("}
        assert f"waiting for machine {whom.get(place, '2 of 2 (')}" in one.err
        began_s = time.monotonic()
        one.kill(number)
        outcome = one.finish().expect(code)
        assert time.monotonic() - began_s < 10
        assert f"stopped by {signal.Signals(number).name}" in outcome.err
    finally:
        for process in started:
            process.kill(signal.SIGKILL)


def test_a_wait_ends_with_the_watchdog(workspace: Path, silent: int) -> None:
    """A listener that never answers once held a process for minutes, whatever `watchdog_s` said."""
    outcome = start_one(copy_of(workspace, "limit"), 1, 2, silent, "watchdog_s=1").finish().expect(1)
    assert "machine 1 of 2 at 127.0.0.1" in outcome.err and "for 1 s" in outcome.err
    assert outcome.seconds < 10


def test_a_name_that_only_this_machine_reaches_is_no_address_to_listen_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give 127.0.1.1 to a machine's own name; an address of another machine is a gateway's."""
    said: list[str] = []
    nodes = Nodes(0, 2, said.append)
    resolved = {"node-1": "127.0.1.1", "localhost": "127.0.0.1"}

    def look_up(host: str, port: int, type: int) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved.get(host, host), port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    listened = {"node-1": "0.0.0.0", "127.0.1.1": "127.0.1.1", "localhost": "127.0.0.1", "203.0.113.7": "0.0.0.0"}
    for host, expected in listened.items():
        with nodes._listen_at(host, free_port()) as listener:
            assert listener.getsockname()[0] == expected
    assert len(said) == 2 and all("trusted network only" in text for text in said)


def test_the_end_of_a_wait_says_who_waited_and_how_to_go_on() -> None:
    nodes = Nodes(1, 3)
    ways = {" again, with --resume if there is a checkpoint": None, " again with --resume": True, " them again": False}
    for hint, there in ways.items():
        nodes.may_resume = None if there is None else partial(bool, there)
        (problem,) = nodes._why("to begin", "gone").problems
        assert problem.where == "machine 2 of 3" and problem.hint is not None and problem.hint.endswith(hint)


def test_a_failure_to_write_the_result_that_is_told_as_the_first_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the other one had heard that the first left, and ended with 0."""
    nodes = Nodes(1, 2)

    def hear_both(work: Callable[[], Any], _: str) -> Future[Any]:
        nodes._take("failed", 0, {"code": 5, "problems": [{"what": "cannot write the result"}]})
        nodes._take("left", 0, None)
        (answer := Future[Any]()).set_result(work())
        return answer

    monkeypatch.setattr(group, "in_thread", hear_both)
    with pytest.raises(RoundpipeError, match="machine 1 of 2: cannot write the result"):
        nodes.finish()


def test_a_wait_is_for_the_machines_that_are_behind() -> None:
    """Another machine than the first hears of those by its line to that one, for which it waits before."""
    first, other = Nodes(0, 3), Nodes(1, 3)
    first._num_waits = other._num_waits = 2
    assert first._whom().startswith("machines 2, 3 of 3") and other._whom().startswith("machine 1 of 3")
    first._take("at", 2, 2)
    other._take("at", 0, 2)
    with socket.socket() as other.lines.open[0]:
        assert first._whom().startswith("machine 2 of 3") and other._whom().startswith("machine 3 of 3")


def test_two_machines_of_one_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in places(0, 3, free_port()).items():
        monkeypatch.setenv(name, value)
    Nodes(0, 3)._connect()
    Nodes(1, 3)._connect()
    with pytest.raises(RefusedError, match="say that they are the same machine"):
        Nodes(1, 3)._connect()


DIFFERENCES = (
    *("seed=7", "learning_rate=0.02", "lora.r=8", "lora.alpha=4", "lora.dropout=0", "max_seq_length=48"),
    *("micro_batch_size=2", "gradient_accumulation_steps=2", "micro_batch_tokens=128", "save_steps=3", "eval_steps=2"),
    *("val_set_size=2", "early_stopping_patience=1", "max_grad_norm=0.5", "shuffle=false", "dtype=bfloat16"),
    *("pipeline.threads_per_worker=2", "pipeline.sequence_chunks=2", "nodes.shard_optimizer=true", "method=full"),
    *("kernels=reference", "on_nonfinite=skip", "on_oom=adapt", "objective=dpo", "packing=true", "optim=sgd"),
)


@pytest.mark.parametrize("word", [DIFFERENCES[0], *swept(DIFFERENCES[1:])])
def test_a_key_that_differs_is_refused_by_name(workspace: Path, word: str) -> None:
    """Before anything else is sent: two machines with other intervals, say, once waited in different collectives."""
    folder = copy_of(workspace, f"differs-{word.partition('=')[0]}")
    port, key = free_port(), word.partition("=")[0]
    both = [start_one(folder, 0, 2, port), start_one(folder, 1, 2, port, word)]
    for outcome in [process.finish() for process in both]:
        assert key in outcome.expect(2).err, outcome.err
        assert outcome.seconds < 20
    assert not (folder / "out" / "metrics.jsonl").exists()


def test_values_that_are_nothing_or_missing_differ_too() -> None:
    first = {"seed": 1, "decay": 0, "packing": True, "eval_steps": None, "kl": 0.1, "same": 0}
    third = {"seed": 0, "decay": 0.1, "packing": False, "eval_steps": 2, "new": 1, "same": 0}
    with pytest.raises(RecipeError) as refused:
        require_same({0: first, 2: third}, 3)
    told = [(one.where, one.found, one.expected) for one in refused.value.problems]
    values = [("seed", 0, 1), ("decay", 0.1, 0), ("packing", "false", "true"), ("eval_steps", 2, "null")]
    values += [("kl", "null", 0.1), ("new", 1, "null")]
    assert told == [(key, f"{its} on machine 3 of 3", f"{other}, as on machine 1") for key, its, other in values]


def test_a_run_that_is_killed_continues_on_any_number_of_machines(trained: Path) -> None:
    """1, 3, 2 and 1 processes, one of each but the last killed; each checkpoint is continued by all."""
    folder, words = copy_of(trained, "counts"), (*FULL, "nodes.shard_optimizer=true", "save_steps=1")
    for index, count in enumerate((1, 3, 2, 1)):
        fault = {} if index == 3 else {"ROUNDPIPE_FAULT": f"compute:kill:step={2 + index}"}
        resume = ["--resume"] if index else []
        resume += ["pipeline.threads_per_worker=2"] if index == 3 else []
        killed = 0 if count == 2 else count - 1
        outcomes = train(folder, count, *words, *resume, **{f"p{killed}": fault})
        codes = [-signal.SIGKILL if rank == killed else 1 for rank in range(count)] if fault else [0]
        assert [outcome.code for outcome in outcomes] == codes, outcomes
        assert count != 2 or "another process of this run ended" in outcomes[1].err, outcomes
    changed = "pipeline.threads_per_worker is 2, was 1: numbers differ in their last bits from here on"
    assert changed in outcomes[0].err and not (machine(folder, 1) / "out").exists(), "only the first one writes"
    alone, rows = metrics(trained / "full1"), metrics(folder / "out")
    assert [row["step"] for row in rows] == list(range(1, len(alone) + 1))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone], rel=1e-5)
