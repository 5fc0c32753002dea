"""Parameters that stay in float32 in a model of 16 bit, as routers do, trained with the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from roundpipe_cli.engine.parity import prove
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.split import split_model
from tests.model.test_carried import VOCABULARY
from tests.support.e2e import finetune, make_tokenizer, make_workspace, numbers
from tests.support.every_type import tiny_config_of
from tests.support.tiny import Rig, make_rig, random_microbatches, schedule_for, write_new_weights

ROUTER = "model.layers.1.mlp.gate.weight"
BF16 = torch.bfloat16


def rig_of() -> Rig:
    return make_rig("ernie4_5_moe", dtype=BF16, config=tiny_config_of("ernie4_5_moe"))


def test_the_engine_trains_them_as_the_model_s_own_code_does() -> None:
    """Story: full fine-tuning of Ernie 4.5 in bfloat16 ended in an internal error, and so would DeepSeek's have with
    transformers 5.24: a layer's trainable parameters had one dtype."""
    skeleton = build_skeleton(tiny_config_of("ernie4_5_moe"), BF16)
    proof = prove(skeleton, split_model(skeleton))
    assert proof.unproven == "" and max(proof.loss_error, proof.gradient_error) < 1e-5


def test_an_update_keeps_all_their_digits() -> None:
    rig = rig_of()
    wide = {place.name for layout in rig.store.layouts for place in layout.wide}
    assert ROUTER in wide and all(rig.store.views[name].dtype == torch.float32 for name in wide)
    before = rig.store.views[ROUTER].clone()
    found = set()
    for num_workers, copy in ((1, False), (2, True), (3, False)):
        with rig.engine(num_workers, copy=copy) as engine:
            microbatches = random_microbatches([(2, 12), (1, 7), (2, 9)])
            result = engine.run_step(microbatches, schedule_for(rig, num_workers, len(microbatches)), step=0)
        found.add((result.loss, result.gradient_norm))
    assert len(found) == 1, "the bits depend on the number of workers"
    write_new_weights(rig)
    for name in rig.store.trainable_names:
        master, weights = rig.store.master(name), rig.store.views[name]
        assert torch.equal(weights, master if name in wide else master.to(BF16)), name
    assert not torch.equal(rig.store.master(ROUTER).to(BF16).float(), rig.store.master(ROUTER))
    assert not torch.equal(rig.store.views[ROUTER], before)


def test_a_run_resumes_with_them_and_saves_them_in_float32(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config: Any = tiny_config_of("ernie4_5_moe", vocab_size=VOCABULARY["vocab_size"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=BF16).save_pretrained(tmp_path / "made")
    make_tokenizer().save_pretrained(tmp_path / "made")
    work = make_workspace(tmp_path / "w", tmp_path / "made", method="full", dtype="bfloat16", learning_rate=1e-3)
    finetune(work, "max_steps=4", "output_dir=whole").expect(0)
    finetune(work, "max_steps=2").expect(0)
    finetune(work, "max_steps=4", "--resume").expect(0)
    rows = numbers(work / "whole")
    assert len(rows) == 4 and [row["loss_hex"] for row in rows] == [row["loss_hex"] for row in numbers(work / "out")]
    whole, resumed = (load_file(work / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(one, resumed[name]) for name, one in whole.items())
    base = load_file(work / "model" / "model.safetensors")
    assert whole[ROUTER].dtype == base[ROUTER].dtype == torch.float32
    assert not torch.equal(whole[ROUTER], base[ROUTER])
    assert not torch.equal(whole[ROUTER].to(BF16).float(), whole[ROUTER])
