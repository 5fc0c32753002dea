"""Datasets of the Hugging Face hub, through the `datasets` library.

No code of a repository is ever run (`datasets` >= 4 has no loading scripts), and `offline` opens no connection. A
repository's README.md decides which files are read; they must be tables of this repository (`check_files`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from roundpipe_cli.data.rows import printable
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.hub.ask import TIMEOUT, Repository, UnreachableError, ask_hub, notice

READERS = frozenset({"json", "csv", "parquet", "text", "arrow"})
"""Readers of `datasets` that only parse tables; the others open archives, images or pickles."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""One file each, not a collection of files."""


def load_table(spec: DatasetSpec, offline: bool) -> Any:
    """The rows of a hub dataset, as the memory-mapped table that `datasets` makes of them.

    Raises:
        RefusedError: missing, private, unreachable and not cached, or without the split or configuration.
    """
    import datasets

    use_cache_only = offline or not _hub_answers(spec)
    try:
        with _no_network(use_cache_only):
            builder = datasets.load_dataset_builder(spec.path, spec.name)
            check_files(spec, builder)
            builder.download_and_prepare()
            return builder.as_dataset(split=spec.split)
    except RefusedError:
        raise
    except Exception as error:
        # `datasets` raises a dozen unrelated types here (ValueError for a split, OSError, DatasetsError, pyarrow's).
        raise _refusal(spec, error, use_cache_only, offline) from error


def check_files(spec: DatasetSpec, builder: Any) -> None:
    """Refuse a repository that wants other files read than tables of its own.

    Args:
        builder: of `datasets`; one from the cache names no files, as they were read before.

    Raises:
        RefusedError: a file elsewhere, an archive, or a reader that does more than parse.
    """
    reader = type(builder).__module__.rsplit(".", 1)[-1]
    files = [str(file) for group in (builder.config.data_files or {}).values() for file in group]
    outside = [file for file in files if not file.startswith(f"hf://datasets/{spec.path}@")]
    others = [file for file in files if not _without_compression(file).endswith(SUFFIXES)]
    if files and (outside or others or reader not in READERS):
        raise RefusedError(
            "the hub dataset asks for files that are not its own tables",
            where=f"datasets: {printable(spec.path)}",
            found=printable((outside or others or [f"the reader {reader}"])[0]),
            expected=f"files of this dataset named *{', *'.join(SUFFIXES)}",
            hint="download it, and name the files that hold the rows",
        )


def _without_compression(file: str) -> str:
    name = file.lower()
    return next((name.removesuffix(ending) for ending in COMPRESSED if name.endswith(ending)), name)


def _hub_answers(spec: DatasetSpec) -> bool:
    """Whether the hub can be asked for this dataset; False without a network, and then only the cache can help.

    Asked before `datasets` does, which retries for 23 s without a network, and takes a slow hub for none.

    Raises:
        RefusedError: the hub answered that there is no such dataset for this user.
    """
    from huggingface_hub import HfApi

    timeout: Any = TIMEOUT

    def question() -> object:
        return HfApi().dataset_info(spec.path, timeout=timeout)

    try:
        ask_hub(Repository(spec.path, "dataset"), question, notice)
    except UnreachableError as error:
        notice(f"the hub cannot be reached ({error}): {spec.path} is looked for in the cache")
        return False
    return True


def _refusal(spec: DatasetSpec, error: Exception, use_cache_only: bool, offline: bool) -> RefusedError:
    where = f"datasets: {printable(spec.path)}"
    if use_cache_only and isinstance(error, OSError):
        return RefusedError(
            "the hub dataset is not in the local cache",
            where=where,
            found="offline mode" if offline else "the hub cannot be reached",
            expected="a local file or folder, or a dataset that was downloaded before",
            hint="run once with a network, or name a local .jsonl, .json, .csv or .parquet file",
        )
    return RefusedError(
        f"cannot load split `{printable(spec.split)}` of the dataset",
        where=where,
        found=printable(f"{type(error).__name__}: {error}"),
        hint=None if spec.name else "some datasets need a configuration: `name: ...` beside `path:`",
    )


@contextmanager
def _no_network(active: bool) -> Iterator[None]:
    """Switch both libraries offline while the body runs; they read the environment only once, when imported."""
    import datasets.config
    import huggingface_hub.constants

    before = (datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE)
    if active:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before
