"""What `roundpipe convert` makes of every field of axolotl, LLaMA-Factory and TRL, and of 60 configurations.

    python scripts/convert_fields.py                 the table of configurations, and counts by tool
    python scripts/convert_fields.py --fields        a line for each field too
    python scripts/convert_fields.py --wheels DIR    wheels that lie there already

The wheels are downloaded from the package index, never installed or imported: the names, types and defaults of their
argument classes are read from the source, and those of transformers' TrainingArguments from the installed package.
24 configurations are whole files of our own (`convert_configs/`); 36 more have the fields in turn, each field with a
value other than its default. A field is `converted` where the recipe changes, `listed` where it is left out by name,
`refused` where the file is for another job, and `no effect` where it changes nothing here, which the command says too.

Exits 1 where a field is in none of these, where fewer than 20 configurations convert clean (nothing left out, nothing
said to differ), or where a recipe does not load.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any, get_args

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.recipe.convert import convert_file
from roundpipe_cli.recipe.convert_rules import Conversion, Tool
from roundpipe_cli.recipe.load import load_text

ROOT = Path(__file__).resolve().parents[1]
WHEELS = {"axolotl": "axolotl==0.19.0", "llama-factory": "llamafactory==0.9.5", "trl": "trl==1.16.0"}
SOURCES = {
    "axolotl": ("axolotl/utils/schemas/", "axolotl/integrations/"),
    "llama-factory": ("llamafactory/hparams/",),
    "trl": ("trl/trainer/", "trl/scripts/utils.py", "trl/experimental/orpo/", "trl/experimental/cpo/"),
}
"""Where a wheel's argument classes are."""
ROOTS = {
    "axolotl": r"AxolotlInputConfig|\w+Args",
    "llama-factory": r"(Data|Model|Training|Finetuning|Generating|Evaluation)Arguments",
    "trl": r"(SFT|DPO|KTO|GRPO|RLOO|Reward|ORPO|CPO|Model|Distillation)Config|ScriptArguments",
}
"""Classes whose fields, and those of their bases, are the keys of a file."""
MINIMAL: dict[str, dict[str, Any]] = {
    "axolotl": {"base_model": "a/b", "learning_rate": 1e-4, "datasets": [{"path": "x.jsonl", "type": "completion"}]},
    "llama-factory": {"model_name_or_path": "a/b", "dataset": "x", "dataset_dir": "ONLINE", "do_train": True},
    "trl": {"model_name_or_path": "a/b", "dataset_name": "x.jsonl", "dataset_text_field": "text"},
}
"""The shortest file of each tool."""
CONTEXTS: dict[str, tuple[dict[str, Any], ...]] = {
    "axolotl": (
        {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": False},
        {"val_set_size": 0.1, "eval_steps": 10},
        {"rl": "dpo", "adapter": "lora", "lora_r": 8, "lora_alpha": 16},
        {"rl": "simpo"},
    ),
    "llama-factory": (
        {"val_size": 0.1, "eval_strategy": "steps"},
        {"finetuning_type": "full"},
        {"stage": "dpo"},
        {"stage": "dpo", "pref_loss": "simpo"},
    ),
    "trl": (
        {"use_peft": True},
        {"eval_strategy": "steps"},
        {"loss_type": "sigmoid", "use_peft": True, "dataset_text_field": None},
        {"loss_type": "simpo", "dataset_text_field": None},
    ),
}
"""Keys beside which some fields are read only: a field counts by the context that takes it."""
VALUES: dict[str, Any] = {
    **{"optimizer": "adamw_8bit", "optim": "adamw_8bit", "lr_scheduler": "linear", "lr_scheduler_type": "cosine"},
    **{"dtype": "float16", "num_epochs": 2, "num_train_epochs": 2, "report_to": ["wandb"], "save_strategy": "no"},
    **{"eval_strategy": "epoch", "evaluation_strategy": "epoch", "adapter": "lora", "finetuning_type": "full"},
    **{"rl": "orpo", "loraplus_lr_ratio": 16.0, "max_steps": 10, "eval_steps": 5, "loss_type": "simpo"},
    **{"template": "chatml", "chat_template": "chatml", "lora_model_dir": "before", "quantization_bit": 4},
    **{"dpo_loss_type": ["ipo"], "pref_loss": "orpo", "trl": {"beta": 0.2}, "metric_for_best_model": "loss"},
    **{"test_datasets": [{"path": "t.jsonl", "type": "completion"}], "special_tokens": {"pad_token": "<pad>"}},
    **{"datasets": [{"path": "y.jsonl", "type": "completion"}], "lora_target_modules": ["q_proj"]},
    **{"lora_modules_to_save": ["lm_head"], "peft_init_lora_weights": "gaussian", "unfrozen_parameters": ["lm_head"]},
    **{"chat_template_path": "x.jinja", "train_sampling_strategy": "sequential", "label_smoothing": 0.1},
    **{"bnb_4bit_quant_type": "nf4", "quantization_type": "nf4", "truncation_mode": "keep_start"},
    **{"dpo_label_smoothing": 0.1, "label_smoothing_factor": 0.1, "adapter_name_or_path": "before"},
}
"""Values that a reader of types cannot guess."""
STATES = ("converted", "listed", "refused", "no effect", "SILENT")
CLEAN_AT_LEAST, CONFIGURATIONS_OF_FIELDS = 20, 12


@dataclass(frozen=True, eq=False)
class Field:
    """A field of an argument class, with a value that is not its default."""

    tool: str
    name: str
    value: Any


def fields_of(tool: str, wheel: Path) -> list[Field]:
    """The keys that a file of this tool may have, each once."""
    classes: dict[str, ast.ClassDef] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            is_plugin = "/integrations/" in name and not name.endswith("/args.py")
            if name.endswith(".py") and name.startswith(SOURCES[tool]) and not is_plugin:
                classes |= _classes(archive.read(name).decode())
    spec = util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    if tool != "axolotl":
        theirs = _classes(Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8"))
        classes = {"Base" + name: node for name, node in theirs.items()} | theirs | classes
    roots = [name for name in classes if re.fullmatch(ROOTS[tool], name)]
    roots += [] if tool == "axolotl" else ["BaseTrainingArguments"]
    found: dict[str, Field] = {}
    for root in roots:
        for node in _with_bases(root, classes):
            found = {field.name: field for field in _read(tool, node)} | found
    return list(found.values())


def _classes(source: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}


def _with_bases(name: str, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    if name in classes:
        yield classes[name]
        for base in classes[name].bases:
            inner = ast.unparse(base).rpartition(".")[2]
            yield from _with_bases(inner, classes) if inner != name else ()


def _read(tool: str, node: ast.ClassDef) -> Iterator[Field]:
    """The annotated names of a class."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            name, kind = line.target.id, ast.unparse(line.annotation)
            is_of_file = "init=False" not in ast.unparse(line) and "ClassVar" not in kind
            if is_of_file and not name.startswith("_"):
                yield Field(tool, name, VALUES.get(name, other_value(kind, _default(line.value))))


def _default(value: ast.expr | None) -> Any:
    """The default of a field as far as it is a constant; None otherwise."""
    if isinstance(value, ast.Call):
        given = next((item.value for item in value.keywords if item.arg == "default"), None)
        value = given or (value.args[0] if value.args else None)
    try:
        return ast.literal_eval(value) if value is not None else None
    except ValueError:
        return None


def other_value(kind: str, default: Any) -> Any:
    """A value of a type that is not the default: a choice, or a number, text, list or mapping."""
    if "Literal[" in kind:
        choices = ast.literal_eval("[" + kind.split("Literal[", 1)[1].split("]", 1)[0] + "]")
        return next((choice for choice in choices if choice != default), choices[0])
    if isinstance(default, bool) or (default is None and "bool" in kind):
        return not default
    if isinstance(default, (int, float)):
        return default + 1 if isinstance(default, int) else default / 2 or 0.25
    for word, value in (("int", 3), ("float", 0.25), ("str", "other"), ("list", ["other"]), ("dict", {"other": 1})):
        if word in kind.lower():
            return value
    return "other"


def state_of(field: Field) -> str:
    """What becomes of one field in the shortest file, or beside the keys that it needs."""
    found: list[str] = []
    for context in ({}, *CONTEXTS[field.tool]):
        found.append(_state({**MINIMAL[field.tool], **context}, field))
        if found[-1] in ("converted", "SILENT"):
            return found[-1]
    return found[0]


def _state(data: dict[str, Any], field: Field) -> str:
    tool: Tool = next(name for name in get_args(Tool) if name == field.tool)
    if data.get(field.name) == field.value:
        return "no effect"
    without = _plain(json.dumps(data), tool)
    try:
        with_it = _converted({**data, field.name: field.value}, tool)
    except (RefusedError, RecipeError):
        return "refused"
    if any(re.split(r"[.[]", entry.key)[0] == field.name for entry in with_it.left_out):
        return "listed"
    if any(field.name in change for change in set(with_it.changes) - set(without.changes)):
        return "listed"
    if with_it.recipe != without.recipe or len(with_it.notes) > len(without.notes):
        return "converted"
    return "no effect" if field.name in with_it.without_effect else "SILENT"


@cache
def _plain(data: str, tool: Tool) -> Conversion:
    return _converted(json.loads(data), tool)


def _converted(data: dict[str, Any], tool: Tool | None) -> Conversion:
    result = convert_file(yaml.safe_dump(data).encode(), "file.yaml", tool=tool)
    load_text(result.text("file.yaml"), "recipe.yaml")
    return result


def configurations(fields: list[Field], states: dict[Field, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, keys) of 60 files: our own, and for each tool twelve with its fields in turn."""
    for path in sorted((ROOT / "scripts" / "convert_configs").glob("*.yaml")):
        for index, data in enumerate(yaml.safe_load_all(path.read_text(encoding="utf-8")), start=1):
            yield f"{path.stem} {index}", data
    for tool, minimal in MINIMAL.items():
        own = [field for field in fields if field.tool == tool and field.name not in minimal]
        refused = [field for field in own if states[field] == "refused"]
        others = [field for field in own if states[field] != "refused"]
        size = -(-len(others) // (CONFIGURATIONS_OF_FIELDS - 1))
        parts = [others[first : first + size] for first in range(0, len(others), size)]
        for index, part in enumerate([*parts, refused], start=1):
            yield f"{tool}, fields {index}", {**minimal, **{field.name: field.value for field in part}}


def show_configurations(fields: list[Field], states: dict[Field, str]) -> int:
    """Print a line for each configuration; how many convert clean."""
    print("| configuration | keys | is | left out | differs | no effect |\n|---|---:|---|---:|---:|---:|")
    clean = 0
    for name, data in configurations(fields, states):
        try:
            result = _converted(data, None if "fields" not in name else name.partition(",")[0])  # type: ignore[arg-type]
        except (RefusedError, RecipeError) as error:
            print(f"| {name} | {len(data)} | refused: {error.problems[0].what[:60]} | | | |")
            continue
        is_clean = not result.left_out and not result.changes
        clean += is_clean
        counts = (len(result.left_out), len(result.changes), len(result.without_effect))
        print(f"| {name} | {len(data)} | {'clean' if is_clean else 'listed'} | {' | '.join(map(str, counts))} |")
    return clean


def show_fields(fields: list[Field], states: dict[Field, str], *, each: bool) -> None:
    print(f"\n| fields of | {' | '.join(STATES)} |\n|---|{'---:|' * len(STATES)}")
    for tool in WHEELS:
        counts = Counter(states[field] for field in fields if field.tool == tool)
        print(f"| {tool} | {' | '.join(str(counts[state]) for state in STATES)} |")
    if each:
        print("\n| tool | field | value | becomes |\n|---|---|---|---|")
        for field in sorted(fields, key=lambda field: (field.tool, states[field], field.name)):
            print(f"| {field.tool} | {field.name} | {json.dumps(field.value)} | {states[field]} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fields", action="store_true", help="a line for each field")
    parser.add_argument("--wheels", type=Path, help="folder with the three wheels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = args.wheels or Path(folder)
        if args.wheels is None:
            download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
            subprocess.run([*download, *WHEELS.values()], check=True)
        wheels = {tool: next(home.glob(f"{name.partition('==')[0]}-*.whl")) for tool, name in WHEELS.items()}
        fields = [field for tool, wheel in wheels.items() for field in fields_of(tool, wheel)]
    states = {field: state_of(field) for field in fields}
    clean = show_configurations(fields, states)
    show_fields(fields, states, each=args.fields)
    print(f"\n{clean} configurations convert clean (at least {CLEAN_AT_LEAST} are wanted).")
    return int(clean < CLEAN_AT_LEAST or "SILENT" in states.values())


if __name__ == "__main__":
    sys.exit(main())
