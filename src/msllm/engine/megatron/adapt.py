"""Every change msllm makes to Megatron-core, in one place, by name.

Megatron-core is written for CUDA. On Ascend, torch_npu's own redirection makes `torch.cuda` mean
the NPU; on a CPU this module does the same. A few of Megatron's functions are bound to packages
that only exist on NVIDIA stacks; here they get msllm's operators instead. Each change is an
`Adaptation` with its reason, and the test beside it fails without it. No other file patches
anything. Call `adapt(device)` once in a worker, before anything else imports Megatron-core.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from msllm.engine.device import Device

if TYPE_CHECKING:
    from msllm.engine.ops import Operators


@dataclass(frozen=True, slots=True)
class Adaptation:
    """One named change.

    Attributes:
        name: How tests and `applied()` call it.
        reason: Why Megatron-core does not work without it.
        kinds: Kinds of device that need it.
        apply: Makes the change.
    """

    name: str
    reason: str
    kinds: tuple[str, ...]
    apply: Callable[[Device], None]


_applied: list[str] = []


def applied() -> tuple[str, ...]:
    """Names of the adaptations made in this process, in order."""
    return tuple(_applied)


def adapt(device: Device, skip: tuple[str, ...] = (), ops: Operators | None = None) -> None:
    """Make Megatron-core run on `device`. Safe to call again.

    Args:
        device: What the process computes on.
        skip: Adaptations to leave out, for tests.
        ops: Operators for the token dispatchers, if not those of the device.
    """
    if _applied:
        return
    for adaptation in ADAPTATIONS:
        if device.kind in adaptation.kinds and adaptation.name not in skip:
            adaptation.apply(device)
            _applied.append(adaptation.name)
    if ops is not None:
        _give_dispatchers(ops)


def _module(name: str) -> Any:
    """Import a module whose names are about to be read and set."""
    return importlib.import_module(name)


def _eager_functions(device: Device) -> None:
    """Import Megatron-core with `torch.compile` off: its decorators would start the compiler."""
    if "megatron.core" in sys.modules:
        raise RuntimeError("adapt() must run before megatron.core is imported")

    def undecorated(model: Any = None, **_: Any) -> Any:
        return model if model is not None else undecorated

    compile_ = torch.compile
    torch.compile = undecorated
    try:
        importlib.import_module("megatron.core")
        _module("megatron.core.models.gpt.gpt_model")
    finally:
        torch.compile = compile_


def _transfer_to_npu(device: Device) -> None:
    importlib.import_module("torch_npu.contrib.transfer_to_npu")


def _compute_capability(device: Device) -> None:
    """`torch.distributed.broadcast` compares it with 9, to know whether NCCL sends FP8."""
    os.environ.setdefault("TORCH_NPU_DEVICE_CAPABILITY", "8.0")


class _HostStream:
    """Stands for a CUDA stream: on the CPU everything runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, _: Any) -> None:
        """Do nothing: earlier work is already done."""

    def wait_event(self, _: Any) -> None:
        """Do nothing: earlier work is already done."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event, which has already happened."""
        return event or _HostEvent()

    def synchronize(self) -> None:
        """Do nothing: earlier work is already done."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HostStream)

    def __hash__(self) -> int:
        return hash(_HostStream)


class _HostEvent:
    """Stands for a CUDA event: it has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    def wait(self, *_: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return whether the event has happened: always."""
        return True


@contextlib.contextmanager
def _same_stream(_: Any = None) -> Iterator[None]:
    yield


def _cuda_runtime(device: Device) -> None:
    """`torch.cuda.X` calls: device, streams, events, memory, random state."""
    host = torch.device("cpu")

    def constant(value: Any) -> Callable[..., Any]:
        # A function of its own for each name: torch's compiler keeps a table keyed by function.
        return lambda *_, **__: value

    cuda: Any = torch.cuda
    cuda.current_device = constant(host)
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, constant(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, constant(0))
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, constant(None))
    cuda.Stream, cuda.Event, cuda.stream = _HostStream, _HostEvent, _same_stream
    cuda.current_stream = constant(_HostStream())
    cuda.default_stream = constant(_HostStream())
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)


_FACTORIES = (
    "tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "eye",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "as_tensor",
)  # fmt: skip


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _cuda_factories(device: Device) -> None:
    """`device="cuda"` in tensor factories and `Tensor.to`."""

    def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
                kwargs.pop("pin_memory", None)
            if any(_is_cuda(a) for a in args):
                args = tuple("cpu" if _is_cuda(a) else a for a in args)
            return function(*args, **kwargs)

        return wrapper

    for name in _FACTORIES:
        setattr(torch, name, on_host(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.to = on_host(tensor.to)


def _cuda_methods(device: Device) -> None:
    """`Tensor.cuda()` and `Module.cuda()`."""
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = lambda self, *_, **__: self
    module.cuda = lambda self, *_, **__: self


_SPELLED = re.compile(r"torch\.(npu\.|cuda\.)?")


def _tensor_type_names(device: Device) -> None:
    """The optimizers compare `tensor.type()` with the strings `torch.cuda.FloatTensor` & co."""
    tensor: Any = torch.Tensor
    plain = tensor.type

    @functools.wraps(plain)
    def type_(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None:
            return _SPELLED.sub("torch.cuda.", plain(self), count=1)
        return plain(self, dtype, **kwargs)

    tensor.type = type_


def _rng_tracker(device: Device) -> None:
    """Tensor-parallel random state and recompute save and restore the CUDA generator's state."""
    random = _module("megatron.core.tensor_parallel.random")

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state


def _recompute_without_fp8(device: Device) -> None:
    """`CheckpointWithoutOutput()` takes its default `fp8=False` for FP8 and wants its manager."""
    random = _module("megatron.core.tensor_parallel.random")
    random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _adam_step(device: Device) -> None:
    """Loading a checkpoint looks for torch AdamW's `step` among tensors that never hold it."""
    module = _module("megatron.core.optimizer.distrib_optimizer")
    optimizer_class = module.DistributedOptimizer
    original = optimizer_class._set_main_param_and_optimizer_states

    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = {"step": state["step"]} if "step" in state else {}
        original(self, model_param, {**step, **tensors})

    optimizer_class._set_main_param_and_optimizer_states = set_states


def _router_gemm(device: Device) -> None:
    """The router asks whether Transformer Engine's GEMM is there, by a name it never defined."""
    moe_utils = _module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _split_sizes(device: Device) -> None:
    """All-to-all wants its split sizes as lists; for host tensors they stay tensors."""
    dispatcher = _module("megatron.core.transformer.moe.token_dispatcher")
    moved = dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(moved)
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return moved(tensor, as_numpy, record_stream)

    dispatcher.maybe_move_tensor_to_cpu = to_host


def _grouped_matmul(device: Device) -> None:
    """GroupedMLP wants the CUDA-only `grouped_gemm` package; it gets our operator."""
    from msllm.engine.ops import operators_for

    util = _module("megatron.core.transformer.moe.grouped_gemm_util")
    util.ops = types.SimpleNamespace(gmm=operators_for(device.kind).grouped_matmul)
    util.grouped_gemm = types.SimpleNamespace(ops=util.ops)


def _rotary(device: Device) -> None:
    """Attention applies rotary embeddings by flags for Transformer Engine; it gets our operator.

    `freqs` is what `modules.RotaryEmbedding` made: cos and sin side by side, `[s, b, 1, 2 r]`.
    """
    attention = _module("megatron.core.transformer.attention")

    def apply(t: torch.Tensor, freqs: torch.Tensor, config: Any, **_: Any) -> torch.Tensor:
        cos, sin = freqs.chunk(2, dim=-1)
        interleaved = config.architecture.rope.interleaved
        return config.ops.rotary(t, cos, sin, interleaved=interleaved)

    attention.apply_rotary_pos_emb = apply


def _permute(device: Device) -> None:
    """The token dispatchers permute with fixed functions; they get our operators."""
    from msllm.engine.ops import operators_for

    _give_dispatchers(operators_for(device.kind))


def _give_dispatchers(ops: Operators) -> None:
    dispatcher = _module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.permute, dispatcher.unpermute = ops.permute, ops.unpermute


def _collectives_alone(device: Device) -> None:
    """Gloo copies a whole buffer to itself where a group has one rank; there is nothing to do."""
    buffers = _module("megatron.core.distributed.param_and_grad_buffer")

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def wrapper(output: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # asked of storages: tensors of a trace have no addresses
            shared = output.untyped_storage()._cdata == source.untyped_storage()._cdata
            same = shared and output.numel() == source.numel()
            return None if same else collective(output, source, *args, **kwargs)

        return wrapper

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(buffers, name, unless_alone(getattr(buffers, name)))


ALL = ("npu", "cuda", "cpu")

ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation("transfer_to_npu", "torch.cuda must mean the NPU", ("npu",), _transfer_to_npu),
    Adaptation(
        "compute_capability",
        "a broadcast asks for CUDA's compute capability, and torch_npu has none to tell",
        ("npu",),
        _compute_capability,
    ),
    Adaptation(
        "eager_functions",
        "decorators start torch's compiler at import and at the first step",
        ALL,
        _eager_functions,
    ),
    Adaptation("cuda_runtime", "torch.cuda is called without a check", ("cpu",), _cuda_runtime),
    Adaptation("cuda_factories", 'device="cuda" is written out', ("cpu",), _cuda_factories),
    Adaptation("cuda_methods", ".cuda() is called without a check", ("cpu",), _cuda_methods),
    Adaptation(
        "tensor_type_names",
        "optimizers compare tensor.type() with torch.cuda names",
        ("npu", "cpu"),
        _tensor_type_names,
    ),
    Adaptation("rng_tracker", "random state is read from CUDA's generator", ("cpu",), _rng_tracker),
    Adaptation(
        "recompute_without_fp8",
        "recompute of norms and activations assumes Transformer Engine's FP8",
        ALL,
        _recompute_without_fp8,
    ),
    Adaptation(
        "adam_step",
        "the distributed optimizer does not load the state of torch's AdamW",
        ALL,
        _adam_step,
    ),
    Adaptation(
        "router_gemm", "te_general_gemm is undefined without Transformer Engine", ALL, _router_gemm
    ),
    Adaptation("split_sizes", "all-to-all gets tensors for split sizes", ("cpu",), _split_sizes),
    Adaptation(
        "grouped_matmul", "GroupedMLP needs the CUDA-only grouped_gemm", ALL, _grouped_matmul
    ),
    Adaptation("rotary", "rotary embedding is chosen by Transformer Engine's flags", ALL, _rotary),
    Adaptation(
        "collectives_alone",
        "a rank alone in its group copies its parameters and gradients to themselves",
        ("cpu",),
        _collectives_alone,
    ),
    Adaptation("permute", "token permutation is not replaceable by a spec", ALL, _permute),
)
