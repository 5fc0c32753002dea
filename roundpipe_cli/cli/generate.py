"""`roundpipe generate`: try the result of a run."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundpipe_cli import torchrun
from roundpipe_cli.cli.export import check_dtype, find_result, opened_result
from roundpipe_cli.cli.options import BaseOption, OfflineOption, OtherBaseOption
from roundpipe_cli.cli.output import go_offline, load_libraries, say, say_json
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.regular_files import named_path
from roundpipe_cli.units import GIB

if TYPE_CHECKING:
    from roundpipe_cli.train.result.generate import Prompt, WholeAnswer


def generate(
    output_dir: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT_DIR", help="Folder of a run, of one of its checkpoints, of an adapter or of a model."
        ),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="What the user says; `-` reads it from stdin. Without one, each line of stdin is a turn.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message before it.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Of the answer, at most.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: the most probable tokens.")] = 0.0,
    base: BaseOption = None,
    allow_other_base: OtherBaseOption = False,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="A prompt a line (.txt), or rows; answers as JSON lines."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts of FILE answered together.")] = 16,
    stream: Annotated[
        bool, typer.Option("--stream", help="Keep weights on the host, as the run had them, whatever a device holds.")
    ] = False,
    weight_cache_gib: Annotated[
        float | None, typer.Option("--weight-cache-gib", min=0.0, help="Of weights kept on each device, streaming.")
    ] = None,
    offline: OfflineOption = False,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, when the answer is whole.")
    ] = False,
) -> None:
    """Answer a prompt with the result of a run.

    A model that fits, whole in --dtype, the GPU with the most free memory (host memory, where there is no GPU), is
    loaded there. Others are streamed, as with --stream: the weights lie on the host as the run had them, packed too, or
    on disk where memory is short. Devices keep what fits beside the answers' keys and values; the rest comes past for
    each token, once for a batch.

    Without a prompt it is a conversation: a line is a turn, /reset begins anew, /exit or Ctrl-D ends it.

    The answer ends at any end token of the model's generation_config.json, whose other settings (top_p, a repetition
    penalty) hold too, or at those of training.

    Example: roundpipe generate outputs/quickstart "How do I undo the last commit?"
    """
    say(f"reading {output_dir} ...")
    found = find_result(output_dir)
    check_dtype(dtype)
    if offline:
        go_offline()
    if prompts is not None and prompt is not None:
        raise RefusedError("prompts from two places", found="PROMPT and --prompts", hint="leave one of them out")
    if (count := torchrun.this_process().count) > 1:
        raise RefusedError("answers: not with several machines", found=f"{count} processes", hint="leave torchrun out")
    text = None if prompt is None else read_prompt(prompt)
    system = None if system is None else _checked(system, "--system")
    check_temperature(temperature)
    rows = None if prompts is None else read_prompts(prompts)
    with contextlib.ExitStack() as stack:
        opened = opened_result(found, base, offline=offline, needs_base=True, allowed=allow_other_base)
        with opened as (result, source):
            load_libraries()
            from roundpipe_cli.cli.lines import LinePrinter
            from roundpipe_cli.model.files.source import resolve_model
            from roundpipe_cli.train.result.generate import (
                Prompt,
                answer_prompts,
                describe_answer,
                has_template,
                keep_as_trained,
            )
            from roundpipe_cli.train.streamed import opened_model

            if source is None or found.kind == "model":
                source = resolve_model(str(result.absolute()), revision=None, recipe_folder=result, offline=True)
            first = Prompt(text or "", system, max_new_tokens, temperature)
            asked = [replace(first, **row) for row in rows or [{}]]
            longest = max(asked, key=lambda one: len(one.text) + len(one.system or ""))
            if rows is None and text is None:
                longest = replace(longest, max_new_tokens=CONVERSATION_TOKENS + max_new_tokens)
            how: dict[str, Any] = {"longest": longest, "batch_size": min(batch_size, len(asked))}
            how |= {"is_adapter": found.kind == "adapter", "stream": stream, "tell": LinePrinter(1)}
            if weight_cache_gib is not None:
                how |= {"stream": True, "cache_bytes": int(weight_cache_gib * GIB)}
            folder = found.folder if found.checkpoint is None else found.checkpoint.parent
            opening = opened_model(result, source, dtype, folder=folder, **how)
            model, tokenizer, where = stack.enter_context(opening)
        keep_as_trained(tokenizer, folder, say)
        say(describe_answer(model, tokenizer, temperature, where))

        def show(*batch: Prompt) -> WholeAnswer:
            as_lines = json_ or rows is not None
            given = answer_prompts(model, tokenizer, batch, is_shown=not as_lines)
            for one, whole in zip(batch, given, strict=True) if as_lines else ():
                document = {"prompt": one.text, "system": one.system, "answer": whole.text, "tokens": whole.num_tokens}
                say_json({**document, "ended": whole.is_ended}, indent=None)
            return given[-1]

        if rows is not None:
            for start in range(0, len(asked), batch_size):
                show(*asked[start : start + batch_size])
        elif text is not None:
            show(first)
        else:
            keeps_turns = has_template(tokenizer)
            if not keeps_turns:
                say("note: the tokenizer has no chat template: each line is continued separately")
            converse(first, show, keeps_turns=keeps_turns)


CONVERSATION_TOKENS = 8192
"""Turns before a question, for whose keys and values a device that streams leaves room."""
CHAT_COMMANDS = {
    "/help": "show these lines",
    "/reset": "begin anew: the turns before are forgotten",
    "/exit": "leave, as Ctrl-D does",
}
"""Lines of a conversation that are no turns."""


def converse(first: Prompt, show: Callable[[Prompt], WholeAnswer], *, keeps_turns: bool) -> None:
    """Answer one line of stdin after the other, each behind the turns before it, until stdin ends or /exit comes.

    Args:
        keeps_turns: otherwise every line stands alone.

    Raises:
        RefusedError: a line that is no UTF-8, or too long.
    """
    asked = first
    for line in _turns():
        if line == "/exit":
            return
        if line == "/reset":
            asked = first
            say("a new conversation")
            continue
        is_unknown = line not in CHAT_COMMANDS and sys.stdin.isatty() and re.fullmatch(r"/[a-z?]+", line)
        if line == "/help" or is_unknown:
            if is_unknown:
                say(f"there is no {line}")
            for name, meaning in CHAT_COMMANDS.items():
                say(f"{name:<6} {meaning}")
            continue
        asked = replace(asked, text=line)
        found = show(asked)
        if keeps_turns:
            asked = replace(asked, earlier=(*asked.earlier, (line, found.text)))


def _turns() -> Iterator[str]:
    """The lines of stdin that are not blank; on a terminal behind a mark."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        say("a line is a turn; /help lists commands, /exit or Ctrl-D ends")
    while True:
        if is_terminal:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = _from_stdin(sys.stdin.buffer.readline)
        if not line:
            if is_terminal:
                sys.stderr.write("\n")
            return
        if line.strip():
            yield line.strip()


