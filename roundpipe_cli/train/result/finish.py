"""The result of a run: adapter or model with tokenizer, and the report that marks the run as finished."""

from __future__ import annotations

import json
import math
import platform
import resource
import shlex
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from roundpipe_cli import __version__
from roundpipe_cli.costs.machine import processor_name
from roundpipe_cli.data.templates import find_template
from roundpipe_cli.engine.step import Microbatch, StepResult
from roundpipe_cli.errors import RefusedError, redact
from roundpipe_cli.events import DeviceLost, StepFinished
from roundpipe_cli.faults import fault
from roundpipe_cli.files import TEMPORARY_PREFIX, disk_error, sync, write_atomically, write_new_file
from roundpipe_cli.model.adapter_files import ADAPTER_WEIGHTS
from roundpipe_cli.model.files.source import ModelSource
from roundpipe_cli.model.fingerprint import Fingerprint
from roundpipe_cli.model.fused import fused_counts
from roundpipe_cli.model.load import build_skeleton
from roundpipe_cli.model.lora import save_adapter
from roundpipe_cli.model.new_tokens import grow_tables, load_with_tokens
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.stored.tensors import is_adapter
from roundpipe_cli.model.stored.untied import untie_stored
from roundpipe_cli.model.trained_on import TrainedOn
from roundpipe_cli.model.weights_io import BaseWeights, fill_buffers, save_model
from roundpipe_cli.recipe.load import load_text, resolved_yaml, values_as_yaml
from roundpipe_cli.schedule.pictures import chrome_trace
from roundpipe_cli.schedule.timeline import Interval, Timeline, makespan_s
from roundpipe_cli.train.checkpoint.manifest import (
    DamagedError,
    copy_folder,
    read_own_json,
    read_records,
    verify_files,
    write_manifest,
)
from roundpipe_cli.train.checkpoint.output_dir import (
    BEST_NOTE,
    LAST_NAMES,
    REPORT_NAME,
    RESULT_FOLDER_MODE,
    whole_folder,
)
from roundpipe_cli.train.checkpoint.reading import Checkpoint
from roundpipe_cli.train.checkpoint.resume import check_tensors
from roundpipe_cli.train.checkpoint.writing import TensorSpec, stream_file
from roundpipe_cli.train.prepare.base_files import BaseFiles, put_template, write_files
from roundpipe_cli.train.prepare.setup import DTYPES, Setup, config_and_files
from roundpipe_cli.train.prepare.trainable import make_trainable, start_folder
from roundpipe_cli.watchdog import at_work

# report.json: what a finished run was and what it measured.

LAST_STEPS = 5
ETA_STEPS = 20
TRACED_STEPS = 3


class RunLog:
    """Figures of a run. Rows, times and bytes are of the steps since the start or the last resume."""

    def __init__(self, *, trace: bool) -> None:
        """`trace`: keep the timelines of the last steps."""
        self.earlier_s = 0.0
        """Seconds that the run took before it was resumed."""
        self.earlier_losses: Mapping[int, float] = {}
        """Step -> loss of the steps before it was resumed, as far as their rows are known."""
        self.timelines: deque[Timeline] = deque(maxlen=TRACED_STEPS if trace else 0)
        """The last steps."""
        self.longest_row = 0
        """Tokens of the longest row until now."""
        self.rows: list[StepFinished] = []
        self.lost: list[tuple[int, DeviceLost]] = []
        """Lost devices, each with the number of rows before."""
        self.pipeline_s: list[float] = []
        """Seconds of forward and backward of each step."""
        self.launch_bound: list[float] = []
        """Share of each step's busy time in which GPUs may have waited for launches."""
        self._counts: list[int] = []
        """Microbatches of each step."""
        self._started_s = time.monotonic()

    def start(self) -> None:
        """Note the start of training."""
        self._started_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of training, those before the last resume included."""
        return self.earlier_s + time.monotonic() - self._started_s

    @property
    def tokens(self) -> float | None:
        """Median of the steps' tokens; None before the first step."""
        return _median([row.tokens for row in self.rows])

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches of most steps; None before the first step."""
        return statistics.mode(self._counts) if self._counts else None

    def computed(self, result: StepResult, microbatches: Sequence[Microbatch]) -> None:
        """A step's forward and backward are done."""
        self.longest_row = max(self.longest_row, *(one.input_ids.shape[1] for one in microbatches))
        self._counts.append(len(microbatches))
        self.pipeline_s.append(result.step_s)
        self.launch_bound.append(result.launch_bound_ratio)
        if self.timelines.maxlen:
            intervals = *result.timeline.intervals, *result.links, *result.waits
            self.timelines.append(replace(result.timeline, intervals=intervals))

    def eta_s(self, step_s: float, steps_left: int) -> float:
        """Seconds until the end, where the newest step took `step_s`."""
        recent = [row.step_s for row in self.rows[-ETA_STEPS:]] + [step_s]
        return statistics.median(recent) * steps_left


