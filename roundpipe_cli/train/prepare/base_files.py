"""The files of a base model that a result keeps in the form that they have there, changed only where training did.

    config.json              data type; rows and ties of the tables; no quantisation
    generation_config.json   end tokens of training
    the tokenizer's files    new tokens, chat template
    what others read         as it is: settings of processors

They are read when a run begins: hours later the base's folder may be gone. A base without such files, a GGUF file, gets
them in the form in which the installed transformers writes them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from roundpipe_cli.costs.models import SETTINGS
from roundpipe_cli.data.chat import ChatTemplate
from roundpipe_cli.data.templates import find_template
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import MAX_TOKENIZER_BYTES, TEMPLATES_FOLDER, check_file, read_json
from roundpipe_cli.model.load import load_tokenizer, tokenizer_values

GENERATION_CONFIG = "generation_config.json"
OTHER_NAMES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""vLLM reads these of models that also take images."""
TOKENIZER_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "tekken.json", "chat_template.jinja", "chat_template.json"),
)
"""Files that tokenizers of transformers read, beside the `vocab_files_names` of each class."""
_TOKENIZER, _TOKENIZER_CONFIG, _TOKENS = TOKENIZER_NAMES[0], TOKENIZER_NAMES[1], "added_tokens_decoder"
_TRAINED = ("vocab_size", "tie_word_embeddings")
_DTYPES = ("dtype", "torch_dtype")
"""Names of the data type in config.json: of transformers 5 and of 4, which both know the second."""

ESCAPED = "backslashreplace"
"""How a model's half surrogates, which JSON may hold and UTF-8 may not, are written: as JSON writes them."""
TEMPLATE_LIMITS = Limits("the chat template", where="chat_template")


@dataclass(frozen=True)
class BaseFiles:
    """Files that a result has from its base model, beside the weights."""

    config: Mapping[str, Any]
    """Content of config.json."""
    loaded: Mapping[str, Mapping[str, Any]]
    """Part of config.json that holds a configuration ("" is the whole) -> its type, and the values of it that training
    may change, as loaded."""
    generation: Mapping[str, Any]
    """Content of generation_config.json."""
    others: Mapping[str, bytes] = field(default_factory=dict)
    """Content of the files of `OTHER_NAMES` that the base has."""
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    """Content of the tokenizer's files by their paths below the folder; none before `with_tokenizer`."""

    def ending_as_trained(self, tokenizer: Any) -> tuple[BaseFiles, list[str]]:
        """The files with every token that ends an answer in training among the end tokens, and those added, as text."""
        known = end_tokens(self.generation)
        added = [token for token in trained_ends(tokenizer) if token not in known]
        if not added:
            return self, []
        generation = {**self.generation, "eos_token_id": [*known, *added]}
        return replace(self, generation=generation), [str(tokenizer.convert_ids_to_tokens(token)) for token in added]

    def with_tokenizer(self, source: ModelSource, tokenizer: Any, own: Path | None = None) -> BaseFiles:
        """The files with the tokenizer's: those of the base `source`, with the tokens and the chat template that
        `tokenizer` has beyond them.

        Where it is another one than the base's, they are those of the folder `own` that it was loaded from, or what
        transformers writes.
        """
        files = None if source.gguf_file is not None else _in_form_of(source, tokenizer)
        if files is None and own is not None:
            files = read_tokenizer_files(own, tokenizer)
        if files is None:
            with TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                files = read_tokenizer_files(Path(folder), tokenizer)
        return replace(self, tokenizer=files)

    def contents(self, model: Any, dtype: torch.dtype, *, packed: bool = False) -> dict[str, bytes]:
        """Name -> content of a whole result's files, but its tokenizer's; `dtype`: of most weights, unless `packed`."""
        config = self._trained_config(model, dtype, packed=packed)
        return {"config.json": _to_json(config), GENERATION_CONFIG: _to_json(self.generation), **self.others}

    def _trained_config(self, model: Any, dtype: torch.dtype, *, packed: bool) -> dict[str, Any]:
        config, trained, loaded = copy.deepcopy(dict(self.config)), _trained_values(model.config), self.loaded
        if trained[""]["model_type"] != loaded[""]["model_type"]:  # the language model alone
            (inner,) = loaded.keys() - {""}
            config, loaded = {**config.get(inner, {}), "model_type": trained[""]["model_type"]}, {"": loaded[inner]}
        for name, values in trained.items():
            part = config[name] if isinstance(config.get(name), dict) else config
            for key, old in loaded[name].items():
                if values[key] != old:  # also where older forms say it once more, outside
                    part[key] = values[key]
                    config.update({key: values[key]} if config.get(key) == old else {})
        if type(model).__name__ not in (config.get("architectures") or ()):
            config["architectures"] = [type(model).__name__]
        if not config.keys() & set(_DTYPES):
            config[_DTYPES[not str(config.get("transformers_version", "")).startswith("5.")]] = None
        for part in _dicts(config):
            for key in () if packed else SETTINGS:
                part.pop(key, None)
            part.update({key: str(dtype).removeprefix("torch.") for key in _DTYPES if key in part})
            if part.get("use_cache") is False:  # a trace of training, which slows answers down and changes none
                part["use_cache"] = True
        return config


def _trained_values(config: Any) -> dict[str, dict[str, Any]]:
    """`BaseFiles.loaded` of a configuration."""
    text = config.get_text_config()
    parts = {"": config, **{name: text for name, value in vars(config).items() if value is text}}
    return {
        name: {"model_type": part.model_type} | {_own_key(part, key): getattr(part, key, None) for key in _TRAINED}
        for name, part in parts.items()
    }


