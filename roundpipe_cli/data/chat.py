"""Chat templates: from messages to text, and which characters of that text are trained.

Trained are the turns of the assistant: what the model itself writes behind the generation prompt, up to and including
the token that ends the turn. A template is rendered with texts that remember which message they are from (`traced.py`),
so where each content, thought and call lies is known, whatever the template trims, splits or moves:

    <|im_start|>user\\n 2+2?<|im_end|>\\n<|im_start|>assistant\\n<think>\\n hm\\n</think>\\n\\n4<|im_end|>\\n ...
                       user                                         thought             content
                           |<------- the model is given ------->|<------------ trained ------------>|

What lies between two pieces of a turn is trained with them. It begins behind the text that the model is given (the
messages before it with the generation prompt), and ends as the text does that ends with it (the messages up to it).
Templates with `{% generation %}` marks have said it themselves. Then one rule is checked: each piece of a trained turn
is trained, or named as left out, and none of another turn is.

Templates are programs from elsewhere: they run in jinja2's sandbox, are at most 64 KiB, and `processes.py` runs them in
a child process under limits of time and memory. `strftime_now` tells them a fixed date, so that rows do not change from
one day to the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from roundpipe_cli.data.messages import CALL_FORM_NOTES, CALL_FORMS, Conversation, Message, in_form, texts_in
from roundpipe_cli.data.rows import BadRowError, printable
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.spans import TokenSpan, turns_to_train, with_ends
from roundpipe_cli.data.traced import Fields, Laid, lay, traced_environment
from roundpipe_cli.data.turns import TurnEnds, WrittenTurns, leaves_out, thought_patterns
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.library_names import library_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "Placeholder0"
"""Words with which a template is tried."""
THOUGHT = "Thought0"
PART_OF_MARK = re.compile(r"\A[^<\[]*[>\]]")
"""The end of a mark whose beginning is not in a text."""
PROBE_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
LOOKS_SPECIAL = r"<[|\uff5c][^<>\s]{1,40}[|\uff5c]>"
"""Marks that are written as special tokens are, where a tokenizer does not know them."""

FORMS_BY_ARGUMENTS = tuple(
    tuple(form for form in CALL_FORMS if ("text" in form) == is_text) for is_text in (False, True)
)
"""Forms of calls that have their arguments as objects, and as text."""
TRACED_NAME = re.compile(r"(?:roundpipe_cli\.data\.traced\.)?\b(?:Safe)?Traced(Int|Float|List|Dict)?\b")
REFUSED = "the chat template refuses this conversation"

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, in the form that a chat template gets."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text for the tokenizer."""

    text: str
    trained: tuple[TokenSpan, ...]
    """Characters of `text` that are trained, in order."""
    left_out: tuple[str, ...] = ()
    """Parts of messages that the chat template does not write, or writes in another form, by name."""
    is_plain: bool = False
    """Text without a template: the tokenizer adds its own special tokens (BOS), and EOS is appended."""
    trains_eos: bool = True
    """Whether an EOS that is appended to a trained text is trained."""
    factors: tuple[tuple[TokenSpan, float], ...] = ()
    """Parts of `trained` with the weight of their turn, where it is not 1."""


