"""What `plan` calls FITS on cards of 8, 12 and 24 GiB: whole runs in so much of this card's memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.train.measure import step_s_of_run, write_run
from roundpipe_cli.units import GIB
from scripts.gpu_checks.models import FAMILIES, configuration, shipped, tiny
from scripts.gpu_checks.place import Check, CheckPlace, Figures, SkippedCheckError, check, require

FORMS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "chunks": ({"pipeline": {"sequence_chunks": 4}, "mlp_chunk_tokens": 1024}, (8, 24)),
    "experts": ({}, (12, 24)),
    "4 bit": ({"load_in_4bit": True}, (8, 12)),
    "DPO": ({"objective": "dpo"}, (12, 24)),
    "full": ({"method": "full"}, (24,)),
}
"""Keys of the recipe, and GiB of the cards."""
TOKENS, ROWS, BLOCKS = {"tiny": 32, "full": 8192}, 8, 4


def checks(place: CheckPlace) -> Iterator[Check]:
    for form, (_, sizes) in FORMS.items():
        for gib in sizes:
            yield check(f"{form}, {gib} GiB", fits, place, form, gib)


def fits(place: CheckPlace, form: str, gib: int) -> Figures:
    """A run of as many tokens a microbatch as `plan` lets fit, with the memory of such a card."""
    if form == "4 bit":
        require("bitsandbytes")
    family = "qwen3_moe" if form == "experts" else "llama"
    figures = shipped(FAMILIES[family], num_hidden_layers=BLOCKS) if place.scale == "full" else tiny(family)
    keys = {"max_steps": 3, "save_steps": 3, **FORMS[form][0]}
    keys["pipeline"] = {"devices": [f"cuda:{place.first}"], **keys.get("pipeline", {})}
    if form not in ("chunks", "DPO"):
        keys["micro_batch_tokens"] = "auto"
    dtype = "bfloat16" if place.scale == "full" else "float32"
    with tempfile.TemporaryDirectory() as folder, place.devices():
        path, tokens = Path(folder) / "rows.jsonl", TOKENS[place.scale]
        if form == "DPO":
            keys["datasets"] = [{"path": str(path), "type": "preference"}]
        loaded = write_run(Path(folder), configuration(figures), dtype, rows=ROWS, tokens=tokens, **keys)
        if form == "DPO":
            pair = {"prompt": "one", "chosen": " word" * tokens, "rejected": " one" * tokens}
            path.write_text(f"{json.dumps(pair)}\n" * ROWS, encoding="utf-8")
        answer = make_plan(loaded, f"1xcustom:memory_gib={gib}:acc32_tflops=100,host_memory_gib=512")
        if not answer.verdict.fits:
            raise SkippedCheckError(f"plan: {answer.verdict.reasons[0]}")
        has = gib * GIB
        whole = torch.cuda.get_device_properties(place.first).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, has / whole), place.first)
        try:
            with patch.object(cuda, "memory_bytes", lambda index: has):
                step_s_of_run(answer.question.loaded)
            peak = torch.cuda.max_memory_reserved(place.first)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, place.first)
    assert peak <= has, f"{peak:,} bytes of {has:,}"
    return {"planned_bytes": answer.verdict.device.total_bytes, "reserved_bytes": peak}
