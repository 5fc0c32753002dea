"""Evaluation: the loss that plain PyTorch computes, held-out rows that are never trained on, and a run that a kill
between any two lines does not change."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.tokenized import held_out_positions, hold_out
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import EvaluationFinished, Event
from roundpipe_cli.schedule.builders import build_forward
from roundpipe_cli.train import evaluate
from roundpipe_cli.train.checkpoint.manifest import DamagedError, peek
from roundpipe_cli.train.checkpoint.output_dir import list_best, list_checkpoints
from roundpipe_cli.train.checkpoint.reading import load_newest
from roundpipe_cli.train.evaluate import Evaluator
from roundpipe_cli.train.intervals import is_due
from roundpipe_cli.train.loop import Trainer
from roundpipe_cli.train.result.finish import save_result, verify_best
from tests.support.e2e import (
    STAGES,
    Outcome,
    assert_same_run,
    finetune,
    launch,
    make_tokenizer,
    make_workspace,
    metrics,
    numbers,
    write_rows,
)
from tests.support.every_type import tiny_config_of
from tests.support.tiny import Rig, make_rig, plain_copy, random_microbatches
from tests.train.test_optimizer import run, trainer_of

SIZES = [(2, 12), (1, 7), (2, 9), (1, 12), (2, 5)]
EVALUATION = (
    *("val_set_size=3", "eval_steps=epoch", "save_steps=1", "load_best_model_at_end=true"),
    *("eval_samples=2", "eval_max_new_tokens=8"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Outcome]:
    """A run of `EVALUATION` that nothing disturbed, in `out`, and what it said."""
    folder = make_workspace(tmp_path_factory.mktemp("whole") / "work", model, **STAGES)
    return folder, finetune(folder, *EVALUATION).expect(0)


def evaluations(output_dir: Path) -> list[dict[str, Any]]:
    """The rows of eval.jsonl without what depends on the clock."""
    path = output_dir / "eval.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def plain_scores(plain: torch.nn.Module, microbatch: Microbatch) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss sum, log-probabilities of the targets, and of every token there in float64, by plain PyTorch."""
    with torch.no_grad():
        logits = plain.eval()(input_ids=microbatch.input_ids, use_cache=False).logits[:, :-1].float()
    labels = microbatch.labels[:, 1:]
    wanted = labels != -100
    picked = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][wanted]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return float(loss), picked, torch.log_softmax(logits.double(), -1)[wanted]


def score(rig: Rig, microbatches: list[Microbatch], num_workers: int = 2, cut: int = 2, **options: Any) -> list[Any]:
    last = rig.num_layers - 1
    stages = [(0, cut), (cut + 1, last)] if cut < last else [(0, last)]
    schedule = build_forward(stages, num_workers=num_workers, num_microbatches=len(microbatches))
    copy = options.pop("copy", False)
    with rig.engine(num_workers, copy=copy, seed=7, head_chunk_tokens=5) as engine:
        return engine.score(microbatches, schedule, step=0, **options)


@pytest.mark.parametrize(
    ("model_type", "method", "top_k", "changes"),
    [
        ("llama", "full", 1, {"attention_dropout": 0.5}),
        ("gpt2", "lora", 7, {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5, "lora_dropout": 0.5}),
        *(("qwen3_moe", "lora", 1, {}), ("gemma2", "full", 7, {})),
    ],
)
def test_scores_are_those_of_plain_pytorch(model_type: str, method: str, top_k: int, changes: dict[str, Any]) -> None:
    """Dropout is on in training and must not be felt here."""
    rig = make_rig(model_type, method, **changes)
    microbatches = random_microbatches(SIZES)
    for microbatch, scores in zip(microbatches, score(rig, microbatches, top_k=top_k), strict=True):
        loss, picked, every = plain_scores(rig.plain, microbatch)
        assert scores.loss_sum == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(scores.log_probabilities, picked, rtol=1e-5, atol=1e-5)
        values, ids = every.topk(top_k)
        assert torch.equal(scores.top_ids.long(), ids)
        torch.testing.assert_close(scores.top_log_probabilities.double(), values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores.mass_left.double(), 1 - values.exp().sum(-1), rtol=1e-5, atol=1e-6)


