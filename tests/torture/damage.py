"""Damage done to the newest checkpoint: flipped bits, cuts, and files that are missing, empty, zeroed or too many."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

from tests.support.e2e import tree
from tests.torture.arena import Arena, Seen, assert_identical, saved, spread, start

PASSED_OVER = re.compile(r"checkpoint (step-\d+) is damaged and passed over: (.*)")


def damaged(arena: Arena, count: int) -> Seen:
    """Damage the newest checkpoint, or a file of all; then resume: it is noticed and passed over, or has no effect.
    Each way of a list once, then bits and cuts in turn."""
    names = sorted(path.name for path in saved(arena.killed())[-1].iterdir())
    ways = [(name, way) for name in names for way in ("missing", "empty", "zero")]
    ways += [("", "extra"), ("", "hollow"), ("state.json", "folder"), ("", "all")]
    ways = spread(ways, count) + [("", ("flip", "cut")[index % 2]) for index in range(count - len(ways))]
    unnoticed: list[str] = []

    def attempt(index: int, draw: random.Random) -> None:
        name, way = ways[index]
        name, work = name or draw.choice(names), arena.killed()
        for folder in saved(work) if way == "all" else saved(work)[-1:]:
            sizes = _damage(folder, name, way, draw)
        before = _checkpoints(work)
        done = start(work, "--resume").finish()
        told = PASSED_OVER.findall(done.err)
        if way == "all":
            done.expect(6)
            assert len(told) == 2, done.err
            assert _checkpoints(work) == before, "exit 6, and yet something was changed"
        elif way == "flip" and done.code == 6:  # a flipped version digit reads as a newer release: detection too
            assert name == "manifest.json" and "format version" in done.err, done.err
        else:
            done.expect(0)
            if not told:
                assert (name, way) == ("manifest.json", "flip"), f"{way} of {name} went unseen"
                unnoticed.append(name)
            elif way == "cut":
                [(folder_name, damage)] = told
                needles = [name] if name == "manifest.json" else [name, *sizes]
                assert folder_name == folder.name and all(word in damage for word in needles), damage
            assert len(told) <= 1, done.err
            assert_identical(work, arena.reference())
        shutil.rmtree(work)

    return Seen(len(ways), arena.each(len(ways), attempt), f"{len(unnoticed)} without effect")


def _checkpoints(work: Path) -> dict[str, bytes]:
    return {path: data for path, data in tree(work / "out").items() if "step-" in path}


def _damage(folder: Path, name: str, way: str, draw: random.Random) -> list[str]:
    """Sizes of the file, damaged and whole, as they are told."""
    path = folder / name
    data = path.read_bytes()
    found = bytearray(data)
    found[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    cut = data[: draw.randrange(len(data) - 1)]  # without the final line break alone a JSON file is whole
    contents = {"flip": bytes(found), "cut": cut, "empty": b"", "zero": bytes(len(data))}
    if way in contents:
        path.write_bytes(contents[way])
    elif way == "extra":
        (folder / "note.txt").write_text("hello")
    elif way == "hollow":
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        path.unlink()
    if way == "folder":
        path.mkdir()
    return [f"{len(one)} bytes" for one in (contents.get(way, b""), data)]
