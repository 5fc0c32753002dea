"""Chat templates: from messages to text, and which characters of that text are trained.

Trained are the turns of the assistant: what the model itself writes behind the generation prompt, up to and including
the token that ends the turn. Most templates carry no marks that say where that is, so it is found by rendering

    |<-- render(messages[:i], generation prompt) -->|<-- trained -->|
    |<-- render(messages[:i + 1]) --------------------------------->|
    |<-- render(messages) --------------------------------------------------------- ...

and each of the three must begin with the one above. Where that fails (templates that rewrite earlier turns once more
follow, or that move the system prompt about) the turn is rendered again with a placeholder in place of its content,
and what stands at that place in the real text is compared with the content. What neither way can tell is refused.

Templates are programs from elsewhere: they run in transformers' ImmutableSandboxedEnvironment, are at most 64 KiB, and
`processes.py` runs them in a child process under limits of time and memory. `strftime_now` tells them a fixed date, so
that rows do not change from one day to the next.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roundpipe_cli.data.messages import Conversation, Exchange, Message
from roundpipe_cli.data.rows import BadRowError, printable
from roundpipe_cli.data.settings import TrainRules
from roundpipe_cli.data.spans import TokenSpan, behind_thoughts, turns_to_train, with_ends
from roundpipe_cli.data.tools import END_OF_THOUGHT
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.library_names import library_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLACEHOLDER = "Placeholder0"
"""Words with which a template is tried."""

TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
"""The date that templates get, which is the default of Llama 3's."""

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, in the form that a chat template gets."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text for the tokenizer."""

    text: str
    trained: tuple[TokenSpan, ...]
    """Characters of `text` that are trained, in order."""
    left_out: tuple[str, ...] = ()
    """Parts of messages that the chat template does not write, by name."""
    is_plain: bool = False
    """Text without a template: the tokenizer adds its own special tokens (BOS), and EOS is appended."""
    trains_eos: bool = True
    """Whether an EOS that is appended to a trained text is trained."""


