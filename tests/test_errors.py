"""Errors: what they say, their exit statuses, the closest name."""

from __future__ import annotations

import pickle

import pytest

from msllm.errors import InputError, Interrupted, MsllmError, Problem, RunError, closest


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("bad"), "bad"),
        (Problem("bad", "--tp 3"), "--tp 3: bad"),
        (Problem("bad", "", "do this"), "bad (do this)"),
        (Problem("bad", "--tp 3", "do this"), "--tp 3: bad (do this)"),
    ],
)
def test_a_problem_in_one_line(problem, text):
    assert str(problem) == text


def test_an_error_holds_its_problems():
    assert InputError("bad", "--x", "y").problems == [Problem("bad", "--x", "y")]
    assert InputError(Problem("bad")).problems == [Problem("bad")]
    both = InputError([Problem("one"), Problem("two", "--b")])
    assert len(both.problems) == 2
    assert str(both) == "one\n--b: two"


def test_exit_statuses_are_the_contracts():
    statuses = [kind("x").exit_status for kind in (MsllmError, RunError, InputError, Interrupted)]
    assert statuses == [1, 1, 2, 130]


def test_errors_travel_between_processes():
    error = RunError([Problem("one", "here", "hint")])
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_the_closest_names_best_first_whatever_the_case():
    names = ["qwen3-8b", "qwen3-0.6b", "Llama3-8B"]
    assert closest("QWEN3-8", names, 1) == ["qwen3-8b"]
    assert closest("llama3-8b", names, 1) == ["Llama3-8B"]
    assert len(closest("zzz", names)) == 3  # always something to offer
    assert closest("x", []) == []
