"""`roundpipe export`: the result of a run as a folder for other programs, as a GGUF file, or uploaded."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from roundpipe_cli.cli.output import go_offline, quiet_libraries, say, say_data
from roundpipe_cli.errors import Problem, RecipeError, RefusedError, redact
from roundpipe_cli.files import TEMPORARY_PREFIX, kind_of_file, named_path, stays_inside
from roundpipe_cli.units import format_bytes

if TYPE_CHECKING:
    from roundpipe_cli.model.files.source import ModelSource
    from roundpipe_cli.train.result.export import Merged


# Extras of `export` for a finished folder: a GGUF file by llama.cpp's converter, an upload.

CONVERTER = "convert_hf_to_gguf.py"
GGUF_NAME = "model.gguf"
STALLED_S = 600.0
"""Seconds without computing or writing after which a program counts as stuck."""
LOOK_S = 1.0
INSTALL = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install -r "
    "llama.cpp/requirements/requirements-convert_hf_to_gguf.txt, "
    "then --gguf --converter llama.cpp/convert_hf_to_gguf.py"
)


def find_converter(named: Path | None) -> Path:
    """llama.cpp's converter: as named, else on the PATH.

    Raises:
        RefusedError: it is not there; the hint is the command that installs it.
    """
    found = named_path(named) if named is not None else Path(shutil.which(CONVERTER) or "")
    if not found.is_file():
        missing = f"no file {named}" if named is not None else "it is not on the PATH"
        raise RefusedError(f"--gguf needs llama.cpp's {CONVERTER}", found=missing, hint=INSTALL)
    return found


def convert_to_gguf(converter: Path, folder: Path) -> Path:
    """Convert the model in `folder`; returns the file, which is in it.

    Raises:
        RefusedError: the converter failed, with its last lines, or does nothing any more.
    """
    target = folder / GGUF_NAME
    words = [sys.executable, str(converter), str(folder), "--outfile", str(target)]
    done = _run(words, target)
    if done.returncode or not target.is_file():
        target.unlink(missing_ok=True)
        said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RefusedError(
            "the converter to GGUF failed; the merged model is as it was",
            where=str(converter),
            found=redact(said[-500:]) or f"exit code {done.returncode}",
            hint=f"by hand: {' '.join(words)}",
        )
    return target


def _run(words: list[str], target: Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; ended by SIGKILL once it has done nothing for `STALLED_S`."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        before, since_s = (0, 0), time.monotonic()
        while True:
            try:
                out, err = process.communicate(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                now = _progress(process.pid, target)
                if now != before:
                    before, since_s = now, time.monotonic()
                elif time.monotonic() - since_s > STALLED_S:
                    process.kill()
                    _, err = process.communicate()
                    err = f"it did nothing for {STALLED_S:g} s and was ended"
                    return subprocess.CompletedProcess(words, -signal.SIGKILL, "", err)
            except BaseException:
                process.kill()
                raise
            else:
                return subprocess.CompletedProcess(words, process.returncode, out, err)


def _progress(pid: int, target: Path) -> tuple[int, int]:
    """Processor time in ticks, and bytes written; either grows while the program does something."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        ticks = int(words[11]) + int(words[12])
    except (OSError, ValueError, IndexError):
        ticks = 0
    return ticks, target.stat().st_size if target.exists() else 0


def push(folder: Path, name: str) -> str:
    """Upload `folder` to the hub, as a private repository if it is new; returns its address.

    Raises:
        RefusedError: not logged in, no network, the hub refuses, or a file is a link that leads out of the folder.
    """
    check_upload(folder)
    problem = Problem(
        "the upload failed; the folder is as it was",
        where=f"--push {name}",
        hint=f"hf auth login, then: hf upload {name} {folder}",
    )
    return _upload(folder, name, problem)


