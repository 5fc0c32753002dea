"""The way of a chunk of rows: parsed, rendered by its template, tokenised, masked and cut. Runs in a child process.

Nothing here knows of files or other chunks, so that any process can do any chunk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.chat import ChatTemplate, Rendered
from roundpipe_cli.data.formats import RowFormat
from roundpipe_cli.data.messages import Content
from roundpipe_cli.data.rows import BadRowError, RawRow, SourceReport, is_null_word
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.spans import BEGIN_OF_THOUGHT, TokenSpan, only_thought_end, without, without_thoughts
from roundpipe_cli.data.turns import TurnEnds
from roundpipe_cli.errors import Problem, RefusedError
from roundpipe_cli.faults import fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# From text with trained spans to token ids with labels.


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of one row."""

    input_ids: npt.NDArray[np.int32]
    """Shape [tokens]."""
    weights: npt.NDArray[np.float32]
    """Shape [tokens]: factors in the loss; 0 is not trained, below 0 belongs to an answer that is not wanted."""


def encode_batch(
    tokenizer: PreTrainedTokenizerBase, rendered: Sequence[Rendered], *, plain: bool
) -> list[Encoded | BadRowError]:
    """Tokenise many rows at once (the fast tokenizers then use all cores).

    A token is trained if any character that it stands for is: where one token spans the border of prompt and answer,
    the answer's first character would otherwise never be learnt.

    Args:
        plain: text without a template: the tokenizer adds its own special tokens (BOS), and EOS is appended, trained
            where the text's last character is. A text that brings either of them has no second one, and loses the
            blanks before its BOS and behind its EOS. A chat template has written them all itself.
    """
    if not rendered:  # the tokenizers take no empty batch
        return []
    fault("tokenize")
    begin = _ids_in_front(tokenizer) if plain else []
    if plain:
        rendered = [_between_own_marks(tokenizer, row, begin) for row in rendered]
    if not getattr(tokenizer, "is_fast", False):
        return [_encode_slow(tokenizer, row, begin, plain=plain) for row in rendered]
    batch: Any = tokenizer(
        [row.text for row in rendered],
        add_special_tokens=plain,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    encoded: list[Encoded | BadRowError] = []
    added = tokenizer.added_tokens_decoder.items()
    taking = np.array([token_id for token_id, token in added if token.lstrip or token.rstrip], dtype=np.int64)
    for row, ids, offsets in zip(rendered, batch["input_ids"], batch["offset_mapping"], strict=True):
        places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        if len(taking):
            _give_blanks_back(places, np.flatnonzero(np.isin(ids, taking)), row.text)
        made = Encoded(np.asarray(ids, dtype=np.int32), _token_weights(places, row))
        encoded.append(_with_marks_once(tokenizer, made, row, begin) if plain else made)
    return encoded


def _give_blanks_back(offsets: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], text: str) -> None:
    """Leave the special tokens that take blanks beside them (Phi-3's) their own characters, in place.

    The header before an answer that begins with blanks would otherwise be trained with it.
    """
    for index in tokens.tolist():
        start, end = offsets[index].tolist()
        taken = text[start:end]
        if taken.strip():
            offsets[index] = start + len(taken) - len(taken.lstrip()), start + len(taken.rstrip())


def _token_weights(offsets: npt.NDArray[np.int64], row: Rendered) -> npt.NDArray[np.float32]:
    """Weights of tokens: 1 where one overlaps a trained span, or the factor of the turn. `offsets` [tokens, 2]: first
    character of each token and the one behind its last."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    if len(ends) > 1:
        # Tokenizers that trim offsets (GPT-2's) give a token of blanks no width, at its end: it begins where the
        # token before ended. Special tokens that the tokenizer adds are at (0, 0) and stay without width.
        previous_ends = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])
        starts = np.where((starts == ends) & (ends > previous_ends), previous_ends, starts)
    weights = np.zeros(len(ends), dtype=np.float32)
    for start, end in row.trained:
        weights[(starts < end) & (ends > start) & (ends > starts)] = 1
    for (start, end), factor in row.factors:
        weights[(starts < end) & (ends > start) & (weights != 0)] = factor
    return weights


def _ids_in_front(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that the tokenizer puts before every text: of BOS, or none."""
    whole, bare = (_ids(tokenizer, "a", plain=plain) for plain in (True, False))
    return next((whole[:place] for place in range(len(whole)) if whole[place : place + len(bare)] == bare), [])


