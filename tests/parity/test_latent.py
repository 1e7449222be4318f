"""Families with latent attention compute what their references do, spread or not."""

from __future__ import annotations

import pytest

from tests.parity.checks import claims, equals_reference
from tests.parity.latent_cases import CASES

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("layout", "name"), claims(CASES))
def test_logits_loss_and_gradients(parity, layout, name):
    equals_reference(parity.at(layout, name))
