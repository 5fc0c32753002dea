"""Rows and turns with weights: the step by plain PyTorch with full logits, any workers, and rows of other tools."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.engine.step import Microbatch, Part
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.head import HeadLoss, _scaled_loss
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from tests.data.test_data_columns import CHAT, SHAREGPT, USER, YO
from tests.data.test_data_dataset import byte_tokenizer, write_rows
from tests.support.e2e import STAGES, finetune, make_workspace, numbers
from tests.support.tiny import Rig, check_step, make_rig, random_microbatches, schedule_for

SIZES = [(4, 11), (1, 9), (2, 8)]


def weighed() -> list[Microbatch]:
    """Each token with a weight, 0.5 and 3 among them; the second microbatch has none."""
    generator = torch.Generator().manual_seed(5)
    made = random_microbatches(SIZES)
    draws: list[Any] = [
        torch.tensor([0.5, 1.0, 3.0])[torch.randint(3, one.labels.shape, generator=generator)] for one in made
    ]
    draws[1] = None
    return [replace(one, weights=draw) for one, draw in zip(made, draws, strict=True)]


def plain_loss(rig: Rig, microbatches: list[Microbatch], smoothing: float) -> float:
    """Sum of weights times cross entropy over all logits, divided by the sum of weights."""
    rig.plain.zero_grad(set_to_none=True)
    total, units = torch.zeros((), dtype=torch.float64), 0.0
    for one in microbatches:
        logits = rig.plain(input_ids=one.input_ids, use_cache=False).logits[:, :-1].double()
        labels = one.labels[:, 1:]
        losses = nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing
        )
        weights = torch.ones(labels.shape) if one.weights is None else one.weights[:, 1:]
        total = total + (losses * weights).sum()
        units += float(weights[labels != -100].sum())
    loss = total / units
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize(("method", "options"), [("lora", {}), ("full", {"label_smoothing": 0.1})])
def test_loss_and_gradients_are_those_of_full_logits(method: str, options: dict[str, Any]) -> None:
    rig = make_rig("llama", method)
    microbatches = weighed()
    expected = plain_loss(rig, microbatches, options.get("label_smoothing", 0.0))
    check_step(rig, expected, partial(step, rig, microbatches, **options))


def step(
    rig: Rig, microbatches: list[Microbatch], num_workers: int = 2, **options: Any
) -> tuple[str, list[torch.Tensor]]:
    with rig.engine(num_workers, head_chunk_tokens=5, **options) as engine:
        result = engine.run_step(microbatches, schedule_for(rig, num_workers, len(microbatches)), step=0)
    return result.loss.hex(), [gradient.clone() for gradient in rig.store.gradients]


def test_chunks_and_parts_of_a_step_add_up_to_it() -> None:
    """Chunks of a sequence, and the shares of two machines, divide by the weights of the whole step."""
    rig = make_rig("llama", "full")
    microbatches = weighed()
    whole, gradients = step(rig, microbatches)
    last = rig.num_layers - 1
    stages = {"forward_stages": [(0, last - 1)], "backward_stages": [(last, last), (0, last - 1)]}
    rounds = Rounds(2 * len(SIZES), sequence_chunks=2)
    chunks = build_schedule("roundpipe", num_workers=1, rounds=rounds, **stages)  # type: ignore[arg-type]
    units = sum(one.num_units for one in microbatches)
    assert units != sum(len((one.labels[:, 1:] != -100).nonzero()) for one in microbatches)
    with rig.engine(1, head_chunk_tokens=5) as engine:
        assert engine.run_step(microbatches, chunks, step=0).loss == pytest.approx(float.fromhex(whole), rel=1e-6)
        for mine, theirs in zip(rig.store.gradients, gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        parts = [(microbatches[:1], Part(0, units)), (microbatches[1:], Part(1, units))]
        losses = [engine.run_step(one, schedule_for(rig, 1, len(one)), step=0, part=part).loss for one, part in parts]
    assert sum(losses) == pytest.approx(float.fromhex(whole), rel=1e-6)


def test_losses_that_are_written_over_the_logits_have_the_same_weights() -> None:
    logits, targets = torch.randn(6, 40, generator=torch.Generator().manual_seed(2)), torch.arange(6)
    factors = torch.tensor([[0.5], [1], [3], [0.25], [1], [2]])
    kinds = [HeadLoss(0.3, 8, label_smoothing=0.1, in_place=in_place) for in_place in (False, True)]
    (loss, gradient), (other, written) = (_scaled_loss(logits.clone(), targets, kind, factors) for kind in kinds)
    assert float(loss) == pytest.approx(float(other), rel=1e-6)
    torch.testing.assert_close(gradient, written)
    with pytest.raises(RefusedError, match="takes no weights"):
        _scaled_loss(logits, targets, replace(kinds[0], own=lambda logits, targets: logits.sum()), factors)


def weights_of(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> list[list[float]]:
    """The weights of each row's trained tokens, each once."""
    spec = DatasetSpec(str(write_rows(tmp_path / "x.jsonl", rows)), **options)
    dataset = build_dataset(DataSettings((spec,), 1000), byte_tokenizer())
    return [sorted({1.0} if row.weights is None else set(row.weights.tolist()) - {0.0}) for row in dataset.rows]


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


