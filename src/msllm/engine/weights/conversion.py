"""What a conversion reports when it is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done.

    Attributes:
        tensors: How many tensors were written.
        bytes: Their size.
        seconds: How long this run took.
        not_finite: Those with values that are no finite numbers.
        warnings: What is odd, in sentences.
        notes: What is not as it was beside the weights, in sentences.
    """

    tensors: int
    bytes: int
    seconds: float
    not_finite: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
