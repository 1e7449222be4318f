"""Repositories of the Hugging Face hub, or of a mirror that HF_ENDPOINT names.

The library lists repositories, knows tokens and mirrors, and transfers bytes. Its own download of
a file begins anew after an interruption, which shards of gigabytes are too large for: here parts
stay, under names made of their content's digest, and the library is asked for the rest. That goes
over plain HTTP ranges; Xet's protocol, faster where it is served, can't be gone on with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING

from msllm.engine.hub.repository import CONNECTIONS, RemoteFile, Repository
from msllm.errors import InputError, MsllmError, RunError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

PARTS = ".unfinished"
TOKEN_HINT = "set HF_TOKEN to a token that may read it, from {}/settings/tokens"


class HuggingFace:
    """The hub at HF_ENDPOINT."""

    name = "hf"

    def __init__(self) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import disable_progress_bars, logging

        disable_progress_bars()
        logging.set_verbosity_error()
        self.endpoint: str = constants.ENDPOINT

    def repository(self, name: str, revision: str | None) -> Repository:
        """List a repository; see `Hub`."""
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(name, revision=revision, files_metadata=True)
        except Exception as error:
            raise self._explained(error, name, revision) from error
        return Repository(name, self.name, info.sha or revision or "main", _files(info))

    def fetch(
        self,
        repository: Repository,
        files: Sequence[RemoteFile],
        folder: Path,
        received: Callable[[int], None],
    ) -> None:
        """Put files into a folder; see `Hub`."""
        from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE as LARGEST

        if large := [file.name for file in files if file.size > LARGEST]:
            raise InputError(
                f"{large[0]} is over {LARGEST / 1e9:.0f} GB, which the hub gives over Xet only",
                repository.name,
                f"hf download {repository.name} --local-dir DIR fetches it",
            )
        waiting: SimpleQueue[RemoteFile] = SimpleQueue()
        done: SimpleQueue[Exception | None] = SimpleQueue()
        for file in files:
            waiting.put(file)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                try:
                    file = waiting.get_nowait()
                except Empty:
                    return
                try:
                    self._fetch(repository, file, folder, received, stop)
                    done.put(None)
                except Exception as error:
                    done.put(error)

        # daemons: one that waits for a silent hub must not hold up the end of the process
        threads = [threading.Thread(target=work, daemon=True) for _ in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        try:
            for _ in files:
                if (error := done.get()) is not None:
                    raise self._explained(error, repository.name, repository.revision) from error
        finally:
            stop.set()
            for thread in threads:
                thread.join(timeout=1)

    def begun(self, files: Sequence[RemoteFile], folder: Path) -> int:
        """Count the bytes of unfinished files; see `Hub`."""
        parts = (folder / PARTS / file.digest for file in files)
        return sum(part.stat().st_size for part in parts if part.exists())

    def _fetch(
        self,
        repository: Repository,
        file: RemoteFile,
        folder: Path,
        received: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        part = folder / PARTS / file.digest
        part.parent.mkdir(exist_ok=True)
        with part.open("ab") as stream:
            if stream.tell() > file.size:
                stream.truncate(0)
            received(stream.seek(0, os.SEEK_END))
            _receive(repository, file, _Watched(stream, received, stop))
        if not file.is_in(part):
            received(-part.stat().st_size)
            part.unlink()
            raise RunError(
                f"{file.name} arrived damaged: its digest is not the one that the hub tells",
                repository.name,
                "run the same command again to fetch it anew",
            )
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)

    def _explained(self, error: Exception, name: str, revision: str | None) -> MsllmError:
        """Say what a failure means to the user."""
        from huggingface_hub import errors

        page = f"{self.endpoint}/{name}"
        where = f"{name} at {self.endpoint}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, MsllmError):
            return error
        if isinstance(error, errors.GatedRepoError):
            hint = f"accept the licence at {page}, then {TOKEN_HINT.format(self.endpoint)}"
            return InputError("its publisher lets only those in who ask for it", where, hint)
        if isinstance(error, errors.RepositoryNotFoundError):
            hint = f"check the spelling; if it is private, {TOKEN_HINT.format(self.endpoint)}"
            return InputError(f"there is no repository {name}, or it is private", where, hint)
        if isinstance(error, errors.RevisionNotFoundError):
            hint = f"branches and tags are listed at {page}/tree/main"
            return InputError(f"there is no revision {revision!r}", f"--revision, {where}", hint)
        if isinstance(error, errors.HFValidationError):
            return InputError(f"{name!r} can't be a repository's name", hint="write ORG/MODEL")
        if isinstance(error, errors.OfflineModeIsEnabled):
            hint = "unset HF_HUB_OFFLINE, or download on a machine with a network and copy"
            return InputError("HF_HUB_OFFLINE is set, so nothing is downloaded", where, hint)
        if status in (401, 403):
            return InputError(
                f"the hub refuses access ({status})", where, TOKEN_HINT.format(self.endpoint)
            )
        if status is None and not isinstance(error, OSError) and not _is_of_http(error):
            raise error
        return RunError(
            f"the download failed: {_first_line(error)}",
            where,
            "run the same command again: it goes on from what has come. HF_ENDPOINT names a "
            "mirror, --source modelscope another hub",
        )


def _receive(repository: Repository, file: RemoteFile, into: _Watched) -> None:
    """Append what is missing, again as long as a broken connection brought something."""
    from huggingface_hub.file_download import hf_hub_url, http_get
    from huggingface_hub.utils import build_hf_headers

    # ranges are of the bytes that are stored, not of a compressed form of them
    headers = build_hf_headers(library_name="msllm") | {"Accept-Encoding": "identity"}
    url = hf_hub_url(repository.name, file.name, revision=repository.revision)
    while (start := into.tell()) < file.size:
        try:
            http_get(
                url,
                into,
                resume_size=start,
                headers=headers,
                expected_size=file.size,
                displayed_filename=file.name,
            )
        except Exception as error:
            if not _is_of_http(error) or into.tell() <= start:
                raise


class _Watched:
    """A file that tells of what is written, and refuses to go on once told to stop."""

    def __init__(
        self, stream: IO[bytes], received: Callable[[int], None], stop: threading.Event
    ) -> None:
        self._stream, self._received, self._stop = stream, received, stop

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise RunError("stopped")
        self._stream.write(data)
        self._received(len(data))
        return len(data)

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int) -> int:
        return self._stream.seek(offset)

    def truncate(self) -> int:
        """Drop what is after the position: the hub sends the file from its beginning again."""
        before = os.fstat(self._stream.fileno()).st_size
        size = self._stream.truncate()
        self._received(size - before)
        return size


def _files(info: ModelInfo) -> dict[str, RemoteFile]:
    found = {}
    for sibling in info.siblings or []:
        size = sibling.size or 0
        if sibling.lfs is not None:
            file = RemoteFile(sibling.rfilename, size, sibling.lfs.sha256)
        else:
            file = RemoteFile(sibling.rfilename, size, sibling.blob_id or "", blob=True)
        found[file.name] = file
    return found


def _is_of_http(error: Exception) -> bool:
    """Whether it comes from the HTTP client, which is another one in each major version."""
    return type(error).__module__.split(".")[0].startswith(("httpx", "httpcore"))


def _first_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
