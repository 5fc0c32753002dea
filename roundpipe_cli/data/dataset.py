"""From the recipe's datasets to token ids and labels on disk, with a report on every row.

    files -> rows -> chunks -> child processes (parse, render, tokenise, mask) -> shard per source -> mapped into memory

Only a few chunks are in memory at a time. A shard whose key is in the cache is taken as it is.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe_cli import __version__
from roundpipe_cli.choices import ROW_KINDS
from roundpipe_cli.data.columns import PLAIN_TYPES
from roundpipe_cli.data.formats import RowFormat, decide_format
from roundpipe_cli.data.processes import Chunk, EncoderPool
from roundpipe_cli.data.rows import MAX_LISTED, DataReport, RawRow, SourceReport, in_chunks, listed
from roundpipe_cli.data.settings import DataSettings
from roundpipe_cli.data.shards import DamageError, Shard, ShardWriter, load_shards
from roundpipe_cli.data.sources import Source, find_sources, fingerprint, no_rows
from roundpipe_cli.data.tokenized import TokenizedDataset, TokenizedRows, same_rows
from roundpipe_cli.data.traced import TEMPLATE_DATE
from roundpipe_cli.data.turns import TurnEnds
from roundpipe_cli.errors import Problem, RefusedError
from roundpipe_cli.events import Say
from roundpipe_cli.library_names import version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A key for the tokens of a source: it changes with every value that the tokens depend on.

LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets", "pyarrow")


def shard_key(source: Source, settings: DataSettings, tokenizer_digest: str, templates: Sequence[str | None]) -> str:
    """Name of the source's shard in the cache; its `content` is set.

    Args:
        templates: for rows without tools, and with them.
    """
    parts: Mapping[str, Any] = {
        "tool": __version__,
        "code": reader_digest(),
        "libraries": {name: version(name) for name in LIBRARIES},
        "content": source.content,
        "name": source.name,
        "slice": [source.cut.start, source.cut.stop],
        "spec": {name: value for name, value in asdict(source.spec).items() if name not in ("path", "split", "weight")},
        "tokenizer": tokenizer_digest,
        "templates": templates,
        "max_seq_length": settings.max_seq_length,
        "long_rows": [settings.long_rows, settings.long_rows_overlap],
        "train_on_inputs": settings.train_on_inputs,
        "on_bad_row": settings.on_bad_row,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over everything that decides the tokens of a text."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
    if backend is not None:
        content = backend.to_str()
    else:
        names = sorted(tokenizer.get_vocab().items())
        content = json.dumps([type(tokenizer).__name__, names, getattr(tokenizer, "init_kwargs", {})], default=str)
    special = json.dumps(sorted(tokenizer.special_tokens_map.items()), default=str)
    added = json.dumps(sorted(str(item) for item in tokenizer.added_tokens_decoder.items()))
    return hashlib.sha256(f"{type(tokenizer).__name__}\n{content}\n{special}\n{added}".encode()).hexdigest()


def reader_digest() -> str:
    """SHA-256 over this folder's code and tables, so that tokens of an older version are not used."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


UNTRAINED_WARN_SHARE = 0.01
TELL_EVERY_S = 5.0


def build_dataset(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, tell: Say | None = None, num_workers: int | None = None
) -> TokenizedDataset:
    """Read, check, render, tokenise and mask all rows, in the order of the recipe and of the files.

    Args:
        tell: is told of the progress every few seconds.
        num_workers: processes at most; None: as many as there are cores. The result does not depend on it.

    Raises:
        RefusedError: a dataset is missing, empty or of no known type; a chat template is needed and missing, not valid,
            or beyond its limits; rows are bad and `on_bad_row` is error; rows are too long and `long_rows` is error;
            no row is left.
        ResourceError: the disk is full, or a process was killed.
    """
    with EncoderPool(settings, tokenizer, num_workers) as pool:
        builder = _Builder(settings, tokenizer, pool, tell)
        entries = [find_sources(spec, settings.folder, settings.offline) for spec in settings.datasets]
        builder.look_up(list(chain.from_iterable(entries)))
        for sources in entries:
            builder.add(sources)
    return builder.finish()


