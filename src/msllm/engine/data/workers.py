"""A function run over many items by several processes, its results in the order of the items.

Each worker has a pipe of its own, so that one that is killed, even while it writes, is seen at once
as the end of its pipe; the standard library's pools share locks, which a killed worker may hold for
ever. A worker whose parent is killed sees the same and ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from msllm.errors import RunError

T = TypeVar("T")
R = TypeVar("R")

SECONDS_TO_END = 1.0


@dataclass(frozen=True)
class _Failure:
    """An exception on its way from a worker."""

    error: Exception


def map_in_order(
    function: Callable[[T], R], items: Iterable[T], workers: int, ahead: int
) -> Generator[tuple[T, R], None, None]:
    """Yield (item, function(item)) for each item, in order.

    Args:
        function: Importable by name, or a partial of such a function.
        items: Read as they are needed.
        workers: Processes.
        ahead: Items taken and not yet yielded, at most.

    Raises:
        RunError: a worker died.
        Exception: whatever `function` raised.
    """
    team = [_Worker(function) for _ in range(workers)]
    try:
        yield from _Schedule(team, iter(items), ahead).run()
    finally:
        for worker in team:
            worker.close()
        for worker in team:
            worker.end()


class _Worker:
    """One process; it has at most one item, so that neither side writes while the other does."""

    def __init__(self, function: Callable[[Any], Any]):
        # spawn: a fork would copy locks that threads of the tokenizer or of pyarrow may hold.
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_work, args=(function, other), daemon=True
        )
        self._process.start()
        other.close()  # the worker's own is then the only one, and ends with it

    def send(self, item: Any) -> None:
        try:
            self.pipe.send(item)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Any:
        try:
            result = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(result, _Failure):
            raise result.error
        return result

    def close(self) -> None:
        self.pipe.close()

    def end(self) -> None:
        self._process.join(SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _died(self) -> RunError:
        self._process.join(SECONDS_TO_END)
        return RunError(
            f"a worker process died (exit status {self._process.exitcode}); nothing was written",
            f"process {self._process.pid}",
            "if the machine ran out of memory, use fewer --workers",
        )


@dataclass
class _Schedule:
    """Which items are where."""

    team: list[_Worker]
    items: Iterator[Any]
    ahead: int
    taken: dict[int, Any] = field(default_factory=dict)
    done: dict[int, Any] = field(default_factory=dict)
    busy: dict[Connection, tuple[_Worker, int]] = field(default_factory=dict)

    def run(self) -> Iterator[tuple[Any, Any]]:
        idle = list(self.team)
        numbered = enumerate(self.items)
        following = 0
        while True:
            while idle and len(self.taken) < self.ahead and (entry := next(numbered, None)):
                self._give(idle.pop(), *entry)
            while following in self.done:
                yield self.taken.pop(following), self.done.pop(following)
                following += 1
            if not self.busy and not self.taken:
                entry = next(numbered, None)
                if entry is None:
                    return
                self._give(idle.pop(), *entry)
            idle += self._collect()

    def _give(self, worker: _Worker, number: int, item: Any) -> None:
        worker.send(item)
        self.taken[number] = item
        self.busy[worker.pipe] = (worker, number)

    def _collect(self) -> list[_Worker]:
        """Wait for a result; return the workers that are idle now."""
        free = []
        for pipe in wait(list(self.busy)):
            assert isinstance(pipe, Connection)
            worker, number = self.busy.pop(pipe)
            self.done[number] = worker.receive()
            free.append(worker)
        return free


def _work(function: Callable[[Any], Any], pipe: Connection) -> None:
    """Answer items until the pipe ends."""
    # One process is one core's worth; threads of the tokenizer would fight over the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches the whole group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result: Any = function(item)
        except Exception as error:
            result = _Failure(error)
        try:
            pipe.send(result)
        except OSError:
            return
