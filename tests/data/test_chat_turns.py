"""What is trained of a turn: each content, thought and argument, where templates drop, move or repeat them.

Templates are written here in the layouts of published ones. Trained parts are between [[ and ]].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.data.chat import ChatTemplate
from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.messages import CALL_FORM_NOTES, Conversation, in_form
from roundpipe_cli.data.row_chunks import encode_batch
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.errors import RefusedError
from tests.data.test_chat_templates import TOOL, output, said, user
from tests.data.test_data_dataset import CHATML, byte_tokenizer, write_rows
from tests.data.test_data_rules import CALLS

PROMPT = "{%- if add_generation_prompt %}{{- '<|a|>' }}{%- endif %}"
LOOP = "{%- for m in messages %}{%- if m.role != 'assistant' %}{{- '<|u|>' + m.content + '<|e|>' }}{%- else %}"
# Drops the thoughts in a content, in all turns or but for the last one.
DROPS = LOOP + "{{- '<|a|>' + m.content.split('</think>')[-1] + '<|e|>' }}{%- endif %}{%- endfor %}" + PROMPT
DROPS_EARLIER = DROPS.replace(
    "m.content.split('</think>')[-1]", "(m.content if loop.last else m.content.split('</think>')[-1])"
)
# Qwen3's: a think block in the last turn only, even where it has no thought; a call behind a line break.
QWEN3 = (
    LOOP + "{{- '<|a|>' }}{%- if loop.last or m.reasoning_content %}{{- '<think>\\n' + (m.reasoning_content or '') }}"
    "{{- '\\n</think>\\n\\n' }}{%- endif %}{{- m.content }}{%- for c in m.tool_calls or [] %}"
    "{{- '\\n' if m.content else '' }}{{- '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}"
    "{%- endfor %}{{- '<|e|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|a|>' }}{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
# Gemma 4's: calls, then the outputs under the call's name, then the content of the same turn.
GEMMA4 = (
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- '<|u|>' + m.content + '<|e|>' }}{%- elif m.role == 'assistant' %}"
    "{{- '<|a|>' if loop.index0 == 0 or messages[loop.index0 - 1].role == 'user' }}"
    "{%- for c in m.tool_calls or [] %}{{- '<|c|>' + c.function.name + '{' }}"
    "{%- for k, v in c.function.arguments | dictsort %}{{- k ~ ':' ~ v }},{%- endfor %}{{- '}<c|>' }}{%- endfor %}"
    "{%- set at = loop.index %}{%- for c in m.tool_calls or [] %}{%- if at + loop.index0 < messages | length %}"
    "{{- '<|r|>' + c.function.name + '=' + messages[at + loop.index0].content + '<r|>' }}{%- endif %}{%- endfor %}"
    "{{- m.content }}{%- if not m.tool_calls %}{{- '<|e|>' }}{%- endif %}{%- endif %}{%- endfor %}" + PROMPT
)
# gpt-oss's: the first call alone, thoughts under their own name until an answer follows, another end in the last turn.
GPT_OSS = (
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- '<|s|>user<|m|>' + m.content + '<|e|>' }}{%- elif m.role == 'tool' %}"
    "{{- '<|s|>' + ns.name + '<|m|>' + m.content | tojson + '<|e|>' }}{%- elif m.tool_calls %}"
    "{%- if 'content' in m and 'thinking' in m %}{{- raise_exception('not both') }}{%- endif %}"
    "{%- set ns.name = m.tool_calls[0].function.name %}"
    "{%- if m.thinking and loop.last %}{{- '<|s|>assistant<|h|>analysis<|m|>' + m.thinking + '<|e|>' }}{%- endif %}"
    "{{- '<|s|>assistant to=' + ns.name + '<|m|>' + m.tool_calls[0].function.arguments | tojson + '<|c|>' }}"
    "{%- else %}{{- '<|s|>assistant<|h|>final<|m|>' + m.content + ('<|x|>' if loop.last else '<|e|>') }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|s|>assistant' }}{%- endif %}"
)
GPT_OSS = "{%- set ns = namespace(name='') %}" + GPT_OSS
# GLM-4's: the mark of the next turn ends a turn.
GLM4 = (
    "{%- for m in messages %}{{- {'user': '<|u|>', 'assistant': '<|a|>'}[m.role] + '\\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|a|>' }}{%- endif %}"
)
# DeepSeek V3's: arguments that are joined to text.
JOINS = CALLS.replace("c.function.arguments | tojson", "c.function.arguments")
# One that passes over arguments that are no text.
ONLY_TEXT = JOINS.replace(
    "+ c.function.arguments", "+ (c.function.arguments if c.function.arguments is string else '')"
)
# Mistral v3's: ids of nine letters, in the JSON of the call.
IDS = (
    "{%- for m in messages %}{%- if m.tool_calls %}"
    "{{- '[CALLS] [' }}{%- for c in m.tool_calls %}{%- if c.id is undefined or c.id | length != 9 %}"
    "{{- raise_exception('ids of length 9') }}{%- endif %}{%- set out = c.function | tojson %}"
    "{{- out[:-1] + ', \"id\": \"' + c.id + '\"}' }}{%- endfor %}{{- ']</s>' }}{%- elif m.role == 'tool' %}"
    "{{- '[OUT]' + m.content + ' ' + m.tool_call_id + '[/OUT]' }}{%- elif m.role == 'assistant' %}"
    "{{- ' ' + m.content | trim + '</s>' }}{%- else %}{{- '[INST]' + m.content + '[/INST]' }}{%- endif %}{%- endfor %}"
)
# Cohere's: what is said before calls is a plan.
PLANS = QWEN3.replace("{{- m.content }}", "{{- m.tool_plan if m.tool_calls else m.content }}")

ASKED, CALLED, DONE = user("Q?"), said("", {"a": 1}), said("Three.")
TOLD = [ASKED, CALLED, output("3"), DONE]


def shown(template: str, messages: list[dict[str, Any]], **rules: Any) -> str:
    """The text with marks around what is trained, and behind it what is named as left out."""
    tokenizer = byte_tokenizer(template=template)
    marks = ["<|u|>", "<|a|>", "<|e|>", "<|c|>", "<c|>", "<|r|>", "<r|>", "<|s|>", "<|m|>", "<|h|>", "<|x|>"]
    tokenizer.add_tokens([*marks, "[INST]", "[/INST]", "[OUT]", "[/OUT]", "[CALLS]"], special_tokens=True)
    tools = (TOOL,) if "tools" in template else ()
    made = ChatTemplate(tokenizer, template).render_trained(
        Conversation(tuple(messages), tools), DatasetSpec("", **rules)
    )
    text, position = "", 0
    for start, end in made.trained:
        text += made.text[position:start] + f"[[{made.text[start:end]}]]"
        position = end
    return text + made.text[position:] + "".join(f" ({name})" for name in made.left_out)


def refused(template: str, messages: list[dict[str, Any]], **rules: Any) -> str:
    with pytest.raises(BadRowError) as caught:
        shown(template, messages, **rules)
    fault = caught.value.fault
    return f"{fault.what} | {fault.found} | {fault.expected} | {fault.hint}"


EARLIER = "(thoughts in content of earlier turns (not kept by the chat template))"
THOUGHT = "<think>carry one</think>12"


def test_a_thought_in_the_content_is_not_dropped_in_silence() -> None:
    told = refused(DROPS, [ASKED, said(THOUGHT)])
    assert "leaves the assistant's thoughts out" in told and "no thought in `content` of turn 2" in told
    assert told.endswith("`chat_template: FILE`, or `thoughts: drop`")
    beside = refused(DROPS, [ASKED, said("12", thought="carry one")])
    assert "no `reasoning_content` of turn 2" in beside
    text = shown(DROPS_EARLIER, [ASKED, said(THOUGHT), ASKED, said(THOUGHT)])
    assert text == f"<|u|>Q?<|e|><|a|>[[12<|e|>]]<|u|>Q?<|e|><|a|>[[{THOUGHT}<|e|>]] {EARLIER}"


@pytest.mark.parametrize("answer", ["chosen", "rejected"])
def test_thoughts_of_preference_pairs_are_not_dropped_in_silence(tmp_path: Path, answer: str) -> None:
    row = {"prompt": "Q?", "chosen": "12", "rejected": "13"} | {answer: THOUGHT}
    path = write_rows(tmp_path / "x.jsonl", [row])
    settings = DataSettings((DatasetSpec(str(path), type="preference", example="pair"),), 500)
    with pytest.raises(RefusedError, match="thoughts out"):
        build_dataset(settings, byte_tokenizer(template=DROPS))


def test_calls_and_thoughts_are_trained_where_think_blocks_come_and_go() -> None:
    """Qwen3's template: no rendering of a part begins the whole; with `enable_thinking: false` a prompt has a block."""
    call, answer = '[[<call>addup{"a": 1}</call><|e|>]]', "[[<think>\n\n</think>\n\nThree.<|e|>]]"
    assert shown(QWEN3, TOLD) == f"<|u|>Q?<|e|><|a|>{call}<|u|>3<|e|><|a|>{answer}"
    template = "{%- set enable_thinking = false %}" + QWEN3
    text = shown(template, [ASKED, said("12", thought="carry one")])
    assert text == "<|u|>Q?<|e|><|a|>[[<think>\ncarry one\n</think>\n\n12<|e|>]]"
    assert shown(template, [ASKED, said("12")]) == "<|u|>Q?<|e|><|a|><think>\n\n</think>\n\n[[12<|e|>]]"


