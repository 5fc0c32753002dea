"""`plan` and torch mean the same card by `cuda:N`: unlike, cut (MIG) and hidden cards, UUIDs, memory not told."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_cli.cli import checks
from roundpipe_cli.costs import nvidia_smi
from roundpipe_cli.costs.memory import ALLOCATOR_VARIABLES
from roundpipe_cli.costs.nvidia_smi import visible_gpus
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.planning.question import ask
from roundpipe_cli.recipe.load import load_text
from roundpipe_cli.train.prepare.devices import choose_devices
from tests.support.e2e import fresh
from tests.support.gpu_machines import MIB, Slot, cards_of_cuda, put_nvidia_smi
from tests.support.simulated_cuda import Card, Simulation

SLOW = Slot("NVIDIA GeForce RTX 3060", 12288, "GPU-1a2b", 1)
FAST = Slot("NVIDIA GeForce RTX 4090", 24564, "GPU-1c3d", 3)
OTHER = Slot("NVIDIA GeForce RTX 3090", 24576, "GPU-2e4f", 2)
SLOW_CARD = Card(SLOW.name, SLOW.memory_mib * MIB)
WHOLE = Slot("NVIDIA A100-SXM4-40GB", 40960, "GPU-5a5a", 2, mig=False)
PARTS = (("3g.20gb", "MIG-11aa", 19968), ("1g.5gb", "MIG-22bb", 4864))
CUT = replace(WHOLE, mig=True, instances=PARTS)
UNLIKE, DIFFERS, GUESSED = [SLOW, FAST, OTHER], "numbered by PCI bus", "makes it certain"

MACHINES: dict[str, tuple[list[Slot], str | None, str | None, list[str], str]] = {
    "unlike cards": (UNLIKE, None, None, ["3060", "4090", "3090"], DIFFERS),
    "the fastest in the first slot": ([FAST, OTHER, SLOW], None, None, ["4090", "3090", "3060"], ""),
    "an order of the user": (UNLIKE, None, "FASTEST_FIRST", ["4090", "3090", "3060"], GUESSED),
    "a number in that order": (UNLIKE, "0,2", "FASTEST_FIRST", ["4090", "3060"], GUESSED),
    "UUIDs in that order": (UNLIKE, "GPU-1a2b,GPU-1c", "FASTEST_FIRST", ["3060", "4090"], ""),
    "the same order by name": (UNLIKE, None, "PCI_BUS_ID", ["3060", "4090", "3090"], DIFFERS),
    "hidden cards": (UNLIKE, "2,0", None, ["3090", "3060"], DIFFERS),
    "one is left": (UNLIKE, "1", None, ["4090"], DIFFERS),
    "all hidden": (UNLIKE, "", None, [], ""),
    "none by -1": (UNLIKE, "-1", None, [], ""),
    "up to what is no card": (UNLIKE, "1,7,0", None, ["4090"], DIFFERS),
    "words behind numbers": (UNLIKE, "+1gpu,2x", None, ["4090", "3090"], DIFFERS),
    "one twice": (UNLIKE, "0,0", None, [], ""),
    "one twice by two prefixes": (UNLIKE, "GPU-1a,GPU-1a2", None, [], ""),
    "prefixes": (UNLIKE, "GPU-2,GPU-1a", None, ["3090", "3060"], ""),
    "a prefix of two": (UNLIKE, "GPU-2,GPU-1", None, ["3090"], ""),
    "instances, none chosen": ([CUT], None, None, ["a100-40gb MIG 3g.20gb"], "one of 2 MIG instances"),
    "an instance": ([CUT], "MIG-22bb", None, ["a100-40gb MIG 1g.5gb"], "one of 2 MIG instances"),
    "an instance's prefix": ([CUT], "MIG-2,MIG-1", None, ["a100-40gb MIG 1g.5gb"], "one of 2 MIG instances"),
    "an instance that is not there": ([CUT], "MIG-3", None, [], ""),
    "the card of instances": ([CUT], "GPU-5a5a", None, ["a100-40gb MIG 3g.20gb"], "one of 2 MIG instances"),
    "instances beside a card": ([FAST, CUT], None, None, ["a100-40gb MIG 3g.20gb"], "one of 2 MIG instances"),
    "a card beside instances": ([CUT, FAST], "1", None, ["4090"], DIFFERS),
    "to be cut, and not yet": ([replace(WHOLE, mig=True)], None, None, [], ""),
    "not to be cut": ([WHOLE], None, None, ["a100-40gb"], ""),
    "no card": ([], None, None, [], ""),
}


def set_up(slots: list[Slot], chosen: str | None, order: str | None, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nvidia_smi(slots, at, monkeypatch)
    for name, value in ((nvidia_smi.VISIBLE, chosen), (nvidia_smi.ORDER, order)):
        if value is None:
            monkeypatch.setenv(name, "")  # so that it is put back
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_same_cards_in_the_same_order(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a 3060 in slot 0 and a 4090 in slot 1, `cuda:0` was the one for `plan` and the other for torch."""
    slots, chosen, order, names, said = MACHINES[machine]
    set_up(slots, chosen, order, tmp_path, monkeypatch)
    devices, notes = visible_gpus()
    assert [device.name.removeprefix("rtx-") for device in devices] == names
    assert [note for note in notes if said and said in note] or not said
    assert bool(said) == any(word in " ".join(notes) for word in (DIFFERS, GUESSED, "MIG instances"))
    cuda.count_by_bus()
    with Simulation(cards_of_cuda(slots) or [SLOW_CARD]):
        seen = [cuda.torch.cuda.get_device_properties(index) for index in range(cuda.num_devices())]
        uuids = [cuda.uuid(index) for index in range(cuda.num_devices())]
    if not names:
        assert not cards_of_cuda(slots)
        return
    sizes = [one.total_memory for one in seen]
    assert [device.memory_bytes for device in devices] == pytest.approx(sizes, rel=0.05)
    for name, one in zip(names, seen, strict=True):
        assert name.partition(" ")[0].partition("-")[0].upper() in one.name.upper()
    monkeypatch.setenv(nvidia_smi.VISIBLE, ",".join(uuids))  # as a run that starts again names its cards
    assert [device.name for device in visible_gpus()[0]] == [device.name for device in devices]


