"""Models filled from folders, two by two: which parameters of some rank are not the same?

Usage: alike_case.py OUT.json LAYOUT (FOLDER TRUTH)...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.parity.job import build, leave


def parameters(folder: Path, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    backend = build(folder, sizes)
    held = {
        f"{number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(backend.chunks)
        for name, parameter in chunk.named_parameters()
    }
    leave()
    return held


def main() -> None:
    out, sizes = Path(sys.argv[1]), json.loads(sys.argv[2])
    folders = [Path(folder) for folder in sys.argv[3:]]
    different: dict[str, list[str]] = {}
    for folder, truth in zip(folders[::2], folders[1::2], strict=True):
        found, wanted = parameters(folder, sizes), parameters(truth, sizes)
        assert found.keys() == wanted.keys()
        names = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        ranks: list[list[str] | None] = [None] * int(os.environ["WORLD_SIZE"])
        torch.distributed.all_gather_object(ranks, names)
        different[folder.name] = [name for rank in ranks for name in rank or ()]
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(different))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
