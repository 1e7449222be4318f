"""Small real runs: a model of two layers, data of a few hundred tokens, one or two processes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

CASE = Path(__file__).parent / "run_case.py"
TIMEOUT = 900
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 301,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
STEPS = 12


class Runs:
    """Makes, starts and reads runs in a folder of their own."""

    def __init__(self, root: Path):
        self.root = root
        self.model = root / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        self.experts = root / "experts"
        self.experts.mkdir()
        (self.experts / "config.json").write_text(json.dumps(CONFIG | EXPERTS))
        self.data = root / "data"
        write_documents(self.data)

    def settings(self, name: str, **over: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "model": str(self.model),
            "device": "cpu",
            "dtype": "fp32",
            "out": str(self.root / name),
            "data": {"paths": [str(self.data)], "seq_length": 16},
            "train": {"steps": STEPS, "micro_batch": 1, "global_batch": 4, "lr": 1e-3},
            "checkpoint": {"save_interval": 4},
        }
        for key, value in over.items():
            merge = isinstance(value, dict) and key in base
            base[key] = base[key] | value if merge else value
        return base

    def start(
        self, name: str, limit: tuple[int, int] | None = None, **over: Any
    ) -> subprocess.Popen[str]:
        """Start a run; `limit` is a resource and how much of it each process may have."""
        path = self.root / f"{name}.json"
        path.write_text(json.dumps(self.settings(name, **over)))
        return subprocess.Popen(
            [sys.executable, str(CASE), str(path)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=None if limit is None else partial(_limit, *limit),
        )

    def run(self, name: str, status: int = 0, **over: Any) -> str:
        process = self.start(name, **over)
        try:
            output = process.communicate(timeout=TIMEOUT)[0]
        finally:
            process.kill()
        logs = "".join(log.read_text() for log in sorted(self.folder(name).glob("logs/*.log")))
        assert process.returncode == status, f"{process.returncode}\n{output}\n{logs[-3000:]}"
        return output

    def cut(self, source: str, name: str, step: int) -> None:
        """Make a run that was killed after a step's checkpoint, out of one that ended."""
        shutil.copytree(self.folder(source), self.folder(name))
        for checkpoint in self.checkpoints(name):
            if checkpoint > f"step-{step:08d}":
                shutil.rmtree(self.folder(name) / "checkpoints" / checkpoint)

    def folder(self, name: str) -> Path:
        return self.root / name

    def metrics(self, name: str) -> list[dict[str, Any]]:
        path = self.folder(name) / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def tensors(self, name: str, step: int) -> dict[str, Any]:
        """What a checkpoint holds, read by torch itself."""
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        folder = self.folder(name) / "checkpoints" / f"step-{step:08d}"
        state: dict[str, Any] = {}
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict(state, FileSystemReader(folder), planner=planner, no_dist=True)
        return dict(_leaves(state))

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Loss and gradient norm of each step, after checking that each is there once."""
        metrics = self.metrics(name)
        assert [m["step"] for m in metrics] == list(range(1, len(metrics) + 1))
        return [(m["loss"], m["grad_norm"]) for m in metrics]

    def checkpoints(self, name: str) -> list[str]:
        folder = self.folder(name) / "checkpoints"
        return sorted(p.name for p in folder.iterdir()) if folder.exists() else []

    def wait_for(self, what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        """Wait until something is so; fail if the run ends or takes too long before."""
        end = time.monotonic() + TIMEOUT
        while not what():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, "the run does not get there"
            time.sleep(0.02)

    def stop_at(self, name: str, step: int, number: int, **over: Any) -> tuple[int, str]:
        """Start a run, send its launcher a signal once a step is logged; status and output."""
        process = self.start(name, **over)
        try:
            self.wait_for(lambda: len(self.metrics(name)) >= step, process)
            process.send_signal(number)
            output = process.communicate(timeout=TIMEOUT)[0]
        finally:
            process.kill()
            process.wait()
        return process.returncode, output

    def workers(self, name: str) -> list[int]:
        """Process ids of a run's workers."""
        import psutil

        out = str(self.folder(name))
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "msllm.engine.training.worker" in command and out in command:
                found.append(process.pid)
        return found

    def gone(self, name: str) -> bool:
        return not self.workers(name)

    def all_ended(self, sessions: list[int]) -> bool:
        """Whether workers have ended with the helpers that they started; waits a little."""
        import psutil

        end = time.monotonic() + 20
        while time.monotonic() < end:
            if not any(session_of(pid) in sessions for pid in psutil.pids()):
                return True
            time.sleep(0.05)
        return False


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _limit(resource_number: int, amount: int) -> None:
    resource.setrlimit(resource_number, (amount, amount))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors of nested dicts, by dotted name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif hasattr(value, "shape"):
        yield name, value


def write_documents(prefix: Path) -> None:
    """Documents of 700 tokens in all: an epoch of 43 samples of 16, ending inside a run."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for _ in range(14):
        start = int(random.integers(0, 200))
        tokens = (start + np.arange(50) * 3) % 300
        builder.add_document(torch.from_numpy(tokens.astype(np.int64)), [50])
    builder.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def straight(runs: Runs) -> list[tuple[float, float]]:
    """The curve of the run that nothing disturbed, one process."""
    runs.run("straight", log={"tensorboard": True}, data={"valid_fraction": 0.0})
    return runs.curve("straight")
