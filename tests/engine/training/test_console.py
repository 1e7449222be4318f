import fcntl
import io
import os
import pty
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from msllm.config import RunConfig
from msllm.engine.training.console import Console, LiveView, Tail
from msllm.engine.training.events import Event, EventLog
from msllm.engine.training.metrics import StepMetrics
from msllm.engine.training.run_folder import RunFolder
from msllm.engine.training.sinks import open_sinks


def step(number: int, **other: Any) -> StepMetrics:
    figures: dict[str, Any] = {
        "loss": 10.0 / number,
        "lr": 9.8e-5,
        "grad_norm": 0.71,
        "tokens": 512,
        "tokens_per_second": 12840.4,
        "step_time_s": 2.0,
        "memory_bytes": 2**30,
        "mfu": 0.431,
        "tflops_per_device": 161.2,
    }
    return StepMetrics(step=number, **{**figures, **other})


def config(steps: int = 20, model: str = "tiny-qwen3", **log: Any) -> RunConfig:
    return RunConfig.model_validate({"model": model, "train": {"steps": steps}, "log": log})


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def train(run: RunFolder, first: int, last: int, settings: RunConfig) -> str:
    """Write what a worker writes, and return the lines that its own log gets."""
    log = io.StringIO()
    sinks = open_sinks(settings, run, first, log)
    for number in range(first, last + 1):
        sinks.log(step(number))
    sinks.close()
    return log.getvalue()


def test_plain_lines_are_those_of_the_log(tmp_path: Path) -> None:
    stream, settings = io.StringIO(), config(interval=4)
    console = Console(tmp_path, settings, stream)
    console.start()
    log = train(RunFolder(tmp_path), 1, 20, settings)
    console.stop()
    assert stream.getvalue() == log
    assert log.count("\n") == 6


def test_nothing_written_before_the_end_is_lost(tmp_path: Path) -> None:
    """The follower never gets a turn: what is there at `stop` is still shown, in order of time."""
    stream, settings = io.StringIO(), config(2000)
    console = Console(tmp_path, settings, stream)
    console.start()
    train(RunFolder(tmp_path), 1, 2000, settings)
    EventLog(tmp_path / "events.jsonl").write("note", "the end")
    console.stop()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2001
    assert lines[-1] == "the end"


def test_steps_are_shown_while_the_run_goes_on(tmp_path: Path) -> None:
    stream, settings = io.StringIO(), config()
    console = Console(tmp_path, settings, stream)
    console.start()
    try:
        train(RunFolder(tmp_path), 1, 2, settings)
        wait_for(lambda: stream.getvalue().count("\n") == 2)
        train(RunFolder(tmp_path), 3, 3, settings)
        wait_for(lambda: stream.getvalue().count("\n") == 3)
        train(RunFolder(tmp_path), 3, 4, settings)
        wait_for(lambda: stream.getvalue().count("\n") == 5)
    finally:
        console.stop()
    shown = [line.split("/")[0].split()[-1] for line in stream.getvalue().splitlines()]
    assert shown == ["1", "2", "3", "3", "4"]


def test_a_resumed_run_shows_only_its_own_steps(tmp_path: Path) -> None:
    """Steps 1 to 9 are there from an earlier try; resuming at 5 replaces the file."""
    run, settings = RunFolder(tmp_path), config()
    train(run, 1, 9, settings)
    EventLog(run.events).write("note", "an old note")
    stream = io.StringIO()
    console = Console(tmp_path, settings, stream)
    console.start()
    log = train(run, 6, 8, settings)
    console.stop()
    assert stream.getvalue() == log
    assert [line.split("/")[0].split()[-1] for line in log.splitlines()] == ["6", "7", "8"]


def test_events_are_shown_among_steps(tmp_path: Path) -> None:
    run, settings, stream = RunFolder(tmp_path), config(2), io.StringIO()
    console = Console(tmp_path, settings, stream)
    console.start()
    console.phase("starting 2 workers")
    events = EventLog(run.events)
    events.write("phase", "building the model")
    sinks = open_sinks(settings, run, 1, io.StringIO())
    sinks.log(step(1))
    events.write("checkpoint", "saved checkpoint step-00000001", step=1)
    events.write("warning", "slow disk")
    sinks.log(step(2))
    console.stop()
    lines = stream.getvalue().splitlines()
    starts = ["starting 2", "building the", "step 1/2", "saved", "warning: slow disk", "step 2/2"]
    assert [a for a, line in zip(starts, lines, strict=True) if not line.startswith(a)] == []


