"""`init` writes a recipe that validates and fits; `doctor` finds what is wrong and how to mend it."""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from roundpipe_cli.choices import PACKED_FORMATS
from roundpipe_cli.cli import checks
from roundpipe_cli.cli.checks import Check, version_check
from roundpipe_cli.cli.doctor import check_lines, doctor
from roundpipe_cli.cli.init_choice import choose_settings, recipe_text
from roundpipe_cli.cli.recipes import write_new
from roundpipe_cli.costs import nvidia_smi
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.engine import link_speed
from roundpipe_cli.engine.backends import cuda
from roundpipe_cli.engine.backends.cpu import CpuBackend
from roundpipe_cli.engine.link_speed import LinkSpeed, measure_links
from roundpipe_cli.errors import RefusedError, ResourceError
from roundpipe_cli.files import shared_mode
from roundpipe_cli.planning import choose
from roundpipe_cli.planning.predict import make_plan
from roundpipe_cli.planning.question import ask
from roundpipe_cli.planning.reach import NOT_ON_CPU, reach_of
from roundpipe_cli.planning.what_if import summary_of
from roundpipe_cli.recipe.load import load_recipe
from tests.cli.test_terminal_text import on_a_terminal, said
from tests.support.covering import swept
from tests.support.e2e import python, run
from tests.support.simulated_cases import simulated

NO_GPU = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
WORDS = ("--model", "Qwen/Qwen3-1.7B", "--hardware", "2x3090,host_memory_gib=64")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    for name, value in NO_GPU.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_init_takes_any_name_for_its_file_and_refuses_data_that_no_recipe_can_hold(here: Path) -> None:
    """Story: bytes that are no UTF-8 were a bug of roundpipe; a line break became a space in the recipe, or a key."""
    for name in (os.fsdecode(b"caf\xe9"), "a\nmax_steps: 7 #", "a\x1b"):
        refused = said("init", *WORDS, "--data", f"{name}.jsonl", "-o", "a.yaml", code=2)[1]
        assert "a recipe cannot hold this text" in refused and not (here / "a.yaml").exists()
        said("init", *WORDS, "--data", "rows.jsonl", "-o", f"{name}.yaml")
        assert load_recipe(here / f"{name}.yaml").recipe.max_steps is None


def conversation(folder: Path, *turns: tuple[str, str | None], code: int, words: Sequence[str] = ()) -> str:
    """What `roundpipe init WORDS` says on a terminal to answers, each given when the words before it have been said.

    Args:
        turns: (words to wait for, answer; None: no more).
    """
    typed = [(said, "" if answer is None else f"{answer}\n") for said, answer in turns]
    return on_a_terminal(folder, 200, "init", *words, turns=typed, code=code, **NO_GPU)


def test_init_asks_again_and_loses_no_answer(tmp_path: Path) -> None:
    """A wrong word for the hardware was an error after three answers, which were to be typed again."""
    (tmp_path / "rows.exe").write_bytes(b"MZ")
    (tmp_path / "qwen3-8b.yaml").write_text("mine\n")
    shown = conversation(
        tmp_path,
        *(("Model", "?"), ("Its weights are not downloaded now", "./no such folder")),
        *(("there is no such model file or folder", ""), ("Your rows", "?"), ('"prompt" and "completion"', "rows.exe")),
        *(
            ("error: ", "my own rows"),
            ("error: this is neither", "me/rows"),
            ("taken for the id of a hub dataset", None),
        ),
        *(("Hardware", "?"), ("number and name of its cards", "2x3091,host_memory_gib=64")),
        ("error: ", "8x4090,host_memory_gib=128"),
        *(("qwen3-8b.yaml is there already. Recipe to write [qwen3-8b-2.yaml]", ""), ("wrote qwen3-8b-2.yaml", None)),
        code=0,
    )
    assert shown.count("answers so far") == 0 and (tmp_path / "qwen3-8b.yaml").read_text() == "mine\n"
    recipe = load_recipe(tmp_path / "qwen3-8b-2.yaml").recipe
    assert (recipe.model, recipe.datasets[0].path) == ("Qwen/Qwen3-8B", "me/rows")
    assert recipe.hardware == "8x4090,host_memory_gib=128"
    given = ("--method", "lora", "--objective", "sft", "--columns", "text=a b", "--output", "x.yaml")
    conversation(
        tmp_path,
        *(("Model", "Qwen/Qwen3-14B"), ("Your rows", "my-rows/a b.jsonl"), ("a b.jsonl is not there yet", None)),
        ("Hardware", "\x04"),
        ("answers so far: roundpipe init --model Qwen/Qwen3-14B --data 'my-rows/a b.jsonl'", None),
        (f" {' '.join(given[:4])} --output x.yaml --columns 'text=a b'", None),
        words=given,
        code=130,
    )


