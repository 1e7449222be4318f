"""Fetches a published model: the files that make one up, whole and checked, or not at all.

All is fetched into `DIR.part` beside `DIR`, which gets the name only when every file is there and
agrees with the hub's digests and the weights with their index. So no folder that another command
could take for a model is ever half full, whatever moment the process dies at; the same command
finds `DIR.part` and goes on.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msllm.engine.hub import selection
from msllm.engine.hub.repository import Hub, RemoteFile, Repository
from msllm.engine.output_path import check_parent
from msllm.engine.weights.published import PublishedWeights
from msllm.errors import InputError, Interrupted, RunError
from msllm.models.catalog import ModelCard, catalog

MARK = ".msllm-download.json"
SPARE = 64 << 20
"""Bytes that are left free on the disk."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a download is.

    Attributes:
        done: Bytes that are there, of this run and earlier ones.
        total: Bytes in all.
        received: Bytes of this run.
        seconds: How long it has been going on.
    """

    done: int
    total: int
    received: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was downloaded.

    Attributes:
        repository: Its name.
        source: The hub's name.
        revision: The commit, branch or tag.
        folder: Where it is.
        files: How many.
        size: Bytes of them.
        received: Bytes of them that came in this run.
        seconds: How long that took.
        notes: What the user should know of it.
    """

    repository: str
    source: str
    revision: str
    folder: str
    files: int
    size: int
    received: int
    seconds: float
    notes: tuple[str, ...]


def hub_of(source: str) -> Hub:
    """The hub with this name; its library is imported here."""
    if source == "modelscope":
        from msllm.engine.hub.modelscope import ModelScope

        return ModelScope()
    from msllm.engine.hub.huggingface import HuggingFace

    return HuggingFace()


