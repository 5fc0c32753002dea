"""Finds the turns of a conversation in the text that a chat template made of it, and what the template left out."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from roundpipe_cli.data.messages import END_OF_THOUGHT, THOUGHT_KEYS, Message
from roundpipe_cli.data.rows import BadRowError, printable
from roundpipe_cli.data.spans import (
    BEGIN_OF_THOUGHT,
    MARK_OF_THOUGHT,
    TokenSpan,
    TurnSpans,
    only_thought_end,
    thought_end,
    without,
)
from roundpipe_cli.data.traced import COPIED, NOT_SAID, Cover, Field, Fields, Laid, Run

CLOSING = (
    r"<(?:\|?/[^<>\s]+|(?:[^<>\s]*[^<>\sa-zA-Z])?(?i:end)[^<>\s]*|\w+\|)>|\[/[^\[\]\s]+\]|\u25c1/[^\s\u25b7]+\u25b7"
)
"""Marks that close: `</think>`, `[/THINK]`, `<|END_THINKING|>`, `<|end|>`, `<channel|>`."""
OPENS_THOUGHT = re.compile(rf"(?!{CLOSING})(?:<[^<>\s]+>|\[[^\[\]\s]+\]|\u25c1[^\s\u25b7]+\u25b7)[^<>\[\]]*\Z")
BLANKS = re.compile(r"\s*")
NOT_KEPT = "(not kept by the chat template)"
TEMPLATE_HINT = "`chat_template: FILE`"


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """How a template and its tokenizer end turns."""

    specials: tuple[str, ...]
    """Special and added tokens."""
    next_special: re.Pattern[str]
    """Blanks and a special token (group 1)."""
    end_of_turn: str | None
    """The first special token behind every turn of the assistant; None: none is."""
    end_run: re.Pattern[str] | None
    """Tokens that end a turn and those that follow behind an answer, with the blanks between, at least one of them."""
    end_of_question: str | None
    """The special token behind a turn of the user."""
    next_mark_ends: bool
    """An answer ends with the first special token of the next turn."""
    has_generation_prompt: bool
    always_prompts: bool
    """Every text ends with a generation prompt."""
    prompt: str | None
    """The text behind a question that the model is given, with the generation prompt; None: it cannot be told."""
    closing: str | None
    """The rest of a text behind an answer that it ends with; None: it cannot be told."""
    closes_thought: re.Pattern[str]
    """The mark that may stand behind a thought beside the content, with the blanks around it."""
    empty_thought: re.Pattern[str]
    """The marks of a thought around nothing."""


def thought_patterns(opens: str = "", closes: str = "") -> tuple[re.Pattern[str], re.Pattern[str]]:
    """`TurnEnds.closes_thought` and `.empty_thought` where a template writes these marks around thoughts."""
    marks = [re.escape(mark.strip()) for mark in (opens, closes)]
    own = rf"|{marks[0]}\s*{marks[1]}" if marks[1] else ""
    return (
        re.compile(rf"\s*(?:{marks[1] + '|' if marks[1] else ''}{CLOSING})?\s*"),
        re.compile(rf"\s*(?:(?:<think>)?\s*</think>{own})\s*"),
    )


def leaves_out(what: str, found: str, expected: str, hint: str = TEMPLATE_HINT) -> BadRowError:
    """The error for a part of a conversation that is not in the text."""
    return BadRowError(f"the chat template leaves {what} out", found=found, expected=expected, hint=hint)


class WrittenTurns:
    """A conversation and its text.

    The methods raise `BadRowError` where what is to be learnt is not in the text, or cannot be told apart in it.
    """

    def __init__(
        self, fields: Fields, lay: Callable[[Fields, Sequence[Message], bool], Laid | None], ends: TurnEnds, laid: Laid
    ) -> None:
        """
        Args:
            lay: renders messages, with a generation prompt or without; None: the template refuses them.
            laid: the whole text.
        """
        self.laid = laid
        self.messages = fields.messages
        self._fields = fields
        self._lay = lay
        self._ends = ends
        self._starts: dict[tuple[object, ...], int] = {}
        self._tails: dict[tuple[str, str], tuple[str | None, bool]] = {}
        self._until: dict[int, Laid | None] = {len(self.messages) - 1: laid}

    def check_kept(self, trained: Collection[int]) -> list[str]:
        """Parts of messages that are not in the text, by name; turns that are `trained` have to be there as they stand,
        others in part."""
        left_out = []
        for place, of in enumerate(self._fields.fields):
            lost = self.laid.missing(place)
            if not lost:
                continue
            role = self.messages[of.message]["role"]
            if of.part == "thought" or (role == "assistant" and self._is_thought(of, lost)):
                left_out.append(self._lost_thought(place, of))
            elif of.part != "content":
                raise self._lost_call(of)
            elif role == "assistant" and (of.message in trained or not self.laid.holds(place)):
                left_out.append(self._lost_words(place, of))
            elif not self.laid.holds(place):
                found = f"nothing of turn {of.message + 1} in its text"
                raise leaves_out(f"a turn of the role {role}", found, "a template that writes such turns")
        if any(message.get("name", "") not in self.laid.text for message in self.messages):
            left_out.append("name of messages (not in the chat template)")
        return left_out

    def _is_kept_at_the_end(self, place: int) -> bool:
        """Whether a field is in the text where its turn is the last one."""
        index = self._fields.fields[place].message
        until = self._text_until(index)
        return index < len(self.messages) - 1 and until is not None and not until.missing(place)

    def _lost_thought(self, place: int, of: Field) -> str:
        name = "reasoning_content" if of.part == "thought" else "thoughts in content"
        if self._is_kept_at_the_end(place):
            return f"{name} of earlier turns {NOT_KEPT}"
        beside = of.part == "thought"
        found = f"no {'`reasoning_content`' if beside else 'thought in `content`'} of turn {of.message + 1} in its text"
        expected = "a template with `reasoning_content`" if beside else "a template that keeps thoughts"
        hint = f"{self._other_way(of)}{TEMPLATE_HINT}, or `thoughts: drop`"
        raise leaves_out("the assistant's thoughts", found, expected, hint)

    def _other_way(self, of: Field) -> str:
        """The other way of writing a thought, where the template keeps that, tried with its turn as the last one."""
        message = {key: value for key, value in self.messages[of.message].items() if key not in THOUGHT_KEYS}
        said, way = str.__str__(message.get("content", "")), "thoughts as `reasoning_content`"
        if of.part == "thought":
            message["content"] = f"{BEGIN_OF_THOUGHT}\n{of.text.strip()}\n{END_OF_THOUGHT}\n\n{said}"
            way = f"thoughts in `content`, from {BEGIN_OF_THOUGHT} to {END_OF_THOUGHT}"
        else:
            end = thought_end(said)
            message |= {"content": said[end:], "reasoning_content": MARK_OF_THOUGHT.sub("", said[:end]).strip()}
        fields = Fields([*self.messages[: of.message], message])
        laid = self._lay(fields, fields.messages, False)
        places = [place for place, item in enumerate(fields.fields) if item.message == of.message]
        return f"{way} (this template keeps those), " if laid and not any(map(laid.missing, places)) else ""

    def _lost_words(self, place: int, of: Field) -> str:
        if "tool_calls" in self.messages[of.message] and self._is_kept_at_the_end(place):
            return f"content beside tool calls of earlier turns {NOT_KEPT}"
        if self.laid.holds(place):
            raise self._cannot_tell(of.message)
        beside = ", which has tool calls" if "tool_calls" in self.messages[of.message] else ""
        found = f"nothing of the content of turn {of.message + 1} in its text{beside}"
        raise leaves_out("the assistant's words", found, "a template that writes them, or turns whose content is empty")

    def _lost_call(self, of: Field) -> BadRowError:
        turn = of.message + 1
        fields = enumerate(self._fields.fields)
        names = [place for place, item in fields if item.part == "name" and item.message == of.message]
        written = [place for place in names if not self.laid.missing(place)]
        if not written:
            found = f"nothing of turn {turn} in its text"
            return leaves_out("the tool calls", found, "a template that writes calls of tools")
        if len(written) < len(names):
            found = f"{len(written)} of the {len(names)} calls of turn {turn} in its text"
            hint = "one call a turn, its output behind it, then the next call; or " + TEMPLATE_HINT
            expected = "one call a turn, or a template that writes several"
            return leaves_out("some tool calls of a turn", found, expected, hint)
        return BadRowError(
            "the chat template leaves arguments of a tool call out, or writes them in another way",
            found=f"no {printable(repr(of.text), 70)} of turn {turn} in its text",
            expected="a template that writes every argument as it stands or as JSON",
            hint=TEMPLATE_HINT,
        )

    def _cannot_tell(self, index: int) -> BadRowError:
        role = self.messages[index]["role"]
        marks = "or has {% generation %} marks around them"
        return BadRowError(
            f"cannot tell what the {role} said in the text that the chat template makes",
            found=f"turn {index + 1} of {len(self.messages)} is rewritten by the template",
            expected=f"a template that keeps the assistant's words, {marks}"
            if role == "assistant"
            else f"a template that keeps the words of the {role}, or `roles_to_train` without it",
        )

    def answer(self, index: int) -> TurnSpans:
        """The spans of a turn of the assistant, by the pieces of it that the text has."""
        stretches = self._stretches(index)
        if not stretches:
            return self._empty_answer(index)
        spans: list[TokenSpan] = []
        end: TokenSpan | None = None
        for place, (before, runs, stop) in enumerate(stretches):
            start = runs[0].start if place else self._start(index, before, runs[0])
            last, end = self._end(index, runs[-1], stop)
            spans.append((start, last))
        if end is None and (end := self._end_behind_results(index, stretches[-1][1][-1])) is not None:
            spans.append(end)
        return TurnSpans(tuple(spans), end)

    def _end_behind_results(self, index: int, last: Run) -> TokenSpan | None:
        """The end of a turn without words behind the results of its calls, which the template writes inside it."""
        behind = itertools.takewhile(
            lambda place: self.messages[place]["role"] == "tool", range(index + 1, len(self.messages))
        )
        results = set(behind)
        places = [place for place, run in enumerate(self.laid.runs) if run.message in results and run.start >= last.end]
        until, pattern = self._text_until(index), self._ends.end_run
        begin = _anchor(until, last)
        if not places or pattern is None or until is None or begin is None or not pattern.search(until.text, begin):
            return None
        following = self.laid.runs[places[-1] + 1 : places[-1] + 2]
        stop = following[0].start if following else len(self.laid.text)
        found = pattern.search(self.laid.text, self.laid.runs[places[-1]].end, stop)
        return None if found is None else found.span()

    def _stretches(self, index: int) -> list[tuple[Run | None, list[Run], int]]:
        """Runs of a turn without those of others between: the run before them, they, and where the next begins."""
        own = self.laid.of_message(index)
        echoes = self._echoes(index, own)
        made: list[tuple[Run | None, list[Run], int]] = []
        before: Run | None = None
        is_open = False
        for run in self.laid.runs:
            if run.message == index and run not in echoes:
                if is_open:
                    made[-1][1].append(run)
                else:
                    made.append((before, [run], len(self.laid.text)))
                is_open = True
                continue
            if is_open:
                made[-1] = (made[-1][0], made[-1][1], run.start)
            is_open, before = False, run
        return made

    def _echoes(self, index: int, own: Sequence[Run]) -> list[Run]:
        """Runs that other turns repeat, as the name of a call before its output."""
        seen: dict[tuple[Cover, ...], int] = {}
        repeated = []
        for run in own:
            seen[run.piece.covers] = seen.get(run.piece.covers, 0) + 1
            if seen[run.piece.covers] > 1:
                repeated.append((run, seen[run.piece.covers]))
        if not repeated:
            return []
        until = self._text_until(index)
        written = [] if until is None else [run.piece.covers for run in until.of_message(index)]
        return [run for run, times in repeated if times > max(1, written.count(run.piece.covers))]

    def _text_until(self, index: int) -> Laid | None:
        if index not in self._until:
            self._until[index] = self._lay(self._fields, self.messages[: index + 1], False)
        return self._until[index]

    def _start(self, index: int, before: Run | None, first: Run) -> int:
        """Where what the model writes begins, between the turn before and the first piece of this one.

        It begins behind what the model is given, as far as the text has that. Where it has something else, it begins
        where an answer would begin that has only words.
        """
        position = 0 if before is None else before.end
        gap = self.laid.text[position : first.start]
        is_next = before is not None and before.message == index - 1  # no turn without words lies between
        asked = before is not None and is_next and self.messages[before.message]["role"] == "user"
        if asked and self._ends.prompt is not None and gap.startswith(self._ends.prompt):
            return position + len(self._ends.prompt)
        if asked and (given := self._given_before(self._ends.prompt, position)):
            return position + given
        begins = self.laid.text.startswith(BEGIN_OF_THOUGHT, first.start)
        key = (gap, is_next and before and self._kind(before), self._kind(first), index if not is_next else 0, begins)
        if key not in self._starts:
            self._starts[key] = self._offset(index, before, gap)
        return position + self._starts[key]

    def _given_before(self, given: str | None, position: int) -> int:
        """Characters of the text that the model is given, where that ends with the mark of a thought that an answer, or
        the template before it, repeats; 0 otherwise."""
        shared = commonprefix([given or "", self.laid.text[position : position + len(given or "")]])
        is_begun = shared.rstrip() == (given or "").rstrip() and shared.rstrip().endswith(BEGIN_OF_THOUGHT)
        return len(shared) if is_begun else 0

    def _kind(self, run: Run) -> tuple[str, str]:
        if run.message < 0:
            return "", ""
        return self.messages[run.message]["role"], self._fields.fields[run.piece.field].part

    def _offset(self, index: int, before: Run | None, gap: str) -> int:
        """Where in the gap between two turns the second one's words begin."""
        given = self._given(before, index)
        if given and gap.startswith(given):
            return len(given)
        if shared := self._given_before(given, 0 if before is None else before.end):
            return shared
        words: Message = {"role": "assistant", "content": "x"}
        fields = Fields([*self.messages[:index], words])
        laid = self._lay(fields, fields.messages, False)
        written = laid.of_message(index) if laid is not None else []
        behind = _anchor(laid, before)
        if laid is not None and written and behind is not None and behind <= written[0].start:
            given = laid.text[behind : written[0].start]
        if given is None:
            return len(gap)
        return len(_whole_marks(commonprefix([gap, given]), gap))

    def _end(self, index: int, last: Run, stop: int) -> tuple[int, TokenSpan | None]:
        """Where what the model writes ends, behind the last piece of a turn, and its end of turn."""
        closing, gap = self._ends.closing, self.laid.text[last.end : stop]
        part, is_last = self._kind(last)[1], index == len(self.messages) - 1
        if not is_last and part == "content" and closing is not None and gap.startswith(closing):
            return self._end_between(index, last.end, stop, closing)
        if is_last or (gap, part) not in self._tails:
            until = self._text_until(index)
            begin = _anchor(until, last)
            self._tails[gap, part] = None, False
            if until is not None and begin is not None:
                following = until.next_start(begin)
                self._tails[gap, part] = until.text[begin:following], following < len(until.text)
        tail, goes_on = self._tails[gap, part]
        if goes_on and not is_last:  # with words behind what is not the model's
            return last.end + len(_whole_marks(commonprefix([gap, tail or ""]), gap)), None
        return self._end_between(index, last.end, stop, tail)

    def _end_between(self, index: int, start: int, stop: int, tail: str | None) -> tuple[int, TokenSpan | None]:
        """Where the end of a turn ends, which is somewhere in a range of the text.

        It ends as the text does that has nothing behind this turn, and with a special token. Where that text has none,
        the next turn's first special token is what the model stops with.

        Args:
            tail: what that text has behind the turn; None: it is not known.
        """
        ends = self._ends
        gap = self.laid.text[start:stop]
        shared = commonprefix([gap, tail or ""])
        is_whole = tail is not None and len(shared) == len(tail) and not ends.always_prompts
        if not is_whole:
            shared = _whole_marks(shared, gap)
            told = [found.end() for found in ends.end_run.finditer(shared)] if ends.end_run is not None else []
            if ends.end_of_question and ends.end_of_question in shared:
                told.append(shared.rfind(ends.end_of_question) + len(ends.end_of_question))
            shared = shared[: max(told, default=None)]
        kept = shared.rstrip()
        end = start + len(kept)
        span = self._end_run(start, end)
        if span is not None:
            return end, span
        if not is_whole and ends.end_of_question and kept.endswith(ends.end_of_question):
            return end, (end - len(ends.end_of_question), end)
        if is_whole and not ends.next_mark_ends and kept.endswith(ends.specials):
            return end, self._stop_token(start, end)
        following = ends.next_special.match(self.laid.text, end, stop)
        is_late = ends.end_run is not None and ends.end_run.search(tail or "")
        if is_late and following is not None and following[1] != ends.end_of_question:
            return end, None  # the turn ends further on, behind what is not the model's
        if ends.next_mark_ends and [item["role"] for item in self.messages[index + 1 : index + 2]] == ["assistant"]:
            following = None  # it is the header of another answer
        if following is not None:
            return following.end(), following.span(1)
        return start + len(shared), None

    def _given(self, before: Run | None, index: int) -> str | None:
        """The text behind a piece of the turns before `index` that the model is given; None where it cannot be told."""
        laid = self._lay(self._fields, self.messages[:index], True) if self._ends.has_generation_prompt else None
        begin = _anchor(laid, before)
        return None if laid is None or begin is None else laid.text[begin:]

    def _empty_answer(self, index: int) -> TurnSpans:
        """The span of a turn without a word: the end of the turn, behind what the model is given."""
        before = next((run for run in reversed(self.laid.runs) if 0 <= run.message < index), None)
        given, until = self._given(before, index), self._text_until(index)
        begin, start = _anchor(until, before), 0 if before is None else before.end
        if not given or until is None or begin is None or not until.text.startswith(given, begin):
            return TurnSpans(())
        if not self.laid.text.startswith(given, start):
            return TurnSpans(())
        start += len(given)
        stop = self.laid.next_start(start)
        last, end = self._end_between(index, start, stop, until.text[begin + len(given) :])
        return TurnSpans(((start, last),), end) if last > start else TurnSpans(())

    def other(self, index: int) -> TurnSpans:
        """The span of a turn that is not the assistant's, with its end of turn."""
        runs = self.laid.of_message(index)
        lost = any(self.laid.missing(place) for place, of in enumerate(self._fields.fields) if of.message == index)
        if not runs or lost:
            raise self._cannot_tell(index)
        return self._to_end_of_turn((runs[0].start, runs[-1].end))

    def _to_end_of_turn(self, *spans: TokenSpan) -> TurnSpans:
        """The spans, the last one lengthened over the end-of-turn token if that comes next."""
        if self._ends.end_run is None or not spans:
            return TurnSpans(spans)
        if len(spans) > 1 and spans[-2][1] == spans[-1][0]:  # marks side by side
            return self._to_end_of_turn(*spans[:-2], (spans[-2][0], spans[-1][1]))
        start, end = spans[-1]
        said = max((min(run.end, end) for run in self.laid.runs if start <= run.start < end), default=start)
        for _ in range(2):
            stop = start + len(self.laid.text[start:end].rstrip())
            closes = self._end_run(said, stop) or self._stop_token(said, stop)
            rest = self.laid.text[end : end + 16]
            behind = self._ends.end_run.match(self.laid.text, end + len(rest) - len(rest.lstrip()))
            if closes is not None or behind is None:
                break
            end = behind.end()
        return TurnSpans((*spans[:-1], (start, end)), closes)

    def _stop_token(self, start: int, stop: int) -> TokenSpan | None:
        """The special token at the end of a range of the text that the model stops with, though it ends no answer; None
        for one that closes something."""
        last = max(
            (token for token in self._ends.specials if self.laid.text.endswith(token, start, stop)), key=len, default=""
        )
        if last == self._ends.end_of_question or (last and not re.fullmatch(CLOSING, last)):
            return stop - len(last), stop
        return None

    def _end_run(self, start: int, stop: int) -> TokenSpan | None:
        """The end of a turn at the end of a range of the text; None where none is there."""
        pattern = self._ends.end_run
        runs = pattern.finditer(self.laid.text, start, stop) if pattern is not None else ()
        return next((run.span() for run in runs if run.end() == stop), None)

    def every_end(self) -> list[TokenSpan]:
        """The ends of all turns that the template writes."""
        ends = [run.span() for run in self._ends.end_run.finditer(self.laid.text)] if self._ends.end_run else []
        said = [(run.start, run.end) for run in self.laid.runs]
        return [end for end in ends if not any(start < end[1] and end[0] < stop for start, stop in said)]

    def _is_thought(self, of: Field, lost: Sequence[TokenSpan]) -> bool:
        """Whether what is lost of a field is a content's own thought."""
        end = self._thought_end(self._text_until(of.message) or self.laid, of.message) if of.part == "content" else 0
        return end > 0 and all(NOT_SAID.fullmatch(of.text, max(end, a), b) for a, b in lost if b > end)

    def _thought_end(self, laid: Laid, index: int, find: Callable[..., int] = thought_end) -> int:
        """The end of the thought in the content of a turn, which the text before it may begin."""
        first = next((run for run in laid.of_message(index) if self._kind(run)[1] == "content"), None)
        before = "" if first is None else laid.text[max(0, first.start - 64) : first.start]
        return find(
            str.__str__(self.messages[index].get("content", "")), is_open=before.rstrip().endswith(BEGIN_OF_THOUGHT)
        )

    def without_thoughts(self, index: int, turn: TurnSpans) -> TurnSpans:
        """A turn without its thoughts, the marks that the template has around them, and the blanks behind."""
        if self.messages[index]["role"] != "assistant" or not turn.spans:
            return turn
        end = self._thought_end(self.laid, index, only_thought_end)
        begin, stop = turn.spans[0][0], turn.spans[-1][1] if turn.end is None else turn.end[0]
        runs = [run for run in self.laid.of_message(index) if run.start < stop]
        gaps = zip([begin, *(run.end for run in runs)], [*(run.start for run in runs), stop], strict=True)
        find = self._ends.empty_thought.finditer
        ranges = [empty.span() for gap in gaps for empty in find(self.laid.text, *gap)]
        before, is_behind = begin, True
        for run in runs:
            last = self._last_of_thought(run, end)
            if last > run.start:
                gap = self.laid.text[before : run.start]
                opened = OPENS_THOUGHT.search(gap)
                start = before if is_behind else run.start - (len(opened[0]) if opened else 0)
                if last == run.end:
                    limit = min(self.laid.next_start(run.end), stop)
                    is_closed = self.laid.text.endswith(END_OF_THOUGHT, start, last)
                    closed = BLANKS if is_closed else self._ends.closes_thought
                    found = closed.match(self.laid.text, last, limit)
                    last = found.end() if found is not None else last
                ranges.append((start, last))
            before, is_behind = max(last, run.end), last >= run.end and is_behind
        return TurnSpans(without(turn.spans, ranges), turn.end)

    def _last_of_thought(self, run: Run, end: int) -> int:
        """Where the thought in a piece of a turn ends, at its start where it has none, by the content's own thought."""
        parts = [self._fields.fields[field].part for field, *_ in run.piece.covers]
        are = [
            part == "thought" or (part == "content" and stop <= end)
            for part, (_, _, stop) in zip(parts, run.piece.covers, strict=True)
        ]
        if are and all(are):
            return run.end
        if not any(are) and not any(
            part == "content" and cover[1] < end for part, cover in zip(parts, run.piece.covers, strict=True)
        ):
            return run.start
        if run.piece.how != COPIED:
            raise BadRowError(
                "cannot tell the assistant's thoughts from its words in the text that the chat template makes",
                found=f"both in one text in turn {run.message + 1}",
                expected="a template that writes thoughts as they stand, or `thoughts: train` or `drop`",
                hint=TEMPLATE_HINT,
            )
        return run.start + end - run.piece.covers[0][1]

    def marked(self, turns: Sequence[int]) -> dict[int, TurnSpans]:
        """The spans between the template's own marks, of the assistant's turns among these."""
        spans: dict[int, list[TokenSpan]] = {}
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        starts = [run.start for run in self.laid.runs]
        for start, end in self.laid.marks:
            if start == end:
                continue
            first = bisect_left(starts, start)
            inside = [run for run in self.laid.runs[first : bisect_left(starts, end)] if run.message >= 0]
            told = list(dict.fromkeys(run.message for run in inside if run.message in answers))
            if not told:  # nothing of a message: the end of the turn before, or a turn without words
                earlier = self.laid.runs[first - 1].message if first else -1
                told = [earlier] if earlier in answers else [index for index in answers if index > earlier][:1]
                if not told:
                    continue
            if len({index in turns for index in told}) > 1:
                raise BadRowError(
                    "cannot tell which turns of the assistant the row says not to train",
                    found=f"turns {', '.join(str(index + 1) for index in told)} in one mark of the chat template",
                )
            spans.setdefault(told[0], []).append((start, end))
        return {index: self._to_end_of_turn(*spans.get(index, [])) for index in answers if index in turns}

    def check_spans(self, turns: dict[int, TurnSpans]) -> list[str]:
        """Check the rule: what is trained is of the trained turns, and all of it. Returns what is named as left out."""
        left_out = []
        starts = [run.start for run in self.laid.runs]
        inside: set[Run] = set()
        for index, turn in turns.items():
            for start, end in turn.spans:
                first = bisect_left(starts, start)
                for run in self.laid.runs[max(0, first - 1) : bisect_left(starts, end)]:
                    if run.end <= start:
                        continue
                    is_begun = NOT_SAID.fullmatch(self.laid.text, run.start, max(run.start, start)) is not None
                    if run.message not in turns:
                        role = self.messages[run.message]["role"] if run.message >= 0 else "user"
                        raise BadRowError(
                            f"what the {role} said would be trained with the assistant's turn {index + 1}",
                            found="the {% generation %} marks of the chat template are around both",
                            expected="a template whose marks are around the assistant's words",
                            hint=TEMPLATE_HINT,
                        )
                    if is_begun and run.end <= end:
                        inside.add(run)
        for index in turns:
            covered = {cover for run in inside if run.message == index for cover in run.piece.covers}
            for run in self.laid.of_message(index):
                if run in inside or not run.piece.covers or set(run.piece.covers) <= covered:
                    continue
                of = self._fields.fields[run.piece.field]
                lost = [cover[1:] for cover in run.piece.covers]
                if of.part == "thought" or self._is_thought(of, lost):
                    left_out.append("thoughts outside the chat template's {% generation %} marks")
                else:
                    raise self._cannot_tell(index)
        return left_out


def _anchor(laid: Laid | None, run: Run | None) -> int | None:
    """The end of a piece in another text; None where it has none."""
    return None if laid is None else 0 if run is None else laid.last_at(run.piece)


def _whole_marks(shared: str, gap: str) -> str:
    """The beginning that two texts share, up to a mark that they share in part only, or to a thought that begins."""
    for begin, end in ("<>", "[]"):
        opened = shared.rfind(begin)
        if opened > shared.rfind(end) and len(shared) < len(gap):
            shared = shared[:opened]
    return shared.partition(BEGIN_OF_THOUGHT)[0]
