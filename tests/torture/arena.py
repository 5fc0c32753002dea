"""One tiny model, its data, and uninterrupted runs to compare with, on a file system in memory.

A trial is a function of (arena, count) that returns what was `Seen`. Each single try gets a folder of its own and a
random generator seeded with its index, so that a failure can be repeated; the folder of a failed one is kept.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from roundpipe_cli.cache import CACHE_VARIABLE
from roundpipe_cli.train.checkpoint.reading import load_newest
from roundpipe_cli.train.checkpoint.resume import FREE_KEYS
from tests.support.e2e import STAGES, Outcome, Running, launch, make_model, numbers, write_recipe, write_rows

T = TypeVar("T")
NUM_STEPS = 8
BASE: dict[str, Any] = {"num_train_epochs": 4, "max_steps": NUM_STEPS, **STAGES}
"""Steps of 2 microbatches, into a third epoch, dropout and shuffling on, saved every 2. Planning would take long."""
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"method": "full", "learning_rate": 1.0e-3, **dict.fromkeys(STAGES, "auto")},
    "accumulate": {"micro_batch_size": 1, "gradient_accumulation_steps": 4},
    "4bit": {"load_in_4bit": True},
    "8bit": {"load_in_8bit": True},
    "fp8": {"load_in_fp8": True},
}
RESULTS = {"lora": "adapter_model.safetensors", "full": "model.safetensors"}
CLOCK_KEYS = ("training_s", "records")
"""Of a checkpoint's state: what depends on the clock. Of the recipe in it, what is free to change is left out too."""
PIPELINE_KEYS = ("upload_bytes", "device_peak_bytes")  # of a row of metrics.jsonl: what depends on the devices


@dataclass(frozen=True)
class Seen:
    """How often a promise was put to the test, and where it did not hold."""

    total: int
    failures: tuple[str, ...]
    note: str = ""  # further figures, e.g. how many kills fell inside a save

    @property
    def figure(self) -> str:
        """`200 of 200, 31 % of 600 kills inside a save`."""
        return f"{self.total - len(self.failures)} of {self.total}" + (f", {self.note}" if self.note else "")


@dataclass
class Arena:
    """Where trials run."""

    folder: Path
    jobs: int = 1  # tries at a time
    patience: float = 1.0  # time limits are multiplied by this; more than 1 on a machine that does other work too
    seed: int = 20261121
    _made_once: dict[str, Any] = field(default_factory=dict)
    lock: RLock = field(default_factory=RLock)
    _made: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        make_model(self.folder / "model")
        write_rows(self.folder / "rows.jsonl")

    def workspace(self, variant: str = "lora", **changes: Any) -> Path:
        """A new working directory with `recipe.yaml`; model and data are shared with all others."""
        with self.lock:
            self._made += 1
            work = self.folder / f"{variant}-{self._made}"
        work.mkdir()
        (self.folder / "proofs").mkdir(exist_ok=True)
        (work / "cache").mkdir()
        (work / "cache" / "proofs").symlink_to(self.folder / "proofs")  # a second of work for each kind of model
        shared = {"model": str(self.folder / "model"), "datasets": [{"path": str(self.folder / "rows.jsonl")}]}
        write_recipe(work / "recipe.yaml", **{**BASE, **shared, **VARIANTS[variant], **changes})
        return work

    def reference(self, variant: str = "lora", **changes: Any) -> Path:
        """The output directory of an uninterrupted run of the same recipe."""

        def make() -> Path:
            work = self.workspace(variant, **changes)
            start(work).finish().expect(0)
            return work / "out"

        return self.once(variant + json.dumps(changes, sort_keys=True), make)

    def killed(self) -> Path:
        """A new working directory whose run was killed after step 5: it has the checkpoints of steps 2 and 4."""

        def make() -> Path:
            work = self.workspace()
            died(start(work, environment={"ROUNDPIPE_FAULT": "optimizer:kill:step=5"}))
            assert len(saved(work)) == 2
            return work / "out"

        out, copy = self.once("killed", make), self.workspace()
        shutil.copytree(out, copy / "out")
        return copy

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What `make` returned when it was first asked for."""
        with self.lock:
            is_known = key in self._made_once
        made = None if is_known else make()
        with self.lock:
            known: T = self._made_once.setdefault(key, made)
            return known

    def seconds(self, variant: str, environment: Mapping[str, str], count: int) -> float:
        """About how long a run takes with these faults: as one did when it was first asked for. For a single try the
        report of the reference will do."""
        reference = self.reference(variant)  # the first run of all takes longer
        if count == 1:
            return float(json.loads((reference / "report.json").read_text())["seconds"])
        with self.lock:
            run = functools.partial(start, environment=environment)
            key = variant + json.dumps(dict(environment))
            return self.once(key, lambda: run(self.workspace(variant)).finish().expect(0).seconds)

    def each(self, count: int, attempt: Callable[[int, random.Random], None]) -> tuple[str, ...]:
        """Run `attempt(index, random)` for each index, `jobs` at a time. Returns what the failed ones said."""

        def guarded(index: int) -> str | None:
            try:
                attempt(index, random.Random(f"{self.seed}-{index}"))
            except Exception as error:  # a trial that itself breaks has not shown the promise either
                return f"try {index}: {type(error).__name__}: {error}"
            return None

        with ThreadPoolExecutor(self.jobs) as pool:
            return tuple(text for text in pool.map(guarded, range(count)) if text is not None)


def spread(cases: list[T], count: int) -> list[T]:
    """`count` of the cases, evenly chosen, the first and the last among them; all of them where there are fewer."""
    if count >= len(cases):
        return cases
    return [cases[index * (len(cases) - 1) // max(count - 1, 1)] for index in range(count)]


def start(
    work: Path, *words: str, environment: Mapping[str, str] | None = None, before: Callable[[], None] | None = None
) -> Running:
    """`roundpipe finetune recipe.yaml WORDS` in `work`, with a cache of its own there: tokens and measured times of
    other tries would make a run take another path. `before` is `launch`'s."""
    surroundings = {CACHE_VARIABLE: str(work / "cache"), **(environment or {})}
    return launch(work, "finetune", "recipe.yaml", *words, environment=surroundings, before=before)


