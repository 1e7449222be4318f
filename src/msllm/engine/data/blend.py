"""Blending of weighted sources: which source gives sample i, and its how-many-eth that is.

The rule is Megatron's: every sample comes from the source that is most behind its share. Shares are
whole numbers out of a period, so the pattern of one period answers for any i without counting from
0, and counts are exact at the end of every period.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm

import numpy as np
from numpy.typing import NDArray

LONGEST_PERIOD = 1_000_000


class Blend:
    """Deterministic blending of `len(weights)` sources.

    Args:
        weights: Positive, not all equal to one in sum; 0.7 and 0.3 as exact fractions give a
            period of 10. A period over a million is rounded to a million.
    """

    def __init__(self, weights: list[Fraction]):
        self.shares = _whole_shares(weights)
        self.period = sum(self.shares)
        self._source, self._turn = _pattern(self.shares)

    def __getitem__(self, sample: int) -> tuple[int, int]:
        """(source, index within that source) of the blend's `sample`."""
        period, place = divmod(sample, self.period)
        source = int(self._source[place])
        return source, period * self.shares[source] + int(self._turn[place])


def _whole_shares(weights: list[Fraction]) -> list[int]:
    """Return the smallest whole numbers in the proportion of `weights`, each at least 1."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = lcm(*(share.denominator for share in shares))
    return [max(1, round(share * min(period, LONGEST_PERIOD))) for share in shares]


def _pattern(shares: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Source and turn of each place in one period.

    In whole numbers: after i samples source d is `shares[d] * i - period * taken[d]` behind; the
    first sample is judged at i = 1, as in Megatron, so that it goes to the largest share.
    """
    period = sum(shares)
    taken = [0] * len(shares)
    source = np.empty(period, dtype=np.int32)
    turn = np.empty(period, dtype=np.int64)
    for place in range(period):
        now = max(place, 1)
        behind = [
            share * now - period * count if count < share else -(period**2)
            for share, count in zip(shares, taken, strict=True)
        ]
        best = behind.index(max(behind))
        source[place], turn[place] = best, taken[best]
        taken[best] += 1
    return source, turn
