"""Whether something can be written where it is to be: asked before the work, not after it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from msllm.errors import Problem


def existing_parent(path: Path) -> Path:
    """The nearest of the folders around `path` that is there."""
    return next(folder for folder in path.expanduser().absolute().parents if folder.exists())


def check_parent(path: Path, where: str) -> list[Problem]:
    """List what keeps `path`, which does not exist yet, from being made; `where` is its flag."""
    parent = existing_parent(path)
    if not parent.is_dir():
        return [Problem(f"{parent} is a file", where, "name another folder")]
    if not os.access(parent, os.W_OK | os.X_OK):
        return [Problem(f"you may not write to {parent}", where, "name another folder")]
    try:  # some file systems, /proc say, take nothing whatever the rights are
        Path(tempfile.mkdtemp(prefix=".msllm-", dir=parent)).rmdir()
    except OSError as error:
        problem = f"nothing can be written to {parent}: {error.strerror}"
        return [Problem(problem, where, "name another folder")]
    return []


def check_prefix(prefix: str | Path, where: str) -> list[Problem]:
    """List what keeps files whose names begin with `prefix` from being made.

    Of a text the slash at its end is seen, which says that a folder is meant.
    """
    path = Path(prefix)
    folder = str(prefix).endswith(os.sep) or path.expanduser().is_dir()
    if folder or not path.name or path.name == "..":
        hint = f"give a prefix, such as {path / 'text'}"
        return [Problem(f"{str(prefix)!r} is a folder, not the beginning of a name", where, hint)]
    return check_parent(path, where)