def test_scores_have_the_same_bits_for_any_workers_and_stages() -> None:
    rig = make_rig("llama", "lora")
    microbatches = random_microbatches(SIZES)
    want = [scores.loss_sum.hex() for scores in score(rig, microbatches, 1)]
    for num_workers, cut, copy in [(2, 0, False), (2, 2, True), (3, 3, False), (3, 1, True), (1, 4, True)]:
        assert [s.loss_sum.hex() for s in score(rig, microbatches, num_workers, cut, copy=copy)] == want


def test_adapters_switched_off_leave_the_base_model() -> None:
    rig = make_rig("qwen3_moe", "lora")
    microbatches = random_microbatches(SIZES)
    adapted = score(rig, microbatches)
    base = score(rig, microbatches, adapters=False)
    for name, view in rig.store.views.items():
        if ".lora_" in name:
            view.zero_()
    plain = plain_copy(rig.skeleton, rig.store)
    for microbatch, with_adapter, without in zip(microbatches, adapted, base, strict=True):
        assert without.loss_sum == pytest.approx(plain_scores(plain, microbatch)[0], rel=1e-6)
        assert abs(without.loss_sum - with_adapter.loss_sum) > 1e-3


def test_held_out_rows_are_a_function_of_the_seed() -> None:
    held = held_out_positions(1000, 0.1, 3)
    assert len(held) == 100 and len(set(held.tolist())) == 100 and held.tolist() == sorted(held.tolist())
    assert np.array_equal(held, held_out_positions(1000, 100, 3))
    assert not np.array_equal(held, held_out_positions(1000, 100, 4))
    assert len(held_out_positions(10, 0.01, 0)) == 1  # a fraction is rounded up
    assert held[:50].max() < held[50:].min() and abs(float(held.mean()) - 500) < 100  # from everywhere


def test_rows_are_held_out_or_trained_never_both(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 15)
    write_rows(tmp_path / "more.jsonl", 5)
    specs = tuple(DatasetSpec(str(tmp_path / name)) for name in ("rows.jsonl", "more.jsonl"))
    settings = DataSettings(specs, max_seq_length=64)
    dataset = build_dataset(settings, make_tokenizer())
    train, held = hold_out(dataset, 6, seed=1)
    assert sorted([*train.rows.row_ids.tolist(), *held.rows.row_ids.tolist()]) == list(range(20))
    for part in (train, held):
        for row in part.rows:
            whole = dataset.rows[row.row_id]
            assert np.array_equal(row.input_ids, whole.input_ids) and np.array_equal(row.labels, whole.labels)
            assert part.where(row.row_id) == dataset.where(row.row_id)
        from_first = int((part.rows.row_ids < 15).sum())
        assert part.rows_by_spec == (from_first, len(part.rows) - from_first)
    assert len({dataset.content_hash, train.content_hash, held.content_hash}) == 3
    with pytest.raises(RefusedError, match="none is left"):
        hold_out(dataset, 20, seed=1)