def download(
    name: str,
    out: Path,
    *,
    source: str = "hf",
    revision: str | None = None,
    weights: bool = True,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Report:
    """Download a model of the catalog, or a repository, into the folder `out`.

    Raises:
        InputError: Name, revision or folder are wrong, the repository may not be read or holds no
            model, or the disk is too small.
        RunError: The hub can't be reached, or what it gives is damaged.
        Interrupted: By the user.
    """
    out = Path(os.path.normpath(out.expanduser().absolute()))
    card = catalog().find(name)
    repository_name, notes = find_repository(name, source)
    _check_out(out)
    hub = hub_of(source)
    repository = hub.repository(repository_name, revision)
    small = selection.describing(repository, weights)
    with _partial(out, card.name if card else name) as part:
        fetch = _Fetch(hub, repository, part, progress)
        fetch(small)
        wanted = small
        if weights:
            shards = selection.weights(repository, part)
            wanted = small + shards
            fetch(shards)
        notes += _check(repository, part, wanted)
        _finish(part, out, wanted)
    return Report(
        repository=repository.name,
        source=source,
        revision=repository.revision,
        folder=str(out),
        files=len(wanted),
        size=sum(file.size for file in wanted),
        received=fetch.received,
        seconds=fetch.seconds,
        notes=notes,
    )


def find_repository(name: str, source: str) -> tuple[str, tuple[str, ...]]:
    """The repository of a model, and what is to be said of it.

    A name of the catalog is any of a model's names there, so a repository's name at one hub finds
    the model at the other.
    """
    card = catalog().find(name)
    if card is not None:
        return _published(card, source)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name, ()
    near = ", ".join(catalog().suggest(name))
    raise InputError(
        f"unknown model {name!r}", hint=f"closest are {near}; a repository is written ORG/MODEL"
    )


def _published(card: ModelCard, source: str) -> tuple[str, tuple[str, ...]]:
    where = card.repositories
    found = where.modelscope if source == "modelscope" else where.huggingface
    if found is None:
        other = "hf" if source == "modelscope" else "modelscope"
        known = where.huggingface if source == "modelscope" else where.modelscope
        hint = f"--source {other} has it" if known else "give the name of a repository, ORG/MODEL"
        raise InputError(f"no repository of {card.name} is known at {source}", hint=hint)
    if source == "modelscope" and where.modelscope_guessed:
        return found, (f"the catalog guesses that {card.name} is {found} at ModelScope: check it",)
    return found, ()


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        kind = "is not empty" if out.is_dir() else "is a file"
        raise InputError(f"{out} {kind}", "--out", "name a folder that does not exist yet")
    if problems := check_parent(out, "--out"):
        raise InputError(problems)


class _Fetch:
    """Fetches lists of files into a folder, those that are not there, and says how far it is."""

    def __init__(
        self,
        hub: Hub,
        repository: Repository,
        folder: Path,
        progress: Callable[[Progress], None],
    ) -> None:
        self._hub, self._repository, self._folder = hub, repository, folder
        self._progress = progress
        self._done = self._total = self._earlier = 0
        self._started = time.monotonic()
        self._lock = threading.Lock()

    @property
    def received(self) -> int:
        """Bytes that came in this run."""
        return max(0, self._done - self._earlier)

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return time.monotonic() - self._started

    def __call__(self, files: Sequence[RemoteFile]) -> None:
        """Fetch files, after a look at the disk."""
        for file in files:
            if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", file.digest):
                raise RunError(f"the hub tells no digest of {file.name}", self._repository.name)
        missing = [file for file in files if not file.is_in(self._folder / file.name)]
        begun = self._hub.begun(missing, self._folder)
        there = sum(file.size for file in files if file not in missing)
        self._total += sum(file.size for file in files)
        self._done += there
        self._earlier += there + begun
        self._check_disk(sum(file.size for file in missing) - begun)
        try:
            self._hub.fetch(self._repository, missing, self._folder, self._count)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RunError(
                f"the disk is full: {error.strerror}",
                str(self._folder),
                "make room and run the same command again",
            ) from error

    def _check_disk(self, needed: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if needed > free - SPARE:
            raise InputError(
                f"{needed / 1e9:,.1f} GB are still to come, and {free / 1e9:,.1f} GB are free",
                f"--out, disk of {self._folder}",
                "make room or name a folder on another disk",
            )

    def _count(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress(Progress(self._done, self._total, self.received, self.seconds))


@contextmanager
def _partial(out: Path, model: str) -> Iterator[Path]:
    """Give the folder to fetch into, which is this process's alone.

    A folder that this call made goes away with an InputError, as nothing came of it.
    """
    part = out.with_name(f"{out.name}.part")
    mark = part / MARK
    fresh = not part.exists()
    if not fresh and not mark.is_file():
        raise InputError(
            f"{part} would be filled first, but is no unfinished download",
            "--out",
            "move it away, or name another folder",
        )
    part.mkdir(parents=True, exist_ok=True)
    with mark.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another download to {out} is going on", "--out") from None
        _claim(mark, model)
        try:
            yield part
        except InputError:
            if fresh:
                shutil.rmtree(part)
            raise
        except KeyboardInterrupt:
            raise Interrupted(
                "the download was stopped",
                str(part),
                "run the same command again: it goes on from what has come",
            ) from None


def _claim(mark: Path, model: str) -> None:
    """Write whose files the folder holds, or hold what is written against it.

    The hub is not written, nor the revision: digests tell which files still serve.
    """
    wanted = {"model": model}
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
    except ValueError:
        found = wanted  # new, or the process died while it wrote
    if found != wanted:
        raise InputError(
            f"{mark.parent} holds an unfinished download of {found.get('model')}",
            "--out",
            "finish that one first, remove the folder, or name another",
        )
    mark.write_text(json.dumps(wanted), encoding="utf-8")


def _check(repository: Repository, part: Path, wanted: Sequence[RemoteFile]) -> tuple[str, ...]:
    """Hold the weights against their index, and list what the user should know."""
    notes = []
    if any(file.name.endswith(".safetensors") for file in wanted):
        try:
            PublishedWeights(part)
        except InputError as error:
            problem = f"the repository is not whole: {error.problems[0].problem}"
            raise RunError(problem, repository.name, "ask its publisher") from error
    if any(file.name.endswith(selection.PICKLE) for file in wanted):
        notes.append("its weights are pickles (.bin), which can carry code: msllm runs none of it")
    if selection.own_code(part):
        notes.append(
            "its config asks for Python code of the repository (auto_map), which was not fetched: "
            "msllm runs none"
        )
    return tuple(notes)


def _finish(part: Path, out: Path, wanted: Sequence[RemoteFile]) -> None:
    """Drop what is left of another revision, and give the folder its name."""
    names = {part / file.name for file in wanted}
    for path in part.rglob("*"):
        if path.is_file() and path not in names:
            path.unlink()
    for path in sorted(part.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    part.replace(out)
