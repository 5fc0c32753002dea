"""What a teacher gains: half of SmolLM2-135M's layers, distilled from all of them, against labels alone.

    python scripts/distill_gain.py --data alpaca_rows.json --to FOLDER             about an hour on two busy cores
    python scripts/distill_gain.py --data alpaca_rows.json --to FOLDER --steps 2 --rates 1e-4 --seeds 1       a trial

The student is every second layer of the teacher, which is then trained in full: the same rows, order, steps and rate in
both arms. The first seed tries all rates for both; each arm takes its own best one for the other seeds. The loss is the
cross entropy of held-out rows in both arms. A call that ended early is continued by the same command.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's own template without the system message that it adds, which would be half of a short row."""
LETTERS, HELD_OUT, TOP_K = 260, 48, 64
"""Letters of the longest row, rows that are never trained on, and tokens that the teacher's scores keep."""


def make_models(folder: Path) -> None:
    """The teacher, and the student that is cut out of it."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl_losses import make_model

    for name in ("teacher", "student"):
        make_model(folder / name, whole=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    model.model.layers = model.model.layers[::2]
    model.config.num_hidden_layers, model.config.layer_types = len(model.model.layers), None
    model.save_pretrained(folder / "student")


def make_rows(folder: Path, data: Path) -> None:
    """Short rows, to train on and held out."""
    texts = [(f"{row['instruction']}\n{row['input']}".strip(), row["output"]) for row in json.loads(data.read_text())]
    pairs = [pair for pair in texts if len(pair[1]) >= 24 and sum(map(len, pair)) <= LETTERS]
    rows = [json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in pairs]
    random.Random(0).shuffle(rows)
    (folder / "held_out.jsonl").write_text("".join(rows[:HELD_OUT]))
    (folder / "rows.jsonl").write_text("".join(rows[HELD_OUT:]))


def roundpipe(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "roundpipe_cli", *words], check=True, stdout=sys.stderr)


def held_out_loss(folder: Path, seed: int, rate: float, words: tuple[str, ...]) -> float:
    """The last evaluation of a run, which is made unless it is there."""
    output = folder / "-".join([str(seed), f"{rate:g}", *words]).replace("=", "_")
    if not (output / "report.json").exists():
        values = (f"seed={seed}", f"learning_rate={rate}", f"output_dir={output}", *words)
        again = ("--resume",) if list(output.glob("step-*")) else ()
        roundpipe("finetune", str(folder / "student.yaml"), "--no-dashboard", *again, *values)
    return float(json.loads((output / "eval.jsonl").read_text().splitlines()[-1])["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="rows of instruction, input, output")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--distill", nargs="+", default=["distill.weight=0.9"], help="KEY=VALUE of the distilled arm")
    args = parser.parse_args()
    folder = args.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "student" / "config.json").exists():
        make_models(folder)
    make_rows(folder, args.data)
    (folder / "chatml.jinja").write_text(CHATML)
    recipe = folder / "student.yaml"
    recipe.write_text(
        f"model: {folder}/student\nmethod: full\ndatasets: [{{path: rows.jsonl}}]\n"
        f"eval_datasets: [{{path: held_out.jsonl}}]\ndistill: {{teacher: {folder}/scores}}\n"
        "chat_template: chatml.jinja\nmax_seq_length: 128\npacking: false\nmicro_batch_size: 4\n"
        f"gradient_accumulation_steps: 1\nwarmup_steps: 10\nmax_steps: {args.steps}\neval_steps: {args.steps}\n"
        "dtype: bfloat16\npipeline: {devices: [cpu], recompute: none}\noutput_dir: unused\n"
    )
    teacher = (f"model={folder}/teacher", "max_steps=1", f"--top-k={TOP_K}", f"--to={folder}/scores")
    roundpipe("score", str(recipe), str(folder / "rows.jsonl"), *teacher)
    arms: dict[str, tuple[str, ...]] = {"labels": (), "distilled": ("objective=distill", *args.distill)}
    best = {}
    for name, arm in arms.items():
        found = {rate: held_out_loss(folder, args.seeds[0], rate, arm) for rate in args.rates}
        print(f"{name}:", ", ".join(f"{loss:.4f} at {rate:g}" for rate, loss in found.items()), flush=True)
        best[name] = min(found, key=lambda rate: found[rate])
    print("\n| seed | labels alone | distilled | lower by |\n|---:|---:|---:|---:|")
    for seed in args.seeds:
        alone, taught = (held_out_loss(folder, seed, best[name], arm) for name, arm in arms.items())
        print(f"| {seed} | {alone:.4f} | {taught:.4f} | {1 - taught / alone:.2%} |", flush=True)


if __name__ == "__main__":
    main()
