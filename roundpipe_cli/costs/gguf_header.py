"""The metadata at the head of a GGUF file, read without any library and without its tensors.

Format: magic `GGUF`, version (u32), number of tensors and of metadata pairs (u64 each), then pairs of key, type and
value, all little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Arrays are skipped, only their
length is kept. Every length is checked against the file's size, so a damaged file cannot take memory or time.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import open_regular

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_PAIRS = 10_000
_MAX_TEXTS = 1 << 22
"""Largest length of one array; the largest vocabularies have 2^18 tokens, and a few times as many merges."""
_MAX_ELEMENTS = 1 << 48
_MAX_KEPT_STRING_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 16


def read_gguf_config(path: Path) -> dict[str, Any]:
    """A GGUF file's figures under the names of a Hugging Face config.json.

    Raises:
        RefusedError: the file cannot be read, is damaged, or is not a GGUF file.
    """
    try:
        with open_regular(path) as stream:
            metadata = _Header(stream, path.stat().st_size).metadata()
    except OSError as error:
        raise RefusedError(f"the model file cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, struct.error) as error:
        raise RefusedError(
            f"the model file is not a readable GGUF file: {error}",
            where=str(path),
            expected="a complete .gguf file of version 2 or 3",
        ) from None
    return _as_config(metadata)


class _Header:
    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._size = size

    def metadata(self) -> dict[str, Any]:
        """All pairs; an array's value is its length. Tied embeddings show as no tensor named `output.weight`."""
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, num_tensors, num_pairs = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in (2, 3) or num_pairs > _MAX_PAIRS or num_tensors > 10 * _MAX_PAIRS:
            raise ValueError(f"version {version} with {num_pairs} metadata pairs")
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            pairs[key] = self._value(self._number("<I"))
        tensors = [self._tensor() for _ in range(num_tensors)]
        pairs["has_output_matrix"] = any(name == "output.weight" for name, _ in tensors)
        pairs["num_elements"] = sum(count for _, count in tensors)
        return pairs

    def _tensor(self) -> tuple[str, int]:
        """Name and number of elements."""
        name = self._string()
        dimensions = self._number("<I")
        if dimensions > 8:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = [self._number("<Q") for _ in range(dimensions)]
        self._take(4 + 8)
        if math.prod(shape) > _MAX_ELEMENTS:
            raise ValueError(f"tensor {name} has {' x '.join(map(str, shape))[:80]} elements")
        return name, math.prod(shape)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        item, count = self._number("<I"), self._number("<Q")
        if item in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[item]))
        elif item == _STRING and count <= min(_MAX_TEXTS, self._size // 8):
            self._skip_texts(count)
        else:
            raise ValueError(f"an array of {count} values of type {item}")
        return count

    def _skip_texts(self, count: int) -> None:
        """Skip texts by reading only their lengths: a vocabulary has 10^5 of them."""
        length_at, block, place = struct.Struct("<Q").unpack_from, b"", 0
        for _ in range(count):
            if place + 8 > len(block):
                block, place = block[place:] + self._stream.read(_BLOCK_BYTES), 0
                if len(block) < 8:
                    raise ValueError("it ends in the middle of its header")
            place += 8 + length_at(block, place)[0]
            if place > len(block):
                self._skip(place - len(block))
                block, place = b"", 0
        self._stream.seek(place - len(block), 1)

    def _string(self) -> str:
        length = self._number("<Q")
        if length > _MAX_KEPT_STRING_BYTES * 64:
            raise ValueError(f"a text of {length} bytes")
        if length > _MAX_KEPT_STRING_BYTES:  # such as a chat template
            self._skip(length)
            return ""
        return self._take(length).decode("utf-8", errors="replace")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) != count:
            raise ValueError("it ends in the middle of its header")
        return data

    def _skip(self, count: int) -> None:
        if self._stream.tell() + count > self._size:
            raise ValueError("it ends in the middle of its header")
        self._stream.seek(count, 1)


def _as_config(metadata: dict[str, Any]) -> dict[str, Any]:
    model_type = str(metadata.get("general.architecture", "unknown"))
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "intermediate_size": "feed_forward_length",
        "moe_intermediate_size": "expert_feed_forward_length",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "sliding_window": "attention.sliding_window",
        "max_position_embeddings": "context_length",
    }
    config: dict[str, Any] = {ours: metadata.get(f"{model_type}.{theirs}") for ours, theirs in names.items()}
    config["vocab_size"] = metadata.get("tokenizer.ggml.tokens") or metadata.get(f"{model_type}.vocab_size")
    config["stored_parameters"] = metadata["num_elements"] or None
    config["tie_word_embeddings"] = not metadata["has_output_matrix"]
    config["model_type"] = {"qwen3moe": "qwen3_moe", "qwen2moe": "qwen2_moe", "gemma3": "gemma3_text"}.get(
        model_type, model_type.replace("-", "_")
    )
    return {key: value for key, value in config.items() if value is not None}
