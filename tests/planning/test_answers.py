"""Answers to earlier questions: equal questions are answered once, others anew, and damage is no error."""

from __future__ import annotations

from typing import Any

import pytest

from roundpipe_cli.cache import cache_folder
from roundpipe_cli.cli import bench_schedules
from roundpipe_cli.cli.bench_schedules import CaseFlags, simulate
from roundpipe_cli.planning import answers as known
from roundpipe_cli.planning import predict
from roundpipe_cli.planning.answers import Answers
from roundpipe_cli.planning.compare import StageCut
from roundpipe_cli.planning.predict import Plan, make_plan
from roundpipe_cli.planning.question import PlanRequest
from roundpipe_cli.recipe.load import load_recipe
from tests.cli.test_terminal_text import said

MACHINE = "1x4090,host_memory_gib=64"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Notes each time that stages are really searched."""
    noted: list[object] = []
    search = predict._cut

    def counted(question: PlanRequest, *more: Any) -> StageCut:
        noted.append(question)
        return search(question, *more)

    monkeypatch.setattr(predict, "_cut", counted)
    return noted


def plan(*words: str, answers: Answers | None = None, machine: str = MACHINE) -> Plan:
    return make_plan(load_recipe("qwen3/1.7b_lora_1x16gb", words), machine, None, answers or Answers())


def test_equal_questions_are_searched_once_and_others_anew(
    searches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second plan is the first one's. Another recipe, another machine and other code are other questions."""
    first, again = plan(), plan()
    assert len(searches) == 1 and again == first and again.timeline == first.timeline
    plan("lora.r=32")
    plan(machine="1x4090,host_memory_gib=48")
    monkeypatch.setattr(known, "code_digest", lambda: "another version")
    plan()
    assert len(searches) == 4


@pytest.mark.parametrize("old, new", [(b"stages", b"stage"), (b"1", b"2"), (b"{", b"[" * 9000)])
def test_a_damaged_answer_is_ignored_and_said(old: bytes, new: bytes, searches: list[object]) -> None:
    first = plan()
    for path in cache_folder("plans").glob("*.json"):
        path.write_bytes(path.read_bytes().replace(old, new))
    answers = Answers()
    assert plan(answers=answers).step_s == first.step_s
    assert len(searches) == 2
    assert answers.damage and all("cannot be used and is made again" in line for line in answers.damage)
    assert not Answers().damage and plan().step_s == first.step_s and len(searches) == 2, "it was repaired"


def test_plan_says_that_a_remembered_answer_is_damaged() -> None:
    words = ("plan", "quickstart", "--hardware", MACHINE)
    assert "remembered" not in said(*words)[1]
    for path in cache_folder("plans").glob("*.json"):
        path.write_bytes(b"{")
    assert "notice: the remembered plan in" in said(*words)[1]


def test_a_bench_again_simulates_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It took two to three times the processor time of one that remembers."""
    for as_json in (True, False):

        def ask(as_json: bool = as_json) -> None:
            simulate("quickstart", [], None, "2x4090", flags=CaseFlags(), schedules=None, svg=None, as_json=as_json)

        ask()
        first = capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(bench_schedules, "run", None)
            ask()
        assert capsys.readouterr() == first and "looped_bfs" in first.out
