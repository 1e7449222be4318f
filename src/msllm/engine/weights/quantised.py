"""Finds which stored tensors make up each logical one, and reads rows of those.

Most are one and the same. 8-bit floats have their scales beside them (`X_scale_inv`), 4-bit ones
are blocks and scales (`X_blocks`, `X_scales`); of both come bfloat16 numbers, no more of them than
the rows that are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msllm.engine.weights import fp8, mxfp4
from msllm.engine.weights.published import Entry
from msllm.errors import InputError, Problem
from msllm.models.weight_map import Run

if TYPE_CHECKING:
    from torch import Tensor

SCALES = "_scale_inv"
BLOCKS_4, SCALES_4 = "_blocks", "_scales"
METHODS = ("fp8", "mxfp4")
SCALE_TYPES = ("F32", "BF16", "F8_E8M0")


class Files(Protocol):
    """Stored tensors, of safetensors or of pickles."""

    folder: Path
    entries: dict[str, Entry]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor."""

    def rows(self, run: Run, columns: tuple[int, int] | None = None) -> Tensor:
        """A run's rows, all columns of them or `(first, count)`, in their own dtype."""


class Form(Protocol):
    """A logical tensor: its shape, its type as safetensors spells it, and how rows are made."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """Its type, "BF16"."""

    def rows(self, files: Files, run: Run, columns: tuple[int, int] | None) -> Tensor:
        """A run's rows."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor that is stored as it is."""

    shape: tuple[int, ...]
    dtype: str

    def rows(self, files: Files, run: Run, columns: tuple[int, int] | None) -> Tensor:
        """A run's rows."""
        return files.rows(run, columns)


