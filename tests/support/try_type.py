"""What roundpipe answers for a tiny model: full, LoRA, 4 bit, packing, sequences in chunks, plan's count."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.costs.find_model import find_config
from roundpipe_cli.engine.parity import ParityRefusedError, prove
from roundpipe_cli.errors import RoundpipeError
from roundpipe_cli.model.chunks import check_packing, check_sequence_chunks
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import LoraSettings, add_lora, refuse_adapters_outside_blocks
from roundpipe_cli.model.meta_counts import counts_of
from roundpipe_cli.model.split import ModelSplit, split_model
from roundpipe_cli.model.stored.packed_weights import check_packed, quantizable_names
from roundpipe_cli.planning.question import counted_architecture

LORA = LoraSettings(r=4, alpha=8)
YES = "yes"
COLUMNS = ("full", "lora", "4 bit", "packing", "chunks", "count")


def try_type(config: Any, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """For each column `yes`, with a remark behind it, or why not; what is no refusal begins with CRASH."""
    answers = dict.fromkeys(COLUMNS, "")
    try:
        model = build_skeleton(config, dtype)
    except RoundpipeError as error:
        return dict.fromkeys(COLUMNS, reason(error))
    answers["count"] = _answer(lambda: _count(model))
    found: list[ModelSplit] = []
    answers["full"] = _answer(lambda: found.append(split_model(model)))
    if not found:
        return {**answers, **dict.fromkeys(COLUMNS[1:5], answers["full"])}
    split = found[0]
    answers["full"] = _answer(lambda: _proven(model, split))
    answers["packing"] = _answer(lambda: _packs(model, split))
    answers["chunks"] = _answer(lambda: _in_chunks(model, split))
    adapted = build_skeleton(config, dtype)
    answers["lora"] = _answer(lambda: _lora(adapted, split))
    answers["4 bit"] = _answer(lambda: _packed(adapted, split)) if answers["lora"].startswith(YES) else answers["lora"]
    return answers


def reason(error: RoundpipeError) -> str:
    """One line of an error: what, where, found."""
    problem = error.problems[0]
    parts = (problem.what, problem.where and f"({problem.where})", problem.found and f"- {problem.found}")
    return " ".join(part for part in parts if part)


def _answer(run: Callable[[], str | None]) -> str:
    try:
        remark = run()
    except RoundpipeError as error:
        return reason(error)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"CRASH {type(error).__name__}: {str(error)[:200]} at {Path(last.filename).name}:{last.lineno}"
    return f"{YES}: {remark}" if remark else YES


def _proven(model: nn.Module, split: ModelSplit, **ways: bool) -> str | None:
    """The largest error with `kernels: reference` and with `kernels: auto`, which a run leaves where that is wrong."""
    proofs, remark = [prove(model, split, **ways)], ""
    try:
        proofs.append(prove(model, split, **ways, fused=True))
    except ParityRefusedError as error:
        remark = f", not fused: {error.problems[0].found}"
    unproven = next((proof.unproven for proof in proofs if proof.unproven), None)
    if unproven:
        return f"UNPROVEN {unproven}"
    return f"{max(max(proof.loss_error, proof.gradient_error) for proof in proofs):.1e}{remark}"


def _packs(model: nn.Module, split: ModelSplit) -> str | None:
    check_packing(model, split, max_seq_length=64, micro_batch_size=1)
    return _proven(model, split, packing=True)


def _in_chunks(model: nn.Module, split: ModelSplit) -> str | None:
    check_sequence_chunks(model, split, max_seq_length=64)
    return _proven(model, split, chunks=True)


def _lora(model: nn.Module, split: ModelSplit) -> str | None:
    add_lora(model, LORA, dtype=torch.float32, base_name="tiny", blocks_path=split.blocks_path)
    refuse_adapters_outside_blocks(model, split.blocks_path)
    return _proven(model, split)


def _packed(model: nn.Module, split: ModelSplit) -> str | None:
    return check_packed(model, split.blocks_path, quantizable_names(model, split.blocks_path), "4bit")


def _count(model: nn.Module) -> str | None:
    """Plan's count, which is made as `plan` makes it, against the model's."""
    config: Any = model.config
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(config.to_json_string())
        planned = counted_architecture(find_config(name, folder), lambda found: counts_of(folder, config.model_type))
    count = sum(parameter.numel() for parameter in model.parameters())
    if planned.parameters == count:
        return "told as a guess" if planned.is_guess else None
    return f"WRONG: {planned.parameters} in place of {count}"