def push_result(output_dir: Path, name: str, base: str) -> str:
    """Upload the result of a finished run, without its checkpoints and logs; returns the repository's address.

    Args:
        base: name of the base model, for the card.

    Raises:
        RefusedError: as of `push`; the result is there and can be uploaded later.
        ResourceError: disk full or failing.
    """
    import tempfile  # would be a tenth of the time of `export --help`

    from roundpipe_cli.train.result.export import Extras, copy_result

    exported = f"{output_dir}-exported"
    problem = Problem(
        "the run is finished, and its upload failed",
        where=f"hub_model_id: {name}",
        hint=f"hf auth login, then: roundpipe export {output_dir} --to {exported} --push {name}",
    )
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=output_dir) as folder:
        copy_result(output_dir, Path(folder) / "result", Extras(base))
        return _upload(Path(folder) / "result", name, problem)


def make_repository(name: str, *, offline: bool) -> None:
    """Make the repository that a run's result will be uploaded to, unless it is there: a mistake shows before training.

    Raises:
        RefusedError: not logged in, no network, or the hub refuses.
    """
    problem = Problem(
        "the result of this run could not be uploaded",
        where=f"hub_model_id: {name}",
        hint="hf auth login; or delete the line",
    )
    if offline:
        raise RefusedError(problem.what, where=problem.where, found="--offline", hint="~hub_model_id uploads nothing")
    _upload(None, name, problem)


def _upload(folder: Path | None, name: str, problem: Problem) -> str:
    """Make a repository if it is new, and upload `folder`, if there is one."""
    import huggingface_hub

    api: Any = huggingface_hub.HfApi()
    try:
        address = str(api.create_repo(name, private=True, exist_ok=True))
        if folder is not None:
            api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Upload from roundpipe")
    except Exception as error:  # errors of the network, the login or the hub: all are for the user
        found = redact(f"{type(error).__name__}: {error}".splitlines()[0][:300])
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
        Path, typer.Argument(metavar="OUTPUT_DIR", help="Folder of a finished run, or of any adapter in PEFT's format.")
    ],
    merge: Annotated[bool, typer.Option("--merge", help="Add the adapter to the base model's weights.")] = False,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="New folder. [default: OUTPUT_DIR/merged or exported]")
    ] = None,
    base: Annotated[str | None, typer.Option("--base", metavar="MODEL", help="Base model, if it has moved.")] = None,
    allow_other_base: Annotated[
        bool, typer.Option("--allow-other-base", help="The base may be another than the adapter was trained on.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of merged weights: bfloat16, float16, float32. [default: the base's]")
    ] = None,
    adapter_layout: Annotated[
        str,
        typer.Option(
            "--adapter-layout", help="Of experts' adapters: peft, or vllm: names of single experts, as its docs."
        ),
    ] = "peft",
    gguf: Annotated[bool, typer.Option("--gguf", help=f"Also convert it, by llama.cpp's {CONVERTER}.")] = False,
    converter: Annotated[Path | None, typer.Option("--converter", metavar="FILE", help="Where that is.")] = None,
    push_to: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="Upload the folder to the hub; private if new.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use local files only, open no connection.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout: the folder and its files.")
    ] = False,
) -> None:
    """Write the result of a run as a new folder: the adapter alone, or merged into its base model.

    Example: roundpipe export outputs/quickstart --merge --to quickstart-merged
    """
    say(f"reading {output_dir} ...")
    kind = kind_of(output_dir)
    if merge and kind == "model":
        raise RefusedError(
            "this result is a whole model: there is nothing to merge",
            where=str(output_dir),
            hint="leave --merge out to copy it, or use the folder as it is",
        )
    if gguf and kind == "adapter" and not merge:
        raise RefusedError("--gguf needs a whole model", where=str(output_dir), hint="add --merge")
    if push_to is not None and offline:
        raise RefusedError("--push needs a connection", hint="leave --offline out")
    if adapter_layout not in ("peft", "vllm"):
        raise RefusedError("unknown layout of adapters", found=adapter_layout, expected="peft or vllm")
    if adapter_layout == "vllm" and (merge or kind == "model"):
        raise RefusedError("--adapter-layout is for adapters", where=str(output_dir), hint="leave it or --merge out")
    program = find_converter(converter) if gguf else None
    check_dtype(dtype)
    if dtype is not None and not merge:
        raise RefusedError("--dtype is for merged weights", hint="add --merge")
    target = named_path(to or output_dir / ("merged" if merge else "exported"))
    if target.exists():
        raise RefusedError("the folder to export to exists already", where=str(target), hint="name another with --to")
    if offline:
        go_offline()
    names_of = find_adapter_base(output_dir, base, offline=offline) if adapter_layout == "vllm" else None
    source = find_adapter_base(output_dir, base, offline=offline) if merge else None
    if source is not None:
        compare_base(output_dir, source, allowed=allow_other_base)
    say("loading torch and transformers ...")
    quiet_libraries()
    import torch

    from roundpipe_cli.train.prepare.base_files import describe_added
    from roundpipe_cli.train.result.export import Extras, copy_result, merge_result

    extras = Extras(_base_name(output_dir, base), f"./{GGUF_NAME}" if gguf else ".")
    if source is None:
        renamed = copy_result(output_dir, target, extras, single_experts_of=names_of)
        if names_of is not None and not renamed:
            say("note: no names changed: the base's files have no single experts, so vLLM reads PEFT's names")
        if kind == "adapter" and names_of is None and has_expert_adapters(output_dir):
            say(f"note: {EXPERTS_NOTE}")
        if not extras.has_tokenizer:
            say("note: the adapter has no tokenizer: its base's belongs to it")
    else:
        torch.set_grad_enabled(False)
        done = merge_result(output_dir, source, target, None if dtype is None else getattr(torch, dtype), extras=extras)
        for note in _notes(done, source):
            say(f"note: {note}")
        shards = f"{done.num_shards} file{'s' if done.num_shards > 1 else ''}"
        if extras.added_ends:
            say(f"note: {describe_added(extras.added_ends)}")
        say(f"merged {done.num_modules} modules: {format_bytes(done.num_bytes)} in {shards}")
    if not extras.has_template and (merge or kind == "model"):
        say("note: the chat template cannot be written in Ollama's language, so the Modelfile has none")
    if program is not None:
        say("converting to GGUF ...")
        say(f"wrote {convert_to_gguf(program, target)}")
    if push_to is not None:
        say(f"uploaded to {push(target, push_to)}")
    say_data(json.dumps(export_document(target, merged=merge, pushed=push_to)) if json_ else str(target))


