"""A machine's measurement: what `plan` makes of it, which files are refused, and that it names no machine."""

from __future__ import annotations

import importlib.metadata
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.cache import CACHE_VARIABLE, sealed, unsealed
from roundpipe_cli.cli.training import ask_on_cards_worth_using
from roundpipe_cli.costs import hardware, machine, measurement
from roundpipe_cli.costs.block_work import PassWork
from roundpipe_cli.costs.hardware import parse_hardware, rates_of
from roundpipe_cli.costs.measurement import MAX_BYTES, at, own_path, read_measurement, write_measurement
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.recipe.load import load_recipe, load_text
from roundpipe_cli.train import measure
from roundpipe_cli.train.prepare.devices import make_backends
from tests.cli.test_terminal_text import said
from tests.support.simulated_cases import simulated

RATES: dict[str, Any] = {
    "products": {"bfloat16": [[1e9, 5e13], [1e12, 1e14]], "float16": [[1e9, 1e14]], "float32": [[1e9, 2e13]],
                 "float16 in 16 bit": [[1e9, 2e14]]},
    "attention": {"bfloat16": [[1e9, 4e13]], "float16": [[1e9, 4e13]], "float32": [[1e9, 1e13]]},
    "memory": [[1e6, 1e12]],
    "unpacking": {"fp8": 2e11},
    "up_bytes_per_s": 2.2e10, "down_bytes_per_s": 2.3e10, "both_bytes_per_s": 2e10,
}  # fmt: skip


def content(name: str = "NVIDIA GeForce RTX 3090", count: int = 2, **rates: Any) -> dict[str, Any]:
    """A measurement as the machine writes it, but for its kind and format."""
    worker = {"device": name, "memory_bytes": 24 * 2**30, **RATES, **rates}
    return {
        "workers": [worker] * count, "processor": machine.processor_name(), "cores": machine.num_cores(),
        "host_memory_bytes": 64 * 2**30, "date": "2026-11-28", "driver": "580.65.06",
        "torch": importlib.metadata.version("torch"),
        "host": {"launches_per_s": {"1": 3e4, "2": 2.5e4}, "adding_bytes_per_s": 3e10, "update_bytes_per_s": 5e10},
        "step": {"predicted_s": 1.0, "measured_s": 1.25},
    }  # fmt: skip


def written(path: Path, **changes: Any) -> Path:
    write_measurement(path, {**content(), **changes})
    return path


def test_plan_takes_a_machines_file_and_says_where_it_was_measured(tmp_path: Path) -> None:
    """Rates, link and memory are the file's; small products have their own rate; all is longer by the small run."""
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
    assert "on 2 x RTX 3090, 2026-11-28 (sent.json): as --hardware says" in out and "from measured rates" in out
    assert "measured on 2 x RTX 3090, 2026-11-28 (driver 580.65.06, torch" in out and "data sheet" not in out
    slow = written(tmp_path / "slow.json", step={"predicted_s": 1.0, "measured_s": 2.5})
    loaded = load_recipe("qwen3-1.7b", ["pipeline.weight_cache=0"])
    times = [make_plan(loaded, str(one)).device_step_s for one in (path, slow)]
    assert 1.9 < times[1] / times[0] <= 2.0


def test_rates_between_sizes_and_operators_of_a_processor() -> None:
    """A processor wastes no tiles."""
    curve = ((1e3, 10.0), (1e5, 30.0))
    assert [at(curve, size) for size in (1, 1e3, 1e4, 1e5, 1e9)] == [10.0, 10.0, pytest.approx(20.0), 30.0, 30.0]
    names, memory = ("NVIDIA GeForce RTX 3090", "cpu"), [[1e6, 1e18]]
    gpu, cpu = (hardware.measured_devices(measurement._measurement(content(name, memory=memory)))[0] for name in names)
    work = PassWork()
    work.product(128, 4096, 16, 2)
    assert rates_of(gpu, "bfloat16", "fp32").pass_s(work) == 4 * rates_of(cpu, "bfloat16", "fp32").pass_s(work)


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda path: None, "there is no such measurement"),
        (lambda path: path.write_bytes(written(path).read_bytes()[:-90]), "the file of a measurement is damaged"),
        (lambda path: path.write_bytes(written(path).read_bytes().replace(b"2e+11", b"9e+11").replace(
            b"200000000000.0", b"900000000000.0")), "the file of a measurement is damaged"),
        (lambda path: path.mkdir(), "the file of a measurement is damaged"),
        (lambda path: path.write_bytes(sealed({"layers": []})), "this is no measurement"),
        (lambda path: path.write_text(json.dumps({"device": "GPU", "parts": {}})), "this is no measurement"),
        (lambda path: written(path, format=0), "the measurement is of another version"),
        (lambda path: written(path, format=99), "the measurement is of another version"),
        (lambda path: written(path, workers=[]), "a measurement lacks figures"),
        (lambda path: written(path, host={"launches_per_s": {}}), "a measurement lacks figures"),
        (lambda path: written(path, step={"predicted_s": 0, "measured_s": 1}), "a measurement lacks figures"),
        (lambda path: written(path, workers=[{**content()["workers"][0], "memory": [[2, 1], [1, 1]]}]),
         "a measurement lacks figures"),
        (lambda path: written(path, workers=[{**content()["workers"][0], "attention": {"float32": [[1, -1]]}}]),
         "a measurement lacks figures"),
    ],
)  # fmt: skip
def test_a_damaged_foreign_or_older_file_is_refused_by_name(
    write: Callable[[Path], object], what: str, tmp_path: Path
) -> None:
    path = tmp_path / "their.json"
    write(path)
    with pytest.raises(RefusedError, match=what) as refused:
        parse_hardware(str(path))
    assert str(path) in str(refused.value) and "roundpipe doctor --measure" in str(refused.value)


