"""Traces in a process of their own: Megatron-core is adapted there, and this process stays free.

The process is started early, as importing torch and Megatron-core takes seconds, and answers one
request after another: lines of JSON, in `worker`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import IO, Any

from msllm.config import RunConfig
from msllm.engine.planning.records import StageTrace, from_json
from msllm.errors import RunError

WORKER = "msllm.engine.planning.worker"


class Tracer:
    """The process; a context manager that ends it."""

    def __init__(self, kind: str) -> None:
        """Start it for devices of a kind."""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed at the end
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", WORKER, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()  # which closes its pipes
        self._errors.close()

    def stage(self, run: RunConfig, stage: int, imbalance: float = 1.0) -> StageTrace:
        """Trace a stage of a run.

        Raises:
            RunError: The model code failed.
        """
        request = {"run": run.model_dump(mode="json"), "stage": stage, "imbalance": imbalance}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(stage) from None
        answer = self._process.stdout.readline()
        if not answer:
            raise self._failure(stage)
        content: dict[str, Any] = json.loads(answer)
        return from_json(content)

    def _failure(self, stage: int) -> RunError:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        what = lines[-1] if lines else f"it ended with status {self._process.returncode}"
        if os.environ.get("MSLLM_DEBUG", "0") not in ("", "0"):
            what = "\n".join(lines)
        return RunError(
            f"tracing the model failed: {what}",
            f"pipeline stage {stage}",
            "`--debug` shows where; `msllm pretrain --dry-run` estimates by formulas",
        )


class Tracers:
    """Several such processes, for threads that trace at once; a context manager like one."""

    def __init__(self, kind: str, count: int) -> None:
        """Start `count` of them."""
        self._all = [Tracer(kind) for _ in range(count)]
        self._free: queue.SimpleQueue[Tracer] = queue.SimpleQueue()
        for tracer in self._all:
            self._free.put(tracer)

    def __enter__(self) -> Tracers:
        return self

    def __exit__(self, *error: Any) -> None:
        for tracer in self._all:
            tracer.__exit__(*error)

    def stage(self, run: RunConfig, stage: int, imbalance: float = 1.0) -> StageTrace:
        """Trace a stage of a run in the first process that is free, see `Tracer.stage`."""
        tracer = self._free.get()
        try:
            return tracer.stage(run, stage, imbalance)
        finally:
            self._free.put(tracer)
