"""RoundPipe CLI: fine-tune language models larger than your GPUs, from one YAML recipe."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from roundpipe_cli.cli.from_python import FinetuneResult as FinetuneResult
    from roundpipe_cli.cli.from_python import PlanResult as PlanResult
    from roundpipe_cli.cli.from_python import finetune as finetune
    from roundpipe_cli.cli.from_python import plan as plan
else:

    def __getattr__(name: str) -> object:
        """The door for programs, imported when it is asked for: importing the package does nothing."""
        if name not in ("FinetuneResult", "PlanResult", "finetune", "plan"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module("roundpipe_cli.cli.from_python"), name)
