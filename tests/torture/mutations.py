"""Small damages to files: of their bytes, of the values in JSON, of their text, and of what kind of file they are."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ODD: list[Any] = [
    *("", "x", "12", "NaN", "x" * 5000, "\u0000\x1b[2J", "../../x", "/dev/zero", "\ud800", "x" * 300_000),
    *(0, 1, -1, 3, 2**31, 2**32 - 1, 2**62, -(2**62), 10**400, 2_000_000_000),
    *(0.0, -0.0, -0.5, 0.3, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    *(None, True, False, [], {}, [[]], [None], {"a": 1}, [2**62], ["x"], {"": {"": [1, "x"]}}, [0] * 20_000),
]
TEXTS = (  # values as text that readers of JSON or YAML take for different things, or for nothing
    *(b"1e400", b"-0", b"NaN", b"-Infinity", b"0x10", b"9" * 5000, b"010", b"1_000", b"12:30:00", b"~", b"*a", b"&a b"),
    *(b'"\\ud800"', b'"' + b"x" * 300_000 + b'"', b'"\xe2\x82"', b"\x00", b"", b"{{ 1 // 0 }}", b"${model}"),
    *(b"!!int x", b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" + b"0," * 100_000 + b"0]"),
)


def damage_bytes(path: Path, draw: random.Random) -> None:
    """One to three damages: bits, bytes, cuts, pieces repeated, removed or overwritten."""
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(data) + 1)
        length = draw.choice((1, 4, 8, 8, 64, 500))
        match draw.randrange(7):
            case 0 if data:
                data[min(place, len(data) - 1)] ^= 1 << draw.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = draw.randbytes(length)
            case 4:
                data[place : place + length] = draw.choice((b"\xff", b"\x00", b"\x7f")) * length
            case 5:
                data[place:place] = data[place : place + length]
            case _:
                data[place : place + 8] = draw.choice((2**32 - 1, 2**31, 2**62, 10**6)).to_bytes(8, "little")
    path.write_bytes(bytes(data))


def damage_text(path: Path, draw: random.Random) -> None:
    """One value of JSON or YAML replaced or given twice, or all of it in another encoding."""
    data = path.read_bytes()
    places = list(re.finditer(rb'(?P<key>"?[\w.-]+"?: ?)(?P<value>[^\n,{}\[\]]+)', data))
    match draw.randrange(8):
        case 0:
            data = data.decode("utf-8", errors="replace").encode(draw.choice(("utf-16", "utf-8-sig", "utf-32")))
        case 1:
            data = draw.choice((data * 2, data + b"}", data.replace(b"\n", b"\r"), b"# x\n" + data, b"---\n" + data))
        case 2 | 3 if places:
            place = draw.choice(places)
            pair = place["key"] + draw.choice(TEXTS)
            between = b", " if data.lstrip().startswith((b"{", b"[")) else b"\n"
            data = data[: place.end()] + between + pair + data[place.end() :]
        case _ if places:
            place = draw.choice(places)
            data = data[: place.start("value")] + draw.choice(TEXTS) + data[place.end("value") :]
    path.write_bytes(data)


KINDS = ("pipe", "socket", "loop", "zeros", "full", "outside", "folder", "empty", "sparse", "missing", "nowhere")


def odd_kind(path: Path, draw: random.Random) -> None:
    """Something else under a file's name."""
    path.unlink()
    match draw.choice(KINDS):
        case "pipe":
            os.mkfifo(path)
        case "socket":
            os.chdir(path.parent)  # a socket's path has 107 bytes
            with socket.socket(socket.AF_UNIX) as end:
                end.bind(path.name)
        case "loop":
            path.symlink_to(path.name)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "full":
            path.symlink_to("/dev/full")
        case "outside":
            path.symlink_to("/etc/hostname")
        case "folder":
            path.mkdir()
        case "empty":
            path.touch()
        case "sparse":
            path.touch()
            os.truncate(path, 2**40)
        case "nowhere":
            path.symlink_to("/nowhere/at/all")


def damage_json(path: Path, draw: random.Random) -> None:
    """One or two values replaced, removed or renamed; now and then bytes instead."""
    if draw.random() < 0.2:
        draw.choice((damage_bytes, damage_text))(path, draw)
        return
    document = json.loads(path.read_text())
    document = _damaged(document, draw)
    path.write_text(json.dumps(document))


def damage_lines(path: Path, draw: random.Random) -> None:
    """The same in some lines of a file of JSON lines."""
    if draw.random() < 0.2:
        draw.choice((damage_bytes, damage_text))(path, draw)
        return
    lines = path.read_text().splitlines()
    for index in draw.sample(range(len(lines)), min(len(lines), draw.choice((1, 2, len(lines))))):
        lines[index] = json.dumps(_damaged(json.loads(lines[index]), draw))
    path.write_text("\n".join(lines) + "\n")


def damage_one(folder: Path, draw: random.Random, *patterns: str) -> None:
    """One file that one of the patterns names, by its kind, now and then its bytes."""
    path = draw.choice(sorted(path for path in folder.glob(draw.choice(patterns)) if path.is_file()))
    way = {".json": damage_json, ".jsonl": damage_lines}.get(path.suffix, damage_text)
    (way if draw.random() < 0.8 else damage_bytes)(path, draw)


def damages(*patterns: str) -> Callable[[Path, random.Random], None]:
    """`damage_one` for these files; one that is named more often is chosen more often."""
    return lambda folder, draw: damage_one(folder, draw, *patterns)


def _damaged(document: Any, draw: random.Random) -> Any:
    for _ in range(draw.randint(1, 2)):
        places = list(_places(document))
        if not places or draw.random() < 0.02:
            return copy.deepcopy(draw.choice(ODD))
        holder, key = draw.choice(places)
        action = draw.random()
        if action < 0.1:
            del holder[key]
        elif action < 0.15 and isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
        elif action < 0.2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[key] = copy.deepcopy(draw.choice(ODD))
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)
