"""What `msllm download` says; what it does is tested with a hub, in `tests/engine/hub`."""

from __future__ import annotations

from msllm.cli import app, progress
from msllm.engine.hub import download
from msllm.engine.hub.download import Progress, Report


def test_a_log_gets_sizes_and_the_rate(monkeypatch, capsys, tmp_path):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def pretend(name, out, *, source, revision, weights, progress):
        assert (name, source, revision, weights) == ("qwen3-8b", "modelscope", "v1", False)
        for second in range(1, 13):
            now[0] = float(second)
            progress(Progress(3 << 30, 4 << 30, 1 << 30, 8.0))
        return Report("Q/Q", source, "v1", str(out), 9, 4 << 30, 2 << 30, 8.0, ("mind this",))

    monkeypatch.setattr(download, "download", pretend)
    words = ["--out", str(tmp_path), "--source", "modelscope", "--revision", "v1", "--no-weights"]
    assert app.run(["download", "qwen3-8b", *words]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "downloading   75%  3.00 GiB of 4.00 GiB  128.00 MiB/s",
        "note: mind this",
    ]
    assert "4.00 GiB" in out
    assert "256.00 MiB/s" in out
