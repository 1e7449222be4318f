"""Megatron's own reader and writer against msllm's converter, at one layout.

Usage: exchange_case.py MODELS OUT LAYOUT CASE... For each case the weights of MODELS/CASE/mcore, a
converted checkpoint, are read by Megatron and compared with those that each rank reads from the
published ones; then Megatron saves them to OUT/CASE. Each rank writes OUT/CASE.RANK.json: the
names of parameters that differ.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import Manifest
from tests.engine.megatron.groups import leave
from tests.parity.job import build


def exchange(model: Path, out: Path, sizes: dict[str, int]) -> list[str]:
    backend = build(model, sizes)
    chunks = [chunk.module for chunk in backend.chunks]
    published = [{n: v.clone() for n, v in c.state_dict().items() if v is not None} for c in chunks]
    with torch.no_grad():
        for chunk in chunks:
            for value in (*chunk.parameters(), *chunk.buffers()):
                value.fill_(7)
    backend.load_weights(model / "mcore")
    differing = [
        name
        for before, chunk in zip(published, chunks, strict=True)
        for name, value in chunk.state_dict().items()
        if value is not None and not torch.equal(before[name], value)
    ]
    if os.environ["RANK"] == "0":
        out.mkdir()
    torch.distributed.barrier()
    backend.save(out)
    torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        checkpoint_folder.seal(out, Manifest(step=0))
    leave()
    return differing


def main() -> None:
    models, out, sizes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    for name in sys.argv[4:]:
        found = exchange(models / name, out / name, sizes)
        (out / f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
