"""An Ollama Modelfile with the chat template that was trained.

Ollama writes templates in Go's language, the Hub in Jinja's. What a template puts around each turn is found out by
rendering a conversation of marked texts; the pieces are used only if they reproduce exactly what the template
itself makes of other conversations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundpipe_cli.errors import InternalError, RefusedError
from roundpipe_cli.limited import run_limited
from roundpipe_cli.train.prepare.base_files import TEMPLATE_LIMITS, end_tokens

Messages = list[dict[str, str]]

_MARKS = {"system": "SYSTEMTEXT", "user": "USERTEXT", "assistant": "ASSISTANTTEXT"}


@dataclass(frozen=True)
class TurnMarks:
    """The text that a chat template writes around the messages of a conversation."""

    start: str
    """Text before a conversation without a system message."""
    around: dict[str, tuple[str, str]]
    """Role -> what stands before and after its text."""
    prompt: str
    """Text behind the last turn, where the answer begins."""

    def render(self, messages: Messages) -> str:
        """The conversation as a prompt for the next answer."""
        start = "" if messages[0]["role"] == "system" else self.start
        turns = (self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages)
        return start + "".join(turns) + self.prompt


def find_turns(tokenizer: Any) -> TurnMarks | None:
    """The pieces of the tokenizer's template; None if it does not put a conversation together of such pieces."""

    def find() -> TurnMarks | None:
        turns = _split(tokenizer)
        return turns if all(_agrees(turns, tokenizer, case) for case in _CASES) else None

    if not tokenizer.chat_template:
        return None
    try:
        return run_limited(find, TEMPLATE_LIMITS)
    except (RefusedError, InternalError):  # a template may raise any exception
        return None


def _message(role: str, content: str | None = None) -> dict[str, str]:
    return {"role": role, "content": _MARKS[role] if content is None else content}


_CASES: list[Messages] = [
    [_message("user", "a b")],
    [_message("system", "Be short."), _message("user", "x?")],
    [_message("user", "1"), _message("assistant", "2"), _message("user", "3 {4}"), _message("assistant", "5")]
    + [_message("user", "6")],
    [*(_message(role, f"{role}1") for role in _MARKS), _message("user", "u2"), _message("assistant", "a2")]
    + [_message("user", "u3")],
]


def _render(tokenizer: Any, messages: Messages, prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    adds_bos = tokenizer.bos_token and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return text.removeprefix(tokenizer.bos_token) if adds_bos else text  # Ollama adds it itself


def _agrees(turns: TurnMarks, tokenizer: Any, messages: Messages) -> bool:
    try:
        text = _render(tokenizer, messages, prompt=True)
    except Exception:  # for instance a template that wants no system message
        return messages[0]["role"] == "system" and "system" not in turns.around
    return turns.render([one for one in messages if one["role"] in turns.around]) == text  # one may leave it out


def _split(tokenizer: Any) -> TurnMarks:
    """Pieces that put one conversation together; whether they do so with others is for `_agrees`."""
    user, assistant = _message("user"), _message("assistant")
    question, _, after_user = _render(tokenizer, [user], prompt=False).partition(_MARKS["user"])
    prompt = _render(tokenizer, [user], prompt=True).removeprefix(question + _MARKS["user"] + after_user)
    after_answer = _render(tokenizer, [user, assistant], prompt=False).partition(_MARKS["assistant"])[2]
    again = _render(tokenizer, [user, assistant, user], prompt=False).partition(_MARKS["assistant"])[2]
    before_user = again.partition(_MARKS["user"])[0].removeprefix(after_answer)
    around = {"user": (before_user, after_user), "assistant": (prompt, after_answer)}
    try:
        before, after = _render(tokenizer, [_message("system"), user], prompt=False).split(_MARKS["system"])
        after, _, _ = after.partition(_MARKS["user"])
        if after.endswith(before_user):
            around["system"] = (before, after.removesuffix(before_user))
    except Exception:  # it takes none
        pass
    return TurnMarks(question.removesuffix(before_user), around, prompt)


OLLAMA_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
"""Sampling settings: transformers' name -> Ollama's, where both mean the same."""


def modelfile(
    tokenizer: Any, model: str, generation: Mapping[str, Any] | None = None, adapter: str | None = None
) -> tuple[str, bool]:
    """The text of a Modelfile for the weights at `model`, and whether the template is in it.

    Args:
        generation: content of the model's generation_config.json, for end tokens and sampling.
        adapter: GGUF file of an adapter that is added to the weights.
    """
    lines = [f"FROM {model}", *([f"ADAPTER {adapter}"] if adapter is not None else []), ""]
    turns = find_turns(tokenizer)
    if turns is None:
        lines += [
            "# The chat template cannot be written in Ollama's language: the one in the weights' file is used.",
            "",
        ]
    else:
        lines += [f'TEMPLATE """{_go_template(turns)}"""', ""]
    generation = generation or {}
    turn_end = turns.around["assistant"][1].strip() if turns is not None else ""
    ends = [turn_end or tokenizer.eos_token]
    ends += [tokenizer.convert_ids_to_tokens(token) for token in end_tokens(generation)]
    lines += [f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}" for end in dict.fromkeys(ends) if end]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(generation).items()]
    return "\n".join([*lines, ""]), turns is not None


def _sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """Ollama's sampling settings, as far as the model's own say something; otherwise Ollama has its own defaults."""
    asked = {name: generation.get(key) for key, name in OLLAMA_NAMES.items()}
    found = {name: v for name, v in asked.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    if generation.get("do_sample") is False:  # the most probable token, whatever the other settings are
        found = {name: value for name, value in found.items() if name == "repeat_penalty"} | {"temperature": 0}
    return found


def _go_template(turns: TurnMarks) -> str:
    branches, word = "", "if"
    for role, (before, after) in turns.around.items():
        branches += f'{{{{ {word} eq .Role "{role}" }}}}{_go(before)}{{{{ .Content }}}}{_go(after)}'
        word = "else if"
    start = _go(turns.start)
    if start and "system" in turns.around:
        start = f"{{{{ if not .System }}}}{start}{{{{ end }}}}"
    return f"{start}{{{{ range .Messages }}}}{branches}{{{{ end }}}}{{{{ end }}}}{_go(turns.prompt)}"


def _go(text: str) -> str:
    """Plain text in a Go template within a Modelfile's triple quotes."""
    return text if "{{" not in text and '"""' not in text else f"{{{{ {json.dumps(text)} }}}}"
