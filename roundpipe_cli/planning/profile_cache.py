"""Measured layer times, remembered by hardware and model, so that the next run plans its stages at once.

A file per key, JSON, seconds: {"layers": [[forward, recompute, backward], ...], "worker_speed": null or [1.0, ...]}.
What cannot be read or written is measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundpipe_cli.costs.cost import CostModel
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.files import cache_folder, read_regular, write_atomically

FORMAT = 2
"""Version of the files; raised when the times get another meaning."""

MAX_BYTES = 16 * 1024**2
MAX_S = 1e6


class ProfileCache:
    """The times of one model on one set of devices."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        """
        Args:
            key: everything that layer times depend on, in JSON's types.
        """
        self.damage: str | None = None
        """Message about a damaged file; set by `load`."""
        text = json.dumps([FORMAT, key], sort_keys=True)
        self.path: Path = cache_folder("profiles") / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self, base: CostModel) -> CostModel | None:
        """`base` with the remembered times in place of its own; None if there are none, or `damage` says why not."""
        try:
            found = json.loads(read_regular(self.path, MAX_BYTES))
            rows, speeds = found["layers"], found["worker_speed"]
            times = [tuple(None if value is None else float(value) for value in row) for row in rows]
            layers = tuple(
                replace(layer, forward_s=forward or 0.0, recompute_s=recompute, backward_s=backward or 0.0)
                for layer, (forward, recompute, backward) in zip(base.layers, times, strict=True)
            )
            speeds = None if speeds is None else tuple(float(speed) for speed in speeds)
            numbers = [value for row in times for value in row if value is not None]
            if not all(0 <= value < MAX_S for value in numbers) or not all(0 < speed < MAX_S for speed in speeds or ()):
                raise ValueError("a time or speed that cannot be")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, RefusedError) as error:
            reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
            self.damage = f"the remembered times in {self.path} cannot be used and are measured again: {reason}"
            return None
        return replace(base, name=f"{base.name}, measured by an earlier run", layers=layers, worker_speed=speeds)

    def save(self, costs: CostModel) -> None:
        """Remember measured times; a cache that cannot be written is no error."""
        rows = [[layer.forward_s, layer.recompute_s, layer.backward_s] for layer in costs.layers]
        with suppress(OSError, ResourceError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"layers": rows, "worker_speed": costs.worker_speed}).encode())
