from __future__ import annotations

import os
import random
import signal
import time

import psutil
import pytest

from msllm.engine.data.workers import map_in_order
from msllm.errors import RunError


def square(number: int) -> int:
    time.sleep(random.Random(number).random() / 200)
    return number * number


def end_at_five(number: int) -> bytes:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return b"x" * 1_000_000


def raise_at_five(number: int) -> int:
    if number == 5:
        raise ValueError("five")
    return number


def own_children() -> list[psutil.Process]:
    """Workers only: the standard library's resource tracker stays."""
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


@pytest.mark.parametrize(("workers", "ahead"), [(1, 1), (1, 3), (3, 3), (3, 9)])
def test_results_come_in_order_and_few_items_are_taken_ahead(workers, ahead):
    taken = 0

    def items():
        nonlocal taken
        for number in range(60):
            taken += 1
            yield number

    for expected, (item, result) in enumerate(map_in_order(square, items(), workers, ahead)):
        assert (item, result) == (expected, expected**2)
        assert taken - expected <= ahead + 1
    assert taken == 60
    assert not own_children()
    assert list(map_in_order(square, [], workers, ahead)) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_dies_is_told_at_once_with_its_status(workers):
    with pytest.raises(RunError, match=r"a worker process died \(exit status -9\)"):
        list(map_in_order(end_at_five, range(100), workers, 6))
    assert not own_children()


def test_a_worker_killed_while_it_writes_is_told_too():
    results = map_in_order(end_at_five, range(6, 100), 2, 4)
    next(results)
    # Both are now writing results larger than a pipe holds, which nobody reads.
    for worker in own_children():
        worker.kill()
    started = time.monotonic()
    with pytest.raises(RunError, match="a worker process died"):
        list(results)
    assert time.monotonic() - started < 30


def test_what_the_function_raises_arrives():
    with pytest.raises(ValueError, match="five"):
        list(map_in_order(raise_at_five, range(100), 2, 6))
    assert not own_children()


def test_stopping_early_ends_the_workers():
    results = map_in_order(square, range(10**9), 2, 4)
    assert next(results) == (0, 0)
    results.close()
    assert not own_children()
