"""Measures a machine for `plan`: rates of its devices, links and host, and a small run beside its prediction.

    python -m roundpipe_cli.train.measure products

prints the figures of one part as JSON. Each part has a process of its own, so that one that fails or hangs costs only
itself; `roundpipe doctor --measure` and `scripts/gpu_check` run them all. Workers are measured at once, as in a run.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_cli.cache import CACHE_VARIABLE
from roundpipe_cli.choices import OPTIMIZERS, PACKED_FORMATS
from roundpipe_cli.costs.hardware import NARROW, parse_hardware
from roundpipe_cli.costs.machine import host_memory, num_cores, processor_name
from roundpipe_cli.costs.measurement import write_measurement
from roundpipe_cli.costs.nvidia_smi import driver_version
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.base import Backend
from roundpipe_cli.engine.backends.cpu import CpuBackend
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
# What is measured, by `kind`: cpu, or cuda with its sizes. Simulated cards have a processor's sizes.
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
REPEATS, EACH_S, SLOW_S = 5, 0.06, 0.5
PRODUCTS = {
    "cpu": ((128, 576, 16), (128, 576, 576), (256, 576, 1536), (512, 2048, 2048), (128, 576, 49152)),
    "cuda": ((2048, 2048, 128), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 4096, 14336)),
}
"""(rows, inner, columns): from an adapter's to a large model's."""
ATTENTION = {
    "cpu": ((9, 128, 64), (9, 512, 64), (9, 2048, 64)),
    "cuda": ((32, 512, 128), (32, 2048, 128), (32, 8192, 128)),
}
"""(heads, tokens, width)"""
ELEMENTS = {"cpu": (2**14, 2**16, 2**18, 2**20, 2**22, 2**24), "cuda": (2**20, 2**22, 2**24, 2**27)}
PACKED_SHAPE = {"cpu": (1536, 576), "cuda": (14336, 4096)}
LINK_BYTES, ADDED_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}, 2**24
LAUNCHING_S, MAX_THREADS = 1.0, 8
MODEL = {
    "cpu": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
}
STEP = {"cpu": ("float32", 192), "cuda": ("bfloat16", 2048)}
"""Type and tokens of the small run."""
STEPS, COUNTED_STEPS, BLOCKS, PER_WORKER, VOCABULARY = 8, 4, 4, 4, 8192
PART_LIMIT_S = 300.0


def kind_of(names: Sequence[str]) -> str:
    """Whose sizes devices are measured with."""
    return names[0].partition(":")[0]


def _of_all(backends: Sequence[Backend], work: Callable[[Backend], Figures]) -> Figures:
    """Figures of all workers, which are at work at the same time."""

    def one(backend: Backend) -> Figures:
        with backend.worker_thread(), backend.compute():
            return work(backend)

    with ThreadPoolExecutor(len(backends)) as pool:
        return {"workers": list(pool.map(one, backends))}


def _seconds(backend: Backend, run: Callable[[], object]) -> float:
    """Median time of a call."""

    def timed(count: int) -> float:
        start = backend.mark()
        for _ in range(count):
            run()
        end = backend.mark()
        backend.synchronize()
        return max(1e-9, backend.seconds_between(start, end) / count)

    timed(1)  # kernels are chosen, memory is reserved
    if (once_s := timed(1)) > SLOW_S:
        return once_s
    count = max(1, min(10_000, int(EACH_S / once_s)))
    return statistics.median(timed(count) for _ in range(REPEATS))


def _types(backend: Backend) -> list[str]:
    lacks = backend.device.type != "cpu" and not cuda.has_bfloat16(backend.device.index or 0)
    return [name for name in DTYPES if not (lacks and name == "bfloat16")]


def _curve(backend: Backend, cases: Iterator[tuple[float, float, Callable[[], object]]]) -> list[tuple[float, float]]:
    """Rate by size, of (size, amount, call), up to the first call that is slow."""
    rows: list[tuple[float, float]] = []
    for size, amount, run in cases:
        taken_s = _seconds(backend, run)
        rows.append((size, amount / taken_s))
        if taken_s > SLOW_S:
            break
    return rows


def _products(backends: Sequence[Backend], kind: str) -> Figures:
    """FLOPs a second of matrix products, by type and size."""

    def cases(backend: Backend, name: str) -> Iterator[tuple[float, float, Callable[[], object]]]:
        for tokens, inner, columns in PRODUCTS[kind]:
            x, w = (torch.randn(n, inner, device=backend.device).to(DTYPES[name]) for n in (tokens, columns))
            flops = 2.0 * tokens * inner * columns
            yield flops, flops, partial(torch.mm, x, w.t())

    def work(backend: Backend, names: dict[str, str]) -> Figures:
        return {"products": {label: _curve(backend, cases(backend, name)) for label, name in names.items()}}

    found = _of_all(backends, lambda backend: work(backend, {name: name for name in _types(backend)}))
    if backends[0].device.type != "cpu":
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        narrow = _of_all(backends, partial(work, names={NARROW: "float16"}))
        for figures, own in zip(found["workers"], narrow["workers"], strict=True):
            figures["products"] |= own["products"]
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    return found


def _attention(backends: Sequence[Backend], kind: str) -> Figures:
    """FLOPs a second of causal attention, forward and backward, by type and size."""

    def both(query: torch.Tensor) -> None:
        found = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.autograd.grad(found, query, query.detach())

    def cases(backend: Backend, name: str) -> Iterator[tuple[float, float, Callable[[], object]]]:
        for heads, tokens, width in ATTENTION[kind]:
            query = torch.randn((1, heads, tokens, width), device=backend.device).to(DTYPES[name]).requires_grad_()
            flops = 2.0 * heads * width * tokens * tokens  # forward; backward has 2.5 times as many
            yield flops, 3.5 * flops, partial(both, query)

    def work(backend: Backend) -> Figures:
        return {"attention": {name: _curve(backend, cases(backend, name)) for name in _types(backend)}}

    return _of_all(backends, work)


def _memory(backends: Sequence[Backend], kind: str) -> Figures:
    """Bytes a second of an operator that reads two tensors and writes one, by size."""

    def cases(backend: Backend) -> Iterator[tuple[float, float, Callable[[], object]]]:
        for count in ELEMENTS[kind]:
            a, b = (torch.ones(count, device=backend.device) for _ in "ab")
            yield 12.0 * count, 12.0 * count, partial(torch.mul, a, b)

    return _of_all(backends, lambda backend: {"memory": _curve(backend, cases(backend))})


def _unpacking(backends: Sequence[Backend], kind: str) -> Figures:
    """Weights a second, for each packed form whose library is installed."""
    has_library, shape = import_bitsandbytes() is not None, torch.Size(PACKED_SHAPE[kind])

    def work(backend: Backend) -> Figures:
        rates = {}
        for name in [name for name, form in PACKED_FORMATS.items() if has_library or not form.needs_bitsandbytes]:
            packed = torch.zeros(packed_bytes(shape, name), dtype=torch.uint8)
            quantize(torch.randn(shape), packed, name)
            weight = PackedParameter.of(packed.to(backend.device), shape, DTYPES[_types(backend)[1]], name)
            rates[name] = shape.numel() / _seconds(backend, weight.dequantized)
        return {"unpacking": rates}

    return _of_all(backends, work)


def _links(backends: Sequence[Backend], kind: str) -> Figures:
    """Bytes a second, up, down and both at once, of all links together."""
    return {"workers": [asdict(speed) for speed in measure_links(backends, LINK_BYTES[kind])]}


def _host(backends: Sequence[Backend], kind: str) -> Figures:
    """Bytes a second of the host's memory: AdamW, and additions of gradients."""
    num_threads = updater_threads([str(backend.device) for backend in backends])
    updating = OPTIMIZERS["adamw"].update_bytes / measured_update_s(ADDED_ELEMENTS, num_threads)
    total, gradient, processor = torch.zeros(ADDED_ELEMENTS), torch.ones(ADDED_ELEMENTS), CpuBackend(num_threads)
    with processor.worker_thread():
        adding = 12 * ADDED_ELEMENTS / _seconds(processor, partial(total.add_, gradient))
    return {"host": {"update_bytes_per_s": updating, "adding_bytes_per_s": adding}}


