"""Output folders that are made in parts, and appear whole by a rename or not at all.

Until then they lie beside their place, in `.NAME.partial/out`, with a record of the finished parts
in `.NAME.partial/.parts`: an interrupted run of the same work goes on behind them. What is in there
is taken for no model, and a lock keeps a second run out.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from msllm.engine.output_path import check_parent
from msllm.engine.training import checkpoint_folder
from msllm.errors import InputError, Problem

WORKERS = 2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says of a disk, a quota or a limit on files that is too small."""
RECORDS = ".parts"
WORK, FILES, LOCK = "work.json", "files.json", "lock"
DATA = "out"
_logger = logging.getLogger(__name__)
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

    `do` is given a function that it calls with the bytes done since the last call. `file` is the
    one that it makes, where it has one to itself.
    """

    size: int
    do: Callable[[Callable[[int], None]], Any]
    file: Path | None = None


def check_out(out: Path, where: str = "--out") -> list[Problem]:
    """List what keeps `out` from being made: it has something in it, or can't be written."""
    try:
        path = out.expanduser().resolve()
    except (RuntimeError, OSError) as error:  # no such user, links in a circle
        return [Problem(f"{out} leads nowhere: {error}", where, "name another folder")]
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        return [Problem(f"{out} exists and is not empty", where, "name a new folder, or remove it")]
    if path.is_mount():
        hint = f"name a folder in it, such as {out / 'model'}"
        return [Problem(f"{out} is the top of a disk, which can't be put there whole", where, hint)]
    return check_parent(path, where)


def refuse_taken(out: Path) -> None:
    """Raise what keeps `out` from being made."""
    if problems := check_out(out):
        raise InputError(problems)


def refuse_unfinished(folder: Path) -> None:
    """Raise if a folder is the output, or a part of it, of a conversion that is not done."""
    path = folder.expanduser().absolute()
    # os.path: where one may not look, others say so
    if any(os.path.exists(near / RECORDS / WORK) for near in (path, *path.parents[:2])):
        hint = "give the command again that was interrupted: it goes on"
        raise InputError("it is what an unfinished conversion has so far", str(folder), hint)


class PartialFolder:
    """The folder in which `out` comes into being; this process's alone while it is entered.

    Args:
        out: Where it is to be.
        work: What is done, as JSON has it; an interrupted run of other work is thrown away.

    Attributes:
        path: Where the files are made.
        seconds: How long `run` took.
    """

    def __init__(self, out: Path, work: dict[str, Any]) -> None:
        self.out = out.expanduser().resolve()
        self._folder = self.out.with_name(f".{self.out.name}.partial")
        self.path, self._records = self._folder / DATA, self._folder / RECORDS
        work = {**work, "msllm": importlib.metadata.version("msllm")}
        self._work = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
        self._prepared: list[Path] = []
        self._lock: IO[str] | None = None
        self._size = 0
        self.seconds = 0.0

    def __enter__(self) -> PartialFolder:
        """Keep others out, and find what an interrupted run has left.

        Raises:
            InputError: Another process is at it, or the place is taken by something else.
        """
        with self.guarded():
            self._take()
            record = self._records / WORK
            if not record.exists() or record.read_text() != self._work or not self.path.exists():
                if record.exists():
                    _logger.warning("what another conversion to %s left is removed", self.out)
                self._clear()
                record.write_text(self._work)
        return self

    def __exit__(self, *_: object) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        where, hint = str(self._folder), "remove it, or name another folder"
        if self._folder.is_symlink() or (self._folder.exists() and not self._folder.is_dir()):
            raise InputError("it is in the way: it must be a folder", where, hint)
        if self._folder.exists() and not self._records.is_dir() and any(self._folder.iterdir()):
            raise InputError("it is in the way: it is not of a conversion", where, hint)
        try:
            self._records.mkdir(parents=True, exist_ok=True)
            self._lock = (self._records / LOCK).open("w")
        except OSError as error:
            if error.errno in FULL:
                raise
            raise InputError(f"it can't be made: {error.strerror}", where, hint) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            hint = "wait for its end, or name another folder"
            raise InputError("another process is writing it", f"--out {self.out}", hint) from None
        except OSError:
            pass  # a disk without locks

    def _clear(self) -> None:
        """Forget what is done."""
        shutil.rmtree(self.path, ignore_errors=True)
        for path in self._records.glob("*.json"):
            path.unlink()
        self.path.mkdir()

    def prepare(self, size: int, make: Callable[[], object]) -> None:
        """Make the files that all parts write into, unless a run before has and they are whole.

        Args:
            size: Their bytes, about.
            make: Makes them.

        Raises:
            InputError: The disk is full; nothing is left behind.
        """
        record = self._records / FILES
        if not record.exists() or json.loads(record.read_text()) != self._sizes():
            self.check_room(size)
            with self.guarded():
                self._clear()
                (self._records / WORK).write_text(self._work)
                make()
                _replace(record, self._sizes())
        self._prepared = [self.path / name for name in json.loads(record.read_text())]

    def _sizes(self) -> dict[str, int]:
        paths = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {str(path.relative_to(self.path)): path.stat().st_size for path in paths}

    def record(self, number: int) -> Any:
        """What part `number` returned in this or an interrupted run; None if it is not done."""
        try:
            found = json.loads(self._record(number).read_text())
            name, size = found["file"]
            whole = name is None or (self.path / name).stat().st_size == size
            return found["value"] if whole else None
        except (FileNotFoundError, ValueError):
            return None

    def _record(self, number: int) -> Path:
        return self._records / f"{number:06d}.json"

    def _keep(self, number: int, part: Part, value: Any) -> None:
        """Record that a part is done, once its bytes are on the disk."""
        for path in [part.file] if part.file else self._prepared:
            checkpoint_folder.sync(path)
        file = (part.file.name, part.file.stat().st_size) if part.file else (None, 0)
        _replace(self._record(number), {"value": value, "file": file})

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
            self._keep(number, parts[number], found[number])
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
        self.seconds = time.monotonic() - begun
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
            written = sum(path.stat().st_blocks * 512 for path in self._folder.rglob("*"))
            free = shutil.disk_usage(self.out.parent).free
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
        if seal is not None:
            seal(self.path)
        with self.guarded():
            for path in self.path.rglob("*"):
                checkpoint_folder.sync(path)  # a name is no proof of content before
        if self.out.exists():
            self.out.rmdir()  # empty, as was checked
        os.replace(self.path, self.out)
        checkpoint_folder.sync(self.out.parent)
        self.discard()

    def discard(self) -> None:
        """Remove what is in the making."""
        self.__exit__()
        shutil.rmtree(self._folder, ignore_errors=True)


def _replace(path: Path, value: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    os.replace(new, path)
