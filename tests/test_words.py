"""Help is quick, whole and free of markup; the READMEs' commands are known."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from roundpipe_cli.cli.app import app, main
from roundpipe_cli.cli.finetune import LOST_AT_VARIABLE, restarting
from roundpipe_cli.cli.init_rows import FIELDS
from roundpipe_cli.cli.versions import version_lines
from roundpipe_cli.errors import DeviceLostError
from roundpipe_cli.recipe.check import known_keys
from roundpipe_cli.recipe.schema import Recipe
from tests.cli.test_terminal_text import said
from tests.support.e2e import fresh, python

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = sorted(getattr(typer.main.get_command(app), "commands", {}))
IN_COMMAND = re.compile(rf"(\broundpipe ({'|'.join(COMMANDS)})|mkdir -p)\b[^`\n;]*$")
QUOTED_BEFORE = {
    "words",
    "epochs",
    "again(recipe)",
    "folder",
    "' '.join(given)",
    "HERE",
    "path[0]",
    "recipe",
    "self.hardware",
}
"""Values in commands that are quoted already, or have no space: numbers, keys, names of devices and shipped recipes."""
RECIPE_COMMANDS = ["cp", "keys", "ls", "show", "validate"]


# --- help -----------------------------------------------------------------------------------------------------------
def test_help_has_an_example_and_imports_little() -> None:
    """Modules count, as times depend on the machine: all commands were imported, and pydantic."""
    commands = ["", *COMMANDS, *(f"recipes {name}" for name in RECIPE_COMMANDS)]
    program = (
        "import os, sys\n"
        "from roundpipe_cli.cli.app import main\n"
        f"for command in {commands!r}:\n"
        "    if child := os.fork():\n"
        "        os.waitpid(child, 0)\n"
        "        continue\n"
        "    sys.argv = ['roundpipe', *command.split(), '--help']\n"
        "    try: main()\n"
        "    except SystemExit as left: print('code', left.code)\n"
        "    print('\\x1e', *sys.modules, '\\x1d')\n"
        "    sys.stdout.flush(), os._exit(0)\n"
    )
    done = python(program)
    for command, text in zip(commands, done.stdout.split("\x1d\n")[:-1], strict=True):
        shown, _, modules = text.partition("\x1e")
        assert not command or "Example: roundpipe " in shown, shown
        assert shown.endswith("code 0\n") and "[/" not in shown and max(map(len, shown.splitlines())) <= 100, shown
        named = set(re.findall(r"\b([a-z][a-z_.]*)=", shown))
        assert named <= {"key", "host_memory_gib", *FIELDS, *known_keys(Recipe)}, "keys that are no recipe's"
        loaded = set(modules.split())
        heavy = {"pydantic", "rich", "numpy", "yaml", "omegaconf", "huggingface_hub", "transformers", "torch"}
        assert not heavy & loaded and len(loaded) < 200, command
        own = {command.split()[0], *({"export"} if command == "generate" else ())} if command else set()
        assert {name for name in COMMANDS if f"roundpipe_cli.cli.{name}" in loaded} == own, "no other command's module"


NO_RESULT = {"init", "recipes cp", "recipes show", "recipes schema"}  # write files, or print one as it is


def command_of(words: str) -> Any:
    """The parsed command line's command: `recipes ls`."""
    command: Any = typer.main.get_command(app)
    for name in words.split():
        command = command.resolve_command(command.make_context("roundpipe", [name], resilient_parsing=True), [name])[1]
    return command


@pytest.mark.parametrize("words", [*COMMANDS, *(f"recipes {name}" for name in RECIPE_COMMANDS)])
def test_results_come_as_json_too(words: str) -> None:
    """`finetune`, `export` and `generate` printed words only."""
    assert any("--json" in param.opts for param in command_of(words).params) == (words not in {*NO_RESULT, "recipes"})


