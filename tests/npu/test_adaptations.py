"""What Megatron-core and torch need on an NPU: each adaptation is made, and missed where it isn't.

`test_adapt` does the same for the CPU's.
"""

from __future__ import annotations

import pytest

from tests.engine.megatron.conftest import free_port

WITHOUT = {
    "tensor_type_names": "AssertionError",
    "compute_capability": "'NoneType' object is not subscriptable",
}


def job() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0",
            "WORLD_SIZE": "1"}  # fmt: skip


def test_works_with_them(npu):
    npu.passes("adapt_check.py", **job())


@pytest.mark.parametrize("name", WITHOUT)
def test_fails_without_it(npu, name):
    done = npu.check("adapt_check.py", name, **job())
    assert done.returncode != 0
    assert WITHOUT[name] in done.stderr
