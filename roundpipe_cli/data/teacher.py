"""A teacher's figures for rows, from a folder that `roundpipe score --top-k` wrote: checked as a whole, then mapped.

Tables are compressed, in the order of their rows; training takes rows in any order. A run therefore copies all figures
into files that have no name and end with the process, and maps them. N targets of rows, K kept tokens of each.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from roundpipe_cli.choices import IGNORED_LABEL
from roundpipe_cli.data.tokenized import Row
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import HEADER_NAME
from roundpipe_cli.files import disk_error
from roundpipe_cli.regular_files import named_path, read_json_of_ours, tried_paths
from roundpipe_cli.units import counted

FORMAT = "roundpipe scores 1"
COLUMNS: Mapping[str, Any] = {"top_ids": np.int32, "top_log_probabilities": np.float16, "mass_left": np.float32}
ROUNDING = 0.01
"""Most by which a place's probabilities may miss 1; float16 makes at most 2^-11 of their entropy: 0.6 % of 250,000."""

TargetFigures = list[npt.NDArray[Any]]
"""Arrays of `COLUMNS`: [N, K], [N, K] and [N]."""


def row_digest(row: Row) -> str:
    """SHA-256 of a row's ids, then its labels, both int32 in little-endian order."""
    return hashlib.sha256(row.input_ids.astype("<i4").tobytes() + row.labels.astype("<i4").tobytes()).hexdigest()


def template_hash(template: str | None) -> str | None:
    """SHA-256 of a chat template; None: there is none."""
    return template and hashlib.sha256(template.encode()).hexdigest()


def vocabulary_hash(tokenizer: Any) -> str:
    """SHA-256 over the words of a tokenizer with their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def find_teacher(named: str | None, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a teacher's scores, by its name in a recipe in `folder`, and its header.

    Raises:
        RefusedError: there is none, or it has no tables of probable tokens.
    """
    assert named is not None, "a recipe without one is refused"
    found = next((path for path in tried_paths(named, folder) if path.is_dir()), named_path(named))
    header: Any = None
    with suppress(OSError, ValueError):
        header = read_json_of_ours(found / HEADER_NAME)
    is_ours = isinstance(header, dict) and header.get("format") == FORMAT and isinstance(header.get("rows"), int)
    if is_ours and isinstance(header.get("top_k"), int):
        return found, header
    what = f"{'these scores have no tables' if is_ours else 'no scores are there'} to learn from"
    hint = f"roundpipe score RECIPE ROWS model=TEACHER --top-k 64 --to {shlex.quote(str(found))}"
    raise RefusedError(what, where="distill.teacher", found=str(found / HEADER_NAME), hint=hint)


@dataclass(frozen=True)
class Teacher:
    """A teacher's figures for all rows of a folder."""

    folder: Path
    header: Mapping[str, Any]
    places: Mapping[str, tuple[int, int]]
    """Digest of a row -> where its targets begin and end in `arrays`."""
    arrays: TargetFigures
    """Figures of all rows end to end; none where they were only checked."""
    content_hash: str
    """SHA-256 over all rows' digests and figures, whatever the tables that hold them."""
    mean_left: float
    """Mean probability of the tokens that were not kept."""

    def lacking(self, rows: Iterable[Row]) -> list[Row]:
        """The rows that it has no figures for, one for each target."""
        sizes = {digest: end - begin for digest, (begin, end) in self.places.items()}
        return [row for row in rows if sizes.get(row_digest(row)) != np.sum(row.labels[1:] != IGNORED_LABEL)]

    def figures(self, rows: Iterable[Row]) -> TargetFigures:
        """Figures of these rows' targets, in their order."""
        places = [slice(*self.places[row_digest(row)]) for row in rows]
        return [np.concatenate([one[place] for place in places]) for one in self.arrays]

    def describe(self, evaluation: Sequence[Row] = ()) -> Iterator[str]:
        """Lines for the user; `evaluation`: rows to evaluate on."""
        kept = (
            f"{self.header['top_k']} tokens at each place, with {1 - self.mean_left:.2%} of the probability on average"
        )
        yield f"teacher: {self.header.get('model')}, {counted(len(self.places), 'row')} in {self.folder}; {kept}"
        if left := self.lacking(evaluation):
            yield f"evaluation: cross entropy alone, as the teacher has no scores of {counted(len(left), 'row')}"