def test_init_fits_the_machine_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # even cuts: searched ones are no part of what `init` writes
    path = Path("recipe.yaml")
    with pytest.raises(RefusedError, match="does not fit") as refused:
        choose_settings("Qwen/Qwen3-235B-A22B", "1x3060,host_memory_gib=4", path)
    assert "model=Qwen/Qwen3-1.7B load_in_" in str(refused.value), "with its speed"
    assert "recipes/qwen3/1.7b_lora_1x16gb.yaml load_in_" in str(refused.value)
    small = choose_settings("Qwen/Qwen3-14B", "1x2060,host_memory_gib=48", path)
    assert small.recipe.dtype == "float16" and small.plan.question.settings.tokens_per_microbatch < 8192
    assert choose_settings("HuggingFaceTB/SmolLM2-135M", "1x3090,host_memory_gib=32", path).recipe.method == "full"
    eight = choose_settings("Qwen/Qwen3-8B", "8x4090,host_memory_gib=128", path)
    assert eight.recipe.rows_per_step == 64 and eight.recipe.hardware == "8x4090,host_memory_gib=128"
    assert not eight.plan.question.hardware.is_here


def test_init_writes_what_finetune_takes_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: `finetune` refused the recipe of a model above 2B parameters that `init` had written for this machine."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)
    written = []
    for model, name in (("Qwen/Qwen3-1.7B", "small.yaml"), ("Qwen/Qwen3-4B", "large.yaml")):
        path = tmp_path / name
        choice = choose_settings(model, None, path)
        path.write_text(recipe_text(choice, DatasetSpec("rows.jsonl"), path))
        written.append(load_recipe(path))
        assert ("pipeline.devices [cpu, cpu]: there is no GPU here" in " ".join(choice.reasons)) is ("4B" in model)
    assert [loaded.recipe.pipeline.devices for loaded in written] == ["auto", ("cpu", "cpu")]
    small, large = (ask(loaded, here=True) for loaded in written)
    assert small.is_for_lack_of_gpus and not large.is_for_lack_of_gpus and large.lists_devices
    assert large.num_workers == 2
    bare = make_plan(load_recipe(tmp_path / "large.yaml", ["pipeline.devices=auto"]))
    assert "`finetune` needs pipeline.devices=[cpu,cpu] for it" in summary_of(bare).reasons[0]


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "hf_" + "s" * 34
    environment = {**NO_GPU, "HF_TOKEN": secret}
    done = run(tmp_path, "doctor", "--json", environment=environment).expect(0)
    document = json.loads(done.out)
    found = {check["name"]: check for check in document["checks"]}
    assert document["can_train"] is True
    for name in ("torch", "driver", "torch build", "workers", "page-locking", "host memory", "disk, outputs", "hub"):
        assert name in found, name
    assert all(check["state"] in ("good", "note") for check in document["checks"])
    assert "ns a parameter" in found["update"]["found"]
    assert "GB/s" in found["memory copy"]["found"] or found["workers"]["found"].startswith("cuda")
    assert found["hub token"]["found"] == "there is one" and secret not in done.out + done.err
    monkeypatch.setattr(checks, "all_checks", lambda **_: [Check(**check) for check in document["checks"]])
    doctor()
    assert capsys.readouterr().out.splitlines()[-1].startswith("Training can run here")
    assert list(tmp_path.glob("[!.]*")) == [], "nothing is written"


def test_doctor_names_the_speed_of_a_slow_link_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    links = [LinkSpeed(1.5e9, 9e9, 9e9), LinkSpeed(9e9, 1.5e9, 9e9)]
    monkeypatch.setattr(link_speed, "measure_links", lambda *_: links)
    with simulated():
        slow, good = checks._links(2)
    assert (slow.state, good.state, good.fix) == ("note", "good", None)
    assert "1.5 GB/s up, 9.0 GB/s down" in slow.found and str(slow.fix).endswith(":pcie_gb_per_s=1.5")


