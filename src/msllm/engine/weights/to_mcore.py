"""Hugging Face weights -> a Megatron `torch_dist` checkpoint that any layout reads.

Blocks of rows are read, put in order and written, a few at a time; memory does not grow with the
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from msllm.engine.training import checkpoint_folder
from msllm.engine.training.checkpoint_folder import Manifest
from msllm.engine.weights import matching, sidecar, torch_dist, transform
from msllm.engine.weights.conversion import Conversion
from msllm.engine.weights.partial import Part, PartialFolder, Progress, check_out
from msllm.engine.weights.source import open_weights
from msllm.engine.weights.stored import Place, places
from msllm.engine.weights.torch_dist import Piece, StoredTensor, Written
from msllm.errors import InputError
from msllm.models.architecture import Architecture
from msllm.models.hf_config import architecture_from_config, read_config
from msllm.models.weight_map import Run, Weight, WeightMap, published_shapes

BLOCK_BYTES = 16 * 2**20
"""A piece's size: rows are read in blocks of about as many bytes.

Memory of this size is used again; from 32 MiB on the C library gives it back each time, and fresh
pages cost more than the copy.
"""
PART_BYTES = 2**30
"""A file's size, about; an interrupted conversion goes on behind the last whole one."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A piece, and which rows of which parameter it is."""

    piece: Piece
    name: str
    first: int
    size: int


