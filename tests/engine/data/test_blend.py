from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msllm.engine.data.blend import Blend


@settings(max_examples=80, deadline=None)
@given(shares=st.lists(st.integers(1, 40), min_size=1, max_size=5), periods=st.integers(1, 3))
def test_each_source_gives_its_samples_in_order_and_its_exact_share(shares, periods):
    blend = Blend([Fraction(share) for share in shares])
    counts = [0] * len(shares)
    for i in range(periods * blend.period):
        source, index = blend[i]
        assert index == counts[source]
        counts[source] += 1
        for share, count in zip(shares, counts, strict=True):
            # Never further from the ideal than the number of sources can push it.
            assert abs(count - (i + 1) * share / sum(shares)) < len(shares)
    assert [Fraction(c, sum(counts)) for c in counts] == [Fraction(s, sum(shares)) for s in shares]


@pytest.mark.parametrize(
    "weights", [["0.7", "0.3"], ["0.3", "0.7"], ["3", "1", "2"], ["0.5", "0.25", "0.125", "0.125"]]
)
def test_first_period_is_megatrons_blend(weights):
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    blend = Blend([Fraction(weight) for weight in weights])
    size = blend.period
    source, index = np.zeros(size, np.int16), np.zeros(size, np.int64)
    shares = np.array([float(Fraction(w)) for w in weights])
    helpers.build_blending_indices(source, index, shares / shares.sum(), len(weights), size, False)
    assert [blend[i] for i in range(size)] == list(
        zip(source.tolist(), index.tolist(), strict=True)
    )


def test_any_sample_is_found_without_counting_from_the_start():
    blend = Blend([Fraction("0.7"), Fraction("0.3")])
    assert blend.period == 10
    source, index = blend[10**15 + 3]
    assert index == 10**14 * [7, 3][source] + blend[3][1]


def test_long_fractions_are_rounded_to_a_millionth_and_no_source_is_lost():
    blend = Blend([Fraction("0.33333333"), Fraction("0.66666667"), Fraction("0.00000001")])
    assert blend.period == pytest.approx(1_000_000, abs=2)
    assert blend.shares[2] == 1
