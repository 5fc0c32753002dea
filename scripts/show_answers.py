"""Show the same prompts answered before and after a LoRA fine-tuning run.

    python scripts/show_answers.py outputs/quickstart --prompts recipes/quickstart_prompts.txt

Answers are greedy, so that nothing but the adapter makes the difference. They are kept in OUTPUT_DIR/answers.json and
shown at once the next time, unless adapter, model, prompts or --max-new-tokens have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from roundpipe_cli.cli.output import quiet_libraries, say
from roundpipe_cli.errors import RefusedError, RoundpipeError

ANSWERS_NAME = "answers.json"
ADAPTER_NAME = "adapter_model.safetensors"


def main() -> int:
    arguments = parse_arguments()
    try:
        adapter = find_adapter(arguments.adapter or arguments.output_dir)
        prompts = read_prompts(arguments.prompts)
        key = {
            "model": arguments.model or model_of_run(arguments.output_dir),
            "adapter_sha256": hashlib.sha256((adapter / ADAPTER_NAME).read_bytes()).hexdigest(),
            "prompts": prompts,
            "max_new_tokens": arguments.max_new_tokens,
        }
        cache = arguments.output_dir / ANSWERS_NAME
        answers = read_cache(cache, key)
        if answers is None:
            answers = answer_all(key["model"], adapter, prompts, arguments.max_new_tokens)
            cache.write_text(json.dumps({"key": key, "answers": answers}, indent=1, ensure_ascii=False) + "\n")
    except RoundpipeError as error:
        say(str(error))
        return error.exit_code
    show(answers, Console())
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output_dir", type=Path, help="folder of the run")
    parser.add_argument("--prompts", type=Path, required=True, help="text file, one prompt a line")
    parser.add_argument("--adapter", type=Path, help="adapter folder, if not in OUTPUT_DIR")
    parser.add_argument("--model", help="base model, if not the one in OUTPUT_DIR/recipe.yaml")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    return parser.parse_args()


def find_adapter(folder: Path) -> Path:
    """The folder with the adapter: `folder` itself or `folder/adapter`.

    Raises:
        RefusedError: neither has one.
    """
    for candidate in (folder, folder / "adapter"):
        if (candidate / ADAPTER_NAME).is_file():
            return candidate
    raise RefusedError(
        "no adapter here",
        where=str(folder),
        expected=ADAPTER_NAME,
        hint="train first: roundpipe finetune recipes/quickstart.yaml",
    )


def read_prompts(path: Path) -> list[str]:
    """The lines that are not empty.

    Raises:
        RefusedError: no such file, or nothing in it.
    """
    try:
        prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise RefusedError("the prompts cannot be read", where=str(path), found=error.strerror) from error
    if not prompts:
        raise RefusedError("no prompts", where=str(path), found="an empty file", expected="one prompt a line")
    return prompts


def model_of_run(output_dir: Path) -> str:
    """The base model that the run's resolved recipe names.

    Raises:
        RefusedError: there is no recipe in `output_dir`.
    """
    import yaml

    path = output_dir / "recipe.yaml"
    try:
        return str(yaml.safe_load(path.read_text(encoding="utf-8"))["model"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise RefusedError("cannot tell the base model", where=str(path), hint="name it with --model") from error


def read_cache(path: Path, key: dict[str, Any]) -> list[dict[str, str]] | None:
    """The answers of an earlier call with the same key, if there are any."""
    try:
        cached = json.loads(path.read_text(encoding="utf-8"))
        answers: list[dict[str, str]] = cached["answers"]
        complete = all({"prompt", "before", "after"} <= set(answer) for answer in answers)
        return answers if cached["key"] == key and complete else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def answer_all(model_name: str, adapter: Path, prompts: list[str], max_new_tokens: int) -> list[dict[str, str]]:
    """Each prompt with the base model's answer and the fine-tuned one's."""
    say("loading torch and transformers ...")
    quiet_libraries()
    import torch

    from roundpipe_cli.model.files.source import resolve_model
    from roundpipe_cli.train.result.generate import Prompt, answer_prompts, load_result, move_to_gpu

    def answer_text(asked: Prompt) -> str:
        """Answer, with ` ...` behind one that was cut off at `max_new_tokens`."""
        (found,) = answer_prompts(model, tokenizer, [asked], is_shown=False)
        return found.text.strip() + ("" if found.is_ended else " ...")

    source = resolve_model(model_name, revision=None, recipe_folder=Path.cwd(), offline=False)
    say("loading the model with its adapter ...")
    model, tokenizer = load_result(adapter, source, "bfloat16", is_adapter=True)
    model = move_to_gpu(model, lambda text: say(f"note: {text}"))
    if model.device.type == "cpu":
        torch.set_num_threads(1)  # a token of so small a model is too little work to share: threads mostly wait
    answers = []
    for number, text in enumerate(prompts, 1):
        say(f"answering prompt {number} of {len(prompts)}, before and after training ...")
        asked = Prompt(text, max_new_tokens=max_new_tokens)
        with model.disable_adapter():
            before = answer_text(asked)
        answers.append({"prompt": text, "before": before, "after": answer_text(asked)})
    return answers


def show(answers: list[dict[str, str]], console: Console) -> None:
    table = Table(show_lines=True, expand=True)
    for title, ratio in (("Prompt", 2), ("Before", 4), ("After", 4)):
        table.add_column(title, ratio=ratio, overflow="fold")
    for line in answers:
        table.add_row(*(console.render_str(line[key], markup=False) for key in ("prompt", "before", "after")))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
