"""`roundpipe export`: the result of a run as a folder for other programs, as a GGUF file, or uploaded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from roundpipe_cli.cli.options import BaseOption, OfflineOption, OtherBaseOption
from roundpipe_cli.cli.output import go_offline, load_libraries, say, say_data
from roundpipe_cli.errors import Problem, RefusedError, redact
from roundpipe_cli.files import TEMPORARY_PREFIX, shared_mode
from roundpipe_cli.regular_files import kind_of_file, named_path, stays_inside
from roundpipe_cli.train.result.gguf_types import CONVERTER_TYPES, GGUF_NAME, GGUF_TYPES
from roundpipe_cli.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from roundpipe_cli.model.files.source import ModelSource


# Extras of `export` for a finished folder: a GGUF file by llama.cpp's converter, an upload.

CONVERTER = "convert_hf_to_gguf.py"
CONVERTER_S, CONVERTER_BYTES_PER_S = 600.0, 2e6
"""Seconds after which a converter counts as stuck, beside those for the model's bytes: any disk is faster."""
INSTALL = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install -r "
    "llama.cpp/requirements/requirements-convert_hf_to_gguf.txt, "
    "then --gguf --converter llama.cpp/convert_hf_to_gguf.py"
)


def convert_to_gguf(converter: Path, folder: Path, type_name: str = GGUF_TYPES[0]) -> Path:
    """Convert the model in `folder` by llama.cpp's converter; returns the file, which is in it.

    Raises:
        RefusedError: the converter failed, with its last lines, or is not done in time.
    """
    target = folder / GGUF_NAME
    words = [sys.executable, str(converter), str(folder), "--outfile", str(target), "--outtype", type_name]
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    exit_code, said = _run(words, CONVERTER_S + num_bytes / CONVERTER_BYTES_PER_S)
    if exit_code or not target.is_file():
        target.unlink(missing_ok=True)
        raise RefusedError(
            "the converter to GGUF failed; the merged model is as it was",
            where=str(converter),
            found=redact(" / ".join(said.strip().splitlines()[-3:]))[-500:] or f"exit code {exit_code}",
            hint=f"by hand: {shlex.join(words)}",
        )
    target.chmod(shared_mode(0o666))
    return target


def _check_gguf_type(type_name: str | None) -> str | None:
    name = type_name.lower() if type_name is not None else None
    if type_name is not None and name not in (*GGUF_TYPES, *CONVERTER_TYPES):
        raise _not_written("this type of a GGUF file is not written here", type_name, GGUF_TYPES, type_name)
    return name


def _not_written(what: str, found: str, types: Sequence[str], type_name: str) -> RefusedError:
    hint = f"--gguf, then llama.cpp's llama-quantize {GGUF_NAME} small.gguf {type_name}"
    hint += f"; or ollama create NAME --quantize {type_name}"
    return RefusedError(what, where="--gguf", found=found, expected=f"one of {', '.join(types)}", hint=hint)


def _find_gguf_writer(result: Path, base: ModelSource | None, type_name: str, named: Path | None) -> Path | None:
    """llama.cpp's converter, as named or on the PATH, where the file is not written here or the user named it; None: it
    is written here. `base`: what `result` is merged into, with its tokenizer where that has none."""
    from roundpipe_cli.model.files.source import ModelSource
    from roundpipe_cli.model.load import has_tokenizer, load_tokenizer
    from roundpipe_cli.train.result.gguf_file import why_not_written

    own = ModelSource(str(result), result)
    why = None
    if named is None and type_name in GGUF_TYPES:
        tokenizer = load_tokenizer(own if base is None or has_tokenizer(result) else base)
        why = why_not_written(base or own, tokenizer)
        if why is None:
            return None
        say(f"note: the GGUF file is made by llama.cpp's {CONVERTER}: {why} are not written here")
    if type_name not in CONVERTER_TYPES:
        found = type_name if why is None else f"{type_name}, and {why} are not written here"
        raise _not_written(f"llama.cpp's {CONVERTER} does not write this type", found, CONVERTER_TYPES, type_name)
    program = named_path(named) if named is not None else Path(shutil.which(CONVERTER) or "")
    if not program.is_file():
        missing = f"no file {named}" if named is not None else "it is not on the PATH"
        raise RefusedError(f"--gguf needs llama.cpp's {CONVERTER}", found=missing, hint=INSTALL)
    return program


