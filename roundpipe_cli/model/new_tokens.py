"""New tokens: rows of embedding and LM head for words that a tokenizer gets, and rows that PEFT trains alone.

    tokenizer                 tables of the model
    0 .. first - 1  known     rows of the base's files
    first ..        new       their mean at the start; padding rows are taken first, then the tables grow

Full fine-tuning trains whole tables. LoRA trains the new rows alone, as PEFT's trainable tokens do: a matrix of K rows
takes the place of these rows of the table, of both where embedding and LM head are one.

Shapes: V rows of a table, H hidden size, K trained rows, N hidden states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.block_calls import replace_module
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.load import load_tokenizer
from roundpipe_cli.model.stored.tensors import base_name

MEAN_ROWS = 4096
"""Rows of a table that are added up at once, in float64."""
MOST_NAMED = 5
"""Tokens that a notice names."""
MOST_UNTRAINED_ROWS = 1024
"""Rows behind the base's that an adapter may lack: tables are grown to round numbers."""


@dataclass(frozen=True)
class NewTokens:
    """Tokens that a recipe adds to its model's tokenizer."""

    first: int
    """The tokenizer's first number without a token before them."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """The number of each."""
    known: tuple[str, ...] = ()
    """Words that the tokenizer had as tokens before."""

    @property
    def ids(self) -> list[int]:
        """Numbers of the tokens."""
        return list(self.numbers.values())

    def describe(self, rows: Any) -> Iterator[str]:
        """Notices on tokens that were there before, and on those that the rows to train on (`TokenizedRows`) lack."""
        seen = rows.ids_from(self.first) if self.numbers else ()
        lacking = [word for word, number in self.numbers.items() if number not in seen]
        if self.known:
            yield f"add_tokens: {_named(self.known)}: tokens of this model before, whose rows stay as they are"
        if lacking:
            yield f"add_tokens: the rows to train on never contain {_named(lacking)}: nothing is learned about these"


def _named(words: Sequence[str]) -> str:
    return ", ".join(words[:MOST_NAMED]) + (f" and {len(words) - MOST_NAMED} more" if words[MOST_NAMED:] else "")


def load_with_tokens(source: ModelSource, words: Sequence[str]) -> tuple[Any, NewTokens]:
    """The model's tokenizer with `words` as tokens: each always one token, as it is written, and no special one.

    Raises:
        RefusedError: see `load_tokenizer`; one of them is a piece of words.
    """
    tokenizer = load_tokenizer(source)
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    first = max(vocabulary.values()) + 1
    if not words:
        return tokenizer, NewTokens(first)
    from transformers import AddedToken

    if pieces := [word for word in words if word in vocabulary and word not in added]:
        raise RefusedError(
            "the tokenizer makes words of this piece already",
            where="add_tokens",
            found=", ".join(f"{word!r}, token {vocabulary[word]}" for word in pieces),
            expected="words that are no token yet",
            hint="delete it from add_tokens, or write it in another way, such as <word>",
        )
    new = [word for word in words if word not in added]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in new])
    numbers = {word: int(tokenizer.convert_tokens_to_ids(word)) for word in new}
    return tokenizer, NewTokens(first, numbers, tuple(word for word in words if word in added))


def grow_tables(model: nn.Module, ids: Collection[int], where: str = "add_tokens") -> None:
    """Give embedding and LM head a row for each of `ids`, and change the configuration to say so.

    Args:
        model: weights on the meta device or real; the new rows mean nothing.

    Raises:
        RefusedError: another table has a row for each token too, or an adapter has rows for few of them.
    """
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    num_rows, needed = len(table.weight), max(ids, default=-1) + 1
    if needed <= num_rows:
        return
    others = (one for one in model.modules() if isinstance(one, nn.Embedding) and one is not table)
    if any(one.num_embeddings == num_rows for one in others) or needed - num_rows > len(ids) + MOST_UNTRAINED_ROWS:
        raise RefusedError(
            "the tables of this model cannot grow to these tokens",
            where=where,
            found=f"token {needed - 1}",
            expected=f"tokens below {num_rows}, the rows of its embedding",
            hint="use fewer new tokens, or a model whose embedding has unused rows",
        )
    model.resize_token_embeddings(needed, mean_resizing=False)  # type: ignore[operator]


def with_new_rows(values: torch.Tensor, num_rows: int, new: NewTokens) -> torch.Tensor:
    """A table of `num_rows`, those of new tokens and behind the old ones being the mean of the known tokens' rows.

    Args:
        values: the base's table [V, ...], or a bias of the head.
    """
    known = values[: new.first]
    total = sum(part.double().sum(0) for part in known.split(MEAN_ROWS))
    mean = torch.as_tensor(total / len(known)).to(values.dtype)
    grown = torch.cat([values, mean.expand(max(0, num_rows - len(values)), *mean.shape)])
    grown[new.ids] = mean
    return grown


def table_names(model: nn.Module) -> set[str]:
    """Names of the parameters with a row for each token; adapters may be in the model."""
    ends = [get() for get in (model.get_input_embeddings, model.get_output_embeddings)]  # type: ignore[operator]
    own = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def row_owners(model: nn.Module) -> dict[str, Any]:
    """Path -> PEFT's layer that trains rows of a table; both of a table that embedding and LM head share."""
    return {path: module for path, module in model.named_modules() if hasattr(module, "trainable_tokens_delta")}