class _Launches(TorchDispatchMode):
    """Counts operators that write memory."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


def _launches(backends: Sequence[Backend], kind: str) -> Figures:
    """Operators a second that threads issue together, a pass of a narrow model each in turn."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    narrow = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**narrow, num_hidden_layers=1, vocab_size=64)
    device, rates = backends[0].device, {}
    ids = torch.zeros((1, 4), dtype=torch.long, device=device)
    models = [AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(device) for _ in range(MAX_THREADS)]
    with backends[0].worker_thread(), _Launches() as each:  # type: ignore[no-untyped-call]
        models[0](input_ids=ids, labels=ids).loss.backward()
    for count in (count for count in (1, 2, 4, MAX_THREADS) if count <= max(len(backends), 2)):
        turns, go, passes = IssueTurns(), threading.Barrier(count), [0] * count

        def issue(index: int, turns: IssueTurns = turns, go: Any = go, passes: list[int] = passes) -> None:
            with backends[index % len(backends)].worker_thread():
                go.wait()
                end_s = time.perf_counter() + LAUNCHING_S
                while time.perf_counter() < end_s:
                    with turns.turn():
                        models[index](input_ids=ids, labels=ids).loss.backward()
                    passes[index] += 1

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(issue, range(count)))
        rates[str(count)] = sum(passes) * each.num / LAUNCHING_S
    return {"host": {"launches_per_s": rates}}