FORMS: dict[str, tuple[dict[str, Any], list[float] | str]] = {
    "a row": ({"prompt": "Hi", "completion": "Yo", "weight": 0.5}, [0.5]),
    "its text": ({"prompt": "Hi", "completion": "Yo", "weight": "2.5"}, [2.5]),
    "a sample": ({"text": "Hi", "sample_weight": 3}, [3.0]),
    "null": ({"prompt": "Hi", "completion": "Yo", "weight": None}, [1.0]),
    "a chat": ({"messages": CHAT, "weight": 0.25}, [0.25]),
    "turns": ({"messages": [USER, said("a", weight=0.5), USER, said("b")]}, [0.5, 1.0]),
    "OpenAI": ({"messages": [USER, said("a", weight=0), USER, said("b", weight=1)]}, [1.0]),
    "axolotl, train": ({"messages": [USER, said("a", train=False), USER, said("b", train=True)]}, [1.0]),
    "axolotl, ShareGPT": ({"conversations": [SHAREGPT[0], {**SHAREGPT[1], "weight": 0.5}]}, [0.5]),
    "LLaMA-Factory, alpaca": ({"instruction": "Hi", "output": "Yo", "weight": 2}, [2.0]),
    "both": ({"messages": [USER, said("a", weight=0.5)], "weight": 3}, [1.5]),
    "a loss": ({"messages": [USER, said("a", loss=False), USER, {**YO, "loss_weight": 0.5}]}, [0.5]),
    "negative": ({"prompt": "Hi", "completion": "Yo", "weight": -1}, "no weight\n  found: -1"),
    "NaN": ({"prompt": "Hi", "completion": "Yo", "weight": math.nan}, "no weight\n  found: nan"),
    "a word": ({"prompt": "Hi", "completion": "Yo", "weight": "high"}, "`weight` is no weight"),
    "a list": ({"prompt": "Hi", "completion": "Yo", "weights": [1, 0.5]}, "how much the row counts"),
    "two columns": ({"prompt": "Hi", "completion": "Yo", "weight": 1, "loss_weight": 2}, "how much the row counts"),
    "a turn's": ({"messages": [USER, said("a", weight=-0.5)]}, "messages[1].weight` is no weight"),
    "all 0": ({"prompt": "Hi", "completion": "Yo", "weight": 0}, "no row is left"),
    "a turn's word": ({"messages": [USER, said("a", train="later")]}, "whether this turn is trained"),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_as_other_tools_write_them(tmp_path: Path, name: str) -> None:
    row, expected = FORMS[name]
    if isinstance(expected, list):
        assert weights_of(tmp_path, [row]) == [pytest.approx(expected)]
        return
    with pytest.raises(RefusedError) as caught:
        weights_of(tmp_path, [row])
    assert expected in str(caught.value) and (name == "all 0" or "x.jsonl:1" in str(caught.value))


def test_a_row_of_weight_0_is_left_out_and_a_column_can_be_named(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "Hi", "completion": "Yo", "w": weight} for weight in (1, 0, 2)]
    assert weights_of(tmp_path, rows, columns={"weight": "w"}) == [[1.0], [2.0]]


@pytest.mark.parametrize("words", [(), ("packing=true",), ("pipeline.sequence_chunks=2",), ("method=full",)], ids=str)
def test_equal_weights_train_as_none_and_resume_to_the_bit(tmp_path: Path, model: Path, words: tuple[str, ...]) -> None:
    """The loss is a weighted mean: 2 for all rows is as 1; other weights are another run, killed and resumed or not."""
    work = make_workspace(tmp_path / "work", model, **STAGES)
    rows = [{"prompt": f"Say {n}: ", "completion": f"{n} is said {'so ' * (n % 3)}"} for n in range(10)]
    found = {}
    for name, weights in {"none": (1, 1), "equal": (2, 2), "mixed": (0.5, 1.5)}.items():
        if words and name != "mixed":
            continue  # their means are those of microbatches as they are
        write_rows(work / "rows.jsonl", [{**row, "weight": weights[n % 2]} for n, row in enumerate(rows)])
        finetune(work, *words, "max_steps=3", f"output_dir={name}").expect(0)
        found[name] = numbers(work / name)
    if not words:
        assert found["none"] == found["equal"] != found["mixed"]
        return  # a resume reads rows as the others do
    killed = (*words, "max_steps=3", "save_steps=1", "output_dir=killed")
    assert finetune(work, *killed, "pipeline.devices=[cpu]", fault="optimizer:kill:step=2").code == -9
    finetune(work, *killed, "--resume").expect(0)
    assert numbers(work / "killed") == found["mixed"]
