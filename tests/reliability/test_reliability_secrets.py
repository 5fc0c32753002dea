"""What must never come out: secrets, connections, files that others can read; and libraries that are too old."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from roundpipe_cli.errors import RecipeError, redact, redact_values
from roundpipe_cli.events import Notice, run_clock
from roundpipe_cli.train import floors
from roundpipe_cli.train.monitor.telemetry import EventRecorder
from tests.support.e2e import launch, make_workspace
from tests.torture import guard

NAMES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")
CANARIES = {name: f"canary-{index}-Zx81kQw7" for index, name in enumerate(NAMES)}


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return make_workspace(tmp_path / "work", model, num_train_epochs=1)


def leaks(folder: Path) -> list[str]:
    """Files of the working directory and of the cache, output included, that hold a canary."""
    values = [value.encode() for value in CANARIES.values()]
    cache = Path(os.environ["ROUNDPIPE_CACHE"])
    files = [path for top in (folder, cache) for path in top.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(value in path.read_bytes() for value in values)]


@pytest.mark.parametrize(
    ("words", "fault", "code"),
    [
        (("model=./nothing-{HF_TOKEN}",), "", 2),
        (("datasets=[{{path: 'https://me:{WANDB_API_KEY}@example.org/rows.jsonl'}}]", "--offline"), "", 2),
        (("learning_rate={AWS_SECRET_ACCESS_KEY}",), "", 2),
        ((), "compute:raise:step=1", 1),
    ],
)
def test_no_secret_comes_out(folder: Path, words: tuple[str, ...], fault: str, code: int) -> None:
    """Whether it is refused or crashes, with the debug variable set; the test of connections has runs that end well."""
    environment = {**CANARIES, "ROUNDPIPE_DEBUG": "1", "ROUNDPIPE_FAULT": fault}
    filled = [word.format(**CANARIES) for word in words]
    done = launch(folder, "finetune", "recipe.yaml", *filled, environment=environment).finish()
    assert done.code == code, done.err
    assert ("Traceback" in done.err) == (code == 1), "of a bug, and of nothing else"
    assert leaks(folder) == []


def test_secrets_are_masked() -> None:
    assert redact("https://user:pass@host/x and s3://key:word@b") == "https://***@host/x and s3://***@b"
    assert redact("plain https://host/x@y words") == "plain https://host/x@y words"
    assert redact("https://hf_abcdefgh@host/x and git+ssh://token@b") == "https://***@host/x and git+ssh://***@b"


@pytest.mark.parametrize("secret", ['with"quotes"', "it's one", "back\\slash\\", "pässwörd-ß", "two\nlines"])
def test_a_secret_of_any_characters_is_masked_in_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    """Secrets with quotes, or other than ASCII, were masked in events.jsonl after JSON had escaped them."""
    monkeypatch.setenv("WANDB_API_KEY", secret)
    recorder = EventRecorder(tmp_path, run_clock(), lambda event: None)
    with recorder.opened(0):
        for text in (f"asked with {secret}", f"found {secret!r}", f"found {json.dumps(secret)}"):
            recorder(Notice(text))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    texts = [str(line["text"]) for line in lines if line["event"] == "Notice"]
    assert [text.replace("'", "").replace('"', "") for text in texts] == ["asked with ***", "found ***", "found ***"]
    masked = {"a": ["***", 1, None], "b": {"c": "x ***"}}
    assert redact_values({"a": [secret, 1, None], "b": {"c": f"x {secret}"}}) == masked


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("max_steps=1",), 0),
        (("--offline", "model=nobody/nothing"), 2),  # names of the hub
        (("--offline", "datasets=[{path: nobody/rows}]"), 2),
    ],
)
def test_no_connection_is_opened(folder: Path, words: tuple[str, ...], code: int) -> None:
    """Neither `--offline` nor a run of local files: no socket, no other program (Python's audit events)."""
    before = functools.partial(guard.watch, str(folder / "report"), 8 * 1024**3, helpers=True)
    launch(folder, "finetune", "recipe.yaml", *words, environment=CANARIES, before=before).finish().expect(code)
    assert (folder / "report").read_text() == "" and leaks(folder) == []


@pytest.mark.parametrize("mask", [0, 0o077])
def test_state_is_private_and_the_result_is_not(folder: Path, mask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever umask the user has."""
    cache = folder / "cache"  # of this run alone: what other tests share was made with their umask
    monkeypatch.setenv("ROUNDPIPE_CACHE", str(cache))
    before = functools.partial(os.umask, mask)
    launch(folder, "finetune", "recipe.yaml", "output_dir=new/out", "max_steps=1", before=before).finish().expect(0)
    out = folder / "new" / "out"
    modes = {path.relative_to(out).as_posix(): path.stat().st_mode & 0o777 for path in out.rglob("*")}
    readable = {name for name, mode in modes.items() if mode & 0o077}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "recipe.yaml"} <= readable
    assert not [name for name in readable if name.startswith(("step-", ".roundpipe", "metrics", "events"))], modes
    assert out.stat().st_mode & 0o777 == 0o755
    assert list(cache.rglob("*"))
    assert not [path for path in cache.rglob("*") if path.stat().st_mode & 0o077]


@pytest.mark.parametrize(
    ("old", "words"),
    [
        ({"torch": "2.9.1+cpu", "transformers": "5.2.0", "safetensors": "0.7.0"}, "too old to be safe.*CVE-2025-32434"),
        ({"torch": "2.10.0"}, "torch is too old for this release"),
        *(
            ({name: "0.20.1"}, rf"{name} is too old for.*0\.20\.1")
            for name in ("peft", "huggingface_hub", "accelerate")
        ),
    ],
)
def test_old_libraries_are_refused(monkeypatch: pytest.MonkeyPatch, old: dict[str, str], words: str) -> None:
    """Story: an older PEFT ended the run by an ImportError, and only `doctor` knew why."""
    floors.check_floors()
    real = importlib.metadata.version
    monkeypatch.setattr(floors, "version", lambda name: old.get(name) or real(name))
    with pytest.raises(RecipeError, match=f"(?s){words}") as caught:
        floors.check_floors()
    assert caught.value.exit_code == 2 and len(caught.value.problems) == len(old)
    assert all(f"pip install -U '{name}>={floors.FLOORS[name][0]}" in str(caught.value) for name in old)


def test_the_floors_are_those_of_the_package() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert floors.FLOORS
    for name, (floor, _, _) in floors.FLOORS.items():
        assert f'"{name}>={floor}"' in text
