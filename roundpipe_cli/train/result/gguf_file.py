"""A GGUF file of whole weights, written by the `gguf` package; no clone of llama.cpp is needed.

    config.json      ->  metadata under llama.cpp's names
    tokenizer.json   ->  tokens with their kinds, merges, scores, the chat template
    *.safetensors    ->  tensors by the package's own table of names, one in memory at a time

Families differ in few ways: the name of their architecture, the order of the rows of queries and keys, whether norms
are written as they are or with 1 added, and experts, which are one tensor. Others are left to llama.cpp's converter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import TEMPORARY_PREFIX, disk_error, require_free_bytes, shared_mode
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.files.untrusted import read_json
from roundpipe_cli.model.load import load_config, load_tokenizer
from roundpipe_cli.model.stored.formats import find_stored
from roundpipe_cli.model.stored.tensors import OpenFiles, StoredTensor
from roundpipe_cli.train.prepare.base_files import GENERATION_CONFIG, end_tokens, trained_ends
from roundpipe_cli.train.result.gguf_types import GGUF_NAME


@dataclass(frozen=True)
class Family:
    """How llama.cpp lays out the models of one type."""

    architecture: str
    activation: str = "silu"
    """The only one that llama.cpp computes for it."""
    pairs_rows: bool = False
    """Rotary embeddings turn neighbouring rows of queries and keys; in transformers, the two halves of a head."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", pairs_rows=True),
    "mistral": Family("llama", pairs_rows=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3moe"),
    "gemma3_text": Family("gemma3", "gelu_pytorch_tanh", norm_offset=1.0),
    "phi3": Family("phi3"),
}
"""transformers' type of model -> its family."""
ROPE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "long_factor", "short_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
        *("beta_fast", "beta_slow"),
    ),
}
"""Type of rotary embeddings -> its settings that are written; what another one asks for is not."""
WITHOUT_EFFECT: Mapping[str, Any] = {"truncate": True, "partial_rotary_factor": 1.0}
"""Values of other settings with which llama.cpp computes."""
ROPE_TENSORS: Mapping[str, tuple[str, ...]] = {
    "llama3": ("rope_freqs",),
    "longrope": ("rope_factors_long", "rope_factors_short"),
}
"""Type of rotary embeddings -> tensors that divide their frequencies."""
GEMMA_PATTERN = 6
"""Every sixth layer attends to everything; llama.cpp has no key for another pattern."""
SPLITS: Mapping[str, str] = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "gpt-4o",
}
"""How a byte-level tokenizer splits text before it merges -> llama.cpp's name of it."""
BLANK = "\u2581"
"""A space, as sentencepiece writes it."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's kinds of tokens."""


def why_not_written(source: ModelSource, tokenizer: Any) -> str | None:
    """Why a model's GGUF file is not written here; None: it is.

    Args:
        source: the model, or the base that an adapter is merged into.

    Raises:
        RefusedError: its configuration cannot be loaded.
    """
    config = load_config(source)
    family = FAMILIES.get(config.model_type)
    if family is None:
        return f"models of the type {config.model_type}"
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if activation != family.activation:
        return f"{config.model_type} with the activation {activation}"
    for rope in _ropes(config):
        if why := _why_rope_not_written(rope, family):
            return why
    if getattr(config, "attention_bias", False) and family.architecture in ("qwen3", "qwen3moe", "gemma3"):
        return f"{config.model_type} with biases of its attention"
    if family.architecture == "qwen3moe" and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        return "qwen3_moe with blocks that have no experts"
    if family.architecture == "qwen3moe" and not config.norm_topk_prob:
        return "qwen3_moe whose experts' shares do not make 1"
    if family.architecture == "gemma3":
        sliding, whole_rope = (rope.get("rope_type", "default") for rope in _ropes(config))
        if sliding != "default" or whole_rope == "yarn":  # both would hold for all layers
            return f"gemma 3 with rotary embeddings of the types {sliding} and {whole_rope}"
        if getattr(config, "use_bidirectional_attention", False):
            return "gemma 3 with attention in both directions"
        whole = [kind == "full_attention" for kind in config.layer_types]
        if whole != [(number + 1) % GEMMA_PATTERN == 0 for number in range(len(whole))]:
            return "gemma 3 with another pattern of layers"
        if config.attn_logit_softcapping:
            return "gemma 3 with soft caps of its attention"
    return None if _tokenizer_kind(tokenizer) is not None else f"the tokenizer {type(tokenizer).__name__}"


