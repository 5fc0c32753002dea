"""From a training file of axolotl, LLaMA-Factory, TRL or Unsloth to a recipe, and a list of what has no counterpart.

Every key ends in exactly one of three lists: it is in the recipe, it changes nothing here, or it is left out with a
reason. Where training itself becomes another, the recipe's first line says so; where the file is for another job, it
is refused. The recipe always passes every check: values that would not are left out. Missing keys get the
other tool's default. A peer's step has micro batch x accumulation x GPUs rows; a step here does not depend on the
number of GPUs, so the accumulation is multiplied by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from roundpipe_cli.choices import SCORING_OBJECTIVES
from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.recipe.aliases import ALIASES
from roundpipe_cli.recipe.check import known_keys
from roundpipe_cli.recipe.convert_data import Entry, read_datasets
from roundpipe_cli.recipe.convert_rules import (
    BY_STEPS,
    PAIR_STAGE,
    TABLES,
    TOOLS,
    UNKNOWN,
    WITH_REFERENCE,
    Conversion,
    Job,
    Tool,
    job_of,
    reads_loss_key,
    short,
)
from roundpipe_cli.recipe.foreign import EVALUATION, PREFERENCES, REINFORCEMENT, REWARD, SHARING_KEYS, is_off, other_job
from roundpipe_cli.recipe.load import load_text, values_as_yaml
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.recipe.strict_yaml import parse_bytes, shown_value
from roundpipe_cli.units import counted, either

_PEFT_TARGETS = ["q_proj", "v_proj"]
"""The modules that PEFT adapts in most architectures where none are named."""

_LOGGING_STEPS: Mapping[Tool, int] = {"axolotl": 10, "llama-factory": 500, "trl": 10}
"""`logging_steps` of a tool's own, which are also its `eval_steps`; axolotl's are 0.5 % of the steps, at most these."""

_REQUIRED = ("learning_rate", "lora.r", "lora.alpha")
"""Recipe keys for which axolotl has no default: a file without them takes ours, and the first line says so."""

# Refuses files of other tools for a job that no recipe does: a recipe of such a file would train another model.
# Settings that only change the way there are converted, and named in the first line.

_HINT = f"{either(SCORING_OBJECTIVES)} is converted; a file of TRL that does not say which: --objective dpo"

_JOBS = either(("fine-tuning", "pretraining", *SCORING_OBJECTIVES))

_OBJECTIVES = {"rm": REWARD, "ppo": REINFORCEMENT} | dict.fromkeys((*SCORING_OBJECTIVES, "cpo"), PREFERENCES)
"""Values of `rl` and `stage`."""


def _refuse_other_jobs(data: Mapping[str, Any], tool: Tool, job: Job | None, name: str) -> None:
    for other, found in _other_jobs(data, tool, job):
        raise RefusedError(
            f"this file asks for another job than a recipe does: {other}",
            where=name,
            found=f"{found}: {shown_value(data[found])}" if found in data else found,
            expected=f"{_JOBS} of a text model, of all its weights or by LoRA",
            hint=_HINT if other == PREFERENCES else None,
        )


def _other_jobs(data: Mapping[str, Any], tool: Tool, known: Job | None) -> Iterator[tuple[str, str]]:
    """(job, the key that says so or what was found) of everything that no recipe does."""
    if known is None:
        key, unknown = {
            "axolotl": ("rl", REINFORCEMENT),
            "llama-factory": ("stage", "an unknown stage"),
            "trl": ("loss_type", PREFERENCES),
        }[tool]
        objective = _OBJECTIVES.get(str(data[key]).lower(), unknown)
        yield objective, "pref_loss" if (key, data[key]) == ("stage", PAIR_STAGE) else key
    if tool == "trl" and known not in (None, *SCORING_OBJECTIVES) and not is_off(data.get("label_smoothing")):
        yield PREFERENCES, "label_smoothing"  # of SFT it is label_smoothing_factor
    for key, value in data.items():
        is_read = known is not None and reads_loss_key(key, known, tool)
        other = other_job(key, value)
        if other and not is_read and (key != "adapter" or tool == "axolotl"):
            yield other, key
    does_train, of_factory = data.get("do_train"), tool == "llama-factory"
    other = next((key for key in ("do_predict", "do_eval", "predict_with_generate") if data.get(key) is True), None)
    if does_train is False:
        yield EVALUATION if other else "no training", "do_train"
    if does_train is None and other is not None and of_factory:
        yield EVALUATION, f"{other}: true, and no do_train: true"
    if of_factory and is_off(data.get("dataset")):
        yield "inference, a chat or an API", "no dataset, stage and do_train" if does_train is None else "no dataset"


def convert_file(
    raw: bytes, name: str, *, tool: Tool | None = None, num_gpus: int = 1, objective: Job | None = None
) -> Conversion:
    """The recipe that does what the file `name` asks of another tool.

    Args:
        tool: whose file it is; None finds out by its keys.
        objective: of a TRL file, which need not say for which of TRL's trainers it is; None finds out by its keys.
        num_gpus: on how many GPUs the file was run: the rows of a step there are multiplied by it.

    Raises:
        RefusedError: not YAML, not a file of a known tool, for a job that no recipe does, or without rows.
    """
    data = _as_yaml_1_1(cast("dict[str, Any]", parse_bytes(raw, name).data))
    is_unsloth = tool is None and isinstance(data.get("training"), dict) and isinstance(data.get("data", {}), dict)
    others: dict[str, Any] = {}
    if is_unsloth:
        tool, (data, others) = "trl", _from_unsloth(data)
    tool = tool or _tool_of(data, name)
    job = job_of(data, tool)
    if objective is not None and tool != "trl" and job != objective:
        raise RefusedError(
            "a file of this tool says for itself what it trains",
            where=name,
            found=f"{tool}, {job or 'another job'}",
            expected="--objective for a file of TRL's trainers",
        )
    job = objective or job
    _refuse_other_jobs(data, tool, job, name)
    assert job is not None, "every other job has been refused"
    result = Conversion(tool, name, data, job)
    if is_unsloth:
        note = "A file of Unsloth's command line: its sections stand for TRL's arguments, named so here."
        result.notes.append(note)
    if job in WITH_REFERENCE and not result.is_lora:
        without = either(objective for objective in SCORING_OBJECTIVES if objective not in WITH_REFERENCE)
        raise RefusedError(
            f"{job} of all weights needs a second model as the reference, which is not offered",
            where=name,
            found="no adapter",
            expected=f"{job} by LoRA, whose reference is the base model; or {without}, which needs no reference",
            hint=f"train an adapter (LoRA), or choose {without} in the file",
        )
    datasets, eval_datasets = read_datasets(result)
    if is_unsloth:  # it puts rows of every form into the chat template
        for entry in datasets:
            entry.pop("as_chat", None)
    for key, value in data.items():
        if key == "stage" and job == "pretraining":
            result.notes.append("stage: pt: rows are texts, trained whole.")
        elif tool == "trl" and key == "max_length" and value is None:
            result.refuse("max_seq_length", key, None, "rows have a largest length here")
        elif key not in TABLES["read as rows"][tool].split():
            result.convert(key, value)
    for key, value in others.items():
        if "." in key and key not in ALIASES:
            result.convert(key, value)
        else:  # called like a key of TRL's or of recipes, but Unsloth has none of that name
            result.leave_out(key, value, "no counterpart here", change=UNKNOWN)
    if job in SCORING_OBJECTIVES:
        result.values.setdefault("objective", job)
    if eval_datasets:
        result.put("eval_datasets", eval_datasets, "eval_datasets", eval_datasets)
    method = "lora" if result.is_lora else "full"
    result.values.setdefault("method", method)
    _accepted(result, datasets)  # before anything counts with the values
    result.values["method"] = method
    for target in [] if result.is_lora else [key for key in result.values if key.startswith("lora.")]:
        del result.values[target]
        result.leave_out(*result.sources.pop(target), "every weight is trained")
    _keep_long_texts(result, datasets)
    _fill_defaults(result)
    _multiply(result, num_gpus)
    _say_defaults(result, datasets)
    result.recipe = _accepted(result, datasets)
    return result


# Files of Unsloth's command line: sections whose keys stand for TRL's arguments, with defaults of their own.


def _from_unsloth(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file for Unsloth as arguments of TRL, which Unsloth calls, and the rest by its names, with their sections."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    is_lora = flat.pop("training.training_type", "lora") == "lora"
    made: dict[str, Any] = {"use_peft": is_lora}
    for name, (target, default) in TABLES["unsloth"].items():
        if not is_lora and target == "load_in_4bit":
            continue  # where all weights are trained, none are packed
        value = flat.pop(name, default if is_lora or not name.startswith("lora.") else None)
        if value is not None and not (target in ("max_steps", "save_steps") and value == 0):
            made[target] = value
    targets = made.get("lora_target_modules")
    if isinstance(targets, str) and targets != "all-linear":
        made["lora_target_modules"] = [one.strip() for one in targets.split(",")]
    if local := flat.pop("data.local_dataset", None):
        paths = local if isinstance(local, list) else [local]
        made["dataset_mixture"] = {"datasets": [{"path": path} for path in paths]}
    made["train_on_inputs"] = not flat.pop("training.train_on_completions", False)
    if reports := [name for name in ("wandb", "tensorboard") if flat.pop(f"logging.enable_{name}", None)]:
        made["report_to"] = reports
    return made, flat


def _keep_long_texts(result: Conversion, datasets: list[Entry]) -> None:
    """Tools that cut long texts into sequences lose nothing of them: axolotl, and LLaMA-Factory where it packs."""
    is_unsaid = result.job == "pretraining" and result.data.get("packing") is None
    cuts = result.tool == "axolotl" or is_unsaid or (result.job == "pretraining" and result.data["packing"] is True)
    if cuts and all(entry.get("type") == "text" for entry in datasets):
        result.values["long_rows"] = "split"
        if not is_off(result.data.get("excess_length_strategy")):
            result.notes.append("axolotl cuts texts into sequences, whatever excess_length_strategy says.")
    if is_unsaid and result.tool == "llama-factory":
        result.change("packing", "documents do not see each other; LLaMA-Factory's do")


def _as_yaml_1_1(data: dict[str, Any]) -> dict[str, Any]:
    """The values as PyYAML gives them to the other tools: `yes` and `off` are booleans there, `4_096` a number."""
    words = {"yes": True, "on": True, "no": False, "off": False}

    def read(value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(r"\d[\d_]{,99}", value):
            return int(value.replace("_", ""))
        return words.get(value.lower(), value) if isinstance(value, str) else value

    return {key: read(value) for key, value in data.items()}


_WRITES_ONE = "`roundpipe init --model MODEL --data ROWS` writes a recipe"


_SCRIPTS = {".ipynb": "a notebook", ".py": "a Python script", ".sh": "a shell script", ".toml": "a TOML file"}


def refuse_scripts(path: Path) -> None:
    """Refuse a notebook or a script, of which no line is read.

    Raises:
        RefusedError: the file's name ends like one of those.
    """
    if kind := _SCRIPTS.get(path.suffix.lower()):
        hint = f"write the arguments of its configuration (SFTConfig, LoraConfig) into a YAML file; {_WRITES_ONE}"
        raise _no_training_file(str(path), kind, hint)


def _other_file(data: Mapping[str, Any]) -> str | None:
    """The kind of a file of none of the tools, by keys anywhere in it, and the way on."""
    inner = [key for value in data.values() if isinstance(value, dict) for key in value]
    for signs, told in TABLES["other files"].items():
        if {*data, *inner} & set(signs.split()):
            return f"this file is {told}; {_WRITES_ONE}"
    return None


def _no_training_file(name: str, found: str, hint: str) -> RefusedError:
    return RefusedError(
        "this is no training file of axolotl, LLaMA-Factory, TRL or Unsloth",
        where=name,
        found=found,
        expected="base_model, or model_name_or_path with dataset, dataset_name or template",
        hint=hint,
    )


def _tool_of(data: dict[str, Any], name: str) -> Tool:
    counts = {tool: sum(key in data for key in TABLES["signs"][tool].split()) for tool in TOOLS}
    best = max(counts, key=lambda tool: counts[tool])
    needed = "base_model" if best == "axolotl" else "model_name_or_path"
    if not counts[best] or needed not in data:
        hint = "a recipe needs no conversion: roundpipe recipes validate FILE" if "model" in data else _WRITES_ONE
        raise _no_training_file(name, ", ".join(list(data)[:8]), _other_file(data) or hint)
    return best


def _fill_defaults(result: Conversion) -> None:
    own = TABLES["defaults"][result.tool]
    defaults = {**own["all"], **own.get(result.job, {})}
    if result.is_lora:
        defaults |= own["lora"]
    if result.is_lora and result.tool == "llama-factory":
        rank = result.data.get("lora_rank")
        defaults["lora_alpha"] = 2 * (rank if rank and isinstance(rank, int) else defaults["lora_rank"])
    for key, strategies in BY_STEPS.items():  # the strategy says steps, and only the tool knows how many
        said = [name for name in strategies if result.data.get(name) == "steps"]
        is_read = key == "save_steps" or result.values.get("val_set_size") or result.values.get("eval_datasets")
        if said and is_read:
            usual = {"save_steps": 500, "eval_steps": result.data.get("logging_steps") or _LOGGING_STEPS[result.tool]}
            result.default(key, usual[key])
            result.without_effect = [name for name in result.without_effect if name not in said]
    for key, value in defaults.items():
        result.default(key, value)


def _multiply(result: Conversion, num_gpus: int) -> None:
    micro = int(result.values.get("micro_batch_size", 1))
    steps = int(result.values.get("gradient_accumulation_steps", 1))
    gpus = f"{num_gpus} GPUs" if num_gpus > 1 else "one GPU"
    sharing = math.prod(size for key in SHARING_KEYS if type(size := result.data.get(key)) is int and size > 0)
    if num_gpus > 1 and sharing > 1:
        gpus += f" / {sharing} that share their rows"
        num_gpus = max(1, num_gpus // sharing)
    result.values["gradient_accumulation_steps"] = steps * num_gpus
    made = f"micro batch {micro} x accumulation {steps} x {gpus}; here the number of GPUs does not multiply it."
    result.notes.append(f"A step has {counted(micro * steps * num_gpus, 'row')}: {made}")
    if steps * num_gpus < 4:
        note = "Several GPUs need more microbatches a step to be busy: gradient_accumulation_steps."
        result.notes.append(note)


def _say_defaults(result: Conversion, datasets: list[Entry]) -> None:
    """Say what follows from keys that the file does not have."""
    tool, data = result.tool, result.data
    if result.defaults:
        shown = ", ".join(f"{target} {short(value)}" for target, value in result.defaults.items())
        result.notes.append(f"The file does not say, and {tool}'s default is: {shown}.")
    if result.defaults.get("lora.target_modules") == _PEFT_TARGETS:
        result.notes.append("PEFT adapts q_proj and v_proj in most models, other modules in some: check the model's.")
    for target in _REQUIRED if tool == "axolotl" else ():
        is_used = result.values["method"] == "lora" or not target.startswith("lora.")
        if is_used and target not in result.values and target not in result.refused:
            result.change(target, f"the file has none, and {tool} has no default: this program's own is used")
    for key in ("template", "chat_template"):
        template = data.get(key)
        if key in result.without_effect and isinstance(template, str) and not template.startswith("tokenizer_default"):
            note = "is the model's own, which its tokenizer has; system texts may differ: `roundpipe data` shows rows."
            result.notes.append(f"The template {template} {note}")
    if tool == "llama-factory" and "do_train" not in data:
        result.notes.append("The file has no do_train: true, without which LLaMA-Factory trains nothing.")
    # TRL trains the whole of a chat unless it is told otherwise, but only the completion of a prompt, or of a pair
    is_said = result.values.get("objective") is not None or "train_on_inputs" in result.values
    if tool == "trl" and not is_said and any(one.get("type") not in ("text", "prompt_completion") for one in datasets):
        what = "only answers are trained; TRL trains the prompts of chats too (here: train_on_inputs: true)"
        result.change("assistant_only_loss", what)


def _accepted(result: Conversion, datasets: list[Entry]) -> dict[str, Any]:
    """The recipe in the schema's order. Values that its checks refuse are left out, one by one.

    Raises:
        RecipeError: a recipe cannot do without one of them.
    """
    while True:
        recipe: dict[str, Any] = {}
        for target in known_keys(Recipe):
            value = datasets if target == "datasets" else result.values.get(target)
            is_choice = target == "save_steps" and target in result.values  # elsewhere null is nothing to write
            if (value is not None or is_choice) and "[]" not in target:
                section = recipe
                *outer, last = target.split(".")
                for part in outer:
                    section = section.setdefault(part, {})
                if isinstance(section, dict):  # else what should be a section is refused first
                    section[last] = value
        try:
            load_text(values_as_yaml(recipe), "recipe.yaml")
            return recipe
        except RecipeError as error:
            result.take_out(error)