@dataclass(frozen=True, slots=True)
class Float8:
    """A matrix, or a stack of them, in E4M3 with a scale a block."""

    shape: tuple[int, ...]
    scales: str
    block: tuple[int, int]
    dtype: str = "BF16"

    def rows(self, files: Files, run: Run, columns: tuple[int, int] | None) -> Tensor:
        """A run's rows, of the stored blocks that they touch."""
        rows = (run.first, (run.count - 1) * run.step + 1)
        box = (rows, columns or (0, self.shape[-2 if run.transposed else -1]))
        found = self._box(files, run, *(box[::-1] if run.transposed else box))
        return (found.t() if run.transposed else found)[:: run.step]

    def _box(
        self, files: Files, run: Run, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Tensor:
        """Dequantise `(first, count)` rows and columns of the stored matrix."""
        (row, row_count), (column, column_count) = rows, columns
        height, size = self.block
        start, end = column // size * size, column + column_count
        top, bottom = row // height, -(-(row + row_count) // height)
        wide = (start, end - start)
        part = files.rows(Run(run.tensor, row, row_count, expert=run.expert), wide)
        scales = files.rows(Run(self.scales, top, bottom - top, expert=run.expert))
        factors = scales[:, start // size : -(-end // size)]
        found = fp8.dequantise(part, factors, row - top * height, self.block)
        return found[:, column - start :]


@dataclass(frozen=True, slots=True)
class Float4:
    """A stack of matrices in MXFP4, stored with rows and columns in turn: `[E, out, in]`.

    The logical tensor is `[E, in, out]`, as the published code has it after unpacking.
    """

    shape: tuple[int, ...]
    blocks: str
    scales: str
    dtype: str = "BF16"

    def rows(self, files: Files, run: Run, columns: tuple[int, int] | None) -> Tensor:
        """A run's rows; those of a transposed run are stored together."""
        if run.transposed:
            found = self._stored(files, run.expert, run.first, run.count, run.step)
            return found if columns is None else found.narrow(1, *columns)
        found = self._stored(files, run.expert, *(columns or (0, self.shape[-1]))).t()
        return found[run.first : run.first + (run.count - 1) * run.step + 1 : run.step]

    def _stored(
        self, files: Files, expert: int | None, first: int, count: int, step: int = 1
    ) -> Tensor:
        parts = (files.rows(Run(n, first, count, step, expert)) for n in (self.blocks, self.scales))
        return mxfp4.dequantise(*parts)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a config says of quantised weights.

    Attributes:
        block: Rows and columns of 8-bit floats that share a scale.
    """

    block: tuple[int, int] = fp8.BLOCK


def settings(config: Mapping[str, Any], where: str) -> Settings:
    """Read `quantization_config`.

    Raises:
        InputError: It is of a kind that is not read, or damaged.
    """
    given = config.get("quantization_config")
    if given is None:
        return Settings()
    method = given.get("quant_method") if isinstance(given, dict) else given
    if not isinstance(given, dict) or method not in METHODS:
        raise InputError(
            f"the weights are quantised by {method!r}",
            f"{where}: quantization_config",
            f"read are {' and '.join(METHODS)}; take the model's weights in bf16",
        )
    block = given.get("weight_block_size") or list(fp8.BLOCK)
    whole = isinstance(block, list | tuple) and all(type(n) is int and n > 0 for n in block)
    if not whole or len(block) != 2:
        hint = "it must be two positive whole numbers, rows and columns"
        raise InputError(f"weight_block_size is {block!r}", f"{where}: quantization_config", hint)
    return Settings((block[0], block[1]))


def forms(files: Files, settings: Settings, problems: list[Problem]) -> dict[str, Form]:
    """The logical tensors by name; what keeps some from being read is added to `problems`."""
    found: dict[str, Form] = {}
    parts: set[str] = set()
    for name, entry in files.entries.items():
        if entry.dtype == "F8_E4M3":
            fault = _scales_fault(files, name, settings.block)
            if fault is not None:
                problems.append(fault)
            found[name] = Float8(entry.shape, name + SCALES, settings.block)
            parts.add(name + SCALES)
        elif name.endswith(BLOCKS_4) and entry.dtype == "U8":
            whole = name.removesuffix(BLOCKS_4)
            fault = _groups_fault(files, whole)
            if fault is not None:
                problems.append(fault)
                continue
            *lead, out, groups, _ = entry.shape
            found[whole] = Float4((*lead, groups * 32, out), name, whole + SCALES_4)
            parts |= {name, whole + SCALES_4}
        else:
            found[name] = Plain(entry.shape, entry.dtype)
    return {name: form for name, form in found.items() if name not in parts}


def _scales_fault(files: Files, name: str, block: tuple[int, int]) -> Problem | None:
    where, scales = str(files.folder), files.entries.get(name + SCALES)
    if scales is None:
        hint = "8-bit numbers mean nothing without: the folder may be incomplete"
        return Problem(f"{name} is stored as F8_E4M3, and {name}{SCALES} is not there", where, hint)
    shape = files.entries[name].shape
    if len(shape) not in (2, 3):
        return Problem(f"{name} is stored as F8_E4M3 and of shape {list(shape)}", where)
    wanted = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    if scales.shape != wanted:
        return Problem(
            f"{name}{SCALES} is {list(scales.shape)}, and {list(wanted)} are needed for "
            f"{list(shape)} in blocks of {block[0]} x {block[1]}",
            where,
            "config.json's quantization_config.weight_block_size gives the blocks' size",
        )
    if scales.dtype not in SCALE_TYPES:
        return Problem(f"{name}{SCALES} is stored as {scales.dtype}", where)
    return None


def _groups_fault(files: Files, name: str) -> Problem | None:
    where, blocks = str(files.folder), files.entries[name + BLOCKS_4]
    scales = files.entries.get(name + SCALES_4)
    if scales is None:
        return Problem(f"{name}{BLOCKS_4} is there, and {name}{SCALES_4} is not", where)
    if len(blocks.shape) not in (3, 4) or blocks.shape[-1] != 16:
        return Problem(f"{name}{BLOCKS_4} is {list(blocks.shape)}: a group has 16 bytes", where)
    if scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
        return Problem(
            f"{name}{SCALES_4} is {list(scales.shape)} of {scales.dtype}, and "
            f"{list(blocks.shape[:-1])} of U8 are needed",
            where,
        )
    return None
