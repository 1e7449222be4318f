"""One rank of a training run: `python -m msllm.engine.training.worker RUN_FOLDER`.

The launcher starts one for each device. Settings come from the run's `run.yaml`, the place in the
job from torchrun's environment variables. What goes wrong is handed to the launcher, which shows
it.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from msllm.engine import launch
from msllm.engine.training.events import EventLog
from msllm.engine.training.run_folder import RunFolder
from msllm.errors import Interrupted, MsllmError, RunError

if TYPE_CHECKING:
    from msllm.engine.training.loop import Job


def main(arguments: list[str]) -> int:
    """Run this rank; returns its exit status."""
    launch.watch_parent()
    try:
        run_rank(Path(arguments[0]))
    except Interrupted:
        return 0  # the launcher knows that it was asked to stop
    except BaseException as error:
        launch.report_error(error)
        raise
    return 0


def run_rank(path: Path) -> None:
    """Train this rank's part of the run in folder `path`."""
    folder = RunFolder(path)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        _phase(folder, "starting")
    # Megatron-core and torch warn of what is missing on NVIDIA stacks: nothing to act on here.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*")

    from msllm.config import read_run
    from msllm.engine.device import select_device
    from msllm.engine.layout import Layout
    from msllm.engine.training import loop
    from msllm.models.resolve import resolve_model

    run = read_run(folder.config)
    stop = loop.StopSignal()
    device = select_device(run.device, int(os.environ.get("LOCAL_RANK", "0")))
    device.seed(run.seed)
    if run.deterministic:
        _only_deterministic()
    architecture = resolve_model(run.model).architecture
    layout = Layout.from_world(run.layout, int(os.environ.get("WORLD_SIZE", "1")))
    job = loop.Job(run, architecture, layout, device, folder)
    try:
        from msllm.engine.megatron.backend import MegatronBackend

        if rank == 0:
            _phase(folder, "building the model")
        backend = MegatronBackend(architecture, layout, run, device)
        loop.train(job, backend, stop)
        backend.close()
    except MsllmError:
        raise
    except Exception as error:
        if device.is_out_of_memory(error):
            raise _out_of_memory(job, error) from error
        raise


def _phase(folder: RunFolder, text: str) -> None:
    EventLog(folder.events).write("phase", text)


def _only_deterministic() -> None:
    import torch

    torch.use_deterministic_algorithms(True)


def _out_of_memory(job: Job, error: Exception) -> RunError:
    """Say what was planned, item by item, and three ways to need less."""
    from msllm.engine.planning import memory

    planned = memory.estimate(job.architecture, job.layout, job.run, job.device.kind)
    items = ", ".join(
        f"{name} {size / 2**30:.2f} GiB" for name, size in planned.items.items() if size
    )
    ways = memory.three_ways_down(job.run, job.architecture, job.layout, job.device.kind)
    rank = os.environ.get("RANK", "0")
    return RunError(
        f"rank {rank} ran out of memory; planned a device: {items} ({error})",
        f"{job.device.name}, {job.device.total_memory() / 2**30:.1f} GiB",
        "; or ".join(ways),
    )


if __name__ == "__mp_main__":
    # A helper that Megatron-core started to write a checkpoint: without its worker it has no use.
    launch.end_with_parent()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
