"""Settings for reading data, as plain arguments named like the recipe's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from roundpipe_cli.choices import EXAMPLES, ExampleKind, ExampleName, RowRole, RowType

AlpacaJoin = Literal["blank_line", "newline"]


@dataclass(frozen=True)
class TrainRules:
    """Parts of a conversation that are trained; named like a dataset's keys in the recipe."""

    roles_to_train: tuple[RowRole, ...] = ("assistant",)
    turns_to_train: Literal["all", "last"] = "all"
    train_on_eos: Literal["turn", "last", "all", "none"] = "turn"
    thoughts: Literal["train", "mask", "drop"] = "train"


@dataclass(frozen=True)
class DatasetSpec:
    """One entry of the recipe's `datasets`."""

    path: str
    """A file, a glob of files, a folder, or the id of a dataset on the hub."""
    type: RowType | Literal["auto"] = "auto"
    split: str = "train"
    """Name of the split, with an optional slice: `train[:200]`, `train[10%:20%]`."""
    name: str | None = None
    """Configuration of a hub dataset, e.g. `main`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our field name to the file's column: `{"prompt": "question"}`."""
    example: ExampleName = "answer"
    """Content of a row."""
    rules: TrainRules = TrainRules()
    as_chat: bool = True
    """Whether plain prompts and completions become turns where there is a chat template."""
    alpaca_join: AlpacaJoin = "blank_line"
    txt_rows: str = "paragraph"
    """Rows of a .txt file: `paragraph`, `line`, `file`, or else the text between two rows."""
    encoding: str = "utf-8"
    """Encoding of a local text file without a mark that says it, by Python's name."""

    @property
    def rows(self) -> ExampleKind:
        """Content of a row, as the table has it."""
        return EXAMPLES[self.example]


def spec_of(entry: Any, example: ExampleName) -> DatasetSpec:
    """An entry of a recipe's `datasets` in this room's terms, and what its objective has a row hold."""

    def named(kind: type[Any]) -> dict[str, Any]:
        return {one.name: getattr(entry, one.name) for one in fields(kind) if hasattr(entry, one.name)}

    columns = {str(key): value for key, value in entry.columns.items()}
    rules = TrainRules(**named(TrainRules))
    if EXAMPLES[example].figure == "label":  # of the last answer; what stands before it is its prompt
        rules = replace(rules, turns_to_train="last")
    own = {"example": example, "columns": columns, "rules": rules}
    return DatasetSpec(**named(DatasetSpec) | own)


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
