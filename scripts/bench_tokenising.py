"""Time of tokenising uneven chunks by several processes, and of checking cached tokens.

    python scripts/bench_tokenising.py [--against OTHER_CHECKOUT]

Chunks: 400 of lognormal length (sigma 0.6) by processes that sleep, against the lower bound max(sum / processes,
longest); from the first chunk given out to the last result. Cache: four files of 500 MB in one shard and in four, from
the page cache, in turn with the other checkout. Each in a process of its own.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_CHUNKS, SIGMA, MEDIAN_S = 400, 0.6, 0.05
FILE_BYTES = 500 * 10**6


def time_chunks(num_processes: int, seed: int) -> tuple[float, float, int]:
    """(seconds, lower bound of them, most chunks that were given out and not yielded)."""
    from roundpipe_cli.data.processes import EncoderPool
    from roundpipe_cli.data.row_chunks import RowEncoder
    from roundpipe_cli.data.rows import RawRow

    settings: Any = SimpleNamespace(chat_template=None, folder=None, chat_template_kwargs={})
    chance = random.Random(seed)
    seconds = [MEDIAN_S * chance.lognormvariate(0, SIGMA) for _ in range(NUM_CHUNKS)]

    def sleep(_: Any, row_format: Any, rows: list[RawRow], *, count_only: bool) -> int:
        time.sleep(seconds[rows[0].number])
        return rows[0].number

    RowEncoder.__init__ = lambda *_: None  # type: ignore[method-assign, assignment]
    RowEncoder.encode = sleep  # type: ignore[method-assign, assignment]
    results, started_s, most = list[Any](), 0.0, 0

    def chunks() -> Iterator[Any]:
        nonlocal started_s, most
        for number in range(NUM_CHUNKS):
            started_s = started_s or time.monotonic()
            most = max(most, number + 1 - len(results))
            yield None, [RawRow(number, {})], False

    with EncoderPool(settings, _NoTemplate(), num_processes) as pool:  # type: ignore[arg-type]
        for result in pool.encode(chunks()):
            results.append(result)
        took_s = time.monotonic() - started_s
    assert results == list(range(NUM_CHUNKS))
    return took_s, max(sum(seconds) / num_processes, max(seconds)), most


class _NoTemplate:
    """A tokenizer without a chat template."""

    chat_template = None

    def get_chat_template(self, tools: object) -> str:
        raise ValueError("none")


def time_checks(cache: Path, num_shards: int) -> float:
    """Seconds to compare the shards `0`, `1` ... of `cache` with checksums."""
    import roundpipe_cli.data.shards as shards

    folders = [cache / str(number) for number in range(num_shards)]
    started_s = time.monotonic()
    try:
        from roundpipe_cli.files import digests_of
    except ImportError:  # an older checkout
        for folder in folders:
            shards.file_sums(folder)
    else:
        digests_of([folder / name for folder in folders for name in shards.ARRAYS], shards._new_sum)
    return time.monotonic() - started_s


def make_shards(cache: Path, num_shards: int) -> None:
    """Four files of 500 MB: of one shard, or those of the ids of four."""
    from roundpipe_cli.data.shards import ARRAYS

    block = random.Random(0).randbytes(10**6)
    for number in range(num_shards):
        (cache / str(number)).mkdir(parents=True)
        for index, name in enumerate(ARRAYS):
            with (cache / str(number) / name).open("wb") as file:
                for _ in range(FILE_BYTES // len(block) if num_shards == 1 or not index else 0):
                    file.write(block)


def run_in(checkout: Path, *words: object) -> str:
    """The output of this script, with the program of `checkout`."""
    command = [sys.executable, __file__, *map(str, words)]
    environment = {"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, default=None, help="another checkout, measured in turn with this one")
    parser.add_argument("--processes", type=int, default=0, help="only time chunks by so many, once")
    parser.add_argument("--check", type=Path, default=None, help="only check the shards of this folder, once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.processes:
        took_s, bound_s, most = time_chunks(args.processes, args.seed)
        print(f"{took_s:.2f} s, {took_s / bound_s:.3f} of the bound, {most} ahead")
        return
    if args.check:
        print(f"{time_checks(args.check, len(list(args.check.iterdir()))):.2f} s")
        return
    here = Path(__file__).parents[1]
    checkouts = {"this": here, **({"other": args.against} if args.against else {})}
    for num_processes in (8, 16):
        for seed in range(3):
            for name, checkout in checkouts.items():
                said = run_in(checkout, "--processes", num_processes, "--seed", seed)
                print(f"{num_processes} processes, draw {seed}, {name}: {said}", flush=True)
    for num_shards in (1, 4):
        with tempfile.TemporaryDirectory(prefix="roundpipe-shards-") as folder:
            make_shards(Path(folder), num_shards)
            for repeat in range(6):
                for name, checkout in checkouts.items():
                    said = run_in(checkout, "--check", folder)
                    if repeat:  # the first one fills the page cache
                        print(f"four files of 500 MB in {num_shards} shards, {name}: {said}", flush=True)


if __name__ == "__main__":
    main()