class ChatTemplate:
    """A template bound to the tokenizer whose special tokens it may name."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """
        Raises:
            RefusedError: `text` is not valid Jinja.
        """
        self.text = text
        self._special_tokens = dict(tokenizer.special_tokens_map)
        names = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        self._specials = tuple(sorted((name for name in names if name.strip()), key=len))
        known = "|".join(map(re.escape, reversed(self._specials)))
        next_special = re.compile(rf"\s*({known}{'|' if known else ''}{LOOKS_SPECIAL})")
        self._specials_in_front = re.compile(rf"(?:\s*(?:{known}))+") if known else None
        controls = sorted(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._control_tokens = re.compile("|".join(map(re.escape, controls))) if controls else None
        self._owners: list[int] = []
        self._plain: set[int] = set()
        self._forms: dict[Sequence[str], list[Sequence[tuple[str, ...]]]] = {}
        self._compiled, self._has_marks = self._compile()
        self.ends = self._probe_ends(next_special)

    def render_trained(
        self,
        conversation: Conversation,
        rules: DatasetSpec | None = DatasetSpec(""),  # noqa: B008 - it is frozen
    ) -> Rendered:
        """The text of a conversation and the spans of the turns that `rules` train; None: all of the text is trained.

        Raises:
            BadRowError: the template refuses the conversation, leaves something of it out, or the turns cannot be told
                apart in its text.
        """
        turns = turns_to_train(conversation, rules) if rules is not None else []

        def trained(written: WrittenTurns) -> Rendered:
            left_out, text = written.check_kept(turns), written.laid.text
            if rules is None:
                return Rendered(text, ((0, len(text)),), tuple(dict.fromkeys(left_out)))
            spans = written.marked(turns) if self._has_marks else {}
            for index in turns:
                if index not in spans:
                    is_answer = written.messages[index]["role"] == "assistant"
                    spans[index] = written.answer(index) if is_answer else written.other(index)
            left_out += written.check_spans(spans)
            chosen = [spans[index] for index in sorted(spans)]
            if rules.thoughts == "mask":
                chosen = [written.without_thoughts(index, spans[index]) for index in sorted(spans)]
            ends = with_ends(chosen, written.every_end, rules.train_on_eos)
            weighed = ((index, spans[index].spans) for index in sorted(spans) if index in conversation.weights)
            factors = tuple((span, conversation.weights[index]) for index, own in weighed for span in own)
            return Rendered(text, tuple(ends), tuple(dict.fromkeys(left_out)), factors=factors)

        return self._first_that_fits(conversation, trained)

    def holds_control_token(self, value: object) -> bool:
        """Whether a text in messages, tools or lists of them spells a special token, which the tokenizer cannot tell
        from a real one."""
        pattern = self._control_tokens
        return pattern is not None and any(pattern.search(text) for text in texts_in(value))

    def _first_that_fits(self, conversation: Conversation, make: Callable[[WrittenTurns], Rendered]) -> Rendered:
        """The result of `make` for the conversation as it is, else for the first form of its calls that it takes."""
        if not any("tool_calls" in message for message in conversation.messages):
            return make(self._write(conversation.messages, conversation.tools))
        refused: list[BadRowError] = []
        for form in self._call_forms(conversation.messages):
            try:
                made = make(self._write(in_form(conversation.messages, form), conversation.tools))
            except BadRowError as error:
                refused.append(error)
            else:
                return replace(made, left_out=(*made.left_out, *map(CALL_FORM_NOTES.__getitem__, form)))
        # What a form lacks that the template takes says more than why it takes no other.
        raise next((error for error in refused if error.fault.what != REFUSED), refused[0])

    def _call_forms(self, messages: Sequence[Message]) -> Sequence[tuple[str, ...]]:
        """Forms to give calls in: with their arguments as objects, or all as text, whatever values a row has, so that
        no two ways of writing calls are trained."""
        first = next(call for message in messages for call in message.get("tool_calls", ()))
        for keys in (("a",), tuple(first["function"]["arguments"])):
            if keys not in self._forms:
                self._forms[keys] = [forms for forms in FORMS_BY_ARGUMENTS if self._takes(keys, forms)]
            if FORMS_BY_ARGUMENTS[0] in self._forms[keys]:
                break
        return self._forms[keys][0] if self._forms[keys] else CALL_FORMS

    def _takes(self, keys: Sequence[str], forms: Sequence[tuple[str, ...]]) -> bool:
        """Whether the template takes a call with texts under these keys, in one of these forms."""
        function = {"name": "f", "arguments": dict.fromkeys(keys, PLACEHOLDER)}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        asked: list[Message] = [{"role": "user", "content": PLACEHOLDER}, call]
        rest: list[Message] = [{"role": role, "content": PLACEHOLDER} for role in ("tool", "assistant")]
        for form in forms:
            for messages, tools in product((asked, asked + rest), ((), (PROBE_TOOL,))):
                with suppress(BadRowError):
                    self._write(in_form(messages, form), tools).check_kept([1])
                    return True
        return False

    def _write(self, messages: Sequence[Message], tools: Tools) -> WrittenTurns:
        fields = Fields(messages)
        laid = self._lay(fields, fields.messages, tools)
        _check_tools(messages, tools, laid.text)

        def lay_part(of: Fields, part: Sequence[Message], prompt: bool) -> Laid | None:
            with suppress(BadRowError):
                return self._lay(of, part, tools, add_generation_prompt=prompt) if part else None
            return None

        return WrittenTurns(fields, lay_part, self.ends, laid)

    def _lay(
        self, fields: Fields, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool = False
    ) -> Laid:
        self._owners[:] = [of.message for of in fields.fields]
        self._plain.clear()
        self._plain.update(map(id, tools))
        given = {**self._special_tokens, "messages": list(messages), "tools": list(tools) or None, "documents": None}
        try:
            pieces = list(self._compiled.generate(given, add_generation_prompt=add_generation_prompt))
        except MemoryError:
            raise
        except Exception as error:
            # A template is a program: besides jinja2's errors it can raise any of Python's.
            has_calls = any("tool_calls" in message for message in messages)
            raise BadRowError(
                REFUSED,
                found=printable(
                    f"{type(error).__name__}: {TRACED_NAME.sub(lambda name: (name[1] or 'str').lower(), str(error))}"
                ),
                expected="roles " + ", ".join(message["role"] for message in messages) + " in an order that it takes"
                if not has_calls
                else "turns in an order and tool calls in a form that it takes",
            ) from error
        return lay(pieces, fields.fields)

    def _try_render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str | None:
        fields = Fields(messages)
        for tools in ((), (PROBE_TOOL,)):  # templates for tools alone want some
            with suppress(BadRowError):
                return self._lay(fields, fields.messages, tools, add_generation_prompt=add_generation_prompt).text
        return None

    def _compile(self) -> tuple[Any, bool]:
        """The template in our environment, and whether it has marks around the assistant's words."""
        from jinja2 import TemplateSyntaxError

        base: Any = library_name("transformers.utils.chat_template_utils", "_compile_jinja_template")("")
        environment = traced_environment(base.environment, self._owners, self._plain)
        try:
            return environment.from_string(self.text), environment.has_marks
        except TemplateSyntaxError as error:
            raise RefusedError(
                "the chat template is not valid Jinja",
                where=f"chat_template: line {error.lineno}",
                found=printable(str(error)),
                hint="chat_template: path/to/template.jinja",
            ) from error

    def _probe_ends(self, next_special: re.Pattern[str]) -> TurnEnds:
        """Without a generation prompt, the header of the assistant's turn would count as what the model writes."""
        question: Message = {"role": "user", "content": PLACEHOLDER}
        answer: Message = {"role": "assistant", "content": PLACEHOLDER}
        asked, answered = self._behind_placeholder([question]), self._behind_placeholder([question, answer])
        prompted = self._try_render([question], add_generation_prompt=True)
        end_of_turn, end_of_question = self._first_special(answered), self._first_special(asked)
        again = self._try_render([question, answer, {"role": "user", "content": "x"}]) or ""
        gap = again.rsplit(PLACEHOLDER, 1)[-1]
        has_prompt = prompted is not None and prompted != self._try_render([question])
        prompt = (prompted or "").rpartition(PLACEHOLDER)[2] if has_prompt and PLACEHOLDER in (prompted or "") else None
        header = (asked or "").partition(end_of_question or "\0")[2]
        is_prompt = not has_prompt or header.strip() in (prompt or "")  # and stands behind every text
        alone = (answered or "").rstrip()
        is_prompt = is_prompt and not gap.startswith(alone)
        alone = alone if not is_prompt else alone.removesuffix(header.rstrip())
        run = self._specials_in_front.match(alone) if self._specials_in_front is not None else None
        one = "|".join(map(re.escape, sorted(self._specials_of(run[0] if run else ""), key=len, reverse=True)))
        closes_thought, empty_thought = thought_patterns(*self._thought_marks(asked or "", prompt or ""))
        return TurnEnds(
            self._specials,
            next_special,
            end_of_turn,
            re.compile(rf"(?:{one})(?:\s*(?:{one}))*") if one else None,
            end_of_question,
            next_mark_ends=answered is not None and end_of_turn is None and next_special.match(gap) is not None,
            has_generation_prompt=has_prompt,
            prompt=prompt or None,
            closing=answered if end_of_turn is not None else None,
            always_prompts=is_prompt and bool(header.strip()),
            closes_thought=closes_thought,
            empty_thought=empty_thought,
        )

    def _thought_marks(self, asked: str, prompt: str) -> tuple[str, str]:
        """The marks around thoughts beside contents; empty where they cannot be told.

        An answer with a thought has them, and but for templates that always write them, one without has not.

        Args:
            asked: the rest of the text behind a question.
            prompt: that with the generation prompt.
        """
        texts = []
        for thought in ({"reasoning_content": THOUGHT}, {}):
            answer: Message = {"role": "assistant", "content": PLACEHOLDER, **thought}
            said = self._try_render([{"role": "user", "content": PLACEHOLDER}, answer]) or ""
            texts.append(said.rpartition(PLACEHOLDER)[0].rpartition(PLACEHOLDER)[2])
        opens, _, closes = texts[0].rpartition(THOUGHT)
        without = texts[1].removeprefix(asked)
        shared = PART_OF_MARK.sub("", commonprefix([closes[::-1], without[::-1]])[::-1])
        own = closes.removesuffix(shared)
        return opens.removeprefix(prompt), own if own.strip() else closes

    def _behind_placeholder(self, messages: Sequence[Message]) -> str | None:
        text = self._try_render(messages) or ""
        return text.rsplit(PLACEHOLDER, 1)[1] if PLACEHOLDER in text else None

    def _specials_of(self, run: str) -> list[str]:
        """The special tokens of a text of nothing but them."""
        found = []
        while special := self._first_special(run):
            found.append(special)
            run = run.lstrip()[len(special) :]
        return found

    def _first_special(self, tail: str | None) -> str | None:
        tail = (tail or "").lstrip()
        return next((special for special in reversed(self._specials) if tail.startswith(special)), None)


def _check_tools(messages: Sequence[Message], tools: Tools, text: str) -> None:
    """Refuse tools that the template leaves out, as templates without tools do silently."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for what, entries in (("tools", tools), ("tool calls", calls)):
        for entry in entries:
            name = entry.get("function", entry).get("name")
            if isinstance(name, str) and name not in text:
                found = f"no {printable(name, 40)} in its text"
                raise leaves_out(f"the {what} of this conversation", found, "a template with tools")
