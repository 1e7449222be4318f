"""The elastic agent that watches over this machine's workers.

torch's LocalElasticAgent starts them and finds the other machines. What is added here is what
training needs: a stop signal is forwarded once and workers get time to save; when one worker dies
the rest are killed at once, on every machine, instead of waiting for it in a collective.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from msllm.config import LaunchConfig
from msllm.engine.failure import ERROR_FILE, Failure, read_failure
from msllm.engine.placement import Placement
from msllm.errors import Problem

LOG_VARIABLE = "MSLLM_RANK_LOG"
LAUNCHER_VARIABLE = "MSLLM_LAUNCHER_PID"
# One file for both streams, appended to, so that a resumed run keeps its earlier lines: torch
# would open it twice and let one stream overwrite the other.
WITH_LOG = f'exec "$0" "$@" >>"${LOG_VARIABLE}" 2>&1 </dev/null'

GRACE = 0.3
"""Seconds after a first death in which others may report the true cause."""
LINGER = 5.0
"""Seconds that a worker gets to end by itself once it has reported its error."""
NEWS_INTERVAL = 1.0
"""Seconds between questions to the store about the other machines."""
FAREWELL = 10.0
"""Seconds that the machine with the store waits for the others to read of a failure."""

_FAILED, _SEEN, _STOPPED = "msllm/failed", "msllm/seen", "msllm/stopped"


class RankLogs(LogsSpecs):
    """Names each rank's log `rank_0000.log`, and gives workers their environment."""

    def __init__(self, log_dir: Path, error_dir: Path, environment: Mapping[str, str]):
        super().__init__(str(log_dir))
        self.log_dir, self.error_dir = log_dir, error_dir
        self.environment = dict(environment)

    @property
    def root_log_dir(self) -> str:
        """Folder of the logs."""
        return str(self.log_dir)

    def log(self, rank: int) -> Path:
        """Path of a rank's log."""
        return self.log_dir / f"rank_{rank:04d}.log"

    def error_file(self, local_rank: int) -> Path:
        """Path of the file in which a worker reports its error."""
        return self.error_dir / f"{local_rank}.json"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the workers' environments; the streams themselves go through `WITH_LOG`."""
        for local_rank, env in envs.items():
            for name, value in self.environment.items():
                env.setdefault(name, os.environ.get(name, value))
            env[LAUNCHER_VARIABLE] = str(os.getpid())
            env[LOG_VARIABLE] = str(self.log(int(env["RANK"])))
            env[ERROR_FILE] = str(self.error_file(local_rank))
        inherit = dict.fromkeys(envs, "")
        errors = {local_rank: str(self.error_file(local_rank)) for local_rank in envs}
        return LogsDest(inherit, dict(inherit), {}, {}, errors)


