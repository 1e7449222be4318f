import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msllm.engine.training.metrics import (
    StepMetrics,
    Throughput,
    check_finite,
    read_metrics,
    truncate_after,
)
from msllm.errors import InputError, RunError


def step(number: int, **other: Any) -> StepMetrics:
    figures: dict[str, Any] = {
        "loss": 10.0 / number,
        "lr": 1e-4,
        "grad_norm": 0.5,
        "tokens": 512,
        "tokens_per_second": 2048.0,
        "step_time_s": 0.25,
        "memory_bytes": 2**30,
        "mfu": 0.4,
        "time": 1.7e9 + number,
    }
    return StepMetrics(step=number, **{**figures, **other})


def write(path: Path, *steps: int, tail: bytes = b"") -> None:
    path.write_bytes(b"".join(step(s).to_json().encode() + b"\n" for s in steps) + tail)


def test_a_line_has_the_figures_of_the_contract() -> None:
    record = json.loads(step(3, loss_parts={"moe_aux": 0.01}).to_json())
    contract = [
        "step",
        "loss",
        "lr",
        "grad_norm",
        "tokens",
        "tokens_per_second",
        "step_time_s",
        "memory_bytes",
        "mfu",
    ]
    assert set(contract) <= record.keys()
    assert record["step"] == 3
    assert record["loss_parts"] == {"moe_aux": 0.01}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_line_is_json_also_with_figures_that_are_not_finite(value: float) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    line = step(1, loss=value, grad_norm=value, loss_parts={"moe_aux": value}).to_json()
    record = json.loads(line, parse_constant=refuse)
    assert record["loss"] is record["grad_norm"] is record["loss_parts"]["moe_aux"] is None
    assert math.isnan(StepMetrics.from_record(record).loss)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [step(1), step(2, valid_loss=3.0, loss_parts={"moe_aux": 0.5}, mfu=None)]
    path.write_text("".join(s.to_json() + "\n" for s in steps))
    assert read_metrics(path) == steps


def test_keys_of_a_newer_msllm_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({**json.loads(step(1).to_json()), "new_figure": 1}) + "\n")
    assert read_metrics(path) == [step(1)]


def test_speed_by_hand() -> None:
    # 1000 tokens in 2 s are 500 a second; at 6e9 FLOPs each and 4 devices 7.5e11 FLOP/s a device.
    speed = Throughput(flops_per_token=6e9, world_size=4, peak_flops=1.5e12).measure(1000, 2.0)
    assert speed.tokens_per_second == pytest.approx(500)
    assert speed.tflops_per_device == pytest.approx(0.75)
    assert speed.mfu == pytest.approx(0.5)


def test_no_mfu_without_a_peak() -> None:
    assert Throughput(1e9, 1).measure(10, 1.0).mfu is None


def test_a_clock_that_stands_still_divides_by_nothing() -> None:
    assert math.isfinite(Throughput(1e9, 1, 1e12).measure(10, 0.0).tokens_per_second)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_figure_that_is_not_finite_stops_with_step_and_rank(name: str, bad: float) -> None:
    figures = {"loss": 1.0, "grad_norm": 1.0, name: bad}
    with pytest.raises(RunError) as caught:
        check_finite(17, 3, **figures)
    text = str(caught.value)
    assert "step 17" in text
    assert "rank 3" in text
    assert name.replace("_", " ") in text
    assert caught.value.exit_status == 1


def test_finite_and_missing_figures_pass() -> None:
    check_finite(1, 0, loss=2.0, grad_norm=None)


def test_truncation_drops_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4, 5)
    assert truncate_after(path, 3) == 3
    assert [s.step for s in read_metrics(path)] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_truncation_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert truncate_after(tmp_path / "metrics.jsonl", 3) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_truncating_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    before = path.read_bytes()

    def crash(_: int) -> None:
        raise OSError("power cut")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="power cut"):
        truncate_after(path, 1)
    assert path.read_bytes() == before


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.integers(1, 6), cut=st.integers(0, 3000), resume=st.integers(0, 7))
def test_killed_at_any_byte_then_resumed_has_each_step_once(
    tmp_path: Path, steps: int, cut: int, resume: int
) -> None:
    """Cut the file anywhere, resume, train on to the end: lines are 1 .. n, whole and once."""
    path = tmp_path / "metrics.jsonl"
    write(path, *range(1, steps + 1))
    with path.open("r+b") as file:
        file.truncate(min(cut, path.stat().st_size))
    whole = path.read_bytes().count(b"\n")
    resumed_at = min(resume, whole)
    assert truncate_after(path, resumed_at) == resumed_at
    with path.open("ab") as file:
        for number in range(resumed_at + 1, steps + 1):
            file.write(step(number).to_json().encode() + b"\n")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    "tail", [b'{"step": 3, "lo', b"\x00\x00\x00\n", b"[1, 2]\n", b'{"step": "x"}\n', b"\n"]
)
def test_broken_lines_are_passed_over(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, tail=tail)
    assert [s.step for s in read_metrics(path)] == [1, 2]


def test_the_last_line_of_a_step_wins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(step(1, loss=x).to_json() + "\n" for x in (5.0, 4.0)))
    assert [s.loss for s in read_metrics(path)] == [4.0]


@pytest.mark.parametrize("content", [None, '{"step": 1}\n'])
def test_an_unreadable_file_is_an_input_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        read_metrics(path)


def test_every_step_knows_when_it_ended() -> None:
    first = StepMetrics(
        step=1,
        loss=1.0,
        lr=1.0,
        grad_norm=None,
        tokens=1,
        tokens_per_second=1.0,
        step_time_s=1.0,
        memory_bytes=1,
        mfu=None,
    )
    assert first.time == pytest.approx(time.time(), abs=60)