def test_a_restart_keeps_every_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Story: a run that started again without a lost device forgot `--verbose`."""
    lost, started = DeviceLostError("lost"), list[str]()
    lost.rest, lost.at = ("cpu", "cpu"), "step 2"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(LOST_AT_VARIABLE, "")
    monkeypatch.setattr("os.execv", lambda program, words: started.extend(words))
    monkeypatch.setattr(sys, "argv", ["roundpipe", "finetune", "quickstart", "--restarts=2", "-v", "max_steps=2"])
    with pytest.raises(DeviceLostError), restarting("quickstart", ["max_steps=2"], 2):
        raise lost
    assert started[2:8] == ["roundpipe_cli", *sys.argv[1:]] and started[8] == "--restarts=1"
    assert os.environ[LOST_AT_VARIABLE] == "step 2" and started[-1] == "pipeline.devices=[cpu,cpu]"
    started.clear()
    monkeypatch.setattr(sys, "argv", ["roundpipe", "finetune", "--restarts", "2", "--", "quickstart"])
    with pytest.raises(DeviceLostError), restarting("quickstart", (), 2):
        raise lost
    assert started[3:8] == ["finetune", "--restarts", "2", "--restarts=1", "--"], "behind -- no word is an option"


LONG_COMMANDS = [f"{name} a" for name in ("finetune", "plan", "bench", "bench --costs", "data", "export")]
LONG_COMMANDS += ["doctor", "generate a b", "score a b"]
"""What may take long to answer."""


def test_a_long_command_says_its_first_line_at_once() -> None:
    """`data` said nothing for 53 times the processor time of `import typer, rich`; `plan` and `bench` for 5 times."""
    program = (
        "import sys\n"
        "from roundpipe_cli.cli.app import main\n"
        "class FirstLine:\n"
        "    def write(self, text):\n"
        "        loaded = {'pydantic', 'yaml', 'omegaconf', 'numpy', 'torch'} & set(sys.modules)\n"
        "        print(text, sorted(loaded))\n"
        "        raise SystemExit\n"
        "    flush = write\n"
        "sys.stderr = FirstLine()\n"
        f"for command in {LONG_COMMANDS!r}:\n"
        "    sys.argv = ['roundpipe', *command.split()]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
    )
    done = python(program)
    lines = done.stdout.splitlines()
    assert len(lines) == len(LONG_COMMANDS) and all(line.endswith(" ... []") for line in lines), done.stdout


def test_names_in_a_command_to_be_copied_are_quoted() -> None:
    """A folder with a space in its name made the hint's command fail."""
    found = []
    for path in (ROOT / "roundpipe_cli").rglob("*.py"):
        for text in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.JoinedStr)):
            before = ""
            for part in text.values:
                said = ast.unparse(part.value) if isinstance(part, ast.FormattedValue) else ""
                if said and IN_COMMAND.search(before):
                    found.append(said)
                before += part.value if isinstance(part, ast.Constant) else "X"
    unquoted = {one for one in found if not one.startswith("shlex.quote(")}
    assert len(found) > 10 and unquoted == QUOTED_BEFORE


def test_plain_values_are_those_of_typer() -> None:
    """Also the default of a list, a number and words of a file name that are not UTF-8, which pydantic refuses."""
    program = (
        "import os, sys, typer\n"
        "from pathlib import Path\n"
        "from typing import Annotated\n"
        "from roundpipe_cli.cli.app import CommandGroup\n"
        "app = typer.Typer(cls=CommandGroup)\n"
        "@app.callback()\n"
        "def group() -> None: pass\n"
        "@app.command()\n"
        "def show(name: Annotated[str, typer.Argument()],\n"
        "         words: Annotated[list[str] | None, typer.Argument()] = None,\n"
        "         path: Path | None = None, number: int = 5,\n"
        "         tags: list[str] | None = None, rate: float = 0.5, flag: bool = False) -> None:\n"
        "    print([os.fsencode(name), words, path, number, tags, rate, flag, 'pydantic' in sys.modules])\n"
        "for words in ([os.fsdecode(b'\\xff')], ['a', 'b', 'c', '--path', 'd', '--tags', 'e', '--flag'],\n"
        "              ['a', '--number', '7']):\n"
        "    app(['show', *words], standalone_mode=False)\n"
    )
    assert python(program).stdout.splitlines() == [
        r"[b'\xff', None, None, 5, None, 0.5, False, False]",
        "[b'a', ['b', 'c'], PosixPath('d'), 5, ['e'], 0.5, True, False]",
        "[b'a', None, None, 7, None, 0.5, False, True]",
    ]


