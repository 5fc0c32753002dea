"""From the recipe's datasets to token ids and labels in memory, with a report of what became of every row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.chat import ChatTemplate, Rendered, find_template
from roundpipe_cli.data.encode import IGNORED_LABEL, Encoded, encode_batch
from roundpipe_cli.data.formats import Content, Conversation, Exchange, RowFormat, decide_format
from roundpipe_cli.data.report import MAX_LISTED, DataReport, SourceReport, listed
from roundpipe_cli.data.rows import BadRowError, RawRow, RowFault, fault_problem
from roundpipe_cli.data.settings import DataSettings
from roundpipe_cli.data.sources import Source, find_sources
from roundpipe_cli.errors import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 1000
"""Rows tokenised at once: enough to keep all cores busy, few enough to bound the strings in memory."""
UNTRAINED_WARN_SHARE = 0.01

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Row:
    """One training row. Tokens are read from shared arrays: do not write to them."""

    row_id: int
    """Position among all rows read, from 0, dropped rows counted: the same whatever is dropped before it."""
    input_ids: npt.NDArray[np.int32]
    """Shape [tokens]."""
    labels: npt.NDArray[np.int32]
    """Shape [tokens], not shifted: the token itself where it is trained, -100 elsewhere."""


class TokenizedRows(Sequence[Row]):
    """Rows of different lengths in three flat arrays."""

    def __init__(
        self, row_ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], encoded: Sequence[Encoded]
    ) -> None:
        self.row_ids = row_ids
        """Ascending, shape [rows]."""
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._input_ids = np.concatenate([row.input_ids for row in encoded])
        trained = np.concatenate([row.trained for row in encoded])
        self._labels = np.where(trained, self._input_ids, np.int32(IGNORED_LABEL))
        self._input_ids.flags.writeable = self._labels.flags.writeable = False

    def __len__(self) -> int:
        return len(self.row_ids)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, stop = int(self._starts[position]), int(self._starts[position + 1])
        return Row(int(self.row_ids[position]), self._input_ids[start:stop], self._labels[start:stop])

    def select(self, positions: npt.NDArray[np.int64]) -> TokenizedRows:
        """The rows at these ascending positions, as rows of their own."""
        chosen = [self[int(position)] for position in positions]
        encoded = [Encoded(row.input_ids, row.labels != IGNORED_LABEL) for row in chosen]
        return TokenizedRows(self.row_ids[positions], self.lengths[positions], encoded)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self._starts)

    def content_hash(self) -> str:
        """SHA-256 over lengths, ids and labels: equal exactly if every batch would be."""
        digest = hashlib.sha256(b"roundpipe rows 1")
        digest.update(self._starts.astype("<i8").tobytes())
        digest.update(self._input_ids.astype("<i4").tobytes())
        digest.update(self._labels.astype("<i4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class TokenizedDataset:
    """What training needs to know of the data."""

    rows: TokenizedRows
    report: DataReport
    content_hash: str
    notices: tuple[str, ...]
    """Decisions and losses that the user should read, one line each."""
    chat_template: str | None
    """The template in force, to be saved beside the adapter."""
    sources: tuple[Source, ...]
    origins: npt.NDArray[np.int64]
    """[rows, 2]: for each kept row the index of its source and its number in there."""

    rows_by_spec: tuple[int, ...]
    """Kept rows of each entry of the recipe's `datasets`; a glob is several sources and one entry."""

    def where(self, row_id: int) -> str:
        """`data/train.jsonl:17` of a kept row.

        Raises:
            KeyError: no kept row has this id.
        """
        position = int(np.searchsorted(self.rows.row_ids, row_id))
        if position == len(self.rows) or self.rows.row_ids[position] != row_id:
            raise KeyError(row_id)
        source, number = self.origins[position]
        return self.sources[int(source)].where(int(number))