def test_a_name_that_a_call_has_twice_is_trained_twice() -> None:
    """Only what other turns repeat is none of the model's words."""
    template = QWEN3.replace("c.function.name", "c.function.name + ' ' + c.function.name")
    assert '[[<call>addup addup{"a": 1}</call><|e|>]]' in shown(template, TOLD)


def test_calls_that_a_template_leaves_out_are_refused() -> None:
    """gpt-oss's writes the first one only: the others vanished, and their outputs stayed."""
    told = refused(GPT_OSS, [ASKED, said("", {"a": 1}, {"a": 2}), output("3"), output("4"), DONE])
    assert "leaves some tool calls of a turn out | 1 of the 2 calls of turn 2" in told and "one call a turn" in told
    lost = CALLS.replace("c.function.arguments | tojson", "(c.function.arguments.a | string) + ' a'")
    told = refused(lost, [ASKED, said("", {"a": 1, "b": "Bone"}), output("3"), DONE])
    assert "leaves arguments of a tool call out" in told and "of turn 2 in its text" in told
    drops = CALLS.replace("c.function.arguments | tojson", "c.function.arguments.keys() | join(' ')")
    assert "leaves arguments of a tool call out" in refused(drops, [ASKED, said("", {"a": True}), output("3"), DONE])
    told = refused(drops, [ASKED, said("", {"a": "Bone" * 99}), output("3"), DONE])
    assert f"| no '{'Bone' * 16}Bo... of turn 2 in its text |" in told
    assert "leaves the assistant's words out" in refused(
        CALLS.replace("+ m.content }}", "+ (m.content if not m.tool_calls else '') }}"), [ASKED, said("So.", {"a": 1})]
    )


