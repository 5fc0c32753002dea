"""Preference pairs: loss and gradients by the papers' equations, the same bits on any number of workers, and runs whose
margins grow."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from roundpipe_cli.choices import OBJECTIVES
from roundpipe_cli.data.tokenized import Row
from roundpipe_cli.engine.engine import Engine
from roundpipe_cli.engine.step import Microbatch
from roundpipe_cli.engine.weights import REFERENCE
from roundpipe_cli.events import Tell
from roundpipe_cli.kernels.cross_entropy import cross_entropy
from roundpipe_cli.model.sequence_loss import SEQUENCE_LOSSES, Preference
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.schedule.builders import build_forward
from roundpipe_cli.train.preference import make_scored, with_nll, with_prompts
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.prepare.steps import rows_of_steps
from tests.support.adapters import random_adapter
from tests.support.e2e import STAGES, finetune, make_workspace, metrics, numbers, run
from tests.support.tiny import make_rig, random_microbatches, schedule_for
from tests.train.test_distillation import step

BETA = 0.3
SIZES = [(4, 11), (2, 9), (4, 7)]
LOSSES: dict[str, tuple[Preference, float]] = {
    "dpo": (Preference("dpo", BETA), 0.0),
    "dpo, smoothed": (Preference("dpo", BETA, label_smoothing=0.1), 0.0),
    "ipo": (Preference("ipo", BETA), 0.0),
    "orpo by answer": (Preference("orpo", BETA), 1.0),
    "orpo, nll on prompts": (Preference("orpo", BETA), 1.0),
    "simpo": (Preference("simpo", 2.5, simpo_gamma=0.8), 0.0),
    "kto": (Preference("kto", BETA, desirable_weight=0.8, undesirable_weight=1.4), 0.0),
    "kto, one side": (Preference("kto", BETA, num_chosen=0), 0.0),
    "simpo, smoothed, with nll": (Preference("simpo", 2.5, label_smoothing=0.1, simpo_gamma=0.8), 0.7),
}
"""A loss without what depends on the rows, and its `cpo_alpha`; ORPO's is 1 by definition."""


