"""The proof of a model before its run, kept in the cache; see `engine/parity.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from roundpipe_cli import __version__
from roundpipe_cli.cache import Remembered
from roundpipe_cli.engine.parity import MAX_PARAMETERS, ParityRefusedError, Proof, prove
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Notice, Phase, Tell
from roundpipe_cli.library_names import version
from roundpipe_cli.model.reduced import reduce_model, shrunk_configs
from roundpipe_cli.model.split import ModelSplit
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.watchdog import at_work

FORMAT = 6
"""Version of the files; raised when a proof gets another meaning."""
WORK = "comparing the engine with the model's own forward and backward"
LIBRARIES = ("torch", "transformers", "peft")

BuildModel = Callable[[Any], tuple[nn.Module, ModelSplit]]
"""Makes a trainable skeleton from a configuration, as the recipe says."""


def prove_once(model: nn.Module, split: ModelSplit, recipe: Recipe, build: BuildModel, tell: Tell) -> Proof:
    """Prove that the engine trains `model` as its own code does, unless that is known.

    Args:
        model: parameters on the meta device, made trainable; left as it is.
        build: makes a smaller one, of a model whose blocks are too large to try.

    Raises:
        ParityRefusedError: it does not.
    """
    kept = Remembered("proofs", _key(model, recipe))
    if (known := kept.load()) is not None:
        proof = Proof(**known)
    else:
        with at_work(WORK):
            proof = _prove_by_kernels(model, split, recipe, build, say=lambda text: tell(Phase(f"{WORK}: {text}")))
        kept.save(asdict(proof))
    if proof.unproven:
        tell(Notice(f"not proven that this model trains as its own code does: {proof.unproven}"))
    if proof.not_fused:
        tell(Notice(f"kernels: none of this model is fused, for it would be trained wrong: {proof.not_fused}"))
    return proof


def refuse_long_rows(longest: int, proof: Proof) -> None:
    """Raise a RefusedError for rows of more tokens than the model has positions."""
    if proof.last_position is not None and longest > proof.last_position:
        raise RefusedError(
            "rows are longer than this model has positions",
            where="max_seq_length",
            found=f"a row of {longest} tokens",
            expected=f"at most {proof.last_position} (max_position_embeddings of the model's configuration)",
            hint=f"max_seq_length={proof.last_position}",
        )


def _prove_by_kernels(
    model: nn.Module, split: ModelSplit, recipe: Recipe, build: BuildModel, *, say: Callable[[str], None]
) -> Proof:
    """The proof by the kernels that the recipe asks for, or by the model's own where fused ones compute otherwise."""
    ways = {"packing": recipe.packs, "chunks": recipe.pipeline.num_chunks > 1}
    not_fused = ""
    if recipe.kernels == "auto":
        try:
            return _prove(model, split, build, **ways, fused=True, tell=say)
        except ParityRefusedError as error:
            not_fused = f"{error.problems[0].where}: {error.problems[0].found}"
    return replace(_prove(model, split, build, **ways, fused=False, tell=say), not_fused=not_fused)


def _prove(model: nn.Module, split: ModelSplit, build: BuildModel, **how: Any) -> Proof:
    """The proof of the model itself, or of the first narrower one that works."""
    if reduce_model(model, split).num_parameters > MAX_PARAMETERS:
        for smaller, its_split in _narrower(model.config, build):
            proof = prove(smaller, its_split, **how)
            if not proof.unproven:
                return proof
    return prove(model, split, **how)


def _narrower(config: Any, build: BuildModel) -> Iterator[tuple[nn.Module, ModelSplit]]:
    with suppress(Exception):  # an odd configuration may fail in any way
        for smaller in shrunk_configs(config):
            try:
                built = build(smaller)
            except Exception:
                continue
            yield built


def _key(model: nn.Module, recipe: Recipe) -> str:
    """Everything that a proof depends on, as JSON: code, configuration, what is trained and how."""
    config: Any = model.config
    parts = {
        "format": FORMAT,
        "versions": [__version__, *(version(name) for name in LIBRARIES)],
        "config": {key: value for key, value in config.to_dict().items() if key != "_name_or_path"},
        "parameters": [[n, list(p.shape), str(p.dtype), p.requires_grad] for n, p in model.named_parameters()],
        "packing": recipe.packs,
        "chunks": recipe.pipeline.num_chunks > 1,
        "kernels": recipe.kernels,
        "lora": asdict(recipe.lora) if recipe.method == "lora" else None,
        "scaling": [found for module in model.modules() if isinstance(found := getattr(module, "scaling", None), dict)],
    }
    return json.dumps(parts, sort_keys=True, default=str)
