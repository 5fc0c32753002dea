"""A model several times as large as the memory of its process answers: `generate --stream` under an enforced limit.

    python scripts/answers_beyond_memory.py --tokenizer FOLDER [--limit-gib 1] [--blocks 32] [--batches 1,8] [--to DIR]

Needs Linux, and root to make a memory cgroup (version 1 or 2). The model is a Llama with random weights and a folder's
tokenizer. Prints what `plan --generate` says inside the cgroup, then for each batch the time of a pass behind the
first, tokens/s, and the most resident memory of the process but for pages of the weights' files, which the system
takes back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

CGROUPS = Path("/sys/fs/cgroup")
NEW_TOKENS = 1, 6
"""The difference of two runs is the time of passes behind the prompts'."""
OF_WEIGHTS = (".tmp-weights-", ".safetensors")
LENGTH = ("max_seq_length=64",)


def make_model(folder: Path, tokenizer: Path, blocks: int) -> int:
    """Write the model, unless it is there; bytes of its weights."""
    if files := list(folder.glob("*.safetensors")):
        return sum(file.stat().st_size for file in files)
    known = AutoTokenizer.from_pretrained(str(tokenizer))
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(num_hidden_layers=blocks, vocab_size=len(known), tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(str(folder), max_shard_size="500MB")
    known.save_pretrained(str(folder))
    return sum(parameter.nbytes for parameter in model.parameters())


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[Path]:
    """A new cgroup with a limit of memory, page cache included."""
    is_first = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if is_first else CGROUPS) / f"answers-{os.getpid()}"
    folder.mkdir()
    (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(num_bytes))
    try:
        yield folder
    finally:
        folder.rmdir()


def started(group: Path, said: Path, *words: str) -> subprocess.Popen[str]:
    """`roundpipe WORDS` inside a cgroup, what it says in a file."""
    inside = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    command = ["sh", "-c", inside, "sh", sys.executable, "-m", "roundpipe_cli", *words]
    with said.open("w") as file:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)


def own_bytes(process: int) -> int:
    """Resident bytes, but for pages of the weights' files."""
    total, is_counted = 0, True
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_counted = not any(name in line for name in OF_WEIGHTS)
        elif line.startswith("Rss:") and is_counted:
            total += 1024 * int(line.split()[1])
    return total


def measure(group: Path, model: Path, batch: int, num_tokens: int, prompts: Path) -> tuple[float, int]:
    """(seconds of all passes, most bytes of the process)."""
    words = ["generate", str(model), "--stream", "--prompts", str(prompts), "--batch-size", str(batch), "--offline"]
    words += ["--max-new-tokens", str(num_tokens), "--json"]
    said, most, began_s = prompts.with_suffix(".log"), 0, 0.0
    process = started(group, said, *words)
    assert process.stdout is not None
    while process.poll() is None:
        with contextlib.suppress(OSError):
            most = max(most, own_bytes(process.pid))
        if not began_s and "the most probable tokens" in said.read_text():
            began_s = time.monotonic()
        time.sleep(0.1)
    took_s = time.monotonic() - began_s
    answers = [json.loads(line) for line in process.stdout.read().splitlines()]
    assert process.returncode == 0 and len(answers) == batch, said.read_text()
    assert all(one["tokens"] == num_tokens for one in answers), answers
    print(next(line for line in said.read_text().splitlines() if "streaming:" in line))
    return took_s, most


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--limit-gib", type=float, default=1.0)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--to", type=Path, default=None)
    given = parser.parse_args()
    folder = given.to or Path(tempfile.mkdtemp())
    num_bytes, limit = make_model(folder / "model", given.tokenizer, given.blocks), int(given.limit_gib * 2**30)
    print(f"{num_bytes / 2**30:.2f} GiB of weights, a limit of {limit / 2**30:.2f} GiB: {num_bytes / limit:.2f} times")
    try:
        with limited(limit) as group:
            for batch in map(int, given.batches.split(",")):
                planned = started(
                    group,
                    folder / "plan.log",
                    "plan",
                    str(folder / "model"),
                    *LENGTH,
                    "--generate",
                    str(batch),
                    "--json",
                )
                plan = json.loads(planned.communicate()[0])["generate"]["streamed"]
                prompts = folder / "prompts.txt"
                prompts.write_text("What is a lock file?\n" * batch)
                (first_s, _), (took_s, most) = (
                    measure(group, folder / "model", batch, count, prompts) for count in NEW_TOKENS
                )
                pass_s = (took_s - first_s) / (NEW_TOKENS[1] - NEW_TOKENS[0])
                rate = batch / pass_s
                print(
                    f"batch {batch}: the first pass {first_s:.2f} s, others {pass_s:.2f} s "
                    f"(planned {plan['pass_s']:.2f}), "
                    f"{rate:.2f} tokens/s (planned {plan['tokens_per_s']:.2f}), "
                    f"process {most / 2**20:.0f} MiB (planned {plan['host_bytes'] / 2**20:.0f})",
                    flush=True,
                )
    finally:
        if given.to is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