def test_an_interrupt_before_a_run_has_handlers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("roundpipe_cli.recipe.shipped.shipped_recipes", interrupted)
    monkeypatch.setattr(sys, "argv", ["roundpipe", "recipes", "ls"])
    before, handler = os.umask(0o077), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(SystemExit) as left:
            main()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "a second one, while Python leaves, has no traceback"
    finally:
        os.umask(before)
        signal.signal(signal.SIGINT, handler)
    assert left.value.code == 130
    assert capsys.readouterr().err.strip() == "stopped by SIGINT"


def test_shell_completion(tmp_path: Path) -> None:
    source = fresh(tmp_path, environment={"_ROUNDPIPE_COMPLETE": "source_bash"}).expect(0)
    assert "_ROUNDPIPE_COMPLETE" in source.out
    begun = {"COMP_WORDS": "roundpipe pl", "COMP_CWORD": "1", "_ROUNDPIPE_COMPLETE": "complete_bash"}
    words = fresh(tmp_path, environment=begun)
    assert "plan" in words.out and "finetune" not in words.out


def test_version_tells_torch_cuda_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = version_lines()
    assert re.fullmatch(r"roundpipe \d+\.\d+\.\d+\S*", lines[0])
    assert re.fullmatch(r"torch \d+\.\d+\S*, built for (the processor only|(CUDA|ROCm) [\d.]+)", lines[1])
    assert lines[2] == "driver: none (no nvidia-smi)"
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 570.86.10\necho 570.86.10\n")
    program.chmod(0o755)
    assert version_lines()[2] == "driver: NVIDIA 570.86.10"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert version_lines()[2] == "driver: nvidia-smi finds no GPU"


# --- READMEs --------------------------------------------------------------------------------------------------------
READMES = [
    *(ROOT / name / "README.md" for name in ("", "recipes", "roundpipe_cli", "scripts", "tests")),
    ROOT / "scripts" / "MEASUREMENTS.md",
    ROOT / "recipes" / "GUIDE.md",
    ROOT / "CONTRIBUTING.md",
]
RUN_HERE = (*(f"roundpipe recipes {name}" for name in ("ls", "show", "keys", "schema")), "roundpipe --version")
"""Beginnings of commands that this file runs as they stand, unless they name a file of the user's."""
RUN_ELSEWHERE = {  # beginning of a command -> what runs it with other files, or why no test does
    "scripts/": "minutes: by hand, and scripts/test by .ci/run",
    "python scripts/recipe_pages.py": "tests/recipe/test_recipe_keys.py",
    "python scripts/recipe_verdicts.py": "tests/planning/test_shipped_recipes.py, on the functions that it calls",
    "python scripts/": "minutes: by hand",
    "python -m roundpipe_cli.cli.eval": "tests/train/test_lm_eval.py",
    "python -m tests.": "by hand: they rewrite golden files",
    "roundpipe finetune": "tests/train/test_finetune_*.py, with tiny models",
    "roundpipe bench": "tests/cli/test_bench_cli.py, tests/train/test_simulated_finetune.py",
    "roundpipe watch": "tests/dashboard/test_dashboard_watch.py",
    "roundpipe runs": "tests/cli/test_runs.py",
    "roundpipe download": "tests/cli/test_download.py, against a small hub on this machine",
    "roundpipe data": "tests/data/test_data_command.py",
    "roundpipe export": "tests/train/test_export.py",
    "roundpipe generate": "tests/test_release.py",
    "roundpipe score": "tests/train/test_score.py",
    "roundpipe init": "tests/cli/test_init_doctor.py",
    "roundpipe doctor": "tests/cli/test_init_doctor.py",
    "roundpipe convert": "tests/recipe/test_convert.py",
    "roundpipe recipes": "tests/planning/test_shipped_recipes.py",
    "roundpipe plan": "tests/planning/test_plan_cli.py, tests/test_guide.py",
    "roundpipe --": "the tests above",
}
NEEDS = {  # commands that no test runs, by what they need
    r"roundpipe eval": "lm-eval, and tasks' data from the hub: tests/train/test_lm_eval.py on data of its own",
    r"\bcuda\b|nvidia-smi|scripts/gpu_check": "a GPU",
    r"doctor --measure|--hardware \S+\.json": "minutes; tests/costs/test_measurement.py runs its parts",
    r"^(hf|huggingface-cli) |^(git|pip|pipx|uv) ": "the network",
    r"^(torchrun|vllm|ollama|ssh|tmux|source|cd|export|docker) ": "another program",
}


