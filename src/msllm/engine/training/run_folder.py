"""Names inside a run's folder, in one place.

Everything that reads or writes a run's files asks here for their paths. What the files hold is
the business of those who write them.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msllm.errors import InputError, Problem


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder and the paths inside it. Nothing is created unless `create` is called."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved settings: enough to repeat the run."""
        return self.path / "run.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happens between steps (phases, checkpoints, warnings), one JSON object each."""
        return self.path / "events.jsonl"

    @property
    def tracker_id(self) -> Path:
        """The run's name at wandb and swanlab, so that a resumed run continues its curves."""
        return self.path / "tracker_id"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' logs."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, see `checkpoint_folder`."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def hf(self) -> Path:
        """Folder of weights exported in Hugging Face's format."""
        return self.path / "hf"

    def rank_log(self, rank: int) -> Path:
        """Path of one rank's log."""
        return self.logs / f"rank_{rank:04d}.log"

    def create(self) -> RunFolder:
        """Make the folder and those inside it that every run fills."""
        try:
            for folder in (self.path, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the run's folder {self.path}: {error.strerror}",
                "--out",
                "choose a folder that you may write to",
            ) from error
        return self

    @contextmanager
    def live(self) -> Iterator[None]:
        """Mark the folder as one of a run that goes on; the mark ends with the process.

        Raises:
            InputError: Another process has marked it.
        """
        with self._lock.open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError([self._taken(f"--out {self.path}")]) from None
            yield

    def check_live(self, where: str) -> list[Problem]:
        """Say so if a run goes on in the folder; `where` is how it was named. Writes nothing."""
        if not self._lock.exists():
            return []
        try:
            with self.live():
                return []
        except InputError:
            return [self._taken(where)]

    def _taken(self, where: str) -> Problem:
        hint = "wait for its end, stop it, or name another folder"
        return Problem(f"a run is going on in {self.path}", where, hint)

    @property
    def _lock(self) -> Path:
        return self.path / ".lock"

    def holds_run(self) -> bool:
        """Whether a run was already started in this folder."""
        if self.config.exists() or self.metrics.exists():
            return True
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