MIN_TEMPERATURE = 1e-3
"""Logits divided by less overflow, and no token has a probability."""
MAX_PROMPT_BYTES = 16 * 1024**2


def check_temperature(temperature: float) -> None:
    """Raise a RefusedError for a temperature at which no token can be drawn."""
    if not math.isfinite(temperature) or 0 < temperature < MIN_TEMPERATURE:
        raise RefusedError(
            "no token can be drawn at this temperature",
            where="--temperature",
            found=f"{temperature:g}",
            expected=f"0, or a number from {MIN_TEMPERATURE:g}",
            hint="--temperature 0 takes the most probable tokens",
        )


def read_prompt(prompt: str) -> str:
    """The prompt itself, or stdin where it is `-`.

    Raises:
        RefusedError: it is no UTF-8, or too long.
    """
    return _from_stdin(sys.stdin.buffer.read) if prompt == "-" else _checked(prompt, "PROMPT")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Prompts of a file, each as the fields of `Prompt` that it sets: rows with a `prompt`, and a `system` message if
    wanted, or the lines of a text.

    Raises:
        RefusedError: it cannot be read, or a row is no prompt.
    """
    from roundpipe_cli.data.files import read_file
    from roundpipe_cli.data.settings import DatasetSpec

    found, file = list[dict[str, Any]](), named_path(path)
    for row in read_file(file, DatasetSpec(str(file), txt_rows="line")):
        text, system = row.columns.get("prompt", row.columns.get("text")), row.columns.get("system")
        if row.fault is not None or not isinstance(text, str) or not (system is None or isinstance(system, str)):
            expected = 'text; in .jsonl {"prompt": "..."}, with "system": "..." if wanted'
            what = "no prompt" if row.fault is None else row.fault.what
            raise RefusedError(what, where=f"{file}:{row.number}", expected=expected)
        found.append({"text": text, **({"system": system} if system else {})})
    if not found:
        raise RefusedError("no prompts", where=str(file))
    return found


def _from_stdin(read: Callable[[int], bytes]) -> str:
    data = read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        most = f"at most {MAX_PROMPT_BYTES} bytes"
        raise RefusedError("the prompt is too long", where="stdin", expected=most, hint="give fewer words")
    return _checked(data.decode("utf-8", errors="surrogateescape"), "stdin")


def _checked(text: str, where: str) -> str:
    """Bytes that are no UTF-8 are lone surrogates in `text`, as in arguments of a program."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"{text[error.start]!r} at character {error.start + 1}"
        raise RefusedError("the text is not valid UTF-8", where=where, found=found, hint="save it as UTF-8") from None
    return text