def _why_rope_not_written(rope: Mapping[str, Any], family: Family) -> str | None:
    """Why these rotary embeddings have no place in the file; None: they have."""
    from gguf import MODEL_ARCH, MODEL_TENSOR, MODEL_TENSORS

    kind = rope.get("rope_type", "default")
    places = MODEL_TENSORS[MODEL_ARCH[family.architecture.upper()]]
    if kind not in ROPE_SETTINGS or any(MODEL_TENSOR[n.upper()] not in places for n in ROPE_TENSORS.get(kind, ())):
        return f"rotary embeddings of the type {kind}"
    written = {"rope_theta", "rope_type", "type", *ROPE_SETTINGS[kind]}
    if family.architecture == "phi3":
        written.add("partial_rotary_factor")
    others = {name: value for name, value in rope.items() if name not in written and value is not None}
    named = [f"{name}: {value}" for name, value in others.items() if value != WITHOUT_EFFECT.get(name)]
    return f"rotary embeddings of the type {kind} with {', '.join(named)}" if named else None


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Rotary embeddings of a model: one, or those of sliding and of other layers."""
    found = config.rope_parameters or {}
    return [found] if "rope_theta" in found else [found["sliding_attention"], found["full_attention"]]


def _main_rope(config: Any) -> Mapping[str, Any]:
    """Rotary embeddings of layers that attend to everything."""
    return _ropes(config)[-1]


def _tokenizer_kind(tokenizer: Any) -> tuple[str, str] | None:
    """llama.cpp's names of the kind of tokenizer and of how it splits text; None where it has neither."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    if data["model"]["type"] != "BPE":
        return None
    if data["model"].get("byte_fallback"):
        return "llama", "default"
    first = data.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers", [first])
    kinds = [part.get("type") for part in parts]
    if not parts or kinds[-1] != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    if parts[-1].get("use_regex", True):
        name = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}.get(tuple(kinds))
    else:
        pattern = parts[0].get("pattern", {}) if kinds[:-1] == ["Split"] else {}
        name = SPLITS.get(pattern.get("Regex", ""))
    return None if name is None else ("gpt2", name)


def write_gguf(folder: Path, type_name: str) -> tuple[Path, list[str]]:
    """Write the model in `folder` as a GGUF file beside it; returns the file, and notes about it.

    Args:
        type_name: of the matrices, one of `GGUF_TYPES`. Vectors are written in float32.

    Raises:
        RefusedError: a tensor or a token has no place in the file.
        ResourceError: disk full or failing.
    """
    from gguf import GGUFWriter, LlamaFileType

    source = ModelSource(str(folder), folder)
    config, tokenizer = load_config(source), load_tokenizer(source)
    target, temporary = folder / GGUF_NAME, folder / f"{TEMPORARY_PREFIX}{GGUF_NAME}"
    writer = GGUFWriter(temporary, FAMILIES[config.model_type].architecture)
    _add_tensors(writer, folder, config, type_name)
    (tensors,) = writer.tensors
    needed_bytes = sum(tensor.nbytes for tensor in tensors.values())
    require_free_bytes(folder, needed_bytes, "the GGUF file")
    writer.add_type("model")
    writer.add_name(folder.name)
    prefix = "ALL" if type_name == "f32" else "MOSTLY"
    writer.add_file_type(LlamaFileType[f"{prefix}_{type_name.upper()}"])
    writer.add_quantization_version(2)
    _add_sizes(writer, config)
    num_tokens = tensors["token_embd.weight"].shape[0]
    _add_tokenizer(writer, folder, tokenizer, num_tokens, as_spaces=config.model_type.startswith("gemma"))
    try:
        write_out(writer)
        temporary.chmod(shared_mode(0o666))
        temporary.rename(target)
    except OSError as error:
        raise disk_error(error, target, "the GGUF file", needed_bytes) from error
    finally:
        temporary.unlink(missing_ok=True)
    kinds = {one.dtype.name.lower() for name, one in tensors.items() if not _stays_whole(name, one.shape)}
    return target, _notes(config, kinds)


# Metadata.


def _add_sizes(writer: Any, config: Any) -> None:
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if experts := getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if window := _window(config):
        writer.add_sliding_window(window)
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base_swa(_ropes(config)[0]["rope_theta"])
        if config.query_pre_attn_scalar != head_dim:
            writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    elif window and len(set(getattr(config, "layer_types", None) or ())) > 1:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    _add_rope(writer, config, head_dim)