def check_dtype(dtype: str | None) -> None:
    """
    Raises:
        RefusedError: no dtype of weights.
    """
    known = "bfloat16, float16 or float32"
    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise RefusedError("unknown dtype", found=dtype, expected=known, hint="leave --dtype out")


def export_document(folder: Path, *, merged: bool, pushed: str | None) -> dict[str, Any]:
    """The written files, with the bytes of each."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return {"folder": str(folder), "merged": merged, "pushed_to": pushed, "files": files}


def _notes(done: Merged, source: ModelSource) -> list[str]:
    """Notes on differences from the base's files."""
    notes = []
    if done.dequantized:
        notes.append(f"quantised in the base's files, and whole here: {', '.join(done.dequantized)}")
    if not done.has_base_names and source.gguf_file is None:
        notes.append("transformers cannot undo how it fuses this model's weights: they are written as it has them")
    if done.untied:
        notes.append("the adapter changes one of the tables that the base shares: both are written, no longer tied")
    if done.replaced:
        notes.append(f"whole weights in the adapter's file take the place of the base's: {', '.join(done.replaced)}")
    return notes


EXPERTS_NOTE = (
    "this adapter changes fused experts: PEFT loads it as it is; for vLLM add --adapter-layout vllm; Ollama needs a "
    "merged model (--merge)"
)


def has_expert_adapters(folder: Path) -> bool:
    """Whether an adapter changes fused experts."""
    from safetensors import safe_open

    with safe_open(str(folder / "adapter_model.safetensors"), framework="numpy") as file:
        return any(".experts." in key for key in file.keys())  # noqa: SIM118 - the handle is no mapping


