"""Repositories of ModelScope, or of the host that MODELSCOPE_ENDPOINT names.

Its library transfers, goes on after interruptions and checks digests by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from glob import escape
from pathlib import Path
from typing import Any

from msllm.engine.hub.repository import CONNECTIONS, RemoteFile, Repository
from msllm.errors import InputError, MsllmError, RunError, first_line

TOKEN_HINT = "set MODELSCOPE_API_TOKEN to a token that may read it"


class ModelScope:
    """The hub at MODELSCOPE_ENDPOINT."""

    name = "modelscope"

    def __init__(self) -> None:
        # its bars would fight with ours for the terminal, and it has no other switch for them
        os.environ.setdefault("TQDM_DISABLE", "1")
        from modelscope_hub import HubApi, HubConfig

        logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)
        config = HubConfig()
        self.endpoint: str | None = config.endpoint
        self._api: Any = HubApi(config)

    def repository(self, name: str, revision: str | None) -> Repository:
        """List a repository; see `Hub`."""
        revision = revision or "master"
        try:
            listed = self._api.list_repo_files(name, "model", revision=revision)
        except Exception as error:
            raise self._explained(error, name, revision) from error
        files = {
            file.path: RemoteFile(file.path, file.size, file.sha256 or "")
            for file in listed
            if not file.is_dir
        }
        return Repository(name, self.name, revision, files)

    def fetch(
        self,
        repository: Repository,
        files: Sequence[RemoteFile],
        folder: Path,
        received: Callable[[int], None],
    ) -> None:
        """Put files into a folder; see `Hub`."""
        from modelscope_hub import ProgressCallback

        class Watch(ProgressCallback):
            def update(self, size: int) -> None:
                received(size)

        try:
            self._api.download_repo(
                repository.name,
                "model",
                revision=repository.revision,
                local_dir=folder,
                max_workers=CONNECTIONS,
                progress_callbacks=[Watch],
                file_list=[
                    {"Path": file.name, "Size": file.size, "Sha256": file.digest} for file in files
                ],
            )
        except Exception as error:
            # one that the library collected from several files
            first = next(iter(getattr(error, "failed_files", {}).values()), error)
            raise self._explained(first, repository.name, repository.revision) from error

    def begun(self, files: Sequence[RemoteFile], folder: Path) -> int:
        """Count the bytes of unfinished files, whole streams and ranges; see `Hub`."""
        names = [escape(file.name) for file in files]
        globs = [g for name in names for g in (f"{name}.incomplete", f"{name}_[0-9]*_[0-9]*")]
        return sum(part.stat().st_size for pattern in globs for part in folder.glob(pattern))

    def _explained(self, error: BaseException, name: str, revision: str) -> MsllmError:
        """Say what a failure means to the user."""
        from modelscope_hub import errors

        where = f"{name} at {self.endpoint}"
        if isinstance(error, errors.NotExistError):
            hint = f"check both spellings; if it is private, {TOKEN_HINT}"
            return InputError(
                f"there is no repository {name}, or it has no revision {revision!r}", where, hint
            )
        if isinstance(error, errors.AuthenticationError | errors.PermissionDeniedError):
            hint = f"accept its licence on its page if there is one, then {TOKEN_HINT}"
            return InputError("the hub refuses access", where, hint)
        if isinstance(error, errors.InvalidParameter):
            return InputError(f"the hub does not take the name: {error}", where, "write ORG/MODEL")
        if isinstance(error, errors.FileIntegrityError):
            problem = f"a file arrived damaged: {error}"
        elif isinstance(error, errors.HubError | OSError):
            problem = f"the download failed: {first_line(error)}"
        else:
            raise error
        hint = "run the same command again: it goes on from what has come. --source hf is another"
        return RunError(problem, where, f"{hint} hub")