def _window(config: Any) -> int | None:
    """Tokens to which sliding layers attend; None: there are none."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None


def _add_rope(writer: Any, config: Any, head_dim: int) -> None:
    from gguf import RopeScalingType
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = _main_rope(config)
    kind = rope.get("rope_type", "default")
    writer.add_rope_freq_base(rope["rope_theta"])
    partial = rope.get("partial_rotary_factor") or 1.0
    if partial != 1 or config.model_type in ("llama", "mistral", "phi3"):
        writer.add_rope_dimension_count(int(head_dim * partial))
    before = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    factor = rope.get("factor") or (config.max_position_embeddings / before if before else 1.0)
    if kind in ("linear", "yarn", "longrope"):
        writer.add_rope_scaling_type(RopeScalingType[kind.upper()])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_factor(factor)
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(before)
        _, attention = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if kind == "longrope":
            writer.add_rope_scaling_attn_factors(attention)
        elif not math.isclose(attention, own := 0.1 * math.log(max(factor, 1.0)) + 1.0):
            writer.add_rope_scaling_attn_factors(attention / own)  # llama.cpp multiplies by its own factor of yarn
    if kind == "yarn" and rope.get("beta_fast"):
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if kind == "yarn" and rope.get("beta_slow"):
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _add_tokenizer(writer: Any, folder: Path, tokenizer: Any, num_tokens: int, *, as_spaces: bool) -> None:
    """Tokens, merges, special tokens and the chat template. Of the `num_tokens` rows of the embedding, those without
    a token get a name that no text has; `as_spaces`: tokens of several spaces are written as spaces."""
    kind = _tokenizer_kind(tokenizer)
    assert kind is not None, "why_not_written has looked"
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    tokens, kinds = [f"[PAD{number}]" for number in range(num_tokens)], [UNUSED] * num_tokens
    added = tokenizer.added_tokens_decoder
    for token, number in tokenizer.get_vocab().items():
        if number >= num_tokens:
            raise RefusedError(
                "the tokenizer has a token for which the model has no embedding",
                where=str(folder),
                found=f"{token!r}, number {number}",
                expected=f"numbers below {num_tokens}",
            )
        tokens[number], kinds[number] = token, NORMAL
        if number in added:
            kinds[number] = CONTROL if added[number].special else USER_DEFINED
            if as_spaces and kinds[number] == USER_DEFINED:
                tokens[number] = token.replace(BLANK, " ")
    writer.add_tokenizer_model(kind[0])
    writer.add_tokenizer_pre(kind[1])
    if kind[0] == "llama":
        for number, token in enumerate(tokens):
            if len(token) == 6 and token.startswith("<0x"):
                kinds[number] = BYTE
        if model.get("unk_token") in model["vocab"]:
            kinds[model["vocab"][model["unk_token"]]] = UNKNOWN
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(pairs):  # sentencepiece merges what gives the token of the highest score
            ranks.setdefault(left + right, rank)
        lowest = -float(len(pairs) + 1)
        scores = [-float(ranks[token]) if token in ranks else lowest for token in tokens]
        writer.add_token_scores([score if kinds[n] == NORMAL else 0.0 for n, score in enumerate(scores)])
        writer.add_add_space_prefix(tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).tokens[0] != "a")
    elif not pairs:
        writer.add_token_scores([0.0] * num_tokens)  # transformers looks for one of both
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(part.replace(" ", "\u0120") for part in pair) for pair in pairs])
    _add_special_tokens(writer, folder, tokenizer)


def _add_special_tokens(writer: Any, folder: Path, tokenizer: Any) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    generation = read_json(folder / GENERATION_CONFIG) if (folder / GENERATION_CONFIG).exists() else {}
    others = [end for end in (*trained_ends(tokenizer), *end_tokens(generation)) if end != tokenizer.eos_token_id]
    if others:
        writer.add_eot_token_id(others[0])
    numbers = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and numbers[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and numbers[-1] == tokenizer.eos_token_id)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


# Tensors.


def _add_tensors(writer: Any, folder: Path, config: Any, type_name: str) -> None:
    """Name the model's tensors, each read and quantised when its turn in the file comes."""
    from gguf import MODEL_ARCH, LazyNumpyTensor, get_tensor_name_map, quantize

    family = FAMILIES[config.model_type]
    names = get_tensor_name_map(MODEL_ARCH[family.architecture.upper()], config.num_hidden_layers)
    for name, values in _rope_factors(config):
        writer.add_tensor(name, values)
    for own_name, parts in _of_one_tensor(find_stored(folder, torch.float32)).items():
        if own_name.endswith(".inv_freq") or (own_name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        name = names.get_name(own_name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise RefusedError("a tensor has no name in GGUF files", where=str(folder), found=own_name)
        shape = (len(parts), *parts[0].shape) if _EXPERTS in own_name else tuple(parts[0].shape)
        kind = _kind_of(name, shape, type_name)
        meta = LazyNumpyTensor.meta_with_dtype_and_shape(np.float32, shape)
        values = LazyNumpyTensor(meta=meta, func=_reader(name, parts, family, config))
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)


_EXPERTS = ".experts."
"""In names of experts' weights; a number comes next."""


def _of_one_tensor(stored: Mapping[str, StoredTensor]) -> dict[str, list[StoredTensor]]:
    """Names without numbers of experts -> the weights that are one tensor: all experts' in their order, or one."""
    found: dict[str, dict[int, StoredTensor]] = {}
    for name, weight in stored.items():
        before, experts, after = name.partition(_EXPERTS)
        number, _, rest = after.partition(".")
        is_one = number.isdigit()
        found.setdefault(before + experts + rest if is_one else name, {})[int(number) if is_one else 0] = weight
    return {name: [parts[number] for number in sorted(parts)] for name, parts in found.items()}


def _stays_whole(name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 1 or name.endswith("ffn_gate_inp.weight")


def _kind_of(name: str, shape: tuple[int, ...], type_name: str) -> Any:
    """gguf's type of a tensor: vectors and routers stay whole, and so do rows that cannot be cut into blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if _stays_whole(name, shape):
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[type_name.upper()]
    if type_name.startswith(("q4", "q5")) and name in ("token_embd.weight", "output.weight"):
        kind = GGMLQuantizationType.Q8_0  # as llama.cpp's own tool keeps more bits of them
    return kind if shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.BF16


def _reader(name: str, parts: list[StoredTensor], family: Family, config: Any) -> Callable[[], npt.NDArray[Any]]:
    def read() -> npt.NDArray[Any]:
        with OpenFiles() as files:
            if "_exps." in name:
                values = torch.empty(len(parts), *parts[0].shape)
                for one, part in zip(values, parts, strict=True):
                    one.copy_(part.read(files))
                return values.numpy()
            values = parts[0].read(files).float()
            if family.norm_offset and name.endswith("norm.weight"):
                values = values + family.norm_offset
            array: npt.NDArray[Any] = in_rows_of(family, name, values, config).contiguous().clone().numpy()
            return array

    return read


def in_rows_of(family: Family, name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """The values of the tensor `name` with its rows in the family's order."""
    part = name.split(".")[-2]
    if not family.pairs_rows or part not in ("attn_q", "attn_k"):
        return values
    heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def write_out(writer: Any) -> None:
    """Write what a writer of the `gguf` package holds, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_factors(config: Any) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Tensors by which llama.cpp divides the frequencies of rotary embeddings."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = _main_rope(config)
    kind = rope.get("rope_type", "default")
    for name in ROPE_TENSORS.get(kind, ()):
        if kind == "longrope":
            yield f"{name}.weight", np.array(rope[f"{name.rpartition('_')[2]}_factor"], dtype=np.float32)
        else:
            slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
            plain = 1.0 / rope["rope_theta"] ** (torch.arange(len(slowed)).float() / len(slowed))
            yield f"{name}.weight", (plain / slowed).numpy()


# Notes.


def _notes(config: Any, kinds: set[str]) -> list[str]:
    """Notes on what the file cannot say; `kinds`: of its matrices."""
    notes = [f"matrices in the GGUF file are {' and '.join(sorted(kinds))}"] if len(kinds) > 1 else []
    window, family = _window(config), FAMILIES[config.model_type].architecture
    if family in ("llama", "qwen2", "qwen3", "qwen3moe") and window:
        notes.append(f"llama.cpp has no sliding window for this family: answers differ beyond {window} tokens")
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar is not None and scalar not in (config.head_dim, config.hidden_size / config.num_attention_heads):
        notes.append(f"attention.scale says query_pre_attn_scalar {scalar}: llama.cpp may take 1/sqrt(head_dim)")
    return notes
