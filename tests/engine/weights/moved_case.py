"""Steps of almost no length from published weights, in bfloat16: which parameters do they change?

Usage: moved_case.py OUT.json LAYOUT FOLDER... A parameter that moves was overwritten by the
optimizer's float32 copy, which then was not a copy of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.engine.megatron.groups import leave
from tests.parity.job import batches, build


def moved(folder: Path, sizes: dict[str, int]) -> list[str]:
    backend = build(folder, {"distributed_optimizer": True, **sizes}, dtype="bf16")
    chunk = backend.chunks[0].module
    before = {name: p.detach().clone() for name, p in chunk.named_parameters()}
    backend.train_step(batches(folder, backend.dp_rank, backend.dp_size), 1)
    after = dict(chunk.named_parameters())
    leave()
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def main() -> None:
    out, sizes = Path(sys.argv[1]), json.loads(sys.argv[2])
    found = {folder: moved(Path(folder), sizes) for folder in sys.argv[3:]}
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
