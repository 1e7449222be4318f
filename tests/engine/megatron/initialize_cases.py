"""One rank of a job that builds models and puts their initial weights together.

Usage: initialize_cases.py CASES.json OUT.json FOLDER, with torchrun's variables. Where a rank's
piece lies in the global tensor is asked of Megatron's own `sharded_state_dict`, which knows nothing
of how msllm fills weights. Rank 0 writes a file of global tensors for each case.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from groups import leave
from megatron_case import build


def pieces(backend: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Name, global shape, offset and values of each piece of a weight that this rank holds."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from msllm.engine.megatron import checkpoint

    state = checkpoint._weights(backend, loading=False)
    apply_factories(state)
    found = []

    def visit(value: Any) -> None:
        if isinstance(value, ShardedTensor):
            data = value.data.detach().reshape(value.local_shape).clone()
            for _ in range(value.prepend_axis_num):
                data = data.unsqueeze(0)
            found.append((value.key, value.global_shape, value.global_offset, data))
        elif isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, list):
            for inner in value:
                visit(inner)

    visit(state)
    return found


def together(backend: Any) -> dict[str, torch.Tensor]:
    """Global tensors, from all ranks' pieces; ranks that hold the same must hold it alike."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, pieces(backend))
    whole: dict[str, torch.Tensor] = {}
    for key, shape, offset, data in (piece for rank in everyone for piece in rank):
        full = whole.setdefault(key, torch.full(shape, torch.nan))
        place = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
        assert full[place].isnan().all() or torch.equal(full[place], data), key
        full[place] = data
    assert not any(full.isnan().any() for full in whole.values())
    return whole


def tied(backend: Any) -> list[float]:
    """Sums of both ends' tables: this rank's part of the embedding and of the output layer."""
    named = [p for chunk in backend.chunks for p in chunk.module.named_parameters()]
    own = [float(p.double().abs().sum()) for name, p in named if name in ENDS]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return [value for rank in everyone for value in rank]


ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")


def draw_does_not_depend_on_the_cut() -> str:
    """Any part of a matrix holds the numbers that the whole has there; the error, or nothing."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from msllm.engine.megatron.initialize import Slice, draw

    @settings(max_examples=60, deadline=None, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        length, width = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 9))
        axis = data.draw(st.sampled_from((0, 1)))
        cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=4)) | {length})
        whole = draw(Slice("w", axis, width, ((0, length),)), 3, 0.5)
        runs = [(a, b - a) for a, b in zip([0, *cuts], cuts, strict=False)]
        parts = [draw(Slice("w", axis, width, (run,)), 3, 0.5) for run in runs]
        assert torch.equal(torch.cat(parts, dim=axis), whole)
        chosen = data.draw(st.permutations(runs))[:2]
        some = draw(Slice("w", axis, width, tuple(chosen)), 3, 0.5)
        expected = [whole.narrow(axis, first, count) for first, count in chosen]
        assert torch.equal(some, torch.cat(expected, dim=axis))
        assert not torch.equal(draw(Slice("v", axis, width, ((0, length),)), 3, 0.5), whole)

    try:
        check()
    except Exception as error:
        return repr(error) or "failed"
    return ""


def main() -> None:
    cases, out, folder = (Path(argument) for argument in sys.argv[1:])
    reports = {}
    for case in json.loads(cases.read_text()):
        backend = build(case)
        whole = together(backend)
        reports[case["name"]] = {"tied": tied(backend)}
        if os.environ["RANK"] == "0":
            torch.save(whole, folder / f"{case['name']}.pt")

        leave()
    if os.environ["WORLD_SIZE"] == "1":
        reports["draw"] = {"error": draw_does_not_depend_on_the_cut()}
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(reports))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
