import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from msllm.engine.training.metrics import StepMetrics
from msllm.engine.training.plot import (
    DEFAULT_METRICS,
    QUANTITIES,
    draw_picture,
    load_runs,
    make_panels,
    running_mean,
)
from msllm.engine.training.plot_text import draw_terminal
from msllm.errors import InputError


def step(number: int, **other: Any) -> StepMetrics:
    figures: dict[str, Any] = {
        "loss": 2.0 + 8.0 * math.exp(-number / 20),
        "lr": 1e-4,
        "grad_norm": 0.5,
        "tokens": 1000,
        "tokens_per_second": 500.0,
        "step_time_s": 2.0,
        "memory_bytes": 2**30,
        "mfu": 0.4,
    }
    return StepMetrics(step=number, **{**figures, **other})


def make_run(folder: Path, *steps: StepMetrics) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(s.to_json() + "\n" for s in steps))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", *(step(n) for n in range(1, 61)))


def test_a_run_is_its_folder_or_its_metrics_file(run: Path) -> None:
    for path in (run, run / "metrics.jsonl"):
        (loaded,) = load_runs([path])
        assert loaded.name == "run"
        assert [s.step for s in loaded.steps] == list(range(1, 61))


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, step(1)) for name in ("a/run", "b/run")]
    assert [r.name for r in load_runs(paths)] == ["a/run", "b/run"]


def test_all_bad_runs_are_named_together(tmp_path: Path, run: Path) -> None:
    (tmp_path / "empty").mkdir()
    fresh = make_run(tmp_path / "fresh")
    half = make_run(tmp_path / "half")
    (half / "metrics.jsonl").write_text('{"step": 1, "lo')
    with pytest.raises(InputError) as caught:
        load_runs([run, tmp_path / "empty", tmp_path / "none", fresh, half])
    texts = [p.problem for p in caught.value.problems]
    assert len(texts) == 4
    assert "empty has no metrics.jsonl" in texts[0]
    assert "none does not exist" in texts[1]
    assert "no finished step yet" in texts[2]
    assert "no finished step yet" in texts[3]


GARBAGE = bytes(range(256))