@pytest.mark.parametrize("value", [True, False, None, 1, 0.5, "x", "", [1, "y"], {"c": {"d": False}}, {}])
def test_arguments_of_every_kind_are_found(value: object) -> None:
    for template in (CALLS, QWEN3, JOINS, ONLY_TEXT):
        assert "[[" in shown(template, [ASKED, said("", {"a": value}), output("3"), DONE])


def test_gpt_oss_keeps_channels_and_ends_of_earlier_turns() -> None:
    question, turns = "<|s|>user<|m|>Q?<|e|><|s|>assistant", [ASKED, said("One."), ASKED, said("Two.")]
    first, last = f"{question}[[<|h|>final<|m|>One.", f"{question}[[<|h|>final<|m|>Two."
    assert shown(GPT_OSS, turns) == f"{first}<|e|>]]{last}<|x|>]]"
    assert shown(GPT_OSS, turns, train_on_eos="none") == f"{first}]]<|e|>{last}]]<|x|>"
    assert shown(GPT_OSS, [ASKED, said("", {"a": 1})], train_on_eos="none").endswith('{"a": 1}]]<|c|>')


def test_gpt_oss_takes_calls_with_thoughts() -> None:
    """It raises where a turn of calls has thoughts beside a content, be it empty."""
    text = shown(GPT_OSS, [ASKED, said("", {"a": 1}, thought="Hm.")])
    assert text.removesuffix(f" ({CALL_FORM_NOTES['silent']})").endswith(
        '[[<|h|>analysis<|m|>Hm.<|e|><|s|>assistant to=addup<|m|>{"a": 1}<|c|>]]'
    )
    text = shown(GPT_OSS, [ASKED, said("", {"a": 1}, thought="Hm."), output("3"), DONE])
    assert "Hm." not in text and "(reasoning_content of earlier turns (not kept by the chat template))" in text
    assert '[[ to=addup<|m|>{"a": 1}<|c|>]]<|s|>addup<|m|>"3"<|e|><|s|>assistant[[' in text


