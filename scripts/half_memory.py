"""LoRA on a model of twice the memory: the same run without a limit and in a memory cgroup of half the model's bytes.

    python scripts/half_memory.py            3.8 GB of random bfloat16 weights; minutes; needs root and memory cgroups
    python scripts/half_memory.py --steps 2  shorter

`weights` is `auto` in both: the limited run must choose to map its base weights from disk. Prints a table; exit code 1
where a loss differs in any bit or the limited run does not finish.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def limited(num_bytes: int) -> tuple[Path, Callable[[], None]]:
    """A new memory cgroup, and what a child calls to enter it."""
    base, name = (V1, "memory.limit_in_bytes") if V1.is_dir() else (V2, "memory.max")
    group = base / f"roundpipe-{os.getpid()}"
    group.mkdir()
    (group / name).write_text(str(num_bytes))
    return group, lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None


def peak_bytes(group: Path) -> int:
    """Most bytes that the cgroup held, the page cache included."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).is_file():
            return int((group / name).read_text())
    return 0


def main() -> int:
    from tests.support.e2e import make_model, make_workspace, metrics

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=75)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", help="for model and runs, on a real disk; default: a temporary folder")
    args = parser.parse_args()
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        model = make_model(
            Path(name) / "made", dtype="bfloat16", num_attention_heads=12, num_key_value_heads=4, **sizes
        )
        folder = make_workspace(Path(name) / "work", model, dtype="bfloat16", max_steps=args.steps, save_steps=1000)
        model_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        print(f"model: {model_bytes / 1e9:.2f} GB of weights")
        print("| memory | exit code | weights mapped | seconds | most bytes held | losses |\n|---|---|---|---|---|---|")
        losses = []
        for limit in (None, model_bytes // 2):
            group, enter = (None, None) if limit is None else limited(limit)
            output, start_s = f"out{limit}", time.monotonic()
            command = [sys.executable, "-m", "roundpipe_cli", "finetune", "recipe.yaml", f"output_dir={output}"]
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "ROUNDPIPE_CACHE": str(folder / "cache")},
                preexec_fn=enter,
                capture_output=True,
                text=True,
            )
            seconds = time.monotonic() - start_s
            mapped = "are mapped from a file" in done.stdout + done.stderr
            held = "-" if group is None else f"{peak_bytes(group) / 1e9:.2f} GB"
            if group is not None:
                group.rmdir()
            if done.returncode:
                print(done.stderr[-2000:], file=sys.stderr)
            losses.append([row["loss_hex"] for row in metrics(folder / output)] if done.returncode == 0 else [output])
            of = "no limit" if limit is None else f"{limit / 1e9:.2f} GB"
            print(
                f"| {of} | {done.returncode} | {mapped} | {seconds:.0f} | {held} | {' '.join(losses[-1])} |", flush=True
            )
    return int(losses[0] != losses[1])


if __name__ == "__main__":
    sys.exit(main())
