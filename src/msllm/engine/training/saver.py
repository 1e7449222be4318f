"""Saver: when and how a running job writes its checkpoints, with all ranks in step.

The backend writes the files and `checkpoint_folder` makes a folder complete; here one rank does
what only one may do, between barriers, in the foreground or while training goes on.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from msllm.config import RunConfig
from msllm.engine.data.fingerprint import fingerprint
from msllm.engine.layout import Layout
from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import Checkpoint, Manifest
from msllm.engine.training.events import EventLog
from msllm.engine.training.exporter import Exporter
from msllm.engine.training.run_folder import RunFolder
from msllm.engine.weights import sidecar
from msllm.errors import RunError
from msllm.models.architecture import Architecture

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")


class Saver:
    """Writes a backend's checkpoints into a run's folder. All ranks call each method together."""

    def __init__(
        self,
        backend: Any,
        run: RunConfig,
        folder: RunFolder,
        architecture: Architecture,
        layout: Layout,
        resumed: Path | None = None,
    ):
        self._backend, self._run, self._folder = backend, run, folder
        self._architecture, self._layout = architecture, layout
        self._rank = dist.get_rank()
        self._events = EventLog(folder.events)
        first = self._rank == 0
        self._inputs = fingerprint(run.data) if first else {}
        # read now: it may be gone when saving
        self._beside = sidecar.of_run(run, resumed) if first else None
        self._exporter = Exporter(run, folder, self._events)
        self._queue: Any = None
        self.last_saved = -1

    def save(self, step: int, consumed_samples: int) -> None:
        """Save the state after `step`; in the background if the run says so.

        Raises:
            RunError: If the disk can't take it; what was there before is still there.
        """
        self.finish()
        if self._rank == 0:
            self._events.write("phase", "saving a checkpoint", step)
            with self._explained(step):
                checkpoint_folder.begin(self._folder.checkpoints, step)
        dist.barrier()
        path = self._folder.checkpoints / f".tmp-{checkpoint_folder.folder_name(step)}"
        commit = partial(self._commit, path, self._manifest(step, consumed_samples))
        background = self._run.checkpoint.async_save
        with self._explained(step):
            request = self._backend.save(path, background)
        if background:
            request.add_finalize_fn(commit)
            self._schedule(request)
        else:
            dist.barrier()
            commit()
            dist.barrier()
        self.last_saved = step

    def poll(self) -> None:
        """Complete a background save whose files are written; cheap when there is none."""
        self._complete(wait=False)

    def finish(self) -> None:
        """Wait for a background save."""
        self._complete(wait=True)

    def close(self) -> None:
        """Wait for all that goes on in the background at the end of a run.

        Raises:
            RunError: As `save`, or weights could not be exported.
        """
        self.finish()
        self._exporter.close()

    def _complete(self, wait: bool) -> None:
        if self._queue is not None:
            with self._explained(self.last_saved):
                self._queue.maybe_finalize_async_calls(blocking=wait)

    def _schedule(self, request: Any) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        if self._queue is None:
            self._queue = AsyncCallsQueue()
        self._queue.schedule_async_request(request)

    def _commit(self, path: Any, manifest: Manifest) -> None:
        if self._rank != 0:
            return
        with self._explained(manifest.step):
            if self._beside is not None:
                sidecar.keep(self._beside, path)
            checkpoint = checkpoint_folder.commit(path, manifest)
            self._exporter.finish()  # before what it reads may go
            checkpoint_folder.prune(self._folder.checkpoints, self._run.checkpoint.keep)
        self._events.write("checkpoint", f"checkpoint saved at step {manifest.step}", manifest.step)
        self._exporter.start(checkpoint)

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Raise what keeps a checkpoint from being written as a RunError."""
        try:
            yield
        except (OSError, CheckpointException) as error:
            why = _cause(error) if isinstance(error, CheckpointException) else error.strerror
            folder = self._folder.checkpoints
            free = shutil.disk_usage(folder).free
            raise RunError(
                f"the checkpoint of step {step} could not be written: {why or error}",
                str(folder),
                f"{free / 2**30:.2f} GiB are free there: see whether that is enough; the run can "
                "be resumed from the checkpoint before",
            ) from error

    def _manifest(self, step: int, consumed_samples: int) -> Manifest:
        config = self._run.model_dump_json()
        return Manifest(
            step=step,
            consumed_samples=consumed_samples,
            layout={name: getattr(self._layout, name) for name in SIZES},
            architecture=asdict(self._architecture),
            config_digest=hashlib.sha256(config.encode()).hexdigest(),
            extra={"optimizer": optimizer_format(self._run), "inputs": self._inputs},
        )


def optimizer_format(run: RunConfig) -> str:
    """How optimizer state is laid out in a checkpoint; it can only be read the same way."""
    if run.train.optimizer == "muon":
        return "muon"
    return "adamw, distributed" if run.layout.distributed_optimizer else "adamw"


def check_format(checkpoint: Checkpoint, run: RunConfig) -> None:
    """Raise RunError if the run's optimizer can't read the checkpoint's state."""
    saved, wanted = checkpoint.manifest.extra.get("optimizer"), optimizer_format(run)
    if saved is not None and saved != wanted:
        raise RunError(
            f"the checkpoint holds the state of another optimizer ({saved}) than this run's "
            f"({wanted})",
            str(checkpoint.path),
            "keep train.optimizer and layout.distributed_optimizer as they were",
        )


def _cause(error: CheckpointException) -> str:
    """What went wrong in writing, in one line; every rank fails then, but only rank 0 knows why."""
    words = [next((str(cause) for cause, _ in error.failures.values()), "")]
    dist.broadcast_object_list(words, src=0)
    return (words[0].strip() or "a rank could not write its files").splitlines()[0]
