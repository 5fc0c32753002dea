"""Loaded once by the server that runs are forked from: what every run would otherwise load and build for itself."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pkgutil
import signal
import sys
import threading
from typing import Any

import roundpipe_cli
from roundpipe_cli.errors import RoundpipeError

MODULES = (
    *(module.name for module in pkgutil.walk_packages(roundpipe_cli.__path__, "roundpipe_cli.")),
    *("zoneinfo", "numpy.ctypeslib", "omegaconf", "rich.console", "rich.table", "rich._emoji_codes"),
    *("pydantic.main", "pydantic.json_schema", "pydantic.type_adapter", "pydantic.functional_validators"),
    "numpy.ma",
    *("transformers.models.llama.modeling_llama", "transformers.optimization", "transformers.trainer_pt_utils"),
    *("tests.support.e2e", "tests.torture.workers"),
)
"""All of the program, what it loads late, and where what a fork is to call is looked for. Those that a release of a
library lacks are left to the runs."""


def _state() -> tuple[object, ...]:
    """What no import of ours may change."""
    handler, initialized = str(signal.getsignal(signal.SIGINT)), torch.cuda.is_initialized()
    return threading.active_count(), handler, torch.get_num_threads(), dict(os.environ), initialized


torch: Any = importlib.import_module("torch")
compiler = torch.compile
importlib.import_module("roundpipe_cli.model.stored.packed_weights").import_bitsandbytes()  # as before PEFT everywhere
LEFT_COMPILER = torch.compile is compiler and "torch._inductor.compile_fx" not in sys.modules
"""bitsandbytes comes without a compiler: its import handed four functions to torch.compile, and so loaded it."""
for name in ("transformers", "datasets", "peft"):
    importlib.import_module(name)
BEFORE = _state()
with contextlib.redirect_stdout(io.StringIO()) as OUT, contextlib.redirect_stderr(OUT):
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
EFFECTS = BEFORE, _state(), OUT.getvalue(), LEFT_COMPILER
"""The state before and after all modules, what they printed, and whether no compiler was loaded."""
with contextlib.suppress(ImportError, AttributeError):  # a table that is built once a process, in a quarter of a second
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
with contextlib.suppress(RoundpipeError):  # reads each library's version, once a process
    importlib.import_module("roundpipe_cli.train.floors").check_floors()
with contextlib.suppress(ImportError, AttributeError), importlib.import_module("torch").device("meta"):
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    llama.LlamaForCausalLM(llama.LlamaConfig(num_hidden_layers=1))  # the first model of a process takes longer
gc.freeze()  # a collection in a fork would otherwise write to, and so copy, every page
