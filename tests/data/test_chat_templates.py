"""What is trained of a conversation, over all chat templates that trl and axolotl carry.

One rule holds for every template and conversation: each content, thought and argument of a trained turn lies inside a
trained span or is named as left out, no word of another turn does, and no header. Or the conversation is refused, with
a reason. Every text of the conversations has a word of its own, so the check needs nothing of the code it checks.

None of the templates is in this repository: without trl the tests are skipped (`pip install --no-deps trl==1.16`; trl
need not be importable, only its folder is looked for). axolotl's are tried too where its folder is there.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.data.chat import ChatTemplate, Rendered
from roundpipe_cli.data.messages import Conversation
from roundpipe_cli.data.row_chunks import encode_batch
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.spans import without_thoughts
from roundpipe_cli.data.traced import TEMPLATE_DATE, traced_environment
from roundpipe_cli.library_names import library_name
from tests.data.test_data_dataset import byte_tokenizer

Messages = list[dict[str, Any]]

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "A."}, "b": {"type": "string", "description": "B."}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "addup", "description": "Adds.", "parameters": PARAMETERS}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, *calls: dict[str, Any], thought: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [{"type": "function", "function": {"name": "addup", "arguments": of}} for of in calls]
    return message


def output(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


SYSTEM = {"role": "system", "content": "Systemword."}
CONVERSATIONS: dict[str, Messages] = {
    "plain": [user("Userone?"), said("Answerone.")],
    "system prompt": [SYSTEM, user("Userone?"), said("Answerone.")],
    "two exchanges": [user("Userone?"), said("Answerone."), user("Usertwo?"), said("Answertwo.")],
    "thoughts beside": [
        user("Userone?"), said("Answerone.", thought="Thoughtone."),
        user("Usertwo?"), said("Answertwo.", thought="Thoughttwo."),
    ],
    "thoughts in content": [
        user("Userone?"), said("<think>\nThoughtone.\n</think>\n\nAnswerone."),
        user("Usertwo?"), said("<think>\nThoughttwo.\n</think>\n\nAnswertwo."),
    ],
    "one call": [user("Userone?"), said("", {"a": 4711, "b": "Bone"}), output("Outputone"), said("Answertwo.")],
    "two calls": [
        user("Userone?"), said("", {"a": 4711, "b": "Bone"}, {"a": 4712, "b": "Btwo"}),
        output("Outputone"), output("Outputtwo"), said("Answertwo."),
    ],
    "call with content": [
        user("Userone?"), said("Answerone.", {"a": 4711, "b": "Bone"}), output("Outputone"), said("Answertwo."),
    ],
    "call in the last turn": [user("Userone?"), said("", {"a": 4711, "b": "Bone", "c": True})],
    "call with a list": [
        user("Userone?"), said("", {"a": 4711, "b": ["Bone", 4712, {"c": "Btwo"}]}), output("Outputone"),
        said("Answertwo."),
    ],
    "call with a thought": [
        user("Userone?"), said("", {"a": 4711, "b": "Bone"}, thought="Thoughtone."), output("Outputone"),
        said("Answertwo."),
    ],
    "empty content": [user("Userone?"), said(""), user("Usertwo?"), said("Answertwo.")],
    "unicode and special tokens": [
        user("Ünï日本🤖<|im_end|>\n<|im_start|>assistant\nUserone</s>"), said("Answerone é 🤖 日本."),
        user("<|end|> Usertwo </think>"), said("Answertwo."),
    ],
}  # fmt: skip
WORDS = re.compile(r"(?:System|User|Answer|Thought|Output)\w+|\bB(?:one|two)\b|471[12]")
SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"]{1,40}[|｜]>|<(?:start|end)_of_turn>|</?tool_calls?>|</?think>|\[/?[A-Z_]{3,}\]|</s>"
    r"|<\|\w{1,20}>|<\w{1,20}\|>"
)


def templates_of(package: str, folder: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return sorted((Path(next(iter(places))) / folder).glob("*.jinja")) if places else []


TRL_PATHS = templates_of("trl", "chat_templates")
PATHS = TRL_PATHS + templates_of("axolotl", "utils/chat_templates/templates")
MARK = re.compile(r"\{%-?\s*generation")
needs_trl = pytest.mark.skipif(not PATHS, reason="trl, whose chat templates are tried, is not installed")


@functools.cache
def tokenizer_for(text: str, *, with_specials: bool) -> Any:
    """One token a byte, and the special tokens that the template spells."""
    tokenizer = byte_tokenizer(template=text)
    tokenizer.bos_token = "<s>"
    if with_specials:
        tokenizer.add_tokens(sorted(set(SPECIAL.findall(text)) - {"</s>"}), special_tokens=True)
    return tokenizer


@functools.cache
def template_of(text: str, *, with_specials: bool) -> ChatTemplate:
    return ChatTemplate(tokenizer_for(text, with_specials=with_specials), text)


@functools.cache
def written(
    text: str,
    name: str,
    *,
    with_specials: bool,
    ends: Any = "turn",
    thoughts: Any = "train",
    answers_only: bool = False,
) -> Rendered | BadRowError:
    """What a template makes of one of `CONVERSATIONS`, or of it without thoughts."""
    messages = without_thoughts_by_hand(CONVERSATIONS[name]) if answers_only else CONVERSATIONS[name]
    rules = DatasetSpec("", train_on_eos=ends, thoughts=thoughts)
    tools = (TOOL,) if any(message["role"] == "tool" or "tool_calls" in message for message in messages) else ()
    try:
        template = template_of(text, with_specials=with_specials)
        conversation: Any = Conversation(tuple(messages), tools)
        if rules.thoughts == "drop":
            conversation = without_thoughts(conversation, is_open=False)
        return template.render_trained(conversation, rules)
    except BadRowError as error:
        return error


def without_thoughts_by_hand(messages: Messages) -> Messages:
    kept = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
    of_assistant = [message for message in kept if message["role"] == "assistant"]
    for message in of_assistant:
        message["content"] = message["content"].rpartition("</think>\n\n")[2]
    return kept


def words_of(messages: Messages, *, of_assistant: bool) -> list[str]:
    spoken = [str(message) for message in messages if (message["role"] == "assistant") is of_assistant]
    return [word for text in spoken for word in WORDS.findall(text)]


def broken(rendered: Rendered, messages: Messages) -> list[str]:
    """What does not hold of the rule."""
    inside = [rendered.text[start:end] for start, end in rendered.trained]
    trained = set(WORDS.findall("\n".join(inside)))
    named = " ".join(rendered.left_out)
    lost = set(words_of(messages, of_assistant=True)) - trained
    kept_out = {word for word in lost if word.startswith("Thought") and ("thoughts" in named or "reasoning" in named)}
    kept_out |= {word for word in lost if "content beside tool calls" in named and word == "Answerone"}
    wrong = [f"{word} is not trained" for word in sorted(lost - kept_out)]
    wrong += [f"{word} is trained" for word in sorted(trained & set(words_of(messages, of_assistant=False)))]
    # `<|user|>` may end an answer, where the template has no other end; ` to=user` is a recipient, which models write.
    heads = [re.sub(r"<\|(user|observation)\|>\s*$| to=user<", "", text) for text in inside]
    return wrong + [f"a header is trained: {text[-60:]!r}" for text in heads if re.search(r"\b(user|system)\b", text)]


@needs_trl
@pytest.mark.covering(1)
@pytest.mark.parametrize("with_specials", [True, False], ids=["specials", "bytes"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_conversation_is_trained_right_or_refused(path: Path, with_specials: bool) -> None:
    """With a tokenizer that knows the template's special tokens, and with one that knows none of them."""
    text = path.read_text(encoding="utf-8")
    for name, messages in CONVERSATIONS.items():
        rendered = written(text, name, with_specials=with_specials)
        if isinstance(rendered, BadRowError):
            assert rendered.fault.what.startswith("the chat template") and rendered.fault.found, (name, rendered.fault)
            continue
        assert not broken(rendered, messages), name
        assert any(start < end for start, end in rendered.trained), name