def test_doctor_says_no_where_nothing_can_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = version_check("torch", "2.3.1+cu121", "2.10")
    assert old.state == "fails" and old.fix == "pip install 'torch>=2.10'"
    assert version_check("torch", "2.13.0+cpu", "2.10").state == "good"
    monkeypatch.setattr(checks, "LEAST_HOST_BYTES", 1 << 60)
    assert checks._memory().state == "fails"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12 is missing')\n")
    asked = (
        "import sys\nfrom roundpipe_cli.cli import app, checks\nchecks.trainable_checks = lambda: ()\n"  # takes longest
    )
    broken = python(asked + "sys.argv[1:] = ['doctor', '--json', '--offline']\napp.main()", tmp_path)
    failed = [check for check in json.loads(broken.stdout)["checks"] if check["state"] == "fails"]
    assert broken.returncode == 2 and json.loads(broken.stdout)["can_train"] is False
    assert [check["name"] for check in failed] == ["torch build"] and "libcudart" in failed[0]["found"]


def test_doctor_reads_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi that answers as the real one does; torch here sees no GPU, and that is said."""
    listing = "570.86, NVIDIA GeForce RTX 4090, 24564, 300, 1, 4, 4, 16\\n570.86, RTX 3090, 24576, 5, 4, 4, 16, 16\\n"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{listing}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert checks._driver()[1].state == "note", "`good  driver  no nvidia-smi` it said"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    rows, driver = checks._driver()
    assert driver.found == "NVIDIA 570.86" and len(rows) == 2
    narrow, good = checks._gpus(rows)
    assert (narrow.state, good.state) == ("note", "good") and narrow.fix is not None and "x16" in narrow.fix
    check, num_gpus = checks._torch(num_listed=cuda.num_devices() + 1)
    assert check.state == "note" and num_gpus == cuda.num_devices() and check.fix
    monkeypatch.setattr(checks, "trainable_checks", lambda: ())  # takes longest
    named = [check.name for check in checks.all_checks(offline=True)]
    assert {"memory copy", "update", "hub"} <= set(named), "a note ends nothing"
    ask, silent = nvidia_smi.ask_nvidia_smi, "nvidia-smi does not answer: "
    for program, found in (("sh\necho No; exit 9", "nvidia-smi: No"), ("none", silent), ("sh\nexec sleep 60", silent)):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/{program}\n")
        assert checks._driver()[1].found.startswith(found)
        monkeypatch.setattr(nvidia_smi, "ask_nvidia_smi", lambda fields, timeout_s: ask(fields, timeout_s / 100))


@functools.cache
def reaches(hardware: str) -> tuple[Any, ...]:
    return tuple(reach_of(parse_hardware(hardware)))


def one_model_each(hardware: str) -> list[Any]:
    """`reaches` with the last model of each method: planning a recipe takes seconds."""
    return [replace(reach, models=reach.models[-1:]) for reach in reaches(hardware)]


def test_the_largest_models_of_a_machine() -> None:
    """`doctor` said that training can run, and not what: the three largest models, what limits them, how to fix it."""
    for hardware, method, largest, limit, remedy in (
        ("8x4090,host_memory_gib=96", "LoRA", "gpt-oss-120b", "host memory", "weights: mmap"),
        ("8x4090,host_memory_gib=256", "full", "gemma-3-12b-pt", "host memory", "method: lora"),
        ("1x4060ti-16gb,host_memory_gib=32", "LoRA", "Qwen3.5-35B-A3B", "host memory", "weights: mmap"),
        ("1xcustom:memory_gib=2:acc32_tflops=20,host_memory_gib=512", "LoRA", "", "memory of", "a shorter"),
        ("8x4090,host_memory_gib=96,disk_free_gib=1", "full", "", "disk", "output_dir on another disk"),
    ):
        (found,) = (reach for reach in reaches(hardware) if reach.method == method)
        assert not largest or (len(found.models), found.models[0].rpartition("/")[2]) == (3, largest)
        assert found.reason is not None and found.reason.startswith(limit) and "too little" in found.reason
        assert checks.remedy(found).startswith(remedy)
    assert checks.remedy(replace(found, reason=NOT_ON_CPU)).startswith("a GPU")


@pytest.mark.parametrize(
    "hardware", ["1x4060,host_memory_gib=16", "1x3060+1x3090", *swept(["1x3090,host_memory_gib=64"])]
)
def test_doctor_says_what_init_and_plan_say(hardware: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Story: an upper bound of one row a microbatch was below the speed of the recipe that `init` wrote."""
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)
    largest = one_model_each(hardware)
    monkeypatch.setattr(checks, "reach_of", lambda _: largest)
    lora, full = checks.largest_models(parse_hardware(hardware))
    assert lora.state == full.state == "good"
    for place, (check, reach) in enumerate(zip((lora, full), largest, strict=True)):
        path, model = tmp_path / f"{place}.yaml", reach.models[0]
        choice = choose_settings(model, hardware, path, method=("lora", "full")[place])
        path.write_text(recipe_text(choice, DatasetSpec("rows.jsonl"), path))
        plan = make_plan(load_recipe(path))
        packed = plan.question.settings.packed_as
        words = f"{model.rpartition('/')[2]}{f' in {PACKED_FORMATS[packed].label}' if packed else ''}"
        assert check.found.startswith(f"{words} {plan.tokens_per_s:,.0f} tokens/s")
        assert f"{plan.tokens_per_s:,.0f} tokens/s by" in " ".join(choice.reasons)


