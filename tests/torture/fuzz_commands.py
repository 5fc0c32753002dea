"""More files from elsewhere, for `fuzz.py`: whole commands, and a resumed run, are given folders of damaged ones."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

from roundpipe_cli.cache import CACHE_VARIABLE
from tests.support.convert_files import EXAMPLES
from tests.support.e2e import CHAT_TEMPLATE, STAGES, make_model, run, write_recipe, write_rows
from tests.torture.fuzz import Reader, fuzz
from tests.torture.mutations import damage_bytes, damage_json, damage_one, damage_text, damages


def _in_folder(folder: Path) -> None:
    os.chdir(folder)
    os.environ[CACHE_VARIABLE] = str(folder / "cache")


def _make_recipe(folder: Path) -> None:
    make_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    rest: dict[str, Any] = {
        "warmup_steps": 0.1,
        "pipeline__recompute": "layer",
        "eval_datasets": [{"path": "rows.jsonl"}],
    }
    rest |= {"lora__target_modules": ["q_proj", "v_proj"], "weight_decay": 0.1, "pipeline__devices": "auto"}
    write_recipe(folder / "recipe.yaml", packing="auto", hardware="2x4090", report_to=[], **rest)


def _read_recipe(folder: Path) -> None:
    from roundpipe_cli.cli.plan import plan

    _in_folder(folder)
    plan("recipe.yaml", [], json_=True)


def _make_costs(folder: Path) -> None:
    folder.mkdir()
    times = {"recompute": True, "param_bytes": 100, "boundary_bytes": 10, "grad_bytes": 5, "optimizer_s": 0.001}
    layers = [{"name": f"block.{n}", "forward_s": 0.01, "backward_s": 0.02, **times} for n in range(4)]
    layers.append({"name": "head", "forward_s": 0.02, "backward_s": 0.04, "recompute": False})
    costs = {"name": "tiny", "hop_s": 0.003, "link_bytes_per_s": 1e9, "slots": 2, "worker_speed": [1.0, 0.5]}
    (folder / "costs.json").write_text(json.dumps({**costs, "layers": layers}))


def _read_costs(folder: Path) -> None:
    from roundpipe_cli.cli.bench import bench

    _in_folder(folder)
    bench(costs=Path("costs.json"), workers=2, microbatches=4, json_output=True)


_OTHERS = {"axolotl.yaml": "axolotl_sharegpt", "factory.yaml": "factory_full", "trl.yaml": "trl_lora"}


def _make_others(folder: Path) -> None:
    (folder / "sets").mkdir(parents=True)
    write_rows(folder / "sets" / "rows.jsonl")
    for name, example in _OTHERS.items():
        (folder / name).write_text(EXAMPLES[example].text)
    columns = {"columns": {"messages": "turns"}, "tags": {"role_tag": "from", "content_tag": "value"}}
    table = {"my_rows": {"file_name": "rows.jsonl", "formatting": "sharegpt", **columns}}
    (folder / "sets" / "dataset_info.json").write_text(json.dumps({**table, "other": {"hf_hub_url": "a/b"}}))


def _read_others(folder: Path) -> None:
    from roundpipe_cli.cli.convert import convert
    from roundpipe_cli.recipe.load import load_recipe

    _in_folder(folder)
    for name in _OTHERS:
        convert(Path(name), output=Path(f"new-{name}"))
        load_recipe(f"new-{name}", [])
        convert(Path(name), json_=True)


def _rows(index: int) -> list[dict[str, Any]]:
    """Six rows of one of six forms."""
    user, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    forms: tuple[dict[str, Any], ...] = (
        {"messages": [{"role": "system", "content": "Be brief"}, user, answer]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day"}]},
        {"instruction": "Say it", "input": "now", "output": "it"},
        {"prompt": "Say it: ", "completion": "it"},
        {"text": "a text of some words"},
        {"messages": [user, {"role": "assistant", "content": "", "tool_calls": [call]}, answer], "tools": tools},
    )
    return [dict(forms[index]) for _ in range(6)]


def _make_rows(folder: Path) -> None:
    make_model(folder / "model")
    for index in range(6):
        rows = _rows(index)
        (folder / f"{index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{index}.json").write_text(json.dumps(rows))
    (folder / "2.csv").write_text("instruction,input,output\n" + 'say,"it ""now""\nplease",good\n' * 6)
    (folder / "4.tsv").write_text("text\tother\n" + "words\t1\n" * 6)
    (folder / "4.txt").write_text("a paragraph\nof two lines\n\n" * 6)
    (folder / "template.jinja").write_text(CHAT_TEMPLATE)
    write_recipe(folder / "recipe.yaml", chat_template="template.jinja", on_bad_row="skip")
    (folder / "chosen").write_text("0.jsonl")


def _damage_rows(folder: Path, draw: random.Random) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.name[0].isdigit())
    name = draw.choice(names)
    (folder / "chosen").write_text(name)
    damage_one(folder, draw, name if draw.random() < 0.95 else "template.jinja")


def _read_rows(folder: Path) -> None:
    from roundpipe_cli.cli.data import data

    _in_folder(folder)
    chosen = Path("chosen")
    name = chosen.read_text() if chosen.is_file() and chosen.stat().st_size < 100 and not chosen.is_symlink() else ""
    data("recipe.yaml", [f"datasets=[{{path: {name or '0.jsonl'}}}]"], json_=True, offline=True)


_SHARDS = ("Weights.safetensors", "weights.safetensors")  # their names differ by case alone


def _make_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_model(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()  # it would be read in place of the index
    names = sorted(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for shard, half in zip(_SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, folder / shard)
    weight_map = {name: shard for shard, half in zip(_SHARDS, halves, strict=True) for name in half}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _damage_weights(folder: Path, draw: random.Random) -> None:
    if draw.random() < 0.4:
        damage_json(folder / "model.safetensors.index.json", draw)
        return
    path = folder / draw.choice(_SHARDS)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = folder / "header.json"
    header.write_bytes(data[8 : 8 + length])
    damage_json(header, draw)
    raw = header.read_bytes()
    header.unlink()
    path.write_bytes((len(raw) if draw.random() < 0.9 else draw.choice((0, 2**63, length))).to_bytes(8, "little"))
    with path.open("ab") as file:
        file.write(raw + data[8 + length :])


def _read_weights(folder: Path) -> None:
    import torch

    from roundpipe_cli.model.files.source import resolve_model
    from roundpipe_cli.model.load import build_skeleton, load_config
    from roundpipe_cli.model.weights_io import load_weights

    source = resolve_model(str(folder), revision=None, recipe_folder=folder, offline=True)
    load_weights(source, build_skeleton(load_config(source), torch.float32), lambda name, values: None)


def make_trained(folder: Path) -> None:
    """A run of three steps with evaluations and a checkpoint of each step."""
    make_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    write_recipe(folder / "recipe.yaml", eval_datasets=[{"path": "rows.jsonl"}], eval_steps=1, **STAGES)
    surroundings = {CACHE_VARIABLE: str(folder / "cache")}
    run(folder, "finetune", "recipe.yaml", "max_steps=3", "save_steps=1", environment=surroundings).expect(0)
    for path in folder.glob(".log-*"):
        path.unlink()


def _make_checkpoint(folder: Path) -> None:
    make_trained(folder)
    (folder / "out" / "report.json").unlink()  # as if it had been killed before its end


def _damage_checkpoint(folder: Path, draw: random.Random) -> None:
    """A file of the newest checkpoint, mostly with a manifest that knows the damage; or one beside it."""
    newest = max((folder / "out").glob("step-*"))
    if draw.random() < 0.3:
        own = ("metrics.jsonl", "eval.jsonl", "events.jsonl", "recipe.yaml", f"{newest.name}/manifest.json")
        damage_one(folder / "out", draw, *own)
        return
    names = tuple(path.name for path in newest.iterdir() if path.name != "manifest.json")
    name = "state.json" if draw.random() < 0.7 else draw.choice(names)
    damage_one(newest, draw, name)
    if draw.random() < 0.8:
        manifest = json.loads((newest / "manifest.json").read_text())
        data = (newest / name).read_bytes()
        for record in manifest["files"]:
            if record["name"] == name:
                record |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (newest / "manifest.json").write_text(json.dumps(manifest))


def _load_training(folder: Path) -> None:
    import tests.support.preload  # noqa: F401


def _read_checkpoint(folder: Path) -> None:
    from roundpipe_cli.cli.finetune import finetune

    _in_folder(folder)
    finetune("recipe.yaml", ["max_steps=4", "save_steps=1"], resume=True, no_dashboard=True, offline=True)


def _make_hub(folder: Path) -> None:
    home = folder / "hub" / "models--me--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    made = make_model(folder / "made")
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "snapshots" / commit).mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    for path in made.iterdir():
        blob = home / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (home / "snapshots" / commit / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    made.rmdir()


def _damage_hub(folder: Path, draw: random.Random) -> None:
    files = sorted(path for path in (folder / "hub").rglob("*") if path.is_file() and not path.is_symlink())
    small = [path for path in files if path.stat().st_size < 5000]
    path = (folder / "hub" / "models--me--tiny" / "refs" / "main") if draw.random() < 0.3 else draw.choice(small)
    draw.choice((damage_bytes, damage_text))(path, draw)


def _read_hub(folder: Path) -> None:
    from huggingface_hub import constants

    from roundpipe_cli.model.files.source import resolve_model
    from roundpipe_cli.model.load import load_config, load_tokenizer

    before, constants.HF_HUB_CACHE = constants.HF_HUB_CACHE, str(folder / "hub")
    try:
        source = resolve_model("me/tiny", revision=None, recipe_folder=folder, offline=True)
        load_config(source)
        load_tokenizer(source)
    finally:
        constants.HF_HUB_CACHE = before


READERS = {
    "recipe": Reader(_make_recipe, damages("recipe.yaml"), _read_recipe),
    "costs": Reader(_make_costs, damages("costs.json"), _read_costs),
    "convert": Reader(_make_others, damages(*_OTHERS, "sets/dataset_info.json"), _read_others),
    "rows": Reader(_make_rows, _damage_rows, _read_rows),
    "weights": Reader(_make_weights, _damage_weights, _read_weights),
    "checkpoint": Reader(_make_checkpoint, _damage_checkpoint, _read_checkpoint, _load_training),
    "hub": Reader(_make_hub, _damage_hub, _read_hub),
}
TRIALS = {name: functools.partial(fuzz, name, reader) for name, reader in READERS.items()}