def test_a_run_writes_the_loss_that_plain_pytorch_computes(whole: tuple[Path, Outcome]) -> None:
    folder, done = whole
    out = folder / "out"
    rows = evaluations(out)
    assert [row["step"] for row in rows] == [2, 4]  # 7 rows left: 2 steps an epoch
    assert len(metrics(out)) == 4 and "evaluation: 3 rows, 7 to train on" in done.err
    assert all(float.fromhex(row["loss_hex"]) == row["loss"] for row in rows)
    assert all(row["perplexity"] == pytest.approx(math.exp(row["loss"])) for row in rows)
    assert [line.split()[0] for line in done.out.splitlines()] == ["step", "step", "eval", "step", "step", "eval"]
    assert "perplexity" in done.out
    dataset = build_dataset(
        DataSettings((DatasetSpec(str(folder / "rows.jsonl")),), max_seq_length=64),
        AutoTokenizer.from_pretrained(folder / "model"),
    )
    _, held = hold_out(dataset, 3, seed=42)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, out)
    total, tokens = 0.0, 0
    for row in held.rows:
        microbatch = Microbatch(torch.tensor(row.input_ids)[None].long(), torch.tensor(row.labels)[None].long())
        loss, picked, _ = plain_scores(plain, microbatch)
        total, tokens = total + loss, tokens + len(picked)
    assert rows[-1]["tokens"] == tokens and rows[-1]["loss"] == pytest.approx(total / tokens, rel=1e-6)
    report = json.loads((out / "report.json").read_text())["evaluation"]
    assert report["last_loss"] == rows[-1]["loss"] and report["best_loss"] == min(row["loss"] for row in rows)


def test_evaluation_datasets_and_held_out_rows_together(folder: Path, whole: tuple[Path, Outcome]) -> None:
    """At the end of the run, where nothing is said; when and on what changes nothing in the training."""
    write_rows(folder / "other.jsonl", 4)
    both = "eval_datasets=[{path: other.jsonl}, {path: 'rows.jsonl', split: 'train[:2]'}]"
    said = finetune(folder, both, "val_set_size=3", "save_steps=epoch").expect(0).err
    assert "evaluation: 2 rows of rows.jsonl are also in rows.jsonl: trained, too" in said
    (row,) = evaluations(folder / "out")
    assert row["step"] == 4 and row["tokens"] > evaluations(whole[0] / "out")[0]["tokens"]
    assert numbers(folder / "out") == numbers(whole[0] / "out")
    assert [step for step, _ in list_checkpoints(folder / "out")] == [4, 2]


@pytest.mark.parametrize(
    ("every", "num_steps", "due"),
    [
        *((3, 7, [3, 6]), (None, 7, []), (0.34, 10, [4, 8]), (1 / 3, 9, [3, 6, 9]), (0.001, 3, [1, 2, 3])),
        *((1 / 7, 70, [10, 20, 30, 40, 50, 60, 70]), ("epoch", 7, [3, 6])),
    ],
)
def test_intervals_by_steps_by_shares_and_by_epochs(every: Any, num_steps: int, due: list[int]) -> None:
    """Other tools save and evaluate per epoch or by a share of the steps; both were refused."""
    steps = range(1, num_steps + 1)
    assert [done for done in steps if is_due(every, done, num_steps, ends_epoch=done % 3 == 0)] == due


