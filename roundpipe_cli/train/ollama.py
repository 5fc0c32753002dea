"""An Ollama Modelfile with the chat template that was trained.

Ollama writes templates in Go's language, the Hub in Jinja's. What a template puts around each turn is found out by
rendering a conversation of marked texts; the pieces are used only if they give back, to the letter, what the template
itself makes of other conversations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, str]]

_MARKS = {"system": "SYSTEMTEXT", "user": "USERTEXT", "assistant": "ASSISTANTTEXT"}


@dataclass(frozen=True)
class Turns:
    """What a chat template writes around the texts of a conversation."""

    start: str
    """Before a conversation without a system message."""
    around: dict[str, tuple[str, str]]
    """Role -> what stands before and after its text."""
    prompt: str
    """After the last turn, where the answer begins."""

    def render(self, messages: Messages) -> str:
        """The conversation as a prompt for the next answer."""
        start = "" if messages[0]["role"] == "system" else self.start
        turns = (self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages)
        return start + "".join(turns) + self.prompt


def find_turns(tokenizer: Any) -> Turns | None:
    """The pieces of the tokenizer's template; None if it does not put a conversation together of such pieces."""
    if not tokenizer.chat_template:
        return None
    try:
        turns = _split(tokenizer)
    except Exception:  # a template may raise whatever it likes
        return None
    return turns if turns is not None and all(_agrees(turns, tokenizer, case) for case in _CASES) else None


def _message(role: str, content: str | None = None) -> dict[str, str]:
    return {"role": role, "content": _MARKS[role] if content is None else content}


_CASES: list[Messages] = [
    [_message("user", "a b")],
    [_message("system", "Be short."), _message("user", "x?")],
    [_message("user", "1"), _message("assistant", "2"), _message("user", "3 {4}")],
    [*(_message(role, f"{role}1") for role in _MARKS), _message("user", "u2"), _message("assistant", "a2")]
    + [_message("user", "u3")],
]


def _render(tokenizer: Any, messages: Messages, prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    adds_bos = tokenizer.bos_token and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return text.removeprefix(tokenizer.bos_token) if adds_bos else text  # Ollama puts it there itself


def _agrees(turns: Turns, tokenizer: Any, messages: Messages) -> bool:
    try:
        return turns.render(messages) == _render(tokenizer, messages, prompt=True)
    except Exception:  # for instance a template that wants no system message
        return messages[0]["role"] == "system" and "system" not in turns.around


def _split(tokenizer: Any) -> Turns | None:
    user, assistant = _message("user"), _message("assistant")
    whole = _render(tokenizer, [user, assistant, user, assistant, user], prompt=False)
    parts = whole.split(_MARKS["user"])
    if len(parts) != 4:
        return None
    first, middle, again, last = parts
    if middle != again or middle.count(_MARKS["assistant"]) != 1 or not last:
        return None
    after_user_before_answer, after_answer_before_user = middle.split(_MARKS["assistant"])
    prompt = _render(tokenizer, [user], prompt=True).removeprefix(_render(tokenizer, [user], prompt=False))
    if not after_user_before_answer.startswith(last) or after_user_before_answer[len(last) :] != prompt:
        return None
    after_answer = _render(tokenizer, [user, assistant], prompt=False).partition(_MARKS["assistant"])[2]
    before_user = after_answer_before_user.removeprefix(after_answer)
    if not after_answer_before_user.startswith(after_answer) or not first.endswith(before_user):
        return None
    around = {"user": (before_user, last), "assistant": (prompt, after_answer)}
    try:
        with_system = _render(tokenizer, [_message("system"), user], prompt=False).split(_MARKS["system"])
        after, _, _ = with_system[1].partition(_MARKS["user"])
        if after.endswith(before_user):
            around["system"] = (with_system[0], after.removesuffix(before_user))
    except Exception:  # it takes none
        pass
    return Turns(first.removesuffix(before_user), around, prompt)


def modelfile(tokenizer: Any, model: str) -> tuple[str, bool]:
    """The text of a Modelfile for the weights at `model`, and whether the template is in it."""
    lines = [f"FROM {model}", ""]
    turns = find_turns(tokenizer)
    if turns is None:
        lines += [
            "# The chat template cannot be written in Ollama's language: the one in the weights' file is used.",
            "",
        ]
        return "\n".join(lines), False
    lines += [f'TEMPLATE """{_go_template(turns)}"""', ""]
    stop = turns.around["assistant"][1].strip() or tokenizer.eos_token
    lines += [f"PARAMETER stop {json.dumps(stop)}", ""]
    return "\n".join(lines), True


def _go_template(turns: Turns) -> str:
    branches, word = "", "if"
    for role, (before, after) in turns.around.items():
        branches += f'{{{{ {word} eq .Role "{role}" }}}}{_go(before)}{{{{ .Content }}}}{_go(after)}'
        word = "else if"
    start = f"{{{{ if not .System }}}}{_go(turns.start)}{{{{ end }}}}" if turns.start else ""
    return f"{start}{{{{ range .Messages }}}}{branches}{{{{ end }}}}{{{{ end }}}}{_go(turns.prompt)}"


def _go(text: str) -> str:
    """Plain text in a Go template within a Modelfile's triple quotes."""
    return text if "{{" not in text and '"""' not in text else f"{{{{ {json.dumps(text)} }}}}"
