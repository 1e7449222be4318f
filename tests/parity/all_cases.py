"""The tiny models of all families, by name."""

from __future__ import annotations

from tests.parity import dense_cases, latent_cases, moe_cases

CASES = {**dense_cases.CASES, **moe_cases.CASES, **latent_cases.CASES}
