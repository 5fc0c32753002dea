"""From a model's files to a configuration, a tokenizer and a skeleton without weights, GGUF files included."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from roundpipe_cli import __version__
from roundpipe_cli.cache import Remembered
from roundpipe_cli.errors import RefusedError, closest
from roundpipe_cli.library_names import version
from roundpipe_cli.model.attention import SINK_MODEL_TYPES, SINKS_NAME, register_sinks
from roundpipe_cli.model.files.quantization import stored_form
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import MAX_TOKENIZER_BYTES, check_small_files, refusing
from roundpipe_cli.model.router_loss import WANTED


def auto_class(config: Any) -> Any:
    """transformers' class for a configuration: AutoModelForImageTextToText where the files are such a model's, which
    holds the causal one, else AutoModelForCausalLM; None where there is no causal language model in it.

    A type that has both classes is what its configuration's `architectures` says, so that the names of the weights are
    those of the files.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__
        if not is_causal or whole in (getattr(config, "architectures", None) or ()):
            return AutoModelForImageTextToText
    return AutoModelForCausalLM if is_causal else None


# Building a model without its weights: parameters on the meta device, buffers real.

MANY = 1 << 20
"""`torch.empty`, `torch.zeros` and the like of at least this many elements give a tensor without memory."""


def build_without_weights(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` returns, with parameters on the meta device and real buffers.

    Large new tensors have no memory from the start: a layer of fused experts may be larger than all memory, before it
    would be moved to the meta device as a parameter. Where a buffer, or another tensor of a module, turns out to be
    one of them, the model is built again with memory for everything.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        with _NewOnMeta():
            model = make()
        others = (value for module in model.modules() for value in vars(module).values())
        if any(isinstance(one, torch.Tensor) and one.is_meta for one in chain(model.buffers(), others)):
            model = make()
    return model


class _NewOnMeta(TorchFunctionMode):
    """While active, new tensors of many elements are on the meta device, if no other one is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        makes = func in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
        if makes and kwargs.get("device") is None and _count(args, kwargs) >= MANY:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Elements that a call such as `torch.empty` asks for; 0 where it does not say so in whole numbers."""
    sizes = kwargs.get("size", args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args)
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0


# A GGUF file's configuration and tokenizer in Hugging Face's form, kept in the cache: converting takes seconds each.
#
# Files that are read back are checked like any model's. They are kept only if they read back unchanged; files that
# cannot be used are made again.

FOLDER = "converted"
HEAD_BYTES = 64 * 1024**2
"""So much of the file is hashed for its key: the metadata, which come first, of any model known."""
LIBRARIES = ("transformers", "tokenizers", "gguf")

Load = Callable[[ModelSource], Any]
Describe = Callable[[Any], Any]


def convert_once(source: ModelSource, kind: str, load: Load, describe: Describe) -> Any:
    """The result of `load` for a GGUF file, taken from the cache where an earlier run has left it.

    `load` takes the GGUF file, and the folder that `save_pretrained` wrote; `describe` gives all that matters of a
    loaded one, to be compared. Each `kind` of result has its own place.
    """
    try:
        kept, scratch = Remembered(FOLDER, _key(source, kind), MAX_TOKENIZER_BYTES), tempfile.TemporaryDirectory()
    except OSError:  # unreadable, as `load` reports; no place for files
        return load(source)
    with scratch as place:
        found = _load_files(kept.load(), Path(place, "kept"), source.name, load)
        if found is not None:
            return found
        found, made = load(source), Path(place, "made")
        with suppress(Exception):  # a full disk, for which tokenizers has no type; a kind that is not saved
            found.save_pretrained(str(made))
            files = {path.name: path.read_bytes().decode() for path in made.iterdir()}
            again = _load_files(files, Path(place, "again"), source.name, load)
            if again is not None and describe(again) == describe(found):
                kept.save(files)
        return found


def _key(source: ModelSource, kind: str) -> str:
    assert source.gguf_file is not None
    path = source.folder / source.gguf_file
    status = path.stat()
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
    return json.dumps([kind, head, status.st_size, status.st_mtime_ns, __version__, *map(version, LIBRARIES)])


def _load_files(files: Any, folder: Path, name: str, load: Load) -> Any | None:
    """The result of `load` for files, name -> text, in the new folder; None: there are none, or they cannot be used."""
    try:
        folder.mkdir()
        for own, text in files.items():
            if own != Path(own).name:
                raise ValueError(f"{own} leads out of the folder")
            (folder / own).write_bytes(text.encode())
        check_small_files(folder)
        return load(ModelSource(name, folder))
    except (AttributeError, OSError, TypeError, ValueError, RecursionError, RefusedError):
        return None


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
    values = lambda config: {**config.to_dict(), "_name_or_path": None}  # noqa: E731 - what is to be equal
    config = convert_once(source, "config", _load_config, values)
    config.name_or_path = str(source.folder)
    return config


def _load_config(source: ModelSource) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if source.gguf_file is None:
        model_type = str(source.config.get("model_type", ""))
        if model_type not in CONFIG_MAPPING:
            nearest = closest(model_type, list(CONFIG_MAPPING)) if model_type else None
            upgrade = "pip install -U transformers"
            raise RefusedError(
                "unknown architecture",
                where=f"{source.folder / 'config.json'}: model_type",
                found=repr(model_type),
                expected="a model type of the installed transformers",
                hint=f"did you mean {nearest}? else: {upgrade}" if nearest else upgrade,
            )
    with refusing("the model's configuration cannot be read", source.name):
        config = AutoConfig.from_pretrained(str(source.folder), trust_remote_code=False, **source.load_arguments)
    if source.gguf_file is None:
        stored_form(source.config, str(source.folder / "config.json"))  # refuses unreadable forms
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the files; what is made of them is another matter
    if auto_class(config) is None or is_encoder(config):
        classes = ", ".join(map(str, config.architectures or ())) or "no architecture named"
        raise RefusedError(
            "not a decoder-only language model",
            where="model",
            found=f"{source.name}: {config.model_type}, {classes}",
            expected="a causal language model, for instance Qwen3, Llama, Mistral, Gemma, GPT-OSS",
        )
    return config


def is_encoder(config: Any) -> bool:
    """Whether attention looks both ways, or there is an encoder beside the decoder."""
    if getattr(config, "is_encoder_decoder", False):
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return masked and not getattr(config, "is_decoder", False)


def switch_off(config: Any) -> list[str]:
    """Switch off in `config` what cannot be trained when blocks compute separately; returns notices for the user."""
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
    if config.model_type in SINK_MODEL_TYPES:
        register_sinks()
        config, attention = copy.deepcopy(config), {"attn_implementation": SINKS_NAME}
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
    tokenizer = convert_once(source, "tokenizer", _load_tokenizer, tokenizer_values)
    tokenizer.name_or_path = str(source.folder)
    end_as_the_model_does(tokenizer, load_config(source))
    return tokenizer


def tokenizer_values(tokenizer: Any) -> list[Any]:
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
    if source.gguf_file is not None and has_tokenizer(source.folder):  # transformers would mix the two
        with tempfile.TemporaryDirectory() as alone:
            (Path(alone) / source.gguf_file).symlink_to((source.folder / source.gguf_file).absolute())
            return _load_tokenizer(replace(source, folder=Path(alone)))
    with refusing("the model's tokenizer cannot be loaded", source.name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(str(source.folder), trust_remote_code=False, **source.load_arguments)


def end_as_the_model_does(tokenizer: Any, config: Any) -> None:
    """Correct a GGUF's tokenizer: transformers 5.17 takes the token that begins a text for the one that ends it."""
    end = config.get_text_config().eos_token_id
    if isinstance(end, int) and end != tokenizer.eos_token_id and 0 <= end < len(tokenizer):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
