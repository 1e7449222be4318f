"""Trace one pipeline stage's part of a training step on fake tensors, with the real model code.

Runs in a process of its own (`tracer`): Megatron-core gets adapted for the CPU, and torch is told
of a world that does not exist. A micro-batch goes forward and backward through each chunk of the
stage, gradients are reduced and parameters gathered, as `engine.megatron` does it; nothing is
computed and nothing sent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
from msllm.engine.planning.folding import Fold, fold, layer_kinds, unfold
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


def trace_stage(
    architecture: Architecture,
    layout: Layout,
    run: RunConfig,
    kind: str,
    stage: int,
    imbalance: float = 1.0,
    folded: bool = True,
) -> StageTrace:
    """Trace the first rank of a stage.

    Args:
        architecture: The model.
        layout: How it is spread.
        run: The run; its micro-batch, sequence length, recompute and optimizer count.
        kind: Kind of device whose kernels are assumed.
        stage: Which pipeline stage.
        imbalance: Tokens of this rank's experts over the mean.
        folded: Whether equal layers may be counted instead of traced, see `folding`.
    """
    off = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    run = run.model_copy(update={"train": run.train.model_copy(update=off)})
    ops = planning_operators(kind)
    adapt(Device("cpu"), ops=ops)
    with _world(layout, stage), Pretence():
        return _trace(architecture, layout, run, ops, stage, imbalance, folded)


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


def _trace(
    architecture: Architecture,
    layout: Layout,
    run: RunConfig,
    ops: Any,
    stage: int,
    imbalance: float,
    folded: bool,
) -> StageTrace:
    from megatron.core.distributed import finalize_model_grads

    from msllm.engine.megatron import model, model_config, optimizer
    from msllm.engine.planning.balanced import balance

    config = model_config.model_config(architecture, layout, run, Device("cpu"), ops)
    bare = model.build_chunks(config, layout, run.data.seq_length)
    for chunk in bare:
        balance(chunk, imbalance)
    chunks = optimizer.distribute(bare, config, run)
    static, updated, exist = _static(chunks, run)
    ledger = Ledger(exist, _group_names())
    with ledger:
        traces = [
            _chunk(ledger, chunk, layout, run, _fold(chunk, run) if folded else None)
            for chunk in chunks
        ]
        reduction = ledger.phase()
        finalize_model_grads(chunks, torch.ones((), dtype=torch.int))
        gathering = ledger.phase()
        if optimizer.use_distributed_optimizer(run):
            for chunk in chunks:
                chunk.start_param_sync(force_sync=True)
        ledger.phase()
        static["buffers"] = ledger.now + sum(trace.left for trace in traces)
    count = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    return StageTrace(stage, static, count, updated, traces, reduction, gathering)


def _fold(chunk: Any, run: RunConfig) -> Fold | None:
    """How a chunk's layers repeat."""
    layers = chunk.module.global_layers
    block = run.train.recompute_layers if run.train.recompute == "full" else 1
    return fold(layer_kinds(chunk.module.config.architecture, layers), block)


def _static(
    chunks: list[Any], run: RunConfig
) -> tuple[dict[str, int], int, list[torch.Tensor]]:
    """Bytes of what stays, by item; the number of updated parameters; the tensors that stay.

    The optimizer itself is not built, as that would ask the other ranks.
    """
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    gradients = [buffer.grad_data for buffer in buffers]
    others = [b for chunk in chunks for b in torch.nn.Module.buffers(chunk.module)]
    updated, state = _updated(parameters, buffers, run)
    static = {
        "parameters": _allocated(parameters),
        "gradients": _allocated(gradients),
        "main parameters": 4 * updated if run.dtype == "bf16" else 0,
        "optimizer state": state,
    }
    return static, updated, [*parameters, *gradients, *others]


