"""A whole step of each family can be traced on `npu:0`, and calls the operators it should."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.megatron.conftest import free_port
from tests.npu import families
from tests.npu.families import FAMILIES


@pytest.fixture(scope="module")
def traced(npu, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("traced")
    for name in FAMILIES:
        families.write(name, folder)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    out = npu.passes("trace_check.py", str(folder), *FAMILIES, **job, RANK="0", WORLD_SIZE="1")
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_traced(traced, name):
    found = traced[name]
    assert "error" not in found, found["error"]
    assert set(found["calls"]) - families.TORCHS == families.expected_operators(name)
    assert found["fallbacks"] == []
    assert found["devices"] == ["npu:0"]