LATE = 1.15  # times the expected length of a run: moments up to it; too late ones are drawn again


def at_a_moment(
    expected_s: float, draw: random.Random, attempt: Callable[[float], Outcome], first_s: float = 0.0
) -> Outcome:
    """Interrupt a run at a random moment of it.

    Args:
        expected_s: about how long the run takes. Machines are not equally fast all the time, so a run that ends
            before its moment (exit code 0) is tried again, with the length that it turned out to have.
        attempt: start the run afresh, interrupt it after so many seconds, wait for its end.
        first_s: the earliest moment.
    """
    until_s = LATE * expected_s
    while True:
        done = attempt(draw.uniform(first_s, max(until_s, first_s)))
        if done.code != 0:
            return done
        until_s = min(until_s, done.seconds)


def saved(work: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    return sorted((work / "out").glob("step-*"))


def resume_words(work: Path) -> tuple[str, ...]:
    """What a restarting script adds: `--resume` once there is a checkpoint."""
    return ("--resume",) if saved(work) else ()


def go_on(work: Path, *words: str, environment: Mapping[str, str] | None = None) -> Outcome:
    return start(work, *resume_words(work), *words, environment=environment).finish().expect(0)


def check_newest(work: Path) -> int:
    """The step of the newest checkpoint, which has to be whole."""

    def fail(text: str) -> None:
        raise AssertionError(text)

    return load_newest(work / "out", warn=fail).step


def inside_a_save(work: Path) -> bool:
    """Whether a dead run left a half-written checkpoint or a half-removed one."""
    return any(any((work / "out").glob(pattern)) for pattern in (".tmp-step-*", ".del-step-*"))


def assert_identical(work: Path, reference: Path) -> None:
    """Same loss to the bit in every row, same result, and the same last checkpoint: masters, moments, state."""
    out = work / "out"
    assert _rows(out) == _rows(reference), "metrics.jsonl differs"
    for name in RESULTS.values():
        mine, theirs = out / name, reference / name
        assert mine.exists() == theirs.exists(), f"{name} is missing"
        assert not theirs.exists() or mine.read_bytes() == theirs.read_bytes(), f"{name} differs"
    newest, expected = saved(work)[-1], sorted(reference.glob("step-*"))[-1]
    assert newest.name == expected.name, f"the last checkpoint is {newest.name}, not {expected.name}"
    for path in expected.glob("*.safetensors"):
        assert (newest / path.name).read_bytes() == path.read_bytes(), f"{path.name} differs"
    assert _state(newest) == _state(expected), "state.json differs"
    left = [path.name for path in out.iterdir() if path.name.startswith((".tmp", ".del"))]
    assert not left, f"left behind: {left}"


def _rows(output_dir: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in PIPELINE_KEYS} for row in numbers(output_dir)]


def _state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    for key in CLOCK_KEYS:
        state["meta"].pop(key, None)
    for key in FREE_KEYS:
        state["meta"]["recipe"].pop(key, None)
    return state


def died(running: Running) -> None:
    done = running.finish()
    assert done.code == -signal.SIGKILL, f"ended with {done.code}, not by SIGKILL\n{done.err}"
