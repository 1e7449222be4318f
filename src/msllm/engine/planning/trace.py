"""Trace one pipeline stage's part of a training step on fake tensors, with the real model code.

Runs in a process of its own (`tracer`): Megatron-core gets adapted for the CPU, and torch is told
of a world that does not exist. A micro-batch goes forward and backward through each chunk of the
stage, gradients are reduced and parameters gathered, as `engine.megatron` does it; nothing is
computed and nothing sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._meta_registrations import create_fakework
from torch.testing._internal.distributed.fake_pg import FakeStore

from msllm.config import RunConfig
from msllm.engine.device import Device
from msllm.engine.layout import Layout
from msllm.engine.megatron.adapt import adapt
from msllm.engine.ops import Operators
from msllm.engine.planning.folding import Fold, fold, layer_kinds, unfold
from msllm.engine.planning.held import group_names, static
from msllm.engine.planning.ledger import Ledger
from msllm.engine.planning.operators import planning_operators
from msllm.engine.planning.records import ChunkTrace, StageTrace
from msllm.models.architecture import Architecture


class Pretence(FakeTensorMode):
    """Tensors without values; where the host looks at one, it finds a one.

    Megatron-core looks at few: whether random states agree, whether any token was trained, whether
    the gradients' norm is finite. Counts of routed tokens are not among them, see `balanced`.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do as fake tensors do, but for reads."""
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func.namespace == "c10d" and "coalesced" in func.overloadpacket.__name__:
            return create_fakework(args, return_first_arg=False)  # torch fakes all others
        return super().dispatch(func, types, args, kwargs)


Repetitions = tuple[ChunkTrace, ChunkTrace]
"""Traces of a chunk with two and with three repetitions."""


class StageTracer:
    """Traces stages of runs on one kind of device; remembers layers that it has met."""

    def __init__(self, kind: str) -> None:
        """Adapt this process's Megatron-core; `kind` is the device whose kernels are assumed."""
        self._ops = planning_operators(kind)
        adapt(Device("cpu"), ops=self._ops)
        self._met: dict[Hashable, Repetitions] = {}

    def trace(
        self,
        architecture: Architecture,
        layout: Layout,
        run: RunConfig,
        stage: int,
        imbalance: float = 1.0,
        folded: bool = True,
    ) -> StageTrace:
        """Trace the first rank of a stage.

        Args:
            architecture: The model.
            layout: How it is spread.
            run: The run; its micro-batch, sequence length, recompute and optimizer count.
            stage: Which pipeline stage.
            imbalance: Tokens of this rank's experts over the mean.
            folded: Whether equal layers may be counted instead of traced, see `folding`.
        """
        off = {"overlap_grad_reduce": False, "overlap_param_gather": False}
        run = run.model_copy(update={"train": run.train.model_copy(update=off)})
        with _world(layout, stage), Pretence():
            part = _Part(architecture, layout, run, self._ops, imbalance)
            return part.trace(stage, self._met if folded else None)


