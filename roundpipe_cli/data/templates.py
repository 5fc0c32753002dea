"""Chooses the chat template, the recipe's or the tokenizer's own, and gives it the recipe's values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe_cli.data.rows import printable
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.regular_files import read_regular, tried_paths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TEMPLATE_BYTES = 64 * 1024
MAX_FILE_BYTES = 1024**2
GIVEN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"}
)
"""Variables that every rendering of a template sets."""


def find_template(
    tokenizer: PreTrainedTokenizerBase,
    override: str | None,
    folder: Path | None,
    variables: Mapping[str, bool | int | float | str] | None = None,
    *,
    with_tools: bool = False,
) -> str | None:
    """The text of the template in force: `override`, else the tokenizer's; None if none.

    Args:
        override: a file, the text itself, or the name of one of the tokenizer's.
        with_tools: for rows with tools: of a tokenizer that has several templates, the one called `tool_use`.
        variables: values that the template has from now on, unless whoever renders it gives others.

    Raises:
        RefusedError: the file does not exist, the template is too large, or does not read one of `variables`.
    """
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if override is not None and override in named:
        template = str(named[override])
    elif override is not None:
        template = override if "{" in override else _read_template(override, folder)
    else:
        try:
            template = str(tokenizer.get_chat_template(tools=[] if with_tools else None))
        except ValueError:  # none set, or several and none called `default`
            if variables:
                raise RefusedError(
                    "the tokenizer has no chat template to give variables to",
                    where="chat_template_kwargs",
                    found=", ".join(variables),
                    hint="delete the line, or add `chat_template: path/to/template.jinja`",
                ) from None
            return None
    if len(template.encode("utf-8", errors="replace")) > MAX_TEMPLATE_BYTES:
        raise RefusedError(
            "the chat template is too large",
            where="chat_template",
            found=f"{len(template)} characters",
            expected=f"at most {MAX_TEMPLATE_BYTES} bytes",
        )
    variables = variables or {}
    if with_tools and "tool_use" in named:  # the other one reads them
        variables = {name: value for name, value in variables.items() if _reads(template, name)}
    return _with_defaults(template, variables)


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _with_defaults(template: str, variables: Mapping[str, bool | int | float | str]) -> str:
    """The template behind a line that gives its variables values."""
    line = ""
    for name, value in variables.items():
        given = name in GIVEN_VARIABLES
        if given or not _reads(template, name):
            raise RefusedError(
                f"the chat template {'is always given' if given else 'does not read'} {name}",
                where="chat_template_kwargs",
                found=f"{name}: {printable(json.dumps(value))}",
                expected="variables that the template reads, such as enable_thinking where a model has it",
            )
        line += f"{{% if {name} is not defined %}}{{% set {name} = {json.dumps(value)} %}}{{% endif %}}"
    return f"{line}\n{template}" if line else template


def _read_template(path: str, folder: Path | None) -> str:
    tried = tried_paths(path, folder)
    for candidate in tried:
        if candidate.is_file():
            try:
                return read_regular(candidate, MAX_FILE_BYTES).decode("utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise RefusedError("cannot read the chat template", where=str(candidate), found=str(error)) from error
    raise RefusedError(
        "chat template not found",
        where=f"chat_template: {printable(path)}",
        found="neither " + " nor ".join(map(str, tried)),
        expected="a file, or the text of a template",
    )
