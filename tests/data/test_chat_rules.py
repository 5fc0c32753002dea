"""Which characters of a turn its rules leave untrained, in templates whose pieces stand in unusual places.

Templates are written here; trained parts are between [[ and ]].
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.data.chat import ChatTemplate
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.messages import CALL_FORM_NOTES, Conversation, read_turns
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.data.templates import find_template
from roundpipe_cli.errors import RefusedError
from tests.data.test_chat_templates import TOOL, output, said, user
from tests.data.test_chat_turns import ASKED, DONE, DROPS, GEMMA4, GPT_OSS, LOOP, PROMPT, QWEN3, refused, shown
from tests.data.test_data_dataset import CHATML, byte_tokenizer, write_rows
from tests.data.test_data_rules import CALLS, THOUGHTS_BESIDE, read

BEFORE = "<|u|>Q?<|e|><|a|>"
PLAIN = LOOP + "{{- '<|a|>' + m.content + '<|e|>' }}{%- endif %}{%- endfor %}" + PROMPT


@pytest.mark.covering(1)
@pytest.mark.parametrize("thoughts", ["mask", "drop"])
@pytest.mark.parametrize("answer", [
    "Let me look. <think>hm</think> It is four.", "End the block with </think> and answer.",
    "Begin with <think> and go on.", "<think>hm</think>End it with </think>.",
])  # fmt: skip
def test_marks_that_may_be_words_are_refused(tmp_path: Path, thoughts: str, answer: str) -> None:
    rows: list[dict[str, Any]] = [{"messages": [ASKED, said(answer)]}, {"prompt": "Q?", "completion": answer}]
    for row, template in [(rows[0], CHATML), (rows[1], None)]:
        with pytest.raises(RefusedError, match="from its words|never ends"):
            read(tmp_path / "x.jsonl", [row], template=template, thoughts=thoughts)
    turn = [{"role": "user", "content": answer}, {"role": "assistant", "content": "<think>hm</think>Yes."}]
    assert "[[Yes.</s>]]" in read(tmp_path / "x.jsonl", [{"messages": turn}], thoughts=thoughts)[1]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (GEMMA4, [ASKED, said("<think>hm</think>So.", {"a": 1}), output("3"), DONE],
         "[[<|c|>addup{a:1,}<c|>]]<|r|>addup=3<r|><think>hm</think>[[So.]][[Three.<|e|>]]"),
        (GPT_OSS, [ASKED, said("12", thought="Hm.")], "<|h|>final<|m|>12<|x|>"),
        (GPT_OSS.replace("{%- else %}{{- '<|s|>assistant<|h|>final", "{%- else %}{{- '<|s|>assistant<|h|>analysis<|m|>'"
         " + m.thinking + '<|e|>' if m.thinking }}{{- '<|s|>assistant<|h|>final"), [ASKED, said("12", thought="Hm.")],
         "<|h|>analysis<|m|>Hm.<|e|>[[<|s|>assistant<|h|>final<|m|>12<|x|>]]"),
        (QWEN3, [ASKED, said("12", {"a": 1}, thought="Hm.")],
         '<think>\nHm.\n</think>\n\n[[12\n<call>addup{"a": 1}</call><|e|>]]'),
        (QWEN3, [ASKED, said("12")], "<think>\n\n</think>\n\n[[12<|e|>]]"),
        (QWEN3, [ASKED, said("", thought="Hm.")], "<think>\nHm.\n</think>\n\n[[<|e|>]]"),
        (PLAIN.replace("+ m.content + '<|e|>'", "+ m.content + '<think>' ~ m.reasoning_content ~ '</think> <|e|>'"),
         [ASKED, said("12", thought="Hm.")], "[[12]]<think>Hm.</think> [[<|e|>]]"),
    ],
)  # fmt: skip
def test_a_masked_thought_has_its_marks(template: str, messages: list[dict[str, Any]], expected: str) -> None:
    """A call before the content was not trained, and the mark that ends a thought of its own name was."""
    if expected.startswith("<|h|>final"):
        assert "leaves the assistant's thoughts out" in refused(template, messages, thoughts="mask")
        return
    assert expected in shown(template, messages, thoughts="mask")


def test_marks_of_thoughts_are_known_by_the_template() -> None:
    """Around nothing they stayed trained unless they were `<think>`; behind a thought, unless like an end."""
    marks = ("[THINK]", "[/THINK]"), ("<|h|>thought\n", "<h|>"), ("<think>\n", "\n</think>\n\n"), ("<|h|>", "<|x|>")
    for opens, closes in marks:
        end = "<|e|>\n</s>"
        template = (
            "{%- for m in messages %}{{- '<|u|>' ~ m.content ~ E if m.role == 'user' else '<|a|>' }}"
            "{%- if m.role != 'user' %}{{- OPENS ~ (m.reasoning_content or '') ~ CLOSES ~ m.content ~ E }}{%- endif %}"
            "{%- endfor %}" + PROMPT
        )
        for name, text in (("OPENS", opens), ("CLOSES", closes), ("E", end)):
            template = re.sub(rf"\b{name}\b", lambda _, text=text: json.dumps(text), template)  # type: ignore[misc]
        asked = f"<|u|>Q?{end}<|a|>"
        for content in ("So.", ""):
            for thought in ("", "Hm."):
                answer, block = said(content, thought=thought), opens + thought + closes
                assert shown(template, [ASKED, answer]) == f"{asked}[[{block}{content}{end}]]"
                assert shown(template, [ASKED, answer], train_on_eos="none") == f"{asked}[[{block}{content}]]{end}"
                assert shown(template, [ASKED, answer], thoughts="mask") == f"{asked}{block}[[{content}{end}]]"


def test_a_thought_and_its_answer_in_one_json_text_are_refused() -> None:
    template = PLAIN.replace("m.content + '<|e|>' }}{%- endif", "(m | tojson) + '<|e|>' }}{%- endif")
    assert "cannot tell the assistant's thoughts" in refused(
        template, [ASKED, said("12", thought="Hm.")], thoughts="mask"
    )
    assert "both in one text in turn 2" in refused(template, [ASKED, said("<think>Hm.</think>12")], thoughts="mask")


OPENS = PLAIN.replace("'<|a|>' }}{%- endif %}", "'<|a|><think>\\n' }}{%- endif %}")


def test_the_mark_that_a_prompt_gives_is_not_trained(tmp_path: Path) -> None:
    for more in ([], [ASKED, said("x")]):
        messages = [ASKED, said("<think>\nhm</think>12"), *more]
        assert shown(OPENS, messages).startswith(BEFORE + "<think>\n[[hm</think>12<|e|>]]")
    assert shown(OPENS, [ASKED, said("<think>hm</think>12")]) == BEFORE + "<think>[[hm</think>12<|e|>]]"
    opened = OPENS.replace("'<|a|>' + m.content", "'<|a|><think>\\n' + m.content")
    assert shown(opened, [ASKED, said("hm</think>12")], thoughts="mask") == BEFORE + "<think>\nhm</think>[[12<|e|>]]"
    row = {"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "hm</think>12"}]}
    template = CHATML.replace("<s>assistant\n", "<s>assistant\n<think>\n")
    assert "[[12</s>]]" in read(tmp_path / "x.jsonl", [row], template=template, thoughts="drop")[1]
    plain = {"prompt": "Q? <think>\n", "completion": "hm</think>12"}
    assert read(tmp_path / "x.jsonl", [plain], template=None, thoughts="mask")[1] == "Q? <think>\nhm</think>[[12</s>]]"


# Jinja's environment: each of its ways, in a loop, writes what transformers writes.

WAYS = [
    "''.join(['<', x, '>'])", "'a-b'.replace('-', x)", "x.join(['a', 'b'])", "'{}'.format(x)", "'{a}'.format(a=x)",
    "'%s' % x", "'%s %s' % (x, 'b')", "'%s' | format(x)", "'a b'.split() | join(x)", "[x, 'c'] | join",
    "[{'k': x}] | join(', ', attribute='k')", "[{'k': x}] | map(attribute='k') | join", "x | trim | upper",
    "x.strip().title()", "x | replace('a', 'b')", "'a' | replace('a', x)", "x | indent(2)", "x | first", "x | last",
    "x | list | join('.')", "x | reverse", "x | length", "x | default('d')", "x | string", "x | safe", "x | e",
    "x | capitalize", "x | title", "x | lower", "x | truncate(5)", "x | wordwrap(4)", "x | center(30)", "x[1:]",
    "x[::-1]",
    "x.startswith('a')", "x.find('b')", "x.count('a')", "x.zfill(9)", "x.ljust(9)",
    "x.encode('utf-8') | length",
    "x.partition(' ')[2]", "x.rpartition(' ')[0]", "x.splitlines() | join('|')", "x.removeprefix('a')", "x * 2",
    "x | tojson", "[x, 1] | tojson", "[x, 1]", "{'k': x}", "[x, 1] | string", "(x, 1)", "x in 'abc'", "x ~ 1 ~ none",
    "'%d' % 3", "'%5.1f' % 3.0", "x.isupper()", "x.swapcase()", "x.casefold()", "x.expandtabs()", "x | striptags",
    "x | wordcount", "x | batch(3) | list | length", "x | unique | join", "x | sort | join",
    "x | min", "x | select | join", "(x | safe) + x", "x + (x | safe)", "(x | safe) + '&lt;'", "'<' + (x | safe)",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_a_template_writes_what_transformers_writes(way: str) -> None:
    """`.join()` and `.replace()` of plain text in a loop, and `join` by attribute, were errors."""
    template = (
        "{%- macro told(x) %}{{- WAY }}{%- endmacro %}{%- for m in messages %}{%- for t in ['a'] %}"
        "{%- set x = m.content %}"
        "{{- x }}{{- '<' ~ (WAY) ~ '>' }}{%- set y %}{{- WAY }}{%- endset %}{{- y | trim }}{{- told(x) }}"
        "{%- endfor %}{%- endfor %}"
    ).replace("WAY", way)
    tokenizer = byte_tokenizer(template=template)
    messages = [user("abra cad\nabra é <b>"), said("ab 'quoted' \"x\" a")]
    made = ChatTemplate(tokenizer, template).render_trained(Conversation(tuple(messages)), None)
    assert made.text == tokenizer.apply_chat_template(messages, tokenize=False)


def test_marks_of_captured_text_outlive_its_changes() -> None:
    marked = (
        LOOP + "{{- '<|a|>' }}{%- set x %}{% generation %}{{- ' ' ~ m.content ~ '<|e|>' }}{% endgeneration %}"
        "{%- endset %}{{- x WAY }}{%- endif %}{%- endfor %}"
    )
    for way in ("| trim", "", ".lstrip()", "[1:]", ".replace('zz', 'y')", "| list | join"):
        assert shown(marked.replace("WAY", way), [ASKED, DONE]).replace("]][[", "").endswith("Three.<|e|>]]"), way
    assert "cannot tell" in refused(marked.replace("WAY", "| upper"), [ASKED, DONE])


# Arguments of calls.

VALUES: list[Any] = [
    *(["CET", "UTC"], [], [1, 2.5, None, True], {"a": ["b"], "c": {"d": 1}}, [{"é": "q\"uo'te\n"}], 3, "x")
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "way",
    ["'v=' ~ a.v", "'v=%s' % a.v", "'v={}'.format(a.v)", "'v=' ~ (a.v | string)", "'v=%s' | format(a.v)", "a",
     "a | string", "c.function", "c"],
)  # fmt: skip
def test_a_list_in_arguments_is_written_as_transformers_writes_it(value: object, way: str) -> None:
    template = CALLS.replace(
        "{{- c.function.name + c.function.arguments | tojson }}",
        "{%- set a = c.function.arguments %}{{- c.function.name ~ ' ' }}{{- " + way + " }}",
    )
    tokenizer, messages = byte_tokenizer(template=template), [ASKED, said("", {"v": value}), output("3"), DONE]
    made = ChatTemplate(tokenizer, template).render_trained(Conversation(tuple(messages), (TOOL,)))
    assert made.text == tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    trained = "".join(made.text[start:end] for start, end in made.trained)
    assert str(value) in trained and not made.left_out


def test_one_syntax_of_calls_is_trained() -> None:
    """Arguments whose text cannot be followed were given as JSON, beside those of other rows."""
    given = (
        "{%- set a = c.function.arguments %}{{- a if a is string else 'v=' ~ (a.v if a.v is string else a.v | first) }}"
    )
    syntax = CALLS.replace("{{- c.function.name + c.function.arguments | tojson }}", "{{- c.function.name }}" + given)
    assert "[[addupv=x</s>]]" in shown(syntax, [ASKED, said("", {"v": ["x"]}), output("3"), DONE])
    assert "leaves arguments of a tool call out" in refused(
        syntax, [ASKED, said("", {"v": ["x", "y"]}), output("3"), DONE]
    )
    joins = CALLS.replace("c.function.arguments | tojson", "c.function.arguments")
    told = refused(joins.replace("m.content", "m.content + m.nothing"), [ASKED, said("", {"a": 1}), output("3"), DONE])
    assert "tool calls in a form that it takes" in told
    for arguments in ({}, {"v": 1}, {"v": ["x"]}):
        text = shown(joins, [ASKED, said("", arguments), output("3"), DONE])
        assert f"[[addup{json.dumps(arguments)}</s>]]" in text and text.endswith(f"({CALL_FORM_NOTES['text']})")


# Ends of turns.

TWO_ENDS = PLAIN.replace("+ m.content + '<|e|>' }}{%- endif", "+ m.content + '<|x|>\\n<|e|>' }}{%- endif")


def test_an_end_of_two_tokens_is_one_end() -> None:
    turns, end, question = [ASKED, said("One."), ASKED, said("Two.")], "<|x|>\n<|e|>", "<|u|>Q?"
    for ends, (first, last, asked) in {
        "turn": (f"[[One.{end}]]", f"[[Two.{end}]]", "<|e|>"), "none": (f"[[One.]]{end}", f"[[Two.]]{end}", "<|e|>"),
        "last": (f"[[One.]]{end}", f"[[Two.{end}]]", "<|e|>"), "all": (f"[[One.{end}]]", f"[[Two.{end}]]", "[[<|e|>]]"),
    }.items():  # fmt: skip
        told = shown(TWO_ENDS, turns, train_on_eos=ends)
        assert told == f"{question}{asked}<|a|>{first}{question}{asked}<|a|>{last}", ends
    with_eos = (
        TWO_ENDS.replace("<|x|>\\n<|e|>", "<|e|>") + "{%- if not add_generation_prompt %}{{- '\\n</s>' }}{%- endif %}"
    )
    assert shown(with_eos, turns, train_on_eos="none").endswith("[[Two.]]<|e|>\n</s>")  # Phi-3's
    assert shown(with_eos, turns).endswith("[[Two.<|e|>\n</s>]]")
    spelt = [user("Say <|e|> or <|x|>."), said("One <|e|> two.")]
    assert shown(PLAIN, spelt, train_on_eos="all").startswith(
        "<|u|>Say <|e|> or <|x|>.[[<|e|>]]<|a|>[[One <|e|> two.<|e|>]]"
    )
    assert shown(PLAIN, spelt, train_on_eos="none").endswith("[[One <|e|> two.]]<|e|>")


@pytest.mark.parametrize("result", ["3", ""])
@pytest.mark.parametrize("content", ["So.", ""])
def test_results_inside_the_models_turn_are_not_trained(content: str, result: str) -> None:
    """The mark of a result was, where content or result was empty, or a call ended without a special token."""
    named = GEMMA4.replace("{%- if not m.tool_calls %}{{- '<|e|>' }}{%- endif %}", "{{- '<|e|>' }}")
    bare = named.replace("c.function.name + '=' + messages", "messages")
    for template, name in ((named, "addup="), (bare, ""), (bare.replace("'}<c|>'", "'}'"), "")):
        text = shown(template, [ASKED, said(content, {"a": 1}), output(result), DONE])
        call = "<|c|>addup{a:1,}" + ("<c|>" if "'}<c|>'" in template else "")
        assert text == f"{BEFORE}[[{call}]]<|r|>{name}{result}<r|>[[{content}<|e|>]][[Three.<|e|>]]"


def test_a_call_without_a_mark_at_its_end_keeps_the_mark_of_the_result_untrained() -> None:
    """`<|r|>` was trained as the token that the model stops with."""
    order = GEMMA4.replace("'}<c|>'", "'}</call>'").replace("c.function.name + '=' + messages", "messages")
    for template, end in ((order, ""), (order.replace("{%- if not m.tool_calls %}", "{%- if true %}"), "<|e|>")):
        text = shown(template, [ASKED, said("So.", {"a": 1}), output("3"), DONE])
        assert text == f"{BEFORE}[[<|c|>addup{{a:1,}}</call>]]<|r|>3<r|>[[So.{end}]][[Three.<|e|>]]"


# What a row says.


@pytest.mark.parametrize("turn", [
    said("x", thought="write <|im_end|>"), said("", {"a": {"b": ["<|im_end|>"]}}), said("", {"<|im_end|>": 1}),
    said("<|im_end|>"),
])  # fmt: skip
def test_special_tokens_in_thoughts_and_calls_are_told(tmp_path: Path, turn: dict[str, Any]) -> None:
    template = CALLS.replace("+ m.content }}", "+ (m.reasoning_content or '') + m.content }}")
    tokenizer = byte_tokenizer(template=template)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    for answer, rows in ((turn, [1]), (said("x"), [])):
        path = write_rows(tmp_path / "x.jsonl", [{"messages": [ASKED, answer], "tools": [TOOL]}])
        dataset = build_dataset(DataSettings((DatasetSpec(str(path)),), 1000), tokenizer)
        assert dataset.report.sources[0].control_token_rows == rows


def test_two_of_one_in_a_message_are_refused() -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    for keys, other in (
        ({"reasoning_content": "a", "thinking": "b"}, {"thinking": "a"}),
        (
            {"function_call": call, "tool_calls": [{"function": {**call, "name": "g"}}]},
            {"tool_calls": [{"function": call}]},
        ),
    ):
        item = {"role": "assistant", "content": "x", **keys}
        with pytest.raises(BadRowError, match=" and ".join(f"`{key}`" for key in keys)):
            read_turns([item], "messages")
        assert read_turns([item | other], "messages").messages
    both = read_turns([{"role": "assistant", "content": "x", "reasoning_content": " ", "reasoning": "hm"}], "messages")
    assert both.messages[0]["reasoning_content"] == "hm"


@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_what_templates_read_of_a_message_arrives(keys: tuple[str, str]) -> None:
    call = {"type": "function", "id": "abcdef123", "function": {"name": "add", "arguments": {"a": 1}}}
    asks = {"reasoning_content": "Hm.", "tool_calls": [call]}
    for role, more in (("tool", {"name": "add", "tool_call_id": "abcdef123"}), ("assistant", asks)):
        item = {keys[0]: role, keys[1]: "3", **more}
        assert [*read_turns([item], "messages").messages] == [{"role": role, "content": "3", **more}]


def test_a_template_file_with_a_byte_order_mark_writes_none(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML, encoding="utf-8-sig")
    assert find_template(byte_tokenizer(), "t.jinja", tmp_path) == CHATML


def test_the_hint_of_thoughts_says_which_way_is_kept() -> None:
    assert "| thoughts in `content`, from <think> to </think> (this template keeps those), " in refused(
        PLAIN, [ASKED, said("12", thought="Hm.")]
    )
    beside = THOUGHTS_BESIDE.replace("m.content +", "m.content.split('</think>')[-1] +")
    told = refused(beside, [ASKED, said("<think>Hm.</think>12")])
    assert "| thoughts as `reasoning_content` (this template keeps those), `chat_template: FILE`" in told
    assert "keeps those" not in refused(DROPS, [ASKED, said("12", thought="Hm.")])
