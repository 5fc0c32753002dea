"""Training files in the style of the tools' users, written for the tests of `roundpipe convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Example:
    """One file, and what must become of it."""

    tool: str
    text: str
    expected: dict[str, object]  # dotted recipe key -> value
    left_out: list[str]  # keys that must be listed, exactly these
    num_gpus: int = 1


_FILE = Path(__file__).parents[1] / "golden_data" / "convert_files.yaml"
EXAMPLES = {name: Example(**fields) for name, fields in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()}
