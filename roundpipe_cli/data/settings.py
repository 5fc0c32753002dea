"""Settings for reading data, as plain arguments named like the recipe's keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from roundpipe_cli.choices import EXAMPLES, ExampleKind, ExampleName
from roundpipe_cli.errors import RoundpipeError
from roundpipe_cli.recipe.schema import DatasetConfig


@dataclass(frozen=True)
class DatasetSpec(DatasetConfig):
    """One entry of the recipe's `datasets`, with what its objective has a row hold."""

    path: str
    example: ExampleName = "answer"
    """Content of a row."""

    @property
    def rows(self) -> ExampleKind:
        """Content of a row, as the table has it."""
        return EXAMPLES[self.example]


def spec_of(entry: DatasetConfig, example: ExampleName) -> DatasetSpec:
    """An entry of a recipe, and what its objective has a row hold."""
    own: dict[str, Any] = {**vars(entry), "example": example}
    if EXAMPLES[example].figure == "label":  # of the last answer; what stands before it is its prompt
        own["turns_to_train"] = "last"
    return DatasetSpec(**own)


@contextmanager
def errors_of(key: str) -> Iterator[None]:
    """Errors of `datasets` name `key`, which has the same form."""
    try:
        yield
    except RoundpipeError as error:
        wheres = [re.sub(r"^datasets\b", key, one.where) if one.where else None for one in error.problems]
        error.problems = tuple(replace(one, where=where) for one, where in zip(error.problems, wheres, strict=True))
        raise


@dataclass(frozen=True)
class DataSettings:
    """Everything that decides which tokens are trained, in which order of rows they are read."""

    datasets: tuple[DatasetSpec, ...]
    max_seq_length: int
    """Tokens of the longest row that is kept whole."""
    train_on_inputs: bool = False
    long_rows: Literal["error", "drop", "truncate", "split"] = "truncate"
    long_rows_overlap: int = 0
    """Tokens that a sequence repeats of the one before, below `max_seq_length`; read where rows are split."""
    on_bad_row: Literal["error", "skip"] = "error"
    shuffle: bool = True
    """Read by `BatchSampler`'s caller; building a dataset keeps the order of the files."""
    seed: int = 0
    folder: Path | None = None
    """The recipe's folder: relative paths are tried from the working directory first, then from here."""
    offline: bool = False
    chat_template: str | None = None
    """A file or the text of a template in place of the tokenizer's own."""
    chat_template_kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Values of variables that the template reads."""