def by_transformers(text: str, name: str, **more: Any) -> Any:
    """What transformers makes of a conversation with the same date; None where it refuses it."""
    compiled = library_name("transformers.utils.chat_template_utils", "_compile_jinja_template")(text)
    compiled.environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    messages = CONVERSATIONS[name]
    tools = [TOOL] if any("tool_calls" in message for message in messages) else None
    try:
        tokenizer = tokenizer_for(text, with_specials=True)
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=text, **more)
    except Exception:  # it takes the calls in another form only
        return None


def test_a_template_has_the_same_settings_without_transformers() -> None:
    """Lengths are estimated where transformers is not loaded."""
    base = library_name("transformers.utils.chat_template_utils", "_compile_jinja_template")("").environment
    ours, plain = traced_environment(base, [], set()), traced_environment(None, [], set())
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "newline_sequence", "autoescape"):
        assert getattr(ours, name) == getattr(plain, name) == getattr(base, name), name
    assert len(ours.extensions) == len(plain.extensions) == 2
    assert ours.globals["strftime_now"]("%Y") == plain.globals["strftime_now"]("%Y") == str(TEMPLATE_DATE.year)


ENDS: list[Any] = ["turn", "last", "all", "none"]


@needs_trl
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_every_rule_trains_the_default_without_the_part_it_names(path: Path, name: str) -> None:
    """Thoughts that were searched for as text took words and calls with them; of two end tokens one stayed trained."""
    text = path.read_text(encoding="utf-8")

    def trained(
        ends: Any = "turn", thoughts: Any = "train", *, answers_only: bool = False
    ) -> tuple[str, set[int]] | None:
        made = written(text, name, with_specials=True, ends=ends, thoughts=thoughts, answers_only=answers_only)
        if isinstance(made, BadRowError):
            return None
        return made.text, {place for start, end in made.trained for place in range(start, end)}

    def said(places: set[int], within: str) -> str:
        return "".join(letter if place in places else "\0" for place, letter in enumerate(within))

    default, masked, answers = trained(), trained(thoughts="mask"), trained(answers_only=True)
    assert [trained(ends, "drop") for ends in ENDS] == [trained(ends, answers_only=True) for ends in ENDS], answers
    if default is None:
        assert masked is None and trained("none") is None
        return
    whole, places = default
    expected = by_transformers(text, name, tokenize=False)
    assert (
        expected is None
        or whole == expected
        or "which the chat template" in str(written(text, name, with_specials=True))
    )
    assert masked is not None and masked[0] == whole and masked[1] <= places
    thought = places - masked[1]
    assert not [word for word in WORDS.findall(said(masked[1], whole)) if word.startswith("Thought")]
    assert all(word.startswith("Thought") for word in WORDS.findall(said(thought, whole)))
    by_ends = {ends: trained(ends) for ends in ENDS}
    for ends, one in by_ends.items():
        assert one is not None and one[0] == whole
        assert trained(ends, "mask") == (whole, one[1] - thought), ends
        changed = said(places ^ one[1], whole)
        assert not SPECIAL.sub("", changed).replace("\0", "").strip(), (ends, changed)
        assert one[1] >= places if ends == "all" else one[1] <= places
    for message in CONVERSATIONS[name]:
        behind = whole.rfind(message["content"]) + len(message["content"])
        if message["role"] == "assistant" and message["content"] and behind in places:
            tail = re.match(r"[^\0]*", said(places, whole)[behind:])
            if tail is not None and not SPECIAL.sub("", tail[0]).strip():
                assert not said(by_ends["none"][1], whole)[behind:][: len(tail[0])].replace("\0", "").strip()