def _between_own_marks(tokenizer: PreTrainedTokenizerBase, row: Rendered, begin: list[int]) -> Rendered:
    """The row without the blanks before its own BOS and behind its own EOS."""
    text = row.text
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    bos = "".join(tokenizer.convert_ids_to_tokens(begin))
    start = start if bos and text.startswith(bos, start) else 0
    end = end if text[:end].endswith(str(tokenizer.eos_token)) else len(text)
    if (start, end) == (0, len(text)):
        return row
    spans = tuple((max(0, first - start), min(last, end) - start) for first, last in row.trained)
    return replace(row, text=text[start:end], trained=spans)


def _with_marks_once(tokenizer: PreTrainedTokenizerBase, made: Encoded, row: Rendered, begin: list[int]) -> Encoded:
    """The tokens of a text with BOS, where the tokenizer has one, and EOS, neither oftener than the text has it.

    Args:
        begin: what the tokenizer has put before the text.
    """
    input_ids, weights = made.input_ids, made.weights
    if begin and input_ids[: 2 * len(begin)].tolist() == [*begin, *begin]:  # the text's own follows
        kept = np.r_[: len(begin), 2 * len(begin) : len(input_ids)]
        input_ids, weights = input_ids[kept], weights[kept]
    num_own, num_ends = 0, 0  # at the end of the text, and of its tokens
    mark = str(tokenizer.eos_token)
    while row.text.endswith(mark, 0, len(row.text) - num_own * len(mark)):
        num_own += 1
    while num_ends < len(input_ids) and input_ids[-1 - num_ends] == tokenizer.eos_token_id:
        num_ends += 1
    eos_trained = row.trains_eos and bool(row.trained) and row.trained[-1][1] == len(row.text)
    if num_ends == 0:
        end = np.array([tokenizer.eos_token_id], dtype=np.int32)
        return Encoded(np.concatenate([input_ids, end]), np.append(weights, np.float32(eos_trained)))
    length = len(input_ids) - max(0, num_ends - max(1, num_own))  # some tokenizers append EOS themselves
    input_ids, weights = input_ids[:length], weights[:length].copy()
    weights[-1] = weights[-1] and row.trains_eos or eos_trained
    return Encoded(input_ids, weights)


def _encode_slow(
    tokenizer: PreTrainedTokenizerBase, row: Rendered, begin: list[int], *, plain: bool
) -> Encoded | BadRowError:
    """For tokenizers without character offsets: the tokens of each prefix must be a prefix of the tokens."""
    ids = _ids(tokenizer, row.text, plain=plain)
    weights = np.zeros(len(ids), dtype=np.float32)
    for span, factor in (*((span, 1.0) for span in row.trained), *row.factors):
        borders = []
        for position in span:
            prefix = ids if position == len(row.text) else _ids(tokenizer, row.text[:position], plain=plain)
            if ids[: len(prefix)] != prefix:
                return BadRowError(
                    "cannot tell which tokens belong to the answer",
                    found="a tokenizer without character offsets, with a token that spans the border",
                    expected="a fast tokenizer (a model folder with a tokenizer.json)",
                )
            borders.append(len(prefix))
        weights[borders[0] : borders[1]] = factor
    made = Encoded(np.asarray(ids, dtype=np.int32), weights)
    return _with_marks_once(tokenizer, made, row, begin) if plain else made


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, plain: bool) -> list[int]:
    ids: Any = tokenizer(text, add_special_tokens=plain, verbose=False)["input_ids"]
    return list(ids) if text else []


MAX_ROW_CHARACTERS = 16 * 1024**2
"""Characters of one row's text. The offsets of that many tokens need more than a gigabyte."""
BATCH_CHARACTERS = 1024**2
"""Tokenised at once."""
MEDIA_PLACEHOLDER = re.compile(r"<(image|video|audio)>")
"""Where other tools put an image's, a video's or a sound's tokens. Rows with a column of files are refused."""


@dataclass(frozen=True)
class ChunkResult:
    """The kept rows of one chunk, a sequence each; of a row that is split several, of a pair the two answers."""

    places: npt.NDArray[np.int64]
    """[sequences, 2]: place of the row within the chunk or source, from 0, ascending, and its number."""
    lengths: npt.NDArray[np.int64]
    """Tokens of each sequence, above 0."""
    input_ids: npt.NDArray[np.int32]
    """Tokens of all sequences, end to end."""
    weights: npt.NDArray[np.float32]
    """Factors in the loss, as in `Encoded`."""
    report: SourceReport
    """All rows, also those that are not kept."""


