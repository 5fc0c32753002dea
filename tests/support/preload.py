"""Loaded once by the server that runs are forked from: what every run would otherwise load and build for itself."""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

import roundpipe_cli
from roundpipe_cli.errors import RoundpipeError

MODULES = (
    *(module.name for module in pkgutil.walk_packages(roundpipe_cli.__path__, "roundpipe_cli.")),
    *("peft", "zoneinfo", "numpy.ctypeslib", "omegaconf", "rich.console", "rich.table", "rich._emoji_codes"),
    *("pydantic.main", "pydantic.json_schema", "pydantic.type_adapter", "pydantic.functional_validators"),
    "numpy.ma",
    *("transformers.models.llama.modeling_llama", "transformers.optimization", "transformers.trainer_pt_utils"),
    *("tests.support.e2e", "tests.torture.workers"),
)
"""All of the program, what it loads late, and where what a fork is to call is looked for. Those that a release of a
library lacks are left to the runs."""

importlib.import_module(
    "roundpipe_cli.model.stored.packed_weights"
).import_bitsandbytes()  # before PEFT does, and without a hub kernel
for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(ImportError, AttributeError):  # a table that is built once a process, in a quarter of a second
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
with contextlib.suppress(RoundpipeError):  # reads each library's version, once a process
    importlib.import_module("roundpipe_cli.train.floors").check_floors()
with contextlib.suppress(ImportError, AttributeError), importlib.import_module("torch").device("meta"):
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    llama.LlamaForCausalLM(llama.LlamaConfig(num_hidden_layers=1))  # the first model of a process takes longer
gc.freeze()  # a collection in a fork would otherwise write to, and so copy, every page
