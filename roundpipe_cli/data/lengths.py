"""Tokens of rows that nobody has tokenised yet: by a sample of them, and the model's own tokenizer where it is here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any

from roundpipe_cli.data.formats import decide_format
from roundpipe_cli.data.messages import Content
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.sources import find_sources
from roundpipe_cli.data.traced import traced_environment
from roundpipe_cli.errors import RefusedError, RoundpipeError
from roundpipe_cli.limited import Limits, run_limited
from roundpipe_cli.regular_files import read_regular

SAMPLED_ROWS = 400
"""Rows of a file that are read."""
LARGEST = 16
"""Rows of a file that may be its longest."""
MARK = re.compile(r"<\|[^<>\s|]{1,40}\|>|</?[A-Za-z_]{1,40}>|\[/?[A-Z_]{2,20}\]")
"""A special token as templates write it, `<|im_end|>`: one token, however long its name."""
WORD = re.compile(r"[^\W\d_]+|\d|\n+|[^\w\s]")
WORD_BYTES = 5
"""A word of more takes more than one token, one for so many bytes (letters of other scripts have two or three)."""
TOKENIZER_NAME, TEMPLATE_NAME, SETTINGS_NAME = "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"
MAX_BYTES = 4 * 1024**2
Columns = Mapping[str, Any]
EXCHANGE = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts the tokens of a row's text, and of what the chat template writes around it."""

    in_text: Callable[[str], float]
    per_row: float = 0.0
    per_turn: float = 5.0
    """As ChatML has them: `<|im_start|>user` and its line end, `<|im_end|>` and its."""

    def of(self, content: Content) -> float:
        if isinstance(content, str):
            return self.in_text(content) + 1
        texts = (str(message.get("content") or "") for message in content.messages)
        return self.per_row + sum(self.in_text(text) + self.per_turn for text in texts)


def token_counter(folder: Path | None, template: str | None) -> TokenCounter:
    """By the model's own tokenizer in `folder`, or else by the words of a text.

    Args:
        template: the chat template, where it is in no file of the folder.
    """
    in_text: Callable[[str], float] = _by_words
    with suppress(Exception):  # the library's errors have no type of their own; a run says what is wrong
        if folder is not None and (folder / TOKENIZER_NAME).is_file():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
            in_text = lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)  # noqa: E731
    template = (_template_in(folder) if folder is not None else None) or template
    with suppress(RoundpipeError):
        if template is not None:
            one, two = run_limited(lambda: _around(str(template)), Limits("the chat template", "chat_template"))
            per_turn = max(0.0, in_text(two) - in_text(one)) / 2
            return TokenCounter(in_text, in_text(one) - 2 * per_turn, per_turn)
    return TokenCounter(in_text)


def _by_words(text: str) -> float:
    """One token and more for a word of letters, one for each digit and sign."""
    words, marks = WORD.findall(MARK.sub("", text)), MARK.findall(text)
    return sum(max(1.0, len(word.encode("utf-8", "replace")) / WORD_BYTES) for word in words) + len(marks)


def _template_in(folder: Path) -> str | None:
    with suppress(OSError, ValueError, RefusedError):
        return read_regular(folder / TEMPLATE_NAME, MAX_BYTES).decode()
    with suppress(OSError, ValueError, RefusedError, AttributeError):
        found = json.loads(read_regular(folder / SETTINGS_NAME, MAX_BYTES)).get("chat_template")
        return found if isinstance(found, str) else None
    return None


def _around(template: str) -> tuple[str, str]:
    """Text that the template writes around one empty exchange, and around two."""
    made = traced_environment(None, [], set()).from_string(template)
    one, two = (made.render(messages=times * EXCHANGE, bos_token="", eos_token="</s>") for times in (1, 2))
    return one, two


def sample_lengths(spec: DatasetSpec, folder: Path | None, counter: TokenCounter) -> list[int]:
    """Tokens of the first rows of each file, of a pair of its longer answer; empty where none can be read.

    Args:
        folder: as of `find_sources`.
    """
    return _lengths(spec, folder, counter, lambda rows: list(islice(rows, SAMPLED_ROWS)))


def longest_row(spec: DatasetSpec, folder: Path | None, counter: TokenCounter) -> int | None:
    """Tokens of the longest row, the first of `LARGEST` by their characters; None where none can be read; as above."""
    size = lambda columns: sum(len(str(value)) for value in columns.values())  # noqa: E731
    return max(_lengths(spec, folder, counter, lambda rows: nlargest(LARGEST, rows, size)), default=None)


def _lengths(
    spec: DatasetSpec, folder: Path | None, counter: TokenCounter, chosen: Callable[[Iterator[Columns]], list[Columns]]
) -> list[int]:
    """Tokens of the `chosen` rows of each file."""
    lengths: list[int] = []
    with suppress(RefusedError, OSError, ValueError):
        for source in find_sources(spec, folder, offline=True)[:SAMPLED_ROWS]:
            rows = source.rows() if source.file is not None else ()
            columns = chosen(row.columns for row in rows if row.fault is None)
            if columns:
                row_format = decide_format(source.spec, columns, source.name)
                for row in columns:
                    with suppress(BadRowError):
                        own = row_format.fitted(row)
                        lengths.append(max(1, *(round(counter.of(one)) for one in own.parse(own.opened(row)))))
    return lengths
