"""A Megatron `torch_dist` checkpoint -> Hugging Face weights, whatever layout saved it.

Pieces of the checkpoint are read in the order of its files, and their rows go to where they belong
in the new ones; memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msllm.engine.weights import matching, sidecar, transform
from msllm.engine.weights.conversion import Conversion
from msllm.engine.weights.partial import Part, PartialFolder, Progress, check_out
from msllm.engine.weights.published_writer import SHARD_BYTES, Planned, PublishedWriter
from msllm.engine.weights.source import open_weights
from msllm.engine.weights.stored import places
from msllm.engine.weights.torch_dist import Piece, StoredWeights, Written
from msllm.errors import InputError, Problem
from msllm.models.architecture import Architecture
from msllm.models.hf_config import architecture_from_config, read_config
from msllm.models.weight_map import WeightMap, published_shapes

PART_BYTES = 2**30
"""Bytes read between two records of what is done."""


def mcore_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    model: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    strict: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Conversion:
    """Export a checkpoint.

    Args:
        checkpoint: Its folder.
        out: The folder of Hugging Face weights, which is not there yet.
        model: A folder with the model's config.json and tokenizer; None for those that the
            checkpoint keeps.
        dtype: Type of the weights; None for that of the checkpoint.
        shard_bytes: Most bytes in a file.
        strict: Whether values that are not finite are an error.
        progress: Called now and then.

    Raises:
        InputError: The checkpoint is damaged or not that of the model.
        RunError: The disk is full.
    """
    beside = model or sidecar.kept(checkpoint)
    if beside is None:
        raise InputError(
            "the checkpoint does not say which model it is of",
            f"--checkpoint {checkpoint}",
            "give --model, a folder with the model's config.json and tokenizer",
        )
    architecture = architecture_from_config(read_config(beside))
    stored = StoredWeights(checkpoint)
    weights = matching.mapped(architecture, _had_fused_experts(beside, architecture))
    if weights is None:
        raise InputError([matching.unknown(architecture, str(beside))])
    problems = [*_differences(stored, weights, architecture, str(checkpoint)), *check_out(out)]
    if problems:
        raise InputError(problems)
    export = _Export(stored, weights, architecture, dtype)
    partial = PartialFolder(out, export.identity())
    parts = export.parts()
    started = any(partial.record(number) is not None for number in range(len(parts)))
    if not started:
        partial.check_room(sum(tensor.size for tensor in export.planned.values()))
    export.open(partial.path, shard_bytes, started)
    seconds = [0.0]

    def shown(state: Progress) -> None:
        seconds[0] = state.seconds
        if progress is not None:
            progress(state)

    bad = sorted({name for record in partial.run(parts, shown) for name in record})
    if strict and bad:
        partial.discard()
        raise InputError([matching.not_finite(bad, str(checkpoint))])
    notes = sidecar.copy(beside, partial.path, dtype)
    partial.publish()
    return Conversion(
        tensors=len(export.planned),
        bytes=sum(part.size for part in parts),
        seconds=seconds[0],
        not_finite=tuple(bad),
        notes=notes,
    )


def _had_fused_experts(beside: Path, architecture: Architecture) -> bool:
    """Whether the published weights had them: as a checkpoint keeps it, or a folder shows."""
    kept = sidecar.fused_experts(beside)
    if kept is not None:
        return kept
    try:
        return matching.has_fused_experts(open_weights(beside), architecture)
    except InputError:
        return False  # no weights are needed there


def _differences(
    stored: StoredWeights, weights: WeightMap, architecture: Architecture, where: str
) -> Iterator[Problem]:
    """What keeps the checkpoint from being the model's; rows may pad the vocabulary."""
    wanted: dict[str, tuple[int, ...]] = {}
    found_places = places(weights, architecture)
    for name, weight in weights.items():
        place = found_places[name]
        wanted[place.key] = place.sizes + weight.shape
    for key, shape in wanted.items():
        tensor = stored.tensors.get(key)
        if tensor is None:
            yield Problem(f"the model has {key}, and the checkpoint does not", where)
        elif not _fits(tensor.shape, shape):
            theirs, ours = list(tensor.shape), list(shape)
            yield Problem(f"{key} is {theirs} in the checkpoint and {ours} in the model", where)
    for key in stored.tensors.keys() - wanted.keys():
        yield Problem(f"the checkpoint has {key}, and the model does not", where)
    yield from stored.faults()


