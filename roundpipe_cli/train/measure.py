"""Measures a machine for `plan`: rates of its devices, links and host, and a small run beside its prediction.

    echo '{}' | python -m roundpipe_cli.train.measure machine

prints the figures that it read with those of one part. Each part has a process of its own, so that one that fails or
hangs costs only itself. Workers are measured at once, as in a run.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_cli.cache import CACHE_VARIABLE
from roundpipe_cli.choices import OPTIMIZERS, PACKED_FORMATS, PackedName
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.machine import host_memory, num_cores, processor_name
from roundpipe_cli.costs.measurement import measurement_text
from roundpipe_cli.costs.nvidia_smi import driver_version
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.backends.turns import IssueTurns
from roundpipe_cli.engine.link_speed import measure_links
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import StepFinished
from roundpipe_cli.limited import PR_SET_PDEATHSIG
from roundpipe_cli.model.stored.packed_weights import PackedParameter, import_bitsandbytes, packed_bytes, quantize
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.recipe.load import LoadedRecipe, load_text
from roundpipe_cli.train.finetune import run_finetune
from roundpipe_cli.train.optim.optimizer import measured_update_s
from roundpipe_cli.train.prepare.devices import choose_devices, make_backends, threads_per_worker, updater_threads
from roundpipe_cli.train.signals import Reporting, Start, StopSignals

Figures = dict[str, Any]
Call = Callable[[], object]
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
REPEATS, EACH_S, MOST_S = 5, 0.06, 0.25
"""A call that would take longer than the last figure is left out."""
LINK_BYTES, UPDATED, LAUNCHING_S, MAX_THREADS = 2**27, 2**24, 1.0, 8
STEPS, BLOCKS, PER_WORKER, VOCABULARY = 8, 4, 4, 8192
FAST = 1e12
"""From so many operations a second on a larger model is the small run's."""
PART_LIMIT_S = 300.0


def _product(device: torch.device, dtype: str, *shape: int) -> Call:
    x, w = (torch.randn(count, shape[1], device=device).to(DTYPES[dtype]) for count in (shape[0], shape[2]))
    return partial(torch.mm, x, w.t())


def _attention(device: torch.device, dtype: str, *shape: int) -> Call:
    query = torch.randn((1, *shape), device=device).to(DTYPES[dtype]).requires_grad_()

    def both() -> None:
        found = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.autograd.grad(found, query, query.detach())

    return both


def _multiply(device: torch.device, dtype: str, count: int) -> Call:
    return partial(torch.mul, *(torch.ones(count, device=device) for _ in "ab"))


def _unpack(device: torch.device, form: PackedName, rows: int, columns: int) -> Call:
    shape = torch.Size((rows, columns))
    packed = torch.full((packed_bytes(shape, form),), 56, dtype=torch.uint8)  # 1 in E4M3
    if not PACKED_FORMATS[form].is_published:
        quantize(torch.randn(shape), packed, form)
    return PackedParameter.of(packed.to(device), shape, torch.float16, form).dequantized


_PRODUCTS = (
    ((128, 576, 16), (128, 576, 576), (512, 2048, 2048), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 4096, 14336)),
    lambda rows, inner, columns: 2.0 * rows * inner * columns,
    _product,
    1.0,
)
_ATTENTION = ((9, 128, 64), (9, 512, 64), (9, 2048, 64), (32, 2048, 128), (32, 8192, 128))
CURVES: Mapping[str, tuple[Sequence[Sequence[int]], Callable[..., float], Callable[..., Call], float]] = {
    "products": _PRODUCTS,
    "narrow_products": _PRODUCTS,
    "attention": (_ATTENTION, lambda heads, tokens, width: 2.0 * heads * width * tokens**2, _attention, 3.5),
    "memory": ([(4**power,) for power in range(7, 14)], lambda count: 12.0 * count, _multiply, 1.0),
    "unpacking": (((1536, 576), (14336, 4096)), lambda rows, columns: float(rows * columns), _unpack, 1.0),
}
"""By its name in the file: shapes, the size of one in the rate's unit, what makes a call (of a device, a type or packed
form, and a shape), and its work in that size (a backward of attention has 2.5 times the operations of its forward)."""


def _names(part: str, device: torch.device) -> list[str]:
    """Names of a part's curves on a device."""
    if part == "unpacking":
        has_library = import_bitsandbytes() is not None
        return [name for name, form in PACKED_FORMATS.items() if has_library or not form.needs_bitsandbytes]
    is_cpu = device.type == "cpu"
    has_bfloat16 = is_cpu or cuda.has_bfloat16(device.index or 0)
    types = [name for name in DTYPES if has_bfloat16 or name != "bfloat16"]
    return {"narrow_products": [] if is_cpu else ["float16"], "memory": ["float32"]}.get(part, types)


