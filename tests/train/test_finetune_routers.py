"""Runs that train the routers' balancing loss: `output_router_logits: true` in the model's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.e2e import finetune, make_model, make_workspace, metrics, numbers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return make_model(folder, "qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)


def test_a_run_trains_it_and_resumes_to_the_bit(tmp_path: Path, model: Path) -> None:
    whole, parted = (
        make_workspace(tmp_path / name, model, method="full", lora=None, learning_rate=1e-3, val_set_size=2)
        for name in ("whole", "parted")
    )
    told = finetune(whole).expect(0)
    assert "balancing loss is trained with its router_aux_loss_coef 0.5" in told.out + told.err
    crash = {"ROUNDPIPE_FAULT": "optimizer:kill:step=3"}
    assert finetune(parted, environment=crash).code < 0
    finetune(parted, "--resume", "pipeline.devices=[cpu]").expect(0)
    assert numbers(parted / "out") == numbers(whole / "out")
    config = json.loads((whole / "out" / "config.json").read_text())
    assert config["output_router_logits"] is True and config["router_aux_loss_coef"] == 0.5
    assert not [key for key in config if "trains" in key]
    loaded = AutoModelForCausalLM.from_pretrained(whole / "out")
    output = loaded(input_ids=torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None])
    assert float(output.aux_loss.detach()) > 0


def test_its_coefficient_shows_in_the_loss_of_training_and_not_in_that_of_evaluation(
    tmp_path: Path, model: Path
) -> None:
    losses, evaluations = [], []
    for name, coefficient in (("with", 0.5), ("without", 0.0)):
        folder = make_workspace(tmp_path / name, model, lora__dropout=0.0, learning_rate=1e-12, val_set_size=2)
        path = folder / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"router_aux_loss_coef": coefficient}))
        finetune(folder, "max_steps=1").expect(0)
        losses.append(metrics(folder / "out")[0]["loss"])
        rows = (folder / "out" / "eval.jsonl").read_text().splitlines()
        evaluations.append(json.loads(rows[-1])["loss"])
    assert losses[0] > losses[1] + 0.4, "balanced routers have a loss of their number of chosen experts"
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-6)