def open_teacher(folder: Path, header: Mapping[str, Any], *, num_tokens: int, copy_to: Path | None) -> Teacher:
    """Read and check all figures in a folder of `find_teacher`.

    Args:
        num_tokens: of the student's vocabulary, as its LM head has it.
        copy_to: folder on whose disk the figures are until the process ends; None: they are only checked.

    Raises:
        RefusedError: they are not whole, or of tokens that the student does not have.
        ResourceError: the disk is full.
    """
    ends, digests, arrays, sums = [0], list[str](), TargetFigures(), 0.0
    hashes = [hashlib.sha256() for _ in COLUMNS]
    with ExitStack() as stack:
        try:
            names = () if copy_to is None else COLUMNS
            files = [stack.enter_context(tempfile.TemporaryFile(prefix=".tmp-teacher-", dir=copy_to)) for _ in names]
            for path in sorted(folder.glob("tokens-*.parquet")):
                rows, counts, parts = _table(path, header["top_k"], num_tokens)
                digests += rows
                ends += (ends[-1] + np.cumsum(counts)).tolist()
                sums += float(parts[-1].sum(dtype=np.float64))
                for one, part in zip(hashes, parts, strict=True):
                    one.update(part.tobytes())
                for file, part in zip(files, parts, strict=False):
                    file.write(part.tobytes())
            for file, kind in zip(files, COLUMNS.values(), strict=False):
                file.flush()
                arrays.append(np.memmap(file, kind, "r+") if ends[-1] else np.empty(0, kind))
        except OSError as error:
            raise disk_error(error, copy_to or folder, "the teacher's figures") from error
    if len(digests) != header["rows"]:
        what, found = "the teacher's scores are not complete", f"{len(digests)} of {header['rows']} rows"
        raise RefusedError(what, where=str(folder), found=found, hint="the command that made it, again: it continues")
    places = dict(zip(digests, zip(ends, ends[1:], strict=False), strict=True))
    arrays = [one if one.dtype == np.float32 else one.reshape(-1, header["top_k"]) for one in arrays]
    content = hashlib.sha256("".join([*digests, *(one.hexdigest() for one in hashes)]).encode()).hexdigest()
    return Teacher(folder, header, places, arrays, content, sums / max(1, ends[-1]))


def _table(path: Path, top_k: int, num_tokens: int) -> tuple[list[str], npt.NDArray[Any], TargetFigures]:
    """Digests of a table's rows, their numbers of targets, and its checked figures."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    hint = "remove the file and repeat the command that made it, which computes what is missing"
    try:
        table = parquet.read_table(path, columns=["digest", *COLUMNS])
        columns = [table[name].combine_chunks() for name in COLUMNS]
        counts = [np.diff(one.offsets.to_numpy()) for one in columns]
        ids, values, left = parts = [one.flatten().to_numpy(zero_copy_only=False) for one in columns]
        if [one.dtype for one in parts] != [np.dtype(kind) for kind in COLUMNS.values()]:
            raise ValueError("columns of other types")
        if not all(np.array_equal(one, top_k * counts[2]) for one in counts[:2]):
            raise ValueError(f"not {top_k} tokens at each place")
        if not (np.isfinite(values).all() and np.isfinite(left).all()):
            raise ValueError("a probability that is no finite number")
        sums = np.exp(np.minimum(values, 1), dtype=np.float32).reshape(-1, top_k).sum(axis=1) + left
        if (np.abs(sums - 1) > ROUNDING).any() or (left < 0).any() or (ids < 0).any():
            raise ValueError("probabilities of a place that do not add up to 1, or an id below 0")
        if not np.diff(np.sort(ids.reshape(-1, top_k), axis=1), axis=1).all():
            raise ValueError("a token twice at one place")
    except (OSError, pyarrow.ArrowException, KeyError, AttributeError, ValueError) as error:
        found = str(error).partition("\n")[0]
        raise RefusedError("the teacher's scores are damaged", where=str(path), found=found, hint=hint) from error
    if (most := ids.max(initial=0)) >= num_tokens:
        what, expected = "the teacher's tokens are not all in the student's vocabulary", f"ids below {num_tokens}"
        raise RefusedError(what, where=str(path), found=f"token {most}", expected=expected)
    return table["digest"].to_pylist(), counts[2], parts
