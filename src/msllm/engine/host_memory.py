"""Memory of the machine and of this process, as the operating system and its cgroups count it.

The CPU's side of `msllm.engine.device`, kept apart because it knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def resident() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def peak_resident() -> int:
    """Highest `resident` since the start or the last `reset_peak_resident`."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_resident() -> None:
    """Start `peak_resident` anew, where Linux lets us (5 in clear_refs: see proc(5))."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def total() -> int:
    """Bytes of the machine, or the lowest cgroup limit above this process if that is less."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_figures())])


def available() -> int:
    """Bytes that can still be had without swapping, within every cgroup limit."""
    rooms = [max(limit - used, 0) for limit, used in _cgroup_figures()]
    return min([int(psutil.virtual_memory().available), *rooms])


def _cgroup_figures() -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each cgroup above this process that has a limit.

    File cache that can be dropped does not count as used. Both cgroup versions name the same
    figures differently.
    """
    for folder in _cgroup_folders(_CGROUPS):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_file)
            if limit is not None and limit < 1 << 60:  # version 1 says "none" by a huge number
                used = _number(folder / used_file) or 0
                yield limit, max(used - _reclaimable(folder), 0)


def _cgroup_folders(root: Path) -> list[Path]:
    folders = [root, root / "memory"]
    with contextlib.suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            base = root / controllers
            below = Path(path.lstrip("/"))
            folders += [base / part for part in (below, *below.parents) if str(part) != "."]
    return [folder for folder in folders if folder.is_dir()]


def _reclaimable(folder: Path) -> int:
    with contextlib.suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
