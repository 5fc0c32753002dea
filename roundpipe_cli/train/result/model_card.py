"""The model card of a run: what it was made of and how to use it, as the README.md of its folder.

It quotes what others wrote, as text, and no place of the machine on which the run was.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml

from roundpipe_cli.errors import redact
from roundpipe_cli.files import write_atomically
from roundpipe_cli.model.adapter_files import ADAPTER_CONFIG, trained_tokens
from roundpipe_cli.model.load import has_tokenizer
from roundpipe_cli.regular_files import read_regular
from roundpipe_cli.train.checkpoint.output_dir import MADE_BY, MAX_FILE_BYTES, read_values
from roundpipe_cli.train.prepare.base_files import ESCAPED
from roundpipe_cli.train.result.gguf_types import ADAPTER_GGUF, GGUF_NAME

PRIVATE_KEYS = (
    *("output_dir", "pipeline", "hardware", "weights", "report_to", "resume_from_checkpoint", "on_oom"),
    "on_device_loss",
)
"""Keys of a recipe that describe machines and folders, and not the training."""


def model_card(result: Path, *, base: str | None, merged: bool, gguf: bool = False) -> str:
    """The card of the run in `result`; facts that its files lack are left out.

    Args:
        base: name of the base model; None: as the report has it.
        gguf: there is a GGUF file of merged weights too.
    """
    report = read_values(result / "report.json")
    recipe = _without_places(read_values(result / "recipe.yaml"))
    base = base or str(report.get("model") or "")
    front: dict[str, Any] = {"tags": ["roundpipe"], "library_name": "transformers" if merged else "peft"}
    if base and _is_hub_id(base, report):
        front["base_model"] = base
    lines = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", f"# {_plain(result.absolute().name)}"]
    origin = f" from {_plain(_without_places(base))}" if base else ""
    lines += ["", f"Fine-tuned{origin} {MADE_BY}.", ""]
    lines += [*(_use_whole(gguf) if merged else _use_adapter(base, result)), ""]
    lines += _data(recipe, report) + _figures(report)
    if COMMIT.fullmatch(str(report.get("model_commit"))):
        lines += [f"Base model at commit {report['model_commit']}.", ""]
    if recipe:
        shown = {key: value for key, value in recipe.items() if key not in PRIVATE_KEYS}
        text = yaml.safe_dump(shown, sort_keys=False).strip()
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        lines += ["## Recipe", "", f"{fence}yaml", text, fence, ""]
    return redact("\n".join(lines))


def write_run_card(output_dir: Path) -> None:
    """Write the card of a finished run into its folder, unless a README.md of somebody else is there."""
    path = output_dir / "README.md"
    with contextlib.suppress(OSError):
        if path.exists() and MADE_BY.encode() not in read_regular(path, MAX_FILE_BYTES):
            return
    card = model_card(output_dir, base=None, merged=not (output_dir / ADAPTER_CONFIG).is_file())
    write_atomically(path, card.encode(errors=ESCAPED), mode=0o644)


def _use_whole(gguf: bool) -> list[str]:
    lines = _python(
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
    )
    if not gguf:
        return [*lines, "vLLM loads the folder as it is; `roundpipe export FOLDER --gguf` adds a file for llama.cpp."]
    return [*lines, f"Or `{GGUF_NAME}`, by `llama-cli -m {GGUF_NAME}` or `ollama create NAME -f Modelfile`."]


def _use_adapter(base: str, result: Path) -> list[str]:
    """Lines on how to load an adapter; where its folder has no tokenizer, the base's belongs to it."""
    imports = ["from peft import PeftConfig, PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer"]
    found = ["folder = config.base_model_name_or_path"]
    arguments = "folder, revision=config.revision"
    if base.startswith("package:"):
        imports = ["from importlib.util import find_spec", "from pathlib import Path", "", *imports]
        found = [f'folder = Path(find_spec("{base.removeprefix("package:")}").submodule_search_locations[0])']
        arguments = 'folder, gguf_file=next(folder.glob("*.gguf")).name'
    elif base.endswith(".gguf"):
        arguments = f"folder, gguf_file={json.dumps(Path(base).name)}"
    tokenizer = '"."' if has_tokenizer(result) else arguments
    tokens = trained_tokens(read_values(result / ADAPTER_CONFIG).get("trainable_token_indices"))
    rows = f"max({max(tokens, default=-1) + 1}, base.get_input_embeddings().num_embeddings)"
    lines = _python(
        *imports,
        "",
        'config = PeftConfig.from_pretrained(".")',
        *found,
        f'base = AutoModelForCausalLM.from_pretrained({arguments}, dtype="bfloat16")',
        *([f"base.resize_token_embeddings({rows}, mean_resizing=False)"] if tokens else []),
        'model = PeftModel.from_pretrained(base, ".")',
        f"tokenizer = AutoTokenizer.from_pretrained({tokenizer})",
    )
    more = (
        f"`roundpipe export FOLDER --gguf --to DIR` writes {ADAPTER_GGUF}, for `llama-cli -m BASE.gguf --lora`; with "
    )
    return [*lines, more + "`--merge` it makes one model of both, with a file for llama.cpp."]


