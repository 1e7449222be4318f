"""Measures what one process of a real model keeps in memory: `python measure.py CASES OUT`.

Each case is a model's shape and a run's settings; the report has bytes of each kind, and the
estimate of the same run. Bytes are those of tensors' storages, each counted once.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from msllm.config import RunConfig
from msllm.engine.device import select_device
from msllm.engine.layout import Layout
from msllm.engine.megatron.backend import MegatronBackend
from msllm.engine.planning import memory
from msllm.models.architecture import MLA, Architecture, MoE


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage by its address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


class PeakMemory(TorchDispatchMode):
    """Most bytes that tensors made under it held at once; those that `exist` don't count."""

    def __init__(self, exist: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._exist = set(storages(exist))
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._meet(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _meet(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known and size and storage.data_ptr() not in self._exist:
            self._known[key] = weakref.finalize(storage, self._lose, key, size)
            self.now += size

    def _lose(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size


def batch(architecture: Architecture, run: RunConfig) -> dict[str, torch.Tensor]:
    length, rows = run.data.seq_length, run.train.micro_batch
    tokens = torch.randint(architecture.vocab_size, (rows, length + 1))
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(rows, length),
        "position_ids": torch.arange(length).repeat(rows, 1),
    }


def saved_bytes(backend: MegatronBackend, data: dict[str, torch.Tensor]) -> int:
    """Bytes that one forward pass keeps for the backward pass: of the layers and the last norm.

    Parameters, and what has the vocabulary's width, are left out.
    """
    model = backend.chunks[0].module
    model.train()
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(data["tokens"], data["position_ids"], None, labels=data["labels"])
    wide = [tensor for tensor in kept if tensor.shape[-1:] == (model.vocab_size,)]
    others = storages([*model.parameters(), *data.values(), *wide])
    return sum(size for at, size in storages(kept).items() if at not in others)


class State:
    """What a backend keeps from step to step."""

    def __init__(self, backend: MegatronBackend, chunk: Any = None):
        from msllm.engine.megatron.optimizer import inner_optimizers  # only after adapt()

        chunk = chunk or backend.chunks[0]
        self.parameters = list(chunk.parameters())
        # views of the buffers, in which each begins at a multiple of 64 elements
        self.gradients = [p.main_grad for p in self.parameters]
        optimizers = inner_optimizers(backend.optimizer)
        trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        own = storages(self.parameters)
        self.mains = [p for p in trained if p.untyped_storage().data_ptr() not in own]
        states = [state for o in optimizers for state in o.state.values()]
        self.moments = [t for state in states for name, t in state.items() if name != "step"]

    @staticmethod
    def size(tensors: list[torch.Tensor]) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def all(self) -> list[torch.Tensor]:
        return [*self.parameters, *self.gradients, *self.mains, *self.moments]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    shape = dict(case["shape"])
    for part, kind in (("moe", MoE), ("mla", MLA)):
        if part in shape:
            shape[part] = kind(**shape[part])
    architecture = Architecture(**shape)
    run = RunConfig.model_validate({"model": "m", "device": "cpu", **case["run"]})
    layout = Layout.from_world(run.layout, 1)
    backend = MegatronBackend(architecture, layout, run, select_device("cpu"))
    data = batch(architecture, run)
    saved = saved_bytes(backend, data)
    steps = [data] * memory.micro_batches(layout, run)
    backend.train_step(steps, 1)  # makes the optimizer's state
    state = State(backend)
    with PeakMemory(state.all()) as peak:
        backend.train_step(steps, 2)
    report = {
        "estimate": dict(memory.estimate(architecture, layout, run, "cpu").items),
        "parameters": state.size(state.parameters),
        "gradients": state.size(state.gradients),
        "main parameters": state.size(state.mains),
        "optimizer state": state.size(state.moments),
        "saved": saved,
        "step": peak.peak,
    }
    backend.close()
    return report


def main(cases: str, out: str) -> None:
    torch.manual_seed(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    reports = {}
    for case in json.loads(Path(cases).read_text()):
        reports[case["name"]] = measure(case)
    Path(out).write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
