"""MegatronBackend: one rank's share of a model in training.

Puts together what the sibling modules make (groups, chunks, optimizer, schedule) and offers the
loop four verbs: step, evaluate, save, load. The loop knows nothing of pipelines or shards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from msllm.config import RunConfig
from msllm.engine.device import Device
from msllm.engine.layout import Layout
from msllm.engine.megatron.adapt import adapt
from msllm.errors import RunError
from msllm.models.architecture import Architecture

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one step, the same on every rank."""

    loss: float
    tokens: int
    lr: float
    grad_norm: float
    loss_parts: dict[str, float]


class MegatronBackend:
    """This rank's chunks of the model with their optimizer and schedule."""

    def __init__(self, architecture: Architecture, layout: Layout, run: RunConfig, device: Device):
        """Join the job and build this rank's part.

        Raises:
            RunError: If the other ranks can't be reached.
        """
        adapt(device)
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        from msllm.engine.megatron import initialize, model, model_config, optimizer, parallel

        parallel.start(device, layout, run.seed, timedelta(minutes=30))
        self.run, self.device, self.layout = run, device, layout
        self.architecture = architecture
        self.config = model_config.model_config(architecture, layout, run, device)
        chunks = model.build_chunks(self.config, layout, run.data.seq_length)
        if run.checkpoint.init_from is None:  # else weights come by `load_start`
            initialize.initialize(
                chunks, run.seed, run.train.init_std or architecture.initializer_range
            )
        self.chunks = optimizer.distribute(chunks, self.config, run)
        self.optimizer = optimizer.build_optimizer(self.chunks, run)
        optimizer.choose_kernels(self.optimizer, device)
        self.schedule = optimizer.build_schedule(self.optimizer, run.train)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self._set_overlap()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()

    def _set_overlap(self) -> None:
        """Tell the schedules which chunks' communication they may start early."""
        one = len(self.chunks) == 1

        def each(name: str) -> Any:
            found = [getattr(chunk, name) for chunk in self.chunks]
            return found[0] if one else found

        if self.run.train.overlap_grad_reduce:
            self.config.no_sync_func = each("no_sync")
            if not one:
                self.config.grad_sync_func = each("start_grad_sync")
        if self.run.train.overlap_param_gather and not one:
            self.config.param_sync_func = each("start_param_sync")

    def train_step(self, batches: list[Batch], step: int) -> StepResult:
        """Train on this rank's micro-batches of step `step` (from 1).

        Raises:
            RunError: If the loss is not finite; the weights are then those before the step.
        """
        from msllm.engine.megatron.moe_losses import collect
        from msllm.engine.megatron.step import run_batches

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = run_batches(self.chunks, batches, self.device.torch_device, forward_only=False)
        if not math.isfinite(loss.mean):
            raise _not_finite("loss", loss.mean, step, loss.bad_ranks)
        self.schedule.step(increment=1)
        _, grad_norm, _ = self.optimizer.step()
        grad_norm = float(grad_norm or 0.0)
        if not math.isfinite(grad_norm):
            raise _not_finite("gradient norm", grad_norm, step, ())
        return StepResult(
            loss=loss.mean,
            tokens=loss.tokens,
            lr=self.learning_rate,
            grad_norm=grad_norm,
            loss_parts=collect(self.config, len(batches)),
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate that the last step used."""
        return max((float(g["lr"]) for g in self.optimizer.param_groups), default=0.0)

    def evaluate(self, batches: list[Batch]) -> tuple[float, int]:
        """Summed loss and number of trained tokens of micro-batches, over all ranks."""
        from msllm.engine.megatron.step import run_batches

        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            loss = run_batches(self.chunks, batches, self.device.torch_device, forward_only=True)
        return loss.total, loss.tokens

    def save(self, folder: Path, background: bool = False) -> Any:
        """Write weights, optimizer and random state into `folder`; all ranks take part."""
        from msllm.engine.megatron import checkpoint

        return checkpoint.save(self, folder, background)

    def load(self, folder: Path, step: int) -> None:
        """Read what `save` wrote, at any layout, and go on after `step`."""
        from msllm.engine.megatron import checkpoint

        checkpoint.load(self, folder)
        self.schedule.num_steps = 0
        self.schedule.step(increment=step)

    def load_start(self, folder: Path) -> None:
        """Read Hugging Face weights or a checkpoint's, which `weights.start.check` found to fit."""
        from msllm.engine.weights import initial, start

        checkpoint = start.locate(folder, f"--init-from {folder}")
        if checkpoint is not None:
            self.load_weights(checkpoint)
            return
        initial.fill([chunk.module for chunk in self.chunks], folder, self.architecture)
        self.optimizer.reload_model_params()  # its float32 copies

    def load_weights(self, folder: Path) -> None:
        """Read only the weights of what `save` wrote, at any layout."""
        from msllm.engine.megatron import checkpoint

        checkpoint.load_weights(self, folder)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[b, s, vocabulary]` of tokens `[b, s]`; for models without a pipeline."""
        model = self.chunks[0].module
        positions = torch.arange(tokens.size(1)).repeat(tokens.size(0), 1)
        device = self.device.torch_device
        model.eval()
        with torch.no_grad():
            return model.gathered_logits(model(tokens.to(device), positions.to(device), None))

    def close(self) -> None:
        """Leave the job."""
        from msllm.engine.megatron import parallel

        parallel.stop()


def _not_finite(what: str, value: float, step: int, ranks: tuple[int, ...]) -> RunError:
    where = f"step {step}"
    if ranks:
        where += f", rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    elif dist.is_initialized():
        where += f", rank {dist.get_rank()}"
    return RunError(
        f"the {what} became {value}",
        where,
        "nothing of this step was saved; resume from the last checkpoint with a lower learning "
        "rate or more warm-up, and look at the data of this step",
    )