def _curves(part: str, backends: Sequence[Backend], known: Figures) -> Figures:
    """The curves of a part, on all devices at once."""
    shapes, size_of, make, work = CURVES[part]

    def measured(backend: Backend, names: Sequence[str]) -> Figures:
        found: Figures = {name: [] for name in names}
        with backend.worker_thread():
            for name, rows in found.items():
                rate = math.inf
                for shape in shapes:
                    size = size_of(*shape)
                    if work * size / rate < MOST_S:
                        rate = work * size / _seconds(backend, make(backend.device, name, *shape))
                        rows.append([size, rate])
        return {part: found}

    names = [_names(part, one.device) for one in backends]  # which imports libraries, in this thread
    with ThreadPoolExecutor(len(backends)) as pool:
        return {"workers": list(pool.map(measured, backends, names))}


def _seconds(backend: Backend, run: Call) -> float:
    """Median time of a call."""

    def timed(count: int) -> float:
        start = backend.mark()
        for _ in range(count):
            run()
        end = backend.mark()
        backend.synchronize()
        return max(1e-9, backend.seconds_between(start, end) / count)

    timed(1)  # kernels are chosen, memory is reserved
    count = max(1, min(10_000, int(EACH_S / timed(1))))
    return statistics.median(timed(count) for _ in range(REPEATS))


def _machine(backends: Sequence[Backend], known: Figures) -> Figures:
    """Names of cards and versions, none of the machine."""
    host_bytes, workers = host_memory().total_bytes, []
    for one in backends:
        index, is_cpu = one.device.index or 0, one.device.type == "cpu"
        name, size = ("cpu", host_bytes) if is_cpu else (cuda.device_name(index), cuda.total_bytes()[index])
        workers.append({"device": name, "memory_bytes": size})
    versions = {"driver": driver_version(), "torch": metadata.version("torch"), "date": time.strftime("%Y-%m-%d")}
    host = {"processor": processor_name(), "cores": num_cores(), "host_memory_bytes": host_bytes}
    return {**versions, **host, "workers": workers}


def _links(backends: Sequence[Backend], known: Figures) -> Figures:
    return {"workers": [{"link_bytes_per_s": one.both_bytes_per_s} for one in measure_links(backends, LINK_BYTES)]}


def _update(backends: Sequence[Backend], known: Figures) -> Figures:
    element_s = measured_update_s(UPDATED, updater_threads([str(one.device) for one in backends]))
    return {"update_bytes_per_s": OPTIMIZERS["adamw"].update_bytes / element_s}


ALLOCATIONS = ("empty", "new_empty")
NO_LAUNCHES = frozenset({"_unsafe_view", "resize_", "_has_same_storage_numel"})


def is_launch(operator: Any) -> bool:
    """Whether an operator of torch writes memory: no view does, and no allocation. What a plan counts."""
    name = operator._schema.name.partition("::")[2]
    return not (operator.is_view or name.startswith(ALLOCATIONS) or name in NO_LAUNCHES)


class _Launches(TorchDispatchMode):
    """Counts operators that write memory."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += is_launch(func)
        return func(*args, **(kwargs or {}))


def _launches(backends: Sequence[Backend], known: Figures) -> Figures:
    """Operators that threads issue together, a pass of a narrow model each in turn."""
    from transformers import AutoModelForCausalLM

    first, counts = backends[0], range(1, min(MAX_THREADS, max(2, len(backends))) + 1)
    ids, config = torch.zeros((1, 4), dtype=torch.long, device=first.device), _config(1, blocks=1, vocab_size=64)
    models = [AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(first.device) for _ in counts]

    def issue(model: nn.Module, turns: IssueTurns) -> int:
        passes, end_s = 0, time.perf_counter() + LAUNCHING_S
        with first.worker_thread():
            while time.perf_counter() < end_s:
                with turns.turn():
                    model(input_ids=ids, labels=ids).loss.backward()
                passes += 1
        return passes

    with first.worker_thread(), _Launches() as each:  # type: ignore[no-untyped-call]
        models[0](input_ids=ids, labels=ids).loss.backward()
    rates = []
    for count in counts:
        with ThreadPoolExecutor(count) as pool:
            passes = pool.map(partial(issue, turns=IssueTurns()), models[:count])
            rates.append([count, sum(passes) * each.num / LAUNCHING_S])
    return {"workers": [{"launches_per_s": rates}] * len(backends)}


def _config(heads: int, *, blocks: int, vocab_size: int) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64 * heads, "intermediate_size": 192 * heads, "vocab_size": vocab_size}
    return LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads, num_hidden_layers=blocks)


def write_run(folder: Path, config: Any, dtype: str, *, rows: int, tokens: int, **keys: Any) -> LoadedRecipe:
    """The recipe of a run of a model with random weights, whose steps have so many rows, all as long as they may be.

    Args:
        config: transformers' configuration of the model.
        keys: of the recipe, in place of these or besides.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"</s>": 0, "one": 1, "word": 2}, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>").save_pretrained(
        folder / "model"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], trust_remote_code=False)
        model.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text((json.dumps({"text": "one word " * tokens}) + "\n") * rows, encoding="utf-8")
    recipe = {
        **{"model": f"{folder}/model", "method": "lora", "dtype": dtype, "output_dir": f"{folder}/out"},
        **{"datasets": [{"path": f"{folder}/rows.jsonl", "type": "text"}], "max_seq_length": tokens},
        **{"packing": False, "long_rows": "truncate", "gradient_accumulation_steps": rows},
        **{"max_steps": STEPS, "save_steps": STEPS, **keys},
    }
    return load_text(json.dumps(recipe), f"{folder}/recipe.yaml")