def write_random_model(folder: Path, config: Any, dtype: torch.dtype) -> None:
    """A model of transformers with random weights and a tokenizer of few words, in the library's own files."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"</s>": 0, "one": 1, "word": 2}, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>").save_pretrained(folder)


def write_run(folder: Path, config: Any, dtype: str, *, rows: int, tokens: int, **keys: Any) -> LoadedRecipe:
    """The recipe of a run whose steps have so many rows, all as long as they may be; its files in `folder`.

    Args:
        keys: of the recipe, in place of these or besides.
    """
    write_random_model(folder / "model", config, DTYPES[dtype])
    text = json.dumps({"text": "one word " * tokens})
    (folder / "rows.jsonl").write_text(f"{text}\n" * rows, encoding="utf-8")
    recipe = {
        **{"model": f"{folder}/model", "method": "lora", "dtype": dtype, "output_dir": f"{folder}/out"},
        **{"datasets": [{"path": f"{folder}/rows.jsonl", "type": "text"}], "max_seq_length": tokens},
        **{"packing": False, "long_rows": "truncate", "gradient_accumulation_steps": rows},
        **{"max_steps": STEPS, "save_steps": STEPS, **keys},
    }
    return load_text(json.dumps(recipe), f"{folder}/recipe.yaml")


def run_steps(loaded: LoadedRecipe) -> list[float]:
    """Seconds of the steps after those in which layers are timed, of a run without a memory of earlier ones."""
    taken: list[float] = []

    def tell(event: object) -> None:
        if isinstance(event, StepFinished):
            taken.append(event.step_s)

    os.environ[CACHE_VARIABLE] = str(loaded.path.parent / "cache")
    run_finetune(loaded, Start(offline=True), Reporting(tell), StopSignals())
    return taken[-COUNTED_STEPS:]


def step(names: Sequence[str], kind: str, machine: str) -> Figures:
    """A small LoRA run's step: measured, and predicted by the rates in the file `machine`."""
    from transformers import LlamaConfig

    dtype, tokens = STEP[kind]
    config = LlamaConfig(**MODEL[kind], num_hidden_layers=BLOCKS, vocab_size=VOCABULARY)
    keys: Figures = {"rows": PER_WORKER * len(names), "tokens": tokens, "pipeline": {"devices": [*names]}}
    with tempfile.TemporaryDirectory() as folder:
        loaded = write_run(Path(folder), config, dtype, **keys)
        predicted_s = make_plan(loaded, parse_hardware(machine)).step_s
        return {"step": {"predicted_s": predicted_s, "measured_s": statistics.median(run_steps(loaded))}}


PARTS: Mapping[str, Callable[[Sequence[Backend], str], Figures]] = {
    **{"products": _products, "attention": _attention, "memory": _memory, "unpacking": _unpacking},
    **{"links": _links, "launches": _launches, "host": _host},
}
STEP_PART = "step"


def identity(names: Sequence[str]) -> Figures:
    """Names of cards and versions, before anything is measured; none of the machine."""
    memory_bytes = host_memory().total_bytes
    workers: list[Figures] = []
    for name in names:
        index = int(name.partition(":")[2] or 0)
        is_cpu = name == "cpu"
        size = memory_bytes if is_cpu else cuda.total_bytes()[index]
        workers.append({"device": "cpu" if is_cpu else cuda.device_name(index), "memory_bytes": size})
    versions = {"driver": driver_version(), "torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d")}
    shared = {"processor": processor_name(), "cores": num_cores(), "host_memory_bytes": memory_bytes}
    return {**versions, **shared, "workers": workers, "host": {}, "step": {"predicted_s": 1.0, "measured_s": 1.0}}


def merge(content: Figures, found: Mapping[str, Any]) -> None:
    """Put the figures of a part into the measurement, those of workers to each."""
    for key, value in found.items():
        if key == "workers" and key in content:
            for target, figures in zip(content[key], value, strict=True):
                target.update(figures)
        else:
            content[key] = {**content.get(key, {}), **value} if isinstance(value, dict) else value


def measure_machine(path: Path, tell: Callable[[str], None]) -> Figures:
    """Run all parts, each in a process of its own, and write the measurement.

    Args:
        tell: called with a line before each part.

    Raises:
        RefusedError: a part failed.
    """
    content: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        rates = Path(folder) / "rates.json"
        for name in ("identity", *PARTS, STEP_PART):
            tell(name)
            if name == STEP_PART:
                write_measurement(rates, content)
            try:
                words = [sys.executable, "-m", __name__, name, str(rates)]
                done = subprocess.run(words, capture_output=True, text=True, timeout=PART_LIMIT_S, check=False)
                lines, why = done.stdout.splitlines(), (done.stderr.strip().splitlines() or ["no words"])[-1]
            except subprocess.TimeoutExpired:
                lines, why = [], f"no result within {PART_LIMIT_S:.0f} s"
            if not lines or done.returncode:
                hint = "another program may use the card or the memory; `roundpipe doctor` looks at both"
                raise RefusedError("this machine could not be measured", where=name, found=why, hint=hint)
            merge(content, json.loads(lines[-1]))
    write_measurement(path, content)
    return content


def main() -> None:
    """Print the figures of the part that the command line names."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    part, machine = sys.argv[1:]
    names = choose_devices("auto")[0]
    if part == "identity":
        found = identity(names)
    elif part == STEP_PART:
        found = step(names, kind_of(names), machine)
    else:
        found = PARTS[part](make_backends(names, threads_per_worker("auto", len(names))), kind_of(names))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