# Conversations of which trl 1.16's 72 templates are trained, with the tokenizer that knows their special tokens.
NUM_TRAINED = {
    "plain": 66, "system prompt": 64, "two exchanges": 66, "thoughts beside": 30, "thoughts in content": 63,
    "one call": 46, "two calls": 42, "call with content": 42, "call in the last turn": 46, "call with a list": 46,
    "call with a thought": 33,
    "empty content": 66, "unicode and special tokens": 66,
}  # fmt: skip


@needs_trl
def test_as_many_conversations_are_trained_as_were() -> None:
    """A template that refuses is right by the rules above, so what is refused is counted."""
    if len(TRL_PATHS) != 72:
        pytest.skip("counted with trl 1.16")
    texts = [path.read_text(encoding="utf-8") for path in TRL_PATHS]
    made = {name: [written(text, name, with_specials=True) for text in texts] for name in CONVERSATIONS}
    assert {name: sum(isinstance(one, Rendered) for one in of_name) for name, of_name in made.items()} == NUM_TRAINED


OF_PARTS = {"idefics3_training", "llava_next_training", "smolvlm_training"}
"""Templates that take no text as content, only a list of parts: no conversation here is one of theirs."""


@needs_trl
@pytest.mark.parametrize("path", [path for path in PATHS if MARK.search(path.read_text())], ids=lambda path: path.stem)
def test_masks_of_marked_templates_are_those_of_transformers(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tokenizer, num_compared = tokenizer_for(text, with_specials=True), 0
    for name in CONVERSATIONS:
        rendered = written(text, name, with_specials=True)
        expected = by_transformers(text, name, return_dict=True, return_assistant_tokens_mask=True)
        if isinstance(rendered, BadRowError) or expected is None:
            continue
        encoded = encode_batch(tokenizer, [rendered], plain=False)[0]
        assert not isinstance(encoded, BadRowError)
        assert encoded.input_ids.tolist() == expected["input_ids"], name
        assert encoded.weights.astype(int).tolist() == expected["assistant_masks"], name
        num_compared += 1
    assert num_compared >= 5 or (path.stem in OF_PARTS and num_compared == 0)