def step_s_of_run(loaded: LoadedRecipe) -> float:
    """Median time of a run's last steps, layers having been timed, without a memory of earlier runs."""
    taken: list[float] = []

    def tell(event: object) -> None:
        taken.extend([event.step_s] if isinstance(event, StepFinished) else [])

    os.environ[CACHE_VARIABLE] = str(loaded.path.parent / "cache")
    run_finetune(loaded, Start(offline=True), Reporting(tell), StopSignals())
    return statistics.median(taken[-STEPS // 2 :])


def _small_run(backends: Sequence[Backend], known: Figures) -> Figures:
    """A LoRA run's step: measured, and predicted by the rates alone."""
    names, is_fast = [str(one.device) for one in backends], known["workers"][0]["products"]["float32"][-1][1] > FAST
    heads, tokens, dtype = (32, 2048, "bfloat16") if is_fast else (9, 192, "float32")
    config = _config(heads, blocks=BLOCKS, vocab_size=VOCABULARY)
    with tempfile.TemporaryDirectory() as name:
        folder, keys = Path(name), {"pipeline": {"devices": names}}
        loaded = write_run(folder, config, dtype, rows=PER_WORKER * len(names), tokens=tokens, **keys)
        (folder / "rates.json").write_text(measurement_text(known), encoding="utf-8")
        predicted_s = make_plan(loaded, parse_hardware(f"{folder}/rates.json")).step_s
        return {"workers": [{"slowdown": step_s_of_run(loaded) / predicted_s}] * len(names)}


PARTS: Mapping[str, Callable[[Sequence[Backend], Figures], Figures]] = {
    "machine": _machine,
    **{part: partial(_curves, part) for part in CURVES},
    **{"links": _links, "update": _update, "launches": _launches, "small_run": _small_run},
}
"""In order; each finds figures of the machine, and in `workers` those of each."""


def add_part(part: str, names: Sequence[str], known: Figures) -> Figures:
    """The figures of a part, which are put into those that are known."""
    threads, is_narrow = threads_per_worker("auto", len(names)), part == "narrow_products"
    found = PARTS[part](make_backends(names, threads, float16_accumulation=is_narrow), known)
    workers: list[Figures] = known.get("workers") or [{} for _ in names]
    for one, own in zip(workers, found.get("workers") or workers, strict=True):
        one.update(own)
    known |= {**found, "workers": workers}
    return found


def measure_machine(tell: Callable[[str], None]) -> Figures:
    """The figures of a `Measurement`, each part measured in a process of its own; nothing stays but these.

    Args:
        tell: called with a line before each part.

    Raises:
        RefusedError: a part failed, or another one measures.
    """
    known: Figures = {}
    alone, hint = socket.socket(socket.AF_UNIX), "another program may use the card or the memory: `roundpipe doctor`"
    with alone, tempfile.TemporaryDirectory(prefix="roundpipe-") as folder:
        try:
            alone.bind(f"\0{__name__}")  # a name of the whole machine, free when this process ends
        except OSError:
            raise RefusedError("another `roundpipe doctor --measure` is at work", hint="wait for its end") from None
        environment = {**os.environ, "TMPDIR": folder, CACHE_VARIABLE: folder}  # a part that is killed leaves nothing
        for part in PARTS:
            tell(part.replace("_", " "))
            words = [sys.executable, "-m", __name__, part]
            child = partial(subprocess.run, words, env=environment, capture_output=True, text=True)
            try:
                done = child(input=json.dumps(known), timeout=PART_LIMIT_S, check=True)
                known = json.loads(done.stdout.splitlines()[-1])
            except (subprocess.SubprocessError, ValueError, IndexError) as error:
                told = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
                found = (told or str(error)).splitlines()[-1]
                raise RefusedError("this machine could not be measured", where=part, found=found, hint=hint) from None
    return known


def main() -> None:
    """Print the figures with those of the part that the command line names."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    known = json.load(sys.stdin)
    add_part(sys.argv[1], choose_devices("auto")[0], known)
    print(json.dumps(known))


if __name__ == "__main__":
    main()
