"""Every promise, the trial that holds it, and how often it is tried: in the test suite and before a release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.torture import chains, damage, fuzz_commands, fuzz_readers, holders, hostile, kills, stops, syscalls, workers
from tests.torture.arena import Arena, Seen


@dataclass(frozen=True)
class Promise:
    """One row of the table in tests/README.md."""

    name: str  # option of `scripts/torture` and id of the test
    text: str
    trial: Callable[[Arena, int], Seen]
    suite_count: int  # tries in the test suite
    release_count: int  # tries before a release; a trial over a list of cases takes all of them where this is more
    missing: Callable[[], str | None] = lambda: None  # what this machine lacks for it, if anything


LACKS = syscalls.missing
PACKED = partial(kills.random_kills, variants=("4bit", "8bit", "fp8"))

PROMISES = (
    Promise("kills", "SIGKILL three times at random, then resume: the same bits", kills.random_kills, 1, 200),
    Promise("kills-packed", "the same with weights in 4 bit, 8 bit and FP8", PACKED, 1, 48),
    Promise("chains", "stops and kills across three epochs: every row once, same losses", chains.resume_chains, 1, 20),
    Promise("damage", "the newest checkpoint damaged: noticed, named; all: exit 6", damage.damaged, 2, 1216),
    Promise("hangup", "terminal closed at random: exit 129, resumes bit-identically", stops.hangup, 1, 50),
    Promise("ctrl-c", "Ctrl-C at a terminal: checkpoint, exit 130, resumes bit-identically", stops.ctrl_c, 1, 50),
    Promise("ctrl-c-twice", "Ctrl-C twice: stops at once, last checkpoint good", stops.ctrl_c_twice, 1, 50),
    Promise("phases", "a signal in each phase of a run: true exit code, resumes", stops.every_phase, 1, 210),
    Promise("holders", "a second run in one directory: exit 3, names the holder", holders.two_at_once, 1, 50),
    Promise("faults", "a failing part: one error block, right exit code, no hang", workers.failing_parts, 1, 1000),
    Promise("hangs", "a hanging part: all stacks, 10 s, exit 1 or 5, or others go on", workers.hanging_parts, 1, 1000),
    Promise("lost", "two of three devices lost at random: the others go on, same bits", workers.lost_devices, 1, 60),
    Promise("pickles", "pickles as weights, adapter, tokenizer: exit 2, never opened", hostile.pickled_models, 5, 100),
    Promise("lures", "lures to run a model's code: exit 2, nothing runs", hostile.remote_code, 5, 100),
    Promise("crafted", "crafted safetensors and indexes: exit 2, 2 s, 300 MB", hostile.crafted_weights, 6, 100),
    Promise("order", "fsync of files, folder, parent, rename: in order", syscalls.durability_order, 1, 3, LACKS),
    Promise("kill-each", "SIGKILL at every system call of a save: same bits", syscalls.kill_at_each, 1, 1000, LACKS),
    Promise("error-each", "EIO, ENOSPC at each call of a save: exit 5", syscalls.error_at_each, 1, 1000, LACKS),
    *(
        Promise(
            f"fuzz-{name}",
            f"{what} damaged at random: success or a documented exit code, a message, 10 s of processor time",
            (fuzz_readers.TRIALS | fuzz_commands.TRIALS)[name],
            *counts,
        )
        for name, what, *counts in (
            ("gguf", "GGUF files", 4, 2000),
            ("config", "a model's configurations and tokenizer", 4, 2000),
            ("adapter", "an adapter's files", 4, 2000),
            ("events", "a run's events, metrics and report, watched", 4, 2000),
            ("cache", "measured times and tokens in the cache", 4, 2000),
            ("gz", "compressed rows", 4, 2000),
            ("parquet", "tables of rows", 4, 2000),
            ("recipe", "a recipe, planned", 3, 2000),
            ("costs", "a costs file", 3, 2000),
            ("convert", "other tools' training files", 3, 2000),
            ("rows", "rows of six forms and six kinds of files", 3, 2000),
            ("weights", "weights in two files, and their index", 3, 2000),
            ("hub", "a model in the hub's cache", 3, 2000),
            ("checkpoint", "a checkpoint and the rows beside it, resumed", 1, 300),
        )
    ),
)
