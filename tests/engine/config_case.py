"""Builds backends and runs training loops for several settings, and reports what the engine has.

Usage: config_case.py CASES.json OUT.json. A case is `{"settings": ..., "world": N}`: with a world,
rank 0 of N is built over torch's fake process group, which needs no other process; without one, the
worker trains in this process. Reports hold what was found in the engine, never the settings.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from msllm.config import RunConfig, write_run
from msllm.engine.device import select_device
from msllm.engine.layout import Layout
from msllm.engine.megatron.backend import MegatronBackend
from msllm.engine.training import worker
from msllm.engine.training.run_folder import RunFolder
from msllm.errors import MsllmError
from msllm.models.resolve import resolve_model

CONFIG_FIELDS = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "recompute_granularity",
    "recompute_modules",
    "recompute_num_layers",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
)
OPTIMIZER_FIELDS = ["lr", "min_lr", "clip_grad", "weight_decay", "use_distributed_optimizer"]
DDP_FIELDS = ["overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer"]


def build(settings: dict[str, Any], world: int) -> dict[str, Any]:
    """Rank 0's part of the model in a world of that many ranks."""
    run = RunConfig.model_validate(settings)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    layout = Layout.from_world(run.layout, world)
    architecture = resolve_model(run.model).architecture
    backend = MegatronBackend(architecture, layout, run, select_device("cpu"))
    try:
        return describe(backend)
    finally:
        backend.close()


def describe(backend: MegatronBackend) -> dict[str, Any]:
    models = [chunk.module for chunk in backend.chunks]
    embedding = models[0].embedding.word_embeddings.weight.detach().float()
    return {
        "config": {name: getattr(backend.config, name) for name in CONFIG_FIELDS},
        "groups": groups(),
        "layers": [list(model.global_layers) for model in models],
        "embedding": {
            "std": float(embedding.std()),
            "digest": digest(embedding),
            "dtype": str(next(models[0].parameters()).dtype),
        },
        "sequence": models[0].max_sequence_length,
        "experts": kinds_of(models, "experts"),
        "dispatchers": kinds_of(models, "token_dispatcher"),
        "optimizer": describe_optimizer(backend.optimizer),
        "ddp": {name: getattr(backend.chunks[0].ddp_config, name) for name in DDP_FIELDS},
        "lazy": [backend.config.no_sync_func is not None, backend.config.param_sync_func is None],
        "schedule": schedule(backend),
    }


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def kinds_of(models: list[Any], name: str) -> list[str]:
    """Class names of what the modules have as an attribute of that name."""
    found = (getattr(module, name, None) for model in models for module in model.modules())
    return sorted({type(each).__name__ for each in found if each is not None})


def groups() -> dict[str, int]:
    from megatron.core import parallel_state as state

    return {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "vpp": state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": state.get_context_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
        "etp": state.get_expert_tensor_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
    }


def describe_optimizer(optimizer: Any) -> dict[str, Any]:
    from msllm.engine.megatron.optimizer import inner_optimizers

    inner = inner_optimizers(optimizer)
    found = [group for each in inner for group in each.param_groups]
    config = getattr(optimizer, "config", None) or optimizer.chained_optimizers[0].config
    return {
        **{name: getattr(config, name) for name in OPTIMIZER_FIELDS},
        "kinds": sorted({type(each).__name__ for each in inner}),
        "betas": next((list(group["betas"]) for group in found if "betas" in group), None),
        "eps": next((group["eps"] for group in found if "eps" in group), None),
        "decay": max(group["weight_decay"] for group in found),
        "momentum": next((g["momentum_beta"] for g in found if "momentum_beta" in g), None),
    }


def schedule(backend: MegatronBackend) -> dict[str, Any]:
    """Figures of the learning rates that twelve steps would use."""
    rates = []
    for _ in range(12):
        backend.schedule.step(increment=1)
        rates.append(backend.learning_rate)
    peak, last = max(rates), min(rates[-3:])
    at_peak = [step for step, rate in enumerate(rates, 1) if rate == peak]
    return {
        "peak": peak,
        "last": last,
        "first_at_peak": at_peak[0],
        "last_at_peak": at_peak[-1],
        "ends": 1 + rates.index(last),
        "rates": rates,
    }


class Watch:
    """Sees a run from outside: what enters the model, which threads there are, who saves how."""

    def __init__(self) -> None:
        self.trained: list[list[int]] = []
        self.evaluated: list[list[int]] = []
        self.threads: set[str] = set()
        self.queued = False
        self.deterministic = False
        self.seed = 0
        self.randomness = ""

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if type(module).__name__ != "LanguageModel":
            return
        shapes = self.trained if module.training else self.evaluated
        shapes.append(list(inputs[0].shape))
        if not module.training:
            return
        self.threads |= {t.name.rpartition("_")[0] for t in threading.enumerate()}
        self.deterministic |= torch.are_deterministic_algorithms_enabled()
        self.seed = torch.initial_seed()
        self.randomness = digest(torch.get_rng_state())
        if self.queued:
            return
        savers = (o for o in gc.get_objects() if type(o).__name__ == "Saver")
        self.queued = any(saver._queue is not None for saver in savers)


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """A whole run of one process, by the code that the launcher starts."""
    run = RunConfig.model_validate(settings)
    assert run.out is not None
    folder = RunFolder(run.out).create()
    write_run(run, folder.config)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    watch, output, error = Watch(), io.StringIO(), ""
    hook = torch.nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        with contextlib.redirect_stdout(output):
            worker.run_rank(folder.path)
    except MsllmError as raised:
        error = str(raised)
    finally:
        hook.remove()
        torch.use_deterministic_algorithms(False)
    return report(folder, watch, output.getvalue()) | {"error": error}


def report(folder: RunFolder, watch: Watch, output: str) -> dict[str, Any]:
    lines = folder.metrics.read_text().splitlines() if folder.metrics.exists() else []
    metrics = [json.loads(line) for line in lines]
    saved = sorted(folder.checkpoints.glob("step-*"))
    manifest = json.loads((saved[-1] / "complete.json").read_text()) if saved else {}
    return {
        "steps": [m["step"] for m in metrics],
        "losses": [m["loss"] for m in metrics],
        "samples": metrics[0]["consumed_samples"] if metrics else 0,
        "validated": [m["step"] for m in metrics if m["valid_loss"] is not None],
        "peak_tflops": [round(m["tflops_per_device"] / m["mfu"], 6) for m in metrics][-1:],
        "checkpoints": [path.name for path in saved],
        "exported": sorted(path.name for path in folder.hf.glob("*")),
        "hidden_size": manifest.get("architecture", {}).get("hidden_size"),
        "lines": len([line for line in output.splitlines() if line.startswith("step")]),
        "tensorboard": len(list(folder.tensorboard.glob("events*"))),
        "trained": watch.trained[0] if watch.trained else None,
        "evaluated": len(watch.evaluated),
        "threads": sorted(watch.threads),
        "queued": watch.queued,
        "deterministic": watch.deterministic,
        "seed": watch.seed,
        "randomness": watch.randomness,
    }


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    reports = {
        name: build(case["settings"], case["world"]) if case["world"] else train(case["settings"])
        for name, case in cases.items()
    }
    Path(sys.argv[2]).write_text(json.dumps(reports, default=str))


if __name__ == "__main__":
    main()
