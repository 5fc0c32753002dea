"""The code map of roundpipe_cli/README.md, from the modules' docstrings, and a picture of the rooms from their imports.

python scripts/code_map.py           # compare; exit 1 if map or picture are out of date
python scripts/code_map.py --write   # write both
"""

from __future__ import annotations

import argparse
import ast
import functools
import html
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "roundpipe_cli"
PAGE = PACKAGE / "README.md"
PICTURE = ROOT / "scripts" / "architecture.svg"
BEGIN, END = "<!-- begin: code map -->\n", "<!-- end: code map -->\n"

ONE_STEP = (
    ("cli/finetune.py", "parses the command line, shows lines or the dashboard"),
    (
        "train/finetune.py",
        "leads from the recipe to the result: output directory, machines, checkpoint to continue from",
    ),
    ("train/prepare/setup.py", "builds model, data, devices and the store of weights"),
    ("train/loop.py", "asks for the next batch, has a step computed, reports and saves it"),
    ("data/batching.py", "which rows make the step's microbatches"),
    ("train/batches.py", "their tokens and labels as tensors"),
    ("train/step_runner.py", "computes a step, again where memory or a device is lost, and begins its update"),
    ("planning/adaptive.py", "gives the step its schedule: the planner's cut, by the times measured so far"),
    ("schedule/program.py", "lowers the schedule to operations with transfers and dependencies"),
    ("engine/engine.py", "runs the program on the pool of workers"),
    ("engine/dispatch/dispatch.py", "threads of a worker: one issues compute, one carries each direction of its link"),
    ("engine/dispatch/decisions.py", "which operation may be issued, which chunk a link carries next"),
    ("engine/worker.py", "carries out one operation: a slot filled, a stage computed, sums sent"),
    ("engine/stage.py", "computes the layers of a stage for one microbatch"),
    (
        "engine/carrier.py",
        "what a stage hands to the next: boundary activations and gradients, on the host or the device",
    ),
    ("engine/layer.py", "forward, recompute and backward of one layer; its gradients go into sums"),
    ("model/head.py", "logits, loss and their gradient, a chunk of tokens at a time"),
    ("model/taps.py", "each parameter's gradient as soon as backward has it"),
    ("engine/slots.py", "device memory for the stage's weights and gradient sums"),
    ("engine/backends/cuda.py", "the device itself: memory, copies, events"),
    ("engine/gradients.py", "a layer's sum is complete on the host; its norm is taken"),
    ("train/optim/updater.py", "the update's own thread: waits for the sums, takes layer after layer"),
    ("train/optim/optimizer.py", "the update itself: float32 masters and moments by the optimizer's rule"),
    ("engine/weights.py", "the store takes the new weights, the next step uploads them"),
)
"""(file, its part) in the order in which one step of `roundpipe finetune` runs through them."""


ROOMS = {
    "recipe": "What the user wrote: keys, their types, the strict loader, other tools' files. No torch",
    "hub": "The Hugging Face hub: what a repository holds, and its files in the hub's own cache. No torch",
    "costs": "Time and bytes of each layer: models, hardware, memory. No torch",
    "schedule": "Who does what when: schedules as data, their lowering and their simulation. No torch",
    "planning": "Decisions: which stages a step gets, whether a run fits, how long it takes. No torch",
    "planning/search": "The search for the fastest partition",
    "kernels": "Operators of our own for what libraries launch in many pieces; everything computes without them",
    "model": "From a Hugging Face model to a list of layers with flat host buffers",
    "model/files": "Before any library opens a file: where it is, whether it may be opened, what it holds. No torch",
    "model/stored": "Readers of a model's files, one weight at a time, and weights that stay packed",
    "data": "From files to microbatches of token ids and labels",
    "engine": "Runs a schedule on devices; never sees a recipe",
    "engine/dispatch": "Who issues what when; PROTOCOL.md explains who waits for whom",
    "engine/backends": "One file for each kind of device behind one small interface",
    "train": "A run: the loop and what happens between two steps",
    "train/prepare": "From a recipe to the first step",
    "train/optim": "The optimizer on the host, its thread, and its state shared out over machines",
    "train/checkpoint": "Checkpoints, the output directory, and continuing from both",
    "train/result": "Results of a run: adapter or model, report, export, answers",
    "train/monitor": "What a run reports while it trains: metrics, events, trackers",
    "train/nodes": "Several machines",
    "dashboard": "Events to screens and pages: state folded from events, views of it. No torch, no engine",
    "cli": "Thin commands: parse, call, print",
}
"""Folder -> what its files are for."""


@functools.cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def story(path: Path) -> str:
    """First sentence of a module's docstring."""
    text = ast.get_docstring(tree_of(path)) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:")


