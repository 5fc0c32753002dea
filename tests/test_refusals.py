"""Every refusal of the product is named by its words in a test: one that is lost or says another thing is seen."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roundpipe_cli.cache import cache_folder
from roundpipe_cli.data.messages import read_called, read_history
from roundpipe_cli.data.rows import BadRowError
from roundpipe_cli.data.settings import DatasetSpec
from roundpipe_cli.data.sources import find_sources
from roundpipe_cli.errors import RoundpipeError
from roundpipe_cli.faults import load_faults
from tests.cli.test_terminal_text import ROWS

ROOT = Path(__file__).parents[1]
ERRORS = {"BadRowError", "Problem", "RefusedError", "ResourceError", "unfit"}
NUM_WORDS = 2  # words in a row that name a refusal


def refusals() -> Iterator[tuple[str, list[str]]]:
    """Place and the parts, without what is filled in, of the first sentence of every error that product code makes."""
    for path in sorted((ROOT / "roundpipe_cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS):
                continue
            sentence = node.args[0] if node.args else None
            texts = sentence.values if isinstance(sentence, ast.JoinedStr) else [sentence]
            parts = [text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]
            yield f"{path.relative_to(ROOT)}:{node.lineno}", parts


def test_every_refusal_is_named_by_its_words() -> None:
    """A refusal whose sentence has less than two words of its own in a row is named by them all."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    golden = [*(ROOT / "tests/golden").glob("*.txt"), *(ROOT / "tests/golden_data").glob("*.json")]
    texts += [path.read_text(encoding="utf-8") for path in golden]
    tested = " ".join(re.sub(r"[\"\\]", " ", " ".join(texts)).split())
    unnamed, found = [], list(refusals())
    assert len(found) > 300
    for place, parts in found:
        runs = [words for words in (part.split() for part in parts) if len(" ".join(words)) >= 8]
        most = min(NUM_WORDS, max(map(len, runs), default=0))
        phrases = [" ".join(words[at : at + most]) for words in runs for at in range(len(words) - most + 1)]
        phrases = [phrase for phrase in phrases if len(phrase) >= 8]
        if phrases and not any(phrase in tested for phrase in phrases):
            unnamed.append(f"{place}: {phrases[0]}")
    assert not unnamed, "\n".join(unnamed)


def found(path: str, split: str = "train") -> None:
    find_sources(DatasetSpec(path, split=split), None, offline=True)


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "calls has no call": lambda: read_called("[]", "calls"),
    "`history[0]` is no exchange": lambda: read_history([["only a question"]], "history"),
    "a local file has only the split `train`": lambda: found("rows.jsonl", "test"),
    "mixed: there are too many files": lambda: found("mixed/*"),
    "many: there are too many files": lambda: found("many"),
}


@pytest.mark.parametrize("words", FUNCTIONS)
def test_functions(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("roundpipe_cli.data.sources.MAX_FILES", 1)
    for name in ("rows.jsonl", "mixed/a.jsonl", "mixed/b.csv", "many/a.jsonl", "many/b.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(ROWS)
    with pytest.raises((BadRowError, RoundpipeError)) as refused:
        FUNCTIONS[words]()
    assert words in str(refused.value)


def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROUNDPIPE_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(RoundpipeError, match="the cache cannot be kept where the environment says"):
        cache_folder("plans")
    monkeypatch.setenv("ROUNDPIPE_FAULT", "compute:slow=fast")
    with pytest.raises(RoundpipeError, match="cannot be understood: could not convert"):
        load_faults()