def test_the_mark_of_the_next_turn_ends_a_turn(tmp_path: Path) -> None:
    """GLM-4's layout: no end was trained at all. The last turn of a row has none, which a notice says."""
    assert shown(GLM4, [ASKED, said("One."), ASKED, said("Two.")]) == (
        "<|u|>\nQ?<|a|>[[\nOne.<|u|>]]\nQ?<|a|>[[\nTwo.]]"
    )
    assert shown(GLM4, [ASKED, said("One."), ASKED, said("Two.")], train_on_eos="none") == (
        "<|u|>\nQ?<|a|>[[\nOne.]]<|u|>\nQ?<|a|>[[\nTwo.]]"
    )
    assert shown(GLM4, [ASKED, said("One."), said("Two.")]) == "<|u|>\nQ?<|a|>[[\nOne.]]<|a|>[[\nTwo.]]"
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "Q?", "completion": "One."}])
    dataset = build_dataset(DataSettings((DatasetSpec(str(path)),), 500), byte_tokenizer(template=GLM4))
    assert any("ends an answer with the mark of the next turn" in notice for notice in dataset.notices)


def test_calls_get_the_ids_that_a_template_asks_for() -> None:
    """Mistral v3's layout: rows without ids, or with longer ones, were refused."""
    text = shown(IDS, TOLD)
    assert '[[[CALLS] [{"name": "addup", "arguments": {"a": 1}, "id": "' in text and "written anew" in text
    name = text.partition('"id": "')[2][:9]
    assert f"[OUT]3 {name}[/OUT]" in text and text.partition(" (ids")[0].endswith("[[Three.</s>]]")
    kept = [{**CALLED, "tool_calls": [{**CALLED["tool_calls"][0], "id": "abcdef123"}]}]
    assert "[OUT]3 abcdef123" in shown(IDS, [ASKED, *kept, {**output("3"), "tool_call_id": "abcdef123"}, DONE])


def test_what_is_said_before_calls_may_be_a_plan() -> None:
    """Command A's layout."""
    for call in (said("So.", {"a": 1}), said("", {"a": 1}, thought="So."), said("So.", {"a": 1}, thought="Hm.")):
        (given,) = in_form([call], ["plan"])
        assert given["tool_plan"] == "So."
    assert "tool_plan" not in in_form([said("", {"a": 1})], ["plan"])[0]
    assert "[[So.\n<call>" in shown(PLANS, [ASKED, said("So.", {"a": 1}), output("3"), DONE])


