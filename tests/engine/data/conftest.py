from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from msllm.engine.data.indexed import IndexedWriter

WritePrefix = Callable[..., Path]


@pytest.fixture
def write_prefix(tmp_path: Path) -> WritePrefix:
    """Writes an indexed prefix out of documents given as lists of tokens."""

    def write(
        documents: list[list[int]], name: str = "data", dtype: type[np.generic] = np.uint16
    ) -> Path:
        prefix = tmp_path / name
        with IndexedWriter(prefix, dtype) as writer:
            for document in documents:
                writer.append(np.array(document, dtype), np.array([len(document)], np.int32))
        return prefix

    return write
