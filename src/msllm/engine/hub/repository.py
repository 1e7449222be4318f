"""What all hubs are alike in: a repository's files, and fetching some of them.

A hub is whoever serves repositories. The two that there are differ in their client libraries, and
each has a module here; who asks them sees this only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CONNECTIONS = 4
"""Files that are fetched at a time."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        name: Its path there, with slashes.
        size: Bytes.
        digest: What its content hashes to, in hexadecimal.
        blob: The digest is git's SHA-1 of a blob; else it is a plain SHA-256.
    """

    name: str
    size: int
    digest: str
    blob: bool = False

    def is_in(self, path: Path) -> bool:
        """Whether the file at `path` has this content. Reads all of it."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        with path.open("rb") as stream:
            if not self.blob:
                return hashlib.file_digest(stream, "sha256").hexdigest() == self.digest
            digest = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
            while block := stream.read(1 << 20):
                digest.update(block)
            return digest.hexdigest() == self.digest


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as it was when it was asked for.

    Attributes:
        name: ORGANIZATION/MODEL.
        hub: What its hub is called.
        revision: The commit, or where a hub names none, the branch or tag.
        files: All files, by name.
    """

    name: str
    hub: str
    revision: str
    files: dict[str, RemoteFile]


class Hub(Protocol):
    """Where repositories are."""

    @property
    def name(self) -> str:
        """What it is called: `hf` or `modelscope`."""

    def repository(self, name: str, revision: str | None) -> Repository:
        """List a repository.

        Raises:
            InputError: There is none of that name or revision, or it may not be read.
            RunError: The hub can't be reached.
        """

    def fetch(
        self,
        repository: Repository,
        files: Sequence[RemoteFile],
        folder: Path,
        received: Callable[[int], None],
    ) -> None:
        """Put files into a folder, each there whole and checked or not at all.

        What an earlier call left behind is gone on from. `received` is told of bytes, also those
        of earlier calls (and less than none, if they must come again), from any thread.

        Raises:
            InputError: One may not be read.
            RunError: The hub can't be reached, or what comes is damaged; what came is kept.
        """

    def begun(self, files: Sequence[RemoteFile], folder: Path) -> int:
        """Count the bytes that an interrupted `fetch` of the files left in the folder."""
