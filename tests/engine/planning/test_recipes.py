"""Every recipe of the catalog, planned by formulas."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from msllm.models.device_models import device_model


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[3] / "scripts" / "plan_recipes.py"
    spec = importlib.util.spec_from_file_location("plan_recipes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_recipes"] = module
    spec.loader.exec_module(module)
    return module


def test_each_recipe_fits_or_has_a_reason(script):
    device = device_model("Ascend910B2")
    verdicts = [script.judge(card, recipe, device) for card, recipe in script.recipes()]
    assert len(verdicts) == 143
    for verdict in verdicts:
        if verdict.reason:
            assert verdict.total is None or verdict.total > 2**30
        else:
            assert 2**30 < verdict.total <= device.memory, verdict.name
    fitting = {verdict.name for verdict in verdicts if not verdict.reason}
    assert len(fitting) >= 78
    assert "deepseek-v3 4096" in fitting
    assert all(v.reason.startswith("needs") for v in verdicts if v.name == "qwq-32b 4096")