@contextmanager
def _world(layout: Layout, stage: int) -> Iterator[None]:
    """Pretend to be the first rank of a stage in a job of the layout's size."""
    from msllm.engine.megatron import parallel

    rank = stage * (layout.world_size // layout.pp)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        parallel.start(Device("cpu"), layout, 1, timedelta(minutes=1))
        yield
    finally:
        parallel.stop()


class _Part:
    """This rank's part of the model, built as for training."""

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        run: RunConfig,
        ops: Operators,
        imbalance: float,
    ) -> None:
        from msllm.engine.megatron import model, model_config, optimizer
        from msllm.engine.planning.balanced import balance

        self.layout, self.run = layout, run
        config = model_config.model_config(architecture, layout, run, Device("cpu"), ops)
        bare = model.build_chunks(config, layout, run.data.seq_length)
        for chunk in bare:
            balance(chunk, imbalance)
        self.chunks = optimizer.distribute(bare, config, run)
        self.static, self.updated, exist = static(self.chunks, run)
        self.ledger = Ledger(exist, group_names())
        self._same = (repr(architecture), layout, run.model_dump_json(), imbalance)

    def trace(self, stage: int, met: dict[Hashable, Repetitions] | None) -> StageTrace:
        """Run a micro-batch through each chunk, then what ends a step."""
        from megatron.core.distributed import finalize_model_grads

        from msllm.engine.megatron.optimizer import use_distributed_optimizer

        ledger = self.ledger
        with ledger:
            self._make_tables()
            traces = [self._chunk(chunk, met) for chunk in self.chunks]
            reduction = ledger.phase()
            finalize_model_grads(self.chunks, torch.ones((), dtype=torch.int))
            gathering = ledger.phase()
            if use_distributed_optimizer(self.run):
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)
            ledger.phase()
        self.static["buffers"] = ledger.now
        count = sum(p.numel() for chunk in self.chunks for p in chunk.parameters())
        return StageTrace(stage, self.static, count, self.updated, traces, reduction, gathering)

    def _make_tables(self) -> None:
        """Make the rotary tables, which is no work of a micro-batch's."""
        positions = self._batch()["position_ids"]
        for chunk in self.chunks:
            if chunk.module.rotary is not None:
                chunk.module.rotary(positions)

    def _chunk(self, chunk: Any, met: dict[Hashable, Repetitions] | None) -> ChunkTrace:
        """Trace one chunk: all its layers, or two and three repetitions of them."""
        run, module = self.run, chunk.module
        block = run.train.recompute_layers if run.train.recompute == "full" else 1
        kinds = layer_kinds(module.config.architecture, module.global_layers)
        folding = fold(kinds, block) if met is not None else None
        if met is None or folding is None:
            return self._micro_batch(chunk)
        repeated = tuple(kinds[: folding.lengths[1]])
        key = (*self._same, module.pre_process, module.post_process, folding.unit, repeated)
        if key not in met:
            met[key] = self._repetitions(chunk, folding)
        return unfold(*met[key], folding.times) or self._micro_batch(chunk)

    def _repetitions(self, chunk: Any, folding: Fold) -> Repetitions:
        decoder = chunk.module.decoder
        layers = decoder.layers
        found = []
        for length in folding.lengths:
            decoder.layers, decoder.num_layers_per_pipeline_rank = layers[:length], length
            found.append(self._micro_batch(chunk))
        decoder.layers, decoder.num_layers_per_pipeline_rank = layers, len(layers)
        return found[0], found[1]

    def _micro_batch(self, chunk: Any) -> ChunkTrace:
        """Send a micro-batch forward and backward through a chunk, as Megatron's schedules do."""
        from megatron.core.pipeline_parallel import schedules

        from msllm.engine.megatron.step import forward_step
        from msllm.engine.planning.balanced import forget

        ledger, layout, module = self.ledger, self.layout, chunk.module
        config, batch = module.config, self._batch()
        config.deallocate_pipeline_outputs = layout.pp > 1
        chunk.train()
        forward = ledger.phase()
        given = None if module.pre_process else self._received(config)
        out, _ = schedules.forward_step(
            forward_step, iter([batch]), chunk, 1, given, [], config, layout.cp,
            vp_stage=module.vp_stage, is_last_stage=module.post_process,
        )  # fmt: skip
        schedules.deallocate_output_tensor(out, layout.pp > 1)
        backward = ledger.phase()
        grad = None if module.post_process else self._received(config).detach()
        schedules.backward_step(given, out, grad, None, config)
        del out, given, grad
        held = ledger.now
        forget(chunk)
        module.set_input_tensor(None)
        forward.start = ledger.now  # what was made once and stays, tables say, is not a batch's
        return ChunkTrace(forward, backward, held - ledger.now)

    def _batch(self) -> dict[str, torch.Tensor]:
        """A micro-batch `[b, s]` without values."""
        shape = (self.run.train.micro_batch, self.run.data.seq_length)
        names = ("tokens", "labels", "position_ids")
        batch = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
        return batch | {"loss_mask": torch.ones(shape)}

    def _received(self, config: Any) -> torch.Tensor:
        """What another stage sends: `[s, b, h]`, cut over tp under sequence parallelism."""
        layout, run = self.layout, self.run
        parts = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        shape = (run.data.seq_length // parts, run.train.micro_batch, config.hidden_size)
        return torch.empty(shape, dtype=config.pipeline_dtype, requires_grad=True)