def _own_key(config: Any, key: str) -> str:
    return str((getattr(config, "attribute_map", None) or {}).get(key, key))


def _dicts(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A configuration as plain data, and those inside it."""
    yield values
    for value in values.values():
        if isinstance(value, dict):
            yield from _dicts(value)


def read_base_files(source: ModelSource, config: Any) -> BaseFiles:
    """The base's files, but for its tokenizer.

    Args:
        config: as loaded; `build_skeleton` has not changed it yet.

    Raises:
        RefusedError: a file cannot be read.
    """
    loaded = _trained_values(config)
    if source.gguf_file is not None:
        return BaseFiles(json.loads(config.to_json_string()), loaded, _generation_of(config.to_dict()))
    others = _read_files(source.folder, OTHER_NAMES)
    if not (source.folder / GENERATION_CONFIG).exists():
        return BaseFiles(source.config, loaded, _generation_of(copy.deepcopy(source.config)), others)
    generation = read_json(source.folder / GENERATION_CONFIG)
    if generation.get("use_cache") is False:  # as in config.json
        generation["use_cache"] = True
    return BaseFiles(source.config, loaded, generation, others)


def _read_files(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    found = {}
    for path in (folder / name for name in names):
        if path.exists():
            check_file(path, MAX_TOKENIZER_BYTES)
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


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


# The tokenizer's files.


def read_tokenizer_files(folder: Path, tokenizer: Any) -> dict[str, bytes]:
    """The files that `tokenizer` was loaded from, by their paths below `folder`.

    Raises:
        RefusedError: one of them is not safe to open.
    """
    named = (getattr(tokenizer, "vocab_files_names", None) or {}).values()
    templates = sorted(path.relative_to(folder).as_posix() for path in (folder / TEMPLATES_FOLDER).glob("*.jinja"))
    return _read_files(folder, (*dict.fromkeys((*TOKENIZER_NAMES, *map(str, named))), *templates))


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files by their paths below `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _in_form_of(source: ModelSource, tokenizer: Any) -> dict[str, bytes] | None:
    """The files of the base's tokenizer with what `tokenizer` has beyond it; None: it is another one."""
    try:
        base = load_tokenizer(source)
    except RefusedError:  # the base has none
        return None
    files, wanted = read_tokenizer_files(source.folder, base), tokenizer_values(tokenizer)
    if tokenizer_values(base) == wanted:
        return files
    known = base.added_tokens_decoder
    new = {n: one for n, one in tokenizer.added_tokens_decoder.items() if repr(known.get(n)) != repr(one)}
    if new:
        _add_tokens(files, _unlisted(files, known) | new)
    if tokenizer.chat_template != base.chat_template:
        template = tokenizer.chat_template
        _put_template(files, template.get("default") if isinstance(template, dict) else template)
    with TemporaryDirectory() as folder, suppress(RefusedError):
        write_files({**files, "config.json": _to_json(source.config)}, Path(folder))  # it says the tokenizer's class
        if tokenizer_values(load_tokenizer(ModelSource(source.name, Path(folder)))) == wanted:
            return files
    return None


def _unlisted(files: Mapping[str, bytes], known: Mapping[int, Any]) -> dict[int, Any]:
    """Tokens behind all that the base's files list, which the installed transformers adds by itself: new ones follow
    them."""
    values, config = (json.loads(files.get(name, b"{}")) for name in (_TOKENIZER, _TOKENIZER_CONFIG))
    listed = [entry["id"] for entry in values.get("added_tokens") or ()] + [int(n) for n in config.get(_TOKENS) or ()]
    return {number: token for number, token in known.items() if listed and number > max(listed)}


def _add_tokens(files: dict[str, bytes], new: Mapping[int, Any]) -> None:
    """Write tokens wherever the base's files list those that were added."""
    keys = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    entries = {number: {key: getattr(token, key) for key in keys} for number, token in sorted(new.items())}
    if _TOKENIZER in files:
        values = json.loads(files[_TOKENIZER])
        others = [entry for entry in values.get("added_tokens") or () if entry["id"] not in entries]
        values["added_tokens"] = others + [{"id": number, **entry} for number, entry in entries.items()]
        files[_TOKENIZER] = _to_json(values)
    config = json.loads(files.get(_TOKENIZER_CONFIG, b"{}"))
    if _TOKENS in config or _TOKENIZER not in files:
        config[_TOKENS] = {**config.get(_TOKENS, {}), **{str(number): entry for number, entry in entries.items()}}
        files[_TOKENIZER_CONFIG] = _to_json(config)
    if "added_tokens.json" in files:
        numbers = {entry["content"]: number for number, entry in entries.items()}
        files["added_tokens.json"] = _to_json(json.loads(files["added_tokens.json"]) | numbers)


def _put_template(files: dict[str, bytes], template: str | None) -> None:
    """Write a chat template wherever the base's files have one; where none has, into tokenizer_config.json."""
    alone, with_processor = "chat_template.jinja", "chat_template.json"
    config = json.loads(files.get(_TOKENIZER_CONFIG, b"{}"))
    known = config.get("chat_template")
    if alone in files:
        files[alone] = (template or "").encode(errors=ESCAPED)
    if with_processor in files:
        files[with_processor] = _to_json({**json.loads(files[with_processor]), "chat_template": template})
    if known is not None or alone not in files:
        others = [one for one in known if one.get("name") != "default"] if isinstance(known, list) else None
        whole = template if others is None else [{"name": "default", "template": template}, *others]
        files[_TOKENIZER_CONFIG] = _to_json({**config, "chat_template": whole})