def _updated(parameters: list[Any], buffers: list[Any], run: RunConfig) -> tuple[int, int]:
    """Elements that this rank updates, and bytes of the optimizer's state for them."""
    from msllm.engine.megatron.optimizer import use_distributed_optimizer

    if use_distributed_optimizer(run):
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        maps = [DistributedOptimizer._build_gbuf_range_map(buffer) for buffer in buffers]
        buckets = [bucket for by_type in maps for found in by_type.values() for bucket in found]
        held = sum(r["param"].size for bucket in buckets for r in bucket["param_map"].values())
        return held, 8 * held
    count = sum(p.numel() for p in parameters)
    if run.train.optimizer == "muon":  # one momentum of matrices, Adam's two of all else
        matrices = [p for p in parameters if p.dim() == 2]
        matrices = [p for p in matrices if not getattr(p, "is_embedding_or_output_parameter", 0)]
        by_muon = sum(p.numel() for p in matrices)
        return count, 4 * by_muon + 8 * (count - by_muon)
    return count, 8 * count


def _allocated(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _chunk(
    ledger: Ledger, chunk: Any, layout: Layout, run: RunConfig, folding: Fold | None
) -> ChunkTrace:
    """Trace one chunk: all its layers, or two and three repetitions of them."""
    if folding is None:
        return _micro_batch(ledger, chunk, layout, run)
    decoder = chunk.module.decoder
    layers = decoder.layers
    traces = []
    for length in folding.lengths:
        decoder.layers, decoder.num_layers_per_pipeline_rank = layers[:length], length
        traces.append(_micro_batch(ledger, chunk, layout, run))
    decoder.layers, decoder.num_layers_per_pipeline_rank = layers, len(layers)
    return unfold(*traces, folding.times) or _micro_batch(ledger, chunk, layout, run)


def _micro_batch(ledger: Ledger, chunk: Any, layout: Layout, run: RunConfig) -> ChunkTrace:
    """Send a micro-batch forward and backward through a chunk, as Megatron's schedules do."""
    from megatron.core.pipeline_parallel import schedules

    from msllm.engine.megatron.step import forward_step
    from msllm.engine.planning import balanced

    config, batch = chunk.module.config, _batch(run)
    pre, post = chunk.module.pre_process, chunk.module.post_process
    config.deallocate_pipeline_outputs = layout.pp > 1
    chunk.train()
    forward = ledger.phase()
    given = None if pre else _received(config, layout, run)
    out, _ = schedules.forward_step(
        forward_step, iter([batch]), chunk, 1, given, [], config, layout.cp,
        vp_stage=chunk.module.vp_stage, is_last_stage=post,
    )  # fmt: skip
    schedules.deallocate_output_tensor(out, layout.pp > 1)
    backward = ledger.phase()
    grad = None if post else _received(config, layout, run).detach()
    schedules.backward_step(given, out, grad, None, config)
    del out, given, grad
    held = ledger.now
    balanced.forget(chunk)
    chunk.module.set_input_tensor(None)
    forward.start = ledger.now  # what was made once and stays, tables say, is not a batch's
    return ChunkTrace(forward, backward, held - ledger.now)


def _batch(run: RunConfig) -> dict[str, torch.Tensor]:
    """A micro-batch `[b, s]` without values."""
    shape = (run.train.micro_batch, run.data.seq_length)
    names = ("tokens", "labels", "position_ids")
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in names}
    return batch | {"loss_mask": torch.ones(shape)}


def _received(config: Any, layout: Layout, run: RunConfig) -> torch.Tensor:
    """What another stage sends: `[s, b, h]`, cut over tp under sequence parallelism."""
    parts = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    shape = (run.data.seq_length // parts, run.train.micro_batch, config.hidden_size)
    return torch.empty(shape, dtype=config.pipeline_dtype, requires_grad=True)


def _group_names() -> dict[str, str]:
    """torch's names of this rank's process groups -> msllm's; the first of equal groups counts."""
    from megatron.core import parallel_state as state

    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
        "dp": state.get_data_parallel_group(with_context_parallel=True),
        "dp without cp": state.get_data_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "ep": state.get_expert_model_parallel_group(),
        "etp": state.get_expert_tensor_parallel_group(),
        "etp x ep": state.get_expert_tensor_and_model_parallel_group(),
        "expert dp": state.get_expert_data_parallel_group(),
        "embedding": state.get_embedding_group(check_initialized=False),
        "tp x cp": state.get_tensor_and_context_parallel_group(),
        "tp x dp": state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "model": state.get_model_parallel_group(),
    }
    return {g.group_name: name for name, g in groups.items() if hasattr(g, "group_name")}