def pairs(name: str = "dpo") -> list[Microbatch]:
    """Microbatches of 2, 1 and 2 pairs, DPO's with made-up reference log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    loss, nll_factor = LOSSES[name]
    made = []
    for microbatch in random_microbatches(SIZES):
        reference = -30 + torch.randn(len(microbatch.labels), generator=generator, dtype=torch.float64)
        preference = replace(loss, reference=reference if OBJECTIVES[loss.objective].needs_reference else None)
        if name.startswith("kto"):  # 1 of 4 wanted, then 1 of 2, then 1 of 4; or none
            given = 1 if loss.num_chosen is None else 0
            preference = replace(preference, num_chosen=given, kl=torch.tensor(0.3, dtype=torch.float64))
        microbatch = replace(microbatch, preference=preference)
        if "prompts" in name:
            lengths = (microbatch.input_ids != 0).sum(dim=1)[: len(microbatch.labels) // 2]
            ids = [row[:length].numpy() for row, length in zip(microbatch.input_ids, lengths, strict=False)]
            microbatch = with_prompts(microbatch, [Row(0, tokens, tokens) for tokens in ids])
        made.append(microbatch)
    return with_nll(made, nll_factor, by_answer="by answer" in name) if nll_factor else made


def plain_loss(plain: nn.Module, microbatches: list[Microbatch], name: str) -> float:
    """The step's loss by the papers' equations in float64, its gradients left in `.grad`.

    DPO: equation 7 of arXiv 2305.18290; IPO: 17 of 2310.12036, by means; SimPO: 6 of 2405.14734; ORPO: 4, 6 and 7 of
    2403.07691; KTO: 7 and 8 of 2402.01306.
    """
    plain.zero_grad(set_to_none=True)
    losses, nlls, counts_of_nll = [], [], []
    for microbatch in microbatches:
        preference, labels = microbatch.preference, microbatch.labels[:, 1:]
        assert preference is not None
        answers = labels if preference.is_answer is None else labels.where(preference.is_answer[:, 1:], -100)
        logits = plain(input_ids=microbatch.input_ids, use_cache=False).logits[:, :-1]
        picked = torch.log_softmax(logits.double(), -1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        side = len(labels) // 2 if preference.num_chosen is None else preference.num_chosen
        chosen, rejected = (picked * (answers != -100)).sum(-1).tensor_split([side])
        if preference.reference is not None:
            ref_chosen, ref_rejected = preference.reference.tensor_split([side])
            chosen, rejected = chosen - ref_chosen, rejected - ref_rejected
        if OBJECTIVES[preference.objective].averages:
            counts = (answers != -100).sum(-1).chunk(2)
            chosen, rejected = chosen / counts[0], rejected / counts[1]
        nlls.append(-(picked * (labels != -100)).sum(-1)[: len(chosen)])
        counts_of_nll.append((labels != -100).sum(-1)[: len(chosen)])
        kind = OBJECTIVES[preference.objective].loss
        if kind == "odds_ratio":
            odds = [x.exp() / (1 - x.exp()) for x in (chosen, rejected)]
            losses.append(-preference.beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
            continue
        if kind == "kto":
            assert preference.kl is not None
            losses.append(preference.desirable_weight * (1 - torch.sigmoid(BETA * (chosen - preference.kl))))
            losses.append(preference.undesirable_weight * (1 - torch.sigmoid(BETA * (preference.kl - rejected))))
            continue
        if kind == "squared":
            losses.append((chosen - rejected - 1 / (2 * preference.beta)) ** 2)
            continue
        z = preference.beta * (chosen - rejected) - preference.simpo_gamma
        losses.append(-(1 - preference.label_smoothing) * logsigmoid(z) - preference.label_smoothing * logsigmoid(-z))
    nll, count = torch.cat(nlls), torch.cat(counts_of_nll)
    mean = (nll / count).mean() if "by answer" in name else nll.sum() / count.sum().clamp(min=1)
    loss = torch.cat(losses).mean() + LOSSES[name][1] * mean
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize(
    ("model_type", "method", "name"),
    [
        *(("llama", "lora", name) for name in ("dpo", "ipo", "orpo by answer", "simpo", "kto", "kto, one side")),
        *(("qwen2", "full", name) for name in ("dpo, smoothed", "simpo, smoothed, with nll")),
        ("gemma2", "lora", "orpo, nll on prompts"),
    ],
)
def test_loss_and_gradients_are_those_of_the_papers_equations(model_type: str, method: str, name: str) -> None:
    """The reference of a comparison never computes with the code under test."""
    rig = make_rig(model_type, method)
    microbatches = pairs(name)
    expected = plain_loss(rig.plain, microbatches, name)
    loss, _ = step(rig, microbatches)
    assert float.fromhex(loss) == pytest.approx(expected, rel=1e-5)
    gradients = {name: p.grad for name, p in rig.plain.named_parameters() if p.requires_grad}
    scale = max(float(g.norm()) for g in gradients.values() if g is not None)
    for parameter, gradient in gradients.items():
        assert gradient is not None
        difference = float((rig.store.gradient(parameter) - gradient).norm())
        assert difference <= 1e-5 * float(gradient.norm()) + 1e-6 * scale, parameter


@pytest.mark.parametrize("name", ["dpo", "orpo, nll on prompts", "kto"])
def test_the_same_bits_for_any_number_of_workers(name: str) -> None:
    rig = make_rig("llama", "lora", lora_dropout=0.2)
    want_loss, want = step(rig, pairs(name), 1, seed=4)
    for num_workers, copy in [(2, False), (3, False), (2, True)]:
        loss, gradients = step(rig, pairs(name), num_workers, seed=4, copy=copy)
        assert loss == want_loss and all(torch.equal(a, b) for a, b in zip(gradients, want, strict=True))


@pytest.mark.parametrize("copy", [False, True])
def test_weights_that_were_put_aside_can_be_scored(copy: bool) -> None:
    """DPO's reference, beside weights that have changed, on devices that read host memory and that keep copies."""
    rig = make_rig("llama", "lora")
    microbatches = random_microbatches(SIZES)
    schedule = build_forward([(0, 2), (3, rig.num_layers - 1)], num_workers=2, num_microbatches=len(SIZES))

    def sums(engine: Engine, **options: Any) -> torch.Tensor:
        return torch.cat([one.sequence_sums for one in engine.score(microbatches, schedule, step=0, **options)])

    with rig.engine(2, copy=copy, weight_cache_bytes=10**8 if copy else 0) as engine:
        before = sums(engine)
        rig.store.keep_reference()
        engine.run_step(microbatches, schedule_for(rig, 2, len(SIZES)), step=0)
        for name in rig.store.trainable_names:
            rig.store.set_parameter(name, rig.store.master(name) + 0.1)
        after = sums(engine)
        assert torch.equal(sums(engine, version=REFERENCE), before) and not torch.allclose(after, before)
        assert torch.equal(sums(engine), after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_16_bit_logits_are_exact(dtype: torch.dtype, smoothing: float) -> None:
    """Only the logits are rounded: a softmax in 16 bit is off by 1 in 200."""
    logits = (4 * torch.randn(20, 300, generator=torch.Generator().manual_seed(1))).to(dtype)
    targets = torch.arange(20) * 7
    exact = logits.double().requires_grad_()
    expected = nn.functional.cross_entropy(exact, targets, reduction="sum", label_smoothing=smoothing)
    expected.backward()
    (picked, every), gradient = cross_entropy(logits, targets, smoothing)
    assert float((1 - smoothing) * picked.sum() + smoothing * every.sum()) == pytest.approx(
        float(expected.detach()), rel=1e-6
    )
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-5, atol=1e-7)