def test_the_upper_bound_of_a_speed_is_one() -> None:
    answer = make_plan(load_recipe("quickstart", ["gradient_accumulation_steps=2"]), "1x4090")
    assert 0.3 * answer.step_s < answer.question.least_step_s <= answer.step_s


def test_what_can_be_trained_is_said_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts that need no torch came after it, seconds later."""
    monkeypatch.setattr(checks, "_torch", Mock(side_effect=InterruptedError))
    monkeypatch.setattr(checks, "reach_of", lambda _: one_model_each("1x4060,host_memory_gib=16"))
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)
    early = []
    with pytest.raises(InterruptedError):
        for check in checks.all_checks(offline=True):
            early.append(check)
            assert all(len(line) <= 80 for line in check_lines(check, 80))
            assert len(list(check_lines(check, 10_000))) == 1 + bool(check.fix)
    names = [check.name for check in early]
    assert {"host memory", "largest, LoRA", "largest, full"} <= set(names)
    assert "of it free now" in early[-1].found


def test_links_are_measured_together() -> None:
    speeds = measure_links([CpuBackend(1, copy=True), CpuBackend(1, copy=True)], 1 << 20)
    assert len(speeds) == 2 and all(speed.up_bytes_per_s > 0 and speed.down_bytes_per_s > 0 for speed in speeds)

    class Broken(CpuBackend):
        def allocate(self, num_bytes: int):  # type: ignore[no-untyped-def]
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure_links([CpuBackend(1, copy=True), Broken(1, copy=True)], 1 << 20)


def test_a_recipe_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Story: `init`, `convert` and `recipes cp`, killed, left half a recipe, which they then refused to replace."""
    path, content, codes = tmp_path / "new" / "recipe.yaml", b"model: m\n" * 1000, []
    for nth in range(1, 50):
        pid = os.fork()
        if pid == 0:
            count = 0

            def dying(event: str, arguments: tuple[object, ...], last: int = nth) -> None:
                nonlocal count
                if event in ("open", "os.mkdir", "os.link", "os.remove"):
                    count += 1
                    if count == last:
                        os._exit(9)

            sys.addaudithook(dying)
            write_new(path, content)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert not path.exists() or path.read_bytes() == content
        path.unlink(missing_ok=True)
        if codes[-1] == 0:
            break
    assert codes[0] == 9 and codes[-1] == 0
    write_new(path, content)
    assert path.stat().st_mode & 0o777 == shared_mode(0o666), "a recipe is no secret"
    with pytest.raises(RefusedError, match="is there already"):
        write_new(path, b"other")
    assert path.read_bytes() == content


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_of_the_same_instant_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    """Story: a file that came between the look for its name and the rename was overwritten by the recipe."""
    path = tmp_path / "recipe.yaml"
    if not has_links:  # as on FAT
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "no links")))
    write_new(path, b"first")
    path.unlink()
    monkeypatch.setattr(os, "fsync", lambda _: path.write_bytes(b"mine"))
    with pytest.raises(RefusedError, match="is there already"):
        write_new(path, b"recipe")
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: `init`, `convert` and `recipes cp` on a full disk ended with exit code 2."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(ResourceError, match="No space left on device"):
        write_new(tmp_path / "recipe.yaml", b"model: m\n")
    assert not list(tmp_path.iterdir())
