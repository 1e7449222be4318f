"""Parity is lost with any one mistake in a weight map: proof that the proof can fail."""

from __future__ import annotations

import pytest

from tests.parity.case import Case
from tests.parity.moe_cases import EXPERTS, GLM4_MOE, GPT_OSS
from tests.parity.mutations import MUTATIONS

SQUARE = {"head_dim": 16}  # times four heads is hidden_size
KINDS = {
    "expert": ("qwen3_moe", EXPERTS),
    "square": ("qwen3", SQUARE),
    "stacked": ("gpt_oss", GPT_OSS),
    "shared": ("glm4_moe", GLM4_MOE),
}
"""The model that a mistake is made with, by a word of its name; Qwen3 for others."""


def case(mutation: str) -> Case:
    word = next((word for word in KINDS if word in mutation), None)
    model_type, config = ("qwen3", {}) if word is None else KINDS[word]
    return Case(model_type=model_type, config=config, run={"mutation": mutation})


CASES = {name: case(name) for name in MUTATIONS}


@pytest.mark.distributed
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_map_shows(parity, name):
    found = parity.at("one", name)
    assert found.logits > 1e-2
    assert max(found.gradients.values()) > 1e-2