NAMED = ["0", "1", "2", "9", "-1", "-0", "+1x", "", "x", "GPU-1", "GPU-1a", "GPU-1a2b", "GPU-2", "GPU-", "MIG-1"]


@given(st.lists(st.builds(str.__add__, st.sampled_from(["", "", "", " "]), st.sampled_from(NAMED)), min_size=1))
def test_what_is_named_in_any_form_is_what_torch_takes(names: list[str]) -> None:
    """`GPU-3e4f, 0` counted as two cards, `0,9,0` as one; torch takes one, and none."""
    cards = [nvidia_smi.Listed(slot.name, slot.uuid, 1, "4", "16") for slot in UNLIKE]
    with patch.dict(os.environ, {nvidia_smi.VISIBLE: ",".join(names), nvidia_smi.ORDER: "PCI_BUS_ID"}):
        seen = [card.name for card in cards_of_cuda(UNLIKE)]
    assert [card.name for card in nvidia_smi._chosen(cards, {}, names)] == seen


def test_cuda_is_told_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for order, becomes in ((None, "PCI_BUS_ID"), ("", "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")):
        set_up([SLOW], None, order, tmp_path, monkeypatch)
        fresh(tmp_path, "--version").expect(0)
        assert (tmp_path / "calls").read_text().split()[-1] == becomes
        orders: list[str] = []
        with Simulation([SLOW_CARD]), monkeypatch.context() as patched:  # which ends before the simulation
            asked = lambda orders=orders: not orders.append(os.environ[nvidia_smi.ORDER])  # noqa: E731
            patched.setattr(cuda.torch.cuda, "is_available", asked)
            assert choose_devices("auto")[0] == ("cuda:0",) and set(orders) == {becomes}