def test_an_answer_of_probability_1_has_a_finite_loss() -> None:
    """Its odds are infinite, and so is the slope of TRL's formula; float32's log softmax rounds to 0 long before."""
    for policy in ([0.0, -3.0], [-3.0, 0.0], [0.0, 0.0], [-1e-9, -80.0]):
        scores = torch.tensor(policy, dtype=torch.float64)
        loss, slopes = SEQUENCE_LOSSES["odds_ratio"](scores, Preference("orpo", 0.1))
        assert loss.isfinite() and slopes.isfinite().all(), policy


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    work = make_workspace(tmp_path / "work", model, objective="dpo", learning_rate=2.0e-2, **STAGES)
    rows = [
        {"prompt": f"Count to {n}: ", "chosen": f"yes {n} {'ab' * (n % 4)}", "rejected": f"never {'z' * (n % 3)}"}
        for n in range(10)
    ]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return work


def setup_of(folder: Path, *words: str, tell: Tell = lambda event: None) -> Setup:
    return prepare(load_recipe(str(folder / "recipe.yaml"), words), offline=True, tell=tell)


def test_the_reference_of_a_continued_adapter_is_that_adapter(folder: Path) -> None:
    """Story: the bare base was the reference. It differs by whole tables, and by what PiSSA takes out of others."""
    other_base = {"modules_to_save": ["embed_tokens", "lm_head"], "init_lora_weights": "pissa"}
    random_adapter(folder / "model", folder / "first", target_modules="all-linear", **other_base)
    words = ("lora.start_from=first", "lora.dropout=0", "eval_datasets=[{path: rows.jsonl}]", "eval_steps=6")
    done = finetune(folder, *words).expect(0)
    said = f"reference model of dpo: model with the adapter {folder / 'first'} as it is, which is trained further"
    assert said in " ".join(done.err.split()), done.err
    rows = metrics(folder / "out")
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-4) and abs(rows[0]["reward_margin"]) < 1e-4
    assert rows[-1]["reward_margin"] > 0.05
    # The library alone: log-probabilities of the result against those of the adapter with which training began.
    evaluated = [json.loads(line) for line in (folder / "out" / "eval.jsonl").read_text().splitlines()]
    setup = setup_of(folder, *words)
    pairs_of = make_scored(setup, [[(index,)] for index in range(10)])[0]
    sums = []
    for name in ("out", "first"):
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(folder / name)).eval()
        sums.append([sequence_sums(model, microbatch) for microbatch in pairs_of])
    gains = torch.stack([torch.cat(one) for one in sums])
    rewards = 0.1 * (gains[0] - gains[1]).view(-1, 2)
    assert evaluated[-1]["reward_margin"] == pytest.approx(float((rewards[:, 0] - rewards[:, 1]).mean()), rel=1e-3)


