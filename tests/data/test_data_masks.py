"""Which tokens are trained, against a reference that is computed another way: by hand-written text and token bytes.

The reference never renders a template and never asks the tokenizer for offsets. It writes the text of a conversation by
string concatenation, marks the characters that the assistant wrote, and maps them to tokens through the bytes that each
token id stands for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from roundpipe_cli.data.chat import ChatTemplate
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.messages import Conversation
from roundpipe_cli.data.row_chunks import encode_batch
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.model.load import load_tokenizer
from tests.support.e2e import smollm2_source

Turns = list[dict[str, str]]
Marked = list[tuple[str, bool]]
"""Pieces of text, each with whether it is trained."""

# Puts the system prompt into the last user turn, as Mistral's do: no rendering of a prefix is a prefix.
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] + '\n\n' %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- set loop_messages = messages %}"
    "{%- endif %}{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}{{- bos_token }}"
    "{%- for m in loop_messages %}{%- if m['role'] == 'user' %}"
    "{{- '[INST] ' + (system if m == users[-1] else '') + m['content'] + '[/INST]' }}"
    "{%- else %}{{- ' ' + m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
)
WITHOUT_PROMPT = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
)


@pytest.fixture(scope="module")
def smollm() -> Any:
    return load_tokenizer(smollm2_source())


KEPT = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in KEPT}
BYTES |= {chr(256 + index): byte for index, byte in enumerate(sorted({*range(256)} - {*KEPT}))}
"""GPT-2's printable stand-ins for bytes."""


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    token = tokenizer.convert_ids_to_tokens(token_id)
    return token.encode() if token in tokenizer.get_added_vocab() else bytes(BYTES[character] for character in token)


def reference_mask(tokenizer: Any, input_ids: list[int], pieces: Marked) -> list[bool]:
    """A token is trained if one of its bytes is."""
    trained_bytes = np.concatenate([np.full(len(text.encode()), trained) for text, trained in pieces])
    spelt = {token_id: token_bytes(tokenizer, token_id) for token_id in set(input_ids)}
    whole = b"".join(spelt[token_id] for token_id in input_ids)
    assert whole == "".join(text for text, _ in pieces).encode(), "the text itself is not as the reference wrote it"
    mask, position = [], 0
    for token_id in input_ids:
        length = len(spelt[token_id])
        mask.append(bool(trained_bytes[position : position + length].any()))
        position += length
    return mask


def check(tokenizer: Any, template: str, turns: Turns, pieces: Marked) -> None:
    rendered = ChatTemplate(tokenizer, template).render_trained(Conversation(tuple(turns)))
    encoded = encode_batch(tokenizer, [rendered], plain=False)[0]
    assert not isinstance(encoded, BadRowError)
    assert encoded.weights.astype(bool).tolist() == reference_mask(tokenizer, encoded.input_ids.tolist(), pieces)


def smollm_pieces(turns: Turns) -> Marked:
    pieces: Marked = []
    if turns[0]["role"] != "system":
        default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        pieces.append((f"<|im_start|>system\n{default}<|im_end|>\n", False))
    for turn in turns:
        pieces.append((f"<|im_start|>{turn['role']}\n", False))
        pieces.append((turn["content"] + "<|im_end|>", turn["role"] == "assistant"))
        pieces.append(("\n", False))
    return pieces


def say(*contents: str, system: str | None = None) -> Turns:
    """User and assistant in turn."""
    head = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return head + [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


CONTENT = st.text(alphabet=st.sampled_from("ab 1.\n\té日🤖<|>"), max_size=12) | st.sampled_from(["<|im_end|>", "same"])


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CONTENT, min_size=1, max_size=6), st.none() | CONTENT, st.booleans(), st.booleans())
@example(["I begin.", "b", "c"], None, True, False)
@example(["a", "b", "and once more"], None, False, True)
@example(["no question"], "s", True, False)
@example(["code", "    def f():\n        return '<|im_end|>'\n"], "🇩🇪", False, False)
def test_masks_equal_the_reference_for_any_text(
    smollm: Any, contents: list[str], system: str | None, answer_first: bool, answers_last: bool
) -> None:
    """Conversations may begin with an answer, or end with two. Of an empty one at the very beginning not even the end
    is trained: no template renders what comes before."""
    contents[0] = contents[0] or "a" * answer_first
    turns = say("", *contents)[1:] if answer_first else say(*contents)
    turns = [*say(system=system), *turns]
    if answers_last:
        turns.append({"role": "assistant", "content": contents[0]})
    if any(turn["role"] == "assistant" and turn["content"] for turn in turns):  # others are bad rows
        check(smollm, smollm.chat_template, turns, smollm_pieces(turns))


def test_template_that_moves_the_system_prompt(smollm: Any) -> None:
    turns = say("a", "first", "b", "second", system="Rules.")
    pieces = [("<|im_start|>[INST] a[/INST] ", False), ("first<|im_end|>", True)]
    check(smollm, MISTRAL, turns, [*pieces, ("[INST] Rules.\n\nb[/INST] ", False), ("second<|im_end|>", True)])


def test_template_without_generation_prompt_does_not_train_the_header(smollm: Any) -> None:
    turns = say("Hi", "Yo", "And", "So")
    check(smollm, WITHOUT_PROMPT, turns, smollm_pieces([{"role": "system", "content": ""}, *turns])[3:])


def test_template_without_an_end_of_turn_token_is_noticed(smollm: Any, tmp_path: Path) -> None:
    template = "{%- for m in messages %}{{- m.role + ': ' + m.content + '\n' }}{%- endfor %}"
    template += "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "Hi", "completion": "Yo"}))
    dataset = build_dataset(DataSettings((DatasetSpec(str(path)),), 64, chat_template=template), smollm)
    assert any("may not learn to stop" in notice for notice in dataset.notices)
    check(smollm, template, say("Hi", "Yo"), [("user: Hi\nassistant: ", False), ("Yo\n", True)])