class _Builder:
    def __init__(
        self, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, pool: EncoderPool, tell: Say | None
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._pool = pool
        self._tell = tell
        self._told_s = time.monotonic()
        self._tokenizer_digest = digest_tokenizer(tokenizer)
        self._sources: list[Source] = []
        self._shards: list[Shard] = []
        self._keys: dict[int, str] = {}
        self._cached: dict[str, Shard] = {}
        self._num_cached = 0
        self._ends: TurnEnds | None = None
        self._vocabulary = max([len(tokenizer), *(token_id + 1 for token_id in tokenizer.get_vocab().values())])
        self._source_notices: list[str] = []
        self.rows_by_spec: list[int] = []

    def look_up(self, sources: Sequence[Source]) -> None:
        """Find the tokens of all sources that are in the cache. No child may be forked while the threads of it run."""

        def progress(share: float) -> None:
            self._tell_now_and_then(f"checking the cached tokens: {100 * share:.0f} %")

        fingerprint(sources)
        for source in sources:
            self._keys[id(source)] = shard_key(source, self._settings, self._tokenizer_digest, self._pool.templates)
        keys = list(self._keys.values())
        for source, key, found in zip(sources, keys, load_shards(keys, self._vocabulary, progress), strict=True):
            if isinstance(found, DamageError):
                self._source_notices.append(f"the cached tokens of {source.name} are damaged ({found}): made again")
            elif found is not None:
                self._cached[key] = found

    def add(self, sources: Sequence[Source]) -> None:
        """Take the rows of an entry of `datasets`.

        Raises:
            RefusedError: none of its sources has a row.
        """
        before, empty = len(self._shards), list[str]()
        for source in sources:
            self._source_notices.extend(source.notices)
            key = self._keys[id(source)]
            shard = self._cached.get(key)
            self._num_cached += shard is not None
            shard = shard or self._make_shard(source, key)
            if shard is None:
                empty.append(source.name)
                continue
            self._cached[key] = shard
            self._sources.append(source)
            self._shards.append(shard)
        if len(empty) == len(sources):
            raise no_rows(sources)
        if empty:
            self._source_notices.append(f"{len(empty)} of {len(sources)} files have no rows: {listed(empty)}")
        self.rows_by_spec.append(sum(shard.report.rows_kept for shard in self._shards[before:]))

    def _make_shard(self, source: Source, key: str) -> Shard | None:
        """None where the source has no rows."""
        report = SourceReport(source.name)
        chunks = in_chunks(source.rows())
        first = next(chunks, None)
        if first is None:
            return None
        self._ends = self._ends or self._pool.ends()  # before the children start to work

        def with_format() -> Iterator[Chunk]:
            row_format: RowFormat | None = None
            for rows in chain([first], chunks):
                row_format = row_format or self._decide(source, report, rows)
                # After a bad row the rest is read only to count bad rows.
                yield row_format, rows, bool(report.bad_rows) and self._settings.on_bad_row == "error"

        with ShardWriter(key, len(source.spec.rows.sides)) as writer:
            for result in self._pool.encode(with_format(), source.name):
                writer.add(result, report.rows_read)
                report.add(result.report)
                share = source.progress.share()
                percent = f", {100 * share:.0f} %" if share is not None else ""
                self._tell_now_and_then(f"tokenising {source.name}: {report.rows_read} rows{percent}")
            report.bad_rows = [(n, replace(fault, where=source.where(n))) for n, fault in report.bad_rows]
            is_refused = bool(report.bad_rows) and self._settings.on_bad_row == "error"
            return writer.finish(report, to_cache=not is_refused)

    def _decide(self, source: Source, report: SourceReport, rows: Sequence[RawRow]) -> RowFormat | None:
        columns = [row.columns for row in rows if row.fault is None]
        if not columns:
            return None
        row_format = decide_format(source.spec, columns, source.name)
        report.type = row_format.type
        if row_format.notice is not None:
            report.notices.append(row_format.notice)
        if self._settings.long_rows == "split" and row_format.type != "text":
            raise RefusedError(
                "only rows of type text can be split",
                where=source.name,
                found=f"type {row_format.type}, `long_rows: split`",
                expected="texts: a later piece of a conversation would have no prompt",
                hint="`long_rows: truncate` or drop, or a larger max_seq_length",
            )
        joins = not source.spec.as_chat and row_format.type in PLAIN_TYPES
        if self._ends is None or joins:
            self._do_without_template(source, row_format, report)
        elif row_format.type == "text":
            self._check_eos(source, row_format)
        else:
            if self._ends.next_mark_ends:
                what = "an answer with the mark of the next turn: behind the last answer of a row the model does not"
                report.notices.append(f"the chat template ends {what} learn to stop")
            elif self._ends.end_of_turn is None:
                what = "the assistant's turns without a special token: the model may not learn to stop"
                report.notices.append(f"the chat template ends {what}")
            if "strftime_now" in str(self._pool.templates[0]):
                report.notices.append(
                    f"the chat template writes today's date: it always gets {TEMPLATE_DATE:%d %B %Y}, so that rows "
                    "do not change from day to day"
                )
        return row_format

    def _do_without_template(self, source: Source, row_format: RowFormat, report: SourceReport) -> None:
        if ROW_KINDS[row_format.type].needs_template:
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
            why = "as_chat: false" if self._ends is not None else "the tokenizer has no chat template"
            report.notices.append(f"{source.name}: {why}; rows are {layout}, joined without a blank, and EOS")

    def _check_eos(self, source: Source, row_format: RowFormat) -> None:
        if self._tokenizer.eos_token_id is None:
            raise RefusedError(
                "the tokenizer has no end-of-sequence token",
                where=source.name,
                found=f"type {row_format.type}, a tokenizer without `eos_token`",
                expected="a token that tells the model where a text ends",
                hint='add to the model\'s tokenizer_config.json: `"eos_token": "</s>"`, with the model\'s own token',
            )

    def _tell_now_and_then(self, text: str) -> None:
        now_s = time.monotonic()
        if self._tell is not None and now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            self._tell(text)

    def finish(self) -> TokenizedDataset:
        sources = tuple(shard.report for shard in self._shards)
        report = DataReport(sources=sources, long_rows=self._settings.long_rows)
        if report.bad_rows and self._settings.on_bad_row == "error":
            raise self._bad_rows_error(report)
        if report.too_long_rows and self._settings.long_rows == "error":
            raise self._long_rows_error(report)
        if report.rows_kept == 0:
            longest = report.longest_row_tokens
            hint = f"the longest row has {longest} tokens: max_seq_length={longest}"
            error = RefusedError(
                "no row is left to train on",
                where="datasets: " + ", ".join(source.name for source in self._sources),
                found=report.filter_counts(),
                expected="at least one row with a trained token",
                hint=hint if report.too_long_rows else None,
            )
            error.problems = (*error.problems, *self._first_faults(report))
            raise error
        rows = TokenizedRows(self._shards)
        twice = [f"{text}: trained twice" for text in same_rows(zip(self._sources, rows.numbers, strict=True))]
        notices = [*self._source_notices, *(text for one in sources for text in one.notices), *twice]
        dataset = TokenizedDataset(
            rows.answers(len(self._settings.datasets[0].rows.sides)),
            report,
            tuple(dict.fromkeys([*notices, *self._loss_notices(report)])),
            self._pool.templates[0],
            tuple(self._sources),
            tuple(self.rows_by_spec),
            self._num_cached,
        )
        return replace(dataset, notices=(*dataset.notices, *_equal_answers(dataset)))

    def _bad_rows_error(self, report: DataReport) -> RefusedError:
        error = RefusedError(
            f"{report.rows_bad} of {report.rows_read} rows cannot be used"
            + (f"; the first {MAX_LISTED}:" if report.rows_bad > MAX_LISTED else ":")
        )
        *faults, last = self._first_faults(report)
        advice = "correct the rows, or leave them out with `on_bad_row=skip`"  # below the rows that it is about
        last = replace(last, hint=f"{last.hint}; or {advice}" if last.hint else advice)
        error.problems = (*error.problems, *faults, last)
        return error

    def _first_faults(self, report: DataReport) -> list[Problem]:
        faults: list[Problem] = []
        for _, fault in report.bad_rows[:MAX_LISTED]:
            is_said = any(fault.hint == other.hint for other in faults)
            faults.append(replace(fault, hint=None) if is_said else fault)
        return faults

    def _long_rows_error(self, report: DataReport) -> RefusedError:
        count, longest = len(report.too_long_rows), report.longest_row_tokens
        return RefusedError(
            f"{count} of {report.rows_read} rows are longer than {self._settings.max_seq_length} tokens",
            where=listed(self._places(report, "too_long_rows")),
            found=f"up to {longest} tokens",
            expected="max_seq_length tokens at most, since the recipe says `long_rows: error`",
            hint=f"max_seq_length={longest}, or long_rows=truncate, drop or, for texts, split",
        )

    def _places(self, report: DataReport, kind: str) -> list[str]:
        pairs = zip(self._sources, report.sources, strict=True)
        return [source.where(number) for source, counted in pairs for number in getattr(counted, kind)]

    def _loss_notices(self, report: DataReport) -> Iterator[str]:
        """One line for each source with unused columns, and for each way in which rows were lost or shortened."""
        for source in report.sources:
            if source.unused_columns:
                yield f"{source.name}: columns that are not used: {source.unused_text()}"
        if report.bad_rows:
            places = [f"{fault.where} ({fault.what})" for _, fault in report.bad_rows]
            yield f"{len(places)} of {report.rows_read} rows skipped as unusable: {listed(places)}"
        limit = self._settings.max_seq_length
        ways = {"truncate": f"cut to {limit} tokens", "split": f"split into sequences of {limit} tokens at most"}
        lost = f" ({report.lost_tokens} tokens lost)" if report.lost_tokens else ""
        done = {
            "control_token_rows": "spell special tokens in their text, which the tokenizer takes for real ones",
            "placeholder_rows": "have `<image>`, `<video>` or `<audio>` in their text, and no such file belongs to "
            "them; the model learns the letters",
            "null_word_rows": "have only `nan`, `NULL`, `None` or the like in a column that is read; the model learns "
            "the word: where it means nothing, leave the cell empty",
            "too_long_rows": ways.get(self._settings.long_rows, "dropped as too long") + lost,
            "untrained_rows": "dropped, since no trained token is left in them",
        }
        for kind, words in done.items():
            if places := self._places(report, kind):
                warns = kind == "untrained_rows" and len(places) > UNTRAINED_WARN_SHARE * report.rows_read
                yield f"{'warning: ' * warns}{len(places)} of {report.rows_read} rows {words}: {listed(places)}"


# A row is read once, and its answers are sequences of their own (`formats.py` has their shapes); it is kept if all are.


def _equal_answers(dataset: TokenizedDataset) -> Iterator[str]:
    """A notice about preference pairs whose two answers are the same."""
    for chosen, rejected in pairwise(dataset.sides):
        candidates = np.flatnonzero(chosen.lengths == rejected.lengths).tolist()
        equal = [index for index in candidates if np.array_equal(chosen[index].input_ids, rejected[index].input_ids)]
        if equal:
            places = f"(they are kept): {listed([dataset.where(chosen[index].row_id) for index in equal])}"
            yield f"{len(equal)} of {len(rejected)} pairs have two equal answers, which prefer nothing {places}"
