"""Starts the workers of a run on this machine and stays with them to the end.

torch's elastic launcher does the starting, see `agent`. Here are the parts around it: signals to
this process, the words for what went wrong, and the worker's side (`watch_parent`,
`report_error`). What a worker does is not known here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msllm.config import LaunchConfig
from msllm.engine.failure import report_error
from msllm.engine.placement import Placement, placement, scheduled
from msllm.errors import Interrupted, Problem, RunError

if TYPE_CHECKING:
    from msllm.engine.agent import Agent

__all__ = ["Watcher", "launch", "placement", "report_error", "scheduled", "watch_parent"]

_PR_SET_PDEATHSIG = 1


class Watcher(Protocol):
    """Shows a run to people while it runs."""

    def start(self) -> None:
        """Begin, before the workers start."""

    def stop(self) -> None:
        """End, after they ended."""

    def note(self, text: str) -> None:
        """Show a line."""


def launch(
    module: str,
    arguments: list[str],
    config: LaunchConfig,
    log_dir: Path,
    watcher: Watcher | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `python -m module arguments` once for each device of this machine, to the end.

    Args:
        module: The worker; each finds its place in torchrun's environment variables.
        arguments: Its arguments.
        config: How many processes and machines, and the time that workers get to save.
        log_dir: Folder for `rank_0000.log` and so on: both output streams of each worker.
        watcher: Shows the run meanwhile.
        environment: Further variables for the workers; what this process has set wins.

    Raises:
        InputError: Where this machine stands in the job is not known.
        RunError: A worker failed; its own error is the first problem.
        Interrupted: A stop was asked for, and the workers ended.
    """
    place = placement(os.environ, config)
    from msllm.engine.agent import Agent, RankLogs

    log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="msllm-errors-") as error_dir:
        variables = {**_defaults(config, place), **(environment or {})}
        logs = RankLogs(log_dir.resolve(), Path(error_dir), variables)
        agent = Agent(["-m", module, *arguments], _local(place), config, logs)
        with _watched(watcher):
            lost = _run(agent, watcher)
        _judge(agent, lost)


def watch_parent() -> None:
    """End this worker when its launcher ends, however it ends; no training goes on unseen.

    The kernel does it on Linux (prctl(2), PR_SET_PDEATHSIG); elsewhere a thread looks.
    """
    launcher = int(os.environ.get("MSLLM_LAUNCHER_PID", "0"))
    if not launcher:
        return
    if sys.platform == "linux":
        end_with_parent()
    else:
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it ended before the kernel was told
        os._exit(1)


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        threading.Event().wait(1.0)
    os._exit(1)


def _defaults(config: LaunchConfig, place: Placement) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    variables = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // config.npus))}
    if place.nodes == 1 and sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    return variables


def _local(place: Placement) -> Placement:
    """Give a job on one machine an address that no other machine can reach."""
    if place.nodes > 1:
        return place
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Placement(1, 0, f"127.0.0.1:{port}", place.source)


@contextlib.contextmanager
def _watched(watcher: Watcher | None) -> Iterator[None]:
    if watcher is None:
        yield
        return
    watcher.start()
    try:
        yield
    finally:
        watcher.stop()


def _run(agent: Agent, watcher: Watcher | None) -> BaseException | None:
    """Run the agent in a thread, so that signals are heard even while it waits in C++.

    Returns:
        The exception that ended the agent itself, if any.
    """
    errors: list[BaseException] = []

    def work() -> None:
        try:
            agent.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="agent", daemon=True)
    with _on_signals(lambda: _ask_to_stop(agent, watcher)):
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            if agent.stopping and not agent.started:
                break  # still waiting for the other machines: nothing to end
    return errors[0] if errors else None


def _ask_to_stop(agent: Agent, watcher: Watcher | None) -> None:
    first = agent.stop() == 1
    if watcher is not None:
        watcher.note(
            "stopping: the workers finish the step, save and exit; once more kills them"
            if first
            else "killing the workers"
        )


@contextlib.contextmanager
def _on_signals(act: Callable[[], None]) -> Iterator[None]:
    """Act on SIGINT, SIGTERM and SIGHUP (not under nohup); only the main thread can hear them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup's doing
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, lambda *_: act())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _judge(agent: Agent, lost: BaseException | None) -> None:
    """Raise what the end of the workers means, or return if all is well."""
    problems = [p for failure in agent.failures[:1] for p in failure.describe()]
    if agent.elsewhere is not None:
        problems.insert(0, agent.elsewhere)
    others = ", ".join(str(failure.rank) for failure in agent.failures[1:])
    if others:
        problems.append(Problem(f"after it, rank {others} failed too", str(agent.logs.log_dir)))
    killed = agent.stopping and all(
        f.exit_code is not None and f.exit_code < 0 and not f.problems for f in agent.failures
    )
    if agent.stopping and (killed or not problems) and agent.elsewhere is None:
        if problems or not agent.started:
            what = (
                "the workers were killed" if agent.started else "stopped before the workers began"
            )
            raise Interrupted(f"{what}; what was saved before is kept")
        raise Interrupted("stopped; the workers have saved and ended")
    if problems:
        raise RunError(problems)
    if lost is not None and agent.started:
        raise RunError(f"the launcher failed: {lost}", str(agent.logs.log_dir)) from lost
    if lost is not None:
        raise RunError(
            f"the machines of the job did not find each other: {lost}",
            agent.place.endpoint,
            "see whether every machine was started and can reach this address; "
            "launch.rdzv_timeout is the time they get",
        ) from lost
