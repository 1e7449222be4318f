"""Exports a run's checkpoints as Hugging Face weights, beside the training that goes on.

Each export is a process of its own: it neither slows a step nor costs a rank memory, and one that
fails costs no training. It is the job of one rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from msllm.config import RunConfig
from msllm.engine import launch
from msllm.engine.training.checkpoint_folder import Checkpoint
from msllm.engine.training.events import EventLog
from msllm.engine.training.run_folder import RunFolder
from msllm.errors import MsllmError, RunError


@dataclass(slots=True)
class Exporter:
    """Starts exports of checkpoints into the run's `hf/step-N`, one at a time."""

    run: RunConfig
    folder: RunFolder
    events: EventLog
    _running: tuple[Checkpoint, subprocess.Popen[bytes]] | None = None
    _failed: list[Checkpoint] = field(default_factory=list)

    def start(self, checkpoint: Checkpoint) -> None:
        """Export a checkpoint that was just saved, if the run says so."""
        when = self.run.checkpoint.export_hf
        if when == "never" or (when == "last" and checkpoint.step < self.run.train.steps):
            return
        out = self.folder.hf / checkpoint.path.name
        if out.exists():  # of a run that was at this step before
            return
        self.finish()
        command = [sys.executable, "-m", __name__, str(checkpoint.path), str(out)]
        with (self.folder.logs / "export.log").open("ab") as log:
            job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._running = checkpoint, job

    def finish(self) -> None:
        """Wait for the export that goes on."""
        if self._running is None:
            return
        (checkpoint, job), self._running = self._running, None
        if job.poll() is None:
            self.events.write("phase", "exporting Hugging Face weights", checkpoint.step)
        if job.wait():
            self._failed.append(checkpoint)
            self.events.write("warning", _words([checkpoint]), checkpoint.step)
        else:
            out = self.folder.hf / checkpoint.path.name
            self.events.write("note", f"Hugging Face weights are in {out}", checkpoint.step)

    def close(self) -> None:
        """Wait for the last export.

        Raises:
            RunError: One has failed.
        """
        self.finish()
        if self._failed:
            path = self._failed[-1].path
            raise RunError(
                f"the run is done and saved, but {_words(self._failed)}",
                str(self.folder.logs / "export.log"),
                f"`msllm convert mcore-to-hf --checkpoint {path} --out DIR` does it again",
            )


def _words(failed: list[Checkpoint]) -> str:
    steps = ", ".join(str(checkpoint.step) for checkpoint in failed)
    return f"the weights of step {steps} could not be exported"


def main(arguments: list[str]) -> int:
    """Export the checkpoint in one folder to another."""
    launch.end_with_parent()
    from msllm.engine.weights.to_hf import mcore_to_hf

    os.nice(10)  # training goes first
    checkpoint, out = map(Path, arguments)
    try:
        out.parent.mkdir(exist_ok=True)
        done = mcore_to_hf(checkpoint, out)
    except (MsllmError, OSError) as error:
        print(f"{checkpoint}: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {done.tensors:,} tensors, {done.bytes:,} bytes in {done.seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