def _run(words: list[str], limit_s: float) -> tuple[int, str]:
    """Exit code of a program, and what it printed; ended by SIGKILL after `limit_s`."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=limit_s)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, f"it was not done after {format_seconds(limit_s)} and was ended"
    return done.returncode, done.stderr or done.stdout


def push(folder: Path, name: str) -> str:
    """Upload `folder` to the hub, as a private repository if it is new; returns its address.

    Raises:
        RefusedError: not logged in, no network, the hub refuses, or a file is a link that leads out of the folder.
    """
    check_upload(folder)
    hint = f"hf auth login, then: hf upload {name} {shlex.quote(str(folder))}"
    return _upload(folder, name, Problem("the upload failed; the folder is as it was", f"--push {name}", hint=hint))


def push_result(output_dir: Path, name: str) -> str:
    """Upload the result of a finished run, without its checkpoints and logs; returns the repository's address.

    Raises:
        RefusedError: as of `push`; the result is there and can be uploaded later.
        ResourceError: disk full or failing.
    """
    import tempfile  # would be a tenth of the time of `export --help`

    from roundpipe_cli.train.result.export import copy_result

    words = "roundpipe", "export", str(output_dir), "--to", f"{output_dir}-exported", "--push", name
    hint = f"hf auth login, then: {shlex.join(words)}"
    problem = Problem("the run is finished, and its upload failed", f"hub_model_id: {name}", hint=hint)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=output_dir) as folder:
        copy_result(output_dir, Path(folder) / "result", lambda note: None)
        return _upload(Path(folder) / "result", name, problem)


def make_repository(name: str, *, offline: bool) -> None:
    """Make the repository that a run's result will be uploaded to, unless it is there: a mistake shows before training.

    Raises:
        RefusedError: not logged in, no network, or the hub refuses.
    """
    what, where = "the result of this run could not be uploaded", f"hub_model_id: {name}"
    if offline:
        raise RefusedError(what, where=where, found="--offline", hint="~hub_model_id uploads nothing")
    _upload(None, name, Problem(what, where, hint="hf auth login; or delete the line"))


def _upload(folder: Path | None, name: str, problem: Problem) -> str:
    """Make a repository if it is new, and upload `folder`, if there is one."""
    import huggingface_hub

    api: Any = huggingface_hub.HfApi()
    try:
        address = str(api.create_repo(name, private=True, exist_ok=True))
        if folder is not None:
            api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Upload from roundpipe")
    except Exception as error:  # errors of the network, the login or the hub: all are for the user
        found = redact(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
        raise RefusedError(problem.what, where=problem.where, found=found, hint=problem.hint) from error
    return address


def check_upload(folder: Path) -> None:
    """Refuse to upload what does not lie in `folder`: the hub's client reads through links.

    Raises:
        RefusedError: a link that leads out of it, or no regular file.
    """
    for path in sorted(folder.rglob("*")):
        leads_out = not stays_inside(path, folder)
        if leads_out or not (path.is_dir() or path.is_file()):
            raise RefusedError(
                "a file of the folder is not uploaded, and so none is",
                where=str(path),
                found=f"a link to {path.resolve()}" if leads_out else kind_of_file(path.stat().st_mode),
                expected="regular files of the folder itself",
                hint="put a copy of the file in its place, or remove it",
            )


def export(
    output_dir: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT_DIR", help="Folder of a run, one of its checkpoints, or any adapter in PEFT's format."
        ),
    ],
    merge: Annotated[bool, typer.Option("--merge", help="Add the adapter to the base model's weights.")] = False,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="New folder. [default: OUTPUT_DIR/merged or exported]")
    ] = None,
    base: BaseOption = None,
    allow_other_base: OtherBaseOption = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Of merged or whole weights: bfloat16, float16, float32. [default: as they are]"),
    ] = None,
    adapter_layout: Annotated[
        str,
        typer.Option(
            "--adapter-layout", help="Names of experts' adapters: peft, or vllm: of single experts, as vLLM documents."
        ),
    ] = "peft",
    gguf: Annotated[
        str | None,
        typer.Option(
            "--gguf",
            metavar="[TYPE]",
            help=f"Also write a GGUF file: {', '.join(GGUF_TYPES)} [default: bf16]; of an adapter alone in float32.",
        ),
    ] = None,
    converter: Annotated[
        Path | None,
        typer.Option("--converter", metavar="FILE", help=f"llama.cpp's {CONVERTER}, for other families and types."),
    ] = None,
    push_to: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="Upload the folder to the hub; private if new.")
    ] = None,
    offline: OfflineOption = False,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout: folder, files, errors of packing again.")
    ] = False,
) -> None:
    """Write the result of a run as a new folder: the adapter alone, or merged into its base model.

    Of OUTPUT_DIR/step-00000200, and of a run that was stopped, it is what that checkpoint, or the newest, would give.

    Example: roundpipe export outputs/quickstart --merge --to quickstart-merged
    """
    say(f"reading {output_dir} ...")
    found = find_result(output_dir)
    if merge and found.kind == "model":
        say("note: this result is a whole model: there is nothing to merge")
        merge = False
    gguf = _check_gguf_type(gguf)
    check_dtype(dtype)
    if adapter_layout not in ("peft", "vllm"):
        raise RefusedError("unknown layout of adapters", found=adapter_layout, expected="peft or vllm")
    is_whole = merge or found.kind == "model"
    for is_wrong, what, hint in (
        (not is_whole and gguf not in (None, GGUF_TYPES[0], "f32"), "adapters are written in float32", "--gguf f32"),
        (converter is not None and not is_whole, "--converter is for whole models", "leave it out, or add --merge"),
        (push_to is not None and offline, "--push needs a connection", "leave --offline out"),
        (adapter_layout == "vllm" and is_whole, "--adapter-layout is for adapters", "leave it or --merge out"),
        (dtype and not is_whole, "--dtype is for whole weights", "add --merge"),
    ):
        if is_wrong:
            raise RefusedError(what, where=str(output_dir), hint=hint)
    target = named_path(to or found.default_target("merged" if merge else "exported"))
    if os.path.lexists(target):
        raise RefusedError("the folder to export to exists already", where=str(target), hint="name another with --to")
    if offline:
        go_offline()
    program, rounding = None, dict[str, float]()
    with opened_result(found, base, offline=offline, needs_base=merge, allowed=allow_other_base) as (result, source):
        load_libraries()
        from roundpipe_cli.train.result.export import copy_result, merge_result

        if gguf is not None and is_whole:
            program = _find_gguf_writer(result, source if merge else None, gguf, converter)
        made: dict[str, Any] = {"tell": _note, "base": base, "gguf": gguf is not None}
        if merge or (dtype and is_whole):
            line, rounding = merge_result(result, source if merge else None, target, dtype, progress=say, **made)
            say(line)
        else:
            made["single_experts"] = adapter_layout == "vllm"
            if not is_whole and (made["single_experts"] or gguf is not None):
                made["source"] = source or find_adapter_base(result, base, offline=offline)
            copy_result(result, target, **made)
    if gguf is not None and is_whole:
        _write_gguf(target, gguf, program)
    if push_to is not None:
        say(f"uploaded to {push(target, push_to)}")
    files = {path.name: path.stat().st_size for path in sorted(target.iterdir()) if path.is_file()}
    document = {"folder": str(target), "merged": merge, "pushed_to": push_to, "files": files, "rounding": rounding}
    say_data(json.dumps(document) if json_ else str(target))


def _note(text: str) -> None:
    say(f"note: {text}")


def _write_gguf(folder: Path, type_name: str, program: Path | None) -> None:
    say(f"writing {folder / GGUF_NAME} ...")
    if program is not None:
        convert_to_gguf(program, folder, type_name)
        return
    from roundpipe_cli.train.result.gguf_file import write_gguf

    path, notes = write_gguf(folder, type_name)
    for note in notes:
        _note(note)
    say(f"wrote {format_bytes(path.stat().st_size)} in {type_name}")


def check_dtype(dtype: str | None) -> None:
    """Raise a RefusedError for what is no dtype of weights."""
    known = "bfloat16, float16 or float32"
    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise RefusedError("unknown dtype", found=dtype, expected=known, hint="leave --dtype out")


@dataclass(frozen=True)
class FoundResult:
    """A result, or the checkpoint that one is made of."""

    folder: Path
    kind: Literal["adapter", "model"]
    checkpoint: Path | None = None

    def default_target(self, word: str) -> Path:
        """Folder to export to; of a checkpoint beside it, since checkpoints are removed."""
        if self.checkpoint is None:
            return self.folder / word
        return self.checkpoint.parent / f"{word}-{self.checkpoint.name}"


def find_result(folder: Path) -> FoundResult:
    """The result in a folder; of a run that has none yet, or of a checkpoint itself, what is to become one.

    Raises:
        RefusedError: there is neither.
    """
    if (folder / "adapter_config.json").is_file() and (folder / "adapter_model.safetensors").is_file():
        return FoundResult(folder, "adapter")
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return FoundResult(folder, "model")
    from roundpipe_cli.train.checkpoint.manifest import STATE_NAME, DamagedError, read_own_json
    from roundpipe_cli.train.checkpoint.output_dir import list_checkpoints, step_folder

    short = re.fullmatch(r"step-0*(\d{1,8})", folder.name)  # as step-20, whose folder is step-00000020
    named = step_folder(folder.parent, int(short[1])) if short else folder
    checkpoints = [named] if short and named.is_dir() else [path for _, path in list_checkpoints(folder)]
    for checkpoint in checkpoints:
        try:
            recipe = read_own_json(checkpoint / STATE_NAME)["meta"]["recipe"]
            kind: Literal["adapter", "model"] = "model" if recipe["method"] == "full" else "adapter"
        except (DamagedError, KeyError, TypeError):
            continue
        return FoundResult(folder, kind, checkpoint if short else checkpoints[0])
    from roundpipe_cli.dashboard.replay import instead_of, run_hint

    raise RefusedError(
        "there is no result of a run in this folder",
        where=str(folder),
        found="checkpoints that cannot be read" if checkpoints else instead_of("no weights in safetensors", folder),
        expected="adapter_model.safetensors or model.safetensors with its configuration, or a checkpoint",
        hint=run_hint(Path.cwd()),
    )


@contextlib.contextmanager
def opened_result(
    found: FoundResult, base: str | None, *, offline: bool, needs_base: bool, allowed: bool
) -> Iterator[tuple[Path, ModelSource | None]]:
    """The folder of a result, and its base model where that is needed. One made of a checkpoint is removed at the end.

    Args:
        needs_base: an adapter is used together with its base model, which is compared with the one that was trained.
        allowed: another base model is meant.

    Raises:
        RefusedError, NoCheckpointError: see `find_adapter_base`, `check_trained_on` and `write_checkpoint_result`.
    """
    import tempfile  # would be a tenth of the time of `export --help`

    if base is not None and found.kind == "model" and found.checkpoint is None:
        what = "--base is the base model of an adapter, and this result is a whole model"
        raise RefusedError(what, where=str(found.folder), found=f"--base {base}", hint="leave --base out")
    with contextlib.ExitStack() as stack:
        result, source = found.folder, None
        if found.checkpoint is not None:
            made = tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=found.checkpoint.parent)
            result, source = _make_of_checkpoint(
                found, found.checkpoint, base, Path(stack.enter_context(made)), offline=offline
            )
        elif needs_base and found.kind == "adapter":
            source = find_adapter_base(found.folder, base, offline=offline)
        if source is not None and needs_base and found.kind == "adapter":
            _compare_base(result, source, allowed=allowed)
        yield result, source


def _make_of_checkpoint(
    found: FoundResult, checkpoint: Path, base: str | None, folder: Path, *, offline: bool
) -> tuple[Path, ModelSource]:
    """The result of a checkpoint, made in `folder`, and its base model."""
    load_libraries()
    import torch

    from roundpipe_cli.train.checkpoint.output_dir import whole_folder
    from roundpipe_cli.train.checkpoint.reading import load_newest
    from roundpipe_cli.train.result.finish import write_checkpoint_result

    run = checkpoint.parent
    loaded = load_newest(run, checkpoint if found.folder != run else None, _note)
    say(f"taking the checkpoint of step {loaded.step}: {loaded.folder}")
    recipe = loaded.meta["recipe"]
    revision = loaded.meta.get("model_commit") or recipe.get("revision")
    source = _resolve_base(run, base, recipe["model"], revision, offline=offline)
    result = folder / f"{run.absolute().name}-{loaded.folder.name}"
    with torch.no_grad(), whole_folder(result, "the result of the checkpoint") as made:
        write_checkpoint_result(loaded, source, made)
    return result, source


def _compare_base(output_dir: Path, source: ModelSource, *, allowed: bool) -> None:
    """Say where a base model may be another than the adapter was trained on; refuse another, unless it is meant."""
    from roundpipe_cli.model.fingerprint import Fingerprint
    from roundpipe_cli.model.trained_on import check_trained_on

    def weights() -> str:
        say("comparing the base model with the one that was trained ...")
        return Fingerprint(source).result()

    text = check_trained_on(output_dir, source, allowed=allowed, weights=weights, where=str(source.name))
    if text is not None:
        _note(text)


def find_adapter_base(output_dir: Path, named: str | None, *, offline: bool) -> ModelSource:
    """The base model of an adapter: as named, else as the run's recipe or the adapter's configuration says.

    Raises:
        RefusedError: it is named nowhere, or not to be found.
    """
    from roundpipe_cli.train.checkpoint.output_dir import read_values

    names = ("recipe.yaml", "report.json", "adapter_config.json")
    recipe, report, adapter = (read_values(output_dir / name) for name in names)
    trained = recipe.get("model") or adapter.get("base_model_name_or_path")
    if not (named or trained):
        what = "cannot tell the base model of this adapter"
        raise RefusedError(what, where=str(output_dir), hint="name it with --base")
    revision = report.get("model_commit") or recipe.get("revision") or adapter.get("revision")
    return _resolve_base(output_dir, named, str(trained), None if revision is None else str(revision), offline=offline)


def _resolve_base(folder: Path, named: str | None, trained: str, revision: str | None, *, offline: bool) -> ModelSource:
    """The base model as `named`, else under the name that it was trained with, then in this revision."""
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.costs.find_model import find_architecture
    from roundpipe_cli.model.files.source import resolve_model

    model = named or trained
    try:
        known = revision if model == trained else None
        source = resolve_model(model, revision=known, recipe_folder=folder, offline=offline, tell=LinePrinter(1))
        if source.gguf_file is not None:
            find_architecture(source.name, source.folder / source.gguf_file)  # its header is sound
        return source
    except RefusedError as error:
        raise RefusedError(
            "the base model of this adapter is not to be found",
            where=str(folder),
            found=f"{model}: {error.problems[0].what}",
            hint="name the model, or the folder that it is in now, with --base",
        ) from error
