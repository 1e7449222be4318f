"""Goes through a checkpoint's pieces in the order of its files, in parts that can be gone on from.

Each piece is read once; where its rows belong is the business of who asked.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from msllm.engine.weights import transform
from msllm.engine.weights.partial import Part
from msllm.engine.weights.stored import places
from msllm.engine.weights.torch_dist import Piece, StoredWeights, Written
from msllm.models.architecture import Architecture
from msllm.models.weight_map import WeightMap

PART_BYTES = 2**30
"""Bytes read between two records of what is done."""

PlaceRows = Callable[[str, tuple[int, ...], Tensor], None]
"""Takes a block of a parameter: its name, the block's first row (and column), its values."""


class StoredParts:
    """The pieces of a checkpoint that is known to be the model's; cast, if a type is given."""

    def __init__(
        self,
        stored: StoredWeights,
        weights: WeightMap,
        architecture: Architecture,
        dtype: torch.dtype | None = None,
    ):
        self._stored, self._dtype = stored, dtype
        found = places(weights, architecture)
        self._lead = {place.key: len(place.index) for place in found.values()}
        self._names = {(place.key, place.index): name for name, place in found.items()}
        self.types = {name: stored.tensors[place.key].dtype for name, place in found.items()}

    def parts(self, place: PlaceRows) -> list[Part]:
        """Spread all pieces over parts of the work.

        A part's record lists the stored tensors with values that are no finite numbers.
        """
        parts: list[Part] = []
        held: list[Written] = []
        for piece in self._stored.pieces():
            if held and sum(p.length for p in held) + piece.length > PART_BYTES:
                parts.append(self._part(held, place))
                held = []
            held.append(piece)
        return [*parts, self._part(held, place)]

    def _part(self, held: list[Written], place: PlaceRows) -> Part:
        def do(advance: Callable[[int], None]) -> list[str]:
            bad = []
            for written in held:
                values = self._stored.read(written)
                if self._dtype is not None:
                    values = values.to(self._dtype)  # before they are looked at: may overflow
                if not transform.is_finite(values):
                    bad.append(written.piece.key)
                self._place(written.piece, values, place)
                advance(written.length)
            return bad

        return Part(sum(piece.length for piece in held), do)

    def _place(self, piece: Piece, values: Tensor, place: PlaceRows) -> None:
        """Hand out a piece's blocks, one for each layer or expert."""
        lead = self._lead[piece.key]
        numbers = [
            range(offset, offset + size)
            for offset, size in zip(piece.offsets[:lead], piece.sizes[:lead], strict=True)
        ]
        blocks = values.reshape(-1, *piece.sizes[lead:])
        for index, block in zip(product(*numbers), blocks, strict=True):
            place(self._names[piece.key, index], piece.offsets[lead:], block)
