"""The picture of README.md: a simulated step of a shipped recipe, which says so inside the image.

python scripts/readme_picture.py           # compare; exit 1 if the picture is out of date
python scripts/readme_picture.py --write   # write scripts/readme_picture.svg
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from roundpipe_cli.cli.watch_demo import watch_demo

PICTURE = Path(__file__).with_suffix(".svg")
HARDWARE, RECIPE = "8x4090,host_memory_gib=128", "qwen3/32b_lora_8x24gb"
"""A row of README.md's table."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        watch_demo(HARDWARE, [RECIPE], PICTURE)
        PICTURE.chmod(0o644)
        return
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / PICTURE.name
        watch_demo(HARDWARE, [RECIPE], now)
        if now.read_bytes() != PICTURE.read_bytes():
            sys.exit(f"{PICTURE} is out of date: python {sys.argv[0]} --write")


if __name__ == "__main__":
    main()
