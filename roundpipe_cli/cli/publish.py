"""Extras of `export` for a finished folder: a GGUF file by llama.cpp's converter, an upload."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from roundpipe_cli.errors import RefusedError
from roundpipe_cli.redact import redact

CONVERTER = "convert_hf_to_gguf.py"
GGUF_NAME = "model.gguf"
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
    found = named.expanduser() if named is not None else Path(shutil.which(CONVERTER) or "")
    if not found.is_file():
        where = str(named) if named is not None else "the PATH"
        raise RefusedError(f"--gguf needs llama.cpp's {CONVERTER}", where=where, found="no such file", hint=INSTALL)
    return found


def convert_to_gguf(converter: Path, folder: Path) -> Path:
    """Convert the model in `folder`; returns the file, which is in it.

    Raises:
        RefusedError: the converter failed; its last lines.
    """
    target = folder / GGUF_NAME
    words = [sys.executable, str(converter), str(folder), "--outfile", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
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


def push(folder: Path, name: str) -> str:
    """Upload `folder` to the hub, as a private repository if it is new; returns its address.

    Raises:
        RefusedError: not logged in, no network, or the hub refuses.
    """
    import huggingface_hub

    api: Any = huggingface_hub.HfApi()
    try:
        address = str(api.create_repo(name, private=True, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Upload from roundpipe export")
    except Exception as error:  # its errors are the network's, the login's, the hub's: all are for the user
        raise RefusedError(
            "the upload failed; the folder is as it was",
            where=f"--push {name}",
            found=redact(f"{type(error).__name__}: {error}".splitlines()[0][:300]),
            hint=f"hf auth login, then: hf upload {name} {folder}",
        ) from error
    return address
