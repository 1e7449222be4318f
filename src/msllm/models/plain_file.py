"""Opens files that others made, and reads their JSON: whatever may be wrong with them is told.

A pipe or device in place of a file would be waited on for ever: only regular files are opened.
"""

from __future__ import annotations

import json
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from msllm.errors import InputError


def open_file(path: Path) -> BufferedReader:
    """Open a regular file, to be read.

    Raises:
        InputError: It is missing, is no regular file, or may not be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError("it is no regular file", str(path), "put the file itself there")
        return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from error


def read_json(path: Path) -> Any:
    """Read a file of JSON.

    Raises:
        InputError: It can't be read, or is no JSON.
    """
    with open_file(path) as file:
        return parse_json(file.read(), path)


def parse_json(content: bytes, path: Path) -> Any:
    """Read JSON; `path` is where it comes from.

    Raises:
        InputError: It is none, or nested too deeply, or a number in it has too many digits.
    """
    where = str(path)
    try:
        return json.loads(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        hint = "the file may be cut short: fetch it again"
        raise InputError(f"not valid JSON: {error.msg}", f"{where}:{error.lineno}", hint) from error
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read it: {error}", where, "it must be text in UTF-8") from error
    except RecursionError as error:
        raise InputError("not valid JSON: it is nested too deeply", where) from error
    except ValueError as error:
        raise InputError("a number in it has too many digits", where) from error


def unreadable(path: Path, error: OSError) -> InputError:
    """Say why a file can't be opened."""
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path.name} is missing", str(path.parent), "copy or download it again")
    if isinstance(error, PermissionError):
        return InputError("you may not read it", str(path), "ask its owner, or chmod it")
    return InputError(f"it can't be read: {error.strerror or error}", str(path))