RECIPE = "model: Qwen/Qwen3-8B\ndatasets: [{path: rows.jsonl}]\n"


@pytest.mark.parametrize(("name", "others"), [("NVIDIA GB10", []), (FAST.name, []), (FAST.name, [OTHER])])
def test_memory_that_nobody_tells_is_asked_for(
    name: str, others: list[Slot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken as the 24 GiB of an RTX 3090."""
    slots = [replace(SLOW, name=name, tells_memory=False), *others]
    set_up(slots, None, None, tmp_path, monkeypatch)
    loaded = load_text(RECIPE, "r.yaml")
    with pytest.raises(RefusedError, match="memory of a GPU is not known") as caught:
        ask(loaded)
    assert (caught.value.problems[0].hint or "").endswith("+1xrtx-3090") is bool(others), "each card by its own name"
    assert [check.state for check in checks.trainable_checks()] == ["note"]
    cuda.count_by_bus()
    with Simulation(cards_of_cuda(slots)):
        told = tuple(cuda.total_bytes())
    monkeypatch.setattr(nvidia_smi, "_sizes_by_torch", lambda *variables: told)
    assert [device.memory_bytes for device in ask(loaded).hardware.devices] == [one.memory_mib * MIB for one in slots]


def test_doctor_and_plan_name_each_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(UNLIKE, None, None, tmp_path, monkeypatch)
    hardware = ask(load_text(RECIPE + "pipeline: {devices: [cuda:1]}\n", "r.yaml")).hardware
    assert [device.name for device in hardware.devices] == ["rtx-4090"]
    assert sum("cuda:0 is the NVIDIA GeForce RTX 3060" in note for note in hardware.notes) == 1
    cuda.count_by_bus()
    with Simulation(cards_of_cuda(UNLIKE)):
        check = checks._workers(3)
    assert check.found.startswith("cuda:0 (NVIDIA GeForce RTX 3060, 12 GiB), cuda:1 (NVIDIA GeForce RTX 4090")
    assert check.state == "note" and "FASTEST_FIRST keeps it" in (check.fix or "")


@pytest.mark.parametrize(("hardware", "is_said"), [("1x7900xtx", True), ("1xmi300x+1x4090", True), ("1x4090", False)])
def test_plan_says_of_amd_cards_that_none_was_tried(hardware: str, is_said: bool) -> None:
    notes = ask(load_text(RECIPE, "r.yaml"), hardware).hardware.notes
    assert any("AMD's GPUs were never tried" in note for note in notes) == is_said


def test_gaps_that_torch_leaves_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In full fine-tuning, where the user's settings or a virtual GPU keep segments of memory from growing."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = []
    for name, variable in ((FAST.name, None), (FAST.name, "max_split_size_mb:128"), ("GRID A100-20C", None)):
        set_up([replace(FAST, name=name)], None, None, tmp_path, monkeypatch)
        if variable is not None:
            monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", variable)
        for method in ("full", "lora"):
            machine = ask(load_text(f"{RECIPE}method: {method}\n", "r.yaml")).hardware
            said = [note for note in machine.notes if "do not grow" in note]
            found.append((machine.devices[0].memory_bytes < 24564 * MIB, len(said)))
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert found == [(False, 0), (False, 0), (True, 1), (False, 0), (True, 1), (False, 0)]


def test_where_nvidia_smi_hangs_what_it_said_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up([], None, None, tmp_path, monkeypatch)
    monkeypatch.setattr(nvidia_smi._run, "__kwdefaults__", {"timeout_s": 0.1})  # of the question for instances
    for hangs, names in (("-L", ["rtx-4090"]), ("", [])):
        answer = f"*{hangs}*) exec sleep 60;; *memory*) echo '{FAST.name}, 24564, 4, 8, GPU-1a2b'"
        (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\ncase $* in {answer};; esac\n")
        assert [device.name for device in visible_gpus()[0]] == names
        monkeypatch.setattr(nvidia_smi.ask_nvidia_smi, "__defaults__", (0.1,))