def test_rows_with_tools_take_the_template_of_that_name(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": CALLS}
    path = write_rows(tmp_path / "x.jsonl", [{"messages": TOLD, "tools": [TOOL]}, {"messages": [ASKED, DONE]}])
    dataset = build_dataset(DataSettings((DatasetSpec(str(path)),), 500), tokenizer)
    texts = [tokenizer.decode(row.input_ids) for row in dataset.rows]
    assert texts[0].startswith("function:addup") and "function" not in texts[1]
    named = DataSettings((DatasetSpec(str(path)),), 500, chat_template="tool_use")
    assert len(build_dataset(named, tokenizer).rows) == 2


@pytest.mark.parametrize("thoughts", ["drop", "mask"])
def test_a_thought_that_never_ends_is_no_answer(tmp_path: Path, thoughts: Any) -> None:
    plain: dict[str, Any] = {"prompt": "Q?", "completion": "<think>hm"}
    for row, template in (({"messages": [ASKED, said("<think>hm")]}, CHATML), (plain, CHATML), (plain, None)):
        path = write_rows(tmp_path / "x.jsonl", [row])
        settings = DataSettings((DatasetSpec(str(path), thoughts=thoughts),), 500)
        with pytest.raises(RefusedError, match="begins a thought that never ends"):
            build_dataset(settings, byte_tokenizer(template=template))


def test_special_tokens_that_take_blanks_leave_the_header_untrained() -> None:
    """Phi-3's: of an answer that begins with blanks, `<|a|>` was trained."""
    from tokenizers import AddedToken

    template = (
        LOOP + "{{- '<|a|>\\n' + m.content + '<|e|>' }}{%- endif %}{%- endfor %}" + PROMPT.replace("|>'", "|>\\n'")
    )
    tokenizer = byte_tokenizer(template=template)
    tokens: list[Any] = [AddedToken(name, rstrip=True, normalized=False, special=True) for name in ("<|a|>", "<|e|>")]
    tokenizer.add_tokens(tokens, special_tokens=True)
    rendered = ChatTemplate(tokenizer, template).render_trained(Conversation((ASKED, said("  Yo"))))
    encoded = encode_batch(tokenizer, [rendered], plain=False)[0]
    assert not isinstance(encoded, BadRowError)
    assert tokenizer.decode(encoded.input_ids[encoded.weights != 0]) == "Yo<|e|>"


def test_generation_marks_in_a_comment_or_around_other_turns() -> None:
    assert "[[Three.</s>]]" in shown("{# {% generation %} #}" + CHATML, [ASKED, DONE])
    around = "{% generation %}" + CHATML + "{% endgeneration %}"
    assert "what the user said would be trained" in refused(around, [ASKED, DONE])
    beside = LOOP + "{{- '<|a|>' }}{% generation %}{{- m.content[:2] }}{% endgeneration %}{{- m.content[2:] }}"
    assert "cannot tell what the assistant said" in refused(beside + "{%- endif %}{%- endfor %}", [ASKED, DONE])


@pytest.mark.parametrize(
    "said_as",
    [
        "m.content", "m.content | trim", "(m.content ~ '')", "'%s' % m.content", "'{}'.format(m.content)",
        "m.content.replace('zz', 'y')", "m.content.split('\\n') | join('\\n')", "'\\n'.join(m.content.split('\\n'))",
        "(m.content | list | join)", "m.content[:3] + m.content[3:]", "m.content | safe", "m.content | string",
    ],
)  # fmt: skip
def test_a_content_is_followed_through_the_template(said_as: str) -> None:
    template = LOOP + "{%- set text %}{{- " + said_as + " }}{%- endset %}{{- '<|a|>' + text + '<|e|>' }}"
    text = shown(template + "{%- endif %}{%- endfor %}" + PROMPT, [ASKED, said("One\ntwo {x}<|u|>.")])
    assert text == "<|u|>Q?<|e|><|a|>[[One\ntwo {x}<|u|>.<|e|>]]"


@pytest.mark.parametrize("said_as", ["m.content | upper", "m.content | reverse", "m.content.replace('n', 'm')"])
def test_a_content_that_is_not_as_it_was_written_is_refused(said_as: str) -> None:
    template = LOOP + "{{- '<|a|>' + (" + said_as + ") + '<|e|>' }}{%- endif %}{%- endfor %}" + PROMPT
    assert "cannot tell what the assistant said" in refused(template, [ASKED, said("One")])