class RowEncoder:
    """Turns chunks of rows into tokens."""

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        templates: Sequence[str | None],
        limited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            templates: for rows without tools, and with them.
            limited: what the template runs in.

        Raises:
            RefusedError: the template is not valid.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        self._limited = limited
        with self._within_limits():
            made = {text: ChatTemplate(tokenizer, text) for text in dict.fromkeys(templates) if text is not None}
        self._template, self._tool_template = (None if text is None else made[text] for text in templates)

    def ends(self) -> TurnEnds | None:
        """None without a template."""
        return None if self._template is None else self._template.ends

    def encode(self, row_format: RowFormat | None, rows: Sequence[RawRow], *, count_only: bool = False) -> ChunkResult:
        """Tokenise `rows`.

        Args:
            row_format: None where no row so far could be read.
            count_only: only look for bad rows.

        Raises:
            RefusedError: the template needs too much memory.
        """
        report = SourceReport(rows_read=len(rows))
        rendered: list[tuple[int, Rendered]] = []  # with the place of its row
        faults, factors = dict[int, Problem](), dict[int, float]()
        unused: Counter[str] = Counter()
        for place, raw in enumerate(rows):
            if raw.fault is not None or row_format is None:
                faults[place] = raw.fault or Problem("the row cannot be read")
                continue
            try:
                own = row_format.fitted(raw.columns)
                columns = own.opened(raw.columns)
                unused.update(own.unused(columns))
                contents, factors[place] = own.parse(columns), own.factor(columns)
                made = [self._render(content, own) for content in contents]
                weighs = any(not isinstance(one, str) and one.weights for one in contents)
                if weighs and (self._settings.train_on_inputs or own.spec.rows.figure != "weight"):
                    what = "a message says how much this turn counts: read with objective sft, not with train_on_inputs"
                    raise BadRowError(what, expected="a weight of 0 (not trained) or 1")
                unused.update(list(dict.fromkeys(name for one in made for name in one.left_out)))
                rendered += [(place, one) for one in made]
                talks = [(one.messages, one.tools) for one in contents if not isinstance(one, str)]
                if self._template is not None and self._template.holds_control_token(talks):
                    report.control_token_rows.append(raw.number)
                if any(is_null_word(columns.get(column)) for field, column in own.columns.items() if field != "tools"):
                    report.null_word_rows.append(raw.number)
                if any(MEDIA_PLACEHOLDER.search(one.text) for one in made):
                    report.placeholder_rows.append(raw.number)
            except BadRowError as error:
                faults[place] = error.fault
        answers: dict[int, list[Encoded]] = {}
        if not count_only:
            encoded = self._tokenise([one for _, one in rendered])
            for (place, _), result in zip(rendered, encoded, strict=True):
                if isinstance(result, BadRowError):
                    faults.setdefault(place, result.fault)
                else:
                    weights = result.weights * np.float32(factors[place])
                    answers.setdefault(place, []).append(Encoded(result.input_ids, weights))
        report.bad_rows = [(rows[place].number, faults[place]) for place in sorted(faults)]
        report.unused_columns = dict(unused)
        whole = {(place, rows[place].number): made for place, made in answers.items() if place not in faults}
        return self._cut(whole, report)

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

    def _cut(self, rows: Mapping[tuple[int, int], Sequence[Encoded]], report: SourceReport) -> ChunkResult:
        """The sequences of rows, which have one answer or, of pairs, two; the report counts what is kept and lost.

        Args:
            rows: by place and number.
        """
        limit, drops = self._settings.max_seq_length, self._settings.long_rows in ("drop", "error")
        places: list[tuple[int, int]] = []
        kept: list[Encoded] = []
        for row, answers in rows.items():
            full_lengths = [len(answer.input_ids) for answer in answers]
            report.longest_row_tokens = max(report.longest_row_tokens, *full_lengths)
            report.lost_tokens += sum(full_lengths)
            made = [[one for one in self._sequences(answer) if one[0].weights[1:].any()] for answer in answers]
            if all(made):
                sequences = [one for of_answer in made for one in of_answer]
                places += [row] * len(sequences)
                kept += [sequence for sequence, _ in sequences]
                report.lost_tokens -= sum(num_new for _, num_new in sequences)
                report.rows_kept += len(sequences) // len(answers)
                report.unwanted_rows += bool(sequences[0][0].weights.min() < 0)
            if max(full_lengths) > limit:
                report.too_long_rows.append(row[1])
            # rows that are too long were not checked
            if any(not one and not (drops and full > limit) for one, full in zip(made, full_lengths, strict=True)):
                report.untrained_rows.append(row[1])
        lengths = [len(sequence.input_ids) for sequence in kept]
        report.total_tokens = sum(lengths)
        report.trained_tokens = sum(int(np.count_nonzero(sequence.weights[1:])) for sequence in kept)
        return ChunkResult(
            np.array(places, dtype=np.int64).reshape(-1, 2),
            np.array(lengths, dtype=np.int64),
            np.concatenate([np.empty(0, dtype=np.int32), *(sequence.input_ids for sequence in kept)]),
            np.concatenate([np.empty(0, dtype=np.float32), *(sequence.weights for sequence in kept)]),
            report,
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
            yield Encoded(row.input_ids[:end], row.weights[:end]), end
            return
        end = 0
        while end < num_tokens:
            is_alone = end == num_tokens - 1  # a single token is trained behind another, or not at all
            begin, seen = max(0, end - max(self._settings.long_rows_overlap, is_alone)), end
            end = min(num_tokens, begin + limit)
            weights = row.weights[begin:end].copy()
            weights[: seen - begin] = 0
            yield Encoded(row.input_ids[begin:end], weights), end - seen

    def _render(self, content: Content, row_format: RowFormat) -> Rendered:
        train_all, rules = self._settings.train_on_inputs, row_format.spec
        if isinstance(content, str):
            return _bounded(Rendered(content, ((0, len(content)),), is_plain=True))
        template = self._tool_template if content.tools else self._template
        plain = content.plain_prompt if self._template is None or not rules.as_chat else None
        given = plain or (template and template.ends.prompt) or ""
        is_open = given.rstrip().endswith(BEGIN_OF_THOUGHT)
        if rules.thoughts == "drop":
            content = without_thoughts(content, is_open=is_open)
        if plain is not None:
            rendered = _plain(plain, content.messages[-1]["content"], rules, train_all=train_all, is_open=is_open)
        elif template is not None:
            with self._within_limits():
                rendered = template.render_trained(content, None if train_all else rules)
        else:
            raise BadRowError(
                "the row is a conversation, and the tokenizer has no chat template",
                found="roles " + ", ".join(message["role"] for message in content.messages),
                expected="a prompt and an answer, both text, or a template",
                hint="add to the recipe: `chat_template: path/to/template.jinja`",
            )
        return _bounded(rendered)

    @contextmanager
    def _within_limits(self) -> Iterator[None]:
        try:
            with self._limited():
                yield
        except MemoryError:
            what, hint = "the chat template needs too much memory", "chat_template: path/to/template.jinja"
            raise RefusedError(what, where="chat_template", hint=hint) from None


def _bounded(rendered: Rendered) -> Rendered:
    if len(rendered.text) > MAX_ROW_CHARACTERS:
        found, expected = f"{len(rendered.text)} characters", f"at most {MAX_ROW_CHARACTERS}"
        raise BadRowError("the row is too large", found=found, expected=expected)
    return rendered


def _plain(prompt: str, completion: str, rules: DatasetSpec, *, train_all: bool, is_open: bool) -> Rendered:
    """A prompt, which may begin a thought, and its completion as they go to the tokenizer without a template."""
    text, border = prompt + completion, len(prompt)
    if "assistant" not in rules.roles_to_train and not train_all:
        raise BadRowError(
            "a prompt and an answer that are joined as they stand have no roles to train",
            found="roles_to_train " + ", ".join(rules.roles_to_train),
            expected="assistant among them, or turns of a chat template",
        )
    begins_at_prompt = train_all or "user" in rules.roles_to_train
    spans: tuple[TokenSpan, ...] = ((0 if begins_at_prompt else border, len(text)),)
    if rules.thoughts == "mask" and not train_all:
        thought = border, border + only_thought_end(completion, is_open=is_open)
        spans = without(spans, [thought]) or ((len(text), len(text)),)
    return Rendered(text, spans, is_plain=True, trains_eos=train_all or rules.train_on_eos != "none")
