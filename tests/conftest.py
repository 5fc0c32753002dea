"""Settings of the whole suite.

Tests marked `sweep` run by `scripts/test -m sweep` only; so do those combinations of a test marked `covering(strength)`
whose values others hold. Tests marked `gpu` are skipped, visibly, where there is no GPU. After a few that
fork this process the files that take longest begin, so that no process is left with one when the others have run out of
work.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roundpipe_cli import faults
from roundpipe_cli.cache import CACHE_VARIABLE
from tests.support.covering import covering

SMOKE = (  # files of the subset `smoke`
    *("recipe/test_recipe_load.py", "schedule/test_schedule_builders.py"),
    *("planning/test_partition_properties.py", "data/test_data_columns.py", "model/test_counter_random.py"),
    *("engine/test_device_memory.py", "train/test_checkpoint_store.py", "train/test_finetune_output.py"),
)


FORKING = tuple(f"data/test_data_{name}.py" for name in ("columns", "dataset", "cache", "rules", "processes", "golden"))
"""Files that begin first: they fork for each data set, three times as dear once a process has loaded many models."""

LONGEST = (  # files in the order in which they begin next, before those with a test marked `slow`
    *("reliability/test_reliability.py", "train/test_finetune_resume.py", "cli/test_answers.py"),
    *("planning/test_shipped_recipes.py", "train/test_nodes.py", "train/test_evaluate.py", "test_guide.py"),
    *("train/test_finetune_result.py", "train/test_export.py", "train/test_adapt.py"),
)

SHARED_CACHES = ("proofs", "parameter_counts", "converted")
"""Caches that all tests of a session share: a proof takes a second, a count loads torch in another process, and
SmolLM2's GGUF file takes seven seconds to convert."""

NUMBERS = itertools.count()


# nohup and a shell's `&` leave them ignored, and started runs then ignore them too
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


os.environ["TZ"] = "UTC"  # screens and lines of steps show the time of day
time.tzset()


@pytest.fixture(scope="session")
def shared_caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-caches"
    for name in SHARED_CACHES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, shared_caches: Path) -> Path:
    """An own cache for each test, but for `SHARED_CACHES`. Its number is counted here: `mktemp` reads all folders that
    there are, 3 ms for a thousand tests."""
    folder = tmp_path_factory.getbasetemp() / "caches" / str(next(NUMBERS))
    folder.mkdir(parents=True)
    for name in SHARED_CACHES:
        (folder / name).symlink_to(shared_caches / name)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(tmp_path_factory, num_hidden_layers=3)


@pytest.fixture(scope="session")
def two_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(tmp_path_factory, num_hidden_layers=2)


def _made(tmp_path_factory: pytest.TempPathFactory, **sizes: int) -> Path:
    from tests.support.e2e import make_model  # which loads torch

    return make_model(tmp_path_factory.mktemp("tiny") / "model", **sizes)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Ask for a fault, as the environment variable has it."""

    def set_fault(text: str) -> None:
        monkeypatch.setenv(faults.ENVIRONMENT_VARIABLE, text)
        faults.load_faults()

    yield set_fault
    monkeypatch.undo()
    faults.load_faults()


@pytest.fixture
def new_threads() -> Callable[[], list[str]]:
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in threading.enumerate() if thread not in before]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    places = {Path(__file__).parent / name: place for place, name in enumerate((*FORKING, *LONGEST))}
    items.sort(key=lambda item: (places.get(item.path, len(places)), item.path not in slow))
    _mark_sweeps(items)
    smoke = {Path(__file__).parent / name for name in SMOKE}
    for item in items:
        if item.path in smoke:
            item.add_marker("smoke")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What collecting has loaded stays: no collection of garbage looks at it again, nor copies it in a fork."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _mark_sweeps(items: list[pytest.Item]) -> None:
    """Mark `sweep` what a test that is marked `covering(strength)` does not need to hold all its values."""
    cases: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("covering") and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("covering")
        assert marker is not None
        chosen = covering(
            [{name: id(value) for name, value in item.callspec.params.items()} for item in group], *marker.args
        )
        for number, item in enumerate(group):
            if number not in chosen:
                item.add_marker("sweep")
