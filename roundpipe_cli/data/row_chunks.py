"""The way of a chunk of rows: parsed, rendered, tokenised, masked and cut. Runs in a child process.

Nothing here knows of files or other chunks, so that any process can do any chunk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.chat import ChatTemplate, Rendered
from roundpipe_cli.data.encode import Encoded, encode_batch
from roundpipe_cli.data.formats import RowFormat
from roundpipe_cli.data.messages import Content, Conversation, Exchange, PlainText
from roundpipe_cli.data.rows import BadRowError, RawRow, RowFault
from roundpipe_cli.data.settings import DataSettings, TrainRules
from roundpipe_cli.data.spans import TurnSpans, behind_thoughts, refuse_open_thought, without_thoughts
from roundpipe_cli.data.template import find_template
from roundpipe_cli.errors import RefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_ROW_CHARACTERS = 16 * 1024**2
"""Characters of one row's text. The offsets of that many tokens need more than a gigabyte."""
BATCH_CHARACTERS = 1024**2
"""Tokenised at once."""
MEDIA_PLACEHOLDER = re.compile(r"<(image|video|audio)>")
"""Where other tools put an image's, a video's or a sound's tokens. Rows with a column of files are refused."""


@dataclass(frozen=True)
class TemplateFacts:
    """Facts about the template in force that the parent needs."""

    end_of_turn: str | None
    writes_date: bool
    ends_by_next: bool = False
    """An answer ends with the mark of the next turn, if there is one."""


@dataclass
class ChunkResult:
    """The rows of one chunk. Places count from 0 within the chunk; rows without one of the faults are all there."""

    places: npt.NDArray[np.int64]
    """Places of the rows that were tokenised, ascending, shape [rows]; of one that is split, once for each sequence."""
    full_lengths: npt.NDArray[np.int64]
    """Tokens before any cut, [rows]; of one that is split, at each of its sequences."""
    lengths: npt.NDArray[np.int64]
    """Tokens that are kept, [rows]; 0 for what is left out as too long or without a trained token."""
    num_trained: npt.NDArray[np.int64]
    """Labels that count in the loss, [rows]."""
    input_ids: npt.NDArray[np.int32]
    """Tokens of the rows of `lengths` above 0, end to end."""
    trained: npt.NDArray[np.bool_]
    lost_tokens: int = 0
    """Tokens of tokenised rows that are in no sequence."""
    faults: list[tuple[int, RowFault]] = field(default_factory=list)
    """(place, what is wrong), ascending."""
    control_tokens: list[int] = field(default_factory=list)
    """Places of conversations that spell a special token."""
    placeholders: list[int] = field(default_factory=list)
    """Places of rows whose text has a placeholder of an image, a video or a sound."""
    unused: Counter[str] = field(default_factory=Counter)
    """Rows that have a column, or a key in their messages, that is not used, by its name."""


