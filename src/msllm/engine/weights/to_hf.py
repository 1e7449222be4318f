"""A Megatron `torch_dist` checkpoint -> Hugging Face weights, whatever layout saved it.

Pieces of the checkpoint are read in the order of its files, and their rows go to where they belong
in the new ones; memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msllm.engine.weights import matching, recorded_model, sidecar, start, stored_parts
from msllm.engine.weights.conversion import Conversion
from msllm.engine.weights.partial import Part, PartialFolder, Progress, check_out
from msllm.engine.weights.published_writer import SHARD_BYTES, Planned, PublishedWriter
from msllm.engine.weights.sidecar import Beside
from msllm.engine.weights.source import shortened
from msllm.engine.weights.stored import differences
from msllm.engine.weights.stored_parts import StoredParts
from msllm.engine.weights.torch_dist import StoredWeights
from msllm.errors import InputError
from msllm.models.architecture import Architecture
from msllm.models.hf_config import architecture_from_config, read_config
from msllm.models.resolve import resolve_model
from msllm.models.weight_map import WeightMap, published_shapes


def mcore_to_hf(
    checkpoint: Path,
    out: Path,
    *,
    model: str | Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    strict: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Conversion:
    """Export a checkpoint.

    Args:
        checkpoint: Its folder, or that of a run: its newest.
        out: The folder of Hugging Face weights, which is not there yet.
        model: A folder with the model's config.json and tokenizer, or a name in the catalog; None
            for the files that the checkpoint keeps.
        dtype: Type of the weights; None for that of the checkpoint.
        shard_bytes: Most bytes in a file.
        strict: Whether values that are not finite are an error.
        progress: Called now and then.

    Raises:
        InputError: The checkpoint is damaged or not that of the model.
        InputError: The disk is full.
    """
    where = f"--checkpoint {checkpoint}"
    located = start.locate(checkpoint, where)
    if located is None:
        raise InputError(f"{checkpoint} holds Hugging Face weights already", where)
    checkpoint = located
    beside, architecture = _beside(checkpoint, model, where)
    stored = StoredWeights(checkpoint)
    weights = matching.mapped(architecture, beside.fused_experts)
    if weights is None:
        raise InputError([matching.unknown(architecture, where)])
    found = shortened(list(differences(stored, weights, architecture, str(checkpoint))), where)
    problems = [
        *recorded_model.differences(checkpoint, architecture, where),
        *found,
        *check_out(out),
    ]
    if problems:
        raise InputError(problems)
    export = _Export(stored, weights, architecture, dtype)
    with PartialFolder(out, export.identity()) as partial:
        export.open(partial, shard_bytes)
        bad = sorted({name for record in partial.run(export.parts(), progress) for name in record})
        if strict and bad:
            partial.discard()
            raise InputError([matching.not_finite(bad, str(checkpoint))])
        files, notes = sidecar.plain(beside.files, dtype)
        sidecar.write(files, partial.path)
        partial.publish()
    return Conversion(
        tensors=len(export.planned),
        bytes=sum(tensor.size for tensor in export.planned.values()),
        seconds=partial.seconds,
        not_finite=tuple(bad),
        notes=notes,
    )


def _beside(checkpoint: Path, model: str | Path | None, where: str) -> tuple[Beside, Architecture]:
    """The files that go beside the weights, and the shape that the config among them gives."""
    kept = sidecar.kept(checkpoint)
    if model is None:
        if kept is None:
            raise InputError(
                "the checkpoint does not say which model it is of",
                where,
                "give --model, a name in the catalog or a folder with config.json and tokenizer",
            )
        return _read(kept, architecture_from_config(read_config(kept)))
    found = resolve_model(str(model))
    if found.card is None:
        return _read(Path(model).expanduser(), found.architecture)
    if found.architecture is None:
        raise InputError(f"the shape of {found.name} is not known", f"--model {model}")
    files = sidecar.read(kept) if kept else {}
    fused = kept is not None and sidecar.had_fused_experts(kept, found.architecture)
    return Beside(files | {sidecar.CONFIG: sidecar.config_file(found)}, fused), found.architecture


def _read(folder: Path, architecture: Architecture) -> tuple[Beside, Architecture]:
    fused = sidecar.had_fused_experts(folder, architecture)
    return Beside(sidecar.read(folder), fused), architecture


class _Export:
    """What is to be read, and where it goes."""

    def __init__(
        self,
        stored: StoredWeights,
        weights: WeightMap,
        architecture: Architecture,
        dtype: torch.dtype | None,
    ):
        self._stored, self._weights, self._architecture = stored, weights, architecture
        self._pieces = StoredParts(stored, weights, architecture, dtype)
        self._writer: PublishedWriter | None = None
        types: dict[str, torch.dtype] = {}
        for name, weight in weights.items():
            held = dtype or self._pieces.types[name]
            for tensor in (*(run.tensor for run in weight.runs), *weight.copies):
                types[tensor] = torch.promote_types(held, types.get(tensor, held))
        shapes = published_shapes(weights)
        self.planned = {name: Planned(shape, types[name]) for name, shape in shapes.items()}

    def identity(self) -> dict[str, Any]:
        """Tell this work from any other."""
        index = (self._stored.folder / ".metadata").stat()
        return {
            "to": "hf",
            "cut": stored_parts.PART_BYTES,
            "from": (str(self._stored.folder.absolute()), index.st_size, index.st_mtime_ns),
            "model": asdict(self._architecture),
            "tensors": [(k, str(t.dtype), t.shape) for k, t in self.planned.items()],
        }

    def open(self, partial: PartialFolder, shard_bytes: int) -> None:
        """Make the files, or go on in those that an interrupted run has made."""
        self._writer = PublishedWriter.within(partial, self.planned, shard_bytes)

    def parts(self) -> list[Part]:
        """Spread all pieces over parts of the work."""
        return self._pieces.parts(self._place_rows)

    def _place_rows(self, name: str, offsets: tuple[int, ...], block: Tensor) -> None:
        assert self._writer is not None
        weight = self._weights[name]
        for whole in (weight, *weight.duplicates()):
            start = 0
            for run in whole.cut(offsets[0], len(block)):
                rows = block[start : start + run.count]
                self._writer.write(run, rows, offsets[1] if block.dim() == 2 else 0)
                start += run.count