def test_the_best_weights_are_the_result(folder: Path) -> None:
    """Rows become less likely with every step of training."""
    rows = [{"prompt": "Z", "completion": "{[~]}#$%&@^" * 3}] * 2
    (folder / "unlike.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("eval_steps=2", "max_steps=4", "lr_scheduler_type=constant", "warmup_steps=0", "learning_rate=0.05")
    words = (*words, "eval_datasets=[{path: unlike.jsonl}]")
    words = (*words, "kernels=reference")  # at this rate rounding decides which evaluation is the best
    done = finetune(folder, *words, "load_best_model_at_end=true").expect(0)
    out = folder / "out"
    losses = {row["step"]: row["loss"] for row in evaluations(out)}
    best = min(losses, key=lambda step: losses[step])
    assert best < 4, losses
    assert [path.name for path in out.glob("best-*")] == [f"best-{best:08d}"]
    result = load_file(out / "adapter_model.safetensors")
    for step, is_result in ((best, True), (4, False)):
        masters = load_file(out / f"step-{step:08d}" / "masters.safetensors")
        saved = {f"base_model.model.{key.replace('.default.', '.')}": tensor for key, tensor in masters.items()}
        assert result.keys() == saved.keys()
        assert all(torch.equal(result[key], saved[key]) for key in saved) == is_result
    assert f"eval {best}/4" in done.out
    report = json.loads((out / "report.json").read_text())["evaluation"]
    assert (report["best_step"], report["result_is_best"]) == (best, True)


def evaluated(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, losses: list[float]) -> list[tuple[int, bool]]:
    """(step, whether it is the best so far) of a run's evaluations, whose losses are made up."""
    monkeypatch.setattr(Evaluator, "_loss", lambda self, done: (float(losses[done - 1]), 7, None))
    run(trainer)
    return [(row["step"], row["best"]) for row in evaluations(trainer.output_dir)]


@pytest.mark.parametrize(
    ("losses", "best", "num_steps"),
    [
        ([3, 4, 2, 5, 1, 6], [1, 3, 5], 6),  # worse, better, worse: counted from the best again
        ([2, 3, 1, 2, 1.5, 0.5], [1, 3], 5),  # better than the one before, not than the best
        ([3, 2, 2, 1, 1, 1], [1, 2, 4], 6),  # as good as the best is no better
    ],
)
def test_patience_counts_evaluations_since_the_best(
    losses: list[float], best: list[int], num_steps: int, tmp_path: Path, two_blocks: Path, monkeypatch: Any
) -> None:
    """With patience 2; also where the run is resumed between any two of them, and the best weights are the result."""
    words = ("val_set_size=3", "eval_steps=1", "early_stopping_patience=2", "load_best_model_at_end=true")
    words = (*words, "save_steps=1", "save_total_limit=9")
    name, told = "adapter_model.safetensors", list[Event]()
    if num_steps == 5:
        words, name = (*words, "method=full"), "model.safetensors"
    whole = trainer_of(tmp_path / "whole", two_blocks, *words, tell=told.append)
    want = [(step, step in best) for step in range(1, num_steps + 1)]
    assert evaluated(monkeypatch, whole, losses) == want
    report, stops = json.loads((whole.output_dir / "report.json").read_text()), num_steps < 6
    assert report["num_steps"] == num_steps and report["evaluation"]["stopped_early"] == (stops or best[-1] == 4)
    assert any("stopping early" in str(event) for event in told) == stops
    assert report["evaluation"]["best_step"] == best[-1] and report["evaluation"]["result_is_best"]
    result, kept = (folder / name for folder in (whole.output_dir, whole.output_dir / f"best-{best[-1]:08d}"))
    assert result.read_bytes() == kept.read_bytes()
    checkpoint = load_newest(whole.output_dir, whole.output_dir / "step-00000002")
    again = trainer_of(tmp_path / "again", two_blocks, *words, checkpoint=checkpoint)
    assert evaluated(monkeypatch, again, losses) == want


def test_the_best_of_other_rows_is_sought_anew(tmp_path: Path, two_blocks: Path, monkeypatch: Any) -> None:
    """Story: only another path was noticed; rows that were edited were compared with those before."""
    path, told = write_rows(tmp_path / "val.jsonl", 3), list[Event]()
    words = (f"eval_datasets=[{{path: {path}}}]", "eval_steps=1", "save_steps=1", "max_steps=2")
    first = trainer_of(tmp_path / "first", two_blocks, *words)
    assert evaluated(monkeypatch, first, [1, 2]) == [(1, True), (2, False)]
    write_rows(path, 4)
    checkpoint = load_newest(first.output_dir, first.output_dir / "step-00000001")
    again = trainer_of(tmp_path / "again", two_blocks, *words, checkpoint=checkpoint, tell=told.append)
    assert evaluated(monkeypatch, again, [1, 2]) == [(1, True), (2, True)]
    older = load_newest(first.output_dir, first.output_dir / "step-00000001")
    del older.meta["eval_hash"]  # of which only the recipe's `eval_datasets` are known
    before = trainer_of(tmp_path / "older", two_blocks, *words, checkpoint=older)
    assert evaluated(monkeypatch, before, [1, 2]) == [(1, True), (2, False)]
    assert any("the search for the best evaluation begins anew" in str(event) for event in told)


def test_best_weights_stay_until_the_checkpoint_that_names_them_is_replaced(
    tmp_path: Path, two_blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that checkpoint is still being written, and in no list: its state is asked before each evaluation."""
    found = []

    def tell(event: Event) -> None:
        if isinstance(event, EvaluationFinished):
            found.append([step for step, _ in list_best(tmp_path / "work" / "out")])

    words = ("val_set_size=3", "eval_steps=1", "load_best_model_at_end=true", "max_steps=3")
    trainer = trainer_of(tmp_path / "work", two_blocks, *words, tell=tell)
    monkeypatch.setattr(Evaluator, "_loss", lambda self, done: (len(self.state()) / done, 7, None))
    run(trainer)
    assert found == [[1], [2, 1], [3, 2]]


@pytest.fixture(scope="module")
def killed_in_export(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The results of a run that was killed in an evaluation, in a save and while it wrote its result, to copy."""
    folder = make_workspace(tmp_path_factory.mktemp("killed") / "work", model, **STAGES)
    words: tuple[str, ...] = EVALUATION
    for where in ("eval:kill:step=4", "ckpt_writer:kill:step=4", "export:kill"):
        assert finetune(folder, *words, fault=where).code == -9
        words = (*EVALUATION, "--resume")
        stated = [peek(path) for _, path in list_checkpoints(folder / "out")]
        wanted = {meta["evaluation"]["kept_step"] for meta in stated if meta is not None} - {None}
        assert wanted <= {step for step, _ in list_best(folder / "out")}, "of each checkpoint, not of the newest alone"
    assert wanted == {2, 4}
    return folder / "out"


def test_kills_change_nothing(folder: Path, whole: tuple[Path, Outcome], killed_in_export: Path) -> None:
    out, kept = Path(shutil.copytree(killed_in_export, folder / "out")), whole[0] / "out"
    finetune(folder, *EVALUATION, "--resume").expect(0)
    assert_same_run(out, kept)
    assert evaluations(out) == evaluations(kept)
    report, expected = (json.loads((base / "report.json").read_text()) for base in (out, kept))
    assert report["loss"] == expected["loss"] and report["measured"]["steps"] == 0, "of a run that had ended"
    files = [sorted(path.name for path in base.iterdir()) for base in (out, kept)]
    assert files[0] == files[1]


def test_a_signal_during_the_last_evaluation_puts_it_off(folder: Path, whole: tuple[Path, Outcome]) -> None:
    """The run is then not finished."""
    slow = {"ROUNDPIPE_FAULT": "eval:slow=1.2:step=4"}
    running = launch(folder, "finetune", "recipe.yaml", *EVALUATION, environment=slow)
    running.wait_until(lambda: "evaluating: the weights after step 4" in running.err)
    running.kill(signal.SIGTERM)
    assert running.finish().code == 143
    assert [row["step"] for row in evaluations(folder / "out")] == [2]
    assert "resuming after step 4" in finetune(folder, *EVALUATION, "--resume").expect(0).err
    assert evaluations(folder / "out") == evaluations(whole[0] / "out")
    assert numbers(folder / "out") == numbers(whole[0] / "out")


def test_samples_are_the_greedy_answers_of_generate(whole: tuple[Path, Outcome]) -> None:
    folder, done = whole
    samples = evaluations(folder / "out")[-1]["samples"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, folder / "out").eval()
    assert len(samples) == 2 and done.err.count("sample: ") == 2 * 2
    assert all(sample["prompt"].endswith("</s>[assistant] ") for sample in samples), "up to the first trained token"
    for sample in samples:
        ids = tokenizer(sample["prompt"], return_tensors="pt", add_special_tokens=False).input_ids
        output = plain.generate(input_ids=ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert sample["answer"] == tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def without_room() -> None:
    """No device has memory for answers beside its training, in a process that is started."""

    def refused(*_: object) -> None:
        raise torch.OutOfMemoryError

    evaluate.answering = refused  # type: ignore[assignment]


def test_samples_are_the_same_where_no_card_has_room_to_stream_them(folder: Path, whole: tuple[Path, Outcome]) -> None:
    done = launch(folder, "finetune", "recipe.yaml", *EVALUATION, before=without_room).finish().expect(0)
    assert done.err.count("a whole forward for each token") == 2
    assert [row["samples"] for row in evaluations(folder / "out")] == [
        row["samples"] for row in evaluations(whole[0] / "out")
    ]


def test_a_type_that_does_not_generate_is_trained_and_has_samples(tmp_path: Path, model: Path) -> None:
    """Story: transformers' `generate` of a type that we train may fail, here by a tensor without a place; a run did."""
    folder = make_workspace(tmp_path / "work", model)
    shutil.rmtree(folder / "model")
    AutoModelForCausalLM.from_config(tiny_config_of("camembert", vocab_size=300)).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    done = finetune(folder, "max_steps=1", "val_set_size=2", "eval_samples=2", "eval_max_new_tokens=3").expect(0)
    assert "the answers are not streamed (RuntimeError: " in done.err
    assert [len(row["samples"]) for row in evaluations(folder / "out")] == [2]


def test_best_weights_that_are_damaged_are_not_the_result(folder: Path, killed_in_export: Path) -> None:
    """Story: a flipped bit was in the result. At a resume the search begins anew; a result takes nothing of them."""
    out = Path(shutil.copytree(killed_in_export, folder / "out"))
    best = out / f"best-{evaluations(out)[-1]['step']:08d}"
    verify_best(best)
    data = bytearray((best / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (best / "adapter_model.safetensors").write_bytes(data)
    nothing: Any = None
    with pytest.raises(DamagedError, match=r"adapter_model.safetensors: found SHA-256"):
        save_result(nothing, out, best)
    assert not (out / "adapter_model.safetensors").exists() and not (out / ".tmp-result").exists()
    for name in ("adapter_model.safetensors", "."):
        odd = Path(shutil.copytree(out / best.name, folder / f"odd-{len(name)}")) / name
        shutil.rmtree(odd) if odd.is_dir() else odd.unlink()
        os.mkfifo(odd)
        with pytest.raises(DamagedError, match=r"a named pipe|no such folder"):  # once a list of Python's
            save_result(nothing, out, folder / f"odd-{len(name)}")
    gone = Path(shutil.copytree(out, folder / "gone"))
    shutil.rmtree(gone / best.name)
    assert "are gone" in finetune(folder, *EVALUATION, "output_dir=gone", "--resume").expect(0).err
    done = finetune(folder, *EVALUATION, "--resume").expect(0)
    assert f"the best weights so far, of step {int(best.name[5:])}, are damaged: " in done.err
    assert "adapter_model.safetensors: found SHA-256" in done.err and "the search begins anew" in done.err
    report = json.loads((out / "report.json").read_text())["evaluation"]
    assert report["best_step"] == int(best.name[5:]) == metrics(out)[-1]["step"] and report["result_is_best"] is True
    assert not list(out.glob("best-*")), "the weights after the last step, which had the best evaluation"


@pytest.mark.parametrize("stages", [[[0, 3]], [[0, 1], [2, 3]]])
def test_nan_in_a_pass_without_training_ends_the_run(folder: Path, stages: list[list[int]]) -> None:
    """Story: a stage that ends in the head lost a planted NaN. The first pass of step 2 is that of the evaluation."""
    words = (*EVALUATION, "eval_samples=0", "pipeline.devices=[cpu]", f"pipeline.forward_stages={stages}")
    done = finetune(folder, *words, fault="compute:nan:step=2:nth=1").expect(4)
    assert "the loss of the evaluation is not finite" in done.err and "after step 2" in done.err
