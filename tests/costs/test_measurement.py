"""A machine's measurement: what `plan` makes of it, which files are refused, and that it names no machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_cli.cache import CACHE_VARIABLE, sealed
from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.cli.training import ask_on_cards_worth_using
from roundpipe_cli.costs import hardware, machine, measurement
from roundpipe_cli.costs.block_work import PassWork
from roundpipe_cli.costs.hardware import parse_hardware, rates_of
from roundpipe_cli.costs.measurement import (
    MAX_BYTES,
    Measurement,
    at,
    measurement_of,
    measurement_text,
    own_path,
    read_measurement,
)
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning import choose
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.recipe.load import load_recipe, load_text
from roundpipe_cli.recipe.schema import Recipe
from roundpipe_cli.train import measure
from roundpipe_cli.train.measure import CURVES
from tests.cli.test_terminal_text import said
from tests.support.simulated_cases import simulated

RATES: dict[str, Any] = {
    "products": {"bfloat16": [[1e9, 5e13], [1e12, 1e14]], "float16": [[1e9, 1e14]], "float32": [[1e9, 2e13]]},
    "narrow_products": {"float16": [[1e9, 2e14]]},
    "attention": {"bfloat16": [[1e9, 4e13]], "float16": [[1e9, 4e13]], "float32": [[1e9, 1e13]]},
    "memory": {"float32": [[1e6, 1e12]]}, "unpacking": {"fp8": [[1e6, 2e11]]},
    "link_bytes_per_s": 2e10, "launches_per_s": [[1, 3e4], [2, 2.5e4]], "slowdown": 1.25,
}  # fmt: skip


def worker(name: str = "NVIDIA GeForce RTX 3090", **rates: Any) -> dict[str, Any]:
    return {"device": name, "memory_bytes": 24 * 2**30, **RATES, **rates}


def content(*workers: dict[str, Any]) -> dict[str, Any]:
    """A measurement as the machine writes it, but for its kind and format."""
    return {
        "workers": [*workers] or [worker()] * 2, "processor": machine.processor_name(), "cores": machine.num_cores(),
        "host_memory_bytes": 64 * 2**30, "date": "2026-11-28", "driver": "580.65.06",
        "torch": importlib.metadata.version("torch"), "update_bytes_per_s": 5e10,
    }  # fmt: skip


def measured(*workers: dict[str, Any]) -> Measurement:
    return measurement_of(content(*workers))


def written(path: Path, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(measurement_text({**content(), **changes}), encoding="utf-8")
    return path


def test_plan_takes_a_machines_file_and_says_where_it_was_measured(tmp_path: Path) -> None:
    path = written(tmp_path / "sent.json")
    here = parse_hardware(f"{path},host_memory_gib=48")
    device = here.devices[0]
    assert len(here.devices) == 2 and here.host_memory_bytes == 48 * 2**30 and here.host_memory_bytes_per_s == 5e10
    assert device.link_bytes_per_s == 2e10 and device.memory_bytes == 24 * 2**30 and device.has_bfloat16
    assert parse_hardware(str(path)).host_memory_bytes == 64 * 2**30
    rates, narrow = (rates_of(device, dtype, "fp16") for dtype in ("bfloat16", "float16"))
    assert rates.flops_s(1e12) == pytest.approx(1.25 * 1e12 / 1e14)
    assert rates.flops_s(1e9) == rates.flops_s(1e8) * 10 == pytest.approx(1.25 * 1e9 / 5e13)
    assert narrow.flops_s(1e12) == pytest.approx(1.25 * 1e12 / 2e14)
    assert rates_of(device, "float16", "fp32").flops_s(1e12) == pytest.approx(1.25 * 1e12 / 1e14)
    out, _ = said("plan", "qwen3-1.7b", "--hardware", str(path), "--verbose")
    assert "on sent.json, measured on 2 x RTX 3090, 2026-11-28: as --hardware says" in out
    assert "from measured rates" in out and "data sheet" not in out
    assert "measured on 2 x RTX 3090, 2026-11-28 (driver 580.65.06, torch" in out
    slow = written(tmp_path / "slow.json", workers=[worker(slowdown=2.5)] * 2)
    loaded = load_recipe("qwen3-1.7b", ["pipeline.weight_cache=0"])
    times = [make_plan(loaded, str(one)).arithmetic_s for one in (path, slow)]
    assert 1.9 < times[1] / times[0] <= 2.0


def test_rates_between_sizes_and_operators_of_a_processor() -> None:
    curve = ((1e3, 10.0), (1e5, 30.0))
    assert [at(curve, size) for size in (1, 1e3, 1e4, 1e5, 1e9)] == [10.0, 10.0, pytest.approx(20.0), 30.0, 30.0]
    names, memory = ("NVIDIA GeForce RTX 3090", "cpu"), {"float32": [[1e6, 1e18]]}
    gpu, cpu = (hardware.measured_devices(measured(worker(name, memory=memory)))[0] for name in names)
    work = PassWork()
    work.product(128, 4096, 16, 2)
    assert rates_of(gpu, "bfloat16", "fp32").pass_s(work) == 4 * rates_of(cpu, "bfloat16", "fp32").pass_s(work)


NOT = "this is no measurement, or it is damaged"


def of_worker(**figures: Any) -> Callable[[Path], Path]:
    return lambda path: written(path, workers=[worker(**figures)])


@pytest.mark.parametrize(
    ("write", "what", "found"),
    [
        (lambda path: None, "there is no such measurement", "nothing"),
        (lambda path: path.write_bytes(written(path).read_bytes()[:-90]), NOT, "JSONDecodeError"),
        (lambda path: path.write_bytes(written(path).read_bytes().replace(b"50000000000.0", b"90000000000.0")), NOT,
         "not as it was written"),
        (lambda path: path.mkdir(), NOT, "RefusedError"),
        (os.mkfifo, NOT, "RefusedError"),
        (lambda path: path.write_bytes(b" " * (MAX_BYTES + 1)), NOT, "RefusedError"),
        (lambda path: path.symlink_to(path), NOT, "OSError"),
        (lambda path: path.write_bytes(b'{"sha256": "", "content": ' + b"[" * 900 + b"]" * 900 + b"}"), NOT, ""),
        (lambda path: path.write_bytes(sealed({"layers": []})), NOT, "another document"),
        (lambda path: path.write_text(json.dumps({"device": "GPU", "parts": {}})), NOT, "another document"),
        (lambda path: written(path, format=1), "the measurement is of another version", "format 1"),
        (lambda path: written(path, format=99), "the measurement is of another version", "format 99"),
        (lambda path: written(path, workers=[]), NOT, "no machine has"),
        (lambda path: written(path, workers={}), NOT, "ValueError"),
        (lambda path: written(path, cores=0), NOT, "no machine has"),
        (lambda path: written(path, date="x" * 300), NOT, "no machine has"),
        (lambda path: written(path, torch=None), NOT, "ValueError"),
        (of_worker(slowdown=0), NOT, "no machine has"),
        (of_worker(slowdown=1e9), NOT, "no machine has"),
        (of_worker(link_bytes_per_s=-1e9), NOT, "no machine has"),
        (of_worker(link_bytes_per_s=float("nan")), NOT, "ValueError"),
        (of_worker(memory={"float32": [[1, 1e300]]}), NOT, "ValueError"),
        (of_worker(memory={"float32": [[2, 1], [1, 1]]}), NOT, "do not rise"),
        (of_worker(memory={}), NOT, "a type is missing"),
        (of_worker(launches_per_s=[]), NOT, "do not rise"),
        (of_worker(launches_per_s=[[1, "fast"]]), NOT, "ValueError"),
        (of_worker(launches_per_s=[[1]]), NOT, "ValueError"),
        (of_worker(products={"float16": [[1e9, 1e14]]}), NOT, "a type is missing"),
        (of_worker(attention={"float32": [[1, 1e9]]}), NOT, "a type is missing"),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_refused(write: Any, what: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / "their.json"
    write(path)
    with pytest.raises(RefusedError, match=what) as refused:
        parse_hardware(str(path))
    assert str(path) in str(refused.value) and "roundpipe doctor --measure" in str(refused.value)
    assert found in str(refused.value)


def test_a_files_name_may_have_commas_and_figures_may_follow(tmp_path: Path) -> None:
    path = written(tmp_path / "2x, mine.json+.json")
    assert parse_hardware(f"{path}, host_memory_gib=48").host_memory_bytes == 48 * 2**30
    with pytest.raises(RefusedError, match="unknown figure 'devices'"):
        parse_hardware(f"{path},devices=1")


def test_this_machines_own_measurement_is_used_here_or_said_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `plan`, `--hardware here`, its file and `finetune` alike; other numbers of workers share the cores."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    loaded = load_text("{model: HuggingFaceTB/SmolLM2-135M, datasets: [{path: x.jsonl}], dtype: float32}", "r.yaml")
    before = make_plan(loaded, "here")
    assert before.question.machine_source == "this machine" and "by cores" in " ".join(before.question.hardware.notes)
    slow = {name: {key: [[x, rate / 4] for x, rate in RATES[name][key]] for key in RATES[name]} for name in CURVES}
    own = content(worker("cpu", **slow, link_bytes_per_s=1e10), worker("cpu"))
    written(own_path(), **own)
    here, by_file = (make_plan(loaded, name) for name in ("here", str(written(tmp_path / "sent.json", **own))))
    assert here.step_s == by_file.step_s and here.bubble_ratio == by_file.bubble_ratio
    found = here.question
    rates = found.hardware.devices[0].measured
    assert rates and rates.products["float32"] == ((1e9, pytest.approx(0.4 * 2e13)),), "the mean of their times"
    assert rates.link_bytes_per_s == 1e10 and here.band.why.startswith("from measured rates")
    assert "measured on 2 CPU workers" in found.hardware.description
    assert found.hardware.devices == make_plan(loaded).question.hardware.devices
    assert all(device.measured is not None for device in found.hardware.devices)
    assert not any("by cores" in note for note in found.hardware.notes)
    told: list[object] = []
    ask_on_cards_worth_using(loaded, told.append, None)
    assert any("measured on 2 CPU workers" in str(one) for one in told), "what `finetune` says"
    four = machine.this_machine(machine.cpu_devices(4), "x", (), tmp_path)
    factors = [one.devices[0].measured.slowdown for one in (found.hardware, four) if one.devices[0].measured]
    assert factors == [1.25, 2.5]
    for changes, why in (
        ({"torch": "2.0.0"}, "it was made with torch 2.0.0"),
        ({"processor": "another"}, "it is of another processor"),
        ({"workers": [worker("NVIDIA H100")]}, "it is of other devices"),
        ({"format": 1}, "the measurement is of another version"),
    ):
        written(own_path(), **{**own, **changes})
        answer = make_plan(loaded).question.hardware
        assert all(device.measured is None for device in answer.devices), why
        assert any(note.startswith(machine.NOT_USED) and why in note for note in answer.notes), answer.notes


def test_cards_of_one_name_have_the_rates_that_each_of_them_has() -> None:
    slow = {"products": {**RATES["products"], "float32": [[1e9, 1e13]]}, "link_bytes_per_s": 1e10}
    both = [worker(), worker(memory_bytes=20 * 2**30, **slow), worker("other", memory_bytes=2**30)]
    for cards in (both, both[::-1]):
        rates = measured(*cards).rates_for(lambda name: name != "other")
        assert rates is not None and (rates.link_bytes_per_s, rates.memory_bytes) == (1e10, 20 * 2**30)
        assert at(rates.products["float32"], 1e9) == pytest.approx(2 / (1 / 1e13 + 1 / 2e13))
    assert measured(*both).rates_for(lambda name: name == "none") is None


def test_a_card_that_is_named_twice_gives_each_worker_its_part() -> None:
    whole = hardware.measured_devices(measured())[0]
    half = hardware.part_of(whole, 0.5)
    assert whole.measured and half.measured and half.measured.slowdown == 2 * whole.measured.slowdown
    again = hardware.with_measured(replace(half, name="rtx-3090", measured=None), measured())
    assert again is not None and again.measured == half.measured


def test_a_card_that_somebody_measured_is_planned_by_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "2x3090.json")
    monkeypatch.setattr(measurement, "SENT", tmp_path)
    measurement.sent_measurements.cache_clear()
    try:
        known, given, other = map(parse_hardware, ("4x3090", "4x3090:acc32_tflops=60", "1x4090"))
    finally:
        measurement.sent_measurements.cache_clear()
    assert all(device.measured for device in known.devices) and "measured on 2 x RTX 3090" in " ".join(known.notes)
    assert not any(device.measured for device in (*given.devices, *other.devices))


def test_files_that_were_sent_can_be_read() -> None:
    assert (measurement.SENT / "README.md").is_file()
    for path in measurement.SENT.glob("*.json"):
        assert read_measurement(path).workers


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_measurement_is_kept_for_plan_however_it_is_shown(words: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "measure_machine", lambda tell: content())  # which takes minutes
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    said("doctor", "--measure", str(tmp_path / "sent.json"), *words)
    assert own_path().read_bytes() == (tmp_path / "sent.json").read_bytes() == measurement_text(content()).encode()


@pytest.mark.sweep
def test_cpu_workers_are_measured_and_the_file_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path = tmp_path / "sent.json"
    out, _ = said("doctor", "--measure", str(path))
    assert "measured on 2 CPU workers" in out and "a small run's step" in out
    text = path.read_text(encoding="utf-8")
    assert str(tmp_path) not in text and socket.gethostname() not in text and "/" not in text
    assert own_path().read_bytes() == path.read_bytes() and len(parse_hardware(str(path)).devices) == 2
    assert all(one.products and one.unpacking for one in read_measurement(path).workers)


def test_a_part_that_fails_or_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measure, "PARTS", {"no_such_part": None})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def again(part: str) -> None:
        assert [path.name[:9] for path in tmp_path.iterdir()] == ["roundpipe"]
        with pytest.raises(RefusedError, match="another `roundpipe doctor --measure` is at work"):
            measure.measure_machine(told.append)

    told: list[str] = []
    with pytest.raises(RefusedError, match="could not be measured") as failed:
        measure.measure_machine(again)
    monkeypatch.setattr(measure, "PART_LIMIT_S", 0.01)
    with pytest.raises(RefusedError, match="could not be measured") as late:
        measure.measure_machine(told.append)
    assert "no_such_part" in str(failed.value) and "KeyError" in str(failed.value) and "timed out" in str(late.value)
    assert told == ["no such part"] and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, why in ((tmp_path, "a folder"), (tmp_path / "no" / "x.json", "no folder")):
        _, words = said("doctor", "--measure", str(path), code=2)
        assert "cannot write" in words and why in words and "measuring" not in words
    assert "a file is for --measure" in said("doctor", "mine.json", code=2)[1]
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    _, words = said("doctor", "--measure", code=5)
    assert "this machine's own measurement" in words and "measuring" not in words


def test_simulated_cards_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"products": ((8, 16, 16), (16, 16, 32)), "attention": ((2, 8, 16),), "memory": ((256,), (1024,))}
    small |= {"narrow_products": small["products"], "unpacking": ((16, 64),)}
    monkeypatch.setattr(measure, "CURVES", {name: (small[name], *one[1:]) for name, one in CURVES.items()})
    sizes = {"LINK_BYTES": 2**16, "UPDATED": 2**12, "BLOCKS": 1, "VOCABULARY": 64}
    for name, value in {"EACH_S": 1e-4, "LAUNCHING_S": 0.05, **sizes}.items():
        monkeypatch.setattr(measure, name, value)
    figures: dict[str, Any] = {}
    with simulated(0):
        for part in [part for part in measure.PARTS if part != "small_run"]:
            measure.add_part(part, ["cuda:0", "cuda:1"], figures)
    first, second = measurement_of(figures).workers
    assert [first.device, second.device] == ["Simulated 90", "Simulated 75"] and first.slowdown == 1.0
    assert {*first.narrow_products} == {"float16"} and len(first.products["float16"]) == 2
    assert "bfloat16" not in second.products, "the second card has none"
    runs = list[Recipe]()
    monkeypatch.setattr(measure, "step_s_of_run", lambda loaded: runs.append(loaded.recipe) or 3.0)  # it takes seconds
    with simulated(0):
        factors = [one["slowdown"] for one in measure.add_part("small_run", ["cuda:0", "cuda:1"], figures)["workers"]]
    assert factors[0] == factors[1] > 0, "of all workers together"
    assert [(one.pipeline.devices, one.gradient_accumulation_steps) for one in runs] == [(("cuda:0", "cuda:1"), 8)]
    for library, forms in ((None, {"fp8", "mxfp4", "fp8_blocks"}), (torch, {*PACKED_FORMATS})):
        monkeypatch.setattr(measure, "import_bitsandbytes", lambda: library)  # noqa: B023
        assert {*measure._names("unpacking", torch.device("cpu"))} == forms
    monkeypatch.setattr(measure, "MOST_S", 1e-12)
    with simulated(0):
        slow = measure.add_part("products", ["cuda:0"], {})["workers"][0]["products"]
    assert [len(curve) for curve in slow.values()] == [1, 1, 1], "each type of a slow device has its smallest size"
