"""From text with trained spans to token ids with labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from roundpipe_cli.data.chat import Rendered
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.spans import TokenSpan
from roundpipe_cli.faults import fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of one row."""

    input_ids: npt.NDArray[np.int32]
    """Shape [tokens]."""
    trained: npt.NDArray[np.bool_]
    """Shape [tokens]."""


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
        made = Encoded(np.asarray(ids, dtype=np.int32), _trained_tokens(places, row.trained))
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


def _trained_tokens(offsets: npt.NDArray[np.int64], spans: Sequence[TokenSpan]) -> npt.NDArray[np.bool_]:
    """Which tokens overlap a span. `offsets` [tokens, 2]: first character of each token and the one behind its last."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    if len(ends) > 1:
        # Tokenizers that trim offsets (GPT-2's) give a token of blanks no width, at its end: it begins where the
        # token before ended. Special tokens that the tokenizer adds are at (0, 0) and stay without width.
        previous_ends = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]])
        starts = np.where((starts == ends) & (ends > previous_ends), previous_ends, starts)
    trained = np.zeros(len(ends), dtype=np.bool_)
    for start, end in spans:
        trained |= (starts < end) & (ends > start) & (ends > starts)
    return trained


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
    input_ids, trained = made.input_ids, made.trained
    if begin and input_ids[: 2 * len(begin)].tolist() == [*begin, *begin]:  # the text's own follows
        kept = np.r_[: len(begin), 2 * len(begin) : len(input_ids)]
        input_ids, trained = input_ids[kept], trained[kept]
    num_own, num_ends = 0, 0  # at the end of the text, and of its tokens
    mark = str(tokenizer.eos_token)
    while row.text.endswith(mark, 0, len(row.text) - num_own * len(mark)):
        num_own += 1
    while num_ends < len(input_ids) and input_ids[-1 - num_ends] == tokenizer.eos_token_id:
        num_ends += 1
    eos_trained = row.trains_eos and bool(row.trained) and row.trained[-1][1] == len(row.text)
    if num_ends == 0:
        end = np.array([tokenizer.eos_token_id], dtype=np.int32)
        return Encoded(np.concatenate([input_ids, end]), np.concatenate([trained, [eos_trained]]))
    length = len(input_ids) - max(0, num_ends - max(1, num_own))  # some tokenizers append EOS themselves
    input_ids, trained = input_ids[:length], trained[:length].copy()
    trained[-1] = trained[-1] and row.trains_eos or eos_trained
    return Encoded(input_ids, trained)


def _encode_slow(
    tokenizer: PreTrainedTokenizerBase, row: Rendered, begin: list[int], *, plain: bool
) -> Encoded | BadRowError:
    """For tokenizers without character offsets: the tokens of each prefix must be a prefix of the tokens."""
    ids = _ids(tokenizer, row.text, plain=plain)
    trained = np.zeros(len(ids), dtype=np.bool_)
    for span in row.trained:
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
        trained[borders[0] : borders[1]] = True
    made = Encoded(np.asarray(ids, dtype=np.int32), trained)
    return _with_marks_once(tokenizer, made, row, begin) if plain else made


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, plain: bool) -> list[int]:
    ids: Any = tokenizer(text, add_special_tokens=plain, verbose=False)["input_ids"]
    return list(ids) if text else []