def build_dataset(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> TokenizedDataset:
    """Read, check, render, tokenise and mask all rows, in the order of the recipe and of the files.

    Raises:
        RefusedError: a dataset is missing, empty or of no known type; a chat template is needed and missing; rows are
            bad and `on_bad_row` is error; rows are too long and `long_rows` is error; no row is left.
    """
    builder = _Builder(settings, tokenizer)
    for spec in settings.datasets:
        before = builder.num_kept
        for source in find_sources(spec, settings.folder, settings.offline):
            builder.add(source)
        builder.rows_by_spec.append(builder.num_kept - before)
    return builder.finish()


class _Builder:
    """Collects the rows of one source after the other."""

    def __init__(self, settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        text = find_template(tokenizer, settings.chat_template, settings.folder)
        self._template = ChatTemplate(tokenizer, text) if text is not None else None
        self._sources: list[Source] = []
        self._reports: list[SourceReport] = []
        self._notices: list[str] = []
        self._encoded: list[Encoded] = []
        self._row_ids: list[int] = []
        self._origins: list[tuple[int, int]] = []
        self._num_read = 0
        self.rows_by_spec: list[int] = []

    @property
    def num_kept(self) -> int:
        return len(self._row_ids)

    def add(self, source: Source) -> None:
        """
        Raises:
            RefusedError: no row in it, or none of its rows can ever be used (see `build_dataset`).
        """
        report = SourceReport(source.name)
        self._sources.append(source)
        self._reports.append(report)
        row_format: RowFormat | None = None
        for chunk in _chunks(source.rows(), CHUNK_ROWS):
            if row_format is None:
                row_format = self._decide(source, report, chunk)
            self._add_chunk(source, report, row_format, chunk)
        if report.rows_read == 0:
            raise RefusedError(
                "the dataset is empty",
                where=source.name,
                found=f"no rows in split `{source.spec.split}`",
                expected="at least one row",
            )

    def _decide(self, source: Source, report: SourceReport, chunk: Sequence[RawRow]) -> RowFormat | None:
        layouts = list(dict.fromkeys(tuple(row.columns) for row in chunk if row.fault is None))
        if not layouts:
            return None
        row_format = decide_format(source.spec, layouts, source.name)
        report.type = row_format.type
        if row_format.notice is not None:
            self._notices.append(row_format.notice)
        if self._template is None:
            self._do_without_template(source, row_format)
        elif row_format.type == "text":
            self._check_eos(source, row_format)
        elif self._template.end_of_turn is None:
            self._notices.append(
                "the chat template ends the assistant's turns without a special token: the model may not learn to stop"
            )
        return row_format

    def _do_without_template(self, source: Source, row_format: RowFormat) -> None:
        if row_format.type in ("chat", "sharegpt"):
            raise RefusedError(
                "this dataset needs a chat template, and the tokenizer has none",
                where=source.name,
                found=f"type {row_format.type}, a tokenizer without `chat_template`",
                expected="the template that the model was trained with, or any for a base model",
                hint="add to the recipe: `chat_template: path/to/template.jinja`",
            )
        self._check_eos(source, row_format)
        if row_format.type != "text":
            layout = "the Alpaca prompt" if row_format.type == "alpaca" else "prompt and completion as they stand"
            self._notices.append(
                f"{source.name}: the tokenizer has no chat template; rows are {layout}, joined without a blank, and EOS"
            )

    def _check_eos(self, source: Source, row_format: RowFormat) -> None:
        if self._tokenizer.eos_token_id is None:
            raise RefusedError(
                "the tokenizer has no end-of-sequence token",
                where=source.name,
                found=f"type {row_format.type}, a tokenizer without `eos_token`",
                expected="a token that tells the model where a text ends",
                hint='add to the model\'s tokenizer_config.json: `"eos_token": "</s>"`, with the model\'s own token',
            )

    def _add_chunk(
        self, source: Source, report: SourceReport, row_format: RowFormat | None, chunk: Sequence[RawRow]
    ) -> None:
        kept: list[tuple[int, int, Rendered]] = []
        for raw in chunk:
            row_id, self._num_read = self._num_read, self._num_read + 1
            report.rows_read += 1
            try:
                if raw.fault is not None or row_format is None:
                    raise _bad_row(raw.fault)
                content = row_format.parse(raw.columns)
                kept.append((row_id, raw.number, self._render(content)))
                if self._holds_control_token(content):
                    report.control_token_rows.append(raw.number)
            except BadRowError as error:
                report.bad_rows.append((raw.number, error.fault))
        if report.bad_rows and self._settings.on_bad_row == "error":
            return  # the rest is read only to count what is wrong with it
        plain = row_format is not None and (row_format.type == "text" or self._template is None)
        results = encode_batch(self._tokenizer, [rendered for _, _, rendered in kept], plain=plain)
        for (row_id, number, _), result in zip(kept, results, strict=True):
            if isinstance(result, BadRowError):
                report.bad_rows.append((number, result.fault))
            else:
                self._keep(report, row_id, number, result)

    def _render(self, content: Content) -> Rendered:
        train_all = self._settings.train_on_inputs
        if isinstance(content, (Conversation, Exchange)) and self._template is not None:
            if train_all:
                text = self._template.render(content.messages)
                return Rendered(text, ((0, len(text)),))
            return self._template.render_trained(content.messages)
        if isinstance(content, Exchange):
            text = content.plain_prompt + content.completion
            return Rendered(text, ((0 if train_all else len(content.plain_prompt), len(text)),))
        assert not isinstance(content, Conversation), "refused when the format was decided"
        return Rendered(content.text, ((0, len(content.text)),))

    def _holds_control_token(self, content: Content) -> bool:
        if self._template is None or not isinstance(content, (Conversation, Exchange)):
            return False
        return self._template.holds_control_token(content.messages)

    def _keep(self, report: SourceReport, row_id: int, number: int, row: Encoded) -> None:
        limit = self._settings.max_seq_length
        report.longest_row_tokens = max(report.longest_row_tokens, len(row.input_ids))
        if len(row.input_ids) > limit:
            report.too_long_rows.append(number)
            if self._settings.long_rows != "truncate":
                return
            row = Encoded(row.input_ids[:limit].copy(), row.trained[:limit].copy())
        num_trained = int(np.count_nonzero(row.trained[1:]))
        if num_trained == 0:
            report.untrained_rows.append(number)
            return
        report.rows_kept += 1
        report.trained_tokens += num_trained
        report.total_tokens += len(row.input_ids)
        self._encoded.append(row)
        self._row_ids.append(row_id)
        self._origins.append((len(self._sources) - 1, number))

    def finish(self) -> TokenizedDataset:
        """
        Raises:
            RefusedError: see `build_dataset`.
        """
        report = DataReport(tuple(self._reports), self._settings.long_rows)
        if report.rows_bad and self._settings.on_bad_row == "error":
            raise self._bad_rows_error(report)
        if report.rows_too_long and self._settings.long_rows == "error":
            raise self._long_rows_error(report)
        if report.rows_kept == 0:
            raise RefusedError(
                "no row is left to train on",
                where="datasets: " + ", ".join(source.name for source in self._sources),
                found=report.filter_counts(),
                expected="at least one row with a trained token",
                hint=self._empty_hint(report),
            )
        lengths = np.array([len(row.input_ids) for row in self._encoded], dtype=np.int64)
        rows = TokenizedRows(np.array(self._row_ids, dtype=np.int64), lengths, self._encoded)
        notices = tuple(dict.fromkeys([*self._notices, *self._loss_notices(report)]))
        template = self._template.text if self._template is not None else None
        origins = np.array(self._origins, dtype=np.int64)
        return TokenizedDataset(
            rows,
            report,
            rows.content_hash(),
            notices,
            template,
            tuple(self._sources),
            origins,
            tuple(self.rows_by_spec),
        )

    def _empty_hint(self, report: DataReport) -> str | None:
        if not report.rows_too_long:
            return None
        longest = max(source.longest_row_tokens for source in report.sources)
        return f"the longest row has {longest} tokens: max_seq_length={longest}"

    def _bad_rows_error(self, report: DataReport) -> RefusedError:
        error = RefusedError(
            f"{report.rows_bad} of {report.rows_read} rows cannot be used"
            + (f"; the first {MAX_LISTED}:" if report.rows_bad > MAX_LISTED else ":"),
            hint="mend the rows, or leave them out with `on_bad_row=skip`",
        )
        faults = [
            fault_problem(fault, source.where(number))
            for source, counted in zip(self._sources, self._reports, strict=True)
            for number, fault in counted.bad_rows[:MAX_LISTED]
        ]
        error.problems = (*error.problems, *faults[:MAX_LISTED])
        return error

    def _long_rows_error(self, report: DataReport) -> RefusedError:
        longest = max(source.longest_row_tokens for source in report.sources)
        return RefusedError(
            f"{report.rows_too_long} of {report.rows_read} rows are longer than {self._settings.max_seq_length} tokens",
            where=listed(self._long_places()),
            found=f"up to {longest} tokens",
            expected="max_seq_length tokens at most, since the recipe says `long_rows: error`",
            hint=f"max_seq_length={longest}, or long_rows=truncate, or long_rows=drop",
        )

    def _long_places(self) -> list[str]:
        pairs = zip(self._sources, self._reports, strict=True)
        return [source.where(number) for source, report in pairs for number in report.too_long_rows]

    def _loss_notices(self, report: DataReport) -> Iterator[str]:
        """One line for each way in which rows were lost or shortened."""
        pairs = list(zip(self._sources, self._reports, strict=True))
        if report.rows_bad:
            places = [f"{source.where(n)} ({fault.what})" for source, counted in pairs for n, fault in counted.bad_rows]
            yield f"{report.rows_bad} of {report.rows_read} rows skipped as unusable: {listed(places)}"
        spelt = [source.where(number) for source, counted in pairs for number in counted.control_token_rows]
        if spelt:
            yield (
                f"{len(spelt)} of {report.rows_read} rows spell special tokens in their text, which the tokenizer "
                f"takes for real ones: {listed(spelt)}"
            )
        if report.rows_too_long:
            done = f"cut to {self._settings.max_seq_length} tokens" if report.rows_truncated else "dropped as too long"
            yield f"{report.rows_too_long} of {report.rows_read} rows {done}: {listed(self._long_places())}"
        if report.rows_untrained:
            places = [source.where(number) for source, counted in pairs for number in counted.untrained_rows]
            warning = "warning: " if report.rows_untrained > UNTRAINED_WARN_SHARE * report.rows_read else ""
            yield (
                f"{warning}{report.rows_untrained} of {report.rows_read} rows dropped, since no trained token is left "
                f"in them: {listed(places)}"
            )


def _bad_row(fault: RowFault | None) -> BadRowError:
    if fault is None:
        return BadRowError("the row cannot be read")
    return BadRowError(fault.what, found=fault.found, expected=fault.expected)


def _chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
