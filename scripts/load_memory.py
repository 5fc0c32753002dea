"""Host memory while a checkpoint with one tensor per expert is loaded, in bfloat16 and in 4 bit.

    python scripts/load_memory.py                   6 GB of random bfloat16 weights, 8 GB of memory; minutes
    python scripts/load_memory.py --gigabytes 1     shorter

A child process does all that a run does before its first step, while its anonymous and shared memory is sampled. Prints
a table; exit code 1 where the peak is above the final store, one unquantised layer and 1.2 GB, or more than 10 % off
`roundpipe plan`'s figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MARGIN_BYTES = 1_200_000_000
PLAN_ERROR = 0.10
SAMPLE_S = 0.005
SIZES = {
    **{"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144},
}
BITS = {"bfloat16": [], "4 bit": ["load_in_4bit=true"]}
LOAD = """
import sys
from pathlib import Path
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.train.prepare.setup import prepare
setup = prepare(load_recipe(Path("recipe.yaml"), sys.argv[1:]), offline=True, tell=lambda event: None)
sizes = setup.store.num_bytes()
whole = [sum(place.num_elements for place in layout.places if not place.trainable) for layout in setup.store.layouts]
print(sum(sizes.values()), 2 * max(whole))
"""


def write_checkpoint(folder: Path, num_bytes: float, **sizes: int) -> None:
    """A Qwen3-MoE with one tensor per expert and one file per layer, of random numbers."""
    import torch
    from safetensors.torch import save_file

    from roundpipe_cli.model.load import build_skeleton
    from tests.support.e2e import make_tokenizer
    from tests.support.tiny import tiny_config

    sizes = {**SIZES, **sizes}
    per_layer = 2 * 3 * sizes["hidden_size"] * sizes["moe_intermediate_size"] * sizes["num_experts"]
    config = tiny_config("qwen3_moe", vocab_size=300, num_hidden_layers=max(1, round(num_bytes / per_layer)), **sizes)
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], torch.bfloat16
    folder.mkdir(parents=True)
    config.save_pretrained(str(folder))
    make_tokenizer().save_pretrained(str(folder))
    noise = torch.randn(1 << 22).bfloat16() * 0.02
    weight_map: dict[str, str] = {}
    layers: dict[str, dict[str, Any]] = {}
    for name, parameter in build_skeleton(config, torch.bfloat16).named_parameters():
        parts = name.split(".")
        layers.setdefault(parts[2] if parts[1] == "layers" else "rest", {})[name] = parameter.shape
    for layer, shapes in layers.items():
        tensors = {}
        for name, shape in shapes.items():
            for own, size in _per_expert(name, shape):
                count = -(-torch.Size(size).numel() // len(noise))
                start = len(tensors) * 4099 % len(noise)
                tensors[own] = noise.roll(start).repeat(count)[: torch.Size(size).numel()].view(size).clone()
        save_file(tensors, folder / f"layer-{layer}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"layer-{layer}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _per_expert(name: str, shape: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the checkpoint of a weight of the model."""
    if ".experts." not in name:
        return [(name, tuple(shape))]
    path = name.rpartition(".")[0]
    kinds = {"gate_proj": 2, "up_proj": 2} if name.endswith("gate_up_proj") else {"down_proj": 1}
    return [
        (f"{path}.{expert}.{kind}.weight", (shape[1] // parts, shape[2]))
        for expert in range(shape[0])
        for kind, parts in kinds.items()
    ]


def peak_while_loading(folder: Path, words: list[str]) -> tuple[int, int, int, float]:
    """(peak of anonymous and shared memory, store, largest layer unquantised, seconds) of a child that loads."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROUNDPIPE_CACHE": str(folder / "cache")}
    start_s = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LOAD, *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    peak = 0
    while child.poll() is None:
        peak = max(peak, _anonymous_bytes(child.pid))
        time.sleep(SAMPLE_S)
    if child.returncode or child.stdout is None:
        raise SystemExit(f"loading ended with exit code {child.returncode}")
    store, layer = map(int, child.stdout.read().split()[-2:])
    return peak, store, layer, time.monotonic() - start_s


def _anonymous_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def planned_bytes(folder: Path, words: list[str]) -> int:
    """`roundpipe plan`'s figure for the host's memory while the model is loaded."""
    command = [sys.executable, "-m", "roundpipe_cli", "plan", "recipe.yaml", "--json", *words]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    return int(json.loads(done.stdout)["predicted"]["loading_host_bytes"])


def measure(folder: Path, gigabytes: float, **sizes: int) -> bool:
    """Print the table; whether every peak is within its bounds."""
    from tests.support.e2e import write_recipe, write_rows

    write_checkpoint(folder / "model", gigabytes * 1e9, **sizes)
    write_rows(folder / "rows.jsonl")
    write_recipe(folder / "recipe.yaml", dtype="bfloat16", lora__target_modules=["q_proj", "v_proj"])
    files = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    print(f"checkpoint: {files / 1e9:.2f} GB")
    print("| weights | store | one layer | bound | peak | plan | seconds |\n|---|---|---|---|---|---|---|")
    good = True
    for name, words in BITS.items():
        peak, store, layer, seconds = peak_while_loading(folder, words)
        bound, planned = store + layer + MARGIN_BYTES, planned_bytes(folder, words)
        good = good and peak <= bound and abs(planned / peak - 1) <= PLAN_ERROR
        shown = " | ".join(f"{size / 1e9:.2f} GB" for size in (store, layer, bound, peak, planned))
        print(f"| {name} | {shown} | {seconds:.0f} |", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--folder", help="for the checkpoint, on a real disk; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        return 0 if measure(Path(name), args.gigabytes) else 1


if __name__ == "__main__":
    sys.exit(main())
