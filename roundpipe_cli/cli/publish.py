"""Extras of `export` for a finished folder: a GGUF file by llama.cpp's converter, an upload."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import Problem, RefusedError, redact
from roundpipe_cli.files import TEMPORARY_PREFIX, kind_of_file, named_path, stays_inside

CONVERTER = "convert_hf_to_gguf.py"
GGUF_NAME = "model.gguf"
STALLED_S = 600.0
"""Seconds without computing or writing after which a program counts as stuck."""
LOOK_S = 1.0
INSTALL = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install -r "
    "llama.cpp/requirements/requirements-convert_hf_to_gguf.txt, "
    "then --gguf --converter llama.cpp/convert_hf_to_gguf.py"
)


def find_converter(named: Path | None) -> Path:
    """llama.cpp's converter: as named, else on the PATH.

    Raises:
        RefusedError: it is not there; the hint is the command that installs it.
    """
    found = named_path(named) if named is not None else Path(shutil.which(CONVERTER) or "")
    if not found.is_file():
        missing = f"no file {named}" if named is not None else "it is not on the PATH"
        raise RefusedError(f"--gguf needs llama.cpp's {CONVERTER}", found=missing, hint=INSTALL)
    return found


def convert_to_gguf(converter: Path, folder: Path) -> Path:
    """Convert the model in `folder`; returns the file, which is in it.

    Raises:
        RefusedError: the converter failed, with its last lines, or does nothing any more.
    """
    target = folder / GGUF_NAME
    words = [sys.executable, str(converter), str(folder), "--outfile", str(target)]
    done = _run(words, target)
    if done.returncode or not target.is_file():
        target.unlink(missing_ok=True)
        said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise RefusedError(
            "the converter to GGUF failed; the merged model is as it was",
            where=str(converter),
            found=redact(said[-500:]) or f"exit code {done.returncode}",
            hint=f"by hand: {' '.join(words)}",
        )
    return target


def _run(words: list[str], target: Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; ended by SIGKILL once it has done nothing for `STALLED_S`."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        before, since_s = (0, 0), time.monotonic()
        while True:
            try:
                out, err = process.communicate(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                now = _progress(process.pid, target)
                if now != before:
                    before, since_s = now, time.monotonic()
                elif time.monotonic() - since_s > STALLED_S:
                    process.kill()
                    _, err = process.communicate()
                    err = f"it did nothing for {STALLED_S:g} s and was ended"
                    return subprocess.CompletedProcess(words, -signal.SIGKILL, "", err)
            except BaseException:
                process.kill()
                raise
            else:
                return subprocess.CompletedProcess(words, process.returncode, out, err)


def _progress(pid: int, target: Path) -> tuple[int, int]:
    """Processor time in ticks, and bytes written; either grows while the program does something."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        ticks = int(words[11]) + int(words[12])
    except (OSError, ValueError, IndexError):
        ticks = 0
    return ticks, target.stat().st_size if target.exists() else 0


def push(folder: Path, name: str) -> str:
    """Upload `folder` to the hub, as a private repository if it is new; returns its address.

    Raises:
        RefusedError: not logged in, no network, the hub refuses, or a file is a link that leads out of the folder.
    """
    check_upload(folder)
    problem = Problem(
        "the upload failed; the folder is as it was",
        where=f"--push {name}",
        hint=f"hf auth login, then: hf upload {name} {folder}",
    )
    return _upload(folder, name, problem)


def push_result(output_dir: Path, name: str, base: str) -> str:
    """Upload the result of a finished run, without its checkpoints and logs; returns the repository's address.

    Args:
        base: name of the base model, for the card.

    Raises:
        RefusedError: as of `push`; the result is there and can be uploaded later.
        ResourceError: disk full or failing.
    """
    import tempfile  # would be a tenth of the time of `export --help`

    from roundpipe_cli.train.result.export import Extras, copy_result

    exported = f"{output_dir}-exported"
    problem = Problem(
        "the run is finished, and its upload failed",
        where=f"hub_model_id: {name}",
        hint=f"hf auth login, then: roundpipe export {output_dir} --to {exported} --push {name}",
    )
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=output_dir) as folder:
        copy_result(output_dir, Path(folder) / "result", Extras(base))
        return _upload(Path(folder) / "result", name, problem)


def make_repository(name: str, *, offline: bool) -> None:
    """Make the repository that a run's result will be uploaded to, unless it is there: a mistake shows before training.

    Raises:
        RefusedError: not logged in, no network, or the hub refuses.
    """
    problem = Problem(
        "the result of this run could not be uploaded",
        where=f"hub_model_id: {name}",
        hint="hf auth login; or delete the line",
    )
    if offline:
        raise RefusedError(problem.what, where=problem.where, found="--offline", hint="~hub_model_id uploads nothing")
    _upload(None, name, problem)


def _upload(folder: Path | None, name: str, problem: Problem) -> str:
    """Make a repository if it is new, and upload `folder`, if there is one."""
    import huggingface_hub

    api: Any = huggingface_hub.HfApi()
    try:
        address = str(api.create_repo(name, private=True, exist_ok=True))
        if folder is not None:
            api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Upload from roundpipe")
    except Exception as error:  # errors of the network, the login or the hub: all are for the user
        found = redact(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        raise RefusedError(problem.what, where=problem.where, found=found, hint=problem.hint) from error
    return address


def check_upload(folder: Path) -> None:
    """Refuse to upload what does not lie in `folder`: the hub's client reads through links.

    Raises:
        RefusedError: a link that leads out of it, or no regular file.
    """
    for path in sorted(folder.rglob("*")):
        leads_out = not stays_inside(path, folder)
        if leads_out or not (path.is_dir() or path.is_file()):
            raise RefusedError(
                "a file of the folder is not uploaded, and so none is",
                where=str(path),
                found=f"a link to {path.resolve()}" if leads_out else kind_of_file(path.stat().st_mode),
                expected="regular files of the folder itself",
                hint="put a copy of the file in its place, or remove it",
            )
