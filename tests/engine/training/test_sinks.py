import io
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from msllm.config import LogConfig, RunConfig
from msllm.engine.training.metrics import StepMetrics, read_metrics
from msllm.engine.training.run_folder import RunFolder
from msllm.engine.training.sinks import (
    JsonlSink,
    PlainLogSink,
    Sinks,
    open_sinks,
    sink_problems,
    tracker_id,
)
from msllm.engine.training.step_line import RemainingTime, duration
from msllm.errors import RunError


def step(number: int, **other: Any) -> StepMetrics:
    figures: dict[str, Any] = {
        "loss": 10.0 / number,
        "lr": 9.8e-5,
        "grad_norm": 0.71,
        "tokens": 512,
        "tokens_per_second": 12840.4,
        "step_time_s": 2.0,
        "memory_bytes": int(41.3 * 2**30),
        "mfu": 0.431,
        "tflops_per_device": 161.2,
    }
    return StepMetrics(step=number, **{**figures, **other})


def config(**log: Any) -> RunConfig:
    return RunConfig.model_validate({"model": "tiny-qwen3", "train": {"steps": 20}, "log": log})


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for number in (1, 2):
        sink.log(step(number))
        assert path.read_bytes().count(b"\n") == number
    sink.close()
    assert json.loads(path.read_text().splitlines()[1])["step"] == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(RunError, match=r"step 7.*No space"):
        sink.log(step(7))
    sink.close()


def lines(*steps: StepMetrics, of: int = 2000, interval: int = 1) -> list[str]:
    stream = io.StringIO()
    sink = PlainLogSink(stream, of, interval)
    for metrics in steps:
        sink.log(metrics)
    sink.close()
    assert not stream.closed
    return stream.getvalue().splitlines()


def test_a_line_says_everything_with_units() -> None:
    (line,) = lines(step(120, loss=2.18341))
    assert (
        line.split()
        == (
            "step 120/2000 loss 2.1834 lr 9.80e-05 gnorm 0.71 41.30 GiB 12,840 tok/s "
            "161.20 TFLOP/s/dev mfu 43.1% eta 1h 02m"
        )
        .replace("step 120", "step  120")
        .split()
    )


def test_lines_are_aligned() -> None:
    rows = lines(
        step(1, loss=11.2345, grad_norm=101.5, tokens_per_second=980.0, mfu=0.021),
        step(1999, loss=0.5, grad_norm=0.0312, tokens_per_second=128400.0, mfu=0.5),
    )
    for word in ("loss", "lr", "gnorm", "GiB", "tok/s", "mfu", "eta"):
        assert len({row.index(word) for row in rows}) == 1, word


def test_small_machines_show_gflops_and_missing_figures_a_dash() -> None:
    (line,) = lines(step(1, tflops_per_device=0.0312, grad_norm=None, mfu=None))
    assert "31.20 GFLOP/s/dev" in line
    assert "gnorm      -" in line
    assert "mfu" not in line


def test_parts_of_the_loss_and_validation_are_shown() -> None:
    (line,) = lines(step(1, loss_parts={"moe_aux": 0.0125}, valid_loss=3.25, skipped=2))
    assert "moe_aux 0.0125" in line
    assert "valid 3.2500" in line
    assert "skipped 2" in line