class Agent(LocalElasticAgent):
    """Starts and watches this machine's workers. `run` it in one thread, `stop` it from another."""

    def __init__(
        self,
        command: list[str],
        place: Placement,
        config: LaunchConfig,
        logs: RankLogs,
    ):
        for name in ("torch.distributed.elastic", "torch.distributed.nn"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the launcher says it better
        spec = WorkerSpec(
            role="msllm",
            local_world_size=config.npus,
            entrypoint="/bin/sh",
            args=("-c", WITH_LOG, sys.executable, *command),
            rdzv_handler=get_rendezvous_handler(_rendezvous(place, config)),
            max_restarts=0,
            monitor_interval=0.1,
            master_addr=place.endpoint.rpartition(":")[0].strip("[]"),
            master_port=int(place.endpoint.rpartition(":")[2]),
        )
        super().__init__(spec, logs)
        self.place, self.config, self.logs = place, config, logs
        self.failures: list[Failure] = []
        self.elsewhere: Problem | None = None
        """What failed on another machine."""
        self.stopping = False
        """Whether somebody asked for a stop, here or on another machine."""
        self.started = False
        self._requests = self._handled = 0
        self._deadline = float("inf")
        self._next_news = 0.0
        self._over = False

    def stop(self) -> int:
        """Ask the workers to save and exit; a second time kills them. Counts the requests."""
        self.stopping = True
        self._requests += 1
        return self._requests

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._requests:
            raise RuntimeError("stopped before the workers started")
        pids = super()._start_workers(worker_group)
        self.started = True
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._over:
            self._forward_stops()
            dead = any(process.poll() for process in self._processes().values())
            if dead or self._lingering() or self._bad_news():
                self._end(worker_group)
        return super()._monitor_workers(worker_group)

    def _lingering(self) -> bool:
        """Whether a worker reported its error and does not end: a thread or a collective is stuck.

        Then nobody will ever see its exit, and the others wait for it.
        """
        for local_rank, process in self._processes().items():
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    reported = self.logs.error_file(local_rank).stat().st_mtime
                    if time.time() - reported > LINGER:
                        return True
        return False

    def _processes(self) -> dict[int, Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _forward_stops(self) -> None:
        """Hand a stop on to the workers: SIGTERM first, SIGKILL the second time or too late."""
        if self._requests > self._handled:
            first = self._handled == 0
            self._handled = self._requests
            if first:
                self._deadline = time.monotonic() + self.config.stop_timeout
                self._tell(_STOPPED, "1")
                for process in self._processes().values():
                    if process.poll() is None:
                        # to the worker alone: helpers that write its checkpoint must go on
                        process.send_signal(signal.SIGTERM)
                return
            self._kill()
        elif time.monotonic() > self._deadline:
            self._kill()

    def _end(self, worker_group: WorkerGroup) -> None:
        """Find the cause, tell the other machines, and kill what still runs here."""
        self._over = True
        time.sleep(GRACE)
        self.failures = self._find_failures(worker_group)
        self._kill()
        if self.place.nodes == 1:
            return
        if self.elsewhere is not None:
            self._count_seen()
            return
        first = self.failures[0].describe()[0]
        self._tell(_FAILED, json.dumps({"node": self.place.node_rank, **asdict(first)}))
        self._await_seen()

    def _find_failures(self, worker_group: WorkerGroup) -> list[Failure]:
        """List who failed by itself, the likeliest cause first."""
        found = []
        for local_rank, process in self._processes().items():
            rank = worker_group.workers[local_rank].global_rank
            error_file = self.logs.error_file(local_rank)
            failure = read_failure(rank, process.poll(), self.logs.log(rank), error_file)
            if failure is not None:
                found.append(failure)
        return sorted(found, key=lambda failure: failure.order)

    def _kill(self) -> None:
        """Kill every worker with its helpers."""
        processes = self._processes().values()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # a dead worker may have left helpers
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait(30)

    # --- the other machines, through the store on the first of them ---

    @property
    def _shared(self) -> Any:
        """The store that all machines see."""
        return self._store

    def _bad_news(self) -> bool:
        """Whether another machine has failed or is gone."""
        if self.place.nodes == 1 or time.monotonic() < self._next_news:
            return False
        self._next_news = time.monotonic() + NEWS_INTERVAL
        try:
            if not self._shared.check([_FAILED]):
                return False
            record = json.loads(self._shared.get(_FAILED))
        except Exception:
            self.elsewhere = Problem(
                "lost contact with the first machine of the job",
                self.place.endpoint,
                "its own output says why it ended",
            )
            return True
        node = record.pop("node")
        self.elsewhere = Problem(**{**record, "problem": f"machine {node}: {record['problem']}"})
        return True

    def _tell(self, key: str, value: str) -> None:
        if self.place.nodes > 1:
            try:
                self._shared.set(key, value)
            except Exception:
                logging.getLogger(__name__).debug("the store is gone", exc_info=True)

    def _count_seen(self) -> None:
        try:
            self._shared.add(_SEEN, 1)
        except Exception:
            logging.getLogger(__name__).debug("the store is gone", exc_info=True)

    def _await_seen(self) -> None:
        """Keep the store up until the others have read of the failure."""
        end = time.monotonic() + FAREWELL
        while time.monotonic() < end and self.place.node_rank == 0:
            if self._shared.add(_SEEN, 0) >= self.place.nodes - 1:
                return
            time.sleep(0.1)

    def _exit_barrier(self) -> None:
        if self.place.nodes > 1 and self._was_stopped():
            self.stopping = True
        super()._exit_barrier()

    def _was_stopped(self) -> bool:
        """Whether a stop was asked for on some machine; its workers then agreed with ours."""
        try:
            return bool(self._shared.check([_STOPPED]))
        except Exception:  # the first machine was done earlier and has left
            return False


def _rendezvous(place: Placement, config: LaunchConfig) -> RendezvousParameters:
    return RendezvousParameters(
        backend="static",
        endpoint=place.endpoint,
        run_id="msllm",
        min_nodes=place.nodes,
        max_nodes=place.nodes,
        rank=place.node_rank,
        timeout=config.rdzv_timeout,
    )
