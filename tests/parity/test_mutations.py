"""Parity is lost with any one mistake in a weight map: proof that the proof can fail."""

from __future__ import annotations

import pytest

from tests.parity.case import Case
from tests.parity.moe_cases import EXPERTS
from tests.parity.mutations import MUTATIONS

SQUARE = {"head_dim": 16}  # times four heads is hidden_size

CASES = {
    name: Case(
        model_type="qwen3_moe" if "expert" in name else "qwen3",
        config=(EXPERTS if "expert" in name else {}) | (SQUARE if "square" in name else {}),
        run={"mutation": name},
    )
    for name in MUTATIONS
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_map_shows(parity, name):
    found = parity.at("one", name)
    assert found.logits > 1e-2
    assert max(found.gradients.values()) > 1e-2
