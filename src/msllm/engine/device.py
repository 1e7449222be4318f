"""The device a process computes on: Ascend NPU, CUDA GPU or plain CPU, chosen once a process.

Everything that differs between them is asked of a `Device`: torch device, process-group backend,
seeding, memory, peak speed. It imports torch only when it needs it (seconds), so that settings can
be refused without. Which operators run on it is the matter of `msllm.engine.ops`; what
Megatron-core hard-codes for CUDA is that of `msllm.engine.megatron.adapt`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import platform
import random
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from msllm.engine import host_memory
from msllm.errors import InputError, Problem, first_line

if TYPE_CHECKING:
    import torch

Kind = Literal["npu", "cuda", "cpu"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order in which `auto` tries them."""

_logger = logging.getLogger(__name__)

_PROCESS_GROUP_BACKENDS: dict[Kind, str] = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}

_DTYPES: dict[Kind, tuple[str, ...]] = {
    "npu": ("fp32", "bf16", "fp16"),
    "cuda": ("fp64", "fp32", "bf16", "fp16"),
    "cpu": ("fp64", "fp32", "bf16", "fp16"),
}

# Dense peak FLOP/s as (part of the device's name, bf16/fp16, fp32); the first match counts.
# Ascend 910B (Atlas A2): 16 x 16 x 16 multiply-adds a cube core and cycle; the product sheets of
# Atlas 800T A2 and Atlas 300T A2 give 376, 313 and 280 TFLOP/s in FP16 for B2, B3, B4, and a
# quarter of that in FP32. B1 is the B2's 24 cores at a higher clock, 414.
# Ascend 910C (Atlas A3, "Ascend910_93xx"): 752 TFLOP/s a package of two dies (Zuo et al., Serving
# LLMs on Huawei CloudMatrix384, 2025); torch_npu shows each die as a device.
# NVIDIA: data sheets, without sparsity; fp32 outside the tensor cores, as torch multiplies it.
_PEAK_FLOPS: tuple[tuple[str, float, float], ...] = (
    ("Ascend910B1", 414e12, 103e12),
    ("Ascend910B2C", 354e12, 88e12),
    ("Ascend910B2", 376e12, 94e12),
    ("Ascend910B3", 313e12, 78e12),
    ("Ascend910B4", 280e12, 70e12),
    ("Ascend910_93", 376e12, 94e12),
    ("H200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("H800", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("A800", 312e12, 19.5e12),
)

_NPU_ENVIRONMENT = {
    "PYTORCH_NPU_ALLOC_CONF": (
        "expandable_segments:True",
        "the allocator grows its segments, so that memory does not fragment into unusable holes",
    ),
    "TASK_QUEUE_ENABLE": (
        "2",
        "kernel launches are prepared in a second thread, off Python's critical path",
    ),
    "HCCL_CONNECT_TIMEOUT": (
        "1800",
        "seconds for all ranks to meet; the first start on a large cluster reads slow disks",
    ),
    "HCCL_EXEC_TIMEOUT": (
        "1800",
        "seconds that a collective waits for the slowest rank, which may be saving a checkpoint",
    ),
}


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine, as one process sees it.

    Picklable and cheap: it holds no handle. `index` is the device's number on its machine; CPU
    processes all share the one CPU, whatever their index.
    """

    kind: Kind
    index: int = 0

    @property
    def torch_device(self) -> torch.device:
        """The device for tensors: `npu:3`, `cuda:0`, or `cpu` without a number."""
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        _runtime(self.kind)  # torch knows the name "npu" only once torch_npu is loaded
        return torch.device(self.kind, self.index)

    @property
    def process_group_backend(self) -> str:
        """Name of the torch.distributed backend: hccl, nccl or gloo."""
        return _PROCESS_GROUP_BACKENDS[self.kind]

    @property
    def name(self) -> str:
        """The hardware's own name, such as "Ascend910B2" or "AMD EPYC 9654"."""
        if self.kind == "cpu":
            return _cpu_name()
        return str(_runtime(self.kind).get_device_name(self.index))

    def set_current(self) -> None:
        """Make this the device on which the process allocates by default."""
        if self.kind != "cpu":
            _runtime(self.kind).set_device(self.index)

    def synchronize(self) -> None:
        """Wait until everything launched on the device is done."""
        if self.kind != "cpu":
            _runtime(self.kind).synchronize(self.index)

    def seed(self, seed: int) -> None:
        """Seed Python, numpy, torch's CPU generator and this device's generator."""
        import numpy as np
        import torch

        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.kind != "cpu":
            _runtime(self.kind).manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        """State of this device's generator, uint8 on the CPU, for a checkpoint."""
        import torch

        if self.kind == "cpu":
            return torch.get_rng_state()
        return cast(torch.Tensor, _runtime(self.kind).get_rng_state(self.index))

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put back what `rng_state` gave."""
        import torch

        if self.kind == "cpu":
            torch.set_rng_state(state)
        else:
            _runtime(self.kind).set_rng_state(state, self.index)

    def supports(self, dtype: str) -> bool:
        """Whether training in `dtype` (fp64, fp32, bf16 or fp16) runs on this device."""
        if self.kind == "cuda" and dtype == "bf16":
            import torch

            return bool(torch.cuda.get_device_capability(self.index)[0] >= 8)
        return dtype in _DTYPES[self.kind]

    def memory_allocated(self) -> int:
        """Bytes in use: by tensors on an accelerator, by the whole process on the CPU."""
        if self.kind == "cpu":
            return host_memory.resident()
        return int(_runtime(self.kind).memory_allocated(self.index))

    def peak_memory(self) -> int:
        """Highest `memory_allocated` since the start or the last `reset_peak_memory`, in bytes."""
        if self.kind == "cpu":
            return host_memory.peak_resident()
        return int(_runtime(self.kind).max_memory_allocated(self.index))

    def reset_peak_memory(self) -> None:
        """Count `peak_memory` from now on."""
        if self.kind == "cpu":
            host_memory.reset_peak_resident()
        else:
            _runtime(self.kind).reset_peak_memory_stats(self.index)

    def total_memory(self) -> int:
        """Bytes of the device, or of the machine (or its container's limit) on the CPU."""
        if self.kind == "cpu":
            return host_memory.total()
        return int(_runtime(self.kind).mem_get_info(self.index)[1])

    def free_memory(self) -> int:
        """Bytes that can still be allocated, by whichever process."""
        if self.kind == "cpu":
            return host_memory.available()
        return int(_runtime(self.kind).mem_get_info(self.index)[0])

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s of dense matrix products in `dtype`, for model FLOPs utilization.

        From the makers' data sheets; measured by a short product (about 0.2 s) on CPUs, where it
        depends on the threads this process has, and on accelerators that the table lacks.
        """
        known = None if self.kind == "cpu" else published_peak_flops(self.name, dtype)
        return _measured_flops(self, dtype) if known is None else known

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` says that memory ran out, the device's or the machine's."""
        import torch

        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(
            sign in text for sign in ("out of memory", "can't allocate memory", "cannot allocate")
        )

    def environment(self) -> dict[str, tuple[str, str]]:
        """Environment variables that workers on this device want: name -> (value, why).

        Defaults only: what the user has set stays.
        """
        return dict(_NPU_ENVIRONMENT) if self.kind == "npu" else {}


def published_peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s that the maker states for a device of this name, here or elsewhere, if known."""
    import torch

    for part, half, single in _PEAK_FLOPS:
        if part in name:
            return half if dtype in (torch.bfloat16, torch.float16) else single
    return None


def select_device(kind: str = "auto", index: int = 0) -> Device:
    """Choose the device: `kind`, or for "auto" the first of npu, cuda, cpu that works.

    Raises:
        InputError: The kind is unknown, does not work here, or has no device of that index; it
            says which piece is missing.
    """
    if kind == "auto":
        chosen = _first_working()
    elif kind not in KINDS:
        raise InputError(
            f"unknown device {kind!r}", where=f"--device {kind}", hint="use auto, npu, cuda or cpu"
        )
    elif (problem := probe(kind)) is not None:
        raise InputError([problem])
    else:
        chosen = kind
    count = device_count(chosen)
    if chosen != "cpu" and not 0 <= index < count:
        raise InputError(
            f"device {chosen}:{index} was asked for, but only {count} "
            f"{'is' if count == 1 else 'are'} visible",
            where=f"--device {kind}",
            hint=f"start at most {count} processes on this machine, or make more devices visible",
        )
    return Device(chosen, index)


def probe(kind: Kind) -> Problem | None:
    """Why devices of `kind` can't be used here, or None if they can.

    Creates no context on a device and leaves nothing behind but imported modules; torch_npu is
    imported only for "npu", and only where it is installed.
    """
    if kind == "npu":
        return _probe_npu()
    if kind == "cuda":
        return _probe_cuda()
    return None


def device_count(kind: Kind) -> int:
    """Count the visible devices of `kind`: 1 for the CPU, 0 where the kind does not work."""
    if kind == "cpu":
        return 1
    return 0 if probe(kind) is not None else int(_runtime(kind).device_count())


def _first_working() -> Kind:
    for kind in KINDS:
        problem = probe(kind)
        if problem is None:
            return kind
        if kind == "npu" and _installed("torch_npu"):
            # Somebody meant to use the NPU: falling back in silence would waste their day.
            _logger.warning("the NPU is not used: %s", problem)
    raise AssertionError("the CPU always works")


def _probe_npu() -> Problem | None:
    where = "--device npu"
    if not _installed("torch_npu"):
        return Problem(
            "torch_npu is not installed",
            where,
            f"install the torch_npu that goes with torch {_torch_version().split('+')[0]}, or "
            "use --device cpu",
        )
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # a missing library raises ImportError, OSError or RuntimeError
        return Problem(
            f"torch_npu is installed but does not load: {first_line(error)}",
            where,
            _loading_hint(error),
        )
    if int(_runtime("npu").device_count()) == 0:
        return Problem(
            "torch_npu works, but no NPU is visible",
            where,
            "see whether `npu-smi info` lists devices, whether /dev/davinci* are passed into the "
            "container, and what ASCEND_RT_VISIBLE_DEVICES holds",
        )
    return None


def _loading_hint(error: Exception) -> str:
    text = str(error)
    if "libascend" in text or "libhccl" in text or "cannot open shared object" in text:
        return (
            "CANN's libraries are not found: install CANN, then "
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh`"
        )
    return "torch_npu, torch and CANN must be versions that go together"


def _probe_cuda() -> Problem | None:
    where = "--device cuda"
    without = Problem(
        f"this torch ({_torch_version()}) is built without CUDA",
        where,
        "install a CUDA build of torch, or use --device cpu",
    )
    if _torch_version().endswith("+cpu"):
        return without  # known from its name, without importing it
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return without
    if torch.cuda.device_count() == 0:
        return Problem(
            "no CUDA device is visible",
            where,
            "see whether `nvidia-smi` lists devices, and what CUDA_VISIBLE_DEVICES holds",
        )
    return None


def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _runtime(kind: Kind) -> ModuleType | Any:
    """torch.npu or torch.cuda: two modules with the same functions."""
    if kind == "npu":  # also in a process that got its Device from another one
        importlib.import_module("torch_npu")
    return getattr(importlib.import_module("torch"), kind)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module put into sys.modules by hand has no spec
        return True


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model Name")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _measured_flops(device: Device, dtype: torch.dtype, seconds: float = 0.15) -> float:
    """FLOP/s of the fastest of the square products that fit into `seconds`."""
    import torch

    size = 768 if device.kind == "cpu" else 4096
    a = torch.ones(size, size, dtype=dtype, device=device.torch_device)
    out = torch.mm(a, a)
    device.synchronize()
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        torch.mm(a, a, out=out)
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
