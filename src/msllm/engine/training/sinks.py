"""Where a step's figures go: metrics.jsonl, the rank's log, TensorBoard, wandb, swanlab.

Only rank 0 opens sinks. Optional packages are imported when a sink that needs one is opened, and
`sink_problems` tells before the run what is missing. The live console reads metrics.jsonl itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import uuid
from pathlib import Path
from typing import Any, Protocol, TextIO

from msllm.config import LogConfig, RunConfig
from msllm.engine.training.metrics import StepMetrics, truncate_after
from msllm.engine.training.run_folder import RunFolder
from msllm.engine.training.step_line import RemainingTime, is_shown, step_line
from msllm.errors import Problem, RunError

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the figures of each step, in order."""

    def log(self, metrics: StepMetrics) -> None:
        """Take one step."""

    def close(self) -> None:
        """Write out what is pending; no `log` follows."""


class JsonlSink:
    """Appends one line a step to metrics.jsonl, and hands each to the system at once."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("ab", buffering=0)

    def log(self, metrics: StepMetrics) -> None:
        """Append one line in a single write, so that a reader sees whole lines."""
        line = metrics.to_json().encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise RunError(
                f"cannot write step {metrics.step}: {error.strerror}", str(self._path)
            ) from error
        if written != len(line):
            raise RunError(f"cannot write step {metrics.step}: disk full", str(self._path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class PlainLogSink:
    """Writes one aligned line every `interval` steps, for logs."""

    def __init__(self, stream: TextIO, steps: int, interval: int = 1):
        self._stream = stream
        self._steps = steps
        self._interval = interval
        self._left = RemainingTime(steps)

    def log(self, metrics: StepMetrics) -> None:
        """Write the step's line if it is due."""
        left = self._left.after(metrics)
        if is_shown(metrics.step, self._steps, self._interval):
            print(step_line(metrics, self._steps, left), file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the stream open: it is the caller's."""


class TensorBoardSink:
    """Writes scalars for TensorBoard. Events of an earlier try after `first_step` are hidden."""

    def __init__(self, folder: Path, first_step: int = 1):
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            str(folder), purge_step=first_step if first_step > 1 else None
        )

    def log(self, metrics: StepMetrics) -> None:
        """Add one point to each curve."""
        for name, value in metrics.scalars().items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """Sends figures to a Weights & Biases project; a resumed run continues its own curves."""

    def __init__(self, project: str, folder: RunFolder, config: dict[str, Any]):
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project,
            name=folder.path.name,
            id=tracker_id(folder),
            resume="allow",
            dir=str(folder.path),
            config=config,
        )

    def log(self, metrics: StepMetrics) -> None:
        """Send one step."""
        self._run.log(metrics.scalars(), step=metrics.step)

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()


class SwanlabSink:
    """Sends figures to a SwanLab project; a resumed run continues its own curves."""

    def __init__(self, project: str, folder: RunFolder, config: dict[str, Any]):
        self._swanlab = importlib.import_module("swanlab")
        self._swanlab.init(
            project=project,
            name=folder.path.name,
            id=tracker_id(folder),
            resume="allow",
            log_dir=str(folder.path / "swanlab"),
            config=config,
        )

    def log(self, metrics: StepMetrics) -> None:
        """Send one step."""
        self._swanlab.log(metrics.scalars(), step=metrics.step)

    def close(self) -> None:
        """Finish the run there."""
        self._swanlab.finish()


class Sinks:
    """Several sinks as one.

    A tracker that fails (no network, quota) is reported once and left out from then on: figures
    are in metrics.jsonl, and a run of days must not end for a dashboard. What fails with a
    RunError (metrics.jsonl itself) ends the run.
    """

    def __init__(self, sinks: list[Sink]):
        self._sinks = list(sinks)

    def log(self, metrics: StepMetrics) -> None:
        """Give one step to every sink."""
        for sink in tuple(self._sinks):
            try:
                sink.log(metrics)
            except RunError:
                raise
            except Exception as error:
                self._sinks.remove(sink)
                logger.warning("%s stopped at step %d: %s", _name(sink), metrics.step, error)

    def close(self) -> None:
        """Close every sink, also when one of them can't."""
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:
                logger.warning("%s did not close: %s", _name(sink), error)


def _name(sink: Sink) -> str:
    return type(sink).__name__.removesuffix("Sink")


def tracker_id(folder: RunFolder) -> str:
    """Read the run's id at its trackers; made once, kept in the run's folder."""
    path = folder.tracker_id
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def sink_problems(config: LogConfig) -> list[Problem]:
    """List what is asked for and can't be given because a package is missing."""
    asked = {
        "tensorboard": config.tensorboard,
        "wandb": config.wandb_project is not None,
        "swanlab": config.swanlab_project is not None,
    }
    settings = {
        "tensorboard": "log.tensorboard",
        "wandb": "log.wandb_project",
        "swanlab": "log.swanlab_project",
    }
    return [
        Problem(f"{package} is not installed", settings[package], f"pip install {package}")
        for package, wanted in asked.items()
        if wanted and importlib.util.find_spec(package) is None
    ]


def open_sinks(
    config: RunConfig, folder: RunFolder, first_step: int = 1, stream: TextIO | None = None
) -> Sinks:
    """Open all sinks that the run asks for; rank 0 only.

    Args:
        config: The run's settings.
        folder: The run's folder, which exists.
        first_step: The first step that will be logged; lines of it and of later steps, left by an
            earlier try, are dropped.
        stream: Where the plain lines go; standard output, which the launcher sends to the
            rank's log, when not given.
    """
    truncate_after(folder.metrics, first_step - 1)
    log = config.log
    sinks: list[Sink] = [
        JsonlSink(folder.metrics),
        PlainLogSink(stream or sys.stdout, config.train.steps, log.interval),
    ]
    data = config.model_dump(mode="json")
    if log.tensorboard:
        sinks.append(TensorBoardSink(folder.tensorboard, first_step))
    if log.wandb_project is not None:
        sinks.append(_open_tracker(WandbSink, log.wandb_project, folder, data))
    if log.swanlab_project is not None:
        sinks.append(_open_tracker(SwanlabSink, log.swanlab_project, folder, data))
    return Sinks(sinks)


def _open_tracker(
    kind: type[WandbSink] | type[SwanlabSink],
    project: str,
    folder: RunFolder,
    config: dict[str, Any],
) -> Sink:
    """Open a tracker; one that the user asked for and that can't start ends the run at once."""
    try:
        return kind(project, folder, config)
    except Exception as error:
        name = kind.__name__.removesuffix("Sink").lower()
        raise RunError(
            f"{name} does not start: {error}",
            f"log.{name}_project",
            f"log in with `{name} login`, set {name.upper()}_MODE=offline, or leave it out",
        ) from error
