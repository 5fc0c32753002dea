"""Rows scored by the engine's forward alone, into a folder: their losses as lines, what each target got as tables.

    FOLDER/
      header.json               what was scored and how, by digest
      scores.jsonl              a line for each row, in their order
      tokens-000000000.parquet  of the row of that number and those after it, up to the next file's
      part-000000000.parquet    of a microbatch whose window of rows is unfinished; by its first row

Rows of similar length are computed together, in windows of consecutive rows. A microbatch is kept as a part once it is
computed. When all parts of a window are there they become its table, renamed into place, and its lines, appended in the
order of the rows: whatever a kill or a full disk interrupts, the next call computes only microbatches without a part.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import torch
from pyarrow import parquet

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.collate import pad_token_id
from roundpipe_cli.data.teacher import FORMAT, row_digest, template_hash, vocabulary_hash
from roundpipe_cli.data.tokenized import Row
from roundpipe_cli.errors import NotFiniteError, Problem, RecipeError, RefusedError
from roundpipe_cli.events import HEADER_NAME, SCORES_NAME, Notice, Phase, Tell, tell_notices
from roundpipe_cli.files import append_line, require_free_bytes, sha256_of, write_atomically
from roundpipe_cli.model.adapter_files import ADAPTER_WEIGHTS
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.trained_on import check_trained_on
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.recipe.load import LoadedRecipe
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train.batches import collate_rows
from roundpipe_cli.train.build import make_engine, make_planner
from roundpipe_cli.train.checkpoint.output_dir import read_values
from roundpipe_cli.train.checkpoint.resume import describe_other_bits, run_state, short_json
from roundpipe_cli.train.evaluate import perplexity
from roundpipe_cli.train.page_locks import PageLocks
from roundpipe_cli.train.prepare.ready import Setup
from roundpipe_cli.train.prepare.setup import prepare
from roundpipe_cli.train.prepare.steps import Lengths, grouped_in_windows
from roundpipe_cli.train.prepare.trainable import start_folder
from roundpipe_cli.train.scoring import Scorer
from roundpipe_cli.units import counted, format_bytes, format_seconds

STATES = ("data_hash", "tokenizer_hash", "model_hash", "config_hash", "start_hash", "fused", "computed_by")
"""Keys of a checkpoint's `run_state`."""
SETTINGS = (
    *("dtype", "packed_as", "kernels", "max_seq_length", "micro_batch_size", "micro_batch_tokens", "head_chunk_tokens"),
    *("mlp_chunk_tokens", "float16_accumulation", "deterministic"),
)
"""Keys of a recipe that scores depend on, to the last bit, beside those that make the rows and the weights."""
TOLD_ONLY = ("model", "sources", "computed_by")
"""Keys of a header that may differ where more of the same scores are added."""
TYPES = {
    **{"positions": "int32", "tokens": "int32", "log_probabilities": "float32"},
    **{"top_ids": "int32", "top_log_probabilities": "float16", "mass_left": "float32"},
}
"""Columns of a table beside `row` and `digest`, with their type on disk."""
LINE_BYTES, TARGET_BYTES, ENTRY_BYTES = 200, 16, 6
"""Bytes on disk of a row's line, of a target's place, id, log-probability and left mass, and of a probable token."""
TELL_EVERY_S = 5.0

RowScores = dict[str, npt.NDArray[Any]]
"""Arrays of a row's N target tokens: `positions` and `tokens` [N], and the tensors of `HeadScores` that have N rows."""


def scored_batches(
    setup: Setup, rows: Sequence[Row], batches: Sequence[Sequence[int]], *, top_k: int, tell: Tell
) -> Generator[list[tuple[int, RowScores]], None, None]:
    """The scores of each microbatch's rows, by number.

    Args:
        batches: numbers of the rows of each, as of `batches_of`.
        top_k: as of `score_head`.
    """
    planner, steps, pad = make_planner(setup), setup.recipe.microbatches_per_step, pad_token_id(setup.tokenizer)
    planner.keep_stages(planner.expected(steps))
    total, done = sum(len(rows[index].input_ids) for batch in batches for index in batch), 0
    with PageLocks(setup.store, setup.devices, setup.recipe.weights, tell), make_engine(setup) as engine:
        scorer = Scorer(engine, planner, steps, stopping=lambda: False)
        known = "about {}, by times measured before" if planner.measured else "at least {}, by layers' sizes, ASSUMED"
        planned = known.format(format_seconds(scorer.planned_s(len(batches))))
        planned += ", and what reading from disk adds" if setup.store.is_mapped else ""
        tell_notices(tell, planner.notice, f"scoring {counted(total, 'token')}: {planned}")
        microbatches = (collate_rows([rows[index] for index in batch], pad) for batch in batches)
        scores = zip(batches, scorer.scores(microbatches, step=0, top_k=top_k), strict=True)
        began_s = told_s = time.monotonic()
        for batch, one in scores:
            labels = [rows[index].labels for index in batch]
            places = [np.flatnonzero(row[1:] != IGNORED_LABEL) + 1 for row in labels]
            borders = np.cumsum(list(map(len, places)))
            of_targets = {
                name: np.split(values.cpu().numpy(), borders)
                for name, values in vars(one).items()
                if isinstance(values, torch.Tensor) and name != "sequence_sums"
            }
            found = list[tuple[int, RowScores]]()
            for number, (index, at) in enumerate(zip(batch, places, strict=True)):
                own = {name: parts[number] for name, parts in of_targets.items()}
                found.append((index, {"positions": at, "tokens": labels[number][at], **own}))
            yield found
            done += sum(map(len, labels))
            if (now_s := time.monotonic()) - told_s >= TELL_EVERY_S:
                told_s, per_s = now_s, done / (now_s - began_s)
                left = format_seconds(max(1, round((total - done) / per_s)))
                tell(Phase(f"scored {done:,} of {counted(total, 'token')}, {per_s:.0f} tokens/s, {left} left"))


