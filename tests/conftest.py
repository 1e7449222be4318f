"""Keeps `support.json`, what msllm says it supports, equal to what tests prove.

A test marked `@pytest.mark.proves("trains", "qwen3")` proves that level for that model type when
it passes (with each of its parameters). A run of all tests fails if the file says anything else;
`pytest --update-support` writes it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from msllm.models.support import LEVELS, REGISTRY

Claim = tuple[str, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("support", "what msllm supports of which models")
    group.addoption(
        "--update-support", action="store_true", help="write what the tests prove to support.json"
    )
    group.addoption(
        "--support-file", type=Path, default=REGISTRY, help="the file to check or write"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "proves(level, model_type): passing proves a level of support of a model type"
    )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SupportRegistry(config), "support-registry")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Send each test's claims with its reports, which xdist brings home from its workers."""
    for item in items:
        for mark in item.iter_markers("proves"):
            level, model_type = mark.args
            if level not in LEVELS:
                raise pytest.UsageError(f"{item.nodeid} proves {level!r}, which is no level")
            item.user_properties.append(("proves", f"{level} {model_type}"))


class SupportRegistry:
    """Collects what passing tests prove, and compares it with the file at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.file: Path = config.getoption("support_file")
        self.outcomes: dict[Claim, list[bool]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ended = report.when == "call" or report.outcome != "passed"
        for name, claim in report.user_properties:
            if name == "proves" and ended:
                level, model_type = claim.split(" ")
                self.outcomes[level, model_type].append(report.outcome == "passed")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.option.collectonly:
            return
        said = json.loads(self.file.read_text())
        shown = self._levels() if self._ran_all() else {**said, **self._levels()}
        shown = {name: level for name, level in shown.items() if level != LEVELS[0]}
        if self.config.getoption("update_support"):
            self.file.write_text(json.dumps(dict(sorted(shown.items())), indent=2) + "\n")
        elif shown != said:
            self._complain(said, shown)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _levels(self) -> dict[str, str]:
        """The highest proven level of each model type whose tests ran."""
        levels = {model_type: LEVELS[0] for _, model_type in self.outcomes}
        for level in LEVELS:
            for (claimed, model_type), passed in self.outcomes.items():
                if claimed == level and all(passed):
                    levels[model_type] = level
        return levels

    def _ran_all(self) -> bool:
        """Whether nothing was left out: what did not run can then prove nothing."""
        option = self.config.option
        narrowed = option.keyword or option.markexpr or getattr(option, "lf", False)
        chosen = self.config.args_source == pytest.Config.ArgsSource.ARGS
        return not narrowed and not chosen and not option.maxfail

    def _complain(self, said: dict[str, str], shown: dict[str, str]) -> None:
        writer = self.config.get_terminal_writer()
        writer.line()
        for name in sorted({*said, *shown}):
            if said.get(name) != shown.get(name):
                was, now = said.get(name, LEVELS[0]), shown.get(name, LEVELS[0])
                writer.line(f"{self.file.name} says {name}: {was}; tests prove {now}", red=True)
        writer.line("pytest --update-support writes what the tests prove", red=True)