def make_report(
    setup: Setup, log: RunLog, predicted: Mapping[str, float], *, num_steps: int, moments_bytes: int
) -> dict[str, Any]:
    """The report of a run.

    Args:
        predicted: the simulator's figures for a full step, from the costs measured in the first steps, and what
            `plan` says of memory; may be empty.
        num_steps: since the start of the run.
        moments_bytes: host memory that the optimizer keeps.
    """
    import transformers

    store, rows = setup.store, log.rows
    loss_of = {**log.earlier_losses, **{row.step: row.loss for row in rows}}
    losses = [loss_of[step] for step in sorted(loss_of) if math.isfinite(loss_of[step])]
    return {
        "tool_version": __version__,
        "model": setup.source.name,
        "model_commit": setup.source.commit,
        "method": setup.recipe.method,
        "dtype": setup.recipe.dtype,
        "kernels": {"setting": setup.recipe.kernels, "fused": fused_counts(setup.fused)},
        "devices": list(setup.devices),
        "machine": {"processor": processor_name() or platform.machine(), "torch": torch.__version__},
        "command": shlex.join(["roundpipe", *map(redact, sys.argv[1:])]),
        "transformers": transformers.__version__,
        "num_steps": num_steps,
        "seconds": log.seconds,
        "data": {
            name: getattr(setup.dataset.report, name)
            for name in ("rows_read", "rows_kept", "rows_truncated", "rows_bad", "trained_tokens")
        },
        "loss": {
            "first": losses[0] if losses and 1 in loss_of else None,
            "last": losses[-1] if losses else None,
            f"mean_of_last_{LAST_STEPS}": statistics.fmean(losses[-LAST_STEPS:]) if losses else None,
        },
        "predicted": dict(predicted) or None,
        "measured": {
            "steps": len(rows),
            "first_step": rows[0].step if rows else None,
            "step_s": _median([row.step_s for row in rows]),
            "pipeline_s": _median(log.pipeline_s),
            "tokens_per_s": _median([row.tokens_per_s for row in rows]),
            # A step's own figure, so that it is the one that the dashboard shows for the run.
            "bubble_ratio": statistics.median_low([row.bubble_ratio for row in rows]) if rows else None,
            "launch_bound_ratio": _median(log.launch_bound),
            "upload_bytes_per_step": _median([float(row.upload_bytes) for row in rows]),
            "device_peak_bytes": max((row.device_peak_bytes for row in rows), default=0),
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "host_store_bytes": {**store.num_bytes(), "moments": moments_bytes},
        },
        "lost_devices": [_loss_figures(rows, before, event) for before, event in log.lost],
    }


def _loss_figures(rows: Sequence[StepFinished], before: int, event: DeviceLost) -> dict[str, Any]:
    """A lost device, with the speed before and after; the step that was computed twice counts for neither."""
    parts = {"before": rows[:before], "after": rows[before + 1 :]}
    return {
        **{name: getattr(event, name) for name in ("device", "worker", "at", "cause", "time_s")},
        **{f"tokens_per_s_{name}": _median([row.tokens_per_s for row in part]) for name, part in parts.items()},
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


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
        raise disk_error(error, output_dir, "the result") from error
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
    save_adapter(peft_model, masters, folder)
    path = folder / ADAPTER_WEIGHTS
    with safe_open(str(path), framework="pt") as file:
        tensors = [(key, file.get_tensor(key)) for key in file.keys()]  # noqa: SIM118 - no mapping
        specs = [TensorSpec.of(name, tensor) for name, tensor in tensors]
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        write_new_file(temporary, stream_file(specs, tensors, {**file.metadata(), **base.metadata()}), 0o644)
    temporary.replace(path)


def _write_model(model: Any, weights: Mapping[str, torch.Tensor], base_files: BaseFiles, folder: Path) -> None:
    save_model(model, weights, folder)
    write_files(base_files.contents(model, model.dtype), folder)


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


def write_report(output_dir: Path, report: Mapping[str, Any]) -> None:
    """Write report.json, which says that the run is finished."""
    write_atomically(output_dir / REPORT_NAME, (json.dumps(report, indent=2) + "\n").encode(), mode=0o644)


def write_trace(path: Path, steps: Sequence[Timeline]) -> None:
    """Write consecutive steps as one picture for Perfetto (Trace Event format).

    Args:
        steps: what was done in each; the time between them is left out.
    """
    intervals: list[Interval] = []
    offset_s = 0.0
    for timeline in steps:
        for item in timeline.intervals:
            intervals.append(item._replace(start_s=item.start_s + offset_s, end_s=item.end_s + offset_s))
        offset_s += makespan_s(timeline)
    whole = Timeline(steps[0].num_workers, tuple(intervals))
    write_atomically(path, json.dumps(chrome_trace(whole)).encode(), mode=0o644)


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