def _python(*lines: str) -> list[str]:
    return ["In this folder:", "", "```python", *lines, "```", ""]


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{7,64}")
MARKS = re.compile(r"([\\`*_{}\[\]<>#|!~])")
"""Characters that mean something in Markdown."""
MAX_TEXT = 200


def _is_hub_id(base: str, report: Mapping[str, Any]) -> bool:
    """Whether the base came from the hub, and not from a folder whose name looks like a hub id."""
    if not HUB_ID.fullmatch(base):
        return False
    return report.get("model_commit") is not None if base == report.get("model") else not Path(base).exists()


def _plain(value: object) -> str:
    """A value as plain text in Markdown: on one line, special characters escaped."""
    text = "".join(c if c.isprintable() else " " for c in str(value)[:MAX_TEXT])
    return MARKS.sub(r"\\\1", text)


def _without_places(value: Any) -> Any:
    """The value without absolute paths, of which only the last part is kept."""
    if isinstance(value, dict):
        return {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    if not isinstance(value, str):
        return value
    path = value.removeprefix("file://")
    if path.startswith(("/", "~", "\\\\")) or PureWindowsPath(path).is_absolute():
        return re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    home = os.path.expanduser("~")  # noqa: PTH111 (no home: as it is)
    return value.replace(home, "~") if len(home) > 1 else value


def _part(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    part = values.get(key)
    return part if isinstance(part, dict) else {}


def _data(recipe: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    entries = recipe.get("datasets")
    datasets = [item for item in entries if isinstance(item, dict)] if isinstance(entries, list) else []
    if not datasets:
        return []
    lines = ["## Data", ""]
    for item in datasets:
        name = _plain(Path(str(item.get("path"))).name)
        form = "" if item.get("as_chat", True) else ", joined as they stand, without the chat template"
        lines.append(f"- {name} ({_plain(item.get('type'))}, split {_plain(item.get('split'))}){form}")
    data = _part(report, "data")
    if data:
        lines += ["", f"{_plain(data.get('rows_kept'))} rows, {_plain(data.get('trained_tokens'))} trained tokens."]
        if recipe.get("val_set_size"):
            lines[-1] += f" {_plain(_part(report, 'evaluation').get('rows'))} of the rows were held out for evaluation."
    return [*lines, ""]


def _figures(report: Mapping[str, Any]) -> list[str]:
    loss, evaluation = _part(report, "loss"), _part(report, "evaluation")
    rows = {"steps": report.get("num_steps"), "first training loss": loss.get("first")}
    rows["last training loss"] = loss.get("last")
    rows |= {
        f"evaluation: {key.replace('_', ' ')}": value
        for key, value in evaluation.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    table = [
        f"| {_plain(name)} | {f'{value:.4f}' if isinstance(value, float) else _plain(value)} |"
        for name, value in rows.items()
        if value is not None
    ]
    if not table:
        return []
    return ["## Figures", "", "| figure | value |", "|---|---|", *table, "", *_which_weights(report, evaluation)]


def _which_weights(report: Mapping[str, Any], evaluation: Mapping[str, Any]) -> list[str]:
    best_step = evaluation.get("best_step")
    if type(best_step) is not int:
        return []
    if evaluation.get("result_is_best") is True or best_step == report.get("num_steps"):
        return [f"The weights are those of the best evaluation, after step {best_step}.", ""]
    return [f"The weights are not those of the best evaluation, which was after step {best_step}.", ""]
