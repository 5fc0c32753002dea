"""The oldest versions of libraries without a known hole that lets a model or checkpoint run code."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError

from packaging.version import InvalidVersion, Version

from roundpipe_cli.errors import Problem, RecipeError
from roundpipe_cli.library_names import version

FLOORS = {
    "torch": ("2.11", "2.10", "CVE-2025-32434, CVE-2026-24747"),
    "transformers": ("5.17", "5.3", "CVE-2026-4372, CVE-2026-5241, CVE-2026-1839"),
    "safetensors": ("0.8", "0.8", "files are not written atomically before"),
    "PyYAML": ("6", "6", "unsafe loaders by default before"),
    "Jinja2": ("3.1.6", "3.1.6", "ways out of the sandbox before: CVE-2025-27516"),
    "peft": ("0.21", "0", ""),
    "accelerate": ("1.10", "0", ""),
    "huggingface_hub": ("1.31", "0", ""),
}
"""Library -> the oldest version that will do, the oldest without a known hole, and the hole."""
EVAL_FLOORS = {"lm-eval": ("0.4.13", "0", "")}
"""Libraries of `eval` beside them, in the same form."""


def check_floors(floors: Mapping[str, tuple[str, str, str]] = FLOORS) -> None:
    """Raise a RecipeError (exit code 2) for libraries that are too old, with the reasons, before they are imported."""
    problems = []
    for name, (floor, safe, reason) in floors.items():
        found = _installed(name)
        if found is None or found < Version(floor):
            old = f"too old to be safe ({reason})" if found and found < Version(safe) else "too old for this release"
            problems.append(
                Problem(
                    f"{name} is {'missing' if found is None else old}",
                    found="not installed" if found is None else str(found),
                    expected=f"{floor} or later",
                    hint=f"pip install -U '{name}>={floor}'",
                )
            )
    if problems:
        raise RecipeError(problems)


def _installed(name: str) -> Version | None:
    try:
        return Version(version(name))
    except (PackageNotFoundError, InvalidVersion):
        return None
