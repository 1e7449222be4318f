"""Output folders that are made in parts, and appear whole by a rename or not at all.

Until then they lie beside their place as `.NAME.partial`, with a record of the finished parts: an
interrupted run of the same work goes on behind them. Nothing takes such a folder for a model.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msllm.engine.output_path import check_parent
from msllm.engine.training import checkpoint_folder
from msllm.errors import InputError, Problem

WORKERS = 2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says of a disk, a quota or a limit on files that is too small."""
RECORDS = ".parts"
WORK = "work.json"
ROOM = 64 * 2**20
"""Bytes that must be free beside the output's own: indexes, tokenizer files."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work is, in bytes of output, and how long it has run."""

    done: int
    total: int
    seconds: float
    resumed: int = 0
    """Bytes that an earlier, interrupted run had done."""

    @property
    def bytes_per_second(self) -> float:
        """Speed of this run."""
        return (self.done - self.resumed) / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the work: `size` bytes of output, and what does it, returning its record.

    `do` is given a function that it calls with the bytes done since the last call.
    """

    size: int
    do: Callable[[Callable[[int], None]], Any]


def check_out(out: Path, where: str = "--out") -> list[Problem]:
    """List what keeps `out` from being made: it has something in it, or can't be written."""
    path = out.expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        return [Problem(f"{out} exists and is not empty", where, "name a new folder, or remove it")]
    return check_parent(path, where)


def refuse_taken(out: Path) -> None:
    """Raise what keeps `out` from being made."""
    if problems := check_out(out):
        raise InputError(problems)


class PartialFolder:
    """The folder in which `out` comes into being.

    Args:
        out: Where it is to be.
        work: What is done, as JSON has it; an interrupted run of other work is thrown away.
    """

    def __init__(self, out: Path, work: dict[str, Any]) -> None:
        out = out.expanduser().absolute()
        self._size = 0
        self.out, self.path = out, out.with_name(f".{out.name}.partial")
        self._work = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
        record = self.path / RECORDS / WORK
        if not record.exists() or record.read_text() != self._work:
            shutil.rmtree(self.path, ignore_errors=True)
            record.parent.mkdir(parents=True)
            record.write_text(self._work)

    def record(self, number: int) -> Any:
        """What part `number` returned in this or an interrupted run; None if it is not done."""
        try:
            return json.loads(self._record(number).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _record(self, number: int) -> Path:
        return self.path / RECORDS / f"{number:06d}.json"

    def check_room(self, size: int) -> None:
        """Refuse the work if the disk has no room for `size` more bytes."""
        self._size = size
        free = shutil.disk_usage(self.path).free
        if free < size + ROOM:
            self.discard()
            raise InputError(
                f"the output takes {size / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free: "
                f"{(size + ROOM - free) / 2**30:.2f} GiB are missing",
                f"--out {self.out}",
                "free some, or name a folder on another disk",
            )

    def run(
        self, parts: Sequence[Part], progress: Callable[[Progress], None] | None = None
    ) -> list[Any]:
        """Do all parts that are not done, a few at a time; give all records in order.

        Raises:
            InputError: The disk is full; nothing is left behind.
        """
        begun, total = time.monotonic(), sum(part.size for part in parts)
        self._size = total
        found = [self.record(number) for number in range(len(parts))]
        resumed = sum(p.size for p, record in zip(parts, found, strict=True) if record is not None)
        done, lock = resumed, threading.Lock()

        def advance(size: int) -> None:
            nonlocal done
            with lock:
                done += size
                if progress is not None:
                    progress(Progress(done, total, time.monotonic() - begun, resumed))

        def do(number: int) -> None:
            told = [0]

            def count(size: int) -> None:
                told[0] += size
                advance(size)

            found[number] = parts[number].do(count)
            new = self._record(number).with_suffix(".new")
            new.write_text(json.dumps(found[number]))
            os.replace(new, self._record(number))
            advance(parts[number].size - told[0])

        with self.guarded(), ThreadPoolExecutor(WORKERS) as pool:
            jobs = [pool.submit(do, n) for n, record in enumerate(found) if record is None]
            try:
                finished, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                for job in finished:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return found

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Take a disk that can't hold what is written into the folder for what it is.

        Raises:
            InputError: The disk is full; nothing is left behind.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            written = sum(path.stat().st_blocks * 512 for path in self.path.rglob("*"))
            free = shutil.disk_usage(self.path).free
            self.discard()
            missing = max(self._size + ROOM - written - free, 0)
            raise InputError(
                f"the disk can't take it ({error.strerror}): the output takes "
                f"{self._size / 2**30:.2f} GiB, about {missing / 2**30:.2f} GiB are missing",
                f"--out {self.out}",
                "free some, or name a folder on another disk; what was written is removed",
            ) from error

    def publish(self, seal: Callable[[Path], object] | None = None) -> None:
        """Give the finished folder its name, once `seal` has described what is in it."""
        shutil.rmtree(self.path / RECORDS)
        if seal is not None:
            seal(self.path)
        with self.guarded():
            for path in self.path.rglob("*"):
                checkpoint_folder.sync(path)  # a name is no proof of content before
        if self.out.exists():
            self.out.rmdir()  # empty, as was checked
        os.replace(self.path, self.out)
        checkpoint_folder.sync(self.out.parent)

    def discard(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
