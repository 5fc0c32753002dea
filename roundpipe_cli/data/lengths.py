"""Tokens of rows that nobody has tokenised yet: by a sample of them, and the model's own tokenizer where it is here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from roundpipe_cli.data.chat import TEMPLATE_DATE
from roundpipe_cli.data.formats import decide_format
from roundpipe_cli.data.messages import Content
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.sources import Source, find_sources
from roundpipe_cli.errors import RefusedError, RoundpipeError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.regular_files import read_regular

SAMPLED_ROWS = 400
"""Rows of a file that are read."""
MARK = re.compile(r"<\|[^<>\s|]{1,40}\|>|</?[A-Za-z_]{1,40}>|\[/?[A-Z_]{2,20}\]")
"""A special token as templates write it, `<|im_end|>`: one token, however long its name."""
WORD = re.compile(r"[^\W\d_]+|\d|\n+|[^\w\s]")
TOKENIZER_NAME, TEMPLATE_NAME, SETTINGS_NAME = "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"
MAX_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts the tokens of a row's text, and of what the chat template writes around it."""

    in_text: Callable[[str], float]
    per_row: float = 0.0
    per_turn: float = 5.0
    """As ChatML has them: `<|im_start|>user` and its line end, `<|im_end|>` and its."""

    def of(self, content: Content) -> float:
        if isinstance(content, str):
            return max(1.0, self.in_text(content) + 1)
        texts = (str(message.get("content") or "") for message in content.messages)
        return self.per_row + sum(self.in_text(text) + self.per_turn for text in texts)


def token_counter(folder: Path | None, template: str | None, bytes_per_token: float) -> TokenCounter:
    """By the model's own tokenizer in `folder`, or else by the bytes of a text.

    Args:
        template: the chat template, where it is in no file of the folder.
    """
    in_text = _by_bytes(bytes_per_token)
    with suppress(Exception):  # the library's errors have no type of their own; a run says what is wrong
        if folder is not None and (folder / TOKENIZER_NAME).is_file():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
            in_text = lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)  # noqa: E731
    template = (_template_in(folder) if folder is not None else None) or template
    if template is None:
        return TokenCounter(in_text)
    with suppress(RoundpipeError):
        one, two = run_limited(lambda: _around(template), Limits("the chat template", "chat_template"))
        per_turn = max(0.0, in_text(two) - in_text(one)) / 2
        return TokenCounter(in_text, in_text(one) - 2 * per_turn, per_turn)
    return TokenCounter(in_text)


WORD_BYTES = 5
"""A word of more takes more than one token, one for so many bytes (letters of other scripts have two or three)."""


def _by_bytes(bytes_per_token: float) -> Callable[[str], float]:
    """By words: of letters one and more, of digits and signs one each; for a vocabulary of bytes, these."""
    if bytes_per_token <= 1:
        return lambda text: float(len(text.encode("utf-8", "replace")))

    def count(text: str) -> float:
        words, marks = WORD.findall(MARK.sub("", text)), MARK.findall(text)
        return sum(max(1.0, len(word.encode("utf-8", "replace")) / WORD_BYTES) for word in words) + len(marks)

    return count


def _template_in(folder: Path) -> str | None:
    with suppress(OSError, ValueError, RefusedError):
        return read_regular(folder / TEMPLATE_NAME, MAX_BYTES).decode()
    with suppress(OSError, ValueError, RefusedError, AttributeError):
        found = json.loads(read_regular(folder / SETTINGS_NAME, MAX_BYTES)).get("chat_template")
        return found if isinstance(found, str) else None
    return None


def _around(template: str) -> tuple[str, str]:
    """Text that the template writes around one empty exchange, and around two."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    exchange = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    made = environment.from_string(template)
    one, two = (made.render(messages=times * exchange, bos_token="", eos_token="</s>") for times in (1, 2))
    return one, two


def sample_lengths(spec: DatasetSpec, folder: Path | None, counter: TokenCounter) -> list[int]:
    """Tokens of the first rows of each file, of a pair of its longer answer; empty where none can be read.

    Args:
        folder: as of `find_sources`.
    """
    lengths: list[int] = []
    with suppress(RefusedError, OSError, ValueError):
        for source in find_sources(spec, folder, offline=True)[:SAMPLED_ROWS]:
            lengths += _of_source(source, counter) if source.file is not None else []
    return lengths


def _of_source(source: Source, counter: TokenCounter) -> Iterator[int]:
    rows = [row.columns for row in islice(source.rows(), SAMPLED_ROWS) if row.fault is None]
    if not rows:
        return
    row_format = decide_format(source.spec, rows, source.name)
    for row in rows:
        with suppress(BadRowError):
            own = row_format.fitted(row)
            yield max(round(counter.of(content)) for content in own.parse(own.opened(row)))