def _fits(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    padded = len(wanted) == 2 and found[1:] == wanted[1:] and found[0] >= wanted[0]
    return found == wanted or padded


class _Export:
    """What is to be read, and where it goes."""

    def __init__(
        self,
        stored: StoredWeights,
        weights: WeightMap,
        architecture: Architecture,
        dtype: torch.dtype | None,
    ):
        self._stored, self._weights, self._dtype = stored, weights, dtype
        found = places(weights, architecture)
        self._lead = {place.key: len(place.index) for place in found.values()}
        self._names = {(place.key, place.index): name for name, place in found.items()}
        self._writer: PublishedWriter | None = None
        types: dict[str, torch.dtype] = {}
        for name, weight in weights.items():
            held = dtype or stored.tensors[found[name].key].dtype
            for run in weight.runs:
                types[run.tensor] = torch.promote_types(held, types.get(run.tensor, held))
        shapes = published_shapes(weights)
        self.planned = {name: Planned(shape, types[name]) for name, shape in shapes.items()}

    def identity(self) -> dict[str, Any]:
        """Tell this work from any other."""
        index = (self._stored.folder / ".metadata").stat()
        return {
            "to": "hf",
            "from": (str(self._stored.folder.absolute()), index.st_size, index.st_mtime_ns),
            "tensors": [(k, str(t.dtype), t.shape) for k, t in self.planned.items()],
        }

    def open(self, folder: Path, shard_bytes: int, started: bool) -> None:
        """Make the files, or go on in those that an interrupted run has made."""
        self._writer = PublishedWriter(folder, self.planned, shard_bytes, fill=started)

    def parts(self) -> list[Part]:
        """Spread all pieces over parts of the work."""
        parts: list[Part] = []
        held: list[Written] = []
        for piece in self._stored.pieces():
            if held and sum(p.length for p in held) + piece.length > PART_BYTES:
                parts.append(self._part(held))
                held = []
            held.append(piece)
        return [*parts, self._part(held)]

    def _part(self, held: list[Written]) -> Part:
        def do() -> list[str]:
            bad = []
            for written in held:
                values = self._stored.read(written)
                if self._dtype is not None:
                    values = values.to(self._dtype)  # before they are looked at: may overflow
                if not bool(torch.isfinite(values).all()):
                    bad.append(written.piece.key)
                self._place(written.piece, values)
            return bad

        return Part(sum(piece.length for piece in held), do)

    def _place(self, piece: Piece, values: Tensor) -> None:
        """Write a piece's rows to where they belong."""
        lead = self._lead[piece.key]
        numbers = [
            range(offset, offset + size)
            for offset, size in zip(piece.offsets[:lead], piece.sizes[:lead], strict=True)
        ]
        blocks = values.reshape(-1, *piece.sizes[lead:])
        for index, block in zip(product(*numbers), blocks, strict=True):
            self._place_rows(self._names[piece.key, index], piece.offsets[lead:], block)

    def _place_rows(self, name: str, offsets: tuple[int, ...], block: Tensor) -> None:
        assert self._writer is not None
        start = 0
        for run in self._weights[name].cut(offsets[0], len(block)):
            target = transform.rows(self._writer.tensor(run.tensor), run)
            if block.dim() == 2:
                target = target.narrow(1, offsets[1], block.size(1))
            target.copy_(block[start : start + run.count])
            start += run.count