def _base_name(output_dir: Path, named: str | None) -> str | None:
    """Name of the base model on the card."""
    if not (output_dir / "report.json").is_file():
        return named
    try:
        report = json.loads(_small_text(output_dir / "report.json"))
        return named or str(report["model"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return named


def _small_text(path: Path) -> str:
    """
    Raises:
        OSError, ValueError: it cannot be read, or is no UTF-8.
        RefusedError: a link that leads out of the folder, no regular file, or too large.
    """
    from roundpipe_cli.files import read_regular
    from roundpipe_cli.model.files.untrusted import MAX_RUN_FILE_BYTES, check_file

    check_file(path, MAX_RUN_FILE_BYTES)
    return read_regular(path, MAX_RUN_FILE_BYTES).decode("utf-8")


def kind_of(folder: Path) -> Literal["adapter", "model"]:
    """Kind of a result.

    Raises:
        RefusedError: there is none.
    """
    if (folder / "adapter_config.json").is_file() and (folder / "adapter_model.safetensors").is_file():
        return "adapter"
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return "model"
    from roundpipe_cli.dashboard.replay import run_hint

    unfinished = any(folder.glob("step-*")) if folder.is_dir() else False
    raise RefusedError(
        "there is no result of a run in this folder",
        where=str(folder),
        found="a run that is not finished" if unfinished else _what_is_there(folder),
        expected="adapter_model.safetensors or model.safetensors with its configuration",
        hint="finish it with `roundpipe finetune RECIPE --resume`" if unfinished else run_hint(Path.cwd()),
    )


def _what_is_there(folder: Path) -> str:
    if folder.is_dir():
        return "no weights in safetensors"
    return "a file" if folder.exists() else "no such folder"


def _trained_revision(adapter_config: Path) -> str | None:
    """The base model's commit, as PEFT's configuration of an adapter has it."""
    try:
        revision = json.loads(_small_text(adapter_config)).get("revision")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return revision if isinstance(revision, str) else None


def compare_base(output_dir: Path, source: ModelSource, *, allowed: bool) -> None:
    """Say where a base model may be another than the adapter was trained on.

    Args:
        allowed: another one is meant.

    Raises:
        RefusedError: it is another.
    """
    from roundpipe_cli.model.fingerprint import Fingerprint, check_trained_on

    def weights() -> str:
        say("comparing the base model with the one that was trained ...")
        return Fingerprint(source).result()

    text = check_trained_on(output_dir, source, allowed=allowed, weights=weights, where=str(source.name))
    if text is not None:
        say(f"note: {text}")


def find_adapter_base(output_dir: Path, named: str | None, *, offline: bool) -> ModelSource:
    """The base model of an adapter: as named, else as the run's recipe or the adapter's configuration says.

    Raises:
        RefusedError: it is not to be found, or is not the commit that was trained.
    """
    from roundpipe_cli.cli.lines import LinePrinter
    from roundpipe_cli.costs.find_model import find_architecture
    from roundpipe_cli.model.files.source import resolve_model
    from roundpipe_cli.recipe.strict_yaml import parse_text

    recipe, report, adapter = output_dir / "recipe.yaml", output_dir / "report.json", output_dir / "adapter_config.json"
    values: dict[str, object] = {}
    commit = None
    try:
        if recipe.is_file():
            values = parse_text(_small_text(recipe), str(recipe)).data
        if report.is_file():
            commit = json.loads(_small_text(report)).get("model_commit")
        trained = values.get("model") or json.loads(_small_text(adapter)).get("base_model_name_or_path")
        model = named or trained
        if not model:
            raise ValueError("no base model is named")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RecipeError) as error:
        raise RefusedError(
            "cannot tell the base model of this adapter", where=str(output_dir), hint="name it with --base"
        ) from error
    revision = None if model != trained else commit or values.get("revision") or _trained_revision(adapter)
    try:
        source = resolve_model(
            str(model),
            revision=None if revision is None else str(revision),
            recipe_folder=output_dir,
            offline=offline,
            tell=LinePrinter(1),
        )
        if source.gguf_file is not None:
            find_architecture(source.name, source.folder / source.gguf_file)  # its header is sound
        return source
    except RefusedError as error:
        raise RefusedError(
            "the base model of this adapter is not to be found",
            where=str(output_dir),
            found=f"{model}: {error.problems[0].what}",
            hint="name the model, or the folder that it is in now, with --base",
        ) from error
