"""RoundPipe CLI: fine-tune language models larger than your GPUs, from one YAML recipe."""

__version__ = "0.1.0"
