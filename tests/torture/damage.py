"""Damage done to the newest checkpoint: by a flipped bit, or by a cut."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

from tests.support.e2e import Outcome, tree
from tests.torture.arena import Arena, Seen, assert_identical, saved, spread, start

PASSED_OVER = re.compile(r"checkpoint (step-\d+) is damaged and passed over: (.*)")


def bit_flips(arena: Arena, count: int) -> Seen:
    """Flip one bit of one file of the newest checkpoint, then resume: noticed, or without any effect on the run."""
    unnoticed: list[Path] = []

    def attempt(index: int, draw: random.Random) -> None:
        work = arena.killed()
        path = draw.choice(sorted(saved(work)[-1].iterdir()))
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        done = start(work, "--resume").finish()
        if done.code == 6:  # a flipped version digit reads as a newer release: refused, which is detection too
            assert path.name == "manifest.json" and "format version" in done.err, done.err
        else:
            done.expect(0)
            noticed = _warnings(done)
            assert len(noticed) <= 1, done.err
            assert noticed or path.name == "manifest.json", f"a flipped bit of {path.name} went unseen"
            if not noticed:
                unnoticed.append(path)
            assert_identical(work, arena.reference())
        shutil.rmtree(work)

    failures = arena.each(count, attempt)
    noticed = count - len(unnoticed) - len(failures)
    return Seen(count, failures, f"{noticed} noticed, {len(unnoticed)} without effect")


def truncations(arena: Arena, count: int) -> Seen:
    """Cut one file of the newest checkpoint, then resume: one warning with both sizes, and the checkpoint before."""

    def attempt(index: int, draw: random.Random) -> None:
        work = arena.killed()
        path = draw.choice(sorted(saved(work)[-1].iterdir()))
        data = path.read_bytes()
        size = draw.randrange(len(data) - 1)  # without the final line break alone a JSON file is whole
        path.write_bytes(data[:size])
        done = start(work, "--resume").finish().expect(0)
        [(name, damage)] = _warnings(done)
        sizes = [] if path.name == "manifest.json" else [f"{size} bytes", f"{len(data)} bytes"]
        assert name == path.parent.name and all(word in damage for word in (path.name, *sizes)), damage
        assert_identical(work, arena.reference())
        shutil.rmtree(work)

    return Seen(count, arena.each(count, attempt))


def damaged_sets(arena: Arena, count: int) -> Seen:
    """Files missing, empty, all zero, replaced by a folder, one too many; the newest or both; 16 ways."""
    names = sorted(path.name for path in saved(arena.killed())[-1].iterdir())
    ways = [(name, way) for name in names for way in ("missing", "empty", "zero")]
    ways += [("", "extra"), ("", "hollow"), ("state.json", "folder"), ("", "all")]
    ways = spread(ways, count)

    def attempt(index: int, draw: random.Random) -> None:
        name, way = ways[index]
        work = arena.killed()
        for folder in saved(work) if way == "all" else saved(work)[-1:]:
            _damage(folder, name or names[0], way)
        before = {path: data for path, data in tree(work / "out").items() if "step-" in path}
        done = start(work, "--resume").finish()
        if way == "all":
            done.expect(6)
            assert len(_warnings(done)) == 2, done.err
            now = {path: data for path, data in tree(work / "out").items() if "step-" in path}
            assert now == before, "exit 6, and yet something was changed"
        else:
            done.expect(0)
            assert len(_warnings(done)) == 1, done.err
            assert_identical(work, arena.reference())
        shutil.rmtree(work)

    return Seen(len(ways), arena.each(len(ways), attempt))


def _damage(folder: Path, name: str, way: str) -> None:
    path = folder / name
    if way in ("missing", "folder", "all"):
        path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "empty":
        path.write_bytes(b"")
    elif way == "zero":
        path.write_bytes(bytes(path.stat().st_size))
    elif way == "extra":
        (folder / "note.txt").write_text("hello")
    elif way == "hollow":
        shutil.rmtree(folder)
        folder.mkdir()


def _warnings(done: Outcome) -> list[tuple[str, str]]:
    return PASSED_OVER.findall(done.err)