def code_map() -> Iterator[str]:
    """Lines of the map: one step, then room by room."""
    yield "### One step, file by file"
    yield ""
    yield "| | file | its part |"
    yield "|---:|---|---|"
    for number, (name, part) in enumerate(ONE_STEP, 1):
        assert (PACKAGE / name).is_file(), name
        yield f"| {number} | [`{name}`]({name}) | {part} |"
    for folder in (PACKAGE, *sorted({path.parent for path in modules()} - {PACKAGE})):
        files = [path for path in modules() if path.parent == folder]
        name = folder.relative_to(PACKAGE).as_posix()
        yield ""
        yield "### Leaves: imported by every room" if folder == PACKAGE else f"### `{name}/`"
        yield ""
        if folder != PACKAGE:
            yield f"{ROOMS[name]}."
            yield ""
        yield "| file | story |"
        yield "|---|---|"
        for path in files:
            yield f"| [`{path.name}`]({path.relative_to(PACKAGE).as_posix()}) | {story(path).replace('|', '&#124;')} |"


ORDER = (
    ("cli",),
    ("train", "dashboard"),
    ("engine",),
    ("data", "model", "planning"),
    ("kernels", "schedule"),
    ("costs",),
    ("hub", "recipe"),
    ("leaves",),
)
"""Rooms of the picture, a row each, the importers above what they import."""


def room_of(module: str) -> str:
    """The room of a dotted module of ours."""
    name = module.split(".")[1]
    return name if (PACKAGE / name).is_dir() else "leaves"


def home_of(path: Path) -> str:
    """The room of a file of ours."""
    return path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "leaves"


def imports_between_rooms() -> dict[tuple[str, str], int]:
    """(room, room that it imports) -> number of pairs of files."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for path in modules():
        room = home_of(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("roundpipe_cli."):
                other = room_of(node.module or "")
                if other != room:
                    found.setdefault((room, other), set()).add((path.as_posix(), node.module or ""))
    return {pair: len(files) for pair, files in found.items()}


def picture() -> str:
    """The rooms as boxes, their imports as lines; the width of a line says how many files import."""
    width, row_height = 900, 92
    places = {
        room: (width * (column + 1) / (len(row) + 1), 50 + index * row_height)
        for index, row in enumerate(ORDER)
        for column, room in enumerate(row)
    }
    height = 10 + len(ORDER) * row_height
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<title>Rooms of the package: each imports rooms below it, and all import the leaves</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for (room, other), count in sorted(imports_between_rooms().items()):
        if room != "cli" and other != "leaves":
            lines.append(_arrow(places[room], places[other], count))
    for room, place in places.items():
        files = [path for path in modules() if home_of(path) == room]
        lines += _box(place, room, len(files), sum(path.read_text(encoding="utf-8").count("\n") for path in files))
    for text, y in (("the commands import every room", 84), ("every room imports the leaves", 50 + 6.5 * row_height)):
        lines.append(f'<text x="{width / 2:.0f}" y="{y:.0f}" font-size="12" text-anchor="middle">{text}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _arrow(start: tuple[float, float], end: tuple[float, float], count: int) -> str:
    """A bent line from below one box to above another."""
    (x1, y1), (x2, y2) = start, end
    bend = (x2 - x1) * 0.15 or 110
    path = f"M{x1:.0f} {y1 + 24:.0f} Q{(x1 + x2) / 2 + bend:.0f} {(y1 + y2) / 2:.0f} {x2:.0f} {y2 - 24:.0f}"
    stroke = f'stroke="#5b7fa6" stroke-opacity="0.6" stroke-width="{1 + count**0.5 / 2:.1f}"'
    return f'<path d="{path}" fill="none" {stroke}/>'


def _box(place: tuple[float, float], room: str, num_files: int, num_lines: int) -> list[str]:
    x, y = place
    figures = f"{num_files} files, {round(num_lines, -2):,} lines"
    rect = f'<rect x="{x - 78:.0f}" y="{y - 24:.0f}" width="156" height="48" rx="6"'
    text = f'<text x="{x:.0f}" text-anchor="middle"'
    return [
        f'{rect} fill="#eef3f8" stroke="#5b7fa6"/>',
        f'{text} y="{y - 3:.0f}" font-size="15" font-weight="bold">{html.escape(room)}</text>',
        f'{text} y="{y + 15:.0f}" font-size="12">{figures}</text>',
    ]


def updated(page: str) -> str:
    """`page` with its code map made anew."""
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    assert found and ended, f"{PAGE} lacks the markers of the code map"
    return f"{before}{BEGIN}\n{chr(10).join(code_map())}\n\n{END}{after}"


def out_of_date() -> bool:
    """Whether map or picture differ from what they would be now."""
    page = PAGE.read_text(encoding="utf-8")
    return updated(page) != page or not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != picture()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write map and picture")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        PICTURE.write_text(picture(), encoding="utf-8")
    elif out_of_date():
        print("code map or picture are out of date: python scripts/code_map.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