def test_lines_come_at_the_interval_and_at_both_ends() -> None:
    shown = lines(*(step(n) for n in range(1, 13)), of=12, interval=5)
    assert [int(row.split()[1].split("/")[0]) for row in shown if row.split()[1] != ""] == [
        1,
        5,
        10,
        12,
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (187, "3m 07s"),
        (4320, "1h 12m"),
        (187200, "2d 04h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_remaining_time_forgets_the_warm_up_step() -> None:
    left = RemainingTime(10)
    assert left.after(step(1, step_time_s=100.0)) == pytest.approx(900)
    assert left.after(step(2, step_time_s=1.0)) == pytest.approx(8)
    assert left.after(step(10, step_time_s=1.0)) == 0


class Broken:
    def __init__(self, error: Exception):
        self.error = error
        self.calls = 0

    def log(self, metrics: StepMetrics) -> None:
        self.calls += 1
        raise self.error

    def close(self) -> None:
        raise self.error


class Kept:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def log(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics.step)

    def close(self) -> None:
        self.closed = True


def test_a_tracker_that_fails_is_reported_once_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, kept = Broken(ConnectionError("no network")), Kept()
    sinks = Sinks([broken, kept])
    sinks.log(step(1))
    sinks.log(step(2))
    sinks.close()
    assert kept.steps == [1, 2]
    assert kept.closed
    assert broken.calls == 1
    assert [r.getMessage() for r in caplog.records] == ["Broken stopped at step 1: no network"]


def test_the_run_ends_where_its_own_record_fails() -> None:
    with pytest.raises(RunError):
        Sinks([Broken(RunError("disk full"))]).log(step(1))


def test_closing_closes_all_also_when_one_cannot(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    Sinks([kept, Broken(OSError("gone"))]).close()
    assert kept.closed
    assert "gone" in caplog.text


def test_missing_packages_are_problems_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    asked = LogConfig(tensorboard=True, wandb_project="p", swanlab_project="q")
    problems = sink_problems(asked)
    assert [p.hint for p in problems] == [
        "pip install tensorboard",
        "pip install wandb",
        "pip install swanlab",
    ]
    assert [p.where for p in problems] == [
        "log.tensorboard",
        "log.wandb_project",
        "log.swanlab_project",
    ]
    assert sink_problems(LogConfig()) == []


def test_what_is_installed_is_no_problem() -> None:
    assert sink_problems(LogConfig(tensorboard=True)) == []


def test_optional_packages_are_not_imported_unless_asked(tmp_path: Path) -> None:
    assert "wandb" not in sys.modules
    open_sinks(config(), RunFolder(tmp_path), stream=io.StringIO()).close()
    assert not (tmp_path / "tensorboard").exists()
    assert "wandb" not in sys.modules
    assert "swanlab" not in sys.modules


def test_the_interval_arrives_at_the_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    sinks = open_sinks(config(interval=10), RunFolder(tmp_path), stream=stream)
    for number in range(1, 21):
        sinks.log(step(number))
    sinks.close()
    assert stream.getvalue().count("\n") == 3
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 20


def test_resuming_drops_what_comes_again(tmp_path: Path) -> None:
    for first, last in ((1, 7), (5, 9)):
        sinks = open_sinks(config(), RunFolder(tmp_path), first, io.StringIO())
        for number in range(first, last + 1):
            sinks.log(step(number, loss=float(first)))
        sinks.close()
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert [s.step for s in read] == list(range(1, 10))
    assert [s.loss for s in read] == [1.0] * 4 + [5.0] * 5
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 9


def test_tensorboard_reads_the_curves_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((1, 4), (3, 5)):
        sinks = open_sinks(config(tensorboard=True), RunFolder(tmp_path), first, io.StringIO())
        for number in range(first, last + 1):
            sinks.log(step(number, loss=float(number + first), loss_parts={"moe_aux": 0.5}))
        sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    curve = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert curve == [(1, 2.0), (2, 3.0), (3, 6.0), (4, 7.0), (5, 8.0)]
    assert events.Scalars("train/moe_aux")[0].value == 0.5
    assert "valid/loss" not in events.Tags()["scalars"]


class Recorder(types.ModuleType):
    """Stands for a tracker's package and notes every call."""

    def __init__(self, name: str):
        super().__init__(name)
        self.calls: list[tuple[str, Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_a_tracker_gets_every_step_and_one_id_over_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    package = Recorder(tracker)
    monkeypatch.setitem(sys.modules, tracker, package)
    for first in (1, 3):
        asked = config(**{f"{tracker}_project": "proj"})
        sinks = open_sinks(asked, RunFolder(tmp_path), first, io.StringIO())
        sinks.log(step(first))
        sinks.close()
    names = [name for name, _, _ in package.calls]
    assert names == ["init", "log", "finish"] * 2
    starts = [kwargs for name, _, kwargs in package.calls if name == "init"]
    assert starts[0]["project"] == "proj"
    assert starts[0]["id"] == starts[1]["id"] == tracker_id(RunFolder(tmp_path))
    assert starts[0]["config"]["model"] == "tiny-qwen3"
    logged = [
        (args[0]["train/loss"], kwargs["step"]) for n, args, kwargs in package.calls if n == "log"
    ]
    assert logged == [(10.0, 1), (pytest.approx(10 / 3), 3)]


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_a_tracker_that_cannot_start_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    package = types.ModuleType(tracker)

    def init(**_: Any) -> None:
        raise ConnectionError("not logged in")

    package.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, tracker, package)
    with pytest.raises(RunError, match=f"{tracker} does not start: not logged in") as caught:
        open_sinks(config(**{f"{tracker}_project": "p"}), RunFolder(tmp_path))
    assert f"{tracker} login" in caught.value.problems[0].hint
