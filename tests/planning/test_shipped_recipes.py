"""Every recipe that comes with the tool: it loads, its header is whole, and `plan` says what the header promises."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

from roundpipe_cli.cli.plan import plan_document, plan_text
from roundpipe_cli.costs.find_model import shipped_architecture
from roundpipe_cli.costs.hardware import parse_hardware
from roundpipe_cli.planning import choose
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.planning.fitting_recipe import fitting_recipe
from roundpipe_cli.planning.predict import Plan, make_plan, simulate_step
from roundpipe_cli.planning.question import ask
from roundpipe_cli.planning.search.ranges import even_cut
from roundpipe_cli.planning.solve import Change, remedies
from roundpipe_cli.planning.verdict import judge
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.shipped import shipped_recipes
from scripts.readme_picture import out_of_date
from scripts.recipe_verdicts import differences, verdict_of_plan
from tests.cli.test_terminal_text import said
from tests.support.covering import swept

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {recipe.name: recipe for recipe in shipped_recipes()}
PROMISED = ("qwen3/8b_lora_2x24gb", "qwen3/14b_lora_2x24gb")


def test_the_combinations_that_are_promised() -> None:
    names = " ".join(RECIPES)
    for model in (
        *(f"qwen3/{size}_lora" for size in ("1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b")),
        *("llama3.1/8b_lora", "llama3.1/8b_full", "llama3.3/70b_lora", "gemma3/", "mistral/7b", "gpt-oss/20b"),
        *("gpt-oss/120b", "smollm2/135m", "qwen3/1.7b_full", "qwen3/4b_full", "qwen3/8b_full"),
        *("qwen3.5/9b_lora", "qwen3.5/35b-a3b_lora", "qwen3-next/80b-a3b_qlora"),
        *("_1x16gb", "_1x24gb", "_2x24gb", "_4x24gb", "_8x24gb"),
    ):
        assert model in names, model
    for name in PROMISED:
        verdict = RECIPES[name].verdict
        assert verdict is not None and verdict.hardware == "2x3090,host_memory_gib=64"


@pytest.mark.parametrize("name", RECIPES)
def test_header(name: str) -> None:
    """Purpose, launch command, an override, plan's verdict for a machine with its host memory, the knobs."""
    recipe = RECIPES[name]
    text = recipe.path.read_text(encoding="utf-8")
    header = text.split("\n\n")[0]
    assert all(line.startswith("#") and len(line) <= 120 for line in header.splitlines())
    assert f"#   roundpipe finetune {recipe.command_name}" in header
    assert re.search(rf"roundpipe finetune {re.escape(recipe.command_name)} \S+=\S+", header)
    assert "# What the knobs cost:\n#   " in header
    verdict = recipe.verdict
    assert verdict is not None and verdict.fits and verdict.text(recipe.command_name) in header
    assert "host_memory_gib=" in verdict.hardware
    machine = parse_hardware(verdict.hardware)
    if name not in ("quickstart", "preferences", "labelled", "distill"):
        count, gib = re.findall(r"_(\d)x(\d+)gb$", name)[0]
        assert len(machine.devices) == int(count)
        assert all(device.memory_bytes == int(gib) * 1024**3 for device in machine.devices)
        assert f"{machine.host_memory_bytes // 1024**3} GB of host memory" in recipe.purpose
    loaded = load_recipe(recipe.path)
    assert loaded.notices == ()
    assert loaded.recipe.model.startswith("package:") or shipped_architecture(loaded.recipe.model) is not None


PLANNED = (
    *("quickstart", "gpt-oss/20b_lora_1x24gb", "llama3.1/8b_64k_lora_1x24gb", "qwen3/235b-a22b_qlora_1x24gb"),
    *("qwen3/1.7b_full_1x24gb", "qwen3.5/9b_lora_1x24gb", "qwen3/8b_lora_4x24gb", PROMISED[0]),
)
"""Some of each method, kind of block and number of GPUs. All are planned by `scripts/test -m sweep` and, when costs
change, by scripts/recipe_verdicts.py."""


EVERY = [*PLANNED, *swept(sorted(RECIPES.keys() - set(PLANNED)))]


@functools.cache
def planned(name: str) -> Plan:
    verdict = RECIPES[name].verdict
    assert verdict is not None
    return make_plan(load_recipe(RECIPES[name].path), verdict.hardware)