def batches_of(recipe: Recipe, lengths: Lengths) -> list[list[list[int]]]:
    """For each window of consecutive rows the numbers of the rows of its microbatches; `lengths`: of all rows."""
    return [[[i for (i,) in batch] for batch in window] for window in grouped_in_windows(recipe, lengths)]


def prepare_to_score(
    loaded: LoadedRecipe, source: ModelSource, asked: PlanRequest | None, *, offline: bool, allowed: bool, tell: Tell
) -> Setup:
    """Load all that scores need, as `prepare` does; `allowed`: as of `check_trained_on`."""
    setup = prepare(loaded, offline=offline, tell=tell, source=source, asked=asked, trains=False)
    if (start := start_folder(loaded)) is not None:
        same = partial(check_trained_on, weights=lambda: setup.model_hash, where="model")
        tell_notices(tell, same(start, setup.source, allowed=allowed))
        both = setup.start_hash + sha256_of(start / ADAPTER_WEIGHTS)  # its configuration, and the weights
        setup.start_hash = hashlib.sha256(both.encode()).hexdigest()
    return setup


class ScoreFolder:
    """The folder of a dataset's scores, which nobody else writes to: what is finished in it, and how more is added."""

    def __init__(self, folder: Path, setup: Setup, top_k: int | None) -> None:
        """
        Args:
            setup: of `prepare_to_score`.
            top_k: so many of the most probable tokens at each target's place are written; None: no tables are.
        """
        config: Any = setup.model.config
        self._vocabulary = config.get_text_config().vocab_size
        self._folder, self._setup, self._top_k = folder, setup, top_k
        self._lines, self._done = folder / SCORES_NAME, 0
        self._left = batches_of(setup.recipe, setup.dataset.rows.lengths)

    def fill(self, tell: Tell) -> dict[str, Any]:
        """Score the rows that an earlier call has not; the scores of all of them together, in the types of JSON.

        Raises:
            RefusedError: the folder holds scores of something else; every key that differs.
            NotFiniteError: a loss is not a number.
            ResourceError: disk full or failing.
        """
        self._check_header(tell)
        self._cut_off(tell)
        rows = self._setup.dataset.rows
        if self._left:
            per_target = 0 if self._top_k is None else TARGET_BYTES + ENTRY_BYTES * self._top_k
            all_bytes = LINE_BYTES * len(rows) + per_target * self._setup.dataset.report.trained_tokens
            num_bytes = round(all_bytes * (1 - self._done / len(rows)))
            require_free_bytes(self._folder, num_bytes, "the scores")
            tell(Notice(f"the scores take about {format_bytes(num_bytes)} in {self._folder}"))
            new = [batch for window in self._left for batch in window if not self._part(batch).is_file()]
            with closing(scored_batches(self._setup, rows, new, top_k=self._top_k or 0, tell=tell)) as found:
                for window in self._left:
                    for batch in window:
                        if not self._part(batch).is_file():
                            self._write_part(next(found), self._part(batch))
                    self._finish([self._part(batch) for batch in window])
        lines = [json.loads(line) for line in self._lines.read_bytes().splitlines()]
        tokens = sum(line["tokens"] for line in lines)
        units = [line.get("weight", line["tokens"]) for line in lines]
        loss = math.fsum(line["loss"] * number for line, number in zip(lines, units, strict=True)) / math.fsum(units)
        return {"rows": len(lines), "tokens": tokens, "loss": loss, "perplexity": perplexity(loss)}

    def _header(self) -> dict[str, Any]:
        """Facts of what is scored and how: whoever reads scores compares its own rows and vocabulary with them."""
        setup, dataset, state = self._setup, self._setup.dataset, run_state(self._setup)
        return {
            "format": FORMAT,
            "model": setup.source.name,
            "sources": [source.name for source in dataset.sources],
            "rows": len(dataset.rows),
            "top_k": self._top_k and min(self._top_k, self._vocabulary),
            **{name: state[name] for name in STATES},
            "template_hash": template_hash(dataset.chat_template),
            "vocabulary_hash": vocabulary_hash(setup.tokenizer),
            "vocabulary_size": self._vocabulary,
            **{key: getattr(setup.recipe, key) for key in SETTINGS},
        }

    def _check_header(self, tell: Tell) -> None:
        path, new = self._folder / HEADER_NAME, json.loads(json.dumps(self._header()))
        if not (path.exists() or self._lines.exists()):
            write_atomically(path, json.dumps(new, indent=1).encode() + b"\n")
            return
        old, hint = read_values(path), f"--to another folder, or remove {self._folder}"
        if "format" not in old:
            raise RefusedError("nothing tells what the scores in this folder are of", where=str(path), hint=hint)
        what = "the folder holds scores of something else"
        changed = [key for key in {**old, **new} if key not in TOLD_ONLY and old.get(key) != new.get(key)]
        if changed:
            texts = [(key, short_json(new.get(key)), short_json(old.get(key))) for key in changed]
            raise RecipeError([Problem(what, *of_key, hint) for of_key in texts])
        tell_notices(tell, describe_other_bits(old, self._setup))

    def _cut_off(self, tell: Tell) -> None:
        """Find the windows that are finished, and cut off the lines behind them."""
        lines = self._lines.read_bytes().splitlines(keepends=True) if self._lines.exists() else []
        num_whole = next((number for number, line in enumerate(lines) if not _is_of(line, number)), len(lines))
        while self._left and self._done + (size := sum(map(len, self._left[0]))) <= num_whole:
            if self._top_k is not None and not self._table().is_file():
                break
            self._done += size
            del self._left[0]
        if lines:
            os.truncate(self._lines, sum(map(len, lines[: self._done])))
        parts, num_kept = {self._part(batch): batch for window in self._left for batch in window}, self._done
        for path in self._folder.glob("part-*.parquet"):
            if _rows_of(path) == parts.get(path):
                num_kept += len(parts[path])
            else:
                path.unlink()
        if lines or num_kept:
            tell(Notice(f"{num_kept} of {counted(len(self._setup.dataset.rows), 'row')} were scored before"))

    def _write_part(self, found: Sequence[tuple[int, RowScores]], path: Path) -> None:
        """Keep the scores of a microbatch until those of its window are there."""
        dataset, lines = self._setup.dataset, list[dict[str, Any]]()
        for index, scores in found:
            row = dataset.rows[index]
            weights = None if row.weights is None else row.weights[scores["positions"]].astype(np.float64)
            loss = -float(np.average(scores["log_probabilities"].astype(np.float64), weights=weights))
            where = dataset.where(row.row_id)
            if not math.isfinite(loss):
                raise NotFiniteError("the loss of a row is not finite", where=where, found=f"loss {loss}")
            line = {"row": index, "where": where, "digest": row_digest(row), "loss": loss}
            lines.append({**line, "tokens": len(scores["tokens"])})
            if weights is not None:
                lines[-1]["weight"] = weights.sum()
        table: dict[str, Any] = {name: [line[name] for line in lines] for name in ("row", "digest")}
        table["line"] = list(map(json.dumps, lines))
        for name in TYPES if self._top_k is not None else ():
            if name in found[0][1]:
                table[name] = _lists(name, [scores[name] for _, scores in found])
        _write_table(pyarrow.table(table), path)

    def _finish(self, parts: Sequence[Path]) -> None:
        """Add the scores of the next window, of which all parts are there."""
        table = pyarrow.concat_tables(map(parquet.read_table, parts)).sort_by("row").combine_chunks()
        if self._top_k is not None:
            _write_table(table.drop_columns("line"), self._table())
        append_line(self._lines, "\n".join(table["line"].to_pylist()))
        self._done += len(table)
        for path in parts:
            path.unlink()

    def _part(self, batch: Sequence[int]) -> Path:
        return self._folder / f"part-{batch[0]:09d}.parquet"

    def _table(self) -> Path:
        return self._folder / f"tokens-{self._done:09d}.parquet"


def _is_of(line: bytes, row: int) -> bool:
    """Whether a line is whole and that of a row: a kill leaves torn ones, an editor or a failing disk any."""
    with suppress(ValueError, TypeError, KeyError):
        return line.endswith(b"\n") and json.loads(line)["row"] == row
    return False


def _write_table(table: Any, path: Path) -> None:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, use_dictionary=False, write_statistics=False)
    write_atomically(path, bytes(sink.getvalue()))


def _rows_of(path: Path) -> list[int]:
    """The rows of a part, by number; none of one that cannot be read."""
    with suppress(pyarrow.ArrowException, OSError):
        return list(parquet.read_table(path, columns=["row"])["row"].to_pylist())
    return []


def _lists(name: str, values: Sequence[npt.NDArray[Any]]) -> Any:
    """A column of lists, one for each row; of probable tokens K values for each target in turn."""
    flat = [each.astype(TYPES[name]).ravel() for each in values]
    offsets = np.cumsum([0, *map(len, flat)], dtype=np.int32)
    return pyarrow.ListArray.from_arrays(offsets, pyarrow.array(np.concatenate(flat)))
