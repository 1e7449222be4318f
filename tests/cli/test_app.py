"""The entry point: lazy commands, several values an option, errors and exit statuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

from msllm.cli import app, render
from msllm.errors import Interrupted, MsllmError, Problem, RunError


def msllm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "msllm", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=900,
        check=False,
    )


def add(monkeypatch, function):
    """Make a function the command `trial`."""
    monkeypatch.setattr(sys.modules[__name__], "trial", function, raising=False)
    monkeypatch.setitem(sys.modules, "trial_commands", sys.modules[__name__])
    monkeypatch.setitem(app.COMMANDS, "trial", app.Entry("trial_commands", "trial", "A trial."))


def failing(error: BaseException):
    def trial() -> None:
        """A trial."""
        raise error

    return trial


@pytest.mark.parametrize("name", app.COMMANDS)
def test_summaries_are_the_first_lines_of_the_commands_own_help(name):
    command = app.COMMANDS[name].load(name)
    assert (command.help or "").strip().splitlines()[0] == app.COMMANDS[name].summary


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_shows_examples(name):
    command = app.COMMANDS[name].load(name)
    leaves = list(getattr(command, "commands", {}).values()) or [command]
    assert all(f"msllm {name}" in (leaf.epilog or "") for leaf in leaves)


@pytest.mark.parametrize("arguments", [["--help"], ["list-models"], ["--version"]])
def test_quick_commands_import_nothing_heavy(arguments):
    code = (
        "import sys\n"
        "from msllm.cli.app import run\n"
        f"status = run({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'megatron', 'numpy', 'torch_npu'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_names_every_command_and_imports_none():
    code = (
        "import sys\nfrom msllm.cli.app import run, COMMANDS\nrun(['--help'])\n"
        "loaded = {e.module for e in COMMANDS.values()} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in app.COMMANDS:
        assert f"  {name} " in done.stdout


def test_unknown_command_names_the_closest(capsys):
    assert app.run(["pretrian"]) == 2
    assert capsys.readouterr().err == (
        "error:\n  - unknown command 'pretrian'\n    at: msllm\n"
        "    try: did you mean `pretrain`? `msllm --help` lists all\n"
    )


def test_a_command_without_its_group_is_found(capsys):
    assert app.run(["cast", "model"]) == 2
    assert "did you mean `convert cast`?" in capsys.readouterr().err


def test_unknown_option_names_the_closest(capsys):
    assert app.run(["plot", "--metrics", "loss"]) == 2
    error = capsys.readouterr().err
    assert "unknown option --metrics" in error
    assert "did you mean --metric?" in error


def test_missing_and_wrong_values_are_wrong_usage(capsys):
    assert app.run(["preprocess", "--data", "x"]) == 2
    assert "Missing option '--tokenizer'" in capsys.readouterr().err
    assert app.run(["tokenizer", "train", "--vocab-size", "many"]) == 2
    assert "--vocab-size" in capsys.readouterr().err


def test_no_command_shows_the_help_as_wrong_usage(capsys):
    assert app.run([]) == 2
    assert "list-models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--data", "a", "b", "--x", "1"], ["--data", "a", "--data", "b", "--x", "1"]),
        (["--data", "a", "--data", "b"], ["--data", "a", "--data", "b"]),
        (["--x", "1", "--data", "a", "b"], ["--x", "1", "--data", "a", "--data", "b"]),
        (["--data=a", "--x", "1"], ["--data=a", "--x", "1"]),
        (["--data", "0.7:a", "0.3:b"], ["--data", "0.7:a", "--data", "0.3:b"]),
        (["--data", "-", "b", "--", "c", "d"], ["--data", "-", "--data", "b", "--", "c", "d"]),
        (["--data", "--x"], ["--data", "--x"]),
        (["--x", "1", "2"], ["--x", "1", "2"]),
    ],
)
def test_an_option_takes_several_values(given, meant):
    assert app.spread(given, {"--data"}) == meant


def test_several_values_reach_the_command(monkeypatch, capsys):
    def trial(data: list[str] = typer.Option(...), n: int = 1) -> None:
        """A trial."""
        print(data, n)

    add(monkeypatch, trial)
    assert app.run(["trial", "--data", "a", "b", "--n", "3", "--data", "c"]) == 0
    assert capsys.readouterr().out == "['a', 'b', 'c'] 3\n"


def test_arguments_are_not_taken_for_an_options_values():
    plot = app.COMMANDS["plot"].load("plot")
    assert app.repeatable(plot) == set()
    assert app.repeatable(app.COMMANDS["preprocess"].load("preprocess")) == {"--data"}


def test_all_problems_are_shown_together(monkeypatch, capsys):
    error = RunError([Problem("first", "--a 1", "do this"), Problem("second")])
    add(monkeypatch, failing(error))
    assert app.run(["trial"]) == 1
    assert capsys.readouterr().err == (
        "2 errors:\n  - first\n    at: --a 1\n    try: do this\n  - second\n"
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MsllmError("x"), 1),
        (RunError("x"), 1),
        (Interrupted("x"), 130),
        (KeyboardInterrupt(), 130),
        (typer.Exit(1), 1),
        (typer.Exit(0), 0),
        (ValueError("x"), 1),
    ],
)
def test_exit_statuses(monkeypatch, error, status):
    add(monkeypatch, failing(error))
    assert app.run(["trial"]) == status


def test_a_stop_is_not_called_an_error(monkeypatch, capsys):
    add(monkeypatch, failing(Interrupted("all is saved")))
    app.run(["trial"])
    assert capsys.readouterr().err == "stopped:\n  - all is saved\n"


def test_the_shell_completes_commands():
    done = msllm(_MSLLM_COMPLETE="complete_bash", COMP_WORDS="msllm pre", COMP_CWORD="1")
    assert done.stdout.split() == ["preprocess", "pretrain"]


def test_a_defect_says_so_with_its_place(monkeypatch, capsys):
    add(monkeypatch, failing(ZeroDivisionError("what\nhappened")))
    assert app.run(["trial"]) == 1
    error = capsys.readouterr().err
    assert "this is a defect of msllm" in error
    assert "ZeroDivisionError: what happened" in error
    assert "test_app.py" in error
    assert "--debug" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--debug", "trial"], ["trial", "--debug"]])
def test_debug_shows_the_traceback(monkeypatch, capsys, arguments):
    monkeypatch.delenv("MSLLM_DEBUG", raising=False)
    monkeypatch.setenv("MSLLM_DEBUG", "0")
    add(monkeypatch, failing(RunError("bad")))
    assert app.run(arguments) == 1
    assert "Traceback" in capsys.readouterr().err
    assert os.environ["MSLLM_DEBUG"] == "1"


def test_the_environment_asks_for_tracebacks_too(monkeypatch, capsys):
    monkeypatch.setenv("MSLLM_DEBUG", "1")
    add(monkeypatch, failing(RunError("bad")))
    app.run(["trial"])
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_it_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "msllm", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""


def test_as_a_module_it_is_the_same_program():
    done = msllm("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("msllm ")
    assert done.stderr == ""


class Terminal:
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_an_error_is_one_panel(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")
    stream = Terminal()
    render.show_error(MsllmError([Problem("one [1]", "--tp"), Problem("two")]), stream=stream)
    lines = stream.text.splitlines()
    assert lines[0].startswith("╭─ 2 errors")
    assert lines[-1].startswith("╰")
    assert "one [1]" in stream.text
    assert "\x1b[3" not in stream.text  # no colour


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 << 30, "3.00 GiB")]
)
def test_sizes(number, text):
    assert render.size(number) == text