@pytest.mark.parametrize("name", EVERY)
def test_plan_says_what_the_header_says(name: str) -> None:
    header, plan = RECIPES[name].verdict, planned(name)
    assert header is not None and plan.verdict.fits, plan.verdict.reasons
    off = differences(header, verdict_of_plan(plan, header.hardware), tolerance=0.05, device_tolerance=0.5)
    assert not off, f"{off}: python scripts/recipe_verdicts.py --write"


def test_a_plan_says_whose_figures_it_takes_and_what_is_assumed_of_recurrent_blocks() -> None:
    """Of Qwen3.5 without a folder or a network; `plan` had no figures of it."""
    said = "\n".join(planned("qwen3.5/9b_lora_1x24gb").assumptions)
    assert "model: figures shipped with the tool: the defaults of transformers' Qwen3_5TextConfig" in said
    assert "plain PyTorch moves over ten times the bytes" in said and "flash-linear-attention" in said
    assert "not known" not in said and "guess" not in said


@pytest.mark.parametrize("name", [*PLANNED[:5], *swept(sorted(RECIPES.keys() - set(PLANNED[:5])))])
def test_no_plain_even_cut_is_faster(name: str) -> None:
    """Of those that fit, in rounds and with a dealing that suit few microbatches or that `plan` chose. Shapes of chunks
    are chosen by clocks without transfers, of which the first and the last of a step differ."""
    plan = planned(name)
    question, own = plan.question, plan.cut
    num_layers, chosen_s = len(question.costs.layers), simulate_step(question, own).step_s
    faster, chunks = [], question.settings.sequence_chunks
    shortest, least_gain = -(-question.num_workers // chunks) * chunks, 1e-6 if chunks == 1 else 1e-4
    for blocks in ((1, 1), (2, 1), (3, 1), (2, 2)):
        stages = even_cut(num_layers, *blocks)
        for per_round in {shortest, own.microbatches_per_round}:
            for dealing in {None, own.dealing}:
                cut = StageCut(*stages, per_round, dealing=dealing)
                if judge(question, cut).fits and simulate_step(question, cut).step_s < chosen_s * (1 - least_gain):
                    faster.append(cut)
    assert not faster


def test_short_names_are_links() -> None:
    """One text, two names: editing one edits both."""
    shorts = {recipe.short_name: recipe for recipe in RECIPES.values() if recipe.short_name}
    assert {"qwen3-8b", "qwen3-14b", "qwen3-32b", "llama3.3-70b", "gpt-oss-20b", "smollm2-135m"} <= shorts.keys()
    for short, recipe in shorts.items():
        link = ROOT / "recipes" / f"{short}.yaml"
        assert link.is_symlink() and link.resolve() == recipe.path.resolve()
        assert f"`recipes/{short}.yaml` is this recipe" in " ".join(recipe.path.read_text().replace("\n#", "").split())


def test_plan_that_says_no_names_the_recipe_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    small = "2x3090,host_memory_gib=64"
    full = make_plan(load_recipe(ROOT / "recipes/qwen3-8b.yaml", ["method=full"]), small)
    assert plan_document(full, None)["shipped_recipe"] == "recipes/qwen3/8b_lora_2x24gb.yaml"
    text = plan_text(full, None, found=remedies(full))
    assert "  shipped recipe  recipes/qwen3/8b_lora_2x24gb.yaml: the nearest that fits here" in text
    asked = ask(load_recipe(ROOT / "recipes/qwen3-32b.yaml"), small)
    assert fitting_recipe(asked) == ("recipes/qwen3/30b-a3b_lora_2x24gb.yaml",), "the next smaller one of any family"
    packed = Change(("load_in_fp8=true",), "", 1.0)
    assert fitting_recipe(asked, packed) == ("recipes/qwen3/32b_lora_2x24gb.yaml", "load_in_fp8=true")
    none = make_plan(load_recipe(ROOT / "recipes/qwen3-8b.yaml"), "1x2060,host_memory_gib=1")
    assert plan_document(none, None)["shipped_recipe"] is None
    fits = make_plan(load_recipe(ROOT / "recipes/quickstart.yaml"), small)
    assert "shipped_recipe" not in plan_document(fits, None)


# --- the command ----------------------------------------------------------------------------------------------------
@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_ls() -> None:
    listed, _ = said("recipes", "ls")
    assert all(f"\n{name} " in listed for name in RECIPES)
    assert max(map(len, listed.splitlines())) <= 112
    few = json.loads(said("recipes", "ls", "qwen3", "2x24gb", "--json")[0])
    assert {"qwen3/8b_lora_2x24gb", "qwen3/14b_lora_2x24gb"} <= {entry["name"] for entry in few}
    assert all("2x24gb" in entry["name"] and entry["predicted"]["tokens_per_s"] > 0 for entry in few)
    assert said("recipes")[0] == listed, "alone it lists them too"
    full = json.loads(said("recipes", "ls", "full", "4x3090", "--json")[0])
    assert {entry["method"] for entry in full} == {"full"} and len(full) == 3
    assert [entry["method"] for entry in json.loads(said("recipes", "ls", "DPO", "--json")[0])] == ["lora, dpo"]
    out, err = said("recipes", "ls", "nonsense")
    assert out == "" and "no recipe has nonsense in name" in err


def test_show_and_cp(here: Path) -> None:
    shown, _ = said("recipes", "show", "qwen3-8b")
    assert shown == (ROOT / "recipes/qwen3/8b_lora_2x24gb.yaml").read_text()
    assert "roundpipe plan mine.yaml" in said("recipes", "cp", "qwen3-8b", "mine.yaml")[1]
    assert (here / "mine.yaml").read_text() == shown and not (here / "mine.yaml").is_symlink()
    assert "not overwritten" in said("recipes", "cp", "qwen3-14b", "mine.yaml", code=2)[1]
    assert (here / "mine.yaml").read_text() == shown
    said("recipes", "cp", "quickstart", "folder/first.yaml")
    assert (here / "folder" / "quickstart.jsonl").is_file(), "its data lies beside it"
    assert "did you mean qwen3-" in said("recipes", "show", "qwen3-9b", code=2)[1]


def test_validate(here: Path) -> None:
    (here / "bad.yaml").write_text("model: a\nlora: {rr: 3}\nmax_steps: x\n")
    good, _ = said("recipes", "validate", "qwen3-8b", "gemma3/4b_lora_1x16gb")
    assert good == "qwen3-8b: is a good recipe\ngemma3/4b_lora_1x16gb: is a good recipe\n"
    out, err = said("recipes", "validate", "bad.yaml", "qwen3-8b", "gone.yaml", code=2)
    assert out == "bad.yaml: has mistakes\nqwen3-8b: is a good recipe\ngone.yaml: has mistakes\n"
    assert all(word in err for word in ("lora.rr", "max_steps", "datasets", "there is no recipe gone.yaml"))
    documents = json.loads(said("recipes", "validate", "bad.yaml", "qwen3-8b", "--json", code=2)[0])
    assert [document["valid"] for document in documents] == [False, True]
    assert len(documents[0]["problems"]) == 3
    assert {"what", "where", "found", "expected", "hint"} == documents[0]["problems"][0].keys()


def test_the_main_page_shows_what_the_planner_says() -> None:
    """Its plan, its picture and its table were made by hand, and older than the planner."""
    assert not out_of_date(), "python scripts/readme_picture.py --write"


def test_a_model_is_planned_without_a_recipe(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: `plan Qwen/Qwen3-8B` said that there is no recipe of that name. A file comes first, then a shipped one."""
    monkeypatch.setattr(choose, "MAX_SEARCHED_LAYERS", 0)  # any cut will do
    machine = ("--hardware", "2x3090 64GB")
    out, err = said("plan", "Qwen/Qwen3-8B", *machine)
    assert "FITS" in out and "Qwen/Qwen3-8B (" in out and "that model with default settings" in err
    assert "did you mean" in said("plan", "qwen3/8b_lora_2x24g", *machine, code=2)[1]
    assert "there is no recipe mine.yaml" in said("plan", "mine.yaml", code=2)[1]
    (here / "Qwen").mkdir()
    assert "there is no recipe Qwen/x" in said("plan", "Qwen/x", *machine, code=2)[1]
    (here / "Qwen" / "Qwen3-8B").write_text("model: Qwen/Qwen3-0.6B\ndatasets: [{path: rows.jsonl}]\n")
    assert "Qwen/Qwen3-0.6B (" in said("plan", "Qwen/Qwen3-8B", *machine)[0]
