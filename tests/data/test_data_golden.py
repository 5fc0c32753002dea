"""Rows in, token ids and labels out, for every format and three real chat templates.

The files in golden_data/ were read token by token: each line is [id, text, label], the label -100 where the token is
not trained. A change of one of them is a change of what users train.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.data.dataset import build_dataset
from roundpipe_cli.data.settings import DatasetSpec, DataSettings
from roundpipe_cli.model.load import load_tokenizer
from tests.support.e2e import smollm2_source

GOLDEN = Path(__file__).parents[1] / "golden_data"
CHATML = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set system = 'You are a helpful assistant.' %}{%- set rest = messages %}{%- endif %}"
    "{%- if tools %}{%- set system = system + '\n\n# Tools\n' + (tools | tojson) %}{%- endif %}"
    "{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}"
    "{%- for m in rest %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""With a default for the system prompt, as Qwen2's."""
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{%- else %}{{- m.content | trim }}{%- endif %}"
    "{%- if tools and loop.first %}{{- '\n' + (tools | tojson) }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
"""Headers as Llama 3's; contents are trimmed."""
TEMPLATES: dict[str, str | None] = {"smollm2": None, "chatml": CHATML, "llama3": LLAMA3}


def load_smollm() -> Any:
    """SmolLM2's tokenizer with Llama 3's special tokens added."""
    tokenizer = load_tokenizer(smollm2_source())
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_tokens(names, special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def smollm() -> Any:
    return load_smollm()


def tokenize(tokenizer: Any, template: str, rows: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """The golden entry of each row."""
    paths = [folder / f"{case}.jsonl" for case in rows]
    for row, path in zip(rows.values(), paths, strict=True):
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    before = tokenizer.bos_token
    if template == "llama3":
        tokenizer.bos_token = "<|begin_of_text|>"
    try:
        specs = tuple(DatasetSpec(str(path)) for path in paths)
        dataset = build_dataset(DataSettings(specs, 4096, chat_template=TEMPLATES[template]), tokenizer)
    finally:
        tokenizer.bos_token = before
    entries = {}
    for case, made in zip(rows, dataset.rows, strict=True):
        pairs = zip(made.input_ids.tolist(), made.labels.tolist(), strict=True)
        tokens = [[token, tokenizer.decode([token]), label] for token, label in pairs]
        entries[case] = {"row": rows[case], "tokens": tokens}
    return entries


def golden(template: str) -> dict[str, dict[str, Any]]:
    """A row of each format with its tokens; a template without tools has none with a call."""
    found: dict[str, dict[str, Any]] = json.loads((GOLDEN / f"{template}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_and_labels_are_the_golden_ones(smollm: Any, tmp_path: Path, template: str) -> None:
    expected = golden(template)
    assert len(expected) >= 8 and ("chat_with_tools" in expected) == (template != "smollm2")
    assert tokenize(smollm, template, {case: one["row"] for case, one in expected.items()}, tmp_path) == expected


def write_golden() -> None:
    """Write the tokens of the golden files' rows anew, one token a line."""
    smollm = load_smollm()
    for template in TEMPLATES:
        rows = {case: one["row"] for case, one in golden(template).items()}
        with tempfile.TemporaryDirectory() as folder:
            entries = tokenize(smollm, template, rows, Path(folder))
        (GOLDEN / f"{template}.json").write_text(as_text(entries), encoding="utf-8")


def as_text(entries: dict[str, Any]) -> str:
    """JSON with one token a line."""
    parts = []
    for case, entry in entries.items():
        row, lines = (
            json.dumps(entry["row"], ensure_ascii=False),
            ",\n".join(f"   {json.dumps(token, ensure_ascii=False)}" for token in entry["tokens"]),
        )
        parts.append(f' {json.dumps(case)}: {{\n  "row": {row},\n  "tokens": [\n{lines}\n  ]\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":  # read the difference token by token before you commit it
    write_golden()
