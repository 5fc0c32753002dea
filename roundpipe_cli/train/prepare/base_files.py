"""The files of a base model that a whole result keeps, so that it answers as the base does: end tokens, sampling
defaults, and what other programs read beside the weights.

They are read when a run begins: hours later the base's folder may be gone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from roundpipe_cli.data.chat import ChatTemplate
from roundpipe_cli.data.row_chunks import find_template
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import MAX_TOKENIZER_BYTES, check_file, read_json
from roundpipe_cli.model.router_loss import WANTED

GENERATION_CONFIG = "generation_config.json"
OTHER_NAMES = ("tokenizer.model", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""llama.cpp's converter reads the first; vLLM reads the others of models that also take images. transformers' tokenizer
does not save them."""

ESCAPED = "backslashreplace"
"""How a model's half surrogates, which JSON may hold and UTF-8 may not, are written: as JSON writes them."""
TEMPLATE_LIMITS = Limits("the chat template", where="chat_template")


@dataclass(frozen=True)
class BaseFiles:
    """Files that a whole result has from its base model, beside weights, configuration and tokenizer."""

    config: Mapping[str, Any]
    """Entries of config.json that training changes, as they are to be in the result."""
    generation: Mapping[str, Any]
    """Content of generation_config.json."""
    others: Mapping[str, bytes]
    """Content of the files of `OTHER_NAMES` that the base has."""

    def ending_as_trained(self, tokenizer: Any) -> tuple[BaseFiles, list[str]]:
        """The same with every token that ends an answer in training among the end tokens, and those added, as text."""
        known = end_tokens(self.generation)
        added = [token for token in trained_ends(tokenizer) if token not in known]
        if not added:
            return self, []
        generation = {**self.generation, "eos_token_id": [*known, *added]}
        return replace(self, generation=generation), [str(tokenizer.convert_ids_to_tokens(token)) for token in added]

    def contents(self, config_json: bytes) -> dict[str, bytes]:
        """Name -> content of the files to write; `config_json`: config.json as transformers saves it after training."""
        config = json.loads(config_json) | dict(self.config)
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            part.pop(WANTED, None)
        return {"config.json": _to_json(config), GENERATION_CONFIG: _to_json(self.generation), **self.others}


def read_base_files(source: ModelSource, config: Any) -> BaseFiles:
    """The base's files.

    Args:
        config: as loaded; `build_skeleton` has not changed it yet.

    Raises:
        RefusedError: a file cannot be read.
    """
    changed = {"use_cache": True} if hasattr(config, "use_cache") else {}
    if hasattr(config, "output_router_logits"):
        changed["output_router_logits"] = bool(config.output_router_logits)
    if source.gguf_file is not None:
        return BaseFiles(changed, _generation_of(config.to_dict()), {})
    others = {}
    for path in (source.folder / name for name in OTHER_NAMES):
        if path.exists():
            check_file(path, MAX_TOKENIZER_BYTES)
            others[path.name] = path.read_bytes()
    if not (source.folder / GENERATION_CONFIG).exists():
        return BaseFiles(changed, _generation_of(copy.deepcopy(source.config)), others)
    generation = read_json(source.folder / GENERATION_CONFIG)
    if generation.get("use_cache") is False:  # a trace of training, which slows answers down and changes none
        generation["use_cache"] = True
    return BaseFiles(changed, generation, others)


def _generation_of(config: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json of a base that has none: what transformers makes of its config.json."""
    from transformers import GenerationConfig

    made: dict[str, Any] = json.loads(GenerationConfig.from_model_config(dict(config)).to_json_string(use_diff=True))
    for key in ("_from_model_config", "output_attentions", "output_hidden_states"):
        made.pop(key, None)
    return made | ({"use_cache": True} if "use_cache" in made else {})


def end_tokens(generation: Mapping[str, Any]) -> list[int]:
    """The end tokens of a generation_config.json, which has none, one or several."""
    value = generation.get("eos_token_id")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [token for token in values if isinstance(token, int)]


def trained_ends(tokenizer: Any) -> list[int]:
    """The tokens that end an answer in training: the end of the sequence, and the chat template's end of a turn."""
    ends, turn_end = [tokenizer.eos_token_id], None
    with suppress(RefusedError):  # a template that does not run ends no turn
        template = find_template(tokenizer, None, None)
        if template is not None:
            turn_end = run_limited(lambda: ChatTemplate(tokenizer, template).ends.end_of_turn, TEMPLATE_LIMITS)
    if turn_end is not None:
        ends.append(tokenizer.convert_tokens_to_ids(turn_end))
    return [token for token in dict.fromkeys(ends) if isinstance(token, int)]


def describe_added(tokens: list[str]) -> str:
    """A notice for tokens of `BaseFiles.ending_as_trained`."""
    names = " and ".join(tokens)
    return f"the result ends an answer at {names} too, as training does: the base's generation_config.json did not"


def put_template(tokenizer: Any, template: str) -> None:
    """Make `template` the one that the tokenizer uses; others that it has by name, for tools say, stay."""
    others = tokenizer.chat_template
    tokenizer.chat_template = {**others, "default": template} if isinstance(others, dict) else template


def _to_json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode(errors=ESCAPED)
