"""The result of a run or of one of its checkpoints: adapter or model with tokenizer, complete files only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from roundpipe_cli.data.templates import find_template
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.faults import fault
from roundpipe_cli.files import RESUME_AGAIN, TEMPORARY_PREFIX, disk_error, sync, write_new_file
from roundpipe_cli.model.adapter_files import ADAPTER_WEIGHTS
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.fingerprint import Fingerprint
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import save_adapter
from roundpipe_cli.model.new_tokens import grow_tables, load_with_tokens
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.stored.tensors import is_adapter
from roundpipe_cli.model.stored.untied import untie_stored
from roundpipe_cli.model.trained_on import TrainedOn
from roundpipe_cli.model.weights_io import BaseWeights, fill_buffers, save_model
from roundpipe_cli.recipe.load import load_text, resolved_yaml, values_as_yaml
from roundpipe_cli.train.checkpoint.manifest import (
    DamagedError,
    copy_folder,
    read_own_json,
    read_records,
    verify_files,
    write_manifest,
)
from roundpipe_cli.train.checkpoint.output_dir import BEST_NOTE, LAST_NAMES, RESULT_FOLDER_MODE, whole_folder
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.checkpoint.resume import check_tensors
from roundpipe_cli.train.checkpoint.writing import TensorSpec, stream_file
from roundpipe_cli.train.prepare.base_files import BaseFiles, put_template, write_files
from roundpipe_cli.train.prepare.ready import DTYPES, Setup
from roundpipe_cli.train.prepare.setup import config_and_files
from roundpipe_cli.train.prepare.trainable import make_trainable, start_folder
from roundpipe_cli.train.result.report import write_report
from roundpipe_cli.watchdog import at_work

RESULT_FOLDER = ".tmp-result"


def save_result(setup: Setup, output_dir: Path, best: Path | None = None) -> list[str]:
    """Write adapter or model and tokenizer into `output_dir`: complete files only, the configuration last.

    Args:
        best: a folder of `write_best` whose files are the result, in place of the weights as they are now.

    Returns:
        the names of the files.

    Raises:
        ResourceError: disk full or failing; the checkpoints are as they were.
        DamagedError: the files of `best` are not as they were written; nothing of them was taken.
    """
    temporary = output_dir / RESULT_FOLDER
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        if best is None:
            _fill(setup, temporary)
        else:
            if not best.is_dir():
                raise DamagedError(best, "no such folder", "the best weights")
            copy_folder(best, temporary)
            verify_best(temporary)  # of the copy, so that the verified bytes are the ones used
        paths = _synced(temporary)
        for name in LAST_NAMES:  # files of an earlier result: old and new weights must not mix
            (output_dir / name).unlink(missing_ok=True)
        for path in paths:
            with at_work(f"writing {path.name}"):
                fault("export")
                target = output_dir / path.relative_to(temporary)
                if target.parent != output_dir:
                    target.parent.mkdir(exist_ok=True)
                    target.parent.chmod(RESULT_FOLDER_MODE)
                path.rename(target)
                if target.parent != output_dir:
                    sync(target.parent)
        sync(output_dir)
        return [path.relative_to(temporary).as_posix() for path in paths]
    except OSError as error:
        raise disk_error(error, output_dir, "the result", again=RESUME_AGAIN) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_best(setup: Setup, folder: Path, note: Mapping[str, Any]) -> None:
    """Write adapter or model and tokenizer as the new folder `folder`, wholly or not at all, with a note that holds
    `note` and what `verify_best` needs.

    Raises:
        ResourceError: disk full or failing.
    """
    with whole_folder(folder, "the best weights") as temporary:
        _fill(setup, temporary)
        write_manifest(temporary, BEST_NOTE, note)
        _synced(temporary)
        sync(temporary)


def verify_best(folder: Path) -> None:
    """Compare every byte of a folder of `write_best` with its note.

    Raises:
        DamagedError: the first difference.
    """
    records = read_records(folder / BEST_NOTE, read_own_json(folder / BEST_NOTE).get("files"), depth=2)
    verify_files(folder, records, BEST_NOTE)


def _fill(setup: Setup, folder: Path) -> None:
    """Make `folder` with the weights as they are now, what goes with them, and the tokenizer."""
    folder.mkdir()
    if setup.peft_model is not None:
        masters = {name: setup.store.master(name) for name in setup.store.views if is_adapter(name)}
        _write_adapter(setup.peft_model, masters, TrainedOn(setup.model_hash, setup.config_hash), folder)
    else:
        _write_model(setup.model, setup.store.views, setup.base_files, folder)
    write_files(setup.base_files.tokenizer, folder)


def _write_adapter(peft_model: Any, masters: Mapping[str, torch.Tensor], base: TrainedOn, folder: Path) -> None:
    """The library's file is written again with more in its header, and its tensors in one order."""
    with _errors_of_the_system():
        save_adapter(peft_model, masters, folder)
    path = folder / ADAPTER_WEIGHTS
    with safe_open(str(path), framework="pt") as file:
        tensors = [(key, file.get_tensor(key)) for key in file.keys()]  # noqa: SIM118 - no mapping
        specs = [TensorSpec.of(name, tensor) for name, tensor in tensors]
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        write_new_file(temporary, stream_file(specs, tensors, {**file.metadata(), **base.metadata()}), 0o644)
    temporary.replace(path)


