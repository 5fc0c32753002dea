"""`scripts/torture`: see its first lines."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.torture.arena import Arena
from tests.torture.promises import PROMISES


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/torture", description="Break runs on purpose; print what held.")
    parser.add_argument("--only", metavar="NAME,...", help=f"of: {', '.join(p.name for p in PROMISES)}")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2)), help="tries at a time")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on time limits, for a busy machine")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where runs write (default: %(default)s)")
    for promise in PROMISES:
        count = {"type": int, "metavar": "N", "default": promise.release_count}
        parser.add_argument(f"--{promise.name}", **count, help=f"{promise.text} (%(default)s)")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [promise.name for promise in PROMISES]
    unknown = sorted(set(names) - {promise.name for promise in PROMISES})
    if unknown:
        parser.error(f"no such promise: {', '.join(unknown)}")
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=options.folder))
    arena = Arena(folder, options.jobs, options.patience, options.seed)
    print("| promise | test | figure | suite |\n|---|---|---|---:|", flush=True)
    print(f"date: {datetime.date.today().isoformat()}", file=sys.stderr)
    failed = False
    for promise in PROMISES:
        if promise.name in names and (lack := promise.missing()):
            print(f"left out {promise.name}: {lack}", file=sys.stderr)
        elif promise.name in names:
            started_s = time.monotonic()
            seen = promise.trial(arena, getattr(options, promise.name.replace("-", "_")))
            failed |= bool(seen.failures)
            cells = (promise.text, f"`scripts/torture --only {promise.name}`", seen.figure, str(promise.suite_count))
            print(f"| {' | '.join(cells)} |", flush=True)
            print(f"{promise.name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
            for text in seen.failures:
                print(f"FAILED {promise.name}: {text}", file=sys.stderr, flush=True)
    if failed:
        print(f"the folders of failed tries are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
