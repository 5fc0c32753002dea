"""Figures that belong to the versions of the libraries for which they were counted."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version


def at_least(package: str, version: str) -> bool:
    """Whether the installed package is `version` or newer."""
    return Version(importlib.metadata.version(package)) >= Version(version)
