"""Writes the cases' models once, and runs each layout's job once over those of a file of cases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engine.megatron.conftest import run_ranks
from tests.parity.case import Case
from tests.parity.report import Differences, differences

LAYOUTS = {
    "one": (1, {}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp2-ep2": (4, {"tp": 2, "ep": 2}),
}


class Parity:
    """Compares cases with their references at a layout, all of a layout in one job."""

    def __init__(self, folder: Path, cases: Mapping[str, Case]) -> None:
        self.models, self.cases = folder / "models", cases
        self._out = folder
        self._failed: dict[str, str] = {}

    def model(self, name: str) -> Path:
        """The folder of a case's model."""
        folder = self.models / name
        if not folder.exists():
            self.cases[name].write(folder)
        return folder

    def at(self, layout: str, name: str) -> Differences:
        """What case `name` differs in at `layout`."""
        out, (world, sizes) = self._out / layout, LAYOUTS[layout]
        if not out.exists():
            out.mkdir()
            names = [n for n, case in self.cases.items() if case.has_experts or "ep" not in sizes]
            for each in names:
                self.model(each)
            job = Path(__file__).with_name("job.py")
            arguments = (str(self.models), str(out), json.dumps(sizes), *names)
            try:
                run_ranks(world, job, *arguments)
            except pytest.fail.Exception as error:  # cases before the one that failed are told
                self._failed[layout] = str(error)
        ranks = sorted(out.glob(f"{name}.[0-9].pt"))
        assert len(ranks) == world, self._failed[layout]
        return differences(self.model(name), ranks)


@pytest.fixture(scope="module")
def parity(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Parity:
    """The cases of the test's module, `CASES`."""
    return Parity(tmp_path_factory.mktemp("parity"), request.module.CASES)
