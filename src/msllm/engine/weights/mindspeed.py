"""Exchange with MindSpeed-LLM and older Megatron: checkpoints <-> files of each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from msllm.engine.layout import Layout
from msllm.engine.weights import (
    as_parameters,
    matching,
    recorded_model,
    sidecar,
    stored_parts,
    to_mcore,
)
from msllm.engine.weights.conversion import Conversion
from msllm.engine.weights.folder_kind import TRACKER, Folder, Kind, find
from msllm.engine.weights.partial import PartialFolder, Progress, check_out
from msllm.engine.weights.rank_files import RankFiles
from msllm.engine.weights.rank_parts import RankParts
from msllm.engine.weights.rank_weights import RankWeights, as_they_are
from msllm.engine.weights.rank_writer import ITERATION, RankWriter
from msllm.engine.weights.stored import differences
from msllm.engine.weights.stored_parts import StoredParts
from msllm.engine.weights.torch_dist import StoredWeights
from msllm.errors import InputError, Problem
from msllm.models.architecture import Architecture
from msllm.models.hf_config import architecture_from_config, read_config
from msllm.models.weight_map import WeightMap

VOCABULARY_MULTIPLE = 128
"""Megatron's `make-vocab-size-divisible-by`: what each rank's rows are a multiple of."""


def mcore_to_mindspeed(
    checkpoint: Path,
    out: Path,
    layout: Layout,
    *,
    model: Path | None = None,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Conversion:
    """Write a checkpoint's weights as files of each rank.

    Args:
        checkpoint: The folder of a checkpoint, or of a run: its newest.
        out: The folder to be made.
        layout: How MindSpeed-LLM is to spread the model: tp, pp, vpp, ep and etp of it.
        model: A folder with the model's config.json; None for that of the checkpoint.
        vocabulary_multiple: Each tensor parallel rank has a multiple of so many of the
            vocabulary's rows; rows that pad it are zero.
        dtype: Type of the weights; None for that of the checkpoint.
        strict: Whether values that are not finite are an error.
        progress: Called now and then.

    Raises:
        InputError: The checkpoint is damaged or not that of the model, or the layout is not legal.
        InputError: The disk is full.
    """
    where = f"--checkpoint {checkpoint}"
    folder = find(checkpoint, where)
    if folder.kind is not Kind.TORCH_DIST:
        hint = "give a checkpoint of msllm; `msllm convert hf-to-mcore` makes one"
        raise InputError(f"{checkpoint} is {folder.kind.value}", where, hint)
    architecture, weights = _model(folder, model, where)
    stored = StoredWeights(folder.path)
    problems = [
        *recorded_model.differences(folder.path, architecture, where),
        *differences(stored, weights, architecture, where),
        *layout.problems(architecture),
        *_uneven(layout, architecture),
        *check_out(out),
    ]
    if problems:
        raise InputError(problems)
    multiple = vocabulary_multiple * layout.tp
    rows = -(-architecture.vocab_size // multiple) * multiple
    parts = RankParts(weights, architecture, layout, rows)
    pieces = StoredParts(stored, weights, architecture)
    types = {name: dtype or held for name, held in pieces.types.items()}
    index = (folder.path / ".metadata").stat()
    work = {
        "to": "mindspeed",
        "cut": stored_parts.PART_BYTES,
        "from": (str(folder.path.absolute()), index.st_size, index.st_mtime_ns),
        "model": asdict(architecture),
        "layout": asdict(layout),
        "vocabulary": rows,
        "types": sorted((name, str(held)) for name, held in types.items()),
    }
    beside = model if model is not None else as_parameters.config_folder(folder)
    return _write(parts, pieces, types, work, out, beside, strict, progress)


def _write(
    parts: RankParts,
    pieces: StoredParts,
    types: dict[str, torch.dtype],
    work: dict[str, Any],
    out: Path,
    beside: Path | None,
    strict: bool,
    progress: Callable[[Progress], None] | None,
) -> Conversion:
    parts.check()
    files = {} if beside is None else sidecar.read(beside)
    with PartialFolder(out, work) as partial:
        writer = RankWriter(partial.path / f"iter_{ITERATION:07d}", parts, types)
        partial.prepare(writer.bytes, writer.make)
        writer.open()
        jobs = pieces.parts(writer.place)
        bad = sorted({name for record in partial.run(jobs, progress) for name in record})
        if strict and bad:
            partial.discard()
            raise InputError([matching.not_finite(bad, str(out))])
        (partial.path / TRACKER).write_text(str(ITERATION))
        if beside is not None:
            sidecar.write(files, partial.path / sidecar.FOLDER)
        partial.publish()
    tensors = sum(1 for rank in parts.ranks for _ in parts.held(rank))
    return Conversion(tensors, writer.bytes, partial.seconds, tuple(bad))


def mindspeed_to_mcore(
    checkpoint: Path,
    out: Path,
    *,
    model: Path | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Conversion:
    """Put files of ranks together to a checkpoint; the layout is read from the files.

    Args:
        checkpoint: The folder with the tracker file, or an iteration's.
        out: The checkpoint's folder, which is not there yet.
        model: A folder with the model's config.json and tokenizer; None for those that
            `mcore_to_mindspeed` kept.
        dtype: Type of the checkpoint's numbers; None for that of the source.
        strict: Whether values that are not finite are an error.
        progress: Called now and then.

    Raises:
        InputError: Files are missing, damaged, or not those of the model.
        InputError: The disk is full.
    """
    where = f"--checkpoint {checkpoint}"
    folder = find(checkpoint, where)
    if folder.kind is not Kind.RANKS:
        hint = "give a folder with mp_rank_00 and others, or with one of such"
        raise InputError(f"{checkpoint} is {folder.kind.value}", where, hint)
    architecture, weights = _model(folder, model, where)
    problems = check_out(out)
    if problems:
        raise InputError(problems)
    held = RankWeights(RankFiles(folder.path), weights, architecture)
    beside = model if model is not None else as_parameters.config_folder(folder)
    assert beside is not None
    files, notes = sidecar.plain(sidecar.read(beside), dtype)
    done = to_mcore.write(
        to_mcore.Work(held, as_they_are(weights), architecture, dtype),
        sidecar.Beside(files, sidecar.had_fused_experts(beside, architecture)),
        out,
        where=where,
        strict=strict,
        progress=progress,
    )
    return replace(done, warnings=held.warnings, notes=(*done.notes, *notes))


def _model(folder: Folder, model: Path | None, where: str) -> tuple[Architecture, WeightMap]:
    """The model that a folder's weights are of."""
    if model is not None:
        architecture = architecture_from_config(read_config(model))
    else:
        found = as_parameters.architecture_of(folder)
        if found is None:
            raise InputError(
                "the checkpoint does not say which model it is of",
                where,
                "give --model, a folder with the model's config.json and tokenizer",
            )
        architecture = found
    weights = matching.mapped(architecture)
    if weights is None:
        raise InputError([matching.unknown(architecture, where)])
    return architecture, weights


def _uneven(layout: Layout, architecture: Architecture) -> list[Problem]:
    """What MindSpeed-LLM asks of a layout beyond what Megatron does here."""
    found = []
    layers, chunks = architecture.num_layers, layout.num_chunks
    if layers % chunks:
        found.append(
            Problem(
                f"{chunks} pipeline chunks do not divide the {layers} layers",
                "--pp --vpp",
                f"pp x vpp must divide {layers}",
            )
        )
    if layout.etp not in (1, layout.tp):
        found.append(
            Problem(
                f"expert tensor parallel size {layout.etp} has no files of its own",
                f"--etp {layout.etp}",
                f"use 1 or that of --tp, {layout.tp}",
            )
        )
    return found
