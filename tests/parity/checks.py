"""What a case must show to be called proven."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.parity.case import Case
from tests.parity.report import Differences


def claims(cases: Mapping[str, Case]) -> list[Any]:
    """Parameters of a test over all cases: each at one process and spread, proving its level."""
    return [
        pytest.param(layout, name, marks=pytest.mark.proves(case.level, case.model_type))
        for name, case in cases.items()
        for layout in ("one", "tp2-pp2", *(["tp2-ep2"] if case.has_experts else []))
    ]


def equals_reference(found: Differences) -> None:
    """Hold logits, loss and every weight's gradient to the reference's."""
    assert found.largest_logit > 0.5  # else equality would say little
    assert found.logits < 1e-4
    assert found.loss < 1e-5
    assert {name: far for name, far in found.gradients.items() if not far < 1e-3} == {}
