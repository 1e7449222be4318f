"""Gives pretended devices real numbers: every kernel is computed by the CPU on the same bytes.

The stand-ins keep device memory in host memory, so an `npu` tensor can be seen as a CPU tensor of
the same storage. The mode sits under autograd: torch_npu's Python wrappers, argument checks and
gradient formulas run, then each aten kernel is the CPU's and each `npu::` operator its reference
(`references`). It is stricter than the CPU where the device is: tensors of two devices do not mix,
fresh memory holds no zeros, HCCL reduces only the types that it knows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.npu import attention_references, expert_references  # noqa: F401  (they register)
from tests.npu.references import ATEN, REFERENCES

OWN_CODE = frozenset(("detach", "set_", "resize_", "record_stream", "is_pinned", "_pin_memory"))
"""Operators that touch no values: torch_npu runs them itself, as it does all views."""

FRESH = frozenset(["empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"])
"""They give memory that nobody has written to."""

CROSSES = frozenset(["copy_", "_to_copy", "_copy_from", "_copy_from_and_resize"])
"""They take tensors of two devices."""

REDUCED = frozenset(
    (torch.int8, torch.int16, torch.int32, torch.int64, torch.half, torch.bfloat16, torch.float)
)
"""What HCCL adds up."""

KERNELS = ("PrivateUse1", "CompositeExplicitAutograd")

_outside = ThreadPoolExecutor(1)


class Simulator(TorchDispatchMode):
    """Computes what is asked of `npu` tensors.

    Attributes:
        calls: The `npu::` operators called, in order, without their namespace.
        fallbacks: aten operators for which torch_npu has no kernel: on a device they would go
            through the CPU, there and back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fallbacks: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        asked = next((x for x in leaves if isinstance(x, torch.device)), None)
        on_npu = [x for x in leaves if isinstance(x, Tensor) and x.device.type == "npu"]
        if not on_npu and (asked is None or asked.type != "npu"):
            return func(*args, **kwargs)
        namespace, name = func._schema.name.split("::")
        if func.is_view or name in OWN_CODE or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if name in FRESH:
            return _spoiled(func(*args, **kwargs))
        if name not in CROSSES:
            _check_devices(func, leaves)
        if namespace == "c10d":
            _check_reduction(name, on_npu)
        else:
            self._note(func, namespace, name)
        target = asked or on_npu[0].device
        return _compute(_kernel(func, namespace), target, args, kwargs)

    def _note(self, func: Any, namespace: str, name: str) -> None:
        if namespace == "npu":
            self.calls.append(name)
        elif not has_kernel(func):
            self.fallbacks.add(func._schema.name)


def has_kernel(func: Any) -> bool:
    """Whether torch_npu computes an operator on the device, or torch from others that are.

    Torch makes the plain and the in-place form of many operators from the one that writes to
    `out`; then torch_npu must have that one.
    """
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(known(func.name(), key) for key in KERNELS):
        return True
    if not known(func.name(), "CompositeExplicitAutogradNonFunctional"):
        return False
    packet = func._schema.name.removesuffix("_")
    overload = func._overloadname
    forms = {f"{packet}.{overload}_out", f"{packet}.out", f"{packet}.{overload.lower()}_out"}
    return any(_defined(form) and known(form, "PrivateUse1") for form in forms)


def _defined(form: str) -> bool:
    return torch._C._dispatch_has_kernel(form)


def on_device(values: Any) -> bool:
    """Whether a tensor of the device is among arguments or results."""
    return any(isinstance(x, Tensor) and x.device.type == "npu" for x in tree_leaves(values))


def on_host(tensor: Tensor) -> Tensor:
    """The same bytes as a CPU tensor."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    same = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    seen = torch.empty(0, dtype=tensor.dtype)
    return seen.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


def _kernel(func: Any, namespace: str) -> Callable[..., Any]:
    name = func._schema.name.split("::")[1]
    key = name if func._overloadname == "default" else f"{name}.{func._overloadname}"
    reference = (REFERENCES if namespace == "npu" else ATEN).get(key)
    if reference is not None:
        # In a thread of its own there is neither this mode nor a disabled autograd.
        return lambda *args, **kwargs: _outside.submit(reference, *args, **kwargs).result()
    if namespace == "npu":
        raise NotImplementedError(f"no reference for npu::{key}")
    return func  # type: ignore[no-any-return]


def _compute(kernel: Callable[..., Any], target: torch.device, args: Any, kwargs: Any) -> Any:
    own: dict[int, tuple[Tensor, Tensor]] = {}  # by id of what the kernel sees

    def down(x: Any) -> Any:
        if isinstance(x, Tensor) and x.device.type == "npu":
            seen = on_host(x)
            own[id(seen)] = (seen, x)
            return seen
        if isinstance(x, torch.device) and x.type == "npu":
            return torch.device("cpu")
        if isinstance(x, torch.Generator) and x.device.type == "npu":
            return torch.default_generator
        return x

    def up(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in own:
            return _unmoved(*own[id(x)])
        return _on_device(x, target) if target.type == "npu" else x.clone()

    args, kwargs = tree_map(down, (args, kwargs))
    return tree_map(up, kernel(*args, **kwargs))


def _unmoved(seen: Tensor, tensor: Tensor) -> Tensor:
    """The caller's own tensor, which the kernel wrote to."""
    if seen.numel() and seen.data_ptr() != tensor.data_ptr():
        raise RuntimeError("an output of the wrong size was given to an operator")
    return tensor


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    dense = torch.empty_like(values)  # no overlapping strides
    with torch.utils._python_dispatch._disable_current_modes():
        out = torch.empty_strided(dense.shape, dense.stride(), dtype=values.dtype, device=device)
    on_host(out).copy_(values)
    return out


def _spoiled(tensor: Tensor) -> Tensor:
    """Fill fresh memory with what shows if it is read."""
    if tensor.device.type == "npu" and tensor.is_floating_point():
        on_host(tensor).fill_(float("nan"))
    return tensor


def _check_devices(func: Any, leaves: list[Any]) -> None:
    """Refuse a CPU tensor beside those of the device; aten takes scalars from there."""
    scalars = func.namespace == "aten"
    for x in leaves:
        if isinstance(x, Tensor) and x.device.type == "cpu" and not (scalars and x.dim() == 0):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"npu and cpu! ({func})"
            )


def _check_reduction(name: str, tensors: list[Tensor]) -> None:
    if "reduce" in name and not REDUCED.issuperset(t.dtype for t in tensors):
        raise RuntimeError(f"HCCL does not reduce {[t.dtype for t in tensors]} ({name})")
