"""Two steps that change nothing, and two evaluations: `python noise_case.py OUT.json FOLDER...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.parity.job import batches, build, leave


def losses(folder: Path) -> dict[str, list[float]]:
    backend = build(folder, {})
    given = batches(folder, 0, 1)
    trained = [backend.train_step(given, step).loss for step in (1, 2)]
    evaluated = [total / tokens for total, tokens in (backend.evaluate(given) for _ in range(2))]
    leave()
    return {"trained": trained, "evaluated": evaluated}


def main() -> None:
    found = {Path(folder).name: losses(Path(folder)) for folder in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
