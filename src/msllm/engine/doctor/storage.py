"""Room and kind of the disks that a run writes to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from msllm.engine.doctor.finding import Finding, Verdict
from msllm.engine.output_path import check_parent, existing_parent

GIB = 2**30
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cephfs", "ceph", "cifs", "fuse", "dpc", "9p")
"""File systems that several machines may see, by the names in /proc/mounts."""
LEAST_FREE, LEAST_SHARED_MEMORY = 50 * GIB, GIB
MEMORY = Path("/dev/shm")


def findings(out: Path, others: int) -> Iterator[Finding]:
    """Judge where runs go, and the memory that processes share.

    Args:
        out: Where runs will be written; it need not be there yet.
        others: How many other nodes the job has.
    """
    folder, about = existing_parent(out / "run"), f"disk of {out}"
    for problem in check_parent(out / "run", "--out"):
        mend = "choose a folder that you may write to (--out)"
        yield Finding(about, Verdict.FAULT, problem.problem, mend)
    free = shutil.disk_usage(folder).free
    said = f"{free / GIB:,.0f} GiB free"
    if free < LEAST_FREE:
        mend = "a checkpoint of a 7 B model takes about 90 GiB with its optimizer"
        yield Finding(about, Verdict.WARNING, said, mend)
    else:
        yield Finding(about, Verdict.OK, said)
    kind = file_system(folder)
    is_shared = kind is not None and kind.startswith(SHARED)
    if others and not is_shared:
        mend = "all nodes must see one --out: name a folder on a shared file system"
        yield Finding("shared storage", Verdict.WARNING, f"{folder} is on {kind or '?'}", mend)
    elif is_shared:
        yield Finding("shared storage", Verdict.OK, f"{folder} is on {kind}")
    if MEMORY.is_dir():
        room = shutil.disk_usage(MEMORY).free
        bad = room < LEAST_SHARED_MEMORY
        mend = "start the container with --shm-size=16g or --ipc=host" if bad else ""
        verdict = Verdict.WARNING if bad else Verdict.OK
        yield Finding("shared memory", verdict, f"{room / GIB:.1f} GiB free in {MEMORY}", mend)


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the file system that a folder is on; None where the system does not tell."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    resolved = folder.resolve()
    found = [
        (len(point), kind)
        for _, point, kind, *_ in lines
        if resolved.is_relative_to(Path(point.replace("\\040", " ")))
    ]
    return max(found, default=(0, None))[1]
