import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from msllm.cli.plot import plot
from msllm.errors import InputError

app = typer.Typer()
app.command()(plot)


def make_run(folder: Path, steps: int = 20) -> Path:
    folder.mkdir()
    lines = [
        {
            "step": n,
            "loss": 10.0 / n,
            "lr": 1e-4,
            "grad_norm": 1.0,
            "tokens": 64,
            "tokens_per_second": 640.0,
            "step_time_s": 0.1,
            "memory_bytes": 1,
            "mfu": None,
        }
        for n in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def invoke(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=True)


def test_one_run_gets_its_picture_in_its_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    result = invoke(run)
    assert result.exit_code == 0
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "loss (nats a token)" in result.stdout
    assert "tokens/s" in result.stdout
    assert "\x1b" not in result.stdout, "no colours when piped"
    assert f"wrote {run / 'plot.png'}" in result.stderr


def test_lines_that_are_left_out_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{}\n{}\n")
    result = invoke(run)
    assert result.exit_code == 0
    what = "2 lines are damaged and left out, the first is line 21"
    assert f"warning: {run / 'metrics.jsonl'}: {what}\n" in result.stderr
    assert "damaged" not in result.stdout


def test_options_arrive(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    out = tmp_path / "both.svg"
    result = invoke(*runs, "--out", out, "--x", "tokens", "--metric", "lr", "--smooth", 3)
    assert result.exit_code == 0
    svg = out.read_text()
    assert "learning rate" in svg
    assert "tokens" in svg
    assert "nats" not in svg
    assert "* a   o b" in result.stdout


def test_no_terminal_prints_no_drawing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    result = invoke(run, "--no-terminal")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert (run / "plot.png").exists()


def test_several_runs_get_their_picture_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    assert invoke(*runs).exit_code == 0
    assert (tmp_path / "plot.png").exists()


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    result = invoke(make_run(tmp_path / "run"), tmp_path / "none")
    assert isinstance(result.exception, InputError)
    assert result.exception.exit_status == 2
    assert not (tmp_path / "run" / "plot.png").exists()


@pytest.mark.parametrize("args", [["--smooth", "0"], ["--x", "epochs"], []])
def test_wrong_usage_is_exit_2(tmp_path: Path, args: list[str]) -> None:
    runs = [make_run(tmp_path / "run")] if args else []
    assert invoke(*runs, *args).exit_code == 2