@pytest.mark.parametrize(
    ("lines", "left_out"),
    [
        ([b"{}\n"], "line 3 is damaged and left out"),
        ([b'{"step": 3, "lo\n', b"\n", GARBAGE + b"\n"],
         "3 lines are damaged and left out, the first is line 3"),
        ([b"\0\0\0"], "line 3 is damaged and left out"),
        ([b'{"step": 3, "lo'], ""),
        ([b"\n", b'{"'], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_damaged_lines_are_counted(tmp_path: Path, lines: list[bytes], left_out: str) -> None:
    file = make_run(tmp_path / "r", step(1), step(2)) / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b"".join(lines))
    (loaded,) = load_runs([file])
    assert [s.step for s in loaded.steps] == [1, 2]
    assert loaded.left_out == (f"{file}: {left_out}" if left_out else "")


@pytest.mark.parametrize("content", [GARBAGE, b"\0" * 4096, b"{}\n[]\n", b"\x89PNG\r\n" * 99])
def test_a_file_of_garbage_is_damaged(tmp_path: Path, content: bytes) -> None:
    path = make_run(tmp_path / "r")
    (path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=r"metrics.jsonl is damaged: no line of it can be read"):
        load_runs([path])


def test_curves_are_the_figures_of_the_steps(run: Path) -> None:
    (loaded,) = load_runs([run])
    loss, speed = make_panels([loaded], smooth=1)
    (curve,) = loss.curves
    assert curve.x.tolist() == list(range(1, 61))
    assert curve.y.tolist() == [s.loss for s in loaded.steps]
    assert curve.smooth == pytest.approx(curve.y)
    assert speed.curves[0].y.tolist() == [500.0] * 60
    assert loss.points == ()


@pytest.mark.parametrize("name", QUANTITIES)
def test_every_quantity_can_be_drawn(tmp_path: Path, name: str) -> None:
    path = make_run(tmp_path / "r", *(step(n, valid_loss=3.0) for n in (1, 2, 3)))
    (panel,) = make_panels(load_runs([path]), [name])
    assert np.isfinite(panel.curves[0].y).all()
    draw_picture([panel], tmp_path / "out.png", "r")
    assert draw_terminal([panel]).strip()


def test_tokens_and_time_come_in_a_unit_that_suits(tmp_path: Path, run: Path) -> None:
    (by_tokens,) = make_panels(load_runs([run]), ["loss"], "tokens")
    assert by_tokens.x_label == "tokens"
    assert by_tokens.curves[0].x[-1] == 60_000
    (by_time,) = make_panels(load_runs([run]), ["loss"], "time")
    assert by_time.x_label == "training time (min)"
    assert by_time.curves[0].x[-1] == pytest.approx(2.0)
    long = make_run(tmp_path / "long", *(step(n, consumed_tokens=n * 10**9) for n in (1, 2)))
    (billions,) = make_panels(load_runs([long]), ["loss"], "tokens")
    assert billions.x_label == "tokens (billion)"
    assert billions.curves[0].x.tolist() == [1.0, 2.0]


def test_validation_loss_stands_beside_the_loss(tmp_path: Path) -> None:
    steps = (step(n, valid_loss=4.0 if n == 2 else None) for n in (1, 2, 3))
    (panel,) = make_panels(load_runs([make_run(tmp_path / "r", *steps)]), ["loss"])
    (points,) = panel.points
    assert points.x[np.isfinite(points.y)].tolist() == [2.0]


def test_parts_of_the_loss_can_be_asked_for(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", step(1, loss_parts={"moe_aux": 0.5}))
    (panel,) = make_panels(load_runs([path]), ["moe_aux"])
    assert panel.curves[0].y.tolist() == [0.5]


def test_an_unknown_metric_names_the_closest(run: Path) -> None:
    with pytest.raises(InputError, match=r"no metric tokens_per_secnd.*tokens_per_second"):
        make_panels(load_runs([run]), ["tokens_per_secnd"])


def test_a_metric_that_no_run_has_is_said(run: Path) -> None:
    with pytest.raises(InputError, match="no run has a figure for valid_loss"):
        make_panels(load_runs([run]), ["valid_loss"])


def test_running_mean_by_hand() -> None:
    y = np.array([1.0, 3.0, math.nan, 5.0, 9.0])
    assert running_mean(y, 1) == pytest.approx(y, nan_ok=True)
    assert running_mean(y, 3) == pytest.approx([1.0, 2.0, math.nan, 7.0, 9.0], nan_ok=True)


def test_running_mean_leaves_a_straight_line_straight() -> None:
    line = np.arange(50, dtype=float)
    assert running_mean(line, 11) == pytest.approx(line)


def test_running_mean_takes_noise_away() -> None:
    noise = np.random.default_rng(0).normal(size=2000)
    assert running_mean(noise, 50)[100:-100].std() < noise.std() / 5


def pixels(path: Path) -> np.ndarray:
    import matplotlib.image

    return matplotlib.image.imread(path)


def test_the_picture_shows_the_curve(tmp_path: Path, run: Path) -> None:
    """Where the first run's colour is in the picture, it falls from left to right."""
    out = tmp_path / "sub" / "plot.png"
    draw_picture(make_panels(load_runs([run]), ["loss"]), out, "run")
    head = out.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert (width, height) == (1350, 615)
    image = pixels(out)[: height - 120]
    blue = np.abs(image[:, :, :3] - np.array([0x25, 0x63, 0xEB]) / 255).max(axis=2) < 0.02
    rows, columns = np.nonzero(blue)
    left, right = columns < width // 4, columns > 3 * width // 4
    assert rows[left].min() + 150 < rows[right].min()
    assert [p.name for p in out.parent.iterdir()] == ["plot.png"]


def test_two_runs_have_two_colours(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / n, step(1), step(2)) for n in ("a", "b")]
    draw_picture(make_panels(load_runs(paths)), tmp_path / "two.svg", "2 runs")
    svg = (tmp_path / "two.svg").read_text()
    assert "#2563eb" in svg
    assert "#dc2626" in svg
    assert ">a</text>" in svg.replace("\n", "")
    assert "step" in svg


@pytest.mark.parametrize("name", ["plot.bmp", "plot", "plot.txt"])
def test_a_picture_of_an_unknown_kind_is_refused(tmp_path: Path, run: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        draw_picture(make_panels(load_runs([run])), tmp_path / name, "run")
    assert not (tmp_path / name).exists()


def test_a_picture_that_cannot_be_written_is_an_input_error(tmp_path: Path, run: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        draw_picture(make_panels(load_runs([run])), tmp_path / "file" / "plot.png", "run")


def test_a_name_that_no_font_has_makes_no_noise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    path = make_run(tmp_path / "通义千问", step(1), step(2))
    draw_picture(make_panels(load_runs([path])), tmp_path / "out.png", "通义千问")
    assert not [w for w in recwarn if "Glyph" in str(w.message)]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("colour", [False, True])
def test_text_is_as_wide_as_the_terminal(run: Path, width: int, colour: bool) -> None:
    import re

    text = draw_terminal(make_panels(load_runs([run])), width, colour=colour)
    assert ("\x1b" in text) is colour
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert max(cell_len(line) for line in plain) == width
    assert "loss (nats a token)" in plain[0]
    assert any("500" in line for line in plain)


def test_text_shows_the_curve_falling(run: Path) -> None:
    rows = draw_terminal(make_panels(load_runs([run]), ["loss"]), 60).splitlines()[2:-4]
    drawn = [[i for i, c in enumerate(row) if "⠀" < c <= "⣿"] for row in rows]
    centres = [sum(d) / len(d) for d in drawn if d]
    assert len(centres) > 5
    assert centres == sorted(centres)


def test_ascii_terminals_get_ascii(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / n, *(step(i) for i in range(1, 9))) for n in ("a", "b", "千")]
    text = draw_terminal(make_panels(load_runs(paths)), 70, encoding="ascii")
    assert text.isascii()
    assert "* a   o b   + ?" in text


def test_one_step_and_flat_curves_can_be_drawn(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", step(1))
    panels = make_panels(load_runs([path]), list(DEFAULT_METRICS))
    assert draw_terminal(panels)
    draw_picture(panels, tmp_path / "one.png", "r")


def test_a_run_that_stopped_with_nan_can_be_drawn(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", step(1), step(2), step(3, loss=math.nan))
    panels = make_panels(load_runs([path]))
    assert math.isnan(panels[0].curves[0].y[2])
    assert draw_terminal(panels)
    draw_picture(panels, tmp_path / "nan.png", "r")