COMMAND = re.compile(r"(roundpipe|python|torchrun|hf|pip) (?!=)\S|scripts/\w+( |$)(?!.*, )")


def readme_commands(page: Path) -> list[str]:
    """Command lines of a page's code blocks, indented or fenced, without prompt, comment and environment variables."""
    commands: list[str] = []
    fenced, continued = False, ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            text = continued + re.sub(r"\s{2,}#.*$", "", line.strip()).removeprefix("$ ")
            continued = text[:-1] if text.endswith("\\") else ""
            text = re.sub(r"^(\w+=\S+ )*(\.venv/bin/)?", "", text)
            if not continued and COMMAND.match(text):
                commands.append(text)
    return commands


ALL_COMMANDS = sorted({command for page in READMES for command in readme_commands(page)})


def reason_not_to_run(command: str) -> str | None:
    """What a command needs that is not here, or None."""
    return next((what for pattern, what in NEEDS.items() if re.search(pattern, command)), None)


def runs_here(command: str) -> bool:
    """Whether this file runs the command as it stands: it needs nothing but what is shipped."""
    files = [word for word in command.split() if word.endswith((".yaml", ".json", ".svg")) and "recipes/" not in word]
    return command.startswith(RUN_HERE) and not files and reason_not_to_run(command) is None


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_readme_command_is_run_somewhere(page: Path) -> None:
    commands = readme_commands(page)
    assert len(commands) >= 3, commands
    for command in commands:
        known = runs_here(command) or reason_not_to_run(command) or command.startswith(tuple(RUN_ELSEWHERE))
        assert known, f"{command}: say in tests/test_words.py what runs it or what it needs"
        script = re.match(r"(?:python )?(scripts/\w+(?:\.py)?)", command)
        assert not script or (ROOT / script[1]).is_file(), command


def test_what_runs_the_readmes_commands_is_there() -> None:
    files = re.findall(r"tests/[\w*/]+\.py", " ".join(RUN_ELSEWHERE.values()))
    assert len(files) >= 15 and [file for file in files if not list(ROOT.glob(file))] == []


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_tests_of_the_readmes_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            other = target.read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.+)$", other, re.MULTILINE)
            places = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in places | set(re.findall(r'<a id="(\w+)"></a>', other)), anchor
    for name in re.findall(r"`((?:tests|scripts)/[a-z_\d*/]+(?:\.\w+)?|(?:\w+/)+\w+\.py)", text):
        assert any(list(folder.glob(name)) for folder in (ROOT, ROOT / "roundpipe_cli")), f"{page}: {name}"


def test_every_script_is_on_the_page() -> None:
    page = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and path.suffix in ("", ".py", ".sh")]
    assert scripts and [path.name for path in scripts if f"`{path.name}`" not in page] == []


@pytest.mark.parametrize("command", [one for one in ALL_COMMANDS if one.startswith("roundpipe ")])
def test_readme_commands_are_understood(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    top: Any = typer.main.get_command(app)
    parser, name = top, "roundpipe"
    while words and words[0] in getattr(parser, "commands", {}):
        context = parser.make_context(name, list(words), resilient_parsing=True)
        name, parser, words = parser.resolve_command(context, words)
    if parser is not top and not {"--help", "-h"} & set(words):
        parser.make_context(name, words)
    elif words:
        known = {option for parameter in parser.params for option in parameter.opts}
        assert words[0] in known | {"--help", "-h"}, command


@pytest.mark.parametrize("command", [one for one in ALL_COMMANDS if runs_here(one)])
def test_readme_commands_run(command: str) -> None:
    assert said(*shlex.split(command)[1:])[0]