def hf_to_mcore(
    source: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Conversion:
    """Convert the weights in `source` to a checkpoint `out`.

    Args:
        source: A folder with config.json and weights.
        out: The checkpoint's folder, which is not there yet.
        dtype: Type of the checkpoint's numbers; None for that of the source.
        strict: Whether values that are not finite are an error.
        progress: Called now and then.

    Raises:
        InputError: The source is damaged, does not fit its config, or is of an unknown kind.
        InputError: The disk is full.
    """
    architecture = architecture_from_config(read_config(source))
    problems = matching.check(source, architecture, str(source)) + check_out(out)
    if problems:
        raise InputError(problems)
    source_weights = open_weights(source)
    fused = matching.has_fused_experts(source_weights, architecture)
    weights = matching.mapped(architecture, fused)
    assert weights is not None
    files, notes = sidecar.plain(sidecar.read(source), dtype)
    done = write(
        Work(source_weights, weights, architecture, dtype),
        sidecar.Beside(files, fused),
        out,
        where=str(source),
        strict=strict,
        progress=progress,
    )
    warnings = tuple(matching.warnings(source_weights, architecture))
    return replace(done, warnings=warnings, notes=(*done.notes, *notes))


def write(
    work: Work,
    beside: sidecar.Beside,
    out: Path,
    *,
    where: str,
    strict: bool,
    progress: Callable[[Progress], None] | None,
) -> Conversion:
    """Write a checkpoint `out` of what is read at `where`."""
    with PartialFolder(out, work.identity()) as partial:
        parts = list(work.parts(partial.path))
        partial.check_room(sum(p.size for n, p in enumerate(parts) if partial.record(n) is None))
        records = partial.run(parts, progress)
        not_finite = sorted({name for record in records for name in record["not_finite"]})
        if strict and not_finite:
            partial.discard()
            raise InputError([matching.not_finite(not_finite, where)])
        written = [_written(entry) for record in records for entry in record["written"]]
        torch_dist.finish(partial.path, work.tensors, written)
        sidecar.keep(beside, partial.path)
        manifest = Manifest(
            step=0, architecture=asdict(work.architecture), extra={"weights_only": True}
        )
        partial.publish(lambda folder: checkpoint_folder.seal(folder, manifest))
    return Conversion(
        tensors=len(work.tensors),
        bytes=sum(part.size for part in parts),
        seconds=partial.seconds,
        not_finite=tuple(not_finite),
        notes=work.notes(),
    )


class Rows(Protocol):
    """What rows are read from."""

    @property
    def files(self) -> list[Path]:
        """The files that hold them."""

    def dtype(self, name: str) -> torch.dtype:
        """The type of one of its tensors."""

    def rows(self, run: Run) -> Tensor:
        """Rows of one."""


class Work:
    """What is to be read and written, in blocks.

    Args:
        source: What is read.
        weights: Which rows of it make up each parameter.
        dtype: Type of the numbers written; None for that of the source.
    """

    def __init__(
        self,
        source: Rows,
        weights: WeightMap,
        architecture: Architecture,
        dtype: torch.dtype | None,
    ):
        self._source, self._weights = source, weights
        self.architecture = architecture
        self._places = places(weights, architecture)
        self._types: dict[str, set[torch.dtype]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for name, weight in weights.items():
            place = self._places[name]
            types = self._types.setdefault(place.key, set())  # of layers and experts before, too
            types |= {dtype or source.dtype(run.tensor) for run in weight.runs}
            found = reduce(torch.promote_types, types)
            self.tensors[place.key] = StoredTensor(place.sizes + weight.shape, found)

    def notes(self) -> tuple[str, ...]:
        """Say which tensors are put together of numbers of several types."""
        return tuple(
            f"{key} is stored as {_name(self.tensors[key].dtype)}, "
            f"its parts are {' and '.join(sorted(map(_name, types)))}"
            for key, types in self._types.items()
            if len(types) > 1
        )

    def identity(self) -> dict[str, Any]:
        """Tell this work from any other, also from that on files changed meanwhile."""
        stats = [(str(file.absolute()), file.stat()) for file in self._source.files]
        return {
            "to": "mcore",
            "cut": (PART_BYTES, BLOCK_BYTES),
            "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
            "model": asdict(self.architecture),
            "published": sorted(published_shapes(self._weights)),
            "tensors": sorted((k, str(t.dtype), t.shape) for k, t in self.tensors.items()),
        }

    def parts(self, folder: Path) -> Iterator[Part]:
        """Spread all blocks over files."""
        blocks: list[_Block] = []
        number = 0
        for block in self._blocks():
            if blocks and sum(b.size for b in blocks) + block.size > PART_BYTES:
                yield self._part(folder / f"__{number}_0.distcp", blocks)
                blocks, number = [], number + 1
            blocks.append(block)
        yield self._part(folder / f"__{number}_0.distcp", blocks)

    def _blocks(self) -> Iterator[_Block]:
        for name, weight in self._weights.items():
            place = self._places[name]
            row = self.tensors[place.key].dtype.itemsize * (weight.width or 1)
            # columns of a transposed tensor lie apart: it is read once, whole
            whole = any(run.transposed for run in weight.runs)
            step = weight.rows if whole else max(1, BLOCK_BYTES // row)
            for first in range(0, weight.rows, step):
                count = min(step, weight.rows - first)
                yield _Block(_piece(place, weight, first, count), name, first, count * row)

    def _part(self, path: Path, blocks: list[_Block]) -> Part:
        by_piece = {block.piece: block for block in blocks}

        def do(advance: Callable[[int], None]) -> dict[str, Any]:
            bad: list[str] = []

            def read(piece: Piece) -> Tensor:
                block = by_piece[piece]
                values = self._read(block)
                if not transform.is_finite(values):
                    bad.append(block.name)
                advance(block.size)
                return values

            written = torch_dist.write(path, by_piece, read)
            return {"written": [asdict(done) for done in written], "not_finite": bad}

        return Part(sum(block.size for block in blocks), do, path)

    def _read(self, block: _Block) -> Tensor:
        count = math.prod(block.piece.sizes) // (self._weights[block.name].width or 1)
        dtype = self.tensors[block.piece.key].dtype
        rows = [
            self._source.rows(run).to(dtype)
            for run in self._weights[block.name].cut(block.first, count)
        ]
        return rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _piece(place: Place, weight: Weight, first: int, count: int) -> Piece:
    lead = (1,) * len(place.index)
    if weight.width is None:
        return Piece(place.key, (*place.index, first), (*lead, count))
    return Piece(place.key, (*place.index, first, 0), (*lead, count, weight.width))


def _written(entry: dict[str, Any]) -> Written:
    piece = entry["piece"]
    box = Piece(piece["key"], tuple(piece["offsets"]), tuple(piece["sizes"]))
    return Written(box, entry["file"], entry["offset"], entry["length"])