@pytest.mark.parametrize("junk", ["{broken\n", '{"kind": "unheard of"}\n', "[]\n", '"x"\n'])
def test_lines_that_mean_nothing_are_passed_over(tmp_path: Path, junk: str) -> None:
    stream = io.StringIO()
    console = Console(tmp_path, config(), stream)
    console.start()
    for name in ("events.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_text(junk)
    EventLog(tmp_path / "events.jsonl").write("note", "still here")
    console.stop()
    assert stream.getvalue() == "still here\n"


def test_stopping_twice_or_without_a_start_is_harmless(tmp_path: Path) -> None:
    console = Console(tmp_path, config(), io.StringIO())
    console.stop()
    console = Console(tmp_path, config(), io.StringIO())
    console.start()
    console.stop()
    console.stop()
    assert not [t for t in threading.enumerate() if t.name == "console"]


def test_text_that_the_stream_cannot_show_does_not_stop_the_run(tmp_path: Path) -> None:
    raw = io.BytesIO()
    console = Console(tmp_path, config(), io.TextIOWrapper(raw, encoding="ascii"))
    console.start()
    console.note("模型 ready")
    console.stop()
    assert raw.getvalue() == b"?? ready\n"


def test_a_tail_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    assert list(tail.read()) == []
    with path.open("a") as file:
        for text, expected in (('{"a": ', []), ("1}", []), ('\n{"a": 2}\n', [1, 2]), ("", [])):
            file.write(text)
            file.flush()
            assert [record["a"] for record in tail.read()] == expected
    tail.close()


def test_events_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log, text = EventLog(path), "x" * 3000
    threads = [
        threading.Thread(target=lambda: [log.write("note", text) for _ in range(30)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record["text"] for record in Tail(path).read()] == [text] * 120


def drawn(view: LiveView, console: RichConsole) -> list[str]:
    with console.capture() as capture:
        console.print(view.render())
    return capture.get().splitlines()


def live(
    width: int = 100, steps: int = 200, title: str = "qwen3-8b"
) -> tuple[LiveView, RichConsole]:
    console = RichConsole(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    return LiveView(console, title, steps), console


def test_the_phase_is_shown_before_the_first_step() -> None:
    view, console = live()
    view.event(Event("phase", "starting 8 workers"))
    bar, phase = drawn(view, console)
    assert "qwen3-8b" in bar
    assert "step 0/200  0%" in bar
    assert "eta -" in bar
    assert "starting 8 workers" in phase


def test_a_step_shows_all_figures() -> None:
    view, console = live(width=120)
    view.event(Event("phase", "building the model"))
    view.step(step(50, valid_loss=2.5))
    view.event(Event("checkpoint", "saved", step=40))
    bar, figures, facts = drawn(view, console)
    assert "step 50/200  25%" in bar
    assert "eta 5m 00s" in bar
    for figure in (
        "loss 0.2000",
        "lr 9.80e-05",
        "gnorm 0.71",
        "1.00 GiB",
        "12,840 tok/s",
        "161.20 TFLOP/s/dev",
        "mfu 43.1%",
    ):
        assert figure in figures
    assert "last checkpoint: step 40" in facts
    assert "validation loss 2.5000 at step 50" in facts


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal_also_with_wide_characters(width: int) -> None:
    from rich.cells import cell_len

    view, console = live(width=width, title="通义千问三点五一百二十亿参数专家混合模型预训练")
    view.step(step(7))
    view.event(Event("phase", "正在保存检查点"))
    lines = drawn(view, console)
    assert max(cell_len(line) for line in lines) <= width
    assert "step 7/200" in " ".join(lines)


def test_on_a_real_terminal_it_redraws_and_leaves_the_last_state(tmp_path: Path) -> None:
    """A pseudo-terminal of 100 columns; the reader drains it as a terminal does."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    received: list[bytes] = []

    def drain() -> None:
        while True:
            try:
                data = os.read(parent, 65536)
            except OSError:
                return
            if not data:
                return
            received.append(data)

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    settings = config(20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        patch.delenv("COLUMNS", raising=False)
        with open(child, "w", encoding="utf-8") as terminal:
            console = Console(tmp_path, settings, terminal)
            console.start()
            train(RunFolder(tmp_path), 1, 20, settings)
            EventLog(tmp_path / "events.jsonl").write("warning", "slow disk")
            console.stop()
    reader.join(timeout=10)
    os.close(parent)
    text = b"".join(received).decode()
    assert "step 20/20" in text
    assert "slow disk" in text
    assert "\x1b[?25h" in text, "the cursor is shown again"


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", term)
    stream = Terminal()
    console = Console(tmp_path, config(2), stream)
    console.start()
    log = train(RunFolder(tmp_path), 1, 2, config(2))
    console.stop()
    assert stream.getvalue() == log


def test_watching_needs_no_torch() -> None:
    import subprocess

    code = "import sys, msllm.engine.training.console; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