class ChatTemplate:
    """A template bound to the tokenizer whose special tokens it may name."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """
        Raises:
            RefusedError: `text` is not valid Jinja.
        """
        self.text = text
        self._tokenizer = tokenizer
        self._specials = tuple(sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=len))
        controls = sorted(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._control_tokens = re.compile("|".join(map(re.escape, controls))) if controls else None
        self._kept_kinds: set[str] = set()
        """Kinds of turns, other than answers, that the template is known to write."""
        self._has_marks = GENERATION_MARK.search(text) is not None
        self.writes_date = "strftime_now" in text
        self._check_syntax()
        self._has_generation_prompt = self._probe_generation_prompt()
        self.end_of_turn = self._probe_end_of_turn()
        """The special token behind every turn of the assistant, as text; None where the template writes none."""

    def render(self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = False) -> str:
        """
        Raises:
            BadRowError: the template raised, or did what the sandbox forbids.
        """
        try:
            text: Any = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=self.text,
            )
        except MemoryError:
            raise
        except Exception as error:
            # A template is a program: besides jinja2's errors it can raise any of Python's.
            raise BadRowError(
                "the chat template refuses this conversation",
                found=printable(f"{type(error).__name__}: {error}"),
                expected="roles " + ", ".join(message["role"] for message in messages) + " in an order that it takes",
            ) from error
        return str(text)

    def render_trained(
        self,
        conversation: Conversation | Exchange,
        rules: TrainRules = TrainRules(),  # noqa: B008 - it is frozen
    ) -> Rendered:
        """The text of a conversation and the spans of the turns that `rules` train.

        Raises:
            BadRowError: the template refuses the conversation, leaves tools or thoughts out, or the turns cannot be
                told apart in its text.
        """
        messages, tools = conversation.messages, conversation.tools
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        turns = turns_to_train(conversation, rules)
        if self._has_marks and "assistant" in rules.roles_to_train:
            text, marked = self._render_marked(messages, tools)
            spans = self._spans_of_marks(text, marked, conversation, answers, turns)
        else:
            text = self.render(messages, tools)
            spans = {index: self._turn_span(messages, tools, index, text) for index in turns if index in answers}
        left_out = self._check_kept(conversation, text)
        for index in turns:
            if index not in answers:
                spans[index] = self._other_span(messages, tools, index, text)
        if rules.thoughts == "mask":
            spans = {index: behind_thoughts(text, span, messages[index]) for index, span in spans.items()}
        trained = with_ends(text, [spans[index] for index in sorted(spans)], self.end_of_turn, rules.train_on_eos)
        return Rendered(text, tuple(trained), left_out)

    def _spans_of_marks(
        self,
        text: str,
        marked: Sequence[TokenSpan],
        conversation: Conversation | Exchange,
        answers: Sequence[int],
        turns: Sequence[int],
    ) -> dict[int, TokenSpan]:
        """The marked answers that are trained, by their turns.

        Raises:
            BadRowError: some are not trained, and the marks are not one for each answer.
        """
        spans = [self._to_end_of_turn(text, span) for span in marked]
        wanted = [index for index in turns if index in answers]
        if len(spans) == len(answers):
            return {index: span for index, span in zip(answers, spans, strict=True) if index in wanted}
        if len(wanted) != len(answers):
            raise BadRowError(
                "cannot tell which turns of the assistant the row says not to train",
                found=f"{len(answers)} turns, {len(spans)} marked by the chat template",
            )
        return dict(enumerate(spans))

    def render_all_trained(self, conversation: Conversation | Exchange) -> Rendered:
        """The text of a conversation, all of it trained.

        Raises:
            BadRowError: the template refuses the conversation, or leaves tools or thoughts out.
        """
        text = self.render(conversation.messages, conversation.tools)
        return Rendered(text, ((0, len(text)),), self._check_kept(conversation, text))

    def holds_control_token(self, messages: Sequence[Message]) -> bool:
        """Whether a message spells a special token, which the tokenizer cannot tell from a real one."""
        pattern = self._control_tokens
        return pattern is not None and any(pattern.search(message["content"]) for message in messages)

    def _check_kept(self, conversation: Conversation | Exchange, text: str) -> tuple[str, ...]:
        """Parts of the messages that are not in their text: names of speakers, and earlier thoughts where the template
        keeps those behind the last question only.

        Raises:
            BadRowError: tools, or thoughts that are to be learnt, are not in it.
        """
        _check_tools(conversation, text)
        if isinstance(conversation, Exchange):
            return ()
        self._check_turns(conversation, text)
        messages, left_out = conversation.messages, []
        last_question = max((index for index, item in enumerate(messages) if item["role"] == "user"), default=-1)
        for index, message in enumerate(messages):
            if message.get("name", "") not in text:
                left_out.append("name of messages (not in the chat template)")
            if message.get("reasoning_content", "").strip() in text:
                continue
            if index > last_question or not self._keeps_thoughts:
                raise BadRowError(
                    "the chat template leaves the assistant's thoughts out",
                    found=f"no `reasoning_content` of turn {index + 1} in its text",
                    expected="a template with `reasoning_content`",
                    hint="`chat_template: FILE`, or write the thoughts into `content` as the model does",
                )
            left_out.append("reasoning_content of earlier turns (not kept by the chat template)")
        return tuple(dict.fromkeys(left_out))

    def _check_turns(self, conversation: Conversation, text: str) -> None:
        """Refuse turns that the template leaves out: it writes only the kinds of turns that it knows.

        Words can stand in the text for another reason, so the first turn of each kind is tried with words of its own.

        Raises:
            BadRowError: a turn that is no answer, or a call of a tool, is not in `text`.
        """
        for index, message in enumerate(conversation.messages):
            role, calls = message["role"], message.get("tool_calls", ())
            if role == "assistant" and not calls:
                continue
            kind = "tool calls" if calls else role
            words = [call["function"]["name"] for call in calls] or [message["content"].strip()]
            if not any(words) or (kind in self._kept_kinds and all(word in text for word in words)):
                continue
            named = [{**call, "function": {**call["function"], "name": PLACEHOLDER}} for call in calls]
            changed = {**message, "tool_calls": named} if calls else {**message, "content": PLACEHOLDER}
            messages = [*conversation.messages]
            messages[index] = changed
            if PLACEHOLDER not in (self._try_render(messages, conversation.tools) or PLACEHOLDER):
                raise BadRowError(
                    f"the chat template leaves {'the tool calls' if calls else f'a turn of the role {role}'} out",
                    found=f"nothing of turn {index + 1} in its text",
                    expected=f"a template that writes {'calls of tools' if calls else 'such turns'}",
                    hint="`chat_template: FILE`",
                )
            self._kept_kinds.add(kind)

    @cached_property
    def _keeps_thoughts(self) -> bool:
        thought = PLACEHOLDER
        answer: Message = {"role": "assistant", "content": "x", "reasoning_content": thought}
        return thought in (self._try_render([{"role": "user", "content": "x"}, answer]) or "")

    def _turn_span(self, messages: Sequence[Message], tools: Tools, index: int, text: str) -> TokenSpan:
        span = self._span_by_prefix(messages, tools, index, text)
        span = span or self._span_by_placeholder(messages, tools, index, text)
        if span is None:
            raise BadRowError(
                "cannot tell what the assistant said in the text that the chat template makes",
                found=f"turn {index + 1} of {len(messages)} is rewritten by the template",
                expected="a template that keeps the assistant's words, or has {% generation %} marks around them",
            )
        return span

    def _other_span(self, messages: Sequence[Message], tools: Tools, index: int, text: str) -> TokenSpan:
        """The span of a turn that is not the assistant's, with its end of turn.

        Raises:
            BadRowError: it is not to be found in the text.
        """
        span = self._span_by_placeholder(messages, tools, index, text)
        if span is None:
            role = messages[index]["role"]
            raise BadRowError(
                f"cannot tell what the {role} said in the text that the chat template makes",
                found=f"turn {index + 1} of {len(messages)} is rewritten by the template",
                expected=f"a template that keeps the words of the {role}, or `roles_to_train` without it",
            )
        return span

    def _span_by_prefix(self, messages: Sequence[Message], tools: Tools, index: int, text: str) -> TokenSpan | None:
        if not self._has_generation_prompt:
            return None
        before = self._try_render(messages[:index], tools, add_generation_prompt=True)
        through = text if index == len(messages) - 1 else self._try_render(messages[: index + 1], tools)
        if before is None or through is None or not text.startswith(through) or not through.startswith(before):
            return None
        answer = messages[index]["content"].rsplit(END_OF_THOUGHT, 1)[-1]  # thoughts may be laid out anew
        if answer.strip() not in through[len(before) :]:
            return None
        trimmed = through.rstrip()
        ends_in_special = len(trimmed) > len(before) and trimmed.endswith(self._specials)
        return len(before), len(trimmed) if ends_in_special else len(through)

    def _span_by_placeholder(
        self, messages: Sequence[Message], tools: Tools, index: int, text: str
    ) -> TokenSpan | None:
        placeholder = PLACEHOLDER
        while placeholder in text:
            placeholder += "0"
        replaced = [*messages]
        replaced[index] = {**messages[index], "content": placeholder}
        around = (self._try_render(replaced, tools) or "").split(placeholder)
        if len(around) != 2 or len(text) < len(around[0]) + len(around[1]):
            return None
        if not text.startswith(around[0]) or not text.endswith(around[1]):
            return None
        start, end = len(around[0]), len(text) - len(around[1])
        said, content = text[start:end].strip(), messages[index]["content"].strip()
        # A template may trim the content, or drop the thoughts in front of it; what is left is the content's end.
        if bool(said) != bool(content) or not content.endswith(said):
            return None
        if "tool_calls" in messages[index]:  # they stand behind the content
            found = text.find(self.end_of_turn, end) if self.end_of_turn is not None else -1
            return (start, found + len(self.end_of_turn or "")) if found >= 0 else None
        return self._to_end_of_turn(text, (start, end))

    def _to_end_of_turn(self, text: str, span: TokenSpan) -> TokenSpan:
        """`span` lengthened over the end-of-turn token, if that comes next."""
        start, end = span
        if self.end_of_turn is not None:
            rest = text[end : end + len(self.end_of_turn) + 16]
            token_start = len(rest) - len(rest.lstrip())
            if rest.startswith(self.end_of_turn, token_start):
                end += token_start + len(self.end_of_turn)
        return start, end

    def _render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[TokenSpan]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self.text,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise BadRowError(
                "the chat template refuses this conversation", found=printable(f"{type(error).__name__}: {error}")
            ) from error
        texts, spans = rendered
        return str(texts[0]), [(int(start), int(end)) for start, end in spans[0]]

    def _try_render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = False
    ) -> str | None:
        if not messages and add_generation_prompt:
            return None  # transformers takes no empty conversation
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except BadRowError:
            return None

    def _check_syntax(self) -> None:
        from jinja2 import TemplateSyntaxError

        if self.writes_date:
            with contextlib.suppress(TemplateSyntaxError):
                # transformers keeps compiled templates; this is the one that it will render.
                compile_template = library_name("transformers.utils.chat_template_utils", "_compile_jinja_template")
                compiled: Any = compile_template(self.text)
                compiled.environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
        try:
            self.render([{"role": "user", "content": "x"}])
        except BadRowError as error:
            cause = error.__cause__
            if isinstance(cause, TemplateSyntaxError):
                raise RefusedError(
                    "the chat template is not valid Jinja",
                    where=f"chat_template: line {cause.lineno}",
                    found=printable(str(cause)),
                    hint="chat_template: path/to/template.jinja",
                ) from error

    def _probe_generation_prompt(self) -> bool:
        """Without one, the header of the assistant's turn would count as what the model writes."""
        question: list[Message] = [{"role": "user", "content": "x"}]
        with_prompt = self._try_render(question, add_generation_prompt=True)
        return with_prompt is not None and with_prompt != self._try_render(question)

    def _probe_end_of_turn(self) -> str | None:
        answer = PLACEHOLDER
        text = self._try_render([{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}])
        if text is None or answer not in text:
            return None
        tail = text.rsplit(answer, 1)[1].lstrip()
        return next((special for special in reversed(self._specials) if special and tail.startswith(special)), None)


def _check_tools(conversation: Conversation | Exchange, text: str) -> None:
    """Refuse tools that the template leaves out, as templates without tools do silently.

    Raises:
        BadRowError: a tool or a call of one is not in `text`.
    """
    calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
    for what, entries in (("tools", conversation.tools), ("tool calls", calls)):
        for entry in entries:
            name = entry.get("function", entry).get("name")
            if isinstance(name, str) and name not in text:
                raise BadRowError(
                    f"the chat template leaves the {what} of this conversation out",
                    found=f"no {printable(name, 40)} in its text",
                    expected="a template with tools, given as `chat_template: FILE`",
                )
