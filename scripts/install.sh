#!/usr/bin/env bash
# Make a virtual environment with msllm and its development tools: scripts/install.sh [FOLDER].
# PYTHON names the interpreter; the first of 3.11 to 3.13 on PATH is taken when it is not set.
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) hold; a CPU build of torch is preferred
# wherever they offer one.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if command -v "$candidate" >/dev/null && usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11, 3.12 or 3.13 with the venv module is on PATH" >&2
    echo "hint: install one, or name it: make install PYTHON=/path/to/python3.11" >&2
    return 1
}

if [ ! -x "$venv/bin/python" ]; then
    python=${PYTHON:-$(find_python)}
    if ! usable "$python"; then
        echo "error: $python is not Python 3.11, 3.12 or 3.13 with the venv module" >&2
        exit 1
    fi
    echo "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# Older pips resolve this many packages badly.
if ! "$venv/bin/python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (23, 2))'; then
    pip install -qq --upgrade "pip>=23.2"
fi

echo "installing msllm and its tools into $venv (minutes the first time)"
pip install -qq --constraint constraints.txt --editable ".[dev]"
"$venv/bin/python" - <<'PY'
from importlib.metadata import version

print("ready:", ", ".join(f"{name} {version(name)}" for name in ("msllm", "torch", "megatron-core")))
PY