def _write_model(model: Any, weights: Mapping[str, torch.Tensor], base_files: BaseFiles, folder: Path) -> None:
    with _errors_of_the_system():
        save_model(model, weights, folder)
    write_files(base_files.contents(model, model.dtype), folder)


@contextlib.contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """A block in which a write that fails is an OSError, of which the library only keeps the text."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else error from error


def _synced(folder: Path) -> list[Path]:
    """The folder's files, durable and readable by all, in the order in which to rename them."""
    files = [path for path in folder.rglob("*") if path.is_file()]  # some are in additional_chat_templates/
    files.sort(key=lambda path: (path.name in LAST_NAMES, path.name))
    for path in files:
        path.chmod(0o644)
        sync(path)
        if path.parent != folder:
            sync(path.parent)
    return files


# The result that a run would have had if it had ended at one of its checkpoints.


def write_checkpoint_result(checkpoint: Checkpoint, source: ModelSource, folder: Path) -> None:
    """Write a checkpoint's adapter or model as the new folder `folder`, with tokenizer, recipe and a short report.

    Args:
        source: the base model: its configuration and tokenizer, and weights of it that were not trained.

    Raises:
        RefusedError: the recipe's adapter or template cannot be made again, or the base model is another one.
        NoCheckpointError: the checkpoint's tensors are others than those of the model.
    """
    meta = checkpoint.meta
    loaded = load_text(values_as_yaml(meta["recipe"]), str(checkpoint.folder.parent / "recipe.yaml"))
    recipe = loaded.recipe
    config, base_files = config_and_files(source, recipe, lambda event: None)
    model = build_skeleton(config, DTYPES[recipe.dtype])
    tokenizer, new = load_with_tokens(source, recipe.add_tokens)
    grow_tables(model, new.ids)
    if source.gguf_file is None:
        untie_stored(model, source.folder)
    peft_model = make_trainable(
        model, split_model(model), recipe, source, new=new, dtype=DTYPES[recipe.dtype], start=start_folder(loaded)
    )
    fill_buffers(source, model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    check_tensors(checkpoint, {"masters": trained})
    masters = checkpoint.tensors["masters"]
    template = find_template(tokenizer, recipe.chat_template, loaded.folder, recipe.chat_template_kwargs)
    if template is not None:
        put_template(tokenizer, template)
    base_files = base_files.with_tokenizer(source, tokenizer)
    folder.mkdir()
    if peft_model is not None:
        _write_adapter(peft_model, masters, TrainedOn(meta["model_hash"], meta["config_hash"]), folder)
    else:
        weights = _whole_weights(model, masters, source, meta["model_hash"])
        _write_model(model, weights, base_files.ending_as_trained(tokenizer)[0], folder)
    write_files(base_files.tokenizer, folder)
    (folder / "recipe.yaml").write_text(resolved_yaml(recipe), encoding="utf-8")
    write_report(folder, {"model": recipe.model, "model_commit": source.commit, "num_steps": checkpoint.step})


def _whole_weights(
    model: nn.Module, masters: Mapping[str, torch.Tensor], source: ModelSource, trained_on: str
) -> dict[str, torch.Tensor]:
    """Every weight of the model in its own type: the trained ones, and the base's where some were not, which must have
    the fingerprint `trained_on`."""
    parameters = dict(model.named_parameters())
    base: Mapping[str, torch.Tensor] = {}
    if parameters.keys() - set(masters):
        if (found := Fingerprint(source).result()) != trained_on:
            raise RefusedError(
                "the weights that were not trained are the base model's, and this is another one",
                where=source.name,
                found=f"weights {found[:12]}",
                expected=f"weights {trained_on[:12]}, with which the run began",
                hint="name the base model that was trained with --base",
            )
        base = BaseWeights(source, model, next(iter(parameters.values())).dtype)
    return {name: (masters if name in masters else base)[name].to(one.dtype) for name, one in parameters.items()}
