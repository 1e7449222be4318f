"""The training loop: batches in, steps, figures out, checkpoints in between. Linear on purpose.

What a step does is the backend's business; what is shown and written where, the sinks' and the
saver's.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from msllm.config import RunConfig
from msllm.engine.data.batches import Batches
from msllm.engine.data.stream import Stream, open_streams
from msllm.engine.device import Device
from msllm.engine.layout import Layout
from msllm.engine.training import checkpoint_folder, resume, saver
from msllm.engine.training.checkpoint_folder import Checkpoint
from msllm.engine.training.events import EventLog
from msllm.engine.training.metrics import StepMetrics, Throughput
from msllm.engine.training.run_folder import RunFolder
from msllm.engine.training.sinks import open_sinks
from msllm.errors import Interrupted
from msllm.models.architecture import Architecture
from msllm.models.counts import flops_per_token


class StopSignal:
    """Remembers SIGTERM, SIGHUP and Ctrl-C, so that the loop can stop between two steps."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGINT, self._receive)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(signal.SIGHUP, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True


@dataclass(frozen=True, slots=True)
class Job:
    """What a loop works with."""

    run: RunConfig
    architecture: Architecture
    layout: Layout
    device: Device
    folder: RunFolder


def global_batch(run: RunConfig, layout: Layout) -> int:
    """Samples of one step over all ranks."""
    return run.train.global_batch or run.train.micro_batch * layout.dp


def train(job: Job, backend: Any, stop: StopSignal) -> None:
    """Train from the newest checkpoint, or from the start, to the last step.

    Raises:
        Interrupted: After saving, when a stop signal came.
        RunError: If a figure is not finite, or a checkpoint can't be written.
    """
    run = job.run
    events = EventLog(job.folder.events)
    resumed = _resume(job, backend, events)
    start = resumed.step if resumed else 0
    samples = global_batch(run, job.layout)
    train_stream, valid_stream = open_streams(run.data, run.seed, job.architecture.vocab_size)
    batches = Batches(
        train_stream,
        run.train.micro_batch,
        samples,
        backend.dp_rank,
        backend.dp_size,
        resumed.manifest.consumed_samples if resumed else 0,
        run.data.loader_workers,
    )
    checkpoints = saver.Saver(
        backend, run, job.folder, job.architecture, job.layout, resumed.path if resumed else None
    )
    recorder = Recorder(job, start + 1)
    try:
        for step in range(start + 1, run.train.steps + 1):
            micro_batches = [next(batches) for _ in range(batches.micro_batches)]
            result = backend.train_step(micro_batches, step)
            valid_loss = None
            if valid_stream is not None and _due(step, run.train.eval_interval, run.train.steps):
                valid_loss = validate(job, backend, valid_stream)
            stopping = recorder.record(
                step, result, batches.consumed_samples, valid_loss, stop.received
            )
            checkpoints.poll()
            last = stopping or step == run.train.steps
            if last or _due(step, run.checkpoint.save_interval, run.train.steps):
                checkpoints.save(step, batches.consumed_samples)
                recorder.restart_clock()
            if stopping and step < run.train.steps:
                checkpoints.close()
                raise Interrupted(
                    f"stopped after step {step}; everything is saved",
                    str(job.folder.path),
                    "run the same command again to go on",
                )
        checkpoints.close()
    finally:
        batches.close()
        recorder.close()


def _resume(job: Job, backend: Any, events: EventLog) -> Checkpoint | None:
    """Load the checkpoint to go on from, or the weights to start from; returns the checkpoint."""
    if dist.get_rank() == 0:
        for note in checkpoint_folder.recover(job.folder.checkpoints):
            events.write("note", note)
    dist.barrier()
    checkpoint, notes = resume.find(job.run.checkpoint.resume, job.folder)
    if dist.get_rank() == 0:
        for note in notes:
            events.write("warning", note)
    if checkpoint is None:
        if job.run.checkpoint.init_from is not None:
            if dist.get_rank() == 0:
                events.write("phase", f"reading weights from {job.run.checkpoint.init_from}")
            backend.load_start(job.run.checkpoint.init_from)
        return None
    saver.check_format(checkpoint, job.run)
    if dist.get_rank() == 0:
        events.write("phase", f"loading the checkpoint of step {checkpoint.step}")
    backend.load(checkpoint.path, checkpoint.step)
    if dist.get_rank() == 0:
        events.write("note", f"resumed from the checkpoint of step {checkpoint.step}")
    return checkpoint


def validate(job: Job, backend: Any, stream: Stream) -> float:
    """Mean loss over the first `eval_batches` global batches of the validation data."""
    run = job.run
    batches = Batches(
        stream,
        run.train.micro_batch,
        global_batch(run, job.layout),
        backend.dp_rank,
        backend.dp_size,
    )
    total, tokens = 0.0, 0
    for _ in range(run.train.eval_batches):
        loss, count = backend.evaluate([next(batches) for _ in range(batches.micro_batches)])
        total, tokens = total + loss, tokens + count
    return total / max(tokens, 1)


def _due(step: int, interval: int, last: int) -> bool:
    return bool(interval) and (step % interval == 0 or step == last)


class Recorder:
    """Measures each step and hands its figures to the sinks; all ranks record together."""

    def __init__(self, job: Job, first_step: int):
        run = job.run
        self._job = job
        self._samples = global_batch(run, job.layout)
        self._sinks = open_sinks(run, job.folder, first_step) if dist.get_rank() == 0 else None
        self._throughput = Throughput(
            flops_per_token(job.architecture, run.data.seq_length),
            dist.get_world_size(),
            _peak_flops(run, job.device),
        )
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count the next step's time from now: what came before was no training."""
        self._ended = time.perf_counter()

    def record(
        self, step: int, result: Any, consumed: int, valid_loss: float | None, stop: bool
    ) -> bool:
        """Log a step; returns whether any rank was told to stop."""
        stopping, memory = _agree(stop, self._job.device)
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        if self._sinks is None:
            return stopping
        length = self._job.run.data.seq_length
        tokens = self._samples * length
        speed = self._throughput.measure(tokens, seconds)
        self._sinks.log(
            StepMetrics(
                step=step,
                loss=result.loss,
                lr=result.lr,
                grad_norm=result.grad_norm,
                tokens=tokens,
                tokens_per_second=speed.tokens_per_second,
                step_time_s=seconds,
                memory_bytes=memory,
                mfu=speed.mfu,
                tflops_per_device=speed.tflops_per_device,
                consumed_samples=consumed,
                consumed_tokens=consumed * length,
                time=time.time(),
                loss_parts=result.loss_parts,
                valid_loss=valid_loss,
            )
        )
        return stopping

    def close(self) -> None:
        """Close the sinks."""
        if self._sinks is not None:
            self._sinks.close()


def _agree(stop: bool, device: Device) -> tuple[bool, int]:
    """Whether any rank was told to stop, and the largest peak memory of a rank, in bytes."""
    figures = torch.tensor([float(stop), device.peak_memory() / 2**20], device=device.torch_device)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return bool(figures[0] > 0), int(figures[1]) * 2**20


def _peak_flops(run: RunConfig, device: Device) -> float | None:
    if run.log.peak_tflops is not None:
        return run.log.peak_tflops * 1e12
    return device.peak_flops(torch.bfloat16 if run.dtype == "bf16" else torch.float32)
