"""Ten steps of supervised fine-tuning against TRL's SFTTrainer: losses, gradient norms, labels; float32.

    python scripts/trl_steps.py                     a random Llama of 4 layers, LoRA and full
    python scripts/trl_steps.py --model SOURCE --rows 20 --only lora
    python scripts/trl_steps.py --times             seconds of a full step of SmolLM2-135M in bfloat16, in turn

Prompt and completion, weight decay, clipping and a linear schedule, for both the same; the adapters start alike. The
tokenizer has no chat template: with one, plain prompts become chats here, in TRL they do not. TRL is installed as
`trl_losses.py` installs it. Each trainer reads the rows by its own tokenizing and collating; the table's second column
says in how many of them tokens and labels are equal.

Exits 1 where a row's tokens or labels differ, a loss by more than `--loss` or a gradient norm by more than `--norm`,
relative to TRL's.

`--times`: 4 microbatches of 2 full rows of 256 tokens, with gradient checkpointing and AdamW in both, on two cores:
this program's two one-thread CPU workers, which keep float32 masters, and two forms of TRL's trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from trl_losses import RANK, ROOT, enter_venv, make_model

STEPS, ROWS_PER_MICROBATCH, MICROBATCHES = 10, 2, 2
RATE, DECAY, CLIP = 1e-3, 0.1, 1.0
TIMED_STEPS, TIMED_MICROBATCHES, TIMED_TOKENS = 6, 4, 256


def write_rows(path: Path, num_rows: int) -> list[dict[str, str]]:
    """Prompts with the chosen answers of the shipped pairs."""
    pairs = [json.loads(line) for line in (ROOT / "recipes" / "preferences.jsonl").read_text("utf-8").splitlines()]
    rows = [{"prompt": pair["prompt"], "completion": " " + pair["chosen"]} for pair in pairs[:num_rows]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def trainer_of(
    base: Path,
    rows: list[dict[str, str]],
    method: str,
    folder: Path,
    *,
    steps: int = STEPS,
    dtype: str = "float32",
    **others: Any,
) -> Any:
    """TRL's trainer, which keeps the loss of each step in `losses`, and when its steps ended in `ended_s`.

    Args:
        others: of its arguments, in place of those of the comparison.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    class Recorded(SFTTrainer):  # type: ignore[misc, valid-type]
        losses: list[float] = []
        ended_s: list[float] = []

        def log(self, *args: Any, **kwargs: Any) -> None:
            self.ended_s.append(time.monotonic())
            super().log(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.losses.append(float(loss))
            return loss

    make = partial(
        SFTConfig,
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        max_steps=steps, per_device_train_batch_size=ROWS_PER_MICROBATCH, gradient_accumulation_steps=MICROBATCHES,
        learning_rate=RATE, lr_scheduler_type="linear", warmup_steps=0, weight_decay=DECAY, max_grad_norm=CLIP,
        logging_steps=1, save_strategy="no", train_sampling_strategy="sequential", max_length=512, disable_tqdm=True,
    )  # fmt: skip
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)),
        args=make(**others),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=lora if method == "lora" else None,
    )
    if method == "lora":
        generator = torch.Generator().manual_seed(0)
        for _, parameter in sorted(item for item in trainer.model.named_parameters() if item[1].requires_grad):
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
        trainer.model.save_pretrained(folder / "adapter")
    return trainer


