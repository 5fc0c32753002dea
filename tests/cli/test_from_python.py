"""The door for programs: `from roundpipe_cli import plan, finetune`. Each program runs in a process of its own."""

from __future__ import annotations

import ast
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import roundpipe_cli
from roundpipe_cli import FinetuneResult, PlanResult, finetune, plan
from roundpipe_cli.errors import RefusedError, RoundpipeError
from roundpipe_cli.events import Event, Notice, StepFinished
from tests.engine.test_parity import check_gradients
from tests.support.e2e import STAGES_OF_TWO, assert_same_run, forked, launch, make_workspace, python, run
from tests.support.tiny import make_rig, random_microbatches, step_of_any_workers

SIZES = [(2, 9), (1, 12), (2, 8)]
OWN = "loss: tests.cli.test_from_python.cross_entropy, of this program"


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="sum")


def doubled(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 2 * cross_entropy(logits, targets)


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)


def focal(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Focal loss with gamma 2 (arXiv 1708.02002)."""
    picked = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])
    return -((1 - picked.exp()) ** 2 * picked).sum()


def logit_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Its gradient is a view of a single value."""
    return logits.sum()


def each(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def a_number(logits: torch.Tensor, targets: torch.Tensor) -> Any:
    return float(logits.detach().sum())


def not_a_number(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.sum() * float("nan")


def constant(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.tensor(1.0)


# --- the loss in the engine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "chunk"), [("full", 4), ("lora", 4), ("full", 1024)])
def test_cross_entropy_of_a_program_is_the_built_in_one(method: str, chunk: int) -> None:
    rig, microbatches = make_rig("llama", method), random_microbatches(SIZES)
    built_in = step_of_any_workers(rig, microbatches, head_chunk_tokens=chunk)
    expected = {name: rig.store.gradient(name).clone() for name in rig.store.trainable_names}
    found = step_of_any_workers(rig, microbatches, head_chunk_tokens=chunk, own_loss=cross_entropy)
    assert found.loss == pytest.approx(built_in.loss, rel=1e-6)
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((rig.store.gradient(name) - gradient).norm()) <= 1e-6 * largest, name


@pytest.mark.parametrize("own", [focal, smoothed, logit_sum])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_another_loss_is_that_of_plain_pytorch(own: Callable[..., torch.Tensor], model_type: str) -> None:
    """Gemma 2 caps its logits."""
    rig, microbatches = make_rig(model_type), random_microbatches(SIZES)
    found = step_of_any_workers(rig, microbatches, head_chunk_tokens=4, own_loss=own)
    num_targets, total = sum(int((one.labels[:, 1:] != -100).sum()) for one in microbatches), 0.0
    for one in microbatches:
        logits, targets = rig.plain(input_ids=one.input_ids, use_cache=False).logits[:, :-1], one.labels[:, 1:]
        loss = own(logits[targets != -100], targets[targets != -100]) / num_targets
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    assert found.loss == pytest.approx(total, rel=1e-5)
    check_gradients(rig.plain, rig.store)


@pytest.mark.parametrize(("own", "found"), [(each, "[4]"), (a_number, "-?[0-9]"), (constant, "requires_grad False")])
def test_what_cannot_be_differentiated_is_refused(own: Callable[..., Any], found: str) -> None:
    rig = make_rig("llama")
    with pytest.raises(RefusedError, match=own.__name__) as caught:
        step_of_any_workers(rig, random_microbatches(SIZES), head_chunk_tokens=4, own_loss=own)
    assert caught.match(f"found: .*{found}".replace("[4]", r"\[4\]"))


# --- whole runs -----------------------------------------------------------------------------------------------------


def _trained(folder: Path, *runs: Mapping[str, Any]) -> list[FinetuneResult | tuple[int, str]]:
    """The result, or exit code and text of the error, of each run of a program; handlers and rights are as before."""
    os.chdir(folder)
    os.umask(0o022)
    done: list[FinetuneResult | tuple[int, str]] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for keywords in runs:
        try:
            done.append(finetune(**{"recipe": "recipe.yaml", **keywords}))
        except RoundpipeError as error:
            done.append((error.exit_code, str(error)))
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        assert os.umask(0o022) == 0o022
    return done


@pytest.fixture
def folder(tmp_path: Path, two_blocks: Path) -> Path:
    return make_workspace(tmp_path / "work", two_blocks, **STAGES_OF_TWO)


def test_file_mapping_and_command_give_the_same_run(folder: Path) -> None:
    mapping = yaml.safe_load((folder / "recipe.yaml").read_text())
    mapping |= {"output_dir": "again", "model": Path("model"), "datasets": ({"path": "${output_dir}.jsonl"},)}
    (folder / "again.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    overrides = {"output_dir": Path("out"), "lora": {"r": 4}, "lora.target_modules": ["q_proj", "v_proj"]}
    same = {"recipe": mapping, "overrides": {"lora.target_modules": ["q_proj", "v_proj"]}}
    one, other = forked(_trained, folder, {"overrides": overrides}, same)
    words = "output_dir=command", "lora.target_modules=[q_proj,v_proj]"
    run(folder, "finetune", "recipe.yaml", *words, "--no-dashboard").expect(0)
    assert_same_run(folder / "out", folder / "command")
    assert_same_run(folder / "again", folder / "command")
    assert isinstance(one, FinetuneResult) and isinstance(other, FinetuneResult)
    report = json.loads((folder / "out" / "report.json").read_text())
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert one.losses == other.losses == {row["step"]: row["loss"] for row in rows} and len(rows) == one.steps == 6
    assert (one.output_dir, one.first_loss, one.last_loss) == (Path("out"), one.losses[1], one.losses[6])
    assert (one.seconds, one.tokens_per_s) == (report["seconds"], report["measured"]["tokens_per_s"])
    assert one.bubble_ratio == report["measured"]["bubble_ratio"] and one.best_evaluation is None
    for name in ("recipe.yaml", "report.html"):
        mode = [(folder / place / name).stat().st_mode for place in ("out", "command")]
        assert mode[0] == mode[1], "the rights of new files are the command's"


def _heard(folder: Path, **keywords: Any) -> tuple[FinetuneResult, list[Event]]:
    os.chdir(folder)
    heard: list[Event] = []
    return finetune("recipe.yaml", on_event=heard.append, **keywords), heard


def test_evaluations_keep_cross_entropy_and_say_so(folder: Path) -> None:
    """At a rate that moves nothing, the training loss is doubled and the evaluation is not."""
    overrides = {"val_set_size": 2, "learning_rate": 1e-30, "max_steps": 2, "lora.dropout": 0.0}
    one, heard = forked(_with, _heard, folder, {"loss": cross_entropy, "overrides": overrides})
    two, _ = forked(_with, _heard, folder, {"loss": doubled, "overrides": {**overrides, "output_dir": "two"}})
    assert one.first_loss is not None and two.first_loss == pytest.approx(2 * one.first_loss, rel=1e-6)
    assert one.best_evaluation is not None and two.best_evaluation == one.best_evaluation
    said = [event.text for event in heard if isinstance(event, Notice)]
    assert f"{OWN}, which evaluations do not use: theirs is cross entropy" in said
    losses = {event.step: event.loss for event in heard if isinstance(event, StepFinished)}
    assert losses == one.losses and len(losses) == 2


def _with(function: Callable[..., Any], folder: Path, keywords: Mapping[str, Any]) -> Any:
    return function(folder, **keywords)


def test_a_resume_with_another_loss_is_refused_by_name(folder: Path) -> None:
    half, whole = {"max_steps": 2, "lr_scheduler_type": "constant"}, {"max_steps": 3, "lr_scheduler_type": "constant"}
    first, other, none, same, finished = forked(
        _trained,
        folder,
        {"overrides": half, "loss": focal},
        {"overrides": whole, "loss": smoothed, "resume": True},
        {"overrides": whole, "resume": True},
        {"overrides": whole, "loss": focal, "resume": True},
        {"overrides": whole, "loss": smoothed, "resume": True},
    )
    assert isinstance(first, FinetuneResult) and isinstance(same, FinetuneResult) and same.steps == 3
    for refused, now in ((other, '"tests.cli.test_from_python.smoothed"'), (none, "null"), (finished, "smoothed")):
        assert isinstance(refused, tuple) and refused[0] == 2
        assert "loss (function): changed since" in refused[1] and f"{now}" in refused[1], refused
        assert 'expected: "tests.cli.test_from_python.focal"' in refused[1]
    words = "max_steps=4", "lr_scheduler_type=constant"
    command = run(folder, "finetune", "recipe.yaml", *words, "--no-dashboard", "--resume").expect(2)
    assert "tests.cli.test_from_python.focal" in command.err
    run(folder, "finetune", "recipe.yaml", *words, "--resume", "--allow-changed", "loss").expect(0)


def _complain(event: Event) -> None:
    if isinstance(event, StepFinished):
        raise ValueError("no more of this")


ERRORS: list[tuple[Mapping[str, Any], int, str]] = [
    ({"resume": True}, 6, "no"),
    ({"overrides": {"lora.rr": 3}}, 2, "lora.rr"),
    ({"recipe": {"model": "model"}}, 2, "mapping: the key datasets is missing"),
    ({"recipe": {"model": "model", "seed": object()}}, 2, "object"),
    *(({"recipe": 3}, 2, "int"), ({"recipe": {"model": "\ud800"}}, 2, "mapping")),
    ({"recipe": "missing.yaml"}, 2, "missing.yaml"),
    ({"loss": focal, "overrides": {"label_smoothing_factor": 0.1}}, 2, "label_smoothing_factor: 0.1"),
    ({"loss": focal, "overrides": {"objective": "orpo"}}, 2, "objective: orpo"),
    ({"loss": 3}, 2, "no function with a name"),
    ({"on_event": _complain}, 1, "on_event failed: ValueError: no more of this"),
    ({"loss": each, "overrides": {"output_dir": "each"}}, 2, "each"),
    ({"loss": not_a_number, "overrides": {"output_dir": "nan"}}, 4, "not finite"),
]


def test_errors_carry_the_exit_code_of_the_command(folder: Path) -> None:
    found = forked(_trained, folder, *(keywords for keywords, _, _ in ERRORS))
    for one, (keywords, code, words) in zip(found, ERRORS, strict=True):
        assert isinstance(one, tuple) and one[0] == code and words in one[1], (keywords, one)


def test_a_loss_without_a_name_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(RefusedError, match="no function with a name"):
        finetune("recipe.yaml", loss=lambda logits, targets: logits.sum())


calls: list[int] = []


def interrupting(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy that interrupts its program within the second step."""
    calls.append(len(targets))
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return cross_entropy(logits, targets)


def test_ctrl_c_in_a_step_leaves_a_checkpoint(folder: Path) -> None:
    keywords = {"loss": interrupting}
    stopped, resumed = forked(_trained, folder, keywords, {**keywords, "resume": True})
    assert isinstance(stopped, tuple) and stopped[0] == 130
    assert stopped[1].startswith("stopped by SIGINT after step 2 of 6, with a checkpoint")
    (whole,) = forked(_trained, folder, {"loss": cross_entropy, "overrides": {"output_dir": "whole"}})
    assert isinstance(resumed, FinetuneResult) and isinstance(whole, FinetuneResult)
    assert resumed.losses == whole.losses and len(whole.losses) == 6


def _in_a_thread(folder: Path) -> list[FinetuneResult | tuple[int, str]]:
    done: list[FinetuneResult | tuple[int, str]] = []
    thread = threading.Thread(target=lambda: done.extend(_trained(folder, {"overrides": {"max_steps": 1}})))
    thread.start()
    thread.join()
    return done


def _planned_in_a_thread() -> PlanResult:
    recipe = {"model": "Qwen/Qwen3-0.6B", "method": "lora", "datasets": [{"path": "r.jsonl"}]}
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(plan, recipe, hardware="1x4090").result()


def test_another_thread_may_plan_and_not_train(folder: Path) -> None:
    (done,) = forked(_in_a_thread, folder)
    assert isinstance(done, tuple) and done[0] == 2 and "only in the main thread" in done[1]
    assert forked(_planned_in_a_thread).verdict == "FITS"


def _quiet_program() -> None:
    finetune("recipe.yaml", {"lora.rank": 4, "max_steps": 1})
    sys.exit()


def test_without_a_listener_notices_are_on_stderr_and_nothing_on_stdout(folder: Path) -> None:
    done = launch(folder, before=_quiet_program).finish().expect(0)
    assert not done.out and all(line.startswith("note: ") for line in done.err.splitlines()) and "rank" in done.err


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_is_that_of_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = plan("qwen3-8b", {"method": "full"}, hardware="1x4090,host_memory_gib=16")
    command = run(folder, "plan", "qwen3-8b", "method=full", "--hardware=1x4090,host_memory_gib=16", "--json")
    document = json.loads(command.expect(0).out)
    predicted = document["predicted"]
    assert isinstance(found, PlanResult) and found.verdict == "DOES NOT FIT" and not document["fits"]
    assert found.device_bytes == predicted["device_peak_bytes"]
    assert found.host_bytes == max(predicted["host_bytes"], predicted["loading_host_bytes"])
    assert (found.step_s, list(found.step_range_s)) == (predicted["step_s"], predicted["step_s_range"])
    assert (found.tokens_per_s, found.bubble_ratio) == (predicted["tokens_per_s"], predicted["bubble_ratio"])
    for name in ("forward_stages", "backward_stages"):
        assert [list(stage) for stage in getattr(found, name)] == document[name]
    assert found.remedies == tuple(change["what"] for change in document["remedies"])
    assert found.reasons and set(document["assumptions"]) <= set(found.notices)
    with pytest.raises(AttributeError, match="cannot assign"):
        found.verdict = "FITS"  # type: ignore[misc]


# --- the door itself ------------------------------------------------------------------------------------------------


def test_what_mypy_sees_of_the_package_is_what_programs_get() -> None:
    """Names that are imported under their own name again, as strict mode wants it, and the types of what users give."""
    tree = ast.parse(Path(roundpipe_cli.__file__).read_text(encoding="utf-8"))
    seen = [
        alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname
    ]
    assert all(alias.name == alias.asname and getattr(roundpipe_cli, alias.name) for alias in seen)
    assert sorted(alias.name for alias in seen) == ["FinetuneResult", "PlanResult", "finetune", "plan"]
    given = inspect.signature(finetune).parameters
    assert (given["loss"].annotation, given["on_event"].annotation) == ("TokenLoss | None", "Tell | None")
    assert given["recipe"].annotation == inspect.signature(plan).parameters["recipe"].annotation == "RecipeLike"
    assert PlanResult.__annotations__["step_range_s"] == "tuple[float, float]"
    assert FinetuneResult.__annotations__["losses"] == "Mapping[int, float | None]"
    assert FinetuneResult.__dataclass_params__.frozen and PlanResult.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_importing_is_cheap() -> None:
    done = python(
        "import sys, roundpipe_cli\n"
        "print([name for name in sys.modules if name.startswith('roundpipe_cli')])\n"
        "from roundpipe_cli import FinetuneResult, PlanResult, finetune, plan\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'omegaconf') if name in sys.modules])\n"
        "try:\n    roundpipe_cli.plans\nexcept AttributeError as error:\n    print(error)\n"
    )
    assert done.stdout.splitlines() == ["['roundpipe_cli']", "[]", "module 'roundpipe_cli' has no attribute 'plans'"], (
        done.stderr
    )
