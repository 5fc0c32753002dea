"""`roundpipe export`: the result of a run as a folder for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from roundpipe_cli.cli.libraries import go_offline, quiet_libraries
from roundpipe_cli.cli.output import say, say_data
from roundpipe_cli.cli.publish import CONVERTER, GGUF_NAME, convert_to_gguf, find_converter, push
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.files import named_path
from roundpipe_cli.units import format_bytes

if TYPE_CHECKING:
    from roundpipe_cli.model.files.source import ModelSource
    from roundpipe_cli.train.result.export import Merged


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
    program = find_converter(converter) if gguf else None
    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise RefusedError(
            "unknown dtype", found=dtype, expected="bfloat16, float16 or float32", hint="leave --dtype out"
        )
    if dtype is not None and not merge:
        raise RefusedError("--dtype is for merged weights", hint="add --merge")
    target = named_path(to or output_dir / ("merged" if merge else "exported"))
    if target.exists():
        raise RefusedError("the folder to export to exists already", where=str(target), hint="name another with --to")
    if offline:
        go_offline()
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
        copy_result(output_dir, target, extras)
        if kind == "adapter" and has_expert_adapters(output_dir):
            say(f"note: {EXPERTS_NOTE}")
        if not extras.has_tokenizer:
            say("note: the adapter has no tokenizer: its base's belongs to it")
    else:
        torch.set_grad_enabled(False)
        done = merge_result(output_dir, source, target, None if dtype is None else getattr(torch, dtype), extras)
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
    "this adapter changes fused experts, which vLLM and Ollama cannot load as an adapter: use --merge for them; PEFT "
    "loads it as it is"
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
    from roundpipe_cli.errors import RecipeError
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