class RowEncoder:
    """Turns chunks of rows into tokens."""

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            limited: what the template runs in.

        Raises:
            RefusedError: the template is not valid.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        self._limited = limited
        self._template = self._find(with_tools=False)
        self._tool_template = self._find(with_tools=True) if self._template is not None else None

    def _find(self, *, with_tools: bool) -> ChatTemplate | None:
        settings = self._settings
        given = (settings.chat_template, settings.folder, settings.chat_template_kwargs)
        text = find_template(self._tokenizer, *given, with_tools=with_tools)
        if text is None or (with_tools and self._template is not None and text == self._template.text):
            return self._template if with_tools else None
        with self._within_limits():
            return ChatTemplate(self._tokenizer, text)

    def facts(self) -> TemplateFacts | None:
        """None without a template."""
        template = self._template
        return (
            None
            if template is None
            else TemplateFacts(template.end_of_turn, template.writes_date, template.ends_by_next)
        )

    def encode(self, row_format: RowFormat | None, rows: Sequence[RawRow], *, count_only: bool = False) -> ChunkResult:
        """Tokenise `rows`.

        Args:
            row_format: None where no row so far could be read.
            count_only: only look for bad rows.

        Raises:
            RefusedError: the template needs too much memory.
        """
        places: list[int] = []
        rendered: list[Rendered] = []
        faults: list[tuple[int, RowFault]] = []
        control_tokens, placeholders = [], []
        unused: Counter[str] = Counter()
        for place, raw in enumerate(rows):
            try:
                if raw.fault is not None or row_format is None:
                    fault = raw.fault or RowFault("the row cannot be read")
                    raise BadRowError(fault.what, found=fault.found, expected=fault.expected, hint=fault.hint)
                columns = row_format.opened(raw.columns)
                unused.update(row_format.unused(columns))
                content = row_format.parse(columns)
                rendered.append(self._render(content, row_format))
                unused.update(rendered[-1].left_out)
                places.append(place)
                if self._holds_control_token(content):
                    control_tokens.append(place)
                if MEDIA_PLACEHOLDER.search(rendered[-1].text):
                    placeholders.append(place)
            except BadRowError as error:
                faults.append((place, error.fault))
        kept: list[tuple[int, Encoded]] = []
        for place, result in zip(places, [] if count_only else self._tokenise(rendered), strict=not count_only):
            if isinstance(result, BadRowError):
                faults.append((place, result.fault))
            else:
                kept.append((place, result))
        made = self._result(kept)
        made.faults, made.unused = sorted(faults, key=lambda item: item[0]), unused
        made.control_tokens, made.placeholders = control_tokens, placeholders
        return made

    def _tokenise(self, rendered: Sequence[Rendered]) -> Iterator[Encoded | BadRowError]:
        start = 0
        while start < len(rendered):
            stop, characters, plain = start, 0, rendered[start].is_plain
            while stop < len(rendered) and rendered[stop].is_plain == plain:
                if stop > start and characters + len(rendered[stop].text) > BATCH_CHARACTERS:
                    break
                characters += len(rendered[stop].text)
                stop += 1
            yield from encode_batch(self._tokenizer, rendered[start:stop], plain=plain)
            start = stop

    def _result(self, kept: Sequence[tuple[int, Encoded]]) -> ChunkResult:
        places, full_lengths, lengths, counts = [], [], [], []
        ids, trained = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.bool_)]
        lost_tokens = 0
        for place, row in kept:
            for sequence, num_new in self._sequences(row):
                num_trained = int(np.count_nonzero(sequence.trained[1:]))
                length = len(sequence.input_ids) if num_trained else 0
                lost_tokens -= num_new if num_trained else 0
                places.append(place)
                full_lengths.append(len(row.input_ids))
                lengths.append(length)
                counts.append(num_trained)
                ids.append(sequence.input_ids[:length])
                trained.append(sequence.trained[:length])
            lost_tokens += len(row.input_ids)
        return ChunkResult(
            places=np.array(places, dtype=np.int64),
            full_lengths=np.array(full_lengths, dtype=np.int64),
            lengths=np.array(lengths, dtype=np.int64),
            num_trained=np.array(counts, dtype=np.int64),
            input_ids=np.concatenate(ids),
            trained=np.concatenate(trained),
            lost_tokens=lost_tokens,
        )

    def _sequences(self, row: Encoded) -> Iterator[tuple[Encoded, int]]:
        """(what is kept of a row, how many of its tokens no sequence before had), at least one entry.

        limit 5, overlap 2    0 1 2 3 4                   tokens; those in brackets are not trained again
                                   (3 4) 5 6 7
                                         (6 7) 8 9
        """
        limit, policy = self._settings.max_seq_length, self._settings.long_rows
        num_tokens = len(row.input_ids)
        if num_tokens <= limit or policy != "split":
            end = num_tokens if num_tokens <= limit else limit if policy == "truncate" else 0
            yield Encoded(row.input_ids[:end], row.trained[:end]), end
            return
        end = 0
        while end < num_tokens:
            is_alone = end == num_tokens - 1  # a single token is trained behind another, or not at all
            begin, seen = max(0, end - max(self._settings.long_rows_overlap, is_alone)), end
            end = min(num_tokens, begin + limit)
            trained = row.trained[begin:end].copy()
            trained[: seen - begin] = False
            yield Encoded(row.input_ids[begin:end], trained), end - seen

    def _render(self, content: Content, row_format: RowFormat) -> Rendered:
        train_all, rules = self._settings.train_on_inputs, row_format.rules
        if rules.thoughts == "drop":
            content = without_thoughts(content)
        is_chat = isinstance(content, Conversation) or (isinstance(content, Exchange) and row_format.as_chat)
        template = self._tool_template if isinstance(content, Conversation) and content.tools else self._template
        if is_chat and template is not None:
            assert isinstance(content, (Conversation, Exchange))
            with self._within_limits():
                if train_all:
                    rendered = template.render_all_trained(content)
                else:
                    rendered = template.render_trained(content, rules)
        elif isinstance(content, Conversation):
            raise BadRowError(
                "the row is a conversation, and the tokenizer has no chat template",
                found="roles " + ", ".join(message["role"] for message in content.messages),
                expected="a prompt and an answer, both text, or a template",
                hint="add to the recipe: `chat_template: path/to/template.jinja`",
            )
        else:
            rendered = _plain(content, rules, train_all=train_all)
        if len(rendered.text) > MAX_ROW_CHARACTERS:
            raise BadRowError(
                "the row is too large",
                found=f"{len(rendered.text)} characters",
                expected=f"at most {MAX_ROW_CHARACTERS}",
            )
        return rendered

    @contextmanager
    def _within_limits(self) -> Iterator[None]:
        """
        Raises:
            RefusedError: out of memory.
        """
        try:
            with self._limited():
                yield
        except MemoryError:
            raise RefusedError(
                "the chat template needs too much memory",
                where="chat_template",
                hint="chat_template: path/to/template.jinja",
            ) from None

    def _holds_control_token(self, content: Content) -> bool:
        if self._template is None or not isinstance(content, (Conversation, Exchange)):
            return False
        return self._template.holds_control_token(content.messages)


def _plain(content: Exchange | PlainText, rules: TrainRules, *, train_all: bool) -> Rendered:
    """A text that goes to the tokenizer without a template."""
    if isinstance(content, PlainText):
        return Rendered(content.text, ((0, len(content.text)),), is_plain=True)
    text, border = content.plain_prompt + content.completion, len(content.plain_prompt)
    if "assistant" not in rules.roles_to_train and not train_all:
        raise BadRowError(
            "a prompt and an answer that are joined as they stand have no roles to train",
            found="roles_to_train " + ", ".join(rules.roles_to_train),
            expected="assistant among them, or turns of a chat template",
        )
    begins_at_prompt = train_all or "user" in rules.roles_to_train
    span = (0 if begins_at_prompt else border, len(text))
    if rules.thoughts == "mask" and not train_all:
        refuse_open_thought(content.completion)
        (span,) = behind_thoughts(text, TurnSpans((span,)), {}).spans or ((len(text), len(text)),)
    return Rendered(text, (span,), is_plain=True, trains_eos=train_all or rules.train_on_eos != "none")
