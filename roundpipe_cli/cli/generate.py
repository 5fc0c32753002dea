"""`roundpipe generate`: try the result of a run."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundpipe_cli.cli.export import check_dtype, find_result, opened_result
from roundpipe_cli.cli.output import go_offline, load_libraries, say, say_json
from roundpipe_cli.errors import RefusedError

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
    base: Annotated[str | None, typer.Option("--base", metavar="MODEL", help="Base model, if it has moved.")] = None,
    allow_other_base: Annotated[
        bool, typer.Option("--allow-other-base", help="The base may be another than the adapter was trained on.")
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    offline: Annotated[bool, typer.Option("--offline", help="Use local files only, open no connection.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, when the answer is whole.")
    ] = False,
) -> None:
    """Answer a prompt with the result of a run, on the GPU with the most free memory where it fits, else the processor.

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
    text = None if prompt is None else read_prompt(prompt)
    system = None if system is None else _checked(system, "--system")
    check_temperature(temperature)
    with opened_result(found, base, offline=offline, needs_base=True, allowed=allow_other_base) as (result, source):
        load_libraries()
        from roundpipe_cli.model.files.source import resolve_model
        from roundpipe_cli.train.result.generate import (
            Prompt,
            answer,
            describe_answer,
            has_template,
            load_result,
            move_to_gpu,
        )

        if source is None or found.kind == "model":
            source = resolve_model(str(result.absolute()), revision=None, recipe_folder=result, offline=True)
        model, tokenizer = load_result(result, source, dtype, is_adapter=found.kind == "adapter")
    model = move_to_gpu(model, lambda text: say(f"note: {text}"))
    say(describe_answer(model, tokenizer, temperature))
    first = Prompt(text or "", system, max_new_tokens, temperature)

    def show(asked: Prompt) -> WholeAnswer:
        given = answer(model, tokenizer, asked, is_shown=not json_)
        if json_:
            document = {"prompt": asked.text, "system": system, "answer": given.text, "tokens": given.num_tokens}
            say_json({**document, "ended": given.is_ended}, indent=None)
        return given

    if text is not None:
        show(first)
        return
    keeps_turns = has_template(tokenizer)
    if not keeps_turns:
        say("note: the tokenizer has no chat template: each line is continued separately")
    converse(first, show, keeps_turns=keeps_turns)


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
