"""One rank of a checkpoint test job: loads, trains, saves, and reports losses case by case.

Usage: checkpoint_cases.py CASES.json OUT.json, with torchrun's variables in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from groups import leave
from megatron_case import build, data


def run(case: dict[str, Any]) -> dict[str, Any]:
    backend = build(case)
    start = case.get("start", 0)
    evaluated = None
    if "load" in case:
        load = backend.load_weights if case.get("weights_only") else backend.load
        load(Path(case["load"]), *([] if case.get("weights_only") else [start]))
        evaluated = backend.evaluate(data(backend, 1, False))[0]
    losses, norms, queue = [], [], None
    for step in range(start + 1, start + case["steps"] + 1):
        result = backend.train_step(data(backend, step, False), step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step == case.get("save_at"):
            queue = save(backend, Path(case["save"]), case.get("background", False))
    if queue is not None:
        queue.maybe_finalize_async_calls(blocking=True)
    report = {"losses": losses, "norms": norms, "evaluated": evaluated}
    report |= {"adam_steps": adam_steps(backend), "padding": padding(backend)}
    leave()
    return report


def save(backend: Any, folder: Path, background: bool) -> Any:
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    request = backend.save(folder, background)
    if not background:
        return None
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    return queue


def adam_steps(backend: Any) -> list[float]:
    from msllm.engine.megatron.optimizer import inner_optimizers

    found = set()
    for inner in inner_optimizers(backend.optimizer):
        found |= {float(state["step"]) for state in inner.state.values() if "step" in state}
    return sorted(found)


def padding(backend: Any) -> tuple[int, float]:
    """How many rows of all ranks' tables pad the vocabulary, and the largest number in them."""
    from megatron.core import parallel_state

    own = []
    for chunk in backend.chunks:
        for name, table in chunk.module.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                first = parallel_state.get_tensor_model_parallel_rank() * len(table)
                own += table[max(0, backend.config.architecture.vocab_size - first) :]
    figures = (len(own), max((float(row.abs().max()) for row in own), default=0.0))
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, figures)
    return sum(rows for rows, _ in everyone), max(largest for _, largest in everyone)


def main() -> None:
    cases, out = (Path(argument) for argument in sys.argv[1:])
    reports = {case["name"]: run(case) for case in json.loads(cases.read_text())}
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(reports))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