def test_this_machines_own_measurement_is_used_here_or_said_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan`, `plan --hardware here` and `finetune` ask the same question; other numbers of workers share the cores."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PATH", "")
    loaded = load_text("{model: HuggingFaceTB/SmolLM2-135M, datasets: [{path: x.jsonl}], dtype: float32}", "r.yaml")
    before = make_plan(loaded, "here")
    assert before.question.machine_source == "this machine" and "by cores" in " ".join(before.question.hardware.notes)
    own = content("cpu")
    write_measurement(own_path(), own)
    found = make_plan(loaded, "here").question
    assert "measured on 2 CPU workers" in found.hardware.description
    assert found.hardware.devices == make_plan(loaded).question.hardware.devices
    assert all(device.measured is not None for device in found.hardware.devices)
    assert not any("by cores" in note for note in found.hardware.notes)
    told: list[object] = []
    ask_on_cards_worth_using(loaded, told.append, None)
    assert any("measured on 2 CPU workers" in str(one) for one in told), "what `finetune` says"
    four = machine.this_machine(machine.cpu_devices(4), "x", (), tmp_path)
    factors = [one.devices[0].measured.time_factor for one in (found.hardware, four) if one.devices[0].measured]
    assert factors == [1.25, 2.5]
    for changes, why in (
        ({"torch": "2.0.0"}, "it was made with torch 2.0.0"),
        ({"processor": "another"}, "it is of another processor"),
        ({"workers": content("NVIDIA H100")["workers"]}, "it is of other devices"),
        ({"format": 0}, "the measurement is of another version"),
    ):
        write_measurement(own_path(), {**own, **changes})
        answer = make_plan(loaded).question.hardware
        assert all(device.measured is None for device in answer.devices), why
        assert any(note.startswith(machine.NOT_USED) and why in note for note in answer.notes), answer.notes


def test_a_card_that_is_named_twice_gives_each_worker_its_part() -> None:
    whole = hardware.measured_devices(measurement._measurement(content()))[0]
    half = hardware.part_of(whole, 0.5)
    assert whole.measured and half.measured and half.measured.time_factor == 2 * whole.measured.time_factor
    again = hardware.with_measured(replace(half, name="rtx-3090", measured=None), measurement._measurement(content()))
    assert again is not None and again.measured == half.measured


def test_a_card_that_somebody_sent_is_planned_by_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """Those of `costs/measured`, with no name of a machine."""
    assert (measurement.SENT / "README.md").is_file()
    for path in measurement.SENT.glob("*.json"):
        assert read_measurement(path).workers


@pytest.mark.sweep
def test_cpu_workers_are_measured_and_the_file_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself, and its small run, which trains: a minute."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path = tmp_path / "sent.json"
    out, _ = said("doctor", "--measure", str(path))
    assert "measured on 2 CPU workers" in out and "a small run's step" in out
    text = path.read_text(encoding="utf-8")
    assert str(tmp_path) not in text and socket.gethostname() not in text and "/" not in text
    found = unsealed(path, MAX_BYTES)
    assert {*found["workers"][0]} >= {"products", "attention", "memory", "unpacking", "both_bytes_per_s"}
    assert own_path().read_bytes() == path.read_bytes()
    assert len(parse_hardware(str(path)).devices) == 2


def test_simulated_cards_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part on two cards at once; what they take is the processor's time."""
    monkeypatch.setattr(measure, "EACH_S", 1e-4)
    monkeypatch.setattr(measure, "LAUNCHING_S", 0.05)
    monkeypatch.setattr(measure, "PRODUCTS", {"cpu": ((8, 16, 16), (16, 16, 32))})
    monkeypatch.setattr(measure, "ATTENTION", {"cpu": ((2, 8, 16),)})
    monkeypatch.setattr(measure, "ELEMENTS", {"cpu": (256, 1024)})
    monkeypatch.setattr(measure, "LINK_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(measure, "ADDED_ELEMENTS", 2**12)
    names = ["cuda:0", "cuda:1"]
    with simulated(0):
        found = measure.identity(names)
        for part in measure.PARTS.values():
            measure.merge(found, part(make_backends(names, 1), "cpu"))
    machine_found = measurement._measurement(found)
    assert [worker.device for worker in machine_found.workers] == ["Simulated 90", "Simulated 75"]
    assert "float16 in 16 bit" in dict(machine_found.workers[0].rates.products)
    assert "bfloat16" not in dict(machine_found.workers[1].rates.products), "the second card has none"
    assert machine_found.workers[0].rates.time_factor == 1.0
