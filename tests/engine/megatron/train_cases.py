"""One rank of a test job: trains each case for ten steps and reports losses and norms.

Usage: train_cases.py CASES.json OUT.json, with torchrun's variables in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from groups import leave
from megatron_case import build, data  # tests/engine/megatron is this script's own folder

STEPS = 10


def train(case: dict[str, Any]) -> dict[str, Any]:
    backend = build(case)
    losses, norms, parts = [], [], []
    for step in range(1, STEPS + 1):
        result = backend.train_step(data(backend, step, case.get("masked", False)), step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        parts.append(result.loss_parts)
    evaluated = backend.evaluate(data(backend, 1, False))

    leave()
    return {"losses": losses, "norms": norms, "parts": parts, "evaluated": evaluated}


def main() -> None:
    cases, out = (Path(argument) for argument in sys.argv[1:])
    reports = {case["name"]: train(case) for case in json.loads(cases.read_text())}
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(reports))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
