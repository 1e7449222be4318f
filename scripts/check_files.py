"""Check tracked files for what no linter sees: size, whitespace, line ends, merge marks.

Used by `make lint` and pre-commit; takes file names, or looks at every tracked file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LARGEST = 250 * 1024
BINARY = {".png", ".gz", ".zst", ".parquet", ".arrow", ".bin", ".idx", ".safetensors"}
MERGE_MARKS = ("<" * 7 + " ", ">" * 7 + " ")


def faults(path: Path) -> list[str]:
    """Say what is wrong with one file, as `path:line: text`."""
    data = path.read_bytes()
    found = []
    if len(data) > LARGEST:
        found.append(f"{path}: {len(data) // 1024} kB; files over {LARGEST // 1024} kB stay out")
    if path.suffix in BINARY or not data:
        return found
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return [*found, f"{path}: is not UTF-8"]
    if "\r" in text:
        found.append(f"{path}: has carriage returns; lines end with \\n")
    if not text.endswith("\n") or text.endswith("\n\n"):
        found.append(f"{path}: should end with one newline")
    for number, line in enumerate(text.splitlines(), 1):
        if line != line.rstrip() and path.suffix != ".md":
            found.append(f"{path}:{number}: white space at the end of the line")
        if line.startswith(MERGE_MARKS):
            found.append(f"{path}:{number}: a merge mark")
    return found


def tracked() -> list[str]:
    """Every file that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True)
    return [name for name in listed.stdout.decode().split("\0") if name]


def main() -> int:
    """Print all faults; 1 if there are any."""
    paths = [Path(name) for name in (sys.argv[1:] or tracked())]
    found = [fault for path in paths if path.is_file() for fault in faults(path)]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