def sequence_sums(model: Any, microbatch: Microbatch) -> torch.Tensor:
    """Log-probability of each sequence's targets, by the library."""
    with torch.no_grad():
        logits = model(input_ids=microbatch.input_ids, use_cache=False).logits[:, :-1].double()
    labels = microbatch.labels[:, 1:]
    picked = torch.log_softmax(logits, -1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return (picked * (labels != -100)).sum(-1)


def test_a_resume_keeps_the_reference(folder: Path) -> None:
    """Also on other workers, which take copies of the weights; another adapter in its place is refused."""
    random_adapter(folder / "model", folder / "first", target_modules="all-linear")
    words = ("lora.start_from=first", "max_steps=4", "save_steps=1")
    finetune(folder, *words).expect(0)
    three = "pipeline.devices=[cpu, cpu, cpu]"
    assert finetune(folder, *words, three, "output_dir=killed", fault="optimizer:kill:step=2").code == -9
    (folder / "first").rename(folder / "kept")
    random_adapter(folder / "model", folder / "first", target_modules="all-linear", init_lora_weights=False)
    done = finetune(folder, *words, "output_dir=killed", "--resume").expect(2)
    assert "lora.start_from (files): changed since the checkpoint was written" in done.err
    shutil.rmtree(folder / "first")
    (folder / "kept").rename(folder / "first")
    done = finetune(folder, *words, "output_dir=killed", "--resume").expect(0)
    assert "reference model of dpo" in done.err
    assert numbers(folder / "killed") == numbers(folder / "out")


@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_a_run_without_a_reference_model(folder: Path, objective: str) -> None:
    done = finetune(folder, f"objective={objective}", "num_train_epochs=3").expect(0)
    rows = metrics(folder / "out")
    assert f"margin {rows[-1]['reward_margin']:.3f}" in done.out.splitlines()[-1]
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["reward_accuracy"] == 1.0
    assert rows[-1]["reward_margin"] > rows[0]["reward_margin"] + (0.02 if objective == "orpo" else 1.0)
    assert "reference model" not in done.err
    assert ("nll_loss" in rows[0]) is ("orpo.nll_on_prompt" in done.err) is (objective == "orpo")


@pytest.mark.parametrize(
    "words", [("objective=dpo", "micro_batch_tokens=256"), ("objective=orpo", "orpo.nll_on_prompt=false")], ids=" ".join
)
def test_an_evaluation_of_pairs_is_what_the_next_step_computes(folder: Path, words: tuple[str, ...]) -> None:
    """Where a step has all pairs, the loss and the rewards after it are those that the next step begins with."""
    every = ("gradient_accumulation_steps=5", "micro_batch_size=2", "lora.dropout=0", "num_train_epochs=3")
    evaluation = ("eval_datasets=[{path: rows.jsonl, type: preference}]", "eval_steps=1", "load_best_model_at_end=true")
    samples = ("eval_samples=1", "eval_max_new_tokens=2", "shuffle=false")
    done = finetune(folder, *words, *every, *evaluation, *samples).expect(0)
    assert "evaluation: 10 preference pairs, 10 to train on" in done.err
    assert "  margin " in done.out and "perplexity" not in done.out
    rows = metrics(folder / "out")
    if "objective=dpo" in words:
        assert "reference model of dpo: model, without the adapter that is trained" in " ".join(done.err.split())
        assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-4) and abs(rows[0]["reward_margin"]) < 1e-4
        assert rows[-1]["reward_accuracy"] == 1.0 and rows[-1]["loss"] < rows[0]["loss"]
    evaluated = [json.loads(line) for line in (folder / "out" / "eval.jsonl").read_text().splitlines()]
    assert len(rows) == len(evaluated) == 3
    names = ("loss", "rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")
    for row, found in zip(rows[1:], evaluated, strict=False):
        assert [found[name] for name in names] == pytest.approx([row[name] for name in names], rel=1e-5, abs=1e-6)
        assert found.get("nll_loss") == (pytest.approx(row["nll_loss"], rel=1e-5) if "nll_loss" in row else None)
        assert "perplexity" not in found and found["samples"]
    assert json.loads((folder / "out" / "report.json").read_text())["evaluation"]["rows"] == 10


def test_pairs_are_held_out_whole(folder: Path) -> None:
    words, told = ("val_set_size=3", "eval_steps=1", "early_stopping_patience=5"), list[str]()
    words += ("eval_datasets=[{path: rows.jsonl}]",)
    setup = setup_of(folder, *words, tell=lambda event: told.append(str(event)))
    assert any("evaluation: 13 preference pairs, 7 to train on" in text for text in told)
    kept = [row.row_id for row in setup.dataset.rows]
    held = [row.row_id for row in setup.eval_rows]
    assert kept == [row.row_id for row in setup.dataset.sides[1]] and held[:13] == held[13:]
    assert sorted(kept + held[:3]) == list(range(10))
    assert setup_of(folder).dataset.content_hash != setup.dataset.content_hash


@pytest.mark.parametrize("longer", ["chosen", "rejected"])
def test_microbatches_keep_to_the_budget_whichever_answer_is_longer(folder: Path, longer: str) -> None:
    rows = [{"prompt": "Go ", "chosen": "a", "rejected": "b", longer: "c" * (1 + 5 * n)} for n in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    setup = setup_of(folder, "micro_batch_tokens=256", "gradient_accumulation_steps=5")
    microbatches, _ = make_scored(setup, rows_of_steps(setup.recipe, setup.dataset).next_step())
    assert len(microbatches) > 2 and all(one.input_ids.numel() <= 256 for one in microbatches)


def test_data_shows_the_labels_that_are_trained(folder: Path) -> None:
    """`data` once failed on pairs, or showed another reading of them than training had."""
    document = json.loads(run(folder, "data", "recipe.yaml", "--json").expect(0).out)
    setup = setup_of(folder)
    (microbatch,), _ = make_scored(setup, [[[index] for index in range(10)]])
    assert (document["pairs"], document["packing"]) == (10, None)
    assert document["content_hash"] == setup.dataset.content_hash
    assert [sample["answer"] for sample in document["samples"]] == ["chosen", "rejected"] * 3
    for sample in document["samples"]:
        place = sample["row_id"] + (10 if sample["answer"] == "rejected" else 0)
        for name, values in (("labels", microbatch.labels), ("input_ids", microbatch.input_ids)):
            assert sample[name] == values[place, : len(sample["labels"])].tolist()
        trained = "".join(piece["text"] for piece in sample["pieces"] if piece["trained"])
        assert trained.startswith("yes" if sample["answer"] == "chosen" else "never")
