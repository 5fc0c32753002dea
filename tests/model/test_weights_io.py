"""Weights from transformers' own files into the store, to the bit; files that are refused; memory while loading."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.events import Event
from roundpipe_cli.model.files.source import ModelSource, resolve_model
from roundpipe_cli.model.files.untrusted import check_model_folder
from roundpipe_cli.model.layout import layer_parameters, make_layout
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.lora import LoraSettings, add_lora
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.stored import tensors
from roundpipe_cli.model.stored.tensors import base_name
from roundpipe_cli.model.weights_io import load_weights
from tests.support.tiny import make_rig, tiny_config

INDEX = "model.safetensors.index.json"


def save_tiny(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A tiny model as transformers builds and saves it, with random weights."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder), **options)  # type: ignore[operator]
    return model


def load(
    folder: Path, dtype: torch.dtype = torch.float32, lora: bool = False
) -> tuple[WeightStore, list[str], nn.Module]:
    """The store that `load_weights` fills from `folder`, its notices, and the skeleton."""
    source = ModelSource("tiny", folder)
    skeleton = build_skeleton(load_config(source), dtype)
    split = split_model(skeleton)
    if lora:
        add_lora(skeleton, LoraSettings(r=2, alpha=4), dtype=dtype, base_name="tiny")
    layouts = [
        make_layout(name, parameters, dtype)
        for name, parameters in zip(split.layer_names(), layer_parameters(skeleton, split), strict=True)
    ]
    store = WeightStore(layouts)
    return store, load_weights(source, skeleton, store.set_parameter), skeleton


def check_equal(store: WeightStore, model: nn.Module) -> None:
    expected = dict(model.named_parameters())
    got = {base_name(name): view for name, view in store.views.items() if ".lora_" not in name}
    assert got.keys() == expected.keys()
    for name, parameter in expected.items():
        assert got[name].dtype == parameter.dtype and torch.equal(got[name], parameter), name


@pytest.mark.covering(2)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"], ids=["one-file", "shards"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "opt", "qwen3_moe", "mixtral", "phi"])
def test_loaded_weights_equal_the_saved_to_the_bit(
    tmp_path: Path, model_type: str, shard_size: str, lora: bool
) -> None:
    model = save_tiny(tmp_path, model_type, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "60KB")
    store, notices, _ = load(tmp_path, lora=lora)
    check_equal(store, model)
    assert notices == []


def test_fused_experts_come_from_a_tensor_per_expert(tmp_path: Path) -> None:
    """Most real checkpoints have each expert by itself; with one that lacks, its weight is refused by name."""
    save_tiny(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.mlp.experts.3.down_proj.weight"
    del tensors[key]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="another shape than the architecture") as caught:
        load(tmp_path)
    assert "experts.down_proj" in str(caught.value)


def test_tensors_without_a_place_in_the_architecture_are_named(tmp_path: Path) -> None:
    """DeepSeek's checkpoints have one more layer, which predicts further tokens."""
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.61.eh_proj.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path)[1] == [
        "left out, for they have no place in this architecture: 1 of the files' tensors, model.layers.61.eh_proj.weight"
    ]


