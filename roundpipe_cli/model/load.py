"""From a model's files to a configuration, a tokenizer and a skeleton without weights."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model import sink_attention
from roundpipe_cli.model.architectures import check_architecture, no_decoder, unknown_architecture
from roundpipe_cli.model.auto_class import auto_class, is_language_model
from roundpipe_cli.model.converted import convert_once
from roundpipe_cli.model.library_calls import refusing
from roundpipe_cli.model.quantized_files import stored_in_4bit
from roundpipe_cli.model.router_loss import WANTED
from roundpipe_cli.model.source import ModelSource
from roundpipe_cli.model.without_weights import build_without_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Files that a tokenizer is loaded from; a folder needs at least one of them."""
_SIZE = re.compile(r"^(n|num)_|_(size|dim|rank)$")
"""Keys of a configuration whose values are sizes."""


def load_config(source: ModelSource) -> Any:
    """The transformers configuration of a model.

    Raises:
        RefusedError: unknown architecture, or one that is no decoder.
    """
    if source.gguf_file is None:
        return _load_config(source)
    config = convert_once(source, "config", _load_config, _config_values)
    config.name_or_path = str(source.folder)
    return config


def _config_values(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


def _load_config(source: ModelSource) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if source.gguf_file is None:
        raw, file = source.config, str(source.folder / "config.json")
        check_architecture(raw, name=source.name, where=file)
        model_type = str(raw.get("model_type", ""))
        if model_type not in CONFIG_MAPPING:
            raise unknown_architecture(model_type, file, list(CONFIG_MAPPING))
    with refusing("the model's configuration cannot be read", source.name):
        config = AutoConfig.from_pretrained(str(source.folder), trust_remote_code=False, **source.load_arguments)
    stored_in_4bit(source)  # refuses unreadable forms
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the files; what is made of them is another matter
    if not is_language_model(config) or is_encoder(config):
        raise no_decoder(source.name, config.model_type, config.architectures)
    return config


def is_encoder(config: Any) -> bool:
    """Whether attention looks both ways, or there is an encoder beside the decoder."""
    if getattr(config, "is_encoder_decoder", False):
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return masked and not getattr(config, "is_decoder", False)


def switch_off(config: Any) -> list[str]:
    """Switch off in `config` what cannot be trained when blocks compute separately.

    Returns:
        notices for the user.
    """
    texts = []
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key in ("use_cache", "output_attentions", "output_hidden_states"):
            if getattr(part, key, False):
                setattr(part, key, False)
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False  # no block returns them; `model/router_loss.py` computes the loss
            setattr(config.get_text_config(), WANTED, True)
        for key in [key for key in vars(part) if key.endswith("layerdrop")]:
            if getattr(part, key):
                texts.append(
                    f"{key}: {getattr(part, key)} in the model's configuration is set to 0: no block is left out"
                )
                setattr(part, key, 0.0)
    return list(dict.fromkeys(texts))


def build_skeleton(config: Any, dtype: torch.dtype) -> nn.Module:
    """The causal language model of `config` with parameters on the meta device and real buffers, weights tied.

    Raises:
        RefusedError: transformers cannot build it.
    """
    switch_off(config)
    attention = {}
    if config.model_type in sink_attention.MODEL_TYPES:
        sink_attention.register()
        config, attention = copy.deepcopy(config), {"attn_implementation": sink_attention.NAME}
    elif getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        # transformers 5.17 would take torch's fused attention for Gemma 2, which leaves the soft cap out
        attention = {"attn_implementation": "eager"}
    where = str(getattr(config, "model_type", "model"))
    with refusing("transformers cannot build this model", where, _null_sizes(config)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from_config = auto_class(config).from_config
        make = functools.partial(from_config, config, dtype=dtype, trust_remote_code=False, **attention)
        model = build_without_weights(make)
        model.tie_weights()  # type: ignore[operator]
    return model


def _null_sizes(config: Any) -> str | None:
    """A hint for a configuration that leaves sizes to a class which has no default for them."""
    values = config.get_text_config().to_dict()
    names = [key for key, value in values.items() if value is None and _SIZE.search(key)]
    return f"its configuration gives no value for {', '.join(names)}" if names else None


def load_tokenizer(source: ModelSource) -> Any:
    """The model's own tokenizer.

    Raises:
        RefusedError: there is none that loads.
    """
    if source.gguf_file is None:
        return _load_tokenizer(source)
    tokenizer = convert_once(source, "tokenizer", _load_tokenizer, _tokenizer_values)
    tokenizer.name_or_path = str(source.folder)
    end_as_the_model_does(tokenizer, load_config(source))
    return tokenizer


def _tokenizer_values(tokenizer: Any) -> list[Any]:
    """Everything that decides the tokens of a text and the text of tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = sorted((number, repr(token)) for number, token in tokenizer.added_tokens_decoder.items())
    names = ("special_tokens_map", "chat_template", "padding_side", "truncation_side", "model_max_length")
    others = [getattr(tokenizer, name, None) for name in (*names, "clean_up_tokenization_spaces")]
    vocabulary = backend.to_str() if backend is not None else tokenizer.get_vocab()
    return [type(tokenizer).__name__, vocabulary, added, *others]


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the files of a tokenizer."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def _load_tokenizer(source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    if source.gguf_file is None and not has_tokenizer(source.folder):
        raise RefusedError(
            "the model folder has no tokenizer",
            where=str(source.folder),
            expected=f"one of {', '.join(TOKENIZER_FILES)}",
            hint="copy the tokenizer's files from the model that this one was made of",
        )
    with refusing("the model's tokenizer cannot be loaded", source.name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(str(source.folder), trust_remote_code=False, **source.load_arguments)


def end_as_the_model_does(tokenizer: Any, config: Any) -> None:
    """Correct a GGUF's tokenizer: transformers 5.17 takes the token that begins a text for the one that ends it."""
    end = config.get_text_config().eos_token_id
    if isinstance(end, int) and end != tokenizer.eos_token_id and 0 <= end < len(tokenizer):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
