"""What commands answer, recorded: each file of `tests/golden/answers` is one story, told in a folder of its own.

A line `$ roundpipe WORDS   [0]` in a file adds a command; `python -m tests.cli.test_answers` writes all files anew (or
those named). Read the difference aloud before you commit it: a changed figure is a changed promise. What depends on the
clock or on this machine is shown as `#`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
from math import isclose
from pathlib import Path

import pytest
import yaml

from roundpipe_cli.cache import CACHE_VARIABLE
from tests.cli.test_terminal_text import call
from tests.support.e2e import REPOSITORY, TIME_KEYS, make_model, run, write_recipe, write_rows

ANSWERS = REPOSITORY / "tests" / "golden" / "answers"
COMMAND = re.compile(r"^\$ (roundpipe|cat) (.*)   \[\d+\]$", re.MULTILINE)
OWN_PROCESS = ("finetune", "score", "generate", "export", "eval")
"""Commands that compute with torch: in a process of their own, as others are after them."""
TIMES = r"(?:\d+m\d\ds|\d+h\d\dm|[\d,.]+ (?:us|ms|s|tok/s|tokens/s|MB/s|GB/s|%)(?!\w|, each row)|[\d.]+%)"
CLOCK = re.compile(
    rf"(?<![\w.,+-])(?:[\d,]+ +)?{TIMES}|(?<=at )\d\d:\d\d|(?<=tokens/s  ).*|(?<=bubble  ).*|(?<=host memory  ).*"
    r"|(?<=busy time  ).*|(?<=whole step  ).*|(?<=backward  ).*"
    rf"|\"(?:{'|'.join(TIME_KEYS)}|eta_s|seconds|loss_hex)\": (\[.*?\]|[^,}}]*)"
)
BY_CHANCE = re.compile(
    r"(?m)^(comparing the engine|note: worker \d waited|forward and backward: | +predicted  measured"
    r"|tokenising .*: \d|still |.* \d+ of \d+ \.\.\.$).*\n"
)
"""Lines that are there or not by what took long, or by what another test left in a cache."""
FIGURE = re.compile(r"\d+\.\d+(?:e[-+]\d+)?")


def furnish(folder: Path) -> None:
    """A tiny model, rows of several forms, files of other tools: what the commands of the stories name."""
    make_model(folder / "model")
    write_rows(folder / "rows.jsonl", 24)
    write_recipe(folder / "recipe.yaml")
    rows = [{"text": "word " * (n * 97 % 53)} for n in range(1, 2200)]  # more than are sampled
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = REPOSITORY / "tests" / "golden_data"
    files = yaml.safe_load((data / "answers.yaml").read_text(encoding="utf-8"))
    converted = yaml.safe_load((data / "convert_files.yaml").read_text(encoding="utf-8"))
    for name, text in (*files.items(), *((f"{name}.yaml", case["text"]) for name, case in converted.items())):
        (folder / name).write_text(text, encoding="utf-8")


def answers(story: str, folder: Path) -> str:
    """The story anew, its commands carried out in `folder`."""
    blocks = []
    for program, line in COMMAND.findall((ANSWERS / story).read_text(encoding="utf-8")):
        words = shlex.split(line.replace("ROOT", str(REPOSITORY)))
        if program == "cat":
            code, out, err = 0, (folder / line).read_text(encoding="utf-8"), ""
        elif words[0] in OWN_PROCESS:
            outcome = run(folder, *words)
            code, out, err = outcome.code, outcome.out, outcome.err
        else:
            code, out, err = call(*words)
        text = BY_CHANCE.sub("", f"{out.rstrip()}\n{err.rstrip()}\n").strip("\n")
        if story.startswith("runs"):
            text = re.sub("(?<=[^ \n]) {2,}", "  ", CLOCK.sub("#", text))
            text = "\n".join(sorted(text.splitlines(), key=lambda line: line.startswith("checkpoint ")))  # beside it
        blocks.append(f"$ {program} {line}   [{code}]\n{text}\n")
    return "\n".join(blocks).replace(str(folder), "HERE").replace(str(REPOSITORY), "ROOT")


def differences(found: str, recorded: str) -> list[str]:
    """Lines that differ in more than the last digits of a figure with a point: processors add in other orders."""
    one, other = found.splitlines(), recorded.splitlines()
    if len(one) == len(other):
        one = [expected if is_close(line, expected) else line for line, expected in zip(one, other, strict=True)]
    return list(difflib.unified_diff(other, one, "recorded", "found", lineterm="", n=0))


def is_close(line: str, expected: str) -> bool:
    two = zip(FIGURE.findall(line), FIGURE.findall(expected), strict=False)
    return FIGURE.sub("#", line) == FIGURE.sub("#", expected) and all(
        isclose(float(one), float(other), rel_tol=2e-3, abs_tol=10.0 ** -len(other.partition(".")[2].partition("e")[0]))
        for one, other in two
    )


@pytest.mark.parametrize("story", sorted(path.name for path in ANSWERS.iterdir()))
def test_answers(story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    furnish(tmp_path)
    found = answers(story, tmp_path)
    assert "Traceback" not in found
    assert not differences(found, (ANSWERS / story).read_text(encoding="utf-8"))


if __name__ == "__main__":
    import tempfile

    for story in sys.argv[1:] or sorted(path.name for path in ANSWERS.iterdir()):
        with tempfile.TemporaryDirectory() as here:
            os.chdir(here)
            os.environ.update({"COLUMNS": "120", CACHE_VARIABLE: f"{here}/.cache"})
            furnish(Path(here).resolve())
            (ANSWERS / story).write_text(answers(story, Path(here).resolve()), encoding="utf-8")