def test_bfloat16_file_and_float32_training(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama", torch.bfloat16)
    check_equal(load(tmp_path, torch.bfloat16)[0], model)
    check_equal(load(tmp_path, torch.float32)[0], model.float())


def test_persistent_buffers_are_loaded(tmp_path: Path) -> None:
    """glm4_moe's routers correct their scores by a buffer of the checkpoint."""
    model = save_tiny(tmp_path, "glm4_moe")
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    assert buffers
    for buffer in buffers.values():
        buffer.uniform_()
    model.save_pretrained(str(tmp_path))  # type: ignore[operator]
    loaded = dict(load(tmp_path)[2].named_buffers())
    for name, buffer in buffers.items():
        assert torch.equal(loaded[name], buffer), name


def test_weights_without_the_backbone_s_prefix(tmp_path: Path) -> None:
    """gpt2 on the hub is saved without `transformer.`."""
    model = save_tiny(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    save_file({key.removeprefix("transformer."): value for key, value in load_file(path).items()}, path)
    store, notices, _ = load(tmp_path)
    check_equal(store, model)
    assert notices == []


def test_saved_model_loads_as_it_was(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from roundpipe_cli.model.weights_io import save_model

    rig = make_rig("gemma3_text")
    save_model(rig.skeleton, rig.store.views, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, rig.store.views[name]), name


# -- refused -------------------------------------------------------------------------------------------------------

Damage = Callable[[dict[str, torch.Tensor]], None]
NAME = "model.layers.1.mlp.up_proj.weight"


def set_value(value: float) -> Damage:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NAME][3, 5] = value

    return damage


def cut_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME] = tensors[NAME][:-1].clone()


def remove(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NAME]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (remove, "missing"),
        (cut_rows, "another shape"),
        (set_value(float("nan")), "not finite"),
        (set_value(float("-inf")), "not finite"),
    ],
)
def test_a_damaged_tensor_is_refused_by_name(tmp_path: Path, damage: Damage, what: str) -> None:
    save_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    with pytest.raises(RefusedError, match=what) as caught:
        load(tmp_path)
    assert caught.value.exit_code == 2
    assert NAME in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_but_finite_weights_are_accepted(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whether a tensor is finite is asked of its sum, which must not overflow by itself."""
    model = save_tiny(tmp_path, "llama", dtype)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[NAME].fill_(6e4)
    save_file(tensors, path, metadata={"format": "pt"})
    assert float(load(tmp_path, dtype)[0].views[NAME].max()) > 5e4
    assert not torch.equal(dict(model.named_parameters())[NAME], tensors[NAME])


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_weight_that_overflows_in_float16_is_named(tmp_path: Path, model_type: str) -> None:
    """Infinities were trained, and the first step blamed rows and learning rate; bfloat16 has room."""
    save_tiny(tmp_path, model_type)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = NAME if model_type == "llama" else next(name for name in tensors if "experts.1.up_proj" in name)
    tensors[name][-1, -1] = -7e4
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="overflows in float16") as caught:
        load(tmp_path, torch.float16)
    assert caught.value.exit_code == 2 and name in str(caught.value) and "7e+04" in str(caught.value)
    load(tmp_path, torch.bfloat16)
    tensors[name][-1, -1] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RefusedError, match="not finite"):
        load(tmp_path, torch.float16)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "model.bin"])
def test_an_index_that_leads_outside_is_refused(tmp_path: Path, shard: str) -> None:
    save_tiny(tmp_path, "llama", max_shard_size="60KB")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][NAME] = shard
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(RefusedError, match="outside the model folder") as caught:
        load(tmp_path)
    assert repr(shard) in str(caught.value)


def test_a_link_that_leads_outside_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, "llama", max_shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(RefusedError, match="outside the model folder"):
        load(folder)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(RefusedError, match=f"no {shard.name}"):
        load(tmp_path)


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    """Both in one folder: the shards were read here, the single file there."""
    from transformers import AutoModelForCausalLM

    save_tiny(tmp_path, "llama", max_shard_size="60KB")
    other = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32)
    save_file({name: value.contiguous() for name, value in other.state_dict().items()}, tmp_path / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    store, _, _ = load(tmp_path)
    assert torch.equal(store.views[NAME], expected[NAME]) and torch.equal(expected[NAME], other.state_dict()[NAME])
    told: list[str] = []

    def note(event: Event) -> None:
        told.append(str(event))

    for _ in range(2):
        resolve_model(str(tmp_path), revision=None, recipe_folder=tmp_path, offline=True, tell=note)
    assert len(told) == 1 and "model.safetensors is read, as transformers does" in told[0], told
    sorted(tmp_path.glob("model-0*.safetensors"))[0].unlink()  # nobody reads it
    assert torch.equal(load(tmp_path)[0].views[NAME], expected[NAME])


def test_a_file_of_weights_that_the_configuration_names_is_refused(tmp_path: Path) -> None:
    """transformers reads that file, in place of the usual one."""
    save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    with pytest.raises(RefusedError, match=r"other\.safetensors"):
        resolve_model(str(tmp_path), revision=None, recipe_folder=tmp_path, offline=True)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    save_tiny(tmp_path, "llama", max_shard_size="60KB")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(RefusedError) as caught:
        load(tmp_path)
    assert INDEX in str(caught.value)


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, 5000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    save_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(RefusedError, match="cannot be read") as caught:
        check_model_folder(tmp_path)
    assert str(path) in str(caught.value)


# -- memory --------------------------------------------------------------------------------------------------------

_MEASURE = """
import os
import sys
from pathlib import Path
import torch
from roundpipe_cli.engine.weights import WeightStore
from roundpipe_cli.model.layout import make_layout
from roundpipe_cli.model.load import build_skeleton, load_config
from roundpipe_cli.model.files.source import ModelSource, resolve_model
from roundpipe_cli.model.split import split_model
from roundpipe_cli.model.weights_io import load_weights
from roundpipe_cli.model.layout import layer_parameters

def status_bytes(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return 1024 * int(line.split()[1])

def build(folder):
    source = ModelSource("tiny", Path(folder))
    return source, build_skeleton(load_config(source), torch.bfloat16)

build(sys.argv[1])  # imports what both need
for folder in sys.argv[1:]:  # the peak of a forked process begins with what it has then
    child = os.fork()
    if child == 0:
        break
    assert os.waitpid(child, 0)[1] == 0
else:
    sys.exit()
source, skeleton = build(folder)
split = split_model(skeleton)
for parameter in skeleton.parameters():
    parameter.requires_grad_(False)
base = status_bytes("VmRSS")
layouts = [
    make_layout(name, parameters, torch.bfloat16)
    for name, parameters in zip(split.layer_names(), layer_parameters(skeleton, split), strict=True)
]
store = WeightStore(layouts)
load_weights(source, skeleton, store.set_parameter)
weights = sum(layout.num_bytes for layout in layouts)
print(status_bytes("VmHWM") - base, weights, max(layout.num_bytes for layout in layouts), flush=True)
"""


@pytest.mark.parametrize(("max_bytes", "most"), [(tensors.MAX_MAPPED_BYTES, 1), (50_000, 9)])
def test_a_file_is_not_opened_for_every_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, most: int
) -> None:
    """Opening reads the whole header: 49 s of processor time for a model of 500 layers of width 8, now 1.4 s."""
    model, opened = save_tiny(tmp_path, "llama"), []
    opening = tensors.open_shard
    monkeypatch.setattr(tensors, "open_shard", lambda path: opened.append(path) or opening(path))
    monkeypatch.setattr(tensors.OpenFiles.close_if_read, "__defaults__", (max_bytes,))
    store, _, _ = load(tmp_path)
    check_equal(store, model)
    assert 1 <= len(opened) <= most < len(list(model.parameters()))
    assert (len(opened) > 1) == (max_bytes == 50_000)


SHARD_SIZES = {"one-file": "1GB", "shards": "50MB"}


@pytest.fixture(scope="module")
def host_memory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int, int]]:
    """Name of `SHARD_SIZES` -> peak above the base, bytes of all weights, and of the largest layer."""
    from transformers import AutoModelForCausalLM

    changes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7, "vocab_size": 4096}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", **changes), dtype=torch.bfloat16)
    model.to_empty(device="cpu")  # drawing 90 million numbers takes longer than all the rest
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    folders = [tmp_path_factory.mktemp(name) for name in SHARD_SIZES]
    for folder, size in zip(folders, SHARD_SIZES.values(), strict=True):
        model.save_pretrained(str(folder), max_shard_size=size)
    del model
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    return dict(zip(SHARD_SIZES, found, strict=True))  # type: ignore[arg-type]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("files", SHARD_SIZES)
def test_host_memory_while_loading(host_memory: dict[str, tuple[int, int, int]], files: str) -> None:
    """Peak above the interpreter's base: at most 1.1x the weights plus twice the largest layer."""
    peak, weights, largest = host_memory[files]
    assert weights > 180e6
    assert weights < peak <= 1.1 * weights + 2 * largest