def theirs(trainer: Any) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of TRL's steps."""
    trainer.train()
    losses = trainer.losses
    sums = [sum(losses[step * MICROBATCHES : (step + 1) * MICROBATCHES]) for step in range(STEPS)]
    return sums, [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def ours(recipe: Path, output: str = "out") -> list[dict[str, float]]:
    """Metrics of the steps of a run of this program, as it writes them."""
    command = [sys.executable, "-m", "roundpipe_cli", "finetune", str(recipe), f"output_dir={recipe.parent / output}"]
    subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return [json.loads(line) for line in (recipe.parent / output / "metrics.jsonl").read_text().splitlines()]


def equal_rows(recipe: Path, trainer: Any) -> int:
    """Rows whose tokens and labels are those of TRL's collator."""
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.prepare.setup import prepare

    setup = prepare(load_recipe(str(recipe), []), offline=True, tell=lambda event: None)
    equal = 0
    for row, their_row in zip(setup.dataset.rows, trainer.train_dataset, strict=True):
        batch = trainer.data_collator([their_row])
        same_tokens = batch["input_ids"][0].tolist() == list(row.input_ids)
        equal += same_tokens and batch["labels"][0].tolist() == list(row.labels)
    return equal


def compare(method: str, args: argparse.Namespace, folder: Path) -> bool:
    """Print a line; whether all of it is within the tolerances."""
    folder.mkdir()
    rows = write_rows(folder / "rows.jsonl", args.rows)
    base = args.model or folder.parent / "base"
    trainer = trainer_of(base, rows, method, folder)
    recipe = folder / "recipe.yaml"
    start = f", start_from: {folder / 'adapter'}" if method == "lora" else ""
    recipe.write_text(
        f"model: {base}\nmethod: {method}\nlora: {{r: {RANK}, alpha: {2 * RANK}{start}}}\n"
        f"datasets: [{{path: rows.jsonl, type: prompt_completion}}]\nmax_seq_length: 512\nshuffle: false\n"
        "packing: false\n"
        f"micro_batch_size: {ROWS_PER_MICROBATCH}\ngradient_accumulation_steps: {MICROBATCHES}\nmax_steps: {STEPS}\n"
        f"learning_rate: {RATE}\nlr_scheduler_type: linear\nwarmup_steps: 0\nweight_decay: {DECAY}\n"
        f"max_grad_norm: {CLIP}\ndtype: float32\npipeline: {{devices: [cpu, cpu]}}\n"
    )
    equal = equal_rows(recipe, trainer)
    steps, (their_losses, their_norms) = ours(recipe), theirs(trainer)
    loss = max(abs(mine["loss"] - their) for mine, their in zip(steps, their_losses, strict=True))
    norm = max(abs(mine["grad_norm"] - their) / their for mine, their in zip(steps, their_norms, strict=True))
    shown = f"{their_losses[0]:.6f} | {their_losses[-1]:.6f} | {loss:.1e} | {norm:.1e}"
    print(f"| {method} | {equal} of {len(rows)} | {shown} |", flush=True)
    return equal == len(rows) and loss <= args.loss and norm <= args.norm


def times(rounds: int, folder: Path) -> None:
    """Print the seconds of each program's steps, but for the first two of a run, in turn."""
    make_model(folder / "base", whole=True)
    text = " ".join(row["completion"] for row in write_rows(folder / "pairs.jsonl", 40)) * 8
    rows = [{"text": text[100 * number :]} for number in range(TIMED_STEPS * TIMED_MICROBATCHES * ROWS_PER_MICROBATCH)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {folder / 'base'}\nmethod: full\ndatasets: [{{path: rows.jsonl}}]\nmax_seq_length: {TIMED_TOKENS}\n"
        f"shuffle: false\npacking: false\nmicro_batch_size: {ROWS_PER_MICROBATCH}\n"
        f"gradient_accumulation_steps: {TIMED_MICROBATCHES}\nmax_steps: {TIMED_STEPS}\nlearning_rate: {RATE}\n"
        f"lr_scheduler_type: linear\nwarmup_steps: 0\nweight_decay: {DECAY}\nmax_grad_norm: {CLIP}\n"
        f"dtype: bfloat16\npipeline: {{devices: [cpu, cpu]}}\n"
    )
    forms: dict[str, dict[str, Any]] = {
        "TRL, autocast over float32 weights": {"bf16": True},
        "TRL, weights and AdamW in bfloat16": {"dtype": "bfloat16"},
    }
    found = defaultdict[str, list[float]](list)
    for number in range(rounds):
        found["RoundPipe"] += [step["step_s"] for step in ours(recipe, f"out-{number}")][2:]
        for name, form in forms.items():
            timed = {"gradient_accumulation_steps": TIMED_MICROBATCHES, "max_length": TIMED_TOKENS, **form}
            trainer = trainer_of(
                folder / "base", rows, "full", folder, steps=TIMED_STEPS, gradient_checkpointing=True, **timed
            )
            trainer.train()
            found[name] += [end - start for start, end in pairwise(trainer.ended_s[:TIMED_STEPS])][1:]
    mine = statistics.median(found["RoundPipe"])
    print("\n| | seconds of a step | RoundPipe's, of it |\n|---|---:|---:|")
    for name, seconds in found.items():
        print(f"| {name} | {statistics.median(seconds):.2f} | {mine / statistics.median(seconds):.2f} |")


def main() -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["TQDM_DISABLE"] = "1"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model; none: a random Llama")
    parser.add_argument("--rows", type=int, default=40, help="rows of the data")
    parser.add_argument("--times", action="store_true", help="of a full step in bfloat16, and nothing else")
    parser.add_argument("--rounds", type=int, default=3, help="of --times")
    parser.add_argument("--only", default="", help="methods whose name begins so")
    parser.add_argument("--loss", type=float, default=5e-5)
    parser.add_argument("--norm", type=float, default=1e-4)
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "roundpipe-trl", help="kept")
    args = parser.parse_args()
    enter_venv(args.venv)
    with tempfile.TemporaryDirectory() as folder:
        if args.times:
            return times(args.rounds, Path(folder))
        if args.model is None:
            make_model(Path(folder) / "base")
            (Path(folder) / "base" / "chat_template.jinja").unlink(missing_ok=True)  # TRL joins plain texts without it
        print("| method | rows with equal labels | TRL's loss, step 1 | step 10 | loss differs by | gradient norm by |")
        print("|---|---:|---:|---:|---:|---:|")
        methods = [method for method in ("lora", "full") if method.startswith(args.only)]
        close = [compare(method, args, Path(folder) / method) for method in methods]
    sys.exit(0 if all(close) else 1)


if __name__ == "__main__":
    main()
