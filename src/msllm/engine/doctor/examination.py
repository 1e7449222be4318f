"""Goes through all that a job depends on, in the order in which one thing needs another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msllm.engine.doctor import accelerators, environment, nodes, software, storage
from msllm.engine.doctor.finding import Finding


def examine(
    out: Path, hosts: Sequence[str] = (), env: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Look at software, devices, variables, disks and, if some are named, other nodes.

    Args:
        out: Where runs will be written.
        hosts: The job's other nodes, `HOST` or `HOST:PORT`.
        env: Environment variables.
    """
    yield from software.findings(env)
    yield from accelerators.findings()
    yield from environment.findings(env)
    yield from storage.findings(out, len(hosts))
    yield from nodes.findings(hosts)