class TokenRows(nn.Module):
    """In place of PEFT's wrapper of a table: the rows `ids` are `rows` [K, H], and no copy of the table is made."""

    places: torch.Tensor

    def __init__(self, adapter: Any, name: str) -> None:
        super().__init__()
        self.table = adapter.base_layer
        self.rows = adapter.trainable_tokens_delta[name]
        self.ids = adapter.token_indices[name]
        self.register_buffer("places", torch.tensor(self.ids), persistent=False)
        self._disable_adapters = False

    @property
    def weight(self) -> torch.Tensor:
        """The table without the rows, for code that reads its type."""
        weight: torch.Tensor = self.table.weight
        return weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the LM head: hidden states [..., H] -> [..., V]."""
        logits: torch.Tensor = self.table(hidden)
        if self._disable_adapters:
            return logits
        return logits.index_copy_(-1, self.places, nn.functional.linear(hidden, self.rows))


def replace_row_owners(model: nn.Module, name: str) -> None:
    """Put `TokenRows` in the place of PEFT's wrappers; `name`: the adapter's."""
    for path, adapter in row_owners(model).items():
        replace_module(model, path.removesuffix(".token_adapter"), TokenRows(adapter, name))


@dataclass(frozen=True)
class TrainedRows:
    """Rows of a table that an adapter has."""

    num_rows: int
    """Rows of the whole table."""
    ids: list[int]
    rows: torch.Tensor
    """[K, H]."""

    def put_into(self, values: torch.Tensor) -> torch.Tensor:
        """A base's table with these rows; rows that neither of them has are the mean of the base's."""
        grown = with_new_rows(values, self.num_rows, NewTokens(len(values)))
        grown[self.ids] = self.rows.to(grown.dtype)
        return grown


def trained_rows(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, TrainedRows]:
    """Name of a table in the base -> its rows in an adapter; the same object for two tables that share them.

    Args:
        tensors: of the adapter, by parameter name of `model`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found, made = dict[str, TrainedRows](), dict[str, TrainedRows]()
    for path, owner in row_owners(model).items():
        ((adapter, ids),) = owner.token_indices.items()
        name = names[id(owner.trainable_tokens_delta[adapter])]
        made.setdefault(name, TrainedRows(len(owner.get_base_layer().weight), ids, tensors[name]))
        found[base_name(f"{path}.weight")] = made[name]
    return found
