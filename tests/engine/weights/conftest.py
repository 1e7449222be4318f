"""A tiny model in each format, written once a module, and copies of it for tests to damage."""

from __future__ import annotations

import shutil
from dataclasses import astuple

import pytest

from tests.engine.weights.hostile_case import Folders, write_all


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Folders:
    return write_all(tmp_path_factory.mktemp("made"))


@pytest.fixture
def copies(made, tmp_path) -> Folders:
    """Copies to be damaged."""
    for folder in astuple(made):
        shutil.copytree(folder, tmp_path / folder.name)
    return Folders(*(tmp_path / folder.name for folder in astuple(made)))
