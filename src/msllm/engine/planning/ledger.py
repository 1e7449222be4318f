"""The ledger of a traced step: bytes that tensors hold, operations, collectives.

A dispatch mode that sees each operation of the real model code, on fake tensors or on real ones,
and runs it unchanged. Knows nothing of devices: how long the work takes is `timing`'s matter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from msllm.engine.planning.records import Record, Work


class Ledger(TorchDispatchMode):
    """Keeps the records of phases; see `phase`. Tensors that `exist` do not count as held."""

    def __init__(self, exist: Iterable[torch.Tensor], groups: dict[str, str]) -> None:
        """Start with nothing held.

        Args:
            exist: Parameters, gradients and whatever else is counted elsewhere.
            groups: Names of process groups as torch has them -> as the ledger shall call them.
        """
        super().__init__()
        self._kept = [tensor.untyped_storage() for tensor in exist]
        self._exist = {storage._cdata for storage in self._kept}
        self._known: dict[int, Any] = {}
        self._groups = groups
        self._own: Work | None = None
        self.now = 0
        self.record = Record()

    def phase(self) -> Record:
        """Begin a new phase and return its record; the one before has ended."""
        self.record.end = self.now
        self.record = Record(start=self.now, end=self.now, peak=self.now)
        return self.record

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, then note it."""
        out = function(*args, **(kwargs or {}))
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        for tensor in outputs:
            self._meet(tensor.untyped_storage())
        record = self.record
        record.peak, record.end = max(record.peak, self.now), self.now
        if function.namespace == "c10d":
            self._note_collective(function, args)
        elif self._own is None:
            self._note_work(function, args, kwargs or {}, out, outputs)
        return out

    def one(self, work: Work, function: Callable[[], Any]) -> Any:
        """Run a function whose operations stand for one fused kernel, which is `work`."""
        outer, self._own = self._own, work
        try:
            return function()
        finally:
            self._own = outer
            if outer is None:
                self.record.work[work] += 1

    def _meet(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known and size and key not in self._exist:
            self._known[key] = weakref.finalize(storage, self._lose, key, size)
            self.now += size

    def _lose(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size

    def _note_work(
        self, function: Any, args: Any, kwargs: Any, out: Any, outputs: list[torch.Tensor]
    ) -> None:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if function.is_view or not outputs or function in _FREE:
            return
        moved = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        count = flop_registry.get(function.overloadpacket)
        flops = int(count(*args, **kwargs, out_val=out)) if count else 0
        kind = "memory" if not count else "attention" if _is_attention(function) else "matmul"
        self.record.work[kind, flops, moved] += 1

    def _note_collective(self, function: Any, args: Any) -> None:
        name = function.overloadpacket.__name__
        if name not in _MESSAGES:
            return
        group = next(found for arg in args if (found := _group(arg)) is not None)
        tensors = [t for t in tree_leaves(args[_MESSAGES[name]]) if isinstance(t, torch.Tensor)]
        size = sum(t.numel() * t.element_size() for t in tensors)
        label = self._groups.get(group.group_name, group.group_name)
        self.record.collectives[_NAMES[name], label, size] += 1


_MESSAGES = {
    "allreduce_": 0, "broadcast_": 0, "_allgather_base_": 0, "allgather_": 0,
    "_reduce_scatter_base_": 1, "reduce_scatter_": 1, "alltoall_base_": 1, "send": 0,
    "allgather_into_tensor_coalesced_": 0, "reduce_scatter_tensor_coalesced_": 1,
    "allreduce_coalesced_": 0,
}  # fmt: skip
"""Collective -> which argument is its message: the whole of what is gathered, summed or cut."""
_NAMES = {
    "allreduce_": "all-reduce", "broadcast_": "broadcast", "_allgather_base_": "all-gather",
    "allgather_": "all-gather", "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter", "alltoall_base_": "all-to-all", "send": "send",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter", "allreduce_coalesced_": "all-reduce",
}  # fmt: skip
_FREE = {torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default}


def _is_attention(function: Any) -> bool:
    return "scaled_dot_product" in function.overloadpacket.__name__


def _group(argument: Any) -> ProcessGroup | None:
    if isinstance(argument, torch.ScriptObject):
        try:
            return ProcessGroup.unbox(argument)
        except RuntimeError:  # a reduce operation, say
            return None
    return None


def fused(kind: str, flops: int, moved: int, function: Callable[[], Any]) -> Any:
    """Run what stands for one fused kernel; if a ledger is open, it notes one operation."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    for mode in reversed(modes):
        if isinstance(mode, Ledger):
            return mode.one((kind, flops, moved), function)
    return function()
